// Trains a small convolutional network on Fashion-MNIST, data-parallel over the ranks of a gtrain job.
//
// The whole recipe of a program that uses the SDK:
//   1. join the session, make a communicator;
//   2. register the state, and where training is in its data, with a checkpointer and restore the newest
//   commit;
//   3. every step: the ledger's share of samples, their gradients, which a reducer averages while backward
//   goes
//      on, one identical update, SaveIfDue, Report;
//   4. a collective that returns Unavailable means another rank was lost: exit 75 and let gtrain start the
//   next generation.
// Parameters and momentum live in flat buffers, so that the optimiser is a few vector operations; gradients
// live in the reducer's memory. They are sums over samples divided by the global batch, which is why the
// result does not depend on the number of ranks beyond rounding. --compress sends less of them: what a step
// did not send is carried over to the next one, and saved with the model.
#include <gtrain/gtrain.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
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
  CompressionOptions compress;
};

constexpr char kUsage[] =
    "usage: fashion_mnist [--epochs N] [--batch N] [--lr X] [--data DIR] [--seed N] [--min-accuracy X]\n"
    "                     [--compress "
    "none|fp16|bf16|int8|fp8|onebit|topk|topk:DENSITY|powersgd|powersgd:RANK]\n"
    "  --batch is the global batch; --min-accuracy makes the exit code 1 when the test accuracy is below "
    "it.\n"
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

// Everything below throws: Error, or what torch throws.
class Trainer {
 public:
  Trainer(const Flags& flags, const Session& session, Communicator* comm, Split train)
      : flags_(flags),
        session_(session),
        comm_(comm),
        train_(std::move(train)),
        data_(Samples::Open(session, {.samples = train_.size(),
                                      .epochs = flags.epochs,
                                      .global_batch = flags.batch,
                                      .seed = static_cast<uint64_t>(flags.seed)})
                  .value()) {
    Flatten();
    MakeReducer();
  }

  void RegisterAndRestore(Checkpointer* checkpointer);
  // Trains until the last step, or until all ranks agreed to stop (then `stopped()`).
  void Run();
  double TestAccuracy(const Split& test);
  // Milliseconds of a step of this run, saves included.
  double step_milliseconds() const { return step_milliseconds_; }
  bool stopped() const { return stopped_; }
  // How well this rank's top-k kept to its density, if it was used, but for the first few steps.
  void SaySelected() const;

 private:
  void Flatten();
  void MakeReducer();
  void Step();
  void Update(int64_t global_batch);
  double LearningRate() const;

  const Flags& flags_;
  const Session& session_;
  Communicator* const comm_;
  const Split train_;
  Samples data_;
  Net net_;
  torch::Tensor params_, momentum_;  // flat
  std::optional<Reducer> reducer_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // keep the hooks alive
  Checkpointer* checkpointer_ = nullptr;
  int64_t step_ = 0;  // applied since the beginning
  double loss_ = 0;
  std::vector<double> shares_;  // of the elements that top-k should send, those it did, of each step
  bool stopped_ = false;
  double step_milliseconds_ = 0;
};

// Moves every parameter into the flat buffer; the network then works on views of it.
void Trainer::Flatten() {
  int64_t total = 0;
  for (const torch::Tensor& p : net_->parameters()) total += p.numel();
  params_ = torch::empty({total});
  momentum_ = torch::zeros({total});
  torch::NoGradGuard no_grad;
  int64_t at = 0;
  for (torch::Tensor& p : net_->parameters()) {
    torch::Tensor place = params_.narrow(0, at, p.numel()).view(p.sizes());
    place.copy_(p);
    p.set_data(place);
    at += p.numel();
  }
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

void Trainer::MakeReducer() {
  std::vector<GradientSpec> specs;
  for (const auto& p : net_->named_parameters()) {
    specs.push_back({p.key(), static_cast<size_t>(p.value().numel()), p.value().sizes().vec()});
  }
  reducer_ = Reducer::Create(*comm_, specs, {.compression = flags_.compress}).value();
  std::vector<torch::Tensor> params = net_->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].mutable_grad() = torch::from_blob(reducer_->gradient(i).data(), params[i].sizes());
    torch::autograd::impl::grad_accumulator(params[i])->add_post_hook(
        std::make_unique<ReadyHook>([this, i] { reducer_->Ready(i).ThrowIfError(); }));
    accumulators_.push_back(torch::autograd::impl::grad_accumulator(params[i]));
  }
}

