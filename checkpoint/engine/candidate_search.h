// Rank 0's search for the checkpoint to restore: which there are, in which order they are tried, and what is
// wrong with those that are passed over.
#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/engine/context.h"
#include "checkpoint/engine/directory.h"
#include "checkpoint/engine/resume.h"
#include "checkpoint/format/manifest.h"

namespace gtrain::ckpt {

// The checkpoint that rank 0 found to try next. `none`: nothing is left.
struct Choice {
  absl::Status status;
  bool elsewhere = false;
  SaveId id;
  std::string hash;  // of the manifest's text
  bool none = false;
  bool uncommitted = false;  // its manifest is not in the storage, all of it is near
  Manifest manifest;         // not spread: each rank reads it
  // Bytes that this rank read, and how many of them from copies on its machine and on others.
  uint64_t read_bytes = 0, own_bytes = 0, peer_bytes = 0;
};

// Of one restore. Other ranks have one, too, in which nothing is ever found.
class CandidateSearch {
 public:
  CandidateSearch(CheckpointContext* context, Directory* directory)
      : context_(*context), directory_(*directory) {}

  // Lists what there is to try. Errors are the storage's.
  absl::Status List();
  // Returns the newest that was not tried yet, if its writers committed it and the settings allow it. Its
  // status is DataLoss where that is older than checkpoint.max_rollback allows.
  Choice Next();
  // The ranks could not load `choice`: it is passed over as damaged, or was deleted meanwhile.
  void CouldNotLoad(const Choice& choice, const absl::Status& why);

  int damaged() const { return damaged_; }
  // For people: newer checkpoints and why not.
  const std::vector<std::string>& passed_over() const { return passed_over_; }
  // For people: why nothing was restored. Asks the storage.
  std::string WhyNothing() const;

 private:
  absl::StatusOr<std::vector<Candidate>> ListCandidates();
  // Whether the candidate was deleted; then the candidates are listed anew. False: its manifest is there, so
  // what is wrong with its files is damage. An error: the storage cannot say.
  absl::StatusOr<bool> WasDeleted(const Candidate& gone);
  void NoteDamage(const Candidate& candidate, absl::string_view what);

  CheckpointContext& context_;
  Directory& directory_;
  const Settings& settings_ = context_.settings;
  std::vector<Candidate> candidates_;
  int lists_ = 0;  // of candidates that turned out to be out of date
  int damaged_ = 0;
  std::set<SaveId> damaged_ids_;
  bool committed_own_ = settings_.newest.has_value();  // this run has committed something, damaged or not
  std::vector<std::string> passed_over_;
  absl::Status failed_;  // the storage cannot say what became of the last choice
};

}  // namespace gtrain::ckpt
