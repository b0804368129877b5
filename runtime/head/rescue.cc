// A restored or recovered store differs from any other in its ClusterRecord only: the epoch is above every
// epoch that agents may have heard, job numbers jump above every number the lost head may have given out, and
// `recovering` makes the next head ask the agents (runtime/core/head/recovery.cc). The lost epoch and
// number are unknown, so time stands in for them: heads start at most once a second; jobs come at most one a
// second on average after a backup, and at most one a minute over a cluster's life.
#include "runtime/head/rescue.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "runtime/core/values/job_records.h"
#include "runtime/core/values/job_state.h"
#include "runtime/head/audit_log.h"
#include "runtime/store/backup.h"
#include "runtime/store/rocks_store.h"
#include "runtime/wire/record_codec.h"

namespace gtrain::head {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kEpochsSkipped = 1'000;
constexpr int64_t kFirstClusters = 1'767'225'600;  // 2026-01-01: none is older
// The limit of each file; the largest are the list of keys (16 MiB at most) and audit files, each begun anew
// at 16 MiB.
constexpr size_t kIdentityFileMax = 64 << 20;
constexpr char kClusterFile[] = "cluster";

// The names of the files of the cluster directory that say who it is; the others are made anew or are the
// store. The one that makes it a cluster directory is the last: with it all others are there.
absl::StatusOr<std::vector<std::string>> IdentityFiles(const std::string& dir) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    std::string name = entry.path().filename();
    const bool made_anew = absl::StartsWith(name, "store") || name == "endpoint.json" ||
                           name == "stats.json" || name == "new" || name == "last-backup" ||
                           absl::EndsWith(name, "lock") || absl::StrContains(name, ".tmp.");
    std::error_code gone;
    if (!made_anew && entry.is_regular_file(gone)) names.push_back(std::move(name));
  }
  if (error) return ErrnoStatus(error.value(), dir);
  std::ranges::stable_partition(names, [](const std::string& name) { return name != kClusterFile; });
  return names;
}

absl::Status CopyIdentity(const std::string& from, const std::string& to) {
  GT_RETURN_IF_ERROR(MakeDirs(to, 0700));
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> names, IdentityFiles(from));
  for (const std::string& name : names) {
    GT_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(absl::StrCat(from, "/", name), kIdentityFileMax));
    GT_RETURN_IF_ERROR(WriteFileDurable(absl::StrCat(to, "/", name), bytes, 0600));
  }
  return absl::OkStatus();
}

// Deletes files of an earlier backup that the cluster no longer has: a list of keys that stayed would let the
// keys that it lists in again.
absl::Status DropStale(const std::string& from, const std::string& to) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> now, IdentityFiles(from));
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> kept, IdentityFiles(to));
  for (const std::string& name : kept) {
    const std::string path = absl::StrCat(to, "/", name);
    if (std::ranges::find(now, name) == now.end() && unlink(path.c_str()) != 0)
      return ErrnoStatus(errno, path);
  }
  return SyncFolder(to);
}

absl::Status Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(errno, from);
  return absl::OkStatus();
}

absl::Status NoHeadRuns(const net::ClusterFiles& files) {
  if (const int64_t owner = store::StoreOwner(files.store_path()); owner > 0) {
    return absl::FailedPreconditionError(absl::StrCat("a head (process ", owner, ") has the store in ",
                                                      files.store_path(), " open: stop it first"));
  }
  return absl::OkStatus();
}

core::ClusterRecord ClusterOf(const core::StoredRecords& stored, const ClusterId& cluster) {
  if (stored.cluster) return *stored.cluster;
  core::ClusterRecord fresh;
  fresh.cluster = cluster;
  return fresh;
}

// The records of a store that may be damaged: what can be read, or nothing.
core::StoredRecords Salvage(const std::string& path) {
  auto opened = store::OpenRocksStore(path, {.create = false, .accept_loss = true, .space = {.ballast = 0}});
  if (!opened.ok()) return {};
  auto loaded = LoadRecords(**opened);
  return loaded.ok() ? *std::move(loaded) : core::StoredRecords();
}

