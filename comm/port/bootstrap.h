// Port: how ranks of one generation find each other before they can communicate.
// Adapters: runtime/worker (through keeper, agent and head), comm/fake (threads and forked
// processes of a test). A rank keeps a Member, some hundred bytes, for each of n; an all-gather is a message
// to the head and one of n blobs back, an arena a message each way on this machine and a descriptor, which
// the caller closes. The rest sends at most a message and is independent of n.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "base/unique_fd.h"
#include "comm/port/wakers.h"

namespace gtrain::comm {

struct Member {
  int rank = 0;
  int local_rank = 0;
  NodeId node;          // equal NodeId = same machine = shared memory
  std::string address;  // data-plane IP address of the node
  // Machines are gone through in the order of this, and in that of their lowest ranks where it is equal, so
  // that neighbours hang near each other. The same for all ranks of a node.
  int fabric_order = 0;
};

class Fabric;  // comm/ucx/fabric.h

// Thread-safe. One object a process and generation.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  // The connections of this process, which outlive communicators: made by the first that spans machines, one
  // thread at a time.
  virtual std::shared_ptr<Fabric>& fabric() { return fabric_; }
  // Called when Alive() is no longer OK, by implementations that hear of it; communicators look now and then
  // all the same.
  virtual Wakers& wakers() { return wakers_; }

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual Generation generation() const = 0;
  virtual const std::vector<Member>& members() const = 0;  // index = rank

  // All-gather: every rank of the generation calls it in the same order; returns one blob a rank.
  // Blocks until all have, at most `timeout`. Unavailable: the generation was revoked. n blobs come to each
  // of n ranks, so blobs are small: a communicator's are some hundred bytes.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view blob,
                                                             absl::Duration timeout) = 0;

  // A shared-memory file of `bytes`, the same object (memfd held by the keeper; no name, no limit of
  // /dev/shm) for all ranks of this node and generation that ask for `id`. The first call creates it, with
  // `zeros` bytes of 0 at its start; the rest may be what others, who have unmapped it, have left there.
  // Every rank that called this, with or without success, calls FreeArena(id) when it has closed and
  // unmapped the file.
  virtual absl::StatusOr<UniqueFd> Arena(uint64_t id, uint64_t bytes, uint64_t zeros,
                                         absl::Duration timeout) = 0;
  // Gives the file up. It is freed when all ranks that asked for it have called this or died. Never blocks.
  virtual void FreeArena(uint64_t id) = 0;

  // OK, or Unavailable with the reason once this generation is revoked. Cheap; polled in every wait loop.
  virtual absl::Status Alive() const = 0;

  // Ranks that ended with exit code 0 some time ago while the generation goes on. Cheap, as Alive.
  virtual std::vector<int> Left() const { return {}; }

  // Reports that this rank waits for `rank` and that nothing gets from its machine to that of `rank`; `text`
  // says what was tried. The head may then make a generation without that pair of machines. Repeated every
  // few seconds. Never blocks.
  virtual void ReportLink(int /*rank*/, const std::string& /*text*/) {}

  // Does what Communicator::ReportCompression says.
  virtual void ReportCompression(const std::string& /*text*/) {}

 private:
  std::shared_ptr<Fabric> fabric_;
  Wakers wakers_;
};

}  // namespace gtrain::comm
