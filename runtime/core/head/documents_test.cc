// Tests the sources of answers to readers: documents that are built elsewhere, tails that were spilled.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "runtime/core/head/head_test_world.h"

namespace gtrain::core {
namespace {

using nlohmann::json;
using ::testing::SizeIs;

class HeadDocumentsTest : public HeadTestWorld {
 protected:
  HeadDocumentsTest() { config_.tails_bytes_max = 4'000; }

  // The reply that the step itself made to a request.
  ReplyToClient Asked(ClientRequestBody body) {
    const StepResult step = head_->Step(
        PeerMessage{{Role::kUser, "user1"},
                    "client",
                    "10.0.0.9",
                    ClientRequest{absl::StrCat("asked-", ++requests_), absl::Seconds(5), std::move(body)}},
        clock_.Now());
    for (const Effect& effect : step.effects) {
      if (const auto* reply = std::get_if<ReplyToClient>(&effect)) return *reply;
    }
    ADD_FAILURE() << "no reply";
    return {};
  }
  JobId Run(const std::string& spec) {
    const JobId job = Submit(spec);
    StartRanks(job);
    return job;
  }
  json Logs(const JobId& job, int rank) {
    return json::parse(FromClient(ClientLogs{.job = job, .rank = rank}).json);
  }
};

// 4,000 ranks are much text, for each reader, during which nobody's heartbeat would be answered.
TEST_F(HeadDocumentsTest, NoStepBuildsTheTextOfADocument) {
  Hello("1");
  const JobId job = Run("train 2 2");
  for (const ClientRequestBody& body :
       std::vector<ClientRequestBody>{ClientStatus{job}, ClientStatus{}, ClientNodes{}, ClientWhy{job}}) {
    const ReplyToClient reply = Asked(body);
    EXPECT_TRUE(reply.reply.ok);
    EXPECT_EQ(reply.reply.json, "") << body.index();
    EXPECT_EQ(reply.client_key, "user1");
    ASSERT_NE(reply.document, nullptr) << body.index();
    EXPECT_FALSE(json::parse(reply.document->Json()).empty());
    EXPECT_EQ(Built(reply).json, reply.document->Json());
    EXPECT_EQ(Built(reply).id, reply.reply.id);
  }
}

TEST_F(HeadDocumentsTest, ADocumentIsOfTheMomentInWhichItWasAsked) {
  Hello("1");
  const JobId job = Run("train 2 2 budget0");
  FromNode("1", AgentHeartbeat{1, {Step(job, 1, 0, 7), Step(job, 1, 1, 7)}, {}});
  const ReplyToClient before = Asked(ClientStatus{job}), nodes = Asked(ClientNodes{}),
                      why = Asked(ClientWhy{job});
  const std::string text = before.document->Json(), nodes_text = nodes.document->Json(),
                    why_text = why.document->Json();
  FromNode("1", RankExited{Exit(job, 1, 0, 3)});
  FromNode("1", GenerationGone{job, {1}, true, ""});
  Hello("2");
  ASSERT_EQ(State(job), "FAILED");
  EXPECT_EQ(before.document->Json(), text);
  EXPECT_EQ(json::parse(text).at("jobs").at(0).at("state"), "RUNNING");
  EXPECT_EQ(json::parse(text).at("jobs").at(0).at("ranks").at(1).at("step"), 7);
  EXPECT_EQ(nodes.document->Json(), nodes_text);
  EXPECT_THAT(json::parse(nodes_text).at("nodes"), SizeIs(1));
  EXPECT_EQ(why.document->Json(), why_text);
}

// Who reads 0 and kills it kills the processes of his own group.
TEST_F(HeadDocumentsTest, APidThatIsNotKnownIsNull) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  EXPECT_TRUE(Status(job).at("ranks").at(0).at("pid").is_null());
  StartRanks(job);
  EXPECT_GT(Status(job).at("ranks").at(0).at("pid"), 0);
}

// By then the number may be that of another process.
TEST_F(HeadDocumentsTest, NoPidsAreToldOfAJobThatIsOver) {
  Hello("1");
  const JobId job = Run("train 2 2 budget0");
  EXPECT_TRUE(Status(job).at("ranks").at(0).contains("pid"));
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  FromNode("1", RankExited{Exit(job, 1, 1, 0)});
  ASSERT_EQ(State(job), "SUCCEEDED");
  EXPECT_FALSE(Status(job).at("ranks").at(0).contains("pid"));
  EXPECT_EQ(Status(job).at("ranks").at(0).at("exit_code"), 0);
}

// A machine that comes back as another one is told as that one.
TEST_F(HeadDocumentsTest, NodesAreToldAsTheyAreNow) {
  Hello("1", 4);
  EXPECT_EQ(json::parse(FromClient(ClientNodes{}).json).at("nodes").at(0).at("cpus"), 4);
  Hello("1", 8, {}, "2");
  EXPECT_EQ(json::parse(FromClient(ClientNodes{}).json).at("nodes").at(0).at("cpus"), 8);
  const JobId job = Run("train 3 3");
  const json node = json::parse(FromClient(ClientNodes{}).json).at("nodes").at(0);
  EXPECT_EQ(node.at("cpus_free"), 5);
  EXPECT_EQ(node.at("jobs"), json::array({job.value}));
}

// The hardware threads as the machine counts them, of which its agent has 8 to 11; ports as the ranks' agent
// told them.
TEST_F(HeadDocumentsTest, WhatARankIsBoundToIsToldOfOneJobAndWhereItIsAskedFor) {
  AgentHello hello;
  hello.cluster = ClusterId("c");
  hello.incarnation = Incarnation("1");
  hello.hostname = "host-1";
  hello.address = "10.0.0.1";
  hello.inventory.cpus = 4;
  hello.inventory.memory_bytes = uint64_t{8} << 30;
  hello.inventory.cpu_infos = {{8, 0}, {10, 0}, {9, 1}, {11, 1}};
  hello.inventory.gpus = {{"GPU-0", "A100", 0, 0, "pci0000:15/0000:18:00.0"}, {"GPU-1", "A100", 0, 1, ""}};
  hello.inventory.network = {{{.name = "mlx5_0:1",
                               .unusable = "its port is DOWN",
                               .interfaces = {"ib0"},
                               .mbit_s = 400'000,
                               .numa = 1,
                               .pci_path = "pci0000:15/0000:19:00.0"},
                              {.name = "rdmap0:1", .kind = NicKind::kEfa}},
                             {{"eth0", {"10.0.0.1"}}}};
  FromNode("1", hello);
  const JobId job = Submit("train 2 2 bound2");
  StartRanks(job);
  RankStatus status = Step(job, 1, 1, 3);
  status.nics = "mlx5_0:1,mlx5_1:1";
  FromNode("1", AgentHeartbeat{1, {status}, {}});
  const json ranks = Status(job).at("ranks");
  EXPECT_EQ(ranks.at(0).at("cpus"), json::array({8, 10}));
  EXPECT_EQ(ranks.at(0).at("numa"), json::array({0}));
  EXPECT_EQ(ranks.at(0).at("gpus"), json::array({0}));
  EXPECT_EQ(ranks.at(0).at("nics"), json::array());
  EXPECT_EQ(ranks.at(1).at("cpus"), json::array({9, 11}));
  EXPECT_EQ(ranks.at(1).at("numa"), json::array({1}));
  EXPECT_EQ(ranks.at(1).at("gpus"), json::array({1}));
  EXPECT_EQ(ranks.at(1).at("nics"), json::array({"mlx5_0:1", "mlx5_1:1"}));

  const auto listed = [this](bool places) {
    const ClientReply reply = FromClient(ClientStatus{JobId(), 0, places});
    return json::parse(reply.json).at("jobs").at(0).at("ranks").at(1);
  };
  EXPECT_FALSE(listed(false).contains("nics")) << "a list that is asked for each second";
  EXPECT_EQ(listed(true), ranks.at(1));

  const json node = json::parse(FromClient(ClientNodes{}).json).at("nodes").at(0);
  EXPECT_EQ(node.at("gpus").at(0).at("pci"), "0000:18:00.0");
  EXPECT_EQ(node.at("gpus").at(1).at("pci"), "");
  EXPECT_EQ(node.at("nics").at(0), (json{{"name", "mlx5_0:1"},
                                         {"kind", "infiniband"},
                                         {"unusable", "its port is DOWN"},
                                         {"interfaces", {"ib0"}},
                                         {"gb_s", 50.0},
                                         {"numa", 1},
                                         {"pci", "0000:19:00.0"}}));
  EXPECT_EQ(node.at("nics").at(1).at("kind"), "efa");
  EXPECT_EQ(node.at("interfaces").at(0), (json{{"name", "eth0"}, {"addresses", {"10.0.0.1"}}}));
}

// Many clients may wait for the same event, and the many events of a stall are too much for the loop to
// build.
TEST_F(HeadDocumentsTest, FewEventsAreBuiltAtOnce) {
  Hello("1");
  const JobId job = Run("train 1 1");
  const ReplyToClient few = Asked(ClientEvents{job, 0, absl::ZeroDuration()});
  EXPECT_EQ(few.document, nullptr);
  EXPECT_FALSE(json::parse(few.reply.json).at("events").empty());
  for (int i = 0; i < 20; ++i) FromNode("1", AgentNote{job, {1}, 0, "note", std::string(5'000, 'n')});
  const ReplyToClient many = Asked(ClientEvents{job, 0, absl::ZeroDuration()});
  EXPECT_EQ(many.reply.json, "");
  ASSERT_NE(many.document, nullptr);
  EXPECT_GT(json::parse(many.document->Json()).at("events").size(), 20u);
}

TEST_F(HeadDocumentsTest, TailsThatDidNotFitAreFoundWhenTheNodeIsLost) {
  Hello("1", 16);
  const JobId noisy = Run("noisy 8 8"), quiet = Run("quiet 1 1");
  FromNode("1", LogTail{quiet, {1}, 0, false, 6, "quiet\n"});
  std::vector<std::string> said(8);
  for (int second = 0; second < 40; ++second) {
    for (int rank = 0; rank < 8; ++rank) {
      const std::string line = absl::StrCat("rank ", rank, " second ", second, " and what it says\n");
      said[rank] += line;
      FromNode("1", LogTail{noisy, {1}, rank, false, said[rank].size(), line, static_cast<uint64_t>(second)});
    }
  }
  EXPECT_FALSE(spilled_.empty());
  for (const auto& [tail, text] : spilled_) EXPECT_EQ(tail.job, noisy);
  Pass(absl::Seconds(62), {});
  for (int rank = 0; rank < 8; ++rank) {
    const json logs = Logs(noisy, rank);
    EXPECT_EQ(logs.at("text"), said[rank]);
    EXPECT_EQ(logs.at("next_offset"), said[rank].size());
    EXPECT_EQ(logs.at("mirrored"), true);
  }
  EXPECT_EQ(Logs(quiet, 0).at("text"), "quiet\n");
  const ClientReply none = FromClient(ClientLogs{.job = quiet, .rank = 0, .is_stderr = true});
  EXPECT_FALSE(none.ok);
  EXPECT_THAT(none.error, ::testing::HasSubstr("not connected"));
}

TEST_F(HeadDocumentsTest, AHeadSaysThatItJoinsPieces) {
  Hello("1");
  ASSERT_THAT(Sent<AgentWelcome>(), SizeIs(1));
  EXPECT_TRUE(Sent<AgentWelcome>()[0].second.joins_pieces);
}

// Tails would pile up for as long as the disk of the store is slow.
TEST_F(HeadDocumentsTest, WhatIsSpilledWaitsForNoDisk) {
  Hello("1", 16);
  const JobId job = Run("noisy 8 8");
  disk_works_ = false;
  FromClient(ClientSubmit{"another 1 1", {}, "/runs/{job}"});
  for (int rank = 0; rank < 8; ++rank)
    FromNode("1", LogTail{job, {1}, rank, false, 900, std::string(900, 'x')});
  EXPECT_FALSE(spilled_.empty());
}

TEST_F(HeadDocumentsTest, TailsGoWithTheirJob) {
  config_.jobs_max = 1;
  Boot();
  Hello("1", 16);
  const JobId job = Run("noisy 8 8");
  for (int rank = 0; rank < 8; ++rank)
    FromNode("1", LogTail{job, {1}, rank, false, 900, std::string(900, 'x')});
  ASSERT_FALSE(spilled_.empty());
  FromClient(ClientStop{job, true});
  FromNode("1", GenerationGone{job, {1}, true, ""});
  Submit("next 1 1");
  EXPECT_TRUE(spilled_.empty());
}

// The next head must be able to write the result, should this one die before it has.
TEST_F(HeadDocumentsTest, AResultIsTheSameForTheNextHead) {
  Hello("1");
  const JobId job = Run("train 2 2");
  EXPECT_THAT(head_->Finished(), SizeIs(0));
  EXPECT_EQ(head_->ResultOf(job), std::nullopt);
  Pass(absl::Seconds(30), {"1"});
  AgentHeartbeat beat;
  for (int rank : {0, 1}) {
    beat.changed.push_back(StepOf(job, rank, 120));
    beat.changed.back().loss = 0.5;
  }
  FromNode("1", beat);
  for (int rank : {0, 1}) FromNode("1", RankExited{Exit(job, 1, rank, 0)});
  ASSERT_EQ(State(job), "SUCCEEDED");
  const auto written = std::ranges::find_if(
      sent_, [](const Effect& effect) { return std::holds_alternative<WriteResult>(effect); });
  ASSERT_NE(written, sent_.end());
  const json first = json::parse(std::get<WriteResult>(*written).document->Json());
  EXPECT_EQ(first.at("state"), "SUCCEEDED");
  EXPECT_EQ(first.at("step"), 120);
  EXPECT_EQ(first.at("loss"), 0.5);
  EXPECT_GE(first.at("run_seconds"), 30);
  EXPECT_LT(first.at("submitted"), first.at("ended"));
  Boot();
  ASSERT_THAT(head_->Finished(), SizeIs(1));
  const json later = json::parse(head_->ResultOf(job)->document->Json());
  for (const char* key : {"state", "reason", "step", "loss", "submitted", "started", "ended", "run_seconds",
                          "exit_code", "restarts", "run_dir", "user"})
    EXPECT_EQ(later.at(key), first.at(key)) << key;
}

}  // namespace
}  // namespace gtrain::core
