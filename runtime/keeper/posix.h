// Small helpers over libc for the keeper. No exceptions, no absl. Nothing here blocks except file writes.
#pragma once
#include <stdint.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace gtrain::keeper {

int64_t NowMs();   // monotonic
int64_t BootMs();  // the same, and it goes on while the machine is suspended

bool SetNonBlocking(int fd);
bool MakePipe(UniqueFd* read_end, UniqueFd* write_end);  // O_CLOEXEC, both blocking
// Makes a pseudo-terminal of 100 x 30 instead of a pipe, which becomes nobody's controlling terminal by this.
// kRaw: it changes no byte on the way. kWhole: as a person's, with echo, lines and Ctrl-C.
enum class Terminal { kNone, kRaw, kWhole };
bool MakeTerminal(UniqueFd* read_end, UniqueFd* write_end, Terminal kind);

// Listens on a Unix socket that takes the place of whatever is at `path`. False: `fd` is empty, and the
// reason was printed to stderr with `name`, unless the path is too long for a socket.
bool ListenOn(const std::string& path, const char* name, UniqueFd* fd);

// Temporary file beside it, then rename: a reader sees the old file, the new one or none. Neither a link
// there nor one of another user on the way is followed (base/folder.h). False: errno says why.
bool WriteFileAtomic(const std::string& path, const std::string& data);
// Reads at most `bytes_max` bytes of a regular or proc file; empty when it cannot be read.
std::string ReadSmallFile(const std::string& path, size_t bytes_max = 64 << 10);
bool WriteSmallFile(const std::string& path, const std::string& data);  // existing file: proc, cgroup

int PidfdOpen(pid_t pid);
bool PidfdSignal(int pidfd, int signal);

// One process of a scan. (pid, start_time) names it for ever (fault P14).
struct ProcessEntry {
  pid_t pid = 0;
  pid_t parent = 0;
  uint64_t start_time = 0;
  bool zombie = false;
  std::string name;        // as the process calls itself: at most 15 bytes, of any kind
  uint64_t cpu_ticks = 0;  // used by it and by those of its children that it has reaped
  bool stopped = false;    // by a signal, until another one
};

bool ReadProcess(pid_t pid, ProcessEntry* entry);
// Whether a thread of it lives: its first one may have ended before the others, which share its memory. True
// where it cannot be seen.
bool LivesStill(const ProcessEntry& known);
std::vector<ProcessEntry> ListProcesses();

// All living descendants of `root`, each with the child of `root` it descends from.
struct Descendant {
  ProcessEntry process;
  pid_t top = 0;
};
std::vector<Descendant> LivingDescendants(pid_t root);

// The processes for which a signal to the program that `leader` started is meant: `leader` itself, unless it
// is a shell without a trap for the signal, which would die of it and take its program along. Then those that
// the shell runs, here or through further such shells, and that have a handler; where none has one, `leader`
// again. Reads a file or two of `leader`, and for such a shell the list of all processes, which goes into
// `all` if that is empty: one list serves all ranks of a moment.
std::vector<pid_t> HearersOf(pid_t leader, int signal, std::vector<ProcessEntry>* all);

inline constexpr char kKeeperName[] = "gtrain-keeper";  // of its process: KeepersAbove looks for it

// The keepers that `pid` descends from, nearest first. Keepers are subreapers, so the processes of a rank
// stay below its keeper for as long as that lives, and the kernel says so: by this an agent is told from a
// rank of the same user, from which no file could hide a secret. A process that calls itself a keeper gains
// nothing. Nothing where the way up to the first process was not seen whole, as when a parent ends meanwhile:
// a process that cannot be placed is nobody's agent.
std::optional<std::vector<pid_t>> KeepersAbove(pid_t pid);
// The other end of a Unix socket, at the time it connected or listened, is a process of this user that
// descends from no keeper but from those that this process descends from, too (a gtrain that runs in a rank).
bool IsAgentOrKeeper(int socket);

// Value of NAME in the environment the process was started with; empty when unreadable.
std::string ProcessEnvironment(pid_t pid, const char* name);

// Signals exactly that process: nothing happens when the pid now belongs to another one.
bool SignalProcess(const ProcessEntry& process, int signal);

std::string SignalName(int signal);  // "SIGKILL (Killed)"

}  // namespace gtrain::keeper
