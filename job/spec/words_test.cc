#include "job/spec/words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "job/spec/keys.h"
#include "job/spec/nearest.h"
#include "job/spec/parse.h"

namespace gtrain::spec {
namespace {

using ::testing::ElementsAre;

TEST(SplitWords, GroupsByQuotes) {
  EXPECT_THAT(*SplitWords("a  b"), ElementsAre("a", "b"));
  EXPECT_THAT(*SplitWords("a 'b c' \"d e\"f ''"), ElementsAre("a", "b c", "d ef", ""));
  EXPECT_THAT(*SplitWords("a\\ b \"q\\\"q\" 'x\\y'"), ElementsAre("a b", "q\"q", "x\\y"));
  EXPECT_THAT(*SplitWords("sh -c 'a && $B; `c`'"), ElementsAre("sh", "-c", "a && $B; `c`"));
  EXPECT_THAT(*SplitWords("a --x=[1,2] --y=*.z\n"), ElementsAre("a", "--x=[1,2]", "--y=*.z"));
}

// Fault J10.
TEST(SplitWords, RefusesWhatOnlyAShellUnderstands) {
  for (const char* text : {"a|b", "a&", "a;b", "a>b", "a<b", "a $B", "a `b`", "a \"$B\"", "a \"`b`\"", "a\nb",
                           "a 'b", "", "  "}) {
    EXPECT_FALSE(SplitWords(text).ok()) << text;
  }
}

TEST(Names, AreStrict) {
  EXPECT_TRUE(IsJobName("a"));
  EXPECT_TRUE(IsJobName("a-1"));
  EXPECT_TRUE(IsJobName(std::string(63, 'a')));
  for (const std::string& bad :
       {std::string(), std::string(64, 'a'), std::string(10'000, 'a'), std::string("a_b"), std::string("-a"),
        std::string("a-"), std::string("A"), std::string("a.b")}) {
    EXPECT_FALSE(IsJobName(bad)) << bad;
  }
  EXPECT_TRUE(IsEnvName("_A1"));
  for (const char* bad : {"", "1A", "A-B", "A=B", "A B", "É"}) EXPECT_FALSE(IsEnvName(bad)) << bad;
}

TEST(Nearest, FindsTypingErrorsOnly) {
  EXPECT_EQ(EditDistance("chekpoint", "checkpoint"), 1);
  EXPECT_EQ(EditDistance("ab", "ba"), 1);
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(Nearest("statsu", {"status", "stop"}), "status");
  EXPECT_EQ(Nearest("zzzzzz", {"status", "stop"}), "");
  EXPECT_EQ(Nearest(std::string(100'000, 'a'), {"status"}), "");
}

// The keys that a shell offers for --set are the keys that --set takes.
TEST(JobKeys, AreThoseOfTheParser) {
  const std::vector<std::string> keys = JobKeys();
  for (const char* key : {"ranks", "checkpoint.every", "restart.window", "resources.gpus", "env"})
    EXPECT_NE(std::find(keys.begin(), keys.end(), key), keys.end()) << key;
  for (const std::string& key : keys) {
    const absl::StatusOr<Overlay> overlay = ApplySet(absl::StrCat(key, "=?"));
    ASSERT_TRUE(overlay.ok()) << key;
    ParseOptions options;
    options.overlays = {*overlay};
    for (const SpecError& error : ParseJob("run: x", "job", options).errors)
      EXPECT_FALSE(absl::StrContains(FormatError(error), "unknown key")) << FormatError(error);
  }
}

}  // namespace
}  // namespace gtrain::spec
