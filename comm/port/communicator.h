// Collectives among the ranks of one generation.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gtrain/types.h"

namespace gtrain {

struct CommunicatorOptions {
  // Longest a single collective may take before it fails with DeadlineExceeded. Lost ranks end it within
  // seconds whatever it is, so this one is for a rank that lives and hangs: longer than rank 0 alone
  // evaluates, compiles or unpacks data while the others wait, and what PyTorch users know of NCCL.
  absl::Duration timeout = absl::Minutes(10);
};

inline constexpr int kAnySource = -1, kAnyTag = -1;

// One message, to be sent or received.
struct Message {
  enum class Kind : uint8_t { kSend, kReceive };
  Kind kind = Kind::kSend;
  void* data = nullptr;  // only read if it is sent
  size_t count = 0;
  DType dtype = DType::kUint8;
  int peer = 0;          // also this rank itself; of a receive kAnySource
  int tag = 0;           // >= 0; of a receive kAnyTag
  bool at_most = false;  // of a receive: up to `count`
};

// Of a message that was received.
struct MessageInfo {
  int from = kAnySource;
  int tag = kAnyTag;
  size_t count = 0;
};

// Messages that go on. Thread-safe; outlives the communicator, whose end ends them. Giving it up does not end
// them.
class PendingMessages {
 public:
  virtual ~PendingMessages() = default;
  // The first error of any, or nullopt when some still go on after `timeout`. Zero only looks. A wait that
  // lasts as long as the timeout of the communicator ends it, with DeadlineExceeded.
  virtual std::optional<absl::Status> Wait(absl::Duration timeout) = 0;
  // Of receive number i of the list, which is over.
  virtual MessageInfo info(size_t i) const = 0;
};

// A communicator belongs to one generation. Calls block; all ranks call the same
// collectives in the same order with the same count, dtype and op, else the call fails with
// FailedPrecondition that names the ranks which differ (fault L6). Arguments that cannot be (null data, no
// such root) are InvalidArgument on every rank, naming the one that gives them, which waits for the others up
// to 30 s; where all share one machine they get Unavailable with the reason at once. After any error the
// communicator is dead and every later call returns the same error; output buffers are then undefined.
// Unavailable: a member was lost or has given up, or the generation was revoked; end the step, exit or join
// the next generation. An error of one member that the others cannot see themselves ends their running or
// next call at once: "rank 3 gave up: ..." with its words.
// Results are bit-identical on all ranks. One call at a time, but for messages, Abort and
// what says so. Calls that go on beside the program: comm/exec/async_calls.h.
// What one costs among n ranks on N machines: some hundred bytes a rank for each of n, and on a machine that
// has m of them, above one, 2 MiB of shared memory, 2 MiB more for each of m and 16 KiB for each of n above
// 128. Between machines a process has a port, and a connection to each other process that it speaks with, for
// all its communicators together: N - 1 if it speaks for its machine, as the leader does, or as many ranks of
// each as the smallest has (GTRAIN_COMM_ALGO). A split is an all-gather and a barrier. Broadcast, reduce,
// barrier and small all-reduces take about log2(N) rounds, as do all-gathers above 16 machines; large
// all-reduces send 2 (N-1)/N of the data a machine. Where machines have several ranks each call begins with
// another log2(N) rounds, up to 16 machines with one. log2(N) is rounded up, and of small all-reduces and
// those beginnings one more where N is no power of two. comm/plan/schedule.h has the table.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Index of this rank's machine among those of the communicator, in the order of their lowest ranks.
  virtual int machine() const = 0;

  // data[count] of dtype, in place. The mean of integers, here and below, is that of their exact sum, cut off
  // towards zero: a barrier, a second reduction and 8 bytes an element more. Sums of integers wrap around.
  virtual absl::Status AllReduce(void* data, size_t count, DType dtype, ReduceOp op) = 0;
  // The same from input into output, which do not overlap: one copy more.
  absl::Status AllReduce(const void* input, void* output, size_t count, DType dtype, ReduceOp op) {
    if (count > 0 && input != nullptr && output != nullptr) {
      std::memcpy(output, input, count * DTypeSize(dtype));
    }
    return AllReduce(input == nullptr ? nullptr : output, count, dtype, op);
  }
  // data[count] of `root` overwrites data[count] everywhere.
  virtual absl::Status Broadcast(void* data, size_t count, DType dtype, int root) = 0;
  // input[count] of each rank into output[size() * count] in rank order. The buffers do not overlap,
  // except that input may be output + rank() * count.
  virtual absl::Status AllGather(const void* input, void* output, size_t count, DType dtype) = 0;
  // input[size() * count] of each rank; output[count] is the reduction of everybody's elements
  // [rank() * count, (rank() + 1) * count). The input is only read, except that output may be
  // input + rank() * count; they overlap in no other way.
  virtual absl::Status ReduceScatter(const void* input, void* output, size_t count, DType dtype,
                                     ReduceOp op) = 0;
  // data[count] of `root` becomes the reduction of all ranks' data[count], which stay as they are elsewhere.
  virtual absl::Status Reduce(void* data, size_t count, DType dtype, ReduceOp op, int root) = 0;
  // Block i of input[size() * count] goes to rank i, whose output[size() * count] has the blocks in the order
  // of the ranks that they come from. The buffers do not overlap.
  virtual absl::Status AllToAll(const void* input, void* output, size_t count, DType dtype) = 0;
  virtual absl::Status Barrier() = 0;
  // input[count] of each rank into output[size() * count] of `root`, in rank order; elsewhere output is not
  // looked at. input may be output + root * count there, else they do not overlap.
  virtual absl::Status Gather(const void* input, void* output, size_t count, DType dtype, int root) = 0;
  // Block i of input[size() * count] of `root` into output[count] of rank i; elsewhere input is not looked
  // at.
  virtual absl::Status Scatter(const void* input, void* output, size_t count, DType dtype, int root) = 0;

