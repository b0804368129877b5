#include "launcher/cli/text_rows.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "job/spec/yaml_tree.h"

namespace gtrain::cli {
namespace {

constexpr size_t kParametersMax = 48;

void AppendUtf8(char32_t c, std::string& out) {
  const auto add = [&out](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) return add(c);
  if (c < 0x800) {
    add(0xC0 | c >> 6);
  } else if (c < 0x10000) {
    add(0xE0 | c >> 12);
    add(0x80 | (c >> 6 & 0x3F));
  } else {
    add(0xF0 | c >> 18);
    add(0x80 | (c >> 12 & 0x3F));
    add(0x80 | (c >> 6 & 0x3F));
  }
  add(0x80 | (c & 0x3F));
}

// Bytes that the first of them asks for, whether or not they are there.
size_t LengthOfCharacter(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
}

// "38;5;N" and "38;2;R;G;B", of which `at` is the 38; moves on to the last of them.
std::optional<uint32_t> ExtendedColour(const std::vector<uint32_t>& codes, size_t& at) {
  const size_t left = codes.size() - at - 1;
  if (left >= 2 && codes[at + 1] == 5 && codes[at + 2] < 256) return 1 + codes[at += 2];
  if (left < 4 || codes[at + 1] != 2) return std::nullopt;
  const uint32_t red = codes[at + 2], green = codes[at + 3], blue = codes[at + 4];
  if (red > 255 || green > 255 || blue > 255) return std::nullopt;
  at += 4;
  return TextStyle::kDirect + (red << 16 | green << 8 | blue);
}

// False: it is no emphasis.
bool ApplyEmphasis(uint32_t code, TextStyle& style) {
  const auto set = [&style](uint32_t flag) { style.flags |= static_cast<uint8_t>(1u << (flag - 1)); };
  const auto clear = [&style](uint32_t flag) { style.flags &= static_cast<uint8_t>(~(1u << (flag - 1))); };
  if ((code >= 1 && code <= 4) || code == 7) {
    set(code);
  } else if (code == 9) {
    set(8);
  } else if (code == 22) {
    clear(1);
    clear(2);
  } else if (code == 23 || code == 24 || code == 27) {
    clear(code - 20);
  } else if (code == 29) {
    clear(8);
  } else {
    return false;
  }
  return true;
}

// One of sixteen colours, or 0 for none; codes begin at `base`, 30 for the foreground and 40 for the
// background.
std::optional<uint32_t> PlainColour(uint32_t code, uint32_t base) {
  if (code >= base && code <= base + 7) return 1 + code - base;
  if (code >= base + 60 && code <= base + 67) return 1 + code - (base + 60) + 8;
  if (code == base + 9) return 0;
  return std::nullopt;
}

// False for what is no colour or emphasis: nothing blinks, nothing is hidden.
bool ApplyCode(const std::vector<uint32_t>& codes, size_t& at, TextStyle& style) {
  const uint32_t code = codes[at];
  if (code == 0) {
    style = TextStyle();
  } else if (ApplyEmphasis(code, style)) {
    return true;
  } else if (const std::optional<uint32_t> foreground = PlainColour(code, 30)) {
    style.foreground = *foreground;
  } else if (const std::optional<uint32_t> background = PlainColour(code, 40)) {
    style.background = *background;
  } else if (code == 38 || code == 48) {
    const std::optional<uint32_t> colour = ExtendedColour(codes, at);
    if (!colour) return false;
    (code == 38 ? style.foreground : style.background) = *colour;
  } else {
    return code == 25 || code == 28;  // the ends of what is never begun
  }
  return true;
}

std::optional<TextStyle> StyleAfter(absl::string_view parameters, TextStyle style) {
  std::vector<uint32_t> codes;
  for (const absl::string_view part : absl::StrSplit(parameters, ';')) {
    uint32_t code = 0;
    if (!part.empty() && !absl::SimpleAtoi(part, &code)) return std::nullopt;
    codes.push_back(code);
  }
  for (size_t at = 0; at < codes.size(); ++at) {
    if (!ApplyCode(codes, at, style)) return std::nullopt;
  }
  return style;
}

void AppendColour(uint32_t colour, uint32_t base, std::string& out) {
  if (colour == 0) return;
  if (colour >= TextStyle::kDirect) {
    absl::StrAppend(&out, ";", base + 8, ";2;", colour >> 16 & 255, ";", colour >> 8 & 255, ";",
                    colour & 255);
  } else if (const uint32_t number = colour - 1; number < 8) {
    absl::StrAppend(&out, ";", base + number);
  } else if (number < 16) {
    absl::StrAppend(&out, ";", base + 60 + number - 8);
  } else {
    absl::StrAppend(&out, ";", base + 8, ";5;", number);
  }
}

void AppendStyle(const TextStyle& style, std::string& out) {
  out += "\x1b[0";
  for (int bit = 0; bit < 8; ++bit) {
    if (style.flags >> bit & 1) absl::StrAppend(&out, ";", bit == 7 ? 9 : bit + 1);
  }
  AppendColour(style.foreground, 30, out);
  AppendColour(style.background, 40, out);
  out += "m";
}

}  // namespace

void TextRows::Write(absl::string_view bytes) {
  std::string joined;
  if (!cut_.empty()) {
    joined = std::exchange(cut_, "");
    joined.append(bytes.data(), bytes.size());
    bytes = joined;
  }
  for (size_t pos = 0; pos < bytes.size();) {
    const absl::string_view left = bytes.substr(pos);
    const size_t start = pos;
    if (left[0] == '\x1b') {
      const size_t length = Sequence(left);
      if (length == absl::string_view::npos) {
        cut_ = std::string(left);
        return;
      }
      if (length == 0) PutEscaped(left.substr(0, 1));
      pos += std::max<size_t>(1, length);
    } else if (const std::optional<char32_t> c = spec::DecodeUtf8(bytes, pos)) {
      if (*c < 0x20 && *c != U'\t') {
        Control(left[0]);
      } else if (*c != U'\t' && !spec::CharacterProblem(*c).empty()) {
        PutEscaped(bytes.substr(start, pos - start));
      } else {
        Put(*c);
      }
    } else if (left.size() < LengthOfCharacter(left[0])) {
      cut_ = std::string(left);
      return;
    } else {
      PutEscaped(left.substr(0, 1));
      ++pos;
    }
  }
}

void TextRows::Flush() { PutEscaped(std::exchange(cut_, "")); }

void TextRows::Put(char32_t character) {
  if (column_ >= kRowLengthMax) NewRow();
  Row& row = rows_[row_];
  if (column_ >= row.size()) row.resize(column_ + 1);
  row[column_++] = {character, style_};
}

void TextRows::PutEscaped(absl::string_view bytes) {
  for (const char byte : bytes) {
    if (byte >= 0x20 && byte < 0x7F) {
      Put(static_cast<char32_t>(byte));
      continue;
    }
    for (const char c : absl::StrFormat("\\x%02x", static_cast<unsigned char>(byte)))
      Put(static_cast<char32_t>(c));
  }
}

void TextRows::NewRow() {
  redrawn_ = false;
  column_ = 0;
  if (++row_ == rows_.size()) rows_.emplace_back();
}

void TextRows::Control(char byte) {
  if (byte == '\n') return NewRow();
  if (byte == '\r') {
    redrawn_ = redrawn_ || !rows_[row_].empty();
    column_ = 0;
  } else if (byte == '\b' && cursor_) {
    column_ -= std::min<size_t>(column_, 1);
  } else {
    PutEscaped(absl::string_view(&byte, 1));
  }
}

size_t TextRows::Sequence(absl::string_view text) {
  if (text.size() == 1) return absl::string_view::npos;
  if (text[1] != '[') return 0;
  size_t end = 2;
  while (end < text.size() && end < kParametersMax &&
         (absl::ascii_isdigit(static_cast<unsigned char>(text[end])) || text[end] == ';' || text[end] == '?'))
    ++end;
  if (end == text.size() && end < kParametersMax) return absl::string_view::npos;
  if (end == text.size() || !Obey(text.substr(2, end - 2), text[end])) return 0;
  return end + 1;
}

bool TextRows::Obey(absl::string_view parameters, char final) {
  if (final == 'm') {
    const std::optional<TextStyle> style = StyleAfter(parameters, style_);
    if (style) style_ = *style;
    return style.has_value();
  }
  // Whether a cursor blinks over the progress bar is not shown, and no business of others.
  if (parameters == "?25") return cursor_ && (final == 'l' || final == 'h');
  uint32_t number = 0;
  if (!parameters.empty() && !absl::SimpleAtoi(parameters, &number)) return false;
  Row& row = rows_[row_];
  if (final == 'K') {
    if (number == 0) row.resize(std::min(row.size(), column_));
    if (number == 1) std::fill_n(row.begin(), std::min(row.size(), column_ + 1), Cell());
    if (number == 2) row.clear();
    return number <= 2;
  }
  if (!cursor_) return false;
  const size_t steps = std::min<size_t>(std::max<uint32_t>(number, 1), kJumpMax);
  switch (final) {
    case 'A':
      MoveUp(steps);
      return true;
    case 'B':
      row_ = std::min(row_ + steps, rows_.size() - 1);
      return true;
    case 'C':
      column_ = std::min(column_ + steps, std::max(column_, kJumpMax));
      return true;
    case 'D':
      column_ -= std::min(column_, steps);
      return true;
    case 'G':
      column_ = steps - 1;
      return true;
    case 'J':
      if (number != 0) return false;
      row.resize(std::min(row.size(), column_));
      rows_.resize(row_ + 1);
      return true;
    default:
      return false;
  }
}

void TextRows::MoveUp(size_t rows) {
  rows = std::min(rows, row_);
  row_ -= rows;
  up_ = std::max(up_, std::min(rows, kRowsMax / 2));
}

std::vector<std::string> TextRows::TakeFinished(bool all) {
  if (all) Flush();
  std::vector<std::string> out;
  // A program that went up before may do so again.
  size_t finished = row_ - std::min(row_, up_);
  if (rows_.size() - finished > kRowsMax) finished = rows_.size() - kRowsMax;
  if (all) finished = rows_.back().empty() ? rows_.size() - 1 : rows_.size();
  for (size_t i = 0; i < finished; ++i) {
    out.push_back(Print(rows_.front()));
    rows_.pop_front();
  }
  row_ -= std::min(row_, finished);
  if (!all) return out;
  redrawn_ = false;
  rows_ = {Row()};
  row_ = column_ = 0;
  return out;
}

std::vector<std::string> TextRows::Unfinished() const {
  std::vector<std::string> out;
  const size_t shown = rows_.size() - (rows_.back().empty() ? 1 : 0);
  for (size_t i = 0; i < shown; ++i) out.push_back(Print(rows_[i]));
  return out;
}

std::string TextRows::Redrawn() const { return redrawn_ ? Print(rows_[row_]) : ""; }

bool TextRows::idle() const {
  return cut_.empty() && rows_.size() == 1 && rows_[0].empty() && column_ == 0 && up_ == 0 &&
         style_ == TextStyle();
}

std::string TextRows::Print(const Row& row) const {
  std::string out;
  TextStyle now;
  for (size_t i = 0; i < row.size(); ++i) {
    if (colour_ && row[i].style != now) AppendStyle(now = row[i].style, out);
    AppendUtf8(row[i].character, out);
  }
  if (now != TextStyle()) out += "\x1b[0m";
  return out;
}

}  // namespace gtrain::cli
