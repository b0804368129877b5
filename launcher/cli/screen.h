// The output of `launch` and `attach`. On a terminal: rank output scrolls, a block of status lines stays
// below it. Otherwise: rank output on stdout, gtrain's own lines on stderr.
#pragma once
#include <string>
#include <vector>

#include "base/clock.h"
#include "launcher/cli/rank_output.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {

// The status block, each line at most `columns` wide. Pure.
std::vector<std::string> StatusBlock(const JobDoc& job, const std::string& hint, int columns);

// Not thread-safe. Methods return false when nobody reads the output any more.
class Screen {
 public:
  Screen();
  ~Screen();  // leaves the terminal with the block gone and the cursor at a line's start
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  bool terminal() const { return terminal_; }
  // Shows output of ranks, which is already safe. `unfinished`, lines that are still being written, are shown
  // on a terminal.
  bool Output(const std::vector<RankOutput::Piece>& pieces, std::vector<std::string> unfinished);
  bool Say(const std::string& line, Tone tone = Tone::kNews);  // of gtrain
  // Draws at most four times a second on a terminal; elsewhere it writes a progress line every five seconds
  // when the step moved.
  bool Update(const JobDoc& job, const std::string& hint, Instant now);

 private:
  bool Above(const std::string& text);  // prints text above the block

  const bool terminal_;
  std::vector<std::string> block_;       // shown now, and the last on the terminal
  int continued_ = 0;                    // TimesContinued when it was drawn
  std::vector<std::string> unfinished_;  // its first lines
  std::optional<Instant> updated_;
  std::optional<int64_t> said_step_, said_checkpoint_;
};

}  // namespace gtrain::cli
