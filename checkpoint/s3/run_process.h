// A program's standard output, for credential_process.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace gtrain::ckpt {

// The words of a command line as the AWS documentation describes them: white space separates, double quotes
// hold together; single quotes and a backslash before a character work as in a POSIX shell. Nothing is
// expanded. InvalidArgument: a quote is not closed, or there is no word.
absl::StatusOr<std::vector<std::string>> SplitCommand(absl::string_view command);

// Runs words[0], looked for in $PATH, with this process's environment, without a shell, its input and its
// error output /dev/null, in a process group of its own. Blocks until its output ends and it has exited;
// after `timeout` the group is killed: DeadlineExceeded. FailedPrecondition: it cannot be started, or did not
// exit with 0. ResourceExhausted: more than `bytes_max` of output. No error has any of its output.
absl::StatusOr<std::string> RunProcess(const std::vector<std::string>& words, absl::Duration timeout,
                                       size_t bytes_max);

}  // namespace gtrain::ckpt
