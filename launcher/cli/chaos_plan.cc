#include "launcher/cli/chaos_plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "job/spec/parse.h"
#include "job/spec/values.h"

namespace gtrain::cli {
namespace {

using Deed = ChaosPlan::Deed;

constexpr size_t kTraceBytesMax = 16 << 20;
constexpr double kSpeedMax = 100'000;

struct DeedFlag {
  Deed deed;
  const char* name;
  bool timed;
};
constexpr std::array<DeedFlag, 7> kDeeds = {{{Deed::kKill, "kill", false},
                                             {Deed::kTerm, "term", false},
                                             {Deed::kStop, "stop", true},
                                             {Deed::kSlow, "slow", true},
                                             {Deed::kCut, "cut", true},
                                             {Deed::kFill, "fill", true},
                                             {Deed::kDrain, "drain", true}}};

absl::StatusOr<absl::Duration> TimeOf(const Args& args, absl::string_view flag) {
  const absl::StatusOr<absl::Duration> time = ParseDuration(args.Get(flag));
  if (time.ok() && *time > absl::ZeroDuration()) return *time;
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " ", spec::Shown(args.Get(flag)), ": write a time, such as 5s"));
}

absl::Status ReadDeed(const Args& args, ChaosPlan& plan) {
  std::vector<std::string> given, known;
  for (const DeedFlag& flag : kDeeds) {
    known.push_back(absl::StrCat("--", flag.name));
    if (!args.Has(flag.name)) continue;
    given.push_back(known.back());
    plan.deed = flag.deed;
    if (!flag.timed) continue;
    GT_ASSIGN_OR_RETURN(plan.lasts, TimeOf(args, flag.name));
  }
  if (given.size() <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("one of ", absl::StrJoin(known, ", "), " at a time, not ", absl::StrJoin(given, " and ")));
}

absl::Status ReadTrace(const Args& args, ChaosPlan& plan) {
  if (!args.Has("trace")) {
    return args.Has("speed") ? absl::InvalidArgumentError("--speed is that of a --trace") : absl::OkStatus();
  }
  if (plan.deed != Deed::kDrain && (plan.deed != Deed::kKill || args.Has("kill")))
    return absl::InvalidArgumentError(
        "with --trace machines go: at once, or with --drain TIME after a notice of that");
  for (const char* flag : {"rank", "node", "every"}) {
    if (args.Has(flag)) return absl::InvalidArgumentError(absl::StrCat("--trace or --", flag, ", not both"));
  }
  const std::string path = args.Get("trace");
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kTraceBytesMax));
  absl::StatusOr<spec::SpotTrace> trace = spec::ParseSpotTrace(text);
  if (!trace.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", trace.status().message()));
  plan.trace = *std::move(trace);
  plan.deed = Deed::kTrace;
  if (!args.Has("speed")) return absl::OkStatus();
  if (absl::SimpleAtod(args.Get("speed"), &plan.speed) && plan.speed > 0 && plan.speed <= kSpeedMax)
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--speed ", spec::Shown(args.Get("speed")), ": write how many times as fast, such as 10"));
}

