#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "job/spec/values.h"
#include "launcher/cli/context.h"
#include "launcher/cli/job_events.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "runtime/core/values/rank_notes.h"
#include "sharding/ledger/audit.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;
using sharding::KeptRange;
using sharding::SaidRecord;
using sharding::SampleAudit;

// The records among the events, each behind "rank 0 on HOST: ".
absl::StatusOr<std::vector<SaidRecord>> RecordsIn(const json& why) {
  std::vector<SaidRecord> said;
  const auto events = why.find("events");
  if (events == why.end() || !events->is_array()) return said;
  for (const json& event : *events) {
    if (TextOf(event, "kind") != core::kSamplesNote) continue;
    const std::string text = TextOf(event, "text");
    const size_t begin = text.find(": ");
    if (begin == std::string::npos) continue;
    GT_ASSIGN_OR_RETURN(sharding::SampleRecord record,
                        sharding::ParseSampleRecord(absl::string_view(text).substr(begin + 2)));
    const auto generation = event.find("generation");
    const bool known = generation != event.end() && generation->is_number_unsigned();
    said.push_back({known ? generation->get<uint64_t>() : 0, std::move(record)});
  }
  return said;
}

std::string CountOf(int64_t count, absl::string_view what) {
  return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
}

// Of the epochs that are over, since what was said last may lie within one.
std::string ReachedText(const SampleAudit& audit, int64_t samples) {
  const sharding::SampleCursor& reached = audit.reached;
  const std::string of = CountOf(samples, "sample");
  if (reached.epoch > 0) {
    return absl::StrCat("exact; ", CountOf(reached.epoch, "epoch"), " of ", of, ", each trained once",
                        audit.finished ? ", and that is all of them" : "");
  }
  if (reached.offset == 0)
    return absl::StrCat("no contradiction so far; no epoch of ", of, " is known to be over");
  return absl::StrCat("exact so far; ", reached.offset, " of the first epoch of ", of, ", each trained once");
}

std::string PrintAudit(const SampleAudit& audit, bool job_over) {
  std::string out = absl::StrCat(audit.name, ": ");
  if (!audit.problems.empty()) {
    absl::StrAppend(&out, "NOT exact\n");
    for (const std::string& problem : audit.problems) absl::StrAppend(&out, "  ", problem, "\n");
    return out;
  }
  const sharding::SampleOptions& options = audit.kept.back().options;
  absl::StrAppend(&out, ReachedText(audit, options.samples), "\n");
  for (const KeptRange& kept : audit.kept) {
    const bool last = &kept == &audit.kept.back();
    if (last && audit.finished) break;
    absl::StrAppend(&out, "  generation ", kept.generation, ", ", CountOf(kept.ranks, "rank"), ": from step ",
                    kept.from.step, " (epoch ", kept.from.epoch, ", sample ", kept.from.offset, ")");
    if (!last) {
      absl::StrAppend(&out, " to step ", kept.to.step, ", batches of ", kept.options.global_batch, "\n");
    } else {
      absl::StrAppend(&out, " on; ",
                      job_over ? "it ended before its data did" : "it has not said that it is done", "\n");
    }
  }
  return out;
}

json CursorJson(const sharding::SampleCursor& cursor) {
  return {{"step", cursor.step}, {"epoch", cursor.epoch}, {"offset", cursor.offset}};
}

json AuditJson(const SampleAudit& audit) {
  json kept = json::array();
  for (const KeptRange& range : audit.kept) {
    kept.push_back({{"generation", range.generation},
                    {"ranks", range.ranks},
                    {"samples", range.options.samples},
                    {"epochs", range.options.epochs},
                    {"global_batch", range.options.global_batch},
                    {"seed", range.options.seed},
                    {"from", CursorJson(range.from)},
                    {"to", CursorJson(range.to)}});
  }
  return {{"name", audit.name},         {"exact", audit.problems.empty()},
          {"finished", audit.finished}, {"reached", CursorJson(audit.reached)},
          {"problems", audit.problems}, {"kept", std::move(kept)}};
}

absl::StatusOr<int> Audit(const Args& args) {
  constexpr size_t kEventsBytesMax = 64 << 20;
  if (args.words[0] != "audit")
    return absl::InvalidArgumentError(absl::StrCat("data ", spec::Shown(args.words[0]), ": it is audit"));
  GT_ASSIGN_OR_RETURN(const std::string answer,
                      WhyWithEvents(args, args.words.size() > 1 ? args.words[1] : "", kEventsBytesMax));
  const json why = json::parse(answer, nullptr, /*allow_exceptions=*/false);
  GT_ASSIGN_OR_RETURN(const std::vector<SaidRecord> said, RecordsIn(why));
  const std::string id = TextOf(why, "id");
  if (said.empty()) {
    return absl::NotFoundError(
        absl::StrCat(SafeText(id),
                     " has said nothing of its data: its program uses no sample ledger "
                     "(gtrain/samples.h, gtrain.Samples), or its ranks have not begun to train"));
  }
  const std::vector<SampleAudit> audits = sharding::AuditSamples(said);
  bool exact = true;
  json documents = json::array();
  std::string text;
  for (const SampleAudit& audit : audits) {
    exact = exact && audit.problems.empty();
    documents.push_back(AuditJson(audit));
    text += PrintAudit(audit, IsOver(TextOf(why, "state")));
  }
  if (args.Has("json"))
    text = json{{"job", id}, {"exact", exact}, {"data", std::move(documents)}}.dump() + "\n";
  Print(text);
  return exact ? kDone : kFailed;
}

int RunData(const Args& args) {
  const absl::StatusOr<int> code = Audit(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb DataVerb() {
  Verb verb;
  verb.name = "data";
  verb.summary = "Prove from a job's records that each sample was trained once";
  verb.usage = "audit [JOB]";
  verb.details =
      "Of programs that take their samples from gtrain's ledger: each generation says where in its data it "
      "begins,\n"
      "and the end says so, too. audit follows these records over crashes, other numbers of ranks and older\n"
      "checkpoints. It exits with 1 where that is not proven: a sample was trained twice or never, or "
      "nothing "
      "says, and why.\n\n"
      "  gtrain data audit fashion-mnist-1\n"
      "  gtrain data audit gtrain-runs/fashion-mnist-1-5c3e90ab";
  verb.flags = {ContextFlag(), {"json", '\0', "", "the ranges that were kept, and what is wrong, as JSON"}};
  verb.actions = {"audit"};
  verb.completes = Completes::kJobs;
  verb.words_min = 1;
  verb.words_max = 2;
  verb.run = RunData;
  return verb;
}

}  // namespace gtrain::cli
