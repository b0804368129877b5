// Means of gradients among data-parallel ranks: compressed collectives, and buckets that leave while backward
// still runs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/codec/compressor.h"
#include "comm/port/communicator.h"
#include "gtrain/gradients.h"

namespace gtrain {

// State that compression carries over from step to step, for checkpoints. It belongs to this rank, except
// that a name that ends in "/shard" is this rank's part of a whole: elements [offset, offset +
// values.size()). Everything that the next step depends on is among it, so a run that loads it ends with the
// bits of one that was not interrupted, as far as its collectives add in the same order:
//   "residual", "residual/shard"  the part of the gradients that steps did not send yet (error feedback)
//   "momentum"                    of DGC and of `optimizer_momentum`
//   "basis"                       PowerSGD's right factors
//   "warmup"                      steps of the dense warm-up so far
//   "progress"                    top-k: of each of its selections the steps of DGC's warm-up so far, and
//                                 threshold and margin that the next one begins with (compression.h)
struct CarriedState {
  std::string name;
  size_t offset = 0;
  std::vector<float> values;
};

// The mean of float32[count] among the ranks of a communicator, compressed on its way. All ranks end with the
// same bits. Where several ranks share a machine and there are several machines, ranks of one machine are
// summed uncompressed and one of each machine talks to the others.
//
// top-k: every packet goes to everyone while there are at most 16 ranks and all packets together are small
// beside the dense gradient; else, and for every other codec, in two stages: each rank gets its shard of
// every gradient, sums in float32, compresses the mean once more, and all shards go to everyone. The loss of
// the second compression is carried over by the shard's owner (1-bit Adam, Tang et al. 2021, arXiv
// 2102.02888, section 3). The mean of top-k gradients has more elements than each of them, so an owner
// returns up to 48 times the density, or int8 of all elements where that is less.
//
// With n ranks and k selected elements a rank receives 8 n k bytes of top-k where packets go to everyone,
// else at most 8 (1 + 48) k however many ranks there are; with other codecs it receives twice their bytes of
// the gradient. It sends and receives n - 1 packets, in two stages 2 (n - 1), and for top-k agrees on the
// length of packets once before each stage. It keeps the memory that Compressor says, in two stages n times
// that of 1 / n of the elements and once that of its shard, and the packets of the longest step: those of all
// ranks where they go to everyone.
//
// A step is a transaction, as for a Compressor: what a call carries over stays pending until the next call
// applies it, unless Drop() came first. All ranks drop or none. Calls block until the communicator's timeout.
// After an error the object and its communicator are dead; an error of this rank alone (a wrong size, a
// packet that cannot be decoded, no memory) ends the call of the others too, which get Unavailable with this
// rank and its message. Not thread-safe.
class CompressedCollective {
 public:
  // Collective. The communicator must outlive it, and nothing else may use it during a call. `shapes` are
  // those of the tensors that lie in `data` one behind the other, for PowerSGD; without any the data is one
  // vector of `count`. InvalidArgument: an option out of range, shapes of another number of elements, or
  // ranks whose options, count or shapes differ (the rounding seed may). All ranks return an error of any of
  // them, and the communicator stays usable. Bytes and messages are those of two small all-reduces; with
  // ranks that share machines those of three, and two communicators are split off.
  static absl::StatusOr<std::unique_ptr<CompressedCollective>> Create(
      Communicator* communicator, const CompressionOptions& options, size_t count,
      const std::vector<std::vector<int64_t>>& shapes = {});
  virtual ~CompressedCollective() = default;

  // data[count] becomes the mean.
  virtual absl::Status AllReduceMean(absl::Span<float> data) = 0;
  // For sharded optimisers: shard[Shard().size] becomes this rank's part of the mean. data[count] is only
  // read. FailedPrecondition: ranks share machines (make the object over one rank a machine), or
  // optimizer_momentum is used, which needs the whole mean on every rank.
  virtual absl::Status ReduceScatterMean(absl::Span<const float> data, absl::Span<float> shard) = 0;
  // This rank's elements: those of the lower ranks come before, the last ranks may have none.
  struct Range {
    size_t offset = 0;
    size_t size = 0;
  };
  virtual Range Shard() const = 0;

