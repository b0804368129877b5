// What processes say to each other about calls: docs/protocols/actors.md has the bytes. PURE.
//
// A message holds frames one after the other, so that many calls travel as one message. Whoever calls sends
// Hello, calls and the acknowledgement in them; whoever is called answers. Readers take nothing that a writer
// here would not produce.
#pragma once
#include <cstdint>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "actors/plan/call_ledger.h"

namespace gtrain::actors {

inline constexpr uint8_t kFramesVersion = 1;
// Arguments and results of one call. More is no call but an object.
inline constexpr size_t kCallBytesMax = size_t{64} << 20;
inline constexpr size_t kErrorBytesMax = 4096;
inline constexpr size_t kMessageBytes = 256 << 10;  // then the next message begins

// The first frame of a connection: who calls, and the process that it believes to be at this address.
struct HelloFrame {
  CallerId from, to;
  bool operator==(const HelloFrame&) const = default;
};
// The answer: who is at this address. Another one than was meant: that one is no more.
struct WelcomeFrame {
  CallerId process;
  bool operator==(const WelcomeFrame&) const = default;
};
struct CallFrame {
  uint64_t actor = 0;         // 0: the process itself
  uint64_t number = 0;        // of the caller's calls to this actor, from 1
  uint64_t acknowledged = 0;  // CallLedger
  uint32_t method = 0;
  uint32_t timeout_ms = 0;  // what is left of its time
  bool given_up = false;
  absl::string_view arguments;  // of the message
  bool operator==(const CallFrame&) const = default;
};
struct AnswerFrame {
  uint64_t actor = 0;
  uint64_t number = 0;
  absl::StatusCode code = absl::StatusCode::kOk;
  absl::string_view text;  // the result, or the sentence of the error
  bool operator==(const AnswerFrame&) const = default;
};
// From `next` on the calls to this actor are to be sent again, later: its mailbox is full, or those before
// are missing.
struct AgainFrame {
  uint64_t actor = 0;
  uint64_t next = 0;
  bool full = false;
  bool operator==(const AgainFrame&) const = default;
};
// Its caller has all answers up to a number, and calls nothing just now.
struct AcknowledgeFrame {
  uint64_t actor = 0;
  uint64_t acknowledged = 0;
  bool operator==(const AcknowledgeFrame&) const = default;
};
using Frame = std::variant<HelloFrame, WelcomeFrame, CallFrame, AnswerFrame, AgainFrame, AcknowledgeFrame>;

void AppendFrame(const Frame& frame, std::string* message);

// The next frame of a message, which loses its bytes; views into it. InvalidArgument: it is none, and what
// follows is not to be read.
absl::StatusOr<Frame> TakeFrame(absl::string_view* message);

}  // namespace gtrain::actors
