#include "bench/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/file.h"
#include "bench/local_cluster.h"

extern char** environ;

namespace gtrain::bench {

absl::StatusOr<std::unique_ptr<PeerProcess>> PeerProcess::Start(const std::vector<std::string>& words,
                                                                const std::string& log) {
  std::unique_ptr<PeerProcess> peer(new PeerProcess(words[0], log));
  int to[2], from[2];
  if (pipe2(to, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd their_input(to[0]);
  peer->to_.reset(to[1]);
  if (pipe2(from, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  const UniqueFd their_output(from[1]);
  peer->from_.reset(from[0]);
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, their_input.get(), 0);
  posix_spawn_file_actions_adddup2(&actions, their_output.get(), 1);
  posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  const int error = posix_spawnp(&peer->pid_, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    peer->pid_ = -1;
    return ErrnoStatus(error, absl::StrCat("start ", words[0]));
  }
  return peer;
}

PeerProcess::~PeerProcess() {
  to_.reset();
  if (pid_ > 0) (void)WaitFor(pid_, name_, absl::Minutes(1));
}

absl::Status PeerProcess::Failed(absl::string_view what) const {
  const absl::StatusOr<std::string> log = ReadFile(log_, 16 << 20);
  const std::string text = log.ok() ? *log : "";
  return absl::InternalError(absl::StrCat(name_, " ", what, "; it said:\n",
                                          text.substr(text.size() - std::min<size_t>(text.size(), 2000))));
}

absl::StatusOr<std::vector<double>> PeerProcess::Ask(absl::string_view line, absl::Duration deadline) {
  const RealClock clock;
  const Instant late = clock.Now() + deadline;
  const std::string text = absl::StrCat(line, "\n");
  // A few bytes: a pipe that nobody has filled takes them at once.
  if (write(to_.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    return Failed("cannot be asked any more");
  size_t end;
  while ((end = answered_.find('\n')) == std::string::npos) {
    pollfd wait{from_.get(), POLLIN, 0};
    const int64_t left = absl::ToInt64Milliseconds(late - clock.Now());
    if (left <= 0 || poll(&wait, 1, static_cast<int>(left)) == 0)
      return Failed(absl::StrCat("did not answer \"", line, "\" within ", absl::FormatDuration(deadline)));
    char buffer[256];
    const ssize_t n = read(from_.get(), buffer, sizeof(buffer));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Failed(absl::StrCat("ended when it was asked to \"", line, "\""));
    answered_.append(buffer, static_cast<size_t>(n));
  }
  const std::string answer = answered_.substr(0, end);
  answered_.erase(0, end + 1);
  std::vector<double> numbers;
  for (const absl::string_view word : absl::StrSplit(answer, ' ')) {
    double number = 0;
    if (!absl::SimpleAtod(word, &number)) return Failed(absl::StrCat("answered \"", answer, "\""));
    numbers.push_back(number);
  }
  return numbers;
}

}  // namespace gtrain::bench
