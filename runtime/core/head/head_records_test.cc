// Tests jobs as several records: the writes of a change, the reads of a restart, and records that are set
// aside.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/core/head/head_test_world.h"
#include "runtime/core/values/job_records.h"

namespace gtrain::core {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

class RecordsTest : public HeadTestWorld {
 protected:
  // The keys that the step writes; those that it deletes with a "-" in front.
  std::vector<std::string> WrittenBy(const std::string& node, Message message) {
    StepResult step = head_->Step(
        PeerMessage{{Role::kNode, node}, RouteOf(node), "10.0.0.1", std::move(message)}, clock_.Now());
    std::vector<std::string> keys;
    for (const Effect& effect : step.effects) {
      const auto* persist = std::get_if<Persist>(&effect);
      if (persist == nullptr) continue;
      for (const RecordWrite& write : persist->writes) keys.push_back((write.record ? "" : "-") + write.key);
    }
    Do(std::move(step));
    return keys;
  }

  // The keys under "job/<id>", without that prefix.
  std::vector<std::string> KeysOnDisk(const JobId& job) const {
    std::vector<std::string> keys;
    for (const std::string& key : KeysOf(GatherJob(disk_, job)))
      keys.push_back(key.substr(std::string("job/").size() + job.value.size()));
    return keys;
  }

  // Starts another head that reads the same disk, and returns its messages.
  std::string Read(std::unique_ptr<HeadCore>& other) {
    other = std::make_unique<HeadCore>(config_, Rng(1));
    const auto recovered = other->Recover(OnDisk(), clock_.Now(), clock_.WallNow());
    EXPECT_TRUE(recovered.ok()) << recovered.status();
    return recovered.ok() ? recovered->why : "";
  }

  void ExpectARestartFindsTheSame(const JobId& job) {
    std::unique_ptr<HeadCore> other;
    Read(other);
    ASSERT_NE(other->RecordOf(job), nullptr);
    JobRecord before = *head_->RecordOf(job), after = *other->RecordOf(job);
    for (JobRecord* record : {&before, &after}) {  // count on between two writes
      record->event_sequence = 0;
      record->run_time = absl::ZeroDuration();
      record->run_time_at = absl::InfinitePast();
    }
    EXPECT_TRUE(before == after) << Name(after.state) << ": " << after.reason;
  }

  // Stores the job as a head wrote it before jobs had several records.
  void StoreInTheOldForm(const JobId& job) {
    const JobRecord record = Stored(job);
    for (const std::string& key : KeysOf(GatherJob(disk_, job))) disk_.erase(key);
    disk_[KeyOf(record)] = record;
  }

