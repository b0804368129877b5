// The n-th of the chunks that several want goes through slot n mod slots, once all that wanted the one before
// it there have it. Each rank takes its chunks in their order, so the oldest that is not done always has its
// slot, and nobody waits in a circle.
#include "checkpoint/engine/chunk_share.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "checkpoint/engine/save_arena.h"
#include "checkpoint/engine/storage_error.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/manifest.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kNap = absl::Milliseconds(100);  // between two looks at whether the rank is to go on

}  // namespace

struct ChunkShare::Header {
  char name[64];
  std::atomic<uint32_t> changes;  // a futex
  std::atomic<int32_t> failed;    // a status code; -1: its message is being written
  char why[1024];
};

struct ChunkShare::Word {
  std::atomic<uint32_t> wanted;  // by so many ranks
  std::atomic<uint32_t> done;    // so many have it
  std::atomic<uint32_t> state;
};

int64_t MachineKey(absl::string_view node) {
  const absl::StatusOr<std::string> boot = ReadFile("/proc/sys/kernel/random/boot_id", 100);
  char pids[64] = {};
  if (!boot.ok() || readlink("/proc/self/ns/pid", pids, sizeof(pids) - 1) <= 0)
    return static_cast<int64_t>(Rng::FromSystem().Next() >> 1);  // alone
  Xxh3 hash;
  hash.Add(absl::StrCat(node, "\n", *boot, "\n", pids, "\n", geteuid()));
  uint64_t key = 0;
  GT_CHECK(absl::SimpleHexAtoi(hash.Hex().substr(0, 15), &key));
  return static_cast<int64_t>(key);
}

ChunkShare::ChunkShare(UniqueFd fd, char* base, uint64_t chunks, uint64_t slots, absl::Duration patience)
    : fd_(std::move(fd)), base_(base), chunks_(chunks), slots_(slots), patience_(patience) {}

ChunkShare::~ChunkShare() {
  munmap(base_, kPage + WholePages(chunks_ * sizeof(Word)) + slots_ * kChunkBytes);
}

absl::StatusOr<std::unique_ptr<ChunkShare>> ChunkShare::Map(UniqueFd fd, uint64_t chunks, int ranks,
                                                            absl::Duration patience) {
  static_assert(sizeof(Header) <= kPage);
  const uint64_t slots = std::min(kSlotsOfARank * static_cast<uint64_t>(ranks), kSlotsMax);
  const uint64_t bytes = kPage + WholePages(chunks * sizeof(Word)) + slots * kChunkBytes;
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "memory to share chunks in");
  if (info.st_size == 0 && ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    return ErrnoStatus(errno, "memory to share chunks in");
  if (info.st_size != 0 && static_cast<uint64_t>(info.st_size) != bytes)
    return absl::FailedPreconditionError("the memory to share chunks in has another size");
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "memory to share chunks in");
  return std::unique_ptr<ChunkShare>(
      new ChunkShare(std::move(fd), static_cast<char*>(base), chunks, slots, patience));
}

absl::StatusOr<std::unique_ptr<ChunkShare>> ChunkShare::Make(uint64_t chunks, int ranks,
                                                             absl::string_view name,
                                                             absl::Duration patience) {
  UniqueFd fd(memfd_create("gtrain-chunks", MFD_CLOEXEC));  // all zero: nothing is wanted, nothing failed
  if (!fd.valid()) return ErrnoStatus(errno, "memory to share chunks in");
  GT_ASSIGN_OR_RETURN(auto share, Map(std::move(fd), chunks, ranks, patience));
  PutText(name, absl::MakeSpan(share->header()->name));
  return share;
}

absl::StatusOr<std::unique_ptr<ChunkShare>> ChunkShare::Join(int64_t address, uint64_t chunks, int ranks,
                                                             absl::string_view name,
                                                             absl::Duration patience) {
  GT_ASSIGN_OR_RETURN(UniqueFd fd, OpenShared(address));
  GT_ASSIGN_OR_RETURN(auto share, Map(std::move(fd), chunks, ranks, patience));
  if (TakeText(absl::MakeSpan(share->header()->name)) != name)
    return absl::FailedPreconditionError("it is not the memory to share chunks in");
  return share;
}

int64_t ChunkShare::address() const { return ShareAddress(fd_.get()); }

ChunkShare::Word& ChunkShare::word(uint64_t chunk) const {
  GT_CHECK(chunk < chunks_);
  return reinterpret_cast<Word*>(base_ + kPage)[chunk];
}

char* ChunkShare::slot(const Wanted& wanted) const {
  return base_ + kPage + WholePages(chunks_ * sizeof(Word)) + wanted.place % slots_ * kChunkBytes;
}

