#include "launcher/cli/status_doc.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/json_depth.h"
#include "base/json_text.h"
#include "base/units.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

template <typename T>
std::optional<T> Number(const json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number()) return std::nullopt;
  return it->get<T>();
}

std::optional<absl::Time> Time(const json& object, const char* key) {
  absl::Time time;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, TextOf(object, key), &time, &error)) return std::nullopt;
  return time;
}

bool Bool(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_boolean() && it->get<bool>();
}

// The objects of a list; none if there is no such list.
std::vector<json> List(const json& object, const char* key) {
  std::vector<json> list;
  const auto it = object.find(key);
  if (it == object.end() || !it->is_array()) return list;
  for (const json& item : *it) {
    if (item.is_object()) list.push_back(item);
  }
  return list;
}

std::vector<std::string> LabelsOf(const json& job) {
  std::vector<std::string> labels;
  const auto found = job.find("labels");
  if (found == job.end() || !found->is_object()) return labels;
  for (const auto& [key, value] : found->items())
    if (value.is_string()) labels.push_back(absl::StrCat(key, "=", value.get<std::string>()));
  return labels;
}

std::vector<int> NumbersOf(const json& object, const char* key) {
  std::vector<int> numbers;
  const auto list = object.find(key);
  if (list == object.end() || !list->is_array()) return numbers;
  for (const json& number : *list) {
    if (number.is_number_integer()) numbers.push_back(number.get<int>());
  }
  return numbers;
}

std::optional<RankBindings> BindingsOf(const json& rank) {
  const auto nics = rank.find("nics");
  if (nics == rank.end() || !nics->is_array()) return std::nullopt;
  RankBindings bindings{NumbersOf(rank, "cpus"), NumbersOf(rank, "numa"), NumbersOf(rank, "gpus"), {}};
  for (const json& nic : *nics) {
    if (nic.is_string()) bindings.nics.push_back(nic.get<std::string>());
  }
  return bindings;
}

absl::StatusOr<json> ParseObject(absl::string_view text) {
  json root = json::parse(ShallowJson(text), nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return absl::InternalError("the head's answer is not a JSON object");
  return root;
}

// Reads the notes for people, in the order in which they are shown.
std::vector<std::string> ReadNotes(const json& job) {
  std::vector<std::string> notes;
  for (const auto& [key, words] : {std::pair{"waits", ""},
                                   {"newcomers", ""},
                                   {"spares", "spares: "},
                                   {"progress", ""},
                                   {"checkpoint_policy", "checkpoints "},
                                   {"compression", "gradients: "},
                                   {"restore", "restored "},
                                   {"owner", "checkpoint directory: "},
                                   {"saves", "saves: "},
                                   {"logs", "logs: "},
                                   {"storage", "storage: "}}) {
    if (const std::string text = TextOf(job, key); !text.empty()) notes.push_back(absl::StrCat(words, text));
  }
  std::vector<std::string> holders;
  for (const json& holder : List(job, "holders")) holders.push_back(TextOf(holder, "hostname"));
  if (!holders.empty()) {
    notes.push_back(absl::StrCat("copies of its checkpoints are also kept on ", absl::StrJoin(holders, ", "),
                                 ", outside the job"));
  }
  for (const json& slow : List(job, "slow")) {
    notes.push_back(
        absl::StrFormat("%s is slow: its ranks take %.1f times as long for their own part of a step",
                        TextOf(slow, "hostname"), Number<double>(slow, "score").value_or(0)));
  }
  for (const json& avoided : List(job, "avoided"))
    notes.push_back(absl::StrCat(TextOf(avoided, "hostname"), " is ", TextOf(avoided, "why")));
  return notes;
}

std::optional<FaultDoc> ReadFault(const json& j, const char* key) {
  const auto fault = j.find(key);
  if (fault == j.end() || !fault->is_object()) return std::nullopt;
  return FaultDoc{TextOf(*fault, "message"), TextOf(*fault, "tail"),
                  Number<uint64_t>(*fault, "generation").value_or(0), Number<int>(*fault, "rank")};
}

JobDoc ReadJob(const json& j) {
  JobDoc job{.id = TextOf(j, "id")};
  job.name = TextOf(j, "name");
  job.labels = LabelsOf(j);
  job.state = TextOf(j, "state");
  job.reason = TextOf(j, "reason");
  job.generation = Number<uint64_t>(j, "generation").value_or(0);
  job.world_size = Number<int>(j, "world_size").value_or(0);
  job.restarts = Number<int>(j, "restarts").value_or(0);
  job.step = Number<int64_t>(j, "step");
  job.steps_total = Number<int64_t>(j, "steps_total");
  if (const auto seconds = Number<double>(j, "eta_seconds")) job.eta = absl::Seconds(*seconds);
  job.loss = Number<double>(j, "loss");
  job.diverged = j.contains("diverged") && j["diverged"] == true;
  job.samples_per_second = Number<double>(j, "samples_per_second");
  job.steps_per_second = Number<double>(j, "steps_per_second");
  job.run_dir = TextOf(j, "run_dir");
  job.exit_code = Number<int>(j, "exit_code");
  job.user = TextOf(j, "user");
  job.submitted = Time(j, "submitted");
  job.started = Time(j, "started");
  job.ended = Time(j, "ended");
  if (const auto seconds = Number<double>(j, "run_seconds"); seconds && job.generation > 0)
    job.run_time = absl::Seconds(*seconds);
  if (const auto c = j.find("last_checkpoint"); c != j.end() && c->is_object()) {
    job.checkpoint_step = Number<int64_t>(*c, "step");
  }
  job.stuck = TextOf(j, "stuck");
  job.restore = TextOf(j, "restore");
  job.notes = ReadNotes(j);
  job.first_fault = ReadFault(j, "first_fault");
  job.last_fault = ReadFault(j, "last_fault");
  if (job.last_fault == job.first_fault) job.last_fault.reset();
  job.size_fault = ReadFault(j, "size_fault");
  for (const json& r : List(j, "ranks")) {
    job.ranks.push_back({Number<int>(r, "rank").value_or(0), TextOf(r, "hostname"), TextOf(r, "state"),
                         Number<int64_t>(r, "pid").value_or(0), Number<int64_t>(r, "step"),
                         Number<int>(r, "local_rank").value_or(0), TextOf(r, "node"), NumbersOf(r, "gpus"),
                         BindingsOf(r)});
  }
  return job;
}

}  // namespace

