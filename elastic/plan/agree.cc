#include "elastic/plan/agree.h"

#include <algorithm>

namespace gtrain::elastic {

bool Agreement::AnyNeeds() const { return std::ranges::count(parts, Part::kNeeds) > 0; }

int Agreement::source() const { return *std::ranges::min_element(sources); }

namespace {

void SetPart(const MemberState& member, int rank, int cell, Agreement* agreement) {
  int& source = agreement->sources[static_cast<size_t>(cell)];
  const int64_t step = agreement->step;
  const bool has = step >= 0 && member.applied == step;
  const bool rolls = member.applied >= 0 && member.applied + 1 == step && member.held == step;
  agreement->parts.push_back(has ? Part::kHas : rolls ? Part::kRollsForward : Part::kNeeds);
  const auto is_source = [&](Part part) {
    return source >= 0 && agreement->parts[static_cast<size_t>(source)] == part;
  };
  const bool begins = step < 0 && member.as_made;
  if (has && !is_source(Part::kHas)) source = rank;
  if ((rolls || begins) && source < 0) source = rank;
}

Agreement AgreeOn(int64_t step, absl::Span<const MemberState> members, absl::Span<const int> cells,
                  int count) {
  Agreement agreement;
  agreement.step = step;
  agreement.sources.assign(static_cast<size_t>(count), -1);
  for (size_t rank = 0; rank < members.size(); ++rank)
    SetPart(members[rank], static_cast<int>(rank), cells[rank], &agreement);
  return agreement;
}

}  // namespace

Agreement Agree(absl::Span<const MemberState> members, absl::Span<const int> cells, int count) {
  int64_t step = -1;
  for (const MemberState& member : members) step = std::max(step, member.applied);
  Agreement agreement = AgreeOn(step, members, cells, count);
  // Without one part the others are of no use.
  if (step >= 0 && agreement.source() < 0) agreement = AgreeOn(-1, members, cells, count);
  return agreement;
}

}  // namespace gtrain::elastic
