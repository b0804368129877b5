// Copies of shards in a folder of this machine, in memory (tmpfs) or on a local disk. All processes of one
// user that know the folder share it, and one cap:
//
//   <root>/<job>/<attempt>/<shard>      whole: it came by a rename
//   <root>/.coming/<job>%<attempt>%<shard>%<pid>-<count>
//                                       being written; as long as it will be, and locked by its writer. One
//                                       that nobody locks is of a writer that died, and goes
//   <root>/.lock                        held while somebody looks what there is and makes room
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"
#include "checkpoint/port/near_tier.h"

namespace gtrain::ckpt {

// A file in <root>/.coming. Destroyed before Finish it is gone. Not thread-safe.
class ComingCopy {
 public:
  ComingCopy(UniqueFd fd, std::string path, std::string whole, uint64_t bytes)
      : fd_(std::move(fd)), path_(std::move(path)), whole_(std::move(whole)), left_(bytes) {}
  ComingCopy(ComingCopy&&) = default;
  ~ComingCopy();

  // OutOfRange: more bytes than were asked for.
  absl::Status Append(absl::string_view data);
  // All bytes are there: it is listed from now on.
  absl::Status Finish();

 private:
  UniqueFd fd_;
  std::string path_, whole_;
  uint64_t left_;
};

// Thread-safe.
class NearFolder {
 public:
  // The folder is made if it is missing. FailedPrecondition: it is not this user's alone.
  static absl::StatusOr<std::unique_ptr<NearFolder>> Open(const std::string& root, uint64_t bytes_max);

  // These work as in NearTier. InvalidArgument: the name is impossible.
  absl::StatusOr<std::vector<std::string>> Attempts(absl::string_view job);
  absl::StatusOr<std::vector<port::NearTier::Shard>> List(absl::string_view job, absl::string_view attempt);
  absl::Status Read(absl::string_view job, absl::string_view attempt, absl::string_view file, uint64_t offset,
                    absl::Span<char> out);
  // Makes room and reserves it. AlreadyExists: a whole copy of as many bytes is there.
  absl::StatusOr<ComingCopy> Begin(absl::string_view job, const port::NearTier::Copy& copy);

  std::string Describe() const;

 private:
  NearFolder(std::string root, uint64_t bytes_max) : root_(std::move(root)), bytes_max_(bytes_max) {}
  absl::StatusOr<std::string> PathOf(absl::string_view job, absl::string_view attempt,
                                     absl::string_view file) const;

  const std::string root_;
  const uint64_t bytes_max_;
};

// The jobs that have copies in `root`, a few thousand at most; none if it cannot be read.
std::vector<std::string> JobsWithCopies(const std::string& root);
// Everything below `root` of a job that is over. OK when there is nothing.
absl::Status DropNearCopies(const std::string& root, absl::string_view job);
// Removes `root` if no copy is in it. Nobody may use it any more.
void RemoveNearFolder(const std::string& root);

// One job's part of it.
std::unique_ptr<port::NearTier> MakeNearTier(std::shared_ptr<NearFolder> folder, std::string job);

}  // namespace gtrain::ckpt
