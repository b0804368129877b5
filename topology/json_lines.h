// The line on which each value of a JSON document begins: the library that parses it does not keep that.
// PURE.
#pragma once
#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace gtrain::topology {

// JSON pointer ("/machines/3/names") to line, counted from 1. The members of an object have the line of their
// key. Of a document that does not parse: what comes before the error.
std::map<std::string, int> JsonLines(absl::string_view text);

// The line of the byte at `offset`.
int LineOf(absl::string_view text, size_t offset);

}  // namespace gtrain::topology
