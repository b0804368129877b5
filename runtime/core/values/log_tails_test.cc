#include "runtime/core/values/log_tails.h"

#include <gtest/gtest.h>

namespace gtrain::core {
namespace {

constexpr size_t kCost = LogTails::kTailCost;

LogTail Tail(int rank, std::string text, uint64_t piece = 0, const char* job = "j") {
  LogTail tail;
  tail.job = JobId(job);
  tail.generation = {1};
  tail.rank = rank;
  tail.end_offset = 100 + piece;
  tail.text = std::move(text);
  tail.piece = piece;
  return tail;
}

TailKey Key(int rank, const char* job = "j") { return {JobId(job), {1}, rank, false}; }

std::string TextOf(const LogTails& tails, const TailKey& key) {
  const HeldTail* tail = tails.Find(key);
  return tail == nullptr ? "none" : tail->text;
}

TEST(LogTails, NewestReplacesAndKeepsTheEnd) {
  LogTails tails(4, 1000);
  tails.Put(Tail(0, "first"));
  tails.Put(Tail(0, "abcdefgh"));
  EXPECT_EQ(TextOf(tails, Key(0)), "efgh");
  EXPECT_EQ(TextOf(tails, {JobId("j"), {1}, 0, true}), "none");
  EXPECT_EQ(TextOf(tails, {JobId("j"), {2}, 0, false}), "none");
  EXPECT_EQ(tails.bytes(), 4u + kCost);
}

TEST(LogTails, PiecesAreJoined) {
  LogTails tails(8, 1000);
  tails.Put(Tail(0, "one "));
  tails.Put(Tail(0, "two ", 1));
  EXPECT_EQ(TextOf(tails, Key(0)), "one two ");
  EXPECT_EQ(tails.Find(Key(0))->end_offset, 101u);
  tails.Put(Tail(0, "two ", 1));  // doubled
  EXPECT_EQ(TextOf(tails, Key(0)), "one two ");
  tails.Put(Tail(0, "3", 2));
  EXPECT_EQ(TextOf(tails, Key(0)), "ne two 3");
  EXPECT_EQ(tails.bytes(), 8u + kCost);
  tails.Put(Tail(0, "", 3));  // only its log grew
  EXPECT_EQ(TextOf(tails, Key(0)), "ne two 3");
  tails.Put(Tail(0, "five", 5));  // 4 was lost
  EXPECT_EQ(TextOf(tails, Key(0)), "five");
  tails.Put(Tail(0, "six", 6));
  EXPECT_EQ(TextOf(tails, Key(0)), "fivesix");
  tails.Put(Tail(0, "all"));  // welcomed again, or an older agent, which tells all each time
  EXPECT_EQ(TextOf(tails, Key(0)), "all");
  tails.Put(Tail(1, "and on", 7));  // one that is not known here
  EXPECT_EQ(TextOf(tails, Key(1)), "and on");
}

TEST(LogTails, TotalIsBoundedOldestGoesFirst_X16) {
  LogTails tails(10, 2 * (10 + kCost) + kCost);
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_TRUE(tails.Put(Tail(rank, std::string(10, 'a' + rank))).empty());
  const std::vector<SpillTail> leaves = tails.Put(Tail(2, "cccccccccc"));
  ASSERT_EQ(leaves.size(), 1u);
  EXPECT_EQ(leaves[0], (SpillTail{Key(0), 0, 100, "aaaaaaaaaa"}));
  EXPECT_EQ(TextOf(tails, Key(0)), "");
  EXPECT_EQ(TextOf(tails, Key(1)), "bbbbbbbbbb");
  EXPECT_EQ(TextOf(tails, Key(2)), "cccccccccc");
  for (int rank = 3; rank < 100; ++rank) tails.Put(Tail(rank, "x"));
  EXPECT_LE(tails.bytes(), 2 * (10 + kCost) + kCost);
  EXPECT_EQ(tails.Find(Key(0)), nullptr);  // not for ever remembered either
}

// The agent does not report again the part of a tail that was spilled before.
TEST(LogTails, WhatLeavesFollowsWhatLeftBefore) {
  LogTails tails(100, 2 * kCost + 10);
  tails.Put(Tail(0, "zero one "));
  EXPECT_EQ(tails.Put(Tail(1, "other")), (std::vector<SpillTail>{{Key(0), 0, 100, "zero one "}}));
  EXPECT_TRUE(tails.Put(Tail(0, "two", 1)).empty());
  EXPECT_EQ(tails.Find(Key(0))->spilled, 9u);
  EXPECT_EQ(tails.Put(Tail(1, "more", 1)), (std::vector<SpillTail>{{Key(0), 9, 101, "two"}}));
  EXPECT_EQ(tails.Find(Key(0))->spilled, 12u);
  tails.Put(Tail(0, "anew"));
  EXPECT_EQ(tails.Find(Key(0))->spilled, 0u);
}

// Others that write more do not make it forget what a quiet one has on the disk.
TEST(LogTails, AQuietTailGoesOnWhereItLeft) {
  LogTails tails(64 << 10, 60'000);
  tails.Put(Tail(0, std::string(20'000, 'q')));
  for (int round = 0; round < 100; ++round) {
    for (int rank = 1; rank < 60; ++rank) tails.Put(Tail(rank, std::string(1 + 37 * rank, 'x'), round));
  }
  ASSERT_EQ(TextOf(tails, Key(0)), "");
  tails.Put(Tail(0, "later", 1));
  EXPECT_EQ(tails.Find(Key(0))->spilled, 20'000u);
  EXPECT_LE(tails.bytes(), 60'000u);
}

TEST(LogTails, NoJobCostsAnotherOneItsTails) {
  LogTails tails(1000, 20'000);
  tails.Put(Tail(0, "quiet", 0, "quiet"));
  for (int round = 0; round < 50; ++round) {
    for (int rank = 0; rank < 100; ++rank) {
      for (const SpillTail& leaves : tails.Put(Tail(rank, std::string(500, 'x'), round, "noisy")))
        ASSERT_EQ(leaves.tail.job.value, "noisy");
    }
  }
  EXPECT_EQ(TextOf(tails, Key(0, "quiet")), "quiet");
  EXPECT_LE(tails.bytes(), 20'000u);
  tails.Forget(JobId("noisy"));
  EXPECT_EQ(tails.bytes(), 5 + kCost);
  tails.Forget(JobId("quiet"));
  EXPECT_EQ(tails.bytes(), 0u);
}

TEST(LogTails, BothPartsAreJoined) {
  const SpilledTail spilled{"of disk ", 20, 70};
  const HeldTail held{"of memory", 90, 20, 3};
  EXPECT_EQ(Joined(spilled, held, 100).text, "of disk of memory");
  EXPECT_EQ(Joined(spilled, held, 100).end_offset, 90u);
  EXPECT_EQ(Joined(spilled, held, 12).text, "sk of memory");
  EXPECT_EQ(Joined(std::nullopt, held, 100).text, "of memory");
  EXPECT_EQ(Joined(spilled, std::nullopt, 100).text, "of disk ");
  EXPECT_EQ(Joined(spilled, std::nullopt, 100).end_offset, 70u);
  // A part between them is lost: what is older says nothing.
  EXPECT_EQ(Joined(SpilledTail{"old", 19, 60}, held, 100).text, "of memory");
  // Some or all of what was held has left since.
  EXPECT_EQ(Joined(SpilledTail{"of disk of ", 23, 74}, held, 100).text, "of disk of memory");
  EXPECT_EQ(Joined(SpilledTail{"of disk of memory!", 30, 91}, held, 100).text, "of disk of memory!");
  // A tail that began anew has nothing before it.
  EXPECT_EQ(Joined(spilled, HeldTail{"anew", 5, 0, 0}, 100).text, "anew");
}

}  // namespace
}  // namespace gtrain::core
