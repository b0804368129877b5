// The shell around core::WorkerCore: one thread that talks to the keeper, for one membership after the other.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
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
#include "comm/port/wakers.h"
#include "runtime/core/values/rank_notes.h"
#include "runtime/core/worker/worker_core.h"
#include "runtime/worker/keeper_client.h"
#include "runtime/worker/membership.h"
#include "runtime/worker/rank_environment.h"

namespace gtrain::worker {

// Thread-safe. In a forked child every call fails with FailedPrecondition or does nothing. What names a
// membership fails or does nothing once that is over.
class KeeperLink {
 public:
  // `stays`: the process means to go on in the next generation, where its job lets it.
  KeeperLink(RankEnvironment environment, bool stays, bool place_later);
  ~KeeperLink();
  KeeperLink(const KeeperLink&) = delete;
  KeeperLink& operator=(const KeeperLink&) = delete;

  // Says hello and waits until all ranks of the generation have.
  absl::Status Join(absl::Duration timeout);
  // Waits for the end of this membership, for the next one, and until all of its ranks have joined.
  // Unavailable: there is none for this process.
  absl::Status Rejoin(absl::Duration timeout, absl::Duration over_timeout = absl::InfiniteDuration());
  std::shared_ptr<Membership> membership() const;

  absl::StatusOr<std::vector<std::string>> AllGather(const Membership& of, absl::string_view blob,
                                                     absl::Duration timeout);
  absl::StatusOr<UniqueFd> Arena(const Membership& of, const RankUsedArenaRequest& request,
                                 absl::Duration timeout);
  void FreeArena(const Membership& of, uint64_t id);
  std::vector<int> Left(const Membership& of) const;
  void Report(const Membership& of, const core::WorkerEvent& event);
  std::shared_ptr<comm::Fabric>& fabric() { return fabric_; }
  comm::Wakers& wakers() { return wakers_; }

  // Implements port::WriterHost.
  absl::StatusOr<port::WriterLink> StartWriter(uint64_t arena_bytes, absl::Duration timeout,
                                               absl::FunctionRef<bool()> wanted);

  // As Session::SetAsked.
  void SetAsked(std::function<std::string(absl::string_view question)> answer);

  absl::Status Alive() const;
  // These never block and never fail: a report that cannot be sent is dropped.
  void Report(const core::WorkerEvent& checkpoint_or_note);
  // With what has been counted by then.
  void ReportProgress(core::WorkerProgress progress);
  void CountCollective() { collectives_.fetch_add(1, std::memory_order_relaxed); }
  void CountWaiting(absl::Duration time) {
    waited_ns_.fetch_add(absl::ToInt64Nanoseconds(time), std::memory_order_relaxed);
  }

  void CountStall(absl::Duration time) {
    stalled_ns_.fetch_add(absl::ToInt64Nanoseconds(time), std::memory_order_relaxed);
  }

  bool stop_requested() const;
  // It came up beside a generation, and the program has not asked for its place yet (Rejoin).
  bool comes_up() const;
  bool pause_requested() const;
  std::optional<Instant> preempted_at() const;

  bool Forked() const { return fork_guard_.Forked(); }
  static absl::Status ForkedError();

 private:
  void Loop(KeeperClient client);
  // One turn of the loop: send, wait, receive. Not OK: the keeper is gone.
  absl::Status Turn(KeeperClient& client);
  void FrameIn(KeeperFrame& frame);
  void AskedIn(const std::string& body);
  void WelcomeIn(const std::string& body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ArenaFrameIn(KeeperFrame& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriterFrameIn(KeeperFrame& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RevokedIn(const std::string& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MemberIn(const std::string& environment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RelayedIn(const std::string& body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StepLocked(const core::WorkerEvent& event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void QueueLocked(uint16_t kind, std::string body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SayAnswersLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendReleasedLocked(uint64_t generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SendLocked(uint16_t kind, std::string body) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int PollMs() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  core::WorkerCollectives Counted() const;
  void SayGoodbye(KeeperClient& client);
  core::WorkerJoin JoinEvent() const;
  void BeginNextLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::vector<std::string>> AwaitTable(const Membership& of, uint64_t sequence,
                                                      Instant deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AwaitedLeftLocked(const Membership& of, uint64_t sequence)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WhoIsMissingLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AliveLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool StandsLocked(const Membership& of) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return membership_.get() == &of && of.Alive().ok();
  }

  const ForkGuard fork_guard_;
  const std::string job_, keeper_socket_;
  const bool stays_, place_later_;
  UniqueFd wake_;  // eventfd: there is something to send, or the end
  std::shared_ptr<comm::Fabric> fabric_;
  comm::Wakers wakers_;
  std::atomic<bool> over_{false};
  std::atomic<bool> some_left_{false};
  std::atomic<bool> stop_requested_{false};
  std::atomic<bool> pause_requested_{false};
  std::atomic<uint64_t> collectives_{0};
  std::atomic<int64_t> waited_ns_{0};
  std::atomic<int64_t> stalled_ns_{0};
  std::thread thread_;

  Mutex arena_mutex_;   // one arena request at a time; taken before mutex_
  Mutex writer_mutex_;  // the same of writers
  Mutex asked_mutex_;   // held while it is asked; likewise
  std::function<std::string(absl::string_view)> asked_ ABSL_GUARDED_BY(asked_mutex_);
  mutable Mutex mutex_;
  std::shared_ptr<Membership> membership_ ABSL_GUARDED_BY(mutex_);
  core::WorkerCore core_ ABSL_GUARDED_BY(mutex_);                // of it
  std::optional<RankEnvironment> next_ ABSL_GUARDED_BY(mutex_);  // the membership after it
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);                    // not OK: there will be none
  std::vector<std::pair<uint16_t, std::string>> outbox_ ABSL_GUARDED_BY(mutex_);
  bool welcome_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t arena_wanted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<absl::StatusOr<UniqueFd>> arena_reply_ ABSL_GUARDED_BY(mutex_);
  bool keeper_has_writers_ ABSL_GUARDED_BY(mutex_) = false;
  bool keeper_frees_arenas_ ABSL_GUARDED_BY(mutex_) = false;
  bool keeper_reuses_arenas_ ABSL_GUARDED_BY(mutex_) = false;
  bool keeper_keeps_ranks_ ABSL_GUARDED_BY(mutex_) = false;
  bool keeper_asks_ ABSL_GUARDED_BY(mutex_) = false;
  bool answers_ ABSL_GUARDED_BY(mutex_) = false;   // somebody has an answer for it
  bool waits_ ABSL_GUARDED_BY(mutex_) = false;     // it was started beside a generation, and has no place yet
  bool comes_up_ ABSL_GUARDED_BY(mutex_) = false;  // likewise, and its keeper does not know that it is ready
  uint64_t writer_wanted_ ABSL_GUARDED_BY(mutex_) = 0;
  port::WriterLink writer_coming_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::StatusOr<port::WriterLink>> writer_reply_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gtrain::worker
