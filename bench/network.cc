#include "bench/network.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "bench/local_cluster.h"

namespace gtrain::bench {
namespace {

constexpr absl::Duration kTcpDeadline = absl::Minutes(1);
constexpr uint16_t kPlainPort = 4000;

double Now() { return static_cast<double>(RealClock().Now().ns) * 1e-3; }  // microseconds

// Called in a child, which is in that namespace from here on.
bool Enter(const std::string& name) {
  const UniqueFd file(open(absl::StrCat("/run/netns/", name).c_str(), O_RDONLY | O_CLOEXEC));
  // UCX looks for interfaces in /sys, which shows those of the namespace it was mounted in.
  return file.valid() && setns(file.get(), CLONE_NEWNET) == 0 && unshare(CLONE_NEWNS) == 0 &&
         mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0;
}

absl::Status Whole(int fd, char* data, size_t bytes, bool send_it) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t n =
        send_it ? send(fd, data + at, bytes - at, MSG_NOSIGNAL) : recv(fd, data + at, bytes - at, 0);
    if (n <= 0) return absl::ErrnoToStatus(errno, "plain TCP");
    at += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

// A connection that sends at once: one side listens at its own address, the other calls it there.
absl::StatusOr<UniqueFd> Meet(bool listens, const std::string& host, uint16_t port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  inet_pton(AF_INET, host.c_str(), &to.sin_addr);
  auto* address = reinterpret_cast<sockaddr*>(&to);
  const int on = 1;
  if (listens) {
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
  return fd;
}

// The first side sends to the other, which listens at `host`. Medians into `medians` by the first.
absl::Status TcpSide(bool first, const std::string& host, const std::vector<size_t>& sizes, int times,
                     double* medians) {
  GT_ASSIGN_OR_RETURN(const UniqueFd fd, Meet(!first, host, kPlainPort));
  std::vector<char> data(*std::max_element(sizes.begin(), sizes.end()));
  for (size_t s = 0; s < sizes.size(); ++s) {
    std::vector<double> samples;
    for (int i = 0; i < times; ++i) {
      const double start = Now();
      GT_RETURN_IF_ERROR(Whole(fd.get(), data.data(), sizes[s], first));
      GT_RETURN_IF_ERROR(Whole(fd.get(), data.data(), 1, !first));
      samples.push_back(Now() - start);
    }
    std::sort(samples.begin(), samples.end());
    if (first) medians[s] = samples[samples.size() / 2];
  }
  return absl::OkStatus();
}

// Both directions at once. Gives the core away while nothing moves.
absl::Status Swap(int fd, const char* out, char* in, size_t bytes) {
  for (size_t sent = 0, got = 0; sent < bytes || got < bytes;) {
    const ssize_t s = sent < bytes ? send(fd, out + sent, bytes - sent, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
    if (s < 0 && errno != EAGAIN) return absl::ErrnoToStatus(errno, "plain TCP");
    const ssize_t g = got < bytes ? recv(fd, in + got, bytes - got, MSG_DONTWAIT) : -1;
    if (got < bytes && (g == 0 || (g < 0 && errno != EAGAIN))) return absl::ErrnoToStatus(errno, "plain TCP");
    if (s > 0) sent += static_cast<size_t>(s);
    if (g > 0) got += static_cast<size_t>(g);
    if (s <= 0 && g <= 0) sched_yield();
  }
  return absl::OkStatus();
}

// samples[call], of all sizes one behind the other.
absl::Status DoublingSide(int self, int machines, const std::vector<Network::Calls>& sizes, double* samples) {
  std::vector<UniqueFd> partners;
  for (int mask = 1; mask < machines; mask *= 2) {
    const int lower = self & ~mask;
    const auto port = static_cast<uint16_t>(kPlainPort + mask);
    GT_ASSIGN_OR_RETURN(UniqueFd fd, Meet(self == lower, Network::AddressOf(lower), port));
    partners.push_back(std::move(fd));
  }
  std::vector<float> data, in;
  const auto all_reduce = [&](size_t bytes) -> absl::Status {
    for (const UniqueFd& partner : partners) {
      GT_RETURN_IF_ERROR(Swap(partner.get(), reinterpret_cast<const char*>(data.data()),
                              reinterpret_cast<char*>(in.data()), bytes));
      for (size_t i = 0; i < bytes / sizeof(float); ++i) data[i] += in[i];
    }
    return absl::OkStatus();
  };
  for (const Network::Calls& size : sizes) {
    data.assign(size.bytes / sizeof(float), 0.0f);
    in.assign(data.size(), 0.0f);
    for (int call = -1 - size.times / 10; call < size.times; ++call) {
      GT_RETURN_IF_ERROR(all_reduce(sizeof(float)));
      const double start = Now();
      GT_RETURN_IF_ERROR(all_reduce(size.bytes));
      if (call >= 0) *samples++ = Now() - start;
    }
  }
  return absl::OkStatus();
}

}  // namespace

pid_t StartOnCore(int core, const std::function<absl::Status()>& body) {
  std::fflush(nullptr);  // what is buffered here is not to be printed by children as well
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (core >= 0) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<size_t>(core), &cores);
    sched_setaffinity(0, sizeof(cores), &cores);
  }
  const absl::Status status = body();
  if (!status.ok()) std::fprintf(stderr, "bench: a rank on core %d: %s\n", core, status.ToString().c_str());
  _exit(status.ok() ? 0 : 1);
}

Network::Network(int machines, int leaves)
    : machines_(machines), leaves_(leaves), name_(absl::StrCat("gtb", getpid())), switch_(name_ + "s") {}

Network::~Network() {
  for (const std::string& name : made_) (void)Run({"ip", "netns", "del", name});
}

absl::Status Network::Make() {
  if (geteuid() != 0 || !Run({"ip", "-V"}).ok() || !Run({"tc", "-V"}).ok())
    return absl::FailedPreconditionError("network namespaces need root, ip(8) and tc(8)");
  GT_RETURN_IF_ERROR(Add(switch_));
  GT_RETURN_IF_ERROR(AddBridge("br0"));
  for (int leaf = 0; leaf < leaves_; ++leaf) {
    const std::string bridge = absl::StrCat("leaf", leaf), up = absl::StrCat("up", leaf),
                      down = absl::StrCat("down", leaf);
    GT_RETURN_IF_ERROR(AddBridge(bridge));
    GT_RETURN_IF_ERROR(
        Run({"ip", "-n", switch_, "link", "add", "name", up, "type", "veth", "peer", "name", down}));
    GT_RETURN_IF_ERROR(Run({"ip", "-n", switch_, "link", "set", up, "master", bridge, "up"}));
    GT_RETURN_IF_ERROR(Run({"ip", "-n", switch_, "link", "set", down, "master", "br0", "up"}));
  }
  for (int i = 0; i < machines_; ++i) {
    const std::string name = NameOf(i), port = absl::StrCat("p", i);
    const std::string bridge = leaves_ == 0 ? "br0" : absl::StrCat("leaf", i * leaves_ / machines_);
    GT_RETURN_IF_ERROR(Add(name));
    GT_RETURN_IF_ERROR(Run({"ip", "-n", switch_, "link", "add", "name", port, "type", "veth", "peer", "name",
                            "eth0", "netns", name}));
    GT_RETURN_IF_ERROR(Run({"ip", "-n", switch_, "link", "set", port, "master", bridge, "up"}));
    GT_RETURN_IF_ERROR(Run({"ip", "-n", name, "addr", "add", AddressOf(i) + "/24", "dev", "eth0"}));
    GT_RETURN_IF_ERROR(Run({"ip", "-n", name, "link", "set", "eth0", "up"}));
  }
  return absl::OkStatus();
}

absl::Status Network::LimitEnd(const std::string& name, const std::string& device, const std::string& rate,
                               const std::string& burst) const {
  return Run({"ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate",
              rate, "burst", burst, "latency", "50ms"});
}

absl::Status Network::Limit(const std::string& rate, const std::string& burst) const {
  for (int i = 0; i < machines_; ++i) {
    GT_RETURN_IF_ERROR(LimitEnd(NameOf(i), "eth0", rate, burst));
    GT_RETURN_IF_ERROR(LimitEnd(switch_, absl::StrCat("p", i), rate, burst));
  }
  return absl::OkStatus();
}

absl::Status Network::LimitUplinks(const std::string& rate, const std::string& burst) const {
  for (int leaf = 0; leaf < leaves_; ++leaf) {
    GT_RETURN_IF_ERROR(LimitEnd(switch_, absl::StrCat("up", leaf), rate, burst));
    GT_RETURN_IF_ERROR(LimitEnd(switch_, absl::StrCat("down", leaf), rate, burst));
  }
  return absl::OkStatus();
}

std::string Network::NameOf(int machine) const { return absl::StrCat(name_, "n", machine); }
std::string Network::AddressOf(int machine) { return absl::StrCat("10.77.0.", machine + 1); }
int Network::CoreOf(int machine) { return machine % static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)); }