  // Says that the last step was not applied to the model: nothing of it is carried over.
  virtual void Drop() = 0;
  // Applies what is pending, and returns the carried state.
  virtual std::vector<CarriedState> Export() = 0;
  // InvalidArgument: there is no state of that name, offset and size. After a change of the number of ranks
  // start without state (zeros), or put shards together by their offsets.
  virtual absl::Status Load(const CarriedState& state) = 0;
  // Bytes this rank gave to collectives so far.
  virtual uint64_t bytes_sent() const = 0;
  // Bytes of other ranks that collectives gave to this rank so far: what a rank's link carries to it, where
  // packets of every rank go to everyone.
  virtual uint64_t bytes_received() const = 0;
  // The elements of this rank's gradient that top-k selected in the last call; zeros where it sent float32.
  virtual Selected selected() const = 0;
  // Elements that the last call clipped on this rank (Compressor::clipped): of its gradient, or the sum of
  // its machine's divided by as many as the largest machine has, or a little more, and of its shard of the
  // mean. Zero on ranks that do not talk to other machines themselves.
  virtual size_t clipped() const = 0;
  virtual Codec codec() const = 0;
  // Whether the last call compressed `optimizer_momentum`; equal on all ranks. ReducedStep says what an
  // optimiser does with it.
  virtual bool momentum_travelled() const = 0;
};

// Returns the policy of the job file's `comm.compression`, which reaches a rank as $GTRAIN_COMPRESSION;
// nullopt if the job file has none. InvalidArgument: its words cannot be read.
absl::StatusOr<std::optional<CompressionPolicy>> CompressionOfJob();

// The codec of a bucket and, once an automatic choice has been made, the cost of each way, measured or
// predicted.
struct BucketChoice {
  size_t count = 0;
  Codec codec = Codec::kNone;
  struct Cost {
    Codec codec = Codec::kNone;
    double seconds = 0;  // of one step
    bool measured = false;
  };
  std::vector<Cost> seconds;
};

// Elements [begin, begin + size) of a block.
struct BlockRange {
  size_t begin = 0;
  size_t size = 0;
};

// Averages the gradients of a model. It owns their memory, so that nothing is copied: the framework
// accumulates into it (in libtorch `p.mutable_grad() = from_blob(...)`), a hook calls Ready() when a gradient
// is complete, and Finish() returns when all of them are means. Buckets are filled from the last gradient,
// which backward finishes first, and leave in that order (Li et al. 2020, PyTorch Distributed, VLDB 13).
//
// With `compression: auto` of the job file buckets begin as float32. Every 20 steps, the first time after the
// longest warm-up of the allowed codecs, rank 0 chooses for each bucket the codec that ends the step soonest,
// from what all ranks measured: the time its collective takes and when its gradients were ready. A codec that
// was not used yet is expected to take its computing time and the time of its bytes over the link as
// measured; it stays only if it then beats float32 by 2 %. A bucket that hides behind backward stays float32.
// Changes are logged by rank 0, and `gtrain status` shows the codecs in use and what they gain.
//
// Gradient accumulation: call neither Ready nor Finish for micro-batches before the last one. Ready is
// thread-safe and never blocks; the rest belongs to one thread. It has one thread of its own, which the
// destructor joins: it waits for a running collective.
//
// It costs 4 bytes an element of gradients and the memory of a CompressedCollective for each bucket; the
// communicators that it makes have their arenas and connections (gtrain/communicator.h), as many however many
// buckets there are. Creation takes two small all-reduces a bucket and a few more, a step nothing beside the
// buckets, and a choice four small all-reduces and a broadcast.
class Reducer {
 public:
  // Collective. `gradients` are in the order of the forward pass and equal on all ranks. The communicator
  // must outlive the reducer and stays free for other use: the reducer splits its own from it.
  // InvalidArgument: there are no gradients, one has no elements or a shape of another number of elements,
  // compression options are bad, PowerSGD gets no gradient with a shape of two dimensions, or the ranks'
  // gradients or options differ. All ranks return an error of any of them. At most three communicators are
  // made, however many buckets there are.
  static absl::StatusOr<std::unique_ptr<Reducer>> Create(Communicator* communicator,
                                                         const std::vector<GradientSpec>& gradients,
                                                         const ReducerOptions& options = {});
  virtual ~Reducer() = default;

