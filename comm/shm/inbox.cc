#include "comm/shm/inbox.h"

#include <algorithm>
#include <cstring>

#include "absl/time/time.h"
#include "comm/shm/futex.h"

namespace gtrain::comm {
namespace {

uint32_t Free(uint64_t place) { return static_cast<uint32_t>(2 * (place / kCells)); }

}  // namespace

bool Inbox::Push(const MessageHeader& header, absl::string_view bytes) {
  uint64_t place = tail_.load(std::memory_order_relaxed);
  for (;;) {
    InboxCell& cell = cells_[place % kCells];
    const auto ahead = static_cast<int32_t>(cell.state.load(std::memory_order_acquire) - Free(place));
    if (ahead < 0) return false;  // the packet of a lap ago is still there
    if (ahead > 0) {              // somebody else has claimed it
      place = tail_.load(std::memory_order_relaxed);
    } else if (tail_.compare_exchange_weak(place, place + 1)) {
      cell.header = header;
      cell.bytes = static_cast<uint32_t>(bytes.size());
      if (!bytes.empty()) std::memcpy(cell.data, bytes.data(), bytes.size());
      cell.state.store(Free(place) + 1, std::memory_order_release);
      return true;
    }
  }
}

bool Inbox::Take(absl::FunctionRef<void(const MessageHeader&, absl::string_view)> show) {
  InboxCell& cell = cells_[head_ % kCells];
  if (cell.state.load(std::memory_order_acquire) != Free(head_) + 1) return false;
  show(cell.header, absl::string_view(cell.data, std::min<size_t>(cell.bytes, kCellBytes)));
  cell.state.store(Free(head_) + 2);
  ++head_;
  return true;
}

// The packet is there before the bell changes, and a sleeper has announced itself before it looked at either.
void Inbox::Ring() {
  bell_.fetch_add(1);
  if (asleep_.load() > 0) FutexWakeAll(&bell_);
}

uint32_t Inbox::Announce() {
  asleep_.fetch_add(1);
  return bell_.load();
}

void Inbox::Sleep(uint32_t seen, int milliseconds) {
  FutexWait(&bell_, seen, absl::Milliseconds(milliseconds));
}

}  // namespace gtrain::comm
