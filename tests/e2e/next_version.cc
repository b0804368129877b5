// Makes of the program gtrain one of a later version: linked in place of runtime/wire/build_version.cc.
// GTRAIN_TEST_VERSIONS_AHEAD says how many (1); all numbers are that much higher.
#include <cstdlib>
#include <string>

#include "runtime/core/values/keeper_messages.h"
#include "runtime/core/values/messages.h"
#include "runtime/wire/build_version.h"

namespace gtrain::wire {
namespace {

BuildVersion Later() {
  const char* said = std::getenv("GTRAIN_TEST_VERSIONS_AHEAD");
  const int ahead = said == nullptr ? 1 : std::atoi(said);
  static const std::string text = "next+" + std::to_string(ahead);
  return {text.c_str(), core::kProtocolVersion + ahead,
          keeper::kAgentProtocol + static_cast<uint32_t>(ahead)};
}

}  // namespace

const BuildVersion kThisBuild = Later();

}  // namespace gtrain::wire
