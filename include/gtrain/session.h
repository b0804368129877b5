// A rank's membership in its job.
#pragma once
#include <gtrain/elastic_c.h>
#include <gtrain/gtrain_c.h>
#include <gtrain/sharding.h>
#include <gtrain/status.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gtrain {

struct SessionOptions {
  std::chrono::milliseconds join_timeout =
      std::chrono::minutes(10);  // until all ranks of the generation joined
  // The process goes on in the next generation when this one is over, in a job with `elastic: {mode:
  // in-place}`. Elastic and Rejoin need it.
  bool stays = false;
  // With `stays`, for a program whose steps are those of an Elastic: a process that was started beside a
  // running generation waits for its place in its first step and not in the join. What it loads and allocates
  // before holds up nobody; its rank is a number behind those of the others until then. In a job with a
  // `mesh` of more than dp it waits in the join, since its part of the model depends on its place.
  bool place_later = false;
};

struct ProgressReport {
  int64_t step = 0;
  std::optional<double> loss = std::nullopt;
  int64_t samples = 0;  // consumed since the previous report, by this rank
};

enum class LogLevel : int { kInfo = 0, kWarning = 1, kError = 2 };

namespace internal {

inline std::atomic<bool> log_is_set{false};
// Never destroyed: threads of the library may outlive main().
inline std::function<void(LogLevel, std::string_view)>& LogFunction() {
  static auto* const function = new std::function<void(LogLevel, std::string_view)>();
  return *function;
}

}  // namespace internal

// Sets the function that gets every log line: all messages of gtrain but the errors that calls return.
// It is called from any thread, one line at a time, and must not call gtrain. Without it warnings and errors
// go to stderr; with an empty function nothing is written. Call SetLog before Session::Join.
inline void SetLog(std::function<void(LogLevel, std::string_view)> function) {
  internal::log_is_set = true;
  gtrain_set_log(nullptr, nullptr);  // no thread is in the old one now
  internal::LogFunction() = std::move(function);
  if (!internal::LogFunction()) return;
  gtrain_set_log(
      [](int level, const char* text, void*) { internal::LogFunction()(static_cast<LogLevel>(level), text); },
      nullptr);
}

// Thread-safe, moved and not copied. Objects made from a session keep what they need of it, so it may be
// destroyed before them. One thread of its own talks to the keeper; no signal handler is installed. In a
// forked child every call returns kFailedPrecondition and nothing is sent.
class Session {
 public:
  // Joins from the environment (docs/protocols/rank-environment.md) and waits for all ranks. Outside gtrain
  // it makes a session of one rank that reports nowhere, so the same program runs by hand; several ranks of
  // another launcher (WORLD_SIZE > 1) are refused. kDeadlineExceeded: some rank did not join in time.
  static Result<Session> Join(const SessionOptions& options = {}) {
    if (!internal::log_is_set) {
      SetLog([](LogLevel level, std::string_view text) {
        if (level == LogLevel::kInfo) return;
        std::fprintf(stderr, "gtrain: %.*s\n", static_cast<int>(text.size()), text.data());
      });
    }
    gtrain_session* made = nullptr;
    const auto join = !options.stays        ? gtrain_session_join
                      : options.place_later ? gtrain_session_join_place_later
                                            : gtrain_session_join_to_stay;
    Status status = internal::Call(join, static_cast<int64_t>(options.join_timeout.count()), &made);
    if (!status.ok()) return status;
    return Session(made);
  }

  // Call it after a call returned kUnavailable, in a session that stays: waits until the generation is over,
  // the next one has begun, and all of its ranks have joined. Then rank, size, generation and timeline are
  // new, and older communicators are of no more use. kUnavailable: no generation follows for this process;
  // exit with 75.
  Status Rejoin(std::chrono::milliseconds timeout = std::chrono::minutes(10)) const {
    return internal::Call(gtrain_session_rejoin, handle(), static_cast<int64_t>(timeout.count()));
  }

  int rank() const { return gtrain_session_rank(handle()); }
  int local_rank() const { return gtrain_session_local_rank(handle()); }
  int world_size() const { return gtrain_session_world_size(handle()); }
  uint64_t generation() const { return gtrain_session_generation(handle()); }
  uint64_t timeline() const { return gtrain_session_timeline(handle()); }
  // `mesh` of the job file with the sizes of this generation, the last axis fastest; without one all ranks
  // lie along dp.
  std::vector<MeshAxis> mesh() const {
    std::array<gtrain_mesh_axis, kMeshAxes.size()> axes{};
    int count = 0;
    internal::Call(gtrain_session_mesh, handle(), axes.data(), static_cast<int>(axes.size()), &count)
        .ThrowIfError();
    std::vector<MeshAxis> mesh;
    for (int i = 0; i < count; ++i)
      mesh.push_back({axes[static_cast<size_t>(i)].name, axes[static_cast<size_t>(i)].size});
    return mesh;
  }
  bool managed() const { return gtrain_session_managed(handle()) != 0; }  // false outside gtrain
  std::string job() const { return gtrain_session_job(handle()); }

  // Sets what `gtrain status` shows. Never blocks; the newest report wins.
  void Report(const ProgressReport& report) const {
    gtrain_session_report(handle(), report.step, report.loss ? &*report.loss : nullptr, report.samples,
                          nullptr);
  }
  // Returns OK, or kUnavailable with the reason once this generation is over: end the step and exit with 75.
  Status Alive() const { return internal::Call(gtrain_session_alive, handle()); }
  // True once the user asked to stop. Ranks hear it at different steps; Checkpointer::SaveIfDue and
  // Communicator::StopAgreed are there to agree on one.
  bool StopRequested() const {
    int stop = 0;
    return gtrain_session_stop_requested(handle(), &stop, nullptr) == GTRAIN_OK && stop != 0;
  }
  // The time left after a preemption notice.
  std::optional<std::chrono::duration<double>> PreemptionNotice() const {
    double seconds = -1;
    if (gtrain_session_notice(handle(), &seconds, nullptr) != GTRAIN_OK || seconds < 0) return std::nullopt;
    return std::chrono::duration<double>(seconds);
  }

  gtrain_session* handle() const { return handle_.get(); }

 private:
  explicit Session(gtrain_session* handle) : handle_(handle) {}
  std::unique_ptr<gtrain_session, internal::Freer<gtrain_session, gtrain_session_free>> handle_;
};

}  // namespace gtrain
