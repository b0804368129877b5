#include "runtime/worker/rank_environment.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/json_depth.h"
#include "base/status_macros.h"
#include "runtime/keeper/rank_protocol.h"

namespace gtrain::worker {
namespace {

constexpr size_t kMembersBytesMax = 64 << 20;

class Reader {
 public:
  explicit Reader(const std::function<const char*(const char*)>& get) : get_(get) {}

  std::string Text(const char* name) {
    const char* value = get_(name);
    if (value == nullptr) Fail(name, "is not set");
    return value == nullptr ? "" : value;
  }
  template <typename T>
  T Number(const char* name) {
    const std::string text = Text(name);
    T value = 0;
    if (!absl::SimpleAtoi(text, &value)) Fail(name, absl::StrCat("is '", text, "', not a number"));
    return value;
  }
  void Fail(const char* name, const std::string& what) {
    if (!status_.ok()) return;
    status_ = absl::FailedPreconditionError(absl::StrCat(
        name, " ", what,
        ": the program was not started by gtrain, or something between changed its environment"));
  }
  const absl::Status& status() const { return status_; }

 private:
  const std::function<const char*(const char*)>& get_;
  absl::Status status_;
};

std::string Optional(const std::function<const char*(const char*)>& get, const char* name) {
  const char* value = get(name);
  return value == nullptr ? "" : value;
}

int64_t GlobalBatch(const std::function<const char*(const char*)>& get, Reader& reader) {
  return get("GTRAIN_GLOBAL_BATCH") == nullptr ? 0 : reader.Number<int64_t>("GTRAIN_GLOBAL_BATCH");
}

// "dp=*,tp=2", of an agent that has checked the job file.
std::vector<MeshAxis> ReadMesh(const std::string& text, Reader& reader) {
  std::vector<MeshAxis> mesh;
  for (const absl::string_view word : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> axis =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    int64_t size = 0;
    if (axis.second != "*" && (!absl::SimpleAtoi(axis.second, &size) || size < 1)) {
      reader.Fail("GTRAIN_MESH", absl::StrCat("is '", text, "', no mesh"));
      break;
    }
    mesh.push_back({std::string(axis.first), size});
  }
  return mesh;
}

// What must be equal on ranks that are to compute the same bits (docs/protocols/rank-environment.md).
void ReadDeterminism(const std::function<const char*(const char*)>& get, Reader& reader,
                     RankEnvironment* env) {
  constexpr int kVirtualRanksMax = 65'536;
  constexpr const char* kThreads[] = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
                                      "BLIS_NUM_THREADS"};
  constexpr char kName[] = "GTRAIN_VIRTUAL_RANKS";
  if (get(kName) == nullptr) return;
  env->virtual_ranks = reader.Number<int>(kName);
  if (env->virtual_ranks < 1 || env->virtual_ranks > kVirtualRanksMax)
    reader.Fail(kName, absl::StrCat("is ", env->virtual_ranks, ", not 1 to ", kVirtualRanksMax));
  for (const char* name : kThreads) {
    const char* value = get(name);
    absl::StrAppend(&env->threads, env->threads.empty() ? "" : " ", name, value == nullptr ? " unset" : "=",
                    value == nullptr ? "" : value);
  }
}

// Started by hand. Ranks of another launcher would each believe to be alone: refused.
absl::StatusOr<RankEnvironment> Unmanaged(const std::function<const char*(const char*)>& get) {
  // torchrun's, Open MPI's, MPICH's (and Intel MPI's), and that of srun for what it starts: an allocation
  // alone has no step of more than one task.
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* world = get(name);
    int ranks = 1;
    if (world == nullptr || !absl::SimpleAtoi(world, &ranks) || ranks <= 1) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(name, " is ", ranks,
                     " but GTRAIN_GENERATION is not set: these ranks were started by "
                     "another launcher. Start them with `gtrain launch -n ",
                     ranks, " -- PROGRAM`"));
  }
  RankEnvironment env;
  env.has_checkpoints = !Optional(get, "GTRAIN_CHECKPOINT_URI").empty();
  Reader reader(get);
  env.global_batch = GlobalBatch(get, reader);
  ReadDeterminism(get, reader, &env);
  GT_RETURN_IF_ERROR(reader.status());
  env.comm_algorithm = Optional(get, "GTRAIN_COMM_ALGO");
  env.comm_network = Optional(get, "GTRAIN_COMM_TLS");
  env.members.resize(1);
  env.members[0].node = NodeId("local");
  env.members[0].address = "127.0.0.1";
  return env;
}

}  // namespace

