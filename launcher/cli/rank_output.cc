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

constexpr size_t kTextBlock = 256 << 10;

// 16 bytes that the compiler handles as one.
using Bytes = unsigned char __attribute__((vector_size(16)));

Bytes BytesAt(const char* data) {
  Bytes bytes;
  memcpy(&bytes, data, sizeof(bytes));
  return bytes;
}

// How many bytes at the start are nothing but printable ASCII, tabs and line ends: what most lines are. They
// are shown as they are.
size_t PlainBytes(absl::string_view text) {
  // Works on a vector and on a byte: not 0 where the character is odd.
  const auto odd = [](auto c) { return ((c < 0x20) | (c >= 0x7F)) & (c != '\t') & (c != '\n'); };
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
    it = streams_.insert({{rank, is_stderr}, {kNone, is_stderr, std::move(rows), "", kNone}}).first;
  }
  Stream& stream = it->second;
  if (stream.writer == kNone || writers_[stream.writer].host != host) stream.writer = WriterOf(host, rank);
  while (!bytes.empty()) {
    if (stream.rows.idle()) {
      bytes.remove_prefix(AddPlainLines(stream, bytes));
      if (bytes.empty()) break;
    }
    const size_t end = std::min(bytes.find('\n'), bytes.size() - 1) + 1;
    stream.rows.Write(bytes.substr(0, end));
    bytes.remove_prefix(end);
    // The cursor may go up again within these bytes.
    if (options_.live && !bytes.empty() && !stream.rows.full()) continue;
    for (const std::string& text : stream.rows.TakeFinished(false)) Complete(stream, text);
  }
}

uint32_t RankOutput::WriterOf(const std::string& host, int rank) {
  const auto it = std::find_if(writers_.begin(), writers_.end(),
                               [&](const Writer& w) { return w.rank == rank && w.host == host; });
  if (it != writers_.end()) return static_cast<uint32_t>(it - writers_.begin());
  writers_.push_back({host, rank, options_.bare ? "" : PrintWho({{host, {rank}}})});
  return static_cast<uint32_t>(writers_.size() - 1);
}

size_t RankOutput::AddPlainLines(Stream& stream, absl::string_view bytes) {
  bytes = bytes.substr(0, PlainBytes(bytes));
  bytes = bytes.substr(0, bytes.rfind('\n') + 1);  // whole lines: npos + 1 is 0
  size_t done = 0;
  std::string* const out = options_.only_rank && !bytes.empty() ? &End(stream.is_stderr) : nullptr;
  const std::string& prefix = writers_[stream.writer].prefix;
  size_t at = 0;
  if (out != nullptr) {
    at = out->size();
    out->resize(at + bytes.size() + CountLineEnds(bytes) * prefix.size());
  }
  while (done < bytes.size()) {
    const char* line = bytes.data() + done;
    const char* end = static_cast<const char*>(memchr(line, '\n', bytes.size() - done));
    const size_t length = static_cast<size_t>(end + 1 - line);
    if (length > TextRows::kRowLengthMax) break;
    if (out != nullptr) {
      memcpy(out->data() + at, prefix.data(), prefix.size());
      memcpy(out->data() + at + prefix.size(), line, length);
      at += prefix.size() + length;
    } else {
      Complete(stream, {line, length - 1});
    }
    done += length;
  }
  if (out != nullptr) out->resize(at);
  if (out != nullptr && at == 0) pieces_.pop_back();  // the first line is too long
  return done;
}

void RankOutput::Complete(Stream& stream, absl::string_view text) {
  if (options_.only_rank) {
    absl::StrAppend(&End(stream.is_stderr), writers_[stream.writer].prefix, text, "\n");
    return;
  }
  const std::pair<bool, absl::string_view> key(stream.is_stderr, text);
  bool anew = false;
  const auto it = index_.lazy_emplace(key, [&](const auto& make) {
    anew = true;
    make(std::pair(stream.is_stderr, Keep(text)), Equal());
  });
  Equal& equal = it->second;
  if (anew) {
    equal.begin = equal.end = equal.written = AddLine(stream, it->first.second);
    equal.writer = stream.writer;
    return;
  }
  uint32_t& written = equal.writer == stream.writer
                          ? equal.written
                          : written_.try_emplace({equal.begin, stream.writer}, kNone).first->second;
  written = written == kNone ? equal.begin : lines_[written].next_equal;
  // Each line is passed over once a writer, because the writer's last line only moves on.
  const auto before = [&](uint32_t line) { return stream.last != kNone && line <= stream.last; };
  if (before(equal.end)) written = kNone;
  while (written != kNone && before(written)) written = lines_[written].next_equal;
  if (written == kNone) {
    written = AddLine(stream, it->first.second);
    lines_[equal.end].next_equal = written;
    equal.end = written;
    return;
  }
  stream.last = written;
  Line& line = lines_[written];
  const auto other = static_cast<uint32_t>(others_.size());
  others_.push_back({stream.writer, kNone});
  (line.others_begin == kNone ? line.others_begin : others_[line.others_end].next) = other;
  line.others_end = other;
}

uint32_t RankOutput::AddLine(Stream& stream, absl::string_view text) {
  lines_.push_back({.text = text, .is_stderr = stream.is_stderr, .writer = stream.writer});
  return stream.last = static_cast<uint32_t>(lines_.size() - 1);
}

absl::string_view RankOutput::Keep(absl::string_view text) {
  if (texts_.empty() || texts_.back().capacity() - texts_.back().size() < text.size()) {
    texts_.emplace_back();
    texts_.back().reserve(std::max(kTextBlock, text.size()));
  }
  std::string& block = texts_.back();
  const size_t at = block.size();
  block.append(text.data(), text.size());
  return absl::string_view(block).substr(at);
}

const std::string& RankOutput::PrefixOf(const Line& line) {
  if (options_.bare || line.others_begin == kNone) return writers_[line.writer].prefix;
  size_t known = 0;
  const auto is_next = [&](uint32_t writer) { return known < group_.size() && group_[known++] == writer; };
  bool same = is_next(line.writer);
  for (uint32_t i = line.others_begin; same && i != kNone; i = others_[i].next)
    same = is_next(others_[i].writer);
  if (same && known == group_.size()) return group_prefix_;
  group_ = {line.writer};
  for (uint32_t i = line.others_begin; i != kNone; i = others_[i].next) group_.push_back(others_[i].writer);
  std::map<std::string, std::vector<int>> ranks;
  for (const uint32_t writer : group_) ranks[writers_[writer].host].push_back(writers_[writer].rank);
  return group_prefix_ = PrintWho(ranks);
}

std::string& RankOutput::End(bool is_stderr) {
  if (pieces_.empty() || pieces_.back().is_stderr != is_stderr) pieces_.push_back({is_stderr, ""});
  return pieces_.back().text;
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
  for (const Line& line : lines_) absl::StrAppend(&End(line.is_stderr), PrefixOf(line), line.text, "\n");
  lines_.clear();
  for (auto& [key, stream] : streams_) stream.last = kNone;
  others_.clear();
  index_.clear();
  written_.clear();
  if (texts_.size() > 1) texts_.resize(1);
  if (!texts_.empty()) texts_[0].clear();
  return std::exchange(pieces_, {});
}

std::vector<std::string> RankOutput::Unfinished() const {
  std::vector<std::string> out;
  if (!options_.live) return out;
  for (const auto& [key, stream] : streams_) {
    for (std::string& row : stream.rows.Unfinished())
      out.push_back(writers_[stream.writer].prefix + std::move(row));
  }
  return out;
}

}  // namespace gtrain::cli
