#include "runtime/head/run_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/folder.h"
#include "base/json_depth.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

namespace gtrain::head {
namespace {

constexpr char kEventsFile[] = "events.jsonl";
constexpr char kResultFile[] = "result.json";

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

absl::Status Replace(const UniqueFd& dir, const std::string& run_dir, const char* name,
                     const std::string& json) {
  // The descriptor is used, because another folder may be at the path by now.
  const std::string path = absl::StrCat("/proc/self/fd/", dir.get(), "/", name);
  const absl::Status written = WriteFileDurable(path, json + "\n", 0644);
  if (written.ok()) return written;
  return {written.code(), absl::StrCat("in ", run_dir, ": ", written.message())};
}

// The newest events in the file, not in the head's memory: those that earlier heads wrote count, too.
nlohmann::json NewestEvents(const UniqueFd& dir) {
  constexpr size_t kBytesMax = 64 << 10, kEventsMax = 200;
  nlohmann::json events = nlohmann::json::array();
  const UniqueFd file(openat(dir.get(), kEventsFile, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info = {};
  if (!file.valid() || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return events;
  std::string text(std::min<size_t>(kBytesMax, static_cast<size_t>(info.st_size)), '\0');
  const off_t begin = info.st_size - static_cast<off_t>(text.size());
  const ssize_t got = pread(file.get(), text.data(), text.size(), begin);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  std::vector<absl::string_view> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  if (begin > 0 && !lines.empty()) lines.erase(lines.begin());  // a part of one
  if (lines.size() > kEventsMax) lines.erase(lines.begin(), lines.end() - kEventsMax);
  for (const absl::string_view line : lines) {
    nlohmann::json event = nlohmann::json::parse(ShallowJson(line), nullptr, /*allow_exceptions=*/false);
    if (event.is_object()) events.push_back(std::move(event));
  }
  return events;
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

std::string EventLine(const core::EmitEvent& event) {
  nlohmann::ordered_json json = {{"time", core::WallText(event.at)},
                                 {"sequence", event.sequence},
                                 {"kind", event.kind},
                                 {"generation", event.generation.value},
                                 {"text", event.text}};
  if (!event.goodput.empty()) json["goodput"] = nlohmann::ordered_json::parse(event.goodput, nullptr, false);
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

absl::Status AppendEvent(const std::string& run_dir, const RunFolderOwner& owner, const std::string& line,
                         bool make_dir) {
  GT_ASSIGN_OR_RETURN(UniqueFd dir, OpenDir(run_dir, owner, make_dir));
  const int flags = O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  UniqueFd file(openat(dir.get(), kEventsFile, flags, 0644));
  if (!file.valid()) return ErrnoStatus(errno, run_dir + "/events.jsonl");
  return WriteWhole(file.get(), line, run_dir + "/events.jsonl");
}

absl::Status WriteFailureFile(const std::string& run_dir, const RunFolderOwner& owner,
                              const std::string& json, bool make_dir) {
  GT_ASSIGN_OR_RETURN(const UniqueFd dir, OpenDir(run_dir, owner, make_dir));
  return Replace(dir, run_dir, "failure.json", json);
}

absl::Status WriteResultFile(const std::string& run_dir, const RunFolderOwner& owner, const std::string& json,
                             bool make_dir) {
  GT_ASSIGN_OR_RETURN(const UniqueFd dir, OpenDir(run_dir, owner, make_dir));
  nlohmann::json result = nlohmann::json::parse(ShallowJson(json), nullptr, /*allow_exceptions=*/false);
  if (!result.is_object()) return absl::InternalError("the result of a job is not a JSON object");
  result["events"] = NewestEvents(dir);
  return Replace(dir, run_dir, kResultFile,
                 result.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

bool LacksResultFile(const std::string& run_dir, const RunFolderOwner& owner) {
  const absl::StatusOr<UniqueFd> dir = OpenDir(run_dir, owner, /*make_dir=*/false);
  return dir.ok() && faccessat(dir->get(), kResultFile, F_OK, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT;
}

}  // namespace gtrain::head
