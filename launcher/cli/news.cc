#include "launcher/cli/news.h"

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace gtrain::cli {

bool News::Worth(const EventDoc& event) {
  if (event.kind == "checkpoint") return false;
  if (event.kind == "state" && !absl::StartsWith(event.text, "RECONFIGURING")) {
    reason_.clear();
    return true;
  }
  if (event.kind == "fault" || event.kind == "resize") {
    reason_ = event.text;
    return true;
  }
  if (event.kind != "revoke" && event.kind != "state") return true;
  // "generation 3 is over: WHY", "RECONFIGURING: WHY" and, last, "RECONFIGURING: WHY; VERDICT"
  const size_t colon = event.text.find(": ");
  if (colon == std::string::npos) return true;
  const absl::string_view why = absl::string_view(event.text).substr(colon + 2);
  if (!reason_.empty() && why == reason_) return false;
  reason_ = std::string(why);
  return true;
}

}  // namespace gtrain::cli
