// DataTransport over UCX. UCX itself is in libgtrain_comm_ucx.so, which is loaded when the first such
// transport is opened: programs whose ranks share one machine never load it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/port/bootstrap.h"
#include "comm/port/data_transport.h"
#include "comm/ucx/link_probe.h"

namespace gtrain::comm {

// One UCX worker and one listening port a communicator, which are five descriptors, and some hundred bytes
// for each of n ranks; an endpoint, over TCP a connection and a descriptor, for each member of `at_once` and
// each other that this one has exchanged anything with. Communicators name the N - 1 at the same place of the
// other machines if the rank speaks for its own; only Send and Receive add others.
//
// Binds to the interface that has the address of this rank's Member, if one has, and to the RDMA ports that
// belong to it. `wish`: what GTRAIN_COMM_TLS says (comm/ucx/fabric.h). `report` is told, by the thread that
// waits in Exchange, of each peer to which nothing gets (comm/ucx/link_probe.h). `at_once`: the members to
// which Connect makes connections, if they do the same; others are connected by their first exchange.
absl::StatusOr<std::unique_ptr<DataTransport>> OpenUcxTransport(const Bootstrap& bootstrap, uint64_t nonce,
                                                                const std::string& wish,
                                                                LinkWatch::Report report,
                                                                std::vector<int> at_once);

// Name of the network interface with this IP address; empty if none has it.
std::string InterfaceOf(const std::string& address);

}  // namespace gtrain::comm
