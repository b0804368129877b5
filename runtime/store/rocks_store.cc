// Options that matter, and why:
//   sync = true on every write             an acknowledged commit survives a power cut (H2)
//   kTolerateCorruptedTailRecords          a torn tail is an unacknowledged write and is dropped (H6); damage
//                                          anywhere else refuses to open, where the default silently drops
//                                          acknowledged commits (H5)
//   track_and_verify_wals_in_manifest      a missing log file refuses to open (H7)
//   no retry after an error                the outcome of a failed fsync is unknown (H4)
#include "runtime/store/rocks_store.h"

#include <rocksdb/db.h>
#include <rocksdb/listener.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>

#include <atomic>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "runtime/store/sealed_value.h"

namespace gtrain::store {
namespace {

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

absl::Status OpenError(const rocksdb::Status& status, const std::string& path) {
  std::string text = status.ToString();
  if (status.IsIOError() && absl::StrContains(text, "lock")) {
    return absl::FailedPreconditionError(
        absl::StrCat("another head has the store in ", path, " open; only one may run on a cluster: ", text));
  }
  if (status.IsCorruption()) {
    return absl::DataLossError(absl::StrCat("the store in ", path, " is damaged and is not served in part: ",
                                            text, "; put back a backup of that directory"));
  }
  return absl::InternalError(absl::StrCat("cannot open the store in ", path, ": ", text));
}

rocksdb::Options StoreOptions() {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.paranoid_checks = true;
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  options.track_and_verify_wals_in_manifest = true;
  options.manual_wal_flush = false;
  options.max_bgerror_resume_count = 0;  // fail for good
  options.compression = rocksdb::kNoCompression;
  options.write_buffer_size = 16 << 20;
  options.max_open_files = 256;
  options.max_background_jobs = 2;
  options.info_log_level = rocksdb::InfoLogLevel::WARN_LEVEL;
  options.max_log_file_size = 4 << 20;
  options.keep_log_file_num = 4;
  return options;
}

class RocksStore final : public port::MetaStore {
 public:
  RocksStore(std::unique_ptr<rocksdb::DB> db, std::shared_ptr<ErrorListener> listener)
      : listener_(std::move(listener)), db_(std::move(db)) {}

  absl::Status Commit(const std::vector<port::Write>& writes) override {
    if (broken_ || listener_->failed()) return absl::InternalError("the store has failed; restart the head");
    rocksdb::WriteBatch batch;
    for (const port::Write& write : writes) {
      if (write.value) {
        batch.Put(write.key, SealValue(write.key, *write.value));
      } else {
        batch.Delete(write.key);
      }
    }
    rocksdb::WriteOptions options;
    options.sync = true;
    rocksdb::Status status = db_->Write(options, &batch);
    if (status.ok() && !listener_->failed()) return absl::OkStatus();
    broken_ = true;
    return absl::InternalError(absl::StrCat("the store could not write: ", status.ToString()));
  }

  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> LoadAll() override {
    rocksdb::ReadOptions options;
    options.verify_checksums = true;
    options.fill_cache = false;
    std::vector<std::pair<std::string, std::string>> all;
    std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options));
    for (it->SeekToFirst(); it->Valid(); it->Next()) {
      const std::string key = it->key().ToString();
      GT_ASSIGN_OR_RETURN(std::string value, OpenValue(key, {it->value().data(), it->value().size()}));
      all.emplace_back(key, std::move(value));
    }
    if (!it->status().ok()) return OpenError(it->status(), db_->GetName());
    return all;
  }

 private:
  const std::shared_ptr<ErrorListener> listener_;
  const std::unique_ptr<rocksdb::DB> db_;
  bool broken_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<port::MetaStore>> OpenRocksStore(const std::string& path) {
  auto listener = std::make_shared<ErrorListener>();
  rocksdb::Options options = StoreOptions();
  options.listeners.push_back(listener);
  rocksdb::DB* db = nullptr;
  rocksdb::Status status = rocksdb::DB::Open(options, path, &db);
  if (!status.ok()) return OpenError(status, path);
  return std::unique_ptr<port::MetaStore>(
      new RocksStore(std::unique_ptr<rocksdb::DB>(db), std::move(listener)));
}

}  // namespace gtrain::store