  // A job with a record of each kind.
  JobId JobWithEverything() {
    const JobId job = Submit("train 3 3");
    StartRanks(job);
    FromNode("1", RankExited{Exit(job, 1, 0, 0)});
    FromNode("1", RankExited{Exit(job, 1, 1, 1, "boom")});
    EXPECT_THAT(KeysOnDisk(job), UnorderedElementsAre("", "/status", "/grant", "/unreleased", "/exit/0",
                                                      "/exit/1", "/fault/1"));
    return job;
  }
};

TEST_F(RecordsTest, AChangeCostsWhatChanged) {
  constexpr int kRanks = 1'000;
  Hello("1", kRanks);
  const JobId job = Submit(absl::StrCat("train ", kRanks, " ", kRanks));
  StartRanks(job);
  RankStatus joined = Step(job, 1, 5, 1);
  joined.state = RankState::kJoined;
  EXPECT_THAT(WrittenBy("1", AgentHeartbeat{++heartbeats_, {joined}, {}}), ElementsAre("job/train-1/status"));
  for (int rank = 0; rank < kRanks - 1; ++rank) {
    ASSERT_THAT(WrittenBy("1", RankExited{Exit(job, 1, rank, 0)}),
                ElementsAre(absl::StrCat("job/train-1/exit/", rank), "job/train-1/status"));
  }
  EXPECT_EQ(Stored(job).exits.size(), static_cast<size_t>(kRanks - 1));
  const auto& status = std::get<JobStatusRecord>(disk_.at("job/train-1/status"));
  EXPECT_THAT(status.faults, IsEmpty());
  EXPECT_THAT(status.status.avoided, IsEmpty());
}

TEST_F(RecordsTest, ARestartFindsTheSameAfterEveryStep) {
  config_.jobs_max = 1;
  Boot();
  const JobId job = Submit("train 3 3");
  ExpectARestartFindsTheSame(job);
  Hello("1");
  ExpectARestartFindsTheSame(job);
  StartRanks(job);
  ExpectARestartFindsTheSame(job);
  FromNode("1", CheckpointReport{job, {1}, {1}, 40, "m/40", ""});
  ExpectARestartFindsTheSame(job);
  FromNode("1", RankExited{Exit(job, 1, 2, 0)});
  ExpectARestartFindsTheSame(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 1, "boom")});
  ExpectARestartFindsTheSame(job);
  FromNode("1", RankExited{Exit(job, 1, 1, 1)});
  ExpectARestartFindsTheSame(job);
  EXPECT_THAT(KeysOnDisk(job), UnorderedElementsAre("", "/status", "/grant", "/unreleased", "/exit/0",
                                                    "/exit/1", "/exit/2", "/fault/1"));
  FromNode("1", GenerationGone{job, {1}});
  Pass(absl::Seconds(5), {"1"});
  ASSERT_EQ(Status(job).at("generation"), 2);
  ExpectARestartFindsTheSame(job);
  EXPECT_EQ(Stored(job).faults.at(0).committed, 40) << "known when the fault was judged";
  EXPECT_THAT(KeysOnDisk(job), UnorderedElementsAre("", "/status", "/grant", "/fault/1"))
      << "exits are those of the newest generation";
  StartRanks(job);
  for (int rank = 0; rank < 3; ++rank) {
    FromNode("1", RankExited{Exit(job, 2, rank, 0)});
    ExpectARestartFindsTheSame(job);
  }
  EXPECT_EQ(State(job), "SUCCEEDED");
  Submit("next 1 1");
  EXPECT_THAT(KeysOnDisk(job), IsEmpty()) << "forgotten";
  EXPECT_EQ(head_->RecordOf(job), nullptr);
}

// The very first fault stays, of the others the newest.
TEST_F(RecordsTest, FaultsThatAreNotKeptAreDeleted) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  for (uint64_t generation = 1; generation <= 40; ++generation) {
    StartRanks(job);
    FromNode("1",
             CheckpointReport{job, {generation}, {generation}, static_cast<int64_t>(generation), "m", ""});
    FromNode("1", RankExited{Exit(job, generation, 0, 1, absl::StrCat("boom ", generation))});
    FromNode("1", GenerationGone{job, {generation}});
    Pass(absl::Minutes(6), {"1"});
    ASSERT_EQ(Status(job).at("generation"), generation + 1) << Status(job).dump();
  }
  EXPECT_EQ(Stored(job).faults.size(), 32u);
  EXPECT_THAT(KeysOnDisk(job), AllOf(Contains("/fault/1"), Contains("/fault/40"), Not(Contains("/fault/2"))));
  ExpectARestartFindsTheSame(job);
}

