// The actors of a job as one of its processes sees them: those that it has, and those of the others.
//
// All processes of a job are hosts, and one of them runs the program's driver. Who is there is told anew when
// a generation begins (Gathering); in a job in place the processes that survive keep their actors, their
// connections and their calls. Nothing here asks the head for a call or a spawn.
//
// Thread-safe. Cost: a process keeps about 200 bytes of each other one, and connects to those that it calls.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "actors/exec/directory.h"
#include "actors/exec/host.h"
#include "actors/exec/news.h"
#include "actors/exec/objects.h"
#include "actors/exec/owned.h"
#include "actors/exec/peers.h"
#include "actors/plan/members.h"
#include "actors/plan/placement.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "net/port/net_module.h"

namespace gtrain::actors {

// How the processes of a job find each other. One thread at a time.
class Gathering {
 public:
  virtual ~Gathering() = default;
  // What all processes of the generation say, by rank. Unavailable: the generation is over.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view own,
                                                             absl::Duration timeout) = 0;
  virtual int rank() const = 0;  // of this process, in the generation
  // Ranks whose processes have ended well.
  virtual std::vector<int> left() const = 0;
  // This process came up in the place of another one.
  virtual bool late() const = 0;
  // Waits so long for the end of the generation, and then for the beginning of the next. DeadlineExceeded: it
  // goes on. Unavailable: no other one comes for this process.
  virtual absl::Status AwaitNext(absl::Duration timeout) = 0;
  // The driver's calls have been answered so often: what the job has for steps.
  virtual void Report(uint64_t answered) = 0;
  // For people who ask why.
  virtual void Note(const std::string& text) = 0;
};

struct ClusterNetwork {
  std::unique_ptr<Gathering> gathering;
  const port::NetModule* net = nullptr;
  std::string secret;   // of the job, 64 hex digits
  std::string address;  // of this machine, numeric
  std::string node;
  absl::Duration join_timeout = absl::Minutes(10);
  bool shared_memory = true;  // with processes of this machine
};

class Cluster {
 public:
  // A process alone. `clock` outlives it, and what the destructor leaves to itself.
  Cluster(const HostOptions& options, const Clock& clock, const ObjectOptions& objects = {});
  // Ends the actors of this process as ~Host does.
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  // Before Join: others may spawn one right behind it.
  absl::Status Register(ActorClass type) { return host_->Register(std::move(type)); }
  // From now on the other processes are there, too. Blocks until all are. Once, before any spawn.
  absl::Status Join(ClusterNetwork network);
  // Join where neither the host nor this has threads (HostOptions::threads is 0): whoever has it calls
  // SetMembers and Turn.
  absl::Status JoinWithoutThreads(ClusterNetwork network);
  // What all processes of a generation say, by rank.
  absl::Status SetMembers(const std::vector<std::string>& table);
  // A turn of the host and of the connections. How long it may wait for something to come.
  absl::Duration Turn();
  // The reply is a reference. Errors are those of Host::Spawn and Peers::Call. kNotFound: there is no such
  // place. kFailedPrecondition: the class is another one there.
  void Spawn(absl::string_view type, const SpawnOptions& options, const Placement& placement,
             std::string arguments, absl::Duration timeout, Reply reply);
  // Likewise, of one that all processes of the job find by its name while its owner has it. kAlreadyExists:
  // another one has the name. kUnavailable: the process that drives, which keeps the names, is gone.
  void SpawnNamed(absl::string_view name, absl::string_view type, const SpawnOptions& options,
                  const Placement& placement, std::string arguments, absl::Duration timeout, Reply reply,
                  bool detached = false);
  // Likewise, of one that is nobody's: it ends with the job, or by EndDetached. It is owned by the process
  // that drives, and when that is lost by the next one; one that was in that process is lost with it.
  // kDeadlineExceeded: it may be there, and is found by its name then.
  void SpawnDetached(absl::string_view name, absl::string_view type, const SpawnOptions& options,
                     const Placement& placement, std::string arguments, absl::Duration timeout, Reply reply);
  // kInvalidArgument: it is not detached. kNotFound: it is no more.
  void EndDetached(const ActorRef& ref, absl::Duration timeout, Reply reply);
  // The reply comes when an actor of this process has ended by itself (OwnedActors::Watch).
  void Watch(const ActorRef& ref, Reply reply);
  // The reply is a reference. kNotFound: there is no such actor now. kFailedPrecondition: it is of another
  // class. kUnavailable: likewise.
  void Find(absl::string_view name, absl::string_view type, absl::Duration timeout, Reply reply);
  void Call(const ActorRef& ref, int method, std::string arguments, absl::Duration timeout, Reply reply);
  // Of an actor that this process has made; others end none.
  void End(const ActorRef& ref, absl::string_view reason);
  bool Post(absl::AnyInvocable<void()>& task) { return host_->Post(task); }
  // Of this process, and its way to those of others. Whoever has an object may keep it longer than this.
  const std::shared_ptr<Objects>& objects() const { return objects_; }

