// A training run that outlives its generations. It owns the order of things: which step comes next and which
// samples it has, when gradients are reduced, when an update may be made, who hands its state to whom after a
// generation has ended, and when a checkpoint is saved. elastic/plan/agree.h has the reasoning.
//
//   Begin -> compute (may be repeated), Ready -> Reduce: true -> the update -> Applied -> Begin ...
//                                                false -> Begin again
//
// What is computed are the samples of the step, or one part after the other (NextPart): elastic/exec/parts.h.
// With `virtual_ranks` only parts are, and gradients are added along a tree (elastic/exec/tree_sum.h has what
// that costs).
//
// One thread. Begin, Reduce and Applied (where a save may be due) block: for the other ranks of a generation,
// and for the next generation when one is lost. A step costs an all-reduce for each 4 MiB of gradients (or
// a larger one), one of 40 bytes, and what Checkpointer::SaveIfDue does. A new generation of n ranks costs a
// communicator, an all-gather of 152 bytes a rank, in which they meet for the first time, and, where a rank
// is new, its state: each rank that has it sends its share of it once (elastic/plan/hand_over.h), while it
// computes its first step, and waits in the reduction of that step for those that are new, as these do for
// each other: several new ones split off a communicator and hand on what each of them got. Every piece is
// read twice more for its hash. Until all have agreed on the step that is, on m machines, two all-gathers
// through the head and, where m is above 16, at most 2 log2 m + 2 rounds between ranks
// (comm/exec/costs_test.cc), below 8, and more where the network is measured. Where a state was found in
// memory, the checkpointer of a generation is opened beside training, from its first step on; saves that are
// due before it is open come with the step that finds it open on all ranks. A storage that cannot be read
// then is tried again, and training goes on without: what it has is in memory.
//
// Where the job file has `comm.compression` gradients travel through a Reducer, which each generation makes
// anew (at most three communicators and two small all-reduces a bucket) and which goes on with what the one
// before it carried over: a block of Reducer::HandoverCount() floats. Ranks that are lost take their
// residuals with them; a rank that comes new has none. It costs a copy of the gradients and back.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "comm/port/communicator.h"
#include "comm/reducer/reducer.h"
#include "elastic/exec/checkpoints.h"
#include "elastic/exec/likeness.h"
#include "elastic/exec/parts.h"
#include "elastic/exec/state_streams.h"
#include "elastic/exec/step_copies.h"
#include "elastic/plan/agree.h"
#include "elastic/plan/hand_over.h"
#include "elastic/plan/mesh_place.h"
#include "gtrain/sharding.h"
#include "gtrain/types.h"
#include "runtime/port/session.h"
#include "sharding/ledger/ledger.h"

namespace gtrain::elastic {

struct ElasticOptions {
  std::string name = "train";  // of the data, in the job's records
  sharding::SampleOptions samples;
  bool checkpoints = false;  // the job says where: save when it is due, and resume
  // Where a rank alone has a part of the model, another one keeps copies of it (step_copies.h).
  bool step_copies = false;
  // The program's own choices; what the job says wins over them.
  CheckpointOptions checkpoint;
  ReducerOptions reducer;
  // The same bits at any number of ranks: the parts of a step, at most 65,536; 0: not asked for. Then
  // `machine` is what ranks must have alike (DescribeMachine).
  int virtual_ranks = 0;
  std::string machine = "";
  // Between two tries to open checkpoints in a storage that cannot be read; up to 16 times as long.
  absl::Duration storage_retry = absl::Seconds(5);
  // The head says when there is no other generation: it ends the process.
  absl::Duration rejoin_timeout = absl::Hours(24);
};

struct StepPlace {
  bool done = false;          // all samples are trained, or the user asked to stop
  bool stopped = false;       // done before the last sample
  int64_t step = 0;           // that is to be computed: the first is 1
  int64_t epoch = 0;          // from 0
  int64_t batch = 0;          // samples of all ranks together
  int64_t steps = 0;          // the last one's number
  int share = 0, shares = 1;  // of each batch: which is this rank's, and of how many
  // That share; empty where there are more ranks than samples. In the first step of a generation with new
  // ranks the others have the samples, and these none: they get the state meanwhile.
  std::vector<int64_t> samples;
};

class ElasticRun {
 public:
  // Values of the all-reduce behind the gradients, of float64: the loss, and what ranks tell each other.
  static constexpr size_t kLosses = 5;

  // The session joined to stay, or is of a program that was started by hand.
  ElasticRun(std::shared_ptr<Session> session, ElasticOptions options);
  ~ElasticRun();

