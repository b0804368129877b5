#include "tests/sim/joins.h"

namespace gtrain::sim {
namespace {

constexpr int kFirstMachine = 300'000;  // numbers no other has
constexpr int64_t kAskEvery = 4 * kSec, kPatience = 30 * kSec;

}  // namespace

void Joins::Storm(int nodes, int tokens) {
  for (int i = 0; i < nodes; ++i) {
    auto node = std::make_shared<Node>();
    node->machine = kFirstMachine + came_;
    node->key = absl::StrCat("joiner-", came_);
    node->token = absl::StrCat("token-", i % tokens);
    node->patience_ends = kernel_.now() + kPatience;
    ++came_;
    ++asking_;
    kernel_.After(kernel_.Between(0, kSec), [this, node] { Turn(node); });
  }
}

void Joins::Turn(const std::shared_ptr<Node>& node) {
  if (node->key.empty()) return;  // it has its answer
  if (kernel_.now() >= node->patience_ends) {
    ++kernel_.counts["nodes gave up joining"];
    return Leave(*node);
  }
  if (node->connection == nullptr || !node->connection->near) Connect(node);
  if (node->connection != nullptr)
    (void)network_.Send(*node->connection, core::AgentJoin{node->key, absl::StrCat("host-", node->machine)});
  kernel_.After(kAskEvery, [this, node] { Turn(node); });
}

void Joins::Connect(const std::shared_ptr<Node>& node) {
  if (!network_.CanConnect(node->machine)) return;
  node->connection = network_.Connect(node->machine, {core::Role::kJoin, node->token});
  node->connection->deliver = [this, weak = std::weak_ptr<Node>(node)](core::Message message) {
    const std::shared_ptr<Node> self = weak.lock();
    const auto* answer = std::get_if<core::AgentJoined>(&message);
    if (self != nullptr && !self->key.empty() && answer != nullptr) Joined(self, *answer);
  };
}

// INV-3: a node that was told so is a member whatever happens to the head, and as the one that it is.
void Joins::Joined(const std::shared_ptr<Node>& node, const core::AgentJoined& answer) {
  if (answer.node != Disk::NodeOf(node->key))
    kernel_.Fail("INV-3", absl::StrCat(node->key, " was let in as ", answer.node.value, ", another node"));
  if (!disk_.members().contains(node->key))
    kernel_.Fail("INV-3", absl::StrCat(node->key, " was let in, and nothing of it is on disk"));
  ++joined_;
  ++kernel_.counts["nodes joined"];
  Leave(*node);
}

void Joins::Leave(Node& node) {
  node.key.clear();
  --asking_;
  if (node.connection != nullptr) network_.CloseNear(*node.connection, false);
  node.connection = nullptr;
}

}  // namespace gtrain::sim
