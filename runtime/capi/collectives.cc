// Communicators and collectives of gtrain_c.h.
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/status_macros.h"
#include "runtime/capi/handles.h"

namespace gtrain::capi {
namespace {

absl::StatusOr<ReduceOp> OpFrom(gtrain_op op) {
  switch (op) {
    case GTRAIN_SUM:
      return ReduceOp::kSum;
    case GTRAIN_MEAN:
      return ReduceOp::kMean;
    case GTRAIN_MIN:
      return ReduceOp::kMin;
    case GTRAIN_MAX:
      return ReduceOp::kMax;
    case GTRAIN_PRODUCT:
      return ReduceOp::kProduct;
    case GTRAIN_BIT_AND:
      return ReduceOp::kBitAnd;
    case GTRAIN_BIT_OR:
      return ReduceOp::kBitOr;
    case GTRAIN_BIT_XOR:
      return ReduceOp::kBitXor;
  }
  return absl::InvalidArgumentError(absl::StrCat("no such reduction: ", static_cast<int>(op)));
}

absl::Status HostMemoryAlone() {
  return absl::UnimplementedError("`stream` must be NULL: collectives work on host memory only");
}

// Queues the abort behind the calls that wait, and does not wait for them.
void Abort(gtrain_communicator* comm, const absl::Status& why) {
  if (comm->size == 1) return;  // nobody waits, and the communicator stays usable
  (void)comm->queue->StartForSure([c = comm->comm.get(), why] {
    c->Abort(why);
    return absl::OkStatus();
  });
}

// Runs the operation now, or queues it and hands out a request.
absl::Status Start(gtrain_communicator* comm, gtrain_request** out, AsyncCalls::Body work) {
  if (out == nullptr) return comm->queue->Now(work);
  *out = nullptr;
  auto request = std::make_unique<gtrain_request>();
  GT_ASSIGN_OR_RETURN(request->call, comm->queue->Start(std::move(work)));
  *out = request.release();
  return absl::OkStatus();
}

// `make` checks the arguments and makes the operation. A rank whose arguments cannot be takes no part, so the
// others hear it at once.
absl::Status TakePart(gtrain_communicator* comm, const void* stream, gtrain_request** out,
                      absl::FunctionRef<absl::StatusOr<AsyncCalls::Body>()> make) {
  GT_RETURN_IF_ERROR(CheckHandle(comm));
  absl::StatusOr<AsyncCalls::Body> body = stream == nullptr ? make() : HostMemoryAlone();
  if (body.ok()) return Start(comm, out, *std::move(body));
  Abort(comm, body.status());
  return body.status();
}

absl::Status CreateCommunicator(gtrain_session* session, int64_t timeout_ms, gtrain_communicator** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  GT_RETURN_IF_ERROR(CheckHandle(session));
  GT_ASSIGN_OR_RETURN(const absl::Duration timeout, TimeoutFrom(timeout_ms));
  GT_ASSIGN_OR_RETURN(auto comm, session->session->MakeCommunicator({.timeout = timeout}));
  *out = HandleOf(std::move(comm), session->session, timeout);
  return absl::OkStatus();
}

absl::Status Split(gtrain_communicator* comm, int color, int key, gtrain_communicator** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  GT_RETURN_IF_ERROR(CheckHandle(comm));
  std::unique_ptr<Communicator> part;
  GT_RETURN_IF_ERROR(comm->queue->Now([&]() -> absl::Status {
    GT_ASSIGN_OR_RETURN(part, comm->comm->Split(color, key));
    return absl::OkStatus();
  }));
  if (part != nullptr) *out = HandleOf(std::move(part), comm->session, comm->timeout);
  return absl::OkStatus();
}

// Broadcasts to all ranks whether rank 0 has heard of a stop.
absl::Status StopAgreed(gtrain_communicator* comm, int* out) {
  GT_RETURN_IF_ERROR(CheckHandle(comm));
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  int32_t stop = comm->session->StopRequested() ? 1 : 0;
  GT_RETURN_IF_ERROR(comm->queue->Now([&] { return comm->comm->Broadcast(&stop, 1, DType::kInt32, 0); }));
  *out = stop;
  return absl::OkStatus();
}

// Checks one rank's blocks for all ranks, each of `count`.
absl::Status CheckBlocks(const gtrain_communicator* comm, const void* data, size_t count, DType type) {
  if (count > SIZE_MAX / static_cast<size_t>(comm->size)) {
    return absl::InvalidArgumentError("the blocks of all ranks cannot be in memory");
  }
  return CheckBuffer(data, count * static_cast<size_t>(comm->size), type);
}

absl::Status CheckRank(const gtrain_communicator* comm, const char* what, int rank) {
  if (rank >= 0 && rank < comm->size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " ", rank, " is not one of ", comm->size, " ranks"));
}

absl::StatusOr<std::vector<size_t>> CheckCounts(const gtrain_communicator* comm, const size_t* counts) {
  if (counts == nullptr) return absl::InvalidArgumentError("the list of counts is NULL");
  return std::vector<size_t>(counts, counts + comm->size);
}

absl::StatusOr<Message> MessageFrom(const gtrain_communicator* comm, const gtrain_message& m) {
  Message message;
  const bool receives = m.kind == GTRAIN_RECEIVE;
  if (m.kind != GTRAIN_SEND && !receives)
    return absl::InvalidArgumentError(
        absl::StrCat("a message of kind ", m.kind, " is neither sent nor received"));
  message.kind = receives ? Message::Kind::kReceive : Message::Kind::kSend;
  GT_ASSIGN_OR_RETURN(message.dtype, DTypeFrom(m.dtype));
  GT_RETURN_IF_ERROR(CheckBuffer(m.data, m.count, message.dtype));
  if (!receives || m.peer != GTRAIN_ANY_SOURCE) GT_RETURN_IF_ERROR(CheckRank(comm, "rank", m.peer));
  if (m.tag < 0 && !(receives && m.tag == GTRAIN_ANY_TAG))
    return absl::InvalidArgumentError(absl::StrCat("tag ", m.tag, ": a tag is 0 or more"));
  message.data = m.data;
  message.count = m.count;
  message.peer = m.peer;
  message.tag = m.tag;
  return message;
}

void FillIn(gtrain_message* list, size_t size, const PendingMessages& messages) {
  for (size_t i = 0; i < size; ++i) {
    if (list[i].kind != GTRAIN_RECEIVE) continue;
    const MessageInfo info = messages.info(i);
    list[i].from = info.from;
    list[i].from_tag = info.tag;
    list[i].received = info.count;
  }
}

// `list`: to be filled when they are over, or NULL: then each receive gets exactly what it asks for.
absl::Status Exchange(gtrain_communicator* comm, gtrain_message* list,
                      absl::Span<const gtrain_message> messages, const void* stream, gtrain_request** out) {
  GT_RETURN_IF_ERROR(CheckHandle(comm));
  if (out != nullptr) *out = nullptr;
  std::vector<Message> parsed;
  const auto parse = [&]() -> absl::Status {
    if (stream != nullptr) return HostMemoryAlone();
    for (const gtrain_message& m : messages) {
      GT_ASSIGN_OR_RETURN(Message message, MessageFrom(comm, m));
      message.at_most = list != nullptr && message.kind == Message::Kind::kReceive;
      parsed.push_back(message);
    }
    return absl::OkStatus();
  };
  if (absl::Status good = parse(); !good.ok()) {
    Abort(comm, good);
    return good;
  }
  if (out == nullptr && parsed.size() == 1 && parsed[0].kind == Message::Kind::kSend)
    return comm->comm->SendMessage(parsed[0]);
  auto request = std::make_unique<gtrain_request>();
  GT_ASSIGN_OR_RETURN(request->messages, comm->comm->Start(parsed));
  request->list = list;
  request->list_size = list == nullptr ? 0 : messages.size();
  if (out != nullptr) {
    *out = request.release();
    return absl::OkStatus();
  }
  GT_RETURN_IF_ERROR(*request->messages->Wait(absl::InfiniteDuration()));
  FillIn(request->list, request->list_size, *request->messages);
  return absl::OkStatus();
}

std::optional<absl::Status> Over(gtrain_request* request, absl::Duration timeout) {
  if (request->call.has_value()) return request->call->Wait(timeout);
  std::optional<absl::Status> status = request->messages->Wait(timeout);
  if (status.has_value() && status->ok())
    FillIn(std::exchange(request->list, nullptr), std::exchange(request->list_size, 0), *request->messages);
  return status;
}

absl::Status WaitFor(gtrain_request* request, int64_t timeout_ms, int* done) {
  if (done != nullptr) *done = 0;
  GT_RETURN_IF_ERROR(CheckHandle(request));
  GT_ASSIGN_OR_RETURN(const absl::Duration timeout, TimeoutFrom(timeout_ms));
  std::optional<absl::Status> status = Over(request, timeout);
  if (!status.has_value()) {
    return absl::DeadlineExceededError(absl::StrCat("the operation still goes on after ", timeout_ms, " ms"));
  }
  if (done != nullptr) *done = 1;
  return *std::move(status);
}

}  // namespace

