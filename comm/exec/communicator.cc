// Every collective begins with Enter: each rank puts down what it is about to do, all read what all put
// down, and a difference is an error with the same words on every rank (L6). A barrier is nothing
// but that.
//
// Data then moves in chunks through a pipeline of stages, one phase of the shared-memory group between two
// ticks: at tick t the ranks copy chunk t in, reduce chunk t-1 (each its own part, in the order of
// ranks), let the leader carry chunk t-2 between the machines, and copy chunk t-3 out. With at most
// four stages and four buffers no rank can meet a chunk that another still reads, also across the
// border of two collectives: within the last tick of one and the first of the next different
// buffers are touched, and a phase lies between any further ones.
//
// On one machine, if all ranks pass memory of Allocate(), they reduce straight out of and into each other's
// memory instead. With one rank on each machine schedules run on the caller's memory.
#include "comm/exec/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "comm/codec/reduce.h"
#include "comm/exec/schedule_runner.h"
#include "comm/plan/hierarchy.h"
#include "comm/plan/op_record.h"
#include "comm/plan/schedule.h"
#include "comm/shm/shm_group.h"
#include "comm/ucx/ucx_transport.h"

namespace gtrain::comm {
namespace {

// Largest part of a buffer that one ring pass works on: bounds the scratch memory.
constexpr size_t kRingBlockBytes = 16 << 20;
// Elements of a cache line of the smallest type: parts of two ranks never share a line.
constexpr uint64_t kPartAlign = 64;
// Of the direct path: what fits the second-level cache while all ranks' copies are written.
constexpr size_t kDirectBlockBytes = 32 << 10;

using Stage = std::function<absl::Status(uint64_t chunk)>;

absl::Status Annotate(const absl::Status& status, const std::string& what) {
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

class ExecCommunicator final : public Communicator {
 public:
  ExecCommunicator(Bootstrap* bootstrap, ExecOptions options)
      : bootstrap_(bootstrap), options_(std::move(options)), pid_(getpid()) {
    std::vector<NodeId> nodes;
    for (const Member& m : bootstrap->members()) nodes.push_back(m.node);
    hierarchy_ = MakeHierarchy(nodes, bootstrap->rank());
  }

  ~ExecCommunicator() override {
    if (getpid() == pid_) return;
    // A forked child must not speak on its parent's connections, not even to close them.
    (void)transport_.release();
  }

  absl::Status Connect();

  int rank() const override { return bootstrap_->rank(); }
  int size() const override { return bootstrap_->world_size(); }
  absl::Status AllReduce(void* data, size_t count, DType dtype, ReduceOp op) override;
  absl::Status Broadcast(void* data, size_t count, DType dtype, int root) override;
  absl::Status AllGather(const void* input, void* output, size_t count, DType dtype) override;
  absl::Status Barrier() override;
  absl::StatusOr<void*> Allocate(size_t bytes) override;

 private:
  int nodes() const { return static_cast<int>(hierarchy_.nodes.size()); }
  bool leads() const { return transport_ != nullptr; }

  absl::StatusOr<std::vector<std::string>> Meet(const Watch& watch, uint64_t* nonce);
  absl::Status Usable() const;
  absl::Status Call(OpRecord record, const void* data, size_t bytes,
                    absl::FunctionRef<absl::Status(OpRecord&, const Watch&)> body);
  absl::Status Enter(const OpRecord& record, const Watch& watch);
  absl::Status ExchangeRecords(absl::Span<OpRecord> records, const Watch& watch);
  absl::Status Pipeline(uint64_t chunks, absl::Span<const Stage> stages, const Watch& watch);
  absl::Status FirstStage(const OpRecord& record, const Stage& stage, uint64_t chunks, bool* direct,
                          const Watch& watch);

  absl::Status SharedAllReduce(const OpRecord& record, char* data, const Watch& watch);
  absl::Status DirectAllReduce(const OpRecord& record, const Watch& watch);
  absl::Status FlatAllReduce(const OpRecord& record, char* data, const Watch& watch);
  absl::Status SharedBroadcast(const OpRecord& record, char* data, const Watch& watch);
  absl::Status SharedAllGather(const OpRecord& record, const char* input, char* output, const Watch& watch);
  absl::Status FlatAllGather(const OpRecord& record, char* output, const Watch& watch);

  Bootstrap* const bootstrap_;
  const ExecOptions options_;
  const int pid_;
  Hierarchy hierarchy_;
  std::unique_ptr<ShmGroup> shm_;             // nullptr: one rank on every machine
  std::unique_ptr<DataTransport> transport_;  // nullptr: not a leader, or one machine
  ScheduleRunner runner_;
  std::vector<OpRecord> records_;  // of the running collective where there is no shm_
  std::vector<Mapping> private_;
  uint64_t sequence_ = 0;
  uint64_t chunk_ = 0;  // chunks of all collectives so far
  absl::Status dead_;
};

// ------------------------------------------------------------------ set-up

// First byte of what ranks tell each other: an error of one is then reported by all.
constexpr char kMeetOk = '+', kMeetError = '-';
constexpr uint32_t kMeetVersion = (1 << 16) | sizeof(OpRecord);

// Gathers each rank's transport address. Ranks that are no leaders have an empty one.
absl::StatusOr<std::vector<std::string>> ExecCommunicator::Meet(const Watch& watch, uint64_t* nonce) {
  const uint64_t mine = Rng::FromSystem().Next();
  std::string blob(1 + sizeof(kMeetVersion) + sizeof(mine), kMeetOk);
  std::memcpy(&blob[1], &kMeetVersion, sizeof(kMeetVersion));
  std::memcpy(&blob[1 + sizeof(kMeetVersion)], &mine, sizeof(mine));
  GT_ASSIGN_OR_RETURN(std::vector<std::string> first, bootstrap_->AllGather(blob, watch.Left()));
  for (size_t r = 0; r < first.size(); ++r) {
    if (first[r].size() != blob.size() ||
        std::memcmp(first[r].data(), blob.data(), 1 + sizeof(kMeetVersion))) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", r, " runs another version of libgtrain: start all ranks from the same build"));
    }
  }
  std::memcpy(nonce, &first[0][1 + sizeof(kMeetVersion)], sizeof(*nonce));
  if (nodes() == 1) return std::vector<std::string>(first.size());

  std::string address(1, kMeetOk);
  if (hierarchy_.leader()) {
    auto opened =
        options_.transport ? options_.transport(*bootstrap_, *nonce) : OpenUcxTransport(*bootstrap_, *nonce);
    absl::Status status = opened.status();
    if (opened.ok()) {
      transport_ = *std::move(opened);
      absl::StatusOr<std::string> text = transport_->Address();
      status = text.status();
      if (text.ok()) address += *text;
    }
    if (!status.ok()) address = absl::StrCat(std::string(1, kMeetError), status.message());
  }
  GT_ASSIGN_OR_RETURN(std::vector<std::string> all, bootstrap_->AllGather(address, watch.Left()));
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty() || all[r][0] != kMeetOk) {
      return absl::UnavailableError(absl::StrCat(
          "rank ", r,
          " cannot open its connection to other machines: ", all[r].empty() ? "" : all[r].substr(1)));
    }
    all[r].erase(0, 1);
  }
  return all;
}

