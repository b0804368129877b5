// The entry of a store that is loaded on demand: libgtrain_s3.so. Built together with its loader; the number
// catches a stray library.
#pragma once
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::port {

inline constexpr uint32_t kStoreModuleAbi = 5;
inline constexpr char kStoreModuleEntry[] = "gtrain_store_module";

struct StoreModule {
  uint32_t abi = kStoreModuleAbi;
  // Reads the process's environment for keys and endpoint.
  absl::StatusOr<std::unique_ptr<BlobStore>> (*open)(absl::string_view uri) = nullptr;
};

}  // namespace gtrain::port
