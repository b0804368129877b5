// The keeper of one job on one machine: parent and subreaper of its ranks. One poll loop; a second thread
// writes the logs.
//
// It decides nothing about the job. It starts what the agent says, watches, keeps logs, arenas and exit
// statuses, and ends everything it started: on command, when the ranks have exited by themselves, or when no
// agent came back within the lease. It outlives agents; whatever an agent missed is repeated to the next one.
#pragma once
#include <poll.h>
#include <signal.h>
#include <stdint.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/core/values/keeper_messages.h"
#include "runtime/keeper/cgroup.h"
#include "runtime/keeper/log_stream.h"
#include "runtime/keeper/poll_set.h"
#include "runtime/keeper/posix.h"
#include "runtime/keeper/rank_protocol.h"
#include "runtime/keeper/spawn.h"

namespace gtrain::keeper {

struct KeeperOptions {
  std::string dir;  // 0700, exists, made by the agent
  std::string job;
  LogLimits log_limits;
  int64_t idle_exit_ms = 3600 * 1000;  // nothing runs and no agent came for this long
  int64_t stopped_exit_ms =
      10 * 1000;  // the same, when all it held was stopped: nobody will ask how it ended
};

// A connection on the rank socket. It belongs to a rank once its hello proved the token.
struct RankConnection {
  RankConnection(UniqueFd socket, PollSet<RankConnection>* in_set) : fd(std::move(socket)), set(in_set) {}
  ~RankConnection() { set->Remove(fd.get()); }
  RankConnection(const RankConnection&) = delete;
  RankConnection& operator=(const RankConnection&) = delete;

  const UniqueFd fd;
  PollSet<RankConnection>* const set;
  std::string in;
  struct Chunk {
    std::string bytes;
    int pass_fd = -1;  // borrowed from the arena, or that of `keep`; sent with the first byte
    UniqueFd keep;
  };
  std::deque<Chunk> out;
  size_t out_bytes = 0;
  uint64_t generation = 0;
  int rank = -1;
  int64_t opened_ms = 0;
  ProcessEntry peer;  // that connected; its pid is 0 where that is not known
  bool broken = false;
  bool ready = false;           // poll said so in this turn
  bool waits_to_write = false;  // as the set was told
};

struct RankProcess {
  StartRank spec;
  pid_t pid = -1;  // ours to signal while > 0: only we reap it
  uint64_t start_time = 0;
  UniqueFd out_write, err_write, in_read;  // until it is started
  UniqueFd in;                             // to its stdin (StartRank::takes_input), until that is at its end
  int64_t in_heard_ms = 0;                 // when a client last had it
  LogStream out, err;
  uint64_t out_sent = 0, err_sent = 0;   // LogStream::total already told to the agent
  int out_refused = 0, err_refused = 0;  // LogStream::refused likewise
  Cgroup cgroup;                         // only with a memory limit of its own; else the generation's
  UniqueFd report;
  uint64_t report_offset = 0, report_punched = 0;
  std::optional<Exited> exit;
  int64_t drain_until_ms = 0;
  bool acked = false;
  bool sdk = false;
  bool termed = false;              // it got SIGTERM from us
  std::vector<ProcessEntry> apart;  // and so did these, which its shell runs in other process groups
  std::deque<RelayUp> relays;       // not acknowledged
  size_t relay_bytes = 0;
  uint64_t relay_id = 0;
};

struct Arena {
  UniqueFd memfd;
  uint64_t bytes = 0;
  uint64_t faulted = 0;
  std::set<const RankConnection*> users;  // asked for it, and have neither freed it nor gone
};

enum class Phase {
  kLive,
  kEnding,
  kKilling,
  kWriting,
  kGone
};  // kWriting: only its logs are not on disk yet

struct GenerationRecord {
  BeginGeneration begin;
  std::map<int, std::unique_ptr<RankProcess>> ranks;
  // Counted as they happen: to look at every rank at each exit would be too much for thousands.
  size_t ended = 0;    // ranks that have exited and were reaped, or never started
  size_t unacked = 0;  // exits that no agent has acknowledged
  std::map<uint64_t, Arena> arenas;
  UniqueFd reports;           // the folder of all ranks' $GTRAIN_REPORT
  int reports_watch = -1;     // of it, in report_events_; -1: they are looked for at every tick
  std::vector<int> to_start;  // started together at the end of the turn
  Cgroup cgroup;
  uint64_t oom_kills = 0;  // of the group, told already
  Phase phase = Phase::kLive;
  bool ordered = false;  // ended by a command or the lease, not by its ranks' own exits
  uint32_t noticed = 0;  // Notice::number of the newest
  End mode = End::kReform;
  std::string reason;
  int64_t term_at_ms = 0;  // SDK ranks that were asked to stop get SIGTERM then; 0 = was sent
  int64_t kill_at_ms = 0;
  int64_t give_up_ms = 0;
  int64_t written_by_ms = 0;  // gone then, whether its logs are on disk or not (fault P8)
  int64_t next_scan_ms = 0;   // of the process table: not at every wake-up
  bool clean = true;
  std::string gone_message;
};

struct Helper {  // Exec
  uint64_t id = 0;
  uint64_t generation = 0;
  std::vector<std::string> argv;
  pid_t pid = -1;
  bool apart = false;  // Exec::apart: else stderr is in `output`, too
  UniqueFd output_fd, err_fd;
  std::string output, err;
  uint64_t left_out = 0;  // bytes beyond what is kept of each
  int64_t limit_ms = 0;
  int64_t deadline_ms = 0;
  bool timed_out = false;
  bool done = false;
};

// A client's talk with a program beside a rank, or with a rank that takes input (core::Console).
struct ConsoleSession {
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
};

// The writer of one rank's checkpoints: a process that belongs to no generation, so that what ends the rank
// does not end its saves. We hold both ends of what it works on, for the next one should it be killed.
struct WriterProcess {
  uint64_t generation = 0;
  int rank = -1;
  std::vector<std::pair<std::string, std::string>> env;  // the rank's
  std::string cwd;
  UniqueFd memfd;
  UniqueFd channel;  // the writer's end
  pid_t pid = -1;    // not running: killed, and started again at restart_at_ms
  int kills = 0;
  int64_t restart_at_ms = 0;
};

// A rank that waits for its writer.
struct WriterWanted {
  uint64_t generation = 0;
  int rank = -1;
  RankArenaRequest request{};
};

// What one starter was given: the ranks of a generation, or one helper, or the program of one console.
struct Starting {
  SpawnBatch batch;
  uint64_t generation = 0;
  std::vector<int> ranks;  // by index of the request
  uint64_t helper = 0;
  std::string console;
};

class Keeper {
 public:
  explicit Keeper(KeeperOptions options);
  // Sockets, pid file, subreaper. False: a reason was printed to stderr.
  bool Start();
  // Serves until Quit, the lease with nothing left, or SIGTERM. Returns the exit code.
  int Run();

