// Keys inside a checkpoint directory. Every key is derived from numbers alone and read back by deriving it
// again, so a key found in a file or a listing can never point outside the directory (fault C10).
//
//   owners/epoch-00000002.json
//   leases/epoch-00000002.00000017.json
//   manifests/step-000000000120.e0002.t0001.g0005.a01.json
//   pins/step-000000000120.e0002.t0001.g0005.a01
//   step-000000000120.e0002.t0001.g0005.a01/rank-00003-of-00008.safetensors
//   step-000000000120.e0002.t0001.g0005.a01/rank-00003-of-00008.index.json
//   step-000000000120.e0002.t0001.g0005.a01/part-00001-of-00002.json
#pragma once
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace gtrain::ckpt {

inline constexpr int64_t kStepMax = 999'999'999'999;
inline constexpr uint64_t kCounterMax = 99'999'999;  // epoch, timeline, generation, attempt
inline constexpr int kWorldSizeMax = 99'999;
// Part i of a manifest describes the files of ranks [i * kPartRanks, (i + 1) * kPartRanks).
inline constexpr int kPartRanks = 64;
constexpr int PartOf(int rank) { return rank / kPartRanks; }
constexpr int PartCount(int world_size) { return (world_size + kPartRanks - 1) / kPartRanks; }

// One attempt to save one step. The order is "which one a job resumes from": a later owner of the directory
// wins, then a later timeline, then a later step (docs/formats/checkpoint.md says why in this order).
struct SaveId {
  uint64_t epoch = 1;  // which owner of the directory, counted from 1
  uint64_t timeline = 1;
  int64_t step = 0;
  uint64_t generation = 1;
  uint64_t attempt = 1;
  auto operator<=>(const SaveId&) const = default;
};

// Whether every number is inside the limits above; the functions below require it.
bool IsValid(const SaveId& id);

// "step-000000000120.e0002.t0001.g0005.a01"
std::string AttemptName(const SaveId& id);
std::optional<SaveId> ParseAttemptName(absl::string_view name);

std::string ManifestKey(const SaveId& id);
std::optional<SaveId> ParseManifestKey(absl::string_view key);

// File names beside each other in the folder of the attempt.
std::string ShardName(int rank, int world_size);
std::string IndexName(int rank, int world_size);
std::string OrderName(int world_size);           // of rank 0; beside copies near by only
std::string PartName(int part, int part_count);  // "part-00003-of-00064.json"
// Rank and world size in the name of a shard or an index.
std::optional<std::pair<int, int>> ParseRankName(absl::string_view file);
// "<attempt>/<file>"
std::string AttemptKey(const SaveId& id, absl::string_view file);

std::string OwnerKey(uint64_t epoch);
std::optional<uint64_t> ParseOwnerKey(absl::string_view key);

// The sign of life of an owner: each renewal is a key of its own, and the one before it goes.
struct LeaseName {
  uint64_t epoch = 1;
  uint64_t renewal = 1;
  auto operator<=>(const LeaseName&) const = default;
};
std::string LeaseKey(const LeaseName& name);
std::optional<LeaseName> ParseLeaseKey(absl::string_view key);
std::string LeasePrefix(uint64_t epoch);  // of the keys of all its renewals

// An empty file that keeps one checkpoint from retention: "pins/<attempt>"
std::string PinKey(const SaveId& id);
std::optional<SaveId> ParsePinKey(absl::string_view key);

// "probe-1763720000-6b1f0c2d9a3e4f58": put when a directory is opened, to see that all ranks see it, and gone
// right after; the time says of one that stayed how old it is. The nonce makes it this opening's alone.
std::string ProbeKey(int64_t unix_seconds, uint64_t nonce);
std::optional<int64_t> ParseProbeKey(absl::string_view key);  // its time

inline constexpr char kProbePrefix[] = "probe-";
inline constexpr char kPinPrefix[] = "pins/";
inline constexpr char kManifestPrefix[] = "manifests/";
inline constexpr char kOwnerPrefix[] = "owners/";
inline constexpr char kLeasePrefix[] = "leases/";
inline constexpr char kAttemptPrefix[] = "step-";

}  // namespace gtrain::ckpt
