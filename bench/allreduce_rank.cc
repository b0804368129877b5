// One rank of bench_allreduce: times all-reduce through the public API, as the OSU benchmarks do: a barrier,
// then one timed call, many times a size; the sample of a call is that of its slowest rank.
//   allreduce_rank FILE allocate|private|rewritten BYTES:CALLS...
// rewritten: as allocate, and each rank writes all of its data before each call, as a training step does.
// Rank 0 writes a line "BYTES MICROSECONDS" a size into FILE: the median.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "comm/port/communicator.h"
#include "runtime/port/session.h"

namespace {

double Now() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Each rank on a core of its own, where there are enough: what mpirun --bind-to core does for the peers.
void Pin(int local_rank, int ranks) {
  if (ranks > sysconf(_SC_NPROCESSORS_ONLN)) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(local_rank), &set);
  sched_setaffinity(0, sizeof(set), &set);
}

absl::Status Time(gtrain::Communicator& comm, void* data, size_t bytes, int calls, bool rewrite,
                  double* median) {
  std::vector<double> samples;
  for (int call = -calls / 10 - 2; call < calls; ++call) {
    if (rewrite) std::memset(data, 0, bytes);
    if (absl::Status s = comm.Barrier(); !s.ok()) return s;
    const double start = Now();
    absl::Status s = comm.AllReduce(data, bytes / 4, gtrain::DType::kFloat32, gtrain::ReduceOp::kSum);
    if (!s.ok()) return s;
    if (call >= 0) samples.push_back(Now() - start);
  }
  absl::Status s =
      comm.AllReduce(samples.data(), samples.size(), gtrain::DType::kFloat64, gtrain::ReduceOp::kMax);
  std::sort(samples.begin(), samples.end());
  *median = samples[samples.size() / 2];
  return s;
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "allreduce_rank: %s\n", status.ToString().c_str());
  return 1;
}

int Run(int argc, char** argv) {
  auto session = gtrain::Session::Join();
  if (!session.ok()) return Fail(session.status());
  Pin((*session)->local_rank(), (*session)->world_size());
  auto comm = (*session)->MakeCommunicator();
  if (!comm.ok()) return Fail(comm.status());
  size_t largest = 0;
  for (int i = 3; i < argc; ++i) largest = std::max<size_t>(largest, std::strtoull(argv[i], nullptr, 10));
  void* data = nullptr;
  const std::string mode = argv[2];
  if (mode != "private") {
    auto memory = (*comm)->Allocate(largest);
    if (!memory.ok()) return Fail(memory.status());
    data = *memory;
  } else {
    data = std::aligned_alloc(64, (largest + 63) / 64 * 64);
  }
  std::memset(data, 0, largest);
  std::FILE* out = (*comm)->rank() == 0 ? std::fopen(argv[1], "w") : nullptr;
  for (int i = 3; i < argc; ++i) {
    char* colon = nullptr;
    const size_t bytes = std::strtoull(argv[i], &colon, 10);
    double median = 0;
    if (absl::Status s = Time(**comm, data, bytes, std::atoi(colon + 1), mode == "rewritten", &median);
        !s.ok())
      return Fail(s);
    if (out != nullptr) std::fprintf(out, "%zu %.3f\n", bytes, median);
  }
  return out == nullptr || std::fclose(out) == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc >= 4) return Run(argc, argv);
  std::fprintf(stderr, "usage: allreduce_rank FILE allocate|private|rewritten BYTES:CALLS...\n");
  return 2;
}
