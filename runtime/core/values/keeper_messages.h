// The messages from an agent to a keeper and back, as plain values. PURE, and std only, because the keeper
// links nothing but libc and libstdc++. The bytes are in runtime/keeper/agent_protocol.h;
// docs/protocols/keeper.md tells who sends what when. `Fields` names every member once, for both directions
// of the codec.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace gtrain::keeper {

inline constexpr uint32_t kAgentProtocol = 3;  // 3: Fence

// One version apart works both ways (fault N13): messages only gain fields at their end, and kinds at the end
// of their variant. A struct inside a message never changes.
constexpr bool Compatible(uint32_t one, uint32_t other) {
  return (one > other ? one - other : other - one) <= 1;
}

enum class Cause : uint8_t { kExited, kSignal, kOom, kStopped, kStartFailed, kAddressInUse, kLost };
enum class End : uint8_t { kReform, kStop, kStopNow };

// The highest value of each, for readers: an enum from the wire is a number (fault B7).
constexpr Cause Last(Cause) { return Cause::kLost; }
constexpr End Last(End) { return End::kStopNow; }

#define GT_FIELDS(...)            \
  template <typename Archive>     \
  void Fields(Archive& archive) { \
    archive.All(__VA_ARGS__);     \
  }

// ---------------------------------------------------------------- agent -> keeper

// First frame of a connection; the keeper answers with State. A newer connection replaces the older one.
struct Attach {
  uint32_t protocol = kAgentProtocol;
  uint64_t lease_ms = 0;  // without an agent for this long the keeper ends every rank (fault P4); 0 = never
  GT_FIELDS(protocol, lease_ms)
  bool operator==(const Attach&) const = default;
};

struct BeginGeneration {
  uint64_t generation = 0;
  uint32_t ranks = 0;          // StartRank commands that follow
  uint64_t shm_limit = 0;      // bytes of all arenas together
  std::string note;            // the agent's own memory of the generation, returned in State
  uint64_t processes_max = 0;  // and threads, of all ranks together where the machine lets us; 0 = no limit
  GT_FIELDS(generation, ranks, shm_limit, note, processes_max)
  bool operator==(const BeginGeneration&) const = default;
};

struct StartRank {
  uint64_t generation = 0;
  int32_t rank = 0;
  std::string token;  // 32 hex digits
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>> env;  // whole; the keeper adds GTRAIN_KEEPER_SOCKET only
  std::string cwd;
  std::string out_path, err_path;
  std::string report_path;  // $GTRAIN_REPORT
  std::string notice_path;  // $GTRAIN_NOTICE_FILE
  std::vector<int32_t> cpus;
  uint64_t memory_limit = 0;  // 0 = none
  bool tty = false;           // its stdout is a terminal
  bool takes_input = false;   // its stdin is a client's (Console); with `tty` all three are a whole terminal
  // The process that was started as this rank of this generation goes on as the rank above, if it is kept
  // (EndGeneration::keep); else, and with 0, one is started.
  uint64_t born = 0;
  int32_t born_rank = 0;
  // It has no part in the generation: it comes up beside the others and waits for its place in a later one.
  bool waits = false;
  GT_FIELDS(generation, rank, token, argv, env, cwd, out_path, err_path, report_path, notice_path, cpus,
            memory_limit, tty, takes_input, born, born_rank, waits)
  bool operator==(const StartRank&) const = default;
};

// Every generation <= `generation` is over, now and for ever.
struct EndGeneration {
  uint64_t generation = 0;
  End mode = End::kReform;
  uint64_t grace_ms = 0;
  std::string reason;
  bool keep = false;  // with kReform: processes that can go on in another generation are not ended
  GT_FIELDS(generation, mode, grace_ms, reason, keep)
  bool operator==(const EndGeneration&) const = default;
};

struct Relay {  // to an SDK rank
  uint64_t generation = 0;
  int32_t rank = 0;
  std::string json;
  GT_FIELDS(generation, rank, json)
  bool operator==(const Relay&) const = default;
};

struct AckRelay {  // the keeper may forget this message of the rank
  uint64_t generation = 0;
  int32_t rank = 0;
  uint64_t id = 0;
  GT_FIELDS(generation, rank, id)
  bool operator==(const AckRelay&) const = default;
};

struct AckExit {
  uint64_t generation = 0;
  int32_t rank = 0;
  GT_FIELDS(generation, rank)
  bool operator==(const AckExit&) const = default;
};

