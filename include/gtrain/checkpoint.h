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
  int keep = 3;          // newest committed ones kept; $GTRAIN_CHECKPOINT_KEEP wins if set
  std::optional<int64_t> every_steps =
      std::nullopt;  // when SaveIfDue saves; $GTRAIN_CHECKPOINT_EVERY wins if set
  std::optional<std::chrono::milliseconds> every = std::nullopt;
  std::chrono::milliseconds commit_timeout = std::chrono::minutes(10);
  // Opens to look: Restore works, Save and SaveIfDue return kFailedPrecondition, nothing is written and no
  // owner loses anything. $GTRAIN_CHECKPOINT_READ_ONLY=1 sets it too.
  bool read_only = false;
  // Takes the directory although another program that is alive owns it. That one's next save fails and says
  // whom the directory belongs to now. $GTRAIN_TAKEOVER=1 (gtrain launch --takeover) sets it too.
  bool takeover = false;
  // How many damaged checkpoints, one after the other, a Restore may fall back over before it gives up.
  // $GTRAIN_CHECKPOINT_MAX_ROLLBACK wins if set.
  int max_rollback = 1;
  // In which saves ranks compare hashes of the state that they hold alike, before anything is written: "off",
  // "first", or "every N". $GTRAIN_CHECKPOINT_VERIFY_REPLICAS wins if set.
  std::string verify_replicas = "every 100";
  // Save returns at once and the state is copied while the program computes with it: promises that Fence() is
  // called before the state is changed.
  bool lazy = false;
  // Called by every save that is not skipped before it copies: brings state that lies elsewhere into the
  // registered memory. An error is that of the save, which then saves nothing. It must not call gtrain.
  std::function<Status()> before_save = nullptr;
};

struct RestoredStep {
  int64_t step = 0;
  // Of this rank: bytes of its state, each read once, and bytes read from storage for them (whole chunks).
  uint64_t bytes = 0;
  uint64_t bytes_read = 0;
};

struct RestoreOptions {
  // Names of registered tensors, `*` and `?` stand for any characters: those that the checkpoint lacks are
  // left as they are, and named in the log. Others that it lacks are an error.
  std::vector<std::string> may_be_missing = {};
};

// What SaveIfDue came to, equal on all ranks.
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

// Runs a function of the program that the library called: what it throws must not cross the library.
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

// What `rank` holds of a tensor of this shape, and so the shape of the memory that AddSharded wants.
// kInvalidArgument says what is wrong with the sharding.
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

