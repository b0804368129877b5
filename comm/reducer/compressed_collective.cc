// Two ways over the same collectives. Gather: one packet of everything to everyone. Two stages: a packet for
// each shard to its owner, a packet of each mean shard to everyone. Packets lie in slots of equal size, whose
// rest is not looked at: a packet says how long it is. PowerSGD, which has no packets, is a third
// (low_rank_mean.h).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "comm/codec/packet.h"
#include "comm/reducer/groups.h"
#include "comm/reducer/low_rank_mean.h"
#include "comm/reducer/reducer.h"
#include "comm/reducer/sparse_mean.h"

namespace gtrain {
namespace comm {
namespace {

constexpr size_t kBufferSlack = 4;  // a buffer that is so many times too long for a step is made anew
// An agreed momentum stays so far below the largest float that no finite gradient overflows with it.
constexpr float kLargestMomentum = 0x1p96f;
constexpr char kMomentumState[] = "momentum";
constexpr char kResidualState[] = "residual";
constexpr char kWarmupState[] = "warmup";  // one number: steps that it came so far
// The progress of all compressors, those of what is sent before that of what is returned.
constexpr char kProgressState[] = "progress";

bool HasProgress(const Compressor& compressor) {
  const CompressionOptions& options = compressor.options();
  return options.codec == Codec::kTopK ||
         (options.error_feedback && options.residual == ResidualType::kBFloat16);
}

// The packet at the start of a slot that came from a peer.
absl::Status DecodeSlot(absl::Span<const uint8_t> slot, absl::Span<float> output, DecodeMode mode) {
  GT_ASSIGN_OR_RETURN(const PacketHeader header, FindHeader(slot, output.size()));
  return Decode(slot.subspan(0, PacketBytes(header)), output, mode);
}

// The mean over `ranks` ranks, of which those of `group` take part, each with the sum of its machine: of at
// most `largest_machine` ranks.
class Flat {
 public:
  static absl::StatusOr<std::unique_ptr<Flat>> Make(Communicator* group, int ranks, int largest_machine,
                                                    const CompressionOptions& options, size_t count,
                                                    const std::vector<std::vector<int64_t>>& shapes) {
    std::unique_ptr<Flat> flat(new Flat(group, ranks, largest_machine, options, count));
    CompressionOptions senders = options;
    GT_RETURN_IF_ERROR(flat->TakeMomentum(&senders));
    if (options.codec == Codec::kNone) return flat;
    senders.rounding_seed = static_cast<uint32_t>(group->rank());
    if (options.codec == Codec::kPowerSgd) {
      if (options.residual != ResidualType::kFloat32) {
        return absl::InvalidArgumentError(
            "compress: powersgd keeps float32 residuals alone: leave out residual=bf16, or take another "
            "codec");
      }
      GT_ASSIGN_OR_RETURN(flat->low_rank_, LowRankMean::Make(senders, count, shapes));
      return flat;
    }
    // Impossible options are refused, whether compression pays or not.
    GT_RETURN_IF_ERROR(Compressor::Create(senders, 1).status());
    if (!PaysCompressed(senders, count, group->size())) return flat;
    if (GoesToEveryone(senders, count, group->size())) {
      GT_ASSIGN_OR_RETURN(flat->sending_.emplace_back(), Compressor::Create(senders, count));
      return flat;
    }
    GT_RETURN_IF_ERROR(flat->MakeStages(senders));
    return flat;
  }

  CompressedCollective::Range Mine() const { return ShardOf(group_->rank()); }

