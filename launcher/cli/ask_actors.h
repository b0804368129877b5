// Asks the processes of a job about their actors, by way of the head, for `gtrain actors` and `gtrain stack`.
#pragma once
#include <string>
#include <vector>

#include "launcher/cli/actor_docs.h"
#include "launcher/cli/context.h"

namespace gtrain::cli {

// One that does not answer is named and keeps nobody from hearing the others: RankActors::error.
std::vector<RankActors> AskActors(Cluster& cluster, const std::string& job, const std::vector<int>& ranks,
                                  const std::string& question);

}  // namespace gtrain::cli
