// For tests: a job whose processes are threads and live through generations of ranks.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_transport.h"
#include "comm/fake/fake_world.h"
#include "comm/reducer/wrapped_communicator.h"
#include "elastic/exec/elastic_run.h"
#include "runtime/port/session.h"

namespace gtrain::elastic {

// Generations follow each other as the test says: Begin makes one of the processes named, in the order of
// their ranks, on one machine or as the test says, and revokes the one before. Thread-safe.
class ThreadJob {
 public:
  static constexpr absl::Duration kPatience = absl::Seconds(60);

  void Begin(const std::vector<int>& processes) {
    MutexLock lock(&mu_);
    if (!generations_.empty()) generations_.back()->world.Revoke("the test ends this generation");
    generations_.push_back(std::make_unique<Generation>(processes, ranks_a_machine));
  }
  // With `waits`: it waits for a place no more.
  void Gone(int process) {
    MutexLock lock(&mu_);
    gone_.insert(process);
  }
  // No generation comes any more.
  void End() {
    MutexLock lock(&mu_);
    ended_ = true;
  }
  size_t generations() const {
    MutexLock lock(&mu_);
    return generations_.size();
  }

  bool waits =
      false;  // a process that has no place in a generation waits for a later one. Set before all else
  // Its ranks are asked to stand still behind a step; `paused` is called when rank 0 says so.
  std::atomic<bool> pause{false};
  std::function<void()> paused = [] {};  // set before all else
  std::atomic<int> goes_on{0};           // rank 0 said so many times that they may be asked to
  std::atomic<int> storage_errors{0};    // that processes have said
  std::atomic<bool> stop{false};         // the user asks for it
  std::atomic<int> commits{0};           // of which they have said that they know them
  int ranks_a_machine = 1 << 20;         // set before all else
  std::vector<MeshAxis> mesh;  // dp first, of any size; empty: the job has none. Set before all else

  // What was said last of saves that came to nothing.
  std::string saves() const {
    MutexLock lock(&mu_);
    return saves_;
  }
  void SetSaves(const std::string& said) {
    MutexLock lock(&mu_);
    saves_ = said;
  }

  // One process's place in one generation.
  struct Place {
    size_t generation = 0;  // the first is 1; 0: there is none for it
    int rank = 0, size = 0;
    std::shared_ptr<comm::Bootstrap> bootstrap;
    comm::FakeNetwork* network = nullptr;
  };
  // Waits for a generation after `after` that has this process.
  Place Join(int process, size_t after) {
    MutexLock lock(&mu_);
    const auto known = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      if (ended_ || gone_.contains(process)) return true;
      return generations_.size() > after && (!waits || RankIn(*generations_.back(), process) >= 0);
    };
    if (!mu_.AwaitFor(kPatience, known) || generations_.size() <= after) return {};
    Generation& newest = *generations_.back();
    const int rank = RankIn(newest, process);
    if (rank < 0) return {};
    return {generations_.size(), rank, static_cast<int>(newest.processes.size()),
            std::shared_ptr<comm::Bootstrap>(newest.world.Rank(rank)), &newest.network};
  }

 private:
  struct Generation {
    Generation(const std::vector<int>& all, int ranks_a_machine)
        : processes(all), world(NodesOf(static_cast<int>(all.size()), ranks_a_machine)) {
      world.wakes = true;
    }
    static std::vector<std::string> NodesOf(int ranks, int ranks_a_machine) {
      std::vector<std::string> nodes;
      for (int rank = 0; rank < ranks; ++rank) nodes.push_back(absl::StrCat("n", rank / ranks_a_machine));
      return nodes;
    }
    const std::vector<int> processes;
    comm::FakeWorld world;
    comm::FakeNetwork network;
  };
  static int RankIn(const Generation& generation, int process) {
    const auto at = std::ranges::find(generation.processes, process);
    return at == generation.processes.end() ? -1 : static_cast<int>(at - generation.processes.begin());
  }
  mutable Mutex mu_;
  std::set<int> gone_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<Generation>> generations_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::string saves_ ABSL_GUARDED_BY(mu_);
};

