// The real keeper binary with real processes. Each test speaks the agent's protocol through KeeperClient;
// waits are conditions with deadlines. When run as root the whole set runs a second time as an ordinary user
// (see main).
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/test_as_nobody.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/host/keeper_client.h"
#include "runtime/host/keeper_test_world.h"
#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/cgroup.h"
#include "runtime/keeper/log_stream.h"
#include "runtime/keeper/posix.h"

namespace gtrain::host {
namespace {

TEST_F(KeeperTest, ExitCodesSignalsAndLastWords) {  // P1
  Start();
  Launch({"echo fine; exit 0", "echo bad news >&2; exit 3", "kill -SEGV $$"});
  EXPECT_NE(WaitStarted(0), nullptr);
  const auto* first = WaitExit(0);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->cause, Cause::kExited);
  EXPECT_EQ(first->code, 0);
  EXPECT_EQ(first->tail, "fine\n");
  const auto* second = WaitExit(1);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->code, 3);
  EXPECT_EQ(second->tail, "bad news\n");
  const auto* third = WaitExit(2);
  ASSERT_NE(third, nullptr);
  EXPECT_EQ(third->cause, Cause::kSignal);
  EXPECT_EQ(third->signal, SIGSEGV);
  EXPECT_THAT(third->message, HasSubstr("SIGSEGV"));
  const auto* gone = WaitGone();
  ASSERT_NE(gone, nullptr);
  EXPECT_TRUE(gone->clean);
  EXPECT_EQ(Slurp(OutPath(0)), "fine\n");
  EXPECT_EQ(Slurp(ErrPath(1)), "bad news\n");
}

TEST_F(KeeperTest, ProgramThatCannotStartSaysWhy) {  // P17
  Start();
  client_->Send(keeper::BeginGeneration{1, 3, 0, ""});
  client_->Send(Rank(0, {"no-such-program"}));
  client_->Send(Rank(1, {"/etc/passwd"}));
  auto lost = Rank(2, {"true"});
  lost.cwd = "/no/such/directory";
  client_->Send(lost);
  const auto* missing = WaitExit(0);
  ASSERT_NE(missing, nullptr);
  EXPECT_EQ(missing->cause, Cause::kStartFailed);
  EXPECT_EQ(missing->code, 127);
  EXPECT_THAT(missing->message, HasSubstr("no-such-program"));
  EXPECT_THAT(missing->tail, HasSubstr("PATH=/usr/bin:/bin"));
  const auto* forbidden = WaitExit(1);
  ASSERT_NE(forbidden, nullptr);
  EXPECT_EQ(forbidden->code, 126);
  const auto* nowhere = WaitExit(2);
  ASSERT_NE(nowhere, nullptr);
  EXPECT_EQ(nowhere->cause, Cause::kStartFailed);
  EXPECT_THAT(nowhere->message, HasSubstr("/no/such/directory"));
  EXPECT_NE(WaitGone(), nullptr);
}

// A rank that has neither a process nor an exit is about to start; agents take "no process" for an exit that
// was acknowledged.
TEST_F(KeeperTest, AnAgentThatAttachesWhileRanksAreStartedDoesNotTakeThemForOver_P4) {
  Start();
  Launch({"exec sleep 600"});
  client_->Send(keeper::Attach{keeper::kAgentProtocol, 0});  // read in the same turn
  const auto* state = Wait<keeper::State>([](const keeper::State& s) { return !s.generations.empty(); });
  ASSERT_NE(state, nullptr);
  ASSERT_EQ(state->generations[0].ranks.size(), 1u);
  const keeper::RankHeld& rank = state->generations[0].ranks[0];
  EXPECT_FALSE(rank.running);
  EXPECT_EQ(rank.pid, 0);
  EXPECT_NE(WaitStarted(0), nullptr);
}

// To the kernel it is no error when it lets a process run on other CPUs than was asked for.
TEST_F(KeeperTest, CpusAreReadBackWhereTheyAreOthers) {
  Start();
  client_->Send(keeper::BeginGeneration{1, 2, 1 << 20, "note"});
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  std::vector<int32_t> all;
  for (int32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<size_t>(cpu), &allowed)) all.push_back(cpu);
  }
  for (const int rank : {0, 1}) {
    keeper::StartRank start = Rank(rank, {"sleep", "600"});
    start.cpus = {rank == 0 ? all.back() : CPU_SETSIZE - 1};  // the second is not there
    client_->Send(start);
  }
  const auto* as_asked = WaitStarted(0);
  ASSERT_NE(as_asked, nullptr);
  EXPECT_TRUE(as_asked->other_cpus.empty());
  const auto* otherwise = WaitStarted(1);
  ASSERT_NE(otherwise, nullptr);
  EXPECT_EQ(otherwise->other_cpus, all);
}

TEST_F(KeeperTest, DeathBeforeHelloIsReportedAtOnce) {  // P17
  Start();
  Launch({"exec sleep 600"});
  const auto* started = WaitStarted(0);
  ASSERT_NE(started, nullptr);
  kill(static_cast<pid_t>(started->pid), SIGKILL);
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, Cause::kSignal);
  EXPECT_EQ(exit->signal, SIGKILL);
  EXPECT_EQ(exit->pid, started->pid);
}

TEST_F(KeeperTest, EscapedProcessesDieWithTheGeneration) {  // P6
  Start();
  Launch({"setsid bash -c 'setsid sleep 600 & echo $! > escaped; disown' & wait; exec sleep 600"});
  const int64_t escaped = PidIn("escaped");
  ASSERT_GT(escaped, 0);
  ASSERT_TRUE(Alive(escaped));
  End(keeper::End::kReform, 200);
  const auto* gone = WaitGone();
  ASSERT_NE(gone, nullptr);
  EXPECT_TRUE(gone->clean);
  EXPECT_FALSE(Alive(escaped));
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, Cause::kStopped);
  EXPECT_THAT(exit->message, HasSubstr("the test says so"));
}

