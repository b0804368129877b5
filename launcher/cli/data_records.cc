#include "launcher/cli/data_records.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/time/time.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;
using sharding::SaidRecord;

// A job that also evaluates or waits has steps that are much faster than its average. This is no proof of
// what a job can do: more than this is no honest record.
constexpr double kFaster = 100, kFasterAfter = 10;
// Seconds between a step and the moment at which the head counts it. A report is no later than a heartbeat
// (1 s at most) and the time for which a rank holds it back (0.1 s). A job is where its slowest rank is, so
// what was heard of that one may be as old again when the word of another rank moves the job on.
constexpr double kReportedLate = 2 * (1 + 0.1);
constexpr double kStepsOfAPace = 10;                 // the first may have compiled something
constexpr int64_t kStepMax = 9'000'000'000'000'000;  // what a double holds exactly

const json& Within(const json& object, const char* key) {
  static const json nothing;
  const auto it = object.is_object() ? object.find(key) : object.end();
  return it != object.end() ? *it : nothing;
}

std::optional<double> FigureOf(const json& object, const char* key) {
  const json& number = Within(object, key);
  return number.is_number() ? std::optional(number.get<double>()) : std::nullopt;
}

std::optional<int64_t> StepIn(const json& object, const char* key) {
  const std::optional<double> step = FigureOf(object, key);
  if (!step || !(*step >= 0) || *step > static_cast<double>(kStepMax)) return std::nullopt;
  return static_cast<int64_t>(*step);
}

// The sums of the head at one time (docs/protocols/control-plane.md, goodput).
struct Sums {
  size_t at = 0;          // its place among the events
  bool at_revoke = true;  // a generation ended before its time; else all ranks told their last step
  std::optional<absl::Time> time;
  std::optional<int64_t> last;  // step
  bool anew = false;            // the program counts its steps anew
  double lost = 0;              // rank-seconds behind the last reports of generations that ended
  double wanted = 0;            // ranks
  double redone = 0;            // steps that were reported again
  double made = 0, took = 0;    // steps, and the rank-seconds that they took
};

Sums SumsOf(const json& goodput) {
  Sums sums;
  const json& steps = Within(goodput, "steps");
  const json& seconds = Within(goodput, "seconds");
  const std::optional<double> applied = FigureOf(steps, "applied");
  sums.last = StepIn(steps, "last");
  sums.anew = sums.last && !applied;
  sums.lost = FigureOf(seconds, "lost").value_or(0);
  sums.wanted = FigureOf(goodput, "wanted").value_or(0);
  sums.redone = FigureOf(steps, "recomputed").value_or(0);
  sums.made = applied.value_or(0) + sums.redone;
  sums.took = FigureOf(seconds, "step").value_or(0) + FigureOf(seconds, "recomputed").value_or(0);
  return sums;
}

// Steps a rank-second, where the job was at its fastest as far as the sums tell; zero: not known.
double PaceOf(const std::vector<Sums>& all) {
  double pace = 0;
  Sums before;
  for (const Sums& sums : all) {
    const double made = sums.made - before.made, took = sums.took - before.took;
    if (made >= kStepsOfAPace && took > 0) pace = std::max(pace, made / took);
    if (sums.made >= kStepsOfAPace && sums.took > 0) pace = std::max(pace, sums.made / sums.took);
    before = sums;
  }
  return pace;
}

struct Placed {
  size_t at = 0;  // its place among the events
  std::optional<absl::Time> time;
  SaidRecord said;
};

// What a job's events say, in their order.
struct History {
  std::vector<Placed> records;
  std::vector<Sums> sums;
};

std::optional<absl::Time> ToldAt(const json& event) {
  absl::Time time;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, TextOf(event, "time"), &time, &error)) return std::nullopt;
  return time;
}

// A record stands behind "rank 0 on HOST: ".
absl::StatusOr<History> HistoryOf(const json& why) {
  History history;
  const json& events = Within(why, "events");
  for (size_t at = 0; events.is_array() && at < events.size(); ++at) {
    const json& event = events[at];
    if (!event.is_object()) continue;
    if (const json& goodput = Within(event, "goodput"); goodput.is_object()) {
      history.sums.push_back(SumsOf(goodput));
      history.sums.back().at = at;
      history.sums.back().at_revoke = TextOf(event, "kind") == "revoke";
      history.sums.back().time = ToldAt(event);
    }
    const std::string text = TextOf(event, "text");
    const size_t begin = text.find(": ");
    if (TextOf(event, "kind") != core::kSamplesNote || begin == std::string::npos) continue;
    GT_ASSIGN_OR_RETURN(sharding::SampleRecord record,
                        sharding::ParseSampleRecord(absl::string_view(text).substr(begin + 2)));
    const json& generation = Within(event, "generation");
    const uint64_t known = generation.is_number_unsigned() ? generation.get<uint64_t>() : 0;
    history.records.push_back({at, ToldAt(event), {known, std::move(record)}});
  }
  return history;
}

// What the head knew when the ranks stopped that made the steps before a record. A generation says a second
// time where it is when it is done, and what it reported until then the head sums up later. Of another
// generation the ranks before it were stopped at the first of `sums`, and the last is of those just before
// it.
struct Known {
  const Sums* sums = nullptr;
  std::optional<absl::Time> stopped;
};

