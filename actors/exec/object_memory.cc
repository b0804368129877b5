#include "actors/exec/object_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace gtrain::actors {
namespace {

constexpr uint64_t kMagic = 0x314a424f52544721;  // "!GTROBJ1"
// Where a page fault for each page costs more than the system call.
constexpr uint64_t kWriteAtOnce = 64 << 10;

absl::Status Failed(const char* what) {
  const int error = errno;
  return absl::ResourceExhaustedError(absl::StrCat("the memory of an object: ", what, ": ", strerror(error)));
}

struct flock Whole(short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;
}

}  // namespace

// The other process may write what it likes here; what is read is compared and not believed.
struct ObjectMemory::Head {
  std::atomic<uint64_t> magic, owner_high, owner_low, id, bytes;
};

ObjectMemory::Head& ObjectMemory::head() const { return *reinterpret_cast<Head*>(mapped_); }

absl::StatusOr<std::shared_ptr<ObjectMemory>> ObjectMemory::Make(uint64_t bytes) {
  static_assert(sizeof(Head) <= kHeadBytes);
  constexpr uint64_t kMost = uint64_t{1} << 46;
  if (bytes > kMost) return absl::ResourceExhaustedError(absl::StrCat("an object of ", bytes, " bytes"));
  const uint64_t size = kHeadBytes + (bytes + kHeadBytes - 1) / kHeadBytes * kHeadBytes;
  UniqueFd fd(memfd_create("gtrain-object", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Failed("memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) return Failed("ftruncate");
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return Failed("F_ADD_SEALS");
  void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) return Failed("mmap");
  return std::shared_ptr<ObjectMemory>(new ObjectMemory(std::move(fd), static_cast<char*>(mapped), size));
}

absl::StatusOr<std::shared_ptr<ObjectMemory>> ObjectMemory::Open(const ObjectRef& ref) {
  const absl::Status none = absl::NotFoundError("the memory of the object is not to be had");
  const std::string path = absl::StrCat("/proc/", ref.pid, "/fd/", ref.descriptor);
  // What lies there now may be anything. To open a pipe or a device is felt at its other end, so it is looked
  // at first.
  const UniqueFd there(open(path.c_str(), O_PATH | O_CLOEXEC));
  struct stat found {};
  if (!there.valid() || fstat(there.get(), &found) != 0 || !S_ISREG(found.st_mode)) return none;
  UniqueFd fd(open(absl::StrCat("/proc/self/fd/", there.get()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return none;
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  if (fstat(fd.get(), &found) != 0 || !S_ISREG(found.st_mode) ||
      (fcntl(fd.get(), F_GET_SEALS) & kSeals) != kSeals)
    return none;
  const auto size = static_cast<uint64_t>(found.st_size);
  if (size < kHeadBytes || size - kHeadBytes < ref.bytes) return none;
  // The lock before the look: whoever made it withdraws the name before it looks for locks.
  struct flock lock = Whole(F_RDLCK);
  if (fcntl(fd.get(), F_OFD_SETLK, &lock) != 0) return none;
  void* const mapped = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (mapped == MAP_FAILED) return Failed("mmap");
  std::shared_ptr<ObjectMemory> memory(new ObjectMemory(std::move(fd), static_cast<char*>(mapped), size));
  if (!memory->Is(ref)) return none;
  return memory;
}

bool ObjectMemory::Is(const ObjectRef& ref) const {
  const Head& head = this->head();
  return head.magic.load() == kMagic && head.owner_high.load() == ref.owner.high &&
         head.owner_low.load() == ref.owner.low && head.id.load() == ref.id && head.bytes.load() == ref.bytes;
}

ObjectMemory::~ObjectMemory() { munmap(mapped_, size_); }

void ObjectMemory::Publish(ObjectRef* ref) {
  ref->pid = static_cast<uint32_t>(getpid());
  ref->descriptor = static_cast<uint32_t>(fd_.get());
  Head& to = head();
  to.magic.store(kMagic);
  to.owner_high.store(ref->owner.high);
  to.owner_low.store(ref->owner.low);
  to.bytes.store(ref->bytes);
  to.id.store(ref->id);
}

void ObjectMemory::Withdraw() { head().id.store(0); }

bool ObjectMemory::IsRead() const {
  struct flock lock = Whole(F_WRLCK);
  // Where that cannot be known somebody may.
  return fcntl(fd_.get(), F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

absl::Status ObjectMemory::Write(uint64_t at, const void* data, uint64_t size) {
  if (at > capacity() || size > capacity() - at)
    return absl::InvalidArgumentError(absl::StrCat("an object of ", capacity(), " bytes is given more"));
  if (!new_ || size < kWriteAtOnce) {
    std::memcpy(this->data() + at, data, size);
    return absl::OkStatus();
  }
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = pwrite(fd_.get(), from, size, static_cast<off_t>(kHeadBytes + at));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return Failed("pwrite");
    from += written;
    at += static_cast<uint64_t>(written);
    size -= static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

}  // namespace gtrain::actors
