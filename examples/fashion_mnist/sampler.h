// Which sample is trained when, and by whom: a pure function of
// (seed, epoch, step, rank, world). Nothing here is state, so nothing has to be saved but the step.
#pragma once
#include <cstdint>
#include <vector>

namespace gtrain::examples {

struct Slice {
  int64_t begin = 0;  // positions in the epoch's order, half open
  int64_t end = 0;
};

// Samples of batch `step` (counted within the epoch) that `rank` of `world` trains. The batch is
// positions [step * batch, (step + 1) * batch); the last one of an epoch may be short. Over all
// ranks the slices cover the batch exactly once at any world size.
Slice RankSlice(int64_t samples, int64_t batch, int64_t step, int rank, int world);

// Even shares of [0, samples), for evaluation.
Slice Share(int64_t samples, int rank, int world);

int64_t StepsPerEpoch(int64_t samples, int64_t batch);

// A permutation of [0, samples), equal on every machine.
std::vector<int64_t> EpochOrder(int64_t samples, uint64_t seed, int64_t epoch);

}  // namespace gtrain::examples
