// A rank is killed somewhere inside a collective, again and again: any collective, way, algorithm and size,
// at a random moment. The others must return in time, work on without it and then with its successor, over
// the connections that they have, and leave nothing behind (faults L1-L3, L7, L11), on up to four machines of
// four ranks. GTRAIN_KILL_POINTS=N moments (make soak: 1,000), GTRAIN_KILL_SEED=N other ones,
// GTRAIN_KILL_ONLY=split nothing but that collective, on three machines.
#include <dirent.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/rng.h"
#include "base/test_wait.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"
#include "comm/ucx/fabric.h"
#include "comm/ucx/ucx_test_here.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);  // of what must happen at all
constexpr absl::Duration kReturnIn = absl::Seconds(2);   // after the verdict (L1)
constexpr int kRanksMax = 16;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  uint64_t value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

// The page of memory that parent and children share.
struct Board {
  std::atomic<int> calls[kRanksMax];
  std::atomic<int64_t> returned_at_ns[kRanksMax];
};

struct Point {
  std::string what;  // of the table
  std::vector<std::string> nodes;
  std::string algorithm;  // between machines
  size_t count = 0;
  int victim = 0;
  absl::Duration after;  // everybody has called twice
  bool direct = false;   // memory of Allocate()
  int collective = 0;
};

constexpr const char* kCollectives[] = {
    "all-reduce",       "reduce-scatter", "reduce", "broadcast", "all-gather",        "all-to-all", "barrier",
    "send and receive", "split",          "gather", "scatter",   "uneven all-gather", "group"};
constexpr int kSplit = 8;
constexpr const char* kAlgorithms[] = {"ring", "doubling", "halving-doubling", "double-tree"};

Point Draw(Rng& rng, std::optional<int> only) {
  const std::vector<std::string> shapes[] = {
      {"a", "a", "a"},
      {"a", "b", "c"},
      {"a", "a", "b", "b"},
      {"a", "b"},
      {"a", "a", "a", "a", "b", "b", "b", "b", "c", "c", "c", "c", "d", "d", "d", "d"}};
  const size_t counts[] = {2, 5'000, 400'000};
  Point point;
  point.nodes = shapes[rng.Below(std::size(shapes))];
  if (!UcxHere()) point.nodes = shapes[0];
  // Half of them are what trainings call most.
  point.collective = rng.Chance(0.5) ? 0 : static_cast<int>(rng.Below(std::size(kCollectives)));
  if (only) {
    point.collective = *only;
    if (UcxHere()) point.nodes = shapes[1];
  }
  const bool one_machine = point.nodes.back() == "a";
  point.count = counts[rng.Below(std::size(counts))];
  if (point.nodes.size() > 4) point.count = std::min<size_t>(point.count, 100'000);  // a block for each
  point.victim = static_cast<int>(rng.Below(point.nodes.size()));
  // A split makes connections or arenas, which takes longer than any other call.
  point.after =
      absl::Microseconds(static_cast<int64_t>(rng.Below(point.collective == kSplit ? 30'000 : 3'000)));
  point.direct = point.collective == 0 && rng.Chance(0.3);
  if (!one_machine && point.collective == 0) point.algorithm = kAlgorithms[rng.Below(std::size(kAlgorithms))];
  // Where machines have several ranks, half of the time all of them carry.
  const bool rails = point.nodes.size() >= 4 && rng.Chance(0.5);
  if (rails) absl::StrAppend(&point.algorithm, point.algorithm.empty() ? "rails" : "+rails");
  point.what = absl::StrCat(kCollectives[point.collective],
                            one_machine               ? (point.direct ? ", direct memory" : ", one machine")
                            : point.algorithm.empty() ? ", machines"
                                                      : absl::StrCat(", ", point.algorithm),
                            point.nodes.size() > 4 ? ", 16 ranks" : "");
  return point;
}

std::optional<int> OnlyCollective() {
  const char* name = getenv("GTRAIN_KILL_ONLY");
  if (name == nullptr) return std::nullopt;
  for (size_t i = 0; i < std::size(kCollectives); ++i) {
    if (absl::string_view(name) == kCollectives[i]) return static_cast<int>(i);
  }
  std::fprintf(stderr, "GTRAIN_KILL_ONLY is '%s'\n", name);
  std::abort();
}

size_t EntriesOf(const char* path) {
  size_t entries = 0;
  DIR* dir = opendir(path);
  GT_CHECK(dir != nullptr);
  while (readdir(dir) != nullptr) ++entries;
  closedir(dir);
  return entries;
}

// Port of an IPv4 socket, 0 of anything else.
int PortOf(int fd) {
  sockaddr_in address{};
  socklen_t bytes = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return 0;
  return address.sin_family == AF_INET ? address.sin_port : 0;
}

bool Listens(int fd) {
  int listens = 0;
  socklen_t bytes = sizeof(listens);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens != 0;
}

// Peers that see a broken connection try the way to the others. The connections that they leave at an open
// port are closed when its owner looks again (LinkTarget in comm/ucx/link_probe.h).
size_t DescriptorsButProbes() {
  std::set<int> open_ports;
  const size_t all = EntriesOf("/proc/self/fd");
  constexpr int kDescriptorMax = 1024;
  for (int fd = 0; fd < kDescriptorMax; ++fd) {
    if (Listens(fd)) open_ports.insert(PortOf(fd));
  }
  size_t probes = 0;
  for (int fd = 0; fd < kDescriptorMax; ++fd)
    probes += !Listens(fd) && PortOf(fd) != 0 && open_ports.contains(PortOf(fd)) ? 1 : 0;
  return all - probes;
}

// The resources that this process holds: descriptors, threads, shared segments.
struct Held {
  size_t descriptors = DescriptorsButProbes(), threads = EntriesOf("/proc/self/task"), segments = 0;
  Held() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
      segments += line.find(" rw-s ") != std::string::npos ? 1 : 0;
  }
  bool MoreThan(const Held& other) const {
    return descriptors > other.descriptors || threads > other.threads || segments > other.segments;
  }
};

