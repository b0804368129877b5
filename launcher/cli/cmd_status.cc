#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/json_depth.h"
#include "base/status_macros.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/left.h"
#include "launcher/cli/rankfile.h"
#include "launcher/cli/screen.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

constexpr int64_t kOverShown = 20;  // jobs that are over, when nothing is said
constexpr int kWatchMs = 1000;

// ---------------------------------------------------------------- what there is

struct Answer {
  std::string json;
  std::string note;   // why it is not the head's, as a sentence
  absl::Status head;  // what runs is not known
};

// How many of the newest; all that run are shown all the same where nothing was said.
absl::StatusOr<std::optional<size_t>> LimitOf(const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> limit, args.Int("limit", 1, 1'000'000));
  if (limit && args.Has("all")) return absl::InvalidArgumentError("--all and --limit do not go together");
  return limit ? std::optional<size_t>(*limit) : std::nullopt;
}

// The number of finished jobs that a head lists without a limit in the request.
constexpr size_t kOverListed = 100;

absl::StatusOr<std::string> AskHead(const Args& args, const std::string& word,
                                    std::optional<Cluster>& cluster, int interrupt_fd) {
  if (!cluster) {
    GT_ASSIGN_OR_RETURN(cluster, OpenCluster(args, Start::kNever));
  }
  if (interrupt_fd >= 0) cluster->client->set_interrupt_fd(interrupt_fd);
  std::string id;
  if (!word.empty()) {
    GT_ASSIGN_OR_RETURN(const JobDoc job, FindJob(*cluster, word));
    id = job.id;
  }
  GT_ASSIGN_OR_RETURN(const std::optional<size_t> limit, LimitOf(args));
  constexpr size_t kMost = core::ClientStatus::kOverMax;
  const size_t over = args.Has("all") ? kMost : limit.value_or(0) > kOverListed ? std::min(kMost, *limit) : 0;
  return Ask(*cluster, core::ClientStatus{JobId(id), static_cast<int>(over), args.Has("verbose")});
}

std::string ListOf(const std::string& job) { return absl::StrCat("{\"head\":false,\"jobs\":[", job, "]}"); }

// Finds jobs at the head; where there is none, or where it has forgotten the job, in the results that jobs
// left. A connection that has failed is not kept.
absl::StatusOr<Answer> Find(const Args& args, std::optional<Cluster>& cluster, int interrupt_fd = -1) {
  const std::string word = args.words.empty() ? "" : args.words[0];
  Answer answer;
  if (IsRunDirectory(word)) {
    GT_ASSIGN_OR_RETURN(const std::string job, LeftJob(args, word));
    answer.json = ListOf(job);
    return answer;
  }
  absl::StatusOr<std::string> asked = AskHead(args, word, cluster, interrupt_fd);
  if (asked.ok()) {
    answer.json = *std::move(asked);
    return answer;
  }
  cluster.reset();
  const absl::StatusOr<LeftAnswer> left = LeftInstead(asked.status(), args, word, /*all=*/true);
  if (left.ok()) {
    answer.json = word.empty() ? left->json : ListOf(left->json);
    answer.note = left->note;
    if (word.empty() && !absl::IsNotFound(asked.status())) answer.head = asked.status();
    return answer;
  }
  if (!absl::IsNotFound(asked.status()) || !args.Has("json") || !word.empty()) return left.status();
  answer.json = "{\"jobs\": []}";  // no local cluster means no local jobs
  return answer;
}

// ---------------------------------------------------------------- how it is shown

