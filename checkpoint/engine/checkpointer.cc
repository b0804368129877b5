// A checkpointer puts the parts together on the training thread: the directory (directory.h), what was
// registered (registration.h), restores (restorer.h), what this rank saves with (rank_saves.h) and when
// (save_schedule.h). Every decision that could differ between ranks (which checkpoint, is it whole, is the
// previous save done) is made once and spread over a communicator of our own, so a rank never restores, saves
// or skips alone. The writer thread makes no collective calls.
#include "checkpoint/engine/checkpointer.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/context.h"
#include "checkpoint/engine/directory.h"
#include "checkpoint/engine/mates.h"
#include "checkpoint/engine/near.h"
#include "checkpoint/engine/rank_saves.h"
#include "checkpoint/engine/registration.h"
#include "checkpoint/engine/replicas.h"
#include "checkpoint/engine/restorer.h"
#include "checkpoint/engine/save_schedule.h"
#include "checkpoint/engine/storage_error.h"
#include "checkpoint/plan/limits.h"

namespace gtrain::ckpt {
namespace {

constexpr int64_t kLostDirectory = 2;  // what rank 0 says instead of whether a save is due

class CheckpointerImpl final : public Checkpointer {
 public:
  CheckpointerImpl(Session* session, Settings settings, std::unique_ptr<Communicator> comm,
                   StoreFactory open_store)
      : comm_(std::move(comm)),
        context_(session, std::move(settings), comm_.get()),
        directory_(&context_, std::move(open_store)),
        state_(agree_.rank(), agree_.size()) {}

  absl::Status Start() override;
  absl::Status PrepareToSave() override;

  absl::Status AddReplicated(absl::string_view name, Memory memory, std::vector<int64_t> shape,
                             DType dtype) override {
    return state_.AddReplicated(name, memory, std::move(shape), dtype);
  }
  absl::Status AddSharded(absl::string_view name, Memory memory, std::vector<int64_t> shape,
                          const Sharding& sharding, DType dtype) override {
    return state_.AddSharded(name, memory, std::move(shape), sharding, dtype);
  }
  absl::Status AddBox(absl::string_view name, Memory memory, std::vector<int64_t> shape,
                      std::vector<int64_t> begin, std::vector<int64_t> local_shape, DType dtype) override {
    return state_.AddBox(name, memory, std::move(shape), begin, local_shape, dtype);
  }
  absl::Status AddPerRank(absl::string_view name, Memory memory, PerRankRule rule) override {
    return state_.AddPerRank(name, memory, rule);
  }
  absl::Status AddBytes(absl::string_view name, std::function<absl::StatusOr<std::string>()> save,
                        std::function<absl::Status(absl::string_view)> load, PerRankRule rule) override {
    return state_.AddBytes(name, std::move(save), std::move(load), rule);
  }
  absl::StatusOr<std::optional<RestoredStep>> Restore(const RestoreOptions& options) override;
  absl::StatusOr<bool> Save(int64_t step) override;
  void Fence() override;
  absl::StatusOr<bool> SaveIfDue(int64_t step, Communicator* comm) override;
  bool stop_agreed() const override { return stop_agreed_; }
  absl::Status Wait(absl::Duration timeout) override;
  bool misplaced() const override;
  std::optional<uint64_t> device() const override { return directory_.device(); }
  std::optional<int64_t> LastCommitted() const override;

 private:
  using Obstacle = RankSaves::Obstacle;

  // Returns `status`, which Restore or Save is about to return; an error of the storage is reported to the
  // head first.
  absl::Status Outward(const absl::Status& status);
  // Returns what a save came to. Unavailable is said of a generation, too, by who asks for another one then.
  absl::Status OfSave(const absl::Status& status) const;
  // Collective, once: nothing is registered afterwards.
  absl::Status Freeze();
  absl::Status CheckStep(int64_t step) const;
  // `kept`: SaveIfDue saved this step last, and on no rank has that failed.
  absl::Status AgreeToSave(int64_t step, Obstacle* obstacle, bool* kept);
  void SkipSave(int64_t step, Obstacle why);
  absl::Status CompareReplicasIfDue(int64_t step);
  void DropUnfenced();
  // Whether this rank would save now; rank 0 decides.
  bool Due(int64_t step) const;
  // How long the newest save took, beside training.
  absl::Duration Writing() const;

