// Nodes that ask to be let in with a join token, until the store thread has time for them. Joins have a queue
// of their own so that however many come, commits, key changes and their answers do not wait behind them. Not
// thread-safe: the head's loop owns it; nothing blocks.
//
// When n nodes join at once each costs one message, some 300 bytes here, and 1/kBatchMax of three syncs of
// the disk. A join that finds no room is dropped and counted: a node asks again every four seconds for half a
// minute.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/rate_limit.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

class JoinQueue {
 public:
  static constexpr size_t kBatchMax = 128;      // in one transaction of the store thread
  static constexpr size_t kWaitingMax = 8'192;  // of all tokens
  static constexpr size_t kWaitingOfToken = 2'560;
  // The rate for one address with one token: so many at once, and then so many a second.
  static constexpr int kBurst = 4'096, kPerSecond = 512;

  struct One {
    std::string route, address, token;  // token: the key id of who asks
    AgentJoin join;
  };

  // False: dropped. One that waits or is being dealt with already takes over the route: its node asked again.
  bool Add(One one, Instant now);
  // The next batch, tokens in turn; empty while one is being dealt with.
  std::vector<One> Take();
  // It is: the routes where answers go now, in the order of the batch.
  std::vector<std::string> Done();
  uint64_t dropped() const { return dropped_; }

 private:
  using Id = std::pair<std::string, std::string>;  // token, public key
  bool WithinRate(const One& one, Instant now);

  std::map<std::string, std::deque<One>> waiting_;  // by token
  std::map<Id, One*> known_;                        // those that wait, and the batch
  std::vector<One> batch_;
  std::string last_;                                                // the token whose turn it was
  size_t count_ = 0;                                                // that wait
  std::map<std::pair<std::string, std::string>, RateLimit> rates_;  // by address and token
  uint64_t dropped_ = 0;
};

}  // namespace gtrain::core
