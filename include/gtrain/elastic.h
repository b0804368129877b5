// Training that does not stop, whichever rank is lost during a step.
#pragma once
#include <gtrain/checkpoint.h>
#include <gtrain/communicator.h>
#include <gtrain/elastic_c.h>
#include <gtrain/reducer.h>
#include <gtrain/samples.h>
#include <gtrain/session.h>
#include <gtrain/sharding.h>
#include <gtrain/status.h>
#include <gtrain/types.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gtrain {

class Elastic;

namespace internal {

// Programs that are built without optimisation, or with GTRAIN_PROTECT_STATE, cannot write to state outside
// an update: who does so gets SIGSEGV there, with a line on stderr that names the state, and no weights that
// differ from those of the other ranks.
#if defined(GTRAIN_PROTECT_STATE) || (!defined(NDEBUG) && !defined(__OPTIMIZE__))
inline constexpr bool kProtectsState = true;
#else
inline constexpr bool kProtectsState = false;
#endif

// Owns memory of gtrain_state_allocate.
class StateMemory {
 public:
  explicit StateMemory(size_t bytes) : bytes_(bytes), data_(gtrain_state_allocate(bytes)) {
    if (data_ != nullptr || bytes == 0) return;
#if defined(__cpp_exceptions)
    throw std::bad_alloc();  // as a vector would
#else
    std::abort();
#endif
  }
  StateMemory(const StateMemory&) = delete;
  StateMemory& operator=(const StateMemory&) = delete;
  ~StateMemory() { gtrain_state_free(data_, bytes_); }
  void* data() const { return data_; }
  void SetWritable(bool writable) const { gtrain_state_set_writable(data_, bytes_, writable ? 1 : 0); }

 private:
  const size_t bytes_;
  void* const data_;
};

}  // namespace internal

// Gradients of float32: zeros when a step begins, the sum over this rank's samples when it calls Apply, the
// mean over the samples of the whole batch in the update. With a mesh they are summed along dp. Their memory
// stays where it is, so that backward may write straight into it. `comm.compression` of the job file, or
// Compress, says how they travel; residuals and warm-up live through the loss of other ranks.
class ElasticGradients {
 public:
  std::span<float> operator[](size_t i) { return parts_.at(i); }
  size_t size() const { return parts_.size(); }
  // Gradient i is this rank's whole sum and stays as it is until the update: with compression it leaves while
  // others are computed. Never blocks; Apply returns its errors (no such gradient; ready twice in a step),
  // and takes those that nobody said to be ready. On the thread that trains.
  void Ready(size_t i) { gtrain_elastic_ready(run_, i); }

 private:
  friend class Elastic;
  std::vector<std::vector<float>> parts_;
  std::vector<std::vector<int64_t>> shapes_;
  gtrain_elastic* run_ = nullptr;
};

// One part of a step: samples whose gradients and loss are summed before those of any other. A rank has one
// part, its share, or, with `elastic: {determinism: bitwise}` in the job file, several, whose number and
// samples do not depend on how many ranks there are; gradients are zeros when each begins.
class MicroBatch {
 public:
  std::span<const int64_t> samples() const {  // at least one
    return {part_.samples, static_cast<size_t>(part_.sample_count)};
  }
  int64_t virtual_rank() const { return part_.virtual_rank; }  // in this step, from 0
  // For what this part draws (dropout, augmentation): of the data's seed, the step and the virtual rank.
  uint64_t seed() const { return part_.seed; }
  // The sum of the losses of its samples, 0 until it is set.
  void SetLoss(double loss) { loss_ = loss; }

 private:
  friend class Step;
  gtrain_elastic_part part_{};
  double loss_ = 0;
};

