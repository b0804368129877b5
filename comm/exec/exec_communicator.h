// The class behind MakeCommunicator: set-up and the frame of every collective in communicator.cc, reductions
// in all_reduce.cc and reduce.cc, what moves data alone in moves.cc and
// uneven.cc.
//
// Of n ranks on N machines each keeps n times some hundred bytes (members, addresses, records), an arena
// where its machine has several of them (comm/shm/shm_group.h), and scratch of at most kScheduleBytes for
// each way that needs some, from the first call that does. A frame is, on one machine, one meeting and n
// reads; with one rank on each, log2 N rounds of 64 bytes; where machines have several, two meetings and
// among the leaders the same, up to 16 machines a round in which all get 56 bytes of every rank; there a
// reduce-scatter carries what an all-reduce of its input does, an all-to-all among more than 256 ranks what
// an all-gather of everybody's input does. Messages: comm/exec/point_to_point.h. A split is an all-gather of
// 16 bytes of each rank, an arena, and a barrier of the new one.
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
#include "comm/codec/reduce.h"
#include "comm/exec/communicator.h"
#include "comm/exec/integer_mean.h"
#include "comm/exec/point_to_point.h"
#include "comm/exec/schedule_runner.h"
#include "comm/plan/cost.h"
#include "comm/plan/hierarchy.h"
#include "comm/plan/op_record.h"
#include "comm/plan/schedule.h"
#include "comm/plan/two_ways.h"
#include "comm/port/watch.h"
#include "comm/shm/shm_group.h"

namespace gtrain::comm {

// What is staged at once: small enough for the caches of the ranks.
inline constexpr size_t kStagedChunkBytes = 256 << 10;
static_assert(kStagedChunkBytes <= kSlotBytes);
// Largest part of a buffer that one schedule works on: bounds the scratch memory.
inline constexpr size_t kScheduleBytes = 16 << 20;
// Ranks of which each may have a connection to each.
inline constexpr int kDirectAllToAllMax = 256;
// Most that goes along when the ranks of several machines compare what they are about to do.
inline constexpr size_t kWithRecordsBytes = 16 << 10;

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
  // This rank's blob to all, theirs back.
  using GatherFn = std::function<absl::StatusOr<std::vector<std::string>>(const std::string& blob)>;
  using Stage = std::function<absl::Status(uint64_t chunk)>;

  int nodes() const { return static_cast<int>(hierarchy_.nodes.size()); }
  bool leads() const { return nodes() > 1 && hierarchy_.leader(); }
  // Data of this size travels in the posts of the shared-memory group.
  bool Inline(size_t bytes) const;
  // What a sum over all ranks is divided by.
  int Divisor(const OpRecord& r) const { return r.op == ReduceOp::kMean && !IsInteger(r.dtype) ? size() : 1; }
  // Whether a mean takes two sums (comm/exec/integer_mean.h). What cannot be is left to the first of them.
  bool TakesTwoSums(const void* data, size_t count, DType dtype, ReduceOp op) const {
    return op == ReduceOp::kMean && IsInteger(dtype) && size() > 1 && data != nullptr && count > 0;
  }
  // `sums`: the calls of a mean of integers and the memory that they need. Before it touches any, all ranks
  // agree on `record`: a wrong count is an error, and no write beyond somebody's data.
  absl::Status TwoSums(const OpRecord& record, const void* data, absl::FunctionRef<absl::Status()> sums);
  // Of integers' means only the sums.
  absl::Status AllReduceOnce(void* data, size_t count, DType dtype, ReduceOp op);
  absl::Status ReduceScatterOnce(const void* input, void* output, size_t count, DType dtype, ReduceOp op);
  absl::Status ReduceOnce(void* data, size_t count, DType dtype, ReduceOp op, int root);
  // Of sources_, in their order.
  void Combine(void* to, uint64_t count, const OpRecord& r, int divisor) const {
    gtrain::comm::Reduce(to, sources_.data(), sources_.size(), count, r.dtype, r.op, divisor);
  }
  // Elements of each of size() blocks that are staged at once.
  uint64_t PerChunk(size_t element) const {
    return std::max<uint64_t>(kPartAlign, kStagedChunkBytes / element / static_cast<size_t>(size()));
  }

