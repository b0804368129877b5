// bench_compress: a step of data-parallel training between two machines, whole: two ranks in network
// namespaces of their own, joined by a link of 100 Mbit/s, 1 Gbit/s or 10 Gbit/s, and in shared memory; 25 MB
// of gradients in 13 layers that become ready one after the other during 16 ms of computing. `compression:
// auto` beside fixed codecs and beside PyTorch's DistributedDataParallel over Gloo with a model of the same
// size (dense, its fp16 hook, its PowerSGD), in turns. Needs root, ip(8) and tc(8); the peers need Debian's
// torch.
//
// The links let bursts of 8 KB through at once (10 Gbit/s: 64 KB, below which tbf does not reach that rate):
// with a larger burst the few bytes of top-k would not feel the limit. The throughput of plain TCP on each
// link is printed.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "bench/network.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"
#include "comm/reducer/reducer.h"

namespace gtrain::bench {
namespace {

constexpr int kRanks = 2, kLayers = 13;
constexpr int64_t kWidth = 698;
constexpr size_t kElements = kWidth * kWidth;  // of a layer: 6.33 M, 25.3 MB together; as in compress_ddp.py
constexpr absl::Duration kCompute = absl::Milliseconds(16);
constexpr absl::Duration kPatience = absl::Minutes(3);
constexpr int kPeerAttempts = 4;                     // torch 1.13's PowerSGD hook loses a rank in many runs
constexpr const char* kPython = "/usr/bin/python3";  // Debian's, which has Debian's torch

struct Link {
  const char* name;
  const char* word;  // for --only
  const char* rate;  // of tc; empty: ranks share memory
  const char* burst;
  double goal;  // seconds of a step; 0: none
};
constexpr Link kLinks[] = {{"100 Mbit/s", "100mbit", "100mbit", "8kb", 0.030},
                           {"1 Gbit/s", "1gbit", "1gbit", "8kb", 0.025},
                           {"10 Gbit/s", "10gbit", "10gbit", "64kb", 0},
                           {"shared memory", "memory", "", "", 0}};

// The codecs to choose from. A warm-up is for accuracy; the steps after it are measured.
constexpr const char* kFixed[] = {"none", "fp16", "onebit warmup=0", "powersgd rank=1 warmup=0",
                                  "topk density=0.001 warmup=0"};
constexpr const char* kAuto = "auto: fp16, onebit warmup=0, topk density=0.001 warmup=0";
constexpr const char* kDdp[] = {"dense", "fp16", "powersgd"};
constexpr double kWithinFp16 = 1.02, kWithinBest = 1.05;

struct Board {
  double seconds;  // of a step, median, by rank 0
  char chosen[200];
};

absl::Duration Computed() {
  timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return absl::DurationFromTimespec(used);
}

// One backward pass: gradients of all sizes, a layer at a time from the last one. It computes for so much
// time of the processor, not of the clock: what codecs and sockets take of the core makes the step longer, as
// it does for the peers.
absl::Status Backward(Reducer* reducer, int step) {
  const absl::Duration began = Computed();
  for (int layer = kLayers; layer-- > 0;) {
    const auto gradient = reducer->gradient(static_cast<size_t>(layer));
    auto bits = static_cast<uint32_t>(step * 977 + layer + 1);
    for (float& value : gradient) {
      bits = bits * 1664525 + 1013904223;
      const auto x = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31f;
      value = x * x * x;
    }
    while (Computed() - began < kCompute * (kLayers - layer) / kLayers) {
    }
    GT_RETURN_IF_ERROR(reducer->Ready(static_cast<size_t>(layer)));
  }
  return absl::OkStatus();
}

absl::Status Train(Communicator& c, int settle, int steps, Board* board) {
  std::vector<GradientSpec> layers;
  for (int i = 0; i < kLayers; ++i) layers.push_back({absl::StrCat("layer", i), kElements, {kWidth, kWidth}});
  GT_ASSIGN_OR_RETURN(const auto reducer, Reducer::Create(&c, layers));
  std::vector<double> seconds;
  for (int step = 0; step < settle + steps; ++step) {
    GT_RETURN_IF_ERROR(c.Barrier());
    const Instant began = RealClock().Now();
    GT_RETURN_IF_ERROR(Backward(reducer.get(), step));
    GT_RETURN_IF_ERROR(reducer->Finish().status());
    if (step >= settle) seconds.push_back(absl::ToDoubleSeconds(RealClock().Now() - began));
  }
  if (c.rank() != 0) return absl::OkStatus();
  board->seconds = Series{seconds}.Median();
  std::string chosen;
  for (const BucketChoice& choice : reducer->Choices())
    absl::StrAppend(&chosen, " ", CodecName(choice.codec));
  std::snprintf(board->chosen, sizeof board->chosen, "%s", chosen.c_str());
  return absl::OkStatus();
}

class World {
 public:
  World(const Network& network, std::string folder) : network_(network), folder_(std::move(folder)) {
    void* page = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    board_ = page == MAP_FAILED ? nullptr : new (page) Board;
  }
  ~World() {
    if (board_ != nullptr) munmap(board_, sizeof(Board));
  }

