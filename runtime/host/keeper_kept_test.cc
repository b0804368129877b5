// Tests the processes that a keeper keeps from one generation for the next (`elastic.mode: in-place`).
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/host/keeper_test_world.h"
#include "runtime/keeper/posix.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::host {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class KeeperKeptTest : public KeeperTest {
 protected:
  std::unique_ptr<FakeRank> Staying(int rank, uint64_t generation = 1) {
    auto fake = std::make_unique<FakeRank>(dir_);
    fake->Hello(generation, static_cast<uint32_t>(rank), Rank(rank, {}).token);
    EXPECT_EQ(fake->Next().first, kKeeperWelcome);
    fake->Send(kRankStays, "");
    fake->Send(kRankToAgent, "{\"type\":\"joined\"}");
    EXPECT_NE(Wait<keeper::RelayUp>(
                  [=](const keeper::RelayUp& up) { return up.rank == rank && up.generation == generation; }),
              nullptr);
    return fake;
  }
  void EndKeeping(uint64_t generation, uint64_t grace_ms = 60000) {
    client_->Send(keeper::EndGeneration{generation, keeper::End::kReform, grace_ms, "a rank is lost", true});
    Pump();
  }
  static void Release(FakeRank& rank, uint64_t generation) {
    ASSERT_EQ(rank.Next(), std::pair(int{kKeeperRevoked}, std::string("a rank is lost")));
    rank.Send(kRankReleased, std::string(reinterpret_cast<char*>(&generation), sizeof(generation)));
  }
  // Begins a generation of one member, beside which others come up.
  void LaunchBeside(int others) {
    client_->Send(keeper::BeginGeneration{1, static_cast<uint32_t>(1 + others), 1 << 20, "note"});
    client_->Send(Rank(0, {"sleep", "600"}));
    for (int rank = 1; rank <= others; ++rank) {
      keeper::StartRank beside = Rank(rank, {"sleep", "600"});
      beside.waits = true;
      client_->Send(beside);
    }
    Pump();
    for (int rank = 0; rank <= others; ++rank) ASSERT_NE(WaitStarted(rank), nullptr);
  }
  // Says hello as one that comes up beside a generation.
  void Greet(FakeRank& fake, int rank) {
    fake.Hello(1, static_cast<uint32_t>(rank), Rank(rank, {}).token);
    const auto [kind, abilities] = fake.Next();
    EXPECT_EQ(kind, kKeeperWelcome);
    EXPECT_NE(abilities[0] & kKeeperYouWait, 0);
    EXPECT_EQ(fake.Next().first, kKeeperRevoked) << "it is between two generations";
  }
  static void ComeUp(FakeRank& fake) {
    fake.Send(kRankStays, "");
    Answer(fake);
  }
  static void Answer(FakeRank& fake) { fake.Send(kRankReleased, std::string(8, '\1')); }
  const keeper::Ready* WaitReady(int rank, uint64_t generation = 1) {
    return Wait<keeper::Ready>(
        [=](const keeper::Ready& ready) { return ready.rank == rank && ready.generation == generation; });
  }
  // The process that was born as this rank goes on as `rank`, beside none.
  void GoOn(uint64_t generation, int rank, uint64_t born, int born_rank,
            const std::string& script = "exec sleep 600") {
    client_->Send(keeper::BeginGeneration{generation, 1, 1 << 20, "note"});
    keeper::StartRank start = Rank(rank, {"bash", "-c", script}, generation);
    start.out_path = Path("next.out");
    start.born = born;
    start.born_rank = born_rank;
    client_->Send(start);
    Pump();
  }
};

