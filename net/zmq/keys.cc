#include "net/zmq/keys.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include <array>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "net/zmq/client.h"

namespace gtrain::net {
namespace {

constexpr size_t kZ85Length = 40;
constexpr size_t kKeyBytes = 32;
constexpr absl::string_view kHeader = "gtrain-key 1";

std::optional<std::array<uint8_t, kKeyBytes>> KeyBytes(absl::string_view z85) {
  // zmq_z85_decode does not check for characters outside the alphabet.
  constexpr absl::string_view kAlphabet =
      "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";
  if (z85.size() != kZ85Length) return std::nullopt;
  for (char c : z85) {
    if (kAlphabet.find(c) == absl::string_view::npos) return std::nullopt;
  }
  std::array<uint8_t, kKeyBytes> bytes;
  if (zmq_z85_decode(bytes.data(), std::string(z85).c_str()) == nullptr) return std::nullopt;
  return bytes;
}

std::string KeyHex(absl::string_view z85) {
  auto bytes = KeyBytes(z85);
  GT_CHECK(bytes.has_value());
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes->data()), bytes->size()});
}

absl::StatusOr<std::string> KeyOfHex(absl::string_view hex) {
  if (hex.size() != 2 * kKeyBytes || hex.find_first_not_of("0123456789abcdef") != absl::string_view::npos) {
    return absl::InvalidArgumentError("a key is not 64 hex digits");
  }
  std::string bytes = absl::HexStringToBytes(hex);
  char z85[kZ85Length + 1];
  zmq_z85_encode(z85, reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  return std::string(z85, kZ85Length);
}

}  // namespace

KeyPair MakeKeyPair() {
  char public_key[kZ85Length + 1], secret_key[kZ85Length + 1];
  GT_CHECK(zmq_curve_keypair(public_key, secret_key) == 0);
  KeyPair keys{std::string(public_key, kZ85Length), std::string(secret_key, kZ85Length)};
  sodium_memzero(secret_key, sizeof(secret_key));
  return keys;
}

absl::StatusOr<KeyPair> KeyPairOfSecret(absl::string_view secret_z85) {
  if (!KeyBytes(secret_z85)) return absl::InvalidArgumentError("not a secret key");
  char public_key[kZ85Length + 1];
  if (zmq_curve_public(public_key, std::string(secret_z85).c_str()) != 0) {
    return absl::InvalidArgumentError("not a secret key");
  }
  return KeyPair{std::string(public_key, kZ85Length), std::string(secret_z85)};
}

absl::StatusOr<KeyPair> KeyPairOfHex(absl::string_view secret_hex) {
  GT_ASSIGN_OR_RETURN(const std::string z85, KeyOfHex(secret_hex));
  return KeyPairOfSecret(z85);
}

bool ValidKey(absl::string_view z85) { return KeyBytes(z85).has_value(); }

std::string KeyId(absl::string_view z85) {
  auto bytes = KeyBytes(z85);
  GT_CHECK(bytes.has_value());
  std::array<char, 8> hash;
  static_assert(sizeof(hash) * 2 == 16);
  unsigned char full[crypto_generichash_BYTES];
  crypto_generichash(full, sizeof(full), bytes->data(), bytes->size(), nullptr, 0);
  std::copy_n(reinterpret_cast<char*>(full), hash.size(), hash.begin());
  return absl::BytesToHexString({hash.data(), hash.size()});
}

std::string Digest(absl::string_view bytes) {
  unsigned char full[crypto_generichash_BYTES];
  crypto_generichash(full, sizeof(full), reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
                     nullptr, 0);
  return absl::BytesToHexString({reinterpret_cast<const char*>(full), sizeof(full)});
}

std::string Proof(const KeyPair& keys, absl::string_view text) {
  GT_CHECK(sodium_init() >= 0);
  unsigned char digest[32];
  crypto_generichash(digest, sizeof(digest), reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                     reinterpret_cast<const unsigned char*>(keys.secret_key.data()), keys.secret_key.size());
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), sizeof(digest)});
}

