// Machines and switches by name while a Topology is being made. PURE.
#pragma once
#include <string>

#include "absl/container/flat_hash_map.h"
#include "topology/topology.h"

namespace gtrain::topology {

class Builder {
 public:
  explicit Builder(Topology& out) : out_(out) {}

  // The index; made if there is none of that name.
  int Machine(const std::string& name, int shape = 0) {
    const auto [it, is_new] = machines_.emplace(name, static_cast<int>(out_.machines.size()));
    if (is_new) out_.machines.push_back({name, shape, {}, {}, ""});
    return it->second;
  }
  int Switch(const std::string& name, SwitchKind kind = SwitchKind::kFabric) {
    const auto [it, is_new] = switches_.emplace(name, static_cast<int>(out_.switches.size()));
    if (is_new) out_.switches.push_back({name, kind});
    return it->second;
  }
  bool HasSwitch(const std::string& name) const { return switches_.contains(name); }
  void LinkMachine(int machine, int to_switch, double gb_s = 0, double us = 0, int nic = -1) {
    out_.links.push_back({{false, machine, nic}, {true, to_switch, -1}, gb_s, us});
  }
  void LinkSwitch(int from_switch, int to_switch, double gb_s = 0, double us = 0) {
    out_.links.push_back({{true, from_switch, -1}, {true, to_switch, -1}, gb_s, us});
  }

 private:
  Topology& out_;
  absl::flat_hash_map<std::string, int> machines_, switches_;
};

}  // namespace gtrain::topology