  // Seconds of a step of ours.
  absl::StatusOr<double> Step(const Link& link, const std::string& compression, int settle, int steps) {
    if (board_ == nullptr) return absl::ResourceExhaustedError("no memory");
    *board_ = Board{};
    const bool apart = *link.rate != 0;
    comm::FakeWorld world(apart ? std::vector<std::string>{"a", "b"} : std::vector<std::string>{"a", "a"},
                          apart ? std::vector<std::string>{Network::AddressOf(0), Network::AddressOf(1)}
                                : std::vector<std::string>{});
    setenv("GTRAIN_COMPRESSION", compression.c_str(), 1);
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto body = [&, rank] {
        const absl::Status status = Rank(&world, rank, settle, steps);
        if (!status.ok()) world.Revoke("a rank failed");
        return status;
      };
      ranks.push_back(apart ? network_.Start(rank, body) : StartOnCore(Network::CoreOf(rank), body));
    }
    GT_RETURN_IF_ERROR(WaitForAll(ranks, "a rank of ours", kPatience));
    return board_->seconds;
  }
  const char* chosen() const { return board_->chosen; }

  // Seconds of a step of a peer, and of one without communication.
  absl::StatusOr<std::vector<double>> Peer(const std::string& method, int settle, int steps) {
    absl::Status last;
    const std::string file = "ddp";
    for (int attempt = 0; attempt < kPeerAttempts; ++attempt) {
      std::filesystem::remove(file);
      std::vector<pid_t> ranks;
      for (int rank = 0; rank < kRanks; ++rank) {
        std::vector<std::string> line = network_.Inside(rank);
        line.insert(line.end(),
                    {"env", "GLOO_SOCKET_IFNAME=eth0", kPython, folder_ + "/../bench/compress_ddp.py",
                     absl::StrCat(rank), absl::StrCat(kRanks), Network::AddressOf(0), method,
                     absl::StrCat(settle), absl::StrCat(steps), file});
        GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn(line));
        ranks.push_back(pid);
      }
      last = WaitForAll(ranks, "a rank of DDP", kPatience);
      const auto text = ReadFile(file, 100);
      // A measurement counts even if the process fails at its end.
      if (text.ok()) {
        std::vector<double> seconds(2);
        if (std::sscanf(text->c_str(), "%lf %lf", &seconds[0], &seconds[1]) == 2) return seconds;
      }
      ++peers_lost_;
    }
    return last.ok() ? absl::InternalError("DDP wrote nothing") : last;
  }
  int peers_lost() const { return peers_lost_; }

 private:
  absl::Status Rank(comm::FakeWorld* world, int rank, int settle, int steps) const {
    const auto bootstrap = world->Rank(rank);
    comm::ExecOptions options;
    options.user.timeout = kPatience;
    GT_ASSIGN_OR_RETURN(const auto communicator, comm::MakeCommunicator(bootstrap.get(), options));
    return Train(*communicator, settle, steps, board_);
  }

  const Network& network_;
  const std::string folder_;
  Board* board_ = nullptr;
  int peers_lost_ = 0;
};

void PrintGoal(const char* what, double value, double goal) {
  std::printf("  %-40s %8.4f, goal %g: %s\n", what, value, goal, value <= goal ? "reached" : "NOT REACHED");
}

