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

// What compression carries over from step to step, for checkpoints. It belongs to this rank, except that a
// name that ends in "/shard" is this rank's part of a whole: elements [offset, offset + values.size()).
// Everything that the next step depends on is among it, so a run that loads it ends with the bits of one that
// was not interrupted, as far as its collectives add in the same order:
//   "residual", "residual/shard"  what steps did not send, yet (error feedback)
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
// every gradient, sums in float32, compresses the mean once more, and all shards go to everyone. What the
// second compression loses is carried over by the shard's owner (1-bit Adam, Tang et al. 2021, arXiv
// 2102.02888, section 3). The mean of top-k gradients has more elements than each of them, so an owner
// returns up to 48 times the density, or int8 of all elements where that is less.
//
// Of n ranks and k selected elements a rank receives 8 n k bytes of top-k where packets go to everyone, else
// at most 8 (1 + 48) k however many ranks there are; of other codecs twice their bytes of the gradient. It
// sends and receives n - 1 packets, in two stages 2 (n - 1), and, of top-k, agrees on the length of packets
// once before each stage. It keeps what Compressor says, in two stages in n of them of 1 / n of the elements
// and one of its shard, and the packets of the longest step: those of all ranks where they go to everyone.
//
// A step is a transaction, as for a Compressor: every call leaves what is to be carried over pending; the
// next call applies it, unless Drop() came first. All ranks drop or none. Calls block until the
// communicator's timeout. After an error the object and its communicator are dead; one of this rank alone (a
// wrong size, a packet that cannot be decoded, no memory) ends the call of the others too, which get
// Unavailable with this rank and its words. Not thread-safe.
class CompressedCollective {
 public:
  // Collective. The communicator must outlive it, and nothing else may use it during a call. `shapes` of the
  // tensors that lie in `data` one behind the other, for PowerSGD; none: one vector of `count`.
  // InvalidArgument: an option out of range, shapes of another number of elements, or ranks whose options,
  // count or shapes differ (the rounding seed may). What is wrong on any rank, all return, and the
  // communicator stays usable. Bytes and messages are those of two small all-reduces; with ranks that share
  // machines of three, and two communicators are split off.
  static absl::StatusOr<std::unique_ptr<CompressedCollective>> Create(
      Communicator* communicator, const CompressionOptions& options, size_t count,
      const std::vector<std::vector<int64_t>>& shapes = {});
  virtual ~CompressedCollective() = default;

  // data[count] becomes the mean.
  virtual absl::Status AllReduceMean(absl::Span<float> data) = 0;
  // For sharded optimisers: shard[Shard().size] becomes this rank's part of the mean. data[count] is only
  // read. FailedPrecondition: ranks share machines; make the object over one rank a machine. Or
  // optimizer_momentum, which needs the whole mean on every rank.
  virtual absl::Status ReduceScatterMean(absl::Span<const float> data, absl::Span<float> shard) = 0;
  // This rank's elements: those of the lower ranks come before, the last ranks may have none.
  struct Range {
    size_t offset = 0;
    size_t size = 0;
  };
  virtual Range Shard() const = 0;

  // The last step was not applied to the model: forget what it would carry over.
  virtual void Drop() = 0;
  // Applies what is pending.
  virtual std::vector<CarriedState> Export() = 0;
  // InvalidArgument: no state of that name, offset and size; after a change of the number of ranks start
  // without (zeros), or put shards together by their offsets.
  virtual absl::Status Load(const CarriedState& state) = 0;
  // Bytes this rank gave to collectives so far.
  virtual uint64_t bytes_sent() const = 0;
  // Bytes of other ranks that collectives gave to this rank so far: what a rank's link carries to it, where
  // packets of every rank go to everyone.
  virtual uint64_t bytes_received() const = 0;
  // Of top-k, of this rank's gradient in the last call; zeros where it sent float32.
  virtual Selected selected() const = 0;
  // Elements that the last call clipped on this rank (Compressor::clipped): of its gradient, or the sum of
  // its machine's divided by as many as the largest machine has, or a little more, and of its shard of the
  // mean. Zero on ranks that another one of their machine speaks for.
  virtual size_t clipped() const = 0;
  virtual Codec codec() const = 0;
  // Whether the last call compressed `optimizer_momentum`; equal on all ranks. ReducedStep says what an
  // optimiser does with it.
  virtual bool momentum_travelled() const = 0;
};

// What the job file's `comm.compression` says, which reaches a rank as $GTRAIN_COMPRESSION; nothing if it
// says nothing. InvalidArgument: those words cannot be read.
absl::StatusOr<std::optional<CompressionPolicy>> CompressionOfJob();

// What a bucket uses and, where the choice is automatic and was looked at, what each way costs or is expected
// to.
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

// Averages the gradients of a model. It owns their memory, so that nothing is copied: the framework
// accumulates into it (in libtorch `p.mutable_grad() = from_blob(...)`), a hook calls Ready() when a gradient
// is complete, and Finish() returns when all of them are means. Buckets are filled from the last gradient,
// which backward finishes first, and leave in that order (Li et al. 2020, PyTorch Distributed, VLDB 13).
//
// `compression: auto` of the job file: buckets begin as float32. Every 20 steps, the first time behind the
// longest warm-up of the allowed codecs, rank 0 chooses for each bucket what ends the step soonest, from what
// all ranks measured: the time its collective takes and when its gradients were ready. A codec that was not
// used yet is expected to take what it computes and its bytes over the link as it was measured; it stays only
// if it then beats float32 by 2 %. What hides behind backward stays float32. Changes are logged by rank 0,
// and `gtrain status` shows what is used and what it gains.
//
// Gradient accumulation: call neither Ready nor Finish for micro-batches before the last one.
// Ready is thread-safe and never blocks; the rest belongs to one thread. One thread of its own, which is
// joined by the destructor: it waits for a running collective.
//
// It costs 4 bytes an element of gradients and what a CompressedCollective of each bucket does; the
// communicators that it makes have their arenas and connections (gtrain/communicator.h), as many however many
// buckets there are. To make it takes two small all-reduces a bucket and a few more, a step nothing beside
// the buckets, and a choice four small all-reduces and a broadcast.
class Reducer {
 public:
  // Collective. `gradients` in the order of the forward pass, equal on all ranks. The communicator must
  // outlive the reducer and stays free for other use: the reducer splits its own from it.
  // InvalidArgument: no gradients, one without elements or with a shape of another number of them, bad
  // compression options, PowerSGD for gradients of which none has a shape of two dimensions, or ranks whose
  // gradients or options differ. What is wrong on any rank, all return. At most three communicators are made,
  // however many buckets there are.
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

  // All of that as one block, whose name and size stay as they are while the reducer lives: what a program
  // registers with Checkpointer::AddPerRank. The name is equal on all ranks and says which codec, ranks,
  // buckets and states it is of, so that a checkpoint of others, or of a version that carries other things
  // over, leaves the block alone. Empty: nothing is carried over on any rank. A block of zeros is what a new
  // reducer has. What an automatic choice carries over are residuals alone, which go out with the next step:
  // choices are measured and momenta made again.
  virtual const std::string& CarriedName() const = 0;
  virtual size_t CarriedCount() const = 0;
  // Between steps, block[CarriedCount()], else InvalidArgument. To be loaded on all ranks or none.
  virtual absl::Status ExportCarried(absl::Span<float> block) = 0;
  virtual absl::Status LoadCarried(absl::Span<const float> block) = 0;
};

}  // namespace gtrain