absl::Status CallOnce(Communicator& c, const Point& point, std::vector<float>& a, std::vector<float>& b,
                      float* direct) {
  const size_t n = point.count;
  constexpr DType kType = DType::kFloat32;
  switch (point.collective) {
    case 0:
      return c.AllReduce(direct != nullptr ? direct : a.data(), n, kType, ReduceOp::kMax);
    case 1:
      return c.ReduceScatter(a.data(), b.data(), n, kType, ReduceOp::kMax);
    case 2:
      return c.Reduce(a.data(), n, kType, ReduceOp::kMax, 0);
    case 3:
      return c.Broadcast(a.data(), n, kType, 0);
    case 4:
      return c.AllGather(a.data(), b.data(), n, kType);
    case 5:
      return c.AllToAll(a.data(), b.data(), n, kType);
    case 6:
      return c.Barrier();
    case kSplit: {  // two halves, and a call of each
      auto half = c.Split(c.rank() % 2, c.rank());
      RETURN_IF_BAD(half.status());
      return (*half)->AllReduce(a.data(), n, kType, ReduceOp::kMax);
    }
    case 9:
      return c.Gather(a.data(), b.data(), n, kType, 0);
    case 10:
      return c.Scatter(a.data(), b.data(), n, kType, 0);
    case 11: {  // the first rank has all but one element of each other
      std::vector<size_t> counts(static_cast<size_t>(c.size()), 1);
      counts[0] = n;
      return c.AllGatherV(a.data(), b.data(), counts, kType);
    }
    case 12: {  // everybody with everybody
      std::vector<Message> group;
      for (int other = 0; other < c.size(); ++other) {
        float* const to = b.data() + static_cast<size_t>(other) * n;
        group.push_back({Message::Kind::kReceive, to, n, kType, other});
        group.push_back({Message::Kind::kSend, a.data(), n, kType, other});
      }
      auto going = c.Start(group);
      RETURN_IF_BAD(going.status());
      return *(*going)->Wait(absl::InfiniteDuration());
    }
    default: {
      // Around in a ring: the even ones send first.
      const int next = (c.rank() + 1) % c.size(), before = (c.rank() + c.size() - 1) % c.size();
      if (c.rank() % 2 == 0) RETURN_IF_BAD(c.Send(a.data(), n, kType, next));
      RETURN_IF_BAD(c.Receive(b.data(), n, kType, before));
      return c.rank() % 2 == 0 ? absl::OkStatus() : c.Send(a.data(), n, kType, next);
    }
  }
}

