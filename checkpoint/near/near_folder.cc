// Nothing here is synced to a disk: what a power cut leaves is not believed anyway.
#include "checkpoint/near/near_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/plan/near.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {
namespace {

constexpr char kComing[] = ".coming";
constexpr absl::Duration kLockWithin = absl::Seconds(1);
constexpr absl::Duration kLockLook = absl::Milliseconds(5);
constexpr size_t kNamesMax = 100'000;

absl::StatusOr<std::vector<std::string>> Names(const std::string& path) {
  std::vector<std::string> names;
  DIR* folder = opendir(path.c_str());
  if (folder == nullptr) {
    if (errno == ENOENT || errno == ENOTDIR) return names;
    return ErrnoStatus(errno, absl::StrCat("list ", path));
  }
  const auto close_it = absl::MakeCleanup([&] { closedir(folder); });
  while (const dirent* entry = readdir(folder)) {
    const absl::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    if (names.size() > kNamesMax)
      return absl::ResourceExhaustedError(absl::StrCat(path, " holds too many files"));
  }
  return names;
}

struct FileFacts {
  uint64_t bytes = 0;
  absl::Duration age;
};

std::optional<FileFacts> FactsOf(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  return FileFacts{static_cast<uint64_t>(info.st_size), absl::Now() - absl::TimeFromTimespec(info.st_mtim)};
}

// Nobody writes it: its writer died.
bool IsLeftOver(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  return fd.valid() && flock(fd.get(), LOCK_EX | LOCK_NB) == 0;
}

struct Held {
  std::vector<NearCopy> copies;
  std::vector<std::string> paths;  // of each
};

bool IsJobFolder(absl::string_view job) {
  return port::IsBlobKey(job) && job.find('/') == absl::string_view::npos;
}

// Files that no gtrain could have put here are left alone, and not counted.
absl::Status AddWhole(const std::string& root, const std::string& job, Held* held) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> attempts, Names(absl::StrCat(root, "/", job)));
  for (const std::string& attempt : attempts) {
    const std::optional<SaveId> id = ParseAttemptName(attempt);
    if (!id) continue;
    const std::string folder = absl::StrCat(root, "/", job, "/", attempt);
    GT_ASSIGN_OR_RETURN(const std::vector<std::string> files, Names(folder));
    if (files.empty()) rmdir(folder.c_str());
    for (const std::string& file : files) {
      const std::string path = absl::StrCat(folder, "/", file);
      const std::optional<FileFacts> facts = FactsOf(path);
      if (!facts) continue;
      held->copies.push_back(
          {.job = job, .attempt = *id, .file = file, .bytes = facts->bytes, .age = facts->age});
      held->paths.push_back(path);
    }
  }
  return absl::OkStatus();
}

absl::Status AddComing(const std::string& root, Held* held) {
  const std::string folder = absl::StrCat(root, "/", kComing);
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> names, Names(folder));
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(folder, "/", name);
    const std::vector<std::string> parts = absl::StrSplit(name, '%');
    const std::optional<SaveId> id = parts.size() == 4 ? ParseAttemptName(parts[1]) : std::nullopt;
    const std::optional<FileFacts> facts = FactsOf(path);
    if (!facts) continue;
    if (!id || IsLeftOver(path)) {
      unlink(path.c_str());
      continue;
    }
    held->copies.push_back({.job = parts[0],
                            .attempt = *id,
                            .file = parts[2],
                            .bytes = facts->bytes,
                            .whole = false,
                            .age = facts->age});
    held->paths.push_back(path);
  }
  return absl::OkStatus();
}

// A copy becomes whole without the lock. So what is coming is looked at first: a copy that becomes whole
// meanwhile is seen in one place or in both, and then counts once.
absl::StatusOr<Held> ListHeld(const std::string& root) {
  Held coming, held;
  GT_RETURN_IF_ERROR(AddComing(root, &coming));
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> jobs, Names(root));
  for (const std::string& job : jobs) {
    if (port::IsBlobKey(job)) GT_RETURN_IF_ERROR(AddWhole(root, job, &held));
  }
  std::set<std::tuple<std::string, SaveId, std::string, uint64_t>> whole;
  for (const NearCopy& copy : held.copies) whole.insert({copy.job, copy.attempt, copy.file, copy.bytes});
  for (size_t i = 0; i < coming.copies.size(); ++i) {
    const NearCopy& copy = coming.copies[i];
    if (whole.contains({copy.job, copy.attempt, copy.file, copy.bytes})) continue;
    held.copies.push_back(copy);
    held.paths.push_back(coming.paths[i]);
  }
  return held;
}

// flock() has no deadline of its own, and who holds the lock may be stopped.
absl::StatusOr<UniqueFd> Lock(const std::string& root) {
  const std::string path = absl::StrCat(root, "/.lock");
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("open ", path));
  const RealClock clock;
  const Instant deadline = clock.Now() + kLockWithin;
  while (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return ErrnoStatus(errno, absl::StrCat("lock ", path));
    if (clock.Now() >= deadline)
      return absl::UnavailableError(absl::StrCat(path, " was held for ", absl::FormatDuration(kLockWithin)));
    absl::SleepFor(kLockLook);
  }
  return fd;
}

