// Tests the files that the parser accepts, and the defaults; errors of well-formed files are a table.
#include "job/spec/parse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "job/spec/hosts.h"

namespace gtrain::spec {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

std::string AllErrors(const ParseResult& result) {
  return absl::StrJoin(result.errors, "\n",
                       [](std::string* out, const SpecError& e) { *out += FormatError(e); });
}

ParseOptions Options() {
  ParseOptions options;
  options.file_dir = "/home/me/job";
  options.current_dir = "/home/me";
  options.default_name = "job";
  return options;
}

TEST(ParseJob, ReadsEveryKeyOfTheReference) {
  const char* text = R"(
name: fashion-mnist
run: ./build/train --epochs 3 --title 'two words'
per: rank
ranks: {min: 2, max: 8}
mesh: {dp: "*"}
traffic: {dp: 400MB}
resources: {cpus: 2, memory: 4GiB, gpus: 1, gpu_type: [H100, A100], shm: 2GiB, processes: 512, visible: rank, oversubscribe: true}
where: {labels: {pool: spot}, exclude: [node-7]}
workdir: {path: src, sync: auto}
env: {LR: "0.1", EMPTY: ""}
inherit_env: [HOME, PATH]
secrets: {HF_TOKEN: {env: HF_TOKEN}, KEY: {file: key.txt}}
elastic: {mode: in-place, spares: 2, global_batch: 4096, determinism: none}
checkpoint: {uri: ./ckpt, every: 200 steps, keep: 5, near: /scratch, replicas: 2, on_error: fail}
restart: {budget: 3, window: 10m, before_first_step: 2, oom: 0}
comm: {compression: auto, allow: [fp16, {codec: topk, density: 0.1%, warmup: 50, residual: bf16}, {codec: onebit, momentum: 0.8, residual: fp32}, {codec: powersgd, rank: 2}]}
progress: {step: 'step (\d+)', loss: 'loss ([0-9.]+)', startup: 10m, stall: 5m, on_stall: kill}
preempt: {signal: SIGUSR1, lead: 60s}
stop_grace: 20s
overlap: allow
tty: true
stdin: true
limits: {time: 24h}
labels: {team: nlp}
priority: -5
)";
  const ParseResult result = ParseJob(text, "job.yaml", Options());
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  const JobSpec& s = result.spec;
  EXPECT_EQ(s.name, "fashion-mnist");
  EXPECT_THAT(s.run, ElementsAre("./build/train", "--epochs", "3", "--title", "two words"));
  EXPECT_EQ(s.ranks, (Range{2, 8}));
  EXPECT_EQ(s.mesh, (std::vector<MeshAxis>{{"dp", std::nullopt}}));
  EXPECT_THAT(s.traffic, ElementsAre(Pair("dp", 400'000'000)));
  EXPECT_EQ(s.resources.memory, uint64_t{4} << 30);
  EXPECT_THAT(s.resources.gpu_type, ElementsAre("H100", "A100"));
  EXPECT_FALSE(s.resources.visible_node);
  EXPECT_EQ(s.resources.oversubscribe, true);
  EXPECT_THAT(s.where_labels, ElementsAre(Pair("pool", "spot")));
  EXPECT_EQ(s.workdir, "/home/me/job/src");
  EXPECT_THAT(s.env, ElementsAre(Pair("EMPTY", ""), Pair("LR", "0.1")));
  EXPECT_THAT(s.inherit_env.names, ElementsAre("HOME", "PATH"));
  EXPECT_EQ(s.secrets.at("KEY").file, "/home/me/job/key.txt");
  EXPECT_EQ(s.checkpoint.uri, "/home/me/job/src/ckpt");
  EXPECT_EQ(s.checkpoint.every_steps, 200);
  EXPECT_EQ(s.checkpoint.every, std::nullopt);
  EXPECT_EQ(s.checkpoint.on_error, OnError::kFail);
  EXPECT_EQ(s.restart.window, absl::Minutes(10));
  EXPECT_TRUE(s.comm.automatic);
  EXPECT_FALSE(s.comm.deterministic);
  EXPECT_EQ(s.comm.codecs,
            (std::vector<CommCodec>{{.codec = "fp16"},
                                    {.codec = "topk", .density = 1'000, .warmup = 50, .residual = "bf16"},
                                    {.codec = "onebit", .momentum = 800'000, .residual = "fp32"},
                                    {.codec = "powersgd", .rank = 2}}));
  EXPECT_EQ(s.progress.on_stall, OnStall::kKill);
  EXPECT_EQ(s.overlap, Overlap::kAllow);
  EXPECT_TRUE(s.in_place);
  EXPECT_EQ(s.spares, 2);
  EXPECT_EQ(s.global_batch, 4096);
  EXPECT_TRUE(s.tty);
  EXPECT_TRUE(s.takes_input);
  EXPECT_EQ(s.preempt.signal, "SIGUSR1");
  EXPECT_EQ(s.time_limit, absl::Hours(24));
  EXPECT_EQ(s.priority, -5);
}

TEST(ParseJob, WhereRank0Goes) {
  const ParseResult result = ParseJob("run: a\nwhere: {rank0: node-2}\n", "job.yaml", Options());
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(result.spec.where_rank0, "node-2");
}

TEST(ParseJob, HostsAreNamesOrHostlists) {
  const ParseResult result = ParseJob(
      "run: a\nwhere:\n  hosts: tux[0-3,12]\n  exclude: [tux1, \"n[08-09],login\"]\n  rank0: tux[2-3]\n",
      "job.yaml", Options());
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(NamesOf(result.spec.where_hosts), (HostNames{"tux0", "tux1", "tux12", "tux2", "tux3"}));
  EXPECT_EQ(NamesOf(result.spec.where_exclude), (HostNames{"login", "n08", "n09", "tux1"}));
  EXPECT_EQ(NamesOf({result.spec.where_rank0}), (HostNames{"tux2", "tux3"}));
  const ParseResult wrong = ParseJob(
      "run: a\nwhere:\n  hosts: []\n  exclude: [tux1, \"n[9-8]\"]\n  rank0: [a]\n", "job.yaml", Options());
  EXPECT_THAT(AllErrors(wrong), HasSubstr("job.yaml:3:10: `where.hosts`: must name a host, or be left away"));
  EXPECT_THAT(AllErrors(wrong),
              HasSubstr("job.yaml:4:19: `where.exclude`: hostlist \"n[9-8]\": the range 9-8 "
                        "runs backwards"));
  EXPECT_THAT(AllErrors(wrong), HasSubstr("job.yaml:5:10: `where.rank0`: must be one name or one hostlist"));
  const ParseResult many = ParseJob("run: a\nwhere:\n  hosts: [\"a[0-65535]\", \"b[0-9]\", \"c[0-65535]\"]\n",
                                    "job.yaml", Options());
  EXPECT_EQ(many.errors.size(), 1u) << AllErrors(many);
  EXPECT_THAT(AllErrors(many), HasSubstr("names more than 65536 hosts"));
}

TEST(ParseJob, AHostForEachRank) {
  const ParseResult result = ParseJob(
      "run: a\nwhere:\n  ranks:\n    0-2: tux0\n    3,5: tux1.lab slot=7,0\n    4: tux1.lab slot=1\n",
      "job.yaml", Options());
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(result.spec.ranks, (Range{6, 6})) << "as many as have a host";
  EXPECT_EQ(
      result.spec.where_ranks,
      (std::vector<RanksOn>{{{0, 1, 2}, "tux0", {}}, {{3, 5}, "tux1.lab", {7, 0}}, {{4}, "tux1.lab", {1}}}));
  const auto error = [&](const std::string& ranks, const std::string& more = "ranks: 2\n") {
    return AllErrors(ParseJob(more + "run: a\nwhere:\n  ranks: " + ranks + "\n", "f", Options()));
  };
  EXPECT_THAT(error("{}"), HasSubstr("f:4:10: `where.ranks`: must name the host of each rank"));
  EXPECT_THAT(error("{a: b}"), HasSubstr("f:4:11: `where.ranks`: \"a\" is no list of numbers such as 0-3,7"));
  EXPECT_THAT(error("{0-1: \"tux[0-1]\"}"),
              HasSubstr("f:4:16: `where.ranks`: must be one host, or HOST slot=0-3"));
  EXPECT_THAT(error("{0-1: a slot=1}"), HasSubstr("f:4:16: `where.ranks`: 1 slots for 2 ranks"));
  EXPECT_THAT(error("{0-1: a slot=x}"), HasSubstr("`where.ranks`: slot=\"x\" is no list of numbers"));
  EXPECT_THAT(error("{0: a, 0-1: b}"), HasSubstr("f:4:10: `where.ranks`: rank 0 is there twice"));
  EXPECT_THAT(error("{0-1: a slot=0-1}", "ranks: 3\n"), HasSubstr("the host of rank 2 is missing, of 3"));
  EXPECT_THAT(error("{0-2: a}"), HasSubstr("it names the hosts of 3 ranks, and the job has 2"));
  EXPECT_THAT(error("{0: a slot=1, 1: a slot=1}"), HasSubstr("ranks 0 and 1 both have slot 1 of a"));
  EXPECT_THAT(error("{0-1: a}", "ranks: {min: 1, max: 2}\n"),
              HasSubstr("`ranks` is a range: write `ranks: N`"));
  EXPECT_THAT(error("{0-1: a}", "nodes: 2\n"), HasSubstr("`nodes` and `per: node` count machines"));
  EXPECT_THAT(error("{0: a}\n  rank0: a", ""),
              HasSubstr("it says where rank 0 goes, and so does `where.rank0`"));
  EXPECT_THAT(error("{0: a}", "elastic: {mode: in-place}\n"),
              HasSubstr("processes that go on stay where they are"));
  EXPECT_EQ(error("{0: a slot=1, 1: a slot=1}", "resources: {gpus: 0.5}\n"), "") << "they share its GPU";
}

TEST(ParseJob, APartOfAGpu) {
  const auto share = [&](const std::string& gpus) {
    const ParseResult result = ParseJob("run: a\nresources: {gpus: " + gpus + "}\n", "f", Options());
    EXPECT_TRUE(result.ok()) << AllErrors(result);
    EXPECT_EQ(result.spec.resources.gpus.has_value(), result.spec.resources.gpu_share == 0 && gpus != "auto");
    return result.spec.resources.gpu_share;
  };
  EXPECT_EQ(share("0.5"), 500);
  EXPECT_EQ(share("0.125"), 125);
  EXPECT_EQ(share("1/3"), 333);
  EXPECT_EQ(share("1/1000"), 1);
  EXPECT_EQ(share("2"), 0);
  EXPECT_EQ(share("auto"), 0);
  for (const char* wrong :
       {"1.5", "0.0", "0.1234", "1/1", "1/0", "2/3", "1/", "0.", ".5", "0.5e", "1/1001"}) {
    const ParseResult result =
        ParseJob(absl::StrCat("run: a\nresources: {gpus: ", wrong, "}\n"), "f", Options());
    EXPECT_THAT(AllErrors(result), HasSubstr("f:2:19: `resources.gpus`: ")) << wrong;
    EXPECT_THAT(AllErrors(result), HasSubstr("is no part of a GPU")) << wrong;
  }
  EXPECT_THAT(AllErrors(ParseJob("run: a\nresources: {gpus: 0.5, visible: node}\n", "f", Options())),
              HasSubstr("a rank sees the GPU that it shares alone"));
  EXPECT_TRUE(ParseJob("run: a\nresources: {gpus: 0.5, visible: rank}\n", "f", Options()).ok());
}

TEST(ParseJob, DefaultsAreTheDocumentedOnes) {
  const ParseResult result =
      ParseJob("run: python train.py\ncheckpoint: {uri: ckpt}\n", "job.yaml", Options());
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(result.spec.name, "job");
  EXPECT_EQ(result.spec.ranks, (Range{1, 1}));
  EXPECT_EQ(result.spec.workdir, "/home/me");
  EXPECT_EQ(result.spec.checkpoint.uri, "/home/me/ckpt");
  EXPECT_EQ(result.spec.checkpoint.every, absl::Seconds(30));
  EXPECT_EQ(result.spec.resources, Resources{});
  EXPECT_EQ(result.spec.restart, RestartBudget{});
  EXPECT_EQ(result.spec.comm, CommPolicy{});
}

TEST(ParseJob, ScriptIsKeptAsItStands) {
  const ParseResult result = ParseJob("script: |\n  cd x && ./run $RANK\n  echo done\n", "f", Options());
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(result.spec.script, "cd x && ./run $RANK\necho done\n");
}

TEST(ParseJob, RunAsAListIsTakenWordByWord) {
  const ParseResult result = ParseJob("run: [sh, -c, 'a && b | $C', \"\"]\n", "f", Options());
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_THAT(result.spec.run, ElementsAre("sh", "-c", "a && b | $C", ""));
}

TEST(ParseJob, PerNodeCountsNodes) {
  const ParseResult result = ParseJob("run: torchrun train.py\nper: node\nnodes: 2\n", "f", Options());
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(result.spec.nodes, (Range{2, 2}));
  EXPECT_EQ(result.spec.ranks, std::nullopt);
}

// Fault J15: a single pass, from the caller's environment, and only in the keys that say so.
TEST(ParseJob, J15VariablesAreExpandedOnce) {
  const std::map<std::string, std::string> variables = {{"A", "${B}"}, {"B", "b"}};
  ParseOptions options = Options();
  options.variables = &variables;
  ParseResult result = ParseJob(
      "run: x\nenv: {V: 'a ${A} $$ $HOME'}\nworkdir: /w/${B}\ncheckpoint: {uri: '${B}/c'}\n", "f", options);
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(result.spec.env.at("V"), "a ${B} $ $HOME");
  EXPECT_EQ(result.spec.workdir, "/w/b");
  EXPECT_EQ(result.spec.checkpoint.uri, "/w/b/b/c");
  result = ParseJob("run: x\nenv: {V: '${NOPE}', W: '${', X: '${a b}'}\n", "f", options);
  EXPECT_THAT(AllErrors(result), HasSubstr("f:2:10: `env.V`: `${NOPE}` is not set"));
  EXPECT_EQ(result.errors.size(), 3u) << AllErrors(result);
}

TEST(ParseJob, AVariableThatMayHoldASecretIsNotExpanded_J11) {
  const std::map<std::string, std::string> variables = {{"HF_TOKEN", "hf0123456789abcdef0123"},
                                                        {"PAD_TOKEN", "<pad>"}};
  ParseOptions options = Options();
  options.variables = &variables;
  const ParseResult result =
      ParseJob("run: x\nenv: {AUTH: 'Bearer ${HF_TOKEN}', PAD: '${PAD_TOKEN}'}\n", "f", options);
  EXPECT_THAT(AllErrors(result), HasSubstr("f:2:13: `env.AUTH`: `${HF_TOKEN}` seems to hold a secret"));
  EXPECT_THAT(AllErrors(result), Not(HasSubstr("0123456789")));
  EXPECT_EQ(result.errors.size(), 1u) << AllErrors(result);
}

// Variables that gtrain sets for each rank cannot be set; those that it reads from the user can.
TEST(ParseJob, SettingsOfCommunicationAreTheUsers) {
  const ParseResult result =
      ParseJob("run: x\nenv: {GTRAIN_COMM_ALGO: ring, GTRAIN_COMM_TLS: tcp}\n", "f", Options());
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(result.spec.env.at("GTRAIN_COMM_ALGO"), "ring");
  EXPECT_EQ(result.spec.env.at("GTRAIN_COMM_TLS"), "tcp");
}

TEST(ParseJob, EveryErrorIsFoundInOnePass) {
  const ParseResult result =
      ParseJob("nam: x\nrun: a | b\nranks: 0\nenv: {1X: a}\nstop_grace: 5\n", "job.yaml", Options());
  EXPECT_EQ(result.errors.size(), 5u) << AllErrors(result);
  EXPECT_EQ(result.errors[0].line, 1);
  EXPECT_EQ(result.errors[4].line, 5);
}

struct ErrorCase {
  const char* fault;
  const char* text;
  const char* error;  // a part of the formatted errors
};

class FileErrors : public ::testing::TestWithParam<ErrorCase> {};

TEST_P(FileErrors, AreNamedWithTheirPlace) {
  const ParseResult result = ParseJob(GetParam().text, "f", Options());
  EXPECT_FALSE(result.ok());
  EXPECT_THAT(AllErrors(result), HasSubstr(GetParam().error)) << GetParam().fault;
}

INSTANTIATE_TEST_SUITE_P(J4, FileErrors,
                         ::testing::Values(ErrorCase{"J4", "run: a\nnodes: 1\nnodes: 9999\n",
                                                     "f:3:1: key `nodes` is already on line 2"},
                                           ErrorCase{"J4", "run: a\nenv:\n  A: x\n  \"A\": y\n",
                                                     "f:4:3: key `A` is already on line 3"}));

INSTANTIATE_TEST_SUITE_P(
    J5, FileErrors,
    ::testing::Values(
        ErrorCase{"J5", "run: a\nranks: 010\n",
                  "f:2:8: `ranks`: '010' is not accepted: it looks octal; write 10"},
        ErrorCase{"J5", "run: a\nranks: 0o10\n", "write it in decimal"},
        ErrorCase{"J5", "run: a\nranks: 1e3\n", "'1e3' is not accepted: write 1000 as a whole number"},
        ErrorCase{"J5", "run: a\nranks: 0x10\n", "'0x10' is not accepted: write it in decimal"},
        ErrorCase{"J5", "run: a\nranks: .nan\n", "must be a finite number"},
        ErrorCase{"J5", "run: a\nranks: -.inf\n", "must be a finite number"},
        ErrorCase{"J5", "run: a\nranks: 1_000\n", "write 1000 without underscores"},
        ErrorCase{"J5", "run: a\nranks: 2.5\n", "it must be a whole number"},
        ErrorCase{"J5", "run: a\nranks: '4'\n", "remove the quotes"},
        ErrorCase{"J5", "run: a\nranks: +4\n", "is not a whole number"},
        ErrorCase{"J5", "run: a\nranks: four\n", "'four' is not a whole number from 1 to 65536"},
        ErrorCase{"J5", "run: a\nresources: {oversubscribe: yes}\n",
                  "must be true or false, not 'yes'; write true"},
        ErrorCase{"J5", "run: a\nresources: {oversubscribe: off}\n", "not 'off'; write false"},
        ErrorCase{"J5", "run: a\nenv: {A: no}\n",
                  "f:2:10: `env.A`: 'no' looks like a boolean; for a string write \"no\""},
        ErrorCase{"J5", "run: a\nenv: {A: 0.1}\n", "looks like a number; for a string write \"0.1\""},
        ErrorCase{"J5", "run: a\nenv: {A: 2026-01-02}\n", "looks like a date"},
        ErrorCase{"J5", "run: a\nenv: {A: ~}\n", "the value is missing"},
        ErrorCase{"J5", "run: a\nname: 123\n", "looks like a number"},
        ErrorCase{"J5", "run: a\nstop_grace: 30\n", "'30' has no unit; write 30s"},
        ErrorCase{"J5", "run: a\nstop_grace: 010s\n", "'010s' is not a number with a unit"},
        ErrorCase{"J5", "run: a\nresources: {memory: 4 gigs}\n", "unknown unit"}));

INSTANTIATE_TEST_SUITE_P(
    J7, FileErrors,
    ::testing::Values(ErrorCase{"J7", "run: a\nchekpoint: {uri: x}\n",
                                "f:2:1: unknown key 'chekpoint'; did you mean `checkpoint`?"},
                      ErrorCase{"J7", "run: a\ncheckpoint: {uri: x, evry: 3s}\n",
                                "f:2:22: unknown key 'evry' in `checkpoint`; did you mean `every`?"},
                      ErrorCase{"J7", "run: a\ngpus: 2\n", "did you mean `resources.gpus`?"},
                      ErrorCase{"J7", "command: a\n", "did you mean `run`?"},
                      ErrorCase{"J7", "run: a\nlimits: {zzzzzz: 1}\n", "the keys are: time"},
                      ErrorCase{"J7", "run: a\nper: nodes\n", "Did you mean node?"},
                      ErrorCase{"J7", "run: a\nmesh: {qq: 2}\n",
                                "f:2:8: unknown mesh axis 'qq'; the axes are dp, pp, tp, cp, ep, fsdp"},
                      ErrorCase{"J7", "run: a\nmesh: {dp: 1}\ntraffic: {tp: 1GB}\n",
                                "f:3:15: `traffic`: `mesh` has no axis 'tp'"},
                      ErrorCase{"J7", "run: a\ntraffic: {tp: 1GB}\n", "without `mesh` there is dp alone"},
                      ErrorCase{"J7", "run: a\nwhere: {rank0: x}\nelastic: {mode: in-place}\n",
                                "any of them becomes rank 0"},
                      ErrorCase{"J7", "run: a\ntraffic: {dp: x}\n", "traffic.dp"}));

INSTANTIATE_TEST_SUITE_P(
    J8, FileErrors,
    ::testing::Values(ErrorCase{"J8", "run: a\nranks: 0\n", "'0' is out of range"},
                      ErrorCase{"J8", "run: a\nranks: -1\n", "'-1' is out of range"},
                      ErrorCase{"J8", "run: a\nranks: 2147483648\n", "out of range"},
                      ErrorCase{"J8", "run: a\nranks: 99999999999999999999\n", "out of range"},
                      ErrorCase{"J8", "run: a\nnodes: 60000\nranks_per_node: 8\n", "more than 65536 ranks"}));

INSTANTIATE_TEST_SUITE_P(J9, FileErrors,
                         ::testing::Values(ErrorCase{"J9", "run: a\nname: ../../etc\n",
                                                     "'../../etc' is not a job name"},
                                           ErrorCase{"J9", "run: a\nname: a/b\n", "not a job name"},
                                           ErrorCase{"J9", "run: a\nname: -rf\n", "not a job name"},
                                           ErrorCase{"J9", "run: a\nname: '🚂'\n", "not a job name"},
                                           ErrorCase{"J9", "run: a\nname: ''\n", "`name`: must not be empty"},
                                           ErrorCase{"J9", "run: a\nname: Upper\n", "For example: upper"},
                                           ErrorCase{"J9", "run: a\nname: trailing-\n", "not a job name"},
                                           ErrorCase{"J9", "run: a\nname: [x]\n", "not a list"}));

INSTANTIATE_TEST_SUITE_P(
    J10, FileErrors,
    ::testing::Values(
        ErrorCase{"J10", "run: ./a; touch /x\n",
                  "f:1:6: `run`: `;` in `run`; `run` is words, not a shell. Put it under `script: |`"},
        ErrorCase{"J10", "run: a && b\n", "`&&` in `run`"},
        ErrorCase{"J10", "run: a | tee log\n", "`|` in `run`"},
        ErrorCase{"J10", "run: a $HOME/x\n", "`$HOME` in `run`"},
        ErrorCase{"J10", "run: a ${HOME}\n", "`${HOME}` in `run`"},
        ErrorCase{"J10", "run: a > log\n", "`>` in `run`"}, ErrorCase{"J10", "run: a `id`\n", "script"},
        ErrorCase{"J10", "run: |\n  a\n  b\n", "a line end in `run`"},
        ErrorCase{"J10", "run: 'a \"$(id)\"'\n", "`$` in `run`"},
        ErrorCase{"J10", "run: \"a 'b\"\n", "is not closed"},
        ErrorCase{"J10", "run: LR=1 python x\n", "put it under `env`"},
        ErrorCase{"J10", "run: cd x\n", "`workdir`"},
        ErrorCase{"J10", "run: []\n", "the program, is missing"},
        ErrorCase{"J10", "run: a\nenv: {A-B: x}\n", "must be letters"},
        ErrorCase{"J10", "run: a\nenv: {LD_PRELOAD: x}\n", "LD_PRELOAD"},
        ErrorCase{"J10", "run: a\nenv: {LD_LIBRARY_PATH: x}\n", "LD_LIBRARY_PATH"},
        ErrorCase{"J10", "run: a\ninherit_env: [LD_PRELOAD]\n", "LD_PRELOAD"},
        ErrorCase{"J10", "run: a\nenv: {RANK: \"0\"}\n", "is set by gtrain for each rank"},
        ErrorCase{"J10", "run: a\nenv: {GTRAIN_FOO: x}\n",
                  "is not a job's to set: of the names that begin with GTRAIN_ those are GTRAIN_LIBRARY, "
                  "GTRAIN_COMM_ALGO, GTRAIN_COMM_TLS, GTRAIN_ACTORS_SHM"},
        ErrorCase{"J10", "run: a\nenv: {A: \"x\\0y\"}\n", "NUL"},
        ErrorCase{"J10", "run: torchrun t.py\n", "`per: node` (`--set per=node`)"},
        ErrorCase{"J10", "run: /usr/bin/mpirun t\n", "`per: node`"},
        ErrorCase{"J10", "run: srun t\n", "itself a launcher"},
        ErrorCase{"J10", "run: accelerate launch t\n", "itself a launcher"},
        ErrorCase{"J10", "run: deepspeed t\n", "itself a launcher"},
        ErrorCase{"J10", "run: python3 -m torch.distributed.run t\n", "itself a launcher"}));

INSTANTIATE_TEST_SUITE_P(
    J12, FileErrors,
    ::testing::Values(
        ErrorCase{"J12", "run: a\nranks: {min: 9, max: 8}\n", "f:2:8: `ranks`: min 9 is larger than max 8"},
        ErrorCase{"J12", "run: a\nranks: {min: 2}\n", "`max` is missing"},
        ErrorCase{"J12", "run: a\nranks: 2\nnodes: 2\n", "f:3:8: `ranks` and `nodes` are both given"},
        ErrorCase{"J12", "run: a\nranks: 2\nranks_per_node: 2\n", "`ranks_per_node` needs `nodes`"},
        ErrorCase{"J12", "run: a\nper: node\nranks: 2\n", "give their number as `nodes`"},
        ErrorCase{"J12", "run: a\nstop_grace: 3m\npreempt: {lead: 90s}\n",
                  "f:2:13: `stop_grace` (3m) is longer than the notice"},
        ErrorCase{"J12", "run: a\ncheckpoint: {uri: x, every: 0}\n", "`checkpoint.every`: '0' has no unit"},
        ErrorCase{"J12", "run: a\ncheckpoint: {uri: x, every: 0s}\n", "out of range"},
        ErrorCase{"J12", "run: a\ncheckpoint: {uri: x, every: 0 steps}\n", "out of range"},
        ErrorCase{"J12", "run: a\ncheckpoint: {every: 3s}\n",
                  "`uri`, the directory of the checkpoints, is missing"},
        ErrorCase{"J12", "run: a\ncheckpoint: {uri: x, every: 2h}\nlimits: {time: 1h}\n",
                  "before its first checkpoint"},
        ErrorCase{"J12", "run: a\nresources: {gpus: 0, gpu_type: [H100]}\n",
                  "asks for a kind of GPU and for none"},
        ErrorCase{"J12", "run: a\nranks: 4\nmesh: {dp: 3}\n",
                  "f:3:7: `mesh`: its 3 ranks do not match the job's 4; write `dp: \"*\"`"},
        ErrorCase{"J12", "run: a\nranks: 4\nmesh: {dp: 2, tp: 4}\n", "its 8 ranks do not match the job's 4"},
        ErrorCase{"J12", "run: a\nranks: {min: 2, max: 4}\nmesh: {dp: 2, tp: 2}\n",
                  "its 4 ranks do not match the job's 2 to 4"},
        ErrorCase{"J12", "run: a\nranks: {min: 3, max: 8}\nmesh: {dp: \"*\", pp: 2, tp: 2}\n",
                  "the job's 3 to 8 ranks are not whole copies of the model, each of 4 ranks"},
        ErrorCase{"J12", "run: a\nranks: 4\nmesh: {dp: 1, tp: \"*\"}\n", "`mesh.tp`"},
        ErrorCase{"J12", "run: a\nranks: 4\nmesh: {tp: 65536, pp: 65536, cp: 65536, ep: 65536}\n",
                  "`mesh` has more than 65536 ranks"},
        ErrorCase{"J12",
                  "run: a\nranks: 4\nmesh: {dp: 2, tp: 2}\nelastic: {mode: in-place}\n"
                  "comm: {compression: int8}\n",
                  "f:5:21: `comm.compression` with a `mesh` of more than dp"},
        ErrorCase{"J12", "run: a\nranks: 4\nmesh: {tp: 2, dp: \"*\"}\nelastic: {mode: in-place}\n",
                  "dp comes first"},
        ErrorCase{"J12",
                  "run: a\nnodes: 4\nranks_per_node: 3\nmesh: {dp: \"*\", tp: 2}\n"
                  "elastic: {mode: in-place}\n",
                  "`ranks_per_node` is a multiple of 2, or the file says `ranks`"},
        ErrorCase{"J12", "run: a\nscript: b\n", "keep one"}, ErrorCase{"J12", "name: x\n", "nothing to run"},
        ErrorCase{"J12", "run: a\nprogress: {step: 'step \\d+'}\n", "must have one (group)"},
        ErrorCase{"J12", "run: a\nprogress: {step: '('}\n", "not a valid regular expression"},
        ErrorCase{"J12", "run: a\nprogress: {step: '(a)\\1'}\n", "not a valid regular expression"},
        ErrorCase{"J12", "run: a\nprogress: {step: '((?:a{1,500}){1,500})'}\n",
                  "not a valid regular expression"},
        ErrorCase{"J12", "run: a\nenv: {A: x}\nsecrets: {A: {env: A}}\n", "keep one"},
        ErrorCase{"J12", "run: a\nsecrets: {A: {}}\n", "exactly one of `env` and `file`"}));

INSTANTIATE_TEST_SUITE_P(
    Compression, FileErrors,
    testing::Values(
        ErrorCase{"", "run: a\ncomm: {compression: auto}\n",
                  "f:2:21: `comm.compression`: auto needs `allow`"},
        ErrorCase{"", "run: x\ncomm: {deterministic: true, compression: auto, allow: [fp16]}\n",
                  "f:2:23: `comm.deterministic`: `compression: auto` chooses by what it measures"},
        ErrorCase{"", "run: a\ncomm: {allow: [int8]}\n",
                  "f:2:15: `comm.allow` goes with `compression: auto`"},
        ErrorCase{"", "run: a\ncomm: {compression: int8, allow: [int8]}\n",
                  "goes with `compression: auto` alone"},
        ErrorCase{"", "run: a\ncomm:\n  compression: zip\n",
                  "f:3:16: `comm.compression`: 'zip' is not known; it must be fp16 or bf16 or int8 or fp8 or "
                  "topk or "
                  "onebit or powersgd or none or auto"},
        ErrorCase{"", "run: a\ncomm: {compression: {density: 1%}}\n",
                  "`codec`, the name of the codec, is missing"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: fp16, density: 1%}}\n",
                  "f:2:44: `comm.compression.density`: fp16 has none; topk has"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: int8, warmup: 3}}\n",
                  "int8 has none; topk and onebit and powersgd have"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: topk, rank: 3}}\n", "topk has none; powersgd has"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: topk, residual: fp16}}\n",
                  "`comm.compression.residual`: 'fp16' is not known; it must be fp32 or bf16"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: powersgd, residual: bf16}}\n",
                  "powersgd has none; fp16 and bf16 and int8 and fp8 and topk and onebit have"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: powersgd, rank: 0}}\n", "out of range"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: powersgd, rank: 65}}\n", "out of range"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: powersgd, density: 1%}}\n",
                  "powersgd has none; topk has"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: topk, density: 2}}\n",
                  "'2' is out of range; it must be from 0.000001 to 1"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: topk, density: 1e-3}}\n",
                  "is not a share of at most 6 decimals, like 0.01 or 1%"},
        ErrorCase{"", "run: a\ncomm: {compression: {codec: onebit, momentum: 100%}}\n", "from 0 to 0.999999"},
        ErrorCase{"", "run: a\ncomm: {compression: auto, allow: []}\n", "must be a list of codecs"},
        ErrorCase{"", "run: a\ncomm: {compression: auto, allow: [none]}\n",
                  "f:2:35: `comm.allow`: 'none' is not known"},
        ErrorCase{"", "run: a\ncomm: {compression: auto, allow: [fp16, fp16]}\n",
                  "f:2:41: `comm.allow`: fp16 is there twice"}));

