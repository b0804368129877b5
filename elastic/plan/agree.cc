#include "elastic/plan/agree.h"

#include <algorithm>

namespace gtrain::elastic {

bool Agreement::AnyNeeds() const { return std::ranges::count(parts, Part::kNeeds) > 0; }

bool Agreement::AnyUndoes() const { return std::ranges::count(parts, Part::kUndoes) > 0; }

int Agreement::source() const { return *std::ranges::min_element(sources); }

namespace {

Part PartOf(const MemberState& member, int64_t step) {
  if (step < 0) return Part::kNeeds;
  if (member.applied == step) return Part::kHas;
  if (member.applied >= 0 && member.applied + 1 == step && member.held == step) return Part::kRollsForward;
  if (member.applied == step + 1 && member.undo == step) return Part::kUndoes;
  return Part::kNeeds;
}

// Who has the state now is a better source than who has yet to come to it.
void SetPart(const MemberState& member, int rank, int cell, Agreement* agreement) {
  int& source = agreement->sources[static_cast<size_t>(cell)];
  const Part part = PartOf(member, agreement->step);
  const bool has_source = source >= 0;
  const bool source_has = has_source && agreement->parts[static_cast<size_t>(source)] == Part::kHas;
  agreement->parts.push_back(part);
  const bool begins = agreement->step < 0 && member.as_made;
  if (part == Part::kHas ? !source_has : !has_source && (part != Part::kNeeds || begins)) source = rank;
}

// For cells whose ranks are all lost.
void FindCopies(absl::Span<const MemberState> members, Agreement* agreement) {
  for (size_t rank = 0; rank < members.size(); ++rank) {
    for (const PartCopy& copy : members[rank].copies) {
      if (copy.step != agreement->step) continue;
      int& source = agreement->sources[static_cast<size_t>(copy.cell)];
      if (source < 0) source = static_cast<int>(rank);
    }
  }
}

Agreement AgreeOn(int64_t step, absl::Span<const MemberState> members, absl::Span<const int> cells,
                  int count) {
  Agreement agreement;
  agreement.step = step;
  agreement.sources.assign(static_cast<size_t>(count), -1);
  for (size_t rank = 0; rank < members.size(); ++rank)
    SetPart(members[rank], static_cast<int>(rank), cells[rank], &agreement);
  if (step >= 0) FindCopies(members, &agreement);
  return agreement;
}

}  // namespace

Agreement Agree(absl::Span<const MemberState> all, absl::Span<const int> cells, int count) {
  int64_t line = 0, newest = -1;
  for (const MemberState& member : all) line = std::max(line, member.line);
  std::vector<MemberState> members(all.begin(), all.end());
  for (MemberState& member : members) {
    if (member.line < line) member = {.as_made = member.as_made};
    newest = std::max(newest, member.applied);
  }
  // Without one part the others are of no use.
  for (int64_t step = newest; step >= 0 && step >= newest - 1; --step) {
    Agreement agreement = AgreeOn(step, members, cells, count);
    agreement.line = step == newest ? line : line + 1;
    if (agreement.source() >= 0) return agreement;
  }
  Agreement agreement = AgreeOn(-1, members, cells, count);
  agreement.line = newest < 0 ? line : line + 1;
  return agreement;
}

}  // namespace gtrain::elastic
