// Where something was written and what is wrong with it; the parser collects all
// of it in one pass. PURE.
#pragma once
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace gtrain::spec {

// A place in one of the texts a job is made of: the file, or a flag such as `--set ranks=8`.
struct Place {
  int source = 0;  // index into Report's sources
  int line = 0;    // 1-based; 0 = the source as a whole (flags)
  int column = 0;  // 1-based, in bytes
};

struct SpecError {
  int line = 0;
  int column = 0;
  std::string message;
  std::string source;  // file name or flag
  bool operator==(const SpecError&) const = default;
};

// "file:line:column: message", or "flag: message".
std::string FormatError(const SpecError& error);

// Not thread-safe; owned by one parse.
class Report {
 public:
  static constexpr size_t kErrorsMax = 100;

  int AddSource(absl::string_view name);
  void Error(const Place& place, absl::string_view message);
  bool empty() const { return errors_.empty(); }
  // Returns the errors in the order of their places; at most kErrorsMax, then one line that says there were
  // more.
  std::vector<SpecError> Take();

 private:
  struct Entry {
    Place place;
    std::string message;
  };
  std::vector<std::string> sources_;
  std::vector<Entry> errors_;
};

}  // namespace gtrain::spec