absl::Status ExecCommunicator::Connect() {
  if (size() == 1) return absl::OkStatus();
  const Watch watch(bootstrap_, options_.user.timeout);
  uint64_t nonce = 0;
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> addresses, Meet(watch, &nonce));
  if (transport_ != nullptr) {
    std::vector<std::string> of_leaders;
    for (const auto& ranks : hierarchy_.nodes) of_leaders.push_back(addresses[static_cast<size_t>(ranks[0])]);
    GT_RETURN_IF_ERROR(transport_->Connect(of_leaders, hierarchy_.node));
  }
  if (!hierarchy_.one_rank_a_node()) {
    GT_ASSIGN_OR_RETURN(shm_, ShmGroup::Open(bootstrap_, hierarchy_.peers(), hierarchy_.local, nonce, watch));
  } else {
    records_.resize(static_cast<size_t>(size()));
  }
  // Connections are made here, so that a network that does not work shows now and not in the first step.
  return Barrier();
}

// ------------------------------------------------------------------ every collective

absl::Status ExecCommunicator::Usable() const {
  if (getpid() != pid_) {
    return absl::FailedPreconditionError(
        "this is a forked child: a communicator can be used only by the process that made it");
  }
  return dead_;
}

absl::Status CheckArguments(const OpRecord& r, const void* data, int world) {
  const size_t element = DTypeSize(r.dtype);
  if (element == 0) return absl::InvalidArgumentError(absl::StrCat("unknown element type ", int(r.dtype)));
  if (r.op > ReduceOp::kMax) return absl::InvalidArgumentError(absl::StrCat("unknown reduction ", int(r.op)));
  if (r.root < 0 || r.root >= world) {
    return absl::InvalidArgumentError(absl::StrCat("root ", r.root, " is not a rank of 0..", world - 1));
  }
  if (r.count > std::numeric_limits<size_t>::max() / 2 / element / static_cast<size_t>(world)) {
    return absl::InvalidArgumentError(absl::StrCat("count ", r.count, " is too large"));
  }
  if (r.count > 0 && data == nullptr) return absl::InvalidArgumentError("data is null");
  return absl::OkStatus();
}