  const std::unique_ptr<Communicator> comm_;  // null with one rank
  CheckpointContext context_;
  Session* const session_ = context_.session;
  const Settings& settings_ = context_.settings;
  Agreement& agree_ = context_.agree;
  const RealClock clock_;
  Directory directory_;
  Registration state_;
  RankSaves saves_{&context_, &directory_, &state_};
  Restorer restorer_{&context_, &directory_, &state_, &saves_};
  SaveSchedule schedule_{&context_};
  bool frozen_ = false;
  bool told_storage_ = false;  // the head knows that the storage cannot be read
  bool storage_works_ = false;
  int64_t lowest_step_ = -1;  // that may be saved: saved or restored here before
  uint64_t skipped_ = 0;
  uint64_t begun_ = 0;  // saves that were not skipped
  bool stop_agreed_ = false;
  std::optional<int64_t> kept_step_;  // what the newest save is of, if SaveIfDue made it
};

absl::Status CheckpointerImpl::Start() {
  const absl::Status opened = directory_.Open();
  if (opened.ok() && settings_.near && !settings_.read_only)
    context_.near = OpenNear(*settings_.near, session_->job());
  schedule_.Opened();
  return Outward(opened);
}

absl::Status CheckpointerImpl::PrepareToSave() {
  if (settings_.read_only) return absl::OkStatus();
  GT_RETURN_IF_ERROR(Freeze());
  saves_.Start();
  return saves_.saver() == nullptr ? context_.Alive() : absl::OkStatus();
}

absl::Status CheckpointerImpl::Outward(const absl::Status& status) {
  if (!IsStorageError(status)) {
    // The generation that could not read it may have been the one before; or the checkpointer of an elastic
    // run, and then each rank has said so and takes it back.
    if (!status.ok()) return status;
    const bool another = (context_.generation > 1 && agree_.rank() == 0) || settings_.last_save;
    const bool first = !std::exchange(storage_works_, true) && another;
    if (std::exchange(told_storage_, false) || first) session_->ReportNote(kNoteStorage, "");
    return status;
  }
  // Refused before this job has ever reached its storage: a wrong key or bucket, which waiting does not mend.
  if (absl::IsPermissionDenied(status) && !settings_.newest) return status;
  told_storage_ = true;
  session_->ReportNote(kNoteStorage, std::string(status.message()));
  return StorageError(absl::UnavailableError(absl::StrCat(
      "the storage of checkpoints cannot be used now; nothing was taken for damage: ", status.message())));
}

absl::Status CheckpointerImpl::Freeze() {
  if (frozen_) return absl::OkStatus();
  GT_RETURN_IF_ERROR(state_.Freeze(&agree_, std::min(kFileBytesMax, directory_.store()->BytesMax())));
  GT_ASSIGN_OR_RETURN(context_.mates, FindMates(&agree_, settings_.node));
  if (!settings_.read_only) GT_RETURN_IF_ERROR(saves_.Prepare());
  frozen_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<RestoredStep>> CheckpointerImpl::Restore(const RestoreOptions& options) {
  kept_step_.reset();
  absl::StatusOr<std::optional<RestoredStep>> restored = std::nullopt;
  if (const absl::Status frozen = Freeze(); frozen.ok())
    restored = restorer_.Restore(options);
  else
    restored = frozen;
  lowest_step_ = std::max(lowest_step_, restorer_.own_step().value_or(-1));
  GT_RETURN_IF_ERROR(Outward(restored.status()));
  if (*restored) schedule_.Restored((*restored)->step);
  return restored;
}

absl::Status CheckpointerImpl::CheckStep(int64_t step) const {
  if (step < 0 || step > kStepMax)
    return absl::InvalidArgumentError(absl::StrCat("step ", step, " cannot be saved"));
  if (settings_.read_only)
    return absl::FailedPreconditionError("this checkpointer was opened read-only: nothing can be saved");
  if (step < lowest_step_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "step ", step, " cannot be saved behind step ", lowest_step_,
        ": a restore takes the highest step, so it would never be restored. Count steps over the whole "
        "training, not within an epoch"));
  }
  return absl::OkStatus();
}

absl::Status CheckpointerImpl::AgreeToSave(int64_t step, Obstacle* obstacle, bool* kept) {
  const Saver* const saver = saves_.saver();
  const absl::Status held = directory_.held();
  if (held.ok() && saver != nullptr && !saver->last_status().ok()) directory_.LookSoon();
  int64_t values[] = {static_cast<int64_t>(saves_.Look()), step, -step, held.ok() ? 0 : 1,
                      kept_step_ == step && (saver->busy() || saver->last_status().ok()) ? 0 : 1};
  GT_RETURN_IF_ERROR(agree_.Max(absl::MakeSpan(values)));
  if (values[3] != 0) return agree_.AllOk(held);
  if (values[1] != -values[2]) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks save different steps, from ", -values[2], " to ", values[1]));
  }
  *obstacle = static_cast<Obstacle>(values[0]);
  *kept = values[4] == 0;
  return absl::OkStatus();
}

