// Questions of people to the processes of ranks (`gtrain actors`), which the keeper passes on and does not
// read. A process that does not answer, because it was stopped, say, is named when its time is over.
//
// Owner thread only; nothing blocks. At most kAsksMax are open, with an answer of kAnswerMax bytes each.
#pragma once
#include <stdint.h>

#include <string>
#include <vector>

#include "runtime/keeper/connections.h"
#include "runtime/keeper/context.h"

namespace gtrain::keeper {

class Asks {
 public:
  Asks(Context& context, Connections& connections) : context_(context), connections_(connections) {}

  // The agent gets ExecDone with the answer, or why there is none.
  void Take(Ask& ask);
  void OnAnswer(RankConnection& connection, uint64_t id, std::string text);
  // Answers those whose time is over, or whose rank is gone.
  void Expire();
  bool empty() const { return open_.empty(); }

 private:
  struct Open {
    uint64_t id = 0;
    uint64_t generation = 0;
    int rank = 0;
    uint64_t number = 0;  // of the question, by which its answer is known
    int64_t limit_ms = 0;
    int64_t deadline_ms = 0;
  };
  void Refuse(const Open& open, const std::string& why);

  Context& context_;
  Connections& connections_;
  uint64_t last_ = 0;
  std::vector<Open> open_;
};

}  // namespace gtrain::keeper
