// Tests the output for people: rank output, the status block, safe text.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/test_folder.h"
#include "base/unique_fd.h"
#include "base/units.h"
#include "launcher/cli/job_changes.h"
#include "launcher/cli/median.h"
#include "launcher/cli/news.h"
#include "launcher/cli/rank_output.h"
#include "launcher/cli/rankfile.h"
#include "launcher/cli/screen.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(Median, OfTwoIsBetweenThem) {
  EXPECT_EQ(MedianOf({3}), 3);
  EXPECT_EQ(MedianOf({2, 1}), 1.5);
  EXPECT_EQ(MedianOf({7, 1, 2}), 2);
  EXPECT_EQ(MedianOf({9, 1, 4, 2}), 3);
}

TEST(StatusDoc, WhatRanksAreBoundTo) {
  const auto doc = ParseStatusDoc(R"({"jobs":[{"id":"a-1","ranks":[
      {"rank":0,"hostname":"dgx0","cpus":[0,1,2,112],"numa":[0],"gpus":[3],"nics":["mlx5_0:1","mlx5_1:1"]},
      {"rank":1,"hostname":"dgx0","cpus":[],"numa":[],"gpus":[],"nics":[]},
      {"rank":2,"hostname":"dgx1","cpus":"x","numa":7,"nics":[1]},
      {"rank":3,"hostname":"dgx1"}]}]})");
  ASSERT_TRUE(doc.ok()) << doc.status();
  EXPECT_THAT(BindingLines(doc->jobs.at(0)),
              ElementsAre("rank 0 on dgx0: CPUs 0-2,112, NUMA 0, GPU 3, NIC mlx5_0:1,mlx5_1:1",
                          "rank 1 on dgx0: any CPU", "rank 2 on dgx1: any CPU",
                          "rank 3 on dgx1: the head does not say what it is bound to"));
}

TEST(Terminal, ADumbOneIsNotRedrawn) {
  const UniqueFd terminal(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal.valid());
  const char* term = std::getenv("TERM");
  const std::string before = term == nullptr ? "" : term;
  setenv("TERM", "xterm", 1);
  EXPECT_TRUE(CanRedraw(terminal.get()));
  setenv("TERM", "dumb", 1);
  EXPECT_TRUE(IsTerminal(terminal.get()));
  EXPECT_FALSE(CanRedraw(terminal.get()));
  EXPECT_FALSE(UsesColour(terminal.get()));
  term == nullptr ? unsetenv("TERM") : setenv("TERM", before.c_str(), 1);
}

