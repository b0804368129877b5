// Describes for people what makes a job another one than before.
#pragma once
#include <string>
#include <vector>

#include "job/spec/job_spec.h"

namespace gtrain::cli {

// Lists the changes that the job hash covers: "--lr 0.1 is now --lr 0.2", "env LR is new: 3". Pure; empty:
// none.
std::vector<std::string> JobChanges(const spec::JobSpec& before, const spec::JobSpec& now);

}  // namespace gtrain::cli
