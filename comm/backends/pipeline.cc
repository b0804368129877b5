#include "comm/backends/pipeline.h"

#include <utility>

#include "base/status_macros.h"

namespace gtrain::comm {
namespace {

// The network is waited for also where something is thrown.
class Beside {
 public:
  explicit Beside(SideThread* thread) : thread_(thread) {}
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;
  ~Beside() {
    if (thread_ != nullptr) (void)thread_->Join();
  }
  absl::Status Join() { return std::exchange(thread_, nullptr)->Join(); }

 private:
  SideThread* thread_;
};

}  // namespace

absl::StatusOr<bool> Pipeline::Begin(const OpRecord& record, const Work& first, uint64_t chunks,
                                     absl::FunctionRef<absl::Status()> enter, const Watch& watch) {
  const bool reached = record.arena != 0;
  if (!reached && chunks > 0) GT_RETURN_IF_ERROR(first(0));
  GT_RETURN_IF_ERROR(enter());
  int reached_by_all = 0;
  for (int i = 0; i < shm_->size(); ++i) reached_by_all += shm_->Record(i).arena != 0 ? 1 : 0;
  // Without data nothing meets the ranks again, and they may free the memory at once.
  if (reached_by_all == 0 || chunks == 0) return false;
  if (reached_by_all == shm_->size()) return true;
  // Only some ranks passed such memory: they stage their data after all.
  if (reached) GT_RETURN_IF_ERROR(first(0));
  GT_RETURN_IF_ERROR(shm_->Phase(watch));
  return false;
}

absl::Status Pipeline::Run(uint64_t chunks, std::initializer_list<Stage> stages, const Watch& watch) {
  if (chunks == 0) return absl::OkStatus();
  const uint64_t ticks = chunks + stages.size() - 1;
  for (uint64_t tick = 1; tick < ticks; ++tick) {
    if (tick > 1) GT_RETURN_IF_ERROR(shm_->Phase(watch));
    GT_RETURN_IF_ERROR(Tick(tick, chunks, stages, watch));
  }
  first_ += chunks;
  return absl::OkStatus();
}

absl::Status Pipeline::Tick(uint64_t tick, uint64_t chunks, std::initializer_list<Stage> stages,
                            const Watch& watch) {
  const auto chunk_of = [&](size_t stage) { return tick - stage; };
  const auto busy = [&](size_t stage) { return tick >= stage && chunk_of(stage) < chunks; };
  const auto begin = stages.begin();
  size_t beside = stages.size(), others = 0;
  for (size_t s = 0; s < stages.size(); ++s) {
    if (!busy(s)) continue;
    if (begin[s].network) {
      beside = s;
    } else {
      ++others;
    }
  }
  const auto work = [&]() -> absl::Status {
    for (size_t s = 0; s < stages.size(); ++s) {
      if (busy(s) && (s != beside || others == 0)) GT_RETURN_IF_ERROR(begin[s].work(chunk_of(s)));
    }
    return absl::OkStatus();
  };
  if (beside == stages.size() || others == 0) return work();
  (void)watch.Left();  // both threads have one deadline, which is set here
  if (!network_.Start([&of = begin[beside].work, chunk = chunk_of(beside)] { return of(chunk); })) {
    others = 0;  // one after the other, then
    return work();
  }
  Beside network(&network_);
  const absl::Status own = work(), theirs = network.Join();
  return own.ok() ? theirs : own;
}

}  // namespace gtrain::comm
