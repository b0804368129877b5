// A save that was asked for is repeated whole by the next writer when one dies in the middle: every put
// creates a key that this attempt alone has, so what is there already is verified and taken up. `finished` is
// written before the rank hears of it, so a save that the rank knows to be over, and whose memory it fills
// anew, is never repeated.
#include "checkpoint/engine/outside.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/near.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kReadyWithin = absl::Minutes(1);
constexpr absl::Duration kLookEvery =
    absl::Milliseconds(100);  // for a stop, and should a bell have been missed
constexpr absl::Duration kIdleLook = absl::Seconds(1);
constexpr absl::Duration kPatienceOnTop =
    absl::Minutes(6);  // of commit_timeout: for the call that is out then
constexpr int kRefusedCode = 3;

}  // namespace

// ------------------------------------------------------------------ the rank

absl::StatusOr<std::unique_ptr<OutsideRoute>> OutsideRoute::Start(port::WriterHost* host,
                                                                  const SaveOrder& order,
                                                                  const ShardPlan& plan, int64_t board,
                                                                  absl::FunctionRef<bool()> wanted) {
  const std::string text = Print(order);
  // The size of the largest save: with a tail each save may have other bytes.
  const uint64_t more = order.has_tail ? kByteEntriesMax : 0;
  const uint64_t file_bytes = plan.file_bytes() + more;
  const uint64_t bytes = SaveArena::BytesFor(text.size(), file_bytes, order.has_tail);
  const absl::Duration commit_timeout = absl::Milliseconds(order.commit_timeout_ms);
  GT_ASSIGN_OR_RETURN(port::WriterLink link, host->StartWriter(bytes, commit_timeout, wanted));
  GT_ASSIGN_OR_RETURN(SaveArena arena, SaveArena::Map(std::move(link.arena)));
  if (arena.bytes() < bytes)
    return absl::InternalError("the keeper gave less shared memory than was asked for");
  std::unique_ptr<OutsideRoute> route(new OutsideRoute(std::move(arena), std::move(link.channel), order.rank,
                                                       commit_timeout + kPatienceOnTop));
  route->arena_.header()->board.store(board, std::memory_order_relaxed);
  route->arena_.PutOrder(text, plan.header.size(), file_bytes, order.has_tail);
  GT_ASSIGN_OR_RETURN(route->data_, route->arena_.Data(plan.data_bytes + more));
  route->bell_.Ring();
  GT_RETURN_IF_ERROR(route->AwaitReady(wanted));
  return route;
}

absl::Status OutsideRoute::AwaitReady(absl::FunctionRef<bool()> wanted) {
  const Instant deadline = clock_.Now() + kReadyWithin;
  const SaveArenaHeader& header = *arena_.header();
  while (header.state.load(std::memory_order_acquire) == WriterState::kStarting) {
    if (bell_.gone()) return absl::UnavailableError("the writer could not be started; keeper.log says why");
    if (!wanted()) return absl::CancelledError("no writer is wanted any more");
    if (clock_.Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("the writer was not ready within ", absl::FormatDuration(kReadyWithin)));
    }
    bell_.Wait(kLookEvery);
  }
  if (header.state.load() == WriterState::kRefused)
    return absl::FailedPreconditionError(absl::StrCat("the writer refused: ", TakeText(header.message)));
  return absl::OkStatus();
}

void OutsideRoute::Resumed(const SaveId& id) {
  PutText(ManifestKey(id), absl::MakeSpan(arena_.header()->resumed));
}

void OutsideRoute::SetCopying(bool copying) {
  arena_.header()->copying.store(copying ? 1 : 0, std::memory_order_relaxed);
}

void OutsideRoute::Begin(const SaveId& id, const std::vector<HashBytes>& hashes) {
  SaveArenaHeader* header = arena_.header();
  arena_.PutHashes(hashes);
  PutText(ManifestKey(id), absl::MakeSpan(header->request));
  header->requested.fetch_add(1, std::memory_order_release);
  bell_.Ring();
}

void OutsideRoute::NoteStarts() {
  const uint32_t starts = arena_.header()->starts.load(std::memory_order_relaxed);
  if (starts == starts_) return;
  LogWarning("checkpoint: the writer of this rank's saves was killed; another one goes on with its work (",
             starts - 1, " killed so far)");
  starts_ = starts;
}

