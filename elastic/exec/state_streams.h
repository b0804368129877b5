// State that travels from rank to rank while both compute: it is only read then. Messages of a communicator,
// which go on beside its collectives.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "comm/exec/async_calls.h"
#include "comm/port/communicator.h"

namespace gtrain::elastic {

// The pieces of some memory in order, none of which reaches from one block into the next: at most 4 MiB each.
std::vector<absl::Span<char>> PiecesOf(absl::Span<const absl::Span<char>> memory);

// Pieces that one rank sends and another receives in the same order, and behind them the hash of all, which
// the receiver compares (XXH3, 128 bits).
struct StateStream {
  Message::Kind kind = Message::Kind::kSend;
  int peer = 0;
  int tag = 0;  // no other message between the two has it
  std::vector<absl::Span<char>> pieces;
};

// Runs all to their end, four pieces of each at a time: what the other rank needs first. Blocks.
// FailedPrecondition: what has come is not what was sent, so it was changed meanwhile.
absl::Status RunStreams(Communicator& comm, absl::Span<const StateStream> streams);

// Streams that run beside the program, group after group. One thread calls. The destructor aborts the
// communicator where a group still runs, for the other side may be gone.
class StreamsBeside {
 public:
  explicit StreamsBeside(std::shared_ptr<Communicator> comm);
  ~StreamsBeside();

  // The memory stays as it is until Wait. `then` is called by the thread of the streams, when all has come.
  absl::Status Start(std::vector<StateStream> streams, std::function<void()> then = {});
  // Waits until all that was started is done, and returns the first error of any. No piece may take longer
  // than a call of the communicator.
  absl::Status Wait();

 private:
  const std::shared_ptr<Communicator> comm_;
  std::vector<AsyncCall> running_;
  AsyncCalls calls_;
};

}  // namespace gtrain::elastic