 private:
  // keeper.cc: the loop and the agent
  bool Listen(const std::string& path, const std::string& name, UniqueFd* fd);
  bool PlaceRankSocket();
  void Turn(int64_t now);
  int WaitMs() const;
  int WaitForOthersMs() const;  // than streams
  void Tick();
  bool MoreToDo() const;
  void CollectPollFds();
  void PumpReady();
  void DrainSignals();
  void AcceptAgent();
  void ReadAgent();
  void WriteAgent();
  void DropAgent();
  void Tell(Report report);
  void Handle(Command command);
  void Do(Attach& attach);
  void Do(BeginGeneration& begin);
  void Do(StartRank& start);
  void Do(EndGeneration& end);
  void Do(Relay& relay);
  void Do(AckRelay& ack);
  void Do(AckExit& ack);
  void Do(Notice& notice);
  void Do(SignalRank& signal);
  void Do(Exec& exec);
  void Do(Forget& forget);
  void Do(Quit& quit);
  void Do(Fence& fence);
  void Do(Console& turn);
  bool ToldAfterRelays(const RankProcess& rank) const;
  State Describe() const;
  void CheckLease();
  void CheckFence();
  bool DirectoryIsGone() const;
  void LookAfterSockets();
  bool AnyLive() const;
  int64_t IdleExitMs() const;

  // keeper_process.cc: ranks, helpers, the end of a generation
  void PrepareStart(GenerationRecord& record, RankProcess& rank);
  void StartPrepared(GenerationRecord& record);
  void FailStart(RankProcess& rank, const FailureWords& words);
  void TakeStarted();
  void RankStarted(RankProcess& rank, const SpawnResult& result);
  void HelperStarted(Helper& helper, const SpawnResult& result);
  void StarterDied(Starting& starting);
  void Reap();
  bool KnownDied(const siginfo_t& info);
  bool KilledByOom(GenerationRecord& record, RankProcess& rank);
  void RankDied(GenerationRecord& record, RankProcess& rank, const siginfo_t& info);
  void Describe(GenerationRecord& record, RankProcess& rank, const siginfo_t& info, Exited* exit);
  void RecordExit(RankProcess& rank);
  void HelperDied(Helper& helper, int code, int status);
  void PumpHelper(Helper& helper);
  void CloseDrained();
  void SendOutput();
  void SendOutput(uint64_t generation, RankProcess& rank);
  void WatchReports(GenerationRecord& record);
  void TailReports();
  void TailReport(GenerationRecord& record, RankProcess& rank);
  void End_(GenerationRecord& record, End mode, int64_t grace_ms, const std::string& reason, bool ordered);
  void AdvanceEnding(GenerationRecord& record);
  void KillLeftovers(GenerationRecord& record);
  void TermRanks(GenerationRecord& record, bool also_sdk);
  void TermRank(RankProcess& rank, std::vector<ProcessEntry>* processes);
  bool Owns(const GenerationRecord& record, pid_t pid, pid_t top);
  void FinishGeneration(GenerationRecord& record, bool clean, const std::string& message);
  void AwaitLogs(GenerationRecord& record);

