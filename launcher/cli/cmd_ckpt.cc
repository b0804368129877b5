// `gtrain ckpt`: one function a sub-verb, each a few lines over checkpoint/engine/admin.h.
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/store/open_store.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using nlohmann::ordered_json;
using Store = std::unique_ptr<port::BlobStore>;

// A bar on the terminal's own line, redrawn when a percent changes; Ctrl-C ends the work.
class Bar {
 public:
  explicit Bar(std::string what) : what_(std::move(what)), shown_(CanRedraw(STDERR_FILENO)) {}
  ~Bar() {
    if (drawn_) std::fputs("\r\x1b[K", stderr);
  }
  ckpt::Progress progress() {
    return [this](uint64_t done, uint64_t total) { return Draw(done, total); };
  }

 private:
  absl::Status Draw(uint64_t done, uint64_t total) {
    if (signals_.Next() != 0) return absl::CancelledError("interrupted");
    const int percent = total == 0 ? 100 : static_cast<int>(done * 100.0 / total);
    if (!shown_ || percent == last_) return absl::OkStatus();
    last_ = percent;
    drawn_ = true;
    const std::string filled(static_cast<size_t>(percent) * 30 / 100, '#');
    std::fprintf(stderr, "\r%s [%-30s] %3d%%", what_.c_str(), filled.c_str(), percent);
    return absl::OkStatus();
  }

  const std::string what_;
  const bool shown_;
  bool drawn_ = false;
  int last_ = -1;
  SignalPipe signals_;
};

absl::StatusOr<Store> Open(const std::string& uri) {
  GT_ASSIGN_OR_RETURN(const std::string location, ckpt::ParseLocation(uri));
  return ckpt::OpenStore(location);
}

// Opens a location that must exist. A directory that does not exist reads as an empty one, and a mistyped
// path must not look like a run without checkpoints.
absl::StatusOr<Store> OpenToRead(const std::string& uri) {
  GT_ASSIGN_OR_RETURN(const std::string location, ckpt::ParseLocation(uri));
  struct stat info;
  const bool directory = !absl::StartsWith(location, "s3://");
  if (directory && stat(location.c_str(), &info) != 0) {
    if (errno == ENOENT) return absl::NotFoundError(absl::StrCat(location, " does not exist"));
    return ErrnoStatus(errno, location);
  }
  if (directory && !S_ISDIR(info.st_mode))
    return absl::FailedPreconditionError(absl::StrCat(location, " is not a directory"));
  return ckpt::OpenStore(location);
}

std::string NoCheckpointsIn(const Store& store) {
  return absl::StrCat("no checkpoints in ", SafeText(store->Describe()));
}

// Whether the newest checkpoint was asked for and the retention of a job that runs there took it meanwhile.
bool NewestIsGone(const Store& store, absl::string_view which, const ckpt::Manifest& m) {
  return which == "latest" && ckpt::IsGone(store.get(), m.id).value_or(false);
}

void WarnIfNotFinite(const Store& store, const ckpt::Manifest& m) {
  if (!m.finite()) Complain(ckpt::AdviceForNotFinite(store.get(), m.id).text);
}

std::string Word(const Args& args, size_t i, const char* otherwise) {
  return args.words.size() > i ? args.words[i] : otherwise;
}

absl::Status CheckWords(const Args& args, size_t min, size_t max, const char* usage) {
  if (args.words.size() >= min && args.words.size() <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("usage: gtrain ckpt ", usage));
}

// --- ls
struct Line {
  std::string attempt, state;
  const ckpt::Manifest* manifest = nullptr;
  bool pinned = false;
};

ordered_json JsonOf(const ckpt::SaveId& id, const Line& line) {
  ordered_json out = {
      {"attempt", line.attempt}, {"state", line.state}, {"step", id.step}, {"pinned", line.pinned}};
  if (line.manifest == nullptr) return out;
  out["job"] = line.manifest->owner.job;
  out["job_hash"] = line.manifest->owner.job_hash;
  out["world_size"] = line.manifest->world_size;
  out["bytes"] = ckpt::BytesOf(*line.manifest);
  out["tensors"] = line.manifest->tensors.size();
  out["finite"] = line.manifest->finite();
  return out;
}

