// Bootstrap for tests: ranks are threads of one process or forked processes. Meets through files in a
// temporary directory and one shared page made before the fork.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/port/bootstrap.h"

namespace gtrain::comm {

// For one run: bootstraps that are made anew would find what those before had put.
class FakeWorld {
 public:
  // node_of_rank[r]: name of the machine that rank r pretends to be on. addresses[r]: its data-plane address,
  // loopback if there are none.
  explicit FakeWorld(const std::vector<std::string>& node_of_rank,
                     const std::vector<std::string>& addresses = {});
  ~FakeWorld();  // of the process that made it only: removes the directory

  static std::vector<std::string> OneNode(int ranks);

  // The Bootstrap of one rank; also in a child forked after the world was made. The world must outlive it.
  std::unique_ptr<Bootstrap> Rank(int rank);
  // From now on Alive() of every rank is Unavailable(reason).
  void Revoke(const std::string& reason);
  // If true, Revoke wakes sleeping ranks at once, by a thread of each rank.
  bool wakes = false;
  // Member::fabric_order of each rank. Before any of them starts.
  void SetFabricOrder(const std::vector<int>& of_rank);
  // From now on `rank` is among Left() of every rank.
  void Leave(int rank);
  // Called by Arena() of each rank, which returns its error. For ranks that are threads; set before they
  // start.
  std::function<absl::Status(int rank)> before_arena;
  // The first ReportLink of each rank: "1 cannot reach 2: ...", in the order of ranks.
  std::vector<std::string> LinkReports() const;
  // The last ReportCompression of any rank, when all are over.
  std::string Compression() const;
  // The bytes of all arenas that are not free.
  uint64_t ArenaBytes() const;
  int size() const { return static_cast<int>(members_.size()); }

 private:
  friend class FakeBootstrap;
  struct Shared;

  std::vector<Member> members_;
  std::string directory_;
  Shared* shared_;
  int owner_;
};

}  // namespace gtrain::comm
