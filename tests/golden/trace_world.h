// A head between a scripted disk and scripted agents, driven by lines of text. For golden traces.
#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "runtime/core/head/head_core.h"
#include "runtime/core/head/outbox.h"

namespace gtrain::golden {

// One command of a trace: "verb word key=value ...", with the indented lines below it.
struct Command {
  std::string verb;
  std::vector<std::string> words;
  std::map<std::string, std::string> options;
  std::string body;  // indentation of two taken off

  std::string Word(size_t index) const { return index < words.size() ? words[index] : ""; }
  std::string Option(const std::string& key, std::string otherwise) const;
  int Number(const std::string& key, int otherwise) const;
};

// An agent that starts what it is granted, ends what is revoked and says so; `cut` takes its link down.
struct ScriptedAgent {
  std::string name;
  std::string incarnation = "1";
  int cpus = 4;
  std::string zone;        // if it is given one it takes copies of checkpoints
  std::set<JobId> copies;  // of these jobs
  bool linked = true;
  int routes = 0;  // connections so far
  uint64_t beats = 0;
  uint64_t notices = 0;
  struct Held {
    core::GenerationGrant grant;
    std::map<int, core::RankStatus> live;
    std::vector<core::RankExit> unacknowledged;
  };
  std::map<std::pair<JobId, Generation>, Held> held;
  std::map<JobId, Generation> revoked;
  std::string Route() const { return name + "#" + std::to_string(routes); }
};

class TraceWorld {
 public:
  // Runs one command and returns what it caused, one line each.
  std::string Run(const Command& command);

 private:
  using Handler = void (TraceWorld::*)(const Command&);
  static const std::map<std::string, Handler>& Handlers();

  void Head(const Command& command);
  void NodeUp(const Command& command);
  void Cut(const Command& command);
  void Heal(const Command& command);
  void Submit(const Command& command);
  void Exit(const Command& command);
  void Step(const Command& command);
  void Checkpoint(const Command& command);
  void Advance(const Command& command);
  void Stop(const Command& command);
  void Status(const Command& command);
  void Why(const Command& command);
  void Disk(const Command& command);
  void Notice(const Command& command);
  void Drain(const Command& command);

  void Line(const std::string& text) { log_ += text + "\n"; }
  void Boot();
  void Do(core::StepResult result);
  void Perform(const core::Effect& effect);
  void ToAgent(const core::SendToNode& send);
  void Commit();
  void FromAgent(ScriptedAgent& agent, core::Message message);
  void Hello(ScriptedAgent& agent);
  void Start(ScriptedAgent& agent, const core::GenerationGrant& grant);
  void End(ScriptedAgent& agent, const core::Revoke& revoke);
  void DrainAgents();
  core::ClientReply Ask(core::ClientRequestBody body, core::Role role = core::Role::kUser);
  JobId Job(const Command& command) const;
  ScriptedAgent::Held* Holder(const JobId& job, int rank, ScriptedAgent** agent);

  core::HeadConfig config_;
  ManualClock clock_;
  std::unique_ptr<core::HeadCore> head_;
  core::Outbox outbox_;
  std::map<std::string, core::Record> disk_;
  bool disk_works_ = true;
  std::map<std::string, ScriptedAgent> agents_;
  std::vector<std::pair<std::string, core::Message>> answers_;  // of agents, not yet delivered
  std::map<std::string, core::ClientReply> replies_;
  int requests_ = 0;
  std::string log_;
};

// Reads commands until end of text; a line that starts with two blanks belongs to the command above.
std::vector<Command> ParseCommands(absl::string_view text);

}  // namespace gtrain::golden
