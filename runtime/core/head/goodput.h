// GoodputLedger: where the rank-seconds of a job went. PURE. Private to runtime/core/head.
//
// A job has as many places as it asks for ranks, or has, whichever is more. Every second of every place gets
// one label (TimeLabel), so that the labels add up to all rank-seconds. The head knows most of them from the
// state of the job alone (PlacesOf). Only the places that run are told apart by what ranks report: their
// seconds are `open` until the next report of a step says which steps they went into, and what ranks measured
// of them, waits for others and for checkpoints, is taken out.
//
// A value that the job owns; not thread-safe, never blocks; each call costs the same however many ranks there
// are.
#pragma once
#include <array>
#include <cstdint>
#include <optional>

#include "base/clock.h"
#include "base/ids.h"
#include "runtime/core/values/goodput.h"

namespace gtrain::core {

struct Job;
struct RankLive;
struct RankStatus;

// What the places of a job do now.
struct JobPlaces {
  int wanted = 0;   // what the job asks for, in ranks: as many as its file allows, or a person has set
  int running = 0;  // in a generation that has made a step
  // Of kReforming, and of kStarting or kUnreported: in a generation all of whose ranks have started, and that
  // has reported no step. They may be at its first one. Who goes on was in the generation before.
  int going_on = 0, joining = 0;
  std::array<int, kTimeLabels> of{};
  int& operator[](TimeLabel label) { return of[static_cast<size_t>(label)]; }
  bool operator==(const JobPlaces&) const = default;
};

// The sums that people see. A label that nobody measured is none.
struct GoodputTotals {
  std::array<std::optional<double>, kTimeLabels> seconds;
  double all = 0;                 // of the labels
  std::optional<double> goodput;  // the share of kStep
  std::optional<int64_t> first, top, applied, redone;
  int losses = 0, wanted = 0;
};

class GoodputLedger {
 public:
  GoodputLedger() = default;
  // Goes on from `stored`, which holds what was counted before `from`.
  GoodputLedger(const GoodputRecord& stored, Instant from);

  // Counts the time up to `now` for the places as they were set.
  void Advance(Instant now);
  void SetPlaces(const JobPlaces& places);
  // The slowest rank of the generation is at this step. `anew`: all its ranks have gone back to lower steps
  // by themselves. Returns whether it is the first step of the generation.
  bool Step(int64_t step, Generation generation, bool anew);
  // Seconds that a rank measured of what is counted as running.
  void Measured(std::optional<double> idle, std::optional<double> stall);
  // The ranks of the generation are together, so that they may compute.
  void AllJoined(Instant now);
  // By a rank's own clock, what it computed for each step between its newest two reports of one.
  void Paced(double seconds) { paced_ = seconds; }
  // So long ago was the step that is told next, by its rank's own clock: reports come with heartbeats.
  void Late(double seconds) { late_ = seconds; }
  // The generation ended before its time.
  void EndGeneration(Instant now);
  void CountLoss() { ++record_.losses; }

  const GoodputRecord& record() const { return record_; }
  GoodputTotals Totals(Instant now) const;
  // Since when the places run.
  std::optional<Instant> stepped_at() const { return stepped_at_; }

 private:
  // The time before the first step of a generation, in which that step was computed.
  struct BeforeStep {
    double wall = 0, reforming = 0, starting = 0;  // seconds, and rank-seconds as they were labelled
    std::optional<TimeLabel> step;                 // what it was; none: it has not been reported
    // Between the last report of the generation before and its end: rank-seconds, the ranks that ran, and the
    // whole steps that they made.
    double behind = 0;
    int ran = 0;
    int64_t made = 0;
  };

  double& Of(TimeLabel label) { return record_.seconds[static_cast<size_t>(label)]; }
  void Close(TimeLabel label);
  void TakeFirstStep(TimeLabel label);
  void DivideBehind(const BeforeStep& before);
  void Move(double seconds, TimeLabel from, TimeLabel to);
  void MeasureStep(int64_t made);

  GoodputRecord record_;
  std::optional<Instant> counted_to_;
  std::optional<Instant> stepped_at_;  // the first step of the generation, as far as this head knows
  // Of `open`: since a rank has ended and the others have reported no step. Not stored: the next head counts
  // anew.
  double behind_exit_ = 0;
  // Not stored: behind another head the first step of a generation stays what it was counted as.
  BeforeStep before_step_;
  std::optional<double> step_seconds_;  // that a rank computed for a step, by the newest two reports
  std::optional<double> paced_;         // since the report before
  double late_ = 0;
  int ran_ = 0;  // of the newest generation that has ended and made a step
  JobPlaces places_;
};

// Does not look at all ranks.
JobPlaces PlacesOf(const Job& job);
// Counts what the rank measured since its last report. Called before its status is taken.
void MeasureGoodput(Job& job, RankLive& rank, const RankStatus& status, Instant now);

}  // namespace gtrain::core
