// Sessions of forked ranks against a keeper and agent that live in this test: one thread that serves the rank
// socket and answers exchanges.
#include "runtime/port/session.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "base/unique_fd.h"
#include "checkpoint/port/writer_host.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/keeper/rank_protocol.h"
#include "runtime/worker/rank_environment.h"

namespace gtrain::worker {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
const std::string kToken(32, 'a');

// A keeper with an agent inside.
class FakeKeeper {
 public:
  explicit FakeKeeper(int world) : world_(world) {
    listen_.reset(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, socket_path().c_str(), sizeof(address.sun_path) - 1);
    GT_CHECK(bind(listen_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    GT_CHECK(listen(listen_.get(), 64) == 0);
    nlohmann::json members = {{"generation", 5}, {"members", nlohmann::json::array()}};
    for (int r = 0; r < world; ++r) {
      members["members"].push_back(
          {{"rank", r}, {"local_rank", r}, {"node", "n"}, {"address", "127.0.0.1"}, {"hostname", "h"}});
    }
    GT_CHECK(WriteFileDurable(members_path(), members.dump()).ok());
  }
  // Called after the forks, so that no child inherits the thread's locks.
  void Start() {
    thread_ = std::thread([this] { Loop(); });
  }
  ~FakeKeeper() { Stop(); }
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    connections_.clear();
    listen_.reset();
  }

  std::string socket_path() const { return directory_ + "/socket"; }
  std::string members_path() const { return directory_ + "/members.json"; }

  void ToAll(uint16_t kind, const std::string& body) {
    MutexLock lock(&mutex_);
    for (Connection& c : connections_) {
      if (c.rank >= 0) Send(c, kind, body);
    }
  }
  std::vector<nlohmann::json> Messages(int rank, const std::string& type) {
    MutexLock lock(&mutex_);
    std::vector<nlohmann::json> found;
    for (const auto& [from, json] : messages_) {
      if (from == rank && json["type"] == type) found.push_back(json);
    }
    return found;
  }
  // Arenas that ranks asked for, and those that they freed.
  std::pair<size_t, size_t> ArenasAskedAndFreed() {
    MutexLock lock(&mutex_);
    for (const auto& use : freed_) EXPECT_TRUE(asked_.contains(use));
    return {asked_.size(), freed_.size()};
  }
  int connections() {
    MutexLock lock(&mutex_);
    return accepted_;
  }
  std::vector<std::string> answers() {  // to questions
    MutexLock lock(&mutex_);
    return answers_;
  }
  int released() {  // times that anybody let go of its generation
    MutexLock lock(&mutex_);
    return released_;
  }
  void set_silent() { silent_ = true; }
  // Set before Start: what its welcome says about writers, and whether it has one.
  void set_writers(bool known, bool has) { knows_writers_ = known, has_writers_ = has; }
  void hold_writer() { hold_writer_ = true; }  // the first that is asked for comes with the second
  // The answer to which ranks an exchange waits for, " 1 2".
  void set_missing(const std::string& ranks) {
    MutexLock lock(&mutex_);
    missing_ = ranks;
  }
  // The ranks it says have ended, to each that takes part in an exchange.
  void set_left(const std::string& ranks) {
    MutexLock lock(&mutex_);
    left_ = ranks;
  }
  // Set before Start: it tells who comes that it waits, and gives it the last place so much later.
  void set_waits(absl::Duration time) { gives_place_after_ = time; }
  // Exchange 0 has `rank`'s word, as if the rank were on another machine.
  void set_spoken(int rank) {
    MutexLock lock(&mutex_);
    exchanges_[0][rank] = absl::Base64Escape("{}");
  }

 private:
  struct Connection {
    UniqueFd fd;
    int rank = -1;
    std::string in;
  };

  void Loop() {
    while (!stop_) {
      std::vector<pollfd> fds{{listen_.get(), POLLIN, 0}};
      for (Connection& c : connections_) fds.push_back({c.fd.get(), POLLIN, 0});
      poll(fds.data(), fds.size(), 10);
      MutexLock lock(&mutex_);
      for (size_t i = 1; i < fds.size(); ++i) {
        if (fds[i].revents != 0) Read(connections_[i - 1]);
      }
      std::erase_if(connections_, [](const Connection& c) { return !c.fd.valid(); });
      if (place_at_ && RealClock().Now() >= *place_at_) {
        place_at_.reset();
        NextGeneration(connections_[0], world_ - 1);
      }
      if (fds[0].revents != 0) {
        connections_.push_back({UniqueFd(accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC)), -1, ""});
        ++accepted_;
      }
    }
  }