gtrain_communicator* HandleOf(std::shared_ptr<Communicator> comm, std::shared_ptr<Session> session,
                              absl::Duration timeout) {
  auto handle = std::make_unique<gtrain_communicator>();
  handle->session = std::move(session);
  handle->comm = std::move(comm);
  handle->rank = handle->comm->rank();
  handle->size = handle->comm->size();
  handle->timeout = timeout;
  handle->queue = std::make_unique<AsyncCalls>(timeout + absl::Seconds(1));
  return handle.release();
}
}  // namespace gtrain::capi

using gtrain::AsyncCalls;
using gtrain::DType;
using gtrain::ReduceOp;
using gtrain::capi::Call;
using gtrain::capi::CheckBlocks;
using gtrain::capi::CheckBuffer;
using gtrain::capi::CheckCounts;
using gtrain::capi::CheckHandle;
using gtrain::capi::CheckRank;
using gtrain::capi::DTypeFrom;
using gtrain::capi::TakePart;

extern "C" {

gtrain_status gtrain_communicator_create(gtrain_session* session, int64_t timeout_ms,
                                         gtrain_communicator** out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::CreateCommunicator(session, timeout_ms, out); });
}

gtrain_status gtrain_communicator_split(gtrain_communicator* comm, int color, int key,
                                        gtrain_communicator** out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Split(comm, color, key, out); });
}