// One step on this rank. Its function may run again for the same step, also on fewer or more samples, so it
// changes no state; the update given to Apply does.
class Step {
 public:
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  int64_t number() const { return place_.step; }  // the first is 1
  int64_t steps() const { return place_.steps; }  // the last one's number
  int64_t epoch() const { return place_.epoch; }  // from 0
  int64_t batch() const { return place_.batch; }  // samples of all ranks together
  std::span<const int64_t> samples() const {      // this rank's share, that of all its parts
    return {place_.samples, static_cast<size_t>(place_.sample_count)};
  }

  // The ranks that differ from this one along this axis of the job's mesh alone, in the order of their
  // coordinates: for what the function computes with them. Take it anew in each step, and return its errors:
  // when a rank was lost Train runs the step again. This rank alone where the job has no such axis.
  Result<Communicator> Along(const std::string& axis) const {
    gtrain_communicator* made = nullptr;
    Status status = internal::Call(gtrain_elastic_along, run_, axis.c_str(), &made);
    if (!status.ok()) return status;
    return Communicator::Adopt(made, std::chrono::milliseconds(GTRAIN_TIMEOUT_MS));
  }
  // The parts of this rank, for one loop over all of them: `for (gtrain::MicroBatch& part : step.parts())`.
  // There may be none. A program that takes parts leaves the samples of the step alone and gives Apply no
  // loss. With `determinism: bitwise` anything else is a kFailedPrecondition of Apply.
  class Parts {
   public:
    class iterator {
     public:
      MicroBatch& operator*() const { return step_->micro_batch_; }
      iterator& operator++() {
        step_->NextPart();
        return *this;
      }
      bool operator!=(const iterator& /*end*/) const { return step_->micro_batch_.part_.done == 0; }

     private:
      friend class Parts;
      explicit iterator(Step* step) : step_(step) {}
      Step* step_;
    };
    iterator begin() const {
      step_->NextPart();
      return iterator(step_);
    }
    iterator end() const { return iterator(step_); }

   private:
    friend class Step;
    explicit Parts(Step* step) : step_(step) {}
    Step* step_;
  };
  Parts parts() { return Parts(this); }

  // Waits until every rank has the sum of all ranks' gradients, and calls `update` on all of them: it changes
  // the state by `gradients` alone, is the same on all ranks, calls no collective and does not throw. `loss`
  // is the sum over this rank's samples; of the ranks that train the same ones (along pp, tp, cp, ep) that of
  // the last counts. kAborted: a rank was lost before that; nothing is updated, and Train
  // runs the step again. Call it once a step.
  template <typename Update>
  Status Apply(ElasticGradients&, double loss, Update update) {
    static_assert(std::is_nothrow_invocable_v<Update>,
                  "the update is noexcept: it is made on all ranks or on none");
    if (!parts_status_.ok()) return parts_status_;
    if (std::exchange(used_, true)) return Status(StatusCode::kAborted, "this step was applied, or is over");
    int apply = 0;
    Status status = internal::Call(gtrain_elastic_reduce, run_, loss, &apply);
    if (!status.ok()) return status;
    if (apply == 0)
      return Status(StatusCode::kAborted,
                    "a rank was lost before all had the gradients: the step is computed again");
    SetWritable(true);
    update();
    status = internal::Call(gtrain_elastic_applied, run_);
    SetWritable(false);
    return status;
  }
  // The same where the parts had their losses.
  template <typename Update>
  Status Apply(ElasticGradients& gradients, Update update) {
    return Apply(gradients, 0, std::move(update));
  }

  // In the update and behind it. What compression says of this rank's gradients; `momentum_travelled` is
  // equal on all ranks, so the update may depend on it.
  ReducedStep reduced() const {
    gtrain_reduced_step c{};
    c.size = sizeof(c);
    gtrain_elastic_reduced(run_, &c, nullptr, nullptr);
    return internal::ReducedStepOf(c);
  }
  // The mean over the samples of the whole batch; nullopt: a rank was lost before all had said theirs.
  std::optional<double> loss() const {
    double loss = NAN;
    gtrain_elastic_reduced(run_, nullptr, &loss, nullptr);
    return std::isnan(loss) ? std::nullopt : std::optional(loss);
  }

