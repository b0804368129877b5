// Trains a small convolutional network on Fashion-MNIST, data-parallel over the ranks of a gtrain job.
//
// The whole recipe of a program that uses the SDK:
//   1. join the session, make a communicator;
//   2. register the state with a checkpointer and restore the newest commit;
//   3. every step: gradients of this rank's share, which a reducer averages while backward goes on, one
//      identical update, SaveIfDue, Report;
//   4. a collective that returns Unavailable means another rank was lost: exit 75 and let gtrain start the
//   next generation.
// Parameters and momentum live in flat buffers, so that the optimiser is a few vector operations; gradients
// live in the reducer's memory. They are sums over samples divided by the global batch, which is why the
// result does not depend on the number of ranks beyond rounding. --compress sends less of them: what a step
// did not send is carried over to the next one, and saved with the model.
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/torch.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "examples/fashion_mnist/idx.h"
#include "examples/fashion_mnist/sampler.h"
#include "gtrain/checkpoint.h"
#include "gtrain/communicator.h"
#include "gtrain/reducer.h"
#include "gtrain/session.h"

namespace gtrain::examples {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitRunMeAgain = 75;  // blueprint: saved, run me again; never charged to the budget
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

// "topk:0.01", "powersgd:2", or the name of a codec alone.
bool ParseCompress(absl::string_view text, CompressionOptions* options) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(text, absl::MaxSplits(':', 1));
  const absl::StatusOr<Codec> codec = ParseCodec(parts.first);
  if (!codec.ok()) return false;
  options->codec = *codec;
  if (!absl::StrContains(text, ':')) return true;
  if (*codec == Codec::kPowerSgd) {
    return absl::SimpleAtoi(parts.second, &options->matrix_rank) && options->matrix_rank > 0 &&
           options->matrix_rank <= kMatrixRankMax;
  }
  return *codec == Codec::kTopK && absl::SimpleAtod(parts.second, &options->density) &&
         options->density > 0 && options->density <= 1;
}

absl::StatusOr<Flags> ParseFlags(const std::vector<std::string>& args) {
  Flags flags;
  for (size_t i = 0; i < args.size(); i += 2) {
    if (i + 1 == args.size()) return absl::InvalidArgumentError(absl::StrCat(args[i], " needs a value"));
    const std::string& name = args[i];
    const std::string& value = args[i + 1];
    bool ok = true;
    if (name == "--epochs") {
      ok = absl::SimpleAtoi(value, &flags.epochs) && flags.epochs > 0;
    } else if (name == "--batch") {
      ok = absl::SimpleAtoi(value, &flags.batch) && flags.batch > 0;
    } else if (name == "--lr") {
      ok = absl::SimpleAtod(value, &flags.lr) && flags.lr > 0 && std::isfinite(flags.lr);
    } else if (name == "--data") {
      flags.data = value;
    } else if (name == "--seed") {
      ok = absl::SimpleAtoi(value, &flags.seed);
    } else if (name == "--min-accuracy") {
      ok = absl::SimpleAtod(value, &flags.min_accuracy) && flags.min_accuracy <= 1;
    } else if (name == "--compress") {
      ok = ParseCompress(value, &flags.compress);
    } else {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag ", name));
    }
    if (!ok) return absl::InvalidArgumentError(absl::StrCat("bad value for ", name, ": ", value));
  }
  return flags;
}

// One split of the data set: uint8 images [n, 1, 28, 28] and int64 labels [n].
struct Split {
  torch::Tensor images;
  torch::Tensor labels;
  int64_t size() const { return labels.size(0); }
};