std::string Dump(const ordered_json& document) {
  return document.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

absl::Status Ls(const Args& args) {
  GT_RETURN_IF_ERROR(CheckWords(args, 2, 2, "ls URI"));
  GT_ASSIGN_OR_RETURN(const Store store, OpenToRead(args.words[1]));
  GT_ASSIGN_OR_RETURN(const std::vector<ckpt::SaveId> ids, ckpt::ListManifests(store.get()));
  ordered_json list = ordered_json::array();
  std::string table =
      absl::StrFormat("%-12s %-9s %10s %6s %8s  %s\n", "STEP", "STATE", "SIZE", "RANKS", "TENSORS", "JOB");
  for (const ckpt::SaveId& id : ids) {
    const auto read = ckpt::ReadManifest(store.get(), id);
    if (absl::IsNotFound(read.status())) continue;  // deleted since it was listed
    Line line = {ckpt::AttemptName(id), "damaged"};
    if (read.ok()) line.manifest = std::get_if<ckpt::Manifest>(&*read);
    if (read.ok()) line.state = line.manifest == nullptr ? "aborted" : "committed";
    GT_ASSIGN_OR_RETURN(line.pinned, ckpt::IsPinned(store.get(), id));
    list.push_back(JsonOf(id, line));
    const ckpt::Manifest* m = line.manifest;
    absl::StrAppend(&table,
                    absl::StrFormat("%-12d %-9s %10s %6s %8s  %s%s%s\n", id.step, line.state,
                                    m == nullptr ? "" : PrintBytes(ckpt::BytesOf(*m)),
                                    m == nullptr ? "" : absl::StrCat(m->world_size),
                                    m == nullptr ? "" : absl::StrCat(m->tensors.size()),
                                    m == nullptr ? "" : SafeText(m->owner.job), line.pinned ? "  pinned" : "",
                                    m == nullptr || m->finite() ? "" : "  NOT FINITE"));
  }
  if (args.Has("json")) {
    Print(Dump(list));
  } else if (list.empty()) {
    Print(NoCheckpointsIn(store) + "\n");
  } else {
    Print(table);
  }
  return absl::OkStatus();
}

// --- show
absl::Status Show(const Args& args) {
  GT_RETURN_IF_ERROR(CheckWords(args, 2, 3, "show URI [latest|STEP]"));
  GT_ASSIGN_OR_RETURN(const Store store, OpenToRead(args.words[1]));
  GT_ASSIGN_OR_RETURN(const ckpt::Manifest m, ckpt::FindCheckpoint(store.get(), Word(args, 2, "latest")));
  if (args.Has("json")) {
    Print(ckpt::Print(m) + "\n");
    return absl::OkStatus();
  }
  std::string out =
      absl::StrCat(store->Describe(), "/", ckpt::ManifestKey(m.id), "\nstep ", m.id.step, ", job ",
                   SafeText(m.owner.job), " (hash ", m.owner.job_hash.substr(0, 12), "), ", m.world_size,
                   " ranks, ", PrintBytes(ckpt::BytesOf(m)), m.finite() ? "" : ", NOT FINITE", "\n");
  for (const ckpt::GlobalTensor& t : m.tensors)
    absl::StrAppend(&out, "  ", SafeText(t.name), "  ", ckpt::Describe(t), "\n");
  Print(out);
  return absl::OkStatus();
}

// --- verify
struct Verified {
  std::string which;  // as it was asked for
  absl::StatusOr<ckpt::Manifest> manifest;
  absl::Status status;

  std::string Name() const { return manifest.ok() ? ckpt::AttemptName(manifest->id) : which; }
  bool IsFinite() const { return !manifest.ok() || manifest->finite(); }
};

ordered_json VerifiedJson(const Verified& verified) {
  ordered_json out = {{"attempt", verified.Name()}, {"state", verified.status.ok() ? "intact" : "damaged"}};
  if (!verified.status.ok()) out["error"] = std::string(verified.status.message());
  if (!verified.manifest.ok()) return out;
  out["step"] = verified.manifest->id.step;
  out["bytes"] = ckpt::BytesOf(*verified.manifest);
  out["finite"] = verified.manifest->finite();
  return out;
}

std::string VerifiedText(const Verified& verified) {
  return absl::StrCat(verified.Name(), "  ",
                      verified.status.ok()
                          ? absl::StrCat("intact, ", PrintBytes(ckpt::BytesOf(*verified.manifest)))
                          : absl::StrCat("DAMAGED: ", verified.status.message()),
                      verified.IsFinite() ? "" : ", NOT FINITE", "\n");
}

// nullopt: it is not there, or is gone meanwhile; with `named` its absence is an error.
absl::StatusOr<std::optional<Verified>> VerifyOne(const Store& store, const std::string& which, bool named) {
  Verified out{which, ckpt::FindCheckpoint(store.get(), which), absl::OkStatus()};
  out.status = out.manifest.status();
  if (absl::IsNotFound(out.status)) {
    if (named) return out.status;
    return std::nullopt;  // aborted: no checkpoint at all
  }
  if (out.manifest.ok()) {
    Bar bar(absl::StrCat("verify step ", out.manifest->id.step));
    out.status = ckpt::VerifyAll(store.get(), *out.manifest, bar.progress());
  }
  if (absl::IsCancelled(out.status)) return out.status;
  // Retention takes manifests first.
  if (!out.status.ok() && out.manifest.ok() && !named &&
      ckpt::IsGone(store.get(), out.manifest->id).value_or(false)) {
    return std::nullopt;
  }
  return out;
}

absl::Status Verify(const Args& args) {
  GT_RETURN_IF_ERROR(CheckWords(args, 2, 3, "verify URI [latest|STEP]"));
  GT_ASSIGN_OR_RETURN(const Store store, OpenToRead(args.words[1]));
  std::vector<std::string> wanted = {Word(args, 2, "")};
  if (wanted[0].empty()) {
    wanted.clear();
    GT_ASSIGN_OR_RETURN(const std::vector<ckpt::SaveId> ids, ckpt::ListManifests(store.get()));
    for (const ckpt::SaveId& id : ids) wanted.push_back(ckpt::AttemptName(id));
  }
  size_t intact = 0, damaged = 0;
  ordered_json list = ordered_json::array();
  std::optional<ckpt::Manifest> not_finite;  // the newest
  for (const std::string& which : wanted) {
    GT_ASSIGN_OR_RETURN(const std::optional<Verified> verified,
                        VerifyOne(store, which, args.words.size() > 2));
    if (!verified) continue;
    ++(verified->status.ok() ? intact : damaged);
    if (!verified->IsFinite() && !not_finite) not_finite = *verified->manifest;
    list.push_back(VerifiedJson(*verified));
    if (!args.Has("json")) Print(VerifiedText(*verified));
  }
  if (not_finite) WarnIfNotFinite(store, *not_finite);
  if (intact + damaged == 0) return absl::NotFoundError(NoCheckpointsIn(store));
  if (args.Has("json"))
    Print(Dump({{"checkpoints", std::move(list)}, {"intact", intact}, {"damaged", damaged}}));
  if (damaged == 0) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(damaged, " of ", intact + damaged, " damaged; a job resumes from the newest intact one"));
}

