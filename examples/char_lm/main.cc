// Trains a language model of characters, data-parallel over the ranks of a gtrain job: an example of a model
// without any framework that uses gtrain::Reducer.
//
//   bible -f gen1:1-rev22:21 | cut -d' ' -f2- > kjv.txt      (Debian's bible-kjv; any text will do)
//   gtrain launch -n 4 -- build/examples/char_lm --text kjv.txt --compress 'topk density=0.01'
//
// The reducer owns the gradients' memory; backward writes there and says of each gradient when it is
// complete. --compress sends less of them. The part that a step did not send is carried over to the next one
// (error feedback), and saved with the model; --error-feedback no shows what becomes of a training without.
// With --momentum-correction yes top-k selects from each rank's momentum (DGC), and the optimiser here has
// none. --optimizer adam with 'onebit warmup=N' is 1-bit Adam: its variance is that of the warm-up, see
// Update().
#include <gtrain/gtrain.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "examples/char_lm/model.h"
#include "examples/char_lm/text.h"

namespace gtrain::examples {
namespace {

constexpr int kExitFailed = 1, kExitUsage = 2;
constexpr float kMomentum = 0.9f;
constexpr ptrdiff_t kFirstFew = 5;  // steps in which top-k finds its threshold
constexpr size_t kValidationWindows = 20'480;

struct Flags {
  std::string text;
  int64_t steps = 4000;
  int64_t batch = 256;
  bool adam = false;
  double lr = 0;  // 0: 0.1 for SGD, 0.004 for Adam
  int64_t seed = 1;
  double max_loss = 0;
  CompressionOptions compress;
  bool error_feedback = true;
  bool momentum_correction = false;
};

constexpr char kUsage[] =
    "usage: char_lm --text FILE [--steps N] [--batch N] [--optimizer sgd|adam] [--lr X] [--seed N]\n"
    "               [--max-loss X] [--compress WORDS] [--error-feedback yes|no]\n"
    "               [--momentum-correction no|yes]\n"
    "  --batch is the global batch; --max-loss makes the exit code 1 when the validation loss is above it.\n"
    "  --compress: as in a job file, for example 'topk density=0.01 warmup=100', onebit, powersgd, fp16.\n"
    "  Run it by hand for one rank, or under `gtrain launch -n 4 -- char_lm ...`.\n";

bool ParseYesNo(const std::string& value, bool* flag) {
  *flag = value == "yes";
  return *flag || value == "no";
}

bool ParseCompress(const std::string& value, CompressionOptions* options) {
  const Result<CompressionOptions> parsed = ParseCompression(value);
  if (parsed.ok()) *options = *parsed;
  return parsed.ok();
}

template <typename Number>
bool ParseNumber(const std::string& value, Number* number) {
  const char* const end = value.data() + value.size();
  const auto [at, error] = std::from_chars(value.data(), end, *number);
  return error == std::errc() && at == end;
}

Status Wrong(const std::string& what) { return Status(StatusCode::kInvalidArgument, what); }

Result<Flags> ParseFlags(const std::vector<std::string>& args) {
  Flags flags;
  for (size_t i = 0; i < args.size(); i += 2) {
    if (i + 1 == args.size()) return Wrong(args[i] + " needs a value");
    const std::string& name = args[i];
    const std::string& value = args[i + 1];
    bool ok = true;
    if (name == "--text") {
      flags.text = value;
    } else if (name == "--steps") {
      ok = ParseNumber(value, &flags.steps) && flags.steps > 0;
    } else if (name == "--batch") {
      ok = ParseNumber(value, &flags.batch) && flags.batch > 0;
    } else if (name == "--optimizer") {
      flags.adam = value == "adam";
      ok = flags.adam || value == "sgd";
    } else if (name == "--lr") {
      ok = ParseNumber(value, &flags.lr) && flags.lr > 0 && std::isfinite(flags.lr);
    } else if (name == "--seed") {
      ok = ParseNumber(value, &flags.seed);
    } else if (name == "--max-loss") {
      ok = ParseNumber(value, &flags.max_loss) && flags.max_loss > 0;
    } else if (name == "--compress") {
      ok = ParseCompress(value, &flags.compress);
    } else if (name == "--error-feedback") {
      ok = ParseYesNo(value, &flags.error_feedback);
    } else if (name == "--momentum-correction") {
      ok = ParseYesNo(value, &flags.momentum_correction);
    } else {
      return Wrong("unknown flag " + name);
    }
    if (!ok) return Wrong("bad value for " + name + ": " + value);
  }
  if (flags.text.empty()) return Wrong("--text FILE is needed");
  if (flags.lr == 0) flags.lr = flags.adam ? 0.004 : 0.1;
  flags.compress.error_feedback = flags.error_feedback;
  if (flags.momentum_correction) {
    if (flags.compress.codec != Codec::kTopK) return Wrong("--momentum-correction is for topk");
    if (flags.adam) return Wrong("--momentum-correction is for --optimizer sgd");
    flags.compress.momentum = kMomentum;
  }
  return flags;
}

// Saved with the parameters: what the step of a checkpoint means.
struct Recipe {
  int64_t batch = 0;
  int64_t seed = 0;
};

class Trainer {
 public:
  Trainer(const Flags& flags, const Session& session, Communicator* comm, Text text)
      : flags_(flags),
        session_(session),
        comm_(comm),
        text_(std::move(text)),
        model_(static_cast<size_t>((flags.batch + comm->size() - 1) / comm->size()),
               static_cast<uint64_t>(flags.seed)),
        momentum_(model_.values().size()),
        squares_(flags.adam ? momentum_.size() : 0),
        reducer_(MakeReducer(flags, *comm)),
        recipe_{flags.batch, flags.seed} {
    for (size_t i = 0; i < Parameters().size(); ++i) gradients_.push_back(reducer_.gradient(i));
  }

