#include "checkpoint/engine/registration.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/engine/boxes.h"
#include "checkpoint/format/shares.h"
#include "checkpoint/plan/limits.h"

namespace gtrain::ckpt {
namespace {

absl::Status Impossible(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" ", what));
}

absl::string_view KindName(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kHost:
      return "host";
    case MemoryKind::kCuda:
      return "cuda";
    case MemoryKind::kHip:
      return "hip";
  }
  return "unknown";
}

std::string ShapeOf(const sharding::Box& box) {
  std::string out;
  for (const sharding::Interval& i : box) absl::StrAppend(&out, out.empty() ? "" : ",", i.size);
  return absl::StrCat("[", out, "]");
}

// `box`: what this rank holds.
absl::Status CheckBytes(absl::string_view name, const Memory& memory, const sharding::Box& box, DType dtype) {
  const uint64_t bytes = sharding::Elements(box) * DTypeSize(dtype);
  if (memory.bytes == bytes) return absl::OkStatus();
  return Impossible(name, absl::StrCat("wants ", bytes, " bytes for ", ShapeOf(box), " of ", DTypeName(dtype),
                                       " on this rank, and ", memory.bytes, " are given"));
}

}  // namespace

absl::Status Registration::Check(absl::string_view name, const Memory& memory, DType dtype) {
  if (memory.kind != MemoryKind::kHost) {
    return absl::UnimplementedError(absl::StrCat("\"", name, "\" lies in ", KindName(memory.kind),
                                                 " memory; checkpoints take that of the host today"));
  }
  if (DTypeSize(dtype) == 0) return Impossible(name, "has a dtype that there is not");
  if (memory.event != nullptr) return Impossible(name, "has an event, which host memory has not");
  return absl::OkStatus();
}

absl::Status Registration::Add(Registered registered, const Memory& memory, Entry entry) {
  const std::string& name = registered.tensor.name;
  if (frozen_) {
    return absl::FailedPreconditionError(
        absl::StrCat("\"", name, "\": register everything before Restore and Save"));
  }
  if (!IsTensorName(name) || IsPieceName(name)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", absl::string_view(name).substr(0, 64),
        "\" cannot be a name: 1 to 512 printable ASCII characters, not ending like [0:10] or [@1]"));
  }
  if (memory.data == nullptr && registered.bytes > 0) return Impossible(name, "has no memory");
  if (names_.contains(name))
    return absl::AlreadyExistsError(absl::StrCat("\"", name, "\" is registered twice"));
  GT_RETURN_IF_ERROR(Count(registered));
  names_.insert(name);
  entry.data = static_cast<char*>(memory.data);
  all_.push_back(std::move(registered));
  entries_.push_back(std::move(entry));
  return absl::OkStatus();
}

absl::Status Registration::Count(const Registered& registered) {
  const GlobalTensor& tensor = registered.tensor;
  const bool of_rank = tensor.layout == Layout::kPerRank;
  const uint64_t bytes =
      of_rank ? registered.bytes : *ElementCount(tensor.shape, tensor.dtype) * DTypeSize(tensor.dtype);
  uint64_t* const sum = of_rank ? &rank_bytes_ : &tensor_bytes_;
  const uint64_t sum_max = of_rank ? kFileBytesMax : kStateBytesMax;
  if (bytes > sum_max - *sum) {
    return absl::ResourceExhaustedError(
        absl::StrCat("\"", tensor.name, "\" has ", bytes, " bytes, beside ", *sum, " that are registered: ",
                     of_rank ? "the state of one rank" : "all tensors together", " may have ", sum_max));
  }
  *sum += bytes;
  return absl::OkStatus();
}

absl::Status Registration::AddReplicated(absl::string_view name, const Memory& memory,
                                         std::vector<int64_t> shape, DType dtype) {
  GT_RETURN_IF_ERROR(Check(name, memory, dtype));
  if (!ElementCount(shape, dtype)) return Impossible(name, "has an impossible shape");
  GT_RETURN_IF_ERROR(CheckBytes(name, memory, sharding::WholeBox(shape), dtype));
  GlobalTensor tensor{.name = std::string(name), .dtype = dtype, .shape = std::move(shape)};
  return Add({.tensor = std::move(tensor), .bytes = memory.bytes}, memory, {});
}

absl::Status Registration::AddSharded(absl::string_view name, const Memory& memory,
                                      std::vector<int64_t> shape, const Sharding& sharding, DType dtype) {
  const absl::StatusOr<sharding::Partition> partition =
      sharding::Partition::Make(sharding, shape.size(), world_size_);
  if (!partition.ok())
    return absl::InvalidArgumentError(absl::StrCat("\"", name, "\": ", partition.status().message()));
  // Nothing is split and nobody is left out.
  if (partition->Key().empty()) return AddReplicated(name, memory, std::move(shape), dtype);
  GT_RETURN_IF_ERROR(Check(name, memory, dtype));
  if (!ElementCount(shape, dtype)) return Impossible(name, "has an impossible shape");
  if (partition->Holds(rank_)) {
    const sharding::Box box = partition->BoxOf(shape, partition->CellOf(rank_));
    GT_RETURN_IF_ERROR(CheckBytes(name, memory, box, dtype));
  } else if (memory.bytes != 0) {
    return Impossible(name, absl::StrCat("is only on other ranks, and ", memory.bytes, " bytes are given"));
  }
  GlobalTensor tensor{.name = std::string(name),
                      .layout = Layout::kSharded,
                      .dtype = dtype,
                      .shape = std::move(shape),
                      .sharding = sharding};
  return Add({.tensor = std::move(tensor), .bytes = memory.bytes}, memory, {});
}

