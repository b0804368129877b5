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
  // All ranks meet once more when it is made, so that a network that does not work shows then. Without that
  // it shows in the first collective, which the caller is about to begin on all of them: log2 m rounds less.
  bool meet = true;
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

// The source, tag and size of a message that was received.
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
  // Describes the message of receive number i of the list, which must be done.
  virtual MessageInfo info(size_t i) const = 0;
};

// A communicator belongs to one generation. Calls block; all ranks call the same collectives in the same
// order with the same count, dtype and op, else the call fails with a FailedPrecondition that names the ranks
// which differ (fault L6). Impossible arguments (null data, no such root) are InvalidArgument on every rank,
// with the name of the rank that gave them, which waits for the others up to 30 s; where all share one
// machine they get Unavailable with the reason at once. After any error the communicator is dead and every
// later call returns the same error; output buffers are then undefined. Unavailable: a member was lost or has
// given up, or the generation was revoked; end the step, exit or join the next generation. An error of one
// member that the others cannot see themselves ends their running or next call at once: "rank 3 gave up: ..."
// with its message. Results are bit-identical on all ranks. One call at a time, except for messages, Abort
// and functions that say so. comm/exec/async_calls.h has calls that run beside the program. A communicator
// among n ranks on N machines costs some hundred bytes a rank for each of n, and on a machine that has m of
// them, above one, 2 MiB of shared memory, 2 MiB more for each of m and 16 KiB for each of n above 128.
// Between machines a process has a port, and a connection to each other process that it speaks with, for all
// its communicators together: N - 1 if it speaks for its machine, as the leader does, or as many ranks of
// each machine as the smallest has (GTRAIN_COMM_ALGO). A split is an all-gather and a barrier. Broadcast,
// reduce, barrier and small all-reduces take about log2(N) rounds, as do all-gathers above 16 machines; large
// all-reduces send 2 (N-1)/N of the data a machine. Where machines have several ranks each call begins with
// another log2(N) rounds, up to 16 machines with one. log2(N) is rounded up; small all-reduces and those
// beginnings take one round more where N is no power of two. comm/plan/schedule.h has the table.
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
  // All-reduce from input into output, which do not overlap. It costs one copy more.
  absl::Status AllReduce(const void* input, void* output, size_t count, DType dtype, ReduceOp op) {
    if (count > 0 && input != nullptr && output != nullptr) {
      std::memcpy(output, input, count * DTypeSize(dtype));
    }
    return AllReduce(input == nullptr ? nullptr : output, count, dtype, op);
  }
  // data[count] of `root` overwrites data[count] everywhere.
  virtual absl::Status Broadcast(void* data, size_t count, DType dtype, int root) = 0;
  // Copies input[count] of each rank into output[size() * count] in rank order. The buffers do not overlap,
  // except that input may be output + rank() * count.
  virtual absl::Status AllGather(const void* input, void* output, size_t count, DType dtype) = 0;
  // Reduces input[size() * count]: output[count] is the reduction of all ranks' elements [rank() * count,
  // (rank() + 1) * count). The input is only read, except that output may be input + rank() * count; they
  // overlap in no other way.
  virtual absl::Status ReduceScatter(const void* input, void* output, size_t count, DType dtype,
                                     ReduceOp op) = 0;
  // data[count] of `root` becomes the reduction of all ranks' data[count], which stay as they are elsewhere.
  virtual absl::Status Reduce(void* data, size_t count, DType dtype, ReduceOp op, int root) = 0;
  // Block i of input[size() * count] goes to rank i, whose output[size() * count] has the blocks in the order
  // of the ranks that they come from. The buffers do not overlap.
  virtual absl::Status AllToAll(const void* input, void* output, size_t count, DType dtype) = 0;
  virtual absl::Status Barrier() = 0;
  // Copies input[count] of each rank into output[size() * count] of `root`, in rank order; on other ranks
  // output is ignored. On the root input may be output + root * count, else they do not overlap.
  virtual absl::Status Gather(const void* input, void* output, size_t count, DType dtype, int root) = 0;
  // Copies block i of input[size() * count] of `root` into output[count] of rank i; on other ranks input is
  // ignored.
  virtual absl::Status Scatter(const void* input, void* output, size_t count, DType dtype, int root) = 0;

  // The V collectives take parts of different sizes: part i has counts[i] elements and lies right behind the
  // parts before it. `counts` are the same on all ranks, one for each. Where the largest part is at most
  // twice the average all parts travel as if they had its size; else an all-gather hands the parts round a
  // ring, n - 1 steps, and a reduce-scatter costs an all-reduce of the whole.
  virtual absl::Status AllGatherV(const void* input, void* output, absl::Span<const size_t> counts,
                                  DType dtype) = 0;
  virtual absl::Status ReduceScatterV(const void* input, void* output, absl::Span<const size_t> counts,
                                      DType dtype, ReduceOp op) = 0;
  // Sends send_counts[i] elements to rank i and receives receive_counts[i] from it, which must be the number
  // that rank i sends to this one, else FailedPrecondition. It sends one message for each part that is not
  // empty, straight between the two ranks.
  virtual absl::Status AllToAllV(const void* input, absl::Span<const size_t> send_counts, void* output,
                                 absl::Span<const size_t> receive_counts, DType dtype) = 0;

  // Messages from rank to rank, which are not collective. They match by sender and tag; messages with the
  // same sender and tag match in the order in which they were sent. A receive must have the sender's count
  // and dtype, except that one with `info` takes up to `count` elements; otherwise, and where a message is
  // longer than the memory, the receive fails with FailedPrecondition.
  //
  // Send returns when `data` may be used again: at once if it could be copied (up to 64 MiB of copies are
  // kept), else when the receiver has it. So all ranks may send before they receive. A rank that destroys its
  // communicator first waits until its messages are received (30 s at most).
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
  // Starts a group of messages: all of them begin, receives first, and run beside the program; their memory
  // stays untouched until Wait says that they are done. ResourceExhausted: 65,536 are under way already.
  virtual absl::StatusOr<std::shared_ptr<PendingMessages>> Start(absl::Span<const Message> messages) = 0;

  // Collective. Ranks with the same `color` become a communicator of their own, in the order of (key, rank
  // here); nullptr where color < 0. It is independent of this communicator and of other groups; all of them
  // fail together when the generation ends. The session must outlive it.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) = 0;

  // Returns `bytes` of memory (64-byte aligned, zeroed) that collectives reach fastest. The communicator owns
  // it.
  virtual absl::StatusOr<void*> Allocate(size_t bytes) = 0;

  // Frees memory of Allocate before the communicator ends; ranks that have mapped it unmap it with their next
  // collective on such memory. InvalidArgument, which is no error of the communicator: Allocate did not
  // return it.
  virtual absl::Status Free(void* memory) = 0;

  // Not collective, from any thread: this rank cannot go on, for `why` (not OK), which is not an error of a
  // call of this communicator. A call that runs here returns `why`, the running or next call of every other
  // member Unavailable with this rank and the message, of which 400 bytes are sure to arrive unless this
  // process ends at once; this communicator is dead, and all others of the process go on. Costs at most one
  // message to a rank of each other machine; blocks for two seconds at most. Does nothing if it is dead
  // already.
  virtual void Abort(const absl::Status& why) = 0;

  // The longest that a single collective, or a wait for a message, may take. It applies to this rank alone,
  // from its next call on. A call between machines in which links are measured again may take as long once
  // more, or 30 s.
  virtual absl::Duration timeout() const = 0;
  virtual void SetTimeout(absl::Duration timeout) = 0;

  // Not collective, never blocks: how the gradients of this job travel, for people. `gtrain status` shows the
  // newest line of any rank, 200 bytes of it. Reducer calls it. Outside gtrain nobody hears it.
  virtual void ReportCompression(const std::string& /*text*/) {}
};

}  // namespace gtrain
