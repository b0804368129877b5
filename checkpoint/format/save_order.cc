#include "checkpoint/format/save_order.h"

#include <algorithm>

#include "base/status_macros.h"
#include "checkpoint/format/shared_fields.h"
#include "checkpoint/format/shares.h"
#include "checkpoint/format/strict_json.h"
#include "checkpoint/format/tensor_fields.h"
#include "checkpoint/format/validate.h"

namespace gtrain::ckpt {
namespace {

constexpr char kOrderFormat[] = "gtrain-save-order";
constexpr char kTailFormat[] = "gtrain-save-tail";
constexpr size_t kLocationBytesMax = 4096;
constexpr uint64_t kOrderNumberMax = INT32_MAX;  // keep, tries, milliseconds

}  // namespace

std::string Print(const SaveOrder& order) {
  Json out = Head(kOrderFormat);
  out["location"] = order.location;
  AddIdentity(order.owner, &out);
  out["epoch"] = order.epoch;
  out["rank"] = order.rank;
  out["world_size"] = order.world_size;
  out["keep"] = order.keep;
  out["shard_tries"] = order.shard_tries;
  out["commit_timeout_ms"] = order.commit_timeout_ms;
  AddTensors(order.tensors, &out);
  out["bytes"] = order.bytes;
  if (order.has_tail) out["has_tail"] = true;  // not to writers that do not know it and need not
  return PrintSealed(out);
}

std::string Print(const SaveTail& tail) {
  Json out = Head(kTailFormat);
  out["per_rank"] = tail.per_rank;
  if (!tail.kept.empty()) out["kept"] = KeptToJson(tail.kept);
  return PrintSealed(out);
}

absl::StatusOr<SaveTail> ParseSaveTail(absl::string_view text, const SaveOrder& order) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kTailTextBytesMax));
  GT_RETURN_IF_ERROR(ReadHead(object, kTailFormat).status());
  GT_RETURN_IF_ERROR(CheckFields(object, {"format", "version", "per_rank", "kept"}));
  SaveTail tail;
  GT_ASSIGN_OR_RETURN(tail.per_rank, ReadSizes(object, "per_rank"));
  GT_ASSIGN_OR_RETURN(tail.kept, ReadKept(object));
  const auto blobs =
      static_cast<size_t>(std::count_if(order.tensors.begin(), order.tensors.end(),
                                        [](const GlobalTensor& t) { return t.layout == Layout::kPerRank; }));
  if (tail.per_rank.size() != blobs) return absl::DataLossError("per_rank does not match the order");
  for (const KeptBlob& k : tail.kept) {
    if (k.blob >= blobs || k.rank < order.world_size || k.rank % order.world_size != order.rank)
      return absl::DataLossError("kept: an impossible entry");
  }
  return tail;
}

absl::StatusOr<SaveOrder> ParseSaveOrder(absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const ParsedJson object, ParseSealed(text, kManifestBytesMax));
  GT_RETURN_IF_ERROR(ReadHead(object, kOrderFormat).status());
  GT_RETURN_IF_ERROR(CheckFields(
      object, {"format", "version", "location", "cluster", "job", "job_hash", "epoch", "rank", "world_size",
               "keep", "shard_tries", "commit_timeout_ms", "tensors", "boxes", "bytes", "has_tail"}));
  SaveOrder order;
  if (object.contains("has_tail")) {
    GT_ASSIGN_OR_RETURN(order.has_tail, GetBool(object, "has_tail"));
  }
  GT_ASSIGN_OR_RETURN(order.location, GetString(object, "location", kLocationBytesMax));
  GT_ASSIGN_OR_RETURN(order.owner, ReadIdentity(object));
  GT_ASSIGN_OR_RETURN(order.epoch, GetUint(object, "epoch", kCounterMax));
  const auto number = [&](const char* name, uint64_t value_max, int* out) -> absl::Status {
    GT_ASSIGN_OR_RETURN(const uint64_t value, GetUint(object, name, value_max));
    *out = static_cast<int>(value);
    return absl::OkStatus();
  };
  GT_RETURN_IF_ERROR(number("world_size", kWorldSizeMax, &order.world_size));
  GT_RETURN_IF_ERROR(number("rank", kWorldSizeMax, &order.rank));
  GT_RETURN_IF_ERROR(number("keep", kOrderNumberMax, &order.keep));
  GT_RETURN_IF_ERROR(number("shard_tries", kOrderNumberMax, &order.shard_tries));
  GT_ASSIGN_OR_RETURN(order.commit_timeout_ms, GetUint(object, "commit_timeout_ms", kOrderNumberMax));
  if (order.rank >= order.world_size) return absl::DataLossError("rank outside the world");
  GT_ASSIGN_OR_RETURN(order.tensors, ReadTensors(object, kManifestVersion));
  GT_RETURN_IF_ERROR(CheckTensors(order.tensors));
  const absl::Status possible = Shares::Make(order.tensors, order.world_size).status();
  if (!possible.ok()) return absl::DataLossError(possible.message());
  GT_ASSIGN_OR_RETURN(order.bytes, ReadSizes(object, "bytes"));
  if (order.bytes.size() != order.tensors.size())
    return absl::DataLossError("bytes do not match the tensors");
  return order;
}

}  // namespace gtrain::ckpt
