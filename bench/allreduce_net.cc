// bench_allreduce_net: all-reduce of float32 between machines: four network namespaces joined by a switch,
// every cable limited to 1 Gbit/s in both directions, one rank in each. Measures `auto`, each algorithm
// alone, and Open MPI (as it comes and with its ring) and Gloo where they are installed, all in turns; and
// what plain TCP gets through one cable, which bounds them all.
//
// The ranks are forked here and meet through memory; everything after that goes over the network as in a job.
// A sample is the median of some calls, each between two barriers and as slow as its slowest rank.
// Needs root and ip(8) and tc(8).
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"

namespace gtrain::bench {
namespace {

constexpr int kMachines = 4, kTurns = 7, kTurnsQuick = 3;
constexpr const char* kAlgorithms[] = {"auto", "ring", "doubling", "halving-doubling", "double-tree"};
constexpr size_t kAlgorithmCount = std::size(kAlgorithms), kSizesMax = 16;
constexpr absl::Duration kPeerDeadline = absl::Seconds(120);
constexpr const char* kPython = "/usr/bin/python3";  // Debian's, which has Debian's torch

struct Size {
  size_t bytes;
  int calls;
};

double Now() { return static_cast<double>(RealClock().Now().ns) * 1e-3; }  // microseconds

std::string Named(size_t bytes) {
  if (bytes >= 1 << 20) return absl::StrCat(bytes >> 20, " MiB");
  if (bytes >= 1 << 10) return absl::StrCat(bytes >> 10, " KiB");
  return absl::StrCat(bytes, " B");
}

std::string AddressOf(int machine) { return absl::StrCat("10.77.0.", machine + 1); }

// ------------------------------------------------------------------ the network

// Named after this process; taken away at the end.
class Network {
 public:
  ~Network() {
    for (const std::string& name : made_) (void)Run({"ip", "netns", "del", name});
  }

  absl::Status Make() {
    GT_RETURN_IF_ERROR(Add(switch_));
    GT_RETURN_IF_ERROR(Run({"ip", "-n", switch_, "link", "add", "br0", "type", "bridge"}));
    GT_RETURN_IF_ERROR(Run({"ip", "-n", switch_, "link", "set", "br0", "up"}));
    for (int i = 0; i < kMachines; ++i) {
      const std::string name = NameOf(i), port = absl::StrCat("p", i);
      GT_RETURN_IF_ERROR(Add(name));
      GT_RETURN_IF_ERROR(Run({"ip", "-n", switch_, "link", "add", "name", port, "type", "veth", "peer",
                              "name", "eth0", "netns", name}));
      GT_RETURN_IF_ERROR(Run({"ip", "-n", switch_, "link", "set", port, "master", "br0", "up"}));
      GT_RETURN_IF_ERROR(Run({"ip", "-n", name, "addr", "add", AddressOf(i) + "/24", "dev", "eth0"}));
      GT_RETURN_IF_ERROR(Run({"ip", "-n", name, "link", "set", "eth0", "up"}));
    }
    return absl::OkStatus();
  }

  // `burst`: what a cable that was idle lets through at the speed of memory.
  absl::Status Limit(const std::string& burst) const {
    for (int i = 0; i < kMachines; ++i) {
      GT_RETURN_IF_ERROR(Limit(NameOf(i), "eth0", burst));
      GT_RETURN_IF_ERROR(Limit(switch_, absl::StrCat("p", i), burst));
    }
    return absl::OkStatus();
  }

  std::string NameOf(int machine) const { return absl::StrCat("gtb", getpid(), "n", machine); }

  // Each rank stays on one core, here and with the peers: where the scheduler happens to put four ranks on
  // two cores is worth a factor of two.
  static int CoreOf(int machine) { return machine % static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)); }
  // What a command on that machine begins with.
  std::vector<std::string> Inside(int machine) const {
    return {"ip", "netns", "exec", NameOf(machine), "taskset", "-c", absl::StrCat(CoreOf(machine))};
  }

