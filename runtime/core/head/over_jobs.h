// OverJobs: the jobs that are over and not forgotten yet. PURE. Private to runtime/core/head.
//
// Owned by HeadState; the loop's thread only; never blocks. Bounded in number and in bytes by HeadConfig;
// costs nothing while both limits hold.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "absl/functional/function_ref.h"
#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class HeadRecords;

class OverJobs {
 public:
  OverJobs(HeadContext& context, HeadModel& model, HeadRecords& records);

  // It is over from now on.
  void CountOver(Job& job);
  // Jobs that are over beyond the limits are forgotten: the oldest of who has most of them, in number or in
  // bytes.
  void DropOldJobs();

 private:
  // What is kept of the jobs of one user that are over.
  struct OfUser {
    size_t bytes = 0;
    std::set<uint64_t> jobs;  // by number: the oldest first
  };

  void DropOver(uint64_t number);
  bool DropOfMost(absl::FunctionRef<size_t(const OfUser&)> what);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;
  HeadRecords& records_;

  size_t over_bytes_ = 0;
  std::map<std::string, OfUser> over_of_user_;
};

}  // namespace gtrain::core
