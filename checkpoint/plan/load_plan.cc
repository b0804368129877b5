#include "checkpoint/plan/load_plan.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gtrain::ckpt {
namespace {

constexpr size_t kDifferencesMax = 20;

std::string Describe(const GlobalTensor& t) {
  if (t.layout == Layout::kPerRank) return "per-rank bytes";
  return absl::StrCat(DTypeName(t.dtype), "[", absl::StrJoin(t.shape, ","), "]");
}

// What stops `registered` from being restored out of `manifest`, one line each.
std::vector<std::string> Differences(const Manifest& manifest, const std::vector<Registered>& registered) {
  absl::flat_hash_map<std::string, const GlobalTensor*> stored;
  for (const GlobalTensor& t : manifest.tensors) stored[t.name] = &t;
  std::vector<std::string> out;
  for (const Registered& r : registered) {
    const auto it = stored.find(r.tensor.name);
    if (it == stored.end()) {
      if (r.tensor.layout == Layout::kReplicated)
        out.push_back(absl::StrCat("\"", r.tensor.name, "\" is not in it"));
    } else if (*it->second != r.tensor) {
      out.push_back(absl::StrCat("\"", r.tensor.name, "\" is ", Describe(*it->second), " there and ",
                                 Describe(r.tensor), " here"));
    }
  }
  return out;
}

void AddChunks(const Copy& copy, std::vector<uint64_t>* chunks) {
  if (copy.bytes == 0) return;
  const uint64_t last = (copy.file_begin + copy.bytes - 1) / kChunkBytes;
  for (uint64_t c = copy.file_begin / kChunkBytes; c <= last; ++c) {
    if (chunks->empty() || chunks->back() < c) chunks->push_back(c);
  }
}

}  // namespace

absl::StatusOr<LoadPlan> PlanLoad(const Manifest& manifest, const std::vector<Registered>& registered,
                                  int rank) {
  std::vector<std::string> differences = Differences(manifest, registered);
  LoadPlan plan;
  plan.restored.assign(registered.size(), false);
  absl::flat_hash_map<std::string, size_t> wanted;
  for (size_t i = 0; i < registered.size(); ++i) {
    wanted[registered[i].tensor.name] = i;
    plan.restored[i] = registered[i].tensor.layout == Layout::kReplicated;
  }
  for (const GlobalTensor& t : manifest.tensors) {
    if (!wanted.contains(t.name)) plan.unknown.push_back(t.name);
  }
  for (int f = 0; f < manifest.world_size; ++f) {
    FileRead read{.file = f};
    for (const Slice& s : manifest.files[f].slices) {
      const auto it = wanted.find(s.tensor);
      if (it == wanted.end()) continue;
      const Registered& r = registered[it->second];
      if (r.tensor.layout == Layout::kPerRank) {
        if (f != rank) continue;
        if (s.bytes != r.bytes) {
          differences.push_back(absl::StrCat("per-rank \"", s.tensor, "\" has ", s.bytes, " bytes there and ",
                                             r.bytes, " here"));
        }
        plan.restored[it->second] = true;
      }
      if (s.bytes == 0) continue;
      read.copies.push_back({it->second, s.begin, s.bytes, s.file_begin});
      AddChunks(read.copies.back(), &read.chunks);
    }
    if (!read.copies.empty()) plan.reads.push_back(std::move(read));
  }
  if (differences.empty()) return plan;
  const size_t count = differences.size();
  differences.resize(std::min(count, kDifferencesMax));
  return absl::FailedPreconditionError(
      absl::StrCat("the checkpoint does not fit this program: ", absl::StrJoin(differences, "; "),
                   count > kDifferencesMax ? absl::StrCat("; and ", count - kDifferencesMax, " more") : ""));
}

}  // namespace gtrain::ckpt