std::vector<std::string> Network::Inside(int machine) const {
  return {"ip", "netns", "exec", NameOf(machine), "taskset", "-c", absl::StrCat(CoreOf(machine))};
}

pid_t Network::Start(int machine, const std::function<absl::Status()>& body) const {
  return StartOnCore(machine, CoreOf(machine), body);
}

pid_t Network::StartOnCore(int machine, int core, const std::function<absl::Status()>& body) const {
  return bench::StartOnCore(core, [name = NameOf(machine), &body] {
    return Enter(name) ? body() : absl::ErrnoToStatus(errno, "entering " + name);
  });
}

absl::StatusOr<std::vector<double>> Network::PlainTcp(const std::vector<size_t>& bytes, int times,
                                                      bool all) const {
  const int senders = all ? machines_ : 1;
  const size_t size = senders * bytes.size() * sizeof(double);
  void* shared = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap");
  auto* medians = static_cast<double*>(shared);
  std::vector<pid_t> sides;
  for (int i = 0; i < senders; ++i) {
    const int next = (i + 1) % machines_;
    const std::string host = AddressOf(next);
    double* mine = medians + i * bytes.size();
    sides.push_back(Start(i, [&] { return TcpSide(true, host, bytes, times, mine); }));
    sides.push_back(Start(next, [&] { return TcpSide(false, host, bytes, times, mine); }));
  }
  absl::Status ran = WaitForAll(sides, "plain TCP", kTcpDeadline);
  std::vector<double> result(bytes.size());
  for (size_t i = 0; i < senders * bytes.size(); ++i)
    result[i % bytes.size()] = std::max(result[i % bytes.size()], medians[i]);
  munmap(shared, size);
  GT_RETURN_IF_ERROR(ran);
  return result;
}

