// Cluster commands act on a World without faults of its own; checkpoint commands act on the commit protocol
// (SaveCore, the catalog of checkpoint/engine) over a store in memory, in the same virtual time.
#include "tests/sim/scenario.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/probe.h"
#include "base/units.h"
#include "nlohmann/json.hpp"
#include "tests/sim/checkpoint_model.h"
#include "tests/sim/world.h"

namespace gtrain::sim {
namespace {

struct Line {
  int number = 0;
  std::vector<std::string> words;
  std::map<std::string, std::string> options;
  std::string Word(size_t i) const { return i < words.size() ? words[i] : ""; }
  std::string Option(const std::string& key, std::string otherwise) const {
    const auto it = options.find(key);
    return it == options.end() ? otherwise : it->second;
  }
};

Line Split(const std::string& text, int number) {
  Line line{number, {}, {}};
  for (absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    const std::vector<std::string> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (parts.size() == 2) {
      line.options[parts[0]] = parts[1];
    } else {
      line.words.push_back(parts[0]);
    }
  }
  return line;
}

class Runner {
 public:
  explicit Runner(bool trace) : trace_(trace), probes_(Probes()) {}

  std::vector<std::string> Run(const std::string& text) {
    int number = 0;
    for (absl::string_view piece : absl::StrSplit(text, '\n')) {
      const std::string raw(piece);
      ++number;
      if (raw.empty() || raw[0] == '#') continue;
      line_ = Split(raw, number);
      if (world_ == nullptr && line_.Word(0) != "nodes") Boot(1, 4, 1);
      Do();
      for (const Violation& violation : world_->kernel.violations())
        Wrong(violation.id + ": " + violation.text);
      if (!wrong_.empty()) break;
    }
    return wrong_;
  }

 private:
  void Wrong(const std::string& what) { wrong_.push_back(absl::StrCat("line ", line_.number, ": ", what)); }

  int64_t Time(const std::string& text) {
    const auto time = ParseDuration(text);
    if (!time.ok()) Wrong(absl::StrCat("not a time: ", text));
    return time.ok() ? absl::ToInt64Nanoseconds(*time) : 0;
  }
  int Number(const std::string& text) {
    int number = 0;
    if (!absl::SimpleAtoi(text, &number)) Wrong(absl::StrCat("not a number: ", text));
    return number;
  }
  Machine& Node(const std::string& name) {
    int index = 0;
    if (name.size() < 2 || !absl::SimpleAtoi(name.substr(1), &index) || index < 0 ||
        index >= static_cast<int>(world_->machines.size())) {
      Wrong(absl::StrCat("no node ", name));
      index = 0;
    }
    return *world_->machines[static_cast<size_t>(index)];
  }
  JobId Job(const std::string& name) const {
    const auto it = jobs_.find(name);
    return it == jobs_.end() ? JobId(name) : it->second;
  }
  std::optional<core::HeadSnapshot::Job> State(const std::string& name) const {
    if (!world_->head->serving()) return std::nullopt;
    for (const auto& job : world_->head->core()->Snapshot().jobs) {
      if (job.id == Job(name)) return job;
    }
    return std::nullopt;
  }

  void Boot(int nodes, int cpus, uint64_t seed) {
    Profile profile;
    profile.nodes = nodes;
    profile.clients = 1;
    profile.network.delay_min = kMs;
    profile.network.delay_spread = 0;
    world_ = std::make_unique<World>(seed, profile);
    world_->machines.clear();
    for (int i = 0; i < nodes; ++i) world_->AddMachine(cpus);
    world_->head->restart_max = world_->head->restart_min + kMs;
    if (trace_) world_->kernel.Trace(1, true);
    world_->Boot();
    world_->RunFor(5 * kSec);
    checkpoints_ = std::make_unique<CheckpointModel>();
  }

  void Do() {
    using Handler = void (Runner::*)();
    static const std::map<std::string, Handler> kHandlers = {
        {"nodes", &Runner::Nodes},   {"submit", &Runner::Submit}, {"stop", &Runner::Stop},
        {"run", &Runner::RunOn},     {"until", &Runner::Until},   {"disk", &Runner::DiskIs},
        {"head", &Runner::HeadIs},   {"node", &Runner::NodeIs},   {"rank", &Runner::RankIs},
        {"stale", &Runner::Stale},   {"expect", &Runner::Expect}, {"settle", &Runner::Settle},
        {"launch", &Runner::Launch}, {"save", &Runner::Save},     {"put", &Runner::Put},
        {"resume", &Runner::Resume}, {"pair", &Runner::PairIs},   {"storage", &Runner::StorageIs},
        {"joins", &Runner::Joins}};
    const auto handler = kHandlers.find(line_.Word(0));
    if (handler == kHandlers.end()) return Wrong(absl::StrCat("no such command: ", line_.Word(0)));
    (this->*handler->second)();
  }

