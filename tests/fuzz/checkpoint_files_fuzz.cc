// Everything a checkpoint directory holds (faults C4, C10): names, shard headers, manifests, their parts,
// indexes, claims; and the order to a writer. JSON without its checksum is sealed first, so that the fuzzer
// gets behind it.
#include <nlohmann/json.hpp>
#include <variant>

#include "base/check.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/save_order.h"
#include "checkpoint/format/strict_json.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

using namespace ckpt;

const SaveId kId{.epoch = 2, .timeline = 1, .step = 120, .generation = 5, .attempt = 1};

std::string IndexKey() { return AttemptKey(kId, IndexName(0, 2)); }
std::string PartKey() { return AttemptKey(kId, PartName(1, 2)); }

Manifest SampleInParts();

// Each parser accepts only what its own writer would have written.
void ReadSealed(const std::string& text) {
  const std::string key = ManifestKey(kId);
  if (const auto found = ParseManifest(key, text); found.ok()) {
    const std::string again = std::visit([](const auto& value) { return Print(value); }, *found);
    GT_CHECK(*ParseManifest(key, again) == *found);
  }
  if (const auto found = ParseShardIndex(IndexKey(), text); found.ok()) {
    GT_CHECK(*ParseShardIndex(IndexKey(), Print(*found)) == *found);
  }
  if (const auto found = ParseManifestPart(PartKey(), text); found.ok()) {
    GT_CHECK(*ParseManifestPart(PartKey(), Print(*found)) == *found);
    // A root that names this very text: what is added is as valid as what stands in a root.
    Manifest root = SampleInParts();
    root.parts[1] = RefOf(*found, text);
    if (Validate(root).ok() && AddParts({{1, text}}, &root).ok()) GT_CHECK(Validate(root).ok());
  }
  if (const auto found = ParseOwnerClaim(OwnerKey(2), text); found.ok()) {
    GT_CHECK(*ParseOwnerClaim(OwnerKey(2), Print(*found)) == *found);
  }
  if (const auto found = ParseSaveOrder(text); found.ok()) GT_CHECK(*ParseSaveOrder(Print(*found)) == *found);
  const SaveOrder order{.world_size = 2, .tensors = {{"rng", Layout::kPerRank}}};
  if (const auto found = ParseSaveTail(text, order); found.ok())
    GT_CHECK(*ParseSaveTail(Print(*found), order) == *found);
}

void ReadHeader(absl::string_view bytes) {
  for (const uint64_t data : {uint64_t{0}, uint64_t{29}, uint64_t{32}}) {
    const auto header = ParseShardHeader(bytes, bytes.size() + data);
    if (!header.ok()) continue;
    GT_CHECK(header->file_bytes == bytes.size() + data && header->data_begin <= header->file_bytes);
    uint64_t at = 0;
    for (const TensorEntry& tensor : header->tensors) {
      GT_CHECK(tensor.begin == at && tensor.begin <= tensor.end && IsTensorName(tensor.name));
      at = tensor.end;
    }
    GT_CHECK(header->data_begin + at == header->file_bytes);
  }
}

void ReadNames(absl::string_view text) {
  if (const auto id = ParseAttemptName(text)) GT_CHECK(IsValid(*id) && AttemptName(*id) == text);
  if (const auto id = ParseManifestKey(text)) GT_CHECK(IsValid(*id) && ManifestKey(*id) == text);
  if (const auto epoch = ParseOwnerKey(text)) GT_CHECK(OwnerKey(*epoch) == text);
  if (const auto rank = ParseRankName(text)) {
    GT_CHECK(ShardName(rank->first, rank->second) == text || IndexName(rank->first, rank->second) == text);
  }
  if (const auto dtype = ParseDType(text)) GT_CHECK(DTypeName(*dtype) == text);
}

ShardFile File(int rank) {
  return {.name = ShardName(rank, 2), .bytes = 112, .chunks = {std::string(32, 'a')}};
}

Manifest OldSample() {
  Manifest manifest{.version = 1, .id = kId, .owner = {"c1", "train-1", "0123"}, .world_size = 2};
  manifest.tensors = {{"w", Layout::kReplicated, DType::kFloat32, {2, 2}, {}},
                      {"rng", Layout::kPerRank, DType::kUint8, {}, {}}};
  for (int rank = 0; rank < 2; ++rank) {
    manifest.files.push_back(File(rank));
    manifest.files[rank].xxh3 = std::string(32, 'a');
    manifest.files[rank].slices = {{"w", rank * 8u, 8, 96}, {"rng", 0, 5, 104}};
  }
  return manifest;
}

// Rank 0 writes "w" and two rows of "e", rank 1 one row.
Manifest Sample() {
  Manifest manifest = OldSample();
  manifest.version = kManifestVersion;
  manifest.tensors.push_back(
      {"e", Layout::kSharded, DType::kBFloat16, {3, 4}, {{{"pp", 1}, {"tp", 2}}, {{0, "tp"}}, {{"pp", 0}}}});
  for (int rank = 0; rank < 2; ++rank) {
    ShardFile& file = manifest.files[rank] = File(rank);
    file.data_begin = 72;
    file.per_rank = {rank == 0 ? 8u : 32u};
  }
  return manifest;
}

