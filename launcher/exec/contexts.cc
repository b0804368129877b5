#include "launcher/exec/contexts.h"

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/json_depth.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "job/spec/nearest.h"
#include "job/spec/values.h"

namespace gtrain::exec {
namespace {

constexpr size_t kContextsBytesMax = 1 << 20;

std::string Env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<Contexts> ParseContexts(const std::string& text, const std::string& path) {
  const nlohmann::json root = nlohmann::json::parse(ShallowJson(text), nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a JSON object; repair or remove it"));
  }
  Contexts out;
  out.current = TextOf(root, "current");
  const auto contexts = root.find("contexts");
  if (contexts == root.end() || !contexts->is_object()) return out;
  for (const auto& [name, value] : contexts->items()) {
    if (!value.is_object()) continue;
    out.contexts.push_back({name, TextOf(value, "dir"), TextOf(value, "endpoint"),
                            TextOf(value, "head_public_key"), TextOf(value, "key_file")});
  }
  return out;
}

absl::Status WriteContexts(const Contexts& contexts) {
  GT_ASSIGN_OR_RETURN(const std::string path, ContextsPath());
  nlohmann::json all = nlohmann::json::object();
  for (const Context& c : contexts.contexts) {
    nlohmann::json one = nlohmann::json::object();
    if (!c.dir.empty()) one["dir"] = c.dir;
    if (!c.endpoint.empty()) one["endpoint"] = c.endpoint;
    if (!c.head_public_key.empty()) one["head_public_key"] = c.head_public_key;
    if (!c.key_file.empty()) one["key_file"] = c.key_file;
    all[c.name] = one;
  }
  const nlohmann::json root = {{"current", contexts.current}, {"contexts", all}};
  GT_RETURN_IF_ERROR(MakeDirs(path.substr(0, path.rfind('/'))));
  return WriteFileDurable(path, root.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n",
                          0600);
}

}  // namespace

absl::StatusOr<std::string> ContextsPath() {
  const std::string config = Env("XDG_CONFIG_HOME");
  if (!config.empty()) return config + "/gtrain/contexts.json";
  const std::string home = Env("HOME");
  if (home.empty()) {
    return absl::FailedPreconditionError(
        "there is no directory for the list of contexts: neither XDG_CONFIG_HOME nor HOME names one. Set one "
        "of them to an absolute path: XDG_CONFIG_HOME=/DIR gtrain ...");
  }
  return home + "/.config/gtrain/contexts.json";
}

absl::StatusOr<Contexts> ReadContexts() {
  GT_ASSIGN_OR_RETURN(const std::string path, ContextsPath());
  const absl::StatusOr<std::string> text = ReadFile(path, kContextsBytesMax);
  if (absl::IsNotFound(text.status())) return Contexts();
  if (!text.ok()) return text.status();
  return ParseContexts(*text, path);
}

absl::StatusOr<Context> FindContext(const std::string& name) {
  GT_ASSIGN_OR_RETURN(const Contexts contexts, ReadContexts());
  std::vector<std::string> names;
  for (const Context& context : contexts.contexts) {
    if (context.name == name) return context;
    names.push_back(context.name);
  }
  const std::string nearest = spec::Nearest(name, names);
  return absl::InvalidArgumentError(absl::StrCat(
      "no context ", spec::Shown(name), nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?"),
      names.empty() ? "; there are none yet. `gtrain head --init --context NAME` makes one"
                    : absl::StrCat(". There are: ", absl::StrJoin(names, ", "))));
}

absl::Status SaveContext(const Context& context, MakeCurrent make_current) {
  GT_ASSIGN_OR_RETURN(Contexts contexts, ReadContexts());
  if (make_current == MakeCurrent::kYes) contexts.current = context.name;
  std::erase_if(contexts.contexts, [&](const Context& c) { return c.name == context.name; });
  contexts.contexts.push_back(context);
  return WriteContexts(contexts);
}

absl::Status UseLocalContext() {
  GT_ASSIGN_OR_RETURN(Contexts contexts, ReadContexts());
  contexts.current.clear();
  return WriteContexts(contexts);
}

}  // namespace gtrain::exec
