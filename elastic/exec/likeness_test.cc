#include "elastic/exec/likeness.h"

#include <string>
#include <vector>

#include "elastic/exec/run_test_world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::elastic {
namespace {

using ::testing::HasSubstr;

Likeness Usual() {
  Likeness usual;
  usual.SetSamples("train", {.samples = 60, .epochs = 2, .global_batch = 12, .seed = 7});
  usual.AddState("w", DType::kFloat32, {3, 4}, nullptr);
  const Sharding cut{.splits = {{1, "tp"}}};
  usual.AddState("part", DType::kFloat64, {8, 8}, &cut);
  usual.AddGradient(12);
  return usual;
}

// Compares all ranks, which are `of`(rank), with rank `source`; gradients with `sources`.
template <typename Of, typename Look>
void Compare(int ranks, int source, const std::vector<int>& sources, Of of, Look look) {
  std::vector<LikenessHashes> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(of(rank).hashes());
  ForRanks(ranks,
           [&](Communicator& comm) { look(comm.rank(), of(comm.rank()).Check(comm, all, source, sources)); });
}

TEST(LikenessTest, EqualRanksPass) {
  Compare(
      3, 1, {1, 1, 1}, [](int) { return Usual(); },
      [](int, const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
}

// Each thing that may differ is found, and said in words.
TEST(LikenessTest, TheFirstDifferenceIsNamed) {
  const auto with = [](auto change) {
    Likeness odd = Usual();
    change(odd);
    return odd;
  };
  const Sharding other_cut{.splits = {{0, "tp"}}, .only = {{"pp", 1}}};
  struct Case {
    Likeness odd;
    const char* says;
  };
  std::vector<Case> cases;
  cases.push_back(
      {with([](Likeness& odd) {
         odd.SetSamples("train", {.samples = 60, .epochs = 2, .global_batch = 18, .seed = 7});
       }),
       "samples 'train' in batches of 18, 60 of them, 2 epochs, seed 7, shuffled instead of samples "
       "'train' in batches of 12, 60"});
  cases.push_back({with([](Likeness& odd) { odd.AddState("m", DType::kFloat32, {5}, nullptr); }),
                   "state 'm' of F32[5] instead of and more"});
  cases.push_back({with([&](Likeness& odd) {
                     odd.AddState("p", DType::kInt64, {2, 2}, &other_cut);
                   }),
                   "state 'p' of I64[2,2], dimension 0 cut along tp, only at pp 1 instead of"});
  cases.push_back({with([](Likeness& odd) { odd.AddGradient(16); }), "gradient 1 of 16 elements instead of"});
  for (const Case& one : cases) {
    SCOPED_TRACE(one.says);
    Compare(
        4, 1, {1, 1, 1, 1}, [&](int rank) { return rank == 2 ? one.odd : Usual(); },
        [&](int rank, const absl::Status& status) {
          EXPECT_EQ(status.code(),
                    rank == 2 ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kUnavailable);
          EXPECT_THAT(status.message(), HasSubstr("rank 2 trains something else than rank 1"));
          EXPECT_THAT(status.message(), HasSubstr(one.says));
        });
  }
}

// Two tensors of one size in another order: no hash of what is sent would tell.
TEST(LikenessTest, TheOrderCounts) {
  Likeness one, other;
  one.AddState("w", DType::kFloat32, {3}, nullptr);
  one.AddState("m", DType::kFloat32, {3}, nullptr);
  other.AddState("m", DType::kFloat32, {3}, nullptr);
  other.AddState("w", DType::kFloat32, {3}, nullptr);
  EXPECT_NE(one.hashes().program, other.hashes().program);
}

// Ranks that hold different parts of the model may have different gradients.
TEST(LikenessTest, GradientsAreComparedWithinAPart) {
  const auto of = [](int rank) {
    Likeness one = Usual();
    if (rank % 2 == 1) one.AddGradient(3);
    return one;
  };
  Compare(4, 0, {0, 1, 0, 1}, of,
          [](int, const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
  Compare(4, 0, {0, 0, 0, 0}, of, [](int rank, const absl::Status& status) {
    EXPECT_EQ(absl::IsFailedPrecondition(status), rank % 2 == 1) << status;
    EXPECT_THAT(status.message(), HasSubstr("ranks 1, 3 train something else than rank 0"));
  });
}

TEST(LikenessTest, TheErrorNamesRanksAndMachines) {
  const auto of = [](int rank) {
    Likeness one = Usual();
    one.SetMachine(rank == 0 || rank == 3 ? "another; OMP_NUM_THREADS=2" : "one kind");
    return one;
  };
  Compare(5, 2, {2, 2, 2, 2, 2}, of, [](int rank, const absl::Status& status) {
    EXPECT_EQ(absl::IsFailedPrecondition(status), rank == 0 || rank == 3) << status;
    EXPECT_THAT(status.message(),
                HasSubstr("ranks 0, 3 have another; OMP_NUM_THREADS=2 (rank 0); rank 2, with whose bits "
                          "training goes on, has one kind."));
  });
}

// What is sent of a long text ends somewhere.
TEST(LikenessTest, ManyStates) {
  const auto of = [](int rank) {
    Likeness one = Usual();
    for (int i = 0; i < 2'000; ++i) one.AddState(absl::StrCat("layer", i), DType::kFloat32, {i}, nullptr);
    if (rank == 1) one.AddState("one more", DType::kFloat32, {1}, nullptr);
    return one;
  };
  Compare(2, 0, {0, 0}, of, [](int rank, const absl::Status& status) {
    EXPECT_EQ(absl::IsFailedPrecondition(status), rank == 1) << status;
    EXPECT_THAT(status.message(), HasSubstr("rank 1 trains something else than rank 0"));
  });
}

}  // namespace
}  // namespace gtrain::elastic