// Rank 1 holds nine of ten elements and keeps state of rank 3.
Manifest Boxed() {
  Manifest manifest{.id = kId, .owner = {"c1", "train-1", "0123"}, .world_size = 2};
  const std::vector<sharding::Box> boxes = {{{9, 1}}, {{0, 9}}};
  manifest.tensors = {{.name = "b",
                       .layout = Layout::kBoxes,
                       .dtype = DType::kBool,
                       .shape = {10},
                       .boxes = *sharding::RankBoxes::Make({10}, boxes)},
                      {.name = "c",
                       .layout = Layout::kSharded,
                       .dtype = DType::kComplex64,
                       .shape = {3},
                       .sharding = {{{"dp", 2}}, {{0, "dp", SplitRule::kChunk}}, {}}},
                      {.name = "rng", .layout = Layout::kPerRank}};
  for (int rank = 0; rank < 2; ++rank) {
    manifest.files.push_back(File(rank));
    manifest.files[rank].data_begin = 80;
    manifest.files[rank].per_rank = {rank == 0 ? 15u : 12u};
  }
  manifest.files[1].kept = {{0, 3, 3}};
  return manifest;
}

Manifest SampleOfVersion2() {
  Manifest manifest = Sample();
  manifest.version = 2;
  for (ShardFile& file : manifest.files) file.xxh3 = std::string(32, 'a');
  return manifest;
}

// A part of 65 ranks, each with bytes of its own, the last in a part of its own.
ManifestPart SamplePart() {
  return {.id = kId,
          .world_size = 65,
          .part = 1,
          .verified = AttemptName(kId),
          .files = {{.name = ShardName(64, 65),
                     .bytes = 112,
                     .chunks = {std::string(32, 'a')},
                     .data_begin = 72,
                     .per_rank = {40}}}};
}

Manifest SampleInParts() {
  Manifest manifest{.id = kId, .owner = {"c1", "train-1", "0123"}, .world_size = 65};
  manifest.tensors = {{"rng", Layout::kPerRank, DType::kUint8, {}, {}}};
  manifest.parts.assign(
      2, {.bytes = 20'000, .xxh3 = std::string(32, 'a'), .file_bytes = uint64_t{64} * 112, .chunks = 64});
  manifest.parts[1] = RefOf(SamplePart(), Print(SamplePart()));
  manifest.files.resize(65);
  return manifest;
}

// The text a writer makes, without its checksum: what the fuzzer may change and still be read.
std::string Unsealed(const std::string& sealed) {
  auto json = nlohmann::ordered_json::parse(sealed);
  json.erase("checksum");
  return json.dump();
}

}  // namespace

GT_FUZZ_RUN(checkpoint_files) {
  ReadNames(bytes);
  ReadHeader(bytes);
  ReadSealed(std::string(bytes));
  if (const auto json = ParseStrictJson(bytes, 1 << 20); json.ok() && !json->contains("checksum")) {
    ReadSealed(PrintSealed(*json));
  }
}

GT_FUZZ_SEEDS(checkpoint_files) {
  const Manifest manifest = Sample(), second = SampleOfVersion2(), old = OldSample(), boxed = Boxed();
  GT_CHECK(Validate(manifest).ok() && Validate(old).ok() && Validate(boxed).ok());
  const ShardIndex index{
      .id = kId, .rank = 0, .world_size = 2, .file = manifest.files[0], .verified = AttemptName(kId)};
  const ManifestPart failed_part{.id = kId, .world_size = 65, .part = 1, .error = "rank 64: disk full"};
  const ShardIndex failed{.id = kId, .rank = 0, .world_size = 2, .error = "disk full"};
  const std::vector<std::string> sealed = {
      Print(manifest),
      Print(old),
      Print(AbortMarker{kId, "overtaken"}),
      Print(index),
      Print(failed),
      Print(OwnerClaim{2, manifest.owner}),
      Print(SaveOrder{.location = "/data/ckpt",
                      .owner = manifest.owner,
                      .world_size = 2,
                      .tensors = manifest.tensors,
                      .bytes = std::vector<uint64_t>(manifest.tensors.size(), 8)}),
      Print(second),
      Print(SampleInParts()),
      Print(SamplePart()),
      Print(failed_part),
      Print(boxed),
      Print(SaveTail{.per_rank = {7}, .kept = {{0, 2, 5}}})};
  std::vector<std::string> seeds = {
      ManifestKey(kId), AttemptName(kId), OwnerKey(7), "BF16",
      PrintShardHeader({{.name = "w", .dtype = DType::kFloat32, .shape = {2, 3}, .begin = 0, .end = 24},
                        {.name = "rng", .dtype = DType::kUint8, .shape = {5}, .begin = 24, .end = 29}})};
  for (const std::string& text : sealed) {
    seeds.push_back(text);
    seeds.push_back(Unsealed(text));
  }
  return seeds;
}

}  // namespace gtrain::fuzz