// Removes a file, and its folders if they are empty then.
void Remove(const std::string& path) {
  unlink(path.c_str());
  const std::string attempt = path.substr(0, path.rfind('/'));
  if (rmdir(attempt.c_str()) == 0) rmdir(attempt.substr(0, attempt.rfind('/')).c_str());
}

}  // namespace

ComingCopy::~ComingCopy() {
  if (fd_.valid()) unlink(path_.c_str());
}

absl::Status ComingCopy::Append(absl::string_view data) {
  if (data.size() > left_)
    return absl::OutOfRangeError(absl::StrCat(path_, ": more bytes than were announced"));
  while (!data.empty()) {
    const ssize_t n = write(fd_.get(), data.data(), data.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat("write ", path_));
    data.remove_prefix(static_cast<size_t>(n));
    left_ -= static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

absl::Status ComingCopy::Finish() {
  if (left_ != 0) return absl::OutOfRangeError(absl::StrCat(path_, ": ", left_, " bytes lack"));
  const std::string folder = whole_.substr(0, whole_.rfind('/'));
  for (int i = 0;; ++i) {  // whoever made room may have dropped the folder, empty then, in between
    GT_RETURN_IF_ERROR(MakeDirs(folder));
    if (rename(path_.c_str(), whole_.c_str()) == 0) break;
    if (errno != ENOENT || i == 2) return ErrnoStatus(errno, absl::StrCat("rename ", path_));
  }
  fd_.reset();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<NearFolder>> NearFolder::Open(const std::string& root, uint64_t bytes_max) {
  GT_RETURN_IF_ERROR(MakeDirs(absl::StrCat(root, "/", kComing)));
  struct stat info;
  if (lstat(root.c_str(), &info) != 0) return ErrnoStatus(errno, absl::StrCat("stat ", root));
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(root, " must be a folder of this user that nobody else may enter (mode 0700)"));
  }
  return std::unique_ptr<NearFolder>(new NearFolder(root, bytes_max));
}

absl::StatusOr<std::string> NearFolder::PathOf(absl::string_view job, absl::string_view attempt,
                                               absl::string_view file) const {
  if (!IsJobFolder(job) || !ParseAttemptName(attempt) || !IsNearFile(file))
    return absl::InvalidArgumentError("no name of a shard's copy");
  return absl::StrCat(root_, "/", job, "/", attempt, "/", file);
}

absl::StatusOr<std::vector<std::string>> NearFolder::Attempts(absl::string_view job) {
  if (!IsJobFolder(job)) return absl::InvalidArgumentError("no name of a job");
  GT_ASSIGN_OR_RETURN(const UniqueFd lock, Lock(root_));  // else a file just made would look left over
  Held held;
  GT_RETURN_IF_ERROR(AddComing(root_, &held));  // before what is whole: see ListHeld
  GT_RETURN_IF_ERROR(AddWhole(root_, std::string(job), &held));
  std::set<std::string> attempts;
  for (const NearCopy& copy : held.copies) {
    if (copy.job == job) attempts.insert(AttemptName(copy.attempt));
  }
  return std::vector<std::string>(attempts.begin(), attempts.end());
}

absl::StatusOr<std::vector<port::NearTier::Shard>> NearFolder::List(absl::string_view job,
                                                                    absl::string_view attempt) {
  GT_ASSIGN_OR_RETURN(const std::string any, PathOf(job, attempt, "rank-0.safetensors"));
  const std::string folder = any.substr(0, any.rfind('/'));
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> names, Names(folder));
  std::vector<port::NearTier::Shard> shards;
  for (const std::string& name : names) {
    const std::optional<FileFacts> facts = FactsOf(absl::StrCat(folder, "/", name));
    if (facts && IsNearFile(name)) shards.push_back({name, facts->bytes});
  }
  return shards;
}

