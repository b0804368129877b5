// For tests of the keeper: a keeper of the test's own with an agent that the test plays, and ranks that it
// plays.
#pragma once
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/host/keeper_client.h"
#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/posix.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::host {

namespace fs = std::filesystem;
using keeper::Cause;
using ::testing::HasSubstr;

inline constexpr absl::Duration kPatience = absl::Seconds(60);

inline std::string KeeperBinary() {
  const char* build = std::getenv("GTRAIN_BUILD_DIR");
  return std::string(build != nullptr ? build : "build") + "/bin/gtrain-keeper";
}

inline bool Alive(int64_t pid) {
  keeper::ProcessEntry entry;
  return keeper::ReadProcess(static_cast<pid_t>(pid), &entry) && !entry.zombie;
}

class FakeRank {
 public:
  explicit FakeRank(const std::string& dir) : fd_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const std::string elsewhere = keeper::ReadSmallFile(dir + "/rank-dir");
    const std::string path = (elsewhere.empty() ? dir : elsewhere) + "/rank.sock";
    std::memcpy(address.sun_path, path.c_str(), std::min(path.size() + 1, sizeof(address.sun_path)));
    EXPECT_EQ(connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    timeval limit = {60, 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  // A child that another thread has just forked holds a copy until its exec: closing alone might not be seen.
  ~FakeRank() { shutdown(fd_.get(), SHUT_RDWR); }
  FakeRank(const FakeRank&) = delete;
  FakeRank& operator=(const FakeRank&) = delete;
  void Send(uint16_t kind, const std::string& body) {
    RankFrame frame{static_cast<uint32_t>(body.size()), kind, 0};
    std::string bytes(reinterpret_cast<char*>(&frame), sizeof(frame));
    bytes += body;
    SendBytes(bytes);
  }
  void SendBytes(const std::string& bytes) {
    ASSERT_EQ(send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  void Hello(uint64_t generation, uint32_t rank, const std::string& token) {
    RankHello hello{GTRAIN_RANK_PROTOCOL, rank, generation, {}};
    std::memcpy(hello.token, token.data(), sizeof(hello.token));
    Send(kRankHello, std::string(reinterpret_cast<char*>(&hello), sizeof(hello)));
  }
  void Arena(uint64_t id, uint64_t bytes) {
    RankArenaRequest request{id, bytes};
    Send(kRankArena, std::string(reinterpret_cast<char*>(&request), sizeof(request)));
  }
  void UsedArena(uint64_t id, uint64_t bytes, uint64_t zeros) {
    RankUsedArenaRequest request{id, bytes, zeros};
    Send(kRankUsedArena, std::string(reinterpret_cast<char*>(&request), sizeof(request)));
  }
  void FreeArenaOf(uint64_t id, uint64_t generation) {
    RankArenaOf arena{id, generation};
    Send(kRankFreeArena, std::string(reinterpret_cast<char*>(&arena), sizeof(arena)));
  }
  void FreeArena(uint64_t id) { Send(kRankFreeArena, std::string(reinterpret_cast<char*>(&id), sizeof(id))); }
  // (0, "") at end of file.
  std::pair<int, std::string> Next() {
    RankFrame frame;
    iovec part = {&frame, sizeof(frame)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    if (recvmsg(fd_.get(), &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != sizeof(frame)) return {0, ""};
    if (cmsghdr* header = CMSG_FIRSTHDR(&message)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
      passed_.reset(fd);
    }
    std::string body(frame.bytes, '\0');
    const ssize_t want = static_cast<ssize_t>(body.size());
    EXPECT_TRUE(want == 0 || recv(fd_.get(), body.data(), body.size(), MSG_WAITALL) == want);
    return {frame.kind, body};
  }
  int passed() const { return passed_.get(); }
  UniqueFd TakePassed() { return std::move(passed_); }
  void Writer(uint64_t bytes) {
    RankArenaRequest request{1, bytes};
    Send(kRankWriter, std::string(reinterpret_cast<char*>(&request), sizeof(request)));
  }

 private:
  UniqueFd fd_, passed_;
};

class KeeperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = base_ + "/k";
    ASSERT_EQ(mkdir(dir_.c_str(), 0700), 0);
  }

  void TearDown() override {
    if (client_ != nullptr) {
      client_->Send(keeper::Quit{"the test is over"});
      (void)client_->Flush();
    }
    const bool gone = Until([&] { return !KeeperPid(dir_).ok(); });
    EXPECT_TRUE(gone) << "the keeper did not leave";
    if (!gone) kill(static_cast<pid_t>(*KeeperPid(dir_)), SIGKILL);
    EXPECT_EQ(KillOrphans(dir_), 0u) << "the test left processes behind";
  }

  void Start(const std::vector<std::string>& args = {}) {
    ASSERT_TRUE(StartKeeper(KeeperBinary(), dir_, "job-1", args).ok());
    Attach();
  }

  void Attach(uint64_t lease_ms = 0, uint32_t protocol = keeper::kAgentProtocol) {
    ASSERT_TRUE(Until([&] {
      auto connected = KeeperClient::Connect(dir_);
      if (connected.ok()) client_ = std::move(*connected);
      return connected.ok();
    }));
    client_->Send(keeper::Attach{protocol, lease_ms});
    const keeper::State* state = Wait<keeper::State>([](const keeper::State&) { return true; });
    ASSERT_NE(state, nullptr);
    state_ = *state;
  }

  // Drops the connection as a killed agent would.
  void LoseAgent() {
    client_.reset();
    seen_.clear();
  }

  void Pump() {
    if (client_ == nullptr) return;
    pollfd fd = {client_->fd(), POLLIN, 0};
    poll(&fd, 1, 20);
    (void)client_->Flush();
    auto reports = client_->Receive();
    if (!reports.ok()) {
      closed_ = true;
      return;
    }
    for (keeper::Report& report : *reports)
      seen_.push_back(std::make_unique<keeper::Report>(std::move(report)));
  }

  // The first report of kind T that fits, now or later; nullptr after the deadline.
  template <typename T>
  const T* Wait(const std::function<bool(const T&)>& fits, absl::Duration patience = kPatience) {
    const T* found = nullptr;
    Until(
        [&] {
          Pump();
          for (const auto& report : seen_) {
            const T* value = std::get_if<T>(report.get());
            if (value != nullptr && fits(*value)) found = value;
          }
          return found != nullptr;
        },
        patience);
    return found;
  }
  const keeper::Exited* WaitExit(int rank, uint64_t generation = 1) {
    return Wait<keeper::Exited>(
        [=](const keeper::Exited& exit) { return exit.rank == rank && exit.generation == generation; });
  }
  const keeper::Started* WaitStarted(int rank, uint64_t generation = 1) {
    return Wait<keeper::Started>(
        [=](const keeper::Started& start) { return start.rank == rank && start.generation == generation; });
  }
  const keeper::Gone* WaitGone(uint64_t generation = 1) {
    return Wait<keeper::Gone>([=](const keeper::Gone& gone) { return gone.generation == generation; });
  }

  std::string Path(const std::string& name) const { return base_ + "/" + name; }
  std::string OutPath(int rank) const { return Path(absl::StrCat("rank-", rank, ".out")); }
  std::string ErrPath(int rank) const { return Path(absl::StrCat("rank-", rank, ".err")); }
  static std::string Slurp(const std::string& path) { return keeper::ReadSmallFile(path, 256 << 20); }

  keeper::StartRank Rank(int rank, std::vector<std::string> argv, uint64_t generation = 1) {
    keeper::StartRank start;
    start.generation = generation;
    start.rank = rank;
    start.token = std::string(31, '0') + static_cast<char>('a' + rank);
    start.argv = std::move(argv);
    start.env = {{"PATH", "/usr/bin:/bin"}, {"GTRAIN_GENERATION", absl::StrCat(generation)}};
    start.cwd = base_;
    start.out_path = OutPath(rank);
    start.err_path = ErrPath(rank);
    start.report_path = Path(absl::StrCat("report-", rank));
    start.notice_path = Path(absl::StrCat("notice-", rank));
    return start;
  }
  // Waits until a script has made the file "ready".
  void AwaitReady() {
    ASSERT_TRUE(Until([&] {
      Pump();
      return fs::exists(Path("ready"));
    }));
  }
  // Stops a shell that dies of SIGTERM while its program saves, for longer than two seconds.
  void StopAndExpectASave() {
    End(keeper::End::kStop, 60000);
    const auto* exit = WaitExit(0);
    ASSERT_NE(exit, nullptr);
    EXPECT_EQ(exit->signal, SIGTERM);
    ASSERT_NE(WaitGone(), nullptr);
    EXPECT_TRUE(fs::exists(Path("saved")));
  }
  void Launch(const std::vector<std::string>& scripts, uint64_t generation = 1, uint64_t shm = 1 << 20) {
    client_->Send(keeper::BeginGeneration{generation, static_cast<uint32_t>(scripts.size()), shm, "note"});
    for (size_t i = 0; i < scripts.size(); ++i) {
      client_->Send(Rank(static_cast<int>(i), {"bash", "-c", scripts[i]}, generation));
    }
  }
  // The rank of that generation says hello and is welcomed.
  void Welcome(FakeRank* rank, uint64_t generation = 1) {
    rank->Hello(generation, 0, Rank(0, {}).token);
    ASSERT_EQ(rank->Next().first, kKeeperWelcome);
  }
  void End(keeper::End mode, uint64_t grace_ms, uint64_t generation = 1) {
    client_->Send(keeper::EndGeneration{generation, mode, grace_ms, "the test says so"});
  }
  // Pid a script wrote into a file.
  int64_t PidIn(const std::string& name) {
    Until([&] {
      Pump();
      return absl::EndsWith(Slurp(Path(name)), "\n");
    });
    return std::atoll(Slurp(Path(name)).c_str());
  }

  const std::string base_ = TestFolder();
  std::string dir_;
  std::unique_ptr<KeeperClient> client_;
  std::vector<std::unique_ptr<keeper::Report>> seen_;
  keeper::State state_;
  bool closed_ = false;
};

}  // namespace gtrain::host
