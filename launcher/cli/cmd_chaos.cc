// Faults on purpose. Everything goes through the head as the user's own requests (exec, node drain), so the
// same roles hold, the audit log has each, and nothing is left to do when this client ends: what stops a rank
// for a while lets it go on by itself.
#include <poll.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/json_text.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "job/spec/parse.h"
#include "job/spec/values.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/median.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

constexpr absl::Duration kAskEvery = absl::Milliseconds(100);
constexpr absl::Duration kRecoverWithin = absl::Minutes(10);

struct Plan {
  enum class Deed { kKill, kTerm, kStop, kDrain } deed = Deed::kKill;
  absl::Duration lasts;  // kStop: how long a rank stands still; kDrain: until its machine goes
  absl::Duration every = absl::Seconds(5);
  std::optional<absl::Duration> all;  // then it ends
  std::optional<int> rank;
  std::string node;  // a host name: all ranks there
  uint64_t seed = 0;
};

absl::StatusOr<absl::Duration> TimeOf(const Args& args, absl::string_view flag) {
  const absl::StatusOr<absl::Duration> time = ParseDuration(args.Get(flag));
  if (time.ok() && *time > absl::ZeroDuration()) return *time;
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " ", spec::Shown(args.Get(flag)), ": write a time, such as 5s"));
}

absl::StatusOr<Plan> PlanOf(const Args& args) {
  Plan plan;
  const int deeds = args.Has("kill") + args.Has("term") + args.Has("stop") + args.Has("drain");
  if (deeds > 1) return absl::InvalidArgumentError("one of --kill, --term, --stop and --drain at a time");
  if (args.Has("term")) plan.deed = Plan::Deed::kTerm;
  if (args.Has("stop")) {
    plan.deed = Plan::Deed::kStop;
    GT_ASSIGN_OR_RETURN(plan.lasts, TimeOf(args, "stop"));
  }
  if (args.Has("drain")) {
    plan.deed = Plan::Deed::kDrain;
    GT_ASSIGN_OR_RETURN(plan.lasts, TimeOf(args, "drain"));
  }
  if (args.Has("every")) {
    GT_ASSIGN_OR_RETURN(plan.every, TimeOf(args, "every"));
  }
  if (args.Has("for")) {
    GT_ASSIGN_OR_RETURN(const absl::Duration all, TimeOf(args, "for"));
    plan.all = all;
  }
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> rank, args.Int("rank", 0, spec::kRanksMax));
  if (rank) plan.rank = static_cast<int>(*rank);
  plan.node = args.Get("node");
  if (plan.rank && !plan.node.empty()) return absl::InvalidArgumentError("--rank or --node, not both");
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> seed, args.Int("seed", 0, INT64_MAX));
  plan.seed = seed ? static_cast<uint64_t>(*seed) : Rng::FromSystem().Next() >> 33;
  return plan;
}

// What is run beside the rank. Its process may have ended since it was looked up, and its number may be
// another's by now: the rank's token, which no other process has, says whose it is.
std::vector<std::string> SignalCommand(const Plan& plan, int64_t pid) {
  constexpr char kCheck[] =
      // A process that goes on in place was started with another token.
      "it=GTRAIN_TOKEN=$GTRAIN_TOKEN; [ \"$GTRAIN_ELASTIC\" = in-place ] && it=GTRAIN_JOB=$GTRAIN_JOB; "
      "tr '\\0' '\\n' < /proc/$1/environ | grep -qxF \"$it\" || exit 3; ";
  std::string act = plan.deed == Plan::Deed::kTerm ? "kill -TERM $1" : "kill -KILL $1";
  if (plan.deed == Plan::Deed::kStop)
    act = "kill -STOP -$1 && { (sleep $2; kill -CONT -$1) < /dev/null > /dev/null 2>&1 & }";
  return {"sh",
          "-c",
          absl::StrCat(kCheck, act),
          "chaos",
          absl::StrCat(pid),
          absl::StrFormat("%.3f", absl::ToDoubleSeconds(plan.lasts))};
}

class Chaos {
 public:
  Chaos(Cluster& cluster, std::string job, const Plan& plan)
      : cluster_(cluster), job_(std::move(job)), plan_(plan), rng_(plan.seed) {
    cluster_.client->set_interrupt_fd(signals_.fd());
  }

