#include "checkpoint/engine/index_board.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/engine/save_arena.h"

namespace gtrain::ckpt {
namespace {

// The index of a shard has 43 bytes for each 4 MiB. Pages of a slot that nobody writes to take no memory.
constexpr size_t kSlotBytes = size_t{1} << 20;

size_t BytesFor(int world_size) { return kPage + kSlotBytes * static_cast<size_t>(world_size); }

}  // namespace

struct IndexBoard::Header {
  char name[256];
  std::atomic<uint32_t> open;
  std::atomic<uint32_t> committed_bytes;  // 0: `committed` is being written
  char committed[128];
};

struct IndexBoard::Slot {
  std::atomic<uint32_t> attends;
  std::atomic<uint32_t> stored;
  std::atomic<uint32_t> bytes;  // 0: `text` is being written
  char text[kSlotBytes - 3 * sizeof(std::atomic<uint32_t>)];
};

absl::StatusOr<std::unique_ptr<IndexBoard>> IndexBoard::Map(UniqueFd fd, int world_size) {
  static_assert(sizeof(Header) <= kPage && sizeof(Slot) == kSlotBytes);
  void* base = mmap(nullptr, BytesFor(world_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "memory for word of saves");
  return std::unique_ptr<IndexBoard>(new IndexBoard(std::move(fd), static_cast<char*>(base), world_size));
}

absl::StatusOr<std::unique_ptr<IndexBoard>> IndexBoard::Make(int world_size, absl::string_view name) {
  if (world_size > kRanksMax) return absl::FailedPreconditionError("too many ranks for one board");
  UniqueFd fd(memfd_create("gtrain-indices", MFD_CLOEXEC));  // all zero: nobody is there
  if (!fd.valid() || ftruncate(fd.get(), static_cast<off_t>(BytesFor(world_size))) != 0)
    return ErrnoStatus(errno, "memory for word of saves");
  GT_ASSIGN_OR_RETURN(auto board, Map(std::move(fd), world_size));
  PutText(name, absl::MakeSpan(board->header()->name));
  return board;
}

absl::StatusOr<std::unique_ptr<IndexBoard>> IndexBoard::Join(int64_t address, int world_size,
                                                             absl::string_view name) {
  GT_ASSIGN_OR_RETURN(UniqueFd fd, OpenShared(address));
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "memory for word of saves");
  const bool fits = world_size <= kRanksMax && static_cast<uint64_t>(info.st_size) == BytesFor(world_size);
  if (!fits) return absl::FailedPreconditionError("the memory for word of saves has another size");
  GT_ASSIGN_OR_RETURN(auto board, Map(std::move(fd), world_size));
  char known[sizeof(Header::name)];
  PutText(name, absl::MakeSpan(known));  // cut as the other was
  if (TakeText(absl::MakeSpan(board->header()->name)) == TakeText(absl::MakeSpan(known))) return board;
  return absl::FailedPreconditionError("it is not the memory for word of these saves");
}

IndexBoard::~IndexBoard() { munmap(base_, BytesFor(world_size_)); }

int64_t IndexBoard::address() const { return ShareAddress(fd_.get()); }

IndexBoard::Slot* IndexBoard::slot(int rank) const {
  GT_CHECK(rank >= 0 && rank < world_size_);
  return reinterpret_cast<Slot*>(base_ + kPage + kSlotBytes * static_cast<size_t>(rank));
}

void IndexBoard::SetOpen(bool open) { header()->open.store(open ? 1 : 0, std::memory_order_release); }
bool IndexBoard::open() const { return header()->open.load(std::memory_order_acquire) != 0; }

void IndexBoard::SayCommitted(absl::string_view manifest_key) {
  Header* const h = header();
  GT_CHECK(manifest_key.size() <= sizeof(h->committed));
  h->committed_bytes.store(0, std::memory_order_release);
  std::memcpy(h->committed, manifest_key.data(), manifest_key.size());
  h->committed_bytes.store(static_cast<uint32_t>(manifest_key.size()), std::memory_order_release);
}

bool IndexBoard::IsCommitted(absl::string_view manifest_key) const {
  const Header* const h = header();
  return h->committed_bytes.load(std::memory_order_acquire) == manifest_key.size() &&
         std::memcmp(h->committed, manifest_key.data(), manifest_key.size()) == 0;
}

void IndexBoard::Attend(int rank) { slot(rank)->attends.store(1, std::memory_order_release); }
bool IndexBoard::attends(int rank) const { return slot(rank)->attends.load(std::memory_order_acquire) != 0; }

bool IndexBoard::Post(int rank, absl::string_view index) {
  Slot* const s = slot(rank);
  if (index.size() > sizeof(s->text)) return false;
  s->bytes.store(0, std::memory_order_release);
  s->stored.store(0, std::memory_order_relaxed);
  std::memcpy(s->text, index.data(), index.size());
  s->bytes.store(static_cast<uint32_t>(index.size()), std::memory_order_release);
  return true;
}

std::optional<std::string> IndexBoard::Read(int rank) const {
  const Slot* const s = slot(rank);
  const uint32_t bytes = s->bytes.load(std::memory_order_acquire);
  if (bytes == 0 || bytes > sizeof(s->text)) return std::nullopt;
  return std::string(s->text, bytes);
}

void IndexBoard::NoteStored(int rank) { slot(rank)->stored.store(1, std::memory_order_release); }
bool IndexBoard::stored(int rank) const { return slot(rank)->stored.load(std::memory_order_acquire) != 0; }

std::string BoardName(absl::string_view job, uint64_t epoch) {
  return absl::StrCat(job, " as owner ", epoch);
}

}  // namespace gtrain::ckpt