  absl::Status AllReduce(absl::Span<float> data) {
    Settle();
    if (scale_ != 1) {
      for (float& value : data) value *= scale_;
    }
    if (momentum_ == 0) return Mean(data);
    const bool compressed = !WarmingUp();
    momentum_travelled_ = compressed;
    for (size_t i = 0; compressed && i < count_; ++i) data[i] += part_ * agreed_[i];
    GT_RETURN_IF_ERROR(Mean(data));
    float poison = 0;
    for (size_t i = 0; i < count_; ++i) {
      const float before = momentum_ * agreed_[i];
      agreed_next_[i] =
          std::clamp(compressed ? data[i] : data[i] + before, -kLargestMomentum, kLargestMomentum);
      data[i] = compressed ? data[i] - before : data[i];
      poison += data[i] * 0;
    }
    pending_momentum_ = !std::isnan(poison);
    return absl::OkStatus();
  }

  absl::Status Mean(absl::Span<float> data) {
    pending_step_ = true;
    if (low_rank_ != nullptr && !WarmingUp()) {
      GT_ASSIGN_OR_RETURN(const uint64_t bytes, low_rank_->Mean(*group_, factor_, data));
      bytes_sent_ += bytes;
      bytes_received_ += bytes;
      return absl::OkStatus();
    }
    if (sending_.empty() || WarmingUp()) return Dense(data);
    if (!staged_) return Gather(data);
    GT_RETURN_IF_ERROR(Scatter(data, absl::MakeSpan(shard_)));
    size_t bytes = 0;
    if (returning_ != nullptr) {
      GT_ASSIGN_OR_RETURN(bytes, Owner().Encode(shard_, Room(0, Owner().MaxBytesNow())));
    }
    GT_ASSIGN_OR_RETURN(const size_t slot, AgreeOnSlot(Ramping() ? Codec::kInt8 : owner_codec_, bytes));
    GT_RETURN_IF_ERROR(AllGatherPackets(slot));
    for (size_t rank = 0; rank < sending_.size(); ++rank) {
      const auto range = ShardOf(static_cast<int>(rank));
      GT_RETURN_IF_ERROR(DecodeSlot({received_.data() + slot * rank, slot},
                                    data.subspan(range.offset, range.size), DecodeMode::kSet));
    }
    return absl::OkStatus();
  }

  // The result is the same on all ranks.
  absl::Status CanScatter() const {
    if (momentum_ == 0 || !staged_) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "compressed reduce-scatter: optimizer_momentum needs the whole mean on every rank");
  }

  absl::Status ReduceScatter(absl::Span<const float> data, absl::Span<float> shard) {
    Settle();
    if (!staged_ || WarmingUp()) {  // dense, or packets so small that everybody's are cheap
      whole_.assign(data.begin(), data.end());
      GT_RETURN_IF_ERROR(AllReduce(absl::MakeSpan(whole_)));
      std::copy_n(whole_.begin() + static_cast<ptrdiff_t>(Mine().offset), shard.size(), shard.begin());
      return absl::OkStatus();
    }
    return Scatter(data, shard);
  }

  void Drop() {
    for (auto& compressor : sending_) compressor->Drop();
    if (returning_ != nullptr) Owner().Drop();
    if (low_rank_ != nullptr) low_rank_->Drop();
    pending_momentum_ = pending_step_ = false;
  }

  std::vector<CarriedState> Export() {
    Settle();
    std::vector<CarriedState> states;
    if (low_rank_ != nullptr) states = low_rank_->Export();
    for (CarriedState& state : states) {
      if (state.name == kResidualState) state.values = Scaled(state.values, 1 / scale_);
    }
    if (momentum_ > 0) states.push_back({kMomentumState, 0, agreed_});
    if (StepsCounted() > 0) states.push_back({kWarmupState, 0, {static_cast<float>(steps_)}});
    CarriedState progress = {kProgressState, 0, {}};
    const auto is_progress = [&](const Compressor::State& state) {
      if (state.name != kProgressState) return false;
      progress.values.insert(progress.values.end(), state.values.begin(), state.values.end());
      return true;
    };
    for (size_t i = 0; i < sending_.size(); ++i) {
      const size_t offset = staged_ ? ShardOf(static_cast<int>(i)).offset : 0;
      for (const Compressor::State& state : sending_[i]->Export()) {
        if (is_progress(state)) continue;
        auto whole = std::find_if(states.begin(), states.end(),
                                  [&](const CarriedState& made) { return made.name == state.name; });
        if (whole == states.end()) whole = states.insert(whole, {state.name, 0, std::vector<float>(count_)});
        const std::vector<float> values = Scaled(state.values, 1 / scale_);
        std::copy(values.begin(), values.end(), whole->values.begin() + static_cast<ptrdiff_t>(offset));
      }
    }
    if (returning_ != nullptr) {
      for (const Compressor::State& state : returning_->Export()) (void)is_progress(state);
      for (const Compressor::State& state : Owner().Export()) {
        if (state.name == kProgressState) continue;
        states.push_back({state.name + "/shard", Mine().offset, state.values});
      }
    }
    if (!progress.values.empty()) states.push_back(std::move(progress));
    return states;
  }

