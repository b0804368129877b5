// bench_elastic: how long training stands still when one of its four ranks is killed (kill -9), from the kill
// until all ranks have made the update of another step. A program of gtrain::Elastic in a job with `elastic:
// {mode: in-place}`: with `ranks: {min: 3, max: 4}`, where the three that are left go on alone and the fourth
// joins them later, and with `ranks: 4`, where they wait for it. Beside it the same program in a job that
// restarts from checkpoints, and a program of torch.distributed under torchrun (Debian's), which restarts all
// ranks; there, too, all four count. `--only kills`: a hundred kills in one job. `--only state`: the same
// with more state a rank. `--only join`: what the step costs those that train on, in which a new rank gets
// the state from them, beside their own steps before it and beside those of all four. `--only bitwise`: a
// step with `determinism: bitwise` beside the same without.
// `--only protection`: a step of gtrain::Elastic beside the same step by hand, when nobody is killed. `--only
// fashion`: a training of fashion_mnist of which a rank is killed every five seconds, beside one that nobody
// disturbs. `--only torchft`: torchft of PyPI.
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "bench/elastic_fashion.h"
#include "bench/elastic_updates.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"

namespace gtrain::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 4, kPauseMs = 2;
constexpr absl::Duration kPatience = absl::Minutes(3);
constexpr char kPython[] = "/usr/bin/python3";

// How many ranks a job has, and what its file says of that.
struct Gang {
  size_t ranks;
  const char* text;
};
constexpr Gang kFour = {kRanks, "4"}, kThreeToFour = {kRanks, "{min: 3, max: 4}"};
constexpr Gang kOneToTwo = {2, "{min: 1, max: 2}"};

int NewestGeneration(const std::map<pid_t, std::vector<Applied>>& updates) {
  int newest = 0;
  for (const auto& [pid, all] : updates) newest = std::max(newest, all.back().generation);
  return newest;
}

// The processes of the newest generation that made an update and live: as many as there are ranks, or none.
std::vector<pid_t> Members(const std::map<pid_t, std::vector<Applied>>& updates, size_t ranks, int steps) {
  const int newest = NewestGeneration(updates);
  std::vector<pid_t> members;
  for (const auto& [pid, all] : updates) {
    const auto made =
        std::ranges::count_if(all, [&](const Applied& one) { return one.generation == newest; });
    if (made >= steps && Lives(pid)) members.push_back(pid);
  }
  return members.size() == ranks ? members : std::vector<pid_t>{};
}

// Those of a newer generation than `after`, none of which is `but`.
absl::StatusOr<std::vector<pid_t>> AwaitMembers(const fs::path& folder, size_t ranks, int steps, pid_t but,
                                                int after = -1) {
  const Instant deadline = RealClock().Now() + kPatience;
  while (RealClock().Now() < deadline) {
    const auto updates = ReadUpdates(folder);
    std::vector<pid_t> members = Members(updates, ranks, steps);
    if (!members.empty() && std::ranges::count(members, but) == 0 && NewestGeneration(updates) > after)
      return members;
    poll(nullptr, 0, 5);
  }
  return absl::DeadlineExceededError(
      absl::StrCat("not all ranks in ", folder.string(), " step within ", absl::FormatDuration(kPatience)));
}

enum class Until { kAllStep, kSurvivorsStep };

// When the last of these made its first update in this generation; none: not all of them made one.
std::optional<int64_t> AllStepAt(const std::map<pid_t, std::vector<Applied>>& updates, int generation,
                                 size_t ranks) {
  size_t made = 0;
  int64_t last_ns = 0;
  for (const auto& [pid, all] : updates) {
    const auto first = std::ranges::find(all, generation, &Applied::generation);
    if (first == all.end()) continue;
    ++made;
    last_ns = std::max(last_ns, first->at_ns);
  }
  return made == ranks ? std::optional(last_ns) : std::nullopt;
}

// When the last of those that survived made its first update behind this generation.
absl::StatusOr<int64_t> SurvivorsStepAt(const std::map<pid_t, std::vector<Applied>>& updates,
                                        const std::vector<pid_t>& survivors, int old) {
  int64_t last_ns = 0;
  for (const pid_t pid : survivors) {
    const auto first =
        std::ranges::find_if(updates.at(pid), [&](const Applied& one) { return one.generation > old; });
    if (first == updates.at(pid).end())
      return absl::InternalError(absl::StrCat(
          "process ", pid, ", which was not killed, steps no more: `gtrain logs` of its job says why"));
    last_ns = std::max(last_ns, first->at_ns);
  }
  return last_ns;
}

