// The rank socket (runtime/keeper/rank_protocol.h). A connection may do nothing before its hello proves the
// rank's token. Relayed bodies are opaque; only "progress" is recognised, because the newest replaces older
// ones.
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/keeper.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {
constexpr size_t kConnectionsMax =
    kRanksMax + 256;  // some may be about to close, or have not said whose they are
constexpr size_t kRankOutMax = 64u << 20;
constexpr int64_t kHelloMs = 10000;
constexpr int kLastReadsMax = 1024;  // of at most 64 KiB
constexpr uint64_t kFaultStep = 8u << 20;
constexpr size_t kReadAhead = sizeof(RankFrame) + kRankFrameBytesMax;
constexpr size_t kHelloBytesMax = 4 << 10;  // of any version's hello, and of what is kept before it came
}  // namespace

void Keeper::AcceptRanks() {
  while (true) {
    UniqueFd fd(accept4(rank_listen_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) return;
    ucred peer;
    socklen_t size = sizeof(peer);
    const bool same =
        getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
    if (!same || connections_.size() >= kConnectionsMax) continue;
    auto connection = std::make_unique<RankConnection>(std::move(fd), &connection_set_);
    if (!connection_set_.Add(connection->fd.get(), connection.get())) continue;
    connection->opened_ms = now_;
    ReadProcess(peer.pid, &connection->peer);  // 0 where it cannot be seen
    connections_.push_back(std::move(connection));
  }
}

void Keeper::ReadRank(RankConnection& connection) {
  char buffer[64 << 10];
  const size_t ahead = connection.rank >= 0 ? kReadAhead : sizeof(RankFrame) + kHelloBytesMax;
  while (!connection.broken && connection.in.size() < ahead) {
    ssize_t n = read(connection.fd.get(), buffer, std::min(sizeof(buffer), ahead - connection.in.size()));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      connection.broken = true;
      break;
    }
    connection.in.append(buffer, static_cast<size_t>(n));
    if (static_cast<size_t>(n) < sizeof(buffer)) break;  // more is heard of at the next turn
  }
  size_t used = 0;
  while (connection.in.size() - used >= sizeof(RankFrame)) {
    RankFrame frame;
    memcpy(&frame, connection.in.data() + used, sizeof(frame));
    // Nobody is known before its hello, which is short: who says more is not kept.
    if (frame.bytes > (connection.rank >= 0 ? size_t{kRankFrameBytesMax} : kHelloBytesMax)) {
      connection.broken = true;
      break;
    }
    if (connection.in.size() - used - sizeof(frame) < frame.bytes) break;
    RankFrameIn(connection, frame.kind, connection.in.data() + used + sizeof(frame), frame.bytes);
    used += sizeof(frame) + frame.bytes;
  }
  connection.in.erase(0, used);
}

// What a dead rank sent is all in the socket already. The agent hears it before the exit, whose meaning it
// may change (a storage fault).
void Keeper::HearLastWords(const RankProcess& rank) {
  RankConnection* connection = ConnectionOf(rank.spec.generation, rank.spec.rank);
  if (connection == nullptr) return;
  pollfd unread{connection->fd.get(), POLLIN, 0};
  // A forked child may hold the socket and go on writing.
  for (int i = 0; i < kLastReadsMax && !connection->broken && poll(&unread, 1, 0) > 0; ++i)
    ReadRank(*connection);
}

void Keeper::RankFrameIn(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes) {
  const bool known = connection.rank >= 0;
  if (kind == kRankHello && bytes == sizeof(RankHello) && !known) {
    RankHello hello;
    memcpy(&hello, body, sizeof(hello));
    RankHelloIn(connection, hello);
  } else if (kind == kRankArena && bytes == sizeof(RankArenaRequest) && known) {
    RankArenaRequest request;
    memcpy(&request, body, sizeof(request));
    ArenaIn(connection, request);
  } else if (kind == kRankFreeArena && bytes == sizeof(uint64_t) && known) {
    uint64_t id = 0;
    memcpy(&id, body, sizeof(id));
    FreeArenaIn(connection, id);
  } else if (kind == kRankWriter && bytes == sizeof(RankArenaRequest) && known) {
    RankArenaRequest request;
    memcpy(&request, body, sizeof(request));
    WriterIn(connection, request);
  } else if (kind == kRankToAgent && known) {
    RelayIn(connection, std::string(body, bytes));
  } else {
    connection.broken = true;
  }
}

// Whoever inherits the environment of a rank (what it starts, `gtrain exec`) has its token, too. It takes
// nothing away from the process that has the rank as long as that lives and has not closed its connection,
// which a child may hold for longer. A program comes back as the same process, also after an exec.
bool Keeper::IsOfAnother(const RankConnection& old, const RankConnection& now) {
  if (old.peer.pid <= 0 || now.peer.pid <= 0 || old.peer.pid == now.peer.pid) return false;
  pollfd end{old.fd.get(), POLLRDHUP, 0};
  if (poll(&end, 1, 0) > 0) return false;
  ProcessEntry process;
  return ReadProcess(old.peer.pid, &process) && !process.zombie && process.start_time == old.peer.start_time;
}

