// bench_actors: calls of an actor in its own process, and in another process of a job on this machine, over
// shared memory and over the network, in turns with what a program would write by hand or build on: a thread
// with a queue, ZeroMQ with CURVE, UCX, gRPC, Cap'n Proto, CAF and Ray, as far as they are installed. And
// what many actors cost: to be made, to be kept, and to be started as processes.
//
// All of a call is in it: arguments and results are packed and unpacked, mailboxes are bounded, each call has
// a deadline. Every peer is a process of its own that is asked line by line (orders.h), and carries out one
// order before any is measured.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "bench/peer_process.h"

namespace gtrain::bench {
namespace {

// A row of the table.
struct Row {
  const char* name;
  const char* kind;   // of the order, as orders.h and actors_calls.cc have them
  int count;          // of calls; a quarter with --quick
  size_t number = 0;  // which one of the answer
};
constexpr const char* kManyName = "an actor made, called, ended";
constexpr Row kWithin[] = {
    {"a call, then the next", "sync", 50'000},
    {"a call, 64 under way", "windowed", 100'000},
    {kManyName, "many", 10'000},
};
constexpr Row kBetween[] = {
    {"2 processes: a call, then the next", "sync", 5'000},
    {"2 processes: a call, 64 under way", "windowed", 50'000},
    {"2 processes: p99 of 64 under way", "tail", 50'000, 0},
    {"2 processes: p99.9 of 64 under way", "tail", 50'000, 1},
    {"2 processes: a call, 512 under way", "wide", 100'000},
    {"2 processes: a call of 1 MiB, 4 under way", "large", 200},
};
constexpr Row kOverNetwork[] = {
    {"over the network: a call, then the next", "sync", 5'000},
    {"over the network: a call, 64 under way", "windowed", 50'000},
    {"over the network: p99 of 64 under way", "tail", 50'000, 0},
    {"over the network: p99.9 of 64 under way", "tail", 50'000, 1},
    {"over the network: a call, 512 under way", "wide", 100'000},
    {"over the network: a call of 1 MiB, 4 under way", "large", 200},
};
constexpr Row kMadeElsewhere = {"2 processes: an actor made, called, ended", "many", 5'000};
constexpr Row kObject = {"2 processes: a call with an object of 1 MiB, 4 under way", "object", 2'000};
constexpr Row kShared = {"5 processes: a MiB of an object of 1 GiB, made by one, read by four", "shared",
                         1024};
constexpr Row kKept[] = {
    {"2 processes: a kept call, then the next", "kept_sync", 2'000},
    {"2 processes: a kept call, 512 under way", "kept_wide", 50'000},
};
constexpr Row kRay[] = {
    {"1:1 calls, sync", "sync", 50'000},
    {"1:1 calls, 1,000 at once", "batch", 500'000},
    {"2:2 calls, 1,000 at once", "pairs", 500'000},
};
constexpr Row kRayAlone[] = {
    {"Ray alone: single client put calls", "put", 2'000},
    {"Ray alone: single client get calls", "get", 10'000},
};

// A program that takes orders, and what it is called in the table.
struct Program {
  const char* name;
  const char* file;        // in build/bench
  const char* word;        // its argument; "" for none
  const char* kinds;       // of its orders
  int fewer;               // it makes one in so many of our calls, so that slow ones take no minutes
  const char* needs = "";  // what must be installed beside it
};
constexpr const char* kUcx = "/usr/bin/ucx_perftest";
constexpr const char* kAllBetween = "sync windowed wide large tail";
constexpr Program kQueue = {"thread with a queue", "actors_calls", "queue", "sync windowed many", 1};
constexpr Program kCaf = {"CAF, between two actors", "actors_caf", "here", "sync windowed many", 1};
constexpr Program kPeersWithin[] = {kQueue, kCaf};
constexpr Program kPeersBetween[] = {
    {"ZeroMQ with CURVE, echo", "actors_zmq", "", kAllBetween, 1},
    {"gRPC, Unix socket", "actors_grpc", "unix", kAllBetween, 5},
    {"Cap'n Proto, Unix socket", "actors_capnp", "unix", kAllBetween, 5},
    {"UCX active messages", "actors_ucx.sh", "sm,self", "sync", 1, kUcx},
    {"UCX active messages, one way", "actors_ucx.sh", "sm,self", "windowed wide large", 1, kUcx},
};
constexpr Program kPeersOverNetwork[] = {
    {"ZeroMQ with CURVE, echo", "actors_zmq", "", kAllBetween, 1},
    {"gRPC, TCP", "actors_grpc", "tcp", kAllBetween, 5},
    {"Cap'n Proto, TCP", "actors_capnp", "tcp", kAllBetween, 5},
    {"CAF, TCP", "actors_caf", "tcp", kAllBetween, 5},
    {"UCX active messages, TCP", "actors_ucx.sh", "tcp,self", "sync", 1, kUcx},
    {"UCX active messages, TCP, one way", "actors_ucx.sh", "tcp,self", "windowed wide large", 1, kUcx},
};
constexpr Program kRayProgram = {"Ray", "actors_ray.py", "ray", "sync batch pairs put get", 50};
constexpr const char* kNotThere = " is not there; tools/install.sh --bench, then make build";

constexpr const char* kIdleName = "an idle actor of 100,000";
constexpr int kIdleActors = 100'000;
// Processes of actors, and what there must be of memory for each, with its share of keepers.
constexpr int kRanks = 1'000, kRanksQuick = 32;
constexpr int64_t kRankBytes = int64_t{6} << 20;

// The number of the answer, or the microseconds of one call.
absl::StatusOr<double> Ask(PeerProcess& process, const Row& row, const char* kind, int count) {
  GT_ASSIGN_OR_RETURN(const std::vector<double> numbers,
                      process.Ask(absl::StrCat(kind, " ", count), absl::Minutes(1)));
  if (numbers.size() <= row.number) return absl::InternalError("it answered with too few numbers");
  const std::string name = kind;
  if (name == "memory") return numbers[0];
  return numbers[row.number] * 1e6 / (name == "tail" ? 1 : count);
}

std::string PlacedName(int ranks) { return absl::StrCat(ranks, " processes placed, each answers"); }

void LeftOut(const Program& program, absl::string_view why) {
  std::fprintf(stderr, "bench_actors: left out: %s: %s\n", program.name, std::string(why).c_str());
}

// The peers of one part of the table that are there, started.
class Peers {
 public:
  explicit Peers(std::string folder) : folder_(std::move(folder)) {}

  // Starts it; a line says why where that cannot be.
  void Add(const Program& program) {
    const std::string file = folder_ + program.file;
    for (const std::string& needed : {file, std::string(program.needs)}) {
      if (!needed.empty() && !Executable(needed)) return LeftOut(program, absl::StrCat(needed, kNotThere));
    }
    std::vector<std::string> words = {file};
    if (*program.word != '\0') words.push_back(program.word);
    Take(program, words);
  }
  // Likewise, of words of its own.
  void Take(const Program& program, const std::vector<std::string>& words) {
    absl::StatusOr<std::unique_ptr<PeerProcess>> process =
        PeerProcess::Start(words, absl::StrCat(folder_, program.file, ".log"));
    if (!process.ok()) return LeftOut(program, process.status().message());
    const std::string first = std::vector<std::string>(absl::StrSplit(program.kinds, ' '))[0];
    const absl::Status works = Ask(**process, {"", "", 0}, first.c_str(), 100).status();
    if (!works.ok()) return LeftOut(program, works.message());
    running_.push_back({program, std::move(*process)});
  }
  std::vector<Peer> For(const Row& row) const {
    std::vector<Peer> peers;
    for (const Running& one : running_) {
      if (!Knows(one.program, row.kind)) continue;
      PeerProcess* const process = one.process.get();
      const int count = std::max(1, row.count / one.program.fewer);
      peers.push_back({one.program.name, [=] { return Ask(*process, row, row.kind, count); }});
    }
    return peers;
  }

 private:
  struct Running {
    Program program;
    std::unique_ptr<PeerProcess> process;
  };

  static bool Knows(const Program& program, const std::string& kind) {
    const std::vector<std::string> kinds = absl::StrSplit(program.kinds, ' ');
    return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
  }

  const std::string folder_;
  std::vector<Running> running_;
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        folder_(absl::StrCat(options.folder, "/../bench/")),
        calls_(folder_ + "actors_calls"),
        cluster_(options.folder) {
    // The cluster has a HOME of its own. The cache stays the user's: Ray is there.
    const char* const home = std::getenv("HOME");
    if (home != nullptr) setenv("XDG_CACHE_HOME", absl::StrCat(home, "/.cache").c_str(), /*replace=*/0);
  }

  absl::StatusOr<std::vector<Outcome>> MeasureAll() {
    absl::Status status = Wants("within") ? MeasureWithin() : absl::OkStatus();
    if (status.ok() && Wants("memory")) status = MeasureMemory();
    if (status.ok()) status = MeasureJobs();
    GT_RETURN_IF_ERROR(status);
    return outcomes_;
  }

 private:
  using Process = absl::StatusOr<std::unique_ptr<PeerProcess>>;

  bool Wants(const std::string& part) const { return options_.only.empty() || options_.only == part; }
  int Turns() const { return options_.quick ? 2 : 11; }

  absl::Status MeasureWithin() {
    GT_ASSIGN_OR_RETURN(const auto ours, StartOurs());
    Peers peers(folder_);
    for (const Program& program : kPeersWithin) peers.Add(program);
    return MeasureRows(kWithin, *ours, peers);
  }

  // A process a sample: what one has freed it does not give back.
  absl::Status MeasureMemory() {
    const Row row = {kIdleName, "memory", kIdleActors};
    const auto sample = [this, row](const std::string& file, const char* word) -> Sample {
      return [=, log = Log()]() -> absl::StatusOr<double> {
        GT_ASSIGN_OR_RETURN(const auto process, PeerProcess::Start({file, word}, log));
        return Ask(*process, row, row.kind, row.count);
      };
    };
    const std::string caf = folder_ + kCaf.file;
    std::vector<Peer> peers;
    if (Executable(caf)) peers.push_back({"CAF", sample(caf, kCaf.word)});
    if (!Executable(caf)) LeftOut(kCaf, absl::StrCat(caf, kNotThere));
    return Keep(Measure({row.name, "B", sample(calls_, "actors"), peers}, options_.quick ? 1 : 5));
  }

  absl::Status MeasureJobs() {
    const bool ray = options_.only == "ray" || (options_.only.empty() && !options_.quick);
    if (!ray && !Wants("between") && !Wants("network") && !Wants("processes")) return absl::OkStatus();
    GT_RETURN_IF_ERROR(cluster_.Start());
    absl::Status status = Wants("between") ? MeasureBetween() : absl::OkStatus();
    if (status.ok() && Wants("network")) status = MeasureOverNetwork();
    if (status.ok() && Wants("processes")) status = MeasureProcesses();
    if (status.ok() && ray) status = MeasureRay();
    cluster_.Stop();
    return status;
  }

  absl::Status MeasureBetween() {
    GT_ASSIGN_OR_RETURN(const auto here, StartOurs());
    GT_ASSIGN_OR_RETURN(const auto job, StartJob("near", "on", 2));
    Peers peers(folder_);
    for (const Program& program : kPeersBetween) peers.Add(program);
    GT_RETURN_IF_ERROR(MeasureRows(kBetween, *job, peers));
    const Row made = Sized(kMadeElsewhere);
    GT_RETURN_IF_ERROR(MeasureRow(made, *job, {OfOurs("in this process", made, *here, "many")}));
    const Row object = Sized(kObject);
    GT_RETURN_IF_ERROR(MeasureRow(object, *job, {OfOurs("the bytes in the call", object, *job, "large")}));
    GT_ASSIGN_OR_RETURN(const auto readers, StartJob("shared", "on", 5));
    // A gigabyte may be more than a rank has of this machine's memory.
    if (const absl::Status shared = MeasureRow(Sized(kShared), *readers, {}); !shared.ok())
      std::fprintf(stderr, "bench_actors: left out: %s: %s\n", kShared.name,
                   std::string(shared.message()).c_str());
    for (const Row& whole : kKept) {
      const Row row = Sized(whole);
      const char* const kind = row.kind + sizeof("kept_") - 1;
      GT_RETURN_IF_ERROR(MeasureRow(row, *job, {OfOurs("the same, not kept", row, *job, kind)}));
    }
    return absl::OkStatus();
  }

  absl::Status MeasureOverNetwork() {
    GT_ASSIGN_OR_RETURN(const auto job, StartJob("far", "off", 2));
    Peers peers(folder_);
    for (const Program& program : kPeersOverNetwork) peers.Add(program);
    return MeasureRows(kOverNetwork, *job, peers);
  }

  // From the command until the driver has an answer of an actor in each rank.
  absl::Status MeasureProcesses() {
    const int ranks = options_.quick ? kRanksQuick : RanksThatFit();
    const auto placed = [this, ranks]() -> absl::StatusOr<double> {
      const std::string file = absl::StrCat(cluster_.home().path(), "/placed");
      const auto begin = std::chrono::steady_clock::now().time_since_epoch();
      GT_RETURN_IF_ERROR(
          Run({cluster_.gtrain(), "launch", "-n", absl::StrCat(ranks), "--", calls_, "place", file},
              absl::Minutes(3)));
      GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(file, 64));
      int64_t end = 0;
      if (!absl::SimpleAtoi(text, &end)) return absl::InternalError(absl::StrCat("the driver wrote: ", text));
      return std::chrono::duration<double>(std::chrono::nanoseconds(end) - begin).count();
    };
    return Keep(Measure({PlacedName(ranks), "s", placed, {}}, options_.quick ? 1 : 3));
  }

  absl::Status MeasureRay() {
    const std::string script = folder_ + "bench_ray.sh";
    if (const absl::Status there = Run({"/bin/bash", script, "--python"}); !there.ok()) {
      LeftOut(kRayProgram, there.message());
      return absl::OkStatus();
    }
    GT_ASSIGN_OR_RETURN(const auto job, StartJob("crowd", "on", 4));
    Peers ray(folder_);
    ray.Take(kRayProgram,
             {"/bin/bash", "-c", R"(python=$("$0" --python) && exec "$python" "$1" "$2")", script,
              folder_ + kRayProgram.file, absl::StrCat(cluster_.home().path(), "/", kRayProgram.word)});
    GT_RETURN_IF_ERROR(MeasureRows(kRay, *job, ray));
    for (const Row& row : kRayAlone) {
      for (const Peer& peer : ray.For(Sized(row)))
        GT_RETURN_IF_ERROR(Keep(Measure({row.name, "us", peer.sample, {}}, Turns())));
    }
    return absl::OkStatus();
  }

  // Half of the free memory, at most.
  static int RanksThatFit() {
    std::ifstream in("/proc/meminfo");
    int64_t kib = 0;
    for (std::string word; in >> word && kib == 0;) {
      if (word == "MemAvailable:") in >> kib;
    }
    const auto fit = static_cast<int>(std::min<int64_t>(kRanks, kib * 1024 / 2 / kRankBytes));
    if (fit < kRanks)
      std::fprintf(stderr, "bench_actors: %d processes instead of %d: there is no memory for more\n", fit,
                   kRanks);
    return fit;
  }

  std::string Log() const { return folder_ + "actors_calls.log"; }
  Process StartOurs() const { return PeerProcess::Start({calls_, "actors"}, Log()); }
  // Ranks of a job, asked over two named pipes.
  Process StartJob(const char* name, const char* shared_memory, int ranks) const {
    constexpr char kScript[] =
        R"(mkfifo "$1.in" "$1.out"; GTRAIN_ACTORS_SHM="$4" "$2" launch -n "$5" -- "$3" job "$1.in" "$1.out" >&2 & cat "$1.out" & cat >"$1.in"; wait)";
    return PeerProcess::Start(
        {"/bin/bash", "-c", kScript, "bash", absl::StrCat(cluster_.home().path(), "/", name),
         cluster_.gtrain(), calls_, shared_memory, absl::StrCat(ranks)},
        Log());
  }
  static Peer OfOurs(const char* name, const Row& row, PeerProcess& process, const char* kind) {
    return {name, [=, &process] { return Ask(process, row, kind, row.count); }};
  }

  Row Sized(Row row) const {
    if (options_.quick) row.count /= 4;
    return row;
  }
  template <size_t kRows>
  absl::Status MeasureRows(const Row (&rows)[kRows], PeerProcess& ours, const Peers& peers) {
    for (const Row& whole : rows) {
      const Row row = Sized(whole);
      GT_RETURN_IF_ERROR(MeasureRow(row, ours, peers.For(row)));
    }
    return absl::OkStatus();
  }
  absl::Status MeasureRow(const Row& row, PeerProcess& ours, std::vector<Peer> peers) {
    const Sample sample = [&] { return Ask(ours, row, row.kind, row.count); };
    return Keep(Measure({row.name, "us", sample, std::move(peers)}, Turns()));
  }
  absl::Status Keep(absl::StatusOr<std::vector<Outcome>> measured) {
    GT_RETURN_IF_ERROR(measured.status());
    outcomes_.insert(outcomes_.end(), measured->begin(), measured->end());
    return absl::OkStatus();
  }

  const Options options_;
  const std::string folder_, calls_;
  LocalCluster cluster_;
  std::vector<Outcome> outcomes_;
};

// What has a goal, and what people compare as rates.
void PrintGoals(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) {
    const double ours = outcome.ours.Median(), rate = 1e6 / ours;
    if (outcome.name == kManyName && outcome.peer == kQueue.name)
      std::printf("%s: %.0f actors/s (goal: 50,000)\n", kManyName, rate);
    if (outcome.name == kIdleName) std::printf("%s: %.0f bytes (goal: 4,096)\n", kIdleName, ours);
    if (outcome.name == kObject.name)
      std::printf("%s: %.1f GB/s (goal: 5)\n", kObject.name, rate * (1 << 20) / 1e9);
    if (outcome.name == PlacedName(kRanks)) std::printf("%s: %.2f s (goal: 3)\n", outcome.name.c_str(), ours);
    if (outcome.peer == kRayProgram.name)
      std::printf("%s: %.0f /s, Ray %.0f /s\n", outcome.name.c_str(), rate, 1e6 / outcome.theirs.Median());
    if (absl::StartsWith(outcome.name, "Ray alone")) std::printf("%s: %.0f /s\n", outcome.name.c_str(), rate);
  }
}

int Main(const Options& options) {
  const absl::StatusOr<std::vector<Outcome>> outcomes = Bench(options).MeasureAll();
  if (!outcomes.ok()) {
    std::fprintf(stderr, "bench_actors: %s\n", std::string(outcomes.status().message()).c_str());
    return 1;
  }
  const int status = Report(options, "actors", *outcomes);
  PrintGoals(*outcomes);
  return status;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) {
  return gtrain::bench::Main(gtrain::bench::ParseOptions(
      argc, argv, {"within", "memory", "between", "network", "processes", "ray"}));
}