TEST_F(KeeperTest, GrandchildHoldingStdoutDelaysNothing) {  // P7
  Start();
  Launch({"sleep 600 & echo $! > holder; echo done"});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->code, 0);
  EXPECT_EQ(exit->tail, "done\n");
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_FALSE(Alive(PidIn("holder")));
}

TEST_F(KeeperTest, FloodOfOutputIsBoundedMarkedAndNeverBlocks) {  // P8
  Start({"--log-max", "1048576", "--log-burst", "1048576", "--log-rate", "65536"});
  // Far more than the limits, in one go; the last line must be there whatever was dropped.
  Launch({"head -c 100000000 /dev/zero | tr '\\0' y; echo; echo last words"});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_TRUE(absl::EndsWith(exit->tail, "last words\n"));
  ASSERT_NE(WaitGone(), nullptr);
  struct stat info;
  ASSERT_EQ(stat(OutPath(0).c_str(), &info), 0);
  EXPECT_LT(info.st_blocks * 512, 16 << 20);
  EXPECT_LT(info.st_size, 50000000);
  const std::string log = Slurp(OutPath(0));
  EXPECT_THAT(log.substr(0, log.size()), HasSubstr("bytes dropped]"));
  EXPECT_TRUE(absl::EndsWith(log, "last words\n"));
}

// A file system in a file, for faults of the log disk. Mounted by the first use, gone with the object.
class LoopDisk {
 public:
  LoopDisk(const std::string& image, const std::string& at, const std::string& size) : at_(at) {
    mkdir(at.c_str(), 0755);
    mounted_ = Run({"truncate", "-s", size, image}) && Run({"mkfs.ext4", "-q", "-m0", image}) &&
               Run({"mount", "-o", "loop", image, at});
  }
  ~LoopDisk() {
    Thaw();
    if (mounted_) (void)Run({"umount", "-l", at_});
  }
  bool mounted() const { return mounted_; }
  void Freeze() { frozen_ = Run({"fsfreeze", "-f", at_}); }
  void Thaw() {
    if (frozen_) frozen_ = !Run({"fsfreeze", "-u", at_});
  }
  bool frozen() const { return frozen_; }

 private:
  static bool Run(std::vector<std::string> words) {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_t pid = 0;
    int status = 0;
    return posix_spawnp(&pid, argv[0], nullptr, nullptr, argv.data(), environ) == 0 &&
           waitpid(pid, &status, 0) == pid && status == 0;
  }

  const std::string at_;
  bool mounted_ = false;
  bool frozen_ = false;
};

TEST_F(KeeperTest, StalledLogDiskHoldsNobody) {  // P8
  if (geteuid() != 0) GTEST_SKIP() << "needs root to mount and freeze a file system";
  LoopDisk disk(Path("image"), Path("disk"), "200M");
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount a file system in a file on this machine";
  Start({"--log-burst", "1000000000"});
  client_->Send(keeper::BeginGeneration{1, 1, 1 << 20, "note"});
  keeper::StartRank rank =
      Rank(0, {"bash", "-c",
               absl::StrCat("echo first; while ! test -e ", Path("go"),
                            "; do sleep 0.01; done; head -c 100000000 /dev/zero | tr '\\0' y; echo $$ > ",
                            Path("done"), "; while test -e ", Path("go"),
                            "; do sleep 0.01; done; echo; echo last words")});
  rank.out_path = Path("disk/out");
  client_->Send(rank);
  ASSERT_TRUE(Until([&] { return Pump(), Slurp(rank.out_path) == "first\n"; }));
  disk.Freeze();
  ASSERT_TRUE(disk.frozen());
  std::ofstream(Path("go")) << "\n";
  EXPECT_GT(PidIn("done"), 0) << "the rank waits for its log";
  const int64_t lives = PidIn("done");
  client_->Send(keeper::SignalRank{1, 0, SIGCONT});  // and the keeper still takes what it is told
  const auto* output = Wait<keeper::Output>([](const keeper::Output& o) { return o.bytes.size() > 1000; });
  EXPECT_NE(output, nullptr);
  EXPECT_EQ(kill(static_cast<pid_t>(lives), 0), 0);
  disk.Thaw();
  fs::remove(Path("go"));
  ASSERT_NE(WaitExit(0), nullptr);
  ASSERT_NE(WaitGone(), nullptr);
  const std::string log = Slurp(rank.out_path);
  EXPECT_THAT(log.substr(0, 100), HasSubstr("first\n"));
  EXPECT_THAT(log, HasSubstr(" bytes dropped]"));
  EXPECT_TRUE(absl::EndsWith(log, "last words\n"));
}

