// Each cloud's exchange against a fake service in memory; the readers themselves are tested in runtime/core.
#include "runtime/agent/notice_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "base/test_wait.h"

namespace gtrain::agent {
namespace {

using core::NoticeKind;

constexpr char kDate[] = "Mon, 18 Sep 2017 08:20:00 GMT";

class FakeHttp : public http::Client {
 public:
  using Answer = std::function<absl::StatusOr<http::Reply>(const http::Request&)>;
  explicit FakeHttp(Answer answer) : answer_(std::move(answer)) {}
  absl::StatusOr<http::Reply> Do(const http::Request& request) override {
    EXPECT_FALSE(request.proxy) << "a proxy would answer for another machine";
    EXPECT_LE(request.reply_bytes_max, size_t{64} << 10) << "B12";
    EXPECT_LE(request.timeout, absl::Seconds(5));
    return answer_(request);
  }

 private:
  Answer answer_;
};

std::unique_ptr<NoticeSource> Source(NoticeOptions options, FakeHttp::Answer answer) {
  auto source = MakeNoticeSource(options, std::make_unique<FakeHttp>(std::move(answer)));
  EXPECT_TRUE(source.ok()) << source.status();
  return *std::move(source);
}

http::Reply Ok(std::string body) { return {200, {{"date", kDate}}, std::move(body), 0}; }

TEST(NoticeSource, AwsRenewsItsTokenOnceAndReadsBothAnswers) {
  std::string valid = "token-1", action, rebalance;
  int tokens = 0;
  const auto answer = [&](const http::Request& r) -> absl::StatusOr<http::Reply> {
    if (r.method == "PUT") {
      ++tokens;
      EXPECT_EQ(r.url, "http://169.254.169.254/latest/api/token");
      EXPECT_EQ(r.headers.at("X-aws-ec2-metadata-token-ttl-seconds"), "21600");
      return Ok(valid);
    }
    if (r.headers.at("X-aws-ec2-metadata-token") != valid) return http::Reply{401, {}, "", 0};
    const std::string& body = absl::StrContains(r.url, "instance-action") ? action : rebalance;
    return body.empty() ? http::Reply{404, {}, "", 0} : Ok(body);
  };
  const auto source = Source({.source = "aws"}, answer);
  EXPECT_EQ(source->Poll()->kind, NoticeKind::kNone);
  rebalance = R"({"noticeTime": "2017-09-18T08:20:00Z"})";
  EXPECT_EQ(source->Poll()->kind, NoticeKind::kAtRisk);
  EXPECT_EQ(tokens, 1);
  valid = "token-2";  // the old one has run out
  action = R"({"action": "terminate", "time": "2017-09-18T08:22:00Z"})";
  const auto notice = source->Poll();
  ASSERT_TRUE(notice.ok()) << notice.status();
  EXPECT_EQ(notice->kind, NoticeKind::kLeave);
  EXPECT_EQ(notice->left, absl::Seconds(120));
  EXPECT_EQ(tokens, 2);
  action = "<html>login</html>";
  EXPECT_FALSE(source->Poll().ok()) << "B12: neither a notice nor the end of one";
}

TEST(NoticeSource, AServiceThatIsOffIsExplained) {
  const auto refuses = [](const http::Request&) { return http::Reply{403, {}, "", 0}; };
  for (const std::string cloud : {"aws", "azure"}) {
    const absl::Status status = Source({.source = cloud}, refuses)->Poll().status();
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(testing::HasSubstr("403"), testing::HasSubstr("--notices off")));
  }
}

TEST(NoticeSource, GcpNeedsItsHeaderBothWays) {
  http::Reply reply = Ok("FALSE");
  const auto source = Source({.source = "gcp", .url = "http://h:1", .gcp_lead = absl::Seconds(120)},
                             [&](const http::Request& r) -> absl::StatusOr<http::Reply> {
                               EXPECT_EQ(r.url, "http://h:1/computeMetadata/v1/instance/preempted");
                               EXPECT_EQ(r.headers.at("Metadata-Flavor"), "Google");
                               return reply;
                             });
  EXPECT_FALSE(source->Poll().ok());
  reply.headers["metadata-flavor"] = "Google";
  EXPECT_EQ(source->Poll()->kind, NoticeKind::kNone);
  reply.body = "TRUE";
  EXPECT_EQ(source->Poll()->left, absl::Seconds(120));
}

TEST(NoticeSource, AzureLearnsItsNameAndLeavesOthersAlone) {
  std::string resource = "other";
  const auto source = Source({.source = "azure"}, [&](const http::Request& r) -> absl::StatusOr<http::Reply> {
    EXPECT_EQ(r.headers.at("Metadata"), "true");
    if (absl::StrContains(r.url, "/instance/compute/name")) return Ok("vm-7\n");
    return Ok(absl::StrCat(R"({"Events":[{"EventId":"e","EventType":"Preempt","Resources":[")", resource,
                           R"("],"EventStatus":"Scheduled","NotBefore":"Mon, 18 Sep 2017 08:20:30 GMT"}]})"));
  });
  EXPECT_EQ(source->Poll()->kind, NoticeKind::kNone);
  resource = "vm-7";
  EXPECT_EQ(source->Poll()->left, absl::Seconds(30));
}

