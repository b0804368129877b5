// Buckets of gradients and the thread that reduces them, strictly in order, so that all ranks call the same
// collectives whatever order their hooks ran in.
#include "comm/reducer/reducer.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "comm/codec/low_rank.h"
#include "comm/reducer/create_reducer.h"
#include "comm/reducer/groups.h"
#include "comm/reducer/handover.h"

namespace gtrain {
namespace comm {
namespace {

constexpr int kWindow = 20;  // steps between two looks at what they cost
constexpr int kTrial = 5;    // steps until the first look at a new choice
// Notes are sent at most so often: a keeper without its agent keeps all of them.
constexpr absl::Duration kSayChange = absl::Seconds(1);
constexpr absl::Duration kSayClipped = absl::Minutes(1);
constexpr absl::Duration kSayAgain = absl::Seconds(30);  // for a head that has forgotten it
constexpr int kTimeoutsABucket = 2;                      // that Finish waits for one bucket
constexpr absl::Duration kForever = absl::Hours(24 * 365);
constexpr size_t kSampleElements = 1 << 18;

struct Bucket {
  std::vector<size_t> gradients;
  std::vector<std::vector<int64_t>> shapes;  // of those, in the order of their memory
  size_t count = 0;
  absl::Span<float> memory;
  std::unique_ptr<CompressedCollective> collective;
  uint64_t sent_before = 0;  // bytes, by collectives that are no more

  // Used by an automatic choice only.
  BucketCost cost;  // of the options in ReducerImpl::ways_; equal on all ranks
  size_t next_way = 0;
  std::vector<double> ready, seconds;  // of the steps since the last look, on this rank
  // The state that the collective before this one carried over, in the units of this rank's gradient: it goes
  // out with the next step, and again if that step is dropped.
  std::vector<float> leftover;
  bool leftover_sent = false;
  uint64_t step = 0;  // in which it was reduced last

