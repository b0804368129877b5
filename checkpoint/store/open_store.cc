#include "checkpoint/store/open_store.h"

#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/module.h"
#include "base/path.h"
#include "base/status_macros.h"
#include "checkpoint/port/store_module.h"
#include "checkpoint/store/directory_store.h"

namespace gtrain::ckpt {
namespace {

absl::StatusOr<const port::StoreModule*> Load() {
  return LoadModuleTable<port::StoreModule>("libgtrain_s3.so", "GTRAIN_S3_MODULE",
                                            "checkpoints in s3:// need", port::kStoreModuleEntry,
                                            port::kStoreModuleAbi);
}

}  // namespace

absl::StatusOr<std::string> ParseLocation(absl::string_view uri) {
  absl::string_view path = uri;
  if (absl::ConsumePrefix(&path, "file://")) {
    if (!absl::StartsWith(path, "/")) {
      return absl::InvalidArgumentError(absl::StrCat(uri, ": write file:///path"));
    }
  } else if (!absl::StartsWith(uri, "s3://") && absl::StartsWith(uri, "s3:/")) {
    return absl::InvalidArgumentError(absl::StrCat(uri, ": write s3://bucket/prefix, with two slashes, or ./",
                                                   uri, " for a directory of that name"));
  } else if ((absl::StrContains(uri, "://") || !UriScheme(uri).empty()) && !absl::StartsWith(uri, "s3://")) {
    return absl::InvalidArgumentError(
        absl::StrCat(uri, ": checkpoints are in a directory that all ranks see, or in s3://bucket/prefix"));
  }
  while (path.size() > 1 && path.back() == '/' && !absl::EndsWith(path, "://")) path.remove_suffix(1);
  return std::string(path);
}

bool SamePlace(const std::string& a, const std::string& b) {
  std::error_code error;
  return a == b || std::filesystem::equivalent(a, b, error);
}

absl::StatusOr<std::unique_ptr<port::BlobStore>> OpenStore(const std::string& location) {
  if (!absl::StartsWith(location, "s3://")) return OpenDirectoryStore(location);
  static const auto* loaded = new absl::StatusOr<const port::StoreModule*>(Load());
  GT_RETURN_IF_ERROR(loaded->status());
  return (**loaded)->open(location);
}

}  // namespace gtrain::ckpt
