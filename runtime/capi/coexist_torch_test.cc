// The libtorch part of coexist_test.cc. torch/torch.h is heavy and not free of macros: it stays in a file of
// its own.
#include <torch/torch.h>

// Sum of squares of [1..n], by torch.
double TorchSumOfSquares(int n) {
  torch::Tensor x = torch::arange(1, n + 1, torch::kFloat64);
  return x.dot(x).item<double>();
}
