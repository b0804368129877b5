#include "runtime/core/values/log_tails.h"

#include <utility>

namespace gtrain::core {
namespace {

void KeepEnd(std::string& text, size_t bytes_max) {
  if (text.size() > bytes_max) text.erase(0, text.size() - bytes_max);
}

}  // namespace

std::vector<SpillTail> LogTails::Put(const LogTail& tail) {
  auto& entry = tails_.Renew({tail.job, tail.generation, tail.rank, tail.is_stderr});
  HeldTail& held = entry.value;
  const bool doubled = tail.piece > 0 && tail.piece <= held.piece;
  if (doubled) return {};
  // After a piece that was lost, or a tail that was forgotten, the next piece begins it anew.
  if (tail.piece == 0 || tail.piece != held.piece + 1) held = HeldTail();
  held.text += tail.text;
  held.piece = tail.piece;
  held.end_offset = tail.end_offset;
  if (held.text.size() > each_bytes_max_) held.spilled = 0;
  KeepEnd(held.text, each_bytes_max_);
  tails_.Count(entry, held.text.size() + kTailCost);

  std::vector<SpillTail> leaving;
  while (tails_.bytes() > total_bytes_max_) {
    auto& oldest = *tails_.Oldest();
    if (oldest.value.text.empty()) {
      // The head remembers that a tail goes on while others of the job have text (a round of them finds one),
      // and while that does not take half of the room.
      const size_t costs = kTailCost * tails_.EntriesOf(oldest.key.job);
      const bool forget = costs == tails_.BytesOf(oldest.key.job) || costs > total_bytes_max_ / 2;
      forget ? tails_.Erase(oldest.key) : (void)tails_.Renew(oldest.key);
      continue;
    }
    HeldTail& leaves = oldest.value;
    leaving.push_back({oldest.key, leaves.spilled, leaves.end_offset, std::exchange(leaves.text, {})});
    leaves.spilled += leaving.back().text.size();
    tails_.Count(oldest, kTailCost);
    tails_.Renew(oldest.key);
  }
  return leaving;
}

const HeldTail* LogTails::Find(const TailKey& key) const {
  const auto* entry = tails_.Find(key);
  return entry == nullptr ? nullptr : &entry->value;
}

void LogTails::Forget(const JobId& job) {
  tails_.EraseJob(job, [](const auto&) {});
}

// More may have been spilled since `held` was looked at, and then of `held` itself.
HeldTail Joined(const std::optional<SpilledTail>& spilled, const std::optional<HeldTail>& held,
                size_t bytes_max) {
  HeldTail joined = held.value_or(HeldTail());
  if (spilled && !held) {
    joined.text = spilled->text;
    joined.end_offset = spilled->end_offset;
  } else if (spilled && spilled->bytes >= held->spilled && held->spilled > 0) {
    const uint64_t there = spilled->bytes - held->spilled;
    if (there <= held->text.size()) {
      joined.text = spilled->text + held->text.substr(there);
    } else {
      joined.text = spilled->text;
      joined.end_offset = spilled->end_offset;
    }
  }
  KeepEnd(joined.text, bytes_max);
  return joined;
}

}  // namespace gtrain::core
