#include "checkpoint/engine/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/test_folder.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/store/directory_store.h"

namespace gtrain::ckpt {
namespace {

TEST(Settings, EnvironmentWinsAndIsChecked) {
  std::map<std::string, std::string> values;
  const Environment environment = [&](const char* name) -> std::optional<std::string> {
    const auto it = values.find(name);
    if (it == values.end()) return std::nullopt;
    return it->second;
  };
  EXPECT_TRUE(absl::IsInvalidArgument(MergeSettings({}, environment).status()));
  values = {{"GTRAIN_CHECKPOINT_URI", "s3://bucket/x/"}};
  EXPECT_EQ(MergeSettings({}, environment)->uri, "s3://bucket/x");
  values = {{"GTRAIN_CHECKPOINT_URI", "/data/b/"},
            {"GTRAIN_CHECKPOINT_EVERY", "30s"},
            {"GTRAIN_CHECKPOINT_KEEP", "5"},
            {"GTRAIN_CHECKPOINT_ON_ERROR", "fail"}};
  auto s = MergeSettings({.uri = "a", .keep = 2, .every_steps = 7}, environment);
  ASSERT_TRUE(s.ok()) << s.status();
  EXPECT_EQ(s->uri, "/data/b");
  EXPECT_EQ(s->keep, 5);
  EXPECT_EQ(s->every, absl::Seconds(30));
  EXPECT_EQ(s->every_steps, std::nullopt);
  EXPECT_EQ(s->on_error, OnError::kFail);
  values = {{"GTRAIN_CHECKPOINT_EVERY", "auto"}};
  EXPECT_EQ(MergeSettings({.uri = "a", .every_steps = 7}, environment)->every_steps, 7);
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{"GTRAIN_CHECKPOINT_EVERY", "often"},
                                                        {"GTRAIN_CHECKPOINT_EVERY", "0 steps"},
                                                        {"GTRAIN_CHECKPOINT_EVERY", "-3s"},
                                                        {"GTRAIN_CHECKPOINT_KEEP", "0"},
                                                        {"GTRAIN_CHECKPOINT_KEEP", "many"},
                                                        {"GTRAIN_CHECKPOINT_ON_ERROR", "panic"},
                                                        {"GTRAIN_CHECKPOINT_URI", "file://relative"},
                                                        {"GTRAIN_RESUME", "99999999999999999999"},
                                                        {"GTRAIN_RESUME", "/data/manifests/../x.json"},
                                                        {"GTRAIN_RESUME", "/data/manifests/latest.json"}}) {
    values = {{name, value}};
    EXPECT_TRUE(absl::IsInvalidArgument(MergeSettings({.uri = "a"}, environment).status()))
        << name << "=" << value;
  }
  values = {{"GTRAIN_CHECKPOINT_URI", "gs://bucket/x"}};
  EXPECT_TRUE(absl::IsInvalidArgument(MergeSettings({}, environment).status()));
  values = {{"GTRAIN_CHECKPOINT_URI", "s3://bucket/x/"}};
  EXPECT_EQ(MergeSettings({}, environment)->uri, "s3://bucket/x");
}

TEST(Settings, WhatIsToBeDoneBeforeASaveFailsItOnAllRanks) {
  const std::string folder = TestFolder();
  RunRanks({.world_size = 2}, [&](FakeSession* session) {
    bool broken = false;
    CheckpointOptions options{.uri = folder};
    State state;
    options.before_save = [&] {
      state.counter = 77;  // in time for this very save
      return broken && session->rank() == 1 ? absl::InternalError("no residual") : absl::OkStatus();
    };
    auto checkpointer =
        OpenCheckpointer(session, options, EnvironmentOf({.world_size = 2}), &OpenDirectoryStore);
    ASSERT_TRUE(checkpointer.ok() && Register(checkpointer->get(), &state).ok());
    ASSERT_TRUE((*checkpointer)->Save(1).ok() && (*checkpointer)->Wait(kLong).ok());
    broken = true;
    const absl::Status refused = (*checkpointer)->Save(2).status();
    EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("no residual"))
        << "rank " << session->rank();
    broken = false;
    ASSERT_TRUE((*checkpointer)->Save(3).ok() && (*checkpointer)->Wait(kLong).ok());
    state.counter = 0;
    const auto restored = (*checkpointer)->Restore();
    ASSERT_TRUE(restored.ok() && *restored);
    EXPECT_EQ((*restored)->step, 3);
    EXPECT_EQ(state.counter, 77);
  });
}

}  // namespace
}  // namespace gtrain::ckpt
