// bench_train: time to a target loss. The model of examples/char_lm learns the King James text on two
// machines joined by a slow link (network namespaces, bursts of 8 KB), with float32 and compressed gradients;
// beside it the same model, samples and optimiser under PyTorch's DistributedDataParallel over Gloo (dense,
// its fp16 hook, its PowerSGD), in turns. A step that sends little is worth nothing if more of them are
// needed: this counts both. Needs root, ip(8), tc(8) and Debian's bible-kjv; the peers need Debian's torch.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "bench/network.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"
#include "comm/reducer/reducer.h"
#include "examples/char_lm/model.h"
#include "examples/char_lm/text.h"

namespace gtrain::bench {
namespace {

using examples::Model;

// All as in train_ddp.py.
constexpr int kRanks = 2, kSeed = 1, kStepsMax = 3000;
constexpr int kWindow = 10;      // the loss is the mean of so many steps
constexpr size_t kSamples = 64;  // of a rank and step
constexpr float kRate = 0.1f, kMomentum = 0.9f;
constexpr double kTarget = 2.2;  // nats a character, of the training text
constexpr absl::Duration kPatience = absl::Minutes(3);
constexpr int kPeerAttempts = 4;  // torch 1.13's PowerSGD hook loses a rank in many runs
constexpr char kPython[] = "/usr/bin/python3", kBible[] = "/usr/bin/bible";

constexpr const char* kOurs[] = {"none", "fp16", "powersgd rank=1 warmup=0", "topk density=0.01 warmup=0",
                                 "auto: fp16, onebit warmup=0, topk density=0.01 warmup=0"};
constexpr size_t kAuto = 4;
constexpr const char* kDdp[] = {"dense", "fp16", "powersgd"};

struct Link {
  const char* name;
  const char* rate;
};
constexpr Link kLinks[] = {{"100 Mbit/s", "100mbit"}, {"1 Gbit/s", "1gbit"}};

struct Reached {
  double seconds = 0;
  int steps = 0;
};

absl::Status Train(Communicator& c, const examples::Text& text, Reached* reached) {
  Model model(kSeed);
  std::vector<float> momentum(model.values().size());
  std::vector<GradientSpec> specs;
  for (const auto& parameter : examples::Parameters())
    specs.push_back({parameter.name, parameter.count(), parameter.shape()});
  GT_ASSIGN_OR_RETURN(const auto reducer, Reducer::Create(&c, specs));
  std::vector<std::span<float>> gradients;
  for (size_t i = 0; i < specs.size(); ++i) {
    const absl::Span<float> memory = reducer->gradient(i);
    gradients.emplace_back(memory.data(), memory.size());
  }
  GT_RETURN_IF_ERROR(c.Barrier());
  const Instant began = RealClock().Now();
  double loss = 0;
  for (int step = 1; step <= kStepsMax; ++step) {
    std::vector<const uint8_t*> windows;
    for (size_t i = 0; i < kSamples; ++i) {
      const auto sample = static_cast<int64_t>(i + kSamples * static_cast<size_t>(c.rank()));
      windows.push_back(text.classes.data() +
                        examples::SamplePosition(kSeed, step, sample, text.train - examples::kContext));
    }
    loss += model.Forward(windows) / (kSamples * kRanks * kWindow);
    absl::Status ready;
    model.Backward(gradients, [&](size_t i) {
      if (ready.ok()) ready = reducer->Ready(i);
    });
    GT_RETURN_IF_ERROR(ready);
    GT_RETURN_IF_ERROR(reducer->Finish().status());
    size_t at = 0;
    for (const std::span<float> gradient : gradients) {
      examples::Descend(model.values().subspan(at, gradient.size()),
                        std::span(momentum).subspan(at, gradient.size()), gradient, kMomentum,
                        1.0f / kSamples, kRate);
      at += gradient.size();
    }
    if (step % kWindow != 0) continue;
    GT_RETURN_IF_ERROR(c.AllReduce(&loss, 1, DType::kFloat64, ReduceOp::kSum));
    if (loss <= kTarget) {
      if (c.rank() == 0) *reached = {absl::ToDoubleSeconds(RealClock().Now() - began), step};
      return absl::OkStatus();
    }
    loss = 0;
  }
  return absl::OutOfRangeError(absl::StrCat("no loss of ", kTarget, " within ", kStepsMax, " steps"));
}

absl::StatusOr<Reached> Ours(const Network& network, const std::string& compression,
                             const examples::Text& text, Reached* shared) {
  comm::FakeWorld world({"a", "b"}, {Network::AddressOf(0), Network::AddressOf(1)});
  setenv("GTRAIN_COMPRESSION", compression.c_str(), 1);
  *shared = {};
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(network.Start(rank, [&, rank]() -> absl::Status {
      const auto bootstrap = world.Rank(rank);
      comm::ExecOptions options;
      options.user.timeout = kPatience;
      GT_ASSIGN_OR_RETURN(const auto communicator, comm::MakeCommunicator(bootstrap.get(), options));
      const absl::Status trained = Train(*communicator, text, shared);
      if (!trained.ok()) world.Revoke("a rank failed");
      return trained;
    }));
  }
  GT_RETURN_IF_ERROR(WaitForAll(ranks, "a rank of ours", kPatience));
  return *shared;
}

absl::StatusOr<Reached> Ddp(const Network& network, const std::string& folder, const std::string& method,
                            const std::string& text) {
  absl::Status last = absl::InternalError("DDP wrote nothing");
  const std::string file = "ddp";
  for (int attempt = 0; attempt < kPeerAttempts; ++attempt) {
    std::filesystem::remove(file);
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<std::string> line = network.Inside(rank);
      line.insert(line.end(), {"env", "GLOO_SOCKET_IFNAME=eth0", kPython, folder + "/../bench/train_ddp.py",
                               absl::StrCat(rank), Network::AddressOf(0), method, text, file});
      GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn(line));
      ranks.push_back(pid);
    }
    const absl::Status ended = WaitForAll(ranks, "a rank of DDP", kPatience);
    Reached reached;
    const auto said = ReadFile(file, 100);
    if (said.ok() && std::sscanf(said->c_str(), "%lf %d", &reached.seconds, &reached.steps) == 2)
      return reached;
    if (!ended.ok()) last = ended;
  }
  return last;
}

