#include "runtime/head/run_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/folder.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace gtrain::head {
namespace {

const RunFolderOwner kOwner{ClusterId("c1"), JobId("train-1"), ""};

TEST(RunFiles, EventLineIsOneLineOfJson) {
  core::EmitEvent event{.sequence = 7,
                        .generation = {2},
                        .kind = "state",
                        .text = "line\nbreak \xff \"quoted\"",
                        .at = absl::FromUnixMillis(1)};
  EXPECT_EQ(EventLine(event),
            "{\"time\":\"1970-01-01T00:00:00.001Z\",\"sequence\":7,\"kind\":\"state\",\"generation\":2,"
            "\"text\":\"line\\nbreak \xef\xbf\xbd \\\"quoted\\\"\"}\n");
}

TEST(RunFiles, AppendsAndReplaces) {
  const std::string dir = TestFolder() + "/a/b";
  EXPECT_TRUE(absl::IsNotFound(AppendEvent(dir, kOwner, "1\n", false)));
  ASSERT_TRUE(AppendEvent(dir, kOwner, "1\n", true).ok());
  ASSERT_TRUE(AppendEvent(dir, kOwner, "2\n", false).ok());
  EXPECT_EQ(*ReadFile(dir + "/events.jsonl", 100), "1\n2\n");
  ASSERT_TRUE(WriteFailureFile(dir, kOwner, "{}", false).ok());
  ASSERT_TRUE(WriteFailureFile(dir, kOwner, "{\"a\":1}", false).ok());
  EXPECT_EQ(*ReadFile(dir + "/failure.json", 100), "{\"a\":1}\n");
}

TEST(RunFiles, AResultHoldsTheNewestEvents) {
  const std::string dir = TestFolder();
  EXPECT_FALSE(LacksResultFile(dir + "/gone", kOwner));
  EXPECT_TRUE(LacksResultFile(dir, kOwner));
  ASSERT_TRUE(AppendEvent(dir, kOwner, "{\"text\":\"first\"}\n", false).ok());
  ASSERT_TRUE(AppendEvent(dir, kOwner, "half a li\n", false).ok());
  ASSERT_TRUE(AppendEvent(dir, kOwner, "{\"text\":\"last\"}\n", false).ok());
  ASSERT_TRUE(WriteResultFile(dir, kOwner, "{\"id\":\"train-1\"}", false).ok());
  EXPECT_FALSE(LacksResultFile(dir, kOwner));
  EXPECT_EQ(*ReadFile(dir + "/result.json", 1000),
            "{\"events\":[{\"text\":\"first\"},{\"text\":\"last\"}],\"id\":\"train-1\"}\n");
  for (int i = 0; i < 3000; ++i)
    ASSERT_TRUE(AppendEvent(dir, kOwner, absl::StrCat("{\"number\":", i, "}\n"), false).ok());
  ASSERT_TRUE(WriteResultFile(dir, kOwner, "{}", false).ok());
  const std::string text = *ReadFile(dir + "/result.json", 1 << 20);
  EXPECT_LT(text.size(), 10'000u);
  EXPECT_NE(text.find("{\"number\":2999}]"), std::string::npos);
}

TEST(RunFiles, NothingGoesIntoTheRunDirectoryOfAnotherJob) {
  const std::string dir = TestFolder();
  const RunFolderOwner other{ClusterId("c1"), JobId("train-2"), "r2"};
  ASSERT_TRUE(ClaimRunFolder(OpenFolder(dir), dir, other).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(AppendEvent(dir, kOwner, "x\n", true)));
  EXPECT_TRUE(absl::IsFailedPrecondition(WriteFailureFile(dir, kOwner, "{}", true)));
  EXPECT_FALSE(ReadFile(dir + "/events.jsonl", 100).ok());
  EXPECT_TRUE(AppendEvent(dir, {other.cluster, other.job, ""}, "x\n", true).ok());
}

TEST(RunFiles, NeitherLinksNorOddPathsNorPipes) {
  const std::string dir = TestFolder(), target = TestFolder() + "/target";
  ASSERT_EQ(symlink(target.c_str(), (dir + "/events.jsonl").c_str()), 0);
  EXPECT_FALSE(AppendEvent(dir, kOwner, "x\n", true).ok());
  EXPECT_NE(access(target.c_str(), F_OK), 0);
  for (const char* bad : {"", "relative", "/tmp/../etc", "/.."})
    EXPECT_FALSE(AppendEvent(bad, kOwner, "x\n", false).ok()) << bad;
  const std::string with_pipe = TestFolder();
  ASSERT_EQ(mkfifo((with_pipe + "/events.jsonl").c_str(), 0600), 0);
  EXPECT_FALSE(AppendEvent(with_pipe, kOwner, "x\n", false).ok());  // and does not wait for a reader
}

}  // namespace
}  // namespace gtrain::head
