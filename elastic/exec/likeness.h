// What the ranks of a run must have alike, since nothing else would tell that they have not: one sum of
// gradients would be divided by two sizes of a batch, or state would land in another tensor of the same size.
// Each rank tells the hashes with its greeting (elastic/plan/greeting.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/port/communicator.h"
#include "elastic/plan/greeting.h"
#include "gtrain/sharding.h"
#include "gtrain/types.h"
#include "sharding/ledger/ledger.h"

namespace gtrain::elastic {

class Likeness {
 public:
  // `shape` is that of the whole; `cut` null: each rank has all of it.
  void AddState(const std::string& name, DType dtype, absl::Span<const int64_t> shape, const Sharding* cut);
  // Of ranks that hold the same part of the model.
  void AddGradient(size_t count);
  void SetSamples(const std::string& name, const sharding::SampleOptions& options);
  // What the bits of `elastic.determinism: bitwise` depend on; empty: they are not asked for.
  void SetMachine(std::string machine) { machine_ = std::move(machine); }

  LikenessHashes hashes() const;
  // Collective. `all`: of all ranks. `sources`: the rank with which each of them is compared, which for
  // gradients is of the same part of the model. `source`: the one for all else. Costs nothing where they are
  // alike, else two broadcasts of 16 KiB. FailedPrecondition on the ranks that differ: it names them and the
  // first thing that does. Unavailable on all others: they cannot go on with those, and may in another
  // generation.
  absl::Status Check(Communicator& comm, absl::Span<const LikenessHashes> all, int source,
                     absl::Span<const int> sources) const;

 private:
  std::vector<std::string> state_, gradients_;
  std::string samples_, machine_;
};

}  // namespace gtrain::elastic
