#include "actors/exec/host.h"

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kSoon = absl::Seconds(30);

// What a call came to.
class Answer {
 public:
  Reply Taker() {
    return [state = state_](const absl::Status& status, absl::string_view result) {
      MutexLock lock(&state->mutex);
      state->status = status;
      state->result = std::string(result);
      ++state->times;
    };
  }
  absl::StatusOr<std::string> Get() {
    MutexLock lock(&state_->mutex);
    if (!state_->mutex.AwaitFor(kSoon, [&] { return state_->times > 0; })) {
      ADD_FAILURE() << "no answer";
      return absl::DeadlineExceededError("no answer");
    }
    if (!state_->status.ok()) return state_->status;
    return state_->result;
  }
  int times() {
    MutexLock lock(&state_->mutex);
    return state_->times;
  }

 private:
  struct State {
    Mutex mutex;
    absl::Status status;
    std::string result;
    int times = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Its methods: 0 appends its argument and answers with all; 1 waits at the gate, and changes nothing; 2
// throws, so to say; 3 keeps its call until Later.
struct Log {
  std::string text;
};

class HostTest : public ::testing::Test {
 protected:
  void Open(HostOptions options = {}) {
    host_ = std::make_unique<Host>(options, clock_);
    ActorClass type;
    type.name = "Log";
    type.signature = "one";
    type.methods = 4;
    type.constant = {false, true};
    type.save = [](void* self) { return static_cast<Log*>(self)->text; };
    type.load = [](void* self, absl::string_view state) {
      static_cast<Log*>(self)->text = std::string(state);
      return absl::OkStatus();
    };
    type.create = [this](absl::string_view arguments) -> absl::StatusOr<void*> {
      ++made_;
      if (arguments == "fails") return absl::InvalidArgumentError("it was told to");
      ++alive_;
      return new Log{std::string(arguments)};
    };
    type.destroy = [this](void* self) {
      --alive_;
      delete static_cast<Log*>(self);
    };
    type.call = [this](void* self, int method, absl::string_view arguments, BegunCall* call) {
      auto* log = static_cast<Log*>(self);
      EXPECT_TRUE(Host::Inside());
      if (method == 0) {
        log->text.append(arguments.data(), arguments.size());
        call->Answer(absl::OkStatus(), log->text, false);
        log->text.append(arguments.data(), 0);  // both live until the function returns
      } else if (method == 1) {
        ++at_gate_;
        gate_.WaitFor(kSoon);
        call->Answer(absl::OkStatus(), "through", false);
      } else if (method == 2) {
        call->Answer(absl::UnknownError("it threw"), "", true);
      } else {
        MutexLock lock(&mutex_);
        later_.push_back(call);
      }
    };
    ASSERT_TRUE(host_->Register(std::move(type)).ok());
  }
  ~HostTest() override {
    gate_.Notify();
    host_.reset();
    EXPECT_EQ(alive_, 0) << "an actor was not ended";
  }
  // A host of actors whose state is kept.
  void OpenKeeping() {
    HostOptions options;
    options.on_saved = [this](uint64_t, const absl::Status& status, const std::string&) {
      EXPECT_TRUE(status.ok()) << status;
      ++saved_;
      return true;
    };
    Open(options);
  }
  ActorAddress SpawnKept() {
    SpawnOptions options;
    options.keep = true;
    return SpawnOne("", options);
  }
  ActorAddress SpawnOne(std::string arguments = "", SpawnOptions options = {}) {
    Answer answer;
    host_->Spawn("Log", options, std::move(arguments), kSoon, answer.Taker());
    const auto bytes = answer.Get();
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return *ActorAddress::Parse(bytes.value_or(std::string(24, '\0')));
  }
  absl::StatusOr<std::string> CallOne(const ActorAddress& address, int method, std::string arguments = "",
                                      absl::Duration timeout = kSoon) {
    Answer answer;
    host_->Call(address, method, std::move(arguments), timeout, answer.Taker());
    return answer.Get();
  }
  template <typename Condition>
  void Until(const Condition& condition) {
    const Instant end = clock_.Now() + kSoon;
    while (!condition() && clock_.Now() < end) std::this_thread::yield();
    ASSERT_TRUE(condition());
  }

