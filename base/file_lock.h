// Locks on files that end with the process that holds them, whatever ends it, so that nobody has to guess
// from a process id who lives (fault P14). Everyone who sees the file sees the lock: processes in other pid
// namespaces, and other hosts where the file system carries locks.
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace gtrain {

// Takes the lock of `path`, which is made if missing (0600), and holds it until the descriptor is closed.
// Blocks at most `patience`; Unavailable when another one still holds it then.
absl::StatusOr<UniqueFd> LockFile(const std::string& path, absl::Duration patience = absl::ZeroDuration());

// Replaces `path` atomically by a file that is locked before anybody can see it, and for as long as the
// caller keeps the descriptor: a reader of a locked file knows that its writer lives.
absl::StatusOr<UniqueFd> WriteLockedFile(const std::string& path, const std::string& data);

// Whether somebody holds the lock of `path`. Takes nothing, so it is in nobody's way.
bool IsLocked(const std::string& path);

// Whether `path` still leads to the open file: not when it was removed or replaced. A file system that does
// not answer says nothing about that.
bool LeadsTo(const std::string& path, int fd);

}  // namespace gtrain