absl::Status ExecCommunicator::Call(OpRecord record, const void* data, size_t bytes,
                                    absl::FunctionRef<absl::Status(OpRecord&, const Watch&)> body) {
  GT_RETURN_IF_ERROR(Usable());
  record.sequence = ++sequence_;
  if (options_.on_start) options_.on_start(sequence_);
  const Watch watch(bootstrap_, options_.user.timeout);
  absl::Status status = CheckArguments(record, data, size());
  if (status.ok()) status = bootstrap_->Alive();
  if (status.ok() && size() > 1) {
    if (shm_ != nullptr && nodes() == 1) shm_->Locate(data, bytes, &record);
    status = body(record, watch);
  }
  if (status.ok()) return status;
  dead_ = Annotate(status, Describe(record));
  if (shm_ != nullptr) shm_->Fail(dead_);
  transport_.reset();
  return dead_;
}

absl::Status ExecCommunicator::Enter(const OpRecord& record, const Watch& watch) {
  absl::Span<OpRecord> records = shm_ != nullptr ? shm_->Records(record.sequence) : absl::MakeSpan(records_);
  records[static_cast<size_t>(rank())] = record;
  if (shm_ != nullptr) GT_RETURN_IF_ERROR(shm_->Phase(watch));
  if (nodes() > 1) {
    if (leads()) GT_RETURN_IF_ERROR(ExchangeRecords(records, watch));
    if (shm_ != nullptr) GT_RETURN_IF_ERROR(shm_->Phase(watch));
  }
  return CheckAgreement(records);
}

// Leaders: the records of all machines to all machines.
absl::Status ExecCommunicator::ExchangeRecords(absl::Span<OpRecord> records, const Watch& watch) {
  std::vector<OpRecord> table;
  for (int r : hierarchy_.NodeMajor()) table.push_back(records[static_cast<size_t>(r)]);
  std::vector<uint64_t> offsets{0};
  for (const auto& ranks : hierarchy_.nodes)
    offsets.push_back(offsets.back() + ranks.size() * sizeof(OpRecord));
  GT_RETURN_IF_ERROR(runner_.Run(AllGatherSchedule(hierarchy_.node, offsets), table.data(), DType::kUint8,
                                 ReduceOp::kSum, transport_.get(), watch));
  size_t at = 0;
  for (int r : hierarchy_.NodeMajor()) records[static_cast<size_t>(r)] = table[at++];
  return absl::OkStatus();
}

// Enter with the first chunk's first stage done before it, which saves a phase. *direct: all ranks passed
// memory that their peers reach; nothing was staged then.
absl::Status ExecCommunicator::FirstStage(const OpRecord& record, const Stage& stage, uint64_t chunks,
                                          bool* direct, const Watch& watch) {
  const bool staged = record.arena == 0;
  if (staged && chunks > 0) GT_RETURN_IF_ERROR(stage(0));
  GT_RETURN_IF_ERROR(Enter(record, watch));
  const absl::Span<OpRecord> records = shm_->Records(record.sequence);
  auto in_arena = [](const OpRecord& r) { return r.arena != 0; };
  *direct = std::all_of(records.begin(), records.end(), in_arena);
  if (*direct || chunks == 0 || std::none_of(records.begin(), records.end(), in_arena)) {
    return absl::OkStatus();
  }
  if (!staged) GT_RETURN_IF_ERROR(stage(0));
  return shm_->Phase(watch);
}