  // Until its time is over, the job is, or a signal came. An error: the job did not step on.
  absl::Status Run() {
    const Instant end = plan_.all ? clock_.Now() + *plan_.all : Instant{INT64_MAX};
    Say(absl::StrCat(job_, ": ", Words(), " every ", PrintDuration(plan_.every),
                     ", half of it more or less; --seed ", plan_.seed));
    const absl::Status struck = StrikeUntil(end);
    GT_RETURN_IF_ERROR(Undrain());  // however it ended
    GT_RETURN_IF_ERROR(struck);
    GT_ASSIGN_OR_RETURN(last_, AskJob(cluster_, job_, absl::Seconds(20)));
    return absl::OkStatus();
  }

  bool failed() const { return last_.state == "FAILED"; }

  json Report() const {
    return {{"job", job_},
            {"seed", plan_.seed},
            {"state", last_.state},
            {"deeds", deeds_},
            {"stepped_on", took_.size()},
            {"seconds_median", took_.empty() ? json(nullptr) : json(MedianOf(took_))},
            {"seconds_max", took_.empty() ? json(nullptr) : json(*std::ranges::max_element(took_))}};
  }

  std::string Summary() const {
    const json report = Report();
    std::string out = absl::StrCat(job_, ": ", deeds_.size(), deeds_.size() == 1 ? " fault" : " faults");
    if (!took_.empty())
      absl::StrAppendFormat(&out, "; it stepped on after %.2f s in the median, %.2f s at most",
                            report["seconds_median"].get<double>(), report["seconds_max"].get<double>());
    return absl::StrCat(out, "; it is ", SafeText(last_.state), "\n");
  }

 private:
  void Say(const std::string& line) const { Complain(SafeText(line)); }

  std::string Words() const {
    const std::string whom = plan_.rank            ? absl::StrCat("rank ", *plan_.rank)
                             : !plan_.node.empty() ? absl::StrCat("all ranks on ", plan_.node)
                                                   : "a rank";
    switch (plan_.deed) {
      case Plan::Deed::kKill:
        return absl::StrCat("kills ", whom);
      case Plan::Deed::kTerm:
        return absl::StrCat("ends ", whom, " by SIGTERM");
      case Plan::Deed::kStop:
        return absl::StrCat("stops ", whom, " for ", PrintDuration(plan_.lasts));
      case Plan::Deed::kDrain:
        return absl::StrCat("drains the node of ", whom, ", which goes in ", PrintDuration(plan_.lasts));
    }
    return "";
  }

  // False: the time is over, or a signal came, now or earlier.
  bool Pause(absl::Duration time, Instant end) {
    const Instant until = std::min(clock_.Now() + time, end);
    while (true) {
      signalled_ = signalled_ || signals_.Next() != 0;
      if (signalled_) return false;
      const Instant now = clock_.Now();
      if (now >= end) return false;
      if (now >= until) return true;
      pollfd fd{signals_.fd(), POLLIN, 0};
      const absl::Duration left = std::min<absl::Duration>(until - now, absl::Hours(1));
      (void)poll(&fd, 1, static_cast<int>(absl::ToInt64Milliseconds(left) + 1));
    }
  }

  // Spares, and those that come up, have numbers behind the members of the generation.
  static bool IsMember(const JobDoc& job, const RankDoc& rank) { return rank.rank < job.world_size; }

  // Who waits beside the ranks is hit only where the user says whom: the job loses nothing with it.
  std::vector<RankDoc> Victims(const JobDoc& job) {
    const bool named = plan_.rank || !plan_.node.empty();
    std::vector<RankDoc> running;
    for (const RankDoc& rank : job.ranks) {
      if (rank.pid > 0 && rank.state != "exited" && (!plan_.rank || rank.rank == *plan_.rank) &&
          (plan_.node.empty() || rank.hostname == plan_.node) && (named || IsMember(job, rank)))
        running.push_back(rank);
    }
    if (running.empty() || named) return running;
    return {running[rng_.Below(running.size())]};
  }

