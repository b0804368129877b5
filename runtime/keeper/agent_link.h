// The keeper's connection with its agent: one socket to be found by, at most one agent at a time, the newest.
//
// Frames to the agent are appended to one buffer; a slow agent costs memory, and one that is too far behind
// is dropped: it will attach again. Owner thread only; nothing blocks. Telling costs the bytes of the report.
#pragma once
#include <poll.h>
#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/core/values/keeper_messages.h"

namespace gtrain::keeper {

class AgentLink {
 public:
  static constexpr char kSocket[] = "agent.sock";  // in the working directory

  // Makes the socket, anew if it was removed. False: a reason was printed to stderr.
  bool Listen();
  // Removes the socket: nobody finds this keeper any more.
  void Unlisten();

  void Accept(int64_t now_ms);
  // Hands every whole command to `handle`, which may drop the agent.
  void Read(int64_t now_ms, const std::function<void(Command)>& handle);
  void Write(int64_t now_ms);
  void Drop(int64_t now_ms);
  // Nothing happens while no agent has attached: what must not be lost is kept by its owner and told again.
  void Tell(Report report);
  // True while so much waits to be sent that output and reports, which lie in files anyway, are better sent
  // later.
  bool IsBehind() const { return out_.size() > kOutSoft; }

  // An agent is connected and has said Attach.
  bool attached() const { return attached_; }
  void set_attached(bool attached) { attached_ = attached; }
  bool connected() const { return agent_.valid(); }
  // The time when an agent that had attached was last there.
  int64_t seen_ms() const { return seen_ms_; }
  void set_seen_ms(int64_t now_ms) { seen_ms_ = now_ms; }
  void AddFds(std::vector<pollfd>* fds) const;

 private:
  static constexpr size_t kOutSoft = 1u << 20;

  UniqueFd listen_, agent_;
  std::string in_, out_;
  bool attached_ = false;
  bool refused_ = false;  // said once: who asks often fills no disk with it
  int64_t seen_ms_ = 0;
};

}  // namespace gtrain::keeper
