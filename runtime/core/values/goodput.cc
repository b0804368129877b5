#include "runtime/core/values/goodput.h"

namespace gtrain::core {

const char* Name(TimeLabel label) {
  switch (label) {
    case TimeLabel::kStep:
      return "step";
    case TimeLabel::kRecomputed:
      return "recomputed";
    case TimeLabel::kCheckpointStall:
      return "checkpoint_stall";
    case TimeLabel::kIdle:
      return "idle";
    case TimeLabel::kLost:
      return "lost";
    case TimeLabel::kReforming:
      return "reforming";
    case TimeLabel::kStarting:
      return "starting";
    case TimeLabel::kUnreported:
      return "unreported";
    case TimeLabel::kWaiting:
      return "waiting_for_capacity";
    case TimeLabel::kStorage:
      return "waiting_for_storage";
    case TimeLabel::kEnding:
      return "ending";
  }
  return "unknown";
}

}  // namespace gtrain::core
