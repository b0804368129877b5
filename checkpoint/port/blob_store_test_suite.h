// The promises of every BlobStore, as tests. A test program includes this and instantiates it with its
// stores:
//   INSTANTIATE_TEST_SUITE_P(Stores, BlobStoreConformance, testing::Values(...), ...);
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct BlobStoreCandidate {
  const char* name;
  std::function<std::unique_ptr<port::BlobStore>()> make;
};

class BlobStoreConformance : public testing::TestWithParam<BlobStoreCandidate> {
 protected:
  const std::unique_ptr<port::BlobStore> store_ = GetParam().make();
};

TEST_P(BlobStoreConformance, WhatIsPutIsRead) {
  const absl::string_view parts[] = {"ab", "", "cde"};
  ASSERT_TRUE(store_->PutIfAbsent("d/x", parts).ok());
  EXPECT_EQ(*store_->Get("d/x", 100), "abcde");
  EXPECT_EQ(*store_->Size("d/x"), 5u);
  std::string out(3, '?');
  ASSERT_TRUE(store_->Read("d/x", 1, absl::MakeSpan(out.data(), 3)).ok());
  EXPECT_EQ(out, "bcd");
  ASSERT_TRUE(store_->PutIfAbsent("empty", "").ok());
  EXPECT_EQ(*store_->Get("empty", 0), "");
  EXPECT_TRUE(store_->Read("empty", 0, {}).ok());
}