absl::StatusOr<StatusDoc> ParseStatusDoc(absl::string_view text) {
  const absl::StatusOr<json> root = ParseObject(text);
  if (!root.ok()) return root.status();
  StatusDoc doc;
  doc.cluster = TextOf(*root, "cluster");
  doc.local = Bool(*root, "local");
  doc.nodes = Number<int>(*root, "nodes").value_or(0);
  doc.omitted = Number<int>(*root, "omitted").value_or(0);
  const auto jobs = root->find("jobs");
  if (jobs == root->end() || !jobs->is_array()) return doc;
  for (const json& j : *jobs) {
    if (j.is_object()) doc.jobs.push_back(ReadJob(j));
  }
  return doc;
}

absl::StatusOr<JobDoc> ParseJobDoc(absl::string_view text) {
  const absl::StatusOr<json> root = ParseObject(text);
  if (!root.ok()) return root.status();
  return ReadJob(*root);
}

absl::StatusOr<EventsDoc> ParseEventsDoc(absl::string_view text) {
  const absl::StatusOr<json> root = ParseObject(text);
  if (!root.ok()) return root.status();
  EventsDoc doc;
  doc.final = Bool(*root, "final");
  doc.next = Number<uint64_t>(*root, "next").value_or(0);
  const auto events = root->find("events");
  if (events == root->end() || !events->is_array()) return doc;
  for (const json& e : *events) {
    if (!e.is_object()) continue;
    doc.events.push_back({Number<uint64_t>(e, "sequence").value_or(0),
                          Number<uint64_t>(e, "generation").value_or(0), TextOf(e, "kind"), TextOf(e, "text"),
                          Time(e, "time")});
  }
  return doc;
}

absl::StatusOr<LogDoc> ParseLogDoc(absl::string_view text) {
  const absl::StatusOr<json> root = ParseObject(text);
  if (!root.ok()) return root.status();
  return LogDoc{TextOf(*root, "text"),
                Number<uint64_t>(*root, "next_offset").value_or(0),
                Bool(*root, "end"),
                TextOf(*root, "note"),
                Number<int>(*root, "world_size"),
                TextOf(*root, "hostname")};
}

absl::StatusOr<JobDoc> ChooseJob(const StatusDoc& doc, const std::string& word, Without without) {
  std::vector<const JobDoc*> live;
  const JobDoc* over = nullptr;  // in order of submission: the newest is the last
  for (const JobDoc& job : doc.jobs) {
    if (!word.empty() && job.id == word) return job;
    if (!word.empty() && job.name != word) continue;
    if (job.Final()) {
      over = &job;
    } else {
      live.push_back(&job);
    }
  }
  if (live.size() == 1) return *live[0];
  if (live.size() > 1) {
    constexpr size_t kNamed = 10;
    const std::vector<const JobDoc*> named(
        live.begin(), live.begin() + static_cast<ptrdiff_t>(std::min(kNamed, live.size())));
    return absl::FailedPreconditionError(absl::StrCat(
        "several jobs ", word.empty() ? "run" : absl::StrCat("called ", word, " run"), ": say which: ",
        absl::StrJoin(named, ", ", [](std::string* out, const JobDoc* job) { *out += job->id; }),
        live.size() > kNamed
            ? absl::StrCat(" and ", live.size() - kNamed, " more; `gtrain status` lists them")
            : ""));
  }
  if (over != nullptr && (!word.empty() || without == Without::kNewest)) return *over;
  return word.empty() ? absl::FailedPreconditionError("no job runs; `gtrain status` lists the finished ones")
                      : absl::NotFoundError(absl::StrCat("no job ", word, "; `gtrain status` lists them"));
}