TEST_F(KeeperTest, FullLogDiskIsMarkedOnceThereIsRoom) {  // P8
  if (geteuid() != 0) GTEST_SKIP() << "needs root to mount a file system";
  LoopDisk disk(Path("image"), Path("disk"), "64M");
  if (!disk.mounted()) GTEST_SKIP() << "cannot mount a file system in a file on this machine";
  constexpr uint64_t kOutput = 20'000'000;
  constexpr uint64_t kRoom = 4'000'000;  // the disk takes a part of the output; without the ballast all of it
  const uint64_t space = fs::space(Path("disk")).free;
  ASSERT_GT(space, 2 * kOutput);
  UniqueFd ballast(open(Path("disk/ballast").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  ASSERT_EQ(posix_fallocate(ballast.get(), 0, static_cast<off_t>(space - kRoom)), 0);
  Start();
  client_->Send(keeper::BeginGeneration{1, 1, 1 << 20, "note"});
  keeper::StartRank rank = Rank(0, {"bash", "-c",
                                    absl::StrCat("head -c ", kOutput, " /dev/zero | tr '\\0' y; echo $$ > ",
                                                 Path("done"), "; while ! test -e ", Path("go"),
                                                 "; do echo more; sleep 0.05; done; echo; echo last words")});
  rank.out_path = Path("disk/out");
  client_->Send(rank);
  EXPECT_GT(PidIn("done"), 0) << "the rank waits for its log";
  // Room is made only after the disk refused something: what was refused is taken off the offset.
  ASSERT_NE(Wait<keeper::Output>([&](const keeper::Output& output) {
              return absl::EndsWith(output.bytes, "more\n") && output.end_offset < kOutput / 2;
            }),
            nullptr);
  ballast.reset();
  fs::remove(Path("disk/ballast"));
  ASSERT_TRUE(Until([&] { return Pump(), absl::StrContains(Slurp(rank.out_path), " bytes dropped]"); }));
  std::ofstream(Path("go")) << "\n";
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_TRUE(absl::EndsWith(Slurp(rank.out_path), "last words\n"));
}

TEST_F(KeeperTest, HugeLineOfBinaryBytesPassesThrough) {  // P9
  Start();
  Launch({"head -c 30000000 /dev/zero; printf '\\xff\\xfe\\033[31mend'"});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->tail.size(), keeper::kTailBytes);
  EXPECT_TRUE(absl::EndsWith(exit->tail, "\xff\xfe\033[31mend"));
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_EQ(fs::file_size(OutPath(0)), 30000000u + 10u);
}

TEST_F(KeeperTest, ZombieStormIsReaped) {  // P11
  Start();
  Launch({"for i in $(seq 300); do (setsid true &) ; done; exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  const int64_t keeper = *KeeperPid(dir_);
  EXPECT_TRUE(Until([&] {
    Pump();
    int children = 0;
    for (const auto& process : keeper::ListProcesses()) {
      if (process.parent == keeper && process.zombie) ++children;
    }
    return children == 0 && Slurp("/proc/" + std::to_string(keeper) + "/stat").size() > 0;
  }));
  End(keeper::End::kStopNow, 0);
  EXPECT_NE(WaitGone(), nullptr);
}

TEST_F(KeeperTest, IgnoredTermEndsInKillAfterTheGrace) {  // P13
  Start();
  Launch({"trap '' TERM; echo ready > ready; while true; do sleep 0.2; done"});
  ASSERT_TRUE(Until([&] {
    Pump();
    return fs::exists(Path("ready"));
  }));
  End(keeper::End::kStop, 300);
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, Cause::kStopped);
  EXPECT_EQ(exit->signal, SIGKILL);
  EXPECT_NE(WaitGone(), nullptr);
}

// The program of the ranks below: writes a letter for each SIGTERM, and never sleeps, so that two in a row
// are not taken for one.
TEST(RankProgram, CountsTerms) {
  if (std::getenv("TERMS") == nullptr) GTEST_SKIP() << "only for AStopSendsTermOnce";
  static int terms;
  terms = open(std::getenv("TERMS"), O_WRONLY | O_CREAT | O_CLOEXEC | O_APPEND, 0600);
  ASSERT_GE(terms, 0);
  static volatile sig_atomic_t heard;
  heard = 0;
  signal(SIGTERM, [](int) {
    heard = 1;
    if (write(terms, "t", 1) != 1) _exit(1);
  });
  ASSERT_EQ(write(terms, "r", 1), 1);
  const absl::Time give_up = absl::Now() + kPatience;
  while (!heard && absl::Now() < give_up) {
  }
  for (;;) pause();  // SIGKILL ends it
}

// A second one says to many programs that they shall not save.
TEST_F(KeeperTest, AStopSendsTermOnce) {
  constexpr int kRanks = 4;
  Start();
  client_->Send(keeper::BeginGeneration{1, kRanks, 1 << 20, "note"});
  const std::string self = fs::read_symlink("/proc/self/exe");
  const auto terms = [this](int rank) { return Path(absl::StrCat("terms-", rank)); };
  for (int i = 0; i < kRanks; ++i) {
    keeper::StartRank start = Rank(i, {self, "--gtest_filter=RankProgram.CountsTerms"});
    start.env.emplace_back("TERMS", terms(i));
    client_->Send(start);
  }
  ASSERT_TRUE(Until([&] {
    Pump();
    int ready = 0;
    for (int i = 0; i < kRanks; ++i) ready += Slurp(terms(i)).empty() ? 0 : 1;
    return ready == kRanks;
  }));
  End(keeper::End::kStop, 2000);  // ranks with the SDK, which these are not, get theirs near the end of it
  ASSERT_NE(WaitGone(), nullptr);
  for (int i = 0; i < kRanks; ++i) EXPECT_EQ(Slurp(terms(i)), "rt") << "rank " << i;
}

TEST_F(KeeperTest, CleanExitDuringAStopKeepsItsCode) {
  Start();
  Launch({"trap 'echo saved; exit 0' TERM; echo ready > ready; while true; do sleep 0.1; done"});
  ASSERT_TRUE(Until([&] {
    Pump();
    return fs::exists(Path("ready"));
  }));
  End(keeper::End::kStop, 30000);
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, Cause::kExited);
  EXPECT_EQ(exit->code, 0);
  EXPECT_NE(WaitGone(), nullptr);
}

TEST(Posix, AReusedPidIsNotSignalled_P14) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    pause();
    _exit(0);
  }
  keeper::ProcessEntry entry;
  ASSERT_TRUE(keeper::ReadProcess(child, &entry));
  keeper::ProcessEntry before = entry;
  --before.start_time;  // of the process that had this number before
  EXPECT_FALSE(keeper::SignalProcess(before, SIGKILL));
  EXPECT_TRUE(keeper::SignalProcess(entry, SIGTERM));
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << "the wrong one arrived";
}

