// Where the ranks of a machine put packets for one of them: a ring of cells with many writers and one reader
// (D. Vyukov, "Bounded MPMC queue"; here with one reader). 257 KiB of shared memory a rank, zeroed; nothing
// else that grows with the number of ranks.
//
// A cell that its writer claimed and, being killed, never filled stops the ring: its rank is lost then, and
// with it the communicator.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "comm/port/message.h"

namespace gtrain::comm {

inline constexpr size_t kCellBytes = 8 << 10;  // behind a header
inline constexpr uint64_t kCells = 32;

struct alignas(128) InboxCell {
  // 2 * lap: free for the writer of this lap of the ring; 2 * lap + 1: filled.
  std::atomic<uint32_t> state;
  uint32_t bytes;
  MessageHeader header;
  char data[kCellBytes];
};

// Lies in shared memory. Push and Ring: any thread of any process that has mapped it; the rest: the one
// reader and its threads, one at a time where nothing else is said.
class Inbox {
 public:
  // False: it is full. At most kCellBytes.
  bool Push(const MessageHeader& header, absl::string_view bytes);
  // The next packet, if there is one, is shown and its cell is free again.
  bool Take(absl::FunctionRef<void(const MessageHeader&, absl::string_view)> show);

  // A writer that found it full wants to hear, by a ring at its own, when it no longer is.
  void WantRoom() { room_wanted_.store(1); }
  bool RoomWanted() {
    return room_wanted_.load(std::memory_order_relaxed) != 0 && room_wanted_.exchange(0) != 0;
  }

  // The reader looks again.
  void Ring();
  // How to sleep: announce, look at the bell, look for packets, then sleep until it has rung since. Any
  // thread of the reader's.
  uint32_t Announce();
  void Sleep(uint32_t seen, int milliseconds);
  void Retract() { asleep_.fetch_sub(1); }

 private:
  alignas(128) std::atomic<uint64_t> tail_;  // cells claimed so far
  alignas(128) std::atomic<uint32_t> bell_;
  std::atomic<uint32_t> asleep_, room_wanted_;
  alignas(128) uint64_t head_;  // the reader's
  InboxCell cells_[kCells];
};
static_assert(sizeof(Inbox) <= 264 << 10);

}  // namespace gtrain::comm