// A number above every job number that a cluster may have given out by now.
uint64_t NumberOfLife() {
  return static_cast<uint64_t>(std::max<int64_t>(1, absl::ToUnixSeconds(absl::Now()) - kFirstClusters) / 60);
}

// A number above every job number that a cluster may have given out since a backup, when its next number was
// `then`: ids stay short.
uint64_t NumberAfter(uint64_t then, absl::Time backup) {
  const int64_t seconds = absl::ToInt64Seconds(absl::Now() - backup);
  return seconds < 0 ? std::max(then, NumberOfLife()) : then + static_cast<uint64_t>(seconds) + 1;
}

// Marks the store's records as ones that agents may know better, and seals them.
absl::Status BeginRecovery(port::MetaStore& store, core::ClusterRecord cluster, HeadEpoch at_least,
                           uint64_t next_job, bool accept_unsealed) {
  cluster.epoch = std::max(cluster.epoch, at_least);
  cluster.next_job = std::max(cluster.next_job, next_job);
  cluster.recovering = true;
  cluster.accept_unsealed = accept_unsealed;
  cluster.superseded = HeadEpoch{};
  return store.Commit({{core::KeyOf(cluster), wire::EncodeRecord(cluster)}});
}

std::string LiveJobs(const core::StoredRecords& loaded) {
  std::vector<std::string> live, aside = loaded.set_aside;
  size_t jobs = 0;
  for (const auto& [id, stored] : loaded.jobs) {
    if (!core::CheckWhole(stored).ok()) {
      if (stored.unreadable.empty()) aside.push_back(core::KeyOf(core::JobSubmission{id}));
      continue;
    }
    ++jobs;
    const core::JobStatus& status = stored.whole ? *stored.whole : stored.status->status;
    if (!core::IsFinal(status.state)) live.push_back(id.value);
  }
  return absl::StrCat(
      jobs, " jobs, ", live.size(), " of them not over", live.empty() ? "" : ": ", absl::StrJoin(live, ", "),
      aside.empty() ? "" : "; set aside, because they cannot be read: ", absl::StrJoin(aside, ", "));
}

std::string NextStep(const net::ClusterFiles& files) {
  return absl::StrCat("Start the head as usual (gtrain head --dir ", files.dir,
                      " ...): for its first hour it takes up what agents hold; ranks are not disturbed.\n");
}

// Moves the store at `path` and what lies beside it out of the way.
// Above that of every head that began at 1 and was not started more than once a second since 1970.
HeadEpoch EpochOfNow() { return HeadEpoch{static_cast<uint64_t>(absl::ToUnixSeconds(absl::Now()))}; }

absl::Status MoveAside(const std::string& path, std::string* to) {
  const std::string first = absl::StrCat(path, ".replaced-", absl::ToUnixSeconds(absl::Now()));
  *to = first;
  for (int again = 2; access(to->c_str(), F_OK) == 0; ++again) *to = absl::StrCat(first, "-", again);
  GT_RETURN_IF_ERROR(Rename(path, *to));
  return Rename(path + ".seal", *to + ".seal");
}

bool HasStore(const net::ClusterFiles& files) {
  std::error_code error;
  return fs::exists(files.store_path(), error) && !fs::is_empty(files.store_path(), error);
}

}  // namespace

absl::StatusOr<core::StoredRecords> LoadRecords(port::MetaStore& store) {
  core::StoredRecords loaded;
  bool cluster_lost = false;
  GT_RETURN_IF_ERROR(store.Read([&](absl::string_view key, absl::string_view value) {
    absl::StatusOr<core::Record> record = wire::DecodeRecord(value);
    if (record.ok() && core::KeyOf(*record) == key) return loaded.Add(*std::move(record));
    LogError("the record \"", key, "\" cannot be read and is set aside, where it is: ",
             record.ok() ? absl::StrCat("it is that of \"", core::KeyOf(*record), "\"")
                         : std::string(record.status().message()),
             ". A backup may hold a good one: gtrain head restore");
    cluster_lost |= key == core::KeyOf(core::ClusterRecord{});
    loaded.SetAside(std::string(key));
  }));
  if (cluster_lost) return absl::DataLossError("the record of the cluster itself cannot be read");
  for (const auto& [id, stored] : loaded.jobs) {
    if (!stored.unreadable.empty()) continue;  // said above
    if (const absl::Status whole = core::CheckWhole(stored); !whole.ok()) {
      LogError("the job ", id.value, " is set aside, where it is: ", whole.message(),
               ". A backup may hold a good one: gtrain head restore");
    }
  }
  return loaded;
}

