// Tests the keeper's services for programs with the SDK: the socket of ranks, shared memory, writers of
// checkpoints.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/host/keeper_client.h"
#include "runtime/host/keeper_test_world.h"
#include "runtime/keeper/posix.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::host {
namespace {

TEST_F(KeeperTest, RankProtocolRelaysBothWaysAndRepeatsUntilAcknowledged) {
  Start();
  Launch({"exec sleep 600", "exec sleep 600"});
  ASSERT_NE(WaitStarted(1), nullptr);
  FakeRank rank(dir_);
  rank.Hello(1, 1, Rank(1, {}).token);
  EXPECT_EQ(rank.Next().first, kKeeperWelcome);
  rank.Send(kRankToAgent, R"({"type":"joined"})");
  const auto* relay = Wait<keeper::RelayUp>([](const keeper::RelayUp&) { return true; });
  ASSERT_NE(relay, nullptr);
  EXPECT_EQ(relay->rank, 1);
  EXPECT_EQ(relay->json, R"({"type":"joined"})");
  LoseAgent();
  rank.Send(kRankToAgent, R"({"type":"progress","step":1})");
  rank.Send(kRankToAgent, R"({"type":"progress","step":2})");
  Attach();
  EXPECT_TRUE(state_.generations[0].ranks[1].sdk);
  const auto* again =
      Wait<keeper::RelayUp>([](const keeper::RelayUp& r) { return absl::StrContains(r.json, "joined"); });
  ASSERT_NE(again, nullptr);
  ASSERT_NE(Wait<keeper::RelayUp>([](const keeper::RelayUp& r) { return absl::StrContains(r.json, ":2"); }),
            nullptr);
  client_->Send(keeper::Relay{1, 1, "{\"type\":\"table\"}"});
  Pump();
  EXPECT_EQ(rank.Next(), std::pair(int{kKeeperFromAgent}, std::string("{\"type\":\"table\"}")));
  End(keeper::End::kReform, 5000);
  Pump();
  const auto revoked = rank.Next();
  EXPECT_EQ(revoked.first, kKeeperRevoked);
  EXPECT_THAT(revoked.second, HasSubstr("the test says so"));
}

// The last message of a rank changes what its end means (S7), also for an agent that comes later.
TEST_F(KeeperTest, TheLastWordsOfARankComeBeforeItsExit_S7) {
  Start();
  Launch({"exec sleep 600", "exec sleep 600"});
  ASSERT_NE(WaitStarted(1), nullptr);
  FakeRank rank(dir_);
  rank.Hello(1, 1, Rank(1, {}).token);
  EXPECT_EQ(rank.Next().first, kKeeperWelcome);
  const int64_t pid = WaitStarted(1)->pid;
  // The keeper stands still while the rank speaks and dies, and finds both at once.
  const auto keeper = KeeperPid(dir_);
  ASSERT_TRUE(keeper.ok());
  ASSERT_EQ(kill(static_cast<pid_t>(*keeper), SIGSTOP), 0);
  for (int i = 0; i < 3; ++i)
    rank.Send(kRankToAgent, absl::StrCat(R"({"type":"storage","text":")", i, "\"}"));
  ASSERT_EQ(kill(static_cast<pid_t>(pid), SIGKILL), 0);
  ASSERT_TRUE(Until([&] { return !Alive(pid); }));
  ASSERT_EQ(kill(static_cast<pid_t>(*keeper), SIGCONT), 0);
  const auto relays_before_exit = [&] {
    int relays = 0;
    for (const auto& report : seen_) {
      if (std::holds_alternative<keeper::Exited>(*report)) return relays;
      relays += std::holds_alternative<keeper::RelayUp>(*report) ? 1 : 0;
    }
    return -1;
  };
  ASSERT_NE(WaitExit(1), nullptr);
  EXPECT_EQ(relays_before_exit(), 3);
  LoseAgent();
  Attach();
  EXPECT_TRUE(state_.generations[0].unacked.empty()) << "its exit comes after what it said";
  EXPECT_TRUE(state_.generations[0].ranks[1].running);
  ASSERT_NE(WaitExit(1), nullptr);
  EXPECT_EQ(relays_before_exit(), 3);
}

