// A strict subset of YAML as a tree with positions. PURE. The only user of yaml-cpp.
//
// yaml-cpp's events do the lexing; anything outside the subset is refused with its place: anchors, aliases,
// tags, several documents, directives, complex keys (faults J1 J2 J6), depth over 32 (J3), duplicate keys
// (J4), more than 10 000 nodes or 1 MiB (J1 J13), and at the byte level BOM, NUL, tabs, carriage returns,
// control and bidi characters, invalid UTF-8 (J6). The meaning of a scalar is decided by the schema in
// parse.cc, never here: nothing is resolved to a bool, a number or a date by its looks (J5).
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/utf8.h"
#include "job/spec/report.h"

namespace gtrain::spec {

inline constexpr size_t kTextBytesMax = 1 << 20;
inline constexpr int kDepthMax = 32;
inline constexpr int kNodesMax = 10'000;

struct Entry;

struct Node {
  enum class Kind { kNull, kScalar, kSequence, kMapping };
  Kind kind = Kind::kNull;
  Place place;
  bool quoted = false;  // scalar in quotes or a block: a string whatever it looks like
  std::string scalar;
  std::vector<Node> items;     // kSequence
  std::vector<Entry> entries;  // kMapping, in the order of the file

  Node* Find(absl::string_view key);
  const Node* Find(absl::string_view key) const { return const_cast<Node*>(this)->Find(key); }
};

struct Entry {
  Node key, value;
};

// Reads one document. nullopt after errors that leave no tree to look at; otherwise the
// tree, with errors such as duplicate keys already in `report`.
std::optional<Node> ReadYaml(absl::string_view text, int source, Report& report);

// True for UTF-8 without NUL. `CharacterProblem` also refuses what must not stand raw in a file.
bool IsCleanText(absl::string_view text);

using ::gtrain::DecodeUtf8;  // of base/utf8.h

// Why this code point may not stand in a job file ("" = it may).
absl::string_view CharacterProblem(char32_t c);

}  // namespace gtrain::spec
