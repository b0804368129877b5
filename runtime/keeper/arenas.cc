#include "runtime/keeper/arenas.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr uint64_t kFaultStep = 8u << 20;
constexpr size_t kUsedMax = 4;                 // arenas that wait for another user
constexpr uint64_t kUsedBytesMax = 256 << 20;  // of all of them
constexpr uint64_t kZerosMax = 16 << 20;       // that are written in a turn
// One on this machine for each communicator of its ranks that is not closed. More than 2,048 are the pairs of
// as many ranks as an agent starts.
constexpr uint64_t kArenasMax = 4096;

// Each is a descriptor: the most of those are for ranks, their pipes and connections.
uint64_t MostArenas() {
  rlimit files = {};
  return getrlimit(RLIMIT_NOFILE, &files) == 0 ? std::min<uint64_t>(kArenasMax, files.rlim_cur / 4)
                                               : kArenasMax;
}

bool WriteZeros(int fd, uint64_t bytes) {
  static constexpr char kZeros[64 << 10] = {};
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t n =
        pwrite(fd, kZeros, std::min<uint64_t>(sizeof(kZeros), bytes - at), static_cast<off_t>(at));
    if (n <= 0) return false;
    at += static_cast<uint64_t>(n);
  }
  return true;
}

}  // namespace

Arenas::Arenas(Context& context) : context_(context), arenas_max_(MostArenas()) {}

// The one that is the nearest in size, which becomes what is asked for.
bool Arenas::TakeUsed(const RankUsedArenaRequest& request, Arena* arena) {
  const auto off = [&](const Arena& one) {
    return std::max(one.bytes, request.bytes) - std::min(one.bytes, request.bytes);
  };
  const auto it = std::min_element(used_.begin(), used_.end(),
                                   [&](const Arena& a, const Arena& b) { return off(a) < off(b); });
  if (it == used_.end() || request.zeros >= request.bytes || request.zeros > kZerosMax) return false;
  *arena = std::move(*it);
  used_.erase(it);
  const int fd = arena->memfd.get();
  if (arena->bytes != request.bytes && ftruncate(fd, static_cast<off_t>(request.bytes)) != 0) return false;
  arena->bytes = request.bytes;
  arena->faulted = std::min(arena->faulted, request.bytes);
  return WriteZeros(fd, request.zeros);
}

// nullptr: *why says why not.
Arenas::Arena* Arenas::Make(const GenerationRecord& record, const RankUsedArenaRequest& request,
                            std::string* why) {
  const uint64_t generation = record.begin.generation, most = record.begin.shm_limit;
  uint64_t total = request.bytes;
  for (auto it = arenas_.lower_bound({generation, 0}); it != arenas_.end() && it->first.first == generation;
       ++it)
    total += it->second.bytes;
  if (request.bytes == 0 || request.bytes > most || total > most || request.zeros > request.bytes) {
    *why = " of " + std::to_string(request.bytes) + " bytes does not fit: this job may use " +
           std::to_string(most) + " bytes a node; raise resources.shm in the job file";
    return nullptr;
  }
  if (arenas_.size() >= arenas_max_) {
    *why = " is one too many: the ranks of a job may have " + std::to_string(arenas_max_) +
           " on a machine, one for each communicator; close those that are not needed any more";
    return nullptr;
  }
  Arena arena;
  if (!TakeUsed(request, &arena)) {
    arena = Arena{UniqueFd(memfd_create("gtrain-arena", MFD_CLOEXEC)), request.bytes};
    if (!arena.memfd.valid() || ftruncate(arena.memfd.get(), static_cast<off_t>(request.bytes)) != 0) {
      *why = std::string(": ") + strerror(errno);
      return nullptr;
    }
  }
  arena.again = request.zeros < request.bytes;
  bytes_max_ = most;
  LimitUsed(most - total);
  bytes_to_fault_ += request.bytes - arena.faulted;
  return &arenas_.emplace(Number{generation, request.id}, std::move(arena)).first->second;
}

void Arenas::Ask(RankConnection& connection, const RankUsedArenaRequest& request) {
  GenerationRecord* record = context_.generations.Find(connection.generation);
  if (record == nullptr || record->phase >= Phase::kWriting) return;
  auto refuse = [&](const std::string& why) {
    connection.Send(kKeeperRefused, "arena " + std::to_string(request.id) + why);
  };
  std::string why;
  const auto it = arenas_.find({connection.generation, request.id});
  Arena* arena = it == arenas_.end() ? Make(*record, request, &why) : &it->second;
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
  const RankArenaRequest answer{request.id, request.bytes};
  connection.Send(kKeeperArena, std::string(reinterpret_cast<const char*>(&answer), sizeof(answer)), number,
                  std::move(passed));
}

void Arenas::LimitUsed(uint64_t bytes_max) {
  size_t count = 0;
  uint64_t all = 0;
  auto last = used_.begin();
  for (; last != used_.end() && count < kUsedMax && all + last->bytes <= bytes_max; ++last, ++count)
    all += last->bytes;
  used_.erase(last, used_.end());
}

// Nobody has it mapped. Returns the one behind it.
std::map<Arenas::Number, Arenas::Arena>::iterator Arenas::Drop(std::map<Number, Arena>::iterator arena) {
  if (arena->second.again) {
    used_.push_front(std::move(arena->second));
    LimitUsed(std::min(kUsedBytesMax, bytes_max_));
  }
  return arenas_.erase(arena);
}

// The memory goes with the last user: ranks map an arena before they use it, so who has not asked yet meets
// nobody in it any more.
void Arenas::Free(const RankConnection& connection, const RankArenaOf& arena) {
  const auto it = arenas_.find({arena.generation, arena.id});
  if (it == arenas_.end() || it->second.users.erase(&connection) == 0) return;
  if (it->second.users.empty()) Drop(it);
}

// A process that lives may write to what it has mapped, whatever became of its connection.
void Arenas::FreeAllOf(const RankConnection& connection) {
  for (auto it = arenas_.begin(); it != arenas_.end();) {
    if (it->second.users.erase(&connection) == 0) {
      ++it;
      continue;
    }
    it->second.again = it->second.again && !LivesStill(connection.peer);
    it = it->second.users.empty() ? Drop(it) : std::next(it);
  }
}

void Arenas::EndGeneration(uint64_t generation) {
  for (auto it = arenas_.lower_bound({generation, 0}); it != arenas_.end() && it->first.first == generation;)
    it = it->second.again ? std::next(it) : arenas_.erase(it);
}

// Pages that a keeper touches first are charged to the keeper, so a rank's memory limit stays the rank's own.
void Arenas::Fault() {
  bytes_to_fault_ = 0;
  bool worked = false;
  for (auto& [number, arena] : arenas_) {
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

}  // namespace gtrain::keeper
