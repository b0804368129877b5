#include "sharding/ledger/audit.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace gtrain::sharding {
namespace {

constexpr char kNothingBefore[] =
    "nothing says what was trained before that. If it goes on from an earlier job's checkpoint, audit that "
    "job, "
    "too";
// State may be in memory alone, so nothing is said of saving. Older versions did say that.
constexpr char kSaved[] = ", part of the state";
constexpr char kSavedBefore[] = ", saved with the state", kSavedFirst[] = ", saved with checkpoints";
constexpr char kNotSaved[] = ", not saved";

// Takes words and numbers from the front of a text.
class Reader {
 public:
  explicit Reader(absl::string_view text) : rest_(text) {}

  absl::string_view Until(absl::string_view word) {
    const size_t at = rest_.find(word);
    if (at == absl::string_view::npos) {
      wrong_ = true;
      return "";
    }
    const absl::string_view taken = rest_.substr(0, at);
    rest_.remove_prefix(at + word.size());
    return taken;
  }
  void Word(absl::string_view word) { wrong_ = !absl::ConsumePrefix(&rest_, word) || wrong_; }
  bool Consumes(absl::string_view word) { return absl::ConsumePrefix(&rest_, word); }
  bool Either(absl::string_view yes, absl::string_view no) {
    if (Consumes(yes)) return true;
    Word(no);
    return false;
  }
  template <typename Number>
  void Take(absl::string_view word, Number* number) {
    Word(word);
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), *number);
    wrong_ = wrong_ || error != std::errc();
    rest_.remove_prefix(static_cast<size_t>(end - rest_.data()));
  }
  bool whole() const { return !wrong_ && rest_.empty(); }

 private:
  absl::string_view rest_;
  bool wrong_ = false;
};

std::string Place(const SampleCursor& cursor) {
  return absl::StrCat("step ", cursor.step, ", epoch ", cursor.epoch, ", sample ", cursor.offset);
}

// Follows the records of one name.
class Auditor {
 public:
  explicit Auditor(std::string name) { audit_.name = std::move(name); }

  void Add(const SaidRecord& said) {
    const auto& [generation, record, reported, then] = said;
    const SampleCursor& at = record.cursor;
    if (audit_.kept.empty()) {
      if (at != SampleCursor()) Problem(said, kNothingBefore);
    } else if (!GoesOn(said)) {
      return;
    }
    audit_.kept.push_back({generation, record.ranks, record.options, at, at});
    audit_.reached = NextBatch(record.options, at);
    audit_.finished = AtEnd(record.options, at);
  }

  SampleAudit Take() && { return std::move(audit_); }

 private:
  void Problem(const SaidRecord& said, const std::string& what) {
    const bool done = AtEnd(said.record.options, said.record.cursor);
    audit_.problems.push_back(absl::StrCat("generation ", said.generation,
                                           done ? " was done at " : " began at ", Place(said.record.cursor),
                                           ": ", what));
  }

  // False: it leads nowhere, and the records after it are compared with those before it.
  bool GoesOn(const SaidRecord& said) {
    const auto& [generation, record, reported, then] = said;
    const SampleCursor& at = record.cursor;
    auto& kept = audit_.kept;
    if (!record.saved && generation != kept.back().generation) {
      Problem(said,
              "its program does not save where it is in its data, so nothing says what earlier generations "
              "trained of it. Add the samples to the checkpointer");
      return false;
    }
    while (!kept.empty() && kept.back().from.step > at.step) kept.pop_back();
    if (kept.empty()) {
      Problem(said, kNothingBefore);
      return true;
    }
    KeptRange& before = kept.back();
    if (const absl::Status same = CheckSameData(before.options, record.options); !same.ok()) {
      Problem(said, std::string(same.message()));
      return false;
    }
    const SampleCursor there = Advance(before.options, before.from, at.step - before.from.step);
    if (NextBatch(record.options, there) != NextBatch(record.options, at)) {
      Problem(said, absl::StrCat("generation ", before.generation, " would have been at ", Place(there),
                                 " then; what lies between is trained twice or never"));
      return false;
    }
    CheckReports(said);
    before.to = at;
    // Who took back the end of a range reported later than its own ranks: what those said counts.
    if (reported && !before.reported) before.reported = reported->own;
    if (before.from.step == at.step) kept.pop_back();
    return true;
  }