// A head keeps thousands of jobs that are over: each has few records, however many ranks it had.
TEST_F(RecordsTest, ExitsOfAJobThatIsOverArePacked) {
  constexpr int kRanks = 1'100;
  Hello("1", kRanks);
  config_.jobs_max = 1;
  Boot();
  Hello("1", kRanks);
  const JobId job = Submit(absl::StrCat("train ", kRanks, " ", kRanks));
  StartRanks(job);
  for (int rank = 0; rank < kRanks - 1; ++rank)
    Do(head_->Step(
        PeerMessage{{Role::kNode, "1"}, RouteOf("1"), "10.0.0.1", RankExited{Exit(job, 1, rank, 0)}},
        clock_.Now()));
  EXPECT_THAT(KeysOnDisk(job), Contains("/exit/7")) << "not before it is over";
  RankExit exit = Exit(job, 1, kRanks - 1, 0);
  exit.message = "words";
  const std::vector<std::string> last = WrittenBy("1", RankExited{exit});
  ASSERT_EQ(State(job), "SUCCEEDED");
  EXPECT_THAT(last, AllOf(Contains("-job/train-1/exit/0"), Contains("job/train-1/exits/1024")));
  EXPECT_THAT(KeysOnDisk(job), UnorderedElementsAre("", "/status", "/grant", "/exits/0", "/exits/1024"));
  ExpectARestartFindsTheSame(job);
  Boot();
  ASSERT_EQ(head_->RecordOf(job)->exits.size(), static_cast<size_t>(kRanks));
  EXPECT_EQ(head_->RecordOf(job)->exits.back().message, "words");

  const std::map<std::string, Record> disk = disk_;
  for (const std::string key : {"/exits/0", "/exits/1024"}) {
    disk_ = disk;
    disk_.erase(absl::StrCat("job/train-1", key));
    std::unique_ptr<HeadCore> other;
    EXPECT_THAT(Read(other), HasSubstr(absl::StrCat("its record \"job/train-1", key, "\" is missing")));
  }
  disk_ = disk;
  Submit("next 1 1");
  EXPECT_THAT(KeysOnDisk(job), IsEmpty()) << "forgotten";
}

// Read in any order, as they lie in a store or not.
TEST(StoredRecords, ExitsHaveTheirPlacesWhateverOrderTheyAreReadIn) {
  const JobId job("train-1");
  const auto exit = [&](int rank) { return RankExit{.job = job, .generation = {1}, .rank = rank}; };
  JobRecord record{{.id = job, .number = 1}, {.generation = {1}}};
  for (int rank = 0; rank < 14; ++rank) record.exits.push_back(exit(rank));
  std::vector<Record> records = {StatusRecordOf(record, 3), JobSubmission(record),
                                 JobExitsRecord{job, 2, {exit(2)}},
                                 JobExitsRecord{job, 0, {exit(0), exit(1)}}};
  for (int index : {10, 11, 12, 13, 3, 4, 5, 6, 7, 8, 9})
    records.push_back(JobExitRecord{job, index, exit(index)});
  const auto join = [&](auto change) {
    std::vector<Record> changed = records;
    change(changed);
    StoredRecords stored;
    for (Record& one : changed) stored.Add(std::move(one));
    return JoinJob(std::move(stored.jobs.at(job)));
  };
  EXPECT_TRUE(*join([](auto&) {}) == record);
  const auto word = [&](auto change) { return std::string(join(change).status().message()); };
  EXPECT_THAT(word([](auto& all) { all.erase(all.begin() + 2); }), HasSubstr("/exits/2\" is missing"));
  EXPECT_THAT(word([](auto& all) { all.erase(all.begin() + 3); }), HasSubstr("/exits/0\" is missing"));
  EXPECT_THAT(word([](auto& all) { all.pop_back(); }), HasSubstr("/exit/9\" is missing"));
  EXPECT_THAT(word([&](auto& all) {
                all.push_back(JobExitRecord{job, 14, exit(14)});
              }),
              HasSubstr("/exit/14\" does not belong"));
  EXPECT_THAT(word([&](auto& all) {
                all.push_back(JobExitRecord{job, 1, exit(1)});
              }),
              HasSubstr("/exit/1\" does not belong"))
      << "it is packed";
  EXPECT_THAT(word([&](auto& all) {
                all.push_back(JobExitsRecord{job, 3, {exit(3)}});
              }),
              HasSubstr("/exits/3\" does not belong"));
  EXPECT_THAT(word([&](auto& all) { std::get<JobExitsRecord>(all[2]).exits.push_back(exit(3)); }),
              HasSubstr("/exits/2\" does not belong"))
      << "longer than the status says";
}