absl::Status Registration::AddBox(absl::string_view name, const Memory& memory, std::vector<int64_t> shape,
                                  const std::vector<int64_t>& begin, const std::vector<int64_t>& local_shape,
                                  DType dtype) {
  GT_RETURN_IF_ERROR(Check(name, memory, dtype));
  const std::optional<uint64_t> count = ElementCount(shape, dtype);
  if (!count) return Impossible(name, "has an impossible shape");
  if (begin.size() != shape.size() || local_shape.size() != shape.size()) {
    return Impossible(name, absl::StrCat("has ", shape.size(), " dimensions, its box begins in ",
                                         begin.size(), " and has a shape of ", local_shape.size()));
  }
  sharding::Box box;
  bool inside = true;
  for (size_t d = 0; d < shape.size(); ++d) {
    box.push_back({begin[d], local_shape[d]});
    inside = inside && begin[d] >= 0 && local_shape[d] >= 0 && begin[d] <= shape[d] &&
             local_shape[d] <= shape[d] - begin[d];
  }
  if (!inside) {
    return Impossible(name,
                      absl::StrCat("has the box ", sharding::Describe(box), " on this rank, outside of ",
                                   sharding::Describe(sharding::WholeBox(shape))));
  }
  GT_RETURN_IF_ERROR(CheckBytes(name, memory, box, dtype));
  // Nobody holds anything of it: nothing can be said of ranks.
  if (*count == 0) return AddReplicated(name, memory, std::move(shape), dtype);
  if (sharding::Elements(box) == 0) std::fill(box.begin(), box.end(), sharding::Interval{});
  GlobalTensor tensor{
      .name = std::string(name), .layout = Layout::kBoxes, .dtype = dtype, .shape = std::move(shape)};
  return Add({.tensor = std::move(tensor), .bytes = memory.bytes}, memory, {.box = std::move(box)});
}

absl::Status Registration::AddPerRank(absl::string_view name, const Memory& memory, PerRankRule rule) {
  GT_RETURN_IF_ERROR(Check(name, memory));
  if (rule == PerRankRule::kMerge)
    return Impossible(name, "cannot be merged: that is for AddBytes, whose `load` does it");
  GlobalTensor tensor{.name = std::string(name), .layout = Layout::kPerRank};
  return Add({.tensor = std::move(tensor), .bytes = memory.bytes, .rule = rule}, memory, {});
}

absl::Status Registration::AddBytes(absl::string_view name, std::function<absl::StatusOr<std::string>()> save,
                                    std::function<absl::Status(absl::string_view)> load, PerRankRule rule) {
  GT_RETURN_IF_ERROR(Check(name, {}));
  if (!save || !load) return Impossible(name, "has no function to save or to load it");
  GlobalTensor tensor{.name = std::string(name), .layout = Layout::kPerRank};
  return Add({.tensor = std::move(tensor), .rule = rule, .any_length = true}, {},
             {.save = std::move(save), .load = std::move(load)});
}

absl::Status Registration::Freeze(Agreement* agree, uint64_t file_bytes_max) {
  uint64_t hash = 0;
  absl::Status status;
  if (!absl::SimpleHexAtoi(RegistrationHash(all_).substr(0, 15), &hash))
    status = absl::InternalError("a hash that is not a number");
  if (all_.empty()) status = absl::FailedPreconditionError("nothing is registered to be saved");
  GT_RETURN_IF_ERROR(agree->AllOk(status));
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> hashes, agree->Gather(static_cast<int64_t>(hash)));
  for (size_t rank = 0; rank < hashes.size(); ++rank) {
    if (hashes[rank] == hashes[0]) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank,
        " registered other state than rank 0: names, order, shapes, types and rules must be equal"));
  }
  std::vector<OwnBox> boxes;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].tensor.layout == Layout::kBoxes) boxes.push_back({i, entries_[i].box});
  }
  GT_RETURN_IF_ERROR(ShareBoxes(agree, boxes, &all_));
  GT_RETURN_IF_ERROR(agree->AllOk(CheckLimits(all_, rank_, world_size_, file_bytes_max)));
  frozen_ = true;
  return absl::OkStatus();
}

std::vector<void*> Registration::Data() const {
  std::vector<void*> data;
  for (const Entry& entry : entries_) data.push_back(entry.data);
  return data;
}

