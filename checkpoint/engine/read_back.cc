#include "checkpoint/engine/read_back.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "checkpoint/engine/shard_io.h"

namespace gtrain::ckpt {
namespace {

// The patience for one shard. A rank that stopped in the middle of its copy does not keep it from being read
// for ever.
constexpr absl::Duration kStandAsideMax = absl::Minutes(1), kStandAsideLook = absl::Milliseconds(5);

// This thread is served when nobody else wants the disk (linux/ioprio.h; where its scheduler knows
// priorities) or the processor: the next save's copy stalls training, and reading back may take its time.
void Yield() {
  constexpr int kThisThread = 1, kIdleClass = 3 << 13, kNicest = 19;
  (void)syscall(SYS_ioprio_set, kThisThread, 0, kIdleClass);
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNicest);
}

}  // namespace

ReadBack::~ReadBack() {
  {
    MutexLock lock(&mu_);
    give_up_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void ReadBack::Begin(const SaveId& id, const ShardFile& file) {
  {
    MutexLock lock(&mu_);
    if (busy_) return;
    // A shard that the store compared with a checksum when it came needs no reading.
    if (store_->ChecksEveryPut()) {
      verified_ = id;
      return;
    }
    busy_ = true;
  }
  if (thread_.joinable()) thread_.join();
  thread_ = std::thread([this, id, file] {
    Yield();
    Read(id, file);
    MutexLock lock(&mu_);
    busy_ = false;
  });
}

void ReadBack::Await(absl::Duration timeout) {
  MutexLock lock(&mu_);
  mu_.AwaitFor(timeout, [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !busy_; });
}

void ReadBack::Read(const SaveId& id, const ShardFile& file) {
  std::vector<char> buffer;
  absl::Duration patience = kStandAsideMax;
  for (uint64_t i = 0; i < file.chunks.size(); ++i) {
    if (!StandAside(&patience)) return;
    const absl::Status chunk = ReadChunk(store_, id, file, i, &buffer).status();
    if (chunk.ok()) continue;
    // Deleted by now, or a storage that cannot say: neither is damage, and neither is proof.
    if (!absl::IsDataLoss(chunk) || absl::IsNotFound(store_->Size(ManifestKey(id)).status())) return;
    LogError("checkpoint: step ", id.step, " was committed and IS DAMAGED: ", chunk.message());
    MutexLock lock(&mu_);
    note_ = absl::StrCat("step ", id.step, " was committed and is damaged: ", chunk.message());
    return;
  }
  MutexLock lock(&mu_);
  verified_ = id;
}

// Called before each chunk. Even at the lowest priority its bytes would take memory, disk and caches from the
// copy.
bool ReadBack::StandAside(absl::Duration* patience) {
  MutexLock lock(&mu_);
  for (; !give_up_ && copying_ && *patience > absl::ZeroDuration(); *patience -= kStandAsideLook) {
    mu_.Unlock();
    const bool copying = copying_();
    mu_.Lock();
    if (!copying) break;
    mu_.AwaitFor(kStandAsideLook, [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return give_up_; });
  }
  return !give_up_;
}

std::optional<SaveId> ReadBack::verified() const {
  MutexLock lock(&mu_);
  return verified_;
}

std::string ReadBack::TakeNote() {
  MutexLock lock(&mu_);
  return std::exchange(note_, "");
}

}  // namespace gtrain::ckpt
