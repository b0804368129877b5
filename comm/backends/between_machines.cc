#include "comm/backends/between_machines.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/clock.h"
#include "base/status_macros.h"
#include "comm/codec/reduce.h"

namespace gtrain::comm {

// ------------------------------------------------------------------ what links cost

// Leaders: more than a packet to each machine that small all-gathers speak with: a way that loses only large
// packets carries every barrier (fault W14).
absl::Status BetweenMachines::TryLinks(const Watch& watch, double* seconds, double* a_byte) {
  constexpr size_t kTryBytes = 64 << 10;
  const int self = hierarchy_.node, all = machines();
  const bool direct = all <= kDirectRanksMax;
  std::vector<int> steps;
  for (int step = 1; step < all; step = direct ? step + 1 : 2 * step) steps.push_back(step);
  std::vector<char> out(kTryBytes), in(steps.size() * kTryBytes);
  std::vector<Transfer> transfers;
  for (int step : steps) transfers.push_back({(self + step) % all, true, out.data(), kTryBytes});
  for (size_t i = 0; i < steps.size(); ++i) {
    const int from = (self - steps[i] + all) % all;
    transfers.push_back({from, false, in.data() + i * kTryBytes, kTryBytes});
  }
  const Instant start = RealClock().Now();
  GT_RETURN_IF_ERROR(rail_->Exchange(
      transfers, [](size_t) {}, watch));
  *seconds = absl::ToDoubleSeconds(RealClock().Now() - start);
  *a_byte = *seconds / static_cast<double>(in.size());
  return absl::OkStatus();
}

// Run on all ranks: gives all the largest of each value that any leader has.
absl::Status BetweenMachines::AgreeOnMost(absl::Span<double> values, char* memory, const Watch& watch) {
  if (leads()) {
    std::vector<double> all(values.size() * static_cast<size_t>(machines()));
    std::vector<Range> parts;
    for (size_t i = 0; i < hierarchy_.nodes.size(); ++i) parts.push_back({i * values.size(), values.size()});
    std::copy(values.begin(), values.end(), all.begin() + hierarchy_.node * static_cast<long>(values.size()));
    GT_RETURN_IF_ERROR(runner_.Run(AllGatherSchedule(hierarchy_.node, parts), all.data(), DType::kFloat64,
                                   ReduceOp::kSum, rail_, watch));
    for (size_t i = 0; i < all.size(); ++i) {
      values[i % values.size()] = std::max(values[i % values.size()], all[i]);
    }
  }
  if (shm_ == nullptr) return absl::OkStatus();
  if (leads()) std::memcpy(memory, values.data(), values.size() * sizeof(double));
  GT_RETURN_IF_ERROR(shm_->Phase(watch));
  std::memcpy(values.data(), memory, values.size() * sizeof(double));
  return shm_->Phase(watch);
}

// Everybody must choose the same, so everybody takes the worst that anybody measured; where starts must
// choose the same, too, nobody measures more than that the links are there.
absl::Status BetweenMachines::Measure(char* memory, const Watch& watch) {
  double tried = 0, tried_byte = 0;
  if (leads()) GT_RETURN_IF_ERROR(TryLinks(watch, &tried, &tried_byte));
  double both[] = {tried, tried_byte};
  if (!wish_.deterministic) GT_RETURN_IF_ERROR(AgreeOnMost(absl::MakeSpan(both), memory, watch));
  carriers_.clear();
  for (int rails : RailsFor(wish_.speakers, hierarchy_.rails())) {
    if (wish_.deterministic) {
      carriers_.push_back({rails, LinkCost{}});
      continue;
    }
    GT_ASSIGN_OR_RETURN(LinkCost link, MeasureRounds(rails, both[0] * rails, both[1] * rails, memory, watch));
    for (size_t s = 0; s < link.round.size() && !carriers_.empty(); ++s) {
      link.round[s] = std::max(link.round[s], carriers_.back().link.round[s]);  // as for larger messages
    }
    carriers_.push_back({rails, link});
  }
  return absl::OkStatus();
}

// A few messages of each size round the ring of machines tell what a round costs, by so many ranks of each at
// the same time. A round is over when those of the machine are.
absl::StatusOr<LinkCost> BetweenMachines::MeasureRounds(int rails, double tried, double tried_byte,
                                                        char* memory, const Watch& watch) {
  constexpr size_t kSizes = LinkCost::kSizes.size(), kLargest = LinkCost::kSizes.back();
  constexpr int kTimes[kSizes] = {15, 11, 9, 5}, kTimesReduced = 3;
  // On a link that took longer for the first try more large messages would be felt; it has told enough.
  constexpr double kSlow = 0.05;
  const bool speaks = hierarchy_.local < rails;
  const auto together = [&] { return shm_ == nullptr ? absl::OkStatus() : shm_->Phase(watch); };
  const int next = (hierarchy_.node + 1) % machines(),
            previous = (hierarchy_.node + machines() - 1) % machines();
  std::vector<char> out(kLargest), in(kLargest);
  double fastest[kSizes + 1] = {};
  const auto took = [&](size_t what, Instant since) {
    const double seconds = absl::ToDoubleSeconds(RealClock().Now() - since);
    fastest[what] = fastest[what] == 0 ? seconds : std::min(fastest[what], seconds);
  };
  for (size_t s = 0; s < kSizes; ++s) {
    const size_t bytes = LinkCost::kSizes[s];
    if (tried > kSlow && s >= 2) {
      fastest[s] = tried_byte * static_cast<double>(bytes);
      continue;
    }
    const Transfer transfers[] = {{next, true, out.data(), bytes}, {previous, false, in.data(), bytes}};
    for (int i = 0; i < kTimes[s]; ++i) {
      GT_RETURN_IF_ERROR(together());
      const Instant start = RealClock().Now();
      if (speaks) {
        GT_RETURN_IF_ERROR(rail_->Exchange(
            transfers, [](size_t) {}, watch));
      }
      GT_RETURN_IF_ERROR(together());
      took(s, start);
    }
  }
  const void* sources[] = {in.data(), out.data()};
  for (int i = 0; i < kTimesReduced; ++i) {
    const Instant start = RealClock().Now();
    Reduce(in.data(), sources, 2, kLargest / sizeof(float), DType::kFloat32, ReduceOp::kSum, 1);
    took(kSizes, start);
  }

  GT_RETURN_IF_ERROR(AgreeOnMost(absl::MakeSpan(fastest), memory, watch));
  LinkCost link;
  for (size_t s = 0; s < kSizes; ++s) {
    // A larger message is never cheaper: where it seemed so, something else took the time.
    link.round[s] = s == 0 ? fastest[s] : std::max(fastest[s], link.round[s - 1]);
  }
  link.reduced_byte = fastest[kSizes] / kLargest;
  return link;
}

// Each number of rails gets the cost of the next smaller number that was measured. Nothing is known about
// more rails than were measured, so they are taken only where they were asked for.
void BetweenMachines::TakeLinks(const std::vector<Carriers>& measured) {
  carriers_.clear();
  for (const int rails : RailsFor(wish_.speakers, hierarchy_.rails())) {
    const auto above = std::ranges::find_if(measured, [&](const Carriers& c) { return c.rails > rails; });
    if (above == measured.end() && measured.back().rails < rails && !carriers_.empty()) continue;
    // With fewer rails the link of more is at least as good.
    const Carriers& like = above == measured.begin() ? measured.front() : *std::prev(above);
    carriers_.push_back({rails, like.link});
  }
}

absl::Status BetweenMachines::MeasureAgain(char* memory, const Watch& watch) {
  const std::vector<Carriers> before = carriers_;
  // The call in which this happens pays with its caller's patience and not with its deadline, which one round
  // of many may be near.
  constexpr absl::Duration kMeasuring = absl::Seconds(30);
  const Instant start = RealClock().Now();
  GT_RETURN_IF_ERROR(Measure(memory, watch.Anew(kMeasuring)));
  watch.Excuse(RealClock().Now() - start);
  constexpr double kSame = 1.5;
  bool changed = before.size() != carriers_.size();
  for (size_t i = 0; !changed && i < before.size(); ++i) {
    for (size_t s = 0; s < LinkCost::kSizes.size(); ++s) {
      const double old = before[i].link.round[s], now = carriers_[i].link.round[s];
      changed = changed || now > kSame * old || old > kSame * now;
    }
  }
  drift_.Measured(changed);
  if (on_measured_again) on_measured_again();
  return absl::OkStatus();
}

// ------------------------------------------------------------------ comparing

// A doubling all-reduce of "we all do this", in which small data goes along: the same bytes as in the
// schedule of the data alone, and no round more.
absl::StatusOr<bool> BetweenMachines::AllDo(const OpRecord& record, bool same, const Watch& watch,
                                            bool* drifted, char* data, size_t bytes) {
  struct Head {
    OpRecord record;
    uint64_t same, drifted;
  };
  constexpr size_t kMost = sizeof(Head) + kWithRecordsBytes;
  own_message_.resize(kMost);
  their_message_.resize(kMost);
  char* const payload = own_message_.data() + sizeof(Head);
  size_t received = 0;
  *drifted = Drifted();
  const auto tell = [&] {
    const Head head{record, same ? 1u : 0u, *drifted ? 1u : 0u};
    std::memcpy(own_message_.data(), &head, sizeof(head));
  };
  const auto hear = [&](const Action& action) {
    Head head{};
    std::memcpy(&head, their_message_.data(), sizeof(head));
    same = same && received == sizeof(Head) + bytes && head.same != 0 && SameOperation(head.record, record);
    *drifted = *drifted || head.drifted != 0;
    if (!same || bytes == 0) return;
    char* const theirs = their_message_.data() + sizeof(Head);
    if (action.kind == ActionKind::kReceive) {
      std::memcpy(payload, theirs, bytes);
      return;
    }
    const void* sources[] = {payload, theirs};
    if (action.incoming_first) std::swap(sources[0], sources[1]);
    Reduce(payload, sources, 2, record.count, record.dtype, record.op, 1);
  };
  if (bytes > 0) std::memcpy(payload, data, bytes);
  for (const Round& round : DoublingAllReduce(hierarchy_.node, machines(), 1)) {
    tell();
    std::vector<Transfer> transfers;
    for (const Action& action : round) {
      if (action.kind == ActionKind::kSend) {
        transfers.push_back({action.peer, true, own_message_.data(), sizeof(Head) + bytes});
      } else {
        transfers.push_back({action.peer, false, their_message_.data(), kMost, &received});
      }
    }
    GT_RETURN_IF_ERROR(rail_->Exchange(
        transfers,
        [&](size_t i) {
          if (round[i].kind != ActionKind::kSend) hear(round[i]);
        },
        watch));
  }
  if (same && bytes > 0) std::memcpy(data, payload, bytes);
  return same;
}

// Leaders: the records of all machines to all machines.
absl::Status BetweenMachines::GatherRecords(absl::Span<OpRecord> records, const Watch& watch) {
  std::vector<OpRecord> table;
  for (int r : hierarchy_.NodeMajor()) table.push_back(records[static_cast<size_t>(r)]);
  std::vector<Range> parts;
  uint64_t begin = 0;
  for (const auto& ranks : hierarchy_.nodes) {
    parts.push_back({begin, ranks.size() * sizeof(OpRecord)});
    begin += parts.back().count;
  }
  GT_RETURN_IF_ERROR(runner_.Run(AllGatherSchedule(hierarchy_.node, parts), table.data(), DType::kUint8,
                                 ReduceOp::kSum, rail_, watch));
  size_t at = 0;
  for (int r : hierarchy_.NodeMajor()) records[static_cast<size_t>(r)] = table[at++];
  return absl::OkStatus();
}

// ------------------------------------------------------------------ all-reduce

absl::Status BetweenMachines::AllReduce(const OpRecord& record, char* data, uint64_t count, int divisor,
                                        const Watch& watch) {
  const AllReducePlan plan = PlanOf(record, count);
  const Range part = PartOf(count, plan.rails);
  char* const mine = data + part.begin * DTypeSize(record.dtype);
  const Instant start = RealClock().Now();
  GT_RETURN_IF_ERROR(
      Run(MakeSchedule(plan, hierarchy_.node, machines(), part.count), mine, record.dtype, record.op, watch));
  if (leads() && part.count > 0) {
    const auto carriers = std::ranges::find(carriers_, plan.rails, &Carriers::rails);
    const uint64_t bytes = part.count * DTypeSize(record.dtype);
    drift_.Took(bytes, Seconds(carriers->link, WorkOf(plan, machines(), bytes)),
                absl::ToDoubleSeconds(RealClock().Now() - start));
  }
  const void* const sources[] = {mine};
  if (divisor != 1) Reduce(mine, sources, 1, part.count, record.dtype, record.op, divisor);
  return absl::OkStatus();
}

}  // namespace gtrain::comm
