// What one node offers a job. PURE. Private to job/plan.
#pragma once
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "job/plan/place.h"

namespace gtrain::plan {

inline constexpr int kUnlimited = std::numeric_limits<int>::max();

struct Candidate {
  const NodeView* view = nullptr;
  std::vector<int> gpus;  // free and of a wanted type
  int gpus_per_rank = 0;
  int room = 0;
  int previous = 0;  // ranks it held before
  Waiting waiting;
  int given = 0;
};

// Whether a job file that says `name` means this node. What looks like an id is one: a machine could call
// itself as another one's id.
inline bool IsCalled(const NodeView& node, const std::string& name) {
  const bool is_id = name.size() == 16 && name.find_first_not_of("0123456789abcdef") == std::string::npos;
  return !name.empty() && (name == node.id.value || (name == node.hostname && !is_id));
}

// Whether and why the node takes ranks; `out` gets what it offers.
NodeVerdict RoomOn(const NodeView& node, const Demand& demand, Candidate& out);

// The slots of the ranks, by rank: local numbers in that order, and the CPUs that each is bound to.
// `candidate_of`: the index of each rank's node in `candidates`; `gpus` those of each rank.
void FillSlots(const std::vector<Candidate>& candidates, const std::vector<size_t>& candidate_of,
               const std::vector<std::vector<int>>& gpus, const Demand& demand, Placement& out);

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
