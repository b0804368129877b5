#include "runtime/detect/network.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "topology/detect/sysfs.h"

namespace gtrain::detect {
namespace {

using topology::RdmaPort;

constexpr size_t kMost = 1024;  // of a sort: what a hello may hold (runtime/wire/message_fields.h)

// Empty: no other machine reaches it by that address, or it has no way to be written down.
std::string TextOf(const sockaddr* address) {
  const bool v6 = address->sa_family == AF_INET6;
  if (!v6 && address->sa_family != AF_INET) return "";
  if (v6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr)) return "";
  char text[NI_MAXHOST] = {};
  const socklen_t size = v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  if (getnameinfo(address, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text;
}

core::NicKind KindOf(const RdmaPort& port) {
  if (port.driver == "efa") return core::NicKind::kEfa;
  return port.link_layer == "InfiniBand" ? core::NicKind::kInfiniband : core::NicKind::kRoce;
}

// RoCE without an address of its own has no way to other networks, and a port without one is mostly one that
// nobody has set up.
std::string WhyUnusable(const RdmaPort& port, const std::vector<core::InterfaceInfo>& interfaces) {
  if (port.state != "ACTIVE") return absl::StrCat("its port is ", port.state.empty() ? "gone" : port.state);
  if (port.pci.path.empty()) return "it is no PCI device";
  if (port.verbs.empty()) return "it has no device in /dev/infiniband";
  if (!port.may_open) return absl::StrCat("its agent may not open ", port.verbs);
  if (KindOf(port) != core::NicKind::kRoce) return "";
  const bool has_address = std::ranges::any_of(interfaces, [&port](const core::InterfaceInfo& interface) {
    return std::ranges::find(port.interfaces, interface.name) != port.interfaces.end();
  });
  return has_address ? "" : "its interface has no address";
}

}  // namespace

std::vector<core::InterfaceInfo> DetectInterfaces() {
  std::vector<core::InterfaceInfo> found;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return found;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    const std::string address = TextOf(one->ifa_addr);
    if (address.empty()) continue;
    std::string name = one->ifa_name;
    name.resize(std::min(name.size(), name.find(':')));  // an address with a label: the interface is eth0
    auto at = std::ranges::find(found, name, &core::InterfaceInfo::name);
    if (at == found.end()) {
      if (found.size() >= kMost) continue;
      at = found.insert(at, {std::move(name), {}});
    }
    if (at->addresses.size() < kMost) at->addresses.push_back(address);
  }
  freeifaddrs(all);
  return found;
}

core::Network NetworkIn(const std::string& root, std::vector<core::InterfaceInfo> interfaces) {
  core::Network network;
  for (RdmaPort& port : topology::RdmaPorts(root)) {
    if (network.nics.size() >= kMost) break;
    core::NicInfo nic;
    nic.name = absl::StrCat(port.device, ":", port.port);
    nic.kind = KindOf(port);
    nic.unusable = WhyUnusable(port, interfaces);
    nic.mbit_s = static_cast<uint64_t>(std::llround(port.gb_s * 8000));
    nic.numa = std::max(-1, port.pci.numa);
    nic.pci_path = std::move(port.pci.path);
    nic.interfaces = std::move(port.interfaces);
    if (nic.interfaces.size() > kMost) nic.interfaces.resize(kMost);
    network.nics.push_back(std::move(nic));
  }
  network.interfaces = std::move(interfaces);
  return network;
}

core::Network DetectNetwork() { return NetworkIn("", DetectInterfaces()); }

}  // namespace gtrain::detect
