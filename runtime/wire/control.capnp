# The control plane on the wire: one ZeroMQ message is one frame, one frame is one `Message`
# (flat Cap'n Proto array, not packed). runtime/wire/codec.cc is the only reader and writer; the plain
# values behind it are runtime/core/values/messages.h.
#
# Rules that hold for every message
# - Authority comes from the key of the connection (ZAP User-Id), never from a field here.
# - A message of the head carries `epoch`; an agent refuses one lower than the highest it has seen.
# - A message about a job carries its generation; one of an old generation is dropped and counted.
# - Revoke before durable, grant after durable: `revoke` leaves at once; `startGeneration` and replies
#   leave when what they say is on the head's disk.
# - Anything may be lost, doubled or arrive late. Agents repeat what matters in the next hello
#   (`held`), the head repeats what an agent's hello shows to be missing, clients repeat under one id.
# - New fields are only added at the end; a reader treats an absent field as its default.
#   `AgentHello.protocol` names the version; neighbours one version apart work together.
#
# A normal life:
#   agent  -> head    agentHello                 (each new connection begins with it)
#   head   -> agent   agentWelcome | agentRefused
#   agent  -> head    agentHeartbeat             (every heartbeatInterval; answered by heartbeatAck)
#   client -> head    clientRequest(submit)      (answered by clientReply once the job is durable)
#   head   -> agents  startGeneration
#   agent  -> head    ranksStarted, exchangePart (answered by exchangeTable to every agent of the job),
#                     checkpointReport, logTail, rankExited (answered by ackExit)
#   head   -> agents  revoke                     (a rank failed, or a stop)
#   agent  -> head    generationGone             (no process of it is left)
#   head   -> agents  startGeneration (next one) | forgetJob (the job is over)
#
# A machine that leaves:
#   agent  -> head    noticeSeen                 (answered by ackNotice once it is durable)
#   head   -> agents  noticeRanks                (of every job that has ranks there), later revoke and startGeneration
#
# Machines that keep copies of checkpoints for a job without running its ranks:
#   head   -> agent   keepCopies                 (with the grant, and after each hello; until forgetJob)
#
# Durations are nanoseconds, never negative. Data fields are bytes as the operating system or a user's
# program made them; Text is UTF-8 for people or an id.
@0xd1c6b6a9e2f04b17;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("gtrain::wire::proto");

struct Message {
  union {
    unset @0 :Void;               # a message without content is refused
    agentHello @1 :AgentHello;
    agentHeartbeat @2 :AgentHeartbeat;
    ranksStarted @3 :RanksStarted;
    rankExited @4 :RankExit;
    generationGone @5 :GenerationGone;
    exchangePart @6 :ExchangePart;
    checkpointReport @7 :CheckpointReport;
    logTail @8 :LogTail;
    agentNote @9 :AgentNote;
    agentAnswer @10 :AgentAnswer;
    agentWelcome @11 :AgentWelcome;
    agentRefused @12 :AgentRefused;
    heartbeatAck @13 :HeartbeatAck;
    startGeneration @14 :StartGeneration;
    revoke @15 :Revoke;
    ackExit @16 :AckExit;
    exchangeTable @17 :ExchangeTable;
    forgetJob @18 :ForgetJob;
    noticeRanks @19 :NoticeRanks;
    agentQuery @20 :AgentQuery;
    agentShutdown @21 :AgentShutdown;
    agentJoin @22 :AgentJoin;
    agentJoined @23 :AgentJoined;
    clientRequest @24 :ClientRequest;
    clientReply @25 :ClientReply;
    generationDescribed @26 :GenerationDescribed;
    noticeSeen @27 :NoticeSeen;
    ackNotice @28 :AckNotice;
    exchangeMissing @29 :ExchangeMissing;
    linkDown @30 :LinkDown;
    keepCopies @31 :KeepCopies;
    ranksLeft @32 :RanksLeft;
    pauseRanks @33 :PauseRanks;
    relayedUp @34 :RelayedUp;
    relayedDown @35 :RelayedDown;
    relayReady @36 :RelayReady;
    relayFor @37 :RelayFor;
    connectVia @38 :ConnectVia;
  }
}

# ------------------------------------------------------------------ values

struct Pair { key @0 :Text; value @1 :Data; }

struct GpuInfo { uuid @0 :Text; model @1 :Text; memoryBytes @2 :UInt64; numa @3 :Int32; pciPath @4 :Text; }

