// The sample ledger: the samples of each batch, and this rank's share of them.
#pragma once
#include <gtrain/checkpoint.h>
#include <gtrain/gtrain_c.h>
#include <gtrain/session.h>
#include <gtrain/status.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gtrain {

struct SamplesOptions {
  std::string name = "train";  // 1 to 64 of a-z, A-Z, 0-9, '_', '-', '.'
  int64_t samples = 0;         // 1 to 2^48
  int64_t epochs = 1;
  int64_t global_batch = 0;  // samples a batch of all ranks together; 0: elastic.global_batch of the job file
  uint64_t seed = 0;
  bool shuffle = true;
  bool drop_last = false;  // the short batch at the end of each epoch is left out; else it is trained, too
  // The share of `shares` that this rank takes: its coordinate along the data-parallel axis of a mesh. With 0
  // shares these are the rank and the world size.
  int share = 0;
  int shares = 0;
};

namespace internal {

// Points into `options`.
inline gtrain_samples_options SamplesOptionsOf(const SamplesOptions& options) {
  return gtrain_samples_options{.size = sizeof(gtrain_samples_options),
                                .name = options.name.c_str(),
                                .samples = options.samples,
                                .epochs = options.epochs,
                                .global_batch = options.global_batch,
                                .seed = options.seed,
                                .in_order = options.shuffle ? 0 : 1,
                                .drop_last = options.drop_last ? 1 : 0,
                                .share = options.share,
                                .shares = options.shares};
}

}  // namespace internal

// Samples are numbers in [0, samples), which mean what the program likes: rows, files, offsets. Ranks agree
// on them without a message, at any world size, and each sample of an epoch is trained once, whatever the
// world sizes and batch sizes were on the way. An order is computed, not stored: memory and time depend on
// this rank's share alone (some 50 ns a sample). One thread at a time; moved and not copied. The
// session may end first.
//
//   auto data = Samples::Open(session, {.samples = 60'000, .epochs = 3, .global_batch = 48}).value();
//   data.AddTo(checkpointer).ThrowIfError();
//   checkpointer.Restore().value();
//   while (!data.done()) {
//     const int64_t batch = data.batch();              // of all ranks: what a mean divides by
//     for (int64_t sample : data.Next()) ...           // this rank's share
//     ...                                              // the update
//     if (checkpointer.SaveIfDue(data.step()).value().stop) break;
//   }
//   checkpointer.Commit(data.step()).ThrowIfError();
class Samples {
 public:
  // All ranks give equal options but `share`. kInvalidArgument says which number is out of its bounds.
  static Result<Samples> Open(const Session& session, const SamplesOptions& options) {
    const gtrain_samples_options c = internal::SamplesOptionsOf(options);
    gtrain_samples* made = nullptr;
    Status status = internal::Call(gtrain_samples_open, session.handle(), &c, &made);
    if (!status.ok()) return status;
    return Samples(made);
  }

  // Saves and restores the position of training in its samples with the rest of the state. Call it before
  // Restore and Save. Restore returns kInvalidArgument where the checkpoint was trained with other samples,
  // seed, shuffle or drop_last; epochs and global_batch may differ.
  Status AddTo(Checkpointer& checkpointer) const {
    return internal::Call(gtrain_checkpointer_add_samples, checkpointer.handle(), handle());
  }

  bool done() const { return Where().batch == 0; }   // all epochs are trained
  int64_t step() const { return Where().step; }      // batches that were taken
  int64_t steps() const { return Where().steps; }    // from the first to the last, those taken included
  int64_t epoch() const { return Where().epoch; }    // of the next batch, from 0
  int64_t batch() const { return Where().batch; }    // samples of the next batch, of all ranks
  int64_t offset() const { return Where().offset; }  // samples of its epoch before it

  // Returns this rank's share of the next batch, which counts as trained from now on: a save after its update
  // contains it. Empty where there are more ranks than samples, and when all is trained.
  std::vector<int64_t> Next() {
    std::vector<int64_t> share = Peek(0);
    (void)gtrain_samples_advance(handle(), nullptr);  // out of range: all is trained, and the share is empty
    return share;
  }
  // Returns this rank's share of the batch `ahead` batches after the next one, for programs that read ahead.
  // It does not move the position.
  std::vector<int64_t> Peek(int64_t ahead) const {
    int64_t count = 0;
    internal::Call(gtrain_samples_share, handle(), ahead, static_cast<int64_t*>(nullptr), int64_t{0}, &count)
        .ThrowIfError();
    std::vector<int64_t> share(static_cast<size_t>(count));
    internal::Call(gtrain_samples_share, handle(), ahead, share.data(), count, &count).ThrowIfError();
    return share;
  }

  gtrain_samples* handle() const { return handle_.get(); }

 private:
  explicit Samples(gtrain_samples* handle) : handle_(handle) {}
  // Fails in a forked child only, where nothing is left to train.
  gtrain_samples_place Where() const {
    gtrain_samples_place place{};
    place.size = sizeof(place);
    if (gtrain_samples_where(handle(), &place, nullptr) != GTRAIN_OK) place.batch = 0;
    return place;
  }

  std::unique_ptr<gtrain_samples, internal::Freer<gtrain_samples, gtrain_samples_free>> handle_;
};

}  // namespace gtrain