absl::Status NearFolder::Read(absl::string_view job, absl::string_view attempt, absl::string_view file,
                              uint64_t offset, absl::Span<char> out) {
  GT_ASSIGN_OR_RETURN(const std::string path, PathOf(job, attempt, file));
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("open ", path));
  while (!out.empty()) {
    const ssize_t n = pread(fd.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat("read ", path));
    if (n == 0) return absl::OutOfRangeError(absl::StrCat(path, " is shorter"));
    out.remove_prefix(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

absl::StatusOr<ComingCopy> NearFolder::Begin(absl::string_view job, const port::NearTier::Copy& copy) {
  GT_ASSIGN_OR_RETURN(std::string whole, PathOf(job, copy.attempt, copy.file));
  const std::optional<SaveId> committed = ParseAttemptName(copy.committed);
  if (!committed && !copy.committed.empty()) return absl::InvalidArgumentError("no name of an attempt");
  GT_ASSIGN_OR_RETURN(const UniqueFd lock, Lock(root_));
  GT_ASSIGN_OR_RETURN(const Held held, ListHeld(root_));
  const NearCopy coming{.job = std::string(job),
                        .attempt = *ParseAttemptName(copy.attempt),
                        .file = copy.file,
                        .bytes = copy.bytes};
  for (const NearCopy& there : held.copies) {
    if (there.whole && there.job == coming.job && there.attempt == coming.attempt &&
        there.file == coming.file && there.bytes == coming.bytes) {
      return absl::AlreadyExistsError(absl::StrCat(whole, " is there"));
    }
  }
  const NearPlan plan = PlanNear(held.copies, coming, committed, bytes_max_);
  for (size_t i : plan.drop) Remove(held.paths[i]);
  if (!plan.fits) {
    return absl::ResourceExhaustedError(
        absl::StrCat(Describe(), " holds ", PrintBytes(plan.bytes), " of at most ", PrintBytes(bytes_max_),
                     ", ", PrintBytes(copy.bytes), " more do not fit: see `gtrain agent --near-max`"));
  }
  static std::atomic<uint64_t> count{0};
  const std::string path =
      absl::StrCat(root_, "/", kComing, "/", absl::StrJoin({std::string(job), copy.attempt, copy.file}, "%"),
                   "%", getpid(), "-", count.fetch_add(1));
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("create ", path));
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0 || ftruncate(fd.get(), static_cast<off_t>(copy.bytes)) != 0) {
    const int error = errno;
    unlink(path.c_str());
    return ErrnoStatus(error, absl::StrCat("reserve ", path));
  }
  return ComingCopy(std::move(fd), path, std::move(whole), copy.bytes);
}

std::string NearFolder::Describe() const {
  struct statfs info;
  const bool memory = statfs(root_.c_str(), &info) == 0 && static_cast<uint64_t>(info.f_type) == TMPFS_MAGIC;
  return absl::StrCat("this machine's ", memory ? "memory" : "disk", " (", root_, ")");
}

namespace {

class FolderTier final : public port::NearTier {
 public:
  FolderTier(std::shared_ptr<NearFolder> folder, std::string job)
      : folder_(std::move(folder)), job_(std::move(job)) {}

  absl::StatusOr<std::vector<std::string>> Attempts() override { return folder_->Attempts(job_); }
  absl::StatusOr<std::vector<Shard>> List(absl::string_view attempt) override {
    return folder_->List(job_, attempt);
  }
  absl::Status Read(absl::string_view attempt, absl::string_view file, uint64_t offset,
                    absl::Span<char> out) override {
    return folder_->Read(job_, attempt, file, offset, out);
  }
  uint64_t ReadSize() const override { return 256 << 10; }  // stays in the processor's cache
  absl::Status Put(const Copy& copy, Source source) override {
    absl::StatusOr<ComingCopy> coming = folder_->Begin(job_, copy);
    if (absl::IsAlreadyExists(coming.status())) return absl::OkStatus();
    if (!coming.ok()) return coming.status();
    for (uint64_t at = 0; at < copy.bytes;) {
      GT_ASSIGN_OR_RETURN(const absl::string_view piece, source(at));
      GT_RETURN_IF_ERROR(coming->Append(piece));
      at += piece.size();
    }
    return coming->Finish();
  }
  std::string Describe() const override { return folder_->Describe(); }

 private:
  const std::shared_ptr<NearFolder> folder_;
  const std::string job_;
};

}  // namespace

std::vector<std::string> JobsWithCopies(const std::string& root) {
  constexpr size_t kJobsMax = 4096;
  absl::StatusOr<std::vector<std::string>> names = Names(root);
  if (!names.ok()) return {};
  std::erase_if(*names, [](const std::string& name) { return name[0] == '.'; });
  if (names->size() > kJobsMax) names->resize(kJobsMax);
  return *std::move(names);
}

absl::Status DropNearCopies(const std::string& root, absl::string_view job) {
  if (access(root.c_str(), F_OK) != 0) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(const UniqueFd lock, Lock(root));
  GT_ASSIGN_OR_RETURN(const Held held, ListHeld(root));
  for (size_t i = 0; i < held.copies.size(); ++i) {
    if (held.copies[i].job == job && held.copies[i].whole) Remove(held.paths[i]);
  }
  return absl::OkStatus();
}

void RemoveNearFolder(const std::string& root) {
  const absl::StatusOr<Held> held = ListHeld(root);
  if (!held.ok() || !held->copies.empty()) return;
  unlink(absl::StrCat(root, "/.lock").c_str());
  rmdir(absl::StrCat(root, "/", kComing).c_str());
  rmdir(root.c_str());
}

std::unique_ptr<port::NearTier> MakeNearTier(std::shared_ptr<NearFolder> folder, std::string job) {
  return std::make_unique<FolderTier>(std::move(folder), std::move(job));
}

}  // namespace gtrain::ckpt
