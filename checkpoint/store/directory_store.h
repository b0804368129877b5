// Blobs as files of one directory, which may be shared by several machines (NFS and the like).
#pragma once
#include <memory>
#include <string>

#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// Makes the directory. InvalidArgument: `root` is empty; others from the file system, with the path.
absl::StatusOr<std::unique_ptr<port::BlobStore>> OpenDirectoryStore(const std::string& root);

}  // namespace gtrain::ckpt
