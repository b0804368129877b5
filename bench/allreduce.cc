// bench_allreduce: all-reduce of float32 inside this machine by size, in turns with Open MPI (as it comes,
// and with the segmented ring that is its best for large messages), MPICH and Gloo, as far as they are
// installed. Ours runs under `gtrain launch` on a local cluster of its own. One turn starts every contender
// once and lets it measure all sizes; a sample is the median of its calls.
//
// Four parts: 2 ranks in memory of Communicator::Allocate, the same with all data written anew before each
// call, 2 ranks in private memory, and 4 ranks, which on two cores are more than there are cores (the peers
// then get their flags for that).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"

namespace gtrain::bench {
namespace {

constexpr absl::Duration kTurnDeadline = absl::Seconds(60);
constexpr int kTurns = 7, kTurnsQuick = 2;
constexpr const char* kPython = "/usr/bin/python3";  // Debian's, which has Debian's torch
constexpr const char* kBest = "best of Open MPI and MPICH";

struct Size {
  size_t bytes;
  int calls;
};
using Words = std::vector<std::string>;

std::string Named(size_t bytes) {
  if (bytes >= 1 << 20) return absl::StrCat(bytes >> 20, " MiB");
  if (bytes >= 1 << 10) return absl::StrCat(bytes >> 10, " KiB");
  return absl::StrCat(bytes, " B");
}

struct Contender {
  std::string name;
  Words command;  // FILE and the sizes are appended, in this order
  bool mpi = false;
  int fewer = 1;  // the share of the calls that it makes: the slow would take minutes
};

absl::StatusOr<BySize> RunOnce(const Contender& contender, const std::vector<Size>& sizes,
                               const std::string& file) {
  Words words = contender.command;
  for (std::string& word : words) {
    if (word == "FILE") word = file;
  }
  for (const Size& size : sizes) {
    words.push_back(absl::StrCat(size.bytes, ":", std::max(3, size.calls / contender.fewer)));
  }
  std::filesystem::remove(file);
  GT_RETURN_IF_ERROR(Run(words, kTurnDeadline));
  GT_ASSIGN_OR_RETURN(const BySize samples, ReadBySize(file, contender.name));
  if (samples.size() != sizes.size()) return absl::InternalError(contender.name + " left sizes out");
  return samples;
}

// Everything that is measured side by side.
struct Part {
  std::string name;
  Contender ours;
  std::vector<Contender> peers;
  std::vector<Size> sizes;
};

// One series for each contender and size.
using AllSamples = std::vector<std::map<size_t, Series>>;

void AddOutcomes(const Part& part, const AllSamples& samples, std::vector<Outcome>* outcomes) {
  for (const Size& size : part.sizes) {
    const std::string name = absl::StrCat(part.name, ", ", Named(size.bytes));
    Series best;
    for (size_t p = 0; p < part.peers.size(); ++p) {
      const Series& theirs = samples[p + 1].at(size.bytes);
      outcomes->push_back({name, "us", part.peers[p].name, samples[0].at(size.bytes), theirs});
      if (part.peers[p].mpi && (best.samples.empty() || theirs.Median() < best.Median())) best = theirs;
    }
    if (!best.samples.empty()) {
      outcomes->push_back({name, "us", kBest, samples[0].at(size.bytes), best});
    } else if (part.peers.empty()) {
      outcomes->push_back({name, "us", "", samples[0].at(size.bytes), {}});
    }
  }
}

absl::Status MeasurePart(const Part& part, int turns, const std::string& file,
                         std::vector<Outcome>* outcomes) {
  std::vector<const Contender*> contenders{&part.ours};
  for (const Contender& peer : part.peers) contenders.push_back(&peer);
  AllSamples samples(contenders.size());
  for (int turn = 0; turn < turns; ++turn) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      GT_ASSIGN_OR_RETURN(const BySize measured, RunOnce(*contenders[i], part.sizes, file));
      for (const auto& [bytes, sample] : measured) samples[i][bytes].samples.push_back(sample);
    }
  }
  AddOutcomes(part, samples, outcomes);
  return absl::OkStatus();
}

// The MPI and Gloo that are installed beside ours; a line names each that is missing.
class Peers {
 public:
  explicit Peers(const std::string& folder) : folder_(folder + "/../bench") {
    AllowOpenMpiAsRoot();
    open_mpi_ = Have("Open MPI", {kMpirunOpenMpi, folder_ + "/allreduce_openmpi"});
    mpich_ = Have("MPICH", {kMpirunMpich, folder_ + "/allreduce_mpich"});
    gloo_ = Executable(kPython) && Run({kPython, "-c", "import torch.distributed"}).ok();
    if (!gloo_) std::fprintf(stderr, "bench_allreduce: without Gloo: %s has no torch\n", kPython);
  }