// A generation may be over before an agent comes that asks what its ranks said.
TEST_F(KeeperTest, TheLastWordsOfARankOutliveItsGeneration_S7) {
  Start();
  Launch({"exec sleep 600"});
  const auto* started = WaitStarted(0);
  ASSERT_NE(started, nullptr);
  FakeRank rank(dir_);
  Welcome(&rank);
  const auto pid = static_cast<pid_t>(started->pid);
  LoseAgent();
  rank.Send(kRankToAgent, R"({"type":"storage","text":"away"})");
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  EXPECT_EQ(rank.Next().first, 0) << "the keeper lets go of a generation that is over";
  Attach();
  ASSERT_NE(WaitGone(), nullptr);
  std::vector<std::string> heard;
  for (const auto& report : seen_) {
    if (std::holds_alternative<keeper::RelayUp>(*report)) heard.push_back("storage");
    if (std::holds_alternative<keeper::Exited>(*report)) heard.push_back("exit");
    if (std::holds_alternative<keeper::Gone>(*report)) heard.push_back("gone");
  }
  EXPECT_EQ(heard, (std::vector<std::string>{"storage", "exit", "gone"}));
}

TEST_F(KeeperTest, WrongTokenAndGarbageAreRefused) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  FakeRank stranger(dir_);
  stranger.Hello(1, 0, std::string(32, 'f'));
  EXPECT_EQ(stranger.Next().first, kKeeperRefused);
  EXPECT_EQ(stranger.Next().first, 0);
  FakeRank rude(dir_);
  rude.Send(kRankToAgent, "{}");  // before hello
  EXPECT_EQ(rude.Next().first, 0);
  FakeRank noisy(dir_);
  noisy.Send(999, std::string(100, '\xff'));
  EXPECT_EQ(noisy.Next().first, 0);
  FakeRank vast(dir_);  // of which the keeper would keep all that comes, for who knows whom
  RankFrame header{15 << 20, kRankHello, 0};
  vast.SendBytes({reinterpret_cast<const char*>(&header), sizeof(header)});
  EXPECT_EQ(vast.Next().first, 0);
}

// A process beside the test's own.
struct Other {
  pid_t pid = -1;
  UniqueFd said;   // what it writes
  UniqueFd lives;  // closed: it shall end
};

Other StartOther(const std::function<void(int say, int until)>& run) {
  Other other;
  UniqueFd say, until;
  EXPECT_TRUE(keeper::MakePipe(&other.said, &say) && keeper::MakePipe(&until, &other.lives));
  other.pid = fork();
  if (other.pid != 0) return other;
  other.lives.reset();
  run(say.get(), until.get());
  _exit(0);
}

std::string ReadLine(int fd) {
  std::string line;
  char byte = 0;
  while (read(fd, &byte, 1) == 1 && byte != '\n') line += byte;
  return line;
}

void AwaitEnd(int fd) {
  char byte = 0;
  while (read(fd, &byte, 1) > 0) {
  }
}

TEST_F(KeeperTest, AnotherProcessOfARankThatLivesIsRefusedByName) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  FakeRank first(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(&first));
  Other other = StartOther([&](int say, int) {
    FakeRank rank(dir_);
    rank.Hello(1, 0, Rank(0, {}).token);
    const auto answer = rank.Next();
    dprintf(say, "%d %s\n", answer.first, answer.second.c_str());
  });
  const std::string answer = ReadLine(other.said.get());
  EXPECT_THAT(answer, HasSubstr(absl::StrCat(int{kKeeperRefused}, " rank 0 of job job-1 is process ",
                                             getpid(), " already")));
  EXPECT_THAT(answer, HasSubstr("env -u GTRAIN_GENERATION -u WORLD_SIZE"));
  waitpid(other.pid, nullptr, 0);
  first.Send(kRankToAgent, R"({"type":"joined"})");
  EXPECT_NE(Wait<keeper::RelayUp>([](const keeper::RelayUp&) { return true; }), nullptr);
  FakeRank again(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(&again));
  EXPECT_EQ(first.Next().first, 0) << "the process itself may come back";
}

// Another process becomes the rank also while a child of the first, forked for something else, still has its
// connection.
TEST_F(KeeperTest, AnotherProcessIsARankWhenTheFirstHasEnded) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  Other other = StartOther([&](int say, int until) {
    FakeRank rank(dir_);
    rank.Hello(1, 0, Rank(0, {}).token);
    const int answer = rank.Next().first;
    if (fork() == 0) return AwaitEnd(until);
    dprintf(say, "%d\n", answer);
    _exit(0);
  });
  EXPECT_EQ(ReadLine(other.said.get()), absl::StrCat(int{kKeeperWelcome}));
  ASSERT_TRUE(Until([&] { return !Alive(other.pid); }));
  FakeRank next(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(&next));
  waitpid(other.pid, nullptr, 0);
  other.lives.reset();
  AwaitEnd(other.said.get());
}

