// The real keeper against the simulator's model of it (keeper_model.h). Both get the same random life: an
// agent's commands and what ranks do. Whenever both have come to rest, an agent must have been told the same
// exits and ends by both, and must find the same state when it attaches.
//
// A life is made of batches. All commands of a batch are in the keeper's socket at once and it reads them in
// one turn, so their order is the whole truth; between batches the keeper comes to the rest that the model
// foretells. Ranks are this program itself (RankMain); where one speaks to its keeper, says that it stays or
// lets go of its generation, the test does it. Some wait beside their generation.
//
//   GTRAIN_KEEPER_LIVES=N   how many lives (make test: as many as fit into 20 s, at most 300)
//   GTRAIN_KEEPER_SEED=N    the first one's seed
#include "tests/sim/keeper_model.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "gtest/gtest.h"
#include "runtime/host/keeper_client.h"
#include "runtime/host/keeper_test_world.h"
#include "runtime/keeper/posix.h"
#include "tests/sim/checker.h"

namespace gtrain::sim {
namespace {

using host::kPatience;
constexpr uint64_t kLongMs = 3'600'000;  // nobody waits for the end of such a grace or lease
constexpr uint64_t kShortMs = 400;

// ---------------------------------------------------------------- ranks

enum class Does { kExits, kSleeps, kIgnoresTerm, kExitsOnTerm, kNoProgram };
struct Script {
  Does does = Does::kSleeps;
  int code = 0;
  bool waits = false;  // StartRank::waits of the rank that is so called
};

const char* Name(Does does) {
  constexpr const char* kNames[] = {"exits", "sleeps", "ignores-term", "exits-on-term", "no-program"};
  return kNames[static_cast<int>(does)];
}

// argv: --rank, what it does, its code, the file that says that it is ready.
int RankMain(const std::string& does, int code, const char* ready) {
  if (does == Name(Does::kExits)) return code;
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  if (does == Name(Does::kSleeps)) sigprocmask(SIG_UNBLOCK, &term, nullptr);
  if (does == Name(Does::kIgnoresTerm)) signal(SIGTERM, SIG_IGN);
  if (does == Name(Does::kExitsOnTerm)) sigprocmask(SIG_BLOCK, &term, nullptr);
  FILE* file = std::fopen(ready, "w");
  if (file == nullptr) return 99;
  std::fclose(file);
  while (does != Name(Does::kExitsOnTerm)) poll(nullptr, 0, -1);
  int signal = 0;
  sigwait(&term, &signal);
  return code;
}

using RankKey = std::pair<uint64_t, int>;  // generation, rank

// ---------------------------------------------------------------- the model and its world

class Model {
 public:
  explicit Model(uint64_t seed)
      : kernel_(seed), disk_(kernel_), checker_(kernel_, disk_), ranks_(kernel_, checker_) {
    checker_.shares_key = [](int) {
      return true;
    };  // what the checker thinks of these lives is not looked at
    ranks_.program_of = [](const JobId&) {
      Program program;
      program.startup = 1'000'000 * kSec;  // the scripts end ranks, nothing else does
      program.ignores_term = 1;
      program.letting_go = 0;
      return program;
    };
    keeper_ = std::make_shared<KeeperModel>(kernel_, ranks_, checker_, JobId("job-1"), 0);
  }
  ~Model() {
    if (keeper_->alive()) (void)keeper_->Die();
  }

  KeeperModel& keeper() { return *keeper_; }
  int64_t now() const { return kernel_.now(); }

  void Attach(uint64_t lease_ms) {
    keeper_->Detach();
    told.clear();
    keeper_->Attach([this](keeper::Report report) { told.push_back(std::move(report)); },
                    static_cast<int64_t>(lease_ms) * kMs);
  }

