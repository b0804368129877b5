// An SDK program for the end-to-end tests: sums a vector over all ranks, step after step, and checks
// every sum. It steps until FILE exists (all ranks agree on having seen it), then exits 0. Once its
// generation is over it exits 75, "run me again".
//   e2e_allreduce FILE
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "comm/port/communicator.h"
#include "runtime/port/session.h"

namespace {

constexpr size_t kCount = 300'000;  // several transport segments
constexpr int kRunAgain = 75;

int Ended(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return absl::IsUnavailable(status) ? kRunAgain : 1;
}

// One step: rank r contributes r + 1 everywhere; element 0 is the largest "I have seen the file".
absl::Status Step(gtrain::Communicator& comm, std::vector<float>& data, bool* stop) {
  const float world = static_cast<float>(comm.size());
  float seen = *stop ? 1 : 0;
  if (absl::Status s = comm.AllReduce(&seen, 1, gtrain::DType::kFloat32, gtrain::ReduceOp::kMax); !s.ok())
    return s;
  *stop = seen > 0;
  data.assign(kCount, static_cast<float>(comm.rank() + 1));
  if (absl::Status s = comm.AllReduce(data.data(), kCount, gtrain::DType::kFloat32, gtrain::ReduceOp::kSum);
      !s.ok()) {
    return s;
  }
  for (float value : data) {
    if (value != world * (world + 1) / 2)
      return absl::InternalError("a sum is wrong: " + std::to_string(value));
  }
  return absl::OkStatus();
}

int Run(const char* file) {
  auto session = gtrain::Session::Join();
  if (!session.ok()) return Ended(session.status());
  auto comm = (*session)->MakeCommunicator();
  if (!comm.ok()) return Ended(comm.status());
  std::vector<float> data;
  bool stop = false;
  for (int64_t step = 1; !stop; ++step) {
    stop = access(file, F_OK) == 0;
    if (absl::Status s = Step(**comm, data, &stop); !s.ok()) return Ended(s);
    (*session)->Report({.step = step, .loss = std::nullopt, .samples = 1});
    if (step % 20 == 1) {
      std::printf("generation %llu world %d step %lld ok\n",
                  static_cast<unsigned long long>((*session)->generation()), (*comm)->size(),
                  static_cast<long long>(step));
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: e2e_allreduce FILE\n");
    return 2;
  }
  return Run(argv[1]);
}
