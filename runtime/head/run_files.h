// The head's files in a job's run directory: events.jsonl, failure.json and result.json. Free functions that
// block on the disk; they run on a thread of their own, because a run directory may lie on a network file
// system.
#pragma once
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/run_folder.h"
#include "runtime/core/values/effects.h"

namespace gtrain::head {

// {"time":"2026-01-02T03:04:05.678Z","sequence":7,"kind":"state","generation":2,"text":"..."}
std::string EventLine(const core::EmitEvent& event);

absl::Status WriteWhole(int fd, absl::string_view data, const std::string& what);

// Appends one line / replaces the file. The directory must exist, unless `make_dir`; NotFound otherwise,
// which is normal when the job was submitted from another machine. PermissionDenied: the directory, or a link
// on the way to it, is another user's. FailedPrecondition: it is another job's than `owner` says. Never
// follows a link at the file itself.
absl::Status AppendEvent(const std::string& run_dir, const RunFolderOwner& owner, const std::string& line,
                         bool make_dir);
absl::Status WriteFailureFile(const std::string& run_dir, const RunFolderOwner& owner,
                              const std::string& json, bool make_dir);

// `json` is an object; the newest events of events.jsonl go with it.
absl::Status WriteResultFile(const std::string& run_dir, const RunFolderOwner& owner, const std::string& json,
                             bool make_dir);
// The directory is there and has none.
bool LacksResultFile(const std::string& run_dir, const RunFolderOwner& owner);

}  // namespace gtrain::head
