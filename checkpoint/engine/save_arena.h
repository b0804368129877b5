// The memory that a rank shares with the writer of its saves, and the bell between them.
//
//   0                header: the requests, and how they ended
//   kOrderBegin      the order (format/manifest.h), text
//   header.hashes    of each chunk of the file, as it was copied (engine/snapshot.h), 16 bytes each
//   header.tail      the part of the newest save besides its tensors (SaveTail), text; if that can change
//   header.data      the data of the rank's shard, in the order of the file. It lies in its page as it will
//                    in a block of the file, so that it can be written from here without a copy
//
// Each word has one writer. The rank fills order and data, then announces them; there is work while
// `requested` is above `finished`, so a writer that starts anew, or a rank that never comes back, leaves
// nothing in doubt. The bell only wakes: the side that hears it looks at the header.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/unique_fd.h"
#include "checkpoint/format/hash.h"

namespace gtrain::ckpt {

inline constexpr uint64_t kPage = 4096;
inline uint64_t WholePages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

enum class WriterState : uint32_t { kStarting, kReady, kRefused };  // refused: `message` says why

struct SaveArenaHeader {
  // The keeper reads this word (runtime/keeper/rank_protocol.h): the rank is gone and the data is not needed
  // any more, because the shard is written. Written by the writer.
  std::atomic<uint32_t> released;
  std::atomic<uint32_t> starts;       // of writers. By the writer
  std::atomic<WriterState> state;     // by the writer
  std::atomic<uint64_t> order_bytes;  // not zero: the order is there. By the rank
  std::atomic<uint64_t> data;         // where the data begins. By the rank, before order_bytes
  std::atomic<uint64_t> requested;    // saves asked for so far. By the rank
  std::atomic<uint64_t> finished;     // how many of them are over. By the writer
  char request[128];                  // manifest key of the newest one asked for, NUL-terminated. By the rank
  int32_t code;                       // status of the newest one that is over. By the writer
  char message[1024];  // its words; of one that went well, what people should know. NUL-terminated
  // The address of the board on which this machine's writers meet (IndexBoard); 0: there is none. Written by
  // the rank, before order_bytes; versions without boards leave it alone.
  std::atomic<int64_t> board;
  std::atomic<uint64_t>
      hashes;  // where they begin; 0: a rank of a version without them. By the rank, with data
  // Manifest key of the checkpoint that this run was resumed from, NUL-terminated; empty: none in this
  // directory. Written by the rank, before the first request; versions without it leave it empty.
  char resumed[128];
  std::atomic<uint64_t> tail;        // where it begins; 0: there is none. By the rank, before order_bytes
  std::atomic<uint64_t> tail_bytes;  // by the rank, before `requested`
  // Not zero while the rank copies its state into the arena: other work waits. Written by the rank; versions
  // without it leave it alone.
  std::atomic<uint32_t> copying;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<WriterState>::is_always_lock_free);

inline constexpr uint64_t kOrderBegin = 4096;
static_assert(sizeof(SaveArenaHeader) <= kOrderBegin && offsetof(SaveArenaHeader, released) == 0);

// Cuts off what does not fit.
void PutText(absl::string_view text, absl::Span<char> to);
// Reads up to NUL or the end: the other side may be broken.
std::string TakeText(absl::Span<const char> from);

// An open file of this process, as other processes of this machine and user find it; greater than 0.
int64_t ShareAddress(int fd);
// Opens a shared file for reading and writing. NotFound and the like when that process or its file is gone.
absl::StatusOr<UniqueFd> OpenShared(int64_t address);

// A shared mapping of a whole arena. Not thread-safe but for the header's atomics.
class SaveArena {
 public:
  // `file_bytes`: header and data of the shard, of the largest one if that HasTail (plan/save_plan.h).
  static uint64_t BytesFor(uint64_t order_bytes, uint64_t file_bytes, bool has_tail = false);
  // InvalidArgument when it is smaller than a header.
  static absl::StatusOr<SaveArena> Map(UniqueFd fd);
  SaveArena(SaveArena&& other) noexcept;
  SaveArena& operator=(SaveArena&&) = delete;
  ~SaveArena();

  SaveArenaHeader* header() const { return reinterpret_cast<SaveArenaHeader*>(base_); }
  uint64_t bytes() const { return bytes_; }
  // The rank, once; it fits an arena of BytesFor. `file_begin` is where the data begins in its file.
  void PutOrder(absl::string_view order, uint64_t file_begin, uint64_t file_bytes, bool has_tail = false);
  // The rank, before each save it asks for. ResourceExhausted over kTailTextBytesMax.
  absl::Status PutTail(absl::string_view tail);
  // The rank, before each request: as many as the file has chunks.
  void PutHashes(absl::Span<const HashBytes> hashes);
  // The writer, once order_bytes is not zero. DataLoss: what the header says lies outside of the arena.
  absl::StatusOr<std::string> Order() const;
  absl::StatusOr<std::string> Tail() const;
  absl::StatusOr<char*> Data(uint64_t bytes) const;
  // Empty when the rank gave none.
  absl::StatusOr<std::vector<HashBytes>> Hashes(uint64_t file_bytes) const;
  // Gives the pages of the data back to the machine; they read as zeros afterwards.
  void DropData();

 private:
  SaveArena(UniqueFd fd, char* base, uint64_t bytes) : fd_(std::move(fd)), base_(base), bytes_(bytes) {}

  UniqueFd fd_;
  char* base_;
  uint64_t bytes_;
};

// Nothing here blocks but Wait.
class Bell {
 public:
  explicit Bell(UniqueFd channel) : channel_(std::move(channel)) {}
  void Ring() const;
  // Waits until the other side rings or is gone, at most `timeout`. May return without a reason.
  void Wait(absl::Duration timeout);
  // True once Wait or Look has seen that the other side is gone.
  bool gone() const { return gone_; }
  void Look() { Wait(absl::ZeroDuration()); }

 private:
  const UniqueFd channel_;
  bool gone_ = false;
};

}  // namespace gtrain::ckpt
