// One layer is y = f(W'x + b) with x and y of shape [feature][sample]. Backward, with g = dL/d(W'x + b):
//   dW = x g', which wants g as [sample][feature], so g is turned;  db = sum of g's rows;  dL/dx = W g.
#include "examples/char_lm/model.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "examples/char_lm/matrix.h"

namespace gtrain::examples {
namespace {

enum Index : size_t { kTable, kWeights1, kBias1, kWeights2, kBias2, kWeights3, kBias3 };
constexpr size_t kLayers = 3, kInputs = kContext * kEmbedding, kVector = 16;

// y[to][from] = x[from][to]
void Turn(const float* x, size_t from, size_t to, float* y) {
  for (size_t i = 0; i < to; ++i) {
    for (size_t j = 0; j < from; ++j) y[i * from + j] = x[j * to + i];
  }
}

}  // namespace

const std::vector<Parameter>& Parameters() {
  static const auto* const all = new std::vector<Parameter>{{"embedding", kClasses, kEmbedding},
                                                            {"hidden1/weights", kInputs, kHidden, 1},
                                                            {"hidden1/bias", 1, kHidden, 1},
                                                            {"hidden2/weights", kHidden, kHidden, 0},
                                                            {"hidden2/bias", 1, kHidden},
                                                            {"out/weights", kHidden, kClasses},
                                                            {"out/bias", 1, kClasses}};
  return *all;
}

Model::Model(uint64_t seed, HiddenPart part)
    : part_(part), parameters_(Parameters()), widths_{kInputs, part.count, kHidden, kClasses} {
  size_t total = 0;
  for (Parameter& parameter : parameters_) {
    if (parameter.cut) (*parameter.cut == 0 ? parameter.rows : parameter.columns) = part.count;
    offsets_.push_back(total);
    total += parameter.count();
  }
  values_.resize(total);
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& whole = Parameters()[i];
    if (whole.rows == 1) continue;  // a bias begins with zeros
    // He et al. 2015: what ReLU leaves of a layer's outputs has the variance of its inputs.
    const float deviation = i == kTable ? 1.0f : std::sqrt(2.0f / static_cast<float>(whole.rows));
    std::normal_distribution<float> normal(0, deviation);
    std::vector<float> drawn(whole.count());
    for (float& value : drawn) value = normal(random);
    const size_t row = whole.cut == 0 ? part.begin : 0, column = whole.cut == 1 ? part.begin : 0;
    for (size_t r = 0; r < parameters_[i].rows; ++r) {
      std::copy_n(drawn.data() + (row + r) * whole.columns + column, parameters_[i].columns,
                  value(i) + r * parameters_[i].columns);
    }
  }
}

// As narrow as the samples allow: all loops run along whole rows.
void Model::Fit(size_t samples) {
  const size_t batch = std::max<size_t>(1, (samples + kVector - 1) / kVector) * kVector;
  if (batch == batch_) return;
  batch_ = batch;
  for (size_t layer = 0; layer <= kLayers; ++layer) layers_[layer].assign(widths_[layer] * batch_, 0);
  const size_t widest = std::max({kInputs, kHidden, kClasses}) * batch_;
  for (auto* memory : {&gradient_, &next_gradient_, &turned_}) memory->assign(widest, 0);
}

double Model::Forward(std::span<const uint8_t* const> windows, const SumParts& sum) {
  Fit(windows.size());
  windows_.assign(windows.begin(), windows.end());
  for (size_t s = 0; s < windows.size(); ++s) {
    for (size_t c = 0; c < kContext; ++c) {
      const float* embedding = value(kTable) + windows[s][c] * kEmbedding;
      for (size_t e = 0; e < kEmbedding; ++e) layers_[0][(c * kEmbedding + e) * batch_ + s] = embedding[e];
    }
  }
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const size_t from = widths_[layer], to = widths_[layer + 1];
    float* out = layers_[layer + 1].data();
    const bool sums = layer == 1 && part_.count < kHidden;  // each rank has some of the inputs
    const bool biased = !sums || part_.begin == 0;          // one of them adds the bias
    for (size_t i = 0; i < to; ++i)
      std::fill_n(out + i * batch_, batch_, biased ? value(kBias1 + 2 * layer)[i] : 0);
    MultiplyAdd({value(kWeights1 + 2 * layer), 1, to}, layers_[layer].data(), out, to, from, batch_);
    if (sums) sum(layers_[layer + 1]);
    if (layer + 1 == kLayers) break;
    for (float& y : layers_[layer + 1]) y = std::max(y, 0.0f);
  }
  double loss = 0;
  for (size_t s = 0; s < windows.size(); ++s) {
    float* column = layers_[kLayers].data() + s;  // [class] with a stride of batch_
    float most = column[0];
    for (size_t c = 1; c < kClasses; ++c) most = std::max(most, column[c * batch_]);
    float total = 0;
    for (size_t c = 0; c < kClasses; ++c) total += column[c * batch_] = std::exp(column[c * batch_] - most);
    for (size_t c = 0; c < kClasses; ++c) column[c * batch_] /= total;
    // A loss that was infinite would say less than how many characters the model rules out.
    loss -= std::log(std::max(column[windows[s][kContext] * batch_], 1e-30f));
  }
  return loss;
}