// Returns the newest `limit` jobs, in order of submission.
std::string Limited(const std::string& text, std::optional<size_t> limit) {
  if (!limit) return text;
  nlohmann::json document = nlohmann::json::parse(ShallowJson(text), nullptr, /*allow_exceptions=*/false);
  if (!document.is_object() || !document["jobs"].is_array()) return text;
  auto& jobs = document["jobs"].get_ref<nlohmann::json::array_t&>();
  if (jobs.size() > *limit) jobs.erase(jobs.begin(), jobs.end() - static_cast<ptrdiff_t>(*limit));
  return document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

struct Row {
  std::string job, state, ranks, user, started, time, text;
};

Row RowOf(const JobDoc& job, absl::Time now) {
  const std::string progress = PrintProgress(job);
  return {SafeText(job.id),
          SafeText(job.state),
          absl::StrCat(job.world_size),
          SafeText(job.user),
          job.started ? PrintClock(*job.started, now) : "-",
          job.run_time ? PrintSpan(*job.run_time) : "-",
          absl::StrCat(SafeText(job.stuck), job.stuck.empty() ? "" : "; ", progress,
                       progress.empty() ? "" : "; ", SafeText(job.reason))};
}

std::string Table(const StatusDoc& doc, std::optional<size_t> limit, bool all, absl::Time now) {
  if (doc.jobs.empty()) return absl::StrCat("no jobs; ", doc.nodes, doc.nodes == 1 ? " node\n" : " nodes\n");
  std::vector<Row> rows = {{"JOB", "STATE", "RANKS", "USER", "STARTED", "TIME", "PROGRESS AND REASON"}};
  int64_t over = 0;
  size_t left_out = 0;
  for (auto job = doc.jobs.rbegin(); job != doc.jobs.rend(); ++job) {  // the newest first
    const bool shown = limit ? rows.size() <= *limit : all || !job->Final() || ++over <= kOverShown;
    if (shown) {
      rows.push_back(RowOf(*job, now));
    } else {
      ++left_out;
    }
  }
  Row width;
  const auto widen = [](std::string& width, const std::string& text) {
    if (text.size() > width.size()) width = text;
  };
  for (const Row& row : rows) {
    for (std::string Row::*column :
         {&Row::job, &Row::state, &Row::ranks, &Row::user, &Row::started, &Row::time})
      widen(width.*column, row.*column);
  }
  std::string out;
  for (const Row& row : rows) {
    absl::StrAppendFormat(&out, "%-*s  %-*s  %*s  ", width.job.size(), row.job, width.state.size(), row.state,
                          width.ranks.size(), row.ranks);
    if (!doc.local) absl::StrAppendFormat(&out, "%-*s  ", width.user.size(), row.user);
    absl::StrAppendFormat(&out, "%-*s  %*s  %s\n", width.started.size(), row.started, width.time.size(),
                          row.time, row.text);
  }
  if (left_out > 0) absl::StrAppend(&out, "and ", left_out, " older; --all or --limit N shows more\n");
  if (doc.omitted > 0)
    absl::StrAppend(&out, doc.omitted, " more are over and not listed by the head: gtrain status JOB\n");
  return out;
}

std::string Times(const JobDoc& job, absl::Time now) {
  std::vector<std::string> parts;
  if (!job.user.empty()) parts.push_back(absl::StrCat("user ", SafeText(job.user)));
  if (job.submitted) parts.push_back(absl::StrCat("submitted ", PrintClock(*job.submitted, now)));
  if (job.started) parts.push_back(absl::StrCat("started ", PrintClock(*job.started, now)));
  if (job.ended) parts.push_back(absl::StrCat("ended ", PrintClock(*job.ended, now)));
  if (job.run_time)
    parts.push_back(absl::StrCat(job.Final() ? "ran " : "running for ", PrintSpan(*job.run_time)));
  return absl::StrJoin(parts, ", ");
}

std::string Bindings(const JobDoc& job, absl::string_view indent) {
  std::string out;
  for (const std::string& line : BindingLines(job)) absl::StrAppend(&out, indent, SafeText(line), "\n");
  return out;
}

// Of the jobs that run, below the table of all.
std::string BindingsOfAll(const StatusDoc& doc) {
  std::string out;
  for (const JobDoc& job : doc.jobs) {
    if (!job.Final() && !job.ranks.empty())
      absl::StrAppend(&out, SafeText(job.id), "\n", Bindings(job, "   "));
  }
  return out;
}

std::string Details(const JobDoc& job, absl::Time now) {
  std::string out;
  for (const std::string& line : StatusBlock(job, "", 10'000)) absl::StrAppend(&out, line, "\n");
  if (const std::string times = Times(job, now); !times.empty()) absl::StrAppend(&out, "   ", times, "\n");
  if (!job.labels.empty())
    absl::StrAppend(&out, "   labels: ", SafeText(absl::StrJoin(job.labels, ", ")), "\n");
  for (const std::string& note : job.notes) absl::StrAppend(&out, "   ", SafeText(note), "\n");
  for (const std::string& line : FaultLines(job)) absl::StrAppend(&out, "   ", SafeText(line), "\n");
  if (!job.run_dir.empty()) absl::StrAppend(&out, "   logs: ", SafeText(job.run_dir), "/logs\n");
  return out;
}

struct View {
  std::string text;
  bool over = false;  // of one job
};

absl::StatusOr<View> Show(const Args& args, const Answer& answer, absl::Time now) {
  GT_ASSIGN_OR_RETURN(const std::optional<size_t> limit, LimitOf(args));
  GT_ASSIGN_OR_RETURN(const StatusDoc doc, ParseStatusDoc(answer.json));
  const bool verbose = args.Has("verbose");
  if (args.words.empty())
    return View{absl::StrCat(Table(doc, limit, args.Has("all"), now), verbose ? BindingsOfAll(doc) : "")};
  View view;
  for (const JobDoc& job : doc.jobs) {
    absl::StrAppend(&view.text, Details(job, now), verbose ? Bindings(job, "   ") : "");
    view.over = job.Final();
  }
  return view;
}

// ---------------------------------------------------------------- once, or again and again

// The places of the ranks of the one job that is asked for.
absl::Status WriteRanks(const Args& args, const Answer& answer) {
  if (args.words.empty()) return absl::InvalidArgumentError("--rankfile-out needs a job: gtrain status JOB");
  GT_ASSIGN_OR_RETURN(const StatusDoc doc, ParseStatusDoc(answer.json));
  if (doc.jobs.size() != 1) return absl::NotFoundError(absl::StrCat("no job is called ", args.words[0]));
  GT_ASSIGN_OR_RETURN(std::vector<PlacedRank> ranks, PlacedRanksOf(doc.jobs[0]));
  return WriteRankfile(args.Get("rankfile-out"), std::move(ranks));
}

absl::StatusOr<int> Once(const Args& args) {
  GT_ASSIGN_OR_RETURN(const std::optional<size_t> limit, LimitOf(args));
  std::optional<Cluster> cluster;
  GT_ASSIGN_OR_RETURN(const Answer answer, Find(args, cluster));
  if (!answer.note.empty()) Complain(SafeText(answer.note));
  if (args.Has("rankfile-out")) GT_RETURN_IF_ERROR(WriteRanks(args, answer));
  if (args.Has("json")) {
    Print(Limited(answer.json, limit) + "\n");
  } else {
    GT_ASSIGN_OR_RETURN(const View view, Show(args, answer, RealClock().WallNow()));
    Print(view.text);
  }
  return answer.head.ok() ? kDone : kFailed;
}

// Draws the part that fits on the terminal, in place of the earlier text.
bool Redraw(const std::string& text, size_t& drawn) {
  const TerminalSize size = SizeOfTerminal(STDOUT_FILENO);
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  if (!lines.empty() && lines.back().empty()) lines.pop_back();
  const size_t rows = static_cast<size_t>(std::max(1, size.rows - 1));
  if (lines.size() > rows) lines.resize(rows);
  for (std::string& line : lines) line = CutToWidth(line, size.columns - 1);
  std::string out = drawn > 0 ? absl::StrCat("\x1b[", drawn, "A\r\x1b[J") : "";
  drawn = lines.size();
  return Print(out + absl::StrJoin(lines, "\n") + "\n");
}

// Watches until Ctrl-C, which is how it is meant to end, or until the one job that is watched is over.
absl::StatusOr<int> Watch(const Args& args) {
  if (args.Has("rankfile-out"))
    return absl::InvalidArgumentError("--watch and --rankfile-out do not go together");
  if (args.Has("json") || !CanRedraw(STDOUT_FILENO)) {
    return absl::InvalidArgumentError(
        "--watch draws on a terminal that can (TERM is not dumb); a program asks again and again with "
        "`gtrain status --json`, and "
        "`gtrain "
        "attach` follows one job");
  }
  SignalPipe signals;
  std::optional<Cluster> cluster;
  std::string shown;
  size_t drawn = 0;
  while (true) {
    const absl::StatusOr<Answer> answer = Find(args, cluster, signals.fd());
    if (answer.ok()) {
      GT_ASSIGN_OR_RETURN(const View view, Show(args, *answer, RealClock().WallNow()));
      shown = view.text;
      const std::string note = answer->note.empty() ? "" : SafeText(answer->note) + "\n";
      if (!Redraw(note + shown, drawn)) return 128 + SIGPIPE;
      if (view.over) return kDone;
    } else if (!absl::IsCancelled(answer.status())) {  // that is a signal
      if (shown.empty()) return answer.status();
      if (!Redraw(absl::StrCat(SafeText(answer.status().message()), "\n", shown), drawn))
        return 128 + SIGPIPE;
    }
    pollfd wait{signals.fd(), POLLIN, 0};
    if (poll(&wait, 1, kWatchMs) <= 0) continue;
    if (const int number = signals.Next(); number != 0) return number == SIGINT ? kDone : 128 + number;
  }
}

int RunStatus(const Args& args) {
  const absl::StatusOr<int> code = args.Has("watch") ? Watch(args) : Once(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb StatusVerb() {
  Verb verb;
  verb.name = "status";
  verb.summary = "Show the jobs of a cluster, or one job in detail";
  verb.usage = "[flags] [JOB]";
  verb.details =
      "The newest first, with when each was started and how long it has run; of those that are over, the "
      "newest\n"
      "20. When no local cluster runs: what its jobs left. JOB is an id, a name, or the run directory of a "
      "job\n"
      "that is over.\n\n"
      "  gtrain status\n"
      "  gtrain status fashion-mnist\n"
      "  gtrain status gtrain-runs/fashion-mnist-1-5c3e90ab\n"
      "  gtrain status --watch         again each second, until Ctrl-C, or until JOB is over; exit code 0\n"
      "  gtrain status JOB --rankfile-out ranks.txt     where its ranks are now\n"
      "  gtrain status --json          everything the head says, in order of submission; {\"jobs\": []} when "
      "there was\n"
      "                                never a job";
  verb.flags = {{"watch", 'w', "", "draw it again each second on the terminal"},
                {"all", '\0', "", "jobs that are over, too, however many"},
                {"limit", '\0', "N", "only the newest N jobs"},
                {"rankfile-out", '\0', "FILE", "write where the ranks of JOB are, for launch --rankfile"},
                {"verbose", 'v', "", "of each rank the CPUs, NUMA nodes, GPUs and NICs that it is bound to"},
                ContextFlag(),
                {"json", '\0', "", "the head's document as it is"}};
  verb.completes = Completes::kJobs;
  verb.words_max = 1;
  verb.run = RunStatus;
  return verb;
}

}  // namespace gtrain::cli