  // State that is equal on all ranks, and gradients. Both are registered before the first Begin, by all ranks
  // alike; the memory stays the caller's and must outlive this. Only the update changes state.
  // `shape`, whose product is `count`, is that in checkpoints; empty: a vector.
  absl::Status AddState(const std::string& name, void* data, size_t count, DType dtype,
                        std::vector<int64_t> shape = {});
  // State of which this rank has its LocalPart, `count` elements, of a tensor of `shape`. The copies along dp
  // are equal.
  absl::Status AddSharded(const std::string& name, void* data, size_t count, std::vector<int64_t> shape,
                          Sharding cut, DType dtype);
  // The part of a tensor that this process has as long as it lives. `cut` has no mesh: it is the job's, with
  // axes of size 1 for those that it has not. InvalidArgument: the cut names an axis that is none, or dp,
  // whose ranks have copies.
  static absl::StatusOr<LocalBox> LocalPart(const Session& session, const std::vector<int64_t>& shape,
                                            const Sharding& cut);
  // `shape`, whose product is `count`, matters to PowerSGD alone; empty: a vector.
  absl::Status AddGradient(float* data, size_t count, std::vector<int64_t> shape = {});
  // The program's own choices, before the first Begin. InvalidArgument: no checkpoints of a run are lazy or
  // read-only, and its own function is what they call before a save.
  absl::Status SetCheckpoints(CheckpointOptions options);
  absl::Status SetReducer(ReducerOptions options);

  // The ranks that differ from this one along an axis of the mesh alone, in the order of their coordinates,
  // in this generation: for collectives of a computation, behind a Begin. The first call for an axis of size
  // 1 is collective. Unavailable, also of its collectives: AwaitLoss says what to do.
  absl::StatusOr<std::shared_ptr<Communicator>> Along(const std::string& axis);
  // A computation ended in Unavailable: waits until the generation is over. True: it is, go on with Begin.
  // False: it was no rank's loss, within a minute at least.
  bool AwaitLoss();

  // Sets the gradients to zero where there is something to compute. Unavailable: there is no other generation
  // for this process: exit 75. FailedPrecondition: the last step was not reduced or not applied. Other errors
  // are those of the checkpoints, or say what differs between ranks.
  absl::StatusOr<StepPlace> Begin();
  // Ends the part before, whose loss was `loss`, and begins the next one of this rank, if there is any;
  // before the first one of a step `loss` is nothing. FailedPrecondition: no step was begun.
  absl::StatusOr<StepPart> NextPart(double loss);
  // The gradient is this rank's whole sum: it leaves while others are still computed, where the job
  // compresses; else with Reduce. Never blocks; Reduce returns its errors: there is no such gradient, or it
  // was ready in this step.
  void Ready(size_t gradient);
  // Sums gradients and loss over all ranks and divides both by the samples of the batch. True: every rank has
  // the same gradients now, and all make the update; the gradients are the means. False: the generation ended
  // before that, and the step is computed again from Begin. `loss` is 0 where the parts had theirs. Errors as
  // of Begin; FailedPrecondition: not all parts were computed.
  absl::StatusOr<bool> Reduce(double loss);
  // The update of the step is made.
  absl::Status Applied();

  // What the reduction of the last step that is to be applied says; zeros where gradients are not compressed.
  const ReducedStep& reduced() const { return reduced_; }
  // The mean over its batch; nullopt: a rank was lost before the losses were summed, and not the gradients.
  std::optional<double> loss() const { return has_loss_ ? std::optional(loss_) : std::nullopt; }

  // The program wants no more: all ranks end behind the next step that they make, as when the user asks to
  // stop. One of them suffices.
  void Stop() { wants_stop_ = true; }

  // Between steps and at the end, by all ranks after the same step. True: values[i] is the sum of theirs, of
  // each share that of one rank (MeshPlace::speaks).
  // False: a rank was lost. The next Begin goes on, and at the end says so again: then all sum again, the
  // ranks that are new as well. The result must change no state: others may not have got it.
  absl::StatusOr<bool> Sum(absl::Span<double> values);

  // Between steps: what error feedback owes the mean on account of this rank. It costs a copy of what
  // compression carries over.
  struct Residual {
    double norm = 0;
    int64_t lost = 0;  // ranks that took theirs along since this process trains
  };
  absl::StatusOr<Residual> residual();

 private:
  struct State {
    std::string name;
    char* data = nullptr;
    size_t bytes = 0;
    size_t count = 0;
    DType dtype = DType::kFloat32;
    std::vector<int64_t> shape = {};  // of the whole
    Sharding sharding = {};           // without its mesh
    bool sharded = false;
  };
  struct Gradient {
    float* data = nullptr;
    size_t count = 0;
    std::vector<int64_t> shape = {};
    bool ready = false;  // in this step
  };
  enum class Phase { kIdle, kComputing, kApplying };

