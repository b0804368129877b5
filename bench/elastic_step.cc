// One rank of bench_elastic --only protection: the same training on gtrain::Elastic and by hand, on a session
// and a communicator alone, which nothing protects.
//   elastic_step FILE elastic|hand GRADIENTS MULTIPLY_ADDS STEPS
// GRADIENTS: of float32, as many as there are weights. MULTIPLY_ADDS: of this rank in a step, beside one for
// each gradient. Rank 0 writes into FILE the milliseconds of a step, the mean over all but the first 20, and
// the sum of the weights at the end, which is equal in both.
#include <gtrain/gtrain.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace {

constexpr int64_t kBatch = 128;    // samples of all ranks
constexpr size_t kRow = 16 << 10;  // elements of a sample
constexpr size_t kUncounted = 20;  // steps at the beginning
constexpr float kLearningRate = 0.01F;

struct Arguments {
  std::string file, mode;
  size_t gradients = 0;
  int64_t multiply_adds = 0, steps = 0;
};

// Arithmetic of the size that the arguments say, on memory: not a model of anything.
class Model {
 public:
  explicit Model(const Arguments& arguments)
      : multiply_adds_(arguments.multiply_adds), row_(kRow), sums_(kRow) {
    for (size_t i = 0; i < kRow; ++i) row_[i] = std::sin(static_cast<float>(i));
  }

  // Adds the gradients of these samples and returns the sum of their losses.
  double Compute(std::span<const int64_t> samples, std::span<const float> weights,
                 std::span<float> gradients) {
    for (size_t i = 0; i < kRow; ++i) sums_[i] = weights[i % weights.size()];
    double loss = 0;
    const auto rows = multiply_adds_ / static_cast<int64_t>(kRow), count = std::ssize(samples);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t sample = samples[static_cast<size_t>(row * count / rows)];
      Add(row_, 1e-3F * static_cast<float>(sample % 7 - 3), sums_);
      loss += sums_[0];
    }
    for (size_t at = 0; at < gradients.size(); at += kRow)
      Add(sums_, 1, gradients.subspan(at, std::min(kRow, gradients.size() - at)));
    return loss;
  }

 private:
  static void Add(std::span<const float> from, float factor, std::span<float> to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += factor * from[i];
  }

  const int64_t multiply_adds_;
  std::vector<float> row_, sums_;
};

void Update(std::span<float> weights, std::span<const float> gradients) {
  for (size_t i = 0; i < weights.size(); ++i) weights[i] -= kLearningRate * gradients[i];
}

class Watch {
 public:
  explicit Watch(int64_t steps) { ends_.reserve(static_cast<size_t>(steps)); }

  void EndStep() { ends_.push_back(std::chrono::steady_clock::now()); }

  bool Write(const std::string& path, std::span<const float> weights) const {
    if (ends_.size() <= kUncounted) return false;
    const std::chrono::duration<double, std::milli> counted = ends_.back() - ends_[kUncounted - 1];
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (file == nullptr) return false;
    std::fprintf(file, "%.6f %.17g\n", counted.count() / static_cast<double>(ends_.size() - kUncounted),
                 std::accumulate(weights.begin(), weights.end(), 0.0));
    return std::fclose(file) == 0;
  }

 private:
  std::vector<std::chrono::steady_clock::time_point> ends_;
};

gtrain::Status Written(bool written, const std::string& path) {
  return written ? gtrain::Status() : gtrain::Status(gtrain::StatusCode::kInternal, "cannot write " + path);
}

gtrain::Status Protected(gtrain::Elastic& run, const Arguments& arguments) {
  Model model(arguments);
  Watch watch(arguments.steps);
  std::vector<float> weights(arguments.gradients);
  run.Replicated("weights", std::span(weights));
  auto& gradients = run.Reduce({arguments.gradients});
  const auto data =
      run.Samples({.samples = arguments.steps * kBatch, .global_batch = kBatch, .shuffle = false});
  gtrain::Status status = run.Train(data, [&](gtrain::Step& step) {
    const double loss = model.Compute(step.samples(), weights, gradients[0]);
    gradients.Ready(0);
    return step.Apply(gradients, loss, [&]() noexcept {
      Update(weights, gradients[0]);
      watch.EndStep();
    });
  });
  if (!status.ok() || run.session().rank() != 0) return status;
  return Written(watch.Write(arguments.file, weights), arguments.file);
}

gtrain::Status ByHand(const Arguments& arguments) {
  const auto session = gtrain::Session::Join();
  if (!session.ok()) return session.status();
  auto comm = gtrain::Communicator::Create(*session);
  if (!comm.ok()) return comm.status();
  Model model(arguments);
  Watch watch(arguments.steps);
  std::vector<float> weights(arguments.gradients), gradients(arguments.gradients);
  std::vector<int64_t> samples(static_cast<size_t>(kBatch / comm->size()));
  for (int64_t step = 0; step < arguments.steps; ++step) {
    std::iota(samples.begin(), samples.end(), step * kBatch + comm->rank() * std::ssize(samples));
    std::ranges::fill(gradients, 0.F);
    model.Compute(samples, weights, gradients);
    gtrain::Status status = comm->AllReduce(gradients);
    if (!status.ok()) return status;
    for (float& gradient : gradients) gradient *= 1.F / kBatch;
    Update(weights, gradients);
    watch.EndStep();
  }
  if (comm->rank() != 0) return {};
  return Written(watch.Write(arguments.file, weights), arguments.file);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const Arguments arguments{argv[1], argv[2], static_cast<size_t>(std::atoll(argv[3])), std::atoll(argv[4]),
                            std::atoll(argv[5])};
  if (arguments.mode == "elastic")
    return gtrain::Main(argc, argv, [&](gtrain::Elastic& run) { return Protected(run, arguments); });
  if (arguments.mode != "hand") return 2;
  const gtrain::Status status = ByHand(arguments);
  if (!status.ok()) std::fprintf(stderr, "elastic_step: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : status.exit_code();
}
