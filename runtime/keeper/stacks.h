// Where the threads of a process are, as text for people. std and libc only.
//
// An agent reads what /proc says, which costs some ten microseconds a thread. Debuggers take seconds and
// memory, so they run in a process of their own beside the rank: `gtrain-keeper --stacks PID`, started like
// any command of `gtrain exec`. Ranks allow their keeper, and what descends from it, to trace them.
#pragma once
#include <stdint.h>
#include <sys/types.h>

#include <string>

namespace gtrain::keeper {

// A line a thread, and below it the functions of the kernel in which it is, where those may be read.
std::string KernelStacks(int64_t pid);

// The function of the kernel in which the main thread waits ("futex_wait_queue"), or "stopped by a signal";
// empty when it runs or may not be looked at.
std::string BlockedIn(pid_t pid);

// The facts that decide whether ptrace(2) may look into a process.
struct PtraceFacts {
  int error = 0;            // errno of the attempt
  std::string yama;         // kernel.yama.ptrace_scope; empty: the kernel has none
  bool capability = false;  // CAP_SYS_PTRACE
  bool seccomp = false;     // a filter of system calls is in force
  bool dumpable = true;     // the process does not hide (set-uid programs, PR_SET_DUMPABLE)
  std::string tracer;       // who traces it already; empty: nobody
};
// One sentence that names the setting and what to do about it.
std::string WhyNotTraced(pid_t pid, const PtraceFacts& facts);

// Writes the stacks of `pid` and of its descendants to stdout, for at most 8 s. Returns the exit code.
int StacksMain(pid_t pid);

}  // namespace gtrain::keeper
