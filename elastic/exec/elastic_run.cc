#include "elastic/exec/elastic_run.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "checkpoint/engine/storage_error.h"
#include "checkpoint/format/hash.h"
#include "elastic/exec/greet.h"
#include "elastic/exec/hand_over.h"
#include "sharding/ledger/audit.h"

namespace gtrain::elastic {
namespace {

// What a run begins with is broadcast in pieces of this many bytes, so that who has it needs no second copy.
constexpr size_t kPieceBytes = 4 << 20;
constexpr size_t kTogether = (4 << 20) / sizeof(float);  // elements of gradients in one all-reduce
constexpr char kCarriedNames[] = "reducer/*";            // other compression, or none, may have saved
constexpr absl::Duration kLastSave = absl::Minutes(30);
constexpr absl::Duration kFirstReduction = absl::Hours(4);
constexpr int kLastTries = 26;  // after 5 s, 10, 20, 40 and then 80 s each: half an hour
constexpr absl::Duration kVerdict = absl::Minutes(1);  // above what a silent machine is given
constexpr absl::Duration kLookAlive = absl::Milliseconds(100);
// Calls of a generation have failed: so often it is asked whether a rank has ended with exit code 0.
constexpr absl::Duration kLookForLeft = absl::Seconds(5);
// Ranks that stand still do so for no longer. The head needs a few milliseconds.
constexpr absl::Duration kPause = absl::Seconds(2), kLookPaused = absl::Milliseconds(1);

// A directory that belongs to another job, or a program that is wrong, stays so.
bool MayMend(const absl::Status& status) {
  return !absl::IsFailedPrecondition(status) && !absl::IsInvalidArgument(status) &&
         !absl::IsPermissionDenied(status) && !absl::IsUnimplemented(status);
}

// In blocks of a fixed size, so that the compiler uses vectors at -O2, too.
void Scale(float* data, size_t count, float factor) {
  constexpr size_t kBlock = 16;
  size_t at = 0;
  for (; at + kBlock <= count; at += kBlock) {
    for (size_t i = 0; i < kBlock; ++i) data[at + i] *= factor;
  }
  for (; at < count; ++at) data[at] *= factor;
}

// Returns early, with why, when the generation is over.
absl::Status Pause(const Session& session, absl::Duration time, absl::Duration look = kLookAlive) {
  const RealClock clock;
  for (const Instant end = clock.Now() + time; clock.Now() < end;) {
    GT_RETURN_IF_ERROR(session.Alive());
    Notification never;
    never.WaitFor(std::min(end - clock.Now(), look));
  }
  return absl::OkStatus();
}

// Returns early, with OK, once the user has asked for a stop, too.
absl::Status PauseUntilStop(const Session& session, absl::Duration time) {
  const RealClock clock;
  for (const Instant end = clock.Now() + time; clock.Now() < end && !session.StopRequested();)
    GT_RETURN_IF_ERROR(Pause(session, std::min(end - clock.Now(), kLookAlive)));
  return absl::OkStatus();
}

// Into the next generation. `why`: what ended the calls of this one. A rank that ended with exit code 0 while
// others train ends no generation, and nobody takes its place: then that is the answer.
absl::Status RejoinAfter(Session& session, absl::Duration timeout, const absl::Status& why) {
  const RealClock clock;
  const Instant begin = clock.Now();
  for (;;) {
    const absl::Status joined =
        session.Rejoin({.join_timeout = timeout, .stays = true, .over_timeout = kLookForLeft});
    if (!absl::IsDeadlineExceeded(joined) || !session.Alive().ok()) return joined;
    // A head that is away says nothing, and the ranks go on when it is back.
    if (session.left().empty() && clock.Now() - begin < timeout) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "training cannot go on, and no rank was lost: ", why.message(),
        ". All ranks train until the run is done, and none leaves the loop before: a program that has "
        "enough says so with run.stop() (Python), Elastic::Stop (C++) or gtrain_elastic_stop (C), and one "
        "that cannot go on ends with an error"));
  }
}

// True: the generation is over, and nothing of a step is lost: those that are new get the state beside all of
// the next one.
bool PauseForOthers(Session& session) {
  if (session.rank() == 0) session.ReportPause(true);
  if (!Pause(session, kPause, kLookPaused).ok()) return true;
  if (session.rank() == 0) session.ReportPause(false);
  return false;
}

// Rank 0 says it for all, in the log and where `gtrain status` shows how saves go: no save says so any more.
void SayUnsaved(Session& session, const UnsavedEnd& end, absl::string_view why) {
  if (session.rank() != 0) return;
  const std::string said = Say(end, why);
  LogWarning("elastic: ", said);
  session.ReportNote(kNoteSaves, said);
}

// Of the state after `step`, to the ranks that keep them.
absl::Status StartCopies(StepCopies* copies, StreamsBeside& beside, int64_t step) {
  if (copies == nullptr) return absl::OkStatus();
  return beside.Start(copies->Streams(), [copies, step] { copies->Arrived(step); });
}

}  // namespace

ElasticRun::ElasticRun(std::shared_ptr<Session> session, ElasticOptions options)
    : session_(std::move(session)), options_(std::move(options)) {
  likeness_.SetSamples(options_.name, options_.samples);
  if (options_.virtual_ranks > 0) likeness_.SetMachine(options_.machine);
}

ElasticRun::~ElasticRun() = default;

absl::Status ElasticRun::AddState(const std::string& name, void* data, size_t count, DType dtype,
                                  std::vector<int64_t> shape) {
  if (shape.empty()) shape = {static_cast<int64_t>(count)};
  return Register({name, static_cast<char*>(data), count * DTypeSize(dtype), count, dtype, std::move(shape)});
}

absl::Status ElasticRun::AddSharded(const std::string& name, void* data, size_t count,
                                    std::vector<int64_t> shape, Sharding sharding, DType dtype) {
  GT_ASSIGN_OR_RETURN(const LocalBox part, LocalPart(*session_, shape, sharding));
  int64_t elements = part.holds ? 1 : 0;
  for (const int64_t size : part.shape) elements *= size;
  if (static_cast<int64_t>(count) != elements)
    return absl::InvalidArgumentError(
        absl::StrCat("this rank's part of ", name, " has ", elements, " elements, not ", count));
  return Register({name, static_cast<char*>(data), count * DTypeSize(dtype), count, dtype, std::move(shape),
                   std::move(sharding), /*sharded=*/true});
}

