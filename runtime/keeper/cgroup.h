// A control group for the ranks of a generation, or for one rank with a memory limit, where the machine lets
// us make one. Owner thread only.
//
// It is a help, never a condition: the keeper's own view of its descendants decides when a generation is
// gone. The group gives a kill that no fork outruns (v2 `cgroup.kill`, v1 freezer), limits of memory and of
// processes (fault P12), and the kernel's word on an OOM kill (fault P2).
#pragma once
#include <stdint.h>
#include <sys/types.h>

#include <map>
#include <string>

namespace gtrain::keeper {

struct CgroupLimits {
  uint64_t memory = 0;     // bytes; 0 = none
  uint64_t processes = 0;  // and threads; 0 = none
};

class Cgroup {
 public:
  Cgroup() = default;
  Cgroup(const Cgroup&) = delete;
  Cgroup& operator=(const Cgroup&) = delete;
  ~Cgroup() { Remove(); }

  // Moves soon after this one are quick. A child does it, and is waited for like any other.
  static void WarmUp();
  // Whether a group that this process makes can limit memory. Makes one and removes it.
  static bool LimitsMemory();
  // Removes empty groups of keepers that were killed.
  static void SweepStale();

  // Name is made of digits and dashes by the caller. Makes what it can; a machine without writable groups
  // gives none. Nothing happens the second time.
  void Create(const std::string& name, const CgroupLimits& limits);
  // A fork whose child begins as a member. -1: errno. The child may do what a forked child of a process with
  // one thread may, except raise signals to itself by its thread.
  pid_t Fork() const;
  void Enter() const;  // in a child of a plain fork, before exec
  bool Kill() const;   // true: every member was sent SIGKILL
  uint64_t OomKills() const;
  // Whether it was its own limit of memory that was met, and not that of a group above it or the machine's.
  bool MetItsLimit() const;
  void Remove();  // when empty

  static void UseUnified(bool use);  // tests: false = as on a machine with v1 only

 private:
  std::map<std::string, std::string> made_;  // hierarchy ("" is v2, else a v1 controller) -> directory
};

}  // namespace gtrain::keeper
