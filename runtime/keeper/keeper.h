// The keeper of one job on one machine: parent and subreaper of its ranks. One poll loop; a second thread
// writes the logs.
//
// It decides nothing about the job. It starts what the agent says, watches, keeps logs, arenas and exit
// statuses, and ends everything it started: on command, when the ranks have exited by themselves, or when no
// agent came back within the lease. It outlives agents; whatever an agent missed is repeated to the next one.
//
// This is the loop, the agent's commands, and what ends ranks without an agent. Each part that it drives owns
// its subject: children.h, ranks.h, outputs.h, endings.h, connections.h, arenas.h, rank_socket.h, writers.h,
// helpers.h, consoles.h, asks.h.
#pragma once
#include <poll.h>
#include <stdint.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/core/values/keeper_messages.h"
#include "runtime/keeper/arenas.h"
#include "runtime/keeper/asks.h"
#include "runtime/keeper/children.h"
#include "runtime/keeper/connections.h"
#include "runtime/keeper/consoles.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/endings.h"
#include "runtime/keeper/helpers.h"
#include "runtime/keeper/kept_ranks.h"
#include "runtime/keeper/outputs.h"
#include "runtime/keeper/rank_socket.h"
#include "runtime/keeper/ranks.h"
#include "runtime/keeper/writers.h"

namespace gtrain::keeper {

// Owner thread only; nothing but poll(2) and writes of small files block. A turn costs what is ready, a tick
// (at most ten a second) a look at each rank.
class Keeper {
 public:
  explicit Keeper(KeeperOptions options);
  // Sockets, pid file, subreaper. False: a reason was printed to stderr.
  bool Start();
  // Serves until Quit, the lease with nothing left, or SIGTERM. Returns the exit code.
  int Run();

 private:
  bool PlaceRankSocket();
  bool TakeSignals();
  void Turn();
  void Tick();
  void Sweep(Connections::Which which);
  int WaitMs() const;
  int WaitForOthersMs() const;  // than streams
  bool MoreToDo() const;
  void CollectPollFds();
  void DrainSignals();
  bool IsDone() const;
  void Leave();

  void Handle(Command command);
  void Do(Attach& attach);
  void Do(BeginGeneration& begin);
  void Do(StartRank& start);
  void Do(EndGeneration& end);
  void Do(Relay& relay);
  void Do(AckRelay& ack);
  void Do(AckExit& ack);
  void Do(Notice& notice);
  void Do(SignalRank& signal);
  void Do(Exec& exec) { helpers_.Run(exec); }
  void Do(Forget& forget);
  void Do(Quit& quit);
  void Do(Fence& fence);
  void Do(Console& turn) { consoles_.Take(turn); }
  void Do(Ask& ask) { asks_.Take(ask); }
  State Describe() const;
  void RepeatToNewAgent();

  void CheckLease();
  void CheckFence();
  void Revoke(GenerationRecord& record, const std::string& reason);
  bool DirectoryIsGone() const;
  void LookAfterSockets();
  int64_t IdleExitMs() const;

  Context context_;
  Connections connections_{context_};
  Children children_{context_};
  Outputs outputs_{context_};
  Arenas arenas_{context_};
  Writers writers_{context_, connections_};
  Asks asks_{context_, connections_};
  RankSocket rank_socket_{context_, connections_, arenas_, writers_, asks_};
  Ranks ranks_{context_, children_, outputs_, rank_socket_};
  Helpers helpers_{context_, children_};
  Consoles consoles_{context_, children_};
  KeptRanks kept_{context_, connections_, outputs_, ranks_};
  Endings endings_{context_, children_, connections_, outputs_, ranks_, kept_, arenas_};

  UniqueFd signals_;
  uint64_t lease_ms_ = 0;
  int64_t fence_until_ms_ = 0;  // 0: no fence
  UniqueFd fence_timer_;        // its clock goes on while the machine is suspended
  int64_t last_tick_ms_ = 0;
  int64_t next_look_ms_ = 0;
  bool sockets_missed_ = false;  // when they were looked for last
  uint64_t highest_revoked_ = 0;
  uint64_t highest_stopped_ = 0;
  bool quitting_ = false;
  int64_t quit_by_ms_ = 0;
  std::vector<pollfd> poll_fds_;
};

}  // namespace gtrain::keeper
