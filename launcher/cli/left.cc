#include "launcher/cli/left.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/folder.h"
#include "base/json_depth.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "job/spec/parse.h"
#include "launcher/cli/context.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

constexpr size_t kIndexBytesMax = 16 << 20, kResultBytesMax = 64 << 20;

absl::StatusOr<json> ReadObject(const std::string& path, size_t bytes_max) {
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, bytes_max));
  json object = json::parse(ShallowJson(text), nullptr, /*allow_exceptions=*/false);
  if (!object.is_object())
    return absl::DataLossError(absl::StrCat(path, " is damaged: not a JSON object of gtrain"));
  return object;
}

absl::StatusOr<json> ReadIndex(const Args& args) {
  GT_ASSIGN_OR_RETURN(const auto backend, ChosenBackend(args));
  if (!backend->is_own()) return absl::NotFoundError("only a local cluster has an index of its runs");
  GT_ASSIGN_OR_RETURN(const std::string dir, backend->HeadDirectory());
  GT_ASSIGN_OR_RETURN(json index, ReadObject(dir + "/runs.json", kIndexBytesMax));
  if (!index.contains("jobs") || !index["jobs"].is_array() || index["jobs"].empty())
    return absl::NotFoundError("no job is over");
  return index;
}

// Ranks may write there, too: what says that its job is not over is no result. The other files of the run lie
// beside it, also where somebody has moved or copied the directory since.
absl::StatusOr<json> ReadResult(const std::string& run_dir) {
  const std::string path = run_dir + "/result.json";
  GT_ASSIGN_OR_RETURN(json result, ReadObject(path, kResultBytesMax));
  if (const std::string state = TextOf(result, "state"); !IsOver(state))
    return absl::DataLossError(
        absl::StrCat(path, " is damaged: it calls its job ", state.empty() ? "nothing" : state));
  std::error_code error;
  const std::filesystem::path here = std::filesystem::absolute(run_dir, error) / "";
  if (!error) result["run_dir"] = here.lexically_normal().parent_path().native();
  return result;
}

// The cluster that `args` choose, whose jobs alone may be meant: every cluster begins with job 1. Empty: it
// is the local one and its state directory is gone, so that nothing of it runs.
absl::StatusOr<std::string> ChosenCluster(const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::string dir, HeadDirectory(args));
  const absl::StatusOr<std::string> id = ReadFile(dir + "/cluster", 4096);
  if (id.ok()) return id->substr(0, id->find('\n'));
  GT_ASSIGN_OR_RETURN(const auto backend, ChosenBackend(args));
  if (backend->is_own() && absl::IsNotFound(id.status())) return "";
  return id.status();
}

// Finds the newest result among the jobs that were launched here: run directories are called JOB-CLUSTER.
absl::StatusOr<json> FindResultHere(const Args& args, const std::string& word) {
  GT_ASSIGN_OR_RETURN(const std::string cluster, ChosenCluster(args));
  json newest;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("gtrain-runs", error)) {
    if (!absl::StartsWith(entry.path().filename().native(), word)) continue;
    const absl::StatusOr<json> result = ReadResult(entry.path());
    if (!result.ok() || (TextOf(*result, "id") != word && TextOf(*result, "name") != word)) continue;
    if (!cluster.empty() && TextOf(*result, "cluster") != cluster) continue;
    if (newest.is_null() || TextOf(newest, "ended") < TextOf(*result, "ended")) newest = *result;
  }
  if (newest.is_null()) return absl::NotFoundError(absl::StrCat("nothing is left of ", word));
  return newest;
}

// Returns the whole result where the run directory still has it, else the index's entry for the job.
json WithItsResult(const json& index, const json& entry) {
  const absl::StatusOr<json> result = ReadResult(TextOf(entry, "run_dir"));
  const bool same = result.ok() && TextOf(*result, "id") == TextOf(entry, "id") &&
                    TextOf(*result, "cluster") == TextOf(index, "cluster");
  return same ? *result : entry;
}

}  // namespace

bool IsRunDirectory(const std::string& word) { return absl::StrContains(word, '/'); }

