// gtrain::Checkpointer over a blob store. Open() of the public header makes one from the environment; tests
// make one over any store and environment.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/engine/checkpoint.h"
#include "checkpoint/engine/settings.h"
#include "checkpoint/port/blob_store.h"
#include "runtime/port/session.h"

namespace gtrain::ckpt {

using StoreFactory = std::function<absl::StatusOr<std::unique_ptr<port::BlobStore>>(const std::string& path)>;

// Checkpointer::Make.
absl::StatusOr<std::unique_ptr<Checkpointer>> MakeCheckpointer(Session* session,
                                                               std::unique_ptr<Communicator> comm,
                                                               const CheckpointOptions& options,
                                                               const Environment& environment,
                                                               const StoreFactory& open_store);
// Collective over the session's ranks, as Checkpointer::Open.
absl::StatusOr<std::unique_ptr<Checkpointer>> OpenCheckpointer(Session* session,
                                                               const CheckpointOptions& options,
                                                               const Environment& environment,
                                                               const StoreFactory& open_store);

}  // namespace gtrain::ckpt