  absl::Status Connect(const GatherFn& gather, const Watch& watch);
  absl::StatusOr<std::vector<std::string>> Meet(const GatherFn& gather, const Watch& watch);
  absl::StatusOr<std::string> OpenOwn(const Watch& watch);
  absl::StatusOr<std::unique_ptr<Communicator>> MakePart(int color, int key);
  // Of a rank that could not; `never`: nor could it in another generation.
  absl::Status CannotOpen(int rank, bool never, absl::string_view why) const;
  absl::Status OpenMemory(const Watch& watch);
  absl::StatusOr<std::string> OpenTransport();
  absl::Status ConnectPart(const ExecCommunicator& whole, const std::vector<int>& ranks);
  void WakeWithGeneration();
  void TakeLinks(const std::vector<Carriers>& measured);
  std::unique_ptr<SubBootstrap> Part(const std::vector<int>& ranks, int rank) const;
  absl::Status OpenMessages();
  absl::Status CheckTags(absl::Span<const Message> messages);
  absl::Status CheckParts(absl::Span<const size_t> counts, size_t* total) const;
  absl::Status Move(absl::Span<const Message> messages);
  absl::Status MoveBlocks(const char* input, absl::Span<const size_t> send_counts, char* output,
                          absl::Span<const size_t> receive_counts, DType dtype);
  // What was refused is an error of all.
  absl::Status Refused(absl::Status status);
  absl::Status SomebodyLeft() const;
  absl::Status Check() const override;
  std::string Notice(const absl::Status& why) const override;
  // What peers and people call a rank.
  std::string NameOf(int rank) const;
  std::vector<std::string> NamesOf(const std::vector<int>& ranks) const;
  absl::Status WithMissing(const absl::Status& why) const;
  Watch MakeWatch() const { return Watch(bootstrap_, timeout(), this); }
  // Tells the others and is dead; `why`.
  absl::Status Die(absl::Status why);
  absl::Status TryLinks(const Watch& watch, double* seconds, double* a_byte);
  absl::Status MeasureLinks(const Watch& watch);
  std::string LinksMark() const;
  absl::Status LearnLinks(const Watch& watch);
  // `tried`, `tried_byte`: what the first try lets expect of so many rails.
  absl::StatusOr<LinkCost> MeasureRounds(int rails, double tried, double tried_byte, const Watch& watch);
  absl::Status AgreeOnMost(absl::Span<double> values, const Watch& watch);
  class Running;
  absl::Status NotForked() const;
  absl::Status Dead() const;
  absl::Status Usable() const;
  void DieIfAborted();
  absl::Status Call(OpRecord record, const void* data, size_t bytes,
                    absl::FunctionRef<absl::Status(OpRecord&, const Watch&)> body);
  // The payload is for Inline() sizes alone.
  absl::Status Enter(const OpRecord& record, const Watch& watch, const void* payload = nullptr,
                     size_t bytes = 0);
  // With one rank on each machine. data[count] becomes the reduction of all; a count of 0: only the
  // comparison.
  absl::Status Agree(const OpRecord& record, const Watch& watch, char* data = nullptr, size_t bytes = 0);
  // Among the ranks that speak for their machines: whether all of them, each for the ranks of its machine if
  // these do (`same`), do what `record` says. If so data[count] becomes the reduction of all.
  absl::StatusOr<bool> AllDo(const OpRecord& record, bool same, const Watch& watch, char* data = nullptr,
                             size_t bytes = 0);
  absl::Status CheckNeighbours(const OpRecord& record);
  // The same error on all ranks, or none.
  absl::Status Compare(absl::Span<const OpRecord> records);
  absl::Status GatherRecords(absl::Span<OpRecord> records, const Watch& watch);
  absl::Status Pipeline(uint64_t chunks, absl::Span<const Stage> stages, const Watch& watch);
  absl::Status FirstStage(const OpRecord& record, const Stage& stage, uint64_t chunks, bool* direct,
                          const Watch& watch);
  // After Enter on one machine: did all ranks pass memory that their peers reach?
  bool AllInArenas() const;