absl::StatusOr<Split> LoadSplit(const std::string& dir, const std::string& prefix) {
  absl::StatusOr<IdxArray> images = ReadIdxGz(absl::StrCat(dir, "/", prefix, "-images-idx3-ubyte.gz"), 3);
  if (!images.ok()) return images.status();
  absl::StatusOr<IdxArray> labels = ReadIdxGz(absl::StrCat(dir, "/", prefix, "-labels-idx1-ubyte.gz"), 1);
  if (!labels.ok()) return labels.status();
  const int64_t n = images->dims[0];
  if (labels->dims[0] != n || images->dims[1] != 28 || images->dims[2] != 28) {
    return absl::DataLossError(absl::StrCat(dir, ": ", prefix, " is not 28 x 28 images with one label each"));
  }
  Split split;
  split.images = torch::from_blob(images->data.data(), {n, 1, 28, 28}, torch::kUInt8).clone();
  split.labels = torch::from_blob(labels->data.data(), {n}, torch::kUInt8).to(torch::kInt64);
  if (split.labels.max().item<int64_t>() > 9)
    return absl::DataLossError(absl::StrCat(dir, ": a label above 9"));
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

// Where training is. Saved with the parameters; `batch` and `seed` say what `step` means.
struct Cursor {
  int64_t step = 0;  // steps applied since the beginning
  int64_t batch = 0;
  int64_t seed = 0;
};

class Trainer {
 public:
  Trainer(const Flags& flags, Session* session, Communicator* comm, Split train)
      : flags_(flags), session_(session), comm_(comm), train_(std::move(train)) {
    cursor_.batch = flags.batch;
    cursor_.seed = flags.seed;
    steps_per_epoch_ = StepsPerEpoch(train_.size(), flags.batch);
    Flatten();
  }

  // Collective: hands the gradients over to a reducer.
  absl::Status MakeReducer();

  absl::Status RegisterAndRestore(Checkpointer* checkpointer);
  // Before each save: what compression carries over, into the registered memory.
  absl::Status ExportCarried() { return reducer_->ExportCarried(absl::MakeSpan(carried_)); }
  // Until the last step, or until all ranks agreed to stop (then `stopped()`).
  absl::Status Run();
  absl::StatusOr<double> TestAccuracy(const Split& test);
  // Of the steps of this run, saves included.
  absl::Duration step_time() const { return step_time_; }
  bool stopped() const { return stopped_; }
  // How well this rank's top-k kept to its density, if it was used, but for the first few steps.
  void SaySelected() const;

 private:
  // What the ranks add up beside the gradients.
  enum Extra { kLoss, kStop, kExtras };

  void Flatten();
  absl::Status Step(const std::vector<int64_t>& order, int64_t step_in_epoch);
  void Update(int64_t global_batch);
  double LearningRate() const;

  const Flags& flags_;
  Session* const session_;
  Communicator* const comm_;
  Checkpointer* checkpointer_ = nullptr;
  const Split train_;
  Net net_;
  torch::Tensor params_, momentum_;  // flat
  std::unique_ptr<Reducer> reducer_;
  std::vector<float> carried_;                                        // by compression, as of the newest save
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;  // keep the hooks alive
  absl::Status hooks_;  // the first error of a hook, which cannot return it
  Cursor cursor_;
  int64_t steps_per_epoch_ = 0;
  int64_t saved_step_ = -1;  // the newest step with a checkpoint: equal on all ranks
  double loss_ = 0;
  std::vector<double> shares_;  // of the elements that top-k should send, those it did, of each step
  bool stopped_ = false;
  absl::Duration step_time_;
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

absl::Status Trainer::MakeReducer() {
  std::vector<GradientSpec> specs;
  for (const auto& p : net_->named_parameters()) {
    specs.push_back({p.key(), static_cast<size_t>(p.value().numel()), p.value().sizes().vec()});
  }
  ReducerOptions options;
  options.compression = flags_.compress;
  if (flags_.compress.codec != Codec::kNone) options.compression.warmup_steps = kWarmupSteps;
  if (flags_.compress.codec == Codec::kOneBit) options.compression.optimizer_momentum = kMomentum;
  auto reducer = Reducer::Create(comm_, specs, options);
  if (!reducer.ok()) return reducer.status();
  reducer_ = *std::move(reducer);
  carried_.resize(reducer_->CarriedCount());
  std::vector<torch::Tensor> params = net_->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].mutable_grad() = torch::from_blob(reducer_->gradient(i).data(), params[i].sizes());
    torch::autograd::impl::grad_accumulator(params[i])->add_post_hook(std::make_unique<ReadyHook>([this, i] {
      const absl::Status ready = reducer_->Ready(i);
      if (hooks_.ok()) hooks_ = ready;
    }));
    accumulators_.push_back(torch::autograd::impl::grad_accumulator(params[i]));
  }
  return absl::OkStatus();
}

absl::Status Trainer::RegisterAndRestore(Checkpointer* checkpointer) {
  checkpointer_ = checkpointer;
  for (auto& p : net_->named_parameters()) {
    absl::Status s = checkpointer_->AddReplicated(absl::StrCat("model/", p.key()),
                                                  {p.value().data_ptr(), p.value().nbytes()},
                                                  p.value().sizes().vec(), DType::kFloat32);
    if (!s.ok()) return s;
  }
  absl::Status s = checkpointer_->AddReplicated(
      "optimizer/momentum", {momentum_.data_ptr(), momentum_.nbytes()}, {momentum_.numel()}, DType::kFloat32);
  if (!s.ok()) return s;
  static_assert(sizeof(Cursor) == 3 * sizeof(int64_t));
  s = checkpointer_->AddReplicated("cursor", {&cursor_, sizeof(cursor_)}, {3}, DType::kInt64);
  if (!s.ok()) return s;
  if (const std::string& name = reducer_->CarriedName(); !name.empty()) {
    s = checkpointer_->AddPerRank(name, {carried_.data(), carried_.size() * sizeof(float)});
    if (!s.ok()) return s;
  }

  absl::StatusOr<std::optional<RestoredStep>> restored = checkpointer_->Restore();
  if (!restored.ok()) return restored.status();
  if (!restored->has_value()) return absl::OkStatus();
  saved_step_ = cursor_.step;
  // Zeros if the checkpoint is of another codec or number of ranks.
  if (s = reducer_->LoadCarried(carried_); !s.ok()) return s;
  if (cursor_.batch != flags_.batch || cursor_.seed != flags_.seed) {
    return absl::FailedPreconditionError(
        absl::StrCat("the checkpoint was trained with --batch ", cursor_.batch, " --seed ", cursor_.seed,
                     ": pass the same, or start over with another checkpoint directory"));
  }
  if (session_->rank() == 0) std::printf("resumed at step %" PRId64 "\n", cursor_.step);
  return absl::OkStatus();
}

