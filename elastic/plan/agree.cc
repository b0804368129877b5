#include "elastic/plan/agree.h"

#include <algorithm>

namespace gtrain::elastic {

bool Agreement::AnyNeeds() const { return std::ranges::count(parts, Part::kNeeds) > 0; }

Agreement Agree(absl::Span<const MemberState> members) {
  Agreement agreement;
  for (const MemberState& member : members) agreement.step = std::max(agreement.step, member.applied);
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const MemberState& member = members[rank];
    const bool has = agreement.step >= 0 && member.applied == agreement.step;
    const bool rolls =
        member.applied >= 0 && member.applied + 1 == agreement.step && member.held == agreement.step;
    agreement.parts.push_back(has ? Part::kHas : rolls ? Part::kRollsForward : Part::kNeeds);
    const bool begins = agreement.step < 0 && member.as_made;
    if ((has || begins) && agreement.source < 0) agreement.source = static_cast<int>(rank);
  }
  return agreement;
}

}  // namespace gtrain::elastic