  RealClock clock_;
  std::atomic<int> made_ = 0, alive_ = 0, at_gate_ = 0, saved_ = 0;
  Notification gate_;
  Mutex mutex_;
  std::vector<BegunCall*> later_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Host> host_;
};

TEST_F(HostTest, CallsOfOneThreadRunInTheirOrder) {
  Open();
  const ActorAddress log = SpawnOne("0");
  std::string expected = "0";
  Answer last;
  for (int i = 0; i < 900; ++i) {
    const std::string text = absl::StrCat(",", i);
    expected += text;
    Answer ignored;
    host_->Call(log, 0, text, kSoon, i == 899 ? last.Taker() : ignored.Taker());
  }
  EXPECT_EQ(last.Get().value(), expected);
}

TEST_F(HostTest, OneCallAtATimeWhoeverMakesThem) {
  HostOptions options;
  options.threads = 4;
  options.mailbox_calls = 100'000;
  Open(options);
  const ActorAddress log = SpawnOne();
  std::vector<std::thread> callers;
  std::vector<Answer> last(4);
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 5000; ++i) {
        Answer ignored;
        host_->Call(log, 0, "x", kSoon, i == 4999 ? last[caller].Taker() : ignored.Taker());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  size_t longest = 0;
  for (Answer& answer : last) longest = std::max(longest, answer.Get().value().size());
  EXPECT_EQ(longest, 20'000u) << "an append was lost, or two ran at once";
}

TEST_F(HostTest, AFullMailboxSaysSoAndHasRunNothing_B1) {
  HostOptions options;
  options.mailbox_calls = 3;
  options.mailbox_bytes = 10;
  Open(options);
  const ActorAddress log = SpawnOne();
  Answer at_gate;
  host_->Call(log, 1, "", kSoon, at_gate.Taker());
  Until([&] { return at_gate_ == 1; });
  Answer first, second, third;
  host_->Call(log, 0, "abcdef", kSoon, first.Taker());
  EXPECT_EQ(CallOne(log, 0, "ghijk").status().code(), absl::StatusCode::kResourceExhausted) << "11 bytes";
  host_->Call(log, 0, "g", kSoon, second.Taker());
  host_->Call(log, 0, "h", kSoon, third.Taker());
  const absl::Status full = CallOne(log, 0, "").status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(full.message(), HasSubstr("full with 3 calls"));
  EXPECT_EQ(host_->counts().waiting, 3u);
  EXPECT_EQ(host_->counts().begun, 1u);
  gate_.Notify();
  EXPECT_EQ(third.Get().value(), "abcdefgh");
  EXPECT_EQ(CallOne(log, 0, "ijklmnopqrs").value(), "abcdefghijklmnopqrs") << "one alone may be larger";
}

TEST_F(HostTest, ACallThatTookTooLongIsAnsweredOnceAndWhatHadNotBegunNeverRuns) {
  Open();
  const ActorAddress log = SpawnOne();
  Answer at_gate, waits;
  host_->Call(log, 1, "", absl::Milliseconds(30), at_gate.Taker());
  Until([&] { return at_gate_ == 1; });
  host_->Call(log, 0, "never", absl::Milliseconds(20), waits.Taker());
  EXPECT_THAT(waits.Get().status().message(), HasSubstr("had not begun, and will not"));
  EXPECT_EQ(waits.Get().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(at_gate.Get().status().message(), HasSubstr("has begun and is not done"));
  EXPECT_EQ(host_->counts().waiting, 0u);
  gate_.Notify();
  EXPECT_EQ(CallOne(log, 0, "x").value(), "x");
  EXPECT_EQ(at_gate.times(), 1);
  EXPECT_EQ(waits.times(), 1);
}

// Whoever keeps the state holds the answer until there is one that was taken behind it.
TEST_F(HostTest, ACallOfAKeptActorThatNeverRanIsFollowedByASave) {
  OpenKeeping();
  const ActorAddress actor = SpawnKept();
  Answer reads;
  host_->Call(actor, 1, "", kSoon, reads.Taker());
  Until([&] { return at_gate_ == 1; });
  EXPECT_TRUE(absl::IsDeadlineExceeded(CallOne(actor, 0, "never", absl::Milliseconds(1)).status()));
  EXPECT_EQ(saved_, 0);
  gate_.Notify();
  EXPECT_TRUE(reads.Get().ok());
  Until([&] { return saved_ == 1; });
  host_->Save(actor.number);

  Answer refused;
  std::string arguments;
  Reply reply = refused.Taker();
  EXPECT_TRUE(host_->CallIfRoom(actor, 99, arguments, kSoon, reply));
  EXPECT_TRUE(absl::IsInvalidArgument(refused.Get().status()));
  Until([&] { return saved_ == 2; });
}

TEST_F(HostTest, OneSaveIsOnItsWayAtATime) {
  OpenKeeping();
  gate_.Notify();
  const ActorAddress actor = SpawnKept();
  EXPECT_TRUE(CallOne(actor, 0, "a").ok());
  Until([&] { return saved_ == 1; });
  host_->Save(actor.number, /*again=*/true);
  EXPECT_TRUE(CallOne(actor, 1).ok());  // a save would come before it
  EXPECT_EQ(saved_, 1);
  host_->Save(actor.number);
  Until([&] { return saved_ == 2; });
}

TEST_F(HostTest, WhoAnswersLaterBeginsNothingBefore) {
  Open();
  const ActorAddress log = SpawnOne();
  Answer at_gate, later, next;
  host_->Call(log, 1, "", kSoon, at_gate.Taker());  // so that both are in the mailbox when the first begins
  host_->Call(log, 3, "", kSoon, later.Taker());
  host_->Call(log, 0, "next", kSoon, next.Taker());
  gate_.Notify();
  BegunCall* call = nullptr;
  Until([&] {
    MutexLock lock(&mutex_);
    if (later_.empty()) return false;
    call = later_[0];
    return true;
  });
  EXPECT_EQ(CallOne(SpawnOne(), 0, "another actor").value(), "another actor");
  EXPECT_EQ(next.times(), 0);
  EXPECT_GT(call->Left(), absl::ZeroDuration());
  call->Answer(absl::OkStatus(), "done", false);
  EXPECT_EQ(later.Get().value(), "done");
  EXPECT_EQ(next.Get().value(), "next");
}

TEST_F(HostTest, AnActorThatThrewIsMadeAnewUntilItHasNoRestarts_P4) {
  Open();
  SpawnOptions options;
  options.restarts = 2;
  const ActorAddress log = SpawnOne("new ", options);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(CallOne(log, 0, "x").value(), "new x");
    EXPECT_EQ(CallOne(log, 2).status().code(), absl::StatusCode::kUnknown);
  }
  EXPECT_EQ(CallOne(log, 0, "x").value(), "new x") << "it is made anew for the second time";
  Answer waits;
  EXPECT_EQ(CallOne(log, 2).status().message(), "it threw");
  Until([&] { return host_->counts().actors == 0; });
  const absl::Status gone = CallOne(log, 0).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(gone.message(), HasSubstr("it threw 3 times within 1h, and has 2 restarts"));
  EXPECT_EQ(made_, 3);
}

TEST_F(HostTest, ASpawnThatFailsOrIsUnknownSaysWhy) {
  Open();
  Answer fails, unknown;
  host_->Spawn("Log", {}, "fails", kSoon, fails.Taker());
  EXPECT_EQ(fails.Get().status().message(), "it was told to");
  host_->Spawn("Nobody", {}, "", kSoon, unknown.Taker());
  EXPECT_EQ(unknown.Get().status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(unknown.Get().status().message(), HasSubstr("no class Nobody is registered"));
  Until([&] { return host_->counts().actors == 0; });
}

TEST_F(HostTest, WhoEndsIsNotCalledAnyMore) {
  Open();
  const ActorAddress log = SpawnOne();
  Answer at_gate, waits;
  host_->Call(log, 1, "", kSoon, at_gate.Taker());
  Until([&] { return at_gate_ == 1; });
  host_->Call(log, 0, "x", kSoon, waits.Taker());
  host_->End(log, "it has done its work");
  EXPECT_EQ(waits.Get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(waits.Get().status().message(), HasSubstr("it has done its work"));
  EXPECT_THAT(CallOne(log, 0).status().message(), HasSubstr("is no more: it has done its work"));
  EXPECT_EQ(alive_, 1) << "what has begun goes on";
  gate_.Notify();
  EXPECT_EQ(at_gate.Get().value(), "through");
  Until([&] { return alive_ == 0; });
}

TEST_F(HostTest, ClosingAnswersEverybody) {
  Open();
  const ActorAddress log = SpawnOne();
  Answer at_gate;
  std::vector<Answer> waiting(20);
  host_->Call(log, 1, "", kSoon, at_gate.Taker());
  Until([&] { return at_gate_ == 1; });
  for (Answer& answer : waiting) host_->Call(log, 0, "x", kSoon, answer.Taker());
  std::thread opens([&] {
    Until([&] { return waiting.back().times() == 1; });
    gate_.Notify();
  });
  host_.reset();
  opens.join();
  EXPECT_EQ(at_gate.Get().value(), "through");
  for (Answer& answer : waiting) EXPECT_EQ(answer.Get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(alive_, 0);
}

TEST_F(HostTest, ClosingLeavesWhatHangsToItself) {
  HostOptions options;
  options.close_within = absl::Milliseconds(50);
  Open(options);
  const ActorAddress log = SpawnOne();
  Answer at_gate;
  host_->Call(log, 1, "", kSoon, at_gate.Taker());
  Until([&] { return at_gate_ == 1; });
  host_.reset();
  EXPECT_EQ(at_gate.times(), 0);
  gate_.Notify();
  EXPECT_EQ(at_gate.Get().value(), "through");
  Until([&] { return alive_ == 0; });
}

TEST_F(HostTest, AnotherClassOfTheSameNameIsRefused) {
  Open();
  ActorClass other;
  other.name = "Log";
  other.signature = "two";
  other.methods = 1;
  EXPECT_EQ(host_->Register(other).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(CallOne(SpawnOne(), 4).status().code(), absl::StatusCode::kInvalidArgument) << "no such method";
}

TEST_F(HostTest, TenThousandActors) {
  Open();
  std::vector<Answer> made(10'000);
  for (Answer& answer : made) host_->Spawn("Log", {}, "", kSoon, answer.Taker());
  for (Answer& answer : made) {
    const auto address = ActorAddress::Parse(answer.Get().value());
    EXPECT_EQ(CallOne(*address, 0, "y").value(), "y");
  }
  EXPECT_EQ(alive_, 10'000);
}

// A thread that looks around finds a call, and something that goes on for long behind it.
TEST_F(HostTest, WhatALookFoundWaitsForNothingThatGoesOn) {
  HostOptions options;
  options.threads = 2;
  Open(options);
  const ActorAddress actor = SpawnOne();
  Notification answered;
  std::atomic<bool> looked = false, went = false, also = false;
  host_->SetLookAround([&](absl::FunctionRef<bool()> /*stop*/) {
    if (looked.exchange(true)) return false;
    host_->Call(actor, 0, "x", kSoon, [&](const absl::Status&, absl::string_view) { answered.Notify(); });
    absl::AnyInvocable<void()> first = [&] { went = answered.WaitFor(kSoon); };
    absl::AnyInvocable<void()> second = [&] { also = true; };
    EXPECT_TRUE(host_->Post(first) && host_->Post(second));
    return true;
  });
  SpawnOne();  // whoever makes it looks around behind that
  EXPECT_TRUE(answered.WaitFor(kSoon));
  Mutex mutex;
  MutexLock lock(&mutex);
  for (int i = 0; i < 3000 && !(went && also); ++i)
    mutex.AwaitFor(absl::Milliseconds(10), [] { return false; });
  EXPECT_TRUE(went && also);
  host_->SetLookAround(nullptr);
}

// Whoever keeps an actor has its answers with its state: one that had not begun has no change behind it, and
// would wait for ever.
TEST(HostWithoutThreads, WhatBecameOfACallThatDidNotBeginIsSaved) {
  ManualClock clock;
  std::vector<std::string> events;
  HostOptions options;
  options.threads = 0;
  options.seed = 1;
  options.on_saved = [&](uint64_t, const absl::Status&, const std::string& state) {
    events.push_back("saved " + state);
    return true;
  };
  Host host(options, clock);
  BegunCall* begun = nullptr;
  ActorClass type;
  type.name = "Log";
  type.methods = 2;
  type.constant = {true, false};
  type.create = [](absl::string_view) -> absl::StatusOr<void*> { return new Log{"state"}; };
  type.destroy = [](void* self) { delete static_cast<Log*>(self); };
  type.save = [](void* self) -> absl::StatusOr<std::string> { return static_cast<Log*>(self)->text; };
  type.load = [](void*, absl::string_view) { return absl::OkStatus(); };
  type.call = [&](void*, int, absl::string_view, BegunCall* call) { begun = call; };
  ASSERT_TRUE(host.Register(std::move(type)).ok());
  const auto turn = [&] {
    while (host.Turn()) {
    }
  };
  const auto taker = [&](const std::string& name) {
    return [&events, name](const absl::Status& status, absl::string_view) {
      events.push_back(name + " " + absl::StatusCodeToString(status.code()));
    };
  };
  ActorAddress address = host.address();
  SpawnOptions spawn;
  spawn.keep = true;
  host.Spawn("Log", spawn, "", kSoon,
             [&](const absl::Status&, absl::string_view result) { address = *ActorAddress::Parse(result); });
  turn();
  host.Call(address, 0, "", kSoon, taker("reads"));
  host.Call(address, 1, "", absl::Seconds(1), taker("changes"));
  turn();
  ASSERT_NE(begun, nullptr);
  EXPECT_EQ(host.NextDeadline(), clock.Now() + absl::Seconds(1));
  clock.Advance(absl::Seconds(2));
  turn();
  begun->Answer(absl::OkStatus(), "", false);
  turn();
  EXPECT_THAT(events, ElementsAre("changes DEADLINE_EXCEEDED", "reads OK", "saved state"));
}

// The clock looks just as the answer is told.
TEST(Host, AKeptCallIsAnsweredOrLateAndNotBoth) {
  ManualClock clock;
  HostOptions options;
  options.threads = 0;
  Host host(options, clock);
  ActorClass type;
  type.name = "Log";
  type.methods = 1;
  type.create = [](absl::string_view) -> absl::StatusOr<void*> { return new Log; };
  type.destroy = [](void* self) { delete static_cast<Log*>(self); };
  type.save = [](void*) -> absl::StatusOr<std::string> { return "state"; };
  type.load = [](void*, absl::string_view) { return absl::OkStatus(); };
  type.call = [](void*, int, absl::string_view, BegunCall* call) {
    call->Answer(absl::OkStatus(), "", false);
  };
  ASSERT_TRUE(host.Register(std::move(type)).ok());
  Answer made, answer;
  SpawnOptions kept;
  kept.keep = true;
  host.Spawn("Log", kept, "", kSoon, made.Taker());
  while (host.Turn()) {
  }
  const ActorAddress address = *ActorAddress::Parse(*made.Get());
  Reply taker = answer.Taker();
  host.Call(address, 0, "", absl::Seconds(1), [&](const absl::Status& status, absl::string_view result) {
    taker(status, result);
    clock.Advance(absl::Seconds(2));
    host.Turn();
  });
  while (host.Turn()) {
  }
  EXPECT_TRUE(answer.Get().ok());
  EXPECT_EQ(answer.times(), 1);
}

TEST_F(HostTest, TheListSaysWhatAnActorDoesAndWhatWaits) {
  Open();
  const ActorAddress idle = SpawnOne();
  EXPECT_TRUE(CallOne(idle, 0, "x").ok());
  SpawnOptions named;
  named.name = "ps/0";
  const ActorAddress busy = SpawnOne("", named);
  Answer at_gate, behind, later;
  host_->Call(busy, 1, "", kSoon, at_gate.Taker());
  host_->Call(busy, 0, "abc", kSoon, behind.Taker());
  Until([&] { return at_gate_ == 1; });
  const Listing all = host_->List({});
  ASSERT_EQ(all.actors.size(), 2u);
  const ActorFacts& runs = all.actors[0];  // the busiest first
  EXPECT_EQ(runs.number, busy.number);
  EXPECT_EQ(runs.name, "ps/0");
  EXPECT_EQ(runs.doing, Doing::kRunning);
  EXPECT_EQ(runs.method, "method 1") << "the signature of this class names none";
  EXPECT_GT(runs.thread, 0);
  EXPECT_NE(runs.thread, gettid());
  EXPECT_EQ(runs.waiting, 1u);
  EXPECT_EQ(runs.waiting_bytes, 3u);
  EXPECT_EQ(runs.answered, 0u);
  EXPECT_EQ(all.actors[1].doing, Doing::kIdle);
  EXPECT_EQ(all.actors[1].answered, 1u);
  EXPECT_EQ(all.actors[1].thread, 0);
  const ClassFacts& total = all.classes.at("Log");
  EXPECT_EQ(total.actors, 2u);
  EXPECT_EQ(total.running, 1u);
  EXPECT_EQ(total.waiting, 1u);
  EXPECT_EQ(total.times.count(), 1u);
  gate_.Notify();
  EXPECT_TRUE(behind.Get().ok());
  host_->Call(busy, 3, "", kSoon, later.Taker());  // leaves its thread, as a coroutine that awaits does
  Until([&] { return host_->List({}).classes.at("Log").awaiting == 1; });
  const ActorFacts awaits = host_->List({.number = busy.number}).actors.at(0);
  EXPECT_EQ(awaits.doing, Doing::kAwaiting);
  EXPECT_EQ(awaits.method, "method 3");
  EXPECT_EQ(awaits.thread, 0);
  MutexLock lock(&mutex_);
  later_.at(0)->Answer(absl::OkStatus(), "", false);
}

TEST_F(HostTest, TheListHasWhatWasAskedForAndCountsTheRest) {
  Open();
  std::vector<ActorAddress> all;
  for (int i = 0; i < 700; ++i) all.push_back(SpawnOne());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(CallOne(all[500], 0, "x").ok());
  const Listing some = host_->List({.limit = 4});
  EXPECT_EQ(some.actors.size(), 4u);
  EXPECT_EQ(some.left_out, 696u);
  EXPECT_EQ(some.actors[0].number, all[500].number) << "the busiest first";
  EXPECT_EQ(some.classes.at("Log").actors, 700u);
  EXPECT_EQ(host_->List({.number = all[3].number}).actors.size(), 1u);
  EXPECT_TRUE(host_->List({.type = "Other"}).classes.empty());
  EXPECT_EQ(host_->List({.limit = 0}).left_out, 700u);
}

// Who waits for a call waits for those before it, too, and that is what the list tells.
TEST_F(HostTest, TheTimeOfACallIsFromWhenItWasMade) {
  Open();
  const ActorAddress log = SpawnOne();
  Answer at_gate, behind;
  const Instant before = clock_.Now();
  host_->Call(log, 1, "", kSoon, at_gate.Taker());
  host_->Call(log, 0, "x", kSoon, behind.Taker());
  Until([&] { return clock_.Now() - before > absl::Milliseconds(40); });
  gate_.Notify();
  EXPECT_TRUE(behind.Get().ok());
  const ActorFacts facts = host_->List({}).actors.at(0);
  EXPECT_GE(facts.half, absl::Milliseconds(16))
      << "both took 40 ms at least, which is known to a factor of 2";
  EXPECT_GE(facts.most, facts.half);
}

TEST_F(HostTest, WhatBecameOfAnActorThatThrewIsTold) {
  Mutex mutex;
  std::vector<std::string> news;
  HostOptions options;
  options.on_news = [&](const std::string& text) {
    MutexLock lock(&mutex);
    news.push_back(text);
  };
  Open(options);
  SpawnOptions once;
  once.restarts = 1;
  once.name = "frail";
  const ActorAddress log = SpawnOne("", once);
  EXPECT_FALSE(CallOne(log, 2).ok());
  EXPECT_TRUE(CallOne(log, 0, "x").ok());
  EXPECT_EQ(host_->List({}).actors.at(0).restarts, 1);
  EXPECT_FALSE(CallOne(log, 2).ok());
  Until([&] { return !host_->Lives(log.number); });
  MutexLock lock(&mutex);
  EXPECT_THAT(news,
              ElementsAre("Log frail threw: it threw; it was made anew (1 of 1 restarts within 1h)",
                          "Log frail threw: it threw; it has ended: it threw 2 times within 1h, and has "
                          "1 restarts"));
}

}  // namespace
}  // namespace gtrain::actors
