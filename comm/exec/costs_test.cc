// Counts what a communicator of 4 to 1,024 ranks costs, among threads over a network in memory, and compares
// it with the functions of n in comm/exec/communicator.h, comm/shm/shm_group.h and comm/plan/schedule.h.
#include <algorithm>
#include <barrier>
#include <bit>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/exec/communicator.h"
#include "comm/exec/held_test_counts.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/fake/fake_transport.h"
#include "comm/fake/fake_world.h"
#include "comm/fake/forwarding_transport.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

// The counts of one rank, in one thing that it does.
struct Counts {
  uint64_t all_gathers = 0;  // through the head
  uint64_t arenas = 0;       // asked for
  uint64_t rounds = 0, messages = 0, bytes = 0, most_bytes = 0;
  std::set<std::string> peers;  // that it sent to, by address
};

class CountingTransport final : public ForwardingTransport {
 public:
  CountingTransport(std::unique_ptr<DataTransport> inner, Counts* counts)
      : ForwardingTransport(std::move(inner)), counts_(counts) {}
  absl::Status Connect(const std::vector<std::string>& addresses, int self) override {
    addresses_ = addresses;
    return ForwardingTransport::Connect(addresses, self);
  }
  absl::StatusOr<std::unique_ptr<DataTransport>> Part(const std::vector<int>& members, int self,
                                                      uint64_t id) override {
    auto inner = ForwardingTransport::Part(members, self, id);
    if (!inner.ok()) return inner.status();
    auto part = std::make_unique<CountingTransport>(*std::move(inner), counts_);
    for (const int member : members) part->addresses_.push_back(addresses_[static_cast<size_t>(member)]);
    return part;
  }
  absl::Status Exchange(absl::Span<const Transfer> transfers, absl::FunctionRef<void(size_t)> done,
                        const Watch& watch) override {
    counts_->rounds += transfers.empty() ? 0 : 1;
    for (const Transfer& t : transfers) {
      if (!t.send) continue;
      ++counts_->messages;
      counts_->bytes += t.bytes;
      counts_->most_bytes = std::max(counts_->most_bytes, uint64_t{t.bytes});
      counts_->peers.insert(addresses_[static_cast<size_t>(t.peer)]);
    }
    return ForwardingTransport::Exchange(transfers, done, watch);
  }

 private:
  Counts* const counts_;
  std::vector<std::string> addresses_;
};

class CountingBootstrap final : public Bootstrap {
 public:
  CountingBootstrap(std::unique_ptr<Bootstrap> inner, Counts* counts)
      : inner_(std::move(inner)), counts_(counts) {}
  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  Generation generation() const override { return inner_->generation(); }
  const std::vector<Member>& members() const override { return inner_->members(); }
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view blob,
                                                     absl::Duration timeout) override {
    ++counts_->all_gathers;
    return inner_->AllGather(blob, timeout);
  }
  absl::StatusOr<UniqueFd> Arena(uint64_t id, uint64_t bytes, uint64_t zeros,
                                 absl::Duration timeout) override {
    ++counts_->arenas;
    return inner_->Arena(id, bytes, zeros, timeout);
  }
  void FreeArena(uint64_t id) override { inner_->FreeArena(id); }
  absl::Status Alive() const override { return inner_->Alive(); }
  std::vector<int> Left() const override { return inner_->Left(); }

 private:
  const std::unique_ptr<Bootstrap> inner_;
  Counts* const counts_;
};

// The resources that all ranks together hold at one moment.
struct Held {
  size_t mapped = 0, descriptors = 0;
  uint64_t arena_bytes = 0;
};

enum Deed { kMake, kSplit, kAllReduce, kMeet, kDeeds };

struct Costs {
  std::vector<Counts> of_rank[kDeeds];
  Held before, after[kDeeds];
  std::vector<absl::Status> results;
};