INSTANTIATE_TEST_SUITE_P(
    Determinism, FileErrors,
    ::testing::Values(
        ErrorCase{"", "run: a\nelastic: {determinism: exact}\n",
                  "f:2:24: `elastic.determinism`: 'exact' is not known; it must be none or bitwise"},
        ErrorCase{"", "run: a\nelastic: {step_copies: true, mode: in-place}\n",
                  "f:2:24: `elastic.step_copies`: copies are of parts of a model"},
        ErrorCase{"", "run: a\nranks: 2\nmesh: {dp: 1, tp: 2}\nelastic: {step_copies: true}\n",
                  "f:4:24: `elastic.step_copies`: copies are of parts of a model"},
        ErrorCase{"", "run: a\nelastic: {virtual_ranks: 4}\n",
                  "f:2:26: `elastic.virtual_ranks` goes with `determinism: bitwise` alone"},
        ErrorCase{"", "run: a\nelastic: {determinism: bitwise, virtual_ranks: 65537}\n",
                  "`elastic.virtual_ranks`: '65537' is out of range"},
        ErrorCase{"", "run: a\nranks: {min: 2, max: 8}\nelastic: {determinism: bitwise, virtual_ranks: 4}\n",
                  "f:3:48: `elastic.virtual_ranks`: 4 parts are less than the job's 8 ranks"},
        ErrorCase{"", "run: a\nnodes: {min: 2, max: 3}\nelastic: {determinism: bitwise}\n",
                  "f:3:24: `elastic.determinism: bitwise` needs `virtual_ranks`"},
        ErrorCase{"", "run: a\nelastic: {determinism: bitwise}\ncomm: {compression: fp16}\n",
                  "f:3:21: `comm.compression` with `elastic.determinism: bitwise`"},
        ErrorCase{"", "run: a\nelastic: {determinism: bitwise}\ncomm: {compression: auto, allow: [topk]}\n",
                  "f:3:21: `comm.compression` with `elastic.determinism: bitwise`"}));

