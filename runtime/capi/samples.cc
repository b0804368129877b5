// The sample ledger of gtrain_c.h.
#include "runtime/capi/samples.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "base/logging.h"
#include "base/status_macros.h"
#include "runtime/capi/handles.h"
#include "sharding/ledger/audit.h"

namespace gtrain::capi {
namespace {

constexpr int64_t kAheadMax = int64_t{1} << 40;
constexpr char kTrainName[] = "train";  // of samples that the program does not name

}  // namespace

absl::Status ReadSampleOptions(const gtrain_session& session, const gtrain_samples_options& in,
                               gtrain_samples::Parts* parts) {
  if (in.size < sizeof(gtrain_samples_options))
    return absl::InvalidArgumentError("`size` of gtrain_samples_options is not its sizeof");
  const int64_t batch = in.global_batch == 0 ? session.session->global_batch() : in.global_batch;
  if (batch == 0) {
    return absl::InvalidArgumentError(
        "`global_batch` is 0: the program says how many samples a batch has, or the job file does, with "
        "`elastic: {global_batch: N}`");
  }
  parts->options = {in.samples, in.epochs, batch, in.seed, in.in_order == 0, in.drop_last != 0};
  GT_RETURN_IF_ERROR(sharding::CheckSampleOptions(parts->options));
  parts->name = in.name == nullptr ? kTrainName : in.name;
  GT_RETURN_IF_ERROR(sharding::CheckSampleName(parts->name));
  parts->by_rank = in.shares == 0;
  const gtrain_session::Place place = Place(&session);
  if (parts->by_rank && !session.session->has_place()) return absl::OkStatus();  // an elastic run asks again
  parts->shares = in.shares == 0 ? place.world_size : in.shares;
  parts->share = in.shares == 0 ? place.rank : in.share;
  if (parts->shares < 1 || parts->share < 0 || parts->share >= parts->shares) {
    return absl::InvalidArgumentError(absl::StrCat("`share` is ", in.share, " of `shares` ", in.shares,
                                                   ": it is 0 to one less than them, or `shares` is 0"));
  }
  return absl::OkStatus();
}

void WarnOfOtherBatch(const Session& session, int64_t batch) {
  const int64_t of_job = session.global_batch();
  if (of_job == 0 || of_job == batch || session.rank() != 0) return;
  LogWarning("samples: the job file says `elastic: {global_batch: ", of_job, "}` and the program says ",
             batch, ": batches have ", batch,
             " samples, as the program says. Leave `global_batch` out of the "
             "program's samples to have that of the job file, or out of the job file");
}

namespace {

absl::Status Open(gtrain_session* session, const gtrain_samples_options* in, gtrain_samples** out) {
  if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
  *out = nullptr;
  GT_RETURN_IF_ERROR(CheckHandle(session));
  if (in == nullptr) return absl::InvalidArgumentError("`options` is NULL");
  auto parts = std::make_shared<gtrain_samples::Parts>();
  parts->session = session->session;
  GT_RETURN_IF_ERROR(ReadSampleOptions(*session, *in, parts.get()));
  if (parts->by_rank && !session->session->has_place())
    return absl::FailedPreconditionError(
        "this process came up beside the ranks and has no place among them before the first step of its "
        "gtrain_elastic: open the samples behind that, or say `share` and `shares`");
  // Other samples, such as those of a validation, have batches of their own.
  if (parts->name == kTrainName && session->session->has_place())
    WarnOfOtherBatch(*session->session, parts->options.global_batch);
  auto handle = std::make_unique<gtrain_samples>();
  handle->parts = std::move(parts);
  *out = handle.release();
  return absl::OkStatus();
}

// One rank says for all where they are: when it asks for its first share, and when the last batch is behind
// it, which it is when the program asks what comes next or saves. Not when it takes that batch: it is not
// trained yet.
void SayWhere(gtrain_samples::Parts& parts) {
  bool& said = sharding::AtEnd(parts.options, parts.cursor) ? parts.said_end : parts.said_begin;
  if (std::exchange(parts.said_in, parts.session->generation()) != parts.session->generation()) said = false;
  if (std::exchange(said, true) || parts.session->rank() != 0) return;
  parts.session->ReportNote(
      kNoteSamples,
      sharding::PrintSampleRecord({parts.name, parts.options, parts.cursor,
                                   parts.by_rank ? parts.session->world_size() : parts.shares, parts.saved}));
}

absl::Status ShareTo(gtrain_samples::Parts& parts, int64_t ahead, int64_t* indices, int64_t room,
                     int64_t* count) {
  if (count == nullptr) return absl::InvalidArgumentError("`count` is NULL");
  *count = 0;
  if (ahead < 0 || ahead > kAheadMax)
    return absl::InvalidArgumentError(absl::StrCat("`ahead` is ", ahead, "; it is 0 to ", kAheadMax));
  SayWhere(parts);
  const sharding::SampleCursor at = sharding::Advance(parts.options, parts.cursor, ahead);
  const sharding::SampleRange batch = sharding::BatchAt(parts.options, at);
  parts.shared_to = std::max(parts.shared_to, at.step + 1);
  const sharding::SampleRange share =
      parts.by_rank ? sharding::ShareOf(batch, parts.session->rank(), parts.session->world_size())
                    : sharding::ShareOf(batch, parts.share, parts.shares);
  *count = share.size();
  if (indices == nullptr) return absl::OkStatus();
  if (room < share.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the share is ", share.size(), " samples and there is room for ", room));
  }
  std::ranges::copy(sharding::SamplesOf(parts.options, share), indices);
  return absl::OkStatus();
}

absl::Status AddSamples(gtrain_checkpointer* checkpointer, gtrain_samples* samples) {
  GT_RETURN_IF_ERROR(CheckHandle(checkpointer));
  GT_RETURN_IF_ERROR(CheckHandle(samples));
  auto saved = std::make_unique<gtrain_checkpointer::SavedSamples>();
  saved->samples = samples->parts;
  GT_RETURN_IF_ERROR(
      checkpointer->checkpointer->AddReplicated(absl::StrCat("gtrain/samples/", samples->parts->name),
                                                {saved->block.data(), saved->block.size() * sizeof(int64_t)},
                                                {static_cast<int64_t>(saved->block.size())}, DType::kInt64));
  samples->parts->saved = true;
  checkpointer->samples.push_back(std::move(saved));
  return absl::OkStatus();
}

}  // namespace

void SaveSamples(gtrain_checkpointer* checkpointer) {
  for (const auto& saved : checkpointer->samples) {
    const auto& options = saved->samples->options;
    const auto& cursor = saved->samples->cursor;
    if (sharding::AtEnd(options, cursor)) SayWhere(*saved->samples);
    saved->block = sharding::PackCursor(options, cursor);
  }
}

absl::Status LoadSamples(gtrain_checkpointer* checkpointer) {
  for (const auto& saved : checkpointer->samples) {
    gtrain_samples::Parts& parts = *saved->samples;
    if (saved->block[0] == 0) continue;  // the checkpoint lacks it, and may
    const auto cursor = sharding::UnpackCursor(parts.options, saved->block);
    if (absl::IsFailedPrecondition(cursor.status())) {
      return absl::FailedPreconditionError(
          absl::StrCat("the checkpoint's cursor of ", parts.name, " ", cursor.status().message()));
    }
    GT_RETURN_IF_ERROR(cursor.status());
    parts.cursor = *cursor;
    parts.shared_to = cursor->step;
    parts.said_begin = parts.said_end = false;
  }
  return absl::OkStatus();
}

}  // namespace gtrain::capi

