// What the sample ledgers of the C interface share with its elastic runs and checkpointers.
#pragma once
#include "absl/status/status.h"
#include "runtime/capi/handles.h"

namespace gtrain::capi {

// InvalidArgument says which number is out of its bounds.
absl::Status ReadSampleOptions(const gtrain_session& session, const gtrain_samples_options& in,
                               gtrain_samples::Parts* parts);
// Rank 0 says in the log that the job file and the program name batches of different sizes, and which one
// holds. Where only one of them names any, or both name the same, nothing is said.
void WarnOfOtherBatch(const Session& session, int64_t batch);
// Brings the cursors into the registered blocks. Before each save that is not skipped.
void SaveSamples(gtrain_checkpointer* checkpointer);
// Takes the cursors from the registered blocks, after a restore. InvalidArgument: the checkpoint was trained
// on other data. DataLoss: a cursor is nowhere in the data.
absl::Status LoadSamples(gtrain_checkpointer* checkpointer);

}  // namespace gtrain::capi
