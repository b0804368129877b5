#include "checkpoint/engine/restorer.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/parts.h"
#include "checkpoint/engine/settle.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/engine/uncommitted.h"
#include "checkpoint/format/hash.h"

namespace gtrain::ckpt {

Restorer::Restored Restorer::Restore(const RestoreOptions& options) {
  if (saves_.saver() != nullptr && saves_.saver()->busy())
    return absl::FailedPreconditionError("Restore while a save is being written: Wait() first");
  begun_ = clock_.Now();
  may_be_missing_ = options.may_be_missing;
  touched_ = false;
  state_.KeepInitial(may_be_missing_);
  Restored restored = RestoreNewest();
  staged_.clear();
  state_.ForgetInitial();
  return restored;
}

Restorer::Restored Restorer::RestoreNewest() {
  CandidateSearch search(&context_, &directory_);
  if (!settings_.read_only) {
    GT_ASSIGN_OR_RETURN(std::optional<RestoredStep> restored, RestoreUncommitted(search));
    if (restored) {
      saves_.StartSoon();
      return restored;
    }
  }
  saves_.Start();
  GT_RETURN_IF_ERROR(ListForRestore(&search));
  GT_ASSIGN_OR_RETURN(const std::optional<RestoredStep> restored, RestoreFrom(&search));
  return restored ? restored : RestoreNothing(search);
}

Restorer::Restored Restorer::RestoreUncommitted(const CandidateSearch& search) {
  std::string key, text;
  absl::Status status;
  if (agree_.rank() == 0 && context_.near.own != nullptr && saves_.none()) {
    const absl::StatusOr<std::optional<Manifest>> found =
        FindUncommitted(directory_.store(), context_.near, directory_.next(), settings_.identity);
    status = found.status();
    if (found.ok() && *found && (!settings_.newest || *settings_.newest < (*found)->id)) {
      key = ManifestKey((*found)->id);
      text = Print(**found);
    }
    if (text.size() > kManifestBytesMax) key.clear();
  }
  GT_RETURN_IF_ERROR(agree_.AllOk(status));
  GT_RETURN_IF_ERROR(agree_.Broadcast(&key));
  if (key.empty()) return std::nullopt;
  GT_RETURN_IF_ERROR(agree_.Broadcast(&text, 0, kManifestBytesMax));
  GT_ASSIGN_OR_RETURN(auto parsed, ParseManifest(key, text));
  Choice choice{.uncommitted = true, .manifest = std::get<Manifest>(std::move(parsed))};
  choice.id = choice.manifest.id;
  LoadPlan plan;
  absl::Status loaded =
      agree_.AllOk(context_.near.own != nullptr ? absl::OkStatus()
                                                : absl::NotFoundError("no copies are kept on this machine"));
  if (loaded.ok()) loaded = LoadChosen(&choice, &plan);
  if (loaded.ok()) return Finish(choice, plan, search);
  GT_RETURN_IF_ERROR(context_.Alive());
  if (agree_.rank() == 0) {
    LogWarning("checkpoint: step ", choice.id.step, " of generation ", choice.id.generation,
               " cannot be resumed from copies near by, so its upload is waited for: ", loaded.message());
  }
  return std::nullopt;
}

absl::Status Restorer::ListForRestore(CandidateSearch* search) {
  // Here every rank has its writer, so on no machine of this generation one of an earlier still needs its
  // memory.
  GT_RETURN_IF_ERROR(agree_.AllOk(absl::OkStatus()));
  absl::Status listed;
  if (agree_.rank() == 0) {
    if (session_->writer_host() != nullptr && !settings_.read_only)
      listed = SettleEarlier(directory_.store(), directory_.next(), context_.alive);
    if (listed.ok()) listed = search->List();
  }
  return agree_.AllOk(listed);
}

Restorer::Restored Restorer::RestoreFrom(CandidateSearch* search) {
  while (true) {
    Choice choice;
    if (agree_.rank() == 0) choice = search->Next();
    GT_RETURN_IF_ERROR(Spread(&choice));
    if (choice.none) return std::nullopt;
    LoadPlan plan;
    const absl::Status all = LoadChosen(&choice, &plan);
    if (all.ok()) return Finish(choice, plan, *search);
    if (!absl::IsDataLoss(all) && !absl::IsNotFound(all)) return all;
    if (agree_.rank() == 0) search->CouldNotLoad(choice, all);
  }
}

// No candidate was left: training begins anew, or may not.
Restorer::Restored Restorer::RestoreNothing(const CandidateSearch& search) {
  int64_t damaged = search.damaged();
  GT_RETURN_IF_ERROR(agree_.Max(absl::MakeSpan(&damaged, 1)));
  if (damaged > 0) {
    return absl::DataLossError(
        absl::StrCat("none of the ", damaged, " checkpoints in ", directory_.store()->Describe(),
                     " is intact; start with --fresh to begin anew, nothing was deleted"));
  }
  if (touched_) {  // on all ranks alike
    return absl::UnavailableError(
        "the state was overwritten in part by copies that turned out to be bad, and no checkpoint is there: "
        "start again");
  }
  if (settings_.resume == Resume::kStep) {
    return absl::NotFoundError(absl::StrCat("there is no checkpoint of step ", settings_.resume_step, " in ",
                                            directory_.store()->Describe(), " (GTRAIN_RESUME)"));
  }
  if (settings_.resume == Resume::kUri) {
    return absl::NotFoundError(
        absl::StrCat("there is no such checkpoint in ", settings_.resume_uri, " (GTRAIN_RESUME)"));
  }
  if (settings_.read_only) {
    return absl::NotFoundError(absl::StrCat("there is no checkpoint in ", directory_.store()->Describe(),
                                            ", and a checkpointer that was opened read-only makes none"));
  }
  if (agree_.rank() == 0) {
    const std::string told = absl::StrCat("nothing: ", search.WhyNothing(), ", so training begins anew");
    LogInfo("checkpoint: restored ", told);
    session_->ReportNote(kNoteRestore, told);
  }
  return std::optional<RestoredStep>();
}

absl::Status Restorer::Spread(Choice* choice) {
  GT_RETURN_IF_ERROR(agree_.AllOk(choice->status));
  std::string text;
  if (agree_.rank() == 0 && !choice->none) {
    text = absl::StrJoin(
        {choice->elsewhere ? std::string("1") : std::string("0"), ManifestKey(choice->id), choice->hash},
        " ");
  }
  GT_RETURN_IF_ERROR(agree_.Broadcast(&text));
  choice->none = text.empty();
  if (choice->none || agree_.rank() == 0) return absl::OkStatus();
  const std::vector<std::string> parts = absl::StrSplit(text, ' ');
  const std::optional<SaveId> id = parts.size() == 3 ? ParseManifestKey(parts[1]) : std::nullopt;
  if (!id) return absl::InternalError(absl::StrCat("rank 0 chose \"", text, "\", which is not a manifest"));
  choice->elsewhere = parts[0] == "1";
  choice->id = *id;
  choice->hash = parts[2];
  return absl::OkStatus();
}

absl::Status Restorer::ReadChosen(Choice* choice, LoadPlan* plan, std::optional<NearShards>* near) {
  GT_ASSIGN_OR_RETURN(port::BlobStore* const store, directory_.StoreOf(choice->elsewhere));
  if (agree_.rank() != 0 && !choice->uncommitted) {
    const std::string key = ManifestKey(choice->id);
    GT_ASSIGN_OR_RETURN(const std::string text, GetVisible(store, key, kManifestBytesMax, context_.alive));
    if (Xxh3Hex(text) != choice->hash)
      return absl::DataLossError(absl::StrCat(key, " is not what rank 0 read"));
    GT_ASSIGN_OR_RETURN(auto parsed, ParseManifest(key, text));
    if (!std::holds_alternative<Manifest>(parsed))
      return absl::DataLossError(absl::StrCat(key, " is an abort marker"));
    choice->manifest = std::get<Manifest>(std::move(parsed));
  }
  GT_RETURN_IF_ERROR(LoadPartsToRestore(store, state_.all(), agree_.rank(), agree_.size(), may_be_missing_,
                                        &choice->manifest));
  GT_ASSIGN_OR_RETURN(
      *plan, PlanLoad(choice->manifest, state_.all(), agree_.rank(), agree_.size(), may_be_missing_));
  GT_RETURN_IF_ERROR(state_.CheckKept(*plan));
  if (!plan->unknown.empty() && agree_.rank() == 0) {
    LogWarning("checkpoint: step ", choice->id.step, " holds ", plan->unknown.size(),
               " tensors that are not registered (\"", plan->unknown[0], "\"...): not restored");
  }
  // Names of attempts mean something in their own directory only.
  if (context_.near.own != nullptr && !choice->elsewhere) near->emplace(context_.near, choice->manifest);
  return CheckLengths(store, *near ? &**near : nullptr, choice->manifest, agree_.rank(), agree_.size());
}

// `choice`: null on a rank that cannot read it, so that nothing will be read at all.
absl::StatusOr<std::unique_ptr<ChunkShare>> Restorer::MeetMates(const Choice* choice) {
  std::unique_ptr<ChunkShare> share;
  if (!context_.mates.any) return share;
  const auto said = [&](absl::StatusOr<std::unique_ptr<ChunkShare>> made) {
    if (made.ok())
      share = *std::move(made);
    else
      LogWarning("checkpoint: rank ", agree_.rank(),
                 " reads what others of its machine read as well: ", made.status().message());
  };
  const uint64_t chunks = choice != nullptr ? choice->manifest.chunk_count() : 0;
  const int mates = static_cast<int>(context_.mates.ranks.size());
  const bool first = context_.mates.ranks[0] == agree_.rank();
  if (first && mates > 1 && choice != nullptr) said(ChunkShare::Make(chunks, mates, choice->hash));
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> addresses,
                      agree_.Gather(share != nullptr ? share->address() : -1));
  const int64_t address = addresses[static_cast<size_t>(context_.mates.ranks[0])];
  if (!first && choice != nullptr && address >= 0)
    said(ChunkShare::Join(address, chunks, mates, choice->hash));
  return share;
}

