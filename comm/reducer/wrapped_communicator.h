// For tests: a communicator that counts its splits and lets something happen beside its calls. So do the
// communicators split off it.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "comm/port/communicator.h"

namespace gtrain::comm {

// The hooks of one rank, which outlive its communicators.
struct Hooks {
  std::atomic<int> splits{0};
  // Packets that have arrived by all-gather or all-to-all of bytes.
  std::function<void(uint8_t* data, size_t bytes)> arrived;
  // Called before an all-reduce, and after one; their errors are its.
  std::function<absl::Status(size_t count, DType dtype)> before_all_reduce, after_all_reduce;
  std::function<absl::Status(size_t count, DType dtype)> before_broadcast;
  std::function<absl::Status(absl::Span<const Message> messages)> before_start;
  std::optional<absl::Duration> timeout;  // what they say theirs is
};

class WrappedCommunicator final : public Communicator {
 public:
  WrappedCommunicator(Communicator* inner, Hooks* hooks) : inner_(inner), hooks_(hooks) {}
  WrappedCommunicator(std::unique_ptr<Communicator> inner, Hooks* hooks)
      : own_(std::move(inner)), inner_(own_.get()), hooks_(hooks) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int machine() const override { return inner_->machine(); }
  absl::Status AllReduce(void* data, size_t count, DType dtype, ReduceOp op) override {
    if (hooks_->before_all_reduce) {
      if (absl::Status status = hooks_->before_all_reduce(count, dtype); !status.ok()) return status;
    }
    const absl::Status status = inner_->AllReduce(data, count, dtype, op);
    return status.ok() && hooks_->after_all_reduce ? hooks_->after_all_reduce(count, dtype) : status;
  }
  absl::Status Broadcast(void* data, size_t count, DType dtype, int root) override {
    if (hooks_->before_broadcast) {
      if (absl::Status status = hooks_->before_broadcast(count, dtype); !status.ok()) return status;
    }
    return inner_->Broadcast(data, count, dtype, root);
  }
  absl::Status AllGather(const void* input, void* output, size_t count, DType dtype) override {
    return Arrived(inner_->AllGather(input, output, count, dtype), output, count, dtype);
  }
  absl::Status ReduceScatter(const void* input, void* output, size_t count, DType dtype,
                             ReduceOp op) override {
    return inner_->ReduceScatter(input, output, count, dtype, op);
  }
  absl::Status Reduce(void* data, size_t count, DType dtype, ReduceOp op, int root) override {
    return inner_->Reduce(data, count, dtype, op, root);
  }
  absl::Status AllToAll(const void* input, void* output, size_t count, DType dtype) override {
    return Arrived(inner_->AllToAll(input, output, count, dtype), output, count, dtype);
  }
  absl::Status Barrier() override { return inner_->Barrier(); }
  absl::Status Gather(const void* input, void* output, size_t count, DType dtype, int root) override {
    return inner_->Gather(input, output, count, dtype, root);
  }
  absl::Status Scatter(const void* input, void* output, size_t count, DType dtype, int root) override {
    return inner_->Scatter(input, output, count, dtype, root);
  }
  absl::Status AllGatherV(const void* input, void* output, absl::Span<const size_t> counts,
                          DType dtype) override {
    return inner_->AllGatherV(input, output, counts, dtype);
  }
  absl::Status ReduceScatterV(const void* input, void* output, absl::Span<const size_t> counts, DType dtype,
                              ReduceOp op) override {
    return inner_->ReduceScatterV(input, output, counts, dtype, op);
  }
  absl::Status AllToAllV(const void* input, absl::Span<const size_t> send_counts, void* output,
                         absl::Span<const size_t> receive_counts, DType dtype) override {
    return inner_->AllToAllV(input, send_counts, output, receive_counts, dtype);
  }
  absl::Status SendMessage(const Message& message) override { return inner_->SendMessage(message); }
  absl::StatusOr<std::shared_ptr<PendingMessages>> Start(absl::Span<const Message> messages) override {
    if (hooks_->before_start) {
      if (absl::Status status = hooks_->before_start(messages); !status.ok()) return status;
    }
    return inner_->Start(messages);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    ++hooks_->splits;
    auto part = inner_->Split(color, key);
    if (!part.ok() || *part == nullptr) return part;
    return std::make_unique<WrappedCommunicator>(*std::move(part), hooks_);
  }
  absl::StatusOr<void*> Allocate(size_t bytes) override { return inner_->Allocate(bytes); }
  absl::Status Free(void* memory) override { return inner_->Free(memory); }
  void SetTimeout(absl::Duration timeout) override { inner_->SetTimeout(timeout); }
  void Abort(const absl::Status& why) override { inner_->Abort(why); }
  absl::Duration timeout() const override { return hooks_->timeout.value_or(inner_->timeout()); }
  void ReportCompression(const std::string& text) override { inner_->ReportCompression(text); }

 private:
  absl::Status Arrived(absl::Status status, void* output, size_t count, DType dtype) {
    if (status.ok() && dtype == DType::kUint8 && hooks_->arrived) {
      hooks_->arrived(static_cast<uint8_t*>(output), count * static_cast<size_t>(size()));
    }
    return status;
  }

  const std::unique_ptr<Communicator> own_;
  Communicator* const inner_;
  Hooks* const hooks_;
};

}  // namespace gtrain::comm
