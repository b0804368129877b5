// Ranks that die and storage that answers with errors, each rank with a fate of its own. For tests.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/test_folder.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/session_fake.h"
#include "checkpoint/engine/settings.h"
#include "checkpoint/store/directory_store.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {

inline constexpr uint64_t kNever = ~uint64_t{0};

// The storage calls of one rank, or of all ranks of a program, counted from the moment it is armed. At its
// call number `first` it either dies or meets errors. A life that has ended makes no call any more. Errors
// are the answers to `errors` calls; afterwards the storage is well again. Thread-safe.
class Life {
 public:
  Life() = default;
  Life(uint64_t last, bool last_happens) : first_(last), happens_(last_happens) {}
  Life(uint64_t first, uint64_t errors, absl::Status error, bool calls_happen = false)
      : first_(first), errors_(errors), error_(std::move(error)), happens_(calls_happen) {}

  void Arm() { armed_ = true; }
  bool ended() const { return ended_; }
  // Whether the fault was reached.
  bool met() const { return met_; }
  // `ended` runs once, on the thread whose call is the last one. To be called before the life is armed.
  void OnEnd(std::function<void()> ended) { on_end_ = std::move(ended); }
  const absl::Status& error() const { return error_; }

  Fault Next() {
    if (!armed_) return Fault::kNone;
    const uint64_t call = calls_++;
    if (call < first_) return Fault::kNone;
    if (errors_ > 0) {
      if (call - first_ >= errors_) return Fault::kNone;
      met_ = true;
      return happens_ ? Fault::kAfter : Fault::kBefore;
    }
    met_ = true;
    if (!ended_.exchange(true) && on_end_) on_end_();
    return call == first_ && happens_ ? Fault::kAfter : Fault::kBefore;
  }

 private:
  const uint64_t first_ = kNever;
  const uint64_t errors_ = 0;  // 0: the life ends
  const absl::Status error_ = absl::UnavailableError("the program has ended");
  const bool happens_ = false;
  std::function<void()> on_end_;
  std::atomic<bool> armed_{false};
  std::atomic<bool> ended_{false};
  std::atomic<bool> met_{false};
  std::atomic<uint64_t> calls_{0};
};

// A life for each rank: `of_one` for `rank`, the others live on.
inline std::vector<std::shared_ptr<Life>> LivesOf(int world_size, int rank, std::shared_ptr<Life> of_one) {
  std::vector<std::shared_ptr<Life>> lives;
  for (int r = 0; r < world_size; ++r) lives.push_back(r == rank ? of_one : std::make_shared<Life>());
  return lives;
}

// An answer of a storage that cannot be read or written.
struct StorageAnswer {
  const char* name;
  absl::Status status;
  friend void PrintTo(const StorageAnswer& answer, std::ostream* out) { *out << answer.name; }
};
inline std::vector<StorageAnswer> StorageAnswers() {
  return {{"Unavailable503", absl::UnavailableError("503 Slow Down")},
          {"PermissionDenied403", absl::PermissionDeniedError("403 Forbidden")},
          {"InternalEIO", ErrnoStatus(EIO, "read")},
          {"ResourceExhaustedEMFILE", ErrnoStatus(EMFILE, "open")},
          {"ResourceExhaustedENOSPC", ErrnoStatus(ENOSPC, "write")},
          {"ESTALE", ErrnoStatus(ESTALE, "stat")}};
}

// Where checkpoints lie, and how a program of a given life reaches it.
class Storage {
 public:
  virtual ~Storage() = default;
  virtual std::unique_ptr<port::BlobStore> OpenIn(std::shared_ptr<Life> life) = 0;
  std::unique_ptr<port::BlobStore> Open() { return OpenIn(std::make_shared<Life>()); }
  StoreFactory Factory(std::shared_ptr<Life> life = std::make_shared<Life>()) {
    return [this, life](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
      return OpenIn(life);
    };
  }
};

class FolderStorage final : public Storage {
 public:
  explicit FolderStorage(std::string folder = TestFolder()) : folder_(std::move(folder)) {}
  const std::string& folder() const { return folder_; }
  std::unique_ptr<port::BlobStore> OpenIn(std::shared_ptr<Life> life) override {
    const absl::Status error = life->error();
    return std::make_unique<FaultyStore>(
        *OpenDirectoryStore(folder_),
        FaultPlan{[life](uint64_t, absl::string_view) { return life->Next(); }, error});
  }