  // Zeroed at first, then the framework's to fill and zero again. Between Ready(index) and the end of Finish
  // it is the reducer's.
  virtual absl::Span<float> gradient(size_t index) = 0;

  // InvalidArgument: no such gradient. FailedPrecondition: it was ready in this step (a parameter used twice:
  // call it after the last use).
  virtual absl::Status Ready(size_t index) = 0;
  // Sends what has not left yet and blocks until every gradient is the mean, for each bucket at most twice as
  // long as the communicator's timeout (DeadlineExceeded). After an error the reducer is dead: every later
  // Finish returns the same, and the other ranks get Unavailable with this rank and its words, after
  // DeadlineExceeded as soon as the collective that took too long returns.
  virtual absl::StatusOr<ReducedStep> Finish() = 0;
  // This rank cannot go on with its step (an exception in backward, data that cannot be read): the reducer is
  // dead as after an error, and the others hear of it once the bucket that is under way is reduced.
  // Thread-safe, does not block. The first error stays.
  virtual void Abort(const absl::Status& why) = 0;
  // Between steps; equal on all ranks.
  virtual std::vector<BucketChoice> Choices() const = 0;
  // After Finish, on all ranks or none: the optimiser skips this step (a loss scaler saw an infinity); what
  // compression would carry over from it is forgotten.
  virtual void Drop() = 0;

  // Between steps. Names start with "bucket<N>/".
  virtual std::vector<CarriedState> Export() = 0;
  virtual absl::Status Load(const CarriedState& state) = 0;

  // Name and size of the carried state of all buckets as one block, which a program registers with
  // Checkpointer::AddPerRank; both stay as they are while the reducer lives. The name is equal on all ranks
  // and describes the codec, ranks, buckets and states, so that a reducer with others, or a version that
  // carries other things over, does not load the block. Empty: nothing is carried over on any rank. A block
  // of zeros is the state of a new reducer. An automatic choice carries over only residuals, which go out
  // with the next step: choices are measured and momenta made again.
  virtual const std::string& CarriedName() const = 0;
  virtual size_t CarriedCount() const = 0;
  // Both are called between steps with block[CarriedCount()], else InvalidArgument. All ranks load a block or
  // none.
  virtual absl::Status ExportCarried(absl::Span<float> block) = 0;
  virtual absl::Status LoadCarried(absl::Span<const float> block) = 0;

  // The same for a job whose ranks change: a block of HandoverCount() floats that a reducer of other ranks
  // goes on with, equal in name and size on all of them and in every generation, because it depends on
  // gradients and codecs alone. Residuals are what this rank still owes the mean, whatever the number of
  // ranks; warm-up, PowerSGD's factors and the optimiser's momentum are one rank's, for all. A block of zeros
  // is a rank that comes new. An automatic choice hands over residuals alone. 0: nothing is carried over.
  virtual const std::string& HandoverName() const = 0;
  virtual size_t HandoverCount() const = 0;
  // Where residuals stand in such a block: what the mean is owed on account of this rank. Equal in every
  // generation.
  virtual std::vector<BlockRange> HandoverResiduals() const = 0;
  // Between steps, or when nothing else will be done with this reducer, which may be dead. `applied`: whether
  // the step of the last Finish that was OK was applied; nothing is carried over from a later one. Waits for
  // a collective that runs. InvalidArgument: a block of another size.
  virtual absl::Status GiveHandover(bool applied, absl::Span<float> block) = 0;
  // Collective, before the first step. A small all-gather and, where any rank brings something, a
  // broadcast. The lowest rank that has them decides on what is equal on all ranks. InvalidArgument:
  // as above.
  virtual absl::Status TakeHandover(absl::Span<const float> block) = 0;
};

}  // namespace gtrain
