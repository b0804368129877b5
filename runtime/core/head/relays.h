// Relays: which agents reach the head through which others. PURE. Private to runtime/core/head.
//
// From HeadConfig::relay_from agents on, each goes through one of its own rack where there is one, and
// through any other else; a relay has relay_children, in a cluster of tens of thousands more (400 relays),
// and goes directly itself, so that there is one hop. Both sides only hear of it: an agent that cannot get
// through goes on directly, and is asked again later. HeadState owns it; only the loop's thread uses it, and
// it never blocks. A plan costs a look at each node, at most once a second, and moves 2,000 of them.
//
// The tree is flat on purpose: a further hop would be one more machine whose death is a silence
// (docs/protocols/relays.md).
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class Relays {
 public:
  Relays(HeadContext& context, HeadModel& model) : context_(context), model_(model) {}

  void OnHello(Node& node, Instant now);
  void OnReady(Node& relay, const RelayReady& ready, Instant now);
  void Forget(const NodeId& node);
  void Plan(Instant now);
  std::optional<Instant> NextDeadline() const { return next_plan_; }

 private:
  struct Relay {
    std::set<NodeId> children;
    bool changed = false;  // since it was told
  };
  struct Child {
    NodeId relay;
    std::optional<Instant> told;  // to go through it
  };

  bool Patient() const;
  bool MayRelay(const Node& node) const;
  bool MayMove(const Node& node, Instant now) const;
  std::vector<NodeId> WhoMoves(Instant now);
  void GiveUpOnSlow(Instant now);
  void Assign(std::vector<NodeId> who, const std::vector<NodeId>& relays);
  void Found(const std::vector<NodeId>& who, size_t own_relay_from, std::vector<NodeId>* left);
  void Put(const NodeId& child, const NodeId& relay);
  void Unassign(const NodeId& child);
  void Send(Node& child, const Node& relay, Instant now);
  void Tell(Instant now);
  std::map<std::string, std::vector<NodeId>> WithRoom() const;
  size_t Most() const;  // children of a relay
  size_t Room(const NodeId& relay) const;
  void Soon(Instant when);

  HeadContext& context_;
  HeadModel& model_;
  std::map<NodeId, Relay> relays_;
  std::map<NodeId, Child> children_;
  std::optional<Instant> next_plan_;
};

}  // namespace gtrain::core