TEST_F(KeeperTest, RanksInheritNoDescriptors) {  // P15
  Start();
  Launch({"ls -l /proc/self/fd | sed 's/.* -> //' ; ulimit -c"});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_THAT(exit->tail, ::testing::Not(HasSubstr("socket")));
  EXPECT_THAT(exit->tail, ::testing::Not(HasSubstr("memfd")));
  EXPECT_THAT(exit->tail, ::testing::Not(HasSubstr("anon_inode")));
  EXPECT_THAT(exit->tail, ::testing::EndsWith("0\n"));
}

TEST_F(KeeperTest, NewAgentGetsExitsOutputAndLiveRanks) {  // P4
  Start();
  Launch({"echo early; exec sleep 600", "while [ ! -e go ]; do sleep 0.05; done; echo late; exit 7"});
  const auto* first = WaitStarted(0);
  ASSERT_NE(first, nullptr);
  const int64_t pid = first->pid;
  ASSERT_NE(WaitStarted(1), nullptr);
  LoseAgent();
  std::ofstream(Path("go")) << "go";
  ASSERT_TRUE(Until([&] { return fs::exists(dir_ + "/exits/1"); }));
  EXPECT_TRUE(Alive(pid));
  Attach();
  ASSERT_EQ(state_.generations.size(), 1u);
  const keeper::GenerationHeld& held = state_.generations[0];
  EXPECT_EQ(held.note, "note");
  ASSERT_EQ(held.ranks.size(), 2u);
  EXPECT_TRUE(held.ranks[0].running);
  EXPECT_EQ(held.ranks[0].pid, pid);
  EXPECT_FALSE(held.ranks[1].running);
  ASSERT_EQ(held.unacked.size(), 1u);
  EXPECT_EQ(held.unacked[0].code, 7);
  EXPECT_EQ(held.unacked[0].tail, "late\n");
  const auto* output =
      Wait<keeper::Output>([](const keeper::Output& o) { return o.rank == 0 && !o.is_stderr; });
  ASSERT_NE(output, nullptr);
  EXPECT_EQ(output->bytes, "early\n");
  client_->Send(keeper::AckExit{1, 1});
  ASSERT_TRUE(Until([&] {
    Pump();
    return !fs::exists(dir_ + "/exits/1");
  }));
  End(keeper::End::kStopNow, 0);
  EXPECT_NE(WaitGone(), nullptr);
}

TEST_F(KeeperTest, AgentsOfNeighbouringVersionsAttach_N13) {
  Start();
  Launch({"exec sleep 600"});
  const auto* started = WaitStarted(0);
  ASSERT_NE(started, nullptr);
  const int64_t pid = started->pid;
  for (const int apart : {-2, -1, 1, 2}) {
    LoseAgent();
    Attach(0, static_cast<uint32_t>(static_cast<int>(keeper::kAgentProtocol) + apart));
    EXPECT_EQ(state_.protocol, keeper::kAgentProtocol);
    EXPECT_EQ(state_.generations.size(), std::abs(apart) <= 1 ? 1u : 0u) << apart;
    if (std::abs(apart) > 1) {
      EXPECT_TRUE(Until([&] {
        Pump();
        return closed_;
      }));
    }
    closed_ = false;
  }
  EXPECT_TRUE(Alive(pid));
  LoseAgent();
  Attach();
  End(keeper::End::kStopNow, 0);
  EXPECT_NE(WaitGone(), nullptr);
}

// A neighbour one version older leaves fields out, and a newer one adds some.
TEST(AgentFrames, OlderAndNewerOnesAreUnderstood_N13) {
  std::string stream;
  keeper::AppendFrame(keeper::Command(keeper::Notice{3, 119, 10, 7}), &stream);
  const auto body = [](std::string frame, int more) {
    keeper::AgentFrame header;
    std::memcpy(&header, frame.data(), sizeof(header));
    header.bytes = static_cast<uint32_t>(static_cast<int>(header.bytes) + more);
    frame.resize(static_cast<size_t>(static_cast<int>(frame.size()) + more), 'x');
    std::memcpy(frame.data(), &header, sizeof(header));
    return frame;
  };
  const auto take = [](const std::string& bytes, keeper::Command* command) {
    size_t used = 0;
    return keeper::TakeFrame(bytes, &used, command);
  };
  keeper::Command command;
  ASSERT_EQ(take(body(stream, -4), &command), keeper::Take::kMessage);
  EXPECT_EQ(command, keeper::Command(keeper::Notice{3, 119, 10, 0}));
  ASSERT_EQ(take(body(stream, 7), &command), keeper::Take::kMessage);
  EXPECT_EQ(command, keeper::Command(keeper::Notice{3, 119, 10, 7}));
  EXPECT_EQ(take(body(stream, -3), &command), keeper::Take::kBroken) << "in the middle of a field";
  std::string unknown = body(stream, 7);
  const uint32_t kind = std::variant_size_v<keeper::Command>;
  std::memcpy(unknown.data() + offsetof(keeper::AgentFrame, kind), &kind, sizeof(kind));
  ASSERT_EQ(take(unknown + stream, &command), keeper::Take::kMessage);
  EXPECT_EQ(command, keeper::Command(keeper::Notice{3, 119, 10, 7}));
}

