// Private to runtime/head: the loop between HeadCore, the network and the disk.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/task_thread.h"
#include "base/unique_fd.h"
#include "net/zmq/served_at.h"
#include "net/zmq/server.h"
#include "runtime/control/cluster_dir.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/head/join_queue.h"
#include "runtime/core/head/outbox.h"
#include "runtime/head/access.h"
#include "runtime/head/audit_log.h"
#include "runtime/head/head.h"
#include "runtime/head/relay_routes.h"
#include "runtime/head/run_index.h"
#include "runtime/head/tail_spill.h"
#include "runtime/port/meta_store.h"

namespace gtrain::head {

// The reports of the disk threads to the loop. Thread-safe; `fd` is readable while one waits.
class Completions {
 public:
  struct Item {
    uint64_t batch = 0;                     // of a commit; 0: something else
    std::optional<port::StoreSpace> space;  // seen by housekeeping
    absl::Status status;                    // of the disk: an error ends the head
    std::string request;                    // a client's: key and request id
    core::Message reply;                    // to it
    std::vector<core::Message> joined;      // of the batch of joins, in its order
    std::string built;                      // a reply that a thread has built, as it is sent
    std::string route;                      // where to
    std::string reader;                     // whose key
    std::shared_ptr<core::PlanWork> plan;   // that is made
    std::vector<JobId> unwritten;           // jobs whose results an earlier head did not write
  };
  Completions();
  int fd() const { return event_.get(); }
  void Push(Item item);
  std::vector<Item> Take();

 private:
  UniqueFd event_;
  Mutex mutex_;
  std::vector<Item> items_ ABSL_GUARDED_BY(mutex_);
};

// Requests about keys and backups, by client and request id: one that is repeated is not executed again
// (fault H15). In memory only: after a restart of the head adding twice is refused, taking away twice is
// harmless.
class KeyRequests {
 public:
  // True: execute it. False: it is being executed, or was: `answer` is set then.
  bool Begin(const std::string& id, const std::string& route, std::optional<core::ClientReply>* answer);
  // The newest connection that asked.
  std::string Finish(const std::string& id, const core::ClientReply& reply);

 private:
  struct One {
    std::string route;
    std::optional<core::ClientReply> reply;
  };
  std::map<std::string, One> requests_;
  std::deque<std::string> order_;
};

struct ServiceCounters {
  uint64_t turns = 0;
  absl::Duration longest_turn;
  absl::Duration longest_commit;
  uint64_t undecodable = 0;  // messages the codec refused
  uint64_t unsent = 0;       // to routes that were gone or full
  uint64_t run_file_drops = 0;
  uint64_t tails_lost = 0;  // parts of tails that were not even given to the disk
};

absl::Status RootMayServe(bool root, bool loopback, bool container, bool allow_root);

class HeadService {
 public:
  explicit HeadService(const HeadOptions& options);
  ~HeadService();

  // Everything up to serving: keys, store, recovery made durable, sockets, endpoint.json.
  absl::Status Start();
  // Runs until `stop_fd` is readable or the core says so.
  absl::Status Loop(int stop_fd);
  const std::vector<std::string>& endpoints() const { return server_->endpoints(); }

 private:
  core::HeadConfig ConfigOfCore() const;
  absl::Status Recover();
  absl::Status WithRemedy(const absl::Status& status) const;
  absl::StatusOr<net::ServedAt> WhereToServe() const;
  absl::Status Listen();
  absl::Status Turn(int stop_fd);
  bool ReceiveSome();  // false: the limit was reached and more may wait
  void OnReceived(port::Received received, const NodeId& via = {});
  void OnRelayed(const port::Received& received, const core::RelayedUp& up);
  void FlushRelays();
  absl::Status OnCompletions();
  absl::Status OnDurable(const Completions::Item& item);
  void OnKeysDone(const Completions::Item& item);
  void OnSpace(const port::StoreSpace& space);
  void Step(core::HeadEvent event);
  void DrainLater();
  void Do(const std::vector<core::Effect>& effects);
  void StartCommit();
  void PostCommit();
  void OnNoRoom(const absl::Status& status);
  void AnswerWithoutStoring();
  int PollMs(bool more) const;
  void Housekeeping(Instant now);
  std::string StatsJson() const;

