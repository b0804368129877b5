// The job prints lines of words (launcher/bench/probe.h); here they become a topology, and the pairs a file
// that is kept from one measurement to the next.
#include "launcher/cli/topology_measure.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "launcher/cli/bench_job.h"
#include "launcher/cli/context.h"
#include "launcher/cli/json_text.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "topology/hostlist.h"
#include "topology/measured.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;
using topology::Measured;
using topology::PairSpeed;
using Words = std::vector<std::string>;

constexpr size_t kPairsBytesMax = size_t{256} << 20;
constexpr double kSlower = 0.7;  // of what it was: the link is named
constexpr size_t kSlowShown = 10;

// The machines of the cluster: which are free, which have jobs, and all names.
struct FreeMachines {
  std::map<std::string, std::string> name_of;  // by node id
  Words free, busy;                            // node ids
  Words seconds;                               // further agents of machines that have one already
};

absl::StatusOr<FreeMachines> AskMachines(const Args& args) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const std::string text, Ask(cluster, core::ClientNodes{}));
  GT_RETURN_IF_ERROR(ExpectKey(text, "nodes"));
  FreeMachines out;
  std::set<std::string> seen;
  const json reply = json::parse(text);
  for (const json& node : reply["nodes"]) {
    const std::string id = TextOf(node, "id"), host = TextOf(node, "hostname");
    // Agents name themselves, and one is not to lose the measurement of all.
    const absl::StatusOr<Words> one = topology::ParseHostlist(host);
    out.name_of[id] = one.ok() && *one == Words{host} && !absl::StartsWith(host, "/") ? host : id;
    const bool usable = TextOf(node, "state") == "alive" && !node.value("unclean", false) &&
                        TextOf(node, "quarantine").empty() && node.value("notices", json::array()).empty();
    if (!usable) continue;
    const bool is_second = !seen.insert(out.name_of[id]).second;
    (is_second ? out.seconds : node.value("jobs", json::array()).empty() ? out.free : out.busy).push_back(id);
  }
  return out;
}

// Reads the lines of rank 0. What is no such line is output of something else.
class ProbeLines {
 public:
  explicit ProbeLines(const FreeMachines& machines) : machines_(machines) {}

  absl::StatusOr<Measured> Read(const Words& lines) {
    for (const std::string& line : lines) {
      const Words words = absl::StrSplit(line, ' ', absl::SkipEmpty());
      const bool understood = words.empty() || (words[0] == "machine" ? Machine(words)
                                                : words[0] == "pair"  ? Pair(words)
                                                : words[0] == "group" ? Group(words)
                                                                      : true);
      if (!understood)
        return absl::InternalError(
            absl::StrCat("gtrain-bench wrote a line that this program does not know: ", line));
    }
    if (out_.machines.empty()) return absl::InternalError("gtrain-bench wrote no measurement");
    return std::move(out_);
  }

 private:
  bool Machine(const Words& words) {
    size_t index = 0;
    if (words.size() < 3 || words.size() > 3 + topology::kGroupLevelsMax ||
        !absl::SimpleAtoi(words[1], &index) || index != out_.machines.size())
      return false;
    const auto name = machines_.name_of.find(words[2]);
    if (name == machines_.name_of.end() || !nodes_.insert(words[2]).second) return false;
    out_.machines.push_back(name->second);
    if (index == 0) out_.levels.resize(words.size() - 3);
    if (words.size() - 3 != out_.levels.size()) return false;
    for (size_t level = 0; level < out_.levels.size(); ++level) {
      int group = 0;
      if (!absl::SimpleAtoi(words[level + 3], &group) || group < 0 || group >= topology::kMachinesMax)
        return false;
      out_.levels[level].group_of.push_back(group);
    }
    return true;
  }
  bool Pair(const Words& words) {
    PairSpeed pair;
    const int machines = static_cast<int>(out_.machines.size());
    if (words.size() != 5 || !absl::SimpleAtoi(words[1], &pair.a) || !absl::SimpleAtoi(words[2], &pair.b) ||
        !absl::SimpleAtod(words[3], &pair.gb_s) || !absl::SimpleAtod(words[4], &pair.us))
      return false;
    if (pair.a < 0 || pair.b < 0 || std::max(pair.a, pair.b) >= machines) return false;
    if (!std::isfinite(pair.gb_s) || !std::isfinite(pair.us) || pair.gb_s <= 0 || pair.us < 0) return false;
    out_.pairs.push_back(pair);
    return true;
  }
  bool Group(const Words& words) {
    size_t level = 0, group = 0;
    double gb_s = 0;
    if (words.size() != 4 || !absl::SimpleAtoi(words[1], &level) || !absl::SimpleAtoi(words[2], &group) ||
        !absl::SimpleAtod(words[3], &gb_s))
      return false;
    if (level >= out_.levels.size() || group != out_.levels[level].gb_s.size() || !std::isfinite(gb_s) ||
        gb_s < 0)
      return false;
    out_.levels[level].gb_s.push_back(gb_s);
    return true;
  }