void Keeper::RankHelloIn(RankConnection& connection, const RankHello& hello) {
  auto refuse = [&](const std::string& why) {
    ToRank(connection, kKeeperRefused, why);
    WriteRank(connection);
    connection.broken = true;
  };
  if (hello.protocol != GTRAIN_RANK_PROTOCOL) {
    return refuse("this keeper speaks rank protocol " + std::to_string(GTRAIN_RANK_PROTOCOL) +
                  ", the rank's libgtrain " + std::to_string(hello.protocol) +
                  ": use the same gtrain version on both sides");
  }
  const int number = static_cast<int>(hello.rank);
  RankProcess* rank = FindRank(hello.generation, number);
  const bool proved = rank != nullptr && rank->spec.token.size() == sizeof(hello.token) &&
                      memcmp(rank->spec.token.data(), hello.token, sizeof(hello.token)) == 0;
  if (!proved || rank->exit) return refuse("unknown rank, generation or token");
  if (RankConnection* old = ConnectionOf(hello.generation, number)) {
    if (IsOfAnother(*old, connection)) {
      return refuse("rank " + std::to_string(number) + " of job " + options_.job + " is process " +
                    std::to_string(old->peer.pid) + " already, which lives, and this is process " +
                    std::to_string(connection.peer.pid) +
                    ": only one process of a rank can have its session. Let that one make it; a helper "
                    "process needs none, or runs one of its own, as by hand: env -u GTRAIN_GENERATION -u "
                    "WORLD_SIZE PROGRAM");
    }
    old->broken = true;
  }
  connection.generation = hello.generation;
  connection.rank = number;
  connection_of_[{hello.generation, number}] = &connection;
  rank->sdk = true;
  const uint32_t abilities = kKeeperHasWriters | kKeeperFreesArenas;
  ToRank(connection, kKeeperWelcome,
         std::string(reinterpret_cast<const char*>(&abilities), sizeof(abilities)));
  const GenerationRecord* record = FindGeneration(hello.generation);
  if (record->phase == Phase::kLive || !record->ordered) return;
  ToRank(connection, record->mode == End::kReform ? kKeeperRevoked : kKeeperStop, record->reason);
}

void Keeper::ArenaIn(RankConnection& connection, const RankArenaRequest& request) {
  GenerationRecord* record = FindGeneration(connection.generation);
  if (record == nullptr || record->phase >= Phase::kWriting) return;
  auto refuse = [&](const std::string& why) { ToRank(connection, kKeeperRefused, why); };
  const std::string name = "arena " + std::to_string(request.id);
  auto it = record->arenas.find(request.id);
  if (it == record->arenas.end()) {
    uint64_t total = request.bytes;
    for (const auto& [id, arena] : record->arenas) total += arena.bytes;
    if (request.bytes == 0 || request.bytes > record->begin.shm_limit || total > record->begin.shm_limit) {
      return refuse(name + " of " + std::to_string(request.bytes) + " bytes does not fit: this job may use " +
                    std::to_string(record->begin.shm_limit) +
                    " bytes a node; raise resources.shm in the job file");
    }
    Arena arena;
    arena.memfd.reset(memfd_create("gtrain-arena", MFD_CLOEXEC));
    if (!arena.memfd.valid() || ftruncate(arena.memfd.get(), static_cast<off_t>(request.bytes)) != 0) {
      return refuse(name + ": " + strerror(errno));
    }
    arena.bytes = request.bytes;
    arena_bytes_faulting_ += request.bytes;
    it = record->arenas.emplace(request.id, std::move(arena)).first;
  }
  if (it->second.bytes != request.bytes) {
    return refuse(name + ": this rank asks for " + std::to_string(request.bytes) + " bytes, another for " +
                  std::to_string(it->second.bytes));
  }
  it->second.users.insert(&connection);
  // A descriptor of its own: the arena may be free before the rank reads.
  UniqueFd passed(fcntl(it->second.memfd.get(), F_DUPFD_CLOEXEC, 0));
  if (!passed.valid()) return refuse(name + ": " + strerror(errno));
  const int number = passed.get();
  ToRank(connection, kKeeperArena, std::string(reinterpret_cast<const char*>(&request), sizeof(request)),
         number, std::move(passed));
}

// The memory goes with the last user: ranks map an arena before they use it, so who has not asked yet meets
// nobody in it any more.
void Keeper::FreeArenaIn(RankConnection& connection, uint64_t id) {
  GenerationRecord* record = FindGeneration(connection.generation);
  if (record == nullptr) return;
  const auto it = record->arenas.find(id);
  if (it == record->arenas.end()) return;
  it->second.users.erase(&connection);
  if (it->second.users.empty()) record->arenas.erase(it);
}

void Keeper::FreeArenasOf(const RankConnection& connection) {
  GenerationRecord* record = FindGeneration(connection.generation);
  if (record == nullptr) return;
  for (auto it = record->arenas.begin(); it != record->arenas.end();) {
    const bool last = it->second.users.erase(&connection) > 0 && it->second.users.empty();
    it = last ? record->arenas.erase(it) : std::next(it);
  }
}

