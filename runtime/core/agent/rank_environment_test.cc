// Tests what a rank finds when it starts: its environment, its command, its GPUs.
#include "runtime/core/agent/rank_environment.h"

#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/core/agent/agent_test_world.h"

namespace gtrain::core {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(AgentCoreTest, AnotherPythonThanTheClientsIsSaidOnce) {
  spec_.run = {"python3", "train.py"};
  Welcome();
  GenerationGrant grant = Grant(1, 2, 2);
  grant.client_env = {{"GTRAIN_CLIENT_PYTHON", "/venv/bin/python3"}};
  Step(FromHead{StartGeneration{{5}, grant}});
  const auto notes = Sent<AgentNote>();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(notes[0].kind, "warning");
  EXPECT_EQ(notes[0].rank, -1);
  EXPECT_THAT(notes[0].text,
              HasSubstr("python3 is /own/bin/python3 here and was /venv/bin/python3 where the job was"));

  grant.job = JobId("train-2");
  grant.client_env = {{"GTRAIN_CLIENT_PYTHON", "/venv/bin/python3"}, {"PATH", "/venv/bin"}};
  Step(FromHead{StartGeneration{{5}, grant}});
  EXPECT_THAT(Sent<AgentNote>(), IsEmpty());
  EXPECT_EQ(EnvOf(Commands<keeper::StartRank>()[0])["GTRAIN_CLIENT_PYTHON"], "/venv/bin/python3");
}

TEST_F(AgentCoreTest, EnvironmentTable) {
  spec_.env = {{"LR", "0.1"}, {"LD_PRELOAD", "/evil.so"}};
  spec_.secrets["A"] = {"FROM_AGENT", ""};
  spec_.secrets["B"] = {"", "/secret"};
  spec_.checkpoint.uri = "/ckpt";
  spec_.checkpoint.every_steps = 200;
  spec_.comm = {true,
                {{.codec = "topk", .density = 1'000, .warmup = 50, .residual = "bf16"},
                 {.codec = "onebit"},
                 {.codec = "powersgd", .rank = 2}}};
  Welcome();
  GenerationGrant grant = Grant(7, 2, 3);
  grant.client_env = {
      {"PATH", "/client/bin"}, {"LD_PRELOAD", "/evil.so"}, {"RANK", "99"}, {"OMP_PROC_BIND", "1"}};
  grant.resume = "fresh";
  grant.newest = CheckpointReport{kJob, {6}, {3}, 40, "/ckpt/manifests/step-40.json", ""};
  grant.takeover = true;
  grant.live_jobs = {JobId("other-9"), JobId("other-2")};
  Step(FromHead{StartGeneration{{5}, grant}});
  const auto starts = Commands<keeper::StartRank>();
  ASSERT_EQ(starts.size(), 2u);
  auto env = EnvOf(starts[1]);
  const std::map<std::string, std::string> expected = {
      {"RANK", "1"},
      {"LOCAL_RANK", "1"},
      {"WORLD_SIZE", "3"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"GROUP_RANK", "0"},
      {"GROUP_WORLD_SIZE", "2"},
      {"NODE_RANK", "0"},
      {"ROLE_RANK", "1"},
      {"ROLE_WORLD_SIZE", "3"},
      {"ROLE_NAME", "default"},
      {"MASTER_ADDR", "10.0.0.1"},
      {"MASTER_PORT", "23456"},
      {"TORCHELASTIC_RUN_ID", "train-1"},
      {"TORCHELASTIC_RESTART_COUNT", "2"},
      {"TORCHELASTIC_MAX_RESTARTS", "10"},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"OMP_NUM_THREADS", "1"},
      {"PYTHONUNBUFFERED", "1"},
      {"JAX_COORDINATOR_ADDRESS", "10.0.0.1:23456"},
      {"OMPI_COMM_WORLD_RANK", "1"},
      {"OMPI_COMM_WORLD_SIZE", "3"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"OMPI_COMM_WORLD_NODE_RANK", "0"},
      {"GTRAIN_JOB", "train-1"},
      {"GTRAIN_JOB_NAME", "train"},
      {"GTRAIN_JOB_HASH", "hash"},
      {"GTRAIN_CLUSTER", "c1"},
      {"GTRAIN_NODE", kMe.value},
      {"GTRAIN_GENERATION", "7"},
      {"GTRAIN_TIMELINE", "3"},
      {"GTRAIN_MEMBERS", "/run/ranks/generation-7/members-0.json"},
      {"GTRAIN_REPORT", "/run/ranks/generation-7/rank-1.report"},
      {"GTRAIN_NOTICE_FILE", "/run/ranks/generation-7/rank-1.notice"},
      {"GTRAIN_CHECKPOINT_URI", "/ckpt"},
      {"GTRAIN_CHECKPOINT_EVERY", "200 steps"},
      {"GTRAIN_CHECKPOINT_KEEP", "3"},
      {"GTRAIN_CHECKPOINT_MAX_ROLLBACK", "1"},
      {"GTRAIN_CHECKPOINT_NEWEST", "/ckpt/manifests/step-40.json"},
      {"GTRAIN_CHECKPOINT_ON_ERROR", "warn"},
      {"GTRAIN_CHECKPOINT_VERIFY_REPLICAS", "every 100"},
      {"GTRAIN_LIVE_JOBS", "other-9,other-2"},
      {"GTRAIN_TAKEOVER", "1"},
      {"GTRAIN_COMPRESSION", "auto: topk density=0.001 warmup=50 residual=bf16, onebit, powersgd rank=2"},
      {"GTRAIN_RESUME", "fresh"},
      {"GTRAIN_RUN_DIR", "/run"},
      {"GTRAIN_TOKEN", starts[1].token},
      {"LR", "0.1"},
      {"PATH", "/client/bin"},
      {"HOME", "/home/me"},
      {"OMP_PROC_BIND", "1"},
      {"A", "agent-secret"},
      {"B", "file-secret"}};
  EXPECT_EQ(env, expected);
  EXPECT_NE(starts[0].token, starts[1].token);
  EXPECT_EQ(starts[1].token.size(), 32u);
  EXPECT_EQ(starts[1].out_path, "/run/logs/generation-7/rank-1.out");
  EXPECT_EQ(starts[1].cwd, "/work");
  EXPECT_EQ(starts[1].argv, (std::vector<std::string>{"python", "train.py"}));
}

TEST_F(AgentCoreTest, AReadOnlyJobAndOneWithLittleMemoryAreToldSo_C12) {
  const auto env_of = [&](uint64_t generation) {
    Step(FromHead{Revoke{{5}, kJob, {generation - 1}, EndMode::kReform, absl::Seconds(1), "next"}});
    StartIt(generation, 1, 1);
    return EnvOf(Commands<keeper::StartRank>()[0]);
  };
  auto env = env_of(7);
  EXPECT_FALSE(env.contains("GTRAIN_CHECKPOINT_READ_ONLY") || env.contains("GTRAIN_CHECKPOINT_MEMORY_MAX"));
  spec_.checkpoint = {.uri = "/ckpt", .memory_max = 1 << 30, .read_only = true};
  env = env_of(8);
  EXPECT_EQ(env["GTRAIN_CHECKPOINT_READ_ONLY"], "1");
  EXPECT_EQ(env["GTRAIN_CHECKPOINT_MEMORY_MAX"], "1073741824");
}

TEST_F(AgentCoreTest, ADeterministicJobMeasuresNothingWhateverElseItSaysOfTheAlgorithm) {
  const auto word_of = [&](uint64_t generation, bool deterministic, const std::string& said) {
    spec_.comm.deterministic = deterministic;
    spec_.env["GTRAIN_COMM_ALGO"] = said;
    if (said.empty()) spec_.env.erase("GTRAIN_COMM_ALGO");
    Step(FromHead{Revoke{{5}, kJob, {generation - 1}, EndMode::kReform, absl::Seconds(1), "next"}});
    StartIt(generation, 1, 1);
    const auto env = EnvOf(Commands<keeper::StartRank>()[0]);
    const auto found = env.find("GTRAIN_COMM_ALGO");
    return found == env.end() ? "none" : found->second;
  };
  EXPECT_EQ(word_of(7, false, ""), "none");
  EXPECT_EQ(word_of(8, true, ""), "deterministic");
  EXPECT_EQ(word_of(9, true, "ring"), "ring+deterministic");
  EXPECT_EQ(word_of(10, true, "ring+deterministic"), "ring+deterministic");
  EXPECT_EQ(word_of(11, false, "ring"), "ring");
}

TEST_F(AgentCoreTest, UserOmpThreadsStayAndSingleRankGetsNone) {
  spec_.env = {{"OMP_NUM_THREADS", "8"}};
  Welcome();
  StartIt(1, 2, 2);
  EXPECT_EQ(EnvOf(Commands<keeper::StartRank>()[0])["OMP_NUM_THREADS"], "8");
  spec_.env.clear();
  StartIt(2, 1, 1);
  EXPECT_EQ(EnvOf(Commands<keeper::StartRank>()[0]).count("OMP_NUM_THREADS"), 0u);
}

// Neither the shell that launches nor the ranks of the machine change how many threads add.
TEST_F(AgentCoreTest, ABitwiseJobHasTheThreadsOfItsFile) {
  spec_.virtual_ranks = 6;
  Welcome();
  uint64_t generation = 0;
  const auto env_of = [&](int ranks, int world) {
    ++generation;
    Step(FromHead{Revoke{{5}, kJob, {generation - 1}, EndMode::kReform, absl::Seconds(1), "next"}});
    GenerationGrant grant = Grant(generation, ranks, world);
    grant.client_env = {{"OMP_NUM_THREADS", "16"}, {"OMP_DYNAMIC", "TRUE"}, {"GTRAIN_VIRTUAL_RANKS", "9"}};
    Step(FromHead{StartGeneration{{5}, grant}});
    return EnvOf(Commands<keeper::StartRank>()[0]);
  };
  for (const int ranks : {1, 2}) {
    auto env = env_of(ranks, 2);
    EXPECT_EQ(env["GTRAIN_VIRTUAL_RANKS"], "6");
    for (const char* name :
         {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"})
      EXPECT_EQ(env[name], "1") << name;
    EXPECT_EQ(env["OMP_DYNAMIC"], "FALSE");
    EXPECT_EQ(env["MKL_DYNAMIC"], "FALSE");
  }
  spec_.resources.cpus = 4;
  EXPECT_EQ(env_of(2, 2)["MKL_NUM_THREADS"], "4");
  spec_.env = {{"OMP_NUM_THREADS", "3"}, {"OPENBLAS_NUM_THREADS", "2"}};
  auto env = env_of(2, 2);
  EXPECT_EQ(env["OMP_NUM_THREADS"], "3");
  EXPECT_EQ(env["MKL_NUM_THREADS"], "3");
  EXPECT_EQ(env["OPENBLAS_NUM_THREADS"], "2");
  spec_.env.clear();
  spec_.virtual_ranks = 0;
  env = env_of(1, 1);
  EXPECT_EQ(env["OMP_NUM_THREADS"], "16");
  EXPECT_FALSE(env.contains("GTRAIN_VIRTUAL_RANKS") || env.contains("MKL_NUM_THREADS"));
}

TEST_F(AgentCoreTest, ScriptAndSetupBecomeBash) {
  spec_.run.clear();
  spec_.script = "echo hi | cat";
  Welcome();
  StartIt(1, 1, 1);
  EXPECT_EQ(Commands<keeper::StartRank>()[0].argv,
            (std::vector<std::string>{"bash", "-euo", "pipefail", "-c", "echo hi | cat", "script"}));
  spec_.setup = "make";
  StartIt(2, 1, 1);
  const auto argv = Commands<keeper::StartRank>()[0].argv;
  ASSERT_GT(argv.size(), 6u);
  EXPECT_EQ(argv[0], "bash");
  EXPECT_EQ(argv[5], "make");
  EXPECT_EQ(argv.back(), "script");
}

class AgentGpuTest : public AgentCoreTest {
 protected:
  AgentGpuTest() {
    gpus_ = 4;
    core_ = AgentCore(Config());
  }
  std::string Visible(const keeper::StartRank& start) { return EnvOf(start)["CUDA_VISIBLE_DEVICES"]; }
};

TEST_F(AgentGpuTest, OwnGpuIsAtIndexLocalRank) {
  Welcome();
  GenerationGrant grant = Grant(1, 2, 2);
  grant.ranks[0].gpus = {3, 0};
  grant.ranks[1].gpus = {1, 2};
  Step(FromHead{StartGeneration{{5}, grant}});
  const auto starts = Commands<keeper::StartRank>();
  EXPECT_EQ(Visible(starts[0]), "GPU-3,GPU-1,GPU-0,GPU-2");
  EXPECT_EQ(Visible(starts[1]), "GPU-3,GPU-1,GPU-0,GPU-2");
}

TEST_F(AgentGpuTest, VisibleRankShowsOnlyItsOwn) {
  spec_.resources.visible_node = false;
  Welcome();
  GenerationGrant grant = Grant(1, 2, 2);
  grant.ranks[0].gpus = {2};
  grant.ranks[1].gpus = {0};
  Step(FromHead{StartGeneration{{5}, grant}});
  EXPECT_EQ(Visible(Commands<keeper::StartRank>()[0]), "GPU-2");
  EXPECT_EQ(Visible(Commands<keeper::StartRank>()[1]), "GPU-0");
}

// An index into a list of one would be out of it, and CUDA takes no GPU twice.
TEST_F(AgentGpuTest, WhoSharesAGpuSeesItAlone) {
  spec_.resources.gpu_share = 500;
  Welcome();
  GenerationGrant grant = Grant(1, 3, 3);
  grant.ranks[0].gpus = {2};
  grant.ranks[1].gpus = {2};
  grant.ranks[2].gpus = {0};
  Step(FromHead{StartGeneration{{5}, grant}});
  const auto starts = Commands<keeper::StartRank>();
  EXPECT_EQ(Visible(starts[0]), "GPU-2");
  EXPECT_EQ(Visible(starts[1]), "GPU-2");
  EXPECT_EQ(Visible(starts[2]), "GPU-0");
}

// CUDA uses the first instance that a process sees.
TEST_F(AgentGpuTest, WhoHasAnInstanceSeesItAlone) {
  AgentConfig config = Config();
  for (size_t i = 0; i < config.inventory.gpus.size(); ++i)
    config.inventory.gpus[i].uuid = absl::StrCat(i == 3 ? "GPU-" : "MIG-", i);
  core_ = AgentCore(config);
  Welcome();
  GenerationGrant grant = Grant(1, 3, 3);
  for (int i = 0; i < 3; ++i) grant.ranks[i].gpus = {i + 1};
  Step(FromHead{StartGeneration{{5}, grant}});
  const auto starts = Commands<keeper::StartRank>();
  EXPECT_EQ(Visible(starts[0]), "MIG-1");
  EXPECT_EQ(Visible(starts[1]), "MIG-2");
  EXPECT_EQ(Visible(starts[2]), "GPU-3") << "it would see MIG-1 alone";
}

TEST_F(AgentGpuTest, JobWithoutGpusSeesNone) {
  Welcome();
  StartIt(1, 1, 1);
  const auto env = EnvOf(Commands<keeper::StartRank>()[0]);
  ASSERT_EQ(env.count("CUDA_VISIBLE_DEVICES"), 1u);
  EXPECT_EQ(env.at("CUDA_VISIBLE_DEVICES"), "");
}

// With `visible: node` a process sees, its own first where it is the only one, also what it will use once it
// has a place.
TEST(VisibleGpusTest, WhoWaitsSeesItsOwn) {
  GenerationGrant grant;
  grant.ranks = {{.rank = 0, .local_rank = 0, .node = kMe, .gpus = {2}}};
  grant.waiting = {{.rank = 1, .local_rank = 1, .node = kMe, .gpus = {0}},
                   {.rank = 2, .local_rank = 0, .node = NodeId("fedcba9876543210"), .gpus = {3}}};
  EXPECT_EQ(VisibleGpus(grant, kMe), (std::vector<int>{2, 0}));
}

TEST_F(AgentCoreTest, MembersFileNamesEveryRank) {
  Welcome();
  StartIt(1, 1, 2);
  std::string data;
  for (const AgentEffect& effect : last_.effects) {
    if (const auto* file = std::get_if<WriteFile>(&effect)) data = file->data;
  }
  EXPECT_THAT(data, HasSubstr(R"("generation":1)"));
  EXPECT_THAT(data, HasSubstr(R"("address":"10.0.0.2")"));
  EXPECT_THAT(data, HasSubstr(R"("rank":1)"));
}

TEST(MembersJson, SaysTheOrderOfMachinesWhereItIsNotThatOfTheRanks) {
  GenerationGrant grant;
  grant.nodes = {{.node = NodeId("a")}, {.node = NodeId("b")}};
  grant.ranks = {{.rank = 0, .node = NodeId("a")}, {.rank = 1, .node = NodeId("b")}};
  EXPECT_THAT(MembersJson(grant), ::testing::Not(HasSubstr("fabric_order")));
  grant.nodes[0].fabric_order = 1;
  EXPECT_THAT(MembersJson(grant), HasSubstr(R"("fabric_order":1)"));
  EXPECT_THAT(MembersJson(grant), HasSubstr(R"("fabric_order":0)"));
}

}  // namespace
}  // namespace gtrain::core