  // A record that is read alone may say anything: who skipped batches would only have to count on.
  void CheckReports(const SaidRecord& said) {
    constexpr char kSo[] =
        ". Batches between were given to nobody, or the record was changed; or the program reports another "
        "number than this ledger's step, and has to report that for an audit";
    const int64_t at = said.record.cursor.step;
    if (said.reported && said.reported->more && at > said.reported->highest + *said.reported->more) {
      Problem(said, absl::StrCat("before that its job had reported step ", said.reported->highest,
                                 " at most, and can have made ", *said.reported->more, " more since", kSo));
    } else if (said.then && *said.then < at - 1) {  // a program may count from 0
      Problem(said, absl::StrCat("after that it has reported steps, and ", *said.then, " at most", kSo));
    }
  }

  SampleAudit audit_;
};

}  // namespace

std::optional<int64_t> UnreportedSteps(const KeptRange& range) {
  if (!range.reported) return std::nullopt;
  return std::clamp<int64_t>(range.to.step - *range.reported, 0, range.to.step - range.from.step);
}

absl::Status CheckSampleName(absl::string_view name) {
  const bool fits = !name.empty() && name.size() <= kSampleNameBytesMax &&
                    std::all_of(name.begin(), name.end(), [](unsigned char c) {
                      return absl::ascii_isalnum(c) || c == '_' || c == '-' || c == '.';
                    });
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the name of data is 1 to ", kSampleNameBytesMax, " letters, digits, '_', '-' and '.'"));
}

std::string PrintSampleRecord(const SampleRecord& record) {
  const auto& [samples, epochs, batch, seed, shuffle, drop_last] = record.options;
  return absl::StrCat(record.name, ": step ", record.cursor.step, ", epoch ", record.cursor.epoch, " of ",
                      epochs, ", sample ", record.cursor.offset, " of ", samples, ", batches of ", batch,
                      ", seed ", seed, shuffle ? ", shuffled" : ", in order",
                      drop_last ? ", no short batch" : ", short last batch", ", ", record.ranks,
                      record.ranks == 1 ? " rank" : " ranks", record.saved ? kSaved : kNotSaved);
}

absl::StatusOr<SampleRecord> ParseSampleRecord(absl::string_view text) {
  SampleRecord record;
  auto& [samples, epochs, batch, seed, shuffle, drop_last] = record.options;
  Reader reader(text);
  record.name = std::string(reader.Until(": "));
  reader.Take("step ", &record.cursor.step);
  reader.Take(", epoch ", &record.cursor.epoch);
  reader.Take(" of ", &epochs);
  reader.Take(", sample ", &record.cursor.offset);
  reader.Take(" of ", &samples);
  reader.Take(", batches of ", &batch);
  reader.Take(", seed ", &seed);
  shuffle = reader.Either(", shuffled", ", in order");
  drop_last = reader.Either(", no short batch", ", short last batch");
  reader.Take(", ", &record.ranks);
  reader.Word(record.ranks == 1 ? " rank" : " ranks");
  record.saved =
      reader.Consumes(kSavedFirst) || reader.Consumes(kSavedBefore) || reader.Either(kSaved, kNotSaved);
  if (!reader.whole() || record.ranks < 1)
    return absl::InvalidArgumentError(absl::StrCat("not a record of samples: ", text.substr(0, 200)));
  GT_RETURN_IF_ERROR(CheckSampleName(record.name));
  GT_RETURN_IF_ERROR(CheckSampleOptions(record.options));
  GT_RETURN_IF_ERROR(CheckCursor(record.options, record.cursor));
  return record;
}

std::vector<SampleAudit> AuditSamples(const std::vector<SaidRecord>& said) {
  std::vector<std::string> names;
  std::vector<Auditor> auditors;
  for (const SaidRecord& one : said) {
    const auto at = std::find(names.begin(), names.end(), one.record.name);
    const size_t number = static_cast<size_t>(at - names.begin());
    if (at == names.end()) {
      names.push_back(one.record.name);
      auditors.emplace_back(one.record.name);
    }
    auditors[number].Add(one);
  }
  std::vector<SampleAudit> audits;
  for (Auditor& auditor : auditors) audits.push_back(std::move(auditor).Take());
  return audits;
}

}  // namespace gtrain::sharding
