// What the parts of one rank's checkpointer share: whose it is, what it was told, and how ranks agree.
#pragma once
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/engine/agreement.h"
#include "checkpoint/engine/mates.h"
#include "checkpoint/engine/near.h"
#include "checkpoint/engine/settings.h"
#include "comm/port/communicator.h"
#include "runtime/port/session.h"

namespace gtrain::ckpt {

// Belongs to the training thread; Alive may be called on any. The session and the communicator, which is null
// with one rank, must outlive it.
struct CheckpointContext {
  CheckpointContext(Session* of, Settings merged, Communicator* comm)
      : session(of),
        generation(of->generation()),
        timeline(of->timeline()),
        settings(std::move(merged)),
        agree(comm) {
    settings.identity.job = of->job();
  }
  CheckpointContext(const CheckpointContext&) = delete;
  CheckpointContext& operator=(const CheckpointContext&) = delete;

  // Of the generation in which this was made: its process may be a rank of a later one by now.
  absl::Status Alive() const {
    const absl::Status now = session->Alive();  // before the generation: another may be joined meanwhile
    if (session->generation() == generation) return now;
    return absl::UnavailableError(absl::StrCat("generation ", generation, " is over"));
  }

  Session* const session;
  const uint64_t generation, timeline;
  Settings settings;
  Agreement agree;
  NearTiers near;  // that hold copies; none before the directory is open
  Mates mates;     // none before the registration is frozen
  const std::function<absl::Status()> alive = [this] { return Alive(); };
};

}  // namespace gtrain::ckpt