struct Notice {  // writes the notice file, tells SDK ranks, signals the others
  uint64_t generation = 0;
  uint32_t seconds = 0;
  int32_t signal = 0;   // 0 = none
  uint32_t number = 0;  // of a number that the keeper has had, the signal is not given again; 0: it is
  GT_FIELDS(generation, seconds, signal, number)
  bool operator==(const Notice&) const = default;
};

struct SignalRank {
  uint64_t generation = 0;
  int32_t rank = 0;
  int32_t signal = 0;
  GT_FIELDS(generation, rank, signal)
  bool operator==(const SignalRank&) const = default;
};

struct Exec {  // once beside a rank, in its environment and directory; output bounded
  uint64_t id = 0;
  uint64_t generation = 0;
  int32_t rank = 0;
  std::vector<std::string> argv;
  uint64_t timeout_ms = 0;
  bool apart = false;  // what it writes to stderr is told apart
  GT_FIELDS(id, generation, rank, argv, timeout_ms, apart)
  bool operator==(const Exec&) const = default;
};

// A turn of a client's talk with a program beside a rank, or without `argv` with the rank itself
// (core::Console). Answered as it begins, with output, when input was taken, when over, or after 3 s.
struct Console {
  uint64_t id = 0;
  uint64_t generation = 0;
  int32_t rank = 0;
  std::string session;
  bool start = false;
  std::vector<std::string> argv;
  bool terminal = false;
  std::string term;
  int32_t rows = 0, columns = 0;
  uint64_t input_offset = 0;
  std::string input;
  bool input_end = false;
  uint64_t out_seen = 0, err_seen = 0;
  bool hang_up = false;
  GT_FIELDS(id, generation, rank, session, start, argv, terminal, term, rows, columns, input_offset, input,
            input_end, out_seen, err_seen, hang_up)
  bool operator==(const Console&) const = default;
};

// A question to the process of a rank, which alone reads it; answered by ExecDone. Without output: the
// process has nothing to say.
struct Ask {
  uint64_t id = 0;
  uint64_t generation = 0;
  int32_t rank = 0;
  std::string question;
  uint64_t timeout_ms = 0;
  GT_FIELDS(id, generation, rank, question, timeout_ms)
  bool operator==(const Ask&) const = default;
};

struct Forget {  // the generation is gone and acknowledged
  uint64_t generation = 0;
  GT_FIELDS(generation)
  bool operator==(const Forget&) const = default;
};

// Until `until_ms` the ranks without the SDK may run without another Fence, on CLOCK_BOOTTIME (base/clock.h):
// the head relies on it that they do not write any more after that. The latest of all stands.
struct Fence {
  int64_t until_ms = 0;
  GT_FIELDS(until_ms)
  bool operator==(const Fence&) const = default;
};

struct Quit {  // end everything at once and exit
  std::string reason;
  GT_FIELDS(reason)
  bool operator==(const Quit&) const = default;
};

using Command = std::variant<Attach, BeginGeneration, StartRank, EndGeneration, Relay, AckRelay, AckExit,
                             Notice, SignalRank, Exec, Forget, Quit, Fence, Console, Ask>;

// ---------------------------------------------------------------- keeper -> agent

struct Started {
  uint64_t generation = 0;
  int32_t rank = 0;
  int64_t pid = 0;
  uint64_t start_time = 0;  // clock ticks after boot: (pid, start_time) is never reused (fault P14)
  // Hardware threads that it may run on, where the kernel gave it others than StartRank::cpus; else empty.
  std::vector<int32_t> other_cpus = {};
  GT_FIELDS(generation, rank, pid, start_time, other_cpus)
  bool operator==(const Started&) const = default;
};

struct Exited {
  uint64_t generation = 0;
  int32_t rank = 0;
  int64_t pid = 0;
  Cause cause = Cause::kExited;
  int32_t code = 0;
  int32_t signal = 0;
  std::string message;
  std::string tail;  // last bytes of stderr (of stdout when stderr is empty)
  GT_FIELDS(generation, rank, pid, cause, code, signal, message, tail)
  bool operator==(const Exited&) const = default;
};

// A process between two generations, by the rank as which it was started.
struct Kept {
  uint64_t born = 0;
  int32_t born_rank = 0;
  GT_FIELDS(born, born_rank)
  bool operator==(const Kept&) const = default;
};

