#include "comm/plan/op_record.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace gtrain::comm {

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUint8:
      return "uint8";
    case DType::kBool:
      return "bool";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kUint16:
      return "uint16";
    case DType::kUint32:
      return "uint32";
    case DType::kUint64:
      return "uint64";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
    case DType::kComplex64:
      return "complex64";
  }
  return "unknown type";
}

const char* ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMean:
      return "mean";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kBitAnd:
      return "bit_and";
    case ReduceOp::kBitOr:
      return "bit_or";
    case ReduceOp::kBitXor:
      return "bit_xor";
  }
  return "unknown reduction";
}

namespace {

// People cannot compare hashes, but see that they differ.
std::string Parts(const OpRecord& r) { return absl::StrCat(" in uneven parts (", absl::Hex(r.root), ")"); }

bool Rooted(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}

// The reason why IsReducible refuses a type.
const char* WhyNot(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMean:
      return "a mean of truth values is none";
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return "complex numbers have no order";
    default:
      return "operations on bits take integers and bool";
  }
}

}  // namespace

std::string Describe(const OpRecord& r) {
  const std::string data = absl::StrCat("#", r.sequence, " of ", r.count, " ", DTypeName(r.dtype));
  switch (r.kind) {
    case OpKind::kAllReduce:
      return absl::StrCat("all-reduce ", data, ", ", ReduceOpName(r.op));
    case OpKind::kBroadcast:
      return absl::StrCat("broadcast ", data, " from rank ", r.root);
    case OpKind::kAllGather:
      return absl::StrCat("all-gather ", data);
    case OpKind::kReduceScatter:
      return absl::StrCat("reduce-scatter ", data, ", ", ReduceOpName(r.op));
    case OpKind::kReduce:
      return absl::StrCat("reduce ", data, ", ", ReduceOpName(r.op), " to rank ", r.root);
    case OpKind::kAllToAll:
      return absl::StrCat("all-to-all ", data);
    case OpKind::kGather:
      return absl::StrCat("gather ", data, " to rank ", r.root);
    case OpKind::kScatter:
      return absl::StrCat("scatter ", data, " from rank ", r.root);
    case OpKind::kAllGatherV:
      return absl::StrCat("all-gather ", data, Parts(r));
    case OpKind::kReduceScatterV:
      return absl::StrCat("reduce-scatter ", data, ", ", ReduceOpName(r.op), Parts(r));
    case OpKind::kAllToAllV:
      return absl::StrCat("all-to-all #", r.sequence, " of ", DTypeName(r.dtype), " in uneven parts");
    case OpKind::kBarrier:
      return absl::StrCat("barrier #", r.sequence);
    case OpKind::kNone:
      break;
  }
  return absl::StrCat("unknown collective #", r.sequence);
}

absl::Status CheckArguments(const OpRecord& r, int world) {
  const size_t element = DTypeSize(r.dtype);
  if (element == 0) return absl::InvalidArgumentError(absl::StrCat("unknown element type ", int(r.dtype)));
  const bool reduces = r.kind == OpKind::kAllReduce || r.kind == OpKind::kReduceScatter ||
                       r.kind == OpKind::kReduce || r.kind == OpKind::kReduceScatterV;
  if (r.op > ReduceOp::kBitXor)
    return absl::InvalidArgumentError(absl::StrCat("unknown reduction ", int(r.op)));
  if (reduces && !IsReducible(r.dtype, r.op)) {
    return absl::InvalidArgumentError(
        absl::StrCat(DTypeName(r.dtype), " has no ", ReduceOpName(r.op), ": ", WhyNot(r.op)));
  }
  if (Rooted(r.kind) && (r.root < 0 || r.root >= world)) {
    return absl::InvalidArgumentError(absl::StrCat("root ", r.root, " is not a rank of 0..", world - 1));
  }
  if (r.count > std::numeric_limits<size_t>::max() / 2 / element / static_cast<size_t>(world)) {
    return absl::InvalidArgumentError(absl::StrCat("count ", r.count, " is too large"));
  }
  if (r.no_data != 0) return absl::InvalidArgumentError("data is null");
  return absl::OkStatus();
}

absl::Status CheckAgreement(absl::Span<const OpRecord> by_rank) {
  if (std::all_of(by_rank.begin(), by_rank.end(),
                  [&](const OpRecord& r) { return SameOperation(r, by_rank[0]); })) {
    return absl::OkStatus();
  }
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const absl::Status refused = CheckArguments(by_rank[rank], static_cast<int>(by_rank.size()));
    if (refused.ok()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " calls ", Describe(by_rank[rank]), ": ", refused.message()));
  }
  struct Group {
    OpRecord record;
    std::vector<int> ranks;
  };
  std::vector<Group> groups;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    auto it = std::find_if(groups.begin(), groups.end(),
                           [&](const Group& g) { return SameOperation(g.record, by_rank[rank]); });
    if (it == groups.end()) it = groups.insert(it, Group{by_rank[rank], {}});
    it->ranks.push_back(static_cast<int>(rank));
  }
  // The odd ones out come last: the reader looks for them there.
  std::stable_sort(groups.begin(), groups.end(),
                   [](const Group& a, const Group& b) { return a.ranks.size() > b.ranks.size(); });
  std::vector<std::string> parts;
  for (const Group& g : groups) {
    const bool one = g.ranks.size() == 1;
    parts.push_back(absl::StrCat(one ? "rank " : "ranks ", absl::StrJoin(g.ranks, ","),
                                 one ? " calls " : " call ", Describe(g.record)));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("ranks call different collectives: ", absl::StrJoin(parts, "; "),
                   ". All ranks must call the same collectives in the same order with the same count, type "
                   "and operation"));
}

}  // namespace gtrain::comm
