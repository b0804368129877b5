// Admission of messages: the frames of one message as the socket gave them, and the keys that may send them.
// No ZeroMQ here, so tests and the fuzzer use the very function the server uses.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "net/port/transport.h"
#include "net/zmq/key_registry.h"

namespace gtrain::net {

// One complete message.
struct Frames {
  std::vector<std::string> frames;  // at most as many as were asked for; the rest is read and dropped
  size_t count = 0;
  std::string user_id;  // metadata of the last kept frame, set by our own ZAP handler
  std::string peer_address;
  int fd = -1;  // of the connection it came from, as far as ZeroMQ knows
};

// "::ffff:10.0.0.1" -> "10.0.0.1".
std::string PlainAddress(absl::string_view address);

enum class Drop { kBadFrames, kNoRole };

// A message of exactly a route and a payload, of a key that is allowed at `now`: asked for each message, so a
// key taken off the list loses its open connections too (faults B5, B8). Otherwise `drop` says why not.
std::optional<port::Received> Admit(Frames message, const KeyRegistry& registry, Instant now, Drop* drop);

}  // namespace gtrain::net
