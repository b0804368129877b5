// Writers of checkpoints. A rank asks for one with the bytes it needs; it gets a memfd and a socket, and a
// process of our own program gtrain-writer gets the other ends. The keeper understands nothing of what they
// do. It keeps the memfd and the writer's end of the socket: a writer that is killed is replaced by another
// that finds everything as it was, whether or not the rank still lives. A writer ends by itself when its rank
// is gone and its work done.
//
// Owner thread only; nothing blocks. A turn looks at each writer, which are as many as ranks that save.
#pragma once
#include <signal.h>
#include <stdint.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/keeper/children.h"
#include "runtime/keeper/connections.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::keeper {

class Writers final : public ChildOwner {
 public:
  Writers(Context& context, Connections& connections);

  // The rank gets its writer from StartWanted, or at once the reason why not.
  void Ask(RankConnection& connection, const RankArenaRequest& request);
  // Starts those that were asked for, once no earlier generation holds memory, and anew those that were
  // killed.
  void StartWanted();
  bool AnyWanted() const { return !wanted_.empty(); }
  bool empty() const { return writers_.empty(); }
  // Kills those that are still there.
  void End();
  // One that was killed waits to be started anew.
  bool MoreToDo() const;

  bool OnDied(const siginfo_t& info) override;
  std::optional<uint64_t> GenerationOf(pid_t child) override;

 private:
  // It belongs to no generation, so that what ends the rank does not end its saves. Both ends of what it
  // works on are held for the next one, should it be killed.
  struct Process {
    uint64_t generation = 0;
    int rank = -1;
    std::vector<std::pair<std::string, std::string>> env;  // the rank's
    std::string cwd;
    UniqueFd memfd;
    UniqueFd channel;  // the writer's end
    pid_t pid = -1;    // not running: killed, and started again at restart_at_ms
    int kills = 0;
    int64_t restart_at_ms = 0;
  };
  // A rank that waits for its writer.
  struct Wanted {
    uint64_t generation = 0;
    int rank = -1;
    RankArenaRequest request{};
  };
  void Start(RankConnection& connection, const RankProcess& rank, const RankArenaRequest& request);
  pid_t Spawn(const Process& writer) const;
  bool MemoryHeldBefore(uint64_t generation) const;

  Context& context_;
  Connections& connections_;
  const std::string program_;
  std::vector<Process> writers_;
  std::vector<Wanted> wanted_;
};

}  // namespace gtrain::keeper
