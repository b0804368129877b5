// Tests which processes get the signals of a stop and of a notice, and which peers count as agents.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/host/keeper_test_world.h"
#include "runtime/keeper/posix.h"

namespace gtrain::host {
namespace {

// `script:` and `sh -c "program; ..."`: the shell dies of the signal that its program saves at, which may
// take as long as the grace.
TEST_F(KeeperTest, WhatASavingShellRunsHasTheGrace) {
  Start();
  Launch(
      {"sh -c 'trap \"sleep 3; echo told; echo saved > saved; exit 0\" TERM; echo ready > ready; while true; "
       "do sleep 0.1; done' > log 2>&1; echo behind"});  // nothing but its group says that it is there
  AwaitReady();
  StopAndExpectASave();
}

// `timeout` makes a process group of its own, which the signal to the rank's does not reach.
TEST_F(KeeperTest, WhatAShellRunsInAnotherGroupIsAskedToSaveToo) {
  Start();
  std::ofstream(Path("program")) << "trap 'sleep 3; echo saved > saved; exit 0' TERM; echo ready > ready; "
                                    "while true; do sleep 0.1; done";
  Launch({"timeout 600 bash program; echo behind"});
  AwaitReady();
  StopAndExpectASave();
}

// A rank's process whose parent ends while it is looked for is still below its keeper.
TEST(Posix, WhoseParentEndsMeanwhileIsNotTakenForAnAgent) {
  int pipe_of_pids[2];
  ASSERT_EQ(pipe(pipe_of_pids), 0);
  const pid_t keeper = fork();
  ASSERT_GE(keeper, 0);
  if (keeper == 0) {
    prctl(PR_SET_NAME, keeper::kKeeperName);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGCHLD, SIG_IGN);  // children vanish at once
    for (;;) {
      const pid_t parent = fork();
      if (parent != 0) {
        poll(nullptr, 0, 1);
        continue;
      }
      const pid_t child = fork();
      if (child == 0) {
        poll(nullptr, 0, 20);
        _exit(0);
      }
      if (write(pipe_of_pids[1], &child, sizeof(child)) != sizeof(child)) _exit(1);
      for (volatile int spin = child * 7919 % 30'000; spin > 0;) spin = spin - 1;
      _exit(0);
    }
  }
  int placed = 0, unplaced = 0;
  for (int i = 0; i < 4000; ++i) {
    pid_t child = 0;
    ASSERT_EQ(read(pipe_of_pids[0], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
    const auto above = keeper::KeepersAbove(child);
    if (!above) {
      ++unplaced;  // its way up could not be seen, or it has ended
    } else {
      ++placed;
      ASSERT_THAT(*above, ::testing::Contains(keeper)) << "after " << i;
    }
  }
  EXPECT_GT(placed, 400) << unplaced
                         << " could not be placed: the others had ended before they were looked at";
  kill(keeper, SIGKILL);
  waitpid(keeper, nullptr, 0);
  close(pipe_of_pids[0]);
  close(pipe_of_pids[1]);
}

TEST_F(KeeperTest, NoticeWritesTheFileAndSignals) {
  Start();
  Launch({"trap 'cat notice-0; exit 5' USR1; echo ready > ready; while true; do sleep 0.1; done"});
  AwaitReady();
  client_->Send(keeper::Notice{1, 42, SIGUSR1});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->code, 5);
  EXPECT_EQ(exit->tail, "42\n");
}

// An agent that has just started does not know what the one before it has said.
TEST_F(KeeperTest, ANoticeThatComesAgainGivesNoSecondSignal) {
  Start();
  Launch(
      {"trap 'echo told >> heard' USR1; trap 'exit 5' USR2; echo ready > ready; while true; do sleep 0.1; "
       "done"});
  AwaitReady();
  client_->Send(keeper::Notice{1, 90, SIGUSR1, 1});
  ASSERT_TRUE(Until([&] {  // two that wait to be heard are one
    Pump();
    return Slurp(Path("heard")) == "told\n";
  }));
  client_->Send(keeper::Notice{1, 60, SIGUSR1, 1});
  ASSERT_TRUE(Until([&] {
    Pump();
    return Slurp(Path("notice-0")) == "60\n";
  }));
  client_->Send(keeper::Notice{1, 30, SIGUSR2, 2});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->code, 5);
  EXPECT_EQ(Slurp(Path("heard")), "told\n");
}

// A shell has no handler and would die; its program, which has one, would be ended with it.
TEST_F(KeeperTest, ANoticeToAShellReachesWhatItRuns) {
  Start();
  const std::string script =
      "trap 'cat notice-0; exit 5' TERM; echo ready > ready; while true; do sleep 0.1; done";
  std::ofstream(Path("program")) << script;
  std::ofstream(Path("run.sh"))
      << "#!/bin/bash\ntrap true EXIT\nbash program\nexit $?\n";  // calls itself run.sh
  fs::permissions(Path("run.sh"), fs::perms::owner_all);
  Launch({"true; sleep 600 & ./run.sh; echo the shell lives; exit 6"});
  AwaitReady();
  client_->Send(keeper::Notice{1, 42, SIGTERM});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->code, 6);
  EXPECT_EQ(exit->tail, "42\nthe shell lives\n");
}

TEST_F(KeeperTest, ANoticeOfWhichNoProgramKnowsEndsTheShell) {
  Start();
  Launch({"echo ready > ready; sleep 600; echo behind"});
  AwaitReady();
  client_->Send(keeper::Notice{1, 42, SIGTERM});
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->signal, SIGTERM);
}

}  // namespace
}  // namespace gtrain::host
