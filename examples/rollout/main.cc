// Rollouts and a learner, the shape of reinforcement learning: workers play, the learner makes the policy of
// what they report, and nobody waits for the slowest one. The policy is a linear one for a cart with a pole,
// learned by the cross-entropy method (Rubinstein 1999): a normal distribution of weights is fitted again and
// again to the best fifth of what was tried.
//
//   rollout [GENERATIONS [SLOW_MS]]    worker 0 takes SLOW_MS longer for each rollout. The last lines of the
//   driver are "worker W: N rollouts" of each, and "mean return R" of the last generation, 500 at most
//
// Weights travel by reference: a worker is told which policy to play and asks that for them when they are
// newer than its own. Two rollouts are under way to each worker, so a slow one has two and no more, and holds
// up nobody: the learner takes whichever comes first.
#include <gtrain/gtrain.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "examples/rollout/cart_pole.h"

namespace {

using Weights = std::array<double, 4>;

constexpr size_t kRollouts = 60, kBest = 12;  // of a generation

struct Distribution {
  int64_t version = 0;
  Weights mean{}, deviation{1, 1, 1, 1};
};

struct Rollout {
  Weights weights{};
  double reward = 0;
};

class Policy {
 public:
  // Nothing when the version is the one that is there: so much less to send.
  std::optional<Distribution> Newer(int64_t version) const {
    return version == now_.version ? std::nullopt : std::optional(now_);
  }
  int64_t Fit(std::vector<Rollout> tried) {
    std::sort(tried.begin(), tried.end(),
              [](const Rollout& a, const Rollout& b) { return a.reward > b.reward; });
    tried.resize(std::min(tried.size(), kBest));
    for (size_t i = 0; i < now_.mean.size(); ++i) {
      double sum = 0, squares = 0;
      for (const Rollout& one : tried) sum += one.weights[i];
      now_.mean[i] = sum / static_cast<double>(tried.size());
      for (const Rollout& one : tried) squares += std::pow(one.weights[i] - now_.mean[i], 2);
      now_.deviation[i] =
          std::sqrt(squares / static_cast<double>(tried.size())) + 0.05;  // it goes on looking
    }
    return ++now_.version;
  }
  void Persist(auto& archive) { archive(now_); }

 private:
  Distribution now_;
};
constexpr auto kPolicy = gtrain::Actor<Policy, gtrain::Ctor<>, gtrain::Methods<&Policy::Newer, &Policy::Fit>>;

class Worker {
 public:
  explicit Worker(int64_t slow_ms) : slow_(slow_ms) {}

  gtrain::Task<Rollout> Play(gtrain::Ref<Policy> policy, int64_t seed) {
    const std::optional<Distribution> newer = co_await policy.Call<&Policy::Newer>(known_.version);
    if (newer) known_ = *newer;
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    Rollout rollout;
    for (size_t i = 0; i < rollout.weights.size(); ++i)
      rollout.weights[i] = std::normal_distribution<double>(known_.mean[i], known_.deviation[i])(random);
    gtrain::examples::CartPole game(static_cast<uint64_t>(seed));
    for (int step = 0; step < gtrain::examples::kCartPoleSteps && !game.over(); ++step, ++rollout.reward) {
      double sum = 0;
      for (size_t i = 0; i < rollout.weights.size(); ++i) sum += rollout.weights[i] * game.state()[i];
      game.Push(sum > 0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(slow_));  // a slower game, say
    co_return rollout;
  }

 private:
  const int64_t slow_;
  Distribution known_{.version = -1};
};
constexpr auto kWorker = gtrain::Actor<Worker, gtrain::Ctor<int64_t>, gtrain::Methods<&Worker::Play>>;

gtrain::Task<> Drive(gtrain::Cluster& cluster, int64_t generations, int64_t slow_ms) {
  auto policy =
      co_await cluster.Spawn<Policy>(gtrain::Spawn("policy").Restarts(1000).Keep(gtrain::Durable::kPeer));
  std::vector<gtrain::Owner<Worker>> workers;
  for (int i = 0; i < cluster.processes(); ++i)
    workers.push_back(
        co_await cluster.Spawn<Worker>(gtrain::Spawn().Restarts(1000), i == 0 ? slow_ms : int64_t{0}));

  // Slot i is of worker i / 2.
  int64_t seed = 0;
  std::vector<gtrain::Future<Rollout>> playing;
  const auto play = [&](size_t slot) { return workers[slot / 2].Call<&Worker::Play>(policy, ++seed); };
  for (size_t slot = 0; slot < 2 * workers.size(); ++slot) playing.push_back(play(slot));
  std::vector<int64_t> rollouts(workers.size());
  double mean = 0;
  for (int64_t generation = 0; generation < generations; ++generation) {
    std::vector<Rollout> tried;
    while (tried.size() < kRollouts) {
      const size_t slot = co_await gtrain::WhenAny(playing);
      const auto rollout = co_await gtrain::Try(std::move(playing[slot]));
      playing[slot] = play(slot);
      if (rollout.ok()) {
        tried.push_back(*rollout);
        ++rollouts[slot / 2];
      } else if (rollout.status().code() != gtrain::StatusCode::kUnavailable) {
        co_await rollout.status();  // the driver ends with it
      }  // else its process was lost, and the next one is played where the worker is made anew
    }
    mean = 0;
    for (const Rollout& one : tried) mean += one.reward / kRollouts;
    std::printf("generation %lld: mean return %.1f\n", static_cast<long long>(generation), mean);
    co_await policy.Call<&Policy::Fit>(tried);
  }
  for (size_t i = 0; i < workers.size(); ++i)
    std::printf("worker %zu: %lld rollouts\n", i, static_cast<long long>(rollouts[i]));
  std::printf("mean return %.1f\n", mean);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t generations = argc > 1 ? std::atoll(argv[1]) : 20;
  const int64_t slow_ms = argc > 2 ? std::atoll(argv[2]) : 0;
  return gtrain::Main(argc, argv,
                      [&](gtrain::Cluster& cluster) { return Drive(cluster, generations, slow_ms); });
}