// From the kill of one rank until the last of all, or of those that survived, has made an update in a newer
// generation, in milliseconds. Nothing is read before they most likely have: that takes longer with each kill
// of a row, on the CPUs of the ranks.
absl::StatusOr<double> KillOne(const fs::path& folder, size_t ranks, Until until, Rng& rng) {
  constexpr int kQuietMs = 150;
  GT_ASSIGN_OR_RETURN(std::vector<pid_t> before, AwaitMembers(folder, ranks, 30, 0));
  const pid_t victim = before[rng.Below(before.size())];
  const int old = ReadUpdates(folder).at(victim).back().generation;
  const int64_t killed_ns = NowNs();
  kill(victim, SIGKILL);
  poll(nullptr, 0, kQuietMs);
  GT_RETURN_IF_ERROR(AwaitMembers(folder, ranks, 1, victim).status());
  const auto updates = ReadUpdates(folder);
  std::erase(before, victim);
  if (until == Until::kSurvivorsStep) {
    GT_ASSIGN_OR_RETURN(const int64_t last_ns, SurvivorsStepAt(updates, before, old));
    return static_cast<double>(last_ns - killed_ns) / 1e6;
  }
  for (int generation = old + 1; generation <= NewestGeneration(updates); ++generation) {
    if (const auto last_ns = AllStepAt(updates, generation, ranks))
      return static_cast<double>(*last_ns - killed_ns) / 1e6;
  }
  return absl::InternalError("no generation behind the kill has updates of all ranks");
}

double Ms(const Applied& from, const Applied& to) { return static_cast<double>(to.at_ns - from.at_ns) / 1e6; }

// From each update that a process made in a generation to its next one there.
void AddSteps(const std::vector<Applied>& all, int generation, Series& steps) {
  for (size_t i = 1; i < all.size(); ++i) {
    if (all[i - 1].generation == generation && all[i].generation == generation)
      steps.samples.push_back(Ms(all[i - 1], all[i]));
  }
}

// Of a job of four ranks that loses one again and again, in milliseconds: steps of all four, steps of the
// three that are left, and for each new rank the first step that the three make with it, from the update
// before it to its own on the last of them.
struct Joins {
  Series four, three, first;
};
constexpr int kStepsBefore = 3;  // of four and of three

// Kills one of `four`. The process in its place is held until the three have made steps alone: else there
// would be none to compare with.
absl::Status LoseAndJoin(const fs::path& folder, const std::vector<pid_t>& four, pid_t victim, Joins& joins) {
  const int old = ReadUpdates(folder).at(victim).back().generation;
  const fs::path hold = folder / "hold";
  if (!std::ofstream(hold)) return absl::InternalError(absl::StrCat("cannot write ", hold.string()));
  kill(victim, SIGKILL);
  GT_ASSIGN_OR_RETURN(const std::vector<pid_t> three,
                      AwaitMembers(folder, four.size() - 1, kStepsBefore, victim, old));
  fs::remove(hold);
  GT_RETURN_IF_ERROR(AwaitMembers(folder, four.size(), 1, victim, old).status());
  const auto updates = ReadUpdates(folder);
  const int newest = NewestGeneration(updates);
  double slowest = 0;
  for (const pid_t pid : three) {
    const std::vector<Applied>& all = updates.at(pid);
    const auto first = std::ranges::find(all, newest, &Applied::generation);
    if (first == all.begin() || first == all.end())
      return absl::InternalError(absl::StrCat("process ", pid, " did not go on in ", folder.string()));
    AddSteps(all, (first - 1)->generation, joins.three);
    slowest = std::max(slowest, Ms(*(first - 1), *first));
  }
  joins.first.samples.push_back(slowest);
  return absl::OkStatus();
}

// What a rank computes and sends in a step of elastic_step, and for how many steps.
struct StepSize {
  const char* name;
  int64_t gradients, multiply_adds, steps;
};

struct StepTook {
  double ms = 0;
  double weights = 0;  // their sum after the last step
};

