// bench_checkpoint_rgw: what checkpoints to a real object store cost a training. examples/fashion_mnist on
// four ranks, saving every 50 steps to Ceph's S3 gateway on this machine, in turns with the same job without
// saves (but for one at its end, to a folder). The figure is the job's own time, reading its data included.
// The gateway runs during both; its work for a save competes with the ranks for the cores.
#include <signal.h>
#include <stdlib.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"

namespace gtrain::bench {
namespace {

constexpr absl::Duration kGatewayStart = absl::Seconds(120);

std::string Content(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// tests/s3/rgw.py as a child of ours.
class Gateway {
 public:
  ~Gateway() {
    const absl::Cleanup clear = [&] {
      if (!folder_.empty()) std::filesystem::remove_all(folder_);
    };
    if (pid_ <= 0) return;
    kill(pid_, SIGTERM);
    if (const absl::Status ended = WaitFor(pid_, "the gateway"); !ended.ok()) {
      std::fprintf(stderr, "bench_checkpoint_rgw: %s\n", ended.ToString().c_str());
    }
  }
  // Its keys and address are in the environment afterwards.
  absl::Status Start(const std::string& script) {
    std::string folder = (std::filesystem::temp_directory_path() / "gt-rgw-XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) return ErrnoStatus(errno, "mkdtemp");
    folder_ = folder;
    GT_ASSIGN_OR_RETURN(pid_, Spawn({"nice", "-n", "19", "/usr/bin/python3", script, folder}));
    const RealClock clock;
    const Instant give_up = clock.Now() + kGatewayStart;
    const std::string ready = folder + "/env";
    while (!std::filesystem::exists(ready)) {
      if (kill(pid_, 0) != 0 || clock.Now() > give_up) {
        return absl::UnavailableError("Ceph's gateway did not start; `make test-s3` installs and tests it");
      }
      absl::SleepFor(absl::Milliseconds(50));
    }
    const std::string text = Content(ready);
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      const std::pair<std::string, std::string> pair = absl::StrSplit(line, absl::MaxSplits('=', 1));
      setenv(pair.first.c_str(), pair.second.c_str(), 1);
    }
    return absl::OkStatus();
  }

 private:
  std::string folder_;
  pid_t pid_ = 0;
};

class Training {
 public:
  explicit Training(const LocalCluster& cluster, std::string example)
      : cluster_(cluster), example_(std::move(example)) {}

  // Milliseconds a step; `checkpoint` as in a job file.
  absl::StatusOr<double> StepTime(const std::string& name, const std::string& checkpoint) const {
    {
      std::ofstream job(name + ".yaml");
      job << "name: " << name << "\nrun: " << example_ << " --epochs 1\nranks: 4\n"
          << "env: {AWS_ENDPOINT_URL: \"" << getenv("AWS_ENDPOINT_URL") << "\"}\n"
          << "secrets: {AWS_ACCESS_KEY_ID: {env: AWS_ACCESS_KEY_ID},"
          << " AWS_SECRET_ACCESS_KEY: {env: AWS_SECRET_ACCESS_KEY}}\ncheckpoint: " << checkpoint << "\n";
    }
    const absl::Status ran = Run(
        {"/bin/sh", "-c",
         absl::StrCat("exec ", cluster_.gtrain(), " launch --fresh ", name, ".yaml > said 2>&1 < /dev/null")},
        absl::Minutes(5));
    const std::string said = Content("said"), mark = " s, ";
    if (!ran.ok()) return absl::InternalError(absl::StrCat(ran.message(), "\n", said));
    std::printf("%s: %zu saves committed\n", name.c_str(),
                std::vector<std::string>(absl::StrSplit(said, " is committed as ")).size() - 1);
    const size_t at = said.rfind(mark);
    const std::string rest = at == std::string::npos ? "" : said.substr(at + mark.size());
    double ms = 0;
    if (!absl::SimpleAtod(rest.substr(0, rest.find(' ')), &ms)) {
      return absl::DataLossError(absl::StrCat("no time in what it said:\n", said));
    }
    return ms;
  }

 private:
  const LocalCluster& cluster_;
  const std::string example_;
};

absl::StatusOr<std::vector<Outcome>> MeasureAll(const Options& options) {
  const std::string example = std::filesystem::absolute(options.folder + "/../examples/fashion_mnist");
  if (!Executable(example)) {
    return absl::FailedPreconditionError(example + " is not there: libtorch was missing when this was built");
  }
  if (!Executable("/usr/bin/radosgw")) {
    return absl::FailedPreconditionError("Ceph's gateway is not installed: tools/install.sh --s3");
  }
  const std::string script = std::filesystem::absolute(options.folder + "/../bench/rgw.py");
  Gateway gateway;  // before the cluster, whose agent has the keys of its environment
  GT_RETURN_IF_ERROR(gateway.Start(script));
  LocalCluster cluster(options.folder);
  GT_RETURN_IF_ERROR(cluster.Start());
  const absl::Cleanup stop = [&] { cluster.Stop(); };
  const Training training(cluster, example);
  Outcome outcome{
      "fashion-MNIST, 1 epoch, 4 ranks, a save every 50 steps to S3", "ms a step", "without saves", {}, {}};
  for (int turn = 0; turn < (options.quick ? 1 : 7); ++turn) {
    GT_ASSIGN_OR_RETURN(const double without,
                        training.StepTime("none", "{uri: ./none, every: 1000000 steps, keep: 2}"));
    GT_ASSIGN_OR_RETURN(const double with,
                        training.StepTime("saves", "{uri: \"s3://bucket/saves\", every: 50 steps, keep: 2}"));
    outcome.theirs.samples.push_back(without);
    outcome.ours.samples.push_back(with);
  }
  return std::vector<Outcome>{outcome};
}

int Main(Options options) {
  if (!options.json.empty()) options.json = std::filesystem::absolute(options.json);
  const absl::StatusOr<std::vector<Outcome>> outcomes = MeasureAll(options);
  if (outcomes.ok()) return Report(options, "checkpoint_rgw", *outcomes);
  std::fprintf(stderr, "bench_checkpoint_rgw: %s\n", std::string(outcomes.status().message()).c_str());
  return 1;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