TEST(NoticeSource, FileAppearsAndGoes) {
  const std::string path = TestFolder() + "/notice";
  const auto source = *MakeNoticeSource({.source = absl::StrCat("file:", path)}, nullptr);
  EXPECT_EQ(source->Poll()->kind, NoticeKind::kNone);
  std::ofstream(path) << "90\n";
  EXPECT_EQ(source->Poll()->left, absl::Seconds(90));
  std::ofstream(path) << "soon";
  EXPECT_FALSE(source->Poll().ok());
  std::filesystem::remove(path);
  EXPECT_EQ(source->Poll()->kind, NoticeKind::kNone);
}

TEST(NoticeSource, UnknownOnesAreRefused) {
  EXPECT_FALSE(MakeNoticeSource({.source = "ibm"}, nullptr).ok());
  EXPECT_FALSE(MakeNoticeSource({.source = "file:"}, nullptr).ok());
}

TEST(NoticeSource, FirmwareNamesTheCloud) {
  const std::string dir = TestFolder();
  EXPECT_EQ(CloudOfFirmware(dir), "");
  std::ofstream(dir + "/sys_vendor") << "Amazon EC2\n";
  EXPECT_EQ(CloudOfFirmware(dir), "aws");
}

TEST(NoticeWatch, ErrorsAreNoNews) {
  class Flaky : public NoticeSource {
   public:
    absl::StatusOr<core::NodeNotice> Poll() override {
      if (++polls_ != 3) return absl::UnavailableError("no answer");
      return core::NodeNotice{.kind = NoticeKind::kLeave, .source = "test", .id = "1"};
    }
    int polls_ = 0;
  };
  NoticeWatch watch(std::make_unique<Flaky>(), absl::Milliseconds(5));
  std::optional<core::NodeNotice> news;
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!news && absl::Now() < deadline) {
    news = watch.Take();
    absl::SleepFor(absl::Milliseconds(5));
  }
  ASSERT_TRUE(news.has_value());
  EXPECT_EQ(news->kind, NoticeKind::kLeave);
  EXPECT_FALSE(watch.Take().has_value());
}

