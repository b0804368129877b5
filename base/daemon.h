// The first steps of every process of ours.
#pragma once
#include <cstdint>
#include <optional>

#include "absl/status/status.h"

namespace gtrain {

// Other processes of the same user cannot attach a debugger to this one, read its memory, its environment or
// its descriptors in /proc; it leaves no core file (fault X6).
void HideFromOtherProcesses();

// Raises the limit of descriptors to the most that the system allows.
void RaiseFileLimit();
// Raises the limit of descriptors to `least`, and no higher, if it was lower: children inherit the limit.
// FailedPrecondition: the system does not allow it.
absl::Status EnsureFileLimit(int least);
inline constexpr int kDaemonFilesMin = 256;  // a head with its store, an agent with its keepers

// How many more processes and threads `ulimit -u` lets this user have; nullopt: any number (root, no limit).
// Looks at every process of the machine.
std::optional<int64_t> ProcessesLeft();
// FailedPrecondition, in words, where there are fewer: libzmq and RocksDB end the program instead.
absl::Status EnsureProcessesLeft(int least);
inline constexpr int kDaemonProcessesMin = 24;  // threads of a head with its store, or of an agent

// Standard input, output and error that are closed become /dev/null: the next file to be opened must not be
// taken for one of them, nor one of them be closed by code that thinks it is its own.
void OpenStandardFiles();

// Whether this is a container, where root is the ordinary user. Known by what the container's maker left in
// the file system, never by an environment variable: a typo must not change what is allowed (fault X15).
bool InContainer();

}  // namespace gtrain