void Trainer::RegisterAndRestore(Checkpointer* checkpointer) {
  checkpointer_ = checkpointer;
  const auto memory = [](const torch::Tensor& t) { return Memory{t.data_ptr(), t.nbytes()}; };
  for (const auto& p : net_->named_parameters()) {
    checkpointer
        ->AddReplicated("model/" + p.key(), memory(p.value()), p.value().sizes().vec(), DType::kFloat32)
        .ThrowIfError();
  }
  checkpointer->AddReplicated("optimizer/momentum", memory(momentum_), {momentum_.numel()}, DType::kFloat32)
      .ThrowIfError();
  data_.AddTo(*checkpointer).ThrowIfError();
  checkpointer->AddReducer(*reducer_).ThrowIfError();

  const std::optional<RestoredStep> restored = checkpointer->Restore().value();
  if (!restored) return;
  step_ = restored->step;
  if (session_.rank() == 0) std::printf("resumed at step %" PRId64 "\n", step_);
}

void Trainer::Run() {
  // Equal seeds already make equal replicas; the broadcast makes that independent of torch's generators.
  comm_->Broadcast(params_.data_ptr(), static_cast<size_t>(params_.numel()), DType::kFloat32, 0)
      .ThrowIfError();
  const auto began = std::chrono::steady_clock::now();
  const int64_t first = step_;
  while (!data_.done() && !stopped_) {
    const int64_t epoch = data_.epoch();
    Step();
    if (session_.rank() == 0 && (step_ % 50 == 0 || data_.done())) {
      std::printf("step %" PRId64 "/%" PRId64 " epoch %" PRId64 " loss %.4f\n", step_, data_.steps(),
                  epoch + 1, loss_);
    }
    stopped_ = checkpointer_->SaveIfDue(step_).value().stop;  // all ranks stop after the same step
  }
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
  step_milliseconds_ = took.count() / static_cast<double>(std::max<int64_t>(1, step_ - first));
  // The last state is worth keeping whatever the interval: the end of training, or what the user asked to
  // save.
  checkpointer_->Commit(step_).ThrowIfError();
}

