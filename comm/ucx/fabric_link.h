// MessageLink of a communicator: a second context on the fabric of its process.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "comm/port/message_link.h"
#include "comm/ucx/fabric.h"
#include "comm/ucx/link_probe.h"

namespace gtrain::comm {

// News that the transport of the communicator has received. Used with the fabric's lock.
struct FabricNews {
  std::string gave_up;            // the first notice
  std::vector<std::string> left;  // by member: why it has ended well
};

struct FabricMembers {
  std::vector<std::string> addresses;
  int self = 0;
};

// Called with the lock of the fabric not held. InvalidArgument: an address is none.
absl::StatusOr<std::unique_ptr<MessageLink>> OpenFabricLink(std::shared_ptr<Fabric> fabric, ContextId id,
                                                            const FabricMembers& members,
                                                            std::shared_ptr<const FabricNews> news,
                                                            MessageLink::Listener* listener,
                                                            LinkWatch::Report report);

}  // namespace gtrain::comm
