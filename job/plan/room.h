// What one node offers a job. PURE. Private to job/plan.
#pragma once
#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "job/plan/place.h"

namespace gtrain::plan {

inline constexpr int kUnlimited = std::numeric_limits<int>::max();

struct Candidate {
  const NodeView* view = nullptr;
  // Free and of a wanted type; one that ranks share so often as it takes one more, the fullest first.
  std::vector<int> gpus;
  int gpus_per_rank = 0;
  int room = 0;
  int previous = 0;  // ranks it held before
  Waiting waiting;
  int given = 0;
  bool may_have_rank0 = false;  // where.rank0 means it
};

// Whether a list of the job names this node: by its id, its hostname, or that without the domain. What looks
// like an id is one: a machine could call itself as another one's id.
bool IsAmong(const NodeView& node, const spec::HostNames& names);

// Finds the nodes that a single name means. It keeps pointers into `nodes`.
class NodesByName {
 public:
  explicit NodesByName(const std::vector<NodeView>& nodes);
  // Those with this id or hostname; else those of the only hostname that is called so without its domain.
  // Empty, with all such hostnames in `several` if there are more.
  std::vector<const NodeView*> Find(absl::string_view name,
                                    std::vector<std::string>* several = nullptr) const;

 private:
  std::map<absl::string_view, std::vector<const NodeView*>> by_name_, by_short_;
};

// Why none of the names means a node, and what would help.
struct NoSuchNode {
  std::string why, remedy;
};
NoSuchNode WhyNoSuchNode(const NodesByName& nodes, const spec::HostNames& names);

// Names for a sentence: as a hostlist, cut where it is long.
std::string PrintNames(const spec::HostNames& names);

// Those that one of the names means.
std::set<NodeId> NodesCalled(const std::vector<NodeView>& nodes, const spec::HostNames& names);

// Whether and why the node takes ranks; `out` gets what it offers.
NodeVerdict RoomOn(const NodeView& node, const Demand& demand, Candidate& out);

// The slots of the ranks, by rank: local numbers in that order, and the CPUs that each is bound to.
// `candidate_of`: the index of each rank's node in `candidates`; `gpus` those of each rank.
void FillSlots(const std::vector<Candidate>& candidates, const std::vector<size_t>& candidate_of,
               const std::vector<std::vector<int>>& gpus, const Demand& demand, Placement& out);

// Place(), where the job names the host of each rank.
Placement PlaceByRank(const std::vector<NodeView>& nodes, const Demand& demand);

// A warning for each node whose ranks share CPUs, where the job may.
void WarnOfSharing(const std::vector<Candidate>& candidates, const Demand& demand, Placement& out);

// The first eight of `nodes`, each as `said` says it, and how many more there are: a reason travels in every
// document of its job.
template <typename Node, typename Said>
std::string OfEach(const std::vector<Node>& nodes, const char* between, const Said& said) {
  constexpr size_t kNamed = 8;
  std::vector<std::string> parts;
  for (size_t i = 0; i < std::min(nodes.size(), kNamed); ++i) parts.push_back(said(nodes[i]));
  if (const size_t more = nodes.size() - parts.size(); more > 0)
    parts.push_back(absl::StrCat(more, more == 1 ? " more node" : " more nodes"));
  return absl::StrJoin(parts, between);
}

}  // namespace gtrain::plan
