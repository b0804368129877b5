// The shell around core::WorkerCore: one thread that talks to the keeper, and the Bootstrap of the
// session's communicators.
#pragma once
#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/fork_guard.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "checkpoint/port/writer_host.h"
#include "comm/port/bootstrap.h"
#include "runtime/core/values/rank_notes.h"
#include "runtime/core/worker/worker_core.h"
#include "runtime/worker/keeper_client.h"
#include "runtime/worker/rank_environment.h"

namespace gtrain::worker {

// Thread-safe. In a forked child every call fails with FailedPrecondition or does nothing.
class KeeperLink final : public comm::Bootstrap {
 public:
  explicit KeeperLink(RankEnvironment environment);
  ~KeeperLink() override;

  // Says hello and waits until all ranks of the generation have.
  absl::Status Join(absl::Duration timeout);

  // Reads the members file, once: a rank that makes no communicator needs none. Before members() is used.
  absl::Status ReadMembers();

  // comm::Bootstrap
  int rank() const override { return env_.rank; }
  int world_size() const override { return env_.world_size; }
  Generation generation() const override { return Generation{env_.generation}; }
  const std::vector<comm::Member>& members() const override { return members_; }
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view blob, absl::Duration timeout) override;
  absl::StatusOr<UniqueFd> Arena(uint64_t id, uint64_t bytes, absl::Duration timeout) override;
  void FreeArena(uint64_t id) override;
  absl::Status Alive() const override;
  std::vector<int> Left() const override;
  void ReportLink(int peer, const std::string& text) override { Report(core::WorkerLinkDown{peer, text}); }
  void ReportCompression(const std::string& text) override {
    Report(core::WorkerNote{core::kCompressionNote, text});
  }

  // Implements port::WriterHost.
  absl::StatusOr<port::WriterLink> StartWriter(uint64_t arena_bytes, absl::Duration timeout,
                                               absl::FunctionRef<bool()> wanted);

  // These never block and never fail: a report that cannot be sent is dropped.
  void Report(const core::WorkerEvent& progress_or_checkpoint);
  void CountCollective() { collectives_.fetch_add(1, std::memory_order_relaxed); }
  void CountWaiting(absl::Duration time) {
    waited_ns_.fetch_add(absl::ToInt64Nanoseconds(time), std::memory_order_relaxed);
  }

  bool stop_requested() const;
  std::optional<Instant> preempted_at() const;
  const RankEnvironment& environment() const { return env_; }

 private:
  void Loop(KeeperClient client);
  // One turn of the loop: send, wait, receive. Not OK: the keeper is gone.
  absl::Status Turn(KeeperClient& client);
  void FrameIn(KeeperFrame& frame);
  void WriterFrameIn(KeeperFrame& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RelayedIn(const std::string& body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StepLocked(const core::WorkerEvent& event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void QueueLocked(uint16_t kind, std::string body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int PollMs() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SayGoodbye(KeeperClient& client);
  absl::StatusOr<std::vector<std::string>> AwaitTable(uint64_t sequence, Instant deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AwaitedLeftLocked(uint64_t sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WhoIsMissingLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AliveLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Forked() const { return fork_guard_.Forked(); }

  const RankEnvironment env_;
  const ForkGuard fork_guard_;
  Mutex members_mutex_;
  std::vector<comm::Member> members_;  // set once under members_mutex_, then only read
  UniqueFd wake_;                      // eventfd: there is something to send, or the end
  std::atomic<bool> over_{false};
  std::atomic<bool> some_left_{false};
  std::atomic<bool> stop_requested_{false};
  std::atomic<uint64_t> collectives_{0};
  std::atomic<int64_t> waited_ns_{0};
  std::thread thread_;

  Mutex arena_mutex_;   // one arena request at a time; taken before mutex_
  Mutex writer_mutex_;  // the same of writers
  mutable Mutex mutex_;
  core::WorkerCore core_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::pair<uint16_t, std::string>> outbox_ ABSL_GUARDED_BY(mutex_);
  bool welcome_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t arena_wanted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<absl::StatusOr<UniqueFd>> arena_reply_ ABSL_GUARDED_BY(mutex_);
  bool keeper_has_writers_ ABSL_GUARDED_BY(mutex_) = false;
  bool keeper_frees_arenas_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t writer_wanted_ ABSL_GUARDED_BY(mutex_) = 0;
  port::WriterLink writer_coming_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::StatusOr<port::WriterLink>> writer_reply_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gtrain::worker
