// Every child of the keeper: they are started here, in batches, and reaped here, and this asks whose a child
// is. The keeper is the subreaper of all that it starts, so orphans of its ranks are its children, too.
//
// An exit is what waitid says, never what a pipe says (fault P7); its owner records it before the zombie is
// reaped. Owner thread only; nothing blocks. A turn reaps at most 4096.
#pragma once
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/keeper/context.h"
#include "runtime/keeper/spawn.h"

namespace gtrain::keeper {

// Has some of the keeper's children.
class ChildOwner {
 public:
  // A child has ended and is not reaped yet. False: it is none of this owner's.
  virtual bool OnDied(const siginfo_t& info) = 0;
  // The generation that a child and its descendants belong to, kNoGeneration: to none. Nothing: the child is
  // none of this owner's.
  virtual std::optional<uint64_t> GenerationOf(pid_t child) = 0;

 protected:
  ~ChildOwner() = default;
};

inline constexpr uint64_t kNoGeneration = 0;  // the first one is 1

class Children {
 public:
  explicit Children(Context& context) : context_(context) {}

  // Owners are asked in the order in which they were added, and outlive this.
  void AddOwner(ChildOwner* owner) { owners_.push_back(owner); }

  // Starts the processes of a generation, or beside its ranks. `started` gets what became of each request;
  // `starter_died` comes last, when the process that starts them has ended: requests of which nothing was
  // heard until then were not started. False: errno says why, and neither is called.
  bool Start(uint64_t generation, std::vector<SpawnRequest> requests, const Cgroup* cgroup,
             std::function<void(const SpawnResult&)> started, std::function<void()> starter_died);
  // Hands out the results that have arrived.
  void TakeStarted();
  // Takes every zombie: known ones when their owner has heard of it, adopted orphans at once (fault P11).
  void Reap();
  // More zombies than one turn takes.
  bool more_zombies() const { return more_zombies_; }
  // Asks all owners, and knows the processes that start others. Nothing: it is an adopted orphan.
  std::optional<uint64_t> GenerationOf(pid_t child) const;
  void AddFds(std::vector<pollfd>* fds) const;

 private:
  struct Starting {
    SpawnBatch batch;
    uint64_t generation = 0;
    std::function<void(const SpawnResult&)> started;
    std::function<void()> starter_died;
  };
  bool OwnerHears(const siginfo_t& info);
  bool StarterDied(pid_t pid);

  Context& context_;
  std::vector<ChildOwner*> owners_;
  std::vector<std::unique_ptr<Starting>> starting_;
  bool more_zombies_ = false;
};

}  // namespace gtrain::keeper
