#include "sharding/ledger/ledger.h"

#include <set>

#include "absl/strings/str_replace.h"
#include "base/rng.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "sharding/ledger/audit.h"

namespace gtrain::sharding {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Shuffle, EveryOrderHoldsEachSampleOnce) {
  for (int64_t n : {1, 2, 3, 4, 5, 10, 16, 17, 1000, 4096, 60'000}) {
    for (uint64_t seed : {0u, 1u, 77u}) {
      const Shuffle order(n, seed, 3);
      std::vector<int> seen(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) ++seen.at(static_cast<size_t>(order.At(i)));
      EXPECT_THAT(seen, Each(1)) << n << " samples, seed " << seed;
    }
  }
}

// Checkpoints go on in the order in which they were begun, whatever version reads them: these numbers stay.
TEST(Shuffle, TheOrderNeverChanges) {
  const auto first = [](int64_t n, uint64_t seed, int64_t epoch) {
    std::vector<int64_t> out;
    for (int64_t i = 0; i < 6; ++i) out.push_back(Shuffle(n, seed, epoch).At(i));
    return out;
  };
  EXPECT_THAT(first(10, 0, 0), ElementsAre(8, 5, 6, 2, 0, 1));
  EXPECT_THAT(first(60'000, 1, 0), ElementsAre(17032, 41727, 21919, 25549, 21281, 25735));
  EXPECT_THAT(first(60'000, 1, 1), ElementsAre(23009, 40606, 57675, 1290, 46731, 30674));
  EXPECT_THAT(first(int64_t{1} << 48, 7, 2), ElementsAre(5151527778197, 28033491716094, 207578849226432,
                                                         18572910916202, 142844841681338, 173283438232969));
}

// Where each sample comes to stand over many epochs: every place as often as the others, and neighbours do
// not stay neighbours. The bounds are five standard deviations.
TEST(Shuffle, EpochsAreUnlikeEachOther) {
  constexpr int64_t kSamples = 64;
  constexpr int kEpochs = 64'000;
  std::vector<int> of_first(kSamples), gap(kSamples);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const Shuffle order(kSamples, 5, epoch);
    ++of_first[static_cast<size_t>(order.At(0))];
    ++gap[static_cast<size_t>((order.At(11) - order.At(10) + kSamples) % kSamples)];
  }
  const double mean = double{kEpochs} / kSamples;
  for (int count : of_first) EXPECT_NEAR(count, mean, 5 * std::sqrt(mean));
  EXPECT_EQ(gap[0], 0);
  for (size_t d = 1; d < gap.size(); ++d)
    EXPECT_NEAR(gap[d], double{kEpochs} / (kSamples - 1), 5 * std::sqrt(mean));
}

// Trains by the ledger and counts how often each sample of each epoch was met.
class Trainer {
 public:
  explicit Trainer(SampleOptions options) : options_(options) {}

  // One batch by `ranks` ranks, each of which takes its share.
  void Step(int ranks) {
    const SampleRange batch = BatchAt(options_, cursor_);
    int64_t taken = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int64_t sample : SamplesOf(options_, ShareOf(batch, rank, ranks))) {
        ++seen_[{batch.epoch, sample}];
        ++taken;
      }
    }
    EXPECT_EQ(taken, batch.size());
    EXPECT_GT(taken, 0);
    cursor_ = Advance(options_, cursor_);
  }
  bool done() const { return AtEnd(options_, cursor_); }
  SampleOptions& options() { return options_; }
  const SampleCursor& cursor() const { return cursor_; }
  const std::map<std::pair<int64_t, int64_t>, int>& seen() const { return seen_; }

 private:
  SampleOptions options_;
  SampleCursor cursor_;
  std::map<std::pair<int64_t, int64_t>, int> seen_;
};

TEST(Ledger, EachSampleOfEachEpochOnceAtAnySequenceOfWorlds) {
  Rng rng(1);
  for (int round = 0; round < 50; ++round) {
    Trainer trainer({.samples = static_cast<int64_t>(1 + rng.Below(500)),
                     .epochs = static_cast<int64_t>(1 + rng.Below(4)),
                     .global_batch = static_cast<int64_t>(1 + rng.Below(70)),
                     .seed = rng.Next(),
                     .shuffle = rng.Chance(0.7)});
    while (!trainer.done()) {
      trainer.Step(static_cast<int>(1 + rng.Below(100)));
      if (rng.Chance(0.05)) trainer.options().global_batch = static_cast<int64_t>(1 + rng.Below(70));
    }
    const SampleOptions& o = trainer.options();
    EXPECT_EQ(trainer.seen().size(), static_cast<size_t>(o.samples * o.epochs));
    for (const auto& [sample, times] : trainer.seen()) EXPECT_EQ(times, 1);
  }
}

TEST(Ledger, DropLastTrainsWholeBatchesOnly) {
  Trainer trainer({.samples = 100, .epochs = 2, .global_batch = 30, .drop_last = true});
  int steps = 0;
  for (; !trainer.done(); ++steps) {
    EXPECT_EQ(BatchAt(trainer.options(), trainer.cursor()).size(), 30);
    trainer.Step(4);
  }
  EXPECT_EQ(steps, 6);
  // Larger batches from the middle of an epoch on: what is left of it is no whole batch.
  SampleOptions larger{.samples = 100, .epochs = 2, .global_batch = 80, .drop_last = true};
  EXPECT_EQ(BatchAt(larger, {1, 0, 30}), (SampleRange{1, 0, 80}));
  EXPECT_TRUE(AtEnd(larger, {4, 1, 30}));
}

TEST(Ledger, AdvanceByManyIsManyAdvances) {
  Rng rng(2);
  for (int round = 0; round < 200; ++round) {
    const SampleOptions o{.samples = static_cast<int64_t>(1 + rng.Below(60)),
                          .epochs = static_cast<int64_t>(1 + rng.Below(5)),
                          .global_batch = static_cast<int64_t>(1 + rng.Below(20)),
                          .drop_last = rng.Chance(0.5)};
    if (!CheckSampleOptions(o).ok()) continue;
    SampleCursor by_one;
    for (int64_t n = 0; n < 80; ++n) {
      EXPECT_EQ(Advance(o, {}, n), NextBatch(o, by_one)) << n;
      by_one = Advance(o, by_one);
    }
  }
}

TEST(Ledger, CostsNothingForDataOfAnySize) {
  const SampleOptions o{.samples = kSamplesMax, .epochs = 1000, .global_batch = 4'194'304, .seed = 9};
  ASSERT_TRUE(CheckSampleOptions(o).ok());
  const SampleCursor far = Advance(o, {}, int64_t{67'108'864} * 999 + 5);
  EXPECT_EQ(far, (SampleCursor{int64_t{67'108'864} * 999 + 5, 999, 5 * 4'194'304}));
  const SampleRange share = ShareOf(BatchAt(o, far), 9'999, 10'000);
  EXPECT_EQ(share.end, far.offset + 4'194'304);
  const std::vector<int64_t> samples = SamplesOf(o, share);
  EXPECT_EQ(std::set<int64_t>(samples.begin(), samples.end()).size(), static_cast<size_t>(share.size()));
}

TEST(Ledger, WrongNumbersAreNamed) {
  const auto said = [](SampleOptions o) { return std::string(CheckSampleOptions(o).message()); };
  EXPECT_THAT(said({.samples = 0, .global_batch = 1}),
              HasSubstr("`samples` is 0; it is 1 to 281474976710656"));
  EXPECT_THAT(said({.samples = 5, .epochs = 0, .global_batch = 1}), HasSubstr("`epochs` is 0"));
  EXPECT_THAT(said({.samples = 5, .global_batch = -3}), HasSubstr("`global_batch` is -3"));
  EXPECT_THAT(said({.samples = 5, .global_batch = 6, .drop_last = true}),
              HasSubstr("drop_last drops them all"));
  EXPECT_THAT(said({.samples = kSamplesMax, .epochs = kEpochsMax, .global_batch = 1}), HasSubstr("steps"));
  EXPECT_EQ(said({.samples = 5, .global_batch = 6}), "");
  const SampleOptions o{.samples = 5, .global_batch = 2, .seed = 1};
  EXPECT_THAT(CheckSameData(o, {.samples = 6, .global_batch = 2, .seed = 1}).message(),
              HasSubstr("begun with samples 5, and this program says 6"));
  EXPECT_THAT(CheckSameData(o, {.samples = 5, .global_batch = 2, .seed = 2}).message(), HasSubstr("seed 1"));
  EXPECT_TRUE(CheckSameData(o, {.samples = 5, .epochs = 9, .global_batch = 3, .seed = 1}).ok());
  EXPECT_TRUE(CheckCursor(o, {3, 1, 0}).ok());
  EXPECT_EQ(CheckCursor(o, {3, 0, 6}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(CheckCursor(o, {-1, 0, 0}).code(), absl::StatusCode::kDataLoss);
}

// ---------------------------------------------------------------- records and the audit

constexpr SampleOptions kData{.samples = 100, .epochs = 3, .global_batch = 30, .seed = 7};

SampleRecord At(int64_t step, int ranks = 4, const SampleOptions& options = kData) {
  return {"train", options, Advance(options, {}, step), ranks};
}

TEST(Audit, RecordsReadBackAsTheyWerePrinted) {
  EXPECT_EQ(PrintSampleRecord(At(5)),
            "train: step 5, epoch 1 of 3, sample 30 of 100, batches of 30, seed 7, shuffled, short last "
            "batch, 4 ranks, part of the state");
  for (SampleRecord record : {At(0), At(5, 1), At(12)}) {
    for (bool flag : {false, true}) {
      record.options.shuffle = flag;
      record.options.drop_last = !flag;
      record.saved = flag;
      record.options.seed = ~uint64_t{0};
      const auto parsed = ParseSampleRecord(PrintSampleRecord(record));
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      EXPECT_EQ(*parsed, record);
    }
  }
  SampleRecord longest{std::string(kSampleNameBytesMax, 'x'),
                       {kSamplesMax, kEpochsMax, kSamplesMax, ~uint64_t{0}},
                       {kStepsMax, kEpochsMax, kSamplesMax},
                       65'536};
  EXPECT_LE(PrintSampleRecord(longest).size(), 330u);
  EXPECT_TRUE(ParseSampleRecord(PrintSampleRecord(longest)).ok());
  const std::string good = PrintSampleRecord(At(5));
  // Older versions said these of all state, also of that which was in no checkpoint.
  for (const char* words : {"saved with checkpoints", "saved with the state"}) {
    const auto older = ParseSampleRecord(absl::StrReplaceAll(good, {{"part of the state", words}}));
    ASSERT_TRUE(older.ok()) << older.status();
    EXPECT_EQ(*older, At(5));
  }
  for (const std::string& bad :
       {good + "x", good.substr(0, good.size() - 1), std::string("train"), std::string(), ": " + good,
        "a b" + good, good.substr(0, 12) + "-" + good.substr(12)})
    EXPECT_FALSE(ParseSampleRecord(bad).ok()) << bad;
}

TEST(Audit, GenerationsThatGoOnAreExact) {
  SampleOptions larger = kData;
  larger.global_batch = 50;
  SampleRecord resized = At(6, 2);
  resized.options = larger;
  SampleRecord end{"train", larger, Advance(larger, resized.cursor, 1000), 3};
  const auto audits = AuditSamples({{1, At(0)}, {2, At(3)}, {3, At(3, 3)}, {4, resized}, {5, end}});
  ASSERT_EQ(audits.size(), 1u);
  EXPECT_THAT(audits[0].problems, IsEmpty());
  EXPECT_TRUE(audits[0].finished);
  EXPECT_EQ(audits[0].reached.epoch, 3);
  std::vector<uint64_t> kept;
  for (const KeptRange& range : audits[0].kept) kept.push_back(range.generation);
  EXPECT_THAT(kept, ElementsAre(1, 3, 4, 5)) << "generation 2 trained nothing that was kept";
}

// A generation that went on from an older checkpoint takes back what came after it.
TEST(Audit, AnOlderCheckpointTakesBack) {
  const auto audits = AuditSamples({{1, At(0)}, {2, At(5)}, {3, At(9)}, {4, At(5)}, {5, At(12)}});
  EXPECT_THAT(audits[0].problems, IsEmpty());
  EXPECT_TRUE(audits[0].finished);
  EXPECT_EQ(audits[0].kept[0].to.step, 5);
}

TEST(Audit, WhatIsTrainedTwiceOrNeverIsNamed) {
  SampleRecord wrong = At(5);
  wrong.cursor.offset = 60;
  auto audits = AuditSamples({{1, At(0)}, {2, wrong}, {3, At(12)}});
  EXPECT_THAT(audits[0].problems,
              ElementsAre(HasSubstr(
                  "generation 2 began at step 5, epoch 1, sample 60: generation 1 would have been at step "
                  "5, epoch 1, sample 30 then; what lies between is trained twice or never")));
  SampleRecord other = At(5);
  other.options.seed = 8;
  EXPECT_THAT(AuditSamples({{1, At(0)}, {2, other}})[0].problems, ElementsAre(HasSubstr("seed 7")));
  EXPECT_THAT(AuditSamples({{2, At(5)}})[0].problems,
              ElementsAre(HasSubstr("nothing says what was trained before")));
  SampleRecord unsaved = At(0);
  unsaved.saved = false;
  EXPECT_THAT(AuditSamples({{1, unsaved}})[0].problems, IsEmpty());
  EXPECT_THAT(AuditSamples({{1, unsaved}, {2, unsaved}})[0].problems,
              ElementsAre(HasSubstr("does not save where it is")));
  audits = AuditSamples({{1, At(0)}, {2, At(5)}});
  EXPECT_THAT(audits[0].problems, IsEmpty());
  EXPECT_FALSE(audits[0].finished);
  EXPECT_EQ(audits[0].reached, (SampleCursor{5, 1, 30}));
}

// What ranks reported tells an honest end of a range from batches that were passed over.
TEST(Audit, WhatWasReportedIsCompared) {
  const auto problems = [](const StepsReported& reported) {
    return AuditSamples({{1, At(0)}, {2, At(5), reported}, {3, At(12)}})[0].problems;
  };
  EXPECT_THAT(problems({3, 2, 3}), IsEmpty());
  EXPECT_THAT(
      problems({2, 2, 2}),
      ElementsAre("generation 2 began at step 5, epoch 1, sample 30: before that its job had reported step "
                  "2 at most, and can have made 2 more since. Batches between were given to "
                  "nobody, or the record was changed; or the program reports another number than this "
                  "ledger's step, and has to report that for an audit"));
  EXPECT_THAT(problems({2, std::nullopt, 2}), IsEmpty()) << "nobody knows";
  EXPECT_THAT(AuditSamples({{1, At(0)}, {1, At(12), StepsReported{2, 3, 2}}})[0].problems,
              ElementsAre(HasSubstr("generation 1 was done at step 12")));
  const auto audits = AuditSamples({{1, At(0)},
                                    {2, At(5), StepsReported{3, {}, 3}},
                                    {3, At(8), StepsReported{8, {}, 8}},
                                    {4, At(4), StepsReported{9, {}, 9}},
                                    {5, At(12)}});
  ASSERT_EQ(audits[0].kept.size(), 3u);
  EXPECT_EQ(UnreportedSteps(audits[0].kept[0]), 1)
      << "what others reported of steps that are gone is not its own";
  EXPECT_EQ(UnreportedSteps(audits[0].kept[1]), std::nullopt);
}

TEST(Audit, EachNameByItself) {
  SampleRecord other = At(0);
  other.name = "eval";
  const auto audits = AuditSamples({{1, At(0)}, {1, other}, {2, At(3)}});
  ASSERT_EQ(audits.size(), 2u);
  EXPECT_EQ(audits[1].name, "eval");
  EXPECT_THAT(audits[0].problems, IsEmpty());
  EXPECT_THAT(audits[1].problems, IsEmpty());
}

}  // namespace
}  // namespace gtrain::sharding