// Register state once, then Restore, then save. Registered memory is the caller's and must outlive the
// Checkpointer. One thread at a time; moved and not copied; session, communicator and reducers may go first.
// Under gtrain a process of its own writes: once Save() has returned on all ranks, the save is committed
// whatever becomes of them. Run by hand a thread writes, and destroying the Checkpointer gives up a save that
// is not committed yet: Commit or Wait first to keep it.
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

  // Each Add: kInvalidArgument when `memory` has other bytes than the shape and dtype say, with both numbers;
  // kUnimplemented for memory that is not the host's.

  // State that is equal on all ranks: saved once (ranks share the writing), restored on every rank.
  Status AddReplicated(const std::string& name, Memory memory, const std::vector<int64_t>& shape,
                       DType dtype) {
    if (Status host = HostOnly(memory); !host.ok()) return host;
    return internal::Call(gtrain_checkpointer_add_replicated, handle(), name.c_str(), memory.data,
                          memory.bytes, shape.data(), Dimensions(shape), static_cast<gtrain_dtype>(dtype));
  }
  // A vector, array or span of a C++ type, as one dimension.
  template <typename Range>
  Status AddReplicated(const std::string& name, Range&& values) {
    const std::span view(values);
    return AddReplicated(name, {view.data(), view.size_bytes()}, {static_cast<int64_t>(view.size())},
                         DTypeOf<typename decltype(view)::element_type>());
  }
  // A tensor of the global `shape` that lies on the ranks as `sharding` says. `memory` is this rank's box of
  // it, dense, row by row (LocalBoxOf tells its shape), and may be null where that is empty. Every rank
  // registers every tensor, also those it holds nothing of. What was saved under one layout and world size is
  // restored under any other, replicated or sharded.
  Status AddSharded(const std::string& name, Memory memory, const std::vector<int64_t>& shape,
                    const Sharding& sharding, DType dtype) {
    if (Status host = HostOnly(memory); !host.ok()) return host;
    return internal::Call(gtrain_checkpointer_add_sharded, handle(), name.c_str(), memory.data, memory.bytes,
                          shape.data(), Dimensions(shape), internal::ShardingView(sharding).get(),
                          static_cast<gtrain_dtype>(dtype));
  }
  // The same for cuts that no Sharding describes: this rank holds the box of `local_shape` at `begin`, which
  // is empty where a dimension of it is 0. Boxes of two ranks are equal or have nothing in common, and
  // together they are the whole tensor: the first Restore or Save says which ranks break that.
  Status AddBox(const std::string& name, Memory memory, const std::vector<int64_t>& shape,
                const std::vector<int64_t>& begin, const std::vector<int64_t>& local_shape, DType dtype) {
    if (Status host = HostOnly(memory); !host.ok()) return host;
    if (begin.size() != shape.size() || local_shape.size() != shape.size())
      return Status(StatusCode::kInvalidArgument, name + ": shape, begin and local_shape have other lengths");
    return internal::Call(gtrain_checkpointer_add_box, handle(), name.c_str(), memory.data, memory.bytes,
                          shape.data(), begin.data(), local_shape.data(), Dimensions(shape),
                          static_cast<gtrain_dtype>(dtype));
  }
  // State of this rank alone (a data cursor): restored by the same rank number, of the same size; at another
  // world size Restore leaves it untouched on ranks that had none. `rule`, equal on all ranks: what becomes
  // of that of ranks that are no more; not kMerge.
  Status AddPerRank(const std::string& name, Memory memory, PerRankRule rule = PerRankRule::kDrop) {
    if (Status host = HostOnly(memory); !host.ok()) return host;
    return internal::Call(gtrain_checkpointer_add_per_rank, handle(), name.c_str(), memory.data, memory.bytes,
                          static_cast<gtrain_per_rank_rule>(rule));
  }
  // Bytes of this rank alone whose number may change from save to save (RNG, a pickled loader). `save` is
  // called by each save that is not skipped, `load` by Restore when everything is verified, on the calling
  // thread; an error of either, or what it throws, is that of the save or Restore. 64 MiB together at most.
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
  // What compression carries over in `reducer` from step to step.
  Status AddReducer(const Reducer& reducer) {
    return internal::Call(gtrain_checkpointer_add_reducer, handle(), reducer.handle());
  }

  // Collective, `options` equal on all ranks. The newest committed and intact checkpoint into the registered
  // memory; nullopt when there is none. After an error the registered memory may hold parts of what was read.
  // A checkpoint that is proven to be damaged is passed over with a warning, at most max_rollback in a row;
  // then kDataLoss. kUnavailable: the storage cannot be read, or the newest checkpoint that the head knows is
  // not where it was. Exit with 75: gtrain waits for the storage and starts the job again, and charges
  // nothing.
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

  // Collective; all ranks with the same step. Copies the registered state (the only stall) and returns;
  // writing and commit go on beside training. False: skipped, because the previous save is still being
  // written. True without a second save where SaveIfDue saved this step last.
  Result<bool> Save(int64_t step) {
    int saved = 0;
    Status status = Told(gtrain_checkpointer_save, step, &saved);
    if (!status.ok()) return status;
    program_->restored.reset();
    return saved != 0;
  }
  // Collective, after every step. Saves when the policy says so: every_steps of `step`, or a duration, or no
  // policy at all (then as often as Daly's formula says for what a save is measured to cost and how often the
  // job was interrupted); and once as soon as a machine of the job is about to be taken away or the user asks
  // to stop. Rank 0 decides, all hear it, through a communicator of the checkpointer's own.
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
  // Collective: returns when `step` is committed. Waits for an earlier save, saves unless SaveIfDue did at
  // this step or Restore has just read it, and waits for that. What a program ends with; the state does not
  // change between the last step and this. Where there is no memory for the copy it tries again for up to a
  // minute, then kResourceExhausted.
  Status Commit(int64_t step, std::chrono::milliseconds timeout = std::chrono::minutes(10)) {
    if (program_->restored == step) return {};
    if (program_->saved_if_due == step) (void)Fence();  // the state is still that of the step
    // What an earlier save came to counts no more.
    if (Status earlier = Wait(timeout); earlier.code() == StatusCode::kDeadlineExceeded) return earlier;
    // Ranks agree on what becomes of each, so they make the same number of them.
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
  // With `lazy`: after each save before anything changes the registered state, in a training step right
  // before the optimiser. Blocks until the state is copied, and helps. A save that was not fenced when Wait,
  // Save, SaveIfDue or the destructor is called may hold values of two steps, so it is given up with a
  // warning.
  Status Fence() { return internal::Call(gtrain_checkpointer_fence, handle()); }
  // Until the last save is committed or failed; its error.
  Status Wait(std::chrono::milliseconds timeout) {
    return internal::Call(gtrain_checkpointer_wait, handle(), static_cast<int64_t>(timeout.count()));
  }
  // Step of the newest commit this process knows of.
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
  // What the library may call, at addresses that stay.
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
  // A call in which functions of the program may run: the words of the one that failed are added.
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
