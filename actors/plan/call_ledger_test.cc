#include "actors/plan/call_ledger.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "actors/plan/call_window.h"
#include "base/rng.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr CallerId kA{1, 1}, kB{1, 2};

TEST(CallLedger, ACallRunsOnceHoweverOftenItIsSent) {
  CallLedger ledger(10);
  EXPECT_EQ(ledger.Offer(kA, 1, 0).what, Admission::kRun);
  EXPECT_EQ(ledger.Offer(kA, 1, 0).what, Admission::kBegun);
  EXPECT_TRUE(ledger.Answer(kA, 1, "one"));
  EXPECT_FALSE(ledger.Answer(kA, 1, "again"));
  const Admitted again = ledger.Offer(kA, 1, 0);
  ASSERT_EQ(again.what, Admission::kAnswered);
  EXPECT_EQ(*again.answer, "one");
  EXPECT_EQ(ledger.Offer(kB, 1, 0).what, Admission::kRun) << "another caller has numbers of its own";
}

TEST(CallLedger, CallsOfACallerRunInTheirOrder) {
  CallLedger ledger(10);
  const Admitted early = ledger.Offer(kA, 2, 0);
  EXPECT_EQ(early.what, Admission::kNotYet);
  EXPECT_EQ(early.next, 1u);
  EXPECT_EQ(ledger.OfferRepeatable(kA, 1), Admission::kNotYet);
  EXPECT_EQ(ledger.OfferRepeatable(kB, 0), Admission::kRun);
  EXPECT_EQ(ledger.Offer(kA, 1, 0).what, Admission::kRun);
  EXPECT_EQ(ledger.OfferRepeatable(kA, 1), Admission::kRun);
  EXPECT_EQ(ledger.Offer(kA, 2, 0).what, Admission::kRun) << "it need not wait for the answer of the first";
}

TEST(CallLedger, WhatIsAcknowledgedIsForgottenAndNeverRunsAgain) {
  CallLedger ledger(10);
  for (uint64_t number = 1; number <= 5; ++number) {
    EXPECT_EQ(ledger.Offer(kA, number, 0).what, Admission::kRun);
    ledger.Answer(kA, number, absl::StrCat(number));
  }
  EXPECT_EQ(ledger.answers(), 5u);
  EXPECT_EQ(ledger.Offer(kA, 6, 4).what, Admission::kRun);
  EXPECT_EQ(ledger.answers(), 1u);
  EXPECT_EQ(ledger.Offer(kA, 3, 0).what, Admission::kTooOld) << "an old message, which was late";
  EXPECT_EQ(ledger.Offer(kA, 5, 0).what, Admission::kAnswered);
}

TEST(CallLedger, WhatHasNoRoomIsAsIfItHadNotCome) {
  CallLedger ledger(10);
  EXPECT_EQ(ledger.Offer(kA, 1, 0).what, Admission::kRun);
  EXPECT_EQ(ledger.Offer(kA, 2, 0).what, Admission::kRun);
  ledger.Withdraw(kA, 2);
  const Admitted behind = ledger.Offer(kA, 3, 0);
  EXPECT_EQ(behind.what, Admission::kNotYet);
  EXPECT_EQ(behind.next, 2u);
  EXPECT_FALSE(ledger.Answer(kA, 2, "")) << "it has not run";
  EXPECT_EQ(ledger.Offer(kA, 2, 0).what, Admission::kRun);
  EXPECT_EQ(ledger.Offer(kA, 3, 0).what, Admission::kRun);
  ledger.Withdraw(kB, 1);  // nobody: nothing
}

// B1, I1
TEST(CallLedger, WhoBreaksTheRulesIsRefusedAndCostsNothing) {
  CallLedger ledger(2);
  EXPECT_EQ(ledger.Offer(kA, 0, 0).what, Admission::kRefused);
  EXPECT_EQ(ledger.Offer(kA, kCallsInWindow + 1, 0).what, Admission::kRefused);
  EXPECT_EQ(ledger.Offer(kA, 1, ~uint64_t{0}).what, Admission::kRun) << "it acknowledges what nobody sent";
  for (uint64_t number = 2; number <= kCallsInWindow; ++number)
    EXPECT_EQ(ledger.Offer(kA, number, 0).what, Admission::kRun);
  EXPECT_EQ(ledger.Offer(kA, kCallsInWindow + 1, 0).what, Admission::kRefused);
  EXPECT_EQ(ledger.Offer(kB, 1, 0).what, Admission::kRun);
  EXPECT_EQ(ledger.Offer({3, 3}, 1, 0).what, Admission::kRefused) << "two callers are the most";
  ledger.Forget(kB);
  EXPECT_EQ(ledger.Offer({3, 3}, 1, 0).what, Admission::kRun);
}

