// Sharded checkpoints: registered state, saved beside training, committed whole or not at all.
#pragma once
#include <gtrain/communicator.h>
#include <gtrain/gtrain_c.h>
#include <gtrain/memory.h>
#include <gtrain/reducer.h>
#include <gtrain/session.h>
#include <gtrain/sharding.h>
#include <gtrain/status.h>
#include <gtrain/types.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace gtrain {

struct CheckpointOptions {
  std::string uri = {};  // a directory all ranks see; $GTRAIN_CHECKPOINT_URI wins if set
  int keep = 3;          // committed ones to keep; $GTRAIN_CHECKPOINT_KEEP wins if set
  std::optional<int64_t> every_steps =
      std::nullopt;  // when SaveIfDue saves; $GTRAIN_CHECKPOINT_EVERY wins if set
  std::optional<std::chrono::milliseconds> every = std::nullopt;
  std::chrono::milliseconds commit_timeout = std::chrono::minutes(10);
  // Opens for reading only: Restore works, Save and SaveIfDue return kFailedPrecondition, nothing is written
  // and no owner loses anything. $GTRAIN_CHECKPOINT_READ_ONLY=1 sets it too.
  bool read_only = false;
  // Takes the directory although another program that is alive owns it. The next save of that program fails
  // and names the new owner of the directory. $GTRAIN_TAKEOVER=1 (gtrain launch --takeover) sets it too.
  bool takeover = false;
  // How many damaged checkpoints, one after the other, a Restore may fall back over before it gives up.
  // $GTRAIN_CHECKPOINT_MAX_ROLLBACK wins if set.
  int max_rollback = 1;
  // In which saves ranks compare hashes of their replicated state before anything is written: "off", "first",
  // or "every N". $GTRAIN_CHECKPOINT_VERIFY_REPLICAS wins if set.
  std::string verify_replicas = "every 100";
  // Save returns at once and the state is copied while the program computes with it. The program promises to
  // call Fence() before it changes the state.
  bool lazy = false;
  // Every save that is not skipped calls it before it copies, to bring state that lies elsewhere into the
  // registered memory. Its error becomes that of the save, which then saves nothing. It must not call gtrain.
  std::function<Status()> before_save = nullptr;
};

struct RestoredStep {
  int64_t step = 0;
  // Both count bytes for this rank alone: its state, each byte read once, and what was read from storage for
  // it (whole chunks).
  uint64_t bytes = 0;
  uint64_t bytes_read = 0;
};

struct RestoreOptions {
  // Names of registered tensors (`*` and `?` stand for any characters) that the checkpoint may lack: these
  // are left as they are, and named in the log. Any other tensor that it lacks is an error.
  std::vector<std::string> may_be_missing = {};
};

// The result of SaveIfDue, equal on all ranks.
struct StepEnd {
  bool saved = false;
  // The user asked to stop: leave the loop, Commit the same step, return 0 from main().
  bool stop = false;
};

namespace internal {

// A Sharding as the C interface takes it; the Sharding must outlive it.
class ShardingView {
 public:
  explicit ShardingView(const Sharding& sharding) {
    for (const MeshAxis& axis : sharding.mesh) mesh_.push_back({axis.name.c_str(), axis.size});
    for (const Split& split : sharding.splits)
      splits_.push_back({split.dim, split.axis.c_str(), static_cast<gtrain_split_rule>(split.rule)});
    for (const Only& only : sharding.only) only_.push_back({only.axis.c_str(), only.index});
    view_ = {sizeof(view_),
             mesh_.data(),
             static_cast<int>(mesh_.size()),
             splits_.data(),
             static_cast<int>(splits_.size()),
             only_.data(),
             static_cast<int>(only_.size())};
  }
  const gtrain_sharding* get() const { return &view_; }

