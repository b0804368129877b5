#include "bench/elastic_fashion.h"

#include <poll.h>
#include <signal.h>
#include <sys/types.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "bench/elastic_updates.h"
#include "bench/local_cluster.h"

namespace gtrain::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kMembers = 4;
constexpr absl::Duration kBetweenKills = absl::Seconds(5), kLook = absl::Milliseconds(20);
constexpr absl::Duration kWaitAtMost = absl::Minutes(2);
constexpr double kPointsAtMost = 0.3;

void Wait(absl::Duration time) { poll(nullptr, 0, static_cast<int>(absl::ToInt64Milliseconds(time))); }

struct Kill {
  pid_t victim = 0;
  int generation = 0;  // that it ended
  int64_t at_ns = 0;
  std::set<pid_t> survivors;
};

struct Training {
  double accuracy = 0, minutes = 0;
  std::vector<Kill> kills;
  std::map<pid_t, std::vector<Applied>> updates;
  std::set<pid_t> replaced;  // survivors that were not there any more when the next generation stepped
  bool exact = false;        // says gtrain data audit
};

class Fashion {
 public:
  explicit Fashion(const Options& options)
      : cluster_(options.folder),
        example_(fs::absolute(options.folder + "/../examples/fashion_mnist")),
        epochs_(options.quick ? 1 : 24),
        kills_for_(options.quick ? absl::Seconds(15) : absl::Minutes(5)) {}

  bool Built() const { return Executable(example_); }
  absl::Status Start() { return cluster_.Start(); }
  void Stop() { cluster_.Stop(); }
  int epochs() const { return epochs_; }

  absl::StatusOr<Training> Train(const std::string& name, bool disturbed) {
    const fs::path folder = fs::path(cluster_.home().path()) / name;
    fs::create_directories(folder);
    const std::string file = folder / "job.yaml";
    std::ofstream(file) << "name: " << name << "\nrun: [" << example_ << ", --epochs, \"" << epochs_
                        << "\", --trace, " << folder.string() << "]\nranks: " << kMembers
                        << "\nelastic: {mode: in-place}\nrestart: {budget: 10000}\nstop_grace: 2s\n"
                        << "resources: {cpus: 1, oversubscribe: true}\ncheckpoint: {uri: " << folder.string()
                        << "/ckpt, every: 500 steps}\n";
    const int64_t began = NowNs();
    GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "launch", "-d", file}));
    Training training;
    if (disturbed) GT_RETURN_IF_ERROR(Disturb(folder, training));
    GT_RETURN_IF_ERROR(Run({cluster_.gtrain(), "attach", name}, absl::Minutes(30)));
    training.minutes = static_cast<double>(NowNs() - began) / 60e9;
    training.updates = ReadUpdates(folder);
    GT_ASSIGN_OR_RETURN(training.accuracy, Accuracy(name, folder));
    training.exact = Run({cluster_.gtrain(), "data", "audit", name}).ok();
    return training;
  }

 private:
  // The newest generation whose members all live and made an update in it; fewer: none.
  static std::map<pid_t, Applied> Members(const fs::path& folder) {
    std::map<pid_t, Applied> members = LastUpdates(folder);
    int newest = 0;
    for (const auto& [pid, last] : members) newest = std::max(newest, last.generation);
    std::erase_if(members, [&](const auto& member) { return member.second.generation != newest; });
    return members.size() == kMembers ? members : std::map<pid_t, Applied>{};
  }

  absl::Status Disturb(const fs::path& folder, Training& training) {
    const Instant end = RealClock().Now() + kills_for_;
    while (RealClock().Now() < end) {
      const Instant next = RealClock().Now() + kBetweenKills;
      std::map<pid_t, Applied> members;
      for (const Instant deadline = next + kWaitAtMost; members.empty() || RealClock().Now() < next;) {
        members = Members(folder);
        if (RealClock().Now() > deadline)
          return absl::DeadlineExceededError(
              absl::StrCat("not all ranks step within ", absl::FormatDuration(kWaitAtMost)));
        if (LastUpdates(folder).empty() && !training.kills.empty() && Ended(folder)) return absl::OkStatus();
        Wait(kLook);
      }
      if (!training.kills.empty()) NoteReplaced(members, training);
      if (RealClock().Now() >= end) break;
      Kill kill{.generation = members.begin()->second.generation};
      kill.victim = std::next(members.begin(), static_cast<ptrdiff_t>(rng_.Below(members.size())))->first;
      for (const auto& [pid, last] : members) {
        if (pid != kill.victim) kill.survivors.insert(pid);
      }
      kill.at_ns = NowNs();
      ::kill(kill.victim, SIGKILL);
      training.kills.push_back(std::move(kill));
    }
    return absl::OkStatus();
  }

  static void NoteReplaced(const std::map<pid_t, Applied>& members, Training& training) {
    for (const pid_t pid : training.kills.back().survivors) {
      if (!members.contains(pid)) training.replaced.insert(pid);
    }
  }

  // Whether nobody trains any more: all steps are made.
  static bool Ended(const fs::path& folder) {
    for (const auto& [pid, all] : ReadUpdates(folder)) {
      if (Lives(pid)) return false;
    }
    return true;
  }

  absl::StatusOr<double> Accuracy(const std::string& name, const fs::path& folder) {
    const std::string said = folder / "said";
    GT_RETURN_IF_ERROR(Run({"/bin/sh", "-c", absl::StrCat(cluster_.gtrain(), " logs ", name, " > ", said)}));
    std::ifstream file(said);
    const std::string text{std::istreambuf_iterator<char>(file), {}}, mark = "test accuracy ";
    const size_t at = text.rfind(mark);
    double accuracy = 0;
    if (at == std::string::npos ||
        !absl::SimpleAtod(text.substr(at + mark.size(), text.find(' ', at + mark.size()) - at - mark.size()),
                          &accuracy))
      return absl::DataLossError(absl::StrCat("no accuracy in the log of ", name, ": ", said));
    return accuracy;
  }

  LocalCluster cluster_;
  const std::string example_;
  const int epochs_;
  const absl::Duration kills_for_;
  Rng rng_ = Rng::FromSystem();
};

