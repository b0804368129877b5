// What makes one job another one than before, for people.
#pragma once
#include <string>
#include <vector>

#include "job/spec/job_spec.h"

namespace gtrain::cli {

// Of what the job hash is made of: "--lr 0.1 is now --lr 0.2", "env LR is new: 3". Pure; empty: nothing.
std::vector<std::string> JobChanges(const spec::JobSpec& before, const spec::JobSpec& now);

}  // namespace gtrain::cli