// --- diff
absl::Status Diff(const Args& args) {
  GT_RETURN_IF_ERROR(CheckWords(args, 4, 5, "diff URI STEP [URI2] STEP2"));
  const std::string& second = args.words.size() == 5 ? args.words[3] : args.words[1];
  GT_ASSIGN_OR_RETURN(const Store store_a, OpenToRead(args.words[1]));
  GT_ASSIGN_OR_RETURN(const Store store_b, OpenToRead(second));
  const std::string &which_a = args.words[2], &which_b = args.words.back();
  GT_ASSIGN_OR_RETURN(ckpt::Manifest a, ckpt::FindCheckpoint(store_a.get(), which_a));
  GT_ASSIGN_OR_RETURN(ckpt::Manifest b, ckpt::FindCheckpoint(store_b.get(), which_b));
  const auto compare = [&] {
    Bar bar("compare");
    return ckpt::Compare(store_a.get(), a, store_b.get(), b, bar.progress());
  };
  auto differences = compare();
  if (!differences.ok() && (NewestIsGone(store_a, which_a, a) || NewestIsGone(store_b, which_b, b))) {
    GT_ASSIGN_OR_RETURN(a, ckpt::FindCheckpoint(store_a.get(), which_a));
    GT_ASSIGN_OR_RETURN(b, ckpt::FindCheckpoint(store_b.get(), which_b));
    differences = compare();
  }
  GT_RETURN_IF_ERROR(differences.status());
  for (const auto& d : *differences) Print(absl::StrCat(SafeText(d.name), "  ", d.what, "\n"));
  if (differences->empty()) Print("no tensor differs\n");
  const auto per_rank = [](const ckpt::GlobalTensor& t) { return t.layout == ckpt::Layout::kPerRank; };
  if (std::any_of(a.tensors.begin(), a.tensors.end(), per_rank)) {
    Complain("state that each rank has of its own was not compared");
  }
  return absl::OkStatus();
}