// Makes a communicator of all ranks, splits one of all off it and reduces a number in the first. Makes
// another one, whose ranks meet for the first time when they gather what members of a new generation tell
// each other (elastic/exec/elastic_run.cc, Meet).
Costs CostsOf(const std::vector<std::string>& nodes, const std::string& algorithm) {
  FakeWorld world(nodes);
  FakeNetwork network;
  Costs costs;
  costs.results.resize(nodes.size());
  const auto held = [&] { return Held{MappedArenas(), OpenDescriptors(), world.ArenaBytes()}; };
  for (auto& counts : costs.of_rank) counts.resize(nodes.size());
  costs.before = held();
  int deed = 0;  // that all have just done
  const auto note = [&]() noexcept { costs.after[deed++] = held(); };
  std::barrier together(static_cast<ptrdiff_t>(nodes.size()), note);
  const auto rank_body = [&](size_t rank) -> absl::Status {
    Counts counts;
    CountingBootstrap bootstrap(world.Rank(static_cast<int>(rank)), &counts);
    ExecOptions options;
    options.user.timeout = 4 * kPatience;
    options.algorithm = algorithm;
    options.transport = [&](const Bootstrap&, uint64_t) {
      return std::make_unique<CountingTransport>(network.MakeTransport(), &counts);
    };
    absl::Status status;
    std::unique_ptr<Communicator> whole, part, next;
    const auto make = [&](std::unique_ptr<Communicator>& made, auto&& how) -> absl::Status {
      GT_ASSIGN_OR_RETURN(made, how());
      return absl::OkStatus();
    };
    for (int i = 0; i < kDeeds; ++i) {
      float number = 1;
      if (i == kAllReduce) {
        status.Update(status.ok() ? whole->AllReduce(&number, 1, DType::kFloat32, ReduceOp::kSum) : status);
        EXPECT_EQ(number, static_cast<float>(nodes.size()));
      } else if (i == kMeet) {
        const std::vector<int64_t> mine(16, static_cast<int64_t>(rank));
        std::vector<int64_t> all(mine.size() * nodes.size());
        options.user.meet = false;
        if (status.ok()) status = make(next, [&] { return MakeCommunicator(&bootstrap, options); });
        if (status.ok()) status = next->AllGather(mine.data(), all.data(), mine.size(), DType::kInt64);
        EXPECT_EQ(all.back(), std::ssize(nodes) - 1);
      } else if (status.ok()) {
        status = i == kMake ? make(whole, [&] { return MakeCommunicator(&bootstrap, options); })
                            : make(part, [&] { return whole->Split(0, 0); });
      }
      costs.of_rank[i][rank] = std::exchange(counts, {});
      together.arrive_and_wait();
    }
    return status;
  };
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < nodes.size(); ++rank) {
    threads.emplace_back([&, rank] { costs.results[rank] = rank_body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(world.ArenaBytes(), 0);
  return costs;
}

// `ranks` on machines of so many each.
std::vector<std::string> Machines(int ranks, int of_each) {
  std::vector<std::string> nodes;
  for (int rank = 0; rank < ranks; ++rank) nodes.push_back(absl::StrCat("m", rank / of_each));
  return nodes;
}

// Shared memory of a communicator.
void CheckHeld(const Costs& costs, uint64_t n, uint64_t of_each) {
  constexpr uint64_t kMiB = 1 << 20;
  const uint64_t machines = n / of_each, arenas = of_each > 1 ? 1 : 0;
  const uint64_t least =
      2 * kMiB + of_each * (2 * kMiB + (256 << 10)) + (n > 128 ? (n - 128) * (16 << 10) : 0);
  const uint64_t most =
      least + 112 * n + 21'400 * of_each + 12288;  // records, posts, lines, heads of inboxes; whole pages
  for (const Deed deed : {kMake, kSplit, kAllReduce}) {
    const Held& held = costs.after[deed];
    const uint64_t communicators = deed == kMake ? 1 : 2;
    EXPECT_EQ(held.mapped - costs.before.mapped, communicators * arenas * n);
    EXPECT_EQ(held.descriptors, costs.before.descriptors);
    EXPECT_GE(held.arena_bytes, communicators * arenas * machines * least);
    EXPECT_LE(held.arena_bytes, communicators * arenas * machines * most);
  }
  for (uint64_t rank = 0; rank < n; ++rank) {
    EXPECT_EQ(costs.of_rank[kMake][rank].all_gathers, 2);
    EXPECT_EQ(costs.of_rank[kSplit][rank].all_gathers, 0);
    EXPECT_EQ(costs.of_rank[kMake][rank].arenas, arenas);
    EXPECT_EQ(costs.of_rank[kSplit][rank].arenas, arenas);
    EXPECT_EQ(costs.of_rank[kAllReduce][rank].arenas, 0);
  }
}

// Checks the messages of the leader of each machine, which sends most. `ways` is the number of ways to speak
// that were measured.
void CheckMessages(const Costs& costs, uint64_t n, uint64_t of_each, uint64_t ways) {
  const uint64_t machines = n / of_each, others = machines - 1, log = std::bit_width(others);
  const bool several = of_each > 1, few = machines <= 16;
  const uint64_t enter = several && few ? others : log;
  // The messages of an all-gather: above 16 machines one or two a round, or one for each machine where each
  // of its ranks carries a part, which are not contiguous.
  const uint64_t gather = few ? others : log,
                 gather_most = few || several ? std::max(others, 2 * log) : 2 * log;
  const uint64_t agreements = ways == 0 ? 0 : ways + 1;
  const uint64_t fixed = gather + agreements * gather + enter,
                 most = gather + agreements * gather_most + enter;
  for (uint64_t rank = 0; rank < n; rank += of_each) {
    const Counts &make = costs.of_rank[kMake][rank], &split = costs.of_rank[kSplit][rank],
                 &reduce = costs.of_rank[kAllReduce][rank];
    // A slow machine measures less.
    EXPECT_GE(make.messages, fixed);
    EXPECT_LE(make.messages, most + 40 * ways);
    EXPECT_LE(make.peers.size(), others);
    EXPECT_LE(make.most_bytes, 256 << 10);
    EXPECT_GE(split.messages, enter + gather + enter);  // an all-gather, and the barrier of the new one
    EXPECT_LE(split.messages, enter + gather_most + enter);
    EXPECT_EQ(reduce.messages, log + (several ? enter : 0));
    EXPECT_EQ(reduce.rounds, log + (!several ? 0 : few ? 1 : log));
  }
  // From the grant of a generation until its members have agreed on the step: what elastic_run.h says.
  for (uint64_t rank = 0; ways == 0 && rank < n; ++rank)
    EXPECT_LE(costs.of_rank[kMeet][rank].rounds, 2 * log + 1);
  for (uint64_t rank = 0; rank < n; ++rank) {
    if (rank % of_each == 0) continue;
    // Ranks that are no leaders send messages only to measure the ways to speak that are not the leader's
    // alone.
    EXPECT_LE(costs.of_rank[kMake][rank].messages, ways > 1 ? 40 : 0);
    EXPECT_EQ(costs.of_rank[kAllReduce][rank].messages, 0);
  }
}

void CheckCosts(int ranks, int of_each, const std::string& algorithm, uint64_t ways) {
  SCOPED_TRACE(testing::Message() << ranks << " ranks, machines of " << of_each << ", " << algorithm);
  const Costs costs = CostsOf(Machines(ranks, of_each), algorithm);
  ExpectAllOk(costs.results);
  if (!std::ranges::all_of(costs.results, &absl::Status::ok)) return;
  CheckHeld(costs, static_cast<uint64_t>(ranks), static_cast<uint64_t>(of_each));
  if (of_each == ranks) {
    for (const auto& deed : costs.of_rank)
      for (const Counts& counts : deed) EXPECT_EQ(counts.messages, 0);
    return;
  }
  CheckMessages(costs, static_cast<uint64_t>(ranks), static_cast<uint64_t>(of_each), ways);
}

// The counts do not depend on the time that a run takes, which with a thread a rank is minutes under a
// sanitizer.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kMostRanks = 256;
#else
constexpr int kMostRanks = 1024;
#endif

TEST(Costs, OfACommunicatorAtScale) {
  for (const int ranks : {4, 16, 64, 128, 256, kMostRanks}) {
    const int several = ranks == 4 ? 2 : 8;
    if (ranks <= 256) CheckCosts(ranks, ranks, "auto", 1);
    CheckCosts(ranks, several, "deterministic", 0);
    if (ranks <= 128) CheckCosts(ranks, 1, "deterministic", 0);  // 256 take as long as all others
    if (ranks > 16) continue;
    CheckCosts(ranks, several, "auto", 2);
    CheckCosts(ranks, several, "leader", 1);
    CheckCosts(ranks, 1, "auto", 1);
  }
}

// An all-reduce of a number, and what it begins with, take one round more each.
TEST(Costs, OfMachinesThatAreNoPowerOfTwo) {
  const Costs costs = CostsOf(Machines(40, 2), "deterministic");
  ExpectAllOk(costs.results);
  uint64_t most = 0;
  for (const Counts& counts : costs.of_rank[kAllReduce]) most = std::max<uint64_t>(most, counts.rounds);
  EXPECT_EQ(most, 2 * (5 + 1)) << "20 machines";
  most = 0;
  for (const Counts& counts : costs.of_rank[kMeet]) most = std::max<uint64_t>(most, counts.rounds);
  EXPECT_EQ(most, 1 + (5 + 1) + 5) << "a try, what it begins with, and the all-gather";
}

// Between machines of several ranks goes what is needed, and with it the comparison: of 3 machines of 4, in
// bytes that all machines together send.
TEST(Costs, MachinesSendEachOtherWhatIsNeeded) {
  constexpr uint64_t kMachines = 3, kOfEach = 4, kRanks = kMachines * kOfEach,
                     kBlock = 100'000 * sizeof(float);
  constexpr uint64_t kCompared = kMachines * (kMachines - 1) * kOfEach * 56;
  const std::vector<std::string> nodes = Machines(kRanks, kOfEach);
  using Collective = std::function<absl::Status(Communicator&, void* input, void* output)>;
  const auto sent = [&](const char* algorithm, const Collective& collective) {
    FakeWorld world(nodes);
    FakeNetwork network;
    std::vector<Counts> counts(kRanks);
    std::vector<absl::Status> results(kRanks);
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto bootstrap = world.Rank(static_cast<int>(rank));
        ExecOptions options;
        options.user.timeout = kPatience;
        options.algorithm = algorithm;
        options.transport = [&](const Bootstrap&, uint64_t) {
          return std::make_unique<CountingTransport>(network.MakeTransport(), &counts[rank]);
        };
        std::vector<float> input(kRanks * kBlock / sizeof(float)), output(input.size());
        const auto communicator = MakeCommunicator(bootstrap.get(), options);
        results[rank] = communicator.status();
        if (!communicator.ok()) return;
        counts[rank] = {};
        results[rank] = collective(**communicator, input.data(), output.data());
      });
    }
    for (std::thread& thread : threads) thread.join();
    ExpectAllOk(results);
    uint64_t bytes = 0;
    for (const Counts& of_rank : counts) bytes += of_rank.bytes;
    return bytes - kCompared;
  };
  constexpr size_t kCount = kBlock / sizeof(float);
  for (const char* algorithm : {"leader", "rails"}) {
    SCOPED_TRACE(algorithm);
    const uint64_t others = kMachines - 1;
    EXPECT_EQ(sent(algorithm,
                   [](Communicator& c, void* input, void* output) {
                     return c.ReduceScatter(input, output, kCount, DType::kFloat32, ReduceOp::kSum);
                   }),
              others * kRanks * kBlock)
        << "each machine a sum for each rank of the others";
    EXPECT_EQ(
        sent(algorithm, [](Communicator& c, void* input,
                           void* output) { return c.AllToAll(input, output, kCount, DType::kFloat32); }),
        kRanks * (kRanks - kOfEach) * kBlock)
        << "each rank a block for each rank of other machines";
    EXPECT_EQ(
        sent(algorithm, [](Communicator& c, void* input,
                           void* output) { return c.AllGather(input, output, kCount, DType::kFloat32); }),
        others * kRanks * kBlock)
        << "the block of each rank to each other machine";
    EXPECT_EQ(sent(algorithm, [](Communicator& c, void* input,
                                 void*) { return c.Broadcast(input, kRanks * kCount, DType::kFloat32, 5); }),
              others * kRanks * kBlock)
        << "all of it to each other machine";
    // A tree: a sum from each machine but the root's. In parts: a third of it more.
    const uint64_t reduced = sent(algorithm, [](Communicator& c, void* input, void*) {
      return c.Reduce(input, kRanks * kCount, DType::kFloat32, ReduceOp::kSum, 5);
    });
    EXPECT_GE(reduced, others * kRanks * kBlock);
    EXPECT_LE(reduced, (others + 1) * kRanks * kBlock);
  }
}

}  // namespace
}  // namespace gtrain::comm
