// Trains a language model of characters, data-parallel over the ranks of a gtrain job: what a model without
// any framework has to do to use gtrain::Reducer.
//
//   bible -f gen1:1-rev22:21 | cut -d' ' -f2- > kjv.txt      (Debian's bible-kjv; any text will do)
//   gtrain launch -n 4 -- build/examples/char_lm --text kjv.txt --compress 'topk density=0.01'
//
// The reducer owns the gradients' memory; backward writes there and says of each gradient when it is
// complete.
// --compress sends less of them. What a step did not send is carried over to the next one (error feedback),
// and saved with the model; --error-feedback no shows what becomes of a training without. With
// --momentum-correction yes top-k selects from each rank's momentum (DGC), and the optimiser here has none.
// --optimizer adam with 'onebit warmup=N' is 1-bit Adam: its variance is that of the warm-up, see Update().
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numbers>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "examples/char_lm/model.h"
#include "examples/char_lm/text.h"
#include "gtrain/checkpoint.h"
#include "gtrain/communicator.h"
#include "gtrain/reducer.h"
#include "gtrain/session.h"

namespace gtrain::examples {
namespace {

constexpr int kExitFailed = 1, kExitUsage = 2;
constexpr int kExitRunMeAgain = 75;  // another rank was lost: gtrain starts the next generation
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
  const absl::StatusOr<CompressionPolicy> policy = ParseCompression(value);
  if (!policy.ok() || policy->automatic) return false;  // automatic: for the job file
  if (!policy->codecs.empty()) *options = policy->codecs[0];
  return true;
}

absl::StatusOr<Flags> ParseFlags(const std::vector<std::string>& args) {
  Flags flags;
  for (size_t i = 0; i < args.size(); i += 2) {
    if (i + 1 == args.size()) return absl::InvalidArgumentError(absl::StrCat(args[i], " needs a value"));
    const std::string& name = args[i];
    const std::string& value = args[i + 1];
    bool ok = true;
    if (name == "--text") {
      flags.text = value;
    } else if (name == "--steps") {
      ok = absl::SimpleAtoi(value, &flags.steps) && flags.steps > 0;
    } else if (name == "--batch") {
      ok = absl::SimpleAtoi(value, &flags.batch) && flags.batch > 0;
    } else if (name == "--optimizer") {
      flags.adam = value == "adam";
      ok = flags.adam || value == "sgd";
    } else if (name == "--lr") {
      ok = absl::SimpleAtod(value, &flags.lr) && flags.lr > 0 && std::isfinite(flags.lr);
    } else if (name == "--seed") {
      ok = absl::SimpleAtoi(value, &flags.seed);
    } else if (name == "--max-loss") {
      ok = absl::SimpleAtod(value, &flags.max_loss) && flags.max_loss > 0;
    } else if (name == "--compress") {
      ok = ParseCompress(value, &flags.compress);
    } else if (name == "--error-feedback") {
      ok = ParseYesNo(value, &flags.error_feedback);
    } else if (name == "--momentum-correction") {
      ok = ParseYesNo(value, &flags.momentum_correction);
    } else {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag ", name));
    }
    if (!ok) return absl::InvalidArgumentError(absl::StrCat("bad value for ", name, ": ", value));
  }
  if (flags.text.empty()) return absl::InvalidArgumentError("--text FILE is needed");
  if (flags.lr == 0) flags.lr = flags.adam ? 0.004 : 0.1;
  flags.compress.error_feedback = flags.error_feedback;
  if (flags.momentum_correction) {
    if (flags.compress.codec != Codec::kTopK)
      return absl::InvalidArgumentError("--momentum-correction is for topk");
    if (flags.adam) return absl::InvalidArgumentError("--momentum-correction is for --optimizer sgd");
    flags.compress.momentum = kMomentum;
  }
  return flags;
}

// Where training is. Saved with the parameters; `batch` and `seed` say what `step` means.
struct Cursor {
  int64_t step = 0;
  int64_t batch = 0;
  int64_t seed = 0;
};

class Trainer {
 public:
  Trainer(const Flags& flags, Session* session, Communicator* comm, Text text)
      : flags_(flags),
        session_(session),
        comm_(comm),
        text_(std::move(text)),
        model_(static_cast<size_t>((flags.batch + comm->size() - 1) / comm->size()),
               static_cast<uint64_t>(flags.seed)),
        momentum_(model_.values().size()),
        squares_(flags.adam ? momentum_.size() : 0) {
    cursor_.batch = flags.batch;
    cursor_.seed = flags.seed;
  }