  HandoverLayout handed;
  std::vector<float> taken;  // its part of the block that it began with; empty: zeros
};

// A time that is seldom undercut: other work on the machine only adds to it.
double LowerQuarter(std::vector<double> values) {
  const auto at = values.begin() + static_cast<ptrdiff_t>(values.size() / 4);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// A gradient of all sizes, in no order.
std::vector<float> Sample() {
  std::vector<float> gradient(kSampleElements);
  for (size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = static_cast<float>(i * 2654435761 % 65536) - 32768;
  }
  return gradient;
}

// Seconds that one element of a matrix costs here.
double LowRankSpeed(const CompressionOptions& options) {
  const Matrix shape{0, 512, kSampleElements / 512};
  const auto rank = static_cast<size_t>(options.matrix_rank);
  std::vector<float> residual(shape.size()), left(shape.rows * rank), right(shape.columns * rank);
  double best = 1;
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<float> gradient = Sample();
    const Instant began = RealClock().Now();
    FillZeroColumns(right.data(), shape.columns, rank, 1);
    MultiplyRight(gradient.data(), residual.data(), shape, rank, right.data(), left.data());
    Orthonormalise(left.data(), shape.rows, rank);
    MultiplyLeft(gradient.data(), shape, rank, left.data(), right.data());
    Expand(gradient.data(), residual.data(), shape, rank, left.data(), right.data(), right.data());
    best = std::min(best, absl::ToDoubleSeconds(RealClock().Now() - began));
  }
  return best / static_cast<double>(kSampleElements);
}

// Seconds that one element costs to encode and decode here.
absl::StatusOr<double> CodecSpeed(CompressionOptions options) {
  if (options.codec == Codec::kPowerSgd) return LowRankSpeed(options);
  options.optimizer_momentum = options.momentum = 0;
  options.warmup_steps = 0;
  GT_ASSIGN_OR_RETURN(const auto compressor, Compressor::Create(options, kSampleElements));
  const std::vector<float> gradient = Sample();
  std::vector<float> decoded(kSampleElements);
  std::vector<uint8_t> packet(compressor->MaxBytes());
  double best = 1;
  for (int turn = 0; turn < 4; ++turn) {
    const Instant began = RealClock().Now();
    GT_ASSIGN_OR_RETURN(const size_t bytes, compressor->Encode(gradient, absl::MakeSpan(packet)));
    GT_RETURN_IF_ERROR(Decode({packet.data(), bytes}, absl::MakeSpan(decoded), DecodeMode::kSet));
    best = std::min(best, absl::ToDoubleSeconds(RealClock().Now() - began));
    (void)compressor->Apply();
  }
  return best / static_cast<double>(kSampleElements);
}

// Describes everything that must be equal on all ranks.
std::string WordsOfAll(absl::Span<const GradientSpec> gradients, const ReducerOptions& options,
                       const CompressionPolicy& policy) {
  std::string words =
      absl::StrCat(options.bucket_bytes, ";", options.compress_from, ";", policy.automatic, ";");
  for (const CompressionOptions& codec : policy.codecs) words += WordsOf(codec);
  for (const GradientSpec& gradient : gradients) {
    absl::StrAppend(&words, gradient.name, " ", gradient.count, " ", absl::StrJoin(gradient.shape, "x"), ";");
  }
  return words;
}

struct Place {
  size_t bucket = 0;
  size_t offset = 0;
  size_t count = 0;
};

class ReducerImpl final : public Reducer {
 public:
  explicit ReducerImpl(Chooser chooser) : chooser_(std::move(chooser)) {}
  ~ReducerImpl() override {
    {
      MutexLock held(&lock_);
      over_ = true;
    }
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Connect(Communicator* communicator, const std::vector<GradientSpec>& gradients,
                       const ReducerOptions& options) {
    CompressionPolicy policy;
    const absl::Status prepared = Caught([&] { return Prepare(gradients, options, &policy); });
    GT_RETURN_IF_ERROR(AgreeOn(*communicator, prepared, WordsOfAll(gradients, options, policy)));
    GT_ASSIGN_OR_RETURN(communicator_, communicator->Split(0, communicator->rank()));
    groups_ = std::make_shared<Groups>(communicator_.get());
    const absl::Status made = Caught([&] { return MakeBuckets(policy, options); });
    if (!made.ok()) {
      groups_->Abort(made);
      return made;
    }
    step_began_ = RealClock().Now();
    MutexLock held(&lock_);
    StartStep();
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
  }

  // The part of the preparation that needs no other ranks.
  absl::Status Prepare(const std::vector<GradientSpec>& gradients, const ReducerOptions& options,
                       CompressionPolicy* policy) {
    GT_RETURN_IF_ERROR(Fill(gradients, options.bucket_bytes / sizeof(float)));
    GT_ASSIGN_OR_RETURN(const std::optional<CompressionPolicy> job, CompressionOfJob());
    *policy = job.value_or(CompressionPolicy{false, {options.compression}});
    if (policy->automatic) return PrepareChoice(*policy);
    const auto is_matrix = [](const GradientSpec& gradient) { return gradient.shape.size() >= 2; };
    if (!policy->codecs.empty() && policy->codecs[0].codec == Codec::kPowerSgd &&
        std::none_of(gradients.begin(), gradients.end(), is_matrix)) {
      return absl::InvalidArgumentError(
          "reducer: powersgd compresses matrices, and this program says of no gradient that it is one: give "
          "GradientSpec::shape, or take another codec");
    }
    return absl::OkStatus();
  }

  absl::Status MakeBuckets(const CompressionPolicy& policy, const ReducerOptions& options) {
    if (policy.automatic) GT_RETURN_IF_ERROR(AgreeOnCosts());
    const CompressionOptions fixed =
        policy.automatic || policy.codecs.empty() ? CompressionOptions{} : policy.codecs[0];
    for (Bucket& bucket : buckets_) {
      GT_ASSIGN_OR_RETURN(void* const memory, communicator_->Allocate(bucket.count * sizeof(float)));
      bucket.memory = absl::MakeSpan(static_cast<float*>(memory), bucket.count);
      const bool compressed = bucket.count >= options.compress_from;
      GT_ASSIGN_OR_RETURN(
          bucket.collective,
          CreateCollective(groups_, compressed ? fixed : CompressionOptions{}, bucket.count, bucket.shapes));
      bucket.cost.ways.assign(1, WayOf({}, bucket.count, talking_));
      for (size_t way = 1; compressed && way < ways_.size(); ++way) {
        GT_ASSIGN_OR_RETURN(Way cost, CostOf(way, bucket));
        bucket.cost.ways.push_back(cost);
      }
    }
    GT_RETURN_IF_ERROR(PlanHandover(policy, options.compress_from));
    return NameCarried(policy);
  }

  absl::Span<float> gradient(size_t index) override {
    const Place& place = places_[index];
    return buckets_[place.bucket].memory.subspan(place.offset, place.count);
  }

  absl::Status Ready(size_t index) override {
    if (index >= places_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("reducer: there is no gradient ", index, ", they are 0 to ", places_.size() - 1));
    }
    MutexLock held(&lock_);
    if (ready_[index]) {
      return absl::FailedPreconditionError(
          absl::StrCat("reducer: gradient ", index, " (", names_[index],
                       ") is ready for the second time in this step; call Ready after its last use"));
    }
    ready_[index] = true;
    Bucket& bucket = buckets_[places_[index].bucket];
    if (--missing_[places_[index].bucket] == 0 && Chooses()) bucket.ready.push_back(SinceBegin());
    return absl::OkStatus();
  }

