#include "runtime/keeper/arenas.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace gtrain::keeper {

namespace {

constexpr uint64_t kFaultStep = 8u << 20;

}  // namespace

// nullptr: *why says why not.
Arena* Arenas::Make(GenerationRecord& record, const RankArenaRequest& request, std::string* why) {
  uint64_t total = request.bytes;
  for (const auto& [id, arena] : record.arenas) total += arena.bytes;
  if (request.bytes == 0 || request.bytes > record.begin.shm_limit || total > record.begin.shm_limit) {
    *why = " of " + std::to_string(request.bytes) + " bytes does not fit: this job may use " +
           std::to_string(record.begin.shm_limit) + " bytes a node; raise resources.shm in the job file";
    return nullptr;
  }
  Arena arena;
  arena.memfd.reset(memfd_create("gtrain-arena", MFD_CLOEXEC));
  if (!arena.memfd.valid() || ftruncate(arena.memfd.get(), static_cast<off_t>(request.bytes)) != 0) {
    *why = std::string(": ") + strerror(errno);
    return nullptr;
  }
  arena.bytes = request.bytes;
  bytes_to_fault_ += request.bytes;
  return &record.arenas.emplace(request.id, std::move(arena)).first->second;
}

void Arenas::Ask(RankConnection& connection, const RankArenaRequest& request) {
  GenerationRecord* record = context_.generations.Find(connection.generation);
  if (record == nullptr || record->phase >= Phase::kWriting) return;
  auto refuse = [&](const std::string& why) {
    connection.Send(kKeeperRefused, "arena " + std::to_string(request.id) + why);
  };
  std::string why;
  const auto it = record->arenas.find(request.id);
  Arena* arena = it == record->arenas.end() ? Make(*record, request, &why) : &it->second;
  if (arena == nullptr) return refuse(why);
  if (arena->bytes != request.bytes) {
    return refuse(": this rank asks for " + std::to_string(request.bytes) + " bytes, another for " +
                  std::to_string(arena->bytes));
  }
  arena->users.insert(&connection);
  // A descriptor of its own: the arena may be free before the rank reads.
  UniqueFd passed(fcntl(arena->memfd.get(), F_DUPFD_CLOEXEC, 0));
  if (!passed.valid()) return refuse(std::string(": ") + strerror(errno));
  const int number = passed.get();
  connection.Send(kKeeperArena, std::string(reinterpret_cast<const char*>(&request), sizeof(request)), number,
                  std::move(passed));
}

// The memory goes with the last user: ranks map an arena before they use it, so who has not asked yet meets
// nobody in it any more.
void Arenas::Free(const RankConnection& connection, uint64_t id) {
  GenerationRecord* record = context_.generations.Find(connection.generation);
  if (record == nullptr) return;
  const auto it = record->arenas.find(id);
  if (it == record->arenas.end()) return;
  it->second.users.erase(&connection);
  if (it->second.users.empty()) record->arenas.erase(it);
}

void Arenas::FreeAllOf(const RankConnection& connection) {
  GenerationRecord* record = context_.generations.Find(connection.generation);
  if (record == nullptr) return;
  for (auto it = record->arenas.begin(); it != record->arenas.end();) {
    const bool last = it->second.users.erase(&connection) > 0 && it->second.users.empty();
    it = last ? record->arenas.erase(it) : std::next(it);
  }
}

// Pages that a keeper touches first are charged to the keeper, so a rank's memory limit stays the rank's own.
void Arenas::Fault() {
  bytes_to_fault_ = 0;
  bool worked = false;
  for (auto& [generation, record] : context_.generations) {
    for (auto& [id, arena] : record.arenas) {
      if (arena.faulted >= arena.bytes) continue;
      if (worked) {
        bytes_to_fault_ += arena.bytes - arena.faulted;
        continue;
      }
      worked = true;
      const uint64_t step = std::min(kFaultStep, arena.bytes - arena.faulted);
      const bool ok = fallocate(arena.memfd.get(), FALLOC_FL_KEEP_SIZE, static_cast<off_t>(arena.faulted),
                                static_cast<off_t>(step)) == 0;
      arena.faulted = ok ? arena.faulted + step : arena.bytes;  // no memory: leave the rest to the ranks
      bytes_to_fault_ += arena.bytes - arena.faulted;
    }
  }
}

}  // namespace gtrain::keeper
