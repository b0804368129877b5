// Collectives among the ranks of one generation.
#pragma once
#include <gtrain/gtrain_c.h>
#include <gtrain/session.h>
#include <gtrain/status.h>
#include <gtrain/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gtrain {

struct CommunicatorOptions {
  // The longest that a single collective may take before it fails with kDeadlineExceeded. Lost ranks end it
  // within seconds whatever the timeout is, so this one is for a rank that lives and hangs. Ten minutes are
  // the default of NCCL in PyTorch, and enough for rank 0 to evaluate, compile or unpack data while the
  // others wait.
  std::chrono::milliseconds timeout{GTRAIN_TIMEOUT_MS};
};

// The element type of a C++ type. C++ has no float16 and the like: pass their DType.
template <typename T>
constexpr DType DTypeOf() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, float>) {
    return DType::kFloat32;
  } else if constexpr (std::is_same_v<U, double>) {
    return DType::kFloat64;
  } else if constexpr (std::is_same_v<U, bool>) {
    return DType::kBool;
  } else {
    static_assert(std::is_integral_v<U>, "no element type of gtrain: pass memory, count and a DType");
    constexpr bool kSigned = std::is_signed_v<U>;
    if constexpr (sizeof(U) == 1) return kSigned ? DType::kInt8 : DType::kUint8;
    if constexpr (sizeof(U) == 2) return kSigned ? DType::kInt16 : DType::kUint16;
    if constexpr (sizeof(U) == 4) return kSigned ? DType::kInt32 : DType::kUint32;
    return kSigned ? DType::kInt64 : DType::kUint64;
  }
}

// One operation that runs beside the program, whatever becomes of the Communicator. Moved and not copied; the
// destructor waits for the operation, which has the communicator's timeout, so that its buffers are free
// again.
class Request {
 public:
  Request(Request&&) = default;
  Request& operator=(Request&& other) {
    if (this != &other) {
      Settle();
      handle_ = std::move(other.handle_);
      communicator_ = std::move(other.communicator_);
      longest_ = other.longest_;
    }
    return *this;
  }
  ~Request() { Settle(); }

  // Returns the result of the operation, or nullopt when it is still running after `timeout`. With a timeout
  // of 0 it only asks.
  std::optional<Status> Wait(std::chrono::milliseconds timeout) {
    int done = 0;
    Status status = internal::Call(gtrain_request_wait, handle_.get(), int64_t{timeout.count()}, &done);
    if (done == 0 && status.code() == StatusCode::kDeadlineExceeded) return std::nullopt;
    return status;
  }
  // Waits for the longest time that the operation can take.
  Status Wait() {
    return Wait(longest_).value_or(
        Status(StatusCode::kDeadlineExceeded, "operations queued before this one did not end"));
  }

 private:
  friend class Communicator;
  friend class Group;
  Request(gtrain_request* handle, std::shared_ptr<gtrain_communicator> communicator,
          std::chrono::milliseconds longest)
      : communicator_(std::move(communicator)), handle_(handle), longest_(longest) {}
  void Settle() {
    if (handle_ != nullptr) (void)Wait(longest_);
  }

  std::shared_ptr<gtrain_communicator> communicator_;  // its end would cancel the operation
  std::unique_ptr<gtrain_request, internal::Freer<gtrain_request, gtrain_request_free>> handle_;
  std::chrono::milliseconds longest_{};
};

// The source, tag and number of elements of a message that was received.
struct MessageInfo {
  int from = GTRAIN_ANY_SOURCE;
  int tag = GTRAIN_ANY_TAG;
  size_t count = 0;
};
inline constexpr int kAnySource = GTRAIN_ANY_SOURCE, kAnyTag = GTRAIN_ANY_TAG;

// Messages that begin together, receives first, none waiting for another (PyTorch's batch_isend_irecv):
//  gtrain::Group group(comm);
//  group.Receive(std::span(from_left), left);
//  group.Send(std::span(to_right), right);
//  gtrain::Status status = group.Run();
// The caller keeps the memory of all messages, and the Group, until Run has returned or the request of Start
// is done.
class Communicator;
class Group {
 public:
  explicit Group(Communicator& communicator) : communicator_(&communicator) {}
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void Send(const void* data, size_t count, DType dtype, int to, int tag = 0) {
    Add(GTRAIN_SEND, const_cast<void*>(data), count, dtype, to, tag);  // only read
  }
  // At most `count` elements; info(i) says how many came.
  void Receive(void* data, size_t count, DType dtype, int from, int tag = 0) {
    Add(GTRAIN_RECEIVE, data, count, dtype, from, tag);
  }
  template <typename Range>
  void Send(const Range& data, int to, int tag = 0) {
    const std::span view(data);
    Send(view.data(), view.size(), DTypeOf<typename decltype(view)::value_type>(), to, tag);
  }
  template <typename Range>
  void Receive(Range&& data, int from, int tag = 0) {
    const std::span view(data);
    Receive(view.data(), view.size(), DTypeOf<typename decltype(view)::value_type>(), from, tag);
  }

