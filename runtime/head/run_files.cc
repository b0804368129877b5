#include "runtime/head/run_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/folder.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace gtrain::head {
namespace {

absl::StatusOr<UniqueFd> OpenDir(const std::string& run_dir, const RunFolderOwner& owner, bool make_dir) {
  if (!absl::StartsWith(run_dir, "/") || absl::StrContains(run_dir + "/", "/../")) {
    return absl::InvalidArgumentError(
        absl::StrCat("run directory \"", run_dir, "\" is not a plain absolute path"));
  }
  std::string why;
  UniqueFd dir = OpenFolder(run_dir, {.make = make_dir, .why = &why});
  if (!dir.valid()) return absl::Status(ErrnoStatus(errno, "").code(), why);
  GT_RETURN_IF_ERROR(OwnsRunFolder(dir, run_dir, owner).status());
  return dir;
}

}  // namespace

absl::Status WriteWhole(int fd, absl::string_view data, const std::string& what) {
  while (!data.empty()) {
    const ssize_t n = write(fd, data.data(), data.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoStatus(errno, what);
    data.remove_prefix(n);
  }
  return absl::OkStatus();
}

std::string EventLine(const core::EmitEvent& event, absl::Time now) {
  const nlohmann::ordered_json json = {
      {"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", now, absl::UTCTimeZone())},
      {"sequence", event.sequence},
      {"kind", event.kind},
      {"generation", event.generation.value},
      {"text", event.text}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

absl::Status AppendEvent(const std::string& run_dir, const RunFolderOwner& owner, const std::string& line,
                         bool make_dir) {
  GT_ASSIGN_OR_RETURN(UniqueFd dir, OpenDir(run_dir, owner, make_dir));
  const int flags = O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  UniqueFd file(openat(dir.get(), "events.jsonl", flags, 0644));
  if (!file.valid()) return ErrnoStatus(errno, run_dir + "/events.jsonl");
  return WriteWhole(file.get(), line, run_dir + "/events.jsonl");
}

absl::Status WriteFailureFile(const std::string& run_dir, const RunFolderOwner& owner,
                              const std::string& json, bool make_dir) {
  GT_ASSIGN_OR_RETURN(const UniqueFd dir, OpenDir(run_dir, owner, make_dir));
  // By the descriptor: what is at the path may be another folder by now.
  const std::string path = absl::StrCat("/proc/self/fd/", dir.get(), "/failure.json");
  const absl::Status written = WriteFileDurable(path, json + "\n", 0644);
  if (written.ok()) return written;
  return {written.code(), absl::StrCat("in ", run_dir, ": ", written.message())};
}

}  // namespace gtrain::head
