#include "checkpoint/engine/settings.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/store/open_store.h"

namespace gtrain::ckpt {
namespace {

absl::Status Bad(const char* name, absl::string_view value, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat("$", name, " is \"", value, "\"; expected ", expected));
}

absl::Status ReadEvery(const std::string& text, Settings* out) {
  if (text == "auto") return absl::OkStatus();  // the program's own choice stands
  out->every.reset();
  out->every_steps.reset();
  absl::string_view count = text;
  int64_t steps = 0;
  if (absl::ConsumeSuffix(&count, " steps") || absl::ConsumeSuffix(&count, " step")) {
    if (!absl::SimpleAtoi(count, &steps) || steps < 1)
      return Bad("GTRAIN_CHECKPOINT_EVERY", text, "like \"200 steps\"");
    out->every_steps = steps;
    return absl::OkStatus();
  }
  const absl::StatusOr<absl::Duration> every = ParseDuration(text);
  if (!every.ok() || *every <= absl::ZeroDuration()) {
    return Bad("GTRAIN_CHECKPOINT_EVERY", text, "\"auto\", \"200 steps\" or \"30s\"");
  }
  out->every = *every;
  return absl::OkStatus();
}

absl::Status ReadResume(const std::string& text, Settings* out) {
  if (text == "latest") {
    out->resume = Resume::kLatest;
  } else if (text == "fresh") {
    out->resume = Resume::kFresh;
  } else if (std::all_of(text.begin(), text.end(), [](unsigned char c) { return absl::ascii_isdigit(c); })) {
    out->resume = Resume::kStep;
    if (!absl::SimpleAtoi(text, &out->resume_step) || out->resume_step > kStepMax) {
      return Bad("GTRAIN_RESUME", text, "a step below 10^12");
    }
  } else {
    out->resume = Resume::kUri;
    GT_ASSIGN_OR_RETURN(out->resume_uri, ParseLocation(text));
    const size_t at = out->resume_uri.rfind(kManifestPrefix);
    if (absl::EndsWith(out->resume_uri, ".json") && at != std::string::npos) {
      out->resume_manifest = ParseManifestKey(absl::string_view(out->resume_uri).substr(at));
      if (!out->resume_manifest)
        return Bad("GTRAIN_RESUME", text, "the name of a manifest as gtrain writes it");
      out->resume_uri.resize(at);
      if (out->resume_uri.empty()) out->resume_uri.assign(1, '.');
    }
  }
  return absl::OkStatus();
}

absl::Status ReadVerifyReplicas(const std::string& text, VerifyReplicas* out) {
  int every = 0;
  if (text == "off") {
    *out = {.first = false, .every = std::nullopt};
  } else if (text == "first") {
    *out = {.first = true, .every = std::nullopt};
  } else if (absl::string_view count = text;
             absl::ConsumePrefix(&count, "every ") && absl::SimpleAtoi(count, &every) && every >= 1) {
    *out = {.first = true, .every = every};
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("verify_replicas is \"", text, "\"; expected \"off\", \"first\" or \"every 100\""));
  }
  return absl::OkStatus();
}

absl::Status ReadOnError(const std::string& text, Settings* out) {
  if (text == "retry") {
    out->on_error = OnError::kRetry;
  } else if (text == "fail") {
    out->on_error = OnError::kFail;
  } else if (!text.empty() && text != "warn") {
    return Bad("GTRAIN_CHECKPOINT_ON_ERROR", text, "\"warn\", \"retry\" or \"fail\"");
  }
  return absl::OkStatus();
}

// Reads what the head and the agent say about this job and others.
absl::Status ReadFromHead(const Environment& environment, Settings* out) {
  const auto get = [&](const char* name) { return environment(name).value_or(""); };
  const std::string rollback = get("GTRAIN_CHECKPOINT_MAX_ROLLBACK");
  if (!rollback.empty() && !absl::SimpleAtoi(rollback, &out->max_rollback))
    return Bad("GTRAIN_CHECKPOINT_MAX_ROLLBACK", rollback, "a number");
  const std::string memory = get("GTRAIN_CHECKPOINT_MEMORY_MAX");
  if (uint64_t bytes = 0; absl::SimpleAtoi(memory, &bytes))
    out->memory_max = bytes;
  else if (!memory.empty())
    return Bad("GTRAIN_CHECKPOINT_MEMORY_MAX", memory, "a number of bytes");
  const std::string verify = get("GTRAIN_CHECKPOINT_VERIFY_REPLICAS");
  if (!verify.empty()) GT_RETURN_IF_ERROR(ReadVerifyReplicas(verify, &out->verify_replicas));
  const std::string takeover = get("GTRAIN_TAKEOVER");
  if (!takeover.empty() && takeover != "0" && takeover != "1")
    return Bad("GTRAIN_TAKEOVER", takeover, "1 or nothing");
  out->takeover = out->takeover || takeover == "1";
  const std::string read_only = get("GTRAIN_CHECKPOINT_READ_ONLY");
  if (!read_only.empty() && read_only != "0" && read_only != "1")
    return Bad("GTRAIN_CHECKPOINT_READ_ONLY", read_only, "1 or nothing");
  out->read_only = out->read_only || read_only == "1";
  const std::string newest = get("GTRAIN_CHECKPOINT_NEWEST");
  if (const size_t at = newest.rfind(kManifestPrefix); at != std::string::npos)
    out->newest = ParseManifestKey(absl::string_view(newest).substr(at));
  if (!newest.empty() && !out->newest)
    return Bad("GTRAIN_CHECKPOINT_NEWEST", newest, "the name of a manifest as gtrain writes it");
  if (const std::optional<std::string> jobs = environment("GTRAIN_LIVE_JOBS")) {
    out->live_jobs.emplace();
    for (absl::string_view job : absl::StrSplit(*jobs, ',', absl::SkipEmpty())) out->live_jobs->emplace(job);
  }
  return absl::OkStatus();
}

