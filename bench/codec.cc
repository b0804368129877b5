// bench_codec: compressing a gradient of 25.6 M floats on one thread, error feedback with the pending
// residual of the transaction included, beside memcpy of the same bytes and what a torch user writes. Then
// what the codecs decode at, and how many elements top-k selects when the gradient changes from step to step.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "comm/codec/compressor.h"

namespace gtrain::bench {
namespace {

constexpr size_t kCount = 25'600'000;
constexpr const char* kPython = "/usr/bin/python3";  // Debian's, which has Debian's torch

double Milliseconds(absl::Duration took) { return absl::ToDoubleMilliseconds(took); }

// Heavy tails, as gradients have; the same distribution as codec_torch.py's.
std::vector<float> HeavyTailed(uint64_t seed) {
  Rng bits(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(kCount);
  for (float& value : values) value = 1e-2f * normal(bits) * std::fabs(normal(bits));
  return values;
}

// Gradients that change from step to step like those of a training, as far as a codec that learns a threshold
// from earlier steps notices: layers whose scales span two decades, a part that stays beside the noise of a
// batch, and a norm that is never that of the step before, with a batch now and then that is unlike the
// others.
std::vector<std::vector<float>> Gradients() {
  constexpr size_t kLayers = 50;
  constexpr std::array kNorms = {1.0f, 1.1f, 0.93f, 1.05f, 1.6f, 0.88f};
  constexpr float kStays = 0.5f;
  const std::vector<float> stays = HeavyTailed(1), noise = HeavyTailed(2);
  std::array<float, kLayers> scales;
  Rng rng(3);
  for (float& scale : scales) scale = static_cast<float>(std::pow(10, 2 * rng.Unit() - 1.5));
  std::vector<std::vector<float>> gradients(kNorms.size(), std::vector<float>(kCount));
  for (size_t step = 0; step < kNorms.size(); ++step) {
    const size_t other = rng.Below(kCount);  // another part of the noise each step
    for (size_t i = 0; i < kCount; ++i) {
      const float fresh = noise[i + other < kCount ? i + other : i + other - kCount];
      gradients[step][i] = kNorms[step] * scales[i / (kCount / kLayers)] * (kStays * stays[i] + fresh);
    }
  }
  return gradients;
}

struct Data {
  std::vector<std::vector<float>> gradients = Gradients();
  std::vector<float> copy = std::vector<float>(kCount);
  std::vector<uint8_t> packet;
  RealClock clock;
};

// Encodes and applies `steps` steps; the median time of one, in ms.
class Subject {
 public:
  static absl::StatusOr<std::shared_ptr<Subject>> Make(Data* data, const CompressionOptions& options) {
    auto subject = std::make_shared<Subject>();
    subject->data_ = data;
    GT_ASSIGN_OR_RETURN(subject->compressor_, Compressor::Create(options, kCount));
    data->packet.resize(std::max(data->packet.size(), subject->compressor_->MaxBytes()));
    return subject;
  }
  absl::StatusOr<double> Encode(int steps) {
    Series times;
    for (int i = 0; i < steps; ++i) {
      const Instant begin = data_->clock.Now();
      GT_ASSIGN_OR_RETURN(bytes_, compressor_->Encode(data_->gradients[step_++ % data_->gradients.size()],
                                                      absl::MakeSpan(data_->packet)));
      if (compressor_->options().error_feedback) GT_RETURN_IF_ERROR(compressor_->Apply());
      times.samples.push_back(Milliseconds(data_->clock.Now() - begin));
    }
    return times.Median();
  }
  // Milliseconds to decode the packet encoded last.
  absl::StatusOr<double> DecodeAdd() {
    GT_RETURN_IF_ERROR(Encode(1).status());
    const Instant begin = data_->clock.Now();
    GT_RETURN_IF_ERROR(gtrain::Decode(absl::MakeConstSpan(data_->packet).first(bytes_),
                                      absl::MakeSpan(data_->copy), DecodeMode::kAdd));
    return Milliseconds(data_->clock.Now() - begin);
  }
  size_t bytes() const { return bytes_; }

 private:
  Data* data_ = nullptr;
  std::unique_ptr<Compressor> compressor_;
  size_t bytes_ = 0;
  size_t step_ = 0;
};

absl::StatusOr<double> Memcpy(Data* data) {
  Series times;
  for (int i = 0; i < 3; ++i) {
    const Instant begin = data->clock.Now();
    std::memcpy(data->copy.data(), data->gradients[0].data(), kCount * sizeof(float));
    times.samples.push_back(Milliseconds(data->clock.Now() - begin));
  }
  return times.Median();
}

absl::StatusOr<double> Torch(const Options& options, const std::string& file, const std::string& kernel) {
  // Its temporaries keep their pages from step to step, as our buffers do and those of a training program
  // with a caching allocator: a fresh page for each would cost it more than the work.
  GT_RETURN_IF_ERROR(
      Run({"/usr/bin/env", "MALLOC_MMAP_THRESHOLD_=8000000000", "MALLOC_TRIM_THRESHOLD_=16000000000",
           "MALLOC_TOP_PAD_=1000000000", kPython, absl::StrCat(options.folder, "/../bench/codec_torch.py"),
           file, kernel, absl::StrCat(kCount), "3"},
          absl::Minutes(2)));
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(file, 100));
  double seconds = 0;
  if (!absl::SimpleAtod(text, &seconds))
    return absl::InternalError(absl::StrCat("\"", text, "\" is no time"));
  return seconds * 1000;
}

// Steps before the first measured one: pages are there, and residuals, which grow from zero, do so slowly, as
// in all but the first steps of a training; while they double, too much is taken and put back every time.
constexpr int kSettle = 40;
constexpr ResidualType kHalf = ResidualType::kBFloat16;

struct Row {
  const char* name;
  CompressionOptions options;
  std::vector<std::pair<const char*, const char*>> torch;  // what it is, its kernel
};

const std::vector<Row>& Rows() {
  static const std::vector<Row> rows = {
      {"top-k 0.1 %, error feedback",
       {.codec = Codec::kTopK, .density = 0.001},
       {{"torch, sampled threshold", "sampled"}, {"torch.topk", "topk"}}},
      {"top-k 0.1 %, bf16 residual", {.codec = Codec::kTopK, .residual = kHalf, .density = 0.001}, {}},
      {"top-k 0.1 % exact", {.codec = Codec::kTopK, .density = 0.001, .exact = true}, {}},
      {"top-k 0.1 % exact, bf16 residual",
       {.codec = Codec::kTopK, .residual = kHalf, .density = 0.001, .exact = true},
       {}},
      {"top-k 1 %, error feedback", {.codec = Codec::kTopK, .density = 0.01}, {}},
      {"top-k 1 %, bf16 residual", {.codec = Codec::kTopK, .residual = kHalf, .density = 0.01}, {}},
      {"DGC 0.1 %", {.codec = Codec::kTopK, .density = 0.001, .momentum = 0.9f}, {}},
      {"DGC 0.1 %, bf16 residuals",
       {.codec = Codec::kTopK, .residual = kHalf, .density = 0.001, .momentum = 0.9f},
       {}},
      {"1-bit, error feedback", {.codec = Codec::kOneBit}, {{"torch, sign and residual", "sign"}}},
      {"1-bit, bf16 residual", {.codec = Codec::kOneBit, .residual = kHalf}, {}},
      {"int8, error feedback", {.codec = Codec::kInt8}, {}},
      {"int8, bf16 residual", {.codec = Codec::kInt8, .residual = kHalf}, {}},
      {"fp8, error feedback", {.codec = Codec::kFloat8}, {}},
      {"fp8, bf16 residual", {.codec = Codec::kFloat8, .residual = kHalf}, {}},
      {"fp16", {.codec = Codec::kFloat16, .error_feedback = false}, {{"torch, half()", "half"}}},
      {"bf16", {.codec = Codec::kBFloat16, .error_feedback = false}, {}},
  };
  return rows;
}

// The controller at work: the first steps find the threshold, after those the count must be near k.
absl::Status PrintSelected(Data* data, double density) {
  GT_ASSIGN_OR_RETURN(const auto subject, Subject::Make(data, {.codec = Codec::kTopK, .density = density}));
  constexpr int kSteps = 40, kFirst = 5;
  const double k = density * static_cast<double>(kCount);
  double least = 1e9, most = 0;
  for (int step = 0; step < kSteps; ++step) {
    GT_RETURN_IF_ERROR(subject->Encode(1).status());
    if (step < kFirst) continue;
    const double share = static_cast<double>(subject->bytes()) / 8 / k;  // 8 bytes an element, and a header
    least = std::min(least, share);
    most = std::max(most, share);
  }
  std::printf("top-k %g %%: steps %d to %d sent %.3f to %.3f of k\n", density * 100, kFirst + 1, kSteps,
              least, most);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Outcome>> MeasureAll(const Options& options, Data* data, const std::string& file) {
  bool torch = !options.quick && Executable(kPython);
  if (torch && !Run({kPython, "-c", "import torch"}).ok()) {
    std::fprintf(stderr, "bench_codec: without torch: %s has none\n", kPython);
    torch = false;
  }
  std::vector<Outcome> outcomes;
  for (const Row& row : Rows()) {
    GT_ASSIGN_OR_RETURN(const auto subject, Subject::Make(data, row.options));
    GT_RETURN_IF_ERROR(subject->Encode(kSettle).status());
    Comparison comparison{
        row.name, "ms", [&] { return subject->Encode(3); }, {{"memcpy", [&] { return Memcpy(data); }}}};
    if (torch) {
      for (const auto& [name, kernel] : row.torch)
        comparison.peers.push_back({name, [&, kernel = kernel] { return Torch(options, file, kernel); }});
    }
    GT_ASSIGN_OR_RETURN(std::vector<Outcome> measured, Measure(comparison, options.quick ? 3 : 7));
    outcomes.insert(outcomes.end(), measured.begin(), measured.end());
    Comparison decode{
        absl::StrCat(row.name, ": decode and add"), "ms", [&] { return subject->DecodeAdd(); }, {}};
    GT_ASSIGN_OR_RETURN(measured, Measure(decode, options.quick ? 3 : 7));
    outcomes.insert(outcomes.end(), measured.begin(), measured.end());
  }
  return outcomes;
}

int Main(int argc, char** argv) {
  const Options options = ParseOptions(argc, argv);
  cpu_set_t last;  // ours, memcpy and torch (which inherits it) on one CPU
  CPU_ZERO(&last);
  CPU_SET(static_cast<size_t>(sysconf(_SC_NPROCESSORS_ONLN) - 1), &last);
  sched_setaffinity(0, sizeof(last), &last);
  Home home;
  absl::Status status = home.Make();
  Data data;
  std::vector<Outcome> outcomes;
  if (status.ok()) {
    auto measured = MeasureAll(options, &data, absl::StrCat(home.path(), "/seconds"));
    status = measured.status();
    if (measured.ok()) outcomes = *std::move(measured);
  }
  for (double density : {0.001, 0.01}) {
    if (status.ok()) status = PrintSelected(&data, density);
  }
  home.Remove();
  if (!status.ok()) {
    std::fprintf(stderr, "bench_codec: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return Report(options, "codec", outcomes);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(argc, argv); }