void Trainer::Step() {
  const int64_t global_batch = data_.batch();
  std::vector<int64_t> mine = data_.Next();
  const auto share = static_cast<int64_t>(mine.size());
  for (torch::Tensor& p : net_->parameters()) p.mutable_grad().zero_();
  float sum = 0;
  if (share > 0) {  // with more ranks than samples in a short last batch some have none
    torch::Tensor index = torch::from_blob(mine.data(), {share}, torch::kInt64);
    torch::Tensor logits = net_(Normalise(train_.images.index_select(0, index)));
    torch::Tensor loss = torch::nn::functional::cross_entropy(
        logits, train_.labels.index_select(0, index),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    loss.backward();
    sum = loss.item<float>();
  }
  comm_->AllReduce(std::span(&sum, 1)).ThrowIfError();
  const ReducedStep reduced = reducer_->Finish().value();
  if (const Selected& selected = reduced.selected; selected.wanted > 0) {
    shares_.push_back(static_cast<double>(selected.sent) / static_cast<double>(selected.wanted));
  }
  loss_ = sum / static_cast<double>(global_batch);
  Update(global_batch);
  ++step_;
  session_.Report({.step = step_, .loss = loss_, .samples = share});
}

// SGD with momentum. All ranks hold the same bits before and after.
void Trainer::Update(int64_t global_batch) {
  torch::NoGradGuard no_grad;
  const double samples = static_cast<double>(global_batch) / comm_->size();  // gradients are means over ranks
  momentum_.mul_(kMomentum);
  int64_t at = 0;
  for (const torch::Tensor& p : net_->parameters()) {
    momentum_.narrow(0, at, p.numel()).add_(p.grad().view({-1}), 1.0 / samples);
    at += p.numel();
  }
  params_.sub_(momentum_, LearningRate());
}

// Linear decay to a tenth: the last steps settle instead of bouncing.
double Trainer::LearningRate() const {
  const double done = static_cast<double>(step_) / static_cast<double>(data_.steps());
  return flags_.lr * (1 - 0.9 * done);
}

void Trainer::SaySelected() const {
  if (std::ssize(shares_) <= kFirstFew) return;
  std::vector<double> shares(shares_.begin() + kFirstFew, shares_.end());
  std::sort(shares.begin(), shares.end());
  std::printf("top-k sent %.3f to %.3f of the elements it should, in the median %.3f, in %zu steps\n",
              shares.front(), shares.back(), shares[shares.size() / 2], shares.size());
}

double Trainer::TestAccuracy(const Split& test) {
  torch::NoGradGuard no_grad;
  const int64_t begin = test.size() * comm_->rank() / comm_->size(),
                end = test.size() * (comm_->rank() + 1) / comm_->size();
  int64_t correct = 0;
  for (int64_t at = begin; at < end; at += 500) {
    const int64_t n = std::min<int64_t>(500, end - at);
    torch::Tensor guess = net_(Normalise(test.images.narrow(0, at, n))).argmax(1);
    correct += guess.eq(test.labels.narrow(0, at, n)).sum().item<int64_t>();
  }
  comm_->AllReduce(std::span(&correct, 1)).ThrowIfError();
  return static_cast<double>(correct) / static_cast<double>(test.size());
}

int TrainMain(const Flags& flags) {
  // One thread a rank unless the user says otherwise: ranks share the machine's cores.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) torch::set_num_threads(1);
  torch::manual_seed(static_cast<uint64_t>(flags.seed));
  const auto began = std::chrono::steady_clock::now();

  const Session session = Session::Join().value();
  Communicator comm = Communicator::Create(session).value();
  Split train = LoadSplit(flags.data, "train");
  const Split test = LoadSplit(flags.data, "t10k");
  Trainer trainer(flags, session, &comm, std::move(train));
  // These values are for a run outside gtrain; under gtrain the job file's uri and interval win.
  Checkpointer checkpointer =
      Checkpointer::Open(session, {.uri = "ckpt/fashion_mnist", .every_steps = 100}).value();
  trainer.RegisterAndRestore(&checkpointer);
  trainer.Run();
  const bool leader = session.rank() == 0;
  if (trainer.stopped()) {
    if (leader) std::printf("stopped as asked; the state is saved\n");
    return 0;
  }

  const double accuracy = trainer.TestAccuracy(test);
  if (leader) {
    trainer.SaySelected();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("test accuracy %.4f after %" PRId64 " epoch(s) on %d rank(s) in %.1f s, %.3f ms a step\n",
                accuracy, flags.epochs, comm.size(), took.count(), trainer.step_milliseconds());
  }
  if (accuracy >= flags.min_accuracy) return 0;
  if (leader)
    std::fprintf(stderr, "fashion_mnist: accuracy is below --min-accuracy %.3f\n", flags.min_accuracy);
  return kExitFailed;
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
    return gtrain::examples::TrainMain(*flags);
  } catch (const gtrain::Error& error) {
    std::fprintf(stderr, "fashion_mnist: %s\n", error.status().message().c_str());
    return error.status().exit_code();  // 75 when another rank was lost: gtrain starts the next generation
  } catch (const std::exception& e) {   // torch throws
    std::fprintf(stderr, "fashion_mnist: %s\n", e.what());
    return gtrain::examples::kExitFailed;
  }
}
