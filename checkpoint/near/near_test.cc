#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/test_folder.h"
#include "checkpoint/near/near_folder.h"

namespace gtrain::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Copy = port::NearTier::Copy;
using Shard = port::NearTier::Shard;

constexpr char kFile[] = "rank-00000-of-00001.safetensors";

std::string Attempt(int step) { return absl::StrCat("step-00000000000", step, ".e0001.t0001.g0001.a01"); }

class NearFolderTest : public testing::Test {
 protected:
  std::unique_ptr<port::NearTier> Tier(uint64_t bytes_max = 1000, const char* job = "job-1") {
    auto folder = NearFolder::Open(root_, bytes_max);
    EXPECT_TRUE(folder.ok()) << folder.status();
    return MakeNearTier(*std::move(folder), job);
  }
  static absl::Status Put(port::NearTier* tier, int step, absl::string_view data,
                          const std::string& committed = "", const char* file = kFile) {
    const Copy copy{.attempt = Attempt(step), .file = file, .bytes = data.size(), .committed = committed};
    return tier->Put(copy, [&](uint64_t at) { return data.substr(at, 3); });
  }
  std::vector<std::string> Coming() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(root_ + "/.coming"))
      names.push_back(entry.path().filename());
    return names;
  }

  const std::string root_ = TestFolder();
};

TEST_F(NearFolderTest, WhatIsPutIsListedAndRead) {
  auto tier = Tier();
  EXPECT_THAT(*tier->List(Attempt(1)), IsEmpty());
  ASSERT_TRUE(Put(tier.get(), 1, "0123456789").ok());
  ASSERT_TRUE(Put(tier.get(), 1, "0123456789").ok());  // again: a writer that goes on with another's work
  EXPECT_THAT(*tier->List(Attempt(1)), ElementsAre(Shard{kFile, 10}));
  std::string out(4, '?');
  ASSERT_TRUE(tier->Read(Attempt(1), kFile, 3, absl::MakeSpan(out)).ok());
  EXPECT_EQ(out, "3456");
  EXPECT_TRUE(absl::IsOutOfRange(tier->Read(Attempt(1), kFile, 8, absl::MakeSpan(out))));
  EXPECT_TRUE(absl::IsNotFound(tier->Read(Attempt(2), kFile, 0, absl::MakeSpan(out))));
  EXPECT_THAT(*Tier(1000, "job-2")->List(Attempt(1)), IsEmpty());
}

TEST_F(NearFolderTest, WhatIsOlderThanTheCommittedOneGoes) {
  auto tier = Tier();
  for (int step : {1, 2}) ASSERT_TRUE(Put(tier.get(), step, "abc").ok());
  ASSERT_TRUE(Put(tier.get(), 3, "abc", Attempt(2)).ok());
  EXPECT_FALSE(std::filesystem::exists(absl::StrCat(root_, "/job-1/", Attempt(1))));
  EXPECT_THAT(*tier->List(Attempt(2)), ElementsAre(Shard{kFile, 3}));
  EXPECT_THAT(*tier->List(Attempt(3)), ElementsAre(Shard{kFile, 3}));
}

TEST_F(NearFolderTest, AFullOneRefusesAndKeepsWhatItHas) {
  auto tier = Tier(25);
  ASSERT_TRUE(Put(tier.get(), 1, "0123456789").ok());
  ASSERT_TRUE(Put(tier.get(), 2, "0123456789").ok());
  const absl::Status full = Put(tier.get(), 3, "0123456789");
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_THAT(full.ToString(), HasSubstr(root_));
  EXPECT_THAT(*tier->List(Attempt(1)), ElementsAre(Shard{kFile, 10}));
  EXPECT_THAT(*tier->List(Attempt(3)), IsEmpty());
  EXPECT_TRUE(absl::IsResourceExhausted(Put(Tier(25, "job-2").get(), 1, "0123456789")));  // one cap for all
  EXPECT_TRUE(Put(tier.get(), 3, "0123456789", Attempt(2)).ok());
}

TEST_F(NearFolderTest, AWriterThatGivesUpLeavesNothing) {
  auto tier = Tier(10);
  const Copy copy{.attempt = Attempt(1), .file = kFile, .bytes = 10};
  const absl::Status put = tier->Put(copy, [](uint64_t at) -> absl::StatusOr<absl::string_view> {
    if (at > 0) return absl::CancelledError("enough");
    return "0123";
  });
  EXPECT_TRUE(absl::IsCancelled(put)) << put;
  EXPECT_THAT(*tier->List(Attempt(1)), IsEmpty());
  EXPECT_THAT(Coming(), IsEmpty());
  EXPECT_TRUE(absl::IsOutOfRange(tier->Put(copy, [](uint64_t) { return "more than was said"; })));
  EXPECT_TRUE(Put(tier.get(), 1, "0123456789").ok());
}

