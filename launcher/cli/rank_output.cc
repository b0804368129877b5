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

// 16 bytes that the compiler handles as one.
using Bytes = unsigned char __attribute__((vector_size(16)));

Bytes BytesAt(const char* data) {
  Bytes bytes;
  memcpy(&bytes, data, sizeof(bytes));
  return bytes;
}

// How many bytes at the start are nothing but printable ASCII, tabs and, with `line_ends`, those: what most
// lines are. They are shown as they are.
size_t PlainBytes(absl::string_view text, bool line_ends) {
  const unsigned char line_end = line_ends ? '\n' : '\t';
  // Of a vector or of a byte: not 0 where it is odd.
  const auto odd = [line_end](auto c) { return ((c < 0x20) | (c >= 0x7F)) & (c != '\t') & (c != line_end); };
  size_t i = 0;
  for (; i + sizeof(Bytes) <= text.size(); i += sizeof(Bytes)) {
    uint64_t any[2];
    const auto found = odd(BytesAt(text.data() + i));
    static_assert(sizeof(any) == sizeof(found));
    memcpy(any, &found, sizeof(any));
    if ((any[0] | any[1]) != 0) break;
  }
  while (i < text.size() && !odd(static_cast<unsigned char>(text[i]))) ++i;
  return i;
}

size_t CountLineEnds(absl::string_view text) {
  size_t count = 0, i = 0;
  while (i + sizeof(Bytes) <= text.size()) {
    Bytes counts = {};  // of every sixteenth byte, at most 255
    for (int k = 0; k < 255 && i + sizeof(Bytes) <= text.size(); ++k, i += sizeof(Bytes))
      counts -= reinterpret_cast<Bytes>(BytesAt(text.data() + i) == '\n');  // true is -1
    for (size_t k = 0; k < sizeof(Bytes); ++k) count += counts[k];
  }
  return count + static_cast<size_t>(std::count(text.begin() + static_cast<ptrdiff_t>(i), text.end(), '\n'));
}

bool IsPlain(absl::string_view text) { return PlainBytes(text, false) == text.size(); }

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
    if (options_.only_rank && stream.rows.idle()) {
      bytes.remove_prefix(AddPlainLines(stream, bytes));
      if (bytes.empty()) break;
    }
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

size_t RankOutput::AddPlainLines(const Stream& stream, absl::string_view bytes) {
  bytes = bytes.substr(0, PlainBytes(bytes, true));
  bytes = bytes.substr(0, bytes.rfind('\n') + 1);  // whole lines: npos + 1 is 0
  const size_t lines = CountLineEnds(bytes);
  if (lines == 0) return 0;
  const std::string& prefix = stream.prefix;
  std::string& out = End(stream.is_stderr);
  size_t at = out.size(), done = 0;
  out.resize(at + bytes.size() + lines * prefix.size());
  while (done < bytes.size()) {
    const char* line = bytes.data() + done;
    const char* end = static_cast<const char*>(memchr(line, '\n', bytes.size() - done));
    const size_t length = static_cast<size_t>(end + 1 - line);
    if (length > TextRows::kRowLengthMax) break;
    memcpy(&out[at], prefix.data(), prefix.size());
    memcpy(&out[at + prefix.size()], line, length);
    at += prefix.size() + length;
    done += length;
  }
  out.resize(at);
  return done;
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
