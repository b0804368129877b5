#include "comm/ucx/mailbox.h"

#include <string>
#include <vector>

#include "base/rng.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

MessageHeader Piece(uint64_t sender, uint64_t number, uint64_t total, uint64_t offset) {
  MessageHeader header;
  header.sender = sender;
  header.number = number;
  header.total = total;
  header.offset = offset;
  return header;
}

TEST(Mailbox, WhicheverIsThereFirst) {
  Mailbox mailbox(3);
  char memory[4] = {};
  const uint64_t number = mailbox.Expect(1, memory, 4, nullptr);
  EXPECT_FALSE(mailbox.Done(1, number));
  ASSERT_TRUE(mailbox.Take(Piece(1, 0, 4, 0), "abcd").ok());
  EXPECT_TRUE(mailbox.Done(1, number));
  EXPECT_EQ(std::string(memory, 4), "abcd");

  ASSERT_TRUE(mailbox.Take(Piece(2, 0, 2, 0), "xy").ok());
  ASSERT_TRUE(mailbox.Take(Piece(2, 1, 3, 0), "123").ok());
  size_t received = 0;
  char first[8] = {}, second[3] = {};
  const uint64_t one = mailbox.Expect(2, first, sizeof(first), &received);
  const uint64_t two = mailbox.Expect(2, second, 3, nullptr);
  EXPECT_TRUE(mailbox.Done(2, two));
  EXPECT_TRUE(mailbox.Done(2, one));
  EXPECT_EQ(std::string(first, received), "xy");
  EXPECT_EQ(std::string(second, 3), "123");
  EXPECT_FALSE(mailbox.AnyReady()) << "all of it was one piece";
}

// The rest of a message comes when its receiver says so: at once where it knows that there is more, else when
// the first piece tells; once either way.
TEST(Mailbox, TheRestWaitsForTheReceiver) {
  const size_t total = 3 * kPieceBytes + 7;
  std::string sent(total, '\0');
  Rng rng(1);
  for (char& c : sent) c = static_cast<char>(rng.Next());
  for (const bool early : {false, true}) {
    for (const bool exact : {false, true}) {
      SCOPED_TRACE(testing::Message() << early << exact);
      Mailbox mailbox(2);
      std::string memory(total, '\0');
      size_t received = 0;
      const auto piece = [&](size_t i) {
        const size_t at = i * kPieceBytes, bytes = std::min(kPieceBytes, total - at);
        return mailbox.Take(Piece(1, 0, total, at), absl::string_view(sent).substr(at, bytes));
      };
      if (early) {
        ASSERT_TRUE(piece(0).ok());
        EXPECT_FALSE(mailbox.AnyReady());
      }
      const uint64_t number = mailbox.Expect(1, memory.data(), total, exact ? nullptr : &received);
      EXPECT_EQ(mailbox.AnyReady(), early || exact);
      if (!early) {
        ASSERT_TRUE(piece(0).ok());
      }
      const std::vector<Mailbox::Ready> ready = mailbox.TakeReady();
      ASSERT_EQ(ready.size(), 1);
      EXPECT_EQ(ready[0].from, 1);
      EXPECT_EQ(ready[0].number, number);
      ASSERT_TRUE(piece(3).ok());  // in any order
      ASSERT_TRUE(piece(1).ok());
      EXPECT_FALSE(mailbox.Done(1, number));
      ASSERT_TRUE(piece(2).ok());
      EXPECT_TRUE(mailbox.Done(1, number));
      EXPECT_FALSE(mailbox.AnyReady());
      EXPECT_TRUE(memory == sent);
      if (!exact) {
        EXPECT_EQ(received, total);
      }
    }
  }
}

// L6 of what a peer says of its lengths: no byte beyond the memory that was given.
TEST(Mailbox, AnotherLengthIsAnErrorAndWritesNothing) {
  for (const bool early : {false, true}) {
    for (const std::string text : {"abc", "abcdefgh"}) {
      Mailbox mailbox(2);
      char memory[4] = {'-', '-', '-', '-'};
      if (early) {
        ASSERT_TRUE(mailbox.Take(Piece(1, 0, text.size(), 0), text).ok());
      }
      mailbox.Expect(1, memory, 4, nullptr);
      if (!early) {
        ASSERT_TRUE(mailbox.Take(Piece(1, 0, text.size(), 0), text).ok());
      }
      EXPECT_EQ(mailbox.wrong(),
                "member 1 sent " + std::to_string(text.size()) + " bytes where 4 were expected");
      EXPECT_EQ(std::string(memory, 4), "----");
    }
  }
  Mailbox mailbox(2);
  char memory[4] = {};
  size_t received = 0;
  mailbox.Expect(1, memory, 4, &received);
  ASSERT_TRUE(mailbox.Take(Piece(1, 0, 5, 0), "12345").ok());
  EXPECT_FALSE(mailbox.wrong().empty());
}

TEST(Mailbox, WhatIsNoPieceIsRefused) {
  Mailbox mailbox(2);
  char memory[4] = {'-', '-', '-', '-'};
  const uint64_t number = mailbox.Expect(1, memory, 4, nullptr);
  EXPECT_FALSE(mailbox.Take(Piece(2, 0, 4, 0), "abcd").ok()) << "no such member";
  EXPECT_FALSE(mailbox.Take(Piece(1, 0, 4, 5), "").ok()) << "behind its end";
  EXPECT_FALSE(mailbox.Take(Piece(1, 0, 4, 2), "abcd").ok()) << "over its end";
  EXPECT_FALSE(mailbox.Take(Piece(1, 0, ~uint64_t{0}, ~uint64_t{0} - 1), "abcd").ok()) << "around the end";
  EXPECT_FALSE(mailbox.Take(Piece(1, Mailbox::kAheadMax, 4, 0), "abcd").ok()) << "too far ahead";
  EXPECT_FALSE(mailbox.Take(Piece(1, 5, 4, 2), "cd").ok()) << "not the first of one that nobody waits for";
  EXPECT_EQ(std::string(memory, 4), "----");
  ASSERT_TRUE(mailbox.Take(Piece(1, 0, 4, 0), "ab").ok());
  EXPECT_FALSE(mailbox.Take(Piece(1, 0, 3, 2), "c").ok()) << "another length than before";
  EXPECT_FALSE(mailbox.Take(Piece(1, 0, 4, 1), "bcd").ok()) << "more than its length";
  ASSERT_TRUE(mailbox.Take(Piece(1, 0, 4, 2), "cd").ok());
  EXPECT_TRUE(mailbox.Done(1, number));
  EXPECT_FALSE(mailbox.Take(Piece(1, 0, 4, 0), "abcd").ok()) << "over already";
}

}  // namespace
}  // namespace gtrain::comm
