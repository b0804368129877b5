// What a node and its head say to each other through another node that neither of them trusts: sealed for the
// other end, in order, once. Loop-owned values; nothing blocks.
//
// Both ends have a CURVE key, so both know the X25519 secret of the pair (libsodium's crypto_box_beforenm)
// without a word. A session mixes it with fresh halves of both ends (BLAKE2b), so what was recorded in one
// session opens in no other. Messages are ChaCha20-Poly1305 (RFC 8439) under one key a direction, numbered
// from 0: one that was changed, left out, repeated or moved does not open, and the session is over.
// A message costs 16 bytes; `bench_scale --only costs` has the times. docs/protocols/relays.md.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "net/zmq/keys.h"

namespace gtrain::net {

inline constexpr size_t kSessionHalfBytes = 16;

// Returns the 32 bytes that only the holders of the two keys know. InvalidArgument: no keys.
absl::StatusOr<std::string> PairSecret(const KeyPair& own, absl::string_view peer_public_key);

// A fresh half of a session, kSessionHalfBytes long.
std::string NewSessionHalf();

class SealedSession {
 public:
  enum class End { kNode, kHead };
  // `secret` from PairSecret; the halves have kSessionHalfBytes each.
  SealedSession(End end, absl::string_view secret, absl::string_view node_half, absl::string_view head_half);

  std::string Seal(absl::string_view message);
  // DataLoss: it is not the next message of the other end. The session is over then, for a later one would
  // not open either.
  absl::StatusOr<std::string> Open(absl::string_view sealed);

 private:
  using Key = std::array<uint8_t, 32>;
  Key seal_, open_;
  uint64_t sealed_ = 0, opened_ = 0;
};

// A message for many: encrypted once, and its key sealed for each of them in their sessions.
struct SharedBody {
  std::string bytes;  // what travels once
  std::string key;    // what is sealed for each: the key, and the hash of `bytes`, which no reader can forge
};
SharedBody SealShared(absl::string_view message);
// DataLoss: `bytes` is not what `key` was made for.
absl::StatusOr<std::string> OpenShared(absl::string_view bytes, absl::string_view key);

}  // namespace gtrain::net
