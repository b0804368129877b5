// The command line's use of a terminal: safe text, its size, and signals as a descriptor.
#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace gtrain::cli {

// Control characters, escape sequences and invalid UTF-8 shown as \xNN, so that output of a
// rank or a name cannot drive the terminal (fault P9). Keeps tabs; a line end becomes \n.
std::string SafeText(absl::string_view text);

// SafeText of each line of what may have several (stacks), the further ones after `indent`.
std::string SafeLines(absl::string_view text, absl::string_view indent);

// Cuts to `width` columns, never inside a character. Colours, as TextRows writes them, take no room and end
// with the text.
std::string CutToWidth(absl::string_view text, int width);

struct TerminalSize {
  int rows = 24;
  int columns = 80;
};
bool IsTerminal(int fd);
// True for a terminal that knows cursor codes: TERM is not dumb.
bool CanRedraw(int fd);
TerminalSize SizeOfTerminal(int fd);
// InvalidArgument where stdin is no terminal, for -t of `verb`.
absl::Status CheckTerminal(absl::string_view verb);

// The values of --color; kAuto: colour on a terminal, unless NO_COLOR is set or TERM is dumb.
enum class Colour { kAuto, kAlways, kNever };
void SetColour(Colour colour);

// How often the process went on after it was stopped (SIGCONT), from the first call on: others may have
// written to the terminal meanwhile.
int TimesContinued();
bool UsesColour(int fd);

// How a line of gtrain's own is meant.
enum class Tone { kNews, kGood, kBad };
// "gtrain: line" and a line end, coloured if `fd` takes it.
std::string OwnLine(absl::string_view line, Tone tone, int fd);

// Prints "gtrain: message" to stderr.
void Complain(absl::string_view message, Tone tone = Tone::kNews);
// The errors that were reported so far, a line each, for the document of --json.
const std::vector<std::string>& Errors();
// Notes a line as an error that was shown already.
void NoteError(std::string line);

// Writes to stdout; false when nobody reads any more (SIGPIPE is ignored by main), or it takes no more.
bool Print(absl::string_view text);
// Bounds the printing of a long text on a terminal: it is given up, with a mark that says how much is
// missing, when a signal that a SignalPipe has for its owner came meanwhile, and after this long, which is
// for texts that are not worth more.
void BoundPrint(absl::Duration longest);
// Whether anything was written to stdout.
bool Printed();
// The first error of writing to stdout, 0 for none. That nobody reads any more (`| head`) is none.
int OutputError();

// From now on the `presses`th Ctrl-C prints "gtrain: " and `line` (a literal) and ends the program with 130,
// until a SignalPipe is made, which also gets earlier signals.
void EndOnCtrlC(int presses, const char* line);

// SIGINT, SIGTERM, SIGHUP as readable bytes of a pipe, from construction to destruction. One at a time.
class SignalPipe {
 public:
  SignalPipe();
  ~SignalPipe();
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

  int fd() const { return read_fd_; }
  // The next signal that came, 0 if none. Never blocks.
  int Next();
  // Reports SIGWINCH, too, from now on.
  void AlsoWindowSize();
  // The program ends now: further Ctrl-C does not spoil its exit code.
  void IgnoreCtrlC() { ignores_ctrl_c_ = true; }

 private:
  bool ignores_ctrl_c_ = false;
  int read_fd_ = -1;
  int write_fd_ = -1;
};

}  // namespace gtrain::cli
