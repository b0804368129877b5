#include "runtime/core/log_tails.h"

#include <gtest/gtest.h>

namespace gtrain::core {
namespace {

LogTail Tail(int rank, std::string text) {
  LogTail tail;
  tail.job = JobId("j");
  tail.generation = {1};
  tail.rank = rank;
  tail.text = std::move(text);
  return tail;
}

TEST(LogTails, NewestReplacesAndKeepsTheEnd) {
  LogTails tails(4, 100);
  tails.Put(Tail(0, "first"));
  tails.Put(Tail(0, "abcdefgh"));
  ASSERT_NE(tails.Find(JobId("j"), {1}, 0, false), nullptr);
  EXPECT_EQ(tails.Find(JobId("j"), {1}, 0, false)->text, "efgh");
  EXPECT_EQ(tails.Find(JobId("j"), {1}, 0, true), nullptr);
  EXPECT_EQ(tails.bytes(), 4u);
}

TEST(LogTails, TotalIsBoundedOldestGoesFirst_X16) {
  LogTails tails(10, 25);
  for (int rank = 0; rank < 3; ++rank) tails.Put(Tail(rank, std::string(10, 'x')));
  EXPECT_EQ(tails.Find(JobId("j"), {1}, 0, false), nullptr);
  EXPECT_NE(tails.Find(JobId("j"), {1}, 2, false), nullptr);
  EXPECT_LE(tails.bytes(), 25u);
}

}  // namespace
}  // namespace gtrain::core
