// Trains a small convolutional network on Fashion-MNIST, data-parallel over whatever ranks a gtrain job has.
//
// The whole recipe of a program of libtorch on gtrain::Elastic:
//   1. load the data and make the network, before the ranks meet;
//   2. register what all ranks hold alike: parameters, momentum;
//   3. every step: this rank's samples, their gradients, which leave while backward goes on, and one update
//      that is the same everywhere. Who comes and goes between two steps, or within one, is no business of
//      the program, nor are checkpoints and stops.
// Parameters and momentum live in flat buffers, so that the optimiser is a few vector operations; backward
// writes into the gradients' memory. The mean is over the samples of the whole batch, which is why the result
// does not depend on the number of ranks beyond rounding. --compress sends less of the gradients: what a step
// did not send is carried over to the next one, and saved with the model.
#include <gtrain/gtrain.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "examples/fashion_mnist/idx.h"

namespace gtrain::examples {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr double kMomentum = 0.9;
constexpr int kWarmupSteps = 150;   // of compression
constexpr ptrdiff_t kFirstFew = 5;  // steps in which top-k finds its threshold

struct Flags {
  int64_t epochs = 3;
  int64_t batch = 64;
  double lr = 0.04;
  std::string data = "/usr/share/datasets/fashion-mnist";
  int64_t seed = 1;
  double min_accuracy = 0;
  std::string trace;
  CompressionOptions compress;
};

constexpr char kUsage[] =
    "usage: fashion_mnist [--epochs N] [--batch N] [--lr X] [--data DIR] [--seed N] [--min-accuracy X]\n"
    "                     [--trace DIR]\n"
    "                     [--compress "
    "none|fp16|bf16|int8|fp8|onebit|topk|topk:DENSITY|powersgd|powersgd:RANK]\n"
    "  --batch is the global batch; --min-accuracy makes the exit code 1 when the test accuracy is below "
    "it.\n"
    "  --trace: DIR/trained.PID gets a line an update: generation, step, nanoseconds of the monotonic "
    "clock,\n"
    "  how often this process computed the step.\n"
    "  Run it by hand for one rank, or under `gtrain launch -n 4 -- fashion_mnist`.\n";

template <typename Number>
bool ParseNumber(const std::string& value, Number* number) {
  const char* const end = value.data() + value.size();
  const auto [at, error] = std::from_chars(value.data(), end, *number);
  return error == std::errc() && at == end;
}

// "topk:0.01", "powersgd:2", or the name of a codec alone.
bool ParseCompress(const std::string& text, CompressionOptions* options) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  Result<CompressionOptions> parsed = ParseCompression(name);
  if (!parsed.ok()) return false;
  *options = *parsed;
  options->warmup_steps = options->codec == Codec::kNone ? 0 : kWarmupSteps;
  options->optimizer_momentum = options->codec == Codec::kOneBit ? static_cast<float>(kMomentum) : 0;
  if (colon == std::string::npos) return true;
  const std::string value = text.substr(colon + 1);
  if (options->codec == Codec::kPowerSgd) {
    return ParseNumber(value, &options->matrix_rank) && options->matrix_rank > 0 &&
           options->matrix_rank <= kMatrixRankMax;
  }
  return options->codec == Codec::kTopK && ParseNumber(value, &options->density) && options->density > 0 &&
         options->density <= 1;
}

Status Wrong(const std::string& what) { return Status(StatusCode::kInvalidArgument, what); }

Result<Flags> ParseFlags(const std::vector<std::string>& args) {
  Flags flags;
  for (size_t i = 0; i < args.size(); i += 2) {
    if (i + 1 == args.size()) return Wrong(args[i] + " needs a value");
    const std::string& name = args[i];
    const std::string& value = args[i + 1];
    bool ok = true;
    if (name == "--epochs") {
      ok = ParseNumber(value, &flags.epochs) && flags.epochs > 0;
    } else if (name == "--batch") {
      ok = ParseNumber(value, &flags.batch) && flags.batch > 0;
    } else if (name == "--lr") {
      ok = ParseNumber(value, &flags.lr) && flags.lr > 0 && std::isfinite(flags.lr);
    } else if (name == "--data") {
      flags.data = value;
    } else if (name == "--seed") {
      ok = ParseNumber(value, &flags.seed);
    } else if (name == "--min-accuracy") {
      ok = ParseNumber(value, &flags.min_accuracy) && flags.min_accuracy <= 1;
    } else if (name == "--trace") {
      flags.trace = value;
    } else if (name == "--compress") {
      ok = ParseCompress(value, &flags.compress);
    } else {
      return Wrong("unknown flag " + name);
    }
    if (!ok) return Wrong("bad value for " + name + ": " + value);
  }
  return flags;
}