struct TorchftTimeouts {
  const char* name;
  int collective_ms, heartbeat_ms, join_ms;
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : cluster_(options.folder),
        rank_(fs::absolute(options.folder + "/../tests/e2e_elastic_linear")),
        step_(fs::absolute(options.folder + "/../bench/elastic_step")),
        peers_(fs::absolute(options.folder + "/../../bench")),
        torch_(fs::absolute(options.folder + "/../../tools/bench_torch.sh")) {}

  absl::Status Start() { return cluster_.Start(); }
  void Stop() { cluster_.Stop(); }
  bool HasTorch() const { return Run({kPython, "-c", "import torch.distributed.run"}).ok(); }

  absl::StatusOr<double> Ours(const std::string& mode, Until until = Until::kAllStep) {
    const bool alone = until == Until::kSurvivorsStep;
    GT_ASSIGN_OR_RETURN(const Job job, Launch(alone ? kThreeToFour : kFour, mode, true, 0, {}));
    absl::StatusOr<double> took = KillOne(job.folder, kRanks, until, rng_);
    const absl::Status stopped = Run({cluster_.gtrain(), "stop", job.name, "--now"});
    return took.ok() && !stopped.ok() ? stopped : took;
  }

  // One job that loses a rank again and again.
  absl::StatusOr<Series> Kills(const Gang& gang, const std::string& elastic, Until until, bool saves,
                               int kills, int mib = 0) {
    GT_ASSIGN_OR_RETURN(const Job job, Launch(gang, elastic, saves, mib, {}));
    Series all;
    for (int kill = 0; kill < kills; ++kill) {
      poll(nullptr, 0, 300 + 2 * mib);  // for a spare to come up with its state: nothing that is measured
      GT_ASSIGN_OR_RETURN(const double took, KillOne(job.folder, gang.ranks, until, rng_));
      all.samples.push_back(took);
    }
    GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "stop", job.name, "--now"}));
    return all;
  }

  // A step of all four takes `step_ms`, one of three 4/3 of that, since each has more samples.
  absl::StatusOr<Joins> Join(int kills, int mib, int step_ms) {
    GT_ASSIGN_OR_RETURN(const Job job, Launch(kThreeToFour, "in-place", false, mib, {step_ms, kRanks}));
    Joins joins;
    while (std::ssize(joins.first.samples) < kills) {
      GT_ASSIGN_OR_RETURN(const std::vector<pid_t> four, AwaitMembers(job.folder, kRanks, kStepsBefore, 0));
      const auto updates = ReadUpdates(job.folder);
      for (const pid_t pid : four) AddSteps(updates.at(pid), NewestGeneration(updates), joins.four);
      GT_RETURN_IF_ERROR(LoseAndJoin(job.folder, four, four[rng_.Below(four.size())], joins));
    }
    GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "stop", job.name, "--now"}));
    return joins;
  }

  // The time of a step of four ranks that compute next to nothing, in milliseconds. Writes its job file with
  // `elastic`.
  absl::StatusOr<double> Step(const std::string& elastic, int64_t weights, int64_t steps) {
    constexpr int64_t kBatch = 60, kEpochs = 2, kBegin = 20;
    GT_ASSIGN_OR_RETURN(const fs::path folder, Folder());
    const std::string file = folder / "job.yaml";
    std::ofstream(file) << "name: " << folder.filename().string() << "\nrun: [" << rank_.string() << ", "
                        << folder.string() << ", \"" << steps * kBatch / kEpochs << "\", \"" << kBatch
                        << "\", \"0\", \"" << weights << "\"]\nranks: " << kRanks << "\nelastic: {" << elastic
                        << "}\nresources: {cpus: 1, oversubscribe: true}\n";
    GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "launch", file}, kPatience));
    for (const auto& [pid, made] : ReadUpdates(folder)) {
      if (std::ssize(made) != steps) break;
      return static_cast<double>(made.back().at_ns - made[kBegin].at_ns) / 1e6 /
             static_cast<double>(steps - 1 - kBegin);
    }
    return absl::InternalError(absl::StrCat("a rank did not make ", steps, " steps in ", folder.string()));
  }

  // The mean of steps of elastic_step, as `mode` says protected or by hand.
  absl::StatusOr<StepTook> Protection(const std::string& mode, const StepSize& size) {
    GT_ASSIGN_OR_RETURN(const fs::path folder, Folder());
    const std::string file = folder / "job.yaml", took = folder / "took";
    std::ofstream(file) << "name: " << folder.filename().string() << "\nrun: [" << step_.string() << ", "
                        << took << ", " << mode << ", \"" << size.gradients << "\", \"" << size.multiply_adds
                        << "\", \"" << size.steps << "\"]\nranks: " << kRanks << "\n"
                        << (mode == "elastic" ? "elastic: {mode: in-place}\n" : "")
                        << "resources: {cpus: 1, oversubscribe: true}\n";
    GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "launch", file}, kPatience));
    StepTook result;
    if (!(std::ifstream(took) >> result.ms >> result.weights))
      return absl::InternalError(absl::StrCat("elastic_step ", mode, " wrote no time"));
    return result;
  }

  // Without --redirects and --tee torch 1.13 does not start under Python 3.11, which lists no flag of value
  // 0.
  absl::StatusOr<double> Torchrun(const std::string& interval) {
    GT_ASSIGN_OR_RETURN(const fs::path folder, Folder());
    const std::string command =
        absl::StrCat(kPython, " -m torch.distributed.run --nproc_per_node ", kRanks,
                     " --max_restarts 1000 --redirects 1 --tee 1 --rdzv_backend c10d "
                     "--rdzv_endpoint 127.0.0.1:0 --log_dir ",
                     (folder / "log").string(), " --monitor_interval ", interval, " ",
                     (peers_ / "elastic_torchrun.py").string(), " ", folder.string(), " ", kPauseMs);
    GT_ASSIGN_OR_RETURN(const pid_t torchrun, Spawn(absl::StrSplit(command, ' ')));
    absl::StatusOr<double> took = KillOne(folder, kRanks, Until::kAllStep, rng_);
    kill(torchrun, SIGTERM);
    WaitFor(torchrun, "torchrun").IgnoreError();  // it says that it was ended
    return took;
  }

  // Until the three that are left make an update, some times in one job.
  absl::StatusOr<Series> Torchft(const TorchftTimeouts& timeouts, int kills) {
    GT_ASSIGN_OR_RETURN(const fs::path folder, Folder());
    const std::string command =
        absl::StrCat("python=$(", torch_.string(), " --python) && exec $python ",
                     (peers_ / "elastic_torchft.py").string(), " ", folder.string(), " ", kPauseMs, " ",
                     timeouts.collective_ms, " ", timeouts.heartbeat_ms, " ", timeouts.join_ms);
    GT_ASSIGN_OR_RETURN(const pid_t torchft, Spawn({"/bin/sh", "-c", command}));
    Series all;
    absl::Status status;
    while (std::ssize(all.samples) < kills && status.ok()) {
      const absl::StatusOr<double> took = KillOne(folder, kRanks, Until::kSurvivorsStep, rng_);
      status = took.status();
      if (took.ok()) all.samples.push_back(*took);
    }
    kill(torchft, SIGTERM);
    WaitFor(torchft, "torchft").IgnoreError();
    if (!status.ok()) return status;
    return all;
  }

 private:
  // Each has a name of its own: the one before it may still be stopping.
  struct Job {
    std::string name;
    fs::path folder;
  };
  // How long a step takes: with `ranks` for who has the share of one of so many, else however many samples
  // it has.
  struct Pace {
    int ms = kPauseMs, ranks = 0;
  };
  absl::StatusOr<Job> Launch(const Gang& gang, const std::string& mode, bool saves, int mib,
                             const Pace& pace) {
    GT_ASSIGN_OR_RETURN(const fs::path folder, Folder());
    const std::string file = folder / "job.yaml", name = folder.filename();
    std::ofstream(file) << "name: " << name << "\nrun: [" << rank_.string() << ", " << folder.string()
                        << ", \"60000000\", \"60\", \"" << pace.ms << "\", \"1000\", \"" << mib << "\", \""
                        << pace.ranks << "\"]\nranks: " << gang.text << "\nelastic: {mode: " << mode
                        << "}\nrestart: {budget: 10000}\nstop_grace: 2s\n"
                        << "resources: {cpus: 1, oversubscribe: true}\n"
                        << (saves ? absl::StrCat("checkpoint: {uri: ", folder.string(),
                                                 "/ckpt, every: 20 steps}\n")
                                  : "");
    GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "launch", "-d", file}));
    // CPUs are shared for the sake of the least number of ranks, so a person has to ask for the fourth.
    if (gang.text[0] == '{')
      GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "scale", "-n", absl::StrCat(gang.ranks), "--now", name}));
    return Job{name, folder};
  }

  absl::StatusOr<fs::path> Folder() {
    const fs::path folder = fs::path(cluster_.home().path()) / absl::StrCat("run-", ++runs_);
    std::error_code error;
    fs::create_directories(folder, error);
    return error ? absl::StatusOr<fs::path>(absl::InternalError(error.message())) : folder;
  }

  LocalCluster cluster_;
  const fs::path rank_, step_, peers_, torch_;
  Rng rng_ = Rng::FromSystem();
  int runs_ = 0;
};

