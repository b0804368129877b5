#include <errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/available_memory.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/folder.h"
#include "base/fork_guard.h"
#include "base/ids.h"
#include "base/json_depth.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/path.h"
#include "base/pattern.h"
#include "base/rng.h"
#include "base/run_folder.h"
#include "base/test_folder.h"
#include "base/units.h"
#include "base/utf8.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

TEST(Units, BytesRoundTrip) {
  EXPECT_EQ(*ParseBytes("512"), 512u);
  EXPECT_EQ(*ParseBytes("1GiB"), 1u << 30);
  EXPECT_EQ(*ParseBytes("64Ki"), 65536u);
  EXPECT_EQ(*ParseBytes("2MB"), 2'000'000u);
  EXPECT_EQ(PrintBytes(1 << 30), "1GiB");
  EXPECT_EQ(PrintBytes(0), "0B");
  for (const char* bad :
       {"", "GiB", "010", "-1", "1e3", "0x10", "1 GiB", "1Gib", "99999999999999999999", "9999999999TiB"}) {
    EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
  }
}

TEST(Units, DurationRoundTrip) {
  for (const char* text : {"500ms", "30s", "15m", "24h", "2d"}) {
    if (std::string(text) == "24h") {
      EXPECT_EQ(PrintDuration(*ParseDuration(text)), "1d");
    } else {
      EXPECT_EQ(PrintDuration(*ParseDuration(text)), text);
    }
  }
  for (const char* bad : {"", "30", "s", "1.5h", "-1s", "1y", "007s"})
    EXPECT_FALSE(ParseDuration(bad).ok()) << bad;
}

TEST(RngTest, EqualSeedsGiveEqualSequences) {
  Rng a(7), b(7), c(8);
  EXPECT_EQ(a.Next(), b.Next());
  EXPECT_NE(a.Next(), c.Next());
  for (int i = 0; i < 1000; ++i) EXPECT_LT(a.Below(3), 3u);
}