// The ticks after the first.
absl::Status ExecCommunicator::Pipeline(uint64_t chunks, absl::Span<const Stage> stages, const Watch& watch) {
  if (chunks == 0) return absl::OkStatus();
  const uint64_t ticks = chunks + stages.size() - 1;
  for (uint64_t tick = 1; tick < ticks; ++tick) {
    if (tick > 1) GT_RETURN_IF_ERROR(shm_->Phase(watch));
    for (size_t s = 0; s < stages.size(); ++s) {
      if (tick >= s && tick - s < chunks) GT_RETURN_IF_ERROR(stages[s](tick - s));
    }
  }
  chunk_ += chunks;
  return absl::OkStatus();
}

// ------------------------------------------------------------------ all-reduce

absl::Status ExecCommunicator::AllReduce(void* data, size_t count, DType dtype, ReduceOp op) {
  OpRecord record;
  record.kind = OpKind::kAllReduce;
  record.count = count;
  record.dtype = dtype;
  record.op = op;
  return Call(record, data, count * DTypeSize(dtype), [&](OpRecord& r, const Watch& watch) {
    char* bytes = static_cast<char*>(data);
    return shm_ != nullptr ? SharedAllReduce(r, bytes, watch) : FlatAllReduce(r, bytes, watch);
  });
}

absl::Status ExecCommunicator::SharedAllReduce(const OpRecord& r, char* data, const Watch& watch) {
  const size_t element = DTypeSize(r.dtype);
  const uint64_t per_chunk = kSlotBytes / element, chunks = (r.count + per_chunk - 1) / per_chunk;
  const int local_ranks = shm_->size(), divisor = r.op == ReduceOp::kMean ? size() : 1;
  auto elements = [&](uint64_t c) { return std::min<uint64_t>(per_chunk, r.count - c * per_chunk); };

  const Stage in = [&](uint64_t c) {
    std::memcpy(shm_->Slot(hierarchy_.local, chunk_ + c), data + c * per_chunk * element,
                elements(c) * element);
    return absl::OkStatus();
  };
  const Stage reduce = [&](uint64_t c) {
    const Range part = EvenPart(elements(c), local_ranks, hierarchy_.local, kPartAlign);
    std::vector<const void*> sources;
    for (int i = 0; i < local_ranks; ++i) {
      sources.push_back(shm_->Slot(i, chunk_ + c) + part.begin * element);
    }
    Reduce(shm_->Result(chunk_ + c) + part.begin * element, sources.data(), sources.size(), part.count,
           r.dtype, r.op, nodes() == 1 ? divisor : 1);
    return absl::OkStatus();
  };
  const Stage between = [&](uint64_t c) -> absl::Status {
    if (!leads()) return absl::OkStatus();
    char* result = shm_->Result(chunk_ + c);
    GT_RETURN_IF_ERROR(runner_.Run(AllReduceSchedule(hierarchy_.node, nodes(), elements(c), element), result,
                                   r.dtype, r.op, transport_.get(), watch));
    const void* source = result;
    if (divisor != 1) Reduce(result, &source, 1, elements(c), r.dtype, r.op, divisor);
    return absl::OkStatus();
  };
  const Stage out = [&](uint64_t c) {
    std::memcpy(data + c * per_chunk * element, shm_->Result(chunk_ + c), elements(c) * element);
    return absl::OkStatus();
  };

  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  if (direct) return DirectAllReduce(r, watch);
  if (nodes() == 1) return Pipeline(chunks, {in, reduce, out}, watch);
  return Pipeline(chunks, {in, reduce, between, out}, watch);
}

// Each rank reduces its part out of all ranks' memory and writes it back into all.
absl::Status ExecCommunicator::DirectAllReduce(const OpRecord& r, const Watch& watch) {
  const size_t element = DTypeSize(r.dtype);
  std::vector<char*> of_rank;
  for (const OpRecord& peer : shm_->Records(r.sequence)) {
    GT_ASSIGN_OR_RETURN(char* data, shm_->Resolve(peer, r.count * element, watch));
    of_rank.push_back(data);
  }
  const Range part = EvenPart(r.count, shm_->size(), hierarchy_.local, kPartAlign);
  const uint64_t block = kDirectBlockBytes / element;
  for (uint64_t at = 0; at < part.count; at += block) {
    const uint64_t count = std::min(block, part.count - at), offset = (part.begin + at) * element;
    std::vector<const void*> sources;
    for (char* data : of_rank) sources.push_back(data + offset);
    char* first = of_rank[0] + offset;
    Reduce(first, sources.data(), sources.size(), count, r.dtype, r.op, r.op == ReduceOp::kMean ? size() : 1);
    for (size_t i = 1; i < of_rank.size(); ++i) std::memcpy(of_rank[i] + offset, first, count * element);
  }
  return shm_->Phase(watch);
}

