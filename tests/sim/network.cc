#include "tests/sim/network.h"

#include <algorithm>

#include "base/check.h"
#include "runtime/core/values/records.h"
#include "runtime/wire/codec.h"

namespace gtrain::sim {
namespace {

constexpr int64_t kGiveUpAfter = 3 * kSec;   // ZMTP heartbeats
constexpr int64_t kHalfOpenMax = 40 * kSec;  // TCP notices in the end

}  // namespace

std::string Describe(const core::Message& message) {
  std::string text(wire::KindName(message));
  std::visit(
      [&](const auto& m) {
        if constexpr (requires { m.epoch; }) absl::StrAppend(&text, " e", m.epoch.value);
        if constexpr (requires {
                        m.job;
                        m.generation;
                      }) {
          absl::StrAppend(&text, " ", m.job.value, " g", m.generation.value);
        }
        if constexpr (requires { m.grant; }) {
          absl::StrAppend(&text, " ", m.grant.job.value, " g", m.grant.generation.value);
        }
        if constexpr (requires { m.exit; }) {
          absl::StrAppend(&text, " ", m.exit.job.value, " g", m.exit.generation.value, " rank ", m.exit.rank,
                          " ", core::Name(m.exit.cause), " ", m.exit.exit_code);
        }
        if constexpr (requires { m.held.begin(); }) {
          absl::StrAppend(&text, " ", m.incarnation.value);
          for (const auto& held : m.held) {
            absl::StrAppend(&text, " [", held.job.value, " g", held.generation.value, " revoked ",
                            held.revoked.value, " live ", held.live.size(), " exited ", held.exited.size(),
                            "]");
          }
        }
        if constexpr (requires { m.kept.begin()->processes; }) {
          for (const auto& kept : m.kept)
            absl::StrAppend(&text, " [", kept.job.value, " waits ", kept.processes.size(), " come ",
                            kept.coming.size(), "]");
        }
        if constexpr (requires {
                        m.id;
                        m.ok;
                      }) {
          absl::StrAppend(&text, " ", m.id, m.ok ? " ok " : " error ", m.error, m.json.substr(0, 80));
        }
        if constexpr (requires {
                        m.id;
                        m.body;
                      })
          absl::StrAppend(&text, " ", m.id, " kind ", m.body.index());
        if constexpr (requires { m.reason; }) absl::StrAppend(&text, ": ", m.reason);
      },
      message);
  return text;
}

bool Network::CanConnect(int machine) const {
  const auto link = links_.find(machine);
  return serving() && (link == links_.end() || (!link->second.cut[0] && !link->second.cut[1]));
}

bool Network::IsCut(int machine) const {
  const auto link = links_.find(machine);
  return link != links_.end() && (link->second.cut[0] || link->second.cut[1]);
}

std::shared_ptr<Connection> Network::Connect(int machine, const core::Peer& peer) {
  auto connection = std::make_shared<Connection>();
  connection->id = next_++;
  connection->machine = machine;
  connection->peer = peer;
  connection->route = absl::StrCat("r", connection->id);
  connection->head_life = head_.life;
  if (kernel_.rng.Chance(faults_.reorder)) connection->slowness = kernel_.Between(0, 2 * kSec);
  by_route_[connection->route] = connection;
  auto& mine = by_machine_[machine];
  std::erase_if(mine, [](const auto& one) { return !one->near && !one->far; });
  mine.push_back(connection);
  return connection;
}

bool Network::Send(Connection& connection, core::Message message) {
  if (!connection.near) return false;
  return Put(connection, kToHead, std::move(message));
}

bool Network::SendTo(const std::string& route, core::Message message) {
  const auto it = by_route_.find(route);
  if (it == by_route_.end() || !it->second->far) return false;
  return Put(*it->second, kFromHead, std::move(message));
}

bool Network::Put(Connection& connection, Direction direction, core::Message message) {
  const auto found = by_route_.find(connection.route);
  if (found == by_route_.end()) return true;  // the head's end is closed and ours does not know it
  if (on_sent) on_sent(connection, direction, message);
  if (faults_.through_codec) {
    auto decoded = wire::Decode(wire::Encode(message));
    if (!decoded.ok() || *decoded != message) {
      kernel_.Fail("INV-11", absl::StrCat("a message does not survive the codec: ", Describe(message)));
      return true;
    }
  }
  std::deque<core::Message>& queue = connection.under_way[direction];
  if (queue.size() >= faults_.queue_max) {
    ++kernel_.counts["message lost at the high-water mark"];
    return false;
  }
  const int copies = faults_.duplicate > 0 && kernel_.rng.Chance(faults_.duplicate) ? 2 : 1;
  if (copies == 2) ++kernel_.counts["message duplicated"];
  for (int copy = 0; copy < copies; ++copy) {
    queue.push_back(message);
    waiting_max_ = std::max(waiting_max_, queue.size());
    if (LinkOf(connection.machine).cut[direction]) {
      ++connection.held_up[direction];
    } else {
      Travel(found->second, direction);
    }
  }
  return true;
}

// A delay for the next of what is under way; it arrives in the order it was sent whatever the delays are.
void Network::Travel(const std::shared_ptr<Connection>& shared, Direction direction) {
  Connection& connection = *shared;
  int64_t arrival =
      kernel_.now() + faults_.delay_min + kernel_.Between(0, faults_.delay_spread) + connection.slowness;
  // A lost segment is sent again later each time, and what follows waits behind it.
  for (int64_t pause = 200 * kMs; faults_.loss > 0 && pause < 4 * kSec && kernel_.rng.Chance(faults_.loss);
       pause *= 2) {
    arrival += pause;
    ++kernel_.counts["segment lost"];
  }
  arrival = std::max({arrival, LinkOf(connection.machine).clogged_until, connection.last[direction]});
  connection.last[direction] = arrival;
  kernel_.At(arrival, [this, shared, direction] { Arrive(shared, direction); });
}

// A message that is on the wire when an end closes is still read by the other.
void Network::Arrive(const std::shared_ptr<Connection>& connection, Direction direction) {
  if (connection->under_way[direction].empty()) return;  // it was lost with the connection
  if (LinkOf(connection->machine).cut[direction]) {
    ++connection->held_up[direction];
    return;
  }
  const core::Message message = std::move(connection->under_way[direction].front());
  connection->under_way[direction].pop_front();
  if (direction == kToHead) {
    if (head_.life != connection->head_life) return;
    kernel_.Note(connection->id * 64 + message.index(), "m", connection->machine, " -> head on ",
                 connection->route, "  ", kernel_.tracing() ? Describe(message) : "");
    head_.deliver(*connection, message);
  } else if (connection->near && connection->deliver) {
    kernel_.Note(connection->id * 64 + message.index() + 32, "head -> m", connection->machine, " on ",
                 connection->route, "  ", kernel_.tracing() ? Describe(message) : "");
    connection->deliver(message);
  }
}

void Network::CloseFar(Connection& connection) {
  if (!connection.far) return;
  connection.far = false;
  by_route_.erase(connection.route);
}

// The end of the machine: its process closed, or the network told it so.
void Network::CloseNear(Connection& connection, bool crashed_machine) {
  if (!connection.near) return;
  connection.near = false;
  connection.deliver = nullptr;
  connection.closed = nullptr;
  const auto it = by_route_.find(connection.route);
  if (it == by_route_.end()) return;
  const std::shared_ptr<Connection> shared = it->second;
  int64_t notice = crashed_machine || IsCut(connection.machine) ? kGiveUpAfter : 5 * kMs;
  if (kernel_.rng.Chance(faults_.half_open)) notice = kernel_.Between(5 * kSec, kHalfOpenMax);
  kernel_.After(notice, [this, shared] { CloseFar(*shared); });
}

void Network::HeadGone(bool machine_gone) {
  const uint64_t life = head_.life;
  head_ = {};
  std::vector<std::shared_ptr<Connection>> open;
  for (auto& [route, connection] : by_route_) open.push_back(connection);
  for (auto& connection : open) {
    if (connection->head_life != life) continue;
    CloseFar(*connection);
    const int64_t notice =
        machine_gone || IsCut(connection->machine) ? kGiveUpAfter : kernel_.Between(0, 3 * kMs);
    kernel_.After(notice, [this, connection] {
      if (!connection->near) return;
      auto closed = std::move(connection->closed);
      CloseNear(*connection, false);
      if (closed) closed();
    });
  }
}

void Network::HeadStalled() {
  for (auto& [route, connection] : by_route_) {
    std::shared_ptr<Connection> shared = connection;
    kernel_.After(kGiveUpAfter + kernel_.Between(0, kSec), [this, shared] {
      if (!shared->near) return;
      auto closed = std::move(shared->closed);
      CloseNear(*shared, true);
      if (closed) closed();
    });
  }
}

void Network::Reset(int machine) {
  for (auto& connection : std::vector(by_machine_[machine])) {
    if (!connection->near) continue;
    CloseFar(*connection);
    auto closed = std::move(connection->closed);
    CloseNear(*connection, false);
    if (closed) closed();
  }
}

void Network::BreakHalfOpen(int machine) {
  for (auto& connection : std::vector(by_machine_[machine])) {
    if (!connection->near) continue;
    auto closed = std::move(connection->closed);
    connection->near = false;
    connection->deliver = nullptr;
    kernel_.After(kernel_.Between(5 * kSec, kHalfOpenMax), [this, connection] { CloseFar(*connection); });
    if (closed) closed();
  }
}

void Network::Cut(int machine, bool to_head, bool from_head) {
  Link& link = LinkOf(machine);
  link.cut[kToHead] |= to_head;
  link.cut[kFromHead] |= from_head;
  const uint64_t number = ++link.cut_number;
  kernel_.After(kGiveUpAfter + kernel_.Between(0, kSec), [this, machine, number] {
    const Link& now = LinkOf(machine);
    if (now.cut_number == number && (now.cut[0] || now.cut[1])) GiveUp(machine);
  });
}

// The end that hears nothing closes; its close reaches the other end if that direction still works.
void Network::GiveUp(int machine) {
  for (auto& connection : std::vector(by_machine_[machine])) {
    for (const Direction direction : {kToHead, kFromHead}) {
      if (!LinkOf(machine).cut[direction]) continue;
      connection->under_way[direction].clear();
      connection->held_up[direction] = 0;
    }
    if (!kernel_.rng.Chance(faults_.half_open)) {
      CloseFar(*connection);
    } else {
      kernel_.After(kernel_.Between(5 * kSec, kHalfOpenMax), [this, connection] { CloseFar(*connection); });
    }
    if (!connection->near) continue;
    auto closed = std::move(connection->closed);
    connection->near = false;
    connection->deliver = nullptr;
    if (closed) closed();
  }
}

void Network::Heal(int machine) {
  Link& link = LinkOf(machine);
  link.cut[0] = link.cut[1] = false;
  ++link.cut_number;
  link.clogged_until = 0;
  for (auto& connection : by_machine_[machine]) {
    for (Direction direction : {kToHead, kFromHead}) {
      const size_t held_up = std::exchange(connection->held_up[direction], 0);
      if (!by_route_.contains(connection->route)) {
        connection->under_way[direction].clear();
        continue;
      }
      for (size_t i = 0; i < held_up; ++i) Travel(connection, direction);
    }
  }
}

void Network::Inject(int machine, core::Message message) {
  for (const auto& connection : by_machine_[machine]) {
    if (connection->near && connection->deliver) return connection->deliver(std::move(message));
  }
}

void Network::Clog(int machine, int64_t duration) {
  LinkOf(machine).clogged_until = kernel_.now() + duration;
}

void Network::CalmDown() {
  faults_.loss = faults_.duplicate = faults_.reorder = 0;
  faults_.half_open = 0;
  faults_.queue_max = NetworkFaults().queue_max;
}

}  // namespace gtrain::sim
