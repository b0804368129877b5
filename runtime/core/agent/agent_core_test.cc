#include "runtime/core/agent/agent_core.h"

#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/core/agent/agent_test_names.h"
#include "runtime/core/agent/rank_environment.h"
#include "runtime/core/agent/rank_reports.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/worker/worker_core.h"

namespace gtrain::core {
namespace {

using ::testing::Contains;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const NodeId kOther("00000000000000bb");
constexpr char kSealed[] = "bytes that only a newer head can read";

class AgentCoreTest : public ::testing::Test {
 protected:
  AgentCoreTest() : core_(Config()) {}

  AgentConfig Config() {
    AgentConfig config;
    config.cluster = ClusterId("c1");
    config.near_memory = "/dev/shm/gtrain-me";
    config.near_bytes_max = 1000;
    config.node = kMe;
    config.hostname = "host-a";
    config.incarnation = Incarnation("boot-1");
    config.own_env = {{"GTRAIN_CHECKPOINT_READ_ONLY", "1"},  // of an outer launch
                      {"GTRAIN_CHECKPOINT_MEMORY_MAX", "1"}, {"PATH", "/own/bin"}, {"HOME", "/home/me"},
                      {"FROM_AGENT", "agent-secret"},        {"OTHER", "x"}};
    config.parse_spec = [this](absl::string_view text) -> absl::StatusOr<spec::JobSpec> {
      if (text != "spec") return absl::InvalidArgumentError("bad text");
      return spec_;
    };
    config.read_secret = [](const std::string& path) -> absl::StatusOr<std::string> {
      if (path == "/secret") return "file-secret";
      return absl::NotFoundError("no such file");
    };
    config.find_program = [](const std::string& name, const std::string& path) {
      return absl::StrCat(path, "/", name);
    };
    config.port_is_free = [this](const std::string&, int) { return port_free_; };
    config.job_hash = [](const spec::JobSpec&) { return "hash"; };
    config.unpack_grant = [this](const std::string& bytes) -> absl::StatusOr<GenerationGrant> {
      if (bytes != kSealed) return absl::InvalidArgumentError("not a grant");
      return Grant(1, 1, 1);
    };
    config.make_run_dir = [this](const std::string& run_dir, Generation generation) {
      made_.push_back(absl::StrCat(run_dir, " ", generation.value));
      return refuse_dir_;
    };
    config.too_many_ranks = [this](size_t ranks) -> std::string {
      return ranks > ranks_max_ ? absl::StrCat(ranks, " are too many") : "";
    };
    config.make_token = [this] { return std::string(30, 't') + absl::StrCat(10 + tokens_++); };
    for (int i = 0; i < gpus_; ++i) config.inventory.gpus.push_back({absl::StrCat("GPU-", i), "Fake"});
    return config;
  }

  // `local` ranks here, the others on another node.
  GenerationGrant Grant(uint64_t generation, int local, int world) {
    GenerationGrant grant;
    grant.job = kJob;
    grant.generation = {generation};
    grant.timeline = {3};
    grant.spec_text = "spec";
    grant.run_dir = "/run";
    grant.master_address = "10.0.0.1";
    grant.master_port = 23456;
    grant.world_size = world;
    grant.restart_count = 2;
    grant.nodes = {{kMe, "10.0.0.1", "host-a"}};
    if (world > local) grant.nodes.push_back({kOther, "10.0.0.2", "host-b"});
    for (int rank = 0; rank < world; ++rank) {
      RankPlace place;
      place.rank = rank;
      place.node = rank < local ? kMe : kOther;
      place.local_rank = rank < local ? rank : rank - local;
      grant.ranks.push_back(place);
    }
    return grant;
  }

  std::vector<AgentEffect> Step(const AgentEvent& event) {
    last_ = core_.Step(event, now_);
    return last_.effects;
  }
  void Advance(absl::Duration d) { now_ = now_ + d; }
  void Welcome(uint64_t epoch = 5) {
    Step(HeadUp{"10.0.0.1"});
    Step(FromHead{AgentWelcome{ClusterId("c1"), {epoch}, kMe, absl::Seconds(1), absl::Seconds(120)}});
  }
  void StartIt(uint64_t generation, int local, int world) {
    Step(FromHead{StartGeneration{{5}, Grant(generation, local, world)}});
  }
  void FromRank(int rank, const std::string& json, uint64_t id = 1, uint64_t generation = 1) {
    Step(FromKeeper{kJob, keeper::RelayUp{generation, rank, id, json}});
  }
  void Exit(int rank, int code, uint64_t generation = 1) {
    keeper::Exited exit;
    exit.generation = generation;
    exit.rank = rank;
    exit.code = code;
    exit.message = "exited";
    Step(FromKeeper{kJob, exit});
  }

  template <typename T>
  std::vector<T> Sent() const {
    std::vector<T> found;
    for (const AgentEffect& effect : last_.effects) {
      if (const auto* to_head = std::get_if<ToHead>(&effect)) {
        if (const T* message = std::get_if<T>(&to_head->message)) found.push_back(*message);
      }
    }
    return found;
  }
  template <typename T>
  std::vector<T> Commands() const {
    std::vector<T> found;
    for (const AgentEffect& effect : last_.effects) {
      if (const auto* to_keeper = std::get_if<ToKeeper>(&effect)) {
        if (const T* command = std::get_if<T>(&to_keeper->command)) found.push_back(*command);
      }
    }
    return found;
  }
  static std::map<std::string, std::string> EnvOf(const keeper::StartRank& start) {
    return {start.env.begin(), start.env.end()};
  }

