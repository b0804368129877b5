// JSON that others wrote: how deep it is nested. Pure.
#pragma once
#include "absl/strings/string_view.h"

namespace gtrain {

inline constexpr int kShallowDepthMax = 64;  // what gtrain itself writes has less than ten

// Returns `text`, or nothing, which no parser takes for JSON, where it is nested deeper than
// kShallowDepthMax. Call it before text of a file or of a peer is parsed: the library builds a value of any
// depth, but prints, copies and compares it by recursion, so that 100 KB of "[" would take the reader's
// stack.
absl::string_view ShallowJson(absl::string_view text);

}  // namespace gtrain
