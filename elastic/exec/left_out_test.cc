// Elastic runs whose generations end at any time: members wait without a place and come back with what they
// had, and others come while all compute.
#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <numeric>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/test_wait.h"
#include "elastic/exec/run_test_world.h"

namespace gtrain::elastic {
namespace {

constexpr size_t kCount = 64;
constexpr int64_t kBatch = 12;

// Integers of floats that are exact, and the weights are in the gradients: a sample of another step, or one
// that counts twice, leaves other weights.
float Gradient(int64_t sample, int64_t weight, int64_t activation) {
  return static_cast<float>((sample * 7 + weight * 3 + activation) % 101);
}
float Updated(float weight, float mean) {
  return std::fmod(weight + std::round(mean * static_cast<float>(kBatch)), 997.0F);
}
int64_t Activation(const std::vector<float>& weights) {
  return static_cast<int64_t>(std::accumulate(weights.begin(), weights.end(), 0.0));
}
std::vector<float> First() {
  std::vector<float> weights(kCount);
  for (size_t i = 0; i < kCount; ++i) weights[i] = static_cast<float>(i % 13);
  return weights;
}
void Accumulate(int64_t sample, int64_t activation, std::vector<float>* gradient) {
  for (size_t i = 0; i < kCount; ++i) (*gradient)[i] += Gradient(sample, static_cast<int64_t>(i), activation);
}

// What one process would make of it.
std::vector<float> Reference(int64_t steps) {
  std::vector<float> weights = First();
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<float> sum(kCount);
    for (int64_t sample = step * kBatch; sample < (step + 1) * kBatch; ++sample)
      Accumulate(sample, Activation(weights), &sum);
    for (size_t i = 0; i < kCount; ++i) weights[i] = Updated(weights[i], sum[i] / kBatch);
  }
  return weights;
}

struct Process {
  absl::Status status;
  std::vector<float> weights = First();
  int64_t last = 0;  // step that it made
};

// What happens at points of a process's steps.
struct Points {
  std::function<void(int64_t step)> computes = [](int64_t) {}, reduces = computes, applied = computes;
  std::function<absl::Status(ElasticRun&)> together;  // with others, while it computes
  std::function<absl::Status(absl::Span<const Message>)> before_start;
  std::function<absl::Status(int64_t step, size_t count)> after_sum;
  std::function<bool()> dies;  // asked at any point
  std::optional<absl::Duration> timeout;
  int64_t stops_at = -1;
  size_t more = 0;  // floats of state beside the weights
};

absl::Status DiesAt(const Points& points) {
  return points.dies && points.dies() ? absl::CancelledError("the test ends this process") : absl::OkStatus();
}

void SetHooks(const Points& points, const std::atomic<int64_t>& now, ThreadSession* session) {
  session->timeout = points.timeout;
  session->hooks.before_start = points.before_start;
  if (points.after_sum) {
    session->hooks.after_all_reduce = [&](size_t count, DType dtype) {
      return dtype == DType::kFloat64 ? points.after_sum(now, count) : absl::OkStatus();
    };
  }
  if (!points.dies) return;
  session->hooks.before_all_reduce = [&](size_t, DType) { return DiesAt(points); };
  session->hooks.after_all_reduce = session->hooks.before_broadcast = session->hooks.before_all_reduce;
  session->hooks.before_start = [&](absl::Span<const Message>) { return DiesAt(points); };
}

// False: the step is to be begun again.
absl::StatusOr<bool> Compute(const Points& points, ElasticRun& run, const StepPlace& step,
                             const std::vector<float>& weights, std::vector<float>* gradient) {
  GT_RETURN_IF_ERROR(DiesAt(points));
  points.computes(step.step);
  const absl::Status together = points.together ? points.together(run) : absl::OkStatus();
  if (absl::IsUnavailable(together) && run.AwaitLoss()) return false;
  GT_RETURN_IF_ERROR(together);
  for (const int64_t sample : step.samples) Accumulate(sample, Activation(weights), gradient);
  run.Ready(0);
  points.reduces(step.step);
  if (step.step == points.stops_at) run.Stop();
  return run.Reduce(static_cast<double>(step.samples.size()));
}

absl::Status Train(ThreadJob* job, int process, int64_t steps, const Points& points, Process* out) {
  auto session = std::make_shared<ThreadSession>(job, process, 0);
  if (session->generation() == 0) return absl::UnavailableError("there is no place");
  std::atomic<int64_t> now{0};
  SetHooks(points, now, session.get());
  std::vector<float> gradient(kCount), more(points.more, static_cast<float>(process));
  ElasticRun run(session, {.samples = {.samples = steps * kBatch, .global_batch = kBatch, .shuffle = false}});
  GT_RETURN_IF_ERROR(run.AddState("w", out->weights.data(), kCount, DType::kFloat32));
  if (points.more > 0) GT_RETURN_IF_ERROR(run.AddState("m", more.data(), more.size(), DType::kFloat32));
  GT_RETURN_IF_ERROR(run.AddGradient(gradient.data(), kCount));
  for (;;) {
    GT_ASSIGN_OR_RETURN(const StepPlace step, run.Begin());
    if (step.done) return absl::OkStatus();
    now = step.step;
    GT_ASSIGN_OR_RETURN(const bool apply, Compute(points, run, step, out->weights, &gradient));
    if (!apply) continue;
    GT_RETURN_IF_ERROR(DiesAt(points));
    EXPECT_EQ(run.loss().value_or(1), 1) << "each sample's loss counts once, step " << step.step;
    for (size_t i = 0; i < kCount; ++i) out->weights[i] = Updated(out->weights[i], gradient[i]);
    out->last = step.step;
    GT_RETURN_IF_ERROR(run.Applied());
    points.applied(step.step);
    GT_RETURN_IF_ERROR(DiesAt(points));
  }
}

// All processes, of which the first `ranks` begin.
std::vector<Process> RunAll(ThreadJob* job, int ranks, int64_t steps, const std::vector<Points>& points) {
  job->waits = true;
  std::vector<int> first(static_cast<size_t>(ranks));
  std::iota(first.begin(), first.end(), 0);
  job->Begin(first);
  std::vector<Process> all(points.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < points.size(); ++i) {
    threads.emplace_back([&, i] {
      all[i].status = Train(job, static_cast<int>(i), steps, points[i], &all[i]);
      job->End();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return all;
}

// A former member that waited without a place, in the middle of its step, comes back while the others compute
// a later one.
TEST(ElasticLeftOut, WhoWaitedReducesNothingThatItOnceComputed) {
  ThreadJob job;
  std::vector<Points> points(2);
  points[0].reduces = [&](int64_t step) {
    EXPECT_TRUE(step != 4 || Until([&] { return job.generations() >= 2; }));
  };
  points[1].reduces = [&](int64_t step) {
    if (step == 4 && job.generations() == 1) job.Begin({1});
    if (step == 7 && job.generations() == 2) job.Begin({1, 0});
  };
  for (const Process& process : RunAll(&job, 2, 12, points)) {
    EXPECT_TRUE(process.status.ok()) << process.status;
    EXPECT_EQ(process.weights, Reference(12));
  }
}

// Ranks that are asked to end their generation behind a step, and by whom each of their steps was computed.
struct PausedJob {
  ThreadJob job;
  std::vector<Points> points = std::vector<Points>(3);
  std::array<std::array<std::atomic<size_t>, 20>, 2> began = {}, times = {};  // of process and step

  PausedJob() {
    for (size_t process = 0; process < 2; ++process) {
      points[process].timeout = absl::Seconds(30);
      points[process].computes = [this, process](int64_t step) {
        began[process][static_cast<size_t>(step)] = job.generations();
        ++times[process][static_cast<size_t>(step)];
        if (process == 1 && step == 4 && job.generations() == 1) job.pause = true;
      };
      points[process].reduces = [this](int64_t step) {  // all have heard of it before the sum
        EXPECT_TRUE(step != 4 || Until([&] { return job.pause || job.generations() > 1; }));
      };
    }
    points[2].timeout = absl::Seconds(30);
  }
  void ExpectWhole(const std::vector<Process>& all, size_t processes) {
    for (size_t process = 0; process < processes; ++process) {
      EXPECT_TRUE(all[process].status.ok()) << all[process].status;
      EXPECT_EQ(all[process].weights, Reference(12)) << process;
    }
    for (const auto& of_one : times) {
      for (size_t step = 1; step <= 12; ++step) EXPECT_EQ(of_one[step], 1) << "step " << step;
    }
  }
};

// Others come between two steps: nothing is interrupted, and the new generation has all of the next step for
// what it hands over.
TEST(ElasticLeftOut, WhoIsAskedToPauseEndsItsGenerationBehindAStep) {
  PausedJob paused;
  paused.job.paused = [&] { paused.job.Begin({0, 1, 2}); };
  paused.ExpectWhole(RunAll(&paused.job, 2, 12, paused.points), 3);
  for (const auto& began : paused.began) {
    EXPECT_EQ(began[4], 1);
    EXPECT_EQ(began[5], 2);
  }
}

// Nobody comes: they go on in their generation after a moment, and may be asked again.
TEST(ElasticLeftOut, WhoPausesInVainGoesOn) {
  PausedJob paused;
  paused.points.resize(2);
  int pauses = 0;
  paused.job.paused = [&] { ++pauses; };
  paused.ExpectWhole(RunAll(&paused.job, 2, 12, paused.points), 2);
  EXPECT_EQ(pauses, 1);
  EXPECT_EQ(paused.job.goes_on, 2) << "when its generation began, and when the pause was over";
  EXPECT_EQ(paused.job.generations(), 1);
}

// A stop that one rank did not hear of; who heard of it waits, and brings it back.
TEST(ElasticLeftOut, AStopThatComesBackEndsAllBehindOneStep) {
  ThreadJob job;
  std::vector<Points> points(2);
  points[0].timeout = points[1].timeout = absl::Seconds(30);
  points[0].stops_at = 4;
  points[1].after_sum = [&](int64_t step, size_t count) -> absl::Status {
    if (count != ElasticRun::kLosses || step != 4 || job.generations() > 1) return absl::OkStatus();
    job.Begin({1});
    return absl::UnavailableError("the test ends this generation");
  };
  points[1].reduces = [&](int64_t step) {
    if (step == 7 && job.generations() == 2) job.Begin({1, 0});
  };
  const std::vector<Process> all = RunAll(&job, 2, 12, points);
  for (const Process& process : all) EXPECT_TRUE(process.status.ok()) << process.status;
  EXPECT_EQ(all[1].last, 6);
  EXPECT_EQ(all[0].weights, all[1].weights);
}

// Ranks that have met along an axis cannot go on with somebody who has yet to ask for it.
TEST(ElasticLeftOut, WhoMeetsAlongAnAxisComputesAgainWithThoseThatAreNew) {
  for (const char* axis : {"tp", "dp"}) {
    SCOPED_TRACE(axis);
    ThreadJob job;
    std::vector<Points> points(3);
    for (Points& one : points) {
      one.timeout = absl::Seconds(30);
      one.together = [axis](ElasticRun& run) -> absl::Status {
        GT_ASSIGN_OR_RETURN(const std::shared_ptr<Communicator> comm, run.Along(axis));
        double ones = 1;
        return comm->AllReduce(&ones, 1, DType::kFloat64, ReduceOp::kSum);
      };
    }
    std::atomic<bool> computed{false};
    points[0].reduces = [&](int64_t step) {
      if (step != 4 || job.generations() > 1) return;
      EXPECT_TRUE(Until([&] { return computed.load(); }));
      job.Begin({0, 1, 2});
    };
    points[1].reduces = [&](int64_t step) {
      if (step != 4) return;
      computed = true;
      EXPECT_TRUE(Until([&] { return job.generations() == 2; }));
    };
    for (const Process& process : RunAll(&job, 2, 8, points)) {
      EXPECT_TRUE(process.status.ok()) << process.status;
      EXPECT_EQ(process.weights, Reference(8));
    }
  }
}

// Twelve pieces, each of which takes a quarter of the longest that a collective may wait.
TEST(ElasticLeftOut, AStateMayComeForLongerThanACollectiveMayTake) {
  ThreadJob job;
  std::vector<Points> points(3);
  for (Points& one : points) {
    one.timeout = absl::Seconds(1);
    one.more = 12 << 20;
    one.before_start = [](absl::Span<const Message> messages) {
      Notification never;
      if (messages[0].kind == Message::Kind::kSend) never.WaitFor(absl::Milliseconds(250));
      return absl::OkStatus();
    };
  }
  points[0].applied = [&](int64_t step) {
    if (step == 3) job.Begin({0, 1, 2});
  };
  for (const Process& process : RunAll(&job, 2, 8, points))
    EXPECT_TRUE(process.status.ok()) << process.status;
}

// Members that wait and come back, and others that are lost at any point or come, at random times.
class RandomJob {
 public:
  explicit RandomJob(uint64_t seed) : rng_(seed) { job_.waits = true; }

  void Run() {
    for (uint64_t i = 0; i < 2 + rng_.Below(3); ++i) now_.push_back(Start());
    job_.Begin(now_);
    while (newest_ < kNoMore && all_.size() < kProcesses - 2) Next();
    no_more_ = true;
    for (const int process : now_)
      EXPECT_TRUE(Until([&] { return all_[static_cast<size_t>(process)].over.load(); })) << process;
    job_.End();
    for (One& one : all_) one.thread.join();
    const std::vector<float> wanted = Reference(kSteps);
    for (const int process : now_) {
      const Process& one = all_[static_cast<size_t>(process)].process;
      EXPECT_TRUE(one.status.ok()) << process << ": " << one.status;
      EXPECT_EQ(one.weights, wanted) << process;
    }
  }

 private:
  static constexpr int64_t kSteps = 40, kNoMore = 30;
  static constexpr size_t kProcesses = 40;
  struct One {
    Process process;
    Points points;
    std::atomic<bool> dies{false}, over{false};
    std::thread thread;
  };

  void Pause(uint64_t microseconds) const {
    Notification never;
    never.WaitFor(absl::Microseconds(microseconds));
  }

  int Start() {
    const int process = static_cast<int>(all_.size());
    One& one = all_.emplace_back();
    one.points.timeout = absl::Seconds(30);
    one.points.dies = [&one] { return one.dies.load(); };
    one.points.computes = [this, time = 1 + rng_.Below(2500)](int64_t step) {
      for (int64_t was = newest_; was < step && !newest_.compare_exchange_weak(was, step);) continue;
      // Nobody ends its training while generations come: one of members that are done could not begin.
      EXPECT_TRUE(step < kNoMore || Until([&] { return no_more_.load(); }));
      Pause(time);
    };
    one.thread = std::thread([this, process, &one] {
      one.process.status = Train(&job_, process, kSteps, one.points, &one.process);
      one.over = true;
    });
    return process;
  }

  // Ends this generation and begins another, in which each has its place anew. Process 0 is always there.
  void Next() {
    Pause(500 + rng_.Below(12'000));
    std::vector<int> next = now_, back;
    std::swap(back, waiting_);
    for (size_t i = 1; i < next.size();) {
      const bool leaves = rng_.Below(4) == 0, dies = !leaves && rng_.Below(6) == 0;
      if (dies) all_[static_cast<size_t>(next[i])].dies = true, job_.Gone(next[i]);
      if (leaves) waiting_.push_back(next[i]);
      if (!leaves && !dies) {
        ++i;
        continue;
      }
      next.erase(next.begin() + static_cast<std::ptrdiff_t>(i));
    }
    next.insert(next.end(), back.begin(), back.end());
    for (uint64_t come = next.size() < 6 ? rng_.Below(3) : 0; come > 0; --come) next.push_back(Start());
    const int64_t before = newest_;
    now_ = next;
    std::rotate(next.begin(), next.begin() + static_cast<std::ptrdiff_t>(rng_.Below(next.size())),
                next.end());
    job_.Begin(next);
    const bool makes_a_step = rng_.Below(4) > 0;  // as mostly
    EXPECT_TRUE(!makes_a_step || Until([&] { return newest_ > before || newest_ >= kNoMore; }));
  }

  Rng rng_;
  ThreadJob job_;
  std::deque<One> all_;
  std::vector<int> now_, waiting_;
  std::atomic<int64_t> newest_{0};
  std::atomic<bool> no_more_{false};
};

TEST(ElasticLeftOut, GenerationsThatEndAtAnyTimeTrainEachSampleOnce) {
  for (uint64_t seed = 1; seed <= 20 && !HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    RandomJob(seed).Run();
  }
}

}  // namespace
}  // namespace gtrain::elastic
