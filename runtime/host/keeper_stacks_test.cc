// Tests programs beside a rank: commands whose two outputs are told apart, and debuggers; and ranks on a
// terminal.
#include <errno.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/host/keeper_test_world.h"
#include "runtime/keeper/stacks.h"

namespace gtrain::host {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class KeeperStacksTest : public KeeperTest {
 protected:
  const keeper::ExecDone* Run(uint64_t id, std::vector<std::string> argv, uint64_t limit_ms, bool apart) {
    client_->Send(keeper::Exec{id, 1, 0, std::move(argv), limit_ms, apart});
    return Wait<keeper::ExecDone>([id](const keeper::ExecDone& done) { return done.id == id; });
  }
};

TEST_F(KeeperStacksTest, OutputsOfACommandAreToldApartWhereAsked) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  const std::vector<std::string> both = {"sh", "-c", "echo out; echo err >&2; kill -SEGV $$"};
  const auto* apart = Run(1, both, 30000, true);
  ASSERT_NE(apart, nullptr);
  EXPECT_EQ(apart->output, "out\n");
  EXPECT_EQ(apart->err, "err\n");
  EXPECT_EQ(apart->status, 128 + SIGSEGV);
  EXPECT_FALSE(apart->timed_out);
  const auto* together = Run(2, both, 30000, false);
  ASSERT_NE(together, nullptr);
  EXPECT_EQ(together->output, "out\nerr\n");
  EXPECT_EQ(together->err, "");
  const auto* late = Run(3, {"sh", "-c", "echo begun; sleep 600"}, 300, true);
  ASSERT_NE(late, nullptr);
  EXPECT_TRUE(late->timed_out);
  EXPECT_EQ(late->output, "begun\n");
}

TEST_F(KeeperStacksTest, WhatIsLeftOutOfTheOutputIsCounted) {
  Start();
  Launch({"exec sleep 600"});
  ASSERT_NE(WaitStarted(0), nullptr);
  const auto* much = Run(1, {"sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"}, 30000, true);
  ASSERT_NE(much, nullptr);
  EXPECT_THAT(much->err, HasSubstr("bytes of output were left out"));
  EXPECT_LT(much->output.size() + much->err.size(), 1u << 20);
}

TEST(Stacks, TheSettingThatForbidsItIsNamed) {
  const auto why = [](keeper::PtraceFacts facts) {
    facts.error = EPERM;
    return keeper::WhyNotTraced(77, facts);
  };
  EXPECT_THAT(why({.yama = "1"}), HasSubstr("sysctl kernel.yama.ptrace_scope=0"));
  EXPECT_THAT(why({.yama = "1"}),
              HasSubstr("process 77 may not be traced (ptrace: Operation not permitted)"));
  EXPECT_THAT(why({.yama = "3", .capability = true}), HasSubstr("kernel.yama.ptrace_scope is 3"));
  EXPECT_THAT(why({.yama = "1", .capability = true, .seccomp = true}), HasSubstr("--cap-add SYS_PTRACE"));
  EXPECT_THAT(why({.yama = "1", .capability = true, .seccomp = true}), Not(HasSubstr("yama")));
  EXPECT_THAT(why({.yama = "0"}), HasSubstr("CAP_SYS_PTRACE"));
  EXPECT_THAT(why({.yama = "0", .dumpable = false}), HasSubstr("PR_SET_DUMPABLE"));
  EXPECT_THAT(why({.yama = "0", .tracer = "4711"}), HasSubstr("process 4711 traces it already"));
}

}  // namespace
}  // namespace gtrain::host
