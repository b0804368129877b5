#include "checkpoint/engine/rank_saves.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/available_memory.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/outside.h"

namespace gtrain::ckpt {

RankSaves::~RankSaves() {
  ending_ = true;
  if (starting_.joinable()) starting_.join();
}

absl::Status RankSaves::Prepare() {
  GT_ASSIGN_OR_RETURN(board_address_, MeetOnBoard());
  plan_ = PlanShard(state_.all(), agree_.rank(), agree_.size());
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> bytes,
                      agree_.Gather(static_cast<int64_t>(plan_.data_bytes)));
  machine_bytes_ = 0;
  for (const int rank : context_.mates.ranks)
    machine_bytes_ += static_cast<uint64_t>(bytes[static_cast<size_t>(rank)]);
  return absl::OkStatus();
}

void RankSaves::Start() {
  if (saver_ != nullptr || settings_.read_only) return;
  StartSoon();
  starting_.join();
  TakeStarted();
}

void RankSaves::StartSoon() {
  if (!none()) return;
  starting_ = std::thread([this] {
    std::unique_ptr<SaveRoute> route = MakeRoute();
    MutexLock lock(&start_mu_);
    started_ = std::move(route);
  });
}

void RankSaves::TakeStarted() {
  std::unique_ptr<SaveRoute> route;
  {
    MutexLock lock(&start_mu_);
    route = std::move(started_);
  }
  if (route == nullptr) return;
  if (starting_.joinable()) starting_.join();
  saver_ = std::make_unique<Saver>(
      std::move(route), plan_.header, state_.Sources(plan_),
      [this](const SaveId& id, const absl::Status& status) { Ended(id, status); }, agree_.rank(),
      directory_.store()->Describe());
  if (resumed_) saver_->Resumed(*resumed_);
}

void RankSaves::Ended(const SaveId& id, const absl::Status& status) {
  if (!status.ok()) {
    directory_.LookSoon();
    return NoteLost(id.step, status.message());
  }
  session_->ReportCheckpoint(id.step, WhereIs(*directory_.store(), id), policy_);
  // A checkpointer before this one may have said that its saves came to nothing.
  const bool first = !std::exchange(committed_, true) && agree_.rank() == 0 && settings_.last_save;
  if (lost_saves_.exchange(0) > 0 || first) session_->ReportNote(kNoteSaves, "");
}

void RankSaves::NoteLost(int64_t step, absl::string_view why) {
  if (agree_.rank() != 0) return;
  const int lost = ++lost_saves_;
  session_->ReportNote(
      kNoteSaves,
      absl::StrCat(lost, lost == 1 ? " save" : " saves",
                   " since the newest checkpoint came to nothing, the last of step ", step, ": ", why));
}

CommitterConfig RankSaves::Commits() const {
  return {.rank = agree_.rank(),
          .world_size = agree_.size(),
          .epoch = directory_.next().epoch,
          .owner = settings_.identity,
          .registered = state_.all(),
          .keep = settings_.keep,
          .shard_tries = settings_.on_error == OnError::kRetry ? 4 : 1,
          .commit_timeout = settings_.commit_timeout,
          .alive = context_.alive,
          .may_commit = [this](const SaveId&, const std::vector<SaveId>&) { return context_.Alive(); },
          .near = context_.near};
}

absl::StatusOr<int64_t> RankSaves::MeetOnBoard() {
  if (host_ != nullptr && agree_.rank() == 0) {
    auto made = IndexBoard::Make(agree_.size(), BoardName(settings_.identity.job, directory_.next().epoch));
    if (made.ok()) board_ = *std::move(made);
  }
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> addresses,
                      agree_.Gather(board_ != nullptr ? board_->address() : 0));
  return context_.mates.ranks[0] == 0 ? addresses[0] : 0;
}

// Outside this process where there is somebody; each rank for itself, they meet in the storage and on the
// board.
std::unique_ptr<SaveRoute> RankSaves::MakeRoute() {
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
    const auto wanted = [this] { return !ending_ && context_.Alive().ok(); };
    auto outside = OutsideRoute::Start(host_, order, plan_, board_address_, wanted);
    if (outside.ok()) return *std::move(outside);
    if (!wanted()) return nullptr;
    LogWarning(
        "checkpoint: rank ", agree_.rank(),
        " writes its saves itself, so a crash right after a save loses it: ", outside.status().message());
  }
  return std::make_unique<OwnRoute>(directory_.store(), Commits());
}

absl::Status RankSaves::FindRoom() {
  if (has_room_) return absl::OkStatus();
  const uint64_t available = AvailableMemory(), most = settings_.memory_max.value_or(available);
  has_room_ = machine_bytes_ <= std::min(available, most);
  if (has_room_) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the copies of the state of the ", context_.mates.ranks.size(),
                   context_.mates.ranks.size() == 1 ? " rank" : " ranks", " on this machine need ",
                   PrintBytes(machine_bytes_), ", and ",
                   most < available ? absl::StrCat("checkpoint.memory_max allows ", PrintBytes(most))
                                    : absl::StrCat(PrintBytes(available), " of its memory are available")));
}

RankSaves::Obstacle RankSaves::Look() {
  if (const absl::Status room = FindRoom(); !room.ok()) {
    if (agree_.rank() == context_.mates.ranks[0])
      LogWarning("checkpoint: rank ", agree_.rank(), ": ", room.message());
    return Obstacle::kNoRoom;
  }
  if (saver_ == nullptr) return Obstacle::kStarting;
  return saver_->busy() ? Obstacle::kWriting : Obstacle::kNone;
}

void RankSaves::Warm() {
  if (warmed_ || saver_ == nullptr || !FindRoom().ok()) return;
  saver_->Warm();
  warmed_ = true;
}

void RankSaves::MakeUsable() {
  if (saver_->usable()) return;
  saver_->Replace(std::make_unique<OwnRoute>(directory_.store(), Commits()));
  if (board_ != nullptr) board_->SetOpen(false);
}

absl::Status RankSaves::PrepareTail() {
  GT_RETURN_IF_ERROR(state_.CollectTail());
  const ShardPlan plan = PlanShard(state_.all(), agree_.rank(), agree_.size(), state_.tail());
  return saver_->SetTail(state_.tail(), plan.header, state_.Sources(plan));
}

void RankSaves::Begin(const SaveId& id, const std::string& policy) {
  policy_ = policy;
  saver_->Start(id);
}

bool RankSaves::DropUnfenced() {
  if (saver_ == nullptr || !saver_->copying()) return false;
  saver_->Drop();
  return true;
}

void RankSaves::Resumed(const std::optional<SaveId>& id) {
  resumed_ = id;
  if (saver_ != nullptr && resumed_) saver_->Resumed(*resumed_);
}

}  // namespace gtrain::ckpt