struct CpuInfo { id @0 :Int32; numa @1 :Int32; }

enum NicKind { infiniband @0; roce @1; efa @2; }
struct NicInfo {
  name @0 :Text;
  kind @1 :NicKind;
  unusable @2 :Text;
  interfaces @3 :List(Data);
  mbitS @4 :UInt64;
  numa @5 :Int32;
  pciPath @6 :Text;
}
struct InterfaceInfo { name @0 :Text; addresses @1 :List(Data); }
struct Network { nics @0 :List(NicInfo); interfaces @1 :List(InterfaceInfo); }

struct Inventory {
  cpus @0 :Int32;
  cores @1 :Int32;
  numaNodes @2 :Int32;
  memoryBytes @3 :UInt64;
  gpus @4 :List(GpuInfo);
  cpuInfos @5 :List(CpuInfo);
  network @6 :Network;
}

enum ExitCause { exited @0; signal @1; oom @2; stopped @3; startFailed @4; addressInUse @5; lost @6; }

# Agent -> head as soon as the keeper has recorded the exit durably, and in every hello until acknowledged.
struct RankExit {
  job @0 :Text;
  generation @1 :UInt64;
  rank @2 :Int32;
  pid @3 :Int64;
  cause @4 :ExitCause;
  exitCode @5 :Int32;
  signal @6 :Int32;
  message @7 :Text;
  tail @8 :Data;
  storage @9 :Text;
  hasStep @10 :Bool;
  step @11 :Int64;
  hasLoss @12 :Bool;
  loss @13 :Float64;
  diverged @14 :Bool;
}

enum RankState { starting @0; running @1; joined @2; exited @3; }
enum RankPause { never @0; may @1; paused @2; }

struct RankStatus {
  job @0 :Text;
  generation @1 :UInt64;
  rank @2 :Int32;
  pid @3 :Int64;
  state @4 :RankState;
  hasStep @5 :Bool;
  step @6 :Int64;
  hasLoss @7 :Bool;
  loss @8 :Float64;
  hasSamplesPerSecond @9 :Bool;
  samplesPerSecond @10 :Float64;
  collectiveSequence @11 :UInt64;
  hasWaitedSeconds @12 :Bool;
  waitedSeconds @13 :Float64;
  hasJoinedSeconds @14 :Bool;
  joinedSeconds @15 :Float64;
  idle @16 :Int64;
  blockedIn @17 :Text;
  diverged @18 :Bool;
  stays @19 :Bool;
  hasStalledSeconds @20 :Bool;
  stalledSeconds @21 :Float64;
  pause @22 :RankPause;
  nics @23 :Text;
}

struct HeldGeneration {
  job @0 :Text;
  generation @1 :UInt64;
  revoked @2 :UInt64;
  live @3 :List(RankStatus);
  exited @4 :List(RankExit);
  stopping @5 :Bool;
}

struct ProcessId { generation @0 :UInt64; rank @1 :Int32; }
struct RankPlace {
  rank @0 :Int32;
  localRank @1 :Int32;
  node @2 :Text;
  cpus @3 :List(Int32);
  gpus @4 :List(Int32);
  process @5 :ProcessId;
  hasCell @6 :Bool;
  cell @7 :Int32;
}
struct NodePlace {
  node @0 :Text;
  address @1 :Text;
  hostname @2 :Text;
  zone @3 :Text;
  rack @4 :Text;
  nearPort @5 :Int32;
  nearKey @6 :Text;
  fabricOrder @7 :Int32;
}

struct GenerationGrant {
  job @0 :Text;
  generation @1 :UInt64;
  timeline @2 :UInt64;
  restartCount @3 :Int32;
  specText @4 :Text;
  clientEnv @5 :List(Pair);
  runDir @6 :Data;
  masterAddress @7 :Text;
  masterPort @8 :Int32;
  worldSize @9 :Int32;
  nodes @10 :List(NodePlace);
  ranks @11 :List(RankPlace);
  resume @12 :Data;
  clientKey @13 :Text;
  requestId @14 :Text;
  endWithClient @15 :Bool;
  owner @16 :Text;
  nearSecret @17 :Text;
  holders @18 :List(NodePlace);
  hasNewest @19 :Bool;
  newest @20 :CheckpointReport;
  takeover @21 :Bool;
  liveJobs @22 :List(Text);
  waiting @23 :List(RankPlace);
}

