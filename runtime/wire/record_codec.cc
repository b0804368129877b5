#include "runtime/wire/record_codec.h"

#include <kj/exception.h>

#include "runtime/wire/message_fields.h"
#include "runtime/wire/records.capnp.h"

namespace gtrain::wire {

constexpr size_t kFaultsMax = 1024;  // of one job; a head keeps 32
constexpr size_t kSmallWords = 256;  // most records; a head reads hundreds of thousands at its start

template <class From, class To>
using SameConst = std::conditional_t<std::is_const_v<From>, const To, To>;

static_assert(static_cast<int>(core::JobState::kCancelled) == static_cast<int>(proto::JobState::CANCELLED));
static_assert(static_cast<int>(core::Ending::kFail) == static_cast<int>(proto::Ending::FAIL));
static_assert(static_cast<int>(core::FaultKind::kPreempted) == static_cast<int>(proto::FaultKind::PREEMPTED));

GT_FIELDS(core::FaultRecord) {
  GT_COUNTER(generation, Generation);
  // An older head could not read a record with a kind that it does not know.
  if constexpr (kReading<M>) {
    GT_ENUM(kind, Kind, core::FaultKind::kPreempted);
    if (m.getStorage()) v.kind = core::FaultKind::kStorage;
  } else {
    const bool storage = v.kind == core::FaultKind::kStorage;
    m.setStorage(storage);
    m.setKind(static_cast<proto::FaultKind>(storage ? core::FaultKind::kPreempted : v.kind));
  }
  GT_NUMBER(tries, Tries, 1, kInt32Max);
  GT_NUMBER(rank, Rank, -1, kRanksMax);
  GT_ID_OR_EMPTY(node, Node);
  GT_TEXT(hostname, Hostname, kNameBytesMax);
  GT_ENUM(cause, Cause, core::ExitCause::kLost);
  GT_NUMBER(exit_code, ExitCode, kInt32Min, kInt32Max);
  GT_NUMBER(signal, Signal, 0, 1024);
  GT_TEXT(message, Message, kSentenceBytesMax);
  GT_TAIL(tail, Tail, kTailBytesMax);
  GT_BYTES(signature, Signature, kTailBytesMax);
  GT_OPTIONAL(step, Step);
  GT_PLAIN(progressed, Progressed);
  GT_OPTIONAL(committed, Committed);
  GT_WALL_TIME(at, At);
}
GT_FIELDS(core::AvoidedNode) {
  GT_ID(node, Node);
  GT_TEXT(why, Why, kSentenceBytesMax);
}
GT_FIELDS(core::JobSubmission) {
  GT_ID(id, Id);
  GT_PLAIN(number, Number);
  GT_TEXT(name, Name, kNameBytesMax);
  GT_TEXT(spec_text, SpecText, kSpecBytesMax);
  GT_MAP(env, Env, 10000);
  GT_BYTES(run_dir, RunDir, 4096);
  GT_BYTES(resume, Resume, 4096);
  GT_ID_OR_EMPTY(client_key, ClientKey);
  GT_TEXT(owner, Owner, kNameBytesMax);
  GT_ID_OR_EMPTY(request_id, RequestId);
  GT_PLAIN(end_with_client, EndWithClient);
  GT_PLAIN(takeover, Takeover);
  GT_PLAIN(takeover_own, TakeoverOwn);
  GT_WALL_TIME(submitted_at, SubmittedAt);
}
GT_FIELDS(core::GoodputRecord) {
  GT_WALL_TIME(since, Since);
  GT_WALL_TIME(at, At);
  if constexpr (kReading<M>) {
    auto list = m.getSeconds();
    for (unsigned i = 0; i < std::min<size_t>(list.size(), core::kTimeLabels); ++i) {
      v.seconds[i] = list[i];
      if (!Finite(v.seconds[i])) a.Fail("seconds", "not a finite number");
    }
  } else {
    auto list = m.initSeconds(core::kTimeLabels);
    for (unsigned i = 0; i < core::kTimeLabels; ++i) list.set(i, v.seconds[i]);
  }
  GT_PLAIN(open, Open);
  if (!Finite(v.open)) a.Fail("open", "not a finite number");
  GT_PLAIN(over, Over);
  GT_COUNTER(stepped, Stepped);
  GT_PLAIN(repeats, Repeats);
  GT_PLAIN(idle_said, IdleSaid);
  GT_PLAIN(stall_said, StallSaid);
  GT_OPTIONAL(first, First);
  GT_OPTIONAL(top, Top);
  GT_OPTIONAL(at_step, AtStep);
  GT_OPTIONAL(redone_to, RedoneTo);
  GT_NUMBER(redone, Redone, 0, kInt64Max);
  GT_NUMBER(losses, Losses, 0, kInt32Max);
  GT_NUMBER(wanted, Wanted, 0, kInt32Max);
}
GT_FIELDS(core::JobStatus) {
  GT_ENUM(state, State, core::JobState::kCancelled);
  GT_TEXT(reason, Reason, kSentenceBytesMax);
  GT_COUNTER(generation, Generation);
  GT_COUNTER(revoked, Revoked);
  GT_COUNTER(timeline, Timeline);
  GT_ENUM(ending, Ending, core::Ending::kFail);
  GT_TEXT(ending_reason, EndingReason, kSentenceBytesMax);
  GT_NUMBER(restarts, Restarts, 0, kInt32Max);
  GT_DURATION(run_time, RunTime);
  GT_WALL_TIME(run_time_at, RunTimeAt);
  GT_PLAIN(sdk, Sdk);
  GT_OPTIONAL(exit_code, ExitCode);
  GT_PLAIN(event_sequence, EventSequence);
  GT_LIST(avoided, Avoided, kRanksMax);
  GT_PLAIN(waits_for_storage, WaitsForStorage);
  GT_WALL_TIME(started_at, StartedAt);
  GT_WALL_TIME(ended_at, EndedAt);
  GT_OPTIONAL(last_step, LastStep);
  GT_OPTIONAL(last_loss, LastLoss);
  GT_NUMBER(size_wanted, SizeWanted, 0, kRanksMax);
  GT_PLAIN(diverged, Diverged);
  GT_STRUCT(goodput, Goodput);
  GT_ENUM(after_save, AfterSave, core::Ending::kFail);
  GT_TEXT(after_save_reason, AfterSaveReason, kSentenceBytesMax);
  GT_PLAIN(saves, Saves);
}
// proto::JobRecord has the fields of both, with the same names.
GT_FIELDS(core::JobRecord) {
  Fields(a, m, static_cast<SameConst<V, core::JobSubmission>&>(v));
  Fields(a, m, static_cast<SameConst<V, core::JobStatus>&>(v));
  if constexpr (kReading<M>) {
    if (m.getHasGrant()) Fields(a, m.getGrant(), v.grant.emplace());
  } else if (v.grant) {
    m.setHasGrant(true);
    Fields(a, m.initGrant(), *v.grant);
  }
  GT_LIST(exits, Exits, kRanksMax);
  GT_ID_LIST(unreleased, Unreleased, kRanksMax);
  GT_ID_LIST(kept, Kept, kRanksMax);
  GT_LIST(faults, Faults, kFaultsMax);
}
GT_FIELDS(core::JobStatusRecord) {
  GT_ID(job, Job);
  GT_STRUCT(status, Status);
  GT_COUNTER(grant, Grant);
  GT_NUMBER(exits, Exits, 0, kRanksMax);
  if constexpr (kReading<M>) {
    auto list = m.getFaults();
    if (ListFits(a, list.size(), kFaultsMax, "faults")) {
      for (const uint64_t generation : list) v.faults.push_back({generation});
    }
  } else {
    auto list = m.initFaults(v.faults.size());
    for (unsigned i = 0; i < v.faults.size(); ++i) list.set(i, v.faults[i].value);
  }
  GT_NUMBER(unreleased, Unreleased, 0, kRanksMax);
  GT_NUMBER(packed, Packed, 0, kRanksMax);
}
GT_FIELDS(core::JobGrantRecord) {
  GT_ID(job, Job);
  GT_STRUCT(grant, Grant);
  GT_ID_LIST(kept, Kept, kRanksMax);
}
GT_FIELDS(core::JobExitRecord) {
  GT_ID(job, Job);
  GT_NUMBER(index, Index, 0, kRanksMax);
  GT_STRUCT(exit, Exit);
}
GT_FIELDS(core::JobExitsRecord) {
  GT_ID(job, Job);
  GT_NUMBER(first, First, 0, kRanksMax);
  GT_LIST(exits, Exits, kRanksMax);
}
GT_FIELDS(core::JobFaultRecord) {
  GT_ID(job, Job);
  GT_STRUCT(fault, Fault);
}
GT_FIELDS(core::JobUnreleasedRecord) {
  GT_ID(job, Job);
  GT_ID_LIST(nodes, Nodes, kRanksMax);
}
GT_FIELDS(core::NodeRecord) {
  GT_ID(id, Id);
  GT_ID(incarnation, Incarnation);
  GT_ID_OR_EMPTY(boot_id, BootId);
  GT_TEXT(hostname, Hostname, kNameBytesMax);
  GT_TEXT(address, Address, kNameBytesMax);
  GT_TEXT(version, Version, kNameBytesMax);
  GT_STRUCT(inventory, Inventory);
  GT_MAP(labels, Labels, 1000);
  GT_PLAIN(unclean, Unclean);
  GT_STRUCT(notice, Notice);
  GT_STRUCT(drain, Drain);
}
GT_FIELDS(core::ClusterRecord) {
  GT_ID(cluster, Cluster);
  GT_COUNTER(epoch, Epoch);
  GT_PLAIN(next_job, NextJob);
  GT_PLAIN(next_request, NextRequest);
  GT_PLAIN(recovering, Recovering);
  GT_COUNTER(superseded, Superseded);
  GT_PLAIN(accept_unsealed, AcceptUnsealed);
}
GT_FIELDS(core::RequestRecord) {
  GT_ID(client_key, ClientKey);
  GT_ID(request_id, RequestId);
  GT_PLAIN(number, Number);
  GT_STRUCT(reply, Reply);
}
GT_FIELDS(core::CheckpointRecord) {
  GT_ID(job, Job);
  GT_COUNTER(generation, Generation);
  GT_COUNTER(timeline, Timeline);
  GT_NUMBER(step, Step, 0, kInt64Max);
  GT_BYTES(manifest, Manifest, 4096);
  GT_PLAIN(count, Count);
}

#define GT_RECORDS(X)                                   \
  X(ClusterRecord, Cluster, CLUSTER)                    \
  X(NodeRecord, Node, NODE)                             \
  X(JobRecord, Job, JOB)                                \
  X(RequestRecord, Request, REQUEST)                    \
  X(CheckpointRecord, Checkpoint, CHECKPOINT)           \
  X(JobSubmission, JobSubmission, JOB_SUBMISSION)       \
  X(JobStatusRecord, JobStatus, JOB_STATUS)             \
  X(JobGrantRecord, JobGrant, JOB_GRANT)                \
  X(JobExitRecord, JobExit, JOB_EXIT)                   \
  X(JobFaultRecord, JobFault, JOB_FAULT)                \
  X(JobUnreleasedRecord, JobUnreleased, JOB_UNRELEASED) \
  X(JobExitsRecord, JobExits, JOB_EXITS)

#define GT_COUNT(...) +1
static_assert(std::variant_size_v<core::Record> == 0 GT_RECORDS(GT_COUNT),
              "a record has no codec: add it to records.capnp and here");
#undef GT_COUNT

namespace {

absl::StatusOr<core::Record> DecodeWords(kj::ArrayPtr<const capnp::word> words) {
  capnp::ReaderOptions options;
  options.nestingLimit = 16;
  options.traversalLimitInWords = words.size() * 4;
  capnp::FlatArrayMessageReader reader(words, options);
  proto::Record::Reader root = reader.getRoot<proto::Record>();
  Archive archive;
  core::Record record;
  switch (root.which()) {
#define GT_CASE(Type, Cap, ENUM)                                    \
  case proto::Record::ENUM:                                         \
    Fields(archive, root.get##Cap(), record.emplace<core::Type>()); \
    break;
    GT_RECORDS(GT_CASE)
#undef GT_CASE
    default:
      return absl::DataLossError("it is of a kind that this version does not know: a newer head wrote it");
  }
  if (!archive.ok()) return absl::DataLossError(archive.error);
  return record;
}

}  // namespace

std::string EncodeRecord(const core::Record& record) {
  capnp::MallocMessageBuilder builder;
  proto::Record::Builder root = builder.initRoot<proto::Record>();
  Archive archive;
#define GT_CASE(Type, Cap, ENUM) \
  if (auto* part = std::get_if<core::Type>(&record)) Fields(archive, root.init##Cap(), *part);
  GT_RECORDS(GT_CASE)
#undef GT_CASE
  kj::Array<capnp::word> words = capnp::messageToFlatArray(builder);
  auto bytes = words.asChars();
  return std::string(bytes.begin(), bytes.size());
}

absl::StatusOr<core::Record> DecodeRecord(absl::string_view bytes) {
  if (bytes.size() < 2 * sizeof(capnp::word) || bytes.size() % sizeof(capnp::word) != 0) {
    return absl::DataLossError(absl::StrCat("not a record: ", bytes.size(), " bytes"));
  }
  try {
    const size_t count = bytes.size() / sizeof(capnp::word);
    capnp::word small[kSmallWords];
    kj::Array<capnp::word> large;
    if (count > kSmallWords) large = kj::heapArray<capnp::word>(count);
    capnp::word* words = count > kSmallWords ? large.begin() : small;
    std::memcpy(words, bytes.data(), bytes.size());
    return DecodeWords({words, count});
  } catch (const kj::Exception& e) {
    return absl::DataLossError(absl::StrCat("not a record: ", e.getDescription().cStr()));
  } catch (const std::exception& e) {
    return absl::DataLossError(absl::StrCat("not a record: ", e.what()));
  }
}

}  // namespace gtrain::wire
