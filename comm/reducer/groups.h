// The communicators that compressed collectives go over: the one they are made from and, where several ranks
// share a machine and there are several machines, one of this machine and one of a rank of each machine. Made
// once and shared by all buckets of a reducer, so that a rank has at most two more of them, however many
// buckets and ranks there are: two splits of all n ranks, whose arenas are those of a machine's m ranks (2
// MiB and 2 MiB more for each of m) and, of the leaders, none. Open and AgreeOn are an all-reduce of three
// numbers each, one more behind the splits; only where ranks differ an all-gather of 8 bytes a rank, or a
// broadcast of 512, follows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "comm/reducer/reducer.h"

namespace gtrain::comm {

// Used by one collective at a time, in the same order on all ranks.
class Groups {
 public:
  explicit Groups(Communicator* all) : all_(all) {}

  // Collective. Makes the other two, the first time that it is called with `compressed`. InvalidArgument on
  // all ranks: `compressed` differs.
  absl::Status Open(bool compressed);

  // Ends what other ranks do in any of them: see Communicator::Abort. For what happens between two
  // collectives, and to pass on in all of them what one of them has returned.
  void Abort(const absl::Status& why);

  Communicator& all() const { return *all_; }
  // Both nullptr: all ranks talk to each other. Else the second is nullptr on all but one rank of each
  // machine.
  Communicator* machine() const { return machine_.get(); }
  Communicator* leaders() const { return leaders_.get(); }
  // Ranks on the machine that has the most of them; 1 if all ranks talk to each other.
  int largest_machine() const { return largest_machine_; }

 private:
  Communicator* const all_;
  std::unique_ptr<Communicator> machine_, leaders_;
  int32_t largest_machine_ = 1;
};

// Equal in all versions: names of checkpoints are made of it.
uint64_t Fnv1a(absl::string_view bytes);

// Describes the options: the words differ where anything differs that must be equal on all ranks.
std::string WordsOf(const CompressionOptions& options);

// Collective. Returns OK if `own` is OK on all ranks, else the own error, or that of the first rank that has
// one. The communicator stays usable. InvalidArgument on all ranks: `words` differ, of which only a hash is
// sent.
absl::Status AgreeOn(Communicator& communicator, const absl::Status& own, absl::string_view words);

// Returns the result of `body`, or the exception that leaves it as a status.
template <typename Body>
absl::Status Caught(const Body& body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("exception: ", e.what()));
  }
}

// Creates a collective in existing groups; the rest is as for CompressedCollective::Create.
absl::StatusOr<std::unique_ptr<CompressedCollective>> CreateCollective(
    std::shared_ptr<Groups> groups, const CompressionOptions& options, size_t count,
    const std::vector<std::vector<int64_t>>& shapes);

}  // namespace gtrain::comm
