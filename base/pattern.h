// Regular expressions that users write, over text that their programs print. RE2's syntax, which is Perl's
// without look-around and back-references: those are what makes other matchers take exponential time, and
// one line must not stop a daemon (fault P9).
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace re2 {
class RE2;
}

namespace gtrain {

// Thread-safe; copies share what was compiled. Matching takes time in proportion to the text and memory
// under a fixed bound.
class Pattern {
 public:
  // InvalidArgument: not a regular expression, or too large once its repetitions are written out.
  static absl::StatusOr<Pattern> Compile(absl::string_view text);

  int groups() const;
  // Returns the text of the first (group) where the pattern matches first; nullopt: no match, or no such
  // group. Bytes are Latin-1: output need not be UTF-8.
  std::optional<std::string> FirstGroup(absl::string_view text) const;

 private:
  explicit Pattern(std::shared_ptr<const re2::RE2> compiled) : compiled_(std::move(compiled)) {}

  std::shared_ptr<const re2::RE2> compiled_;
};

}  // namespace gtrain
