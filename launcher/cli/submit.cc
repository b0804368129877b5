// A job as a person gives it goes to the head.
#include "launcher/cli/submit.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/path.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "job/spec/parse.h"
#include "job/spec/print.h"
#include "job/spec/words.h"
#include "job/spec/yaml_tree.h"
#include "launcher/cli/job_input.h"
#include "launcher/cli/resume.h"
#include "launcher/cli/terminal.h"
#include "launcher/exec/local_secrets.h"
#include "runtime/agent/node.h"
#include "runtime/control/control_client.h"
#include "runtime/core/agent/rank_environment.h"

namespace gtrain::cli {
namespace {

constexpr size_t kEnvBytesMax = 512 << 10;

// Variables that a rank must not inherit: those that gtrain sets itself, and those that would make it part of
// another launcher's job.
bool NeverInherited(absl::string_view name) {
  static const std::set<absl::string_view> kNames = {"RANK",        "LOCAL_RANK",
                                                     "WORLD_SIZE",  "LOCAL_WORLD_SIZE",
                                                     "GROUP_RANK",  "GROUP_WORLD_SIZE",
                                                     "NODE_RANK",   "ROLE_RANK",
                                                     "ROLE_NAME",   "ROLE_WORLD_SIZE",
                                                     "MASTER_ADDR", "MASTER_PORT",
                                                     "_",           "SHLVL",
                                                     "PWD",         "OLDPWD"};
  return kNames.count(name) != 0 || absl::StartsWith(name, "TORCHELASTIC_") ||
         absl::StartsWith(name, "OMPI_") || absl::StartsWith(name, "PMI") ||
         (absl::StartsWith(name, "GTRAIN_") && name.find("E2E") == absl::string_view::npos &&
          !spec::IsUsersGtrainVariable(name)) ||
         absl::StartsWith(name, "BASH_FUNC_") || !spec::IsEnvName(name);
}

struct Inherited {
  std::map<std::string, std::string> env;
  std::vector<std::string> left_out;  // names that look like secrets
};

absl::StatusOr<Inherited> InheritedEnv(const spec::JobSpec& spec, bool local) {
  using Kind = spec::InheritEnv::Kind;
  const Kind kind = spec.inherit_env.kind;
  const bool all = kind == Kind::kAll || (kind == Kind::kDefault && local);
  const std::set<std::string> listed(spec.inherit_env.names.begin(), spec.inherit_env.names.end());
  std::set<std::string> secrets;  // which get to the ranks in another way
  for (const auto& [name, reference] : spec.secrets) secrets.insert({name, reference.env});
  Inherited out;
  size_t bytes = 0;
  for (const auto& [name, value] : Environment()) {
    if (kind == Kind::kList ? listed.count(name) == 0 : !all || NeverInherited(name)) continue;
    if (spec.env.count(name) != 0 || secrets.count(name) != 0) continue;
    // Their values must not get into the cluster's records (fault J11).
    if (spec::IsNamedLikeSecret(name) || !spec::LooksLikeSecret(value).empty()) {
      out.left_out.push_back(name);
      continue;
    }
    bytes += name.size() + value.size() + 2;
    out.env.emplace(name, value);
  }
  if (bytes > kEnvBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the environment is larger than ", kEnvBytesMax >> 10,
                     " KiB; name what the job needs: inherit_env: [PATH, HOME, ...]"));
  }
  return out;
}

// The least number of ranks that a job on one machine needs.
size_t RanksHere(const spec::JobSpec& spec) {
  if (!spec.nodes) return static_cast<size_t>(spec.ranks.value_or(spec::Range{}).min);
  return static_cast<size_t>(spec.ranks_per_node.value_or(1));
}

