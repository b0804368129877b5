#include "runtime/agent/job_files.h"

#include <poll.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "gtest/gtest.h"

namespace gtrain::agent {
namespace {

// Work that stands still until the test lets it go.
struct Stuck {
  Mutex mutex;
  bool go ABSL_GUARDED_BY(mutex) = false;
  void Wait() {
    MutexLock lock(&mutex);
    const auto free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return go; };
    mutex.AwaitFor(absl::Seconds(60), free);
  }
  void Free() {
    MutexLock lock(&mutex);
    go = true;
  }
};

class JobFilesTest : public ::testing::Test {
 protected:
  bool Post(const std::string& job, const std::string& word, std::shared_ptr<Stuck> stuck = nullptr) {
    return files_->Post(JobId(job), [this, word, stuck]() -> JobFiles::Done {
      if (stuck != nullptr) stuck->Wait();
      return [this, word] { absl::StrAppend(&done_, word, " "); };
    });
  }
  // Runs what has ended until `done` has; false: it did not within a minute.
  bool Until(const std::string& done) {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (done_ != done && absl::Now() < deadline) {
      pollfd fd = {files_->fd(), POLLIN, 0};
      poll(&fd, 1, 1000);
      for (const JobFiles::Done& function : files_->Take()) function();
    }
    return done_ == done;
  }
  std::unique_ptr<JobFiles> files_ = std::make_unique<JobFiles>();
  std::string done_;
};

TEST_F(JobFilesTest, OneJobsWorkKeepsItsOrderAndEndsOnTheLoop) {
  for (const char* word : {"a", "b", "c", "d"}) EXPECT_TRUE(Post("one", word));
  EXPECT_TRUE(files_->Waits(JobId("one")));
  EXPECT_FALSE(files_->Waits(JobId("two")));
  EXPECT_EQ(done_, "") << "nothing happens beside the loop";
  EXPECT_TRUE(Until("a b c d "));
  EXPECT_FALSE(files_->Waits(JobId("one")));
}

// P8: a hanging mount under one job.
TEST_F(JobFilesTest, AJobWhoseFileSystemHangsHoldsUpNoOther_P8) {
  const auto stuck = std::make_shared<Stuck>();
  ASSERT_TRUE(Post("one", "late", stuck));
  ASSERT_TRUE(Post("one", "later"));
  ASSERT_TRUE(Post("two", "at-once"));
  EXPECT_TRUE(Until("at-once "));
  EXPECT_TRUE(files_->Waits(JobId("one")));
  stuck->Free();
  EXPECT_TRUE(Until("at-once late later "));
}

TEST_F(JobFilesTest, WhatWaitsIsBounded) {
  const auto stuck = std::make_shared<Stuck>();
  int kept = 0;
  while (kept < 1'000'000 && Post("one", "x", stuck)) ++kept;
  EXPECT_LE(kept, 100'000);
  EXPECT_TRUE(Post("two", "y")) << "of one job";
  stuck->Free();
}

TEST_F(JobFilesTest, WhatIsStuckIsLeftBehind) {
  const auto stuck = std::make_shared<Stuck>();
  ASSERT_TRUE(Post("one", "x", stuck));
  files_.reset();  // returns
  stuck->Free();
}

}  // namespace
}  // namespace gtrain::agent
