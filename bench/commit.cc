// bench_commit: how long a save of many ranks takes from the last shard to the commit, over a storage that
// needs 25 ms for each call, however small, and takes any number at a time. The ranks are threads with the
// real Committer.
//
// With 4,096 ranks (512 with --quick) the first of every 64 are threads, and the shards and indices of the
// others are there already: the two cores of a small machine would otherwise measure what 4,096 machines
// compute. The time runs from before these leaders put their own shards. With 256 ranks all are threads, and
// the time runs from the last shard. The peer is rank 0 alone, which asks for one index, looks at one shard
// and takes the next, as a commit did before manifests had parts.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/committer.h"
#include "checkpoint/engine/parallel.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::bench {
namespace {

using namespace ckpt;  // NOLINT: this bench is about them

constexpr absl::Duration kLatency = absl::Milliseconds(25);
constexpr int kTensors = 200;
const Identity kOwner{.cluster = "c1", .job = "bench", .job_hash = "h"};

const RealClock& Clock() {
  static const RealClock clock;
  return clock;
}

// Answers every call as MemoryStore does, 25 ms later, and notes when the last shard was there.
class FarStore final : public port::BlobStore {
 public:
  using port::BlobStore::PutIfAbsent;
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    const absl::Status put = Far().PutIfAbsent(key, parts);
    if (absl::EndsWith(key, ".safetensors")) {
      MutexLock lock(&mu_);
      last_shard_ = Clock().Now();
    }
    return put;
  }
  absl::StatusOr<std::string> Get(absl::string_view key, size_t bytes_max) override {
    return Far().Get(key, bytes_max);
  }
  absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override {
    return Far().Read(key, offset, out);
  }
  absl::StatusOr<uint64_t> Size(absl::string_view key) override { return Far().Size(key); }
  absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override {
    return Far().List(prefix);
  }
  absl::StatusOr<std::vector<std::string>> ListAll(absl::Span<const absl::string_view> prefixes) override {
    return Far().ListAll(prefixes);
  }
  absl::StatusOr<std::vector<std::string>> ListFolders() override { return Far().ListFolders(); }
  absl::Status Delete(absl::string_view key) override { return Far().Delete(key); }
  absl::Status DropEmptyFolder(absl::string_view) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override { return std::vector<Unfinished>(); }
  absl::Status DropUnfinished(const Unfinished&) override { return absl::OkStatus(); }
  std::string Describe() const override { return "memory, 25 ms away"; }

  Instant last_shard() const {
    MutexLock lock(&mu_);
    return last_shard_;
  }
  uint64_t calls() const { return calls_; }
  MemoryStore* near() { return &near_; }  // without the way there

 private:
  port::BlobStore& Far() {
    ++calls_;
    absl::SleepFor(kLatency);
    return near_;
  }

  MemoryStore near_;
  std::atomic<uint64_t> calls_{0};
  mutable Mutex mu_;
  Instant last_shard_ ABSL_GUARDED_BY(mu_);
};

std::vector<Registered> StateOf(int world) {
  std::vector<Registered> out;
  for (int i = 0; i < kTensors; ++i) {
    out.push_back({{.name = absl::StrCat("layer.", i, ".weight"),
                    .layout = Layout::kSharded,
                    .dtype = DType::kFloat32,
                    .shape = {world},
                    .sharding = {.mesh = {{"dp", world}}, .splits = {{0, "dp"}}}},
                   4});
  }
  return out;
}

CommitterConfig ConfigOf(int rank, int world, const std::vector<Registered>& state) {
  return {.rank = rank,
          .world_size = world,
          .owner = kOwner,
          .registered = state,
          .alive = [] { return absl::OkStatus(); },
          .may_commit = [](const SaveId&, const std::vector<SaveId>&) { return absl::OkStatus(); }};
}

struct Times {
  double committed = 0;  // seconds until rank 0 has read the manifest back
  double known = 0;      // until the last of the ranks that are threads knows
  double calls = 0;      // a thread
};

// Shards and indices of all ranks that lead nobody, as their writers leave them.
absl::Status PutMembers(int world, const std::vector<Registered>& state, const SaveId& id, FarStore* store) {
  absl::Status failed;
  Mutex mu;
  ForEachAtOnce(static_cast<size_t>(world), [&](size_t i) {
    const int rank = static_cast<int>(i);
    if (rank % kPartRanks == 0) return;
    const ShardPlan plan = PlanShard(state, rank, world);
    const std::string data(plan.data_bytes, '\1');
    const ShardFile file = DescribeShard(plan, data, state, rank, world);
    absl::Status put = store->near()->PutIfAbsent(AttemptKey(id, file.name), plan.header + data);
    put.Update(store->near()->PutIfAbsent(
        AttemptKey(id, IndexName(rank, world)),
        Print(ShardIndex{.id = id, .rank = rank, .world_size = world, .file = file})));
    MutexLock lock(&mu);
    failed.Update(put);
  });
  return failed;
}

