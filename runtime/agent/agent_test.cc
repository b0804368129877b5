// The real agent in a process of its own, with real keepers and ranks; the test is the head, over a local
// socket.
#include "runtime/agent/agent.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/logging.h"
#include "base/run_folder.h"
#include "base/test_as_nobody.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "job/spec/print.h"
#include "runtime/agent/node.h"
#include "runtime/core/agent/agent_core.h"
#include "runtime/host/keeper_client.h"
#include "runtime/keeper/posix.h"
#include "runtime/keeper/stacks.h"
#include "runtime/wire/codec.h"

namespace gtrain::agent {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);
const NodeId kNode("00000000000000aa");
const JobId kJob("train-1");

std::string BuildDir() {
  const char* build = std::getenv("GTRAIN_BUILD_DIR");
  return build != nullptr ? build : "build";
}

bool Alive(int64_t pid) {
  keeper::ProcessEntry entry;
  return keeper::ReadProcess(static_cast<pid_t>(pid), &entry) && !entry.zombie;
}

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), std::min(path.size() + 1, sizeof(address.sun_path)));
  return address;
}

// One packet is one message; reconnects whenever it is looked at.
class SocketTransport final : public port::ClientTransport {
 public:
  SocketTransport(std::string path, int bytes_max) : path_(std::move(path)), bytes_max_(bytes_max) {}
  absl::Status Send(absl::string_view payload) override {
    const ssize_t n = send(fd_.get(), payload.data(), payload.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) return absl::ResourceExhaustedError("no room");
    return n < 0 ? absl::UnavailableError("not connected") : absl::OkStatus();
  }
  std::optional<std::string> Receive() override {
    std::string buffer(1 << 20, '\0');
    const ssize_t n = fd_.valid() ? recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT) : -1;
    if (n == 0) fd_.reset();
    if (n <= 0) return std::nullopt;
    buffer.resize(static_cast<size_t>(n));
    return buffer;
  }
  bool Connected() const override {
    if (fd_.valid()) return true;
    UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (bytes_max_ > 0) setsockopt(fd.get(), SOL_SOCKET, SO_SNDBUF, &bytes_max_, sizeof(bytes_max_));
    const sockaddr_un address = AddressOf(path_);
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0)
      fd_ = std::move(fd);
    return fd_.valid();
  }
  int PollFd() const override { return fd_.get(); }

 private:
  const std::string path_;
  const int bytes_max_;  // that may wait; 0: what the kernel allows
  mutable UniqueFd fd_;
};

class AgentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    listen_.reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const sockaddr_un address = AddressOf(base_ + "/head.sock");
    ASSERT_EQ(bind(listen_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(listen(listen_.get(), 16), 0);
  }

  void TearDown() override {
    KillAgent();
    for (const std::string& dir : KeeperDirs()) {
      const auto pid = host::KeeperPid(dir);
      if (pid.ok()) kill(static_cast<pid_t>(*pid), SIGKILL);
      EXPECT_TRUE(Until([&] { return host::KillOrphans(dir) == 0; }));
    }
  }

  AgentOptions Options() const {
    AgentOptions options;
    options.state_dir = base_ + "/state";
    options.cluster = ClusterId("00000000000000000000000000000001");
    options.node = kNode;
    options.address = "127.0.0.1";
    options.hostname = "host-a";
    options.fake_gpus = 2;
    options.keeper_binary = BuildDir() + "/bin/gtrain-keeper";
    options.leave_without_head = leave_without_head_;
    options.connect = [path = base_ + "/head.sock",
                       max = waiting_bytes_max_]() -> absl::StatusOr<std::unique_ptr<port::ClientTransport>> {
      return std::make_unique<SocketTransport>(path, max);
    };
    return options;
  }

  void StartAgent() {
    connection_.reset();
    seen_.clear();
    const AgentOptions options = Options();
    agent_ = fork();
    if (agent_ == 0) {
      listen_.reset();  // or it would be its own head
      SetLogSink([](LogLevel, absl::string_view) {});
      const absl::Status status = RunAgent(options);
      _exit(status.ok() ? 0 : 3);
    }
    ASSERT_NE(Wait<core::AgentHello>([](const core::AgentHello&) { return true; }), nullptr);
    Send(core::AgentWelcome{options.cluster, {1}, kNode, absl::Milliseconds(200), absl::Seconds(600)});
  }
  void KillAgent(int signal = SIGKILL) {
    if (agent_ <= 0) return;
    kill(agent_, signal);
    EXPECT_TRUE(AgentEnds());
  }
  bool AgentEnds() {
    const bool ended = Until([&] { return waitpid(agent_, &agent_status_, WNOHANG) == agent_; });
    if (ended) agent_ = -1;
    return ended;
  }

  void Send(const core::Message& message) {
    const std::string bytes = wire::Encode(message);
    ASSERT_EQ(send(connection_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void Pump() {
    if (UniqueFd fd(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC)); fd.valid())
      connection_ = std::move(fd);
    std::string buffer(4 << 20, '\0');
    while (connection_.valid()) {
      const ssize_t n = recv(connection_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (n <= 0) break;
      auto message =
          wire::Decode(absl::string_view(buffer.data(), static_cast<size_t>(n)), wire::Sender::kAgent);
      ASSERT_TRUE(message.ok()) << message.status();
      seen_.push_back(std::make_unique<core::Message>(*std::move(message)));
    }
  }
  template <typename T>
  const T* Wait(const std::function<bool(const T&)>& fits, absl::Duration patience = kPatience) {
    const T* found = nullptr;
    Until(
        [&] {
          Pump();
          for (const auto& message : seen_) {
            const T* value = std::get_if<T>(message.get());
            if (value != nullptr && fits(*value)) found = value;
          }
          return found != nullptr;
        },
        patience);
    return found;
  }
  const core::RankExit* WaitExit(int rank) {
    const auto* exited =
        Wait<core::RankExited>([=](const core::RankExited& message) { return message.exit.rank == rank; });
    return exited == nullptr ? nullptr : &exited->exit;
  }
  const core::GenerationGone* WaitGone() {
    return Wait<core::GenerationGone>([](const core::GenerationGone&) { return true; });
  }
  int64_t WaitRunning(int rank) {
    int64_t pid = 0;
    Wait<core::RanksStarted>([&](const core::RanksStarted& started) {
      for (const core::RankStatus& status : started.ranks) {
        if (status.rank == rank) pid = status.pid;
      }
      return pid != 0;
    });
    return pid;
  }

  // Every rank runs `script`, with its own number in $RANK.
  void Launch(const std::string& script, int ranks, uint64_t generation = 1) {
    spec::JobSpec spec;
    spec.name = "train";
    spec.script = script;
    spec.workdir = base_;
    core::GenerationGrant grant;
    grant.job = kJob;
    grant.generation = {generation};
    grant.spec_text = spec::PrintJob(spec);
    grant.run_dir = base_ + "/run";
    grant.master_address = "127.0.0.1";
    grant.master_port = 0;
    grant.world_size = ranks;
    grant.nodes = {{kNode, "127.0.0.1", "host-a"}};
    for (int rank = 0; rank < ranks; ++rank) grant.ranks.push_back({rank, rank, kNode, {}, {rank % 2}});
    Send(core::StartGeneration{{1}, grant});
  }
  std::vector<std::string> KeeperDirs() const {
    std::vector<std::string> dirs;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(base_ + "/state/keepers", error))
      dirs.push_back(entry.path());
    return dirs;
  }
  std::string LogOf(int rank) const {
    return keeper::ReadSmallFile(absl::StrCat(base_, "/run/logs/generation-1/rank-", rank, ".out"), 1 << 20);
  }

  const std::string base_ = TestFolder();
  std::optional<absl::Duration> leave_without_head_;
  int waiting_bytes_max_ = 0;
  UniqueFd listen_, connection_;
  std::vector<std::unique_ptr<core::Message>> seen_;
  pid_t agent_ = -1;
  int agent_status_ = 0;
};

// A farewell of the head may be lost: the agent of a local cluster does not wait for ever.
TEST_F(AgentTest, WithoutHeadAndJobItLeavesWhenAsked) {
  leave_without_head_ = absl::Milliseconds(300);
  StartAgent();
  listen_.reset();
  connection_.reset();
  ASSERT_TRUE(AgentEnds());
  EXPECT_EQ(agent_status_, 0);
}

// The head does not read, until a heartbeat finds no room; and it says that it has lost a message itself.
TEST_F(AgentTest, AMessageThatFoundNoRoomIsMadeUpForOnAnotherConnection_W9) {
  waiting_bytes_max_ = 16 << 10;
  StartAgent();
  const auto comes_anew = [&] {
    return Until([&] {
      pollfd waits{listen_.get(), POLLIN, 0};
      return poll(&waits, 1, 0) == 1;
    });
  };
  ASSERT_TRUE(comes_anew());
  seen_.clear();
  ASSERT_NE(Wait<core::AgentHello>([](const core::AgentHello&) { return true; }), nullptr);
  Send(core::AgentWelcome{Options().cluster, {1}, kNode, absl::Seconds(1), absl::Seconds(600)});
  Send(core::HeartbeatAck{{1}, 1, true});
  ASSERT_TRUE(comes_anew());
  seen_.clear();
  ASSERT_NE(Wait<core::AgentHello>([](const core::AgentHello&) { return true; }), nullptr);
}

TEST_F(AgentTest, RunsAGenerationAndLeavesNothing) {
  StartAgent();
  const auto* hello = Wait<core::AgentHello>([](const core::AgentHello&) { return true; });
  EXPECT_EQ(hello->inventory.gpus.size(), 2u);
  EXPECT_FALSE(hello->free_ports.empty());
  Launch(
      "echo rank $RANK of $WORLD_SIZE sees $CUDA_VISIBLE_DEVICES; "
      "grep -q '\"rank\":1' $GTRAIN_MEMBERS && echo members; "
      "echo '{\"step\": 4}' >> $GTRAIN_REPORT; exit $((RANK * 5))",
      2);
  const auto* first = WaitExit(0);
  const auto* second = WaitExit(1);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(first->exit_code, 0);
  EXPECT_EQ(second->exit_code, 5);
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_EQ(LogOf(1), "rank 1 of 2 sees GPU-fake-0,GPU-fake-1\nmembers\n");
  Send(core::AgentQuery{{1}, 77, core::AgentQuery::Kind::kReadLog, kJob, {1}, 0, false, 5, {}});
  const auto* answer = Wait<core::AgentAnswer>([](const core::AgentAnswer& a) { return a.query == 77; });
  ASSERT_NE(answer, nullptr);
  EXPECT_EQ(answer->text, "0 of 2 sees GPU-fake-0,GPU-fake-1\nmembers\n");
  EXPECT_TRUE(answer->end);
  for (int rank : {0, 1}) Send(core::AckExit{{1}, kJob, {1}, rank});
  Send(core::ForgetJob{{1}, kJob});
  EXPECT_TRUE(Until([&] {
    Pump();
    return KeeperDirs().empty();
  })) << "the keeper leaves with its job";
  Send(core::AgentShutdown{{1}, "the test is over"});
  ASSERT_TRUE(AgentEnds());
  EXPECT_EQ(WEXITSTATUS(agent_status_), 0);
}

TEST_F(AgentTest, KilledAgentIsReplacedWhileRanksRun) {  // P4, issue 2 point 4
  StartAgent();
  Launch("echo one; while [ ! -e go ]; do sleep 0.05; done; echo two; exit $((RANK + 6))", 2);
  const int64_t pid = WaitRunning(0);
  ASSERT_GT(pid, 0);
  ASSERT_GT(WaitRunning(1), 0);
  const auto* hello = Wait<core::AgentHello>([](const core::AgentHello&) { return true; });
  const Incarnation before = hello->incarnation;
  KillAgent(SIGKILL);
  EXPECT_TRUE(Alive(pid));
  StartAgent();
  hello = Wait<core::AgentHello>([](const core::AgentHello&) { return true; });
  EXPECT_EQ(hello->incarnation, before);
  ASSERT_EQ(hello->held.size(), 1u);
  EXPECT_EQ(hello->held[0].live.size(), 2u);
  EXPECT_EQ(hello->held[0].live[0].pid, pid);
  std::ofstream(base_ + "/go") << "go";
  const auto* exit = WaitExit(1);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->exit_code, 7);
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_EQ(LogOf(0), "one\ntwo\n");
  EXPECT_EQ(LogOf(1), "one\ntwo\n");
}

TEST_F(AgentTest, ExitsDuringTheAgentsAbsenceAreInTheNextHello) {  // P4
  StartAgent();
  Launch("echo up; while [ ! -e go ]; do sleep 0.05; done; echo bye >&2; exit 9", 1);
  ASSERT_GT(WaitRunning(0), 0);
  KillAgent(SIGTERM);
  std::ofstream(base_ + "/go") << "go";
  ASSERT_EQ(KeeperDirs().size(), 1u);
  ASSERT_TRUE(Until([&] { return fs::exists(KeeperDirs()[0] + "/exits/1"); }));
  StartAgent();
  const auto* hello = Wait<core::AgentHello>([](const core::AgentHello&) { return true; });
  ASSERT_EQ(hello->held.size(), 1u);
  ASSERT_EQ(hello->held[0].exited.size(), 1u);
  EXPECT_EQ(hello->held[0].exited[0].exit_code, 9);
  EXPECT_EQ(hello->held[0].exited[0].tail, "bye\n");
}

TEST_F(AgentTest, KilledKeeperMeansLostRanksAndNoOrphans) {
  StartAgent();
  Launch("setsid sleep 600 & exec sleep 600", 1);
  const int64_t pid = WaitRunning(0);
  ASSERT_GT(pid, 0);
  ASSERT_EQ(KeeperDirs().size(), 1u);
  kill(static_cast<pid_t>(*host::KeeperPid(KeeperDirs()[0])), SIGKILL);
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, core::ExitCause::kLost);
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_FALSE(Alive(pid));
}