 private:
  std::vector<gtrain_mesh_axis> mesh_;
  std::vector<gtrain_split> splits_;
  std::vector<gtrain_only> only_;
  gtrain_sharding view_;
};

// As the C interface takes them, without `before_save`. Points into `options`.
inline gtrain_checkpoint_options CheckpointOptionsOf(const CheckpointOptions& options) {
  gtrain_checkpoint_options c{};
  c.size = sizeof(c);
  c.uri = options.uri.empty() ? nullptr : options.uri.c_str();
  c.keep = options.keep;
  c.every_steps = options.every_steps.value_or(0);
  c.every_seconds = options.every ? std::chrono::duration<double>(*options.every).count() : 0;
  c.commit_timeout_ms = options.commit_timeout.count();
  c.lazy = options.lazy;
  c.verify_replicas = options.verify_replicas.c_str();
  c.max_rollback = options.max_rollback == 0 ? -1 : options.max_rollback;
  c.read_only = options.read_only;
  c.takeover = options.takeover;
  return c;
}

// Runs a function of the program for the library, because exceptions must not cross the C interface.
template <typename Body>
gtrain_status Guard(Status* failed, Body body) {
#if defined(__cpp_exceptions)
  try {
    *failed = body();
  } catch (const std::exception& e) {
    *failed = Status(StatusCode::kInternal, e.what());
  } catch (...) {
    *failed = Status(StatusCode::kInternal, "the program threw something that is no std::exception");
  }
#else
  *failed = body();
#endif
  return static_cast<gtrain_status>(failed->code());
}

}  // namespace internal

// Computes the part of a tensor of this shape that `rank` holds, and so the shape of the memory that
// AddSharded wants. kInvalidArgument says what is wrong with the sharding.
inline Result<LocalBox> LocalBoxOf(std::span<const int64_t> shape, const Sharding& sharding, int rank) {
  LocalBox box{std::vector<int64_t>(shape.size()), std::vector<int64_t>(shape.size())};
  int holds = 0;
  Status status = internal::Call(gtrain_local_box, shape.data(), static_cast<int>(shape.size()),
                                 internal::ShardingView(sharding).get(), rank, box.begin.data(),
                                 box.shape.data(), &holds);
  if (!status.ok()) return status;
  box.holds = holds != 0;
  return box;
}

// Saves and restores the state of a program: register the state once, then Restore, then save. Registered
// memory is the caller's and must outlive the Checkpointer. It is used by one thread at a time, and moved but
// not copied; session, communicator and reducers may be destroyed before it. Under gtrain a process of its
// own writes: once Save() has returned on all ranks, the save is committed whatever becomes of the ranks.
// Outside gtrain a thread writes, and destroying the Checkpointer gives up a save that is not committed yet:
// call Commit or Wait first to keep it.
//
//   auto checkpointer = Checkpointer::Open(session, {.uri = "ckpt", .every_steps = 100}).value();
//   checkpointer.AddReplicated("weights", weights).ThrowIfError();
//   const auto restored = checkpointer.Restore().value();
//   int64_t step = restored ? restored->step : 0;  // the checkpoint knows it: it is not registered
//   while (step < last) {
//     ...
//     if (checkpointer.SaveIfDue(++step).value().stop) break;
//   }
//   checkpointer.Commit(step).ThrowIfError();
class Checkpointer {
 public:
  // Collective. kFailedPrecondition: the uri holds checkpoints of a different job and no --resume or --fresh
  // was given, or another program that is alive owns it.
  static Result<Checkpointer> Open(const Session& session, CheckpointOptions options = {}) {
    auto program = std::make_unique<Program>();
    program->before_save = std::move(options.before_save);
    gtrain_checkpoint_options c = internal::CheckpointOptionsOf(options);
    if (program->before_save) {
      c.before_save = [](void* user) {
        auto* const p = static_cast<Program*>(user);
        return internal::Guard(&p->failed, [&] { return p->before_save(); });
      };
      c.user = program.get();
    }
    gtrain_checkpointer* made = nullptr;
    Status status = internal::Call(gtrain_checkpointer_open, session.handle(), &c, &made);
    if (!status.ok()) return status;
    return Checkpointer(made, std::move(program));
  }

