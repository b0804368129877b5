// The class behind MakeCommunicator: set-up, the frame of every collective and giving up are in
// communicator.cc, the collectives in collectives.cc and uneven.cc. The backends
// (comm/port/collective_backend.h) carry them out and say how; the class makes the one that fits where the
// ranks are.
//
// Among n ranks on N machines each rank keeps n times some hundred bytes (members, addresses, records), an
// arena where its machine has several of them (comm/shm/shm_group.h), and scratch of at most 16 MiB, from the
// first call on that needs some. comm/exec/point_to_point.h says what messages cost. A split is an all-gather
// of 16 bytes of each rank, an arena, and a barrier of the new communicator.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "comm/backends/between_machines.h"
#include "comm/exec/communicator.h"
#include "comm/exec/left_patience.h"
#include "comm/exec/link_memory.h"
#include "comm/exec/point_to_point.h"
#include "comm/plan/cost.h"
#include "comm/plan/hierarchy.h"
#include "comm/plan/op_record.h"
#include "comm/port/collective_backend.h"
#include "comm/port/watch.h"
#include "comm/shm/shm_group.h"

namespace gtrain::comm {

class ExecCommunicator final : public Communicator, private Interrupt {
 public:
  ExecCommunicator(Bootstrap* bootstrap, ExecOptions options);
  ~ExecCommunicator() override;

  absl::Status Connect();

  int rank() const override { return bootstrap_->rank(); }
  int size() const override { return bootstrap_->world_size(); }
  int machine() const override { return hierarchy_.node; }
  absl::Status AllReduce(void* data, size_t count, DType dtype, ReduceOp op) override;
  absl::Status Broadcast(void* data, size_t count, DType dtype, int root) override;
  absl::Status AllGather(const void* input, void* output, size_t count, DType dtype) override;
  absl::Status ReduceScatter(const void* input, void* output, size_t count, DType dtype,
                             ReduceOp op) override;
  absl::Status Reduce(void* data, size_t count, DType dtype, ReduceOp op, int root) override;
  absl::Status AllToAll(const void* input, void* output, size_t count, DType dtype) override;
  absl::Status Barrier() override;
  absl::Status Gather(const void* input, void* output, size_t count, DType dtype, int root) override;
  absl::Status Scatter(const void* input, void* output, size_t count, DType dtype, int root) override;
  absl::Status AllGatherV(const void* input, void* output, absl::Span<const size_t> counts,
                          DType dtype) override;
  absl::Status ReduceScatterV(const void* input, void* output, absl::Span<const size_t> counts, DType dtype,
                              ReduceOp op) override;
  absl::Status AllToAllV(const void* input, absl::Span<const size_t> send_counts, void* output,
                         absl::Span<const size_t> receive_counts, DType dtype) override;
  absl::Status SendMessage(const Message& message) override;
  absl::StatusOr<std::shared_ptr<PendingMessages>> Start(absl::Span<const Message> messages) override;
  absl::StatusOr<void*> Allocate(size_t bytes) override;
  absl::Status Free(void* memory) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;
  void Abort(const absl::Status& why) override;
  absl::Duration timeout() const override {
    const MutexLock lock(&state_);
    return timeout_;
  }
  void SetTimeout(absl::Duration timeout) override {
    const MutexLock lock(&state_);
    timeout_ = timeout;
  }
  void ReportCompression(const std::string& text) override { bootstrap_->ReportCompression(text); }

 private:
  class SubBootstrap;
  class Members;
  // Sends this rank's blob to all ranks and returns the blobs of all.
  using GatherFn = std::function<absl::StatusOr<std::vector<std::string>>(const std::string& blob)>;

