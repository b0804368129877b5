// The manifest: the one file whose existence makes a checkpoint exist, and the smaller files around it.
// Bytes: docs/formats/checkpoint.md. Values only; readers accept nothing that a writer here would not
// produce.
#pragma once
#include <gtrain/types.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/names.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/tensor.h"

namespace gtrain::ckpt {

inline constexpr size_t kManifestBytesMax = 64 << 20;
inline constexpr size_t kSmallFileBytesMax = 64 << 10;  // owner claims, abort markers
inline constexpr size_t kShardsMax = 1'000'000;
inline constexpr uint64_t kFileBytesMax = uint64_t{1} << 50;
inline constexpr size_t kIdentityBytesMax = 256;  // cluster, job, job hash
inline constexpr uint64_t kChunkBytes = 4 << 20;
// The sum of the ranks of all lists of boxes, about 60 bytes each: room for 61 lists of 8,192 ranks.
inline constexpr size_t kBoxRanksMax = 500'000;

inline constexpr size_t kPartBytesMax = 64 << 20;        // the text of a part
inline constexpr size_t kFilesInRootBytesMax = 1 << 20;  // a root with more than that names parts instead

inline constexpr int kManifestVersion = 3;  // written; 1 and 2 are read as well

// Version 1 says of each file which bytes of a tensor it holds, and where: the tensor's bytes [begin, begin +
// bytes) lie in the file at [file_begin, file_begin + bytes). Since version 2 that is computed (shares.h).
struct Slice {
  std::string tensor;
  uint64_t begin = 0;
  uint64_t bytes = 0;
  uint64_t file_begin = 0;
  bool operator==(const Slice&) const = default;
};

// State that another rank of an earlier, larger world saved, carried along by rank `rank` modulo world size.
struct KeptBlob {
  uint64_t blob = 0;  // which of the kPerRank tensors
  int rank = 0;       // its rank when saved; this world lacks it
  uint64_t bytes = 0;
  auto operator<=>(const KeptBlob&) const = default;
};

struct ShardFile {
  std::string name;  // ShardName(rank, world_size)
  uint64_t bytes = 0;
  std::string xxh3;                 // of the whole file; versions 1 and 2, empty since
  std::vector<std::string> chunks;  // of each kChunkBytes of it, the last one shorter
  bool finite = true;               // no NaN or infinity in its floating-point tensors
  uint64_t data_begin = 0;          // where the header ends; since version 2
  std::vector<uint64_t> per_rank;   // bytes of each kPerRank tensor, in their order; since version 2
  std::vector<KeptBlob> kept;       // ascending; after per_rank in the data; since version 3
  std::vector<Slice> slices;        // version 1
  bool operator==(const ShardFile&) const = default;
};

struct Identity {
  std::string cluster;
  std::string job;
  std::string job_hash;
  bool operator==(const Identity&) const = default;
};

// The root's description of one part: enough to refuse any other text under its key, and to answer questions
// about whole checkpoints without reading parts.
struct PartRef {
  uint64_t bytes = 0;       // of its text
  std::string xxh3;         // of its text
  bool finite = true;       // all its files are
  uint64_t file_bytes = 0;  // of all its files
  uint64_t chunks = 0;      // of all its files
  uint64_t kept = 0;        // how many KeptBlobs all its files have
  bool operator==(const PartRef&) const = default;
};

// With up to kPartRanks ranks the files stand in the root, as long as that is below kFilesInRootBytesMax;
// else they stand in parts, which were put before it.
struct Manifest {
  int version = kManifestVersion;
  SaveId id;
  Identity owner;
  int world_size = 1;
  std::vector<GlobalTensor> tensors;
  std::vector<ShardFile> files;  // one a rank, in rank order; without a name where a part was not added
  std::vector<PartRef> parts;    // since version 3; empty: every file is there
  bool finite() const;
  uint64_t file_bytes() const;   // of all files
  uint64_t chunk_count() const;  // of all files
  // The number of chunks in the files of ranks before `rank`, whose own file is here.
  uint64_t ChunksBefore(int rank) const;
  // Whether the file of `rank` is described here; AddParts adds what is missing.
  bool Has(int rank) const { return !files[static_cast<size_t>(rank)].name.empty(); }
  bool operator==(const Manifest&) const = default;
};

// Stands under a manifest's key instead of the manifest: "this attempt will never be committed".
struct AbortMarker {
  SaveId id;
  std::string reason;
  bool operator==(const AbortMarker&) const = default;
};

// The files of the ranks [part * kPartRanks, ...), or why there are none.
struct ManifestPart {
  SaveId id;
  int world_size = 1;
  int part = 0;
  std::string error;     // empty: `files` are written, in rank order
  std::string verified;  // the oldest of its members' (ShardIndex); empty where one is empty
  std::vector<ShardFile> files;
  bool operator==(const ManifestPart&) const = default;
};

// The file that a rank leaves beside its shard for the first rank of its part: it describes the shard, or why
// there is none.
struct ShardIndex {
  SaveId id;
  int rank = 0;
  int world_size = 1;
  std::string error;  // empty: `file` is written
  ShardFile file;
  // AttemptName of the newest save whose shard this rank has read back and found intact; empty: none yet.
  std::string verified;
  bool operator==(const ShardIndex&) const = default;
};

struct OwnerClaim {
  uint64_t epoch = 1;
  Identity owner;
  bool operator==(const OwnerClaim&) const = default;
};

// Whether a manifest is whole and consistent: a file for each rank with the derived name, chunks that match
// the lengths, every byte of every tensor in exactly one file. DataLoss with the first fault. A manifest with
// parts is checked as far as the files are there.
absl::Status Validate(const Manifest& manifest);
// The checks of Validate that need one file of `world_size` alone.
absl::Status ValidateFile(const ShardFile& file, int rank, int world_size, int version = kManifestVersion);
// Checks the files of ranks `first_rank` and on in the same way, and that each has the length that follows
// from the tensors (since version 2).
absl::Status ValidateFiles(const std::vector<GlobalTensor>& tensors, int world_size, int first_rank,
                           const std::vector<ShardFile>& files);

// Builds the root's description of `part`, whose text is `text`.
PartRef RefOf(const ManifestPart& part, absl::string_view text);
// A text found under the key of a part of `manifest`.
struct PartText {
  int part = 0;
  std::string text;
};
// Adds the files of these parts. DataLoss names a part that is not the one that the root names; `manifest`
// may have some of the other parts then, each of them correct.
absl::Status AddParts(const std::vector<PartText>& parts, Manifest* manifest);

// GT_CHECKs that the value is valid: writers prove it first.
std::string Print(const Manifest& manifest);
std::string Print(const AbortMarker& marker);
std::string Print(const ManifestPart& part);
std::string Print(const ShardIndex& index);
std::string Print(const OwnerClaim& claim);

// DataLoss for anything hostile or damaged. `key` is where the text was found: the numbers inside must derive
// exactly that key. A returned manifest is Validate()d. FailedPrecondition, which names both versions, for
// what a newer gtrain wrote: it is whole, and nobody may fall back from it or delete it.
absl::StatusOr<std::variant<Manifest, AbortMarker>> ParseManifest(absl::string_view key,
                                                                  absl::string_view text);
absl::StatusOr<ManifestPart> ParseManifestPart(absl::string_view key, absl::string_view text);
absl::StatusOr<ShardIndex> ParseShardIndex(absl::string_view key, absl::string_view text);
absl::StatusOr<OwnerClaim> ParseOwnerClaim(absl::string_view key, absl::string_view text);

}  // namespace gtrain::ckpt