TEST_F(KeeperTest, RanksEndWhenNoAgentComesBack) {  // P4
  Start();
  Attach(/*lease_ms=*/300);
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  LoseAgent();
  ASSERT_TRUE(Until([&] { return fs::exists(dir_ + "/exits/1"); }));
  Attach();
  ASSERT_EQ(state_.generations.size(), 1u);
  EXPECT_EQ(state_.highest_revoked, 1u);
  ASSERT_EQ(state_.generations[0].unacked.size(), 1u);
  EXPECT_EQ(state_.generations[0].unacked[0].cause, Cause::kStopped);
  EXPECT_THAT(state_.generations[0].unacked[0].message, HasSubstr("no agent came back"));
}

TEST_F(KeeperTest, AnAgentTooFarApartExtendsNoLease_P4) {
  Start();
  Attach(/*lease_ms=*/1000);
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  EXPECT_TRUE(Until([&] {  // started again and again
    LoseAgent();
    Attach(0, keeper::kAgentProtocol + 2);
    closed_ = false;
    return fs::exists(dir_ + "/exits/1");
  }));
  LoseAgent();
  Attach();  // for the end of this test
}

// Output that is written once the budget allows it again may be refused when nothing else happens any more.
TEST_F(KeeperTest, ARefusalIsToldWhoeverIsSilentThen_P8) {
  Start({"--log-burst", "1000"});
  Launch({absl::StrCat("mkdir ", OutPath(0), "; head -c 5000 /dev/zero | tr '\\0' y; exec sleep 600")});
  // A keeper that sleeps over it wakes up after a minute.
  const auto* refused =
      Wait<keeper::Output>([](const keeper::Output& output) { return output.refused != 0; }, kPatience / 2);
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->refused, EISDIR);
}

