// JobSpec -> canonical YAML and its hash. PURE.
#pragma once
#include <string>
#include <vector>

#include "job/spec/job_spec.h"

namespace gtrain::spec {

// The canonical text: keys in the order of job_spec.h, defaults left out, strings in double
// quotes, `run` as a list. ParseCanonical reads back an equal value. This is what travels.
std::string PrintJob(const JobSpec& spec);

// The value of `where.ranks` as YAML on one line.
std::string PrintRanksOn(const std::vector<RanksOn>& places);

// A share of a GPU in thousandths: "0.5".
std::string PrintGpuShare(int share);

// 32 hex digits over what decides whether a checkpoint of one run may be continued by
// another: run, script, setup, per, mesh and env. Not the name, the size, the place, budgets or paths
// of the job, so a job may be resumed with other ranks or resources. FNV-1a, 128 bits, over their
// canonical text; stable across versions of gtrain.
std::string JobHash(const JobSpec& spec);

}  // namespace gtrain::spec
