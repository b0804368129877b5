// Elastic runs of a mesh whose ranks are threads: a model in parts, of which any may be lost at any point of
// a step. All numbers are integers of floats that are exact, so that the weights are the same bits whatever
// the number of copies was.
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "base/status_macros.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "checkpoint/store/directory_store.h"
#include "elastic/exec/run_test_world.h"

namespace gtrain::elastic {
namespace {

constexpr int64_t kCount = 24;  // of the whole model
constexpr int64_t kBatch = 8;
constexpr size_t kProbe = 3;  // doubles that travel along an axis
constexpr int64_t kSteps = 9;

// kAxis: the others along tp wait for it. kSummed, kUntold: as in run_test.cc. kCopy: a step copy is not
// sent.
enum class At { kCompute, kAxis, kSummed, kUntold, kReduced, kApplied, kCopy };
constexpr At kEverywhere[] = {At::kCompute, At::kAxis, At::kSummed, At::kUntold, At::kReduced, At::kApplied};
constexpr At kAnywhere[] = {At::kCompute, At::kAxis,    At::kSummed, At::kUntold,
                            At::kReduced, At::kApplied, At::kCopy};

struct Turn {
  int64_t step = 0;
  At at = At::kCompute;
  int process = 0;
  std::vector<int> next;  // the processes of the generation that begins then
  bool dies = true;
};

float Gradient(int64_t sample, int64_t weight, int64_t activation) {
  return static_cast<float>((sample * 7 + weight * 3 + activation) % 101);
}
float Updated(float weight, float mean) {
  return std::fmod(weight + mean * static_cast<float>(kBatch), 997.0F);
}
float First(int64_t weight) { return static_cast<float>(weight % 13); }

// What one process would make of it.
std::vector<float> Reference(int64_t steps) {
  std::vector<float> weights(kCount);
  for (int64_t i = 0; i < kCount; ++i) weights[static_cast<size_t>(i)] = First(i);
  for (int64_t step = 0; step < steps; ++step) {
    const auto activation = static_cast<int64_t>(std::accumulate(weights.begin(), weights.end(), 0.0));
    for (int64_t i = 0; i < kCount; ++i) {
      float sum = 0;
      for (int64_t sample = step * kBatch; sample < (step + 1) * kBatch; ++sample)
        sum += Gradient(sample, i, activation);
      float& weight = weights[static_cast<size_t>(i)];
      weight = Updated(weight, sum / static_cast<float>(kBatch));
    }
  }
  return weights;
}

struct Outcome {
  absl::Status status;
  std::vector<float> part;
  LocalBox box;
  float replicated = 0;
  int64_t steps = 0;  // that it applied
};

class MeshJob {
 public:
  MeshJob(std::vector<MeshAxis> mesh, std::vector<Turn> turns, int ranks_a_machine = 1 << 20)
      : turns_(std::move(turns)) {
    job_.mesh = std::move(mesh);
    job_.ranks_a_machine = ranks_a_machine;
  }
  bool checkpoints = false;
  bool step_copies = false;
  int all_end_with = -1;  // the process whose end is that of its generation
  std::function<void(int64_t step)> between = [](int64_t) {};

  std::vector<Outcome> Run(int processes, int ranks) {
    std::vector<int> first(static_cast<size_t>(ranks));
    std::iota(first.begin(), first.end(), 0);
    job_.Begin(first);
    std::vector<Outcome> outcomes(static_cast<size_t>(processes));
    std::vector<std::thread> threads;
    for (int process = 0; process < processes; ++process) {
      threads.emplace_back([&, process] {
        const auto joined = [&] {
          for (size_t i = 0; i < turns_.size(); ++i) {
            if (std::count(turns_[i].next.begin(), turns_[i].next.end(), process) > 0) return i + 1;
          }
          return size_t{0};
        };
        Outcome& outcome = outcomes[static_cast<size_t>(process)];
        outcome.status = Train(process, process < ranks ? 0 : joined(), &outcome);
        if (process == all_end_with) job_.Begin({});
      });
    }
    for (std::thread& thread : threads) thread.join();
    return outcomes;
  }

 private:
  const Turn* Due(int64_t step, At at, int process) {
    const size_t next = turn_.load();
    if (next >= turns_.size()) return nullptr;
    const Turn& turn = turns_[next];
    if (turn.step != step || turn.at != at || turn.process != process) return nullptr;
    turn_ = next + 1;
    job_.Begin(turn.next);
    return &turn;
  }

