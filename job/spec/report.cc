#include "job/spec/report.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace gtrain::spec {

std::string FormatError(const SpecError& error) {
  if (error.line == 0) return absl::StrCat(error.source, ": ", error.message);
  return absl::StrCat(error.source, ":", error.line, ":", error.column, ": ", error.message);
}

int Report::AddSource(absl::string_view name) {
  sources_.emplace_back(name);
  return static_cast<int>(sources_.size()) - 1;
}

void Report::Error(const Place& place, absl::string_view message) {
  if (errors_.size() <= kErrorsMax) errors_.push_back({place, std::string(message)});
}

std::vector<SpecError> Report::Take() {
  std::stable_sort(errors_.begin(), errors_.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.place.source, a.place.line, a.place.column) <
           std::tie(b.place.source, b.place.line, b.place.column);
  });
  std::vector<SpecError> out;
  for (const Entry& entry : errors_) {
    const std::string& source = sources_[static_cast<size_t>(entry.place.source)];
    SpecError error{entry.place.line, entry.place.column, entry.message, source};
    if (out.size() == kErrorsMax) {
      error.message = "more errors follow; these are the first 100";
      out.push_back(std::move(error));
      break;
    }
    if (out.empty() || !(out.back() == error)) out.push_back(std::move(error));
  }
  errors_.clear();
  return out;
}

}  // namespace gtrain::spec
