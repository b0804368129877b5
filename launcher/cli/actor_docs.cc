#include "launcher/cli/actor_docs.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/json_text.h"
#include "base/units.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

constexpr size_t kRankLinesMax = 64;

uint64_t Natural(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number_unsigned() ? it->get<uint64_t>() : 0;
}

double AmountOf(const json& object, const char* key) {
  const auto it = object.find(key);
  const double value = it != object.end() && it->is_number() ? it->get<double>() : 0;
  return std::isfinite(value) ? std::max(0.0, value) : 0;
}

// At most a century, so that sums of them are durations, too.
absl::Duration MicrosOf(const json& object, const char* key) {
  return absl::Microseconds(
      static_cast<int64_t>(std::min<uint64_t>(Natural(object, key), uint64_t{3'200'000'000'000'000})));
}

const json& RowsOf(const json& object, const char* key) {
  static const json* const none = new json(json::array());
  const auto it = object.find(key);
  return it != object.end() && it->is_array() ? *it : *none;
}

ActorDoc ReadActor(const json& row) {
  ActorDoc actor;
  actor.number = Natural(row, "number");
  actor.type = TextOf(row, "class");
  actor.name = TextOf(row, "name");
  actor.state = TextOf(row, "state");
  actor.method = TextOf(row, "method");
  if (row.contains("for_us")) actor.since = MicrosOf(row, "for_us");
  actor.thread = static_cast<int64_t>(std::min<uint64_t>(Natural(row, "thread"), INT32_MAX));
  actor.waiting = Natural(row, "waiting");
  actor.waiting_bytes = Natural(row, "waiting_bytes");
  actor.answered = Natural(row, "answered");
  actor.restarts = Natural(row, "restarts");
  actor.per_second = AmountOf(row, "per_second");
  actor.half = MicrosOf(row, "p50_us");
  actor.most = MicrosOf(row, "p99_us");
  actor.kept = row.contains("kept") && row["kept"] == true;
  if (row.contains("owner"))
    actor.owner = static_cast<int64_t>(std::min<uint64_t>(Natural(row, "owner"), INT32_MAX));
  return actor;
}

ClassDoc ReadClass(const json& row) {
  ClassDoc of;
  of.actors = Natural(row, "actors");
  of.running = Natural(row, "running");
  of.awaiting = Natural(row, "awaiting");
  of.waiting = Natural(row, "waiting");
  of.waiting_bytes = Natural(row, "waiting_bytes");
  of.answered = Natural(row, "answered");
  of.restarts = Natural(row, "restarts");
  of.per_second = AmountOf(row, "per_second");
  return of;
}

void Add(ClassDoc& to, const ClassDoc& of) {
  to.actors += of.actors;
  to.running += of.running;
  to.awaiting += of.awaiting;
  to.waiting += of.waiting;
  to.waiting_bytes += of.waiting_bytes;
  to.answered += of.answered;
  to.restarts += of.restarts;
  to.per_second += of.per_second;
}

std::map<std::string, ClassDoc> ClassesOf(const std::vector<RankActors>& ranks) {
  std::map<std::string, ClassDoc> classes;
  for (const RankActors& rank : ranks) {
    for (const auto& [type, of] : rank.classes) Add(classes[type], of);
  }
  return classes;
}

// "40us", "1.5ms", "2.0s", "12m03s".
std::string ShortTime(absl::Duration d) {
  if (d >= absl::Seconds(60)) return PrintSpan(d);
  if (d >= absl::Seconds(1)) return absl::StrFormat("%.1fs", absl::ToDoubleSeconds(d));
  if (d >= absl::Milliseconds(1)) return absl::StrFormat("%.1fms", absl::ToDoubleMilliseconds(d));
  return absl::StrFormat("%dus", absl::ToInt64Microseconds(d));
}

std::string StateOf(const ActorDoc& actor) {
  return absl::StrCat(SafeText(actor.state), actor.method.empty() ? "" : " ", SafeText(actor.method),
                      actor.since ? absl::StrCat(" for ", ShortTime(*actor.since)) : "");
}

std::string AddressOf(const ActorDoc& actor) { return absl::StrCat(actor.rank, "/", actor.number); }

std::string Rate(double per_second) { return absl::StrFormat(per_second < 10 ? "%.1f" : "%.0f", per_second); }

std::string ClassTable(const std::map<std::string, ClassDoc>& classes) {
  std::string out =
      absl::StrFormat("%-24s %8s %8s %8s %8s %10s %12s %10s %8s\n", "CLASS", "ACTORS", "RUNNING", "AWAITING",
                      "CALLS", "BYTES", "ANSWERED", "CALLS/S", "RESTARTS");
  for (const auto& [type, of] : classes) {
    absl::StrAppendFormat(&out, "%-24s %8d %8d %8d %8d %10s %12d %10s %8d\n", SafeText(type), of.actors,
                          of.running, of.awaiting, of.waiting, PrintBytes(of.waiting_bytes), of.answered,
                          Rate(of.per_second), of.restarts);
  }
  return out;
}

std::string ActorTable(const std::vector<ActorDoc>& actors) {
  std::string out = absl::StrFormat("\n%-12s %-16s %-16s %-16s %-28s %6s %9s %10s %8s %7s %7s %8s %-5s %s\n",
                                    "ACTOR", "NAME", "CLASS", "HOST", "STATE", "CALLS", "BYTES", "ANSWERED",
                                    "CALLS/S", "MEDIAN", "99%", "RESTARTS", "OWNER", "KEPT");
  for (const ActorDoc& actor : actors) {
    absl::StrAppendFormat(&out, "%-12s %-16s %-16s %-16s %-28s %6d %9s %10d %8s %7s %7s %8d %-5s %s\n",
                          AddressOf(actor), actor.name.empty() ? "-" : SafeText(actor.name),
                          SafeText(actor.type), SafeText(actor.hostname), StateOf(actor), actor.waiting,
                          PrintBytes(actor.waiting_bytes), actor.answered, Rate(actor.per_second),
                          actor.answered == 0 ? "-" : ShortTime(actor.half),
                          actor.answered == 0 ? "-" : ShortTime(actor.most), actor.restarts,
                          actor.owner ? absl::StrCat(*actor.owner) : "-", actor.kept ? "yes" : "no");
  }
  return out;
}

std::string RankLine(const RankActors& rank, size_t shown) {
  std::vector<std::string> classes;
  ClassDoc all;
  for (const auto& [type, of] : rank.classes) {
    classes.push_back(absl::StrCat(SafeText(type), " ", of.actors));
    Add(all, of);
  }
  constexpr size_t kClassesShown = 4;
  if (classes.size() > kClassesShown) {
    classes.resize(kClassesShown);
    classes.push_back("...");
  }
  return absl::StrCat("rank ", rank.rank, " on ", SafeText(rank.hostname), ": ", rank.count, " actors (",
                      absl::StrJoin(classes, ", "), "), ", all.running, " run, ", all.awaiting, " await, ",
                      all.waiting, " calls wait; ", rank.count - std::min<uint64_t>(rank.count, shown),
                      " are not listed\n");
}

json RowOf(const ActorDoc& actor) {
  json row = {{"rank", actor.rank},
              {"hostname", actor.hostname},
              {"number", actor.number},
              {"class", actor.type},
              {"name", actor.name},
              {"state", actor.state},
              {"method", actor.method},
              {"for_seconds", nullptr},
              {"thread", actor.thread},
              {"waiting", actor.waiting},
              {"waiting_bytes", actor.waiting_bytes},
              {"answered", actor.answered},
              {"calls_per_second", actor.per_second},
              {"p50_seconds", absl::ToDoubleSeconds(actor.half)},
              {"p99_seconds", absl::ToDoubleSeconds(actor.most)},
              {"restarts", actor.restarts},
              {"kept", actor.kept},
              {"owner", nullptr}};
  if (actor.since) row["for_seconds"] = absl::ToDoubleSeconds(*actor.since);
  if (actor.owner) row["owner"] = *actor.owner;
  return row;
}

json RowOf(const std::string& type, const ClassDoc& of) {
  return {{"class", type},           {"actors", of.actors},
          {"running", of.running},   {"awaiting", of.awaiting},
          {"waiting", of.waiting},   {"waiting_bytes", of.waiting_bytes},
          {"answered", of.answered}, {"calls_per_second", of.per_second},
          {"restarts", of.restarts}};
}

}  // namespace

RankActors ParseRankActors(int rank, const absl::StatusOr<std::string>& answer) {
  RankActors said;
  said.rank = rank;
  if (!answer.ok()) {
    said.error = std::string(answer.status().message());
    return said;
  }
  const json document = json::parse(*answer, nullptr, false);
  if (!document.is_object()) {
    said.error = "the head's answer is not a JSON object";
    return said;
  }
  said.hostname = TextOf(document, "hostname");
  const std::string text = TextOf(document, "text");
  if (text.empty()) return said;
  const json listing = json::parse(text, nullptr, false);
  if (!listing.is_object() || listing.contains("error")) {
    said.error = listing.is_object() ? TextOf(listing, "error") : "its process answers with no JSON object";
    return said;
  }
  said.has_actors = true;
  said.count = Natural(listing, "count");
  for (const json& row : RowsOf(listing, "classes")) {
    if (row.is_object()) Add(said.classes[TextOf(row, "class")], ReadClass(row));
  }
  for (const json& row : RowsOf(listing, "actors")) {
    if (!row.is_object()) continue;
    said.actors.push_back(ReadActor(row));
    said.actors.back().rank = rank;
    said.actors.back().hostname = said.hostname;
  }
  return said;
}

std::vector<ActorDoc> BusiestOf(const std::vector<RankActors>& ranks, size_t limit) {
  std::vector<ActorDoc> all;
  for (const RankActors& rank : ranks) all.insert(all.end(), rank.actors.begin(), rank.actors.end());
  const auto key = [](const ActorDoc& actor) {
    const bool begun = actor.state == "running" || actor.state == "awaiting";
    return std::tuple(actor.waiting + (begun ? 1 : 0), actor.per_second);
  };
  std::stable_sort(all.begin(), all.end(),
                   [&](const ActorDoc& a, const ActorDoc& b) { return key(a) > key(b); });
  if (all.size() > limit) all.resize(limit);
  return all;
}

std::string JsonOf(const std::string& job, const std::vector<RankActors>& ranks, size_t limit) {
  json document = {
      {"job", job}, {"classes", json::array()}, {"actors", json::array()}, {"ranks", json::array()}};
  for (const auto& [type, of] : ClassesOf(ranks)) document["classes"].push_back(RowOf(type, of));
  uint64_t count = 0;
  for (const RankActors& rank : ranks) {
    count += rank.count;
    json row = {{"rank", rank.rank},
                {"hostname", rank.hostname},
                {"has_actors", rank.has_actors},
                {"actors", rank.count}};
    if (!rank.error.empty()) row["error"] = rank.error;
    document["ranks"].push_back(std::move(row));
  }
  for (const ActorDoc& actor : BusiestOf(ranks, limit)) document["actors"].push_back(RowOf(actor));
  document["left_out"] = count - std::min<uint64_t>(count, document["actors"].size());
  return OneLine(document);
}

std::string ActorsText(const std::string& job, const std::vector<RankActors>& ranks, size_t limit) {
  const std::map<std::string, ClassDoc> classes = ClassesOf(ranks);
  const std::vector<ActorDoc> busiest = BusiestOf(ranks, limit);
  const bool any = std::ranges::any_of(ranks, [](const RankActors& rank) { return rank.has_actors; });
  const bool failed = std::ranges::any_of(ranks, [](const RankActors& rank) { return !rank.error.empty(); });
  std::string out;
  if (!any && !failed)
    return absl::StrCat("job ", job,
                        " has no actors: none of its ranks calls gtrain::Main or opens a Cluster\n");
  if (any && classes.empty()) out = "no actor is there now that was asked for\n";
  if (!classes.empty()) out += ClassTable(classes);
  if (!busiest.empty()) out += ActorTable(busiest);
  std::map<int, size_t> shown;
  for (const ActorDoc& actor : busiest) ++shown[actor.rank];
  size_t lines = 0, left_out = 0;
  for (const RankActors& rank : ranks) {
    std::string line;
    if (!rank.error.empty()) {
      line = absl::StrCat(absl::StartsWith(rank.error, "rank ") ? "" : absl::StrCat("rank ", rank.rank, ": "),
                          SafeText(rank.error), "\n");
    } else if (rank.count > shown[rank.rank]) {
      line = RankLine(rank, shown[rank.rank]);
    }
    if (line.empty()) continue;
    if (lines == 0) out += "\n";
    if (++lines <= kRankLinesMax) {
      out += line;
    } else {
      ++left_out;
    }
  }
  if (left_out > 0) absl::StrAppend(&out, "(and ", left_out, " more such ranks: --json has them)\n");
  return out;
}

std::string ActorLine(const ActorDoc& actor) {
  return absl::StrCat(AddressOf(actor), " (", SafeText(actor.type), actor.name.empty() ? "" : " ",
                      SafeText(actor.name), ") on ", SafeText(actor.hostname), ": ", StateOf(actor));
}

absl::StatusOr<ActorWord> ParseActorWord(absl::string_view word) {
  constexpr size_t kNameBytesMax = 255;
  ActorWord actor;
  const std::vector<absl::string_view> parts = absl::StrSplit(word, '/');
  const auto is_number = [](absl::string_view part) {
    return !part.empty() && std::ranges::all_of(part, [](unsigned char c) { return absl::ascii_isdigit(c); });
  };
  if (parts.size() == 2 && is_number(parts[0]) && is_number(parts[1])) {
    int rank = 0;
    if (absl::SimpleAtoi(parts[0], &rank) && absl::SimpleAtoi(parts[1], &actor.number)) {
      actor.rank = rank;
      return actor;
    }
  }
  if (word.empty() || word.size() > kNameBytesMax)
    return absl::InvalidArgumentError(
        "--actor is RANK/NUMBER, as `gtrain actors` shows it, or the name with which it was spawned, of 1 to "
        "255 bytes");
  actor.name = std::string(word);
  return actor;
}

std::string QuestionFor(const ActorWord& word) {
  json question = {{"limit", 1}};
  if (word.rank) {
    question["number"] = word.number;
  } else {
    question["name"] = word.name;
  }
  return OneLine(question);
}

std::string QuestionFor(absl::string_view type, size_t limit) {
  json question = {{"limit", limit}};
  if (!type.empty()) question["class"] = std::string(type);
  return OneLine(question);
}

// Blocks of "thread 12 (name) state S" of the kernel, "Thread 3 (Thread 0x7f (LWP 12) ...)" of gdb and
// "TID 12:" of eu-stack, each up to the next line that is indented as little.
std::string StackOfThread(absl::string_view text, int64_t thread) {
  const std::string kernel = absl::StrCat("thread ", thread, " ("), gdb = absl::StrCat("LWP ", thread, ")"),
                    gdb_named = absl::StrCat("LWP ", thread, " "),
                    eu_stack = absl::StrCat("TID ", thread, ":");
  std::string out;
  bool inside = false;
  size_t indent = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const absl::string_view words = absl::StripLeadingAsciiWhitespace(line);
    const size_t at = line.size() - words.size();
    const bool frame = absl::StartsWith(words, "#");
    if (inside && !frame && at <= indent) inside = false;
    const bool begins = absl::StartsWith(words, kernel) || absl::StartsWith(words, eu_stack) ||
                        (absl::StartsWith(words, "Thread ") &&
                         (absl::StrContains(words, gdb) || absl::StrContains(words, gdb_named)));
    if (begins) {
      inside = true;
      indent = at;
    }
    if (inside) absl::StrAppend(&out, line, "\n");
  }
  return out;
}

}  // namespace gtrain::cli