  bool Armed() const { return comm_ != nullptr; }
  Parts& GetParts();
  absl::Status Form();
  absl::StatusOr<bool> KeepComputed();
  absl::Status Meet();
  absl::Status CheckPlace();
  absl::Status ConnectAxes();
  absl::Status Register(State state);
  Communicator& copies() const { return copies_ != nullptr ? *copies_ : *comm_; }
  absl::Status BroadcastState(Communicator& comm, int source, bool takes, bool sharded, bool replicated);
  absl::Status CompareHash(Communicator& comm, bool sharded, bool replicated);
  absl::Status Settle();
  absl::Status StartFresh();
  absl::Status HandOverFresh();
  absl::Status HandOver();
  absl::Status Take(const PartHandOver& hand_over);
  std::vector<absl::Span<char>> Blocks();
  void LeaveComm();
  absl::Status UndoStep();
  absl::Status OpenCheckpoints();
  absl::StatusOr<std::unique_ptr<Checkpointer>> MakeCheckpointer();
  absl::Status SaveIfDue();
  absl::Status OpenBesideTraining();
  sharding::SampleRange BeginParts(const sharding::SampleRange& batch, int64_t step);
  int64_t BatchSize() const;
  absl::Status ReduceGradients();
  absl::Status ReduceDense();
  absl::Status ReduceInParts();
  absl::Status SumTogether(absl::Span<const Gradient> gradients, size_t count);
  absl::Status ReduceCompressed();
  absl::Status OpenReducer();
  void LeaveReducer();
  void CountLostResiduals(int64_t carriers);
  absl::StatusOr<bool> AfterLoss();
  absl::Status SaveLast();
  absl::Status SaveNow();
  void SayWhere();
  void FillBlock();
  absl::Status ReadBlock();
  bool Lost(const absl::Status& status);

  const std::shared_ptr<Session> session_;
  ElasticOptions options_;
  std::vector<State> states_;
  std::vector<Gradient> gradients_;
  Likeness likeness_;
  std::unique_ptr<Parts> parts_;  // null before the first Begin

  std::shared_ptr<Communicator> comm_;    // of the generation; null: it is over, or there was none yet
  MeshPlace place_;                       // in it; `cell` is this process's as long as it lives
  bool placed_ = false;                   // it has one
  std::shared_ptr<Communicator> copies_;  // that hold the same part of the model; null: all ranks do
  std::map<std::string, std::shared_ptr<Communicator>> axes_;
  Checkpoints checkpoints_;
  std::unique_ptr<TreeSum> tree_;     // of a mesh
  std::vector<float> together_;       // gradients that are summed in one all-reduce
  bool all_opened_ = false;           // every rank said with the last step that its checkpointer is open
  int openings_failed_ = 0;           // in a row, because of the storage; equal on all ranks
  std::optional<Instant> reopen_at_;  // rank 0
  bool reopens_ = false;              // rank 0 said so with the last step
  std::unique_ptr<Reducer> reducer_;  // of the generation, or of the one before; null: gradients are summed
  std::vector<float> carried_;        // what compression carries over, when no reducer does
  bool reducer_has_it_ = false;       // what compression carries over is in reducer_
  bool carries_ = false;              // this rank took part in a generation with error feedback
  int64_t carriers_ = 0;              // the ranks of the last generation that did
  int64_t residuals_lost_ = 0;
  std::vector<BlockRange> residuals_;  // where they stand in carried_
  ReducedStep reduced_;
  absl::Status ready_error_;  // of Ready
  Agreement agreement_;
  // What this rank has computed of the step, and whether its gradients are as they were computed.
  BatchShare computed_;
  bool untouched_ = false;
  bool met_along_ = false;     // it has asked for ranks along an axis, whom one that is new would lack
  int64_t line_ = 0;           // MemberState::line
  bool is_computed_ = false;   // the whole step, by ranks of this generation
  std::vector<int> cells_;     // index = rank
  std::vector<int> machines_;  // likewise
  bool settled_ = false;       // all ranks of the generation have the state
  Phase phase_ = Phase::kIdle;

  int64_t applied_ = -1;
  int64_t held_ = -1;
  bool as_made_ = true;            // MemberState::as_made
  absl::Status why_lost_;          // the newest error of a call of a generation
  bool lost_ = false;              // there is nothing that this run could go on with
  sharding::SampleCursor cursor_;  // behind `applied_`
  sharding::SampleBlock block_{};  // step and cursor as they are handed over and saved
  double loss_ = 0;                // mean of the step that is held
  bool has_loss_ = false;
  bool wants_stop_ = false;  // this rank's program
  bool pauses_ = false;      // all stand still before the next step, for others to come
  bool stop_ = false, saved_last_ = false, said_end_ = false;
  int64_t reforms_ = 0;

  std::unique_ptr<StepCopies> step_copies_;  // null: the job wants none, or there is one part
  // Reads the state, which changes only when what is under way is over.
  std::unique_ptr<StreamsBeside> beside_;
};

}  // namespace gtrain::elastic
