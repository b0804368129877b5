#include "checkpoint/engine/candidate_search.h"

#include <optional>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/storage_error.h"
#include "checkpoint/format/hash.h"

namespace gtrain::ckpt {

absl::Status CandidateSearch::List() {
  GT_ASSIGN_OR_RETURN(candidates_, ListCandidates());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Candidate>> CandidateSearch::ListCandidates() {
  GT_ASSIGN_OR_RETURN(const std::vector<SaveId> here, ListManifests(directory_.store()));
  std::vector<SaveId> there;
  if (settings_.resume == Resume::kUri) {
    GT_ASSIGN_OR_RETURN(port::BlobStore* const store, directory_.StoreOf(true));
    GT_ASSIGN_OR_RETURN(there, ListManifests(store));
  }
  return Candidates(settings_, directory_.next().epoch, here, there);
}

absl::StatusOr<bool> CandidateSearch::WasDeleted(const Candidate& gone) {
  constexpr int kListsMax = 3;
  GT_ASSIGN_OR_RETURN(port::BlobStore* const store, directory_.StoreOf(gone.elsewhere));
  const absl::Status there = ReadManifest(store, gone.id).status();
  if (there.ok() || absl::IsDataLoss(there)) return false;
  if (!absl::IsNotFound(there)) return there;
  if (lists_ == kListsMax) {
    return StorageError(
        absl::UnavailableError(absl::StrCat(WhereIs(*store, gone.id), " is listed and is not there")));
  }
  // A late commit of an earlier generation deleted it for something newer, and the list is out of date.
  GT_ASSIGN_OR_RETURN(candidates_, ListCandidates());
  ++lists_;
  LogInfo("checkpoint: step ", gone.id.step, " was deleted while it was looked at: looking again");
  return true;
}

void CandidateSearch::NoteDamage(const Candidate& candidate, absl::string_view what) {
  if (!damaged_ids_.insert(candidate.id).second) return;  // listed again meanwhile
  ++damaged_;
  committed_own_ |= !candidate.elsewhere && candidate.id.epoch == directory_.next().epoch;
  passed_over_.push_back(absl::StrCat("step ", candidate.id.step, ": ", what));
  LogError("checkpoint: step ", candidate.id.step, " (", ManifestKey(candidate.id),
           ") IS DAMAGED, falling back to the one before: ", what);
}

Choice CandidateSearch::Next() {
  if (!failed_.ok()) return {.status = failed_};
  while (!candidates_.empty()) {
    const Candidate candidate = candidates_.front();
    candidates_.erase(candidates_.begin());
    const absl::StatusOr<port::BlobStore*> store = directory_.StoreOf(candidate.elsewhere);
    if (!store.ok()) return {.status = store.status()};
    std::string text;
    auto read = ReadManifest(*store, candidate.id, &text);
    if (absl::IsNotFound(read.status()) && !candidate.elsewhere && candidate.id == settings_.newest) {
      // It was tried although it may not have been listed. Something newer may have taken its place.
      const absl::Status replaced = FindNewest(*store, candidate.id, absl::ZeroDuration(), context_.alive);
      if (!replaced.ok()) return {.status = replaced};
      continue;
    }
    if (absl::IsNotFound(read.status())) {
      if (const auto deleted = WasDeleted(candidate); !deleted.ok()) return {.status = deleted.status()};
      continue;
    }
    if (absl::IsDataLoss(read.status())) {
      NoteDamage(candidate, read.status().message());
      continue;
    }
    if (!read.ok()) return {.status = read.status()};
    Manifest* manifest = std::get_if<Manifest>(&*read);
    if (manifest == nullptr) {  // it never was a checkpoint
      const std::string& why = std::get<AbortMarker>(*read).reason;
      LogWarning("checkpoint: step ", candidate.id.step, " of generation ", candidate.id.generation,
                 " was given up by its writers: ", why);
      passed_over_.push_back(absl::StrCat("step ", candidate.id.step, ": given up by its writers: ", why));
      continue;
    }
    if (IsForeign(settings_, directory_.next().epoch, committed_own_, candidate, *manifest)) continue;
    committed_own_ |= !candidate.elsewhere && candidate.id.epoch == directory_.next().epoch;
    if (damaged_ > settings_.max_rollback) {
      return {.status = absl::DataLossError(absl::StrCat(
                  "step ", candidate.id.step, " would be resumed, but ", damaged_,
                  " newer checkpoints are damaged and checkpoint.max_rollback allows ",
                  settings_.max_rollback, " (", absl::StrJoin(passed_over_, "; "),
                  "). Nothing was deleted. Repair the storage, raise checkpoint.max_rollback, or launch with "
                  "--resume ",
                  candidate.id.step))};
    }
    return {.elsewhere = candidate.elsewhere,
            .id = candidate.id,
            .hash = Xxh3Hex(text),
            .manifest = std::move(*manifest)};
  }
  return {.none = true};
}

void CandidateSearch::CouldNotLoad(const Choice& choice, const absl::Status& why) {
  const Candidate candidate = {choice.elsewhere, choice.id};
  const absl::StatusOr<bool> deleted = WasDeleted(candidate);
  failed_ = deleted.status();
  if (deleted.ok() && !*deleted) NoteDamage(candidate, why.message());
}

// Says that there are checkpoints: a user who gave --fresh by mistake can stop before they are replaced.
std::string CandidateSearch::WhyNothing() const {
  const std::string none = absl::StrCat("no checkpoint is in ", directory_.store()->Describe());
  if (settings_.resume != Resume::kFresh) return none;
  constexpr size_t kCounted = 32;  // each is one read
  const absl::StatusOr<std::vector<SaveId>> ids = ListManifests(directory_.store());
  size_t committed = 0;
  for (size_t i = 0; ids.ok() && i < ids->size() && committed < kCounted; ++i) {
    const auto read = ReadManifest(directory_.store(), (*ids)[i]);
    if (read.ok() && std::holds_alternative<Manifest>(*read)) ++committed;
  }
  if (committed == 0) return none;
  return absl::StrCat("--fresh was given, and the ", committed, committed == kCounted ? " or more" : "",
                      committed == 1 ? " checkpoint that is in " : " checkpoints that are in ",
                      directory_.store()->Describe(), committed == 1 ? " is" : " are", " ignored");
}

}  // namespace gtrain::ckpt
