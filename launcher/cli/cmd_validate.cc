#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "job/spec/print.h"
#include "launcher/cli/job_input.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

int RunValidate(const Args& args) {
  const absl::StatusOr<JobInput> input = ReadJob(args);
  if (!input.ok()) return Report(input.status());
  if (args.Has("json")) {
    const nlohmann::json out = {{"ok", true},
                                {"name", input->spec.name},
                                {"hash", spec::JobHash(input->spec)},
                                {"canonical", spec::PrintJob(input->spec)}};
    return Print(out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n") ? kDone : kFailed;
  }
  if (args.Has("print")) return Print(spec::PrintJob(input->spec)) ? kDone : kFailed;
  return Print(absl::StrCat(SafeText(input->shown_name), ": ok (", input->spec.name, ", job hash ",
                            spec::JobHash(input->spec).substr(0, 12), ")\n"))
             ? kDone
             : kFailed;
}

}  // namespace

Verb ValidateVerb() {
  Verb verb;
  verb.name = "validate";
  verb.summary = "Check a job file; needs no cluster";
  verb.usage = "[flags] JOB.yaml | -- CMD ARGS";
  verb.details =
      "Prints every error of the file as file:line:column: message and exits 2, or says ok and exits 0.\n\n"
      "  gtrain validate job.yaml\n"
      "  gtrain validate --print job.yaml            the canonical form, defaults left out\n"
      "  gtrain validate job.yaml --set ranks=8      would it still be valid?";
  verb.flags = JobFlags();
  verb.flags.push_back({"print", '\0', "", "print the canonical job"});
  verb.flags.push_back({"json", '\0', "", "one JSON document: ok, name, hash, canonical"});
  verb.words_max = 1;
  verb.takes_rest = true;
  verb.run = RunValidate;
  return verb;
}

}  // namespace gtrain::cli
