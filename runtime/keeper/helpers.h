// Programs that run once beside a rank, with bounded output and time (gtrain exec).
//
// Owner thread only; nothing blocks. There are at most 16 of them.
#pragma once
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/keeper/children.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/spawn.h"

namespace gtrain::keeper {

class Helpers final : public ChildOwner {
 public:
  Helpers(Context& context, Children& children) : context_(context), children_(children) {}

  // The agent gets ExecDone when the program has ended, or the reason why it cannot run.
  void Run(Exec& exec);
  // Takes their output, and kills those that run for too long.
  void Pump();
  bool empty() const { return helpers_.empty(); }
  void AddFds(std::vector<pollfd>* fds) const;

  bool OnDied(const siginfo_t& info) override;
  std::optional<uint64_t> GenerationOf(pid_t child) override;

 private:
  struct Helper {
    uint64_t id = 0;
    uint64_t generation = 0;
    std::vector<std::string> argv;
    pid_t pid = -1;
    bool apart = false;  // Exec::apart: else stderr is in `output`, too
    UniqueFd output_fd, err_fd;
    std::string output, err;
    uint64_t left_out = 0;  // bytes beyond what is kept of each
    int64_t limit_ms = 0;
    int64_t deadline_ms = 0;
    bool timed_out = false;
  };
  void OnStarted(uint64_t id, const SpawnResult& result);
  void OnStarterDied(uint64_t id);
  void Pump(Helper& helper);
  void TellDone(Helper& helper, int code, int status);

  Context& context_;
  Children& children_;
  std::vector<std::unique_ptr<Helper>> helpers_;
};

}  // namespace gtrain::keeper
