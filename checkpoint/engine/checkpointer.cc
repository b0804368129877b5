// The part of a checkpointer that runs on the training thread. Every decision that could differ between ranks
// (which checkpoint, is it whole, is the previous save done) is made once and spread over a communicator of
// our own, so a rank never restores, saves or skips alone. The writer thread makes no collective calls.
#include "checkpoint/engine/checkpointer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/available_memory.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/engine/agreement.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/chunk_share.h"
#include "checkpoint/engine/index_board.h"
#include "checkpoint/engine/lease.h"
#include "checkpoint/engine/near.h"
#include "checkpoint/engine/openings.h"
#include "checkpoint/engine/outside.h"
#include "checkpoint/engine/parts.h"
#include "checkpoint/engine/registration.h"
#include "checkpoint/engine/replicas.h"
#include "checkpoint/engine/resume.h"
#include "checkpoint/engine/saver.h"
#include "checkpoint/engine/settle.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/engine/storage_error.h"
#include "checkpoint/engine/uncommitted.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/plan/interval.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/port/writer_host.h"
#include "checkpoint/store/probe.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kVisibleWithin = absl::Seconds(30);  // a file of another machine, on a slow NFS
constexpr absl::Duration kVisiblePoll = absl::Milliseconds(20);
// Before the first save nobody knows what one costs.
constexpr absl::Duration kFirstAfter = absl::Seconds(30);
constexpr absl::Duration kNewestWithin = absl::Seconds(10);  // for a client of NFS that sees it late
constexpr int64_t kLostDirectory = 2;  // what rank 0 says instead of whether a save is due

void Pause(absl::Duration how_long) {
  Mutex mu;
  MutexLock lock(&mu);
  mu.AwaitFor(how_long, [] { return false; });
}

// Get that waits for what another rank is known to have written.
absl::StatusOr<std::string> GetVisible(port::BlobStore* store, const std::string& key, size_t bytes_max,
                                       absl::FunctionRef<absl::Status()> still_wanted) {
  const RealClock clock;
  const Instant deadline = clock.Now() + kVisibleWithin;
  while (true) {
    absl::StatusOr<std::string> text = store->Get(key, bytes_max);
    if (!absl::IsNotFound(text.status()) || clock.Now() >= deadline) return text;
    if (absl::Status alive = still_wanted(); !alive.ok()) return alive;
    Pause(kVisiblePoll);
  }
}

class CheckpointerImpl final : public Checkpointer {
 public:
  CheckpointerImpl(Session* session, Settings settings, std::unique_ptr<Communicator> comm,
                   StoreFactory open_store)
      : session_(session),
        generation_(session->generation()),
        timeline_(session->timeline()),
        settings_(std::move(settings)),
        comm_(std::move(comm)),
        open_store_(std::move(open_store)),
        agree_(comm_.get()),
        host_(session->writer_host()),
        state_(agree_.rank(), agree_.size()) {}

  ~CheckpointerImpl() override {
    ending_ = true;
    if (starting_.joinable()) starting_.join();
    if (!place_.empty()) LeavePlace(place_, next_.attempt + 1);
    // The job has another generation to come: the directory is not free meanwhile.
    if (lease_ != nullptr && !Alive().ok()) lease_->LeaveBehind();
  }
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
  std::optional<int64_t> LastCommitted() const override;

 private:
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

  // The state of a search for a checkpoint to restore; filled on rank 0.
  struct Search {
    Instant begun;
    std::vector<Candidate> candidates;
    int damaged = 0;
    std::set<SaveId> damaged_ids;
    bool committed_own = false;            // this run has committed something, damaged or not
    std::vector<std::string> passed_over;  // for people: newer checkpoints and why not
    absl::Status failed;                   // the storage cannot say what became of the last choice
  };

  // Of the generation in which this was made: its process may be a rank of a later one by now.
  absl::Status Alive() const {
    const absl::Status alive = session_->Alive();  // before the generation: another may be joined meanwhile
    if (session_->generation() == generation_) return alive;
    return absl::UnavailableError(absl::StrCat("generation ", generation_, " is over"));
  }
  absl::Status OpenDirectory();
  absl::Status ProveShared();
  absl::Status TakeOwnership();
  absl::Status HoldLease(uint64_t epoch, bool fresh);
  // Returns `status`, which Restore or Save is about to return; an error of the storage is reported to the
  // head first.
  absl::Status Outward(const absl::Status& status);
  absl::StatusOr<std::optional<RestoredStep>> RestoreNewest();
  absl::Status ListForRestore(Search* search);
  // nullopt: no candidate was left to try.
  absl::StatusOr<std::optional<RestoredStep>> RestoreFrom(Search* search);
  absl::StatusOr<std::optional<RestoredStep>> RestoreNothing(const Search& search);
  // nullopt: no earlier generation left a save that is whole near by, or its copies are bad.
  absl::StatusOr<std::optional<RestoredStep>> RestoreUncommitted(const Search& search);
  absl::Status Freeze();
  // Makes the saver, on this thread and however long an earlier generation's saves need its memory; or on one
  // of its own, until when saves are skipped.
  void StartSaver();
  void StartSaverSoon();
  void TakeStarted();
  CommitterConfig Commits() const;
  // Collective. The address of the board where this rank's writer meets that of rank 0; 0: in the storage.
  absl::StatusOr<int64_t> MeetOnBoard();
  std::unique_ptr<SaveRoute> MakeRoute();  // null: the checkpointer or its generation ends
  absl::StatusOr<std::vector<Candidate>> ListCandidates();
  std::string WhyNothing();  // was restored; asks the store
  Choice NextChoice(Search* search);
  // Whether the candidate was deleted; then the candidates are listed anew. False: its manifest is there, so
  // what is wrong with its files is damage. An error: the storage cannot say.
  absl::StatusOr<bool> WasDeleted(const Candidate& gone, Search* search);
  void NoteDamage(const Candidate& candidate, absl::string_view what, Search* search);
  absl::Status Spread(Choice* choice);
  absl::StatusOr<port::BlobStore*> StoreOf(bool elsewhere);
  absl::Status FindMates();
  absl::Status ReadChosen(Choice* choice, LoadPlan* plan, std::optional<NearShards>* near);
  // Collective; null where this rank reads everything itself.
  absl::StatusOr<std::unique_ptr<ChunkShare>> MeetMates(const Choice* choice);
  absl::Status LoadChosen(Choice* choice, LoadPlan* plan);
  absl::StatusOr<std::optional<RestoredStep>> Finish(const Choice& choice, const LoadPlan& plan,
                                                     const Search& search);
  void TellOfPlan(const Choice& choice, const LoadPlan& plan) const;
  std::string TellIfNotFinite(const Choice& choice, port::BlobStore* store) const;
  void DropUnfenced();
  // Why nothing can be saved now, on some rank: 0, or one of these.
  static constexpr int64_t kWriting = 1, kStarting = 2, kNoRoom = 3;
  // ResourceExhausted: the copies of the state of this machine's ranks have no room in its memory (fault
  // C12). OK for ever once they had: they are made then.
  absl::Status FindRoom();
  void NoteLostSave(int64_t step, absl::string_view why);
  // `kept`: SaveIfDue saved this step last, and on no rank has that failed.
  absl::Status AgreeToSave(int64_t step, int64_t* busy, bool* kept);
  absl::Status CompareReplicasIfDue(int64_t step);
  absl::Status PrepareTail();
  // Whether this rank would save now; rank 0 decides.
  bool Due(int64_t step) const;
  absl::Duration Every() const;
  // Chosen from what is known by now; only with a save behind us.
  Interval Chosen() const;
  void TellInterval();