  absl::StatusOr<ReducedStep> Finish() override {
    ReducedStep step;
    MutexLock held(&lock_);
    GT_RETURN_IF_ERROR(dead_);
    step.early = done_;
    for (size_t i = 0; i < ready_.size(); ++i) {
      if (!ready_[i]) step.unused.push_back(i);
    }
    for (size_t i = 0; i < buckets_.size(); ++i) {
      if (missing_[i] > 0 && Chooses()) buckets_[i].ready.push_back(SinceBegin());
      missing_[i] = 0;
    }
    if (Chooses()) computed_.push_back(SinceBegin());
    AwaitBuckets();
    GT_RETURN_IF_ERROR(dead_);
    const uint64_t sent = BytesSent();
    step.bytes_sent = sent - std::exchange(sent_before_, sent);
    for (const Bucket& bucket : buckets_) {
      step.selected += bucket.collective->selected();
      step.clipped += bucket.collective->clipped();
      step.momentum_travelled |= bucket.collective->momentum_travelled();
    }
    SayClipped(step.clipped);
    if (Chooses() && ++steps_since_look_ >= look_after_) {
      // The analysis does not look into the function that calls it, with the lock held.
      dead_ = Caught([this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return Look(); });
      GT_RETURN_IF_ERROR(dead_);
    }
    StartStep();
    step_began_ = RealClock().Now();
    return step;
  }

  void Abort(const absl::Status& why) override {
    MutexLock held(&lock_);
    dead_.Update(why.ok() ? absl::AbortedError("reducer: Abort without a reason") : why);
  }

  std::vector<BucketChoice> Choices() const override {
    std::vector<BucketChoice> choices;
    for (const Bucket& bucket : buckets_) {
      BucketChoice choice{bucket.count, bucket.collective->codec(), {}};
      for (size_t way = 0; looked_ && way < bucket.cost.ways.size(); ++way) {
        choice.seconds.push_back({ways_[way].codec, Seconds(bucket.cost, way, latency_),
                                  bucket.cost.ways[way].measured.has_value()});
      }
      choices.push_back(std::move(choice));
    }
    return choices;
  }

  void Drop() override {
    for (Bucket& bucket : buckets_) {
      bucket.collective->Drop();
      bucket.leftover_sent = false;
    }
  }

  std::vector<CarriedState> Export() override {
    std::vector<CarriedState> states;
    for (size_t i = 0; i < buckets_.size(); ++i) {
      ExportCollective(i, &states);
      const Bucket& bucket = buckets_[i];
      if (!bucket.leftover.empty() && !bucket.leftover_sent) {
        states.push_back({Prefix(i) + "residual", 0, bucket.leftover});
      }
    }
    return states;
  }

  absl::Status Load(const CarriedState& state) override {
    for (size_t i = 0; i < buckets_.size(); ++i) {
      const std::string prefix = Prefix(i);
      if (!state.name.starts_with(prefix)) continue;
      if (Chooses()) return KeepChecked(state, prefix, &buckets_[i]);
      return buckets_[i].collective->Load({state.name.substr(prefix.size()), state.offset, state.values});
    }
    return absl::InvalidArgumentError(absl::StrCat("reducer: there is no bucket for the state ", state.name));
  }

  const std::string& CarriedName() const override { return carried_name_; }
  size_t CarriedCount() const override { return carried_count_; }

  absl::Status ExportCarried(absl::Span<float> block) override {
    GT_RETURN_IF_ERROR(IsWhole(block.size()));
    auto at = block.begin();
    if (!Chooses()) {
      std::vector<CarriedState> states;
      for (size_t i = 0; i < buckets_.size(); ++i) ExportCollective(i, &states);
      for (const CarriedState& state : states) at = std::copy(state.values.begin(), state.values.end(), at);
      return absl::OkStatus();
    }
    std::fill(block.begin(), block.end(), 0.0f);
    for (size_t i = 0; i < buckets_.size(); ++i) {
      Bucket& bucket = buckets_[i];
      const absl::Span<float> part(&*at, bucket.count);
      at += static_cast<ptrdiff_t>(bucket.count);
      for (const CarriedState& state : bucket.collective->Export()) AddUp(state, part);
      if (!bucket.leftover_sent && !bucket.leftover.empty()) AddUp({"residual", 0, bucket.leftover}, part);
    }
    return absl::OkStatus();
  }

  absl::Status LoadCarried(absl::Span<const float> block) override {
    GT_RETURN_IF_ERROR(IsWhole(block.size()));
    if (Chooses()) {
      for (Bucket& bucket : buckets_) {
        bucket.leftover.assign(block.begin(), block.begin() + static_cast<ptrdiff_t>(bucket.count));
        bucket.leftover_sent = false;
        block.remove_prefix(bucket.count);
      }
      return absl::OkStatus();
    }
    std::vector<CarriedState> states;
    for (size_t i = 0; i < buckets_.size(); ++i) ExportCollective(i, &states);
    for (CarriedState& state : states) {
      state.values.assign(block.begin(), block.begin() + static_cast<ptrdiff_t>(state.values.size()));
      block.remove_prefix(state.values.size());
      GT_RETURN_IF_ERROR(Load(state));
    }
    return absl::OkStatus();
  }

