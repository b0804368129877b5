// Private to runtime/wire: the fields of every struct of runtime/core/values/messages.h, in its order.
#pragma once
#include "runtime/core/values/messages.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/control.capnp.h"
#include "runtime/wire/fields.h"

namespace gtrain::wire {

inline constexpr int kRanksMax = 1 << 16;     // of one job
inline constexpr int kIndexMax = 1 << 20;     // hardware threads, GPUs, counts
inline constexpr size_t kNameBytesMax = 512;  // host names, addresses, versions, kinds
inline constexpr size_t kSentenceBytesMax = 16 << 10;
inline constexpr size_t kTailBytesMax = 64 << 10;
inline constexpr size_t kCpusMax = 8192;        // hardware threads of a machine; Linux on x86 has no more
inline constexpr size_t kNicsMax = 1024;        // ports, interfaces, addresses of one; as of GPUs
inline constexpr size_t kNicsBytesMax = 4096;   // their names in a text
inline constexpr size_t kRelayPartsMax = 4096;  // of one frame through a relay
inline constexpr size_t kSpecBytesMax = 1 << 20;
inline constexpr size_t kBulkBytesMax = 16 << 20;
inline constexpr int64_t kInt32Min = std::numeric_limits<int32_t>::min();
inline constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
inline constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

GT_FIELDS(core::GpuInfo) {
  GT_TEXT(uuid, Uuid, kNameBytesMax);
  GT_TEXT(model, Model, kNameBytesMax);
  GT_PLAIN(memory_bytes, MemoryBytes);
  GT_NUMBER(numa, Numa, -1, kIndexMax);
  GT_TEXT(pci_path, PciPath, kNameBytesMax);
}
GT_FIELDS(core::NicInfo) {
  GT_TEXT(name, Name, kNameBytesMax);
  GT_ENUM(kind, Kind, core::NicKind::kEfa);
  GT_TEXT(unusable, Unusable, kNameBytesMax);
  GT_BYTES_LIST(interfaces, Interfaces, kNicsMax, kNameBytesMax);
  GT_PLAIN(mbit_s, MbitS);
  GT_NUMBER(numa, Numa, -1, kIndexMax);
  GT_TEXT(pci_path, PciPath, kNameBytesMax);
}
GT_FIELDS(core::InterfaceInfo) {
  GT_TEXT(name, Name, kNameBytesMax);
  GT_BYTES_LIST(addresses, Addresses, kNicsMax, kNameBytesMax);
}
GT_FIELDS(core::Network) {
  GT_LIST(nics, Nics, kNicsMax);
  GT_LIST(interfaces, Interfaces, kNicsMax);
}
GT_FIELDS(core::CpuInfo) {
  GT_NUMBER(id, Id, 0, kIndexMax);
  GT_NUMBER(numa, Numa, -1, kIndexMax);
}
GT_FIELDS(core::Inventory) {
  GT_NUMBER(cpus, Cpus, 0, kIndexMax);
  GT_NUMBER(cores, Cores, 0, kIndexMax);
  GT_NUMBER(numa_nodes, NumaNodes, 0, kIndexMax);
  GT_PLAIN(memory_bytes, MemoryBytes);
  GT_LIST(gpus, Gpus, 1024);
  GT_LIST(cpu_infos, CpuInfos, kCpusMax);
  GT_STRUCT(network, Network);
}
GT_FIELDS(core::RankExit) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_NUMBER(pid, Pid, -1, kInt64Max);
  GT_ENUM(cause, Cause, core::ExitCause::kLost);
  GT_NUMBER(exit_code, ExitCode, kInt32Min, kInt32Max);
  GT_NUMBER(signal, Signal, 0, 1024);
  GT_TEXT(message, Message, kSentenceBytesMax);
  GT_TAIL(tail, Tail, kTailBytesMax);
  GT_TEXT(storage, Storage, kSentenceBytesMax);
  GT_OPTIONAL(step, Step);
  GT_OPTIONAL(loss, Loss);
  GT_PLAIN(diverged, Diverged);
}
GT_FIELDS(core::RankStatus) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_NUMBER(pid, Pid, -1, kInt64Max);
  GT_ENUM(state, State, core::RankState::kExited);
  GT_OPTIONAL(step, Step);
  GT_OPTIONAL(loss, Loss);
  GT_OPTIONAL(samples_per_second, SamplesPerSecond);
  GT_PLAIN(collective_sequence, CollectiveSequence);
  GT_OPTIONAL(waited_seconds, WaitedSeconds);
  GT_OPTIONAL(joined_seconds, JoinedSeconds);
  GT_DURATION(idle, Idle);
  GT_TEXT(blocked_in, BlockedIn, kNameBytesMax);
  GT_PLAIN(diverged, Diverged);
  GT_PLAIN(stays, Stays);
  GT_OPTIONAL(stalled_seconds, StalledSeconds);
  GT_ENUM(pause, Pause, core::RankPause::kPaused);
  GT_TEXT(nics, Nics, kNicsBytesMax);
}
GT_FIELDS(core::HeldGeneration) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_COUNTER(revoked, Revoked);
  GT_LIST(live, Live, kRanksMax);
  GT_LIST(exited, Exited, kRanksMax);
  GT_PLAIN(stopping, Stopping);
}
GT_FIELDS(core::ProcessId) {
  GT_COUNTER(generation, Generation);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
}
GT_FIELDS(core::RankPlace) {
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_NUMBER(local_rank, LocalRank, 0, kRanksMax);
  GT_ID(node, Node);
  GT_NUMBER_LIST(cpus, Cpus, 65536, 0, kIndexMax);
  GT_NUMBER_LIST(gpus, Gpus, 1024, 0, kIndexMax);
  GT_STRUCT(process, Process);
  if constexpr (kReading<M>) {
    if (m.getHasCell()) v.cell.emplace();
  } else {
    m.setHasCell(v.cell.has_value());
  }
  if (v.cell) {
    GT_NUMBER(cell.value(), Cell, 0, kRanksMax);
  }
}
GT_FIELDS(core::NodePlace) {
  GT_ID(node, Node);
  GT_TEXT(address, Address, kNameBytesMax);
  GT_TEXT(hostname, Hostname, kNameBytesMax);
  GT_TEXT(zone, Zone, kNameBytesMax);
  GT_TEXT(rack, Rack, kNameBytesMax);
  GT_NUMBER(near_port, NearPort, 0, 65535);
  GT_TEXT(near_key, NearKey, kNameBytesMax);
  GT_NUMBER(fabric_order, FabricOrder, 0, kRanksMax);
}
GT_FIELDS(core::CheckpointReport) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_COUNTER(timeline, Timeline);
  GT_NUMBER(step, Step, 0, kInt64Max);
  GT_BYTES(manifest, Manifest, 4096);
  GT_TEXT(policy, Policy, kNameBytesMax);
}
GT_FIELDS(core::GenerationGrant) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_COUNTER(timeline, Timeline);
  GT_NUMBER(restart_count, RestartCount, 0, kInt32Max);
  GT_TEXT(spec_text, SpecText, kSpecBytesMax);
  GT_MAP(client_env, ClientEnv, 10000);
  GT_BYTES(run_dir, RunDir, 4096);
  GT_BYTES(resume, Resume, 4096);
  GT_TEXT(master_address, MasterAddress, kNameBytesMax);
  GT_NUMBER(master_port, MasterPort, 0, 65535);
  GT_NUMBER(world_size, WorldSize, 0, kRanksMax);
  GT_LIST(nodes, Nodes, kRanksMax);
  GT_LIST(ranks, Ranks, kRanksMax);
  GT_ID_OR_EMPTY(client_key, ClientKey);
  GT_ID_OR_EMPTY(request_id, RequestId);
  GT_PLAIN(end_with_client, EndWithClient);
  GT_TEXT(owner, Owner, kNameBytesMax);
  GT_TEXT(near_secret, NearSecret, kNameBytesMax);
  GT_LIST(holders, Holders, kRanksMax);
  if constexpr (kReading<M>) {
    if (m.getHasNewest()) Fields(a, m.getNewest(), v.newest.emplace());
  } else if (v.newest) {
    m.setHasNewest(true);
    Fields(a, m.initNewest(), *v.newest);
  }
  GT_PLAIN(takeover, Takeover);
  GT_ID_LIST(live_jobs, LiveJobs, core::kLiveJobsToldMax);
  GT_LIST(waiting, Waiting, kRanksMax);
}

