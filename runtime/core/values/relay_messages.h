// The messages of the way through another agent (docs/protocols/relays.md). PURE.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"

namespace gtrain::core {

// In a large cluster most agents (the children) reach the head through another one (the relay). What a child
// and the head say to each other is sealed for the other end (net/zmq/end_to_end.h): a relay carries it, and
// can neither read it nor make it up. It can lose it, which ends the conversation, and it alone says who of
// its children is alive.
enum class RelayStage {
  kOpen,    // child: here is my half of the session
  kAnswer,  // head: here is mine
  kSealed,  // a message
  kShared,  // head: a message that others get as well. The part has its key, `body` is where it is
  kOver,    // head or relay: something was lost, open a session anew
  kLost,    // relay: I have no connection to the head
  kFound,   // relay: I have one again
};
struct RelayPart {
  NodeId node;  // the child
  RelayStage stage = RelayStage::kOpen;
  std::string bytes;
  uint32_t number = 0;  // kAnswer: of the session, as RelayedUp::heard counts them
  uint32_t body = 0;    // kShared: index in RelayedDown::bodies
  bool waits = false;   // child, to its relay: it may wait for the next beats, in its order
  bool operator==(const RelayPart&) const = default;
};

// Child -> relay -> head. From a child, with its own parts: none say only that it is there.
struct RelayedUp {
  std::vector<RelayPart> parts;
  std::vector<uint32_t> heard;  // sessions whose children have spoken since the last of these
  bool operator==(const RelayedUp&) const = default;
};

// Head -> relay -> child. To a child, without parts: the relay has heard it and has a head.
struct RelayedDown {
  std::vector<std::string> bodies;
  std::vector<RelayPart> parts;
  bool operator==(const RelayedDown&) const = default;
};

// Relay -> head: those of RelayFor may come.
struct RelayReady {
  int port = 0;       // where; 0: they may not
  std::string error;  // why not, for people
  bool operator==(const RelayReady&) const = default;
};

// ---------------------------------------------------------------- head -> agent

struct RelayChild {
  NodeId node;
  std::string public_key;  // Z85
  bool operator==(const RelayChild&) const = default;
};
// These nodes, and no others but who is connected by now, may reach the head through this agent.
struct RelayFor {
  HeadEpoch epoch;
  std::vector<RelayChild> children;
  bool operator==(const RelayFor&) const = default;
};
// From now on the head is reached through that agent, and directly where that does not work.
struct ConnectVia {
  HeadEpoch epoch;
  NodeId relay;
  std::string endpoint;    // "host:port"
  std::string public_key;  // Z85; of the relay, to expect there
  bool operator==(const ConnectVia&) const = default;
};

}  // namespace gtrain::core
