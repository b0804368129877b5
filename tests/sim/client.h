// People and scripts: submit, stop, look. A request is repeated under its id as `gtrain` does it; now and
// then a client is killed in the middle.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/core/values/request_pacer.h"
#include "tests/sim/checker.h"
#include "tests/sim/network.h"

namespace gtrain::sim {

class Client {
 public:
  // `machine`: a number no other has. `done` gets each answer, or nullopt when the time was up.
  Client(Kernel& kernel, Network& network, Checker& checker, int machine, std::string key);

  using Done = std::function<void(const std::optional<core::ClientReply>&)>;
  void Ask(core::ClientRequestBody body, int64_t timeout, Done done);
  // Sends the same request again, like a person whose client was killed before the answer came.
  void AskAgain(int64_t timeout, Done done);
  void Kill();
  bool busy() const { return pacer_.has_value(); }
  int machine() const { return machine_; }

 private:
  void Begin(int64_t timeout, Done done);
  void Turn();
  void Connect();

  Kernel& kernel_;
  Network& network_;
  Checker& checker_;
  const int machine_;
  const std::string key_;
  uint64_t life_ = 0, asked_ = 0;
  std::shared_ptr<Connection> connection_;
  core::ClientRequest request_;
  std::optional<core::RequestPacer> pacer_;
  Done done_;
};

}  // namespace gtrain::sim
