// What the other ends of bench_actors have in common: orders on standard input, each a line "KIND COUNT" and
// answered by a line of numbers, and a second process to talk to. The standard library only.
//
//   sync      each call is made when the one before has been answered: seconds of all of them
//   windowed  64 calls are under way
//   wide      512 are
//   large     each has 1 MiB of arguments, 4 are under way
//   tail      64 are under way: the 99th percentile of the seconds of one call, and the 99.9th
//   memory    COUNT actors are made and called once: bytes of memory that each of them takes
#pragma once
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <istream>
#include <ostream>
#include <string>
#include <vector>

namespace gtrain::bench {

constexpr size_t kLargeBytes = 1 << 20;

inline void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "bench: a peer failed: %s\n", what);
  std::_Exit(1);
}

// Bytes of memory that this process has now.
inline int64_t ResidentBytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// What an order comes to: its time and, for "tail", that of each call.
class Figures {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Figures(bool each) : each_(each) {}

  // When a call is made, and when it is answered. Looking at the clock would be felt in the other orders.
  Clock::time_point Begin() const { return each_ ? Clock::now() : Clock::time_point(); }
  void End(Clock::time_point begin) {
    if (each_) calls_.push_back(Since(begin));
  }

  double Seconds() const { return Since(begin_); }
  // Of the calls, by nearest rank.
  double Quantile(double part) {
    Expect(!calls_.empty(), "no call was timed");
    std::sort(calls_.begin(), calls_.end());
    return calls_[static_cast<size_t>(std::ceil(part * static_cast<double>(calls_.size()))) - 1];
  }
  // For "memory", while the actors are there.
  void TakeMemory(int64_t actors) {
    bytes_ = static_cast<double>(ResidentBytes() - resident_) / static_cast<double>(actors);
  }
  double bytes() const { return bytes_; }

 private:
  static double Since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }

  const bool each_;
  const int64_t resident_ = ResidentBytes();
  const Clock::time_point begin_ = Clock::now();
  std::vector<double> calls_;
  double bytes_ = 0;
};

struct Order {
  std::string kind;
  int64_t count = 0;

  bool Large() const { return kind == "large"; }
  bool Tail() const { return kind == "tail"; }
  int64_t UnderWay() const {
    if (Large() || kind == "object") return 4;
    if (kind == "wide") return 512;
    return kind == "windowed" || Tail() ? 64 : 1;
  }
};

inline void Answer(const Order& order, Figures& figures, std::ostream& out) {
  if (order.Tail()) {
    out << figures.Quantile(0.99) << " " << figures.Quantile(0.999) << std::endl;
  } else {
    out << (order.kind == "memory" ? figures.bytes() : figures.Seconds()) << std::endl;
  }
}

// Until the input ends.
inline void AnswerOrders(std::istream& in, std::ostream& out,
                         const std::function<void(const Order&, Figures&)>& carry_out) {
  Order order;
  while (in >> order.kind >> order.count) {
    Figures figures(order.Tail());
    carry_out(order, figures);
    Answer(order, figures, out);
  }
}

// Forks a process that serves until this one ends, and returns the address that it announces. To be called
// before any library has threads.
using Announce = std::function<void(const std::string& address)>;
inline std::string StartServer(const std::function<void(const Announce&)>& serve) {
  int ends[2];
  Expect(pipe(ends) == 0, "pipe");
  const pid_t pid = fork();
  Expect(pid >= 0, "fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends[0]);
    serve([&ends](const std::string& address) {
      Expect(write(ends[1], address.data(), address.size()) == static_cast<ssize_t>(address.size()), "pipe");
      close(ends[1]);
    });
    std::_Exit(1);  // it serves for ever
  }
  close(ends[1]);
  std::string address;
  char buffer[256];
  for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof(buffer))) > 0;)
    address.append(buffer, static_cast<size_t>(n));
  close(ends[0]);
  Expect(!address.empty(), "the server did not come up");
  return address;
}

}  // namespace gtrain::bench
