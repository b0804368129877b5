// bench_fabric: what communicators cost beside the first one, and how soon a call returns that is given up.
// The ranks are forked here, each of them a machine (UCX over loopback) or all on one (shared memory).
//
//   splits   the first communicator of 8 and of 17 machines, further ones of all ranks, and the descriptors
//            that they add; 1,000 (100 with --quick) made and closed, and memory and descriptors after that
//   ends     a rank aborts a communicator in which the others are waiting, or the generation is revoked: how
//            long after that the last of them returns. Also where one more rank is stopped (SIGSTOP) in the
//            middle of an all-reduce of 64 MiB. 1,000 times each, 50 with --quick
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"

namespace gtrain::bench {
namespace {

using comm::ExecOptions;
using comm::FakeWorld;
using comm::MakeCommunicator;

constexpr int kRanksMax = 32, kTimesMax = 1000, kRanksOfEnds = 4;
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr size_t kLarge = 16 << 20;  // floats

// The memory that the ranks and this program share.
struct Board {
  std::atomic<int> here[kRanksMax], failed;
  std::atomic<int64_t> began_ns, ended_ns[kRanksMax];
  double first_ms, split_ms[kTimesMax];
  double descriptors_before, descriptors_after, memory_before, memory_after;  // of rank 0; memory: MiB
};

int64_t NowNs() { return RealClock().Now().ns; }

bool Until(const std::function<bool()>& condition) {
  const Instant end = RealClock().Now() + kPatience;
  while (!condition()) {
    if (RealClock().Now() > end) return false;
    absl::SleepFor(absl::Microseconds(200));
  }
  return true;
}

double Descriptors() {
  double open = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    open += entry.path().empty() ? 0 : 1;
  return open;
}

double MemoryMiB() {
  std::ifstream status("/proc/self/statm");
  double all = 0, resident = 0;
  status >> all >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

using Body = std::function<absl::Status(Communicator&)>;

class Ranks {
 public:
  Ranks(Board* board, const std::vector<std::string>& nodes, const Body& body) : world_(nodes) {
    std::memset(static_cast<void*>(board), 0, sizeof(*board));
    world_.wakes = true;
    for (int rank = 0; rank < world_.size(); ++rank) {
      const pid_t pid = fork();
      if (pid == 0) _exit(Child(board, rank, body));
      pids_.push_back(pid);
    }
  }
  ~Ranks() {
    for (const pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
  FakeWorld& world() { return world_; }
  void Stop(int rank) { kill(pids_[static_cast<size_t>(rank)], SIGSTOP); }
  // Waits for all processes and checks their exit codes.
  absl::Status Join() {
    int bad = 0;
    for (const pid_t pid : std::exchange(pids_, {})) {
      int status = 0;
      waitpid(pid, &status, 0);
      bad += status != 0 ? 1 : 0;
    }
    return bad == 0 ? absl::OkStatus() : absl::InternalError(absl::StrCat(bad, " ranks failed"));
  }

 private:
  int Child(Board* board, int rank, const Body& body) {
    std::unique_ptr<comm::Bootstrap> bootstrap = world_.Rank(rank);
    ExecOptions options;
    options.user.timeout = kPatience;
    const int64_t begin = NowNs();
    auto communicator = MakeCommunicator(bootstrap.get(), options);
    if (rank == 0) board->first_ms = static_cast<double>(NowNs() - begin) * 1e-6;
    const absl::Status status = communicator.ok() ? body(**communicator) : communicator.status();
    if (status.ok()) return 0;
    std::fprintf(stderr, "bench_fabric: rank %d: %s\n", rank, status.ToString().c_str());
    board->failed = 1;
    return 1;
  }

  FakeWorld world_;
  std::vector<pid_t> pids_;
};

std::vector<std::string> Machines(int n) {
  std::vector<std::string> nodes;
  for (int i = 0; i < n; ++i) nodes.push_back(absl::StrCat("m", i));
  return nodes;
}

Outcome Named(const std::string& name, const std::string& unit, std::vector<double> samples) {
  Outcome outcome;
  outcome.name = name;
  outcome.unit = unit;
  outcome.ours.samples = std::move(samples);
  return outcome;
}

// ------------------------------------------------------------------ splits

absl::Status MeasureSplits(Board* board, int machines, int times, std::vector<Outcome>* outcomes) {
  Ranks ranks(board, Machines(machines), [&](Communicator& c) -> absl::Status {
    const auto split = [&]() -> absl::Status {
      GT_ASSIGN_OR_RETURN(const auto part, c.Split(0, c.rank()));
      float number = 1;
      return part->AllReduce(&number, 1, DType::kFloat32, ReduceOp::kSum);
    };
    for (int i = 0; i < 20; ++i) GT_RETURN_IF_ERROR(split());  // what is kept for good is there then
    if (c.rank() == 0) board->descriptors_before = Descriptors(), board->memory_before = MemoryMiB();
    for (int i = 0; i < times; ++i) {
      GT_RETURN_IF_ERROR(c.Barrier());
      const int64_t begin = NowNs();
      GT_ASSIGN_OR_RETURN(const auto part, c.Split(0, c.rank()));
      if (c.rank() == 0) board->split_ms[i] = static_cast<double>(NowNs() - begin) * 1e-6;
      float number = 1;
      GT_RETURN_IF_ERROR(part->AllReduce(&number, 1, DType::kFloat32, ReduceOp::kSum));
    }
    if (c.rank() == 0) board->descriptors_after = Descriptors(), board->memory_after = MemoryMiB();
    return c.Barrier();
  });
  GT_RETURN_IF_ERROR(ranks.Join());
  const std::string of = absl::StrCat(machines, " machines, ");
  outcomes->push_back(Named(of + "the first communicator", "ms", {board->first_ms}));
  outcomes->push_back(Named(of + "a split", "ms", {board->split_ms, board->split_ms + times}));
  outcomes->push_back(Named(of + absl::StrCat("descriptors after ", times, " splits"), "more",
                            {board->descriptors_after - board->descriptors_before}));
  outcomes->push_back(Named(of + absl::StrCat("memory after ", times, " splits"), "MiB more",
                            {board->memory_after - board->memory_before}));
  return absl::OkStatus();
}

// ------------------------------------------------------------------ ends

// How long after the end was said the last rank that runs returned, in milliseconds.
absl::StatusOr<double> Waited(Board* board, int stopped) {
  int64_t last = 0;
  for (int rank = 0; rank < kRanksOfEnds; ++rank) {
    if (rank == stopped) continue;
    if (!Until([&] { return board->ended_ns[rank] != 0 || board->failed != 0; }) || board->failed != 0)
      return absl::DeadlineExceededError(absl::StrCat("rank ", rank, " did not return"));
    last = std::max<int64_t>(last, board->ended_ns[rank]);
  }
  return static_cast<double>(last - board->began_ns) * 1e-6;
}

// All but rank 1, which says the end if `abort`, wait in a call that it never joins; rank 3 may be stopped in
// the middle of a large one, of which then all are a part.
absl::StatusOr<double> EndOnce(Board* board, const std::vector<std::string>& nodes, bool abort, bool stop) {
  constexpr int kSayer = 1, kStopped = 3;
  Ranks ranks(board, nodes, [&](Communicator& c) -> absl::Status {
    GT_ASSIGN_OR_RETURN(const auto part, c.Split(0, c.rank()));
    std::vector<float> data(stop ? kLarge : 1);
    GT_RETURN_IF_ERROR(part->Barrier());
    board->here[c.rank()] = 1;
    absl::Status status;
    if (c.rank() == kSayer && !(stop && !abort)) {
      if (!Until([&] { return board->here[kRanksMax - 1] != 0; }))
        return absl::DeadlineExceededError("no word");
      if (abort) {
        board->began_ns = NowNs();
        part->Abort(absl::InternalError("the bench said so"));
      } else {
        status = part->Barrier();
      }
    } else {
      while (status.ok()) status = part->AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kSum);
    }
    board->ended_ns[c.rank()] = NowNs();
    // Freeing 64 MiB takes a core for milliseconds, which a rank that has not returned yet may need.
    (void)Until([&] { return board->here[kRanksMax - 2] != 0; });
    return absl::OkStatus();
  });
  for (int rank = 0; rank < kRanksOfEnds; ++rank) {
    if (!Until([&] { return board->here[rank] != 0 || board->failed != 0; }) || board->failed != 0)
      return absl::DeadlineExceededError("the ranks do not start");
  }
  absl::SleepFor(absl::Milliseconds(stop ? 20 : 5));  // so that they wait, or are in the middle
  if (stop) {
    ranks.Stop(kStopped);
    absl::SleepFor(absl::Milliseconds(10));
  }
  board->here[kRanksMax - 1] = 1;
  if (!abort) {
    board->began_ns = NowNs();
    ranks.world().Revoke("the bench said so");
  }
  const absl::StatusOr<double> waited = Waited(board, stop ? kStopped : -1);
  board->here[kRanksMax - 2] = 1;
  return waited;
}

absl::Status MeasureEnds(Board* board, int times, std::vector<Outcome>* outcomes) {
  const std::pair<const char*, std::vector<std::string>> places[] = {
      {"shared memory", FakeWorld::OneNode(kRanksOfEnds)}, {"4 machines", Machines(kRanksOfEnds)}};
  for (const auto& [place, nodes] : places) {
    for (const bool abort : {true, false}) {
      for (const bool stop : {false, true}) {
        std::vector<double> samples;
        for (int i = 0; i < times; ++i) {
          GT_ASSIGN_OR_RETURN(const double waited, EndOnce(board, nodes, abort, stop));
          samples.push_back(waited);
        }
        std::ranges::sort(samples);
        const std::string name =
            absl::StrCat(place, ", ", abort ? "abort" : "revoke", stop ? ", one stopped" : "");
        std::printf("%-40s median %8.2f ms   p99 %8.2f   worst %8.2f   of %d\n", name.c_str(),
                    samples[samples.size() / 2], samples[samples.size() * 99 / 100], samples.back(), times);
        std::fflush(stdout);
        outcomes->push_back(Named(name, "ms", std::move(samples)));
      }
    }
  }
  return absl::OkStatus();
}

int Run(const Options& options) {
  void* page = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return 1;
  auto* const board = static_cast<Board*>(page);
  std::vector<Outcome> outcomes;
  absl::Status status;
  for (const int machines : {8, 17}) {
    if (options.only == "ends" || !status.ok()) continue;
    status = MeasureSplits(board, machines, options.quick ? 100 : kTimesMax, &outcomes);
  }
  if (options.only != "splits" && status.ok())
    status = MeasureEnds(board, options.quick ? 50 : 1000, &outcomes);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_fabric: %s\n", status.ToString().c_str());
    return 1;
  }
  return Report(options, "fabric", outcomes);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) {
  return gtrain::bench::Run(gtrain::bench::ParseOptions(argc, argv, {"splits", "ends"}));
}