// What the kills cost, by what was applied and computed.
struct Cost {
  int64_t steps = 0;           // of the training
  int64_t applied_twice = 0;   // by one process, or left out
  int64_t victims_ahead = 0;   // steps that a victim applied and the others did not take over
  int64_t computed_again = 0;  // by all ranks together
  int64_t most_a_kill = 0;     // by one rank
  size_t stood_still = 0;      // survivors of a kill of which one stepped and this one never again
  std::vector<double> survivors_ms, all_ms;
};

// The first update of this process behind `at_ns` in a newer generation.
const Applied* FirstBehind(const std::vector<Applied>& updates, const Kill& kill) {
  const auto first = std::ranges::find_if(updates, [&](const Applied& one) {
    return one.generation > kill.generation && one.at_ns > kill.at_ns;
  });
  return first == updates.end() ? nullptr : &*first;
}

void CountKill(const Training& training, const Kill& kill, Cost& cost) {
  int64_t survivors = kill.at_ns, all = kill.at_ns, first_step = 0;
  size_t still = 0;
  for (const pid_t pid : kill.survivors) {
    const auto updates = training.updates.find(pid);
    const Applied* const first =
        updates == training.updates.end() ? nullptr : FirstBehind(updates->second, kill);
    if (first == nullptr) {
      ++still;
      continue;
    }
    survivors = std::max(survivors, first->at_ns);
    cost.most_a_kill = std::max(cost.most_a_kill, first->fourth - 1);
    first_step = first_step == 0 ? first->step : std::min(first_step, first->step);
  }
  if (first_step == 0) return;  // it ended with the training
  cost.stood_still += still;
  all = survivors;
  for (const auto& [pid, updates] : training.updates) {
    const bool came = updates[0].generation == kill.generation + 1;
    if (came) all = std::max(all, updates[0].at_ns);
  }
  cost.survivors_ms.push_back(static_cast<double>(survivors - kill.at_ns) / 1e6);
  cost.all_ms.push_back(static_cast<double>(all - kill.at_ns) / 1e6);
  const int64_t last = training.updates.at(kill.victim).back().step;
  // Those who roll forward make the victim's last step themselves.
  cost.victims_ahead += std::max<int64_t>(0, last - first_step);
}