TEST(MutexTest, EveryUnlockWakesWhoeverWaits) {
  Mutex mutex;
  int turn = 0;
  std::vector<std::thread> threads;
  for (int me = 0; me < 3; ++me) {
    threads.emplace_back([&, me] {
      for (int round = 0; round < 100; ++round) {
        MutexLock lock(&mutex);
        EXPECT_TRUE(mutex.AwaitFor(absl::Seconds(60), [&] { return turn % 3 == me; }));
        ++turn;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(turn, 300);
}

// A thread that changes something and then waits itself has unlocked too.
TEST(MutexTest, WaitingWakesTheOthers) {
  Mutex mutex;
  int looks = 0;
  bool asked = false, answered = false;
  std::thread other([&] {
    MutexLock lock(&mutex);
    EXPECT_TRUE(mutex.AwaitFor(absl::Seconds(60), [&] { return ++looks, asked; }));
    answered = true;
  });
  {
    MutexLock lock(&mutex);
    EXPECT_TRUE(mutex.AwaitFor(absl::Seconds(60), [&] { return looks > 0; }));
    asked = true;  // the other waits already, and nothing unlocks but the next line
    EXPECT_TRUE(mutex.AwaitFor(absl::Seconds(60), [&] { return answered; }));
  }
  other.join();
}

TEST(MutexTest, TimeIsBoundedAndForeverIsNoOverflow) {
  Mutex mutex;
  MutexLock lock(&mutex);
  EXPECT_FALSE(mutex.AwaitFor(absl::Milliseconds(1), [] { return false; }));
  EXPECT_FALSE(mutex.AwaitFor(-absl::InfiniteDuration(), [] { return false; }));
  EXPECT_TRUE(mutex.AwaitFor(absl::ZeroDuration(), [] { return true; }));
  int looks = 0;
  std::thread other([&] { MutexLock lock(&mutex); });
  EXPECT_TRUE(mutex.AwaitFor(absl::InfiniteDuration(), [&] { return ++looks == 2; }));
  other.join();
}

TEST(File, ReadRefusesWhatIsNotARegularFile) {
  EXPECT_EQ(ReadFile("/", 10).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadFile("/dev/zero", 10).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadFile("/nowhere/at/all", 10).status().code(), absl::StatusCode::kNotFound);
}

TEST(File, DurableWriteReplacesWhole) {
  const std::string path = TestFolder() + "/file";
  ASSERT_TRUE(WriteFileDurable(path, "one").ok());
  ASSERT_TRUE(WriteFileDurable(path, "two").ok());
  EXPECT_EQ(*ReadFile(path, 10), "two");
  EXPECT_EQ(ReadFile(path, 2).status().code(), absl::StatusCode::kResourceExhausted);
  struct stat st;
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
}

// X20: the name of the temporary file can be guessed.
TEST(File, DurableWriteFollowsNoLinkInItsPlace) {
  const std::string folder = TestFolder(), path = folder + "/file", victim = folder + "/victim";
  ASSERT_TRUE(WriteFileDurable(victim, "precious").ok());
  ASSERT_EQ(link(victim.c_str(), absl::StrCat(path, ".tmp.", getpid()).c_str()), 0);
  ASSERT_EQ(symlink(victim.c_str(), path.c_str()), 0);
  ASSERT_TRUE(WriteFileDurable(path, "new").ok());
  EXPECT_EQ(*ReadFile(path, 10), "new");
  EXPECT_EQ(*ReadFile(victim, 10), "precious");
}

std::string NameOfFolder(const UniqueFd& folder) {
  std::error_code error;
  return std::filesystem::read_symlink(absl::StrCat("/proc/self/fd/", folder.get()), error);
}

TEST(Folder, FollowsOwnLinksOnTheWay) {
  const std::string base = TestFolder(), real = base + "/real";
  ASSERT_TRUE(MakeDirs(real + "/below").ok());
  ASSERT_EQ(symlink(real.c_str(), (base + "/absolute").c_str()), 0);
  ASSERT_EQ(symlink("./absolute/../real", (base + "/relative").c_str()), 0);
  ASSERT_EQ(symlink("loop", (base + "/loop").c_str()), 0);
  EXPECT_EQ(NameOfFolder(OpenFolder(base + "/absolute/below/")), real + "/below");
  EXPECT_EQ(NameOfFolder(OpenFolder(base + "//relative/./below")), real + "/below");
  EXPECT_EQ(NameOfFolder(OpenFolder(base + "/relative/new/er", {.make = true})), real + "/new/er");
  const auto [folder, name] = OpenFolderOf(base + "/relative/file");
  EXPECT_EQ(NameOfFolder(folder), real);
  EXPECT_EQ(name, "file");
  std::string why;
  EXPECT_FALSE(OpenFolder(base + "/nothing/here", {.why = &why}).valid());
  EXPECT_EQ(errno, ENOENT);
  EXPECT_THAT(why, testing::HasSubstr(base + "/nothing/here: No such file or directory"));
  EXPECT_FALSE(OpenFolder(base + "/loop").valid());
  EXPECT_EQ(errno, ELOOP);
}

TEST(Folder, InsideNoLinkIsFollowedWhoeverMadeIt) {
  const std::string base = TestFolder();
  ASSERT_TRUE(MakeDirs(base + "/run").ok());
  const UniqueFd run = OpenFolder(base + "/run");
  ASSERT_TRUE(OpenFolderInside(run, "logs/generation-1", {.make = true}).valid());
  EXPECT_EQ(NameOfFolder(OpenFolderInside(run, "logs/generation-1")), base + "/run/logs/generation-1");
  ASSERT_EQ(symlink(base.c_str(), (base + "/run/ranks").c_str()), 0);
  std::string why;
  EXPECT_FALSE(OpenFolderInside(run, "ranks/generation-1", {.make = true, .why = &why}).valid());
  EXPECT_EQ(errno, ELOOP);
  EXPECT_THAT(why, testing::HasSubstr("ranks of ranks/generation-1 is a symbolic link"));
  EXPECT_NE(access((base + "/generation-1").c_str(), F_OK), 0);
}

// X20: what an ordinary user may prepare for root, or one user for another.
TEST(Folder, NothingOfAnotherUserLeadsAnywhere) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can make what belongs to another user";
  constexpr uid_t kStranger = 65534;
  const std::string base = TestFolder(), link = base + "/link", folder = base + "/folder";
  ASSERT_EQ(symlink(base.c_str(), link.c_str()), 0);
  ASSERT_TRUE(OpenFolder(link).valid());
  ASSERT_EQ(lchown(link.c_str(), kStranger, kStranger), 0);
  std::string why;
  EXPECT_FALSE(OpenFolder(link, {.why = &why}).valid());
  EXPECT_EQ(errno, EPERM);
  EXPECT_THAT(why,
              testing::HasSubstr("symbolic link link in " + link + " belongs to another user (uid 65534)"));
  ASSERT_TRUE(MakeDirs(folder).ok());
  ASSERT_EQ(chown(folder.c_str(), kStranger, kStranger), 0);
  EXPECT_FALSE(OpenFolder(folder, {.why = &why}).valid());
  EXPECT_EQ(errno, EPERM);
  EXPECT_THAT(why, testing::HasSubstr(folder + " belongs to another user (uid 65534)"));
  EXPECT_TRUE(OpenFolder(folder, {.to_read = true}).valid());
  EXPECT_TRUE(std::filesystem::is_empty(folder)) << "the look at whose files are left nothing";
  // A folder of ours below one of theirs: where many may write, each has one of its own.
  EXPECT_TRUE(OpenFolder(folder + "/ours", {.make = true}).valid());
}

TEST(RunFolder, TheFirstWhoSaysSoOwnsIt) {
  const std::string path = TestFolder();
  const UniqueFd folder = OpenFolder(path);
  const RunFolderOwner owner{ClusterId("c1"), JobId("train-1"), "r1"};
  EXPECT_FALSE(*OwnsRunFolder(folder, path, owner)) << "nobody's";
  ASSERT_TRUE(ClaimRunFolder(folder, path, owner).ok());
  ASSERT_TRUE(ClaimRunFolder(folder, path, owner).ok()) << "another machine of the same job";
  EXPECT_TRUE(*OwnsRunFolder(folder, path, owner));
  EXPECT_TRUE(*OwnsRunFolder(folder, path, {owner.cluster, owner.job, ""}));
  for (const RunFolderOwner& other : {RunFolderOwner{ClusterId("c2"), owner.job, owner.request},
                                      RunFolderOwner{owner.cluster, JobId("train-11"), owner.request},
                                      RunFolderOwner{owner.cluster, owner.job, "r2"}}) {
    const absl::Status refused = OwnsRunFolder(folder, path, other).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                testing::HasSubstr(path + " is the run directory of another job (train-1 of cluster c1"));
    EXPECT_EQ(ClaimRunFolder(folder, path, other), refused);
  }
}

TEST(RunFolder, OfTwoWhoClaimAtOnceOneOwnsIt) {
  const std::string path = TestFolder();
  for (int turn = 0; turn < 500; ++turn) {
    const std::string folder_path = absl::StrCat(path, "/", turn);
    ASSERT_EQ(mkdir(folder_path.c_str(), 0700), 0);
    const UniqueFd folder = OpenFolder(folder_path);
    std::atomic<int> ready = 0, owners = 0;
    const auto claim = [&](const char* job) {
      ++ready;
      while (ready < 2) {
      }
      owners += ClaimRunFolder(folder, folder_path, {ClusterId("c1"), JobId(job), "r"}).ok() ? 1 : 0;
    };
    std::thread other(claim, "other-1");
    claim("one-1");
    other.join();
    ASSERT_EQ(owners, 1) << turn;
  }
}

// An empty one would be taken for that of a disk that was full, and overwritten.
TEST(RunFolder, ItsOwnersFileIsNeverSeenWithoutItsWords) {
  const std::string path = TestFolder();
  for (int turn = 0; turn < 500; ++turn) {
    const std::string folder_path = absl::StrCat(path, "/", turn);
    ASSERT_EQ(mkdir(folder_path.c_str(), 0700), 0);
    const UniqueFd folder = OpenFolder(folder_path);
    std::atomic<bool> looks = false;
    std::string seen;
    std::thread other([&] {
      absl::StatusOr<std::string> text = absl::NotFoundError("");
      for (; !text.ok(); looks = true) text = ReadFile(folder_path + "/" + kRunFolderOwnerFile, 1000);
      seen = *text;
    });
    while (!looks) {
    }
    EXPECT_TRUE(ClaimRunFolder(folder, folder_path, {ClusterId("c1"), JobId("one-1"), "r"}).ok());
    other.join();
    ASSERT_NE(seen, "") << turn;
  }
}

// The disk was full, or the machine that was about to say it died.
TEST(RunFolder, WhatWasNotWrittenToItsEndIsWrittenAgain) {
  const RunFolderOwner owner{ClusterId("c1"), JobId("train-1"), "r1"};
  const std::string path = TestFolder(), file = absl::StrCat(path, "/", kRunFolderOwnerFile);
  const UniqueFd folder = OpenFolder(path);
  ASSERT_TRUE(ClaimRunFolder(folder, path, owner).ok());
  const std::string whole = *ReadFile(file, 1000);
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    ASSERT_TRUE(WriteFileDurable(file, whole.substr(0, bytes)).ok());
    ASSERT_FALSE(*OwnsRunFolder(folder, path, owner)) << bytes;
    ASSERT_TRUE(ClaimRunFolder(folder, path, owner).ok()) << bytes;
    ASSERT_EQ(*ReadFile(file, 1000), whole);
  }
}

TEST(RunFolder, AnOddFileIsNobodysWord) {
  const RunFolderOwner owner{ClusterId("c1"), JobId("train-1"), "r1"};
  const std::string path = TestFolder(), file = absl::StrCat(path, "/", kRunFolderOwnerFile);
  const UniqueFd folder = OpenFolder(path);
  ASSERT_TRUE(WriteFileDurable(file, "cluster c1\njob train-1\nrequest r1\n").ok());
  EXPECT_FALSE(ClaimRunFolder(folder, path, owner).ok()) << "of another program";
  ASSERT_EQ(unlink(file.c_str()), 0);
  ASSERT_EQ(symlink((path + "/victim").c_str(), file.c_str()), 0);
  EXPECT_FALSE(ClaimRunFolder(folder, path, owner).ok());
  EXPECT_NE(access((path + "/victim").c_str(), F_OK), 0);
  ASSERT_EQ(unlink(file.c_str()), 0);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  EXPECT_FALSE(ClaimRunFolder(folder, path, owner).ok()) << "and nobody waits for a reader";
}

TEST(Pattern, FirstGroupOfTheFirstMatch) {
  const auto pattern = Pattern::Compile(R"(step[ =:]+(\d+))");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  EXPECT_EQ(pattern->groups(), 1);
  EXPECT_EQ(pattern->FirstGroup("epoch 1 step=12 step=13"), "12");
  EXPECT_EQ(pattern->FirstGroup("\xff\xfe step: 7"), "7");
  EXPECT_EQ(pattern->FirstGroup("epoch 1"), std::nullopt);
  EXPECT_EQ(Pattern::Compile("a")->FirstGroup("a"), std::nullopt);
}

TEST(Pattern, NoneTakesExponentialTime_P9) {  // each would outlast the test under a matcher that backtracks
  const std::string line(1024, 'a');
  std::string optional;
  for (int i = 0; i < 120; ++i) optional += "a?";
  for (const std::string& text :
       {std::string("(a+)+b"), std::string("(a|a)*b"), std::string("((a*)*)*b"), std::string("(\\w+\\s?)*b"),
        "(" + optional + std::string(120, 'a') + ")b"}) {
    const auto pattern = Pattern::Compile(text);
    ASSERT_TRUE(pattern.ok()) << pattern.status();
    for (int i = 0; i < 100; ++i) EXPECT_EQ(pattern->FirstGroup(line), std::nullopt) << text;
  }
}

TEST(Pattern, WhatCannotBeBoundedIsRefused) {
  for (const char* text : {"(", "(a)\\1", "(?=a)", "(?<!a)b", "(a{1,500}){1,500}", "((a{100}){100}){100}"}) {
    EXPECT_EQ(Pattern::Compile(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(ClockTest, ManualClockMovesOnlyWhenTold) {
  ManualClock clock;
  const Instant start = clock.Now();
  clock.Advance(absl::Seconds(2));
  EXPECT_EQ(clock.Now() - start, absl::Seconds(2));
  RealClock real;
  const Instant before = real.Now();
  EXPECT_LE(before, real.Now());
}

TEST(ForkGuard, OnlyTheChildIsForked) {
  const ForkGuard guard;
  EXPECT_FALSE(guard.Forked());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(guard.Forked() && !ForkGuard().Forked() ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_FALSE(guard.Forked());
}

TEST(Share, ReadsBackWhatItPrints) {
  for (int parts : {0, 1, 10, 1'000, 12'345, 500'000, 999'999, 1'000'000, 2'500'000}) {
    EXPECT_EQ(ParseShare(PrintShare(parts)).value(), parts);
  }
  EXPECT_EQ(PrintShare(10'000), "0.01");
  EXPECT_EQ(PrintShare(1'000'000), "1");
  EXPECT_EQ(ParseShare("0.1%").value(), 1'000);
  EXPECT_EQ(ParseShare("100%").value(), 1'000'000);
  EXPECT_EQ(ParseShare("90.0001%").value(), 900'001);
  for (const char* bad : {"", "%", ".", ".5", "5.", "1.2.3", "-1", "+1", "1e-3", "0.0000001", "0.00001%",
                          "1 %", "1000000%", "0x1", "1%%"}) {
    EXPECT_FALSE(ParseShare(bad).ok()) << bad;
  }
}

TEST(PrintRanks, JoinsRuns) {
  EXPECT_EQ(PrintRanks({3, 1, 2, 7}), "1-3,7");
  EXPECT_EQ(PrintRanks({1, 0}), "0,1");
  EXPECT_EQ(PrintRanks({}), "");
}

TEST(JoinPath, IsLexical) {
  EXPECT_EQ(JoinPath("/a/b", "../c/./d"), "/a/c/d");
  EXPECT_EQ(JoinPath("/a", "/x/../.."), "/");
  EXPECT_EQ(JoinPath("/a", "."), "/a");
}

// P14: a lock says who lives, and goes with the process that holds it.
TEST(FileLock, EndsWithItsHolder) {
  const std::string path = TestFolder() + "/lock";
  EXPECT_FALSE(IsLocked(path));
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  const pid_t holder = fork();
  if (holder == 0) {
    const absl::StatusOr<UniqueFd> lock = LockFile(path);
    if (!lock.ok() || write(told[1], "x", 1) != 1) _exit(1);
    pause();
  }
  char byte;
  ASSERT_EQ(read(told[0], &byte, 1), 1);
  EXPECT_TRUE(IsLocked(path));
  EXPECT_EQ(LockFile(path).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(IsLocked(path)) << "who was refused, and who looked, changed nothing";
  kill(holder, SIGKILL);
  EXPECT_TRUE(LockFile(path, absl::Seconds(10)).ok()) << "the wait ends with the holder";
  EXPECT_EQ(waitpid(holder, nullptr, 0), holder);
  EXPECT_FALSE(IsLocked(path));
}

TEST(FileLock, OfAFileThatWasWritten) {
  const std::string path = TestFolder() + "/said";
  absl::StatusOr<UniqueFd> first = WriteLockedFile(path, "one");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(IsLocked(path));
  EXPECT_TRUE(LeadsTo(path, first->get()));
  const absl::StatusOr<UniqueFd> second = WriteLockedFile(path, "two");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_FALSE(LeadsTo(path, first->get())) << "it was replaced";
  first->reset();
  EXPECT_TRUE(IsLocked(path)) << "the lock is of the file that is there now";
  EXPECT_EQ(*ReadFile(path, 10), "two");
  unlink(path.c_str());
  EXPECT_FALSE(LeadsTo(path, second->get()));
  EXPECT_FALSE(IsLocked(path));
}

// Memory of the machine in kB, limits of control groups in bytes; pages of files can be had back.
TEST(LogLine, ShowsControlCharacters) {
  testing::internal::CaptureStderr();
  LogInfo("node \x1b]0;title\a\xC2\x9B \u00e9\tis back\nand more");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::EndsWith("node \\x1b]0;title\\x07\\xc2\\x9b \u00e9\tis back\nand more\n"));
}

TEST(IsPlainLine, TakesWhatCanBeShown) {
  for (const char* good : {"", "/r/with a blank/\u00e9/\U0001F682", "a%1b"})
    EXPECT_TRUE(IsPlainLine(good)) << good;
  for (const char* bad : {"\n", "a\tb", "\x1b]52;c;ZXZpbA==\a", "\x7f", "\xC2\x9B", "\u202e", "\u2066",
                          "\u2028", "\ufeff", "\xff", "\xC2", "\xED\xA0\x80"})
    EXPECT_FALSE(IsPlainLine(bad)) << bad;
  EXPECT_FALSE(IsPlainLine(absl::string_view("a\0b", 3)));
}

TEST(ShallowJson, IsAllOfItOrNothing) {
  const auto nested = [](int depth) {
    return std::string(static_cast<size_t>(depth), '[') + std::string(static_cast<size_t>(depth), ']');
  };
  EXPECT_EQ(ShallowJson(nested(kShallowDepthMax)), nested(kShallowDepthMax));
  EXPECT_EQ(ShallowJson(nested(kShallowDepthMax + 1)), "");
  EXPECT_EQ(ShallowJson(std::string(200'000, '[')), "");
  const std::string in_text = R"({"a": ")" + std::string(200, '[') + R"(\"[[\\", "b": [{}]})";
  EXPECT_EQ(ShallowJson(in_text), in_text) << "brackets in a string are no nesting";
  std::string wide = "[";
  for (int i = 0; i < 1000; ++i) wide += "[{}],";
  EXPECT_EQ(ShallowJson(wide + "1]"), wide + "1]");
  EXPECT_EQ(ShallowJson("\"\\"), "\"\\");
}

TEST(UriScheme, IsSeenWithOneSlashAndNotInAPath) {
  EXPECT_EQ(UriScheme("s3://bucket/run"), "s3");
  EXPECT_EQ(UriScheme("s3:/bucket/run"), "s3");
  EXPECT_EQ(UriScheme("git+ssh.x-1:/a"), "git+ssh.x-1");
  for (const absl::string_view path :
       {"", "/data/s3:/x", "./s3:/x", "a/b:/c", "S3:/x", "3s:/x", "a:b", "a b:/c", ":/x", "s3:"}) {
    EXPECT_EQ(UriScheme(path), "") << path;
  }
}

void PutBelow(const std::string& root, const std::string& path, const std::string& text) {
  const std::string whole = root + path;
  ASSERT_TRUE(MakeDirs(whole.substr(0, whole.rfind('/'))).ok());
  ASSERT_TRUE(WriteFileDurable(whole, text).ok());
}

TEST(AvailableMemory, IsTheLeastThatTheMachineAndItsGroupsLeave) {
  EXPECT_GT(AvailableMemory(), 1u << 20);
  const std::string root = TestFolder();
  EXPECT_EQ(AvailableMemory(root), UINT64_MAX);
  const auto put = [&](const std::string& path, const std::string& text) { PutBelow(root, path, text); };
  put("/proc/meminfo", "MemTotal:       24000000 kB\nMemAvailable:    1000 kB\n");
  EXPECT_EQ(AvailableMemory(root), 1'024'000u);
  put("/proc/self/cgroup", "1:cpu:/x\n0::/user/job\n");
  put("/sys/fs/cgroup/user/job/memory.max", "max\n");
  put("/sys/fs/cgroup/user/job/memory.current", "900000\n");
  EXPECT_EQ(AvailableMemory(root), 1'024'000u);
  put("/sys/fs/cgroup/user/memory.max", "1000000\n");
  put("/sys/fs/cgroup/user/memory.current", "900000\n");
  EXPECT_EQ(AvailableMemory(root), 100'000u);
  put("/sys/fs/cgroup/user/memory.stat", "anon 1\ninactive_file 50000\nactive_file 5000\n");
  EXPECT_EQ(AvailableMemory(root), 155'000u);
  put("/sys/fs/cgroup/user/job/memory.max", "800000\n");
  EXPECT_EQ(AvailableMemory(root), 0u);
}

TEST(MemoryLimit, IsTheSmallestOfItsGroups) {
  const std::string root = TestFolder();
  EXPECT_EQ(MemoryLimit(root), UINT64_MAX);
  const auto put = [&](const std::string& path, const std::string& text) { PutBelow(root, path, text); };
  put("/proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/pod/one\n0::/user/job\n");
  put("/sys/fs/cgroup/user/job/memory.max", "max\n");
  EXPECT_EQ(MemoryLimit(root), UINT64_MAX);
  put("/sys/fs/cgroup/user/memory.max", "5000\n");
  EXPECT_EQ(MemoryLimit(root), 5000u);
  put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4000\n");
  EXPECT_EQ(MemoryLimit(root), 4000u) << "in a container the mount is its own group";
  put("/sys/fs/cgroup/memory/pod/one/memory.limit_in_bytes", "3000\n");
  EXPECT_EQ(MemoryLimit(root), 3000u);
}

TEST(ProcessorLimit, IsTheSmallestQuotaOfItsGroups) {
  const std::string root = TestFolder();
  const double none = std::numeric_limits<double>::infinity();
  EXPECT_EQ(ProcessorLimit(root), none);
  const auto put = [&](const std::string& path, const std::string& text) { PutBelow(root, path, text); };
  put("/proc/self/cgroup", "4:cpu,cpuacct:/pod/one\n3:memory:/x\n0::/user/job\n");
  put("/sys/fs/cgroup/user/job/cpu.max", "max 100000\n");
  EXPECT_EQ(ProcessorLimit(root), none);
  put("/sys/fs/cgroup/user/cpu.max", "250000 100000\n");
  EXPECT_EQ(ProcessorLimit(root), 2.5);
  put("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  put("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(ProcessorLimit(root), 2.5) << "-1 is none";
  put("/sys/fs/cgroup/cpu,cpuacct/pod/one/cpu.cfs_quota_us", "50000\n");
  put("/sys/fs/cgroup/cpu,cpuacct/pod/one/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(ProcessorLimit(root), 0.5);
  put("/sys/fs/cgroup/user/job/cpu.max", "nonsense\n");
  EXPECT_EQ(ProcessorLimit(root), 0.5);
}

}  // namespace
}  // namespace gtrain