  void Nodes() { Boot(Number(line_.Word(1)), Number(line_.Option("cpus", "4")), 1); }

  // submit NAME ranks=N|MIN-MAX [cpus=N] [sdk=yes] [steps=N] [save_every=N] [in-place=yes] [tp=N]
  // [startup=TIME]; does not wait for the answer
  void Submit() {
    const std::string name = line_.Word(1);
    const bool in_place = line_.Option("in-place", "no") == "yes";
    const std::string tp = line_.Option("tp", "");
    const std::pair<std::string, std::string> range = absl::StrSplit(line_.Option("ranks", "1"), '-');
    const std::string ranks = range.second.empty()
                                  ? range.first
                                  : absl::StrCat("{min: ", range.first, ", max: ", range.second, "}");
    const std::string text = absl::StrCat(
        "name: ", name, "\nrun: train\nranks: ", ranks, "\nresources: {cpus: ", line_.Option("cpus", "1"),
        "}\nstop_grace: 5s\n", in_place ? "elastic: {mode: in-place}\n" : "",
        tp.empty() ? "" : absl::StrCat("mesh: {dp: \"*\", tp: ", tp, "}\n"));
    Program program;
    program.stays = in_place;
    program.sdk = line_.Option("sdk", "yes") == "yes";
    program.steps = Number(line_.Option("steps", "0"));
    program.step_time = 2 * kSec;
    program.startup = Time(line_.Option("startup", "1s"));
    program.ignores_term = 0;
    program.checkpoint_every = Number(line_.Option("save_every", "0"));
    jobs_[name] = JobId(absl::StrCat(name, "-", ++submitted_));
    world_->SetProgram(text, program);
    world_->clients[0]->Ask(core::ClientSubmit{text, {}, "/runs/{job}"}, 5 * kMin, nullptr);
  }
  void Stop() {
    world_->clients[0]->Ask(core::ClientStop{Job(line_.Word(1)), line_.Word(2) == "now", ""}, 5 * kMin,
                            nullptr);
  }
  void RunOn() { world_->RunFor(Time(line_.Word(1))); }

  // until JOB STATE [generation=N] within=TIME
  void Until() {
    const auto there = [&] {
      const auto job = State(line_.Word(1));
      return job && core::Name(job->state) == line_.Word(2) &&
             (!line_.options.contains("generation") ||
              job->generation.value == static_cast<uint64_t>(Number(line_.Option("generation", "0"))));
    };
    if (world_->RunUntil(there, Time(line_.Option("within", "60s")))) return;
    const auto job = State(line_.Word(1));
    Wrong(absl::StrCat(line_.Word(1), " is ", job ? core::Name(job->state) : "unknown", " g",
                       job ? job->generation.value : 0, job ? " (" + job->reason + ")" : ""));
  }

  // disk sync=TIME | disk full | disk free | disk error | disk unsynced=lost|kept
  void DiskIs() {
    Disk& disk = world_->disk;
    if (line_.options.contains("sync")) disk.set_sync_time(Time(line_.Option("sync", "")));
    if (line_.options.contains("unsynced"))
      disk.set_unsynced_survives(line_.Option("unsynced", "") == "kept");
    if (line_.Word(1) == "full" || line_.Word(1) == "free") disk.set_full(line_.Word(1) == "full");
    if (line_.Word(1) == "error") disk.FailNext(Disk::Fault::kEio);
  }

  // head kill | power | pause TIME
  void HeadIs() {
    if (line_.Word(1) == "pause") return world_->head->Pause(Time(line_.Word(2)));
    world_->head->Kill(line_.Word(1) == "power");
  }

  // pair nI nJ cut TIME | heal
  void PairIs() {
    const bool cut = line_.Word(3) == "cut";
    if (!cut && line_.Word(3) != "heal") return Wrong("a pair is cut or heal");
    world_->CutPair(Node(line_.Word(1)).index(), Node(line_.Word(2)).index(), cut ? Time(line_.Word(4)) : 0);
  }