 private:
  const std::string folder_;
};

// Without the fsyncs, for thousands of cases.
class Memory final : public Storage {
 public:
  std::unique_ptr<port::BlobStore> OpenIn(std::shared_ptr<Life> life) override {
    const absl::Status error = life->error();
    return std::make_unique<FaultyStore>(
        &store_, FaultPlan{[life](uint64_t, absl::string_view) { return life->Next(); }, error});
  }
  MemoryStore* store() { return &store_; }

 private:
  MemoryStore store_;
};

// The results of the ranks of one program.
struct MortalRanks {
  std::vector<std::unique_ptr<FakeSession>> sessions;  // their reports and notes
  std::vector<absl::Status> results;
  absl::Status first_error() const {
    for (const absl::Status& status : results) {
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  // The newest step that a rank reported as committed; -1: none.
  int64_t newest_reported() const {
    int64_t newest = -1;
    for (const auto& session : sessions) {
      for (const auto& [step, manifest] : session->reported()) newest = std::max(newest, step);
    }
    return newest;
  }
};

// RunRanks for ranks that die one by one. A rank whose life ends speaks to nobody from that moment on. As the
// head does when a rank has ended with an error, the generation of the others is revoked a little later: the
// others go on until then.
inline MortalRanks RunMortalRanks(FakeJob job, const std::vector<std::shared_ptr<Life>>& lives,
                                  const std::function<absl::Status(FakeSession*, Life*)>& body) {
  constexpr absl::Duration kOthersGoOn = absl::Milliseconds(20), kRevokedMax = absl::Seconds(60);
  const auto meeting = std::make_shared<Meeting>(job.world_size);
  job.meeting = meeting;
  Mutex mu;
  int left = job.world_size;
  bool failed = false;
  MortalRanks out;
  for (int rank = 0; rank < job.world_size; ++rank) {
    out.sessions.push_back(std::make_unique<FakeSession>(job, rank));
    lives[static_cast<size_t>(rank)]->OnEnd([&, meeting] {
      meeting->Break();
      MutexLock lock(&mu);
      failed = true;
    });
  }
  out.results.resize(static_cast<size_t>(job.world_size));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < lives.size(); ++rank) {
    threads.emplace_back([&, rank] {
      out.results[rank] = body(out.sessions[rank].get(), lives[rank].get());
      meeting->Break();
      MutexLock lock(&mu);
      failed = failed || !out.results[rank].ok();
      --left;
    });
  }
  {
    MutexLock lock(&mu);
    const auto all_ended = [&] { return left == 0; };
    mu.Await([&] { return left == 0 || failed; });
    if (!mu.AwaitFor(kOthersGoOn, all_ended)) {
      for (const auto& session : out.sessions) session->Revoke();
      EXPECT_TRUE(mu.AwaitFor(kRevokedMax, all_ended)) << "a rank hangs although its generation is over";
    }
  }
  for (std::thread& t : threads) t.join();
  for (const std::shared_ptr<Life>& life : lives) life->OnEnd(nullptr);
  return out;
}

// A small model: a tensor of `rows` rows that all ranks hold, and a number of each rank.
struct Weights {
  explicit Weights(int64_t rows) : weights(static_cast<size_t>(rows) * 1000) {}
  std::vector<float> weights;
  int64_t mine = 0;  // of this rank alone
  static float At(int64_t step, size_t i) {
    return static_cast<float>(step * 1000 + static_cast<int64_t>(i % 977));
  }
  void Fill(int64_t step, int rank) {
    mine = step * 100 + rank;
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = At(step, i);
  }
  bool Is(int64_t step, int rank) const {
    if (mine != step * 100 + rank) return false;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (weights[i] != At(step, i)) return false;
    }
    return true;
  }
};

struct ProgramOptions {
  int64_t rows = 3;
  int keep = 1;
  absl::Duration commit_timeout = kLong;
  std::map<std::string, std::string> environment;  // besides EnvironmentOf(job)
};