absl::Status ElasticRun::Register(State state) {
  if (applied_ >= 0 || Armed())
    return absl::FailedPreconditionError("state is registered before the first step");
  if (state.name.empty()) return absl::InvalidArgumentError("a state needs a name");
  for (const State& other : states_) {
    if (other.name == state.name)
      return absl::InvalidArgumentError(absl::StrCat("there is a state named ", state.name, " already"));
  }
  likeness_.AddState(state.name, state.dtype, state.shape, state.sharded ? &state.sharding : nullptr);
  states_.push_back(std::move(state));
  return absl::OkStatus();
}

absl::StatusOr<LocalBox> ElasticRun::LocalPart(const Session& session, const std::vector<int64_t>& shape,
                                               const Sharding& cut) {
  // Who has no place yet is of a job that has a mesh of dp alone: all parts are the whole.
  return LocalPartOf(session.mesh(), session.has_place() ? session.rank() : 0, shape, cut);
}

absl::Status ElasticRun::AddGradient(float* data, size_t count, std::vector<int64_t> shape) {
  if (applied_ >= 0 || Armed())
    return absl::FailedPreconditionError("gradients are registered before the first step");
  likeness_.AddGradient(count);
  gradients_.push_back({data, count, std::move(shape)});
  return absl::OkStatus();
}

absl::Status ElasticRun::SetCheckpoints(CheckpointOptions options) {
  if (applied_ >= 0 || Armed())
    return absl::FailedPreconditionError("where checkpoints go is said before the first step");
  if (options.lazy || options.read_only || options.before_save)
    return absl::InvalidArgumentError(
        "an elastic run saves between its steps: its checkpoints are not lazy, not read-only, and have no "
        "function of the program");
  options_.checkpoints = options_.checkpoints || !options.uri.empty();
  options_.checkpoint = std::move(options);
  return absl::OkStatus();
}

absl::Status ElasticRun::SetReducer(ReducerOptions options) {
  if (applied_ >= 0 || Armed())
    return absl::FailedPreconditionError("how gradients travel is said before the first step");
  options_.reducer = options;
  return absl::OkStatus();
}

// ---------------------------------------------------------------- a generation

// Unavailable is said of a generation, and of a storage, which is no reason for another one; by hand there is
// none.
bool ElasticRun::Lost(const absl::Status& status) {
  if (!absl::IsUnavailable(status) || ckpt::IsStorageError(status) || !session_->managed() || lost_)
    return false;
  why_lost_ = status;
  return true;
}

// What is sent beside the program reads the state and speaks over the communicator, and ends first.
void ElasticRun::LeaveComm() {
  beside_.reset();
  comm_.reset();
}

// Brings this process into a generation in which all have said what they have.
absl::Status ElasticRun::Form() {
  for (bool first = !Armed() && reforms_ == 0 && applied_ < 0;; first = false) {
    checkpoints_.Leave();
    axes_.clear();
    copies_.reset();
    LeaveComm();
    settled_ = saved_last_ = all_opened_ = reopens_ = pauses_ = false;
    openings_failed_ = 0;
    reopen_at_.reset();
    if (!first || !session_->has_place()) {
      ++reforms_;
      GT_RETURN_IF_ERROR(RejoinAfter(*session_, options_.rejoin_timeout, why_lost_));
    }
    const absl::Status met = Meet();
    if (met.ok()) LeaveReducer();
    if (met.ok() || !Lost(met)) return met;
  }
}

absl::Status ElasticRun::Meet() {
  GT_RETURN_IF_ERROR(CheckPlace());
  // Whether to stop was agreed upon in a step that not all may have ended.
  Greeting own{.state = {applied_, held_, as_made_},
               .stop = stop_,
               .carries_over = carries_,
               .likeness = likeness_.hashes()};
  own.state.line = line_;
  if (step_copies_ != nullptr) {
    own.state.undo = step_copies_->undo_step();
    own.state.copies = step_copies_->held();
  }
  const bool keeps = untouched_ && !met_along_ && place_.cells == 1 && !GetParts().bitwise();
  own.computed = {computed_.share, keeps ? computed_.shares : 0};
  if (const std::optional<Checkpoints::Save>& save = checkpoints_.newest())
    own.save = {save->step, absl::ToInt64Milliseconds(RealClock().Now() - save->began)};
  GT_ASSIGN_OR_RETURN(comm_, session_->MakeCommunicator({.meet = false}));
  GT_ASSIGN_OR_RETURN(const Greeted all, Greet(*comm_, own));
  machines_ = all.machines;
  cells_.clear();
  for (int rank = 0; rank < comm_->size(); ++rank) cells_.push_back(PlaceIn(session_->mesh(), rank).cell);
  stop_ = stop_ || all.stop;
  CountLostResiduals(all.carriers);
  checkpoints_.SetNewest(
      {all.newest.step, RealClock().Now() - absl::Milliseconds(all.newest.milliseconds_ago)});
  agreement_ = Agree(all.members, cells_, place_.cells);
  // What a step has left here in another line is not what it has left in this one.
  if (step_copies_ != nullptr && line_ < std::ranges::max(all.members, {}, &MemberState::line).line)
    step_copies_->Forget(-1);
  line_ = agreement_.line;
  is_computed_ = agreement_.step >= 0 && !stop_ && IsComputed(agreement_, all.computed);
  beside_ = std::make_unique<StreamsBeside>(comm_);
  GetParts().BeginGeneration();
  GT_RETURN_IF_ERROR(CheckLikeness(likeness_, *comm_, all, agreement_, cells_));
  return ConnectAxes();
}

