// Optimal string alignment distance by dynamic programming over three rows.
#include "job/spec/nearest.h"

#include <algorithm>

namespace gtrain::spec {
namespace {

constexpr size_t kWordMax = 128;  // longer ones are no typing errors; bounds the work

}  // namespace

int EditDistance(absl::string_view a, absl::string_view b) {
  if (a.size() > kWordMax || b.size() > kWordMax) return static_cast<int>(kWordMax);
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int change = a[i - 1] == b[j - 1] ? 0 : 1;
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::string Nearest(absl::string_view word, const std::vector<std::string>& candidates) {
  if (word.size() > kWordMax) return "";
  std::string best;
  int best_distance = std::max(2, static_cast<int>(word.size()) / 3) + 1;
  for (const std::string& candidate : candidates) {
    const int distance = EditDistance(word, candidate);
    if (distance < best_distance && distance < static_cast<int>(std::max(word.size(), candidate.size()))) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace gtrain::spec