  absl::Status MakeReducer();
  absl::Status RegisterAndRestore(Checkpointer* checkpointer);
  // Before each save: what compression carries over, into the registered memory.
  absl::Status ExportCarried() { return reducer_->ExportCarried(absl::MakeSpan(carried_)); }
  // Until the last step, or until all ranks agreed to stop (then `stopped()`).
  absl::Status Run();
  // Mean over the validation part, in nats a character.
  absl::StatusOr<double> ValidationLoss();
  bool stopped() const { return stopped_; }
  // How well this rank's top-k kept to its density, if it was used, but for the first few steps.
  void SaySelected() const;

 private:
  // What the ranks add up beside the gradients.
  enum Extra { kLoss, kStop, kExtras };

  absl::Status Step();
  void Update(const ReducedStep& reduced);

  const Flags& flags_;
  Session* const session_;
  Communicator* const comm_;
  Checkpointer* checkpointer_ = nullptr;
  const Text text_;
  Model model_;
  std::vector<float> momentum_;
  std::vector<float> squares_;  // Adam's
  int64_t measured_ = 0;        // the steps in which they were
  std::unique_ptr<Reducer> reducer_;
  std::vector<absl::Span<float>> gradients_;  // the reducer's memory
  std::vector<float> carried_;                // by compression, as of the newest save
  Cursor cursor_;
  double loss_ = 0;
  std::vector<double> shares_;  // of the elements that top-k should send, those it did, of each step
  bool stopped_ = false;
};

absl::Status Trainer::MakeReducer() {
  std::vector<GradientSpec> specs;
  for (const Parameter& parameter : Parameters())
    specs.push_back({parameter.name, parameter.count(), parameter.shape()});
  ReducerOptions options;
  options.compression = flags_.compress;
  auto reducer = Reducer::Create(comm_, specs, options);
  if (!reducer.ok()) return reducer.status();
  reducer_ = *std::move(reducer);
  for (size_t i = 0; i < specs.size(); ++i) gradients_.push_back(reducer_->gradient(i));
  carried_.resize(reducer_->CarriedCount());
  return absl::OkStatus();
}

absl::Status Trainer::RegisterAndRestore(Checkpointer* checkpointer) {
  checkpointer_ = checkpointer;
  const auto count = static_cast<int64_t>(momentum_.size());
  const auto memory = [](auto&& values) { return Memory{values.data(), values.size() * sizeof(float)}; };
  absl::Status s = checkpointer_->AddReplicated("model", memory(model_.values()), {count}, DType::kFloat32);
  if (!s.ok()) return s;
  s = checkpointer_->AddReplicated("momentum", memory(momentum_), {count}, DType::kFloat32);
  if (!s.ok()) return s;
  if (flags_.adam) {
    s = checkpointer_->AddReplicated("squares", memory(squares_), {count}, DType::kFloat32);
    if (!s.ok()) return s;
    s = checkpointer_->AddReplicated("measured", {&measured_, sizeof(measured_)}, {1}, DType::kInt64);
    if (!s.ok()) return s;
  }
  static_assert(sizeof(Cursor) == 3 * sizeof(int64_t));
  s = checkpointer_->AddReplicated("cursor", {&cursor_, sizeof(cursor_)}, {3}, DType::kInt64);
  if (!s.ok()) return s;
  if (const std::string& name = reducer_->CarriedName(); !name.empty()) {
    s = checkpointer_->AddPerRank(name, memory(carried_));
    if (!s.ok()) return s;
  }
  absl::StatusOr<std::optional<RestoredStep>> restored = checkpointer_->Restore();
  if (!restored.ok() || !restored->has_value()) return restored.status();
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
  // The same values everywhere, whatever the machines' standard libraries make of a seed.
  absl::Status s = comm_->Broadcast(model_.values().data(), momentum_.size(), DType::kFloat32, 0);
  while (s.ok() && cursor_.step < flags_.steps && !stopped_) {
    s = Step();
    if (!s.ok() || stopped_) break;
    if (session_->rank() == 0 && (cursor_.step % 100 == 0 || cursor_.step == flags_.steps)) {
      std::printf("step %" PRId64 "/%" PRId64 " loss %.4f\n", cursor_.step, flags_.steps, loss_);
    }
    s = checkpointer_->SaveIfDue(cursor_.step, comm_).status();
  }
  // The last state is worth keeping whatever the interval.
  if (s.ok()) s = checkpointer_->Wait(absl::Minutes(2));
  if (s.ok()) s = checkpointer_->Save(cursor_.step).status();
  return s.ok() ? checkpointer_->Wait(absl::Minutes(2)) : s;
}

absl::Status Trainer::Step() {
  // This rank's share of the global batch, at any number of ranks.
  const int64_t begin = flags_.batch * comm_->rank() / comm_->size();
  const int64_t end = flags_.batch * (comm_->rank() + 1) / comm_->size();
  std::vector<const uint8_t*> windows;
  for (int64_t i = begin; i < end; ++i) {
    windows.push_back(text_.classes.data() + SamplePosition(static_cast<uint64_t>(flags_.seed), cursor_.step,
                                                            i, text_.train - kContext));
  }
  double extras[kExtras] = {};
  extras[kLoss] = model_.Forward(windows);
  extras[kStop] = session_->StopRequested() ? 1 : 0;
  absl::Status hooks;
  model_.Backward(gradients_, [&](size_t i) {
    if (hooks.ok()) hooks = reducer_->Ready(i);
  });
  if (!hooks.ok()) return hooks;
  absl::Status s = comm_->AllReduce(extras, kExtras, DType::kFloat64, ReduceOp::kSum);
  if (!s.ok()) return s;
  absl::StatusOr<ReducedStep> reduced = reducer_->Finish();
  if (!reduced.ok()) return reduced.status();
  if (const Selected& selected = reduced->selected; selected.wanted > 0) {
    shares_.push_back(static_cast<double>(selected.sent) / static_cast<double>(selected.wanted));
  }
  loss_ = extras[kLoss] / static_cast<double>(flags_.batch);
  stopped_ = extras[kStop] > 0;  // the same sum everywhere, so all ranks stop after the same step
  Update(*reduced);
  ++cursor_.step;
  session_->Report({.step = cursor_.step, .loss = loss_, .samples = end - begin});
  return absl::OkStatus();
}

// Half a cosine of learning rate. All ranks hold the same bits before and after.
void Trainer::Update(const ReducedStep& reduced) {
  const double done = static_cast<double>(cursor_.step) / static_cast<double>(flags_.steps);
  const auto rate = static_cast<float>(flags_.lr * 0.5 * (1 + std::cos(std::numbers::pi * done)));
  // The gradient is the mean over ranks of sums over samples.
  const auto scale = static_cast<float>(comm_->size() / static_cast<double>(flags_.batch));
  const float factor = flags_.momentum_correction ? 0 : kMomentum;
  // The square of a gradient that was taken out of a compressed momentum is mostly what compression lost.
  const bool measures = !reduced.momentum_travelled || measured_ == 0;
  if (flags_.adam && measures) ++measured_;
  const AdamStep adam{scale, rate, measures, cursor_.step + 1, measured_};
  size_t at = 0;
  for (const absl::Span<float> gradient : gradients_) {
    const absl::Span<float> values = model_.values().subspan(at, gradient.size());
    const absl::Span<float> momentum = absl::MakeSpan(momentum_).subspan(at, gradient.size());
    if (flags_.adam) {
      DescendByAdam(values, momentum, absl::MakeSpan(squares_).subspan(at, gradient.size()), gradient, adam);
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

absl::StatusOr<double> Trainer::ValidationLoss() {
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
  absl::Status s = comm_->AllReduce(&loss, 1, DType::kFloat64, ReduceOp::kSum);
  if (!s.ok()) return s;
  return loss / static_cast<double>(kValidationWindows);
}

int Explain(const absl::Status& status) {
  std::fprintf(stderr, "char_lm: %s\n", std::string(status.message()).c_str());
  return absl::IsUnavailable(status) ? kExitRunMeAgain : kExitFailed;
}

int TrainMain(const Flags& flags) {
  const absl::Time began = absl::Now();
  absl::StatusOr<Text> text = ReadText(flags.text, kClasses);
  if (!text.ok()) return Explain(text.status());
  absl::StatusOr<std::unique_ptr<Session>> session = Session::Join();
  if (!session.ok()) return Explain(session.status());
  absl::StatusOr<std::unique_ptr<Communicator>> comm = (*session)->MakeCommunicator();
  if (!comm.ok()) return Explain(comm.status());

  Trainer trainer(flags, session->get(), comm->get(), *std::move(text));
  if (absl::Status s = trainer.MakeReducer(); !s.ok()) return Explain(s);
  CheckpointOptions options;
  options.every_steps = 500;
  options.uri = "ckpt/char_lm";  // by hand; under gtrain the job file's place and interval win
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
  absl::StatusOr<double> loss = trainer.ValidationLoss();
  if (!loss.ok()) return Explain(loss.status());
  if (leader) {
    trainer.SaySelected();
    std::printf("validation loss %.4f after %" PRId64 " steps on %d rank(s) in %.1f s\n", *loss, flags.steps,
                (*comm)->size(), absl::ToDoubleSeconds(absl::Now() - began));
  }
  if (flags.max_loss == 0 || *loss <= flags.max_loss) return 0;
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
  absl::StatusOr<gtrain::examples::Flags> flags = gtrain::examples::ParseFlags(args);
  if (!flags.ok()) {
    std::fprintf(stderr, "char_lm: %s\n%s", std::string(flags.status().message()).c_str(),
                 gtrain::examples::kUsage);
    return gtrain::examples::kExitUsage;
  }
  return gtrain::examples::TrainMain(*flags);
}
