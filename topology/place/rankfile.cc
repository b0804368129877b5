#include "topology/place/rankfile.h"

#include <map>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace gtrain::topology {
namespace {

struct Row {
  int rank = 0, slot = 0;
  std::string machine;
};

// "rank 0=node1 slot=3"
bool ReadRow(absl::string_view text, Row& row) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(text, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
  if (words.size() != 3 || words[0] != "rank") return false;
  const std::vector<std::string> host = absl::StrSplit(words[1], absl::MaxSplits('=', 1));
  const std::vector<std::string> slot = absl::StrSplit(words[2], absl::MaxSplits('=', 1));
  if (host.size() != 2 || slot.size() != 2 || slot[0] != "slot" || host[1].empty()) return false;
  row.machine = host[1];
  return absl::SimpleAtoi(host[0], &row.rank) && row.rank >= 0 && absl::SimpleAtoi(slot[1], &row.slot) &&
         row.slot >= 0;
}

}  // namespace

std::string PrintRankfile(const Topology& topology, const Fabric& fabric,
                          const std::vector<int32_t>& slot_of_rank) {
  std::string text;
  for (size_t rank = 0; rank < slot_of_rank.size(); ++rank) {
    const int32_t machine = fabric.slots[slot_of_rank[rank]].machine;
    absl::StrAppend(&text, "rank ", rank, "=", topology.machines[machine].name,
                    " slot=", slot_of_rank[rank] - fabric.slots_of_machine[machine].first, "\n");
  }
  return text;
}

absl::StatusOr<std::vector<int32_t>> ParseRankfile(absl::string_view text, absl::string_view filename,
                                                   const Topology& topology, const Fabric& fabric) {
  absl::flat_hash_map<std::string, int> machines;
  for (size_t m = 0; m < topology.machines.size(); ++m)
    machines[topology.machines[m].name] = static_cast<int>(m);
  std::map<int, int32_t> slots;
  absl::flat_hash_set<std::string> taken;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") == absl::string_view::npos) continue;
    const auto bad = [&](absl::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat(filename, ":", number, ": ", why));
    };
    Row row;
    if (!ReadRow(line, row)) return bad("must be \"rank NUMBER=HOST slot=NUMBER\"");
    if (!taken.insert(absl::StrCat(row.machine, " ", row.slot)).second)
      return bad(absl::StrCat(row.machine, " slot ", row.slot, " is taken by a rank above"));
    int32_t slot = -1;
    if (const auto it = machines.find(row.machine); it != machines.end()) {
      const auto [first, end] = fabric.slots_of_machine[it->second];
      if (row.slot < end - first) slot = first + row.slot;
    }
    if (!slots.emplace(row.rank, slot).second) return bad(absl::StrCat("rank ", row.rank, " is there twice"));
  }
  std::vector<int32_t> slot_of_rank;
  for (const auto& [rank, slot] : slots) {
    if (rank != static_cast<int>(slot_of_rank.size()))
      return absl::InvalidArgumentError(
          absl::StrCat(filename, ": rank ", slot_of_rank.size(), " is missing"));
    slot_of_rank.push_back(slot);
  }
  if (slot_of_rank.empty()) return absl::InvalidArgumentError(absl::StrCat(filename, ": no rank in it"));
  return slot_of_rank;
}

}  // namespace gtrain::topology