  // A rank that the job will not have is a mistake, and not a fault that did not come.
  absl::Status CheckRank(const JobDoc& job) const {
    const int ranks = std::max(job.world_size, static_cast<int>(job.ranks.size()));
    if (!plan_.rank || ranks == 0 || *plan_.rank < ranks) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("--rank ", *plan_.rank, ": ", job_, " has ranks 0 to ", ranks - 1));
  }

  absl::Status StrikeUntil(Instant end) {
    GT_ASSIGN_OR_RETURN(const JobDoc first, AskJob(cluster_, job_, absl::Seconds(20)));
    if (!first.Final()) GT_RETURN_IF_ERROR(CheckRank(first));
    while (Pause(plan_.every * (0.5 + rng_.Unit()), end)) {
      GT_ASSIGN_OR_RETURN(const JobDoc before, AskJob(cluster_, job_, absl::Seconds(20)));
      if (before.Final()) break;
      const std::vector<RankDoc> victims = Victims(before);
      if (victims.empty()) {  // it is being formed, or nothing of it is where the flags say
        if (!std::exchange(said_nobody_, true))
          Say(absl::StrCat("no rank to hit: ", Words(), "; ", before.state));
        continue;
      }
      GT_RETURN_IF_ERROR(Undrain());  // of one that waited beside the ranks
      if (!Strike(before, victims)) continue;
      if (std::ranges::any_of(victims, [&](const RankDoc& rank) { return IsMember(before, rank); })) {
        GT_RETURN_IF_ERROR(AwaitStep(before, victims, end));
      } else {
        Say(absl::StrCat("rank ", NumbersOf(victims), " on ", victims[0].hostname,
                         ": no member of generation ", before.generation,
                         " (a spare, or one that comes up), so there is no restart to time"));
      }
    }
    return absl::OkStatus();
  }

  // False: nothing happened, for the rank had ended by itself.
  bool Strike(const JobDoc& job, const std::vector<RankDoc>& victims) {
    std::vector<int> hit;
    for (const RankDoc& victim : victims) {
      const absl::Status done = plan_.deed == Plan::Deed::kDrain ? Drain(victim) : Signal(victim);
      if (done.ok()) {
        hit.push_back(victim.rank);
      } else {
        Say(absl::StrCat("rank ", victim.rank, ": ", done.message()));
      }
      if (plan_.deed == Plan::Deed::kDrain) break;  // the whole node
    }
    if (hit.empty()) return false;
    deeds_.push_back({{"generation", job.generation},
                      {"ranks", hit},
                      {"hostname", victims[0].hostname},
                      {"step", job.step ? json(*job.step) : json(nullptr)}});
    return true;
  }

  absl::Status Signal(const RankDoc& victim) {
    GT_ASSIGN_OR_RETURN(const std::string text,
                        Ask(cluster_, core::ClientExec{.job = JobId(job_),
                                                       .rank = victim.rank,
                                                       .argv = SignalCommand(plan_, victim.pid),
                                                       .apart = true}));
    const json reply = json::parse(text, nullptr, /*allow_exceptions=*/false);
    const auto code = reply.find("exit_code");
    const int exit_code = code != reply.end() && code->is_number_integer() ? code->get<int>() : 1;
    // The end of the generation, which the signal brings about, may kill the command that gave it.
    constexpr int kKilled = 128;
    if (exit_code == 0 || exit_code > kKilled) return absl::OkStatus();
    return absl::UnavailableError("its process had ended already");
  }

  absl::Status Drain(const RankDoc& victim) {
    const core::ClientDrainNode drain{victim.hostname, plan_.lasts, "gtrain chaos", false};
    GT_RETURN_IF_ERROR(Ask(cluster_, drain).status());
    drained_.push_back(victim.hostname);
    return absl::OkStatus();
  }

  static std::string NumbersOf(const std::vector<RankDoc>& ranks) {
    return absl::StrJoin(ranks, ",",
                         [](std::string* out, const RankDoc& rank) { absl::StrAppend(out, rank.rank); });
  }

  // Until every rank that was there, or the next generation, has gone a step on.
  absl::Status AwaitStep(const JobDoc& before, const std::vector<RankDoc>& victims, Instant end) {
    const Instant at = clock_.Now();
    const bool changes =
        plan_.deed != Plan::Deed::kStop;  // a rank that stood still goes on in its generation
    const std::string hit = NumbersOf(victims);
    while (Pause(kAskEvery, std::max(end, at + kRecoverWithin))) {
      GT_ASSIGN_OR_RETURN(const JobDoc now, AskJob(cluster_, job_, absl::Seconds(20)));
      if (now.Final()) return absl::OkStatus();
      const bool anew = now.generation > before.generation && now.state == "RUNNING" && now.step;
      const bool on = !changes && now.generation == before.generation && now.step && before.step &&
                      *now.step > *before.step && clock_.Now() - at > plan_.lasts;
      if (anew || on) {
        const double took = absl::ToDoubleSeconds(clock_.Now() - at);
        took_.push_back(took);
        deeds_.back()["seconds"] = took;
        Say(absl::StrFormat("rank %s on %s: step %d, and on after %.2f s at step %d in generation %d", hit,
                            victims[0].hostname, before.step.value_or(0), took, *now.step, now.generation));
        return Undrain();
      }
      if (clock_.Now() - at > kRecoverWithin) break;
    }
    if (signalled_) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(job_, " has not stepped on within ",
                                                    PrintDuration(kRecoverWithin),
                                                    ", or reports no steps: gtrain why ", job_));
  }

  absl::Status Undrain() {
    for (const std::string& node : std::exchange(drained_, {}))
      GT_RETURN_IF_ERROR(
          Ask(cluster_, core::ClientDrainNode{node, absl::ZeroDuration(), "gtrain chaos", true}).status());
    return absl::OkStatus();
  }

  Cluster& cluster_;
  const std::string job_;
  const Plan& plan_;
  Rng rng_;
  const RealClock clock_;
  SignalPipe signals_;
  bool signalled_ = false;
  bool said_nobody_ = false;
  std::vector<std::string> drained_;
  json deeds_ = json::array();
  std::vector<double> took_;
  JobDoc last_;
};

