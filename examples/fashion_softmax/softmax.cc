#include "examples/fashion_softmax/softmax.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace gtrain::examples {

Result<Images> ReadImages(const std::string& folder, const std::string& part) {
  auto pixels = ReadIdxGz(folder + "/" + part + "-images-idx3-ubyte.gz", 3);
  if (!pixels.ok()) return pixels.status();
  auto labels = ReadIdxGz(folder + "/" + part + "-labels-idx1-ubyte.gz", 1);
  if (!labels.ok()) return labels.status();
  return Images{*std::move(pixels), *std::move(labels)};
}

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

}  // namespace gtrain::examples
