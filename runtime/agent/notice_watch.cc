// The exchanges with each cloud's metadata service; what their answers mean is in
// runtime/core/agent/cloud_notice.
#include "runtime/agent/notice_watch.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "runtime/core/agent/cloud_notice.h"

namespace gtrain::agent {
namespace {

constexpr char kMetadata[] = "http://169.254.169.254";
constexpr absl::Duration kAnswerIn = absl::Seconds(1);
constexpr absl::Duration kComplainOfServiceEvery = absl::Minutes(5);
constexpr size_t kWhyBytesMax = 300;

constexpr char kNextStep[] =
    "; turn this machine's metadata service on, for containers too where the agent runs in one, or start the "
    "agent with --notices off";

std::string HeaderOf(const http::Reply& reply, const char* name) {
  const auto it = reply.headers.find(name);
  return it == reply.headers.end() ? "" : it->second;
}

class Metadata {
 public:
  Metadata(const NoticeOptions& options, std::unique_ptr<http::Client> http)
      : base_(options.url.empty() ? kMetadata : options.url), http_(std::move(http)) {}

  absl::StatusOr<core::HttpReply> Get(absl::string_view path, absl::string_view header,
                                      absl::string_view value, absl::Duration timeout = kAnswerIn) {
    return Ask("GET", path, header, value, timeout);
  }
  absl::StatusOr<core::HttpReply> Ask(absl::string_view method, absl::string_view path,
                                      absl::string_view header, absl::string_view value,
                                      absl::Duration timeout = kAnswerIn) {
    http::Request request;
    request.method = std::string(method);
    request.url = absl::StrCat(base_, path);
    request.headers[std::string(header)] = std::string(value);
    request.timeout = timeout;
    request.reply_bytes_max = core::kNoticeBytesMax;
    request.proxy = false;
    GT_ASSIGN_OR_RETURN(http::Reply reply, http_->Do(request));
    return core::HttpReply{reply.status, HeaderOf(reply, "date"), HeaderOf(reply, "metadata-flavor"),
                           std::move(reply.body)};
  }

 private:
  std::string base_;
  std::unique_ptr<http::Client> http_;
};

core::NodeNotice OrNone(std::optional<core::NodeNotice> notice) {
  return notice ? *std::move(notice) : core::NodeNotice();
}

// IMDSv2: a token first; an answer 401 means that it is none any more.
class Aws final : public NoticeSource {
 public:
  explicit Aws(Metadata metadata) : metadata_(std::move(metadata)) {}

  absl::StatusOr<core::NodeNotice> Poll() override {
    GT_ASSIGN_OR_RETURN(const core::HttpReply action, Get("/latest/meta-data/spot/instance-action"));
    GT_ASSIGN_OR_RETURN(const auto leaves, core::ReadAwsAction(action));
    if (leaves) return *leaves;
    GT_ASSIGN_OR_RETURN(const core::HttpReply advice,
                        Get("/latest/meta-data/events/recommendations/rebalance"));
    GT_ASSIGN_OR_RETURN(auto at_risk, core::ReadAwsRebalance(advice));
    return OrNone(std::move(at_risk));
  }

 private:
  absl::StatusOr<core::HttpReply> Get(absl::string_view path) {
    for (const bool first : {true, false}) {
      if (token_.empty()) {
        GT_ASSIGN_OR_RETURN(
            const core::HttpReply fresh,
            metadata_.Ask("PUT", "/latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds", "21600"));
        token_ = std::string(absl::StripAsciiWhitespace(fresh.body));
        const bool clean = std::all_of(token_.begin(), token_.end(), absl::ascii_isgraph);
        if (fresh.status != 200 || token_.empty() || token_.size() > 1024 || !clean) {
          token_.clear();
          return absl::InvalidArgumentError(
              absl::StrCat("aws: no metadata token, HTTP status ", fresh.status, kNextStep));
        }
      }
      GT_ASSIGN_OR_RETURN(core::HttpReply reply, metadata_.Get(path, "X-aws-ec2-metadata-token", token_));
      if (reply.status != 401 || !first) return reply;
      token_.clear();
    }
    return absl::InternalError("unreachable");
  }

