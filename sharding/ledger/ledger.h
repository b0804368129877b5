// The sample ledger: the samples of each batch, and each rank's share of them.
//
// Both follow from numbers alone: the order of an epoch from (seed, epoch), the batch from where the last one
// ended, a rank's share from its number and the number of ranks. So ranks agree without a message, a rank
// that takes over a share knows its samples, and each sample of an epoch is trained exactly once at any
// sequence of numbers of ranks and of batch sizes. The state to keep is a cursor of three numbers.
//
// Nothing here costs memory or time with the number of samples, epochs or ranks.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sharding/ledger/shuffle.h"

namespace gtrain::sharding {

inline constexpr int64_t kSamplesMax = int64_t{1} << 48;
inline constexpr int64_t kEpochsMax = int64_t{1} << 31;
inline constexpr int64_t kStepsMax = int64_t{1} << 60;

// The data and how it is consumed. A program may begin again with other `epochs` and `global_batch`; the rest
// is the identity of the ledger.
struct SampleOptions {
  int64_t samples = 0;
  int64_t epochs = 1;
  int64_t global_batch = 0;  // samples a batch, of all ranks together
  uint64_t seed = 0;
  bool shuffle = true;
  bool drop_last = false;  // of each epoch the batch that would be short; else it is trained as it is
  bool operator==(const SampleOptions&) const = default;
};

// InvalidArgument says which number is out of bounds, and its bounds.
absl::Status CheckSampleOptions(const SampleOptions& options);
// InvalidArgument: `now` cannot go on where `before` stopped, and which number is another.
absl::Status CheckSameData(const SampleOptions& before, const SampleOptions& now);

// Where training is: `step` batches are trained, and of `epoch` the first `offset` positions of its order.
// Epochs count from 0; epoch == SampleOptions::epochs: all are trained.
struct SampleCursor {
  int64_t step = 0;
  int64_t epoch = 0;
  int64_t offset = 0;
  bool operator==(const SampleCursor&) const = default;
};

// DataLoss: it was read from somewhere, and no program with such options can have written it.
absl::Status CheckCursor(const SampleOptions& options, const SampleCursor& cursor);

// Options and cursor as numbers, as checkpoints hold them: version 1 is {version, step, epoch, offset,
// samples, epochs, global_batch, seed, shuffle, drop_last}; only zeros: nothing.
using SampleBlock = std::array<int64_t, 10>;
SampleBlock PackCursor(const SampleOptions& options, const SampleCursor& cursor);
// InvalidArgument: of other data. DataLoss: nowhere in it. FailedPrecondition: a newer gtrain packed it.
absl::StatusOr<SampleCursor> UnpackCursor(const SampleOptions& options, const SampleBlock& block);

// Positions [begin, end) of the order of `epoch`; empty after the last epoch.
struct SampleRange {
  int64_t epoch = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const SampleRange&) const = default;
};

// Where the next batch begins: `cursor`, or the beginning of the next epoch where this one has no more
// batches.
SampleCursor NextBatch(const SampleOptions& options, SampleCursor cursor);
SampleRange BatchAt(const SampleOptions& options, const SampleCursor& cursor);
// `batches` later, or the end. The work does not depend on `batches`.
SampleCursor Advance(const SampleOptions& options, SampleCursor cursor, int64_t batches = 1);
bool AtEnd(const SampleOptions& options, const SampleCursor& cursor);

// The share of `rank` of `ranks`: consecutive positions; the first size() % ranks ranks have one more than
// the others. Empty where there are more ranks than samples.
SampleRange ShareOf(const SampleRange& batch, int rank, int ranks);

// The samples that stand at the positions of one epoch, or of a range of them.
int64_t SampleAt(const SampleOptions& options, int64_t epoch, int64_t position);
std::vector<int64_t> SamplesOf(const SampleOptions& options, const SampleRange& range);

}  // namespace gtrain::sharding
