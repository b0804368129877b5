// Checkpoints of the swarm's jobs. Every saving rank runs a SaveCore and answers its effects as
// checkpoint/engine/saver.cc does; a program that begins resumes as checkpoint/engine/restorer.cc does.
// The directory is in memory; its calls take time, fail with an unknown outcome, and take effect although
// their caller is gone. The first ranks of a gang, at most four, hold the shards.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/engine/resume.h"
#include "checkpoint/plan/retention.h"
#include "checkpoint/plan/save_core.h"
#include "checkpoint/store/memory_store.h"
#include "tests/sim/kernel.h"

namespace gtrain::sim {

struct Gang;
struct Program;
struct RankProcess;

class Saves {
 public:
  explicit Saves(Kernel& kernel);
  ~Saves();

  // Calls of the storage take up to a minute and a half for so long, or fail.
  void SlowFor(int64_t duration) { slow_until_ = kernel_.now() + duration; }
  void FailFor(int64_t duration) { fails_until_ = kernel_.now() + duration; }
  // Nothing of it can be read or written: a restore meets a storage fault.
  void GoneFor(int64_t duration) { gone_until_ = kernel_.now() + duration; }
  void CalmDown() { slow_until_ = fails_until_ = gone_until_ = 0; }

  // Rank 0 takes the directory and finds what to resume from. `begun` hears the step, or why the program
  // gives up: Unavailable when the storage cannot be read. It is not called when rank 0 ends first.
  void Restore(const Gang& gang, const Program& program, std::function<void(absl::StatusOr<int64_t>)> begun);
  // All ranks are at the gang's step. False: it was skipped, since an earlier save is under way.
  bool Save(const Gang& gang);
  bool Committed(const std::string& job, uint64_t timeline, int64_t step) const {
    return committed_.contains({job, timeline, step});
  }
  // INV-4 of every directory.
  void CheckAll();

 private:
  class FlakyStore;
  struct Directory;
  struct Saver;
  struct Team;
  struct Restoring;
  using SaverPtr = std::shared_ptr<Saver>;
  using Events = std::vector<ckpt::save::Event>;

  Directory& DirectoryOf(const std::string& name);
  void Call(const std::shared_ptr<RankProcess>& rank, std::function<void()> act,
            std::function<void()> answer);
  void Answer(const std::shared_ptr<RankProcess>& rank, std::function<void()> answer);
  void Turn(const SaverPtr& saver);
  void Wake(const SaverPtr& saver);
  void Apply(const SaverPtr& saver, const ckpt::save::Event& event);
  void Do(const SaverPtr& saver, const ckpt::save::Effect& effect);
  void Ask(const SaverPtr& saver, std::function<Events()> act);
  Events LookAtKey(Saver& saver);
  Events CheckAuthority(Saver& saver);
  Events PollIndices(Saver& saver, const std::vector<int>& missing);
  void Retain(const SaverPtr& saver);
  void DeleteNext(const SaverPtr& saver, std::shared_ptr<ckpt::RetentionPlan> plan);
  void ReportCommitted(Saver& saver);
  void Finished(const Saver& saver, const absl::Status& status);
  void TryNext(const std::shared_ptr<Restoring>& restoring);
  void Check(const Directory& directory);
  bool Whole(const Directory& directory, const ckpt::SaveId& id) const;

  Kernel& kernel_;
  int64_t slow_until_ = 0, fails_until_ = 0, gone_until_ = 0;
  std::map<std::string, std::unique_ptr<Directory>> directories_;
  std::map<std::pair<std::string, uint64_t>, std::shared_ptr<Team>> teams_;  // by job and generation
  int64_t trouble_ = 0;                                                      // calls that failed or were slow
  std::set<std::tuple<std::string, uint64_t, int64_t>> committed_;           // job, timeline, step
};

}  // namespace gtrain::sim
