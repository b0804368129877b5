// DataTransport of a communicator: a context on the fabric of its process.
#pragma once
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "comm/port/data_transport.h"
#include "comm/ucx/fabric.h"
#include "comm/ucx/link_probe.h"

namespace gtrain::comm {

// Among n members some forty bytes for each of them, and what is under way (comm/ucx/mailbox.h); no
// connection, no descriptor and no message of its own. Connections are begun by the first exchange with a
// member, and stay with the fabric. `report` is told, by the thread that waits in Exchange, of each peer to
// which nothing gets (comm/ucx/link_probe.h).
std::unique_ptr<DataTransport> OpenFabricTransport(std::shared_ptr<Fabric> fabric, ContextId id,
                                                   LinkWatch::Report report);

}  // namespace gtrain::comm
