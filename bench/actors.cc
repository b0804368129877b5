// bench_actors: calls of an actor in its own process, beside what a program would write by hand: a thread
// that takes functions from a queue and answers by a std::future. Between processes there is nothing yet.
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
#include "bench/peer_process.h"

namespace gtrain::bench {
namespace {

struct Row {
  const char* name;
  const char* kind;  // of actors_calls
  int count;
};
constexpr Row kRows[] = {
    {"a call, then the next", "sync", 50'000},
    {"a call, 64 under way", "windowed", 100'000},
    {"an actor made, called, ended", "many", 10'000},
};

absl::StatusOr<std::vector<Outcome>> MeasureAll(const Options& options) {
  const std::string program = absl::StrCat(options.folder, "/../bench/actors_calls");
  const std::string log = absl::StrCat(options.folder, "/../bench/actors_calls.log");
  GT_ASSIGN_OR_RETURN(const std::unique_ptr<PeerProcess> actors,
                      PeerProcess::Start({program, "actors"}, log));
  GT_ASSIGN_OR_RETURN(const std::unique_ptr<PeerProcess> queue, PeerProcess::Start({program, "queue"}, log));
  std::vector<Outcome> outcomes;
  for (const Row& row : kRows) {
    const auto sample = [&row](PeerProcess& process) -> absl::StatusOr<double> {
      GT_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                          process.Ask(absl::StrCat(row.kind, " ", row.count), absl::Minutes(1)));
      if (seconds.size() != 1) return absl::InternalError("actors_calls says one number a line");
      return seconds[0] / row.count * 1e6;
    };
    const Comparison comparison{row.name,
                                "us",
                                [&] { return sample(*actors); },
                                {{"thread with a queue", [&] { return sample(*queue); }}}};
    GT_ASSIGN_OR_RETURN(const std::vector<Outcome> measured, Measure(comparison, options.quick ? 3 : 11));
    outcomes.insert(outcomes.end(), measured.begin(), measured.end());
  }
  return outcomes;
}

int Main(const Options& options) {
  const absl::StatusOr<std::vector<Outcome>> outcomes = MeasureAll(options);
  if (outcomes.ok()) return Report(options, "actors", *outcomes);
  std::fprintf(stderr, "bench_actors: %s\n", std::string(outcomes.status().message()).c_str());
  return 1;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