// The memory of this process has one part of the model and no other.
absl::Status ElasticRun::CheckPlace() {
  const MeshPlace place = PlaceIn(session_->mesh(), session_->rank());
  if (placed_ && (place.cell != place_.cell || place.cells != place_.cells)) {
    lost_ = true;
    return absl::UnavailableError(absl::StrCat("this process holds part ", place_.cell, " of ", place_.cells,
                                               " of the model, and is to be rank ", session_->rank(),
                                               ", which has part ", place.cell, " of ", place.cells));
  }
  place_ = place;
  placed_ = true;
  return absl::OkStatus();
}

// A part of the model for each of several ranks: they meet with their copies, and along the other axes.
absl::Status ElasticRun::ConnectAxes() {
  if (place_.cells == 1) return absl::OkStatus();
  const std::vector<MeshAxis> mesh = session_->mesh();
  for (const MeshAxis& axis : mesh) {
    if (axis.size == 1 && axis.name != "dp") continue;
    GT_ASSIGN_OR_RETURN(axes_[axis.name],
                        comm_->Split(GroupAlong(mesh, comm_->rank(), axis.name), comm_->rank()));
  }
  std::shared_ptr<Communicator>& copies = axes_["dp"];
  if (copies == nullptr) {
    GT_ASSIGN_OR_RETURN(copies, comm_->Split(comm_->rank(), 0));
  }
  copies_ = copies;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Communicator>> ElasticRun::Along(const std::string& axis) {
  if (phase_ == Phase::kApplying || applied_ < 0)
    return absl::FailedPreconditionError(
        "ranks along an axis meet while a step is computed, behind its begin, or between steps");
  if (!Armed() || !settled_) return absl::UnavailableError("a rank was lost: the generation is over");
  GT_RETURN_IF_ERROR(CheckAxis(axis));
  met_along_ = true;
  std::shared_ptr<Communicator>& comm = axes_[axis];
  if (comm == nullptr) {
    GT_ASSIGN_OR_RETURN(comm, comm_->Split(GroupAlong(session_->mesh(), comm_->rank(), axis), comm_->rank()));
  }
  return comm;
}

bool ElasticRun::AwaitLoss() {
  if (phase_ == Phase::kApplying || !session_->managed()) return false;
  if (Armed() && Pause(*session_, kVerdict).ok()) return false;
  phase_ = Phase::kIdle;
  LeaveComm();
  return true;
}

// Gives everybody the newest step. Before the first byte of a copy lands here, this rank has no state.
absl::Status ElasticRun::Settle() {
  GT_RETURN_IF_ERROR(OpenReducer());
  if (step_copies_ == nullptr && options_.step_copies && place_.cells > 1)
    step_copies_ = std::make_unique<StepCopies>(Blocks());
  GT_RETURN_IF_ERROR(UndoStep());
  if (agreement_.step < 0) {
    GT_RETURN_IF_ERROR(StartFresh());
  } else if (agreement_.AnyNeeds()) {
    GT_RETURN_IF_ERROR(HandOver());
  }
  if (step_copies_ != nullptr)
    GT_RETURN_IF_ERROR(step_copies_->Meet(*comm_, place_.cell, place_.copy, cells_, machines_));
  if (reducer_ != nullptr) {
    GT_RETURN_IF_ERROR(reducer_->TakeHandover(carried_));
    reducer_has_it_ = true;
    carries_ = std::ranges::any_of(residuals_, [](const BlockRange& range) { return range.size > 0; });
    carriers_ = carries_ ? comm_->size() : 0;
  }
  settled_ = true;
  if (session_->rank() == 0) session_->ReportPause(false);
  SayWhere();
  return absl::OkStatus();
}

// Nobody has a state, or not all parts of it are left: that of the newest checkpoint, or else as the program
// made it.
absl::Status ElasticRun::StartFresh() {
  applied_ = held_ = -1;
  cursor_ = {};
  std::fill(carried_.begin(), carried_.end(), 0.0F);
  if (options_.checkpoints) {
    GT_RETURN_IF_ERROR(OpenCheckpoints());
    block_ = {};
    const bool was_as_made = std::exchange(as_made_, false);
    GT_ASSIGN_OR_RETURN(const std::optional<RestoredStep> restored,
                        checkpoints_.get()->Restore({.may_be_missing = {kCarriedNames}}));
    if (!restored) as_made_ = was_as_made;
    if (restored) {
      GT_RETURN_IF_ERROR(ReadBlock());
      applied_ = cursor_.step;
      saved_last_ = true;  // where nothing is left to be trained
      checkpoints_.SetNewest({applied_, RealClock().Now()});
      return absl::OkStatus();
    }
  }
  if (agreement_.source() < 0) {
    lost_ = true;
    return absl::UnavailableError(
        absl::StrCat("all ranks that had ", place_.cells == 1 ? "the state" : "a part of the model",
                     " are lost, half a copy of it is of no use, and there is no checkpoint: "
                     "training begins anew. A `checkpoint:` in the job file keeps it"));
  }
  if (session_->managed() && session_->generation() > 1 && session_->rank() == 0) {
    session_->ReportNote(kNoteRestore,
                         options_.checkpoints
                             ? "nothing: no rank had a state that others could take, and there was no "
                               "checkpoint yet, so training begins anew"
                             : "nothing: no rank had a state that others could take, and the job file has no "
                               "`checkpoint:` that keeps it, so training begins anew");
  }
  return HandOverFresh();
}

// What is replicated comes from one rank, so that it is equal in all parts of the model; each part from the
// lowest rank that holds it.
absl::Status ElasticRun::HandOverFresh() {
  const int all = agreement_.source(), of_cell = agreement_.sources[static_cast<size_t>(place_.cell)];
  const bool is_all = session_->rank() == all, is_of_cell = session_->rank() == of_cell;
  if (!is_all) as_made_ = false;
  FillBlock();
  GT_RETURN_IF_ERROR(comm_->Broadcast(block_.data(), block_.size(), DType::kInt64, all));
  GT_RETURN_IF_ERROR(BroadcastState(*comm_, all, !is_all, /*sharded=*/false, /*replicated=*/true));
  GT_RETURN_IF_ERROR(BroadcastState(copies(), PlaceIn(session_->mesh(), of_cell).copy, !is_of_cell,
                                    /*sharded=*/true, /*replicated=*/false));
  GT_RETURN_IF_ERROR(CompareHash(*comm_, /*sharded=*/false, /*replicated=*/true));
  GT_RETURN_IF_ERROR(CompareHash(copies(), /*sharded=*/true, /*replicated=*/false));
  GT_RETURN_IF_ERROR(ReadBlock());
  applied_ = cursor_.step;
  return absl::OkStatus();
}

// All state of this rank, and first of it what says after which step it is.
std::vector<absl::Span<char>> ElasticRun::Blocks() {
  std::vector<absl::Span<char>> blocks;
  blocks.emplace_back(reinterpret_cast<char*>(block_.data()), block_.size() * sizeof(int64_t));
  for (const State& state : states_) blocks.emplace_back(state.data, state.bytes);
  return blocks;
}

// Who needs the state has it from those that hold its part of the model, who go on: only their first
// reduction waits.
absl::Status ElasticRun::HandOver() {
  FillBlock();
  const int rank = session_->rank();
  for (int cell = 0; cell < place_.cells; ++cell) {
    // Of another part only the one that has its copy gives anything.
    if (cell != place_.cell && agreement_.sources[static_cast<size_t>(cell)] != rank) continue;
    const PartHandOver hand_over = HandOverOf(agreement_, cells_, cell);
    if (hand_over.takers.empty() || !absl::c_linear_search(hand_over.sources, rank)) continue;
    const auto pieces =
        hand_over.from_copy ? step_copies_->Pieces(cell, agreement_.step) : PiecesOf(Blocks());
    GT_RETURN_IF_ERROR(beside_->Start(GiveStreams(hand_over, rank, pieces)));
  }
  return Take(HandOverOf(agreement_, cells_, place_.cell));
}

// All ranks of the part call: those that are new meet. Before the first byte of a copy lands here, this rank
// has no state.
absl::Status ElasticRun::Take(const PartHandOver& hand_over) {
  const bool takes = absl::c_linear_search(hand_over.takers, session_->rank());
  std::unique_ptr<Communicator> among;
  if (hand_over.takers.size() > 1) {
    GT_ASSIGN_OR_RETURN(among, copies().Split(takes ? 0 : -1, session_->rank()));
  }
  if (!takes) return absl::OkStatus();
  applied_ = -1;
  as_made_ = false;
  GT_RETURN_IF_ERROR(TakePieces(hand_over, session_->rank(), PiecesOf(Blocks()), *comm_, among.get()));
  GT_RETURN_IF_ERROR(ReadBlock());
  applied_ = cursor_.step;
  return absl::OkStatus();
}

// ---------------------------------------------------------------- copies of a step

// What is of a step that was taken back, here or on other ranks, is not the same when it is made again.
absl::Status ElasticRun::UndoStep() {
  if (step_copies_ == nullptr) return absl::OkStatus();
  step_copies_->Forget(agreement_.step);
  if (agreement_.AnyUndoes() && session_->rank() == 0) {
    const std::string what = absl::StrCat(
        "all ranks that had a part of the model were lost: the others went "
        "back from step ",
        agreement_.step + 1, " to ", agreement_.step, ", of which another rank had a copy");
    LogWarning("elastic: ", what);
    session_->ReportNote(kNoteRestore, what);
  }
  if (agreement_.parts[static_cast<size_t>(session_->rank())] != Part::kUndoes) return absl::OkStatus();
  step_copies_->Undo();
  GT_RETURN_IF_ERROR(ReadBlock());
  applied_ = cursor_.step;
  return absl::OkStatus();
}

absl::Status ElasticRun::BroadcastState(Communicator& comm, int source, bool takes, bool sharded,
                                        bool replicated) {
  // Whose state stands lets the pieces pass by: a copy that breaks off must not harm it.
  const bool passes_by = !takes && comm.rank() != source;
  std::vector<char> aside(passes_by ? kPieceBytes : 0);
  for (const State& state : states_) {
    if (state.sharded ? !sharded : !replicated) continue;
    for (size_t at = 0; at < state.bytes; at += kPieceBytes) {
      GT_RETURN_IF_ERROR(comm.Broadcast(passes_by ? aside.data() : state.data + at,
                                        std::min(kPieceBytes, state.bytes - at), DType::kUint8, source));
    }
  }
  return absl::OkStatus();
}

// Each hashes what it has: a difference is not a copy that went wrong alone, but also state that was not
// equal on all ranks.
absl::Status ElasticRun::CompareHash(Communicator& comm, bool sharded, bool replicated) {
  ckpt::Xxh3 hash;
  for (const State& state : states_) {
    if (state.sharded ? sharded : replicated) hash.Add({state.data, state.bytes});
  }
  const ckpt::HashBytes mine = hash.Bytes();
  std::vector<uint8_t> all(mine.size() * static_cast<size_t>(comm.size()));
  GT_RETURN_IF_ERROR(comm.AllGather(mine.data(), all.data(), mine.size(), DType::kUint8));
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (std::memcmp(all.data() + static_cast<size_t>(rank) * mine.size(), all.data(), mine.size()) == 0)
      continue;
    const std::string of_part =
        place_.cells == 1 ? "" : absl::StrCat(" of part ", place_.cell, " of the model");
    return absl::FailedPreconditionError(
        absl::StrCat("the state", of_part, " of two ranks is not the same after step ", cursor_.step,
                     ": something but the update of a step has changed it, or the update is not the same on "
                     "all ranks"));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- steps

// All gradients are registered before the first generation.
Parts& ElasticRun::GetParts() {
  if (parts_ == nullptr) {
    std::vector<absl::Span<float>> gradients;
    for (const Gradient& gradient : gradients_) gradients.emplace_back(gradient.data, gradient.count);
    parts_ = std::make_unique<Parts>(options_.samples, options_.virtual_ranks, std::move(gradients));
  }
  return *parts_;
}

// In the first step of a generation those that are new get the state, and the others share the batch. Bitwise
// steps have a fixed order of parts, and with a mesh a copy that lacks a part cannot compute.
sharding::SampleRange ElasticRun::BeginParts(const sharding::SampleRange& batch, int64_t step) {
  computed_ = {place_.share, place_.shares};
  const bool first = applied_ == agreement_.step && agreement_.AnyNeeds();
  if (first && !parts_->bitwise() && place_.cells == 1)
    computed_ = FirstShareOf(HandOverOf(agreement_, cells_, /*cell=*/0), session_->rank());
  return parts_->Begin(batch, step, computed_.share, computed_.shares);
}

absl::StatusOr<StepPlace> ElasticRun::Begin() {
  if (phase_ == Phase::kApplying)
    return absl::FailedPreconditionError("the update of this step was not said to be applied");
  if (phase_ == Phase::kComputing)
    return absl::FailedPreconditionError(
        "the gradients of this step were not reduced: it would come for ever. Each step ends with "
        "step.apply(loss, update) (Python), step.Apply(gradients, loss, update) (C++) or "
        "gtrain_elastic_reduce and gtrain_elastic_applied (C), also on a rank that has no samples of it");
  phase_ = Phase::kIdle;
  held_ = -1;
  if (std::exchange(pauses_, false) && Armed() && PauseForOthers(*session_)) LeaveComm();
  for (;;) {
    if (!Armed()) GT_RETURN_IF_ERROR(Form());
    StepPlace place;
    absl::Status settled = settled_ ? absl::OkStatus() : Settle();
    if (applied_ > agreement_.step) is_computed_ = false;
    if (settled.ok()) {
      const sharding::SampleCursor at = sharding::NextBatch(options_.samples, cursor_);
      const sharding::SampleRange batch = sharding::BatchAt(options_.samples, at);
      place.share = place_.share;
      place.shares = place_.shares;
      if (batch.size() > 0 && !stop_) {
        place.step = applied_ + 1;
        place.epoch = at.epoch;
        place.batch = batch.size();
        place.steps = sharding::Advance(options_.samples, cursor_, sharding::kStepsMax).step;
        place.samples = sharding::SamplesOf(options_.samples, BeginParts(batch, place.step));
        for (Gradient& gradient : gradients_) {
          std::fill_n(gradient.data, gradient.count, 0.0F);
          gradient.ready = false;
        }
        ready_error_ = absl::OkStatus();
        met_along_ = false;
        settled = StartCopies(step_copies_.get(), *beside_, applied_);
        if (settled.ok()) {
          phase_ = Phase::kComputing;
          return place;
        }
        if (!Lost(settled)) return settled;
        LeaveComm();
        continue;
      }
      place.done = true;
      place.stopped = batch.size() > 0;
      settled = SaveLast();
      if (settled.ok()) return place;
    }
    if (!Lost(settled)) return settled;
    LeaveComm();
  }
}

// No rank leaves before all have what they came for. A storage that fails now would lose what is in memory:
// it is tried again, by all ranks alike, for about half an hour or until the head ends them.
absl::Status ElasticRun::SaveLast() {
  GT_RETURN_IF_ERROR(beside_->Wait());
  if (!std::exchange(said_end_, true)) SayWhere();
  absl::Duration pause = options_.storage_retry;
  for (int tries = 1; options_.checkpoints && !saved_last_; ++tries) {
    const absl::Status saved = SaveNow();
    if (Lost(saved)) return saved;
    int64_t worst = saved.ok() ? 0 : MayMend(saved) ? 1 : 2;
    GT_RETURN_IF_ERROR(comm_->AllReduce(&worst, 1, DType::kInt64, ReduceOp::kMax));
    saved_last_ = worst == 0;
    if (saved_last_) break;
    checkpoints_.Leave();
    const bool gives_up = worst == 2 || tries == kLastTries || !session_->managed();
    UnsavedEnd unsaved{.step = applied_, .saved = checkpoints_.newest()->step, .all = !stop_};
    unsaved.left = gives_up ? absl::ZeroDuration() : PausesAfter(tries, kLastTries, options_.storage_retry);
    unsaved.stops = !gives_up && session_->StopRequested();
    const absl::string_view why = saved.ok() ? "another rank could not save it" : saved.message();
    SayUnsaved(*session_, unsaved, why);
    if (gives_up) {
      return saved.ok()
                 ? ckpt::StorageError(absl::UnavailableError("another rank could not save the last step"))
                 : saved;
    }
    GT_RETURN_IF_ERROR(unsaved.stops ? Pause(*session_, pause) : PauseUntilStop(*session_, pause));
    pause = std::min(2 * pause, 16 * options_.storage_retry);
    if (unsaved.stops || !session_->StopRequested()) continue;
    // There is little time left: at once, and who waits for the stop hears what it may cost.
    unsaved.stops = true;
    SayUnsaved(*session_, unsaved, why);
    pause = options_.storage_retry;
  }
  return comm_->Barrier();
}

absl::Status ElasticRun::SaveNow() {
  if (!checkpoints_.opening() && checkpoints_.get() == nullptr) GT_RETURN_IF_ERROR(OpenCheckpoints());
  if (checkpoints_.opening()) GT_RETURN_IF_ERROR(checkpoints_.Adopt());
  Checkpointer& checkpointer = *checkpoints_.get();
  FillBlock();
  GT_ASSIGN_OR_RETURN(const bool began, checkpointer.Save(applied_));
  GT_RETURN_IF_ERROR(checkpointer.Wait(kLastSave));
  if (began) return absl::OkStatus();
  GT_RETURN_IF_ERROR(checkpointer.Save(applied_).status());
  return checkpointer.Wait(kLastSave);
}

int64_t ElasticRun::BatchSize() const {
  return sharding::BatchAt(options_.samples, sharding::NextBatch(options_.samples, cursor_)).size();
}

absl::StatusOr<StepPart> ElasticRun::NextPart(double loss) {
  if (phase_ != Phase::kComputing)
    return absl::FailedPreconditionError("there is no step whose parts could be computed: Begin comes first");
  // Each part has all gradients anew.
  for (Gradient& gradient : gradients_) gradient.ready = gradient.ready && !parts_->bitwise();
  return parts_->Next(loss);
}

// A reducer returns the mean of what ranks give it, which is to be the mean of the samples.
void ElasticRun::Ready(size_t index) {
  if (phase_ != Phase::kComputing) return;
  if (index >= gradients_.size() || gradients_[index].ready) {
    ready_error_.Update(absl::InvalidArgumentError(
        index >= gradients_.size()
            ? absl::StrCat("there is no gradient ", index, ", they are 0 to ",
                           static_cast<int64_t>(gradients_.size()) - 1)
            : absl::StrCat("gradient ", index, " is ready for the second time in this step")));
    return;
  }
  Gradient& gradient = gradients_[index];
  gradient.ready = true;
  if (reducer_ == nullptr) return;
  const float scale = static_cast<float>(copies().size()) / static_cast<float>(BatchSize());
  std::transform(gradient.data, gradient.data + gradient.count, reducer_->gradient(index).begin(),
                 [scale](float value) { return value * scale; });
  ready_error_.Update(reducer_->Ready(index));
}

absl::Status ElasticRun::ReduceCompressed() {
  for (size_t i = gradients_.size(); i-- > 0;) {
    if (!gradients_[i].ready) Ready(i);
  }
  GT_RETURN_IF_ERROR(ready_error_);
  GT_ASSIGN_OR_RETURN(reduced_, reducer_->Finish());
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const absl::Span<const float> mean = reducer_->gradient(i);
    std::copy(mean.begin(), mean.end(), gradients_[i].data);
  }
  return absl::OkStatus();
}

// Each all-reduce is a meeting of all ranks, which costs more than copies of what is small.
absl::Status ElasticRun::SumTogether(absl::Span<const Gradient> gradients, size_t count) {
  if (gradients.size() == 1)
    return copies().AllReduce(gradients[0].data, count, DType::kFloat32, ReduceOp::kSum);
  together_.resize(std::max(together_.size(), count));
  float* at = together_.data();
  for (const Gradient& gradient : gradients) at = std::copy_n(gradient.data, gradient.count, at);
  GT_RETURN_IF_ERROR(copies().AllReduce(together_.data(), count, DType::kFloat32, ReduceOp::kSum));
  at = together_.data();
  for (const Gradient& gradient : gradients) {
    std::copy_n(at, gradient.count, gradient.data);
    at += gradient.count;
  }
  return absl::OkStatus();
}

// Parts of a model sum gradients of their own and gradients that all have alike: what is alike must have the
// same bits in all parts. An all-reduce adds in an order that depends on the place of an element in its
// buffer and on the links, so this one goes along a tree.
absl::Status ElasticRun::ReduceInParts() {
  if (tree_ == nullptr) {
    std::vector<absl::Span<float>> gradients;
    for (const Gradient& gradient : gradients_) gradients.emplace_back(gradient.data, gradient.count);
    tree_ = std::make_unique<TreeSum>(std::move(gradients), /*measures=*/false);
  }
  tree_->Begin(copies().size(), copies().rank(), copies().size());
  tree_->Add(0);
  return tree_->Finish(copies(), static_cast<float>(1 / static_cast<double>(BatchSize()))).status();
}

absl::Status ElasticRun::ReduceDense() {
  GT_RETURN_IF_ERROR(ready_error_);
  if (place_.cells > 1) return ReduceInParts();
  for (size_t i = 0; i < gradients_.size();) {
    size_t end = i + 1, count = gradients_[i].count;
    while (end < gradients_.size() && count + gradients_[end].count <= kTogether)
      count += gradients_[end++].count;
    GT_RETURN_IF_ERROR(SumTogether(absl::MakeSpan(gradients_).subspan(i, end - i), count));
    i = end;
  }
  const float scale = static_cast<float>(1 / static_cast<double>(BatchSize()));
  for (const Gradient& gradient : gradients_) Scale(gradient.data, gradient.count, scale);
  return absl::OkStatus();
}

absl::Status ElasticRun::ReduceGradients() {
  const double batch = static_cast<double>(BatchSize());
  GT_ASSIGN_OR_RETURN(loss_, parts_->Loss(loss_));
  const absl::Duration timeout = comm_->timeout();
  if (applied_ == agreement_.step && agreement_.AnyNeeds()) {
    // A state may take longer to come than any collective may wait, and who is new waits while others
    // compute.
    GT_RETURN_IF_ERROR(beside_->Wait());
    comm_->SetTimeout(std::max(timeout, kFirstReduction));
  }
  if (parts_->bitwise()) {
    GT_RETURN_IF_ERROR(ready_error_);
    GT_ASSIGN_OR_RETURN(loss_, parts_->Finish(*comm_));
  } else {
    GT_RETURN_IF_ERROR(reducer_ == nullptr ? ReduceDense() : ReduceCompressed());
  }
  held_ = applied_ + 1;
  GT_RETURN_IF_ERROR(beside_->Wait());
  // Who leaves this one knows that all ranks have come to it, and so hold the gradients.
  const bool opens = checkpoints_.opening() && !checkpoints_.Opened();
  const bool reopens = session_->rank() == 0 && reopen_at_ && RealClock().Now() >= *reopen_at_;
  const bool stops = wants_stop_ || session_->StopRequested();
  const bool pauses = session_->PauseRequested();
  std::array<double, kLosses> sums = {place_.speaks ? loss_ : 0.0, stops ? 1.0 : 0.0, opens ? 1.0 : 0.0,
                                      reopens ? 1.0 : 0.0, pauses ? 1.0 : 0.0};
  GT_RETURN_IF_ERROR(comm_->AllReduce(sums.data(), sums.size(), DType::kFloat64, ReduceOp::kSum));
  comm_->SetTimeout(timeout);
  loss_ = (parts_->bitwise() ? loss_ : sums[0]) / batch;
  has_loss_ = true;
  stop_ = stop_ || sums[1] > 0;
  all_opened_ = sums[2] == 0;
  reopens_ = sums[3] > 0;
  pauses_ = sums[4] > 0 && !stop_;
  return absl::OkStatus();
}

absl::StatusOr<bool> ElasticRun::Reduce(double loss) {
  if (phase_ != Phase::kComputing)
    return absl::FailedPreconditionError(
        "there is no step whose gradients could be reduced: Begin comes first");
  loss_ = loss;
  has_loss_ = false;
  GT_ASSIGN_OR_RETURN(const bool keeps, KeepComputed());
  if (!keeps) return false;
  const absl::Status reduced = ReduceGradients();
  if (reduced.ok()) {
    if (step_copies_ != nullptr) step_copies_->TakeUndo(applied_);
    phase_ = Phase::kApplying;
    return true;
  }
  phase_ = Phase::kIdle;
  if (!Lost(reduced)) return reduced;
  return AfterLoss();
}

// While this rank computed, its generation may have ended because others have come. Nothing of the step is
// lost then: it is reduced in the new one. False: it is to be computed again.
absl::StatusOr<bool> ElasticRun::KeepComputed() {
  while (session_->managed() && (!Armed() || !session_->Alive().ok())) {
    untouched_ = true;
    const absl::Status formed = Form();
    untouched_ = false;
    // Who was left out meanwhile has computed another step than those whose state it needs.
    const bool keeps =
        formed.ok() && is_computed_ && agreement_.parts[static_cast<size_t>(session_->rank())] == Part::kHas;
    if (!keeps) {
      phase_ = Phase::kIdle;
      GT_RETURN_IF_ERROR(formed);
      return false;
    }
    for (Gradient& gradient : gradients_) gradient.ready = false;  // for the reducer of this generation
    if (Lost(ready_error_)) ready_error_ = absl::OkStatus();       // that of the one before
    const absl::Status settled = Settle();
    if (!settled.ok() && !Lost(settled)) return settled;
    if (!settled.ok()) LeaveComm();
  }
  return true;
}

// The generation ended between the halves of a step. Whether anybody has applied it, the next one knows.
absl::StatusOr<bool> ElasticRun::AfterLoss() {
  GT_RETURN_IF_ERROR(Form());
  if (agreement_.parts[static_cast<size_t>(session_->rank())] == Part::kRollsForward) {
    if (step_copies_ != nullptr) step_copies_->TakeUndo(applied_);
    phase_ = Phase::kApplying;
    return true;
  }
  return false;
}

absl::Status ElasticRun::Applied() {
  if (phase_ != Phase::kApplying)
    return absl::FailedPreconditionError("there is no update to be made: Reduce returns true first");
  phase_ = Phase::kIdle;
  cursor_ = sharding::Advance(options_.samples, cursor_);
  FillBlock();
  ++applied_;
  as_made_ = false;
  saved_last_ = false;
  ProgressReport report{.step = applied_, .samples = place_.speaks ? parts_->share().size() : 0};
  report.loss = loss();
  session_->Report(report);
  const absl::Status saved = SaveIfDue();
  if (saved.ok() || !Lost(saved)) return saved;
  LeaveComm();  // the next Begin goes on in another generation
  return absl::OkStatus();
}

// One that has rolled forward is in a generation whose ranks may be anywhere: it sums nothing there before
// all have begun a step.
absl::StatusOr<bool> ElasticRun::Sum(absl::Span<double> values) {
  if (phase_ != Phase::kIdle || applied_ < 0)
    return absl::FailedPreconditionError("a sum over the ranks is made between steps, or at the end");
  // Who has reduced a step of the generation before knows its share of this one from the next Begin on.
  if (!Armed() || !settled_ || is_computed_) return false;
  if (!place_.speaks) absl::c_fill(values, 0.0);
  const absl::Status summed = comm_->AllReduce(values.data(), values.size(), DType::kFloat64, ReduceOp::kSum);
  if (summed.ok()) return true;
  if (!Lost(summed)) return summed;
  LeaveComm();
  return false;
}

// ---------------------------------------------------------------- compression

absl::Status ElasticRun::OpenReducer() {
  if (reducer_ != nullptr || gradients_.empty()) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(const auto policy, CompressionOfJob());
  if (!policy && options_.reducer.compression.codec == Codec::kNone) return absl::OkStatus();
  if (place_.cells > 1) {
    return absl::FailedPreconditionError(
        absl::StrCat(policy ? "$GTRAIN_COMPRESSION (`comm.compression`)" : "the program's compression",
                     " with a `mesh` of more than dp: state that all parts of the model have alike would not "
                     "stay alike, since "
                     "what compression rounds and holds back depends on the part. Take one of them away"));
  }
  if (options_.virtual_ranks > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "`elastic.determinism: bitwise` and ", policy ? "$GTRAIN_COMPRESSION" : "the program's compression",
        " are both there: what compression sends, and what it holds back, depends on the number of ranks. "
        "Take one of them away"));
  }
  std::vector<GradientSpec> specs;
  for (size_t i = 0; i < gradients_.size(); ++i)
    specs.push_back({absl::StrCat("gradient ", i), gradients_[i].count, gradients_[i].shape});
  GT_ASSIGN_OR_RETURN(reducer_, Reducer::Create(&copies(), specs, options_.reducer));
  carried_.resize(reducer_->HandoverCount());
  residuals_ = reducer_->HandoverResiduals();
  return absl::OkStatus();
}

