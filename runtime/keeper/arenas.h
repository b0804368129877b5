// Shared memory of the ranks of a generation, one memfd an arena: made for the first rank that asks, and free
// with its last user, also when its generation is over. Memory that need not be all zeros is kept then, for
// the next that is asked for, at most four arenas, 256 MiB and what a generation of the job may have: the
// kernel clears pages at some 5 GB/s, which the ranks of a new generation would wait for, and takes as long
// to free them.
//
// Owner thread only. Pages are touched in steps of 8 MiB, one a turn, so nothing waits for all of an arena.
// The zeros of memory that is used again are written at once, at most 16 MiB. A communicator wants some 275
// KiB a rank of this machine and 112 bytes a rank of the job: with more than some 58 ranks here it gets new
// memory each time.
#pragma once
#include <stdint.h>

#include <list>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/unique_fd.h"
#include "runtime/keeper/connections.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::keeper {

class Arenas {
 public:
  explicit Arenas(Context& context);

  // Answers the rank with the memory, or with the reason why not.
  void Ask(RankConnection& connection, const RankUsedArenaRequest& request);
  // The rank has unmapped it.
  void Free(const RankConnection& connection, const RankArenaOf& arena);
  // The rank has gone without a word.
  void FreeAllOf(const RankConnection& connection);
  // None is asked for any more. Processes that go on still have theirs mapped and say when they have not.
  void EndGeneration(uint64_t generation);
  // Touches the next pages that are not in memory yet.
  void Fault();
  // Pages are left to touch: the next turn comes at once.
  bool MoreToFault() const { return bytes_to_fault_ > 0; }

 private:
  struct Arena {
    UniqueFd memfd;
    uint64_t bytes = 0;
    uint64_t faulted = 0;
    bool again = false;                          // others may have it once nobody has it mapped
    std::set<const RankConnection*> users = {};  // asked for it, and have neither freed it nor gone
  };
  using Number = std::pair<uint64_t, uint64_t>;  // generation and id

  Arena* Make(const GenerationRecord& record, const RankUsedArenaRequest& request, std::string* why);
  bool TakeUsed(const RankUsedArenaRequest& request, Arena* arena);
  void LimitUsed(uint64_t bytes_max);
  std::map<Number, Arena>::iterator Drop(std::map<Number, Arena>::iterator arena);

  Context& context_;
  const uint64_t arenas_max_;
  std::map<Number, Arena> arenas_;
  std::list<Arena> used_;   // which nobody has mapped, the newest first
  uint64_t bytes_max_ = 0;  // of a generation of this job, the newest one that asked
  uint64_t bytes_to_fault_ = 0;
};

}  // namespace gtrain::keeper