TEST_F(RecordsTest, TheOldFormIsReadAndReplaced) {
  Hello("1");
  const JobId job = JobWithEverything();
  StoreInTheOldForm(job);
  // Left by a newer head before the older one took the job up.
  disk_["job/train-1/exit/7"] = JobExitRecord{job, 7, Exit(job, 1, 7, 0)};
  ExpectARestartFindsTheSame(job);
  Boot();
  EXPECT_TRUE(std::holds_alternative<JobRecord>(disk_.at("job/train-1"))) << "nothing has changed yet";
  Hello("1", 4, {HeldGeneration{job, {1}, {1}}});
  FromNode("1", RankExited{Exit(job, 1, 2, 1)});
  EXPECT_THAT(KeysOnDisk(job), UnorderedElementsAre("", "/status", "/grant", "/unreleased", "/exit/0",
                                                    "/exit/1", "/exit/2", "/fault/1"));
  EXPECT_TRUE(std::holds_alternative<JobSubmission>(disk_.at("job/train-1")));
  ExpectARestartFindsTheSame(job);
}

TEST_F(RecordsTest, AnOldJobThatIsForgottenLeavesNothing) {
  Hello("1");
  const JobId job = Submit("train 1 1");
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  StoreInTheOldForm(job);
  disk_["job/train-1/exit/7"] = JobExitRecord{job, 7, Exit(job, 1, 7, 0)};
  config_.jobs_max = 1;
  Boot();
  Submit("next 1 1");
  EXPECT_THAT(KeysOnDisk(job), IsEmpty());
}

TEST_F(RecordsTest, AJobThatLacksARecordIsSetAsideByNameAndNoOther) {
  Hello("1", 8);
  const JobId job = JobWithEverything(), other_job = Submit("other 1 1");
  const std::map<std::string, Record> disk = disk_;
  for (const std::string& key : KeysOf(GatherJob(disk, job))) {
    for (const bool unreadable : {false, true}) {
      disk_ = disk;
      disk_.erase(key);
      set_aside_.clear();
      if (unreadable) set_aside_.push_back(key);
      std::unique_ptr<HeadCore> other;
      EXPECT_THAT(Read(other), HasSubstr(absl::StrCat("train-1 is set aside: its record \"", key, "\" ",
                                                      unreadable ? "cannot be read" : "is missing")));
      EXPECT_EQ(other->RecordOf(job), nullptr) << key;
      EXPECT_NE(other->RecordOf(other_job), nullptr) << key;
    }
  }
}

TEST_F(RecordsTest, RecordsWithoutTheirJobAreSetAsideByName) {
  Hello("1");
  const JobId job = JobWithEverything(), ghost("ghost-9");
  disk_["job/ghost-9/exit/0"] = JobExitRecord{ghost, 0, Exit(ghost, 1, 0, 0)};
  std::unique_ptr<HeadCore> other;
  EXPECT_THAT(Read(other), HasSubstr("ghost-9 is set aside: its record \"job/ghost-9\" is missing"));
  EXPECT_NE(other->RecordOf(job), nullptr);
  EXPECT_EQ(other->RecordOf(ghost), nullptr);

  disk_["job/train-1/exit/2"] = JobExitRecord{job, 2, Exit(job, 1, 2, 0)};
  EXPECT_THAT(Read(other), HasSubstr("its record \"job/train-1/exit/2\" does not belong to the others"));
}

// Ranks that are taken up again in the stead of a job that was set aside.
TEST_F(RecordsTest, NothingOfWhatWasSetAsideLiesBesideTheJobThatIsTakenUp) {
  Hello("1");
  const JobId job = Submit("train 3 3");
  const GenerationGrant grant = Sent<StartGeneration>().at(0).second.grant;
  StartRanks(job);
  FromNode("1", RankExited{Exit(job, 1, 0, 0)});
  disk_.erase("job/train-1/grant");
  Boot();
  GenerationDescribed described;
  described.grant = grant;
  described.held = HeldGeneration{job, {1}, {0}, {Step(job, 1, 1, 7), Step(job, 1, 2, 7)}, {}};
  Hello("1", 4, {described.held});
  FromNode("1", described);
  ASSERT_NE(head_->RecordOf(job), nullptr);
  EXPECT_THAT(KeysOnDisk(job), Not(Contains("/exit/0")));
  ExpectARestartFindsTheSame(job);
}

}  // namespace
}  // namespace gtrain::core
