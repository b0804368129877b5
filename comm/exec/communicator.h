// The one implementation of gtrain::Communicator: shared memory inside a machine, a DataTransport
// between machines. docs/design/comm.md tells how.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "comm/port/bootstrap.h"
#include "comm/port/communicator.h"
#include "comm/port/data_transport.h"

namespace gtrain::comm {

// Only called when there are several machines, once by every rank. `nonce` is the same on all ranks and
// differs between communicators.
using TransportFactory =
    std::function<absl::StatusOr<std::unique_ptr<DataTransport>>(const Bootstrap& bootstrap, uint64_t nonce)>;

struct ExecOptions {
  CommunicatorOptions user;
  TransportFactory transport;  // empty: UCX, loaded on demand
  // The value of GTRAIN_COMM_ALGO: how all-reduce goes between machines, and who speaks. Any value but "auto"
  // and "" applies to every call. All ranks must have the same, else none gets a communicator, with the same
  // error everywhere.
  std::string algorithm;
  // The value of GTRAIN_COMM_TLS: UCX's transports between machines (comm/ucx/network.h). All ranks must have
  // the same, as for `algorithm`.
  std::string network;
  std::shared_ptr<const Bootstrap> owner;           // kept until the communicator is destroyed; may be null
  std::function<void(uint64_t sequence)> on_start;  // a collective begins on this rank; must not block
  // Called when a collective that had to wait has ended, with the time since its first check for the others.
  // Must not block.
  std::function<void(absl::Duration)> on_waited;
};

// Collective: all ranks of the generation call it. `bootstrap` must outlive the communicator. For n ranks on
// N machines it makes two all-gathers through the head, of n settings and of n addresses, each n blobs to
// each of n ranks. Between machines a rank that speaks (the leader; unless GTRAIN_COMM_ALGO says `leader`, as
// many of each machine as the smallest has) connects with those at its place on the N - 1 others, and L being
// log2 N, rounded up, the leader sends
//   L messages of 64 KiB (N - 1 up to 16 machines) that try the links;
//   40 at most, of up to 256 KiB, round the ring of machines, which measure what a round costs, for each of w
//   ways to speak (one, or leader and rails: these send as many);
//   (N - 1) (w + 1) of a few numbers, to agree on that, in a round each up to 16 machines, N - 1 above; and
//   the barrier's: L, or N - 1 where up to 16 machines have several ranks.
// With `deterministic` nothing is measured, and nothing agreed on. Where all ranks know from an earlier
// communicator what their links cost, these are not tried either. A Split needs no head: an all-gather of 16
// bytes a rank in this communicator tells who its members are, and they meet in a barrier.
// comm/shm/shm_group.h says how much memory an arena takes, comm/ucx/fabric.h what a transport costs.
// Costs.OfACommunicatorAtScale counts all of it up to 256 ranks.
absl::StatusOr<std::unique_ptr<Communicator>> MakeCommunicator(Bootstrap* bootstrap,
                                                               ExecOptions options = {});

}  // namespace gtrain::comm
