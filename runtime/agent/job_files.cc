#include "runtime/agent/job_files.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "absl/time/time.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/unique_fd.h"

namespace gtrain::agent {
namespace {

constexpr size_t kJobsMax = 2'000;   // with work that waits, at a time
constexpr int kWaitingMax = 10'000;  // of one job: a generation of many ranks posts a few for each
constexpr absl::Duration kEndPatience = absl::Milliseconds(200);

}  // namespace

// Outlives this object as long as a thread is stuck.
struct JobFiles::Results {
  Results() : event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { GT_CHECK(event.valid()); }
  const UniqueFd event;
  Mutex mutex;
  std::vector<std::pair<JobId, Done>> done ABSL_GUARDED_BY(mutex);
};

JobFiles::JobFiles() : results_(std::make_shared<Results>()) {}

JobFiles::~JobFiles() {
  for (auto& [job, entry] : threads_) (void)entry.thread->Finish(kEndPatience);
}

bool JobFiles::Post(const JobId& job, std::function<Done()> work) {
  auto it = threads_.find(job);
  if (it == threads_.end()) {
    if (threads_.size() >= kJobsMax) return false;
    try {
      it = threads_.emplace(job, JobThread{std::make_unique<TaskThread>(kWaitingMax)}).first;
    } catch (const std::system_error&) {  // the machine has no thread left (fault P12)
      return false;
    }
  }
  const bool posted = it->second.thread->Post([results = results_, job, work = std::move(work)] {
    Done done = work();
    MutexLock lock(&results->mutex);
    results->done.emplace_back(job, std::move(done));
    const uint64_t one = 1;
    (void)!write(results->event.get(), &one, sizeof(one));
  });
  if (posted) ++it->second.waiting;
  return posted;
}

std::vector<JobFiles::Done> JobFiles::Take() {
  std::vector<std::pair<JobId, Done>> done;
  {
    MutexLock lock(&results_->mutex);
    uint64_t times = 0;
    (void)!read(results_->event.get(), &times, sizeof(times));
    done.swap(results_->done);
  }
  std::vector<Done> ended;
  for (auto& [job, function] : done) {
    ended.push_back(std::move(function));
    const auto it = threads_.find(job);
    if (--it->second.waiting == 0) threads_.erase(it);  // it has nothing left to run and ends at once
  }
  return ended;
}

int JobFiles::fd() const { return results_->event.get(); }

}  // namespace gtrain::agent
