#include "runtime/core/values/request_pacer.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace gtrain::core {
namespace {

constexpr absl::Duration kTimeout = absl::Minutes(2);

// H15: a lost reply is asked for again, less and less often.
TEST(RequestPacer, RepeatsAfterSilenceThatDoubles) {
  Rng rng(1);
  RequestPacer pacer({"id", kTimeout, ClientNodes{}}, Instant{}, kTimeout);
  Instant now;
  absl::Duration before;
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(pacer.Due(true, now));
    pacer.Sent(true, now, rng);
    EXPECT_FALSE(pacer.Due(true, now));
    const Instant sent = now;
    while (!pacer.Due(true, now)) now = now + absl::Milliseconds(100);
    EXPECT_GE(now - sent, absl::Seconds(4));
    EXPECT_GE(now - sent, before * 0.9);
    before = now - sent;
  }
  EXPECT_FALSE(pacer.Over(Instant{} + absl::Minutes(1)));
  EXPECT_TRUE(pacer.Over(Instant{} + kTimeout));
}

TEST(RequestPacer, SendsAtOnceOnANewConnection) {
  Rng rng(1);
  RequestPacer pacer({"id", kTimeout, ClientNodes{}}, Instant{}, kTimeout);
  ASSERT_TRUE(pacer.Due(true, Instant{}));
  pacer.Sent(true, Instant{}, rng);
  const Instant soon = Instant{} + absl::Milliseconds(10);
  EXPECT_FALSE(pacer.Due(true, soon));
  EXPECT_FALSE(pacer.Due(false, soon));
  EXPECT_TRUE(pacer.Due(true, soon));
}

// Many who were refused in the same moment do not come back in one.
TEST(RequestPacer, ARefusalIsWaitedOutLongerEachTime) {
  Rng rng(1);
  RequestPacer pacer({"id", kTimeout, ClientNodes{}}, Instant{}, kTimeout);
  Instant now;
  absl::Duration least = absl::Milliseconds(100);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(pacer.Due(true, now));
    pacer.Sent(true, now, rng);
    pacer.Refused(now, rng);
    EXPECT_FALSE(pacer.Due(true, now + least - absl::Nanoseconds(1))) << i;
    EXPECT_TRUE(pacer.Due(true, now + 2 * least)) << i;
    now = now + 2 * least;
    least = std::min(2 * least, absl::Seconds(1));
  }
  ASSERT_TRUE(pacer.Due(true, now));
  pacer.Sent(true, now, rng);
  EXPECT_TRUE(pacer.Due(true, now + absl::Seconds(8))) << "the head had heard all the others";

  Rng other_rng(2);
  RequestPacer other({"id", kTimeout, ClientNodes{}}, Instant{}, kTimeout), one = other;
  other.Refused(Instant{}, other_rng);
  one.Refused(Instant{}, rng);
  Instant at;
  while (!other.Due(true, at) && !one.Due(true, at)) at = at + absl::Microseconds(1);
  EXPECT_NE(other.Due(true, at), one.Due(true, at));
}

TEST(RequestPacer, ALongPollIsGivenItsWait) {
  Rng rng(1);
  RequestPacer pacer({"id", kTimeout, ClientEvents{JobId("j"), 0, absl::Seconds(30)}}, Instant{}, kTimeout);
  ASSERT_TRUE(pacer.Due(true, Instant{}));
  pacer.Sent(true, Instant{}, rng);
  EXPECT_FALSE(pacer.Due(true, Instant{} + absl::Seconds(33)));
}

}  // namespace
}  // namespace gtrain::core
