#include "elastic/exec/likeness.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/safetensors.h"

namespace gtrain::elastic {
namespace {

constexpr size_t kNamedMax = 10;
constexpr char kMore[] = "and more";  // of a text that is longer than what is sent of it

using Text = std::array<char, 16 << 10>;

uint64_t HashOf(const std::string& text) {
  const ckpt::HashBytes bytes = ckpt::Xxh3Bytes(text);
  uint64_t hash = 0;
  static_assert(sizeof(hash) <= sizeof(bytes));
  std::memcpy(&hash, bytes.data(), sizeof(hash));
  return hash;
}

absl::StatusOr<std::string> TextOf(Communicator& comm, const std::string& own, int rank) {
  Text text{};
  if (comm.rank() == rank) std::memcpy(text.data(), own.data(), std::min(own.size(), text.size() - 1));
  GT_RETURN_IF_ERROR(comm.Broadcast(text.data(), text.size(), DType::kUint8, rank));
  return std::string(text.data());
}

std::string Named(const std::vector<int>& ranks) {
  const absl::Span<const int> first = absl::MakeSpan(ranks).first(std::min(ranks.size(), kNamedMax));
  const size_t more = ranks.size() - first.size();
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(first, ", "),
                      more == 0 ? "" : absl::StrCat(" and ", more, " more"));
}

// The first lines in which two texts differ.
std::pair<std::string, std::string> FirstUnlike(const std::string& one, const std::string& other) {
  const std::vector<std::string> ones = absl::StrSplit(one, '\n'), others = absl::StrSplit(other, '\n');
  const auto line = [](const std::vector<std::string>& of, size_t i) {
    return i < of.size() && !of[i].empty() ? of[i] : std::string(kMore);
  };
  for (size_t i = 0; i < std::max(ones.size(), others.size()); ++i) {
    if (line(ones, i) != line(others, i)) return {line(ones, i), line(others, i)};
  }
  return {kMore, kMore};
}

// Compares one of the hashes. `text`: that of this rank. `why`: of what the first rank that differs has, and
// of what the one that it is compared with has; with the names of both.
absl::Status Compare(Communicator& comm, absl::Span<const LikenessHashes> all, uint64_t LikenessHashes::*hash,
                     absl::Span<const int> sources, const std::string& text,
                     absl::FunctionRef<std::string(const std::vector<int>& others, const std::string& theirs,
                                                   int source, const std::string& wanted)>
                         why) {
  std::vector<int> others;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].*hash != all[static_cast<size_t>(sources[rank])].*hash)
      others.push_back(static_cast<int>(rank));
  }
  if (others.empty()) return absl::OkStatus();
  const int source = sources[static_cast<size_t>(others[0])];
  GT_ASSIGN_OR_RETURN(const std::string wanted, TextOf(comm, text, source));
  GT_ASSIGN_OR_RETURN(const std::string theirs, TextOf(comm, text, others[0]));
  const std::string error = why(others, theirs, source, wanted);
  const bool differs = std::ranges::count(others, comm.rank()) > 0;
  return differs ? absl::FailedPreconditionError(error) : absl::UnavailableError(error);
}

std::string WhyProgram(const std::vector<int>& others, const std::string& theirs, int source,
                       const std::string& wanted) {
  const auto& [odd, usual] = FirstUnlike(theirs, wanted);
  return absl::StrCat(
      Named(others), others.size() == 1 ? " trains" : " train", " something else than rank ", source,
      ", with whose state training goes on: ", odd,
      others.size() == 1 ? "" : absl::StrCat(" (rank ", others[0], ")"), " instead of ", usual,
      ". All ranks register the same state, gradients and samples, in the same order, also those that are "
      "started later: a batch that follows from the number of ranks changes while others train "
      "(elastic.global_batch of the job file does not), and a program that was edited is another one");
}

std::string WhyMachine(const std::vector<int>& others, const std::string& theirs, int source,
                       const std::string& wanted) {
  return absl::StrCat(
      "`elastic.determinism: bitwise` needs processors of one kind and the same numbers of threads: ",
      Named(others), others.size() == 1 ? " has " : " have ", theirs,
      others.size() == 1 ? "" : absl::StrCat(" (rank ", others[0], ")"), "; rank ", source,
      ", with whose bits training goes on, has ", wanted,
      ". Choose machines of one kind: `where: {labels: {...}}`");
}

}  // namespace

void Likeness::AddState(const std::string& name, DType dtype, absl::Span<const int64_t> shape,
                        const Sharding* cut) {
  std::string line =
      absl::StrCat("state '", name, "' of ", ckpt::DTypeName(dtype), "[", absl::StrJoin(shape, ","), "]");
  if (cut != nullptr) {
    for (const Split& split : cut->splits)
      absl::StrAppend(&line, ", dimension ", split.dim, " cut along ", split.axis,
                      split.rule == SplitRule::kChunk ? " in chunks" : "");
    for (const Only& only : cut->only) absl::StrAppend(&line, ", only at ", only.axis, " ", only.index);
  }
  state_.push_back(std::move(line));
}

void Likeness::AddGradient(size_t count) {
  gradients_.push_back(absl::StrCat("gradient ", gradients_.size(), " of ", count, " elements"));
}

void Likeness::SetSamples(const std::string& name, const sharding::SampleOptions& o) {
  samples_ = absl::StrCat("samples '", name, "' in batches of ", o.global_batch, ", ", o.samples,
                          " of them, ", o.epochs, o.epochs == 1 ? " epoch" : " epochs", ", seed ", o.seed,
                          o.shuffle ? ", shuffled" : ", in order", o.drop_last ? ", no short batch" : "");
}

LikenessHashes Likeness::hashes() const {
  return {HashOf(absl::StrCat(samples_, "\n", absl::StrJoin(state_, "\n"))),
          HashOf(absl::StrJoin(gradients_, "\n")), HashOf(machine_)};
}

absl::Status Likeness::Check(Communicator& comm, absl::Span<const LikenessHashes> all, int source,
                             absl::Span<const int> sources) const {
  const std::vector<int> one(all.size(), source);
  GT_RETURN_IF_ERROR(Compare(comm, all, &LikenessHashes::program, one,
                             absl::StrCat(samples_, "\n", absl::StrJoin(state_, "\n")), WhyProgram));
  GT_RETURN_IF_ERROR(
      Compare(comm, all, &LikenessHashes::gradients, sources, absl::StrJoin(gradients_, "\n"), WhyProgram));
  return Compare(comm, all, &LikenessHashes::machine, one, machine_, WhyMachine);
}

}  // namespace gtrain::elastic
