// Faults on purpose. Everything goes through the head as the user's own requests (exec, node drain), so the
// same roles hold, the audit log has each, and nothing is left to do when this client ends: what stops a rank
// for a while lets it go on by itself.
#include <poll.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/json_text.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "launcher/cli/chaos_plan.h"
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
constexpr char kReason[] = "gtrain chaos";

using Deed = ChaosPlan::Deed;

class Chaos {
 public:
  Chaos(Cluster& cluster, std::string job, const ChaosPlan& plan)
      : cluster_(cluster), job_(std::move(job)), plan_(plan), rng_(plan.seed) {
    cluster_.client->set_interrupt_fd(signals_.fd());
  }

  // Until its time is over, the job is, or a signal came. An error: the job did not step on, or nothing was
  // hit, of which no one should think that the job has stood it.
  absl::Status Run() {
    const Instant end = plan_.all ? clock_.Now() + *plan_.all : Instant{INT64_MAX};
    const bool plays = plan_.deed == Deed::kTrace;
    Say(absl::StrCat(
        job_, ": ", plan_.Words(),
        plays ? "" : absl::StrCat(" every ", PrintDuration(plan_.every), ", half of it more or less"),
        "; --seed ", plan_.seed));
    const absl::Status struck = plays ? PlayUntil(end) : StrikeUntil(end);
    GT_RETURN_IF_ERROR(Undrain());  // however it ended
    GT_RETURN_IF_ERROR(struck);
    GT_ASSIGN_OR_RETURN(last_, AskJob(cluster_, job_, absl::Seconds(20)));
    return deeds_.empty() ? NothingHit() : absl::OkStatus();
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
      absl::StrAppendFormat(&out, "; it stood still for %.2f s in the median, %.2f s at most",
                            report["seconds_median"].get<double>(), report["seconds_max"].get<double>());
    return absl::StrCat(out, "; it is ", SafeText(last_.state), "\n");
  }

 private:
  void Say(const std::string& line) const { Complain(SafeText(line)); }

  // Why a fault did not come. The last of these is the error when none came at all.
  void Miss(const std::string& why) {
    if (said_.insert(why).second) Say(why);
    why_not_ = why;
  }

  absl::Status NothingHit() const {
    std::string why = why_not_;
    if (why.empty() && last_.Final()) why = OverText(last_);
    if (why.empty() && signalled_) why = "a signal came before the first fault";
    if (why.empty()) {
      why = absl::StrCat("--for was over before the first fault, which comes after ",
                         PrintDuration(plan_.every / 2), " to ", PrintDuration(plan_.every * 3 / 2),
                         ": give a longer --for or a shorter --every");
    }
    return absl::FailedPreconditionError(absl::StrCat("nothing was hit: ", why));
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
  std::vector<RankDoc> Candidates(const JobDoc& job) const {
    std::vector<RankDoc> running;
    for (const RankDoc& rank : job.ranks) {
      if (rank.pid > 0 && rank.state != "exited" && (!plan_.rank || rank.rank == *plan_.rank) &&
          (plan_.node.empty() || rank.hostname == plan_.node) && (Named() || IsMember(job, rank)))
        running.push_back(rank);
    }
    return running;
  }

  bool Named() const { return plan_.rank || !plan_.node.empty(); }

  // Nobody while the job is formed, or where a drain would do no good.
  absl::StatusOr<std::vector<RankDoc>> Victims(const JobDoc& job) {
    std::vector<RankDoc> running = Candidates(job);
    if (running.empty()) {
      Miss(absl::StrCat("no rank to hit: ", plan_.Words(), "; ", job.state, ": gtrain why ", job_));
    } else if (plan_.deed == Deed::kDrain) {
      GT_ASSIGN_OR_RETURN(const MachineMap machines, Machines());
      std::erase_if(running, [&](const RankDoc& rank) {
        const std::string why = WhyNoDrain(machines, rank.hostname);
        if (!why.empty()) Miss(why);
        return !why.empty();
      });
      if (running.empty() && deeds_.empty()) return NothingHit();
    }
    if (running.empty() || Named()) return running;
    return std::vector<RankDoc>{running[rng_.Below(running.size())]};
  }

  // Whom the job will not have is a mistake, and not a fault that did not come.
  absl::Status CheckWhom(const JobDoc& job) {
    const int ranks = std::max(job.world_size, static_cast<int>(job.ranks.size()));
    if (plan_.rank && ranks > 0 && *plan_.rank >= ranks) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rank ", *plan_.rank, ": ", job_, " has ranks 0 to ", ranks - 1));
    }
    if (plan_.node.empty()) return absl::OkStatus();
    GT_ASSIGN_OR_RETURN(const MachineMap machines, Machines());
    if (!machines.contains(plan_.node)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--node ", plan_.node, ": there is no such machine; `gtrain nodes` lists them"));
    }
    const auto is_there = [&](const RankDoc& rank) { return rank.hostname == plan_.node; };
    if (job.ranks.empty() || std::ranges::any_of(job.ranks, is_there)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("--node ", plan_.node, ": no rank of ", job_,
                                                   " is there; `gtrain status ", job_,
                                                   "` says where they are"));
  }