absl::StatusOr<std::string> BackupCluster(port::MetaStore& store, const net::ClusterFiles& files,
                                          const std::string& dir) {
  if (!absl::StartsWith(dir, "/"))
    return absl::InvalidArgumentError("the backup's directory must begin with /");
  GT_RETURN_IF_ERROR(MakeDirs(dir, 0700));
  const absl::StatusOr<std::string> other = ReadFile(absl::StrCat(dir, "/identity/", kClusterFile), 1 << 20);
  if (other.ok() && other->substr(0, other->find('\n')) != files.cluster.value) {
    return absl::FailedPreconditionError(
        absl::StrCat(dir, " holds backups of another cluster: give each cluster a directory of its own"));
  }
  GT_RETURN_IF_ERROR(CopyIdentity(files.dir, dir + "/identity"));
  GT_RETURN_IF_ERROR(DropStale(files.dir, dir + "/identity"));
  GT_RETURN_IF_ERROR(store.Backup(dir + "/store"));
  GT_RETURN_IF_ERROR(WriteFileDurable(files.last_backup_path(), dir + "\n"));
  GT_ASSIGN_OR_RETURN(const std::vector<store::BackupInfo> backups, store::ListBackups(dir + "/store"));
  return absl::StrCat("backup ", backups.back().id, " of cluster ", files.cluster.value, " is in ", dir,
                      ", verified; it holds the cluster's keys. Put it back with:\n  gtrain head restore ",
                      dir, " --dir ", files.dir, "\n");
}

absl::StatusOr<std::string> BackupOffline(const std::string& cluster_dir, const std::string& dir) {
  GT_ASSIGN_OR_RETURN(const net::ClusterFiles files, net::LoadCluster(cluster_dir));
  GT_ASSIGN_OR_RETURN(const std::unique_ptr<port::MetaStore> store,
                      store::OpenRocksStore(files.store_path(), {.create = false, .space = {.ballast = 0}}));
  GT_RETURN_IF_ERROR(LoadRecords(*store).status());
  return BackupCluster(*store, files, dir);
}

