// A put writes `.unfinished/<key with % for />.<host>.<pid>.<count>`, syncs it, links it to its key and syncs
// the folder. link(2) fails when the name exists, on NFS too: that is the conditional put. rename(2) would
// replace silently, and O_EXCL on the final name would let a reader see half a file. A crash leaves at most a
// file in .unfinished, which no key can name.
#include "checkpoint/store/directory_store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "checkpoint/store/file_writer.h"

namespace gtrain::ckpt {
namespace {

constexpr char kUnfinished[] = ".unfinished";
constexpr size_t kListMax = 4'000'000;

absl::Status SyncFolder(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("open folder ", path));
  // Some network file systems cannot sync a folder and say EINVAL; their servers do it themselves.
  if (fsync(fd.get()) != 0 && errno != EINVAL) return ErrnoStatus(errno, absl::StrCat("fsync folder ", path));
  return absl::OkStatus();
}

std::string HostName() {
  char name[128] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "host";
  std::string out(name);
  std::replace_if(
      out.begin(), out.end(),
      [](char c) { return !absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '-'; }, '-');
  return out;
}

class DirectoryStore final : public port::BlobStore {
 public:
  explicit DirectoryStore(std::string root) : root_(std::move(root)), host_(HostName()) {}

  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override;
  absl::Status PutStream(absl::string_view key, uint64_t bytes, Source source) override;
  absl::StatusOr<std::string> Get(absl::string_view key, size_t bytes_max) override;
  absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override;
  absl::StatusOr<uint64_t> Size(absl::string_view key) override;
  absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override;
  absl::StatusOr<std::vector<std::string>> ListFolders() override;
  absl::StatusOr<absl::Duration> Unchanged(absl::string_view name) override;
  absl::Status Delete(absl::string_view key) override;
  absl::Status DropEmptyFolder(absl::string_view folder) override;
  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override;
  absl::Status DropUnfinished(const Unfinished& unfinished) override;
  std::string Describe() const override { return root_; }

 private:
  absl::StatusOr<std::string> Path(absl::string_view key) const {
    if (!port::IsBlobKey(key)) return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" is not a key"));
    return absl::StrCat(root_, "/", key);
  }
  // Opens a regular file without following a link as its last part.
  absl::StatusOr<std::pair<UniqueFd, uint64_t>> Open(absl::string_view key) const;
  absl::Status RequireRoot();
  absl::Status MakeFolderOf(absl::string_view key) const;
  // `write` writes `bytes` bytes in all.
  absl::Status Put(absl::string_view key, uint64_t bytes, absl::FunctionRef<absl::Status(FileWriter*)> write);
  // A path of this process alone, beside what others leave unfinished.
  std::string Temporary(absl::string_view name);
  struct Entry {
    std::string name;
    bool is_folder = false;
    absl::Time changed;
    bool operator<(const Entry& other) const { return name < other.name; }
  };
  // The entries of a folder, sorted; an absent folder has none.
  absl::StatusOr<std::vector<Entry>> Names(const std::string& path) const;
  // The time that a file gets when it is written now. The server of a network file system has its own clock.
  absl::StatusOr<absl::Time> FileSystemNow();
  absl::Status Collect(const std::string& folder, absl::string_view prefix, int depth,
                       std::vector<std::string>* keys) const;

  const std::string root_;
  const std::string host_;
  mutable std::atomic<bool> seen_{false};  // the root was there
};

// A directory that was there once is never made again: what took its place is what lies below a mount point.
absl::Status DirectoryStore::RequireRoot() {
  if (!seen_) {
    GT_RETURN_IF_ERROR(MakeDirs(root_, 0755));
    seen_ = true;
  }
  struct stat info;
  if (stat(root_.c_str(), &info) == 0) return absl::OkStatus();
  if (errno != ENOENT) return ErrnoStatus(errno, absl::StrCat("stat ", root_));
  return absl::UnavailableError(absl::StrCat(root_, " is gone: was it unmounted, or renamed?"));
}

