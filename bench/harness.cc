#include "bench/harness.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace gtrain::bench {
namespace {

double MedianOf(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Names here are our own plain ASCII without quotes or backslashes.
std::string SeriesJson(const Series& series) {
  std::string samples;
  for (double sample : series.samples) absl::StrAppend(&samples, samples.empty() ? "" : ", ", sample);
  return absl::StrFormat("{\"median\": %.9g, \"spread\": %.4f, \"samples\": [%s]}", series.Median(),
                         series.Spread(), samples);
}

std::string ReportJson(const Options& options, absl::string_view bench,
                       const std::vector<Outcome>& outcomes) {
  std::string results;
  for (const Outcome& outcome : outcomes) {
    absl::StrAppend(
        &results, results.empty() ? "" : ",\n",
        absl::StrFormat("  {\"name\": \"%s\", \"unit\": \"%s\", \"peer\": \"%s\", \"ratio\": %.4f,\n"
                        "   \"ours\": %s,\n   \"theirs\": %s}",
                        outcome.name, outcome.unit, outcome.peer, outcome.Ratio(), SeriesJson(outcome.ours),
                        SeriesJson(outcome.theirs)));
  }
  return absl::StrFormat("{\"bench\": \"%s\", \"quick\": %s, \"results\": [\n%s\n]}\n", bench,
                         options.quick ? "true" : "false", results);
}

}  // namespace

Options ParseOptions(int argc, char** argv, const std::vector<std::string>& parts, int seeds) {
  Options options;
  const std::string self = argv[0];
  const size_t slash = self.rfind('/');
  // Absolute: benches work in a folder of their own.
  options.folder =
      std::filesystem::absolute(slash == std::string::npos ? "." : self.substr(0, slash)).string();
  for (int i = 1; i < argc; ++i) {
    const absl::string_view word = argv[i];
    if (word == "--quick") {
      options.quick = true;
    } else if (word == "--json" && i + 1 < argc) {
      options.json = argv[++i];
    } else if (word == "--only" && i + 1 < argc && absl::c_linear_search(parts, argv[i + 1])) {
      options.only = argv[++i];
    } else if (seeds > 0 && word == "--seeds" && i + 1 < argc &&
               absl::SimpleAtoi(argv[i + 1], &options.seeds) && options.seeds > 0) {
      ++i;
    } else {
      std::fprintf(stderr, "usage: %s [--quick] [--json FILE]%s%s\n", argv[0],
                   parts.empty() ? "" : absl::StrCat(" [--only ", absl::StrJoin(parts, "|"), "]").c_str(),
                   seeds > 0 ? " [--seeds N]" : "");
      std::exit(2);
    }
  }
  if (options.seeds == 0) options.seeds = options.quick ? std::min(seeds, 1) : seeds;
  return options;
}

double Series::Median() const { return MedianOf(samples); }

double Series::Spread() const {
  const double median = Median();
  if (median == 0) return 0;
  std::vector<double> distances;
  for (double sample : samples) distances.push_back(std::abs(sample - median));
  return MedianOf(std::move(distances)) / median;
}

double Series::Quantile(double part) const {
  if (samples.empty()) return 0;
  std::vector<double> sorted = samples;
  std::sort(sorted.begin(), sorted.end());
  constexpr double kRounding = 1e-9;  // 0.07 of 100 may come out a little above 7
  const double rank = std::ceil(part * static_cast<double>(sorted.size()) - kRounding);
  return sorted[std::clamp<size_t>(static_cast<size_t>(rank), 1, sorted.size()) - 1];
}

Verdict Judge(const Series& differences, double goal) {
  constexpr double kRounding = 1e-6;  // 9.70 - 9.40 may come out a little above 0.3
  const double median = differences.Median();
  double spread = 0;
  for (const double sample : differences.samples) spread = std::max(spread, std::abs(sample - median));
  if (differences.samples.size() < 2 || spread > std::abs(goal - median) + kRounding)
    return Verdict::kUndecided;
  return median <= goal + kRounding ? Verdict::kReached : Verdict::kNotReached;
}

absl::StatusOr<BySize> ReadBySize(const std::string& file, absl::string_view who) {
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(file, 64 << 10));
  BySize samples;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> fields = absl::StrSplit(line, ' ');
    size_t bytes = 0;
    double sample = 0;
    if (fields.size() != 2 || !absl::SimpleAtoi(fields[0], &bytes) || !absl::SimpleAtod(fields[1], &sample)) {
      return absl::InternalError(absl::StrCat(who, " wrote: ", line));
    }
    samples[bytes] = sample;
  }
  return samples;
}

absl::StatusOr<std::vector<Outcome>> Measure(const Comparison& comparison, int turns) {
  std::vector<Outcome> outcomes;
  for (const Peer& peer : comparison.peers) {
    outcomes.push_back({comparison.name, comparison.unit, peer.name, {}, {}});
  }
  Series ours;
  for (int turn = -1; turn < turns; ++turn) {
    for (size_t i = 0; i < comparison.peers.size(); ++i) {
      GT_ASSIGN_OR_RETURN(const double sample, comparison.peers[i].sample());
      if (turn >= 0) outcomes[i].theirs.samples.push_back(sample);  // the first turn warms caches up
    }
    GT_ASSIGN_OR_RETURN(const double sample, comparison.ours());
    if (turn >= 0) ours.samples.push_back(sample);
  }
  if (outcomes.empty()) outcomes.push_back({comparison.name, comparison.unit, "", {}, {}});
  for (Outcome& outcome : outcomes) outcome.ours = ours;
  return outcomes;
}

int Report(const Options& options, absl::string_view bench, const std::vector<Outcome>& outcomes) {
  std::printf("%-34s %12s %8s %7s %12s %8s %7s  %s\n", "what", "ours", "spread", "samples", "peer", "spread",
              "ratio", "peer is");
  for (const Outcome& outcome : outcomes) {
    std::printf("%-34s %10.4g %s %7.1f%% %7zu", outcome.name.c_str(), outcome.ours.Median(),
                outcome.unit.c_str(), 100 * outcome.ours.Spread(), outcome.ours.samples.size());
    if (outcome.peer.empty()) {
      std::printf("\n");
      continue;
    }
    std::printf(" %10.4g %s %7.1f%% %7.2f  %s\n", outcome.theirs.Median(), outcome.unit.c_str(),
                100 * outcome.theirs.Spread(), outcome.Ratio(), outcome.peer.c_str());
  }
  if (options.json.empty()) return 0;
  const absl::Status written =
      WriteFileDurable(options.json, ReportJson(options, bench, outcomes), /*mode=*/0644);
  if (written.ok()) return 0;
  std::fprintf(stderr, "bench: %s: %s\n", options.json.c_str(), std::string(written.message()).c_str());
  return 1;
}

}  // namespace gtrain::bench
