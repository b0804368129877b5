// The conformance suite over the stores of this folder, then what only the directory store promises.
#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/power_cut_fake.h"
#include "base/stat_fault_fake.h"
#include "base/test_folder.h"
#include "checkpoint/port/blob_store_test_suite.h"
#include "checkpoint/store/directory_store.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"
#include "checkpoint/store/open_store.h"

namespace gtrain::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::unique_ptr<port::BlobStore> Directory() {
  auto store = OpenDirectoryStore(TestFolder());
  EXPECT_TRUE(store.ok()) << store.status();
  return *std::move(store);
}

// A decorator that owns what it decorates, so that it passes the suite like the others.
class Owning final : public port::BlobStore {
 public:
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    return faulty_.PutIfAbsent(key, parts);
  }
  absl::Status PutStream(absl::string_view key, uint64_t bytes, Source source) override {
    return faulty_.PutStream(key, bytes, source);
  }
  absl::StatusOr<absl::Duration> Unchanged(absl::string_view name) override {
    return faulty_.Unchanged(name);
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

}  // namespace

INSTANTIATE_TEST_SUITE_P(
    Stores, BlobStoreConformance,
    testing::Values(BlobStoreCandidate{"Memory", [] { return std::make_unique<MemoryStore>(); }},
                    BlobStoreCandidate{"Directory", Directory},
                    BlobStoreCandidate{"Faulty", [] { return std::make_unique<Owning>(); }}),
    [](const auto& info) { return info.param.name; });

