// The parts that every bench_<name> shares: the command line, alternating measurements of ours and of a peer
// in the same run, and a JSON report. Not thread-safe; one object a program.
#pragma once
#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::bench {

struct Options {
  std::string json;    // --json FILE: where the report goes; empty = only the table
  bool quick = false;  // --quick: the whole program ends within 50 s
  std::string only;    // --only PART, where a bench has parts: the one of them to measure
  int seeds = 0;       // --seeds N, where a bench has seeds: how many; 1 with --quick alone
  std::string folder;  // where this program lies, to find its neighbours (build/bin)
};

// Prints usage and exits 2 on an unknown argument. `parts`: the words that --only takes. `seeds`: how many
// there are where nothing else is said; 0: the bench has none and refuses --seeds.
Options ParseOptions(int argc, char** argv, const std::vector<std::string>& parts = {}, int seeds = 0);

using Sample = std::function<absl::StatusOr<double>()>;

struct Peer {
  std::string name;  // with its flags
  Sample sample;
};

// One thing measured several ways. A sample is in `unit`, smaller is better.
struct Comparison {
  std::string name;  // "launch 8 ranks"
  std::string unit;  // "s"
  Sample ours;
  std::vector<Peer> peers;
};

struct Series {
  std::vector<double> samples;
  double Median() const;
  double Spread() const;  // median absolute deviation over the median
  // The smallest sample that at least this part of them does not exceed (nearest rank): the 99th of 100 is
  // their p99. Fewer than 100 have no p99 beside their maximum, which is 1 here.
  double Quantile(double part) const;
};

// Whether what is measured, one difference a seed, is at most `goal`. Undecided: some difference is further
// from their median than that is from the goal, or there is but one, whose spread nobody knows.
enum class Verdict { kReached, kNotReached, kUndecided };
Verdict Judge(const Series& differences, double goal);

// Ours beside one peer; without a peer `peer` is empty.
struct Outcome {
  std::string name, unit, peer;
  Series ours, theirs;
  // Median of ours over the peer's: what is seen beside noise is in the spreads.
  double Ratio() const { return peer.empty() ? 0 : ours.Median() / theirs.Median(); }
};

// The output of ranks and peers: a line "BYTES MICROSECONDS" a size. `who` is for the error about another
// line.
using BySize = std::map<size_t, double>;
absl::StatusOr<BySize> ReadBySize(const std::string& file, absl::string_view who);

// Measures in turns (each peer, ours, each peer, ours, ...), after one unrecorded turn, so that a machine
// that slows down slows all. An outcome a peer.
absl::StatusOr<std::vector<Outcome>> Measure(const Comparison& comparison, int turns);

// Prints the table and writes --json. Returns the exit status of main().
int Report(const Options& options, absl::string_view bench, const std::vector<Outcome>& outcomes);

}  // namespace gtrain::bench