  // The sum of the whole model, of which each rank along pp and tp has a part.
  static absl::StatusOr<int64_t> Activation(ElasticRun& run, const std::vector<float>& part) {
    std::vector<double> sum(kProbe, std::accumulate(part.begin(), part.end(), 0.0));
    for (const char* axis : {"tp", "pp"}) {
      GT_ASSIGN_OR_RETURN(const std::shared_ptr<Communicator> comm, run.Along(axis));
      GT_RETURN_IF_ERROR(comm->AllReduce(sum.data(), kProbe, DType::kFloat64, ReduceOp::kSum));
    }
    return static_cast<int64_t>(sum[0]);
  }

  absl::Status Train(int process, size_t after, Outcome* outcome) {
    auto session = std::make_shared<ThreadSession>(&job_, process, after);
    sharding::SampleOptions samples{.samples = kSteps * kBatch, .global_batch = kBatch, .shuffle = false};
    ElasticRun run(session, {.samples = samples, .checkpoints = checkpoints, .step_copies = step_copies});
    const Sharding cut{.splits = {{0, "pp"}, {0, "tp"}}};
    GT_ASSIGN_OR_RETURN(outcome->box, ElasticRun::LocalPart(*session, {kCount}, cut));
    const int64_t begin = outcome->box.begin[0];
    std::vector<float>& part = outcome->part;
    part.resize(static_cast<size_t>(outcome->box.shape[0]));
    for (size_t i = 0; i < part.size(); ++i) part[i] = First(begin + static_cast<int64_t>(i));
    outcome->replicated = static_cast<float>(100 + process);  // all begin with that of one rank
    std::vector<float> gradient(part.size());
    GT_RETURN_IF_ERROR(run.AddSharded("part", part.data(), part.size(), {kCount}, cut, DType::kFloat32));
    GT_RETURN_IF_ERROR(run.AddState("all", &outcome->replicated, 1, DType::kFloat32));
    GT_RETURN_IF_ERROR(run.AddGradient(gradient.data(), gradient.size()));
    std::atomic<int64_t> now{0};
    const auto lose = [&](At at, size_t wanted) {
      return [&, at, wanted](size_t count, DType dtype) -> absl::Status {
        if (dtype != DType::kFloat64 || count != wanted || Due(now, at, process) == nullptr)
          return absl::OkStatus();
        return absl::UnavailableError("the test ends this generation");
      };
    };
    const auto at_axis = lose(At::kAxis, kProbe), at_sum = lose(At::kSummed, ElasticRun::kLosses);
    session->hooks.before_all_reduce = [&](size_t count, DType dtype) -> absl::Status {
      GT_RETURN_IF_ERROR(at_axis(count, dtype));
      return at_sum(count, dtype);
    };
    session->hooks.after_all_reduce = lose(At::kUntold, ElasticRun::kLosses);
    std::atomic<bool> dies_beside{false};
    session->hooks.before_start = [&](absl::Span<const Message> messages) -> absl::Status {
      const bool sends = messages[0].kind == Message::Kind::kSend && messages[0].dtype == DType::kUint8;
      // A thread sends it as soon as Begin has set it going, perhaps before this one has heard of its step.
      const Turn* turn = sends ? Due(now, At::kCopy, process) : nullptr;
      if (sends && turn == nullptr) turn = Due(now + 1, At::kCopy, process);
      if (turn == nullptr) return absl::OkStatus();
      dies_beside = turn->dies;
      return absl::UnavailableError("the test ends this generation");
    };
    const absl::Status died = absl::CancelledError("the test ends this process");
    const auto dies = [&](At at) {
      const Turn* turn = Due(now, at, process);
      return turn != nullptr && turn->dies;
    };
    for (;;) {
      GT_ASSIGN_OR_RETURN(const StepPlace step, run.Begin());
      if (step.done) return absl::OkStatus();
      now = step.step;
      if (dies(At::kCompute)) return died;
      const absl::StatusOr<int64_t> activation = Activation(run, part);
      if (absl::IsUnavailable(activation.status())) {
        if (!run.AwaitLoss()) return activation.status();
        continue;
      }
      GT_RETURN_IF_ERROR(activation.status());
      for (const int64_t sample : step.samples) {
        for (size_t i = 0; i < part.size(); ++i)
          gradient[i] += Gradient(sample, begin + static_cast<int64_t>(i), *activation);
      }
      run.Ready(0);
      const absl::StatusOr<bool> apply = run.Reduce(static_cast<double>(step.samples.size()));
      if (dies_beside) return died;
      GT_RETURN_IF_ERROR(apply.status());
      if (!*apply) continue;
      EXPECT_EQ(run.loss().value_or(1), 1) << "each sample's loss counts once";
      if (dies(At::kReduced)) return died;
      for (size_t i = 0; i < part.size(); ++i) part[i] = Updated(part[i], gradient[i]);
      outcome->replicated += 1;
      ++outcome->steps;
      GT_RETURN_IF_ERROR(run.Applied());
      between(step.step);
      if (dies(At::kApplied)) return died;
    }
  }

