// The messages between processes: a header, followed by bytes in the same message. Both ends are of one build
// (the first all-gather of a communicator compares it), so a header is sent as it lies in memory.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gtrain::comm {

inline constexpr uint32_t kMessageMagic = 0x67746632;  // "gtf2"

enum class MessageKind : uint32_t {
  // The fabric's own messages. A process calls one that it wants to speak with, the address of the caller
  // behind the header; the other process answers, and from then on both send.
  kCall = 1,
  kAnswer,
  // Exchanges, whose messages match by number. kData: bytes from `offset` on of a message of `total` bytes.
  // kReady: the receiver of message `number` has its memory ready, so the rest of it may come. kGaveUp: a
  // notice (comm/port/watch.h) follows the header. kLeft: no message from `number` on will come; the reason
  // follows.
  kData,
  kReady,
  kGaveUp,
  kLeft,
  // Point to point messages, which match by tag (comm/exec/point_to_point.h). kEager: a whole message.
  // kComing: a message of `total` bytes whose pieces follow. kOffer: a message that waits for kTake. kBulk: a
  // piece of either. kTake: the receiver has memory for message `number`. kTaken: the receiver has taken
  // messages worth `number` bytes of the window so far. kAskTaken: the window is full, and the sender asks
  // how much was taken. kAnswerTaken: the answer to kAskTaken.
  kEager,
  kComing,
  kOffer,
  kBulk,
  kTake,
  kTaken,
  kAskTaken,
  kAnswerTaken,
};

// The header of every message. In all but calls and answers it names the message's communicator: member
// `sender` of communicator `context` of generation `generation`. The fields are wide enough that a
// generation, a communicator and a number never repeat.
struct MessageHeader {
  uint32_t magic = kMessageMagic;
  MessageKind kind = MessageKind::kData;
  uint64_t generation = 0;
  uint64_t context = 0;
  uint64_t sender = 0;
  uint64_t number = 0;  // of the message, among those from this sender to this receiver
  uint64_t total = 0;
  uint64_t offset = 0;
  int32_t tag = 0;     // of kEager and kOffer, as is
  uint32_t dtype = 0;  // a DType
};
static_assert(sizeof(MessageHeader) == 64);

// The part of a message that travels at once has at most this size; the rest goes in pieces of this size when
// the receiver is ready.
inline constexpr size_t kPieceBytes = (60 << 10) - sizeof(MessageHeader);

}  // namespace gtrain::comm