  absl::Status StrikeUntil(Instant end) {
    GT_ASSIGN_OR_RETURN(const JobDoc first, AskJob(cluster_, job_, absl::Seconds(20)));
    if (!first.Final()) GT_RETURN_IF_ERROR(CheckWhom(first));
    while (Pause(plan_.every * (0.5 + rng_.Unit()), end)) {
      GT_ASSIGN_OR_RETURN(const JobDoc before, AskJob(cluster_, job_, absl::Seconds(20)));
      if (before.Final()) break;
      GT_RETURN_IF_ERROR(Undrain());  // of one that waited beside the ranks
      GT_ASSIGN_OR_RETURN(const std::vector<RankDoc> victims, Victims(before));
      if (victims.empty() || !Strike(before, victims)) continue;
      if (std::ranges::any_of(victims, [&](const RankDoc& rank) { return IsMember(before, rank); })) {
        GT_RETURN_IF_ERROR(AwaitStep(before, victims));
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
      const absl::Status done =
          plan_.deed == Deed::kDrain ? Drain(victim.hostname, plan_.lasts) : Signal(victim);
      if (done.ok()) {
        hit.push_back(victim.rank);
      } else {
        Miss(absl::StrCat("rank ", victim.rank, ": ", done.message()));
      }
      if (plan_.deed == Deed::kDrain) break;  // the whole node
    }
    if (hit.empty()) return false;
    deeds_.push_back({{"generation", job.generation},
                      {"ranks", hit},
                      {"hostname", victims[0].hostname},
                      {"step", job.step ? json(*job.step) : json(nullptr)}});
    return true;
  }

  // The end of the generation, which a signal brings about, may kill the command that gave it: then its exit
  // code is above this.
  static constexpr int kKilled = 128;

  // Its exit code.
  absl::StatusOr<int> Exec(int rank, std::vector<std::string> argv) {
    GT_ASSIGN_OR_RETURN(
        const std::string text,
        Ask(cluster_,
            core::ClientExec{.job = JobId(job_), .rank = rank, .argv = std::move(argv), .apart = true}));
    const json reply = json::parse(text, nullptr, /*allow_exceptions=*/false);
    const auto code = reply.find("exit_code");
    return code != reply.end() && code->is_number_integer() ? code->get<int>() : 1;
  }

  absl::Status Signal(const RankDoc& victim) {
    GT_ASSIGN_OR_RETURN(const int exit_code, Exec(victim.rank, plan_.Command(victim.pid)));
    if (exit_code == 0 || exit_code > kKilled) return absl::OkStatus();
    return absl::UnavailableError(plan_.WhyNot(exit_code));
  }

  absl::Status Drain(const std::string& hostname, absl::Duration notice) {
    const core::ClientDrainNode drain{.node = hostname, .left = notice, .reason = kReason};
    GT_RETURN_IF_ERROR(Ask(cluster_, drain).status());
    drained_.push_back(hostname);
    return absl::OkStatus();
  }

  // By host name, why nothing is placed there; empty: it is used.
  using MachineMap = std::map<std::string, std::string>;

  absl::StatusOr<MachineMap> Machines() {
    GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster_, core::ClientNodes{}));
    const json reply = json::parse(text, nullptr, /*allow_exceptions=*/false);
    MachineMap machines;
    const auto nodes = reply.is_object() ? reply.find("nodes") : reply.end();
    if (!reply.is_object() || nodes == reply.end() || !nodes->is_array())
      return absl::InternalError("the head's answer lists no nodes");
    for (const json& node : *nodes) {
      const std::string unusable = TextOf(node, "unusable");
      std::string& why = machines.try_emplace(TextOf(node, "hostname"), unusable).first->second;
      if (unusable.empty()) why.clear();  // a machine that has joined again is also listed as it was
    }
    return machines;
  }

  // Empty: it may be drained. Whether there is room elsewhere is the head's to know.
  static std::string WhyNoDrain(const MachineMap& machines, const std::string& hostname) {
    const auto found = machines.find(hostname);
    if (found != machines.end() && !found->second.empty())
      return absl::StrCat(hostname, " is not drained: it takes no ranks as it is (", found->second, ")");
    const auto is_other = [&](const auto& machine) {
      return machine.first != hostname && machine.second.empty();
    };
    if (std::ranges::any_of(machines, is_other)) return "";
    return absl::StrCat(hostname, " is not drained: the job has nowhere else to go, for no other machine ",
                        "takes ranks; `gtrain nodes` says why");
  }

  // As many machines are left as the trace has, of the most that it ever has.
  absl::Status PlayUntil(Instant end) {
    GT_ASSIGN_OR_RETURN(const MachineMap all, Machines());
    std::vector<std::string> machines;
    for (const auto& [hostname, why] : all) {
      if (why.empty()) machines.push_back(hostname);
    }
    why_not_ = absl::StrCat("as far as the trace was played, all ", machines.size(),
                            " machines that take ranks stay");
    const int most = *std::ranges::max_element(plan_.trace.nodes);
    std::set<std::string> gone;
    for (const int there : plan_.trace.nodes) {
      GT_ASSIGN_OR_RETURN(const JobDoc job, AskJob(cluster_, job_, absl::Seconds(20)));
      if (job.Final()) return absl::OkStatus();
      const double share = most == 0 ? 0 : static_cast<double>(there) / most;
      const auto stay = static_cast<size_t>(std::lround(share * static_cast<double>(machines.size())));
      GT_RETURN_IF_ERROR(Change(job, machines, machines.size() - stay, gone));
      if (!Pause(plan_.trace.gap / plan_.speed, end)) break;
    }
    return absl::OkStatus();
  }

  // Lets machines go, or come back, until so many are gone.
  absl::Status Change(const JobDoc& job, const std::vector<std::string>& machines, size_t count,
                      std::set<std::string>& gone) {
    std::vector<std::string> went, came;
    while (gone.size() < count) {
      std::vector<std::string> there;
      std::ranges::set_difference(machines, gone, std::back_inserter(there));
      const std::string& one = there[rng_.Below(there.size())];
      GT_RETURN_IF_ERROR(Take(job, one));
      went.push_back(one);
      gone.insert(one);
    }
    while (gone.size() > count) {
      const std::string one = *std::next(gone.begin(), static_cast<ptrdiff_t>(rng_.Below(gone.size())));
      GT_RETURN_IF_ERROR(GiveBack(one));
      std::erase(drained_, one);
      came.push_back(one);
      gone.erase(one);
    }
    if (went.empty() && came.empty()) return absl::OkStatus();
    deeds_.push_back({{"generation", job.generation},
                      {"machines", machines.size() - gone.size()},
                      {"went", went},
                      {"came", came},
                      {"step", job.step ? json(*job.step) : json(nullptr)}});
    Say(absl::StrCat(machines.size() - gone.size(), " of ", machines.size(), " machines",
                     went.empty() ? "" : absl::StrCat(", without ", absl::StrJoin(went, ", ")),
                     came.empty() ? "" : absl::StrCat(", again with ", absl::StrJoin(came, ", ")), "; step ",
                     job.step.value_or(0)));
    return absl::OkStatus();
  }

  // Without a notice the machine's ranks end first, all at once: what is drained has time to hand over.
  // Nothing is placed there any more.
  absl::Status Take(const JobDoc& job, const std::string& hostname) {
    constexpr absl::Duration kAtOnce = absl::Seconds(1);
    if (plan_.lasts > absl::ZeroDuration()) return Drain(hostname, plan_.lasts);
    std::vector<int64_t> pids;
    int beside = 0;
    for (const RankDoc& rank : job.ranks) {
      if (rank.hostname != hostname || rank.pid <= 0 || rank.state == "exited") continue;
      beside = rank.rank;
      pids.push_back(rank.pid);
    }
    if (!pids.empty()) {
      const absl::StatusOr<int> killed = Exec(beside, ChaosPlan::KillCommand(pids));
      if (!killed.ok()) Say(absl::StrCat("rank ", beside, " on ", hostname, ": ", killed.status().message()));
      if (killed.ok() && *killed != 0 && *killed <= kKilled)
        Say(absl::StrCat(hostname, ": no process of the job was there any more to be killed"));
    }
    return Drain(hostname, kAtOnce);
  }

  static std::string NumbersOf(const std::vector<RankDoc>& ranks) {
    return absl::StrJoin(ranks, ",",
                         [](std::string* out, const RankDoc& rank) { absl::StrAppend(out, rank.rank); });
  }

  // Until every rank that was there, or the next generation, has gone a step on.
  absl::Status AwaitStep(const JobDoc& before, const std::vector<RankDoc>& victims) {
    const Instant at = clock_.Now(), by = at + plan_.lasts + kRecoverWithin;
    Instant moved = at;  // when the last step was seen
    std::optional<int64_t> seen = before.step;
    absl::Duration still;  // the longest time without a step
    while (Pause(kAskEvery, by)) {
      GT_ASSIGN_OR_RETURN(const JobDoc job, AskJob(cluster_, job_, absl::Seconds(20)));
      if (job.Final()) return absl::OkStatus();
      const Instant now = clock_.Now();
      const bool over = now - at > plan_.lasts;
      const bool anew = job.generation > before.generation && job.state == "RUNNING" && job.step;
      const bool steps = anew || (job.generation == before.generation && job.step > seen);
      if (steps) {
        still = std::max(still, now - moved);
        moved = now;
        seen = job.step;
      }
      if (anew || (steps && over && !plan_.Ends())) {
        // What a killed rank did last may be heard after its end, so that such a time is one from the fault.
        Tell(before, victims, job, plan_.Ends() ? now - at : still);
        return Undrain();
      }
      if (!over || drained_.empty()) continue;
      // It has had its time. A job that has found no place until now would wait for this drain alone.
      GT_RETURN_IF_ERROR(Undrain());
      if (job.state != "WAITING") continue;
      Say(absl::StrCat("rank ", NumbersOf(victims), " on ", victims[0].hostname, ": ", job_,
                       " had nowhere else to go in ", PrintDuration(plan_.lasts),
                       "; the drain is taken back, and no restart is timed"));
      return absl::OkStatus();
    }
    if (signalled_) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(job_, " has not stepped on within ",
                                                    PrintDuration(plan_.lasts + kRecoverWithin),
                                                    ", or reports no steps: gtrain why ", job_));
  }

  void Tell(const JobDoc& before, const std::vector<RankDoc>& victims, const JobDoc& now,
            absl::Duration still) {
    const double took = absl::ToDoubleSeconds(still);
    took_.push_back(took);
    deeds_.back()["seconds"] = took;
    const int64_t lost = before.step.value_or(0) - *now.step;
    Say(absl::StrFormat(
        "rank %s on %s: step %d, on at step %d in generation %d; the job stood still for "
        "%.2f s%s",
        NumbersOf(victims), victims[0].hostname, before.step.value_or(0), *now.step, now.generation, took,
        lost > 0 ? absl::StrFormat("; %d steps are made again", lost) : ""));
  }

  absl::Status Undrain() {
    for (const std::string& node : std::exchange(drained_, {})) GT_RETURN_IF_ERROR(GiveBack(node));
    return absl::OkStatus();
  }

  absl::Status GiveBack(const std::string& node) {
    return Ask(cluster_,
               core::ClientDrainNode{.node = node, .left = {}, .reason = kReason, .undo = true, .own = true})
        .status();
  }

  Cluster& cluster_;
  const std::string job_;
  const ChaosPlan& plan_;
  Rng rng_;
  const RealClock clock_;
  SignalPipe signals_;
  bool signalled_ = false;
  std::set<std::string> said_;
  std::string why_not_;
  std::vector<std::string> drained_;
  json deeds_ = json::array();
  std::vector<double> took_;
  JobDoc last_;
};

