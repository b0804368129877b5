// Which events of a job are news. One fault makes several events with the same words: the fault itself, the
// end of its generation, the change of state, and at last the verdict; people need the first and the last.
#pragma once
#include <string>

#include "launcher/cli/status_doc.h"

namespace gtrain::cli {

// Pure; not thread-safe. Events go in one by one, in order.
class News {
 public:
  // False for what the lines before have already said, and for checkpoints: one every few seconds is
  // progress.
  bool Worth(const EventDoc& event);

 private:
  std::string reason_;  // why the generation ends, as said last
};

}  // namespace gtrain::cli