  // The same as those above with parts that differ: part i has counts[i] elements and lies behind those
  // before it. `counts` are the same on all ranks, one for each. Where the largest part is at most twice the
  // average all parts travel as if they had its size; else an all-gather hands the parts round a ring, n - 1
  // steps, and a reduce-scatter costs an all-reduce of the whole.
  virtual absl::Status AllGatherV(const void* input, void* output, absl::Span<const size_t> counts,
                                  DType dtype) = 0;
  virtual absl::Status ReduceScatterV(const void* input, void* output, absl::Span<const size_t> counts,
                                      DType dtype, ReduceOp op) = 0;
  // send_counts[i] elements go to rank i, receive_counts[i] come from it, which must be what that rank sends
  // to this one: else FailedPrecondition. One message for each part that is not empty, straight between the
  // two ranks.
  virtual absl::Status AllToAllV(const void* input, absl::Span<const size_t> send_counts, void* output,
                                 absl::Span<const size_t> receive_counts, DType dtype) = 0;

  // Not collective: messages from rank to rank, which match by sender and tag: those with the same of both in
  // the order in which they were sent. Count and dtype are the sender's, but for a receive that asks for
  // `info`, which takes up to `count`; else, and where a message is longer than the memory,
  // FailedPrecondition.
  //
  // Send returns when `data` may be used again: copied, as far as 64 MiB of copies go, else when the receiver
  // has it. So all ranks may send before they receive. What a rank has sent when it destroys its communicator
  // is taken first (30 s at most).
  absl::Status Send(const void* data, size_t count, DType dtype, int to, int tag = 0) {
    return SendMessage({Message::Kind::kSend, const_cast<void*>(data), count, dtype, to, tag});  // only read
  }
  absl::Status Receive(void* data, size_t count, DType dtype, int from, int tag = 0,
                       MessageInfo* info = nullptr) {
    Message message{Message::Kind::kReceive, data, count, dtype, from, tag};
    message.at_most = info != nullptr;
    absl::StatusOr<std::shared_ptr<PendingMessages>> started = Start({&message, 1});
    if (!started.ok()) return started.status();
    absl::Status status = *(*started)->Wait(absl::InfiniteDuration());
    if (status.ok() && info != nullptr) *info = (*started)->info(0);
    return status;
  }
  virtual absl::Status SendMessage(const Message& message) = 0;
  // A group: all of them begin, receives first, and go on beside the program; the memory stays untouched
  // until Wait says that they are over. ResourceExhausted: 65,536 go on already.
  virtual absl::StatusOr<std::shared_ptr<PendingMessages>> Start(absl::Span<const Message> messages) = 0;

  // Collective: ranks with the same `color` become a communicator of their own, in the order of (key, rank
  // here); nullptr where color < 0. Independent of this one and of other groups from then on; all of them
  // fail together when the generation ends. The session must outlive it.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) = 0;

  // Memory of `bytes` (64-byte aligned, zeroed) that collectives reach fastest. Owned by the communicator.
  virtual absl::StatusOr<void*> Allocate(size_t bytes) = 0;

  // Gives such memory back before the communicator ends; ranks that have looked into it let it go with their
  // next collective on such memory. InvalidArgument, which is no error of the communicator: it is none.
  virtual absl::Status Free(void* memory) = 0;

  // Not collective, from any thread: this rank cannot go on, for `why` (not OK), which is not an error of a
  // call of this communicator. A call that runs here returns `why`, the running or next call of every other
  // member Unavailable with this rank and the message, of which 400 bytes are sure to arrive unless this
  // process ends at once; this communicator is dead, and all others of the process go on. Costs at most one
  // message to a rank of each other machine; blocks for two seconds at most. Does nothing if it is dead
  // already.
  virtual void Abort(const absl::Status& why) = 0;

  // Longest a single collective may take, and a wait for a message. Of this rank alone, from its next call
  // on. A call between machines in which links are measured again may take as long once more, or 30 s.
  virtual absl::Duration timeout() const = 0;
  virtual void SetTimeout(absl::Duration timeout) = 0;

  // Not collective, never blocks: how the gradients of this job travel, for people. `gtrain status` shows the
  // newest line of any rank, 200 bytes of it. Reducer calls it. Outside gtrain nobody hears it.
  virtual void ReportCompression(const std::string& /*text*/) {}
};

}  // namespace gtrain