INSTANTIATE_TEST_SUITE_P(
    NotBuiltYet, FileErrors,
    ::testing::Values(
        ErrorCase{"", "run: a\nelastic: {spares: 1}\n", "that needs `mode: in-place`"},
        ErrorCase{"", "run: a\nelastic: {global_batch: 0}\n", "elastic.global_batch"},
        ErrorCase{"", "run: a\ncheckpoint: {uri: x, near: none, replicas: 1}\n", "there is nothing to copy"},
        ErrorCase{"", "run: a\ncheckpoint: {uri: x, near: ram}\n", "is neither `memory`"},
        ErrorCase{"C9", "run: a\ncheckpoint: {uri: x, max_rollback: 1001}\n",
                  "f:2:36: `checkpoint.max_rollback`"},
        ErrorCase{"C9", "run: a\ncheckpoint: {uri: x, max_rollback: -1}\n", "`checkpoint.max_rollback`"},
        ErrorCase{"", "run: a\ncheckpoint: {uri: x, verify_replicas: on}\n",
                  "must be off, first, or the first save"},
        ErrorCase{"", "run: a\ncheckpoint: {uri: x, verify_replicas: every 0}\n",
                  "f:2:39: `checkpoint.verify_replicas`"},
        ErrorCase{"", "run: a\ncheckpoint: {uri: x, verify_replicas: [first]}\n", "must be off, first"},
        ErrorCase{"C12", "run: a\ncheckpoint: {uri: x, memory_max: 8}\n", "f:2:34: `checkpoint.memory_max`"},
        ErrorCase{"", "run: a\ncheckpoint: {uri: x, read_only: yes}\n", "f:2:33: `checkpoint.read_only`"},
        ErrorCase{"", "run: a\ncheckpoint: {uri: 'gs://b/c'}\n", "the scheme 'gs' is not known"},
        ErrorCase{"", "run: a\ncheckpoint: {uri: 's3:/b/c'}\n",
                  "has one slash after its scheme; write s3://"},
        ErrorCase{"", "run: a\ncheckpoint: {uri: 'file:/b/c'}\n", "has one slash after its scheme"},
        ErrorCase{"", "run: a\nworkdir: {path: ., sync: rsync}\n", "is not built yet"},
        ErrorCase{"", "run: a\nslurm: {partition: gpu}\n", "Slurm is not built yet"}));