  // node nI drain [left=TIME] | undrain
  void Drain(const Machine& node, bool undo) {
    world_->operator_->Ask(
        core::ClientDrainNode{node.config().hostname, absl::Nanoseconds(Time(line_.Option("left", "0s"))),
                              "the scenario", undo},
        kMin, nullptr);
  }
  // node nI notice leave|at-risk|freeze TIME [frozen=TIME] | notice none
  void Notice(Machine& node) {
    for (const auto kind : {core::NoticeKind::kLeave, core::NoticeKind::kAtRisk, core::NoticeKind::kFreeze}) {
      if (line_.Word(3) == core::Name(kind))
        return node.CloudSays(Time(line_.Word(4)), kind, Time(line_.Option("frozen", "0s")));
    }
    if (line_.Word(3) != "none") return Wrong("a notice is leave, at-risk, freeze or none");
    node.CloudSays(std::nullopt);
  }

  // node nI files JOB slow TIME|stuck|well
  void Files(Machine& node) {
    const std::string how = line_.Word(4);
    if (how != "slow" && how != "stuck" && how != "well") return Wrong("files are slow, stuck or well");
    node.SlowFiles(Job(line_.Word(3)), how == "slow"    ? Time(line_.Word(5))
                                       : how == "stuck" ? Machine::kNever
                                                        : 0);
  }

  // node nI cut | cut-up | cut-down | heal | half-open | reset | power TIME | agent-kill TIME |
  // agent-pause TIME | freeze TIME | keeper-kill JOB | keeper-link JOB [stalled=TIME] | clone |
  // files JOB slow TIME|stuck|well; drains and notices
  void NodeIs() {
    Machine& node = Node(line_.Word(1));
    const std::string what = line_.Word(2);
    if (absl::StartsWith(what, "cut"))
      world_->network.Cut(node.index(), what != "cut-down", what != "cut-up");
    if (what == "heal") world_->network.Heal(node.index());
    if (what == "half-open") world_->network.BreakHalfOpen(node.index());
    if (what == "reset") world_->network.Reset(node.index());
    if (what == "power") node.PowerOff(Time(line_.Word(3)));
    if (what == "agent-kill") node.KillAgent(Time(line_.Word(3)));
    if (what == "agent-pause") node.PauseAgent(Time(line_.Word(3)));
    if (what == "freeze") node.Freeze(Time(line_.Word(3)));
    if (what == "drain" || what == "undrain") Drain(node, what == "undrain");
    if (what == "notice") Notice(node);
    if (what == "keeper-link") node.DropKeeperLink(Job(line_.Word(3)), Time(line_.Option("stalled", "1ms")));
    if (what == "keeper-kill") {
      if (!node.keepers().contains(Job(line_.Word(3)))) return Wrong("no such keeper");
      node.KillKeeper(Job(line_.Word(3)));
    }
    if (what == "files") Files(node);
    if (what == "clone") {
      world_->AddMachine(node.config().cpus, node.index());
      world_->machines.back()->StartAgent();
    }
  }

  // rank JOB R crash | kill | hang | freeze TIME
  void RankIs() {
    const auto state = State(line_.Word(1));
    Gang* gang = state ? world_->ranks.FindGang(state->id, state->generation.value) : nullptr;
    const int rank = Number(line_.Word(2));
    if (gang == nullptr || !gang->ranks.contains(rank)) return Wrong("no such rank");
    if (line_.Word(3) == "freeze") return world_->ranks.Freeze(gang->ranks.at(rank), Time(line_.Word(4)));
    if (line_.Word(3) == "hang") return world_->ranks.Hang(gang->ranks.at(rank));
    world_->ranks.KillProcess(gang->ranks.at(rank), keeper::Cause::kSignal, 0,
                              line_.Word(3) == "kill" ? 9 : 11);
  }

  // stale nI revoke JOB generation=N epoch=N: the word of a head that does not know that another serves
  void Stale() {
    world_->network.Inject(Node(line_.Word(1)).index(),
                           core::Revoke{{static_cast<uint64_t>(Number(line_.Option("epoch", "1")))},
                                        Job(line_.Word(3)),
                                        {static_cast<uint64_t>(Number(line_.Option("generation", "1")))},
                                        core::EndMode::kStopNow,
                                        absl::ZeroDuration(),
                                        "a stale head"});
  }

  void Settle() {
    std::string open;
    if (!world_->RunUntil([&] { return (open = world_->Unsettled()).empty(); },
                          Time(line_.Option("within", "5m")))) {
      Wrong(open);
    }
    world_->checker.CheckRecords();
  }

  // storage gone TIME
  void StorageIs() {
    if (line_.Word(1) != "gone") return Wrong(absl::StrCat("storage does not: ", line_.Word(1)));
    world_->ranks.saves.GoneFor(Time(line_.Word(2)));
  }