 private:
  friend class Elastic;
  // An error ends the loop over the parts, and Apply returns it.
  void NextPart() {
    const double loss = std::exchange(micro_batch_.loss_, 0);
    micro_batch_.part_.size = sizeof(gtrain_elastic_part);
    parts_status_ = internal::Call(gtrain_elastic_next_part, run_, loss, &micro_batch_.part_);
    if (!parts_status_.ok()) micro_batch_.part_.done = 1;
  }

  Step(const Elastic* owner, gtrain_elastic* run, const gtrain_elastic_step& place)
      : owner_(owner), run_(run), place_(place) {}
  void SetWritable(bool writable) const;

  const Elastic* const owner_;
  gtrain_elastic* const run_;
  const gtrain_elastic_step place_;
  MicroBatch micro_batch_;
  Status parts_status_;
  bool used_ = false;
};

// Runs one program in three ways: started by hand, in a job that restarts, and in a job with `elastic: {mode:
// in-place}`, whose processes survive the loss of others. One thread may use it. It takes care of membership,
// checkpoints (where the job says so), stops and notices.
//
//   gtrain::Status Train(gtrain::Elastic& run) {
//     auto w = run.Replicated<float>("w", kDim, [](auto w) { std::ranges::fill(w, 0.f); });
//     auto& gradients = run.Reduce({kDim});
//     const auto data = run.Samples({.samples = 60'000, .epochs = 3, .global_batch = 48});
//     return run.Train(data, [&](gtrain::Step& step) {
//       double loss = 0;
//       for (int64_t i : step.samples()) loss += Accumulate(i, w, gradients[0]);
//       gradients.Ready(0);
//       return step.Apply(gradients, loss, [&]() noexcept { Update(w, gradients[0]); });
//     });
//   }
//   int main(int argc, char** argv) { return gtrain::Main(argc, argv, Train); }
class Elastic {
 public:
  explicit Elastic(Session session) : session_(std::move(session)) {}

