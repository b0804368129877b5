// A reducer whose automatic choice is made by something else than ChooseWays: for tests.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "comm/reducer/chooser.h"
#include "comm/reducer/reducer.h"

namespace gtrain::comm {

using Chooser =
    std::function<std::vector<size_t>(absl::Span<const BucketCost>, double computed, double latency)>;

absl::StatusOr<std::unique_ptr<Reducer>> CreateReducer(Communicator* communicator,
                                                       const std::vector<GradientSpec>& gradients,
                                                       const ReducerOptions& options, Chooser chooser);

}  // namespace gtrain::comm