# `bytes`: a whole Message with a startGeneration that has no seal.
struct GrantSeal { bytes @0 :Data; mac @1 :Text; }

enum NoticeKind { none @0; atRisk @1; freeze @2; leave @3; }
struct NodeNotice {
  kind @0 :NoticeKind;
  left @1 :Int64;
  frozen @2 :Int64;
  source @3 :Text;
  id @4 :Text;
  raw @5 :Text;
}

# One turn of a client's talk with a program beside a rank, or with a rank; harmless when it comes twice, late or never.
struct Console {
  session @0 :Text;
  start @1 :Bool;
  argv @2 :List(Data);
  terminal @3 :Bool;
  term @4 :Data;
  rows @5 :Int32;
  columns @6 :Int32;
  inputOffset @7 :UInt64;
  input @8 :Data;
  inputEnd @9 :Bool;
  outSeen @10 :UInt64;
  errSeen @11 :UInt64;
  hangUp @12 :Bool;
}

# ------------------------------------------------------------------ agent -> head

# First message of every connection: who the node is, what it has, what it still runs.
struct AgentHello {
  cluster @0 :Text;
  incarnation @1 :Text;
  bootId @2 :Text;
  hostname @3 :Text;
  address @4 :Text;
  version @5 :Text;
  protocol @6 :Int32;
  inventory @7 :Inventory;
  labels @8 :List(Pair);
  freePorts @9 :List(Int32);
  held @10 :List(HeldGeneration);
  epoch @11 :UInt64;
  epochProof @12 :Text;
  order @13 :UInt64;
  nearPort @14 :Int32;
  nearKey @15 :Text;
  takesCopies @16 :Bool;
  copiesOf @17 :List(Text);
  keepsSeals @18 :Bool;
  kept @19 :List(KeptProcesses);
  knowsFabricOrder @20 :Bool;
  knowsRelays @21 :Bool;
  relayPort @22 :Int32;
  publicKey @23 :Text;
}
struct KeptProcesses { job @0 :Text; processes @1 :List(ProcessId); coming @2 :List(ProcessId); }

struct AgentHeartbeat { sequence @0 :UInt64; changed @1 :List(RankStatus); freePorts @2 :List(Int32); }

# Every rank of the grant on this node has been executed.
struct RanksStarted { job @0 :Text; generation @1 :UInt64; ranks @2 :List(RankStatus); }

# After a welcome with `describe`, one for each held generation.
struct GenerationDescribed {
  held @0 :HeldGeneration;
  grant @1 :GenerationGrant;
  hasCheckpoint @2 :Bool;
  checkpoint @3 :CheckpointReport;
  seal @4 :GrantSeal;
}

# No process of the generation is left on the node but those that `kept` and `coming` name, which wait for another one; the
# head grants the next one only after this, or after the node was declared lost.
struct GenerationGone {
  job @0 :Text;
  generation @1 :UInt64;
  clean @2 :Bool;
  message @3 :Text;
  kept @4 :List(ProcessId);
  coming @5 :List(ProcessId);
}

struct Blob { rank @0 :Int32; data @1 :Data; }
# One all-gather of the bootstrap exchange; the head answers every agent with exchangeTable when
# the parts of all ranks are there.
struct ExchangePart { job @0 :Text; generation @1 :UInt64; sequence @2 :UInt64; blobs @3 :List(Blob); }

struct CheckpointReport {
  job @0 :Text;
  generation @1 :UInt64;
  timeline @2 :UInt64;
  step @3 :Int64;
  manifest @4 :Data;
  policy @5 :Text;
}

# The newest output of a live rank, at most once a second: all that is kept of it (piece 0), or what came after the piece before.
struct LogTail {
  job @0 :Text;
  generation @1 :UInt64;
  rank @2 :Int32;
  isStderr @3 :Bool;
  endOffset @4 :UInt64;
  text @5 :Data;
  piece @6 :UInt64;   # 0 unless the head said joinsPieces
}

struct AgentNote { job @0 :Text; generation @1 :UInt64; rank @2 :Int32; kind @3 :Text; text @4 :Text; }

# What the cloud says of this node now, each time it changes and after each welcome, until ackNotice.
struct NoticeSeen { sequence @0 :UInt64; notice @1 :NodeNotice; }

# A rank cannot reach `peer`, a rank of another node, and still waits for it; repeated meanwhile.
struct LinkDown { job @0 :Text; generation @1 :UInt64; rank @2 :Int32; peer @3 :Int32; text @4 :Text; }