  bool IsMomentum(const CarriedState& state) const {
    return momentum_ > 0 && state.name == kMomentumState && state.offset == 0 &&
           state.values.size() == count_;
  }

  void LoadMomentum(const CarriedState& state) {
    // A checkpoint of a version whose momentum could become infinite heals.
    std::transform(state.values.begin(), state.values.end(), agreed_.begin(), [](float value) {
      return std::isfinite(value) ? std::clamp(value, -kLargestMomentum, kLargestMomentum) : 0;
    });
    pending_momentum_ = false;
  }

  bool IsWarmup(const CarriedState& state) const {
    return StepsCounted() > 0 && state.name == kWarmupState && state.offset == 0 &&
           state.values.size() == 1 && state.values[0] >= 0;
  }

  absl::Status LoadWarmup(const CarriedState& state) {
    steps_ = static_cast<int>(std::min(state.values[0], static_cast<float>(StepsCounted())));
    pending_step_ = false;
    GT_RETURN_IF_ERROR(BeginRamp());
    return EndRamp();
  }

  absl::Status Load(const CarriedState& state) {
    if (state.name == kProgressState) return LoadProgress(state);
    if (IsMomentum(state)) {
      LoadMomentum(state);
      return absl::OkStatus();
    }
    if (IsWarmup(state)) return LoadWarmup(state);
    const std::vector<float> scaled = Scaled(state.values, scale_);
    if (low_rank_ != nullptr &&
        low_rank_->Load(state.name == kResidualState ? CarriedState{state.name, state.offset, scaled}
                                                     : state))
      return absl::OkStatus();
    const bool of_shard = state.name.ends_with("/shard");
    const std::string name = of_shard ? state.name.substr(0, state.name.size() - 6) : state.name;
    const CompressedCollective::Range expected =
        of_shard ? Mine() : CompressedCollective::Range{0, sending_.empty() ? 0 : count_};
    if (state.offset != expected.offset || state.values.size() != expected.size || expected.size == 0 ||
        (of_shard && returning_ == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("compressed collective: state ", state.name, " of elements ", state.offset, " to ",
                       state.offset + state.values.size(), " does not fit: expected ", expected.offset,
                       " to ", expected.offset + expected.size,
                       "; with another number of ranks start without carried-over state"));
    }
    if (of_shard) return Owner().Load(name, state.values);
    const absl::Span<const float> values = absl::MakeConstSpan(scaled);
    for (size_t i = 0; i < sending_.size(); ++i) {
      const auto range = staged_ ? ShardOf(static_cast<int>(i)) : expected;
      GT_RETURN_IF_ERROR(sending_[i]->Load(name, values.subspan(range.offset, range.size)));
    }
    return absl::OkStatus();
  }

  uint64_t bytes_sent() const { return bytes_sent_; }
  uint64_t bytes_received() const { return bytes_received_; }
  bool momentum_travelled() const { return momentum_travelled_; }
  Selected selected() const { return selected_; }
  // The elements clipped by the last call, of the gradient and of the mean.
  size_t clipped() const {
    size_t sum = returning_ != nullptr ? Owner().clipped() : 0;
    if (low_rank_ != nullptr) sum += low_rank_->clipped();
    for (const auto& compressor : sending_) sum += compressor->clipped();
    return sum;
  }

