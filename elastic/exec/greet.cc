#include "elastic/exec/greet.h"

#include <algorithm>
#include <map>
#include <optional>

#include "base/status_macros.h"

namespace gtrain::elastic {

absl::StatusOr<Greeted> Greet(Communicator& comm, Greeting own) {
  own.machine = comm.machine();
  const GreetingWords mine = WriteGreeting(own);
  std::vector<GreetingWords> words(static_cast<size_t>(comm.size()));
  GT_RETURN_IF_ERROR(comm.AllGather(mine.data(), words.data(), mine.size(), DType::kInt64));
  Greeted all;
  std::optional<Greeting::Save> newest;
  for (const GreetingWords& of_rank : words) {
    const Greeting member = ReadGreeting(of_rank);
    all.members.push_back(member.state);
    all.machines.push_back(member.machine);
    all.computed.push_back(member.computed);
    all.likeness.push_back(member.likeness);
    all.stop = all.stop || member.stop;
    all.carriers += member.carries_over ? 1 : 0;
    if (member.save && (!newest || member.save->milliseconds_ago < newest->milliseconds_ago))
      newest = member.save;
  }
  if (newest) all.newest = *newest;
  return all;
}

absl::Status CheckLikeness(const Likeness& likeness, Communicator& comm, const Greeted& all,
                           const Agreement& agreement, const std::vector<int>& cells) {
  const auto lowest_of = [&](int cell) {
    const auto it = std::ranges::find(cells, cell);
    return static_cast<int>(it - cells.begin());
  };
  std::map<int, int> sources;
  for (const int cell : cells) {
    if (sources.contains(cell)) continue;
    const int source = agreement.sources[static_cast<size_t>(cell)];
    const bool own = source >= 0 && cells[static_cast<size_t>(source)] == cell;
    sources[cell] = own ? source : lowest_of(cell);
  }
  std::vector<int> by_rank;
  for (const int cell : cells) by_rank.push_back(sources[cell]);
  return likeness.Check(comm, all.likeness, std::max(agreement.source(), 0), by_rank);
}

}  // namespace gtrain::elastic