GT_FIELDS(core::GrantSeal) {
  GT_BYTES(bytes, Bytes, kMessageBytesMax);
  GT_TEXT(mac, Mac, kNameBytesMax);
}
// codec.cc. The grant in the bytes of a seal; an error for bytes that have a seal themselves.
void ReadSealed(Archive& a, absl::string_view bytes, core::GenerationGrant& grant);
// The grant and the seal of a struct that has both.
template <class M, class V>
void SealedGrant(Archive& a, M m, V& v) {
  if constexpr (kReading<M>) {
    if (m.hasSeal()) Fields(a, m.getSeal(), v.seal);
    if (!v.seal.bytes.empty()) return ReadSealed(a, v.seal.bytes, v.grant);
  } else if (!v.seal.bytes.empty()) {
    return Fields(a, m.initSeal(), v.seal);
  }
  GT_STRUCT(grant, Grant);
}

GT_FIELDS(core::NodeNotice) {
  GT_ENUM(kind, Kind, core::NoticeKind::kLeave);
  GT_DURATION(left, Left);
  GT_DURATION(frozen, Frozen);
  GT_TEXT(source, Source, kNameBytesMax);
  GT_TEXT(id, Id, kNameBytesMax);
  GT_TEXT(raw, Raw, kSentenceBytesMax);
}