  // Lets so much time pass, while the ranks do what their scripts say.
  void Run(int64_t time) {
    const int64_t until = kernel_.now() + time;
    while (kernel_.now() < until) {
      const int64_t step = std::min(until, kernel_.now() + kMs);
      while (kernel_.RunOne(step)) {
      }
      for (const RankPtr& process : keeper_->Processes()) {
        born[{process->generation, process->rank}] = Born(*process);
        Act(process);
      }
    }
  }
  // Kills a process from outside, as the kernel or a person may.
  void Kill(const RankKey& its_birth) {
    ranks_.KillProcess(Process(its_birth), keeper::Cause::kSignal, 0, SIGKILL);
  }
  // A rank with a session says something to its agent.
  void Speak(const RankKey& key, const std::string& json) {
    const RankPtr process = Process(born.at(key));
    if (!process->worker) process->worker.emplace(1);
    process->up = true;
    process->relay(json);
  }
  void Stay(const RankKey& its_birth) {
    const RankPtr process = Process(its_birth);
    if (!process->worker) process->worker.emplace(1);
    process->stays = true;
  }
  void Stop(const RankKey& its_birth) { Process(its_birth)->stopped = true; }
  void LetGo(const RankKey& its_birth) {
    const RankPtr process = Process(its_birth);
    if (process->let_go) process->let_go();
  }
  void Deafen(const RankKey& its_birth) { Process(its_birth)->deaf = true; }
  // Ranks that run, by their names, and processes that wait, by their births.
  std::set<RankKey> Living() const { return Names(false); }
  std::set<RankKey> Waiting() const { return Names(true); }
  // One that stays says nothing any more of a generation that is over.
  bool Silent(const RankKey& key) const {
    const RankPtr process = Process(born.at(key));
    return process->stays && process->over;
  }
  bool Deaf(const RankKey& key) const { return Process(born.at(key))->deaf; }
  // Ranks that are to let go: members that stay of a generation that is over, those that wait beside one and
  // have not come up, or are asked whether they still answer.
  std::set<RankKey> Staying() const {
    std::set<RankKey> names;
    for (const RankPtr& process : keeper_->Processes()) {
      const bool member = !process->released && process->over;
      const bool beside = process->waits && (!process->released || process->asked);
      if (process->stays && !process->kept && !process->deaf && (member || beside))
        names.insert({process->generation, process->rank});
    }
    return names;
  }
  // Those that wait beside a generation.
  bool Beside(const RankKey& key) const { return Process(born.at(key))->waits; }

  std::map<RankKey, Script> scripts;  // by birth
  std::map<RankKey, RankKey> born;    // as which the process of a rank was started
  std::vector<keeper::Report> told;   // since it was attached

 private:
  static RankKey Born(const RankProcess& process) { return {process.born.born, process.born.born_rank}; }
  RankPtr Process(const RankKey& its_birth) const {
    for (const RankPtr& process : keeper_->Processes()) {
      if (Born(*process) == its_birth) return process;
    }
    return nullptr;
  }
  std::set<RankKey> Names(bool kept) const {
    std::set<RankKey> names;
    for (const RankPtr& process : keeper_->Processes()) {
      if (process->kept != kept) continue;
      names.insert(kept ? Born(*process) : RankKey(process->generation, process->rank));
    }
    return names;
  }
  void Act(const RankPtr& process) {
    const Script script = scripts.at(Born(*process));
    if (script.does == Does::kExits) ranks_.KillProcess(process, keeper::Cause::kExited, script.code, 0);
    if (script.does == Does::kNoProgram) ranks_.KillProcess(process, keeper::Cause::kStartFailed, 127, 0);
    if (process->stopped) return;
    const bool only_told_to_save = !process->over;
    const bool only_told_to_let_go = process->stays && !process->termed;
    if (!process->asked_to_end || only_told_to_save || only_told_to_let_go) return;
    if (script.does == Does::kSleeps) ranks_.KillProcess(process, keeper::Cause::kStopped, 0, SIGTERM);
    if (script.does == Does::kExitsOnTerm)
      ranks_.KillProcess(process, keeper::Cause::kExited, script.code, 0);
  }

  Kernel kernel_;
  Disk disk_;
  Checker checker_;
  Ranks ranks_;
  std::shared_ptr<KeeperModel> keeper_;
};

// ---------------------------------------------------------------- one life

class Life {
 public:
  Life(uint64_t seed, const std::string& folder, const std::string& keeper_binary, const std::string& self)
      : rng_(seed), model_(seed), folder_(folder), dir_(folder + "/k"), binary_(keeper_binary), self_(self) {}
  ~Life() {
    client_.reset();
    if (const auto pid = host::KeeperPid(dir_); pid.ok()) {
      kill(static_cast<pid_t>(*pid), SIGKILL);
      (void)Until([&] { return !host::KeeperPid(dir_).ok(); });
    }
    (void)Until([&] { return host::KillOrphans(dir_) == 0; });
  }