gtrain_status gtrain_communicator_stop_agreed(gtrain_communicator* comm, int* out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::StopAgreed(comm, out); });
}

void gtrain_communicator_free(gtrain_communicator* comm) { gtrain::capi::FreeHandle(comm); }

gtrain_status gtrain_communicator_abort(gtrain_communicator* comm, const char* why, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(comm));
    if (comm->size > 1)
      comm->comm->Abort(absl::InvalidArgumentError(why == nullptr ? "no reason was given" : why));
    return absl::OkStatus();
  });
}

gtrain_status gtrain_communicator_set_timeout(gtrain_communicator* comm, int64_t timeout_ms,
                                              gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(comm));
    GT_ASSIGN_OR_RETURN(comm->timeout, gtrain::capi::TimeoutFrom(timeout_ms));
    comm->comm->SetTimeout(comm->timeout);
    comm->queue->SetLongest(comm->timeout + absl::Seconds(1));
    return absl::OkStatus();
  });
}

int gtrain_communicator_rank(const gtrain_communicator* comm) { return comm->rank; }
int gtrain_communicator_size(const gtrain_communicator* comm) { return comm->size; }

gtrain_status gtrain_allocate(gtrain_communicator* comm, size_t bytes, void** out, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
    *out = nullptr;
    GT_RETURN_IF_ERROR(CheckHandle(comm));
    // Allocation may be collective: it takes its turn behind what is queued.
    return comm->queue->Now([&]() -> absl::Status {
      GT_ASSIGN_OR_RETURN(*out, comm->comm->Allocate(bytes));
      return absl::OkStatus();
    });
  });
}

