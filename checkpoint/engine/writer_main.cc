// gtrain-writer: writes the checkpoints of one rank, outside of its process. Started by the keeper, with the
// rank's environment and working directory, the shared memory as descriptor 3 and the channel as 4; people
// never run it.
#include <fcntl.h>

#include <cstdio>

#include "checkpoint/engine/outside.h"
#include "checkpoint/store/open_store.h"

int main(int argc, char**) {
  if (argc != 1 || fcntl(3, F_GETFD) < 0 || fcntl(4, F_GETFD) < 0) {
    std::fprintf(stderr, "gtrain-writer is started by gtrain-keeper\n");
    return 2;
  }
  namespace ckpt = gtrain::ckpt;
  const auto near = ckpt::ReadNear(&ckpt::ProcessEnvironment);
  return ckpt::RunWriter(gtrain::UniqueFd(3), gtrain::UniqueFd(4), &ckpt::OpenStore,
                         near.ok() ? *near : std::nullopt);
}