// The folder was made when the job's first generation began here.
absl::Time BirthOf(const std::string& folder) {
  struct statx info;
  if (folder.empty() || statx(AT_FDCWD, folder.c_str(), 0, STATX_BTIME, &info) != 0 ||
      (info.stx_mask & STATX_BTIME) == 0) {
    return absl::Now();
  }
  return absl::FromUnixSeconds(info.stx_btime.tv_sec);
}

}  // namespace

std::string AbsoluteLocation(const std::string& location) {
  if (absl::StartsWith(location, "s3://")) return location;
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(location, error);
  return error ? location : path.string();
}

absl::StatusOr<std::optional<NearPlace>> ReadNear(const Environment& environment) {
  const std::string text = environment("GTRAIN_CHECKPOINT_NEAR").value_or("");
  if (text.empty()) return std::nullopt;
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits(' ', 1));
  NearPlace place{.folder = parts.second};
  if (!absl::SimpleAtoi(parts.first, &place.bytes_max) || !absl::StartsWith(place.folder, "/"))
    return Bad("GTRAIN_CHECKPOINT_NEAR", text, "a number of bytes, a blank and the path of a folder");
  const std::string peers = environment("GTRAIN_CHECKPOINT_PEERS").value_or("");
  if (peers.empty()) return place;
  const std::pair<std::string, std::string> counted = absl::StrSplit(peers, absl::MaxSplits(' ', 1));
  bool good = absl::SimpleAtoi(counted.first, &place.holders);
  for (absl::string_view peer : absl::StrSplit(counted.second, ',')) {
    const std::vector<std::string> words = absl::StrSplit(peer, ' ');
    good = good && words.size() == 3;
    if (good) place.peers.push_back({words[0], words[1], words[2]});
  }
  if (!good || place.holders > place.peers.size())
    return Bad("GTRAIN_CHECKPOINT_PEERS", peers,
               "how many of them keep copies, then name, address and key of each");
  // An agent of the version before says it under the other name.
  place.secret =
      environment("GTRAIN_JOB_SECRET").value_or(environment("GTRAIN_CHECKPOINT_SECRET").value_or(""));
  return place;
}

absl::StatusOr<Settings> MergeSettings(const CheckpointOptions& options, const Environment& environment) {
  const auto get = [&](const char* name) { return environment(name).value_or(""); };
  Settings out{.keep = options.keep,
               .every_steps = options.every_steps,
               .every = options.every,
               .commit_timeout = options.commit_timeout,
               .last_save = options.last_save,
               .device = options.device,
               .lazy = options.lazy,
               .before_save = options.before_save,
               .read_only = options.read_only,
               .takeover = options.takeover,
               .max_rollback = options.max_rollback};
  GT_RETURN_IF_ERROR(ReadVerifyReplicas(options.verify_replicas, &out.verify_replicas));
  const std::string uri = get("GTRAIN_CHECKPOINT_URI");
  GT_ASSIGN_OR_RETURN(out.uri, ParseLocation(uri.empty() ? options.uri : uri));
  if (out.uri.empty()) {
    return absl::InvalidArgumentError(
        "no place for checkpoints: write checkpoint.uri in the job file, set $GTRAIN_CHECKPOINT_URI or "
        "CheckpointOptions::uri");
  }
  const std::string keep = get("GTRAIN_CHECKPOINT_KEEP");
  if (!keep.empty() && !absl::SimpleAtoi(keep, &out.keep))
    return Bad("GTRAIN_CHECKPOINT_KEEP", keep, "a number");
  if (out.keep < 1)
    return absl::InvalidArgumentError("checkpoint keep is below 1: at least the newest one is kept");
  const std::string every = get("GTRAIN_CHECKPOINT_EVERY");
  if (!every.empty()) GT_RETURN_IF_ERROR(ReadEvery(every, &out));
  if ((out.every_steps && *out.every_steps < 1) || (out.every && *out.every <= absl::ZeroDuration())) {
    return absl::InvalidArgumentError("the checkpoint interval is not positive");
  }
  GT_RETURN_IF_ERROR(ReadOnError(get("GTRAIN_CHECKPOINT_ON_ERROR"), &out));
  GT_RETURN_IF_ERROR(ReadFromHead(environment, &out));
  if (out.max_rollback < 0) return absl::InvalidArgumentError("checkpoint max_rollback is negative");
  GT_ASSIGN_OR_RETURN(out.near, ReadNear(environment));
  const std::string resume = get("GTRAIN_RESUME");
  if (!resume.empty()) GT_RETURN_IF_ERROR(ReadResume(resume, &out));
  // A program that only reads takes any checkpoint, whichever job wrote it.
  if (out.read_only && (out.resume == Resume::kIfSameJob || out.resume == Resume::kFresh))
    out.resume = Resume::kLatest;
  out.job_began = BirthOf(get("GTRAIN_RUN_DIR"));
  out.node = get("GTRAIN_NODE");
  out.identity.cluster = get("GTRAIN_CLUSTER");
  out.identity.job_hash = get("GTRAIN_JOB_HASH");
  if (std::max(out.identity.cluster.size(), out.identity.job_hash.size()) > kIdentityBytesMax) {
    return absl::InvalidArgumentError("$GTRAIN_CLUSTER or $GTRAIN_JOB_HASH is too long");
  }
  return out;
}

}  // namespace gtrain::ckpt