  // Empty: the keeper lived as its model did.
  std::string Run() {
    std::filesystem::create_directories(dir_);
    chmod(dir_.c_str(), 0700);
    if (!host::StartKeeper(binary_, dir_, "job-1").ok()) return "the keeper cannot be started";
    Reattach(kLongMs);
    const int turns = 3 + static_cast<int>(rng_.Below(5));
    for (int i = 0; i < turns && wrong_.empty(); ++i) Turn();
    if (wrong_.empty()) Reattach(kLongMs);
    if (wrong_.empty()) rng_.Chance(0.3) ? KillKeeper() : Quit();
    return wrong_;
  }
  const std::vector<std::string>& story() const { return story_; }

 private:
  template <typename... Words>
  void Tell(const Words&... words) {
    story_.push_back(absl::StrCat(words...));
  }

  // ---- what both are made to do

  void Turn() {
    const double dice = rng_.Unit();
    if (dice < 0.1) return KillRank(false);
    if (dice < 0.2) return Reattach(kLongMs);
    if (dice < 0.3) return KillRank(true);
    if (dice < 0.4) return LeaseEnds();
    if (dice < 0.5) return FenceEnds();
    if (dice < 0.55) return SignalRank();
    if (dice < 0.7) return Speak();
    if (dice < 0.75) return AckRelays();
    if (dice < 0.9) return ThroughGenerations();
    const int commands = 1 + static_cast<int>(rng_.Below(4));
    for (int i = 0; i < commands; ++i) Draw();
    Flush();
  }

  void Draw() {
    const double dice = rng_.Unit();
    if (dice < 0.4) return LaunchWhole();
    if (dice < 0.5) return Begin(AnyGeneration(), 1 + rng_.Below(3));
    if (dice < 0.6) return StartRank(AnyGeneration(), static_cast<int>(rng_.Below(4)));
    if (dice < 0.8) return End();
    if (dice < 0.9) {
      const uint64_t generation = AnyGeneration();
      for (int rank = 0; rank < 4; ++rank) {
        if (rng_.Chance(0.7))
          Both(keeper::AckExit{generation, rank}, absl::StrCat("ack ", generation, "/", rank));
      }
      return;
    }
    const uint64_t generation = AnyGeneration();
    Both(keeper::Forget{generation}, absl::StrCat("forget ", generation));
  }
  // Mostly the newest one, sometimes an old one or one that never was.
  uint64_t AnyGeneration() { return rng_.Chance(0.6) && newest_ > 0 ? newest_ : 1 + rng_.Below(newest_ + 2); }

  void LaunchWhole() {
    const uint64_t ranks = 1 + rng_.Below(3), generation = newest_ + 1;
    Begin(generation, ranks);
    for (uint64_t rank = 0; rank < ranks; ++rank) StartRank(generation, static_cast<int>(rank));
  }
  void Begin(uint64_t generation, uint64_t ranks) {
    newest_ = std::max(newest_, generation);
    Both(keeper::BeginGeneration{generation, static_cast<uint32_t>(ranks), 0,
                                 absl::StrCat("note ", generation)},
         absl::StrCat("begin ", generation, " of ", ranks));
  }
  void StartRank(uint64_t generation, int rank) {
    const RankKey key{generation, rank};
    Script script{static_cast<Does>(rng_.Below(5)), 0};
    constexpr int kCodes[] = {0, 3, 75};
    script.code = kCodes[rng_.Below(3)];
    // A rank that an expired fence ends may not have done yet what its script says.
    script.waits = rng_.Chance(0.25);
    if (fence_over_) script = {};
    const bool fresh = model_.scripts.try_emplace(key, script).second;
    script = model_.scripts.at(key);
    if (script.waits) beside_.insert(key);
    keeper::StartRank start;
    start.waits = script.waits;
    start.generation = generation;
    start.rank = rank;
    start.token = std::string(32, 'a');
    start.argv = {self_, "--rank", Name(script.does), absl::StrCat(script.code), Ready(key)};
    if (script.does == Does::kNoProgram) start.argv = {folder_ + "/no-such-program"};
    start.env = {{"PATH", "/usr/bin:/bin"}, {"GTRAIN_GENERATION", absl::StrCat(generation)}};
    start.cwd = folder_;
    start.out_path = absl::StrCat(folder_, "/out-", generation, "-", rank);
    start.err_path = absl::StrCat(folder_, "/err-", generation, "-", rank);
    start.report_path = absl::StrCat(folder_, "/report-", generation, "-", rank);
    start.notice_path = absl::StrCat(folder_, "/notice-", generation, "-", rank);
    // Mostly a process that waits, sometimes one that never did.
    const auto waiting = model_.Waiting();
    if (rng_.Chance(0.1)) start.born = 1 + rng_.Below(newest_ + 1);
    if (!waiting.empty() && rng_.Chance(0.7)) std::tie(start.born, start.born_rank) = Any(waiting);
    const std::string born = start.born == 0 ? "" : absl::StrCat(" born ", start.born, "/", start.born_rank);
    Both(std::move(start), absl::StrCat("start ", generation, "/", rank, script.waits ? " beside it " : " ",
                                        Name(script.does), " ", script.code, born, fresh ? "" : " again"));
  }
  void End() {
    const uint64_t generation = AnyGeneration();
    const auto mode = static_cast<keeper::End>(rng_.Below(3));
    const uint64_t graces[] = {0, kShortMs, kLongMs};
    const uint64_t grace = graces[rng_.Below(3)];
    EndOne(generation, mode, grace, rng_.Chance(0.4));
  }
  void EndOne(uint64_t generation, keeper::End mode, uint64_t grace, bool keep) {
    // A program may or may not do what it would within such a grace.
    if (grace < kLongMs || mode == keeper::End::kStopNow) hurried_ = std::max(hurried_, generation);
    Both(keeper::EndGeneration{generation, mode, grace, "the test says so", keep},
         absl::StrCat("end ", generation, " mode ", static_cast<int>(mode), " grace ", grace,
                      keep ? " keep" : ""));
  }

