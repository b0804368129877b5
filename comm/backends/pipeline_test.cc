#include "comm/backends/pipeline.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "comm/fake/fake_world.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

// One rank alone on its machine.
class PipelineTest : public testing::Test {
 protected:
  PipelineTest() : world_({"a"}), bootstrap_(world_.Rank(0)), watch_(bootstrap_.get(), kPatience) {
    auto shm = ShmGroup::Open(bootstrap_.get(), {0}, {"rank 0"}, 0, 77, watch_);
    EXPECT_TRUE(shm.ok()) << shm.status();
    shm_ = *std::move(shm);
    EXPECT_TRUE(shm_->Join(watch_).ok());
    pipeline_ = std::make_unique<Pipeline>(shm_.get());
  }

  FakeWorld world_;
  std::unique_ptr<Bootstrap> bootstrap_;
  Watch watch_;
  std::unique_ptr<ShmGroup> shm_;
  std::unique_ptr<Pipeline> pipeline_;
};

// While the network carries a chunk, the next one comes in and the one before goes out: otherwise it would
// wait for ever.
TEST_F(PipelineTest, TheNetworkGoesOnBesideTheOtherStages) {
  Mutex mutex;
  std::set<uint64_t> in_done, out_done;
  std::vector<uint64_t> carried, in_order;
  const Pipeline::Work in = [&](uint64_t c) {
    const MutexLock lock(&mutex);
    in_done.insert(c);
    return absl::OkStatus();
  };
  const Pipeline::Work between = [&](uint64_t c) -> absl::Status {
    const MutexLock lock(&mutex);
    const bool next = mutex.AwaitFor(kPatience, [&] { return c + 1 == 5 || in_done.contains(c + 1); });
    const bool before = mutex.AwaitFor(kPatience, [&] { return c == 0 || out_done.contains(c - 1); });
    if (!next || !before) return absl::DeadlineExceededError("another chunk waits for this one");
    carried.push_back(c);
    return absl::OkStatus();
  };
  const Pipeline::Work out = [&](uint64_t c) {
    const MutexLock lock(&mutex);
    out_done.insert(c);
    in_order.push_back(c);
    return absl::OkStatus();
  };
  for (int call = 0; call < 3; ++call) {
    in_done = {0};
    carried.clear();
    out_done.clear();
    in_order.clear();
    EXPECT_EQ(pipeline_->Run(5, {in, {between, true}, out}, watch_), absl::OkStatus());
    EXPECT_EQ(carried, (std::vector<uint64_t>{0, 1, 2, 3, 4}));
    EXPECT_EQ(in_order, carried);
  }
}

TEST_F(PipelineTest, ErrorsAndExceptionsOfEitherSideEndIt) {
  const Pipeline::Work good = [](uint64_t) { return absl::OkStatus(); };
  const Pipeline::Work bad = [](uint64_t c) {
    return c == 2 ? absl::UnavailableError("the link is broken") : absl::OkStatus();
  };
  const Pipeline::Work throws = [](uint64_t c) -> absl::Status {
    if (c == 2) throw std::bad_alloc();
    return absl::OkStatus();
  };
  EXPECT_EQ(pipeline_->Run(9, {good, {bad, true}, good}, watch_).message(), "the link is broken");
  EXPECT_EQ(pipeline_->Run(9, {good, {good, true}, bad}, watch_).message(), "the link is broken");
  EXPECT_TRUE(absl::IsResourceExhausted(pipeline_->Run(9, {good, {throws, true}, good}, watch_)));
  EXPECT_THROW((void)pipeline_->Run(9, {good, {good, true}, throws}, watch_), std::bad_alloc);
  EXPECT_EQ(pipeline_->Run(9, {good, {good, true}, good}, watch_), absl::OkStatus());
}

// A process at its limit of threads, as one whose stacks find no room: one after the other is slow and no
// error.
TEST_F(PipelineTest, WithoutAThreadTheStagesTakeTurns) {
  pthread_attr_t before, too_large;
  ASSERT_EQ(pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(pthread_getattr_default_np(&too_large), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&too_large, size_t{1} << 48), 0);
  ASSERT_EQ(pthread_setattr_default_np(&too_large), 0);
  std::vector<uint64_t> carried;
  const Pipeline::Work good = [](uint64_t) { return absl::OkStatus(); };
  const Pipeline::Work between = [&](uint64_t c) {
    carried.push_back(c);
    return absl::OkStatus();
  };
  EXPECT_EQ(pipeline_->Run(4, {good, {between, true}, good}, watch_), absl::OkStatus());
  ASSERT_EQ(pthread_setattr_default_np(&before), 0);
  sigset_t blocked;
  ASSERT_EQ(pthread_sigmask(SIG_SETMASK, nullptr, &blocked), 0);
  EXPECT_EQ(sigismember(&blocked, SIGTERM), 0);
  EXPECT_EQ(carried, (std::vector<uint64_t>{0, 1, 2, 3}));
}

// It has no such thread, and must not wait for its end.
TEST_F(PipelineTest, AForkedChildEndsWithoutTheThread) {
  const Pipeline::Work good = [](uint64_t) { return absl::OkStatus(); };
  ASSERT_EQ(pipeline_->Run(3, {good, {good, true}, good}, watch_), absl::OkStatus());
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    pipeline_.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace gtrain::comm