absl::StatusOr<int> Run(const Args& args) {
  GT_ASSIGN_OR_RETURN(const Plan plan, PlanOf(args));
  GT_ASSIGN_OR_RETURN(Target target, FindLiveTarget(args));
  Chaos chaos(*target.cluster, target.job.id, plan);
  GT_RETURN_IF_ERROR(chaos.Run());
  Print(args.Has("json") ? chaos.Report().dump(-1, ' ', false, json::error_handler_t::replace) + "\n"
                         : chaos.Summary());
  return chaos.failed() ? kFailed : kDone;
}

int RunChaos(const Args& args) {
  const absl::StatusOr<int> code = Run(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb ChaosVerb() {
  Verb verb;
  verb.name = "chaos";
  verb.summary = "Cause faults in a job, and say how soon it steps on after each";
  verb.usage = "[--kill|--term|--stop TIME|--drain TIME] [flags] [JOB]";
  verb.details =
      "Kills a rank of the job every few seconds, or does what the flags say, waits until the job has gone a "
      "step\n"
      "on, and begins again: until --for is over, the job is, or Ctrl-C. Nothing is left behind: a rank that "
      "was\n"
      "stopped goes on by itself, a drain is taken back. It takes what `gtrain exec` takes: one's own jobs, "
      "or an\n"
      "administrator's key, which --drain needs in any case. The audit log has each fault.\n\n"
      "  gtrain chaos train-3 --for 5m\n"
      "  gtrain chaos train-3 --stop 20s --rank 0 --every 1m\n"
      "  gtrain chaos train-3 --kill --node gpu-7 --for 1m --json";
  verb.flags = {{"kill", '\0', "", "SIGKILL; what is done without another flag"},
                {"term", '\0', "", "SIGTERM, as a preemption sends it"},
                {"stop", '\0', "TIME", "stand still for so long"},
                {"drain", '\0', "TIME",
                 "as `gtrain node drain --deadline TIME`, taken back when the job runs elsewhere"},
                {"every", '\0', "TIME", "from one fault to the next, half of it more or less; default 5s"},
                {"for", '\0', "TIME", "no further fault after so long; default: until the job ends"},
                {"rank", '\0', "R", "always this rank, which may be a spare; default: any member"},
                {"node", '\0', "HOST", "all ranks of the job on this node"},
                {"seed", '\0', "N", "the same choices again"},
                ContextFlag(),
                {"json", '\0', "", "one document at the end: each fault and how long it took"}};
  verb.completes = Completes::kLiveJobs;
  verb.words_max = 1;
  verb.run = RunChaos;
  return verb;
}

}  // namespace gtrain::cli