  spec::JobSpec spec_ = [] {
    spec::JobSpec spec;
    spec.name = "train";
    spec.run = {"python", "train.py"};
    spec.workdir = "/work";
    return spec;
  }();
  bool port_free_ = true;
  std::vector<std::string> made_;
  absl::Status refuse_dir_;
  size_t ranks_max_ = 100'000;
  int tokens_ = 0;
  int gpus_ = 0;
  Instant now_{1'000'000'000};
  AgentCore core_;
  AgentStep last_;
};

TEST_F(AgentCoreTest, NoticeIsRepeatedUntilTheHeadHasIt) {
  const NodeNotice notice{
      .kind = NoticeKind::kLeave, .left = absl::Seconds(120), .source = "aws", .id = "t@1"};
  Step(CloudSays{notice});
  EXPECT_TRUE(Sent<NoticeSeen>().empty()) << "no head yet";
  Advance(absl::Seconds(20));
  Step(HeadUp{"10.0.0.1"});
  Step(FromHead{AgentWelcome{ClusterId("c1"), {5}, kMe, absl::Seconds(1), absl::Seconds(120)}});
  ASSERT_EQ(Sent<NoticeSeen>().size(), 1u);
  EXPECT_EQ(Sent<NoticeSeen>()[0].notice.left, absl::Seconds(100)) << "of what is left when it is said";
  Advance(absl::Seconds(6));
  Step(AgentTick{});
  ASSERT_EQ(Sent<NoticeSeen>().size(), 1u);
  Step(FromHead{AckNotice{{5}, 1}});
  Advance(absl::Seconds(6));
  Step(AgentTick{});
  EXPECT_TRUE(Sent<NoticeSeen>().empty());
  NodeNotice same = notice;
  same.left = absl::Seconds(90);  // later than was said first
  Step(CloudSays{same});
  EXPECT_TRUE(Sent<NoticeSeen>().empty());
  same.left = absl::ZeroDuration();  // "Started"
  Step(CloudSays{same});
  ASSERT_EQ(Sent<NoticeSeen>().size(), 1u);
  Step(CloudSays{});
  ASSERT_EQ(Sent<NoticeSeen>().size(), 1u);
  EXPECT_EQ(Sent<NoticeSeen>()[0].notice.kind, NoticeKind::kNone);
  EXPECT_EQ(Sent<NoticeSeen>()[0].sequence, 3u);
}

TEST_F(AgentCoreTest, NoticeReachesTheRanksAndSignalsThemOnce) {
  Welcome();
  StartIt(1, 2, 2);
  Step(FromHead{NoticeRanks{{5}, kJob, {1}, absl::Seconds(119)}});
  ASSERT_EQ(Commands<keeper::Notice>().size(), 1u);
  EXPECT_EQ(Commands<keeper::Notice>()[0].seconds, 119u);
  EXPECT_EQ(Commands<keeper::Notice>()[0].signal, 15);
  Step(FromHead{NoticeRanks{{6}, kJob, {1}, absl::Seconds(80)}});
  const keeper::Notice again{.generation = 1, .seconds = 80, .signal = 0, .number = 1};
  EXPECT_THAT(Commands<keeper::Notice>(), ::testing::ElementsAre(again))
      << "a second signal might end who is saving";
  Step(FromHead{NoticeRanks{{6}, kJob, {1}, absl::Seconds(80), 2}});
  EXPECT_EQ(Commands<keeper::Notice>().at(0).signal, 15) << "another, after the first was taken back";
}

TEST_F(AgentCoreTest, HelloThenWelcomeThenHeartbeats) {
  Step(FreePorts{{20001, 20002}});
  Step(HeadUp{"10.0.0.1"});
  ASSERT_EQ(Sent<AgentHello>().size(), 1u);
  EXPECT_EQ(Sent<AgentHello>()[0].address, "10.0.0.1");
  EXPECT_EQ(Sent<AgentHello>()[0].free_ports, (std::vector<int>{20001, 20002}));
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  EXPECT_THAT(Sent<AgentHeartbeat>(), IsEmpty());
  Advance(absl::Seconds(2));
  Step(AgentTick{});
  EXPECT_EQ(Sent<AgentHello>().size(), 1u) << "the hello is repeated until it is answered";
  Welcome();
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  ASSERT_EQ(Sent<AgentHeartbeat>().size(), 1u);
  EXPECT_EQ(Sent<AgentHeartbeat>()[0].sequence, 1u);
}

TEST_F(AgentCoreTest, EachHelloHasALargerOrder_W7) {
  Step(HeadUp{"10.0.0.1"});
  const uint64_t first = Sent<AgentHello>().at(0).order;
  Step(HeadUp{"10.0.0.1"});  // at the same moment
  const uint64_t second = Sent<AgentHello>().at(0).order;
  EXPECT_GT(second, first);
  Advance(absl::Seconds(3));
  AgentCore next(AgentConfig{});  // the agent is restarted within the boot
  last_ = next.Step(HeadUp{"10.0.0.1"}, now_);
  EXPECT_GT(Sent<AgentHello>().at(0).order, second);
}

TEST_F(AgentCoreTest, RefusalEndsTheAgentWithItsReason) {
  Step(HeadUp{"10.0.0.1"});
  Step(FromHead{AgentRefused{"another cluster"}});
  ASSERT_EQ(last_.effects.size(), 1u);
  const auto* leave = std::get_if<Leave>(&last_.effects[0]);
  ASSERT_NE(leave, nullptr);
  EXPECT_THAT(std::string(leave->status.message()), HasSubstr("another cluster"));
}

TEST_F(AgentCoreTest, LowerEpochIsIgnored) {  // H-class fencing: an old head must not command
  Welcome(5);
  Step(FromHead{StartGeneration{{4}, Grant(1, 1, 1)}});
  EXPECT_THAT(last_.effects, IsEmpty());
  EXPECT_THAT(last_.why, HasSubstr("epoch 4"));
  Step(FromHead{StartGeneration{{6}, Grant(1, 1, 1)}});
  EXPECT_EQ(Commands<keeper::StartRank>().size(), 1u);
  Step(FromHead{Revoke{{5}, kJob, {1}, EndMode::kReform, absl::Seconds(1), "old head"}});
  EXPECT_THAT(last_.effects, IsEmpty());
}

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

TEST_F(AgentCoreTest, CopiesOfCheckpointsLieWhereTheJobSaysAndGoWithIt) {
  const auto near_of = [&](uint64_t generation, const std::string& near) {
    spec_.checkpoint = {.uri = "/ckpt", .near = near};
    Step(FromHead{Revoke{{5}, kJob, {generation - 1}, EndMode::kReform, absl::Seconds(1), "next"}});
    StartIt(generation, 1, 1);
    return EnvOf(Commands<keeper::StartRank>()[0])["GTRAIN_CHECKPOINT_NEAR"];
  };
  const auto dropped = [&](const JobId& job) {
    Step(FromHead{ForgetJob{{5}, job}});
    std::string folder;
    for (const AgentEffect& effect : last_.effects) {
      if (const auto* drop = std::get_if<DropCopies>(&effect)) folder = drop->folder;
    }
    return folder;
  };
  Welcome();
  EXPECT_EQ(near_of(1, ""), "");
  EXPECT_EQ(near_of(2, "memory"), "1000 /dev/shm/gtrain-me");
  EXPECT_EQ(near_of(3, "/scratch"), absl::StrCat("1000 /scratch/", kMe.value));
  EXPECT_EQ(dropped(kJob), absl::StrCat("/scratch/", kMe.value));
  EXPECT_EQ(dropped(kJob), "");
}

TEST_F(AgentCoreTest, RanksLearnWhoHasCopiesAndTheAgentSharesItsOwn) {
  spec_.checkpoint = {.uri = "/ckpt", .near = "memory", .replicas = 1};
  Welcome();
  GenerationGrant grant = Grant(1, 1, 1);
  grant.nodes.push_back({NodeId("b"), "10.0.0.2", "b c", "", "", 7071, "key-b"});
  grant.nodes.push_back({NodeId("c"), "fd00::3", "c", "z2", "", 7072, "key-c"});
  grant.near_secret = "5ec2e7";
  Step(FromHead{StartGeneration{{5}, grant}});
  auto env = EnvOf(Commands<keeper::StartRank>()[0]);
  EXPECT_EQ(env["GTRAIN_CHECKPOINT_PEERS"], "1 c [fd00::3]:7072 key-c,b_c 10.0.0.2:7071 key-b");
  EXPECT_EQ(env["GTRAIN_CHECKPOINT_SECRET"], "5ec2e7");
  bool shared = false;
  for (const AgentEffect& effect : last_.effects) {
    const auto* share = std::get_if<ShareCopies>(&effect);
    shared |= share != nullptr && share->job == kJob && share->folder == "/dev/shm/gtrain-me" &&
              share->secret == "5ec2e7";
  }
  EXPECT_TRUE(shared);
}

TEST_F(AgentCoreTest, RanksLearnWhoHasCopiesOutsideTheJob) {
  spec_.checkpoint = {.uri = "/ckpt", .near = "memory", .replicas = 1};
  Welcome();
  GenerationGrant grant = Grant(1, 1, 1);
  grant.nodes[0].zone = "z1";
  grant.holders.push_back({NodeId("b"), "10.0.0.2", "b", "z1", "", 7071, "key-b"});  // had some before
  grant.holders.push_back({NodeId("c"), "10.0.0.3", "c", "z2", "", 7072, "key-c"});
  grant.near_secret = "5ec2e7";
  Step(FromHead{StartGeneration{{5}, grant}});
  EXPECT_EQ(EnvOf(Commands<keeper::StartRank>()[0])["GTRAIN_CHECKPOINT_PEERS"],
            "1 c 10.0.0.3:7072 key-c,b 10.0.0.2:7071 key-b");
}

TEST_F(AgentCoreTest, CopiesAreKeptForAJobWithoutRanksHereUntilItIsOver) {
  AgentConfig config = Config();
  config.near_port = 7000;
  config.near_left = {JobId("of-an-earlier-agent")};
  core_ = AgentCore(std::move(config));
  const auto hello = [&] {
    Step(HeadUp{"10.0.0.1"});
    return Sent<AgentHello>().at(0);
  };
  EXPECT_TRUE(hello().takes_copies);
  EXPECT_EQ(hello().copies_of, std::vector<JobId>{JobId("of-an-earlier-agent")});
  Welcome();
  Step(FromHead{ForgetJob{{5}, JobId("of-an-earlier-agent")}});
  EXPECT_EQ(std::get<DropCopies>(last_.effects.at(0)).folder, "/dev/shm/gtrain-me");
  for (const auto& [near, folder] : std::map<std::string, std::string>{
           {"memory", "/dev/shm/gtrain-me"}, {"/scratch", absl::StrCat("/scratch/", kMe.value)}}) {
    Step(FromHead{KeepCopies{{5}, kJob, near, "5ec2e7"}});
    ASSERT_EQ(last_.effects.size(), 1u);
    const auto& shared = std::get<ShareCopies>(last_.effects[0]);
    EXPECT_EQ(shared.folder, folder);
    EXPECT_EQ(shared.secret, "5ec2e7");
    EXPECT_EQ(hello().copies_of, std::vector<JobId>{kJob});
    Welcome();
    Step(FromHead{ForgetJob{{5}, kJob}});
    ASSERT_EQ(last_.effects.size(), 1u);
    const auto& dropped = std::get<DropCopies>(last_.effects[0]);
    EXPECT_EQ(dropped.job, kJob);
    EXPECT_EQ(dropped.folder, folder);
    EXPECT_THAT(hello().copies_of, IsEmpty());
    Welcome();
  }
  EXPECT_THAT(Commands<keeper::BeginGeneration>(), IsEmpty());
}

// A head of before, or one that was not asked for any (N13).
TEST_F(AgentCoreTest, WithoutASecretOrPeersNothingIsShared_N13) {
  spec_.checkpoint = {.uri = "/ckpt", .near = "memory", .replicas = 1};
  Welcome();
  StartIt(1, 1, 1);
  const auto env = EnvOf(Commands<keeper::StartRank>()[0]);
  EXPECT_TRUE(env.contains("GTRAIN_CHECKPOINT_NEAR"));
  EXPECT_FALSE(env.contains("GTRAIN_CHECKPOINT_PEERS") || env.contains("GTRAIN_CHECKPOINT_SECRET"));
  for (const AgentEffect& effect : last_.effects) EXPECT_FALSE(std::holds_alternative<ShareCopies>(effect));
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

TEST_F(AgentCoreTest, MissingSecretFailsTheStartByName) {
  spec_.secrets["TOKEN"] = {"NOT_SET", ""};
  Welcome();
  StartIt(1, 1, 1);
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.cause, ExitCause::kStartFailed);
  EXPECT_THAT(Sent<RankExited>()[0].exit.message, HasSubstr("NOT_SET"));
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
}

TEST_F(AgentCoreTest, NoRankStartsWhereItsFilesCannotBe) {  // X20
  Welcome();
  StartIt(1, 1, 1);
  EXPECT_EQ(made_, (std::vector<std::string>{"/run 1"}));
  Exit(0, 0);
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  refuse_dir_ = absl::PermissionDeniedError("/run belongs to another user");
  StartIt(2, 2, 2);
  ASSERT_EQ(Sent<RankExited>().size(), 2u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.cause, ExitCause::kStartFailed);
  EXPECT_EQ(Sent<RankExited>()[0].exit.message,
            "the run directory cannot be used: /run belongs to another user. Another place: gtrain launch "
            "--run-dir DIR");
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
}

TEST_F(AgentCoreTest, MoreRanksThanTheMachineHoldsAreNotBegun) {
  ranks_max_ = 3;
  Welcome();
  StartIt(1, 3, 8);  // those of other machines do not count
  EXPECT_EQ(Commands<keeper::StartRank>().size(), 3u);
  StartIt(2, 4, 4);
  ASSERT_EQ(Sent<RankExited>().size(), 4u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.message, "4 are too many");
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
}

TEST_F(AgentCoreTest, LogsThatCannotBeWrittenAreSaidOnceAMachineAndTakenBack) {  // P8
  Welcome();
  StartIt(1, 2, 2);
  const auto output = [&](int rank, bool is_stderr, int refused, uint64_t dropped) {
    Step(FromKeeper{kJob, keeper::Output{1, rank, is_stderr, 10, dropped, "text", refused}});
    return Sent<AgentNote>();
  };
  auto notes = output(0, false, ENOSPC, 500);
  ASSERT_EQ(notes.size(), 1u) << "and nothing of a rank that writes too fast";
  EXPECT_EQ(notes[0].kind, kLogsNote);
  EXPECT_THAT(notes[0].text, HasSubstr("/run/logs cannot be written: No space left on device"));
  EXPECT_THAT(output(0, true, ENOSPC, 0), IsEmpty());
  EXPECT_THAT(output(1, false, ENOSPC, 0), IsEmpty());
  EXPECT_THAT(output(0, false, 0, 500), Not(Contains(Field(&AgentNote::kind, kLogsNote))));
  EXPECT_THAT(output(0, true, 0, 0), IsEmpty());
  notes = output(1, false, 0, 0);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(notes[0].kind, kLogsNote);
  EXPECT_EQ(notes[0].text, "");
}

TEST_F(AgentCoreTest, MasterPortInUseIsItsOwnCause) {
  port_free_ = false;
  Welcome();
  StartIt(1, 1, 1);
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.cause, ExitCause::kAddressInUse);
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

TEST_F(AgentGpuTest, JobWithoutGpusSeesNone) {
  Welcome();
  StartIt(1, 1, 1);
  const auto env = EnvOf(Commands<keeper::StartRank>()[0]);
  ASSERT_EQ(env.count("CUDA_VISIBLE_DEVICES"), 1u);
  EXPECT_EQ(env.at("CUDA_VISIBLE_DEVICES"), "");
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

TEST_F(AgentCoreTest, RevokedGenerationNeverStarts) {
  Welcome();
  Step(FromHead{Revoke{{5}, kJob, {4}, EndMode::kReform, absl::Seconds(1), "x"}});
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u) << "nothing of it is here";
  StartIt(4, 1, 1);
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
  ASSERT_EQ(Sent<GenerationGone>().size(), 1u);
  StartIt(5, 1, 1);
  EXPECT_EQ(Commands<keeper::StartRank>().size(), 1u);
}

TEST_F(AgentCoreTest, RepeatedGrantStartsOnce) {
  Welcome();
  StartIt(1, 1, 1);
  StartIt(1, 1, 1);
  EXPECT_THAT(Commands<keeper::StartRank>(), IsEmpty());
}

TEST_F(AgentCoreTest, ExitIsRepeatedUntilAcknowledgedThenForgotten) {
  Welcome();
  StartIt(1, 1, 1);
  Exit(0, 3);
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.exit_code, 3);
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  Advance(absl::Seconds(6));
  Step(AgentTick{});
  EXPECT_EQ(Sent<RankExited>().size(), 1u);
  Step(HeadDown{});
  Step(HeadUp{"10.0.0.1"});
  ASSERT_EQ(Sent<AgentHello>()[0].held.size(), 1u);
  EXPECT_EQ(Sent<AgentHello>()[0].held[0].exited.size(), 1u);
  Step(FromHead{AgentWelcome{ClusterId("c1"), {5}, kMe, absl::Seconds(1), absl::Seconds(120)}});
  EXPECT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  Step(FromHead{AckExit{{5}, kJob, {1}, 0}});
  EXPECT_EQ(Commands<keeper::AckExit>().size(), 1u);
  EXPECT_EQ(Commands<keeper::Forget>().size(), 1u);
  Advance(absl::Seconds(6));
  Step(AgentTick{});
  EXPECT_THAT(Sent<RankExited>(), IsEmpty());
}

TEST_F(AgentCoreTest, RevokeEndsTheGenerationThroughTheKeeper) {
  Welcome();
  StartIt(1, 2, 2);
  Step(FromHead{Revoke{{5}, kJob, {1}, EndMode::kStop, absl::Seconds(30), "stopped by ada"}});
  ASSERT_EQ(Commands<keeper::EndGeneration>().size(), 1u);
  const auto end = Commands<keeper::EndGeneration>()[0];
  EXPECT_EQ(end.mode, keeper::End::kStop);
  EXPECT_EQ(end.grace_ms, 30000u);
  EXPECT_EQ(end.reason, "stopped by ada");
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty()) << "said only when the keeper saw it";
}

TEST_F(AgentCoreTest, LocalExchangeCompletesWithoutTheHead) {
  Welcome();
  StartIt(1, 2, 2);
  FromRank(0, R"({"type":"exchange","sequence":0,"blob":"YQ=="})", 11);
  EXPECT_THAT(Commands<keeper::Relay>(), IsEmpty());
  FromRank(1, R"({"type":"exchange","sequence":0,"blob":"Yg=="})", 12);
  const auto tables = Commands<keeper::Relay>();
  ASSERT_EQ(tables.size(), 2u);
  EXPECT_EQ(tables[0].json, "table 0\nYQ==\nYg==");
  EXPECT_EQ(Commands<keeper::AckRelay>().size(), 2u);
  EXPECT_THAT(Sent<ExchangePart>(), IsEmpty());
  // Repeated after a lost connection: the rank gets the same table again.
  FromRank(1, R"({"type":"exchange","sequence":0,"blob":"Yg=="})", 13);
  ASSERT_EQ(Commands<keeper::Relay>().size(), 1u);
  EXPECT_EQ(Commands<keeper::Relay>()[0].rank, 1);
}

TEST_F(AgentCoreTest, RemoteExchangeGoesThroughTheHeadAndIsRepeated) {
  Welcome();
  StartIt(1, 2, 3);
  FromRank(1, R"({"type":"exchange","sequence":4,"blob":"Yg=="})", 2);
  FromRank(0, R"({"type":"exchange","sequence":4,"blob":"YQ=="})", 1);
  ASSERT_EQ(Sent<ExchangePart>().size(), 1u);
  EXPECT_EQ(Sent<ExchangePart>()[0].blobs, (std::vector<std::pair<int, std::string>>{{0, "a"}, {1, "b"}}));
  EXPECT_THAT(Commands<keeper::AckRelay>(), IsEmpty()) << "kept by the keeper until the table is here";
  Step(HeadDown{});
  Welcome();
  EXPECT_EQ(Sent<ExchangePart>().size(), 1u);
  Step(FromHead{ExchangeTable{{5}, kJob, {1}, 4, {"a", "b", "c"}}});
  EXPECT_EQ(Commands<keeper::Relay>().size(), 2u);
  EXPECT_EQ(Commands<keeper::AckRelay>().size(), 2u);
}

TEST_F(AgentCoreTest, OverdueExchangeNamesTheRanksOfThisNode) {
  Welcome();
  StartIt(1, 3, 3);
  FromRank(1, R"({"type":"exchange","sequence":0,"blob":"Yg=="})", 1);
  FromRank(1, R"({"type":"overdue","sequence":0})", 2);
  ASSERT_EQ(Commands<keeper::Relay>().size(), 1u);
  EXPECT_EQ(Commands<keeper::Relay>()[0].rank, 1);
  EXPECT_EQ(Commands<keeper::Relay>()[0].json, "missing 0 0 2");
}

TEST_F(AgentCoreTest, OverdueExchangeAsksTheHeadForRanksOfOtherNodes) {
  Welcome();
  StartIt(1, 2, 3);
  FromRank(0, R"({"type":"exchange","sequence":0,"blob":"YQ=="})", 1);
  FromRank(1, R"({"type":"exchange","sequence":0,"blob":"Yg=="})", 1);
  ASSERT_EQ(Sent<ExchangePart>().size(), 1u);
  FromRank(1, R"({"type":"overdue","sequence":0})", 2);
  ASSERT_EQ(Sent<ExchangePart>().size(), 1u) << "the part once more is the question";
  EXPECT_THAT(Commands<keeper::Relay>(), IsEmpty());
  Step(FromHead{ExchangeMissing{{5}, kJob, {1}, 0, {2}}});
  ASSERT_EQ(Commands<keeper::Relay>().size(), 2u);
  EXPECT_EQ(Commands<keeper::Relay>()[0].json, "missing 0 2");
}

TEST_F(AgentCoreTest, BrokenLinkGoesOnToTheHead_W5) {
  Welcome();
  StartIt(1, 2, 3);
  FromRank(1, R"({"type":"link","peer":2,"text":"no answer\nin 8s"})", 1);
  ASSERT_EQ(Sent<LinkDown>().size(), 1u);
  EXPECT_EQ(Sent<LinkDown>()[0], (LinkDown{kJob, {1}, 1, 2, "no answer?in 8s"}));
  EXPECT_EQ(Commands<keeper::AckRelay>().size(), 1u);
}

TEST_F(AgentCoreTest, ProgressPatternsReportLinesAndRelaysFeedTheStatus) {
  spec_.progress.step = R"(step (\d+))";
  spec_.progress.loss = R"(loss ([0-9.]+))";
  Welcome();
  StartIt(1, 2, 2);
  Step(FromKeeper{kJob, keeper::Started{1, 0, 100, 7}});
  EXPECT_EQ(Sent<RanksStarted>().size(), 1u);
  Step(FromKeeper{kJob, keeper::Output{1, 0, false, 20, 0, "epoch 1 step 12 loss 0.5\nste"}});
  FromRank(1, R"({"type":"joined"})");
  FromRank(1, R"({"type":"progress","step":9,"collective":77,"waited":1.5,"joined":6})");
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  auto changed = Sent<AgentHeartbeat>()[0].changed;
  ASSERT_EQ(changed.size(), 2u);
  EXPECT_EQ(changed[0].step, 12);
  EXPECT_EQ(changed[0].loss, 0.5);
  EXPECT_EQ(changed[0].state, RankState::kRunning);
  EXPECT_EQ(changed[1].step, 9);
  EXPECT_EQ(changed[1].collective_sequence, 77u);
  EXPECT_EQ(changed[1].waited_seconds, 1.5);
  EXPECT_EQ(changed[1].joined_seconds, 6);
  EXPECT_EQ(changed[1].state, RankState::kJoined);
  ASSERT_EQ(Sent<LogTail>().size(), 1u);
  EXPECT_EQ(Sent<LogTail>()[0].end_offset, 20u);
  Step(FromKeeper{kJob, keeper::Output{1, 0, false, 30, 0, "p 13\r"}});  // the line was cut between two reads
  Step(FromKeeper{kJob,
                  keeper::ReportBytes{
                      1, 1, "{\"step\":10,\"samples\":50}\n{\"step\":11,\"checkpoint\":\"x\"}\nnot json\n"}});
  ASSERT_EQ(Sent<CheckpointReport>().size(), 1u);
  EXPECT_EQ(Sent<CheckpointReport>()[0].step, 11);
  EXPECT_EQ(Sent<CheckpointReport>()[0].timeline, Timeline{3});
  Advance(absl::Seconds(2));
  Step(FromKeeper{kJob, keeper::ReportBytes{1, 1, "{\"step\":12,\"samples\":200}\n"}});
  Step(AgentTick{});
  changed = Sent<AgentHeartbeat>()[0].changed;
  ASSERT_EQ(changed.size(), 2u);
  EXPECT_EQ(changed[0].step, 13);
  EXPECT_NEAR(changed[1].samples_per_second.value_or(0), 100, 1);
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  EXPECT_THAT(Sent<AgentHeartbeat>()[0].changed, IsEmpty()) << "only what changed";
}

TEST_F(AgentCoreTest, SdkCheckpointKeepsItsManifest) {
  Welcome();
  StartIt(1, 1, 1);
  FromRank(0, R"({"type":"checkpoint","step":40,"timeline":9,"manifest":"k/m","policy":"every 9 s\n!"})");
  ASSERT_EQ(Sent<CheckpointReport>().size(), 1u);
  EXPECT_EQ(Sent<CheckpointReport>()[0].manifest, "k/m");
  EXPECT_EQ(Sent<CheckpointReport>()[0].policy, "every 9 s?!");
  EXPECT_EQ(Sent<CheckpointReport>()[0].timeline, Timeline{9});
}

// A machine that is lost within the second would hold up its job for the whole lease (N1).
TEST_F(AgentCoreTest, TheHeadHearsAtOnceThatRanksHaveTheSdk_N1) {
  Welcome();
  StartIt(1, 1, 2);
  Advance(absl::Seconds(1));
  Step(AgentTick{});
  Advance(absl::Milliseconds(5));
  FromRank(0, R"({"type":"joined"})");
  Step(AgentTick{});
  ASSERT_EQ(Sent<AgentHeartbeat>().size(), 1u);
  ASSERT_EQ(Sent<AgentHeartbeat>()[0].changed.size(), 1u);
  EXPECT_EQ(Sent<AgentHeartbeat>()[0].changed[0].state, RankState::kJoined);
}

TEST_F(AgentCoreTest, ACheckpointThatNoHeadHeardOfIsToldToTheNext_H1) {
  Welcome();
  StartIt(1, 1, 1);
  Step(HeadDown{});
  FromRank(0, R"({"type":"checkpoint","step":40,"timeline":9,"manifest":"k/m","policy":""})");
  EXPECT_THAT(Sent<CheckpointReport>(), IsEmpty());
  Welcome(6);
  ASSERT_EQ(Sent<CheckpointReport>().size(), 1u);
  EXPECT_EQ(Sent<CheckpointReport>()[0].step, 40);
}

TEST_F(AgentCoreTest, HowGradientsTravelIsANote) {
  Welcome();
  StartIt(1, 1, 1);
  FromRank(0, R"({"type":"compression","text":"topk for 2 of 3\n buckets"})");
  ASSERT_EQ(Sent<AgentNote>().size(), 1u);
  EXPECT_EQ(Sent<AgentNote>()[0].kind, "compression");
  EXPECT_EQ(Sent<AgentNote>()[0].rank, 0);
  EXPECT_EQ(Sent<AgentNote>()[0].text, "topk for 2 of 3? buckets");
  FromRank(0, absl::StrCat(R"({"type":"compression","text":")", std::string(9000, 'x'), R"("})"));
  EXPECT_EQ(Sent<AgentNote>()[0].text.size(), 400u);
}

// It is said once, and a head may start after that.
TEST_F(AgentCoreTest, WhatWasRestoredIsToldToEachHead) {
  Welcome();
  StartIt(1, 1, 1);
  FromRank(0, R"({"type":"restore","text":"step 2 in 0.3 s"})");
  FromRank(0, R"({"type":"restore","text":"step 4 in 0.3 s"})");
  Welcome();
  ASSERT_EQ(Sent<AgentNote>().size(), 1u);
  EXPECT_EQ(Sent<AgentNote>()[0], (AgentNote{kJob, {1}, 0, "restore", "step 4 in 0.3 s"}));
}

// The exit of a rank carries the evidence of a storage fault: the note may get lost with a connection, the
// exit does not.
TEST_F(AgentCoreTest, WhatARankSaidOfItsStorageGoesWithItsExit_S7) {
  StartIt(1, 2, 2);  // no head listens: the note itself is dropped
  FromRank(0, R"({"type":"storage","text":"/ckpt: EIO"})", 1);
  EXPECT_THAT(Commands<keeper::AckRelay>(), IsEmpty()) << "an agent that restarts needs to hear it again";
  FromRank(0, R"({"type":"storage","text":"/ckpt: ESTALE"})", 2);
  ASSERT_THAT(Commands<keeper::AckRelay>(), ::testing::SizeIs(1));
  EXPECT_EQ(Commands<keeper::AckRelay>()[0].id, 1u);
  FromRank(0, R"({"type":"storage","text":"/ckpt: ESTALE"})", 2);
  EXPECT_THAT(Commands<keeper::AckRelay>(), IsEmpty()) << "the same one, to a new connection";
  FromRank(1, R"({"type":"storage","text":"gone"})", 1);
  FromRank(1, R"({"type":"storage","text":""})", 2);
  Exit(0, 1);
  Exit(1, 1);
  Welcome();
  ASSERT_THAT(Sent<RankExited>(), ::testing::SizeIs(2));
  EXPECT_EQ(Sent<RankExited>()[0].exit.storage, "/ckpt: ESTALE");
  EXPECT_EQ(Sent<RankExited>()[1].exit.storage, "") << "it could be read again";
}

// An earlier generation may have said that it cannot be read, and the head goes by that until then.
TEST_F(AgentCoreTest, TheFirstWordOfTheStorageIsHeardWhateverItIs) {
  Welcome();
  StartIt(1, 3, 3);
  FromRank(0, R"({"type":"storage","text":""})");
  EXPECT_THAT(Sent<AgentNote>(), ::testing::ElementsAre(AgentNote{kJob, {1}, 0, "storage", ""}));
  FromRank(1, R"({"type":"storage","text":""})");
  EXPECT_THAT(Sent<AgentNote>(), IsEmpty());
}

TEST_F(AgentCoreTest, OneRankOfAMachineSpeaksOfTheStorage) {
  Welcome();
  StartIt(1, 3, 3);
  FromRank(1, R"({"type":"storage","text":"a"})");
  EXPECT_THAT(Sent<AgentNote>(), ::testing::ElementsAre(AgentNote{kJob, {1}, 1, "storage", "a"}));
  FromRank(0, R"({"type":"storage","text":"b"})");
  EXPECT_THAT(Sent<AgentNote>(), IsEmpty());
  FromRank(0, R"({"type":"storage","text":""})", 2);
  EXPECT_THAT(Sent<AgentNote>(), IsEmpty());
  FromRank(1, R"({"type":"storage","text":""})", 2);
  EXPECT_THAT(Sent<AgentNote>(), ::testing::ElementsAre(AgentNote{kJob, {1}, 1, "storage", ""}));
  FromRank(2, R"({"type":"storage","text":"c"})");
  EXPECT_THAT(Sent<AgentNote>(), ::testing::ElementsAre(AgentNote{kJob, {1}, 2, "storage", "c"}));
}

TEST_F(AgentCoreTest, SilentHeadEndsOnlyProgramsWithoutTheSdk) {
  Welcome();
  StartIt(1, 1, 1);
  Advance(absl::Seconds(121));
  Step(AgentTick{});
  ASSERT_EQ(Commands<keeper::EndGeneration>().size(), 1u);
  EXPECT_THAT(Commands<keeper::EndGeneration>()[0].reason, HasSubstr("no word from the head"));

  Welcome();
  StartIt(2, 1, 1);
  FromRank(0, R"({"type":"joined"})", 1, 2);
  Advance(absl::Seconds(500));
  Step(AgentTick{});
  EXPECT_THAT(Commands<keeper::EndGeneration>(), IsEmpty());
}

TEST_F(AgentCoreTest, AKeeperThatHoldsNothingMayGo) {  // P4: its agent died before it could say so
  keeper::State state;
  state.job = kJob.value;
  state.highest_revoked = 2;
  const std::vector<AgentEffect> effects = Step(FromKeeper{kJob, state});
  ASSERT_EQ(effects.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<keeper::Quit>(std::get<ToKeeper>(effects[0]).command));
}

// A command to a keeper that is leaving is lost with it, and the start would be charged as a loss.
TEST_F(AgentCoreTest, AGrantWaitsForTheLeavingKeeper_P4) {
  keeper::State state;
  state.job = kJob.value;
  state.highest_revoked = 2;
  Step(FromKeeper{kJob, state});
  Welcome();
  Step(FromHead{StartGeneration{{5}, Grant(3, 1, 1)}});
  EXPECT_TRUE(Commands<keeper::StartRank>().empty());
  Step(KeeperLost{kJob, true, "the keeper has left"});
  EXPECT_FALSE(Commands<keeper::StartRank>().empty());
  EXPECT_TRUE(Sent<RankExited>().empty());
}

TEST_F(AgentCoreTest, KeeperOfADistantVersionIsLeftAlone_N13) {
  keeper::State state;
  state.job = kJob.value;
  state.protocol = keeper::kAgentProtocol + 2;
  const std::vector<AgentEffect> effects = Step(FromKeeper{kJob, state});
  ASSERT_EQ(effects.size(), 1u) << "no command that could end a rank";
  const Leave& leave = std::get<Leave>(effects[0]);
  EXPECT_FALSE(leave.after_keepers);
  EXPECT_THAT(std::string(leave.status.message()),
              HasSubstr(absl::StrCat("keeper protocol ", keeper::kAgentProtocol + 2,
                                     ", more than one version away "
                                     "from protocol ",
                                     keeper::kAgentProtocol)));
}

TEST_F(AgentCoreTest, AdoptsWhatAKeeperHolds) {  // P4
  Welcome();
  keeper::State state;
  state.job = kJob.value;
  state.highest_revoked = state.highest_stopped = 2;
  keeper::GenerationHeld held;
  held.generation = 3;
  held.note = R"({"run_dir":"/run","world_size":2,"timeline":1,"spec":"spec"})";
  held.ranks = {{0, 100, 5, true, true}, {1, -1, 6, false, false}};
  keeper::Exited exit;
  exit.generation = 3;
  exit.rank = 1;
  exit.code = 7;
  held.unacked = {exit};
  state.generations = {held};
  Step(FromKeeper{kJob, state});
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.exit_code, 7);
  EXPECT_THAT(core_.Snapshot(), HasSubstr("revoked 2; generation 3 0=joined 1=exited"));
  Step(HeadDown{});
  Step(HeadUp{"10.0.0.1"});
  const auto hello = Sent<AgentHello>()[0];
  ASSERT_EQ(hello.held.size(), 1u);
  EXPECT_EQ(hello.held[0].revoked, Generation{2});
  EXPECT_TRUE(hello.held[0].stopping) << "as the keeper remembers it (H3)";
  EXPECT_EQ(hello.held[0].live.size(), 1u);
  EXPECT_EQ(hello.held[0].exited.size(), 1u);
  Step(FromHead{AgentQuery{{5}, 9, AgentQuery::Kind::kReadLog, kJob, {3}, 1, true, 5, {}}});
}

