// One rank on each machine: schedules of comm/plan on the caller's memory, over the network alone.
//
// Among n ranks a comparison is log2 n rounds of 72 bytes, with which up to 16 KiB go along;
// comm/plan/schedule.h says what a collective sends. Scratch of at most 16 MiB, from the first call on that
// needs some.
#pragma once
#include <memory>

#include "comm/backends/between_machines.h"
#include "comm/plan/hierarchy.h"
#include "comm/port/collective_backend.h"

namespace gtrain::comm {

// `hierarchy` and `between` outlive it.
std::unique_ptr<CollectiveBackend> MakeFlatBackend(const Hierarchy* hierarchy, BetweenMachines* between);

}  // namespace gtrain::comm