  // Blocks until this process is to run the driver (true), or the driver has ended (false). kUnavailable: the
  // generation is over, and no other one comes for this process.
  absl::StatusOr<bool> AwaitTurn();
  // Blocks so long, or until no other generation comes for this process: kUnavailable.
  // kDeadlineExceeded: it was not so.
  absl::Status AwaitOver(absl::Duration timeout);
  // The driver has ended well: the other processes are told to, over a connection to each, and have 11 s to
  // hear it.
  void Finish();

  bool drives() const;  // AwaitTurn would say so
  int processes() const;
  const CallerId& self() const { return self_; }
  const std::string& endpoint() const { return endpoint_; }  // where others reach it; of Join
  Host::Counts counts() const { return host_->counts(); }
  // What this process says to `gtrain actors`: the answer to a ListQuestion, both JSON.
  std::string List(absl::string_view question) const;

 private:
  struct Member {
    CallerId process;
    std::string node;
    PeerProcess reach;
    bool left = false;  // with exit code 0
  };

  struct Ends;  // hears of actors that have ended, while the cluster lives

  std::shared_ptr<Objects> MakeObjects(const ObjectOptions& options);
  void OnObjectControl(Control method, const std::string& arguments, absl::Duration timeout, Reply reply);
  CallerId CopiesAt() const;
  std::string NameOf(const CallerId& process) const;
  bool IsNear(const CallerId& process) const;

  void ListenHere(const port::NetOptions& net, Peers::Options* options);

  void Gather();
  void ReportProgress();
  void TellNews();
  void OnMoved(const OwnedActors::Moved& moved);
  std::optional<int> OwnerOf(uint64_t actor) const;
  absl::Status GatherOnce();
  absl::Status Connect(ClusterNetwork network, bool threads);
  absl::Status LookWhoLeft();
  absl::StatusOr<CallerId> Pick(const Placement& placement, const std::map<CallerId, size_t>& actors) const;
  void Make(const CallerId& at, const OwnedActors::Spec& spec, absl::Duration timeout, Reply reply);
  void MakeHere(const CallerId& owner, const SpawnRequest& request, absl::Duration timeout, Reply reply);
  // `spawn`: a SpawnRequest of a detached actor; empty: it is none.
  void OwnedBy(const CallerId& owner, uint64_t id, const ActorAddress& address, std::string spawn);
  static SpawnRequest RequestOf(const OwnedActors::Spec& spec, absl::string_view signature);
  static OwnedActors::Spec SpecOf(const SpawnRequest& request);
  absl::Status CheckClass(const SpawnRequest& request) const;
  void SpawnSpec(OwnedActors::Spec spec, absl::Duration timeout, Reply reply);

