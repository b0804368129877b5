#include "comm/ucx/link_probe.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace gtrain::comm {
namespace {

constexpr absl::Duration kReal = absl::Seconds(60);

// Looks until it is known; the probe's own time stands still, so that only an answer ends it.
std::string Outcome(LinkProbe& probe, Instant now) {
  const Instant end = RealClock().Now() + kReal;
  while (RealClock().Now() < end) {
    if (const auto came = probe.Look(now)) return *came;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return "nothing in time";
}

// Looks once a virtual second.
std::string GivenUp(LinkProbe& probe, Instant now) {
  for (int second = 0; second < 60; ++second) {
    if (const auto came = probe.Look(now)) return *came;
    absl::SleepFor(absl::Milliseconds(10));
    now = now + absl::Seconds(1);
  }
  return "never";
}

TEST(LinkProbe, WorksThoughNobodyReads_W5) {
  const LinkTarget target("127.0.0.1");
  ASSERT_NE(target.where(), "");
  const Instant now{1};
  for (int i = 0; i < 100; ++i) {
    LinkProbe probe(target.where(), now);
    ASSERT_EQ(Outcome(probe, now), "") << i;
  }
}

TEST(LinkProbe, TargetForgetsWhatCame) {
  LinkTarget target("127.0.0.1");
  const Instant now{1};
  for (int i = 0; i < 2000; ++i) {  // more than its backlog
    LinkProbe probe(target.where(), now);
    ASSERT_EQ(Outcome(probe, now), "") << i;
    target.Tidy();
  }
}

TEST(LinkProbe, SaysHowItWasRefused_W5) {
  std::string where;
  {
    const LinkTarget gone("127.0.0.1");
    where = gone.where();
  }
  const Instant now{1};
  LinkProbe probe(where, now);
  EXPECT_EQ(GivenUp(probe, now), "no connection in 8s (Connection refused)");
  for (const char* nonsense : {"", "10.0.0.1", "10.0.0.1 0", "host 1", "10.0.0.1 1 2", "::1 99999"}) {
    LinkProbe bad(nonsense, now);
    EXPECT_NE(GivenUp(bad, now), "") << nonsense;
  }
}

TEST(LinkProbe, NoTargetWithoutTheAddress) {
  EXPECT_EQ(LinkTarget("192.0.2.1").where(), "");
  EXPECT_EQ(LinkTarget("a name").where(), "");
}

TEST(LinkWatch, NothingIsTriedInTheFirstSecondsAndBrokenWaysAreRepeated_W5) {
  std::string dead;
  {
    const LinkTarget gone("127.0.0.1");
    dead = gone.where();
  }
  const LinkTarget good("127.0.0.1");
  std::vector<int> reports;
  LinkWatch watch([&](int peer, const std::string&) { reports.push_back(peer); });
  watch.SetPeer(1, dead);
  watch.SetPeer(2, good.where());
  watch.SetPeer(3, "");  // cannot be tried
  Instant now{1};
  const auto pass = [&](int seconds, bool broken) {
    for (int i = 0; i < seconds * 10; ++i) {
      watch.Waiting({1, 2, 3, 4}, now, broken);
      now = now + absl::Milliseconds(100);
      absl::SleepFor(absl::Milliseconds(1));
    }
  };
  pass(4, false);
  watch.Done();  // the wait was over in time
  pass(12, false);
  EXPECT_TRUE(reports.empty());
  pass(20, false);
  EXPECT_EQ(reports, (std::vector<int>{1, 1}));
  watch.Done();
  reports.clear();
  pass(10, true);
  EXPECT_EQ(reports, std::vector<int>{1});
}

}  // namespace
}  // namespace gtrain::comm
