// What the members of a new generation tell each other when they meet, before they agree on a step. PURE.
#pragma once
#include <array>
#include <cstdint>
#include <optional>

#include "elastic/plan/agree.h"
#include "elastic/plan/hand_over.h"

namespace gtrain::elastic {

// Hashes of what ranks must have alike (elastic/exec/likeness.h).
struct LikenessHashes {
  uint64_t program = 0, gradients = 0, machine = 0;
  bool operator==(const LikenessHashes&) const = default;
};

struct Greeting {
  // A save that this member knows of: the step it is of, and how long ago it began.
  struct Save {
    int64_t step = 0, milliseconds_ago = 0;
    bool operator==(const Save&) const = default;
  };
  MemberState state;          // at most two copies
  BatchShare computed;        // the share of a batch whose gradients it holds unchanged
  std::optional<Save> save;   // the newest
  int machine = 0;            // Communicator::machine
  bool stop = false;          // it has agreed to stop
  bool carries_over = false;  // it has what compression carries over
  LikenessHashes likeness;
  bool operator==(const Greeting&) const = default;
};

// Read by the same build of the library, which communicators see to.
using GreetingWords = std::array<int64_t, 19>;
GreetingWords WriteGreeting(const Greeting& greeting);
Greeting ReadGreeting(const GreetingWords& words);

}  // namespace gtrain::elastic
