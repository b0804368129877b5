// bench_convergence: what compression costs in accuracy. examples/fashion_mnist on four ranks, dense and with
// each codec, with the same seeds one after the other; the figure is the share of test images it gets wrong.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"

namespace gtrain::bench {
namespace {

constexpr const char* kCodecs[] = {"topk:0.01", "onebit", "int8"};

class Training {
 public:
  Training(const std::string& folder, int epochs)
      : gtrain_(std::filesystem::absolute(folder + "/gtrain")),
        example_(std::filesystem::absolute(folder + "/../examples/fashion_mnist")),
        epochs_(epochs) {}

  bool possible() const { return Executable(example_); }
  const std::string& example() const { return example_; }

  // Percent of the test images.
  absl::StatusOr<double> Wrong(const std::string& codec, int seed) const {
    Home home;
    GT_RETURN_IF_ERROR(home.Make());
    const absl::Status ran =
        Run({"/bin/sh", "-c",
             absl::StrCat("exec ", gtrain_, " launch -n 4 -- ", example_, " --epochs ", epochs_, " --seed ",
                          seed, " --compress ", codec, " > said 2>&1")},
            absl::Minutes(5));
    std::ifstream file(home.path() + "/said");
    std::stringstream said;
    said << file.rdbuf();
    home.Remove();
    GT_RETURN_IF_ERROR(ran);
    const std::string text = said.str(), mark = "test accuracy ";
    double accuracy = 0;
    const size_t at = text.find(mark);
    if (at == std::string::npos || !absl::SimpleAtod(text.substr(at + mark.size(), 6), &accuracy)) {
      return absl::DataLossError(absl::StrCat("no accuracy in what it said:\n", text));
    }
    return 100 * (1 - accuracy);
  }

 private:
  const std::string gtrain_, example_;
  const int epochs_;
};

int Main(const Options& options) {
  // Each training works in a folder of its own.
  const std::string json = options.json.empty() ? "" : std::filesystem::absolute(options.json).string();
  const Training training(options.folder, options.quick ? 1 : 3);
  if (!training.possible()) {
    std::fprintf(stderr, "bench_convergence: %s is not there: libtorch was missing when this was built\n",
                 training.example().c_str());
    return 1;
  }
  std::vector<Outcome> outcomes;
  for (const char* codec : kCodecs) {
    outcomes.push_back({absl::StrCat("fashion-MNIST, 4 ranks, ", codec), "% wrong", "dense float32", {}, {}});
  }
  auto wrong = [&](const char* codec, int seed) -> double {
    const absl::StatusOr<double> share = training.Wrong(codec, seed);
    if (share.ok()) return *share;
    std::fprintf(stderr, "bench_convergence: %s, seed %d: %s\n", codec, seed,
                 share.status().ToString().c_str());
    return -1;
  };
  for (int seed = 1; seed <= (options.quick ? 1 : 3); ++seed) {
    const double dense = wrong("none", seed);
    if (dense < 0) return 1;
    for (size_t i = 0; i < std::size(kCodecs); ++i) {
      const double ours = wrong(kCodecs[i], seed);
      if (ours < 0) return 1;
      outcomes[i].theirs.samples.push_back(dense);
      outcomes[i].ours.samples.push_back(ours);
    }
  }
  Options report = options;
  report.json = json;
  return Report(report, "convergence", outcomes);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
