// One conformance suite over every blob store, then what only the directory store promises.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "checkpoint/store/directory_store.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::string FreshFolder() {
  std::string path = absl::StrCat(testing::TempDir(), "/gtrain-store-XXXXXX");
  EXPECT_NE(mkdtemp(path.data()), nullptr);
  return path;
}

struct Candidate {
  const char* name;
  std::function<std::unique_ptr<port::BlobStore>()> make;
};

std::unique_ptr<port::BlobStore> Directory() {
  auto store = OpenDirectoryStore(FreshFolder());
  EXPECT_TRUE(store.ok()) << store.status();
  return *std::move(store);
}

class Conformance : public testing::TestWithParam<Candidate> {
 protected:
  std::unique_ptr<port::BlobStore> store_ = GetParam().make();
};

TEST_P(Conformance, WhatIsPutIsRead) {
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

TEST_P(Conformance, NothingIsOverwritten_C3) {
  ASSERT_TRUE(store_->PutIfAbsent("k", "first").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(store_->PutIfAbsent("k", "second")));
  EXPECT_EQ(*store_->Get("k", 100), "first");
}

TEST_P(Conformance, OfManyWritersOneWins_C3) {
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

TEST_P(Conformance, BoundsAndAbsence) {
  ASSERT_TRUE(store_->PutIfAbsent("k", "12345").ok());
  std::string out(6, '?');
  EXPECT_TRUE(absl::IsOutOfRange(store_->Read("k", 0, absl::MakeSpan(out.data(), 6))));
  EXPECT_TRUE(absl::IsOutOfRange(store_->Read("k", 6, {})));
  EXPECT_TRUE(absl::IsOutOfRange(store_->Read("k", UINT64_MAX, absl::MakeSpan(out.data(), 2))));
  EXPECT_TRUE(absl::IsResourceExhausted(store_->Get("k", 4).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Get("nothing", 4).status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Size("no/thing").status()));
  EXPECT_TRUE(absl::IsNotFound(store_->Read("nothing", 0, {})));
}

TEST_P(Conformance, ListsByPrefixSorted) {
  for (const char* key : {"a/2", "a/1", "ab/1", "b", "a/10"}) ASSERT_TRUE(store_->PutIfAbsent(key, "x").ok());
  EXPECT_THAT(*store_->List("a/"), ElementsAre("a/1", "a/10", "a/2"));
  EXPECT_THAT(*store_->List("a/1"), ElementsAre("a/1", "a/10"));
  EXPECT_THAT(*store_->List("a"), ElementsAre("a/1", "a/10", "a/2", "ab/1"));
  EXPECT_THAT(*store_->List("zz/"), IsEmpty());
  EXPECT_THAT(*store_->ListFolders(), ElementsAre("a", "ab"));
}

TEST_P(Conformance, DeleteIsIdempotentAndFreesTheKey) {
  ASSERT_TRUE(store_->PutIfAbsent("f/k", "1").ok());
  EXPECT_TRUE(store_->Delete("f/k").ok());
  EXPECT_TRUE(store_->Delete("f/k").ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Get("f/k", 9).status()));
  EXPECT_THAT(*store_->ListFolders(), IsEmpty());
  EXPECT_TRUE(store_->PutIfAbsent("f/k", "2").ok());
}

TEST_P(Conformance, OnlyEmptyFoldersAreDropped) {
  ASSERT_TRUE(store_->PutIfAbsent("f/k", "1").ok());
  EXPECT_TRUE(store_->DropEmptyFolder("f").ok());
  EXPECT_TRUE(store_->DropEmptyFolder("absent").ok());
  EXPECT_EQ(*store_->Get("f/k", 9), "1");
}

TEST_P(Conformance, KeysThatLeaveTheStoreAreRefused_C10) {
  for (const char* key : {"", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/.hidden",
                          "a b", "a\nb", "a%b", "a\\b", ".unfinished/x"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(store_->PutIfAbsent(key, "x"))) << key;
    EXPECT_TRUE(absl::IsInvalidArgument(store_->Get(key, 9).status())) << key;
    EXPECT_TRUE(absl::IsInvalidArgument(store_->Delete(key))) << key;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Size(std::string(600, 'a')).status()));
}

// A decorator that owns what it decorates, so that it passes the suite like the others.
class Owning final : public port::BlobStore {
 public:
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    return faulty_.PutIfAbsent(key, parts);
  }
  absl::StatusOr<std::string> Get(absl::string_view key, size_t max) override {
    return faulty_.Get(key, max);
  }
  absl::Status Read(absl::string_view key, uint64_t at, absl::Span<char> out) override {
    return faulty_.Read(key, at, out);
  }
  absl::StatusOr<uint64_t> Size(absl::string_view key) override { return faulty_.Size(key); }
  absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override {
    return faulty_.List(prefix);
  }
  absl::StatusOr<std::vector<std::string>> ListFolders() override { return faulty_.ListFolders(); }
  absl::Status Delete(absl::string_view key) override { return faulty_.Delete(key); }
  absl::Status DropEmptyFolder(absl::string_view folder) override { return faulty_.DropEmptyFolder(folder); }
  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override { return faulty_.ListUnfinished(); }
  absl::Status DropUnfinished(const Unfinished& u) override { return faulty_.DropUnfinished(u); }
  std::string Describe() const override { return faulty_.Describe(); }

 private:
  MemoryStore memory_;
  FaultyStore faulty_{&memory_, {}};
};