  // ---- processes that stay

  // Some ranks of the newest generation stay, it is ended for the next one, and most of them let go; then
  // some die or cannot be told, and the next generation begins with the others.
  void ThroughGenerations() {
    if (model_.Living().empty()) {
      LaunchWhole();
      Flush();
    }
    for (const RankKey& key : model_.Living()) {
      if (wrong_.empty() && rng_.Chance(0.7)) Stay(key);
    }
    LetGo();  // those that wait come up
    if (!wrong_.empty() || newest_ == 0) return;
    EndOne(newest_, keeper::End::kReform, rng_.Chance(0.8) ? kLongMs : kShortMs, true);
    Flush();
    LetGo();
    if (wrong_.empty() && rng_.Chance(0.3)) EndOne(newest_, keeper::End::kReform, kLongMs, rng_.Chance(0.5));
    if (wrong_.empty()) Flush();
    if (wrong_.empty() && rng_.Chance(0.3)) LoseOneThatWaits();
    if (wrong_.empty() && rng_.Chance(0.3)) Reattach(kLongMs);
    if (!wrong_.empty() || rng_.Chance(0.2)) return;
    LaunchWhole();
    Flush();
  }

  void LetGo() {
    for (const RankKey& key : model_.Staying()) {
      if (wrong_.empty() && rng_.Chance(0.8)) LetGo(key);
    }
  }
  void Stay(const RankKey& key) {
    const RankKey birth = model_.born.at(key);
    if (model_.Deaf(key) || !Voice(key)) return;
    Tell(key.first, "/", key.second, " stays");
    voices_.at(birth)->Send(kRankStays, "");
    if (!model_.Beside(key)) model_.Speak(key, Storage(key));
    model_.Stay(birth);
    AwaitRest();  // the keeper has read what came before it
  }
  void LetGo(const RankKey& key) {
    const RankKey birth = model_.born.at(key);
    Tell(key.first, "/", key.second, " lets go");
    if (!Hears(birth, kKeeperRevoked)) return Wrong("a rank that stays is not told that it is over");
    voices_.at(birth)->Send(kRankReleased,
                            std::string(reinterpret_cast<const char*>(&key.first), sizeof(key.first)));
    model_.LetGo(birth);
    AwaitRest();
  }
  // Reads on until the keeper says that.
  bool Hears(const RankKey& birth, int kind) {
    for (;;) {
      const int next = voices_.at(birth)->Next().first;
      if (next == kind || next == 0) return next == kind;
    }
  }
  void LoseOneThatWaits() {
    const auto waiting = model_.Waiting();
    if (waiting.empty()) return;
    const RankKey birth = Any(waiting);
    const double dice = rng_.Unit();
    const char* how = dice < 0.5 ? " dies" : dice < 0.75 ? " is stopped" : " closes its connection";
    Tell("the process of ", birth.first, "/", birth.second, how, " while it waits");
    const auto pid = static_cast<pid_t>(pids_.at(birth));
    if (dice < 0.5) {
      model_.Kill(birth);
      kill(pid, SIGKILL);
      if (!Until([&] { return !Alive(pid); })) Wrong("SIGKILL did nothing");
    } else if (dice < 0.75) {
      model_.Stop(birth);
      kill(pid, SIGSTOP);
      keeper::ProcessEntry entry;
      if (!Until([&] { return !keeper::ReadProcess(pid, &entry) || entry.stopped || entry.zombie; }))
        Wrong("SIGSTOP did nothing");
    } else {
      model_.Deafen(birth);
      voices_.erase(birth);
    }
    AwaitRest();
  }

