// Placement where the job names the host of each rank (`where.ranks`, a rankfile). Nothing is chosen but the
// GPUs of ranks whose place is not named: a rank has its host, or the job waits.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "job/plan/room.h"

namespace gtrain::plan {
namespace {

constexpr char kElse[] = ", or another where.ranks";

class RankPlacer {
 public:
  RankPlacer(const std::vector<NodeView>& nodes, const Demand& demand) : demand_(demand), by_name_(nodes) {
    std::vector<const NodeView*> by_id;
    for (const NodeView& node : nodes) by_id.push_back(&node);
    std::ranges::sort(by_id, {}, [](const NodeView* node) { return node->id; });
    candidates_.resize(by_id.size());
    std::map<NodeId, size_t> index;
    for (size_t i = 0; i < by_id.size(); ++i) {
      out_.verdicts.push_back(RoomOn(*by_id[i], demand, candidates_[i]));
      index[by_id[i]->id] = i;
      left_.emplace_back(candidates_[i].gpus.begin(), candidates_[i].gpus.end());
    }
    for (const std::string& name : demand.host_names) {
      std::vector<size_t>& there = of_host_.emplace_back();
      for (const NodeView* node : by_name_.Find(name)) there.push_back(index[node->id]);
      std::ranges::sort(there);
    }
  }

  Placement Place() {
    GiveNodes();
    if (wrong_.empty()) GiveGpus();
    for (NodeVerdict& verdict : out_.verdicts) verdict.room = std::min(verdict.room, demand_.max);
    if (!wrong_.empty()) {
      Refuse();
      return std::move(out_);
    }
    FillSlots(candidates_, node_of_, gpus_, demand_, out_);
    WarnOfSharing(candidates_, demand_, out_);
    out_.placed = true;
    std::vector<const Candidate*> given;
    for (const Candidate& c : candidates_) {
      if (c.given > 0) given.push_back(&c);
    }
    out_.reason = absl::StrCat(node_of_.size(), node_of_.size() == 1 ? " rank" : " ranks",
                               " by where.ranks: ", OfEach(given, ", ", [](const Candidate* c) {
                                 return absl::StrCat(c->given, " on ", c->view->hostname);
                               }));
    return std::move(out_);
  }

 private:
  // The node that had the rank before, if it is meant, else the first that still has room.
  void GiveNodes() {
    for (size_t rank = 0; rank < demand_.rank_hosts.size(); ++rank) {
      const int host = demand_.rank_hosts[rank].host;
      const std::vector<size_t>& there = of_host_[host];
      const auto has_room = [&](size_t i) { return candidates_[i].given < candidates_[i].room; };
      auto it = std::ranges::find_if(there, [&](size_t i) {
        return has_room(i) && rank < demand_.previous.size() &&
               candidates_[i].view->id == demand_.previous[rank];
      });
      if (it == there.end()) it = std::ranges::find_if(there, has_room);
      if (it == there.end()) {
        wrong_.emplace(host, "");
        continue;
      }
      ++candidates_[*it].given;
      node_of_.push_back(*it);
    }
  }

  void GiveGpus() {
    gpus_.resize(node_of_.size());
    for (size_t rank = 0; rank < node_of_.size(); ++rank) {
      const Candidate& c = candidates_[node_of_[rank]];
      const auto [host, slot] = demand_.rank_hosts[rank];
      if (slot < 0 || c.gpus_per_rank == 0) continue;
      std::vector<int> wanted;
      for (int g = 0; g < c.gpus_per_rank; ++g) wanted.push_back(slot * c.gpus_per_rank + g);
      if (!Take(rank, wanted)) wrong_.emplace(host, WhyNotThese(rank, wanted));
    }
    for (size_t rank = 0; rank < std::min(node_of_.size(), demand_.previous_gpus.size()); ++rank) {
      if (gpus_[rank].empty() && demand_.previous[rank] == candidates_[node_of_[rank]].view->id)
        (void)Take(rank, demand_.previous_gpus[rank]);
    }
    for (size_t rank = 0; rank < node_of_.size() && wrong_.empty(); ++rank) {
      std::multiset<int>& there = left_[node_of_[rank]];
      while (static_cast<int>(gpus_[rank].size()) < candidates_[node_of_[rank]].gpus_per_rank) {
        if (there.empty()) return (void)wrong_.emplace(demand_.rank_hosts[rank].host, "");
        gpus_[rank].push_back(there.extract(there.begin()).value());
      }
    }
  }