absl::StatusOr<std::vector<comm::Member>> ParseMembers(const std::string& text, uint64_t generation,
                                                       int world) {
  const nlohmann::json json = nlohmann::json::parse(ShallowJson(text), nullptr, /*allow_exceptions=*/false);
  std::vector<comm::Member> members(static_cast<size_t>(world));
  std::vector<bool> seen(members.size());
  try {
    if (json.at("generation").get<uint64_t>() != generation) {
      return absl::FailedPreconditionError("GTRAIN_MEMBERS names the members of another generation");
    }
    for (const auto& entry : json.at("members")) {
      const int rank = entry.at("rank").get<int>();
      if (rank < 0 || rank >= world || seen[static_cast<size_t>(rank)]) {
        return absl::FailedPreconditionError(
            absl::StrCat("GTRAIN_MEMBERS: rank ", rank, " is double or not in 0..", world - 1));
      }
      seen[static_cast<size_t>(rank)] = true;
      comm::Member& m = members[static_cast<size_t>(rank)];
      m.rank = rank;
      m.local_rank = entry.at("local_rank").get<int>();
      m.node = NodeId(entry.at("node").get<std::string>());
      m.address = entry.at("address").get<std::string>();
      m.fabric_order = entry.value("fabric_order", 0);
    }
  } catch (const nlohmann::json::exception& e) {
    return absl::FailedPreconditionError(absl::StrCat("GTRAIN_MEMBERS: ", e.what()));
  }
  for (size_t rank = 0; rank < seen.size(); ++rank) {
    if (!seen[rank]) return absl::FailedPreconditionError(absl::StrCat("GTRAIN_MEMBERS: no rank ", rank));
  }
  return members;
}

absl::StatusOr<RankEnvironment> ReadRankEnvironment(const std::function<const char*(const char*)>& get) {
  if (get("GTRAIN_GENERATION") == nullptr) return Unmanaged(get);
  Reader reader(get);
  RankEnvironment env;
  env.managed = true;
  env.rank = reader.Number<int>("RANK");
  env.local_rank = reader.Number<int>("LOCAL_RANK");
  env.world_size = reader.Number<int>("WORLD_SIZE");
  env.generation = reader.Number<uint64_t>("GTRAIN_GENERATION");
  env.timeline = reader.Number<uint64_t>("GTRAIN_TIMELINE");
  env.job = reader.Text("GTRAIN_JOB");
  env.keeper_socket = reader.Text("GTRAIN_KEEPER_SOCKET");
  env.token = reader.Text("GTRAIN_TOKEN");
  env.members_file = reader.Text("GTRAIN_MEMBERS");
  env.job_secret = Optional(get, "GTRAIN_JOB_SECRET");
  env.has_checkpoints = !Optional(get, "GTRAIN_CHECKPOINT_URI").empty();
  env.global_batch = GlobalBatch(get, reader);
  env.mesh = ReadMesh(Optional(get, "GTRAIN_MESH"), reader);
  ReadDeterminism(get, reader, &env);
  env.in_place = Optional(get, "GTRAIN_ELASTIC") == "in-place";
  env.step_copies = Optional(get, "GTRAIN_STEP_COPIES") == "1";
  env.comm_algorithm = Optional(get, "GTRAIN_COMM_ALGO");
  env.comm_network = Optional(get, "GTRAIN_COMM_TLS");
  env.actors_shm = Optional(get, "GTRAIN_ACTORS_SHM");
  GT_RETURN_IF_ERROR(reader.status());
  const bool waits = Optional(get, "GTRAIN_WAITS") == "1";
  if (env.world_size < 1 || env.rank < 0 || (env.rank >= env.world_size && !waits)) {
    return absl::FailedPreconditionError(absl::StrCat("RANK ", env.rank, " of WORLD_SIZE ", env.world_size));
  }
  if (env.token.size() != sizeof(RankHello::token))
    return absl::FailedPreconditionError("GTRAIN_TOKEN has a wrong length");
  return env;
}

std::vector<MeshAxis> MeshOf(const RankEnvironment& env) {
  std::vector<MeshAxis> mesh = env.mesh;
  int64_t others = 1;
  for (const MeshAxis& axis : mesh) others *= std::max<int64_t>(1, axis.size);
  for (MeshAxis& axis : mesh) {
    if (axis.size == 0) axis.size = env.world_size / others;
  }
  if (mesh.empty()) mesh.push_back({"dp", env.world_size});
  return mesh;
}

absl::StatusOr<std::vector<comm::Member>> ReadMembers(const RankEnvironment& env) {
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(env.members_file, kMembersBytesMax));
  return ParseMembers(text, env.generation, env.world_size);
}

}  // namespace gtrain::worker