  const FreeMachines& machines_;
  std::set<std::string> nodes_;  // that were named
  Measured out_;
};

// --- pairs that are kept

struct KeptPair {
  double gb_s = 0, us = 0;
  std::string at;  // RFC 3339
};
using KeptPairs = std::map<std::pair<std::string, std::string>, KeptPair>;

std::pair<std::string, std::string> KeyOf(std::string a, std::string b) {
  if (b < a) std::swap(a, b);
  return {std::move(a), std::move(b)};
}

// Absent is empty: the first measurement makes the file.
absl::StatusOr<KeptPairs> ReadKept(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, kPairsBytesMax);
  if (absl::IsNotFound(text.status())) return KeptPairs();
  if (!text.ok()) return text.status();
  const json document = json::parse(*text, nullptr, false);
  const bool good = document.is_object() && document.value("gtrain_pairs", json()) == 1 &&
                    document.contains("pairs") && document["pairs"].is_array();
  KeptPairs kept;
  for (size_t i = 0; good && i < document["pairs"].size(); ++i) {
    const json& pair = document["pairs"][i];
    const bool whole = pair.is_object() && !TextOf(pair, "a").empty() && !TextOf(pair, "b").empty() &&
                       !TextOf(pair, "at").empty() && pair.value("gb_s", json()).is_number() &&
                       pair["gb_s"].get<double>() > 0 && pair.value("us", json()).is_number();
    if (!whole)
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": pairs/", i, " needs a, b, gb_s, us and at; the file is left as it is"));
    kept[KeyOf(TextOf(pair, "a"), TextOf(pair, "b"))] = {pair["gb_s"].get<double>(), pair["us"].get<double>(),
                                                         TextOf(pair, "at")};
  }
  if (good) return kept;
  return absl::InvalidArgumentError(absl::StrCat(path,
                                                 " is no file of pairs that this program wrote (gtrain_pairs "
                                                 "1); it is left as it is: give --pairs another"));
}

std::string PrintKept(const KeptPairs& kept) {
  Words rows;
  for (const auto& [ends, pair] : kept) {
    const json row = {
        {"a", ends.first}, {"b", ends.second}, {"gb_s", pair.gb_s}, {"us", pair.us}, {"at", pair.at}};
    rows.push_back(row.dump(-1, ' ', false, json::error_handler_t::replace));
  }
  return absl::StrCat("{\"gtrain_pairs\": 1, \"pairs\": [\n", absl::StrJoin(rows, ",\n"), "\n]}\n");
}

// Names the pairs that are slower than they were, the worst first, and keeps the new speeds.
void Renew(const Measured& measured, KeptPairs& kept) {
  std::vector<std::pair<double, std::string>> slower;
  const std::string now = absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone());
  for (const PairSpeed& pair : measured.pairs) {
    const auto [it, is_new] = kept.try_emplace(KeyOf(measured.machines[pair.a], measured.machines[pair.b]));
    const KeptPair& old = it->second;
    if (!is_new && pair.gb_s < kSlower * old.gb_s)
      slower.emplace_back(pair.gb_s / old.gb_s,
                          absl::StrFormat("%s - %s: %.3g GB/s, %.3g on %s", SafeText(it->first.first),
                                          SafeText(it->first.second), pair.gb_s, old.gb_s, SafeText(old.at)));
    it->second = {pair.gb_s, pair.us, now};
  }
  std::ranges::sort(slower);
  for (size_t i = 0; i < std::min(slower.size(), kSlowShown); ++i)
    Complain(absl::StrCat("slower than it was: ", slower[i].second));
  if (slower.size() > kSlowShown) Complain(absl::StrCat("and ", slower.size() - kSlowShown, " other pairs"));
}

// --- the job

