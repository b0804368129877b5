// Several machines, of which some have several ranks: ranks of a machine meet in its arena, and machines
// through their leaders or rails (comm/backends/between_machines.h).
//
// Data moves in chunks through a pipeline in which copies, sums and the network of different chunks overlap
// (comm/backends/pipeline.h); memory of Allocate() is not copied in. Among n ranks on N machines, m on each,
// a comparison is two meetings on a machine and among the leaders one round of N - 1 messages of 56 m bytes,
// or above 16 machines log2 N rounds of 72 bytes; comm/plan/schedule.h, with N for n, says what one chunk of
// a collective sends between machines. A reduce-scatter or all-to-all speaks with all N - 1 machines. An
// all-to-all receives (n - m) m blocks a chunk. Memory: the arena, and scratch of a chunk's reductions.
#pragma once
#include <memory>

#include "comm/backends/between_machines.h"
#include "comm/plan/hierarchy.h"
#include "comm/port/collective_backend.h"
#include "comm/shm/shm_group.h"

namespace gtrain::comm {

// All three outlive it.
std::unique_ptr<CollectiveBackend> MakeHierarchicalBackend(const Hierarchy* hierarchy, ShmGroup* shm,
                                                           BetweenMachines* between);

}  // namespace gtrain::comm
