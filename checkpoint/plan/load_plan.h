// Which bytes one rank must read to restore, at any world size and layout.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/shares.h"
#include "checkpoint/plan/save_plan.h"
#include "sharding/overlap.h"

namespace gtrain::ckpt {

// Bytes of a file that land in registered memory. The file holds bytes [begin, begin + bytes) of a box as it
// was saved, at file_begin; of these, `overlap` says which are wanted and where they go.
struct Copy {
  size_t registered = 0;  // index of the tensor; of state of ranks: their number + index in LoadPlan::blobs
  uint64_t begin = 0;
  uint64_t bytes = 0;
  uint64_t file_begin = 0;
  uint64_t needed = 0;        // how many are wanted; not 0
  sharding::Overlap overlap;  // from the saved box to the registered memory
  bool operator==(const Copy&) const = default;
};

struct ChunkRange {
  uint64_t first = 0;
  uint64_t count = 0;
  bool operator==(const ChunkRange&) const = default;
};

struct FileRead {
  int file = 0;                    // index into Manifest::files
  std::vector<ChunkRange> chunks;  // ascending, apart; each chunk is read whole, verified, then copied from
  std::vector<Copy> copies;        // by file_begin, disjoint in the file
};

// State of one rank that is to be read: this rank's own, or, as its PerRankRule says, that of a rank which
// the new world has not.
struct BlobRead {
  size_t registered = 0;
  int rank = 0;
  uint64_t bytes = 0;
  bool operator==(const BlobRead&) const = default;
};

struct LoadPlan {
  std::vector<FileRead> reads;       // by file
  std::vector<bool> restored;        // per registered tensor; false: it keeps its value
  std::vector<BlobRead> blobs;       // by registration, then rank
  std::vector<std::string> unknown;  // in the checkpoint, not registered: not read
  std::vector<std::string> missing;  // registered, not in the checkpoint, and may be missing
  std::vector<std::string> orphans;  // for people: state of ranks that are no more, and what becomes of it
  uint64_t needed_bytes = 0;         // that are copied: every restored byte of this rank once
  uint64_t read_bytes = 0;           // that are read for it, as whole chunks
};

// Plans for the ranks of one world. Memory: a plan takes about 128 bytes for each piece it copies from.
class LoadPlanner {
 public:
  // `manifest` is Validate()d and outlives the planner. `registered` as on any rank of the new world.
  // `may_be_missing`: as RestoreOptions has it.
  LoadPlanner(const Manifest* manifest, std::vector<Registered> registered, int world_size,
              std::vector<std::string> may_be_missing = {});

  // FailedPrecondition with every difference when the checkpoint does not fit what is registered: a tensor
  // that is missing (never silently fresh, fault C4), another shape or type, a blob of another size than the
  // registered one unless it has any length. Layouts may differ in every way.
  absl::StatusOr<LoadPlan> Plan(int rank);
  // Plans the tensors [first, last) of the registration alone; the others count as not restored.
  absl::StatusOr<LoadPlan> Plan(int rank, size_t first, size_t last);
  // The files that this plan reads, ascending, and those that keep state of ranks which it may read. A
  // manifest with parts must have them (Manifest::Has) before a planner is made that plans this. For rank 0
  // these are all files that keep some state, because it logs what happens to that state.
  std::vector<int> FilesFor(int rank, size_t first, size_t last);

 private:
  struct Building;
  void FindDifferences();
  void AddTensors(int rank, size_t first, size_t last, Building* building);
  void AddTensor(size_t registered, int rank, Building* building);
  void AddPiece(int file, const Copy& copy, Building* building) const;
  // Where the state of `rank` lies in the checkpoint.
  struct Place {
    int file = 0;
    uint64_t begin = 0;
    uint64_t bytes = 0;
  };
  std::optional<Place> FindBlob(size_t stored, int rank);
  std::optional<Place> FindSlice(size_t stored, int rank) const;
  void FindKept();
  void AddFilesOfBlobs(int rank, size_t first, size_t last, std::vector<int>* files);
  void FindOrphans();
  void AddBlob(size_t registered, int rank, const Place& place, Building* building) const;
  absl::Status AddBlobs(size_t registered, int rank, Building* building);

  const Manifest* const manifest_;
  const std::vector<Registered> registered_;
  const int world_size_;
  Shares saved_;                                  // of the manifest, version 2
  std::vector<sharding::Partition> wanted_;       // of each registered tensor
  std::vector<std::optional<size_t>> stored_as_;  // index in the manifest of each registered tensor
  std::vector<size_t> order_;                     // registered tensors in the order of their bytes in files
  std::vector<size_t> place_;                     // of each in order_: which of places_ says where it is held
  std::vector<size_t> places_;                    // a registered tensor for each set of ranks that hold some
  std::vector<size_t> blobs_;                     // registered per-rank tensors
  absl::flat_hash_map<size_t, std::map<int, Place>> kept_;  // of each tensor of the manifest, by rank
  const std::vector<std::string> may_be_missing_;
  std::vector<std::string> missing_;
  std::vector<std::string> orphans_;
  absl::flat_hash_map<absl::string_view, std::vector<std::pair<int, const Slice*>>> slices_;  // version 1
  std::vector<std::string> unknown_;
  std::vector<std::string> differences_;
};

// One plan of a planner of its own.
absl::StatusOr<LoadPlan> PlanLoad(const Manifest& manifest, const std::vector<Registered>& registered,
                                  int rank, int world_size,
                                  const std::vector<std::string>& may_be_missing = {});

// Whether `*` (any characters, also none) and `?` (one) of `pattern` can stand for what `name` is.
bool MatchesGlob(absl::string_view name, absl::string_view pattern);

}  // namespace gtrain::ckpt