// The lease ends ranks without the SDK, also while an agent is attached that says nothing (fault N2).
TEST_F(KeeperTest, TheFenceEndsRanksThatMayWrite_N2) {
  Start();
  timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  const int64_t now_ms = int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
  client_->Send(keeper::Fence{now_ms + 600'000});
  Launch({"sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  client_->Send(keeper::Fence{now_ms + 1});                            // does not take back what was said
  client_->Send(keeper::Exec{7, 1, 0, {"/bin/sleep", "0.5"}, 60000});  // several ticks of the keeper
  ASSERT_NE(Wait<keeper::ExecDone>([](const keeper::ExecDone& done) { return done.id == 7; }), nullptr);
  EXPECT_EQ(Wait<keeper::Exited>([](const keeper::Exited&) { return true; }, absl::ZeroDuration()), nullptr);
  client_->Send(keeper::Quit{"the first half is over"});
  ASSERT_TRUE(Until([&] {
    Pump();
    return !KeeperPid(dir_).ok();
  }));
  seen_.clear();
  closed_ = false;
  RemoveKeeperDir(dir_);
  ASSERT_EQ(mkdir(dir_.c_str(), 0700), 0);
  Start();
  Launch({"sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  client_->Send(keeper::Fence{now_ms + 1});
  const keeper::Exited* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_THAT(exit->message, HasSubstr("no word from the head"));
  ASSERT_NE(WaitGone(), nullptr);
}

// An agent that waited for a slow disk says the end first. The generation is gone for it, or it would wait
// for ever.
TEST_F(KeeperTest, ABeginBehindItsEndIsGoneAtOnce_N2) {
  Start();
  Launch({"sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  End(keeper::End::kStopNow, 0, 2);
  ASSERT_NE(WaitGone(1), nullptr);
  Launch({"sleep 600"}, 2);
  ASSERT_NE(WaitGone(2), nullptr);
  client_->Send(keeper::Exec{9, 2, 0, {"/bin/true"}, 60000});
  const auto* refused = Wait<keeper::ExecDone>([](const keeper::ExecDone& done) { return done.id == 9; });
  ASSERT_NE(refused, nullptr);
  EXPECT_FALSE(refused->ok) << "its rank never began";
}

// X6: descent tells an agent from a rank, which is of the same user.
TEST_F(KeeperTest, ARankIsNoAgentAndNoKeeper_X6) {
  Start();
  const std::string listener = Path("other");
  ASSERT_EQ(mkdir(listener.c_str(), 0700), 0);
  Launch(
      {"exec python3 -c \"import socket, time\n"
       "agent = socket.socket(socket.AF_UNIX)\n"
       "agent.settimeout(20)\n"
       "agent.connect('k/agent.sock')\n"
       "try:\n"
       "  refused = agent.recv(1) == b''\n"
       "except ConnectionError:\n"
       "  refused = True\n"
       "print('refused' if refused else 'heard', flush=True)\n"
       "keeper = socket.socket(socket.AF_UNIX)\n"
       "keeper.bind('other/agent.sock')\n"
       "keeper.listen()\n"
       "print('listens', flush=True)\n"
       "time.sleep(600)\""});
  ASSERT_TRUE(Until([&] {
    Pump();
    return absl::StrContains(Slurp(OutPath(0)), "listens");
  })) << Slurp(ErrPath(0));
  EXPECT_THAT(Slurp(OutPath(0)), HasSubstr("refused"));
  EXPECT_FALSE(closed_) << "the agent that is attached stays";
  EXPECT_THAT(KeeperClient::Connect(listener).status().message(), HasSubstr("not that of a keeper"));
}

TEST_F(KeeperTest, SocketsThatWereRemovedAreMadeAnew_P4) {
  Start();
  Launch({"exec sleep 600"});
  const auto* started = WaitStarted(0);
  ASSERT_NE(started, nullptr);
  const int64_t rank = started->pid;
  for (const char* name : {"/agent.sock", "/rank.sock"}) ASSERT_EQ(unlink((dir_ + name).c_str()), 0);
  LoseAgent();
  Attach();
  ASSERT_EQ(state_.generations.size(), 1u);
  ASSERT_EQ(state_.generations[0].ranks.size(), 1u);
  EXPECT_TRUE(state_.generations[0].ranks[0].running);
  EXPECT_EQ(state_.generations[0].ranks[0].pid, rank);
  EXPECT_TRUE(Until([&] { return fs::exists(dir_ + "/rank.sock"); }));
}

TEST_F(KeeperTest, TheSocketOfRanksIsThereBeforeAGeneration) {
  Start();
  ASSERT_EQ(unlink((dir_ + "/rank.sock").c_str()), 0);
  Launch({"test -S \"$GTRAIN_KEEPER_SOCKET\""});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->code, 0);
}

// No agent could ever find it again.
TEST_F(KeeperTest, WithoutItsDirectoryItEndsItsRanks) {
  Start();
  Launch({"exec sleep 600"});
  const auto* started = WaitStarted(0);
  ASSERT_NE(started, nullptr);
  const int64_t rank = started->pid, keeper = *KeeperPid(dir_);
  LoseAgent();
  fs::remove_all(dir_);
  EXPECT_TRUE(Until([&] { return !Alive(rank) && !Alive(keeper); }));
}

TEST_F(KeeperTest, KilledKeeperLeavesRanksThatCanBeFoundAndEnded) {
  Start();
  Launch({"setsid bash -c 'echo $$ > escaped; exec sleep 600' & exec sleep 600"});
  const auto* started = WaitStarted(0);
  ASSERT_NE(started, nullptr);
  const int64_t escaped = PidIn("escaped");
  // In the middle of an exec its environment, by which it is found, cannot be read.
  ASSERT_TRUE(Until([&] { return Slurp(absl::StrCat("/proc/", escaped, "/comm")) == "sleep\n"; }));
  kill(static_cast<pid_t>(*KeeperPid(dir_)), SIGKILL);
  ASSERT_TRUE(Until([&] {
    Pump();
    return closed_;
  }));
  client_.reset();
  EXPECT_TRUE(Alive(started->pid));
  EXPECT_FALSE(LeftNobody(dir_));
  EXPECT_TRUE(Until([&] { return KillOrphans(dir_) == 0; }));
  EXPECT_FALSE(Alive(started->pid));
  EXPECT_FALSE(Alive(escaped));
}

// The agent then need not look through all processes of the machine.
TEST_F(KeeperTest, AKeeperThatLeavesInOrderSaysThatNobodyIsLeft) {
  Start();
  Launch({"setsid sleep 600 & exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  EXPECT_FALSE(LeftNobody(dir_));
  client_->Send(keeper::Quit{"the job is over"});
  ASSERT_TRUE(Until([&] {
    Pump();
    return closed_;
  }));
  EXPECT_TRUE(Until([&] { return LeftNobody(dir_); }));
  EXPECT_EQ(KillOrphans(dir_), 0u);
}

TEST_F(KeeperTest, ExitsOutliveTheKeeper_P4) {
  Start();
  Launch({"exit 7", "exec sleep 600"});
  ASSERT_NE(WaitExit(0), nullptr);
  ASSERT_NE(WaitStarted(1), nullptr);
  kill(static_cast<pid_t>(*KeeperPid(dir_)), SIGKILL);
  ASSERT_TRUE(Until([&] { return !KeeperPid(dir_).ok(); }));
  client_.reset();
  const std::vector<keeper::Exited> exits = ReadExitRecords(dir_);
  ASSERT_EQ(exits.size(), 1u);
  EXPECT_EQ(exits[0].rank, 0);
  EXPECT_EQ(exits[0].code, 7);
  EXPECT_TRUE(Until([&] { return KillOrphans(dir_) == 0; }));
}

// A keeper that dies between the two must leave the zombie or the record. Here it hangs in writing the
// record.
TEST_F(KeeperTest, ExitsAreRecordedBeforeTheyAreReaped_P4) {
  if (geteuid() != 0)
    GTEST_SKIP() << "only root sees which call a keeper is in: it hides from its own user (X6)";
  Start();
  const std::string record = dir_ + "/exits/1";
  ASSERT_EQ(mkfifo(record.c_str(), 0600), 0);  // without a reader its open waits
  ASSERT_EQ(mkfifo(Path("go").c_str(), 0600), 0);
  Launch({"read word < go; exit 7"});
  ASSERT_NE(WaitStarted(0), nullptr);
  { std::ofstream(Path("go")) << "go\n"; }
  const pid_t rank = static_cast<pid_t>(WaitStarted(0)->pid);
  const std::string call = absl::StrCat("/proc/", *KeeperPid(dir_), "/syscall");
  const std::string in_open = absl::StrCat(SYS_openat, " ");
  ASSERT_TRUE(Until([&] { return absl::StartsWith(Slurp(call), in_open); }));
  keeper::ProcessEntry entry;
  EXPECT_TRUE(keeper::ReadProcess(rank, &entry) && entry.zombie) << "reaped, and its status is nowhere";
  UniqueFd reader(open(record.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ASSERT_TRUE(reader.valid());
  ASSERT_NE(WaitExit(0), nullptr);
  EXPECT_EQ(WaitExit(0)->code, 7);
}

TEST_F(KeeperTest, RevokedGenerationNeverStarts) {
  Start();
  End(keeper::End::kReform, 0, 5);
  Launch({"touch started"}, 5);
  Launch({"touch right"}, 6);
  ASSERT_NE(WaitExit(0, 6), nullptr);
  EXPECT_TRUE(fs::exists(Path("right")));
  EXPECT_FALSE(fs::exists(Path("started")));
  LoseAgent();
  Attach();
  EXPECT_EQ(state_.highest_revoked, 5u) << "the next agent would let an old grant pass";
  EXPECT_EQ(state_.highest_stopped, 0u) << "it was re-formed";
  for (const auto& held : state_.generations)
    EXPECT_TRUE(held.generation != 5 || (held.gone && held.ranks.empty())) << "it began";
}

TEST_F(KeeperTest, TwoGenerationsEndSeparately) {
  Start();
  Launch({"setsid sleep 600 & echo $! > old; exec sleep 600"}, 1);
  ASSERT_NE(WaitStarted(0, 1), nullptr);
  Launch({"setsid sleep 600 & echo $! > new; exec sleep 600"}, 2);
  ASSERT_NE(WaitStarted(0, 2), nullptr);
  const int64_t old_child = PidIn("old"), new_child = PidIn("new");
  End(keeper::End::kReform, 100, 1);
  ASSERT_NE(WaitGone(1), nullptr);
  EXPECT_FALSE(Alive(old_child));
  EXPECT_TRUE(Alive(new_child));
  End(keeper::End::kStopNow, 0, 2);
  ASSERT_NE(WaitGone(2), nullptr);
  EXPECT_FALSE(Alive(new_child));
}

TEST_F(KeeperTest, ReportFileIsForwardedAndTruncationSurvives) {
  Start();
  Launch({"echo '{\"step\":1}' >> report-0; echo '{\"step\":2}' >> report-0; exec sleep 600"});
  auto start = Rank(0, {"true"});
  ASSERT_NE(WaitStarted(0), nullptr);
  std::ofstream(start.report_path, std::ios::app) << "{\"step\":3}\n";
  const auto forwarded = [&](const std::string& line) {
    return Wait<keeper::ReportBytes>(
        [&](const keeper::ReportBytes& report) { return absl::StrContains(report.bytes, line); },
        kPatience / 2);  // a keeper that sleeps over it wakes up after a minute
  };
  // The keeper may have read the first two before the third was there.
  EXPECT_NE(forwarded("{\"step\":3}\n"), nullptr);
  std::ofstream(start.report_path, std::ios::trunc) << "{\"step\":4}\n";
  EXPECT_NE(forwarded("{\"step\":4}\n"), nullptr);
}

// A user may have 128 instances of inotify: keepers leave some to programs of other people, and look for
// reports by themselves then, every second.
TEST_F(KeeperTest, TheLastInstancesOfInotifyAreLeftToOthers) {
  std::vector<UniqueFd> taken;
  do {
    taken.emplace_back(inotify_init1(IN_CLOEXEC));
  } while (taken.back().valid() && taken.size() < 4096);
  if (taken.size() >= 4096) GTEST_SKIP() << "a user may have more than 4,096 instances here";
  taken.resize(taken.size() - 1 - std::min<size_t>(8, taken.size() - 1));
  Start();
  Launch({"echo '{\"step\":1}' >> report-0; exec sleep 600"});
  auto start = Rank(0, {"true"});
  ASSERT_NE(WaitStarted(0), nullptr);
  // Only root may look into a keeper: it lets no debugger at itself.
  std::error_code closed;
  for (const auto& fd :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", *KeeperPid(dir_), "/fd"), closed)) {
    std::error_code gone;
    EXPECT_NE(std::filesystem::read_symlink(fd, gone), "anon_inode:inotify");
  }
  EXPECT_EQ(static_cast<bool>(closed), geteuid() != 0) << closed;
  EXPECT_TRUE(UniqueFd(inotify_init1(IN_CLOEXEC)).valid()) << "for somebody else";
  const auto forwarded = [&](const std::string& line) {
    return Wait<keeper::ReportBytes>(
        [&](const keeper::ReportBytes& report) { return absl::StrContains(report.bytes, line); },
        kPatience / 2);
  };
  EXPECT_NE(forwarded("{\"step\":1}\n"), nullptr);
  std::ofstream(start.report_path, std::ios::app) << "{\"step\":2}\n";
  EXPECT_NE(forwarded("{\"step\":2}\n"), nullptr);
}

TEST_F(KeeperTest, ExecRunsBesideTheRank) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  client_->Send(keeper::Exec{9, 1, 0, {"bash", "-c", "pwd; echo g=$GTRAIN_GENERATION; exit 4"}, 30000});
  const auto* done = Wait<keeper::ExecDone>([](const keeper::ExecDone& d) { return d.id == 9; });
  ASSERT_NE(done, nullptr);
  EXPECT_TRUE(done->ok);
  EXPECT_EQ(done->status, 4);
  EXPECT_THAT(done->output, HasSubstr(fs::path(base_).filename().string()));
  EXPECT_THAT(done->output, HasSubstr("g=1"));
  client_->Send(keeper::Exec{10, 1, 0, {"sleep", "600"}, 100});
  const auto* late = Wait<keeper::ExecDone>([](const keeper::ExecDone& d) { return d.id == 10; });
  ASSERT_NE(late, nullptr);
  EXPECT_THAT(late->output, HasSubstr("longer than its limit of 100 ms"));
}

TEST_F(KeeperTest, ExecBeyondTheMostThereMayBeSaysSo) {
  Start();
  Launch({"sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  const auto wait = [&](uint64_t id) {
    return Wait<keeper::ExecDone>([id](const keeper::ExecDone& d) { return d.id == id; });
  };
  client_->Send(keeper::Exec{1, 1, 0, {}, 60000});
  const auto* empty = wait(1);
  ASSERT_NE(empty, nullptr);
  EXPECT_EQ(empty->output, "no command was given");
  for (uint64_t id = 10; id < 26; ++id) client_->Send(keeper::Exec{id, 1, 0, {"sleep", "600"}, 60000});
  client_->Send(keeper::Exec{30, 1, 0, {"true"}, 60000});
  const auto* refused = wait(30);
  ASSERT_NE(refused, nullptr);
  EXPECT_FALSE(refused->ok);
  EXPECT_THAT(refused->output, HasSubstr("16 commands run beside the ranks of this job on this machine"));
}

TEST_F(KeeperTest, WithoutVersionTwoTheFreezerEndsEveryMember_P6) {
  if (access("/sys/fs/cgroup/freezer/cgroup.procs", W_OK) != 0) {
    GTEST_SKIP() << "needs a writable v1 freezer hierarchy";
  }
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "a fork of a fork hangs in ThreadSanitizer's run time";
#endif
  keeper::Cgroup::UseUnified(false);
  keeper::Cgroup group;
  const std::string name = absl::StrCat(getpid(), "-1");
  group.Create(name, {0, 64});
  keeper::Cgroup::UseUnified(true);
  const std::string dir = absl::StrCat("/sys/fs/cgroup/freezer/gtrain-", name);
  const pid_t child = fork();
  if (child == 0) {
    group.Enter();
    for (int i = 0; i < 20; ++i) {  // children of children, each in a session of its own
      if (fork() == 0) {
        setsid();
        if (fork() == 0) pause();
        pause();
      }
    }
    pause();
    _exit(0);
  }
  const auto members = [&] {
    const std::string pids = keeper::ReadSmallFile(dir + "/cgroup.procs");
    return std::count(pids.begin(), pids.end(), '\n');
  };
  ASSERT_TRUE(Until([&] { return members() == 41; }));
  EXPECT_TRUE(group.Kill());
  EXPECT_TRUE(Until([&] {
    waitpid(child, nullptr, WNOHANG);
    return members() == 0;
  }));
  group.Remove();
  EXPECT_NE(access(dir.c_str(), F_OK), 0);
}

TEST_F(KeeperTest, OutOfMemoryIsNamed) {  // P2
  if (access("/sys/fs/cgroup/memory/cgroup.procs", W_OK) != 0) {
    GTEST_SKIP() << "no writable memory control group on this machine";
  }
  Start();
  client_->Send(keeper::BeginGeneration{1, 1, 0, ""});
  auto hog = Rank(0, {"bash", "-c", "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}"});
  hog.argv = {"python3", "-c", "x = bytearray(300 << 20); print(len(x))"};
  hog.memory_limit = 64 << 20;
  client_->Send(hog);
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, Cause::kOom) << exit->message << exit->tail;
  EXPECT_THAT(exit->message, HasSubstr("64 MiB"));
}

// ---------------------------------------------------------------- the rank socket

class KeeperCostTest : public KeeperTest {
 protected:
  // System calls that read and write, of the keeper so far: a scan of /proc makes one or more a process. -1:
  // they may not be looked at.
  int64_t Calls() const {
    const std::string text = Slurp(absl::StrCat("/proc/", *KeeperPid(dir_), "/io"));
    int64_t sum = 0;
    for (const char* word : {"syscr: ", "syscw: "}) {
      const size_t at = text.find(word);
      if (at == std::string::npos) return -1;
      sum += std::atoll(text.c_str() + at + std::strlen(word));
    }
    return sum;
  }
  double CpuSeconds() const {
    return std::atof(Slurp(absl::StrCat("/proc/", *KeeperPid(dir_), "/schedstat")).c_str()) / 1e9;
  }
  // The system calls for each of `ranks` ranks that do nothing, from the start of the generation to its end.
  double CallsARank(int ranks, uint64_t generation) {
    const int64_t before = Calls();
    const double cpu = CpuSeconds();
    client_->Send(keeper::BeginGeneration{generation, static_cast<uint32_t>(ranks), 1 << 20, "note"});
    for (int i = 0; i < ranks; ++i) client_->Send(Rank(i, {"true"}, generation));
    const keeper::Gone* gone = WaitGone(generation);
    EXPECT_NE(gone, nullptr);
    const double calls = static_cast<double>(Calls() - before) / ranks;
    std::printf("%d ranks: %.1f reads and writes, %.0f us of the keeper's CPU a rank\n", ranks, calls,
                1e6 * (CpuSeconds() - cpu) / ranks);
    seen_.clear();
    return calls;
  }
};

// Issue 16, item 11: what an exit costs does not grow with the number of ranks. CPU time is printed alone.
TEST_F(KeeperCostTest, AnExitCostsTheSameHoweverManyRanksThereAre) {
  Start();
  if (Calls() < 0) GTEST_SKIP() << "the keeper hides from this user";
  const double few = CallsARank(200, 1), many = CallsARank(2000, 2);
  EXPECT_LT(many, 1.5 * few);
}

// Run as root, it runs the same tests again as `nobody`, who has no control groups to write to.
TEST(OrdinaryUser, AllTestsPassAsNobody) {
  if (geteuid() != 0) GTEST_SKIP() << "already an ordinary user";
  const std::string bin = fs::path(KeeperBinary()).parent_path();
  const RunAsNobody run =
      RunTestsAsNobody({bin + "/gtrain-keeper", bin + "/gtrain-writer"}, "KeeperTest.*:-*Flood*:*Binary*");
  EXPECT_EQ(run.status, 0) << run.output;
}

}  // namespace
}  // namespace gtrain::host
