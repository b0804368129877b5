// CURVE keys, the files they live in, and join tokens. Free functions, thread-safe, block on files only.
//
// Public keys are written in Z85 (40 characters). docs/formats/keys.md describes every file.
#pragma once
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "net/port/peer.h"

namespace gtrain::net {

struct KeyPair {
  std::string public_key;  // Z85
  std::string secret_key;  // Z85; never logged
};

KeyPair MakeKeyPair();
bool ValidKey(absl::string_view z85);
// 16 hex digits of the BLAKE2b hash of the key's 32 bytes: NodeId or ClientId. `z85` must be a ValidKey.
std::string KeyId(absl::string_view z85);
std::string RandomHex(int bytes);
// BLAKE2b-256 in hex; `b2sum -l 256` prints the same.
std::string Digest(absl::string_view bytes);

// Returns a text that only the holder of `keys` can make of `text`; 64 hex digits.
std::string Proof(const KeyPair& keys, absl::string_view text);

// Mode 0600, durable, replaces atomically.
absl::Status SaveKeyPair(const std::string& path, const KeyPair& keys);
// Checked the way sshd checks: a regular file of this user (or root) that nobody else may read or write;
// PermissionDenied otherwise, with the command that repairs it. The halves must belong together.
absl::StatusOr<KeyPair> LoadKeyPair(const std::string& path);
// Loads the pair, or makes and saves one if the file does not exist.
absl::StatusOr<KeyPair> LoadOrMakeKeyPair(const std::string& path);

// PermissionDenied unless `path` belongs to this user or root and has none of the mode bits `forbidden`.
absl::Status CheckOwnedFile(const std::string& path, int forbidden);

// Everything that a new node needs to join: the head's address and public key, and the secret of a key that
// the head lets send one AgentJoin. Printed as "host:port,<64 hex>,<64 hex>": no character a shell minds.
struct JoinToken {
  std::string endpoint;  // "host:port"
  std::string head_public_key;
  std::string secret_key;
};
std::string PrintJoinToken(const JoinToken& token);
absl::StatusOr<JoinToken> ParseJoinToken(absl::string_view text);
absl::StatusOr<KeyPair> KeyPairOfSecret(absl::string_view secret_z85);

// The pair of a secret key in 64 hex digits.
absl::StatusOr<KeyPair> KeyPairOfHex(absl::string_view secret_hex);

absl::string_view RoleName(Role role);  // "admin", "user", "node", "readonly", "join"
std::optional<Role> RoleOf(absl::string_view name);

}  // namespace gtrain::net
