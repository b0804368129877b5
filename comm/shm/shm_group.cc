// Waiting. Each rank counts what it has entered in words of its own, and a rank that waits for it looks at
// such a word: for some microseconds without pause; where ranks outnumber the cores instead by giving the
// core away between looks, since one of those waited for may need it; then asleep on the word with a futex
// for at most kNap. The nap bounds how late a waiter notices that the generation is over: a killed peer can
// never wake anyone.
//
// Sleeping without a lost wake-up: the waiter announces itself in `waiters` and then gives the kernel the
// value it saw; the owner changes the word and then, with a full fence between, reads `waiters`. So either
// the owner sees the waiter or the kernel sees the new value. The fence would cost the owner the time that
// its write takes to reach the others, so it comes after the others were found there, or before the owner
// itself sleeps.
#include "comm/shm/shm_group.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "comm/shm/futex.h"

namespace gtrain::comm {
namespace {

constexpr absl::Duration kNap = absl::Milliseconds(20);
// How often to look: the first kEagerSpins times without a pause, which takes longer than a cache line does.
constexpr int kEagerSpins = 64, kSpins = 2000, kSpinsCrowded = 2, kYieldsCrowded = 100;
// The id that the owner of memory of Allocate has written lies behind that memory. An arena that a peer asks
// for when its owner, and so the arena, is gone is a new one, of zeros.
constexpr size_t kMarkBytes = 4096;
constexpr uint64_t kRankIdShift = 20;  // allocations of one rank before ids of two could meet

void FullFence() {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<int> word;  // ThreadSanitizer knows no fences
  word.fetch_add(0);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

bool Reached(uint32_t theirs, uint32_t wanted) { return static_cast<int32_t>(theirs - wanted) >= 0; }

}  // namespace

ShmGroup::ShmGroup(Bootstrap* bootstrap, std::vector<int> ranks, std::vector<std::string> names, int local,
                   uint64_t nonce)
    : bootstrap_(bootstrap),
      ranks_(std::move(ranks)),
      names_(std::move(names)),
      local_(local),
      nonce_(nonce),
      layout_(ArenaLayout::For(static_cast<size_t>(bootstrap->world_size()), ranks_.size())),
      waking_(bootstrap->wakers().Add([this] {
        kicks_.fetch_add(1);
        FutexWakeAll(&kicks_);
      })) {}

absl::StatusOr<std::unique_ptr<ShmGroup>> ShmGroup::Open(Bootstrap* bootstrap, std::vector<int> ranks,
                                                         std::vector<std::string> names, int local,
                                                         uint64_t nonce, const Watch& watch) {
  std::unique_ptr<ShmGroup> group(new ShmGroup(bootstrap, std::move(ranks), std::move(names), local, nonce));
  GT_ASSIGN_OR_RETURN(group->arena_, group->Map(nonce, group->layout_.bytes, group->layout_.slots, watch));
  group->arena_.KeepFromChildren();
  return group;
}

absl::StatusOr<Mapping> ShmGroup::Map(uint64_t id, size_t bytes, size_t zeros, const Watch& watch) {
  asked_.push_back(id);
  GT_ASSIGN_OR_RETURN(const UniqueFd fd, bootstrap_->Arena(id, bytes, zeros, watch.Left()));
  return Mapping::OfFile(fd.get(), bytes);
}

absl::Status ShmGroup::Join(const Watch& watch) {
  ArenaHeader* h = header();
  const uint32_t world = static_cast<uint32_t>(bootstrap_->world_size());
  if (local_ == 0) {
    h->magic = kArenaMagic;
    h->version = kArenaVersion;
    h->world = world;
    h->local_ranks = static_cast<uint32_t>(ranks_.size());
    h->nonce = nonce_;
    h->bytes = layout_.bytes;
    h->ready.store(1, std::memory_order_release);
    FutexWakeAll(&h->ready);
  }
  while (h->ready.load(std::memory_order_acquire) == 0) {
    GT_RETURN_IF_ERROR(watch.Check());
    FutexWait(&h->ready, 0, kNap);
  }
  if (h->magic != kArenaMagic || h->version != kArenaVersion || h->world != world ||
      h->local_ranks != ranks_.size() || h->nonce != nonce_ || h->bytes != layout_.bytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the shared-memory arena on this machine was laid out by another version of libgtrain (version ",
        h->version, ", mine ", kArenaVersion, "): start all ranks from the same build"));
  }
  return Survey(watch);
}

// Whether each rank can have a core of its own: decides how to wait.
absl::Status ShmGroup::Survey(const Watch& watch) {
  uint64_t* mine = line(local_).cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  (void)sched_getaffinity(0, sizeof(set), &set);  // no core known: taken for crowded
  for (size_t core = 0; core < 64 * std::size(RankLine{}.cores); ++core) {
    if (CPU_ISSET(core, &set)) mine[core / 64] |= uint64_t{1} << core % 64;
  }
  GT_RETURN_IF_ERROR(Phase(watch));
  int count = 0;
  for (size_t word = 0; word < std::size(RankLine{}.cores); ++word) {
    uint64_t cores = 0;
    for (int i = 0; i < size(); ++i) cores |= line(i).cores[word];
    count += std::popcount(cores);
  }
  const bool crowded = count < size();
  spins_ = crowded ? kSpinsCrowded : kSpins;
  yields_ = crowded ? kYieldsCrowded : 0;
  return absl::OkStatus();
}

ShmGroup::~ShmGroup() {
  if (fork_guard_.Forked()) return;
  if (arena_.data() != nullptr) {
    line(local_).left.store(1);
    WakeWaitersOf(local_);
  }
  arena_ = Mapping();
  own_.clear();
  of_peers_.clear();
  for (const uint64_t id : asked_) bootstrap_->FreeArena(id);
}

RankLine& ShmGroup::line(int local) const {
  return reinterpret_cast<RankLine*>(arena_.data() + layout_.lines)[local];
}

Post* ShmGroup::Posts(int local) const {
  return reinterpret_cast<Post*>(arena_.data() + layout_.posts) + 2 * local;
}

Post& ShmGroup::PostOf(int local) const { return Posts(local)[ticket_ % 2]; }

Inbox* ShmGroup::InboxOf(int local) const {
  return reinterpret_cast<Inbox*>(arena_.data() + layout_.inboxes) + local;
}

std::string ShmGroup::LeftWords(int local) const {
  return line(local).left.load() == 0 ? "" : absl::StrCat(names_[static_cast<size_t>(local)], kClosed);
}

char* ShmGroup::Slot(int local, uint64_t chunk) const {
  return arena_.data() + layout_.slots +
         (static_cast<size_t>(local) * kBuffers + chunk % kBuffers) * kSlotBytes;
}

char* ShmGroup::Result(uint64_t chunk) const {
  return arena_.data() + layout_.results + chunk % kBuffers * layout_.result_stride;
}

absl::Span<OpRecord> ShmGroup::Records() const {
  const size_t world = static_cast<size_t>(bootstrap_->world_size());
  OpRecord* records = reinterpret_cast<OpRecord*>(arena_.data() + layout_.records);
  return absl::MakeSpan(records + ticket_ % 2 * world, world);
}

absl::Status ShmGroup::Enter(const OpRecord& record, const void* payload, size_t bytes, const Watch& watch) {
  ++ticket_;
  entering_ = true;
  Post& mine = PostOf(local_);
  if (bytes == 0) {
    mine.record = record;
  } else {
    std::memcpy(static_cast<void*>(&mine.record), &record, kAgreedBytes);
    std::memcpy(mine.payload(), payload, bytes);
  }
  mine.ticket.store(ticket_, std::memory_order_release);
  return Meet(watch);
}

absl::Status ShmGroup::Phase(const Watch& watch) {
  ++phase_;
  entering_ = false;
  line(local_).phase.store(phase_, std::memory_order_release);
  return Meet(watch);
}

bool ShmGroup::Here(int local) const {
  return Reached(Word(local).load(std::memory_order_acquire), entering_ ? ticket_ : phase_);
}

absl::Status ShmGroup::Meet(const Watch& watch) {
  for (int i = local_ + 1; i < local_ + size(); ++i) {
    const int peer = i < size() ? i : i - size();
    int looks = 0;
    while (!Here(peer) && ++looks < kEagerSpins) {
    }
    if (looks == kEagerSpins) GT_RETURN_IF_ERROR(Await(peer, watch));
  }
  WakeWaiters();
  return absl::OkStatus();
}

// A full fence before, so that a peer which is about to sleep either is seen here or sees the word.
void ShmGroup::WakeWaiters() {
  FullFence();
  if (line(local_).waiters.load(std::memory_order_relaxed) > 0) FutexWakeAll(&Word(local_));
}

void ShmGroup::WakeWaitersOf(int local) {
  FutexWakeAll(&line(local).phase);
  FutexWakeAll(&Posts(local)[0].ticket);
  FutexWakeAll(&Posts(local)[1].ticket);
}

absl::Status ShmGroup::Await(int local, const Watch& watch) {
  // Peers asleep since before this rank came are woken before it loses time itself.
  WakeWaiters();
  for (int i = 0; i < spins_; ++i) {
    if (Here(local)) return absl::OkStatus();
    Pause();
  }
  for (int i = 0; i < yields_; ++i) {
    if (Here(local)) return absl::OkStatus();
    sched_yield();
  }
  RankLine& peer = line(local);
  for (;;) {
    const uint32_t kicks = kicks_.load();
    const uint32_t seen = Word(local).load(std::memory_order_acquire);
    if (Here(local)) return absl::OkStatus();
    if (absl::Status status = Interrupted(local, watch); !status.ok()) {
      // It may have entered and then left between our two looks.
      return Here(local) ? absl::OkStatus() : status;
    }
    peer.waiters.fetch_add(1);
    FutexWaitEither(&Word(local), seen, &kicks_, kicks, std::min(kNap, watch.Left()));
    peer.waiters.fetch_sub(1);
  }
}

absl::Status ShmGroup::Interrupted(int local, const Watch& watch) const {
  absl::Status status = watch.Check();
  if (absl::IsDeadlineExceeded(status)) {
    return absl::DeadlineExceededError(
        absl::StrCat("waited ", absl::FormatDuration(watch.timeout()), " for ", Missing()));
  }
  if (!status.ok()) return status;
  GT_RETURN_IF_ERROR(Failure());
  const std::string left = LeftWords(local);
  return left.empty() ? absl::OkStatus() : absl::UnavailableError(left);
}

std::string ShmGroup::Missing() const {
  std::vector<std::string> missing;
  for (int i = 0; i < size(); ++i) {
    if (!Here(i)) missing.push_back(names_[static_cast<size_t>(i)]);
  }
  return absl::StrJoin(missing, ", ");
}

absl::StatusOr<void*> ShmGroup::Allocate(size_t bytes, const Watch& watch) {
  const size_t whole = std::max<size_t>(4096, (bytes + 4095) / 4096 * 4096);
  const uint64_t rank = static_cast<uint64_t>(ranks_[static_cast<size_t>(local_)]);
  const uint64_t id = nonce_ + ((rank + 1) << kRankIdShift) + ++allocations_;
  GT_ASSIGN_OR_RETURN(Mapping memory, Map(id, whole + kMarkBytes, whole + kMarkBytes, watch));
  std::memcpy(memory.data() + whole, &id, sizeof(id));
  own_.push_back({id, whole, std::move(memory)});
  return static_cast<void*>(own_.back().memory.data());
}

void ShmGroup::Unmapped(uint64_t id) {
  std::erase(asked_, id);
  bootstrap_->FreeArena(id);
}

bool ShmGroup::Free(const void* memory) {
  const auto it = std::ranges::find_if(own_, [&](const Allocation& a) { return a.memory.data() == memory; });
  if (it == own_.end()) return false;
  const uint64_t id = it->id;
  own_.erase(it);
  Unmapped(id);
  line(local_).frees.fetch_add(1);
  return true;
}

void ShmGroup::Locate(const void* data, size_t bytes, OpRecord* record) const {
  const char* begin = static_cast<const char*>(data);
  for (const Allocation& a : own_) {
    if (begin < a.memory.data() || begin + bytes > a.memory.data() + a.bytes) continue;
    record->arena = a.id;
    record->arena_bytes = a.bytes;
    record->arena_offset = static_cast<uint64_t>(begin - a.memory.data());
  }
}

absl::StatusOr<char*> ShmGroup::Resolve(const OpRecord& record, size_t bytes, const Watch& watch) {
  if (record.arena_bytes < bytes || record.arena_offset > record.arena_bytes - bytes) {
    return absl::InternalError("a peer's record points outside its arena");
  }
  for (const Allocation& a : own_) {
    if (a.id == record.arena) return a.memory.data() + record.arena_offset;
  }
  // A peer that has freed memory may have freed the memory that is mapped here.
  for (auto other = of_peers_.begin(); other != of_peers_.end();) {
    if (other->second.frees == line(other->second.local).frees.load()) {
      ++other;
      continue;
    }
    const uint64_t id = other->first;
    other = of_peers_.erase(other);
    Unmapped(id);
  }
  auto it = of_peers_.find(record.arena);
  if (it == of_peers_.end()) {
    const auto owner = static_cast<int>(((record.arena - nonce_) >> kRankIdShift) - 1);
    const auto known = std::ranges::find(ranks_, owner);
    if (known == ranks_.end()) return absl::InternalError("a peer's record names memory of nobody here");
    const int local = static_cast<int>(known - ranks_.begin());
    const uint32_t frees = line(local).frees.load();
    GT_ASSIGN_OR_RETURN(Mapping memory, Map(record.arena, record.arena_bytes + kMarkBytes,
                                            record.arena_bytes + kMarkBytes, watch));
    if (std::memcmp(memory.data() + record.arena_bytes, &record.arena, sizeof(record.arena)) != 0) {
      return absl::UnavailableError(
          absl::StrCat(names_[static_cast<size_t>(local)], kClosed, ": its memory is gone"));
    }
    memory.KeepFromChildren();
    it = of_peers_.emplace(record.arena, OfPeer{local, frees, std::move(memory)}).first;
  }
  return it->second.memory.data() + record.arena_offset;
}

void ShmGroup::Fail(absl::string_view notice) {
  ArenaHeader* h = header();
  uint32_t nobody = kNobodyFailed;
  // Claimed first, told last: readers take the claim alone for nothing, so they never see half a text.
  if (h->failed.compare_exchange_strong(nobody, kFailureClaimed)) {
    std::memcpy(h->notice, notice.data(), std::min(notice.size(), sizeof(h->notice) - 1));
    h->failed.store(kFailureTold);
  }
  for (int i = 0; i < size(); ++i) WakeWaitersOf(i);  // whomever they wait for
}

absl::Status ShmGroup::Failure() const {
  const ArenaHeader* h = header();
  if (h->failed.load() != kFailureTold) return absl::OkStatus();
  return GaveUp(absl::string_view(h->notice, strnlen(h->notice, sizeof(h->notice))));
}

}  // namespace gtrain::comm
