// One rank of bitwise_test.py: a small network trained part by part, whose gradients no order of adding sums
// exactly, with noise from the parts' seeds.
//   e2e_elastic_bitwise DIR STEPS STEP_MS [late | whole]
// DIR/trained.PID has a line for each step whose update this process made: generation, step, ranks.
// DIR/weights.PID has the bytes of the weights at the end. Where there is DIR/fast steps take no time. late:
// a process that is started after the first generation joins once it has taken DIR/come away. whole: the
// program takes the samples of the step.
#include <gtrain/gtrain.h>
#include <poll.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

namespace {

constexpr size_t kInputs = 37, kHidden = 23, kWeights = kInputs * kHidden + kHidden;
constexpr int64_t kBatch = 50;  // of 8 parts some have 7 samples and some 6

struct Arguments {
  std::string folder;
  int64_t steps = 0;
  int pause_ms = 0;
  std::string word;
};

// One hidden layer; the target is a function of the sample's number. Adds to `gradient` and returns the loss.
double Accumulate(int64_t sample, float noise, std::span<const float> w, std::span<float> gradient) {
  float inputs[kInputs], hidden[kHidden];
  for (size_t i = 0; i < kInputs; ++i)
    inputs[i] = std::sin(0.1F * static_cast<float>(sample) * static_cast<float>(i + 1)) + noise;
  float out = 0;
  for (size_t h = 0; h < kHidden; ++h) {
    float sum = 0;
    for (size_t i = 0; i < kInputs; ++i) sum += w[h * kInputs + i] * inputs[i];
    hidden[h] = std::tanh(sum);
    out += w[kInputs * kHidden + h] * hidden[h];
  }
  const float off = out - std::cos(0.1F * static_cast<float>(sample));
  for (size_t h = 0; h < kHidden; ++h) {
    gradient[kInputs * kHidden + h] += off * hidden[h];
    const float back = off * w[kInputs * kHidden + h] * (1 - hidden[h] * hidden[h]);
    for (size_t i = 0; i < kInputs; ++i) gradient[h * kInputs + i] += back * inputs[i];
  }
  return static_cast<double>(off * off);
}

gtrain::Status Network(gtrain::Elastic& run, const Arguments& arguments) {
  auto w = run.Replicated<float>("w", kWeights, [](auto all) {
    for (size_t i = 0; i < all.size(); ++i) all[i] = 0.3F * std::sin(static_cast<float>(3 * i + 1));
  });
  auto& gradients = run.Reduce({kWeights});
  const auto data = run.Samples({.samples = arguments.steps * kBatch, .global_batch = kBatch, .seed = 11});
  const std::string mine = std::to_string(getpid());
  std::ofstream trained(arguments.folder + "/trained." + mine);
  const gtrain::Status status = run.Train(data, [&](gtrain::Step& step) {
    if (arguments.pause_ms > 0 && !std::filesystem::exists(arguments.folder + "/fast"))
      poll(nullptr, 0, arguments.pause_ms);  // stands for a larger model
    const auto update = [&]() noexcept {
      for (size_t i = 0; i < w.size(); ++i) w[i] -= 0.05F * gradients[0][i];
      trained << run.session().generation() << " " << step.number() << " " << run.session().world_size()
              << std::endl;
    };
    if (arguments.word == "whole") {
      double loss = 0;
      for (const int64_t sample : step.samples()) loss += Accumulate(sample, 0, w, gradients[0]);
      return step.Apply(gradients, loss, update);
    }
    for (gtrain::MicroBatch& part : step.parts()) {
      uint64_t random = part.seed();
      double loss = 0;
      for (const int64_t sample : part.samples()) {
        random = random * 6364136223846793005 + 1442695040888963407;
        const float noise = 0.01F * static_cast<float>(random >> 40) / (1 << 24);
        loss += Accumulate(sample, noise, w, gradients[0]);
      }
      gradients.Ready(0);
      part.SetLoss(loss);
    }
    return step.Apply(gradients, update);
  });
  if (status.ok()) {
    std::ofstream out(arguments.folder + "/weights." + mine, std::ios::binary);
    out.write(reinterpret_cast<const char*>(w.data()), static_cast<std::streamsize>(w.size_bytes()));
  }
  return status;
}

// Waits until the test wants one process more.
bool MayJoin(const std::string& folder) {
  if (std::string(getenv("GTRAIN_GENERATION")) == "1") return true;
  for (int looks = 0; looks < 30'000; ++looks) {
    std::error_code gone;
    std::filesystem::rename(folder + "/come", folder + "/came." + std::to_string(getpid()), gone);
    if (!gone) return true;
    poll(nullptr, 0, 10);
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const Arguments arguments{argv[1], std::atoll(argv[2]), std::atoi(argv[3]), argc > 4 ? argv[4] : ""};
  if (arguments.word == "late" && !MayJoin(arguments.folder)) return 3;
  return gtrain::Main(argc, argv, [&](gtrain::Elastic& run) { return Network(run, arguments); });
}
