#include "base/pattern.h"

#include <re2/re2.h>

#include <utility>

namespace gtrain {
namespace {

// Bounds the program (about 10,000 instructions) and with it the time of one line.
constexpr int64_t kMemoryMax = 256 << 10;

}  // namespace

absl::StatusOr<Pattern> Pattern::Compile(absl::string_view text) {
  re2::RE2::Options options(re2::RE2::Latin1);
  options.set_log_errors(false);
  options.set_max_mem(kMemoryMax);
  auto compiled = std::make_shared<const re2::RE2>(re2::StringPiece(text.data(), text.size()), options);
  if (!compiled->ok()) return absl::InvalidArgumentError(compiled->error());
  return Pattern(std::move(compiled));
}

int Pattern::groups() const { return compiled_->NumberOfCapturingGroups(); }

std::optional<std::string> Pattern::FirstGroup(absl::string_view text) const {
  re2::StringPiece parts[2];
  if (groups() < 1 || !compiled_->Match(re2::StringPiece(text.data(), text.size()), 0, text.size(),
                                        re2::RE2::UNANCHORED, parts, 2)) {
    return std::nullopt;
  }
  return std::string(parts[1].data(), parts[1].size());
}

}  // namespace gtrain