  // keeper_ranks.cc: the rank socket
  void AcceptRanks();
  void ReadRank(RankConnection& connection);
  void WriteRank(RankConnection& connection);
  void WriteSome(RankConnection& connection);
  void HearLastWords(const RankProcess& rank);
  void RankFrameIn(RankConnection& connection, uint16_t kind, const char* body, uint32_t bytes);
  static bool IsOfAnother(const RankConnection& old, const RankConnection& now);
  void RankHelloIn(RankConnection& connection, const RankHello& hello);
  void ArenaIn(RankConnection& connection, const RankArenaRequest& request);
  void FreeArenaIn(RankConnection& connection, uint64_t id);
  void FreeArenasOf(const RankConnection& connection);
  void RelayIn(RankConnection& connection, std::string json);
  void ToRank(RankConnection& connection, uint16_t kind, const std::string& body, int pass_fd = -1,
              UniqueFd keep = UniqueFd());
  RankConnection* ConnectionOf(uint64_t generation, int rank);
  void ToRanks(GenerationRecord& record, uint16_t kind, const std::string& body);
  void FaultArenas();
  void SweepConnections();

  // keeper_writers.cc: writers of checkpoints
  void WriterIn(RankConnection& connection, const RankArenaRequest& request);
  void StartWriters();
  void StartWriter(RankConnection& connection, RankProcess& rank, const RankArenaRequest& request);
  bool MemoryHeldBefore(uint64_t generation) const;
  bool WriterDied(const siginfo_t& info);
  void KillWriters();

  // keeper_console.cc: what clients have run beside ranks with input, and the stdin of ranks
  bool PrepareInput(RankProcess& rank);
  ConsoleSession* FindConsole(const std::string& id);
  std::string OpenConsole(Console& turn);
  bool StartConsole(ConsoleSession& console, const RankProcess& rank);
  void ConsoleStarted(const std::string& id, const SpawnResult& result);
  void ConsoleNotStarted(const std::string& id);
  bool ConsoleDied(const siginfo_t& info);
  void AddConsoleFds();
  void PumpConsoles();
  void PumpInput(ConsoleSession& console);
  void LookAtRank(ConsoleSession& console);
  UniqueFd* InputOf(ConsoleSession& console);
  void AnswerConsole(ConsoleSession& console);
  void HangUp(ConsoleSession& console);
  void CloseLonelyInputs();
  bool InputWaits() const;

  RankProcess* FindRank(uint64_t generation, int rank);
  GenerationRecord* FindGeneration(uint64_t generation);
  GenerationRecord* GenerationOfPid(pid_t pid, RankProcess** rank);

  const KeeperOptions options_;
  std::string rank_socket_;  // path ranks connect to
  UniqueFd agent_listen_, rank_listen_, signals_;
  UniqueFd report_events_;  // inotify(7)
  UniqueFd agent_;
  std::string agent_in_, agent_out_;
  bool attached_ = false;       // an agent is connected and has said Attach
  bool refused_agent_ = false;  // said once: who asks often fills no disk with it
  uint64_t lease_ms_ = 0;
  int64_t fence_until_ms_ = 0;  // 0: no fence
  UniqueFd fence_timer_;        // its clock goes on while the machine is suspended
  int64_t agent_seen_ms_ = 0;
  int64_t now_ = 0;
  int64_t last_tick_ms_ = 0;
  int64_t streams_from_ms_ = 0;   // they are not read before
  bool tick_wanted_ = false;      // something happened, or waits for its time: a keeper else sleeps
  bool reports_written_ = false;  // since they were read
  bool more_zombies_ = false;     // than one turn takes
  int64_t reports_read_ms_ = 0;   // all of them
  int64_t next_look_ms_ = 0;
  bool sockets_missed_ = false;  // when they were looked for last
  uint64_t highest_revoked_ = 0;
  uint64_t highest_stopped_ = 0;
  bool quitting_ = false;
  int64_t quit_by_ms_ = 0;
  PollSet<LogStream> stream_set_;
  PollSet<RankConnection> connection_set_;
  LogWriter log_writer_;
  std::map<uint64_t, GenerationRecord> generations_;
  // Living ranks by process, and connections that have proved whose they are: both as (generation, rank).
  std::unordered_map<pid_t, std::pair<uint64_t, int>> rank_of_pid_;
  std::map<std::pair<uint64_t, int>, RankConnection*> connection_of_;
  std::vector<std::unique_ptr<RankConnection>> connections_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::vector<std::unique_ptr<ConsoleSession>> consoles_;
  std::deque<std::string> consoles_over_;  // ids of the newest that are over: a late turn begins none anew
  std::vector<std::unique_ptr<Starting>> starting_;
  std::vector<WriterProcess> writers_;
  std::vector<WriterWanted> writers_wanted_;
  std::string writer_program_;  // beside our own
  std::vector<pollfd> poll_fds_;
  uint64_t arena_bytes_faulting_ = 0;
};

}  // namespace gtrain::keeper
