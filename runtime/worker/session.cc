// gtrain::Session: under gtrain a face of KeeperLink, by hand a world of one.
#include "runtime/port/session.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "base/file.h"
#include "base/status_macros.h"
#include "comm/exec/communicator.h"
#include "runtime/worker/keeper_link.h"
#include "runtime/worker/rank_environment.h"

namespace gtrain::worker {
namespace {

class ManagedSession final : public Session, public port::WriterHost {
 public:
  ManagedSession(RankEnvironment environment, bool stays, bool place_later)
      : job_(environment.job), link_(std::move(environment), stays, place_later) {}

  absl::Status Join(absl::Duration timeout) { return link_.Join(timeout); }
  absl::Status Rejoin(const SessionOptions& options) override {
    return link_.Rejoin(options.join_timeout, options.over_timeout);
  }

  bool has_place() const override { return !link_.comes_up(); }

  int rank() const override { return link_.membership()->environment().rank; }
  int local_rank() const override { return link_.membership()->environment().local_rank; }
  int world_size() const override { return link_.membership()->environment().world_size; }
  uint64_t generation() const override { return link_.membership()->environment().generation; }
  uint64_t timeline() const override { return link_.membership()->environment().timeline; }
  bool managed() const override { return true; }
  int64_t global_batch() const override { return link_.membership()->environment().global_batch; }
  std::vector<MeshAxis> mesh() const override { return MeshOf(link_.membership()->environment()); }
  Determinism determinism() const override {
    const std::shared_ptr<Membership> membership = link_.membership();
    return {membership->environment().virtual_ranks, membership->environment().threads};
  }
  bool step_copies() const override { return link_.membership()->environment().step_copies; }
  bool has_checkpoints() const override { return link_.membership()->environment().has_checkpoints; }
  const std::string& job() const override { return job_; }
  port::WriterHost* writer_host() override { return this; }
  bool in_place() const override { return link_.membership()->environment().in_place; }

  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view blob,
                                                     absl::Duration timeout) override {
    return link_.membership()->AllGather(blob, timeout);
  }
  absl::StatusOr<Reach> reach() override {
    const std::shared_ptr<Membership> membership = link_.membership();
    GT_RETURN_IF_ERROR(membership->ReadMembers());
    const comm::Member& own = membership->members()[static_cast<size_t>(membership->rank())];
    const RankEnvironment& environment = membership->environment();
    return Reach{environment.job_secret, own.address, own.node.value, environment.actors_shm};
  }

  absl::StatusOr<std::unique_ptr<Communicator>> MakeCommunicator(
      const CommunicatorOptions& options) override {
    const std::shared_ptr<Membership> membership = link_.membership();
    GT_RETURN_IF_ERROR(membership->ReadMembers());
    comm::ExecOptions exec;
    exec.user = options;
    exec.algorithm = membership->environment().comm_algorithm;
    exec.network = membership->environment().comm_network;
    exec.owner = membership;
    exec.on_start = [this](uint64_t) { link_.CountCollective(); };
    exec.on_waited = [this](absl::Duration waited) { link_.CountWaiting(waited); };
    return comm::MakeCommunicator(membership.get(), std::move(exec));
  }

  void Report(const ProgressReport& report) override {
    link_.ReportProgress({report.step, report.loss, report.samples});
  }
  void ReportCheckpoint(int64_t step, const std::string& manifest, const std::string& policy) override {
    link_.Report(core::WorkerCheckpoint{step, manifest, policy});
  }
  void CountStall(absl::Duration time) override { link_.CountStall(time); }
  void ReportNote(absl::string_view kind, const std::string& text) override {
    link_.Report(core::WorkerNote{std::string(kind), text});
  }

  void SetAsked(AskedFunction answer) override { link_.SetAsked(std::move(answer)); }

  absl::StatusOr<port::WriterLink> StartWriter(uint64_t arena_bytes, absl::Duration timeout,
                                               absl::FunctionRef<bool()> wanted) override {
    return link_.StartWriter(arena_bytes, timeout, wanted);
  }
  std::vector<int> left() const override { return link_.membership()->Left(); }
  absl::Status Alive() const override { return link_.Alive(); }
  bool StopRequested() const override { return link_.stop_requested(); }
  bool PauseRequested() const override { return link_.pause_requested(); }
  void ReportPause(bool paused) override { link_.Report(core::WorkerPauses{paused}); }
  std::optional<absl::Duration> PreemptionNotice() const override {
    const std::optional<Instant> at = link_.preempted_at();
    if (!at) return std::nullopt;
    return std::max(absl::ZeroDuration(), *at - RealClock().Now());
  }