// agent -> head
GT_FIELDS(core::KeptProcesses) {
  GT_ID(job, Job);
  GT_LIST(processes, Processes, kRanksMax);
  GT_LIST(coming, Coming, kRanksMax);
}
GT_FIELDS(core::AgentHello) {
  GT_ID_OR_EMPTY(cluster, Cluster);
  GT_ID(incarnation, Incarnation);
  GT_ID_OR_EMPTY(boot_id, BootId);
  GT_TEXT(hostname, Hostname, kNameBytesMax);
  GT_TEXT(address, Address, kNameBytesMax);
  GT_TEXT(version, Version, kNameBytesMax);
  GT_NUMBER(protocol, Protocol, 0, 65535);
  GT_STRUCT(inventory, Inventory);
  GT_MAP(labels, Labels, 1000);
  GT_NUMBER_LIST(free_ports, FreePorts, 1024, 1, 65535);
  GT_LIST(held, Held, 10000);
  GT_COUNTER(epoch, Epoch);
  GT_TEXT(epoch_proof, EpochProof, kNameBytesMax);
  GT_PLAIN(order, Order);
  GT_NUMBER(near_port, NearPort, 0, 65535);
  GT_TEXT(near_key, NearKey, kNameBytesMax);
  GT_PLAIN(takes_copies, TakesCopies);
  GT_ID_LIST(copies_of, CopiesOf, 10000);
  GT_PLAIN(keeps_seals, KeepsSeals);
  GT_PLAIN(knows_fabric_order, KnowsFabricOrder);
  GT_LIST(kept, Kept, 10000);
  GT_PLAIN(knows_relays, KnowsRelays);
  GT_NUMBER(relay_port, RelayPort, 0, 65535);
  GT_TEXT(public_key, PublicKey, kNameBytesMax);
}
GT_FIELDS(core::AgentHeartbeat) {
  GT_PLAIN(sequence, Sequence);
  GT_LIST(changed, Changed, kRanksMax);
  GT_NUMBER_LIST(free_ports, FreePorts, 1024, 1, 65535);
}
GT_FIELDS(core::RanksStarted) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_LIST(ranks, Ranks, kRanksMax);
}
GT_FIELDS(core::RankExited) { Fields(a, m, v.exit); }
GT_FIELDS(core::GenerationGone) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_PLAIN(clean, Clean);
  GT_TEXT(message, Message, kSentenceBytesMax);
  GT_LIST(kept, Kept, kRanksMax);
  GT_LIST(coming, Coming, kRanksMax);
}
template <class M, class V>
requires std::is_same_v<std::remove_const_t<V>, std::pair<int, std::string>>
void Fields(Archive& a, M m, V& v) {
  GT_NUMBER(first, Rank, 0, kRanksMax);
  GT_BYTES(second, Data, kBulkBytesMax);
}
GT_FIELDS(core::ExchangePart) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_PLAIN(sequence, Sequence);
  GT_LIST(blobs, Blobs, kRanksMax);
}
GT_FIELDS(core::GenerationDescribed) {
  GT_STRUCT(held, Held);
  SealedGrant(a, m, v);
  if constexpr (kReading<M>) {
    if (m.getHasCheckpoint()) Fields(a, m.getCheckpoint(), v.checkpoint.emplace());
  } else {
    m.setHasCheckpoint(v.checkpoint.has_value());
    if (v.checkpoint) Fields(a, m.initCheckpoint(), *v.checkpoint);
  }
}
GT_FIELDS(core::LogTail) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_PLAIN(is_stderr, IsStderr);
  GT_PLAIN(end_offset, EndOffset);
  GT_TAIL(text, Text, kTailBytesMax);
  GT_PLAIN(piece, Piece);
}
GT_FIELDS(core::AgentNote) {
  GT_ID_OR_EMPTY(job, Job);
  GT_COUNTER(generation, Generation);
  GT_NUMBER(rank, Rank, -1, kRanksMax);
  GT_TEXT(kind, Kind, kNameBytesMax);
  GT_TEXT(text, Text, kSpecBytesMax / 2);
}
GT_FIELDS(core::NoticeSeen) {
  GT_PLAIN(sequence, Sequence);
  GT_STRUCT(notice, Notice);
}
GT_FIELDS(core::LinkDown) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_NUMBER(peer, Peer, 0, kRanksMax);
  GT_TEXT(text, Text, kNameBytesMax);
}
GT_FIELDS(core::AgentAnswer) {
  GT_PLAIN(query, Query);
  GT_PLAIN(ok, Ok);
  GT_BYTES(text, Text, kSpecBytesMax);
  GT_PLAIN(next_offset, NextOffset);
  GT_PLAIN(end, End);
  GT_BYTES(err, Err, kSpecBytesMax);
  GT_PLAIN(timed_out, TimedOut);
  GT_PLAIN(taken, Taken);
  GT_PLAIN(at, At);
}

