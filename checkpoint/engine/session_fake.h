// A job of threads: one FakeSession a rank, communicators that meet in one process. For tests.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/test_wait.h"
#include "runtime/port/session.h"

namespace gtrain::ckpt {

// Where the ranks of one communicator meet. Each operation is: everybody deposits, everybody reads, everybody
// leaves.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size), deposits_(size) {}

  absl::StatusOr<std::vector<std::string>> Exchange(int rank, std::string mine) {
    MutexLock lock(&mu_);
    const uint64_t round = round_;
    deposits_[rank] = std::move(mine);
    if (++arrived_ == size_) {
      result_ = deposits_;
      arrived_ = 0;
      ++round_;
    } else {
      const auto done = [&] { return round_ != round || broken_; };
      if (!mu_.AwaitFor(absl::Seconds(60), done) || round_ == round) {
        broken_ = true;
        return absl::UnavailableError("a rank left the communicator");
      }
    }
    return result_;
  }
  void Break() {
    MutexLock lock(&mu_);
    broken_ = true;
  }

 private:
  const int size_;
  Mutex mu_;
  uint64_t round_ = 0;
  int arrived_ = 0;
  bool broken_ = false;
  std::vector<std::string> deposits_;
  std::vector<std::string> result_;
};

class FakeCommunicator final : public Communicator {
 public:
  FakeCommunicator(std::shared_ptr<Meeting> meeting, int rank, int size)
      : meeting_(std::move(meeting)), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int machine() const override { return 0; }
  // Only what checkpoints use: the maximum and the sum of int64.
  absl::Status AllReduce(void* data, size_t count, DType dtype, ReduceOp op) override {
    if (dtype != DType::kInt64 || (op != ReduceOp::kMax && op != ReduceOp::kSum))
      return absl::UnimplementedError("fake: int64 max and sum only");
    auto all = meeting_->Exchange(rank_, Bytes(data, count * sizeof(int64_t)));
    if (!all.ok()) return all.status();
    auto* out = static_cast<int64_t*>(data);
    if (op == ReduceOp::kSum) std::fill(out, out + count, 0);
    for (const std::string& part : *all) {
      for (size_t i = 0; i < count; ++i) {
        int64_t value;
        std::memcpy(&value, part.data() + i * sizeof(value), sizeof(value));
        out[i] = op == ReduceOp::kMax
                     ? std::max(out[i], value)
                     : static_cast<int64_t>(static_cast<uint64_t>(out[i]) + static_cast<uint64_t>(value));
      }
    }
    return absl::OkStatus();
  }
  absl::Status Broadcast(void* data, size_t count, DType dtype, int root) override {
    auto all = meeting_->Exchange(rank_, rank_ == root ? Bytes(data, count * DTypeSize(dtype)) : "");
    if (!all.ok()) return all.status();
    if ((*all)[root].size() != count * DTypeSize(dtype))
      return absl::FailedPreconditionError("other count at root");
    std::memcpy(data, (*all)[root].data(), (*all)[root].size());
    return absl::OkStatus();
  }
  absl::Status AllGather(const void* input, void* output, size_t count, DType dtype) override {
    auto all = meeting_->Exchange(rank_, Bytes(input, count * DTypeSize(dtype)));
    if (!all.ok()) return all.status();
    for (int r = 0; r < size_; ++r) {
      std::memcpy(static_cast<char*>(output) + r * count * DTypeSize(dtype), (*all)[r].data(),
                  (*all)[r].size());
    }
    return absl::OkStatus();
  }
  absl::Status ReduceScatter(const void*, void*, size_t, DType, ReduceOp) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status Reduce(void*, size_t, DType, ReduceOp, int) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status AllToAll(const void*, void*, size_t, DType) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status Gather(const void*, void*, size_t, DType, int) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status Scatter(const void*, void*, size_t, DType, int) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status AllGatherV(const void*, void*, absl::Span<const size_t>, DType) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status ReduceScatterV(const void*, void*, absl::Span<const size_t>, DType, ReduceOp) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status AllToAllV(const void*, absl::Span<const size_t>, void*, absl::Span<const size_t>,
                         DType) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status SendMessage(const Message&) override { return absl::UnimplementedError("SendMessage"); }
  absl::StatusOr<std::shared_ptr<PendingMessages>> Start(absl::Span<const Message>) override {
    return absl::UnimplementedError("Start");
  }
  absl::Status Barrier() override { return meeting_->Exchange(rank_, "").status(); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int, int) override {
    return absl::UnimplementedError("fake");
  }
  absl::StatusOr<void*> Allocate(size_t) override { return absl::UnimplementedError("fake"); }
  absl::Status Free(void*) override { return absl::UnimplementedError("fake"); }
  void Abort(const absl::Status&) override {}
  void SetTimeout(absl::Duration) override {}
  absl::Duration timeout() const override { return absl::InfiniteDuration(); }