TEST(ParseJob, VirtualRanksAreTheMostRanksUnlessTheyAreWritten) {
  const auto parts = [](const std::string& text) {
    const ParseResult result = ParseJob(absl::StrCat("run: a\n", text), "f", Options());
    EXPECT_TRUE(result.ok()) << AllErrors(result);
    return result.spec.virtual_ranks;
  };
  EXPECT_EQ(parts("ranks: 4\n"), 0);
  EXPECT_EQ(parts("ranks: 4\nelastic: {determinism: none}\n"), 0);
  EXPECT_EQ(parts("elastic: {determinism: bitwise}\n"), 1);
  EXPECT_EQ(parts("ranks: {min: 2, max: 6}\nelastic: {determinism: bitwise}\n"), 6);
  EXPECT_EQ(parts("ranks: {min: 2, max: 6}\nelastic: {determinism: bitwise, virtual_ranks: 8}\n"), 8);
  EXPECT_EQ(parts("nodes: 3\nranks_per_node: 4\nelastic: {determinism: bitwise}\n"), 12);
  EXPECT_EQ(parts("nodes: 3\nper: node\nelastic: {determinism: bitwise}\n"), 3);
  EXPECT_EQ(parts("nodes: 3\nelastic: {determinism: bitwise, virtual_ranks: 8}\n"), 8);
}