  // In a child: from here on it is on that machine.
  static bool Enter(const std::string& name) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const UniqueFd file(open(absl::StrCat("/run/netns/", name).c_str(), O_RDONLY | O_CLOEXEC));
    // UCX looks for interfaces in /sys, which shows those of the namespace it was mounted in.
    return file.valid() && setns(file.get(), CLONE_NEWNET) == 0 && unshare(CLONE_NEWNS) == 0 &&
           mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0;
  }

 private:
  absl::Status Add(const std::string& name) {
    GT_RETURN_IF_ERROR(Run({"ip", "netns", "add", name}));
    made_.push_back(name);
    return Run({"ip", "-n", name, "link", "set", "lo", "up"});
  }
  static absl::Status Limit(const std::string& name, const std::string& device, const std::string& burst) {
    return Run({"ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate",
                "1gbit", "burst", burst, "latency", "50ms"});
  }

  const std::string switch_ = absl::StrCat("gtb", getpid(), "s");
  std::vector<std::string> made_;
};

// What a child measures for the rest.
struct Board {
  double raw[8];  // microseconds of kRawBytes
  double sample[kAlgorithmCount][kSizesMax][kTurns];
};

Board* MakeBoard() {
  void* page = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return page == MAP_FAILED ? nullptr : static_cast<Board*>(page);
}

absl::Status WaitForAll(const std::vector<pid_t>& children, absl::string_view what, absl::Duration deadline) {
  absl::Status result;
  for (const pid_t pid : children) {
    absl::Status one = WaitFor(pid, what, result.ok() ? deadline : absl::Seconds(1));
    if (result.ok()) result = one;
  }
  return result;
}

pid_t OnMachine(const Network& network, int machine, const std::function<absl::Status()>& body) {
  const std::string name = network.NameOf(machine);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(static_cast<size_t>(Network::CoreOf(machine)), &core);
  sched_setaffinity(0, sizeof(core), &core);
  const absl::Status status = Network::Enter(name) ? body() : absl::ErrnoToStatus(errno, "entering " + name);
  if (!status.ok())
    std::fprintf(stderr, "bench_allreduce_net: machine %d: %s\n", machine, status.ToString().c_str());
  _exit(status.ok() ? 0 : 1);
}

// ------------------------------------------------------------------ plain TCP

constexpr size_t kRawBytes[] = {4 << 10, 50'000, 8 << 20};
constexpr int kRawTimes = 9;

absl::Status Whole(int fd, char* data, size_t bytes, bool send_it) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t n =
        send_it ? send(fd, data + at, bytes - at, MSG_NOSIGNAL) : recv(fd, data + at, bytes - at, 0);
    if (n <= 0) return absl::ErrnoToStatus(errno, "plain TCP");
    at += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

// Machine 0 sends, machine 1 answers with one byte.
absl::Status RawSide(bool first, Board* board) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(4000);
  inet_pton(AF_INET, AddressOf(1).c_str(), &to.sin_addr);
  auto* address = reinterpret_cast<sockaddr*>(&to);
  const int on = 1;
  if (!first) {
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd.get(), address, sizeof(to)) != 0 || listen(fd.get(), 1) != 0)
      return absl::ErrnoToStatus(errno, "listen");
    fd = UniqueFd(accept(fd.get(), nullptr, nullptr));
    if (!fd.valid()) return absl::ErrnoToStatus(errno, "accept");
  } else {
    const double end = Now() + 5e6;
    while (connect(fd.get(), address, sizeof(to)) != 0) {
      if (Now() > end) return absl::ErrnoToStatus(errno, "connect");
      usleep(1000);
      fd = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    }
  }
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  std::vector<char> data(kRawBytes[std::size(kRawBytes) - 1]);
  for (size_t s = 0; s < std::size(kRawBytes); ++s) {
    std::vector<double> samples;
    for (int i = 0; i < kRawTimes; ++i) {
      const double start = Now();
      GT_RETURN_IF_ERROR(Whole(fd.get(), data.data(), kRawBytes[s], first));
      GT_RETURN_IF_ERROR(Whole(fd.get(), data.data(), 1, !first));
      samples.push_back(Now() - start);
    }
    std::sort(samples.begin(), samples.end());
    if (first) board->raw[s] = samples[samples.size() / 2];
  }
  return absl::OkStatus();
}