// Each rank's own status is that of all in the end.
absl::Status Restorer::LoadChosen(Choice* choice, LoadPlan* plan) {
  std::optional<NearShards> near;
  const absl::Status ready = ReadChosen(choice, plan, &near);
  NearShards* const copies = near ? &*near : nullptr;
  GT_ASSIGN_OR_RETURN(const std::unique_ptr<ChunkShare> share, MeetMates(ready.ok() ? choice : nullptr));
  if (share != nullptr) WantChunks(choice->manifest, *plan, copies, share.get());
  GT_RETURN_IF_ERROR(agree_.AllOk(ready));  // and all want what they want
  if (share != nullptr) share->Start();
  GT_ASSIGN_OR_RETURN(port::BlobStore* const store, directory_.StoreOf(choice->elsewhere));
  touched_ = true;
  staged_.clear();
  for (const BlobRead& blob : plan->blobs) staged_.emplace_back(blob.bytes, '\0');
  const absl::StatusOr<uint64_t> loaded =
      LoadShards(store, copies, share.get(), choice->manifest, *plan, context_.alive,
                 [this](size_t i) { return state_.MemoryFor(i, &staged_); });
  choice->read_bytes = loaded.value_or(0);
  choice->own_bytes = near ? near->own_bytes() : 0;
  choice->peer_bytes = near ? near->peer_bytes() : 0;
  return agree_.AllOk(loaded.status());
}

