#include "comm/exec/link_memory.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/plan/cost.h"
#include "comm/ucx/fabric.h"

namespace gtrain::comm {
namespace {

const std::string kNothing(LinkMemory::kMarkBytes, '-');

// The form in which a fabric remembers a link, without bytes that mean nothing.
struct KnownLink {
  int64_t rails;
  std::array<double, LinkCost::kSizes.size()> round;
  double reduced_byte;
};

}  // namespace

std::string LinkMemory::Mark() {
  known_ = bootstrap_ == nullptr ? "" : bootstrap_->fabric()->links();
  return known_.empty() ? kNothing
                        : absl::StrCat(absl::Hex(std::hash<std::string>()(known_) | 1, absl::kZeroPad16));
}

void LinkMemory::TakeMarks(const std::vector<std::string>& marks) {
  all_know_ = marks[0].size() == kMarkBytes && marks[0] != kNothing &&
              std::ranges::all_of(marks, [&](const std::string& mark) { return mark == marks[0]; });
}

absl::Status LinkMemory::Learn(BetweenMachines* between, char* memory, const Watch& watch) {
  if (all_know_) {
    std::vector<KnownLink> links(known_.size() / sizeof(KnownLink));
    std::memcpy(links.data(), known_.data(), known_.size());
    std::vector<Carriers> measured;
    for (const KnownLink& link : links)
      measured.push_back({static_cast<int>(link.rails), {link.round, link.reduced_byte}});
    between->TakeLinks(measured);
    return absl::OkStatus();
  }
  GT_RETURN_IF_ERROR(between->Measure(memory, watch));
  Remember(*between);
  return absl::OkStatus();
}

void LinkMemory::Remember(const BetweenMachines& between) {
  if (bootstrap_ == nullptr || between.wish().deterministic) return;
  std::string known;
  for (const Carriers& c : between.carriers()) {
    const KnownLink link{c.rails, c.link.round, c.link.reduced_byte};
    known.append(reinterpret_cast<const char*>(&link), sizeof(link));
  }
  bootstrap_->fabric()->RememberLinks(std::move(known));
}

}  // namespace gtrain::comm
