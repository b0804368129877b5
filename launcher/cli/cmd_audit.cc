// `gtrain audit`: the log of changes of a cluster whose head is on this machine.
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "runtime/head/audit_log.h"

namespace gtrain::cli {
namespace {

absl::Status Audit(const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::string dir, HeadDirectory(args));
  const bool verify = args.Has("verify");
  const auto verdict = head::ReadAudit(
      dir, verify ? nullptr : +[](absl::string_view line) { Print(absl::StrCat(line, "\n")); });
  if (!verdict.ok()) return verdict.status();
  if (!verify) return absl::OkStatus();
  if (verdict->last == 0) {
    Print(absl::StrCat("no audit log in ", dir, " yet\n"));
  } else {
    Print(absl::StrCat("lines ", verdict->first, " to ", verdict->last, " hold together\nhash of line ",
                       verdict->last, ": ", verdict->hash, "\n"));
  }
  return absl::OkStatus();
}

int RunAudit(const Args& args) {
  const absl::Status status = Audit(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb AuditVerb() {
  Verb verb;
  verb.name = "audit";
  verb.summary = "Print or verify the log of who changed what";
  verb.usage = "[--verify] [--context NAME]";
  verb.details =
      "On the machine of the head, whether it runs or not. --verify finds changed, added and missing lines; "
      "a\n"
      "cut-off end shows only beside a hash that was noted elsewhere: the head's log has them.\n\n"
      "  gtrain audit | tail\n"
      "  gtrain audit --verify";
  verb.flags = {{"verify", '\0', "", "check that no line was changed, added or taken away"},
                ContextFlag(),
                {"dir", '\0', "DIR", "the directory of the head"}};
  verb.run = RunAudit;
  return verb;
}

}  // namespace gtrain::cli