// What each deed does to the process $1 for $2 seconds; $3 is a folder, $4 rules of the firewall, $5 the time
// in milliseconds. What lasts is left behind by the shell and ends by itself, whatever becomes of the client.
std::string ActOf(Deed deed) {
  constexpr char kAside[] = " < /dev/null > /dev/null 2>&1 & }";
  switch (deed) {
    case Deed::kTerm:
      return "kill -TERM $1";
    case Deed::kStop:
      return absl::StrCat("kill -STOP -$1 && { (sleep $2; kill -CONT -$1)", kAside);
    case Deed::kSlow:
      return absl::StrCat(
          "kill -0 -$1 && { (end=$(($(date +%s%3N) + $5)); while [ $(date +%s%3N) -lt $end ] && "
          "kill -STOP -$1; do sleep 0.05; kill -CONT -$1; sleep 0.05; done)",
          kAside);
    case Deed::kCut:
      // The rules let everything through until addresses are in their sets, which is after the reply has
      // left; the kernel takes them out again.
      return absl::StrCat(
          "printf '%s' \"$4\" | nft -f - 2> /dev/null || exit ", kMayNot,
          "; { (sleep 0.3; for set in '4 { 0.0.0.0/1 timeout T, 128.0.0.0/1 timeout T }' '6 { "
          "::/1 timeout T, 8000::/1 timeout T }'; do nft add element inet gtrain_chaos \"all$("
          "printf '%s' \"$set\" | sed \"s/T/$5ms/g\")\"; done)",
          kAside);
    case Deed::kFill:
      // The file has no name, so it is gone when the last process that holds it is.
      return absl::StrCat(
          "dir=${3:-/proc/$1/cwd/}; file=\"$dir/.gtrain-chaos.$$\"; touch \"$file\" 2> /dev/null || exit ",
          kMayNot,
          "; exec 9> \"$file\"; rm \"$file\"; { (fallocate -l $(df -B1 --output=avail \"$dir\" | tail -n 1) "
          "/proc/self/fd/9; cat "
          "/dev/zero >&9; sleep $2)",
          kAside);
    default:
      return "kill -KILL $1";
  }
}

// Loopback is spared: it is what the processes of one machine talk over.
constexpr char kCutRules[] =
    "table inet gtrain_chaos\n"
    "delete table inet gtrain_chaos\n"
    "table inet gtrain_chaos {\n"
    "  set all4 { type ipv4_addr; flags interval, timeout; }\n"
    "  set all6 { type ipv6_addr; flags interval, timeout; }\n"
    "  chain in { type filter hook input priority -10; iifname lo accept; ip saddr @all4 drop; "
    "ip6 saddr @all6 drop; }\n"
    "  chain out { type filter hook output priority -10; oifname lo accept; ip daddr @all4 drop; "
    "ip6 daddr @all6 drop; }\n"
    "}\n";

}  // namespace

absl::StatusOr<ChaosPlan> ChaosPlanOf(const Args& args) {
  ChaosPlan plan;
  GT_RETURN_IF_ERROR(ReadDeed(args, plan));
  GT_RETURN_IF_ERROR(ReadTrace(args, plan));
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
  plan.folder = args.Get("dir");
  if (!plan.folder.empty() && plan.deed != Deed::kFill)
    return absl::InvalidArgumentError("--dir says what --fill fills");
  if (!plan.folder.empty() && plan.folder[0] != '/')
    return absl::InvalidArgumentError(absl::StrCat("--dir ", spec::Shown(plan.folder),
                                                   ": write the whole path, as it is on the rank's machine"));
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> seed, args.Int("seed", 0, INT64_MAX));
  plan.seed = seed ? static_cast<uint64_t>(*seed) : Rng::FromSystem().Next() >> 33;
  return plan;
}

std::string ChaosPlan::Words() const {
  const std::string whom = rank            ? absl::StrCat("rank ", *rank)
                           : !node.empty() ? absl::StrCat("all ranks on ", node)
                                           : "a rank";
  const std::string time = PrintDuration(lasts);
  switch (deed) {
    case Deed::kKill:
      return absl::StrCat("kills ", whom);
    case Deed::kTerm:
      return absl::StrCat("ends ", whom, " by SIGTERM");
    case Deed::kStop:
      return absl::StrCat("stops ", whom, " for ", time);
    case Deed::kSlow:
      return absl::StrCat("lets ", whom, " run half of the time for ", time);
    case Deed::kCut:
      return absl::StrCat("cuts the machine of ", whom, " off for ", time);
    case Deed::kFill:
      return absl::StrCat(
          "fills ", folder.empty() ? absl::StrCat("the disk of ", whom) : absl::StrCat(folder, " of ", whom),
          " for ", time);
    case Deed::kDrain:
      return absl::StrCat("drains the node of ", whom, ", which goes in ", time);
    case Deed::kTrace:
      return absl::StrCat("lets machines come and go as in a trace of ", trace.nodes.size(), " times ",
                          PrintDuration(trace.gap),
                          speed == 1 ? "" : absl::StrFormat(", %g times as fast", speed),
                          lasts > absl::ZeroDuration() ? absl::StrCat(", after a notice of ", time) : "");
  }
  return "";
}

