// Parses the notices of clouds before they take a machine away, without trust. PURE. Faults B12, N11.
//
// A reply that is not exactly what the cloud documents is an error and never a notice: no action, the caller
// counts it. The absence of a notice is nullopt. Wall clocks are not ours to believe: the time left is the
// notice's time minus the reply's own Date, clamped to the most that the cloud gives.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

inline constexpr size_t kNoticeBytesMax = 64 << 10;  // of a reply's body
inline constexpr size_t kNoticeRawBytesMax = 1024;   // of NodeNotice::raw

struct HttpReply {
  int status = 0;
  std::string date;    // header Date, "" if none
  std::string flavor;  // header Metadata-Flavor, "" if none
  std::string body;
};

// /latest/meta-data/spot/instance-action. 404: none.
absl::StatusOr<std::optional<NodeNotice>> ReadAwsAction(const HttpReply& reply);
// /latest/meta-data/events/recommendations/rebalance. 404: none.
absl::StatusOr<std::optional<NodeNotice>> ReadAwsRebalance(const HttpReply& reply);
// /computeMetadata/v1/instance/preempted. `lead` is what the machine was made with: 0 s or 120 s, then up to
// 30 s of shutdown that are not promised.
absl::StatusOr<std::optional<NodeNotice>> ReadGcpPreempted(const HttpReply& reply, absl::Duration lead);
// /metadata/scheduledevents. Events of other machines of the set are left out; of ours the worst comes first.
absl::StatusOr<std::vector<NodeNotice>> ReadAzureEvents(const HttpReply& reply, absl::string_view own_name);

// What others say, for logs and records: printable, at most kNoticeRawBytesMax.
std::string PrintableReply(absl::string_view text);

// "Mon, 19 Sep 2016 18:29:47 GMT" and nothing else.
std::optional<absl::Time> ReadHttpDate(absl::string_view text);

}  // namespace gtrain::core
