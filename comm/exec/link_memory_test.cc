// Tests what a process remembers of its links: two machines, a thread each, over a network in memory.
#include "comm/exec/link_memory.h"

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/backends/between_machines.h"
#include "comm/fake/fake_transport.h"
#include "comm/fake/fake_world.h"
#include "comm/plan/cost.h"
#include "comm/plan/hierarchy.h"
#include "comm/ucx/fabric.h"
#include "comm/ucx/ucx_test_here.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

struct Rank {
  std::unique_ptr<Bootstrap> bootstrap;
  std::unique_ptr<DataTransport> rail;
  Hierarchy hierarchy;
  std::string mark;
  std::vector<Carriers> measured;
  absl::Status status;
};

class LinkMemoryTest : public testing::Test {
 protected:
  // Both ranks measure together, as their first communicator does. Nothing can be measured afterwards.
  void SetUp() override {
    if (!UcxHere()) GTEST_SKIP() << "built without UCX";
    std::vector<std::thread> threads;
    for (size_t r = 0; r < ranks_.size(); ++r)
      threads.emplace_back([this, r] { ranks_[r].status = First(ranks_[r], static_cast<int>(r)); });
    for (std::thread& t : threads) t.join();
    for (Rank& rank : ranks_) {
      ASSERT_TRUE(rank.status.ok()) << rank.status;
      rank.mark = MemoryOf(rank).Mark();
    }
    world_.Revoke("no more measuring");
  }

  absl::Status First(Rank& rank, int number) {
    rank.bootstrap = world_.Rank(number);
    rank.rail = network_.MakeTransport();
    rank.hierarchy = MakeHierarchy({NodeId("a"), NodeId("b")}, number);
    GT_ASSIGN_OR_RETURN(rank.bootstrap->fabric(), Fabric::Open("127.0.0.1", ""));
    GT_ASSIGN_OR_RETURN(const std::string address, rank.rail->Address());
    GT_ASSIGN_OR_RETURN(const std::vector<std::string> addresses, rank.bootstrap->AllGather(address, kLong));
    GT_RETURN_IF_ERROR(rank.rail->Connect(addresses, number));
    LinkMemory memory = MemoryOf(rank);
    rank.mark = memory.Mark();
    memory.TakeMarks({rank.mark, rank.mark});
    return Learn(rank, memory);
  }

  LinkMemory MemoryOf(Rank& rank) {
    LinkMemory memory;
    memory.KeepWith(rank.bootstrap.get());
    return memory;
  }

  // What a further communicator of `rank` has in rank.measured then.
  absl::Status Learn(Rank& rank, LinkMemory& memory) {
    BetweenMachines between(&rank.hierarchy, nullptr, rank.rail.get(), {});
    GT_RETURN_IF_ERROR(memory.Learn(&between, nullptr, Watch(rank.bootstrap.get(), kLong)));
    rank.measured = between.carriers();
    return absl::OkStatus();
  }

  static constexpr absl::Duration kLong = absl::Minutes(1);
  FakeWorld world_{{"a", "b"}};
  FakeNetwork network_;
  std::array<Rank, 2> ranks_;
};

TEST_F(LinkMemoryTest, WhoHasMeasuredTogetherNeedsNotMeasureAgain) {
  EXPECT_EQ(ranks_[0].mark, ranks_[1].mark);
  for (Rank& rank : ranks_) {
    const std::vector<Carriers> before = rank.measured;
    ASSERT_EQ(before.size(), 1u);
    EXPECT_NE(before[0].link.round, LinkCost{}.round) << "nothing was measured";
    LinkMemory memory = MemoryOf(rank);
    EXPECT_EQ(memory.Mark().size(), LinkMemory::kMarkBytes);
    memory.TakeMarks({rank.mark, rank.mark});
    rank.measured.clear();
    ASSERT_EQ(Learn(rank, memory), absl::OkStatus());
    ASSERT_EQ(rank.measured.size(), before.size());
    EXPECT_EQ(rank.measured[0].rails, before[0].rails);
    EXPECT_EQ(rank.measured[0].link.round, before[0].link.round);
    EXPECT_EQ(rank.measured[0].link.reduced_byte, before[0].link.reduced_byte);
  }
}

// All ranks see the same marks, so all of them measure or none does.
TEST_F(LinkMemoryTest, MeasuresWhereOneHasMeasuredNothingOrSomethingElse) {
  const std::string nothing(LinkMemory::kMarkBytes, '-');
  std::string other = ranks_[0].mark;
  other[0] = other[0] == '0' ? '1' : '0';
  LinkMemory memory = MemoryOf(ranks_[0]);
  ASSERT_EQ(memory.Mark(), ranks_[0].mark);
  const std::string own = ranks_[0].mark;
  for (const std::vector<std::string>& marks :
       {std::vector{own, nothing}, {own, other}, {own, std::string()}, {nothing, nothing}}) {
    memory.TakeMarks(marks);
    EXPECT_FALSE(Learn(ranks_[0], memory).ok()) << marks[0] << marks[1];
  }
  LinkMemory forgetful;
  EXPECT_EQ(forgetful.Mark(), nothing) << "without a fabric";
}

// Two communicators of a process may open at once: the marks that the others compare are of what was known
// when they were asked for.
TEST_F(LinkMemoryTest, LearnsWhatItsMarkSaidWhateverIsMeasuredMeanwhile) {
  Rank& rank = ranks_[0];
  const std::vector<Carriers> before = rank.measured;
  LinkMemory memory = MemoryOf(rank);
  const std::string mark = memory.Mark();
  Fabric& fabric = *rank.bootstrap->fabric();
  fabric.RememberLinks(std::string(fabric.links().size(), '\0'));
  memory.TakeMarks({mark, mark});
  ASSERT_EQ(Learn(rank, memory), absl::OkStatus());
  ASSERT_EQ(rank.measured.size(), 1u);
  EXPECT_EQ(rank.measured[0].link.round, before[0].link.round);
}

// Costs that stand for "deterministic" are no measurements.
TEST_F(LinkMemoryTest, RemembersNoCostsThatWereNotMeasured) {
  Rank& rank = ranks_[0];
  const BetweenMachines between(&rank.hierarchy, nullptr, rank.rail.get(), {.deterministic = true});
  LinkMemory memory = MemoryOf(rank);
  memory.Remember(between);
  EXPECT_EQ(memory.Mark(), rank.mark);
}

}  // namespace
}  // namespace gtrain::comm
