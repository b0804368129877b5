#include "actors/exec/owned.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

using ::testing::ElementsAre;

constexpr CallerId kOwn{1, 1}, kOne{2, 2}, kTwo{3, 3};

class OwnedTest : public ::testing::Test {
 protected:
  OwnedTest() {
    OwnedActors::Functions functions;
    functions.pick = [this](const Placement&, const std::map<CallerId, size_t>&) -> absl::StatusOr<CallerId> {
      if (places_.empty()) return absl::NotFoundError("nowhere");
      return places_[0];
    };
    functions.make = [this](const CallerId& at, const OwnedActors::Spec& spec, absl::Duration, Reply reply) {
      records_.push_back(spec.record);
      making_.emplace_back(at, std::move(reply));
    };
    functions.end = [this](const ActorAddress& at, const std::string&) { ended_.push_back(at.number); };
    functions.on_moved = [this](const OwnedActors::Moved& moved) { moved_.push_back(moved); };
    owned_ = std::make_unique<OwnedActors>(kOwn, std::move(functions), clock_);
  }

  // What is being made is made, as number `number` of its process.
  void Make(uint64_t number) {
    auto [at, reply] = std::move(making_.front());
    making_.erase(making_.begin());
    reply(absl::OkStatus(), ActorAddress{at.high, at.low, number}.Pack());
  }
  uint64_t Spawn(uint64_t number, bool keep = false) {
    OwnedActors::Spec spec;
    spec.options.restarts = 1;
    spec.options.keep = keep;
    ActorRef ref;
    owned_->Spawn(spec, absl::Seconds(1), [&](const absl::Status& status, absl::string_view result) {
      ASSERT_TRUE(status.ok());
      ref = *ActorRef::Parse(result);
    });
    Make(number);
    EXPECT_EQ(ref.kept(), keep ? 1u : 0u);
    return ref.id;
  }
  Reply Taker() {
    return [this](const absl::Status& status, absl::string_view result) {
      heard_.push_back(status.ok() ? std::to_string(ActorAddress::Parse(result)->number)
                                   : std::string(status.message()));
    };
  }

  ManualClock clock_;
  std::vector<CallerId> places_ = {kOne};
  std::vector<std::pair<CallerId, Reply>> making_;
  std::vector<std::string> records_, heard_;
  std::vector<uint64_t> ended_;
  std::vector<OwnedActors::Moved> moved_;
  std::unique_ptr<OwnedActors> owned_;
};

TEST_F(OwnedTest, WhoAsksWhereALostActorIsHearsOfItWhenItIsThere) {
  const uint64_t id = Spawn(7);
  owned_->Locate(id, {kOne.high, kOne.low, 7}, Taker());
  EXPECT_THAT(heard_, ElementsAre());
  places_ = {kTwo};
  owned_->ProcessLost(kOne);
  owned_->Locate(id, {kOne.high, kOne.low, 7}, Taker());
  Make(8);
  owned_->Locate(id, {kOne.high, kOne.low, 7}, Taker());
  EXPECT_THAT(heard_, ElementsAre("8", "8", "8"));
  owned_->ProcessLost(kTwo);
  owned_->Locate(id, {kTwo.high, kTwo.low, 8}, Taker());
  EXPECT_THAT(heard_[3],
              "the actor is no more: its process was lost 2 times within 1h, and it has 1 restarts");
  EXPECT_EQ(owned_->size(), 0u);
}

TEST_F(OwnedTest, WhatBecameOfALostActorIsToldOnce) {
  Spawn(7);
  EXPECT_TRUE(moved_.empty());
  places_ = {kTwo};
  owned_->ProcessLost(kOne);
  EXPECT_TRUE(moved_.empty()) << "it is not there yet";
  Make(8);
  ASSERT_EQ(moved_.size(), 1u);
  EXPECT_EQ(moved_[0].from, kOne);
  EXPECT_EQ(moved_[0].to, kTwo);
  owned_->ProcessLost(kTwo);
  ASSERT_EQ(moved_.size(), 2u);
  EXPECT_EQ(moved_[1].from, kTwo);
  EXPECT_EQ(moved_[1].to, std::nullopt);
  EXPECT_EQ(moved_[1].reason, "its process was lost 2 times within 1h, and it has 1 restarts");
}

