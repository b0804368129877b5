// One rank's part in the traffic between machines: schedules of comm/plan among its rail, chosen by the
// measured costs of links; and the comparison of the calls of the machines.
//
// Where machines have several ranks either the first of each, its leader, speaks for all of it, or as many
// ranks as every machine has, each about its part of the data (comm/plan/cost.h). A rank that has nothing to
// send returns at once.
//
// Among N machines a comparison is log2 N rounds of 72 bytes and the data that goes along, a table of all
// records one round of N - 1 messages up to 16 machines and log2 N rounds above, 56 bytes a rank. Measuring
// is some 40 rounds for each number of rails, in the first communicator and when collectives take half or
// twice as long as they did (comm/plan/link_drift.h).
#pragma once
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/backends/schedule_runner.h"
#include "comm/plan/cost.h"
#include "comm/plan/hierarchy.h"
#include "comm/plan/link_drift.h"
#include "comm/plan/op_record.h"
#include "comm/plan/schedule.h"
#include "comm/port/data_transport.h"
#include "comm/port/watch.h"
#include "comm/shm/shm_group.h"

namespace gtrain::comm {

// Most that goes along when machines compare what they are about to do.
inline constexpr size_t kWithRecordsBytes = 16 << 10;

// Not thread-safe.
class BetweenMachines {
 public:
  // Among at least two machines. `hierarchy`, `shm` (null: one rank on every machine) and `rail` (null: not
  // every machine has this rank's place) outlive it.
  BetweenMachines(const Hierarchy* hierarchy, ShmGroup* shm, DataTransport* rail, AllReduceWish wish)
      : hierarchy_(*hierarchy), shm_(shm), rail_(rail), wish_(wish) {}

  bool leads() const { return hierarchy_.leader(); }
  int machines() const { return static_cast<int>(hierarchy_.nodes.size()); }

  // Run on all ranks: connects the rail and measures what its links cost. All have the same numbers
  // afterwards. `memory`: some hundred bytes of the arena that nobody else uses meanwhile; null where there
  // is none.
  absl::Status Measure(char* memory, const Watch& watch);
  // Whether collectives take other times than they used to, as this rank sees it. Where one of those that
  // speak for their machines thinks so, which they tell each other when they compare what they do, all
  // measure again.
  bool Drifted() const { return !wish_.deterministic && drift_.drifted(); }
  // Called when they have.
  std::function<void()> on_measured_again;
  // Takes time of its own, the timeout of `watch` or 30 s at most, and none of that of `watch`.
  absl::Status MeasureAgain(char* memory, const Watch& watch);
  // Takes over what was measured by a larger group with the same wish.
  void TakeLinks(const std::vector<Carriers>& measured);
  const std::vector<Carriers>& carriers() const { return carriers_; }
  const AllReduceWish& wish() const { return wish_; }

  // Among the ranks that speak for their machines: whether all of them, each for the ranks of its machine if
  // these do (`same`), do what `record` says. If so data[count] becomes the reduction of all. *drifted:
  // whether one of them said so.
  absl::StatusOr<bool> AllDo(const OpRecord& record, bool same, const Watch& watch, bool* drifted,
                             char* data = nullptr, size_t bytes = 0);
  // Leaders: the records of all machines to all machines. Index = rank.
  absl::Status GatherRecords(absl::Span<OpRecord> records, const Watch& watch);

  // The part of data[count] that this rank carries; count 0: nothing.
  Range PartOf(uint64_t count, int rails) const { return RailPart(count, rails, hierarchy_.local); }
  // The reduction of all machines' data[count], a mean divided by `divisor`. Each rank does its part of that,
  // if it has one, and is back when that is done.
  absl::Status AllReduce(const OpRecord& record, char* data, uint64_t count, int divisor, const Watch& watch);
  // How many rails carry an all-reduce of `count` elements.
  int RailsOf(const OpRecord& record, uint64_t count) const { return PlanOf(record, count).rails; }
  // Schedules among the machines by their number.
  absl::Status Run(const Schedule& schedule, void* data, DType dtype, ReduceOp op, const Watch& watch) {
    return runner_.Run(schedule, data, dtype, op, rail_, watch);
  }
  absl::Status Run(const Schedule& schedule, const void* source, void* data, DType dtype, ReduceOp op,
                   const Watch& watch) {
    return runner_.Run(schedule, source, data, dtype, op, rail_, watch);
  }

 private:
  AllReducePlan PlanOf(const OpRecord& record, uint64_t count) const {
    return PlanAllReduce(wish_.algorithm, carriers_, machines(), count * DTypeSize(record.dtype));
  }
  absl::Status TryLinks(const Watch& watch, double* seconds, double* a_byte);
  // `tried`, `tried_byte`: what the first try lets expect of so many rails.
  absl::StatusOr<LinkCost> MeasureRounds(int rails, double tried, double tried_byte, char* memory,
                                         const Watch& watch);
  absl::Status AgreeOnMost(absl::Span<double> values, char* memory, const Watch& watch);

  const Hierarchy& hierarchy_;
  ShmGroup* const shm_;
  DataTransport* const rail_;
  const AllReduceWish wish_;
  std::vector<Carriers> carriers_{Carriers{}};
  LinkDrifts drift_;
  ScheduleRunner runner_;
  std::vector<char> own_message_, their_message_;  // of AllDo
};

}  // namespace gtrain::comm