// Its end of the connection may not have been read yet.
TEST_F(KeeperTest, AnotherProcessIsARankWhenTheFirstHasClosedItsSession) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  auto first = std::make_unique<FakeRank>(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(first.get()));
  const auto keeper = KeeperPid(dir_);
  ASSERT_TRUE(keeper.ok());
  ASSERT_EQ(kill(static_cast<pid_t>(*keeper), SIGSTOP), 0);
  Other other = StartOther([&](int say, int) {
    first.reset();  // this one's copy
    FakeRank rank(dir_);
    rank.Hello(1, 0, Rank(0, {}).token);
    dprintf(say, "sent\n");
    dprintf(say, "%d\n", rank.Next().first);
  });
  EXPECT_EQ(ReadLine(other.said.get()), "sent");
  first.reset();
  ASSERT_EQ(kill(static_cast<pid_t>(*keeper), SIGCONT), 0);
  EXPECT_EQ(ReadLine(other.said.get()), absl::StrCat(int{kKeeperWelcome}));
  waitpid(other.pid, nullptr, 0);
}

TEST_F(KeeperTest, ArenasAreSharedSizedAndLimited) {
  Start();
  Launch({"exec sleep 600", "exec sleep 600"}, 1, 1 << 20);
  ASSERT_NE(WaitStarted(1), nullptr);
  FakeRank a(dir_), b(dir_);
  a.Hello(1, 0, Rank(0, {}).token);
  b.Hello(1, 1, Rank(1, {}).token);
  ASSERT_EQ(a.Next().first, kKeeperWelcome);
  ASSERT_EQ(b.Next().first, kKeeperWelcome);
  a.Arena(7, 65536);
  b.Arena(7, 65536);
  ASSERT_EQ(a.Next().first, kKeeperArena);
  ASSERT_EQ(b.Next().first, kKeeperArena);
  struct stat first, second;
  ASSERT_EQ(fstat(a.passed(), &first), 0);
  ASSERT_EQ(fstat(b.passed(), &second), 0);
  EXPECT_EQ(first.st_ino, second.st_ino);
  EXPECT_EQ(first.st_size, 65536);
  b.Arena(7, 4096);
  EXPECT_EQ(b.Next().first, kKeeperRefused);
  b.Arena(8, 2 << 20);
  const auto refused = b.Next();
  EXPECT_EQ(refused.first, kKeeperRefused);
  EXPECT_THAT(refused.second, HasSubstr("resources.shm"));
}

// The room of an arena is free again when all that asked for it have freed it or gone, and not before.
// Many small ones take descriptors, of which each rank needs some.
TEST_F(KeeperTest, ArenasAreAsManyAsTheKeeperHasDescriptorsFor) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  FakeRank rank(dir_);
  Welcome(&rank);
  rlimit files = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const uint64_t most = std::min<uint64_t>(4096, files.rlim_max / 4);
  for (uint64_t id = 1; id <= most; ++id) {
    rank.Arena(id, 1);
    ASSERT_EQ(rank.Next().first, kKeeperArena) << id;
  }
  rank.Arena(0, 1);
  EXPECT_EQ(rank.Next(), std::pair(int{kKeeperRefused},
                                   absl::StrCat("arena 0 is one too many: the ranks of a job may have ", most,
                                                " on a machine, one for each communicator; close those that "
                                                "are not needed any more")));
  rank.Arena(1, 1);
  EXPECT_EQ(rank.Next().first, kKeeperArena) << "one that is there";
  rank.FreeArena(1);
  rank.Arena(0, 1);
  EXPECT_EQ(rank.Next().first, kKeeperArena);
  Launch({"exec sleep 600"}, 2);
  EXPECT_NE(WaitStarted(0, 2), nullptr) << "the keeper goes on";
}