TEST(ParseJob, RollbackComparedReplicasMemoryAndReadOnly) {
  const auto policy = [](const std::string& text) {
    const ParseResult result =
        ParseJob(absl::StrCat("run: a\ncheckpoint: {uri: x", text, "}\n"), "f", Options());
    EXPECT_TRUE(result.ok()) << text;
    return result.spec.checkpoint;
  };
  EXPECT_EQ(policy("").max_rollback, 1);
  EXPECT_EQ(PrintVerifyReplicas(policy("").verify_replicas), "every 100");
  EXPECT_EQ(policy(", max_rollback: 0").max_rollback, 0);
  for (const char* text : {"off", "first", "every 1", "every 7"}) {
    EXPECT_EQ(PrintVerifyReplicas(policy(absl::StrCat(", verify_replicas: ", text)).verify_replicas), text);
  }
  EXPECT_FALSE(policy("").read_only);
  EXPECT_FALSE(policy(", read_only: false").read_only);
  EXPECT_TRUE(policy(", read_only: true").read_only);
  EXPECT_EQ(policy("").memory_max, 0u);
  EXPECT_EQ(policy(", memory_max: 8GiB").memory_max, uint64_t{8} << 30);
  ParseOptions options = Options();
  options.overlays = {*ApplySet("checkpoint.max_rollback=3"),
                      *ApplySet("checkpoint.verify_replicas=every 5")};
  const ParseResult result = ParseJob("run: a\ncheckpoint: {uri: x}\n", "f", options);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.spec.checkpoint.max_rollback, 3);
  EXPECT_EQ(result.spec.checkpoint.verify_replicas.every, 5);
}