TEST_F(KeeperKeptTest, AProcessThatStaysGoesOnAsAnotherRank) {
  Start();
  const char* talks = "trap 'echo after' USR1; echo before; while :; do sleep 0.05; done";
  Launch({"exec sleep 600", "exec sleep 600", "exec sleep 600", talks});
  for (int rank = 0; rank < 4; ++rank) ASSERT_NE(WaitStarted(rank), nullptr);
  const int64_t pid = WaitStarted(3)->pid;
  const auto stays = Staying(3), silent = Staying(1);
  ASSERT_TRUE(Until([&] {
    Pump();
    return Slurp(OutPath(3)) == "before\n";
  }));
  EndKeeping(1, 2000);
  Release(*stays, 1);
  const auto* gone = WaitGone();
  ASSERT_NE(gone, nullptr);
  EXPECT_TRUE(gone->clean);
  EXPECT_THAT(gone->kept, ElementsAre(keeper::Kept{1, 3}));
  EXPECT_FALSE(Alive(WaitStarted(0)->pid)) << "it has no connection";
  EXPECT_FALSE(Alive(WaitStarted(1)->pid)) << "it did not let go of its generation";
  EXPECT_TRUE(Alive(pid));
  GoOn(2, 0, 1, 3);
  const auto* started = WaitStarted(0, 2);
  ASSERT_NE(started, nullptr);
  EXPECT_EQ(started->pid, pid);
  const auto [kind, environment] = stays->Next();
  EXPECT_EQ(kind, kKeeperMember);
  EXPECT_EQ(environment, std::string("PATH=/usr/bin:/bin\0GTRAIN_GENERATION=2\0", 39));
  kill(static_cast<pid_t>(pid), SIGUSR1);
  ASSERT_TRUE(Until([&] {
    Pump();
    return Slurp(Path("next.out")) == "after\n";
  })) << "the log of its new rank has what it says from now on";
  EXPECT_EQ(Slurp(OutPath(3)), "before\n");
  stays->Send(kRankToAgent, "{\"type\":\"joined\"}");
  EXPECT_NE(
      Wait<keeper::RelayUp>([](const keeper::RelayUp& up) { return up.generation == 2 && up.rank == 0; }),
      nullptr);
  // Once more, and what it is known by is as which it was born.
  EndKeeping(2);
  Release(*stays, 2);
  ASSERT_NE(WaitGone(2), nullptr);
  EXPECT_THAT(WaitGone(2)->kept, ElementsAre(keeper::Kept{1, 3}));
  GoOn(3, 5, 1, 3);
  ASSERT_NE(WaitStarted(5, 3), nullptr);
  EXPECT_EQ(WaitStarted(5, 3)->pid, pid);
  End(keeper::End::kStop, 0, 3);
  const auto* exit = WaitExit(5, 3);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, Cause::kStopped);
  ASSERT_NE(WaitGone(3), nullptr);
  EXPECT_FALSE(Alive(pid));
}

