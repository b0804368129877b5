// JobSpec: what a job file says, as a value. PURE.
//
// Every field mirrors one key of docs/formats/job-file.md. Defaults are the documented
// ones. The parser (parse.h) fills it and reports every error at once; print.h
// writes the canonical YAML that the parser reads back to an equal value. The
// canonical text is what travels to the head and agents and what the job hash covers.
#pragma once
#include <gtrain/sharding.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace gtrain::spec {

enum class Per { kRank, kNode };
enum class OnError { kWarn, kRetry, kFail };
enum class OnStall { kReport, kKill };
// Whether a generation may begin while ranks of the one before, on a machine that does not answer, may still
// write: those of programs without the SDK, until their lease is over.
enum class Overlap { kWait, kAllow };

struct Range {  // inclusive; min == max for a plain number
  int min = 1;
  int max = 1;
  bool operator==(const Range&) const = default;
};

struct Resources {
  std::optional<int> cpus;         // per rank; nullopt = auto: the node's cores over its ranks
  std::optional<uint64_t> memory;  // bytes per rank; nullopt = unlimited
  std::optional<int> gpus;         // per rank; nullopt = auto: one where there are GPUs
  int gpu_share = 0;  // `gpus: 0.5`: thousandths of one GPU a rank, `gpus` is unset; 0: whole ones
  std::vector<std::string> gpu_type;  // empty = any
  uint64_t shm = 1 << 30;             // bytes of shared-memory arena a node
  std::optional<int> processes;       // and threads, all ranks of a node together; nullopt = auto
  bool visible_node = true;           // visible: node (all GPUs of the job on the node) | rank
  std::optional<bool> oversubscribe;  // nullopt = auto: yes on the local cluster, with a warning
  bool operator==(const Resources&) const = default;
};

inline constexpr int kWholeGpu = 1000;  // Resources::gpu_share of all of it

// Ranks of one machine, of `where.ranks`.
struct RanksOn {
  std::vector<int> ranks;
  std::string host;        // host name or node id
  std::vector<int> slots;  // of each of `ranks`: its place there, which says which GPUs it has; empty: any
  bool operator==(const RanksOn&) const = default;
};

struct SecretRef {  // exactly one is set
  std::string env;
  std::string file;
  bool operator==(const SecretRef&) const = default;
};

// Ranks lie row by row on the axes of `mesh`, in the order of the file: the last one varies fastest.
inline constexpr absl::string_view kDataAxis = "dp";  // of kMeshAxes, the one that may grow and shrink

inline constexpr uint64_t kTrafficBytesMax = uint64_t{1} << 50;  // of an axis, a step

struct MeshAxis {
  std::string name;
  std::optional<int> size;  // nullopt = "*": the ranks over the product of the others; dp alone
  bool operator==(const MeshAxis&) const = default;
};

struct InheritEnv {
  enum class Kind {
    kDefault,
    kAll,
    kNone,
    kList
  } kind = Kind::kDefault;         // default: all on the local cluster
  std::vector<std::string> names;  // for kList
  bool operator==(const InheritEnv&) const = default;
};

// At which saves the ranks that hold a replica of a tensor compare their replicas.
struct VerifyReplicas {
  enum class Kind { kOff, kFirst, kEvery } kind = Kind::kEvery;
  int every = 100;  // kEvery: with the first save and each n-th, 1..kVerifyEveryMax
  bool operator==(const VerifyReplicas&) const = default;
};
inline constexpr int kVerifyEveryMax = 1'000'000'000;
// Prints the words of the job file and GTRAIN_CHECKPOINT_VERIFY_REPLICAS: "off", "first", "every 100".
inline std::string PrintVerifyReplicas(const VerifyReplicas& verify) {
  if (verify.kind == VerifyReplicas::Kind::kOff) return "off";
  return verify.kind == VerifyReplicas::Kind::kFirst ? "first" : "every " + std::to_string(verify.every);
}

inline constexpr char kNearMemory[] = "memory";  // CheckpointPolicy::near

struct CheckpointPolicy {
  std::string uri;                      // empty = no checkpoint
  std::optional<int64_t> every_steps;   // every: "200 steps"
  std::optional<absl::Duration> every;  // every: 30s; both unset = auto
  int keep = 3;
  std::string near;  // where a machine keeps copies of shards: "memory" or an absolute folder; empty: nowhere
  int replicas = 0;  // copies on other machines, on top of that
  OnError on_error = OnError::kWarn;
  int max_rollback = 1;  // damaged checkpoints that a restore may pass over, 0..kMaxRollbackMax (C9)
  VerifyReplicas verify_replicas;
  uint64_t memory_max = 0;  // bytes of a machine that its ranks' saves may take; 0: what is available (C12)
  bool read_only = false;   // the program restores and saves nothing: it never owns the directory
  bool operator==(const CheckpointPolicy&) const = default;
};
inline constexpr int kMaxRollbackMax = 1000;