  Session* const session_;
  const uint64_t generation_, timeline_;
  const std::function<absl::Status()> alive_ = [this] { return Alive(); };
  Settings settings_;
  const std::unique_ptr<Communicator> comm_;  // null with one rank
  const StoreFactory open_store_;
  Agreement agree_;
  port::WriterHost* const host_;  // of the session's; null: this process writes its saves itself
  const RealClock clock_;
  std::unique_ptr<port::BlobStore> store_;
  std::unique_ptr<port::BlobStore> elsewhere_;  // of resume_uri, when asked for
  std::unique_ptr<Lease> lease_;                // rank 0 of one that writes
  NearTiers near_;
  SaveId next_;        // epoch, timeline, generation, attempt of the next save
  std::string place_;  // taken (openings.h), of rank 0
  Registration state_;
  ShardPlan plan_;  // of this rank's saves, but for their tails
  bool frozen_ = false;
  // During Restore: state of ranks, as the plan has it (Registration::MemoryFor).
  std::vector<std::string> staged_;
  std::vector<std::string> may_be_missing_;
  std::vector<int> mates_;      // ranks on this machine, this one too; known once frozen
  bool any_mates_ = false;      // on any machine
  uint64_t machine_bytes_ = 0;  // of the copies of their state
  bool has_room_ = false;
  std::unique_ptr<IndexBoard> board_;  // rank 0, for writers outside
  int64_t board_address_ = 0;
  std::optional<SaveId> resumed_;         // what retention shall know of
  int lists_ = 0;                         // of candidates that turned out to be out of date
  std::optional<int64_t> restored_step_;  // the newest that is committed, as far as Restore saw
  bool touched_ = false;                  // during Restore: something was read into registered memory
  int64_t highest_step_ = -1;             // saved with the current attempt number
  int64_t lowest_step_ = -1;              // that may be saved: saved or restored here before
  bool told_storage_ = false;             // the head knows that the storage cannot be read
  bool storage_works_ = false;
  uint64_t skipped_ = 0;
  std::atomic<int> lost_saves_{0};  // rank 0: skipped or failed since the newest commit
  uint64_t begun_ = 0;              // saves that were not skipped
  Instant last_save_;
  bool saved_for_notice_ = false;
  bool saved_for_stop_ = false;
  bool stop_agreed_ = false;
  std::optional<int64_t> kept_step_;  // what the newest save is of, if SaveIfDue made it
  bool warmed_ = false;
  absl::Duration last_stall_;
  absl::Duration told_every_;     // the automatic interval that people were told of
  std::string policy_;            // and why, as of the newest save; changed while none runs
  std::unique_ptr<Saver> saver_;  // its thread uses what is above
  std::atomic<bool> ending_{false};
  Mutex start_mu_;
  std::unique_ptr<SaveRoute> started_ ABSL_GUARDED_BY(start_mu_);  // what starting_ made
  std::thread starting_;                                           // uses what is above
};

absl::Status CheckpointerImpl::Start() {
  const absl::Status opened = OpenDirectory();
  last_save_ = clock_.Now() - settings_.since_last_save;
  return Outward(opened);
}

absl::Status CheckpointerImpl::PrepareToSave() {
  if (settings_.read_only) return absl::OkStatus();
  GT_RETURN_IF_ERROR(Freeze());
  StartSaver();
  return saver_ == nullptr ? Alive() : absl::OkStatus();
}

absl::Status CheckpointerImpl::OpenDirectory() {
  absl::StatusOr<std::unique_ptr<port::BlobStore>> store = open_store_(settings_.uri);
  GT_RETURN_IF_ERROR(agree_.AllOk(store.status()));
  store_ = MarkStorageErrors(*std::move(store));
  settings_.identity.job = session_->job();
  if (settings_.read_only) {
    // Nothing here is ours, and everything is older than what we would write.
    next_ = {.epoch = kCounterMax, .timeline = timeline_, .generation = generation_};
    return absl::OkStatus();
  }
  if (settings_.near) near_ = OpenNear(*settings_.near, session_->job());
  // This comes before anything is written: an unmounted directory would get a claim of ours.
  absl::Status there;
  if (agree_.rank() == 0 && settings_.newest) {
    // A new owner of the directory may have deleted the checkpoints of this job.
    there = CheckStillOwned(store_.get(), settings_.identity, session_->managed());
    if (absl::IsFailedPrecondition(there)) session_->ReportNote(kNoteOwner, std::string(there.message()));
  }
  if (agree_.rank() == 0 && settings_.newest && there.ok()) {
    there = FindNewest(store_.get(), *settings_.newest, kNewestWithin, alive_);
  }
  GT_RETURN_IF_ERROR(agree_.AllOk(there));
  GT_RETURN_IF_ERROR(ProveShared());
  return TakeOwnership();
}

