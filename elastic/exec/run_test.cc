// Elastic runs whose ranks are threads: what becomes of a step, and of what compression carries over, when a
// generation ends in the middle of it.
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>

#include "absl/strings/match.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/lease.h"
#include "checkpoint/engine/storage_error.h"
#include "checkpoint/store/directory_store.h"
#include "elastic/exec/run_test_world.h"
#include "elastic/plan/tree.h"
#include "gmock/gmock.h"

namespace gtrain::elastic {
namespace {

constexpr size_t kCount = 20'000;  // enough to be compressed
constexpr int64_t kBatch = 12;

// kSummed: the gradients are reduced, and the losses are not. kUntold: they are, which this process does not
// hear: the others apply the step. kHandOver: after that step, when the next generation gives a newcomer the
// state. kTree: the sum of a bitwise step is made, and this process does not get it. kSum, kSumUntold: the
// same of a sum of the program's.
enum class At { kCompute, kReady, kTree, kSummed, kUntold, kReduced, kApplied, kHandOver, kSum, kSumUntold };
constexpr At kEverywhere[] = {At::kCompute, At::kReady, At::kSummed, At::kUntold, At::kReduced, At::kApplied};

// When what happens to which process.
struct Turn {
  int64_t step = 0;
  At at = At::kCompute;
  int process = 0;
  std::vector<int> next;  // the processes of the generation that begins then
  bool dies = false;
};

// Sample i pushes the weights in a direction of its own; those from `flush` on in none.
float Push(int64_t sample, size_t weight) {
  const auto bits = static_cast<uint32_t>((sample + 1) * 2654435761 + static_cast<int64_t>(weight) * 40503);
  return static_cast<float>(bits % 2001) / 1000 - 1;
}

struct Outcome {
  absl::Status status;
  std::vector<float> weights;
  std::map<int64_t, std::vector<int64_t>> trained;  // step, samples
  std::map<int64_t, double> losses;                 // step, as it was reported
};

class Job {
 public:
  Job(int64_t steps, int64_t flush_from, std::vector<Turn> turns, bool checkpoints = false)
      : steps_(steps), flush_from_(flush_from), turns_(std::move(turns)), checkpoints_(checkpoints) {}

  // Called after each step by every process.
  std::function<void(int64_t step)> between = [](int64_t) {};
  // Called by every process's thread that opens checkpoints, several times.
  std::function<void()> opening = [] {};
  // Called by every process when it has made the last step.
  std::function<void()> at_end = [] {};
  int virtual_ranks = 0;                  // above 0 the program takes parts
  std::map<int, std::vector<int>> after;  // the generation that begins when this process has ended
  std::function<std::string(int process)> machine = [](int) { return "a machine"; };
  std::function<int64_t(int process)> batch = [](int) { return kBatch; };
  // Registers what a process has beside `w` and two gradients.
  std::function<absl::Status(ElasticRun& run, int process)> more = [](ElasticRun&, int) {
    return absl::OkStatus();
  };
  // Called by every process before the first gradient of a step, and behind its update.
  using Look = std::function<void(ElasticRun& run, int process, const StepPlace& step)>;
  Look before_step = [](ElasticRun&, int, const StepPlace&) {};
  Look after_step = before_step;
  // Called when all is trained; false: goes on with Begin.
  std::function<absl::StatusOr<bool>(ElasticRun& run, int process)> end = [](ElasticRun&, int) {
    return true;
  };
  // Of the program; the job's wins.
  CompressionOptions compression;

  int storage_errors() const { return job_.storage_errors; }
  int commits() const { return job_.commits; }
  std::string saves() const { return job_.saves(); }
  void Stop() { job_.stop = true; }
  size_t generations() const { return job_.generations(); }

