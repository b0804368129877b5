// What people see: rank output, the status block, safe text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/cli/news.h"
#include "launcher/cli/rank_output.h"
#include "launcher/cli/screen.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// Fault P9.
TEST(SafeText, ShowsWhatCouldDriveATerminal) {
  EXPECT_EQ(SafeText("a\x1b[2Jb\rc\td"), "a\\x1b[2Jb\\x0dc\td");
  EXPECT_EQ(SafeText(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(SafeText("\xff\xC2\x9B"), "\\xff\\xc2\\x9b");
  EXPECT_EQ(SafeText("é🚂"), "é🚂");
  EXPECT_EQ(SafeText("a\nb"), "a\\nb");
}

TEST(CutToWidth, NeverCutsACodePoint) {
  EXPECT_EQ(CutToWidth("éé", 1), "é");
  EXPECT_EQ(CutToWidth("abc", 10), "abc");
  EXPECT_EQ(CutToWidth("abc", 0), "");
}

TEST(RankOutput, ShowsWholeLinesOnly) {
  RankOutput output;
  output.Add(0, "a", false, "one\ntw");
  EXPECT_THAT(output.Take(false), ElementsAre("a:0: one"));
  output.Add(0, "a", false, "o\n");
  EXPECT_THAT(output.Take(false), ElementsAre("a:0: two"));
  output.Add(0, "a", true, "rest");
  EXPECT_THAT(output.Take(false), SizeIs(0));
  EXPECT_THAT(output.Take(true), ElementsAre("a:0: rest"));
}

// `yes | head -c 80k` took half a minute.
TEST(RankOutput, ManyEqualLinesCostNoMoreThanOthers) {
  RankOutput output;
  std::string many;
  for (int i = 0; i < 300'000; ++i) many += "y\n";
  for (const int rank : {0, 1}) output.Add(rank, "h", false, many);
  output.Add(1, "h", false, "y\n");
  const std::vector<std::string> lines = output.Take(false);
  ASSERT_EQ(lines.size(), 300'001u);
  EXPECT_EQ(lines.front(), "h:0,1: y");
  EXPECT_EQ(lines[299'999], "h:0,1: y");
  EXPECT_EQ(lines.back(), "h:1: y");
}

TEST(RankOutput, CollapsesEqualLinesOfSeveralRanks) {
  RankOutput output;
  for (const int rank : {0, 1, 2, 3}) output.Add(rank, rank < 3 ? "a" : "b", false, "loading\n");
  output.Add(1, "a", false, "only me\n");
  output.Add(0, "a", false, "loading\n");
  EXPECT_THAT(output.Take(false), ElementsAre("a:0-2 b:3: loading", "a:1: only me", "a:0: loading"));
}

// Fault P9: one line of 100 KB is split, and bytes that are no text are shown.
TEST(RankOutput, BoundsLinesAndEscapes) {
  RankOutput output;
  output.Add(0, "a", false, std::string(40'000, 'x') + "\n\x1b[31mred\n");
  const std::vector<std::string> lines = output.Take(false);
  ASSERT_THAT(lines, SizeIs(4));
  for (const std::string& line : lines) EXPECT_LE(line.size(), RankOutput::kLineBytesMax + 8);
  EXPECT_EQ(lines[3], "a:0: \\x1b[31mred");
}

TEST(News, SaysAFaultAndItsVerdictOnceEach) {
  News news;
  std::vector<std::string> said;
  const auto hear = [&](const char* kind, const char* text) {
    if (news.Worth({1, 1, kind, text})) said.push_back(text);
  };
  for (int round = 0; round < 2; ++round) {  // the same fault again is news again
    hear("state", "RUNNING: all ranks run");
    hear("checkpoint", "checkpoint of step 5 is committed");
    hear("fault", "rank 1 on a: exit code 7");
    hear("revoke", "generation 1 is over: rank 1 on a: exit code 7");
    hear("state", "RECONFIGURING: rank 1 on a: exit code 7");
    hear("state", "RECONFIGURING: rank 1 on a: exit code 7; crash 1 of 10 in 1h");
  }
  hear("state", "FAILED: rank 1 on a: exit code 7");
  EXPECT_THAT(said, ElementsAre("RUNNING: all ranks run", "rank 1 on a: exit code 7",
                                "RECONFIGURING: rank 1 on a: exit code 7; crash 1 of 10 in 1h",
                                "RUNNING: all ranks run", "rank 1 on a: exit code 7",
                                "RECONFIGURING: rank 1 on a: exit code 7; crash 1 of 10 in 1h",
                                "FAILED: rank 1 on a: exit code 7"));
}

TEST(News, SaysAnEndWithoutAFault) {
  News news;
  EXPECT_TRUE(news.Worth({1, 1, "revoke", "generation 1 is over: a is silent"}));
  EXPECT_FALSE(news.Worth({2, 1, "state", "RECONFIGURING: a is silent"}));
  EXPECT_TRUE(news.Worth({3, 1, "warning", "a did not confirm"}));
  EXPECT_TRUE(news.Worth({4, 1, "note", "a is silent"}));
}

TEST(StatusDoc, ReadsTheHeadsDocument) {
  const auto doc =
      ParseStatusDoc(R"({"local": true, "nodes": 1, "jobs": [{"id": "a-1", "name": "a", "state": "RUNNING",
    "reason": "all ranks run", "generation": 2, "world_size": 2, "step": 12, "loss": 0.5, "restarts": 1,
    "samples_per_second": 100.5, "last_checkpoint": {"step": 10}, "checkpoint_policy": "every 42 s: a save costs 0.2 s",
    "compression": "topk for 2 of 3 buckets", "restore": "step 10 in 0.3 s",
    "owner": "taken over by train-9", "storage": "/ckpt: EIO", "saves": "2 saves came to nothing",
    "holders": [{"node": "7", "hostname": "k1"}, {"node": "8", "hostname": "k2"}],
    "first_fault": {"message": "rank 1 died", "tail": "boom"},
    "ranks": [{"rank": 0, "hostname": "h", "state": "running", "step": 12}, {"rank": 1, "hostname": "h", "state": "running"}]}]})");
  ASSERT_TRUE(doc.ok()) << doc.status();
  ASSERT_THAT(doc->jobs, SizeIs(1));
  const JobDoc& job = doc->jobs[0];
  EXPECT_EQ(job.step, 12);
  EXPECT_EQ(job.first_fault->message, "rank 1 died");
  EXPECT_THAT(job.notes,
              ElementsAre("checkpoints every 42 s: a save costs 0.2 s", "gradients: topk for 2 of 3 buckets",
                          "restored step 10 in 0.3 s", "checkpoint directory: taken over by train-9",
                          "saves: 2 saves came to nothing", "storage: /ckpt: EIO",
                          "copies of its checkpoints are also kept on k1, k2, outside the job"));
  EXPECT_EQ(PrintProgress(job), "step 12, loss 0.5, 100 samples/s, checkpoint at step 10, 1 restart");
  const std::vector<std::string> block = StatusBlock(job, "hint", 40);
  ASSERT_THAT(block, SizeIs(5));
  EXPECT_THAT(block[0], HasSubstr("a-1 -- RUNNING"));
  EXPECT_THAT(block[2], HasSubstr("h: ranks 0,1 running"));
  for (const std::string& line : block) EXPECT_LE(line.size(), 40u);
}

TEST(StatusDoc, SurvivesOtherShapes) {
  for (const char* text : {"", "[]", "{", "null"}) EXPECT_FALSE(ParseStatusDoc(text).ok()) << text;
  EXPECT_TRUE(ParseStatusDoc(R"({"jobs": [1, {"id": 3, "ranks": {}, "step": "x"}], "nodes": "many"})").ok());
  EXPECT_TRUE(ParseEventsDoc(R"({"events": [{}, 7]})").ok());
  EXPECT_TRUE(ParseLogDoc("{}").ok());
}

}  // namespace
}  // namespace gtrain::cli