void ChunkShare::Want(uint64_t chunk, bool together) {
  wanted_.push_back({chunk, together});
  if (together) word(chunk).wanted.fetch_add(1);
}

void ChunkShare::Start() {
  fd_.reset();
  for (uint64_t chunk = 0; chunk < chunks_; ++chunk) {
    if (word(chunk).wanted > 1) several_.push_back(chunk);
  }
  MutexLock lock(&mu_);
  for (size_t i = 0; i < wanted_.size(); ++i) {
    Wanted& w = wanted_[i];
    const auto place = std::lower_bound(several_.begin(), several_.end(), w.chunk);
    w.together = w.together && place != several_.end() && *place == w.chunk;
    w.place = static_cast<uint64_t>(place - several_.begin());
    (w.together ? shared_ : unshared_).push_back(i);
  }
  seen_at_ = clock_.Now();
}

bool ChunkShare::SlotIsFree(const Wanted& wanted) const {
  if (wanted.place < slots_) return true;
  const Word& before = word(several_[wanted.place - slots_]);
  return before.done == before.wanted;
}

std::optional<ChunkShare::Task> ChunkShare::PickUnshared() {
  if (unshared_next_ == unshared_.size()) return std::nullopt;
  return Task{Task::Kind::kAlone, unshared_[unshared_next_++]};
}

// Reading comes before copying: while somebody else reads a chunk, so does this rank another.
std::optional<ChunkShare::Task> ChunkShare::Pick() {
  while (shared_first_ < shared_.size() && wanted_[shared_[shared_first_]].taken) ++shared_first_;
  std::optional<size_t> there;
  const size_t end = std::min(shared_first_ + slots_, shared_.size());
  for (size_t at = shared_first_; at < end; ++at) {
    Wanted& w = wanted_[shared_[at]];
    if (w.taken) continue;
    std::atomic<uint32_t>& state = word(w.chunk).state;
    uint32_t now = state;
    if (now == kOpen && SlotIsFree(w) && state.compare_exchange_strong(now, kBeingRead)) {
      w.taken = true;
      return Task{Task::Kind::kRead, shared_[at], slot(w)};
    }
    if (now == kThere && !there) there = shared_[at];
  }
  if (!there) return PickUnshared();
  wanted_[*there].taken = true;
  return Task{Task::Kind::kCopy, *there, slot(wanted_[*there])};
}

absl::StatusOr<std::optional<ChunkShare::Task>> ChunkShare::Next(absl::FunctionRef<absl::Status()> alive) {
  Header* const h = header();
  while (true) {
    GT_RETURN_IF_ERROR(alive());
    if (const int32_t code = h->failed; code > 0) {
      const absl::Status why(
          static_cast<absl::StatusCode>(code & ~kStorageErrorMark),
          absl::StrCat("another rank of this machine: ", TakeText(absl::MakeSpan(h->why))));
      return (code & kStorageErrorMark) != 0 ? StorageError(why) : why;
    }
    const uint32_t changes = h->changes;  // before anything is looked at
    {
      MutexLock lock(&mu_);
      if (std::optional<Task> task = Pick()) return task;
      if (shared_first_ == shared_.size()) return std::optional<Task>();
      const Instant now = clock_.Now();
      if (changes != seen_) seen_at_ = now;
      seen_ = changes;
      gave_up_ |= now - seen_at_ >= patience_;  // for good: somebody who is missed is missed at each chunk
      if (gave_up_) {
        const size_t i = shared_[shared_first_];
        wanted_[i].taken = true;
        return std::optional(Task{Task::Kind::kAlone, i});
      }
    }
    const timespec nap = absl::ToTimespec(std::min(kNap, patience_));
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&h->changes), FUTEX_WAIT, changes, &nap, nullptr, 0);
  }
}

void ChunkShare::Changed() {
  ++header()->changes;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&header()->changes), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
          0);
}

void ChunkShare::Publish(const Task& task) {
  word(wanted_[task.wanted].chunk).state = kThere;
  Changed();
}

void ChunkShare::Done(const Task& task) {
  if (!wanted_[task.wanted].together) return;
  ++word(wanted_[task.wanted].chunk).done;
  Changed();
}

void ChunkShare::Fail(const absl::Status& why) {
  int32_t none = 0;
  if (!header()->failed.compare_exchange_strong(none, -1)) return;
  PutText(why.message(), absl::MakeSpan(header()->why));
  header()->failed = static_cast<int32_t>(why.code()) | (IsStorageError(why) ? kStorageErrorMark : 0);
  Changed();
}

}  // namespace gtrain::ckpt
