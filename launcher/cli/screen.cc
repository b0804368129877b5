#include "launcher/cli/screen.h"

#include <unistd.h>

#include <cstdio>
#include <map>

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
  lines.push_back(absl::StrCat("-- ", job.id, " -- ", job.state, " -- generation ", job.generation, ", ",
                               job.world_size, job.world_size == 1 ? " rank" : " ranks"));
  lines.push_back(absl::StrCat("   ", SafeText(job.reason)));
  if (!job.stuck.empty()) lines.push_back(absl::StrCat("   ", SafeText(job.stuck)));
  std::map<std::string, std::map<std::string, std::vector<int>>> hosts;
  for (const RankDoc& rank : job.ranks) hosts[rank.hostname][rank.state].push_back(rank.rank);
  size_t shown = 0;
  for (const auto& [host, states] : hosts) {
    if (++shown > kHostsShown) {
      lines.push_back(absl::StrCat("   and ", hosts.size() - kHostsShown, " more hosts; `gtrain status ",
                                   job.id, "` lists them"));
      break;
    }
    const std::string parts = absl::StrJoin(states, ", ", [](std::string* out, const auto& s) {
      absl::StrAppend(out, "ranks ", PrintRanks(s.second), " ", s.first);
    });
    lines.push_back(absl::StrCat("   ", SafeText(host), ": ", SafeText(parts)));
  }
  const std::string progress = PrintProgress(job);
  if (!progress.empty()) lines.push_back(absl::StrCat("   ", progress));
  if (!hint.empty()) lines.push_back(absl::StrCat("   ", hint));
  for (std::string& line : lines) line = CutToWidth(line, columns);
  return lines;
}

Screen::Screen() : terminal_(IsTerminal(STDOUT_FILENO) && IsTerminal(STDERR_FILENO)) {}

Screen::~Screen() {
  if (terminal_) Above("");
}

bool Screen::Above(const std::string& text) {
  std::string out;
  if (!block_.empty()) absl::StrAppend(&out, "\x1b[", block_.size(), "A\r\x1b[J");
  block_.clear();
  return Print(out + text);
}

bool Screen::OutputLines(const std::vector<std::string>& lines) {
  if (lines.empty()) return true;
  const std::string text = absl::StrJoin(lines, "\n") + "\n";
  if (!terminal_) return Print(text);
  updated_.reset();  // redraw the block at once
  return Above(text);
}

bool Screen::Say(const std::string& line) {
  const std::string text = absl::StrCat("gtrain: ", SafeLines(line, "    "), "\n");
  if (!terminal_) return WriteToStderr(text);
  updated_.reset();
  return Above(text);
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
  std::vector<std::string> block = StatusBlock(job, hint, size.columns - 1);
  if (block.size() + 1 >= static_cast<size_t>(size.rows))
    block.resize(static_cast<size_t>(std::max(1, size.rows - 2)));
  const bool ok = Above(absl::StrJoin(block, "\n") + "\n");
  block_ = std::move(block);
  return ok;
}

}  // namespace gtrain::cli
