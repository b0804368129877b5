#include "launcher/cli/resume.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/store/open_store.h"
#include "job/spec/parse.h"
#include "job/spec/print.h"
#include "job/spec/values.h"
#include "launcher/cli/job_changes.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {
namespace {

// The newest committed checkpoint (optionally of one step); nullopt when there is none.
absl::StatusOr<std::optional<ckpt::Manifest>> Newest(const std::string& dir, std::optional<int64_t> step) {
  const bool remote = absl::StartsWith(dir, "s3://");
  if (dir.empty() || (!remote && access(dir.c_str(), R_OK) != 0)) return std::optional<ckpt::Manifest>();
  GT_ASSIGN_OR_RETURN(const std::unique_ptr<port::BlobStore> store, ckpt::OpenStore(dir));
  GT_ASSIGN_OR_RETURN(const std::vector<ckpt::SaveId> ids, ckpt::ListManifests(store.get()));
  for (const ckpt::SaveId& id : ids) {
    if (step && id.step != *step) continue;
    auto read = ckpt::ReadManifest(store.get(), id);
    if (absl::IsDataLoss(read.status())) {
      Complain(absl::StrCat("a checkpoint is damaged and passed over: ", read.status().message()));
      continue;
    }
    if (!read.ok()) return read.status();
    if (auto* manifest = std::get_if<ckpt::Manifest>(&*read))
      return std::optional<ckpt::Manifest>(std::move(*manifest));
  }
  return std::optional<ckpt::Manifest>();
}

std::string Describe(const ckpt::Manifest& manifest, const std::string& dir) {
  return absl::StrCat("step ", manifest.id.step, " of job ", manifest.owner.job, " in ", dir);
}

// The agent that started that job left its text in the run directory, which is beside this job's where both
// were launched in one folder. Empty: it is not there, or is not what that checkpoint is of.
std::string ChangesSince(const ckpt::Identity& owner, const spec::JobSpec& spec,
                         const std::string& run_dirs) {
  constexpr size_t kShown = 5;
  if (absl::StrContains(owner.job, '/')) return "";
  const std::string path =
      absl::StrCat(run_dirs, "/", owner.job, "-", owner.cluster.substr(0, 8), "/job.yaml");
  const absl::StatusOr<std::string> text = ReadFile(path, spec::kTextBytesMax);
  if (!text.ok()) return "";
  const absl::StatusOr<spec::JobSpec> before = spec::ParseCanonical(*text);
  if (!before.ok() || spec::JobHash(*before) != owner.job_hash) return "";
  std::vector<std::string> changes = JobChanges(*before, spec);
  if (changes.empty()) return "";
  const size_t more = changes.size() - std::min(changes.size(), kShown);
  changes.resize(changes.size() - more);
  return absl::StrCat(": ", absl::StrJoin(changes, "; "),
                      more == 0 ? "" : absl::StrCat("; and ", more, " more"));
}

absl::StatusOr<Resume> ResumeStep(const std::string& wanted, int64_t step, const std::string& dir) {
  if (dir.empty()) return Resume{wanted, ""};  // the program's own checkpoints: it reads GTRAIN_RESUME itself
  GT_ASSIGN_OR_RETURN(const std::optional<ckpt::Manifest> found, Newest(dir, step));
  if (!found)
    return absl::InvalidArgumentError(
        absl::StrCat("--resume ", step, ": no committed checkpoint of that step in ", dir));
  return Resume{wanted, absl::StrCat("resumes ", Describe(*found, dir))};
}

// The old checkpoints are deleted as newer ones take their places: a user who gave --fresh by mistake can
// still stop.
absl::StatusOr<Resume> ResumeNothing(const std::string& dir) {
  GT_ASSIGN_OR_RETURN(const std::optional<ckpt::Manifest> found, Newest(dir, std::nullopt));
  if (!found) return Resume{"fresh", ""};
  return Resume{
      "fresh",
      absl::StrCat("starts anew; the checkpoints that are there, the newest ", Describe(*found, dir),
                   ", are deleted as newer ones are committed. `gtrain ckpt pin ", dir, " STEP` keeps one")};
}

// Another directory, or one manifest in it, is only read; but the job saves into its own.
absl::StatusOr<Resume> ResumeElsewhere(const std::string& wanted, const spec::JobSpec& spec, bool local) {
  const std::string& dir = spec.checkpoint.uri;
  if (!ckpt::SamePlace(dir, wanted)) {
    GT_ASSIGN_OR_RETURN(const std::optional<ckpt::Manifest> own, Newest(dir, std::nullopt));
    if (own && own->owner.job_hash != spec::JobHash(spec)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the newest checkpoint of this job's own checkpoint.uri is ", Describe(*own, dir),
          ", and that was another job: its checkpoints would be deleted as this one commits newer ones. "
          "Name another checkpoint.uri"));
    }
  }
  if (absl::EndsWith(wanted, ".json")) return Resume{wanted, ""};  // the ranks say what is wrong with it
  const bool seen = absl::StrContains(wanted, "://") || access(wanted.c_str(), F_OK) == 0;
  if (!seen && !local)
    return Resume{wanted, absl::StrCat(wanted, " is not on this machine; the ranks look for it on theirs")};
  GT_ASSIGN_OR_RETURN(const std::optional<ckpt::Manifest> found, Newest(wanted, std::nullopt));
  if (!found)
    return absl::InvalidArgumentError(
        absl::StrCat("--resume ", SafeText(wanted), ": ",
                     seen ? "no committed checkpoint is there" : "there is no such directory"));
  return Resume{wanted, absl::StrCat("resumes ", Describe(*found, wanted))};
}

}  // namespace

