#include "checkpoint/plan/near.h"

#include <algorithm>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"

namespace gtrain::ckpt {
namespace {

constexpr size_t kFileNameMax = 64;

bool IsSuperseded(const NearCopy& copy, const NearCopy& coming, const std::optional<SaveId>& committed) {
  if (!committed || !copy.whole || copy.job != coming.job || copy.attempt == *committed) return false;
  if (copy.attempt < *committed) return true;
  return copy.file == coming.file && copy.attempt < coming.attempt;
}

}  // namespace

NearPlan PlanNear(const std::vector<NearCopy>& held, const NearCopy& coming,
                  const std::optional<SaveId>& committed, uint64_t bytes_max) {
  NearPlan plan;
  struct OtherJob {
    absl::Duration idle = absl::InfiniteDuration();
    std::vector<size_t> copies;
    uint64_t bytes = 0;
  };
  std::map<std::string, OtherJob> others;
  for (size_t i = 0; i < held.size(); ++i) {
    const NearCopy& copy = held[i];
    if (IsSuperseded(copy, coming, committed)) {
      plan.drop.push_back(i);
      continue;
    }
    plan.bytes += copy.bytes;
    if (copy.job == coming.job) continue;
    OtherJob& other = others[copy.job];
    other.idle = copy.whole ? std::min(other.idle, copy.age) : absl::ZeroDuration();
    other.copies.push_back(i);
    other.bytes += copy.bytes;
  }
  const auto fits = [&] { return plan.bytes <= bytes_max && coming.bytes <= bytes_max - plan.bytes; };
  std::vector<const OtherJob*> idle;
  for (const auto& [job, other] : others) {
    if (other.idle >= kNearIdle) idle.push_back(&other);
  }
  std::stable_sort(idle.begin(), idle.end(),
                   [](const OtherJob* a, const OtherJob* b) { return a->idle > b->idle; });
  for (const OtherJob* other : idle) {
    if (fits()) break;
    plan.drop.insert(plan.drop.end(), other->copies.begin(), other->copies.end());
    plan.bytes -= other->bytes;
  }
  plan.fits = fits();
  return plan;
}

bool IsNearFile(absl::string_view file) {
  return file.size() <= kFileNameMax && absl::StartsWith(file, "rank-") &&
         (absl::EndsWith(file, ".safetensors") || absl::EndsWith(file, ".index.json") ||
          absl::EndsWith(file, ".order.json")) &&
         std::all_of(file.begin(), file.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.';
         });
}

}  // namespace gtrain::ckpt
