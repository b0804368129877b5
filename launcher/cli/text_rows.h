// The rows that a terminal shows of a stream of text. The program's carriage returns, colours and, if it has
// the terminal to itself, cursor movements are carried out here, on rows of characters: no byte of its
// control codes reaches the user's terminal, only colours written anew (fault P9).
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace gtrain::cli {

// A colour is 0 for none, else 1 + a number of the palette of 256, or kDirect + 0xRRGGBB.
struct TextStyle {
  static constexpr uint32_t kDirect = 1u << 24;
  uint32_t foreground = 0, background = 0;
  uint8_t flags = 0;  // bit N: SGR N + 1, of bold, faint, italic, underline, inverse (7) and struck (9)
  bool operator==(const TextStyle&) const = default;
};

// Not thread-safe. After TakeFinished it holds kRowsMax rows of kRowLengthMax characters at most.
class TextRows {
 public:
  static constexpr size_t kRowLengthMax = 16 << 10;  // a longer row goes on in the next one
  static constexpr size_t kRowsMax = 32;
  static constexpr size_t kJumpMax = 512;  // columns; what lies between is filled with blanks

  // `cursor`: movements between rows are carried out; else they are shown as \xNN. `colour`: rows come with
  // their colours; else without.
  TextRows(bool cursor, bool colour) : cursor_(cursor), colour_(colour) {}

  void Write(absl::string_view bytes);
  // Text that ends in the middle of a character or of a control code is shown as it is.
  void Flush();
  // Rows that will not change any more, the oldest first. With `all` also those that might.
  std::vector<std::string> TakeFinished(bool all);
  // The others, the last one being written.
  std::vector<std::string> Unfinished() const;
  // The row being written, if a carriage return has begun it anew; else "".
  std::string Redrawn() const;
  bool full() const { return rows_.size() > kRowsMax; }  // TakeFinished is due
  // Neither holds nor has to remember anything: plain lines need not go through here.
  bool idle() const;

 private:
  struct Cell {
    char32_t character = U' ';
    TextStyle style;
  };
  using Row = std::vector<Cell>;

  void Put(char32_t character);
  void PutEscaped(absl::string_view bytes);
  void NewRow();
  void Control(char byte);
  // The bytes of the control sequence that `text` begins with; 0: none that is carried out. npos: its end has
  // not come yet.
  size_t Sequence(absl::string_view text);
  bool Obey(absl::string_view parameters, char final);
  void MoveUp(size_t rows);
  std::string Print(const Row& row) const;

  const bool cursor_, colour_;
  std::deque<Row> rows_ = {Row()};
  size_t row_ = 0, column_ = 0;  // of the cursor
  bool redrawn_ = false;
  size_t up_ = 0;  // the most rows that the cursor went up at once
  TextStyle style_;
  std::string cut_;  // the beginning of a character or of a control sequence
};

}  // namespace gtrain::cli