  void Read(Connection& c) {
    char buffer[65536];
    const ssize_t n = read(c.fd.get(), buffer, sizeof(buffer));
    if (n <= 0) return c.fd.reset();
    c.in.append(buffer, static_cast<size_t>(n));
    RankFrame frame;
    while (c.in.size() >= sizeof(frame)) {
      std::memcpy(&frame, c.in.data(), sizeof(frame));
      if (c.in.size() < sizeof(frame) + frame.bytes) return;
      Frame(c, frame.kind, c.in.substr(sizeof(frame), frame.bytes));
      c.in.erase(0, sizeof(frame) + frame.bytes);
    }
  }

  void Frame(Connection& c, uint16_t kind, const std::string& body) {
    if (kind == kRankHello) {
      RankHello hello;
      std::memcpy(&hello, body.data(), sizeof(hello));
      if (hello.generation != 5 || std::string(hello.token, 32) != kToken) {
        return Send(c, kKeeperRefused, "unknown rank, generation or token");
      }
      c.rank = static_cast<int>(hello.rank);
      const uint32_t abilities = kKeeperHasWriters | kKeeperFreesArenas | kKeeperKeepsRanks |
                                 kKeeperAsksRanks | (gives_place_after_ ? kKeeperYouWait : 0);
      Send(c, kKeeperWelcome,
           knows_writers_ ? std::string(reinterpret_cast<const char*>(&abilities), sizeof(abilities)) : "");
      if (gives_place_after_) Send(c, kKeeperRevoked, "it waits");
      return;
    }
    if (kind == kRankWriter) return StartWriter(c, body);
    if (kind == kRankStays) return;
    if (kind == kRankAnswers) return Send(c, kKeeperAsks, std::string(sizeof(RankQuestion), 'q') + "what?");
    if (kind == kRankAnswer) return answers_.push_back(body);
    if (kind == kRankReleased) {
      ++released_;
      if (!gives_place_after_) return NextGeneration(c, c.rank);
      place_at_ = RealClock().Now() + *gives_place_after_;
      return;
    }
    if (kind == kRankFreeArena) {
      uint64_t id = 0;
      std::memcpy(&id, body.data(), sizeof(id));
      freed_.emplace(c.rank, id);
      return;
    }
    if (kind == kRankArena) {
      RankArenaRequest request;
      std::memcpy(&request, body.data(), sizeof(request));
      asked_.emplace(c.rank, request.id);
      UniqueFd& arena = arenas_[request.id];
      if (!arena.valid()) {
        arena.reset(memfd_create("test", MFD_CLOEXEC));
        GT_CHECK(ftruncate(arena.get(), static_cast<off_t>(request.bytes)) == 0);
      }
      return Send(c, kKeeperArena, body, arena.get());
    }
    const nlohmann::json json = nlohmann::json::parse(body);
    messages_.emplace_back(c.rank, json);
    if (json["type"] == "overdue" && !missing_.empty()) {
      return Send(c, kKeeperFromAgent, absl::StrCat("missing ", json["sequence"].get<uint64_t>(), missing_));
    }
    if (json["type"] != "exchange" || silent_ || c.rank >= world_) return;
    auto& blobs = exchanges_[json["sequence"].get<uint64_t>()];
    blobs[c.rank] = json["blob"];
    if (!left_.empty()) Send(c, kKeeperFromAgent, "left" + left_);
    if (static_cast<int>(blobs.size()) < world_) return;
    std::string table = absl::StrCat("table ", json["sequence"].get<uint64_t>());
    for (const auto& [rank, blob] : blobs) absl::StrAppend(&table, "\n", blob);
    for (Connection& to : connections_) Send(to, kKeeperFromAgent, table);
  }

  // The same rank of the next generation, in which nobody has said anything yet.
  void NextGeneration(Connection& c, int rank) {
    if (!gives_place_after_) exchanges_.clear();
    c.rank = rank;
    const std::map<std::string, std::string> environment = {
        {"RANK", absl::StrCat(rank)},
        {"LOCAL_RANK", absl::StrCat(rank)},
        {"WORLD_SIZE", absl::StrCat(world_)},
        {"GTRAIN_GENERATION", "6"},
        {"GTRAIN_TIMELINE", "3"},
        {"GTRAIN_JOB", "job-1"},
        {"GTRAIN_TOKEN", kToken},
        {"GTRAIN_MEMBERS", members_path()},
    };
    std::string body;
    for (const auto& [name, value] : environment) body += name + "=" + value + std::string(1, '\0');
    Send(c, kKeeperMember, body);
  }

