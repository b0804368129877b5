// Each cloud's documented reply, and nothing near it. The shapes are in docs/protocols/notices.md.
#include "runtime/core/agent/cloud_notice.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace gtrain::core {
namespace {

using nlohmann::json;

constexpr absl::Duration kAwsLeadMax = absl::Seconds(120);
constexpr absl::Duration kAzureLeadMax = absl::Hours(24 * 7);  // degraded hardware is announced days ahead
constexpr absl::Duration kFreezeMax = absl::Minutes(15);
constexpr absl::Duration kFreezeUnknown = absl::Seconds(30);
constexpr size_t kEventsMax = 100;
constexpr size_t kNameBytesMax = 256;

absl::Status NotANotice(absl::string_view source, const HttpReply& reply, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(source, ": HTTP ", reply.status, ", ", why, ": \"",
                                                 PrintableReply(reply.body).substr(0, 80), "\""));
}

absl::Status CheckBody(absl::string_view source, const HttpReply& reply) {
  if (reply.status != 200) return NotANotice(source, reply, "unexpected status");
  if (reply.body.size() > kNoticeBytesMax) return NotANotice(source, reply, "longer than 64 KiB");
  return absl::OkStatus();
}

absl::StatusOr<json> ReadObject(absl::string_view source, const HttpReply& reply) {
  GT_RETURN_IF_ERROR(CheckBody(source, reply));
  int depth = 0;
  const auto bounded = [&depth](int at, json::parse_event_t, json&) {
    depth = std::max(depth, at);
    return at <= 8;
  };
  json object = json::parse(reply.body, bounded, /*allow_exceptions=*/false);
  if (depth > 8 || !object.is_object()) return NotANotice(source, reply, "not the JSON expected");
  return object;
}

// nullopt: absent or of another type.
std::optional<std::string> Text(const json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_string()) return std::nullopt;
  std::string text = found->get<std::string>();
  if (text.size() > kNoticeRawBytesMax) return std::nullopt;
  return text;
}

std::optional<absl::Time> ReadUtc(absl::string_view text) {
  absl::Time time;
  std::string error;
  if (text.size() != 20 || !absl::ParseTime("%Y-%m-%dT%H:%M:%SZ", text, &time, &error)) return std::nullopt;
  return time;
}

// Fault N11: with the server's own clock on both sides, ours does not matter. Without its Date nothing is
// known of the time left, so the notice counts as due now: acting early is safe.
absl::Duration Left(absl::Time due, const HttpReply& reply, absl::Duration lead_max) {
  const std::optional<absl::Time> now = ReadHttpDate(reply.date);
  if (!now) return absl::ZeroDuration();
  return std::clamp(due - *now, absl::ZeroDuration(), lead_max);
}

}  // namespace

std::string PrintableReply(absl::string_view text) {
  std::string clean(text.substr(0, kNoticeRawBytesMax));
  for (char& c : clean) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = ' ';
  }
  return clean;
}

std::optional<absl::Time> ReadHttpDate(absl::string_view text) {
  if (text.size() != 29) return std::nullopt;
  absl::Time time;
  std::string error;
  if (!absl::ParseTime("%a, %d %b %Y %H:%M:%S GMT", text, &time, &error)) return std::nullopt;
  // ParseTime takes any weekday and any spacing; a date has one spelling.
  if (absl::FormatTime("%a, %d %b %Y %H:%M:%S GMT", time, absl::UTCTimeZone()) != text) return std::nullopt;
  return time;
}

absl::StatusOr<std::optional<NodeNotice>> ReadAwsAction(const HttpReply& reply) {
  constexpr char kSource[] = "aws spot interruption";
  if (reply.status == 404) return std::nullopt;
  GT_ASSIGN_OR_RETURN(const json object, ReadObject(kSource, reply));
  const std::optional<std::string> action = Text(object, "action"), time = Text(object, "time");
  if (!action || !time) return NotANotice(kSource, reply, "no action or time");
  if (*action != "terminate" && *action != "stop" && *action != "hibernate") {
    return NotANotice(kSource, reply, "unknown action");
  }
  const std::optional<absl::Time> due = ReadUtc(*time);
  if (!due) return NotANotice(kSource, reply, "a time that is none");
  // Hibernation begins with the notice.
  const absl::Duration left = *action == "hibernate" ? absl::ZeroDuration() : Left(*due, reply, kAwsLeadMax);
  return NodeNotice{.kind = NoticeKind::kLeave,
                    .left = left,
                    .source = absl::StrCat(kSource, " (", *action, ")"),
                    .id = absl::StrCat(*action, "@", *time),
                    .raw = PrintableReply(reply.body)};
}

