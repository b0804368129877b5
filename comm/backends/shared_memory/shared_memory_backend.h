// All ranks on one machine: data moves through the arena of the machine (comm/shm/shm_group.h).
//
// Small data lies beside the record of a rank, and the others only have to read it. If all ranks pass memory
// of Allocate() they work straight out of and into each other's memory. All else is staged in chunks
// (comm/backends/pipeline.h). Among m ranks a comparison is one meeting and m reads, a direct collective one
// meeting more, c chunks c + 2 at most.
#pragma once
#include <memory>

#include "comm/plan/hierarchy.h"
#include "comm/port/collective_backend.h"
#include "comm/shm/shm_group.h"

namespace gtrain::comm {

// `hierarchy` and `shm` outlive it.
std::unique_ptr<CollectiveBackend> MakeSharedMemoryBackend(const Hierarchy* hierarchy, ShmGroup* shm);

}  // namespace gtrain::comm
