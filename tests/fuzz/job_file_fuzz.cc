// Job files and flags laid over them (faults J1..J6, J13): errors with a place, or a spec that survives its
// own canonical text.
#include <algorithm>
#include <map>

#include "base/check.h"
#include "job/spec/parse.h"
#include "job/spec/print.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {

// Steps: the file, then any number of --set KEY=VALUE.
GT_FUZZ_RUN(job_file) {
  const std::vector<absl::string_view> steps = SplitSteps(bytes);
  const std::map<std::string, std::string> variables = {{"HOME", "/home/me"}, {"EMPTY", ""}};
  spec::ParseOptions options{
      .variables = &variables, .file_dir = "/home/me", .current_dir = "/work", .default_name = "job"};
  for (size_t i = 1; i < std::min<size_t>(steps.size(), 10); ++i) {
    if (absl::StatusOr<spec::Overlay> overlay = spec::ApplySet(steps[i]); overlay.ok()) {
      options.overlays.push_back(*std::move(overlay));
    }
  }
  const spec::ParseResult result = spec::ParseJob(steps[0], "job.yaml", options);
  GT_CHECK(result.errors.size() <= spec::Report::kErrorsMax + 1);
  for (const spec::SpecError& error : result.errors) GT_CHECK(!spec::FormatError(error).empty());
  (void)spec::ParseCanonical(steps[0]);
  if (!result.ok()) return;
  const std::string text = spec::PrintJob(result.spec);
  const absl::StatusOr<spec::JobSpec> back = spec::ParseCanonical(text);
  GT_CHECK(back.ok());
  GT_CHECK(*back == result.spec);
  GT_CHECK(spec::PrintJob(*back) == text);
  GT_CHECK(spec::JobHash(*back) == spec::JobHash(result.spec));
}

GT_FUZZ_SEEDS(job_file) {
  const std::string full =
      "name: train\nrun: [python3, train.py, --lr, \"0.1\"]\nranks: {min: 2, max: 8}\nworkdir: .\n"
      "env: {A: \"1\", B: \"${HOME}/x\"}\nsecrets: {TOKEN: {env: MY_TOKEN}}\n"
      "resources: {cpus: 2, memory: 4GiB, gpus: 1, gpu_type: [H100], shm: 1GiB}\n"
      "checkpoint: {uri: ckpt, every: 10m, keep: 3}\nrestart: {budget: 3, window: 1h}\n"
      "progress: {step: 'step (\\d+)', loss: 'loss ([0-9.]+)', stall: 15m, on_stall: report}\n"
      "preempt: {signal: SIGUSR1, lead: 120s}\nlimits: {time: 24h}\nstop_grace: 30s\n";
  return {"run: a\n",
          full,
          JoinSteps({"run: python3 train.py\n", "ranks=4", "checkpoint.every=5m", "checkpoint.uri=/c"}),
          "script: |\n  echo hi\n  sleep 1\nranks: 2\nper: node\n",
          "run: a\nenv:\n  A: &a x\n  B: *a\n",
          "run: \"a \\u20ac \\x01 b\"\nmesh: {dp: 2, tp: 4}\n"};
}

}  // namespace gtrain::fuzz