absl::Status CheckpointerImpl::Outward(const absl::Status& status) {
  if (!IsStorageError(status)) {
    // A generation that could not read it may have been the one before.
    if (!status.ok()) return status;
    const bool first = !std::exchange(storage_works_, true) && agree_.rank() == 0 && generation_ > 1;
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

absl::Status CheckpointerImpl::HoldLease(uint64_t epoch, bool fresh) {
  lease_.reset();
  lease_ = std::make_unique<Lease>(store_.get(), epoch, generation_, fresh, [this](const absl::Status& lost) {
    LogError("checkpoint: ", lost.message());
    session_->ReportNote(kNoteOwner, absl::StrCat("LOST: ", lost.message()));
  });
  return lease_->first();
}

absl::Status CheckpointerImpl::ProveShared() {
  Rng rng = Rng::FromSystem();
  std::string nonce = ProbeKey(absl::ToUnixSeconds(absl::Now()), rng.Next());
  absl::Status made;
  if (agree_.rank() == 0) {
    made = ProveExclusive(store_.get(), nonce);
  }
  const auto remove = absl::MakeCleanup([&] {
    if (agree_.rank() == 0) store_->Delete(nonce).IgnoreError();
  });
  GT_RETURN_IF_ERROR(agree_.AllOk(made));
  GT_RETURN_IF_ERROR(agree_.Broadcast(&nonce));
  const absl::StatusOr<std::string> seen = GetVisible(store_.get(), nonce, 1024, alive_);
  const absl::Status alive = Alive();
  const bool unreadable = alive.ok() && !seen.ok() && !absl::IsNotFound(seen.status());
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> sees, agree_.Gather(unreadable                    ? -1
                                                                     : seen.ok() && *seen == nonce ? 1
                                                                                                   : 0));
  GT_RETURN_IF_ERROR(alive);
  if (std::find(sees.begin(), sees.end(), -1) != sees.end())
    return agree_.AllOk(unreadable ? seen.status() : absl::OkStatus());
  std::vector<int> blind;
  for (size_t rank = 0; rank < sees.size(); ++rank) {
    if (sees[rank] == 0) blind.push_back(static_cast<int>(rank));
  }
  if (blind.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the checkpoint directory ", store_->Describe(), " is not shared: rank ", absl::StrJoin(blind, ", "),
      " cannot see what rank 0 writes there. Put it on a file system that all nodes mount at this path"));
}

absl::Status CheckpointerImpl::TakeOwnership() {
  next_ = {.timeline = timeline_, .generation = generation_};
  absl::Status status;
  std::string text;
  if (agree_.rank() == 0) {
    std::string taken_from;
    const LivenessCheck check{.alive = alive_};
    const absl::StatusOr<OwnerClaim> claim = TakeDirectory(
        store_.get(), settings_, session_->managed(), check, &taken_from,
        [this](uint64_t epoch, bool fresh) { return HoldLease(epoch, fresh); }, [this] { lease_.reset(); });
    status = claim.status();
    if (!claim.ok()) lease_.reset();
    // Somebody else's, or another job's checkpoints: people look for the reason in `gtrain status`.
    if (absl::IsFailedPrecondition(status)) session_->ReportNote(kNoteOwner, std::string(status.message()));
    if (claim.ok()) {
      next_.epoch = claim->epoch;
      if (!taken_from.empty()) {
        const std::string told = absl::StrCat(store_->Describe(), " was taken over from ", taken_from);
        LogWarning("checkpoint: ", told);
        session_->ReportNote(kNoteOwner, told);
      }
      absl::StatusOr<uint64_t> attempt = NextAttempt(store_.get(), next_);
      if (attempt.ok()) {
        const std::string place = PlaceOf(AbsoluteLocation(settings_.uri), next_);
        attempt = TakePlace(place, *attempt);
        if (attempt.ok()) place_ = place;
      }
      status = attempt.status();
      if (attempt.ok()) text = absl::StrCat(claim->epoch, " ", *attempt);
    }
  }
  GT_RETURN_IF_ERROR(agree_.AllOk(status));
  GT_RETURN_IF_ERROR(agree_.Broadcast(&text));
  const std::vector<std::string> parts = absl::StrSplit(text, ' ');
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &next_.epoch) ||
      !absl::SimpleAtoi(parts[1], &next_.attempt) || !IsValid(next_)) {
    return absl::InternalError(absl::StrCat("no valid owner epoch and attempt: \"", text, "\""));
  }
  return absl::OkStatus();
}

absl::Status CheckpointerImpl::Freeze() {
  if (frozen_) return absl::OkStatus();
  GT_RETURN_IF_ERROR(state_.Freeze(&agree_, std::min(kFileBytesMax, store_->BytesMax())));
  GT_RETURN_IF_ERROR(FindMates());
  if (settings_.read_only) {
    frozen_ = true;
    return absl::OkStatus();
  }
  GT_ASSIGN_OR_RETURN(board_address_, MeetOnBoard());
  plan_ = PlanShard(state_.all(), agree_.rank(), agree_.size());
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> bytes,
                      agree_.Gather(static_cast<int64_t>(plan_.data_bytes)));
  for (const int rank : mates_) machine_bytes_ += static_cast<uint64_t>(bytes[static_cast<size_t>(rank)]);
  frozen_ = true;
  return absl::OkStatus();
}

void CheckpointerImpl::StartSaver() {
  if (saver_ != nullptr || settings_.read_only) return;
  if (!starting_.joinable()) StartSaverSoon();
  starting_.join();
  TakeStarted();
}

void CheckpointerImpl::StartSaverSoon() {
  starting_ = std::thread([this] {
    std::unique_ptr<SaveRoute> route = MakeRoute();
    MutexLock lock(&start_mu_);
    started_ = std::move(route);
  });
}

void CheckpointerImpl::TakeStarted() {
  std::unique_ptr<SaveRoute> route;
  {
    MutexLock lock(&start_mu_);
    route = std::move(started_);
  }
  if (route == nullptr) return;
  if (starting_.joinable()) starting_.join();
  saver_ = std::make_unique<Saver>(
      std::move(route), plan_.header, state_.Sources(plan_),
      [this](const SaveId& id, const absl::Status& status) {
        if (!status.ok()) return NoteLostSave(id.step, status.message());
        session_->ReportCheckpoint(id.step, absl::StrCat(store_->Describe(), "/", ManifestKey(id)), policy_);
        if (lost_saves_.exchange(0) > 0) session_->ReportNote(kNoteSaves, "");
      },
      agree_.rank(), store_->Describe());
  if (resumed_) saver_->Resumed(*resumed_);
}

