#include "launcher/cli/ask_actors.h"

#include <algorithm>

namespace gtrain::cli {
namespace {

constexpr size_t kTogether = 128;  // a user may have 500 such questions open

}  // namespace

std::vector<RankActors> AskActors(Cluster& cluster, const std::string& job, const std::vector<int>& ranks,
                                  const std::string& question) {
  std::vector<RankActors> said;
  for (size_t from = 0; from < ranks.size(); from += kTogether) {
    std::vector<core::ClientRequestBody> requests;
    for (size_t i = from; i < std::min(ranks.size(), from + kTogether); ++i)
      requests.push_back(core::ClientActors{JobId(job), ranks[i], question});
    for (const auto& answer : AskAll(cluster, std::move(requests), absl::Seconds(20)))
      said.push_back(ParseRankActors(ranks[said.size()], answer));
  }
  return said;
}

}  // namespace gtrain::cli
