// Bytes of the shared-memory arena of one communicator on one machine.
//
//   header | a RankLine and two Posts a local rank | records: 2 x world OpRecords | inboxes | slots |
//   results
//
// Posts: what a rank puts down when it enters a collective; entry number t uses the post t % 2. A rank enters
// once more only after all entered before, so nobody still reads the post that it writes.
// Records: of all machines, written by the leader where there are several.
// Inboxes: one a local rank (comm/shm/inbox.h).
// Slots: each local rank has kBuffers buffers of kSlotBytes that it alone writes.
// Results: kBuffers buffers of `result_bytes`, or more, for the whole machine.
// Chunk number g of the communicator's life uses buffer g % kBuffers everywhere.
//
// Bytes, of m ranks of this machine in a world of n, to the next page: m (2 MiB of slots, 257 KiB of inbox,
// 16.4 KiB of posts and lines) + 2 MiB of results, 16 KiB for each of n instead where that is more (n above
// 128), 32 n m where that is still more (m above 512, with other machines) + 112 n of records.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/plan/op_record.h"
#include "comm/shm/inbox.h"

namespace gtrain::comm {

inline constexpr uint64_t kArenaMagic = 0x6774'7261'696e'4131;  // "gtrainA1"
inline constexpr uint32_t kArenaVersion = 7;
inline constexpr size_t kCacheLine = 128;  // two lines: the prefetcher fetches pairs
// A pipeline of at most this many stages has no chunk in use by two of them.
inline constexpr size_t kBuffers = 4;
inline constexpr size_t kSlotBytes = 512 << 10;

// An element of each of 65,536 ranks has room in a slot.
inline constexpr size_t kLargestElement = 8;
static_assert(kSlotBytes >= (1 << 16) * kLargestElement);

// Data up to this size travels in the posts and needs no second meeting.
inline constexpr size_t kInlineBytes = 8 << 10;

enum ArenaFailure : uint32_t { kNobodyFailed, kFailureClaimed, kFailureTold };

struct ArenaHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t world;
  uint32_t local_ranks;
  uint32_t reserved;
  uint64_t nonce;
  uint64_t bytes;
  std::atomic<uint32_t> ready;   // set last by the first local rank
  std::atomic<uint32_t> failed;  // ArenaFailure
  char notice[512];              // of the first rank that gave up, with a zero behind it
};

// Written by its owner alone (except `waiters`), read by all.
struct alignas(kCacheLine) RankLine {
  std::atomic<uint32_t> phase;    // phases this rank has entered
  std::atomic<uint32_t> waiters;  // peers asleep on `phase` or on the ticket of a post
  std::atomic<uint32_t> left;     // its communicator was destroyed
  std::atomic<uint32_t> frees;    // of memory that peers may have mapped
  uint64_t cores[14];             // that it may run on, as bits; written before the first phase
};

// The ticket, the record and the first bytes of a small payload share a cache line: one transfer brings all.
// A payload takes the place of that part of the record which says where data lies.
struct alignas(kCacheLine) Post {
  std::atomic<uint32_t> ticket;  // number of the entry; written last
  uint32_t reserved;
  OpRecord record;
  char more[kInlineBytes];

  char* payload() { return reinterpret_cast<char*>(this) + 8 + kAgreedBytes; }
};
static_assert(sizeof(Post) >= 8 + kAgreedBytes + kInlineBytes);
static_assert(offsetof(Post, more) == 64);

struct ArenaLayout {
  size_t lines = 0;
  size_t posts = 0;
  size_t records = 0;
  size_t inboxes = 0;
  size_t slots = 0;
  size_t results = 0;
  size_t result_bytes = 0;  // the same on all machines
  // From one result to the next: there is room for an element from every rank to every rank of the machine.
  size_t result_stride = 0;
  size_t bytes = 0;

  static ArenaLayout For(size_t world, size_t local_ranks) {
    auto page = [](size_t n) { return (n + 4095) / 4096 * 4096; };
    ArenaLayout l;
    l.lines = 1024;
    l.posts = l.lines + local_ranks * sizeof(RankLine);
    l.records = l.posts + local_ranks * 2 * sizeof(Post);
    l.inboxes = page(l.records + 2 * world * sizeof(OpRecord));
    l.slots = page(l.inboxes + local_ranks * sizeof(Inbox));
    l.results = l.slots + local_ranks * kBuffers * kSlotBytes;
    l.result_bytes = std::max(kSlotBytes, world * 4096);
    l.result_stride = l.result_bytes;
    if (world > local_ranks)
      l.result_stride = std::max(l.result_stride, page(world * local_ranks * kLargestElement));
    l.bytes = l.results + kBuffers * l.result_stride;
    return l;
  }
};
static_assert(sizeof(RankLine) == kCacheLine);
static_assert(sizeof(ArenaHeader) <= 1024);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace gtrain::comm