  // Every Add returns kInvalidArgument, with both numbers, when the size of `memory` is not that of the shape
  // and dtype, and kUnimplemented for memory that is not the host's.

  // Registers state that is equal on all ranks: it is saved once (ranks share the writing) and restored on
  // every rank.
  Status AddReplicated(const std::string& name, Memory memory, const std::vector<int64_t>& shape,
                       DType dtype) {
    if (Status host = HostOnly(memory); !host.ok()) return host;
    return internal::Call(gtrain_checkpointer_add_replicated, handle(), name.c_str(), memory.data,
                          memory.bytes, shape.data(), Dimensions(shape), static_cast<gtrain_dtype>(dtype));
  }
  // Registers a vector, array or span of a C++ type as a tensor of one dimension.
  template <typename Range>
  Status AddReplicated(const std::string& name, Range&& values) {
    const std::span view(values);
    return AddReplicated(name, {view.data(), view.size_bytes()}, {static_cast<int64_t>(view.size())},
                         DTypeOf<typename decltype(view)::element_type>());
  }
  // Registers a tensor of the global `shape` that lies on the ranks as `sharding` says. `memory` is this
  // rank's box of it, dense, row by row (LocalBoxOf tells its shape), and may be null where that box is
  // empty. Every rank registers every tensor, also those of which it holds nothing. A tensor saved under one
  // layout and world size is restored under any other, replicated or sharded.
  Status AddSharded(const std::string& name, Memory memory, const std::vector<int64_t>& shape,
                    const Sharding& sharding, DType dtype) {
    if (Status host = HostOnly(memory); !host.ok()) return host;
    return internal::Call(gtrain_checkpointer_add_sharded, handle(), name.c_str(), memory.data, memory.bytes,
                          shape.data(), Dimensions(shape), internal::ShardingView(sharding).get(),
                          static_cast<gtrain_dtype>(dtype));
  }
  // Registers a tensor whose cut no Sharding describes: this rank holds the box of `local_shape` at `begin`,
  // which is empty where one of its dimensions is 0. The boxes of two ranks are equal or have nothing in
  // common, and together the boxes are the whole tensor: the first Restore or Save names the ranks that break
  // this.
  Status AddBox(const std::string& name, Memory memory, const std::vector<int64_t>& shape,
                const std::vector<int64_t>& begin, const std::vector<int64_t>& local_shape, DType dtype) {
    if (Status host = HostOnly(memory); !host.ok()) return host;
    if (begin.size() != shape.size() || local_shape.size() != shape.size())
      return Status(StatusCode::kInvalidArgument, name + ": shape, begin and local_shape have other lengths");
    return internal::Call(gtrain_checkpointer_add_box, handle(), name.c_str(), memory.data, memory.bytes,
                          shape.data(), begin.data(), local_shape.data(), Dimensions(shape),
                          static_cast<gtrain_dtype>(dtype));
  }
  // Registers state of this rank alone (a data cursor). It is restored by the same rank number and must have
  // the same size then; at another world size Restore leaves it untouched on ranks that had none. `rule`,
  // equal on all ranks, says what happens to the state of ranks that no longer exist; kMerge is not allowed
  // here.
  Status AddPerRank(const std::string& name, Memory memory, PerRankRule rule = PerRankRule::kDrop) {
    if (Status host = HostOnly(memory); !host.ok()) return host;
    return internal::Call(gtrain_checkpointer_add_per_rank, handle(), name.c_str(), memory.data, memory.bytes,
                          static_cast<gtrain_per_rank_rule>(rule));
  }
  // Registers bytes of this rank alone whose number may change from save to save (RNG, a pickled loader).
  // Each save that is not skipped calls `save`, and Restore calls `load` once everything is verified, both on
  // the calling thread; an error that either returns, or an exception that it throws, becomes that of the
  // save or Restore. All of them together may have 64 MiB at most.
  Status AddBytes(const std::string& name, std::function<Result<std::string>()> save,
                  std::function<Status(std::string_view)> load, PerRankRule rule = PerRankRule::kDrop) {
    auto bytes = std::make_unique<Bytes>();
    bytes->save = std::move(save);
    bytes->load = std::move(load);
    bytes->program = program_.get();
    Status status = internal::Call(gtrain_checkpointer_add_bytes, handle(), name.c_str(), SaveBytes,
                                   LoadBytes, bytes.get(), static_cast<gtrain_per_rank_rule>(rule));
    if (status.ok()) program_->bytes.push_back(std::move(bytes));
    return status;
  }
  // Registers the state that the compression in `reducer` carries over from step to step.
  Status AddReducer(const Reducer& reducer) {
    return internal::Call(gtrain_checkpointer_add_reducer, handle(), reducer.handle());
  }

