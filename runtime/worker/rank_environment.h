// The variables that gtrain put into this process's environment (docs/protocols/rank-environment.md).
#pragma once
#include <gtrain/sharding.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/port/bootstrap.h"

namespace gtrain::worker {

struct RankEnvironment {
  bool managed = false;  // no GTRAIN_GENERATION: the program was started by hand
  int rank = 0;
  int local_rank = 0;
  int world_size = 1;
  uint64_t generation = 0;
  uint64_t timeline = 0;
  std::string job;
  std::string keeper_socket;
  std::string token;
  std::string members_file;
  std::string job_secret;    // GTRAIN_JOB_SECRET; empty: not set
  int64_t global_batch = 0;  // GTRAIN_GLOBAL_BATCH, of the job file; 0: it says none
  // GTRAIN_VIRTUAL_RANKS, with elastic.determinism: bitwise; 0: it asks for no such thing. And the variables
  // that set numbers of threads, as "OMP_NUM_THREADS=1 MKL_NUM_THREADS unset".
  int virtual_ranks = 0;
  std::string threads;
  std::vector<MeshAxis> mesh;         // GTRAIN_MESH, of the job file; the size of `*` is 0
  bool in_place = false;              // GTRAIN_ELASTIC: a process that can, goes on in the next generation
  bool step_copies = false;           // GTRAIN_STEP_COPIES is 1
  bool has_checkpoints = false;       // GTRAIN_CHECKPOINT_URI is set
  std::string comm_algorithm;         // GTRAIN_COMM_ALGO as it is; empty: not set
  std::string comm_network;           // the same of GTRAIN_COMM_TLS
  std::string actors_shm;             // and of GTRAIN_ACTORS_SHM
  std::vector<comm::Member> members;  // of an unmanaged process: itself
};

// `get` is getenv(). FailedPrecondition says which variable is wrong.
absl::StatusOr<RankEnvironment> ReadRankEnvironment(const std::function<const char*(const char*)>& get);

// The axes with their sizes among `world` ranks: one of all of them where the job file has no mesh.
std::vector<MeshAxis> MeshOf(const RankEnvironment& env);

// The members file, index = rank. FailedPrecondition, NotFound: it does not belong to this generation.
absl::StatusOr<std::vector<comm::Member>> ReadMembers(const RankEnvironment& env);

// The content of $GTRAIN_MEMBERS: as many members as `world`, in any order.
absl::StatusOr<std::vector<comm::Member>> ParseMembers(const std::string& json, uint64_t generation,
                                                       int world);

}  // namespace gtrain::worker
