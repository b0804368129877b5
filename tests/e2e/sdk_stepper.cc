// A training loop without training, for tests that ask whether ranks keep stepping: each step computes a
// little, sums a vector over all ranks and notes when it was done. Appends lines "generation step
// monotonic-nanoseconds" to DIR/steps.RANK. Ends well once FILE exists (all ranks agree on having seen it);
// exits 75 when its generation is over. Writes the seconds left into DIR/noticed.GENERATION.RANK when it is
// told that a machine leaves.
//   e2e_sdk_stepper DIR STEP_MS FILE
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/port/communicator.h"
#include "runtime/port/session.h"

namespace {

constexpr size_t kCount = 64 << 10;
constexpr int kRunAgain = 75;

int Ended(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return absl::IsUnavailable(status) ? kRunAgain : 1;
}

bool Note(int fd, uint64_t generation, int64_t step) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  char line[96];
  const int bytes = std::snprintf(line, sizeof(line), "%llu %lld %lld\n",
                                  static_cast<unsigned long long>(generation), static_cast<long long>(step),
                                  static_cast<long long>(now.tv_sec) * 1000000000 + now.tv_nsec);
  return write(fd, line, static_cast<size_t>(bytes)) == bytes;
}

void NoteNotice(const std::string& dir, const gtrain::Session& session, bool* noted) {
  const auto left = session.PreemptionNotice();
  if (*noted || !left) return;
  const std::string path =
      dir + "/noticed." + std::to_string(session.generation()) + "." + std::to_string(session.rank());
  const std::string text = std::to_string(absl::ToInt64Seconds(*left));
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  *noted = fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (fd >= 0) close(fd);
}

int Run(const std::string& dir, int step_ms, const char* file) {
  auto session = gtrain::Session::Join();
  if (!session.ok()) return Ended(session.status());
  auto comm = (*session)->MakeCommunicator();
  if (!comm.ok()) return Ended(comm.status());
  const std::string path = dir + "/steps." + std::to_string((*session)->rank());
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return Ended(absl::InternalError("cannot open " + path));
  std::vector<float> data(kCount);
  bool noted = false;
  for (int64_t step = 1;; ++step) {
    usleep(static_cast<useconds_t>(step_ms) * 1000);
    NoteNotice(dir, **session, &noted);
    data.assign(kCount, 1);
    data[0] = access(file, F_OK) == 0 ? 1 : 0;
    absl::Status sum =
        (*comm)->AllReduce(data.data(), kCount, gtrain::DType::kFloat32, gtrain::ReduceOp::kSum);
    if (!sum.ok()) return Ended(sum);
    if (data[kCount - 1] != static_cast<float>((*comm)->size())) {
      return Ended(absl::InternalError("a sum is wrong: " + std::to_string(data[kCount - 1])));
    }
    if (!Note(fd, (*session)->generation(), step)) return Ended(absl::InternalError("cannot write " + path));
    (*session)->Report({.step = step, .loss = std::nullopt, .samples = 1});
    if (data[0] > 0) return 0;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: e2e_sdk_stepper DIR STEP_MS FILE\n");
    return 2;
  }
  return Run(argv[1], std::atoi(argv[2]), argv[3]);
}