  // All below throws Error.
  void RegisterAndRestore(Checkpointer* checkpointer);
  // Trains until the last step, or until all ranks agreed to stop (then `stopped()`).
  void Run();
  // The mean loss over the validation part, in nats a character.
  double ValidationLoss();
  bool stopped() const { return stopped_; }
  // How well this rank's top-k kept to its density, if it was used, but for the first few steps.
  void SaySelected() const;

 private:
  static Reducer MakeReducer(const Flags& flags, const Communicator& comm);
  void Step();
  void Update(const ReducedStep& reduced);

  const Flags& flags_;
  const Session& session_;
  Communicator* const comm_;
  Checkpointer* checkpointer_ = nullptr;
  const Text text_;
  Model model_;
  std::vector<float> momentum_;
  std::vector<float> squares_;  // Adam's
  int64_t measured_ = 0;        // the steps in which they were
  Reducer reducer_;
  std::vector<std::span<float>> gradients_;  // the reducer's memory
  Recipe recipe_;
  int64_t step_ = 0;
  double loss_ = 0;
  std::vector<double> shares_;  // of the elements that top-k should send, those it did, of each step
  bool stopped_ = false;
};

Reducer Trainer::MakeReducer(const Flags& flags, const Communicator& comm) {
  std::vector<GradientSpec> specs;
  for (const Parameter& parameter : Parameters())
    specs.push_back({parameter.name, parameter.count(), parameter.shape()});
  return Reducer::Create(comm, specs, {.compression = flags.compress}).value();
}

void Trainer::RegisterAndRestore(Checkpointer* checkpointer) {
  checkpointer_ = checkpointer;
  checkpointer->AddReplicated("model", model_.values()).ThrowIfError();
  checkpointer->AddReplicated("momentum", momentum_).ThrowIfError();
  if (flags_.adam) {
    checkpointer->AddReplicated("squares", squares_).ThrowIfError();
    checkpointer->AddReplicated("measured", std::span(&measured_, 1)).ThrowIfError();
  }
  checkpointer->AddReplicated("recipe", {&recipe_, sizeof(recipe_)}, {2}, DType::kInt64).ThrowIfError();
  checkpointer->AddReducer(reducer_).ThrowIfError();
  const std::optional<RestoredStep> restored = checkpointer->Restore().value();
  if (!restored) return;
  step_ = restored->step;
  if (recipe_.batch != flags_.batch || recipe_.seed != flags_.seed) {
    Status(StatusCode::kFailedPrecondition,
           "the checkpoint was trained with --batch " + std::to_string(recipe_.batch) + " --seed " +
               std::to_string(recipe_.seed) +
               ": pass the same, or start over with another checkpoint directory")
        .ThrowIfError();
  }
  if (session_.rank() == 0) std::printf("resumed at step %" PRId64 "\n", step_);
}

void Trainer::Run() {
  // Broadcasts the same values to all ranks, whatever the machines' standard libraries make of a seed.
  comm_->Broadcast(model_.values()).ThrowIfError();
  while (step_ < flags_.steps && !stopped_) {
    Step();
    if (session_.rank() == 0 && (step_ % 100 == 0 || step_ == flags_.steps)) {
      std::printf("step %" PRId64 "/%" PRId64 " loss %.4f\n", step_, flags_.steps, loss_);
    }
    stopped_ = checkpointer_->SaveIfDue(step_).value().stop;
  }
  // The last state is worth keeping whatever the interval.
  checkpointer_->Commit(step_).ThrowIfError();
}

void Trainer::Step() {
  // This rank's share of the global batch, at any number of ranks.
  const int64_t begin = flags_.batch * comm_->rank() / comm_->size();
  const int64_t end = flags_.batch * (comm_->rank() + 1) / comm_->size();
  std::vector<const uint8_t*> windows;
  for (int64_t i = begin; i < end; ++i) {
    windows.push_back(text_.classes.data() +
                      SamplePosition(static_cast<uint64_t>(flags_.seed), step_, i, text_.train - kContext));
  }
  double loss = model_.Forward(windows);
  model_.Backward(gradients_, [&](size_t i) { reducer_.Ready(i).ThrowIfError(); });
  comm_->AllReduce(std::span(&loss, 1)).ThrowIfError();
  const ReducedStep reduced = reducer_.Finish().value();
  if (const Selected& selected = reduced.selected; selected.wanted > 0) {
    shares_.push_back(static_cast<double>(selected.sent) / static_cast<double>(selected.wanted));
  }
  loss_ = loss / static_cast<double>(flags_.batch);
  Update(reduced);
  ++step_;
  session_.Report({.step = step_, .loss = loss_, .samples = end - begin});
}

// Half a cosine of learning rate. All ranks hold the same bits before and after.
void Trainer::Update(const ReducedStep& reduced) {
  const double done = static_cast<double>(step_) / static_cast<double>(flags_.steps);
  const auto rate = static_cast<float>(flags_.lr * 0.5 * (1 + std::cos(std::numbers::pi * done)));
  // The gradient is the mean over ranks of sums over samples.
  const auto scale = static_cast<float>(comm_->size() / static_cast<double>(flags_.batch));
  const float factor = flags_.momentum_correction ? 0 : kMomentum;
  // The square of a gradient that was taken out of a compressed momentum is mostly what compression lost.
  const bool measures = !reduced.momentum_travelled || measured_ == 0;
  if (flags_.adam && measures) ++measured_;
  const AdamStep adam{scale, rate, measures, step_ + 1, measured_};
  size_t at = 0;
  for (const std::span<float> gradient : gradients_) {
    const std::span<float> values = model_.values().subspan(at, gradient.size());
    const std::span<float> momentum = std::span(momentum_).subspan(at, gradient.size());
    if (flags_.adam) {
      DescendByAdam(values, momentum, std::span(squares_).subspan(at, gradient.size()), gradient, adam);
    } else {
      Descend(values, momentum, gradient, factor, scale, rate);
    }
    at += gradient.size();
  }
}

void Trainer::SaySelected() const {
  if (std::ssize(shares_) <= kFirstFew) return;
  std::vector<double> shares(shares_.begin() + kFirstFew, shares_.end());
  std::sort(shares.begin(), shares.end());
  std::printf("top-k sent %.3f to %.3f of the elements it should, in the median %.3f, in %zu steps\n",
              shares.front(), shares.back(), shares[shares.size() / 2], shares.size());
}

double Trainer::ValidationLoss() {
  const size_t rank = static_cast<size_t>(comm_->rank()), ranks = static_cast<size_t>(comm_->size());
  const size_t most = static_cast<size_t>(flags_.batch + comm_->size() - 1) / ranks;
  const size_t positions = text_.classes.size() - text_.train - kContext;
  double loss = 0;
  std::vector<const uint8_t*> windows;
  for (size_t i = rank; i < kValidationWindows; i += ranks) {
    windows.push_back(text_.classes.data() + text_.train + positions * i / kValidationWindows);
    if (windows.size() < most && i + ranks < kValidationWindows) continue;
    loss += model_.Forward(windows);
    windows.clear();
  }
  comm_->AllReduce(std::span(&loss, 1)).ThrowIfError();
  return loss / static_cast<double>(kValidationWindows);
}

int TrainMain(const Flags& flags) {
  const auto began = std::chrono::steady_clock::now();
  Text text = ReadText(flags.text, kClasses).value();
  const Session session = Session::Join().value();
  Communicator comm = Communicator::Create(session).value();
  Trainer trainer(flags, session, &comm, std::move(text));
  // These values are for a run outside gtrain; under gtrain the job file's uri and interval win.
  Checkpointer checkpointer =
      Checkpointer::Open(session, {.uri = "ckpt/char_lm", .every_steps = 500}).value();
  trainer.RegisterAndRestore(&checkpointer);
  trainer.Run();
  const bool leader = session.rank() == 0;
  if (trainer.stopped()) {
    if (leader) std::printf("stopped as asked; the state is saved\n");
    return 0;
  }
  const double loss = trainer.ValidationLoss();
  if (leader) {
    trainer.SaySelected();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("validation loss %.4f after %" PRId64 " steps on %d rank(s) in %.1f s\n", loss, flags.steps,
                comm.size(), took.count());
  }
  if (flags.max_loss == 0 || loss <= flags.max_loss) return 0;
  if (leader) std::fprintf(stderr, "char_lm: the loss is above --max-loss %.3f\n", flags.max_loss);
  return kExitFailed;
}

}  // namespace
}  // namespace gtrain::examples

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // lines reach the log as they happen
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 1 && (args[0] == "--help" || args[0] == "-h")) {
    std::fputs(gtrain::examples::kUsage, stdout);
    return 0;
  }
  gtrain::Result<gtrain::examples::Flags> flags = gtrain::examples::ParseFlags(args);
  if (!flags.ok()) {
    std::fprintf(stderr, "char_lm: %s\n%s", flags.status().message().c_str(), gtrain::examples::kUsage);
    return gtrain::examples::kExitUsage;
  }
  try {
    return gtrain::examples::TrainMain(*flags);
  } catch (const gtrain::Error& error) {
    std::fprintf(stderr, "char_lm: %s\n", error.status().message().c_str());
    return error.status().exit_code();  // 75 when another rank was lost: gtrain starts the next generation
  }
}
