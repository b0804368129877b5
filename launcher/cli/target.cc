#include "launcher/cli/target.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "job/spec/parse.h"
#include "job/spec/values.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/left.h"
#include "launcher/cli/terminal.h"
#include "runtime/wire/codec.h"

namespace gtrain::cli {
namespace {

absl::Status AskHead(const Args& args, const std::string& word, Target& target) {
  GT_ASSIGN_OR_RETURN(target.cluster, OpenCluster(args, Start::kIfDied));
  GT_ASSIGN_OR_RETURN(target.job, FindJob(*target.cluster, word));
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckId(absl::string_view word, absl::string_view what, absl::string_view lists) {
  if (wire::ValidId(word)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(spec::Shown(word), " is not a ", what,
                   " id: one begins with a letter or digit and goes on with letters, digits and ._:+-, 128 "
                   "at most. `",
                   lists, "` lists them"));
}

absl::Status CheckJobWord(const Verb& verb, const Args& args) {
  if (verb.completes != Completes::kJobs && verb.completes != Completes::kLiveJobs) return absl::OkStatus();
  const size_t at = verb.actions.empty() ? 0 : 1;
  if (args.words.size() <= at || args.words[at].empty() || IsRunDirectory(args.words[at]))
    return absl::OkStatus();
  return CheckId(args.words[at], "job", "gtrain status --all");
}

absl::StatusOr<Target> FindTarget(const Args& args) {
  const std::string word = args.words.empty() ? "" : args.words[0];
  Target target;
  if (IsRunDirectory(word)) {  // of a job that is over: no head need be asked
    GT_ASSIGN_OR_RETURN(const std::string json, LeftJob(args, word));
    GT_ASSIGN_OR_RETURN(target.job, ParseJobDoc(json));
    return target;
  }
  const absl::Status asked = AskHead(args, word, target);
  if (asked.ok()) return target;
  // A head that does not answer may have a newer job of that name, which runs.
  if (word.empty() || !absl::IsNotFound(asked)) return asked;
  GT_ASSIGN_OR_RETURN(const LeftAnswer left, LeftInstead(asked, args, word));
  target.cluster.reset();
  GT_ASSIGN_OR_RETURN(target.job, ParseJobDoc(left.json));
  return target;
}

absl::StatusOr<Target> FindLiveTarget(const Args& args) {
  GT_ASSIGN_OR_RETURN(Target target, FindTarget(args));
  if (!target.job.Final()) return target;
  return absl::FailedPreconditionError(
      absl::StrCat(OverText(target.job), ", so it has no ranks. `gtrain logs ", SafeText(target.job.id),
                   "` shows what they wrote; `gtrain launch` starts it anew"));
}

absl::StatusOr<std::vector<int>> RanksAsked(const JobDoc& job, const Args& args) {
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

std::string OverText(const JobDoc& job) {
  return absl::StrCat(SafeText(job.id), " is over: ", SafeText(job.state));
}

}  // namespace gtrain::cli
