#include "runtime/head/rescue.h"

#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/store/rocks_store.h"
#include "runtime/wire/record_codec.h"

namespace gtrain::head {
namespace {

using ::testing::HasSubstr;

class RescueTest : public ::testing::Test {
 protected:
  void SetUp() override {
    files_ = *net::InitCluster(dir_ + "/head");
    auto store = store::OpenRocksStore(files_.store_path(), {.space = {.ballast = 0}});
    ASSERT_TRUE(store.ok()) << store.status();
    core::ClusterRecord cluster;
    cluster.cluster = files_.cluster;
    ASSERT_TRUE((*store)->Commit({{core::KeyOf(cluster), wire::EncodeRecord(cluster)}}).ok());
  }
  void Write(const std::string& name, const std::string& text) {
    ASSERT_TRUE(WriteFileDurable(absl::StrCat(files_.dir, "/", name), text).ok());
  }
  static std::string Read(const std::string& path) { return ReadFile(path, 64 << 20).value_or("not there"); }
  absl::Status Backup() { return BackupOffline(files_.dir, dir_ + "/backup").status(); }
  absl::Status Restore() {
    return RestoreCluster({.cluster_dir = dir_ + "/new", .backup_dir = dir_ + "/backup"}).status();
  }

  const std::string dir_ = TestFolder();
  net::ClusterFiles files_;
};

// The list of keys only grows: above 1 MiB it was left out without a word, and the list of an earlier backup
// stayed, with users that had been revoked since (H10, X4).
TEST_F(RescueTest, ABackupHoldsTheWholeIdentityAndNothingElse_H10) {
  Write("authorized", "old list");
  Write("tokens.json", "{}");
  Write("authorized.tmp.17", "half of one");
  ASSERT_TRUE(Backup().ok());
  EXPECT_EQ(Read(dir_ + "/backup/identity/authorized"), "old list");
  const std::string list(3 << 20, 'k');
  Write("authorized", list);
  ASSERT_EQ(unlink((files_.dir + "/tokens.json").c_str()), 0);
  const absl::Status again = Backup();
  ASSERT_TRUE(again.ok()) << again;
  EXPECT_EQ(Read(dir_ + "/backup/identity/authorized"), list);
  EXPECT_EQ(Read(dir_ + "/backup/identity/tokens.json"), "not there");
  EXPECT_EQ(Read(dir_ + "/backup/identity/authorized.tmp.17"), "not there");
  const absl::Status restored = Restore();
  ASSERT_TRUE(restored.ok()) << restored;
  EXPECT_EQ(Read(dir_ + "/new/authorized"), list);
  EXPECT_EQ(Read(dir_ + "/new/head.key"), Read(files_.dir + "/head.key"));
}

TEST_F(RescueTest, WhatIsTooLargeToCopyIsNamed) {
  Write("authorized", "");
  ASSERT_EQ(truncate((files_.dir + "/authorized").c_str(), 65 << 20), 0);
  const absl::Status said = Backup();
  EXPECT_EQ(said.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(said.message()), HasSubstr("/authorized"));
}

// A copy that was cut off looked like a whole one to the next restore, whose cluster had no keys.
TEST_F(RescueTest, ARestoreThatWasCutIsDoneAgain_H10) {
  Write("zz-last", "by name behind `cluster`");
  ASSERT_TRUE(Backup().ok());
  // Where the file should come there is a folder: the copy fails there, as on a full disk.
  for (const char* blocked : {"authorized", "head.key", "zz-last"}) {
    ASSERT_EQ(mkdir((dir_ + "/new").c_str(), 0700), 0);
    ASSERT_EQ(mkdir(absl::StrCat(dir_, "/new/", blocked).c_str(), 0700), 0);
    EXPECT_FALSE(Restore().ok());
    EXPECT_EQ(Read(dir_ + "/new/cluster"), "not there") << "with it all others are there: " << blocked;
    ASSERT_EQ(rmdir(absl::StrCat(dir_, "/new/", blocked).c_str()), 0);
    const absl::Status again = Restore();
    ASSERT_TRUE(again.ok()) << again;
    for (const char* name : {"cluster", "authorized", "head.key", "admin.key", "zz-last"})
      EXPECT_EQ(Read(absl::StrCat(dir_, "/new/", name)), Read(absl::StrCat(files_.dir, "/", name))) << name;
    ASSERT_EQ(rename((dir_ + "/new").c_str(), absl::StrCat(dir_, "/done-", blocked).c_str()), 0);
  }
}

}  // namespace
}  // namespace gtrain::head
