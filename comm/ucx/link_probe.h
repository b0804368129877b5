// Does anything get from this machine to a peer's? UCX and TCP stay silent for minutes when it does not, and
// a peer that is merely slow looks the same from here. So a rank that waits long tries the way itself (faults
// W5, W14).
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/unique_fd.h"

namespace gtrain::comm {

// One a process, for all its communicators: a descriptor, and at most 64 more while others try, however many
// they are.
//
// Where others try: a TCP port on the data-plane address that takes what comes, looks at none of it and says
// nothing. The kernel acknowledges for it, so the program may compute or stand still meanwhile. Thread-safe,
// nothing blocks.
class LinkTarget {
 public:
  // Where no port can be opened (the address is not this machine's) where() is empty and nobody tries.
  explicit LinkTarget(const std::string& address);
  const std::string& where() const { return where_; }  // "10.0.0.1 40123"
  // Throws away what has come; called now and then.
  void Tidy();

 private:
  std::string where_;
  UniqueFd listener_;
  Mutex mutex_;
  std::vector<UniqueFd> open_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

// One try: a connection and 64 KiB, more than any packet holds, that must be acknowledged. A lost packet is
// not a broken link: connections are begun anew each second, and every acknowledgement buys more time. Not
// thread-safe, nothing blocks.
class LinkProbe {
 public:
  LinkProbe(std::string where, Instant now);
  // Nullopt: not known yet. Empty: it works. Otherwise the text says what was tried and what failed.
  std::optional<std::string> Look(Instant now);

 private:
  void Begin(Instant now);
  void Drop(int error);
  bool Connected();
  void Send();

  const std::string where_;
  UniqueFd fd_;
  Instant begun_at_, deadline_;
  bool connected_ = false;
  size_t sent_ = 0, acknowledged_ = 0;
  std::string refusal_;  // how the newest connection was refused
};

// Tries the ways to those that a wait is for, and reports the ones that do not work, again every few seconds.
// At most 16 of them at a time, a descriptor and 64 KiB each; keeps a line of text for each of n members. Not
// thread-safe, nothing blocks.
class LinkWatch {
 public:
  using Report = std::function<void(int peer, const std::string& symptom)>;
  explicit LinkWatch(Report report) : report_(std::move(report)) {}

  void SetPeer(int peer, std::string where) { where_[peer] = std::move(where); }
  // Every few milliseconds while the wait lasts, which is for all or some of `peers`. Nothing is tried in its
  // first seconds, unless a connection is known to be broken.
  void Waiting(const std::vector<int>& peers, Instant now, bool broken = false);
  void Done();

 private:
  const Report report_;
  std::map<int, std::string> where_;
  std::optional<Instant> try_at_;
  std::map<int, LinkProbe> probes_;
};

}  // namespace gtrain::comm
