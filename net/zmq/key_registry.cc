#include "net/zmq/key_registry.h"

#include <sys/stat.h>

#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace gtrain::net {
namespace {

constexpr size_t kRegistryBytesMax = 16 << 20;
constexpr absl::string_view kRevoked = "revoked";

absl::StatusOr<std::string> StampOf(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return ErrnoStatus(errno, path);
  // The time of change, too: a mode or an owner for which the file was refused may be put right.
  return absl::StrCat(info.st_ino, ".", info.st_size, ".", info.st_mtim.tv_sec, ".", info.st_mtim.tv_nsec,
                      ".", info.st_ctim.tv_sec, ".", info.st_ctim.tv_nsec);
}

std::string CleanComment(absl::string_view comment) {
  std::string clean(comment.substr(0, 200));
  for (char& c : clean) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return clean;
}

}  // namespace

absl::StatusOr<std::vector<AllowedKey>> ParseAllowedKeys(absl::string_view text) {
  std::vector<AllowedKey> keys;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') continue;
    std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(' ', 2));
    const bool revoked = parts[0] == kRevoked;
    const std::optional<Role> role = revoked ? Role::kReadOnly : RoleOf(parts[0]);
    if (!role) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": \"", parts[0], "\" is not a role (admin, user, node, readonly)"));
    }
    if (parts.size() < 2 || !ValidKey(parts[1])) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": no valid public key after the role"));
    }
    keys.push_back({*role, std::string(parts[1]), parts.size() > 2 ? std::string(parts[2]) : "", revoked});
  }
  return keys;
}

absl::StatusOr<std::vector<AllowedKey>> ReadAllowedKeys(const std::string& path) {
  GT_RETURN_IF_ERROR(CheckOwnedFile(path, 0022));
  GT_ASSIGN_OR_RETURN(std::string text, ReadFile(path, kRegistryBytesMax));
  absl::StatusOr<std::vector<AllowedKey>> keys = ParseAllowedKeys(text);
  if (!keys.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", keys.status().message()));
  return keys;
}

absl::Status AddAllowedKey(const std::string& path, const AllowedKey& key) {
  return AddAllowedKeys(path, {key});
}

absl::Status AddAllowedKeys(const std::string& path, const std::vector<AllowedKey>& keys) {
  std::set<absl::string_view> added;
  for (const AllowedKey& key : keys) {
    if (!ValidKey(key.public_key)) return absl::InvalidArgumentError("not a public key");
    added.insert(key.public_key);
  }
  absl::StatusOr<std::string> old = ReadFile(path, kRegistryBytesMax);
  if (!old.ok() && !absl::IsNotFound(old.status())) return old.status();
  std::vector<std::string> added_lines;
  for (const AllowedKey& key : keys) {
    added_lines.push_back(absl::StrCat(key.revoked ? kRevoked : RoleName(key.role), " ", key.public_key, " ",
                                       CleanComment(key.comment)));
  }
  std::string text;
  std::vector<std::string> known_lines;
  for (absl::string_view line : absl::StrSplit(old.ok() ? *old : "", '\n', absl::SkipEmpty())) {
    std::vector<absl::string_view> parts = absl::StrSplit(line, ' ');
    if (parts.size() >= 2 && added.contains(parts[1])) {
      known_lines.emplace_back(line);
      continue;
    }
    absl::StrAppend(&text, line, "\n");
  }
  if (known_lines == added_lines)
    return absl::OkStatus();  // the disk may be full, and nothing has to be written
  for (const std::string& line : added_lines) absl::StrAppend(&text, line, "\n");
  return WriteFileDurable(path, text, 0600);
}

std::string NameOf(const AllowedKey& key) {
  return std::string(absl::string_view(key.comment).substr(0, key.comment.find(' ')));
}

void KeyRegistry::Replace(const std::vector<AllowedKey>& keys) {
  MutexLock lock(&mutex_);
  lasting_.clear();
  for (const AllowedKey& key : keys) {
    if (!key.revoked) lasting_[KeyId(key.public_key)] = {key.role, NameOf(key), key.public_key};
  }
}

absl::Status KeyRegistry::Reload(const std::string& path) {
  const absl::StatusOr<std::string> found = StampOf(path);
  const std::string stamp = found.ok() ? *found : "unreadable";
  {
    MutexLock lock(&mutex_);
    if (stamp == stamp_) return absl::OkStatus();
    stamp_ = stamp;  // a bad file is reported once, then again when it changes
  }
  if (!found.ok()) return found.status();
  const absl::StatusOr<std::vector<AllowedKey>> keys = ReadAllowedKeys(path);
  if (keys.ok()) {
    Replace(*keys);
  } else if (!absl::IsInvalidArgument(keys.status()) && !absl::IsPermissionDenied(keys.status())) {
    // It could not be read now (no descriptor was left): that says nothing of what is in it.
    MutexLock lock(&mutex_);
    stamp_.clear();
  }
  return keys.status();
}

void KeyRegistry::ReplaceJoinKeys(std::map<std::string, Instant, std::less<>> expires) {
  MutexLock lock(&mutex_);
  joining_ = std::move(expires);
}

void KeyRegistry::Drop(absl::string_view key_id) {
  MutexLock lock(&mutex_);
  if (const auto it = lasting_.find(key_id); it != lasting_.end()) lasting_.erase(it);
  if (const auto it = joining_.find(key_id); it != joining_.end()) joining_.erase(it);
}

std::optional<Role> KeyRegistry::RoleOfKey(absl::string_view public_key, Instant now) const {
  if (!ValidKey(public_key)) return std::nullopt;
  return RoleOfKeyId(KeyId(public_key), now);
}

std::optional<Role> KeyRegistry::RoleOfKeyId(absl::string_view key_id, Instant now) const {
  const std::optional<Peer> peer = PeerOf(key_id, now);
  return peer ? std::optional(peer->role) : std::nullopt;
}

std::optional<std::string> KeyRegistry::PublicKeyOf(absl::string_view key_id) const {
  MutexLock lock(&mutex_);
  const auto it = lasting_.find(key_id);
  return it == lasting_.end() ? std::nullopt : std::optional(it->second.public_key);
}

std::optional<Peer> KeyRegistry::PeerOf(absl::string_view key_id, Instant now) const {
  MutexLock lock(&mutex_);
  if (auto it = lasting_.find(key_id); it != lasting_.end()) {
    return Peer{it->second.role, std::string(key_id), it->second.name};
  }
  if (auto it = joining_.find(key_id); it != joining_.end() && now < it->second) {
    return Peer{Role::kJoin, std::string(key_id), ""};
  }
  return std::nullopt;
}

}  // namespace gtrain::net