  Status Run();
  Result<Request> Start();
  // Describes the message of call number i of Send and Receive, which must be a Receive that is done.
  MessageInfo info(size_t i) const {
    return {messages_[i].from, messages_[i].from_tag, messages_[i].received};
  }

 private:
  void Add(int kind, void* data, size_t count, DType dtype, int peer, int tag) {
    messages_.push_back({kind, data, count, static_cast<gtrain_dtype>(dtype), peer, tag, 0, 0, 0});
  }
  Communicator* communicator_;
  std::vector<gtrain_message> messages_;
};

// A communicator belongs to one generation. Calls block. All ranks call the same collectives in the same
// order with the same count, type and op, else the call fails with a kFailedPrecondition that names the ranks
// which differ. After any error the communicator is dead and every later call returns the same error; output
// buffers are then undefined. kUnavailable: a member was lost or has given up, or the generation was revoked:
// end the step and exit with 75. Results are bit-identical on all ranks. One thread at a time may use it,
// except for messages and Abort. It is moved and not copied; the session may be destroyed before it.
//
// Each collective takes memory, count and DType, or spans of a C++ type (std::span, or what converts to one:
// vectors, arrays; std::span(&loss, 1) is one number). docs/design/comm.md tells what a communicator costs
// among n ranks on N machines.
class Communicator {
 public:
  Communicator(Communicator&&) = default;
  Communicator& operator=(Communicator&&) = default;
  // Collective. kUnavailable: a member was lost, or a machine cannot be reached; exit with 75.
  static Result<Communicator> Create(const Session& session, const CommunicatorOptions& options = {}) {
    gtrain_communicator* made = nullptr;
    Status status = internal::Call(gtrain_communicator_create, session.handle(),
                                   static_cast<int64_t>(options.timeout.count()), &made);
    if (!status.ok()) return status;
    return Communicator(made, options.timeout);
  }

  // Takes over a handle of the C interface.
  static Communicator Adopt(gtrain_communicator* handle, std::chrono::milliseconds timeout) {
    return Communicator(handle, timeout);
  }

  int rank() const { return gtrain_communicator_rank(handle()); }
  int size() const { return gtrain_communicator_size(handle()); }
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Reduces data[count] in place. ReduceOp says what each operation computes, IsReducible which types it
  // takes.
  Status AllReduce(void* data, size_t count, DType dtype, ReduceOp op) {
    return internal::Call(gtrain_all_reduce, handle(), data, count, Number(dtype), Number(op), kHost, kNow);
  }
  // data[count] of `root` overwrites data[count] everywhere.
  Status Broadcast(void* data, size_t count, DType dtype, int root) {
    return internal::Call(gtrain_broadcast, handle(), data, count, Number(dtype), root, kHost, kNow);
  }
  // Copies input[count] of each rank into output[size() * count] in rank order; the buffers do not overlap,
  // except that input may be output + rank() * count.
  Status AllGather(const void* input, void* output, size_t count, DType dtype) {
    return internal::Call(gtrain_all_gather, handle(), input, output, count, Number(dtype), kHost, kNow);
  }
  // Reduces input[size() * count]: output[count] is the reduction of all ranks' elements [rank() * count,
  // (rank() + 1) * count). output may be input + rank() * count, else they do not overlap.
  Status ReduceScatter(const void* input, void* output, size_t count, DType dtype, ReduceOp op) {
    return internal::Call(gtrain_reduce_scatter, handle(), input, output, count, Number(dtype), Number(op),
                          kHost, kNow);
  }
  // data[count] of `root` becomes the reduction of all ranks' data[count], which stay as they are elsewhere.
  Status Reduce(void* data, size_t count, DType dtype, ReduceOp op, int root) {
    return internal::Call(gtrain_reduce, handle(), data, count, Number(dtype), Number(op), root, kHost, kNow);
  }
  // Block i of input[size() * count] goes to rank i, whose output[size() * count] has the blocks in the order
  // of the ranks that they come from. The buffers do not overlap.
  Status AllToAll(const void* input, void* output, size_t count, DType dtype) {
    return internal::Call(gtrain_all_to_all, handle(), input, output, count, Number(dtype), kHost, kNow);
  }
  Status Barrier() { return internal::Call(gtrain_barrier, handle(), kHost, kNow); }
  // Gather copies input[count] of each rank into output[size() * count] of `root`, in rank order; Scatter
  // sends block i of the root's input to rank i. On other ranks than `root` the pointer to all blocks is
  // ignored.
  Status Gather(const void* input, void* output, size_t count, DType dtype, int root) {
    return internal::Call(gtrain_gather, handle(), input, output, count, Number(dtype), root, kHost, kNow);
  }
  Status Scatter(const void* input, void* output, size_t count, DType dtype, int root) {
    return internal::Call(gtrain_scatter, handle(), input, output, count, Number(dtype), root, kHost, kNow);
  }
  // The V collectives take parts of different sizes: part i has counts[i] elements (counts has one entry for
  // each rank and is the same on all) and lies right behind the parts before it.
  Status AllGatherV(const void* input, void* output, std::span<const size_t> counts, DType dtype) {
    if (counts.size() != Size()) return WrongSizes();
    return internal::Call(gtrain_all_gather_v, handle(), input, output, counts.data(), Number(dtype), kHost,
                          kNow);
  }
  Status ReduceScatterV(const void* input, void* output, std::span<const size_t> counts, DType dtype,
                        ReduceOp op) {
    if (counts.size() != Size()) return WrongSizes();
    return internal::Call(gtrain_reduce_scatter_v, handle(), input, output, counts.data(), Number(dtype),
                          Number(op), kHost, kNow);
  }
  // Sends send_counts[i] elements to rank i and receives receive_counts[i] from it, which must be the number
  // that rank i sends to this one.
  Status AllToAllV(const void* input, std::span<const size_t> send_counts, void* output,
                   std::span<const size_t> receive_counts, DType dtype) {
    if (send_counts.size() != Size() || receive_counts.size() != Size()) return WrongSizes();
    return internal::Call(gtrain_all_to_all_v, handle(), input, send_counts.data(), output,
                          receive_counts.data(), Number(dtype), kHost, kNow);
  }

