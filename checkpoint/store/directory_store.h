// Blobs as files of one directory, which may be shared by several machines (NFS and the like).
#pragma once
#include <memory>
#include <string>

#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// The directory is made by the first put; an absent one reads as empty. InvalidArgument: `root` is empty.
absl::StatusOr<std::unique_ptr<port::BlobStore>> OpenDirectoryStore(const std::string& root);

}  // namespace gtrain::ckpt