  void Both(keeper::Command command, const std::string& words) {
    Tell(words);
    batch_.push_back(std::move(command));
  }
  void Flush() {
    Tell("---- attached");
    for (const keeper::Command& command : batch_) model_.keeper().Do(command);
    for (const keeper::Command& command : batch_) client_->Send(command);
    batch_.clear();
    AwaitRest();
    for (const auto& [name, birth] : model_.born) {
      if (name == birth || !wrong_.empty() || !model_.Living().contains(name) || model_.Beside(name) ||
          !told_on_.insert(name).second)
        continue;
      if (!Hears(birth, kKeeperMember)) Wrong("a process that goes on is not told");
    }
  }

  // The head relies on the fence: ranks end without a further command. Those of later generations end as
  // well.
  void FenceEnds() {
    const int64_t left = rng_.Chance(0.5) ? 100 : -5000;
    Tell("fence of ", left, " ms");
    model_.keeper().Do(keeper::Fence{model_.now() / kMs + left});
    client_->Send(keeper::Fence{keeper::BootMs() + left});
    fence_over_ = true;
    AwaitRest();
  }

  void SignalRank() {
    const auto living = model_.Living();
    if (living.empty()) return;
    const RankKey key = Any(living);
    Both(keeper::SignalRank{key.first, key.second, SIGKILL},
         absl::StrCat("signal ", key.first, "/", key.second));
    Flush();
  }

  // The newest word on its storage stays with the keeper until an agent has acknowledged it (fault S7).
  void Speak() {
    const auto living = model_.Living();
    if (living.empty()) return;
    const RankKey key = Any(living);
    if (model_.Silent(key) || model_.Beside(key)) return;
    if (!Voice(key)) return;
    model_.Speak(key, Storage(key));
    AwaitRest();
  }
  std::string Storage(const RankKey& key) {
    std::string json = absl::StrCat(R"({"type":"storage","text":")", ++words_, "\"}");
    Tell(key.first, "/", key.second, " says ", json);
    voices_.at(model_.born.at(key))->Send(kRankToAgent, json);
    return json;
  }
  // The connection of its process to its keeper.
  bool Voice(const RankKey& key) {
    auto& voice = voices_[model_.born.at(key)];
    if (voice != nullptr) return true;
    voice = std::make_unique<host::FakeRank>(dir_);
    voice->Hello(key.first, static_cast<uint32_t>(key.second), std::string(32, 'a'));
    const bool welcome = voice->Next().first == kKeeperWelcome;
    if (!welcome) Wrong("a rank is not welcome at its keeper");
    return welcome;
  }
  void AckRelays() {
    Tell("ack all relays told");
    for (const keeper::Report& report : model_.told) {
      if (const auto* relay = std::get_if<keeper::RelayUp>(&report))
        model_.keeper().Do(keeper::AckRelay{relay->generation, relay->rank, relay->id});
    }
    for (const keeper::Report& report : told_) {
      if (const auto* relay = std::get_if<keeper::RelayUp>(&report))
        client_->Send(keeper::AckRelay{relay->generation, relay->rank, relay->id});
    }
    AwaitRest();
  }

  RankKey Any(const std::set<RankKey>& keys) {
    auto it = keys.begin();
    std::advance(it, static_cast<long>(rng_.Below(keys.size())));
    return *it;
  }

