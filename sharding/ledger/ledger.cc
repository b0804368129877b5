#include "sharding/ledger/ledger.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "sharding/partition.h"

namespace gtrain::sharding {
namespace {

constexpr int64_t kBlockVersion = 1;

absl::Status OutOfBounds(const char* name, int64_t value, int64_t most) {
  return absl::InvalidArgumentError(absl::StrCat("`", name, "` is ", value, "; it is 1 to ", most));
}

absl::Status Differs(const char* name, const std::string& before, const std::string& now) {
  return absl::InvalidArgumentError(
      absl::StrCat("the data was begun with ", name, " ", before, ", and this program says ", now,
                   ": samples would be trained twice or never. Say what it was begun with, or begin anew"));
}

// Positions of an epoch that batches consist of, and how many batches there are from `offset` on.
int64_t Trained(const SampleOptions& options, int64_t offset) {
  if (!options.drop_last) return options.samples;
  return offset + (options.samples - offset) / options.global_batch * options.global_batch;
}
int64_t Batches(const SampleOptions& options, int64_t offset) {
  const int64_t left = Trained(options, offset) - offset;
  return (left + options.global_batch - 1) / options.global_batch;
}

}  // namespace

absl::Status CheckSampleOptions(const SampleOptions& options) {
  if (options.samples < 1 || options.samples > kSamplesMax)
    return OutOfBounds("samples", options.samples, kSamplesMax);
  if (options.epochs < 1 || options.epochs > kEpochsMax)
    return OutOfBounds("epochs", options.epochs, kEpochsMax);
  if (options.global_batch < 1 || options.global_batch > kSamplesMax)
    return OutOfBounds("global_batch", options.global_batch, kSamplesMax);
  if ((options.samples - 1) / options.global_batch + 1 > kStepsMax / options.epochs)
    return absl::InvalidArgumentError(absl::StrCat(options.epochs, " epochs of ", options.samples,
                                                   " samples in batches of ", options.global_batch,
                                                   " are more than ", kStepsMax, " steps"));
  if (options.drop_last && options.global_batch > options.samples) {
    return absl::InvalidArgumentError(absl::StrCat("a global_batch of ", options.global_batch,
                                                   " is more than the ", options.samples,
                                                   " samples, and drop_last drops them all"));
  }
  return absl::OkStatus();
}

absl::Status CheckSameData(const SampleOptions& before, const SampleOptions& now) {
  const auto word = [](bool value) { return value ? "true" : "false"; };
  if (before.samples != now.samples)
    return Differs("samples", absl::StrCat(before.samples), absl::StrCat(now.samples));
  if (before.seed != now.seed) return Differs("seed", absl::StrCat(before.seed), absl::StrCat(now.seed));
  if (before.shuffle != now.shuffle) return Differs("shuffle", word(before.shuffle), word(now.shuffle));
  if (before.drop_last != now.drop_last)
    return Differs("drop_last", word(before.drop_last), word(now.drop_last));
  return absl::OkStatus();
}

SampleBlock PackCursor(const SampleOptions& options, const SampleCursor& cursor) {
  return {kBlockVersion,
          cursor.step,
          cursor.epoch,
          cursor.offset,
          options.samples,
          options.epochs,
          options.global_batch,
          static_cast<int64_t>(options.seed),
          options.shuffle ? 1 : 0,
          options.drop_last ? 1 : 0};
}

absl::StatusOr<SampleCursor> UnpackCursor(const SampleOptions& options, const SampleBlock& block) {
  if (block[0] != kBlockVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("is of version ", block[0], ", which a newer gtrain wrote"));
  }
  const SampleOptions before{block[4],      block[5],     block[6], static_cast<uint64_t>(block[7]),
                             block[8] != 0, block[9] != 0};
  const SampleCursor cursor{block[1], block[2], block[3]};
  if (absl::Status same = CheckSameData(before, options); !same.ok()) return same;
  if (absl::Status inside = CheckCursor(options, cursor); !inside.ok()) return inside;
  return cursor;
}

SampleCursor NextBatch(const SampleOptions& options, SampleCursor cursor) {
  if (cursor.epoch < options.epochs && Batches(options, cursor.offset) == 0) {
    ++cursor.epoch;
    cursor.offset = 0;
  }
  return cursor;
}

SampleRange BatchAt(const SampleOptions& options, const SampleCursor& cursor) {
  const SampleCursor at = NextBatch(options, cursor);
  if (at.epoch >= options.epochs) return {at.epoch, 0, 0};
  return {at.epoch, at.offset, at.offset + std::min(options.global_batch, options.samples - at.offset)};
}

SampleCursor Advance(const SampleOptions& options, SampleCursor cursor, int64_t batches) {
  cursor = NextBatch(options, cursor);
  if (batches <= 0 || cursor.epoch >= options.epochs) return cursor;
  if (const int64_t here = Batches(options, cursor.offset); batches < here) {
    cursor.step += batches;
    cursor.offset += batches * options.global_batch;
    return cursor;
  } else {
    cursor = {cursor.step + here, cursor.epoch + 1, 0};
    batches -= here;
  }
  const int64_t each = Batches(options, 0);
  const int64_t epochs = std::min(batches / each, options.epochs - cursor.epoch);
  cursor.step += epochs * each;
  cursor.epoch += epochs;
  if (cursor.epoch >= options.epochs) return cursor;
  batches -= epochs * each;
  return {cursor.step + batches, cursor.epoch, batches * options.global_batch};
}

absl::Status CheckCursor(const SampleOptions& options, const SampleCursor& cursor) {
  if (cursor.step >= 0 && cursor.step <= kStepsMax && cursor.epoch >= 0 && cursor.epoch <= kEpochsMax &&
      cursor.offset >= 0 && cursor.offset <= options.samples)
    return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the cursor of the data is nowhere in it: step ", cursor.step,
                                          ", epoch ", cursor.epoch, ", sample ", cursor.offset, " of ",
                                          options.samples));
}

bool AtEnd(const SampleOptions& options, const SampleCursor& cursor) {
  return NextBatch(options, cursor).epoch >= options.epochs;
}

SampleRange ShareOf(const SampleRange& batch, int rank, int ranks) {
  const Interval part = Part(batch.size(), ranks, rank);
  return {batch.epoch, batch.begin + part.begin, batch.begin + part.end()};
}

int64_t SampleAt(const SampleOptions& options, int64_t epoch, int64_t position) {
  return options.shuffle ? Shuffle(options.samples, options.seed, epoch).At(position) : position;
}

std::vector<int64_t> SamplesOf(const SampleOptions& options, const SampleRange& range) {
  std::vector<int64_t> samples(static_cast<size_t>(range.size()));
  int64_t position = range.begin;
  if (!options.shuffle) {
    for (int64_t& sample : samples) sample = position++;
    return samples;
  }
  const Shuffle order(options.samples, options.seed, range.epoch);
  for (int64_t& sample : samples) sample = order.At(position++);
  return samples;
}

}  // namespace gtrain::sharding
