#include "launcher/cli/rankfile.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "job/spec/print.h"
#include "topology/place/rankfile.h"

namespace gtrain::cli {
namespace {

constexpr size_t kRanksOfEntry = 128;  // a key of YAML has at most 1,024 characters

// The place of a rank with these GPUs; -1: they are none.
int SlotOfGpus(const std::vector<int>& gpus) {
  const int each = static_cast<int>(gpus.size());
  if (each == 0 || gpus[0] % each != 0) return -1;
  for (int i = 0; i < each; ++i) {
    if (gpus[i] != gpus[0] + i) return -1;
  }
  return gpus[0] / each;
}

bool IsName(const std::string& hostname) {
  return !hostname.empty() && hostname[0] != '+' && std::ranges::all_of(hostname, [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_' || c == ':';
  });
}

}  // namespace

absl::StatusOr<spec::Overlay> ReadRankfileFlag(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path, topology::kRankfileBytesMax);
  if (!text.ok()) return absl::InvalidArgumentError(absl::StrCat("--rankfile: ", text.status().message()));
  GT_ASSIGN_OR_RETURN(const std::vector<topology::RankfileRow> rows, topology::ReadRankfile(*text, path));
  std::vector<spec::RanksOn> places;
  std::map<std::string, size_t> newest;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    auto [it, is_new] = newest.try_emplace(rows[rank].host, places.size());
    if (!is_new && places[it->second].ranks.size() == kRanksOfEntry) {
      it->second = places.size();
      is_new = true;
    }
    if (is_new) places.push_back({{}, rows[rank].host, {}});
    places[it->second].ranks.push_back(static_cast<int>(rank));
    places[it->second].slots.push_back(rows[rank].slot);
  }
  spec::Overlay overlay;
  overlay.label = absl::StrCat("--rankfile ", path);
  overlay.key = "where.ranks";
  overlay.text = spec::PrintRanksOn(places);
  return overlay;
}

absl::Status WriteRankfile(const std::string& path, std::vector<PlacedRank> ranks) {
  std::ranges::sort(ranks, {}, &PlacedRank::rank);
  std::map<std::string, std::set<std::string>> nodes;
  std::set<std::string> odd;  // nodes on which the GPUs of some rank are no place
  for (const PlacedRank& rank : ranks) {
    nodes[rank.hostname].insert(rank.node);
    if (SlotOfGpus(rank.gpus) < 0) odd.insert(rank.node);
  }
  std::string text;
  for (const PlacedRank& rank : ranks) {
    const bool by_id = !IsName(rank.hostname) || nodes[rank.hostname].size() > 1;
    text += topology::PrintRankfileRow(rank.rank, by_id ? rank.node : rank.hostname,
                                       odd.contains(rank.node) ? rank.local_rank : SlotOfGpus(rank.gpus));
  }
  return WriteFileDurable(path, text, 0644);
}

absl::StatusOr<std::vector<PlacedRank>> PlacedRanksOf(const JobDoc& job) {
  std::vector<PlacedRank> ranks;
  for (const RankDoc& rank : job.ranks) {
    if (rank.rank < job.world_size)
      ranks.push_back({rank.rank, rank.local_rank, rank.node, rank.hostname, rank.gpus});
  }
  if (ranks.empty())
    return absl::NotFoundError(
        absl::StrCat(job.id, " has no ranks: it is ", job.state, ", and nothing of it is placed"));
  return ranks;
}

}  // namespace gtrain::cli
