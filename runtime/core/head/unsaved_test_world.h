// The world of jobs whose newest steps only their ranks know.
#pragma once
#include <string>

#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "runtime/core/head/newcomers_test_world.h"

namespace gtrain::core {

// Four ranks on two machines, which have made step 7 of which no checkpoint has more than step 3.
class UnsavedTest : public NewcomersTest {
 protected:
  void Run(const std::string& spec) {
    Hello("1", 2);
    Hello("2", 2);
    RunThere(spec);
  }
  void RunThere(const std::string& spec) {
    job_ = Submit(spec);
    StartRanks(job_);
    StayAndStep(job_, 1, 5);
    FromNode("1", CheckpointReport{job_, {1}, Timeline{1}, 3, "three"});
    Steps(job_, 1, 7);
  }
  // Two ranks are left of four that are needed.
  void LoseAMachine() {
    sent_.clear();
    Pass(absl::Seconds(11), {"2"});
    FromNode("2", GenerationGone{job_, {1}, true, "", {{{1}, 2}, {{1}, 3}}});
  }
  // The ranks that are left come to their generation.
  void Come() {
    StartRanks(job_);
    AllJoin(job_);
  }
  // Rank 0 ends with an error.
  void Crash(int exit_code = 1) {
    const GenerationGrant last = Newest();
    FromNode(last.ranks[0].node.value, RankExited{Exit(job_, last.generation.value, 0, exit_code)});
    GoneBut({0});
  }
  // With another error each time, until the head waits before it tries again.
  void CrashAgainAndAgain() {
    for (Generation last; last != Newest().generation;) {
      ASSERT_LE(Newest().generation.value, 8u);
      last = Newest().generation;
      StartRanks(job_);
      Crash(static_cast<int>(last.value));
    }
    tried_ = Newest().generation;
    ASSERT_EQ(State(job_), "RECONFIGURING");
  }
  std::string Reason() { return Status(job_).at("reason").get<std::string>(); }
  JobId job_;
  Generation tried_;  // the newest, when CrashAgainAndAgain is done
};

}  // namespace gtrain::core