INSTANTIATE_TEST_SUITE_P(Stores, Conformance,
                         testing::Values(Candidate{"Memory", [] { return std::make_unique<MemoryStore>(); }},
                                         Candidate{"Directory", Directory},
                                         Candidate{"Faulty", [] { return std::make_unique<Owning>(); }}),
                         [](const auto& info) { return info.param.name; });

TEST(FaultyStore, LosesTheCallOrItsAnswer) {
  MemoryStore memory;
  FaultyStore store(&memory, {[](uint64_t call, absl::string_view) {
    return call == 0 ? Fault::kBefore : call == 1 ? Fault::kAfter : Fault::kNone;
  }});
  EXPECT_TRUE(absl::IsUnavailable(store.PutIfAbsent("k", "1")));
  EXPECT_TRUE(absl::IsNotFound(memory.Get("k", 9).status()));
  EXPECT_TRUE(absl::IsUnavailable(store.PutIfAbsent("k", "2")));
  EXPECT_EQ(*memory.Get("k", 9), "2");
  EXPECT_TRUE(store.Delete("k").ok());
  EXPECT_THAT(store.calls(), ElementsAre("PutIfAbsent k", "PutIfAbsent k", "Delete k"));
}

TEST(DirectoryStore, SeesNeitherLinksNorStrangers_C10) {
  const std::string folder = FreshFolder();
  auto store = OpenDirectoryStore(folder + "///");
  ASSERT_TRUE(store.ok());
  ASSERT_EQ(symlink("/etc/passwd", (folder + "/link").c_str()), 0);
  ASSERT_EQ(mkfifo((folder + "/pipe").c_str(), 0600), 0);
  ASSERT_EQ(mkdir((folder + "/lost+found").c_str(), 0700), 0);
  EXPECT_FALSE((*store)->Get("link", 1 << 20).ok());
  EXPECT_FALSE((*store)->Get("pipe", 1 << 20).ok());  // and does not hang
  EXPECT_THAT(*(*store)->List(""), IsEmpty());
  EXPECT_EQ((*store)->Describe(), folder);
}

// A writer killed in the middle of a put leaves no key and something that can be found and dropped (C1).
TEST(DirectoryStore, AKilledPutLeavesNoKey_C1) {
  const std::string folder = FreshFolder();
  auto store = OpenDirectoryStore(folder);
  ASSERT_TRUE(store.ok());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const std::string half(64 << 20, 'x');
    std::vector<absl::string_view> parts(1000, half);
    (*store)->PutIfAbsent("step/big", parts).IgnoreError();
    _exit(3);
  }
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  bool started = false;
  while (!started && absl::Now() < deadline) {
    auto unfinished = (*store)->ListUnfinished();
    started = unfinished.ok() && !unfinished->empty();
  }
  kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(absl::IsNotFound((*store)->Size("step/big").status()));
  EXPECT_THAT(*(*store)->List(""), IsEmpty());
  auto unfinished = (*store)->ListUnfinished();
  ASSERT_TRUE(unfinished.ok());
  ASSERT_EQ(unfinished->size(), 1u);
  EXPECT_EQ((*unfinished)[0].key, "step/big");
  EXPECT_TRUE((*store)->DropUnfinished((*unfinished)[0]).ok());
  EXPECT_THAT(*(*store)->ListUnfinished(), IsEmpty());
  EXPECT_TRUE((*store)->PutIfAbsent("step/big", "whole").ok());
}

TEST(DirectoryStore, AFolderWithoutBlobsIsSeenAndDropped_C1) {
  const std::string folder = FreshFolder();
  auto store = OpenDirectoryStore(folder);
  ASSERT_EQ(mkdir((folder + "/empty").c_str(), 0755), 0);
  EXPECT_THAT(*(*store)->ListFolders(), ElementsAre("empty"));
  EXPECT_TRUE((*store)->DropEmptyFolder("empty").ok());
  EXPECT_THAT(*(*store)->ListFolders(), IsEmpty());
}

TEST(DirectoryStore, ADirectoryThatCannotBeMadeSaysWhich) {
  const std::string folder = FreshFolder();
  ASSERT_TRUE(WriteFileDurable(folder + "/file", "x").ok());
  auto store = OpenDirectoryStore(folder + "/file/sub");
  ASSERT_TRUE(store.ok());
  const absl::Status put = (*store)->PutIfAbsent("k", "x");
  ASSERT_FALSE(put.ok());
  EXPECT_THAT(std::string(put.message()), testing::HasSubstr("/file"));
  auto absent = OpenDirectoryStore(folder + "/new/er");
  EXPECT_THAT(*(*absent)->List(""), IsEmpty());
  EXPECT_EQ(access((folder + "/new").c_str(), F_OK), -1);  // looking makes nothing
  EXPECT_TRUE((*absent)->PutIfAbsent("k", "x").ok());
  EXPECT_TRUE(absl::IsInvalidArgument(OpenDirectoryStore("").status()));
}

}  // namespace
}  // namespace gtrain::ckpt
