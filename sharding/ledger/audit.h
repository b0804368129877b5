// The record of a run's data, and the proof from it that each sample was given out exactly once: that the
// ranges of the generations lie one behind the other. That a generation trained its range to the end nobody
// says but the one after it; what ranks reported meanwhile is compared with that.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "sharding/ledger/ledger.h"

namespace gtrain::sharding {

// Said by one rank of each generation when it begins to train, and once more at the end.
struct SampleRecord {
  std::string name;  // of the data: letters, digits, '_', '-' and '.'
  SampleOptions options;
  SampleCursor cursor;
  int ranks = 1;
  bool saved =
      true;  // the cursor is part of the state, in memory that outlives generations or in checkpoints
  bool operator==(const SampleRecord&) const = default;
};

inline constexpr size_t kSampleNameBytesMax = 64;
// InvalidArgument: empty, too long, or with a character that a record cannot hold.
absl::Status CheckSampleName(absl::string_view name);

// "train: step 200, epoch 1 of 3, sample 12800 of 60000, batches of 64, seed 1, shuffled, short last batch, 4
// ranks, part of the state". Epochs count from 0 there, too. At most 330 bytes.
std::string PrintSampleRecord(const SampleRecord& record);
// InvalidArgument: it is not what PrintSampleRecord writes.
absl::StatusOr<SampleRecord> ParseSampleRecord(absl::string_view text);

// The steps that somebody else than the record's writer knows of.
struct StepsReported {
  int64_t highest = 0;          // that ranks had reported when they stopped to train before a record
  std::optional<int64_t> more;  // as many more they can have made since; none: nobody knows
  int64_t own = 0;  // the last that those ranks are known to have reported, and not others before them
};

// A record and the generation that said it, in the order in which they were said.
struct SaidRecord {
  uint64_t generation = 0;
  SampleRecord record;
  std::optional<StepsReported> reported = std::nullopt;  // none: nothing is known
  std::optional<int64_t> then =
      std::nullopt;  // the highest step that the generation reported after it, if any
};

// The batches of a generation that are kept: from `from` to where the next kept range begins.
struct KeptRange {
  uint64_t generation = 0;
  int ranks = 1;
  SampleOptions options;
  SampleCursor from, to;
  std::optional<int64_t> reported =
      std::nullopt;  // the highest step that was reported when its ranks stopped
};

// As many steps at the end of a range nobody reported, so that only the record behind it says that they were
// trained. None: nothing is known of reports.
std::optional<int64_t> UnreportedSteps(const KeptRange& range);

struct SampleAudit {
  std::string name;
  std::vector<KeptRange> kept;
  // The newest cursor that was said. Without problems each sample of the epochs before it was given out once.
  SampleCursor reached;
  bool finished = false;              // it is the end
  std::vector<std::string> problems;  // each says generation, step and sample
};

// One audit for each name, in the order of their first records. A generation that begins before an earlier
// one went on from an older checkpoint: what that one trained from there on is gone with its state, and not
// kept. One that begins further than the ranks before it can have come is a problem.
std::vector<SampleAudit> AuditSamples(const std::vector<SaidRecord>& said);

}  // namespace gtrain::sharding
