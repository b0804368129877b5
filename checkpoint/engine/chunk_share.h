// Chunks that several ranks of one machine want: one of them reads each from where it lies, the others copy
// it from memory that they share. Each rank compares a chunk with its hash itself, so no rank has to trust
// another; and a chunk that does not come, because a rank died or is slow, each reads itself in the end.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/unique_fd.h"

namespace gtrain::ckpt {

// Equal for processes that can open each other's files in /proc; `node` is what else tells machines apart.
int64_t MachineKey(absl::string_view node);

// One rank's view. First one owner thread: Make or Join, Want for each chunk, then, once all ranks of the
// machine have done that, Start. From there on thread-safe.
//
// Memory of a machine: a window of kSlotsOfARank chunks for each rank, at most kSlotsMax, and 12 bytes for
// each chunk of the checkpoint, until the last rank's view is gone.
class ChunkShare {
 public:
  static constexpr uint64_t kSlotsOfARank = 8, kSlotsMax = 64;
  // With nothing done by any rank of the machine for so long, a rank waits no longer.
  static constexpr absl::Duration kPatience = absl::Seconds(10);

  struct Task {
    enum class Kind {
      kRead,   // into `slot`, verify, Publish; then as kCopy
      kCopy,   // out of `slot`, verify, then Done
      kAlone,  // read it without the others, then Done
    } kind;
    size_t wanted;         // which Want it was, from 0
    char* slot = nullptr;  // of kChunkBytes, aligned to pages
  };

  // Makes a share for `ranks` of this machine and a checkpoint of `chunks`. `name` says what it is a share
  // of, the same for all.
  static absl::StatusOr<std::unique_ptr<ChunkShare>> Make(uint64_t chunks, int ranks, absl::string_view name,
                                                          absl::Duration patience = kPatience);
  // Opens the share that another process of the machine made and has not started yet.
  static absl::StatusOr<std::unique_ptr<ChunkShare>> Join(int64_t address, uint64_t chunks, int ranks,
                                                          absl::string_view name,
                                                          absl::Duration patience = kPatience);
  ~ChunkShare();
  ChunkShare(const ChunkShare&) = delete;
  ChunkShare& operator=(const ChunkShare&) = delete;

  int64_t address() const;  // for Join; not negative

  // Ascending. `together`: false if it costs this rank nothing to read it without the others.
  void Want(uint64_t chunk, bool together);
  void Start();

  // Returns the next task; nullopt: nothing is left. Waits while others read chunks that are wanted here,
  // with `alive` asked now and then: its error, or that of the rank that failed, is returned.
  absl::StatusOr<std::optional<Task>> Next(absl::FunctionRef<absl::Status()> alive);
  void Publish(const Task& task);
  void Done(const Task& task);
  // This rank gives up: the others need not go on.
  void Fail(const absl::Status& why);

 private:
  struct Header;
  struct Word;
  struct Wanted {
    uint64_t chunk;
    bool together;
    bool taken = false;
    uint64_t place = 0;  // among the chunks that several want
  };
  enum State : uint32_t { kOpen, kBeingRead, kThere };

  ChunkShare(UniqueFd fd, char* base, uint64_t chunks, uint64_t slots, absl::Duration patience);
  static absl::StatusOr<std::unique_ptr<ChunkShare>> Map(UniqueFd fd, uint64_t chunks, int ranks,
                                                         absl::Duration patience);
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  Word& word(uint64_t chunk) const;
  char* slot(const Wanted& wanted) const;
  bool SlotIsFree(const Wanted& wanted) const;
  std::optional<Task> Pick() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::optional<Task> PickUnshared() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Changed();

  UniqueFd fd_;  // until Start
  char* const base_;
  const uint64_t chunks_, slots_;
  const absl::Duration patience_;
  const RealClock clock_;
  std::vector<uint64_t> several_;  // chunks that several want, ascending; the n-th uses slot n mod slots_

  Mutex mu_;
  std::vector<Wanted> wanted_;  // fixed once started, but for `taken`
  std::vector<size_t> shared_ ABSL_GUARDED_BY(mu_), unshared_ ABSL_GUARDED_BY(mu_);  // indices of wanted_
  size_t shared_first_ ABSL_GUARDED_BY(mu_) = 0;                                     // all before are taken
  size_t unshared_next_ ABSL_GUARDED_BY(mu_) = 0;
  uint32_t seen_ ABSL_GUARDED_BY(mu_) = 0;  // of Header::changes
  Instant seen_at_ ABSL_GUARDED_BY(mu_);
  bool gave_up_ ABSL_GUARDED_BY(mu_) = false;  // waits no more
};

}  // namespace gtrain::ckpt
