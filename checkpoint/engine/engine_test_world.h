// A training program of a few ranks with a small state, as the tests of the engine use it.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "checkpoint/engine/checkpointer.h"
#include "checkpoint/engine/session_fake.h"
#include "checkpoint/store/directory_store.h"

namespace gtrain::ckpt {

// A small model: one tensor large enough to be cut between ranks, small ones, a counter, per-rank state.
struct State {
  std::vector<float> large = std::vector<float>(700'000);
  std::vector<float> small = std::vector<float>(300);
  int64_t counter = 0;
  std::string rng = std::string(37, '\0');

  // The state that training reaches at `step` on `rank`.
  static State At(int64_t step, int rank) {
    State s;
    for (size_t i = 0; i < s.large.size(); ++i)
      s.large[i] = static_cast<float>(step * 1000 + static_cast<int64_t>(i % 977));
    for (size_t i = 0; i < s.small.size(); ++i)
      s.small[i] = static_cast<float>(step) + 0.5f * static_cast<float>(i);
    s.counter = step;
    for (size_t i = 0; i < s.rng.size(); ++i)
      s.rng[i] = static_cast<char>(step * 31 + rank * 7 + static_cast<int>(i));
    return s;
  }
  bool operator==(const State&) const = default;
};

// Copies the values; the registered memory stays where it is.
inline void Fill(State* to, const State& from) {
  std::copy(from.large.begin(), from.large.end(), to->large.begin());
  std::copy(from.small.begin(), from.small.end(), to->small.begin());
  to->counter = from.counter;
  std::copy(from.rng.begin(), from.rng.end(), to->rng.begin());
}

// The memory of a vector or a string.
template <typename Values>
Memory MemoryOf(Values* values) {
  return {values->data(), values->size() * sizeof(values->front())};
}

inline absl::Status Register(Checkpointer* c, State* s) {
  GT_RETURN_IF_ERROR(c->AddReplicated("small", MemoryOf(&s->small), {3, 100}, DType::kFloat32));
  GT_RETURN_IF_ERROR(c->AddReplicated("large", MemoryOf(&s->large), {700, 1000}, DType::kFloat32));
  GT_RETURN_IF_ERROR(c->AddReplicated("counter", {&s->counter, sizeof s->counter}, {}, DType::kInt64));
  return c->AddPerRank("rng", MemoryOf(&s->rng));
}

inline Environment EnvironmentOf(const FakeJob& job) {
  return [job](const char* name) -> std::optional<std::string> {
    const absl::string_view n = name;
    if (n == "GTRAIN_CLUSTER") return job.cluster;
    if (n == "GTRAIN_JOB_HASH" && job.managed) return job.job_hash;
    if (n == "GTRAIN_RESUME" && !job.resume.empty()) return job.resume;
    if (n == "GTRAIN_CHECKPOINT_NEAR" && !job.near.empty()) return job.near;
    if (n == "GTRAIN_NODE" && !job.node.empty()) return job.node;
    if (const auto set = job.environment.find(name); set != job.environment.end()) return set->second;
    return std::nullopt;
  };
}

// Everything of one rank: opened, registered.
struct Rank {
  std::unique_ptr<Checkpointer> checkpointer;
  std::unique_ptr<State> state = std::make_unique<State>();
};

inline absl::StatusOr<Rank> OpenRankWith(const FakeJob& job, FakeSession* session,
                                         const CheckpointOptions& options,
                                         const StoreFactory& factory = &OpenDirectoryStore) {
  Rank rank;
  GT_ASSIGN_OR_RETURN(rank.checkpointer, OpenCheckpointer(session, options, EnvironmentOf(job), factory));
  GT_RETURN_IF_ERROR(Register(rank.checkpointer.get(), rank.state.get()));
  return rank;
}

inline absl::StatusOr<Rank> OpenRank(const FakeJob& job, FakeSession* session, const std::string& folder,
                                     int keep = 3, const StoreFactory& factory = &OpenDirectoryStore) {
  return OpenRankWith(job, session, {.uri = folder, .keep = keep, .commit_timeout = kLong}, factory);
}

// Saves `steps` one after the other and waits for each commit, on every rank.
inline absl::Status SaveSteps(const FakeJob& job, const std::string& folder, std::vector<int64_t> steps,
                              int keep = 3, const StoreFactory& factory = &OpenDirectoryStore) {
  std::vector<absl::Status> results(job.world_size);
  RunRanks(job, [&](FakeSession* session) {
    results[session->rank()] = [&]() -> absl::Status {
      GT_ASSIGN_OR_RETURN(Rank rank, OpenRank(job, session, folder, keep, factory));
      for (int64_t step : steps) {
        Fill(rank.state.get(), State::At(step, session->rank()));
        GT_ASSIGN_OR_RETURN(const bool saved, rank.checkpointer->Save(step));
        if (!saved) return absl::InternalError("skipped");
        GT_RETURN_IF_ERROR(rank.checkpointer->Wait(kLong));
        if (rank.checkpointer->LastCommitted() != step) return absl::InternalError("not known as committed");
        if (session->reported().back().first != step) return absl::InternalError("not reported");
      }
      return absl::OkStatus();
    }();
  });
  for (const absl::Status& s : results) GT_RETURN_IF_ERROR(s);
  return absl::OkStatus();
}

struct Restored {
  absl::Status status;
  std::optional<RestoredStep> step;
  State state;
};

inline std::vector<Restored> RestoreAll(const FakeJob& job, const std::string& folder,
                                        const StoreFactory& factory = &OpenDirectoryStore) {
  std::vector<Restored> out(job.world_size);
  RunRanks(job, [&](FakeSession* session) {
    Restored& mine = out[session->rank()];
    auto rank = OpenRank(job, session, folder, 3, factory);
    mine.status = rank.status();
    if (!rank.ok()) return;
    auto restored = rank->checkpointer->Restore();
    mine.status = restored.status();
    if (restored.ok()) mine.step = *restored;
    mine.state = *rank->state;
  });
  return out;
}

inline void ExpectRestored(const FakeJob& job, const std::string& folder, int64_t step) {
  const std::vector<Restored> all = RestoreAll(job, folder);
  for (int rank = 0; rank < job.world_size; ++rank) {
    ASSERT_TRUE(all[rank].status.ok()) << all[rank].status;
    ASSERT_TRUE(all[rank].step.has_value());
    EXPECT_EQ(all[rank].step->step, step);
    EXPECT_TRUE(all[rank].state == State::At(step, rank)) << "rank " << rank << " is not bit-identical";
  }
}

// The files of a step that lie in a directory, but for the index.
inline std::vector<std::string> FilesOfStep(const std::string& folder, int64_t step) {
  auto store = *OpenDirectoryStore(folder);
  std::vector<std::string> out;
  const std::vector<std::string> keys = *store->List("");
  for (const std::string& key : keys) {
    if (absl::StrContains(key, absl::StrCat("step-00000000000", step)) &&
        !absl::EndsWith(key, "index.json")) {
      out.push_back(absl::StrCat(folder, "/", key));
    }
  }
  return out;
}

// Collects log lines; tests say which warnings they expect.
class EngineTest : public testing::Test {
 protected:
  EngineTest() {
    SetLogSink([this](LogLevel level, absl::string_view line) {
      MutexLock lock(&mu_);
      (level != LogLevel::kInfo ? loud_ : info_).push_back(std::string(line));
    });
  }
  ~EngineTest() override { SetLogSink(nullptr); }
  std::string loud() {
    MutexLock lock(&mu_);
    return absl::StrJoin(loud_, "\n");
  }
  std::string info() {
    MutexLock lock(&mu_);
    return absl::StrJoin(info_, "\n");
  }
  Mutex mu_;
  std::vector<std::string> loud_, info_;
};

}  // namespace gtrain::ckpt