  // Collective, `options` equal on all ranks. Reads the newest committed and intact checkpoint into the
  // registered memory; nullopt when there is none. After an error the registered memory may hold parts of
  // what was read. A checkpoint that is proven to be damaged is passed over with a warning, at most
  // max_rollback in a row; then Restore returns kDataLoss. kUnavailable: the storage cannot be read, or the
  // newest checkpoint that the head knows is not where it was. Exit with 75 then: gtrain waits for the
  // storage, starts the job again and charges no restart for it.
  Result<std::optional<RestoredStep>> Restore(const RestoreOptions& options = {}) {
    std::vector<const char*> names;
    for (const std::string& name : options.may_be_missing) names.push_back(name.c_str());
    const gtrain_restore_options c{sizeof(c), names.data(), static_cast<int>(names.size())};
    RestoredStep restored;
    Status status = Told(gtrain_checkpointer_restore, &c, &restored.step);
    if (!status.ok()) return status;
    if (restored.step < 0) return std::optional<RestoredStep>();
    program_->restored = restored.step;
    status =
        internal::Call(gtrain_checkpointer_restored_bytes, handle(), &restored.bytes, &restored.bytes_read);
    if (!status.ok()) return status;
    return std::optional<RestoredStep>(restored);
  }

  // Collective; all ranks pass the same step. Copies the registered state (the only stall) and returns;
  // writing and commit go on beside training. Returns false where the save was skipped, because the previous
  // one is still being written, and true without a second save where the last save was SaveIfDue's of this
  // same step.
  Result<bool> Save(int64_t step) {
    int saved = 0;
    Status status = Told(gtrain_checkpointer_save, step, &saved);
    if (!status.ok()) return status;
    program_->restored.reset();
    return saved != 0;
  }
  // Collective; call it after every step. Saves when the policy says so (every_steps of `step`, or a
  // duration, or without a policy as often as Daly's formula says for the measured cost of a save and the
  // measured rate of interruptions of the job), and once as soon as a machine of the job is about to be taken
  // away or the user asks to stop. Rank 0 decides and tells all ranks, through a communicator of the
  // checkpointer's own.
  Result<StepEnd> SaveIfDue(int64_t step) {
    int saved = 0, stop = 0;
    Status status =
        Told(gtrain_checkpointer_save_if_due, step, static_cast<gtrain_communicator*>(nullptr), &saved);
    if (status.ok()) status = internal::Call(gtrain_checkpointer_stop_agreed, handle(), &stop);
    if (!status.ok()) return status;
    if (saved != 0) {
      program_->restored.reset();
      program_->saved_if_due = step;
    }
    return StepEnd{saved != 0, stop != 0};
  }
  // Collective; ends a program: returns when `step` is committed. Waits for an earlier save, then saves,
  // unless SaveIfDue did at this step or Restore has just read it, and waits for that save. The state must
  // not change between the last step and this call. Where there is no memory for the copy it tries again for
  // up to a minute, then returns kResourceExhausted.
  Status Commit(int64_t step, std::chrono::milliseconds timeout = std::chrono::minutes(10)) {
    if (program_->restored == step) return {};
    if (program_->saved_if_due == step) (void)Fence();  // the state is still that of the step
    // The result of an earlier save does not matter any more.
    if (Status earlier = Wait(timeout); earlier.code() == StatusCode::kDeadlineExceeded) return earlier;
    // All ranks get the same result from each attempt, so they make the same number of attempts.
    std::chrono::milliseconds pause(50);
    for (int attempt = 0; attempt < kCommitAttempts; ++attempt, pause *= 2) {
      const Result<bool> saved = Save(step);
      if (!saved.ok()) return saved.status();
      if (*saved) {
        (void)Fence();
        return Wait(timeout);
      }
      std::this_thread::sleep_for(pause);
    }
    return Status(StatusCode::kResourceExhausted, "the last step could not be saved: see the warnings");
  }
  // With `lazy`, call it after each save before anything changes the registered state: in a training step
  // right before the optimiser. Blocks until the state is copied, and helps to copy it. A save that was not
  // fenced when Wait, Save, SaveIfDue or the destructor is called may hold values of two steps, so it is
  // given up with a warning.
  Status Fence() { return internal::Call(gtrain_checkpointer_fence, handle()); }
  // Waits until the last save is committed or failed, and returns its error.
  Status Wait(std::chrono::milliseconds timeout) {
    return internal::Call(gtrain_checkpointer_wait, handle(), static_cast<int64_t>(timeout.count()));
  }
  // Returns the step of the newest commit that this process knows of.
  std::optional<int64_t> LastCommitted() const {
    int64_t step = -1;
    if (gtrain_checkpointer_last_committed(handle(), &step, nullptr) != GTRAIN_OK || step < 0)
      return std::nullopt;
    return step;
  }