// --- pin, unpin, rm, gc
absl::Status SetPin(const Args& args, bool pin) {
  GT_RETURN_IF_ERROR(CheckWords(args, 3, 3, pin ? "pin URI STEP" : "unpin URI STEP"));
  GT_ASSIGN_OR_RETURN(const Store store, OpenToRead(args.words[1]));
  // A copy that was cut off is pinned and has no manifest.
  if (const auto attempt = ckpt::ParseAttemptName(args.words[2]); attempt && !pin) {
    GT_RETURN_IF_ERROR(ckpt::Unpin(store.get(), *attempt));
    Print(absl::StrCat(SafeText(args.words[2]), " is no longer pinned\n"));
    return absl::OkStatus();
  }
  GT_ASSIGN_OR_RETURN(const ckpt::Manifest m, ckpt::FindCheckpoint(store.get(), args.words[2]));
  GT_RETURN_IF_ERROR(pin ? ckpt::Pin(store.get(), m.id) : ckpt::Unpin(store.get(), m.id));
  Print(absl::StrCat("step ", m.id.step, pin ? " is pinned: no job deletes it\n" : " is no longer pinned\n"));
  return absl::OkStatus();
}

absl::Status Rm(const Args& args) {
  GT_RETURN_IF_ERROR(CheckWords(args, 3, 3, "rm URI STEP [--force]"));
  GT_ASSIGN_OR_RETURN(const Store store, OpenToRead(args.words[1]));
  GT_ASSIGN_OR_RETURN(const ckpt::Manifest m, ckpt::FindCheckpoint(store.get(), args.words[2]));
  GT_ASSIGN_OR_RETURN(const ckpt::Manifest newest, ckpt::FindCheckpoint(store.get(), "latest"));
  GT_ASSIGN_OR_RETURN(const bool pinned, ckpt::IsPinned(store.get(), m.id));
  if (!args.Has("force") && (pinned || newest.id == m.id)) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", m.id.step, pinned ? " is pinned" : " is the newest, from which jobs resume",
                     "; --force removes it all the same"));
  }
  GT_RETURN_IF_ERROR(ckpt::RemoveCheckpoint(store.get(), m.id));
  Print(absl::StrCat("removed step ", m.id.step, ", ", PrintBytes(ckpt::BytesOf(m)), "\n"));
  return absl::OkStatus();
}

ordered_json GarbageJson(const ckpt::Garbage& garbage, bool dry_run) {
  const auto names = [](const std::vector<ckpt::SaveId>& ids) {
    ordered_json out = ordered_json::array();
    for (const ckpt::SaveId& id : ids) out.push_back(ckpt::AttemptName(id));
    return out;
  };
  ordered_json unfinished = ordered_json::array();
  for (const auto& u : garbage.unfinished) unfinished.push_back(u.key);
  return {{"dry_run", dry_run},
          {"bytes", garbage.bytes},
          {"never_committed", names(garbage.plan.folders)},
          {"never_finished", std::move(unfinished)},
          {"left_by_programs", garbage.small},
          {"kept_pinned", names(garbage.pinned)},
          {"kept_in_flight", names(garbage.in_flight)}};
}