// Fault P9.
TEST(SafeText, ShowsWhatCouldDriveATerminal) {
  EXPECT_EQ(SafeText("a\x1b[2Jb\rc\td"), "a\\x1b[2Jb\\x0dc\td");
  EXPECT_EQ(SafeText(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(SafeText("\xff\xC2\x9B"), "\\xff\\xc2\\x9b");
  EXPECT_EQ(SafeText("é🚂"), "é🚂");
  EXPECT_EQ(SafeText("a\nb"), "a\\nb");
  EXPECT_EQ(SafeText("a\u202eb\u2066c\u200ed"), "a\\xe2\\x80\\xaeb\\xe2\\x81\\xa6c\\xe2\\x80\\x8ed");
}

TEST(Complain, ShowsWhatANameHoldsWhoeverMadeItUp) {
  testing::internal::CaptureStderr();
  Complain("no \x1b]52;c;ZXZpbA==\a here\nand more");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "gtrain: no \\x1b]52;c;ZXZpbA==\\x07 here\nand more\n");
}

// A result that another user left may hold anything.
TEST(StatusBlock, ShowsControlCharactersOfADocument) {
  const auto job =
      ParseJobDoc("{\"id\": \"a\\u001b[2Jb\", \"state\": \"X\\u009b\", \"reason\": \"\\u0007\"}");
  ASSERT_TRUE(job.ok());
  for (const std::string& line : StatusBlock(*job, "hint\x1b", 1000)) {
    for (const char c : line) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << line;
  }
  EXPECT_THAT(StatusBlock(*job, "", 1000)[0], HasSubstr("a\\x1b[2Jb -- X\\xc2\\x9b --"));
}

TEST(CutToWidth, NeverCutsACodePoint) {
  EXPECT_EQ(CutToWidth("éé", 1), "é");
  EXPECT_EQ(CutToWidth("abc", 10), "abc");
  EXPECT_EQ(CutToWidth("abc", 0), "");
}

TEST(CutToWidth, CountsWhatATerminalShows) {
  EXPECT_EQ(CutToWidth("🚂🚂🚂", 5), "🚂🚂");
  EXPECT_EQ(CutToWidth("\x1b[0;31mred\x1b[0m", 3), "\x1b[0;31mred\x1b[0m");
  EXPECT_EQ(CutToWidth("\x1b[0;31mred\x1b[0m", 2), "\x1b[0;31mre\x1b[0m");
}

std::vector<std::string> Lines(const std::vector<RankOutput::Piece>& pieces) {
  std::vector<std::string> lines;
  for (const RankOutput::Piece& piece : pieces) {
    for (const absl::string_view line : absl::StrSplit(piece.text, '\n')) lines.emplace_back(line);
    EXPECT_EQ(lines.back(), "") << "each line has its end";
    lines.pop_back();
  }
  return lines;
}

TEST(RankOutput, ShowsWholeLinesOnly) {
  for (const bool only_rank : {false, true}) {
    RankOutput output({.only_rank = only_rank});
    output.Add(0, "a", false, "one\ntw");
    EXPECT_THAT(Lines(output.Take(false)), ElementsAre("a:0: one"));
    output.Add(0, "a", false, "o\n");
    EXPECT_THAT(Lines(output.Take(false)), ElementsAre("a:0: two"));
    output.Add(0, "a", true, "rest");
    EXPECT_THAT(output.Take(false), SizeIs(0));
    EXPECT_THAT(output.Take(true), ElementsAre(RankOutput::Piece{true, "a:0: rest\n"}));
  }
}

// An epoch of an hour is one line for the program; nobody should wait for its end to see that it is alive.
TEST(RankOutput, AProgressLineThatNeverEndsIsShownEveryFewSeconds) {
  RankOutput output({});
  Instant now{3'600'000'000'000};
  output.AddRedrawn(now);
  output.Add(0, "a", true, "epoch 0: 10%\r");
  output.Add(1, "a", false, "a prompt without an end");
  output.AddRedrawn(now + absl::Seconds(1));
  EXPECT_THAT(output.Take(false), ElementsAre()) << "not at once";
  output.Add(0, "a", true, "epoch 0: 20%\r");
  output.AddRedrawn(now + absl::Seconds(6));
  EXPECT_THAT(output.Take(false), ElementsAre(RankOutput::Piece{true, "a:0: epoch 0: 20%\n"}));
  output.AddRedrawn(now + absl::Seconds(12));
  EXPECT_THAT(output.Take(false), ElementsAre()) << "nothing new";
  output.Add(0, "a", true, "epoch 0: 99%\repoch 0: 100%\n");
  EXPECT_THAT(output.Take(false), ElementsAre(RankOutput::Piece{true, "a:0: epoch 0: 100%\n"}));
  output.AddRedrawn(now + absl::Seconds(18));
  EXPECT_THAT(output.Take(false), ElementsAre());
}

TEST(RankOutput, WhatRanksLeaveUnfinishedIsNoPartOfWhatTheNextOnesWrite) {
  for (const bool only_rank : {false, true}) {
    RankOutput output({.only_rank = only_rank});
    output.Add(0, "a", false, "loading weights ...");
    output.EndLines();
    output.Add(0, "a", false, "again\n");
    EXPECT_THAT(Lines(output.Take(false)), ElementsAre("a:0: loading weights ...", "a:0: again"));
  }
}

TEST(RankOutput, KeepsTheStreamsApartAndInOrder) {
  for (const bool only_rank : {false, true}) {
    RankOutput output({.only_rank = only_rank});
    output.Add(0, "a", false, "one\n");
    output.Add(0, "a", true, "two\nthree\n");
    output.Add(0, "a", false, "two\n");
    EXPECT_THAT(output.Take(false), ElementsAre(RankOutput::Piece{false, "a:0: one\n"},
                                                RankOutput::Piece{true, "a:0: two\na:0: three\n"},
                                                RankOutput::Piece{false, "a:0: two\n"}));
  }
}

TEST(RankOutput, ShowsTheLastStateOfAProgressLine) {
  RankOutput output({});
  output.Add(0, "a", true, "  0%|   | 0/9\r 50%|#  | 5/9");
  EXPECT_THAT(output.Take(false), SizeIs(0));
  output.Add(0, "a", true, "\r100%|###| 9/9\ndone\r\n");
  EXPECT_THAT(Lines(output.Take(false)), ElementsAre("a:0: 100%|###| 9/9", "a:0: done"));
  output.Add(0, "a", true, "a long line\rshort\x1b[K\nup\x1b[A\b\n");
  EXPECT_THAT(Lines(output.Take(false)), ElementsAre("a:0: short", "a:0: up\\x1b[A\\x08"));
}

// Two bars of tqdm: the lower one is drawn below, and the cursor goes up again.
TEST(RankOutput, DrawsNestedProgressOfARankThatHasTheTerminal) {
  RankOutput output({.only_rank = true, .live = true});
  output.Add(0, "a", true, "\router 0\n\rinner 0\x1b[A\router 1\n\rinner 1\x1b[A");
  EXPECT_THAT(output.Take(false), SizeIs(0));
  EXPECT_THAT(output.Unfinished(), ElementsAre("a:0: outer 1", "a:0: inner 1"));
  output.Add(0, "a", false, "a line between\nand a que");
  EXPECT_THAT(Lines(output.Take(false)), ElementsAre("a:0: a line between"));
  EXPECT_THAT(output.Unfinished(), ElementsAre("a:0: and a que", "a:0: outer 1", "a:0: inner 1"));
  output.Add(0, "a", true, "\n\n\n");
  EXPECT_THAT(Lines(output.Take(true)),
              ElementsAre("a:0: outer 1", "a:0: inner 1", "a:0: and a que", "a:0: "));
  EXPECT_THAT(output.Unfinished(), SizeIs(0));
}

// Fault P9: the title, the clipboard, what is pasted, the other screen, the keyboard, a string without end.
TEST(RankOutput, NothingButColoursReachesTheTerminal) {
  for (const char* attack : {"\x1b]0;title\x07",
                             "\x1b]52;c;ZXZpbA==\x07",
                             "\x1b[?2004h",
                             "\x1b[?1049h",
                             "\x1b[?25l",
                             "\x1b[2J",
                             "\x1b[6n",
                             "\x1bPq\x1b\\",
                             "\x1b[5;31m",
                             "\x1b[8m",
                             "\x1b[>4;1m",
                             "\x1b[3 q",
                             "\x1b[31;1$m",
                             "\xC2\x9B[2J",
                             "\x9B",
                             "\x07",
                             "\x0e",
                             "\x1b"
                             "c",
                             "\x1b[38;5;999m",
                             "\x1b[1;2;3;4;5;6;7;8;9;0;1;2;3;4;5;6;7;8;9;0;1;2;3m"}) {
    for (const bool live : {false, true}) {
      RankOutput output({.only_rank = live, .live = live, .colour_out = true});
      output.Add(0, "a", false, attack);
      output.Add(0, "a", false, "x\n");
      for (const std::string& line : Lines(output.Take(true))) {
        for (const char c : line) EXPECT_TRUE(c >= 0x20 && c < 0x7F) << line;
      }
    }
  }
}

TEST(RankOutput, WritesColoursAnewAndEndsThemWithTheLine) {
  const char* text = "\x1b[1;31mred\n\x1b[mplain \x1b[38;5;208mo\x1b[0m\x1b[48;2;1;2;3mb\n";
  for (const bool colour : {false, true}) {
    RankOutput output({.colour_out = colour});
    for (const char* byte = text; *byte != '\0'; ++byte) output.Add(0, "a", false, std::string(1, *byte));
    EXPECT_THAT(Lines(output.Take(true)),
                colour ? ElementsAre("a:0: \x1b[0;1;31mred\x1b[0m",
                                     "a:0: plain \x1b[0;38;5;208mo\x1b[0;48;2;1;2;3mb\x1b[0m")
                       : ElementsAre("a:0: red", "a:0: plain ob"));
  }
}

// A short code that jumps far must not cost memory for each time it comes.
TEST(TextRows, BoundsWhatItHolds) {
  TextRows rows(/*cursor=*/true, /*colour=*/false);
  size_t bytes = 0;
  for (int i = 0; i < 20'000; ++i) {
    rows.Write("\x1b[16000C\x1b[9Ax\n");
    for (const std::string& row : rows.TakeFinished(false)) bytes += row.size();
  }
  EXPECT_LE(rows.Unfinished().size(), TextRows::kRowsMax);
  EXPECT_LE(bytes, 20'000 * (TextRows::kJumpMax + 1));
}

// `yes | head -c 80k` took half a minute.
TEST(RankOutput, ManyEqualLinesCostNoMoreThanOthers) {
  RankOutput output({});
  std::string many;
  for (int i = 0; i < 300'000; ++i) many += "y\n";
  for (const int rank : {0, 1}) output.Add(rank, "h", false, many);
  output.Add(1, "h", false, "y\n");
  const std::vector<std::string> lines = Lines(output.Take(false));
  ASSERT_EQ(lines.size(), 300'001u);
  EXPECT_EQ(lines.front(), "h:0,1: y");
  EXPECT_EQ(lines[299'999], "h:0,1: y");
  EXPECT_EQ(lines.back(), "h:1: y");
}

TEST(RankOutput, CollapsesEqualLinesOfSeveralRanks) {
  RankOutput output({});
  for (const int rank : {0, 1, 2, 3}) output.Add(rank, rank < 3 ? "a" : "b", false, "loading\n");
  output.Add(1, "a", false, "only me\n");
  output.Add(0, "a", false, "loading\n");
  EXPECT_THAT(Lines(output.Take(false)), ElementsAre("a:0-2 b:3: loading", "a:1: only me", "a:0: loading"));
}

// Plain lines are taken many at a time, others byte by byte: however the bytes are cut, the same is shown.
// A line that joined an earlier equal one of another rank stood before what its own rank had written before
// it.
TEST(RankOutput, WhatARankWroteStaysInItsOrder) {
  RankOutput output({});
  std::string zero, one;
  for (int i = 0; i < 3; ++i) {
    absl::StrAppend(&zero, "done ", i, "\n");
    absl::StrAppend(&one, "begin ", i, "\ndone ", i, "\n");
  }
  output.Add(0, "a", false, zero);
  output.Add(1, "a", false, one);
  output.Add(2, "a", false, one);
  EXPECT_THAT(output.Take(false),
              ElementsAre(RankOutput::Piece{
                  false,
                  "a:0: done 0\na:0: done 1\na:0: done 2\na:1,2: begin 0\na:1,2: done 0\na:1,2: begin 1\n"
                  "a:1,2: done 1\na:1,2: begin 2\na:1,2: done 2\n"}));
  output.Add(1, "a", false, "done 0\n");
  output.Add(0, "a", false, "done 0\n");
  EXPECT_THAT(output.Take(false), ElementsAre(RankOutput::Piece{false, "a:0,1: done 0\n"}))
      << "after a Take nothing is before";
}

TEST(RankOutput, ShowsTheSameHoweverItIsRead) {
  Rng rng(20'26);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (uint64_t lines = rng.Below(40); lines > 0; --lines) {
      text += std::string(rng.Below(40), 'x');
      if (rng.Below(4) == 0)
        text += std::vector<std::string>{"\t", "\r", "\x7f", "\x1f", "\x80", "é"}[rng.Below(6)];
      if (rng.Below(100) == 0) text += std::string(TextRows::kRowLengthMax - 1 + rng.Below(3), 'y');
      text += std::string(rng.Below(20), 'z') + "\n";
    }
    for (const bool only_rank : {false, true}) {
      RankOutput by_byte({.only_rank = only_rank}), at_once({.only_rank = only_rank}),
          in_parts({.only_rank = only_rank});
      for (const char byte : text) by_byte.Add(0, "a", false, {&byte, 1});
      at_once.Add(0, "a", false, text);
      for (size_t at = 0; at < text.size();) {
        const size_t bytes = std::min<size_t>(1 + rng.Below(100), text.size() - at);
        in_parts.Add(0, "a", false, absl::string_view(text).substr(at, bytes));
        at += bytes;
      }
      const std::vector<std::string> lines = Lines(by_byte.Take(true));
      EXPECT_EQ(Lines(at_once.Take(true)), lines);
      EXPECT_EQ(Lines(in_parts.Take(true)), lines);
    }
  }
}

// A rank's line is merged with the first equal line behind the rank's own earlier lines, whichever rank was
// first.
TEST(RankOutput, CollapsesTheSameHowOftenEachWroteIt) {
  Rng rng(20'27);
  for (int round = 0; round < 300; ++round) {
    RankOutput output({});
    std::vector<std::pair<std::string, std::set<int>>> expected;  // in the order in which they first came
    std::map<int, size_t> behind;  // of each rank, how many lines stand up to its newest
    for (int i = 0; i < 60; ++i) {
      const int rank = static_cast<int>(rng.Below(4));
      const std::string text(1, static_cast<char>('a' + rng.Below(3)));
      output.Add(rank, "h", false, text + "\n");
      const auto it = std::find_if(expected.begin() + static_cast<ptrdiff_t>(behind[rank]), expected.end(),
                                   [&](const auto& line) { return line.first == text; });
      behind[rank] = static_cast<size_t>(it - expected.begin()) + 1;
      (it == expected.end() ? expected.emplace_back(text, std::set<int>()) : *it).second.insert(rank);
    }
    std::vector<std::string> lines;
    for (const auto& [text, ranks] : expected) {
      lines.push_back(absl::StrCat("h:", PrintRanks({ranks.begin(), ranks.end()}), ": ", text));
    }
    ASSERT_EQ(Lines(output.Take(false)), lines);
  }
}

// Fault P9: one line of 100 KB is split, and bytes that are no text are shown.
TEST(RankOutput, BoundsLinesAndEscapes) {
  RankOutput output({});
  output.Add(0, "a", false, std::string(40'000, 'x') + "\n\x1b[31mred\x1b[7C\n");
  const std::vector<std::string> lines = Lines(output.Take(false));
  ASSERT_THAT(lines, SizeIs(4));
  for (const std::string& line : lines) EXPECT_LE(line.size(), TextRows::kRowLengthMax + 8);
  EXPECT_EQ(lines[3], "a:0: red\\x1b[7C");
}

TEST(JobChanges, NamesTheWords) {
  spec::JobSpec before, now;
  before.run = {"python", "train.py", "--lr", "0.1", "--bf16", "data"};
  now.run = {"python", "train.py", "--lr", "0.2", "data", "--seed", "7"};
  before.env = {{"A", "1"}, {"B", "2"}};
  now.env = {{"B", "3"}, {"C", "4"}};
  EXPECT_THAT(JobChanges(before, before), SizeIs(0));
  EXPECT_THAT(JobChanges(before, now), ElementsAre("--lr 0.1 --bf16 is now --lr 0.2", "--seed 7 is new",
                                                   "env A is gone", "env B 2 is now 3", "env C is new: 4"));
  now = before;
  now.script = std::exchange(now.run, {}).front();
  EXPECT_THAT(JobChanges(before, now), ElementsAre("run is now a script"));
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

TEST(News, SaysAResizeOnce) {
  News news;
  EXPECT_TRUE(news.Worth({1, 1, "resize", "it grows from 2 to 3 ranks"}));
  EXPECT_FALSE(news.Worth({2, 1, "revoke", "generation 1 is over: it grows from 2 to 3 ranks"}));
  EXPECT_FALSE(news.Worth({3, 1, "state", "RECONFIGURING: it grows from 2 to 3 ranks"}));
}

TEST(StatusBlock, CountsOneRankAsOne) {
  JobDoc job{.id = "a-1"};
  for (int rank = 0; rank < 3; ++rank) job.ranks.push_back({rank, "h", "joined", 0, std::nullopt});
  job.ranks.push_back({3, "h", "waiting", 0, std::nullopt});
  EXPECT_THAT(StatusBlock(job, "", 1000), ::testing::Contains("   h: ranks 0-2 joined, rank 3 waiting"));
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
    "waits": "no step in this generation so far", "spares": "0 of 1 waits",
    "owner": "taken over by train-9", "storage": "/ckpt: EIO", "saves": "2 saves came to nothing",
    "holders": [{"node": "7", "hostname": "k1"}, {"node": "8", "hostname": "k2"}],
    "first_fault": {"message": "rank 1 died", "tail": "boom"},
    "ranks": [{"rank": 0, "hostname": "h", "state": "running", "step": 12}, {"rank": 1, "hostname": "h", "state": "running"}]}]})");
  ASSERT_TRUE(doc.ok()) << doc.status();
  ASSERT_THAT(doc->jobs, SizeIs(1));
  const JobDoc& job = doc->jobs[0];
  EXPECT_EQ(job.step, 12);
  EXPECT_EQ(job.first_fault->message, "rank 1 died");
  EXPECT_EQ(job.restore, "step 10 in 0.3 s");
  EXPECT_THAT(job.notes,
              ElementsAre("no step in this generation so far", "spares: 0 of 1 waits",
                          "checkpoints every 42 s: a save costs 0.2 s", "gradients: topk for 2 of 3 buckets",
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

TEST(StatusDoc, TheFaultThatEndedAJobIsToldBesideTheFirst) {
  const std::string first =
      R"({"message": "rank 1 on h: killed by signal 9", "tail": "", "generation": 1, "rank": 1})";
  const std::string last =
      R"({"message": "rank 0 on h: exit code 1", "tail": "a\n\nSyntaxError: no", "generation": 3, "rank": 0})";
  const auto lines = [](const std::string& faults) {
    return FaultLines(ParseJobDoc(absl::StrCat(R"({"id": "a-1", )", faults, "}")).value());
  };
  EXPECT_THAT(lines(absl::StrCat(R"("first_fault": )", first, R"(, "last_fault": )", last)),
              ElementsAre("first fault: rank 1 on h: killed by signal 9",
                          "last fault: rank 0 on h: exit code 1", "  a", "  SyntaxError: no",
                          "  all that it wrote: gtrain logs a-1 --generation 3 --rank 0"));
  EXPECT_THAT(lines(absl::StrCat(R"("first_fault": )", first, R"(, "last_fault": )", first)),
              ElementsAre("first fault: rank 1 on h: killed by signal 9"))
      << "which is the same";
  EXPECT_THAT(lines(absl::StrCat(R"("first_fault": null, "size_fault": )", last)),
              ElementsAre("why it does not grow: rank 0 on h: exit code 1", "  a", "  SyntaxError: no",
                          "  all that it wrote: gtrain logs a-1 --generation 3 --rank 0"));
  EXPECT_THAT(lines(R"("first_fault": null, "last_fault": {"message": "node b is lost", "rank": null})"),
              ElementsAre("last fault: node b is lost"));
}

StatusDoc Jobs(const std::vector<std::pair<std::string, std::string>>& names_and_states) {
  StatusDoc doc;
  for (const auto& [name, state] : names_and_states) {
    JobDoc job;
    job.id = absl::StrCat(name, "-", doc.jobs.size() + 1);
    job.name = name;
    job.state = state;
    doc.jobs.push_back(job);
  }
  return doc;
}

TEST(ChooseJob, ANameIsTheOneThatRuns) {
  const auto choose = [](const StatusDoc& doc, const char* word, Without without = Without::kRefuse) {
    const auto job = ChooseJob(doc, word, without);
    return job.ok() ? job->id : std::string(job.status().message());
  };
  StatusDoc doc = Jobs(
      {{"dup", "FAILED"}, {"dup", "RUNNING"}, {"other", "QUEUED"}, {"dup", "SUCCEEDED"}, {"old", "FAILED"}});
  EXPECT_EQ(choose(doc, "dup"), "dup-2");
  EXPECT_EQ(choose(doc, "dup-4"), "dup-4");
  EXPECT_EQ(choose(doc, "old"), "old-5");
  EXPECT_EQ(choose(doc, ""), "several jobs run: say which: dup-2, other-3");
  EXPECT_THAT(choose(doc, "nobody"), HasSubstr("no job nobody"));
  doc.jobs[2].name = "dup-4";  // an id wins over a name
  EXPECT_EQ(choose(doc, "dup-4"), "dup-4");
  EXPECT_EQ(choose(Jobs({{"dup", "RUNNING"}, {"dup", "FAILED"}, {"dup", "QUEUED"}}), "dup"),
            "several jobs called dup run: say which: dup-1, dup-3");
  EXPECT_EQ(choose(Jobs({{"dup", "FAILED"}, {"dup", "SUCCEEDED"}}), "dup"), "dup-2");
  EXPECT_THAT(choose(Jobs({{"a", "FAILED"}}), ""), HasSubstr("no job runs"));
  EXPECT_EQ(choose(Jobs({{"a", "FAILED"}, {"b", "FAILED"}}), "", Without::kNewest), "b-2");
}

TEST(RestoreNews, SaysAStepAndItsFolder) {
  EXPECT_EQ(RestoreNews("step 10 in 0.30 s: 1 KiB from /ckpt, 0 B from copies on the ranks' own machines"),
            "resumed step 10 in 0.30 s: 1 KiB from /ckpt. To begin anew: gtrain launch --fresh ...");
  EXPECT_EQ(RestoreNews("nothing: no checkpoint is in /ckpt, so training begins anew"), "");
}

TEST(Rankfile, SlotsAreOfGpusAndNodesWithoutANameOfTheirOwnGoByTheirIds) {
  const std::string path = TestFolder() + "/ranks";
  const auto written = [&](const std::vector<PlacedRank>& ranks) {
    EXPECT_TRUE(WriteRankfile(path, ranks).ok());
    return ReadFile(path, 4096).value_or("");
  };
  EXPECT_EQ(written({{1, 0, "n", "b", {4, 5}}, {0, 0, "m", "a", {2, 3}}}),
            "rank 0=a slot=1\nrank 1=b slot=2\n");
  EXPECT_EQ(written({{0, 0, "m", "a", {}}, {1, 1, "m", "a", {}}}), "rank 0=a slot=0\nrank 1=a slot=1\n");
  EXPECT_EQ(written({{0, 0, "m", "a", {1, 2}}, {1, 1, "m", "a", {4, 5}}}),
            "rank 0=a slot=0\nrank 1=a slot=1\n")
      << "GPUs 1 and 2 are no place";
  EXPECT_EQ(written({{0, 0, "m", "a", {0}}, {1, 0, "n", "a", {0}}, {2, 0, "o", "x\nrank 9=y", {0}}}),
            "rank 0=m slot=0\nrank 1=n slot=0\nrank 2=o slot=0\n");
  const auto job = ParseJobDoc(R"({"id": "j", "state": "RUNNING", "world_size": 1, "ranks": [
      {"rank": 0, "local_rank": 2, "node": "m", "hostname": "a", "gpus": [3, "x"]}, {"rank": 1, "gpus": 7}]})");
  ASSERT_TRUE(job.ok());
  const auto ranks = PlacedRanksOf(*job);
  ASSERT_TRUE(ranks.ok());
  ASSERT_THAT(*ranks, SizeIs(1)) << "who waits beside the ranks has no place";
  EXPECT_EQ(written(*ranks), "rank 0=a slot=3\n");
  EXPECT_FALSE(PlacedRanksOf(JobDoc()).ok());
}

TEST(StatusDoc, SurvivesOtherShapes) {
  for (const char* text : {"", "[]", "{", "null"}) EXPECT_FALSE(ParseStatusDoc(text).ok()) << text;
  EXPECT_TRUE(ParseStatusDoc(R"({"jobs": [1, {"id": 3, "ranks": {}, "step": "x"}], "nodes": "many"})").ok());
  EXPECT_TRUE(ParseEventsDoc(R"({"events": [{}, 7]})").ok());
  EXPECT_TRUE(ParseLogDoc("{}").ok());
}

}  // namespace
}  // namespace gtrain::cli