  // joins N tokens=N: so many nodes come at once
  void Joins() { world_->joins.Storm(Number(line_.Word(1)), Number(line_.Option("tokens", "1"))); }

  // ---- checkpoints: launch NAME hash=H [resume=latest|fresh]; save NAME step=N timeline=N generation=N
  // [hold=yes]; put NAME; resume NAME
  void Launch() {
    said_ = checkpoints_->Launch(line_.Word(1), line_.Option("hash", "h"), line_.Option("resume", ""));
  }
  void Save() {
    said_ = checkpoints_->Save(line_.Word(1), Number(line_.Option("step", "0")),
                               Number(line_.Option("timeline", "1")), Number(line_.Option("generation", "1")),
                               line_.Option("hold", "no") == "yes", world_->kernel.Now());
  }
  void Put() { said_ = checkpoints_->Put(line_.Word(1), world_->kernel.Now()); }
  void Resume() { said_ = checkpoints_->Resume(line_.Word(1)); }

  void Expect() {
    const std::string what = line_.Word(1);
    if (what == "said") {
      const std::string wanted = absl::StrJoin(line_.words.begin() + 2, line_.words.end(), " ");
      if (!absl::StrContains(said_, wanted)) Wrong(absl::StrCat("it said: ", said_));
    } else if (what == "probe") {
      if (Hits(line_.Word(2), Probes()) == Hits(line_.Word(2), probes_))
        Wrong(absl::StrCat("never reached ", line_.Word(2)));
    } else if (what == "granted" || what == "not-granted") {
      const uint64_t generation = static_cast<uint64_t>(Number(line_.Word(3)));
      const bool left = world_->checker.Granted(Job(line_.Word(2)), generation);
      if (left != (what == "granted"))
        Wrong(absl::StrCat("generation ", generation, left ? " was" : " was not", " granted"));
    } else if (what == "generation") {
      const auto job = State(line_.Word(2));
      if (!job || job->generation.value != static_cast<uint64_t>(Number(line_.Word(3)))) {
        Wrong(absl::StrCat("the generation is ", job ? job->generation.value : 0));
      }
    } else if (what == "node-alive") {
      for (const auto& node : world_->head->core()->Snapshot().nodes) {
        if (node.id == Node(line_.Word(2)).config().node && node.state != core::NodeState::kAlive)
          Wrong("it is not alive");
      }
    } else if (what == "count") {
      const int64_t count = world_->kernel.counts[line_.Word(2)];
      if (count != Number(line_.Word(3))) Wrong(absl::StrCat(line_.Word(2), " is ", count));
    } else if (what == "kept") {
      const int kept = world_->checker.Kept(Job(line_.Word(2)));
      if (kept != Number(line_.Word(3))) Wrong(absl::StrCat(kept, " processes are kept"));
    } else if (what == "born") {
      ExpectBorn();
    } else if (what == "joined") {
      const auto all = [&] { return world_->joins.joined() >= Number(line_.Word(2)); };
      if (!world_->RunUntil(all, Time(line_.Option("within", "30s"))))
        Wrong(absl::StrCat(world_->joins.joined(), " have joined"));
    } else {
      Wrong(absl::StrCat("expect what? ", what));
    }
  }

  // expect born JOB RANK GENERATION
  void ExpectBorn() {
    const auto state = State(line_.Word(2));
    Gang* gang = state ? world_->ranks.FindGang(state->id, state->generation.value) : nullptr;
    const int rank = Number(line_.Word(3));
    if (gang == nullptr || !gang->ranks.contains(rank)) return Wrong("no such rank");
    const uint64_t born = gang->ranks.at(rank)->born.born;
    if (born != static_cast<uint64_t>(Number(line_.Word(4))))
      Wrong(absl::StrCat("its process was started in generation ", born));
  }

  static uint64_t Hits(const std::string& name, const std::vector<std::pair<const char*, uint64_t>>& probes) {
    uint64_t hits = 0;
    for (const auto& [probe, count] : probes) hits += name == probe ? count : 0;
    return hits;
  }

  const bool trace_;
  const std::vector<std::pair<const char*, uint64_t>> probes_;
  std::unique_ptr<World> world_;
  std::unique_ptr<CheckpointModel> checkpoints_;
  std::map<std::string, JobId> jobs_;
  int submitted_ = 0;
  Line line_;
  std::string said_;
  std::vector<std::string> wrong_;
};

}  // namespace

std::vector<std::string> RunScenario(const std::string& text, bool trace) { return Runner(trace).Run(text); }

}  // namespace gtrain::sim
