// The network of this machine: RDMA ports and interfaces, as they are now. Some small files of /sys a port.
#pragma once
#include <string>
#include <vector>

#include "runtime/core/values/messages.h"

namespace gtrain::detect {

core::Network DetectNetwork();

// Interfaces that are up, with the addresses by which other machines may reach them.
std::vector<core::InterfaceInfo> DetectInterfaces();

// The network of a machine whose /sys and /dev are in the folder `root`, for tests.
core::Network NetworkIn(const std::string& root, std::vector<core::InterfaceInfo> interfaces);

}  // namespace gtrain::detect