 private:
  static std::string Bytes(const void* data, size_t bytes) {
    return std::string(static_cast<const char*>(data), bytes);
  }
  const std::shared_ptr<Meeting> meeting_;
  const int rank_;
  const int size_;
};

inline constexpr absl::Duration kLong = absl::Seconds(60);

struct FakeJob {
  std::string job = "fashion-1";
  std::string cluster = "c1";
  std::string job_hash = "hash-a";
  std::string resume;
  std::string near;  // $GTRAIN_CHECKPOINT_NEAR
  std::string node;  // $GTRAIN_NODE
  bool managed = true;
  int world_size = 1;
  uint64_t generation = 1;
  uint64_t timeline = 1;
  std::map<std::string, std::string> environment;  // more of it
  std::shared_ptr<Meeting> meeting;                // made by RunRanks
};

class FakeSession : public Session {
 public:
  FakeSession(const FakeJob& job, int rank) : job_(job), rank_(rank), generation_(job.generation) {}
  int rank() const override { return rank_; }
  int local_rank() const override { return rank_; }
  int world_size() const override { return job_.world_size; }
  uint64_t generation() const override {
    MutexLock lock(&mu_);
    return generation_;
  }
  uint64_t timeline() const override { return job_.timeline; }
  bool managed() const override { return job_.managed; }
  const std::string& job() const override { return job_.job; }
  absl::StatusOr<std::unique_ptr<Communicator>> MakeCommunicator(const CommunicatorOptions&) override {
    return std::make_unique<FakeCommunicator>(job_.meeting, rank_, job_.world_size);
  }
  absl::Status Rejoin(const SessionOptions&) override { return absl::UnimplementedError("a fake session"); }
  void Report(const ProgressReport&) override {}
  void ReportCheckpoint(int64_t step, const std::string& manifest, const std::string& policy) override {
    MutexLock lock(&mu_);
    policy_ = policy;
    reported_.emplace_back(step, manifest);
  }
  void CountStall(absl::Duration time) override {
    MutexLock lock(&mu_);
    stalled_ += time;
  }
  void ReportNote(absl::string_view kind, const std::string& text) override {
    MutexLock lock(&mu_);
    notes_[std::string(kind)] = text;
  }
  absl::Status Alive() const override {
    MutexLock lock(&mu_);
    return alive_;
  }
  bool StopRequested() const override {
    MutexLock lock(&mu_);
    return stop_requested_;
  }
  std::optional<absl::Duration> PreemptionNotice() const override {
    MutexLock lock(&mu_);
    return notice_;
  }

  void Notice(std::optional<absl::Duration> left) {
    MutexLock lock(&mu_);
    notice_ = left;
  }
  void RequestStop() {
    MutexLock lock(&mu_);
    stop_requested_ = true;
  }
  void Revoke() {
    MutexLock lock(&mu_);
    alive_ = absl::UnavailableError("rank 1 was lost");
  }
  // Joined by this process after the one before.
  void BeginGeneration(uint64_t generation) {
    MutexLock lock(&mu_);
    generation_ = generation;
    alive_ = absl::OkStatus();
  }
  std::string policy() const {
    MutexLock lock(&mu_);
    return policy_;
  }
  absl::Duration stalled() const {
    MutexLock lock(&mu_);
    return stalled_;
  }
  // The newest of a kind; empty: none.
  std::string note(absl::string_view kind) const {
    MutexLock lock(&mu_);
    const auto it = notes_.find(std::string(kind));
    return it == notes_.end() ? "" : it->second;
  }
  std::vector<std::pair<int64_t, std::string>> reported() const {
    MutexLock lock(&mu_);
    return reported_;
  }

 private:
  const FakeJob job_;
  const int rank_;
  mutable Mutex mu_;
  uint64_t generation_;
  absl::Status alive_;
  std::optional<absl::Duration> notice_;
  bool stop_requested_ = false;
  std::vector<std::pair<int64_t, std::string>> reported_;
  std::string policy_;
  absl::Duration stalled_;
  std::map<std::string, std::string> notes_;
};

// Runs `body` on a thread a rank and waits for all. A body that returns early breaks the communicator, as a
// process that dies does.
inline void RunRanks(FakeJob job, const std::function<void(FakeSession*)>& body) {
  job.meeting = std::make_shared<Meeting>(job.world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < job.world_size; ++rank) {
    threads.emplace_back([&, rank] {
      FakeSession session(job, rank);
      body(&session);
      job.meeting->Break();
    });
  }
  for (std::thread& t : threads) t.join();
}

}  // namespace gtrain::ckpt
