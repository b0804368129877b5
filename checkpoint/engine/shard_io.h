// Shard files to storage and back, every byte hashed on the way.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/engine/chunk_share.h"
#include "checkpoint/engine/near.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/port/blob_store.h"

namespace gtrain::ckpt {

// No NaN or infinity among the elements; integer types are always finite.
bool AllFinite(absl::string_view data, DType dtype);

// The manifest's entry for a shard of `plan` whose data is `data`.
ShardFile DescribeShard(const ShardPlan& plan, absl::string_view data,
                        const std::vector<Registered>& registered, int rank, int world_size);
absl::Status WriteShard(port::BlobStore* store, const SaveId& id, const ShardPlan& plan,
                        const std::string& name, absl::string_view data);

// The files [first, last) whose lengths this rank checks. They lie beside each other, so that it needs few
// parts of the manifest.
std::pair<int, int> LengthsOf(const Manifest& manifest, int rank, int world_size);
// Compares the lengths of these files in the storage with the manifest: a missing one is found before any
// work. Several calls are out at a time. Only files that the manifest has (Manifest::Has) are looked at.
// Files that `near` (may be null) holds are not looked for unless a copy turns out to be bad. DataLoss names
// the file that is absent or has another length; an error of the storage comes back as it is, since it says
// nothing about the file.
absl::Status CheckLengths(port::BlobStore* store, const NearShards* near, const Manifest& manifest, int rank,
                          int world_size);

// Calls Want for the chunks that `plan` reads; copies on this machine are as good as shared.
void WantChunks(const Manifest& manifest, const LoadPlan& plan, const NearShards* near, ChunkShare* share);

// Reads the chunks of `plan`, each once, into memory(registered), with several threads, and returns how many
// bytes this rank read. DataLoss names the file that is missing, shorter, or has a chunk with another hash;
// an error of the storage comes back as it is. Other chunks are in memory by then. `alive`, asked between
// chunks by any of the threads, ends the work with its error. Chunks that `near` (may be null) has come from
// there. With `share` (may be null), on which WantChunks and Start were called, chunks come from other ranks
// of this machine too.
absl::StatusOr<uint64_t> LoadShards(port::BlobStore* store, NearShards* near, ChunkShare* share,
                                    const Manifest& manifest, const LoadPlan& plan,
                                    absl::FunctionRef<absl::Status()> alive,
                                    absl::FunctionRef<char*(size_t)> memory);

// Chunk `index` of `file` in `buffer`, compared with its hash. DataLoss names file and bytes.
absl::StatusOr<absl::string_view> ReadChunk(port::BlobStore* store, const SaveId& id, const ShardFile& file,
                                            uint64_t index, std::vector<char>* buffer);

// Reads a whole shard and compares its length and every byte with the hashes.
absl::Status VerifyBytes(port::BlobStore* store, const SaveId& id, const ShardFile& file);
// Verifies the bytes of a shard, and compares its header with the manifest.
absl::Status VerifyShard(port::BlobStore* store, const Manifest& manifest, int rank);

}  // namespace gtrain::ckpt