absl::StatusOr<std::optional<NodeNotice>> ReadAwsRebalance(const HttpReply& reply) {
  constexpr char kSource[] = "aws rebalance recommendation";
  if (reply.status == 404) return std::nullopt;
  GT_ASSIGN_OR_RETURN(const json object, ReadObject(kSource, reply));
  const std::optional<std::string> time = Text(object, "noticeTime");
  if (!time || !ReadUtc(*time)) return NotANotice(kSource, reply, "no noticeTime");
  return NodeNotice{.kind = NoticeKind::kAtRisk,
                    .source = kSource,
                    .id = absl::StrCat("rebalance@", *time),
                    .raw = PrintableReply(reply.body)};
}

absl::StatusOr<std::optional<NodeNotice>> ReadGcpPreempted(const HttpReply& reply, absl::Duration lead) {
  constexpr char kSource[] = "gcp preemption";
  GT_RETURN_IF_ERROR(CheckBody(kSource, reply));
  if (reply.flavor != "Google") return NotANotice(kSource, reply, "not from Google's metadata server");
  const absl::string_view word = absl::StripAsciiWhitespace(reply.body);
  if (word == "FALSE") return std::nullopt;
  if (word != "TRUE") return NotANotice(kSource, reply, "neither TRUE nor FALSE");
  return NodeNotice{
      .kind = NoticeKind::kLeave, .left = lead, .source = kSource, .id = "preempted", .raw = "TRUE"};
}

namespace {

struct AzureType {
  absl::string_view name;
  NoticeKind kind;
};
constexpr AzureType kAzureTypes[] = {{"Freeze", NoticeKind::kFreeze},
                                     {"Reboot", NoticeKind::kLeave},
                                     {"Redeploy", NoticeKind::kLeave},
                                     {"Preempt", NoticeKind::kLeave},
                                     {"Terminate", NoticeKind::kLeave}};

bool Concerns(const json& event, absl::string_view own_name) {
  const auto resources = event.find("Resources");
  if (resources == event.end() || !resources->is_array()) return false;
  return std::any_of(resources->begin(), resources->end(), [&](const json& name) {
    return name.is_string() && name.get_ref<const std::string&>() == own_name;
  });
}

absl::StatusOr<NodeNotice> ReadAzureEvent(const json& event, const HttpReply& reply) {
  constexpr char kSource[] = "azure scheduled event";
  const std::optional<std::string> id = Text(event, "EventId"), type = Text(event, "EventType"),
                                   status = Text(event, "EventStatus"), not_before = Text(event, "NotBefore");
  if (!id || id->empty() || id->size() > kNameBytesMax || !type || !status || !not_before) {
    return NotANotice(kSource, reply, "an event without its fields");
  }
  const auto* known = std::find_if(std::begin(kAzureTypes), std::end(kAzureTypes),
                                   [&](const AzureType& one) { return one.name == *type; });
  if (known == std::end(kAzureTypes)) return NotANotice(kSource, reply, "unknown EventType");
  NodeNotice notice{.kind = known->kind,
                    .source = absl::StrCat("azure ", absl::AsciiStrToLower(*type)),
                    .id = PrintableReply(*id),
                    .raw = PrintableReply(event.dump(-1, ' ', true, json::error_handler_t::replace))};
  // NotBefore is empty once an event has started.
  if (*status != "Started") {
    const std::optional<absl::Time> due = ReadHttpDate(*not_before);
    if (*status != "Scheduled" || !due) return NotANotice(kSource, reply, "an event without its time");
    notice.left = Left(*due, reply, kAzureLeadMax);
  }
  if (known->kind == NoticeKind::kFreeze) {
    const auto seconds = event.find("DurationInSeconds");
    const bool said = seconds != event.end() && seconds->is_number_integer() && seconds->get<int64_t>() >= 0;
    notice.frozen = said ? std::min(absl::Seconds(seconds->get<int64_t>()), kFreezeMax) : kFreezeUnknown;
  }
  return notice;
}

}  // namespace

absl::StatusOr<std::vector<NodeNotice>> ReadAzureEvents(const HttpReply& reply, absl::string_view own_name) {
  constexpr char kSource[] = "azure scheduled event";
  GT_ASSIGN_OR_RETURN(const json object, ReadObject(kSource, reply));
  const auto events = object.find("Events");
  if (events == object.end() || !events->is_array() || events->size() > kEventsMax) {
    return NotANotice(kSource, reply, "no list of events");
  }
  std::vector<NodeNotice> notices;
  for (const json& event : *events) {
    if (!event.is_object()) return NotANotice(kSource, reply, "an event that is none");
    if (!Concerns(event, own_name)) continue;
    GT_ASSIGN_OR_RETURN(NodeNotice notice, ReadAzureEvent(event, reply));
    notices.push_back(std::move(notice));
  }
  std::stable_sort(notices.begin(), notices.end(), [](const NodeNotice& a, const NodeNotice& b) {
    const bool a_leaves = a.kind == NoticeKind::kLeave, b_leaves = b.kind == NoticeKind::kLeave;
    return a_leaves != b_leaves ? a_leaves : a.left < b.left;
  });
  return notices;
}

}  // namespace gtrain::core
