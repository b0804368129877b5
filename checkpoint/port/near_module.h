// The entry of libgtrain_near.so, which reaches the near tiers of other machines and is loaded on demand.
// Built together with its loader; the number catches a stray library.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/port/near_tier.h"

namespace gtrain::port {

inline constexpr uint32_t kNearModuleAbi = 2;
inline constexpr char kNearModuleEntry[] = "gtrain_near_module";

struct NearPeer {
  std::string name;        // for people
  std::string endpoint;    // "host:port"
  std::string public_key;  // Z85; anyone else at that address is refused
};

struct NearModule {
  uint32_t abi = kNearModuleAbi;
  // `secret`: of the job, 64 hex digits. Connects when it is first used.
  absl::StatusOr<std::unique_ptr<NearTier>> (*open)(const NearPeer& peer,
                                                    const std::string& secret) = nullptr;
};

}  // namespace gtrain::port