Known KnownAt(const std::vector<Sums>& sums, const Placed& record, const Placed& before) {
  const auto behind = std::ranges::find_if(sums, [&](const Sums& s) { return s.at > record.at; });
  if (record.said.generation == before.said.generation)
    return behind != sums.end() ? Known{&*behind, record.time} : Known();
  const auto first = std::ranges::find_if(sums, [&](const Sums& s) { return s.at > before.at; });
  return first < behind ? Known{&*std::prev(behind), first->time} : Known();
}

// Steps that ranks may have made and the head has heard nothing of. `lost` is counted from the arrival of the
// last report to the end of a generation, and the step in that report was made earlier. Who cannot be told of
// the end trains on for a while, which few do, and none when they start anew.
std::optional<double> UnheardSteps(const Known& known, double pace, const Placed& record,
                                   const Placed& before) {
  if (pace <= 0 || !record.time || !known.stopped || !before.time) return std::nullopt;
  if (*known.stopped < *before.time || *record.time < *known.stopped) return std::nullopt;  // a clock was set
  const double ranks = std::max<double>(known.sums->wanted, before.said.record.ranks);
  const double trained = ranks * absl::ToDoubleSeconds(*known.stopped - *before.time);
  const double after = ranks * absl::ToDoubleSeconds(*record.time - *known.stopped);
  const double unheard = known.sums->lost + ranks * kReportedLate;
  return pace * (kFaster * std::min(trained, unheard) + kFasterAfter * after);
}

// One step may always be under way.
std::optional<int64_t> MoreThan(const Known& known, double pace, const Placed& record, const Placed& before) {
  // Ranks that ended by themselves told their last step, and a program that tells every hundredth has told
  // half of its steps or more by then.
  if (!known.sums->at_revoke)
    return *known.sums->last > 0 ? std::optional(*known.sums->last + 1) : std::nullopt;
  const std::optional<double> more = UnheardSteps(known, pace, record, before);
  if (!more || !(*more < static_cast<double>(kStepMax))) return std::nullopt;
  return 1 + static_cast<int64_t>(std::ceil(*more));
}

// The sums have the highest step of all generations. One that went back has reported no more of its own than
// the steps that were made again, until it is above that.
int64_t OwnSteps(const std::vector<Sums>& sums, const Sums& known, const Placed& before) {
  const auto then = std::find_if(sums.rbegin(), sums.rend(), [&](const Sums& s) { return s.at < before.at; });
  if (then == sums.rend() || !then->last || *known.last > *then->last) return *known.last;
  const double again = std::clamp(known.redone - then->redone, 0.0, static_cast<double>(kStepMax));
  return std::min(*known.last, before.said.record.cursor.step + static_cast<int64_t>(again));
}

// The highest step after a record, if any was reported in the time of its generation.
std::optional<int64_t> ReportedThen(const std::vector<Sums>& sums, const Placed& record) {
  const auto then = std::ranges::find_if(sums, [&](const Sums& s) { return s.at > record.at; });
  if (then == sums.begin() || then == sums.end()) return std::nullopt;
  const Sums& before = *std::prev(then);
  const bool any = before.last && (then->last > before.last || then->redone > before.redone);
  return any ? then->last : std::nullopt;
}

}  // namespace

absl::StatusOr<std::vector<SaidRecord>> RecordsIn(const std::string& why) {
  const json document = json::parse(why, nullptr, /*allow_exceptions=*/false);
  GT_ASSIGN_OR_RETURN(History history, HistoryOf(document));
  // What is left of a job also has its sums by itself.
  if (const json& goodput = Within(document, "goodput"); goodput.is_object()) {
    history.sums.push_back(SumsOf(goodput));
    history.sums.back().at = SIZE_MAX;
    history.sums.back().at_revoke = false;
    const std::optional<int64_t> step = StepIn(document, "step");
    if (step) history.sums.back().last = std::max(history.sums.back().last.value_or(*step), *step);
  }
  std::vector<SaidRecord> said;
  const auto& records = history.records;  // no binding of both: clang 14 lets no lambda have one
  const auto& sums = history.sums;
  const bool comparable =
      std::ranges::none_of(sums, &Sums::anew) && std::ranges::all_of(records, [&](const Placed& one) {
        return one.said.record.name == records.front().said.record.name;
      });
  // The pace of all that is known: that of the beginning may be the slow one of a program that compiles.
  const double pace = PaceOf(sums);
  for (size_t i = 0; i < records.size(); ++i) {
    said.push_back(records[i].said);
    if (comparable) said.back().then = ReportedThen(sums, records[i]);
    const Known known = comparable && i > 0 ? KnownAt(sums, records[i], records[i - 1]) : Known();
    if (known.sums == nullptr || !known.sums->last) continue;
    said.back().reported =
        sharding::StepsReported{*known.sums->last, MoreThan(known, pace, records[i], records[i - 1]),
                                OwnSteps(sums, *known.sums, records[i - 1])};
  }
  return said;
}

}  // namespace gtrain::cli
