#include "launcher/cli/rank_output.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/units.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {
namespace {

// Nothing but printable ASCII and tabs: what most lines are. Such a line is shown as it is.
bool IsPlain(absl::string_view text) {
  constexpr uint64_t kOnes = 0x0101010101010101, kHigh = 0x80 * kOnes;
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t word = 0;
    memcpy(&word, text.data() + i, 8);
    // The high bit of a byte: it is 0x7F or above, or below a blank.
    const uint64_t odd = (word | (word + kOnes) | (((word | kHigh) - 0x20 * kOnes) ^ kHigh)) & kHigh;
    if (odd != 0) break;
  }
  return std::all_of(text.begin() + static_cast<ptrdiff_t>(i), text.end(),
                     [](char c) { return (c >= 0x20 && c < 0x7F) || c == '\t'; });
}

std::string PrintWho(const std::map<std::string, std::vector<int>>& ranks) {
  std::string who;
  for (const auto& [host, numbers] : ranks)
    absl::StrAppend(&who, who.empty() ? "" : " ", host, ":", PrintRanks(numbers));
  return SafeText(who) + ": ";
}

}  // namespace

void RankOutput::Add(int rank, const std::string& host, bool is_stderr, absl::string_view bytes) {
  auto it = streams_.find({rank, is_stderr});
  if (it == streams_.end()) {
    TextRows rows(options_.live, is_stderr ? options_.colour_err : options_.colour_out);
    it = streams_.insert({{rank, is_stderr}, {rank, is_stderr, "", "", std::move(rows), ""}}).first;
  }
  Stream& stream = it->second;
  if (stream.prefix.empty() || stream.host != host) {
    stream.host = host;
    stream.prefix = options_.bare ? "" : PrintWho({{host, {rank}}});
  }
  while (!bytes.empty()) {
    const size_t end = std::min(bytes.find('\n'), bytes.size() - 1) + 1;
    const absl::string_view line = bytes.substr(0, end);
    bytes.remove_prefix(end);
    if (line.back() == '\n' && line.size() <= TextRows::kRowLengthMax && stream.rows.idle() &&
        IsPlain(line.substr(0, end - 1))) {
      Complete(stream, line.substr(0, end - 1));
      continue;
    }
    stream.rows.Write(line);
    // The cursor may go up again within these bytes.
    if (options_.live && !bytes.empty() && !stream.rows.full()) continue;
    for (const std::string& text : stream.rows.TakeFinished(false)) Complete(stream, text);
  }
}

std::string& RankOutput::End(bool is_stderr) {
  if (pieces_.empty() || pieces_.back().is_stderr != is_stderr) pieces_.push_back({is_stderr, ""});
  return pieces_.back().text;
}

void RankOutput::Complete(const Stream& stream, absl::string_view text) {
  if (options_.only_rank) {
    absl::StrAppend(&End(stream.is_stderr), stream.prefix, text, "\n");
    return;
  }
  Equal& equal = index_[{stream.is_stderr, std::string(text)}];
  const size_t before = equal.written[{stream.host, stream.rank}]++;
  if (before < equal.lines.size()) {
    lines_[equal.lines[before]].ranks[stream.host].push_back(stream.rank);
    return;
  }
  equal.lines.push_back(lines_.size());
  lines_.push_back({stream.is_stderr, std::string(text), {{stream.host, {stream.rank}}}});
}

void RankOutput::AddRedrawn(Instant now) {
  constexpr absl::Duration kEvery = absl::Seconds(5);
  if (options_.live || now - redrawn_at_ < kEvery) return;
  redrawn_at_ = now;
  for (auto& [key, stream] : streams_) {
    std::string row = stream.rows.Redrawn();
    if (row.empty() || row == stream.redrawn) continue;
    Complete(stream, row);
    stream.redrawn = std::move(row);
  }
}

void RankOutput::EndLines() {
  for (auto& [key, stream] : streams_) {
    for (const std::string& text : stream.rows.TakeFinished(true)) Complete(stream, text);
  }
}

std::vector<RankOutput::Piece> RankOutput::Take(bool flush) {
  if (flush) EndLines();
  for (const Line& line : lines_) {
    absl::StrAppend(&End(line.is_stderr), options_.bare ? "" : PrintWho(line.ranks), line.text, "\n");
  }
  lines_.clear();
  index_.clear();
  return std::exchange(pieces_, {});
}

std::vector<std::string> RankOutput::Unfinished() const {
  std::vector<std::string> out;
  if (!options_.live) return out;
  for (const auto& [key, stream] : streams_) {
    for (std::string& row : stream.rows.Unfinished()) out.push_back(stream.prefix + std::move(row));
  }
  return out;
}

}  // namespace gtrain::cli