gtrain_status gtrain_deallocate(gtrain_communicator* comm, void* memory, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(comm));
    return comm->queue->Now([&] { return comm->comm->Free(memory); });
  });
}

gtrain_status gtrain_all_reduce(gtrain_communicator* comm, void* data, size_t count, gtrain_dtype dtype,
                                gtrain_op op, void* stream, gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_ASSIGN_OR_RETURN(const ReduceOp reduce, gtrain::capi::OpFrom(op));
      GT_RETURN_IF_ERROR(CheckBuffer(data, count, type));
      return [=, c = comm->comm.get()] { return c->AllReduce(data, count, type, reduce); };
    });
  });
}

gtrain_status gtrain_broadcast(gtrain_communicator* comm, void* data, size_t count, gtrain_dtype dtype,
                               int root, void* stream, gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_RETURN_IF_ERROR(CheckBuffer(data, count, type));
      GT_RETURN_IF_ERROR(CheckRank(comm, "root", root));
      return [=, c = comm->comm.get()] { return c->Broadcast(data, count, type, root); };
    });
  });
}

gtrain_status gtrain_all_gather(gtrain_communicator* comm, const void* input, void* output, size_t count,
                                gtrain_dtype dtype, void* stream, gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_RETURN_IF_ERROR(CheckBuffer(input, count, type));
      GT_RETURN_IF_ERROR(CheckBlocks(comm, output, count, type));
      return [=, c = comm->comm.get()] { return c->AllGather(input, output, count, type); };
    });
  });
}

// An interface of C needs so many arguments.
// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_reduce_scatter(gtrain_communicator* comm, const void* input, void* output, size_t count,
                                    gtrain_dtype dtype, gtrain_op op, void* stream, gtrain_request** out,
                                    gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_ASSIGN_OR_RETURN(const ReduceOp reduce, gtrain::capi::OpFrom(op));
      GT_RETURN_IF_ERROR(CheckBlocks(comm, input, count, type));
      GT_RETURN_IF_ERROR(CheckBuffer(output, count, type));
      return [=, c = comm->comm.get()] { return c->ReduceScatter(input, output, count, type, reduce); };
    });
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_reduce(gtrain_communicator* comm, void* data, size_t count, gtrain_dtype dtype,
                            gtrain_op op, int root, void* stream, gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_ASSIGN_OR_RETURN(const ReduceOp reduce, gtrain::capi::OpFrom(op));
      GT_RETURN_IF_ERROR(CheckBuffer(data, count, type));
      GT_RETURN_IF_ERROR(CheckRank(comm, "root", root));
      return [=, c = comm->comm.get()] { return c->Reduce(data, count, type, reduce, root); };
    });
  });
}

gtrain_status gtrain_all_to_all(gtrain_communicator* comm, const void* input, void* output, size_t count,
                                gtrain_dtype dtype, void* stream, gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_RETURN_IF_ERROR(CheckBlocks(comm, input, count, type));
      GT_RETURN_IF_ERROR(CheckBlocks(comm, output, count, type));
      return [=, c = comm->comm.get()] { return c->AllToAll(input, output, count, type); };
    });
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_gather(gtrain_communicator* comm, const void* input, void* output, size_t count,
                            gtrain_dtype dtype, int root, void* stream, gtrain_request** out,
                            gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_RETURN_IF_ERROR(CheckBuffer(input, count, type));
      GT_RETURN_IF_ERROR(CheckRank(comm, "root", root));
      if (comm->rank == root) GT_RETURN_IF_ERROR(CheckBlocks(comm, output, count, type));
      return [=, c = comm->comm.get()] { return c->Gather(input, output, count, type, root); };
    });
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_scatter(gtrain_communicator* comm, const void* input, void* output, size_t count,
                             gtrain_dtype dtype, int root, void* stream, gtrain_request** out,
                             gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_RETURN_IF_ERROR(CheckBuffer(output, count, type));
      GT_RETURN_IF_ERROR(CheckRank(comm, "root", root));
      if (comm->rank == root) GT_RETURN_IF_ERROR(CheckBlocks(comm, input, count, type));
      return [=, c = comm->comm.get()] { return c->Scatter(input, output, count, type, root); };
    });
  });
}