TEST_F(KeeperTest, AnArenaGoesWithItsLastUser) {
  constexpr uint64_t kAll = 1 << 20;
  Start();
  Launch({"exec sleep 600", "exec sleep 600"}, 1, kAll);
  ASSERT_NE(WaitStarted(1), nullptr);
  const auto join = [&](uint32_t number) {
    auto rank = std::make_unique<FakeRank>(dir_);
    rank->Hello(1, number, Rank(static_cast<int>(number), {}).token);
    EXPECT_EQ(rank->Next().first, kKeeperWelcome);
    return rank;
  };
  const auto arena = [](FakeRank& rank, uint64_t id) {
    rank.Arena(id, kAll);
    return rank.Next().first;
  };
  const auto a = join(0);
  auto b = join(1);
  for (uint64_t id = 1; id <= 300; ++id) {
    ASSERT_EQ(arena(*a, id), kKeeperArena) << id;
    ASSERT_EQ(arena(*b, id), kKeeperArena);
    b->FreeArena(id);
    ASSERT_EQ(arena(*b, id + 1), kKeeperRefused) << "the other one uses it";
    a->FreeArena(id);
    ASSERT_TRUE(Until([&] { return arena(*b, 1000) == kKeeperArena; }));  // of a's socket
    b->FreeArena(1000);
    b->Arena(2000, 2 * kAll);  // what b said before was heard
    ASSERT_EQ(b->Next().first, kKeeperRefused);
  }
  ASSERT_EQ(arena(*a, 1), kKeeperArena);
  ASSERT_EQ(arena(*b, 1), kKeeperArena);
  a->FreeArena(1);
  b.reset();
  EXPECT_TRUE(Until([&] { return arena(*a, 2) == kKeeperArena; })) << "its last user has gone";
  // Freed before the answer was read: what was asked for arrives all the same.
  a->FreeArena(2);
  a->Arena(3, kAll);
  a->FreeArena(3);
  ASSERT_EQ(a->Next().first, kKeeperArena);
  struct stat passed;
  ASSERT_EQ(fstat(a->passed(), &passed), 0);
  EXPECT_EQ(passed.st_size, kAll);
}

// A rank's ends of its writer. The first words of the memory count releases and starts
// (checkpoint/engine/save_arena.h); a writer that gets no order waits until the channel ends.
struct Writer {
  UniqueFd memfd, channel;

  // Asks and takes.
  static Writer Of(FakeRank* rank) {
    rank->Writer(1 << 20);
    return Take(rank);
  }
  static Writer Take(FakeRank* rank) {
    Writer writer;
    EXPECT_EQ(rank->Next().first, kKeeperWriter);
    writer.memfd = rank->TakePassed();
    EXPECT_EQ(rank->Next().first, kKeeperChannel);
    writer.channel = rank->TakePassed();
    return writer;
  }
  uint32_t Word(off_t at) const {
    uint32_t word = 0;
    EXPECT_EQ(pread(memfd.get(), &word, sizeof(word), at), static_cast<ssize_t>(sizeof(word)));
    return word;
  }
  uint32_t starts() const { return Word(4); }
  void Release() const {
    const uint32_t one = 1;
    EXPECT_EQ(pwrite(memfd.get(), &one, sizeof(one), kSaveArenaReleasedAt),
              static_cast<ssize_t>(sizeof(one)));
  }
  // The keeper and the writer have let go of their ends.
  bool over() const {
    char byte;
    return recv(channel.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }
};

std::vector<pid_t> WriterPids(int64_t keeper) {
  std::vector<pid_t> pids;
  for (const keeper::Descendant& found : keeper::LivingDescendants(static_cast<pid_t>(keeper))) {
    if (keeper::ReadSmallFile(absl::StrCat("/proc/", found.process.pid, "/comm")) == "gtrain-writer\n")
      pids.push_back(found.process.pid);
  }
  return pids;
}

TEST_F(KeeperTest, AWriterOutlivesItsRankAndItsGeneration) {
  Start();
  Launch({"setsid sleep 600 & exec sleep 600"});  // what is left makes the keeper look for whose it is
  ASSERT_NE(WaitStarted(0), nullptr);
  FakeRank rank(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(&rank));
  Writer writer = Writer::Of(&rank);
  struct stat info;
  ASSERT_EQ(fstat(writer.memfd.get(), &info), 0);
  EXPECT_EQ(info.st_size, 1 << 20);
  EXPECT_NE(ftruncate(writer.memfd.get(), 0), 0) << "its size is sealed";
  ASSERT_TRUE(Until([&] { return writer.starts() == 1; }));
  End(keeper::End::kStopNow, 0);
  const auto* gone = WaitGone();
  ASSERT_NE(gone, nullptr);
  EXPECT_TRUE(gone->clean) << gone->message;
  client_->Send(keeper::Forget{1});

  // Killed, it is replaced, although nobody else knows of the generation any more.
  for (uint32_t starts = 1; starts <= 3; ++starts) {
    ASSERT_TRUE(Until([&] { return writer.starts() == starts; }));
    ASSERT_TRUE(Until([&] { return WriterPids(state_.pid).size() == 1; }));
    EXPECT_FALSE(writer.over());
    kill(WriterPids(state_.pid)[0], SIGKILL);
  }
  ASSERT_TRUE(Until([&] { return writer.starts() == 4; }));
  ASSERT_TRUE(Until([&] { return WriterPids(state_.pid).size() == 1; }));
  kill(WriterPids(state_.pid)[0], SIGKILL);  // too often: the rank is told by the end of the channel
  EXPECT_TRUE(Until([&] { return writer.over(); }));
  EXPECT_EQ(WriterPids(state_.pid).size(), 0u);
  EXPECT_THAT(Slurp(dir_ + "/keeper.log"), HasSubstr("rank 0 of generation 1 was killed by SIGKILL"));
}

TEST_F(KeeperTest, AWriterEndsWithItsRank) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  FakeRank rank(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(&rank));
  for (int i = 0; i < 6; ++i) {  // more than a rank may have at a time
    Writer writer = Writer::Of(&rank);
    ASSERT_TRUE(Until([&] { return writer.starts() == 1; }));
    writer.channel.reset();
    ASSERT_TRUE(Until([&] { return WriterPids(state_.pid).empty(); }));
  }
  std::vector<Writer> held;
  for (int i = 0; i < 4; ++i) held.push_back(Writer::Of(&rank));
  rank.Writer(4096);
  const auto refused = rank.Next();
  EXPECT_EQ(refused.first, kKeeperNoWriter);
  EXPECT_THAT(refused.second, HasSubstr("4 writers"));
}

