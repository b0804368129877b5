// Saves outside the rank's process: the snapshot lies in memory that outlives the rank, and a writer, a
// process of its own that the keeper started, takes it from there. So what ends the rank after Save()
// returned does not end the save (docs/design/README.md). Both sides of engine/save_arena.h.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "checkpoint/engine/checkpointer.h"
#include "checkpoint/engine/save_arena.h"
#include "checkpoint/engine/saver.h"
#include "checkpoint/format/save_order.h"
#include "checkpoint/port/writer_host.h"

namespace gtrain::ckpt {

// The rank's side.
class OutsideRoute final : public SaveRoute {
 public:
  // Blocks until the writer has the store open, at most as long as StartWriter and a minute, and as long as
  // `wanted` says true. An error says why this rank must write itself. `board`: the address of this
  // machine's, or 0.
  static absl::StatusOr<std::unique_ptr<OutsideRoute>> Start(port::WriterHost* host, const SaveOrder& order,
                                                             const ShardPlan& plan, int64_t board,
                                                             absl::FunctionRef<bool()> wanted);

  char* buffer() override { return data_; }
  absl::Status SetTail(const SaveTail& tail) override { return arena_.PutTail(Print(tail)); }
  void SetCopying(bool copying) override;
  void Begin(const SaveId& id, const std::vector<HashBytes>& hashes) override;
  void Resumed(const SaveId& id) override;
  std::optional<absl::Status> Finish(const SaveId& id, StopFlag* stop,
                                     absl::FunctionRef<void()> committed) override;
  bool usable() override;

 private:
  OutsideRoute(SaveArena arena, UniqueFd channel, int rank, absl::Duration patience)
      : arena_(std::move(arena)), bell_(std::move(channel)), rank_(rank), patience_(patience) {}
  absl::Status AwaitReady(absl::FunctionRef<bool()> wanted);
  void NoteStarts();

  SaveArena arena_;
  Bell bell_;
  const int rank_;
  const absl::Duration patience_;  // with one save: a writer that hangs does not hold up training for ever
  const RealClock clock_;
  char* data_ = nullptr;
  uint32_t starts_ = 1;  // of the writer, told to people
  bool usable_ = true;
};

// The writer's side: serves one rank until it is gone and nothing is left to do. Returns the exit code of its
// process: 0, or 3 when it refused the order. `near`: where this machine keeps copies.
int RunWriter(UniqueFd arena, UniqueFd channel, const StoreFactory& open_store,
              const std::optional<NearPlace>& near = std::nullopt);

}  // namespace gtrain::ckpt
