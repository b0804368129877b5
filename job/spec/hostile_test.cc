// Hostile bytes and structures: refused with a place, quickly, and never a crash (faults J1 J2 J3 J6 J13).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/rng.h"
#include "job/spec/parse.h"
#include "job/spec/yaml_tree.h"

namespace gtrain::spec {
namespace {

using ::testing::HasSubstr;

std::string ErrorsOf(absl::string_view text) {
  const ParseResult result = ParseJob(text, "f", {.default_name = "job"});
  return absl::StrJoin(result.errors, "\n",
                       [](std::string* out, const SpecError& e) { *out += FormatError(e); });
}

std::string Repeat(absl::string_view text, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out.append(text.data(), text.size());
  return out;
}

TEST(Hostile, J1AliasBomb) {
  std::string text = "run: a\nenv:\n  A0: &a0 x\n";
  for (int i = 1; i < 30; ++i)
    absl::StrAppend(&text, "  A", i, ": &a", i, " [*a", i - 1, ", *a", i - 1, "]\n");
  EXPECT_THAT(ErrorsOf(text), HasSubstr("f:3:7: anchors (&name) are not allowed"));
  EXPECT_THAT(ErrorsOf("run: a\nname: *x\n"), HasSubstr("f:2:"));
}

TEST(Hostile, J2Cycle) { EXPECT_THAT(ErrorsOf("&x [*x]"), HasSubstr("f:1:1: anchors")); }

TEST(Hostile, J1RangesOfRanksAreNotMadeUpBeyondWhatAJobMayHave) {
  std::string text = "run: a\nwhere:\n  ranks:\n";
  for (int i = 0; i < 4000; ++i) absl::StrAppend(&text, "    0-", 65535 - i, ": a slot=0-", 65535 - i, "\n");
  EXPECT_THAT(ErrorsOf(text), HasSubstr("f:5:5: `where.ranks`: names more than 65536 ranks"));
  text = "run: a\nwhere:\n  ranks:\n";
  for (int i = 0; i < 4000; ++i) absl::StrAppend(&text, "    ", i, ": a slot=0-65535\n");
  EXPECT_EQ(ErrorsOf(text), "f:4:8: `where.ranks`: 65536 slots for 1 rank") << "the first alone";
  const std::string hosts =
      ErrorsOf(absl::StrCat("run: a\nwhere:\n  hosts:", Repeat("\n  - a[0-65535],[", 4000), "\n"));
  EXPECT_EQ(hosts, "f:4:5: `where.hosts`: hostlist \"a[0-65535],[\": a [ without a ]") << "the first alone";
}

TEST(Hostile, J1TooManyNodes) {
  EXPECT_THAT(ErrorsOf(absl::StrCat("run: [", Repeat("a,", 20'000), "a]\n")),
              HasSubstr("more than 10000 values"));
}

TEST(Hostile, J3DeepNesting) {
  for (const char* open : {"[", "{a: ", "- ", "? "}) {
    EXPECT_THAT(ErrorsOf(absl::StrCat("a: ", Repeat(open, 40))), HasSubstr("f:1:")) << open;
    EXPECT_FALSE(ErrorsOf(Repeat(open, 100'000)).empty()) << open;
  }
  EXPECT_THAT(ErrorsOf(absl::StrCat("env: ", Repeat("[", 33))), HasSubstr("nested deeper than 32 levels"));
  std::string block;
  for (int i = 0; i < 40; ++i) absl::StrAppend(&block, Repeat(" ", static_cast<size_t>(i)), "a:\n");
  EXPECT_THAT(ErrorsOf(block), HasSubstr("f:33:33: nested deeper than 32 levels"));
}

struct BadText {
  const char* what;
  std::string text;
  const char* error;
};

TEST(Hostile, J6Table) {
  const BadText table[] = {
      {"python tag", "run: !!python/object/apply:os.system [x]\n", "f:1:6: tags (!...) are not allowed"},
      {"include tag", "run: a\nenv: !include x.yaml\n", "f:2:6: tags"},
      {"binary tag", "run: !!binary aGk=\n", "f:1:6: tags"},
      {"str tag", "run: !!str a\n", "tags"},
      {"bare tag", "run: ! a\n", "tags"},
      {"tag on mapping", "run: a\nenv: !!map {A: b}\n", "tags"},
      {"two documents", "run: a\n---\nrun: b\n", "f:2:1: a job file is one document"},
      {"end and more", "run: a\n...\nrun: b\n", "one document"},
      {"directive", "%YAML 1.1\n---\nrun: a\n", "f:1:1: YAML directives"},
      {"tag directive", "%TAG ! tag:x,2000:\n---\nrun: a\n", "f:1:1: YAML directives"},
      {"bom", "\xEF\xBB\xBFrun: a\n", "f:1:1: the file starts with a byte order mark"},
      {"utf-16", std::string("r\0u\0n\0:\0 \0a\0", 12), "f:1:2: a NUL character"},
      {"crlf", "run: a\r\nranks: 2\r\n", "f:1:7: a carriage return"},
      {"tab", "run: a\nenv:\n\tA: b\n", "f:3:1: a tab"},
      {"nul", std::string("run: a\0b\n", 9), "f:1:7: a NUL character"},
      {"escape", "run: \x1b[31m\n", "f:1:6: a control character"},
      {"invalid utf-8", "run: \xff\n", "f:1:6: not valid UTF-8"},
      {"overlong", "run: \xC0\xAF\n", "not valid UTF-8"},
      {"surrogate", "run: \xED\xA0\x80\n", "not valid UTF-8"},
      {"cut code point", "run: \xE2\x82", "not valid UTF-8"},
      {"bidi", "run: a # \xE2\x80\xAE\n", "f:1:10: an invisible text-direction character"},
      {"complex key", "? [a, b]\n: c\n", "a key must be a word"},
      {"merge key", "run: a\n<<: {name: x}\n", "unknown key"},
      {"not a mapping", "- a\n- b\n", "f:1:1: a job file is a mapping"},
      {"scalar", "hello\n", "f:1:1: a job file is a mapping"},
      {"empty", "", "the file is empty"},
      {"comment", "# nothing\n", "the file is empty"},
      {"unclosed", "run: [a\n", "f:"},
      {"unclosed quote", "run: \"a\n", "f:1:6: the quote (\") is not closed"},
      {"unclosed single quote", "run: 'a''\n", "is not closed"},
      {"null key", "run: a\nenv: {NULL: x}\n", "quote it"},
      {"bad indent", "run: a\n  name: b\n", "f:2:"},
      {"escape of a surrogate", "run: \"\\ud800\"\n", "f:1:"},
  };
  for (const BadText& bad : table) EXPECT_THAT(ErrorsOf(bad.text), HasSubstr(bad.error)) << bad.what;
}

TEST(Hostile, J13LargerThanTheCap) {
  EXPECT_THAT(ErrorsOf(absl::StrCat("run: ", Repeat("a", 2 << 20))), HasSubstr("larger than 1 MiB"));
}

TEST(Hostile, ErrorsAreBounded) {
  std::string text = "run: a\n";
  for (int i = 0; i < 4000; ++i) absl::StrAppend(&text, "k", i, ": x\n");
  const ParseResult result = ParseJob(text, "f", {.default_name = "job"});
  ASSERT_EQ(result.errors.size(), 101u);
  EXPECT_THAT(result.errors.back().message, HasSubstr("more errors follow"));
}

TEST(Hostile, NearTheCapIsStillQuickAndSafe) {
  for (const std::string unit : {"\"", "'", "a: b\n", "# c\n", "- ", "{", "}", "a", " ", "\n", "|\n", "&a ",
                                 "a:\n ", "? ", ", ", "%"}) {
    const size_t count = (kTextBytesMax - 16) / unit.size();
    EXPECT_FALSE(ErrorsOf(Repeat(unit, count)).empty()) << unit;
  }
}

// Any mutation of a good file gives a spec or errors with places, never a crash.
TEST(Hostile, MutationsNeverCrash) {
  const std::string good =
      "name: a\nrun: python train.py\nranks: {min: 1, max: 4}\nenv: {A: \"x\", B: 'y'}\ncheckpoint:\n  uri: "
      "/c\n  every: 30s\n"
      "script: |\n  echo\nprogress: {step: 'step (\\d+)'}\n";
  const std::string alphabet = "{}[]:,&*!|>'\"%@`#-?\n \\$019ax";
  Rng rng(20240217);
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    for (uint64_t edits = 1 + rng.Below(4); edits > 0; --edits) {
      const size_t at = rng.Below(text.size());
      const uint64_t kind = rng.Below(3);
      if (kind == 0) text.erase(at, 1 + rng.Below(5));
      if (kind == 1) text.insert(at, 1, alphabet[rng.Below(alphabet.size())]);
      if (kind == 2) text[at] = static_cast<char>(rng.Below(256));
      if (text.empty()) text = "x";
    }
    for (const SpecError& e : ParseJob(text, "f", {.default_name = "job"}).errors) {
      EXPECT_GE(e.line, 1) << text;
      EXPECT_GE(e.column, 1) << text;
      EXPECT_FALSE(e.message.empty());
    }
  }
}

}  // namespace
}  // namespace gtrain::spec
