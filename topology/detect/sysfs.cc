#include "topology/detect/sysfs.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/file.h"

namespace gtrain::topology {
namespace {

namespace fs = std::filesystem;

// Sorted; empty if there is no such folder.
std::vector<std::string> NamesIn(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code none;
  for (fs::directory_iterator at(folder, none), end; !none && at != end; at.increment(none))
    names.push_back(at->path().filename().string());
  std::ranges::sort(names);
  return names;
}

// Empty where it cannot be read: the kernel refuses some for a port that is down.
std::string LineOf(const fs::path& file) {
  const auto text = ReadFile(file.string(), 256);
  return text.ok() ? std::string(absl::StripAsciiWhitespace(*text)) : "";
}

// The first word as a number: "400 Gb/sec (4X NDR)".
double NumberOf(const fs::path& file) {
  const std::string line = LineOf(file);
  double number = 0;
  return absl::SimpleAtod(line.substr(0, line.find(' ')), &number) ? number : 0;
}

PciDevice PciOf(const fs::path& device) {
  PciDevice pci;
  std::error_code error;
  const std::string real = fs::canonical(device, error).string();
  if (error) return pci;
  // What comes before is the bus of a hypervisor or a platform, or the folder of a test.
  std::vector<absl::string_view> way;
  for (const absl::string_view part : absl::StrSplit(real, '/')) {
    if (way.empty() && (!absl::StartsWith(part, "pci") || !absl::StrContains(part, ':'))) continue;
    way.push_back(part);
  }
  pci.path = absl::StrJoin(way, "/");
  if (!absl::SimpleAtoi(LineOf(device / "numa_node"), &pci.numa)) pci.numa = -1;
  return pci;
}

// Ports of one device may have their interfaces on the same PCI function: dev_port, from 0, tells them apart.
bool IsOfPort(const fs::path& net, int port) {
  int of_interface = 0;
  if (!absl::SimpleAtoi(LineOf(net / "dev_port"), &of_interface)) of_interface = 0;
  return port == of_interface + 1;
}

std::vector<std::string> InterfacesOf(const fs::path& device, int port) {
  std::vector<std::string> names;
  const auto add = [&names](const std::string& name) {
    if (!name.empty() && std::ranges::find(names, name) == names.end()) names.push_back(name);
  };
  const fs::path nets = device / "device" / "net";
  for (const std::string& name : NamesIn(nets)) {
    if (IsOfPort(nets / name, port)) add(name);
  }
  const fs::path gids = device / "ports" / absl::StrCat(port) / "gid_attrs" / "ndevs";
  for (const std::string& gid : NamesIn(gids)) add(LineOf(gids / gid));
  return names;
}

// /dev/infiniband/uverbsN of the device; empty: the module of the kernel that makes it is not loaded.
std::string VerbsOf(const std::string& root, const std::string& device) {
  const fs::path all = absl::StrCat(root, "/sys/class/infiniband_verbs");
  for (const std::string& name : NamesIn(all)) {
    if (LineOf(all / name / "ibdev") == device) return absl::StrCat("/dev/infiniband/", name);
  }
  return "";
}

RdmaPort PortOf(const std::string& root, const std::string& device, int port) {
  const fs::path at = absl::StrCat(root, "/sys/class/infiniband/", device);
  const fs::path files = at / "ports" / absl::StrCat(port);
  RdmaPort found;
  found.device = device;
  found.port = port;
  std::error_code error;
  found.driver = fs::read_symlink(at / "device" / "driver", error).filename().string();
  found.link_layer = LineOf(files / "link_layer");
  const std::string state = LineOf(files / "state");  // "4: ACTIVE"
  found.state = std::string(absl::StripAsciiWhitespace(state.substr(state.find(':') + 1)));
  if (found.state == "ACTIVE") found.gb_s = NumberOf(files / "rate") / 8;
  found.verbs = VerbsOf(root, device);
  found.may_open = !found.verbs.empty() && access(absl::StrCat(root, found.verbs).c_str(), R_OK | W_OK) == 0;
  found.interfaces = InterfacesOf(at, port);
  found.pci = PciOf(at / "device");
  return found;
}

}  // namespace

std::vector<RdmaPort> RdmaPorts(const std::string& root) {
  std::vector<RdmaPort> ports;
  const fs::path devices = absl::StrCat(root, "/sys/class/infiniband");
  for (const std::string& device : NamesIn(devices)) {
    for (const std::string& name : NamesIn(devices / device / "ports")) {
      int port = 0;
      if (absl::SimpleAtoi(name, &port) && port > 0) ports.push_back(PortOf(root, device, port));
    }
  }
  std::ranges::sort(ports, {},
                    [](const RdmaPort& port) { return std::tie(port.pci.path, port.device, port.port); });
  return ports;
}

double InterfaceGbS(const std::string& interface, const std::string& root) {
  return std::max(0.0, NumberOf(absl::StrCat(root, "/sys/class/net/", interface, "/speed")) / 8000);
}

PciDevice PciDeviceAt(const std::string& address, const std::string& root) {
  return PciOf(absl::StrCat(root, "/sys/bus/pci/devices/", address));
}

}  // namespace gtrain::topology
