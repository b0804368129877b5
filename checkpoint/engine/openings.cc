#include "checkpoint/engine/openings.h"

#include <algorithm>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"

namespace gtrain::ckpt {
namespace {

struct Openings {
  struct Opening {
    bool open = false;
    uint64_t next_attempt = 1;
  };
  Mutex mu;
  std::map<std::string, Opening> by_place ABSL_GUARDED_BY(mu);
};
Openings& OpenHere() {
  static Openings* const here = new Openings;
  return *here;
}

}  // namespace

std::string PlaceOf(const std::string& location, const SaveId& id) {
  return absl::StrCat(location, " ", id.epoch, " ", id.timeline, " ", id.generation);
}

absl::StatusOr<uint64_t> TakePlace(const std::string& place, uint64_t attempt) {
  MutexLock lock(&OpenHere().mu);
  Openings::Opening& here = OpenHere().by_place[place];
  if (here.open) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this program saves in ", place.substr(0, place.find(' ')),
        " already. One Checkpointer saves in a directory: register all state with it, or give the "
        "other one a directory of its own ($GTRAIN_CHECKPOINT_URI, the job file's checkpoint.uri, "
        "is for all of them)"));
  }
  here.open = true;
  return std::max(attempt, here.next_attempt);
}

void LeavePlace(const std::string& place, uint64_t next_attempt) {
  MutexLock lock(&OpenHere().mu);
  OpenHere().by_place[place] = {.open = false, .next_attempt = next_attempt};
}

}  // namespace gtrain::ckpt