# Answer to agentQuery of the same number.
struct AgentAnswer {
  query @0 :UInt64;
  ok @1 :Bool;
  text @2 :Data;
  nextOffset @3 :UInt64;   # of a command: its exit code
  end @4 :Bool;
  err @5 :Data;
  timedOut @6 :Bool;
  taken @7 :UInt64;        # of a console
  at @8 :UInt64;           # likewise: the offset of `text`
}

# ------------------------------------------------------------------ head -> agent

struct AgentWelcome {
  cluster @0 :Text;
  epoch @1 :UInt64;
  node @2 :Text;
  heartbeatInterval @3 :Int64;
  fenceAfter @4 :Int64;
  epochProof @5 :Text;
  describe @6 :Bool;
  joinsPieces @7 :Bool;   # it knows LogTail.piece
}

# The agent logs the reason and ends; nothing it runs is touched by the refusal itself.
struct AgentRefused { reason @0 :Text; revoked @1 :Bool; }

struct HeartbeatAck { epoch @0 :UInt64; sequence @1 :UInt64; greet @2 :Bool; }

# A grant. Repeated by the head after a hello that does not show the generation; receivers take it once. With
# a seal the grant is in its bytes alone: `grant` is empty, here and in GenerationDescribed.
struct StartGeneration { epoch @0 :UInt64; grant @1 :GenerationGrant; seal @2 :GrantSeal; }

enum EndMode { reform @0; stop @1; stopNow @2; }

# Covers every generation <= `generation`; receivers keep the highest and refuse grants it covers. `keep`: with
# `reform`, processes that can go on in another generation are not ended.
struct Revoke {
  epoch @0 :UInt64;
  job @1 :Text;
  generation @2 :UInt64;
  mode @3 :EndMode;
  grace @4 :Int64;
  reason @5 :Text;
  keep @6 :Bool;
}

struct AckExit { epoch @0 :UInt64; job @1 :Text; generation @2 :UInt64; rank @3 :Int32; }

struct ExchangeTable {
  epoch @0 :UInt64;
  job @1 :Text;
  generation @2 :UInt64;
  sequence @3 :UInt64;
  blobs @4 :List(Data);
}

# To an agent that sent its part again, because its ranks ask whom they wait for.
struct ExchangeMissing {
  epoch @0 :UInt64;
  job @1 :Text;
  generation @2 :UInt64;
  sequence @3 :UInt64;
  ranks @4 :List(Int32);
}

# To the nodes of a generation: its ranks that ended with exit code 0 while others still run.
struct RanksLeft { epoch @0 :UInt64; job @1 :Text; generation @2 :UInt64; ranks @3 :List(Int32); }

# To the node of rank 0, whose RankStatus says `pause`: the generation is to be re-formed behind a step.
struct PauseRanks { epoch @0 :UInt64; job @1 :Text; generation @2 :UInt64; }

# Between an agent and the head through another agent (docs/protocols/relays.md).
enum RelayStage { open @0; answer @1; sealed @2; shared @3; over @4; lost @5; found @6; }
struct RelayPart {
  node @0 :Text;
  stage @1 :RelayStage;
  bytes @2 :Data;
  number @3 :UInt32;
  body @4 :UInt32;
  waits @5 :Bool;
}
struct RelayedUp { parts @0 :List(RelayPart); heard @1 :List(UInt32); }
struct RelayedDown { bodies @0 :List(Data); parts @1 :List(RelayPart); }
struct RelayReady { port @0 :Int32; error @1 :Text; }
struct RelayChild { node @0 :Text; publicKey @1 :Text; }
struct RelayFor { epoch @0 :UInt64; children @1 :List(RelayChild); }
struct ConnectVia { epoch @0 :UInt64; relay @1 :Text; endpoint @2 :Text; publicKey @3 :Text; }

struct ForgetJob { epoch @0 :UInt64; job @1 :Text; }

# To each node in `holders` of a grant, and after each of its hellos while the job lives; until forgetJob.
struct KeepCopies { epoch @0 :UInt64; job @1 :Text; near @2 :Data; secret @3 :Text; }

struct AckNotice { epoch @0 :UInt64; sequence @1 :UInt64; }

# To every node of a job of which a node leaves, once the notice is durable.
struct NoticeRanks { epoch @0 :UInt64; job @1 :Text; generation @2 :UInt64; left @3 :Int64; notice @4 :UInt32 = 1; }