std::string PrintClock(absl::Time at, absl::Time now) {
  const absl::TimeZone here = absl::LocalTimeZone();
  const absl::CivilDay day = absl::ToCivilDay(at, here), today = absl::ToCivilDay(now, here);
  const char* format = day == today                 ? "%H:%M:%S"
                       : day.year() == today.year() ? "%b %d %H:%M:%S"
                                                    : "%Y-%m-%d %H:%M:%S";
  return absl::FormatTime(format, at, here);
}

std::string PrintSpan(absl::Duration span) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(span));
  const int64_t minutes = seconds / 60, hours = minutes / 60, days = hours / 24;
  if (minutes == 0) return absl::StrCat(seconds, "s");
  if (hours == 0) return absl::StrFormat("%dm%02ds", minutes, seconds % 60);
  if (days == 0) return absl::StrFormat("%dh%02dm", hours, minutes % 60);
  return absl::StrFormat("%dd%02dh", days, hours % 24);
}

std::string RestoreNews(absl::string_view restore) {
  if (!absl::StartsWith(restore, "step ")) return "";
  // "step 40 in 0.3 s: 1 MiB from DIR, 0 B from copies ...": up to the place is enough here.
  return absl::StrCat("resumed ", restore.substr(0, restore.find(", ")),
                      ". To begin anew: gtrain launch --fresh ...");
}

// Three digits, or all before the point: "0.25", "18.5", "2950".
std::string PrintRate(double rate) {
  return rate >= 100 ? absl::StrFormat("%.0f", rate) : absl::StrFormat("%.3g", rate);
}

std::string PrintProgress(const JobDoc& job) {
  std::vector<std::string> parts;
  if (job.step)
    parts.push_back(
        absl::StrCat("step ", *job.step, job.steps_total ? absl::StrCat("/", *job.steps_total) : ""));
  if (job.loss) parts.push_back(absl::StrFormat("loss %.4g", *job.loss));
  if (job.diverged) parts.push_back("loss nan");
  if (job.samples_per_second) parts.push_back(absl::StrCat(PrintRate(*job.samples_per_second), " samples/s"));
  if (job.steps_per_second) parts.push_back(absl::StrCat(PrintRate(*job.steps_per_second), " steps/s"));
  if (job.eta) parts.push_back(absl::StrCat("ends in ", PrintSpan(*job.eta)));
  if (job.checkpoint_step) parts.push_back(absl::StrCat("checkpoint at step ", *job.checkpoint_step));
  if (job.restarts > 0)
    parts.push_back(absl::StrCat(job.restarts, job.restarts == 1 ? " restart" : " restarts"));
  return absl::StrJoin(parts, ", ");
}

std::vector<std::string> BindingLines(const JobDoc& job) {
  std::vector<std::string> lines;
  for (const RankDoc& rank : job.ranks) {
    std::vector<std::string> parts;
    if (rank.bindings) {
      const RankBindings& bound = *rank.bindings;
      parts.push_back(bound.cpus.empty() ? "any CPU" : absl::StrCat("CPUs ", PrintRanks(bound.cpus)));
      if (!bound.numa.empty()) parts.push_back(absl::StrCat("NUMA ", PrintRanks(bound.numa)));
      if (!bound.gpus.empty()) parts.push_back(absl::StrCat("GPU ", PrintRanks(bound.gpus)));
      if (!bound.nics.empty()) parts.push_back(absl::StrCat("NIC ", absl::StrJoin(bound.nics, ",")));
    } else {
      parts.emplace_back("the head does not say what it is bound to");
    }
    lines.push_back(
        absl::StrCat("rank ", rank.rank, " on ", rank.hostname, ": ", absl::StrJoin(parts, ", ")));
  }
  return lines;
}

std::vector<std::string> FaultLines(const JobDoc& job) {
  constexpr size_t kLines = 10;
  std::vector<std::string> out;
  for (const auto& [label, fault] : {std::pair("first fault", &job.first_fault),
                                     {"last fault", &job.last_fault},
                                     {"why it does not grow", &job.size_fault}}) {
    if (!fault->has_value()) continue;
    const FaultDoc& one = **fault;
    out.push_back(absl::StrCat(label, ": ", one.message));
    std::vector<std::string> lines = absl::StrSplit(one.tail, '\n', absl::SkipEmpty());
    if (lines.size() > kLines) lines.erase(lines.begin(), lines.end() - kLines);
    for (const std::string& line : lines) out.push_back("  " + line);
    if (fault == &job.first_fault || !one.rank || one.generation == 0) continue;
    out.push_back(absl::StrCat("  all that it wrote: gtrain logs ", job.id, " --generation ", one.generation,
                               " --rank ", *one.rank));
  }
  return out;
}

}  // namespace gtrain::cli
