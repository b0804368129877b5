// The version of this program and of its protocols. One object that nothing else shares, so that a test can
// link a program of another version by bringing its own (tests/e2e/next_version.cc).
#pragma once
#include <cstdint>

namespace gtrain::wire {

struct BuildVersion {
  const char* text;          // of gtrain, for people
  int protocol;              // between agent and head: core::kProtocolVersion
  uint32_t keeper_protocol;  // between agent and keeper: keeper::kAgentProtocol
};

extern const BuildVersion kThisBuild;

}  // namespace gtrain::wire