struct Measured {
  Series seconds, steps;
  void Add(const Reached& reached) {
    seconds.samples.push_back(reached.seconds);
    steps.samples.push_back(reached.steps);
  }
};

absl::Status MeasureLink(const Options& options, const Network& network, const Link& link,
                         const std::string& path, bool peers, Reached* shared,
                         std::vector<Outcome>* outcomes) {
  GT_RETURN_IF_ERROR(network.Limit(link.rate, "8kb"));
  GT_ASSIGN_OR_RETURN(const std::vector<double> us, network.PlainTcp({2 << 20}, 5));
  std::printf("%s: plain TCP %.0f Mbit/s; seconds (steps) to a loss of %g\n", link.name,
              (2 << 20) * 8 / us[0], kTarget);
  const Result<examples::Text> read = examples::ReadText(path, examples::kClasses);
  if (!read.ok()) return absl::NotFoundError(read.status().message());
  const examples::Text& text = *read;
  std::vector<Measured> ours(std::size(kOurs)), ddp(std::size(kDdp));
  for (int turn = 0; turn < (options.quick ? 1 : 7); ++turn) {
    for (size_t i = 0; i < std::size(kDdp) && peers; ++i) {
      const auto reached = Ddp(network, options.folder, kDdp[i], path);
      if (reached.ok()) {
        ddp[i].Add(*reached);
      } else {
        std::fprintf(stderr, "bench_train: DDP %s: %s\n", kDdp[i], reached.status().ToString().c_str());
      }
    }
    for (size_t i = 0; i < std::size(kOurs); ++i) {
      GT_ASSIGN_OR_RETURN(const Reached reached, Ours(network, kOurs[i], text, shared));
      ours[i].Add(reached);
    }
  }
  auto print = [&](const std::string& name, const Measured& measured) {
    if (measured.seconds.samples.empty()) return;
    std::printf("  %-60s %8.2f s (%.0f)\n", name.c_str(), measured.seconds.Median(), measured.steps.Median());
    if (&measured == &ours[kAuto]) return;
    outcomes->push_back({absl::StrCat("to the loss, ", link.name, ", auto"), "s", name, ours[kAuto].seconds,
                         measured.seconds});
  };
  for (size_t i = 0; i < std::size(kOurs); ++i) print(kOurs[i], ours[i]);
  for (size_t i = 0; i < std::size(kDdp); ++i) print(absl::StrCat("DDP ", kDdp[i]), ddp[i]);
  return absl::OkStatus();
}

absl::Status MeasureAll(const Options& options, const Network& network, const Home& home,
                        std::vector<Outcome>* outcomes) {
  const std::string text = home.path() + "/kjv.txt";
  GT_RETURN_IF_ERROR(
      Run({"/bin/sh", "-c", absl::StrCat(kBible, " -f gen1:1-rev22:21 | cut -d' ' -f2- > ", text)}));
  void* page = mmap(nullptr, sizeof(Reached), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap");
  const bool peers =
      !(options.quick && options.only.empty()) && Run({kPython, "-c", "import torch.distributed"}).ok();
  if (!peers) std::fprintf(stderr, "bench_train: without DDP: --quick alone, or %s has no torch\n", kPython);
  for (const Link& link : kLinks) {
    if (!options.only.empty() ? options.only != link.rate
                              : options.quick && absl::string_view(link.rate) != "1gbit")
      continue;
    GT_RETURN_IF_ERROR(
        MeasureLink(options, network, link, text, peers, static_cast<Reached*>(page), outcomes));
  }
  return absl::OkStatus();
}

int Main(Options options) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // each line when it is known
  if (!options.json.empty()) options.json = std::filesystem::absolute(options.json).string();
  if (!Executable(kBible)) {
    std::fprintf(stderr,
                 "bench_train: nothing measured: bible-kjv is not installed (tools/install.sh --bench)\n");
    return 0;
  }
  Network network(kRanks);
  if (const absl::Status made = network.Make(); !made.ok()) {
    std::fprintf(stderr, "bench_train: nothing measured: %s\n", made.ToString().c_str());
    return absl::IsFailedPrecondition(made) ? 0 : 1;
  }
  Home home;
  std::vector<Outcome> outcomes;
  absl::Status status = home.Make();
  if (status.ok()) status = MeasureAll(options, network, home, &outcomes);
  home.Remove();
  if (!status.ok()) std::fprintf(stderr, "bench_train: %s\n", status.ToString().c_str());
  const int reported = outcomes.empty() ? 1 : Report(options, "train", outcomes);
  return status.ok() ? reported : 1;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) {
  std::vector<std::string> links;
  for (const auto& link : gtrain::bench::kLinks) links.push_back(link.rate);
  return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv, links));
}