// Beside a generation: it is told that it waits, its end ends nothing, and it becomes a member later.
TEST_F(KeeperKeptTest, AProcessThatComesUpBesideAGenerationJoinsALaterOne) {
  Start();
  LaunchBeside(2);
  const int64_t pid = WaitStarted(1)->pid, late = WaitStarted(2)->pid;
  const auto stays = Staying(0);
  FakeRank waits(dir_);
  Greet(waits, 1);
  Answer(waits);
  EXPECT_NE(WaitReady(0), nullptr) << "of a member it is told when it says so";
  const auto is_it = [](const keeper::Ready& ready) { return ready.rank == 1; };
  EXPECT_EQ(Wait<keeper::Ready>(is_it, absl::Milliseconds(200)), nullptr)
      << "who does not say that it stays cannot go on";
  ComeUp(waits);
  ASSERT_NE(WaitReady(1), nullptr);
  // The generation ends. Neither of them is ended, whether it has come up or not.
  EndKeeping(1);
  Release(*stays, 1);
  Answer(waits);
  const auto* gone = WaitGone();
  ASSERT_NE(gone, nullptr);
  EXPECT_THAT(gone->kept, ::testing::UnorderedElementsAre(keeper::Kept{1, 0}, keeper::Kept{1, 1}));
  EXPECT_THAT(gone->coming, ElementsAre(keeper::Kept{1, 2}));
  // Who has not come up cannot be a member, and waits on under another number.
  client_->Send(keeper::BeginGeneration{2, 2, 1 << 20, "note"});
  keeper::StartRank joins = Rank(0, {"sleep", "600"}, 2), on = Rank(1, {"sleep", "600"}, 2);
  std::tie(joins.born, joins.born_rank) = std::pair(1, 1);
  std::tie(on.born, on.born_rank, on.waits) = std::tuple(1, 2, true);
  client_->Send(joins);
  client_->Send(on);
  Pump();
  ASSERT_NE(WaitStarted(0, 2), nullptr);
  EXPECT_EQ(WaitStarted(0, 2)->pid, pid);
  ASSERT_NE(WaitStarted(1, 2), nullptr);
  EXPECT_EQ(WaitStarted(1, 2)->pid, late);
  for (int kind = waits.Next().first; kind != kKeeperMember; kind = waits.Next().first)
    ASSERT_EQ(kind, kKeeperRevoked);
  FakeRank comes(dir_);  // with the number under which it was started
  Greet(comes, 2);
  ComeUp(comes);
  ASSERT_NE(WaitReady(1, 2), nullptr);
  // A stop does not let it wait for who saves.
  End(keeper::End::kStop, 600'000, 2);
  ASSERT_NE(WaitExit(1, 2), nullptr);
  EXPECT_TRUE(Alive(pid)) << "it may save";
  End(keeper::End::kStopNow, 0, 2);
  ASSERT_NE(WaitGone(2), nullptr);
}

// P1: those that go on would wait for it. One that is stopped now came up like the other.
TEST_F(KeeperKeptTest, WhoWaitsAndDoesNotAnswerIsNotCountedOn_P1) {
  Start();
  LaunchBeside(2);
  const int64_t answers = WaitStarted(1)->pid, hangs = WaitStarted(2)->pid;
  const auto stays = Staying(0);
  FakeRank one(dir_), other(dir_);
  Greet(one, 1);
  Greet(other, 2);
  ComeUp(one);
  ComeUp(other);
  ASSERT_NE(WaitReady(1), nullptr);
  ASSERT_NE(WaitReady(2), nullptr);
  EndKeeping(1, 1000);
  Release(*stays, 1);
  EXPECT_EQ(one.Next().first, kKeeperRevoked);
  Answer(one);
  const auto* gone = WaitGone();
  ASSERT_NE(gone, nullptr);
  EXPECT_THAT(gone->kept, ::testing::UnorderedElementsAre(keeper::Kept{1, 0}, keeper::Kept{1, 1}));
  EXPECT_THAT(gone->coming, IsEmpty());
  EXPECT_TRUE(Alive(answers));
  EXPECT_FALSE(Alive(hangs));
  ASSERT_NE(WaitExit(2), nullptr);
  EXPECT_EQ(WaitExit(2)->cause, Cause::kStopped) << "it is no crash";
}

// An agent that no head takes lets the lease never run out, and gives it no place either.
TEST_F(KeeperKeptTest, NobodyWaitsForEver) {
  Start({"--longest-wait-ms", "300"});
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  const int64_t pid = WaitStarted(0)->pid;
  const auto stays = Staying(0);
  EndKeeping(1);
  Release(*stays, 1);
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_THAT(WaitGone()->kept, ElementsAre(keeper::Kept{1, 0}));
  EXPECT_TRUE(Until([&] {
    client_->Send(keeper::AckExit{1, 7});  // any word: an agent is there
    Pump();
    return !Alive(pid);
  }));
}

// What a rank started for itself (data loaders) stays with it; what the others left behind is ended.
TEST_F(KeeperKeptTest, ChildrenStayWithTheirProcess) {
  Start();
  Launch({"sleep 600 & echo $! > " + Path("helper") + "; wait",
          "(setsid sleep 600 & echo $! > " + Path("left") + "); exec sleep 600"});
  const int64_t helper = PidIn("helper"), left = PidIn("left");
  ASSERT_NE(WaitStarted(0), nullptr);
  const auto stays = Staying(0);
  EndKeeping(1);
  Release(*stays, 1);
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_TRUE(Alive(helper));
  EXPECT_FALSE(Alive(left));
  End(keeper::End::kReform, 0, 1);
  ASSERT_TRUE(Until([&] {
    Pump();
    return !Alive(helper) && !Alive(WaitStarted(0)->pid);
  })) << "an end that keeps nobody ends those that were kept";
}

// What a rank started and has let go of (a daemon of its own) is known by the token in its environment.
TEST_F(KeeperKeptTest, OrphansOfAProcessThatGoesOnStayToo) {
  Start();
  const std::string own = "export GTRAIN_TOKEN=" + Rank(0, {}).token + "; ";
  const std::string other = "export GTRAIN_TOKEN=" + Rank(1, {}).token + "; ";
  Launch({own + "(setsid sleep 600 & echo $! > " + Path("own") + "); exec sleep 600",
          other + "(setsid sleep 600 & echo $! > " + Path("other") + "); exec sleep 600"});
  const int64_t orphan = PidIn("own"), others = PidIn("other");
  const auto stays = Staying(0);
  EndKeeping(1);
  Release(*stays, 1);
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_TRUE(Alive(orphan));
  EXPECT_FALSE(Alive(others));
  End(keeper::End::kReform, 0, 1);
  EXPECT_TRUE(Until([&] {
    Pump();
    return !Alive(orphan);
  })) << "it ends with the process that started it";
}

// A person's stop comes while the process in the place of a lost one still starts: all are needed to save.
TEST_F(KeeperKeptTest, AStopWaitsForWhoIsAboutToJoin) {
  Start();
  Launch({"exec sleep 600", "trap 'exit 3' TERM; touch " + Path("ready") + "; while :; do sleep 0.05; done"});
  AwaitReady();
  const auto stays = Staying(0);
  End(keeper::End::kStop, 60000);
  Pump();
  ASSERT_EQ(stays->Next().first, kKeeperStop);
  FakeRank late(dir_);
  late.Hello(1, 1, Rank(1, {}).token);
  EXPECT_EQ(late.Next().first, kKeeperWelcome);
  EXPECT_EQ(late.Next().first, kKeeperStop) << "it hears of the stop, and was not ended before";
  EXPECT_TRUE(Alive(WaitStarted(1)->pid));
}

// A place that is bound to other hardware threads is one, too.
TEST_F(KeeperKeptTest, AProcessMovesToTheHardwareThreadsOfItsPlace) {
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  if (CPU_COUNT(&all) < 2) GTEST_SKIP() << "there is one hardware thread";
  int first = 0;
  while (!CPU_ISSET(first, &all)) ++first;
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  const auto pid = static_cast<pid_t>(WaitStarted(0)->pid);
  const auto stays = Staying(0);
  for (const bool bound : {true, false}) {
    const uint64_t generation = bound ? 1 : 2;
    EndKeeping(generation);
    Release(*stays, generation);
    ASSERT_NE(WaitGone(generation), nullptr);
    client_->Send(keeper::BeginGeneration{generation + 1, 1, 1 << 20, "note"});
    keeper::StartRank start = Rank(0, {"true"}, generation + 1);
    start.born = 1;
    if (bound) start.cpus = {first};
    client_->Send(start);
    ASSERT_NE(WaitStarted(0, generation + 1), nullptr);
    EXPECT_EQ(stays->Next().first, kKeeperMember);
    cpu_set_t now;
    ASSERT_EQ(sched_getaffinity(pid, sizeof(now), &now), 0);
    EXPECT_EQ(CPU_COUNT(&now), bound ? 1 : CPU_COUNT(&all));
    EXPECT_TRUE(WaitStarted(0, generation + 1)->other_cpus.empty());
  }
  EndKeeping(3);
  Release(*stays, 3);
  ASSERT_NE(WaitGone(3), nullptr);
  client_->Send(keeper::BeginGeneration{4, 1, 1 << 20, "note"});
  keeper::StartRank elsewhere = Rank(0, {"true"}, 4);
  elsewhere.born = 1;
  elsewhere.cpus = {CPU_SETSIZE - 1};  // is not there
  client_->Send(elsewhere);
  ASSERT_NE(WaitStarted(0, 4), nullptr);
  EXPECT_EQ(WaitStarted(0, 4)->other_cpus.size(), static_cast<size_t>(CPU_COUNT(&all))) << "read back";
}

TEST_F(KeeperKeptTest, WhoHasNoPlaceInTheNextGenerationIsEnded) {
  Start();
  Launch({"exec sleep 600", "exec sleep 600"});
  ASSERT_NE(WaitStarted(1), nullptr);
  const auto first = Staying(0), second = Staying(1);
  EndKeeping(1);
  Release(*first, 1);
  Release(*second, 1);
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_EQ(WaitGone()->kept.size(), 2u);
  GoOn(2, 0, 1, 1);
  ASSERT_NE(WaitStarted(0, 2), nullptr);
  EXPECT_EQ(WaitStarted(0, 2)->pid, WaitStarted(1)->pid);
  EXPECT_TRUE(Until([&] {
    Pump();
    return !Alive(WaitStarted(0)->pid);
  }));
  EXPECT_TRUE(Alive(WaitStarted(0, 2)->pid));
}

// P1: the rank of one that died while it waited, or that nobody can tell its place, has ended. One that is
// started in its place would let the others wait.
TEST_F(KeeperKeptTest, WhoCannotGoOnHasEnded_P1) {
  Start();
  // Starts rank 0 of the generation, which waits for another one then.
  std::unique_ptr<FakeRank> stays;
  const auto wait = [&](uint64_t generation) {
    const char* script = "echo words >&2; trap 'exit 0' USR1; while :; do sleep 0.05; done";
    client_->Send(keeper::BeginGeneration{generation, 1, 1 << 20, "note"});
    keeper::StartRank start = Rank(0, {"bash", "-c", script}, generation);
    start.err_path = Path(absl::StrCat("err-", generation));
    client_->Send(start);
    EXPECT_NE(WaitStarted(0, generation), nullptr);
    EXPECT_TRUE(Until([&] {
      Pump();
      return Slurp(Path(absl::StrCat("err-", generation))) == "words\n";
    }));
    stays = Staying(0, generation);
    EndKeeping(generation);
    Release(*stays, generation);
    EXPECT_NE(WaitGone(generation), nullptr);
    return WaitStarted(0, generation)->pid;
  };
  const auto ends = [&](int64_t pid) {
    return Until([&] {
      Pump();
      return !Alive(pid);
    });
  };
  const auto words = [](int generation, const std::string& how) {
    return absl::StrCat("its process, which was started as rank 0 of generation ", generation,
                        ", is not there any more", how);
  };
  // Whichever way it ends: who exits with 0 has not done its part in a generation that it never heard of.
  uint64_t generation = 1;
  for (const auto& [signal, how] :
       {std::pair(SIGKILL, "killed by SIGKILL (Killed)"), std::pair(SIGUSR1, "exited with code 0")}) {
    const int64_t pid = wait(generation);
    kill(static_cast<pid_t>(pid), signal);
    ASSERT_TRUE(ends(pid));
    GoOn(generation + 1, 0, generation, 0);
    const auto* exit = WaitExit(0, generation + 1);
    ASSERT_NE(exit, nullptr);
    EXPECT_EQ(std::tuple(exit->cause, exit->code, exit->signal, exit->pid),
              std::tuple(Cause::kLost, 0, 0, pid));
    EXPECT_EQ(exit->message, words(static_cast<int>(generation),
                                   absl::StrCat(": ", how, " while it waited for this generation")));
    EXPECT_EQ(exit->tail, "words\n") << "what it said last";
    const auto* gone = WaitGone(generation + 1);
    ASSERT_NE(gone, nullptr);
    EXPECT_THAT(std::pair(gone->kept, gone->coming), Pair(IsEmpty(), IsEmpty()));
    generation += 2;
  }
  // And of one whose connection has broken nobody knows how.
  const int64_t pid = wait(generation);
  stays.reset();
  LoseAgent();
  Attach();
  ASSERT_THAT(state_.kept, ElementsAre(keeper::Kept{generation, 0}))
      << "an agent that comes back hears of it";
  GoOn(generation + 1, 0, generation, 0);
  const auto* exit = WaitExit(0, generation + 1);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, Cause::kLost);
  EXPECT_THAT(exit->message, HasSubstr("does not answer any more"));
  EXPECT_TRUE(ends(pid)) << "and it has no place";
}

