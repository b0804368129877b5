#include "elastic/exec/checkpoints.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace gtrain::elastic {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

// What a checkpointer did, and whether its storage answers.
struct Story {
  Notification begun, answers, prepared, ended;
  absl::Status status;
  std::thread::id ended_on;
};

class FakeCheckpointer final : public Checkpointer {
 public:
  explicit FakeCheckpointer(std::shared_ptr<Story> story) : story_(std::move(story)) {}
  ~FakeCheckpointer() override {
    story_->ended_on = std::this_thread::get_id();
    story_->ended.Notify();
  }
  absl::Status Start() override {
    story_->begun.Notify();
    EXPECT_TRUE(story_->answers.WaitFor(kPatience));
    return story_->status;
  }
  absl::Status PrepareToSave() override {
    story_->prepared.Notify();
    return absl::OkStatus();
  }
  absl::Status AddReplicated(absl::string_view, Memory, std::vector<int64_t>, DType) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status AddSharded(absl::string_view, Memory, std::vector<int64_t>, const Sharding&, DType) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status AddBox(absl::string_view, Memory, std::vector<int64_t>, std::vector<int64_t>,
                      std::vector<int64_t>, DType) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status AddPerRank(absl::string_view, Memory, PerRankRule) override {
    return absl::UnimplementedError("fake");
  }
  absl::Status AddBytes(absl::string_view, std::function<absl::StatusOr<std::string>()>,
                        std::function<absl::Status(absl::string_view)>, PerRankRule) override {
    return absl::UnimplementedError("fake");
  }
  absl::StatusOr<std::optional<RestoredStep>> Restore(const RestoreOptions&) override {
    return absl::UnimplementedError("fake");
  }
  absl::StatusOr<bool> Save(int64_t) override { return absl::UnimplementedError("fake"); }
  void Fence() override {}
  absl::StatusOr<bool> SaveIfDue(int64_t, Communicator*) override { return absl::UnimplementedError("fake"); }
  bool stop_agreed() const override { return false; }
  absl::Status Wait(absl::Duration) override { return absl::UnimplementedError("fake"); }
  std::optional<int64_t> LastCommitted() const override { return std::nullopt; }

 private:
  const std::shared_ptr<Story> story_;
};

struct Made {
  std::shared_ptr<Story> story = std::make_shared<Story>();
  std::unique_ptr<Checkpointer> checkpointer = std::make_unique<FakeCheckpointer>(story);
};

TEST(Checkpoints, IsOpenedAndPreparedBesideItsCaller) {
  Checkpoints checkpoints;
  Made one;
  checkpoints.Open(std::move(one.checkpointer));
  ASSERT_TRUE(one.story->begun.WaitFor(kPatience));
  EXPECT_TRUE(checkpoints.opening());
  EXPECT_FALSE(checkpoints.Opened());
  EXPECT_EQ(checkpoints.get(), nullptr);
  one.story->answers.Notify();
  ASSERT_TRUE(checkpoints.Adopt().ok());
  EXPECT_NE(checkpoints.get(), nullptr);
  EXPECT_FALSE(checkpoints.opening());
  EXPECT_TRUE(one.story->prepared.WaitFor(absl::ZeroDuration()));
}

TEST(Checkpoints, AnErrorOfItsStorageIsThatOfAdopt) {
  Checkpoints checkpoints;
  Made one;
  one.story->status = absl::UnavailableError("no storage");
  one.story->answers.Notify();
  checkpoints.Open(std::move(one.checkpointer));
  EXPECT_EQ(checkpoints.Adopt(), one.story->status);
  EXPECT_EQ(checkpoints.get(), nullptr);
}

// A storage that does not answer holds up neither the end of a generation nor the next one.
TEST(Checkpoints, AGenerationThatEndsWaitsForNoStorage) {
  Checkpoints checkpoints;
  Made slow, given_up, next;
  checkpoints.Open(std::move(slow.checkpointer));
  ASSERT_TRUE(slow.story->begun.WaitFor(kPatience));
  checkpoints.Leave();
  checkpoints.Open(std::move(given_up.checkpointer));
  checkpoints.Leave();
  checkpoints.Open(std::move(next.checkpointer));
  EXPECT_FALSE(slow.story->ended.WaitFor(absl::ZeroDuration()));
  EXPECT_TRUE(given_up.story->ended.WaitFor(absl::ZeroDuration())) << "it holds a communicator";
  slow.story->answers.Notify();
  ASSERT_TRUE(next.story->begun.WaitFor(kPatience));
  EXPECT_TRUE(slow.story->ended.WaitFor(absl::ZeroDuration())) << "one at a time has the directory";
  EXPECT_NE(slow.story->ended_on, std::this_thread::get_id());
  EXPECT_FALSE(given_up.story->begun.WaitFor(absl::ZeroDuration()));
  next.story->answers.Notify();
  EXPECT_TRUE(checkpoints.Adopt().ok());
}

TEST(Checkpoints, WhatIsOpenIsClosedByTheThread) {
  Checkpoints checkpoints;
  Made adopted, untaken;
  adopted.story->answers.Notify();
  untaken.story->answers.Notify();
  checkpoints.Open(std::move(adopted.checkpointer));
  ASSERT_TRUE(checkpoints.Adopt().ok());
  checkpoints.Open(std::move(untaken.checkpointer));
  EXPECT_EQ(checkpoints.get(), nullptr);
  ASSERT_TRUE(adopted.story->ended.WaitFor(kPatience));
  EXPECT_NE(adopted.story->ended_on, std::this_thread::get_id());
  ASSERT_TRUE(untaken.story->prepared.WaitFor(kPatience));
  checkpoints.Leave();
  ASSERT_TRUE(untaken.story->ended.WaitFor(kPatience));
  EXPECT_NE(untaken.story->ended_on, std::this_thread::get_id());
}

}  // namespace
}  // namespace gtrain::elastic
