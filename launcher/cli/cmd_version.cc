#include "absl/strings/str_cat.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "runtime/core/messages.h"

namespace gtrain::cli {
namespace {

int Run(const Args& args) {
  if (args.Has("json")) {
    return Print(absl::StrCat("{\"version\": \"", GTRAIN_VERSION,
                              "\", \"protocol\": ", core::kProtocolVersion, "}\n"))
               ? kDone
               : kFailed;
  }
  return Print(absl::StrCat("gtrain ", GTRAIN_VERSION, " (protocol ", core::kProtocolVersion, ")\n"))
             ? kDone
             : kFailed;
}

}  // namespace

Verb VersionVerb() {
  Verb verb;
  verb.name = "version";
  verb.summary = "Print the version of this program and of its protocol";
  verb.details = "  gtrain version --json";
  verb.flags = {{"json", '\0', "", "as JSON"}};
  verb.run = Run;
  return verb;
}

}  // namespace gtrain::cli
