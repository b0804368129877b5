// ParseCanonical(PrintJob(s)) == s for random specs; the hash covers exactly the job's identity.
#include "job/spec/print.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "job/spec/parse.h"

namespace gtrain::spec {
namespace {

// Text with everything that quoting could get wrong.
std::string RandomText(Rng& rng, bool one_line) {
  static const std::vector<std::string> kPieces = {"a",    "Z9", " ", "\"",           "\\",  "'", "$",
                                                   "${X}", "$$", "#", ": ",           "- ",  "{", "*",
                                                   "é",    "🚂",  "%", "\xE2\x80\xA8", "true"};
  static const std::vector<std::string> kMore = {"\n", "\t", "\r", "\x01", "\x7F", "\xC2\x85"};
  std::string out = "t";
  for (uint64_t n = rng.Below(8); n > 0; --n) {
    const bool more = !one_line && rng.Chance(0.3);
    out += more ? kMore[rng.Below(kMore.size())] : kPieces[rng.Below(kPieces.size())];
  }
  return out;
}

Range RandomRange(Rng& rng) {
  const int min = 1 + static_cast<int>(rng.Below(100));
  return {min, min + static_cast<int>(rng.Below(3))};
}

void Randomize(Resources& r, Rng& rng) {
  if (rng.Chance(0.5)) r.cpus = 1 + static_cast<int>(rng.Below(64));
  if (rng.Chance(0.5)) r.memory = (1 << 20) + rng.Below(uint64_t{1} << 40);
  if (rng.Chance(0.5)) r.gpus = 1 + static_cast<int>(rng.Below(8));
  if (!r.gpus && rng.Chance(0.5)) r.gpu_share = 1 + static_cast<int>(rng.Below(999));
  if (rng.Chance(0.5)) r.gpu_type = {RandomText(rng, true), "B"};
  if (rng.Chance(0.5)) r.shm = (1 << 20) * (1 + rng.Below(4096));
  r.visible_node = rng.Chance(0.5);
  if (rng.Chance(0.5)) r.oversubscribe = rng.Chance(0.5);
}

void RandomizePolicies(JobSpec& s, Rng& rng) {
  if (rng.Chance(0.5)) {
    s.checkpoint.uri = "/c/" + RandomText(rng, true);
    if (rng.Chance(0.3))
      s.checkpoint.every_steps = 1 + static_cast<int64_t>(rng.Below(1000));
    else if (rng.Chance(0.5))
      s.checkpoint.every = absl::Seconds(1 + rng.Below(1000));
    s.checkpoint.keep = 1 + static_cast<int>(rng.Below(5));
    s.checkpoint.on_error = static_cast<OnError>(rng.Below(3));
    s.checkpoint.max_rollback = static_cast<int>(rng.Below(kMaxRollbackMax + 1));
    s.checkpoint.verify_replicas.kind = static_cast<VerifyReplicas::Kind>(rng.Below(3));
    if (s.checkpoint.verify_replicas.kind == VerifyReplicas::Kind::kEvery)
      s.checkpoint.verify_replicas.every = 1 + static_cast<int>(rng.Below(1000));
    s.checkpoint.memory_max = rng.Chance(0.5) ? 0 : (1 << 20) + rng.Below(1 << 30);
    s.checkpoint.read_only = rng.Chance(0.5);
  }
  if (rng.Chance(0.5))
    s.restart = {static_cast<int>(rng.Below(20)), absl::Minutes(1 + rng.Below(100)),
                 static_cast<int>(rng.Below(3)), 0};
  if (rng.Chance(0.5)) {
    s.comm.automatic = rng.Chance(0.5);
    s.comm.codecs = {{.codec = "topk", .density = 1 + static_cast<int>(rng.Below(1'000'000)), .warmup = 0}};
    if (rng.Chance(0.5)) s.comm.codecs[0].residual = rng.Chance(0.5) ? "bf16" : "fp32";
    if (s.comm.automatic) s.comm.codecs.push_back({.codec = "onebit", .momentum = 900'000});
    if (rng.Chance(0.3))
      s.comm.codecs.push_back({.codec = "powersgd", .rank = 1 + static_cast<int>(rng.Below(64))});
    if (!s.comm.automatic) s.comm.codecs.resize(1);
  }
  s.comm.deterministic = !s.comm.automatic && rng.Chance(0.5);
  if (rng.Chance(0.5)) s.progress.step = R"(st"e\.p (\d+))";
  if (rng.Chance(0.5)) s.progress.stall = absl::Seconds(10 + rng.Below(1000));
  if (rng.Chance(0.5)) s.progress.on_stall = OnStall::kKill;
  if (rng.Chance(0.5)) s.progress.steps = 1 + static_cast<int64_t>(rng.Below(1'000'000));
  if (rng.Chance(0.5)) s.preempt = {"SIGUSR2", absl::Seconds(100 + rng.Below(10))};
  if (rng.Chance(0.5)) s.stop_grace = absl::Milliseconds(rng.Below(90'000));
  if (rng.Chance(0.5)) s.overlap = Overlap::kAllow;
  s.in_place = rng.Chance(0.5);
  if (s.in_place) s.spares = static_cast<int>(rng.Below(3));
  if (rng.Chance(0.3)) s.global_batch = 1 + static_cast<int64_t>(rng.Below(1 << 20));
  if (s.comm.codecs.empty() && rng.Chance(0.5)) s.virtual_ranks = 2000 + static_cast<int>(rng.Below(60'000));
  if (rng.Chance(0.5)) s.tty = true;
  if (rng.Chance(0.5)) s.takes_input = true;
  if (rng.Chance(0.5)) s.time_limit = absl::Hours(1 + rng.Below(100));
}

JobSpec RandomSpec(Rng& rng) {
  JobSpec s;
  s.name = "job-" + std::to_string(rng.Below(1000));
  if (rng.Chance(0.7))
    s.run = {RandomText(rng, false), "", RandomText(rng, false)};
  else
    s.script = RandomText(rng, false);
  if (rng.Chance(0.3)) s.setup = RandomText(rng, false);
  if (rng.Chance(0.3)) {
    s.nodes = RandomRange(rng);
    if (rng.Chance(0.5))
      s.per = Per::kNode;
    else if (rng.Chance(0.5))
      s.ranks_per_node = 1 + static_cast<int>(rng.Below(16));
  } else {
    s.ranks = RandomRange(rng);
  }
  if (rng.Chance(0.3)) s.mesh = {{"dp", std::nullopt}};
  const bool in_units = s.ranks && s.ranks->min % 2 == 0 && s.ranks->max % 2 == 0;
  if (!s.mesh.empty() && in_units) s.mesh.push_back({"tp", 2});
  if (!s.mesh.empty() && rng.Chance(0.5))
    s.traffic = {{s.mesh.back().name, 1 + rng.Below(uint64_t{1} << 40)}};
  Randomize(s.resources, rng);
  if (rng.Chance(0.5)) s.where_labels = {{"a.b/c", RandomText(rng, true)}, {"true", ""}};
  if (rng.Chance(0.5)) s.where_exclude = {RandomText(rng, true)};
  if (rng.Chance(0.3)) s.where_hosts = {"tux[0-3,12]", RandomText(rng, true)};
  if (rng.Chance(0.5)) s.workdir = "/w/" + RandomText(rng, true);
  if (rng.Chance(0.5)) s.env = {{"A", RandomText(rng, false)}, {"NULL", ""}, {"no", "no"}};
  if (rng.Chance(0.5))
    s.inherit_env = {InheritEnv::Kind::kList, {"HOME", "yes_"}};
  else
    s.inherit_env.kind = static_cast<InheritEnv::Kind>(rng.Below(3));
  if (rng.Chance(0.5)) s.secrets = {{"S", {"E", ""}}, {"T", {"", "/f " + RandomText(rng, true)}}};
  RandomizePolicies(s, rng);
  if (rng.Chance(0.5)) s.labels = {{"team", RandomText(rng, true)}};
  if (!s.in_place && rng.Chance(0.3)) s.where_rank0 = "node-3";
  if (!s.in_place && s.where_rank0.empty() && s.ranks && s.ranks->min == s.ranks->max && rng.Chance(0.5)) {
    const int all = s.ranks->max;
    s.where_ranks = {{{all - 1}, "b.lab", {7}}};
    if (all > 1) s.where_ranks.push_back({{}, "a-1", {}});
    for (int rank = 0; rank < all - 1; ++rank) s.where_ranks.back().ranks.push_back(rank);
  }
  // A mesh of more than dp goes with neither.
  if (s.mesh.size() > 1) s.virtual_ranks = 0;
  s.step_copies = s.in_place && s.mesh.size() > 1 && rng.Chance(0.5);
  if (s.in_place && s.mesh.size() > 1) s.comm.codecs.clear(), s.comm.automatic = false;
  s.priority = static_cast<int>(rng.Below(2001)) - 1000;
  return s;
}

TEST(PrintJob, ParsesBackToAnEqualValue) {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    Rng rng(seed);
    const JobSpec spec = RandomSpec(rng);
    const std::string text = PrintJob(spec);
    const absl::StatusOr<JobSpec> again = ParseCanonical(text);
    ASSERT_TRUE(again.ok()) << "seed " << seed << ": " << again.status() << "\n" << text;
    ASSERT_TRUE(*again == spec) << "seed " << seed << "\n" << text << "\nbut again:\n" << PrintJob(*again);
    ASSERT_EQ(PrintJob(*again), text);
    ASSERT_EQ(JobHash(*again), JobHash(spec));
  }
}

TEST(JobHash, CoversTheIdentityOnly) {
  JobSpec spec;
  spec.name = "a";
  spec.run = {"train", "--lr", "1"};
  spec.ranks = Range{4, 4};
  const std::string hash = JobHash(spec);
  EXPECT_EQ(hash.size(), 32u);

  JobSpec same = spec;
  same.name = "b";
  same.ranks = Range{2, 8};
  same.resources.gpus = 1;
  same.traffic = {{"dp", 1}};
  same.where_rank0 = "c";
  same.where_ranks = {{{0}, "a", {}}};
  same.where_hosts = {"a[0-1]"};
  same.workdir = "/elsewhere";
  same.checkpoint.uri = "/c";
  same.checkpoint.max_rollback = 7;
  same.checkpoint.verify_replicas = {VerifyReplicas::Kind::kEvery, 3};
  same.checkpoint.memory_max = 1 << 30;
  same.checkpoint.read_only = true;
  same.labels = {{"x", "y"}};
  EXPECT_EQ(JobHash(same), hash);

  for (int what = 0; what < 4; ++what) {
    JobSpec other = spec;
    if (what == 0) other.run.back() = "2";
    if (what == 1) other.env = {{"LR", "1"}};
    if (what == 2) other.mesh = {{"dp", std::nullopt}};
    if (what == 3) other.per = Per::kNode;
    EXPECT_NE(JobHash(other), hash) << what;
  }
}

// Hashes are in checkpoints: they must not change with a release.
TEST(JobHash, IsStable) {
  JobSpec spec;
  spec.run = {"train"};
  EXPECT_EQ(JobHash(spec), "5819425a5d30e279292e9c9196ed501e");
}

}  // namespace
}  // namespace gtrain::spec