// No process of this generation is left but the kept ones (clean), or something survived SIGKILL.
struct Gone {
  uint64_t generation = 0;
  bool clean = true;
  std::string message;
  std::vector<Kept> kept;
  std::vector<Kept> coming;  // kept, too, but they cannot go on as members yet (StartRank::waits)
  GT_FIELDS(generation, clean, message, kept, coming)
  bool operator==(const Gone&) const = default;
};

struct RankHeld {
  int32_t rank = 0;
  int64_t pid = 0;
  uint64_t start_time = 0;
  bool running = false;
  bool sdk = false;  // said hello with its token
  GT_FIELDS(rank, pid, start_time, running, sdk)
  bool operator==(const RankHeld&) const = default;
};

struct GenerationHeld {
  uint64_t generation = 0;
  std::string note;
  std::vector<RankHeld> ranks;
  std::vector<Exited> unacked;  // exits no agent acknowledged
  bool ending = false;
  bool gone = false;
  bool clean = true;
  GT_FIELDS(generation, note, ranks, unacked, ending, gone, clean)
  bool operator==(const GenerationHeld&) const = default;
};

struct State {
  uint32_t protocol = kAgentProtocol;
  std::string job;
  int64_t pid = 0;
  uint64_t highest_revoked = 0;
  std::vector<GenerationHeld> generations;
  uint64_t highest_stopped = 0;  // ended by a stop: the next agent must not take it for a reform (fault H3)
  std::vector<Kept> kept;
  std::vector<Kept> coming;  // as in Gone
  GT_FIELDS(protocol, job, pid, highest_revoked, generations, highest_stopped, kept, coming)
  bool operator==(const State&) const = default;
};

struct RelayUp {  // resent after each Attach until AckRelay
  uint64_t generation = 0;
  int32_t rank = 0;
  uint64_t id = 0;
  std::string json;
  GT_FIELDS(generation, rank, id, json)
  bool operator==(const RelayUp&) const = default;
};

// New output since the last Output of the stream, at most 64 KiB: what a fast writer produced before that is
// only in the log file. `end_offset` is the size of the log file after these bytes.
struct Output {
  uint64_t generation = 0;
  int32_t rank = 0;
  bool is_stderr = false;
  uint64_t end_offset = 0;
  uint64_t dropped = 0;  // bytes of the stream that never reached the log file, so far
  std::string bytes;
  int32_t refused = 0;  // the errno with which the disk refuses the log now; 0: it takes it
  GT_FIELDS(generation, rank, is_stderr, end_offset, dropped, bytes, refused)
  bool operator==(const Output&) const = default;
};

struct ReportBytes {  // appended to $GTRAIN_REPORT, in order, any cut
  uint64_t generation = 0;
  int32_t rank = 0;
  std::string bytes;
  GT_FIELDS(generation, rank, bytes)
  bool operator==(const ReportBytes&) const = default;
};

struct ExecDone {
  uint64_t id = 0;
  bool ok = true;
  int32_t status = 0;  // exit code, or 128 + signal
  std::string output;  // or the error sentence
  std::string err;     // with Exec::apart
  bool timed_out = false;
  GT_FIELDS(id, ok, status, output, err, timed_out)
  bool operator==(const ExecDone&) const = default;
};

struct ConsoleTurn {  // the answer to Console
  uint64_t id = 0;
  bool ok = true;
  std::string out;      // or why it is refused, for good
  uint64_t out_at = 0;  // where in the output `out` begins
  std::string err;      // from Console::err_seen
  uint64_t taken = 0;   // input up to there
  bool over = false;    // it ended, and there is no more output than this
  int32_t status = 0;   // then: exit code, or 128 + signal
  GT_FIELDS(id, ok, out, out_at, err, taken, over, status)
  bool operator==(const ConsoleTurn&) const = default;
};

// A rank has said that it can go on in another generation; one that waits (StartRank::waits) could be a
// member of it from now on. Repeated after each Attach.
struct Ready {
  uint64_t generation = 0;
  int32_t rank = 0;
  GT_FIELDS(generation, rank)
  bool operator==(const Ready&) const = default;
};

using Report =
    std::variant<State, Started, Exited, Gone, RelayUp, Output, ReportBytes, ExecDone, ConsoleTurn, Ready>;

#undef GT_FIELDS

}  // namespace gtrain::keeper