  // State that is equal on all ranks: `count` elements, which `init` sets. A later rank has the state of
  // the others, or of the checkpoint, when Train runs its first step. Valid as long as this object. A program
  // that is built without optimisation, or with GTRAIN_PROTECT_STATE, gets SIGSEGV where it writes to it
  // outside an update, and a line on stderr that says so.
  template <typename T, typename Init>
  std::span<T> Replicated(std::string name, size_t count, Init init) {
    const auto memory = Allocate<T>(count);
    const std::span<T> view(static_cast<T*>(memory->data()), count);
    init(view);
    Replicated(std::move(name), view);
    states_.back().memory = memory;
    return view;
  }
  // The same in the program's own memory, which must outlive this object. `shape`, whose product is the size,
  // is that in checkpoints; empty: a vector.
  template <typename T>
  void Replicated(std::string name, std::span<T> memory, std::vector<int64_t> shape = {}) {
    if (shape.empty()) shape = {static_cast<int64_t>(memory.size())};
    states_.push_back({std::move(name), memory.data(), memory.size(), static_cast<gtrain_dtype>(DTypeOf<T>()),
                       nullptr, std::move(shape)});
  }
  // State of which each rank has a part: a tensor of `shape`, cut along axes of the job's mesh but dp (`cut`
  // has no mesh; an axis that the job has not is of size 1). A process has the same part as long as it lives,
  // and each rank along dp a copy of it, from which a lost one comes; where none is left all ranks go back to
  // the newest checkpoint. `init` sets this rank's part, dense, row by row, of the box that it is given.
  template <typename T, typename Init>
  std::span<T> Sharded(std::string name, std::vector<int64_t> shape, Sharding cut, Init init) {
    const Result<LocalBox> box = LocalPart(shape, cut);
    size_t count = box.ok() && box->holds ? 1 : 0;
    for (size_t i = 0; count > 0 && i < shape.size(); ++i) count *= static_cast<size_t>(box->shape[i]);
    const auto memory = Allocate<T>(count);
    const std::span<T> view(static_cast<T*>(memory->data()), count);
    if (count > 0) init(view, *box);
    Sharded(std::move(name), view, std::move(shape), std::move(cut));
    states_.back().memory = memory;
    return view;
  }
  // The same in the program's own memory, which must outlive this object. Train says what is wrong with it.
  template <typename T>
  void Sharded(std::string name, std::span<T> part, std::vector<int64_t> shape, Sharding cut) {
    states_.push_back({std::move(name), part.data(), part.size(), static_cast<gtrain_dtype>(DTypeOf<T>()),
                       nullptr, std::move(shape), std::move(cut), true});
  }
  // The part of a tensor that this process has as long as it lives. kInvalidArgument: the cut names dp, an
  // axis that is none, or dimensions that are not there.
  Result<LocalBox> LocalPart(const std::vector<int64_t>& shape, const Sharding& cut) const {
    LocalBox box{std::vector<int64_t>(shape.size()), std::vector<int64_t>(shape.size())};
    int holds = 0;
    Status status = internal::Call(gtrain_elastic_local_part, session_.handle(), shape.data(),
                                   static_cast<int>(shape.size()), internal::ShardingView(cut).get(),
                                   box.begin.data(), box.shape.data(), &holds);
    if (!status.ok()) return status;
    box.holds = holds != 0;
    return box;
  }
  // Gradients of these sizes, as long-lived as this object; call it once.
  ElasticGradients& Reduce(const std::vector<size_t>& sizes) {
    for (const size_t size : sizes) AddGradient(size, {static_cast<int64_t>(size)});
    return gradients_;
  }
  // The same for tensors of these shapes, which PowerSGD compresses as matrices.
  ElasticGradients& ReduceTensors(const std::vector<std::vector<int64_t>>& shapes) {
    for (const std::vector<int64_t>& shape : shapes) AddGradient(CountOf(shape), shape);
    return gradients_;
  }
  // How gradients travel where the job file does not say it.
  void Compress(const CompressionOptions& compression) { compression_ = compression; }
  // Where checkpoints go, and when, where the job file does not say it. They are not lazy and not read-only,
  // and have no `before_save`: Train returns kInvalidArgument.
  void Checkpoint(CheckpointOptions options) { checkpoint_ = std::move(options); }
  // The data of this run: each sample of an epoch is trained once, whatever the number of ranks.
  SamplesOptions Samples(SamplesOptions options) const { return options; }

  // Runs `step` until all samples are trained or somebody asks to stop. kUnavailable: there is no other
  // generation for this process: exit with 75, as Main does. An error of `step` ends it, but for the kAborted
  // of its Apply.
  template <typename StepFunction>
  Status Train(const SamplesOptions& data, StepFunction step) {
    Status status = Open(data);
    while (status.ok()) {
      gtrain_elastic_step place{};
      place.size = sizeof(place);
      status = Begin(&place);
      if (!status.ok()) break;
      done_ = place.done != 0;
      stopped_ = place.stopped != 0;
      if (done_) return Status();
      Step now(this, run_.get(), place);
      SetWritable(false);
      status = step(now);
      SetWritable(true);
      if (status.code() == StatusCode::kAborted && now.used_) status = Status();
      if (status.code() == StatusCode::kUnavailable && !now.used_) {
        int lost = 0;
        const Status asked = internal::Call(gtrain_elastic_await_loss, run_.get(), &lost);
        if (!asked.ok() || lost != 0) status = asked;
      }
    }
    return status;
  }

