#include "runtime/wire/build_version.h"

#include "runtime/core/values/keeper_messages.h"
#include "runtime/core/values/messages.h"

namespace gtrain::wire {

const BuildVersion kThisBuild = {GTRAIN_VERSION, core::kProtocolVersion, keeper::kAgentProtocol};

}  // namespace gtrain::wire
