#include "runtime/keeper/rank_socket.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/kept_ranks.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr int kLastReadsMax = 1024;  // of at most 64 KiB
constexpr size_t kReadAhead = sizeof(RankFrame) + kRankFrameBytesMax;
constexpr size_t kHelloBytesMax = 4 << 10;  // of any version's hello, and of what is kept before it came

// A process that inherits the environment of a rank (a child of it, `gtrain exec`) has its token, too. It
// takes nothing away from the process that has the rank as long as that lives and has not closed its
// connection, which a child may hold for longer. A program comes back as the same process, also after an
// exec.
bool IsOfAnother(const RankConnection& old, const RankConnection& now) {
  if (old.peer.pid <= 0 || now.peer.pid <= 0 || old.peer.pid == now.peer.pid) return false;
  pollfd end{old.fd.get(), POLLRDHUP, 0};
  if (poll(&end, 1, 0) > 0) return false;
  ProcessEntry process;
  return ReadProcess(old.peer.pid, &process) && !process.zombie && process.start_time == old.peer.start_time;
}

}  // namespace

void RankSocket::ReadReady() {
  for (const auto& connection : connections_.all()) {
    if (std::exchange(connection->ready, false)) Read(*connection);
  }
}

void RankSocket::ReadBytes(RankConnection& connection) {
  char buffer[64 << 10];
  const size_t ahead = connection.proved() ? kReadAhead : sizeof(RankFrame) + kHelloBytesMax;
  while (!connection.broken && connection.in.size() < ahead) {
    ssize_t n = read(connection.fd.get(), buffer, std::min(sizeof(buffer), ahead - connection.in.size()));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      connection.broken = true;
      return;
    }
    connection.in.append(buffer, static_cast<size_t>(n));
    if (static_cast<size_t>(n) < sizeof(buffer)) return;  // more is heard of at the next turn
  }
}

void RankSocket::Read(RankConnection& connection) {
  ReadBytes(connection);
  size_t used = 0;
  while (connection.in.size() - used >= sizeof(RankFrame)) {
    RankFrame frame;
    memcpy(&frame, connection.in.data() + used, sizeof(frame));
    // Nobody is known before its hello, which is short: who says more is not kept.
    if (frame.bytes > (connection.proved() ? size_t{kRankFrameBytesMax} : kHelloBytesMax)) {
      connection.broken = true;
      break;
    }
    if (connection.in.size() - used - sizeof(frame) < frame.bytes) break;
    OnFrame(connection, frame.kind, connection.in.data() + used + sizeof(frame), frame.bytes);
    used += sizeof(frame) + frame.bytes;
  }
  connection.in.erase(0, used);
}

// All that a dead rank has sent is in the socket already.
void RankSocket::HearLastWords(const RankProcess& rank) {
  RankConnection* connection = connections_.Of(rank.spec.generation, rank.spec.rank);
  if (connection == nullptr) return;
  pollfd unread{connection->fd.get(), POLLIN, 0};
  // A forked child may hold the socket and go on writing.
  for (int i = 0; i < kLastReadsMax && !connection->broken && poll(&unread, 1, 0) > 0; ++i) Read(*connection);
}

void RankSocket::OnFrame(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes) {
  const bool known = connection.proved();
  if (kind == kRankHello && bytes == sizeof(RankHello) && !known) {
    RankHello hello;
    memcpy(&hello, body, sizeof(hello));
    OnHello(connection, hello);
  } else if ((kind == kRankArena || kind == kRankUsedArena || kind == kRankFreeArena) && known) {
    OnArena(connection, kind, body, bytes);
  } else if (kind == kRankWriter && bytes == sizeof(RankArenaRequest) && known) {
    RankArenaRequest request;
    memcpy(&request, body, sizeof(request));
    writers_.Ask(connection, request);
  } else if ((kind == kRankStays || kind == kRankReleased) && known) {
    OnStays(connection, kind, body, bytes);
  } else if (kind == kRankToAgent && known) {
    OnRelay(connection, std::string(body, bytes));
  } else if ((kind == kRankAnswers || kind == kRankAnswer) && known) {
    OnAnswer(connection, kind, body, bytes);
  } else {
    connection.broken = true;
  }
}

void RankSocket::OnArena(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes) {
  if (kind == kRankFreeArena && (bytes == sizeof(uint64_t) || bytes == sizeof(RankArenaOf))) {
    RankArenaOf arena{0, connection.generation};
    memcpy(&arena, body, bytes);
    arenas_.Free(connection, arena);
  } else if (kind == kRankArena && bytes == sizeof(RankArenaRequest)) {
    RankArenaRequest request;
    memcpy(&request, body, sizeof(request));
    arenas_.Ask(connection, {request.id, request.bytes, /*zeros=*/request.bytes});
  } else if (kind == kRankUsedArena && bytes == sizeof(RankUsedArenaRequest)) {
    RankUsedArenaRequest request;
    memcpy(&request, body, sizeof(request));
    arenas_.Ask(connection, request);
  } else {
    connection.broken = true;
  }
}

void RankSocket::OnAnswer(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes) {
  if (kind == kRankAnswers) {
    connection.answers = true;
  } else if (bytes >= sizeof(RankQuestion)) {
    RankQuestion question;
    memcpy(&question, body, sizeof(question));
    asks_.OnAnswer(connection, question.id, std::string(body + sizeof(question), bytes - sizeof(question)));
  } else {
    connection.broken = true;
  }
}