std::vector<std::string> ChaosPlan::Command(int64_t pid) const {
  // The process may have ended since it was looked up, and its number may be another's by now: the rank's
  // token, which no other process has, says whose it is. One that goes on in place was started with another.
  const std::string check = absl::StrCat(
      "it=GTRAIN_TOKEN=$GTRAIN_TOKEN; [ \"$GTRAIN_ELASTIC\" = in-place ] && it=GTRAIN_JOB=$GTRAIN_JOB; "
      "tr '\\0' '\\n' < /proc/$1/environ | grep -qxF \"$it\" || exit ",
      kProcessEnded, "; ");
  return {"sh",
          "-c",
          check + ActOf(deed),
          "chaos",
          absl::StrCat(pid),
          absl::StrFormat("%.3f", absl::ToDoubleSeconds(lasts)),
          folder,
          deed == Deed::kCut ? kCutRules : "",
          absl::StrCat(absl::ToInt64Milliseconds(lasts))};
}

std::vector<std::string> ChaosPlan::KillCommand(const std::vector<int64_t>& pids) {
  std::vector<std::string> command = {
      "sh", "-c",
      "mine=; for pid; do tr '\\0' '\\n' < /proc/$pid/environ | grep -qxF \"GTRAIN_JOB=$GTRAIN_JOB\" && "
      "mine=\"$mine $pid\"; done; kill -KILL $mine",
      "chaos"};
  for (const int64_t pid : pids) command.push_back(absl::StrCat(pid));
  return command;
}

std::string ChaosPlan::WhyNot(int exit_code) const {
  if (exit_code == kMayNot && deed == Deed::kCut)
    return "its machine cannot be cut off: that takes root there, and the program nft";
  if (exit_code == kMayNot)
    return absl::StrCat("it cannot write a file in ", folder.empty() ? "the folder of the rank" : folder);
  if (exit_code == kProcessEnded) return "its process had ended already";
  return absl::StrCat("nothing was done to it: exit code ", exit_code);
}

std::vector<Flag> ChaosFlags() {
  return {{"kill", '\0', "", "SIGKILL; what is done without another flag"},
          {"term", '\0', "", "SIGTERM, as a preemption sends it"},
          {"stop", '\0', "TIME", "stand still for so long"},
          {"slow", '\0', "TIME", "run half of the time for so long"},
          {"cut", '\0', "TIME",
           "no packet to or from its machine for so long, but for loopback; takes root and nft there"},
          {"fill", '\0', "TIME", "no free byte on its disk for so long"},
          {"dir", '\0', "DIR",
           "of --fill: the disk with this folder; default: the folder in which the rank works"},
          {"drain", '\0', "TIME",
           "as `gtrain node drain --deadline TIME`, taken back when the job runs elsewhere"},
          {"trace", '\0', "FILE",
           "machines of the cluster come and go as in a recorded trace (docs/formats/spot-run.md): at once, "
           "or with --drain TIME after a notice"},
          {"speed", '\0', "X", "of --trace: so many times as fast"},
          {"every", '\0', "TIME", "from one fault to the next, half of it more or less; default 5s"},
          {"for", '\0', "TIME", "no further fault after so long; default: until the job ends"},
          {"rank", '\0', "R", "always this rank, which may be a spare; default: any member"},
          {"node", '\0', "HOST", "all ranks of the job on this node"},
          {"seed", '\0', "N", "the same choices again"}};
}

}  // namespace gtrain::cli
