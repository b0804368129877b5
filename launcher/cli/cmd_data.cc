#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "job/spec/values.h"
#include "launcher/cli/context.h"
#include "launcher/cli/data_records.h"
#include "launcher/cli/job_events.h"
#include "launcher/cli/status_doc.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "sharding/ledger/audit.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;
using sharding::KeptRange;
using sharding::SampleAudit;

std::string CountOf(int64_t count, absl::string_view what) {
  return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
}

// Of the epochs that are over, since what was said last may lie within one.
std::string ReachedText(const SampleAudit& audit, int64_t samples) {
  const sharding::SampleCursor& reached = audit.reached;
  const std::string of = CountOf(samples, "sample");
  if (reached.epoch > 0) {
    return absl::StrCat("exact; ", CountOf(reached.epoch, "epoch"), " of ", of, ", each given out once",
                        audit.finished ? ", and that is all of them" : "");
  }
  if (reached.offset == 0)
    return absl::StrCat("no contradiction so far; no epoch of ", of, " is known to be over");
  return absl::StrCat("exact so far; ", reached.offset, " of the first epoch of ", of,
                      ", each given out once");
}

// That a generation trained its range to the end says the record of the next one; what ranks reported to the
// head says it, too, but for the last steps before an end.
std::string ReportsText(const SampleAudit& audit) {
  if (audit.kept.size() < 2) return "";
  int64_t steps = 0, ranges = 0;
  bool known = true;
  for (const KeptRange& kept : audit.kept) {
    if (&kept == &audit.kept.back()) break;
    const std::optional<int64_t> unreported = sharding::UnreportedSteps(kept);
    known = known && unreported;
    steps += unreported.value_or(0);
    ranges += unreported.value_or(0) > 0 ? 1 : 0;
  }
  if (!known) {
    return "  how far each generation trained only these records say: of some the head knows no steps that "
           "ranks "
           "reported\n";
  }
  if (steps == 0) return "  ranks reported all these steps to the head, too\n";
  return absl::StrCat("  ranks reported these steps to the head, too, but for ", CountOf(steps, "step"),
                      " at the end of ", CountOf(ranges, "range"), ": that ",
                      steps == 1 ? "it was" : "they were", " trained only these records say\n");
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
  return out + ReportsText(audit);
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
                    {"to", CursorJson(range.to)},
                    {"reported", range.reported ? json(*range.reported) : json(nullptr)}});
  }
  return {{"name", audit.name},         {"exact", audit.problems.empty()},
          {"finished", audit.finished}, {"reached", CursorJson(audit.reached)},
          {"problems", audit.problems}, {"kept", std::move(kept)}};
}

absl::StatusOr<int> AuditData(const Args& args) {
  constexpr size_t kEventsBytesMax = 64 << 20;
  if (args.words[0] != "audit")
    return absl::InvalidArgumentError(absl::StrCat("data ", spec::Shown(args.words[0]), ": it is audit"));
  std::vector<std::string> differences;
  GT_ASSIGN_OR_RETURN(
      const std::string answer,
      WhyWithEvents(args, args.words.size() > 1 ? args.words[1] : "", kEventsBytesMax, &differences));
  const json why = json::parse(answer, nullptr, /*allow_exceptions=*/false);
  GT_ASSIGN_OR_RETURN(const std::vector<sharding::SaidRecord> said, RecordsIn(answer));
  const std::string id = TextOf(why, "id");
  if (said.empty()) {
    return absl::NotFoundError(
        absl::StrCat(SafeText(id),
                     " has said nothing of its data: its program uses no sample ledger "
                     "(gtrain/samples.h, gtrain.Samples), or its ranks have not begun to train"));
  }
  std::vector<SampleAudit> audits = sharding::AuditSamples(said);
  bool exact = true;
  json documents = json::array();
  std::string text;
  for (SampleAudit& audit : audits) {
    audit.problems.insert(audit.problems.begin(), differences.begin(), differences.end());
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
  const absl::StatusOr<int> code = AuditData(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb DataVerb() {
  Verb verb;
  verb.name = "data";
  verb.summary = "Prove from a job's records that each sample was given out once";
  verb.usage = "audit [JOB]";
  verb.details =
      "Of programs that take their samples from gtrain's ledger: each generation says where in its data it "
      "begins,\n"
      "and the end says so, too. audit follows these records over crashes, other numbers of ranks and older\n"
      "checkpoints. It exits with 1 where that is not proven: a sample was given out twice or never, or "
      "nothing\n"
      "says, and why. What a program did with the samples that it was given nobody sees.\n\n"
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
