// `gtrain doctor`: looks at everything a job needs and says what is wrong and what to do. Each check is one
// function that returns one line; none of them changes anything or waits longer than a few seconds.
#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/units.h"
#include "launcher/cli/context.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "launcher/exec/contexts.h"
#include "launcher/exec/local_cluster.h"

namespace gtrain::cli {
namespace {

enum class Mark { kOk, kNote, kBad };

struct Finding {
  std::string what;
  Mark mark = Mark::kOk;
  std::string text;
};

// The nearest folder of `path` that exists.
std::string Existing(std::string path) {
  while (path.size() > 1 && access(path.c_str(), F_OK) != 0)
    path = path.substr(0, std::max<size_t>(1, path.rfind('/')));
  return path;
}

Finding StateDir() {
  const absl::StatusOr<std::string> dir = exec::LocalCluster().HeadDirectory();
  if (!dir.ok()) return {"state", Mark::kBad, std::string(dir.status().message())};
  const std::string existing = Existing(*dir);
  if (access(existing.c_str(), W_OK | X_OK) != 0) {
    return {"state", Mark::kBad,
            absl::StrCat(existing, " is not writable; set XDG_STATE_HOME to a folder of yours")};
  }
  struct statvfs fs {};
  if (statvfs(existing.c_str(), &fs) != 0)
    return {"state", Mark::kNote, absl::StrCat(*dir, ": free space unknown")};
  const uint64_t free_bytes = uint64_t{fs.f_bavail} * fs.f_frsize;
  const bool low = free_bytes < (uint64_t{1} << 30);
  return {
      "state", low ? Mark::kBad : Mark::kOk,
      absl::StrCat(*dir, ", ", PrintBytes(free_bytes), " free", low ? "; the head needs at least 1GiB" : "")};
}

Finding Keys() {
  const absl::Status keys = exec::LocalCluster().CheckKeys();
  if (!keys.ok()) return {"keys", Mark::kBad, std::string(keys.message())};
  return {"keys", Mark::kOk, "the local cluster's keys are private, or not made yet"};
}

Finding ContextsFile() {
  const absl::StatusOr<exec::Contexts> contexts = exec::ReadContexts();
  if (!contexts.ok()) return {"contexts", Mark::kBad, std::string(contexts.status().message())};
  return {"contexts", Mark::kOk,
          absl::StrCat(contexts->contexts.size(),
                       " known, current: ", contexts->current.empty() ? "local" : contexts->current)};
}

Finding Head(const Args& args) {
  absl::StatusOr<Cluster> cluster = OpenCluster(args, Start::kNever);
  if (absl::IsNotFound(cluster.status()))
    return {"head", Mark::kOk, "no local cluster runs; `gtrain launch` starts one"};
  if (!cluster.ok()) return {"head", Mark::kBad, std::string(cluster.status().message())};
  const absl::Time before = absl::Now();
  const absl::StatusOr<std::string> nodes = Ask(*cluster, core::ClientNodes{}, absl::Seconds(5));
  if (!nodes.ok())
    return {"head", Mark::kBad, absl::StrCat(cluster->head.options.endpoint, ": ", nodes.status().message())};
  return {
      "head", Mark::kOk,
      absl::StrCat(cluster->head.options.endpoint, " answers in ",
                   PrintDuration(absl::Milliseconds(1 + absl::ToInt64Milliseconds(absl::Now() - before))))};
}

Finding ClockCheck() {
  const absl::CivilYear year = absl::ToCivilYear(absl::Now(), absl::UTCTimeZone());
  if (year.year() < 2024) {
    return {"clock", Mark::kBad,
            absl::StrCat("the wall clock says ", year.year(),
                         "; jobs run, but times in logs are wrong. Set it (NTP)")};
  }
  return {"clock", Mark::kOk, absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::Now(), absl::UTCTimeZone())};
}

Finding OpenFiles() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const bool low = limit.rlim_max < 4096;
  return {"open files", low ? Mark::kBad : Mark::kOk,
          absl::StrCat(limit.rlim_cur, " (may be raised to ", limit.rlim_max, ")",
                       low ? "; at least 4096 are needed: ulimit -n" : "")};
}

Finding Processes() {
  rlimit limit{};
  getrlimit(RLIMIT_NPROC, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return {"processes", Mark::kOk, "unlimited"};
  const bool low = limit.rlim_cur < 1024;
  return {"processes", low ? Mark::kBad : Mark::kOk,
          absl::StrCat(limit.rlim_cur, low ? "; raise it: ulimit -u" : "")};
}

// Loads a library and unloads it at once, but its code stays: UCX forgets memory when it is unloaded, which a
// leak checker can then name. A missing library is only a note, which says what does not work without it.
Finding Library(const std::string& what, const std::vector<const char*>& names, const std::string& without) {
  for (const char* name : names) {
    if (void* handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE)) {
      dlclose(handle);
      return {what, Mark::kOk, name};
    }
  }
  return {what, Mark::kNote, absl::StrCat("not found: ", without)};
}

Finding Beside(const char* what, const std::string& name) {
  std::string path(4096, '\0');
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  path.resize(static_cast<size_t>(std::max<ssize_t>(length, 0)));
  const std::string program = path.substr(0, path.rfind('/') + 1) + name;
  if (access(program.c_str(), X_OK) == 0) return {what, Mark::kOk, program};
  return {what, Mark::kBad, absl::StrCat(program, " is missing; it must lie beside gtrain")};
}

int RunDoctor(const Args& args) {
  std::vector<Finding> findings = {StateDir(),
                                   Keys(),
                                   ContextsFile(),
                                   Head(args),
                                   Beside("keeper", "gtrain-keeper"),
                                   Beside("writer", "gtrain-writer"),
                                   ClockCheck(),
                                   OpenFiles(),
                                   Processes()};
  findings.push_back(Library("ucx", {"libucp.so.0"}, "ranks of one job must all be on one machine"));
  findings.push_back(Library("nvml", {"libnvidia-ml.so.1"}, "no NVIDIA GPUs are offered"));
  bool bad = false;
  std::string text;
  nlohmann::json json = nlohmann::json::array();
  for (const Finding& f : findings) {
    const char* mark = f.mark == Mark::kOk ? "ok" : f.mark == Mark::kNote ? "note" : "BAD";
    bad = bad || f.mark == Mark::kBad;
    json.push_back({{"check", f.what}, {"result", mark}, {"text", f.text}});
    absl::StrAppend(&text, "  ", mark, std::string(6 - std::string(mark).size(), ' '), f.what,
                    std::string(f.what.size() < 12 ? 12 - f.what.size() : 1, ' '), SafeText(f.text), "\n");
  }
  Print(args.Has("json") ? json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n" : text);
  return bad ? kFailed : kDone;
}

}  // namespace

Verb DoctorVerb() {
  Verb verb;
  verb.name = "doctor";
  verb.summary = "Check this machine and the way to the head";
  verb.details = "Exit code 1 when something is BAD; each line says what to do.\n\n  gtrain doctor --json";
  verb.flags = {ContextFlag(), {"json", '\0', "", "an array of {check, result, text}"}};
  verb.run = RunDoctor;
  return verb;
}

}  // namespace gtrain::cli
