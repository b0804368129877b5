// Connections on the rank socket, and which of them is a rank's. rank_protocol.h defines their messages; the
// other end is rank_socket.h.
//
// Owner thread only; nothing blocks. A turn reads only what is ready, however many there are; finding a
// rank's connection is a look into a map.
#pragma once
#include <poll.h>
#include <stddef.h>
#include <stdint.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/poll_set.h"
#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

// It belongs to a rank once its hello proved the token.
struct RankConnection {
  RankConnection(UniqueFd socket, PollSet<RankConnection>* in_set) : fd(std::move(socket)), set(in_set) {}
  ~RankConnection() { set->Remove(fd.get()); }
  RankConnection(const RankConnection&) = delete;
  RankConnection& operator=(const RankConnection&) = delete;

  bool proved() const { return rank >= 0; }
  // Appends a frame for the rank. `pass_fd` travels with its first byte: borrowed from an arena, or that of
  // `keep`.
  void Send(uint16_t kind, const std::string& body, int pass_fd = -1, UniqueFd keep = UniqueFd());

  const UniqueFd fd;
  PollSet<RankConnection>* const set;
  std::string in;
  struct Chunk {
    std::string bytes;
    int pass_fd = -1;
    UniqueFd keep;
  };
  std::deque<Chunk> out;
  size_t out_bytes = 0;
  uint64_t generation = 0;
  int rank = -1;
  int64_t opened_ms = 0;
  ProcessEntry peer;     // that connected; its pid is 0 where that is not known
  bool answers = false;  // when it is asked (kRankAnswers)
  int unanswered = 0;    // questions
  bool broken = false;
  bool ready = false;           // poll said so in this turn
  bool waits_to_write = false;  // as the set was told
};

class Connections {
 public:
  explicit Connections(Context& context) : context_(context) {}
  bool Open() { return set_.Open(); }
  // Makes the socket at Context::rank_socket, anew if it was removed. False: a reason was printed to stderr.
  bool Listen() { return ListenOn(context_.rank_socket, "ranks", &listen_); }

  void Accept();
  void MarkReady();
  const std::vector<std::unique_ptr<RankConnection>>& all() const { return all_; }
  // nullptr: the rank has none.
  RankConnection* Of(uint64_t generation, int rank) const;
  // Proved: it is the rank's, in place of one before.
  void GiveTo(uint64_t generation, int rank, RankConnection& connection);
  // The rank's connection, if it has one, is that of the other rank from now on.
  void Rename(std::pair<uint64_t, int> rank, std::pair<uint64_t, int> other);
  void SendToAll(uint64_t generation, uint16_t kind, const std::string& body);
  void BreakAll(uint64_t generation);

  // Sends what the socket takes.
  void Write(RankConnection& connection);
  void WriteAll();
  // Destroys broken connections, after `leave` has heard of them, and those that have not said for long whose
  // they are.
  enum class Which { kAll, kOfTheDead };
  void Sweep(Which which, const std::function<void(const RankConnection&)>& leave);
  void AddFds(std::vector<pollfd>* fds) const;
  // A connection is broken, or is to prove soon whose it is.
  bool MoreToDo() const;

 private:
  Context& context_;
  UniqueFd listen_;
  PollSet<RankConnection> set_;
  std::vector<std::unique_ptr<RankConnection>> all_;
  std::map<std::pair<uint64_t, int>, RankConnection*> of_rank_;  // by generation and rank
};

}  // namespace gtrain::keeper