 private:
  Flat(Communicator* group, int ranks, int largest_machine, const CompressionOptions& options, size_t count)
      : group_(group),
        scale_(ScaleOf(largest_machine)),
        factor_(1 / (static_cast<float>(ranks) * scale_)),
        count_(count),
        shard_size_(ShardSize(options, count, group->size())) {}

  // The sum of a machine's gradients would leave the range of a codec the sooner the more ranks it has. A
  // power of two, so that nothing is rounded and what is carried over is the same with and without it.
  static float ScaleOf(int largest_machine) {
    float scale = 1;
    while (static_cast<float>(largest_machine) * scale > 1) scale /= 2;
    return scale;
  }
  // DGC's sums may exceed the range of a float in the units of a rank: they become the largest float.
  static std::vector<float> Scaled(absl::Span<const float> values, float scale) {
    constexpr float kMost = std::numeric_limits<float>::max();
    std::vector<float> scaled(values.begin(), values.end());
    for (float& value : scaled) {
      if (std::isfinite(value)) value = std::clamp(value * scale, -kMost, kMost);
    }
    return scaled;
  }

  // The optimiser's momentum and, but for DGC's, the warm-up are this object's business: compressors know
  // neither.
  absl::Status TakeMomentum(CompressionOptions* options) {
    const bool top_k = options->codec == Codec::kTopK;
    const float momentum = std::exchange(options->optimizer_momentum, 0.0f);
    if (!(momentum >= 0 && momentum < 1) || options->warmup_steps < 0 ||
        options->warmup_steps > kWarmupStepsMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("compress: momentum must be in [0, 1), warm-up steps from 0 to ", kWarmupStepsMax));
    }
    if (top_k && momentum > 0) {
      return absl::InvalidArgumentError("compress: optimizer_momentum is not for topk; it has momentum");
    }
    if (top_k && options->momentum > 0) return absl::OkStatus();  // its ranks' own momenta know no dense step
    warmup_steps_ = std::exchange(options->warmup_steps, 0);
    if (momentum == 0 || options->codec == Codec::kNone) return absl::OkStatus();
    momentum_ = momentum;
    part_ = momentum / (factor_ * static_cast<float>(group_->size()));
    agreed_.resize(count_);
    agreed_next_.resize(count_);
    return absl::OkStatus();
  }

  absl::Status MakeStages(const CompressionOptions& senders) {
    staged_ = true;
    for (int rank = 0; rank < group_->size(); ++rank) {
      const size_t size = ShardOf(rank).size;
      if (size == 0) break;
      GT_ASSIGN_OR_RETURN(sending_.emplace_back(), Compressor::Create(senders, size));
    }
    CompressionOptions owner = OwnerOptions(senders, group_->size());
    owner_codec_ = owner.codec;
    ramp_steps_ = std::exchange(owner.warmup_steps, 0);
    if (Mine().size == 0) return absl::OkStatus();
    shard_.resize(Mine().size);
    GT_ASSIGN_OR_RETURN(returning_, Compressor::Create(owner, Mine().size));
    ramp_options_ = owner;
    ramp_options_.codec = Codec::kInt8;
    return BeginRamp();
  }

