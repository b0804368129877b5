// Which keys may connect, and as what. Thread-safe; never blocks on files except in Reload.
// Default deny: a key that is not here is nobody.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "runtime/core/messages.h"
#include "runtime/zmq/keys.h"

namespace gtrain::net {

struct AllowedKey {
  core::Role role = core::Role::kReadOnly;
  std::string public_key;  // Z85
  std::string comment;
};

// The file `authorized`: one "<role> <Z85 public key> <comment>" a line, # starts a comment line. Errors
// name the line.
absl::StatusOr<std::vector<AllowedKey>> ParseAllowedKeys(absl::string_view text);
absl::StatusOr<std::vector<AllowedKey>> ReadAllowedKeys(const std::string& path);
// Adds a line (replacing one of the same key), durably.
absl::Status AddAllowedKey(const std::string& path, const AllowedKey& key);

class KeyRegistry {
 public:
  // Replaces the lasting keys; join keys stay. Whoever is missing now is refused from now on, on
  // connections that are already open too.
  void Replace(const std::vector<AllowedKey>& keys);
  // Replace(ReadAllowedKeys(path)) if the file's stamp changed since the last call. A file that cannot be
  // read or parsed leaves the keys as they were.
  absl::Status Reload(const std::string& path);

  // A key of role kJoin that is good until `expires`, for one node. ResourceExhausted at the limit.
  absl::Status AddJoinKey(absl::string_view public_key, Instant expires);
  // True if the join key has not expired and was not used for another node's key: one use, but the same
  // node may repeat its request when a reply was lost.
  bool SpendJoinKey(absl::string_view key_id, absl::string_view node_public_key, Instant now);

  std::optional<core::Role> RoleOfKey(absl::string_view public_key, Instant now) const;
  std::optional<core::Role> RoleOfKeyId(absl::string_view key_id, Instant now) const;

 private:
  struct JoinKey {
    Instant expires;
    std::string spent_for;  // public key of the node; empty = unspent
  };
  static constexpr size_t kJoinKeysMax = 1000;
  mutable absl::Mutex mutex_;
  std::map<std::string, core::Role, std::less<>> lasting_ ABSL_GUARDED_BY(mutex_);  // by key id
  std::map<std::string, JoinKey, std::less<>> joining_ ABSL_GUARDED_BY(mutex_);     // by key id
  std::string stamp_ ABSL_GUARDED_BY(mutex_);  // of the file at the last Reload
};

}  // namespace gtrain::net
