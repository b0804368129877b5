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

// "rank 0=node1 slot=3"; what is wrong with it, empty: nothing.
std::string ReadRow(absl::string_view text, int& rank, RankfileRow& row) {
  constexpr char kForm[] = "must be \"rank NUMBER=HOST slot=NUMBER\"";
  const std::vector<absl::string_view> words =
      absl::StrSplit(text, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
  if (words.size() != 3 || words[0] != "rank") return kForm;
  const std::vector<std::string> host = absl::StrSplit(words[1], absl::MaxSplits('=', 1));
  const std::vector<std::string> slot = absl::StrSplit(words[2], absl::MaxSplits('=', 1));
  if (host.size() != 2 || slot.size() != 2 || slot[0] != "slot" || host[1].empty()) return kForm;
  if (!absl::SimpleAtoi(host[0], &rank) || rank < 0) return kForm;
  row.host = host[1];
  if (row.host[0] == '+') return absl::StrCat(row.host, " is a host by its position: write its name");
  if (slot[1].find_first_of(":,-pP") != std::string::npos)
    return absl::StrCat("slot=", slot[1],
                        " names sockets or several cores: here a slot is one number, a place "
                        "of the machine counted from 0");
  return absl::SimpleAtoi(slot[1], &row.slot) && row.slot >= 0 ? "" : kForm;
}

}  // namespace

std::string PrintRankfileRow(int rank, absl::string_view host, int slot) {
  return absl::StrCat("rank ", rank, "=", host, " slot=", slot, "\n");
}

std::string PrintRankfile(const Topology& topology, const Fabric& fabric,
                          const std::vector<int32_t>& slot_of_rank) {
  std::string text;
  for (size_t rank = 0; rank < slot_of_rank.size(); ++rank) {
    const int32_t machine = fabric.slots[slot_of_rank[rank]].machine;
    text += PrintRankfileRow(static_cast<int>(rank), topology.machines[machine].name,
                             slot_of_rank[rank] - fabric.slots_of_machine[machine].first);
  }
  return text;
}

absl::StatusOr<std::vector<RankfileRow>> ReadRankfile(absl::string_view text, absl::string_view filename) {
  std::map<int, RankfileRow> by_rank;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") == absl::string_view::npos) continue;
    const auto bad = [&](absl::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat(filename, ":", number, ": ", why));
    };
    int rank = 0;
    RankfileRow row;
    row.line = number;
    if (const std::string wrong = ReadRow(line, rank, row); !wrong.empty()) return bad(wrong);
    if (!by_rank.emplace(rank, row).second) return bad(absl::StrCat("rank ", rank, " is there twice"));
  }
  std::vector<RankfileRow> rows;
  for (auto& [rank, row] : by_rank) {
    if (rank != static_cast<int>(rows.size()))
      return absl::InvalidArgumentError(absl::StrCat(filename, ": rank ", rows.size(), " is missing"));
    rows.push_back(std::move(row));
  }
  if (rows.empty()) return absl::InvalidArgumentError(absl::StrCat(filename, ": no rank in it"));
  return rows;
}

absl::StatusOr<std::vector<int32_t>> ParseRankfile(absl::string_view text, absl::string_view filename,
                                                   const Topology& topology, const Fabric& fabric) {
  GT_ASSIGN_OR_RETURN(const std::vector<RankfileRow> rows, ReadRankfile(text, filename));
  absl::flat_hash_map<std::string, int> machines;
  for (size_t m = 0; m < topology.machines.size(); ++m)
    machines[topology.machines[m].name] = static_cast<int>(m);
  absl::flat_hash_set<std::string> taken;
  std::vector<int32_t> slot_of_rank;
  for (const RankfileRow& row : rows) {
    if (!taken.insert(absl::StrCat(row.host, " ", row.slot)).second)
      return absl::InvalidArgumentError(absl::StrCat(filename, ":", row.line, ": ", row.host, " slot ",
                                                     row.slot, " is taken by another rank"));
    int32_t slot = -1;
    if (const auto it = machines.find(row.host); it != machines.end()) {
      const auto [first, end] = fabric.slots_of_machine[it->second];
      if (row.slot < end - first) slot = first + row.slot;
    }
    slot_of_rank.push_back(slot);
  }
  return slot_of_rank;
}

}  // namespace gtrain::topology