absl::StatusOr<std::vector<double>> Network::PlainDoubling(const std::vector<Calls>& sizes) const {
  size_t calls = 0;
  for (const Calls& size : sizes) calls += static_cast<size_t>(size.times);
  const size_t bytes = static_cast<size_t>(machines_) * calls * sizeof(double);
  void* shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap");
  auto* samples = static_cast<double*>(shared);
  std::vector<pid_t> sides;
  for (int i = 0; i < machines_; ++i) {
    double* mine = samples + static_cast<size_t>(i) * calls;
    sides.push_back(Start(i, [&, i, mine] { return DoublingSide(i, machines_, sizes, mine); }));
  }
  absl::Status ran = WaitForAll(sides, "plain doubling", kTcpDeadline);
  std::vector<double> medians;
  size_t at = 0;
  for (const Calls& size : sizes) {
    std::vector<double> slowest;
    for (int call = 0; call < size.times; ++call, ++at) {
      slowest.push_back(0);
      for (size_t i = 0; i < static_cast<size_t>(machines_); ++i)
        slowest.back() = std::max(slowest.back(), samples[i * calls + at]);
    }
    std::sort(slowest.begin(), slowest.end());
    medians.push_back(slowest[slowest.size() / 2]);
  }
  munmap(shared, bytes);
  GT_RETURN_IF_ERROR(ran);
  return medians;
}

absl::Status Network::AddBridge(const std::string& name) {
  GT_RETURN_IF_ERROR(Run({"ip", "-n", switch_, "link", "add", name, "type", "bridge"}));
  return Run({"ip", "-n", switch_, "link", "set", name, "up"});
}

absl::Status Network::Add(const std::string& name) {
  GT_RETURN_IF_ERROR(Run({"ip", "netns", "add", name}));
  made_.push_back(name);
  return Run({"ip", "-n", name, "link", "set", "lo", "up"});
}

}  // namespace gtrain::bench
