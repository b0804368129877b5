#include "checkpoint/engine/mates.h"

#include <set>

#include "base/status_macros.h"
#include "checkpoint/engine/chunk_share.h"

namespace gtrain::ckpt {

absl::StatusOr<Mates> FindMates(Agreement* agree, const std::string& node) {
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> keys, agree->Gather(MachineKey(node)));
  Mates mates;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    if (keys[rank] == keys[static_cast<size_t>(agree->rank())]) mates.ranks.push_back(static_cast<int>(rank));
  }
  mates.any = std::set<int64_t>(keys.begin(), keys.end()).size() < keys.size();
  return mates;
}

}  // namespace gtrain::ckpt
