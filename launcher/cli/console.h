// Input for a program that runs beside a rank, or for a rank, and its output as it comes: `exec -i`,
// `launch -i`, each with -t in a terminal. docs/protocols/control-plane.md tells the turns behind it.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "launcher/cli/context.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {

// Bytes that were read from stdin and not taken yet; they outlive a console, because a job's next generation
// goes on with them.
struct ConsoleInput {
  std::string waits;
  bool end = false;
};

struct ConsoleOptions {
  std::string job;
  int rank = 0;
  std::vector<std::string> argv;  // empty: the rank itself
  bool terminal = false;          // stdin is one, and so shall be the program's
  SignalPipe* signals = nullptr;  // end it; else
  int stop_fd = -1;               // does, when it is readable
};

struct ConsoleEnd {
  std::optional<int> exit_code;  // of the program
  int signal = 0;                // that ended it here; -1: stop_fd
  uint64_t generation = 0;       // in which it ran
  uint64_t shown_bytes = 0;      // of its output
};

// Runs until the program has ended and its output is written, or a signal came. FailedPrecondition: there is
// no such rank, or it is over, in the head's words. Unavailable: nobody answers any more.
absl::StatusOr<ConsoleEnd> RunConsole(Cluster& cluster, const ConsoleOptions& options, ConsoleInput& input);

// The input of rank 0 of a job, in each of its generations, until the job is over. The end tells of the
// newest console.
absl::StatusOr<ConsoleEnd> RunRankConsoles(Cluster& cluster, const ConsoleOptions& options);

// RunRankConsoles without output, on a thread and a connection of its own, from construction to destruction.
class InputFeeder {
 public:
  InputFeeder(const Args& args, std::string job);
  ~InputFeeder();
  InputFeeder(const InputFeeder&) = delete;
  InputFeeder& operator=(const InputFeeder&) = delete;

 private:
  UniqueFd stop_;
  std::thread thread_;
};

}  // namespace gtrain::cli
