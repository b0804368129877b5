#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "job/spec/values.h"
#include "launcher/cli/actor_docs.h"
#include "launcher/cli/ask_actors.h"
#include "launcher/cli/context.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

constexpr int64_t kShownMax = 1000, kShown = 50;

absl::StatusOr<int> Actors(const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> limit, args.Int("limit", 1, kShownMax));
  GT_ASSIGN_OR_RETURN(Target target, FindLiveTarget(args));
  GT_ASSIGN_OR_RETURN(const std::vector<int> ranks, RanksAsked(target.job, args));
  const auto shown = static_cast<size_t>(limit.value_or(kShown));
  const std::vector<RankActors> said =
      AskActors(*target.cluster, target.job.id, ranks, QuestionFor(args.Get("class"), shown));
  const auto silent = [](const RankActors& rank) { return !rank.error.empty(); };
  if (args.Has("class") &&
      std::ranges::none_of(said, [&](const RankActors& rank) { return silent(rank) || rank.count > 0; }))
    return absl::NotFoundError(absl::StrCat("job ", target.job.id, " has no actor of class ",
                                            spec::Shown(args.Get("class")), "; `gtrain actors ",
                                            target.job.id, "` lists its classes"));
  Print(args.Has("json") ? JsonOf(target.job.id, said, shown) + "\n"
                         : ActorsText(target.job.id, said, shown));
  return std::ranges::any_of(said, silent) ? kFailed : kDone;
}

int RunActors(const Args& args) {
  const absl::StatusOr<int> code = Actors(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb ActorsVerb() {
  Verb verb;
  verb.name = "actors";
  verb.summary = "Show the actors of a running job and what they do";
  verb.usage = "[--class C] [--rank R] [--limit N] [JOB]";
  verb.details =
      "Totals of each class, and the busiest actors: what each does just now and for how long, how many "
      "calls\n"
      "wait for it, and how long calls took, from when they were made. The processes are asked, each for 5 "
      "s.\n\n"
      "  gtrain actors                       of the job that runs\n"
      "  gtrain actors llm-7 --class Shard --limit 10\n"
      "  gtrain stack llm-7 --actor 3/17     where the thread is that runs one";
  verb.flags = {{"class", '\0', "C", "actors of this class alone"},
                {"rank", '\0', "R", "of this rank alone; default all"},
                {"limit", '\0', "N", "at most so many are listed, 1 to 1000; default 50"},
                ContextFlag(),
                {"json", '\0', "", "one document: job, classes, actors, ranks, left_out"}};
  verb.completes = Completes::kLiveJobs;
  verb.words_max = 1;
  verb.run = RunActors;
  return verb;
}

}  // namespace gtrain::cli
