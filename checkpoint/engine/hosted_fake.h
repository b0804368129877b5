// A job of threads whose ranks have writers outside of them, as under gtrain's keeper. For tests.
#pragma once
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "checkpoint/engine/checkpointer.h"
#include "checkpoint/engine/outside.h"
#include "checkpoint/engine/save_arena.h"
#include "checkpoint/engine/session_fake.h"
#include "checkpoint/port/writer_host.h"
#include "checkpoint/store/directory_store.h"

namespace gtrain::ckpt {

inline UniqueFd MakeArena(uint64_t bytes) {
  UniqueFd fd(memfd_create("test-saves", MFD_CLOEXEC));
  GT_CHECK(fd.valid() && ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  return fd;
}

// A session whose writers are threads of this process, which outlive it.
class HostedSession final : public FakeSession, public port::WriterHost {
 public:
  struct Writers {
    Mutex mu;
    std::vector<std::thread> threads ABSL_GUARDED_BY(mu);
    bool refuse = false;
    bool die = false;  // at the first save, with nobody to replace it
    StoreFactory open_store = &OpenDirectoryStore;
    std::optional<NearPlace> near;
    // Like the keeper, it frees memory of an earlier generation before the next one gets any.
    struct Memory {
      uint64_t generation;
      SaveArena arena;
      std::shared_ptr<StopFlag> ended;
    };
    std::vector<Memory> memory ABSL_GUARDED_BY(mu);
    bool IsHeldBefore(uint64_t generation) {
      MutexLock lock(&mu);
      return std::any_of(memory.begin(), memory.end(), [&](const Memory& m) {
        return m.generation < generation && m.arena.header()->released == 0 && !m.ended->set();
      });
    }
    ~Writers() {
      for (std::thread& t : threads) t.join();
    }
  };
  HostedSession(const FakeJob& job, int rank, Writers* writers) : FakeSession(job, rank), writers_(writers) {}
  port::WriterHost* writer_host() override { return this; }

  absl::StatusOr<port::WriterLink> StartWriter(uint64_t arena_bytes, absl::Duration,
                                               absl::FunctionRef<bool()> wanted) override {
    if (writers_->refuse) return absl::FailedPreconditionError("no gtrain-writer beside the keeper");
    if (!Until([&] { return !writers_->IsHeldBefore(generation()) || !wanted(); }))
      return absl::DeadlineExceededError("the memory was not free in time");
    if (!wanted()) return absl::CancelledError("no writer is wanted any more");
    port::WriterLink link{.arena = MakeArena(arena_bytes), .channel = UniqueFd()};
    int ends[2];
    GT_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    link.channel.reset(ends[0]);
    MutexLock lock(&writers_->mu);
    if (writers_->die) {
      writers_->threads.emplace_back([arena = dup(link.arena.get()), channel = ends[1]] {
        const UniqueFd closes(channel);
        const SaveArena mapped = *SaveArena::Map(UniqueFd(arena));
        SaveArenaHeader* const header = mapped.header();
        header->state = WriterState::kReady;
        const SaveArenaHeader& asked = *header;
        GT_CHECK(Until([&] { return asked.requested == 1; }));
      });
      return link;
    }
    auto ended = std::make_shared<StopFlag>();
    writers_->memory.push_back({generation(), *SaveArena::Map(UniqueFd(dup(link.arena.get()))), ended});
    writers_->threads.emplace_back([open_store = writers_->open_store, near = writers_->near,
                                    arena = dup(link.arena.get()), channel = ends[1], ended] {
      RunWriter(UniqueFd(arena), UniqueFd(channel), open_store, near);
      ended->Set();
    });
    return link;
  }

 private:
  Writers* const writers_;
};

inline void RunHosted(FakeJob job, HostedSession::Writers* writers,
                      const std::function<void(HostedSession*)>& body) {
  job.meeting = std::make_shared<Meeting>(job.world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < job.world_size; ++rank) {
    threads.emplace_back([&, rank] {
      HostedSession session(job, rank, writers);
      body(&session);
      job.meeting->Break();
    });
  }
  for (std::thread& t : threads) t.join();
}

}  // namespace gtrain::ckpt