absl::StatusOr<Measured> MeasureMachines(const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> asked, args.Int("nodes", 2, topology::kMachinesMax));
  GT_ASSIGN_OR_RETURN(const FreeMachines machines, AskMachines(args));
  Words busy;
  for (const std::string& id : machines.busy) busy.push_back(SafeText(machines.name_of.at(id)));
  const std::string with_jobs = busy.empty() ? ""
                                             : absl::StrCat(topology::PrintHostlist(busy),
                                                            busy.size() == 1 ? " has" : " have", " jobs");
  const int64_t nodes = asked.value_or(static_cast<int64_t>(machines.free.size()));
  if (nodes < 2 || nodes > static_cast<int64_t>(machines.free.size()))
    return absl::FailedPreconditionError(absl::StrCat(
        "topology measure needs ", std::max<int64_t>(nodes, 2), " machines without jobs; ",
        machines.free.size(), machines.free.size() == 1 ? " is" : " are", " free",
        with_jobs.empty() ? "" : absl::StrCat(", ", with_jobs, ", which a measurement would slow down")));
  if (!with_jobs.empty())
    Complain(absl::StrCat(with_jobs, " and ", busy.size() == 1 ? "is" : "are", " left out"));
  GT_ASSIGN_OR_RETURN(const std::filesystem::path folder, OwnFolder());
  BenchJob job{
      .what = "measurement", .command = {folder / "gtrain-bench", "probe"}, .nodes = nodes, .show = false};
  job.ranks = static_cast<int>(nodes);
  Words excluded = machines.busy;
  excluded.insert(excluded.end(), machines.seconds.begin(), machines.seconds.end());
  // Quoted, for some ids look like numbers.
  if (!excluded.empty())
    job.settings.push_back(absl::StrCat("where.exclude=[\"", absl::StrJoin(excluded, "\", \""), "\"]"));
  // A second generation would measure other machines, and one that never comes would keep all of these.
  job.settings.insert(job.settings.end(), {"restart.budget=0", "limits.time=30m"});
  job.ctrl_c_stops = true;
  GT_ASSIGN_OR_RETURN(const Words lines, RunBenchJob(args, job));
  return ProbeLines(machines).Read(lines);
}

}  // namespace

std::vector<Flag> MeasureFlags() {
  return {{"nodes", '\0', "N", "with measure: so many machines; else all that have no jobs"},
          {"pairs", '\0', "FILE",
           "with measure: keep the speed of each pair of machines here, and name those that are slower than "
           "they were"},
          {"env", '\0', "NAME=VALUE", "with measure: for its ranks, as GTRAIN_COMM_TLS=tcp", true},
          {"run-dir", '\0', "DIR", "with measure: logs go to DIR/<job id>-<cluster>; default ./gtrain-runs"}};
}

absl::StatusOr<topology::Topology> MeasuredTopology(const Args& args, const topology::Shape& shape) {
  // What cannot be kept is said before anybody waits for a measurement.
  KeptPairs kept;
  for (const char* flag : {"out", "pairs"}) {
    if (!args.Has(flag)) continue;
    const std::filesystem::path folder = std::filesystem::absolute(args.Get(flag)).parent_path();
    if (access(folder.c_str(), W_OK | X_OK) != 0)
      return absl::InvalidArgumentError(absl::StrCat("--", flag, " ", args.Get(flag),
                                                     ": no file can be made in ", folder.string(), ": ",
                                                     strerror(errno)));
  }
  if (args.Has("pairs") && args.Get("pairs") == args.Get("out"))
    return absl::InvalidArgumentError("--out and --pairs are the same file: name two");
  if (args.Has("pairs")) {
    GT_ASSIGN_OR_RETURN(kept, ReadKept(args.Get("pairs")));
  }
  GT_ASSIGN_OR_RETURN(const Measured measured, MeasureMachines(args));
  GT_ASSIGN_OR_RETURN(topology::Topology topology, topology::TopologyOf(measured, shape));
  if (args.Has("pairs")) {
    Renew(measured, kept);
    // What was measured is not lost by that.
    if (const absl::Status written = WriteText(args.Get("pairs"), PrintKept(kept)); !written.ok())
      Complain(absl::StrCat("--pairs: ", written.message()));
  }
  return topology;
}

absl::Status WriteText(const std::string& path, const std::string& text) {
  std::error_code error;
  std::filesystem::path real = std::filesystem::weakly_canonical(path, error);  // where a link leads
  // One that leads to nothing yet is left as it is by that.
  if (std::filesystem::is_symlink(real, error))
    real = real.parent_path() / std::filesystem::read_symlink(real, error);
  if (std::filesystem::exists(real, error) && !std::filesystem::is_regular_file(real, error))
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is no regular file, and is left as it is: name another"));
  return WriteFileDurable(real.empty() ? path : real.string(), text, 0644);
}

}  // namespace gtrain::cli
