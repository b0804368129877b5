// RelayedClient: a connection to the head through another agent. To the agent it is a transport like any
// other; what it carries is sealed for the head (net/zmq/end_to_end.h, docs/protocols/relays.md).
//
// Owner thread only; nothing blocks. Connected() means that the head has answered over this way.
#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/ids.h"
#include "net/port/transport.h"
#include "net/zmq/end_to_end.h"
#include "runtime/core/values/messages.h"

namespace gtrain::agent {

// Without a conversation for this long, a third more at random, the agent goes on directly.
inline constexpr absl::Duration kRelayPatience = absl::Seconds(5);
// A relay that does not answer a beat for this long hears nothing.
inline constexpr absl::Duration kRelaySilence = absl::Seconds(3);
// A relay that answers may still lose what it is to carry: the head answers a hello, and a word of the
// agent's own each 20 heartbeats.
inline constexpr absl::Duration kHelloPatience = absl::Seconds(20), kHeadSilence = absl::Seconds(60);

class RelayedClient final : public port::ClientTransport {
 public:
  // `link`: the connection to the relay. `secret`: of this node and the head (net::PairSecret).
  RelayedClient(std::unique_ptr<port::ClientTransport> link, NodeId self, std::string secret,
                std::shared_ptr<const Clock> clock, double jitter);

  absl::Status Send(absl::string_view payload) override { return Say(payload, false); }
  std::optional<std::string> Receive() override;
  bool Connected() const override;
  int PollFd() const override { return link_->PollFd(); }

  // For what may wait for some tenths of a second: it costs the head less.
  absl::Status SendLater(absl::string_view payload) { return Say(payload, true); }

  // Looks after the session: at least every 100 ms while it is not connected, else each second.
  void Turn();
  // Opens another session: messages of this one were lost, though the connection lives.
  void Renew();
  // Tells the relay that this agent is there.
  void Beat();
  // It does not work: the relay is not there, is silent, or has no head itself.
  bool Failed() const;

 private:
  void Open();
  void Close();
  void OnAnswer(absl::string_view bytes);
  void OnPart(const core::RelayedDown& down, const core::RelayPart& part);
  absl::Status Say(absl::string_view payload, bool waits);
  absl::Status SendPart(core::RelayPart part);

  const std::unique_ptr<port::ClientTransport> link_;
  const NodeId self_;
  const std::string secret_;
  const std::shared_ptr<const Clock> clock_;
  const absl::Duration patience_;
  bool linked_ = false;
  std::string half_;  // sent, not answered yet
  std::optional<net::SealedSession> session_;
  mutable bool broken_ = false;  // Connected() has not said so yet
  Instant open_again_;
  Instant opened_at_;                        // a message of the head, last
  Instant down_since_;                       // or what is there since then has brought nothing of the head
  bool heard_ = false;                       // in this session, from the head itself
  std::optional<Instant> unanswered_since_;  // of a beat
  std::deque<std::string> waiting_;          // opened, to be returned
};

}  // namespace gtrain::agent
