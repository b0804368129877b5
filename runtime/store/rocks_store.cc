// Options that matter, and why:
//   sync = true on every write             an acknowledged commit survives a power cut (H2)
//   kTolerateCorruptedTailRecords          a torn tail is an unacknowledged write and is dropped (H6); damage
//                                          anywhere else refuses to open, where the default silently drops
//                                          acknowledged commits (H5)
//   track_and_verify_wals_in_manifest      a missing log file refuses to open (H7)
//   no retry after an error                the outcome of a failed fsync is unknown (H4)
//
// RocksDB's checks are not believed alone: every commit writes, in the same batch, a summary of all records
// (how many, the sum of their checksums), and then seals it in a file of its own. At open the records must
// add up to the summary, and the summary must not be older than the seal. So a tail that was acknowledged and
// is gone, or a table that silently is not read, is found whatever the reason.
#include "runtime/store/rocks_store.h"

#include <fcntl.h>
#include <rocksdb/db.h>
#include <rocksdb/listener.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "runtime/store/backup.h"
#include "runtime/store/seal_file.h"
#include "runtime/store/sealed_value.h"

namespace gtrain::store {
namespace {

constexpr char kSummaryKey[] = "!summary";  // no record's key begins with "!"
constexpr int kBadDiskErrors = 2;

using Checksum = std::array<uint64_t, 2>;

// The checksum that SealValue put in front, as numbers to add up.
Checksum ChecksumOf(absl::string_view sealed) {
  Checksum sum;
  std::memcpy(sum.data(), sealed.data() + 1, sizeof(sum));
  return sum;
}

class ErrorListener final : public rocksdb::EventListener {
 public:
  void OnBackgroundError(rocksdb::BackgroundErrorReason, rocksdb::Status* status) override {
    LogError("the store reports a background error: ", status->ToString());
    failed_ = true;
  }
  bool failed() const { return failed_; }

 private:
  std::atomic<bool> failed_{false};
};

// The process that holds the lock file of another process's database; 0 = unknown. Never called for a lock of
// our own: to close any descriptor of the file would give that up.
pid_t LockOwner(const std::string& path) {
  UniqueFd fd(open((path + "/LOCK").c_str(), O_RDWR | O_CLOEXEC));
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  if (!fd.valid() || fcntl(fd.get(), F_GETLK, &lock) != 0 || lock.l_type == F_UNLCK) return 0;
  return std::max(0, lock.l_pid);
}

absl::Status OpenError(const rocksdb::Status& status, const std::string& path) {
  const std::string text = status.ToString();
  if (status.IsIOError() && absl::StrContains(text, "lock")) {
    const bool ours = absl::StrContains(text, "current process");
    const pid_t owner = ours ? getpid() : LockOwner(path);
    return absl::FailedPreconditionError(absl::StrCat(
        "another head", owner > 0 ? absl::StrCat(" (process ", owner, ")") : "", " has the store in ", path,
        " open; only one may run on a cluster: stop that one first"));
  }
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(absl::StrCat(path, ": ", text));
  // This includes "IO error: No such file" of a table or log the manifest names: a missing file is damage
  // (fault H7).
  if (status.IsCorruption() || status.IsIOError() || status.IsNotSupported() || status.IsInvalidArgument()) {
    return absl::DataLossError(
        absl::StrCat("the store in ", path, " is damaged and is not served in part: ", text));
  }
  return absl::InternalError(absl::StrCat("cannot open the store in ", path, ": ", text));
}

rocksdb::Options StoreOptions() {
  rocksdb::Options options;
  options.create_if_missing = false;
  options.paranoid_checks = true;
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  options.track_and_verify_wals_in_manifest = true;
  options.manual_wal_flush = false;
  options.max_bgerror_resume_count = 0;  // fail for good
  options.compression = rocksdb::kNoCompression;
  options.write_buffer_size = 4 << 20;  // a log, a flush and a preallocation fit into the disk's reserve
  options.max_open_files = 256;
  options.max_background_jobs = 2;
  options.info_log_level = rocksdb::InfoLogLevel::WARN_LEVEL;
  options.max_log_file_size = 4 << 20;
  options.keep_log_file_num = 4;
  // While compactions are switched off for want of room, writes go on until the reserve is reached.
  options.level0_slowdown_writes_trigger = 1 << 20;
  options.level0_stop_writes_trigger = 1 << 20;
  options.soft_pending_compaction_bytes_limit = 0;
  options.hard_pending_compaction_bytes_limit = 0;
  return options;
}

void CountError(const std::string& path, const std::string& what) {
  const int count = StoreErrors(path) + 1;
  const absl::Status noted = WriteFileDurable(path + ".errors", absl::StrCat(count, "\n", what, "\n"));
  if (!noted.ok()) LogWarning("cannot note the failure beside the store: ", noted.message());
}

class RocksStore final : public port::MetaStore {
 public:
  RocksStore(std::string path, std::unique_ptr<rocksdb::DB> db, std::shared_ptr<ErrorListener> listener,
             SealFile seal, DiskSpace space)
      : path_(std::move(path)),
        listener_(std::move(listener)),
        db_(std::move(db)),
        seal_(std::move(seal)),
        space_(std::move(space)) {}