void CheckpointerImpl::SkipSave(int64_t step, Obstacle why) {
  ++skipped_;
  const absl::string_view told =
      why == Obstacle::kNoRoom ? "a machine has no memory for a copy of the state (see checkpoint.memory_max)"
      : why == Obstacle::kStarting ? "the memory for it still holds a save of an earlier generation"
                                   : "an earlier save is still being written";
  if (agree_.rank() == 0) {
    LogWarning("checkpoint: step ", step, " is not saved, ", told, " (", skipped_, " skipped so far)",
               why == Obstacle::kNoRoom ? "" : "; save less often or to faster storage");
  }
  saves_.NoteLost(step, absl::StrCat("skipped, because ", told));
}

absl::StatusOr<bool> CheckpointerImpl::Save(int64_t step) {
  GT_RETURN_IF_ERROR(CheckStep(step));
  GT_RETURN_IF_ERROR(context_.Alive());
  GT_RETURN_IF_ERROR(Freeze());
  DropUnfenced();
  saves_.TakeStarted();
  if (saves_.none()) saves_.Start();
  Obstacle obstacle = Obstacle::kNone;
  bool kept = false;
  GT_RETURN_IF_ERROR(AgreeToSave(step, &obstacle, &kept));
  if (kept) return true;
  schedule_.Tried(step);
  if (obstacle != Obstacle::kNone) {
    SkipSave(step, obstacle);
    return false;
  }
  if (settings_.on_error == OnError::kFail)
    GT_RETURN_IF_ERROR(agree_.AllOk(OfSave(saves_.saver()->last_status())));
  saves_.MakeUsable();
  if (settings_.before_save) GT_RETURN_IF_ERROR(agree_.AllOk(settings_.before_save()));
  GT_RETURN_IF_ERROR(CompareReplicasIfDue(step));
  if (state_.has_tail()) GT_RETURN_IF_ERROR(agree_.AllOk(saves_.PrepareTail()));
  ++begun_;
  lowest_step_ = std::max(lowest_step_, step);
  kept_step_.reset();
  saves_.Begin(directory_.NameSave(step), schedule_.Reason(Writing()));
  if (!settings_.lazy) saves_.saver()->Fence();
  schedule_.GoesOn();
  return true;
}

void CheckpointerImpl::Fence() {
  if (saves_.saver() == nullptr || !saves_.saver()->copying()) return;
  const Instant begin = clock_.Now();
  saves_.saver()->Fence();
  schedule_.AddStall(clock_.Now() - begin);
}

void CheckpointerImpl::DropUnfenced() {
  if (saves_.DropUnfenced()) kept_step_.reset();
}

absl::Status CheckpointerImpl::CompareReplicasIfDue(int64_t step) {
  const VerifyReplicas& when = settings_.verify_replicas;
  const bool due = begun_ == 0 ? when.first : when.every && begun_ % static_cast<uint64_t>(*when.every) == 0;
  if (!due || agree_.size() == 1) return absl::OkStatus();
  return CompareReplicas(&agree_, state_.all(), state_.Data(), step);
}

