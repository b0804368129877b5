// Softmax regression on Fashion-MNIST on whatever ranks there are: kill any, add some, and it trains on.
//
//   fashion_softmax [EPOCHS [DATA_FOLDER]]      the last line of rank 0 is "test accuracy A"
#include <gtrain/gtrain.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "examples/fashion_softmax/softmax.h"

namespace {

using gtrain::examples::Images;
using gtrain::examples::kWeights;

constexpr float kRate = 0.1F;

gtrain::Status Train(gtrain::Elastic& run, int64_t epochs, const Images& train, const Images& test) {
  auto w = run.Replicated<float>("w", kWeights, [](auto all) { std::ranges::fill(all, 0.F); });
  auto& grads = run.Reduce({kWeights});
  const auto data = run.Samples({.samples = train.count(), .epochs = epochs, .global_batch = 48, .seed = 1});
  const gtrain::Status status = run.Train(data, [&](gtrain::Step& step) {
    double loss = 0;
    for (const int64_t i : step.samples()) loss += gtrain::examples::Accumulate(train, i, w, grads[0]);
    grads.Ready(0);
    return step.Apply(grads, loss, [&]() noexcept {
      for (size_t i = 0; i < kWeights; ++i) w[i] -= kRate * grads[0][i];
    });
  });
  if (status.ok() && run.session().rank() == 0)
    std::printf("test accuracy %.4f\n", gtrain::examples::Accuracy(test, w));
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t epochs = argc > 1 ? std::atoll(argv[1]) : 3;
  const std::string folder = argc > 2 ? argv[2] : gtrain::examples::kFashionFolder;
  // Read before Main: a process that comes up beside the others has its data when it joins, and nobody waits.
  const auto train = gtrain::examples::ReadImages(folder, "train"),
             test = gtrain::examples::ReadImages(folder, "t10k");
  if (!train.ok() || !test.ok()) {
    std::fprintf(stderr, "%s\n", (train.ok() ? test : train).status().ToString().c_str());
    return 1;
  }
  return gtrain::Main(argc, argv, [&](gtrain::Elastic& run) { return Train(run, epochs, *train, *test); });
}
