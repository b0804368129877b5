// The entry of libgtrain_near.so.
#include "checkpoint/near/peer_tier.h"
#include "checkpoint/port/near_module.h"

extern "C" __attribute__((visibility("default"))) const gtrain::port::NearModule* gtrain_near_module() {
  static const gtrain::port::NearModule module = {gtrain::port::kNearModuleAbi, &gtrain::ckpt::OpenPeerTier};
  return &module;
}
