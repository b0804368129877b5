// bench_actors: calls of an actor in its own process, beside what a program would write by hand: a thread
// that takes functions from a queue and answers by a std::future. And calls of an actor in another process of
// a job of two ranks on this machine, over shared memory and over the network, beside an echo over ZeroMQ's
// own sockets with CURVE and a round trip of UCX's active messages.
//
// All of a call is in it: arguments and results are packed and unpacked, mailboxes are bounded, each call has
// a deadline. A sample is the time of a call, or of an actor that is made, called once and ended.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "bench/peer_process.h"

namespace gtrain::bench {
namespace {

struct Row {
  const char* name;
  const char* kind;  // of actors_calls
  int count;
};
constexpr Row kWithin[] = {
    {"a call, then the next", "sync", 50'000},
    {"a call, 64 under way", "windowed", 100'000},
    {"an actor made, called, ended", "many", 10'000},
};
constexpr Row kBetween[] = {
    {"2 processes: a call, then the next", "sync", 5'000},
    {"2 processes: a call, 64 under way", "windowed", 50'000},
    {"2 processes: a call, 512 under way", "wide", 100'000},
    {"2 processes: a call of 1 MiB, 4 under way", "large", 200},
};
constexpr Row kOverNetwork[] = {
    {"over the network: a call, then the next", "sync", 5'000},
    {"over the network: a call, 64 under way", "windowed", 50'000},
    {"over the network: a call, 512 under way", "wide", 100'000},
    {"over the network: a call of 1 MiB, 4 under way", "large", 200},
};
constexpr Row kMadeElsewhere = {"2 processes: an actor made, called, ended", "many", 5'000};
constexpr Row kKept[] = {
    {"2 processes: a kept call, then the next", "kept_sync", 2'000},
    {"2 processes: a kept call, 512 under way", "kept_wide", 50'000},
};

absl::StatusOr<double> Ask(PeerProcess& process, const Row& row, const char* kind) {
  GT_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                      process.Ask(absl::StrCat(kind, " ", row.count), absl::Minutes(1)));
  if (seconds.size() != 1) return absl::InternalError("one number a line was expected");
  return seconds[0] / row.count * 1e6;
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), cluster_(options.folder) {}

  absl::StatusOr<std::vector<Outcome>> MeasureAll() {
    const std::string folder = absl::StrCat(options_.folder, "/../bench/"), log = folder + "actors_calls.log";
    GT_ASSIGN_OR_RETURN(const auto actors, PeerProcess::Start({folder + "actors_calls", "actors"}, log));
    GT_ASSIGN_OR_RETURN(const auto queue, PeerProcess::Start({folder + "actors_calls", "queue"}, log));
    for (const Row& row : kWithin)
      GT_RETURN_IF_ERROR(MeasureRow(row, *actors, "thread with a queue", *queue, row.kind));
    GT_ASSIGN_OR_RETURN(const auto zmq, PeerProcess::Start({folder + "actors_zmq"}, log));
    GT_ASSIGN_OR_RETURN(const auto ucx, PeerProcess::Start({"/bin/bash", folder + "actors_ucx.sh"}, log));
    GT_RETURN_IF_ERROR(cluster_.Start());
    GT_ASSIGN_OR_RETURN(auto job, StartJob("near", "on", log));
    for (const Row& row : kBetween)
      GT_RETURN_IF_ERROR(MeasureRow(row, *job, "ZeroMQ with CURVE, echo", *zmq, row.kind));
    if (Ask(*ucx, {"", "sync", 100}, "sync").ok()) {
      GT_RETURN_IF_ERROR(MeasureRow(kBetween[0], *job, "UCX active messages", *ucx, "sync"));
    } else {
      std::fprintf(stderr,
                   "bench_actors: left out: UCX active messages, ucx_perftest says no numbers "
                   "(tools/install.sh --bench)\n");
    }
    GT_RETURN_IF_ERROR(MeasureRow(kMadeElsewhere, *job, "in this process", *actors, "many"));
    for (const Row& row : kKept) {
      GT_RETURN_IF_ERROR(MeasureRow(row, *job, "the same, not kept", *job, row.kind + sizeof("kept_") - 1));
    }
    job.reset();
    GT_ASSIGN_OR_RETURN(job, StartJob("far", "off", log));
    for (const Row& row : kOverNetwork)
      GT_RETURN_IF_ERROR(MeasureRow(row, *job, "ZeroMQ with CURVE, echo", *zmq, row.kind));
    job.reset();
    cluster_.Stop();
    return outcomes_;
  }

 private:
  // Two ranks, asked over two named pipes.
  absl::StatusOr<std::unique_ptr<PeerProcess>> StartJob(const char* name, const char* shared_memory,
                                                        const std::string& log) {
    constexpr char kScript[] =
        R"(mkfifo "$1.in" "$1.out"; GTRAIN_ACTORS_SHM="$4" "$2" launch -n 2 -- "$3" job "$1.in" "$1.out" >&2 & cat "$1.out" & cat >"$1.in"; wait)";
    return PeerProcess::Start(
        {"/bin/bash", "-c", kScript, "bash", absl::StrCat(cluster_.home().path(), "/", name),
         cluster_.gtrain(), absl::StrCat(options_.folder, "/../bench/actors_calls"), shared_memory},
        log);
  }
  absl::Status MeasureRow(const Row& row, PeerProcess& ours, const char* name, PeerProcess& peer,
                          const char* kind) {
    const Comparison comparison{row.name,
                                "us",
                                [&] { return Ask(ours, row, row.kind); },
                                {{name, [&] { return Ask(peer, row, kind); }}}};
    GT_ASSIGN_OR_RETURN(const std::vector<Outcome> measured, Measure(comparison, options_.quick ? 3 : 11));
    outcomes_.insert(outcomes_.end(), measured.begin(), measured.end());
    return absl::OkStatus();
  }

  const Options options_;
  LocalCluster cluster_;
  std::vector<Outcome> outcomes_;
};

int Main(const Options& options) {
  const absl::StatusOr<std::vector<Outcome>> outcomes = Bench(options).MeasureAll();
  if (outcomes.ok()) return Report(options, "actors", *outcomes);
  std::fprintf(stderr, "bench_actors: %s\n", std::string(outcomes.status().message()).c_str());
  return 1;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