  void StartWriter(Connection& c, const std::string& body) {
    if (!has_writers_) return Send(c, kKeeperNoWriter, "no gtrain-writer here");
    if (hold_writer_) {
      hold_writer_ = false;
      held_writer_ = body;
      return;
    }
    if (!held_writer_.empty()) GiveWriter(c, std::exchange(held_writer_, ""));
    GiveWriter(c, body);
  }

  void GiveWriter(Connection& c, const std::string& body) {
    RankArenaRequest request;
    std::memcpy(&request, body.data(), sizeof(request));
    const UniqueFd memfd(memfd_create("test", MFD_CLOEXEC));
    GT_CHECK(ftruncate(memfd.get(), static_cast<off_t>(request.bytes)) == 0);
    int ends[2];
    GT_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const UniqueFd writer(ends[0]), rank(ends[1]);
    GT_CHECK(write(writer.get(), "w", 1) == 1);
    Send(c, kKeeperWriter, body, memfd.get());
    Send(c, kKeeperChannel, body, rank.get());
  }

  void Send(Connection& c, uint16_t kind, const std::string& body, int pass = -1) {
    RankFrame frame{static_cast<uint32_t>(body.size()), kind, 0};
    std::string bytes(reinterpret_cast<const char*>(&frame), sizeof(frame));
    bytes += body;
    iovec part{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (pass >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      *header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
      std::memcpy(CMSG_DATA(header), &pass, sizeof(int));
    }
    (void)sendmsg(c.fd.get(), &message, MSG_NOSIGNAL);
  }

  const int world_;
  const std::string directory_ = TestFolder();
  std::string missing_, left_;
  std::vector<std::string> answers_;
  UniqueFd listen_;
  std::atomic<bool> stop_{false}, silent_{false};
  bool knows_writers_ = false, has_writers_ = false, hold_writer_ = false;
  std::string held_writer_;
  std::optional<absl::Duration> gives_place_after_;
  int released_ = 0;
  std::optional<Instant> place_at_;
  std::thread thread_;
  Mutex mutex_;
  std::vector<Connection> connections_;
  int accepted_ = 0;
  std::map<uint64_t, UniqueFd> arenas_;
  std::set<std::pair<int, uint64_t>> asked_, freed_;  // arenas, by rank
  std::map<uint64_t, std::map<int, std::string>> exchanges_;
  std::vector<std::pair<int, nlohmann::json>> messages_;
};

void SetEnvironment(const FakeKeeper& keeper, int rank, int world) {
  setenv("RANK", absl::StrCat(rank).c_str(), 1);
  setenv("LOCAL_RANK", absl::StrCat(rank).c_str(), 1);
  setenv("WORLD_SIZE", absl::StrCat(world).c_str(), 1);
  setenv("GTRAIN_GENERATION", "5", 1);
  setenv("GTRAIN_TIMELINE", "2", 1);
  setenv("GTRAIN_JOB", "job-1", 1);
  setenv("GTRAIN_KEEPER_SOCKET", keeper.socket_path().c_str(), 1);
  setenv("GTRAIN_TOKEN", kToken.c_str(), 1);
  setenv("GTRAIN_MEMBERS", keeper.members_path().c_str(), 1);
}

// Exit codes of children: 0 if the body returned true.
class SessionTest : public testing::Test {
 protected:
  using Body = std::function<bool(Session&)>;

