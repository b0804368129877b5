// Ranks in network namespaces of their own, joined by a bridge in a fourth: real interfaces and addresses.
// All namespaces are anonymous and end with their processes. Needs root (or user namespaces), ip(8) and
// nft(8).
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/test_wait.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr int kRanks = 3;

struct Board {
  std::atomic<int> unshared[kRanks], wired[kRanks], steps[kRanks], code[kRanks];
  std::atomic<int> go_on;
  std::atomic<int64_t> returned_at_ns[kRanks];
};

bool Shell(const std::string& command) { return std::system(command.c_str()) == 0; }
std::string AddressOf(int rank) { return absl::StrCat("10.77.", rank, ".2"); }

class NamespaceTest : public testing::Test {
 protected:
  using Body = std::function<absl::Status(Communicator&)>;
  using HubBody = std::function<bool(FakeWorld&)>;

  NamespaceTest() {
    void* page = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    GT_CHECK(page != MAP_FAILED);
    board_ = static_cast<Board*>(page);
  }
  ~NamespaceTest() override { munmap(board_, sizeof(Board)); }

  static bool Possible() {
    const pid_t probe = fork();
    if (probe == 0) {
      _exit(unshare(CLONE_NEWNET) == 0 && Shell("ip link add probe0 type veth peer name probe1 2>/dev/null")
                ? 0
                : 1);
    }
    int status = 1;
    waitpid(probe, &status, 0);
    return status == 0 && Shell("nft --version > /dev/null");
  }

  // The hub process is the router; `hub` runs there once all ranks are wired up. 0: all went well.
  int Run(const Body& body, const HubBody& hub) {
    const pid_t pid = fork();
    if (pid == 0) _exit(Hub(body, hub));
    int status = 1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  Board* board_ = nullptr;
  std::string rule_;  // of nftables for all that the router forwards, from the beginning

  static bool Forward(const std::string& rule) {
    return Shell(
        absl::StrCat("nft 'table ip cut { chain c { type filter hook forward priority 0; ", rule, ";}; }'"));
  }
  absl::Status StepUntilItFails(Communicator& c) {
    std::vector<float> data(300'000, 1.0f);
    for (;;) {
      RETURN_IF_BAD(c.AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kMax));
      ++board_->steps[c.rank()];
    }
  }
  // Ranks 1 and 2 say of each other that nothing gets there, rank 0 of nobody; then the verdict ends all.
  static bool AwaitReports(FakeWorld& world, std::string* reports) {
    const bool both = Until([&] { return world.LinkReports().size() >= 2; });
    *reports = absl::StrJoin(world.LinkReports(), "\n");
    world.Revoke("the link between machines node1 and node2 is broken");
    return both;
  }

 private:
  int Hub(const Body& body, const HubBody& hub) {
    if (unshare(CLONE_NEWNET) != 0 || !Shell("echo 1 > /proc/sys/net/ipv4/ip_forward")) return 2;
    if (!rule_.empty() && !Forward(rule_)) return 7;
    std::vector<std::string> nodes, addresses;
    for (int rank = 0; rank < kRanks; ++rank) {
      nodes.push_back(absl::StrCat("node", rank));
      addresses.push_back(AddressOf(rank));
    }
    FakeWorld world(nodes, addresses);
    for (int rank = 0; rank < kRanks; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) _exit(RankProcess(world, rank, body));
      if (!Until([&] { return board_->unshared[rank] != 0; })) return 3;
      const std::string port = absl::StrCat("port", rank);
      if (!Shell(absl::StrCat("ip link add ", port, " type veth peer name eth0 netns ", pid,
                              " && ip addr add 10.77.", rank, ".1/24 dev ", port, " && ip link set ", port,
                              " up"))) {
        return 4;
      }
      board_->wired[rank] = 1;
    }
    const bool good = hub(world);
    if (!good) world.Revoke("the test has failed");
    int failed = 0;
    for (int rank = 0, status = 0; rank < kRanks; ++rank) {
      wait(&status);
      failed += status != 0;
    }
    return !good ? 5 : failed > 0 ? 6 : 0;
  }

  int RankProcess(FakeWorld& world, int rank, const Body& body) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (unshare(CLONE_NEWNET | CLONE_NEWNS) != 0) return 2;
    board_->unshared[rank] = 1;
    if (!Until([&] { return board_->wired[rank] != 0; })) return 3;
    // UCX looks for interfaces in /sys, which shows those of the namespace it was mounted in.
    if (!Shell("mount --make-rprivate / && mount -t sysfs sysfs /sys") ||
        !Shell(absl::StrCat("ip addr add ", AddressOf(rank), "/24 dev eth0 && ip link set eth0 up && ",
                            "ip link set lo up && ip route add default via 10.77.", rank, ".1")) ||
        !Until([] { return Shell("ip link show eth0 | grep -q LOWER_UP"); })) {
      return 4;
    }
    std::unique_ptr<Bootstrap> bootstrap = world.Rank(rank);
    ExecOptions options;
    options.user.timeout = kPatience;
    options.algorithm = "ring";  // in which every two of the three ranks speak
    auto communicator = MakeCommunicator(bootstrap.get(), options);
    const absl::Status status = communicator.ok() ? body(**communicator) : communicator.status();
    board_->returned_at_ns[rank] = RealClock().Now().ns;
    board_->code[rank] = static_cast<int>(status.code());
    if (!status.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
    return 0;
  }
};