// P1: nor can one that was stopped meanwhile.
TEST_F(KeeperKeptTest, WhoIsStoppedWhileItWaitsIsLost_P1) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  const auto pid = static_cast<pid_t>(WaitStarted(0)->pid);
  const auto stays = Staying(0);
  EndKeeping(1);
  Release(*stays, 1);
  ASSERT_NE(WaitGone(), nullptr);
  kill(pid, SIGSTOP);
  ASSERT_TRUE(Until([&] {
    keeper::ProcessEntry process;
    return keeper::ReadProcess(pid, &process) && process.stopped;
  }));
  GoOn(2, 0, 1, 0);
  const auto* exit = WaitExit(0, 2);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, Cause::kLost);
  EXPECT_EQ(exit->message,
            "its process, which was started as rank 0 of generation 1, does not answer any more");
  EXPECT_TRUE(Until([&] {
    Pump();
    return !Alive(pid);
  })) << "and it has no place";
}

// The memory of a communicator whose users have unmapped it or died is that of the next one, in another
// generation and of another size, with zeros where they are wanted.
TEST_F(KeeperKeptTest, MemoryGoesFromGenerationToGeneration) {
  constexpr uint64_t kBytes = 1 << 20, kZeros = 100'000;
  Start();
  Launch({"exec sleep 600", "exec sleep 600"}, 1, 4 * kBytes);
  ASSERT_NE(WaitStarted(1), nullptr);
  const auto stays = Staying(0);
  auto dies = Staying(1);
  const auto arena = [](FakeRank& rank, uint64_t id, uint64_t bytes, uint64_t zeros) {
    rank.UsedArena(id, bytes, zeros);
    EXPECT_EQ(rank.Next().first, kKeeperArena);
    return rank.TakePassed();
  };
  const auto node = [](const UniqueFd& file) {
    struct stat info = {};
    EXPECT_EQ(fstat(file.get(), &info), 0);
    return std::pair(info.st_ino, info.st_size);
  };
  const UniqueFd first = arena(*stays, 7, kBytes, kZeros);
  EXPECT_EQ(node(arena(*dies, 7, kBytes, kZeros)), node(first));
  const UniqueFd all_zeros = arena(*stays, 8, kBytes, kBytes);
  for (const UniqueFd* file : {&first, &all_zeros})
    ASSERT_EQ(pwrite(file->get(), std::string(kBytes, 'x').data(), kBytes, 0), ssize_t{kBytes});
  dies->FreeArenaOf(7, 1);
  kill(static_cast<pid_t>(WaitStarted(1)->pid), SIGKILL);
  ASSERT_NE(WaitExit(1), nullptr);
  dies.reset();
  EndKeeping(1);
  Release(*stays, 1);
  ASSERT_NE(WaitGone(), nullptr);
  stays->FreeArenaOf(8, 1);
  // It has the first one mapped still: who asks gets another.
  client_->Send(keeper::BeginGeneration{2, 1, 4 * kBytes, "note"});
  keeper::StartRank start = Rank(0, {"sleep", "600"}, 2);
  std::tie(start.born, start.born_rank) = std::pair(1, 0);
  client_->Send(start);
  ASSERT_NE(WaitStarted(0, 2), nullptr);
  EXPECT_EQ(stays->Next().first, kKeeperMember);
  EXPECT_NE(node(arena(*stays, 7, kBytes, kZeros)).first, node(first).first);
  stays->FreeArenaOf(7, 2);
  stays->FreeArenaOf(7, 1);
  const UniqueFd again = arena(*stays, 9, kBytes + 4096, kZeros);
  EXPECT_EQ(node(again), std::pair(node(first).first, off_t{kBytes + 4096}));
  std::string found(kBytes + 4096, '?');
  ASSERT_EQ(pread(again.get(), found.data(), found.size(), 0), static_cast<ssize_t>(found.size()));
  EXPECT_EQ(found.substr(0, kZeros), std::string(kZeros, '\0'));
  EXPECT_EQ(found.substr(kBytes), std::string(4096, '\0')) << "nobody has been there";
  EXPECT_EQ(found[kBytes - 1], 'x');
  // What is to be zeros is nobody's old memory.
  const UniqueFd fresh = arena(*stays, 10, kBytes, kBytes);
  ASSERT_EQ(pread(fresh.get(), found.data(), kBytes, 0), ssize_t{kBytes});
  EXPECT_EQ(found.substr(0, kBytes), std::string(kBytes, '\0'));
}