  void OnDetach(absl::string_view bytes, absl::Duration timeout, Reply reply);
  void OnRelease(const ActorRef& ref, Reply reply);
  void OnLocate(const ActorRef& ref, Reply reply);
  std::optional<uint64_t> OwnIdOf(const ActorRef& ref) const;
  void AskOwner(const ActorRef& ref, Control method, const std::string& arguments, absl::Duration timeout,
                Reply reply);
  void AskNextOwner(Control method, const std::string& arguments, absl::Duration timeout, Reply reply);
  void TellNamed(uint64_t id, const std::string& reference, Reply reply);
  void OnNamed(const CallerId& caller, absl::string_view bytes, Reply reply);
  void OfferOrphans(const std::set<CallerId>& members, const CallerId& keeper);
  void OnOffered(uint64_t number, const CallerId& keeper, const absl::Status& status, uint64_t id);
  void OnAdopt(const CallerId& caller, absl::string_view bytes, Reply reply);
  void EndAt(const ActorAddress& at, const std::string& reason);
  void SendEndings(const CallerId& process);
  void Locate(const ActorRef& ref, const ActorAddress& not_at, absl::Duration timeout, Reply reply);
  void OnControl(const CallerId& caller, uint32_t method, const std::string& arguments,
                 absl::Duration timeout, Reply reply);
  void OnSpawn(const CallerId& caller, absl::string_view bytes, absl::Duration timeout, Reply reply);
  void OnDetachedControl(const CallerId& caller, Control method, const std::string& arguments,
                         absl::Duration timeout, Reply reply);
  void OnGone(const CallerId& process);
  void OnEnd(uint64_t actor, bool tell);

  const Clock& clock_;
  std::unique_ptr<Host> host_;
  std::optional<ClusterNetwork> network_;
  std::string endpoint_;
  CallerId self_;
  std::unique_ptr<OwnedActors> owned_;
  std::unique_ptr<Directory> directory_;
  std::shared_ptr<Objects> objects_;

  std::unique_ptr<Peers> peers_;
  std::shared_ptr<Ends> ends_;
  const std::shared_ptr<News> news_;  // threads that are left to themselves have it, too
  std::thread gathering_;
  uint64_t reported_ = 0;  // of the thread
  Instant reported_at_;

  mutable Mutex mutex_;
  std::vector<Member> members_ ABSL_GUARDED_BY(mutex_);                 // by rank
  std::map<CallerId, std::string> lost_names_ ABSL_GUARDED_BY(mutex_);  // of those of the generation before
  std::set<CallerId> there_ ABSL_GUARDED_BY(mutex_);                    // those of the newest table
  int rank_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t driver_ ABSL_GUARDED_BY(mutex_) = 0;
  struct Endings {
    std::map<std::string, std::vector<uint64_t>> waiting;  // by reason
    bool sent = false;  // some are, and the process has not said that it has them
  };
  std::map<CallerId, Endings> endings_ ABSL_GUARDED_BY(mutex_);            // of actors of other processes
  std::map<CallerId, std::set<uint64_t>> owners_ ABSL_GUARDED_BY(mutex_);  // others, and what they own here
  struct OwnedElsewhere {
    CallerId owner;
    uint64_t id = 0;
  };
  std::map<uint64_t, OwnedElsewhere> owner_of_ ABSL_GUARDED_BY(mutex_);  // by actor, own ones with them
  // Of this process, and owned by another one.
  struct Detached {
    std::vector<OwnedName> names;     // the newest first, the first one of all last
    std::string spawn;                // a SpawnRequest
    bool named = false;               // its owner has said that it has its name
    std::optional<CallerId> offered;  // to whom, who has not answered yet
  };
  std::map<uint64_t, Detached> detached_ ABSL_GUARDED_BY(mutex_);
  std::map<OwnedName, uint64_t> adopted_ ABSL_GUARDED_BY(mutex_);  // owned here, by the names of before
  std::set<CallerId> gone_ ABSL_GUARDED_BY(mutex_);
  bool drives_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;      // the driver, which is elsewhere, has ended
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // it was here

  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> gathered_ ABSL_GUARDED_BY(mutex_);  // not OK: no more will be
};

}  // namespace gtrain::actors
