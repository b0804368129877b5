// bench_allreduce_net: all-reduce of float32 between machines: four network namespaces joined by a switch,
// every cable limited to 1 Gbit/s in both directions, one rank in each. Measures `auto`, each algorithm
// alone, and Open MPI (as it comes and with its ring) and Gloo where they are installed, all in turns; and
// what plain TCP gets through one cable, which bounds them all.
//
// With two ranks on each of two machines: one of each machine carrying everything against both, each its part
// (--only rails). There the ranks of a machine are on cores of their own, which the machines share: what one
// core and one connection cannot carry is what rails are for. With four ranks on each of two machines,
// through cables of several rates: where the wire takes as long as the copies and sums of a machine, what
// overlaps and what does not differ most (--only pipeline).
//
// The ranks are forked here and meet through memory; everything after that goes over the network as in a job.
// A sample is the median of some calls, each between two barriers and as slow as its slowest rank.
// Needs root and ip(8) and tc(8).
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "bench/network.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"

namespace gtrain::bench {
namespace {

constexpr int kMachines = 4, kTurns = 7, kTurnsQuick = 3;
using Algorithms = std::vector<const char*>;
const Algorithms kAlgorithms{"auto", "ring", "doubling", "halving-doubling", "double-tree"},
    kSpeakers{"auto", "leader", "rails"};
constexpr size_t kAlgorithmsMax = 5, kSizesMax = 16;
constexpr int kRailMachines = 2, kRails = 2, kPipelineRanks = 4, kAnyCore = -1;
constexpr absl::Duration kPeerDeadline = absl::Seconds(120);
const std::vector<size_t> kRawBytes{4 << 10, 50'000, 8 << 20};
constexpr int kRawTimes = 9;
constexpr const char* kPython = "/usr/bin/python3";  // Debian's, which has Debian's torch

using Size = Network::Calls;

double Now() { return static_cast<double>(RealClock().Now().ns) * 1e-3; }  // microseconds

std::string Named(size_t bytes) {
  if (bytes >= 1 << 20) return absl::StrCat(bytes >> 20, " MiB");
  if (bytes >= 1 << 10) return absl::StrCat(bytes >> 10, " KiB");
  return absl::StrCat(bytes, " B");
}

// The measurements of a child for the parent.
struct Board {
  double sample[kAlgorithmsMax][kSizesMax][kTurns];
};

Board* MakeBoard() {
  void* page = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return page == MAP_FAILED ? nullptr : static_cast<Board*>(page);
}

// ------------------------------------------------------------------ ours

absl::StatusOr<double> TimeCalls(Communicator& c, float* data, const Size& size) {
  std::vector<double> samples;
  for (int call = -1 - size.times / 10; call < size.times; ++call) {
    GT_RETURN_IF_ERROR(c.Barrier());
    const double start = Now();
    GT_RETURN_IF_ERROR(c.AllReduce(data, size.bytes / sizeof(float), DType::kFloat32, ReduceOp::kSum));
    if (call >= 0) samples.push_back(Now() - start);
  }
  GT_RETURN_IF_ERROR(c.AllReduce(samples.data(), samples.size(), DType::kFloat64, ReduceOp::kMax));
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

absl::Status OneRank(comm::FakeWorld& world, int rank, const Algorithms& algorithms,
                     const std::vector<Size>& sizes, int turns, Board* board) {
  const auto bootstrap = world.Rank(rank);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (const char* algorithm : algorithms) {
    comm::ExecOptions options;
    options.user.timeout = absl::Seconds(60);
    options.algorithm = algorithm;
    GT_ASSIGN_OR_RETURN(auto communicator, comm::MakeCommunicator(bootstrap.get(), options));
    communicators.push_back(std::move(communicator));
  }
  std::vector<float> data(sizes.back().bytes / sizeof(float), 1.0f);
  for (size_t s = 0; s < sizes.size(); ++s) {
    for (int turn = -1; turn < turns; ++turn) {
      for (size_t a = 0; a < communicators.size(); ++a) {
        std::fill_n(data.begin(), sizes[s].bytes / sizeof(float), 1.0f);
        GT_ASSIGN_OR_RETURN(const double sample, TimeCalls(*communicators[a], data.data(), sizes[s]));
        if (rank == 0 && turn >= 0) board->sample[a][s][turn] = sample;
      }
    }
  }
  return absl::OkStatus();
}

struct Place {
  int machine, core;
};

absl::Status MeasureOurs(const Network& network, const std::vector<Place>& ranks,
                         const Algorithms& algorithms, const std::vector<Size>& sizes, int turns,
                         Board* board) {
  std::vector<std::string> nodes, addresses;
  for (const Place& place : ranks) {
    nodes.push_back(network.NameOf(place.machine));
    addresses.push_back(Network::AddressOf(place.machine));
  }
  comm::FakeWorld world(nodes, addresses);
  std::vector<pid_t> children;
  for (size_t i = 0; i < ranks.size(); ++i) {
    children.push_back(network.StartOnCore(ranks[i].machine, ranks[i].core, [&, i] {
      return OneRank(world, static_cast<int>(i), algorithms, sizes, turns, board);
    }));
  }
  return WaitForAll(children, "a rank of ours", absl::Minutes(10));
}

// ------------------------------------------------------------------ peers

struct Peer {
  std::string name;
  std::function<absl::Status(const std::string& file, const std::vector<std::string>& sizes)> run;
};

absl::StatusOr<Peer> OpenMpi(const Network& network, const Home& home, const std::string& folder, bool ring) {
  const std::string program = folder + "/../bench/allreduce_openmpi", agent = home.path() + "/agent";
  if (!Executable(kMpirunOpenMpi) || !Executable(program)) {
    return absl::NotFoundError("Open MPI is not installed (tools/install.sh --bench, then make build)");
  }
  AllowOpenMpiAsRoot();
  std::string script = "#!/bin/sh\nhost=$1; shift\ncase $host in\n";
  std::vector<std::string> hosts;
  for (int i = 0; i < kMachines; ++i) {
    hosts.push_back(Network::AddressOf(i));
    absl::StrAppend(&script, Network::AddressOf(i), ") inside='", absl::StrJoin(network.Inside(i), " "),
                    "';;\n");
  }
  absl::StrAppend(&script, "esac\nexec $inside sh -c \"$*\"\n");
  GT_RETURN_IF_ERROR(WriteFileDurable(agent, script, 0755));
  std::vector<std::string> words = network.Inside(0);
  words.insert(words.end(), {kMpirunOpenMpi, "--host", absl::StrJoin(hosts, ","), "-n",
                             absl::StrCat(kMachines), "--bind-to", "none"});
  for (const char* setting :
       {"plm_rsh_agent", "oob_tcp_if_include", "btl_tcp_if_include", "btl", "pml", "mpi_yield_when_idle"}) {
    const std::string name = setting;
    words.insert(words.end(), {"--mca", name,
                               name == "plm_rsh_agent"         ? agent
                               : name == "btl"                 ? "self,tcp"
                               : name == "pml"                 ? "ob1"
                               : name == "mpi_yield_when_idle" ? "1"
                                                               : "eth0"});
  }
  if (ring) {
    for (const char* word :
         {"--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4"}) {
      words.push_back(word);
    }
  }
  words.push_back(program);
  return Peer{ring ? "Open MPI, ring" : "Open MPI",
              [words](const std::string& file, const std::vector<std::string>& sizes) {
                std::vector<std::string> line = words;
                line.insert(line.end(), {file, "once"});
                line.insert(line.end(), sizes.begin(), sizes.end());
                return Run(line, kPeerDeadline);
              }};
}

absl::StatusOr<Peer> PlainSockets(const Network& network, const std::vector<Size>& sizes) {
  return Peer{"plain sockets, doubling",
              [&network, sizes](const std::string& file, const std::vector<std::string>&) -> absl::Status {
                GT_ASSIGN_OR_RETURN(const std::vector<double> medians, network.PlainDoubling(sizes));
                std::string text;
                for (size_t s = 0; s < sizes.size(); ++s)
                  absl::StrAppend(&text, sizes[s].bytes, " ", medians[s], "\n");
                return WriteFileDurable(file, text);
              }};
}

absl::StatusOr<Peer> Gloo(const Network& network, const Home& home, const std::string& folder) {
  if (!Executable(kPython) || !Run({kPython, "-c", "import torch.distributed"}).ok()) {
    return absl::NotFoundError(absl::StrCat(kPython, " has no torch"));
  }
  const std::string program = folder + "/../bench/allreduce_gloo.py", store = home.path() + "/store";
  setenv("GLOO_SOCKET_IFNAME", "eth0", 1);
  return Peer{"Gloo",
              [&network, program, store](const std::string& file, const std::vector<std::string>& sizes) {
                std::filesystem::remove(store);
                std::vector<pid_t> children;
                for (int i = 0; i < kMachines; ++i) {
                  std::vector<std::string> line = network.Inside(i);
                  line.insert(line.end(), {kPython, program, file, absl::StrCat(kMachines),
                                           absl::StrCat("rank=", i, ":", store)});
                  line.insert(line.end(), sizes.begin(), sizes.end());
                  GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn(line));
                  children.push_back(pid);
                }
                return WaitForAll(children, "a rank of Gloo", kPeerDeadline);
              }};
}

// ------------------------------------------------------------------ the report

Series Of(const Board& board, size_t algorithm, size_t size, int turns) {
  const double* samples = board.sample[algorithm][size];
  return {std::vector<double>(samples, samples + turns)};
}

// The smallest bucket with which the cables carry what they should in both directions: a busy machine serves
// a small one too late, and acknowledgements wait behind data. Returns microseconds of each of kRawBytes, one
// way.
absl::StatusOr<std::vector<double>> LimitAndMeasureRaw(const Network& network) {
  std::vector<double> raw;
  for (const char* burst : {"8kb", "32kb", "64kb", "128kb"}) {
    GT_RETURN_IF_ERROR(network.Limit("1gbit", burst));
    GT_ASSIGN_OR_RETURN(raw, network.PlainTcp(kRawBytes, kRawTimes));
    std::printf("burst %s:\n", burst);
    for (size_t i = 0; i < kRawBytes.size(); ++i) {
      std::printf("  plain TCP, %zu bytes and a byte back: %.1f us, %.0f Mbit/s\n", kRawBytes[i], raw[i],
                  static_cast<double>(kRawBytes[i]) * 8 / raw[i]);
    }
    GT_ASSIGN_OR_RETURN(const std::vector<double> all, network.PlainTcp({kRawBytes.back()}, kRawTimes, true));
    const double mbits = static_cast<double>(kRawBytes.back()) * 8 / all[0];
    std::printf("  all machines at the same time, each to the next: %.0f Mbit/s\n", mbits);
    if (mbits > 880) break;
  }
  return raw;
}

void PrintSummary(const Board& board, const std::vector<double>& raw, const std::vector<Size>& sizes,
                  int turns) {
  const double byte = raw.back() / static_cast<double>(kRawBytes.back());
  std::printf("%-8s %10s %10s %10s %10s %10s   %s\n", "bytes", "auto us", "ring", "doubling", "halving-d.",
              "double-tr.", "auto / best alone; TCP bound / auto");
  for (size_t s = 0; s < sizes.size(); ++s) {
    std::printf("%-8s", Named(sizes[s].bytes).c_str());
    double best = 0;
    for (size_t a = 0; a < kAlgorithms.size(); ++a) {
      const double median = Of(board, a, s, turns).Median();
      std::printf(" %10.1f", median);
      if (a > 0 && (best == 0 || median < best)) best = median;
    }
    const double chosen = Of(board, 0, s, turns).Median();
    const double bound = 2.0 * (kMachines - 1) / kMachines * static_cast<double>(sizes[s].bytes) * byte;
    std::printf("   %.3f  %.3f\n", chosen / best, bound / chosen);
  }
}

// All ranks of a machine against its leader, through cables as they are now.
absl::Status MeasureRails(const Options& options, const Network& network, int of_each,
                          const std::string& cables, std::vector<Outcome>* outcomes) {
  std::vector<Size> sizes{{4 << 10, 200}, {64 << 10, 50}, {1 << 20, 20}, {16 << 20, 5}, {64 << 20, 2}};
  if (options.quick) sizes = {{64 << 10, 30}, {1 << 20, 5}, {16 << 20, 1}};
  const int turns = options.quick ? kTurnsQuick : kTurns;
  std::vector<Place> ranks;
  for (int machine = 0; machine < kRailMachines; ++machine) {
    for (int local = 0; local < of_each; ++local)
      ranks.push_back({machine, of_each == kRails ? Network::CoreOf(local) : kAnyCore});
  }
  Board* board = MakeBoard();
  if (board == nullptr) return absl::ResourceExhaustedError("no memory for the samples");
  GT_RETURN_IF_ERROR(MeasureOurs(network, ranks, kSpeakers, sizes, turns, board));
  std::printf("%d machines of %d ranks, %s\n%-8s %10s %10s %10s   %s\n", kRailMachines, of_each,
              cables.c_str(), "bytes", "auto us", "leader", "rails", "leader / rails; auto / better of them");
  for (size_t s = 0; s < sizes.size(); ++s) {
    const Series chosen = Of(*board, 0, s, turns), leader = Of(*board, 1, s, turns),
                 rails = Of(*board, 2, s, turns);
    std::printf("%-8s %10.1f %10.1f %10.1f   %.2f  %.3f\n", Named(sizes[s].bytes).c_str(), chosen.Median(),
                leader.Median(), rails.Median(), leader.Median() / rails.Median(),
                chosen.Median() / std::min(leader.Median(), rails.Median()));
    const std::string name =
        absl::StrCat("2 machines of ", of_each, ", ", cables, ", ", Named(sizes[s].bytes));
    outcomes->push_back({name, "us", "ours, leader", chosen, leader});
    outcomes->push_back({name, "us", "ours, rails", chosen, rails});
  }
  return absl::OkStatus();
}

absl::Status MeasureMachines(const Options& options, const Network& network, const Home& home,
                             const std::vector<double>& raw, std::vector<Outcome>* outcomes) {
  std::vector<Size> sizes{{8, 300},       {64, 300},       {512, 300},   {4 << 10, 300}, {16 << 10, 100},
                          {64 << 10, 50}, {256 << 10, 20}, {1 << 20, 7}, {2 << 20, 5},   {16 << 20, 2}};
  if (options.quick) sizes = {{8, 200}, {4 << 10, 200}, {64 << 10, 30}, {2 << 20, 3}, {16 << 20, 1}};
  const int turns = options.quick ? kTurnsQuick : kTurns;
  Board* board = MakeBoard();
  if (board == nullptr) return absl::ResourceExhaustedError("no memory for the samples");

  std::vector<Peer> peers;
  for (const auto& peer :
       {PlainSockets(network, sizes), OpenMpi(network, home, options.folder, false),
        OpenMpi(network, home, options.folder, true),
        options.quick ? absl::NotFoundError("--quick") : Gloo(network, home, options.folder)}) {
    if (peer.ok()) {
      peers.push_back(*peer);
    } else {
      std::fprintf(stderr, "bench_allreduce_net: without a peer: %s\n",
                   std::string(peer.status().message()).c_str());
    }
  }
  std::vector<std::string> words;
  for (const Size& size : sizes) words.push_back(absl::StrCat(size.bytes, ":", size.times));
  // One turn of ours measures everything once; peers are whole programs, so they come between such turns.
  std::vector<std::map<size_t, Series>> theirs(peers.size());
  std::vector<Place> ranks;
  for (int i = 0; i < kMachines; ++i) ranks.push_back({i, Network::CoreOf(i)});
  Board* one_turn = MakeBoard();
  for (int turn = 0; turn < turns; ++turn) {
    GT_RETURN_IF_ERROR(MeasureOurs(network, ranks, kAlgorithms, sizes, 1, one_turn));
    for (size_t a = 0; a < kAlgorithms.size(); ++a) {
      for (size_t s = 0; s < sizes.size(); ++s) board->sample[a][s][turn] = one_turn->sample[a][s][0];
    }
    for (size_t p = 0; p < peers.size(); ++p) {
      const std::string file = home.path() + "/samples";
      std::filesystem::remove(file);
      // mpirun across namespaces of one host crashes now and then: that turn has no sample of it.
      if (const absl::Status ran = peers[p].run(file, words); !ran.ok()) {
        std::fprintf(stderr, "bench_allreduce_net: %s: %s\n", peers[p].name.c_str(), ran.ToString().c_str());
        continue;
      }
      GT_ASSIGN_OR_RETURN(const BySize samples, ReadBySize(file, "a peer"));
      for (const auto& [bytes, sample] : samples) theirs[p][bytes].samples.push_back(sample);
    }
  }

  for (size_t s = 0; s < sizes.size(); ++s) {
    const std::string name = absl::StrCat("4 machines, ", Named(sizes[s].bytes));
    const Series chosen = Of(*board, 0, s, turns);
    for (size_t a = 1; a < kAlgorithms.size(); ++a) {
      outcomes->push_back(
          {name, "us", absl::StrCat("ours, ", kAlgorithms[a]), chosen, Of(*board, a, s, turns)});
    }
    for (size_t p = 0; p < peers.size(); ++p) {
      if (theirs[p].empty()) continue;
      outcomes->push_back({name, "us", peers[p].name, chosen, theirs[p][sizes[s].bytes]});
    }
  }
  PrintSummary(*board, raw, sizes, turns);
  return absl::OkStatus();
}

absl::Status MeasureAll(const Options& options, const Network& network, const Home& home) {
  std::vector<Outcome> outcomes;
  const bool all = options.only.empty(), rails = all || options.only == "rails";
  if (rails) GT_RETURN_IF_ERROR(MeasureRails(options, network, kRails, "cables without a limit", &outcomes));
  if (all || options.only == "pipeline") {
    for (const char* rate : {"20gbit", "8gbit", "4gbit", "2gbit"}) {
      GT_RETURN_IF_ERROR(network.Limit(rate, "256kb"));
      GT_RETURN_IF_ERROR(
          MeasureRails(options, network, kPipelineRanks, absl::StrCat("cables of ", rate, "/s"), &outcomes));
    }
  }
  if (rails || options.only == "machines") {
    GT_ASSIGN_OR_RETURN(const std::vector<double> raw, LimitAndMeasureRaw(network));
    if (rails) GT_RETURN_IF_ERROR(MeasureRails(options, network, kRails, "cables of 1 Gbit/s", &outcomes));
    if (options.only != "rails") GT_RETURN_IF_ERROR(MeasureMachines(options, network, home, raw, &outcomes));
  }
  return Report(options, "allreduce_net", outcomes) == 0 ? absl::OkStatus()
                                                         : absl::InternalError("the report was not written");
}

int Main(Options options) {
  options.folder = std::filesystem::absolute(options.folder).string();
  Network network(kMachines);
  if (const absl::Status made = network.Make(); !made.ok()) {
    std::fprintf(stderr, "bench_allreduce_net: nothing measured: %s\n", made.ToString().c_str());
    return absl::IsFailedPrecondition(made) ? 0 : 1;
  }
  Home home;
  absl::Status status = home.Make();
  if (status.ok()) status = MeasureAll(options, network, home);
  home.Remove();
  if (status.ok()) return 0;
  std::fprintf(stderr, "bench_allreduce_net: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) {
  return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv, {"machines", "rails", "pipeline"}));
}