  const std::string& HandoverName() const override { return handover_name_; }
  size_t HandoverCount() const override { return handover_count_; }
  std::vector<BlockRange> HandoverResiduals() const override {
    std::vector<BlockRange> ranges;
    size_t at = 0;
    for (const Bucket& bucket : buckets_) {
      ranges.push_back({at + HandoverLayout::kNumbers, bucket.handed.residual});
      at += bucket.handed.size();
    }
    return ranges;
  }

  absl::Status GiveHandover(bool applied, absl::Span<float> block) override {
    GT_RETURN_IF_ERROR(IsHandover(block.size()));
    uint64_t step = 0;
    {
      MutexLock held(&lock_);
      lock_.Await([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) { return !reducing_; });
      step = step_;
    }
    for (Bucket& bucket : buckets_) {
      if (bucket.step == step || !applied) {
        bucket.collective->Drop();
        bucket.leftover_sent = false;
      }
      const absl::Span<float> part = block.subspan(0, bucket.handed.size());
      block.remove_prefix(part.size());
      Give(bucket, part);
    }
    return absl::OkStatus();
  }

  absl::Status TakeHandover(absl::Span<const float> block) override {
    GT_RETURN_IF_ERROR(IsHandover(block.size()));
    if (handover_count_ == 0) return absl::OkStatus();
    for (Bucket& bucket : buckets_) {
      bucket.taken.assign(block.begin(), block.begin() + static_cast<ptrdiff_t>(bucket.handed.size()));
      block.remove_prefix(bucket.handed.size());
    }
    GT_RETURN_IF_ERROR(Share());
    for (Bucket& bucket : buckets_) GT_RETURN_IF_ERROR(Take(bucket));
    return absl::OkStatus();
  }

 private:
  void ExportCollective(size_t bucket, std::vector<CarriedState>* states) const {
    for (CarriedState& state : buckets_[bucket].collective->Export()) {
      state.name = Prefix(bucket) + state.name;
      states->push_back(std::move(state));
    }
  }

  // ---- between reducers of different ranks

  absl::Status IsHandover(size_t count) const {
    if (count == handover_count_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("reducer: a block of ", count, " numbers, what is handed over has ", handover_count_));
  }

  absl::Status PlanHandover(const CompressionPolicy& policy, size_t compress_from) {
    const auto compresses = [](const CompressionOptions& options) { return options.codec != Codec::kNone; };
    if (std::none_of(policy.codecs.begin(), policy.codecs.end(), compresses)) return absl::OkStatus();
    std::string what;
    for (const CompressionOptions& options : policy.codecs) what += WordsOf(options);
    for (Bucket& bucket : buckets_) {
      if (policy.automatic) {
        bucket.handed.residual = bucket.count;
      } else if (bucket.count >= compress_from) {
        GT_ASSIGN_OR_RETURN(bucket.handed, LayoutOf(policy.codecs[0], bucket.count, bucket.shapes));
      }
      absl::StrAppend(&what, ";", bucket.count, " ", bucket.handed.size());
      handover_count_ += bucket.handed.size();
    }
    handover_name_ = absl::StrCat("reducer/", policy.automatic ? "auto" : CodecName(policy.codecs[0].codec),
                                  "-any-ranks-", absl::Hex(Fnv1a(what), absl::kZeroPad16));
    return absl::OkStatus();
  }

  void Give(Bucket& bucket, absl::Span<float> part) const {
    // A collective among other ranks may not say everything that the one before it did.
    std::copy(bucket.taken.begin(), bucket.taken.end(), part.begin());
    const bool unsent = !bucket.leftover.empty() && !bucket.leftover_sent;
    Pack(bucket.collective->Export(), unsent ? bucket.leftover : absl::Span<const float>(),
         communicator_->size(), bucket.handed, part);
  }

