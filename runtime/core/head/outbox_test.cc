#include "runtime/core/head/outbox.h"

#include <gtest/gtest.h>

namespace gtrain::core {
namespace {

RecordWrite Job(const char* id, uint64_t generation) {
  JobRecord job;
  job.id = JobId(id);
  job.generation = {generation};
  return {KeyOf(job), job};
}

Effect Start(const char* node, const char* job, uint64_t generation) {
  GenerationGrant grant;
  grant.job = JobId(job);
  grant.generation = {generation};
  return SendToNode{NodeId(node), SendKind::kGrant, StartGeneration{{1}, grant}};
}

Effect Revoked(const char* node, const char* job, uint64_t generation) {
  Revoke revoke;
  revoke.job = JobId(job);
  revoke.generation = {generation};
  return SendToNode{NodeId(node), SendKind::kNow, revoke};
}

Effect Reply(const char* id) { return ReplyToClient{"route", ClientReply{id}}; }

TEST(Outbox, NothingToWriteMeansAtOnce) {
  Outbox box;
  EXPECT_EQ(box.Add({{Reply("a")}, ""}).size(), 1u);
  EXPECT_FALSE(box.NextBatch().has_value());
  EXPECT_TRUE(box.Idle());
}

TEST(Outbox, GrantLeavesOnlyWhenItsRecordIsDurable) {
  Outbox box;
  EXPECT_TRUE(box.Add({{Persist{{Job("j", 1)}}, Start("n", "j", 1)}, ""}).empty());
  const auto batch = box.NextBatch();
  ASSERT_TRUE(batch.has_value());
  EXPECT_EQ(batch->writes.size(), 1u);
  EXPECT_FALSE(box.NextBatch().has_value()) << "one batch at a time";
  EXPECT_EQ(box.Durable(batch->sequence), std::vector<Effect>({Start("n", "j", 1)}));
  EXPECT_TRUE(box.Idle());
}

TEST(Outbox, PromiseBeforeItsPersistInTheSameStepWaitsToo) {
  Outbox box;
  EXPECT_TRUE(box.Add({{Reply("a"), Persist{{Job("j", 1)}}}, ""}).empty());
}

TEST(Outbox, RevokePassesASlowDiskAndDropsTheGrantItCovers) {
  Outbox box;
  box.Add({{Persist{{Job("j", 2)}}, Start("n", "j", 2), Start("m", "j", 2), Start("n", "k", 2)}, ""});
  const auto batch = box.NextBatch();
  EXPECT_EQ(box.Add({{Revoked("n", "j", 2)}, ""}), std::vector<Effect>({Revoked("n", "j", 2)}));
  EXPECT_EQ(box.stats().grants_dropped, 1u);
  EXPECT_EQ(box.Durable(batch->sequence), std::vector<Effect>({Start("m", "j", 2), Start("n", "k", 2)}));
}

TEST(Outbox, RevokeOfAnOlderGenerationLeavesANewerGrantAlone) {
  Outbox box;
  box.Add({{Persist{{Job("j", 3)}}, Start("n", "j", 3)}, ""});
  const auto batch = box.NextBatch();
  box.Add({{Revoked("n", "j", 2)}, ""});
  EXPECT_EQ(box.Durable(batch->sequence).size(), 1u);
}

TEST(Outbox, ReadsWaitForTheStateTheyWereComputedFrom) {
  Outbox box;
  box.Add({{Persist{{Job("j", 1)}}}, ""});
  const auto first = box.NextBatch();
  EXPECT_TRUE(box.Add({{Reply("read")}, ""}).empty());
  box.Add({{Persist{{Job("j", 2)}}}, ""});
  EXPECT_TRUE(box.Add({{Reply("later read")}, ""}).empty());
  EXPECT_EQ(box.Durable(first->sequence), std::vector<Effect>({Reply("read")}));
  const auto second = box.NextBatch();
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(box.Durable(second->sequence), std::vector<Effect>({Reply("later read")}));
}

TEST(Outbox, WritesMergeWhileABatchIsOutAndTheLastOneWins) {
  Outbox box;
  box.Add({{Persist{{Job("j", 1)}}}, ""});
  const auto first = box.NextBatch();
  for (uint64_t g = 2; g <= 5; ++g) box.Add({{Persist{{Job("j", g)}}}, ""});
  box.Add({{Persist{{{"request/a/b", std::nullopt}}}}, ""});
  box.Durable(first->sequence);
  const auto second = box.NextBatch();
  ASSERT_EQ(second->writes.size(), 2u);
  EXPECT_EQ(second->writes[0], Job("j", 5));
  EXPECT_FALSE(second->writes[1].record.has_value());
  EXPECT_EQ(box.stats().writes_merged, 3u);
}

// A loss and the grant that follows are one commit, unless something else is stored meanwhile.
TEST(Outbox, WhatMayWaitIsStoredWithWhatMayNot) {
  Outbox box;
  EXPECT_FALSE(box.MayWait());
  box.Add({{Persist{{Job("j", 1)}}, Reply("a")}, "", /*may_wait=*/true});
  EXPECT_TRUE(box.MayWait());
  box.Add({{Reply("b")}, ""});
  EXPECT_TRUE(box.MayWait()) << "it stores nothing";
  box.Add({{Persist{{Job("j", 2)}}, Start("n", "j", 2)}, ""});
  EXPECT_FALSE(box.MayWait());
  const auto batch = box.NextBatch();
  ASSERT_TRUE(batch);
  EXPECT_EQ(batch->writes, std::vector<RecordWrite>({Job("j", 2)}));
  EXPECT_EQ(box.Durable(batch->sequence), std::vector<Effect>({Reply("a"), Reply("b"), Start("n", "j", 2)}));
  box.Add({{Persist{{Job("j", 3)}}}, "", /*may_wait=*/true});
  EXPECT_TRUE(box.MayWait()) << "the next one may again";
  box.Add({{Persist{{}, {AuditEntry{}}}}, "", /*may_wait=*/true});
  EXPECT_FALSE(box.MayWait()) << "what a person did is written before it is done";
}

TEST(Outbox, OrderOfPromisesIsKept) {
  Outbox box;
  box.Add({{Persist{{Job("j", 1)}}, Reply("1"), Start("n", "j", 1), Reply("2")}, ""});
  const auto batch = box.NextBatch();
  EXPECT_EQ(box.Durable(batch->sequence), std::vector<Effect>({Reply("1"), Start("n", "j", 1), Reply("2")}));
}

// H3: the disk is full, and its batch waits.
TEST(Outbox, AnswersDoNotWaitForAFullDisk) {
  Outbox box;
  EXPECT_TRUE(box.Add({{Persist{{Job("j", 1)}}, Reply("a"), EmitEvent{}, Reply("b")}, ""}).empty());
  const auto batch = box.NextBatch();
  ASSERT_TRUE(batch.has_value());
  EXPECT_EQ(box.TakeAnswers(), std::vector<Effect>({Reply("a"), Reply("b")}));
  EXPECT_TRUE(box.TakeAnswers().empty());
  EXPECT_EQ(box.Durable(batch->sequence), std::vector<Effect>({EmitEvent{}})) << "it waited";
}

// H3: "it is done, but not stored" of a request that was stored before would make its client give up.
TEST(Outbox, OnAFullDiskOnlyWhatIsNotStoredIsSaidToBeSo) {
  Outbox box;
  const auto change = [](const std::string& id) {
    return ReplyToClient{"route", ClientReply{.id = id, .ok = true}, true, nullptr, "client"};
  };
  const auto stored = [](const std::string& id) {
    const RequestRecord record{"client", id, 1, ClientReply{.id = id, .ok = true}};
    return RecordWrite{KeyOf(record), record};
  };
  const auto not_stored = [&box] {
    std::vector<std::string> ids;
    for (const Effect& effect : box.TakeAnswers()) {
      const auto& reply = std::get<ReplyToClient>(effect);
      if (reply.changes) ids.push_back(reply.reply.id);
    }
    return ids;
  };
  box.Add({{Persist{{stored("old")}}, change("old")}, ""});
  box.Durable(box.NextBatch()->sequence);
  box.Add({{Persist{{stored("with the disk")}}, change("with the disk")}, ""});
  const auto batch = box.NextBatch();
  box.Add({{change("old"), change("with the disk")}, ""});
  box.Add({{Persist{{stored("behind")}}, change("behind")}, ""});
  EXPECT_EQ(not_stored(), std::vector<std::string>({"with the disk", "with the disk", "behind"}));
  box.Durable(batch->sequence);
  box.Add({{change("with the disk"), change("behind")}, ""});
  EXPECT_EQ(not_stored(), std::vector<std::string>({"behind"}));
}

}  // namespace
}  // namespace gtrain::core
