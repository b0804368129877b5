// The rank-seconds of a job by what they went into, as they are stored. PURE.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "base/ids.h"

namespace gtrain::core {

// The order is that of the stored list: a new label comes last.
enum class TimeLabel {
  kStep,             // steps that the job had not reported before
  kRecomputed,       // steps that an earlier generation had reported
  kCheckpointStall,  // training waited for a checkpoint
  kIdle,             // a rank waited for others in a collective
  kLost,             // behind the last report of a generation that ended
  kReforming,        // from the end of a generation to the next; of who goes on in it, to its first step
  kStarting,         // a process had been asked for, and its generation had not made a step
  kUnreported,       // ranks ran, and the program reports no steps
  kWaiting,          // no room for the rank
  kStorage,          // the job waited for the storage of its checkpoints
  kEnding,           // the rank had ended while others ran, or the job was being stopped
};
inline constexpr size_t kTimeLabels = 11;

const char* Name(TimeLabel label);  // as in documents: "checkpoint_stall"

struct GoodputRecord {
  // By the head's clock on the wall: rank-seconds are counted from then, and to then. Past: none are, since
  // an older head wrote the record.
  absl::Time since = absl::InfinitePast(), at = absl::InfinitePast();
  std::array<double, kTimeLabels> seconds{};
  double open = 0;       // of ranks that run, since the last report of a step; below zero: counted too much
  bool over = false;     // the generation of `open` has ended before its time
  Generation stepped;    // the newest that reported a step; 0: none
  bool repeats = false;  // the program counts its steps anew, so that their numbers do not tell them apart
  bool idle_said = false, stall_said = false;  // some rank measures it
  std::optional<int64_t> first, top, at_step;  // step: the first reported, the highest, the newest
  std::optional<int64_t> redone_to;            // the highest that earlier generations had reported
  int64_t redone = 0;                          // steps
  int losses = 0;                              // generations that a fault ended
  int wanted = 0;                              // ranks that the job asks for
  bool operator==(const GoodputRecord&) const = default;
};

}  // namespace gtrain::core