  // All ranks get from the lowest one that has most what is equal on all.
  absl::Status Share() {
    float mine = 0;
    for (const Bucket& bucket : buckets_) mine = std::max(mine, bucket.taken[0]);
    std::vector<float> how(static_cast<size_t>(communicator_->size()));
    GT_RETURN_IF_ERROR(communicator_->AllGather(&mine, how.data(), 1, DType::kFloat32));
    const auto most = std::max_element(how.begin(), how.end());
    if (*most == 0) return absl::OkStatus();
    const auto source = static_cast<int>(most - how.begin());
    size_t size = 0;
    for (const Bucket& bucket : buckets_) size += bucket.handed.shared();
    std::vector<float> shared(size);
    absl::Span<float> at = absl::MakeSpan(shared);
    for (const Bucket& bucket : buckets_) {
      CopyShared(bucket.taken, bucket.handed, at);
      at.remove_prefix(bucket.handed.shared());
    }
    GT_RETURN_IF_ERROR(communicator_->Broadcast(shared.data(), shared.size(), DType::kFloat32, source));
    at = absl::MakeSpan(shared);
    for (Bucket& bucket : buckets_) {
      SetShared(at, bucket.handed, absl::MakeSpan(bucket.taken));
      at.remove_prefix(bucket.handed.shared());
    }
    const auto anew = std::count(how.begin(), how.end(), 0.0f);
    if (communicator_->rank() == 0) {
      communicator_->ReportCompression(absl::StrCat(how.size() - static_cast<size_t>(anew), " of ",
                                                    how.size(),
                                                    " ranks go on with what was held back of their gradients",
                                                    anew > 0 ? ", the others begin anew" : ""));
    }
    return absl::OkStatus();
  }

  absl::Status Take(Bucket& bucket) {
    bool residual_taken = false;
    const std::vector<CarriedState> states =
        Unpack(bucket.taken, communicator_->size(), bucket.handed,
               Chooses() ? std::vector<CarriedState>{} : bucket.collective->Export(), &residual_taken);
    for (const CarriedState& state : states) GT_RETURN_IF_ERROR(bucket.collective->Load(state));
    const absl::Span<const float> residual =
        absl::MakeConstSpan(bucket.taken).subspan(HandoverLayout::kNumbers, bucket.handed.residual);
    const bool any = std::any_of(residual.begin(), residual.end(), [](float value) { return value != 0; });
    if (residual_taken || !any) return absl::OkStatus();
    // A collective that keeps none sends it with the first step.
    bucket.leftover.assign(residual.begin(), residual.end());
    for (float& value : bucket.leftover) value *= static_cast<float>(communicator_->size());
    bucket.leftover_sent = false;
    return absl::OkStatus();
  }

  // ---- buckets

  static std::string Prefix(size_t bucket) { return absl::StrCat("bucket", bucket, "/"); }

  static absl::Status CheckShape(const GradientSpec& gradient) {
    if (gradient.shape.empty() || MatricesOf({gradient.shape}, gradient.count, 1).ok())
      return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("reducer: the gradient ", gradient.name, " of ",
                                                   gradient.count, " elements cannot have the shape ",
                                                   absl::StrJoin(gradient.shape, " x ")));
  }

  // Fills the buckets from the last gradient, which backward makes first.
  absl::Status Fill(const std::vector<GradientSpec>& gradients, size_t bucket_elements) {
    if (gradients.empty()) return absl::InvalidArgumentError("reducer: there are no gradients");
    places_.resize(gradients.size());
    for (size_t i = gradients.size(); i-- > 0;) {
      const size_t count = gradients[i].count;
      if (count == 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("reducer: gradient ", i, " (", gradients[i].name, ") has no elements"));
      }
      GT_RETURN_IF_ERROR(CheckShape(gradients[i]));
      if (buckets_.empty() || buckets_.back().count + count > bucket_elements) buckets_.emplace_back();
      Bucket& bucket = buckets_.back();
      places_[i] = {buckets_.size() - 1, bucket.count, count};
      bucket.gradients.push_back(i);
      bucket.shapes.push_back(gradients[i].shape.empty() ? std::vector{static_cast<int64_t>(count)}
                                                         : gradients[i].shape);
      bucket.count += count;
    }
    for (const GradientSpec& gradient : gradients) names_.push_back(gradient.name);
    return absl::OkStatus();
  }

  void SayClipped(size_t elements) {
    clipped_ += elements;
    if (elements == 0 || RealClock().Now() - said_clipped_at_ < kSayClipped) return;
    said_clipped_at_ = RealClock().Now();
    LogWarning("reducer: rank ", communicator_->rank(), ": ", clipped_,
               " elements of gradients so far were larger than their codec can say and were clipped: the "
               "learning rate or the loss scale is too large, or the codec has too small a range (bf16 has "
               "a larger one than fp16)");
  }

  void StartStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) {
    ready_.assign(places_.size(), false);
    missing_.clear();
    for (const Bucket& bucket : buckets_) missing_.push_back(bucket.gradients.size());
    done_ = 0;
    ++step_;
  }

