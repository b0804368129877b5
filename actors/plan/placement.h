// Where the next actor of an owner is made. PURE.
//
// Each owner decides for itself, and counts what it has made: nobody is asked. Owners that know nothing of
// each other begin behind themselves, so that they do not all begin with the same process.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"

namespace gtrain::actors {

// A process that can have actors.
struct Place {
  int rank = 0;
  absl::string_view node;
  size_t mine = 0;  // actors of this owner that it has
};

enum class Spread {
  kProcesses,  // the one with the fewest
  kNodes,      // the machine with the fewest, there the process with the fewest
  kPack,       // the owner's machine, there the process with the fewest
  kHere,       // the owner's process
};
inline constexpr uint8_t kSpreadMax = 3;

struct PlaceRules {
  bool strict = false;  // none that has one already, and no machine that has one where it is kNodes
  bool away = false;    // the owner's process only where there is no other
};

// The index in `places`, of which one is the owner's. None: there is no such place.
std::optional<size_t> PickPlace(const std::vector<Place>& places, Spread spread, int own_rank,
                                PlaceRules rules = {});
// The one of that rank.
std::optional<size_t> PlaceOfRank(const std::vector<Place>& places, int rank);

}  // namespace gtrain::actors
