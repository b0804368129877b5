// The one place of this folder that reads the environment.
#include <gtrain/checkpoint.h>

#include <cstdlib>

#include "checkpoint/engine/checkpointer.h"
#include "checkpoint/store/open_store.h"

namespace gtrain {

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Open(Session* session,
                                                                 const CheckpointOptions& options) {
  const auto environment = [](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    if (value == nullptr) return std::nullopt;
    return value;
  };
  return ckpt::OpenCheckpointer(session, options, environment, &ckpt::OpenStore);
}

}  // namespace gtrain
