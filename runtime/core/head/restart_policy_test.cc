#include "runtime/core/head/restart_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "absl/strings/str_cat.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;

class RestartPolicyTest : public ::testing::Test {
 protected:
  FaultRecord& Add(FaultKind kind, double at_seconds, std::string signature = "",
                   std::optional<int64_t> step = {}) {
    FaultRecord fault;
    fault.kind = kind;
    fault.signature = std::move(signature);
    fault.step = step;
    fault.progressed = step.has_value();
    fault.cause = kind == FaultKind::kOom ? ExitCause::kOom : ExitCause::kSignal;
    faults_.push_back(fault);
    times_.push_back(Instant{} + absl::Seconds(at_seconds));
    return faults_.back();
  }
  RestartVerdict Decide() {
    std::vector<PastFault> past;
    for (size_t i = 0; i < faults_.size(); ++i) past.push_back({&faults_[i], times_[i]});
    return DecideRestart(budget_, past, times_.back(), rng_);
  }

  spec::RestartBudget budget_;
  std::deque<FaultRecord> faults_;
  std::vector<Instant> times_;
  Rng rng_{1};
};

TEST_F(RestartPolicyTest, FirstCrashWithProgressRestartsAtOnce) {
  Add(FaultKind::kCrash, 0, "a", 10);
  const RestartVerdict v = Decide();
  EXPECT_TRUE(v.restart);
  EXPECT_EQ(v.delay, absl::ZeroDuration());
  EXPECT_EQ(v.reason, "crash 1 of 10 in 1h");
}

TEST_F(RestartPolicyTest, BudgetSlidesWithTheWindow) {
  budget_.budget = 2;
  for (int i = 0; i < 3; ++i) Add(FaultKind::kCrash, i, absl::StrCat("e", i), i);
  EXPECT_FALSE(Decide().restart);
  EXPECT_THAT(Decide().reason, HasSubstr("restart budget spent: crash 3 in 1h, allowed 2"));
  Add(FaultKind::kCrash, 2 * 3600, "later", 100);
  EXPECT_TRUE(Decide().restart) << "the old ones left the window";
}

TEST_F(RestartPolicyTest, OomHasItsOwnBudget_P2) {
  Add(FaultKind::kCrash, 0, "a", 1);
  Add(FaultKind::kOom, 1, "oom", 2);
  EXPECT_TRUE(Decide().restart);
  Add(FaultKind::kOom, 2, "oom2", 3);
  EXPECT_THAT(Decide().reason, HasSubstr("out-of-memory kill 2 in 1h, allowed 1"));
}

TEST_F(RestartPolicyTest, NodeLossesAreNotTheProgramsFault) {
  Add(FaultKind::kInfrastructure, 0);
  EXPECT_EQ(Decide().delay, absl::ZeroDuration());
  for (int i = 1; i < 15; ++i) Add(FaultKind::kInfrastructure, i);
  EXPECT_TRUE(Decide().restart);
  EXPECT_GT(Decide().delay, absl::Seconds(30))
      << "a flapping node is not re-formed in a busy loop (fault N5)";
}

TEST_F(RestartPolicyTest, KeeperThatCannotBeStartedIsFinalSoon) {
  for (int i = 0; i < 2; ++i) Add(FaultKind::kInfrastructure, i, "lost 0 0 no such file");
  EXPECT_TRUE(Decide().restart);
  Add(FaultKind::kInfrastructure, 2, "lost 0 0 no such file");
  EXPECT_FALSE(Decide().restart);
  EXPECT_THAT(Decide().reason, HasSubstr("the same loss 3 times"));
}

TEST_F(RestartPolicyTest, Exit75IsNeverChargedExit93NeverRestarted) {
  budget_.budget = 0;
  for (int i = 0; i < 12; ++i) Add(FaultKind::kSaved, i, "", i);
  EXPECT_TRUE(Decide().restart);
  FaultRecord& last = Add(FaultKind::kCrash, 20, "", 30);
  last.cause = ExitCause::kExited;
  last.exit_code = kExitNoRestart;
  EXPECT_FALSE(Decide().restart);
  EXPECT_THAT(Decide().reason, HasSubstr("93"));
}

