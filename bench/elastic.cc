// bench_elastic: how long training stands still when one of its four ranks is killed (kill -9), from the kill
// until all ranks have made the update of another step. A program of gtrain::Elastic in a job with `elastic:
// {mode: in-place}`: with `ranks: {min: 3, max: 4}`, where the three that are left go on alone and the fourth
// joins them later, and with `ranks: 4`, where they wait for it. Beside it the same program in a job that
// restarts from checkpoints, and a program of torch.distributed under torchrun (Debian's), which restarts all
// ranks; there, too, all four count. `--only kills`: a hundred kills in one job. `--only bitwise`: a step
// with `determinism: bitwise` beside the same without.
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/types.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"

namespace gtrain::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 4, kPauseMs = 2;
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr char kPython[] = "/usr/bin/python3";
constexpr char kThreeToFour[] = "{min: 3, max: 4}";

int64_t NowNs() { return RealClock().Now().ns; }

struct Applied {
  int generation = 0;
  int64_t step = 0, at_ns = 0;
};

// What each process has written of its updates.
std::map<pid_t, std::vector<Applied>> ReadUpdates(const fs::path& folder) {
  std::map<pid_t, std::vector<Applied>> updates;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("trained.")) continue;
    std::ifstream lines(entry.path());
    for (std::string line; std::getline(lines, line) && !lines.eof();) {
      Applied applied;
      if (sscanf(line.c_str(), "%d %ld %ld", &applied.generation, &applied.step, &applied.at_ns) == 3)
        updates[atoi(name.c_str() + 8)].push_back(applied);
    }
  }
  return updates;
}

bool Lives(pid_t pid) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(stat, text);
  const size_t end = text.rfind(')');
  return end != std::string::npos && end + 2 < text.size() && text[end + 2] != 'Z';
}

// The processes of the newest generation that made an update and live: as many as there are ranks, or none.
std::vector<pid_t> Members(const std::map<pid_t, std::vector<Applied>>& updates, int steps) {
  int newest = 0;
  for (const auto& [pid, all] : updates) newest = std::max(newest, all.back().generation);
  std::vector<pid_t> members;
  for (const auto& [pid, all] : updates) {
    const auto made =
        std::ranges::count_if(all, [&](const Applied& one) { return one.generation == newest; });
    if (made >= steps && Lives(pid)) members.push_back(pid);
  }
  return members.size() == kRanks ? members : std::vector<pid_t>{};
}

absl::StatusOr<std::vector<pid_t>> AwaitMembers(const fs::path& folder, int steps, pid_t but) {
  const Instant deadline = RealClock().Now() + kPatience;
  while (RealClock().Now() < deadline) {
    std::vector<pid_t> members = Members(ReadUpdates(folder), steps);
    if (!members.empty() && std::ranges::count(members, but) == 0) return members;
    poll(nullptr, 0, 5);
  }
  return absl::DeadlineExceededError(
      absl::StrCat("not all ranks in ", folder.string(), " step within ", absl::FormatDuration(kPatience)));
}

enum class Until { kAllStep, kSurvivorsStep };