// Whether the last of many kills costs what the first did.
absl::Status PrintKills(Bench& bench, int kills) {
  struct Row {
    const char* what;
    Gang gang;
    const char* elastic;
    Until until;
    bool saves = true;
  };
  constexpr Row kRows[] = {
      {"three go on alone", kThreeToFour, "in-place", Until::kSurvivorsStep},
      {"three go on alone, no checkpoint", kThreeToFour, "in-place", Until::kSurvivorsStep, false},
      {"a spare takes the place, all four", kFour, "in-place, spares: 1", Until::kAllStep},
      {"a process is started in the place, all four", kFour, "in-place", Until::kAllStep},
  };
  const bool has_p99 = kills >= 100;
  std::printf("%d kills in one job, ms%32s %8s %8s %8s %12s %11s\n", kills, "median", "p90",
              has_p99 ? "p99" : "", "max", "first tenth", "last tenth");
  if (!has_p99) std::printf("(the p99 of fewer than 100 kills is their max, which stands alone)\n");
  for (const Row& row : kRows) {
    GT_ASSIGN_OR_RETURN(const Series all, bench.Kills(row.gang, row.elastic, row.until, row.saves, kills));
    const std::vector<double>& each = all.samples;
    const auto tenth = std::max<ptrdiff_t>(1, std::ssize(each) / 10);
    std::printf("%-46s %8.1f %8.1f %8s %8.1f %12.1f %11.1f\n", row.what, all.Median(), all.Quantile(0.9),
                has_p99 ? absl::StrFormat("%.1f", all.Quantile(0.99)).c_str() : "", all.Quantile(1),
                Series{{each.begin(), each.begin() + tenth}}.Median(),
                Series{{each.end() - tenth, each.end()}}.Median());
    std::fflush(stdout);  // the next one takes a while
  }
  return absl::OkStatus();
}

