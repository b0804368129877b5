#include "runtime/core/head/failure_detector.h"

#include <gtest/gtest.h>

#include <string>

#include "base/rng.h"

namespace gtrain::core {
namespace {

using Level = FailureDetector::Level;

Instant At(double seconds) { return Instant{} + absl::Seconds(1000 + seconds); }

// Ticks each half second, as NextDeadline asks for at least once an interval.
std::vector<FailureDetector::Change> RunUntil(FailureDetector& detector, double from, double to) {
  std::vector<FailureDetector::Change> all;
  for (double t = from; t <= to; t += 0.5) {
    EXPECT_FALSE(detector.Awake(At(t)));
    for (const auto& change : detector.Advance(At(t))) all.push_back(change);
  }
  return all;
}

TEST(FailureDetector, SuspectAtThreeDeadAtTenSeconds_N1) {
  FailureDetector detector({});
  const NodeId node("n");
  detector.Heard(node, At(0));
  EXPECT_TRUE(RunUntil(detector, 0, 2.5).empty());
  auto changes = RunUntil(detector, 3, 9.5);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].to, Level::kSuspect);
  changes = RunUntil(detector, 10, 12);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].to, Level::kDead);
}

TEST(FailureDetector, HeartbeatClearsSuspicionButDeathStaysUntilHeard) {
  FailureDetector detector({});
  const NodeId node("n");
  detector.Heard(node, At(0));
  RunUntil(detector, 0, 4);
  detector.Heard(node, At(4));
  EXPECT_TRUE(RunUntil(detector, 4, 6.5).empty());
  RunUntil(detector, 7, 20);
  EXPECT_FALSE(detector.NextDeadline().has_value()) << "nothing left to wait for";
}

TEST(FailureDetector, SparedNodeIsReportedAgain_P4) {
  FailureDetector detector({});
  const NodeId node("n");
  detector.Heard(node, At(0));
  ASSERT_EQ(RunUntil(detector, 0, 10).back().to, Level::kDead);
  detector.Spare(node, At(12));
  EXPECT_TRUE(RunUntil(detector, 10.5, 11.5).empty());
  EXPECT_EQ(detector.NextDeadline(), At(12));
  ASSERT_EQ(RunUntil(detector, 12, 13).size(), 1u);
}

TEST(FailureDetector, OwnPauseKillsNobody_H12) {
  FailureDetector detector({});
  const NodeId node("n");
  detector.Heard(node, At(0));
  RunUntil(detector, 0, 1);
  EXPECT_TRUE(detector.Awake(At(31)));
  EXPECT_TRUE(detector.Advance(At(31)).empty());
  // The node stays silent after the pause: it is dead on time counted from the pause.
  const auto changes = RunUntil(detector, 31, 45);
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[1].to, Level::kDead);
}

// Pauses too short to be called so add up as well.
TEST(FailureDetector, ShortPausesAreNobodysSilence_H12) {
  FailureDetector detector({});
  detector.Heard(NodeId("n"), At(0));
  detector.Awake(At(0));
  for (double t = 1.9; t < 17; t += 1.9) {  // eight gaps, each 0.9 s too long: 8 s of silence
    EXPECT_FALSE(detector.Awake(At(t)));
    for (const auto& change : detector.Advance(At(t))) EXPECT_EQ(change.to, Level::kSuspect) << t;
  }
}

TEST(FailureDetector, AsksForATickEveryIntervalWhileItWatches) {
  FailureDetector detector({});
  EXPECT_FALSE(detector.NextDeadline().has_value());
  detector.Awake(At(0));
  detector.Heard(NodeId("n"), At(0));
  EXPECT_EQ(*detector.NextDeadline(), At(1));
}

TEST(FailureDetector, RejoinWindowIsLongerPatience_W13) {
  FailureDetector detector({});
  detector.Awake(At(0));
  detector.Expect(NodeId("n"), At(0), absl::Seconds(10));
  const auto changes = RunUntil(detector, 0.5, 19.5);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].to, Level::kSuspect);
  EXPECT_EQ(RunUntil(detector, 20, 20).size(), 1u);
}

TEST(FailureDetector, WhoWasHeardKeepsTheLongerFirstPatience_W13) {
  FailureDetector detector({});
  detector.Awake(At(0));
  detector.Expect(NodeId("n"), At(0), absl::Seconds(10));
  (void)RunUntil(detector, 0.5, 1);
  detector.Heard(NodeId("n"), At(1));  // its hello; what it says behind that waits among those of all others
  for (const auto& change : RunUntil(detector, 1.5, 19.5))
    EXPECT_NE(change.to, FailureDetector::Level::kDead);
  EXPECT_EQ(RunUntil(detector, 20, 20).size(), 1u);
}

TEST(FailureDetector, LostConnectionIsSuspicionAtOnce) {
  FailureDetector detector({});
  detector.Awake(At(0));
  detector.Heard(NodeId("n"), At(0));
  const auto change = detector.Suspect(NodeId("n"), At(0.5));
  ASSERT_TRUE(change.has_value());
  EXPECT_EQ(change->to, Level::kSuspect);
  EXPECT_FALSE(detector.Suspect(NodeId("n"), At(0.6)).has_value()) << "it is already";
  EXPECT_FALSE(detector.Suspect(NodeId("other"), At(0.6)).has_value());
  EXPECT_EQ(RunUntil(detector, 0.5, 7.4).size(), 0u);
  EXPECT_EQ(RunUntil(detector, 7.5, 7.5).size(), 1u) << "dead in its time, though nobody is looked at before";
}

// Nobody is looked at before the first one's time has come, whatever made that time earlier or later.
TEST(FailureDetector, NoLookAtAllOfThemMissesOne) {
  Rng rng(11);
  FailureDetector detector({});
  for (double at = 0; at < 200; at += 0.25) {
    const NodeId node(std::to_string(rng.Below(5)));
    detector.Awake(At(at));
    switch (rng.Below(6)) {
      case 0:
        detector.Patience(node, absl::Seconds(rng.Below(3)));
        break;
      case 1:
        (void)detector.Suspect(node, At(at));
        break;
      case 2:
        detector.Forget(node);
        break;
      case 3:
        detector.Expect(node, At(at), absl::Seconds(rng.Below(4)));
        break;
      default:
        detector.Heard(node, At(at));
    }
    const auto next = detector.NextDeadline();
    // A copy that has forgotten when the first one is due looks at all of them.
    FailureDetector fresh = detector;
    fresh.Forget(NodeId("nobody"));
    const auto changes = detector.Advance(At(at)), all = fresh.Advance(At(at));
    ASSERT_EQ(changes.size(), all.size()) << at;
    EXPECT_TRUE(changes.empty() || (next && *next <= At(at)));
  }
}

}  // namespace
}  // namespace gtrain::core