absl::Status ExecCommunicator::FlatAllReduce(const OpRecord& r, char* data, const Watch& watch) {
  GT_RETURN_IF_ERROR(Enter(r, watch));
  const size_t element = DTypeSize(r.dtype);
  const uint64_t block = kRingBlockBytes / element;
  for (uint64_t at = 0; at < r.count; at += block) {
    const uint64_t count = std::min(block, r.count - at);
    GT_RETURN_IF_ERROR(runner_.Run(AllReduceSchedule(hierarchy_.node, nodes(), count, element),
                                   data + at * element, r.dtype, r.op, transport_.get(), watch));
  }
  const void* source = data;
  if (r.op == ReduceOp::kMean) Reduce(data, &source, 1, r.count, r.dtype, r.op, size());
  return absl::OkStatus();
}

// ------------------------------------------------------------------ broadcast

absl::Status ExecCommunicator::Broadcast(void* data, size_t count, DType dtype, int root) {
  OpRecord record;
  record.kind = OpKind::kBroadcast;
  record.count = count;
  record.dtype = dtype;
  record.root = root;
  return Call(record, data, count * DTypeSize(dtype), [&](OpRecord& r, const Watch& watch) -> absl::Status {
    if (shm_ != nullptr) return SharedBroadcast(r, static_cast<char*>(data), watch);
    GT_RETURN_IF_ERROR(Enter(r, watch));
    return runner_.Run(TreeBroadcast(hierarchy_.node, nodes(), hierarchy_.NodeOf(root), count), data, dtype,
                       ReduceOp::kSum, transport_.get(), watch);
  });
}

absl::Status ExecCommunicator::SharedBroadcast(const OpRecord& r, char* data, const Watch& watch) {
  const uint64_t total = r.count * DTypeSize(r.dtype), chunks = (total + kSlotBytes - 1) / kSlotBytes;
  const int root_node = hierarchy_.NodeOf(r.root);
  auto bytes = [&](uint64_t c) { return std::min<uint64_t>(kSlotBytes, total - c * kSlotBytes); };

  const Stage in = [&](uint64_t c) {
    if (rank() == r.root) std::memcpy(shm_->Result(chunk_ + c), data + c * kSlotBytes, bytes(c));
    return absl::OkStatus();
  };
  const Stage between = [&](uint64_t c) {
    if (!leads()) return absl::OkStatus();
    return runner_.Run(TreeBroadcast(hierarchy_.node, nodes(), root_node, bytes(c)), shm_->Result(chunk_ + c),
                       DType::kUint8, ReduceOp::kSum, transport_.get(), watch);
  };
  const Stage out = [&](uint64_t c) {
    if (rank() != r.root) std::memcpy(data + c * kSlotBytes, shm_->Result(chunk_ + c), bytes(c));
    return absl::OkStatus();
  };

  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  if (direct) {
    if (rank() != r.root) {
      GT_ASSIGN_OR_RETURN(
          char* source, shm_->Resolve(shm_->Records(r.sequence)[static_cast<size_t>(r.root)], total, watch));
      std::memcpy(data, source, total);
    }
    return shm_->Phase(watch);
  }
  if (nodes() == 1) return Pipeline(chunks, {in, out}, watch);
  return Pipeline(chunks, {in, between, out}, watch);
}

// ------------------------------------------------------------------ all-gather, barrier

absl::Status ExecCommunicator::AllGather(const void* input, void* output, size_t count, DType dtype) {
  OpRecord record;
  record.kind = OpKind::kAllGather;
  record.count = count;
  record.dtype = dtype;
  const size_t bytes = count * DTypeSize(dtype);
  const void* checked = output == nullptr ? nullptr : input;
  char* own = static_cast<char*>(output) + (count > 0 ? static_cast<size_t>(rank()) * bytes : 0);
  GT_RETURN_IF_ERROR(Call(record, checked, 0, [&](OpRecord& r, const Watch& watch) {
    r.arena = 0;
    const char* source = static_cast<const char*>(input);
    if (shm_ != nullptr) return SharedAllGather(r, source, static_cast<char*>(output), watch);
    if (bytes > 0 && own != source) std::memmove(own, source, bytes);
    return FlatAllGather(r, static_cast<char*>(output), watch);
  }));
  if (size() == 1 && bytes > 0 && own != input) std::memmove(own, input, bytes);
  return absl::OkStatus();
}

