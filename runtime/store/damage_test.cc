// Damages a database between two starts as a disk can: flipped bits, torn tails, missing files, other files
// (faults H5-H7). The rule for every case: either the store refuses to open and says why, or every
// acknowledged record is there. Never a part of them.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/store/backup.h"
#include "runtime/store/rocks_store.h"
#include "runtime/store/seal_file.h"

namespace gtrain::store {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;
using Records = std::vector<std::pair<std::string, std::string>>;

void Flip(const std::string& file, uintmax_t at) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(at));
  const char c = static_cast<char>(stream.get());
  stream.seekp(static_cast<std::streamoff>(at));
  stream.put(static_cast<char>(c ^ 8));
}

// "000012.log" -> "log", "MANIFEST-000005" -> "MANIFEST".
std::string KindOf(const std::string& name) {
  if (const size_t dot = name.rfind('.'); dot != std::string::npos) return name.substr(dot + 1);
  return name.substr(0, name.find('-'));
}

// The files as kill -9 leaves them: copied while the database is open, its newest log never flushed.
class Damage : public testing::Test {
 protected:
  static constexpr int kCommits = 60;
  static constexpr SpaceLimits kNoBallast{.ballast = 0};

  static void SetUpTestSuite() {
    SetLogSink([](LogLevel, absl::string_view) {});
    root_ = TestFolder();
    for (int life = 0; life < 2; ++life) {  // the first life's records end up in a table
      auto store = OpenRocksStore(root_ + "/db", {.space = kNoBallast});
      ASSERT_TRUE(store.ok()) << store.status();
      for (int i = life * kCommits / 2; i < (life + 1) * kCommits / 2; ++i) {
        fs::copy_file(root_ + "/db.seal", root_ + "/older.seal", fs::copy_options::overwrite_existing);
        ASSERT_TRUE((*store)->Commit({{absl::StrCat("key/", 1000 + i), std::string(300, 'v')}}).ok());
      }
      expected_ = *(*store)->LoadAll();
      if (life == 0) continue;
      fs::copy(root_ + "/db", root_ + "/whole");
      fs::copy(root_ + "/db.seal", root_ + "/whole.seal");
    }
    ASSERT_EQ(expected_.size(), size_t{kCommits});
  }
  static void TearDownTestSuite() { SetLogSink(nullptr); }

  void SetUp() override { Fresh(); }
  void Fresh() {
    fs::remove_all(copy_);
    fs::copy(root_ + "/whole", copy_);
    fs::copy_file(root_ + "/whole.seal", copy_ + ".seal", fs::copy_options::overwrite_existing);
  }
  static std::vector<std::string> Files() {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_ + "/whole")) {
      const std::string name = entry.path().filename();
      if (name != "LOCK" && !absl::StartsWith(name, "LOG")) names.push_back(name);
    }
    return names;
  }
  static std::string Newest(const std::string& kind) {
    std::string newest;
    for (const std::string& name : Files()) {
      if (KindOf(name) == kind && fs::file_size(root_ + "/whole/" + name) > 0)
        newest = std::max(newest, name);
    }
    return newest;
  }

  // True: refused as damage. False: everything is there. Anything else fails the test.
  bool Refused(const std::string& what) {
    auto store = OpenRocksStore(copy_, {.create = false, .space = kNoBallast});
    if (!store.ok()) {
      EXPECT_TRUE(absl::IsDataLoss(store.status()) || absl::IsNotFound(store.status()))
          << what << ": " << store.status();
      return true;
    }
    const auto loaded = (*store)->LoadAll();
    EXPECT_TRUE(loaded.ok() && *loaded == expected_) << what << ": served in part";
    return false;
  }

  static inline std::string root_;
  static inline Records expected_;
  const std::string copy_ = root_ + "/copy";
};

TEST_F(Damage, KilledProcessLosesNothing) { EXPECT_FALSE(Refused("nothing damaged")); }