// The head would begin the next generation beside ranks of the first.
TEST_F(AgentCoreTest, NothingIsGoneWhileAnOlderGenerationIsHere_N2) {
  Welcome();
  StartIt(1, 1, 2);
  Step(FromHead{Revoke{{5}, kJob, {1}, EndMode::kReform, absl::Seconds(3), "a node was lost"}});
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty());
  Step(FromHead{Revoke{{5}, kJob, {2}, EndMode::kReform, absl::Seconds(3), "another node was lost"}});
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty()) << "2 never came here, but 1 still is";
  StartIt(2, 1, 2);  // late
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty());
  Exit(0, 143);
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  ASSERT_EQ(Sent<GenerationGone>().size(), 2u);
  EXPECT_EQ(Sent<GenerationGone>()[0].generation, Generation{1});
  EXPECT_EQ(Sent<GenerationGone>()[1].generation, Generation{2});
}

// Its end overtook the start of its ranks: nothing of it is held any more once it is gone and forgotten.
TEST_F(AgentCoreTest, RanksThatNeverBeganAreNotHeld) {
  Welcome();
  StartIt(1, 2, 2);
  Step(FromHead{Revoke{{5}, kJob, {1}, EndMode::kReform, absl::Seconds(3), "a node was lost"}});
  Step(FromKeeper{kJob, keeper::Gone{1, true, "it was over before it began"}});
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  Step(HeadDown{});
  Step(HeadUp{"10.0.0.1"});
  EXPECT_THAT(Sent<AgentHello>().at(0).held, IsEmpty());
}