Restorer::Restored Restorer::Finish(const Choice& choice, const LoadPlan& plan,
                                    const CandidateSearch& search) {
  state_.PutBackInitial(plan);
  GT_RETURN_IF_ERROR(agree_.AllOk(state_.Take(plan, std::move(staged_))));
  for (size_t i = 0; i < state_.all().size(); ++i) {
    const GlobalTensor& tensor = state_.all()[i].tensor;
    if (plan.restored[i] || tensor.layout != Layout::kPerRank) continue;
    LogInfo("checkpoint: rank ", agree_.rank(), " had no \"", tensor.name, "\" in step ", choice.id.step,
            " (written by ", choice.manifest.world_size, " ranks): it keeps its initial value");
  }
  if (agree_.rank() == 0) TellOfPlan(choice, plan);
  NoteRestored(choice);
  GT_ASSIGN_OR_RETURN(port::BlobStore* const store, directory_.StoreOf(choice.elsewhere));
  RestoredStep out{.step = choice.id.step,
                   .timeline = choice.id.timeline,
                   .manifest = WhereIs(*store, choice.id),
                   .bytes = plan.needed_bytes,
                   .bytes_read = choice.read_bytes,
                   .bytes_near = choice.own_bytes + choice.peer_bytes};
  GT_RETURN_IF_ERROR(Tell(choice, out, search));
  return std::optional<RestoredStep>(std::move(out));
}