// On the machine that will run it, a missing program or folder is an error now and not of every rank later,
// and so are more ranks than it holds.
absl::Status CheckHere(const spec::JobSpec& spec) {
  if (const std::string why = agent::TooManyRanks(RanksHere(spec)); !why.empty())
    return absl::InvalidArgumentError(why);
  struct stat info {};
  if (!spec.workdir.empty() && (stat(spec.workdir.c_str(), &info) != 0 || !S_ISDIR(info.st_mode))) {
    return absl::InvalidArgumentError(absl::StrCat("the workdir ", spec.workdir, " is not a directory"));
  }
  if (spec.run.empty() || !absl::StrContains(spec.run[0], '/')) return absl::OkStatus();
  const std::string program = JoinPath(spec.workdir, spec.run[0]);
  if (stat(program.c_str(), &info) != 0)
    return absl::InvalidArgumentError(absl::StrCat("the program ", program, " does not exist"));
  if (!S_ISREG(info.st_mode) || access(program.c_str(), X_OK) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the program ", program, " is not executable; try: chmod +x ", program));
  }
  return absl::OkStatus();
}

// Whether the ranks' directories can be made below it, as each of them would find out.
absl::Status CheckCanBeMade(const std::string& folder) {
  std::error_code error;
  std::filesystem::path there(folder);
  while (!there.empty() && there != there.root_path() && !std::filesystem::exists(there, error))
    there = there.parent_path();
  if (access(there.c_str(), W_OK | X_OK) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the run directory of the job cannot be made in ", folder,
                                                 ": ", there.string(), ": ", strerror(errno),
                                                 ". Choose another place: --run-dir DIR"));
}

constexpr absl::Duration kSubmitPatience = absl::Seconds(30);
constexpr absl::Duration kOwnLook = absl::Milliseconds(500);  // then see whether the head lives; doubled

// The local head may end itself as idle in the moment before our submit arrives; the same id is sent to its
// successor. `refused`: it was answered, with no.
absl::StatusOr<std::string> Submit(Cluster& cluster, const core::ClientSubmit& submit, bool* refused) {
  const RealClock clock;
  const Instant deadline = clock.Now() + kSubmitPatience;
  core::ClientRequest request;
  request.id = net::NewRequestId();
  request.body = submit;
  absl::StatusOr<core::ClientReply> reply;
  for (absl::Duration look = cluster.is_own() ? kOwnLook : kDeadHeadPatience;; look *= 2) {
    const absl::Duration left = deadline - clock.Now();
    reply = cluster.client->Call(request, std::min(look, left), kSubmitPatience - left);
    const bool silent = absl::IsDeadlineExceeded(reply.status()) || absl::IsUnavailable(reply.status());
    if (!silent || clock.Now() >= deadline) break;
    if (cluster.is_own()) {
      GT_RETURN_IF_ERROR(Reconnect(cluster, Start::kIfNeeded));
    } else if (look == kDeadHeadPatience) {
      Complain(absl::StrCat("the head of context ", cluster.name(), " at ", cluster.head.options.endpoint,
                            " does not answer; asking for ", absl::ToInt64Seconds(deadline - clock.Now()),
                            " s more"));
    }
  }
  if (absl::IsUnavailable(reply.status()) && !cluster.is_own()) return NobodyListens(cluster);
  if (!reply.ok()) return reply.status();
  if (!reply->ok) {
    const auto code = static_cast<absl::StatusCode>(reply->code);
    *refused = true;
    // The launch was refused, and nothing was started.
    const bool for_good = code == absl::StatusCode::kFailedPrecondition ||
                          code == absl::StatusCode::kPermissionDenied ||
                          code == absl::StatusCode::kResourceExhausted;
    return absl::Status(for_good ? absl::StatusCode::kInvalidArgument : code, reply->error);
  }
  return std::move(reply->json);
}

absl::StatusOr<std::string> JobIdOf(const std::string& json) {
  const nlohmann::json reply = nlohmann::json::parse(json, nullptr, false);
  if (!reply.is_object() || !reply.contains("job") || !reply["job"].is_string()) {
    return absl::InternalError("the head's answer names no job");
  }
  return reply["job"].get<std::string>();
}

