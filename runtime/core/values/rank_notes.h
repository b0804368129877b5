// The kinds of notes that ranks write about themselves, which rank, agent and head share. PURE.
#pragma once
#include <cstddef>

#include "absl/strings/string_view.h"

namespace gtrain::core {

// Notes of a rank about itself that people see in `gtrain status`; the newest of a kind counts. The kind is
// also AgentNote::kind.
inline constexpr char kCompressionNote[] = "compression";  // how gradients travel, as the program chose
inline constexpr char kRestoreNote[] = "restore";          // what the state was restored from
inline constexpr char kOwnerNote[] = "owner";              // whose the checkpoint directory is
// Says that the storage of the rank's checkpoints cannot be read, and why; empty: it can again. A rank that
// ends with this note has met a storage fault (FaultKind::kStorage).
inline constexpr char kStorageNote[] = "storage";
inline constexpr char kSavesNote[] = "saves";  // that saves since the newest commit came to nothing, and why
// Says that the log files of ranks cannot be written, and why; empty: they are again. The agent writes it.
inline constexpr char kLogsNote[] = "logs";
// Says where training is in its data; each is an event, from which `gtrain data audit` proves what was
// trained.
inline constexpr char kSamplesNote[] = "samples";
// Says what became of an actor; each is an event.
inline constexpr char kActorsNote[] = "actors";
constexpr bool IsRankNote(absl::string_view kind) {
  return kind == kCompressionNote || kind == kRestoreNote || kind == kOwnerNote || kind == kStorageNote ||
         kind == kSavesNote || kind == kLogsNote || kind == kSamplesNote || kind == kActorsNote;
}
inline constexpr size_t kRankNoteBytesMax = 400;

}  // namespace gtrain::core