  // After an error of the disk RocksDB's destructor might write again or abort; the process ends anyway.
  ~RocksStore() override {
    static auto* left = new std::vector<rocksdb::DB*>;
    if (broken_) left->push_back(db_.release());
  }

  // Adds everything up and compares it with the summary and the seal.
  absl::Status Verify(bool accept_loss);
  absl::Status CompareWithSeal(const std::optional<Summary>& stored);
  absl::Status Commit(const std::vector<port::Write>& writes) override;
  absl::Status Read(Reader each) override;
  port::StoreSpace Space() override;
  absl::Status Backup(const std::string& dir) override { return MakeBackup(*db_, dir); }

 private:
  absl::Status ReadSealed(
      absl::FunctionRef<void(absl::string_view key, absl::string_view sealed, absl::string_view value)> each);
  void Replace(absl::string_view key, std::optional<absl::string_view> sealed);
  absl::Status Broken(const std::string& what);
  void TuneCompaction(const port::StoreSpace& space);

  const std::string path_;
  const std::shared_ptr<ErrorListener> listener_;
  std::unique_ptr<rocksdb::DB> db_;
  SealFile seal_;
  DiskSpace space_;
  Summary summary_;
  absl::flat_hash_map<std::string, Checksum> checksums_;  // of every live record
  bool compacting_ = true;
  bool broken_ = false;
};

absl::Status RocksStore::ReadSealed(
    absl::FunctionRef<void(absl::string_view key, absl::string_view sealed, absl::string_view value)> each) {
  rocksdb::ReadOptions options;
  options.verify_checksums = true;
  options.fill_cache = false;
  std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    const absl::string_view key(it->key().data(), it->key().size());
    const absl::string_view sealed(it->value().data(), it->value().size());
    GT_ASSIGN_OR_RETURN(const absl::string_view value, OpenValue(key, sealed));
    each(key, sealed, value);
  }
  return it->status().ok() ? absl::OkStatus() : OpenError(it->status(), path_);
}

void RocksStore::Replace(absl::string_view key, std::optional<absl::string_view> sealed) {
  const auto old = checksums_.find(key);
  if (old != checksums_.end()) {
    for (size_t i = 0; i < 2; ++i) summary_.digest[i] -= old->second[i];
  }
  if (!sealed) {
    if (old != checksums_.end()) checksums_.erase(old);
  } else {
    const Checksum sum = ChecksumOf(*sealed);
    for (size_t i = 0; i < 2; ++i) summary_.digest[i] += sum[i];
    if (old != checksums_.end()) {
      old->second = sum;
    } else {
      checksums_.emplace(key, sum);
    }
  }
  summary_.records = checksums_.size();
}

absl::Status RocksStore::Verify(bool accept_loss) {
  std::optional<Summary> stored;
  absl::Status undecodable;
  GT_RETURN_IF_ERROR(
      ReadSealed([&](absl::string_view key, absl::string_view sealed, absl::string_view value) {
        if (key != kSummaryKey) return Replace(key, sealed);
        const absl::StatusOr<Summary> decoded = DecodeSummary(value);
        undecodable = decoded.status();
        if (decoded.ok()) stored = *decoded;
      }));
  GT_RETURN_IF_ERROR(undecodable);
  if (!accept_loss) return CompareWithSeal(stored);
  const uint64_t commit = stored ? stored->commit : 0;
  summary_.commit = std::max(commit, seal_.found() ? seal_.found()->commit : 0) + 1;
  return absl::OkStatus();
}

// `stored`: the summary record, if there is one; summary_ counts what was read.
absl::Status RocksStore::CompareWithSeal(const std::optional<Summary>& stored) {
  const std::optional<Summary>& sealed = seal_.found();
  const auto lost = [&](const auto&... what) {
    return absl::DataLossError(
        absl::StrCat("the store in ", path_, " opens, but it has lost acknowledged changes: ", what...));
  };
  const uint64_t commit = stored ? stored->commit : 0;
  if (!stored && summary_.records > 0 && !sealed) return absl::OkStatus();  // from before there were seals
  if (!stored && (summary_.records > 0 || (sealed && sealed->commit > 0))) {
    return lost("its summary record is gone");
  }
  summary_.commit = commit;
  if (stored && *stored != summary_) {
    return lost("commit ", commit, " left ", stored->records, " records, and ", summary_.records,
                stored->records == summary_.records ? " other ones" : "", " are there");
  }
  if (!sealed && commit > 0) return lost(path_, ".seal, which says what was acknowledged, is gone");
  if (sealed && commit < sealed->commit) {
    return lost("commit ", sealed->commit, " was acknowledged, the newest one here is ", commit);
  }
  if (sealed && commit == sealed->commit && *sealed != summary_) {
    return lost("it is a copy with another history than the one that was acknowledged");
  }
  return absl::OkStatus();
}

absl::Status RocksStore::Broken(const std::string& what) {
  broken_ = true;
  CountError(path_, what);
  return absl::InternalError(absl::StrCat("the store in ", path_, " could not write: ", what));
}

absl::Status RocksStore::Commit(const std::vector<port::Write>& writes) {
  if (broken_ || listener_->failed()) {
    broken_ = true;
    return absl::InternalError("the store has failed; restart the head");
  }
  if (const port::StoreSpace space = Space(); space.level == port::SpaceLevel::kFull)
    return absl::ResourceExhaustedError(space.text);
  rocksdb::WriteBatch batch;
  for (const port::Write& write : writes) {
    if (write.value) {
      const std::string sealed = SealValue(write.key, *write.value);
      batch.Put(write.key, sealed);
      Replace(write.key, sealed);
    } else {
      batch.Delete(write.key);
      Replace(write.key, std::nullopt);
    }
  }
  ++summary_.commit;
  batch.Put(kSummaryKey, SealValue(kSummaryKey, EncodeSummary(summary_)));
  rocksdb::WriteOptions options;
  options.sync = true;
  const rocksdb::Status status = db_->Write(options, &batch);
  if (!status.ok()) return Broken(status.ToString());
  if (listener_->failed()) return Broken("its background work has failed");
  const absl::Status sealed = seal_.Write(summary_);
  return sealed.ok() ? sealed : Broken(std::string(sealed.message()));
}

absl::Status RocksStore::Read(Reader each) {
  return ReadSealed([&](absl::string_view key, absl::string_view, absl::string_view value) {
    if (key != kSummaryKey) each(key, value);
  });
}

port::StoreSpace RocksStore::Space() {
  absl::StatusOr<port::StoreSpace> space = space_.Check();
  if (!space.ok()) {
    LogWarning("cannot see how full the store's disk is: ", space.status().message());
    return {};
  }
  TuneCompaction(*space);
  return *std::move(space);
}

// A compaction needs, for a while, as much room again as the tables it merges.
void RocksStore::TuneCompaction(const port::StoreSpace& space) {
  uint64_t tables = 0;
  db_->GetIntProperty(rocksdb::DB::Properties::kTotalSstFilesSize, &tables);
  const bool room = space.level == port::SpaceLevel::kPlenty || space.free_bytes > 2 * tables + (64 << 20);
  if (room == compacting_) return;
  compacting_ = room;
  if (!db_->SetOptions({{"disable_auto_compactions", room ? "false" : "true"}}).ok()) {
    LogWarning("the store goes on ", room ? "without" : "with", " compactions");
  }
}

bool IsEmptyOrMissing(const std::string& path) {
  std::error_code error;
  const std::filesystem::directory_iterator it(path, error);
  return error ? !std::filesystem::exists(path, error) : it == std::filesystem::directory_iterator();
}

}  // namespace

