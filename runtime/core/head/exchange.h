// Exchange: the all-gather of bootstrap blobs that a communicator's ranks start with. PURE.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// Open and recent exchanges of one generation. In memory only: after a head restart the agents
// send their unanswered parts again, and a part that was already counted changes nothing.
// Loop-owned, not thread-safe.
class Exchange {
 public:
  static constexpr size_t kOpenMax = 64;
  static constexpr size_t kDoneKept = 64;
  // A table goes to each agent as one message of at most 16 MiB; a larger one would be repeated for ever.
  static constexpr size_t kTableBytesMax = 15 << 20;

  Exchange(int world, size_t bytes_max) : world_(world), bytes_max_(bytes_max) {}

  struct Progress {
    const std::vector<std::string>* table = nullptr;  // complete: index = rank; valid until the next call
    bool just_completed = false;  // false with a table: a repeated part, answer its sender only
    bool repeated = false;        // nothing of the part was new
  };
  // InvalidArgument: a rank outside the world, or a different blob for a rank that already spoke.
  // ResourceExhausted: more open bytes or exchanges than allowed.
  absl::StatusOr<Progress> Add(const ExchangePart& part);
  // Ranks that have not spoken in an open exchange, ascending.
  std::vector<int> Missing(uint64_t sequence) const;

 private:
  struct Open {
    std::map<int, std::string> blobs;
    size_t bytes = 0;  // of them
  };
  struct Done {
    uint64_t sequence = 0;
    std::vector<std::string> table;
  };
  const int world_;
  const size_t bytes_max_;
  size_t bytes_ = 0;  // of open and done
  std::map<uint64_t, Open> open_;
  std::deque<Done> done_;
};

}  // namespace gtrain::core
