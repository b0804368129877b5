// The processes of the local cluster look after each other, without any client: each looks twice a second
// whether the two others hold their locks, and starts again what died, under start.lock, so that nothing is
// started twice. Any one that is left brings back the rest. Why three: a head and an agent that die in the
// same moment would leave nobody, so `gtrain local-watch` does nothing else than this.
//
// endpoint.json says whether the cluster is wanted: a head that ends in order removes it first, and then
// nobody starts anything. A daemon that does not stay up is tried again after 1 s, then after up to a
// minute.
#pragma once
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "launcher/exec/local_daemons.h"

namespace gtrain::exec {

// A thread of the head or the agent that looks after the others, from construction to destruction. It ends
// its own process, as SIGTERM would, when there is no place for it any more: its state directory was removed,
// or the head is back at another address than this agent's `head_endpoint`.
class LocalWatch {
 public:
  static LocalWatch OfHead(const std::string& dir);
  static LocalWatch OfAgent(const std::string& dir, const std::string& head_endpoint);

 private:
  explicit LocalWatch(std::jthread thread) : thread_(std::move(thread)) {}
  std::jthread thread_;
};

// Runs the process `gtrain local-watch`, until the cluster ended or cannot be brought back.
absl::Status RunLocalWatch(const std::string& dir);

}  // namespace gtrain::exec
