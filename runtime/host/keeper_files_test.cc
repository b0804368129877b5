// Files that a keeper writes where somebody else may have been before it, and a disk that takes nothing.
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/host/keeper_test_world.h"
#include "runtime/keeper/log_stream.h"
#include "runtime/keeper/posix.h"

namespace gtrain::host {
namespace {

using ::testing::HasSubstr;

class KeeperFilesTest : public KeeperTest {};

TEST(Posix, AtomicWriteFollowsNoLinkInItsPlace) {  // X20
  const std::string base = TestFolder(), victim = base + "/victim", path = base + "/file";
  std::ofstream(victim) << "precious";
  ASSERT_EQ(symlink(victim.c_str(), path.c_str()), 0);
  ASSERT_EQ(symlink(victim.c_str(), (path + ".tmp").c_str()), 0);
  EXPECT_TRUE(keeper::WriteFileAtomic(path, "new"));
  EXPECT_EQ(keeper::ReadSmallFile(path), "new");
  EXPECT_EQ(keeper::ReadSmallFile(victim), "precious");
  EXPECT_FALSE(std::filesystem::is_symlink(path));
}

TEST_F(KeeperFilesTest, NoLogIsWrittenInAFolderOfAnotherUser) {  // X20
  if (geteuid() != 0) GTEST_SKIP() << "only root can make what belongs to another user";
  Start();
  const std::string folder = Path("theirs");
  ASSERT_EQ(mkdir(folder.c_str(), 0777), 0);
  ASSERT_EQ(chown(folder.c_str(), 65534, 65534), 0);
  client_->Send(keeper::BeginGeneration{1, 1, 0, ""});
  auto start = Rank(0, {"true"});
  start.out_path = folder + "/rank-0.out";
  client_->Send(start);
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->cause, keeper::Cause::kStartFailed);
  EXPECT_THAT(exit->message, HasSubstr(absl::StrCat("cannot open the log file ", start.out_path,
                                                    ": Operation not permitted")));
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

// P8. A limit of the size of files stands for the full disk: what does not fit is refused after a short
// write.
TEST_F(KeeperFilesTest, WhatTheDiskRefusesIsMarkedAndWrittenLater) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto limit = [&before](rlim_t bytes) {
    const rlimit now = {bytes, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &now), 0);
  };
  const auto restore = absl::MakeCleanup([&] { setrlimit(RLIMIT_FSIZE, &before); });
  const std::string path = Path("log"),
                    marker = "\n[gtrain: what follows could not be written: File too large]\n";
  keeper::LogWriter writer;
  keeper::LogStream stream;
  ASSERT_TRUE(stream.Open(path, {}, keeper::Terminal::kNone, 0, &writer));
  const UniqueFd end = stream.TakeWriteEnd();
  const auto say = [&](const std::string& text, int64_t now_ms) {
    ASSERT_EQ(write(end.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    stream.Pump(now_ms);
    ASSERT_TRUE(Until([&] { return writer.Idle(); }));
    stream.LookAfter(now_ms);
  };
  say("begin\n", 0);
  limit(100);
  say(std::string(200, 'y'), 0);
  EXPECT_EQ(stream.refused(), EFBIG);
  EXPECT_EQ(stream.dropped(), 200u);
  EXPECT_EQ(Slurp(path), "begin\n" + marker);
  EXPECT_EQ(stream.file_offset(), Slurp(path).size());
  say("z", 100);           // not before the second is over
  stream.LookAfter(2000);  // tried again, in vain
  ASSERT_TRUE(Until([&] { return writer.Idle(); }));
  stream.LookAfter(2000);
  EXPECT_EQ(stream.refused(), EFBIG);
  EXPECT_EQ(Slurp(path), "begin\n" + marker) << "one marker stands for all";
  limit(before.rlim_cur);
  stream.LookAfter(4000);
  ASSERT_TRUE(Until([&] { return writer.Idle(); }));
  stream.LookAfter(4000);
  EXPECT_EQ(stream.refused(), 0);
  EXPECT_EQ(stream.dropped(), 0u);
  EXPECT_EQ(Slurp(path), "begin\n" + marker + std::string(200, 'y') + "z");
  EXPECT_EQ(stream.file_offset(), Slurp(path).size());
}

// Whether its agent ignores the signal or not: an agent of another version may have started it.
TEST_F(KeeperFilesTest, AKeeperDoesNotDieOfALogBeyondTheLimitOfAFile) {
  const auto was = signal(SIGXFSZ, SIG_DFL);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto restore = absl::MakeCleanup([&] {
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, was);
  });
  const rlimit small = {100 << 10, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  Start();
  setrlimit(RLIMIT_FSIZE, &before);
  Launch({"head -c 300000 /dev/zero; sleep 600"});
  EXPECT_NE(Wait<keeper::Output>([](const keeper::Output& o) { return o.refused == EFBIG; }), nullptr);
  EXPECT_TRUE(KeeperPid(dir_).ok()) << "the keeper died of it";
}

}  // namespace
}  // namespace gtrain::host