TEST_F(AgentTest, RevokeEndsRanksAndTheNextGenerationRuns) {
  StartAgent();
  Launch("trap '' TERM; echo up; while true; do sleep 0.1; done", 1);
  const int64_t pid = WaitRunning(0);
  ASSERT_GT(pid, 0);
  Send(core::Revoke{{1}, kJob, {1}, core::EndMode::kReform, absl::Milliseconds(200), "a rank was lost"});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, core::ExitCause::kStopped);
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_FALSE(Alive(pid));
  seen_.clear();
  Launch("exit 11", 1, 2);
  ASSERT_NE(Wait<core::RankExited>([](const core::RankExited& e) { return e.exit.exit_code == 11; }),
            nullptr);
}

// P4: a stop that the agent had heard is carried out, though the agent itself is told to end in the same
// moment.
TEST_F(AgentTest, AStopIsPassedOnByAnAgentThatEnds) {
  StartAgent();
  Launch("sleep 3600", 1);
  const int64_t pid = WaitRunning(0);
  ASSERT_GT(pid, 0);
  kill(agent_, SIGSTOP);
  Send(core::Revoke{{1}, kJob, {1}, core::EndMode::kStopNow, absl::ZeroDuration(), "stopped by ada"});
  kill(agent_, SIGTERM);
  KillAgent(SIGCONT);
  EXPECT_TRUE(Until([&] { return !Alive(pid); }));
  for (const std::string& dir : KeeperDirs()) {
    EXPECT_TRUE(Until([&] { return !host::KeeperPid(dir).ok(); })) << "nobody is left to tell it to go";
  }
}

