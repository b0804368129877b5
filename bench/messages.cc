// bench_messages: a message from one rank to another and back, by size, inside a machine and between two
// (UCX over loopback), in turns with Open MPI (its shared memory, and its TCP). One way, the median of many.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"

namespace gtrain::bench {
namespace {

struct Size {
  size_t bytes;
  int times;
};
constexpr Size kSizes[] = {{8, 5000}, {4 << 10, 3000}, {64 << 10, 1000}, {1 << 20, 100}, {16 << 20, 10}};
constexpr absl::Duration kPatience = absl::Seconds(60);

absl::Status BackAndForth(Communicator& c, double* one_way_us) {
  for (size_t s = 0; s < std::size(kSizes); ++s) {
    const auto [bytes, times] = kSizes[s];
    std::vector<char> data(bytes, 1);
    std::vector<double> samples;
    for (int i = -times / 10 - 2; i < times; ++i) {
      const Instant start = RealClock().Now();
      if (c.rank() == 0) GT_RETURN_IF_ERROR(c.Send(data.data(), bytes, DType::kUint8, 1));
      GT_RETURN_IF_ERROR(c.Receive(data.data(), bytes, DType::kUint8, 1 - c.rank()));
      if (c.rank() == 1) GT_RETURN_IF_ERROR(c.Send(data.data(), bytes, DType::kUint8, 0));
      if (i >= 0) samples.push_back(absl::ToDoubleMicroseconds(RealClock().Now() - start) / 2);
    }
    std::ranges::sort(samples);
    if (c.rank() == 0) one_way_us[s] = samples[samples.size() / 2];
  }
  return c.Barrier();
}

// One run of two forked ranks: the medians of all sizes.
absl::StatusOr<BySize> Ours(const std::vector<std::string>& nodes, double* page) {
  comm::FakeWorld world(nodes);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      std::unique_ptr<comm::Bootstrap> bootstrap = world.Rank(rank);
      comm::ExecOptions options;
      options.user.timeout = kPatience;
      auto communicator = comm::MakeCommunicator(bootstrap.get(), options);
      const absl::Status status =
          communicator.ok() ? BackAndForth(**communicator, page) : communicator.status();
      if (!status.ok()) std::fprintf(stderr, "bench_messages: %s\n", status.ToString().c_str());
      communicator = absl::CancelledError("");
      bootstrap.reset();
      _exit(status.ok() ? 0 : 1);
    }
    pids.push_back(pid);
  }
  int bad = 0;
  for (const pid_t pid : pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    bad += status != 0 ? 1 : 0;
  }
  if (bad != 0) return absl::InternalError("our ranks failed");
  BySize by_size;
  for (size_t s = 0; s < std::size(kSizes); ++s) by_size[kSizes[s].bytes] = page[s];
  return by_size;
}

absl::StatusOr<BySize> OpenMpi(const std::string& program, const std::string& file, bool tcp) {
  std::vector<std::string> words{kMpirunOpenMpi,
                                 "--oversubscribe",
                                 "-n",
                                 "2",
                                 "--mca",
                                 "btl",
                                 tcp ? "tcp,self" : "vader,self",
                                 "--mca",
                                 "pml",
                                 "ob1"};
  if (tcp) words.insert(words.end(), {"--mca", "btl_tcp_if_include", "lo"});
  words.insert(words.end(), {program, file});
  for (const Size& size : kSizes) words.push_back(absl::StrCat(size.bytes, ":", size.times));
  GT_RETURN_IF_ERROR(Run(words, kPatience));
  return ReadBySize(file, "Open MPI");
}

int Main(const Options& options) {
  void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  auto* const page = static_cast<double*>(memory);
  Home home;
  if (absl::Status made = home.Make(); !made.ok()) {
    std::fprintf(stderr, "bench_messages: %s\n", made.ToString().c_str());
    return 1;
  }
  const std::string program = options.folder + "/../bench/messages_openmpi";
  const bool peer = Executable(kMpirunOpenMpi) && Executable(program);
  if (!peer) std::printf("Open MPI is not installed (tools/install.sh --bench, then make build)\n");
  AllowOpenMpiAsRoot();
  std::vector<Outcome> outcomes;
  const int turns = options.quick ? 2 : 7;
  for (const bool far : {false, true}) {
    std::map<size_t, Series> ours, theirs;
    for (int turn = 0; turn < turns; ++turn) {
      const auto mine =
          Ours(far ? std::vector<std::string>{"a", "b"} : std::vector<std::string>{"a", "a"}, page);
      const auto mpi = peer ? OpenMpi(program, home.path() + "/mpi", far) : absl::StatusOr<BySize>(BySize());
      for (const absl::Status& status : {mine.status(), mpi.status()}) {
        if (status.ok()) continue;
        std::fprintf(stderr, "bench_messages: %s\n", status.ToString().c_str());
        return 1;
      }
      for (const auto& [bytes, us] : *mine) ours[bytes].samples.push_back(us);
      for (const auto& [bytes, us] : *mpi) theirs[bytes].samples.push_back(us);
    }
    for (const auto& [bytes, series] : ours) {
      Outcome outcome;
      outcome.name = absl::StrCat(far ? "loopback TCP, " : "one machine, ", bytes, " B");
      outcome.unit = "us";
      outcome.ours = series;
      if (peer) outcome.peer = "Open MPI", outcome.theirs = theirs[bytes];
      outcomes.push_back(std::move(outcome));
    }
  }
  home.Remove();
  return Report(options, "messages", outcomes);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