// One split of the data set: uint8 images [n, 1, 28, 28] and int64 labels [n].
struct Split {
  torch::Tensor images;
  torch::Tensor labels;
  int64_t size() const { return labels.size(0); }
};

Split LoadSplit(const std::string& dir, const std::string& prefix) {
  IdxArray images = ReadIdxGz(dir + "/" + prefix + "-images-idx3-ubyte.gz", 3).value();
  IdxArray labels = ReadIdxGz(dir + "/" + prefix + "-labels-idx1-ubyte.gz", 1).value();
  const int64_t n = images.dims[0];
  if (labels.dims[0] != n || images.dims[1] != 28 || images.dims[2] != 28) {
    throw Error(
        Status(StatusCode::kDataLoss, dir + ": " + prefix + " is not 28 x 28 images with one label each"));
  }
  Split split;
  split.images = torch::from_blob(images.data.data(), {n, 1, 28, 28}, torch::kUInt8).clone();
  split.labels = torch::from_blob(labels.data.data(), {n}, torch::kUInt8).to(torch::kInt64);
  if (split.labels.max().item<int64_t>() > 9)
    throw Error(Status(StatusCode::kDataLoss, dir + ": a label above 9"));
  return split;
}

torch::Tensor Normalise(const torch::Tensor& images) {
  return images.to(torch::kFloat32).mul_(1.0 / (255 * 0.353)).sub_(0.286 / 0.353);
}

struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear hidden{nullptr}, out{nullptr};

  NetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 5).padding(2)));
    conv2 = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 5)));
    hidden = register_module("hidden", torch::nn::Linear(32 * 5 * 5, 128));
    out = register_module("out", torch::nn::Linear(128, 10));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv1(x), 2));
    x = torch::relu(torch::max_pool2d(conv2(x), 2));
    x = torch::relu(hidden(x.flatten(1)));
    return out(x);
  }
};
TORCH_MODULE(Net);

// The network and its optimiser, in flat buffers that the network works on views of.
struct Model {
  Net net;
  torch::Tensor params, momentum;

  Model() {
    int64_t total = 0;
    for (const torch::Tensor& p : net->parameters()) total += p.numel();
    params = torch::empty({total});
    momentum = torch::zeros({total});
    torch::NoGradGuard no_grad;
    int64_t at = 0;
    for (torch::Tensor& p : net->parameters()) {
      torch::Tensor place = params.narrow(0, at, p.numel()).view(p.sizes());
      place.copy_(p);
      p.set_data(place);
      at += p.numel();
    }
  }
};

