// Tests how far a record of samples can be from the steps that the head knew of.
#include "launcher/cli/data_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// A job of 60 samples an epoch in batches of 6, which makes two steps a second on one rank.
struct Job {
  json events = json::array();
  json goodput;
  std::optional<int64_t> step;
  int epochs = 3;

  static std::string Time(double second) {
    return absl::StrCat("2026-11-27T10:00:", second < 10 ? "0" : "", second, "Z");
  }
  static json Sums(std::optional<int64_t> last, double lost, bool anew = false) {
    const double made = static_cast<double>(last.value_or(0));
    return {{"wanted", 1},
            {"seconds", {{"step", made / 2}, {"lost", lost}}},
            {"steps",
             {{"last", last ? json(*last) : json()}, {"applied", anew || !last ? json() : json(*last)}}}};
  }
  Job& Record(double second, uint64_t generation, int64_t step, const std::string& name = "train") {
    events.push_back(
        {{"time", Time(second)},
         {"generation", generation},
         {"kind", "samples"},
         {"text", absl::StrCat("rank 0 on h: ", name, ": step ", step, ", epoch ", step / 10, " of ", epochs,
                               ", sample ", step % 10 * 6,
                               " of 60, batches of 6, seed 1, shuffled, short last batch, 1 rank, "
                               "saved with the state")}});
    return *this;
  }
  Job& Ends(double second, const std::string& kind, const json& sums) {
    events.push_back({{"time", Time(second)}, {"kind", kind}, {"text", ""}, {"goodput", sums}});
    return *this;
  }
  std::vector<sharding::SampleAudit> Audit() const {
    const auto said = RecordsIn(
        json{{"events", events}, {"goodput", goodput}, {"step", step ? json(*step) : json()}}.dump());
    EXPECT_TRUE(said.ok()) << said.status();
    return said.ok() ? sharding::AuditSamples(*said) : std::vector<sharding::SampleAudit>();
  }
  std::vector<std::string> Problems() const {
    const auto audits = Audit();
    return audits.empty() ? std::vector<std::string>{"none"} : audits[0].problems;
  }
};

TEST(DataRecords, StepsThatNobodyReportedAreCounted) {
  Job job;
  job.Record(0, 1, 0).Ends(9, "revoke", Job::Sums(12, 0.5)).Record(9.5, 2, 14);
  job.Record(20, 2, 30).Ends(21, "state", Job::Sums(30, 0.5));
  const auto audits = job.Audit();
  ASSERT_EQ(audits.size(), 1u);
  EXPECT_THAT(audits[0].problems, IsEmpty());
  EXPECT_EQ(sharding::UnreportedSteps(audits[0].kept[0]), 2);
  EXPECT_EQ(sharding::UnreportedSteps(audits[0].kept[1]), 0);
}

// The head tells the highest step of all generations, also of those whose steps were taken back.
TEST(DataRecords, WhatAnEarlierGenerationReportedIsNotReportedAgain) {
  Job job;
  job.Record(0, 1, 0).Ends(9, "revoke", Job::Sums(20, 0.5)).Record(9.5, 2, 10);
  json sums = Job::Sums(20, 1);
  sums["steps"]["recomputed"] = 4;
  job.Ends(15, "revoke", sums).Record(16, 3, 17).Ends(20, "revoke", sums);
  auto audits = job.Audit();
  ASSERT_EQ(audits.size(), 1u);
  EXPECT_EQ(sharding::UnreportedSteps(audits[0].kept[0]), 0);
  EXPECT_EQ(sharding::UnreportedSteps(audits[0].kept[1]), 3);
  sums["steps"]["last"] = sums["steps"]["applied"] = 23;
  job.Ends(21, "revoke", sums).Record(21, 4, 24);
  audits = job.Audit();
  EXPECT_EQ(sharding::UnreportedSteps(audits[0].kept[2]), 1);
}

TEST(DataRecords, AGenerationThatBeginsFurtherThanItsJobCameIsAContradiction) {
  const auto began_at = [](int64_t step, double second, double lost, int64_t last = 12) {
    Job job;
    job.epochs = 90;
    return job.Record(0, 1, 0).Ends(9, "revoke", Job::Sums(last, lost)).Record(second, 2, step).Problems();
  };
  EXPECT_THAT(
      began_at(455, 9, 0),
      ElementsAre(HasSubstr("generation 2 began at step 455, epoch 45, sample 30: before that its job "
                            "had reported step 12 at most, and can have made 442 more since")));
  EXPECT_THAT(began_at(454, 9, 0), IsEmpty());
  EXPECT_THAT(began_at(653, 9, 1), IsEmpty()) << "unheard for so long that it can have made them";
  EXPECT_THAT(began_at(654, 9, 1), Not(IsEmpty()));
  EXPECT_THAT(began_at(470, 10, 0), IsEmpty()) << "its machine heard of the end later";
  EXPECT_THAT(began_at(700, 9, 0, 2), IsEmpty()) << "too few steps to know a pace";
}

// A generation that trained for a moment has no more behind its last report than that moment.
TEST(DataRecords, NoReportIsLaterThanItsGenerationTrained) {
  Job job;
  job.epochs = 90;
  job.Record(0, 1, 0).Ends(9, "revoke", Job::Sums(20, 0)).Record(9, 2, 20);
  job.Ends(9.1, "revoke", Job::Sums(20, 0)).Record(9.1, 3, 50);
  EXPECT_THAT(job.Problems(), ElementsAre(HasSubstr("reported step 20 at most, and can have made 2")));
}

