// The one codec of the control plane: core::Message <-> bytes. Pure functions, thread-safe.
//
// Decode trusts nothing: size, structure, enums, numbers, text, ids and list lengths are
// all checked (faults B6, B7), and kinds the sender may not use are refused before
// any field is read.
#pragma once
#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/core/values/message_table.h"

namespace gtrain::wire {

// Largest message of any kind. Kinds that carry tables (grants, exchanges, hellos, submissions, replies)
// may use all of it, the others kControlBytesMax.
inline constexpr size_t kMessageBytesMax = 16u << 20;
inline constexpr size_t kControlBytesMax = 1u << 20;

// The maker of the bytes decides which kinds Decode lets through.
using Sender = core::Sender;

// Human text that is not UTF-8 is repaired, infinite durations become the longest one, a loss that is not
// a number is left out; anything else is written as it is. The result may exceed kMessageBytesMax:
// transports refuse it then.
std::string Encode(const core::Message& message);

// InvalidArgument names the kind and the first field that is wrong. The caller drops the message and counts
// it.
absl::StatusOr<core::Message> Decode(absl::string_view bytes, Sender sender = Sender::kAny);

// The id of a client's request that Decode refused, so that its client can be told. "": there is none, or the
// id is no id either.
std::string RequestIdOf(absl::string_view bytes);

// "AgentHello", "Revoke", ...: for logs.
absl::string_view KindName(const core::Message& message);

// Letters, digits and ._:+- with a letter or digit first; at most 128 characters. Every id from outside
// passes this.
bool ValidId(absl::string_view id);

}  // namespace gtrain::wire