  // Another process kills a rank, seen by an agent or by none.
  void KillRank(bool detached) {
    const auto living = model_.Living();
    if (living.empty()) return;
    const RankKey key = Any(living);
    Tell(detached ? "nobody attached: " : "", "kill ", key.first, "/", key.second);
    if (detached) Detach();
    model_.Kill(model_.born.at(key));
    kill(static_cast<pid_t>(pids_.at(key)), SIGKILL);
    model_.Run(15 * kSec);
    if (!detached) return AwaitRest();
    Reattach(kLongMs);
  }

  void LeaseEnds() {
    const auto living = model_.Living(), waiting = model_.Waiting();
    if (living.empty() && waiting.empty()) return;
    Reattach(50);
    if (!wrong_.empty()) return;
    Tell("nobody attached for longer than the lease");
    Detach();
    model_.Run(30 * kSec);
    const auto left = model_.Living();
    for (const RankKey& key : living) {
      if (left.contains(key)) continue;
      if (!Until([&] { return !Alive(pids_.at(key)); })) return Wrong("the lease ended nobody");
    }
    for (const RankKey& birth : waiting) {
      if (!Until([&] { return !Alive(pids_.at(birth)); })) return Wrong("the lease spared one that waits");
    }
    Reattach(kLongMs);
  }
  static bool Alive(int64_t pid) {
    keeper::ProcessEntry entry;
    return keeper::ReadProcess(static_cast<pid_t>(pid), &entry) && !entry.zombie;
  }

  void Detach() {
    model_.keeper().Detach();
    client_.reset();
  }

  // ---- what an agent sees of both

  void Pump() {
    if (client_ == nullptr) return;
    (void)client_->Flush();
    auto reports = client_->Receive();
    if (!reports.ok()) return;
    for (keeper::Report& report : *reports) {
      if (const auto* started = std::get_if<keeper::Started>(&report))
        pids_[{started->generation, started->rank}] = started->pid;
      if (const auto* done = std::get_if<keeper::ExecDone>(&report)) answered_ = done->id;
      told_.push_back(std::move(report));
    }
  }

  std::string Words(const keeper::Exited& exit) const {
    const RankKey key{exit.generation, exit.rank};
    const Does does = ScriptOf(key).does;
    const std::string who = absl::StrCat(exit.generation, "/", exit.rank, " ");
    const bool hurried = exit.generation <= hurried_ && exit.cause != keeper::Cause::kStartFailed;
    if (hurried && does == Does::kExitsOnTerm) return who + "ended";
    if (hurried && does == Does::kSleeps && exit.cause == keeper::Cause::kStopped) return who + "stopped";
    return absl::StrCat(who, "cause ", static_cast<int>(exit.cause), " code ", exit.code, " signal ",
                        exit.signal);
  }
  // That of its process; a rank that never ran has its own.
  const Script& ScriptOf(const RankKey& key) const {
    const auto birth = model_.born.find(key);
    return model_.scripts.at(birth == model_.born.end() ? key : birth->second);
  }
  static std::string Words(const std::vector<keeper::Kept>& kept) {
    std::set<std::string> words;
    for (const keeper::Kept& process : kept)
      words.insert(absl::StrCat(" keeps ", process.born, "/", process.born_rank));
    return absl::StrJoin(words, "");
  }
  std::string Words(const std::vector<keeper::Report>& reports) const {
    std::set<std::string> words;
    for (const keeper::Report& report : reports) {
      if (const auto* exit = std::get_if<keeper::Exited>(&report))
        words.insert(absl::StrCat("exited ", Words(*exit)));
      if (const auto* relay = std::get_if<keeper::RelayUp>(&report))
        words.insert(absl::StrCat("relay ", relay->generation, "/", relay->rank, " ", relay->json));
      if (const auto* gone = std::get_if<keeper::Gone>(&report))
        words.insert(
            absl::StrCat("gone ", gone->generation, gone->clean ? "" : " unclean", Words(gone->kept)));
      const auto* ready = std::get_if<keeper::Ready>(&report);
      if (ready != nullptr && beside_.contains({ready->generation, ready->rank}))
        words.insert(absl::StrCat("ready ", ready->generation, "/", ready->rank));
    }
    return absl::StrJoin(words, "; ");
  }
  std::string Words(const keeper::State& state) const {
    std::string text = absl::StrCat("revoked ", state.highest_revoked, " stopped ", state.highest_stopped,
                                    Words(state.kept), " coming:", Words(state.coming));
    for (const keeper::GenerationHeld& held : state.generations) {
      absl::StrAppend(&text, "; generation ", held.generation, " (", held.note, ")",
                      held.ending ? " ending" : "", held.gone ? " gone" : "", held.clean ? "" : " unclean");
      for (const keeper::RankHeld& rank : held.ranks)
        absl::StrAppend(&text, ", rank ", rank.rank, rank.running ? " runs" : "",
                        rank.pid > 0 ? " has a pid" : "", rank.sdk ? " sdk" : "");
      std::set<std::string> unacked;
      for (const keeper::Exited& exit : held.unacked) unacked.insert(Words(exit));
      absl::StrAppend(&text, ", unacked [", absl::StrJoin(unacked, "; "), "]");
    }
    return text;
  }
  // The messages of a rank come before its exit, and all exits of a generation before its end.
  static bool InOrder(const std::vector<keeper::Report>& reports) {
    std::set<RankKey> exited;
    std::set<uint64_t> over;
    for (const keeper::Report& report : reports) {
      const auto* relay = std::get_if<keeper::RelayUp>(&report);
      if (relay != nullptr && exited.contains({relay->generation, relay->rank})) return false;
      const auto* exit = std::get_if<keeper::Exited>(&report);
      if (exit != nullptr && over.contains(exit->generation)) return false;
      if (exit != nullptr) exited.insert({exit->generation, exit->rank});
      if (const auto* gone = std::get_if<keeper::Gone>(&report)) over.insert(gone->generation);
    }
    return true;
  }
  static const keeper::State* StateIn(const std::vector<keeper::Report>& reports) {
    for (const keeper::Report& report : reports) {
      if (const auto* state = std::get_if<keeper::State>(&report)) return state;
    }
    return nullptr;
  }