// Each rank of a generation that compressed has a residual, which only its own process has.
void ElasticRun::CountLostResiduals(int64_t carriers) {
  const int64_t lost =
      std::max<int64_t>(0, std::exchange(carriers_, std::min(carriers_, carriers)) - carriers);
  residuals_lost_ += lost;
  if (lost > 0 && session_->rank() == 0) {
    LogWarning("elastic: what compression held back on ", lost, lost == 1 ? " rank" : " ranks",
               " is lost with ", lost == 1 ? "it" : "them", ", ", carriers, " go on with theirs");
  }
}

absl::StatusOr<ElasticRun::Residual> ElasticRun::residual() {
  const bool left = std::ranges::any_of(gradients_, [](const Gradient& gradient) { return gradient.ready; });
  if (phase_ == Phase::kApplying || (phase_ == Phase::kComputing && left))
    return absl::FailedPreconditionError("a step is under way: what it holds back is not known yet");
  if (reducer_has_it_) GT_RETURN_IF_ERROR(reducer_->GiveHandover(/*applied=*/true, absl::MakeSpan(carried_)));
  double squares = 0;
  for (const BlockRange& range : residuals_) {
    for (const float value : absl::MakeConstSpan(carried_).subspan(range.begin, range.size))
      squares += static_cast<double>(value) * value;
  }
  return Residual{std::sqrt(squares), residuals_lost_};
}

