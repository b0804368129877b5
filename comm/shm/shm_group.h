// The ranks of one machine that share an arena: phases, buffers, records of the running
// collective, and memory that peers reach directly.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/fork_guard.h"
#include "comm/plan/op_record.h"
#include "comm/port/bootstrap.h"
#include "comm/port/watch.h"
#include "comm/shm/arena_layout.h"
#include "comm/shm/inbox.h"
#include "comm/shm/mapping.h"

namespace gtrain::comm {

// Not thread-safe. Every blocking call ends by its Watch, even if peers were killed at any point. For m ranks
// of this machine in a world of n it takes an arena of 2 MiB + 2.3 MiB for each of m (staged chunks) + 16 KiB
// for each of n above 128 (arena_layout.h has the rest), for each communicator, which is one mapping and no
// descriptor here, and a descriptor of the machine's keeper. The keeper allocates all of its pages, soon
// after it is asked for. Enter writes one line and reads m. Allocate adds the bytes asked for and a page, and
// Resolve a mapping for each peer's.
class ShmGroup {
 public:
  // `ranks`: world ranks on this machine, ascending, and what people call them; `local`: index of this one.
  // `nonce` makes the arenas of this communicator distinct from those of others of the generation. Waits for
  // the memory alone.
  static absl::StatusOr<std::unique_ptr<ShmGroup>> Open(Bootstrap* bootstrap, std::vector<int> ranks,
                                                        std::vector<std::string> names, int local,
                                                        uint64_t nonce, const Watch& watch);
  // Once, before anything else: returns when all ranks of the machine have called it.
  absl::Status Join(const Watch& watch);
  ~ShmGroup();

  int size() const { return static_cast<int>(ranks_.size()); }
  int local() const { return local_; }
  // The size is the same on all machines.
  size_t result_bytes() const { return layout_.result_bytes; }

  // Enters a collective: puts `record` down, with a payload of at most kInlineBytes, and returns once every
  // rank of the machine has entered it too. The records and payloads are readable until the next Enter of
  // this rank.
  absl::Status Enter(const OpRecord& record, const void* payload, size_t bytes, const Watch& watch);
  const OpRecord& Record(int local) const { return PostOf(local).record; }
  const char* Payload(int local) const { return PostOf(local).payload(); }

  // Returns once every rank of the machine has entered as many phases as this one. Everything written
  // before by anyone is then visible. Unavailable also if a peer gave up or left.
  absl::Status Phase(const Watch& watch);

  // Buffers of chunk number `chunk`.
  char* Slot(int local, uint64_t chunk) const;
  char* Result(uint64_t chunk) const;
  // World-sized table of the collective entered last, for leaders to fill: valid until the next but one.
  absl::Span<OpRecord> Records() const;

  // Zeroed memory that peers can map; lives as long as the group.
  absl::StatusOr<void*> Allocate(size_t bytes, const Watch& watch);
  // Whether `memory` was the begin of such. Peers unmap it with their next Resolve.
  bool Free(const void* memory);
  // Fills record->arena* if [data, data + bytes) lies in such memory of
  // this rank.
  void Locate(const void* data, size_t bytes, OpRecord* record) const;
  // Where `record` of a peer lies in this process; maps it the first time.
  absl::StatusOr<char*> Resolve(const OpRecord& record, size_t bytes, const Watch& watch);

  // Tells the peers that this rank gives up, so that they need not wait for their deadline.
  void Fail(absl::string_view notice);
  // OK, or GaveUp with the first notice that a peer left. Thread-safe, as are the two that follow.
  absl::Status Failure() const;
  // Why nothing will come of a rank that has closed its communicator; "" while it is there.
  std::string LeftWords(int local) const;
  // Where others put packets for this rank of the machine.
  Inbox* InboxOf(int local) const;
  // Whether the ranks of the machine outnumber its cores.
  bool crowded() const { return yields_ > 0; }
  // How often a wait looks before it sleeps.
  int spins() const { return spins_ + yields_; }

 private:
  ShmGroup(Bootstrap* bootstrap, std::vector<int> ranks, std::vector<std::string> names, int local,
           uint64_t nonce);
  // The whole file `id`, which is this group's until it is closed; `zeros` bytes at its start are 0.
  absl::StatusOr<Mapping> Map(uint64_t id, size_t bytes, size_t zeros, const Watch& watch);
  absl::Status Survey(const Watch& watch);
  void Unmapped(uint64_t id);
  ArenaHeader* header() const { return reinterpret_cast<ArenaHeader*>(arena_.data()); }
  RankLine& line(int local) const;
  Post* Posts(int local) const;
  Post& PostOf(int local) const;
  // The word that tells how far a rank is: in entries or in phases, whichever this rank is about to meet in.
  std::atomic<uint32_t>& Word(int local) const {
    return entering_ ? PostOf(local).ticket : line(local).phase;
  }
  bool Here(int local) const;
  absl::Status Meet(const Watch& watch);
  absl::Status Await(int local, const Watch& watch);
  void WakeWaiters();
  void WakeWaitersOf(int local);
  absl::Status Interrupted(int local, const Watch& watch) const;
  std::string Missing() const;

  Bootstrap* const bootstrap_;
  const std::vector<int> ranks_;
  const std::vector<std::string> names_;
  const int local_;
  const uint64_t nonce_;
  const ForkGuard fork_guard_;
  ArenaLayout layout_;
  int spins_ = 0, yields_ = 0;
  uint32_t phase_ = 0, ticket_ = 0;
  bool entering_ = false;
  Mapping arena_;
  uint64_t allocations_ = 0;
  struct Allocation {
    uint64_t id;
    size_t bytes;  // of it the caller's
    Mapping memory;
  };
  std::vector<Allocation> own_;
  struct OfPeer {
    int local;
    uint32_t frees;  // of its owner when it was mapped
    Mapping memory;
  };
  std::map<uint64_t, OfPeer> of_peers_;
  std::vector<uint64_t> asked_;      // files, to be freed
  std::atomic<uint32_t> kicks_ = 0;  // to look again; not shared with others
  Wakers::Handle waking_;
};

}  // namespace gtrain::comm