  std::vector<Contender> ForRanks(int ranks, bool crowded, bool gloo, const char* mode = "once") const {
    std::vector<Contender> peers;
    const std::string n = absl::StrCat(ranks), program = folder_ + "/allreduce_";
    if (open_mpi_) {
      Words words{kMpirunOpenMpi, "-n", n};
      const Words place =
          crowded ? Words{"--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"}
                  : Words{"--bind-to", "core"};
      words.insert(words.end(), place.begin(), place.end());
      Words ring = words;
      for (const char* word :
           {"--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "5",
            "--mca", "coll_tuned_allreduce_algorithm_segmentsize", "262144"}) {
        ring.push_back(word);
      }
      for (Words* line : {&words, &ring}) line->insert(line->end(), {program + "openmpi", "FILE", mode});
      peers.push_back({"Open MPI", words, true});
      peers.push_back({"Open MPI, segmented ring", ring, true});
    }
    if (mpich_) {
      Words words{kMpirunMpich, "-n", n};
      if (!crowded) words.insert(words.end(), {"-bind-to", "core"});
      words.insert(words.end(), {program + "mpich", "FILE", mode});
      // With more ranks than cores each rank spins until its time is up: milliseconds a call.
      peers.push_back({"MPICH", words, true, crowded ? 400 : 1});
    }
    if (gloo && gloo_) peers.push_back({"Gloo", {kPython, program + "gloo.py", "FILE", n}, false, 20});
    return peers;
  }

 private:
  static bool Have(const char* name, const Words& files) {
    for (const std::string& file : files) {
      if (Executable(file)) continue;
      std::fprintf(stderr, "bench_allreduce: without %s: %s is not there; tools/install.sh --bench\n", name,
                   file.c_str());
      return false;
    }
    return true;
  }
  const std::string folder_;
  bool open_mpi_ = false, mpich_ = false, gloo_ = false;
};

std::vector<Size> Sizes(bool quick) {
  if (quick) return {{8, 500}, {4 << 10, 500}, {2 << 20, 20}, {16 << 20, 3}, {128 << 20, 2}};
  return {{8, 4000},        {64, 4000},     {512, 4000},    {4 << 10, 4000}, {32 << 10, 1000},
          {256 << 10, 400}, {2 << 20, 100}, {16 << 20, 20}, {128 << 20, 5}};
}

std::vector<Part> Parts(const Options& options, const LocalCluster& cluster, const Peers& peers) {
  const std::string rank = options.folder + "/../bench/allreduce_rank";
  const auto ours = [&](const char* n, const char* memory) {
    return Contender{"gtrain", {cluster.gtrain(), "launch", "-n", n, "--", rank, "FILE", memory}, false};
  };
  std::vector<Size> large{{2 << 20, 20}, {16 << 20, 5}, {128 << 20, 3}};
  // It takes some ten milliseconds until the system has spread the ranks over the cores.
  std::vector<Size> crowded{{8, 20'000}, {4 << 10, 4000}, {2 << 20, 10}, {16 << 20, 5}};
  std::vector<Size> rewritten{
      {4 << 10, 1000}, {256 << 10, 200}, {2 << 20, 50}, {16 << 20, 10}, {128 << 20, 3}};
  if (options.quick) {
    rewritten = {{2 << 20, 10}};
    large = {{2 << 20, 10}, {16 << 20, 3}};
    crowded = {{8, 20}, {16 << 20, 3}};
  }
  return {
      {"2 ranks", ours("2", "allocate"), peers.ForRanks(2, false, !options.quick), Sizes(options.quick)},
      {"2 ranks, rewritten", ours("2", "rewritten"), peers.ForRanks(2, false, false, "rewritten"), rewritten},
      {"2 ranks, private", ours("2", "private"), peers.ForRanks(2, false, false), large},
      {"4 ranks", ours("4", "allocate"), peers.ForRanks(4, true, false), crowded}};
}

int Main(Options options) {
  options.folder = std::filesystem::absolute(options.folder).string();  // the cluster works in another one
  LocalCluster cluster(options.folder);
  if (const absl::Status started = cluster.Start(); !started.ok()) {
    std::fprintf(stderr, "bench_allreduce: %s\n", started.ToString().c_str());
    cluster.Stop();
    return 1;
  }
  std::vector<Outcome> outcomes;
  int failed = 0;
  const Peers peers(options.folder);
  for (const Part& part : Parts(options, cluster, peers)) {
    const absl::Status measured = MeasurePart(part, options.quick ? kTurnsQuick : kTurns,
                                              cluster.home().path() + "/samples", &outcomes);
    if (measured.ok()) continue;
    std::fprintf(stderr, "bench_allreduce: %s: %s\n", part.name.c_str(), measured.ToString().c_str());
    failed = 1;
  }
  cluster.Stop();
  return Report(options, "allreduce", outcomes) | failed;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
