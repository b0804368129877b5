#include "absl/strings/str_cat.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "runtime/wire/build_version.h"

namespace gtrain::cli {
namespace {

int RunVersion(const Args& args) {
  if (args.Has("json")) {
    return Print(absl::StrCat("{\"version\": \"", wire::kThisBuild.text,
                              "\", \"protocol\": ", wire::kThisBuild.protocol, "}\n"))
               ? kDone
               : kFailed;
  }
  return Print(
             absl::StrCat("gtrain ", wire::kThisBuild.text, " (protocol ", wire::kThisBuild.protocol, ")\n"))
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
  verb.run = RunVersion;
  return verb;
}

}  // namespace gtrain::cli
