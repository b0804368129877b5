// Softmax regression on Fashion-MNIST on whatever ranks there are: kill any, add some, and it trains on.
//
//   fashion_softmax [EPOCHS [DATA_FOLDER]]      the last line of rank 0 is "test accuracy A"
#include <gtrain/gtrain.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

#include "examples/fashion_mnist/idx.h"

namespace {

constexpr size_t kPixels = 28 * 28, kClasses = 10, kWeights = (kPixels + 1) * kClasses;
constexpr float kRate = 0.1F;

struct Images {
  gtrain::examples::IdxArray pixels, labels;
  int64_t count() const { return labels.dims[0]; }
};

gtrain::Result<Images> Read(const std::string& folder, const std::string& part) {
  auto pixels = gtrain::examples::ReadIdxGz(folder + "/" + part + "-images-idx3-ubyte.gz", 3);
  if (!pixels.ok()) return pixels.status();
  auto labels = gtrain::examples::ReadIdxGz(folder + "/" + part + "-labels-idx1-ubyte.gz", 1);
  if (!labels.ok()) return labels.status();
  return Images{*std::move(pixels), *std::move(labels)};
}

// The probability of each class; w has kClasses weights a pixel, then the biases.
std::array<float, kClasses> Predict(const uint8_t* pixels, std::span<const float> w) {
  std::array<float, kClasses> p{};
  std::copy_n(w.end() - kClasses, kClasses, p.begin());
  for (size_t i = 0; i < kPixels; ++i) {
    for (size_t c = 0; c < kClasses; ++c) p[c] += w[i * kClasses + c] * static_cast<float>(pixels[i]) / 255;
  }
  const float most = *std::ranges::max_element(p);
  float sum = 0;
  for (float& x : p) sum += x = std::exp(x - most);
  for (float& x : p) x /= sum;
  return p;
}

// Adds the gradient of one sample to g; the result is its loss.
double Accumulate(const Images& data, int64_t sample, std::span<const float> w, std::span<float> g) {
  const uint8_t* pixels = data.pixels.data.data() + static_cast<size_t>(sample) * kPixels;
  const size_t label = data.labels.data[static_cast<size_t>(sample)];
  std::array<float, kClasses> p = Predict(pixels, w);
  const double loss = -std::log(std::max(p[label], 1e-9F));
  p[label] -= 1;
  for (size_t i = 0; i < kPixels; ++i) {
    for (size_t c = 0; c < kClasses && pixels[i] != 0; ++c)
      g[i * kClasses + c] += p[c] * static_cast<float>(pixels[i]) / 255;
  }
  for (size_t c = 0; c < kClasses; ++c) g[kPixels * kClasses + c] += p[c];
  return loss;
}

double Accuracy(const Images& data, std::span<const float> w) {
  int64_t right = 0;
  for (int64_t i = 0; i < data.count(); ++i) {
    const auto p = Predict(data.pixels.data.data() + static_cast<size_t>(i) * kPixels, w);
    right += std::ranges::max_element(p) - p.begin() == data.labels.data[static_cast<size_t>(i)] ? 1 : 0;
  }
  return static_cast<double>(right) / static_cast<double>(data.count());
}

gtrain::Status Train(gtrain::Elastic& run, int64_t epochs, const Images& train, const Images& test) {
  auto w = run.Replicated<float>("w", kWeights, [](auto all) { std::ranges::fill(all, 0.F); });
  auto& grads = run.Reduce({kWeights});
  const auto data = run.Samples({.samples = train.count(), .epochs = epochs, .global_batch = 48, .seed = 1});
  const gtrain::Status status = run.Train(data, [&](gtrain::Step& step) {
    double loss = 0;
    for (const int64_t i : step.samples()) loss += Accumulate(train, i, w, grads[0]);
    grads.Ready(0);
    return step.Apply(grads, loss, [&]() noexcept {
      for (size_t i = 0; i < kWeights; ++i) w[i] -= kRate * grads[0][i];
    });
  });
  if (status.ok() && run.session().rank() == 0) std::printf("test accuracy %.4f\n", Accuracy(test, w));
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t epochs = argc > 1 ? std::atoll(argv[1]) : 3;
  const std::string folder = argc > 2 ? argv[2] : "/usr/share/datasets/fashion-mnist";
  // Read before Main: a process that comes up beside the others has its data when it joins, and nobody waits.
  const auto train = Read(folder, "train"), test = Read(folder, "t10k");
  if (!train.ok() || !test.ok()) {
    std::fprintf(stderr, "%s\n", (train.ok() ? test : train).status().ToString().c_str());
    return 1;
  }
  return gtrain::Main(argc, argv, [&](gtrain::Elastic& run) { return Train(run, epochs, *train, *test); });
}
