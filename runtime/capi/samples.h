// How checkpointers of the C interface save and load the cursors of sample ledgers.
#pragma once
#include "absl/status/status.h"
#include "runtime/capi/handles.h"

namespace gtrain::capi {

// InvalidArgument says which number is out of its bounds.
absl::Status ReadSampleOptions(const gtrain_session& session, const gtrain_samples_options& in,
                               gtrain_samples::Parts* parts);
// Brings the cursors into the registered blocks. Before each save that is not skipped.
void SaveSamples(gtrain_checkpointer* checkpointer);
// Takes the cursors from the registered blocks, after a restore. InvalidArgument: the checkpoint was trained
// on other data. DataLoss: a cursor is nowhere in the data.
absl::Status LoadSamples(gtrain_checkpointer* checkpointer);

}  // namespace gtrain::capi