TEST_F(AgentCoreTest, WhatIsGoneWaitsForWhatIsOlder_N2) {
  Welcome();
  StartIt(1, 1, 2);
  StartIt(2, 1, 2);
  Exit(0, 1, 2);
  Step(FromKeeper{kJob, keeper::Gone{2, true, ""}});
  EXPECT_THAT(Sent<GenerationGone>(), IsEmpty());
  Exit(0, 1, 1);
  Step(FromKeeper{kJob, keeper::Gone{1, false, "stuck"}});
  ASSERT_EQ(Sent<GenerationGone>().size(), 2u);
  EXPECT_FALSE(Sent<GenerationGone>()[0].clean);
}

// The lease runs from the sending of what the head has answered, and the keeper knows until when.
TEST_F(AgentCoreTest, TheKeeperIsToldUntilWhenRanksMayRun_N2) {
  Welcome();
  const Instant welcomed = now_;
  StartIt(1, 1, 2);
  ASSERT_EQ(Commands<keeper::Fence>().size(), 1u);
  const int64_t first = Commands<keeper::Fence>()[0].until_ms;
  EXPECT_EQ(first, (welcomed + absl::Seconds(120)).ns / 1'000'000);
  int64_t told = first;
  for (int second = 0; second < 60; ++second) {
    Advance(absl::Seconds(1));
    Step(AgentTick{});
    const Instant sent = now_;
    ASSERT_EQ(Sent<AgentHeartbeat>().size(), 1u);
    const uint64_t sequence = Sent<AgentHeartbeat>()[0].sequence;
    Advance(absl::Milliseconds(400));
    Step(FromHead{HeartbeatAck{{5}, sequence}});
    for (const keeper::Fence& fence : Commands<keeper::Fence>()) {
      EXPECT_EQ(fence.until_ms, (sent + absl::Seconds(120)).ns / 1'000'000);
      told = fence.until_ms;
    }
  }
  EXPECT_GT(told, (now_ + absl::Seconds(105)).ns / 1'000'000) << "told at least every ten seconds";
  // A heartbeat that is not answered extends nothing, and other messages of the head do not, either.
  for (int second = 0; second < 100; ++second) {
    Advance(absl::Seconds(1));
    Step(AgentTick{});
    Step(FromHead{ForgetJob{{5}, JobId("other-1")}});
    EXPECT_THAT(Commands<keeper::Fence>(), IsEmpty());
  }
  Step(AgentTick{});
  EXPECT_THAT(Commands<keeper::EndGeneration>(), IsEmpty());
  Advance(absl::Seconds(25));
  Step(AgentTick{});
  EXPECT_EQ(Commands<keeper::EndGeneration>().size(), 1u);
}

