// Jobs that share one checkpoint directory: the commit protocol of SaveCore and the rules of
// checkpoint/engine over a store in memory, without threads. A put can be held back, as a slow storage does.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/save_core.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::sim {

class CheckpointModel {
 public:
  // Each returns what a person would read.
  std::string Launch(const std::string& job, const std::string& hash, const std::string& resume);
  // A save of one rank. `hold`: its put reaches the store only with Put().
  std::string Save(const std::string& job, int64_t step, int64_t timeline, int64_t generation, bool hold,
                   Instant now);
  std::string Put(const std::string& job, Instant now);
  std::string Resume(const std::string& job);

 private:
  struct Job {
    ckpt::Identity identity;
    uint64_t epoch = 0;
    std::optional<ckpt::SaveCore> core;
    ckpt::SaveId id;
    std::string manifest;
    bool held = false;
    std::string result;
  };
  void Do(Job& job, const ckpt::save::Event& event, Instant now);

  ckpt::MemoryStore store_;
  std::map<std::string, Job> jobs_;
};

}  // namespace gtrain::sim