  const std::vector<Turn> turns_;
  std::atomic<size_t> turn_{0};
  ThreadJob job_;
};

void ExpectWhole(const std::vector<Outcome>& outcomes, size_t finished) {
  const std::vector<float> wanted = Reference(kSteps);
  float replicated = 0;
  size_t ends = 0;
  for (const Outcome& outcome : outcomes) {
    if (absl::IsCancelled(outcome.status) || absl::IsUnavailable(outcome.status)) continue;
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    ++ends;
    const auto first = wanted.begin() + outcome.box.begin[0];
    EXPECT_EQ(outcome.part, std::vector<float>(first, first + outcome.box.shape[0]));
    if (replicated == 0) replicated = outcome.replicated;
    EXPECT_EQ(outcome.replicated, replicated) << "equal in all parts of the model";
    EXPECT_EQ(std::fmod(outcome.replicated, 100.0F) - std::fmod(replicated, 100.0F), 0);
  }
  EXPECT_EQ(ends, finished);
}

const std::vector<MeshAxis> kTwoByTwo = {{"dp", 0}, {"tp", 2}};

TEST(ElasticMesh, APartIsReplacedFromItsCopyAtAnyPointOfAStep) {
  for (const At at : kEverywhere) {
    for (int lost = 0; lost < 4; ++lost) {
      SCOPED_TRACE(absl::StrCat("at ", static_cast<int>(at), " process ", lost));
      std::vector<int> next = {0, 1, 2, 3};
      next[static_cast<size_t>(lost)] = 4;
      MeshJob job(kTwoByTwo, {{4, at, lost, next}});
      ExpectWhole(job.Run(5, 4), 4);
    }
  }
}

// A copy of the model goes, and comes again: ranks of two copies go on as one.
TEST(ElasticMesh, CopiesGoAndCome) {
  for (const At at : kEverywhere) {
    SCOPED_TRACE(static_cast<int>(at));
    // Process 1 dies; 3 takes its rank, 2 waits for its partner, 4.
    MeshJob job(kTwoByTwo, {{3, at, 1, {0, 3}}, {6, At::kApplied, 0, {0, 3, 5, 4}, false}});
    ExpectWhole(job.Run(6, 4), 4);
  }
}

TEST(ElasticMesh, FourPartsOfTwoAxes) {
  for (const At at : kEverywhere) {
    SCOPED_TRACE(static_cast<int>(at));
    MeshJob job(
        {{"dp", 0}, {"pp", 2}, {"tp", 2}},
        {{3, at, 2, {0, 1, 8, 3, 4, 5, 6, 7}}, {5, at, 4, {0, 1, 8, 3}}, {7, at, 0, {9, 1, 8, 3}, false}});
    const std::vector<Outcome> outcomes = job.Run(10, 8);
    // The third turn takes the last that had the first part: nobody can go on without a checkpoint.
    for (const Outcome& outcome : outcomes) EXPECT_FALSE(outcome.status.ok());
  }
  MeshJob job({{"dp", 0}, {"pp", 2}, {"tp", 2}},
              {{3, At::kAxis, 2, {0, 1, 8, 3, 4, 5, 6, 7}}, {5, At::kReduced, 4, {0, 1, 8, 3}}});
  ExpectWhole(job.Run(9, 8), 4);
}

// All that had a part are lost: the others go back with it to the newest checkpoint.
TEST(ElasticMesh, APartThatIsLostWithAllItsCopiesComesFromACheckpoint) {
  const std::string folder = TestFolder();
  setenv("GTRAIN_CHECKPOINT_URI", folder.c_str(), 1);
  setenv("GTRAIN_CHECKPOINT_EVERY", "2 steps", 1);
  MeshJob job(kTwoByTwo, {{5, At::kApplied, 1, {0, 3}}, {7, At::kCompute, 3, {0, 4}}});
  job.checkpoints = true;
  job.between = [&](int64_t step) {
    const auto committed = [&] { return !(*ckpt::OpenDirectoryStore(folder))->List("manifests/")->empty(); };
    EXPECT_TRUE(step != 4 || Until(committed));
  };
  const std::vector<Outcome> outcomes = job.Run(5, 4);
  ExpectWhole(outcomes, 2);
  EXPECT_GT(outcomes[0].steps, kSteps) << "some were made again";
  for (const char* name : {"URI", "EVERY"}) unsetenv(absl::StrCat("GTRAIN_CHECKPOINT_", name).c_str());
}

// With step copies: whoever has the only copy of a part dies at any point of a step, and nobody goes back
// further than that step's beginning.
TEST(ElasticMesh, AStepCopyReplacesWhoWasTheOnlyOne) {
  for (const int ranks_a_machine : {1, 8}) {
    for (const At at : kAnywhere) {
      for (int lost = 0; lost < 3; ++lost) {
        SCOPED_TRACE(absl::StrCat("at ", static_cast<int>(at), " process ", lost, " of ", ranks_a_machine));
        std::vector<int> next = {0, 1, 2};
        next[static_cast<size_t>(lost)] = 3;
        std::vector<int> then = next;
        const int dies = std::exchange(then[lost == 0 ? 1 : 0], 4);
        MeshJob job({{"dp", 0}, {"tp", 3}}, {{4, at, lost, next}, {7, At::kApplied, dies, then}},
                    ranks_a_machine);
        job.step_copies = true;
        const std::vector<Outcome> outcomes = job.Run(5, 3);
        ExpectWhole(outcomes, 3);
        for (const Outcome& outcome : outcomes) EXPECT_LE(outcome.steps, kSteps + 2) << "one more a loss";
      }
    }
  }
}

// Parts of different sizes, more losses than parts, and one process after the other.
TEST(ElasticMesh, StepCopiesOfUnevenParts) {
  std::vector<Turn> turns;
  std::vector<int> now = {0, 1, 2, 3, 4};
  for (int loss = 0; loss < 7; ++loss) {
    const auto at = static_cast<size_t>(loss % 5);  // its copy is kept by the rank two further on
    const int dies = std::exchange(now[at], 5 + loss);
    turns.push_back({loss + 2, kAnywhere[static_cast<size_t>(loss)], dies, now});
  }
  MeshJob job({{"dp", 0}, {"tp", 5}}, std::move(turns), /*ranks_a_machine=*/2);
  job.step_copies = true;
  ExpectWhole(job.Run(12, 5), 5);
}

// A rank and the one that keeps its copy: no part of a model is made up.
TEST(ElasticMesh, WithoutTheKeeperOfItsCopyAPartIsLost) {
  MeshJob job({{"dp", 0}, {"tp", 3}}, {{4, At::kApplied, 0, {3, 4, 2}}});
  job.step_copies = true;
  for (const Outcome& outcome : job.Run(5, 3)) EXPECT_FALSE(outcome.status.ok());
}

// An all-reduce over several machines adds an element in an order that depends on its place in the buffer,
// and the parts of an uneven cut are of different sizes.
TEST(ElasticMesh, WhatAllPartsHaveAlikeStaysAlike) {
  constexpr int kRanks = 6;
  constexpr size_t kAlike = 5'000;
  ThreadJob threads;
  threads.mesh = kTwoByTwo;
  threads.ranks_a_machine = 2;
  std::vector<int> all(kRanks);
  std::iota(all.begin(), all.end(), 0);
  threads.Begin(all);
  std::vector<std::vector<float>> alike(kRanks);
  std::vector<absl::Status> ends(kRanks);
  const auto train = [&](int process) -> absl::Status {
    auto session = std::make_shared<ThreadSession>(&threads, process, 0);
    ElasticRun run(session, {.samples = {.samples = 60, .global_batch = 12}});
    const Sharding cut{.splits = {{1, "tp"}}};
    GT_ASSIGN_OR_RETURN(const LocalBox box, ElasticRun::LocalPart(*session, {64, 15}, cut));
    std::vector<float> part(static_cast<size_t>(64 * box.shape[1])), gradient(part.size());
    std::vector<float>& weights = alike[static_cast<size_t>(process)];
    std::vector<float> of_weights(kAlike);
    weights.assign(kAlike, 1);
    GT_RETURN_IF_ERROR(run.AddSharded("part", part.data(), part.size(), {64, 15}, cut, DType::kFloat32));
    GT_RETURN_IF_ERROR(run.AddState("alike", weights.data(), kAlike, DType::kFloat32));
    GT_RETURN_IF_ERROR(run.AddGradient(gradient.data(), gradient.size()));
    GT_RETURN_IF_ERROR(run.AddGradient(of_weights.data(), kAlike));
    for (;;) {
      GT_ASSIGN_OR_RETURN(const StepPlace step, run.Begin());
      if (step.done) return absl::OkStatus();
      for (const int64_t sample : step.samples) {
        for (size_t i = 0; i < kAlike; ++i)
          of_weights[i] += std::sin(static_cast<float>(sample + 1) * static_cast<float>(i + 3));
      }
      GT_ASSIGN_OR_RETURN(const bool apply, run.Reduce(0));
      if (!apply) return absl::InternalError("nobody was lost");
      for (size_t i = 0; i < kAlike; ++i) weights[i] -= 0.3F * of_weights[i];
      GT_RETURN_IF_ERROR(run.Applied());
    }
  };
  std::vector<std::thread> running;
  for (int process = 0; process < kRanks; ++process)
    running.emplace_back([&, process] { ends[static_cast<size_t>(process)] = train(process); });
  for (std::thread& thread : running) thread.join();
  for (int process = 0; process < kRanks; ++process) {
    EXPECT_TRUE(ends[static_cast<size_t>(process)].ok()) << ends[static_cast<size_t>(process)];
    EXPECT_TRUE(alike[static_cast<size_t>(process)] == alike[0]) << process << " has other bits";
  }
  EXPECT_NE(alike[0][7], 1);
}

TEST(ElasticMesh, CompressionIsRefused) {
  setenv("GTRAIN_COMPRESSION", "int8", 1);
  MeshJob job(kTwoByTwo, {});
  for (const Outcome& outcome : job.Run(4, 4)) {
    EXPECT_TRUE(absl::IsFailedPrecondition(outcome.status)) << outcome.status;
    EXPECT_NE(outcome.status.message().find("would not stay alike"), std::string::npos);
  }
  unsetenv("GTRAIN_COMPRESSION");
}

// Its memory has another part: it says so, and ends.
TEST(ElasticMesh, AProcessIsOfItsPartForLife) {
  MeshJob job(kTwoByTwo, {{4, At::kCompute, 1, {2, 0}}});
  job.all_end_with = 0;
  const std::vector<Outcome> outcomes = job.Run(4, 4);
  EXPECT_TRUE(absl::IsUnavailable(outcomes[0].status));
  EXPECT_NE(outcomes[0].status.message().find("holds part 0 of 2"), std::string::npos) << outcomes[0].status;
}

TEST(ElasticMesh, WhatHasNoSenseIsSaid) {
  ThreadJob threads;
  threads.mesh = kTwoByTwo;
  threads.Begin({0, 1});
  auto session = std::make_shared<ThreadSession>(&threads, 0, 0);
  ElasticRun run(session, {.samples = {.samples = 4, .global_batch = 1}});
  float part[4] = {};
  EXPECT_TRUE(
      absl::IsInvalidArgument(ElasticRun::LocalPart(*session, {8}, {.splits = {{0, "dp"}}}).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(ElasticRun::LocalPart(*session, {8}, {.splits = {{0, "xp"}}}).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(run.AddSharded("w", part, 3, {8}, {.splits = {{0, "tp"}}}, DType::kFloat32)));
  EXPECT_TRUE(run.AddSharded("w", part, 4, {8}, {.splits = {{0, "tp"}}}, DType::kFloat32).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(run.Along("tp").status())) << "no step is computed";
}

}  // namespace
}  // namespace gtrain::elastic
