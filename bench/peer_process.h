// A peer that lives as long as the bench and is asked line by line, so that what is measured is warm.
#pragma once
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace gtrain::bench {

// Not thread-safe. The process ends when its standard input does, with this object; it is killed if it does
// not end within a minute.
class PeerProcess {
 public:
  // `log`: a file for what it writes on its standard error; errors of Ask show the end of it.
  static absl::StatusOr<std::unique_ptr<PeerProcess>> Start(const std::vector<std::string>& words,
                                                            const std::string& log);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  // Sends `line` and returns the numbers of the line that it answers. Blocks up to `deadline`.
  absl::StatusOr<std::vector<double>> Ask(absl::string_view line, absl::Duration deadline);

 private:
  PeerProcess(std::string name, std::string log) : name_(std::move(name)), log_(std::move(log)) {}
  absl::Status Failed(absl::string_view what) const;

  const std::string name_, log_;
  pid_t pid_ = -1;
  UniqueFd to_, from_;
  std::string answered_;  // what came behind the last whole line
};

}  // namespace gtrain::bench