// What the tree costs whose sums do not depend on the number of ranks.
absl::StatusOr<std::vector<Outcome>> Bitwise(Bench& bench, bool quick) {
  struct Row {
    const char* gradients;
    int64_t weights, steps;
  };
  constexpr Row kRows[] = {{"4 KB", 1'000, 400}, {"4 MB", 1'000'000, 200}, {"64 MB", 16'000'000, 50}};
  std::vector<Outcome> all;
  for (const Row& row : kRows) {
    for (const int parts : {4, 16}) {
      if (quick && (parts > kRanks || row.steps < 100)) continue;
      const std::string elastic = absl::StrCat("determinism: bitwise, virtual_ranks: ", parts);
      Comparison comparison{absl::StrCat("bitwise, ", parts, " parts, ", row.gradients),
                            "ms",
                            [&] { return bench.Step(elastic, row.weights, row.steps); },
                            {}};
      comparison.peers.push_back(
          {"all-reduce", [&] { return bench.Step("determinism: none", row.weights, row.steps); }});
      GT_ASSIGN_OR_RETURN(const std::vector<Outcome> outcomes, Measure(comparison, quick ? 3 : 5));
      all.insert(all.end(), outcomes.begin(), outcomes.end());
    }
  }
  return all;
}

// A 95 % confidence interval of the median, from the order of the values alone.
std::pair<double, double> Confidence(std::vector<double> values) {
  std::ranges::sort(values);
  const auto count = static_cast<double>(values.size());
  double below = 0, chance = std::pow(0.5, count);  // of so many values on one side of the median
  size_t cut = 0;
  for (; cut < values.size() / 2 && below + chance <= 0.025; ++cut) {
    below += chance;
    chance *= (count - static_cast<double>(cut)) / static_cast<double>(cut + 1);
  }
  cut = cut > 0 ? cut - 1 : 0;
  return {values[cut], values[values.size() - 1 - cut]};
}

// The costs of pairs of runs, one after the other, in per cent of a step by hand. A goal inside of the
// interval is undecided.
void PrintCost(const Outcome& outcome) {
  constexpr double kGoal = 1;
  std::vector<double> costs;
  for (size_t i = 0; i < outcome.ours.samples.size(); ++i)
    costs.push_back(100 * (outcome.ours.samples[i] / outcome.theirs.samples[i] - 1));
  const auto [least, most] = Confidence(costs);
  std::printf(
      "%s: protection costs %+.2f %% of a step in the median of %zu pairs, 95 %% confidence %+.2f to "
      "%+.2f %%, goal %g %%: %s\n",
      outcome.name.c_str(), Series{costs}.Median(), costs.size(), least, most, kGoal,
      most <= kGoal   ? "reached"
      : least > kGoal ? "NOT REACHED"
                      : "undecided");
  std::fflush(stdout);  // the next one takes minutes
}

// What a step of gtrain::Elastic costs beyond the same step by hand, which nothing protects. Four ranks that
// share two cores compute for about as long as the names say.
absl::StatusOr<std::vector<Outcome>> Protection(Bench& bench, bool quick) {
  constexpr StepSize kSizes[] = {{"1 MB, computes 10 ms", 250'000, 60'000'000, 100},
                                 {"16 MB, computes 10 ms", 4'000'000, 60'000'000, 70},
                                 {"1 MB, computes 50 ms", 250'000, 300'000'000, 40},
                                 {"16 MB, computes 50 ms", 4'000'000, 300'000'000, 40}};
  std::vector<Outcome> all;
  for (const StepSize& size : kSizes) {
    if (quick && &size != kSizes) break;
    std::optional<double> weights;  // equal in all runs: all of them did the same arithmetic
    const auto run = [&](const std::string& mode) -> absl::StatusOr<double> {
      GT_ASSIGN_OR_RETURN(const StepTook took, bench.Protection(mode, size));
      if (took.weights != weights.value_or(took.weights))
        return absl::InternalError(absl::StrCat("elastic_step ", mode, " ended with a sum of weights of ",
                                                took.weights, ", not ", *weights));
      weights = took.weights;
      return took.ms;
    };
    Comparison comparison{size.name, "ms", [&] { return run("elastic"); }, {}};
    comparison.peers.push_back({"by hand", [&] { return run("hand"); }});
    GT_ASSIGN_OR_RETURN(const std::vector<Outcome> outcomes, Measure(comparison, quick ? 7 : 19));
    for (const Outcome& outcome : outcomes) PrintCost(outcome);
    all.insert(all.end(), outcomes.begin(), outcomes.end());
  }
  return all;
}

absl::Status PrintTorchft(Bench& bench, bool quick) {
  constexpr TorchftTimeouts kAll[] = {{"timeouts of 0.5 s, join 0.1 s", 500, 500, 100},
                                      {"as it comes: 60 s, heartbeat 5 s", 60'000, 5'000, 60'000}};
  std::printf("torchft, from a kill until the other three step, ms %8s %8s %8s\n", "median", "max", "kills");
  for (const TorchftTimeouts& timeouts : kAll) {
    if (quick && &timeouts != kAll) break;
    GT_ASSIGN_OR_RETURN(const Series all, bench.Torchft(timeouts, quick || &timeouts != kAll ? 3 : 15));
    std::printf("%-50s %8.1f %8.1f %8zu\n", timeouts.name, all.Median(), all.Quantile(1), all.samples.size());
  }
  return absl::OkStatus();
}

// GiB that the machine could give to processes now.
double AvailableGib() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    long kib = 0;
    if (sscanf(line.c_str(), "MemAvailable: %ld", &kib) == 1) return static_cast<double>(kib) / (1 << 20);
  }
  return 0;
}

// How long the kernel needs until a killed process that only holds so much memory is seen to be gone: it
// gives the memory back before it closes sockets and tells anybody.
double EndMs(int mib) {
  int ready[2];
  if (pipe(ready) != 0) return -1;
  const pid_t pid = fork();
  if (pid == 0) {
    const size_t bytes = std::max<size_t>(1, static_cast<size_t>(mib) << 20);
    const void* held =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (held != MAP_FAILED && write(ready[1], "r", 1) == 1) pause();
    _exit(1);
  }
  close(ready[1]);
  char said = 0;
  const bool holds = pid > 0 && read(ready[0], &said, 1) == 1;
  close(ready[0]);
  if (!holds) return -1;
  pollfd gone{static_cast<int>(syscall(SYS_pidfd_open, pid, 0)), POLLIN, 0};
  const int64_t killed_ns = NowNs();
  kill(pid, SIGKILL);
  poll(&gone, 1, 60'000);
  const double took = static_cast<double>(NowNs() - killed_ns) / 1e6;
  close(gone.fd);
  waitpid(pid, nullptr, 0);
  return took;
}

void PrintEnd(int mib, int kills) {
  Series all;
  for (int kill = 0; kill < kills; ++kill) all.samples.push_back(EndMs(mib));
  std::printf("%-34s %5d MiB, %2d kills %8.1f %8.1f\n", "a process that holds so much is gone", mib, kills,
              all.Median(), all.Quantile(1));
}

// Who goes on alone hands nothing over; a spare gets the state while the others wait.
absl::Status PrintState(Bench& bench, bool quick) {
  struct Size {
    int mib, kills;
  };
  const std::vector<Size> sizes = quick ? std::vector<Size>{{0, 5}, {64, 5}}
                                        : std::vector<Size>{{0, 30}, {64, 30}, {1024, 10}, {8192, 3}};
  struct Row {
    const char* what;
    Gang gang;
    const char* elastic;
    Until until;
    int states;  // that are in memory at once: those of the ranks, of spares, and of the one that starts
  };
  constexpr Row kRows[] = {
      {"three go on alone", kThreeToFour, "in-place", Until::kSurvivorsStep, 5},
      {"a spare takes the place, all four", kFour, "in-place, spares: 1", Until::kAllStep, 6},
      {"one of two goes on alone", kOneToTwo, "in-place", Until::kSurvivorsStep, 2}};
  std::printf("state a rank and kills in one job, ms%21s %8s %8s %s\n", "", "median", "max",
              "base + bytes / bandwidth");
  for (const Size& size : sizes) {
    if (size.mib < AvailableGib() * 1024) PrintEnd(size.mib, size.kills);
  }
  for (const Row& row : kRows) {
    double base = 0, per_mib = 0;
    for (const Size& size : sizes) {
      const double needs = row.states * size.mib / 1024.0, has = AvailableGib();
      if (needs > has) {
        std::printf("%-34s %5d MiB   left out: needs %.0f GiB of memory, %.0f are there\n", row.what,
                    size.mib, needs, has);
        continue;
      }
      GT_ASSIGN_OR_RETURN(const Series all,
                          bench.Kills(row.gang, row.elastic, row.until, false, size.kills, size.mib));
      const double median = all.Median();
      if (size.mib == 0) base = median;
      if (size.mib > 0 && per_mib == 0) per_mib = std::max(0.0, median - base) / size.mib;
      std::printf("%-34s %5d MiB, %2d kills %8.1f %8.1f %9.1f + %d MiB / %.2f GiB/s = %.1f\n", row.what,
                  size.mib, size.kills, median, all.Quantile(1), base, size.mib,
                  per_mib > 0 ? 1000 / per_mib / 1024 : 0, base + per_mib * size.mib);
    }
  }
  return absl::OkStatus();
}

// Whether each new rank leaves the three that have the state 0.9 of the speed that they had without it. It
// is not the speed of all four: the three share the batch of four in that step.
std::string SpeedKept(const Joins& joins) {
  constexpr double kGoal = 0.9;
  Series lost;
  for (const double first : joins.first.samples) lost.samples.push_back(1 - joins.three.Median() / first);
  const Verdict verdict = Judge(lost, 1 - kGoal);
  return absl::StrFormat("goal %.1f of the three's: %s", kGoal,
                         verdict == Verdict::kReached     ? "reached"
                         : verdict == Verdict::kUndecided ? "undecided"
                                                          : "NOT REACHED");
}

// What the step costs in which a new rank gets the state from the three that have it. They compute the
// samples of four in it, and wait in their reduction when the state takes longer than they compute.
absl::Status PrintJoins(Bench& bench, bool quick) {
  struct Row {
    int mib, step_ms;
  };
  constexpr Row kRows[] = {{0, 250}, {256, 250}, {256, 1000}, {1024, 1000}, {1024, 2000}};
  const int kills = quick ? 3 : 10;
  std::printf(
      "a fourth rank joins three and gets the state from them, %d kills a row. Ranks wait in place of\n"
      "computing, in proportion to their samples: one of four for the time of the row, one of three for 4/3\n"
      "of it. In the first step with the fourth the three have all samples, so that 0.75 of the speed of "
      "all\n"
      "four is the most that can be. The goal is about the speed that the three had without the fourth.\n",
      kills);
  std::printf("%-18s %19s   %19s   %19s   %19s\n", "", "a step, median, ms", "first with 4th, ms",
              "of the three's speed", "of all four's speed");
  std::printf("%-18s %9s %9s   %9s %9s   %9s %9s   %9s %9s\n", "state, a step", "of four", "of three",
              "median", "max", "median", "at worst", "median", "at worst");
  for (const Row& row : kRows) {
    GT_ASSIGN_OR_RETURN(const Joins joins, bench.Join(kills, row.mib, row.step_ms));
    const double four = joins.four.Median(), three = joins.three.Median(), first = joins.first.Median(),
                 worst = joins.first.Quantile(1);
    std::printf("%5d MiB, %4d ms %9.1f %9.1f   %9.1f %9.1f   %9.2f %9.2f   %9.2f %9.2f  %s\n", row.mib,
                row.step_ms, four, three, first, worst, three / first, three / worst, four / first,
                four / worst, SpeedKept(joins).c_str());
    std::fflush(stdout);  // the next one takes a while
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Outcome>> OneKill(Bench& bench, bool quick) {
  Comparison comparison{"a rank of four is killed: until the others step on",
                        "ms",
                        [&] { return bench.Ours("in-place", Until::kSurvivorsStep); },
                        {}};
  comparison.peers.push_back({"in place, until all four step", [&] { return bench.Ours("in-place"); }});
  comparison.peers.push_back({"gtrain, elastic.mode restart", [&] { return bench.Ours("restart"); }});
  if (bench.HasTorch()) {
    comparison.peers.push_back({"torchrun --monitor_interval 0.1", [&] { return bench.Torchrun("0.1"); }});
    if (!quick) comparison.peers.push_back({"torchrun", [&] { return bench.Torchrun("5"); }});
  } else {
    std::fprintf(stderr, "bench_elastic: torchrun is left out: tools/install.sh --bench\n");
  }
  return Measure(comparison, quick ? 3 : 15);
}

int Main(const Options& options) {
  if (options.only == kFashion) return MeasureFashion(options);
  Bench bench(options);
  if (const absl::Status started = bench.Start(); !started.ok()) {
    std::fprintf(stderr, "bench_elastic: %s\n", started.ToString().c_str());
    return 1;
  }
  if (!options.only.empty() && options.only != "bitwise" && options.only != "protection") {
    const absl::Status printed = options.only == "kills"   ? PrintKills(bench, options.quick ? 10 : 100)
                                 : options.only == "state" ? PrintState(bench, options.quick)
                                 : options.only == "join"  ? PrintJoins(bench, options.quick)
                                                           : PrintTorchft(bench, options.quick);
    bench.Stop();
    if (!printed.ok()) std::fprintf(stderr, "bench_elastic: %s\n", printed.ToString().c_str());
    return printed.ok() ? 0 : 1;
  }
  const auto outcomes = options.only == "bitwise"      ? Bitwise(bench, options.quick)
                        : options.only == "protection" ? Protection(bench, options.quick)
                                                       : OneKill(bench, options.quick);
  bench.Stop();
  if (!outcomes.ok()) {
    std::fprintf(stderr, "bench_elastic: %s\n", outcomes.status().ToString().c_str());
    return 1;
  }
  return Report(options, "elastic", *outcomes);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) {
  return gtrain::bench::Main(gtrain::bench::ParseOptions(
      argc, argv, {"kills", "state", "join", "bitwise", "protection", "torchft", gtrain::bench::kFashion}));
}