// Whether the step counts whose gradients the old generation had reduced last is known now.
void ElasticRun::LeaveReducer() {
  if (!std::exchange(reducer_has_it_, false)) return reducer_.reset();  // it is in carried_ as before
  const bool rolls_forward = agreement_.parts[static_cast<size_t>(session_->rank())] == Part::kRollsForward;
  const bool applied = held_ <= applied_ || rolls_forward;
  const absl::Status given = reducer_->GiveHandover(applied, absl::MakeSpan(carried_));
  if (!given.ok()) LogError("elastic: compression begins anew: ", given.message());
  reducer_.reset();
}

// ---------------------------------------------------------------- checkpoints and records

absl::Status ElasticRun::SaveIfDue() {
  if (!options_.checkpoints || !settled_) return absl::OkStatus();
  if (reopens_) checkpoints_.Leave();
  if (checkpoints_.get() == nullptr) GT_RETURN_IF_ERROR(OpenBesideTraining());
  if (checkpoints_.get() == nullptr) return absl::OkStatus();
  GT_RETURN_IF_ERROR(checkpoints_.SaveIfDue(applied_, comm_.get()));
  // At once: by the next step another job may have the directory, and this checkpointer must not save there.
  if (session_->rank() == 0 && !reopen_at_ && checkpoints_.misplaced()) reopen_at_ = RealClock().Now();
  stop_ = stop_ || checkpoints_.get()->stop_agreed();
  return absl::OkStatus();
}

