#include "runtime/core/agent/rank_network.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace gtrain::core {
namespace {

using Env = std::map<std::string, std::string>;
using Rails = std::vector<const NicInfo*>;

constexpr char kNcclPorts[] = "NCCL_IB_HCA";
constexpr char kUcxDevices[] = "UCX_NET_DEVICES";
constexpr char kGlooInterface[] = "GLOO_SOCKET_IFNAME";

bool HasInterface(const NicInfo& nic, const std::string& name) {
  return std::ranges::find(nic.interfaces, name) != nic.interfaces.end();
}

// How many bridges and switches two devices have in common, from the root complex down.
int SharedWay(absl::string_view one, absl::string_view other) {
  const std::vector<absl::string_view> a = absl::StrSplit(one, '/'), b = absl::StrSplit(other, '/');
  int shared = 0;
  for (size_t i = 0; i < a.size() && i < b.size() && !a[i].empty() && a[i] == b[i]; ++i) ++shared;
  return shared;
}

// The larger, the nearer: 0 elsewhere or unknown, 1 the same NUMA node, 2 the same root complex, more by the
// switches that both are behind. Virtual machines show all devices on one root complex, and then their NUMA
// nodes tell them apart.
int Nearness(const GpuInfo& gpu, const NicInfo& nic) {
  const bool known = gpu.numa >= 0 && nic.numa >= 0;
  if (known && gpu.numa != nic.numa) return 0;
  const int shared = SharedWay(gpu.pci_path, nic.pci_path);
  return shared > 0 ? 1 + shared : known ? 1 : 0;
}

Rails Nearest(const Rails& rails, const auto& nearness) {
  int best = 0;
  for (const NicInfo* nic : rails) best = std::max(best, nearness(*nic));
  Rails nearest;
  std::ranges::copy_if(rails, std::back_inserter(nearest),
                       [&](const NicInfo* nic) { return nearness(*nic) == best; });
  return nearest;
}

// All rails where its CPUs are on several NUMA nodes, or nobody knows on which.
Rails NearestToCpus(const Inventory& inventory, const Rails& rails, const RankPlace& place) {
  std::set<int> nodes;
  for (const int cpu : place.cpus) {
    const auto index = static_cast<size_t>(cpu);
    nodes.insert(index < inventory.cpu_infos.size() ? inventory.cpu_infos[index].numa : -1);
  }
  const int node = nodes.size() == 1 ? *nodes.begin() : -1;
  return Nearest(rails, [node](const NicInfo& nic) { return node >= 0 && nic.numa == node ? 1 : 0; });
}

// The nearest rails to each GPU of the place; one entry, to the CPUs, where GPUs say nothing.
std::vector<Rails> WantedBy(const Inventory& inventory, const Rails& rails, const RankPlace& place) {
  std::vector<Rails> wanted;
  for (const int index : place.gpus) {
    if (index < 0 || static_cast<size_t>(index) >= inventory.gpus.size()) continue;
    const GpuInfo& gpu = inventory.gpus[static_cast<size_t>(index)];
    if (gpu.numa < 0 && gpu.pci_path.empty()) continue;
    wanted.push_back(Nearest(rails, [&gpu](const NicInfo& nic) { return Nearness(gpu, nic); }));
  }
  if (wanted.empty()) wanted.push_back(NearestToCpus(inventory, rails, place));
  return wanted;
}

// The part of `number` of `count` that share `rails`: one of them in turn, or several where there are more
// rails than sharers.
Rails PartOf(const Rails& rails, size_t number, size_t count) {
  if (count >= rails.size()) return {rails[number % rails.size()]};
  const auto begin = static_cast<std::ptrdiff_t>(number * rails.size() / count);
  const auto end = static_cast<std::ptrdiff_t>((number + 1) * rails.size() / count);
  return {rails.begin() + begin, rails.begin() + end};
}

std::string AddressOf(const GenerationGrant& grant, const NodeId& node) {
  const auto place = std::ranges::find(grant.nodes, node, &NodePlace::node);
  return place == grant.nodes.end() ? "" : place->address;
}

// In the order of their local ranks; those that wait are behind the others and take part, because they need
// NICs once they have a place.
std::vector<const RankPlace*> PlacesOn(const GenerationGrant& grant, const NodeId& node) {
  std::vector<const RankPlace*> places;
  for (const auto* list : {&grant.ranks, &grant.waiting}) {
    for (const RankPlace& place : *list) {
      if (place.node == node) places.push_back(&place);
    }
  }
  std::ranges::stable_sort(places, {}, &RankPlace::local_rank);
  return places;
}

// Exactly these: without the leading "=" NCCL takes names as prefixes, and mlx5_1 would be mlx5_10 as well.
// All ranks of a machine get the same, because NCCL builds its rings from what each of them sees and fails or
// hangs where that differs (NVIDIA/nccl#1478); it finds the nearest of these itself.
std::string ExactPorts(const Rails& rails) {
  return absl::StrCat("=", absl::StrJoin(rails, ",", [](std::string* out, const NicInfo* nic) {
                        absl::StrAppend(out, nic->name);
                      }));
}

// Without loopback, which reaches no other machine: DetectInterfaces leaves it out.
void ChooseInterface(const Network& network, const std::string& address, Env& chosen) {
  const std::string interface = InterfaceOf(network, address);
  if (interface.empty()) return;
  chosen["NCCL_SOCKET_IFNAME"] = absl::StrCat("=", interface);  // exactly this one
  chosen[kGlooInterface] = interface;
  chosen["TP_SOCKET_IFNAME"] = interface;
}

void ChooseRails(const Inventory& inventory, const Rails& rails, const GenerationGrant& grant, int rank,
                 Env& chosen) {
  if (rails.empty()) return;
  chosen[kNcclPorts] = ExactPorts(rails);
  const RankPlace& own = PlaceOfRank(grant, rank);
  const std::vector<const RankPlace*> places = PlacesOn(grant, own.node);
  const auto at = std::ranges::find(places, &own);
  const auto nics = NicsOfRanks(inventory, rails, places);
  chosen[kUcxDevices] = absl::StrJoin(nics[static_cast<size_t>(at - places.begin())], ",");
}

}  // namespace