TEST_F(OwnedTest, WhatIsLetGoAsItIsMadeIsEnded) {
  const uint64_t id = Spawn(7);
  places_ = {kTwo};
  owned_->ProcessLost(kOne);
  owned_->End(id, "enough");
  EXPECT_THAT(ended_, ElementsAre());
  Make(8);
  EXPECT_THAT(ended_, ElementsAre(8));
}

TEST_F(OwnedTest, OneThatIsLostAsItIsMadeIsLostOnceMore) {
  const uint64_t id = Spawn(7);
  owned_->ProcessLost(kOne);
  absl::Status asked;
  owned_->Locate(id, {kOne.high, kOne.low, 7},
                 [&](const absl::Status& status, absl::string_view) { asked = status; });
  making_[0].second(absl::UnavailableError("that process is lost, too"), "");
  owned_->Locate(id, {}, Taker());
  EXPECT_THAT(heard_, ElementsAre("the actor is no more: that process is lost, too"));
  // And not kUnavailable, which is said of an owner that is lost.
  EXPECT_TRUE(absl::IsNotFound(asked)) << asked;
}

TEST_F(OwnedTest, ASpawnWhoseProcessIsLostGoesElsewhere) {
  OwnedActors::Spec spec;
  spec.options.restarts = 1;
  owned_->Spawn(spec, absl::Seconds(10), [this](const absl::Status& status, absl::string_view result) {
    heard_.push_back(status.ok() ? std::to_string(ActorRef::Parse(result)->at.number)
                                 : std::string(status.message()));
  });
  places_ = {kTwo};
  making_[0].second(absl::UnavailableError("lost"), "");
  making_.erase(making_.begin());
  EXPECT_THAT(heard_, ElementsAre());
  EXPECT_EQ(making_[0].first, kTwo);
  Make(8);
  EXPECT_THAT(heard_, ElementsAre("8"));
  // Once too often, and too late.
  for (int i = 0; i < 2; ++i) {
    spec.options.restarts = i == 0 ? 0 : 5;
    owned_->Spawn(spec, absl::Seconds(10), [this](const absl::Status& status, absl::string_view) {
      heard_.push_back(std::string(status.message()));
    });
    clock_.Advance(absl::Seconds(11));
    making_[0].second(absl::UnavailableError("lost"), "");
    making_.erase(making_.begin());
  }
  EXPECT_THAT(heard_, ElementsAre("8", "lost", "lost"));
  EXPECT_TRUE(making_.empty());
}

// Its process is lost before the answer to the spawn is heard.
TEST_F(OwnedTest, ASpawnThatIsAnsweredByALostProcessHasFailed) {
  OwnedActors::Spec spec;
  spec.options.restarts = 0;
  owned_->Spawn(spec, absl::Seconds(10), [this](const absl::Status& status, absl::string_view) {
    heard_.push_back(status.ok() ? "made" : std::string(status.message()));
  });
  owned_->ProcessLost(kOne);
  Make(7);
  EXPECT_THAT(heard_, ElementsAre("its process was lost, and it has 0 restarts"));
  EXPECT_EQ(owned_->size(), 0u);
}

// A process that was given up, and lives, has nothing more to say (N2).
TEST_F(OwnedTest, OnlyTheProcessThatHasItSaysWhatIsKept) {
  const uint64_t id = Spawn(7, /*keep=*/true);
  EXPECT_TRUE(owned_->Keep(id, kOne, "of one").ok());
  places_ = {kTwo};
  owned_->ProcessLost(kOne);
  EXPECT_TRUE(absl::IsNotFound(owned_->Keep(id, kOne, "late")));
  Make(8);
  EXPECT_TRUE(absl::IsNotFound(owned_->Keep(id, kOne, "late")));
  EXPECT_TRUE(owned_->Keep(id, kTwo, "of two").ok());
  EXPECT_THAT(records_, ElementsAre("", "of one"));
  owned_->End(id, "enough");
  EXPECT_TRUE(absl::IsNotFound(owned_->Keep(id, kTwo, "late")));
}

}  // namespace
}  // namespace gtrain::actors
