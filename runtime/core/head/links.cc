// Nodes that both reach the head but not each other (fault W5).
//
// A rank that waits in vain proves the way to the machine it waits for and reports it when nothing gets there
// (comm/ucx). The first such report of a generation starts link_settle; the other side, and others that fail
// to reach the same node, report within it. Then the job does without one node of each broken pair: the one
// in most of them, of equals the one with fewer of its ranks, then the one with the larger id. That is the
// same node whichever rank reported first and however often, and none comes back into the job before
// avoid_for is over, its machine restarted or a person says so: pairs cannot take turns. Other jobs are not
// concerned: the reports of their ranks decide about them.
//
// A node that the head itself does not hear is the failure detector's, and reports about its links are
// forgotten meanwhile: a rank that still waits reports again.
#include "runtime/core/head/links.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/probe.h"
#include "base/units.h"
#include "runtime/core/head/faults.h"
#include "runtime/core/head/rank_news.h"

namespace gtrain::core {

Links::Links(HeadContext& context, HeadModel& model, Faults& faults, RankNews& ranks)
    : context_(context), model_(model), config_(context.config()), faults_(faults), ranks_(ranks) {}

void Links::OnLinkDown(const NodeId& node, const LinkDown& report, Instant now) {
  Job* job = ranks_.CurrentJob(node, report.job, report.generation);
  if (job == nullptr || !job->Live()) return;
  const std::vector<RankPlace>& ranks = job->record.grant->ranks;
  const auto known = [&](int rank) { return rank >= 0 && rank < static_cast<int>(ranks.size()); };
  if (!known(report.rank) || !known(report.peer) || ranks[report.rank].node != node ||
      ranks[report.peer].node == node) {
    ++context_.counters().stale_dropped;
    return;
  }
  if (job->ExitOf(report.rank) != nullptr || job->ExitOf(report.peer) != nullptr)
    return;  // it answers nobody
  const NodeId& other = ranks[report.peer].node;
  std::string said = absl::StrCat("rank ", report.rank, " on ", model_.Hostname(node), " cannot reach rank ",
                                  report.peer, " on ", model_.Hostname(other), ": ", report.text);
  if (!job->broken_links.emplace(std::minmax(node, other), said).second) return;
  GT_PROBE("head.link_reported");
  context_.Emit(*job, "warning", std::move(said));
  context_.Dirty(*job);
  if (!job->links_at) job->links_at = now + config_.link_settle;
}

// Chooses among nodes that are heard, by the broken links between them; nullopt: there are none.
std::optional<NodeId> Links::NodeToAvoid(const Job& job) const {
  struct Case {
    int links = 0, ranks = 0;
  };
  std::map<NodeId, Case> cases;
  const auto heard = [&](const NodeId& id) {
    const auto it = model_.nodes.find(id);
    return it != model_.nodes.end() && it->second.welcomed && it->second.state == NodeState::kAlive;
  };
  for (const auto& [pair, said] : job.broken_links) {
    if (!heard(pair.first) || !heard(pair.second)) continue;
    ++cases[pair.first].links;
    ++cases[pair.second].links;
  }
  for (const RankPlace& place : job.record.grant->ranks) {
    if (const auto it = cases.find(place.node); it != cases.end()) ++it->second.ranks;
  }
  const auto worst = std::max_element(cases.begin(), cases.end(), [](const auto& a, const auto& b) {
    return std::make_tuple(a.second.links, -a.second.ranks, a.first) <
           std::make_tuple(b.second.links, -b.second.ranks, b.first);
  });
  return worst == cases.end() ? std::nullopt : std::optional(worst->first);
}

void Links::LinkStep(Job& job, Instant now) {
  for (size_t i = job.record.avoided.size(); i-- > 0;) {
    if (job.avoided_until[i] > now) continue;
    GT_PROBE("head.avoidance_over");
    const NodeId node = job.record.avoided[i].node;  // it goes with the element
    EndAvoidance(job, node, "it is tried again");
  }
  if (!job.Live() || !job.links_at || now < *job.links_at) return;
  std::optional<FaultRecord> fault;
  while (const std::optional<NodeId> worst = NodeToAvoid(job)) {
    const auto covers = [&](const auto& link) {
      return link.first.first == *worst || link.first.second == *worst;
    };
    const auto link = std::find_if(job.broken_links.begin(), job.broken_links.end(), covers);
    const NodeId& other = link->first.first == *worst ? link->first.second : link->first.first;
    if (!fault) {
      fault.emplace();
      fault->kind = FaultKind::kInfrastructure;
      fault->cause = ExitCause::kLost;
      fault->node = *worst;
      fault->hostname = model_.Hostname(*worst);
      fault->message =
          absl::StrCat("the link between ", model_.Hostname(other), " and ", fault->hostname, " is broken (",
                       link->second, "): the job goes on without ", fault->hostname);
    }
    Avoid(job, *worst,
          absl::StrCat("avoided by this job for ", PrintDuration(config_.avoid_for), ": ", link->second),
          now);
    std::erase_if(job.broken_links, covers);
  }
  job.broken_links.clear();  // what is left is of silent nodes
  job.links_at.reset();
  if (!fault) {
    GT_PROBE("head.link_of_silent_node");
    return;
  }
  GT_PROBE("head.link_decided");
  faults_.Fail(job, *std::move(fault), now);
}

void Links::ForgetLinks(const NodeId& node) {
  for (Job* job : model_.LiveJobs()) {
    std::erase_if(job->broken_links,
                  [&](const auto& link) { return link.first.first == node || link.first.second == node; });
    if (job->broken_links.empty()) job->links_at.reset();
  }
}

void Links::Avoid(Job& job, const NodeId& node, std::string why, Instant now) {
  job.record.avoided.push_back({node, Shortened(std::move(why), 1 << 10)});
  job.avoided_until.push_back(now + config_.avoid_for);
  context_.Dirty(job);
}

void Links::EndAvoidance(Job& job, const NodeId& node, const std::string& why) {
  for (size_t i = job.record.avoided.size(); i-- > 0;) {
    if (job.record.avoided[i].node != node) continue;
    job.record.avoided.erase(job.record.avoided.begin() + static_cast<ptrdiff_t>(i));
    job.avoided_until.erase(job.avoided_until.begin() + static_cast<ptrdiff_t>(i));
    context_.Emit(job, "note", absl::StrCat(model_.Hostname(node), " is not avoided any more: ", why));
    context_.Dirty(job);
    model_.schedule = true;
  }
}

void Links::EndAvoidances(const NodeId& node, const std::string& why) {
  for (Job* job : model_.LiveJobs()) EndAvoidance(*job, node, why);
}

}  // namespace gtrain::core