TEST_F(RestartPolicyTest, WhatIsMissingIsNotTriedAgain) {
  constexpr char kTail[] =
      "Traceback (most recent call last):\n  File \"t.py\", line 1, in <module>\n    import flask\n"
      "ModuleNotFoundError: No module named 'flask'\n\nDuring handling of the above exception, another "
      "exception "
      "occurred:\n\nTraceback (most recent call last):\n  File \"t.py\", line 3\n";
  const auto crash = [&](ExitCause cause, int code, std::string tail) -> FaultRecord& {
    faults_.clear();
    times_.clear();
    FaultRecord& fault = Add(FaultKind::kCrash, 0, "one");
    fault.cause = cause;
    fault.exit_code = code;
    fault.tail = std::move(tail);
    return fault;
  };
  for (const ExitCause cause : {ExitCause::kStartFailed, ExitCause::kExited}) {
    crash(cause, kExitNotFound, "");
    EXPECT_FALSE(Decide().restart);
    EXPECT_EQ(Decide().reason, "a command that was not found is not tried again");
  }
  crash(ExitCause::kStartFailed, 126, "");
  EXPECT_TRUE(Decide().restart) << "found, and perhaps only busy";
  for (const char* end : {"ModuleNotFoundError: No module named 'torch'\n",
                          "ImportError: libcuda.so.1: cannot open shared object file\nsee the manual\n"}) {
    FaultRecord& fault = crash(ExitCause::kExited, 1, absl::StrCat(kTail, end));
    EXPECT_FALSE(Decide().restart);
    EXPECT_THAT(Decide().reason, HasSubstr("a failed import is not tried again"));
    fault.committed = 3;
    EXPECT_TRUE(Decide().restart) << "it was there before";
    fault.committed.reset();
    fault.cause = ExitCause::kSignal;
    EXPECT_TRUE(Decide().restart);
  }
  for (const char* end : {"RuntimeError: no module named that\n", ""}) {
    crash(ExitCause::kExited, 1, absl::StrCat(kTail, end));
    EXPECT_TRUE(Decide().restart) << end << "another error came after that import";
  }
}

TEST_F(RestartPolicyTest, FreeRestartsAreNotEndless) {
  for (int i = 0; i <= kFreeRestartsInARow; ++i) Add(FaultKind::kAddressInUse, i);
  EXPECT_FALSE(Decide().restart);
}

TEST_F(RestartPolicyTest, StorageFaultsAreChargedToNothingAndNeverFinal_S7) {
  budget_.budget = budget_.oom = budget_.before_first_step = 0;
  FaultRecord& fault = Add(FaultKind::kStorage, 0, "the same");
  absl::Duration before;
  for (fault.tries = 1; fault.tries < 1000; ++fault.tries) {
    const RestartVerdict v = Decide();
    ASSERT_TRUE(v.restart) << fault.tries;
    EXPECT_LE(v.delay, kBackoffMax);
    EXPECT_GE(v.delay, fault.tries > 6 ? absl::Seconds(45) : before) << fault.tries;
    before = v.delay;
  }
  EXPECT_FALSE(Charged(FaultKind::kStorage));
  faults_.clear();
  times_.clear();
  for (int i = 0; i < 100; ++i) Add(FaultKind::kStorage, i, "the same");
  Add(FaultKind::kSaved, 101);
  EXPECT_TRUE(Decide().restart) << "nor do they use up what is free";
}

TEST_F(RestartPolicyTest, WhatIsAStorageFault_S7) {
  RankExit exit;
  exit.storage = "EIO";
  EXPECT_FALSE(MetStorageFault(exit)) << "it ended well";
  for (const int code : {1, 75, 2}) {
    exit.exit_code = code;
    EXPECT_EQ(KindOf(exit), FaultKind::kStorage) << code;
  }
  exit.exit_code = 93;
  EXPECT_EQ(KindOf(exit), FaultKind::kCrash);
  exit.cause = ExitCause::kSignal;
  EXPECT_EQ(KindOf(exit), FaultKind::kStorage);
  exit.cause = ExitCause::kLost;
  EXPECT_EQ(KindOf(exit), FaultKind::kInfrastructure) << "its keeper's end is no word of the storage";
  exit.cause = ExitCause::kSignal;
  exit.storage.clear();
  EXPECT_EQ(KindOf(exit), FaultKind::kCrash);
}

TEST_F(RestartPolicyTest, SameErrorTwiceWithoutProgressIsFinal) {
  Add(FaultKind::kCrash, 0, "exited 1 0 ValueError", 100);
  Add(FaultKind::kCrash, 9, "exited 1 0 ValueError", 100);
  EXPECT_FALSE(Decide().restart);
  EXPECT_THAT(Decide().reason, HasSubstr("the same error twice without progress"));
  faults_.back().step = 101;
  EXPECT_TRUE(Decide().restart) << "it got further";
}

TEST_F(RestartPolicyTest, CrashesBeforeTheFirstStep) {
  Add(FaultKind::kCrash, 0, "a");
  EXPECT_TRUE(Decide().restart);
  EXPECT_GT(Decide().delay, absl::ZeroDuration());
  Add(FaultKind::kCrash, 1, "b");
  EXPECT_THAT(Decide().reason, HasSubstr("2 crashes in a row before a first step, allowed 1"));
}