TEST(CallLedger, WhatHadBegunWhenItsRecordsWereTakenRunsAgain) {
  CallLedger before(10);
  for (uint64_t number = 1; number <= 4; ++number) before.Offer(kA, number, 0);
  before.Answer(kA, 1, "one");
  before.Answer(kA, 3, "three");
  const std::vector<CallerRecord> records = before.Records();
  CallLedger after(10, records);
  EXPECT_EQ(after.Records(), records);
  EXPECT_EQ(after.answers(), 2u);
  EXPECT_EQ(after.Offer(kA, 1, 0).what, Admission::kAnswered);
  EXPECT_EQ(after.Offer(kA, 4, 0).what, Admission::kNotYet);
  EXPECT_EQ(after.Offer(kA, 2, 1).what, Admission::kRun);
  EXPECT_EQ(*after.Offer(kA, 3, 1).answer, "three");
  EXPECT_EQ(after.Offer(kA, 4, 1).what, Admission::kRun);
}

TEST(CallLedger, WhatChangedNothingMayBeMissingInItsRecords) {
  CallLedger before(10);
  before.Offer(kA, 1, 0);
  before.Answer(kA, 1, "one");
  CallLedger after(10, before.Records());
  // 2 and 3 changed nothing, so that nobody kept them; their caller has their answers.
  EXPECT_EQ(after.Offer(kA, 4, 3).what, Admission::kRun);
  EXPECT_EQ(after.Offer(kA, 3, 3).what, Admission::kTooOld);
}

TEST(CallLedger, WhatIsUndoneIsAnsweredAnew) {
  CallLedger ledger(10);
  ledger.Offer(kA, 1, 0);
  ledger.AnswerAnew(kA, 1, "undone");  // it has no answer yet
  EXPECT_EQ(ledger.Offer(kA, 1, 0).what, Admission::kBegun);
  ledger.Answer(kA, 1, "done");
  ledger.AnswerAnew(kA, 1, "undone");
  EXPECT_EQ(*ledger.Offer(kA, 1, 0).answer, "undone");
  EXPECT_EQ(ledger.answers(), 1u);
}

TEST(CallWindow, SendsTheOldestFirstAndAllAgainOnANewConnection) {
  CallWindow window;
  EXPECT_EQ(window.Add("a"), 1u);
  EXPECT_EQ(window.Add("b"), 2u);
  EXPECT_EQ(window.Next()->arguments, "a");
  EXPECT_TRUE(window.Answered(1));
  EXPECT_FALSE(window.Answered(1)) << "the answer came twice";
  const std::optional<CallToSend> second = window.Next();
  EXPECT_EQ(second->number, 2u);
  EXPECT_EQ(second->acknowledged, 1u);
  EXPECT_FALSE(window.Next());
  window.SendAgain();
  EXPECT_EQ(window.Next()->number, 2u);
  EXPECT_TRUE(window.GiveUp(2));
  EXPECT_FALSE(window.GiveUp(2));
  const std::optional<CallToSend> given_up = window.Next();
  EXPECT_TRUE(given_up->given_up) << "those behind it would wait for it";
  EXPECT_FALSE(window.Answered(2)) << "nobody awaits it";
  EXPECT_EQ(window.size(), 0u);
}

TEST(CallWindow, SendsSoManyAtATimeAndFromWhereItIsTold) {
  CallWindow window;
  for (const char* each : {"a", "b", "c"}) window.Add(each);
  EXPECT_EQ(window.Next(2)->number, 1u);
  EXPECT_EQ(window.Next(2)->number, 2u);
  EXPECT_FALSE(window.Next(2)) << "two are under way";
  EXPECT_TRUE(window.EverSent(2));
  EXPECT_FALSE(window.EverSent(3));
  window.SendAgain(2);
  EXPECT_EQ(window.Next(2)->number, 2u);
  window.Answered(1);
  EXPECT_EQ(window.Next(2)->number, 3u);
  window.SendAgain(4);
  EXPECT_FALSE(window.Next(9)) << "nothing is skipped, and nothing sent that is not to be";
  window.Add("d");
  EXPECT_EQ(window.Next(9)->number, 4u);
}

