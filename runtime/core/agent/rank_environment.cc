#include "runtime/core/agent/rank_environment.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "runtime/core/agent/rank_network.h"
#include "runtime/core/values/near_peers.h"

namespace gtrain::core {

namespace {

using Env = std::map<std::string, std::string>;

// Would put foreign code into every process of the job before its first line.
bool Forbidden(const std::string& name) { return name == "LD_PRELOAD" || name == "LD_AUDIT"; }

// The variables that a program needs to run at all, taken from the agent when the client's environment is not
// inherited.
Env BaseEnv(const Env& own) {
  Env env = {{"PATH", "/usr/local/bin:/usr/bin:/bin"}};
  for (const char* name : {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR"}) {
    const auto it = own.find(name);
    if (it != own.end()) env[name] = it->second;
  }
  return env;
}

absl::StatusOr<std::string> SecretIn(const StartFacts& facts, const std::string& file) {
  const auto read = facts.secrets.find(file);
  if (read == facts.secrets.end()) return absl::NotFoundError(absl::StrCat("nobody has read ", file));
  return read->second;
}

absl::Status AddSecrets(const AgentConfig& config, const GenerationGrant& grant, const spec::JobSpec& spec,
                        const StartFacts& facts, Env* env) {
  for (const auto& [name, reference] : spec.secrets) {
    if (!reference.file.empty()) {
      auto value = SecretIn(facts, reference.file);
      if (!value.ok()) {
        return absl::FailedPreconditionError(absl::StrCat("secret ", name, " cannot be read on ",
                                                          config.hostname, ": ", value.status().message()));
      }
      (*env)[name] = *std::move(value);
      continue;
    }
    const auto inherited = grant.client_env.find(reference.env);
    const auto own = config.own_env.find(reference.env);
    if (inherited != grant.client_env.end()) {
      (*env)[name] = inherited->second;
    } else if (own != config.own_env.end()) {
      (*env)[name] = own->second;
    } else {
      return absl::FailedPreconditionError(
          absl::StrCat("secret ", name, ": the variable ", reference.env,
                       " is not set in the environment of the agent on ", config.hostname,
                       ", from where the secrets of a cluster's jobs come. Set it there, or name a file: "
                       "secrets: {",
                       name, ": {file: PATH}}"));
    }
  }
  return absl::OkStatus();
}

struct Place {
  int local_rank = 0;
  int local_world = 0;
  int group = 0;
};

Place PlaceOf(const GenerationGrant& grant, int rank) {
  Place place;
  const RankPlace& own = PlaceOfRank(grant, rank);
  place.local_rank = own.local_rank;
  for (const RankPlace& other : grant.ranks) place.local_world += other.node == own.node ? 1 : 0;
  for (size_t i = 0; i < grant.nodes.size(); ++i) {
    if (grant.nodes[i].node == own.node) place.group = static_cast<int>(i);
  }
  return place;
}

void AddTorchrun(const GenerationGrant& grant, const spec::JobSpec& spec, int rank, const Place& place,
                 Env* env) {
  const std::string world = absl::StrCat(grant.world_size), local = absl::StrCat(place.local_rank);
  const std::string local_world = absl::StrCat(place.local_world), group = absl::StrCat(place.group);
  const std::string number = absl::StrCat(rank), port = absl::StrCat(grant.master_port);
  const Env values = {
      {"RANK", number},
      {"LOCAL_RANK", local},
      {"WORLD_SIZE", world},
      {"LOCAL_WORLD_SIZE", local_world},
      {"GROUP_RANK", group},
      {"GROUP_WORLD_SIZE", absl::StrCat(grant.nodes.size())},
      {"NODE_RANK", group},
      {"ROLE_RANK", number},
      {"ROLE_WORLD_SIZE", world},
      {"ROLE_NAME", "default"},
      {"MASTER_ADDR", grant.master_address},
      {"MASTER_PORT", port},
      {"TORCHELASTIC_RUN_ID", grant.job.value},
      {"TORCHELASTIC_RESTART_COUNT", absl::StrCat(grant.restart_count)},
      {"TORCHELASTIC_MAX_RESTARTS", absl::StrCat(spec.restart.budget)},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"JAX_COORDINATOR_ADDRESS", absl::StrCat(grant.master_address, ":", port)},
      {"OMPI_COMM_WORLD_RANK", number},
      {"OMPI_COMM_WORLD_SIZE", world},
      {"OMPI_COMM_WORLD_LOCAL_RANK", local},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", local_world},
      {"OMPI_COMM_WORLD_NODE_RANK", group},
  };
  for (const auto& [name, value] : values) (*env)[name] = value;
  if (place.local_world > 1) env->emplace("OMP_NUM_THREADS", "1");
}

void AddGpus(const AgentConfig& config, const GenerationGrant& grant, const spec::JobSpec& spec, int rank,
             Env* env) {
  const std::vector<GpuInfo>& all = config.inventory.gpus;
  if (all.empty()) return;  // no GPU here: leave whatever the user says
  // One that is shared is a rank's only one. Where a process sees an instance (MIG), CUDA shows it the first
  // and nothing else, so each rank sees its own.
  const auto is_instance = [&](int gpu) {
    return gpu >= 0 && gpu < static_cast<int>(all.size()) &&
           absl::StartsWith(all[static_cast<size_t>(gpu)].uuid, "MIG-");
  };
  std::vector<int> mine = VisibleGpus(grant, config.node);
  const bool instances = std::ranges::any_of(mine, is_instance);
  if (!spec.resources.visible_node || spec.resources.gpu_share > 0 || instances)
    mine = PlaceOfRank(grant, rank).gpus;
  std::vector<std::string> names;
  for (int gpu : mine) {
    if (gpu >= 0 && gpu < static_cast<int>(all.size())) names.push_back(all[static_cast<size_t>(gpu)].uuid);
  }
  (*env)["CUDA_VISIBLE_DEVICES"] = absl::StrJoin(names, ",");
}

// "2 a 10.0.0.2:7071 KEY,b 10.0.0.3:7071 KEY": how many of them keep copies of this node's shards, then name,
// address and key of each.
std::string PeersText(const GenerationGrant& grant, const NodeId& self, int replicas) {
  size_t index = 0;
  while (index < grant.nodes.size() && grant.nodes[index].node != self) ++index;
  if (index == grant.nodes.size()) return "";
  const std::vector<size_t> peers = NearPeers(grant.nodes, index, replicas, grant.holders);
  if (peers.empty()) return "";
  const size_t holders = ChooseHolders(grant.nodes, replicas, grant.holders)[index].size();
  std::vector<std::string> texts;
  for (size_t peer : peers) {
    const NodePlace& node =
        peer < grant.nodes.size() ? grant.nodes[peer] : grant.holders[peer - grant.nodes.size()];
    const bool v6 = absl::StrContains(node.address, ':');
    texts.push_back(absl::StrCat(absl::StrReplaceAll(node.hostname, {{" ", "_"}, {",", "_"}}), " ",
                                 v6 ? "[" : "", node.address, v6 ? "]:" : ":", node.near_port, " ",
                                 node.near_key));
  }
  return absl::StrCat(holders, " ", absl::StrJoin(texts, ","));
}

void AddCheckpoint(const AgentConfig& config, const GenerationGrant& grant, const spec::JobSpec& spec,
                   Env* env) {
  const spec::CheckpointPolicy& policy = spec.checkpoint;
  // Unset lets the checkpointer apply the identity rule: it resumes only what this job wrote.
  if (!grant.resume.empty()) (*env)["GTRAIN_RESUME"] = grant.resume;
  if (grant.newest && !grant.newest->manifest.empty())
    (*env)["GTRAIN_CHECKPOINT_NEWEST"] = grant.newest->manifest;
  if (grant.takeover) (*env)["GTRAIN_TAKEOVER"] = "1";
  if (!grant.live_jobs.empty()) {
    (*env)["GTRAIN_LIVE_JOBS"] = absl::StrJoin(
        grant.live_jobs, ",", [](std::string* out, const JobId& job) { out->append(job.value); });
  }
  if (policy.uri.empty()) return;
  std::string every = "auto", on_error = "warn";
  if (policy.every_steps) every = absl::StrCat(*policy.every_steps, " steps");
  if (policy.every) every = PrintDuration(*policy.every);
  if (policy.on_error == spec::OnError::kRetry) on_error = "retry";
  if (policy.on_error == spec::OnError::kFail) on_error = "fail";
  (*env)["GTRAIN_CHECKPOINT_URI"] = policy.uri;
  (*env)["GTRAIN_CHECKPOINT_EVERY"] = every;
  (*env)["GTRAIN_CHECKPOINT_KEEP"] = absl::StrCat(policy.keep);
  (*env)["GTRAIN_CHECKPOINT_ON_ERROR"] = on_error;
  (*env)["GTRAIN_CHECKPOINT_MAX_ROLLBACK"] = absl::StrCat(policy.max_rollback);
  (*env)["GTRAIN_CHECKPOINT_VERIFY_REPLICAS"] = spec::PrintVerifyReplicas(policy.verify_replicas);
  if (policy.memory_max != 0) (*env)["GTRAIN_CHECKPOINT_MEMORY_MAX"] = absl::StrCat(policy.memory_max);
  if (policy.read_only) (*env)["GTRAIN_CHECKPOINT_READ_ONLY"] = "1";
  const std::string near = NearFolderOf(config, policy.near);
  if (near.empty()) return;
  (*env)["GTRAIN_CHECKPOINT_NEAR"] = absl::StrCat(config.near_bytes_max, " ", near);
  const std::string peers =
      policy.replicas == 0 || grant.near_secret.empty() ? "" : PeersText(grant, config.node, policy.replicas);
  if (peers.empty()) return;
  (*env)["GTRAIN_CHECKPOINT_PEERS"] = peers;
  (*env)["GTRAIN_CHECKPOINT_SECRET"] = grant.near_secret;  // for programs of the version before
}

// Writes the codecs in the words of ParseCompression (comm/codec/compressor.h).
void AddCompression(const spec::CommPolicy& comm, Env* env) {
  if (comm.codecs.empty()) return;
  const auto word = [](std::string* out, const spec::CommCodec& codec) {
    *out += codec.codec;
    if (codec.density) absl::StrAppend(out, " density=", PrintShare(*codec.density));
    if (codec.momentum) absl::StrAppend(out, " momentum=", PrintShare(*codec.momentum));
    if (codec.rank) absl::StrAppend(out, " rank=", *codec.rank);
    if (codec.warmup) absl::StrAppend(out, " warmup=", *codec.warmup);
    if (!codec.residual.empty()) absl::StrAppend(out, " residual=", codec.residual);
  };
  (*env)["GTRAIN_COMPRESSION"] =
      absl::StrCat(comm.automatic ? "auto: " : "", absl::StrJoin(comm.codecs, ", ", word));
}

// Beside what the user says of the algorithm (comm/plan/cost.h).
void AddDeterministic(const spec::CommPolicy& comm, Env* env) {
  constexpr absl::string_view kWord = "deterministic";
  std::string& words = (*env)["GTRAIN_COMM_ALGO"];
  if (comm.deterministic && !absl::EndsWith(words, kWord))
    absl::StrAppend(&words, words.empty() ? "" : "+", kWord);
  if (words.empty()) env->erase("GTRAIN_COMM_ALGO");
}

// "dp=*,tp=2"
std::string MeshVariable(const std::vector<spec::MeshAxis>& mesh) {
  return absl::StrJoin(mesh, ",", [](std::string* out, const spec::MeshAxis& axis) {
    absl::StrAppend(out, axis.name, "=", axis.size ? absl::StrCat(*axis.size) : "*");
  });
}

// With virtual ranks every rank has one number of threads, which follows from the job file alone: neither
// from the shell that launches nor from how many ranks a machine has. More threads add in another order.
void AddElastic(const spec::JobSpec& spec, Env* env) {
  if (spec.in_place) (*env)["GTRAIN_ELASTIC"] = "in-place";
  if (!spec.mesh.empty()) (*env)["GTRAIN_MESH"] = MeshVariable(spec.mesh);
  if (spec.global_batch > 0) (*env)["GTRAIN_GLOBAL_BATCH"] = absl::StrCat(spec.global_batch);
  if (spec.step_copies) (*env)["GTRAIN_STEP_COPIES"] = "1";
  if (spec.virtual_ranks == 0) return;
  (*env)["GTRAIN_VIRTUAL_RANKS"] = absl::StrCat(spec.virtual_ranks);
  const auto written = spec.env.find("OMP_NUM_THREADS");
  const std::string threads =
      written != spec.env.end() ? written->second : absl::StrCat(spec.resources.cpus.value_or(1));
  for (const char* name :
       {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"}) {
    if (spec.env.count(name) == 0) (*env)[name] = threads;
  }
  for (const char* name : {"OMP_DYNAMIC", "MKL_DYNAMIC"}) {
    if (spec.env.count(name) == 0) (*env)[name] = "FALSE";
  }
}

constexpr const char* kOwnVariables[] = {
    "GTRAIN_CHECKPOINT_URI",
    "GTRAIN_CHECKPOINT_EVERY",
    "GTRAIN_CHECKPOINT_KEEP",
    "GTRAIN_CHECKPOINT_MAX_ROLLBACK",
    "GTRAIN_CHECKPOINT_MEMORY_MAX",
    "GTRAIN_CHECKPOINT_NEAR",
    "GTRAIN_CHECKPOINT_NEWEST",
    "GTRAIN_CHECKPOINT_ON_ERROR",
    "GTRAIN_CHECKPOINT_PEERS",
    "GTRAIN_CHECKPOINT_READ_ONLY",
    "GTRAIN_CHECKPOINT_SECRET",
    "GTRAIN_CHECKPOINT_VERIFY_REPLICAS",
    "GTRAIN_COMPRESSION",
    "GTRAIN_ELASTIC",
    "GTRAIN_GLOBAL_BATCH",
    "GTRAIN_JOB_SECRET",
    "GTRAIN_KEEPER_SOCKET",
    "GTRAIN_LIVE_JOBS",
    "GTRAIN_MESH",
    "GTRAIN_RESUME",
    "GTRAIN_STEP_COPIES",
    "GTRAIN_TAKEOVER",
    "GTRAIN_VIRTUAL_RANKS",
    "GTRAIN_WAITS",
};

}  // namespace

absl::StatusOr<Env> RankEnvironment(const AgentConfig& config, const GenerationGrant& grant,
                                    const spec::JobSpec& spec, const StartFacts& facts, int rank,
                                    const std::string& token) {
  Env env = BaseEnv(config.own_env);
  for (const auto& [name, value] : grant.client_env) env[name] = value;
  for (const auto& [name, value] : spec.env) env[name] = value;
  // Left over from an outer launch, these would be taken for ours.
  for (const char* name : kOwnVariables) {
    if (spec.env.count(name) == 0) env.erase(name);
  }
  // The output of a Python program is seen when it prints it; anywhere but on a terminal it would keep 8 KiB
  // back.
  env.emplace("PYTHONUNBUFFERED", "1");
  GT_RETURN_IF_ERROR(AddSecrets(config, grant, spec, facts, &env));
  for (auto it = env.begin(); it != env.end();) it = Forbidden(it->first) ? env.erase(it) : std::next(it);

  AddElastic(spec, &env);  // before the default of OMP_NUM_THREADS
  AddTorchrun(grant, spec, rank, PlaceOf(grant, rank), &env);
  AddGpus(config, grant, spec, rank, &env);
  AddNetwork(config.inventory, facts.network ? *facts.network : config.inventory.network, grant, rank,
             config.own_env, &env);
  AddCheckpoint(config, grant, spec, &env);
  AddCompression(spec.comm, &env);
  AddDeterministic(spec.comm, &env);
  const Env own = {
      {"GTRAIN_JOB", grant.job.value},
      {"GTRAIN_JOB_NAME", spec.name},
      {"GTRAIN_JOB_HASH", config.job_hash(spec)},
      {"GTRAIN_CLUSTER", config.cluster.value},
      {"GTRAIN_NODE", config.node.value},
      {"GTRAIN_GENERATION", absl::StrCat(grant.generation.value)},
      {"GTRAIN_TIMELINE", absl::StrCat(grant.timeline.value)},
      {"GTRAIN_MEMBERS", MembersPath(grant, config.node)},
      {"GTRAIN_TOKEN", token},
      {"GTRAIN_REPORT", ReportPath(grant.run_dir, grant.generation, rank)},
      {"GTRAIN_NOTICE_FILE", NoticePath(grant.run_dir, grant.generation, rank)},
      {"GTRAIN_RUN_DIR", grant.run_dir},
  };
  for (const auto& [name, value] : own) env[name] = value;
  if (!grant.near_secret.empty()) env["GTRAIN_JOB_SECRET"] = grant.near_secret;
  // Its RANK is none of the world: a program that would not wait for its place ends with an error.
  if (rank >= grant.world_size) env["GTRAIN_WAITS"] = "1";
  return env;
}

std::string NearFolderOf(const AgentConfig& config, const std::string& near) {
  if (near.empty() || config.near_bytes_max == 0) return "";
  if (near == spec::kNearMemory) return config.near_memory;
  return absl::StrCat(near, "/",
                      config.node.value);  // agents of one machine, or of one shared disk, stay apart
}

std::vector<std::string> RankCommand(const GenerationGrant& grant, const spec::JobSpec& spec,
                                     const NodeId& node, const std::string& job_hash) {
  std::vector<std::string> argv = spec.run;
  if (!spec.script.empty()) argv = {"bash", "-euo", "pipefail", "-c", spec.script, "script"};
  if (spec.setup.empty()) return argv;
  // The first process of the node runs the setup under a lock, the others wait for its mark. A failure is
  // marked too, for this generation: the others do not run it again.
  const std::string wrapper = absl::StrCat(
      "set -uo pipefail; mark=$1; text=$2; shift 2; failed=$mark.failed-$GTRAIN_GENERATION\n"
      "exec 9>>\"$mark.lock\" && flock 9 || exit 126\n"
      "if [ ! -e \"$mark\" ] && [ ! -e \"$failed\" ]; then\n"
      "  bash -euo pipefail -c \"$text\" setup 9>&-; code=$?\n"
      "  if [ $code = 0 ]; then : > \"$mark\"; else echo $code > \"$failed\"; fi || exit 126\n"
      "fi\n"
      "if [ -e \"$failed\" ]; then code=$(<\"$failed\"); echo \"",
      kSetupFailed, " with exit code $code\" >&2; exit $code; fi\nexec 9>&-; exec \"$@\"");
  const std::string mark = absl::StrCat(grant.run_dir, "/ranks/setup-", node.value, "-", job_hash);
  std::vector<std::string> wrapped = {"bash", "-c", wrapper, "setup", mark, spec.setup};
  wrapped.insert(wrapped.end(), argv.begin(), argv.end());
  return wrapped;
}

std::vector<int> VisibleGpus(const GenerationGrant& grant, const NodeId& node) {
  std::vector<const RankPlace*> local;
  for (const auto* places : {&grant.ranks, &grant.waiting}) {  // who waits uses its own when it has a place
    for (const RankPlace& place : *places) {
      if (place.node == node) local.push_back(&place);
    }
  }
  std::sort(local.begin(), local.end(),
            [](const RankPlace* a, const RankPlace* b) { return a->local_rank < b->local_rank; });
  std::vector<int> order;
  auto add = [&order](int gpu) {
    if (std::find(order.begin(), order.end(), gpu) == order.end()) order.push_back(gpu);
  };
  for (const RankPlace* place : local) {
    if (!place->gpus.empty()) add(place->gpus[0]);
  }
  for (const RankPlace* place : local) {
    for (int gpu : place->gpus) add(gpu);
  }
  return order;
}

std::string MembersJson(const GenerationGrant& grant) {
  nlohmann::json members = nlohmann::json::array();
  const bool ordered =
      std::ranges::any_of(grant.nodes, [](const NodePlace& node) { return node.fabric_order != 0; });
  for (size_t rank = 0; rank < grant.ranks.size(); ++rank) {
    const RankPlace& place = grant.ranks[rank];
    nlohmann::json member = {{"rank", rank}, {"local_rank", place.local_rank}, {"node", place.node.value}};
    for (const NodePlace& node : grant.nodes) {
      if (node.node != place.node) continue;
      member["address"] = node.address;
      member["hostname"] = node.hostname;
      if (ordered) member["fabric_order"] = node.fabric_order;
    }
    members.push_back(std::move(member));
  }
  const nlohmann::json all = {{"generation", grant.generation.value}, {"members", std::move(members)}};
  return all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string MembersPath(const GenerationGrant& grant, const NodeId& node) {
  size_t group = 0;
  for (size_t i = 0; i < grant.nodes.size(); ++i) {
    if (grant.nodes[i].node == node) group = i;
  }
  return absl::StrCat(grant.run_dir, "/ranks/generation-", grant.generation.value, "/members-", group,
                      ".json");
}

std::string ReportPath(const std::string& run_dir, Generation generation, int rank) {
  return absl::StrCat(run_dir, "/ranks/generation-", generation.value, "/rank-", rank, ".report");
}

std::string NoticePath(const std::string& run_dir, Generation generation, int rank) {
  return absl::StrCat(run_dir, "/ranks/generation-", generation.value, "/rank-", rank, ".notice");
}

std::string RankLogPath(const std::string& run_dir, Generation generation, int rank, bool is_stderr) {
  return absl::StrCat(run_dir, "/logs/generation-", generation.value, "/rank-", rank,
                      is_stderr ? ".err" : ".out");
}

}  // namespace gtrain::core
