// A program that writes to its state outside an update, as a user without gtest would find it out.
#include <gtrain/gtrain.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

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

struct Outcome {
  int status = -1;
  std::string said;  // on stderr
  bool Segfaulted() const { return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV; }
  bool Said(const char* text) const { return said.find(text) != std::string::npos; }
};

// What becomes of a process that does so.
template <typename Body>
Outcome Run(Body body) {
  int ends[2];
  if (pipe(ends) != 0) return {};
  const pid_t pid = fork();
  if (pid == 0) {
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would exit
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    _exit(body());
  }
  close(ends[1]);
  Outcome outcome;
  char bytes[4096];
  for (ssize_t got; (got = read(ends[0], bytes, sizeof(bytes))) > 0;)
    outcome.said.append(bytes, static_cast<size_t>(got));
  close(ends[0]);
  waitpid(pid, &outcome.status, 0);
  return outcome;
}

// A handler of the program's own, which was there before there was anything to protect.
constexpr int kByHandler = 42;
volatile sig_atomic_t sent = 0;
void OnSignal(int /*number*/, siginfo_t* info, void* /*context*/) {
  if (info->si_code > 0) _exit(kByHandler);  // a fault
  sent = sent + 1;
}

int TrainWithAHandler() {
  struct sigaction own {};
  own.sa_sigaction = &OnSignal;
  own.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &own, nullptr);
  if (Train(Writes::kNowhere) != 0) return 1;
  raise(SIGSEGV);  // none of the library's: the handler has it, also the second time
  raise(SIGSEGV);
  return sent == 2 ? Train(Writes::kBeforeApply) : 1;
}

// It is the program's own end, of which the library says nothing.
int TrainAndEnd() {
  if (Train(Writes::kNowhere) == 0) raise(SIGSEGV);
  return 1;
}

bool Check(const char* what, bool holds, const Outcome& outcome) {
  if (!holds) std::printf("%s: status %#x, said: %s\n", what, outcome.status, outcome.said.c_str());
  return holds;
}

}  // namespace

int main() {
  const Outcome right = Run([] { return Train(Writes::kNowhere); });
  const Outcome before = Run([] { return Train(Writes::kBeforeApply); });
  const Outcome behind = Run([] { return Train(Writes::kBehindApply); });
  const Outcome handled = Run(&TrainWithAHandler);
  const Outcome other = Run(&TrainAndEnd);
  const bool all[] = {
      Check("a program that is right trains", right.status == 0 && right.said.empty(), right),
      Check("a write before the update is found", before.Segfaulted(), before),
      Check("it says which state was written, and what to do",
            before.Said("wrote to its state 'w' outside an update, at 0x") &&
                before.Said("(byte 19996 of 20000)") &&
                before.Said("in the update that is passed to Step::Apply"),
            before),
      Check(
          "a write behind the update is found, with the other name",
          behind.Segfaulted() && behind.Said("'part' outside an update") && behind.Said("(byte 0 of 40000)"),
          behind),
      Check(
          "the handler that was there has what is not ours, and the fault behind our line",
          WIFEXITED(handled.status) && WEXITSTATUS(handled.status) == kByHandler && handled.Said("state 'w'"),
          handled),
      Check("a signal that somebody sent is not explained", other.Segfaulted() && other.said.empty(), other),
  };
  return std::ranges::all_of(all, [](bool holds) { return holds; }) ? 0 : 1;
}