TEST_F(NamespaceTest, EverythingOverRealInterfaces) {
  if (!Possible()) GTEST_SKIP() << "no network namespaces here";
  EXPECT_EQ(Run(Everything, [](FakeWorld&) { return true; }), 0);
  for (const auto& code : board_->code) EXPECT_EQ(code, 0);
}

// The machine of rank 1 drops off the network without a word: no connection breaks, nothing arrives. The
// verdict comes from outside (N1); every call returns within two seconds of it, also on the lost machine.
TEST_F(NamespaceTest, L1N1LinkThatGoesDown) {
  if (!Possible()) GTEST_SKIP() << "no network namespaces here";
  const int result = Run([&](Communicator& c) { return StepUntilItFails(c); },
                         [&](FakeWorld& world) {
                           if (!Until([&] { return board_->steps[0] > 5 || board_->returned_at_ns[0] != 0; }))
                             return false;
                           if (!Shell("ip link set port1 down")) return false;
                           // Nobody gets further once what was under way has drained.
                           int last = -1;
                           Instant since = RealClock().Now();
                           if (!Until([&] {
                                 if (std::exchange(last, board_->steps[0]) != board_->steps[0])
                                   since = RealClock().Now();
                                 return RealClock().Now() - since > absl::Milliseconds(300);
                               })) {
                             return false;
                           }
                           world.Revoke("machine node1 is lost");
                           const Instant revoked = RealClock().Now();
                           return Until([&] {
                                    for (const auto& at : board_->returned_at_ns) {
                                      if (at == 0) return false;
                                    }
                                    return true;
                                  }) &&
                                  RealClock().Now() - revoked < absl::Seconds(2);
                         });
  EXPECT_EQ(result, 0);
  for (const auto& code : board_->code) EXPECT_EQ(code, static_cast<int>(absl::StatusCode::kUnavailable));
}

constexpr char kPair[] = "ip saddr { 10.77.1.2, 10.77.2.2 } ip daddr { 10.77.1.2, 10.77.2.2 } ";

// Two machines lose each other without a word, both still talk to the third: their ranks find out which way
// is broken while they wait, and nobody blames the third.
TEST_F(NamespaceTest, W5BrokenPairIsNamed) {
  if (!Possible()) GTEST_SKIP() << "no network namespaces here";
  // Cut between two steps. In the middle of one, rank 1 may be done when what it sent last is lost: it then
  // waits for rank 0 alone, and only rank 2 has something to say.
  const int result = Run(
      [&](Communicator& c) -> absl::Status {
        RETURN_IF_BAD(c.Barrier());
        ++board_->steps[c.rank()];
        if (!Until([&] { return board_->go_on != 0; })) return absl::DeadlineExceededError("no cut");
        return StepUntilItFails(c);
      },
      [&](FakeWorld& world) {
        std::string reports;
        const bool good = Until([&] {
                            return std::all_of(std::begin(board_->steps), std::end(board_->steps),
                                               [](const auto& steps) { return steps > 0; });
                          }) &&
                          Forward(absl::StrCat(kPair, "drop")) && ++board_->go_on > 0 &&
                          AwaitReports(world, &reports);
        const bool named = reports.find("1 cannot reach 2: no answer to a connection in 8s") == 0 &&
                           reports.find("\n2 cannot reach 1: no answer") != std::string::npos;
        if (!named) std::fprintf(stderr, "reports: %s\n", reports.c_str());
        return good && named;
      });
  EXPECT_EQ(result, 0);
  for (const auto& code : board_->code) EXPECT_EQ(code, static_cast<int>(absl::StatusCode::kUnavailable));
}

// Small packets pass between two machines, large ones are lost: no barrier would notice, the making of the
// communicator does.
TEST_F(NamespaceTest, W14WayThatLosesLargePacketsIsNamed) {
  if (!Possible()) GTEST_SKIP() << "no network namespaces here";
  rule_ = absl::StrCat(kPair, "meta length > 1300 drop");
  const int result = Run(
      [&](Communicator& c) -> absl::Status {
        ++board_->steps[c.rank()];
        return c.Barrier();
      },
      [&](FakeWorld& world) {
        std::string reports;
        const bool good = AwaitReports(world, &reports);
        const bool named =
            reports.find("1 cannot reach 2: connections are made, but of 65536 bytes 0") == 0 &&
            reports.find("is the MTU the same everywhere?") != std::string::npos &&
            reports.find("\n2 cannot reach 1: connections are made") != std::string::npos;
        if (!named) std::fprintf(stderr, "reports: %s\n", reports.c_str());
        return good && named;
      });
  EXPECT_EQ(result, 0);
  for (const auto& steps : board_->steps) EXPECT_EQ(steps, 0);
}

}  // namespace
}  // namespace gtrain::comm
