// XXH3-128, the checksum of checkpoints: 32 lower-case hex digits in canonical (big-endian) order.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

struct XXH3_state_s;

namespace gtrain::ckpt {

// In canonical order.
using HashBytes = std::array<uint8_t, 16>;

// A hash in pieces. Not used any more once it was moved from.
class Xxh3 {
 public:
  Xxh3();
  void Add(absl::string_view data);
  // The hash of all data added so far.
  std::string Hex() const;
  HashBytes Bytes() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

// Hash of the concatenation of `parts`.
std::string Xxh3Hex(absl::Span<const absl::string_view> parts);
inline std::string Xxh3Hex(absl::string_view data) {
  return Xxh3Hex(absl::Span<const absl::string_view>(&data, 1));
}
HashBytes Xxh3Bytes(absl::string_view data);
std::string HashHex(const HashBytes& hash);
bool IsHashHex(absl::string_view text);

}  // namespace gtrain::ckpt