// Long enough for several parts of an upload and several writes of a file, with ragged ends.
TEST_P(BlobStoreConformance, AStreamIsPutLikeABlob) {
  std::string bytes((11 << 20) + 4097, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 2654435761u >> 13);
  uint64_t last = 0, given = 0;  // of the piece before
  std::string piece;             // one at a time, in memory that the next one takes
  const auto source = [&](uint64_t offset) -> absl::StatusOr<absl::string_view> {
    EXPECT_TRUE(offset == given || (offset > last && offset < given)) << offset << " after " << last;
    piece = bytes.substr(offset, 700'001);
    last = offset;
    given = offset + piece.size();
    return piece;
  };
  ASSERT_EQ(store_->PutStream("step/shard", bytes.size(), source), absl::OkStatus());
  EXPECT_EQ(given, bytes.size());
  EXPECT_TRUE(*store_->Get("step/shard", bytes.size()) == bytes);
  given = 0;
  EXPECT_TRUE(absl::IsAlreadyExists(store_->PutStream("step/shard", bytes.size(), source)));
  given = 0;
  ASSERT_EQ(store_->PutStream("step/part", 5000, source), absl::OkStatus());  // no more than was asked for
  EXPECT_TRUE(*store_->Get("step/part", bytes.size()) == bytes.substr(0, 5000));
  const auto none = [](uint64_t) -> absl::StatusOr<absl::string_view> { return absl::DataLossError("x"); };
  EXPECT_EQ(store_->PutStream("step/empty", 0, none), absl::OkStatus());
  EXPECT_EQ(*store_->Size("step/empty"), 0u);
}

// C1: a source that fails in the middle leaves no key.
TEST_P(BlobStoreConformance, AStreamThatFailsLeavesNothing_C1) {
  const std::string some(6 << 20, 'x');
  for (const bool ends : {false, true}) {
    const auto source = [&](uint64_t offset) -> absl::StatusOr<absl::string_view> {
      if (offset == 0) return some;
      if (ends) return absl::string_view();
      return absl::DataLossError("the source is damaged");
    };
    const absl::Status put = store_->PutStream("step/shard", 2 * some.size(), source);
    EXPECT_EQ(put.code(), ends ? absl::StatusCode::kInternal : absl::StatusCode::kDataLoss) << put;
    EXPECT_TRUE(absl::IsNotFound(store_->Size("step/shard").status()));
    EXPECT_THAT(*store_->ListUnfinished(), IsEmpty());
  }
}

TEST_P(BlobStoreConformance, WhatIsTooLongIsRefusedByNameBeforeItIsSent) {
  const uint64_t most = store_->BytesMax();
  ASSERT_GE(most, uint64_t{5} << 40);
  const absl::Status put =
      store_->PutStream("step/shard", most + 1, [](uint64_t) -> absl::StatusOr<absl::string_view> {
        ADD_FAILURE() << "asked for bytes of what cannot be put";
        return absl::DataLossError("x");
      });
  EXPECT_TRUE(absl::IsInvalidArgument(put)) << put;
  EXPECT_THAT(std::string(put.message()), testing::HasSubstr("step/shard"));
  EXPECT_TRUE(absl::IsNotFound(store_->Size("step/shard").status()));
}

TEST_P(BlobStoreConformance, SaysForHowLongNothingChanged) {
  ASSERT_TRUE(store_->PutIfAbsent("f/k", "1").ok());
  for (const char* name : {"f", "f/k"}) {
    const auto age = store_->Unchanged(name);
    ASSERT_TRUE(age.ok()) << age.status();
    EXPECT_GE(*age, absl::ZeroDuration());
    EXPECT_LT(*age, absl::Minutes(30)) << name;  // it was put now
  }
  EXPECT_TRUE(absl::IsNotFound(store_->Unchanged("absent").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Unchanged("../x").status()));
}

TEST_P(BlobStoreConformance, NothingIsOverwritten_C3) {
  ASSERT_TRUE(store_->PutIfAbsent("k", "first").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(store_->PutIfAbsent("k", "second")));
  EXPECT_EQ(*store_->Get("k", 100), "first");
}

TEST_P(BlobStoreConformance, OfManyWritersOneWins_C3) {
  constexpr int kWriters = 8;
  std::atomic<int> winner{-1};
  std::atomic<int> wins{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kWriters; ++i) {
    threads.emplace_back([&, i] {
      const absl::Status put = store_->PutIfAbsent("race/key", absl::StrCat("writer ", i));
      if (put.ok()) {
        winner = i;
        ++wins;
      } else {
        EXPECT_TRUE(absl::IsAlreadyExists(put)) << put;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wins, 1);
  EXPECT_EQ(*store_->Get("race/key", 100), absl::StrCat("writer ", winner.load()));
}

TEST_P(BlobStoreConformance, BoundsAndAbsence) {
  ASSERT_TRUE(store_->PutIfAbsent("k", "12345").ok());
  std::string out(6, '?');
  EXPECT_TRUE(absl::IsOutOfRange(store_->Read("k", 0, absl::MakeSpan(out.data(), 6))));
  EXPECT_TRUE(absl::IsOutOfRange(store_->Read("k", 6, {})));
  EXPECT_TRUE(absl::IsOutOfRange(store_->Read("k", UINT64_MAX, absl::MakeSpan(out.data(), 2))));
  EXPECT_TRUE(absl::IsOutOfRange(store_->Get("k", 4).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Get("nothing", 4).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Size("no/thing").status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Read("nothing", 0, {})));
}

TEST_P(BlobStoreConformance, ListsByPrefixSorted) {
  for (const char* key : {"a/2", "a/1", "ab/1", "b", "a/10"}) ASSERT_TRUE(store_->PutIfAbsent(key, "x").ok());
  EXPECT_THAT(*store_->List("a/"), ElementsAre("a/1", "a/10", "a/2"));
  EXPECT_THAT(*store_->List("a/1"), ElementsAre("a/1", "a/10"));
  EXPECT_THAT(*store_->List("a"), ElementsAre("a/1", "a/10", "a/2", "ab/1"));
  EXPECT_THAT(*store_->List("zz/"), IsEmpty());
  EXPECT_THAT(*store_->ListAll({"a/1", "ab/"}), ElementsAre("a/1", "a/10", "ab/1"));
  EXPECT_THAT(*store_->ListAll({"a/", "zz/"}), ElementsAre("a/1", "a/10", "a/2"));
  EXPECT_THAT(*store_->ListAll({"0/", "a/2"}), ElementsAre("a/2"));
  EXPECT_THAT(*store_->ListFolders(), ElementsAre("a", "ab"));
}

TEST_P(BlobStoreConformance, DeleteIsIdempotentAndFreesTheKey) {
  ASSERT_TRUE(store_->PutIfAbsent("f/k", "1").ok());
  EXPECT_TRUE(store_->Delete("f/k").ok());
  EXPECT_TRUE(store_->Delete("f/k").ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Get("f/k", 9).status()));
  EXPECT_THAT(*store_->ListFolders(), IsEmpty());
  EXPECT_TRUE(store_->PutIfAbsent("f/k", "2").ok());
}

TEST_P(BlobStoreConformance, ManyAreDeletedAtOnceWhetherTheyAreThereOrNot) {
  std::vector<std::string> keys;
  for (int i = 0; i < 5; ++i) {
    keys.push_back(absl::StrCat("f/", i));
    ASSERT_TRUE(store_->PutIfAbsent(keys.back(), "1").ok());
  }
  ASSERT_TRUE(store_->PutIfAbsent("f/stays", "1").ok());
  keys.push_back("f/absent");
  EXPECT_EQ(store_->DeleteAll(keys), absl::OkStatus());
  EXPECT_EQ(store_->DeleteAll(keys), absl::OkStatus());
  EXPECT_EQ(store_->DeleteAll({}), absl::OkStatus());
  EXPECT_THAT(*store_->List(""), ElementsAre("f/stays"));
  EXPECT_TRUE(absl::IsInvalidArgument(store_->DeleteAll({"f/stays", "../x"})));
}

TEST_P(BlobStoreConformance, OnlyEmptyFoldersAreDropped) {
  ASSERT_TRUE(store_->PutIfAbsent("f/k", "1").ok());
  EXPECT_TRUE(store_->DropEmptyFolder("f").ok());
  EXPECT_TRUE(store_->DropEmptyFolder("absent").ok());
  EXPECT_EQ(*store_->Get("f/k", 9), "1");
}

TEST_P(BlobStoreConformance, KeysThatLeaveTheStoreAreRefused_C10) {
  for (const char* key : {"", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/.hidden",
                          "a b", "a\nb", "a%b", "a\\b", ".unfinished/x"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(store_->PutIfAbsent(key, "x"))) << key;
    EXPECT_TRUE(absl::IsInvalidArgument(store_->Get(key, 9).status())) << key;
    EXPECT_TRUE(absl::IsInvalidArgument(store_->Delete(key))) << key;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Size(std::string(600, 'a')).status()));
}

}  // namespace gtrain::ckpt
