// Rankfiles of launches: which host, and which place on it, each rank of a job has or is to have.
#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "job/spec/parse.h"
#include "launcher/cli/status_doc.h"

namespace gtrain::cli {

// A rankfile as `where.ranks` of the job.
absl::StatusOr<spec::Overlay> ReadRankfileFlag(const std::string& path);

// A rank where it is.
struct PlacedRank {
  int rank = 0, local_rank = 0;
  std::string node, hostname;
  std::vector<int> gpus;
};

// Writes where the ranks are. A slot counts GPUs, as many as a rank has, on its machine; where some rank
// there has none, or such as are no place of that sort, the ranks of the machine. A node whose hostname is no
// name for a file, or that of another node as well, goes by its id.
absl::Status WriteRankfile(const std::string& path, std::vector<PlacedRank> ranks);

// Those of a job that has places now.
absl::StatusOr<std::vector<PlacedRank>> PlacedRanksOf(const JobDoc& job);

}  // namespace gtrain::cli