void Restorer::NoteRestored(const Choice& choice) {
  if (!choice.uncommitted)
    committed_step_ = choice.id.step;
  else if (settings_.newest)
    committed_step_ = settings_.newest->step;
  if (choice.elsewhere) return;
  own_step_ = choice.id.step;
  // The restored save may never be committed: then retention gets the newest committed one instead.
  saves_.Resumed(choice.uncommitted ? settings_.newest : choice.id);
}

absl::Status Restorer::Tell(const Choice& choice, const RestoredStep& restored,
                            const CandidateSearch& search) {
  const auto sum = [this](uint64_t mine) -> absl::StatusOr<std::string> {
    GT_ASSIGN_OR_RETURN(const std::vector<int64_t> all, agree_.Gather(static_cast<int64_t>(mine)));
    return PrintBytes(static_cast<uint64_t>(std::accumulate(all.begin(), all.end(), int64_t{0})));
  };
  GT_ASSIGN_OR_RETURN(const std::string stored, sum(restored.bytes_read - restored.bytes_near));
  GT_ASSIGN_OR_RETURN(const std::string own, sum(choice.own_bytes));
  GT_ASSIGN_OR_RETURN(const std::string peers, sum(choice.peer_bytes));
  if (agree_.rank() != 0) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(port::BlobStore* const store, directory_.StoreOf(choice.elsewhere));
  LogInfo("checkpoint: resumed step ", restored.step, " from ", restored.manifest, ", written by ",
          choice.manifest.world_size, " ranks of job \"", choice.manifest.owner.job, "\"",
          search.damaged() > 0 ? absl::StrCat("; ", search.damaged(), " newer DAMAGED") : "",
          choice.uncommitted ? ", which is not committed yet" : "", ": all ranks read ", stored, " there, ",
          own, " of copies on their own machines and ", peers, " of copies on others");
  session_->ReportNote(
      kNoteRestore,
      absl::StrFormat(
          "step %d%s in %.2f s: %s from %s, %s from copies on the ranks' own machines%s, %s from copies on "
          "others%s%s",
          restored.step, choice.uncommitted ? " (its upload had not ended)" : "",
          absl::ToDoubleSeconds(clock_.Now() - begun_), stored, store->Describe(), own,
          settings_.near ? absl::StrCat(" (", settings_.near->folder, ")") : "", peers,
          search.passed_over().empty()
              ? ""
              : absl::StrCat("; passed over ", absl::StrJoin(search.passed_over(), "; ")),
          TellIfNotFinite(choice, store)));
  return absl::OkStatus();
}

// Logs, once for all ranks, where the plan differs from what was saved.
void Restorer::TellOfPlan(const Choice& choice, const LoadPlan& plan) const {
  for (const std::string& orphans : plan.orphans) LogInfo("checkpoint: step ", choice.id.step, ": ", orphans);
  if (plan.missing.empty()) return;
  LogWarning("checkpoint: step ", choice.id.step, " lacks ", plan.missing.size(),
             " registered tensors that may be missing (\"",
             absl::StrJoin(plan.missing.begin(),
                           plan.missing.begin() + std::min<size_t>(plan.missing.size(), 20), "\", \""),
             plan.missing.size() > 20 ? "\"...)" : "\")", ": they keep their values");
}

// Logs that the checkpoint is not finite, and returns the text for the restore note. Rank 0 calls it.
std::string Restorer::TellIfNotFinite(const Choice& choice, port::BlobStore* store) const {
  if (choice.manifest.finite()) return "";
  const FiniteAdvice advice = AdviceForNotFinite(store, choice.id, choice.id);
  const std::string told =
      absl::StrCat(advice.text, advice.finite ? absl::StrCat(": --resume ", advice.finite->step) : "");
  LogWarning("checkpoint: ", told);
  return absl::StrCat("; ", told);
}

}  // namespace gtrain::ckpt