enum QueryKind { readLog @0; stacks @1; exec @2; console @3; actors @4; }
struct AgentQuery {
  epoch @0 :UInt64;
  query @1 :UInt64;
  kind @2 :QueryKind;
  job @3 :Text;
  generation @4 :UInt64;
  rank @5 :Int32;
  isStderr @6 :Bool;
  offset @7 :UInt64;
  argv @8 :List(Data);
  bytesMax @9 :UInt64;
  apart @10 :Bool;
  full @11 :Bool;
  console @12 :Console;
}

struct AgentShutdown { epoch @0 :UInt64; reason @1 :Text; }

# ------------------------------------------------------------------ joining

# Over a connection made with a join token's key: registers the node's own key, once.
struct AgentJoin { publicKey @0 :Text; hostname @1 :Text; }
struct AgentJoined { cluster @0 :Text; node @1 :Text; }

# ------------------------------------------------------------------ client <-> head

struct ClientSubmit {
  specText @0 :Text;
  env @1 :List(Pair);
  runDir @2 :Data;
  resume @3 :Data;
  endWithClient @4 :Bool;
  takeover @5 :Bool;
}
struct ClientStop { job @0 :Text; now @1 :Bool; reason @2 :Text; }
struct ClientLogs {
  job @0 :Text;
  hasGeneration @1 :Bool;
  generation @2 :UInt64;
  rank @3 :Int32;
  isStderr @4 :Bool;
  offset @5 :UInt64;
  bytesMax @6 :UInt64;
}
struct ClientExec { job @0 :Text; rank @1 :Int32; argv @2 :List(Data); apart @3 :Bool; }
struct ClientConsole {
  job @0 :Text;
  hasGeneration @1 :Bool;
  generation @2 :UInt64;
  rank @3 :Int32;
  turn @4 :Console;
}
struct ClientStack { job @0 :Text; rank @1 :Int32; }
struct ClientActors { job @0 :Text; rank @1 :Int32; question @2 :Data; }
struct ClientScale { job @0 :Text; size @1 :Int32; now @2 :Bool; }
struct ClientEvents { job @0 :Text; after @1 :UInt64; wait @2 :Int64; }
struct ClientStatus { job @0 :Text; over @1 :Int32; places @2 :Bool; }
struct ClientWhy { job @0 :Text; }
struct ClientNodes {}
struct ClientTopology {}
struct ClientShutdown { whenIdle @0 :Bool; }
struct ClientJoinToken { uses @0 :Int32 = 1; life @1 :Int64 = 900000000000; }
struct ClientTokens {}
struct ClientRevokeToken { token @0 :Text; }
struct ClientAddUser { name @0 :Text; role @1 :Text; publicKey @2 :Text; }
struct ClientUsers {}
struct ClientRevokeUser { name @0 :Text; }
struct ClientRevokeNode { node @0 :Text; reason @1 :Text; }
struct ClientBackup { dir @0 :Data; }
struct ClientDrainNode { node @0 :Text; left @1 :Int64; reason @2 :Text; undo @3 :Bool; own @4 :Bool; }

# Repeated by the client under the same id until a reply comes; the head answers a repeated id with the first answer.
struct ClientRequest {
  id @0 :Text;
  deadline @1 :Int64;
  body :union {
    unset @2 :Void;
    submit @3 :ClientSubmit;
    stop @4 :ClientStop;
    status @5 :ClientStatus;
    why @6 :ClientWhy;
    nodes @7 :ClientNodes;
    logs @8 :ClientLogs;
    exec @9 :ClientExec;
    events @10 :ClientEvents;
    shutdown @11 :ClientShutdown;
    joinToken @12 :ClientJoinToken;
    tokens @13 :ClientTokens;
    revokeToken @14 :ClientRevokeToken;
    addUser @15 :ClientAddUser;
    users @16 :ClientUsers;
    revokeUser @17 :ClientRevokeUser;
    revokeNode @18 :ClientRevokeNode;
    backup @19 :ClientBackup;
    drainNode @20 :ClientDrainNode;
    stack @21 :ClientStack;
    scale @22 :ClientScale;
    console @23 :ClientConsole;
    actors @24 :ClientActors;
    topology @25 :ClientTopology;
  }
}

struct ClientReply { id @0 :Text; ok @1 :Bool; code @2 :Int32; error @3 :Text; json @4 :Data; }