// Says what the test wants it to say now.
class Told : public NoticeSource {
 public:
  explicit Told(absl::StatusOr<core::NodeNotice> says) : says_(std::move(says)) {}
  absl::StatusOr<core::NodeNotice> Poll() override {
    MutexLock lock(&mutex_);
    ++polls_;
    return says_;
  }
  void Say(absl::StatusOr<core::NodeNotice> says) {
    MutexLock lock(&mutex_);
    says_ = std::move(says);
    polls_ = 0;
  }
  void AwaitPolls(int count) {
    MutexLock lock(&mutex_);
    const auto polled = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return polls_ >= count; };
    ASSERT_TRUE(mutex_.AwaitFor(absl::Seconds(60), polled));
  }

 private:
  Mutex mutex_;
  absl::StatusOr<core::NodeNotice> says_ ABSL_GUARDED_BY(mutex_);
  int polls_ ABSL_GUARDED_BY(mutex_) = 0;
};

std::optional<core::NodeNotice> News(NoticeWatch& watch) {
  std::optional<core::NodeNotice> news;
  EXPECT_TRUE(Until([&] {
    news = watch.Take();
    return news.has_value();
  }));
  return news;
}

TEST(NoticeWatch, ACloudThatIsNotHeardIsSaidOnceAndEndsWithItsNextAnswer_B12) {
  auto owned = std::make_unique<Told>(core::NodeNotice());
  Told& cloud = *owned;
  NoticeWatch watch(std::move(owned), absl::Milliseconds(1), {.later = absl::Milliseconds(20)});
  EXPECT_EQ(News(watch)->kind, NoticeKind::kNone);
  cloud.Say(absl::InvalidArgumentError("HTTP 200, not the JSON expected: \"<html>\x1b[2J\n\""));
  const auto alarm = News(watch);
  ASSERT_TRUE(alarm.has_value());
  EXPECT_TRUE(core::IsNotHeard(*alarm));
  EXPECT_EQ(alarm->source,
            "notices of its cloud are not heard: HTTP 200, not the JSON expected: \"<html> [2J \"");
  cloud.Say(absl::UnavailableError(std::string(100'000, 'x')));
  cloud.AwaitPolls(50);
  EXPECT_FALSE(watch.Take().has_value()) << "each of its words would be a record of the head";
  cloud.Say(core::NodeNotice());
  EXPECT_EQ(News(watch)->kind, NoticeKind::kNone);
  cloud.Say(absl::UnavailableError(std::string(100'000, 'x')));
  EXPECT_LT(News(watch)->source.size(), 400u);
}

TEST(NoticeWatch, ACloudThatIsNotHeardTakesBackNoNotice_B12) {
  for (const NoticeKind kind : {NoticeKind::kAtRisk, NoticeKind::kFreeze, NoticeKind::kLeave}) {
    auto owned = std::make_unique<Told>(core::NodeNotice{.kind = kind, .source = "cloud", .id = "1"});
    Told& cloud = *owned;
    NoticeWatch watch(std::move(owned), absl::Milliseconds(1), {.later = absl::ZeroDuration()});
    EXPECT_EQ(News(watch)->kind, kind);
    cloud.Say(absl::UnavailableError("no answer"));
    cloud.AwaitPolls(10);
    EXPECT_FALSE(watch.Take().has_value()) << core::Name(kind);
  }
}

// The service of Azure begins to work with the first request.
TEST(NoticeWatch, TheFirstAnswerMayTakeLonger) {
  auto owned = std::make_unique<Told>(absl::UnavailableError("no answer"));
  Told& cloud = *owned;
  NoticeWatch watch(std::move(owned), absl::Milliseconds(1), {.later = absl::ZeroDuration()});
  cloud.AwaitPolls(10);
  EXPECT_FALSE(watch.Take().has_value());
  cloud.Say(core::NodeNotice());
  EXPECT_EQ(News(watch)->kind, NoticeKind::kNone);
  cloud.Say(absl::UnavailableError("no answer"));
  EXPECT_TRUE(core::IsNotHeard(*News(watch)));
  NoticeWatch never(std::make_unique<Told>(absl::UnavailableError("no answer")), absl::Milliseconds(1),
                    {.first = absl::Milliseconds(20)});
  EXPECT_TRUE(core::IsNotHeard(*News(never)));
}

}  // namespace
}  // namespace gtrain::agent