// Survivors ask for memory as soon as they have heard of a loss.
TEST_F(KeeperKeptTest, MemoryOfADeadRankIsThatOfTheNextThatAsks) {
  constexpr uint64_t kBytes = 1 << 20;
  constexpr int kDie = 8;
  Start();
  Launch(std::vector<std::string>(1 + kDie, "exec sleep 600"), 1, 4 * kBytes);
  for (int rank = 0; rank <= kDie; ++rank) ASSERT_NE(WaitStarted(rank), nullptr);
  const auto stays = Staying(0);
  const auto keeper = static_cast<pid_t>(*KeeperPid(dir_));
  for (int rank = 1; rank <= kDie; ++rank) {
    // Another process has the connection: this one lives on, and could have the memory mapped.
    int word[2];
    ASSERT_EQ(pipe(word), 0);
    const pid_t speaks = fork();
    if (speaks == 0) {
      FakeRank dies(dir_);
      dies.Hello(1, static_cast<uint32_t>(rank), Rank(rank, {}).token);
      (void)dies.Next();
      dies.UsedArena(100 + static_cast<uint64_t>(rank), kBytes, 4096);
      (void)dies.Next();
      struct stat info = {};
      (void)fstat(dies.passed(), &info);
      if (write(word[1], &info.st_ino, sizeof(info.st_ino)) > 0) pause();
      _exit(1);
    }
    ino_t was = 0;
    EXPECT_EQ(read(word[0], &was, sizeof(was)), static_cast<ssize_t>(sizeof(was)));
    // The end of a process closes its connection before its parent hears of it.
    kill(keeper, SIGSTOP);
    kill(speaks, SIGKILL);
    EXPECT_EQ(waitpid(speaks, nullptr, 0), speaks);
    kill(static_cast<pid_t>(WaitStarted(rank)->pid), SIGKILL);
    EXPECT_TRUE(Until([&] { return !Alive(WaitStarted(rank)->pid); }));
    kill(keeper, SIGCONT);
    for (const int end : word) close(end);
    ASSERT_NE(WaitExit(rank), nullptr);
    stays->UsedArena(static_cast<uint64_t>(rank), kBytes, 4096);
    ASSERT_EQ(stays->Next().first, kKeeperArena);
    struct stat is = {};
    ASSERT_EQ(fstat(stays->passed(), &is), 0);
    EXPECT_EQ(is.st_ino, was) << "of rank " << rank;
    stays->FreeArenaOf(static_cast<uint64_t>(rank), 1);
  }
}