  // Messages from rank to rank, which are not collective. They match by sender and tag; messages with the
  // same sender and tag match in the order in which they were sent. Send returns when `data` may be used
  // again: at once if it could be copied (up to 64 MiB of copies are kept), else when the receiver has it; so
  // all ranks may send before they receive. Receive wants the count and type that were sent
  // (kFailedPrecondition), or up to `count` elements where it gets an `info`.
  Status Send(const void* data, size_t count, DType dtype, int to, int tag = 0) {
    return internal::Call(gtrain_send, handle(), data, count, Number(dtype), to, tag, kHost, kNow);
  }
  Status Receive(void* data, size_t count, DType dtype, int from, int tag = 0, MessageInfo* info = nullptr) {
    if (info == nullptr)
      return internal::Call(gtrain_receive, handle(), data, count, Number(dtype), from, tag, kHost, kNow);
    Group one(*this);
    one.Receive(data, count, dtype, from, tag);
    Status status = one.Run();
    if (status.ok()) *info = one.info(0);
    return status;
  }

  template <typename Range>
  Status AllReduce(Range&& data, ReduceOp op = ReduceOp::kSum) {
    const std::span view(data);
    return AllReduce(view.data(), view.size(), TypeOf(view), op);
  }
  template <typename Range>
  Status Broadcast(Range&& data, int root = 0) {
    const std::span view(data);
    return Broadcast(view.data(), view.size(), TypeOf(view), root);
  }
  template <typename In, typename Out>
  Status AllGather(const In& input, Out&& output) {
    const std::span from(input);
    const std::span to(output);
    SameType(from, to);
    if (to.size() != from.size() * Size()) return WrongSizes();
    return AllGather(from.data(), to.data(), from.size(), TypeOf(to));
  }
  template <typename In, typename Out>
  Status ReduceScatter(const In& input, Out&& output, ReduceOp op = ReduceOp::kSum) {
    const std::span from(input);
    const std::span to(output);
    SameType(from, to);
    if (from.size() != to.size() * Size()) return WrongSizes();
    return ReduceScatter(from.data(), to.data(), to.size(), TypeOf(to), op);
  }
  template <typename Range>
  Status Reduce(Range&& data, ReduceOp op, int root) {
    const std::span view(data);
    return Reduce(view.data(), view.size(), TypeOf(view), op, root);
  }
  template <typename In, typename Out>
  Status AllToAll(const In& input, Out&& output) {
    const std::span from(input);
    const std::span to(output);
    SameType(from, to);
    if (from.size() != to.size() || from.size() % Size() != 0) return WrongSizes();
    return AllToAll(from.data(), to.data(), from.size() / Size(), TypeOf(to));
  }
  template <typename Range>
  Status Send(const Range& data, int to, int tag = 0) {
    const std::span view(data);
    return Send(view.data(), view.size(), TypeOf(view), to, tag);
  }
  template <typename Range>
  Status Receive(Range&& data, int from, int tag = 0, MessageInfo* info = nullptr) {
    const std::span view(data);
    return Receive(view.data(), view.size(), TypeOf(view), from, tag, info);
  }