absl::Status Gc(const Args& args) {
  GT_RETURN_IF_ERROR(CheckWords(args, 2, 2, "gc URI [--dry-run]"));
  GT_ASSIGN_OR_RETURN(const Store store, OpenToRead(args.words[1]));
  GT_ASSIGN_OR_RETURN(const ckpt::Garbage garbage, ckpt::FindGarbage(store.get()));
  if (args.Has("json")) {
    if (!args.Has("dry-run")) GT_RETURN_IF_ERROR(ckpt::DropGarbage(store.get(), garbage));
    Print(Dump(GarbageJson(garbage, args.Has("dry-run"))));
    return absl::OkStatus();
  }
  for (const ckpt::SaveId& id : garbage.plan.folders)
    Print(absl::StrCat(ckpt::AttemptName(id), "  never committed\n"));
  for (const auto& u : garbage.unfinished) Print(absl::StrCat(SafeText(u.key), "  never finished\n"));
  for (const std::string& key : garbage.small)
    Print(absl::StrCat(SafeText(key), "  left by a program that ended\n"));
  for (const ckpt::SaveId& id : garbage.pinned) {
    Print(absl::StrCat(ckpt::AttemptName(id), "  pinned and never committed: left. A copy of it may be ",
                       "repeated; else gtrain ckpt unpin ", SafeText(args.words[1]), " ",
                       ckpt::AttemptName(id), "\n"));
  }
  for (const ckpt::SaveId& id : garbage.in_flight) {
    Print(absl::StrCat(ckpt::AttemptName(id), "  not committed yet: left until nothing of it changed for ",
                       absl::FormatDuration(ckpt::kAbandonedAge), "\n"));
  }
  if (!args.Has("dry-run")) GT_RETURN_IF_ERROR(ckpt::DropGarbage(store.get(), garbage));
  Print(absl::StrCat(args.Has("dry-run") ? "would free " : "freed ", PrintBytes(garbage.bytes), " of ",
                     garbage.plan.folders.size(), " attempts and ", garbage.unfinished.size(),
                     " unfinished puts\n"));
  return absl::OkStatus();
}

// --- cp, export, import
absl::Status Cp(const Args& args) {
  GT_RETURN_IF_ERROR(CheckWords(args, 3, 4, "cp URI URI2 [latest|STEP]"));
  GT_ASSIGN_OR_RETURN(const Store from, OpenToRead(args.words[1]));
  GT_ASSIGN_OR_RETURN(const Store to, Open(args.words[2]));
  GT_ASSIGN_OR_RETURN(const ckpt::Manifest m, ckpt::FindCheckpoint(from.get(), Word(args, 3, "latest")));
  {
    Bar bar(absl::StrCat("copy step ", m.id.step));
    GT_RETURN_IF_ERROR(ckpt::CopyCheckpoint(from.get(), m, to.get(), bar.progress()));
  }
  Print(absl::StrCat("copied and verified step ", m.id.step, ", ", PrintBytes(ckpt::BytesOf(m)), " to ",
                     SafeText(to->Describe()),
                     "\nIt is pinned there, so that no job deletes it; gtrain ckpt unpin ",
                     SafeText(args.words[2]), " ", ckpt::AttemptName(m.id), "\n"));
  return absl::OkStatus();
}

absl::Status Export(const Args& args) {
  GT_RETURN_IF_ERROR(CheckWords(args, 3, 4, "export URI [latest|STEP] FILE"));
  GT_ASSIGN_OR_RETURN(const Store store, OpenToRead(args.words[1]));
  const std::string which = args.words.size() == 4 ? args.words[2] : "latest";
  GT_ASSIGN_OR_RETURN(ckpt::Manifest m, ckpt::FindCheckpoint(store.get(), which));
  std::vector<std::string> left_out;
  const auto write = [&] {
    left_out.clear();
    Bar bar(absl::StrCat("export step ", m.id.step));
    return ckpt::ExportSafetensors(store.get(), m, args.words.back(), bar.progress(), &left_out);
  };
  absl::Status written = write();
  if (!written.ok() && NewestIsGone(store, which, m)) {
    GT_ASSIGN_OR_RETURN(m, ckpt::FindCheckpoint(store.get(), which));
    written = write();
  }
  GT_RETURN_IF_ERROR(written);
  Print(absl::StrCat("wrote ", m.tensors.size() - left_out.size(), " tensors of step ", m.id.step, " to ",
                     SafeText(args.words.back()), "\n"));
  WarnIfNotFinite(store, m);
  if (!left_out.empty())
    Complain(absl::StrCat("left out, because each rank has its own: ", absl::StrJoin(left_out, ", ")));
  return absl::OkStatus();
}