CommitterConfig CheckpointerImpl::Commits() const {
  return {.rank = agree_.rank(),
          .world_size = agree_.size(),
          .epoch = next_.epoch,
          .owner = settings_.identity,
          .registered = state_.all(),
          .keep = settings_.keep,
          .shard_tries = settings_.on_error == OnError::kRetry ? 4 : 1,
          .commit_timeout = settings_.commit_timeout,
          .alive = alive_,
          .may_commit = [this](const SaveId&, const std::vector<SaveId>&) { return Alive(); },
          .near = near_};
}

absl::StatusOr<int64_t> CheckpointerImpl::MeetOnBoard() {
  if (host_ != nullptr && agree_.rank() == 0) {
    auto made = IndexBoard::Make(agree_.size(), BoardName(settings_.identity.job, next_.epoch));
    if (made.ok()) board_ = *std::move(made);
  }
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> addresses,
                      agree_.Gather(board_ != nullptr ? board_->address() : 0));
  return mates_[0] == 0 ? addresses[0] : 0;
}

// Outside this process where there is somebody; each rank for itself, they meet in the storage and on the
// board.
std::unique_ptr<SaveRoute> CheckpointerImpl::MakeRoute() {
  if (host_ != nullptr) {
    const CommitterConfig config = Commits();
    SaveOrder order{
        .location = AbsoluteLocation(settings_.uri),
        .owner = config.owner,
        .epoch = config.epoch,
        .rank = config.rank,
        .world_size = config.world_size,
        .keep = config.keep,
        .shard_tries = config.shard_tries,
        .commit_timeout_ms = static_cast<uint64_t>(absl::ToInt64Milliseconds(config.commit_timeout))};
    for (const Registered& r : state_.all()) {
      order.tensors.push_back(r.tensor);
      order.bytes.push_back(r.bytes);
    }
    order.has_tail = state_.has_tail();
    const auto wanted = [this] { return !ending_ && Alive().ok(); };
    auto outside = OutsideRoute::Start(host_, order, plan_, board_address_, wanted);
    if (outside.ok()) return *std::move(outside);
    if (!wanted()) return nullptr;
    LogWarning(
        "checkpoint: rank ", agree_.rank(),
        " writes its saves itself, so a crash right after a save loses it: ", outside.status().message());
  }
  return std::make_unique<OwnRoute>(store_.get(), Commits());
}

absl::StatusOr<port::BlobStore*> CheckpointerImpl::StoreOf(bool elsewhere) {
  if (!elsewhere) return store_.get();
  if (elsewhere_ == nullptr) {
    GT_ASSIGN_OR_RETURN(std::unique_ptr<port::BlobStore> opened, open_store_(settings_.resume_uri));
    elsewhere_ = MarkStorageErrors(std::move(opened));
  }
  return elsewhere_.get();
}

absl::StatusOr<std::vector<Candidate>> CheckpointerImpl::ListCandidates() {
  GT_ASSIGN_OR_RETURN(const std::vector<SaveId> here, ListManifests(store_.get()));
  std::vector<SaveId> there;
  if (settings_.resume == Resume::kUri) {
    GT_ASSIGN_OR_RETURN(port::BlobStore* const store, StoreOf(true));
    GT_ASSIGN_OR_RETURN(there, ListManifests(store));
  }
  return Candidates(settings_, next_.epoch, here, there);
}

absl::StatusOr<bool> CheckpointerImpl::WasDeleted(const Candidate& gone, Search* search) {
  constexpr int kListsMax = 3;
  GT_ASSIGN_OR_RETURN(port::BlobStore* const store, StoreOf(gone.elsewhere));
  const absl::Status there = ReadManifest(store, gone.id).status();
  if (there.ok() || absl::IsDataLoss(there)) return false;
  if (!absl::IsNotFound(there)) return there;
  if (lists_ == kListsMax) {
    return StorageError(absl::UnavailableError(
        absl::StrCat(store->Describe(), "/", ManifestKey(gone.id), " is listed and is not there")));
  }
  // A late commit of an earlier generation deleted it for something newer, and the list is out of date.
  GT_ASSIGN_OR_RETURN(search->candidates, ListCandidates());
  ++lists_;
  LogInfo("checkpoint: step ", gone.id.step, " was deleted while it was looked at: looking again");
  return true;
}

void CheckpointerImpl::NoteDamage(const Candidate& candidate, absl::string_view what, Search* search) {
  if (!search->damaged_ids.insert(candidate.id).second) return;  // listed again meanwhile
  ++search->damaged;
  search->committed_own |= !candidate.elsewhere && candidate.id.epoch == next_.epoch;
  search->passed_over.push_back(absl::StrCat("step ", candidate.id.step, ": ", what));
  LogError("checkpoint: step ", candidate.id.step, " (", ManifestKey(candidate.id),
           ") IS DAMAGED, falling back to the one before: ", what);
}