  // While the density of DGC's ranks falls, the mean of many has nearly every element. An owner whose density
  // fell with theirs would hold most of it back, and with it momenta that are old when they come. So the mean
  // goes back as int8 of all elements for so long, which is less than what the ranks send when it begins
  // (docs/performance.md has what that is worth on 64 ranks).
  bool Ramping() const { return steps_ < ramp_steps_; }
  Compressor& Owner() { return ramping_ != nullptr ? *ramping_ : *returning_; }
  const Compressor& Owner() const { return ramping_ != nullptr ? *ramping_ : *returning_; }
  int StepsCounted() const { return std::max(warmup_steps_, ramp_steps_); }
  // A program that goes back to a state from within the ramp calls it, too: it gets the owner of a new
  // object.
  absl::Status BeginRamp() {
    if (!Ramping() || returning_ == nullptr) return absl::OkStatus();
    GT_ASSIGN_OR_RETURN(std::unique_ptr<Compressor> anew, Compressor::Create(ramp_options_, Mine().size));
    GT_RETURN_IF_ERROR(CarryOn(Owner(), *anew));
    ramping_ = std::move(anew);
    return absl::OkStatus();
  }
  absl::Status EndRamp() {
    if (Ramping() || ramping_ == nullptr) return absl::OkStatus();
    return CarryOn(*std::exchange(ramping_, nullptr), *returning_);
  }
  // The residual of one owner's last packet goes into the next packet of the other.
  static absl::Status CarryOn(const Compressor& from, Compressor& to) {
    for (const Compressor::State& state : from.Export()) {
      if (state.name == kResidualState) GT_RETURN_IF_ERROR(to.Load(state.name, state.values));
    }
    return absl::OkStatus();
  }

  bool WarmingUp() const { return steps_ < warmup_steps_; }

  absl::Status LoadProgress(const CarriedState& state) {
    std::vector<Compressor*> compressors;
    for (const auto& compressor : sending_) compressors.push_back(compressor.get());
    if (returning_ != nullptr) compressors.push_back(returning_.get());
    std::erase_if(compressors, [](const Compressor* compressor) { return !HasProgress(*compressor); });
    absl::Span<const float> values = state.values;
    if (state.offset != 0 || values.size() != compressors.size() * kProgressNumbers) {
      return absl::InvalidArgumentError(absl::StrCat("compressed collective: ", kProgressState, " of ",
                                                     values.size(), " numbers for ", compressors.size(),
                                                     " compressors of ", kProgressNumbers, " each"));
    }
    for (Compressor* compressor : compressors) {
      GT_RETURN_IF_ERROR(compressor->Load(kProgressState, values.subspan(0, kProgressNumbers)));
      values.remove_prefix(kProgressNumbers);
    }
    return absl::OkStatus();
  }

  size_t ranks() const { return static_cast<size_t>(group_->size()); }
  CompressedCollective::Range ShardOf(int rank) const {
    const size_t begin = std::min(count_, shard_size_ * static_cast<size_t>(rank));
    return {begin, std::min(shard_size_, count_ - begin)};
  }

  // Applies what is still pending, which belongs to a step that was applied. Nothing is pending for a
  // gradient that was not finite, and that is no error.
  void Settle() {
    selected_ = {};
    for (auto& compressor : sending_) (void)compressor->Apply();
    if (returning_ != nullptr) (void)Owner().Apply();
    if (low_rank_ != nullptr) low_rank_->Apply();
    if (std::exchange(pending_momentum_, false)) agreed_.swap(agreed_next_);
    if (std::exchange(pending_step_, false) && steps_ < StepsCounted()) ++steps_;
    (void)EndRamp();
    // A warm-up needs more than the steps after it, of which there are many more.
    Trim(std::exchange(packets_used_, 0), &packets_);
    Trim(received_.size(), &received_);
  }
  static void Trim(size_t used, std::vector<uint8_t>* buffer) {
    if (buffer->capacity() <= kBufferSlack * used || used == 0) return;
    buffer->resize(used);
    buffer->shrink_to_fit();
  }

  absl::Status Dense(absl::Span<float> data) {
    bytes_sent_ += data.size() * sizeof(float);
    bytes_received_ += data.size() * sizeof(float);
    GT_RETURN_IF_ERROR(group_->AllReduce(data.data(), data.size(), DType::kFloat32, ReduceOp::kSum));
    for (float& value : data) value *= factor_;
    return absl::OkStatus();
  }

