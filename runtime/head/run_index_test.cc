#include "runtime/head/run_index.h"

#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace gtrain::head {
namespace {

const ClusterId kCluster("c1");

std::string Result(int number, const std::string& reason = "") {
  const std::string time = absl::StrCat("2026-01-01T00:00:00.", 100'000 + number, "Z");
  return nlohmann::json({{"id", absl::StrCat("job-", number)},
                         {"state", "SUCCEEDED"},
                         {"reason", reason},
                         {"ended", time},
                         {"ranks", {1, 2, 3}}})
      .dump();
}

nlohmann::json Jobs(const std::string& path) {
  return nlohmann::json::parse(*ReadFile(path, 16 << 20)).at("jobs");
}

TEST(RunIndex, IsReadByTheNextHeadAndHoldsEachJobOnce) {
  const std::string path = TestFolder() + "/runs.json";
  {
    RunIndex index(path, kCluster);
    ASSERT_TRUE(index.Put(Result(2)).ok());
    ASSERT_TRUE(index.Put(Result(1)).ok());
  }
  RunIndex index(path, kCluster);
  EXPECT_TRUE(index.Has(JobId("job-1")));
  EXPECT_FALSE(index.Has(JobId("job-3")));
  ASSERT_TRUE(index.Put(Result(2, std::string(5000, 'x'))).ok());
  const nlohmann::json jobs = Jobs(path);
  ASSERT_EQ(jobs.size(), 2u);
  EXPECT_EQ(jobs[0].at("id"), "job-1") << "in the order in which they ended";
  EXPECT_FALSE(jobs[0].contains("ranks"));
  EXPECT_LT(jobs[1].at("reason").get<std::string>().size(), 2000u);
}

// It was parsed, and printing it took the stack of each head that read it.
TEST(RunIndex, IsBegunAnewWhereItIsNestedTooDeep) {
  const std::string path = TestFolder() + "/runs.json";
  const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
  for (const std::string& jobs : {"[{\"id\":\"job-1\",\"x\":" + deep + "}]", deep}) {
    ASSERT_TRUE(WriteFileDurable(path, absl::StrCat("{\"cluster\":\"c1\",\"jobs\":", jobs, "}"), 0600).ok());
    RunIndex index(path, kCluster);
    EXPECT_FALSE(index.Has(JobId("job-1")));
    ASSERT_TRUE(index.Put(Result(2)).ok());
    EXPECT_EQ(Jobs(path).size(), 1u);
  }
}

TEST(RunIndex, HoldsTheNewest) {
  const std::string path = TestFolder() + "/runs.json";
  std::string entries;
  for (size_t i = 0; i < RunIndex::kRunsMax; ++i)
    absl::StrAppend(&entries, i == 0 ? "" : ",", Result(static_cast<int>(i)));
  ASSERT_TRUE(
      WriteFileDurable(path, absl::StrCat("{\"cluster\":\"c1\",\"jobs\":[", entries, "]}"), 0600).ok());
  RunIndex index(path, kCluster);
  ASSERT_TRUE(index.Put(Result(90'000)).ok());
  EXPECT_EQ(Jobs(path).size(), RunIndex::kRunsMax);
  EXPECT_FALSE(index.Has(JobId("job-0")));
}

TEST(RunIndex, OfAnotherClusterOrDamagedIsBegunAnew) {
  const std::string path = TestFolder() + "/runs.json";
  for (const char* text : {"{\"cluster\":\"c2\",\"jobs\":[{\"id\":\"job-1\"}]}", "{\"cluster\":", ""}) {
    ASSERT_TRUE(WriteFileDurable(path, text, 0600).ok());
    RunIndex index(path, kCluster);
    EXPECT_FALSE(index.Has(JobId("job-1")));
    ASSERT_TRUE(index.Put(Result(2)).ok());
    EXPECT_EQ(Jobs(path).size(), 1u);
  }
}

TEST(RunIndex, WhatCouldNotBeWrittenIsTriedAgain) {
  const std::string folder = TestFolder(), path = folder + "/there/runs.json";
  RunIndex index(path, kCluster);
  EXPECT_FALSE(index.Put(Result(1)).ok());
  EXPECT_TRUE(index.pending());
  ASSERT_EQ(mkdir((folder + "/there").c_str(), 0700), 0);
  EXPECT_TRUE(index.Write().ok());
  EXPECT_FALSE(index.pending());
  EXPECT_EQ(Jobs(path).size(), 1u);
}

}  // namespace
}  // namespace gtrain::head