// H5 H7: bytes of every file, from the first to the last.
TEST_F(Damage, FlippedBitsAreRefusedOrHarmless) {
  constexpr uintmax_t kPositions = 24;
  std::map<std::string, int> refused, tried;
  for (const std::string& name : Files()) {
    const uintmax_t size = fs::file_size(root_ + "/whole/" + name);
    if (size == 0) continue;
    // Preallocated zeros after the last record are no data.
    const uintmax_t step = std::max<uintmax_t>(1, size / kPositions);
    std::set<uintmax_t> positions = {0, size / 2, size - 1};
    for (uintmax_t at = step / 3; at < size; at += step) positions.insert(at);
    for (const uintmax_t at : positions) {
      Fresh();
      Flip(copy_ + "/" + name, at);
      ++tried[KindOf(name)];
      refused[KindOf(name)] += Refused(absl::StrCat(name, " byte ", at)) ? 1 : 0;
    }
  }
  for (const auto& [kind, count] : tried) {
    printf("%s: %d of %d flips refused, the others harmless\n", kind.c_str(), refused[kind], count);
  }
  EXPECT_EQ(refused["log"], tried["log"]);
  EXPECT_EQ(refused["CURRENT"], tried["CURRENT"]);
  EXPECT_GT(refused["sst"], tried["sst"] / 2);
  EXPECT_GT(refused["MANIFEST"], tried["MANIFEST"] / 2);
}

// H7
TEST_F(Damage, MissingFilesAreRefusedOrHarmless) {
  std::set<std::string> refused;
  for (const std::string& name : Files()) {
    Fresh();
    fs::remove(copy_ + "/" + name);
    if (Refused("without " + name)) refused.insert(KindOf(name));
  }
  for (const char* kind : {"log", "sst", "MANIFEST", "CURRENT"}) EXPECT_TRUE(refused.contains(kind)) << kind;
  Fresh();
  fs::remove(copy_ + ".seal");
  EXPECT_TRUE(Refused("without the seal"));
}

// H7: RocksDB does not read this file to open; it must not matter.
TEST_F(Damage, GarbageInOptionsIsHarmless) {
  for (const std::string& name : Files()) {
    if (KindOf(name) == "OPTIONS") std::ofstream(copy_ + "/" + name, std::ios::trunc) << "rubbish\n";
  }
  EXPECT_FALSE(Refused("rubbish in OPTIONS"));
}

TEST_F(Damage, RubbishInCurrentAndManifestIsRefused) {
  std::ofstream(copy_ + "/CURRENT", std::ios::trunc) << "rubbish\n";
  EXPECT_TRUE(Refused("CURRENT"));
  Fresh();
  std::ofstream(copy_ + "/" + Newest("MANIFEST"), std::ios::trunc) << "rubbish\n";
  EXPECT_TRUE(Refused("MANIFEST"));
}

// H6: the record was being written when the power went, so nobody was told of it: its seal is older.
TEST_F(Damage, TornTailDropsOnlyWhatWasNotAcknowledged) {
  const std::string wal = copy_ + "/" + Newest("log");
  const uintmax_t whole = fs::file_size(wal);
  for (const uintmax_t cut : {1, 2, 7, 50, 200, 300}) {
    Fresh();
    fs::resize_file(wal, whole - cut);
    fs::copy_file(root_ + "/older.seal", copy_ + ".seal", fs::copy_options::overwrite_existing);
    auto store = OpenRocksStore(copy_, {.create = false, .space = kNoBallast});
    ASSERT_TRUE(store.ok()) << cut << ": " << store.status();
    EXPECT_EQ((*store)->LoadAll()->size(), size_t{kCommits - 1}) << cut;
  }
}

// H5 H6: the same torn tail, and a flip in the last record, of a commit that was acknowledged. RocksDB opens
// both without a word; the seal does not.
TEST_F(Damage, LostAcknowledgedTailIsRefused) {
  const std::string wal = copy_ + "/" + Newest("log");
  const uintmax_t whole = fs::file_size(wal);
  for (uintmax_t cut = 1; cut < whole; cut += whole / 20) {
    Fresh();
    fs::resize_file(wal, whole - cut);
    EXPECT_TRUE(Refused(absl::StrCat("log cut by ", cut)));
  }
  for (uintmax_t back = 1; back < 300; back += 13) {
    Fresh();
    Flip(wal, whole - back);
    EXPECT_TRUE(Refused(absl::StrCat("flip ", back, " before the end")));
  }
}

