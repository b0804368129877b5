#include "base/run_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/status_macros.h"

namespace gtrain {
namespace {

constexpr char kFirstLine[] = "gtrain run directory";
constexpr size_t kTextBytesMax = 4 << 10;

std::string TextOf(const RunFolderOwner& owner) {
  return absl::StrCat(kFirstLine, "\ncluster ", owner.cluster.value, "\njob ", owner.job.value, "\nrequest ",
                      owner.request, "\n");
}

// Returns the text behind `word` in a line of its own; empty: there is no such line.
std::string Value(const std::string& text, absl::string_view word) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::ConsumePrefix(&line, word) && absl::ConsumePrefix(&line, " ")) return std::string(line);
  }
  return "";
}

absl::StatusOr<std::string> ReadOwner(const UniqueFd& folder, const std::string& path) {
  const UniqueFd file(
      openat(folder.get(), kRunFolderOwnerFile, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file.valid() && errno == ENOENT) return "";
  const std::string what = absl::StrCat(path, "/", kRunFolderOwnerFile);
  struct stat info = {};
  if (!file.valid() || fstat(file.get(), &info) != 0) return ErrnoStatus(errno, what);
  if (!S_ISREG(info.st_mode))
    return absl::FailedPreconditionError(absl::StrCat(what, " is not a regular file: remove it"));
  std::string text(kTextBytesMax, '\0');
  const ssize_t n = pread(file.get(), text.data(), text.size(), 0);
  if (n < 0) return ErrnoStatus(errno, what);
  text.resize(static_cast<size_t>(n));
  return text;
}

}  // namespace

absl::StatusOr<bool> OwnsRunFolder(const UniqueFd& folder, const std::string& path,
                                   const RunFolderOwner& owner) {
  GT_ASSIGN_OR_RETURN(const std::string text, ReadOwner(folder, path));
  // Nothing, or not all of it: the disk was full, or somebody is about to write it.
  const std::string whole = TextOf(owner);
  if (text.size() < whole.size() && absl::StartsWith(whole, text)) return false;
  const std::string request = Value(text, "request");
  const bool same = Value(text, "cluster") == owner.cluster.value && Value(text, "job") == owner.job.value &&
                    (owner.request.empty() || request.empty() || request == owner.request);
  if (absl::StartsWith(text, kFirstLine) && same) return true;
  return absl::FailedPreconditionError(absl::StrCat(
      path, " is the run directory of another job (", Value(text, "job"), " of cluster ",
      Value(text, "cluster"), ", as ", kRunFolderOwnerFile,
      " in it says), whose logs and this job's would be mixed: remove it, or launch with another "
      "--run-dir"));
}

absl::Status ClaimRunFolder(const UniqueFd& folder, const std::string& path, const RunFolderOwner& owner) {
  const auto no_room = [] { return errno == ENOSPC || errno == EDQUOT; };
  const std::string text = TextOf(owner);
  const int flags = O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  // It gets its name with its words in it, so that of two that claim at once one is refused, on NFS, too.
  // Where that cannot be (a full disk, a file system without links, an empty file of a disk that was full
  // before) the words are written behind the name, and two who do so at one moment may both believe it.
  const std::string nameless = absl::StrCat(kRunFolderOwnerFile, ".", absl::Hex(Rng::FromSystem().Next()));
  if (const UniqueFd file(openat(folder.get(), nameless.c_str(), flags | O_EXCL, 0644)); file.valid()) {
    const bool whole = write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
    const bool named =
        whole && linkat(folder.get(), nameless.c_str(), folder.get(), kRunFolderOwnerFile, 0) == 0;
    unlinkat(folder.get(), nameless.c_str(), 0);
    if (named) return absl::OkStatus();
  }
  UniqueFd file(openat(folder.get(), kRunFolderOwnerFile, flags | O_EXCL, 0644));
  if (!file.valid() && errno == EEXIST) {
    GT_ASSIGN_OR_RETURN(const bool said, OwnsRunFolder(folder, path, owner));
    if (said) return absl::OkStatus();
    file.reset(openat(folder.get(), kRunFolderOwnerFile, flags, 0644));
  }
  const bool written = file.valid() && pwrite(file.get(), text.data(), text.size(), 0) >= 0;
  if (written || no_room()) return absl::OkStatus();
  return ErrnoStatus(errno, absl::StrCat(path, "/", kRunFolderOwnerFile));
}

}  // namespace gtrain
