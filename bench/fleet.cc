#include "bench/fleet.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/head_process.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/packed.h"

namespace gtrain::bench {
namespace {

constexpr absl::Duration kBeatsEvery = absl::Seconds(1), kFlushEvery = absl::Milliseconds(500);
constexpr int kOwnWordEvery = 20;  // beats, as runtime/core/agent/head_talk.cc has it
constexpr absl::Duration kSweepEvery = absl::Milliseconds(200);
constexpr size_t kBlobBytes = 200;  // of a rank in the entry barrier: two addresses and a key

core::Inventory SmallMachine() {
  core::Inventory inventory;
  inventory.cpus = inventory.cores = 10;
  inventory.numa_nodes = 1;
  inventory.memory_bytes = uint64_t{16} << 30;
  return inventory;
}

}  // namespace

Fleet::Fleet(FleetPlan plan) : plan_(std::move(plan)) {}
Fleet::~Fleet() = default;

Fleet::Connection& Fleet::ConnectionOf(size_t agent) { return connections_[connection_of_[agent]]; }

absl::Status Fleet::Connect() {
  const size_t each = static_cast<size_t>(plan_.children) + 1;
  const size_t count = (plan_.keys.size() + each - 1) / each;
  GT_RETURN_IF_ERROR(AllowFilesOf(count, "connections"));
  context_ = net::MakeClientContext(static_cast<int>(count) + 1);
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  began_ = BenchClock().Now();
  agents_.resize(plan_.keys.size());
  connection_of_.resize(plan_.keys.size());
  for (size_t i = 0; i < agents_.size(); ++i) {
    agents_[i].id = NodeId(net::KeyId(plan_.keys[i].public_key));
    agents_[i].number = plan_.first + static_cast<int>(i);
    connection_of_[i] = static_cast<uint32_t>(i / each);
  }
  connections_.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const size_t agent = i * each;
    Connection& connection = connections_.emplace_back();
    connection.agent = agent;
    connection.first_child = agent + 1;
    connection.children = std::min(each, agents_.size() - agent) - 1;
    net::ClientOptions options;
    options.endpoint = plan_.endpoint;
    options.server_public_key = plan_.head_public_key;
    options.context = context_;
    options.keys = plan_.keys[agent];
    GT_ASSIGN_OR_RETURN(connection.client, net::ZmqClient::Connect(options));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = static_cast<uint32_t>(i);
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.client->PollFd(), &event);
    Turn(absl::ZeroDuration());
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- what agents say

core::AgentHello Fleet::HelloOf(Agent& agent) const {
  core::AgentHello hello;
  hello.cluster = plan_.cluster;
  hello.boot_id = absl::StrCat("boot-", agent.number);
  hello.incarnation = Incarnation(absl::StrCat(hello.boot_id, "-1"));
  hello.hostname = absl::StrCat("node-", agent.number);
  hello.address = "127.0.0.1";
  hello.version = "bench";
  hello.inventory = SmallMachine();
  hello.free_ports = {20'001, 20'002};
  hello.order = ++agent.order;
  hello.keeps_seals = false;
  for (const auto& [job, rank] : agent.ranks) {
    core::HeldGeneration held{.job = job, .generation = rank.first};
    held.live.push_back({.job = job,
                         .generation = rank.first,
                         .rank = rank.second,
                         .pid = 1,
                         .state = core::RankState::kJoined});
    hello.held.push_back(std::move(held));
  }
  return hello;
}

void Fleet::Say(Connection& connection, Agent& agent, const core::Message& message, bool waits) {
  if (agent.silent) return;
  const std::string bytes = wire::Encode(message);
  if (&agent == &agents_[connection.agent]) {
    counters_.sent += static_cast<int64_t>(bytes.size());
    (void)connection.client->Send(bytes);
  } else if (agent.session) {
    connection.out.parts.push_back({agent.id, core::RelayStage::kSealed, agent.session->Seal(bytes)});
    connection.hurry = connection.hurry || !waits;
  }
}

void Fleet::Open(Connection& connection, Agent& agent) {
  if (agent.silent) return;
  if (std::exchange(agent.welcomed, false)) --counters_.welcomed;
  agent.session.reset();
  agent.half = net::NewSessionHalf();
  connection.out.parts.push_back({agent.id, core::RelayStage::kOpen, agent.half});
  connection.hurry = true;
}

void Fleet::Flush(Connection& connection) {
  connection.hurry = false;
  if (!connection.up || (connection.out.parts.empty() && connection.out.heard.empty())) return;
  const std::string bytes = wire::Encode(std::exchange(connection.out, {}));
  counters_.sent += static_cast<int64_t>(bytes.size());
  (void)connection.client->Send(bytes);
}

void Fleet::Beat(size_t index, int64_t round) {
  Agent& agent = agents_[index];
  Connection& connection = ConnectionOf(index);
  if (!agent.welcomed || agent.silent) return;
  if (index == connection.agent)
    return Say(connection, agent, core::AgentHeartbeat{static_cast<uint64_t>(round) + 1, {}, {}});
  connection.out.heard.push_back(agent.session_number);
  if ((round + static_cast<int64_t>(index)) % kOwnWordEvery == 0)
    Say(connection, agent, core::AgentHeartbeat{static_cast<uint64_t>(round) + 1, {}, {}}, true);
}

// Each agent has its own moment of the second, and each relay its own of the half second.
void Fleet::Beats(Instant now) {
  const double passed = absl::ToDoubleSeconds(now - began_);
  const auto count = static_cast<int64_t>(agents_.size());
  const auto due =
      static_cast<int64_t>(passed / absl::ToDoubleSeconds(kBeatsEvery) * static_cast<double>(count));
  for (; beats_done_ < due; ++beats_done_)
    Beat(static_cast<size_t>(beats_done_ % count), beats_done_ / count);
  const auto relays = static_cast<int64_t>(connections_.size());
  if (relays == 0 || plan_.children == 0) return;
  const auto flushes =
      static_cast<int64_t>(passed / absl::ToDoubleSeconds(kFlushEvery) * static_cast<double>(relays));
  for (; flushes_done_ < flushes; ++flushes_done_)
    Flush(connections_[static_cast<size_t>(flushes_done_ % relays)]);
}

// ---------------------------------------------------------------- what the head says

void Fleet::OnGrant(Connection& connection, Agent& agent, const Grant& grant) {
  const auto place = grant.ranks.find(agent.id);
  if (place == grant.ranks.end()) return;
  agent.ranks[grant.job] = {grant.generation, place->second};
  ++counters_.started;
  ++counters_.starts[{grant.job, grant.generation}];
  core::RanksStarted started{grant.job, grant.generation, {}};
  started.ranks.push_back({.job = grant.job,
                           .generation = grant.generation,
                           .rank = place->second,
                           .pid = 1,
                           .state = core::RankState::kRunning});
  Say(connection, agent, started);
  Say(connection, agent,
      core::ExchangePart{grant.job, grant.generation, 0, {{place->second, std::string(kBlobBytes, 'b')}}});
  counters_.last_part = BenchClock().Now();
}

void Fleet::OnMessage(Connection& connection, Agent& agent, const core::Message& message) {
  if (std::holds_alternative<core::AgentWelcome>(message)) {
    if (!std::exchange(agent.welcomed, true)) ++counters_.welcomed;
  } else if (std::holds_alternative<core::StartGeneration>(message)) {
    const auto& start = std::get<core::StartGeneration>(message);
    if (!grant_ || grant_->job != start.grant.job || grant_->generation != start.grant.generation) {
      grant_.emplace(Grant{start.grant.job, start.grant.generation, {}});
      for (const core::RankPlace& place : start.grant.ranks) grant_->ranks[place.node] = place.rank;
    }
    OnGrant(connection, agent, *grant_);
  } else if (std::holds_alternative<core::ExchangeTable>(message)) {
    ++counters_.tables;
  } else if (const auto* revoke = std::get_if<core::Revoke>(&message)) {
    if (const auto rank = agent.ranks.find(revoke->job); rank != agent.ranks.end()) {
      core::RankExit exit{.job = revoke->job, .generation = rank->second.first, .rank = rank->second.second};
      exit.cause = core::ExitCause::kStopped;
      exit.signal = 15;
      agent.ranks.erase(rank);
      Say(connection, agent, core::RankExited{exit});
    }
    Say(connection, agent, core::GenerationGone{revoke->job, revoke->generation, true, "", {}, {}});
  }
}

// The body is read once: all who get it know the same key.
void Fleet::OnShared(Connection& connection, Agent& agent, const core::RelayedDown& down, uint32_t body,
                     const std::string& key) {
  if (key != shared_key_) {
    const absl::StatusOr<std::string> opened =
        body < down.bodies.size() ? net::OpenShared(down.bodies[body], key) : absl::DataLossError("no body");
    const absl::StatusOr<std::string> bytes = opened.ok() ? wire::Unpack(*opened) : opened;
    absl::StatusOr<core::Message> message =
        bytes.ok() ? wire::Decode(*bytes, wire::Sender::kHead) : bytes.status();
    if (!message.ok()) return Open(connection, agent);
    shared_key_ = key;
    shared_ = *std::move(message);
  }
  OnMessage(connection, agent, *shared_);
}

void Fleet::OnPart(Connection& connection, Agent& agent, const core::RelayedDown& down,
                   const core::RelayPart& part) {
  if (part.stage == core::RelayStage::kAnswer && part.bytes.size() > net::kSessionHalfBytes &&
      !agent.half.empty()) {
    const auto index = static_cast<size_t>(&agent - agents_.data());
    if (agent.secret.empty())
      agent.secret = net::PairSecret(plan_.keys[index], plan_.head_public_key).value_or("");
    const absl::string_view answer = part.bytes;
    agent.session.emplace(net::SealedSession::End::kNode, agent.secret, agent.half,
                          answer.substr(0, net::kSessionHalfBytes));
    (void)agent.session->Open(answer.substr(net::kSessionHalfBytes));
    agent.session_number = part.number;
    agent.half.clear();
    return Say(connection, agent, HelloOf(agent));
  }
  if (part.stage == core::RelayStage::kOver) return Open(connection, agent);
  if (!agent.session) return;
  const absl::StatusOr<std::string> opened = agent.session->Open(part.bytes);
  if (!opened.ok()) return Open(connection, agent);
  if (part.stage == core::RelayStage::kShared) return OnShared(connection, agent, down, part.body, *opened);
  const absl::StatusOr<core::Message> message = wire::Decode(*opened, wire::Sender::kHead);
  if (message.ok()) OnMessage(connection, agent, *message);
}

void Fleet::OnDown(Connection& connection, const core::RelayedDown& down) {
  for (const core::RelayPart& part : down.parts) {
    // The children of a relay are few, and the head names them in the order in which they spoke.
    for (size_t i = 0; i < connection.children; ++i) {
      Agent& agent = agents_[connection.first_child + i];
      if (agent.id != part.node) continue;
      OnPart(connection, agent, down, part);
      break;
    }
  }
}

void Fleet::OnBytes(Connection& connection, const std::string& bytes) {
  counters_.received += static_cast<int64_t>(bytes.size());
  const absl::StatusOr<core::Message> message = wire::Decode(bytes, wire::Sender::kHead);
  if (!message.ok()) return;
  if (const auto* down = std::get_if<core::RelayedDown>(&*message)) return OnDown(connection, *down);
  OnMessage(connection, agents_[connection.agent], *message);
}

void Fleet::OnConnection(Connection& connection) {
  Agent& agent = agents_[connection.agent];
  if (const bool up = connection.client->Connected(); up != connection.up) {
    connection.up = up;
    connection.out = {};
    if (up) Say(connection, agent, HelloOf(agent));
    for (size_t i = 0; up && i < connection.children; ++i)
      Open(connection, agents_[connection.first_child + i]);
    for (size_t i = 0; !up && i <= connection.children; ++i) {
      Agent& lost = agents_[connection.agent + i];
      lost.session.reset();
      if (std::exchange(lost.welcomed, false)) --counters_.welcomed;
    }
  }
  while (const std::optional<std::string> bytes = connection.client->Receive()) OnBytes(connection, *bytes);
  if (connection.hurry) Flush(connection);
}

void Fleet::Turn(absl::Duration wait) {
  epoll_event events[512];
  const int ready = epoll_wait(epoll_.get(), events, 512, static_cast<int>(absl::ToInt64Milliseconds(wait)));
  for (int i = 0; i < ready; ++i) OnConnection(connections_[events[i].data.u32]);
  const Instant now = BenchClock().Now();
  Beats(now);
  if (now < next_sweep_) return;
  next_sweep_ = now + kSweepEvery;
  // Like the real agent's loop, looks at each connection now and then whatever the descriptor says.
  for (Connection& connection : connections_) OnConnection(connection);
}

// ---------------------------------------------------------------- what happens to them

absl::Status Fleet::LoseRankOf(int number) {
  Agent& agent = agents_[static_cast<size_t>(number)];
  const auto rank = agent.ranks.find(watched_);
  if (rank == agent.ranks.end())
    return absl::NotFoundError(absl::StrCat("node-", number, " has no rank of it"));
  core::RankExit exit{.job = watched_, .generation = rank->second.first, .rank = rank->second.second};
  exit.cause = core::ExitCause::kLost;
  exit.message = "the keeper died";
  agent.ranks.erase(rank);
  Connection& connection = ConnectionOf(static_cast<size_t>(number));
  Say(connection, agent, core::RankExited{exit});
  Flush(connection);
  return absl::OkStatus();
}

std::vector<int> Fleet::AgentsOfWatched() const {
  std::vector<int> all;
  for (size_t i = 0; i < agents_.size(); ++i) {
    if (agents_[i].ranks.contains(watched_)) all.push_back(static_cast<int>(i));
  }
  return all;
}

}  // namespace gtrain::bench