TEST_F(Damage, MessageNamesWhatIsMissing) {
  const std::string wal = copy_ + "/" + Newest("log");
  fs::resize_file(wal, fs::file_size(wal) - 10);
  const auto store = OpenRocksStore(copy_, {.create = false, .space = kNoBallast});
  EXPECT_THAT(std::string(store.status().message()),
              HasSubstr(absl::StrCat("commit ", kCommits, " was acknowledged, the newest one here is ",
                                     kCommits - 1)));
}

TEST_F(Damage, AnOlderWholeCopyIsRefusedUntilItIsAccepted) {
  {
    auto store = OpenRocksStore(copy_, {.space = kNoBallast});
    ASSERT_TRUE(store.ok());
    ASSERT_TRUE((*store)->Commit({{"key/new", "1"}}).ok());
  }
  const std::string seal = *ReadFile(copy_ + ".seal", 1 << 20);
  Fresh();
  ASSERT_TRUE(WriteFileDurable(copy_ + ".seal", seal).ok());
  EXPECT_TRUE(Refused("an older copy under a newer seal"));
  {
    auto store = OpenRocksStore(copy_, {.create = false, .accept_loss = true, .space = kNoBallast});
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_EQ(*(*store)->LoadAll(), expected_);
    ASSERT_TRUE((*store)->Commit({{"key/1000", std::string(300, 'v')}}).ok());
  }
  EXPECT_FALSE(Refused("after it was accepted"));
}

TEST_F(Damage, FlippedBitsInTheSeal) {
  const uintmax_t size = fs::file_size(copy_ + ".seal");
  for (uintmax_t at = 0; at < size; at += at % 4096 < 56 ? 5 : 500) {
    Fresh();
    Flip(copy_ + ".seal", at);
    EXPECT_FALSE(Refused(absl::StrCat("seal byte ", at)));  // the other slot holds
  }
  Fresh();
  std::ofstream(copy_ + ".seal", std::ios::trunc) << "rubbish";
  EXPECT_TRUE(Refused("rubbish in the seal"));
}

// ---------------------------------------------------------------- backups

class Backup : public Damage {};

TEST_F(Backup, RestoredBackupHoldsWhatWasThere) {
  const std::string dir = root_ + "/backups";
  {
    auto store = OpenRocksStore(copy_, {.space = kNoBallast});
    ASSERT_TRUE(store.ok());
    ASSERT_TRUE((*store)->Backup(dir).ok());
    ASSERT_TRUE((*store)->Commit({{"key/later", "1"}}).ok());
    ASSERT_TRUE((*store)->Backup(dir).ok());
  }
  EXPECT_EQ(ListBackups(dir)->size(), 2u);
  const std::string to = root_ + "/restored";
  ASSERT_TRUE(RestoreBackup(dir, 1, to).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(RestoreBackup(dir, 0, to)));
  auto store = OpenRocksStore(to, {.create = false, .accept_loss = true, .space = kNoBallast});
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(*(*store)->LoadAll(), expected_);
}

TEST_F(Backup, DamagedBackupIsRefusedAndTheOlderOneStillServes) {
  const std::string dir = root_ + "/backups2";
  {
    auto store = OpenRocksStore(copy_, {.space = kNoBallast});
    ASSERT_TRUE(store.ok());
    ASSERT_TRUE((*store)->Backup(dir).ok());
    ASSERT_TRUE((*store)->Commit({{"key/later", "1"}}).ok());
    ASSERT_TRUE((*store)->Backup(dir).ok());
  }
  std::string newest;
  for (const auto& entry : fs::directory_iterator(dir + "/shared_checksum")) {
    newest = std::max(newest, entry.path().string());
  }
  Flip(newest, fs::file_size(newest) / 2);
  const std::string to = root_ + "/restored2";
  EXPECT_TRUE(absl::IsDataLoss(RestoreBackup(dir, 0, to)));
  EXPECT_FALSE(fs::exists(to));
  EXPECT_TRUE(RestoreBackup(dir, 1, to).ok());
  EXPECT_TRUE(absl::IsNotFound(RestoreBackup(root_ + "/nowhere", 0, root_ + "/restored3")));
}

}  // namespace
}  // namespace gtrain::store
