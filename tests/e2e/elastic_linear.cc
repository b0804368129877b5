// One rank of elastic_test.py as a user writes it: a linear model of two weights, trained by an elastic run.
//   e2e_elastic_linear DIR SAMPLES BATCH STEP_MS [WEIGHTS [MIB [RANKS]]]
// DIR/trained.PID has a line for each step whose update this process made: generation, step, when
// (nanoseconds of the machine's monotonic clock) and its own samples. DIR/weights.PID has the weights at the
// end. STEP_MS: how long a step takes, however many samples this process has in it; with RANKS only where it
// has the share that each of so many ranks has, and else in proportion to its samples, as computing does.
// MIB: of state beside the weights, which no step changes. While DIR/hold is there a process that begins
// writes DIR/held.PID and waits: it takes long to load. The process whose number DIR/leave has ends with code
// 0.
#include <gtrain/gtrain.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

namespace {

struct Arguments {
  std::string folder;
  int64_t samples = 0, batch = 0;
  int pause_ms = 0;
  size_t weights = 2, more_mib = 0;
  int ranks = 0;
};

// How long a step of so many samples takes.
int PauseMs(const Arguments& arguments, size_t samples) {
  if (samples == 0 || arguments.ranks == 0) return samples == 0 ? 0 : arguments.pause_ms;
  const auto share = static_cast<double>(samples) * arguments.ranks / static_cast<double>(arguments.batch);
  return static_cast<int>(std::lround(arguments.pause_ms * share));
}

// Sample i says that 3 x - 2 is y, for an x of its own.
double XOf(int64_t sample) { return std::sin(static_cast<double>(sample)); }

gtrain::Status Linear(gtrain::Elastic& run, const Arguments& arguments) {
  const std::string mine = std::to_string(getpid()), hold = arguments.folder + "/hold";
  if (access(hold.c_str(), F_OK) == 0) std::ofstream(arguments.folder + "/held." + mine);
  while (access(hold.c_str(), F_OK) == 0) poll(nullptr, 0, 5);
  auto w = run.Replicated<float>("w", arguments.weights, [](auto all) { std::ranges::fill(all, 0.F); });
  if (arguments.more_mib > 0)
    run.Replicated<uint8_t>("more", arguments.more_mib << 20, [](auto all) { std::ranges::fill(all, 7); });
  auto& gradients = run.Reduce({arguments.weights});
  const auto data =
      run.Samples({.samples = arguments.samples, .epochs = 2, .global_batch = arguments.batch, .seed = 7});
  std::ofstream trained(arguments.folder + "/trained." + mine);
  const gtrain::Status status = run.Train(data, [&](gtrain::Step& step) {
    for (gtrain::MicroBatch& part : step.parts()) {
      double loss = 0;
      for (const int64_t sample : part.samples()) {
        const double x = XOf(sample), off = w[0] * x + w[1] - (3 * x - 2);
        gradients[0][0] += static_cast<float>(2 * off * x);
        gradients[0][1] += static_cast<float>(2 * off);
        loss += off * off;
      }
      gradients.Ready(0);
      part.SetLoss(loss);
    }
    poll(nullptr, 0, PauseMs(arguments, step.samples().size()));  // stands for a larger model
    pid_t leaves = 0;
    if (std::ifstream(arguments.folder + "/leave") >> leaves && leaves == getpid()) std::_Exit(0);
    std::string samples;
    for (const int64_t sample : step.samples()) samples += " " + std::to_string(sample);
    return step.Apply(gradients, [&]() noexcept {
      for (size_t i = 0; i < w.size(); ++i) w[i] -= 0.3F * gradients[0][i];
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      trained << run.session().generation() << " " << step.number() << " "
              << std::chrono::nanoseconds(now).count() << samples << std::endl;
    });
  });
  if (status.ok()) {
    std::ofstream out(arguments.folder + "/weights." + mine);
    out.precision(9);
    out << w[0] << " " << w[1] << std::endl;
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const Arguments arguments{argv[1],
                            std::atoll(argv[2]),
                            std::atoll(argv[3]),
                            std::atoi(argv[4]),
                            argc > 5 ? static_cast<size_t>(std::atoll(argv[5])) : 2,
                            argc > 6 ? static_cast<size_t>(std::atoll(argv[6])) : 0,
                            argc > 7 ? std::atoi(argv[7]) : 0};
  return gtrain::Main(argc, argv, [&](gtrain::Elastic& run) { return Linear(run, arguments); });
}