gtrain_status gtrain_all_gather_v(gtrain_communicator* comm, const void* input, void* output,
                                  const size_t* counts, gtrain_dtype dtype, void* stream,
                                  gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_ASSIGN_OR_RETURN(std::vector<size_t> parts, CheckCounts(comm, counts));
      return [=, c = comm->comm.get()] { return c->AllGatherV(input, output, parts, type); };
    });
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_reduce_scatter_v(gtrain_communicator* comm, const void* input, void* output,
                                      const size_t* counts, gtrain_dtype dtype, gtrain_op op, void* stream,
                                      gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_ASSIGN_OR_RETURN(const ReduceOp reduce, gtrain::capi::OpFrom(op));
      GT_ASSIGN_OR_RETURN(std::vector<size_t> parts, CheckCounts(comm, counts));
      return [=, c = comm->comm.get()] { return c->ReduceScatterV(input, output, parts, type, reduce); };
    });
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_all_to_all_v(gtrain_communicator* comm, const void* input, const size_t* send_counts,
                                  void* output, const size_t* receive_counts, gtrain_dtype dtype,
                                  void* stream, gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      GT_ASSIGN_OR_RETURN(const DType type, DTypeFrom(dtype));
      GT_ASSIGN_OR_RETURN(std::vector<size_t> sends, CheckCounts(comm, send_counts));
      GT_ASSIGN_OR_RETURN(std::vector<size_t> receives, CheckCounts(comm, receive_counts));
      return [=, c = comm->comm.get()] { return c->AllToAllV(input, sends, output, receives, type); };
    });
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_send(gtrain_communicator* comm, const void* data, size_t count, gtrain_dtype dtype,
                          int to, int tag, void* stream, gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    const gtrain_message message{GTRAIN_SEND, const_cast<void*>(data), count, dtype, to, tag, 0, 0, 0};
    return gtrain::capi::Exchange(comm, nullptr, {&message, 1}, stream, out);
  });
}

// NOLINTNEXTLINE(readability-function-size)
gtrain_status gtrain_receive(gtrain_communicator* comm, void* data, size_t count, gtrain_dtype dtype,
                             int from, int tag, void* stream, gtrain_request** out, gtrain_error* error) {
  return Call(error, [&] {
    const gtrain_message message{GTRAIN_RECEIVE, data, count, dtype, from, tag, 0, 0, 0};
    return gtrain::capi::Exchange(comm, nullptr, {&message, 1}, stream, out);
  });
}

gtrain_status gtrain_exchange(gtrain_communicator* comm, gtrain_message* messages, size_t count, void* stream,
                              gtrain_request** out, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    if (messages == nullptr && count > 0) return absl::InvalidArgumentError("the list of messages is NULL");
    return gtrain::capi::Exchange(comm, messages, {messages, count}, stream, out);
  });
}

gtrain_status gtrain_barrier(gtrain_communicator* comm, void* stream, gtrain_request** out,
                             gtrain_error* error) {
  return Call(error, [&] {
    return TakePart(comm, stream, out, [&]() -> absl::StatusOr<AsyncCalls::Body> {
      return [c = comm->comm.get()] { return c->Barrier(); };
    });
  });
}

gtrain_status gtrain_request_wait(gtrain_request* request, int64_t timeout_ms, int* done,
                                  gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::WaitFor(request, timeout_ms, done); });
}

void gtrain_request_free(gtrain_request* request) { gtrain::capi::FreeHandle(request); }

}  // extern "C"
