// Shared memory of the ranks of a generation, one memfd an arena: made for the first rank that asks, and gone
// with its last user. The records of the generations hold the arenas.
//
// Owner thread only. Pages are touched in steps of 8 MiB, one a turn, so nothing waits for all of an arena.
#pragma once
#include <stdint.h>

#include <string>

#include "runtime/keeper/connections.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::keeper {

class Arenas {
 public:
  explicit Arenas(Context& context) : context_(context) {}

  // Answers the rank with the memory, or with the reason why not.
  void Ask(RankConnection& connection, const RankArenaRequest& request);
  // The rank has unmapped it.
  void Free(const RankConnection& connection, uint64_t id);
  // The rank has gone without a word.
  void FreeAllOf(const RankConnection& connection);
  // Touches the next pages that are not in memory yet.
  void Fault();
  // Pages are left to touch: the next turn comes at once.
  bool MoreToFault() const { return bytes_to_fault_ > 0; }

 private:
  Arena* Make(GenerationRecord& record, const RankArenaRequest& request, std::string* why);

  Context& context_;
  uint64_t bytes_to_fault_ = 0;
};

}  // namespace gtrain::keeper
