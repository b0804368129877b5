// Replies of the clouds' metadata services (faults B12, N11): an error, nothing, or a notice whose every
// number is inside what the cloud promises.
#include "absl/strings/numbers.h"
#include "base/check.h"
#include "runtime/core/agent/cloud_notice.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

using core::NodeNotice;

void CheckNotice(const NodeNotice& notice, absl::Duration lead_max) {
  GT_CHECK(notice.left >= absl::ZeroDuration() && notice.left <= lead_max);
  GT_CHECK(notice.frozen >= absl::ZeroDuration() && notice.frozen <= absl::Minutes(15));
  GT_CHECK(!notice.source.empty() && !notice.id.empty() && notice.raw.size() <= core::kNoticeRawBytesMax);
  for (char c : notice.raw) GT_CHECK(c >= ' ' && c <= '~');
}

}  // namespace

// Steps: HTTP status, Date, Metadata-Flavor, body; what is missing is as a good server would say it.
GT_FUZZ_RUN(imds_reply) {
  const std::vector<absl::string_view> steps = SplitSteps(bytes);
  core::HttpReply reply{.status = 200, .date = "Mon, 18 Sep 2017 08:20:30 GMT", .flavor = "Google"};
  reply.body = std::string(steps.back());
  if (steps.size() > 1) (void)absl::SimpleAtoi(steps[0], &reply.status);
  if (steps.size() > 2) reply.date = std::string(steps[1]);
  if (steps.size() > 3) reply.flavor = std::string(steps[2]);
  const absl::Duration lead = absl::Seconds(120);
  for (const auto& found :
       {core::ReadAwsAction(reply), core::ReadAwsRebalance(reply), core::ReadGcpPreempted(reply, lead)}) {
    if (found.ok() && *found) CheckNotice(**found, lead);
  }
  const auto events = core::ReadAzureEvents(reply, "me");
  if (!events.ok()) return;
  for (const NodeNotice& notice : *events) CheckNotice(notice, absl::Hours(24 * 7));
}

GT_FUZZ_SEEDS(imds_reply) {
  return {
      R"({"action": "terminate", "time": "2017-09-18T08:22:00Z"})",
      R"({"noticeTime": "2017-09-18T08:22:00Z"})",
      "TRUE",
      "FALSE\n",
      JoinSteps({"404", "not found"}),
      JoinSteps({"200", "Mon, 18 Sep 2017 08:20:30 GMT", "Google", "TRUE"}),
      R"({"DocumentIncarnation":1,"Events":[{"EventId":"e1","EventType":"Preempt","ResourceType":"VirtualMachine",)"
      R"("Resources":["me","other"],"EventStatus":"Scheduled","NotBefore":"Mon, 18 Sep 2017 08:21:00 GMT",)"
      R"("Description":"","EventSource":"Platform","DurationInSeconds":-1}]})",
      R"({"Events":[{"EventId":"e2","EventType":"Freeze","Resources":["me"],"EventStatus":"Started",)"
      R"("NotBefore":"","DurationInSeconds":9}]})",
      "<html><body>captive portal</body></html>"};
}

}  // namespace gtrain::fuzz
