// Which network UCX gets: the RDMA ports that belong to an interface, and what GTRAIN_COMM_TLS asks for. A
// few files of /sys for each communicator, independent of the number of ranks.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::comm {

// Ports of RDMA devices that are up and belong to a network interface, as UCX names them ("mlx5_0:1"); empty
// if there are none. RoCE: one of the port's GIDs is the interface's, which also finds VLANs and bonds.
// InfiniBand: the interface is the port's IPoIB one. `sysfs`: another folder than /sys, for tests.
std::vector<std::string> RdmaPortsOf(const std::string& interface, const std::string& sysfs = "/sys");

// The settings with which a UCX worker is opened.
struct Network {
  std::string transports;  // UCX's names: "tcp", "rc,ud,dc,tcp"
  std::string devices;     // UCX's names: "eth0", "mlx5_0:1,eth0"; "all" where no interface is known
  bool every = false;      // each of `transports` must be there; else those are used that are
};

// `wish`: what GTRAIN_COMM_TLS says; empty and "auto" leave it to what the interface has. InvalidArgument if
// it is no list of names.
absl::StatusOr<Network> ChooseNetwork(const std::string& wish, const std::string& interface,
                                      const std::vector<std::string>& rdma_ports);

// InvalidArgument with the variable and the value, unless it is empty, "auto" or names with commas between.
absl::Status CheckTransportsWish(absl::string_view wish);

}  // namespace gtrain::comm