absl::Status Import(const Args& args) {
  GT_RETURN_IF_ERROR(CheckWords(args, 3, 3, "import FILE URI [--takeover]"));
  GT_ASSIGN_OR_RETURN(const Store store, Open(args.words[2]));
  GT_ASSIGN_OR_RETURN(const ckpt::Manifest m,
                      ckpt::ImportSafetensors(args.words[1], store.get(), args.Has("takeover")));
  Print(absl::StrCat("committed ", m.tensors.size(), " tensors as step 0 in ", SafeText(store->Describe()),
                     "; a job starts from them with this checkpoint.uri\n"));
  return absl::OkStatus();
}

const std::vector<std::string>& Actions() {
  static const std::vector<std::string> kActions = {"ls", "show", "verify", "diff",   "pin",   "unpin",
                                                    "rm", "gc",   "cp",     "export", "import"};
  return kActions;
}

bool IsAction(const std::string& word) { return std::ranges::find(Actions(), word) != Actions().end(); }

absl::Status Ckpt(const Args& args) {
  const std::string& verb = args.words[0];
  const bool prints_json = verb == "ls" || verb == "show" || verb == "verify" || verb == "gc";
  if (args.Has("json") && !prints_json && IsAction(verb))
    return absl::InvalidArgumentError("--json is for ckpt ls, show, verify and gc");
  if (verb == "ls") return Ls(args);
  if (verb == "show") return Show(args);
  if (verb == "verify") return Verify(args);
  if (verb == "diff") return Diff(args);
  if (verb == "pin" || verb == "unpin") return SetPin(args, verb == "pin");
  if (verb == "rm") return Rm(args);
  if (verb == "gc") return Gc(args);
  if (verb == "cp") return Cp(args);
  if (verb == "export") return Export(args);
  if (verb == "import") return Import(args);
  return absl::InvalidArgumentError(
      absl::StrCat("ckpt ", SafeText(verb),
                   " is not known; ls, show, verify, diff, pin, unpin, rm, gc, cp, export and import are"));
}

int RunCkpt(const Args& args) {
  const absl::Status status = Ckpt(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb CkptVerb() {
  Verb verb;
  verb.name = "ckpt";
  verb.summary = "Look at checkpoints, verify, compare, copy, export, delete them";
  verb.usage = "ls|show|verify|diff|pin|unpin|rm|gc|cp|export|import URI ...";
  verb.details =
      "URI is a directory or s3://bucket/prefix; a checkpoint is named by its step, or \"latest\".\n\n"
      "  gtrain ckpt ls ./ckpt                        what is there, newest first\n"
      "  gtrain ckpt show ./ckpt 1200                 its tensors\n"
      "  gtrain ckpt verify s3://bucket/run           every byte of every checkpoint; exit 1 if one is "
      "damaged or there is none\n"
      "  gtrain ckpt diff ./ckpt 1000 1200            which tensors differ, and by how much\n"
      "  gtrain ckpt pin ./ckpt 1200                  keep it, whatever `keep:` says; unpin\n"
      "  gtrain ckpt rm ./ckpt 1000                   delete one\n"
      "  gtrain ckpt gc ./ckpt --dry-run              what dead writers left\n"
      "  gtrain ckpt cp ./ckpt s3://bucket/run 1200   verified copy\n"
      "  gtrain ckpt export ./ckpt model.safetensors  the newest as one file, shards merged\n"
      "  gtrain ckpt import model.safetensors ./new   a file as step 0, to start from";
  verb.flags = {{"json", '\0', "", "ls, show, verify and gc: one document"},
                {"dry-run", '\0', "", "gc: only say what would go"},
                {"force", '\0', "", "rm: also the newest or a pinned one"},
                {"takeover", '\0', "", "import: into the directory of a job that is over"}};
  verb.actions = Actions();
  verb.words_min = 1;
  verb.words_max = 5;
  verb.run = RunCkpt;
  return verb;
}

}  // namespace gtrain::cli