  std::string Ready(const RankKey& key) const {
    return absl::StrCat(folder_, "/ready-", key.first, "-", key.second);
  }
  void Wrong(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }

  // The model comes to rest first, and then the keeper to the same.
  void AwaitRest() {
    model_.Run(15 * kSec);
    // A rank that is not there is asked for: the answer says that all commands before were read.
    client_->Send(keeper::Exec{++asked_, UINT64_MAX, 0, {"true"}, 1});
    const auto same = [&] {
      Pump();
      if (answered_ < asked_) return false;
      if (Words(told_) != Words(model_.told)) return false;
      const auto living = model_.Living();
      return std::all_of(living.begin(), living.end(), [&](const RankKey& key) {
        const RankKey birth = model_.born.at(key);
        return pids_.contains(key) && access(Ready(birth).c_str(), F_OK) == 0 &&
               pids_.at(key) == pids_.at(birth);
      });
    };
    if (!Until(same))
      Wrong(absl::StrCat("the keeper told: ", Words(told_), "\nthe model told:  ", Words(model_.told)));
    if (!InOrder(told_)) Wrong("the keeper tells something of a rank or a generation that is over");
    if (!InOrder(model_.told)) Wrong("the model tells something of a rank or a generation that is over");
  }

  // An agent takes over; what it finds is the same. Lease 0 is not drawn: agents have one.
  void Reattach(uint64_t lease_ms) {
    model_.Attach(lease_ms);
    model_.Run(kSec);
    const std::string wanted = Words(*StateIn(model_.told));
    std::string found = "nothing";
    const auto same = [&] {
      told_.clear();
      auto connected = host::KeeperClient::Connect(dir_);
      if (!connected.ok()) return false;
      client_ = std::move(*connected);
      client_->Send(keeper::Attach{keeper::kAgentProtocol, lease_ms});
      const auto stated = [&] {
        Pump();
        return StateIn(told_) != nullptr;
      };
      if (!Until(stated)) return false;
      found = Words(*StateIn(told_));
      return found == wanted;
    };
    Tell("---- an agent attaches");
    if (!Until(same)) return Wrong(absl::StrCat("the keeper holds: ", found, "\nthe model holds:  ", wanted));
    AwaitRest();
  }

