#include "runtime/head/tail_spill.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace gtrain::head {
namespace {

using core::SpilledTail;
using core::SpillTail;
using core::TailKey;

TailKey Key(int rank, const char* job = "job-1") { return {JobId(job), {1}, rank, true}; }

size_t Files(const std::string& dir) {
  std::error_code error;
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir + "/tails", error))
    count += entry.is_regular_file();
  return count;
}

TEST(TailSpill, PartsAreJoinedAndTheEndIsKept) {
  const std::string dir = TestFolder();
  TailSpill tails(dir, {.told = 10});
  tails.Clear();
  EXPECT_EQ(tails.Read(Key(0)), std::nullopt);
  tails.Write({Key(0), 0, 6, "first "});
  tails.Write({Key(1), 0, 5, "other"});
  tails.Write({Key(0), 6, 9, "two"});
  EXPECT_EQ(tails.Read(Key(0)), (SpilledTail{"first two", 9, 9}));
  std::string all = "first two";
  for (int part = 0; part < 100; ++part) {
    const std::string text = absl::StrCat("part ", part, ". ");
    tails.Write({Key(0), all.size(), all.size() + text.size(), text});
    all += text;
    ASSERT_EQ(tails.Read(Key(0)), (SpilledTail{all.substr(all.size() - 10), all.size(), all.size()}));
  }
  EXPECT_LE(std::filesystem::file_size(dir + "/tails/1"), 30u);
  EXPECT_EQ(tails.Read(Key(1))->text, "other");
  EXPECT_EQ(tails.lost(), 0u);
}

// A tail begins anew after a part that was lost on its way here, and after a tail that began anew.
TEST(TailSpill, WithoutWhatWasBeforeItBeginsAnew) {
  TailSpill tails(TestFolder());
  tails.Write({Key(0), 0, 3, "one"});
  tails.Write({Key(0), 7, 12, "three"});
  EXPECT_EQ(tails.Read(Key(0)), (SpilledTail{"three", 12, 12}));
  tails.Write({Key(0), 12, 17, " four"});
  EXPECT_EQ(tails.Read(Key(0)), (SpilledTail{"three four", 17, 17})) << "and goes on from there";
  tails.Write({Key(0), 0, 4, "anew"});
  EXPECT_EQ(tails.Read(Key(0)), (SpilledTail{"anew", 4, 4}));
}