std::vector<Flag> ResumeFlags() {
  return {{"resume", '\0', "latest|STEP|URI", "continue from checkpoints that are there, whoever wrote them"},
          {"fresh", '\0', "", "start anew, whatever checkpoints are there"},
          {"takeover", '\0', "", "take the checkpoint directory from a job that still uses it"}};
}

absl::StatusOr<Resume> ChooseResume(const Args& args, const spec::JobSpec& spec, const std::string& run_dirs,
                                    bool local) {
  const std::string& dir = spec.checkpoint.uri;
  const std::string wanted = args.Get("resume");
  if (args.Has("fresh") && args.Has("resume"))
    return absl::InvalidArgumentError("--fresh and --resume exclude each other");
  if (args.Has("fresh")) return ResumeNothing(dir);
  int64_t step = 0;
  if (absl::SimpleAtoi(wanted, &step)) return ResumeStep(wanted, step, dir);
  if (args.Has("resume") && wanted != "latest") {
    if (absl::StrContains(wanted, "/")) return ResumeElsewhere(wanted, spec, local);
    return absl::InvalidArgumentError(
        absl::StrCat("--resume ", spec::Shown(wanted), " must be latest, a step, or a directory"));
  }
  GT_ASSIGN_OR_RETURN(const std::optional<ckpt::Manifest> found, Newest(dir, std::nullopt));
  if (!found) return Resume{wanted, ""};
  const std::string hash = spec::JobHash(spec);
  // A job that only reads wants the checkpoint of another job.
  const bool continues = wanted.empty() && !spec.checkpoint.read_only;
  if (continues && !found->owner.job_hash.empty() && found->owner.job_hash != hash) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the newest checkpoint is ", Describe(*found, dir), ", and that was another job",
        ChangesSince(found->owner, spec, run_dirs), " (its hash over run, script, mesh and env is ",
        found->owner.job_hash.substr(0, 12), ", this one's ", hash.substr(0, 12),
        "). Say --resume latest to continue it all the same, --fresh to start anew, or name "
        "another checkpoint.uri"));
  }
  return Resume{wanted,
                absl::StrCat(spec.checkpoint.read_only ? "reads " : "resumes ", Describe(*found, dir))};
}

}  // namespace gtrain::cli