void RankSocket::OnStays(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes) {
  RankProcess* rank = ProcessOf(connection);
  if (rank == nullptr) return;
  if (kind == kRankReleased) rank->asked = false;
  if (kind == kRankStays) {
    rank->stays = true;
    if (!rank->spec.waits) context_.agent.Tell(Ready{connection.generation, connection.rank});
    return;
  }
  if (rank->spec.waits) return OnComesUp(connection, *rank);
  uint64_t generation = 0;
  if (bytes == sizeof(generation)) memcpy(&generation, body, sizeof(generation));
  if (generation == connection.generation) rank->released = rank->stays;
}

// Between two generations nobody is told: the list of those that wait says it (KeptRanks::List).
void RankSocket::OnComesUp(const RankConnection& connection, RankProcess& rank) {
  if (!rank.stays || std::exchange(rank.released, true) || connection.generation == kNoGeneration) return;
  context_.agent.Tell(Ready{connection.generation, connection.rank});
}

RankProcess* RankSocket::ProcessOf(const RankConnection& connection) const {
  return connection.generation == kNoGeneration
             ? kept_->Find(connection.rank)
             : context_.generations.FindRank(connection.generation, connection.rank);
}

// A process that waits comes with the number under which it was started, wherever it waits by then. Finding
// one that has moved costs a look at each rank here, once a process.
RankSocket::Seat RankSocket::SeatOf(const RankHello& hello) const {
  const int number = static_cast<int>(hello.rank);
  if (RankProcess* rank = context_.generations.FindRank(hello.generation, number))
    return {hello.generation, number, rank};
  const Kept born{hello.generation, number};
  for (auto& [generation, record] : context_.generations) {
    for (auto& [other, rank] : record.ranks) {
      if (rank->spec.waits && rank->born == born) return {generation, other, rank.get()};
    }
  }
  const std::optional<int> kept = kept_->NumberOf(born);
  if (kept && kept_->Find(*kept)->spec.waits) return {kNoGeneration, *kept, kept_->Find(*kept)};
  return {};
}

void RankSocket::OnHello(RankConnection& connection, const RankHello& hello) {
  auto refuse = [&](const std::string& why) {
    connection.Send(kKeeperRefused, why);
    connections_.Write(connection);
    connection.broken = true;
  };
  if (hello.protocol != GTRAIN_RANK_PROTOCOL) {
    return refuse("this keeper speaks rank protocol " + std::to_string(GTRAIN_RANK_PROTOCOL) +
                  ", the rank's libgtrain " + std::to_string(hello.protocol) +
                  ": use the same gtrain version on both sides");
  }
  const Seat seat = SeatOf(hello);
  RankProcess* const rank = seat.process;
  const bool waits = rank != nullptr && rank->spec.waits;
  const std::string token = rank == nullptr ? "" : waits ? rank->born_token : rank->spec.token;
  const bool proved =
      token.size() == sizeof(hello.token) && memcmp(token.data(), hello.token, sizeof(hello.token)) == 0;
  if (!proved || rank->exit) return refuse("unknown rank, generation or token");
  if (RankConnection* old = connections_.Of(seat.generation, seat.number)) {
    if (IsOfAnother(*old, connection)) {
      return refuse("rank " + std::to_string(hello.rank) + " of job " + context_.options.job +
                    " is process " + std::to_string(old->peer.pid) +
                    " already, which lives, and this is process " + std::to_string(connection.peer.pid) +
                    ": only one process of a rank can have its session. Let that one make it; a helper "
                    "process needs none, or runs one of its own, as by hand: env -u GTRAIN_GENERATION -u "
                    "WORLD_SIZE PROGRAM");
    }
    old->broken = true;
  }
  connections_.GiveTo(seat.generation, seat.number, connection);
  rank->sdk = true;
  const uint32_t abilities = kKeeperHasWriters | kKeeperFreesArenas | kKeeperKeepsRanks |
                             kKeeperReusesArenas | kKeeperAsksRanks | (waits ? kKeeperYouWait : 0);
  connection.Send(kKeeperWelcome, std::string(reinterpret_cast<const char*>(&abilities), sizeof(abilities)));
  if (waits)
    return connection.Send(
        kKeeperRevoked,
        "this process waits for a place in a later generation: let it join to stay "
        "(gtrain_session_join_to_stay, Python Session(stay=True)), or do without `spares`");
  const GenerationRecord* record = context_.generations.Find(hello.generation);
  if (record->phase == Phase::kLive || !record->ordered) return;
  connection.Send(record->mode == End::kReform ? kKeeperRevoked : kKeeperStop, record->reason);
}

void RankSocket::OnRelay(RankConnection& connection, std::string json) {
  RankProcess* rank = context_.generations.FindRank(connection.generation, connection.rank);
  if (rank == nullptr || rank->spec.waits) return;  // of no generation yet
  const bool progress = json.find("\"type\":\"progress\"") != std::string::npos;
  if (progress && !rank->relays.empty()) {
    for (auto it = rank->relays.begin(); it != rank->relays.end(); ++it) {
      if (it->json.find("\"type\":\"progress\"") == std::string::npos) continue;
      if (context_.agent.attached()) break;  // it is on its way: keep the order, the acknowledgement comes
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
  context_.agent.Tell(relay);
  rank->relay_bytes += relay.json.size();
  rank->relays.push_back(std::move(relay));
}

}  // namespace gtrain::keeper