absl::Status Trainer::Run() {
  // Equal seeds already make equal replicas; the broadcast makes that independent of torch's generators.
  absl::Status s =
      comm_->Broadcast(params_.data_ptr(), static_cast<size_t>(params_.numel()), DType::kFloat32, 0);
  if (!s.ok()) return s;
  const int64_t total = flags_.epochs * steps_per_epoch_;
  int64_t epoch = -1;
  std::vector<int64_t> order;
  const absl::Time began = absl::Now();
  const int64_t first = cursor_.step;
  while (cursor_.step < total && !stopped_) {
    if (cursor_.step / steps_per_epoch_ != epoch) {
      epoch = cursor_.step / steps_per_epoch_;
      order = EpochOrder(train_.size(), static_cast<uint64_t>(flags_.seed), epoch);
    }
    s = Step(order, cursor_.step % steps_per_epoch_);
    if (!s.ok()) return s;
    if (session_->rank() == 0 && (cursor_.step % 50 == 0 || cursor_.step == total)) {
      std::printf("step %" PRId64 "/%" PRId64 " epoch %" PRId64 " loss %.4f\n", cursor_.step, total,
                  epoch + 1, loss_);
    }
    if (stopped_) break;
    absl::StatusOr<bool> saved = checkpointer_->SaveIfDue(cursor_.step, comm_);
    if (!saved.ok()) return saved.status();
    if (*saved) saved_step_ = cursor_.step;
  }
  step_time_ = (absl::Now() - began) / std::max<int64_t>(1, cursor_.step - first);
  // The last state is worth keeping whatever the interval: the end of training, or what the user asked to
  // save.
  s = checkpointer_->Wait(absl::Minutes(2));  // an earlier save still being written would make this one skip
  if (!s.ok()) return s;
  if (saved_step_ == cursor_.step) return absl::OkStatus();
  absl::StatusOr<bool> saved = checkpointer_->Save(cursor_.step);
  if (!saved.ok()) return saved.status();
  return checkpointer_->Wait(absl::Minutes(2));
}