namespace {

// Past the page cache, memory must lie right; what does not is brought in line, and the ends are ragged.
TEST(DirectoryStore, LargePutsAreWholeHoweverTheirMemoryLies) {
  const std::string folder = TestFolder();
  auto store = *OpenDirectoryStore(folder);
  std::vector<char> memory(6 << 20);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<char>(i * 7 + i / 4093);
  const size_t to_block = (4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096) % 4096;
  int n = 0;
  for (const size_t header : {size_t{0}, size_t{8}, size_t{4096}, size_t{5000}}) {
    for (const size_t skew : {header % 4096, size_t{1}, size_t{3000}}) {  // the first needs no copy
      for (const size_t bytes : {size_t{1} << 20, size_t{3} << 20, (size_t{4} << 20) + 4095}) {
        const absl::string_view parts[] = {{memory.data(), header}, {memory.data() + to_block + skew, bytes}};
        const std::string key = absl::StrCat("blob-", ++n);
        ASSERT_TRUE(store->PutIfAbsent(key, parts).ok());
        const auto got = store->Get(key, memory.size());
        ASSERT_TRUE(got.ok()) << got.status();
        EXPECT_TRUE(*got == absl::StrCat(parts[0], parts[1])) << header << " " << skew << " " << bytes;
        ASSERT_TRUE(store->Delete(key).ok());
      }
    }
  }
}

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
  const std::string folder = TestFolder();
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
  const std::string folder = TestFolder();
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

// The times are those of the file system: a folder is as young as the youngest of what it holds, and as what
// was put into it or taken out.
TEST(DirectoryStore, AgesAreThoseOfTheFileSystem) {
  const std::string folder = TestFolder();
  auto store = *OpenDirectoryStore(folder);
  ASSERT_TRUE(store->PutIfAbsent("step/one", "1").ok());
  ASSERT_TRUE(store->PutIfAbsent("step/two", "2").ok());
  ASSERT_TRUE(WriteFileDurable(folder + "/.unfinished/step%three%host-7-0", "3").ok());
  const auto make_old = [&](const std::string& name, int hours) {
    struct timespec times[2];
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= hours * 3600;
    times[1] = times[0];
    ASSERT_EQ(utimensat(AT_FDCWD, (folder + "/" + name).c_str(), times, 0), 0);
  };
  make_old("step/one", 50);
  make_old("step/two", 40);
  EXPECT_LT(*store->Unchanged("step"), absl::Minutes(30));
  make_old("step", 45);
  make_old(".unfinished/step%three%host-7-0", 30);
  // The file system stamps with a coarser clock than ours.
  EXPECT_GE(*store->Unchanged("step"), absl::Hours(40) - absl::Seconds(1));
  EXPECT_LT(*store->Unchanged("step"), absl::Hours(41));
  EXPECT_GE(*store->Unchanged("step/one"), absl::Hours(50) - absl::Seconds(1));
  const auto unfinished = store->ListUnfinished();
  ASSERT_TRUE(unfinished.ok());
  ASSERT_EQ(unfinished->size(), 1u);
  EXPECT_GE((*unfinished)[0].age, absl::Hours(30) - absl::Seconds(1));
  EXPECT_LT((*unfinished)[0].age, absl::Hours(31));
}

TEST(DirectoryStore, AFolderWithoutBlobsIsSeenAndDropped_C1) {
  const std::string folder = TestFolder();
  auto store = OpenDirectoryStore(folder);
  ASSERT_EQ(mkdir((folder + "/empty").c_str(), 0755), 0);
  EXPECT_THAT(*(*store)->ListFolders(), ElementsAre("empty"));
  EXPECT_TRUE((*store)->DropEmptyFolder("empty").ok());
  EXPECT_THAT(*(*store)->ListFolders(), IsEmpty());
}

// On the strict disk of power_cut_fake.h data that was not synced is gone.
TEST(DirectoryStore, APutSurvivesAPowerCut_C1) {
  const std::string folder = TestFolder();
  PowerCut cut(folder);
  auto store = OpenDirectoryStore(folder);
  ASSERT_TRUE((*store)->PutIfAbsent("attempt/shard", "bytes").ok());
  ASSERT_TRUE((*store)->PutIfAbsent("manifests/one", "names it").ok());
  const std::string copy = TestFolder() + "/left";
  ASSERT_TRUE(cut.Leave(copy).ok());
  auto left = OpenDirectoryStore(copy);
  EXPECT_THAT(*(*left)->List(""), ElementsAre("attempt/shard", "manifests/one"));
  ASSERT_TRUE((*left)->Get("attempt/shard", 100).ok());
  EXPECT_EQ(*(*left)->Get("attempt/shard", 100), "bytes");
  EXPECT_EQ(*(*left)->Get("manifests/one", 100), "names it");
}

// In an earlier version the directory "s3:" was made beside the program, and the job's checkpoints were in
// it.
TEST(ParseLocation, ASchemeWithOneSlashIsNoDirectory) {
  EXPECT_EQ(*ParseLocation("s3://bucket/run/"), "s3://bucket/run");
  EXPECT_EQ(*ParseLocation("file:///data/run"), "/data/run");
  EXPECT_EQ(*ParseLocation("data/run"), "data/run");
  EXPECT_EQ(*ParseLocation("./s3:/run"), "./s3:/run");
  EXPECT_EQ(*ParseLocation("/data/s3:/run"), "/data/s3:/run");
  for (const absl::string_view uri :
       {"s3:/bucket/run", "gs:/bucket", "file:/data", "gs://bucket", "file://data"}) {
    const absl::Status refused = ParseLocation(uri).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << uri << ": " << refused;
    EXPECT_TRUE(absl::StartsWith(refused.message(), uri)) << refused;
  }
  EXPECT_EQ(
      ParseLocation("s3:/bucket/run").status().message(),
      "s3:/bucket/run: write s3://bucket/prefix, with two slashes, or ./s3:/bucket/run for a directory of "
      "that name");
}

// A name that cannot be looked at is not absent: a list without it would say that it is, and the files of an
// absent manifest are deleted (S7).
TEST(DirectoryStore, ANameThatCannotBeLookedAtFailsTheList_S7) {
  auto store = Directory();
  for (const char* key : {"manifests/one", "manifests/two", "step/shard"})
    ASSERT_TRUE(store->PutIfAbsent(key, "x").ok());
  for (const int error : {EIO, ESTALE, EACCES}) {
    const StatFault fault("two", error);
    for (const auto& listed : {store->List("manifests/"), store->List("manifests/two"), store->List(""),
                               store->ListAll({"manifests/", "step/"})}) {
      ASSERT_FALSE(listed.ok()) << strerror(error);
      EXPECT_FALSE(absl::IsNotFound(listed.status())) << listed.status();
      EXPECT_THAT(std::string(listed.status().message()), HasSubstr("/manifests: look at two: "));
    }
    EXPECT_FALSE(store->Unchanged("manifests").ok());
    EXPECT_EQ(*store->Get("manifests/two", 9), "x");
  }
  {
    const StatFault deleted("two", ENOENT);  // between the listing and the look
    EXPECT_THAT(*store->List("manifests/"), ElementsAre("manifests/one"));
  }
  const StatFault fault("step", EIO);
  EXPECT_FALSE(store->ListFolders().ok());
}

// A program that opens a directory twice: its stores put the same key at once, and neither touches what the
// other has not finished (C1).
TEST(DirectoryStore, TwoOfOneProcessPutAKeyAtOnce_C1) {
  const std::string folder = TestFolder();
  auto one = *OpenDirectoryStore(folder), two = *OpenDirectoryStore(folder);
  absl::Status second = absl::UnknownError("it was not asked for");
  const absl::Status first = one->PutStream("k", 3, [&](uint64_t) -> absl::StatusOr<absl::string_view> {
    second = two->PutIfAbsent("k", "two");
    return "one";
  });
  EXPECT_EQ(second, absl::OkStatus());
  EXPECT_TRUE(absl::IsAlreadyExists(first)) << first;
  EXPECT_EQ(*one->Get("k", 9), "two");
}

TEST(DirectoryStore, ADirectoryThatCannotBeMadeSaysWhich) {
  const std::string folder = TestFolder();
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
