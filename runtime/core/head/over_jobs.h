// OverJobs bounds what is kept of the jobs that are over. PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it, and it never blocks. It costs nothing while the limits
// of HeadConfig hold.
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

  // The job is over from now on.
  void CountOver(Job& job);
  // Forgets jobs beyond the limits: the oldest ones of the user who has most, in number or in bytes.
  void DropOldJobs();

 private:
  // The jobs of one user that are over.
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