  // packets_ from `begin` on, of `bytes` at least.
  absl::Span<uint8_t> Room(size_t begin, size_t bytes) {
    packets_used_ = std::max(packets_used_, begin + bytes);
    packets_.resize(std::max(packets_.size(), packets_used_));
    return absl::MakeSpan(packets_).subspan(begin);
  }

  // Bytes from one packet to the next: those of the first shard, which is the largest, or where they differ
  // from rank to rank and from step to step, of the longest that any rank has in this one.
  absl::StatusOr<size_t> AgreeOnSlot(Codec codec, size_t longest) {
    if (codec != Codec::kTopK) {
      const size_t count = ShardOf(0).size;
      return SlotOf(PacketBytes({codec, 0, count, count}));
    }
    auto slot = static_cast<int64_t>(SlotOf(longest));
    GT_RETURN_IF_ERROR(group_->AllReduce(&slot, 1, DType::kInt64, ReduceOp::kMax));
    return static_cast<size_t>(slot);
  }

  // The first `slot` bytes of packets_ of each rank into received_.
  absl::Status AllGatherPackets(size_t slot) {
    (void)Room(0, slot);
    received_.resize(slot * ranks());
    bytes_sent_ += slot;
    bytes_received_ += slot * (ranks() - 1);
    return group_->AllGather(packets_.data(), received_.data(), slot, DType::kUint8);
  }

  absl::Status Gather(absl::Span<float> data) {
    GT_ASSIGN_OR_RETURN(const size_t bytes, sending_[0]->Encode(data, Room(0, sending_[0]->MaxBytesNow())));
    selected_ += sending_[0]->selected();
    GT_ASSIGN_OR_RETURN(const PacketHeader header, FindHeader(packets_, count_));
    GT_ASSIGN_OR_RETURN(const size_t slot, AgreeOnSlot(header.codec, bytes));
    if (slot * ranks() >= DenseBytes(count_)) {  // while warming up
      GT_RETURN_IF_ERROR(DecodeSlot(packets_, data, DecodeMode::kSet));
      return Dense(data);
    }
    ScaleTopK(absl::MakeSpan(packets_), header, factor_);
    GT_RETURN_IF_ERROR(AllGatherPackets(slot));
    for (size_t rank = 0; rank < ranks(); ++rank) {
      GT_RETURN_IF_ERROR(DecodeSlot({received_.data() + slot * rank, slot}, data,
                                    rank == 0 ? DecodeMode::kSet : DecodeMode::kAdd));
    }
    return absl::OkStatus();
  }

  // A packet for each shard into packets_, in slots. Returns the bytes of a slot.
  absl::StatusOr<size_t> EncodeShards(absl::Span<const float> data) {
    std::vector<size_t> begins;
    size_t end = 0, longest = 0;
    for (size_t rank = 0; rank < sending_.size(); ++rank) {
      const auto range = ShardOf(static_cast<int>(rank));
      begins.push_back(end);
      GT_ASSIGN_OR_RETURN(const size_t bytes,
                          sending_[rank]->Encode(data.subspan(range.offset, range.size),
                                                 Room(end, sending_[rank]->MaxBytesNow())));
      selected_ += sending_[rank]->selected();
      longest = std::max(longest, bytes);
      end += SlotOf(bytes);
    }
    GT_ASSIGN_OR_RETURN(const size_t slot, AgreeOnSlot(sending_[0]->options().codec, longest));
    (void)Room(0, slot * ranks());
    for (size_t rank = begins.size(); rank-- > 0; end = begins[rank]) {
      if (begins[rank] == slot * rank) break;  // and so do all below
      std::memmove(packets_.data() + slot * rank, packets_.data() + begins[rank], end - begins[rank]);
    }
    return slot;
  }