absl::StatusOr<std::string> LeftJobs(const Args& args) {
  GT_ASSIGN_OR_RETURN(json index, ReadIndex(args));
  index["head"] = false;
  return index.dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<std::string> LeftJob(const Args& args, const std::string& word) {
  const auto text = [](const json& job) { return job.dump(-1, ' ', false, json::error_handler_t::replace); };
  if (IsRunDirectory(word)) {
    const absl::StatusOr<json> result = ReadResult(word);
    if (result.ok()) return text(*result);
    return absl::Status(result.status().code(),
                        absl::StrCat("no job that is over has left its result there: ",
                                     result.status().message(), ". While a job runs, ask for it by its id"));
  }
  if (const absl::StatusOr<json> index = ReadIndex(args); index.ok()) {
    const json* found = nullptr;
    for (const json& job : (*index)["jobs"]) {  // the newest is the last
      if (!IsOver(TextOf(job, "state"))) continue;
      if (word.empty() || TextOf(job, "name") == word) found = &job;
      if (TextOf(job, "id") == word) return text(WithItsResult(*index, job));
    }
    if (found != nullptr) return text(WithItsResult(*index, *found));
  }
  if (word.empty()) return absl::NotFoundError("nothing is left of any job");
  GT_ASSIGN_OR_RETURN(const json result, FindResultHere(args, word));
  return text(result);
}

absl::StatusOr<JobDoc> LeftResult(const std::string& run_dir, const std::string& id) {
  if (run_dir.empty()) return absl::NotFoundError("it is not known where the job runs");
  GT_ASSIGN_OR_RETURN(const json result, ReadResult(run_dir));
  GT_ASSIGN_OR_RETURN(JobDoc job, ParseJobDoc(result.dump(-1, ' ', false, json::error_handler_t::replace)));
  if (job.id != id) return absl::NotFoundError(absl::StrCat(run_dir, " has the result of another job"));
  return job;
}

absl::StatusOr<LeftAnswer> LeftInstead(const absl::Status& asked, const Args& args, const std::string& word,
                                       bool all) {
  if (!absl::IsNotFound(asked) && !absl::IsUnavailable(asked) && !absl::IsDeadlineExceeded(asked))
    return asked;
  GT_ASSIGN_OR_RETURN(const auto backend, ChosenBackend(args));
  const std::string no_cluster = exec::NoneRuns(backend->name());
  const bool none_runs = absl::StartsWith(asked.message(), no_cluster);
  const absl::StatusOr<std::string> left = all && word.empty() ? LeftJobs(args) : LeftJob(args, word);
  if (left.ok()) {
    // A head that does not answer may have a newer job of that name, which runs.
    if (const std::string id = TextOf(json::parse(*left, nullptr, false), "id");
        !absl::IsNotFound(asked) && !word.empty() && !IsRunDirectory(word) && id != word) {
      return absl::Status(asked.code(),
                          absl::StrCat(asked.message(), ". Of the jobs that are over, the newest called ",
                                       SafeText(word), " is ", SafeText(id), ": ask for it by its id"));
    }
    return LeftAnswer{*left, none_runs ? "no cluster runs; this is what it left"
                                       : absl::StrCat(asked.message(),
                                                      ". This is what jobs that are over left; one that was "
                                                      "running is not among them")};
  }
  if (!none_runs || word.empty() || !ReadIndex(args).ok()) return asked;
  return absl::NotFoundError(absl::StrCat(no_cluster, ", and nothing that it left is called ", SafeText(word),
                                          "; `gtrain status` lists it"));
}

namespace {

constexpr absl::string_view kGenerationPrefix = "generation-";

// The generations that have a folder of logs, the oldest first.
std::vector<uint64_t> LoggedGenerations(const std::string& run_dir) {
  std::vector<uint64_t> generations;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(run_dir + "/logs", error)) {
    const std::string name = entry.path().filename().native();
    uint64_t generation = 0;
    if (absl::StartsWith(name, kGenerationPrefix) &&
        absl::SimpleAtoi(name.substr(kGenerationPrefix.size()), &generation))
      generations.push_back(generation);
  }
  std::sort(generations.begin(), generations.end());
  return generations;
}

// "; those of generations 1, 3 are there", or nothing.
std::string GenerationsLeft(const std::string& run_dir) {
  constexpr size_t kNamed = 20;  // the newest
  std::vector<uint64_t> generations = LoggedGenerations(run_dir);
  if (generations.empty()) return "";
  const size_t more = generations.size() - std::min(generations.size(), kNamed);
  generations.erase(generations.begin(), generations.begin() + static_cast<ptrdiff_t>(more));
  return absl::StrCat("; ", more == 0 ? "" : absl::StrCat(more, " older and "),
                      generations.size() == 1 ? "that of generation " : "those of generations ",
                      absl::StrJoin(generations, ", "), generations.size() == 1 && more == 0 ? " is" : " are",
                      " there");
}

}  // namespace

