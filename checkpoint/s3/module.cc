// The entry of libgtrain_s3.so.
#include <cstdlib>

#include "checkpoint/port/store_module.h"
#include "checkpoint/s3/s3_store.h"

extern "C" __attribute__((visibility("default"))) const gtrain::port::StoreModule* gtrain_store_module() {
  static const gtrain::port::StoreModule module = {
      gtrain::port::kStoreModuleAbi, [](absl::string_view uri) {
        return gtrain::ckpt::OpenS3Store(uri, [](const char* name) -> std::optional<std::string> {
          const char* value = std::getenv(name);
          if (value == nullptr) return std::nullopt;
          return value;
        });
      }};
  return &module;
}