// Who lives may write to what it has mapped, whatever became of its connection.
TEST_F(KeeperKeptTest, MemoryOfAProcessThatLivesIsNobodyElses) {
  constexpr uint64_t kBytes = 1 << 20;
  Start();
  Launch({"exec sleep 600"}, 1, 4 * kBytes);
  ASSERT_NE(WaitStarted(0), nullptr);
  auto rank = Staying(0);
  rank->UsedArena(1, kBytes, 4096);
  ASSERT_EQ(rank->Next().first, kKeeperArena);
  struct stat was = {}, is = {};
  ASSERT_EQ(fstat(rank->passed(), &was), 0);
  rank = Staying(0);  // of this process, whose connection before is closed
  rank->UsedArena(2, kBytes, 4096);
  ASSERT_EQ(rank->Next().first, kKeeperArena);
  ASSERT_EQ(fstat(rank->passed(), &is), 0);
  EXPECT_NE(is.st_ino, was.st_ino);
}

// The keeper's own end, a lease that is over (P4) and a stop find those that wait, too.
TEST_F(KeeperKeptTest, ALeaseEndsThoseThatWait_P4) {
  Start();
  client_.reset();
  Attach(1500);
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  const int64_t pid = WaitStarted(0)->pid;
  const auto stays = Staying(0);
  EndKeeping(1);
  Release(*stays, 1);
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_TRUE(Alive(pid));
  LoseAgent();
  EXPECT_TRUE(Until([&] { return !Alive(pid); }));
  Attach();
  EXPECT_THAT(state_.kept, IsEmpty());
}

}  // namespace
}  // namespace gtrain::host
