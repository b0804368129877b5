// The memory of one object: written by the process that makes it, mapped by any number of readers on its
// machine, without copies.
//
// It is a memfd (memfd_create(2)) that never changes its size, behind a page that says which object lies in
// it. A reader opens it through /proc/PID/fd of the owner, so nobody has to hand it over, and there is no
// file to leave behind; a process of another user, or one that sees another /proc, cannot, and fetches the
// bytes. Each reader has a shared lock on its own open file (F_OFD_SETLK, fcntl(2)), which the kernel
// releases however the reader ends: so whoever made it knows whether anybody still reads it, and may use the
// memory for another object when nobody does.
//
// Thread-safe but for what is said. Cost: a descriptor, a mapping, and a page beside the bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "actors/plan/objects.h"
#include "base/unique_fd.h"

namespace gtrain::actors {

class ObjectMemory {
 public:
  // ResourceExhausted: there is no memory, or no descriptor.
  static absl::StatusOr<std::shared_ptr<ObjectMemory>> Make(uint64_t bytes);
  // That of another process of this machine, to be read. NotFound: it is not to be had this way, or no more.
  static absl::StatusOr<std::shared_ptr<ObjectMemory>> Open(const ObjectRef& ref);
  ~ObjectMemory();
  ObjectMemory(const ObjectMemory&) = delete;
  ObjectMemory& operator=(const ObjectMemory&) = delete;

  // Of who made it. From now on it is this object, whose place is written into `ref`; behind all that was
  // written into it.
  void Publish(ObjectRef* ref);
  // It is no object from now on: nobody opens it any more, and those that have may go on reading.
  void Withdraw();
  // It is this object still.
  bool Is(const ObjectRef& ref) const;
  // Some other process reads it.
  bool IsRead() const;
  // For who fills it: the bytes go there without a page fault each where it is new.
  absl::Status Write(uint64_t at, const void* data, uint64_t size);

  char* data() { return mapped_ + kHeadBytes; }
  const char* data() const { return mapped_ + kHeadBytes; }
  uint64_t capacity() const { return size_ - kHeadBytes; }
  uint64_t footprint() const { return size_; }
  void set_used() { new_ = false; }

 private:
  static constexpr uint64_t kHeadBytes = 4096;
  struct Head;
  ObjectMemory(UniqueFd fd, char* mapped, uint64_t size) : fd_(std::move(fd)), mapped_(mapped), size_(size) {}
  Head& head() const;

  const UniqueFd fd_;
  char* const mapped_;
  const uint64_t size_;
  bool new_ = true;  // none of its pages is there yet; of the thread that fills it
};

}  // namespace gtrain::actors