CheckpointerImpl::Choice CheckpointerImpl::NextChoice(Search* search) {
  if (!search->failed.ok()) return {.status = search->failed};
  std::vector<Candidate>& candidates = search->candidates;
  while (!candidates.empty()) {
    const Candidate candidate = candidates.front();
    candidates.erase(candidates.begin());
    const absl::StatusOr<port::BlobStore*> store = StoreOf(candidate.elsewhere);
    if (!store.ok()) return {.status = store.status()};
    std::string text;
    auto read = ReadManifest(*store, candidate.id, &text);
    if (absl::IsNotFound(read.status()) && !candidate.elsewhere && candidate.id == settings_.newest) {
      // It was tried although it may not have been listed. Something newer may have taken its place.
      const absl::Status replaced = FindNewest(*store, candidate.id, absl::ZeroDuration(), alive_);
      if (!replaced.ok()) return {.status = replaced};
      continue;
    }
    if (absl::IsNotFound(read.status())) {
      if (const auto deleted = WasDeleted(candidate, search); !deleted.ok())
        return {.status = deleted.status()};
      continue;
    }
    if (absl::IsDataLoss(read.status())) {
      NoteDamage(candidate, read.status().message(), search);
      continue;
    }
    if (!read.ok()) return {.status = read.status()};
    Manifest* manifest = std::get_if<Manifest>(&*read);
    if (manifest == nullptr) {  // it never was a checkpoint
      const std::string& why = std::get<AbortMarker>(*read).reason;
      LogWarning("checkpoint: step ", candidate.id.step, " of generation ", candidate.id.generation,
                 " was given up by its writers: ", why);
      search->passed_over.push_back(
          absl::StrCat("step ", candidate.id.step, ": given up by its writers: ", why));
      continue;
    }
    if (IsForeign(settings_, next_.epoch, search->committed_own, candidate, *manifest)) continue;
    search->committed_own |= !candidate.elsewhere && candidate.id.epoch == next_.epoch;
    if (search->damaged > settings_.max_rollback) {
      return {.status = absl::DataLossError(absl::StrCat(
                  "step ", candidate.id.step, " would be resumed, but ", search->damaged,
                  " newer checkpoints are damaged and checkpoint.max_rollback allows ",
                  settings_.max_rollback, " (", absl::StrJoin(search->passed_over, "; "),
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

absl::Status CheckpointerImpl::Spread(Choice* choice) {
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

absl::Status CheckpointerImpl::ReadChosen(Choice* choice, LoadPlan* plan, std::optional<NearShards>* near) {
  GT_ASSIGN_OR_RETURN(port::BlobStore* const store, StoreOf(choice->elsewhere));
  if (agree_.rank() != 0 && !choice->uncommitted) {
    const std::string key = ManifestKey(choice->id);
    GT_ASSIGN_OR_RETURN(const std::string text, GetVisible(store, key, kManifestBytesMax, alive_));
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
  if (near_.own != nullptr && !choice->elsewhere) near->emplace(near_, choice->manifest);
  return CheckLengths(store, *near ? &**near : nullptr, choice->manifest, agree_.rank(), agree_.size());
}

absl::Status CheckpointerImpl::FindMates() {
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> keys, agree_.Gather(MachineKey(settings_.node)));
  mates_.clear();
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    if (keys[rank] == keys[static_cast<size_t>(agree_.rank())]) mates_.push_back(static_cast<int>(rank));
  }
  any_mates_ = std::set<int64_t>(keys.begin(), keys.end()).size() < keys.size();
  return absl::OkStatus();
}

// `choice`: null on a rank that cannot read it, so that nothing will be read at all.
absl::StatusOr<std::unique_ptr<ChunkShare>> CheckpointerImpl::MeetMates(const Choice* choice) {
  std::unique_ptr<ChunkShare> share;
  if (!any_mates_) return share;
  const auto said = [&](absl::StatusOr<std::unique_ptr<ChunkShare>> made) {
    if (made.ok())
      share = *std::move(made);
    else
      LogWarning("checkpoint: rank ", agree_.rank(),
                 " reads what others of its machine read as well: ", made.status().message());
  };
  const uint64_t chunks = choice != nullptr ? choice->manifest.chunk_count() : 0;
  const int mates = static_cast<int>(mates_.size());
  const bool first = mates_[0] == agree_.rank();
  if (first && mates > 1 && choice != nullptr) said(ChunkShare::Make(chunks, mates, choice->hash));
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> addresses,
                      agree_.Gather(share != nullptr ? share->address() : -1));
  const int64_t address = addresses[static_cast<size_t>(mates_[0])];
  if (!first && choice != nullptr && address >= 0)
    said(ChunkShare::Join(address, chunks, mates, choice->hash));
  return share;
}

// Each rank's own status is that of all in the end.
absl::Status CheckpointerImpl::LoadChosen(Choice* choice, LoadPlan* plan) {
  std::optional<NearShards> near;
  const absl::Status ready = ReadChosen(choice, plan, &near);
  NearShards* const copies = near ? &*near : nullptr;
  GT_ASSIGN_OR_RETURN(const std::unique_ptr<ChunkShare> share, MeetMates(ready.ok() ? choice : nullptr));
  if (share != nullptr) WantChunks(choice->manifest, *plan, copies, share.get());
  GT_RETURN_IF_ERROR(agree_.AllOk(ready));  // and all want what they want
  if (share != nullptr) share->Start();
  GT_ASSIGN_OR_RETURN(port::BlobStore* const store, StoreOf(choice->elsewhere));
  touched_ = true;
  staged_.clear();
  for (const BlobRead& blob : plan->blobs) staged_.emplace_back(blob.bytes, '\0');
  const absl::StatusOr<uint64_t> loaded =
      LoadShards(store, copies, share.get(), choice->manifest, *plan, alive_,
                 [this](size_t i) { return state_.MemoryFor(i, &staged_); });
  choice->read_bytes = loaded.value_or(0);
  choice->own_bytes = near ? near->own_bytes() : 0;
  choice->peer_bytes = near ? near->peer_bytes() : 0;
  return agree_.AllOk(loaded.status());
}

absl::StatusOr<std::optional<RestoredStep>> CheckpointerImpl::Restore(const RestoreOptions& options) {
  may_be_missing_ = options.may_be_missing;
  touched_ = false;
  kept_step_.reset();
  state_.KeepInitial(may_be_missing_);
  absl::StatusOr<std::optional<RestoredStep>> restored = RestoreNewest();
  staged_.clear();
  state_.ForgetInitial();
  const absl::Status told = Outward(restored.status());
  if (!told.ok()) return told;
  return restored;
}

absl::StatusOr<std::optional<RestoredStep>> CheckpointerImpl::RestoreUncommitted(const Search& search) {
  std::string key, text;
  absl::Status status;
  if (agree_.rank() == 0 && near_.own != nullptr && saver_ == nullptr && !starting_.joinable()) {
    const absl::StatusOr<std::optional<Manifest>> found =
        FindUncommitted(store_.get(), near_, next_, settings_.identity);
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
  absl::Status loaded = agree_.AllOk(
      near_.own != nullptr ? absl::OkStatus() : absl::NotFoundError("no copies are kept on this machine"));
  if (loaded.ok()) loaded = LoadChosen(&choice, &plan);
  if (loaded.ok()) return Finish(choice, plan, search);
  GT_RETURN_IF_ERROR(Alive());
  if (agree_.rank() == 0) {
    LogWarning("checkpoint: step ", choice.id.step, " of generation ", choice.id.generation,
               " cannot be resumed from copies near by, so its upload is waited for: ", loaded.message());
  }
  return std::nullopt;
}

absl::StatusOr<std::optional<RestoredStep>> CheckpointerImpl::RestoreNewest() {
  GT_RETURN_IF_ERROR(Freeze());
  if (saver_ != nullptr && saver_->busy())
    return absl::FailedPreconditionError("Restore while a save is being written: Wait() first");
  Search search{.begun = clock_.Now(), .committed_own = settings_.newest.has_value()};
  if (!settings_.read_only) {
    GT_ASSIGN_OR_RETURN(std::optional<RestoredStep> restored, RestoreUncommitted(search));
    if (restored) {
      if (saver_ == nullptr && !starting_.joinable()) StartSaverSoon();
      return restored;
    }
  }
  StartSaver();
  GT_RETURN_IF_ERROR(ListForRestore(&search));
  GT_ASSIGN_OR_RETURN(const std::optional<RestoredStep> restored, RestoreFrom(&search));
  return restored ? restored : RestoreNothing(search);
}

absl::Status CheckpointerImpl::ListForRestore(Search* search) {
  // Here every rank has its writer, so on no machine of this generation one of an earlier still needs its
  // memory.
  GT_RETURN_IF_ERROR(agree_.AllOk(absl::OkStatus()));
  absl::Status listed;
  if (agree_.rank() == 0) {
    if (host_ != nullptr && !settings_.read_only) listed = SettleEarlier(store_.get(), next_, alive_);
    absl::StatusOr<std::vector<Candidate>> found = ListCandidates();
    if (listed.ok()) listed = found.status();
    if (found.ok()) search->candidates = *std::move(found);
  }
  return agree_.AllOk(listed);
}

absl::StatusOr<std::optional<RestoredStep>> CheckpointerImpl::RestoreFrom(Search* search) {
  while (true) {
    Choice choice;
    if (agree_.rank() == 0) choice = NextChoice(search);
    GT_RETURN_IF_ERROR(Spread(&choice));
    if (choice.none) return std::nullopt;
    LoadPlan plan;
    const absl::Status all = LoadChosen(&choice, &plan);
    if (all.ok()) return Finish(choice, plan, *search);
    if (!absl::IsDataLoss(all) && !absl::IsNotFound(all)) return all;
    if (agree_.rank() != 0) continue;
    const Candidate candidate = {choice.elsewhere, choice.id};
    const absl::StatusOr<bool> deleted = WasDeleted(candidate, search);
    search->failed = deleted.status();
    if (deleted.ok() && !*deleted) NoteDamage(candidate, all.message(), search);
  }
}

// No candidate was left: training begins anew, or may not.
absl::StatusOr<std::optional<RestoredStep>> CheckpointerImpl::RestoreNothing(const Search& search) {
  int64_t damaged = search.damaged;
  GT_RETURN_IF_ERROR(agree_.Max(absl::MakeSpan(&damaged, 1)));
  if (damaged > 0) {
    return absl::DataLossError(
        absl::StrCat("none of the ", damaged, " checkpoints in ", store_->Describe(),
                     " is intact; start with --fresh to begin anew, nothing was deleted"));
  }
  if (touched_) {  // on all ranks alike
    return absl::UnavailableError(
        "the state was overwritten in part by copies that turned out to be bad, and no checkpoint is there: "
        "start again");
  }
  if (settings_.resume == Resume::kStep) {
    return absl::NotFoundError(absl::StrCat("there is no checkpoint of step ", settings_.resume_step, " in ",
                                            store_->Describe(), " (GTRAIN_RESUME)"));
  }
  if (settings_.resume == Resume::kUri) {
    return absl::NotFoundError(
        absl::StrCat("there is no such checkpoint in ", settings_.resume_uri, " (GTRAIN_RESUME)"));
  }
  if (settings_.read_only) {
    return absl::NotFoundError(absl::StrCat("there is no checkpoint in ", store_->Describe(),
                                            ", and a checkpointer that was opened read-only makes none"));
  }
  if (agree_.rank() == 0) {
    const std::string told = absl::StrCat("nothing: ", WhyNothing(), ", so training begins anew");
    LogInfo("checkpoint: restored ", told);
    session_->ReportNote(kNoteRestore, told);
  }
  return std::optional<RestoredStep>();
}

// Says that there are checkpoints: a user who gave --fresh by mistake can stop before they are replaced.
std::string CheckpointerImpl::WhyNothing() {
  const std::string none = absl::StrCat("no checkpoint is in ", store_->Describe());
  if (settings_.resume != Resume::kFresh) return none;
  constexpr size_t kCounted = 32;  // each is one read
  const absl::StatusOr<std::vector<SaveId>> ids = ListManifests(store_.get());
  size_t committed = 0;
  for (size_t i = 0; ids.ok() && i < ids->size() && committed < kCounted; ++i) {
    const auto read = ReadManifest(store_.get(), (*ids)[i]);
    if (read.ok() && std::holds_alternative<Manifest>(*read)) ++committed;
  }
  if (committed == 0) return none;
  return absl::StrCat("--fresh was given, and the ", committed, committed == kCounted ? " or more" : "",
                      committed == 1 ? " checkpoint that is in " : " checkpoints that are in ",
                      store_->Describe(), committed == 1 ? " is" : " are", " ignored");
}

// Logs, once for all ranks, where the plan differs from what was saved.
void CheckpointerImpl::TellOfPlan(const Choice& choice, const LoadPlan& plan) const {
  for (const std::string& orphans : plan.orphans) LogInfo("checkpoint: step ", choice.id.step, ": ", orphans);
  if (plan.missing.empty()) return;
  LogWarning("checkpoint: step ", choice.id.step, " lacks ", plan.missing.size(),
             " registered tensors that may be missing (\"",
             absl::StrJoin(plan.missing.begin(),
                           plan.missing.begin() + std::min<size_t>(plan.missing.size(), 20), "\", \""),
             plan.missing.size() > 20 ? "\"...)" : "\")", ": they keep their values");
}

// Logs that the checkpoint is not finite, and returns the text for the restore note. Rank 0 calls it.
std::string CheckpointerImpl::TellIfNotFinite(const Choice& choice, port::BlobStore* store) const {
  if (choice.manifest.finite()) return "";
  const FiniteAdvice advice = AdviceForNotFinite(store, choice.id, choice.id);
  const std::string told =
      absl::StrCat(advice.text, advice.finite ? absl::StrCat(": --resume ", advice.finite->step) : "");
  LogWarning("checkpoint: ", told);
  return absl::StrCat("; ", told);
}

absl::StatusOr<std::optional<RestoredStep>> CheckpointerImpl::Finish(const Choice& choice,
                                                                     const LoadPlan& plan,
                                                                     const Search& search) {
  state_.PutBackInitial(plan);
  GT_RETURN_IF_ERROR(agree_.AllOk(state_.Take(plan, std::move(staged_))));
  for (size_t i = 0; i < state_.all().size(); ++i) {
    const GlobalTensor& tensor = state_.all()[i].tensor;
    if (plan.restored[i] || tensor.layout != Layout::kPerRank) continue;
    LogInfo("checkpoint: rank ", agree_.rank(), " had no \"", tensor.name, "\" in step ", choice.id.step,
            " (written by ", choice.manifest.world_size, " ranks): it keeps its initial value");
  }
  if (agree_.rank() == 0) TellOfPlan(choice, plan);
  if (!choice.uncommitted)
    restored_step_ = choice.id.step;
  else if (settings_.newest)
    restored_step_ = settings_.newest->step;
  if (!choice.elsewhere) lowest_step_ = std::max(lowest_step_, choice.id.step);
  // The restored save may never be committed: then retention gets the newest committed one instead.
  if (!choice.elsewhere) resumed_ = choice.uncommitted ? settings_.newest : choice.id;
  if (saver_ != nullptr && resumed_) saver_->Resumed(*resumed_);
  GT_ASSIGN_OR_RETURN(port::BlobStore* const store, StoreOf(choice.elsewhere));
  RestoredStep out{.step = choice.id.step,
                   .timeline = choice.id.timeline,
                   .manifest = absl::StrCat(store->Describe(), "/", ManifestKey(choice.id)),
                   .bytes = plan.needed_bytes,
                   .bytes_read = choice.read_bytes,
                   .bytes_near = choice.own_bytes + choice.peer_bytes};
  const auto sum = [this](uint64_t mine) -> absl::StatusOr<std::string> {
    GT_ASSIGN_OR_RETURN(const std::vector<int64_t> all, agree_.Gather(static_cast<int64_t>(mine)));
    return PrintBytes(static_cast<uint64_t>(std::accumulate(all.begin(), all.end(), int64_t{0})));
  };
  GT_ASSIGN_OR_RETURN(const std::string stored, sum(out.bytes_read - out.bytes_near));
  GT_ASSIGN_OR_RETURN(const std::string own, sum(choice.own_bytes));
  GT_ASSIGN_OR_RETURN(const std::string peers, sum(choice.peer_bytes));
  if (agree_.rank() == 0) {
    LogInfo("checkpoint: resumed step ", out.step, " from ", out.manifest, ", written by ",
            choice.manifest.world_size, " ranks of job \"", choice.manifest.owner.job, "\"",
            search.damaged > 0 ? absl::StrCat("; ", search.damaged, " newer DAMAGED") : "",
            choice.uncommitted ? ", which is not committed yet" : "", ": all ranks read ", stored, " there, ",
            own, " of copies on their own machines and ", peers, " of copies on others");
    session_->ReportNote(
        kNoteRestore,
        absl::StrFormat(
            "step %d%s in %.2f s: %s from %s, %s from copies on the ranks' own machines%s, %s from copies on "
            "others%s%s",
            out.step, choice.uncommitted ? " (its upload had not ended)" : "",
            absl::ToDoubleSeconds(clock_.Now() - search.begun), stored, store->Describe(), own,
            settings_.near ? absl::StrCat(" (", settings_.near->folder, ")") : "", peers,
            search.passed_over.empty()
                ? ""
                : absl::StrCat("; passed over ", absl::StrJoin(search.passed_over, "; ")),
            TellIfNotFinite(choice, store)));
  }
  return std::optional<RestoredStep>(std::move(out));
}

// Rank 0 knows how the saves of all ranks ended. Called on the Saver's thread, or while it is idle.
void CheckpointerImpl::NoteLostSave(int64_t step, absl::string_view why) {
  if (agree_.rank() != 0) return;
  const int lost = ++lost_saves_;
  session_->ReportNote(
      kNoteSaves,
      absl::StrCat(lost, lost == 1 ? " save" : " saves",
                   " since the newest checkpoint came to nothing, the last of step ", step, ": ", why));
}

absl::Status CheckpointerImpl::FindRoom() {
  if (has_room_) return absl::OkStatus();
  const uint64_t available = AvailableMemory(), most = settings_.memory_max.value_or(available);
  has_room_ = machine_bytes_ <= std::min(available, most);
  if (has_room_) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the copies of the state of the ", mates_.size(), mates_.size() == 1 ? " rank" : " ranks",
                   " on this machine need ", PrintBytes(machine_bytes_), ", and ",
                   most < available ? absl::StrCat("checkpoint.memory_max allows ", PrintBytes(most))
                                    : absl::StrCat(PrintBytes(available), " of its memory are available")));
}

absl::Status CheckpointerImpl::AgreeToSave(int64_t step, int64_t* busy, bool* kept) {
  // A save that failed may have failed because the directory is no longer ours.
  const absl::Status held = lease_ == nullptr ? absl::OkStatus() : lease_->held();
  if (lease_ != nullptr && held.ok() && saver_ != nullptr && !saver_->last_status().ok()) lease_->LookSoon();
  const absl::Status room = FindRoom();
  if (!room.ok() && agree_.rank() == mates_[0])
    LogWarning("checkpoint: rank ", agree_.rank(), ": ", room.message());
  int64_t values[] = {!room.ok()          ? kNoRoom
                      : saver_ == nullptr ? kStarting
                      : saver_->busy()    ? kWriting
                                          : 0,
                      step, -step, held.ok() ? 0 : 1,
                      kept_step_ == step && (saver_->busy() || saver_->last_status().ok()) ? 0 : 1};
  GT_RETURN_IF_ERROR(agree_.Max(absl::MakeSpan(values)));
  if (values[3] != 0) return agree_.AllOk(held);
  if (values[1] != -values[2]) {
    return absl::FailedPreconditionError(
        absl::StrCat("ranks save different steps, from ", -values[2], " to ", values[1]));
  }
  *busy = values[0];
  *kept = values[4] == 0;
  return absl::OkStatus();
}

absl::StatusOr<bool> CheckpointerImpl::Save(int64_t step) {
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
  GT_RETURN_IF_ERROR(Alive());
  GT_RETURN_IF_ERROR(Freeze());
  DropUnfenced();
  TakeStarted();
  if (saver_ == nullptr && !starting_.joinable()) StartSaver();
  int64_t busy = 0;
  bool kept = false;
  GT_RETURN_IF_ERROR(AgreeToSave(step, &busy, &kept));
  if (kept) return true;
  last_save_ = clock_.Now();
  if (busy != 0) {
    ++skipped_;
    const absl::string_view why =
        busy == kNoRoom     ? "a machine has no memory for a copy of the state (see checkpoint.memory_max)"
        : busy == kStarting ? "the memory for it still holds a save of an earlier generation"
                            : "an earlier save is still being written";
    if (agree_.rank() == 0) {
      LogWarning("checkpoint: step ", step, " is not saved, ", why, " (", skipped_, " skipped so far)",
                 busy == kNoRoom ? "" : "; save less often or to faster storage");
    }
    NoteLostSave(step, absl::StrCat("skipped, because ", why));
    return false;
  }
  if (settings_.on_error == OnError::kFail) GT_RETURN_IF_ERROR(agree_.AllOk(saver_->last_status()));
  if (!saver_->usable()) {
    saver_->Replace(std::make_unique<OwnRoute>(store_.get(), Commits()));
    if (board_ != nullptr) board_->SetOpen(false);
  }
  if (settings_.before_save) GT_RETURN_IF_ERROR(agree_.AllOk(settings_.before_save()));
  GT_RETURN_IF_ERROR(CompareReplicasIfDue(step));
  if (state_.has_tail()) GT_RETURN_IF_ERROR(agree_.AllOk(PrepareTail()));
  ++begun_;
  if (step <= highest_step_) ++next_.attempt;  // a step saved before: its names are taken
  highest_step_ = step;
  lowest_step_ = std::max(lowest_step_, step);
  next_.step = step;
  kept_step_.reset();
  TellInterval();
  saver_->Start(next_);
  if (!settings_.lazy) saver_->Fence();
  last_stall_ = clock_.Now() - last_save_;
  session_->CountStall(last_stall_);
  return true;
}

void CheckpointerImpl::Fence() {
  if (saver_ == nullptr || !saver_->copying()) return;
  const Instant begin = clock_.Now();
  saver_->Fence();
  const absl::Duration more = clock_.Now() - begin;
  last_stall_ += more;
  session_->CountStall(more);
}

// Only Fence says that the state has not changed since Save. Any other end of a copy may come after a change,
// so the copied part may hold values of two steps.
void CheckpointerImpl::DropUnfenced() {
  if (saver_ == nullptr || !saver_->copying()) return;
  saver_->Drop();
  kept_step_.reset();
}

absl::Status CheckpointerImpl::CompareReplicasIfDue(int64_t step) {
  const VerifyReplicas& when = settings_.verify_replicas;
  const bool due = begun_ == 0 ? when.first : when.every && begun_ % static_cast<uint64_t>(*when.every) == 0;
  if (!due || agree_.size() == 1) return absl::OkStatus();
  return CompareReplicas(&agree_, state_.all(), state_.Data(), step);
}

// Not collective.
absl::Status CheckpointerImpl::PrepareTail() {
  GT_RETURN_IF_ERROR(state_.CollectTail());
  const ShardPlan plan = PlanShard(state_.all(), agree_.rank(), agree_.size(), state_.tail());
  return saver_->SetTail(state_.tail(), plan.header, state_.Sources(plan));
}

absl::Duration CheckpointerImpl::Every() const {
  if (settings_.every) return *settings_.every;
  return last_stall_ == absl::ZeroDuration() ? kFirstAfter : Chosen().every;
}

Interval CheckpointerImpl::Chosen() const {
  return ChooseInterval({.stall = last_stall_,
                         .writing = saver_->last_duration(),
                         .interruptions = static_cast<int>(generation_) - 1,
                         .observed = absl::Now() - settings_.job_began});
}

// Logged once it is chosen, and whenever it has become another by a quarter.
void CheckpointerImpl::TellInterval() {
  if (settings_.every || settings_.every_steps || last_stall_ == absl::ZeroDuration()) return;
  const Interval chosen = Chosen();
  policy_ = chosen.reason;
  if (agree_.rank() != 0 || (chosen.every < 1.25 * told_every_ && told_every_ < 1.25 * chosen.every)) return;
  told_every_ = chosen.every;
  LogInfo("checkpoint: saves are due ", policy_);
}

bool CheckpointerImpl::Due(int64_t step) const {
  // A machine is about to go: the others go on with a checkpoint that was committed after the notice (C13). A
  // save that began before the notice may finish.
  const bool can = saver_ != nullptr ? !saver_->busy() : !starting_.joinable();
  if (session_->PreemptionNotice() && !saved_for_notice_ && can) return true;
  if (session_->StopRequested() && !saved_for_stop_ && can) return true;
  if (settings_.every_steps) return step > 0 && step % *settings_.every_steps == 0;
  return clock_.Now() - last_save_ >= Every();
}

absl::StatusOr<bool> CheckpointerImpl::SaveIfDue(int64_t step, Communicator* comm) {
  if (settings_.read_only)
    return absl::FailedPreconditionError("this checkpointer was opened read-only: nothing can be saved");
  DropUnfenced();
  TakeStarted();
  if (!session_->PreemptionNotice()) saved_for_notice_ = false;  // one that was taken back
  const absl::Status held = lease_ == nullptr ? absl::OkStatus() : lease_->held();
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
    if (!warmed_ && saver_ != nullptr && FindRoom().ok()) {
      saver_->Warm();
      warmed_ = true;
    }
    return false;
  }
  const bool noticed = session_->PreemptionNotice().has_value();
  GT_ASSIGN_OR_RETURN(const bool saved, Save(step));
  if (noticed && saved) saved_for_notice_ = true;
  if (stop_agreed_ && saved) saved_for_stop_ = true;
  if (saved) kept_step_ = step;
  return saved;
}

absl::Status CheckpointerImpl::Wait(absl::Duration timeout) {
  DropUnfenced();
  if (saver_ == nullptr) return absl::OkStatus();
  const Instant begin = clock_.Now();
  const absl::Status status = saver_->Wait(timeout);
  session_->CountStall(clock_.Now() - begin);
  return status;
}

std::optional<int64_t> CheckpointerImpl::LastCommitted() const {
  const std::optional<int64_t> saved = saver_ == nullptr ? std::nullopt : saver_->last_committed();
  return saved ? saved : restored_step_;
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