// One link: `auto` beside each fixed codec and each peer, in turns.
absl::Status MeasureLink(World* world, const Link& link, const Options& options, bool peers,
                         std::vector<Outcome>* outcomes) {
  const int turns = options.quick ? 1 : 7;
  // Steps of those that send all elements: they take up to two seconds each.
  const int whole = absl::string_view(link.rate) == "100mbit" ? 2 : options.quick ? 3 : 9;
  std::vector<Series> fixed(std::size(kFixed)), ddp(std::size(kDdp));
  Series automatic, alone;
  for (int turn = 0; turn < turns; ++turn) {
    for (size_t i = 0; i < std::size(kDdp) && peers && *link.rate != 0; ++i) {
      const auto seconds = i < 2 ? world->Peer(kDdp[i], 2, whole) : world->Peer(kDdp[i], 4, 9);
      if (!seconds.ok()) {
        std::fprintf(stderr, "bench_compress: DDP %s: %s\n", kDdp[i], seconds.status().ToString().c_str());
        continue;
      }
      ddp[i].samples.push_back((*seconds)[0]);
      alone.samples.push_back((*seconds)[1]);
    }
    for (size_t i = 0; i < std::size(kFixed); ++i) {
      // A fixed codec has run as many steps before the measured ones as a codec that auto has chosen after
      // its first look.
      GT_ASSIGN_OR_RETURN(const double step, i < 2 ? world->Step(link, kFixed[i], 1, whole)
                                                   : world->Step(link, kFixed[i], 25, 21));
      fixed[i].samples.push_back(step);
    }
    GT_ASSIGN_OR_RETURN(const double step, world->Step(link, kAuto, 45, 21));
    automatic.samples.push_back(step);
  }
  std::printf("%s: auto %.4f s, ended with%s\n", link.name, automatic.Median(), world->chosen());
  if (!alone.samples.empty()) std::printf("  DDP's step without communication: %.4f s\n", alone.Median());
  const std::string name = absl::StrCat("a step, ", link.name, ", auto");
  double best = automatic.Median();
  for (size_t i = 0; i < std::size(kFixed); ++i) {
    best = i == 0 ? fixed[i].Median() : std::min(best, fixed[i].Median());
    outcomes->push_back({name, "s", absl::StrCat("fixed ", kFixed[i]), automatic, fixed[i]});
  }
  for (size_t i = 0; i < std::size(kDdp); ++i) {
    if (!ddp[i].samples.empty())
      outcomes->push_back({name, "s", absl::StrCat("DDP ", kDdp[i]), automatic, ddp[i]});
  }
  if (link.goal > 0) PrintGoal("seconds of a step", automatic.Median(), link.goal);
  PrintGoal("auto / fixed fp16", automatic.Median() / fixed[1].Median(), kWithinFp16);
  PrintGoal("auto / best fixed", automatic.Median() / best, kWithinBest);
  return absl::OkStatus();
}

absl::Status Limit(const Network& network, const Link& link) {
  GT_RETURN_IF_ERROR(network.Limit(link.rate, link.burst));
  const std::vector<size_t> bytes{50'000, 2 << 20};
  GT_ASSIGN_OR_RETURN(const std::vector<double> us, network.PlainTcp(bytes, 5));
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::printf("%s, bursts of %s: plain TCP, %zu bytes and a byte back %.2f ms, %.0f Mbit/s\n", link.name,
                link.burst, bytes[i], us[i] * 1e-3, static_cast<double>(bytes[i]) * 8 / us[i]);
  }
  return absl::OkStatus();
}

int Main(Options options) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // each line when it is known
  if (!options.json.empty()) options.json = std::filesystem::absolute(options.json).string();
  Network network(kRanks);
  Home home;
  absl::Status made = home.Make();
  if (made.ok()) made = network.Make();
  const bool peers =
      !(options.quick && options.only.empty()) && Run({kPython, "-c", "import torch.distributed"}).ok();
  if (!peers)
    std::fprintf(stderr, "bench_compress: without DDP: --quick alone, or %s has no torch\n", kPython);
  World world(network, options.folder);
  std::vector<Outcome> outcomes;
  for (const Link& link : kLinks) {
    if (!options.only.empty() && options.only != link.word) continue;
    if (options.only.empty() && options.quick && absl::string_view(link.word) != "1gbit")
      continue;  // 50 s in all
    absl::Status measured = *link.rate == 0 ? absl::OkStatus() : made;
    if (measured.ok() && *link.rate != 0) measured = Limit(network, link);
    if (measured.ok()) measured = MeasureLink(&world, link, options, peers, &outcomes);
    if (!measured.ok()) {
      std::fprintf(stderr, "bench_compress: %s is left out: %s\n", link.name, measured.ToString().c_str());
    }
  }
  if (world.peers_lost() > 0) std::printf("runs of DDP that lost a rank: %d\n", world.peers_lost());
  home.Remove();
  if (outcomes.empty()) return 1;
  return Report(options, "compress", outcomes);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) {
  std::vector<std::string> links;
  for (const auto& link : gtrain::bench::kLinks) links.push_back(link.word);
  return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv, links));
}