int64_t StoreOwner(const std::string& path) { return LockOwner(path); }

int StoreErrors(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path + ".errors", 1 << 20);
  int count = 0;
  if (text.ok()) (void)absl::SimpleAtoi(text->substr(0, text->find('\n')), &count);
  return std::max(0, count);
}

void ForgetStoreErrors(const std::string& path) { unlink((path + ".errors").c_str()); }

absl::StatusOr<std::unique_ptr<port::MetaStore>> OpenRocksStore(const std::string& path,
                                                                const RocksOptions& how) {
  const bool fresh = IsEmptyOrMissing(path);
  if (fresh && !how.create) return absl::NotFoundError(absl::StrCat("there is no store in ", path));
  DiskSpace space(std::filesystem::path(path).parent_path().string(), path + ".ballast", how.space);
  GT_ASSIGN_OR_RETURN(const port::StoreSpace room, space.Check());
  if (room.level == port::SpaceLevel::kFull) return absl::ResourceExhaustedError(room.text);
  if (const int errors = StoreErrors(path); errors >= kBadDiskErrors) {
    LogError(
        "writes to ", path, " have failed ", errors, " times (", path,
        ".errors): its disk counts as bad. Make a backup now (gtrain head backup) and move to another disk");
  }
  auto listener = std::make_shared<ErrorListener>();
  rocksdb::Options options = StoreOptions();
  options.create_if_missing = fresh;
  options.listeners.push_back(listener);
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status = rocksdb::DB::Open(options, path, &db);
  std::unique_ptr<rocksdb::DB> owned(db);
  if (!status.ok()) return OpenError(status, path);
  GT_ASSIGN_OR_RETURN(SealFile seal, SealFile::Open(path + ".seal"));
  auto store = std::make_unique<RocksStore>(path, std::move(owned), std::move(listener), std::move(seal),
                                            std::move(space));
  GT_RETURN_IF_ERROR(store->Verify(how.accept_loss));
  return store;
}

}  // namespace gtrain::store