std::optional<absl::Status> OutsideRoute::Finish(const SaveId& id, StopFlag* stop,
                                                 absl::FunctionRef<void()> committed) {
  const SaveArenaHeader& header = *arena_.header();
  const Instant deadline = clock_.Now() + patience_;
  while (header.finished.load(std::memory_order_acquire) !=
         header.requested.load(std::memory_order_relaxed)) {
    NoteStarts();
    if (stop->set()) return std::nullopt;
    if (bell_.gone() || clock_.Now() >= deadline) {
      if (header.finished.load(std::memory_order_acquire) == header.requested.load()) break;
      usable_ = false;
      return absl::UnavailableError(
          absl::StrCat("the writer outside this process ",
                       bell_.gone() ? "was killed again and again (keeper.log says how)" : "does not answer",
                       "; from now on this rank writes its saves itself"));
    }
    bell_.Wait(kLookEvery);
  }
  NoteStarts();
  const std::string said = TakeText(header.message);
  absl::Status status(static_cast<absl::StatusCode>(header.code), said);
  if (status.ok()) committed();
  if (status.ok() && !said.empty()) LogWarning("checkpoint: rank ", rank_, ": step ", id.step, ": ", said);
  return status;
}

bool OutsideRoute::usable() {
  bell_.Look();
  return usable_ && !bell_.gone();
}

// ------------------------------------------------------------------ the writer

namespace {

// The objects that a writer saves with, made from the order.
struct Work {
  std::unique_ptr<port::BlobStore> store;
  std::unique_ptr<Committer> committer;
  absl::string_view data;
};

class Writer {
 public:
  Writer(SaveArena arena, UniqueFd channel, const std::optional<NearPlace>& near)
      : arena_(std::move(arena)), bell_(std::move(channel)), near_(near) {}

  int Run(const StoreFactory& open_store) {
    const bool first = arena_.header()->starts.fetch_add(1) == 0;
    while (arena_.header()->order_bytes.load(std::memory_order_acquire) == 0) {
      if (bell_.gone()) return 0;
      bell_.Wait(kIdleLook);
    }
    const absl::Status prepared = Prepare(open_store);
    if (!prepared.ok()) return Refuse(prepared, first);
    if (!first && arena_.header()->released.load() != 0) work_.committer->ShardIsWritten();
    arena_.header()->state.store(WriterState::kReady, std::memory_order_release);
    bell_.Ring();
    Serve();
    return 0;
  }

 private:
  absl::Status Prepare(const StoreFactory& open_store) {
    GT_ASSIGN_OR_RETURN(const std::string text, arena_.Order());
    GT_ASSIGN_OR_RETURN(order_, ParseSaveOrder(text));
    CommitterConfig config{.rank = order_.rank,
                           .world_size = order_.world_size,
                           .epoch = order_.epoch,
                           .owner = order_.owner,
                           .keep = order_.keep,
                           .shard_tries = order_.shard_tries,
                           .commit_timeout = absl::Milliseconds(order_.commit_timeout_ms)};
    for (size_t i = 0; i < order_.tensors.size(); ++i) {
      const bool per_rank = order_.tensors[i].layout == Layout::kPerRank;
      config.registered.push_back(
          {.tensor = order_.tensors[i], .bytes = order_.bytes[i], .any_length = order_.has_tail && per_rank});
    }
    config.alive = [this] {
      Release();
      return absl::OkStatus();  // whatever became of the rank and its generation
    };
    config.may_commit = &HistoryStands;
    config.copying = [this] { return arena_.header()->copying.load(std::memory_order_relaxed) != 0; };
    GT_ASSIGN_OR_RETURN(work_.store, open_store(order_.location));
    GT_RETURN_IF_ERROR(SeesTheSame());
    if (near_) config.near = OpenNear(*near_, order_.owner.job);
    JoinBoard(&config);
    work_.committer = std::make_unique<Committer>(work_.store.get(), std::move(config));
    return TakeData();
  }

  absl::Status TakeData() {
    const uint64_t bytes = work_.committer->plan().data_bytes;
    GT_ASSIGN_OR_RETURN(const char* data, arena_.Data(bytes));
    work_.data = {data, bytes};
    return absl::OkStatus();
  }

  // Rank 0 of its rank's generation made the board and may be gone: then the storage is the way.
  void JoinBoard(CommitterConfig* config) {
    const int64_t address = arena_.header()->board.load(std::memory_order_relaxed);
    if (address == 0) return;
    auto board = IndexBoard::Join(address, order_.world_size, BoardName(order_.owner.job, order_.epoch));
    if (!board.ok()) {
      LogInfo("checkpoint: this writer meets the others in the storage: ", board.status().message());
      return;
    }
    board_ = *std::move(board);
    config->board = board_.get();
    board_->Attend(order_.rank);
    if (order_.rank == 0) board_->SetOpen(true);
  }