absl::Duration CheckpointerImpl::Writing() const {
  return saves_.saver() == nullptr ? absl::ZeroDuration() : saves_.saver()->last_duration();
}

bool CheckpointerImpl::Due(int64_t step) const {
  const bool can = saves_.saver() != nullptr ? !saves_.saver()->busy() : saves_.none();
  return schedule_.Due(step, can, Writing());
}

absl::StatusOr<bool> CheckpointerImpl::SaveIfDue(int64_t step, Communicator* comm) {
  if (settings_.read_only)
    return absl::FailedPreconditionError("this checkpointer was opened read-only: nothing can be saved");
  DropUnfenced();
  saves_.TakeStarted();
  schedule_.LookAtNotice();
  const absl::Status held = directory_.held();
  // Both are what rank 0 says: ranks hear of a stop at different steps.
  int64_t words[] = {!held.ok() ? kLostDirectory : Due(step) ? 1 : 0, session_->StopRequested() ? 1 : 0};
  Communicator* const through = comm != nullptr ? comm : comm_.get();
  if (through != nullptr && through->size() > 1) {
    GT_RETURN_IF_ERROR(through->Broadcast(words, std::size(words), DType::kInt64, 0));
  }
  const int64_t due = words[0];
  stop_agreed_ = words[1] != 0;
  if (due == kLostDirectory) return agree_.AllOk(held);
  if (due == 0) {
    saves_.Warm();
    return false;
  }
  const bool noticed = session_->PreemptionNotice().has_value();
  GT_ASSIGN_OR_RETURN(const bool saved, Save(step));
  if (!saved) return false;
  schedule_.Saved(noticed, stop_agreed_);
  kept_step_ = step;
  return true;
}

absl::Status CheckpointerImpl::Wait(absl::Duration timeout) {
  DropUnfenced();
  if (saves_.saver() == nullptr) return absl::OkStatus();
  const Instant begin = clock_.Now();
  const absl::Status status = saves_.saver()->Wait(timeout);
  session_->CountStall(clock_.Now() - begin);
  return OfSave(status);
}

absl::Status CheckpointerImpl::OfSave(const absl::Status& status) const {
  return absl::IsUnavailable(status) && context_.Alive().ok() ? StorageError(status) : status;
}

// With on_error: fail the next save says what became of this one.
bool CheckpointerImpl::misplaced() const {
  const Saver* const saver = saves_.saver();
  return settings_.on_error != OnError::kFail && saver != nullptr && !saver->busy() &&
         !saver->last_status().ok() && directory_.held().ok() && directory_.claim_gone();
}

std::optional<int64_t> CheckpointerImpl::LastCommitted() const {
  const std::optional<int64_t> saved =
      saves_.saver() == nullptr ? std::nullopt : saves_.saver()->last_committed();
  return saved ? saved : restorer_.committed_step();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpointer>> MakeCheckpointer(Session* session,
                                                               std::unique_ptr<Communicator> comm,
                                                               const CheckpointOptions& options,
                                                               const Environment& environment,
                                                               const StoreFactory& open_store) {
  GT_ASSIGN_OR_RETURN(Settings settings, MergeSettings(options, environment));
  return std::make_unique<CheckpointerImpl>(session, std::move(settings), std::move(comm), open_store);
}

absl::StatusOr<std::unique_ptr<Checkpointer>> OpenCheckpointer(Session* session,
                                                               const CheckpointOptions& options,
                                                               const Environment& environment,
                                                               const StoreFactory& open_store) {
  GT_RETURN_IF_ERROR(MergeSettings(options, environment).status());  // before ranks wait for each other
  std::unique_ptr<Communicator> comm;
  if (session->world_size() > 1) {
    GT_ASSIGN_OR_RETURN(comm, session->MakeCommunicator());
  }
  GT_ASSIGN_OR_RETURN(auto checkpointer,
                      MakeCheckpointer(session, std::move(comm), options, environment, open_store));
  GT_RETURN_IF_ERROR(checkpointer->Start());
  return checkpointer;
}

}  // namespace gtrain::ckpt
