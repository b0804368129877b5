#include "launcher/cli/rank_output.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {

void RankOutput::Add(int rank, const std::string& host, bool is_stderr, absl::string_view bytes) {
  auto& [partial_host, text] = partial_[{rank, is_stderr}];
  partial_host = host;
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    text.append(bytes.data(), std::min(bytes.size(), end));
    while (text.size() > kLineBytesMax) {
      Complete(rank, host, text.substr(0, kLineBytesMax));
      text.erase(0, kLineBytesMax);
    }
    if (end == absl::string_view::npos) return;
    Complete(rank, host, std::move(text));
    text.clear();
    bytes.remove_prefix(end + 1);
  }
}

void RankOutput::Complete(int rank, const std::string& host, std::string text) {
  if (!text.empty() && text.back() == '\r') text.pop_back();
  Equal& equal = index_[text];
  const size_t before = equal.written[{host, rank}]++;
  if (before < equal.lines.size()) {
    lines_[equal.lines[before]].ranks[host].push_back(rank);
    return;
  }
  equal.lines.push_back(lines_.size());
  Line line;
  line.text = std::move(text);
  line.ranks[host].push_back(rank);
  lines_.push_back(std::move(line));
}

std::vector<std::string> RankOutput::Take(bool flush) {
  if (flush) {
    for (auto& [key, value] : partial_) {
      if (!value.second.empty()) Complete(key.first, value.first, std::move(value.second));
    }
    partial_.clear();
  }
  std::vector<std::string> out;
  for (const Line& line : lines_) {
    if (bare_) {
      out.push_back(SafeText(line.text));
      continue;
    }
    std::string who;
    for (const auto& [host, ranks] : line.ranks)
      absl::StrAppend(&who, who.empty() ? "" : " ", host, ":", PrintRanks(ranks));
    out.push_back(SafeText(absl::StrCat(who, ": ", line.text)));
  }
  lines_.clear();
  index_.clear();
  return out;
}

}  // namespace gtrain::cli