// head -> agent
GT_FIELDS(core::AgentWelcome) {
  GT_ID(cluster, Cluster);
  GT_COUNTER(epoch, Epoch);
  GT_ID(node, Node);
  GT_DURATION(heartbeat_interval, HeartbeatInterval);
  GT_DURATION(fence_after, FenceAfter);
  GT_TEXT(epoch_proof, EpochProof, kNameBytesMax);
  GT_PLAIN(describe, Describe);
  GT_PLAIN(joins_pieces, JoinsPieces);
}
GT_FIELDS(core::AgentRefused) {
  GT_TEXT(reason, Reason, kSentenceBytesMax);
  GT_PLAIN(revoked, Revoked);
}
GT_FIELDS(core::HeartbeatAck) {
  GT_COUNTER(epoch, Epoch);
  GT_PLAIN(sequence, Sequence);
  GT_PLAIN(greet, Greet);
}
GT_FIELDS(core::StartGeneration) {
  GT_COUNTER(epoch, Epoch);
  SealedGrant(a, m, v);
}
GT_FIELDS(core::Revoke) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_ENUM(mode, Mode, core::EndMode::kStopNow);
  GT_DURATION(grace, Grace);
  GT_TEXT(reason, Reason, kSentenceBytesMax);
  GT_PLAIN(keep, Keep);
}
GT_FIELDS(core::AckExit) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
}
GT_FIELDS(core::ExchangeTable) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_PLAIN(sequence, Sequence);
  GT_BYTES_LIST(blobs, Blobs, kRanksMax, kBulkBytesMax);
}
GT_FIELDS(core::ExchangeMissing) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_PLAIN(sequence, Sequence);
  GT_NUMBER_LIST(ranks, Ranks, kRanksMax, 0, kRanksMax);
}
GT_FIELDS(core::RanksLeft) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_NUMBER_LIST(ranks, Ranks, kRanksMax, 0, kRanksMax);
}
GT_FIELDS(core::PauseRanks) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
}
GT_FIELDS(core::RelayPart) {
  GT_ID(node, Node);
  GT_ENUM(stage, Stage, core::RelayStage::kFound);
  GT_BYTES(bytes, Bytes, kBulkBytesMax);
  GT_PLAIN(number, Number);
  GT_PLAIN(body, Body);
  GT_PLAIN(waits, Waits);
}
GT_FIELDS(core::RelayedUp) {
  GT_LIST(parts, Parts, kRelayPartsMax);
  GT_NUMBER_LIST(heard, Heard, kRelayPartsMax, 0, std::numeric_limits<uint32_t>::max());
}
GT_FIELDS(core::RelayedDown) {
  GT_BYTES_LIST(bodies, Bodies, kRelayPartsMax, kBulkBytesMax);
  GT_LIST(parts, Parts, kRelayPartsMax);
}
GT_FIELDS(core::RelayReady) {
  GT_NUMBER(port, Port, 0, 65535);
  GT_TEXT(error, Error, kSentenceBytesMax);
}
GT_FIELDS(core::RelayChild) {
  GT_ID(node, Node);
  GT_TEXT(public_key, PublicKey, kNameBytesMax);
}
GT_FIELDS(core::RelayFor) {
  GT_COUNTER(epoch, Epoch);
  GT_LIST(children, Children, kRelayPartsMax);
}
GT_FIELDS(core::ConnectVia) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(relay, Relay);
  GT_TEXT(endpoint, Endpoint, kNameBytesMax);
  GT_TEXT(public_key, PublicKey, kNameBytesMax);
}
GT_FIELDS(core::ForgetJob) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(job, Job);
}
GT_FIELDS(core::AckNotice) {
  GT_COUNTER(epoch, Epoch);
  GT_PLAIN(sequence, Sequence);
}
GT_FIELDS(core::KeepCopies) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(job, Job);
  GT_BYTES(near, Near, 4096);
  GT_TEXT(secret, Secret, kNameBytesMax);
}
GT_FIELDS(core::NoticeRanks) {
  GT_COUNTER(epoch, Epoch);
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_DURATION(left, Left);
  GT_PLAIN(notice, Notice);
}
GT_FIELDS(core::Console) {
  GT_ID_OR_EMPTY(session, Session);
  GT_PLAIN(start, Start);
  GT_BYTES_LIST(argv, Argv, 10000, kSpecBytesMax);
  GT_PLAIN(terminal, Terminal);
  GT_BYTES(term, Term, kNameBytesMax);
  GT_NUMBER(rows, Rows, 0, 65535);
  GT_NUMBER(columns, Columns, 0, 65535);
  GT_PLAIN(input_offset, InputOffset);
  GT_BYTES(input, Input, core::kConsoleBytes);
  GT_PLAIN(input_end, InputEnd);
  GT_PLAIN(out_seen, OutSeen);
  GT_PLAIN(err_seen, ErrSeen);
  GT_PLAIN(hang_up, HangUp);
}
GT_FIELDS(core::AgentQuery) {
  GT_COUNTER(epoch, Epoch);
  GT_PLAIN(query, Query);
  GT_ENUM(kind, Kind, core::AgentQuery::Kind::kActors);
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_PLAIN(is_stderr, IsStderr);
  GT_PLAIN(offset, Offset);
  GT_PLAIN(bytes_max, BytesMax);
  GT_BYTES_LIST(argv, Argv, 10000, kSpecBytesMax);
  GT_PLAIN(apart, Apart);
  GT_PLAIN(full, Full);
  GT_STRUCT(console, Console);
}
GT_FIELDS(core::AgentShutdown) {
  GT_COUNTER(epoch, Epoch);
  GT_TEXT(reason, Reason, kSentenceBytesMax);
}
GT_FIELDS(core::AgentJoin) {
  GT_TEXT(public_key, PublicKey, 40);
  GT_TEXT(hostname, Hostname, kNameBytesMax);
}
GT_FIELDS(core::AgentJoined) {
  GT_ID(cluster, Cluster);
  GT_ID(node, Node);
}