  void operator()(const core::Persist&) {}  // Outbox keeps these to itself
  void operator()(const core::SendToNode& send);
  void operator()(const core::ReplyToClient& reply);
  void operator()(const core::RefusePeer& refuse);
  void operator()(const core::ServiceRequest& request);
  void operator()(const core::EmitEvent& event);
  void operator()(const core::WriteFailure& failure);
  void operator()(const core::WriteResult& result);
  void operator()(const core::MakePlan& make);
  void operator()(const core::StopHead& stop);
  void operator()(const core::SpillTail& spill);
  void operator()(const core::DropSpilled& drop);
  void operator()(const core::ReplyFromSpill& reply);

  bool ChangeKeys(const std::string& id, const core::ServiceRequest& request,
                  const core::ClientRequest& body);
  bool Backup(const std::string& id, const core::ServiceRequest& request, const core::ClientRequest& body,
              const std::string& dir);
  void StartJoins();
  void OnJoinsDone(const Completions::Item& item);
  void AuditRefusedConnections(Instant now);
  void SayGoodbye();
  bool Send(const std::string& route, const core::Message& message);
  bool SendShared(const std::string& route, const core::SharedMessage& message);
  bool SendBytes(const std::string& route, absl::string_view bytes, absl::string_view what);
  void BuildReply(const std::string& reader, const std::string& route, const std::string& id,
                  std::function<core::ClientReply()> build);
  void OnBuilt(const Completions::Item& item);
  void PostRunFile(std::function<absl::Status()> write, const std::string& what);
  void FindUnwritten();
  void WriteLate(const std::vector<JobId>& jobs);

  // Constant after Start.
  const HeadOptions options_;
  const std::shared_ptr<const Clock> clock_ = std::make_shared<RealClock>();
  net::ClusterFiles files_;
  net::ServedAt serve_at_;
  std::string token_endpoint_;
  std::shared_ptr<net::KeyRegistry> registry_ = std::make_shared<net::KeyRegistry>();
  std::shared_ptr<Completions> completions_ = std::make_shared<Completions>();

  // Owned by the store thread once it runs.
  std::shared_ptr<port::MetaStore> store_;
  std::shared_ptr<Access> access_;
  std::shared_ptr<AuditLog> audit_;

  // Loop-owned.
  std::unique_ptr<core::HeadCore> core_;
  core::Outbox outbox_;
  std::shared_ptr<core::OutboxBatch> committing_;  // with the store thread, or waiting for room
  // Set while `committing_` waits for room on the store's disk, with the sentence about it (fault H3). Grants
  // and replies wait with it, revokes do not; what people ask is answered all the same.
  std::optional<std::string> no_room_;
  std::unique_ptr<net::ZmqServer> server_;
  std::unique_ptr<RelayRoutes> relays_;
  struct Packed {
    core::SharedMessage message;
    std::string bytes;
  };
  std::optional<Packed> packed_;            // the one that was sent last in this turn
  std::deque<core::HeadEvent> later_;       // found while doing effects
  std::vector<core::EmitEvent> recovered_;  // events of Recover, written once the files thread runs
  std::optional<std::string> stopping_;
  absl::Status stop_status_;
  Instant farewell_until_;
  UniqueFd published_;                   // endpoint.json
  std::shared_ptr<UniqueFd> store_dir_;  // as it was opened
  std::optional<Instant> received_at_;   // the transport was asked
  absl::Duration unread_;  // what is read now may have waited so long: this process was not running
  std::optional<Instant> commit_by_;  // what is to be stored waits for more until then
  Instant commit_began_, next_housekeeping_, run_file_log_{INT64_MIN / 2};
  std::string last_stats_;
  KeyRequests key_requests_;
  std::map<std::string, int> reads_of_key_;  // replies that are being built
  core::JoinQueue joins_;
  net::ServerCounters audited_;  // refused connections up to here have their audit line
  Instant next_refused_line_;
  port::SpaceLevel space_ = port::SpaceLevel::kPlenty;
  ServiceCounters counters_;

  std::shared_ptr<TailSpill> tails_;  // the thread's of `tail_queue_`
  std::shared_ptr<RunIndex> runs_;    // the thread's of `files_thread_`; of a local cluster

  // Declared last: their threads end before what they use.
  std::shared_ptr<TaskThread> store_thread_;    // commits, keys, audit
  std::unique_ptr<TaskThread> files_thread_;    // run directories, the index of runs
  std::unique_ptr<TaskThread> backup_thread_;   // made with the first backup
  std::unique_ptr<TaskThread> readers_thread_;  // documents
  std::unique_ptr<TaskThread> plans_thread_;    // made with the first large job
  std::unique_ptr<TailQueue> tail_queue_;       // spilled tails
};

}  // namespace gtrain::head
