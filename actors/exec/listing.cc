#include "actors/exec/listing.h"

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace gtrain::actors {
namespace {

using nlohmann::json;

constexpr int64_t kWindowNs = 10'000'000'000;
constexpr int kFirstBits = 10;  // of the nanoseconds of the first bucket
constexpr size_t kMethodBytesMax = 120;
constexpr size_t kClassesMax = 64;

std::string Dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

int64_t Micros(absl::Duration d) { return absl::ToInt64Microseconds(d); }

// A number above zero, of a field that may not be there.
std::optional<uint64_t> NumberOf(const json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number_unsigned()) return std::nullopt;
  return it->get<uint64_t>();
}
std::string TextOf(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

json RowOf(const ActorFacts& actor) {
  json row = {{"number", actor.number},
              {"class", actor.type},
              {"state", NameOf(actor.doing)},
              {"waiting", actor.waiting},
              {"waiting_bytes", actor.waiting_bytes},
              {"answered", actor.answered},
              {"per_second", actor.per_second},
              {"p50_us", Micros(actor.half)},
              {"p99_us", Micros(actor.most)},
              {"restarts", actor.restarts},
              {"kept", actor.kept}};
  if (!actor.name.empty()) row["name"] = actor.name;
  if (!actor.method.empty()) row["method"] = actor.method;
  if (actor.doing != Doing::kIdle && actor.doing != Doing::kWaiting) row["for_us"] = Micros(actor.since);
  if (actor.thread != 0) row["thread"] = actor.thread;
  if (actor.owner) row["owner"] = *actor.owner;
  return row;
}

json RowOf(const std::string& type, const ClassFacts& of) {
  return {{"class", type},
          {"actors", of.actors},
          {"running", of.running},
          {"awaiting", of.awaiting},
          {"waiting", of.waiting},
          {"waiting_bytes", of.waiting_bytes},
          {"answered", of.times.count()},
          {"per_second", of.per_second},
          {"p50_us", Micros(of.times.Quantile(0.5))},
          {"p99_us", Micros(of.times.Quantile(0.99))},
          {"restarts", of.restarts}};
}

}  // namespace

// Each call of an actor comes here, with the lock of its host: plain integers.
void CallTimes::Count(Instant made, Instant now) {
  const auto took = static_cast<uint64_t>(std::max<int64_t>(0, now.ns - made.ns));
  uint32_t& bucket = buckets_[std::min<size_t>(std::bit_width(took >> kFirstBits), buckets_.size() - 1)];
  if (bucket < UINT32_MAX) ++bucket;
  if (count_++ == 0) window_began_ = made;
  if (const int64_t window = now.ns - window_began_.ns; window >= kWindowNs) {
    before_calls_ = std::exchange(window_calls_, 0);
    before_ns_ = window;
    window_began_ = now;
  }
  ++window_calls_;
}

void CallTimes::Add(const CallTimes& other) {
  count_ += other.count_;
  for (size_t i = 0; i < buckets_.size(); ++i)
    buckets_[i] += std::min(other.buckets_[i], UINT32_MAX - buckets_[i]);
}

absl::Duration CallTimes::Quantile(double share) const {
  double all = 0;
  for (const uint32_t bucket : buckets_) all += bucket;
  double left = all * share;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i] == 0) continue;
    if (left > buckets_[i]) {
      left -= buckets_[i];
      continue;
    }
    const double from = i == 0 ? 0 : static_cast<double>(uint64_t{1} << (i - 1 + kFirstBits));
    const auto to = static_cast<double>(uint64_t{1} << (i + kFirstBits));
    return absl::Nanoseconds(from + (to - from) * left / buckets_[i]);
  }
  return absl::ZeroDuration();
}

double CallTimes::PerSecond(Instant now) const {
  if (count_ == 0) return 0;
  const int64_t window = now.ns - window_began_.ns;
  const bool young = window < kWindowNs;
  const double calls = window_calls_ + (young ? before_calls_ : 0.0);
  return calls / std::max(1e-3, static_cast<double>(window + (young ? before_ns_ : 0)) * 1e-9);
}

absl::string_view NameOf(Doing doing) {
  switch (doing) {
    case Doing::kIdle:
      return "idle";
    case Doing::kWaiting:
      return "waiting";
    case Doing::kMaking:
      return "making";
    case Doing::kRunning:
      return "running";
    case Doing::kAwaiting:
      return "awaiting";
    case Doing::kSaving:
      return "saving";
  }
  return "idle";
}

absl::StatusOr<ListQuestion> ParseListQuestion(absl::string_view text) {
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return absl::InvalidArgumentError("the question is no JSON object");
  ListQuestion question;
  question.type = TextOf(object, "class");
  question.name = TextOf(object, "name");
  question.number = NumberOf(object, "number");
  question.limit = std::min<size_t>(NumberOf(object, "limit").value_or(question.limit), kRowsMax);
  return question;
}

std::string PrintListing(const Listing& listing) {
  json answer = {{"classes", json::array()}, {"actors", json::array()}};
  size_t actors = 0, classes_left_out = 0;
  for (const auto& [type, of] : listing.classes) {
    actors += of.actors;
    if (answer["classes"].size() < kClassesMax) {
      answer["classes"].push_back(RowOf(type, of));
    } else {
      ++classes_left_out;
    }
  }
  answer["count"] = actors;
  answer["classes_left_out"] = classes_left_out;
  size_t bytes = Dump(answer).size(), left_out = listing.left_out;
  for (const ActorFacts& actor : listing.actors) {
    json row = RowOf(actor);
    bytes += Dump(row).size() + 1;
    if (bytes > kAnswerBytesMax) {
      left_out += listing.actors.size() - answer["actors"].size();
      break;
    }
    answer["actors"].push_back(std::move(row));
  }
  answer["left_out"] = left_out;
  return Dump(answer);
}

std::string PrintListError(absl::string_view why) { return Dump(json{{"error", why}}); }

// "(int64); Pull() const -> ...; Push(...) -> ..." of C++, and "python: (self, n); push(self, g)".
std::string MethodOf(absl::string_view signature, int methods, int method) {
  const std::vector<absl::string_view> parts = absl::StrSplit(signature, "; ");
  const std::string number = absl::StrCat("method ", method);
  if (method < 0 || method >= methods || parts.size() != static_cast<size_t>(methods) + 1) return number;
  const absl::string_view part = parts[static_cast<size_t>(method) + 1];
  const absl::string_view name = part.substr(0, part.find('('));
  return name.empty() ? number : std::string(name.substr(0, kMethodBytesMax));
}

}  // namespace gtrain::actors
