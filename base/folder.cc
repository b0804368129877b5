// The way is walked name by name with O_NOFOLLOW, and links are put in by hand once their owner is known:
// openat2() can refuse all links or none, and links above a run directory are ordinary (/scratch, homes).
// O_DIRECTORY is asked for at each step because it is what makes an automounter mount.
#include "base/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <deque>

namespace gtrain {
namespace {

constexpr int kLinksMax = 40;  // as the kernel
constexpr int kFolderFlags = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

UniqueFd Fail(const FolderOptions& options, int error, const std::string& sentence) {
  if (options.why != nullptr) *options.why = sentence;
  errno = error;
  return UniqueFd();
}

UniqueFd FailAt(const FolderOptions& options, int error, const std::string& path) {
  return Fail(options, error, "cannot open the folder " + path + ": " + strerror(error));
}

std::deque<std::string> NamesOf(const std::string& path) {
  std::deque<std::string> names;
  for (size_t at = 0; at < path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    const std::string name = path.substr(at, end - at);
    if (!name.empty() && name != ".") names.push_back(name);
    at = end + 1;
  }
  return names;
}

bool Trusted(const struct stat& info) { return info.st_uid == 0 || info.st_uid == geteuid(); }

// A file of a name that nobody uses, gone when it is closed.
UniqueFd MakeNameless(const UniqueFd& folder) {
  static std::atomic<unsigned> made{0};
  for (int tries = 0; tries < 100; ++tries) {  // another machine may have the same pid
    const std::string name = ".gtrain-owner-" + std::to_string(getpid()) + "-" + std::to_string(++made);
    UniqueFd file(
        openat(folder.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.valid()) unlinkat(folder.get(), name.c_str(), 0);
    if (file.valid() || errno != EEXIST) return file;
  }
  return UniqueFd();
}

// Some file systems show all files as one user's, whichever user makes them (an NFS server that maps users, a
// mounted bucket): a file that we make there now then belongs to the owner of the folder, which is no
// stranger.
bool ShowsOneOwner(const UniqueFd& folder, const struct stat& info) {
  const UniqueFd file = MakeNameless(folder);
  struct stat made = {};
  return file.valid() && fstat(file.get(), &made) == 0 && made.st_uid == info.st_uid;
}

UniqueFd CheckOwner(UniqueFd folder, const std::string& path, const FolderOptions& options) {
  struct stat info = {};
  if (fstat(folder.get(), &info) != 0) return FailAt(options, errno, path);
  if (options.to_read || Trusted(info) || ShowsOneOwner(folder, info)) return folder;
  return Fail(options, EPERM,
              path + " belongs to another user (uid " + std::to_string(info.st_uid) +
                  "), who could lead what is written there elsewhere: use a folder of your own");
}

UniqueFd Step(const UniqueFd& at, const std::string& name, bool make) {
  UniqueFd next(openat(at.get(), name.c_str(), kFolderFlags));
  if (next.valid() || errno != ENOENT || !make) return next;
  if (mkdirat(at.get(), name.c_str(), 0755) != 0 && errno != EEXIST) return next;
  next.reset(openat(at.get(), name.c_str(), kFolderFlags));
  return next;
}

// Where the link `name` leads, empty when it is no link. `info` is of the link itself.
std::string ReadLink(const UniqueFd& at, const std::string& name, struct stat* info) {
  const UniqueFd link(openat(at.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  char target[PATH_MAX];
  if (!link.valid() || fstat(link.get(), info) != 0 || !S_ISLNK(info->st_mode)) return "";
  const ssize_t bytes = readlinkat(link.get(), "", target, sizeof(target));
  return bytes > 0 ? std::string(target, static_cast<size_t>(bytes)) : "";
}

}  // namespace

UniqueFd OpenFolder(const std::string& path, const FolderOptions& options) {
  UniqueFd at(open(path.rfind('/', 0) == 0 ? "/" : ".", kFolderFlags));
  if (!at.valid()) return FailAt(options, errno, path);
  std::deque<std::string> left = NamesOf(path);
  for (int links = 0; !left.empty();) {
    const std::string name = left.front();
    left.pop_front();
    UniqueFd next = Step(at, name, options.make);
    const int error = errno;
    if (next.valid()) {
      at = std::move(next);
      continue;
    }
    struct stat info = {};
    const std::string target = ReadLink(at, name, &info);
    if (target.empty()) return FailAt(options, error, path);
    if (++links > kLinksMax) return FailAt(options, ELOOP, path);
    if (!Trusted(info)) {
      return Fail(options, EPERM,
                  "the symbolic link " + name + " in " + path + " belongs to another user (uid " +
                      std::to_string(info.st_uid) + ") and is not followed: name the folder it leads to");
    }
    if (target[0] == '/') at.reset(open("/", kFolderFlags));
    const std::deque<std::string> names = NamesOf(target);
    left.insert(left.begin(), names.begin(), names.end());
  }
  return CheckOwner(std::move(at), path, options);
}

UniqueFd OpenFolderInside(const UniqueFd& folder, const std::string& inside, const FolderOptions& options) {
  UniqueFd at(fcntl(folder.get(), F_DUPFD_CLOEXEC, 0));
  for (const std::string& name : NamesOf(inside)) {
    UniqueFd next = Step(at, name, options.make);
    if (!next.valid()) {
      struct stat info = {};
      const int error = errno;
      if (ReadLink(at, name, &info).empty()) return FailAt(options, error, inside);
      return Fail(options, ELOOP,
                  name + " of " + inside +
                      " is a symbolic link, and inside a run directory none is followed: " + "remove it");
    }
    at = CheckOwner(std::move(next), inside, options);
    if (!at.valid()) return at;
  }
  return at;
}

FilePlace OpenFolderOf(const std::string& path, const FolderOptions& options) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  return {OpenFolder(folder, options), path.substr(slash + 1)};
}

}  // namespace gtrain
