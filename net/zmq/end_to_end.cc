#include "net/zmq/end_to_end.h"

#include <sodium.h>
#include <zmq.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace gtrain::net {
namespace {

constexpr size_t kSymmetricKeyBytes = 32;
constexpr size_t kHashBytes = 32;
constexpr size_t kTagBytes = crypto_aead_chacha20poly1305_ietf_ABYTES;
constexpr absl::string_view kToHead = "gtrain relayed 1 to head", kToNode = "gtrain relayed 1 to node";

const unsigned char* Bytes(absl::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}
unsigned char* Bytes(std::string& text) { return reinterpret_cast<unsigned char*>(text.data()); }

using Nonce = std::array<uint8_t, crypto_aead_chacha20poly1305_ietf_NPUBBYTES>;

// No key seals two messages with one number.
Nonce NonceOf(uint64_t number) {
  Nonce nonce{};
  std::memcpy(nonce.data(), &number, sizeof(number));
  return nonce;
}

std::string Hash(absl::string_view text) {
  std::string hash(kHashBytes, '\0');
  crypto_generichash(Bytes(hash), hash.size(), Bytes(text), text.size(), nullptr, 0);
  return hash;
}

}  // namespace

absl::StatusOr<std::string> PairSecret(const KeyPair& own, absl::string_view peer_public_key) {
  GT_CHECK(sodium_init() >= 0);
  if (!ValidKey(own.secret_key) || !ValidKey(peer_public_key))
    return absl::InvalidArgumentError("not a pair of keys");
  std::array<uint8_t, kSymmetricKeyBytes> secret, peer;
  zmq_z85_decode(secret.data(), own.secret_key.c_str());
  zmq_z85_decode(peer.data(), std::string(peer_public_key).c_str());
  std::string shared(crypto_box_BEFORENMBYTES, '\0');
  const int made = crypto_box_beforenm(Bytes(shared), peer.data(), secret.data());
  sodium_memzero(secret.data(), secret.size());
  if (made != 0) return absl::InvalidArgumentError("a key that no peer can have");
  return shared;
}

std::string NewSessionHalf() {
  GT_CHECK(sodium_init() >= 0);
  std::string half(kSessionHalfBytes, '\0');
  randombytes_buf(half.data(), half.size());
  return half;
}

SealedSession::SealedSession(End end, absl::string_view secret, absl::string_view node_half,
                             absl::string_view head_half) {
  GT_CHECK(secret.size() == kSymmetricKeyBytes && node_half.size() == kSessionHalfBytes &&
           head_half.size() == kSessionHalfBytes);
  const auto derive = [&](absl::string_view direction, Key& key) {
    const std::string text = absl::StrCat(node_half, head_half, direction);
    crypto_generichash(key.data(), key.size(), Bytes(text), text.size(), Bytes(secret), secret.size());
  };
  derive(kToHead, end == End::kNode ? seal_ : open_);
  derive(kToNode, end == End::kNode ? open_ : seal_);
}

std::string SealedSession::Seal(absl::string_view message) {
  std::string sealed(message.size() + kTagBytes, '\0');
  crypto_aead_chacha20poly1305_ietf_encrypt(Bytes(sealed), nullptr, Bytes(message), message.size(), nullptr,
                                            0, nullptr, NonceOf(sealed_++).data(), seal_.data());
  return sealed;
}

absl::StatusOr<std::string> SealedSession::Open(absl::string_view sealed) {
  if (sealed.size() < kTagBytes) return absl::DataLossError("too short to be sealed");
  std::string message(sealed.size() - kTagBytes, '\0');
  if (crypto_aead_chacha20poly1305_ietf_decrypt(Bytes(message), nullptr, nullptr, Bytes(sealed),
                                                sealed.size(), nullptr, 0, NonceOf(opened_).data(),
                                                open_.data()) != 0) {
    return absl::DataLossError("it is not the next message of the other end");
  }
  ++opened_;
  return message;
}

SharedBody SealShared(absl::string_view message) {
  GT_CHECK(sodium_init() >= 0);
  std::string key(kSymmetricKeyBytes, '\0');
  randombytes_buf(key.data(), key.size());
  SharedBody body{std::string(message.size() + kTagBytes, '\0'), ""};
  crypto_aead_chacha20poly1305_ietf_encrypt(Bytes(body.bytes), nullptr, Bytes(message), message.size(),
                                            nullptr, 0, nullptr, NonceOf(0).data(), Bytes(key));
  body.key = absl::StrCat(key, Hash(body.bytes));
  return body;
}

absl::StatusOr<std::string> OpenShared(absl::string_view bytes, absl::string_view key) {
  if (key.size() != kSymmetricKeyBytes + kHashBytes || bytes.size() < kTagBytes)
    return absl::DataLossError("no key of a shared message");
  // Who has the key could make other bytes that open: others that the message is for, a relay among them.
  if (Hash(bytes) != key.substr(kSymmetricKeyBytes))
    return absl::DataLossError("a shared message was changed");
  std::string message(bytes.size() - kTagBytes, '\0');
  if (crypto_aead_chacha20poly1305_ietf_decrypt(Bytes(message), nullptr, nullptr, Bytes(bytes), bytes.size(),
                                                nullptr, 0, NonceOf(0).data(), Bytes(key)) != 0) {
    return absl::DataLossError("a shared message does not open");
  }
  return message;
}

}  // namespace gtrain::net