// An agent that was started later gives it back, too, from the keeper's note.
TEST_F(AgentCoreTest, GivesBackTheSealOfAGrantAsItCame_H8) {
  Welcome();
  Step(FromHead{StartGeneration{{5}, Grant(1, 1, 1), {kSealed, "mac"}}});
  ASSERT_EQ(Commands<keeper::BeginGeneration>().size(), 1u);
  keeper::GenerationHeld held;
  held.generation = 1;
  held.note = Commands<keeper::BeginGeneration>()[0].note;
  held.ranks = {{0, 100, 5, true, true}};
  for (bool restarted : {false, true}) {
    if (restarted) {
      core_ = AgentCore(Config());
      keeper::State state;
      state.job = kJob.value;
      state.generations = {held};
      Step(FromKeeper{kJob, state});
    }
    Step(HeadDown{});
    Step(HeadUp{"10.0.0.1"});
    EXPECT_TRUE(Sent<AgentHello>().at(0).keeps_seals);
    Step(FromHead{AgentWelcome{
        ClusterId("c1"), {6}, kMe, absl::Seconds(1), absl::Seconds(120), "", /*describe=*/true}});
    ASSERT_EQ(Sent<GenerationDescribed>().size(), 1u) << restarted;
    EXPECT_EQ(Sent<GenerationDescribed>()[0].seal, (GrantSeal{kSealed, "mac"})) << restarted;
  }
}