TEST_F(KeeperTest, TheNextGenerationGetsMemoryWhenTheOneBeforeNeedsItNoMore_C12) {
  Start();
  Launch({"exec sleep 600"}, 1);
  ASSERT_NE(WaitStarted(0), nullptr);
  FakeRank first(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(&first));
  Writer held = Writer::Of(&first), other = Writer::Of(&first);
  End(keeper::End::kStopNow, 0);
  ASSERT_NE(WaitGone(), nullptr);
  Launch({"exec sleep 600"}, 2);
  ASSERT_NE(WaitStarted(0, 2), nullptr);
  FakeRank second(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(&second, 2));
  second.Writer(1 << 20);
  second.Arena(7, 4096);  // what is asked after it does not wait
  EXPECT_EQ(second.Next().first, kKeeperArena);
  second.Arena(8, 4096);  // by its answer the keeper has looked at who waits
  EXPECT_EQ(second.Next().first, kKeeperArena);
  held.Release();         // one by its writer's word,
  other.channel.reset();  // one because it ended
  Writer next = Writer::Take(&second);
  EXPECT_TRUE(Until([&] { return next.starts() == 1; }));
  EXPECT_FALSE(held.over()) << "it goes on";
}

TEST_F(KeeperTest, StopAsksSdkRanksBeforeItSignalsThem) {
  Start();
  Launch({"trap 'exit 9' TERM; echo ready > ready; while [ ! -e saved ]; do sleep 0.05; done; exit 0"});
  ASSERT_TRUE(Until([&] {
    Pump();
    return fs::exists(Path("ready"));
  }));
  FakeRank rank(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(&rank));
  End(keeper::End::kStop, 600000);
  Pump();
  EXPECT_EQ(rank.Next().first, kKeeperStop);
  std::ofstream(Path("saved")) << "yes";
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, Cause::kExited);
  EXPECT_EQ(exit->code, 0);
}

TEST_F(KeeperTest, DeepStateDirectoryStillGivesRanksAShortSocket) {
  dir_ = base_ + "/" + std::string(60, 'd') + "/" + std::string(60, 'e');
  fs::create_directories(dir_);
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  FakeRank rank(dir_);
  ASSERT_NO_FATAL_FAILURE(Welcome(&rank));
}

}  // namespace
}  // namespace gtrain::host
