// The owner of a run directory. The first process that writes into the run directory of a job writes a file
// there that names the job. Files that another job left there, of a cluster that was made anew or by a
// person's own hand, are then neither continued nor shown as this job's. Several machines may share the
// directory: all write the same.
#pragma once
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/ids.h"
#include "base/unique_fd.h"

namespace gtrain {

inline constexpr char kRunFolderOwnerFile[] = ".gtrain-job";

struct RunFolderOwner {
  ClusterId cluster;
  JobId job;
  std::string request;  // of the submit that made the job; empty: not compared
};

// True: the folder is the owner's. False: nobody has said whose it is. FailedPrecondition: it is another
// job's, and the message says what to do. `folder` is what OpenFolder opened at `path`.
absl::StatusOr<bool> OwnsRunFolder(const UniqueFd& folder, const std::string& path,
                                   const RunFolderOwner& owner);

// Says that the folder is the owner's, which the caller has asked about before. FailedPrecondition: another
// job said so meanwhile. On a full disk nothing is said, and that is no error: a job runs there too.
absl::Status ClaimRunFolder(const UniqueFd& folder, const std::string& path, const RunFolderOwner& owner);

}  // namespace gtrain
