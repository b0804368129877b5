// The files are described in Linux: Documentation/ABI/stable/sysfs-class-infiniband (ports/P/state,
// ports/P/gid_attrs/ndevs/N) and Documentation/ABI/testing/sysfs-class-net (device, dev_port).
#include "comm/ucx/network.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace gtrain::comm {
namespace {

namespace fs = std::filesystem;

// Sorted; empty if there is no such folder.
std::vector<std::string> NamesIn(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code none;
  for (fs::directory_iterator at(folder, none), end; !none && at != end; at.increment(none)) {
    names.push_back(at->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Empty where it cannot be read: the kernel refuses it for a GID that is not in use.
std::string LineOf(const fs::path& file) {
  std::string line;
  std::ifstream in(file);
  std::getline(in, line);
  return std::string(absl::StripAsciiWhitespace(line));
}

bool HasGidOf(const fs::path& port, const std::string& interface) {
  const fs::path ndevs = port / "gid_attrs" / "ndevs";
  for (const std::string& gid : NamesIn(ndevs)) {
    if (LineOf(ndevs / gid) == interface) return true;
  }
  return false;
}

// Ports of one device may have their interfaces on the same PCI function: dev_port, from 0, tells them apart.
bool IsParentOf(const fs::path& net, const std::string& device, const std::string& port) {
  std::error_code none;
  if (!fs::exists(net / "device" / "infiniband" / device, none)) return false;
  int of_interface = 0, of_device = 0;
  if (!absl::SimpleAtoi(LineOf(net / "dev_port"), &of_interface)) of_interface = 0;
  return absl::SimpleAtoi(port, &of_device) && of_device == of_interface + 1;
}

}  // namespace

std::vector<std::string> RdmaPortsOf(const std::string& interface, const std::string& sysfs) {
  std::vector<std::string> found;
  if (interface.empty()) return found;
  const fs::path net = fs::path(sysfs) / "class" / "net" / interface;
  const fs::path devices = fs::path(sysfs) / "class" / "infiniband";
  for (const std::string& device : NamesIn(devices)) {
    for (const std::string& port : NamesIn(devices / device / "ports")) {
      const fs::path at = devices / device / "ports" / port;
      if (!absl::StartsWith(LineOf(at / "state"), "4:")) continue;  // ACTIVE
      if (HasGidOf(at, interface) || IsParentOf(net, device, port))
        found.push_back(absl::StrCat(device, ":", port));
    }
  }
  return found;
}

absl::Status CheckTransportsWish(absl::string_view wish) {
  if (wish.empty()) return absl::OkStatus();
  for (absl::string_view name : absl::StrSplit(wish, ',')) {
    const bool good = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
      return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '_';
    });
    if (!good || (name == "auto" && wish != "auto")) {
      return absl::InvalidArgumentError(
          absl::StrCat("GTRAIN_COMM_TLS is '", absl::CHexEscape(wish),
                       "'; it must be auto, or names of UCX's transports with commas between, as rc,tcp"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Network> ChooseNetwork(const std::string& wish, const std::string& interface,
                                      const std::vector<std::string>& rdma_ports) {
  GT_RETURN_IF_ERROR(CheckTransportsWish(wish));
  Network chosen;
  chosen.every = !wish.empty() && wish != "auto";
  // UCX takes the best that both ends have, so a machine without RDMA is reached by TCP.
  chosen.transports = chosen.every ? wish : rdma_ports.empty() ? "tcp" : "rc,ud,dc,tcp";
  std::vector<std::string> devices = rdma_ports;
  devices.push_back(interface);
  chosen.devices = interface.empty() ? "all" : absl::StrJoin(devices, ",");
  return chosen;
}

}  // namespace gtrain::comm
