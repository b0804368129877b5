#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "nlohmann/json.hpp"

namespace gtrain::cli {
namespace {

using nlohmann::json;

constexpr int64_t kSizeMax = 65'536;
constexpr char kBehindCheckpoint[] = "behind its next checkpoint";

// What --now would do to a job that waits for a checkpoint. An older head does not say whether it is in
// place.
std::string ExplainNow(const json& answer) {
  const auto checkpoint = answer.find("checkpoint");
  const bool none = checkpoint != answer.end() && checkpoint->is_null();
  const std::string committed = none ? "; it has committed no checkpoint so far, and may never do" : "";
  if (const auto in_place = answer.find("in_place"); in_place != answer.end() && *in_place == true)
    return committed + "; with --now it is done at once, and nothing is lost: its processes go on in place";
  if (!none) return "";
  return committed +
         ": with --now it is done at once, and a program that does not go on in place begins anew";
}

// A field that is missing, or of another type, as a head of another version may send it, counts as empty.
std::string ExplainScale(const json& answer) {
  const auto text = [&](const char* key) {
    const auto it = answer.find(key);
    return it != answer.end() && it->is_string() ? SafeText(it->get<std::string>()) : "";
  };
  const auto number = [&](const char* key) {
    const auto it = answer.find(key);
    return it != answer.end() && it->is_number_integer() ? it->get<int>() : 0;
  };
  const int wanted = number("wanted"), size = number("size"), room = number("room");
  std::string counts = text("counts");
  if (wanted == 1 && absl::EndsWith(counts, "s")) counts.pop_back();
  const std::string when = text("when");
  std::string out = when == "has them" ? absl::StrCat(text("job"), " has ", wanted, " ", counts, " already")
                                       : absl::StrCat(text("job"), ": ", wanted, " ", counts, " ", when);
  if (size > 0 && when != "has them") absl::StrAppend(&out, "; it has ", size);
  if (room < wanted)
    absl::StrAppend(&out, "; there is room for ", room, " now, it takes more when there is more");
  return absl::StrCat(out, when == kBehindCheckpoint ? ExplainNow(answer) : "", "\n");
}

absl::Status Scale(const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> size, args.Int("ranks", 1, kSizeMax));
  if (!size) return absl::InvalidArgumentError("say how many: gtrain scale JOB -n N");
  GT_ASSIGN_OR_RETURN(Target target, FindLiveTarget(args));
  GT_ASSIGN_OR_RETURN(const std::string text,
                      Ask(*target.cluster,
                          core::ClientScale{JobId(target.job.id), static_cast<int>(*size), args.Has("now")}));
  const json answer = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) return absl::InternalError("the head's answer is not a JSON object");
  Print(args.Has("json") ? text + "\n" : ExplainScale(answer));
  return absl::OkStatus();
}

int RunScale(const Args& args) {
  const absl::Status status = Scale(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb ScaleVerb() {
  Verb verb;
  verb.name = "scale";
  verb.summary = "Give a running job another number of ranks";
  verb.usage = "-n N [JOB]";
  verb.details =
      "Within what the job file allows (`ranks: {min: A, max: B}`, or `nodes:`, which N then counts). The\n"
      "job is re-formed behind its next checkpoint, so that nothing is lost; with --now at once. A job "
      "whose\n"
      "processes go on in place grows without a checkpoint, once there has been room for 10 s, and --now "
      "loses\n"
      "nothing of it. It gets as many as there is room for, and more when there is more; N holds until the\n"
      "next `scale`.\n\n"
      "  gtrain scale fashion-mnist-1 -n 8";
  verb.flags = {{"ranks", 'n', "N", "how many it should have"},
                {"now", '\0', "", "do not wait for a checkpoint"},
                ContextFlag(),
                {"json", '\0', "", "the head's answer as JSON"}};
  verb.completes = Completes::kLiveJobs;
  verb.words_max = 1;
  verb.run = RunScale;
  return verb;
}

}  // namespace gtrain::cli
