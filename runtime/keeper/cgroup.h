// A control group of its own for each rank, where the machine lets us make one. Owner thread only.
//
// It is a help, never a condition: the keeper's own view of its descendants decides when a generation is
// gone. The group gives an atomic kill (v2 `cgroup.kill`), a memory limit and the kernel's word on an OOM
// kill (fault P2).
#pragma once
#include <stdint.h>

#include <string>

namespace gtrain::keeper {

class Cgroup {
 public:
  Cgroup() = default;
  Cgroup(const Cgroup&) = delete;
  Cgroup& operator=(const Cgroup&) = delete;
  ~Cgroup() { Remove(); }

  // Removes empty groups of keepers that were killed.
  static void SweepStale();

  // Name is made of digits and dashes by the caller. Makes what it can; a machine without writable groups
  // gives none.
  void Create(const std::string& name, uint64_t memory_limit);
  void Enter() const;  // in the child, before exec
  bool Kill() const;   // true: the kernel killed every member
  uint64_t OomKills() const;
  bool limited() const { return limited_; }
  void Remove();  // when empty

 private:
  std::string unified_;    // v2 directory
  std::string memory_v1_;  // v1 memory directory
  bool limited_ = false;
};

}  // namespace gtrain::keeper
