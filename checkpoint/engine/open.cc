// The one place of this folder that reads the environment.
#include <cstdlib>
#include <utility>

#include "checkpoint/engine/checkpoint.h"
#include "checkpoint/engine/checkpointer.h"
#include "checkpoint/store/open_store.h"

namespace gtrain {
namespace ckpt {

std::optional<std::string> ProcessEnvironment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

}  // namespace ckpt

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Open(Session* session,
                                                                 const CheckpointOptions& options) {
  return ckpt::OpenCheckpointer(session, options, &ckpt::ProcessEnvironment, &ckpt::OpenStore);
}

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Make(Session* session,
                                                                 std::unique_ptr<Communicator> comm,
                                                                 const CheckpointOptions& options) {
  return ckpt::MakeCheckpointer(session, std::move(comm), options, &ckpt::ProcessEnvironment,
                                &ckpt::OpenStore);
}

}  // namespace gtrain