  // The ranks that differ from this one along this axis of the job's mesh alone, in the order of their
  // coordinates, for what a step function, or `part` of Evaluate, computes with them. Take it anew in each,
  // and return its errors: when a rank was lost they run again. This rank alone where the job has no such
  // axis, or one of size 1; the first call for it in a generation is made by all ranks alike.
  Result<Communicator> Along(const std::string& axis) const {
    if (run_ == nullptr) return NotYet();
    gtrain_communicator* made = nullptr;
    Status status = internal::Call(gtrain_elastic_along, run_.get(), axis.c_str(), &made);
    if (!status.ok()) return status;
    return Communicator::Adopt(made, std::chrono::milliseconds(GTRAIN_TIMEOUT_MS));
  }

  // In the step function, on any rank: all end behind the next step that they make, as when the user asks to
  // stop. Never blocks.
  void Stop() {
    stops_ = true;
    if (run_ != nullptr) gtrain_elastic_stop(run_.get(), nullptr);
  }
  bool stopped() const { return stopped_; }  // Train ended before the last sample: somebody asked to stop
  const Session& session() const { return session_; }

  // Sums over all ranks what `part(begin, end)`, a double or a Result of one, says of this rank's part of
  // `count` items, as a validation does; ranks that train the same samples have the same part, and it counts
  // once. Behind Train, or in its step function behind Apply, by all ranks of a step. Behind Train
  // `part` runs again for another part when a rank was lost. In a step the result is kAborted then, which the
  // step function returns: that step has none on this rank, so no state may depend on it.
  template <typename Part>
  Result<double> Evaluate(int64_t count, Part part) {
    if (run_ == nullptr) return NotYet();
    for (;;) {
      const Result<double> mine = part(count * share_ / shares_, count * (share_ + 1) / shares_);
      int all = 0, lost = 0;
      Status status = mine.status();
      double sum = mine.ok() ? *mine : 0;
      if (mine.ok()) status = internal::Call(gtrain_elastic_sum, run_.get(), &sum, size_t{1}, &all);
      if (status.code() == StatusCode::kUnavailable && !mine.ok()) {
        const Status asked = internal::Call(gtrain_elastic_await_loss, run_.get(), &lost);
        if (!asked.ok() || lost != 0) status = asked;
      }
      if (!status.ok()) return status;
      if (all != 0) return sum;
      if (!done_) return Status(StatusCode::kAborted, "a rank was lost: there is no sum over all ranks");
      gtrain_elastic_step place{};
      place.size = sizeof(place);
      status = Begin(&place);
      if (!status.ok()) return status;
    }
  }

  // What error feedback holds back on this rank, as its part of the mean, and how many ranks took theirs
  // along since this process trains. Between steps, or before the first Ready of one. It costs a copy of the
  // gradients.
  struct Residual {
    double norm = 0;  // Euclidean
    int64_t lost = 0;
  };
  Result<Residual> residual() const {
    if (run_ == nullptr) return NotYet();
    Residual residual;
    Status status = internal::Call(gtrain_elastic_residual, run_.get(), &residual.norm, &residual.lost);
    if (!status.ok()) return status;
    return residual;
  }