absl::StatusOr<std::string> RestoreCluster(const RestoreOptions& options) {
  const std::string& backup = options.backup_dir;
  GT_ASSIGN_OR_RETURN(const std::vector<store::BackupInfo> backups, store::ListBackups(backup + "/store"));
  std::error_code error;
  if (!fs::exists(absl::StrCat(options.cluster_dir, "/", kClusterFile), error)) {
    GT_RETURN_IF_ERROR(CopyIdentity(backup + "/identity", options.cluster_dir));
  }
  GT_ASSIGN_OR_RETURN(const net::ClusterFiles files, net::LoadCluster(options.cluster_dir));
  GT_RETURN_IF_ERROR(NoHeadRuns(files));
  const std::string path = files.store_path(), fresh = path + ".restoring";
  if (HasStore(files) && !options.replace) {
    return absl::FailedPreconditionError(absl::StrCat(
        path,
        " holds records: with --replace they are moved aside and everything after the backup is forgotten"));
  }
  fs::remove_all(fresh, error);
  fs::remove(fresh + ".seal", error);
  GT_RETURN_IF_ERROR(store::RestoreBackup(backup + "/store", options.id, fresh));
  const core::ClusterRecord lost =
      ClusterOf(HasStore(files) ? Salvage(path) : core::StoredRecords(), files.cluster);
  std::string jobs;
  {
    GT_ASSIGN_OR_RETURN(
        const std::unique_ptr<port::MetaStore> store,
        store::OpenRocksStore(fresh, {.create = false, .accept_loss = true, .space = {.ballast = 0}}));
    GT_ASSIGN_OR_RETURN(const core::StoredRecords loaded, LoadRecords(*store));
    const core::ClusterRecord cluster = ClusterOf(loaded, files.cluster);
    if (cluster.cluster != files.cluster) {
      return absl::FailedPreconditionError(absl::StrCat("the backup in ", backup, " is of cluster ",
                                                        cluster.cluster.value, ", ", files.dir, " is ",
                                                        files.cluster.value));
    }
    const HeadEpoch epoch = std::max({lost.epoch, cluster.epoch, cluster.superseded});
    const auto used = std::ranges::find(backups, options.id, &store::BackupInfo::id);
    const absl::Time time = used == backups.end() ? backups.back().time : used->time;
    // The epoch follows the clock, as in RecoverCluster: the same backup may be restored again, after agents
    // heard of an epoch that is lost with the records of the first time.
    GT_RETURN_IF_ERROR(
        BeginRecovery(*store, cluster, std::max(EpochOfNow(), HeadEpoch{epoch.value + kEpochsSkipped}),
                      std::max(lost.next_job, NumberAfter(cluster.next_job, time)), options.accept_unsealed));
    jobs = LiveJobs(loaded);
  }
  std::string aside;
  if (HasStore(files)) GT_RETURN_IF_ERROR(MoveAside(path, &aside));
  fs::remove(path, error);  // an empty directory
  GT_RETURN_IF_ERROR(Rename(fresh, path));
  GT_RETURN_IF_ERROR(Rename(fresh + ".seal", path + ".seal"));
  unlink(files.new_path().c_str());
  GT_RETURN_IF_ERROR(SyncFolder(files.dir));
  store::ForgetStoreErrors(path);
  return absl::StrCat("restored ", jobs, ".\n",
                      aside.empty() ? "" : absl::StrCat("The old records are in ", aside, ".\n"),
                      "A job that ended after the backup comes back: stop it. ", NextStep(files));
}

absl::StatusOr<std::string> RecoverCluster(const std::string& cluster_dir, bool accept_unsealed) {
  GT_ASSIGN_OR_RETURN(const net::ClusterFiles files, net::LoadCluster(cluster_dir));
  GT_RETURN_IF_ERROR(NoHeadRuns(files));
  const std::string path = files.store_path();
  std::string said = "no records are left.\n";
  core::StoredRecords loaded;
  if (HasStore(files)) {
    loaded = Salvage(path);
    if (loaded.empty()) {
      std::string aside;
      GT_RETURN_IF_ERROR(MoveAside(path, &aside));
      said = absl::StrCat("the records could not be read and are in ", aside, ".\n");
    } else {
      said = absl::StrCat("what could be read is kept: ", LiveJobs(loaded), ".\n");
    }
  }
  const core::ClusterRecord cluster = ClusterOf(loaded, files.cluster);
  if (cluster.cluster != files.cluster) {
    return absl::FailedPreconditionError(absl::StrCat("the records in ", path, " are of cluster ",
                                                      cluster.cluster.value, ", the keys of ",
                                                      files.cluster.value));
  }
  GT_ASSIGN_OR_RETURN(const std::unique_ptr<port::MetaStore> store,
                      store::OpenRocksStore(path, {.accept_loss = true, .space = {.ballast = 0}}));
  GT_RETURN_IF_ERROR(BeginRecovery(
      *store, cluster,
      std::max({EpochOfNow(), HeadEpoch{cluster.epoch.value + kEpochsSkipped}, cluster.superseded}),
      NumberOfLife(), accept_unsealed));
  unlink(files.new_path().c_str());
  store::ForgetStoreErrors(path);
  return absl::StrCat(
      "recovery of cluster ", files.cluster.value, " is prepared; ", said,
      "Jobs that were queued, waiting or over are forgotten unless they were kept; running ones come "
      "back with their agents. ",
      NextStep(files));
}

}  // namespace gtrain::head