absl::Status DirectoryStore::MakeFolderOf(absl::string_view key) const {
  const size_t slash = key.rfind('/');
  if (slash == absl::string_view::npos) return absl::OkStatus();
  const std::string folder = absl::StrCat(root_, "/", key.substr(0, slash));
  struct stat info;
  if (stat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return absl::OkStatus();
  GT_RETURN_IF_ERROR(MakeDirs(folder, 0755));
  return SyncFolder(root_);
}

std::string DirectoryStore::Temporary(absl::string_view name) {
  static std::atomic<uint64_t> count{0};  // of all stores of this process: two may put one key at once
  return absl::StrCat(root_, "/", kUnfinished, "/", absl::StrReplaceAll(name, {{"/", "%"}}), "%", host_, "-",
                      getpid(), "-", count.fetch_add(1));
}

absl::Status DirectoryStore::PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) {
  uint64_t bytes = 0;
  for (absl::string_view part : parts) bytes += part.size();
  return Put(key, bytes, [&](FileWriter* writer) {
    for (absl::string_view part : parts) GT_RETURN_IF_ERROR(writer->Append(part));
    return absl::OkStatus();
  });
}

absl::Status DirectoryStore::PutStream(absl::string_view key, uint64_t bytes, Source source) {
  if (bytes > BytesMax()) {
    return absl::InvalidArgumentError(
        absl::StrCat(root_, "/", key, ": ", bytes, " bytes are more than a file can have"));
  }
  return Put(key, bytes, [&](FileWriter* writer) {
    return port::TakeFrom(source, 0, bytes, [&](absl::string_view piece) { return writer->Append(piece); });
  });
}

absl::Status DirectoryStore::Put(absl::string_view key, uint64_t bytes,
                                 absl::FunctionRef<absl::Status(FileWriter*)> write) {
  GT_ASSIGN_OR_RETURN(const std::string path, Path(key));
  GT_RETURN_IF_ERROR(RequireRoot());
  GT_RETURN_IF_ERROR(MakeFolderOf(key));
  GT_RETURN_IF_ERROR(MakeDirs(absl::StrCat(root_, "/", kUnfinished), 0755));
  const std::string temporary = Temporary(key);
  UniqueFd fd(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd.valid() && errno == EEXIST) {  // of a process with our number that died: it holds no key
    unlink(temporary.c_str());
    fd.reset(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  }
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("create ", temporary));
  const auto remove = absl::MakeCleanup([&] { unlink(temporary.c_str()); });
  FileWriter writer(fd.get(), temporary, bytes);
  GT_RETURN_IF_ERROR(write(&writer));
  GT_RETURN_IF_ERROR(writer.Finish());
  if (fsync(fd.get()) != 0) return ErrnoStatus(errno, absl::StrCat("fsync ", temporary));
  if (close(fd.release()) != 0) return ErrnoStatus(errno, absl::StrCat("close ", temporary));
  if (link(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    // A retransmitted NFS request may report EEXIST for a link that we made: two names then say it was ours.
    struct stat info;
    if (stat(temporary.c_str(), &info) != 0 || info.st_nlink != 2) {
      return ErrnoStatus(error, absl::StrCat("link ", path));
    }
  }
  return SyncFolder(path.substr(0, path.rfind('/')));
}

absl::StatusOr<std::pair<UniqueFd, uint64_t>> DirectoryStore::Open(absl::string_view key) const {
  GT_ASSIGN_OR_RETURN(const std::string path, Path(key));
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("open ", path));
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, absl::StrCat("stat ", path));
  if (!S_ISREG(info.st_mode)) return absl::NotFoundError(absl::StrCat(path, " is not a regular file"));
  seen_ = true;
  return std::pair(std::move(fd), static_cast<uint64_t>(info.st_size));
}

