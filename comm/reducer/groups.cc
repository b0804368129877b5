#include "comm/reducer/groups.h"

#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace gtrain::comm {

namespace {

// `what`: this rank's hash of what it asked for. All are here already, so this is one exchange more.
absl::Status TheyDiffer(Communicator& communicator, int64_t what) {
  std::vector<int64_t> all(static_cast<size_t>(communicator.size()));
  GT_RETURN_IF_ERROR(communicator.AllGather(&what, all.data(), 1, DType::kInt64));
  // The fewer ones are those with the mistake; rank 0 where there are as many.
  std::map<int64_t, int> votes;
  for (const int64_t hash : all) ++votes[hash];
  int64_t most = all[0];
  for (const int64_t hash : all)
    if (votes[hash] > votes[most]) most = hash;
  std::vector<size_t> others;
  for (size_t rank = 0; rank < all.size() && others.size() < 8; ++rank)
    if (all[rank] != most) others.push_back(rank);
  return absl::InvalidArgumentError(absl::StrCat(
      "compressed collective: rank", others.size() == 1 ? " " : "s ", absl::StrJoin(others, ", "),
      " asked for something else than the others: give all ranks the same codec with the same options, "
      "gradients of the same names and shapes in the same order, and the same $GTRAIN_COMPRESSION"));
}

}  // namespace

absl::Status Groups::Open(bool compressed) {
  int32_t most[] = {all_->machine() + 1, compressed ? 1 : 0, compressed ? 0 : 1};
  GT_RETURN_IF_ERROR(all_->AllReduce(most, 3, DType::kInt32, ReduceOp::kMax));
  if (most[1] == most[2]) return TheyDiffer(*all_, compressed ? 1 : 0);
  const int32_t machines = most[0];
  if (!compressed || machine_ != nullptr || machines == 1 || machines == all_->size()) {
    return absl::OkStatus();
  }
  GT_ASSIGN_OR_RETURN(machine_, all_->Split(all_->machine(), all_->rank()));
  GT_ASSIGN_OR_RETURN(leaders_, all_->Split(machine_->rank() == 0 ? 0 : -1, all_->rank()));
  largest_machine_ = machine_->size();
  return all_->AllReduce(&largest_machine_, 1, DType::kInt32, ReduceOp::kMax);
}

void Groups::Abort(const absl::Status& why) {
  for (Communicator* group : {machine_.get(), leaders_.get(), all_}) {
    if (group != nullptr) group->Abort(why);
  }
}

uint64_t Fnv1a(absl::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

std::string WordsOf(const CompressionOptions& options) {
  // Hexadecimal, so that no digit is left out. Seeds are the ranks' own.
  return absl::StrFormat("%s %d %d %a %d %a %d %a %d;", CodecName(options.codec), options.error_feedback,
                         static_cast<int>(options.residual), options.density, options.exact, options.momentum,
                         options.matrix_rank, options.optimizer_momentum, options.warmup_steps);
}

absl::Status AgreeOn(Communicator& communicator, const absl::Status& own, absl::string_view words) {
  const auto hash = static_cast<int64_t>(Fnv1a(words));
  // The least complement is the complement of the largest.
  int64_t least[] = {own.ok() ? communicator.size() : communicator.rank(), hash, ~hash};
  GT_RETURN_IF_ERROR(communicator.AllReduce(least, 3, DType::kInt64, ReduceOp::kMin));
  const auto first = static_cast<int>(least[0]);
  if (first == communicator.size())
    return least[1] == ~least[2] ? absl::OkStatus() : TheyDiffer(communicator, hash);
  struct {
    int32_t code = 0;
    char words[508] = {};
  } error;
  error.code = own.raw_code();
  if (!own.ok()) own.message().copy(error.words, sizeof(error.words) - 1);
  GT_RETURN_IF_ERROR(communicator.Broadcast(&error, sizeof(error), DType::kUint8, first));
  if (!own.ok()) return own;
  return absl::Status(static_cast<absl::StatusCode>(error.code),
                      absl::StrCat("rank ", first, ": ", error.words));
}

}  // namespace gtrain::comm
