// The messages that have come and those that are awaited in one communicator: brings pieces of messages and
// memory together, whichever is there first.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "comm/port/message.h"

namespace gtrain::comm {

// Not thread-safe; nothing blocks. With n members it keeps some ten bytes for each, and a hundred for each
// message that is awaited or has come early; of a message that is not awaited yet only the first piece is
// ever sent, and a member may be at most kAheadMax messages ahead.
class Mailbox {
 public:
  static constexpr size_t kAheadMax = 1 << 16;

  explicit Mailbox(size_t members) : from_(members) {}

  // Memory for the next message of `from`, of exactly `bytes`, or with `received` of at most that, and how
  // many came is written there. It is written to until Done. Its number.
  uint64_t Expect(int from, void* data, size_t bytes, size_t* received);
  // A piece has come. DataLoss: it cannot be of this communicator, whose connections are worth nothing then.
  absl::Status Take(const MessageHeader& header, absl::string_view bytes);
  // Whether the message of an Expect is there; it is forgotten then.
  bool Done(int from, uint64_t number);
  // Not empty where a message of an Expect is longer or shorter than its memory.
  const std::string& wrong() const { return wrong_; }
  // Messages of which this side must tell the sender that the rest may come, each once.
  struct Ready {
    int from;
    uint64_t number;
  };
  std::vector<Ready> TakeReady();
  bool AnyReady() const { return !ready_.empty(); }

 private:
  struct Slot {
    bool expected = false, begun = false, asked = false;
    char* to = nullptr;
    size_t bytes = 0;
    size_t* received = nullptr;
    uint64_t total = 0, got = 0;
    std::string early;
    bool done() const { return expected && begun && got == total; }
  };
  struct From {
    uint64_t first = 0;  // number of slots[0]
    uint64_t expected = 0;
    std::deque<Slot> slots;
  };

  Slot* At(From& from, uint64_t number);
  void Fits(int from, Slot& slot);
  void AskForMore(int from, uint64_t number, Slot& slot);

  std::vector<From> from_;
  std::vector<Ready> ready_;
  std::string wrong_;
};

}  // namespace gtrain::comm