absl::StatusOr<std::string> DirectoryStore::Get(absl::string_view key, size_t bytes_max) {
  GT_ASSIGN_OR_RETURN(const uint64_t bytes, Size(key));
  if (bytes > bytes_max) {
    return absl::OutOfRangeError(
        absl::StrCat(root_, "/", key, " has ", bytes, " bytes, over the limit of ", bytes_max));
  }
  std::string out(bytes, '\0');
  GT_RETURN_IF_ERROR(Read(key, 0, absl::MakeSpan(out.data(), out.size())));
  return out;
}

absl::Status DirectoryStore::Read(absl::string_view key, uint64_t offset, absl::Span<char> out) {
  auto opened = Open(key);
  if (!opened.ok()) return opened.status();
  const auto& [fd, bytes] = *opened;
  if (offset > bytes || out.size() > bytes - offset) {
    return absl::OutOfRangeError(absl::StrCat(root_, "/", key, " has only ", bytes, " bytes"));
  }
  while (!out.empty()) {
    const ssize_t n = pread(fd.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat("read ", root_, "/", key));
    if (n == 0) return absl::OutOfRangeError(absl::StrCat(root_, "/", key, " became shorter"));
    out.remove_prefix(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DirectoryStore::Size(absl::string_view key) {
  auto opened = Open(key);
  if (!opened.ok()) return opened.status();
  return opened->second;
}

absl::StatusOr<std::vector<DirectoryStore::Entry>> DirectoryStore::Names(const std::string& path) const {
  std::vector<Entry> names;
  DIR* folder = opendir(path.c_str());
  if (folder == nullptr) {
    if (errno == ENOENT) return names;
    return ErrnoStatus(errno, absl::StrCat("list ", path));
  }
  const auto close_it = absl::MakeCleanup([&] { closedir(folder); });
  while (true) {
    errno = 0;
    const dirent* entry = readdir(folder);
    if (entry == nullptr) break;
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat info;
    if (fstatat(dirfd(folder), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;  // just deleted
      // An entry that cannot be looked at is there all the same: nothing may be concluded from a list without
      // it.
      return ErrnoStatus(errno, absl::StrCat("list ", path, ": look at ", name));
    }
    if (S_ISDIR(info.st_mode) || S_ISREG(info.st_mode))
      names.push_back({name, S_ISDIR(info.st_mode), absl::TimeFromTimespec(info.st_mtim)});
    if (names.size() > kListMax)
      return absl::ResourceExhaustedError(absl::StrCat(path, " holds too many files"));
  }
  if (errno != 0) return ErrnoStatus(errno, absl::StrCat("list ", path));
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status DirectoryStore::Collect(const std::string& folder, absl::string_view prefix, int depth,
                                     std::vector<std::string>* keys) const {
  constexpr int kDepthMax = 4;
  auto names = Names(folder.empty() ? root_ : absl::StrCat(root_, "/", folder));
  if (!names.ok()) return names.status();
  for (const auto& [name, is_folder, changed] : *names) {
    const std::string key = folder.empty() ? name : absl::StrCat(folder, "/", name);
    if (!port::IsBlobKey(key)) continue;
    if (!is_folder) {
      if (absl::StartsWith(key, prefix)) keys->push_back(key);
      continue;
    }
    const std::string inside = absl::StrCat(key, "/");
    const bool relevant = absl::StartsWith(inside, prefix) || absl::StartsWith(prefix, inside);
    if (relevant && depth < kDepthMax) GT_RETURN_IF_ERROR(Collect(key, prefix, depth + 1, keys));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> DirectoryStore::List(absl::string_view prefix) {
  std::vector<std::string> keys;
  GT_RETURN_IF_ERROR(Collect("", prefix, 0, &keys));
  std::sort(keys.begin(), keys.end());
  return keys;
}

absl::StatusOr<std::vector<std::string>> DirectoryStore::ListFolders() {
  auto names = Names(root_);
  if (!names.ok()) return names.status();
  std::vector<std::string> folders;
  for (const auto& [name, is_folder, changed] : *names) {
    if (is_folder && port::IsBlobKey(name)) folders.push_back(name);
  }
  return folders;
}

absl::StatusOr<absl::Time> DirectoryStore::FileSystemNow() {
  GT_RETURN_IF_ERROR(MakeDirs(absl::StrCat(root_, "/", kUnfinished), 0755));
  const std::string path = Temporary("clock");
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("create ", path));
  const auto remove = absl::MakeCleanup([&] { unlink(path.c_str()); });
  struct stat info;
  // The byte makes a client that caches attributes ask the server.
  if (write(fd.get(), "x", 1) != 1 || fsync(fd.get()) != 0 || fstat(fd.get(), &info) != 0) {
    return ErrnoStatus(errno, absl::StrCat("write ", path));
  }
  return absl::TimeFromTimespec(info.st_mtim);
}

absl::StatusOr<absl::Duration> DirectoryStore::Unchanged(absl::string_view name) {
  GT_ASSIGN_OR_RETURN(const std::string path, Path(name));
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) return ErrnoStatus(errno, path);
  absl::Time changed = absl::TimeFromTimespec(info.st_mtim);
  if (S_ISDIR(info.st_mode)) {
    GT_ASSIGN_OR_RETURN(const std::vector<Entry> inside, Names(path));
    for (const Entry& entry : inside) changed = std::max(changed, entry.changed);
  }
  GT_ASSIGN_OR_RETURN(const absl::Time now, FileSystemNow());
  return std::max(now - changed, absl::ZeroDuration());
}

absl::Status DirectoryStore::Delete(absl::string_view key) {
  GT_ASSIGN_OR_RETURN(const std::string path, Path(key));
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(errno, absl::StrCat("delete ", path));
  const std::string folder = path.substr(0, path.rfind('/'));
  if (folder != root_ && rmdir(folder.c_str()) == 0) return SyncFolder(root_);  // its last file is gone
  const absl::Status synced = SyncFolder(folder);
  return absl::IsNotFound(synced) ? absl::OkStatus() : synced;
}

absl::Status DirectoryStore::DropEmptyFolder(absl::string_view folder) {
  GT_ASSIGN_OR_RETURN(const std::string path, Path(folder));
  if (rmdir(path.c_str()) == 0) return SyncFolder(root_);
  if (errno == ENOENT || errno == ENOTEMPTY || errno == EEXIST) return absl::OkStatus();
  return ErrnoStatus(errno, absl::StrCat("delete folder ", path));
}

absl::StatusOr<std::vector<port::BlobStore::Unfinished>> DirectoryStore::ListUnfinished() {
  auto names = Names(absl::StrCat(root_, "/", kUnfinished));
  if (!names.ok()) return names.status();
  std::vector<Unfinished> out;
  if (names->empty()) return out;
  // A directory that cannot be written to has no clock to compare with: everything looks new there.
  const absl::StatusOr<absl::Time> now = FileSystemNow();
  for (const auto& [name, is_folder, changed] : *names) {
    std::vector<std::string> parts = absl::StrSplit(name, '%');
    if (is_folder || parts.size() < 2) continue;
    parts.pop_back();
    const absl::Duration age = now.ok() ? *now - changed : absl::ZeroDuration();
    out.push_back({absl::StrJoin(parts, "/"), name, std::max(age, absl::ZeroDuration())});
  }
  return out;
}

absl::Status DirectoryStore::DropUnfinished(const Unfinished& unfinished) {
  if (absl::StrContains(unfinished.handle, '/'))
    return absl::InvalidArgumentError("not a handle of this store");
  const std::string path = absl::StrCat(root_, "/", kUnfinished, "/", unfinished.handle);
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(errno, absl::StrCat("delete ", path));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<port::BlobStore>> OpenDirectoryStore(const std::string& root) {
  if (root.empty()) return absl::InvalidArgumentError("the checkpoint directory has no name");
  std::string path = root;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return std::make_unique<DirectoryStore>(path);
}

}  // namespace gtrain::ckpt
