# What the head keeps on disk: one `Record` per key, see docs/formats/records.md for keys and the header
# in front of each value. The plain values are runtime/core/values/records.h. New fields are only added at the end.
@0xe1f2a7c04d5b9683;

using Cxx = import "/capnp/c++.capnp";
using Control = import "control.capnp";
$Cxx.namespace("gtrain::wire::proto");

struct Record {
  union {
    unset @0 :Void;
    cluster @1 :ClusterRecord;
    node @2 :NodeRecord;
    job @3 :JobRecord;
    request @4 :RequestRecord;
    checkpoint @5 :CheckpointRecord;
    jobSubmission @6 :JobSubmission;
    jobStatus @7 :JobStatusRecord;
    jobGrant @8 :JobGrantRecord;
    jobExit @9 :JobExitRecord;
    jobFault @10 :JobFaultRecord;
    jobUnreleased @11 :JobUnreleasedRecord;
    jobExits @12 :JobExitsRecord;
  }
}

enum JobState { queued @0; waiting @1; starting @2; running @3; reconfiguring @4; succeeded @5; failed @6; cancelled @7; }
enum Ending { none @0; reform @1; replace @2; cancel @3; fail @4; }
enum FaultKind { crash @0; oom @1; infrastructure @2; saved @3; addressInUse @4; preempted @5; }

struct FaultRecord {
  generation @0 :UInt64;
  kind @1 :FaultKind;
  rank @2 :Int32;
  node @3 :Text;
  hostname @4 :Text;
  cause @5 :Control.ExitCause;
  exitCode @6 :Int32;
  signal @7 :Int32;
  message @8 :Text;
  tail @9 :Data;
  signature @10 :Data;
  hasStep @11 :Bool;
  step @12 :Int64;
  progressed @13 :Bool;
  # A storage fault is written with kind `preempted`, which an older head charges to nobody, too.
  storage @14 :Bool;
  tries @15 :Int32 = 1;
  hasCommitted @16 :Bool;
  committed @17 :Int64;
  at @18 :Int64;  # nanoseconds since 1970; 0: not known
}

struct AvoidedNode { node @0 :Text; why @1 :Text; }

# Rank-seconds by label (runtime/core/values/goodput.h).
struct Goodput {
  since @0 :Int64;  # as FaultRecord.at
  at @1 :Int64;
  seconds @2 :List(Float64);  # in the order of TimeLabel; what is missing is 0
  open @3 :Float64;
  over @4 :Bool;
  stepped @5 :UInt64;
  repeats @6 :Bool;
  idleSaid @7 :Bool;
  stallSaid @8 :Bool;
  hasFirst @9 :Bool;
  first @10 :Int64;
  hasTop @11 :Bool;
  top @12 :Int64;
  hasAtStep @13 :Bool;
  atStep @14 :Int64;
  hasRedoneTo @15 :Bool;
  redoneTo @16 :Int64;
  redone @17 :Int64;
  losses @18 :Int32;
  wanted @19 :Int32;
}

# A whole job, as older heads wrote it. Read and never written: new fields go into the structs below.
struct JobRecord {
  id @0 :Text;
  number @1 :UInt64;
  name @2 :Text;
  specText @3 :Text;
  env @4 :List(Control.Pair);
  runDir @5 :Data;
  resume @6 :Data;
  clientKey @7 :Text;
  requestId @8 :Text;
  endWithClient @9 :Bool;
  state @10 :JobState;
  reason @11 :Text;
  generation @12 :UInt64;
  revoked @13 :UInt64;
  timeline @14 :UInt64;
  hasGrant @15 :Bool;
  grant @16 :Control.GenerationGrant;
  ending @17 :Ending;
  endingReason @18 :Text;
  exits @19 :List(Control.RankExit);
  unreleased @20 :List(Text);
  kept @21 :List(Text);
  restarts @22 :Int32;
  faults @23 :List(FaultRecord);
  runTime @24 :Int64;
  hasExitCode @25 :Bool;
  exitCode @26 :Int32;
  eventSequence @27 :UInt64;
  owner @28 :Text;
  avoided @29 :List(AvoidedNode);
  takeover @30 :Bool;
  waitsForStorage @31 :Bool;
  runTimeAt @32 :Int64;  # as FaultRecord.at
  sdk @33 :Bool;
  takeoverOwn @34 :Bool;
  submittedAt @35 :Int64;
  startedAt @36 :Int64;
  endedAt @37 :Int64;
  hasLastStep @38 :Bool;
  lastStep @39 :Int64;
  hasLastLoss @40 :Bool;
  lastLoss @41 :Float64;
  sizeWanted @42 :Int32;
  diverged @43 :Bool;
  goodput @44 :Goodput;
  afterSave @45 :Ending;
  afterSaveReason @46 :Text;
  saves @47 :Bool;
}