void Model::Backward(std::span<const std::span<float>> gradients, const std::function<void(size_t)>& ready,
                     const SumParts& sum) {
  std::fill(gradient_.begin(), gradient_.end(), 0.0f);
  for (size_t c = 0; c < kClasses; ++c) {
    for (size_t s = 0; s < windows_.size(); ++s) {
      gradient_[c * batch_ + s] =
          layers_[kLayers][c * batch_ + s] - (windows_[s][kContext] == c ? 1.0f : 0.0f);
    }
  }
  for (size_t layer = kLayers; layer-- > 0;) {
    const size_t from = widths_[layer], to = widths_[layer + 1];
    const size_t weights = kWeights1 + 2 * layer, bias = weights + 1;
    for (size_t i = 0; i < to; ++i) {
      float total = 0;
      for (size_t s = 0; s < windows_.size(); ++s) total += gradient_[i * batch_ + s];
      gradients[bias][i] = total;
    }
    ready(bias);
    Turn(gradient_.data(), to, batch_, turned_.data());
    std::fill(gradients[weights].begin(), gradients[weights].end(), 0.0f);
    MultiplyAdd({layers_[layer].data(), batch_, 1}, turned_.data(), gradients[weights].data(), from, batch_,
                to);
    ready(weights);
    std::fill(next_gradient_.begin(), next_gradient_.end(), 0.0f);
    MultiplyAdd({value(weights), to, 1}, gradient_.data(), next_gradient_.data(), from, to, batch_);
    for (size_t i = 0; layer > 0 && i < from * batch_; ++i) {
      next_gradient_[i] = layers_[layer][i] > 0 ? next_gradient_[i] : 0.0f;
    }
    gradient_.swap(next_gradient_);
  }
  if (part_.count < kHidden) sum(std::span(gradient_).first(kInputs * batch_));
  const std::span<float> table = gradients[kTable];
  std::fill(table.begin(), table.end(), 0.0f);
  for (size_t s = 0; s < windows_.size(); ++s) {
    for (size_t c = 0; c < kContext; ++c) {
      float* embedding = table.data() + windows_[s][c] * kEmbedding;
      for (size_t e = 0; e < kEmbedding; ++e) embedding[e] += gradient_[(c * kEmbedding + e) * batch_ + s];
    }
  }
  ready(kTable);
}

void Descend(std::span<float> values, std::span<float> momentum, std::span<const float> gradient,
             float factor, float scale, float rate) {
  for (size_t i = 0; i < values.size(); ++i) {
    momentum[i] = factor * momentum[i] + scale * gradient[i];
    values[i] -= rate * momentum[i];
  }
}

void DescendByAdam(std::span<float> values, std::span<float> momentum, std::span<float> squares,
                   std::span<const float> gradient, const AdamStep& step) {
  constexpr float kBeta1 = 0.9f, kBeta2 = 0.999f, kLeast = 1e-8f;
  const float first = 1 - std::pow(kBeta1, static_cast<float>(step.steps));
  const float second = 1 - std::pow(kBeta2, static_cast<float>(step.measured));
  for (size_t i = 0; i < values.size(); ++i) {
    const float g = step.scale * gradient[i];
    momentum[i] = kBeta1 * momentum[i] + (1 - kBeta1) * g;
    if (step.measures) squares[i] = kBeta2 * squares[i] + (1 - kBeta2) * g * g;
    const float moves = step.rate * (momentum[i] / first) / (std::sqrt(squares[i] / second) + kLeast);
    values[i] -= squares[i] == 0 ? 0 : moves;
  }
}

}  // namespace gtrain::examples