  // Call before keeper.Start().
  void Fork(const FakeKeeper& keeper, int world, const Body& body) {
    for (int rank = 0; rank < world; ++rank) {
      const pid_t pid = fork();
      GT_CHECK(pid >= 0);
      if (pid > 0) {
        pids_.push_back(pid);
        continue;
      }
      SetEnvironment(keeper, rank, world);
      auto session = Session::Join({.join_timeout = kPatience});
      if (!session.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, session.status().ToString().c_str());
      const bool good = session.ok() && body(**session);
      if (session.ok()) session->reset();
      _exit(good ? 0 : 1);
    }
  }
  void ExpectAllGood() {
    for (pid_t pid : std::exchange(pids_, {})) {
      int status = 0;
      ASSERT_EQ(waitpid(pid, &status, 0), pid);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
    }
  }
  ~SessionTest() override {
    for (pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
  std::vector<pid_t> pids_;
};

TEST_F(SessionTest, JoinsAndReducesOverTheKeepersArenas) {
  FakeKeeper keeper(3);
  Fork(keeper, 3, [](Session& s) {
    if (s.generation() != 5 || s.timeline() != 2 || s.job() != "job-1" || s.world_size() != 3 ||
        !s.managed()) {
      return false;
    }
    auto communicator = s.MakeCommunicator();
    if (!communicator.ok()) return false;
    std::vector<float> data(100'000, static_cast<float>(s.rank() + 1));
    if (!(*communicator)->AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kSum).ok())
      return false;
    auto fast = (*communicator)->Allocate(4096);
    if (!fast.ok()) return false;
    auto* numbers = static_cast<int32_t*>(*fast);
    numbers[0] = s.rank();
    if (!(*communicator)->AllReduce(numbers, 1, DType::kInt32, ReduceOp::kMax).ok()) return false;
    return data[99'999] == 6 && numbers[0] == 2 && s.Alive().ok();
  });
  keeper.Start();
  ExpectAllGood();
  EXPECT_EQ(keeper.Messages(1, "joined").size(), 1);
  const auto hello = keeper.Messages(2, "exchange")[0];
  std::string blob;
  ASSERT_TRUE(absl::Base64Unescape(hello["blob"].get<std::string>(), &blob));
  EXPECT_THAT(blob, testing::HasSubstr("\"pid\":"));
}

// A keeper of an earlier version would close the connection at a word it does not know.
TEST_F(SessionTest, ArenasOfClosedCommunicatorsAreFreedWhereTheKeeperKnowsIt) {
  for (const bool knows : {true, false}) {
    FakeKeeper keeper(2);
    keeper.set_writers(knows, false);
    Fork(keeper, 2, [](Session& s) {
      auto communicator = s.MakeCommunicator();
      if (!communicator.ok()) return false;
      for (int i = 0; i < 5; ++i) {
        auto part = (*communicator)->Split(0, s.rank());
        if (!part.ok() || !(*part)->Allocate(100).ok()) return false;
      }
      return (*communicator)->Barrier().ok();
    });
    keeper.Start();
    ExpectAllGood();
    const Instant deadline = RealClock().Now() + kPatience;
    const size_t uses = 2 * (1 + 5 * 2);
    while (knows && keeper.ArenasAskedAndFreed().second < uses && RealClock().Now() < deadline)
      absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(keeper.ArenasAskedAndFreed(), std::make_pair(uses, knows ? uses : 0));
  }
}

TEST_F(SessionTest, AWriterComesFromTheKeeper) {
  FakeKeeper keeper(1);
  keeper.set_writers(true, true);
  Fork(keeper, 1, [](Session& s) {
    auto* host = s.writer_host();
    for (uint64_t bytes : {8192, 4096}) {
      auto link = host->StartWriter(bytes, kPatience, [] { return true; });
      struct stat info;
      char byte = 0;
      if (!link.ok() || fstat(link->arena.get(), &info) != 0) return false;
      if (static_cast<uint64_t>(info.st_size) != bytes) return false;
      if (read(link->channel.get(), &byte, 1) != 1 || byte != 'w') return false;
    }
    return s.Alive().ok();
  });
  keeper.Start();
  ExpectAllGood();
}

TEST_F(SessionTest, AWriterThatIsNotWantedAnyMoreIsNotWaitedFor) {
  FakeKeeper keeper(1);
  keeper.set_writers(true, true);
  keeper.hold_writer();
  Fork(keeper, 1, [](Session& s) {
    auto* host = s.writer_host();
    int asked = 0;
    const auto none = host->StartWriter(4096, kPatience, [&] { return ++asked < 3; });
    if (!absl::IsCancelled(none.status()) || asked != 3) return false;
    // The late answer is not taken for that to the next question.
    const auto link = host->StartWriter(8192, kPatience, [] { return true; });
    struct stat info;
    return link.ok() && fstat(link->arena.get(), &info) == 0 && info.st_size == 8192;
  });
  keeper.Start();
  ExpectAllGood();
}

TEST_F(SessionTest, AKeeperWithoutWritersSaysWhy) {
  FakeKeeper keeper(1);
  keeper.set_writers(true, false);
  Fork(keeper, 1, [](Session& s) {
    const auto link = s.writer_host()->StartWriter(4096, kPatience, [] { return true; });
    return absl::IsFailedPrecondition(link.status()) &&
           absl::StrContains(link.status().message(), "no gtrain-writer");
  });
  keeper.Start();
  ExpectAllGood();
}

TEST_F(SessionTest, AnOlderKeeperIsNotAskedForAWriter_N13) {
  FakeKeeper keeper(1);
  Fork(keeper, 1, [](Session& s) {
    const auto link = s.writer_host()->StartWriter(4096, kPatience, [] { return true; });
    return absl::IsFailedPrecondition(link.status()) && absl::StrContains(link.status().message(), "older") &&
           s.Alive().ok();
  });
  keeper.Start();
  ExpectAllGood();
}

TEST_F(SessionTest, L1RevokeEndsABlockedCollective) {
  FakeKeeper keeper(2);
  int waited[2];  // ends when rank 0 has: a rank 1 that left earlier would be the reason that rank 0 hears
                  // first
  ASSERT_EQ(pipe(waited), 0);
  Fork(keeper, 2, [&](Session& s) {
    close(waited[s.rank()]);
    auto communicator = s.MakeCommunicator();
    if (!communicator.ok()) return false;
    if (s.rank() == 1) {
      const bool told = Until([&] { return !s.Alive().ok(); }) && absl::IsUnavailable(s.Alive());
      pollfd end{waited[0], POLLIN, 0};
      return told && poll(&end, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience))) == 1;
    }
    s.Report({.step = 1});
    const absl::Status status = (*communicator)->Barrier();
    return absl::IsUnavailable(status) && absl::StrContains(status.message(), "rank 1 was lost");
  });
  close(waited[0]);
  close(waited[1]);
  keeper.Start();
  ASSERT_TRUE(Until([&] { return !keeper.Messages(0, "progress").empty(); }));
  keeper.ToAll(kKeeperRevoked, "rank 1 was lost");
  ExpectAllGood();
}

TEST_F(SessionTest, StopNoticeAndReports) {
  FakeKeeper keeper(1);
  Fork(keeper, 1, [](Session& s) {
    if (s.StopRequested() || s.PreemptionNotice()) return false;
    for (int step = 1; step <= 1000; ++step) s.Report({.step = step, .loss = 0.5, .samples = 2});
    s.ReportCheckpoint(1000, "manifest-1000", "every 42 s");
    if (!Until([&] { return s.StopRequested() && s.PreemptionNotice().has_value(); })) return false;
    return *s.PreemptionNotice() <= absl::Seconds(90) && *s.PreemptionNotice() > absl::Seconds(30) &&
           s.Alive().ok();
  });
  keeper.Start();
  ASSERT_TRUE(Until([&] { return !keeper.Messages(0, "checkpoint").empty(); }));
  keeper.ToAll(kKeeperStop, "the user asked");
  const uint32_t seconds = 90;
  keeper.ToAll(kKeeperNotice, std::string(reinterpret_cast<const char*>(&seconds), sizeof(seconds)));
  ExpectAllGood();
  // The keeper may read the last message only after its sender has ended.
  EXPECT_TRUE(Until([&] { return keeper.Messages(0, "progress").back()["step"] == 1000; }));
  int64_t samples = 0;
  const auto reports = keeper.Messages(0, "progress");
  for (const auto& report : reports) samples += report.value("samples", 0);
  EXPECT_EQ(samples, 2000) << "merged, never lost, the last one sent before the end";
  EXPECT_EQ(reports.back()["step"], 1000);
  EXPECT_LT(reports.size(), 500);
  EXPECT_EQ(keeper.Messages(0, "checkpoint")[0]["manifest"], "manifest-1000");
}

TEST_F(SessionTest, WhatAProcessIsAskedItAnswersWhileItHasAnAnswer) {
  FakeKeeper keeper(1);
  keeper.set_writers(/*known=*/true, /*has=*/false);
  Fork(keeper, 1, [](Session& s) {
    s.SetAsked([](absl::string_view question) { return absl::StrCat("you ask ", question); });
    const bool stopped = Until([&] { return s.StopRequested(); });
    s.SetAsked(nullptr);
    return stopped;
  });
  keeper.Start();
  const std::string id(sizeof(RankQuestion), 'q');
  EXPECT_TRUE(Until([&] { return !keeper.answers().empty(); }));
  EXPECT_THAT(keeper.answers(), ::testing::ElementsAre(id + "you ask what?"));
  keeper.ToAll(kKeeperStop, "enough");
  ExpectAllGood();
}

// An older keeper would take what it does not know for the end of the protocol.
TEST_F(SessionTest, AnOlderKeeperHearsOfNoAnswers_N13) {
  FakeKeeper keeper(1);
  Fork(keeper, 1, [](Session& s) {
    s.SetAsked([](absl::string_view) { return std::string("nobody asks"); });
    s.Report({.step = 1});
    return Until([&] { return s.StopRequested(); });
  });
  keeper.Start();
  EXPECT_TRUE(Until([&] { return !keeper.Messages(0, "progress").empty(); }));
  EXPECT_THAT(keeper.answers(), ::testing::IsEmpty());
  keeper.ToAll(kKeeperStop, "enough");
  ExpectAllGood();
}

TEST_F(SessionTest, KeeperThatDiesEndsTheGeneration) {
  FakeKeeper keeper(1);
  Fork(keeper, 1, [](Session& s) {
    s.Report({.step = 1});
    if (!Until([&] { return !s.Alive().ok(); })) return false;
    return absl::IsUnavailable(s.Alive()) && absl::StrContains(s.Alive().message(), "keeper");
  });
  keeper.Start();
  ASSERT_TRUE(Until([&] { return !keeper.Messages(0, "progress").empty(); }));
  keeper.Stop();
  ExpectAllGood();
}

TEST_F(SessionTest, ForkedChildIsInert) {
  FakeKeeper keeper(1);
  Fork(keeper, 1, [](Session& s) {
    auto communicator = s.MakeCommunicator();
    if (!communicator.ok()) return false;
    const pid_t child = fork();
    if (child == 0) {
      s.Report({.step = 77});
      const bool inert = absl::IsFailedPrecondition(s.Alive()) && !s.StopRequested() &&
                         absl::IsFailedPrecondition((*communicator)->Barrier());
      _exit(inert ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    s.Report({.step = 1});
    return status == 0 && s.Alive().ok();
  });
  keeper.Start();
  ExpectAllGood();
  for (const auto& report : keeper.Messages(0, "progress")) EXPECT_NE(report.value("step", 0), 77);
}

std::set<int> DescriptorsThatSurviveExec() {
  std::set<int> found;
  DIR* dir = opendir("/proc/self/fd");
  while (dirent* entry = readdir(dir)) {
    const int fd = atoi(entry->d_name);
    const int flags = fcntl(fd, F_GETFD);
    if (entry->d_name[0] != '.' && flags >= 0 && (flags & FD_CLOEXEC) == 0) found.insert(fd);
  }
  closedir(dir);
  return found;
}

TEST_F(SessionTest, P15DescriptorsDoNotLeakAcrossExec) {
  FakeKeeper keeper(1);
  const std::set<int> before = DescriptorsThatSurviveExec();
  Fork(keeper, 1, [&](Session& s) {
    auto communicator = s.MakeCommunicator();
    return communicator.ok() && (*communicator)->Barrier().ok() && DescriptorsThatSurviveExec() == before;
  });
  keeper.Start();
  ExpectAllGood();
}

class InProcess : public testing::Test {
 protected:
  ~InProcess() override {
    for (const char* name :
         {"RANK", "LOCAL_RANK", "WORLD_SIZE", "GTRAIN_GENERATION", "GTRAIN_TIMELINE", "GTRAIN_JOB",
          "GTRAIN_KEEPER_SOCKET", "GTRAIN_TOKEN", "GTRAIN_MEMBERS", "GTRAIN_ELASTIC", "GTRAIN_WAITS"}) {
      unsetenv(name);
    }
  }
};

TEST_F(InProcess, WrongTokenIsRefused) {
  FakeKeeper keeper(1);
  SetEnvironment(keeper, 0, 1);
  setenv("GTRAIN_TOKEN", std::string(32, 'b').c_str(), 1);
  keeper.Start();
  const auto session = Session::Join({.join_timeout = kPatience});
  EXPECT_THAT(session.status().ToString(), testing::HasSubstr("refused"));
}

TEST_F(InProcess, JoinDeadlineSaysWhatIsMissing) {
  FakeKeeper keeper(1);
  SetEnvironment(keeper, 0, 1);
  keeper.set_silent();
  keeper.Start();
  const auto session = Session::Join({.join_timeout = absl::Milliseconds(500)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(session.status())) << session.status();
  EXPECT_THAT(session.status().ToString(), testing::HasSubstr("not all 1 ranks of generation 5 joined"));
}

TEST_F(InProcess, JoinDeadlineNamesTheMissingRanks) {
  FakeKeeper keeper(5);
  SetEnvironment(keeper, 0, 5);
  keeper.set_missing(" 1 2 4");
  keeper.Start();
  const auto session = Session::Join({.join_timeout = absl::Milliseconds(200)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(session.status())) << session.status();
  EXPECT_THAT(session.status().ToString(), testing::HasSubstr("no word from ranks 1,2,4"));
}

TEST_F(InProcess, ARankThatHasEndedIsNotWaitedFor) {
  FakeKeeper keeper(3);
  SetEnvironment(keeper, 0, 3);
  keeper.set_missing(" 1 2");
  keeper.set_left(" 2");
  keeper.Start();
  const auto session = Session::Join({.join_timeout = absl::Minutes(2)});
  EXPECT_TRUE(absl::IsUnavailable(session.status())) << session.status();
  EXPECT_THAT(session.status().ToString(), testing::HasSubstr("rank 2 ended with exit code 0"));
}

TEST_F(InProcess, ARankThatHasSpokenAndEndedDoesNoHarm) {
  FakeKeeper keeper(3);
  SetEnvironment(keeper, 0, 3);
  keeper.set_missing(" 1");
  keeper.set_left(" 2");
  keeper.Start();
  const auto session = Session::Join({.join_timeout = absl::Seconds(5)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(session.status())) << session.status();
}

// A process beside a generation waits for its place longer than it would for the others to join.
TEST_F(InProcess, WhoWaitsForAPlaceHasNoDeadlineBeforeIt) {
  FakeKeeper keeper(2);
  SetEnvironment(keeper, 2, 2);  // behind the ranks of its world
  setenv("GTRAIN_WAITS", "1", 1);
  setenv("GTRAIN_ELASTIC", "in-place", 1);
  keeper.set_writers(true, false);
  keeper.set_waits(absl::Seconds(2));
  keeper.set_spoken(0);
  keeper.Start();
  const auto session = Session::Join({.join_timeout = absl::Seconds(1), .stays = true});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ((*session)->generation(), 6);
  EXPECT_EQ((*session)->rank(), 1);
}

// What a program does before it asks for its place holds up nobody: its keeper hears then that it is ready.
TEST_F(InProcess, WhoTakesItsPlaceLaterIsReadyWhenItAsksForIt) {
  FakeKeeper keeper(2);
  SetEnvironment(keeper, 2, 2);
  setenv("GTRAIN_WAITS", "1", 1);
  setenv("GTRAIN_ELASTIC", "in-place", 1);
  keeper.set_writers(true, false);
  keeper.set_waits(absl::ZeroDuration());
  keeper.set_spoken(0);
  keeper.Start();
  const auto session = Session::Join({.join_timeout = kPatience, .stays = true, .place_later = true});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_FALSE((*session)->has_place());
  EXPECT_EQ((*session)->rank(), 2) << "behind the ranks";
  EXPECT_THAT((*session)->Alive().ToString(),
              testing::HasSubstr("no place in one before the first step of its elastic run"));
  EXPECT_EQ(keeper.released(), 0);
  ASSERT_TRUE((*session)->Rejoin({.join_timeout = kPatience}).ok());
  EXPECT_TRUE((*session)->has_place());
  EXPECT_EQ((*session)->generation(), 6);
  EXPECT_EQ((*session)->rank(), 1);
  EXPECT_EQ(keeper.released(), 1);
}

// A second generation is the answer only where the first is over: here it lives, so nothing else would come.
TEST_F(InProcess, ARejoinDoesNotWaitForARankThatHasLeft) {
  FakeKeeper keeper(2);
  SetEnvironment(keeper, 0, 2);
  setenv("GTRAIN_ELASTIC", "in-place", 1);
  keeper.set_writers(true, false);  // its welcome says what it can do
  keeper.set_spoken(1);
  keeper.Start();
  const auto session = Session::Join({.join_timeout = kPatience, .stays = true});
  ASSERT_TRUE(session.ok()) << session.status();
  keeper.set_missing(" 1");
  keeper.set_left(" 1");
  keeper.ToAll(kKeeperRevoked, "rank 1 was lost");
  const absl::Status rejoined = (*session)->Rejoin({.join_timeout = absl::Minutes(2)});
  EXPECT_TRUE(absl::IsUnavailable(rejoined)) << rejoined;
  EXPECT_THAT(rejoined.ToString(), testing::HasSubstr("rank 1 ended with exit code 0"));
  EXPECT_EQ((*session)->generation(), 6);
}

TEST_F(InProcess, NoKeeper) {
  FakeKeeper keeper(1);
  SetEnvironment(keeper, 0, 1);
  setenv("GTRAIN_KEEPER_SOCKET", "/nonexistent/socket", 1);
  const auto session = Session::Join();
  EXPECT_TRUE(absl::IsUnavailable(session.status())) << session.status();
}

TEST_F(InProcess, ByHandIsAWorldOfOne) {
  auto session = Session::Join();
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_FALSE((*session)->managed());
  EXPECT_EQ((*session)->world_size(), 1);
  auto communicator = (*session)->MakeCommunicator();
  ASSERT_TRUE(communicator.ok());
  float x = 3, y = 0;
  EXPECT_TRUE((*communicator)->AllReduce(&x, 1, DType::kFloat32, ReduceOp::kMean).ok());
  EXPECT_TRUE((*communicator)->AllGather(&x, &y, 1, DType::kFloat32).ok());
  EXPECT_EQ(y, 3);
}

TEST_F(InProcess, AlgorithmThatIsNone) {
  setenv("GTRAIN_COMM_ALGO", "quick", 1);
  auto session = Session::Join();
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_THAT((*session)->MakeCommunicator().status().ToString(),
              testing::HasSubstr("GTRAIN_COMM_ALGO is 'quick' on rank 0; it must be one of auto, ring"));
  unsetenv("GTRAIN_COMM_ALGO");
}

TEST_F(InProcess, NetworkThatIsNone) {
  setenv("GTRAIN_COMM_TLS", "TCP", 1);
  auto session = Session::Join();
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_THAT((*session)->MakeCommunicator().status().ToString(),
              testing::HasSubstr("rank 0 (127.0.0.1): GTRAIN_COMM_TLS is 'TCP'; it must be auto, or names"));
  unsetenv("GTRAIN_COMM_TLS");
}

TEST_F(InProcess, RanksOfAnotherLauncherAreRefused) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    setenv(name, "1", 1);
    EXPECT_TRUE(Session::Join().ok());
    setenv(name, "2", 1);
    const auto started_by_another = Session::Join();
    unsetenv(name);
    EXPECT_TRUE(absl::IsFailedPrecondition(started_by_another.status())) << name;
    EXPECT_THAT(std::string(started_by_another.status().message()),
                testing::HasSubstr(absl::StrCat(name, " is 2")));
  }
  setenv("WORLD_SIZE", "4", 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(Session::Join().status()));
}

TEST(ParseMembers, TheOrderOfMachinesIsOptional) {
  const auto parse = [](const std::string& more) {
    return ParseMembers(
        absl::StrCat(R"({"generation":3,"members":[{"rank":0,"local_rank":0,"node":"n","address":"::1")",
                     more, "}]}"),
        3, 1);
  };
  ASSERT_TRUE(parse("").ok());
  EXPECT_EQ(parse("")->at(0).fabric_order, 0);
  EXPECT_EQ(parse(R"(,"fabric_order":7)")->at(0).fabric_order, 7);
  EXPECT_FALSE(parse(R"(,"fabric_order":"first")").ok());
}

TEST_F(InProcess, DamagedEnvironmentIsNamed) {
  FakeKeeper keeper(1);
  SetEnvironment(keeper, 0, 1);
  setenv("RANK", "zero", 1);
  EXPECT_THAT(Session::Join().status().ToString(), testing::HasSubstr("RANK is 'zero'"));
  SetEnvironment(keeper, 0, 2);
  const auto env = ReadRankEnvironment([](const char* name) -> const char* { return getenv(name); });
  ASSERT_TRUE(env.ok());
  EXPECT_THAT(ReadMembers(*env).status().ToString(), testing::HasSubstr("no rank 1"));
  SetEnvironment(keeper, 0, 1);
  unsetenv("GTRAIN_TOKEN");
  EXPECT_THAT(Session::Join().status().ToString(), testing::HasSubstr("GTRAIN_TOKEN is not set"));
}

TEST(RankEnvironment, VirtualRanksComeWithTheNumbersOfThreads) {
  std::map<std::string, std::string> variables = {{"GTRAIN_VIRTUAL_RANKS", "8"}, {"OMP_NUM_THREADS", "2"}};
  const auto read = [&] {
    return ReadRankEnvironment([&](const char* name) -> const char* {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
  };
  EXPECT_EQ(read()->virtual_ranks, 8);
  EXPECT_EQ(read()->threads,
            "OMP_NUM_THREADS=2 MKL_NUM_THREADS unset OPENBLAS_NUM_THREADS unset BLIS_NUM_THREADS unset");
  for (const char* wrong : {"0", "-1", "65537", "many"}) {
    variables["GTRAIN_VIRTUAL_RANKS"] = wrong;
    EXPECT_THAT(read().status().ToString(), testing::HasSubstr("GTRAIN_VIRTUAL_RANKS is "));
  }
  variables.erase("GTRAIN_VIRTUAL_RANKS");
  EXPECT_EQ(read()->virtual_ranks, 0);
  EXPECT_EQ(read()->threads, "");
}

}  // namespace
}  // namespace gtrain::worker
