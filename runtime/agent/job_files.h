// Work of an agent in the directories of jobs, off its loop: a file system that stands still holds up the one
// job that uses it, and not the node (fault P8). Loop-owned: one thread calls everything.
//
// Each job has a thread while some of its work waits, so work of one job keeps its order and that of another
// never waits for it. A thread that is stuck costs its memory and is left behind at the end. At n ranks a
// node has a few jobs at a time; kJobsMax bounds them.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/ids.h"
#include "base/task_thread.h"

namespace gtrain::agent {

class JobFiles {
 public:
  using Done = std::function<void()>;  // for the loop

  JobFiles();
  ~JobFiles();  // what is stuck is left behind after a moment

  // Runs `work` behind the earlier work of the job; it may block and must own all it touches. Take returns
  // its result. False: too much waits already, and `work` is not kept.
  bool Post(const JobId& job, std::function<Done()> work);
  // True while some work of the job has not come out of Take.
  bool Waits(const JobId& job) const { return threads_.contains(job); }
  bool idle() const { return threads_.empty(); }  // nothing of any job waits
  // Returns the results of finished work, in the order of each job.
  std::vector<Done> Take();
  int fd() const;  // readable when Take has something

 private:
  struct Results;
  struct JobThread {
    std::unique_ptr<TaskThread> thread;
    int waiting = 0;
  };
  const std::shared_ptr<Results> results_;
  std::map<JobId, JobThread> threads_;
};

}  // namespace gtrain::agent