Cost CostOf(const Training& training) {
  Cost cost;
  for (const auto& [pid, updates] : training.updates) {
    for (size_t i = 0; i < updates.size(); ++i) {
      cost.steps = std::max(cost.steps, updates[i].step);
      cost.computed_again += std::max<int64_t>(0, updates[i].fourth - 1);
      if (i > 0 && updates[i].step != updates[i - 1].step + 1) ++cost.applied_twice;
    }
  }
  for (const Kill& kill : training.kills) CountKill(training, kill, cost);
  return cost;
}

std::string Row(const std::vector<double>& values) {
  if (values.empty()) return "none";
  const Series series{values};
  return absl::StrCat("median ", std::lround(series.Median()), ", p90 ", std::lround(series.Quantile(0.9)),
                      ", at most ", std::lround(series.Quantile(1)));
}

// Whether all that must hold does.
bool Print(const Fashion& fashion, const Training& alone, const Training& killed) {
  const Cost cost = CostOf(killed);
  const double points = 100 * (killed.accuracy - alone.accuracy);
  size_t survivals = 0;
  for (const Kill& kill : killed.kills) survivals += kill.survivors.size();
  std::printf("fashion_mnist, %d ranks in place, %d epoch(s), %ld steps: %zu kills, one every 5 s\n",
              kMembers, fashion.epochs(), cost.steps, killed.kills.size());
  std::printf("  %-52s %zu of %zu times\n", "survivors that kept their process",
              survivals - killed.replaced.size(), survivals);
  std::printf("  %-52s %zu\n", "survivors that stepped no more while others did", cost.stood_still);
  std::printf("  %-52s %ld\n", "applied steps undone, made twice or left out",
              cost.applied_twice + cost.victims_ahead);
  std::printf("  %-52s %ld; in all by all ranks %ld\n", "steps a rank computed again for one kill, at most",
              cost.most_a_kill, cost.computed_again);
  std::printf("  %-52s %s\n", "from a kill until the survivors step, ms", Row(cost.survivors_ms).c_str());
  std::printf("  %-52s %s\n", "from a kill until all four step, ms", Row(cost.all_ms).c_str());
  std::printf("  %-52s %.2f %%, undisturbed %.2f %%: %+.2f points\n", "test accuracy", 100 * killed.accuracy,
              100 * alone.accuracy, points);
  std::printf("  %-52s %.1f min, undisturbed %.1f\n", "from the launch to the end", killed.minutes,
              alone.minutes);
  std::printf("  %-52s %s\n", "each sample of each epoch once (gtrain data audit)",
              killed.exact ? "yes" : "NO");
  const bool good = killed.replaced.empty() && cost.applied_twice + cost.victims_ahead == 0 &&
                    cost.stood_still == 0 && cost.most_a_kill <= 1 && std::abs(points) <= kPointsAtMost &&
                    killed.exact && !cost.survivors_ms.empty();
  std::printf("  %s\n", good ? "all as it must be" : "NOT AS IT MUST BE");
  return good;
}

}  // namespace

int MeasureFashion(const Options& options) {
  Fashion fashion(options);
  if (!fashion.Built()) {
    std::fprintf(stderr, "bench_elastic: examples/fashion_mnist is not built: libtorch is missing\n");
    return 1;
  }
  const auto measure = [&]() -> absl::StatusOr<bool> {
    GT_RETURN_IF_ERROR(fashion.Start());
    GT_ASSIGN_OR_RETURN(const Training alone, fashion.Train("undisturbed", false));
    GT_ASSIGN_OR_RETURN(const Training killed, fashion.Train("killed", true));
    return Print(fashion, alone, killed);
  };
  const absl::StatusOr<bool> good = measure();
  fashion.Stop();
  if (!good.ok()) std::fprintf(stderr, "bench_elastic: %s\n", good.status().ToString().c_str());
  return good.ok() && *good ? 0 : 1;
}

}  // namespace gtrain::bench