absl::Status Registration::CollectTail() {
  tail_ = {};
  uint64_t bytes = 0;
  size_t largest = all_.size();
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].tensor.layout != Layout::kPerRank) continue;
    Entry& entry = entries_[i];
    if (!all_[i].any_length) {
      tail_.per_rank.push_back(all_[i].bytes);
      continue;
    }
    absl::StatusOr<std::string> saved = entry.save();
    if (!saved.ok()) {
      return absl::Status(saved.status().code(),
                          absl::StrCat("\"", all_[i].tensor.name, "\": ", saved.status().message()));
    }
    entry.bytes = *std::move(saved);
    bytes += entry.bytes.size();
    if (largest == all_.size() || entry.bytes.size() > entries_[largest].bytes.size()) largest = i;
    tail_.per_rank.push_back(entry.bytes.size());
  }
  for (const Kept& kept : kept_) {
    tail_.kept.push_back(kept.what);
    bytes += kept.bytes.size();
  }
  if (bytes <= kByteEntriesMax) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "byte entries of ", PrintBytes(bytes), " on this rank, over ", PrintBytes(kByteEntriesMax),
      largest < all_.size()
          ? absl::StrCat(": \"", all_[largest].tensor.name, "\" has ",
                         PrintBytes(entries_[largest].bytes.size()), "; save large state as tensors")
          : ""));
}

std::vector<Snapshot::Source> Registration::Sources(const ShardPlan& plan) const {
  std::vector<Snapshot::Source> sources;
  for (const Piece& piece : plan.pieces) {
    if (all_[piece.tensor].tensor.layout != Layout::kPerRank)
      sources.push_back({entries_[piece.tensor].data + piece.begin, piece.bytes});
  }
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].tensor.layout != Layout::kPerRank) continue;
    const std::string& bytes = entries_[i].bytes;
    if (all_[i].any_length)
      sources.push_back({bytes.data(), bytes.size()});
    else
      sources.push_back({entries_[i].data, all_[i].bytes});
  }
  for (const Kept& kept : kept_) sources.push_back({kept.bytes.data(), kept.bytes.size()});
  return sources;
}

void Registration::KeepInitial(const std::vector<std::string>& may_be_missing) {
  for (size_t i = 0; i < all_.size() && !may_be_missing.empty(); ++i) {
    const bool may = std::any_of(may_be_missing.begin(), may_be_missing.end(),
                                 [&](const std::string& p) { return MatchesGlob(all_[i].tensor.name, p); });
    if (may && entries_[i].data != nullptr && all_[i].tensor.layout != Layout::kPerRank)
      initial_.emplace_back(i, std::string(entries_[i].data, all_[i].bytes));
  }
}

void Registration::PutBackInitial(const LoadPlan& plan) const {
  for (const auto& [i, bytes] : initial_) {
    if (std::count(plan.missing.begin(), plan.missing.end(), all_[i].tensor.name) > 0)
      std::memcpy(entries_[i].data, bytes.data(), bytes.size());
  }
}

absl::Status Registration::CheckKept(const LoadPlan& plan) const {
  uint64_t bytes = 0;
  for (const BlobRead& blob : plan.blobs) {
    if (blob.rank != rank_ && all_[blob.registered].rule == PerRankRule::kKeep) bytes += blob.bytes;
  }
  if (bytes <= kByteEntriesMax) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "this rank would have to carry along ", PrintBytes(bytes), " of ranks that are no more, over ",
      PrintBytes(kByteEntriesMax), ": restore with more ranks, or register it with another PerRankRule"));
}

char* Registration::MemoryFor(size_t registered, std::vector<std::string>* staged) const {
  return registered < entries_.size() ? entries_[registered].data
                                      : (*staged)[registered - entries_.size()].data();
}

absl::Status Registration::Take(const LoadPlan& plan, std::vector<std::string> staged) {
  GT_CHECK(staged.size() == plan.blobs.size());
  kept_.clear();
  std::vector<uint64_t> blob_of(all_.size());
  for (uint64_t i = 0, blobs = 0; i < all_.size(); ++i) {
    blob_of[i] = blobs;
    if (all_[i].tensor.layout == Layout::kPerRank) ++blobs;
  }
  for (size_t k = 0; k < staged.size(); ++k) {
    const BlobRead& blob = plan.blobs[k];
    const Registered& r = all_[blob.registered];
    if (blob.rank != rank_ && r.rule == PerRankRule::kKeep) {
      kept_.push_back({{blob_of[blob.registered], blob.rank, blob.bytes}, std::move(staged[k])});
    } else if (r.any_length) {
      const absl::Status loaded = entries_[blob.registered].load(staged[k]);
      if (loaded.ok()) continue;
      return absl::Status(
          loaded.code(), absl::StrCat("\"", r.tensor.name, "\" of rank ", blob.rank, ": ", loaded.message()));
    } else if (blob.bytes > 0) {
      std::memcpy(entries_[blob.registered].data, staged[k].data(), blob.bytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace gtrain::ckpt