// The Python that the shell would have run here: an agent that finds another says so.
void NamePython(const spec::JobSpec& spec, std::map<std::string, std::string>* env) {
  if (spec.run.empty()) return;
  absl::string_view version = spec.run[0];
  if (!absl::ConsumePrefix(&version, "python")) return;
  if (version.find_first_not_of("0123456789.") != absl::string_view::npos) return;
  const auto wanted = spec.env.find("PATH");
  const char* const own = getenv("PATH");
  const std::string path = wanted != spec.env.end() ? wanted->second : own != nullptr ? own : "";
  if (std::string found = agent::FindProgram(spec.run[0], path); !found.empty())
    (*env)[core::kClientPython] = std::move(found);
}

absl::StatusOr<core::ClientSubmit> MakeSubmit(const Args& args, const spec::JobSpec& spec,
                                              const std::string& resume, const std::string& run_dirs,
                                              bool local) {
  core::ClientSubmit submit;
  submit.spec_text = spec::PrintJob(spec);
  submit.resume = resume;
  GT_ASSIGN_OR_RETURN(Inherited inherited, InheritedEnv(spec, local));
  if (!inherited.left_out.empty()) {
    Complain(
        absl::StrCat("not inherited, for they look like secrets: ", absl::StrJoin(inherited.left_out, ", "),
                     ". What the job needs goes under `secrets:`"));
  }
  submit.takeover = args.Has("takeover");
  submit.env = std::move(inherited.env);
  if (!local) NamePython(spec, &submit.env);
  // Every cluster begins with job 1, and several may be used in one folder: a state directory that was
  // removed, another machine that shares the disk. The cluster's part of the name keeps their files apart.
  submit.run_dir = run_dirs + "/{job}-{cluster}";
  if (!spec::IsCleanText(submit.run_dir)) {
    // `gtrain status` would name another directory.
    return absl::InvalidArgumentError(
        absl::StrCat("--run-dir is not UTF-8: ", SafeText(args.Get("run-dir")), ". Name another directory"));
  }
  if (!IsPlainLine(submit.run_dir)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--run-dir has a control character or a line end in it: ", SafeText(submit.run_dir),
                     ". Everybody's terminal would get it: name another directory"));
  }
  return submit;
}

}  // namespace

absl::StatusOr<Submitted> SubmitJob(const Args& args, const spec::JobSpec& spec) {
  GT_ASSIGN_OR_RETURN(const auto backend, ChosenBackend(args));
  const bool here = backend->on_this_machine();
  if (here) GT_RETURN_IF_ERROR(CheckHere(spec));
  if (here) GT_RETURN_IF_ERROR(exec::CheckSecretsAreSet(spec));
  GT_ASSIGN_OR_RETURN(const std::string current, CurrentDir());
  const std::string run_dirs = JoinPath(current, args.Get("run-dir", "gtrain-runs"));
  if (here) GT_RETURN_IF_ERROR(CheckCanBeMade(run_dirs));
  GT_ASSIGN_OR_RETURN(const Resume resume, ChooseResume(args, spec, run_dirs, here));
  GT_ASSIGN_OR_RETURN(core::ClientSubmit submit, MakeSubmit(args, spec, resume.wanted, run_dirs, here));
  Submitted submitted;
  GT_ASSIGN_OR_RETURN(submitted.cluster, OpenCluster(args, Start::kIfNeeded));
  exec::KeptSecrets secrets;
  if (here) {
    GT_ASSIGN_OR_RETURN(secrets, exec::KeepSecrets(submitted.cluster.head.dir, spec));
    submit.spec_text = spec::PrintJob(secrets.spec);
  }
  // It may be accepted: the first Ctrl-C stops the job then, as it does while it is followed.
  EndOnCtrlC(2, "interrupted while the job was submitted; `gtrain status` says whether it was accepted");
  bool refused = false;
  absl::StatusOr<std::string> answer = Submit(submitted.cluster, submit, &refused);
  if (refused) exec::Remove(secrets);
  GT_ASSIGN_OR_RETURN(submitted.json, std::move(answer));
  GT_ASSIGN_OR_RETURN(submitted.job, JobIdOf(submitted.json));
  if (!resume.news.empty()) Complain(resume.news);
  return submitted;
}

}  // namespace gtrain::cli