bool HasLogs(const std::string& run_dir) { return !LoggedGenerations(run_dir).empty(); }

std::optional<uint64_t> NewestWritten(const std::string& run_dir, uint64_t generation) {
  std::vector<uint64_t> generations = LoggedGenerations(run_dir);
  std::erase_if(generations, [&](uint64_t one) { return one >= generation; });
  for (auto it = generations.rbegin(); it != generations.rend(); ++it) {
    std::error_code error;
    const std::string folder = absl::StrCat(run_dir, "/logs/", kGenerationPrefix, *it);
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
      const std::string name = entry.path().filename().native();
      const bool is_log =
          absl::StartsWith(name, "rank-") && (absl::EndsWith(name, ".out") || absl::EndsWith(name, ".err"));
      if (is_log && entry.is_regular_file(error) && entry.file_size(error) > 0 && !error) return *it;
    }
  }
  return std::nullopt;
}

int RanksLogged(const std::string& run_dir, uint64_t generation) {
  int ranks = 0;
  std::error_code error;
  const std::string folder = absl::StrCat(run_dir, "/logs/", kGenerationPrefix, generation);
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().native();
    absl::string_view number = name;
    int rank = 0;
    const bool is_log = absl::ConsumePrefix(&number, "rank-") &&
                        (absl::ConsumeSuffix(&number, ".out") || absl::ConsumeSuffix(&number, ".err"));
    if (is_log && absl::SimpleAtoi(number, &rank) && rank >= 0 && rank < spec::kRanksMax)
      ranks = std::max(ranks, rank + 1);
  }
  return ranks;
}

absl::StatusOr<LogDoc> ReadLeftLog(const JobDoc& job, std::optional<uint64_t> generation, int rank,
                                   bool is_stderr, uint64_t offset) {
  constexpr size_t kPiece = 1 << 20;
  const uint64_t wanted = generation.value_or(job.generation);
  const std::string folder = absl::StrCat(job.run_dir, "/logs/generation-", wanted);
  std::string why;
  const UniqueFd dir = OpenFolder(folder, {.to_read = true, .why = &why});
  if (!dir.valid()) {
    return absl::NotFoundError(absl::StrCat("no logs of generation ", wanted, " are left of ", job.id, ": ",
                                            why, GenerationsLeft(job.run_dir)));
  }
  const std::string name = absl::StrCat("rank-", rank, is_stderr ? ".err" : ".out");
  const UniqueFd file(openat(dir.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info = {};
  // It wrote nothing: perhaps it waited beside the ranks, with a number behind theirs, which nobody
  // remembers.
  if (!file.valid() && errno == ENOENT) return LogDoc{.next_offset = offset, .end = true};
  if (!file.valid() || fstat(file.get(), &info) != 0) return ErrnoStatus(errno, folder + "/" + name);
  if (!S_ISREG(info.st_mode))
    return absl::FailedPreconditionError(absl::StrCat(folder, "/", name, " is not a regular file"));
  std::string text(kPiece, '\0');
  const ssize_t got = pread(file.get(), text.data(), text.size(), static_cast<off_t>(offset));
  if (got < 0) return ErrnoStatus(errno, folder + "/" + name);
  text.resize(static_cast<size_t>(got));
  return LogDoc{.text = std::move(text), .next_offset = offset + static_cast<uint64_t>(got), .end = got == 0};
}

}  // namespace gtrain::cli