 private:
  const std::string job_;
  KeeperLink link_;
};

// A world of one, which needs nobody.
class AloneBootstrap final : public comm::Bootstrap {
 public:
  explicit AloneBootstrap(std::vector<comm::Member> members) : members_(std::move(members)) {}
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  Generation generation() const override { return Generation{}; }
  const std::vector<comm::Member>& members() const override { return members_; }
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view blob, absl::Duration) override {
    return std::vector<std::string>{std::string(blob)};
  }
  absl::StatusOr<UniqueFd> Arena(uint64_t, uint64_t bytes, uint64_t, absl::Duration) override {
    UniqueFd fd(memfd_create("gtrain-arena", MFD_CLOEXEC));
    if (!fd.valid() || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
      return ErrnoStatus(errno, "arena");
    return fd;
  }
  void FreeArena(uint64_t) override {}
  absl::Status Alive() const override { return absl::OkStatus(); }

 private:
  const std::vector<comm::Member> members_;
};

class AloneSession final : public Session {
 public:
  explicit AloneSession(RankEnvironment environment)
      : bootstrap_(std::move(environment.members)),
        has_checkpoints_(environment.has_checkpoints),
        global_batch_(environment.global_batch),
        determinism_{environment.virtual_ranks, environment.threads},
        algorithm_(std::move(environment.comm_algorithm)),
        network_(std::move(environment.comm_network)) {}
  int rank() const override { return 0; }
  int local_rank() const override { return 0; }
  int world_size() const override { return 1; }
  uint64_t generation() const override { return 0; }
  uint64_t timeline() const override { return 0; }
  bool managed() const override { return false; }
  bool has_checkpoints() const override { return has_checkpoints_; }
  int64_t global_batch() const override { return global_batch_; }
  Determinism determinism() const override { return determinism_; }
  const std::string& job() const override { return job_; }
  absl::StatusOr<std::unique_ptr<Communicator>> MakeCommunicator(
      const CommunicatorOptions& options) override {
    comm::ExecOptions exec;
    exec.user = options;
    exec.algorithm = algorithm_;
    exec.network = network_;
    return comm::MakeCommunicator(&bootstrap_, std::move(exec));
  }
  absl::Status Rejoin(const SessionOptions&) override {
    return absl::FailedPreconditionError("a program that was started by hand has one generation only");
  }
  void Report(const ProgressReport&) override {}
  void ReportCheckpoint(int64_t, const std::string&, const std::string&) override {}
  void CountStall(absl::Duration) override {}
  void ReportNote(absl::string_view, const std::string&) override {}
  absl::Status Alive() const override { return absl::OkStatus(); }
  bool StopRequested() const override { return false; }
  std::optional<absl::Duration> PreemptionNotice() const override { return std::nullopt; }

 private:
  AloneBootstrap bootstrap_;
  const bool has_checkpoints_;
  const int64_t global_batch_;
  const Determinism determinism_;
  const std::string algorithm_, network_;
  const std::string job_;
};

}  // namespace
}  // namespace gtrain::worker

namespace gtrain {

absl::StatusOr<std::unique_ptr<Session>> Session::Join(const SessionOptions& options) {
  GT_ASSIGN_OR_RETURN(
      worker::RankEnvironment environment,
      worker::ReadRankEnvironment([](const char* name) -> const char* { return getenv(name); }));
  if (!environment.managed) return std::make_unique<worker::AloneSession>(std::move(environment));
  const bool has_parts = std::ranges::any_of(
      environment.mesh, [](const MeshAxis& axis) { return axis.name != "dp" && axis.size > 1; });
  auto session = std::make_unique<worker::ManagedSession>(std::move(environment), options.stays,
                                                          options.place_later && !has_parts);
  const Instant deadline = RealClock().Now() + options.join_timeout;
  absl::Status joined = session->Join(options.join_timeout);
  // The generation in which this process was started may end before it has joined.
  if (!joined.ok() && !session->has_place()) return session;
  if (options.stays && !joined.ok() && !session->Alive().ok()) {
    SessionOptions rest = options;
    rest.join_timeout = deadline - RealClock().Now();
    joined = session->Rejoin(rest);
  }
  GT_RETURN_IF_ERROR(joined);
  return session;
}

}  // namespace gtrain