// client <-> head
GT_FIELDS(core::ClientSubmit) {
  GT_TEXT(spec_text, SpecText, kSpecBytesMax);
  GT_MAP(env, Env, 10000);
  GT_BYTES(run_dir, RunDir, 4096);
  GT_BYTES(resume, Resume, 4096);
  GT_PLAIN(end_with_client, EndWithClient);
  GT_PLAIN(takeover, Takeover);
}
GT_FIELDS(core::ClientStop) {
  GT_ID(job, Job);
  GT_PLAIN(now, Now);
  GT_TEXT(reason, Reason, kSentenceBytesMax);
}
GT_FIELDS(core::ClientStatus) {
  GT_ID_OR_EMPTY(job, Job);
  GT_NUMBER(over, Over, 0, core::ClientStatus::kOverMax);
  GT_PLAIN(places, Places);
}
GT_FIELDS(core::ClientWhy) { GT_ID(job, Job); }
GT_FIELDS(core::ClientNodes) {}
GT_FIELDS(core::ClientTopology) {}
GT_FIELDS(core::ClientLogs) {
  GT_ID(job, Job);
  GT_OPTIONAL(generation, Generation);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_PLAIN(is_stderr, IsStderr);
  GT_PLAIN(offset, Offset);
  GT_PLAIN(bytes_max, BytesMax);
}
GT_FIELDS(core::ClientExec) {
  GT_ID(job, Job);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_BYTES_LIST(argv, Argv, 10000, kSpecBytesMax);
  GT_PLAIN(apart, Apart);
}
GT_FIELDS(core::ClientConsole) {
  GT_ID(job, Job);
  GT_OPTIONAL(generation, Generation);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_STRUCT(turn, Turn);
}
GT_FIELDS(core::ClientStack) {
  GT_ID(job, Job);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
}
GT_FIELDS(core::ClientActors) {
  GT_ID(job, Job);
  GT_NUMBER(rank, Rank, 0, kRanksMax);
  GT_BYTES(question, Question, core::kQuestionBytesMax);
}
GT_FIELDS(core::ClientScale) {
  GT_ID(job, Job);
  GT_NUMBER(size, Size, 1, kRanksMax);
  GT_PLAIN(now, Now);
}
GT_FIELDS(core::ClientEvents) {
  GT_ID_OR_EMPTY(job, Job);
  GT_PLAIN(after, After);
  GT_DURATION(wait, Wait);
}
GT_FIELDS(core::ClientShutdown) { GT_PLAIN(when_idle, WhenIdle); }
GT_FIELDS(core::ClientJoinToken) {
  GT_NUMBER(uses, Uses, 1, 10000);
  GT_DURATION(life, Life);
}
GT_FIELDS(core::ClientTokens) {}
GT_FIELDS(core::ClientRevokeToken) { GT_ID(token, Token); }
GT_FIELDS(core::ClientAddUser) {
  GT_TEXT(name, Name, kNameBytesMax);
  GT_ID(role, Role);
  GT_TEXT(public_key, PublicKey, kNameBytesMax);
}
GT_FIELDS(core::ClientUsers) {}
GT_FIELDS(core::ClientRevokeUser) { GT_TEXT(name, Name, kNameBytesMax); }
GT_FIELDS(core::ClientRevokeNode) {
  GT_TEXT(node, Node, kNameBytesMax);
  GT_TEXT(reason, Reason, kSentenceBytesMax);
}
GT_FIELDS(core::ClientBackup) { GT_BYTES(dir, Dir, 4096); }
GT_FIELDS(core::ClientDrainNode) {
  GT_TEXT(node, Node, kNameBytesMax);
  GT_DURATION(left, Left);
  GT_TEXT(reason, Reason, kSentenceBytesMax);
  GT_PLAIN(undo, Undo);
  GT_PLAIN(own, Own);
}
GT_FIELDS(core::ClientReply) {
  GT_ID(id, Id);
  GT_PLAIN(ok, Ok);
  GT_NUMBER(code, Code, 0, 1000);
  GT_TEXT(error, Error, kTailBytesMax);
  GT_BYTES(json, Json, kBulkBytesMax);
}

GT_FIELDS(core::ClientRequest) {
  GT_ID(id, Id);
  GT_DURATION(deadline, Deadline);
  if constexpr (kReading<M>) {
    auto body = m.getBody();
    using Which = std::remove_cvref_t<decltype(body.which())>;
    switch (body.which()) {
#define GT_CASE(Type, Cap, ENUM, ...)                                  \
  case Which::ENUM:                                                    \
    Fields(a, body.get##Cap(), v.body.template emplace<core::Type>()); \
    break;
      GT_REQUESTS(GT_CASE)
#undef GT_CASE
      default:
        a.Fail("body", "unknown request");
    }
  } else {
    auto body = m.getBody();
#define GT_CASE(Type, Cap, ENUM, ...) \
  if (auto* part = std::get_if<core::Type>(&v.body)) Fields(a, body.init##Cap(), *part);
    GT_REQUESTS(GT_CASE)
#undef GT_CASE
  }
}

}  // namespace gtrain::wire
