// One value of everything the codecs know, for their tests and as seeds of the fuzz targets.
#pragma once
#include <vector>

#include "runtime/core/values/messages.h"
#include "runtime/core/values/records.h"

namespace gtrain::wire {

// The samples have at least one of every alternative, every field away from its default.
std::vector<core::Message> SampleMessages();
std::vector<core::Record> SampleRecords();

// Parts of them.
JobId SampleJob();
Generation SampleGeneration();
core::RankStatus SampleStatus();
core::RankExit SampleExit(core::ExitCause cause);
core::GenerationGrant SampleGrant();
core::JobRecord SampleJobRecord();

}  // namespace gtrain::wire