TEST_F(RestartPolicyTest, BackoffGrowsToItsCapWithJitter) {
  budget_.budget = 100;
  for (int i = 0; i < 3; ++i) Add(FaultKind::kCrash, i, absl::StrCat("e", i), i);
  EXPECT_GE(Decide().delay, absl::Seconds(3));
  EXPECT_LE(Decide().delay, absl::Seconds(5));
  EXPECT_NE(Decide().delay, Decide().delay) << "jobs felled by one cause return in step (W13)";
  for (int i = 3; i < 30; ++i) Add(FaultKind::kCrash, i, absl::StrCat("e", i), i);
  EXPECT_LE(Decide().delay, 1.25 * kBackoffMax);
}

TEST_F(RestartPolicyTest, ProgressPaysDebts) {
  budget_.budget = 2;
  budget_.before_first_step = 0;
  for (int i = 0; i < 31; ++i) {
    Add(FaultKind::kCrash, 2 * i, "", i).committed = i;
    const RestartVerdict v = Decide();
    ASSERT_TRUE(v.restart) << i << ": " << v.reason;
    ASSERT_EQ(v.delay, absl::ZeroDuration()) << i;
    ASSERT_EQ(v.reason, "crash 1 of 2 in 1h");
  }
  // The same step again, or a lower one of a job that was sent back, is no progress.
  Add(FaultKind::kCrash, 70, "", 31).committed = 30;
  EXPECT_EQ(Decide().reason, "crash 2 of 2 in 1h");
  EXPECT_GT(Decide().delay, absl::ZeroDuration());
  Add(FaultKind::kCrash, 72, "", 32).committed = 12;
  EXPECT_THAT(Decide().reason, HasSubstr("restart budget spent: crash 3 in 1h, allowed 2"));
  faults_.back().committed = 31;
  EXPECT_TRUE(Decide().restart);
  budget_.budget = 0;
  EXPECT_FALSE(Decide().restart) << "what asks for no restart gets none";
}

TEST_F(RestartPolicyTest, ProgressPaysForMemoryLossesAndWhatIsFreeToo) {
  for (int i = 0; i < 30; ++i)
    Add(i % 3 == 0 ? FaultKind::kOom : FaultKind::kInfrastructure, i).committed = i;
  EXPECT_TRUE(Decide().restart);
  EXPECT_EQ(Decide().delay, absl::ZeroDuration());
  const auto preempt = [&](int at, int64_t committed) {
    FaultRecord& fault = Add(FaultKind::kPreempted, at);
    fault.node = NodeId("leaves");
    fault.committed = committed;
  };
  for (int i = 0; i <= kFreeRestartsInARow; ++i) preempt(40 + i, 40 + i);
  EXPECT_TRUE(Decide().restart);
  for (int i = 0; i < kFreeRestartsInARow; ++i) preempt(70 + i, 60);
  EXPECT_FALSE(Decide().restart);
}

TEST_F(RestartPolicyTest, WhatAPersonAsksForWaitsForNothingHoweverOften) {
  for (int i = 0; i < 2 * kFreeRestartsInARow; ++i) {
    Add(FaultKind::kPreempted, i);
    ASSERT_TRUE(Decide().restart) << i;
    ASSERT_EQ(Decide().delay, absl::ZeroDuration()) << i;
  }
  Add(FaultKind::kAddressInUse, 100);
  EXPECT_TRUE(Decide().restart);
  EXPECT_LT(Decide().delay, absl::Seconds(1)) << "and it is no loop of something else";
}

TEST_F(RestartPolicyTest, SavedMoreThanAtTheExit75Before) {
  std::vector<FaultRecord> faults(1);
  faults[0].exit_code = kExitSaved;
  EXPECT_FALSE(SavedMore(faults)) << "nothing was ever committed";
  faults[0].committed = 5;
  EXPECT_TRUE(SavedMore(faults));
  faults.push_back(faults[0]);
  EXPECT_FALSE(SavedMore(faults));
  faults[1].committed = 6;
  EXPECT_TRUE(SavedMore(faults));
  faults.insert(faults.begin() + 1, FaultRecord{.exit_code = 1, .committed = 6});
  EXPECT_TRUE(SavedMore(faults)) << "a crash between them takes nothing away";
}

TEST(Signature, FoldsNumbersAndIgnoresForeignKills) {
  RankExit a;
  a.exit_code = 1;
  a.tail = "Traceback\nValueError: bad batch 17\n";
  RankExit b = a;
  b.tail = "Traceback\nValueError: bad batch 23\n\n";
  EXPECT_EQ(SignatureOf(a), SignatureOf(b));
  a.cause = ExitCause::kSignal;
  a.signal = 9;
  EXPECT_EQ(SignatureOf(a), "");
  EXPECT_EQ(DescribeExit(a), "killed by signal 9 (KILL)");
}

}  // namespace
}  // namespace gtrain::core