// The agent died between hearing the revoke and telling the keeper; the next one hears of it first from the
// head.
TEST_F(AgentCoreTest, RevokeThatTheKeeperNeverHeardIsDoneByTheNextAgent_P4) {
  Welcome();
  Step(FromHead{Revoke{{5}, kJob, {3}, EndMode::kReform, absl::Seconds(5), "a node was lost"}});
  keeper::State state;
  state.job = kJob.value;
  keeper::GenerationHeld held;
  held.generation = 3;
  held.note = R"({"run_dir":"/run","world_size":1,"timeline":1,"spec":"spec"})";
  held.ranks = {{0, 100, 5, true, true}};
  state.generations = {held};
  Step(FromKeeper{kJob, state});
  ASSERT_EQ(Commands<keeper::EndGeneration>().size(), 1u);
  EXPECT_EQ(Commands<keeper::EndGeneration>()[0].generation, 3u);
}

TEST_F(AgentCoreTest, LostKeeperMeansLostRanks) {
  Welcome();
  StartIt(1, 2, 2);
  Exit(0, 0);
  Step(KeeperLost{kJob, true, "the keeper was killed"});
  ASSERT_EQ(Sent<RankExited>().size(), 1u);
  EXPECT_EQ(Sent<RankExited>()[0].exit.rank, 1);
  EXPECT_EQ(Sent<RankExited>()[0].exit.cause, ExitCause::kLost);
  EXPECT_EQ(Sent<GenerationGone>().size(), 1u);
  EXPECT_FALSE(core_.HasLiveGeneration());
}

