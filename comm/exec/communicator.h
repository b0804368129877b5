// The one implementation of gtrain::Communicator: shared memory inside a machine, a DataTransport
// between machines. docs/design/comm.md tells how.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "comm/port/bootstrap.h"
#include "comm/port/data_transport.h"
#include "gtrain/communicator.h"

namespace gtrain::comm {

// Only called when there are several machines, once by every rank. `nonce` is the same on all ranks and
// differs between communicators.
using TransportFactory =
    std::function<absl::StatusOr<std::unique_ptr<DataTransport>>(const Bootstrap& bootstrap, uint64_t nonce)>;

struct ExecOptions {
  CommunicatorOptions user;
  TransportFactory transport;  // empty: UCX, loaded on demand
  // What GTRAIN_COMM_ALGO says: how all-reduce goes between machines, and who speaks. Not "auto" or "":
  // always so. All ranks must have the same, else none gets a communicator, with the same error everywhere.
  std::string algorithm;
  // What GTRAIN_COMM_TLS says: UCX's transports between machines (comm/ucx/fabric.h). As for `algorithm`.
  std::string network;
  std::function<void(uint64_t sequence)> on_start;  // a collective begins on this rank; must not block
  // A collective that had to wait has ended: how long it took from its first look for the others. Must not
  // block.
  std::function<void(absl::Duration)> on_waited;
};

// Collective: all ranks of the generation. `bootstrap` must outlive the communicator. Of n ranks on N
// machines: one all-gather of n addresses through the head, which is n blobs to each of n ranks; a try of the
// links to about log2(N) machines (N - 1 up to 16); some 45 rounds with two neighbours that measure what a
// round costs, for each way to speak; and behind each of these an all-gather of a few numbers among the
// machines (a round up to 16, N - 1 above). A Split needs no head: it gathers n addresses, too, and measures
// anew.
absl::StatusOr<std::unique_ptr<Communicator>> MakeCommunicator(Bootstrap* bootstrap,
                                                               ExecOptions options = {});

}  // namespace gtrain::comm