std::string RandomHex(int bytes) {
  GT_CHECK(sodium_init() >= 0);
  std::string random(bytes, '\0');
  randombytes_buf(random.data(), random.size());
  return absl::BytesToHexString(random);
}

absl::Status SaveKeyPair(const std::string& path, const KeyPair& keys) {
  return WriteFileDurable(
      path, absl::StrCat(kHeader, "\npublic ", keys.public_key, "\nsecret ", keys.secret_key, "\n"), 0600);
}

absl::Status CheckOwnedFile(const std::string& path, int forbidden) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return ErrnoStatus(errno, path);
  if (!S_ISREG(info.st_mode))
    return absl::PermissionDeniedError(absl::StrCat(path, " is not a regular file"));
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return absl::PermissionDeniedError(absl::StrCat(path, " belongs to user ", info.st_uid, ", not to you"));
  }
  if ((info.st_mode & forbidden) != 0) {
    return absl::PermissionDeniedError(
        absl::StrFormat("%s has mode %04o: others could %s it; run: chmod %04o %s", path,
                        info.st_mode & 07777, forbidden & 044 ? "read" : "change", 0600 & ~forbidden, path));
  }
  return absl::OkStatus();
}

absl::StatusOr<KeyPair> LoadKeyPair(const std::string& path) {
  GT_RETURN_IF_ERROR(CheckOwnedFile(path, 0077));
  GT_ASSIGN_OR_RETURN(std::string text, ReadFile(path, 4096));
  std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  if (lines.size() < 3 || lines[0] != kHeader || !absl::StartsWith(lines[1], "public ") ||
      !absl::StartsWith(lines[2], "secret ")) {
    return absl::DataLossError(absl::StrCat(path, " is not a key file of gtrain"));
  }
  absl::StatusOr<KeyPair> keys = KeyPairOfSecret(lines[2].substr(7));
  if (!keys.ok() || keys->public_key != lines[1].substr(7)) {
    return absl::DataLossError(absl::StrCat(path, ": the two halves of the key do not belong together"));
  }
  return keys;
}

absl::StatusOr<KeyPair> LoadOrMakeKeyPair(const std::string& path) {
  absl::StatusOr<KeyPair> keys = LoadKeyPair(path);
  if (keys.ok() || !absl::IsNotFound(keys.status())) return keys;
  KeyPair fresh = MakeKeyPair();
  GT_RETURN_IF_ERROR(SaveKeyPair(path, fresh));
  return fresh;
}

std::string PrintJoinToken(const JoinToken& token) {
  return absl::StrCat(token.endpoint, ",", KeyHex(token.head_public_key), ",", KeyHex(token.secret_key));
}

absl::StatusOr<JoinToken> ParseJoinToken(absl::string_view text) {
  std::vector<absl::string_view> parts = absl::StrSplit(text, ',');
  if (parts.size() != 3 || !ValidServerAddress(parts[0])) {
    return absl::InvalidArgumentError(
        "a join token looks like host:port,<key>,<secret>; make one with: gtrain token create");
  }
  JoinToken token{.endpoint = std::string(parts[0])};
  GT_ASSIGN_OR_RETURN(token.head_public_key, KeyOfHex(parts[1]));
  GT_ASSIGN_OR_RETURN(token.secret_key, KeyOfHex(parts[2]));
  return token;
}

absl::string_view RoleName(Role role) {
  switch (role) {
    case Role::kAdmin:
      return "admin";
    case Role::kUser:
      return "user";
    case Role::kNode:
      return "node";
    case Role::kReadOnly:
      return "readonly";
    case Role::kJoin:
      return "join";
  }
  return "nobody";
}

std::optional<Role> RoleOf(absl::string_view name) {
  for (Role role : {Role::kAdmin, Role::kUser, Role::kNode, Role::kReadOnly}) {
    if (RoleName(role) == name) return role;
  }
  return std::nullopt;  // "join" too: join keys are never written down
}

}  // namespace gtrain::net