  // The claim of our owner proves that this is the rank's store, and that we may read there.
  absl::Status SeesTheSame() {
    const std::string key = OwnerKey(order_.epoch);
    const absl::StatusOr<std::string> text = work_.store->Get(key, kSmallFileBytesMax);
    if (!text.ok()) {
      return absl::Status(text.status().code(),
                          absl::StrCat(work_.store->Describe(), "/", key, ": ", text.status().message()));
    }
    GT_ASSIGN_OR_RETURN(const OwnerClaim claim, ParseOwnerClaim(key, *text));
    if (claim.owner == order_.owner) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(work_.store->Describe(), " seen from here belongs to job \"", claim.owner.job, "\""));
  }

  int Refuse(const absl::Status& why, bool first) {
    SaveArenaHeader* header = arena_.header();
    LogWarning("checkpoint: the writer cannot work: ", why.message());
    if (first) {
      PutText(why.message(), absl::MakeSpan(header->message));
      header->state.store(WriterState::kRefused, std::memory_order_release);
    } else if (Asked()) {
      Answer(why);
    }
    bell_.Ring();
    return kRefusedCode;
  }

  bool Asked() const {
    return arena_.header()->requested.load(std::memory_order_acquire) != arena_.header()->finished.load();
  }

  void Serve() {
    while (true) {
      bell_.Look();
      if (Asked()) {
        const absl::Status status = SaveOne();
        if (bell_.gone() && !status.ok()) LogWarning("checkpoint: not saved: ", status.message());
        Answer(status);
      } else if (bell_.gone()) {
        // Copies may still be on their way to other machines; nobody needs to wait for this memory meanwhile.
        arena_.header()->released.store(1, std::memory_order_release);
        return;
      } else {
        bell_.Wait(kIdleLook);
      }
    }
  }

  absl::Status SaveOne() {
    const std::optional<SaveId> id = ParseManifestKey(TakeText(arena_.header()->request));
    if (!id || id->epoch != order_.epoch) return absl::InvalidArgumentError("the rank asked for no attempt");
    if (order_.has_tail) {
      GT_ASSIGN_OR_RETURN(const std::string text, arena_.Tail());
      GT_ASSIGN_OR_RETURN(const SaveTail tail, ParseSaveTail(text, order_));
      work_.committer->SetTail(tail);
      GT_RETURN_IF_ERROR(TakeData());
    }
    GT_ASSIGN_OR_RETURN(const std::vector<HashBytes> hashes,
                        arena_.Hashes(work_.committer->plan().file_bytes()));
    if (const auto resumed = ParseManifestKey(TakeText(arena_.header()->resumed)))
      work_.committer->Resumed(*resumed);
    StopFlag never;
    return work_.committer->Save(*id, work_.data, hashes, &never, [] {});
  }

  void Answer(const absl::Status& status) {
    SaveArenaHeader* header = arena_.header();
    header->code = static_cast<int32_t>(status.code());
    PutText(status.ok() ? work_.committer->TakeNote() : std::string(status.message()),
            absl::MakeSpan(header->message));
    header->finished.store(header->requested.load(), std::memory_order_release);
    bell_.Ring();
  }

  // Called while only other ranks are waited for.
  void Release() {
    bell_.Look();
    if (!bell_.gone() || arena_.header()->released.load() != 0) return;
    if (const absl::Status stored = work_.committer->StoreIndex(); !stored.ok()) {
      LogWarning("checkpoint: no index yet: ", stored.message());
      return;  // asked again
    }
    arena_.header()->released.store(1, std::memory_order_release);
    arena_.DropData();
  }

  // A save may be committed in any generation of its timeline, but not once its job resumed from another one
  // and committed on top of that (fault C3).
  static absl::Status HistoryStands(const SaveId& id, const std::vector<SaveId>& there) {
    for (const SaveId& other : there) {
      if (other.epoch != id.epoch || other.timeline <= id.timeline) continue;
      return absl::FailedPreconditionError(absl::StrCat("the job has gone on without it: step ", other.step,
                                                        " of timeline ", other.timeline, " is there"));
    }
    return absl::OkStatus();
  }

  SaveArena arena_;
  Bell bell_;
  const std::optional<NearPlace> near_;
  SaveOrder order_;
  std::unique_ptr<IndexBoard> board_;
  Work work_;  // uses the board
};

}  // namespace

int RunWriter(UniqueFd arena, UniqueFd channel, const StoreFactory& open_store,
              const std::optional<NearPlace>& near) {
  absl::StatusOr<SaveArena> mapped = SaveArena::Map(std::move(arena));
  if (!mapped.ok()) {
    LogWarning("checkpoint: the writer cannot work: ", mapped.status().message());
    return kRefusedCode;
  }
  return Writer(*std::move(mapped), std::move(channel), near).Run(open_store);
}

}  // namespace gtrain::ckpt