TEST(ParseJob, CheckpointsByThemselvesOrEveryThirtySeconds) {
  const auto every = [](const std::string& text) {
    return ParseJob(text, "f", Options()).spec.checkpoint.every;
  };
  EXPECT_EQ(every("run: a\ncheckpoint: {uri: x}\n"), absl::Seconds(30));
  EXPECT_EQ(every("run: a\ncheckpoint: {uri: x, every: auto}\n"), std::nullopt);
}

// Fault J11: refused, and the value is not repeated in the message.
TEST(ParseJob, J11SecretsInlineAreRefusedAndNeverEchoed) {
  const char* secrets[] = {"AKIAABCDEFGHIJKLMNOP", "https://me:hunter2secret@host/x",
                           "ghp_abcdefghijklmnopqrst0123456789", "-----BEGIN RSA PRIVATE KEY-----",
                           "hf_abcdefghijklmnopqrstuvwxyzABCDEF"};
  for (const char* secret : secrets) {
    for (const char* format : {"run: a\nenv: {K: \"$0\"}\n", "run: [a, \"$0\"]\n", "script: \"x $0\"\n",
                               "run: a\nlabels: {k: \"$0\"}\n"}) {
      std::string text = format;
      text.replace(text.find("$0"), 2, secret);
      const ParseResult result = ParseJob(text, "f", Options());
      EXPECT_THAT(AllErrors(result), HasSubstr("this looks like")) << text;
      EXPECT_THAT(AllErrors(result), Not(HasSubstr(std::string(secret).substr(8)))) << text;
    }
  }
  const ParseResult fine = ParseJob(
      "run: [a, 'http://host:80/x@y', 'sk-learn', 'task-abcdefghijklmnopqrstuvwxyz0']\n", "f", Options());
  EXPECT_TRUE(fine.ok()) << AllErrors(fine);
  const std::string key = "0123456789abcdef0123456789abcdef01234567";
  const std::map<std::string, std::string> environment = {{"KEY", key}};
  for (const std::string& env : {"WANDB_API_KEY: " + key, "HF_TOKEN: \"x" + key + "\"",
                                 std::string("DB_PASSWORD: hunter2"), std::string("A_SECRET: \"${KEY}\"")}) {
    const ParseResult result =
        ParseJob("name: a\nrun: a\nenv: {" + env + "}\n", "f", {.variables = &environment});
    EXPECT_THAT(AllErrors(result), HasSubstr("name it under `secrets`")) << env;
    EXPECT_THAT(AllErrors(result), Not(HasSubstr(key))) << env;
    EXPECT_THAT(AllErrors(result), Not(HasSubstr("hunter2")));
  }
  for (const char* env :
       {"PAD_TOKEN: <pad>", "TLS_PRIVATE_KEY: /etc/tls/key-0123456789.pem", "A_TOKEN: ''",
        "EOS_TOKEN: \"some words that take 20 and more\"", "SIZE: 0123456789abcdef01234567"}) {
    const ParseResult result =
        ParseJob("name: a\nrun: a\nenv: {" + std::string(env) + "}\n", "f", {.variables = &environment});
    EXPECT_TRUE(result.ok()) << env << AllErrors(result);
  }
  // A record that an earlier version stored can be read.
  EXPECT_TRUE(ParseJob("name: a\nrun: a\nenv: {WANDB_API_KEY: " + key + "}\n", "f").ok());
  const ParseResult inline_value = ParseJob("run: a\nsecrets: {HF_TOKEN: abc}\n", "f", Options());
  EXPECT_THAT(AllErrors(inline_value), HasSubstr("a secret is a reference"));
}

