#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "job/spec/parse.h"
#include "launcher/cli/context.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

constexpr size_t kTogether = 4;  // debuggers take memory and a processor each

absl::StatusOr<std::vector<int>> RanksOf(const JobDoc& job, const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, args.Int("rank", 0, spec::kRanksMax));
  if (rank) return std::vector<int>{static_cast<int>(*rank)};
  std::vector<int> ranks;
  for (const RankDoc& one : job.ranks) {
    if (one.state != "exited") ranks.push_back(one.rank);
  }
  if (ranks.empty())
    return absl::FailedPreconditionError(absl::StrCat("job ", job.id, " has no running ranks"));
  return ranks;
}

// A rank that cannot be looked at keeps nobody from seeing the others.
json StackOf(int rank, const absl::StatusOr<std::string>& answer) {
  json stack = answer.ok() ? json::parse(*answer, nullptr, false)
                           : json{{"error", std::string(answer.status().message())}};
  if (!stack.is_object()) stack = {{"error", "the head's answer is not a JSON object"}};
  stack["rank"] = rank;
  return stack;
}

void Show(const json& stack) {
  const auto text = [&](const char* key) {
    const auto it = stack.find(key);
    return it != stack.end() && it->is_string() ? it->get<std::string>() : "";
  };
  const std::string host = text("hostname");
  Print(absl::StrCat("rank ", stack["rank"].get<int>(), host.empty() ? "" : " on ", SafeText(host), "\n"));
  const std::string lines = absl::StrCat(text("text"), text("error"));
  Print(absl::StrCat("  ", SafeLines(lines, "  "), "\n"));
}

absl::StatusOr<int> Stack(const Args& args) {
  GT_ASSIGN_OR_RETURN(Target target, FindLiveTarget(args));
  Cluster& cluster = *target.cluster;
  const JobDoc& job = target.job;
  GT_ASSIGN_OR_RETURN(const std::vector<int> ranks, RanksOf(job, args));
  json document = {{"job", job.id}, {"ranks", json::array()}};
  bool failed = false;
  for (size_t from = 0; from < ranks.size(); from += kTogether) {
    std::vector<core::ClientRequestBody> requests;
    for (size_t i = from; i < std::min(ranks.size(), from + kTogether); ++i)
      requests.push_back(core::ClientStack{JobId(job.id), ranks[i]});
    const auto answers = AskAll(cluster, std::move(requests), absl::Seconds(30));
    for (size_t i = 0; i < answers.size(); ++i) {
      failed = failed || !answers[i].ok();
      document["ranks"].push_back(StackOf(ranks[from + i], answers[i]));
      if (!args.Has("json")) Show(document["ranks"].back());
    }
  }
  if (args.Has("json")) Print(document.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
  return failed ? kFailed : kDone;
}

int RunStack(const Args& args) {
  const absl::StatusOr<int> code = Stack(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb StackVerb() {
  Verb verb;
  verb.name = "stack";
  verb.summary = "Show where the threads of a job's ranks are";
  verb.usage = "[--rank R] [JOB]";
  verb.details =
      "Of each rank and what it started: the call in which the kernel holds each thread, Python frames by "
      "py-spy,\n"
      "native frames by eu-stack or gdb, whichever the rank's $PATH has. It stops nothing for longer than "
      "they look.\n\n"
      "  gtrain stack                       all ranks of the job that runs\n"
      "  gtrain stack llm-7 --rank 3";
  verb.flags = {{"rank", '\0', "R", "this rank alone; default all"},
                ContextFlag(),
                {"json", '\0', "", "one document: job, and of each rank its stacks"}};
  verb.completes = Completes::kLiveJobs;
  verb.words_max = 1;
  verb.run = RunStack;
  return verb;
}

}  // namespace gtrain::cli