class ThreadSession final : public Session {
 public:
  // Joins the first generation after `after` that has this process.
  ThreadSession(ThreadJob* job, int process, size_t after)
      : job_(job), process_(process), place_(job->Join(process, after)) {}
  int rank() const override { return place().rank; }
  int local_rank() const override { return place().rank; }
  int world_size() const override { return place().size; }
  uint64_t generation() const override { return place().generation; }
  uint64_t timeline() const override { return place().generation; }
  bool managed() const override { return true; }
  std::vector<MeshAxis> mesh() const override {
    std::vector<MeshAxis> mesh = job_->mesh;
    if (mesh.empty()) return Session::mesh();
    mesh[0].size = world_size();
    for (size_t i = 1; i < mesh.size(); ++i) mesh[0].size /= mesh[i].size;
    return mesh;
  }
  const std::string& job() const override { return name_; }
  absl::StatusOr<std::unique_ptr<Communicator>> MakeCommunicator(const CommunicatorOptions& user) override {
    const ThreadJob::Place now = place();
    comm::ExecOptions options;
    options.user = user;
    if (timeout) options.user.timeout = *timeout;
    options.owner = now.bootstrap;
    options.transport = [network = now.network](const comm::Bootstrap&, uint64_t) {
      return network->MakeTransport();
    };
    GT_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> made,
                        comm::MakeCommunicator(now.bootstrap.get(), options));
    return std::make_unique<comm::WrappedCommunicator>(std::move(made), &hooks);
  }
  absl::Status Rejoin(const SessionOptions&) override {
    ThreadJob::Place next = job_->Join(process_, place().generation);
    if (next.generation == 0) return absl::UnavailableError("there is no generation for this process");
    MutexLock lock(&mu_);
    place_ = std::move(next);
    return absl::OkStatus();
  }
  void Report(const ProgressReport& report) override {
    if (reported) reported(report);
  }
  void ReportCheckpoint(int64_t, const std::string&, const std::string&) override { ++job_->commits; }
  void ReportNote(absl::string_view kind, const std::string& text) override {
    if (kind == kNoteStorage && !text.empty()) ++job_->storage_errors;
    if (kind == kNoteSaves) job_->SetSaves(text);
  }
  void CountStall(absl::Duration) override {}
  absl::Status Alive() const override { return place().bootstrap->Alive(); }
  bool StopRequested() const override { return job_->stop; }
  bool PauseRequested() const override { return rank() == 0 && job_->pause; }
  void ReportPause(bool paused) override {
    job_->goes_on += paused ? 0 : 1;
    if (paused && job_->pause.exchange(false)) job_->paused();
  }
  std::optional<absl::Duration> PreemptionNotice() const override { return std::nullopt; }

  comm::Hooks hooks;  // of all communicators
  std::function<void(const ProgressReport&)> reported;
  std::optional<absl::Duration> timeout;  // of its communicators

 private:
  ThreadJob::Place place() const {
    MutexLock lock(&mu_);
    return place_;
  }

  ThreadJob* const job_;
  const int process_;
  const std::string name_ = "threads";
  mutable Mutex mu_;
  ThreadJob::Place place_ ABSL_GUARDED_BY(mu_);
};

// Calls `rank` on a thread for each of them, with its communicator.
template <typename Rank>
void ForRanks(int ranks, Rank rank) {
  ThreadJob job;
  std::vector<int> processes;
  for (int process = 0; process < ranks; ++process) processes.push_back(process);
  job.Begin(processes);
  std::vector<std::thread> threads;
  for (const int process : processes) {
    threads.emplace_back([&, process] {
      ThreadSession session(&job, process, 0);
      const auto comm = session.MakeCommunicator({});
      ASSERT_TRUE(comm.ok()) << comm.status();
      rank(**comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace gtrain::elastic
