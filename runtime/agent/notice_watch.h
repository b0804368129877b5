// Asks this machine's cloud once a second whether the machine is about to be taken away
// (docs/protocols/notices.md).
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "net/http/client.h"
#include "runtime/core/values/messages.h"

namespace gtrain::agent {

struct NoticeOptions {
  // "off", "aws", "gcp", "azure", "file:PATH" (PATH appears when the machine leaves and holds the seconds
  // left), or "auto": the cloud that the machine's firmware names, off if none.
  std::string source = "off";
  std::string url;          // of the metadata service, instead of the cloud's own
  absl::Duration gcp_lead;  // --preemption-notice-duration of the machine; Google does not say it
};

// One of the services. Not thread-safe; Poll blocks a few seconds at most.
class NoticeSource {
 public:
  virtual ~NoticeSource() = default;
  // Returns the current notice; kNone: none. An error is neither: not reachable, or not an answer of this
  // cloud (B12).
  virtual absl::StatusOr<core::NodeNotice> Poll() = 0;
};

// `http` may be null for "file:". InvalidArgument: no such source.
absl::StatusOr<std::unique_ptr<NoticeSource>> MakeNoticeSource(const NoticeOptions& options,
                                                               std::unique_ptr<http::Client> http);

// "aws", "gcp", "azure" or "" from the texts below `dmi_dir` (/sys/class/dmi/id). Asks nobody.
std::string CloudOfFirmware(const std::string& dmi_dir);

// How long a service may give no answer of its cloud until the machine counts as one that is not told.
struct NoticePatience {
  absl::Duration first = absl::Minutes(2);  // until its first answer, which takes Azure so long
  absl::Duration later = absl::Seconds(10);
};

// Polls a source on a thread of its own. Thread-safe.
class NoticeWatch {
 public:
  explicit NoticeWatch(std::unique_ptr<NoticeSource> source, absl::Duration period = absl::Seconds(1),
                       NoticePatience patience = {});
  ~NoticeWatch();  // waits for the poll that is under way, a few seconds at most

  // The newest answer that was not taken yet, or core::IsNotHeard: there is none any more.
  std::optional<core::NodeNotice> Take();
  int fd() const { return news_event_.get(); }  // readable when Take has something

 private:
  void Run();
  std::optional<core::NodeNotice> Hear(absl::StatusOr<core::NodeNotice> said);
  void Complain(const absl::Status& error, Instant now);

  const std::unique_ptr<NoticeSource> source_;
  const absl::Duration period_;
  const NoticePatience patience_;
  const UniqueFd news_event_;
  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<core::NodeNotice> news_ ABSL_GUARDED_BY(mutex_);

  // Of the thread alone.
  bool answered_ = false;
  std::optional<Instant> failing_since_, complained_;
  core::NodeNotice standing_;  // what was said last

  std::thread thread_;
};

// Null: off. FailedPrecondition: a source is named and cannot be watched; with "auto" that is only logged.
absl::StatusOr<std::unique_ptr<NoticeWatch>> WatchNotices(const NoticeOptions& options);

}  // namespace gtrain::agent