  bool Take(size_t rank, const std::vector<int>& wanted) {
    std::multiset<int>& there = left_[node_of_[rank]];
    if (static_cast<int>(wanted.size()) != candidates_[node_of_[rank]].gpus_per_rank ||
        !std::ranges::all_of(wanted, [&](int gpu) { return there.contains(gpu); }))
      return false;
    for (const int gpu : wanted) there.erase(there.find(gpu));
    gpus_[rank] = wanted;
    return true;
  }

  std::string WhyNotThese(size_t rank, const std::vector<int>& wanted) const {
    const NodeView& node = *candidates_[node_of_[rank]].view;
    const std::string begin = absl::StrCat("rank ", rank, " goes on ", node.hostname, " slot ",
                                           demand_.rank_hosts[rank].slot, " by where.ranks, ");
    const size_t count = node.gpu_models.size();
    if (wanted.back() >= static_cast<int>(count))
      return absl::StrCat(begin, "and it has ", count, count == 1 ? " GPU" : " GPUs");
    return absl::StrCat(begin, "and GPU ", PrintRanks(wanted),
                        " there is taken, or of another type than the job wants");
  }

  // Names the first host in words, and all of them for `gtrain why`.
  void Refuse() {
    const auto& [host, why] = *wrong_.begin();
    const std::string& name = demand_.host_names[host];
    out_.reason = why.empty() ? WhyNoRoom(host) : why;
    if (wrong_.size() > 1)
      absl::StrAppend(&out_.reason, "; ", wrong_.size() - 1,
                      wrong_.size() == 2 ? " other host does" : " other hosts do",
                      " not take its ranks either");
    std::set<NodeId> named;
    for (const auto& [wrong, ignored] : wrong_) {
      for (const size_t i : of_host_[wrong]) named.insert(candidates_[i].view->id);
    }
    out_.named.assign(named.begin(), named.end());
    const bool absent = of_host_[host].empty();
    out_.remedy =
        absent ? WhyNoSuchNode(by_name_, {name}).remedy + kElse : absl::StrCat("room on ", name, kElse);
  }

  std::string WhyNoRoom(int host) const {
    const std::string& name = demand_.host_names[host];
    std::vector<int> ranks;
    for (size_t rank = 0; rank < demand_.rank_hosts.size(); ++rank) {
      if (demand_.rank_hosts[rank].host == host) ranks.push_back(static_cast<int>(rank));
    }
    const std::string begin = ranks.size() == 1 ? absl::StrCat("rank ", ranks[0], " goes on ")
                                                : absl::StrCat("ranks ", PrintRanks(ranks), " go on ");
    if (of_host_[host].empty())
      return absl::StrCat(begin, name, " by where.ranks, and ", WhyNoSuchNode(by_name_, {name}).why);
    const auto room = [&](size_t i) {
      const NodeVerdict& verdict = out_.verdicts[i];
      return absl::StrCat(verdict.room, verdict.limit.empty() ? "" : absl::StrCat(" (", verdict.limit, ")"));
    };
    return absl::StrCat(begin, name, " by where.ranks, and that takes ",
                        OfEach(of_host_[host], " and ", room));
  }

  const Demand& demand_;
  const NodesByName by_name_;
  Placement out_;
  std::vector<Candidate> candidates_;         // by id
  std::vector<std::multiset<int>> left_;      // GPUs of each candidate that no rank has yet
  std::vector<std::vector<size_t>> of_host_;  // [host]: candidates
  std::vector<size_t> node_of_;               // [rank]: candidate
  std::vector<std::vector<int>> gpus_;        // [rank]
  std::map<int, std::string> wrong_;          // host, and why where it is not the room
};

}  // namespace

Placement PlaceByRank(const std::vector<NodeView>& nodes, const Demand& demand) {
  return RankPlacer(nodes, demand).Place();
}

}  // namespace gtrain::plan
