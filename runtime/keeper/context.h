// The few things that all parts of one keeper share. The keeper owns it and each part holds a reference; no
// part reaches another one through it. Owner thread only.
#pragma once
#include <stdint.h>

#include <string>
#include <utility>

#include "runtime/keeper/agent_link.h"
#include "runtime/keeper/generations.h"
#include "runtime/keeper/log_stream.h"

namespace gtrain::keeper {

struct KeeperOptions {
  std::string dir;  // 0700, exists, made by the agent
  std::string job;
  LogLimits log_limits;
  int64_t idle_exit_ms = 3600 * 1000;        // nothing runs and no agent came for this long
  int64_t longest_wait_ms = 15 * 60 * 1000;  // of a process for another generation
  int64_t stopped_exit_ms =
      10 * 1000;  // the same, when all it held was stopped: nobody will ask how it ended
};

// Of what is ended when nobody is there to say how much there is.
inline constexpr int64_t kEndingGraceMs = 5000;

struct Context {
  explicit Context(KeeperOptions given) : options(std::move(given)) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const KeeperOptions options;
  std::string rank_socket;   // the path that ranks connect to
  int64_t now_ms = 0;        // of this turn of the loop
  bool tick_wanted = false;  // something happened, or waits for its time: a keeper else sleeps
  AgentLink agent;
  Generations generations;
};

}  // namespace gtrain::keeper