  // Starts an all-reduce that runs beside the program. Started operations run in the order of their calls,
  // and at most 256 may be waiting (kResourceExhausted). The buffer stays untouched until the request is
  // done.
  Result<Request> StartAllReduce(void* data, size_t count, DType dtype, ReduceOp op) {
    gtrain_request* made = nullptr;
    Status status =
        internal::Call(gtrain_all_reduce, handle(), data, count, Number(dtype), Number(op), kHost, &made);
    if (!status.ok()) return status;
    return Request(made, handle_, kQueueMax * timeout_);
  }
  template <typename Range>
  Result<Request> StartAllReduce(Range&& data, ReduceOp op = ReduceOp::kSum) {
    const std::span view(data);
    return StartAllReduce(view.data(), view.size(), TypeOf(view), op);
  }

  // Collective. Returns true on all ranks or on none, once rank 0 has heard that the user asked to stop:
  // save, then exit with 0.
  Result<bool> StopAgreed() {
    int stop = 0;
    Status status = internal::Call(gtrain_communicator_stop_agreed, handle(), &stop);
    if (!status.ok()) return status;
    return stop != 0;
  }

  // Collective. Ranks with the same `color` become a communicator of their own, in the order of (key, rank
  // here); nullopt where color < 0. The new communicator is independent of this one.
  Result<std::optional<Communicator>> Split(int color, int key) {
    gtrain_communicator* made = nullptr;
    Status status = internal::Call(gtrain_communicator_split, handle(), color, key, &made);
    if (!status.ok()) return status;
    std::optional<Communicator> part;
    if (made != nullptr) part = Communicator(made, timeout_);
    return part;
  }

  // Returns `bytes` of memory (64-byte aligned, zeroed) that collectives reach fastest. The communicator owns
  // it.
  Result<void*> Allocate(size_t bytes) {
    void* memory = nullptr;
    Status status = internal::Call(gtrain_allocate, handle(), bytes, &memory);
    if (!status.ok()) return status;
    return memory;
  }

  // Frees memory of Allocate before the communicator is destroyed.
  Status Free(void* memory) { return internal::Call(gtrain_deallocate, handle(), memory); }

  // Sets the longest that a call, or a wait for a message, may take from the next one on, for this rank
  // alone.
  Status SetTimeout(std::chrono::milliseconds timeout) {
    Status status = internal::Call(gtrain_communicator_set_timeout, handle(), int64_t{timeout.count()});
    if (status.ok()) timeout_ = timeout;
    return status;
  }

  // Says from any thread that this rank cannot go on. Its own running call ends, and the running or next call
  // of the other ranks returns kUnavailable with this rank and `why`. Other communicators go on.
  void Abort(const std::string& why) { gtrain_communicator_abort(handle(), why.c_str(), nullptr); }

  gtrain_communicator* handle() const { return handle_.get(); }

 private:
  friend class Group;
  static constexpr void* kHost = nullptr;            // memory
  static constexpr gtrain_request** kNow = nullptr;  // without a handle to wait for
  static constexpr int kQueueMax = 256;

  Communicator(gtrain_communicator* handle, std::chrono::milliseconds timeout)
      : handle_(handle, gtrain_communicator_free), timeout_(timeout) {}
  static gtrain_dtype Number(DType dtype) { return static_cast<gtrain_dtype>(dtype); }
  static gtrain_op Number(ReduceOp op) { return static_cast<gtrain_op>(op); }
  template <typename T, size_t kExtent>
  static constexpr DType TypeOf(std::span<T, kExtent>) {
    return DTypeOf<T>();
  }
  template <typename T, size_t kFrom, typename U, size_t kTo>
  static void SameType(std::span<T, kFrom>, std::span<U, kTo>) {
    static_assert(std::is_same_v<std::remove_cv_t<T>, U>, "both buffers have elements of one type");
  }
  size_t Size() const { return static_cast<size_t>(size()); }
  // The others need not wait for this rank.
  Status WrongSizes() {
    Status status(StatusCode::kInvalidArgument,
                  "the sizes of the two buffers do not fit the number of ranks");
    Abort(status.message());
    return status;
  }

  std::shared_ptr<gtrain_communicator> handle_;
  std::chrono::milliseconds timeout_{};
};

inline Status Group::Run() {
  return internal::Call(gtrain_exchange, communicator_->handle(), messages_.data(), messages_.size(),
                        Communicator::kHost, Communicator::kNow);
}

inline Result<Request> Group::Start() {
  gtrain_request* made = nullptr;
  Status status = internal::Call(gtrain_exchange, communicator_->handle(), messages_.data(), messages_.size(),
                                 Communicator::kHost, &made);
  if (!status.ok()) return status;
  return Request(made, communicator_->handle_, Communicator::kQueueMax * communicator_->timeout_);
}

}  // namespace gtrain