std::span<float> MemoryOf(const torch::Tensor& tensor) {
  return {tensor.data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

std::vector<std::vector<int64_t>> ShapesOf(const Net& net) {
  std::vector<std::vector<int64_t>> shapes;
  for (const torch::Tensor& p : net->parameters()) shapes.push_back(p.sizes().vec());
  return shapes;
}

// Runs after autograd added to a gradient.
class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit ReadyHook(std::function<void()> ready) : ready_(std::move(ready)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ready_();
    return outputs;
  }

 private:
  const std::function<void()> ready_;
};

// Trains on one rank, whichever ranks there are. What torch throws ends the process.
class Trainer {
 public:
  // `train` and `model` outlive `run`, and this does what the run does.
  Trainer(Elastic& run, const Flags& flags, const Split& train, Model& model);

  Status Train();
  Result<double> TestAccuracy(const Split& test);
  // Milliseconds of a step of this process, saves included.
  double step_milliseconds() const;
  // How well this rank's top-k kept to its density, if it was used, but for the first few steps.
  void SaySelected() const;

 private:
  Status OneStep(Step& step);
  double AddGradients(std::span<const int64_t> samples);
  void Trace(const Step& step);
  void Update(const Step& step) noexcept;

  Elastic& run_;
  const Flags& flags_;
  const Split& train_;
  Model& model_;
  ElasticGradients& gradients_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // keep the hooks alive
  std::vector<double> shares_;  // of the elements that top-k should send, those it did, of each step
  int64_t steps_ = 0;           // of this process
  int64_t tries_ = 0;           // to make the next one
  std::ofstream trace_;
  std::chrono::steady_clock::time_point began_, ended_;
};

Trainer::Trainer(Elastic& run, const Flags& flags, const Split& train, Model& model)
    : run_(run),
      flags_(flags),
      train_(train),
      model_(model),
      gradients_(run.ReduceTensors(ShapesOf(model.net))) {
  for (const auto& p : model.net->named_parameters())
    run.Replicated("model/" + p.key(), MemoryOf(p.value()), p.value().sizes().vec());
  run.Replicated("optimizer/momentum", MemoryOf(model.momentum));
  // For a run outside gtrain; what the job file says wins.
  run.Checkpoint({.uri = "ckpt/fashion_mnist", .every_steps = 100});
  run.Compress(flags.compress);
  if (!flags.trace.empty()) trace_.open(flags.trace + "/trained." + std::to_string(getpid()));
  std::vector<torch::Tensor> params = model.net->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].mutable_grad() = torch::from_blob(gradients_[i].data(), params[i].sizes());
    torch::autograd::impl::grad_accumulator(params[i])->add_post_hook(
        std::make_unique<ReadyHook>([this, i] { gradients_.Ready(i); }));
    accumulators_.push_back(torch::autograd::impl::grad_accumulator(params[i]));
  }
}

Status Trainer::Train() {
  const auto data = run_.Samples({.samples = train_.size(),
                                  .epochs = flags_.epochs,
                                  .global_batch = flags_.batch,
                                  .seed = static_cast<uint64_t>(flags_.seed)});
  return run_.Train(data, [&](Step& step) { return OneStep(step); });
}

Status Trainer::OneStep(Step& step) {
  const bool leader = run_.session().rank() == 0;
  if (steps_ == 0) {
    began_ = std::chrono::steady_clock::now();
    if (step.number() > 1 && leader) std::printf("resumed at step %" PRId64 "\n", step.number() - 1);
  }
  ++tries_;
  // With more ranks than samples in a short last batch some have none.
  const double loss = step.samples().empty() ? 0 : AddGradients(step.samples());
  const Status applied = step.Apply(gradients_, loss, [&]() noexcept { Update(step); });
  if (!applied.ok()) return applied;
  ++steps_;
  ended_ = std::chrono::steady_clock::now();
  Trace(step);
  if (const Selected selected = step.reduced().selected; selected.wanted > 0)
    shares_.push_back(static_cast<double>(selected.sent) / static_cast<double>(selected.wanted));
  if (leader && step.loss() && (step.number() % 50 == 0 || step.number() == step.steps())) {
    std::printf("step %" PRId64 "/%" PRId64 " epoch %" PRId64 " loss %.4f\n", step.number(), step.steps(),
                step.epoch() + 1, *step.loss());
  }
  return Status();
}

void Trainer::Trace(const Step& step) {
  const auto tries = std::exchange(tries_, 0);
  if (!trace_.is_open()) return;
  trace_ << run_.session().generation() << " " << step.number() << " "
         << std::chrono::nanoseconds(ended_.time_since_epoch()).count() << " " << tries << std::endl;
}