absl::Status Trainer::Step(const std::vector<int64_t>& order, int64_t step_in_epoch) {
  const int64_t samples = train_.size();
  const Slice mine = RankSlice(samples, flags_.batch, step_in_epoch, comm_->rank(), comm_->size());
  const int64_t global_batch = std::min(flags_.batch, samples - step_in_epoch * flags_.batch);
  const int64_t share = mine.end - mine.begin;
  for (torch::Tensor& p : net_->parameters()) p.mutable_grad().zero_();
  float extras[kExtras] = {};
  if (share > 0) {  // with more ranks than samples in a short last batch some have none
    torch::Tensor index =
        torch::from_blob(const_cast<int64_t*>(order.data()) + mine.begin, {share}, torch::kInt64);
    torch::Tensor logits = net_(Normalise(train_.images.index_select(0, index)));
    torch::Tensor loss = torch::nn::functional::cross_entropy(
        logits, train_.labels.index_select(0, index),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    loss.backward();
    extras[kLoss] = loss.item<float>();
  }
  extras[kStop] = session_->StopRequested() ? 1 : 0;
  if (!hooks_.ok()) return hooks_;
  absl::Status s = comm_->AllReduce(extras, kExtras, DType::kFloat32, ReduceOp::kSum);
  if (!s.ok()) return s;
  absl::StatusOr<ReducedStep> reduced = reducer_->Finish();
  if (!reduced.ok()) return reduced.status();
  if (const Selected& selected = reduced->selected; selected.wanted > 0) {
    shares_.push_back(static_cast<double>(selected.sent) / static_cast<double>(selected.wanted));
  }
  loss_ = extras[kLoss] / static_cast<double>(global_batch);
  stopped_ = extras[kStop] > 0;  // the same sum everywhere, so all ranks stop after the same step
  Update(global_batch);
  ++cursor_.step;
  session_->Report({.step = cursor_.step, .loss = loss_, .samples = share});
  return absl::OkStatus();
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
  const double done =
      static_cast<double>(cursor_.step) / static_cast<double>(flags_.epochs * steps_per_epoch_);
  return flags_.lr * (1 - 0.9 * done);
}

void Trainer::SaySelected() const {
  if (std::ssize(shares_) <= kFirstFew) return;
  std::vector<double> shares(shares_.begin() + kFirstFew, shares_.end());
  std::sort(shares.begin(), shares.end());
  std::printf("top-k sent %.3f to %.3f of the elements it should, in the median %.3f, in %zu steps\n",
              shares.front(), shares.back(), shares[shares.size() / 2], shares.size());
}

absl::StatusOr<double> Trainer::TestAccuracy(const Split& test) {
  torch::NoGradGuard no_grad;
  const Slice mine = Share(test.size(), comm_->rank(), comm_->size());
  int64_t correct = 0;
  for (int64_t at = mine.begin; at < mine.end; at += 500) {
    const int64_t n = std::min<int64_t>(500, mine.end - at);
    torch::Tensor guess = net_(Normalise(test.images.narrow(0, at, n))).argmax(1);
    correct += guess.eq(test.labels.narrow(0, at, n)).sum().item<int64_t>();
  }
  absl::Status s = comm_->AllReduce(&correct, 1, DType::kInt64, ReduceOp::kSum);
  if (!s.ok()) return s;
  return static_cast<double>(correct) / static_cast<double>(test.size());
}

int Explain(const absl::Status& status) {
  std::fprintf(stderr, "fashion_mnist: %s\n", std::string(status.message()).c_str());
  return absl::IsUnavailable(status) ? kExitRunMeAgain : kExitFailed;
}

int TrainMain(const Flags& flags) {
  // One thread a rank unless the user says otherwise: ranks share the machine's cores.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) torch::set_num_threads(1);
  torch::manual_seed(static_cast<uint64_t>(flags.seed));
  const absl::Time began = absl::Now();

  absl::StatusOr<std::unique_ptr<Session>> session = Session::Join();
  if (!session.ok()) return Explain(session.status());
  absl::StatusOr<std::unique_ptr<Communicator>> comm = (*session)->MakeCommunicator();
  if (!comm.ok()) return Explain(comm.status());
  absl::StatusOr<Split> train = LoadSplit(flags.data, "train");
  if (!train.ok()) return Explain(train.status());
  absl::StatusOr<Split> test = LoadSplit(flags.data, "t10k");
  if (!test.ok()) return Explain(test.status());

  Trainer trainer(flags, session->get(), comm->get(), *std::move(train));
  if (absl::Status s = trainer.MakeReducer(); !s.ok()) return Explain(s);
  CheckpointOptions options;
  options.every_steps = 100;
  options.uri = "ckpt/fashion_mnist";  // by hand; under gtrain the job file's place and interval win
  options.before_save = [&trainer] { return trainer.ExportCarried(); };
  absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer = Checkpointer::Open(session->get(), options);
  if (!checkpointer.ok()) return Explain(checkpointer.status());
  absl::Status status = trainer.RegisterAndRestore(checkpointer->get());
  if (status.ok()) status = trainer.Run();
  if (!status.ok()) return Explain(status);
  const bool leader = (*session)->rank() == 0;
  if (trainer.stopped()) {
    if (leader) std::printf("stopped as asked; the state is saved\n");
    return 0;
  }

  absl::StatusOr<double> accuracy = trainer.TestAccuracy(*test);
  if (!accuracy.ok()) return Explain(accuracy.status());
  if (leader) {
    trainer.SaySelected();
    std::printf("test accuracy %.4f after %" PRId64 " epoch(s) on %d rank(s) in %.1f s, %.3f ms a step\n",
                *accuracy, flags.epochs, (*comm)->size(), absl::ToDoubleSeconds(absl::Now() - began),
                absl::ToDoubleMilliseconds(trainer.step_time()));
  }
  if (*accuracy >= flags.min_accuracy) return 0;
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
  absl::StatusOr<Flags> flags = gtrain::examples::ParseFlags(args);
  if (!flags.ok()) {
    std::fprintf(stderr, "fashion_mnist: %s\n%s", std::string(flags.status().message()).c_str(),
                 gtrain::examples::kUsage);
    return gtrain::examples::kExitUsage;
  }
  try {
    return gtrain::examples::TrainMain(*flags);
  } catch (const std::exception& e) {  // torch throws
    std::fprintf(stderr, "fashion_mnist: %s\n", e.what());
    return gtrain::examples::kExitFailed;
  }
}
