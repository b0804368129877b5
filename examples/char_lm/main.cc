// Trains a language model of characters, data-parallel over the ranks of a gtrain job: an example of a model
// without any framework on gtrain::Elastic, whose ranks may come and go. With `mesh: {dp: 2, tp: 2}` in the
// job file two ranks have a copy of the model together, each a half of its widest layers.
//
//   bible -f gen1:1-rev22:21 | cut -d' ' -f2- > kjv.txt      (Debian's bible-kjv; any text will do)
//   gtrain launch -n 4 -- build/examples/char_lm --text kjv.txt --compress 'topk density=0.01'
//
// The run owns the gradients' memory; backward writes there and says of each gradient when it is
// complete. --compress sends less of them. The part that a step did not send is carried over to the next one
// (error feedback), to the next generation of ranks, and saved with the model; --error-feedback no shows what
// becomes of a training without. With --momentum-correction yes top-k selects from each rank's momentum
// (DGC), and the optimiser here has none. --optimizer adam with 'onebit warmup=N' is 1-bit Adam: its variance
// is that of the warm-up, see Update().
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
constexpr int64_t kValidationWindows = 20'480, kValidationBatch = 256;

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
  bool show_residual = false;
};

constexpr char kUsage[] =
    "usage: char_lm --text FILE [--steps N] [--batch N] [--optimizer sgd|adam] [--lr X] [--seed N]\n"
    "               [--max-loss X] [--compress WORDS] [--error-feedback yes|no]\n"
    "               [--momentum-correction no|yes] [--show-residual no|yes]\n"
    "  --batch is the global batch; --max-loss makes the exit code 1 when the validation loss is above it.\n"
    "  --show-residual: what error feedback holds back, before and behind each change of ranks.\n"
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
    } else if (name == "--show-residual") {
      ok = ParseYesNo(value, &flags.show_residual);
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

// Trains on one rank, whichever ranks there are.
class Trainer {
 public:
  // `text` and `model` outlive `run`, and this does what the run does.
  Trainer(Elastic& run, const Flags& flags, const Text& text, Model& model);

  Status Train();
  // The mean loss over the validation part, in nats a character.
  Result<double> ValidationLoss();
  // How well this rank's top-k kept to its density, if it was used, but for the first few steps.
  void SaySelected() const;

 private:
  Status OneStep(Step& step);
  void Update(const Step& step) noexcept;
  void SayResidual(const Step& step);

  Elastic& run_;
  const Flags& flags_;
  const Text& text_;
  Model& model_;
  std::vector<float> momentum_, squares_;  // the latter of Adam
  const std::span<int64_t> measured_;      // one: the steps in which squares_ were
  ElasticGradients& reduced_;
  std::vector<std::span<float>> gradients_;  // its memory
  std::vector<double> shares_;  // of the elements that top-k should send, those it did, of each step
  bool began_ = false;
  std::optional<double> held_back_;  // behind the last step
  uint64_t generation_ = 0;          // in which the last step was computed
};

std::vector<std::vector<int64_t>> Shapes(const Model& model) {
  std::vector<std::vector<int64_t>> shapes;
  for (const Parameter& parameter : model.parameters()) shapes.push_back(parameter.shape());
  return shapes;
}

// Of each parameter `all` has one value an element.
void Register(Elastic& run, const Model& model, const std::string& what, std::span<float> all) {
  size_t at = 0;
  for (size_t i = 0; i < Parameters().size(); ++i) {
    const Parameter& whole = Parameters()[i];
    const std::span<float> part = all.subspan(at, model.parameters()[i].count());
    at += part.size();
    if (whole.cut) {
      run.Sharded(what + whole.name, part, whole.shape(), {.splits = {{*whole.cut, "tp"}}});
    } else {
      run.Replicated(what + whole.name, part, whole.shape());
    }
  }
}

// The sums over the ranks that have the other parts of the model, for one computation.
class Others {
 public:
  explicit Others(const Elastic& run) : comm_(run.Along("tp")) {}
  SumParts sum() {
    return [this](std::span<float> values) {
      if (status_.ok()) status_ = comm_.ok() ? comm_->AllReduce(values) : comm_.status();
    };
  }
  const Status& status() const { return status_; }

 private:
  Result<Communicator> comm_;
  Status status_;
};

constexpr auto kZeros = [](auto all) { std::ranges::fill(all, 0); };

Trainer::Trainer(Elastic& run, const Flags& flags, const Text& text, Model& model)
    : run_(run),
      flags_(flags),
      text_(text),
      model_(model),
      momentum_(model.values().size()),
      squares_(flags.adam ? momentum_.size() : 0),
      measured_(run.Replicated<int64_t>("measured", 1, kZeros)),
      reduced_(run.ReduceTensors(Shapes(model))) {
  Register(run, model, "model/", model.values());
  Register(run, model, "momentum/", momentum_);
  if (flags.adam) Register(run, model, "squares/", squares_);
  for (size_t i = 0; i < reduced_.size(); ++i) gradients_.push_back(reduced_[i]);
  // For a run outside gtrain; what the job file says wins.
  run.Checkpoint({.uri = "ckpt/char_lm", .every_steps = 500});
  run.Compress(flags.compress);
}

// Each batch is drawn anew, so an epoch is one of them: sample i is the i-th window of its step.
Status Trainer::Train() {
  const auto batches = run_.Samples({.samples = flags_.batch,
                                     .epochs = flags_.steps,
                                     .global_batch = flags_.batch,
                                     .seed = static_cast<uint64_t>(flags_.seed),
                                     .shuffle = false});
  return run_.Train(batches, [&](Step& step) { return OneStep(step); });
}

Status Trainer::OneStep(Step& step) {
  const bool leader = run_.session().rank() == 0;
  if (!std::exchange(began_, true) && step.number() > 1 && leader)
    std::printf("resumed at step %" PRId64 "\n", step.number() - 1);
  if (flags_.show_residual) SayResidual(step);
  std::vector<const uint8_t*> windows;
  for (const int64_t i : step.samples()) {
    windows.push_back(text_.classes.data() + SamplePosition(static_cast<uint64_t>(flags_.seed),
                                                            step.number() - 1, i, text_.train - kContext));
  }
  Others others(run_);
  const double loss = model_.Forward(windows, others.sum());
  model_.Backward(
      gradients_, [&](size_t i) { reduced_.Ready(i); }, others.sum());
  if (!others.status().ok()) return others.status();
  const Status applied = step.Apply(reduced_, loss, [&]() noexcept { Update(step); });
  if (!applied.ok()) return applied;
  if (const Selected selected = step.reduced().selected; selected.wanted > 0)
    shares_.push_back(static_cast<double>(selected.sent) / static_cast<double>(selected.wanted));
  if (flags_.show_residual) held_back_ = run_.residual().value().norm;
  if (leader && step.loss() && (step.number() % 100 == 0 || step.number() == step.steps())) {
    std::printf("step %" PRId64 "/%" PRId64 " loss %.4f\n", step.number(), step.steps(), *step.loss());
  }
  return Status();
}

// Half a cosine of learning rate. All ranks hold the same bits before and after.
void Trainer::Update(const Step& step) noexcept {
  const double done = static_cast<double>(step.number() - 1) / static_cast<double>(step.steps());
  const auto rate = static_cast<float>(flags_.lr * 0.5 * (1 + std::cos(std::numbers::pi * done)));
  const float factor = flags_.momentum_correction ? 0 : kMomentum;
  // The square of a gradient that was taken out of a compressed momentum is mostly what compression lost.
  const bool measures = !step.reduced().momentum_travelled || measured_[0] == 0;
  if (measures) ++measured_[0];
  const AdamStep adam{.rate = rate, .measures = measures, .steps = step.number(), .measured = measured_[0]};
  size_t at = 0;
  for (const std::span<float> gradient : gradients_) {
    const std::span<float> values = model_.values().subspan(at, gradient.size());
    const std::span<float> momentum = std::span(momentum_).subspan(at, gradient.size());
    if (flags_.adam) {
      DescendByAdam(values, momentum, std::span(squares_).subspan(at, gradient.size()), gradient, adam);
    } else {
      Descend(values, momentum, gradient, factor, 1, rate);
    }
    at += gradient.size();
  }
}

// What compression held back goes from generation to generation with its rank.
void Trainer::SayResidual(const Step& step) {
  const uint64_t generation = run_.session().generation();
  if (std::exchange(generation_, generation) == generation || !held_back_) return;
  const Elastic::Residual now = run_.residual().value();
  std::printf("step %" PRId64 ", generation %" PRIu64
              " of %d rank(s): %.6g of %.6g held back goes on here, %" PRId64 " rank(s) took theirs along\n",
              step.number(), generation, run_.session().world_size(), now.norm, *held_back_, now.lost);
}

void Trainer::SaySelected() const {
  if (std::ssize(shares_) <= kFirstFew) return;
  std::vector<double> shares(shares_.begin() + kFirstFew, shares_.end());
  std::sort(shares.begin(), shares.end());
  std::printf("top-k sent %.3f to %.3f of the elements it should, in the median %.3f, in %zu steps\n",
              shares.front(), shares.back(), shares[shares.size() / 2], shares.size());
}

Result<double> Trainer::ValidationLoss() {
  const auto positions = static_cast<int64_t>(text_.classes.size() - text_.train - kContext);
  const Result<double> loss =
      run_.Evaluate(kValidationWindows, [&](int64_t begin, int64_t end) -> Result<double> {
        double sum = 0;
        Others others(run_);
        while (begin < end) {
          std::vector<const uint8_t*> windows;
          for (; begin < end && std::ssize(windows) < kValidationBatch; ++begin)
            windows.push_back(text_.classes.data() + text_.train + positions * begin / kValidationWindows);
          sum += model_.Forward(windows, others.sum());
        }
        if (!others.status().ok()) return others.status();
        return sum;
      });
  if (!loss.ok()) return loss.status();
  return *loss / static_cast<double>(kValidationWindows);
}

Status TrainText(Elastic& run, const Flags& flags, const Text& text) {
  const auto began = std::chrono::steady_clock::now();
  const Result<LocalBox> part = run.LocalPart({static_cast<int64_t>(kHidden)}, {.splits = {{0, "tp"}}});
  if (!part.ok()) return part.status();
  const HiddenPart hidden{static_cast<size_t>(part->begin[0]), static_cast<size_t>(part->shape[0])};
  if (hidden.count % kHiddenUnit != 0 || kHidden % hidden.count != 0)
    return Wrong("the axis tp of the mesh divides " + std::to_string(kHidden / kHiddenUnit));
  Model model(static_cast<uint64_t>(flags.seed), hidden);
  Trainer trainer(run, flags, text, model);
  if (const Status trained = trainer.Train(); !trained.ok()) return trained;
  if (run.stopped()) {
    if (run.session().rank() == 0) std::printf("stopped as asked; the state is saved\n");
    return Status();
  }
  const Result<double> loss = trainer.ValidationLoss();
  if (!loss.ok()) return loss.status();
  if (run.session().rank() == 0) {
    trainer.SaySelected();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("validation loss %.4f after %" PRId64 " steps on %d rank(s) in %.1f s\n", *loss, flags.steps,
                run.session().world_size(), took.count());
  }
  // A loss that is not a number is above it, too.
  if (flags.max_loss == 0 || *loss <= flags.max_loss) return Status();
  return Status(StatusCode::kFailedPrecondition, "the validation loss is above --max-loss");
}

}  // namespace
}  // namespace gtrain::examples

int main(int argc, char** argv) {
  using namespace gtrain::examples;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // lines reach the log as they happen
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 1 && (args[0] == "--help" || args[0] == "-h")) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  const gtrain::Result<Flags> flags = ParseFlags(args);
  if (!flags.ok()) {
    std::fprintf(stderr, "char_lm: %s\n%s", flags.status().message().c_str(), kUsage);
    return kExitUsage;
  }
  // Before Main: a process that comes up beside the others has all this when it joins, and nobody waits.
  const gtrain::Result<Text> text = ReadText(flags->text, kClasses);
  if (!text.ok()) {
    std::fprintf(stderr, "char_lm: %s\n", text.status().message().c_str());
    return kExitFailed;
  }
  return gtrain::Main(argc, argv, [&](gtrain::Elastic& run) { return TrainText(run, *flags, *text); });
}