  Metadata metadata_;
  std::string token_;
};

class Gcp final : public NoticeSource {
 public:
  Gcp(Metadata metadata, absl::Duration lead) : metadata_(std::move(metadata)), lead_(lead) {}

  absl::StatusOr<core::NodeNotice> Poll() override {
    GT_ASSIGN_OR_RETURN(const core::HttpReply reply,
                        metadata_.Get("/computeMetadata/v1/instance/preempted", "Metadata-Flavor", "Google"));
    GT_ASSIGN_OR_RETURN(auto notice, core::ReadGcpPreempted(reply, lead_));
    return OrNone(std::move(notice));
  }

 private:
  Metadata metadata_;
  const absl::Duration lead_;
};

// The service begins to work with the first request, up to two minutes later.
class Azure final : public NoticeSource {
 public:
  explicit Azure(Metadata metadata) : metadata_(std::move(metadata)) {}

  absl::StatusOr<core::NodeNotice> Poll() override {
    const absl::Duration timeout = answered_ ? kAnswerIn : absl::Seconds(5);
    if (name_.empty()) {
      GT_ASSIGN_OR_RETURN(const core::HttpReply reply,
                          metadata_.Get("/metadata/instance/compute/name?api-version=2021-02-01&format=text",
                                        "Metadata", "true", timeout));
      const absl::string_view name = absl::StripAsciiWhitespace(reply.body);
      if (reply.status != 200 || name.empty() || name.size() > 256) {
        return absl::InvalidArgumentError(
            absl::StrCat("azure: no name of this machine, HTTP status ", reply.status, kNextStep));
      }
      name_ = std::string(name);
    }
    GT_ASSIGN_OR_RETURN(
        const core::HttpReply reply,
        metadata_.Get("/metadata/scheduledevents?api-version=2020-07-01", "Metadata", "true", timeout));
    GT_ASSIGN_OR_RETURN(const auto events, core::ReadAzureEvents(reply, name_));
    answered_ = true;
    return events.empty() ? core::NodeNotice() : events[0];
  }

 private:
  Metadata metadata_;
  std::string name_;
  bool answered_ = false;
};

// Serves every other way in which a machine is announced to go: a script writes the seconds that are left.
class File final : public NoticeSource {
 public:
  explicit File(std::string path) : path_(std::move(path)) {}

  absl::StatusOr<core::NodeNotice> Poll() override {
    constexpr int kLeftMax = 7 * 24 * 3600;
    const absl::StatusOr<std::string> text = ReadFile(path_, 4096);
    if (absl::IsNotFound(text.status())) return core::NodeNotice();
    GT_RETURN_IF_ERROR(text.status());
    const absl::string_view word = absl::StripAsciiWhitespace(*text);
    int seconds = 0;
    if (!word.empty() && (!absl::SimpleAtoi(word, &seconds) || seconds < 0 || seconds > kLeftMax)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path_, " must hold the seconds that are left, 0 to ", kLeftMax));
    }
    return core::NodeNotice{.kind = core::NoticeKind::kLeave,
                            .left = absl::Seconds(seconds),
                            .source = "notice file",
                            .id = absl::StrCat("file:", seconds),
                            .raw = std::string(word)};
  }

