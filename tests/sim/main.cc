// gtrain-sim: the control plane's cores in a simulated cluster, many seeds at once.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "base/logging.h"
#include "base/probe.h"
#include "base/units.h"
#include "tests/sim/actor_fleet.h"
#include "tests/sim/actor_world.h"
#include "tests/sim/scenario.h"
#include "tests/sim/spot.h"
#include "tests/sim/world.h"

namespace gtrain::sim {
namespace {

constexpr char kHelp[] =
    "gtrain-sim: runs the head's, the agents' and the clients' logic in a simulated cluster and checks the\n"
    "invariants of docs/protocols/invariants.md after every event\n"
    "\n"
    "  gtrain-sim --seed 17                 one seed\n"
    "  gtrain-sim --seed 17 --trace         the same, every event printed\n"
    "  gtrain-sim --seeds 1..200 --jobs 2   many, in two processes\n"
    "  gtrain-sim --actors --seed 17        a job of actors instead: processes that call each other's, and "
    "lose\n"
    "                                       connections and each other; --trace and --seeds likewise\n"
    "  gtrain-sim --fleet                   10,000 actors in 64 processes, what they send and what they "
    "cost\n"
    "  gtrain-sim --scenario FILE           a schedule as data; a directory: each *.txt of it\n"
    "\n"
    "  gtrain-sim --spot-trace FILE         a job on the machines of a recorded trace "
    "(docs/formats/spot-run.md)\n"
    "\n"
    "  --report FILE    also write the report there\n"
    "  --minutes M      stop starting new seeds after so long\n"
    "With --spot-trace, besides --seed and --trace:\n"
    "  --mode in-place|restart   of the job; in-place if nothing is said\n"
    "  --checkpoint-every TIME   1m; never: only where a notice says that a machine goes\n"
    "  --notice TIME             machines hear so long before that they go; else they vanish\n"
    "  --min N                   ranks of the job at least; 1\n"
    "  --hours H                 the first hours of the trace alone\n"
    "  --samples-out FILE        each applied batch, and what became of each machine\n"
    "\n"
    "Exit code: 0 nothing found, 1 an invariant was violated or an expectation not met, 2 usage.\n";

struct Options {
  uint64_t first = 1, last = 0;
  bool trace = false, actors = false, fleet = false;
  int jobs = 1;
  std::string report, scenario, spot_trace;
  int minutes = 0;
  SpotOptions spot;
};

struct Outcome {
  uint64_t hash = 0;
  std::vector<Violation> violations;
};

struct Totals {
  int64_t seeds = 0, failed = 0, longest_recovery = 0, simulated = 0, events = 0;
  uint64_t slowest_recovery_seed = 0;
  std::map<std::string, int64_t> counts;
};

// `World` has a kernel and RunSwarm.
template <typename World>
Outcome RunIn(World& world, bool echo, size_t keep, Totals* totals) {
  if (echo || keep > 0) world.kernel.Trace(keep > 0 ? keep : 1, echo);
  world.RunSwarm();
  if (totals != nullptr) {
    ++totals->seeds;
    totals->simulated += world.kernel.now() / kSec;
    totals->events += static_cast<int64_t>(world.kernel.events());
    for (const auto& [name, count] : world.kernel.counts) totals->counts[name] += count;
  }
  if (keep > 0) {
    std::printf("the last %zu events:\n", world.kernel.trace().size());
    for (const std::string& line : world.kernel.trace()) std::printf("  %s\n", line.c_str());
  }
  return {world.kernel.hash(), world.kernel.violations()};
}

Outcome RunSeed(const Options& options, uint64_t seed, bool echo, size_t keep, Totals* totals) {
  Rng rng(seed ^ 0x6774726169);
  if (options.actors) {
    ActorWorld world(seed, DrawActors(rng));
    return RunIn(world, echo, keep, totals);
  }
  World world(seed, Draw(rng));
  Outcome outcome = RunIn(world, echo, keep, totals);
  if (totals != nullptr) {
    if (world.recovery > totals->longest_recovery) {
      totals->longest_recovery = world.recovery;
      totals->slowest_recovery_seed = seed;
    }
    totals->counts["generation granted"] += world.checker.granted();
  }
  return outcome;
}

// True when the seed is clean.
bool TrySeed(const Options& options, uint64_t seed, Totals* totals) {
  Outcome outcome = RunSeed(options, seed, false, 0, totals);
  const bool replay = seed % 100 == 0;
  if (replay && outcome.violations.empty() &&
      RunSeed(options, seed, false, 0, nullptr).hash != outcome.hash) {
    outcome.violations.push_back({"INV-10", "a second run of the seed took another course", 0});
  }
  if (outcome.violations.empty()) return true;
  ++totals->failed;
  std::printf("\nseed %llu, commit %s: %s violated\n", static_cast<unsigned long long>(seed),
              GTRAIN_SIM_COMMIT, outcome.violations[0].id.c_str());
  for (const Violation& violation : outcome.violations) {
    std::printf("  %s at %.3f s: %s\n", violation.id.c_str(), static_cast<double>(violation.at) / 1e9,
                violation.text.c_str());
  }
  (void)RunSeed(options, seed, false, 50, nullptr);
  std::printf("again: gtrain-sim %s--seed %llu --trace\n", options.actors ? "--actors " : "",
              static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  return false;
}

void Write(FILE* out, const Totals& totals) {
  std::fprintf(out, "%lld %lld %lld %llu %lld %lld\n", static_cast<long long>(totals.seeds),
               static_cast<long long>(totals.failed), static_cast<long long>(totals.longest_recovery),
               static_cast<unsigned long long>(totals.slowest_recovery_seed),
               static_cast<long long>(totals.simulated), static_cast<long long>(totals.events));
  for (const auto& [name, count] : totals.counts) {
    std::fprintf(out, "%lld %s\n", static_cast<long long>(count), name.c_str());
  }
}

void Merge(const std::string& path, Totals* totals) {
  std::ifstream in(path);
  Totals one;
  in >> one.seeds >> one.failed >> one.longest_recovery >> one.slowest_recovery_seed >> one.simulated >>
      one.events;
  std::string name;
  int64_t count = 0;
  while (in >> count && std::getline(in >> std::ws, name)) totals->counts[name] += count;
  totals->seeds += one.seeds;
  totals->failed += one.failed;
  totals->simulated += one.simulated;
  totals->events += one.events;
  if (one.longest_recovery > totals->longest_recovery) {
    totals->longest_recovery = one.longest_recovery;
    totals->slowest_recovery_seed = one.slowest_recovery_seed;
  }
}

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string ReportText(const Totals& totals, double seconds, int jobs) {
  std::string text = absl::StrFormat(
      "%d seeds in %.1f s on %d processes: %.2f seeds/s; commit %s\n%d violated an invariant\n"
      "%.1f simulated hours, %d events; longest recovery %.1f s (seed %d)\n",
      totals.seeds, seconds, jobs, static_cast<double>(totals.seeds) / seconds, GTRAIN_SIM_COMMIT,
      totals.failed, static_cast<double>(totals.simulated) / 3600, totals.events,
      static_cast<double>(totals.longest_recovery) / 1e9, totals.slowest_recovery_seed);
  int64_t faults = 0;
  std::string never;
  for (const auto& [name, count] : totals.counts) {
    absl::StrAppend(&text, absl::StrFormat("%12d  %s\n", count, name));
    if (absl::StartsWith(name, "fault ")) faults += count;
    if (count == 0 && absl::StartsWith(name, "probe ")) absl::StrAppend(&never, "  ", name.substr(6), "\n");
  }
  absl::StrAppend(&text, faults, " faults; probes never reached:\n", never.empty() ? "  none\n" : never);
  return text;
}

// Each process takes every n-th seed. `trying`: a file that has the one it is at, for a crash says nothing.
void Worker(const Options& options, int index, double began, FILE* out, const std::string& trying) {
  Totals totals;
  for (uint64_t seed = options.first + static_cast<uint64_t>(index); seed <= options.last;
       seed += static_cast<uint64_t>(options.jobs)) {
    if (options.minutes > 0 && Seconds() - began > 60.0 * options.minutes) break;
    std::ofstream(trying) << seed;
    (void)TrySeed(options, seed, &totals);
    if (totals.failed >= 5) break;
  }
  for (const auto& [name, hits] : options.actors ? std::vector<std::pair<const char*, uint64_t>>() : Probes())
    totals.counts[absl::StrCat("probe ", name)] += static_cast<int64_t>(hits);
  Write(out, totals);
}

int Swarm(const Options& options) {
  const double began = Seconds();
  std::string dir = std::filesystem::temp_directory_path() / "gtrain-sim-XXXXXX";
  if (mkdtemp(dir.data()) == nullptr) {
    std::fprintf(stderr, "gtrain-sim: cannot make %s: %s\n", dir.c_str(), std::strerror(errno));
    return 2;
  }
  std::vector<pid_t> children;
  std::string broken;
  for (int i = 0; i < options.jobs; ++i) {
    const pid_t pid = fork();
    if (pid == 0) {
      FILE* out = std::fopen(absl::StrCat(dir, "/", i).c_str(), "w");
      Worker(options, i, began, out, absl::StrCat(dir, "/trying-", i));
      std::fclose(out);
      std::fflush(stdout);
      _exit(0);
    }
    children.push_back(pid);
  }
  Totals totals;
  for (int i = 0; i < options.jobs; ++i) {
    int status = 0;
    waitpid(children[static_cast<size_t>(i)], &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      std::string seed;
      std::ifstream(absl::StrCat(dir, "/trying-", i)) >> seed;
      absl::StrAppend(&broken, "seed ", seed, " crashed, ",
                      WIFSIGNALED(status) ? absl::StrCat("signal ", WTERMSIG(status))
                                          : absl::StrCat("code ", WEXITSTATUS(status)),
                      ": the seeds behind it that its process had were not run\n");
    }
    Merge(absl::StrCat(dir, "/", i), &totals);
  }
  std::error_code ignored;
  std::filesystem::remove_all(dir, ignored);
  const std::string text = ReportText(totals, Seconds() - began, options.jobs);
  std::printf("\n%s", text.c_str());
  if (!options.report.empty()) std::ofstream(options.report) << text;
  std::printf("%s", broken.c_str());
  return totals.failed > 0 || !broken.empty() ? 1 : 0;
}

int Scenarios(const Options& options) {
  namespace fs = std::filesystem;
  std::vector<fs::path> paths;
  if (fs::is_directory(options.scenario)) {
    for (const auto& entry : fs::directory_iterator(options.scenario)) {
      if (entry.path().extension() == ".txt") paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
  } else {
    paths.push_back(options.scenario);
  }
  int failed = paths.empty() ? 2 : 0;
  for (const fs::path& path : paths) {
    std::ifstream in(path);
    if (!in) {
      std::fprintf(stderr, "gtrain-sim: cannot read %s\n", path.c_str());
      return 2;
    }
    std::stringstream text;
    text << in.rdbuf();
    const std::vector<std::string> wrong = RunScenario(text.str(), options.trace);
    std::printf("%s %s\n", wrong.empty() ? "ok    " : "FAILED", path.filename().c_str());
    for (const std::string& what : wrong) std::printf("  %s, commit %s\n", what.c_str(), GTRAIN_SIM_COMMIT);
    if (!wrong.empty()) {
      std::printf("again: gtrain-sim --scenario %s --trace\n", path.c_str());
      failed = 1;
    }
  }
  std::fflush(stdout);
  return failed;
}

bool ParseSeeds(absl::string_view text, Options* options) {
  const std::vector<std::string> ends = absl::StrSplit(text, "..");
  return absl::SimpleAtoi(ends[0], &options->first) && absl::SimpleAtoi(ends.back(), &options->last) &&
         ends.size() <= 2 && options->first <= options->last;
}

int Spot(Options options) {
  options.spot.seed = options.last == 0 ? 1 : options.first;
  options.spot.trace = options.trace;
  const absl::StatusOr<SpotTrace> trace = ReadSpotTrace(options.spot_trace);
  const double began = Seconds();
  const absl::StatusOr<SpotResult> result =
      trace.ok() ? RunSpot(*trace, options.spot) : absl::StatusOr<SpotResult>(trace.status());
  if (!result.ok()) {
    std::fprintf(stderr, "gtrain-sim: %s\n", std::string(result.status().message()).c_str());
    return 2;
  }
  std::printf(
      "%.1f simulated hours in %.1f s, %llu events; %lld batches applied in %lld generations; "
      "%lld machines were told in time and went\n",
      static_cast<double>(result->seconds) / 3600, Seconds() - began,
      static_cast<unsigned long long>(result->events), static_cast<long long>(result->steps),
      static_cast<long long>(result->generations), static_cast<long long>(result->told));
  for (const Violation& violation : result->violations) {
    std::printf("%s at %.3f s: %s, commit %s\n", violation.id.c_str(),
                static_cast<double>(violation.at) / 1e9, violation.text.c_str(), GTRAIN_SIM_COMMIT);
  }
  return result->violations.empty() ? 0 : 1;
}

bool ParseTime(absl::string_view text, int64_t* ns) {
  const absl::StatusOr<absl::Duration> time = ParseDuration(text);
  if (time.ok()) *ns = absl::ToInt64Nanoseconds(*time);
  return time.ok() && *ns > 0;
}

// False: there is no such flag of a spot run, or its value is none.
bool ParseSpotFlag(const std::string& flag, const std::string& value, Options* options) {
  SpotOptions& spot = options->spot;
  if (flag == "--spot-trace") {
    options->spot_trace = value;
    return !value.empty();
  }
  if (flag == "--samples-out") {
    spot.events = value;
    return !value.empty();
  }
  if (flag == "--mode") {
    spot.in_place = value == "in-place";
    return spot.in_place || value == "restart";
  }
  if (flag == "--checkpoint-every") {
    if (value == "never") spot.save_every = 0;
    return value == "never" || ParseTime(value, &spot.save_every);
  }
  if (flag == "--notice") return ParseTime(value, &spot.notice.emplace());
  if (flag == "--min") return absl::SimpleAtoi(value, &spot.ranks_min) && spot.ranks_min > 0;
  int hours = 0;
  if (flag != "--hours" || !absl::SimpleAtoi(value, &hours) || hours < 1 || hours > 1'000'000) return false;
  spot.length = hours * 60 * kMin;
  return true;
}

int Fleet(const Options& options) {
  const double began = Seconds();
  const FleetResult result = RunFleet(options.first);
  for (const std::string& line : result.lines) std::printf("%s\n", line.c_str());
  for (const Violation& violation : result.violations)
    std::printf("%s: %s, commit %s\n", violation.id.c_str(), violation.text.c_str(), GTRAIN_SIM_COMMIT);
  std::printf("%.1f s\n", Seconds() - began);
  return result.violations.empty() ? 0 : 1;
}

// Null: it is none that stands alone.
bool* SwitchOf(const std::string& flag, Options* options) {
  if (flag == "--trace") return &options->trace;
  if (flag == "--actors") return &options->actors;
  if (flag == "--fleet") return &options->fleet;
  return nullptr;
}

int Main(int argc, char** argv) {
  SetLogSink(
      [](LogLevel, absl::string_view) {});  // what the libraries say of the faults is in nobody's interest
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--help") {
      std::printf("%s", kHelp);
      return 0;
    }
    bool ok = true;
    if (bool* const on = SwitchOf(flag, &options)) {
      *on = true;
      continue;
    }
    if (flag == "--seed" || flag == "--seeds") {
      ok = ParseSeeds(value, &options);
    } else if (flag == "--jobs") {
      ok = absl::SimpleAtoi(value, &options.jobs) && options.jobs > 0;
    } else if (flag == "--minutes") {
      ok = absl::SimpleAtoi(value, &options.minutes);
    } else if (flag == "--scenario") {
      options.scenario = value;
    } else if (flag == "--report") {
      options.report = value;
    } else {
      ok = ParseSpotFlag(flag, value, &options);
    }
    if (!ok) {
      std::fprintf(stderr, "gtrain-sim: what is '%s %s'?\n\n%s", flag.c_str(), value, kHelp);
      return 2;
    }
    ++i;
  }
  if (!options.spot_trace.empty()) return Spot(options);
  if (options.fleet) return Fleet(options);
  if (!options.scenario.empty()) {
    const int failed = Scenarios(options);
    if (failed != 0 || options.last == 0) return failed;
  }
  if (options.last == 0) {
    std::fprintf(stderr, "%s", kHelp);
    return 2;
  }
  if (options.trace) {
    const Outcome outcome = RunSeed(options, options.first, true, 0, nullptr);
    for (const Violation& violation : outcome.violations) {
      std::printf("%s: %s\n", violation.id.c_str(), violation.text.c_str());
    }
    return outcome.violations.empty() ? 0 : 1;
  }
  return Swarm(options);
}

}  // namespace
}  // namespace gtrain::sim

int main(int argc, char** argv) { return gtrain::sim::Main(argc, argv); }
