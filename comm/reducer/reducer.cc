// Buckets of gradients and the thread that reduces them, strictly in order, so that all ranks call the same
// collectives whatever order their hooks ran in.
#include "gtrain/reducer.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"

namespace gtrain {
namespace comm {
namespace {

struct Bucket {
  std::vector<size_t> gradients;
  size_t count = 0;
  absl::Span<float> memory;
  std::unique_ptr<CompressedCollective> collective;
};

struct Place {
  size_t bucket = 0;
  size_t offset = 0;
  size_t count = 0;
};

class ReducerImpl final : public Reducer {
 public:
  ~ReducerImpl() override {
    {
      MutexLock held(&lock_);
      over_ = true;
    }
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Connect(Communicator* communicator, const std::vector<GradientSpec>& gradients,
                       const ReducerOptions& options) {
    GT_RETURN_IF_ERROR(Fill(gradients, options.bucket_bytes / sizeof(float)));
    GT_ASSIGN_OR_RETURN(communicator_, communicator->Split(0, communicator->rank()));
    for (Bucket& bucket : buckets_) {
      GT_ASSIGN_OR_RETURN(void* const memory, communicator_->Allocate(bucket.count * sizeof(float)));
      bucket.memory = absl::MakeSpan(static_cast<float*>(memory), bucket.count);
      const bool compressed = bucket.count >= options.compress_from;
      GT_ASSIGN_OR_RETURN(
          bucket.collective,
          CompressedCollective::Create(
              communicator_.get(), compressed ? options.compression : CompressionOptions{}, bucket.count));
    }
    MutexLock held(&lock_);
    StartStep();
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
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
    --missing_[places_[index].bucket];
    return absl::OkStatus();
  }

  absl::StatusOr<ReducedStep> Finish() override {
    ReducedStep step;
    MutexLock held(&lock_);
    step.early = done_;
    for (size_t i = 0; i < ready_.size(); ++i) {
      if (!ready_[i]) step.unused.push_back(i);
    }
    std::fill(missing_.begin(), missing_.end(), 0);
    lock_.Await([&]()
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) { return done_ == buckets_.size() || !dead_.ok(); });
    GT_RETURN_IF_ERROR(dead_);
    const uint64_t sent = BytesSent();
    step.bytes_sent = sent - std::exchange(sent_before_, sent);
    StartStep();
    return step;
  }

  void Drop() override {
    for (Bucket& bucket : buckets_) bucket.collective->Drop();
  }

  std::vector<CarriedState> Export() override {
    std::vector<CarriedState> states;
    for (size_t i = 0; i < buckets_.size(); ++i) {
      for (CarriedState& state : buckets_[i].collective->Export()) {
        state.name = Prefix(i) + state.name;
        states.push_back(std::move(state));
      }
    }
    return states;
  }

  absl::Status Load(const CarriedState& state) override {
    for (size_t i = 0; i < buckets_.size(); ++i) {
      const std::string prefix = Prefix(i);
      if (!state.name.starts_with(prefix)) continue;
      return buckets_[i].collective->Load({state.name.substr(prefix.size()), state.offset, state.values});
    }
    return absl::InvalidArgumentError(absl::StrCat("reducer: there is no bucket for the state ", state.name));
  }

 private:
  static std::string Prefix(size_t bucket) { return absl::StrCat("bucket", bucket, "/"); }

  // From the last gradient, which backward makes first.
  absl::Status Fill(const std::vector<GradientSpec>& gradients, size_t bucket_elements) {
    if (gradients.empty()) return absl::InvalidArgumentError("reducer: there are no gradients");
    places_.resize(gradients.size());
    for (size_t i = gradients.size(); i-- > 0;) {
      const size_t count = gradients[i].count;
      if (count == 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("reducer: gradient ", i, " (", gradients[i].name, ") has no elements"));
      }
      if (buckets_.empty() || buckets_.back().count + count > bucket_elements) buckets_.emplace_back();
      Bucket& bucket = buckets_.back();
      places_[i] = {buckets_.size() - 1, bucket.count, count};
      bucket.gradients.push_back(i);
      bucket.count += count;
    }
    for (const GradientSpec& gradient : gradients) names_.push_back(gradient.name);
    return absl::OkStatus();
  }

  void StartStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) {
    ready_.assign(places_.size(), false);
    missing_.clear();
    for (const Bucket& bucket : buckets_) missing_.push_back(bucket.gradients.size());
    done_ = 0;
  }

  uint64_t BytesSent() const {
    uint64_t sum = 0;
    for (const Bucket& bucket : buckets_) sum += bucket.collective->bytes_sent();
    return sum;
  }

  void Run() {
    lock_.Lock();
    while (true) {
      lock_.Await([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(lock_) {
        return over_ || (done_ < buckets_.size() && missing_[done_] == 0);
      });
      if (over_) break;
      Bucket& bucket = buckets_[done_];
      lock_.Unlock();
      const absl::Status status = bucket.collective->AllReduceMean(bucket.memory);
      lock_.Lock();
      if (!status.ok()) {
        dead_ = status;
        break;
      }
      ++done_;
    }
    lock_.Unlock();
  }

  // Fixed after Connect.
  std::unique_ptr<Communicator> communicator_;
  std::vector<Bucket> buckets_;  // memory and collective: the thread's while their bucket is under way
  std::vector<Place> places_;
  std::vector<std::string> names_;
  uint64_t sent_before_ = 0;
  std::thread thread_;

  Mutex lock_;
  std::vector<bool> ready_ ABSL_GUARDED_BY(lock_);
  std::vector<size_t> missing_ ABSL_GUARDED_BY(lock_);  // gradients of each bucket that are not ready
  size_t done_ ABSL_GUARDED_BY(lock_) = 0;              // buckets of this step that are means
  bool over_ ABSL_GUARDED_BY(lock_) = false;
  absl::Status dead_ ABSL_GUARDED_BY(lock_);
};

}  // namespace
}  // namespace comm

absl::StatusOr<std::unique_ptr<Reducer>> Reducer::Create(Communicator* communicator,
                                                         const std::vector<GradientSpec>& gradients,
                                                         const ReducerOptions& options) {
  auto reducer = std::make_unique<comm::ReducerImpl>();
  GT_RETURN_IF_ERROR(reducer->Connect(communicator, gradients, options));
  return reducer;
}

}  // namespace gtrain