// Backward adds them to the gradients' memory; returns the sum of the losses.
double Trainer::AddGradients(std::span<const int64_t> samples) {
  std::vector<int64_t> numbers(samples.begin(), samples.end());
  torch::Tensor index = torch::from_blob(numbers.data(), {std::ssize(numbers)}, torch::kInt64);
  torch::Tensor logits = model_.net(Normalise(train_.images.index_select(0, index)));
  torch::Tensor loss = torch::nn::functional::cross_entropy(
      logits, train_.labels.index_select(0, index),
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  loss.backward();
  return loss.item<float>();
}

// SGD with momentum. All ranks hold the same bits before and after.
void Trainer::Update(const Step& step) noexcept {
  torch::NoGradGuard no_grad;
  model_.momentum.mul_(kMomentum);
  int64_t at = 0;
  for (const torch::Tensor& p : model_.net->parameters()) {
    model_.momentum.narrow(0, at, p.numel()).add_(p.grad().view({-1}));
    at += p.numel();
  }
  // Linear decay to a tenth: the last steps settle instead of bouncing.
  const double done = static_cast<double>(step.number() - 1) / static_cast<double>(step.steps());
  model_.params.sub_(model_.momentum, flags_.lr * (1 - 0.9 * done));
}

double Trainer::step_milliseconds() const {
  const std::chrono::duration<double, std::milli> took = ended_ - began_;
  return took.count() / static_cast<double>(std::max<int64_t>(1, steps_));
}

void Trainer::SaySelected() const {
  if (std::ssize(shares_) <= kFirstFew) return;
  std::vector<double> shares(shares_.begin() + kFirstFew, shares_.end());
  std::sort(shares.begin(), shares.end());
  std::printf("top-k sent %.3f to %.3f of the elements it should, in the median %.3f, in %zu steps\n",
              shares.front(), shares.back(), shares[shares.size() / 2], shares.size());
}

Result<double> Trainer::TestAccuracy(const Split& test) {
  torch::NoGradGuard no_grad;
  const Result<double> correct = run_.Evaluate(test.size(), [&](int64_t begin, int64_t end) {
    int64_t sum = 0;
    for (int64_t at = begin; at < end; at += 500) {
      const int64_t n = std::min<int64_t>(500, end - at);
      torch::Tensor guess = model_.net(Normalise(test.images.narrow(0, at, n))).argmax(1);
      sum += guess.eq(test.labels.narrow(0, at, n)).sum().item<int64_t>();
    }
    return static_cast<double>(sum);
  });
  if (!correct.ok()) return correct.status();
  return *correct / static_cast<double>(test.size());
}

Status TrainImages(Elastic& run, const Flags& flags, const Split& train, const Split& test, Model& model) {
  const auto began = std::chrono::steady_clock::now();
  Trainer trainer(run, flags, train, model);
  if (const Status trained = trainer.Train(); !trained.ok()) return trained;
  if (run.stopped()) {
    if (run.session().rank() == 0) std::printf("stopped as asked; the state is saved\n");
    return Status();
  }
  const Result<double> accuracy = trainer.TestAccuracy(test);
  if (!accuracy.ok()) return accuracy.status();
  if (run.session().rank() == 0) {
    trainer.SaySelected();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("test accuracy %.4f after %" PRId64 " epoch(s) on %d rank(s) in %.1f s, %.3f ms a step\n",
                *accuracy, flags.epochs, run.session().world_size(), took.count(),
                trainer.step_milliseconds());
  }
  if (*accuracy >= flags.min_accuracy) return Status();
  return Status(StatusCode::kFailedPrecondition, "the test accuracy is below --min-accuracy");
}

int Main(int argc, char** argv, const Flags& flags) {
  // One thread a rank unless the user says otherwise: ranks share the machine's cores.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) torch::set_num_threads(1);
  torch::manual_seed(static_cast<uint64_t>(flags.seed));
  const Split train = LoadSplit(flags.data, "train"), test = LoadSplit(flags.data, "t10k");
  Model model;
  return gtrain::Main(argc, argv, [&](Elastic& run) { return TrainImages(run, flags, train, test, model); });
}

}  // namespace
}  // namespace gtrain::examples

int main(int argc, char** argv) {
  using gtrain::examples::Flags;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // lines reach the log as they happen
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 1 && (args[0] == "--help" || args[0] == "-h")) {
    std::fputs(gtrain::examples::kUsage, stdout);
    return 0;
  }
  gtrain::Result<Flags> flags = gtrain::examples::ParseFlags(args);
  if (!flags.ok()) {
    std::fprintf(stderr, "fashion_mnist: %s\n%s", flags.status().message().c_str(), gtrain::examples::kUsage);
    return gtrain::examples::kExitUsage;
  }
  try {
    return gtrain::examples::Main(argc, argv, *flags);
  } catch (const std::exception& e) {  // torch throws, and a file that cannot be read
    std::fprintf(stderr, "fashion_mnist: %s\n", e.what());
    return gtrain::examples::kExitFailed;
  }
}