  absl::Status Scatter(absl::Span<const float> data, absl::Span<float> shard) {
    GT_ASSIGN_OR_RETURN(const size_t slot, EncodeShards(data));
    received_.resize(slot * ranks());
    bytes_sent_ += slot * (ranks() - 1);
    bytes_received_ += slot * (ranks() - 1);
    GT_RETURN_IF_ERROR(group_->AllToAll(packets_.data(), received_.data(), slot, DType::kUint8));
    if (shard.empty()) return absl::OkStatus();
    for (size_t rank = 0; rank < ranks(); ++rank) {
      GT_RETURN_IF_ERROR(DecodeSlot({received_.data() + slot * rank, slot}, shard,
                                    rank == 0 ? DecodeMode::kSet : DecodeMode::kAdd));
    }
    for (float& value : shard) value *= factor_;
    return absl::OkStatus();
  }

  Communicator* const group_;
  const float scale_;   // of what comes in
  const float factor_;  // of the sum of what was scaled
  const size_t count_;
  const size_t shard_size_;  // but for the last one, which has what is left
  float momentum_ = 0,
        part_ = 0;  // part_: what each member of the group adds, so that the mean has momentum_
  int warmup_steps_ = 0, ramp_steps_ = 0, steps_ = 0;
  std::vector<float> agreed_, agreed_next_;  // momentum, equal on all ranks
  bool momentum_travelled_ = false;          // in the last call
  bool pending_momentum_ = false;
  bool pending_step_ = false;
  bool staged_ = false;
  std::vector<std::unique_ptr<Compressor>> sending_;  // empty: dense; one; or one for each shard
  std::unique_ptr<Compressor> returning_;             // of the mean of this rank's shard
  std::unique_ptr<Compressor> ramping_;               // in its place while Ramping()
  CompressionOptions ramp_options_;                   // of ramping_
  Codec owner_codec_ = Codec::kNone;                  // of returning_, on all ranks
  std::unique_ptr<LowRankMean> low_rank_;             // PowerSGD alone
  std::vector<float> shard_, whole_;
  std::vector<uint8_t> packets_, received_;
  size_t packets_used_ = 0;  // bytes of packets_ in this step
  uint64_t bytes_sent_ = 0, bytes_received_ = 0;
  Selected selected_;  // in the last call
};

class Collective final : public CompressedCollective {
 public:
  explicit Collective(std::shared_ptr<Groups> groups) : groups_(std::move(groups)) {}

  absl::Status Connect(const CompressionOptions& options, size_t count,
                       const std::vector<std::vector<int64_t>>& shapes) {
    count_ = count;
    codec_ = options.codec;
    has_momentum_ = options.optimizer_momentum > 0;
    const bool compressed = options.codec != Codec::kNone;
    GT_RETURN_IF_ERROR(groups_->Open(compressed));
    if (compressed) machine_ = groups_->machine();
    Communicator* const group = machine_ == nullptr ? &groups_->all() : groups_->leaders();
    const absl::Status made = Caught([&]() -> absl::Status {
      if (group == nullptr) return absl::OkStatus();
      GT_ASSIGN_OR_RETURN(flat_, Flat::Make(group, groups_->all().size(), groups_->largest_machine(), options,
                                            count, shapes));
      return absl::OkStatus();
    });
    std::string words = absl::StrCat(WordsOf(options), count);
    for (const auto& shape : shapes) absl::StrAppend(&words, ";", absl::StrJoin(shape, "x"));
    return AgreeOn(groups_->all(), made, words);
  }

  absl::Status AllReduceMean(absl::Span<float> data) override {
    return Told([&] { return Mean(data); });
  }

