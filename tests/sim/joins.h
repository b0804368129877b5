// Nodes that come with a join token, many at once, as runtime/agent does it: each asks on a connection of its
// own, again every four seconds for half a minute, until it has an answer.
#pragma once
#include <memory>
#include <string>

#include "tests/sim/disk.h"
#include "tests/sim/network.h"

namespace gtrain::sim {

class Joins {
 public:
  Joins(Kernel& kernel, Network& network, Disk& disk) : kernel_(kernel), network_(network), disk_(disk) {}

  void Storm(int nodes, int tokens);
  int asking() const { return asking_; }  // now
  int joined() const { return joined_; }  // ever

 private:
  struct Node {
    int machine = 0;
    std::string key, token;
    int64_t patience_ends = 0;
    std::shared_ptr<Connection> connection;
  };
  void Turn(const std::shared_ptr<Node>& node);
  void Connect(const std::shared_ptr<Node>& node);
  void Joined(const std::shared_ptr<Node>& node, const core::AgentJoined& answer);
  void Leave(Node& node);

  Kernel& kernel_;
  Network& network_;
  Disk& disk_;
  int came_ = 0, asking_ = 0, joined_ = 0;
};

}  // namespace gtrain::sim
