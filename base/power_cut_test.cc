// Tests that durable means durable, on the strict disk of power_cut_fake.h; and that the fake itself forgets
// what it should.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/power_cut_fake.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

class PowerCutTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = base_ + "/folder";
    ASSERT_EQ(mkdir(folder_.c_str(), 0700), 0);
  }

  // The content of a file after a power cut now; NotFound when its name is gone.
  absl::StatusOr<std::string> Left(PowerCut& cut, const std::string& name) {
    const std::string copy = absl::StrCat(base_, "/copy-", ++copies_);
    const absl::Status left = cut.Leave(copy);
    if (!left.ok()) return left;
    return ReadFile(copy + "/" + name, 1000);
  }

  std::string base_ = TestFolder();
  std::string folder_;
  int copies_ = 0;
};
using WriteFileDurableTest = PowerCutTest;

TEST_F(PowerCutTest, OnlyWhatWasSyncedIsLeft) {
  PowerCut cut(folder_);
  UniqueFd fd(open((folder_ + "/log").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(write(fd.get(), "one", 3), 3);
  ASSERT_EQ(fsync(fd.get()), 0);
  EXPECT_TRUE(absl::IsNotFound(Left(cut, "log").status()));  // its name is not on disk
  UniqueFd dir(open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(fsync(dir.get()), 0);
  ASSERT_EQ(write(fd.get(), "two", 3), 3);
  EXPECT_EQ(*Left(cut, "log"), "one");
  ASSERT_EQ(fdatasync(fd.get()), 0);
  EXPECT_EQ(*Left(cut, "log"), "onetwo");
  ASSERT_EQ(unlink((folder_ + "/log").c_str()), 0);
  EXPECT_EQ(*Left(cut, "log"), "onetwo");
  ASSERT_EQ(fsync(dir.get()), 0);
  EXPECT_TRUE(absl::IsNotFound(Left(cut, "log").status()));
}

TEST_F(PowerCutTest, AFailedSyncKeepsNothingMore) {
  PowerCut cut(folder_);
  UniqueFd fd(open((folder_ + "/log").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  UniqueFd dir(open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(write(fd.get(), "one", 3), 3);
  cut.FailNextSync(EIO);
  EXPECT_EQ(fsync(dir.get()), 0);
  EXPECT_EQ(fsync(fd.get()), -1);
  EXPECT_EQ(errno, EIO);
  EXPECT_EQ(fsync(fd.get()), 0);
  EXPECT_EQ(*Left(cut, "log"), "");
}

TEST_F(WriteFileDurableTest, SurvivesAPowerCut_H2) {
  PowerCut cut(folder_);
  ASSERT_TRUE(WriteFileDurable(folder_ + "/keys", "one").ok());
  EXPECT_EQ(*Left(cut, "keys"), "one");
  ASSERT_TRUE(WriteFileDurable(folder_ + "/keys", "two").ok());
  EXPECT_EQ(*Left(cut, "keys"), "two");
}

}  // namespace
}  // namespace gtrain