// The work of every rank with its checkpointer; a rank's error ends the program.
using Program = std::function<absl::Status(FakeSession*, Checkpointer*, Weights*, const Life&)>;
inline MortalRanks RunProgram(const FakeJob& job, Storage* storage,
                              const std::vector<std::shared_ptr<Life>>& lives, const ProgramOptions& options,
                              const Program& program) {
  const auto environment = [&options, of_job = EnvironmentOf(job)](const char* name) {
    const auto it = options.environment.find(name);
    return it == options.environment.end() ? of_job(name) : std::optional<std::string>(it->second);
  };
  return RunMortalRanks(job, lives, [&](FakeSession* session, Life* life) -> absl::Status {
    Weights state(options.rows);
    GT_ASSIGN_OR_RETURN(
        auto checkpointer,
        OpenCheckpointer(session,
                         {.uri = "x", .keep = options.keep, .commit_timeout = options.commit_timeout},
                         environment, storage->Factory(lives[static_cast<size_t>(session->rank())])));
    GT_RETURN_IF_ERROR(checkpointer->AddReplicated("weights", MemoryOf(&state.weights), {options.rows, 1000},
                                                   DType::kFloat32));
    GT_RETURN_IF_ERROR(checkpointer->AddPerRank("mine", {&state.mine, sizeof(state.mine)}));
    return program(session, checkpointer.get(), &state, *life);
  });
}

// One life for all ranks of a program.
inline std::vector<std::shared_ptr<Life>> Shared(const FakeJob& job, const std::shared_ptr<Life>& life) {
  return std::vector<std::shared_ptr<Life>>(static_cast<size_t>(job.world_size), life);
}
inline std::vector<std::shared_ptr<Life>> Immortal(const FakeJob& job) {
  return Shared(job, std::make_shared<Life>());
}

// The result of the save; DeadlineExceeded when the rank died before that, or the save itself ran out of
// time.
inline absl::Status WaitInLife(Checkpointer* checkpointer, const Life& life) {
  absl::Status done;
  do {
    done = checkpointer->Wait(absl::Milliseconds(5));
  } while (absl::StrContains(done.message(), "is still being written") && !life.ended());
  return done;
}

inline MortalRanks SaveInLives(const FakeJob& job, Storage* storage, const std::vector<int64_t>& steps,
                               const std::vector<std::shared_ptr<Life>>& lives,
                               const ProgramOptions& options = {}) {
  return RunProgram(job, storage, lives, options,
                    [&](FakeSession* session, Checkpointer* checkpointer, Weights* state,
                        const Life& life) -> absl::Status {
                      for (const int64_t step : steps) {
                        state->Fill(step, session->rank());
                        GT_ASSIGN_OR_RETURN(const bool saved, checkpointer->Save(step));
                        if (!saved) return absl::InternalError("skipped");
                        GT_RETURN_IF_ERROR(WaitInLife(checkpointer, life));
                      }
                      return absl::OkStatus();
                    });
}

inline absl::Status SaveStep(const FakeJob& job, Storage* storage, int64_t step,
                             const ProgramOptions& options = {}) {
  return SaveInLives(job, storage, {step}, Immortal(job), options).first_error();
}

// The step that a new program resumes from, bit for bit on all its ranks; -1: it begins anew.
inline MortalRanks ResumeInLives(const FakeJob& job, Storage* storage,
                                 const std::vector<std::shared_ptr<Life>>& lives,
                                 const ProgramOptions& options, std::atomic<int64_t>* step) {
  return RunProgram(
      job, storage, lives, options,
      [&](FakeSession* session, Checkpointer* checkpointer, Weights* state, const Life&) -> absl::Status {
        GT_ASSIGN_OR_RETURN(const auto restored, checkpointer->Restore());
        if (restored && !state->Is(restored->step, session->rank()))
          return absl::DataLossError("restored, but not what was saved");
        *step = restored ? restored->step : -1;
        return absl::OkStatus();
      });
}
inline absl::StatusOr<int64_t> ResumeStepInLives(const FakeJob& job, Storage* storage,
                                                 const std::vector<std::shared_ptr<Life>>& lives,
                                                 const ProgramOptions& options = {}) {
  std::atomic<int64_t> step{-1};
  GT_RETURN_IF_ERROR(ResumeInLives(job, storage, lives, options, &step).first_error());
  if (step == -1) return absl::NotFoundError("nothing to resume from");
  return step.load();
}
inline absl::StatusOr<int64_t> ResumeStep(const FakeJob& job, Storage* storage,
                                          const ProgramOptions& options = {}) {
  return ResumeStepInLives(job, storage, Immortal(job), options);
}

}  // namespace gtrain::ckpt