absl::StatusOr<int> Run(const Args& args) {
  GT_ASSIGN_OR_RETURN(const ChaosPlan plan, ChaosPlanOf(args));
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
  verb.summary = "Cause faults in a job, and say how long it stands still after each";
  verb.usage =
      "[--kill|--term|--stop TIME|--slow TIME|--cut TIME|--fill TIME|--drain TIME|--trace FILE] [flags] "
      "[JOB]";
  verb.details =
      "Kills a rank of the job every few seconds, or does what the flags say, waits until the job has gone a "
      "step\n"
      "on, and begins again: until --for is over, the job is, or Ctrl-C. Nothing is left behind: a rank that "
      "was\n"
      "stopped goes on by itself, a drain is taken back. It takes what `gtrain exec` takes: one's own jobs, "
      "or an\n"
      "administrator's key, which --drain and --trace need in any case. The audit log has each fault.\n\n"
      "  gtrain chaos train-3 --for 5m\n"
      "  gtrain chaos train-3 --stop 20s --rank 0 --every 1m\n"
      "  gtrain chaos train-3 --kill --node gpu-7 --for 1m --json\n"
      "  gtrain chaos train-3 --trace aws-v100-16node.json --speed 10 --drain 30s";
  verb.flags = ChaosFlags();
  verb.flags.push_back(ContextFlag());
  verb.flags.push_back({"json", '\0', "", "one document at the end: each fault and how long it took"});
  verb.completes = Completes::kLiveJobs;
  verb.words_max = 1;
  verb.run = RunChaos;
  return verb;
}

}  // namespace gtrain::cli
