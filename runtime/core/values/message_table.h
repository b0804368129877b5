// The one table of the messages of the control plane: for each message who may send it and how large it may
// be, for each request of a client its name, whether it changes anything and who may make it. PURE.
//
// The codec, the check of authority and the dispatch of head and agent all read it. A message without a line
// here, or without a codec or a handler, does not compile; CONTRIBUTING.md tells the steps.
#pragma once
#include "absl/strings/string_view.h"
#include "runtime/core/values/messages.h"

namespace gtrain::core {

// The maker of a message, according to the role of its connection's key.
enum class Sender { kAny, kAgent, kClient, kHead, kJoiner };

// How large a message may be: kSmall 1 MiB, kLarge what a transport carries (wire/codec.h).
enum class Bound { kSmall, kLarge };

enum class Scope {
  kNone,
  kOwn,  // jobs of its own name; requests that name no job
  kAll,
};

// The facts about a kind of request that are known without looking inside.
struct RequestRule {
  absl::string_view name;  // in the audit log
  bool changes;            // is remembered with its answer, and audited
  Scope admin, user, readonly;
  Scope Of(Role role) const;  // kNone for every other role
};

// X(type, which is also its name in control.capnp, enumerator of the union there, who sends it, how large it
// may be)
#define GT_MESSAGES(X)                                         \
  X(AgentHello, AGENT_HELLO, kAgent, kLarge)                   \
  X(AgentHeartbeat, AGENT_HEARTBEAT, kAgent, kLarge)           \
  X(RanksStarted, RANKS_STARTED, kAgent, kLarge)               \
  X(RankExited, RANK_EXITED, kAgent, kSmall)                   \
  X(GenerationGone, GENERATION_GONE, kAgent, kSmall)           \
  X(ExchangePart, EXCHANGE_PART, kAgent, kLarge)               \
  X(CheckpointReport, CHECKPOINT_REPORT, kAgent, kSmall)       \
  X(LogTail, LOG_TAIL, kAgent, kSmall)                         \
  X(AgentNote, AGENT_NOTE, kAgent, kSmall)                     \
  X(AgentAnswer, AGENT_ANSWER, kAgent, kLarge)                 \
  X(AgentWelcome, AGENT_WELCOME, kHead, kSmall)                \
  X(AgentRefused, AGENT_REFUSED, kHead, kSmall)                \
  X(HeartbeatAck, HEARTBEAT_ACK, kHead, kSmall)                \
  X(StartGeneration, START_GENERATION, kHead, kLarge)          \
  X(Revoke, REVOKE, kHead, kSmall)                             \
  X(AckExit, ACK_EXIT, kHead, kSmall)                          \
  X(ExchangeTable, EXCHANGE_TABLE, kHead, kLarge)              \
  X(ForgetJob, FORGET_JOB, kHead, kSmall)                      \
  X(NoticeRanks, NOTICE_RANKS, kHead, kSmall)                  \
  X(AgentQuery, AGENT_QUERY, kHead, kSmall)                    \
  X(AgentShutdown, AGENT_SHUTDOWN, kHead, kSmall)              \
  X(AgentJoin, AGENT_JOIN, kJoiner, kSmall)                    \
  X(AgentJoined, AGENT_JOINED, kHead, kSmall)                  \
  X(ClientRequest, CLIENT_REQUEST, kClient, kLarge)            \
  X(ClientReply, CLIENT_REPLY, kHead, kLarge)                  \
  X(GenerationDescribed, GENERATION_DESCRIBED, kAgent, kLarge) \
  X(NoticeSeen, NOTICE_SEEN, kAgent, kSmall)                   \
  X(AckNotice, ACK_NOTICE, kHead, kSmall)                      \
  X(ExchangeMissing, EXCHANGE_MISSING, kHead, kSmall)          \
  X(LinkDown, LINK_DOWN, kAgent, kSmall)                       \
  X(KeepCopies, KEEP_COPIES, kHead, kSmall)                    \
  X(RanksLeft, RANKS_LEFT, kHead, kSmall)                      \
  X(PauseRanks, PAUSE_RANKS, kHead, kSmall)                    \
  X(RelayedUp, RELAYED_UP, kAgent, kLarge)                     \
  X(RelayedDown, RELAYED_DOWN, kHead, kLarge)                  \
  X(RelayReady, RELAY_READY, kAgent, kSmall)                   \
  X(RelayFor, RELAY_FOR, kHead, kSmall)                        \
  X(ConnectVia, CONNECT_VIA, kHead, kSmall)

// X(type, its name in control.capnp, enumerator there, name for people, changes, admin, user, readonly). The
// list of all jobs, without their output, is for everyone who may read.
#define GT_REQUESTS(X)                                                                      \
  X(ClientSubmit, Submit, SUBMIT, "submit", true, kAll, kOwn, kNone)                        \
  X(ClientStop, Stop, STOP, "stop", true, kAll, kOwn, kNone)                                \
  X(ClientStatus, Status, STATUS, "status", false, kAll, kOwn, kAll)                        \
  X(ClientWhy, Why, WHY, "why", false, kAll, kOwn, kAll)                                    \
  X(ClientNodes, Nodes, NODES, "nodes", false, kAll, kAll, kAll)                            \
  X(ClientLogs, Logs, LOGS, "logs", false, kAll, kOwn, kAll)                                \
  X(ClientExec, Exec, EXEC, "exec", true, kAll, kOwn, kNone)                                \
  X(ClientEvents, Events, EVENTS, "events", false, kAll, kOwn, kAll)                        \
  X(ClientShutdown, Shutdown, SHUTDOWN, "shutdown", true, kAll, kNone, kNone)               \
  X(ClientJoinToken, JoinToken, JOIN_TOKEN, "token create", true, kAll, kNone, kNone)       \
  X(ClientTokens, Tokens, TOKENS, "token ls", false, kAll, kNone, kNone)                    \
  X(ClientRevokeToken, RevokeToken, REVOKE_TOKEN, "token revoke", true, kAll, kNone, kNone) \
  X(ClientAddUser, AddUser, ADD_USER, "user add", true, kAll, kNone, kNone)                 \
  X(ClientUsers, Users, USERS, "user ls", false, kAll, kNone, kNone)                        \
  X(ClientRevokeUser, RevokeUser, REVOKE_USER, "user revoke", true, kAll, kNone, kNone)     \
  X(ClientRevokeNode, RevokeNode, REVOKE_NODE, "node revoke", true, kAll, kNone, kNone)     \
  X(ClientBackup, Backup, BACKUP, "backup", true, kAll, kNone, kNone)                       \
  X(ClientDrainNode, DrainNode, DRAIN_NODE, "node drain", true, kAll, kNone, kNone)         \
  X(ClientStack, Stack, STACK, "stack", true, kAll, kOwn, kNone)                            \
  X(ClientScale, Scale, SCALE, "scale", true, kAll, kOwn, kNone)                            \
  X(ClientConsole, Console, CONSOLE, "console", true, kAll, kOwn, kNone)                    \
  X(ClientActors, Actors, ACTORS, "actors", false, kAll, kOwn, kAll)                        \
  X(ClientTopology, Topology, TOPOLOGY, "topology", false, kAll, kAll, kAll)

// The lines by type. There is none for a type that is not in the table, so asking for one does not compile.
template <typename M>
inline constexpr Sender kSenderOf = [] { static_assert(sizeof(M) == 0, "it is not in GT_MESSAGES"); }();
template <typename R>
inline constexpr RequestRule kRuleOf = [] { static_assert(sizeof(R) == 0, "it is not in GT_REQUESTS"); }();
#define GT_LINE(Type, ENUM, sender, bound) \
  template <>                              \
  inline constexpr Sender kSenderOf<Type> = Sender::sender;
GT_MESSAGES(GT_LINE)
#undef GT_LINE
#define GT_LINE(Type, Method, ENUM, name, changes, admin, user, readonly) \
  template <>                                                             \
  inline constexpr RequestRule kRuleOf<Type> = {name, changes, Scope::admin, Scope::user, Scope::readonly};
GT_REQUESTS(GT_LINE)
#undef GT_LINE

}  // namespace gtrain::core