 private:
  const std::string path_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NoticeSource>> MakeNoticeSource(const NoticeOptions& options,
                                                               std::unique_ptr<http::Client> http) {
  absl::string_view path = options.source;
  if (absl::ConsumePrefix(&path, "file:") && !path.empty()) return std::make_unique<File>(std::string(path));
  Metadata metadata(options, std::move(http));
  if (options.source == "aws") return std::make_unique<Aws>(std::move(metadata));
  if (options.source == "gcp") return std::make_unique<Gcp>(std::move(metadata), options.gcp_lead);
  if (options.source == "azure") return std::make_unique<Azure>(std::move(metadata));
  return absl::InvalidArgumentError(
      absl::StrCat("notices of \"", options.source, "\": it is auto, off, aws, gcp, azure or file:PATH"));
}

std::string CloudOfFirmware(const std::string& dmi_dir) {
  const auto text = [&dmi_dir](const char* name) {
    const absl::StatusOr<std::string> read = ReadFile(absl::StrCat(dmi_dir, "/", name), 4096);
    return read.ok() ? std::string(absl::StripAsciiWhitespace(*read)) : std::string();
  };
  if (text("sys_vendor") == "Amazon EC2") return "aws";
  if (text("product_name") == "Google Compute Engine") return "gcp";
  if (text("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77")
    return "azure";  // the same on every one
  return "";
}

// ---------------------------------------------------------------- the thread

NoticeWatch::NoticeWatch(std::unique_ptr<NoticeSource> source, absl::Duration period, NoticePatience patience)
    : source_(std::move(source)),
      period_(period),
      patience_(patience),
      news_event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { Run(); }) {}

NoticeWatch::~NoticeWatch() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

std::optional<core::NodeNotice> NoticeWatch::Take() {
  MutexLock lock(&mutex_);
  uint64_t drained;
  (void)!read(news_event_.get(), &drained, sizeof(drained));
  return std::exchange(news_, std::nullopt);
}

void NoticeWatch::Complain(const absl::Status& error, Instant now) {
  if (complained_ && now - *complained_ < kComplainOfServiceEvery) return;
  complained_ = now;
  LogWarning("notices of the cloud: ", core::PrintableReply(error.message()));
}

// The loss of the service is not a notice and does not take one back. Where none stands the loss is said of
// the machine once it has lasted, since somebody may have put himself in the place of the cloud (B12).
std::optional<core::NodeNotice> NoticeWatch::Hear(absl::StatusOr<core::NodeNotice> said) {
  const Instant now = RealClock().Now();
  if (said.ok()) {
    answered_ = true;
    failing_since_.reset();
    return *std::move(said);
  }
  Complain(said.status(), now);
  if (!failing_since_) failing_since_ = now;
  const bool lasts = now - *failing_since_ >= (answered_ ? patience_.later : patience_.first);
  if (!lasts || standing_.kind != core::NoticeKind::kNone) return std::nullopt;
  const std::string why = core::PrintableReply(said.status().message()).substr(0, kWhyBytesMax);
  return core::NodeNotice{.kind = core::NoticeKind::kAtRisk,
                          .source = absl::StrCat("notices of its cloud are not heard: ", why),
                          .id = core::kNotHeardId};
}

void NoticeWatch::Run() {
  Rng rng = Rng::FromSystem();
  bool first = true;
  const auto stopping = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_; };
  while (true) {
    std::optional<core::NodeNotice> heard = Hear(source_->Poll());
    MutexLock lock(&mutex_);
    if (heard && (first || *heard != standing_)) {
      first = false;
      news_ = standing_ = *std::move(heard);
      const uint64_t one = 1;
      (void)!write(news_event_.get(), &one, sizeof(one));
    }
    if (mutex_.AwaitFor(period_ * (0.8 + 0.4 * rng.Unit()), stopping)) return;
  }
}

absl::StatusOr<std::unique_ptr<NoticeWatch>> WatchNotices(const NoticeOptions& options) {
  NoticeOptions chosen = options;
  if (options.source == "auto") chosen.source = CloudOfFirmware("/sys/class/dmi/id");
  if (chosen.source.empty() || chosen.source == "off") return nullptr;
  std::unique_ptr<http::Client> http;
  if (!absl::StartsWith(chosen.source, "file:")) {
    absl::StatusOr<std::unique_ptr<http::Client>> loaded = http::LoadClient();
    if (!loaded.ok() && options.source == "auto") {
      LogWarning("notices of ", chosen.source, " are not watched: ", loaded.status().message());
      return nullptr;
    }
    GT_RETURN_IF_ERROR(loaded.status());
    http = *std::move(loaded);
  }
  GT_ASSIGN_OR_RETURN(std::unique_ptr<NoticeSource> source, MakeNoticeSource(chosen, std::move(http)));
  LogInfo("watches the notices of ", chosen.source,
          chosen.url.empty() ? "" : absl::StrCat(" at ", chosen.url));
  return std::make_unique<NoticeWatch>(std::move(source));
}

}  // namespace gtrain::agent
