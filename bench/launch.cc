// bench_launch: N ranks on this machine that start, register, exchange addresses, pass one barrier and exit:
// from the user's command to its exit. In turns with Open MPI (PMIx_Init, Fence), MPICH's bare `true` and a
// bare fork and exec, as far as they are installed.
//
// A cluster of its own runs meanwhile (state in a temporary folder, kept alive by one waiting job), so what
// is measured is a job, not the start of the daemons; that is the "cold" line: no cluster, one rank.
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"

namespace gtrain::bench {
namespace {

constexpr const char* kInstall = "tools/install.sh --bench installs it";

absl::StatusOr<double> Seconds(const std::function<absl::Status()>& work) {
  const RealClock clock;
  const Instant start = clock.Now();
  GT_RETURN_IF_ERROR(work());
  return absl::ToDoubleSeconds(clock.Now() - start);
}

absl::Status Bare(int ranks) {
  std::vector<pid_t> pids;
  for (int rank = 0; rank < ranks; ++rank) {
    GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn({"true"}));
    pids.push_back(pid);
  }
  for (pid_t pid : pids) GT_RETURN_IF_ERROR(WaitFor(pid, "true"));
  return absl::OkStatus();
}

// The launchers that are installed beside ours; a line names each that is missing.
class Peers {
 public:
  explicit Peers(const std::string& folder) {
    pmix_ = std::filesystem::absolute(folder + "/../bench/launch_pmix").string();
    if (!Executable(pmix_) || !Executable(kMpirunOpenMpi)) Missing("Open MPI with PMIx", pmix_);
    if (!Executable(kMpirunMpich)) Missing("MPICH", kMpirunMpich);
    AllowOpenMpiAsRoot();
  }

  std::vector<Peer> ForRanks(int ranks) const {
    const std::string n = absl::StrCat(ranks);
    std::vector<Peer> peers;
    if (Executable(pmix_) && Executable(kMpirunOpenMpi)) {
      peers.push_back(
          {"Open MPI, PMIx_Init + Fence", [=, this] {
             return Seconds([&] {
               return Run({kMpirunOpenMpi, "--oversubscribe", "--bind-to", "none", "-n", n, pmix_});
             });
           }});
    }
    if (Executable(kMpirunMpich)) {
      peers.push_back({"MPICH, bare true", [=] {
                         return Seconds([&] { return Run({kMpirunMpich, "-n", n, "true"}); });
                       }});
    }
    peers.push_back({"bare fork and exec of true", [=] { return Seconds([&] { return Bare(ranks); }); }});
    return peers;
  }

 private:
  static void Missing(const char* what, const std::string& file) {
    std::fprintf(stderr, "bench_launch: without %s: %s is not there; %s\n", what, file.c_str(), kInstall);
  }
  std::string pmix_;
};

class Ours {
 public:
  explicit Ours(const std::string& folder)
      : cluster_(folder), rank_(std::filesystem::absolute(folder + "/../bench/launch_rank").string()) {}

  absl::Status StartCluster() { return cluster_.Start(); }
  void StopCluster() { cluster_.Stop(); }

  absl::StatusOr<double> Launch(int ranks) const {
    return Seconds([&] {
      return Run({cluster_.gtrain(), "launch", "-n", absl::StrCat(ranks), "--", rank_});
    });
  }

  absl::StatusOr<double> Cold() const {
    Home home;
    GT_RETURN_IF_ERROR(home.Make());
    auto seconds = Launch(1);
    home.Remove();
    return seconds;
  }

 private:
  LocalCluster cluster_;
  const std::string rank_;
};

int Main(const Options& options) {
  std::vector<Outcome> outcomes;
  int failed = 0;
  auto measure = [&](const Comparison& comparison, int turns) {
    auto measured = Measure(comparison, turns);
    if (measured.ok()) {
      outcomes.insert(outcomes.end(), measured->begin(), measured->end());
    } else {
      std::fprintf(stderr, "bench_launch: %s: %s\n", comparison.name.c_str(),
                   measured.status().ToString().c_str());
      failed = 1;
    }
  };
  Ours ours(options.folder);
  const Peers peers(options.folder);
  measure({"cold cluster, 1 rank", "s", [&] { return ours.Cold(); }, {}}, options.quick ? 3 : 9);
  if (const absl::Status started = ours.StartCluster(); started.ok()) {
    for (int ranks : {1, 64, 256}) {
      measure({absl::StrCat("launch ", ranks, " ranks"), "s", [&] { return ours.Launch(ranks); },
               peers.ForRanks(ranks)},
              options.quick ? (ranks > 64 ? 3 : 5) : 11);
    }
  } else {
    std::fprintf(stderr, "bench_launch: %s\n", started.ToString().c_str());
    failed = 1;
  }
  ours.StopCluster();
  return Report(options, "launch", outcomes) | failed;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
