// bench_compress: a step of data-parallel training between two machines, whole: two ranks in network
// namespaces of their own, joined by a link of 100 Mbit/s, 1 Gbit/s or 10 Gbit/s with bursts of 8 KB, and in
// shared memory; 25 MB of gradients in 13 layers that become ready one after the other during 16 ms. Fixed
// codecs beside `compression: auto`. Needs root, ip(8) and tc(8).
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"
#include "gtrain/reducer.h"

namespace gtrain::bench {
namespace {

constexpr int kRanks = 2, kLayers = 13;
constexpr size_t kElements = 487'000;  // of a layer: 6.33 M, 25.3 MB together
constexpr absl::Duration kCompute = absl::Milliseconds(16);
constexpr absl::Duration kPatience = absl::Minutes(2);

struct Link {
  const char* name;
  const char* rate;  // of tc; empty: ranks share memory
};
constexpr Link kLinks[] = {
    {"100 Mbit/s", "100mbit"}, {"1 Gbit/s", "1gbit"}, {"10 Gbit/s", "10gbit"}, {"shared memory", ""}};

// What is allowed. Warm-up is for accuracy; a step behind it is what is measured.
constexpr const char* kFixed[] = {"none", "fp16", "onebit warmup=0", "topk density=0.001 warmup=0"};
constexpr const char* kAuto = "auto: fp16, onebit warmup=0, topk density=0.001 warmup=0";

struct Board {
  std::atomic<int> unshared[kRanks], wired[kRanks], failed;
  double seconds;  // of a step, median, by rank 0
  char chosen[200];
};

bool Until(const std::function<bool()>& condition) {
  const Instant end = RealClock().Now() + kPatience;
  while (!condition()) {
    if (RealClock().Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

bool Shell(const std::string& command) { return std::system(command.c_str()) == 0; }

// One backward pass: gradients of all sizes, a layer at a time from the last one.
absl::Status Backward(Reducer* reducer, int step) {
  const Instant began = RealClock().Now();
  for (int layer = kLayers; layer-- > 0;) {
    const auto gradient = reducer->gradient(static_cast<size_t>(layer));
    auto bits = static_cast<uint32_t>(step * 977 + layer + 1);
    for (float& value : gradient) {
      bits = bits * 1664525 + 1013904223;
      const auto x = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31f;
      value = x * x * x;
    }
    while (RealClock().Now() - began < kCompute * (kLayers - layer) / kLayers) {
    }
    GT_RETURN_IF_ERROR(reducer->Ready(static_cast<size_t>(layer)));
  }
  return absl::OkStatus();
}

absl::Status Train(Communicator& c, int settle, int steps, Board* board) {
  std::vector<GradientSpec> layers;
  for (int i = 0; i < kLayers; ++i) layers.push_back({absl::StrCat("layer", i), kElements});
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
  World() {
    void* page = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    board_ = page == MAP_FAILED ? nullptr : new (page) Board;
  }
  ~World() {
    if (board_ != nullptr) munmap(board_, sizeof(Board));
  }

  // Seconds of a step, and what each bucket used in the end.
  absl::StatusOr<double> Step(const Link& link, const std::string& compression, int settle, int steps) {
    if (board_ == nullptr) return absl::ResourceExhaustedError("no memory");
    new (board_) Board{};
    const bool apart = *link.rate != 0;
    comm::FakeWorld world(
        apart ? std::vector<std::string>{"a", "b"} : std::vector<std::string>{"a", "a"},
        apart ? std::vector<std::string>{"10.78.0.1", "10.78.0.2"} : std::vector<std::string>{});
    setenv("GTRAIN_COMPRESSION", compression.c_str(), 1);
    pid_t pids[kRanks];
    for (int rank = 0; rank < kRanks; ++rank) {
      pids[rank] = fork();
      if (pids[rank] == 0) _exit(Rank(&world, rank, apart, settle, steps));
    }
    const bool wired = !apart || Wire(pids, link.rate);
    if (!wired) world.Revoke("no namespaces here");
    for (auto& flag : board_->wired) flag = wired ? 1 : -1;
    for (const pid_t pid : pids) {
      int status = 1;
      waitpid(pid, &status, 0);
      if (status != 0) ++board_->failed;
    }
    if (board_->failed != 0)
      return absl::UnavailableError("a rank failed, see above; this bench needs root, ip and tc");
    return board_->seconds;
  }
  const char* chosen() const { return board_->chosen; }

 private:
  // A pair of interfaces from one namespace to the other, each end sending at the rate.
  bool Wire(const pid_t* pids, const char* rate) {
    if (!Until([&] { return board_->unshared[0] + board_->unshared[1] == kRanks; })) return false;
    std::string commands =
        absl::StrCat("ip link add gtb0 netns ", pids[0], " type veth peer name gtb1 netns ", pids[1]);
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string in = absl::StrCat(" && nsenter -n -t ", pids[rank], " ");
      absl::StrAppend(&commands, in, "ip addr add 10.78.0.", rank + 1, "/24 dev gtb", rank, in,
                      "ip link set gtb", rank, " up", in, "ip link set lo up", in, "tc qdisc add dev gtb",
                      rank, " root tbf rate ", rate, " burst ",
                      absl::string_view(rate) == "10gbit" ? "64kb" : "8kb", " latency 50ms");
    }
    return Shell(commands);
  }

  int Rank(comm::FakeWorld* world, int rank, bool apart, int settle, int steps) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (apart && unshare(CLONE_NEWNET | CLONE_NEWNS) != 0) return 2;
    board_->unshared[rank] = 1;
    if (!Until([&] { return board_->wired[rank] != 0; }) || board_->wired[rank] < 0) return 3;
    // UCX looks for interfaces in /sys, which shows those of the namespace it was mounted in.
    if (apart && (!Shell("mount --make-rprivate / && mount -t sysfs sysfs /sys") || !Until([rank] {
          return Shell(absl::StrCat("ip link show gtb", rank, " | grep -q LOWER_UP"));
        }))) {
      return 4;
    }
    const auto bootstrap = world->Rank(rank);
    comm::ExecOptions options;
    options.user.timeout = kPatience;
    auto communicator = comm::MakeCommunicator(bootstrap.get(), options);
    absl::Status status = communicator.status();
    if (status.ok()) status = Train(**communicator, settle, steps, board_);
    if (status.ok()) return 0;
    std::fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
    world->Revoke("a rank failed");
    return 1;
  }

  Board* board_ = nullptr;
};

// One link: `auto` beside each fixed codec, in turns.
absl::Status MeasureLink(World* world, const Link& link, int turns, std::vector<Outcome>* outcomes) {
  const bool slow = absl::string_view(link.rate) == "100mbit";  // float32 takes two seconds a step
  std::vector<Series> fixed(std::size(kFixed));
  Series automatic;
  for (int turn = 0; turn < turns; ++turn) {
    for (size_t i = 0; i < std::size(kFixed); ++i) {
      const bool few = slow && i < 2;
      GT_ASSIGN_OR_RETURN(const double step, world->Step(link, kFixed[i], few ? 1 : 5, few ? 3 : 21));
      fixed[i].samples.push_back(step);
    }
    GT_ASSIGN_OR_RETURN(const double step, world->Step(link, kAuto, 45, 21));
    automatic.samples.push_back(step);
  }
  std::printf("%s: auto ended with%s\n", link.name, world->chosen());
  for (size_t i = 0; i < std::size(kFixed); ++i) {
    outcomes->push_back({absl::StrCat("a step, ", link.name, ", auto"), "s",
                         absl::StrCat("fixed ", kFixed[i]), automatic, fixed[i]});
  }
  return absl::OkStatus();
}

int Main(const Options& options) {
  World world;
  std::vector<Outcome> outcomes;
  for (const Link& link : kLinks) {
    const absl::string_view rate = link.rate;
    if (options.quick && (rate == "100mbit" || rate == "10gbit")) continue;  // 50 s in all
    const absl::Status measured = MeasureLink(&world, link, options.quick ? 1 : 3, &outcomes);
    if (!measured.ok()) {
      std::fprintf(stderr, "bench_compress: %s is left out: %s\n", link.name, measured.ToString().c_str());
    }
  }
  if (outcomes.empty()) return 1;
  return Report(options, "compress", outcomes);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