TEST_F(AgentTest, OneAgentAStateDirectory) {
  StartAgent();
  SetLogSink([](LogLevel, absl::string_view) {});
  const pid_t second = fork();
  if (second == 0) _exit(absl::IsFailedPrecondition(RunAgent(Options())) ? 42 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(second, &status, 0), second);
  EXPECT_EQ(WEXITSTATUS(status), 42);
  SetLogSink(nullptr);
}

TEST(Node, PortsAddressesAndStacks) {
  Rng rng(1);
  const std::vector<int> ports = ProbeFreePorts(4, &rng);
  ASSERT_EQ(ports.size(), 4u);
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(LocalAddressTowards("127.0.0.1:80"), "127.0.0.1");
  EXPECT_EQ(LocalAddressTowards("[::1]:80"), "::1");
  EXPECT_FALSE(BootId().empty());
  EXPECT_THAT(keeper::KernelStacks(getpid()), HasSubstr("thread"));
  EXPECT_THAT(keeper::KernelStacks(1 << 30), HasSubstr("gone"));
}

// Issue 16, item 11: what was there before is neither continued nor shown as this job's.
TEST(Node, ARunDirectoryIsOfOneJob) {
  const std::string run_dir = TestFolder() + "/train-1-cluster";
  const ClusterId cluster("c1");
  core::GenerationGrant grant{.job = JobId("train-1"), .generation = {1}, .run_dir = run_dir};
  grant.request_id = "r1";
  for (const char* node : {"a", "b"}) grant.ranks.push_back({.node = NodeId(node)});
  const NodeId a("a"), b("b");
  const auto log = [&](int rank) { return core::RankLogPath(run_dir, grant.generation, rank, false); };
  ASSERT_TRUE(MakeRunDir(grant, cluster, a, true).ok());
  ASSERT_TRUE(fs::is_directory(run_dir + "/logs/generation-1"));
  ASSERT_TRUE(fs::is_directory(run_dir + "/ranks/generation-1"));
  for (int rank : {0, 1}) std::ofstream(log(rank)) << "a line\n";
  EXPECT_TRUE(MakeRunDir(grant, cluster, a, true).ok()) << "the grant came again";
  EXPECT_TRUE(MakeRunDir(grant, cluster, b, true).ok()) << "another machine with the same directory";
  EXPECT_TRUE(CheckRunDirOfLog(log(0), cluster, grant.job).ok());

  // The same job number comes from a cluster whose name begins alike, and from a cluster that lost its
  // records.
  EXPECT_TRUE(absl::IsFailedPrecondition(MakeRunDir(grant, ClusterId("c2"), a, false)));
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckRunDirOfLog(log(0), ClusterId("c2"), grant.job)));
  core::GenerationGrant again = grant;
  again.request_id = "r2";
  EXPECT_TRUE(absl::IsFailedPrecondition(MakeRunDir(again, cluster, a, false)));

  // Nobody says whose it is: a person made it, or an agent of an earlier version, perhaps for this very job.
  ASSERT_TRUE(fs::remove(absl::StrCat(run_dir, "/", kRunFolderOwnerFile)));
  EXPECT_TRUE(CheckRunDirOfLog(log(0), cluster, grant.job).ok());
  EXPECT_THAT(std::string(MakeRunDir(grant, cluster, a, true).message()),
              HasSubstr(log(0) + " was there before this job"));
  ASSERT_TRUE(fs::remove(log(0)));
  EXPECT_TRUE(MakeRunDir(grant, cluster, a, true).ok()) << "only logs of ranks of another machine are there";
  ASSERT_TRUE(fs::remove(absl::StrCat(run_dir, "/", kRunFolderOwnerFile)));
  grant.generation = {2};
  std::filesystem::create_directories(run_dir + "/logs/generation-2");
  for (uint64_t generation : {2, 1}) {
    grant.generation = {generation};
    std::ofstream(log(0)) << "a line\n";
  }
  grant.generation = {2};
  EXPECT_FALSE(MakeRunDir(grant, cluster, a, true).ok()) << "the first was refused";
  EXPECT_TRUE(MakeRunDir(grant, cluster, a, false).ok()) << "the job went on after an update";
  EXPECT_TRUE(fs::exists(absl::StrCat(run_dir, "/", kRunFolderOwnerFile))) << "and is known from now on";
}