TEST_F(AgentCoreTest, QueriesReadLogsByNumbersOnly) {
  Welcome();
  StartIt(1, 1, 1);
  Step(FromHead{AgentQuery{{5}, 9, AgentQuery::Kind::kReadLog, kJob, {1}, 0, true, 5, {}, 77}});
  ASSERT_EQ(last_.effects.size(), 1u);
  const auto& read = std::get<ReadLog>(last_.effects[0]);
  EXPECT_EQ(read.path, "/run/logs/generation-1/rank-0.err");
  EXPECT_EQ(read.offset, 5u);
  EXPECT_EQ(read.bytes_max, 77u);
  Step(FromHead{AgentQuery{{5}, 10, AgentQuery::Kind::kReadLog, JobId("../etc"), {1}, 0, true, 5, {}}});
  ASSERT_EQ(Sent<AgentAnswer>().size(), 1u);
  EXPECT_FALSE(Sent<AgentAnswer>()[0].ok);
  Step(FromHead{AgentQuery{{5}, 11, AgentQuery::Kind::kExec, kJob, {1}, 0, false, 0, {"ls"}}});
  ASSERT_EQ(Commands<keeper::Exec>().size(), 1u);
  // The client is told after this time that there is no answer: no command outlives it.
  EXPECT_LT(absl::Milliseconds(Commands<keeper::Exec>()[0].timeout_ms), HeadConfig().query_timeout);
}

