// A language model of characters in plain C++: what the next character is, from the sixteen before it. Their
// embeddings, two hidden layers with ReLU, softmax; gradients by hand.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace gtrain::examples {

inline constexpr size_t kContext = 16, kEmbedding = 24, kHidden = 384, kClasses = 64;

struct Parameter {
  std::string name;
  size_t rows = 0, columns = 0;
  std::optional<int> cut = {};  // the dimension of which each tensor-parallel rank has a part
  size_t count() const { return rows * columns; }
  std::vector<int64_t> shape() const { return {static_cast<int64_t>(rows), static_cast<int64_t>(columns)}; }
};

// All parameters whole, in the order of the forward pass. Weights are [inputs][outputs].
const std::vector<Parameter>& Parameters();

// Which units of the first hidden layer a rank has: `count` of them, a multiple of 16. Its weights are cut
// before the layer along the outputs and behind it along the inputs (Shoeybi et al. 2019, arXiv 1909.08053),
// so that ranks add up what they have twice: the second layer's inputs going forward, and the gradients of
// the embeddings going back.
inline constexpr size_t kHiddenUnit = 16;  // a rank has a multiple of so many
struct HiddenPart {
  size_t begin = 0, count = kHidden;
};
// Adds up over the ranks that have the other parts. An error is the caller's to keep.
using SumParts = std::function<void(std::span<float>)>;

// Not thread-safe: activations are kept from Forward to Backward.
class Model {
 public:
  // The same parameters, whichever parts there are.
  explicit Model(uint64_t seed, HiddenPart part = {});

  const std::vector<Parameter>& parameters() const { return parameters_; }  // of this rank's part

  // The parameters one after the other, the caller's to change between steps.
  std::span<float> values() { return std::span(values_); }

  // A window is kContext classes and the one that follows. Any number of them, perhaps none; memory is made
  // anew when it is quite another one than the last time. Returns the sum of the losses in nats.
  double Forward(std::span<const uint8_t* const> windows, const SumParts& sum = {});

  // Computes the gradients of the last Forward: gradients[i] becomes the sum over its samples. The last
  // layer's are complete first; ready(i) is called for each as soon as it is.
  void Backward(std::span<const std::span<float>> gradients, const std::function<void(size_t)>& ready,
                const SumParts& sum = {});

 private:
  void Fit(size_t samples);
  float* value(size_t index) { return values_.data() + offsets_[index]; }

  const HiddenPart part_;
  std::vector<Parameter> parameters_;
  std::array<size_t, 4> widths_;  // of the inputs and behind each layer
  std::vector<float> values_;
  std::vector<size_t> offsets_;
  // Activations and their gradients are [feature][sample], so that all loops run along the samples. `batch_`
  // is their row length: samples rounded up to whole vectors. Elements beyond the samples are zero in
  // gradients.
  size_t batch_ = 0;
  std::vector<const uint8_t*> windows_;
  std::array<std::vector<float>, 4> layers_;  // inputs, two hidden layers, probabilities
  std::vector<float> gradient_, next_gradient_, turned_;
};

// momentum = factor x momentum + gradient x scale; values -= rate x momentum.
void Descend(std::span<float> values, std::span<float> momentum, std::span<const float> gradient,
             float factor, float scale, float rate);

// Adam (Kingma and Ba 2015, arXiv 1412.6980) with 0.9, 0.999 and 1e-8, and 1-bit Adam (Tang et al. 2021,
// arXiv 2102.02888), which leaves the mean of squares alone where gradients come from a compressed momentum.
// An element whose mean of squares is zero stays: no gradient has reached it, and what comes back for it is
// the error of its neighbours' compression, which 1e-8 would make a step of any size.
struct AdamStep {
  float scale = 1, rate = 0;  // of gradients, of the step
  bool measures = true;       // whether the mean of squares moves
  int64_t steps = 0;          // with this one
  int64_t measured = 0;       // those of them that measured
};
void DescendByAdam(std::span<float> values, std::span<float> momentum, std::span<float> squares,
                   std::span<const float> gradient, const AdamStep& step);

}  // namespace gtrain::examples
