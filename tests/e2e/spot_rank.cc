// One rank of spot_test.py: trains a vector with an elastic run, where computing is emulated by sleeping as
// long as the rank's share of the batch takes.
//   e2e_spot_rank DIR SAMPLES BATCH SAMPLE_US
// DIR/rank.PID has a line for each step whose update this process made: generation, rank, ranks, step, epoch,
// the samples of the batch, the first of the share and how many it has, when (nanoseconds of the machine's
// monotonic clock). Samples are their positions: they are not shuffled.
#include <gtrain/gtrain.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

namespace {

constexpr size_t kWeights = 1000;

gtrain::Status Train(gtrain::Elastic& run, char** words) {
  auto w = run.Replicated<float>("w", kWeights, [](auto all) { std::ranges::fill(all, 0.F); });
  auto& gradients = run.Reduce({kWeights});
  const auto data = run.Samples({.samples = std::atoll(words[2]),
                                 .epochs = 1000,
                                 .global_batch = std::atoll(words[3]),
                                 .shuffle = false});
  const int64_t sample_us = std::atoll(words[4]);
  const char* node = std::getenv("GTRAIN_NODE");
  std::ofstream out(std::string(words[1]) + "/rank." + std::to_string(getpid()));
  out << "node " << (node == nullptr ? "?" : node) << std::endl;
  return run.Train(data, [&](gtrain::Step& step) {
    // Those under which the share was computed: an update may be made behind the end of the generation.
    const auto generation = run.session().generation();
    const int rank = run.session().rank(), ranks = run.session().world_size();
    const auto share = static_cast<int64_t>(step.samples().size());
    std::ranges::fill(gradients[0], static_cast<float>(share));
    poll(nullptr, 0, static_cast<int>(share * sample_us / 1000));  // stands for computing
    gradients.Ready(0);
    return step.Apply(gradients, 0, [&]() noexcept {
      for (float& weight : w) weight += 1;
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      out << generation << " " << rank << " " << ranks << " " << step.number() << " " << step.epoch() << " "
          << step.batch() << " " << (share > 0 ? step.samples().front() : -1) << " " << share << " "
          << std::chrono::nanoseconds(now).count() << std::endl;
    });
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  return gtrain::Main(argc, argv, [&](gtrain::Elastic& run) { return Train(run, argv); });
}