// C1: half a file is never listed; what its writer reserved is free again.
TEST_F(NearFolderTest, AWriterThatIsKilledLeavesNothingThatCounts) {
  const pid_t pid = fork();
  if (pid == 0) {
    auto folder = NearFolder::Open(root_, 10);
    auto coming = (*folder)->Begin("job-1", {.attempt = Attempt(1), .file = kFile, .bytes = 10});
    _exit(coming.ok() && coming->Append("01234").ok() ? 77 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  ASSERT_EQ(WEXITSTATUS(status), 77);
  EXPECT_EQ(Coming().size(), 1u);
  auto tier = Tier(10);
  EXPECT_THAT(*tier->List(Attempt(1)), IsEmpty());
  EXPECT_TRUE(Put(tier.get(), 2, "0123456789").ok());
  EXPECT_THAT(Coming(), IsEmpty());
}

TEST_F(NearFolderTest, WhatIsBeingWrittenCountsAndStays) {
  auto folder = *NearFolder::Open(root_, 15);
  {
    auto coming = folder->Begin("job-1", {.attempt = Attempt(1), .file = kFile, .bytes = 10});
    ASSERT_TRUE(coming.ok());
    EXPECT_TRUE(absl::IsResourceExhausted(Put(Tier(15, "job-2").get(), 1, "0123456789")));
    EXPECT_THAT(*folder->Attempts("job-1"), ElementsAre(Attempt(1))) << "it is coming";
    ASSERT_TRUE(coming->Append("0123456789").ok());
    ASSERT_TRUE(coming->Finish().ok());
  }
  EXPECT_EQ(folder->List("job-1", Attempt(1))->size(), 1u);
  EXPECT_THAT(*folder->Attempts("job-1"), ElementsAre(Attempt(1)));
  EXPECT_THAT(*folder->Attempts("job-2"), IsEmpty());
  { auto never = folder->Begin("job-1", {.attempt = Attempt(2), .file = kFile, .bytes = 10}); }
  EXPECT_THAT(*folder->Attempts("job-1"), ElementsAre(Attempt(1)));
  EXPECT_TRUE(absl::IsInvalidArgument(folder->Attempts("..").status()));
}

// The sum stays below the cap also while a file becomes whole: a reader finds it in one place or the other.
TEST_F(NearFolderTest, ManyAtOnceStayBelowTheCap) {
  constexpr int kTimes = 1000, kWriters = 8, kFit = 3;
  for (int time = 0; time < kTimes && !HasFailure(); ++time) {
    const std::string job = absl::StrCat("job-", time);
    std::vector<std::thread> threads;
    std::atomic<int> fitted{0};
    for (int i = 0; i < kWriters; ++i) {
      threads.emplace_back([&, i] {
        auto tier = Tier(kFit * 10, job.c_str());
        const std::string file = absl::StrCat("rank-", i, ".safetensors");
        if (Put(tier.get(), 1, "0123456789", "", file.c_str()).ok()) ++fitted;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(fitted, kFit);
    EXPECT_EQ(Tier(1000, job.c_str())->List(Attempt(1))->size(), static_cast<size_t>(kFit));
    ASSERT_TRUE(DropNearCopies(root_, job).ok());
  }
}

TEST_F(NearFolderTest, AJobThatIsOverIsDroppedWhole) {
  auto tier = Tier(), other = Tier(1000, "job-2");
  ASSERT_TRUE(Put(tier.get(), 1, "abc").ok());
  ASSERT_TRUE(Put(other.get(), 1, "abc").ok());
  EXPECT_THAT(JobsWithCopies(root_), ::testing::UnorderedElementsAre("job-1", "job-2"));
  ASSERT_TRUE(DropNearCopies(root_, "job-1").ok());
  EXPECT_THAT(JobsWithCopies(root_), ::testing::ElementsAre("job-2"));
  EXPECT_FALSE(std::filesystem::exists(root_ + "/job-1"));
  EXPECT_EQ(other->List(Attempt(1))->size(), 1u);
  RemoveNearFolder(root_);
  EXPECT_EQ(other->List(Attempt(1))->size(), 1u);
  ASSERT_TRUE(DropNearCopies(root_, "job-2").ok());
  RemoveNearFolder(root_);
  EXPECT_FALSE(std::filesystem::exists(root_));
  EXPECT_TRUE(DropNearCopies(root_, "job-2").ok());
  EXPECT_THAT(JobsWithCopies(root_), ::testing::IsEmpty());
}

TEST_F(NearFolderTest, NamesThatLeaveTheFolderAreRefused_C10) {
  auto folder = *NearFolder::Open(root_, 1000);
  std::string out(1, '?');
  for (const char* job : {"", "..", "a/b", ".coming", "/tmp"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(folder->List(job, Attempt(1)).status())) << job;
    EXPECT_TRUE(absl::IsInvalidArgument(folder->Begin(job, {.attempt = Attempt(1), .file = kFile}).status()))
        << job;
  }
  for (const char* attempt : {"", "..", "step-1", "../job-2"})
    EXPECT_TRUE(absl::IsInvalidArgument(folder->List("job-1", attempt).status())) << attempt;
  for (const char* file : {"", "..", "../x.safetensors", "rank-0.json"})
    EXPECT_TRUE(absl::IsInvalidArgument(folder->Read("job-1", Attempt(1), file, 0, absl::MakeSpan(out))))
        << file;
}

TEST_F(NearFolderTest, AFolderThatOthersMayEnterIsRefused_X2) {
  ASSERT_EQ(chmod(root_.c_str(), 0755), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(NearFolder::Open(root_, 1000).status()));
  ASSERT_EQ(chmod(root_.c_str(), 0700), 0);
}

}  // namespace
}  // namespace gtrain::ckpt
