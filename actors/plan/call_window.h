// CallWindow numbers the calls of one process to one actor, and knows which are to be sent again. PURE. The
// other end is a CallLedger, which has the protocol.
//
// A call stays in the window until it is answered, also when its caller has given it up: then it is sent as
// one that is not to run, so that those behind it have their turn. What becomes of the calls
// to an actor that is made anew elsewhere: those that were never sent go there; with their numbers, all of
// them, where its state and its ledger are kept.
//
// Not thread-safe. Cost: O(log w) a call, O(w) when all are sent again; w is at most kCallsInWindow.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "actors/plan/call_ledger.h"

namespace gtrain::actors {

struct CallToSend {
  uint64_t number = 0;
  uint64_t acknowledged = 0;
  bool given_up = false;  // it is not to run where it has not
  std::string arguments;
};

class CallWindow {
 public:
  // `last`: the number that was given last, when there was a window before and all of it was answered.
  explicit CallWindow(uint64_t last = 0) : last_(last), unsent_(last + 1) {}

  // No number: the window is full.
  std::optional<uint64_t> Add(std::string arguments);
  // What is to be sent next on this connection, the oldest first; none: nothing is, or `in_flight` calls of
  // the ones that were sent have no answer yet.
  std::optional<CallToSend> Next(uint64_t in_flight = kCallsInWindow);
  // All are sent again: the connection is a new one. Or those from a number on: the other end has said that
  // it has not admitted them.
  void SendAgain(uint64_t from = 1);
  // True: it was awaited, and is answered now. Otherwise it is an answer that came before.
  bool Answered(uint64_t number);
  // Its caller waits no more. False: it has been answered.
  bool GiveUp(uint64_t number);

  bool EverSent(uint64_t number) const;
  // Of a call that goes elsewhere.
  std::string TakeArguments(uint64_t number);
  size_t size() const { return calls_.size(); }
  uint64_t last() const { return last_; }
  bool full() const { return last_ - acknowledged() >= kCallsInWindow; }

 private:
  struct Waiting {
    std::string arguments;
    bool ever_sent = false;
    bool given_up = false;
  };
  uint64_t acknowledged() const { return calls_.empty() ? last_ : calls_.begin()->first - 1; }

  std::map<uint64_t, Waiting> calls_;  // by number
  uint64_t last_;                      // that was given
  uint64_t unsent_;                    // from here on, on this connection
};

}  // namespace gtrain::actors
