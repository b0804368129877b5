// One function a key. A value that needs a capability which is not built yet is refused with that reason
// (Refuse), never accepted and ignored. Rules between keys are in check.cc.
#include "job/spec/job_reader.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/path.h"
#include "base/pattern.h"
#include "job/spec/hosts.h"
#include "job/spec/nearest.h"
#include "job/spec/words.h"

namespace gtrain::spec {
namespace {

constexpr absl::Duration kLongest = absl::Hours(24 * 365);
constexpr size_t kWordsMax = 4096;
constexpr int kSlotsMax = 65'536;            // of a machine
constexpr size_t kWordBytesMax = 128 << 10;  // Linux refuses longer arguments

struct Synonym {
  absl::string_view wrong;
  absl::string_view right;
};

// Names of other launchers' job files, and keys written at the top instead of in their section.
constexpr Synonym kSynonyms[] = {
    {"command", "run"},
    {"cmd", "run"},
    {"entrypoint", "run"},
    {"nproc", "ranks"},
    {"np", "ranks"},
    {"nproc_per_node", "ranks_per_node"},
    {"ntasks", "ranks"},
    {"num_nodes", "nodes"},
    {"nnodes", "nodes"},
    {"cwd", "workdir"},
    {"envs", "env"},
    {"environment", "env"},
    {"cpus", "resources.cpus"},
    {"gpus", "resources.gpus"},
    {"memory", "resources.memory"},
    {"gpu_type", "resources.gpu_type"},
    {"exclude", "where.exclude"},
    {"hosts", "where.hosts"},
    {"nodelist", "where.hosts"},
    {"uri", "checkpoint.uri"},
    {"time", "limits.time"},
    {"timeout", "limits.time"},
    {"max_restarts", "restart.budget"},
    {"accelerators", "resources.gpus"},
};

constexpr absl::string_view kSetByGtrain[] = {"RANK",
                                              "LOCAL_RANK",
                                              "WORLD_SIZE",
                                              "LOCAL_WORLD_SIZE",
                                              "GROUP_RANK",
                                              "GROUP_WORLD_SIZE",
                                              "NODE_RANK",
                                              "ROLE_RANK",
                                              "ROLE_NAME",
                                              "ROLE_WORLD_SIZE",
                                              "MASTER_ADDR",
                                              "MASTER_PORT",
                                              "JAX_COORDINATOR_ADDRESS",
                                              "CUDA_VISIBLE_DEVICES"};

// CodecName of comm/codec/compressor.h but for `none`.
constexpr absl::string_view kCodecs[] = {"fp16", "bf16", "int8", "fp8", "topk", "onebit", "powersgd"};
constexpr absl::string_view kResiduals[] = {"fp32", "bf16"};
constexpr int kMatrixRankMax = 64;  // likewise
constexpr int kWholeShare = 1'000'000;

constexpr absl::string_view kSignals[] = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"};

// A part of one GPU in thousandths: a decimal of at most three digits, or 1/N; 0: it is none.
int GpuShareOf(absl::string_view text) {
  int number = 0;
  if (absl::ConsumePrefix(&text, "1/"))
    return absl::c_all_of(text, absl::ascii_isdigit) && absl::SimpleAtoi(text, &number) && number >= 2 &&
                   number <= kWholeGpu
               ? kWholeGpu / number
               : 0;
  if (!absl::ConsumePrefix(&text, "0.") || text.empty() || text.size() > 3 ||
      !absl::c_all_of(text, absl::ascii_isdigit))
    return 0;
  return absl::SimpleAtoi(absl::StrCat(text, std::string(3 - text.size(), '0')), &number) ? number : 0;
}

}  // namespace

void JobReader::Refuse(const Node& node, absl::string_view key, absl::string_view why) {
  values_.Error(node, key, absl::StrCat(why, ". It is refused rather than ignored"));
}

std::string JobReader::UnknownKey(absl::string_view key, absl::string_view path,
                                  const std::vector<Key>& keys) const {
  std::vector<std::string> names;
  for (const Key& k : keys) names.push_back(k.name);
  std::string hint;
  if (path.empty()) {
    for (const Synonym& synonym : kSynonyms) {
      if (key == synonym.wrong) hint = std::string(synonym.right);
    }
  }
  if (hint.empty()) hint = Nearest(key, names);
  const std::string where = path.empty() ? "" : absl::StrCat(" in `", path, "`");
  if (!hint.empty()) return absl::StrCat("unknown key ", Shown(key), where, "; did you mean `", hint, "`?");
  return absl::StrCat("unknown key ", Shown(key), where, "; the keys are: ", absl::StrJoin(names, ", "));
}

void JobReader::ReadMapping(const Node& node, absl::string_view path, const std::vector<Key>& keys) {
  if (!values_.Mapping(node, path)) return;
  if (keys_ != nullptr) return CollectKeys(node, path, keys);
  for (const auto& [key, value] : node.entries) {
    const auto it =
        std::find_if(keys.begin(), keys.end(), [&name = key.scalar](const Key& k) { return k.name == name; });
    if (it == keys.end()) {
      report_.Error(key.place, UnknownKey(key.scalar, path, keys));
    } else {
      it->read(value);
    }
  }
}

JobSpec JobReader::Read(const Node& root) {
  if (root.kind != Node::Kind::kMapping) {
    report_.Error(root.place, "a job file is a mapping, like `run: python train.py`");
    return spec_;
  }
  ReadMapping(root, "", AllKeys());
  Complete(root);
  return std::move(spec_);
}

std::vector<JobReader::Key> JobReader::AllKeys() {
  std::vector<Key> keys = IdentityKeys();
  for (auto& more : {PlacementKeys(), PolicyKeys()}) keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

std::vector<std::string> JobReader::Keys() {
  std::vector<std::string> found;
  keys_ = &found;
  Node empty;
  empty.kind = Node::Kind::kMapping;
  ReadMapping(empty, "", AllKeys());
  keys_ = nullptr;
  return found;
}

// A section is one whose reader comes back here with its own keys.
void JobReader::CollectKeys(const Node& empty, absl::string_view path, const std::vector<Key>& keys) {
  for (const Key& key : keys) {
    const size_t before = keys_->size();
    key.read(empty);
    if (keys_->size() == before)
      keys_->push_back(path.empty() ? key.name : absl::StrCat(path, ".", key.name));
  }
}

std::vector<JobReader::Key> JobReader::IdentityKeys() {
  return {
      {"name", [this](const Node& n) { ReadName(n); }},
      {"run", [this](const Node& n) { ReadRun(n); }},
      {"script", [this](const Node& n) { ReadText(n, "script", spec_.script); }},
      {"per",
       [this](const Node& n) {
         if (const auto choice = values_.Choice(n, "per", {"rank", "node"}))
           spec_.per = *choice == 0 ? Per::kRank : Per::kNode;
       }},
      {"ranks", [this](const Node& n) { spec_.ranks = ReadRange(n, "ranks", kRanksMax); }},
      {"nodes", [this](const Node& n) { spec_.nodes = ReadRange(n, "nodes", kRanksMax); }},
      {"ranks_per_node", [this](const Node& n) { ReadRanksPerNode(n); }},
      {"mesh", [this](const Node& n) { ReadMesh(n); }},
      {"traffic", [this](const Node& n) { ReadTraffic(n); }},
  };
}

std::vector<JobReader::Key> JobReader::PlacementKeys() {
  return {
      {"resources", [this](const Node& n) { ReadResources(n); }},
      {"where", [this](const Node& n) { ReadWhere(n); }},
      {"workdir", [this](const Node& n) { ReadWorkdir(n); }},
      {"setup", [this](const Node& n) { ReadText(n, "setup", spec_.setup); }},
      {"tty", [this](const Node& n) { spec_.tty = values_.Bool(n, "tty").value_or(false); }},
      {"stdin", [this](const Node& n) { spec_.takes_input = values_.Bool(n, "stdin").value_or(false); }},
      {"env", [this](const Node& n) { ReadEnv(n); }},
      {"inherit_env", [this](const Node& n) { ReadInheritEnv(n); }},
      {"secrets", [this](const Node& n) { ReadSecrets(n); }},
      {"slurm", [this](const Node& n) { Refuse(n, "slurm", "launching through Slurm is not built yet"); }},
  };
}

std::vector<JobReader::Key> JobReader::PolicyKeys() {
  return {
      {"elastic", [this](const Node& n) { ReadElastic(n); }},
      {"checkpoint", [this](const Node& n) { ReadCheckpoint(n); }},
      {"restart", [this](const Node& n) { ReadRestart(n); }},
      {"comm", [this](const Node& n) { ReadComm(n); }},
      {"progress", [this](const Node& n) { ReadProgress(n); }},
      {"preempt", [this](const Node& n) { ReadPreempt(n); }},
      {"stop_grace",
       [this](const Node& n) {
         ReadDuration(n, "stop_grace", absl::ZeroDuration(), absl::Hours(1), spec_.stop_grace);
       }},
      {"overlap",
       [this](const Node& n) {
         if (const auto choice = values_.Choice(n, "overlap", {"wait", "allow"}))
           spec_.overlap = static_cast<Overlap>(*choice);
       }},
      {"limits",
       [this](const Node& n) {
         ReadMapping(n, "limits", {{"time", [this](const Node& t) {
                                      spec_.time_limit =
                                          values_.Duration(t, "limits.time", absl::Seconds(1), kLongest);
                                    }}});
       }},
      {"labels", [this](const Node& n) { ReadLabels(n, "labels", spec_.labels); }},
      {"priority", [this](const Node& n) { ReadInt(n, "priority", -1000, 1000, spec_.priority); }},
  };
}

void JobReader::ReadInt(const Node& node, absl::string_view key, int64_t min, int64_t max, int& out) {
  if (const auto value = values_.Int(node, key, min, max)) out = static_cast<int>(*value);
}

void JobReader::ReadDuration(const Node& node, absl::string_view key, absl::Duration min, absl::Duration max,
                             absl::Duration& out) {
  if (const auto value = values_.Duration(node, key, min, max)) out = *value;
}

void JobReader::ReadName(const Node& node) {
  if (node.kind == Node::Kind::kScalar && IsJobName(node.scalar) &&
      (node.quoted || LooksLike(node.scalar).empty())) {
    spec_.name = node.scalar;
    return;
  }
  const auto text = values_.String(node, "name", {.one_line = false, .bytes_max = kTextBytesMax});
  if (!text) return;
  values_.Error(node, "name",
                absl::StrCat(Shown(*text),
                             " is not a job name: 1 to 63 characters a-z, 0-9 and -, and the first and last "
                             "are no -. For example: ",
                             NameFrom(*text)));
}

void JobReader::ReadRun(const Node& node) {
  if (node.kind == Node::Kind::kSequence) {
    const auto words = values_.Strings(
        node, "run",
        {.may_be_empty = true, .secret_free = true, .one_line = false, .bytes_max = kWordBytesMax});
    if (words) spec_.run = *words;
    if (words && (words->empty() || words->front().empty()))
      values_.Error(node, "run", "the first word, the program, is missing");
  } else {
    const auto text =
        values_.String(node, "run", {.secret_free = true, .one_line = false, .bytes_max = kWordBytesMax});
    if (!text) return;
    auto words = SplitWords(*text);
    if (!words.ok()) return values_.Error(node, "run", words.status().message());
    spec_.run = *std::move(words);
    if (absl::StrContains(spec_.run[0], '=')) {
      values_.Error(node, "run",
                    absl::StrCat("starts with the assignment ", Shown(spec_.run[0]), "; put it under `env`"));
    } else if (spec_.run[0].empty()) {
      values_.Error(node, "run", "the first word, the program, is missing");
    } else if (spec_.run[0] == "cd") {
      values_.Error(node, "run", "`cd` is no program; name the folder with `workdir`");
    }
  }
  if (spec_.run.size() > kWordsMax)
    values_.Error(node, "run", absl::StrCat("has more than ", kWordsMax, " words"));
}

void JobReader::ReadText(const Node& node, absl::string_view key, std::string& out) {
  const auto text =
      values_.String(node, key, {.secret_free = true, .one_line = false, .bytes_max = kWordBytesMax});
  if (text) out = *text;
}

std::optional<Range> JobReader::ReadRange(const Node& node, absl::string_view key, int max) {
  if (node.kind != Node::Kind::kMapping) {
    if (node.kind == Node::Kind::kSequence) {
      values_.Error(node, key, "must be a number, or {min: 2, max: 8}, not a list");
      return std::nullopt;
    }
    const auto value = values_.Int(node, key, 1, max);
    if (!value) return std::nullopt;
    return Range{static_cast<int>(*value), static_cast<int>(*value)};
  }
  if (keys_ != nullptr) keys_->emplace_back(key);  // a plain number is one, too
  Range range{0, 0};
  ReadMapping(node, key,
              {{"min", [&](const Node& n) { ReadInt(n, absl::StrCat(key, ".min"), 1, max, range.min); }},
               {"max", [&](const Node& n) { ReadInt(n, absl::StrCat(key, ".max"), 1, max, range.max); }}});
  for (const char* bound : {"min", "max"}) {
    if (node.Find(bound) == nullptr)
      values_.Error(node, key, absl::StrCat("needs both bounds; `", bound, "` is missing"));
  }
  if (range.min == 0 || range.max == 0) return std::nullopt;
  if (range.min > range.max) {
    values_.Error(node, key, absl::StrCat("min ", range.min, " is larger than max ", range.max));
    return std::nullopt;
  }
  return range;
}

void JobReader::ReadRanksPerNode(const Node& node) {
  if (Values::Is(node, "auto")) return;
  if (const auto value = values_.Int(node, "ranks_per_node", 1, 1024))
    spec_.ranks_per_node = static_cast<int>(*value);
}

void JobReader::ReadMesh(const Node& node) {
  if (!values_.Mapping(node, "mesh")) return;
  for (const auto& [key, value] : node.entries) {
    const std::string path = absl::StrCat("mesh.", key.scalar);
    if (!absl::c_linear_search(kMeshAxes, key.scalar)) {
      report_.Error(key.place, absl::StrCat("unknown mesh axis ", Shown(key.scalar), "; the axes are ",
                                            absl::StrJoin(kMeshAxes, ", ")));
      continue;
    }
    MeshAxis axis{key.scalar, std::nullopt};
    if (key.scalar != kDataAxis || !Values::Is(value, "*")) {
      const auto size = values_.Int(value, path, 1, kRanksMax);
      if (!size) continue;
      axis.size = static_cast<int>(*size);
    }
    spec_.mesh.push_back(std::move(axis));
  }
}

void JobReader::ReadTraffic(const Node& node) {
  if (!values_.Mapping(node, "traffic")) return;
  for (const auto& [key, value] : node.entries) {
    const auto bytes = values_.Bytes(value, absl::StrCat("traffic.", key.scalar), 1, kTrafficBytesMax);
    if (bytes) spec_.traffic[key.scalar] = *bytes;
  }
}

void JobReader::ReadResources(const Node& node) {
  Resources& r = spec_.resources;
  const auto number_or_auto = [this](const Node& n, absl::string_view key, int min, int max,
                                     std::optional<int>& out) {
    if (Values::Is(n, "auto")) return;
    if (const auto value = values_.Int(n, key, min, max)) out = static_cast<int>(*value);
  };
  ReadMapping(
      node, "resources",
      {{"cpus", [&](const Node& n) { number_or_auto(n, "resources.cpus", 1, 8192, r.cpus); }},
       {"memory",
        [&](const Node& n) {
          if (!Values::Is(n, "unlimited"))
            r.memory = values_.Bytes(n, "resources.memory", 1 << 20, uint64_t{1} << 50);
        }},
       {"gpus",
        [&](const Node& n) {
          const bool part =
              n.kind == Node::Kind::kScalar && !n.quoted && n.scalar.find_first_of("./") != std::string::npos;
          if (!part) return number_or_auto(n, "resources.gpus", 0, 1024, r.gpus);
          r.gpu_share = GpuShareOf(n.scalar);
          if (r.gpu_share == 0)
            values_.Error(n, "resources.gpus",
                          absl::StrCat(Shown(n.scalar),
                                       " is no part of a GPU: write a decimal below 1 with at most three "
                                       "digits (0.5, 0.25), or 1/N; several GPUs are a whole number"));
        }},
       {"gpu_type",
        [&](const Node& n) {
          if (n.kind == Node::Kind::kSequence) {
            if (auto types = values_.Strings(n, "resources.gpu_type")) r.gpu_type = *std::move(types);
          } else if (auto type = values_.String(n, "resources.gpu_type")) {
            r.gpu_type = {*std::move(type)};
          }
        }},
       {"shm",
        [&](const Node& n) {
          if (const auto shm = values_.Bytes(n, "resources.shm", 1 << 20, uint64_t{1} << 44)) r.shm = *shm;
        }},
       {"processes",
        [&](const Node& n) { number_or_auto(n, "resources.processes", 16, 4 << 20, r.processes); }},
       {"visible",
        [&](const Node& n) {
          if (const auto choice = values_.Choice(n, "resources.visible", {"node", "rank"}))
            r.visible_node = *choice == 0;
        }},
       {"oversubscribe", [&](const Node& n) {
          if (!Values::Is(n, "auto")) r.oversubscribe = values_.Bool(n, "resources.oversubscribe");
        }}});
}

void JobReader::ReadWhere(const Node& node) {
  ReadMapping(node, "where",
              {{"labels", [this](const Node& n) { ReadLabels(n, "where.labels", spec_.where_labels); }},
               {"hosts", [this](const Node& n) { ReadHosts(n, "where.hosts", spec_.where_hosts); }},
               {"exclude", [this](const Node& n) { ReadHosts(n, "where.exclude", spec_.where_exclude); }},
               {"ranks", [this](const Node& n) { ReadRanksOn(n); }},
               {"rank0", [this](const Node& n) {
                  std::vector<std::string> words;
                  if (n.kind == Node::Kind::kSequence) {
                    values_.Error(n, "where.rank0", "must be one name or one hostlist, like login[0-1]");
                  } else {
                    ReadHosts(n, "where.rank0", words);
                  }
                  if (!words.empty()) spec_.where_rank0 = std::move(words[0]);
                }}});
}

// {0-3: HOST, 4-7: HOST slot=0-3}. The first wrong list is the last that is looked at: a short text may stand
// for many numbers.
void JobReader::ReadRanksOn(const Node& node) {
  if (!values_.Mapping(node, "where.ranks")) return;
  size_t count = 0;
  for (const auto& [key, value] : node.entries) {
    RanksOn place;
    const absl::StatusOr<std::vector<int>> ranks = ParseRankList(key.scalar, kRanksMax);
    if (!ranks.ok()) {
      report_.Error(key.place, absl::StrCat("`where.ranks`: ", ranks.status().message()));
      return;
    }
    place.ranks = *ranks;
    count += place.ranks.size();
    if (count > kRanksMax)  // ranges are short, and what they stand for is not
      return report_.Error(key.place, absl::StrCat("`where.ranks`: names more than ", kRanksMax, " ranks"));
    const std::optional<std::string> text = values_.String(value, "where.ranks");
    if (!text) continue;
    const std::pair<std::string, std::string> parts = absl::StrSplit(*text, absl::MaxSplits(" slot=", 1));
    place.host = parts.first;
    if (place.host.find_first_of("[], ") != std::string::npos) {
      values_.Error(value, "where.ranks", "must be one host, or HOST slot=0-3");
      continue;
    }
    if (parts.first.size() < text->size()) {
      const absl::StatusOr<std::vector<int>> slots = ParseRankList(parts.second, kSlotsMax);
      if (!slots.ok()) {
        values_.Error(value, "where.ranks", absl::StrCat("slot=", slots.status().message()));
        return;
      }
      place.slots = *slots;
      if (place.slots.size() != place.ranks.size()) {
        values_.Error(value, "where.ranks",
                      absl::StrCat(place.slots.size(), " slots for ", place.ranks.size(),
                                   place.ranks.size() == 1 ? " rank" : " ranks"));
        return;
      }
    }
    spec_.where_ranks.push_back(std::move(place));
  }
  if (node.entries.empty())
    values_.Error(node, "where.ranks", "must name the host of each rank, or be left away");
}

// A single word, which needs no brackets of YAML around those of the hostlist, or a list of words.
void JobReader::ReadHosts(const Node& node, absl::string_view key, std::vector<std::string>& out) {
  size_t count = 0;
  const auto read = [&](const Node& item) {
    const std::optional<std::string> word = values_.String(item, key);
    if (!word || count > kHostsMax) return;
    const absl::StatusOr<std::vector<std::string>> hosts = HostsOf(*word);
    count += hosts.ok() ? hosts->size() : kHostsMax + 1;  // a list may be wrong at the end of many names
    if (!hosts.ok()) return values_.Error(item, key, hosts.status().message());
    if (count > kHostsMax)
      return values_.Error(item, key, absl::StrCat("names more than ", kHostsMax, " hosts"));
    out.push_back(*word);
  };
  if (node.kind != Node::Kind::kSequence) return read(node);
  for (const Node& item : node.items) read(item);
  if (node.items.empty() && key == "where.hosts")
    values_.Error(node, key, "must name a host, or be left away");
}

void JobReader::ReadWorkdirPath(const Node& node) {
  const auto path = values_.String(node, "workdir", {.variables = options_.variables, .expand = true});
  if (!path) return;
  if (absl::StartsWith(*path, "~")) {
    values_.Error(node, "workdir", "`~` is not expanded; write ${HOME}");
  } else {
    spec_.workdir = BesideFile(node, "workdir", *path);
  }
}

// The folder of the job file may have a name that no text can hold, and a job is sent and kept as text.
std::string JobReader::BesideFile(const Node& node, const std::string& key, const std::string& path) {
  if (options_.file_dir.empty()) return path;
  std::string joined = JoinPath(options_.file_dir, path);
  if (!IsCleanText(joined)) {
    values_.Error(node, key,
                  absl::StrCat("is taken from the folder of the job file, and ", joined,
                               " is not UTF-8; rename that folder, or write an absolute path"));
  }
  return joined;
}

void JobReader::ReadWorkdir(const Node& node) {
  if (node.kind != Node::Kind::kMapping) return ReadWorkdirPath(node);
  ReadMapping(node, "workdir",
              {{"path", [this](const Node& n) { ReadWorkdirPath(n); }},
               {"sync", [this](const Node& n) {
                  if (Values::Is(n, "auto") || Values::Is(n, "none")) return;
                  Refuse(n, "workdir.sync",
                         "copying the workdir to other machines is not built yet; use a shared folder or "
                         "one that is at the same path on each node, and `sync: none`");
                }}});
  if (node.Find("path") == nullptr) values_.Error(node, "workdir", "`path` is missing");
}

bool JobReader::CheckEnvName(const Node& node, absl::string_view key, absl::string_view what) {
  const std::string& name = node.scalar;
  std::string problem;
  if (!IsEnvName(name)) {
    problem = absl::StrCat("must be letters, digits and _, and start with no digit");
  } else if (name == "LD_PRELOAD" || name == "LD_LIBRARY_PATH" || name == "LD_AUDIT") {
    problem =
        "changes what every program of the job loads and is not taken from a job file; if the program needs "
        "it, "
        "`export` it in `script:`";
  } else if (absl::StartsWith(name, "GTRAIN_") && !IsUsersGtrainVariable(name)) {
    problem = absl::StrCat("is not a job's to set: of the names that begin with GTRAIN_ those are ",
                           absl::StrJoin(kUsersGtrainVariables, ", "));
  } else if (absl::StartsWith(name, "TORCHELASTIC_") || absl::StartsWith(name, "OMPI_COMM_WORLD_") ||
             std::find(std::begin(kSetByGtrain), std::end(kSetByGtrain), name) != std::end(kSetByGtrain)) {
    problem = "is set by gtrain for each rank; remove it";
  }
  if (problem.empty()) return true;
  report_.Error(node.place, absl::StrCat("`", key, "`: the ", what, " ", Shown(name), " ", problem));
  return false;
}

void JobReader::ReadEnv(const Node& node) {
  if (!values_.Mapping(node, "env")) return;
  for (const auto& [key, value] : node.entries) {
    if (!CheckEnvName(key, "env", "variable")) continue;
    auto text = values_.String(value, absl::StrCat("env.", key.scalar),
                               {.may_be_empty = true,
                                .secret_free = true,
                                .one_line = false,
                                .bytes_max = kWordBytesMax - 512,
                                .variables = options_.variables,
                                .expand = true});
    // Only what a person writes: what is stored was accepted by the version that stored it.
    if (text && options_.variables != nullptr && MayBeSecret(key.scalar, *text)) {
      report_.Error(
          value.place,
          absl::StrCat("`env.", key.scalar, "`: this looks like a secret. A job file and the cluster's ",
                       "records must hold none: set it in the environment and name it under `secrets`: {",
                       key.scalar, ": {env: ", key.scalar, "}}"));
    } else if (text) {
      spec_.env[key.scalar] = *std::move(text);
    }
  }
}

void JobReader::ReadInheritEnv(const Node& node) {
  if (node.kind == Node::Kind::kSequence) {
    InheritEnv inherit{InheritEnv::Kind::kList, {}};
    for (const Node& item : node.items) {
      const auto name = values_.String(item, "inherit_env");
      if (name && CheckEnvName(item, "inherit_env", "variable")) inherit.names.push_back(*name);
    }
    spec_.inherit_env = std::move(inherit);
  } else if (const auto choice = values_.Choice(node, "inherit_env", {"all", "none"})) {
    spec_.inherit_env.kind = *choice == 0 ? InheritEnv::Kind::kAll : InheritEnv::Kind::kNone;
  }
}

void JobReader::ReadSecrets(const Node& node) {
  if (!values_.Mapping(node, "secrets")) return;
  for (const auto& [key, value] : node.entries) {
    const std::string path = absl::StrCat("secrets.", key.scalar);
    if (!CheckEnvName(key, "secrets", "variable")) continue;
    if (value.kind != Node::Kind::kMapping) {
      report_.Error(value.place,
                    absl::StrCat("`", path,
                                 "`: a secret is a reference, {env: NAME} or {file: PATH}, never its value"));
      continue;
    }
    SecretRef ref;
    ReadMapping(value, path,
                {{"env",
                  [&](const Node& n) {
                    const auto name = values_.String(n, path + ".env");
                    if (name && IsEnvName(*name))
                      ref.env = *name;
                    else if (name)
                      report_.Error(
                          n.place,
                          absl::StrCat("`", path, ".env`: must be the name of an environment variable"));
                  }},
                 {"file", [&](const Node& n) {
                    const auto file = values_.String(n, path + ".file");
                    if (file) ref.file = BesideFile(n, path + ".file", *file);
                  }}});
    if (value.entries.size() != 1) {
      values_.Error(value, path, "needs exactly one of `env` and `file`");
    } else if (!ref.env.empty() || !ref.file.empty()) {
      spec_.secrets[key.scalar] = std::move(ref);
    }
  }
}

void JobReader::ReadElastic(const Node& node) {
  ReadMapping(
      node, "elastic",
      {{"mode",
        [this](const Node& n) {
          spec_.in_place = values_.Choice(n, "elastic.mode", {"restart", "in-place"}) == 1u;
        }},
       {"spares",
        [this](const Node& n) {
          spec_.spares = static_cast<int>(values_.Int(n, "elastic.spares", 0, kRanksMax).value_or(0));
        }},
       {"global_batch",
        [this](const Node& n) {
          spec_.global_batch = values_.Int(n, "elastic.global_batch", 1, int64_t{1} << 40).value_or(0);
        }},
       {"determinism",
        [this](const Node& n) {
          bitwise_ = values_.Choice(n, "elastic.determinism", {"none", "bitwise"}) == 1u;
        }},
       {"virtual_ranks",
        [this](const Node& n) { ReadInt(n, "elastic.virtual_ranks", 1, kRanksMax, spec_.virtual_ranks); }},
       {"step_copies", [this](const Node& n) {
          spec_.step_copies = values_.Bool(n, "elastic.step_copies").value_or(false);
        }}});
  if (spec_.spares > 0 && !spec_.in_place)
    Refuse(node, "elastic.spares",
           "a spare is a process that waits to go on in the place of another: that needs `mode: in-place`");
}

void JobReader::ReadCheckpointUri(const Node& node) {
  const auto uri = values_.String(node, "checkpoint.uri",
                                  {.secret_free = true, .variables = options_.variables, .expand = true});
  if (!uri) return;
  const size_t scheme = uri->find("://");
  if (scheme == std::string::npos && !UriScheme(*uri).empty()) {
    values_.Error(
        node, "checkpoint.uri",
        absl::StrCat(Shown(*uri),
                     " has one slash after its scheme; write s3://bucket/prefix, or begin with ./ if a "
                     "directory has that name"));
  } else if (scheme == std::string::npos) {
    if (absl::StartsWith(*uri, "~"))
      return values_.Error(node, "checkpoint.uri", "`~` is not expanded; write ${HOME}");
    spec_.checkpoint.uri = *uri;
  } else if (absl::StartsWith(*uri, "file:///")) {
    spec_.checkpoint.uri = uri->substr(7);
  } else if (absl::StartsWith(*uri, "s3://")) {
    spec_.checkpoint.uri = *uri;
  } else {
    values_.Error(node, "checkpoint.uri",
                  absl::StrCat("the scheme ", Shown(uri->substr(0, scheme)),
                               " is not known; name a directory or s3://bucket/prefix"));
  }
}

void JobReader::ReadCheckpointNear(const Node& node) {
  if (Values::Is(node, "none")) return;
  const auto near = values_.String(node, "checkpoint.near");
  if (!near) return;
  if (*near != kNearMemory && !absl::StartsWith(*near, "/")) {
    return values_.Error(node, "checkpoint.near",
                         absl::StrCat(Shown(*near),
                                      " is neither `memory`, `none` nor the path of a folder that "
                                      "each machine has for itself, like /scratch/gtrain"));
  }
  spec_.checkpoint.near = *near;
}

void JobReader::ReadEvery(const Node& node) {
  if (Values::Is(node, "auto")) {
    every_auto_ = true;
    return;
  }
  if (node.kind == Node::Kind::kScalar &&
      (absl::EndsWith(node.scalar, " steps") || absl::EndsWith(node.scalar, " step"))) {
    Node number = node;
    number.quoted = false;
    number.scalar = std::string(absl::StripAsciiWhitespace(node.scalar.substr(0, node.scalar.rfind(' '))));
    if (const auto steps = values_.Int(number, "checkpoint.every", 1, 1'000'000'000))
      spec_.checkpoint.every_steps = *steps;
    return;
  }
  if (node.kind == Node::Kind::kScalar && node.scalar.find_first_not_of("0123456789") == std::string::npos) {
    return values_.Error(
        node, "checkpoint.every",
        absl::StrCat(Shown(node.scalar), " has no unit; write a time (30s) or a number of steps (\"",
                     node.scalar == "0" ? "200" : node.scalar.substr(0, 20), " steps\")"));
  }
  spec_.checkpoint.every = values_.Duration(node, "checkpoint.every", absl::Seconds(1), kLongest);
}

void JobReader::ReadVerifyReplicas(const Node& node) {
  VerifyReplicas& verify = spec_.checkpoint.verify_replicas;
  if (Values::Is(node, "off") || Values::Is(node, "first")) {
    verify.kind = node.scalar == "off" ? VerifyReplicas::Kind::kOff : VerifyReplicas::Kind::kFirst;
    return;
  }
  if (node.kind != Node::Kind::kScalar || !absl::StartsWith(node.scalar, "every ")) {
    return values_.Error(node, "checkpoint.verify_replicas",
                         "must be off, first, or the first save and every so many, like `every 100`");
  }
  Node number = node;
  number.quoted = false;
  number.scalar = std::string(absl::StripAsciiWhitespace(node.scalar.substr(sizeof("every ") - 1)));
  const auto every = values_.Int(number, "checkpoint.verify_replicas", 1, kVerifyEveryMax);
  if (every) verify = {VerifyReplicas::Kind::kEvery, static_cast<int>(*every)};
}

void JobReader::ReadCheckpoint(const Node& node) {
  CheckpointPolicy& c = spec_.checkpoint;
  ReadMapping(
      node, "checkpoint",
      {{"uri", [this](const Node& n) { ReadCheckpointUri(n); }},
       {"every", [this](const Node& n) { ReadEvery(n); }},
       {"keep", [&](const Node& n) { ReadInt(n, "checkpoint.keep", 1, 1'000'000, c.keep); }},
       {"max_rollback",
        [&](const Node& n) { ReadInt(n, "checkpoint.max_rollback", 0, kMaxRollbackMax, c.max_rollback); }},
       {"verify_replicas", [this](const Node& n) { ReadVerifyReplicas(n); }},
       {"read_only",
        [&](const Node& n) {
          if (const auto read_only = values_.Bool(n, "checkpoint.read_only")) c.read_only = *read_only;
        }},
       {"memory_max",
        [&](const Node& n) {
          if (const auto bytes = values_.Bytes(n, "checkpoint.memory_max", 1 << 20, uint64_t{1} << 50))
            c.memory_max = *bytes;
        }},
       {"near", [this](const Node& n) { ReadCheckpointNear(n); }},
       {"replicas", [&](const Node& n) { ReadInt(n, "checkpoint.replicas", 0, 16, c.replicas); }},
       {"on_error", [&](const Node& n) {
          const auto choice = values_.Choice(n, "checkpoint.on_error", {"warn", "retry", "fail"});
          if (choice) c.on_error = static_cast<OnError>(*choice);
        }}});
  if (node.kind != Node::Kind::kMapping) return;
  if (node.Find("uri") == nullptr)
    values_.Error(node, "checkpoint", "`uri`, the directory of the checkpoints, is missing");
  if (!c.every && !c.every_steps && !every_auto_) c.every = absl::Seconds(30);
  if (c.replicas > 0 && c.near.empty()) {
    if (const Node* const near = node.Find("near")) {
      values_.Error(*near, "checkpoint.near",
                    "`replicas` are copies of what is kept near: with `near: none` there is nothing to copy");
    }
    c.near = kNearMemory;
  }
}

void JobReader::ReadRestart(const Node& node) {
  RestartBudget& r = spec_.restart;
  ReadMapping(
      node, "restart",
      {{"budget", [&](const Node& n) { ReadInt(n, "restart.budget", 0, 10'000, r.budget); }},
       {"window",
        [&](const Node& n) { ReadDuration(n, "restart.window", absl::Seconds(1), kLongest, r.window); }},
       {"before_first_step",
        [&](const Node& n) { ReadInt(n, "restart.before_first_step", 0, 10'000, r.before_first_step); }},
       {"oom", [&](const Node& n) { ReadInt(n, "restart.oom", 0, 10'000, r.oom); }}});
}

void JobReader::ReadCodec(const Node& node, absl::string_view key, CommCodec& codec) {
  const std::vector<std::string> names(std::begin(kCodecs), std::end(kCodecs));
  const auto read_name = [&](const Node& n, absl::string_view at) {
    // `none` and `auto` were looked for before, where they may stand.
    std::vector<std::string> words = names;
    if (at == "comm.compression") words.insert(words.end(), {"none", "auto"});
    const auto choice = values_.Choice(n, at, words);
    if (choice) codec.codec = words[*choice];
  };
  if (node.kind != Node::Kind::kMapping) return read_name(node, key);
  const Node* const name = node.Find("codec");
  if (name == nullptr) return values_.Error(node, key, "`codec`, the name of the codec, is missing");
  read_name(*name, absl::StrCat(key, ".codec"));
  // A parameter that the codec does not have would be accepted and ignored.
  const auto of = [&](const Node& n, absl::string_view parameter, std::initializer_list<const char*> owners) {
    if (codec.codec.empty() || absl::c_linear_search(owners, codec.codec)) return true;
    values_.Error(n, absl::StrCat(key, ".", parameter),
                  absl::StrCat(codec.codec, " has none; ", absl::StrJoin(owners, " and "),
                               owners.size() == 1 ? " has" : " have"));
    return false;
  };
  ReadMapping(node, key,
              {{"codec", [](const Node&) {}},
               {"density",
                [&](const Node& n) {
                  if (of(n, "density", {"topk"}))
                    codec.density = values_.Share(n, absl::StrCat(key, ".density"), 1, kWholeShare);
                }},
               {"momentum",
                [&](const Node& n) {
                  if (of(n, "momentum", {"onebit"}))
                    codec.momentum = values_.Share(n, absl::StrCat(key, ".momentum"), 0, kWholeShare - 1);
                }},
               {"rank",
                [&](const Node& n) {
                  if (!of(n, "rank", {"powersgd"})) return;
                  if (const auto rank = values_.Int(n, absl::StrCat(key, ".rank"), 1, kMatrixRankMax))
                    codec.rank = static_cast<int>(*rank);
                }},
               {"residual",
                [&](const Node& n) {
                  if (!of(n, "residual", {"fp16", "bf16", "int8", "fp8", "topk", "onebit"})) return;
                  const std::vector<std::string> words(std::begin(kResiduals), std::end(kResiduals));
                  if (const auto choice = values_.Choice(n, absl::StrCat(key, ".residual"), words))
                    codec.residual = words[*choice];
                }},
               {"warmup", [&](const Node& n) {
                  if (!of(n, "warmup", {"topk", "onebit", "powersgd"})) return;
                  if (const auto steps = values_.Int(n, absl::StrCat(key, ".warmup"), 0, 1'000'000))
                    codec.warmup = static_cast<int>(*steps);
                }}});
}

void JobReader::ReadCompression(const Node& node) {
  if (Values::Is(node, "none")) return;
  spec_.comm.automatic = Values::Is(node, "auto");
  if (spec_.comm.automatic) return;
  CommCodec codec;
  ReadCodec(node, "comm.compression", codec);
  spec_.comm.codecs.push_back(std::move(codec));
}

void JobReader::ReadAllow(const Node& node) {
  if (node.kind != Node::Kind::kSequence || node.items.empty()) {
    return values_.Error(node, "comm.allow", "must be a list of codecs, like [fp16, topk]");
  }
  for (const Node& item : node.items) {
    CommCodec codec;
    ReadCodec(item, "comm.allow", codec);
    const auto same = [&](const CommCodec& other) { return other.codec == codec.codec; };
    if (!codec.codec.empty() && absl::c_any_of(allowed_, same)) {
      values_.Error(item, "comm.allow", absl::StrCat(codec.codec, " is there twice"));
    }
    allowed_.push_back(std::move(codec));
  }
}

void JobReader::ReadComm(const Node& node) {
  ReadMapping(node, "comm",
              {{"compression", [this](const Node& n) { ReadCompression(n); }},
               {"allow", [this](const Node& n) { ReadAllow(n); }},
               {"deterministic", [this](const Node& n) {
                  if (const auto value = values_.Bool(n, "comm.deterministic"))
                    spec_.comm.deterministic = *value;
                }}});
}

void JobReader::ReadPattern(const Node& node, absl::string_view key, std::string& out) {
  const auto text = values_.String(node, key, {.bytes_max = 512});
  if (!text) return;
  const auto pattern = Pattern::Compile(*text);
  if (!pattern.ok()) {
    return values_.Error(node, key,
                         absl::StrCat("not a valid regular expression: ", pattern.status().message()));
  }
  if (pattern->groups() != 1) {
    return values_.Error(
        node, key, absl::StrCat("must have one (group), around the number; it has ", pattern->groups()));
  }
  out = *text;
}

void JobReader::ReadProgress(const Node& node) {
  Progress& p = spec_.progress;
  ReadMapping(
      node, "progress",
      {{"step", [&](const Node& n) { ReadPattern(n, "progress.step", p.step); }},
       {"loss", [&](const Node& n) { ReadPattern(n, "progress.loss", p.loss); }},
       {"startup",
        [&](const Node& n) { ReadDuration(n, "progress.startup", absl::Seconds(1), kLongest, p.startup); }},
       {"stall",
        [&](const Node& n) { ReadDuration(n, "progress.stall", absl::Seconds(1), kLongest, p.stall); }},
       {"on_stall",
        [&](const Node& n) {
          const auto choice = values_.Choice(n, "progress.on_stall", {"report", "kill"});
          if (choice) p.on_stall = static_cast<OnStall>(*choice);
        }},
       {"steps", [&](const Node& n) { p.steps = values_.Int(n, "progress.steps", 1, int64_t{1} << 53); }}});
}

void JobReader::ReadPreempt(const Node& node) {
  Preempt& p = spec_.preempt;
  ReadMapping(node, "preempt",
              {{"signal",
                [&](const Node& n) {
                  const std::vector<std::string> names(std::begin(kSignals), std::end(kSignals));
                  if (const auto choice = values_.Choice(n, "preempt.signal", names))
                    p.signal = names[*choice];
                }},
               {"lead", [&](const Node& n) {
                  ReadDuration(n, "preempt.lead", absl::Seconds(1), absl::Hours(24), p.lead);
                }}});
}

void JobReader::ReadLabels(const Node& node, absl::string_view key, std::map<std::string, std::string>& out) {
  if (!values_.Mapping(node, key)) return;
  for (const auto& [name, value] : node.entries) {
    const bool good = !name.scalar.empty() && name.scalar.size() <= 253 &&
                      std::all_of(name.scalar.begin(), name.scalar.end(), [](unsigned char c) {
                        return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.' || c == '/';
                      });
    if (!good) {
      report_.Error(name.place, absl::StrCat("`", key, "`: the label ", Shown(name.scalar),
                                             " must be letters, digits and -_./"));
      continue;
    }
    const auto text = values_.String(value, absl::StrCat(key, ".", name.scalar),
                                     {.may_be_empty = true, .secret_free = true, .bytes_max = 253});
    if (text) out[name.scalar] = *text;
  }
}

}  // namespace gtrain::spec