Overlay Flag(Overlay::Kind kind, const char* label, const char* key, const char* text) {
  Overlay overlay;
  overlay.kind = kind;
  overlay.label = label;
  overlay.key = key;
  overlay.text = text;
  return overlay;
}

TEST(Overlays, MeetTheRulesOfTheFile) {
  ParseOptions options = Options();
  options.overlays = {*ApplySet("checkpoint.every=60s"),
                      *ApplySet("restart={budget: 2}"),
                      *ApplySet("env.A=b"),
                      *ApplySet("labels.a.b=c"),
                      Flag(Overlay::Kind::kText, "--env N", "env.N", "4"),
                      Flag(Overlay::Kind::kRanks, "-n 4", "ranks", "4")};
  const ParseResult result =
      ParseJob("run: a\nranks: {min: 2, max: 8}\ncheckpoint: {uri: x}\n", "f", options);
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(result.spec.checkpoint.every, absl::Seconds(60));
  EXPECT_EQ(result.spec.restart.budget, 2);
  EXPECT_THAT(result.spec.env, ElementsAre(Pair("A", "b"), Pair("N", "4")));
  EXPECT_THAT(result.spec.labels, ElementsAre(Pair("a.b", "c")));
  EXPECT_EQ(result.spec.ranks, (Range{4, 4}));
}

