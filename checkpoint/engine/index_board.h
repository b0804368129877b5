// Memory in which the writers of one machine leave messages for each other, so that a save of theirs needs no
// files and no requests for that: each writer leaves its index, rank 0's the committed manifest. It is only a
// shortcut: a message that does not come this way, because a writer died or cannot open the memory, comes
// through the storage as between machines (docs/formats/checkpoint.md), and no reader trusts that a message
// is whole.
//
//   page 0         Header
//   then           a Slot of 1 MiB for each rank: the index of a shard of up to 90 GiB
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"

namespace gtrain::ckpt {

// Thread-safe; nothing blocks. Each slot and the header have one writer at a time.
class IndexBoard {
 public:
  static constexpr int kRanksMax = 1024;

  // `name` says whose saves the board is for, the same for all. FailedPrecondition for a world of more than
  // kRanksMax.
  static absl::StatusOr<std::unique_ptr<IndexBoard>> Make(int world_size, absl::string_view name);
  // Opens the board that another process of this machine made and still has.
  static absl::StatusOr<std::unique_ptr<IndexBoard>> Join(int64_t address, int world_size,
                                                          absl::string_view name);
  ~IndexBoard();
  IndexBoard(const IndexBoard&) = delete;
  IndexBoard& operator=(const IndexBoard&) = delete;

  int64_t address() const;  // for Join; greater than 0

  // Whether rank 0's writer reads here. A writer of a version without boards never says so.
  void SetOpen(bool open);
  bool open() const;
  // Rank 0's writer: the newest commit.
  void SayCommitted(absl::string_view manifest_key);
  bool IsCommitted(absl::string_view manifest_key) const;

  // The writer of `rank` knows this board and leaves its indices here if it can.
  void Attend(int rank);
  bool attends(int rank) const;
  // Its index of the newest save. False: it is too long, and comes through the storage (NoteStored).
  bool Post(int rank, absl::string_view index);
  // May be half an old and half a new one: a sealed text says so itself.
  std::optional<std::string> Read(int rank) const;
  // Its index is about to be put into the storage: as well, or only there. Holds until the next Post.
  void NoteStored(int rank);
  bool stored(int rank) const;

 private:
  struct Header;
  struct Slot;
  IndexBoard(UniqueFd fd, char* base, int world_size)
      : fd_(std::move(fd)), base_(base), world_size_(world_size) {}
  static absl::StatusOr<std::unique_ptr<IndexBoard>> Map(UniqueFd fd, int world_size);
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  Slot* slot(int rank) const;

  const UniqueFd fd_;
  char* const base_;
  const int world_size_;
};

// The name of the board for the saves of `job` as owner `epoch`.
std::string BoardName(absl::string_view job, uint64_t epoch);

}  // namespace gtrain::ckpt