TEST(Node, ASecretIsItsFileButForOneLineEnd) {
  const std::string path = TestFolder() + "/secret";
  const std::string longest(kSecretBytesMax, 's');
  for (const auto& [file, value] :
       std::vector<std::pair<std::string, std::string>>{{"key\n", "key"},
                                                        {"key", "key"},
                                                        {"key \t\n\n", "key \t\n"},
                                                        {"\n", ""},
                                                        {"", ""},
                                                        {longest + "\n", longest},
                                                        {longest, longest}}) {
    std::ofstream(path) << file;
    const auto read = ReadSecret(path);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, value);
  }
  for (const char* end : {"s", "s\n"}) {
    std::ofstream(path) << longest << end;
    EXPECT_TRUE(absl::IsResourceExhausted(ReadSecret(path).status()));
  }
}

TEST(Node, LogPiecesCutBetweenCharactersAndNameHoles) {
  const std::string path = TestFolder() + "/log";
  std::ofstream(path) << std::string((256 << 10) - 1, 'a') << "\xc3\xa9"
                      << "tail";
  auto piece = ReadLogPiece(path, 0);
  ASSERT_TRUE(piece.ok());
  EXPECT_EQ(piece->next_offset, (256u << 10) - 1);
  EXPECT_FALSE(piece->at_end);
  piece = ReadLogPiece(path, piece->next_offset);
  EXPECT_EQ(piece->text, "\xc3\xa9tail");
  EXPECT_TRUE(piece->at_end);
  piece = ReadLogPiece(path, (256u << 10) - 4, /*bytes_max=*/1);
  EXPECT_EQ(piece->text, "aaa");
  piece = ReadLogPiece(path, (256u << 10) - 1, /*bytes_max=*/5);
  EXPECT_EQ(piece->text, "\xc3\xa9tai");
  EXPECT_FALSE(piece->at_end);
  EXPECT_TRUE(ReadLogPiece(path, 1u << 30)->at_end);
  EXPECT_TRUE(absl::IsNotFound(ReadLogPiece(path + "x", 0).status()));
}

TEST(RootMayRunRanks, OnlyLocallyInAContainerOrWhenTold) {  // X7
  for (int bits = 0; bits < 16; ++bits) {
    const bool root = bits & 1, local = bits & 2, container = bits & 4, allowed = bits & 8;
    EXPECT_EQ(RootMayRunRanks(root, local, container, allowed).ok(), !root || local || container || allowed)
        << bits;
  }
  const absl::Status refused = RootMayRunRanks(true, false, false, false);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("or say --allow-root"));
}

// Run as root, the process tests again as `nobody`, without control groups.
TEST(OrdinaryUser, AllTestsPassAsNobody) {
  if (geteuid() != 0) GTEST_SKIP() << "already an ordinary user";
  const RunAsNobody run = RunTestsAsNobody({BuildDir() + "/bin/gtrain-keeper"}, "AgentTest.*");
  EXPECT_EQ(run.status, 0) << run.output;
}

}  // namespace
}  // namespace gtrain::agent