TEST(TailSpill, TheDiskIsBoundedAndTheNoisyJobPays_X16) {
  const std::string dir = TestFolder();
  TailSpill tails(dir, {.told = 64 << 10, .total = 10 * (16 << 10)});
  tails.Write({Key(0, "quiet"), 0, 5, "quiet"});
  for (int rank = 0; rank < 50; ++rank) tails.Write({Key(rank, "noisy"), 0, 9, std::string(9'000, 'x')});
  EXPECT_EQ(Files(dir), 10u);
  EXPECT_EQ(tails.Read(Key(0, "quiet"))->text, "quiet");
  EXPECT_NE(tails.Read(Key(49, "noisy")), std::nullopt);
  EXPECT_EQ(tails.Read(Key(40, "noisy")), std::nullopt);
  tails.Drop(JobId("noisy"));
  EXPECT_EQ(Files(dir), 1u);
}

TEST(TailSpill, TheStoreGetsTheDiskBack_H3) {
  const std::string dir = TestFolder();
  TailSpill tails(dir);
  tails.Write({Key(0), 0, 5, "first"});
  tails.SetRoom(false);
  tails.Write({Key(1), 0, 5, "waits"});
  tails.Clear();
  EXPECT_EQ(Files(dir), 0u);
  EXPECT_EQ(tails.Read(Key(0)), std::nullopt);
  tails.SetRoom(true);
  tails.Write({Key(0), 5, 9, "next"});
  EXPECT_EQ(tails.Read(Key(0)), (SpilledTail{"next", 9, 9}));
}

TEST(TailSpill, AnEarlierHeadsAreForgotten) {
  const std::string dir = TestFolder();
  TailSpill(dir).Write({Key(0), 0, 3, "old"});
  ASSERT_EQ(Files(dir), 1u);
  TailSpill tails(dir);
  tails.Clear();
  EXPECT_EQ(Files(dir), 0u);
  EXPECT_EQ(tails.Read(Key(0)), std::nullopt);
  tails.Write({Key(0), 3, 6, "new"});
  EXPECT_EQ(tails.Read(Key(0))->text, "new");
}

TEST(TailSpill, FollowsNoLinkAndLosesOnlyWhatItCannotWrite) {
  const std::string dir = TestFolder(), elsewhere = TestFolder();
  ASSERT_EQ(symlink(elsewhere.c_str(), (dir + "/tails").c_str()), 0);
  TailSpill tails(dir);
  tails.Write({Key(0), 0, 4, "lost"});
  EXPECT_EQ(tails.lost(), 1u);
  EXPECT_EQ(tails.Read(Key(0)), std::nullopt);
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere));
  tails.Clear();  // the link goes, and nothing behind it
  EXPECT_TRUE(std::filesystem::exists(elsewhere));
  tails.Write({Key(0), 0, 4, "kept"});
  EXPECT_EQ(tails.Read(Key(0))->text, "kept");
  const std::string target = elsewhere + "/file";
  ASSERT_EQ(symlink(target.c_str(), (dir + "/tails/2").c_str()), 0);
  tails.Write({Key(1), 0, 4, "gone"});
  EXPECT_EQ(tails.lost(), 2u);
  EXPECT_FALSE(std::filesystem::exists(target));
}

// Keeps the thread of the queue busy until told, with so many tasks behind.
struct Busy {
  explicit Busy(TailQueue& queue) {
    EXPECT_TRUE(queue.Read(Key(0), [this](auto) {
      begun.Notify();
      EXPECT_TRUE(go.WaitFor(absl::Seconds(30)));
    }));
    EXPECT_TRUE(begun.WaitFor(absl::Seconds(30)));
  }
  Notification begun, go;
};

// Reads after all waiting and owed tasks, once the queue takes it.
std::optional<SpilledTail> ReadBehind(TailQueue& queue, const TailKey& tail) {
  std::optional<SpilledTail> found;
  Notification done;
  const auto tell = [&](std::optional<SpilledTail> read) {
    found = std::move(read);
    done.Notify();
  };
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  bool asked = false;
  while (!(asked = queue.Read(tail, tell)) && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(asked);
  EXPECT_TRUE(!asked || done.WaitFor(absl::Seconds(30)));
  return found;
}

TEST(TailQueue, WhatIsDroppedGoesHoweverFullTheQueueWas) {
  const std::string dir = TestFolder();
  TailQueue queue(std::make_shared<TailSpill>(dir), 2);
  Busy busy(queue);
  EXPECT_TRUE(queue.Write({Key(0, "ended"), 0, 3, "one"}));
  EXPECT_TRUE(queue.Write({Key(0, "other"), 0, 5, "stays"}));
  EXPECT_FALSE(queue.Write({Key(1, "ended"), 0, 3, "two"})) << "full";
  for (const char* job : {"ended", "unknown", "ended"}) queue.Drop(JobId(job));
  busy.go.Notify();
  EXPECT_EQ(ReadBehind(queue, Key(0, "ended")), std::nullopt) << "written before it was dropped";
  EXPECT_EQ(ReadBehind(queue, Key(0, "other")), (SpilledTail{"stays", 5, 5}));
  EXPECT_EQ(Files(dir), 1u);
}

TEST(TailQueue, TheDiskIsGivenBackHoweverFullTheQueueWas_H3) {
  const std::string dir = TestFolder();
  TailQueue queue(std::make_shared<TailSpill>(dir), 1);
  Busy busy(queue);
  EXPECT_TRUE(queue.Write({Key(0), 0, 3, "one"}));
  queue.Clear();
  busy.go.Notify();
  EXPECT_EQ(ReadBehind(queue, Key(0)), std::nullopt);
  EXPECT_EQ(Files(dir), 0u);
}

}  // namespace
}  // namespace gtrain::head
