#include "net/zmq/ingress.h"

#include <utility>

#include "absl/strings/strip.h"

namespace gtrain::net {

std::string PlainAddress(absl::string_view address) {
  return std::string(absl::StripPrefix(address, "::ffff:"));
}

std::optional<port::Received> Admit(Frames message, const KeyRegistry& registry, Instant now, Drop* drop) {
  if (message.count != 2 || message.frames.size() != 2) {
    *drop = Drop::kBadFrames;
    return std::nullopt;
  }
  const size_t slash = message.user_id.find('/');
  const std::string key_id = slash == std::string::npos ? "" : message.user_id.substr(slash + 1);
  std::optional<Peer> peer = registry.PeerOf(key_id, now);
  if (!peer) {
    *drop = Drop::kNoRole;
    return std::nullopt;
  }
  return port::Received{.peer = *std::move(peer),
                        .route = {std::move(message.frames[0])},
                        .address = PlainAddress(message.peer_address),
                        .payload = std::move(message.frames[1])};
}

}  // namespace gtrain::net
