#include "runtime/head/audit_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::head {
namespace {

using ::testing::HasSubstr;

class AuditLogTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& suffix = "") const { return dir_ + "/" + kAuditFile + suffix; }
  std::string Text() const { return *ReadFile(Path(), 1 << 20); }
  void Write(int lines, uint64_t bytes_max = 1 << 20) {
    auto log = AuditLog::Open(dir_, bytes_max);
    ASSERT_TRUE(log.ok()) << log.status();
    for (int i = 0; i < lines; ++i) {
      core::AuditEntry entry{{core::Role::kUser, "0123456789abcdef", "ann"}, "10.0.0.9", "stop", "job-1"};
      ASSERT_TRUE(log->Append({entry}, absl::FromUnixMillis(1'800'000'000'123)).ok());
    }
  }
  const std::string dir_ = TestFolder();
};

TEST_F(AuditLogTest, LinesSayWhoWhatWhenAndChain) {
  Write(2);
  Write(1);  // after a restart of the head
  const auto verdict = ReadAudit(dir_, nullptr);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->first, 1u);
  EXPECT_EQ(verdict->last, 3u);
  const auto line = nlohmann::json::parse(Text().substr(0, Text().find('\n')));
  EXPECT_EQ(line.at("time"), "2027-01-15T08:00:00.123Z");
  EXPECT_EQ(line.at("name"), "ann");
  EXPECT_EQ(line.at("role"), "user");
  EXPECT_EQ(line.at("action"), "stop");
  EXPECT_EQ(line.at("outcome"), "ok");
  EXPECT_EQ(line.at("prev"), std::string(64, '0'));
}

TEST_F(AuditLogTest, AReasonIsKept) {
  auto log = AuditLog::Open(dir_);
  ASSERT_TRUE(log.ok()) << log.status();
  core::AuditEntry entry{{core::Role::kAdmin, "0123456789abcdef", "ann"}, "10.0.0.9", "node drain", "gpu-7"};
  ASSERT_TRUE(log->Append({entry}, absl::FromUnixMillis(1)).ok());
  entry.reason = "new disk";
  ASSERT_TRUE(log->Append({entry}, absl::FromUnixMillis(1)).ok());
  const size_t second = Text().find('\n') + 1;
  EXPECT_FALSE(nlohmann::json::parse(Text().substr(0, second)).contains("reason"));
  EXPECT_EQ(nlohmann::json::parse(Text().substr(second)).at("reason"), "new disk");
  EXPECT_TRUE(ReadAudit(dir_, nullptr).ok());
}

TEST_F(AuditLogTest, EveryChangeIsFound) {
  Write(4);
  const std::string good = Text();
  const auto expect_broken = [&](const std::string& text, absl::string_view where) {
    ASSERT_TRUE(WriteFileDurable(Path(), text).ok());
    const auto verdict = ReadAudit(dir_, nullptr);
    ASSERT_TRUE(absl::IsDataLoss(verdict.status())) << text;
    EXPECT_THAT(std::string(verdict.status().message()), HasSubstr(std::string(where)));
  };
  std::string changed = good;
  changed.replace(changed.find("ann"), 3, "eve");
  expect_broken(changed, "line 2");
  const size_t second = good.find('\n') + 1, third = good.find('\n', second) + 1;
  expect_broken(good.substr(0, second) + good.substr(third), "line 2");
  expect_broken(good.substr(0, third) + good.substr(second), "line 3");
  expect_broken(absl::StrReplaceAll(good, {{"{", "x"}}), "not a line");
}

TEST_F(AuditLogTest, CutOffLineIsDropped) {
  Write(2);
  ASSERT_TRUE(WriteFileDurable(Path(), Text() + "{\"n\":3,\"ti").ok());
  Write(1);
  const auto verdict = ReadAudit(dir_, nullptr);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->last, 3u);
}

TEST_F(AuditLogTest, OldFilesGoAndTheChainHolds) {
  Write(200, 1000);
  EXPECT_EQ(access(Path(absl::StrCat(".", kAuditFilesKept)).c_str(), F_OK), 0);
  EXPECT_NE(access(Path(absl::StrCat(".", kAuditFilesKept + 1)).c_str(), F_OK), 0);
  const auto verdict = ReadAudit(dir_, nullptr);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_GT(verdict->first, 1u);
  EXPECT_EQ(verdict->last, 200u);
}

TEST_F(AuditLogTest, DiskErrorsAreSaid) {
  Write(1);
  ASSERT_TRUE(WriteFileDurable(Path(), "not ours\n").ok());
  EXPECT_TRUE(absl::IsDataLoss(AuditLog::Open(dir_).status()));
  ASSERT_EQ(unlink(Path().c_str()), 0);
  ASSERT_EQ(symlink("/dev/full", Path().c_str()), 0);
  EXPECT_FALSE(AuditLog::Open(dir_).ok()) << "a link is not followed";
}

}  // namespace
}  // namespace gtrain::head
