// bench_head_start: what a head's start costs when it has many jobs of the past: 2,000 jobs of 256 ranks (500
// with --quick) that are over. The time runs from before the store is opened until the core has taken the
// records up; the memory is the process's peak until then. Each sample is a process of its own.
//
// The peers are the two other forms in which a store may hold such a job: one whole record, as heads wrote it
// before jobs had several records, and a record for each exit, as a job has them while it runs.
#include <stdlib.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/peer_process.h"
#include "job/spec/parse.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/values/job_records.h"
#include "runtime/head/rescue.h"
#include "runtime/store/rocks_store.h"
#include "runtime/wire/record_codec.h"

namespace gtrain::bench {
namespace {

constexpr int kRanks = 256;
constexpr int kNodes = 32;
constexpr size_t kTailBytes = 2048;
const char* const kForms[] = {"packed", "whole", "each exit"};

// One of twenty failed, and its ranks said why: of the others nothing is kept of what they wrote.
core::JobRecord JobOf(int number) {
  const bool failed = number % 20 == 0;
  core::JobRecord job{{.id = JobId(absl::StrCat("train-", number)),
                       .number = static_cast<uint64_t>(number),
                       .name = "train",
                       .spec_text = absl::StrCat("name: train\nrun: [\"./train\"]\nranks: ", kRanks, "\n"),
                       .run_dir = absl::StrCat("/runs/train-", number),
                       .client_key = "0011223344556677"},
                      {.state = failed ? core::JobState::kFailed : core::JobState::kSucceeded,
                       .reason = failed ? "rank 3: exit code 1" : "all ranks ended with exit code 0",
                       .generation = {1},
                       .revoked = {1},
                       .timeline = {1}}};
  core::GenerationGrant& grant = job.grant.emplace();
  grant.job = job.id;
  grant.generation = {1};
  grant.world_size = kRanks;
  for (int node = 0; node < kNodes; ++node) {
    core::NodePlace place;
    place.node = NodeId(absl::StrCat("00112233445566", node + 10));
    place.hostname = absl::StrCat("node-", node);
    place.address = absl::StrCat("10.0.0.", node);
    grant.nodes.push_back(place);
    job.kept.push_back(place.node);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    core::RankPlace place;
    place.rank = rank;
    place.node = grant.nodes[static_cast<size_t>(rank * kNodes / kRanks)].node;
    grant.ranks.push_back(place);
    job.exits.push_back({.job = job.id,
                         .generation = {1},
                         .rank = rank,
                         .pid = 1000 + rank,
                         .exit_code = failed ? 1 : 0,
                         .message = absl::StrCat("exited with code ", failed ? 1 : 0),
                         .tail = std::string(failed ? kTailBytes : 0, 't')});
  }
  return job;
}

std::vector<core::Record> RecordsOf(const core::JobRecord& job, absl::string_view form) {
  if (form == "whole") return {job};
  const bool packed = form == "packed";
  std::vector<core::Record> records = {core::JobSubmission(job),
                                       core::JobGrantRecord{job.id, *job.grant, job.kept},
                                       core::StatusRecordOf(job, packed ? job.exits.size() : 0)};
  if (packed) {
    records.push_back(core::JobExitsRecord{job.id, 0, job.exits});
  } else {
    for (int i = 0; i < kRanks; ++i)
      records.push_back(core::JobExitRecord{job.id, i, job.exits[static_cast<size_t>(i)]});
  }
  return records;
}

absl::Status Prepare(const std::string& path, int jobs, absl::string_view form) {
  GT_ASSIGN_OR_RETURN(const auto store, store::OpenRocksStore(path, {.space = {.ballast = 0}}));
  core::ClusterRecord cluster;
  cluster.cluster = ClusterId("bench");
  GT_RETURN_IF_ERROR(store->Commit({{core::KeyOf(cluster), wire::EncodeRecord(cluster)}}));
  for (int number = 1; number <= jobs; ++number) {
    std::vector<port::Write> writes;
    for (const core::Record& record : RecordsOf(JobOf(number), form))
      writes.push_back({core::KeyOf(record), wire::EncodeRecord(record)});
    GT_RETURN_IF_ERROR(store->Commit(writes));
  }
  return absl::OkStatus();
}

double PeakMegabytes() {
  const absl::StatusOr<std::string> text = ReadFile("/proc/self/status", 1 << 16);
  double kilobytes = 0;
  for (const absl::string_view line : absl::StrSplit(text.value_or(""), '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (words.size() > 1 && words[0] == "VmHWM:") (void)absl::SimpleAtod(words[1], &kilobytes);
  }
  return kilobytes / 1024;
}

// Runs in a process of its own, when it is asked to: prints seconds and megabytes.
absl::Status StartOnce(const std::string& path) {
  if (std::fgetc(stdin) == EOF) return absl::OkStatus();
  const RealClock clock;
  const Instant begin = clock.Now();
  GT_ASSIGN_OR_RETURN(const auto store,
                      store::OpenRocksStore(path, {.create = false, .space = {.ballast = 0}}));
  GT_ASSIGN_OR_RETURN(core::StoredRecords stored, head::LoadRecords(*store));
  const size_t jobs = stored.jobs.size();
  core::HeadConfig config{.cluster = ClusterId("bench"), .jobs_max = static_cast<int>(jobs) + 1};
  config.parse_job = spec::ParseCanonical;
  core::HeadCore head(std::move(config), Rng(1));
  GT_RETURN_IF_ERROR(head.Recover(std::move(stored), clock.Now(), clock.WallNow()).status());
  const double seconds = absl::ToDoubleSeconds(clock.Now() - begin);
  for (size_t number = 1; number <= jobs; ++number) {
    const core::JobRecord* job = head.RecordOf(JobId(absl::StrCat("train-", number)));
    if (job == nullptr || job->exits.size() != kRanks)
      return absl::InternalError(absl::StrCat("train-", number, " did not come back whole"));
  }
  std::printf("%.4f %.1f\n", seconds, PeakMegabytes());
  std::fflush(stdout);
  return absl::OkStatus();
}

struct Cost {
  double seconds = 0, megabytes = 0;
};

absl::StatusOr<Cost> Start(const Options& options, const std::string& path) {
  GT_ASSIGN_OR_RETURN(const auto process,
                      PeerProcess::Start({absl::StrCat(options.folder, "/bench_head_start"), "--start", path},
                                         path + ".log"));
  GT_ASSIGN_OR_RETURN(const std::vector<double> numbers, process->Ask("go", absl::Minutes(1)));
  if (numbers.size() != 2) return absl::InternalError("the process printed something else");
  return Cost{numbers[0], numbers[1]};
}

absl::Status Run(const Options& options, const std::string& dir, std::vector<Outcome>* outcomes) {
  const int jobs = options.quick ? 500 : 2'000, turns = options.quick ? 3 : 7;
  std::array<std::vector<Cost>, std::size(kForms)> costs;
  for (size_t form = 0; form < std::size(kForms); ++form)
    GT_RETURN_IF_ERROR(Prepare(absl::StrCat(dir, "/", form), jobs, kForms[form]));
  for (int turn = 0; turn <= turns; ++turn) {
    for (size_t form = 0; form < std::size(kForms); ++form) {
      GT_ASSIGN_OR_RETURN(const Cost cost, Start(options, absl::StrCat(dir, "/", form)));
      if (turn > 0) costs[form].push_back(cost);  // the first one filled the page cache
    }
  }
  for (const bool time : {true, false}) {
    for (size_t form = 1; form < std::size(kForms); ++form) {
      Outcome outcome{
          .name = absl::StrCat(time ? "start" : "peak memory", ", ", jobs, " jobs of ", kRanks, " ranks"),
          .unit = time ? "s" : "MB",
          .peer = kForms[form]};
      for (const Cost& cost : costs[0]) outcome.ours.samples.push_back(time ? cost.seconds : cost.megabytes);
      for (const Cost& cost : costs[form])
        outcome.theirs.samples.push_back(time ? cost.seconds : cost.megabytes);
      outcomes->push_back(std::move(outcome));
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) {
  using namespace gtrain::bench;  // NOLINT
  const auto failed = [](const absl::Status& status) {
    std::fprintf(stderr, "bench_head_start: %s\n", std::string(status.message()).c_str());
    return 1;
  };
  if (argc == 3 && absl::string_view(argv[1]) == "--start") {
    const absl::Status started = StartOnce(argv[2]);
    return started.ok() ? 0 : failed(started);
  }
  const Options options = ParseOptions(argc, argv);
  char dir[] = "/tmp/bench_head_start.XXXXXX";
  if (mkdtemp(dir) == nullptr) return failed(absl::InternalError("no folder in /tmp"));
  std::vector<Outcome> outcomes;
  const absl::Status status = Run(options, dir, &outcomes);
  std::error_code error;
  std::filesystem::remove_all(dir, error);
  return status.ok() ? Report(options, "head_start", outcomes) : failed(status);
}