 private:
  friend class Step;
  struct State {
    std::string name;
    void* data;
    size_t count;
    gtrain_dtype dtype;
    std::shared_ptr<internal::StateMemory> memory;  // null: the program's
    std::vector<int64_t> shape;                     // of the whole
    Sharding cut = {};
    bool sharded = false;
  };
  // Train says what is wrong with a size below zero.
  static size_t CountOf(const std::vector<int64_t>& shape) {
    size_t count = 1;
    for (const int64_t size : shape) count *= size < 0 ? 0 : static_cast<size_t>(size);
    return count;
  }
  static Status NotYet() {
    return Status(StatusCode::kFailedPrecondition, "there is no run yet: that is for Train and behind it");
  }
  Status Begin(gtrain_elastic_step* place) {
    Status status = internal::Call(gtrain_elastic_begin, run_.get(), place);
    share_ = place->share;
    shares_ = place->shares > 0 ? place->shares : 1;
    return status;
  }
  template <typename T>
  static std::shared_ptr<internal::StateMemory> Allocate(size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    return std::make_shared<internal::StateMemory>(count * sizeof(T));
  }
  void SetWritable(bool writable) const {
    if (!internal::kProtectsState) return;
    for (const State& state : states_) {
      if (state.memory != nullptr) state.memory->SetWritable(writable);
    }
  }
  Status Open(const SamplesOptions& options) {
    const gtrain_samples_options c = internal::SamplesOptionsOf(options);
    gtrain_elastic* made = nullptr;
    Status status = internal::Call(gtrain_elastic_open, session_.handle(), &c, &made);
    run_.reset(made);
    if (status.ok() && stops_) gtrain_elastic_stop(made, nullptr);
    if (status.ok() && checkpoint_) status = SetCheckpoints();
    const gtrain_compression compression = internal::CompressionFor(compression_);
    gtrain_reducer_options reducer{};
    reducer.size = sizeof(reducer);
    reducer.compression = &compression;
    if (status.ok()) status = internal::Call(gtrain_elastic_set_reducer, made, &reducer);
    for (const State& state : states_) {
      if (status.ok() && state.sharded) {
        status = internal::Call(gtrain_elastic_add_sharded, made, state.name.c_str(), state.data, state.count,
                                state.dtype, state.shape.data(), static_cast<int>(state.shape.size()),
                                internal::ShardingView(state.cut).get());
        continue;
      }
      if (status.ok() && CountOf(state.shape) != state.count)
        status = Status(StatusCode::kInvalidArgument, "the shape of " + state.name + " is not that of its " +
                                                          std::to_string(state.count) + " elements");
      if (status.ok())
        status = internal::Call(gtrain_elastic_add_state_of_shape, made, state.name.c_str(), state.data,
                                state.shape.data(), static_cast<int>(state.shape.size()), state.dtype);
    }
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const std::vector<int64_t>& shape = gradients_.shapes_[i];
      if (status.ok())
        status = internal::Call(gtrain_elastic_add_gradient_of_shape, made, gradients_[i].data(),
                                shape.data(), static_cast<int>(shape.size()));
    }
    gradients_.run_ = made;
    return status;
  }
  Status SetCheckpoints() {
    if (checkpoint_->before_save)
      return Status(StatusCode::kInvalidArgument, "the checkpoints of an elastic run have no before_save");
    const gtrain_checkpoint_options c = internal::CheckpointOptionsOf(*checkpoint_);
    return internal::Call(gtrain_elastic_set_checkpoints, run_.get(), &c);
  }
  void AddGradient(size_t count, std::vector<int64_t> shape) {
    gradients_.parts_.emplace_back(count);
    gradients_.shapes_.push_back(std::move(shape));
  }

  Session session_;
  bool done_ = false, stopped_ = false;
  bool stops_ = false;  // said before Train
  int64_t share_ = 0, shares_ = 1;
  CompressionOptions compression_;
  std::optional<CheckpointOptions> checkpoint_;
  std::vector<State> states_;
  ElasticGradients gradients_;
  std::unique_ptr<gtrain_elastic, internal::Freer<gtrain_elastic, gtrain_elastic_free>> run_;
};

inline void Step::SetWritable(bool writable) const { owner_->SetWritable(writable); }

// Joins, runs, and returns the exit code that gtrain understands: 0; 75 to be run again; 1 with the error on
// stderr. A process that starts beside the others waits for its place in its first step, so whatever it loads
// before that holds up nobody (but with a `mesh` of more than dp: there it waits before the program begins,
// and what is slow is best loaded before Main).
template <typename Program>
int Main(int /*argc*/, char** /*argv*/, Program program) {
  Result<Session> session = Session::Join({.stays = true, .place_later = true});
  Status status = session.status();
  if (session.ok()) {
    Elastic run(*std::move(session));
    status = program(run);
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "gtrain: %s\n", status.ToString().c_str());
  return status.exit_code();
}

}  // namespace gtrain
