// A program that writes to its state outside an update, as a user without gtest would find it out.
#include <gtrain/gtrain.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace {

// Where the program writes that it should not; kNowhere: a program that is right.
enum class Writes { kNowhere, kBeforeApply, kBehindApply };

// Exits with 0 when all steps were made and the state is what the updates made it.
int Train(Writes where) {
  gtrain::Elastic run(gtrain::Session::Join({.stays = true}).value());
  const auto w = run.Replicated<float>("w", 5'000, [](auto all) { std::ranges::fill(all, 1.F); });
  const auto part =
      run.Sharded<float>("part", {100, 100}, {.splits = {{0, "tp"}}},
                         [](auto all, const gtrain::LocalBox&) { std::ranges::fill(all, 2.F); });
  const auto none = run.Replicated<float>("none", 0, [](auto) {});
  auto& gradients = run.Reduce({1});
  const gtrain::Status status =
      run.Train(run.Samples({.samples = 6, .global_batch = 2}), [&](gtrain::Step& step) {
        gradients[0][0] = 2;
        if (where == Writes::kBeforeApply) w[4'999] = 7;
        gtrain::Status applied = step.Apply(gradients, 0, [&]() noexcept {
          for (float& value : w) value += gradients[0][0];
          part[9'999] += 1;
        });
        if (where == Writes::kBehindApply) part[0] = 7;
        return applied;
      });
  return status.ok() && w[0] == 4 && w[4'999] == 4 && part[9'999] == 5 && none.empty() ? 0 : 1;
}

// The status of a process that does so.
int StatusOf(Writes where) {
  const pid_t pid = fork();
  if (pid == 0) {
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would exit
    _exit(Train(where));
  }
  int status = -1;
  return waitpid(pid, &status, 0) == pid ? status : -1;
}

bool Segfaults(Writes where) {
  const int status = StatusOf(where);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

}  // namespace

int main() {
  const bool right = StatusOf(Writes::kNowhere) == 0;
  const bool before = Segfaults(Writes::kBeforeApply), behind = Segfaults(Writes::kBehindApply);
  std::printf("a program that is right trains: %d; writes before the update %d and behind it %d are found\n",
              right, before, behind);
  return right && before && behind ? 0 : 1;
}