using gtrain::capi::Call;
using gtrain::capi::CheckHandle;

extern "C" {

gtrain_status gtrain_samples_open(gtrain_session* session, const gtrain_samples_options* options,
                                  gtrain_samples** out, gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::Open(session, options, out); });
}

void gtrain_samples_free(gtrain_samples* samples) { gtrain::capi::FreeHandle(samples); }

gtrain_status gtrain_samples_where(gtrain_samples* samples, gtrain_samples_place* out, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(samples));
    if (out == nullptr) return absl::InvalidArgumentError("`out` is NULL");
    if (out->size < sizeof(gtrain_samples_place))
      return absl::InvalidArgumentError("`size` of gtrain_samples_place is not its sizeof");
    auto& parts = *samples->parts;
    if (gtrain::sharding::AtEnd(parts.options, parts.cursor)) gtrain::capi::SayWhere(parts);
    const gtrain::sharding::SampleCursor at = gtrain::sharding::NextBatch(parts.options, parts.cursor);
    *out = {out->size,
            at.step,
            at.epoch,
            at.offset,
            gtrain::sharding::BatchAt(parts.options, at).size(),
            gtrain::sharding::Advance(parts.options, at, gtrain::sharding::kStepsMax).step};
    return absl::OkStatus();
  });
}

gtrain_status gtrain_samples_share(gtrain_samples* samples, int64_t ahead, int64_t* indices, int64_t room,
                                   int64_t* count, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(samples));
    return gtrain::capi::ShareTo(*samples->parts, ahead, indices, room, count);
  });
}

gtrain_status gtrain_samples_advance(gtrain_samples* samples, gtrain_error* error) {
  return Call(error, [&]() -> absl::Status {
    GT_RETURN_IF_ERROR(CheckHandle(samples));
    auto& parts = *samples->parts;
    if (gtrain::sharding::AtEnd(parts.options, parts.cursor))
      return absl::OutOfRangeError("all epochs of the data are trained");
    if (parts.shared_to <= parts.cursor.step) {
      return absl::FailedPreconditionError(
          "this rank's share of the batch was not asked for, so nobody would train it: ask for it first");
    }
    parts.cursor = gtrain::sharding::Advance(parts.options, parts.cursor);
    return absl::OkStatus();
  });
}

gtrain_status gtrain_checkpointer_add_samples(gtrain_checkpointer* checkpointer, gtrain_samples* samples,
                                              gtrain_error* error) {
  return Call(error, [&] { return gtrain::capi::AddSamples(checkpointer, samples); });
}

}  // extern "C"