absl::Status MeasureRaw(const Network& network, Board* board) {
  return WaitForAll({OnMachine(network, 0, [&] { return RawSide(true, board); }),
                     OnMachine(network, 1, [&] { return RawSide(false, board); })},
                    "plain TCP", absl::Seconds(30));
}

// ------------------------------------------------------------------ ours

absl::StatusOr<double> TimeCalls(Communicator& c, float* data, const Size& size) {
  std::vector<double> samples;
  for (int call = -1 - size.calls / 10; call < size.calls; ++call) {
    GT_RETURN_IF_ERROR(c.Barrier());
    const double start = Now();
    GT_RETURN_IF_ERROR(c.AllReduce(data, size.bytes / sizeof(float), DType::kFloat32, ReduceOp::kSum));
    if (call >= 0) samples.push_back(Now() - start);
  }
  GT_RETURN_IF_ERROR(c.AllReduce(samples.data(), samples.size(), DType::kFloat64, ReduceOp::kMax));
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

absl::Status OneRank(comm::FakeWorld& world, int rank, const std::vector<Size>& sizes, int turns,
                     Board* board) {
  const auto bootstrap = world.Rank(rank);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (const char* algorithm : kAlgorithms) {
    comm::ExecOptions options;
    options.user.timeout = absl::Seconds(60);
    options.algorithm = algorithm;
    GT_ASSIGN_OR_RETURN(auto communicator, comm::MakeCommunicator(bootstrap.get(), options));
    communicators.push_back(std::move(communicator));
  }
  std::vector<float> data(sizes.back().bytes / sizeof(float), 1.0f);
  for (size_t s = 0; s < sizes.size(); ++s) {
    for (int turn = -1; turn < turns; ++turn) {
      for (size_t a = 0; a < communicators.size(); ++a) {
        std::fill_n(data.begin(), sizes[s].bytes / sizeof(float), 1.0f);
        GT_ASSIGN_OR_RETURN(const double sample, TimeCalls(*communicators[a], data.data(), sizes[s]));
        if (rank == 0 && turn >= 0) board->sample[a][s][turn] = sample;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status MeasureOurs(const Network& network, const std::vector<Size>& sizes, int turns, Board* board) {
  std::vector<std::string> nodes, addresses;
  for (int i = 0; i < kMachines; ++i) {
    nodes.push_back(network.NameOf(i));
    addresses.push_back(AddressOf(i));
  }
  comm::FakeWorld world(nodes, addresses);
  std::vector<pid_t> children;
  for (int i = 0; i < kMachines; ++i) {
    children.push_back(OnMachine(network, i, [&, i] { return OneRank(world, i, sizes, turns, board); }));
  }
  return WaitForAll(children, "a rank of ours", absl::Minutes(10));
}

// ------------------------------------------------------------------ peers

struct Peer {
  std::string name;
  std::function<absl::Status(const std::string& file, const std::vector<std::string>& sizes)> run;
};

absl::StatusOr<Peer> OpenMpi(const Network& network, const Home& home, const std::string& folder, bool ring) {
  const std::string program = folder + "/../bench/allreduce_openmpi", agent = home.path() + "/agent";
  if (!Executable(kMpirunOpenMpi) || !Executable(program)) {
    return absl::NotFoundError("Open MPI is not installed (tools/install.sh --bench, then make build)");
  }
  AllowOpenMpiAsRoot();
  std::string script = "#!/bin/sh\nhost=$1; shift\ncase $host in\n";
  std::vector<std::string> hosts;
  for (int i = 0; i < kMachines; ++i) {
    hosts.push_back(AddressOf(i));
    absl::StrAppend(&script, AddressOf(i), ") inside='", absl::StrJoin(network.Inside(i), " "), "';;\n");
  }
  absl::StrAppend(&script, "esac\nexec $inside sh -c \"$*\"\n");
  GT_RETURN_IF_ERROR(WriteFileDurable(agent, script, 0755));
  std::vector<std::string> words = network.Inside(0);
  words.insert(words.end(), {kMpirunOpenMpi, "--host", absl::StrJoin(hosts, ","), "-n",
                             absl::StrCat(kMachines), "--bind-to", "none"});
  for (const char* setting :
       {"plm_rsh_agent", "oob_tcp_if_include", "btl_tcp_if_include", "btl", "pml", "mpi_yield_when_idle"}) {
    const std::string name = setting;
    words.insert(words.end(), {"--mca", name,
                               name == "plm_rsh_agent"         ? agent
                               : name == "btl"                 ? "self,tcp"
                               : name == "pml"                 ? "ob1"
                               : name == "mpi_yield_when_idle" ? "1"
                                                               : "eth0"});
  }
  if (ring) {
    for (const char* word :
         {"--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4"}) {
      words.push_back(word);
    }
  }
  words.push_back(program);
  return Peer{ring ? "Open MPI, ring" : "Open MPI",
              [words](const std::string& file, const std::vector<std::string>& sizes) {
                std::vector<std::string> line = words;
                line.insert(line.end(), {file, "once"});
                line.insert(line.end(), sizes.begin(), sizes.end());
                return Run(line, kPeerDeadline);
              }};
}

absl::StatusOr<Peer> Gloo(const Network& network, const Home& home, const std::string& folder) {
  if (!Executable(kPython) || !Run({kPython, "-c", "import torch.distributed"}).ok()) {
    return absl::NotFoundError(absl::StrCat(kPython, " has no torch"));
  }
  const std::string program = folder + "/../bench/allreduce_gloo.py", store = home.path() + "/store";
  setenv("GLOO_SOCKET_IFNAME", "eth0", 1);
  return Peer{"Gloo",
              [&network, program, store](const std::string& file, const std::vector<std::string>& sizes) {
                std::filesystem::remove(store);
                std::vector<pid_t> children;
                for (int i = 0; i < kMachines; ++i) {
                  std::vector<std::string> line = network.Inside(i);
                  line.insert(line.end(), {kPython, program, file, absl::StrCat(kMachines),
                                           absl::StrCat("rank=", i, ":", store)});
                  line.insert(line.end(), sizes.begin(), sizes.end());
                  GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn(line));
                  children.push_back(pid);
                }
                return WaitForAll(children, "a rank of Gloo", kPeerDeadline);
              }};
}

// ------------------------------------------------------------------ the report

Series Of(const Board& board, size_t algorithm, size_t size, int turns) {
  const double* samples = board.sample[algorithm][size];
  return {std::vector<double>(samples, samples + turns)};
}

// The smallest bucket with which the cable carries what it should: a busy machine serves a small one too
// late.
absl::Status LimitAndMeasureRaw(const Network& network, Board* board) {
  for (const char* burst : {"8kb", "32kb", "64kb", "128kb"}) {
    GT_RETURN_IF_ERROR(network.Limit(burst));
    GT_RETURN_IF_ERROR(MeasureRaw(network, board));
    std::printf("burst %s:\n", burst);
    for (size_t i = 0; i < std::size(kRawBytes); ++i) {
      std::printf("  plain TCP, %zu bytes and a byte back: %.1f us, %.0f Mbit/s\n", kRawBytes[i],
                  board->raw[i], static_cast<double>(kRawBytes[i]) * 8 / board->raw[i]);
    }
    if (static_cast<double>(kRawBytes[2]) * 8 / board->raw[2] > 930) break;
  }
  return absl::OkStatus();
}

void PrintSummary(const Board& board, const std::vector<Size>& sizes, int turns) {
  const double byte = board.raw[2] / static_cast<double>(kRawBytes[2]);
  std::printf("%-8s %10s %10s %10s %10s %10s   %s\n", "bytes", "auto us", "ring", "doubling", "halving-d.",
              "double-tr.", "auto / best alone; TCP bound / auto");
  for (size_t s = 0; s < sizes.size(); ++s) {
    std::printf("%-8s", Named(sizes[s].bytes).c_str());
    double best = 0;
    for (size_t a = 0; a < kAlgorithmCount; ++a) {
      const double median = Of(board, a, s, turns).Median();
      std::printf(" %10.1f", median);
      if (a > 0 && (best == 0 || median < best)) best = median;
    }
    const double chosen = Of(board, 0, s, turns).Median();
    const double bound = 2.0 * (kMachines - 1) / kMachines * static_cast<double>(sizes[s].bytes) * byte;
    std::printf("   %.3f  %.3f\n", chosen / best, bound / chosen);
  }
}

absl::Status MeasureAll(const Options& options, const Network& network, const Home& home) {
  std::vector<Size> sizes{{8, 300},       {64, 300},       {512, 300},   {4 << 10, 300}, {16 << 10, 100},
                          {64 << 10, 50}, {256 << 10, 20}, {1 << 20, 7}, {2 << 20, 5},   {16 << 20, 2}};
  if (options.quick) sizes = {{8, 200}, {4 << 10, 200}, {64 << 10, 30}, {2 << 20, 3}, {16 << 20, 1}};
  const int turns = options.quick ? kTurnsQuick : kTurns;
  Board* board = MakeBoard();
  if (board == nullptr) return absl::ResourceExhaustedError("no memory for the samples");
  GT_RETURN_IF_ERROR(LimitAndMeasureRaw(network, board));

  std::vector<Peer> peers;
  for (const auto& peer :
       {OpenMpi(network, home, options.folder, false), OpenMpi(network, home, options.folder, true),
        options.quick ? absl::NotFoundError("--quick") : Gloo(network, home, options.folder)}) {
    if (peer.ok()) {
      peers.push_back(*peer);
    } else {
      std::fprintf(stderr, "bench_allreduce_net: without a peer: %s\n",
                   std::string(peer.status().message()).c_str());
    }
  }
  std::vector<std::string> words;
  for (const Size& size : sizes) words.push_back(absl::StrCat(size.bytes, ":", size.calls));
  // One turn of ours measures everything once; peers are whole programs, so they come between such turns.
  std::vector<std::map<size_t, Series>> theirs(peers.size());
  Board* one_turn = MakeBoard();
  for (int turn = 0; turn < turns; ++turn) {
    GT_RETURN_IF_ERROR(MeasureOurs(network, sizes, 1, one_turn));
    for (size_t a = 0; a < kAlgorithmCount; ++a) {
      for (size_t s = 0; s < sizes.size(); ++s) board->sample[a][s][turn] = one_turn->sample[a][s][0];
    }
    for (size_t p = 0; p < peers.size(); ++p) {
      const std::string file = home.path() + "/samples";
      std::filesystem::remove(file);
      // mpirun across namespaces of one host crashes now and then: that turn has no sample of it.
      if (const absl::Status ran = peers[p].run(file, words); !ran.ok()) {
        std::fprintf(stderr, "bench_allreduce_net: %s: %s\n", peers[p].name.c_str(), ran.ToString().c_str());
        continue;
      }
      GT_ASSIGN_OR_RETURN(const BySize samples, ReadBySize(file, "a peer"));
      for (const auto& [bytes, sample] : samples) theirs[p][bytes].samples.push_back(sample);
    }
  }

  std::vector<Outcome> outcomes;
  for (size_t s = 0; s < sizes.size(); ++s) {
    const std::string name = absl::StrCat("4 machines, ", Named(sizes[s].bytes));
    const Series chosen = Of(*board, 0, s, turns);
    for (size_t a = 1; a < kAlgorithmCount; ++a) {
      outcomes.push_back(
          {name, "us", absl::StrCat("ours, ", kAlgorithms[a]), chosen, Of(*board, a, s, turns)});
    }
    for (size_t p = 0; p < peers.size(); ++p) {
      if (theirs[p].empty()) continue;
      outcomes.push_back({name, "us", peers[p].name, chosen, theirs[p][sizes[s].bytes]});
    }
  }
  PrintSummary(*board, sizes, turns);
  return Report(options, "allreduce_net", outcomes) == 0 ? absl::OkStatus()
                                                         : absl::InternalError("the report was not written");
}

int Main(Options options) {
  options.folder = std::filesystem::absolute(options.folder).string();
  if (geteuid() != 0 || !Run({"ip", "-V"}).ok() || !Run({"tc", "-V"}).ok()) {
    std::fprintf(stderr, "bench_allreduce_net: needs root, ip(8) and tc(8); nothing measured\n");
    return 0;
  }
  Network network;
  Home home;
  absl::Status status = home.Make();
  if (status.ok()) status = network.Make();
  if (status.ok()) status = MeasureAll(options, network, home);
  home.Remove();
  if (status.ok()) return 0;
  std::fprintf(stderr, "bench_allreduce_net: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
