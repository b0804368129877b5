// The schema: one function a key, errors into a Report. PURE; internal to job/spec.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "job/spec/job_spec.h"
#include "job/spec/mesh.h"
#include "job/spec/parse.h"
#include "job/spec/report.h"
#include "job/spec/values.h"
#include "job/spec/yaml_tree.h"

namespace gtrain::spec {

// Reads one tree into one JobSpec. Used once, by one thread.
class JobReader {
 public:
  JobReader(const ParseOptions& options, Report& report)
      : options_(options), report_(report), values_(report) {}

  JobSpec Read(const Node& root);
  // Every key there is, with the sections before it: "checkpoint.every". Instead of Read.
  std::vector<std::string> Keys();

 private:
  struct Key {
    std::string name;
    std::function<void(const Node&)> read;
  };

  // Calls each key's reader; an unknown key is an error that names the nearest one (fault J7).
  void ReadMapping(const Node& node, absl::string_view path, const std::vector<Key>& keys);
  void CollectKeys(const Node& empty, absl::string_view path, const std::vector<Key>& keys);
  void Refuse(const Node& node, absl::string_view key, absl::string_view why);
  std::string UnknownKey(absl::string_view key, absl::string_view path, const std::vector<Key>& keys) const;

  std::vector<Key> AllKeys();
  std::vector<Key> IdentityKeys();
  std::vector<Key> PlacementKeys();
  std::vector<Key> PolicyKeys();

  void ReadName(const Node& node);
  void ReadRun(const Node& node);
  void ReadText(const Node& node, absl::string_view key, std::string& out);
  std::optional<Range> ReadRange(const Node& node, absl::string_view key, int max);
  void ReadRanksPerNode(const Node& node);
  void ReadMesh(const Node& node);
  void ReadResources(const Node& node);
  void ReadTraffic(const Node& node);
  void ReadWhere(const Node& node);
  void ReadRanksOn(const Node& node);
  void ReadHosts(const Node& node, absl::string_view key, std::vector<std::string>& out);
  void ReadWorkdir(const Node& node);
  void ReadWorkdirPath(const Node& node);
  std::string BesideFile(const Node& node, const std::string& key, const std::string& path);
  void ReadEnv(const Node& node);
  bool CheckEnvName(const Node& node, absl::string_view key, absl::string_view what);
  void ReadInheritEnv(const Node& node);
  void ReadSecrets(const Node& node);
  void ReadElastic(const Node& node);
  void ReadVerifyReplicas(const Node& node);
  void ReadCheckpoint(const Node& node);
  void ReadCheckpointUri(const Node& node);
  void ReadCheckpointNear(const Node& node);
  void ReadEvery(const Node& node);
  void ReadRestart(const Node& node);
  void ReadComm(const Node& node);
  void ReadCompression(const Node& node);
  void ReadAllow(const Node& node);
  void ReadCodec(const Node& node, absl::string_view key, CommCodec& codec);
  void ReadProgress(const Node& node);
  void ReadPattern(const Node& node, absl::string_view key, std::string& out);
  void ReadPreempt(const Node& node);
  void ReadLabels(const Node& node, absl::string_view key, std::map<std::string, std::string>& out);
  void ReadDuration(const Node& node, absl::string_view key, absl::Duration min, absl::Duration max,
                    absl::Duration& out);
  void ReadInt(const Node& node, absl::string_view key, int64_t min, int64_t max, int& out);

  // Rules that need more than one key (check.cc, fault J12).
  void Complete(const Node& root);
  void CheckCommand(const Node& root);
  void CheckSize(const Node& root);
  void CheckMesh(const Node& root);
  void CheckTraffic(const Node& root);
  void CheckRank0(const Node& root);
  void CheckRanksOn(const Node& root);
  void CheckStepCopies(const Node& root);
  void CheckMeshSize(const Place& place, const MeshShape& shape, const Range& world);
  void CheckTimes(const Node& root);
  void CheckComm(const Node& root);
  void CheckDeterminism(const Node& root);
  void CheckResources(const Node& root);
  // Where `key` (dotted) was written; the place of the file otherwise.
  Place PlaceOf(const Node& root, absl::string_view key) const;

  const ParseOptions& options_;
  Report& report_;
  Values values_;
  JobSpec spec_;
  std::vector<CommCodec> allowed_;            // comm.allow
  std::vector<std::string>* keys_ = nullptr;  // Keys runs: it gets them, and nothing is read
  bool bitwise_ = false;                      // elastic.determinism
  bool every_auto_ = false;  // `checkpoint.every: auto` was written, so the default is not meant
};

}  // namespace gtrain::spec