// From the kill of one rank until the last of all, or of those that survived, has made an update in a newer
// generation, in milliseconds.
absl::StatusOr<double> KillOne(const fs::path& folder, Until until, Rng& rng) {
  GT_ASSIGN_OR_RETURN(std::vector<pid_t> before, AwaitMembers(folder, 30, 0));
  const pid_t victim = before[rng.Below(before.size())];
  const int old = ReadUpdates(folder).at(victim).back().generation;
  const int64_t killed_ns = NowNs();
  kill(victim, SIGKILL);
  GT_ASSIGN_OR_RETURN(const std::vector<pid_t> after, AwaitMembers(folder, 1, victim));
  const auto updates = ReadUpdates(folder);
  std::erase(before, victim);
  int newest = 0;
  for (const pid_t pid : after) newest = std::max(newest, updates.at(pid).back().generation);
  const bool alone = until == Until::kSurvivorsStep;
  int64_t last_ns = killed_ns;
  for (const pid_t pid : alone ? before : after) {
    const auto first = std::ranges::find_if(updates.at(pid), [&](const Applied& one) {
      return alone ? one.generation > old : one.generation == newest;
    });
    last_ns = std::max(last_ns, first->at_ns);
  }
  return static_cast<double>(last_ns - killed_ns) / 1e6;
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : cluster_(options.folder),
        rank_(fs::absolute(options.folder + "/../tests/e2e_elastic_linear")),
        peer_(fs::absolute(options.folder + "/../../bench/elastic_torchrun.py")) {}

  absl::Status Start() { return cluster_.Start(); }
  void Stop() { cluster_.Stop(); }
  bool HasTorch() const { return Run({kPython, "-c", "import torch.distributed.run"}).ok(); }

  absl::StatusOr<double> Ours(const std::string& mode, Until until = Until::kAllStep) {
    const bool alone = until == Until::kSurvivorsStep;
    GT_ASSIGN_OR_RETURN(const Job job, Launch(alone ? kThreeToFour : "4", mode));
    absl::StatusOr<double> took = KillOne(job.folder, until, rng_);
    const absl::Status stopped = Run({cluster_.gtrain(), "stop", job.name, "--now"});
    return took.ok() && !stopped.ok() ? stopped : took;
  }

  // One job that loses a rank again and again.
  absl::StatusOr<std::vector<double>> Kills(const std::string& ranks, const std::string& elastic, Until until,
                                            bool saves, int kills) {
    GT_ASSIGN_OR_RETURN(const Job job, Launch(ranks, elastic, saves));
    std::vector<double> all;
    for (int kill = 0; kill < kills; ++kill) {
      poll(nullptr, 0, 300);  // for a spare to come up: nothing that is measured
      GT_ASSIGN_OR_RETURN(const double took, KillOne(job.folder, until, rng_));
      all.push_back(took);
    }
    GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "stop", job.name, "--now"}));
    return all;
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

  // Without --redirects and --tee torch 1.13 does not start under Python 3.11, which lists no flag of value
  // 0.
  absl::StatusOr<double> Torchrun(const std::string& interval) {
    GT_ASSIGN_OR_RETURN(const fs::path folder, Folder());
    const std::string command = absl::StrCat(kPython, " -m torch.distributed.run --nproc_per_node ", kRanks,
                                             " --max_restarts 1000 --redirects 1 --tee 1 --rdzv_backend c10d "
                                             "--rdzv_endpoint 127.0.0.1:0 --log_dir ",
                                             (folder / "log").string(), " --monitor_interval ", interval, " ",
                                             peer_.string(), " ", folder.string(), " ", kPauseMs);
    GT_ASSIGN_OR_RETURN(const pid_t torchrun, Spawn(absl::StrSplit(command, ' ')));
    absl::StatusOr<double> took = KillOne(folder, Until::kAllStep, rng_);
    kill(torchrun, SIGTERM);
    WaitFor(torchrun, "torchrun").IgnoreError();  // it says that it was ended
    return took;
  }

 private:
  // Each has a name of its own: the one before it may still be stopping.
  struct Job {
    std::string name;
    fs::path folder;
  };
  absl::StatusOr<Job> Launch(const std::string& ranks, const std::string& mode, bool saves = true) {
    GT_ASSIGN_OR_RETURN(const fs::path folder, Folder());
    const std::string file = folder / "job.yaml", name = folder.filename();
    std::ofstream(file) << "name: " << name << "\nrun: [" << rank_.string() << ", " << folder.string()
                        << ", \"60000000\", \"60\", \"" << kPauseMs << "\", \"1000\"]\nranks: " << ranks
                        << "\nelastic: {mode: " << mode << "}\nrestart: {budget: 10000}\nstop_grace: 2s\n"
                        << "resources: {cpus: 1, oversubscribe: true}\n"
                        << (saves ? absl::StrCat("checkpoint: {uri: ", folder.string(),
                                                 "/ckpt, every: 20 steps}\n")
                                  : "");
    GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "launch", "-d", file}));
    // CPUs are shared for the sake of the least number of ranks, so a person has to ask for the fourth.
    if (ranks == kThreeToFour)
      GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "scale", "-n", absl::StrCat(kRanks), "--now", name}));
    return Job{name, folder};
  }

  absl::StatusOr<fs::path> Folder() {
    const fs::path folder = fs::path(cluster_.home().path()) / absl::StrCat("run-", ++runs_);
    std::error_code error;
    fs::create_directories(folder, error);
    return error ? absl::StatusOr<fs::path>(absl::InternalError(error.message())) : folder;
  }

  LocalCluster cluster_;
  const fs::path rank_, peer_;
  Rng rng_ = Rng::FromSystem();
  int runs_ = 0;
};

double Quantile(std::vector<double> values, double part) {
  std::ranges::sort(values);
  return values[std::min(values.size() - 1, static_cast<size_t>(part * static_cast<double>(values.size())))];
}

// Whether the last of many kills costs what the first did.
absl::Status PrintKills(Bench& bench, int kills) {
  struct Row {
    const char *what, *ranks, *elastic;
    Until until;
    bool saves = true;
  };
  constexpr Row kRows[] = {
      {"three go on alone", kThreeToFour, "in-place", Until::kSurvivorsStep},
      {"three go on alone, no checkpoint", kThreeToFour, "in-place", Until::kSurvivorsStep, false},
      {"a spare takes the place, all four", "4", "in-place, spares: 1", Until::kAllStep},
      {"a process is started in the place, all four", "4", "in-place", Until::kAllStep},
  };
  std::printf("%d kills in one job, ms%32s %8s %8s %8s %12s %11s\n", kills, "median", "p90", "p99", "max",
              "first tenth", "last tenth");
  for (const Row& row : kRows) {
    GT_ASSIGN_OR_RETURN(const std::vector<double> all,
                        bench.Kills(row.ranks, row.elastic, row.until, row.saves, kills));
    const auto tenth = std::max<ptrdiff_t>(1, std::ssize(all) / 10);
    std::printf("%-46s %8.1f %8.1f %8.1f %8.1f %12.1f %11.1f\n", row.what, Quantile(all, 0.5),
                Quantile(all, 0.9), Quantile(all, 0.99), Quantile(all, 1),
                Quantile({all.begin(), all.begin() + tenth}, 0.5),
                Quantile({all.end() - tenth, all.end()}, 0.5));
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
  Bench bench(options);
  if (const absl::Status started = bench.Start(); !started.ok()) {
    std::fprintf(stderr, "bench_elastic: %s\n", started.ToString().c_str());
    return 1;
  }
  if (options.only == "kills") {
    const absl::Status printed = PrintKills(bench, options.quick ? 10 : 100);
    bench.Stop();
    if (!printed.ok()) std::fprintf(stderr, "bench_elastic: %s\n", printed.ToString().c_str());
    return printed.ok() ? 0 : 1;
  }
  const auto outcomes =
      options.only == "bitwise" ? Bitwise(bench, options.quick) : OneKill(bench, options.quick);
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
  return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv, {"kills", "bitwise"}));
}