struct RestartBudget {
  int budget = 10;                         // crashes per window
  absl::Duration window = absl::Hours(1);  // sliding
  int before_first_step = 1;               // crashes allowed before the first step of a generation
  int oom = 1;                             // out-of-memory kills, a budget of their own
  bool operator==(const RestartBudget&) const = default;
};

// One way to send gradients. Shares are in parts of a million; what is unset is the codec's own default
// (ParseCompression in comm/codec/compressor.h).
struct CommCodec {
  std::string codec;            // a word of CodecName
  std::optional<int> density;   // topk: share of elements sent
  std::optional<int> momentum;  // onebit: the optimiser's
  std::optional<int> rank;      // powersgd: columns of a factor
  std::optional<int> warmup;    // topk, onebit, powersgd: steps
  std::string residual;         // others than powersgd: "fp32" or "bf16"; empty = unset
  bool operator==(const CommCodec&) const = default;
};

struct CommPolicy {
  bool automatic = false;         // compression: auto; then `codecs` is what it may use beside float32
  std::vector<CommCodec> codecs;  // else at most one; empty = none
  bool deterministic = false;
  bool operator==(const CommPolicy&) const = default;
};

struct Progress {
  std::string step;  // RE2 (base/pattern.h) with one group, searched in each output line; empty = none
  std::string loss;
  absl::Duration startup = absl::Minutes(60);
  absl::Duration stall = absl::Minutes(15);
  OnStall on_stall = OnStall::kReport;
  std::optional<int64_t> steps;  // of the whole training, for people: how far it is, and when it ends
  bool operator==(const Progress&) const = default;
};

struct Preempt {
  std::string signal = "SIGTERM";
  absl::Duration lead = absl::Seconds(90);
  bool operator==(const Preempt&) const = default;
};

struct JobSpec {
  std::string name;
  std::vector<std::string> run;  // argv; empty when script is set
  std::string script;            // bash -euo pipefail
  Per per = Per::kRank;
  std::optional<Range> ranks;  // exactly one of ranks, nodes is set after parsing (ranks defaults to 1)
  std::optional<Range> nodes;
  std::optional<int> ranks_per_node;  // nullopt = auto
  std::vector<MeshAxis> mesh;
  std::map<std::string, uint64_t> traffic;  // by axis of `mesh`: bytes that a rank sends a step; else assumed
  Resources resources;
  std::map<std::string, std::string> where_labels;
  // Words of HostsOf (hosts.h).
  std::vector<std::string> where_hosts;  // only there; empty: wherever
  std::vector<std::string> where_exclude;
  std::string where_rank0;           // on one of these; empty: wherever
  std::vector<RanksOn> where_ranks;  // each rank once; empty: wherever
  std::string workdir;               // absolute once the client resolved it
  std::string setup;                 // runs once a node and content hash
  bool tty = false;          // stdout of each rank is a terminal, so that programs write it line by line
  bool takes_input = false;  // `stdin`: of rank 0, from who launches; with `tty` its terminal is a whole one
  std::map<std::string, std::string> env;
  InheritEnv inherit_env;
  std::map<std::string, SecretRef> secrets;
  CheckpointPolicy checkpoint;
  RestartBudget restart;
  CommPolicy comm;
  Progress progress;
  Preempt preempt;
  absl::Duration stop_grace = absl::Seconds(30);
  Overlap overlap = Overlap::kWait;
  bool in_place = false;  // elastic.mode: processes that can, go on in the next generation
  // Beside the ranks, in what the job counts; with in_place.
  int spares = 0;
  int64_t global_batch = 0;  // samples a step, of all ranks together; 0: the program says
  // elastic.determinism: bitwise: into how many parts a step is cut, whatever the number of ranks; 0: none.
  int virtual_ranks = 0;
  // elastic.step_copies, with in_place and a mesh of more than dp: after each step another rank has a copy of
  // what one rank alone holds.
  bool step_copies = false;
  std::optional<absl::Duration> time_limit;
  std::map<std::string, std::string> labels;
  int priority = 0;
  bool operator==(const JobSpec&) const = default;
};

}  // namespace gtrain::spec