TEST(CallWindow, IsFullUntilTheOldestIsAnswered) {
  CallWindow window;
  for (uint64_t i = 0; i < kCallsInWindow; ++i) EXPECT_TRUE(window.Add(""));
  EXPECT_FALSE(window.Add(""));
  EXPECT_TRUE(window.Answered(2));
  EXPECT_FALSE(window.Add("")) << "its number would be too far from the oldest";
  EXPECT_TRUE(window.Answered(1));
  EXPECT_TRUE(window.Add(""));
}

// ---- callers and an actor over connections that break, beside a model of what may have happened

struct Frame {
  int caller = 0;
  CallToSend call;
};
struct Back {
  uint64_t number = 0;
  std::string answer;  // empty: send again from `number` on
};

class World {
 public:
  World(uint64_t seed, bool durable) : rng_(seed), durable_(durable) {
    callers_.resize(1 + rng_.Below(4));
    if (durable_) TakeRecords();
  }

  void Run(int rounds) {
    for (int round = 0; round < rounds; ++round) Round(/*faults=*/true);
    for (int round = 0; round < 40'000 && !AllAnswered(); ++round) Round(/*faults=*/false);
    EXPECT_TRUE(AllAnswered()) << "a call waits for ever";
    Check();
  }

 private:
  struct Caller {
    CallWindow window;
    std::deque<Frame> out;
    std::deque<Back> in;
    std::map<uint64_t, int64_t> value_of;  // of calls that are not answered, by their number
    int64_t next_value = 1;
    std::vector<int64_t> answered, given_up;
    size_t peak = 0;
  };

  void Round(bool faults) {
    const int number = static_cast<int>(rng_.Below(callers_.size()));
    Caller& caller = callers_[static_cast<size_t>(number)];
    switch (rng_.Below(faults ? 12 : 8)) {
      case 0:
      case 1:
        if (faults) Make(caller);
        if (!faults && durable_) TakeRecords();
        break;
      case 2:
      case 3:
        if (const auto call = caller.window.Next()) caller.out.push_back({number, *call});
        break;
      case 4:
      case 5:
        Deliver(caller, number);
        break;
      case 6:
        Work();
        break;
      case 7:
        Hear(caller);
        break;
      case 8:
        caller.out.clear();  // the connection breaks, with all that was on its way
        caller.in.clear();
        caller.window.SendAgain();
        break;
      case 9:
        if (durable_) TakeRecords();
        break;
      case 10:
        if (durable_ && rng_.Chance(0.1)) Crash();
        break;
      default:
        if (!caller.value_of.empty() && rng_.Chance(0.2)) {
          const auto it =
              std::next(caller.value_of.begin(), static_cast<int64_t>(rng_.Below(caller.value_of.size())));
          if (caller.window.GiveUp(it->first)) caller.given_up.push_back(it->second);
        }
    }
    caller.peak = std::max(caller.peak, caller.window.size());
  }

  void Make(Caller& caller) {
    const int64_t value = caller.next_value;
    if (const auto number = caller.window.Add(absl::StrCat(value))) {
      caller.value_of[*number] = value;
      ++caller.next_value;
    }
  }

  // The actor gets one frame.
  void Deliver(Caller& caller, int number) {
    if (caller.out.empty()) return;
    const Frame frame = caller.out.front();
    caller.out.pop_front();
    const CallerId id{7, static_cast<uint64_t>(number)};
    const Admitted admitted = ledger_.Offer(id, frame.call.number, frame.call.acknowledged);
    switch (admitted.what) {
      case Admission::kRun:
        mailbox_.push_back(frame);
        break;
      case Admission::kBegun:
        for (Frame& waits : mailbox_) {
          if (waits.caller == number && waits.call.number == frame.call.number && frame.call.given_up)
            waits.call.given_up = true;
        }
        break;
      case Admission::kAnswered:
        if (!durable_ || Stored(number, frame.call.number))
          caller.in.push_back({frame.call.number, *admitted.answer});
        break;
      case Admission::kNotYet:
        caller.in.push_back({admitted.next, ""});
        break;
      case Admission::kTooOld:
        break;
      case Admission::kRefused:
        ADD_FAILURE() << "a caller that keeps to the rules is refused";
    }
  }

  // The actor does one of the calls in its mailbox.
  void Work() {
    if (mailbox_.empty()) return;
    const Frame frame = mailbox_.front();
    mailbox_.pop_front();
    std::string answer = "cancelled";
    if (!frame.call.given_up) {
      effects_.emplace_back(frame.caller, std::stoll(frame.call.arguments));
      answer = absl::StrCat("did ", frame.call.arguments);
    }
    const CallerId id{7, static_cast<uint64_t>(frame.caller)};
    ledger_.Answer(id, frame.call.number, answer);
    if (durable_) {
      unsaid_.push_back({frame.caller, {frame.call.number, answer}});  // until it is stored
    } else {
      callers_[static_cast<size_t>(frame.caller)].in.push_back({frame.call.number, answer});
    }
  }

  void Hear(Caller& caller) {
    if (caller.in.empty()) return;
    const Back back = caller.in.front();
    caller.in.pop_front();
    if (back.answer.empty()) return caller.window.SendAgain();
    if (!caller.window.Answered(back.number)) {
      caller.value_of.erase(back.number);
      return;
    }
    const int64_t value = caller.value_of.at(back.number);
    caller.value_of.erase(back.number);
    EXPECT_EQ(back.answer, absl::StrCat("did ", value)) << "it has the answer of another call";
    caller.answered.push_back(value);
  }

  // State and ledger are stored together, and only then an answer leaves.
  void TakeRecords() {
    records_ = ledger_.Records();
    stored_effects_ = effects_;
    for (auto& [caller, back] : unsaid_) callers_[static_cast<size_t>(caller)].in.push_back(back);
    unsaid_.clear();
  }
  bool Stored(int caller, uint64_t number) const {
    for (const auto& [who, back] : unsaid_) {
      if (who == caller && back.number == number) return false;
    }
    return true;
  }
  void Crash() {
    ledger_ = CallLedger(100, records_);
    effects_ = stored_effects_;
    mailbox_.clear();
    unsaid_.clear();
    for (Caller& caller : callers_) {
      caller.out.clear();
      caller.in.clear();
      caller.window.SendAgain();
    }
  }

  bool AllAnswered() const {
    return std::ranges::all_of(callers_, [](const Caller& caller) { return caller.window.size() == 0; });
  }

  void Check() {
    if (durable_) TakeRecords();
    for (int number = 0; number < static_cast<int>(callers_.size()); ++number) {
      const Caller& caller = callers_[static_cast<size_t>(number)];
      std::vector<int64_t> effects;
      for (const auto& [who, value] : effects_) {
        if (who == number) effects.push_back(value);
      }
      EXPECT_TRUE(std::ranges::is_sorted(effects)) << "calls of a caller ran in another order";
      EXPECT_TRUE(std::ranges::adjacent_find(effects) == effects.end()) << "a call ran twice";
      const std::set<int64_t> ran(effects.begin(), effects.end());
      for (const int64_t value : caller.answered) EXPECT_TRUE(ran.contains(value)) << "answered, not done";
      const std::set<int64_t> given_up(caller.given_up.begin(), caller.given_up.end());
      const std::set<int64_t> answered(caller.answered.begin(), caller.answered.end());
      for (int64_t value = 1; value < caller.next_value; ++value)
        EXPECT_TRUE(answered.contains(value) || given_up.contains(value)) << "nobody heard of " << value;
      EXPECT_LE(caller.peak, kCallsInWindow);
    }
    EXPECT_LE(ledger_.answers(), callers_.size() * kCallsInWindow);
  }

  Rng rng_;
  const bool durable_;
  std::vector<Caller> callers_;
  CallLedger ledger_{100};
  std::deque<Frame> mailbox_;
  std::vector<std::pair<int, int64_t>> effects_, stored_effects_;
  std::vector<CallerRecord> records_;
  std::vector<std::pair<int, Back>> unsaid_;
};

TEST(CallLedger, ExactlyOnceAndInOrderOverConnectionsThatBreak) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    World(seed, /*durable=*/false).Run(1500);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(CallLedger, ExactlyOnceForAnActorThatIsRestoredFromItsRecords) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    World(seed, /*durable=*/true).Run(1500);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

}  // namespace
}  // namespace gtrain::actors