struct JobSubmission {
  id @0 :Text;
  number @1 :UInt64;
  name @2 :Text;
  specText @3 :Text;
  env @4 :List(Control.Pair);
  runDir @5 :Data;
  resume @6 :Data;
  clientKey @7 :Text;
  owner @8 :Text;
  requestId @9 :Text;
  endWithClient @10 :Bool;
  takeover @11 :Bool;
  takeoverOwn @12 :Bool;
  submittedAt @13 :Int64;  # as FaultRecord.at
}

struct JobStatus {
  state @0 :JobState;
  reason @1 :Text;
  generation @2 :UInt64;
  revoked @3 :UInt64;
  timeline @4 :UInt64;
  ending @5 :Ending;
  endingReason @6 :Text;
  restarts @7 :Int32;
  runTime @8 :Int64;
  runTimeAt @9 :Int64;  # as FaultRecord.at
  sdk @10 :Bool;
  hasExitCode @11 :Bool;
  exitCode @12 :Int32;
  eventSequence @13 :UInt64;
  avoided @14 :List(AvoidedNode);
  waitsForStorage @15 :Bool;
  startedAt @16 :Int64;  # as FaultRecord.at
  endedAt @17 :Int64;
  hasLastStep @18 :Bool;
  lastStep @19 :Int64;
  hasLastLoss @20 :Bool;
  lastLoss @21 :Float64;
  sizeWanted @22 :Int32;
  diverged @23 :Bool;
  goodput @24 :Goodput;
  afterSave @25 :Ending;
  afterSaveReason @26 :Text;
  saves @27 :Bool;
}

struct JobStatusRecord {
  job @0 :Text;
  status @1 :JobStatus;
  # What other records the job has.
  grant @2 :UInt64;  # its generation; 0: none
  exits @3 :Int32;
  faults @4 :List(UInt64);  # their generations
  unreleased @5 :Int32;
  packed @6 :Int32;  # of the exits, how many lie in JobExitsRecords
}

struct JobGrantRecord { job @0 :Text; grant @1 :Control.GenerationGrant; kept @2 :List(Text); }
struct JobExitRecord { job @0 :Text; index @1 :Int32; exit @2 :Control.RankExit; }
struct JobExitsRecord { job @0 :Text; first @1 :Int32; exits @2 :List(Control.RankExit); }
struct JobFaultRecord { job @0 :Text; fault @1 :FaultRecord; }
struct JobUnreleasedRecord { job @0 :Text; nodes @1 :List(Text); }

struct NodeRecord {
  id @0 :Text;
  incarnation @1 :Text;
  bootId @2 :Text;
  hostname @3 :Text;
  address @4 :Text;
  version @5 :Text;
  inventory @6 :Control.Inventory;
  labels @7 :List(Control.Pair);
  unclean @8 :Bool;
  notice @9 :Control.NodeNotice;
  drain @10 :Control.NodeNotice;
}

struct ClusterRecord { cluster @0 :Text; epoch @1 :UInt64; nextJob @2 :UInt64; nextRequest @3 :UInt64; recovering @4 :Bool; superseded @5 :UInt64; acceptUnsealed @6 :Bool; }

struct RequestRecord { clientKey @0 :Text; requestId @1 :Text; number @2 :UInt64; reply @3 :Control.ClientReply; }

struct CheckpointRecord {
  job @0 :Text;
  generation @1 :UInt64;
  timeline @2 :UInt64;
  step @3 :Int64;
  manifest @4 :Data;
  count @5 :UInt64;
}
