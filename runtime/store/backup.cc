#include "runtime/store/backup.h"

#include <rocksdb/db.h>
#include <rocksdb/utilities/backup_engine.h>

#include <filesystem>
#include <memory>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace gtrain::store {
namespace {

absl::Status ToStatus(const rocksdb::IOStatus& status, const std::string& what) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = absl::StrCat(what, ": ", status.ToString());
  if (status.IsCorruption()) return absl::DataLossError(text);
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(text);
  if (status.IsNotFound()) return absl::NotFoundError(text);
  return absl::InternalError(text);
}

// max_valid_backups_to_open is left at "all": a damaged backup is then told from a good one.
absl::Status OpenEngine(const std::string& dir, std::unique_ptr<rocksdb::BackupEngine>* engine) {
  rocksdb::BackupEngineOptions options(dir);
  options.sync = true;
  options.share_table_files = true;
  options.share_files_with_checksum = true;
  rocksdb::BackupEngine* opened = nullptr;
  GT_RETURN_IF_ERROR(
      ToStatus(rocksdb::BackupEngine::Open(options, rocksdb::Env::Default(), &opened), "backup " + dir));
  engine->reset(opened);
  return absl::OkStatus();
}

}  // namespace

absl::Status MakeBackup(rocksdb::DB& db, const std::string& dir) {
  GT_RETURN_IF_ERROR(MakeDirs(dir, 0700));
  std::unique_ptr<rocksdb::BackupEngine> engine;
  GT_RETURN_IF_ERROR(OpenEngine(dir, &engine));
  rocksdb::CreateBackupOptions options;
  options.flush_before_backup = true;
  rocksdb::BackupID id = 0;
  GT_RETURN_IF_ERROR(ToStatus(engine->CreateNewBackup(options, &db, &id), "backup to " + dir));
  GT_RETURN_IF_ERROR(ToStatus(engine->VerifyBackup(id, /*verify_with_checksum=*/true),
                              absl::StrCat("backup ", id, " in ", dir)));
  return ToStatus(engine->PurgeOldBackups(kBackupsKept), "older backups in " + dir);
}

absl::StatusOr<std::vector<BackupInfo>> ListBackups(const std::string& dir) {
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) {
    return absl::NotFoundError(absl::StrCat("there is no backup in ", dir));
  }
  std::unique_ptr<rocksdb::BackupEngine> engine;
  GT_RETURN_IF_ERROR(OpenEngine(dir, &engine));
  std::vector<rocksdb::BackupInfo> infos;
  engine->GetBackupInfo(&infos);
  std::vector<BackupInfo> backups;
  for (const rocksdb::BackupInfo& info : infos) {
    backups.push_back({info.backup_id, absl::FromUnixSeconds(info.timestamp), info.size});
  }
  if (backups.empty()) return absl::NotFoundError(absl::StrCat("there is no whole backup in ", dir));
  return backups;
}

absl::Status RestoreBackup(const std::string& dir, uint32_t id, const std::string& path) {
  GT_ASSIGN_OR_RETURN(const std::vector<BackupInfo> backups, ListBackups(dir));
  std::error_code error;
  if (std::filesystem::exists(path, error)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is there already"));
  }
  if (id == 0) id = backups.back().id;
  std::unique_ptr<rocksdb::BackupEngine> engine;
  GT_RETURN_IF_ERROR(OpenEngine(dir, &engine));
  const std::string what = absl::StrCat("backup ", id, " in ", dir);
  absl::Status status = ToStatus(engine->VerifyBackup(id, /*verify_with_checksum=*/true), what);
  if (status.ok()) status = ToStatus(engine->RestoreDBFromBackup(id, path, path), what);
  if (!status.ok()) std::filesystem::remove_all(path, error);
  return status;
}

}  // namespace gtrain::store