  void Quit() {
    Tell("quit");
    const auto waiting = model_.Waiting();
    hurried_ = UINT64_MAX;
    model_.keeper().Do(keeper::Quit{"the life is over"});
    client_->Send(keeper::Quit{"the life is over"});
    AwaitRest();
    if (model_.keeper().alive()) Wrong("the model does not leave after Quit");
    if (!Until([&] { return Pump(), !host::KeeperPid(dir_).ok(); }))
      Wrong("the keeper does not leave after Quit");
    for (const RankKey& birth : waiting) {
      if (Alive(pids_.at(birth))) Wrong("the keeper leaves a process that waits behind");
    }
  }

  // The next agent gets everything that the keeper recorded and no agent has acknowledged, and nothing that
  // never was.
  void KillKeeper() {
    Tell("the keeper is killed");
    const auto pid = host::KeeperPid(dir_);
    if (!pid.ok()) return Wrong("the keeper is not there");
    kill(static_cast<pid_t>(*pid), SIGKILL);
    client_.reset();
    if (!Until([&] { return !host::KeeperPid(dir_).ok(); })) return Wrong("the keeper survived SIGKILL");
    std::set<std::string> recorded;
    for (const keeper::Exited& exit : host::ReadExitRecords(dir_)) recorded.insert(Words(exit));
    for (const keeper::Exited& exit : model_.keeper().Die()) {
      if (!recorded.contains(Words(exit)))
        Wrong(absl::StrCat("no record is left of: ", Words(exit),
                           "\nrecords: ", absl::StrJoin(recorded, "; ")));
    }
  }

  Rng rng_;
  Model model_;
  const std::string folder_, dir_, binary_, self_;
  std::unique_ptr<host::KeeperClient> client_;
  std::vector<keeper::Command> batch_;
  std::vector<keeper::Report> told_;  // since it was attached
  std::map<RankKey, int64_t> pids_;
  std::map<RankKey, std::unique_ptr<host::FakeRank>> voices_;  // by birth
  std::set<RankKey> told_on_;                                  // ranks whose process was told that it goes on
  std::set<RankKey> beside_;                                   // ranks that wait beside their generation
  int words_ = 0;
  uint64_t asked_ = 0, answered_ = 0;
  uint64_t newest_ = 0;   // generation of which a command spoke
  uint64_t hurried_ = 0;  // generations up to here were ended so soon that their ranks may end either way
  bool fence_over_ = false;
  std::vector<std::string> story_;
  std::string wrong_;
};

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(KeeperModelTest, TheKeeperLivesAsItsModelDoes_P4_P6) {
  constexpr int kAtOnce = 8;  // a life mostly waits
  const uint64_t asked = FromEnvironment("GTRAIN_KEEPER_LIVES", 0);
  const uint64_t first = FromEnvironment("GTRAIN_KEEPER_SEED", 1);
  const uint64_t lives = asked > 0 ? asked : 300;
  const absl::Time deadline = asked > 0 ? absl::InfiniteFuture() : absl::Now() + absl::Seconds(20);
  const char* build = std::getenv("GTRAIN_BUILD_DIR");
  const std::string keeper = std::string(build != nullptr ? build : "build") + "/bin/gtrain-keeper";
  const std::string base = TestFolder(), self = std::filesystem::read_symlink("/proc/self/exe");
  std::atomic<uint64_t> next{0}, lived{0};
  std::atomic<int> failed{0};
  Mutex mutex;
  std::vector<std::string> failures;
  std::vector<std::thread> threads;
  for (int i = 0; i < kAtOnce; ++i) {
    threads.emplace_back([&] {
      while (failed < 3 && absl::Now() < deadline) {
        const uint64_t index = next++;
        if (index >= lives) return;
        const std::string folder = absl::StrCat(base, "/", index);
        std::filesystem::create_directories(folder);
        Life life(first + index, folder, keeper, self);
        const std::string wrong = life.Run();
        ++lived;
        if (wrong.empty()) continue;
        ++failed;
        MutexLock lock(&mutex);
        failures.push_back(absl::StrCat("seed ", first + index, ":\n  ", absl::StrJoin(life.story(), "\n  "),
                                        "\n", wrong,
                                        "\nagain: GTRAIN_KEEPER_LIVES=1 GTRAIN_KEEPER_SEED=", first + index));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) ADD_FAILURE() << failure;
  std::printf("%llu lives from seed %llu\n", static_cast<unsigned long long>(lived.load()),
              static_cast<unsigned long long>(first));
}

}  // namespace
}  // namespace gtrain::sim

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--rank")
    return gtrain::sim::RankMain(argv[2], std::atoi(argv[3]), argv[4]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
