// Names for the memory of gtrain_state_allocate, so that a write to it at the wrong time can be said.
#pragma once

namespace gtrain::capi {

// The state whose memory begins at `data` has this name. Nothing happens where the memory is the program's.
void NameState(const void* data, const char* name);

}  // namespace gtrain::capi