std::vector<const NicInfo*> RailsOf(const Inventory& inventory, const Network& network,
                                    const std::string& address) {
  const auto is = [](NicKind kind) { return [kind](const NicInfo& nic) { return nic.kind == kind; }; };
  if (std::ranges::any_of(network.nics, is(NicKind::kEfa))) return {};
  Rails rails;
  for (const NicInfo& nic : network.nics) {
    if (nic.unusable.empty()) rails.push_back(&nic);
  }
  // Ethernet beside InfiniBand is another network: storage, or the machine's own.
  const bool infiniband =
      std::ranges::any_of(rails, is(NicKind::kInfiniband), [](const NicInfo* nic) { return *nic; });
  std::erase_if(rails, [&](const NicInfo* nic) { return infiniband && nic->kind != NicKind::kInfiniband; });
  uint64_t fastest = 0;
  for (const NicInfo* nic : rails) fastest = std::max(fastest, nic->mbit_s);
  std::erase_if(rails, [fastest](const NicInfo* nic) { return nic->mbit_s < fastest; });
  // A machine without GPUs has no rails of its own: other RoCE ports than that of the data plane may lead
  // anywhere. gtrain's own collectives are there as well (comm/ucx/network.h).
  if (infiniband || !inventory.gpus.empty()) return rails;
  const std::string interface = InterfaceOf(network, address);
  const auto elsewhere = [&interface](const NicInfo* nic) { return !HasInterface(*nic, interface); };
  if (!std::ranges::all_of(rails, elsewhere)) std::erase_if(rails, elsewhere);
  return rails;
}

std::vector<std::vector<std::string>> NicsOfRanks(const Inventory& inventory,
                                                  const std::vector<const NicInfo*>& rails,
                                                  const std::vector<const RankPlace*>& places) {
  std::vector<std::vector<std::string>> nics(places.size());
  if (rails.empty()) return nics;
  std::map<Rails, std::vector<size_t>> sharers;  // for each of a rank's GPUs the rank, by what is nearest
  for (size_t i = 0; i < places.size(); ++i) {
    for (Rails& wanted : WantedBy(inventory, rails, *places[i])) sharers[std::move(wanted)].push_back(i);
  }
  for (const auto& [shared, ranks] : sharers) {
    for (size_t number = 0; number < ranks.size(); ++number) {
      std::vector<std::string>& own = nics[ranks[number]];
      for (const NicInfo* nic : PartOf(shared, number, ranks.size())) {
        if (std::ranges::find(own, nic->name) == own.end()) own.push_back(nic->name);
      }
    }
  }
  return nics;
}

std::string InterfaceOf(const Network& network, const std::string& address) {
  std::string found;
  for (const InterfaceInfo& interface : network.interfaces) {
    if (std::ranges::find(interface.addresses, address) == interface.addresses.end()) continue;
    if (!found.empty()) return "";
    found = interface.name;
  }
  return found;
}

void AddNetwork(const Inventory& inventory, const Network& network, const GenerationGrant& grant, int rank,
                const std::map<std::string, std::string>& own_env, std::map<std::string, std::string>* env) {
  const std::string address = AddressOf(grant, PlaceOfRank(grant, rank).node);
  Env chosen;
  for (const char* name :
       {kNcclPorts, kUcxDevices, "NCCL_SOCKET_IFNAME", kGlooInterface, "TP_SOCKET_IFNAME"}) {
    if (const auto own = own_env.find(name); own != own_env.end()) chosen.insert(*own);
  }
  Env ours;
  ChooseInterface(network, address, ours);
  ChooseRails(inventory, RailsOf(inventory, network, address), grant, rank, ours);
  // Who names transports, as UCX_TLS=tcp, may have named some that no RDMA port has.
  if (env->contains("UCX_TLS")) ours.erase(kUcxDevices);
  chosen.merge(ours);
  env->merge(chosen);
}

std::string NicsOf(const std::map<std::string, std::string>& env) {
  for (const char* name : {kUcxDevices, kGlooInterface}) {
    if (const auto it = env.find(name); it != env.end()) return it->second;
  }
  return "";
}

}  // namespace gtrain::core
