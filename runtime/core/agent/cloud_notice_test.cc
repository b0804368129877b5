// Faults B12 (HTML, 1 GB, wrong JSON, far-future and past times) and N11 (wrong wall clocks).
#include "runtime/core/agent/cloud_notice.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kDate[] = "Mon, 18 Sep 2017 08:20:30 GMT";

HttpReply Reply(std::string body, int status = 200, std::string date = kDate) {
  return {.status = status, .date = std::move(date), .flavor = "Google", .body = std::move(body)};
}

TEST(HttpDate, OneSpelling) {
  EXPECT_TRUE(ReadHttpDate(kDate).has_value());
  for (const char* bad : {"", "Tue, 18 Sep 2017 08:20:30 GMT", "Mon, 18 Sep 2017 08:20:30 UTC",
                          "2017-09-18T08:20:30Z", "Mon,  8 Sep 2017 08:20:30 GMT"}) {
    EXPECT_FALSE(ReadHttpDate(bad).has_value()) << bad;
  }
}

TEST(Aws, NoticeCountsFromTheServersClock_N11) {
  const auto notice = ReadAwsAction(Reply(R"({"action": "terminate", "time": "2017-09-18T08:22:00Z"})"));
  ASSERT_TRUE(notice.ok() && notice->has_value()) << notice.status();
  EXPECT_EQ((*notice)->kind, NoticeKind::kLeave);
  EXPECT_EQ((*notice)->left, absl::Seconds(90));
  EXPECT_EQ((*notice)->source, "aws spot interruption (terminate)");
}

TEST(Aws, NoNoticeAndHibernate) {
  EXPECT_EQ(*ReadAwsAction(Reply("not found", 404)), std::nullopt);
  EXPECT_EQ(*ReadAwsRebalance(Reply("", 404)), std::nullopt);
  EXPECT_EQ((*ReadAwsAction(Reply(R"({"action":"hibernate","time":"2017-09-18T08:22:00Z"})")))->left,
            absl::ZeroDuration());
  EXPECT_EQ((*ReadAwsRebalance(Reply(R"({"noticeTime": "2017-09-18T08:22:00Z"})")))->kind,
            NoticeKind::kAtRisk);
}

TEST(Aws, TimesAreClamped_B12) {
  const auto left = [](const char* time, std::string date = kDate) {
    const std::string body = std::string(R"({"action":"stop","time":")") + time + "\"}";
    return (*ReadAwsAction(Reply(body, 200, std::move(date))))->left;
  };
  EXPECT_EQ(left("2999-01-01T00:00:00Z"), absl::Seconds(120));
  EXPECT_EQ(left("1999-01-01T00:00:00Z"), absl::ZeroDuration());
  EXPECT_EQ(left("2017-09-18T08:22:00Z", ""), absl::ZeroDuration()) << "without a Date: now";
}

TEST(Aws, NothingElseIsANotice_B12) {
  for (const char* bad :
       {"", "<html>captive portal</html>", "{", "[]", "{}", R"({"action":"terminate"})",
        R"({"action":"dance","time":"2017-09-18T08:22:00Z"})", R"({"action":"stop","time":"soon"})",
        R"({"action":1,"time":"2017-09-18T08:22:00Z"})", "[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]"}) {
    EXPECT_FALSE(ReadAwsAction(Reply(bad)).ok()) << bad;
  }
  EXPECT_FALSE(ReadAwsAction(Reply("{}", 500)).ok());
  EXPECT_THAT(ReadAwsAction(Reply(std::string(1 << 20, ' '))).status().message(), HasSubstr("64 KiB"));
}

TEST(Gcp, OnlyGooglesWordsCount) {
  EXPECT_EQ(*ReadGcpPreempted(Reply("FALSE"), absl::ZeroDuration()), std::nullopt);
  EXPECT_EQ((*ReadGcpPreempted(Reply("TRUE\n"), absl::Seconds(120)))->left, absl::Seconds(120));
  EXPECT_FALSE(ReadGcpPreempted(Reply("true"), absl::ZeroDuration()).ok());
  EXPECT_FALSE(ReadGcpPreempted(Reply("", 404), absl::ZeroDuration()).ok());
  HttpReply portal = Reply("TRUE");
  portal.flavor = "";
  EXPECT_FALSE(ReadGcpPreempted(portal, absl::ZeroDuration()).ok());
}

std::string AzureEvent(const char* type, const char* status, const char* not_before, const char* who) {
  return std::string(R"({"EventId":"e-)") + type + R"(","EventType":")" + type + R"(","Resources":[")" + who +
         R"("],"EventStatus":")" + status + R"(","NotBefore":")" + not_before + R"(","DurationInSeconds":9})";
}

TEST(Azure, OwnEventsOnlyWorstFirst) {
  const std::string body = R"({"DocumentIncarnation":2,"Events":[)" +
                           AzureEvent("Freeze", "Scheduled", "Mon, 18 Sep 2017 08:20:35 GMT", "me") + "," +
                           AzureEvent("Preempt", "Scheduled", "Mon, 18 Sep 2017 08:21:00 GMT", "me") + "," +
                           AzureEvent("Reboot", "Started", "", "other") + "]}";
  const auto notices = ReadAzureEvents(Reply(body), "me");
  ASSERT_TRUE(notices.ok()) << notices.status();
  ASSERT_THAT(*notices, SizeIs(2));
  EXPECT_EQ((*notices)[0].source, "azure preempt");
  EXPECT_EQ((*notices)[0].left, absl::Seconds(30));
  EXPECT_EQ((*notices)[1].kind, NoticeKind::kFreeze);
  EXPECT_EQ((*notices)[1].frozen, absl::Seconds(9));
  EXPECT_THAT(*ReadAzureEvents(Reply(R"({"DocumentIncarnation":1,"Events":[]})"), "me"), IsEmpty());
}

TEST(Azure, StartedMeansNowAndStrangeEventsAreErrors_B12) {
  const auto one = [](const std::string& event) {
    return ReadAzureEvents(Reply(R"({"Events":[)" + event + "]}"), "me");
  };
  EXPECT_EQ((*one(AzureEvent("Terminate", "Started", "", "me")))[0].left, absl::ZeroDuration());
  EXPECT_FALSE(one(AzureEvent("Explode", "Started", "", "me")).ok());
  EXPECT_FALSE(one(AzureEvent("Reboot", "Scheduled", "", "me")).ok());
  EXPECT_FALSE(one("7").ok());
  EXPECT_FALSE(ReadAzureEvents(Reply("{}"), "me").ok());
}

}  // namespace
}  // namespace gtrain::core