absl::StatusOr<Times> CommitOnce(int world, bool leaders_only) {
  FarStore store;
  const SaveId id{.step = 1};
  GT_RETURN_IF_ERROR(store.near()->PutIfAbsent(OwnerKey(id.epoch), Print(OwnerClaim{.epoch = id.epoch})));
  const std::vector<Registered> state = StateOf(world);
  if (leaders_only) GT_RETURN_IF_ERROR(PutMembers(world, state, id, &store));
  const int each = leaders_only ? kPartRanks : 1;
  const int count = (world + each - 1) / each;
  std::vector<absl::Status> results(static_cast<size_t>(count));
  std::atomic<int64_t> begun_ns{0}, committed_ns{0}, known_ns{0};
  std::barrier ready(count, [&]() noexcept { begun_ns = Clock().Now().ns; });
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      Committer committer(&store, ConfigOf(i * each, world, state));
      const std::string data(committer.plan().data_bytes, '\1');
      StopFlag never;
      ready.arrive_and_wait();
      results[static_cast<size_t>(i)] = committer.Save(id, data, {}, &never, [&] {
        if (i == 0) committed_ns = Clock().Now().ns;
        int64_t last = known_ns;
        const int64_t now = Clock().Now().ns;
        while (last < now && !known_ns.compare_exchange_weak(last, now)) {
        }
      });
    });
  }
  for (std::thread& t : threads) t.join();
  for (const absl::Status& result : results) GT_RETURN_IF_ERROR(result);
  const int64_t begin = leaders_only ? begun_ns.load() : store.last_shard().ns;
  const auto since = [&](int64_t ns) { return static_cast<double>(ns - begin) / 1e9; };
  return Times{since(committed_ns), since(known_ns), static_cast<double>(store.calls()) / count};
}

// The commit of rank 0 alone, one call after the other, of shards and indices that are there.
absl::StatusOr<double> CommitSerially(int world) {
  FarStore store;
  const SaveId id{.step = 1};
  MemoryStore near;
  for (int rank = 0; rank < world; ++rank) {
    ShardFile file{
        .name = ShardName(rank, world), .bytes = 8, .chunks = {std::string(32, 'a')}, .data_begin = 8};
    GT_RETURN_IF_ERROR(near.PutIfAbsent(AttemptKey(id, file.name), std::string(8, ' ')));
    GT_RETURN_IF_ERROR(
        near.PutIfAbsent(AttemptKey(id, IndexName(rank, world)),
                         Print(ShardIndex{.id = id, .rank = rank, .world_size = world, .file = file})));
  }
  const Instant begin = Clock().Now();
  for (int rank = 1; rank < world; ++rank) {
    absl::SleepFor(kLatency);
    const std::string key = AttemptKey(id, IndexName(rank, world));
    GT_ASSIGN_OR_RETURN(const std::string text, near.Get(key, kManifestBytesMax));
    GT_ASSIGN_OR_RETURN(const ShardIndex index, ParseShardIndex(key, text));
    absl::SleepFor(kLatency);
    GT_RETURN_IF_ERROR(near.Size(AttemptKey(id, index.file.name)).status());
  }
  GT_RETURN_IF_ERROR(ListNames(&store).status());
  GT_RETURN_IF_ERROR(store.PutIfAbsent(ManifestKey(id), "a manifest"));
  GT_RETURN_IF_ERROR(store.Get(ManifestKey(id), kManifestBytesMax).status());
  return absl::ToDoubleSeconds(Clock().Now() - begin);
}

absl::Status Run(const Options& options, std::vector<Outcome>* outcomes) {
  const int turns = options.quick ? 2 : 5;
  for (const int world : {options.quick ? 512 : 4096, 256}) {
    const bool leaders_only = world != 256;
    const std::string who = absl::StrCat(world, leaders_only ? " ranks, leaders" : " ranks");
    Outcome committed{.name = absl::StrCat("commit of ", who), .unit = "s"};
    Outcome known{.name = absl::StrCat("known to ", who), .unit = "s"};
    Outcome calls{.name = absl::StrCat("storage calls each, ", who), .unit = "calls"};
    for (int turn = 0; turn < turns; ++turn) {
      if (!leaders_only) {
        GT_ASSIGN_OR_RETURN(const double serial, CommitSerially(world));
        committed.peer = "rank 0 alone";
        committed.theirs.samples.push_back(serial);
      }
      GT_ASSIGN_OR_RETURN(const Times times, CommitOnce(world, leaders_only));
      committed.ours.samples.push_back(times.committed);
      known.ours.samples.push_back(times.known);
      calls.ours.samples.push_back(times.calls);
    }
    outcomes->insert(outcomes->end(), {committed, known, calls});
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) {
  using namespace gtrain::bench;  // NOLINT
  const Options options = ParseOptions(argc, argv);
  std::vector<Outcome> outcomes;
  const absl::Status status = Run(options, &outcomes);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_commit: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return Report(options, "commit", outcomes);
}
