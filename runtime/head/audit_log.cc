// A line is hashed with BLAKE2b-256 as it stands in the file, without its newline, and the next line carries
// the result: changing, dropping or inserting a line breaks the chain at the next one. A person who can write
// the files can also rewrite all that follows, and cut off the end; against that only a hash kept elsewhere
// helps, which is why the newest one goes to the head's log and is printed by `gtrain audit --verify`.
#include "runtime/head/audit_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/json_depth.h"
#include "base/status_macros.h"
#include "net/zmq/keys.h"

namespace gtrain::head {
namespace {

using nlohmann::ordered_json;

constexpr size_t kReadBytesMax = 1 << 30;
const std::string kNoHash(64, '0');

std::string PathOf(const std::string& dir, int age) {
  return age == 0 ? absl::StrCat(dir, "/", kAuditFile) : absl::StrCat(dir, "/", kAuditFile, ".", age);
}

std::string LineOf(const core::AuditEntry& entry, uint64_t number, absl::Time now, const std::string& hash) {
  ordered_json line = {{"n", number},
                       {"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", now, absl::UTCTimeZone())},
                       {"role", std::string(net::RoleName(entry.peer.role))},
                       {"key", entry.peer.key_id},
                       {"name", entry.peer.name},
                       {"address", entry.address},
                       {"action", entry.action},
                       {"target", entry.target},
                       {"outcome", entry.outcome}};
  if (!entry.reason.empty()) line["reason"] = entry.reason;
  line["prev"] = hash;
  return line.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

struct Link {
  uint64_t number = 0;
  std::string prev;
};
absl::StatusOr<Link> LinkOf(absl::string_view line) {
  const auto json = nlohmann::json::parse(ShallowJson(line), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("n") || !json["n"].is_number_unsigned() || !json.contains("prev") ||
      !json["prev"].is_string()) {
    return absl::DataLossError("this is not a line of the audit log");
  }
  return Link{json["n"].get<uint64_t>(), json["prev"].get<std::string>()};
}

absl::Status WriteAll(int fd, absl::string_view data, const std::string& path) {
  while (!data.empty()) {
    const ssize_t n = write(fd, data.data(), data.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat("cannot write the audit log ", path));
    data.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AuditLog> AuditLog::Open(const std::string& dir, uint64_t file_bytes_max) {
  AuditLog log;
  log.dir_ = dir;
  log.file_bytes_max_ = file_bytes_max;
  log.hash_ = kNoHash;
  GT_RETURN_IF_ERROR(log.Continue());
  GT_RETURN_IF_ERROR(log.OpenFile());
  return log;
}

// The last whole line of the newest file that has one.
absl::Status AuditLog::Continue() {
  for (int age = 0; age <= kAuditFilesKept; ++age) {
    const std::string path = PathOf(dir_, age);
    absl::StatusOr<std::string> text = ReadFile(path, kReadBytesMax);
    if (absl::IsNotFound(text.status())) continue;
    if (!text.ok()) return text.status();
    const size_t end = text->rfind('\n');
    const size_t whole = end == std::string::npos ? 0 : end + 1;
    if (whole < text->size() && truncate(path.c_str(), static_cast<off_t>(whole)) != 0) {
      return ErrnoStatus(errno, absl::StrCat("cannot repair the end of ", path));
    }
    if (whole == 0) continue;
    const size_t before = end == 0 ? std::string::npos : text->rfind('\n', end - 1);
    const size_t begin = before == std::string::npos ? 0 : before + 1;
    const absl::string_view last = absl::string_view(*text).substr(begin, end - begin);
    const absl::StatusOr<Link> link = LinkOf(last);
    if (!link.ok()) {
      return absl::DataLossError(absl::StrCat(path, " does not end with a line of the audit log: move the ",
                                              "files away and a new chain begins"));
    }
    count_ = link->number;
    hash_ = net::Digest(last);
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status AuditLog::OpenFile() {
  const std::string path = PathOf(dir_, 0);
  file_.reset(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  struct stat info;
  if (!file_.valid() || fstat(file_.get(), &info) != 0) {
    return ErrnoStatus(errno, absl::StrCat("cannot open the audit log ", path));
  }
  bytes_ = static_cast<uint64_t>(info.st_size);
  return SyncFolder(dir_);
}

absl::Status AuditLog::Rotate() {
  for (int age = kAuditFilesKept - 1; age >= 0; --age) {
    if (rename(PathOf(dir_, age).c_str(), PathOf(dir_, age + 1).c_str()) != 0 && errno != ENOENT) {
      return ErrnoStatus(errno, absl::StrCat("cannot rotate ", PathOf(dir_, age)));
    }
  }
  return OpenFile();
}

absl::Status AuditLog::Append(const std::vector<core::AuditEntry>& entries, absl::Time now) {
  if (entries.empty()) return absl::OkStatus();
  if (bytes_ >= file_bytes_max_) GT_RETURN_IF_ERROR(Rotate());
  std::string text;
  for (const core::AuditEntry& entry : entries) {
    const std::string line = LineOf(entry, ++count_, now, hash_);
    hash_ = net::Digest(line);
    absl::StrAppend(&text, line, "\n");
  }
  const std::string path = PathOf(dir_, 0);
  GT_RETURN_IF_ERROR(WriteAll(file_.get(), text, path));
  if (fdatasync(file_.get()) != 0)
    return ErrnoStatus(errno, absl::StrCat("cannot sync the audit log ", path));
  bytes_ += text.size();
  return absl::OkStatus();
}

absl::StatusOr<AuditVerdict> ReadAudit(const std::string& dir, void (*each)(absl::string_view line)) {
  AuditVerdict verdict;
  for (int age = kAuditFilesKept; age >= 0; --age) {
    const std::string path = PathOf(dir, age);
    const absl::StatusOr<std::string> text = ReadFile(path, kReadBytesMax);
    if (absl::IsNotFound(text.status())) continue;
    if (!text.ok()) return text.status();
    int number = 0;
    const auto broken = [&](absl::string_view why) {
      return absl::DataLossError(absl::StrCat(path, " line ", number, ": ", why));
    };
    for (absl::string_view line : absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
      ++number;
      const absl::StatusOr<Link> link = LinkOf(line);
      if (!link.ok()) return broken(link.status().message());
      const bool first = verdict.last == 0;
      if (first) verdict.first = link->number;
      if (first ? link->number == 1 && link->prev != kNoHash
                : link->number != verdict.last + 1 || link->prev != verdict.hash) {
        return broken("it does not follow from the line before it: lines were changed, added or taken away");
      }
      verdict.last = link->number;
      verdict.hash = net::Digest(line);
      if (each != nullptr) each(line);
    }
  }
  return verdict;
}

}  // namespace gtrain::head