// A revoked node ends its ranks, then itself; a node refused for another reason leaves them alone.
TEST_F(AgentCoreTest, RevokedNodeEndsItsRanksThenItself) {
  Welcome();
  StartIt(1, 1, 1);
  Step(FromHead{AgentRefused{"this node was revoked by root", true}});
  EXPECT_EQ(Commands<keeper::Quit>().size(), 1u);
  for (const AgentEffect& effect : last_.effects) EXPECT_FALSE(std::holds_alternative<Leave>(effect));
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  const auto leave = std::find_if(last_.effects.begin(), last_.effects.end(),
                                  [](const AgentEffect& e) { return std::holds_alternative<Leave>(e); });
  ASSERT_NE(leave, last_.effects.end());
  EXPECT_TRUE(absl::IsPermissionDenied(std::get<Leave>(*leave).status));
  EXPECT_TRUE(std::get<Leave>(*leave).after_keepers);
}

TEST_F(AgentCoreTest, ShutdownLeavesAfterTheLastGeneration) {
  Welcome();
  StartIt(1, 1, 1);
  Step(FromHead{AgentShutdown{{5}, "idle"}});
  EXPECT_EQ(Commands<keeper::Quit>().size(), 1u);
  for (const AgentEffect& effect : last_.effects) EXPECT_FALSE(std::holds_alternative<Leave>(effect));
  Exit(0, 0);
  Step(FromKeeper{kJob, keeper::Gone{1, true, ""}});
  EXPECT_TRUE(std::any_of(last_.effects.begin(), last_.effects.end(),
                          [](const AgentEffect& e) { return std::holds_alternative<Leave>(e); }));
}

TEST(RankReports, HostileInputIsHarmless) {  // P9
  EXPECT_EQ(ReadRelay("").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay("[1]").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":7,"step":"x"})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"exchange","sequence":-1,"blob":"YQ=="})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"exchange","sequence":1,"blob":"***"})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"link","peer":-1,"text":"x"})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"link","peer":1e18,"text":"x"})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"link","peer":1,"text":")" + std::string(1 << 16, 'x') + "\"}").text.size(),
            kLinkTextBytesMax);
  EXPECT_FALSE(ReadReportLine(R"({"step":1e300,"loss":1e999})").step.has_value());
  EXPECT_FALSE(ReadReportLine(R"({"step":-2})").step.has_value());
  EXPECT_FALSE(ReadRelay(R"({"type":"progress","step":18446744073709551615})").step.has_value());
  LineCutter cutter(8);
  EXPECT_EQ(cutter.Take(std::string(20, 'x')).size(), 2u);
  spec::Progress progress;
  progress.step = "(a*)*b(\\d+)";
  const ProgressPatterns patterns(progress);
  EXPECT_EQ(patterns.Match("step 5").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(patterns.Match(std::string(1 << 20, 'a')).kind, RankSaid::Kind::kNothing);  // in no time
}

}  // namespace
}  // namespace gtrain::core