  // Each collective of a bucket ends by its own deadline, and all but the slowest take far less.
  void AwaitBuckets() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) {
    const absl::Duration longest = std::min(kTimeoutsABucket * communicator_->timeout(), kForever);
    while (done_ < buckets_.size() && dead_.ok()) {
      const size_t before = done_;
      const auto moved = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) { return done_ > before || !dead_.ok(); };
      if (lock_.AwaitFor(longest, moved)) continue;
      dead_ = absl::DeadlineExceededError(absl::StrCat("reducer: bucket ", before, " of ", buckets_.size(),
                                                       " was not reduced within ",
                                                       absl::FormatDuration(longest)));
    }
  }

  uint64_t BytesSent() const {
    uint64_t sum = 0;
    for (const Bucket& bucket : buckets_) sum += bucket.sent_before + bucket.collective->bytes_sent();
    return sum;
  }

  // Predicts the cost of a way that was not used yet.
  absl::StatusOr<Way> CostOf(size_t way, const Bucket& bucket) const {
    const CompressionOptions& options = ways_[way];
    size_t computed = bucket.count, sent = 0;
    if (options.codec == Codec::kPowerSgd) {
      const auto rank = static_cast<size_t>(options.matrix_rank);
      GT_ASSIGN_OR_RETURN(const std::vector<Matrix> matrices, MatricesOf(bucket.shapes, bucket.count, rank));
      computed = 0;
      for (const Matrix& m : matrices) computed += m.size();
      sent = FactorElements(matrices, bucket.count, rank);
    }
    Way cost = WayOf(options, bucket.count, talking_, sent);
    cost.codec_seconds = speeds_[way] * static_cast<double>(computed);
    return cost;
  }

  bool Chooses() const { return !ways_.empty(); }
  double SinceBegin() const { return absl::ToDoubleSeconds(RealClock().Now() - step_began_); }

  // The codecs of an automatic choice and what they cost here. Warm-up is the time before the first look:
  // whatever comes later is switched on in full.
  absl::Status PrepareChoice(const CompressionPolicy& policy) {
    ways_.assign(1, CompressionOptions{});
    speeds_.assign(1, 0);
    look_after_ = kTrial;
    for (CompressionOptions options : policy.codecs) {
      look_after_ = std::max(look_after_, options.warmup_steps);
      options.warmup_steps = 0;
      GT_ASSIGN_OR_RETURN(const double speed, CodecSpeed(options));
      ways_.push_back(options);
      speeds_.push_back(speed);
    }
    return absl::OkStatus();
  }

  absl::Status AgreeOnCosts() {
    GT_RETURN_IF_ERROR(
        communicator_->AllReduce(speeds_.data(), speeds_.size(), DType::kFloat64, ReduceOp::kMax));
    int32_t machines = communicator_->machine() + 1;
    GT_RETURN_IF_ERROR(communicator_->AllReduce(&machines, 1, DType::kInt32, ReduceOp::kMax));
    talking_ = machines > 1 ? machines : communicator_->size();
    return absl::OkStatus();
  }

  // One bucket in the reducer's thread. A new choice begins here: whether the step before counts is known
  // now.
  absl::Status Reduce(Bucket& bucket, uint64_t step) {
    bucket.step = step;
    if (std::exchange(bucket.leftover_sent, false)) bucket.leftover.clear();
    if (bucket.next_way != bucket.cost.way) GT_RETURN_IF_ERROR(Switch(bucket));
    if (!bucket.leftover.empty()) {
      for (size_t i = 0; i < bucket.count; ++i) bucket.memory[i] += bucket.leftover[i];
      bucket.leftover_sent = true;
    }
    const Instant began = RealClock().Now();
    const absl::Status status = bucket.collective->AllReduceMean(bucket.memory);
    if (Chooses()) bucket.seconds.push_back(absl::ToDoubleSeconds(RealClock().Now() - began));
    return status;
  }

  absl::Status Switch(Bucket& bucket) {
    for (const CarriedState& state : bucket.collective->Export()) Keep(state, &bucket);
    bucket.sent_before += bucket.collective->bytes_sent();
    bucket.cost.way = bucket.next_way;
    GT_ASSIGN_OR_RETURN(bucket.collective,
                        CreateCollective(groups_, ways_[bucket.next_way], bucket.count, bucket.shapes));
    return absl::OkStatus();
  }

  // Adds the residuals of a collective to the next gradient. Momenta are made again.
  void Keep(const CarriedState& state, Bucket* bucket) const {
    bucket->leftover.resize(bucket->count);
    AddUp(state, absl::MakeSpan(bucket->leftover));
  }

  // Residuals in the units of this rank's gradient.
  void AddUp(const CarriedState& state, absl::Span<float> bucket) const {
    const bool of_mean = state.name == "residual/shard";
    if (!of_mean && state.name != "residual") return;
    const float factor = of_mean ? static_cast<float>(communicator_->size()) : 1;
    for (size_t i = 0; i < state.values.size(); ++i) bucket[state.offset + i] += factor * state.values[i];
  }

  // The name covers the state of all ranks, since it depends on which ranks share a machine what each carries
  // over.
  absl::Status NameCarried(const CompressionPolicy& policy) {
    std::string what;
    if (Chooses()) {
      for (const Bucket& bucket : buckets_)
        absl::StrAppend(&what, bucket.count, ";"), carried_count_ += bucket.count;
    } else {
      for (size_t i = 0; i < buckets_.size(); ++i) {  // one after the other: states are as large as gradients
        for (const CarriedState& state : buckets_[i].collective->Export()) {
          absl::StrAppend(&what, Prefix(i), state.name, " ", state.offset, " ", state.values.size(), ";");
          carried_count_ += state.values.size();
        }
      }
    }
    const auto ranks = static_cast<size_t>(communicator_->size());
    const int64_t own[] = {static_cast<int64_t>(carried_count_), static_cast<int64_t>(Fnv1a(what))};
    std::vector<int64_t> all(2 * ranks);
    GT_RETURN_IF_ERROR(communicator_->AllGather(own, all.data(), 2, DType::kInt64));
    int64_t most = 0;
    for (size_t rank = 0; rank < ranks; ++rank) most = std::max(most, all[2 * rank]);
    if (most == 0) return absl::OkStatus();
    const absl::string_view bytes(reinterpret_cast<const char*>(all.data()), all.size() * sizeof(int64_t));
    carried_name_ = absl::StrCat("reducer/", Chooses() ? "auto" : CodecName(policy.codecs[0].codec), "-of-",
                                 ranks, "-ranks-", absl::Hex(Fnv1a(bytes), absl::kZeroPad16));
    return absl::OkStatus();
  }

  absl::Status IsWhole(size_t count) const {
    if (count == carried_count_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("reducer: a block of ", count, " numbers, what is carried over has ", carried_count_));
  }

  absl::Status KeepChecked(const CarriedState& state, const std::string& prefix, Bucket* bucket) const {
    if (state.offset > bucket->count || state.values.size() > bucket->count - state.offset) {
      return absl::InvalidArgumentError(absl::StrCat("reducer: the state ", state.name, " is of elements ",
                                                     state.offset, " to ", state.offset + state.values.size(),
                                                     ", the bucket has ", bucket->count));
    }
    Keep({state.name.substr(prefix.size()), state.offset, state.values}, bucket);
    return absl::OkStatus();
  }

  // Between two steps, with the reducer's thread at rest: what the ranks measured, agreed on; rank 0 chooses.
  absl::Status Look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) {
    std::vector<double>
        agreed;  // least of all ranks: whoever came last did not wait. Times of computing negated
    for (Bucket& bucket : buckets_) {
      agreed.push_back(LowerQuarter(std::exchange(bucket.seconds, {})));
      agreed.push_back(-LowerQuarter(std::exchange(bucket.ready, {})));
    }
    agreed.push_back(-LowerQuarter(std::exchange(computed_, {})));
    agreed.push_back(1);  // latency: the shortest of three small all-reduces
    double nothing = 0;
    for (int turn = 0; turn < 3; ++turn) {
      const Instant began = RealClock().Now();
      GT_RETURN_IF_ERROR(communicator_->AllReduce(&nothing, 1, DType::kFloat64, ReduceOp::kMax));
      agreed.back() = std::min(agreed.back(), absl::ToDoubleSeconds(RealClock().Now() - began));
    }
    GT_RETURN_IF_ERROR(
        communicator_->AllReduce(agreed.data(), agreed.size(), DType::kFloat64, ReduceOp::kMin));
    latency_ = agreed.back();
    std::vector<BucketCost> costs;
    for (size_t i = 0; i < buckets_.size(); ++i) {
      BucketCost& cost = buckets_[i].cost;
      Measured(agreed[2 * i], &cost);
      cost.ready = -agreed[2 * i + 1];
      costs.push_back(cost);
    }
    const double computed = -agreed[agreed.size() - 2];
    std::vector<int32_t> chosen;
    for (const size_t way : chooser_(costs, computed, latency_)) chosen.push_back(static_cast<int32_t>(way));
    GT_RETURN_IF_ERROR(communicator_->Broadcast(chosen.data(), chosen.size(), DType::kInt32, 0));
    std::vector<size_t> ways(buckets_.size());
    bool changed = false;
    for (size_t i = 0; i < buckets_.size(); ++i) {
      Bucket& bucket = buckets_[i];
      if (chosen[i] < 0 || static_cast<size_t>(chosen[i]) >= bucket.cost.ways.size()) {
        return absl::DataLossError("reducer: rank 0 chose a codec that this rank does not have");
      }
      bucket.next_way = ways[i] = static_cast<size_t>(chosen[i]);
      if (bucket.next_way == bucket.cost.way) continue;
      changed = true;
      if (communicator_->rank() == 0) LogChoice(i, computed);
    }
    if (communicator_->rank() == 0 && RealClock().Now() - said_at_ >= (changed ? kSayChange : kSayAgain)) {
      communicator_->ReportCompression(Describe(costs, ways_, ways, computed, latency_));
      said_at_ = RealClock().Now();
    }
    looked_ = true;
    steps_since_look_ = 0;
    look_after_ = changed ? kTrial : kWindow;
    return absl::OkStatus();
  }

  void LogChoice(size_t index, double computed) const {
    const Bucket& bucket = buckets_[index];
    std::string text;
    for (size_t way = 0; way < bucket.cost.ways.size(); ++way) {
      absl::StrAppendFormat(&text, "%s%s %.3g ms%s", way == 0 ? "" : ", ", Word(ways_[way]),
                            1e3 * Seconds(bucket.cost, way, latency_),
                            bucket.cost.ways[way].measured ? "" : " (expected)");
    }
    LogInfo("reducer: bucket ", index, " of ", bucket.count, " elements goes from ",
            Word(ways_[bucket.cost.way]), " to ", Word(ways_[bucket.next_way]), ": ", text, "; ready after ",
            absl::StrFormat("%.3g ms of %.3g ms", 1e3 * bucket.cost.ready, 1e3 * computed));
  }

  void Run() {
    lock_.Lock();
    while (true) {
      lock_.Await([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) {
        return over_ || !dead_.ok() || (done_ < buckets_.size() && missing_[done_] == 0);
      });
      if (over_ || !dead_.ok()) break;
      Bucket& bucket = buckets_[done_];
      const uint64_t step = step_;
      reducing_ = true;
      lock_.Unlock();
      const absl::Status status = Caught([&] { return Reduce(bucket, step); });
      lock_.Lock();
      reducing_ = false;
      dead_.Update(status);
      if (!dead_.ok()) break;
      ++done_;
    }
    const absl::Status dead = dead_;
    lock_.Unlock();
    if (!dead.ok()) groups_->Abort(dead);  // here alone, where no collective is under way
  }

  const Chooser chooser_;
  // Fixed after Connect.
  std::unique_ptr<Communicator> communicator_;
  std::shared_ptr<Groups> groups_;  // of all buckets, which the reducer's thread reduces one by one
  std::vector<Bucket> buckets_;     // memory and collective: the thread's while their bucket is under way
  std::vector<Place> places_;
  std::vector<std::string> names_;
  uint64_t sent_before_ = 0;
  size_t clipped_ = 0;  // elements, in all steps
  Instant said_clipped_at_ = Instant{} - kSayClipped;
  std::string carried_name_, handover_name_;
  size_t carried_count_ = 0, handover_count_ = 0;
  std::vector<CompressionOptions> ways_;  // of an automatic choice; [0] is float32. Empty: nothing to choose
  std::vector<double> speeds_;            // seconds an element, of each way, equal on all ranks
  int talking_ = 1;                       // ranks between which compressed data goes
  std::vector<double> computed_;          // seconds until Finish, of the steps since the last look
  double latency_ = 0;
  bool looked_ = false;
  int steps_since_look_ = 0;
  int look_after_ = 0;
  Instant said_at_ = Instant{} - kSayAgain;  // how gradients travel, to `gtrain status`
  Instant step_began_;
  std::thread thread_;

  Mutex lock_;
  std::vector<bool> ready_ ABSL_GUARDED_BY(lock_);
  std::vector<size_t> missing_ ABSL_GUARDED_BY(lock_);  // gradients of each bucket that are not ready
  size_t done_ ABSL_GUARDED_BY(lock_) = 0;              // buckets of this step that are means
  uint64_t step_ ABSL_GUARDED_BY(lock_) = 0;            // that is not finished; the first is 1
  bool reducing_ ABSL_GUARDED_BY(lock_) = false;        // the thread has a bucket
  bool over_ ABSL_GUARDED_BY(lock_) = false;
  absl::Status dead_ ABSL_GUARDED_BY(lock_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Reducer>> CreateReducer(Communicator* communicator,
                                                       const std::vector<GradientSpec>& gradients,
                                                       const ReducerOptions& options, Chooser chooser) {
  auto reducer = std::make_unique<ReducerImpl>(std::move(chooser));
  GT_RETURN_IF_ERROR(reducer->Connect(communicator, gradients, options));
  return reducer;
}

}  // namespace comm

absl::StatusOr<std::unique_ptr<Reducer>> Reducer::Create(Communicator* communicator,
                                                         const std::vector<GradientSpec>& gradients,
                                                         const ReducerOptions& options) {
  return comm::CreateReducer(communicator, gradients, options, comm::ChooseWays);
}

}  // namespace gtrain
