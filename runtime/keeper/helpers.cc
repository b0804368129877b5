#include "runtime/keeper/helpers.h"

#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/keeper/poll_set.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr size_t kHelperOutputMax = (1u << 20) - 1024;  // and what is said beside it
constexpr size_t kHelpersMax = 16;

}  // namespace

void Helpers::Run(Exec& exec) {
  auto fail = [&](const std::string& why) { context_.agent.Tell(ExecDone{exec.id, false, 0, why}); };
  const RankProcess* rank = context_.generations.FindRank(exec.generation, exec.rank);
  if (rank == nullptr || rank->exit)
    return fail("rank " + std::to_string(exec.rank) + " is not running here");
  if (exec.argv.empty()) return fail("no command was given");
  if (helpers_.size() >= kHelpersMax) {
    return fail(std::to_string(kHelpersMax) +
                " commands run beside the ranks of this job on this machine, the most there may be: wait or "
                "end some");
  }
  auto helper = std::make_unique<Helper>();
  UniqueFd write_end, err_end;
  if (!MakePipe(&helper->output_fd, &write_end) || (exec.apart && !MakePipe(&helper->err_fd, &err_end)))
    return fail(strerror(errno));
  SetNonBlocking(helper->output_fd.get());
  if (exec.apart) SetNonBlocking(helper->err_fd.get());
  helper->argv = exec.argv;
  helper->id = exec.id;
  helper->apart = exec.apart;
  helper->generation = exec.generation;
  helper->limit_ms = static_cast<int64_t>(std::clamp<uint64_t>(exec.timeout_ms, 1, 600000));
  helper->deadline_ms = context_.now_ms + helper->limit_ms;
  std::vector<SpawnRequest> requests;
  requests.push_back({&helper->argv, &rank->spec.env, rank->spec.cwd, rank->spec.cpus, std::move(write_end),
                      std::move(err_end)});
  const uint64_t id = exec.id;
  if (!children_.Start(
          exec.generation, std::move(requests), nullptr,
          [this, id](const SpawnResult& result) { OnStarted(id, result); },
          [this, id] { OnStarterDied(id); })) {
    return fail(strerror(errno));
  }
  helpers_.push_back(std::move(helper));
}

void Helpers::OnStarted(uint64_t id, const SpawnResult& result) {
  for (auto& helper : helpers_) {
    if (helper->id != id) continue;
    helper->pid = result.pid;
    if (result.failure.stage == 0) continue;
    std::string& text = helper->apart ? helper->err : helper->output;
    text = "cannot run " + helper->argv[0] + ": " + strerror(result.failure.error) + "\n";
  }
}

void Helpers::OnStarterDied(uint64_t id) {
  std::erase_if(helpers_, [&](const auto& helper) {
    if (helper->id != id || helper->pid >= 0) return false;
    std::string& text = helper->apart ? helper->err : helper->output;
    text = "the command was not started: the process that starts it was killed\n";
    TellDone(*helper, CLD_KILLED, SIGKILL);
    return true;
  });
}

bool Helpers::OnDied(const siginfo_t& info) {
  const auto it = std::find_if(helpers_.begin(), helpers_.end(),
                               [&](const auto& helper) { return helper->pid == info.si_pid; });
  if (it == helpers_.end()) return false;
  TellDone(**it, info.si_code, info.si_status);
  helpers_.erase(it);
  return true;
}

std::optional<uint64_t> Helpers::GenerationOf(pid_t child) {
  for (const auto& helper : helpers_) {
    if (helper->pid == child) return helper->generation;
  }
  return std::nullopt;
}

void Helpers::Pump() {
  for (auto& helper : helpers_) Pump(*helper);
}

void Helpers::Pump(Helper& helper) {
  char buffer[64 << 10];
  for (auto [fd, text] :
       {std::pair{&helper.output_fd, &helper.output}, std::pair{&helper.err_fd, &helper.err}}) {
    for (int i = 0; i < 16 && fd->valid(); ++i) {
      const ssize_t n = read(fd->get(), buffer, sizeof(buffer));
      if (n < 0) break;
      if (n == 0) fd->reset();
      const size_t kept =
          std::min(kHelperOutputMax - std::min(kHelperOutputMax, text->size()), static_cast<size_t>(n));
      text->append(buffer, kept);
      helper.left_out += static_cast<size_t>(n) - kept;
    }
  }
  if (context_.now_ms > helper.deadline_ms && !helper.timed_out && helper.pid > 0) {
    helper.timed_out = true;
    kill(-helper.pid, SIGKILL);
    kill(helper.pid, SIGKILL);
  }
}

void Helpers::TellDone(Helper& helper, int code, int status) {
  Pump(helper);
  std::string& last = helper.apart ? helper.err : helper.output;
  if (helper.left_out > 0) {
    last += "\n[gtrain: " + std::to_string(helper.left_out) + " bytes of output were left out: at most " +
            std::to_string(kHelperOutputMax >> 10) + " KiB are kept]\n";
  }
  if (helper.timed_out) {
    last += "\n[gtrain: ended: it ran longer than its limit of " + std::to_string(helper.limit_ms) + " ms]\n";
  }
  context_.agent.Tell(ExecDone{helper.id, true, code == CLD_EXITED ? status : 128 + status,
                               std::move(helper.output), std::move(helper.err), helper.timed_out});
}

void Helpers::AddFds(std::vector<pollfd>* fds) const {
  for (const auto& helper : helpers_) {
    AddFd(fds, helper->output_fd.get());
    AddFd(fds, helper->err_fd.get());
  }
}

}  // namespace gtrain::keeper
