// What a rank is in one generation: its number, the others, and how they find each other. A process that goes
// on in another generation (`elastic.mode: in-place`) has a membership after the other.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "comm/port/bootstrap.h"
#include "runtime/worker/rank_environment.h"

namespace gtrain::worker {

class KeeperLink;

// Thread-safe. The link owns the newest, communicators own theirs: to one whose membership is over every call
// says so, whatever the link does since. Costs what the members file holds, some hundred bytes a rank.
class Membership final : public comm::Bootstrap {
 public:
  // `link` outlives it.
  Membership(KeeperLink* link, RankEnvironment environment) : link_(link), env_(std::move(environment)) {}

  // Reads the members file, once: a rank that makes no communicator needs none. Before members() is used.
  absl::Status ReadMembers();
  const RankEnvironment& environment() const { return env_; }

  // comm::Bootstrap
  std::shared_ptr<comm::Fabric>& fabric() override;
  comm::Wakers& wakers() override;
  int rank() const override { return env_.rank; }
  int world_size() const override { return env_.world_size; }
  Generation generation() const override { return Generation{env_.generation}; }
  const std::vector<comm::Member>& members() const override { return members_; }
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view blob, absl::Duration timeout) override;
  absl::StatusOr<UniqueFd> Arena(uint64_t id, uint64_t bytes, uint64_t zeros,
                                 absl::Duration timeout) override;
  void FreeArena(uint64_t id) override;
  absl::Status Alive() const override;
  std::vector<int> Left() const override;
  void ReportLink(int peer, const std::string& text) override;
  void ReportCompression(const std::string& text) override;

  // The link says this once: why it is over.
  void End(const std::string& reason);

 private:
  KeeperLink* const link_;
  const RankEnvironment env_;
  Mutex members_mutex_;
  std::vector<comm::Member> members_;  // set once under members_mutex_, then only read
  std::string reason_;                 // set once, before over_
  std::atomic<bool> over_{false};
};

}  // namespace gtrain::worker
