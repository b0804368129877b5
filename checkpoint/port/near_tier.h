// A place nearer than the storage that may hold copies of a job's shards: memory or disk of a machine. It
// commits nothing: only the storage says which saves are committed, and each byte that comes from here is
// compared with hashes, those of a manifest from there or, for a save whose upload has not ended, those that
// its writers left beside the copies. So a tier makes a restore faster, or is found out.
//
// An attempt is named as in format/names.h ("step-000000000120.e0002.t0001.g0005.a01"), a file as the shard,
// its index, or the order of rank 0.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace gtrain::port {

// Thread-safe. Every call ends within seconds, Put within those and what its source and the bytes take.
class NearTier {
 public:
  struct Shard {
    std::string file;
    uint64_t bytes = 0;
    bool operator==(const Shard&) const = default;
  };
  struct Copy {
    std::string attempt;
    std::string file;
    uint64_t bytes = 0;
    std::string
        committed;  // newest attempt of the job that is committed for sure; older copies go. May be empty
  };
  // Returns the bytes from `offset` on, as many as lie together; never none. An error ends the put.
  using Source = absl::FunctionRef<absl::StatusOr<absl::string_view>(uint64_t offset)>;

  virtual ~NearTier() = default;

  // Names of the attempts of which it has a copy, or one is coming, in any order.
  virtual absl::StatusOr<std::vector<std::string>> Attempts() = 0;
  // Whole copies of an attempt.
  virtual absl::StatusOr<std::vector<Shard>> List(absl::string_view attempt) = 0;
  // Reads exactly out.size() bytes from `offset` of a copy that is listed.
  virtual absl::Status Read(absl::string_view attempt, absl::string_view file, uint64_t offset,
                            absl::Span<char> out) = 0;
  // The size that one Read should have.
  virtual uint64_t ReadSize() const = 0;
  // Stores a copy. Afterwards it is listed; after an error it is not. ResourceExhausted: the tier is full.
  virtual absl::Status Put(const Copy& copy, Source source) = 0;
  // For people: "this machine's memory (/dev/shm/...)".
  virtual std::string Describe() const = 0;
};

}  // namespace gtrain::port
