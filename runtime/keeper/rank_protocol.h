// Bytes between a rank (libgtrain) and its keeper, and what rides inside them to the
// agent. One header for both sides; libc only, because the keeper is.
//
// Transport: SOCK_STREAM unix socket at $GTRAIN_KEEPER_SOCKET, local to the machine. Every
// message is a RankFrame header in host byte order and `bytes` of body. A frame with an
// unknown kind or more than kRankFrameBytesMax of body closes the connection.
//
// The keeper understands hello and arenas; everything else it relays between rank and agent
// unread. Relayed bodies are one JSON object, the table is lines of text:
//   rank -> agent  {"type":"joined"}
//                  {"type":"exchange","sequence":N,"blob":"<base64>"}
//                  {"type":"progress","step":N,"loss":X,"samples":N,"collective":N,"waited":S,"joined":S,
//                   "stalled":S}
//                   (step.. and the last three optional: seconds in collectives that waited, since it
//                   joined, and for which checkpoints held it up; a loss that is not finite is "nan")
//                  {"type":"checkpoint","step":N,"timeline":N,"manifest":"<key>","policy":"<for people>"}
//                  {"type":"overdue","sequence":N}   asks whom exchange N waits for
//                  {"type":"link","peer":N,"text":"..."}   nothing gets to rank N's machine
//                  {"type":"compression","text":"..."}   how gradients travel, for people
//                  {"type":"restore","text":"..."}   what the state was restored from, for people
//                  {"type":"owner","text":"..."}   whose the checkpoint directory is, when that changed
//                  {"type":"storage","text":"..."}   its checkpoints cannot be read, and why; "": they can
//                  again
//                  {"type":"actors","text":"..."}   what became of an actor, for people
//                  {"type":"pause","paused":false}   of rank 0: the ranks stand still behind a step when they
//                  are asked to; true: they do
//   agent -> rank  "table N", then a line of base64 a rank
//                  "missing N", then the ranks that have not spoken, each after a blank
//                  "left", then the ranks that ended with exit code 0, each after a blank
//                  "pause", to rank 0: the generation is to be re-formed behind a step
// Between two generations (`elastic.mode: in-place`): a rank that says kRankStays answers kKeeperRevoked with
// kRankReleased, and nothing that it sends after that belongs to the ended generation. Then it waits until
// kKeeperMember gives it the environment that a new process of its next rank would have, or it is ended. Only
// a keeper whose welcome says kKeeperKeepsRanks knows these. A process that comes up beside a generation is
// told so in its welcome (kKeeperYouWait), and kKeeperRevoked follows at once: it is between two generations.
// While it waits it answers each kKeeperRevoked, which says that it could still go on.
// kRankFreeArena: the rank has unmapped an arena. Only a keeper whose welcome says kKeeperFreesArenas knows
// it. One that says kKeeperReusesArenas also takes kRankUsedArena, which asks for memory whose bytes need not
// all be zeros: it may have been another arena's, of any generation, that all of its users have unmapped. To
// such a keeper kRankFreeArena names the generation, and comes also when that is over. kRankWriter asks for a
// writer of this rank's checkpoints (docs/protocols/keeper.md). Only a keeper whose welcome says
// kKeeperHasWriters knows it. The answer is kKeeperWriter and kKeeperChannel, or kKeeperNoWriter, and may
// take as long as writers of an earlier generation hold memory. kRankAnswers: the process has something to
// say when it is asked (`gtrain actors`), which only a keeper does whose welcome says kKeeperAsksRanks. The
// question kKeeperAsks comes with a number and a text that is opaque to the keeper, and so does the answer
// kRankAnswer. The keeper keeps what a rank sent while no
// agent is connected (at most kRelayBytesMax a rank, newest progress replaces older) and delivers it to the
// next agent.
#pragma once
#include <stdint.h>

#define GTRAIN_RANK_PROTOCOL 2

enum RankFrameKind : uint16_t {
  // rank -> keeper
  kRankHello = 1,      // body: RankHello
  kRankArena = 2,      // body: RankArenaRequest; answered by kKeeperArena or kKeeperRefused
  kRankToAgent = 3,    // body: JSON
  kRankWriter = 4,     // body: RankArenaRequest; its id is echoed
  kRankFreeArena = 5,  // body: uint64_t id, or RankArenaOf; not answered
  kRankStays = 6,      // body: empty; not answered
  kRankReleased = 7,   // body: uint64_t generation; not answered
  kRankUsedArena = 8,  // body: RankUsedArenaRequest; answered as kRankArena is
  kRankAnswers = 9,    // body: empty; not answered
  kRankAnswer = 10,    // body: RankQuestion, text
  // keeper -> rank
  kKeeperWelcome = 16,    // body: empty, or uint32_t: kKeeperHasWriters and others, added up
  kKeeperRefused = 17,    // body: text
  kKeeperArena = 18,      // body: RankArenaRequest; the memfd travels as SCM_RIGHTS with the header
  kKeeperRevoked = 19,    // body: text; the generation is over, every collective must return Unavailable
  kKeeperFromAgent = 20,  // body: text
  kKeeperNotice = 21,     // body: uint32_t seconds left before preemption
  kKeeperStop = 22,       // body: text; the user asked to stop: save and exit 0 within stop_grace
  kKeeperWriter = 23,     // body: RankArenaRequest; the memfd of the save arena travels along
  kKeeperChannel = 24,  // body: RankArenaRequest, right after the above; a socket to the writer travels along
  kKeeperNoWriter = 25,  // body: text
  kKeeperMember = 26,    // body: NAME=VALUE, each with a zero byte behind it
  kKeeperAsks = 27,      // body: RankQuestion, text; answered by kRankAnswer
};

struct RankFrame {
  uint32_t bytes;  // of body
  uint16_t kind;
  uint16_t reserved;  // 0
};

struct RankHello {
  uint32_t protocol;  // GTRAIN_RANK_PROTOCOL
  uint32_t rank;
  uint64_t generation;
  char token[32];  // $GTRAIN_TOKEN, hex, made per rank and generation: proves the caller is that rank
};

struct RankQuestion {
  uint64_t id;
};

struct RankArenaRequest {
  uint64_t id;
  uint64_t bytes;
};

struct RankUsedArenaRequest {
  uint64_t id;
  uint64_t bytes;
  uint64_t zeros;  // at its start, at most `bytes`
};

struct RankArenaOf {
  uint64_t id;
  uint64_t generation;
};

enum {
  kKeeperHasWriters = 1,
  kKeeperFreesArenas = 2,
  kKeeperKeepsRanks = 4,
  kKeeperYouWait = 8,
  kKeeperReusesArenas = 16,
  kKeeperAsksRanks = 32
};

// The first four bytes of a save arena: not zero when the rank is gone and the writer needs its data no more
// (checkpoint/engine/save_arena.h). All the keeper knows of an arena's inside.
enum { kSaveArenaReleasedAt = 0 };

enum { kRankFrameBytesMax = 16 << 20, kRelayBytesMax = 1 << 20 };
