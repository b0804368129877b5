#include "checkpoint/engine/save_arena.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/save_order.h"

namespace gtrain::ckpt {
namespace {

uint64_t ChunksOf(uint64_t file_bytes) { return (file_bytes + kChunkBytes - 1) / kChunkBytes; }
// With a tail the header of a file may grow, too.
uint64_t HashPages(uint64_t file_bytes, bool has_tail) {
  return WholePages(ChunksOf(file_bytes + (has_tail ? kHeaderBytesMax : 0)) * sizeof(HashBytes));
}
uint64_t TailBytes(bool has_tail) { return has_tail ? kTailTextBytesMax : 0; }

}  // namespace

void PutText(absl::string_view text, absl::Span<char> to) {
  const size_t bytes = std::min(text.size(), to.size() - 1);
  std::copy_n(text.data(), bytes, to.data());  // none of nothing is fine, unlike memcpy
  to[bytes] = '\0';
}

std::string TakeText(absl::Span<const char> from) {
  return std::string(from.begin(), std::find(from.begin(), from.end(), '\0'));
}

int64_t ShareAddress(int fd) { return static_cast<int64_t>(getpid()) << 32 | fd; }

absl::StatusOr<UniqueFd> OpenShared(int64_t address) {
  const std::string path = absl::StrCat("/proc/", address >> 32, "/fd/", address & INT_MAX);
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("open ", path));
  return fd;
}

uint64_t SaveArena::BytesFor(uint64_t order_bytes, uint64_t file_bytes, bool has_tail) {
  return kOrderBegin + WholePages(order_bytes) + HashPages(file_bytes, has_tail) + TailBytes(has_tail) +
         WholePages(file_bytes) + kPage;
}

absl::StatusOr<SaveArena> SaveArena::Map(UniqueFd fd) {
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "the arena of saves");
  const uint64_t bytes = static_cast<uint64_t>(info.st_size);
  if (bytes < kOrderBegin) return absl::InvalidArgumentError("the arena of saves is too small");
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "mapping the arena of saves");
  return SaveArena(std::move(fd), static_cast<char*>(base), bytes);
}

SaveArena::SaveArena(SaveArena&& other) noexcept
    : fd_(std::move(other.fd_)), base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}

SaveArena::~SaveArena() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

void SaveArena::PutOrder(absl::string_view order, uint64_t file_begin, uint64_t file_bytes, bool has_tail) {
  GT_CHECK(BytesFor(order.size(), file_bytes, has_tail) <= bytes_);
  std::memcpy(base_ + kOrderBegin, order.data(), order.size());
  const uint64_t hashes = kOrderBegin + WholePages(order.size());
  const uint64_t tail = hashes + HashPages(file_bytes, has_tail);
  header()->hashes.store(hashes, std::memory_order_relaxed);
  if (has_tail) header()->tail.store(tail, std::memory_order_relaxed);
  header()->data.store(tail + TailBytes(has_tail) + file_begin % kPage, std::memory_order_relaxed);
  header()->order_bytes.store(order.size(), std::memory_order_release);
}

absl::StatusOr<std::string> SaveArena::Order() const {
  const uint64_t bytes = header()->order_bytes.load(std::memory_order_acquire);
  if (bytes > bytes_ - kOrderBegin) return absl::DataLossError("the order ends past its arena");
  return std::string(base_ + kOrderBegin, bytes);
}

absl::Status SaveArena::PutTail(absl::string_view tail) {
  if (tail.size() > kTailTextBytesMax)
    return absl::ResourceExhaustedError("too many byte entries of ranks that are no more");
  std::memcpy(base_ + header()->tail.load(std::memory_order_relaxed), tail.data(), tail.size());
  header()->tail_bytes.store(tail.size(), std::memory_order_release);
  return absl::OkStatus();
}

absl::StatusOr<std::string> SaveArena::Tail() const {
  const uint64_t begin = header()->tail.load(std::memory_order_relaxed);
  const uint64_t bytes = header()->tail_bytes.load(std::memory_order_acquire);
  if (begin < kOrderBegin || begin > bytes_ || bytes > bytes_ - begin || bytes > kTailTextBytesMax)
    return absl::DataLossError("the tail ends past its arena");
  return std::string(base_ + begin, bytes);
}

absl::StatusOr<char*> SaveArena::Data(uint64_t bytes) const {
  const uint64_t begin = header()->data.load(std::memory_order_relaxed);
  if (begin < kOrderBegin || begin > bytes_ || bytes > bytes_ - begin)
    return absl::DataLossError("the data ends past its arena");
  return base_ + begin;
}

void SaveArena::PutHashes(absl::Span<const HashBytes> hashes) {
  const uint64_t begin = header()->hashes.load(std::memory_order_relaxed);
  GT_CHECK(begin + hashes.size() * sizeof(HashBytes) <= header()->data.load(std::memory_order_relaxed));
  std::memcpy(base_ + begin, hashes.data(), hashes.size() * sizeof(HashBytes));
}

absl::StatusOr<std::vector<HashBytes>> SaveArena::Hashes(uint64_t file_bytes) const {
  const uint64_t begin = header()->hashes.load(std::memory_order_relaxed);
  const uint64_t bytes = ChunksOf(file_bytes) * sizeof(HashBytes);
  if (begin == 0) return std::vector<HashBytes>();
  if (begin < kOrderBegin || begin > bytes_ || bytes > bytes_ - begin)
    return absl::DataLossError("the hashes end past their arena");
  std::vector<HashBytes> out(ChunksOf(file_bytes));
  std::memcpy(out.data(), base_ + begin, bytes);
  return out;
}

void SaveArena::DropData() {
  const uint64_t begin = header()->data.load(std::memory_order_relaxed);
  if (begin < kOrderBegin || begin >= bytes_) return;
  // Without it the pages live until the writer ends: later, never wrong.
  (void)fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                  static_cast<off_t>(bytes_ - begin));
}

void Bell::Ring() const {
  const char byte = 0;
  // A full socket has bytes enough to wake the other side; a closed one has nobody.
  (void)!send(channel_.get(), &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Bell::Wait(absl::Duration timeout) {
  pollfd fd{channel_.get(), POLLIN, 0};
  const int ms = static_cast<int>(std::clamp<int64_t>(absl::ToInt64Milliseconds(timeout), 0, 60'000));
  if (poll(&fd, 1, gone_ ? 0 : ms) <= 0) return;
  char bytes[256];
  ssize_t n;
  do {
    n = recv(channel_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
  } while (n > 0 || (n < 0 && errno == EINTR));
  // ECONNRESET: it ended with bytes of ours unread.
  if (n == 0 || errno != EAGAIN) gone_ = true;
}

}  // namespace gtrain::ckpt
