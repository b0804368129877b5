// Consoles: a client gives input to a program beside a rank, or to a rank itself, and gets the output.
//
// A client speaks in turns (Console). Its input and output carry offsets: for input this side says how much
// it took, for output the client says how much it saw, and until then it is kept. So a turn may come twice,
// late or never, by another agent or another head. Each side holds at most 64 KiB of each stream; a client
// that does not read makes the program wait, not the keeper. The exception is a rank with a terminal: its
// output goes to its log first, and a client that reads slower than the rank writes misses some of it here.
//
// A client that is silent is gone: its program gets the end of its input and SIGHUP, and SIGKILL four seconds
// later; a rank gets the end of its stdin, and one with a terminal SIGHUP.
//
// Owner thread only; nothing blocks. There are at most 16 of them; a tick looks at each rank for its stdin.
#pragma once
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <sys/types.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/keeper/children.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/spawn.h"

namespace gtrain::keeper {

class Consoles final : public ChildOwner {
 public:
  Consoles(Context& context, Children& children) : context_(context), children_(children) {}

  // Takes a client's turn. It is answered now when it is refused, else by Pump.
  void Take(Console& turn);
  // Moves input and output, answers what is due, and ends consoles of clients that are gone.
  void Pump();
  // Closes the stdin of ranks that take input and have had no client for long: they do not wait for ever.
  void CloseLonelyInputs();
  void AddFds(std::vector<pollfd>* fds);
  bool MoreToDo() const { return !sessions_.empty() || InputWaits(); }

  bool OnDied(const siginfo_t& info) override;
  std::optional<uint64_t> GenerationOf(pid_t child) override;

 private:
  // A client's talk with a program beside a rank, or with a rank that takes input.
  struct Session {
    std::string id;
    uint64_t generation = 0;
    int rank = -1;
    bool of_rank = false;  // pid, streams and end are the rank's
    bool terminal = false;
    std::vector<std::string> argv;
    std::vector<std::pair<std::string, std::string>> env;
    pid_t pid = -1;
    UniqueFd in, out, err;  // a terminal has no `err`
    std::string in_waits;   // taken, and not written yet
    uint64_t taken = 0;
    bool in_end = false;
    std::string out_kept, err_kept;   // not seen by the client yet
    uint64_t out_at = 0, err_at = 0;  // where they begin
    int64_t read_ms = 0;              // when there was output last
    bool ended = false;
    int status = 0;
    int64_t ended_ms = 0;
    int64_t heard_ms = 0;
    int64_t kill_at_ms = 0;  // hung up; 0: not
    // The turn that waits for its answer.
    uint64_t asked = 0;
    int64_t answer_by_ms = 0;
    std::string offered;  // what of its input is not taken
    bool offered_end = false;
    uint64_t input_known = 0;  // that so much was taken
    uint64_t out_seen = 0;     // of_rank

    bool IsOver() const { return ended && !out.valid() && !err.valid(); }
    bool HasNews() const;
  };

  Session* Find(const std::string& id);
  Session* FindOrOpen(Console& turn);
  std::string Open(Console& turn);
  std::string OpenRank(Session& session, const RankProcess& rank) const;
  bool OpenProgram(Session& session, Console& turn, const RankProcess& rank);
  bool StartProgram(Session& session, const RankProcess& rank);
  void OnStarted(const std::string& id, const SpawnResult& result);
  void OnStarterDied(const std::string& id);

  void PumpInput(Session& session);
  bool TakeInput(Session& session, UniqueFd** in);
  void ReadProgram(Session& session);
  void LookAtRank(Session& session);
  void KillIfDue(const Session& session);
  UniqueFd* InputOf(Session& session);
  void Answer(Session& session);
  void HangUp(Session& session);
  bool InputWaits() const;

  Context& context_;
  Children& children_;
  std::vector<std::unique_ptr<Session>> sessions_;
  std::deque<std::string> over_;  // ids of the newest that are over: a late turn begins none anew
};

}  // namespace gtrain::keeper
