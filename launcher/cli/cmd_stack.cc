#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "job/spec/values.h"
#include "launcher/cli/ask_actors.h"
#include "launcher/cli/context.h"
#include "launcher/cli/target.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

constexpr size_t kTogether = 4;  // debuggers take memory and a processor each

// A rank that cannot be looked at keeps nobody from seeing the others.
json StackOf(int rank, const absl::StatusOr<std::string>& answer) {
  json stack = answer.ok() ? json::parse(*answer, nullptr, false)
                           : json{{"error", std::string(answer.status().message())}};
  if (!stack.is_object()) stack = {{"error", "the head's answer is not a JSON object"}};
  stack["rank"] = rank;
  return stack;
}

void Show(const json& stack) {
  const auto text = [&](const char* key) {
    const auto it = stack.find(key);
    return it != stack.end() && it->is_string() ? it->get<std::string>() : "";
  };
  const std::string host = text("hostname");
  Print(absl::StrCat("rank ", stack["rank"].get<int>(), host.empty() ? "" : " on ", SafeText(host), "\n"));
  const std::string lines = absl::StrCat(text("text"), text("error"));
  Print(absl::StrCat("  ", SafeLines(lines, "  "), "\n"));
}

// NotFound: none of the processes has it. An error of one matters where no other one does.
absl::StatusOr<ActorDoc> FindActor(Cluster& cluster, const JobDoc& job, const std::vector<int>& ranks,
                                   const std::string& word) {
  GT_ASSIGN_OR_RETURN(const ActorWord actor, ParseActorWord(word));
  std::string silent;
  const std::vector<int> asked = actor.rank ? std::vector<int>{*actor.rank} : ranks;
  for (const RankActors& said : AskActors(cluster, job.id, asked, QuestionFor(actor))) {
    if (!said.actors.empty()) return said.actors[0];
    if (silent.empty() && !said.error.empty()) silent = absl::StrCat("; ", said.error);
  }
  return absl::NotFoundError(absl::StrCat("job ", job.id, " has no actor ", spec::Shown(word),
                                          " now: `gtrain actors ", job.id, "` lists some", silent));
}

std::string WhyNoThread(const ActorDoc& actor, const std::string& job) {
  if (actor.state != "awaiting") return "  no thread runs it\n";
  return absl::StrCat(
      "  it has left the thread in which it began that call, and awaits another one; or it goes "
      "on behind that, in a\n  thread that runs actors: `gtrain stack ",
      job, " --rank ", actor.rank, "` shows them\n");
}

absl::StatusOr<int> StackOfActor(Cluster& cluster, const JobDoc& job, const std::vector<int>& ranks,
                                 const Args& args) {
  GT_ASSIGN_OR_RETURN(const ActorDoc actor, FindActor(cluster, job, ranks, args.Get("actor")));
  json document = {{"job", job.id}, {"rank", actor.rank}, {"actor", ActorLine(actor)}, {"thread", nullptr}};
  std::string text;
  if (actor.thread == 0) {
    text = WhyNoThread(actor, job.id);
  } else {
    document["thread"] = actor.thread;
    GT_ASSIGN_OR_RETURN(const std::string answer,
                        Ask(cluster, core::ClientStack{JobId(job.id), actor.rank}, absl::Seconds(30)));
    const std::string all = TextOf(json::parse(answer, nullptr, false), "text");
    text = StackOfThread(all, actor.thread);
    if (text.empty())
      text = absl::StrCat("  thread ", actor.thread, " is not among these, which are all that were seen:\n",
                          all);
  }
  document["text"] = text;
  Print(args.Has("json") ? OneLine(document) + "\n"
                         : absl::StrCat(ActorLine(actor), "\n", SafeLines(text, ""), "\n"));
  return kDone;
}

absl::StatusOr<int> Stack(const Args& args) {
  GT_ASSIGN_OR_RETURN(Target target, FindLiveTarget(args));
  Cluster& cluster = *target.cluster;
  const JobDoc& job = target.job;
  GT_ASSIGN_OR_RETURN(const std::vector<int> ranks, RanksAsked(job, args));
  if (args.Has("actor")) return StackOfActor(cluster, job, ranks, args);
  json document = {{"job", job.id}, {"ranks", json::array()}};
  bool failed = false;
  for (size_t from = 0; from < ranks.size(); from += kTogether) {
    std::vector<core::ClientRequestBody> requests;
    for (size_t i = from; i < std::min(ranks.size(), from + kTogether); ++i)
      requests.push_back(core::ClientStack{JobId(job.id), ranks[i]});
    const auto answers = AskAll(cluster, std::move(requests), absl::Seconds(30));
    for (size_t i = 0; i < answers.size(); ++i) {
      failed = failed || !answers[i].ok();
      document["ranks"].push_back(StackOf(ranks[from + i], answers[i]));
      if (!args.Has("json")) Show(document["ranks"].back());
    }
  }
  if (args.Has("json")) Print(document.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
  return failed ? kFailed : kDone;
}

int RunStack(const Args& args) {
  const absl::StatusOr<int> code = Stack(args);
  return code.ok() ? *code : Report(code.status());
}

}  // namespace

Verb StackVerb() {
  Verb verb;
  verb.name = "stack";
  verb.summary = "Show where the threads of a job's ranks are";
  verb.usage = "[--rank R | --actor A] [JOB]";
  verb.details =
      "Of each rank and what it started: the call in which the kernel holds each thread, Python frames by "
      "py-spy,\n"
      "native frames by eu-stack or gdb, whichever the rank's $PATH has. It stops nothing for longer than "
      "they look.\n\n"
      "  gtrain stack                       all ranks of the job that runs\n"
      "  gtrain stack llm-7 --rank 3\n"
      "  gtrain stack llm-7 --actor 3/17    the thread that runs actor 17 of rank 3 (`gtrain actors`)";
  verb.flags = {{"rank", '\0', "R", "this rank alone; default all"},
                {"actor", '\0', "A", "the thread that runs an actor: RANK/NUMBER, or its name"},
                ContextFlag(),
                {"json", '\0', "", "one document: job, and of each rank its stacks"}};
  verb.completes = Completes::kLiveJobs;
  verb.words_max = 1;
  verb.run = RunStack;
  return verb;
}

}  // namespace gtrain::cli
