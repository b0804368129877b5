// Tests what the head passes on and tells of actors, which it does not know.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/head_test_world.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::SizeIs;

class ActorQueriesTest : public HeadTestWorld {};

TEST_F(ActorQueriesTest, ActorsAreAskedForAndTheirAnswerIsNotRead) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromClient(ClientActors{job, 0, "{\"limit\":2}"}, "actors");
  ASSERT_THAT(Sent<AgentQuery>(), SizeIs(1));
  const AgentQuery query = Sent<AgentQuery>()[0].second;
  EXPECT_EQ(query.kind, AgentQuery::Kind::kActors);
  EXPECT_THAT(query.argv, ElementsAre("{\"limit\":2}"));
  FromNode("1", AgentAnswer{query.query, true, "any text", 0, true});
  const auto reply = std::find_if(sent_.begin(), sent_.end(), [](const Effect& e) {
    const auto* r = std::get_if<ReplyToClient>(&e);
    return r != nullptr && r->reply.id == "actors";
  });
  ASSERT_NE(reply, sent_.end());
  const json document = json::parse(std::get<ReplyToClient>(*reply).reply.json);
  EXPECT_EQ(document.at("text"), "any text");
  EXPECT_EQ(document.at("hostname"), "host-1");
  EXPECT_FALSE(FromClient(ClientActors{job, 7, "{}"}).ok) << "there is no rank 7";
}

// What became of an actor is an event; a flood of them is a few events and a count.
TEST_F(ActorQueriesTest, WhatBecomesOfActorsIsToldAndBounded_B1) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  for (int i = 0; i < 1000; ++i)
    FromNode("1", AgentNote{job, {1}, 0, kActorsNote, absl::StrCat("Shard ", i, " threw")});
  const std::vector<std::string> told = Events(job, "actors");
  ASSERT_FALSE(told.empty());
  EXPECT_EQ(told[0], "rank 0 on host-1: Shard 0 threw");
  EXPECT_LT(told.size(), 100u);
}

}  // namespace
}  // namespace gtrain::core
