// Which keys may connect, and as what. Thread-safe; never blocks on files except in Reload.
// Default deny: a key that is not here is nobody.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "net/port/peer.h"
#include "net/zmq/keys.h"

namespace gtrain::net {

struct AllowedKey {
  Role role = Role::kReadOnly;
  std::string public_key;  // Z85
  std::string comment;     // its first word is the name of the key
  bool revoked = false;    // kept, so that no token lets it in again
};

// The file `authorized`: one "<role> <Z85 public key> <comment>" a line, # starts a comment line; "revoked"
// in place of the role shuts a key out for good. Errors name the line.
absl::StatusOr<std::vector<AllowedKey>> ParseAllowedKeys(absl::string_view text);
absl::StatusOr<std::vector<AllowedKey>> ReadAllowedKeys(const std::string& path);
// Adds lines (replacing those of the same keys), durably and all at once.
absl::Status AddAllowedKeys(const std::string& path, const std::vector<AllowedKey>& keys);
absl::Status AddAllowedKey(const std::string& path, const AllowedKey& key);
std::string NameOf(const AllowedKey& key);  // first word of the comment

class KeyRegistry {
 public:
  // Replaces the lasting keys; join keys stay. A key that is missing now is refused from now on, on
  // connections that are already open too.
  void Replace(const std::vector<AllowedKey>& keys);
  // Replace(ReadAllowedKeys(path)) if the file's stamp changed since the last call. A file that cannot be
  // read or parsed leaves the keys as they were.
  absl::Status Reload(const std::string& path);

  // Replaces the keys of join tokens: role kJoin until the time beside the key id.
  void ReplaceJoinKeys(std::map<std::string, Instant, std::less<>> expires);
  // Lets no one in with this key from now on, before the file says so.
  void Drop(absl::string_view key_id);

  std::optional<Peer> PeerOf(absl::string_view key_id, Instant now) const;
  std::optional<Role> RoleOfKey(absl::string_view public_key, Instant now) const;
  std::optional<Role> RoleOfKeyId(absl::string_view key_id, Instant now) const;
  // Z85 of a lasting key; nullopt: there is none.
  std::optional<std::string> PublicKeyOf(absl::string_view key_id) const;

 private:
  struct Known {
    Role role;
    std::string name;
    std::string public_key;
  };
  mutable Mutex mutex_;
  absl::flat_hash_map<std::string, Known> lasting_ ABSL_GUARDED_BY(mutex_);      // by key id
  std::map<std::string, Instant, std::less<>> joining_ ABSL_GUARDED_BY(mutex_);  // by key id
  std::string stamp_ ABSL_GUARDED_BY(mutex_);  // of the file at the last Reload
};

}  // namespace gtrain::net