// One result buffer holds a chunk of every rank, node by node.
absl::Status ExecCommunicator::SharedAllGather(const OpRecord& r, const char* input, char* output,
                                               const Watch& watch) {
  const std::vector<int> order = hierarchy_.NodeMajor();
  const uint64_t total = r.count * DTypeSize(r.dtype);
  const uint64_t per_chunk = shm_->result_bytes() / order.size() / 64 * 64;
  const uint64_t chunks = (total + per_chunk - 1) / per_chunk;
  const size_t place = static_cast<size_t>(std::find(order.begin(), order.end(), rank()) - order.begin());
  auto bytes = [&](uint64_t c) { return std::min<uint64_t>(per_chunk, total - c * per_chunk); };

  const Stage in = [&](uint64_t c) {
    std::memcpy(shm_->Result(chunk_ + c) + place * bytes(c), input + c * per_chunk, bytes(c));
    return absl::OkStatus();
  };
  const Stage between = [&](uint64_t c) {
    if (!leads()) return absl::OkStatus();
    std::vector<uint64_t> offsets{0};
    for (const auto& ranks : hierarchy_.nodes) offsets.push_back(offsets.back() + ranks.size() * bytes(c));
    return runner_.Run(AllGatherSchedule(hierarchy_.node, offsets), shm_->Result(chunk_ + c), DType::kUint8,
                       ReduceOp::kSum, transport_.get(), watch);
  };
  const Stage out = [&](uint64_t c) {
    for (size_t i = 0; i < order.size(); ++i) {
      char* target = output + static_cast<size_t>(order[i]) * total + c * per_chunk;
      // The caller may pass its own part of the output as input: it is in place already.
      if (target != input + c * per_chunk)
        std::memcpy(target, shm_->Result(chunk_ + c) + i * bytes(c), bytes(c));
    }
    return absl::OkStatus();
  };

  bool direct = false;
  GT_RETURN_IF_ERROR(FirstStage(r, in, chunks, &direct, watch));
  if (nodes() == 1) return Pipeline(chunks, {in, out}, watch);
  return Pipeline(chunks, {in, between, out}, watch);
}

absl::Status ExecCommunicator::FlatAllGather(const OpRecord& r, char* output, const Watch& watch) {
  GT_RETURN_IF_ERROR(Enter(r, watch));
  // With one rank on each machine node order is rank order.
  std::vector<uint64_t> offsets{0};
  for (int i = 0; i < size(); ++i) offsets.push_back(offsets.back() + r.count);
  return runner_.Run(AllGatherSchedule(hierarchy_.node, offsets), output, r.dtype, ReduceOp::kSum,
                     transport_.get(), watch);
}

absl::Status ExecCommunicator::Barrier() {
  OpRecord record;
  record.kind = OpKind::kBarrier;
  return Call(record, nullptr, 0, [&](OpRecord& r, const Watch& watch) {
    r.arena = 0;
    return Enter(r, watch);
  });
}

absl::StatusOr<void*> ExecCommunicator::Allocate(size_t bytes) {
  GT_RETURN_IF_ERROR(Usable());
  if (shm_ != nullptr && nodes() == 1) return shm_->Allocate(bytes, Watch(bootstrap_, options_.user.timeout));
  GT_ASSIGN_OR_RETURN(Mapping memory, Mapping::Private(std::max<size_t>(bytes, 1)));
  private_.push_back(std::move(memory));
  return static_cast<void*>(private_.back().data());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> MakeCommunicator(Bootstrap* bootstrap, ExecOptions options) {
  auto communicator = std::make_unique<ExecCommunicator>(bootstrap, std::move(options));
  if (absl::Status status = communicator->Connect(); !status.ok()) {
    return Annotate(status, "making a communicator");
  }
  return communicator;
}

}  // namespace gtrain::comm