// Three ranks of 18.5 steps a second, as an honest run left them behind: the head heard of step 510 just
// before the end of the generation, with a heartbeat, and 527 was the next one. That takes 0.9 s.
TEST(DataRecords, AReportArrivesLaterThanItsStepWasMade) {
  Job job;
  const auto record = [&job](double second, uint64_t generation, int64_t step) {
    const std::string text = absl::StrCat("rank 0 on vm: train: step ", step, ", epoch ", step / 100,
                                          " of 12, sample ", step % 100 * 60,
                                          " of 6000, batches of 60, seed 0, shuffled, short last batch, 3 "
                                          "ranks, part of the state");
    job.events.push_back(
        {{"time", Job::Time(second)}, {"generation", generation}, {"kind", "samples"}, {"text", text}});
  };
  const auto ends = [&job](double second, int64_t last, double trained, double lost) {
    job.Ends(second, "revoke",
             {{"wanted", 3},
              {"seconds", {{"step", trained}, {"lost", lost}, {"recomputed", 0.0}}},
              {"steps", {{"last", last}, {"applied", last}, {"first", 1}, {"recomputed", 0}}}});
  };
  record(24.053, 1, 0);
  ends(36.36, 230, 35.85276113376471, 5.2289117647041916e-05);
  ends(39.363, 270, 41.870153160598036, 2.713567784117647);
  ends(43.201, 344, 53.41152324976471, 2.2929933951176467);
  ends(46.178, 397, 61.699625112764714, 2.683962044117647);
  record(46.197, 6, 415);
  ends(52.085, 510, 81.71493881876471, 0.007546814117647294);
  record(52.124, 7, 527);
  ends(57.899, 622, 96.40735665917649, 2.357081762117647);
  EXPECT_THAT(job.Problems(), IsEmpty());
}

TEST(DataRecords, StepsBehindARecordAreNotBeforeIt) {
  Job job;
  job.Record(0, 1, 0).Ends(9, "revoke", Job::Sums(5, 0)).Record(9, 2, 25).Ends(20, "revoke", Job::Sums(9, 0));
  EXPECT_THAT(job.Problems(),
              ElementsAre(HasSubstr("generation 2 began at step 25, epoch 2, sample 30: after that "
                                    "it has reported steps, and 9 at most. Batches between")));
  Job silent;  // it ended before it reported any
  silent.Record(0, 1, 0)
      .Ends(9, "revoke", Job::Sums(5, 0))
      .Record(9, 2, 7)
      .Ends(20, "revoke", Job::Sums(5, 0));
  EXPECT_THAT(silent.Problems(), IsEmpty());
  Job from_zero;  // the first step behind seven is called seven
  from_zero.Record(0, 1, 0)
      .Ends(9, "revoke", Job::Sums(5, 0))
      .Record(9, 2, 7)
      .Ends(20, "revoke", Job::Sums(7, 0));
  EXPECT_THAT(from_zero.Problems(), IsEmpty());
}

TEST(DataRecords, AnEndThatNoRankReportedIsAContradiction) {
  Job job;
  job.Record(0, 1, 0).Record(20, 1, 30).Ends(21, "state", Job::Sums(14, 0));
  EXPECT_THAT(job.Problems(),
              ElementsAre(HasSubstr("generation 1 was done at step 30, epoch 3, sample 0: before "
                                    "that its job had reported step 14 at most")));
  Job seldom;  // a program may report each fifteenth step
  seldom.Record(0, 1, 0).Record(20, 1, 30).Ends(21, "state", Job::Sums(15, 0));
  EXPECT_THAT(seldom.Problems(), IsEmpty());
  Job left;  // by what it left alone
  left.Record(0, 1, 0).Record(20, 1, 30);
  EXPECT_THAT(left.Problems(), IsEmpty());
  left.goodput = Job::Sums(14, 0);
  EXPECT_THAT(left.Problems(), ElementsAre(HasSubstr("was done at step 30")));
  left.step = 30;
  EXPECT_THAT(left.Problems(), IsEmpty());
}

TEST(DataRecords, ReportsOfOtherStepsAreNotCompared) {
  Job anew;
  anew.Record(0, 1, 0).Record(20, 1, 30).Ends(21, "state", Job::Sums(10, 0, /*anew=*/true));
  Job silent;
  silent.Record(0, 1, 0).Record(20, 1, 30).Ends(21, "state", Job::Sums(std::nullopt, 0));
  Job several;
  several.Record(0, 1, 0).Record(0, 1, 0, "other").Record(20, 1, 30).Ends(21, "state", Job::Sums(10, 0));
  for (const Job& job : {anew, silent, several}) {
    const auto audits = job.Audit();
    ASSERT_FALSE(audits.empty());
    EXPECT_THAT(audits[0].problems, IsEmpty());
    EXPECT_EQ(sharding::UnreportedSteps(audits[0].kept[0]), std::nullopt);
  }
}

TEST(DataRecords, WhatIsNoHistoryIsNone) {
  for (const char* text : {"", "[]", "{}", R"({"events":3})", R"({"events":[1,{"kind":"samples"}]})",
                           R"({"events":[],"goodput":{"steps":[],"seconds":1}})"}) {
    const auto said = RecordsIn(text);
    ASSERT_TRUE(said.ok()) << text;
    EXPECT_THAT(*said, IsEmpty());
  }
  EXPECT_FALSE(RecordsIn(R"({"events":[{"kind":"samples","text":"rank 0 on h: none"}]})").ok());
  Job early;  // its clock was set back meanwhile: no time to count with
  early.Record(20, 1, 0).Ends(9, "revoke", Job::Sums(12, 0)).Record(10, 2, 25);
  EXPECT_THAT(early.Problems(), IsEmpty());
}

}  // namespace
}  // namespace gtrain::cli
