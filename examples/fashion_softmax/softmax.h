// Softmax regression on Fashion-MNIST: ten classes, one weight for each pixel and class, and a bias for each
// class.
#pragma once
#include <gtrain/status.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "examples/fashion_mnist/idx.h"

namespace gtrain::examples {

inline constexpr size_t kPixels = 28 * 28, kClasses = 10, kWeights = (kPixels + 1) * kClasses;
inline constexpr char kFashionFolder[] = "/usr/share/datasets/fashion-mnist";

struct Images {
  IdxArray pixels, labels;
  int64_t count() const { return labels.dims[0]; }
};

// `part`: "train" or "t10k". Errors say what is wrong with which file.
Result<Images> ReadImages(const std::string& folder, const std::string& part);

// The probability of each class; w has kClasses weights a pixel, then the biases.
std::array<float, kClasses> Predict(const uint8_t* pixels, std::span<const float> w);
// Adds the gradient of one sample to g; the result is its loss.
double Accumulate(const Images& data, int64_t sample, std::span<const float> w, std::span<float> g);
// The share of samples whose class is predicted.
double Accuracy(const Images& data, std::span<const float> w);

}  // namespace gtrain::examples
