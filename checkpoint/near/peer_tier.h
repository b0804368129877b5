// The near tier of another machine (near_server.h), as a rank and its writer see it.
#pragma once
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/port/near_module.h"
#include "checkpoint/port/near_tier.h"

namespace gtrain::ckpt {

// Connects when it is first used. InvalidArgument: no keys.
absl::StatusOr<std::unique_ptr<port::NearTier>> OpenPeerTier(const port::NearPeer& peer,
                                                             const std::string& secret);

}  // namespace gtrain::ckpt