  absl::Status Mean(absl::Span<float> data) {
    GT_RETURN_IF_ERROR(Fits("data", data.size(), count_));
    if (machine_ == nullptr) return flat_->AllReduce(data);
    GT_RETURN_IF_ERROR(machine_->Reduce(data.data(), count_, DType::kFloat32, ReduceOp::kSum, 0));
    if (flat_ != nullptr) GT_RETURN_IF_ERROR(flat_->AllReduce(data));
    GT_RETURN_IF_ERROR(machine_->Broadcast(data.data(), count_, DType::kFloat32, 0));
    if (!has_momentum_) return absl::OkStatus();
    // Ranks that do not talk to other machines know no warm-up.
    uint8_t travelled = momentum_travelled() ? 1 : 0;
    GT_RETURN_IF_ERROR(machine_->Broadcast(&travelled, 1, DType::kUint8, 0));
    travelled_here_ = travelled != 0;
    return absl::OkStatus();
  }

  absl::Status ReduceScatterMean(absl::Span<const float> data, absl::Span<float> shard) override {
    if (machine_ != nullptr) {
      return absl::FailedPreconditionError(
          "compressed reduce-scatter: several ranks share a machine; reduce inside it first and make this "
          "object over a Split with one rank a machine");
    }
    GT_RETURN_IF_ERROR(flat_->CanScatter());
    return Told([&]() -> absl::Status {
      GT_RETURN_IF_ERROR(Fits("data", data.size(), count_));
      GT_RETURN_IF_ERROR(Fits("shard", shard.size(), Shard().size));
      return flat_->ReduceScatter(data, shard);
    });
  }

  Range Shard() const override { return flat_ == nullptr ? Range{} : flat_->Mine(); }
  void Drop() override {
    if (flat_ != nullptr) flat_->Drop();
  }
  std::vector<CarriedState> Export() override {
    return flat_ == nullptr ? std::vector<CarriedState>{} : flat_->Export();
  }
  absl::Status Load(const CarriedState& state) override {
    if (flat_ != nullptr) return flat_->Load(state);
    return absl::InvalidArgumentError("compressed collective: this rank carries nothing over");
  }
  Codec codec() const override { return codec_; }
  bool momentum_travelled() const override {
    return flat_ == nullptr ? travelled_here_ : flat_->momentum_travelled();
  }
  uint64_t bytes_sent() const override { return flat_ == nullptr ? 0 : flat_->bytes_sent(); }
  uint64_t bytes_received() const override { return flat_ == nullptr ? 0 : flat_->bytes_received(); }
  Selected selected() const override { return flat_ == nullptr ? Selected{} : flat_->selected(); }
  size_t clipped() const override { return flat_ == nullptr ? 0 : flat_->clipped(); }

 private:
  // An error of this rank alone ends the call of the others as well.
  template <typename Body>
  absl::Status Told(const Body& body) {
    const absl::Status status = Caught(body);
    if (!status.ok()) groups_->Abort(status);
    return status;
  }

  static absl::Status Fits(const char* what, size_t size, size_t expected) {
    if (size == expected) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("compressed collective: ", what, " has ", size, " elements, expected ", expected));
  }

  size_t count_ = 0;
  Codec codec_ = Codec::kNone;
  bool has_momentum_ = false, travelled_here_ = false;
  const std::shared_ptr<Groups> groups_;
  Communicator* machine_ = nullptr;  // nullptr: no ranks are summed uncompressed
  std::unique_ptr<Flat> flat_;       // nullptr: another rank of this machine has it
};

}  // namespace

absl::StatusOr<std::unique_ptr<CompressedCollective>> CreateCollective(
    std::shared_ptr<Groups> groups, const CompressionOptions& options, size_t count,
    const std::vector<std::vector<int64_t>>& shapes) {
  auto collective = std::make_unique<Collective>(std::move(groups));
  GT_RETURN_IF_ERROR(collective->Connect(options, count, shapes));
  return collective;
}

}  // namespace comm

absl::StatusOr<std::unique_ptr<CompressedCollective>> CompressedCollective::Create(
    Communicator* communicator, const CompressionOptions& options, size_t count,
    const std::vector<std::vector<int64_t>>& shapes) {
  return comm::CreateCollective(std::make_shared<comm::Groups>(communicator), options, count, shapes);
}

}  // namespace gtrain
