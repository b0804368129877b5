#include "launcher/cli/screen.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/units.h"

namespace gtrain::cli {
namespace {

constexpr absl::Duration kRedrawInterval = absl::Milliseconds(250);
constexpr absl::Duration kLineInterval = absl::Seconds(5);
constexpr size_t kHostsShown = 8;

bool WriteToStderr(const std::string& text) {
  return std::fwrite(text.data(), 1, text.size(), stderr) == text.size() && std::fflush(stderr) == 0;
}

}  // namespace

std::vector<std::string> StatusBlock(const JobDoc& job, const std::string& hint, int columns) {
  std::vector<std::string> lines;
  lines.push_back(absl::StrCat("-- ", SafeText(job.id), " -- ", SafeText(job.state), " -- generation ",
                               job.generation, ", ", job.world_size, job.world_size == 1 ? " rank" : " ranks",
                               job.run_time ? absl::StrCat(" -- ", PrintSpan(*job.run_time)) : ""));
  lines.push_back(absl::StrCat("   ", SafeText(job.reason)));
  if (!job.stuck.empty()) lines.push_back(absl::StrCat("   ", SafeText(job.stuck)));
  std::map<std::string, std::map<std::string, std::vector<int>>> hosts;
  for (const RankDoc& rank : job.ranks) hosts[rank.hostname][rank.state].push_back(rank.rank);
  size_t shown = 0;
  for (const auto& [host, states] : hosts) {
    if (++shown > kHostsShown) {
      lines.push_back(absl::StrCat("   and ", hosts.size() - kHostsShown, " more hosts; `gtrain status ",
                                   SafeText(job.id), "` lists them"));
      break;
    }
    const std::string parts = absl::StrJoin(states, ", ", [](std::string* out, const auto& s) {
      absl::StrAppend(out, s.second.size() == 1 ? "rank " : "ranks ", PrintRanks(s.second), " ", s.first);
    });
    lines.push_back(absl::StrCat("   ", SafeText(host), ": ", SafeText(parts)));
  }
  const std::string progress = PrintProgress(job);
  if (!progress.empty()) lines.push_back(absl::StrCat("   ", progress));
  if (!hint.empty()) lines.push_back(absl::StrCat("   ", SafeText(hint)));
  for (std::string& line : lines) line = CutToWidth(line, columns);
  return lines;
}

Screen::Screen() : terminal_(CanRedraw(STDOUT_FILENO) && CanRedraw(STDERR_FILENO)) {
  if (terminal_) continued_ = TimesContinued();
}

Screen::~Screen() {
  if (terminal_) Above("");
}

bool Screen::Above(const std::string& text) {
  std::string out;
  // After Ctrl-Z and `fg` the output of the shell stands below the block, which is left where it is.
  const int continued = TimesContinued();
  if (std::exchange(continued_, continued) != continued) block_.clear();
  if (!block_.empty()) absl::StrAppend(&out, "\x1b[", block_.size(), "A\r\x1b[J");
  block_.clear();
  return Print(out + text);
}

bool Screen::Output(const std::vector<RankOutput::Piece>& pieces, std::vector<std::string> unfinished) {
  if (!terminal_) {
    for (const RankOutput::Piece& piece : pieces) {
      if (!(piece.is_stderr ? WriteToStderr(piece.text) : Print(piece.text))) return false;
    }
    return true;
  }
  if (pieces.empty() && unfinished == unfinished_) return true;
  unfinished_ = std::move(unfinished);
  updated_.reset();  // redraw the block at once
  std::string text;
  for (const RankOutput::Piece& piece : pieces) text += piece.text;
  return Above(text);
}

bool Screen::Say(const std::string& line, Tone tone) {
  const std::string text = SafeLines(line, "    ");
  if (!terminal_) return WriteToStderr(OwnLine(text, tone, STDERR_FILENO));
  updated_.reset();
  return Above(OwnLine(text, tone, STDOUT_FILENO));
}

bool Screen::Update(const JobDoc& job, const std::string& hint, Instant now) {
  if (updated_ && now - *updated_ < (terminal_ ? kRedrawInterval : kLineInterval)) return true;
  updated_ = now;
  if (!terminal_) {
    if (job.step == said_step_ && job.checkpoint_step == said_checkpoint_) return true;
    said_step_ = job.step;
    said_checkpoint_ = job.checkpoint_step;
    return Say(PrintProgress(job));
  }
  const TerminalSize size = SizeOfTerminal(STDOUT_FILENO);
  const size_t rows = static_cast<size_t>(std::max(3, size.rows - 2));
  std::vector<std::string> block = StatusBlock(job, hint, size.columns - 1);
  if (UsesColour(STDOUT_FILENO)) {
    for (std::string& line : block)
      line = absl::StrCat(&line == &block[0] ? "\x1b[1m" : "\x1b[2m", line, "\x1b[0m");
  }
  std::vector<std::string> drawn;
  const size_t shown = std::min(unfinished_.size(), rows / 2);  // the newest
  for (size_t i = unfinished_.size() - shown; i < unfinished_.size(); ++i)
    drawn.push_back(CutToWidth(unfinished_[i], size.columns - 1));
  block.insert(block.begin(), drawn.begin(), drawn.end());
  if (block.size() > rows) block.resize(rows);
  const bool ok = Above(absl::StrJoin(block, "\n") + "\n");
  block_ = std::move(block);
  return ok;
}

}  // namespace gtrain::cli