// All ranks do the same after the same step: what they go by rode with the losses, and Start tells all of an
// error.
absl::Status ElasticRun::OpenBesideTraining() {
  if (checkpoints_.opening()) {
    if (!all_opened_) return absl::OkStatus();
    const absl::Status opened = checkpoints_.Adopt();
    if (!ckpt::IsStorageError(opened)) {
      openings_failed_ = 0;
      return opened;
    }
    const int doubled = std::min(openings_failed_++, 4);
    reopen_at_ = RealClock().Now() + options_.storage_retry * (1 << doubled);
    LogWarning("elastic: training goes on without checkpoints until the storage can be read: ",
               opened.message());
    return absl::OkStatus();
  }
  if (openings_failed_ > 0 && !reopens_) return absl::OkStatus();
  reopen_at_.reset();
  GT_ASSIGN_OR_RETURN(std::unique_ptr<Checkpointer> made, MakeCheckpointer());
  checkpoints_.Open(std::move(made));
  return absl::OkStatus();
}

// On this thread, for what is to be restored or saved before anything else.
absl::Status ElasticRun::OpenCheckpoints() {
  GT_ASSIGN_OR_RETURN(std::unique_ptr<Checkpointer> made, MakeCheckpointer());
  GT_RETURN_IF_ERROR(made->Start());
  checkpoints_.Set(std::move(made));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Checkpointer>> ElasticRun::MakeCheckpointer() {
  std::unique_ptr<Communicator> comm;
  if (comm_->size() > 1) {
    GT_ASSIGN_OR_RETURN(comm, comm_->Split(/*color=*/0, comm_->rank()));
  }
  CheckpointOptions options = options_.checkpoint;
  const Checkpoints::Save& newest = *checkpoints_.newest();
  options.last_save = {newest.step, RealClock().Now() - newest.began};
  options.device = checkpoints_.device();
  if (reducer_ != nullptr) {
    options.before_save = [this] {
      return reducer_->GiveHandover(/*applied=*/true, absl::MakeSpan(carried_));
    };
  }
  GT_ASSIGN_OR_RETURN(std::unique_ptr<Checkpointer> made,
                      Checkpointer::Make(session_.get(), std::move(comm), options));
  for (const State& state : states_) {
    Sharding sharding = state.sharding;
    GT_ASSIGN_OR_RETURN(sharding.mesh, MeshWith(session_->mesh(), sharding));
    GT_RETURN_IF_ERROR(
        state.sharded
            ? made->AddSharded(state.name, {state.data, state.bytes}, state.shape, sharding, state.dtype)
            : made->AddReplicated(state.name, {state.data, state.bytes}, state.shape, state.dtype));
  }
  GT_RETURN_IF_ERROR(made->AddReplicated(absl::StrCat("gtrain/samples/", options_.name),
                                         {block_.data(), block_.size() * sizeof(int64_t)},
                                         {static_cast<int64_t>(block_.size())}, DType::kInt64));
  if (!carried_.empty()) {
    GT_RETURN_IF_ERROR(
        made->AddPerRank(reducer_->HandoverName(), {carried_.data(), carried_.size() * sizeof(float)}));
  }
  return made;
}

// The block is that of Samples::AddTo, so that either reads what the other saved. It is state, and no more
// written than other state while streams read it.
void ElasticRun::FillBlock() { block_ = sharding::PackCursor(options_.samples, cursor_); }

absl::Status ElasticRun::ReadBlock() {
  GT_ASSIGN_OR_RETURN(cursor_, sharding::UnpackCursor(options_.samples, block_));
  return absl::OkStatus();
}

// One rank says for all where they are, when a generation begins to train and at the end (gtrain data audit).
// The cursor is part of the state, in memory and in checkpoints alike.
void ElasticRun::SayWhere() {
  if (session_->rank() != 0) return;
  session_->ReportNote(kNoteSamples, sharding::PrintSampleRecord({options_.name, options_.samples, cursor_,
                                                                  place_.shares, /*saved=*/true}));
}

}  // namespace gtrain::elastic