  absl::Status LocalAllReduce(const OpRecord& record, char* data, const Watch& watch);
  absl::Status InlineAllReduce(const OpRecord& record, char* data, const Watch& watch);
  absl::Status DirectAllReduce(const OpRecord& record, const Watch& watch);
  absl::Status StagedAllReduce(OpRecord record, char* data, const Watch& watch);
  absl::Status ChunkedAllReduce(const OpRecord& record, char* data, const Watch& watch);
  absl::Status FlatAllReduce(const OpRecord& record, char* data, const Watch& watch);
  // The reduction of all machines' data[count], by the plan that the measured links make the best: each rank
  // does its part of that, if it has one, and is back when that is done.
  absl::Status ReduceBetweenMachines(const OpRecord& record, char* data, uint64_t count, const Watch& watch);
  absl::Status LocalReduceScatter(const OpRecord& record, const char* input, char* output,
                                  const Watch& watch);
  absl::Status FlatReduceScatter(const OpRecord& record, const char* input, char* output, const Watch& watch);
  absl::Status MixedReduceScatter(const OpRecord& record, const char* input, char* output,
                                  const Watch& watch);
  absl::Status LocalReduce(const OpRecord& record, char* data, const Watch& watch);
  absl::Status FlatReduce(const OpRecord& record, char* data, const Watch& watch);
  absl::Status MixedReduce(const OpRecord& record, char* data, const Watch& watch);
  absl::Status LocalAllToAll(const OpRecord& record, const char* input, char* output, const Watch& watch);
  absl::Status FlatAllToAll(const OpRecord& record, const char* input, char* output, const Watch& watch);
  absl::Status MixedAllToAll(const OpRecord& record, const char* input, char* output, const Watch& watch);
  absl::Status SharedBroadcast(const OpRecord& record, char* data, const Watch& watch);
  absl::Status SharedAllGather(const OpRecord& record, const char* input, char* output, const Watch& watch);
  absl::Status FlatAllGather(const OpRecord& record, char* output, const Watch& watch);

  std::unique_ptr<SubBootstrap> own_bootstrap_;  // of a sub-communicator
  Bootstrap* const bootstrap_;
  const ExecOptions options_;
  const ForkGuard fork_guard_;
  Hierarchy hierarchy_;
  std::unique_ptr<ShmGroup> shm_;             // nullptr: one rank on every machine
  std::unique_ptr<DataTransport> transport_;  // among all ranks; nullptr: one machine
  // Of it the ranks at this one's place on all machines, by machine; nullptr: not all have that place.
  std::unique_ptr<DataTransport> rail_;
  AllReduceWish wish_;
  std::vector<Carriers> carriers_{Carriers{}};  // the same on all ranks
  uint64_t nonce_ = 0;
  bool links_known_ = false;  // all have measured them together before
  std::shared_ptr<PointToPoint> messages_;
  ScheduleRunner runner_;
  std::vector<OpRecord> records_;     // of the running collective where there is no shm_
  std::vector<const void*> sources_;  // of a reduction; kept to allocate nothing in a call
  std::vector<void*> outputs_;
  std::vector<char> scratch_;
  std::vector<char> own_message_, their_message_;  // of Agree
  TwoWays ways_;                                   // of the first rank: through the caches or around them
  uint64_t choice_ = 0;  // of the first rank, as all saw it in the staged all-reduce before
  std::vector<Mapping> private_;
  uint64_t sequence_ = 0;
  uint64_t chunk_ = 0;                        // chunks of all collectives so far
  const ExecCommunicator* parent_ = nullptr;  // of a part while it is made
  const OpRecord* calling_ = nullptr;         // the collective that is running
  mutable int left_looks_ = 0;                // in it, since a member was found to have ended
  mutable Instant left_since_;
  bool all_know_ = false;  // its error, from the comparison of records
  absl::Status refused_;   // what is wrong with the arguments of the running call
  Mutex running_;          // held by a call
  std::atomic<std::thread::id> caller_;
  mutable Mutex state_;
  absl::Duration timeout_ ABSL_GUARDED_BY(state_);
  absl::Status dead_ ABSL_GUARDED_BY(state_);
  absl::Status aborted_for_;  // once, before:
  std::atomic<bool> aborted_ = false;
  Wakers::Handle waking_;
};

}  // namespace gtrain::comm