  int nodes() const { return static_cast<int>(hierarchy_.nodes.size()); }
  // Computes a mean of integers: `sums` makes the calls and allocates the memory that they need. Before
  // `sums` touches any memory, all ranks agree on `record`: a wrong count is an error, and no write beyond
  // somebody's data.
  absl::Status TwoSums(const OpRecord& record, const void* data, absl::FunctionRef<absl::Status()> sums);
  // Where the mean of integers is asked for, these compute only the sum.
  absl::Status AllReduceOnce(void* data, size_t count, DType dtype, ReduceOp op);
  absl::Status ReduceScatterOnce(const void* input, void* output, size_t count, DType dtype, ReduceOp op);
  absl::Status ReduceOnce(void* data, size_t count, DType dtype, ReduceOp op, int root);
  absl::Status Connect(const GatherFn& gather, const Watch& watch);
  absl::StatusOr<std::vector<std::string>> Meet(const GatherFn& gather, const Watch& watch);
  absl::StatusOr<std::string> OpenOwn(const Watch& watch);
  absl::StatusOr<std::unique_ptr<Communicator>> MakePart(int color, int key);
  absl::Status OpenMemory(const Watch& watch);
  void MakeBackend();
  absl::StatusOr<std::string> OpenTransport();
  absl::Status ConnectPart(const ExecCommunicator& whole, const std::vector<int>& ranks);
  void WakeWithGeneration();
  std::unique_ptr<SubBootstrap> Part(const std::vector<int>& ranks, int rank) const;
  absl::Status OpenMessages();
  absl::Status CheckTags(absl::Span<const Message> messages);
  absl::Status Move(absl::Span<const Message> messages);
  absl::Status MoveBlocks(const char* input, absl::Span<const size_t> send_counts, char* output,
                          absl::Span<const size_t> receive_counts, DType dtype);
  // Makes the refusal of this rank's arguments an error of all ranks.
  absl::Status Refused(absl::Status status);
  absl::Status SomebodyLeft() const;
  absl::Status Check() const override;
  std::string Notice(const absl::Status& why) const override;
  // The name of a rank for its peers and for people.
  std::string NameOf(int rank) const;
  std::vector<std::string> NamesOf(const std::vector<int>& ranks) const;
  absl::Status WithMissing(const absl::Status& why) const;
  Watch MakeWatch() const { return Watch(bootstrap_, timeout(), this); }
  // Tells the others, makes this communicator dead, and returns `why`.
  absl::Status Die(absl::Status why);
  class Running;
  absl::Status NotForked() const;
  absl::Status Dead() const;
  absl::Status Usable() const;
  void DieIfAborted();
  // `data`: null where there is none and should be some.
  absl::Status Call(OpRecord record, const void* data,
                    absl::FunctionRef<absl::Status(const OpRecord&, const Watch&)> body);

  std::unique_ptr<SubBootstrap> own_bootstrap_;  // of a sub-communicator
  Bootstrap* const bootstrap_;
  const ExecOptions options_;
  const ForkGuard fork_guard_;
  Hierarchy hierarchy_;
  std::unique_ptr<ShmGroup> shm_;             // nullptr: one rank on every machine
  std::unique_ptr<DataTransport> transport_;  // among all ranks; nullptr: one machine
  // A transport to the ranks at this one's place on all machines, by machine; nullptr: not all have that
  // place.
  std::unique_ptr<DataTransport> rail_;
  std::unique_ptr<BetweenMachines> between_;    // nullptr: one machine
  std::unique_ptr<CollectiveBackend> backend_;  // nullptr: one rank
  AllReduceWish wish_;                          // the same on all ranks
  uint64_t nonce_ = 0;
  LinkMemory links_;
  std::shared_ptr<PointToPoint> messages_;
  std::vector<Mapping> private_;
  uint64_t sequence_ = 0;
  const ExecCommunicator* parent_ = nullptr;  // of a part while it is made
  const OpRecord* calling_ = nullptr;         // the collective that is running
  absl::Status refused_;                      // what is wrong with the arguments of the running call
  Mutex running_;                             // held by a call
  std::atomic<std::thread::id> caller_;
  mutable Mutex state_;
  mutable LeftPatience left_ ABSL_GUARDED_BY(state_);  // of the running call
  absl::Duration timeout_ ABSL_GUARDED_BY(state_);
  absl::Status dead_ ABSL_GUARDED_BY(state_);
  absl::Status aborted_for_;  // once, before:
  std::atomic<bool> aborted_ = false;
  Wakers::Handle waking_;
};

}  // namespace gtrain::comm