// Pages a keeper touches first are charged to the keeper, so a rank's memory limit stays the rank's own. Done
// in small steps between turns.
void Keeper::FaultArenas() {
  arena_bytes_faulting_ = 0;
  bool worked = false;
  for (auto& [generation, record] : generations_) {
    for (auto& [id, arena] : record.arenas) {
      if (arena.faulted >= arena.bytes) continue;
      if (worked) {
        arena_bytes_faulting_ += arena.bytes - arena.faulted;
        continue;
      }
      worked = true;
      const uint64_t step = std::min(kFaultStep, arena.bytes - arena.faulted);
      const bool ok = fallocate(arena.memfd.get(), FALLOC_FL_KEEP_SIZE, static_cast<off_t>(arena.faulted),
                                static_cast<off_t>(step)) == 0;
      arena.faulted = ok ? arena.faulted + step : arena.bytes;  // no memory: leave the rest to the ranks
      arena_bytes_faulting_ += arena.bytes - arena.faulted;
    }
  }
}

void Keeper::RelayIn(RankConnection& connection, std::string json) {
  RankProcess* rank = FindRank(connection.generation, connection.rank);
  if (rank == nullptr) return;
  const bool progress = json.find("\"type\":\"progress\"") != std::string::npos;
  if (progress && !rank->relays.empty()) {
    for (auto it = rank->relays.begin(); it != rank->relays.end(); ++it) {
      if (it->json.find("\"type\":\"progress\"") == std::string::npos) continue;
      if (attached_) break;  // it is on its way: keep the order, the acknowledgement comes
      rank->relay_bytes -= it->json.size();
      rank->relays.erase(it);
      break;
    }
  }
  // The bound holds for a pile of small messages; one large exchange blob alone is always kept.
  if (!rank->relays.empty() && rank->relay_bytes + json.size() > kRelayBytesMax + kRankFrameBytesMax) {
    connection.broken = true;
    return;
  }
  RelayUp relay{connection.generation, connection.rank, ++rank->relay_id, std::move(json)};
  Tell(relay);
  rank->relay_bytes += relay.json.size();
  rank->relays.push_back(std::move(relay));
}

void Keeper::ToRank(RankConnection& connection, uint16_t kind, const std::string& body, int pass_fd,
                    UniqueFd keep) {
  if (connection.broken) return;
  const RankFrame frame{static_cast<uint32_t>(body.size()), kind, 0};
  RankConnection::Chunk chunk;
  chunk.bytes.assign(reinterpret_cast<const char*>(&frame), sizeof(frame));
  chunk.bytes += body;
  chunk.pass_fd = pass_fd;
  chunk.keep = std::move(keep);
  connection.out_bytes += chunk.bytes.size();
  connection.out.push_back(std::move(chunk));
  if (connection.out_bytes > kRankOutMax) connection.broken = true;  // it never reads
}

void Keeper::WriteRank(RankConnection& connection) {
  WriteSome(connection);
  const bool waits = !connection.broken && !connection.out.empty();
  if (waits == connection.waits_to_write) return;
  connection.waits_to_write = waits;
  connection_set_.AlsoWritable(connection.fd.get(), &connection, waits);
}

void Keeper::WriteSome(RankConnection& connection) {
  while (!connection.broken && !connection.out.empty()) {
    RankConnection::Chunk& chunk = connection.out.front();
    iovec part = {chunk.bytes.data(), chunk.bytes.size()};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (chunk.pass_fd >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      memcpy(CMSG_DATA(header), &chunk.pass_fd, sizeof(int));
    }
    ssize_t n = sendmsg(connection.fd.get(), &message, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      connection.broken = true;
      tick_wanted_ = true;  // its peer may live, and then no event comes of it
      return;
    }
    chunk.pass_fd = -1;
    connection.out_bytes -= static_cast<size_t>(n);
    chunk.bytes.erase(0, static_cast<size_t>(n));
    if (chunk.bytes.empty()) connection.out.pop_front();
  }
}

RankConnection* Keeper::ConnectionOf(uint64_t generation, int rank) {
  const auto it = connection_of_.find({generation, rank});
  return it == connection_of_.end() || it->second->broken ? nullptr : it->second;
}

void Keeper::ToRanks(GenerationRecord& record, uint16_t kind, const std::string& body) {
  for (auto& connection : connections_) {
    if (connection->rank >= 0 && connection->generation == record.begin.generation)
      ToRank(*connection, kind, body);
  }
}

void Keeper::SweepConnections() {
  connections_.erase(
      std::remove_if(connections_.begin(), connections_.end(),
                     [&](const auto& connection) {
                       const bool silent = connection->rank < 0 && now_ - connection->opened_ms > kHelloMs;
                       if (!connection->broken) return silent;
                       FreeArenasOf(*connection);
                       const auto it = connection_of_.find({connection->generation, connection->rank});
                       if (it != connection_of_.end() && it->second == connection.get())
                         connection_of_.erase(it);
                       return true;
                     }),
      connections_.end());
}

}  // namespace gtrain::keeper