  gtrain_checkpointer* handle() const { return handle_.get(); }

 private:
  static constexpr int kCommitAttempts = 10;
  struct Program;
  struct Bytes {
    std::function<Result<std::string>()> save;
    std::function<Status(std::string_view)> load;
    std::string saved;  // alive until the library has copied it
    Program* program = nullptr;
  };
  // Functions and buffers that the library calls or reads; it keeps pointers to them, so they must not move.
  struct Program {
    std::function<Status()> before_save;
    std::vector<std::unique_ptr<Bytes>> bytes;
    Status failed;                        // by the newest function that was called
    std::optional<int64_t> restored;      // what the state is, until the first save
    std::optional<int64_t> saved_if_due;  // the newest
  };

  Checkpointer(gtrain_checkpointer* handle, std::unique_ptr<Program> program)
      : program_(std::move(program)), handle_(handle) {}

  static int Dimensions(const std::vector<int64_t>& shape) { return static_cast<int>(shape.size()); }
  static Status HostOnly(const Memory& memory) {
    if (memory.kind == MemoryKind::kHost && memory.event == nullptr) return {};
    return Status(StatusCode::kUnimplemented, "checkpoints take the host's memory only");
  }
  static gtrain_status SaveBytes(void* user, const void** data, size_t* bytes) {
    auto* const self = static_cast<Bytes*>(user);
    return internal::Guard(&self->program->failed, [&]() -> Status {
      Result<std::string> saved = self->save();
      if (!saved.ok()) return saved.status();
      self->saved = *std::move(saved);
      *data = self->saved.data();
      *bytes = self->saved.size();
      return {};
    });
  }
  static gtrain_status LoadBytes(void* user, const void* data, size_t bytes) {
    auto* const self = static_cast<Bytes*>(user);
    return internal::Guard(&self->program->failed, [&] {
      return self->load({static_cast<const char*>(data), bytes});
    });
  }
  // Makes a call in which functions of the program may run, and adds the message of the one that failed.
  template <typename Function, typename... Arguments>
  Status Told(Function function, Arguments... arguments) {
    program_->failed = {};
    const Status status = internal::Call(function, handle(), arguments...);
    if (status.ok() || program_->failed.ok()) return status;
    return Status(status.code(), status.message() + ": " + program_->failed.message());
  }

  std::unique_ptr<Program> program_;  // outlives the handle
  std::unique_ptr<gtrain_checkpointer, internal::Freer<gtrain_checkpointer, gtrain_checkpointer_free>>
      handle_;
};

}  // namespace gtrain
