// Cells: which part of the model a process holds, where `mesh` spreads a copy of it over several ranks. PURE.
// Private to runtime/core/head.
//
// With a mesh of `unit` ranks a copy, rank r is of cell r % unit. A process keeps its cell as long as it
// lives (`elastic.mode: in-place`): its memory has that part and no other. Processes that have never been
// members are free: they become whatever is lacking. Without a mesh there is one cell, and all are of it.
//
// Nothing here blocks or has a state. For r ranks and w that wait a call takes O((r + w) log r), but
// SortByCell O(r log r + new ones x unit) and a number for each cell and node: 28 ms for 8,192 ranks in
// copies of 8.
#pragma once
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "runtime/core/head/job.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// The cell of the process with this number in the grant; nullopt: it is free.
std::optional<int> CellOf(const GenerationGrant& grant, int number, int unit);

// How many whole copies these processes make, `most` at most.
int CopiesOf(absl::Span<const std::optional<int>> cells, int unit, int most);

// Copies may lack more than free ones can be: the last of those whose cell there is enough of lose their
// process, and another one is started in their place. There are `copies` x `unit` places at least.
void FreeSurplus(const std::vector<size_t>& order, int unit, int copies, std::vector<RankPlace>& places);

// Which of `places` become members of `copies` copies: for each cell the first that holds it, then the first
// that are free. `order` are indices into places; those who hold no cell and have no process count as free.
std::vector<bool> ChooseByCell(const std::vector<RankPlace>& places, const std::vector<size_t>& order,
                               int unit, int copies);

// Sorts members so that the process of each holds the cell of its rank, its index; free ones take what is
// lacking, on their own node first. Who was a member keeps its copy, where it can. `last`: may be null.
void SortByCell(const GenerationGrant* last, int unit, std::vector<RankPlace>& members);

}  // namespace gtrain::core