TEST(Overlays, ErrorsNameTheFlag) {
  ParseOptions options = Options();
  options.overlays = {*ApplySet("chekpoint.every=60s"), *ApplySet("ranks=0"), *ApplySet("run.x=1"),
                      *ApplySet("priority=&a 1")};
  const ParseResult result = ParseJob("run: a\n", "f", options);
  EXPECT_THAT(AllErrors(result),
              HasSubstr("--set chekpoint.every: unknown key 'chekpoint'; did you mean `checkpoint`?"));
  EXPECT_THAT(AllErrors(result), HasSubstr("--set ranks: `ranks`: '0' is out of range"));
  EXPECT_THAT(AllErrors(result), HasSubstr("--set run.x: `run` is a single value"));
  EXPECT_THAT(AllErrors(result), HasSubstr("--set priority: anchors"));
  for (const char* bad : {"", "=x", "novalue", "a..b=1", ".a=1", "a.=1"})
    EXPECT_FALSE(ApplySet(bad).ok()) << bad;
}

TEST(Overlays, J8RanksOutsideTheFilesRange) {
  ParseOptions options = Options();
  for (const char* n : {"32", "1", "0", "-1", "2147483648", "1000000000", "x", ""}) {
    options.overlays = {Flag(Overlay::Kind::kRanks, "-n", "ranks", n)};
    EXPECT_FALSE(ParseJob("run: a\nranks: {min: 2, max: 8}\n", "f", options).ok()) << n;
  }
}

TEST(Overlays, ACommandLineNeedsNoFile) {
  ParseOptions options = Options();
  Overlay words;
  words.label = "command line";
  words.key = "run";
  words.kind = Overlay::Kind::kWords;
  words.words = {"sh", "-c", "echo $RANK"};
  options.overlays = {words};
  const ParseResult result = ParseJob("", "command line", options);
  ASSERT_TRUE(result.ok()) << AllErrors(result);
  EXPECT_EQ(result.spec.run, words.words);
}

TEST(NameFrom, MakesAName) {
  EXPECT_EQ(NameFrom("a/Train_v2.py"), "train-v2");
  EXPECT_EQ(NameFrom("../.."), "job");
  EXPECT_EQ(NameFrom(""), "job");
  EXPECT_EQ(NameFrom("-rf"), "rf");
}

}  // namespace
}  // namespace gtrain::spec