  // The first generation has the first `ranks` of all processes.
  std::vector<Outcome> Run(int processes, int ranks) {
    std::vector<int> first(static_cast<size_t>(ranks));
    std::iota(first.begin(), first.end(), 0);
    job_.Begin(first);
    std::vector<Outcome> outcomes(static_cast<size_t>(processes));
    std::vector<std::thread> threads;
    for (int process = 0; process < processes; ++process) {
      threads.emplace_back([&, process] {
        // One that comes later starts when the generation begins that has it.
        const auto joined = [&] {
          for (size_t i = 0; i < turns_.size(); ++i) {
            if (std::count(turns_[i].next.begin(), turns_[i].next.end(), process) > 0) return i + 1;
          }
          return size_t{0};
        };
        const size_t after = process < ranks ? 0 : joined();
        Outcome& outcome = outcomes[static_cast<size_t>(process)];
        outcome.status = Train(process, after, &outcome);
        if (const auto next = this->after.find(process); next != this->after.end()) job_.Begin(next->second);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return outcomes;
  }

 private:
  // The turn that comes next, if it is here; done once.
  const Turn* Due(int64_t step, At at, int process) {
    const size_t next = turn_.load();
    if (next >= turns_.size()) return nullptr;
    const Turn& turn = turns_[next];
    if (turn.step != step || turn.at != at || turn.process != process) return nullptr;
    turn_ = next + 1;
    job_.Begin(turn.next);
    return &turn;
  }

  absl::Status Train(int process, size_t after, Outcome* outcome) {
    auto session = std::make_shared<ThreadSession>(&job_, process, after);
    sharding::SampleOptions samples{
        .samples = steps_ * kBatch, .global_batch = batch(process), .shuffle = false};
    ElasticRun run(session, {.samples = samples,
                             .checkpoints = checkpoints_,
                             .reducer = {.bucket_bytes = kCount * sizeof(float), .compression = compression},
                             .virtual_ranks = virtual_ranks,
                             .machine = machine(process),
                             .storage_retry = absl::Milliseconds(5)});
    std::vector<float>& weights = outcome->weights;
    weights.assign(kCount, 0);
    // Two gradients of the same weights, in buckets of their own.
    std::vector<float> odd(kCount), even(kCount);
    GT_RETURN_IF_ERROR(run.AddState("w", weights.data(), kCount, DType::kFloat32));
    GT_RETURN_IF_ERROR(run.AddGradient(odd.data(), kCount));
    GT_RETURN_IF_ERROR(run.AddGradient(even.data(), kCount));
    GT_RETURN_IF_ERROR(more(run, process));
    std::atomic<int64_t> now{0};  // hooks are called by the thread that opens checkpoints, too
    const auto lose = [&](At losses, At sum) {
      return [&, losses, sum](size_t count, DType dtype) -> absl::Status {
        const bool either = dtype == DType::kFloat64 && (count == ElasticRun::kLosses || count == 1);
        if (!either || Due(now, count == ElasticRun::kLosses ? losses : sum, process) == nullptr)
          return absl::OkStatus();
        return absl::UnavailableError("the test ends this generation");
      };
    };
    session->hooks.before_all_reduce = lose(At::kSummed, At::kSum);
    session->hooks.after_all_reduce = lose(At::kUntold, At::kSumUntold);
    session->hooks.before_broadcast = [&](size_t count, DType dtype) -> absl::Status {
      if (dtype == DType::kInt64 && count == 1) opening();
      if (dtype != DType::kUint8 || virtual_ranks == 0 || Due(now, At::kTree, process) == nullptr)
        return absl::OkStatus();
      return absl::UnavailableError("the test ends this generation");
    };
    session->hooks.before_start = [&](absl::Span<const Message>) -> absl::Status {
      if (Due(now, At::kHandOver, process) == nullptr) return absl::OkStatus();
      return absl::UnavailableError("the test ends this generation");
    };
    session->reported = [outcome](const ProgressReport& report) {
      if (report.loss) outcome->losses[report.step] = *report.loss;
    };
    const absl::Status died = absl::CancelledError("the test ends this process");
    for (;;) {
      GT_ASSIGN_OR_RETURN(const StepPlace step, run.Begin());
      if (step.done) {
        GT_ASSIGN_OR_RETURN(const bool ended, end(run, process));
        if (ended) return absl::OkStatus();
        continue;
      }
      now = step.step;
      before_step(run, process, step);
      if (const Turn* turn = Due(step.step, At::kCompute, process); turn != nullptr && turn->dies)
        return died;
      const auto compute = [&](const std::vector<int64_t>& samples) {
        double loss = 0;
        for (const int64_t sample : samples) {
          for (size_t i = 0; i < kCount && step.step <= flush_from_; ++i)
            (sample % 2 == 0 ? even : odd)[i] += Push(sample, i);
          loss += 1 / static_cast<double>(sample + 3);
        }
        run.Ready(1);
        if (step.step % 2 == 0) run.Ready(0);
        return loss;
      };
      double loss = 0;
      if (virtual_ranks == 0) loss = compute(step.samples);
      for (double of_part = 0; virtual_ranks > 0;) {
        GT_ASSIGN_OR_RETURN(const StepPart part, run.NextPart(of_part));
        if (part.done) break;
        of_part = compute(part.samples) + static_cast<double>(part.seed % 1000);
      }
      if (const Turn* turn = Due(step.step, At::kReady, process); turn != nullptr && turn->dies) return died;
      GT_ASSIGN_OR_RETURN(const bool apply, run.Reduce(loss));
      if (!apply) continue;
      if (const Turn* turn = Due(step.step, At::kReduced, process); turn != nullptr && turn->dies)
        return died;
      for (size_t i = 0; i < kCount; ++i) weights[i] += odd[i] + even[i];
      outcome->trained[step.step] = step.samples;
      GT_RETURN_IF_ERROR(run.Applied());
      after_step(run, process, step);
      between(step.step);
      if (step.step == steps_) at_end();
      if (const Turn* turn = Due(step.step, At::kApplied, process); turn != nullptr && turn->dies)
        return died;
    }
  }

  const int64_t steps_, flush_from_;
  const std::vector<Turn> turns_;
  const bool checkpoints_;
  std::atomic<size_t> turn_{0};
  ThreadJob job_;
};

// The weights that all samples' pushes make, whoever made them.
std::vector<double> Sum(int64_t steps) {
  std::vector<double> sum(kCount);
  for (int64_t sample = 0; sample < steps * kBatch; ++sample) {
    for (size_t i = 0; i < kCount; ++i) sum[i] += static_cast<double>(Push(sample, i)) / kBatch;
  }
  return sum;
}

double Off(const std::vector<float>& weights, const std::vector<double>& wanted) {
  double worst = 0;
  for (size_t i = 0; i < kCount; ++i)
    worst = std::max(worst, std::abs(static_cast<double>(weights[i]) - wanted[i]));
  return worst;
}

void ExpectAllTrained(const std::vector<Outcome>& outcomes, int64_t steps, int64_t pushed, double off) {
  const std::vector<double> wanted = Sum(pushed);
  for (const Outcome& outcome : outcomes) {
    if (absl::IsCancelled(outcome.status)) continue;    // it died, as the test wanted,
    if (absl::IsUnavailable(outcome.status)) continue;  // or has no place any more
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_LT(Off(outcome.weights, wanted), off);
    EXPECT_EQ(outcome.weights, outcomes[0].weights);
  }
  EXPECT_TRUE(outcomes[0].trained.contains(steps));
}

class ElasticRunTest : public ::testing::Test {
 protected:
  void TearDown() override { unsetenv("GTRAIN_COMPRESSION"); }
  void Compress(const char* words) { setenv("GTRAIN_COMPRESSION", words, 1); }
};

TEST_F(ElasticRunTest, ALossAnywhereInAStepLosesNoSample) {
  for (const At at : kEverywhere) {
    SCOPED_TRACE(static_cast<int>(at));
    Job job(8, 8, {{3, at, 2, {0, 1}, true}, {5, at, 1, {0, 1, 3}, false}, {7, at, 1, {3, 0}, true}});
    ExpectAllTrained(job.Run(4, 3), 8, 8, 1e-4);
  }
}

// After the last push many steps send nothing new, so all that was held back has come in the end: nothing is
// lost or comes twice, however often the ranks change in the middle of a step.
TEST_F(ElasticRunTest, WhatCompressionHoldsBackComesThroughAllGenerations) {
  for (const char* words :
       {"topk density=0.3 warmup=0", "topk density=0.3 warmup=4", "auto: topk density=0.3 warmup=0"}) {
    Compress(words);
    for (const At at : kEverywhere) {
      SCOPED_TRACE(absl::StrCat(words, " ", static_cast<int>(at)));
      Job job(36, 10,
              {{3, at, 1, {0, 1, 2, 3}, false},
               {6, at, 3, {2, 1, 0, 3}, false},
               {9, at, 0, {4, 3, 2, 1, 0}, false}});
      ExpectAllTrained(job.Run(5, 3), 36, 10, 1e-4);
    }
  }
}

// Those that have the state compute the first step of a generation, and who is new gets it meanwhile.
TEST_F(ElasticRunTest, WhoIsNewTrainsNothingInItsFirstStep) {
  Job job(12, 12, {{4, At::kApplied, 1, {0, 1, 2, 3}, false}, {8, At::kApplied, 0, {0, 4, 2, 3}, false}});
  const std::vector<Outcome> outcomes = job.Run(5, 2);
  const auto trained = [&](size_t process, int64_t step) {
    return outcomes[process].trained.at(step).size();
  };
  for (const size_t process : {2u, 3u}) {
    EXPECT_EQ(outcomes[process].trained.begin()->first, 5);
    EXPECT_EQ(trained(process, 5), 0) << process;
    EXPECT_EQ(trained(process, 6), kBatch / 4) << process;
  }
  EXPECT_EQ(trained(0, 5), kBatch / 2);
  EXPECT_EQ(trained(1, 5), kBatch / 2);
  EXPECT_EQ(trained(0, 9), kBatch / 3);
  EXPECT_EQ(trained(4, 9), 0);
  EXPECT_EQ(trained(4, 10), kBatch / 4);
}

// Others come while all compute: what they have computed is reduced with those that are new, and not made
// again. Who was lost took its share along.
TEST_F(ElasticRunTest, WhatIsComputedWhenOthersComeIsNotComputedAgain) {
  for (const char* codec : {"", "topk density=0.3 warmup=0"}) {
    for (const bool dies : {false, true}) {
      if (*codec != 0) Compress(codec);
      std::vector<int> next = {2, 1, 3, 0};
      if (dies) next = {2, 3, 0};
      Job job(10, 6, {{4, At::kCompute, 1, next, dies}});
      std::array<std::atomic<int>, 4> begun{};
      job.before_step = [&](ElasticRun&, int process, const StepPlace& step) {
        if (step.step != 4) return;
        const int before = begun[static_cast<size_t>(process)]++;
        EXPECT_TRUE(process != 0 || before > 0 || Until([&] { return job.generations() == 2; }));
      };
      job.after_step = [&](ElasticRun& run, int, const StepPlace& step) {
        double ranks = 1;
        const absl::StatusOr<bool> summed = run.Sum({&ranks, 1});
        ASSERT_TRUE(summed.ok()) << summed.status();
        EXPECT_EQ(*summed, dies || step.step != 4) << "their shares are those of two generations";
        EXPECT_EQ(ranks, !*summed ? 1 : step.step < 4 ? 2 : static_cast<double>(next.size()));
      };
      ExpectAllTrained(job.Run(4, 2), 10, 6, *codec == 0 ? 1e-4 : 10);
      EXPECT_EQ(begun[0], dies ? 2 : 1);
      EXPECT_EQ(begun[2], 1);
      EXPECT_EQ(begun[3], 1);
    }
  }
}

// A generation may end before a reducer of its own has what the one before carried over.
TEST_F(ElasticRunTest, WhatCompressionHoldsBackLivesThroughAGenerationThatNeverBegins) {
  Compress("topk density=0.3 warmup=4");
  Job job(36, 10,
          {{6, At::kCompute, 1, {3, 0, 1, 2}, false},
           {6, At::kHandOver, 0, {3, 2, 1, 0}, false},
           {6, At::kHandOver, 2, {0, 3, 1, 2}, false}});
  ExpectAllTrained(job.Run(4, 3), 36, 10, 1e-4);
}

// Its residual dies with a rank: what is missing is that of a few of its steps.
TEST_F(ElasticRunTest, ALostRankCostsWhatItHeldBackAndNoMore) {
  Compress("topk density=0.3 warmup=0");
  Job job(36, 10, {{6, At::kReady, 2, {0, 1}, true}});
  const std::vector<Outcome> outcomes = job.Run(3, 3);
  EXPECT_EQ(outcomes[0].weights, outcomes[1].weights);
  EXPECT_GT(Off(outcomes[0].weights, Sum(10)), 1e-3);
  EXPECT_LT(Off(outcomes[0].weights, Sum(10)), 1.5);
}

// All ranks are lost between two steps. What they had held back by the last checkpoint comes in the end.
TEST_F(ElasticRunTest, WhatCompressionHoldsBackIsInCheckpoints) {
  Compress("topk density=0.3 warmup=0");
  const std::string folder = TestFolder();
  setenv("GTRAIN_CHECKPOINT_URI", folder.c_str(), 1);
  setenv("GTRAIN_CHECKPOINT_EVERY", "3 steps", 1);
  setenv("GTRAIN_CLUSTER", "c", 1);
  setenv("GTRAIN_JOB_HASH", "h", 1);
  Job first(36, 10, {{8, At::kApplied, 0, {}, false}}, true);
  first.between = [&](int64_t step) {
    const auto committed = [&] {
      return (*ckpt::OpenDirectoryStore(folder))->List("manifests/")->size() == 1;
    };
    EXPECT_TRUE(step != 6 || Until(committed));
  };
  for (const Outcome& outcome : first.Run(3, 3))
    EXPECT_TRUE(absl::IsUnavailable(outcome.status)) << outcome.status;
  Job second(36, 10, {}, true);
  const std::vector<Outcome> outcomes = second.Run(3, 3);
  ExpectAllTrained(outcomes, 36, 10, 1e-4);
  EXPECT_FALSE(outcomes[0].trained.contains(3)) << "it began anew";
  EXPECT_TRUE(outcomes[0].trained.contains(8));
  for (const char* name : {"URI", "EVERY"}) unsetenv(absl::StrCat("GTRAIN_CHECKPOINT_", name).c_str());
  unsetenv("GTRAIN_CLUSTER");
  unsetenv("GTRAIN_JOB_HASH");
}

// However often ranks change: an interval in time counts from the newest save, not from the newest
// generation.
TEST_F(ElasticRunTest, GenerationsThatAreShorterThanTheIntervalPutNoSaveOff) {
  const std::string folder = TestFolder();
  setenv("GTRAIN_CHECKPOINT_URI", folder.c_str(), 1);
  setenv("GTRAIN_CHECKPOINT_EVERY", "600ms", 1);
  std::vector<Turn> turns;
  for (int64_t step = 10; step < 100; step += 10) turns.push_back({step, At::kApplied, 1, {0, 1}, false});
  Job job(100, 10, turns, true);
  const RealClock clock;
  const Instant began = clock.Now();
  std::atomic<bool> saved{false};
  job.between = [&](int64_t step) {
    // A generation takes 200 ms.
    EXPECT_TRUE(Until([&] { return clock.Now() >= began + step * absl::Milliseconds(20); }));
    if (step == 95) saved = !(*ckpt::OpenDirectoryStore(folder))->List("manifests/")->empty();
  };
  ExpectAllTrained(job.Run(2, 2), 100, 10, 1e-4);
  EXPECT_TRUE(saved);
  for (const char* name : {"URI", "EVERY"}) unsetenv(absl::StrCat("GTRAIN_CHECKPOINT_", name).c_str());
}

// What a generation has saved before its end counts, also where rank 0, which decides, is new.
TEST_F(ElasticRunTest, WhatOneGenerationHasSavedTheNextOneDoesNotSaveAgain) {
  const std::string folder = TestFolder();
  setenv("GTRAIN_CHECKPOINT_URI", folder.c_str(), 1);
  setenv("GTRAIN_CHECKPOINT_EVERY", "50 steps", 1);
  Job job(99, 10, {{51, At::kCompute, 1, {2, 0, 1}, false}}, true);
  const auto saves = [&] { return (*ckpt::OpenDirectoryStore(folder))->List("manifests/")->size(); };
  job.between = [&](int64_t step) {
    if (step == 50) {
      EXPECT_TRUE(Until([&] { return job.commits() == 2; })) << "both ranks are to know it";
    }
    if (step > 51 && step < 99) {
      EXPECT_FALSE(Until([&] { return saves() > 1; }, absl::Milliseconds(10))) << "at step " << step;
    }
  };
  ExpectAllTrained(job.Run(3, 2), 99, 10, 1e-4);
  EXPECT_EQ(saves(), 2) << "that of step 50 and the last";
  for (const char* name : {"URI", "EVERY"}) unsetenv(absl::StrCat("GTRAIN_CHECKPOINT_", name).c_str());
}

// The step at which a save was due comes while checkpoints are being opened.
TEST_F(ElasticRunTest, ASaveThatIsDueBeforeCheckpointsAreOpenIsMadeUpFor) {
  const std::string folder = TestFolder();
  setenv("GTRAIN_CHECKPOINT_URI", folder.c_str(), 1);
  setenv("GTRAIN_CHECKPOINT_EVERY", "200 steps", 1);
  Job job(399, 10, {{199, At::kApplied, 1, {1, 0}, false}}, true);
  const auto saved = [&] { return !(*ckpt::OpenDirectoryStore(folder))->List("manifests/")->empty(); };
  std::atomic<int64_t> at{0};
  job.opening = [&] {
    if (at >= 199) {
      EXPECT_TRUE(Until([&] { return at >= 202; }));
    }
  };
  job.between = [&](int64_t step) {
    at = step;
    if (step > 202 && step < 399) Until(saved, absl::Milliseconds(20));
    if (step == 398) {
      EXPECT_TRUE(saved());
    }
  };
  ExpectAllTrained(job.Run(2, 2), 399, 10, 1e-4);
  for (const char* name : {"URI", "EVERY"}) unsetenv(absl::StrCat("GTRAIN_CHECKPOINT_", name).c_str());
}

// What training has is in memory: it goes on, and saves once it can.
TEST_F(ElasticRunTest, AStorageThatFailsIsNoLossOfARank) {
  const std::string folder = TestFolder(), owners = folder + "/owners";
  setenv("GTRAIN_CHECKPOINT_URI", folder.c_str(), 1);
  Job job(400, 10, {{2, At::kReduced, 1, {1, 0}, false}}, true);
  const auto saved = [&] { return (*ckpt::OpenDirectoryStore(folder))->List("manifests/"); };
  std::once_flag breaks, mends;
  job.between = [&](int64_t step) {
    if (step == 1) {
      std::call_once(breaks, [&] {
        std::filesystem::rename(owners, folder + "/gone");
        std::ofstream(owners) << "no folder";
      });
    }
    if (step != 100) return;
    std::call_once(mends, [&] {
      EXPECT_TRUE(saved()->empty());
      std::filesystem::remove(owners);
      std::filesystem::rename(folder + "/gone", owners);
    });
  };
  ExpectAllTrained(job.Run(2, 2), 400, 10, 1e-4);
  EXPECT_FALSE(saved()->empty());
  unsetenv("GTRAIN_CHECKPOINT_URI");
}

// The last step is in memory until it is saved.
TEST_F(ElasticRunTest, AStorageThatFailsAtTheEndIsWaitedFor) {
  const std::string folder = TestFolder(), owners = folder + "/owners";
  setenv("GTRAIN_CHECKPOINT_URI", folder.c_str(), 1);
  setenv("GTRAIN_CHECKPOINT_EVERY", "1000 steps", 1);
  Job job(20, 10, {{2, At::kReduced, 1, {1, 0}, false}}, true);
  std::once_flag breaks;
  std::thread mender;
  job.between = [&](int64_t step) {
    if (step != 1) return;
    std::call_once(breaks, [&] {
      std::filesystem::rename(owners, folder + "/gone");
      std::ofstream(owners) << "no folder";
    });
  };
  std::atomic<int> ended{0};
  job.at_end = [&] {
    if (++ended == 1) {
      mender = std::thread([&] {
        const int before = job.storage_errors();
        EXPECT_TRUE(Until([&] { return job.storage_errors() > before + 2; })) << "nobody tried to save";
        std::filesystem::remove(owners);
        std::filesystem::rename(folder + "/gone", owners);
      });
    }
  };
  ExpectAllTrained(job.Run(2, 2), 20, 10, 1e-4);
  mender.join();
  EXPECT_EQ((*ckpt::OpenDirectoryStore(folder))->List("manifests/")->size(), 1);
  unsetenv("GTRAIN_CHECKPOINT_EVERY");
  unsetenv("GTRAIN_CHECKPOINT_URI");
}

// The directory of checkpoints goes away while training runs.
class LostDirectoryTest : public ElasticRunTest {
 protected:
  LostDirectoryTest() { setenv("GTRAIN_CHECKPOINT_URI", folder_.c_str(), 1); }
  void TearDown() override {
    for (const char* name : {"URI", "EVERY"}) unsetenv(absl::StrCat("GTRAIN_CHECKPOINT_", name).c_str());
  }
  void Save(const char* every) { setenv("GTRAIN_CHECKPOINT_EVERY", every, 1); }
  // Once, and as soon as both ranks know of so many commits: a save under way would make it again.
  void Remove(const Job& job, int commits) {
    std::call_once(goes_, [&] {
      EXPECT_TRUE(Until([&] { return job.commits() == commits; }));
      std::filesystem::rename(folder_, folder_ + ".gone");
    });
  }
  size_t Saved() const { return (*ckpt::OpenDirectoryStore(folder_))->List("manifests/")->size(); }

  const std::string folder_ = TestFolder();
  std::once_flag goes_, comes_;
};

// Its checkpointer never saves again: another one does, with the same step on all ranks.
TEST_F(LostDirectoryTest, ItIsSavedIntoAgainOnceItIsMadeAgain) {
  Save("10 steps");
  Job job(400, 10, {}, true);
  job.between = [&](int64_t step) {
    if (step == 15) Remove(job, 2);
    if (step == 45) {
      std::call_once(comes_, [&] {
        EXPECT_TRUE(Until([&] { return !job.saves().empty(); }));
        EXPECT_FALSE(std::filesystem::exists(folder_)) << "it may be unmounted: nobody makes it again";
        std::filesystem::create_directory(folder_);
      });
    }
    if (step > 45 && step < 399) Until([&] { return job.commits() > 2; }, absl::Milliseconds(20));
    if (step == 398) {
      EXPECT_GT(job.commits(), 2);
    }
  };
  ExpectAllTrained(job.Run(2, 2), 400, 10, 1e-4);
  EXPECT_EQ(job.generations(), 1);
  EXPECT_EQ(job.saves(), "") << "saves are committed again";
}

TEST_F(LostDirectoryTest, ItIsNotTakenFromAJobThatHasItByNow) {
  Save("10 steps");
  const std::string theirs = folder_ + ".theirs";
  const auto store = *ckpt::OpenDirectoryStore(theirs);
  const ckpt::Lease lease(store.get(), 7, 1, /*fresh=*/true, [](const absl::Status&) {});
  ASSERT_TRUE(ckpt::ClaimOwnership(store.get(), {.job = "theirs"}, 7).ok());
  Job job(400, 10, {}, true);
  job.between = [&](int64_t step) {
    if (step == 15) Remove(job, 2);
    // It was opened anew, in vain.
    if (job.storage_errors() > 0) std::call_once(comes_, [&] { std::filesystem::rename(theirs, folder_); });
    if (step > 15) Until([] { return false; }, absl::Milliseconds(5));
  };
  for (const Outcome& outcome : job.Run(2, 2)) {
    EXPECT_TRUE(absl::IsFailedPrecondition(outcome.status)) << outcome.status;
    EXPECT_THAT(std::string(outcome.status.message()), ::testing::HasSubstr("theirs"));
  }
  EXPECT_EQ(Saved(), 0);
}

// The error of that save is none of the generation, for which ranks would wait.
TEST_F(LostDirectoryTest, TheLastStepGoesIntoAnEmptyOneInItsPlace) {
  Save("1000 steps");
  Job job(20, 10, {}, true);
  job.between = [&](int64_t step) {
    if (step != 15) return;
    Remove(job, 0);
    std::filesystem::create_directory(folder_);
  };
  ExpectAllTrained(job.Run(2, 2), 20, 10, 1e-4);
  EXPECT_EQ(Saved(), 1);
}

// People hear what is missing and for how long it is tried, and what a stop would cost.
TEST_F(LostDirectoryTest, AnEndThatIsNotSavedIsSaid) {
  Save("1000 steps");
  Job job(20, 10, {}, true);
  std::thread user;
  job.between = [&](int64_t step) {
    if (step == 15) Remove(job, 0);
  };
  job.at_end = [&] {
    std::call_once(comes_, [&] {
      user = std::thread([&] {
        const auto says = [&](absl::string_view what) {
          EXPECT_TRUE(Until([&] { return absl::StrContains(job.saves(), what); })) << job.saves();
        };
        says("all 20 steps are made, and step 20 is not saved: there is no checkpoint; only the last save");
        EXPECT_TRUE(Until([&] { return job.storage_errors() > 2; })) << "it was made again";
        job.Stop();
        says("step 20 is not saved: there is no checkpoint; the save is tried until the grace of the stop");
        std::filesystem::create_directory(folder_);
      });
    });
  };
  ExpectAllTrained(job.Run(2, 2), 20, 10, 1e-4);
  user.join();
  EXPECT_EQ(Saved(), 1);
  EXPECT_EQ(job.saves(), "");
}

// It cannot go on where only the storage has what it needs.
TEST_F(ElasticRunTest, AStorageThatFailsAtTheBeginningIsSaid) {
  const std::string folder = TestFolder();
  setenv("GTRAIN_CHECKPOINT_URI", folder.c_str(), 1);
  std::ofstream(folder + "/owners") << "no folder";
  Job job(10, 10, {}, true);
  for (const Outcome& outcome : job.Run(2, 2))
    EXPECT_TRUE(ckpt::IsStorageError(outcome.status)) << outcome.status;
  unsetenv("GTRAIN_CHECKPOINT_URI");
}

// ---------------------------------------------------------------- the same bits

struct BitwiseJob : Job {
  explicit BitwiseJob(int parts, std::vector<Turn> turns = {}) : Job(14, 14, std::move(turns)) {
    virtual_ranks = parts;
  }
};

// What one rank computes all alone.
Outcome Alone(int virtual_ranks) { return BitwiseJob(virtual_ranks).Run(1, 1)[0]; }

void ExpectBits(const std::vector<Outcome>& outcomes, const Outcome& wanted) {
  ASSERT_TRUE(wanted.status.ok()) << wanted.status;
  EXPECT_EQ(wanted.losses.size(), 14u);
  int ended = 0;
  for (const Outcome& outcome : outcomes) {
    if (absl::IsCancelled(outcome.status) || absl::IsUnavailable(outcome.status)) continue;
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    ++ended;
    EXPECT_TRUE(outcome.weights == wanted.weights) << "other bits";
    for (const auto& [step, loss] : outcome.losses)
      EXPECT_EQ(loss, wanted.losses.at(step)) << "step " << step;
  }
  EXPECT_GT(ended, 0);
}

TEST_F(ElasticRunTest, BitwiseStepsHaveTheSameBitsAtAnyNumberOfRanks) {
  for (const int virtual_ranks : {4, 7, 12, 100}) {
    const Outcome alone = Alone(virtual_ranks);
    EXPECT_LT(Off(alone.weights, Sum(14)), 1e-4);
    for (const int ranks : {2, 3, 4, 9, 14}) {
      SCOPED_TRACE(absl::StrCat(virtual_ranks, " parts, ", ranks, " ranks"));
      BitwiseJob job(virtual_ranks);
      ExpectBits(job.Run(ranks, ranks), alone);
    }
  }
}

// 4 ranks, 2, 3 and 4 again, whatever the lost ones were doing.
TEST_F(ElasticRunTest, BitwiseStepsHaveTheSameBitsThroughGenerationsThatEndAnywhere) {
  const Outcome alone = Alone(6);
  for (const At at :
       {At::kCompute, At::kReady, At::kTree, At::kSummed, At::kUntold, At::kReduced, At::kApplied}) {
    SCOPED_TRACE(static_cast<int>(at));
    const bool dies = at == At::kCompute || at == At::kReady || at >= At::kReduced;
    BitwiseJob job(6,
                   {{3, at, 2, {1, 0}, dies}, {6, at, 1, {0, 4, 1}, false}, {9, at, 4, {5, 1, 4, 0}, false}});
    ExpectBits(job.Run(6, 4), alone);
    EXPECT_EQ(job.generations(), 4u);
  }
}

// So that the tests above can fail: the same samples in the order of the ranks.
TEST_F(ElasticRunTest, OtherStepsHaveOtherBitsAtAnotherNumberOfRanks) {
  Job one(14, 14, {}), three(14, 14, {});
  const std::vector<float> alone = one.Run(1, 1)[0].weights, others = three.Run(3, 3)[0].weights;
  EXPECT_LT(Off(others, Sum(14)), 1e-4);
  EXPECT_FALSE(alone == others);
}

// One program serves both: without `virtual_ranks` the part of a rank is its share.
TEST_F(ElasticRunTest, WithoutDeterminismARankHasOnePart) {
  ThreadJob threads;
  threads.Begin({0});
  auto session = std::make_shared<ThreadSession>(&threads, 0, 0);
  ElasticRun run(session, {.samples = {.samples = 8, .global_batch = 4, .seed = 5}});
  float gradient = 0;
  double reported = 0;
  session->reported = [&](const ProgressReport& report) { reported = *report.loss; };
  ASSERT_TRUE(run.AddGradient(&gradient, 1).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(run.NextPart(0).status()));
  const StepPlace step = run.Begin().value();
  const StepPart part = run.NextPart(0).value();
  EXPECT_EQ(part.samples, step.samples);
  EXPECT_EQ(part.seed, PartSeed(5, 1, 0));
  gradient = 8;
  EXPECT_TRUE(run.NextPart(6).value().done);
  EXPECT_TRUE(run.NextPart(7).value().done) << "and none after it";
  ASSERT_TRUE(run.Reduce(0).value());
  EXPECT_EQ(gradient, 2);
  ASSERT_TRUE(run.Applied().ok());
  EXPECT_EQ(reported, 1.5);

  ASSERT_TRUE(run.Begin().ok());
  ASSERT_TRUE(run.NextPart(0).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(run.Reduce(0).status())) << "the part did not end";
  ASSERT_TRUE(run.Begin().ok());
  ASSERT_TRUE(run.NextPart(0).ok());
  ASSERT_TRUE(run.NextPart(1).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(run.Reduce(1).status())) << "two losses";
}

TEST_F(ElasticRunTest, ABitwiseStepIsComputedPartByPart) {
  ThreadJob threads;
  threads.Begin({0});
  auto session = std::make_shared<ThreadSession>(&threads, 0, 0);
  ElasticRun run(session, {.samples = {.samples = 8, .global_batch = 4}, .virtual_ranks = 3});
  float gradient = 0;
  ASSERT_TRUE(run.AddGradient(&gradient, 1).ok());
  const StepPlace step = run.Begin().value();
  gradient = 1;
  const absl::Status whole = run.Reduce(1).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(whole));
  EXPECT_THAT(whole.message(), testing::HasSubstr("0 of the 3 parts"));
  EXPECT_THAT(whole.message(), testing::HasSubstr("step.parts()"));
  ASSERT_TRUE(run.Begin().ok());
  std::vector<int64_t> samples;
  std::set<uint64_t> seeds;
  for (StepPart part = run.NextPart(0).value(); !part.done; part = run.NextPart(1).value()) {
    EXPECT_EQ(part.virtual_rank, static_cast<int64_t>(seeds.size()));
    EXPECT_EQ(gradient, 0) << "zeros for each part";
    run.Ready(0);
    gradient += 4 * static_cast<float>(part.samples.size());
    samples.insert(samples.end(), part.samples.begin(), part.samples.end());
    seeds.insert(part.seed);
  }
  EXPECT_EQ(samples, step.samples);
  EXPECT_EQ(seeds.size(), 3u);
  ASSERT_TRUE(run.Reduce(0).value());
  EXPECT_EQ(gradient, 4);
}

TEST_F(ElasticRunTest, CompressionOfABitwiseJobIsRefused) {
  Compress("fp16");
  BitwiseJob job(4);
  const absl::Status status = job.Run(1, 1)[0].status;
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.message(), testing::HasSubstr("$GTRAIN_COMPRESSION"));
}

// The odd one ends with an error that names both machines; the others go on without it.
TEST_F(ElasticRunTest, ABitwiseJobTakesNoMachineOfAnotherKind) {
  BitwiseJob job(6, {{3, At::kApplied, 1, {4, 1, 0}, false}});
  job.machine = [](int process) { return process == 4 ? "a new one" : "an old one"; };
  job.after[4] = {0, 1};
  std::vector<Outcome> outcomes = job.Run(5, 4);
  const absl::Status odd = outcomes[4].status;
  EXPECT_TRUE(absl::IsFailedPrecondition(odd)) << odd;
  EXPECT_THAT(odd.message(), testing::HasSubstr("rank 0 has a new one; rank 1, with whose bits training goes "
                                                "on, has an old one"));
  outcomes.pop_back();
  ExpectBits(outcomes, Alone(6));
}

// One that comes new with another batch divided the same sum by another number, with state of the same size
// in another order had it in the wrong places, and with more state waited for it for ever: nobody was told.
TEST_F(ElasticRunTest, ANewRankOfAnotherProgramEndsAlone) {
  std::array<float, 4> memory{};  // of process 4 alone
  const auto state = [&](const char* name, size_t count) {
    return [&memory, name, count](ElasticRun& run, int process) {
      return process == 4 ? run.AddState(name, memory.data(), count, DType::kFloat32) : absl::OkStatus();
    };
  };
  const auto gradient = [&](ElasticRun& run, int process) {
    return process == 4 ? run.AddGradient(memory.data(), 4) : absl::OkStatus();
  };
  struct Case {
    const char* says;
    std::function<int64_t(int)> batch;
    std::function<absl::Status(ElasticRun&, int)> more;
  };
  const auto usual = [](int) { return kBatch; };
  const auto larger = [](int process) { return process == 4 ? 2 * kBatch : kBatch; };
  const auto nothing = [](ElasticRun&, int) { return absl::OkStatus(); };
  for (const Case& one : {Case{"in batches of ", larger, nothing},
                          Case{"state 'momentum' of F32[4] instead of and more", usual, state("momentum", 4)},
                          Case{"gradient 2 of 4 elements instead of and more", usual, gradient}}) {
    SCOPED_TRACE(one.says);
    Job job(6, 6, {{3, At::kApplied, 1, {4, 1, 0}, false}});
    job.batch = one.batch;
    job.more = one.more;
    job.after[4] = {0, 1};
    std::vector<Outcome> outcomes = job.Run(5, 4);
    EXPECT_TRUE(absl::IsFailedPrecondition(outcomes[4].status)) << outcomes[4].status;
    EXPECT_THAT(outcomes[4].status.message(),
                testing::AllOf(testing::HasSubstr("rank 0 trains something else than rank 1"),
                               testing::HasSubstr(one.says)));
    outcomes.pop_back();
    ExpectAllTrained(outcomes, 6, 6, 1e-4);
  }
}

// What a rank holds back goes with it from generation to generation, whole and once; one that comes new has
// nothing, and what a lost one takes along is counted.
TEST_F(ElasticRunTest, WhatIsHeldBackIsSaid) {
  Compress("topk density=0.3 warmup=0");
  for (const At at : kEverywhere) {
    SCOPED_TRACE(static_cast<int>(at));
    Job job(8, 8, {{3, at, 1, {0, 1, 2, 3}, false}, {6, at, 3, {2, 1, 0}, true}});
    std::array<std::optional<double>, 4> held;  // each is of one process
    std::atomic<int> compared{0};
    job.before_step = [&](ElasticRun& run, int process, const StepPlace&) {
      const auto now = run.residual();
      ASSERT_TRUE(now.ok()) << now.status();
      const double before = held[static_cast<size_t>(process)].value_or(0);
      EXPECT_NEAR(now->norm, before, 1e-4 * before) << process;
      compared += before > 1 ? 1 : 0;
    };
    job.after_step = [&](ElasticRun& run, int process, const StepPlace& step) {
      const auto now = run.residual();
      ASSERT_TRUE(now.ok()) << now.status();
      EXPECT_GT(now->norm, step.samples.empty() ? 0 : 1);
      EXPECT_EQ(now->lost, step.step == 8 ? 1 : now->lost);
      held[static_cast<size_t>(process)] = now->norm;
    };
    ExpectAllTrained(job.Run(4, 3), 8, 8, 10);
    EXPECT_GT(compared, 15);
  }
}

TEST_F(ElasticRunTest, AProgramThatWantsNoMoreEndsAllRanksBehindOneStep) {
  Job job(8, 8, {});
  job.before_step = [](ElasticRun& run, int process, const StepPlace& step) {
    if (process == 1 && step.step == 5) run.Stop();
  };
  for (const Outcome& outcome : job.Run(3, 3)) {
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.trained.rbegin()->first, 5);
  }
}

TEST_F(ElasticRunTest, WhereNothingIsHeldBackNothingIsLost) {
  Job job(4, 4, {{2, At::kCompute, 2, {0, 1}, true}});
  job.compression = {.codec = Codec::kInt8, .error_feedback = false};
  job.after_step = [&](ElasticRun& run, int, const StepPlace&) {
    EXPECT_EQ(run.residual()->norm, 0);
    EXPECT_EQ(run.residual()->lost, 0);
  };
  ExpectAllTrained(job.Run(3, 3), 4, 4, 0.1);
}

TEST_F(ElasticRunTest, WhatIsHeldBackByAStepUnderWayIsNotKnown) {
  Job job(1, 1, {});
  job.compression = {.codec = Codec::kInt8};
  job.before_step = [&](ElasticRun& run, int, const StepPlace&) {
    EXPECT_TRUE(run.residual().ok());
    run.Ready(0);
    EXPECT_TRUE(absl::IsFailedPrecondition(run.residual().status()));
  };
  ExpectAllTrained(job.Run(2, 2), 1, 1, 10);
}

// The update asks for it, also where it is made in the next generation.
TEST_F(ElasticRunTest, WhatTheReductionSaysIsOfTheStepThatIsApplied) {
  Compress("onebit momentum=0.5 warmup=4");
  for (const At at : kEverywhere) {
    SCOPED_TRACE(static_cast<int>(at));
    Job job(8, 8, {{4, at, 1, {0, 1, 2, 3}, false}, {5, at, 3, {2, 1, 0, 3}, false}});
    std::atomic<int> unknown{0};
    job.after_step = [&](ElasticRun& run, int, const StepPlace& step) {
      EXPECT_EQ(run.reduced().momentum_travelled, step.step > 4) << step.step;
      if (!run.loss()) return static_cast<void>(++unknown);
      double wanted = 0;
      for (int64_t sample = (step.step - 1) * kBatch; sample < step.step * kBatch; ++sample)
        wanted += 1 / static_cast<double>(sample + 3) / kBatch;
      EXPECT_NEAR(*run.loss(), wanted, 1e-9);
    };
    ExpectAllTrained(job.Run(4, 3), 8, 8, 10);
    // It applied the gradients that it held, and had not heard of the losses.
    EXPECT_EQ(unknown, at == At::kUntold ? 2 : 0);
  }
}

TEST_F(ElasticRunTest, AProgramCompressesWhereTheJobDoesNotSay) {
  const auto selects = [](const char* of_job) {
    if (of_job != nullptr) setenv("GTRAIN_COMPRESSION", of_job, 1);
    Job job(2, 2, {});
    job.compression = {.codec = Codec::kTopK};
    std::atomic<int> selected{0};
    job.after_step = [&](ElasticRun& run, int, const StepPlace&) {
      selected += run.reduced().selected.wanted > 0 ? 1 : 0;
    };
    for (const Outcome& outcome : job.Run(2, 2)) EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    return selected.load();
  };
  EXPECT_EQ(selects(nullptr), 4);
  EXPECT_EQ(selects("int8"), 0);
  EXPECT_EQ(selects("none"), 0);
}

TEST_F(ElasticRunTest, AProgramSaysWhereCheckpointsGo) {
  const std::string folder = TestFolder();
  const auto train = [&](CheckpointOptions options) -> absl::Status {
    ThreadJob threads;
    threads.Begin({0});
    ElasticRun run(std::make_shared<ThreadSession>(&threads, 0, 0),
                   {.samples = {.samples = 4, .global_batch = 1}});
    GT_RETURN_IF_ERROR(run.SetCheckpoints(std::move(options)));
    for (;;) {
      GT_ASSIGN_OR_RETURN(const StepPlace step, run.Begin());
      if (step.done) return run.SetCheckpoints({});
      EXPECT_EQ(step.steps, 4);
      GT_RETURN_IF_ERROR(run.Reduce(0).status());
      GT_RETURN_IF_ERROR(run.Applied());
    }
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(train({.uri = folder}))) << "it is said before the first step";
  EXPECT_EQ((*ckpt::OpenDirectoryStore(folder))->List("manifests/")->size(), 1);
  EXPECT_TRUE(absl::IsInvalidArgument(train({.uri = folder, .read_only = true})));
  EXPECT_TRUE(absl::IsInvalidArgument(train({.uri = folder, .lazy = true})));
}

// The sum of a one of each rank.
absl::StatusOr<bool> CountRanks(ElasticRun& run, double* ranks) {
  *ranks = 1;
  return run.Sum(absl::MakeSpan(ranks, 1));
}

TEST_F(ElasticRunTest, ASumAtTheEndIsMadeAgainWhenARankIsLost) {
  Job job(6, 6, {{6, At::kSum, 1, {1, 0, 3}, true}, {6, At::kSumUntold, 0, {0}, false}});
  std::array<double, 4> sums{};
  std::array<int, 4> tries{};
  job.end = [&](ElasticRun& run, int process) -> absl::StatusOr<bool> {
    ++tries[static_cast<size_t>(process)];
    return CountRanks(run, &sums[static_cast<size_t>(process)]);
  };
  const std::vector<Outcome> outcomes = job.Run(4, 3);
  for (const int process : {0, 1, 3}) {
    EXPECT_TRUE(outcomes[static_cast<size_t>(process)].status.ok())
        << outcomes[static_cast<size_t>(process)].status;
  }
  EXPECT_TRUE(absl::IsUnavailable(outcomes[2].status));
  EXPECT_EQ(sums[1], 3);
  EXPECT_EQ(sums[3], 3);
  EXPECT_EQ(sums[0], 1) << "it did not hear of that sum, and is alone now";
  EXPECT_EQ(tries, (std::array<int, 4>{3, 2, 1, 1}));
}

// Every second step: one that is lost is left out, and training goes on, also where some have it already.
TEST_F(ElasticRunTest, ASumBetweenStepsIsLeftOutWhenARankIsLost) {
  for (const At at : {At::kSum, At::kSumUntold, At::kUntold, At::kReduced, At::kApplied}) {
    SCOPED_TRACE(static_cast<int>(at));
    Job job(8, 8,
            {{2, at, 2, {0, 1}, at != At::kUntold}, {4, at, 1, {0, 1, 3}, false}, {6, at, 0, {3, 0}, false}});
    std::atomic<int> summed{0}, left_out{0};
    job.after_step = [&](ElasticRun& run, int, const StepPlace& step) {
      if (step.step % 2 != 0) return;
      double sum = 0;
      const auto all = CountRanks(run, &sum);
      ASSERT_TRUE(all.ok()) << all.status();
      EXPECT_TRUE(!*all || sum == 2 || sum == 3) << sum;
      ++(*all ? summed : left_out);
    };
    ExpectAllTrained(job.Run(4, 3), 8, 8, 1e-4);
    EXPECT_GT(summed, 0);
    EXPECT_EQ(left_out > 0, at != At::kApplied);
  }
}

TEST_F(ElasticRunTest, AGradientThatIsReadyTwiceOrNoneIsAnErrorOfReduce) {
  ThreadJob threads;
  threads.Begin({0});
  auto session = std::make_shared<ThreadSession>(&threads, 0, 0);
  ElasticRun run(session, {.samples = {.samples = 4, .global_batch = 1}});
  float gradient = 0;
  ASSERT_TRUE(run.AddGradient(&gradient, 1).ok());
  ASSERT_TRUE(run.Begin().ok());
  run.Ready(0);
  run.Ready(0);
  EXPECT_TRUE(absl::IsInvalidArgument(run.Reduce(0).status()));
  ASSERT_TRUE(run.Begin().ok());
  run.Ready(1);
  EXPECT_TRUE(absl::IsInvalidArgument(run.Reduce(0).status()));
  ASSERT_TRUE(run.Begin().ok());
  run.Ready(0);
  EXPECT_TRUE(run.Reduce(0).ok());
}

}  // namespace
}  // namespace gtrain::elastic
