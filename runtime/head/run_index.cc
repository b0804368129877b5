#include "runtime/head/run_index.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/json_depth.h"
#include "base/json_text.h"
#include "base/logging.h"

namespace gtrain::head {
namespace {

using nlohmann::json;

constexpr size_t kFileBytesMax = 16 << 20;
constexpr size_t kTextBytesMax = 1 << 10;  // of each; all of it is in the run directory

void Cut(json& object) {
  for (auto& [key, value] : object.items()) {
    if (!value.is_string() || key == "run_dir") continue;
    std::string text = value.get<std::string>();
    if (text.size() <= kTextBytesMax) continue;
    size_t bytes = kTextBytesMax;
    while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xC0) == 0x80) --bytes;
    value = text.substr(0, bytes) + "...";
  }
}

json EntryOf(const json& result) {
  json entry = json::object();
  for (const char* key :
       {"id",        "name",        "user",     "state",           "reason",      "generation",
        "timeline",  "world_size",  "restarts", "last_checkpoint", "first_fault", "run_dir",
        "exit_code", "step",        "loss",     "diverged",        "submitted",   "started",
        "ended",     "run_seconds", "goodput"}) {
    if (const auto it = result.find(key); it != result.end()) entry[key] = *it;
  }
  if (auto fault = entry.find("first_fault"); fault != entry.end() && fault->is_object()) {
    fault->erase("tail");
    Cut(*fault);
  }
  Cut(entry);
  return entry;
}

}  // namespace

RunIndex::RunIndex(std::string path, ClusterId cluster)
    : path_(std::move(path)), cluster_(std::move(cluster)) {
  Load();
}

// A file that cannot be read is begun anew: the run directories are there all the same.
void RunIndex::Load() {
  const absl::StatusOr<std::string> text = ReadFile(path_, kFileBytesMax);
  if (absl::IsNotFound(text.status())) return;
  const json root = json::parse(text.ok() ? ShallowJson(*text) : "", nullptr, /*allow_exceptions=*/false);
  const auto runs = root.is_object() ? root.find("jobs") : root.end();
  if (!root.is_object() || TextOf(root, "cluster") != cluster_.value || runs == root.end() ||
      !runs->is_array()) {
    LogWarning(path_, " is not the index of this cluster's runs and is begun anew");
    return;
  }
  for (const json& run : *runs) {
    if (run.is_object()) runs_.push_back({TextOf(run, "id"), TextOf(run, "ended"), OneLine(run)});
  }
}

bool RunIndex::Has(const JobId& job) const {
  return std::ranges::any_of(runs_, [&](const Run& run) { return run.job == job.value; });
}

absl::Status RunIndex::Put(const std::string& result) {
  const json whole = json::parse(ShallowJson(result), nullptr, /*allow_exceptions=*/false);
  if (!whole.is_object()) return absl::InternalError("the result of a job is not a JSON object");
  Run run{TextOf(whole, "id"), TextOf(whole, "ended"), OneLine(EntryOf(whole))};
  std::erase_if(runs_, [&](const Run& before) { return before.job == run.job; });
  const auto place = std::ranges::upper_bound(runs_, run.ended, {}, &Run::ended);
  runs_.insert(place, std::move(run));
  if (runs_.size() > kRunsMax) runs_.erase(runs_.begin());
  written_ = false;
  return Write();
}

absl::Status RunIndex::Write() {
  if (written_) return absl::OkStatus();
  const std::string jobs =
      absl::StrJoin(runs_, ",", [](std::string* out, const Run& run) { out->append(run.json); });
  const absl::Status status = WriteFileDurable(
      path_,
      absl::StrCat("{\"cluster\":", OneLine(cluster_.value), ",\"local\":true,\"jobs\":[", jobs, "]}\n"),
      0600);
  written_ = status.ok();
  return status;
}

}  // namespace gtrain::head
