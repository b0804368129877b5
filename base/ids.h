// Identities as types that do not mix (docs/architecture.md).
#pragma once
#include <compare>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace gtrain {

// A string id. Ids are validated where they enter (wire, command line), so code
// past that point may use them as map keys, but never as path components.
template <typename Tag>
struct StringId {
  std::string value;
  StringId() = default;
  explicit StringId(std::string v) : value(std::move(v)) {}
  bool empty() const { return value.empty(); }
  auto operator<=>(const StringId&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const StringId& id) {
    return H::combine(std::move(h), id.value);
  }
  friend std::ostream& operator<<(std::ostream& os, const StringId& id) { return os << id.value; }
};

template <typename Tag>
struct NumberId {
  uint64_t value = 0;
  auto operator<=>(const NumberId&) const = default;
  NumberId Next() const { return {value + 1}; }
  template <typename H>
  friend H AbslHashValue(H h, const NumberId& id) {
    return H::combine(std::move(h), id.value);
  }
  friend std::ostream& operator<<(std::ostream& os, const NumberId& id) { return os << id.value; }
};

using ClusterId = StringId<struct ClusterIdTag>;  // 32 hex digits, made by `gtrain head --init`
using NodeId = StringId<struct NodeIdTag>;        // 16 hex digits of the hash of the node's CURVE public key
using ClientId = StringId<struct ClientIdTag>;    // likewise of a client's key
using JobId = StringId<struct JobIdTag>;          // "<name>-<number>", made by the head
using Incarnation =
    StringId<struct IncarnationTag>;  // boot id of the node + a random part, kept while keepers live
using HeadEpoch = NumberId<struct HeadEpochTag>;    // +1 at every head start, durable
using Generation = NumberId<struct GenerationTag>;  // one membership of one job; 0 = none yet
using Timeline = NumberId<struct TimelineTag>;      // +1 when a job resumes from a checkpoint

}  // namespace gtrain
