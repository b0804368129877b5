#include "runtime/core/agent/tails.h"

namespace gtrain::core {
namespace {

constexpr size_t kTailMax = 64 << 10;

}  // namespace

void Tails::Append(AgentTail& tail, const keeper::Output& output) {
  tail.text += output.bytes;
  if (tail.text.size() > kTailMax) tail.text.erase(0, tail.text.size() - kTailMax);
  tail.end_offset = output.end_offset;
  tail.unsent += output.bytes.size();
  tail.changed = true;
}

void Tails::MirrorTails() {
  if (!context_.welcomed()) return;
  for (auto& [job, record] : model_.jobs) {
    for (auto& [number, generation] : record.generations) {
      for (auto& [rank, info] : generation.ranks) {
        for (bool is_stderr : {false, true}) {
          AgentTail& tail = is_stderr ? info.err : info.out;
          if (!tail.changed || tail.text.empty()) continue;
          tail.changed = false;
          // A rank of much output has written all of its tail anew by then.
          if (!joins_pieces_ || tail.unsent >= tail.text.size()) tail.next_piece = 0;
          context_.Tell(
              LogTail{job, number, rank, is_stderr, tail.end_offset,
                      tail.next_piece == 0 ? tail.text : tail.text.substr(tail.text.size() - tail.unsent),
                      tail.next_piece++});
          tail.unsent = 0;
        }
      }
    }
  }
}

}  // namespace gtrain::core