// A generation on this rank: until a call fails, or for `calls` of them.
// `fabric`: its connections, which outlive it.
absl::Status Generation(FakeWorld& world, int rank, const Point& point, int calls, std::atomic<int>* counter,
                        std::shared_ptr<Fabric>* fabric = nullptr) {
  std::unique_ptr<Bootstrap> bootstrap = world.Rank(rank);
  const absl::Cleanup keep = [&] {
    if (fabric != nullptr) *fabric = bootstrap->fabric();
  };
  ExecOptions options;
  options.user.timeout = kPatience;
  options.algorithm = point.algorithm;
  auto made = MakeCommunicator(bootstrap.get(), options);
  RETURN_IF_BAD(made.status());
  Communicator& c = **made;
  std::vector<float> a(point.count * static_cast<size_t>(c.size()), 1.0f), b = a;
  float* direct = nullptr;
  if (point.direct) {
    auto memory = c.Allocate(point.count * sizeof(float));
    RETURN_IF_BAD(memory.status());
    direct = static_cast<float*>(*memory);
  }
  for (int i = 0; i < calls; ++i) {
    RETURN_IF_BAD(CallOnce(c, point, a, b, direct));
    if (counter != nullptr) ++*counter;
  }
  return absl::OkStatus();
}

absl::Status NextGeneration(FakeWorld& world, int rank, std::shared_ptr<Fabric> fabric = nullptr) {
  std::unique_ptr<Bootstrap> bootstrap = world.Rank(rank);
  bootstrap->fabric() = std::move(fabric);
  ExecOptions options;
  options.user.timeout = kPatience;
  auto made = MakeCommunicator(bootstrap.get(), options);
  RETURN_IF_BAD(made.status());
  RETURN_IF_BAD(CheckAllReduce(**made, 5'000, DType::kFloat32, ReduceOp::kSum));
  return Messages(**made);
}

int Complain(int rank, const char* what, const absl::Status& status) {
  std::fprintf(stderr, "rank %d: %s: %s\n", rank, what, status.ToString().c_str());
  return 1;
}

std::vector<std::string> Without(std::vector<std::string> nodes, int victim) {
  nodes.erase(nodes.begin() + victim);
  return nodes;
}

struct Worlds {
  FakeWorld before, during, without, after;
  Worlds(const std::vector<std::string>& nodes, int victim)
      : before(nodes), during(nodes), without(Without(nodes, victim)), after(nodes) {}
};

// The exit code.
int Rank(Worlds& worlds, int rank, const Point& point, Board* board) {
  // Whatever a first use keeps for the whole process is not this test's business, nor is the thread that TSan
  // starts again in a child behind its first one.
  std::thread([] {}).join();
  if (absl::Status s = Generation(worlds.before, rank, point, 2, nullptr); !s.ok())
    return Complain(rank, "before", s);
  const Held held;
  std::shared_ptr<Fabric> fabric;
  const absl::Status lost = Generation(worlds.during, rank, point, 1 << 30, &board->calls[rank], &fabric);
  board->returned_at_ns[rank] = RealClock().Now().ns;
  if (!absl::IsUnavailable(lost)) return Complain(rank, "the lost generation", lost);
  // The ranks that are left make a generation over the same connections.
  const int place = rank < point.victim ? rank : rank - 1;
  if (absl::Status s = NextGeneration(worlds.without, place, fabric); !s.ok())
    return Complain(rank, "without the lost rank", s);
  // The next generation has a successor of the lost rank, which knows none of these connections.
  if (absl::Status s = NextGeneration(worlds.after, rank, std::move(fabric)); !s.ok())
    return Complain(rank, "the next generation", s);
  // A thread that was joined is still listed for a moment, now as when the others were counted.
  Held now;
  (void)Until([&] { return !(now = Held()).MoreThan(held); }, absl::Seconds(5));
  if (now.MoreThan(held)) {
    std::fprintf(
        stderr, "rank %d holds %zu descriptors, %zu threads, %zu segments; before it was %zu, %zu, %zu\n",
        rank, now.descriptors, now.threads, now.segments, held.descriptors, held.threads, held.segments);
    return 1;
  }
  return 0;
}

class KillTest : public testing::Test {
 protected:
  KillTest() {
    void* page = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    GT_CHECK(page != MAP_FAILED);
    board_ = static_cast<Board*>(page);
  }
  ~KillTest() override {
    for (const pid_t pid : pids_) {
      if (pid <= 0) continue;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    munmap(board_, sizeof(Board));
  }

  void Await(size_t rank) {
    const Instant deadline = RealClock().Now() + kPatience;
    int status = 0;
    while (waitpid(pids_[rank], &status, WNOHANG) == 0) {
      ASSERT_LT(RealClock().Now(), deadline) << "rank " << rank << " hangs";
      absl::SleepFor(absl::Milliseconds(1));
    }
    pids_[rank] = 0;
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << " status " << status;
  }

  // How long the slowest took to return.
  void KillAt(const Point& point, absl::Duration* slowest) {
    Worlds worlds(point.nodes, point.victim);
    for (int rank = 0; rank < kRanksMax; ++rank) board_->calls[rank] = 0, board_->returned_at_ns[rank] = 0;
    pids_.clear();
    for (int rank = 0; rank < worlds.during.size(); ++rank) {
      const pid_t pid = fork();
      GT_CHECK(pid >= 0);
      if (pid == 0) _exit(Rank(worlds, rank, point, board_));
      pids_.push_back(pid);
    }
    const Instant start = RealClock().Now();
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      while (board_->calls[rank] < 2) {
        ASSERT_LT(RealClock().Now() - start, kPatience) << "rank " << rank << " made no call";
        sched_yield();
      }
    }
    const Instant moment = RealClock().Now() + point.after;
    while (RealClock().Now() < moment) {
    }
    pid_t& victim = pids_[static_cast<size_t>(point.victim)];
    kill(victim, SIGKILL);
    waitpid(victim, nullptr, 0);
    worlds.during.Revoke("rank was killed");
    const Instant revoked = RealClock().Now();
    victim = fork();
    GT_CHECK(victim >= 0);
    if (victim == 0) {
      const absl::Status next = NextGeneration(worlds.after, point.victim);
      _exit(next.ok() ? 0 : Complain(point.victim, "the successor", next));
    }
    for (size_t rank = 0; rank < pids_.size(); ++rank) Await(rank);
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (static_cast<int>(rank) == point.victim) continue;
      *slowest = std::max(*slowest, Instant{board_->returned_at_ns[rank]} - revoked);
    }
    EXPECT_LT(*slowest, kReturnIn);
  }

  Board* board_;
  std::vector<pid_t> pids_;
};

TEST_F(KillTest, AnywhereTheOthersReturnAndGoOn_L1_L2_L3_L7_L11) {
  const uint64_t points = FromEnvironment("GTRAIN_KILL_POINTS", 40),
                 seed = FromEnvironment("GTRAIN_KILL_SEED", 1);
  const std::optional<int> only = OnlyCollective();
  Rng rng(seed);
  std::map<std::string, int> done;
  absl::Duration slowest;
  for (uint64_t i = 0; i < points; ++i) {
    const Point point = Draw(rng, only);
    SCOPED_TRACE(absl::StrCat("seed ", seed, " point ", i, ": ", point.what, " of ", point.count, " on ",
                              absl::StrJoin(point.nodes, ""), ", rank ", point.victim, " killed after ",
                              absl::FormatDuration(point.after)));
    KillAt(point, &slowest);
    if (HasFailure()) return;
    ++done[point.what];
  }
  for (const auto& [what, times] : done) std::printf("%-36s %5d\n", what.c_str(), times);
  std::printf("%zu kills; the slowest return took %s\n", static_cast<size_t>(points),
              absl::FormatDuration(slowest).c_str());
}

}  // namespace
}  // namespace gtrain::comm
