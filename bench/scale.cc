// bench_scale: one real head and agents by the thousand (fleet.h), which speak the real protocol over real,
// authenticated connections: directly, and through relays (docs/protocols/relays.md).
//
// For each fleet: how long until all are welcomed from cold, the head's CPU and bytes at one heartbeat a
// second, the entry barrier of a job over all of them, a silent agent, the re-forming of a job of 256 that
// loses one, and how long until all are back after kill -9 of the head. The CPU of the fleet itself, on the
// same machine, stands beside each row as its peer: it plays machines that would not be there.
//
// --only costs: what a message to many and one of a child take. --only direct: 2,000 and 4,900 directly, as
// many as a head takes from one address with 20,000 descriptors.
// --only relays: 256, 2,048 and 10,000 through relays of 64.
// --only many: 100,000 through 400 relays.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "bench/fleet.h"
#include "bench/harness.h"
#include "bench/head_process.h"
#include "job/spec/print.h"
#include "net/zmq/client.h"
#include "net/zmq/end_to_end.h"
#include "net/zmq/keys.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/packed.h"

namespace gtrain::bench {
namespace {

constexpr int kRadix = 64;
constexpr int kDirectEach = 2'000;  // agents that one process can play directly: each has 9 descriptors
constexpr int kReformed = 256;
constexpr absl::Duration kPhaseDeadline = absl::Minutes(1);

// ---------------------------------------------------------------- processes that play agents directly

struct Played {  // shared with the process that plays
  std::atomic<int> welcomed{0};
  std::atomic<int64_t> bytes{0}, cpu_us{0};
  std::atomic<bool> failed{false};
};

// Plays its agents until it is killed.
void Play(const FleetPlan& plan, Played* played) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Fleet fleet(plan);
  if (const absl::Status status = fleet.Connect(); !status.ok()) {
    std::fprintf(stderr, "bench_scale: %s\n", std::string(status.message()).c_str());
    played->failed = true;
    _exit(1);
  }
  for (;;) {
    fleet.Turn(absl::Milliseconds(5));
    played->welcomed = fleet.counters().welcomed;
    played->bytes = fleet.counters().sent + fleet.counters().received;
    played->cpu_us = static_cast<int64_t>(1e6 * OwnCpuSeconds());
  }
}

// ---------------------------------------------------------------- one head and its agents

class Scale {
 public:
  Scale(const Options& options, int agents, int children)
      : options_(options),
        count_(agents),
        children_(children),
        name_(absl::StrCat(agents, children == 0 ? " agents directly" : " agents through relays")) {}

  ~Scale() {
    for (const pid_t pid : players_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    if (head_) head_->Kill(SIGTERM);
    if (played_ != nullptr) munmap(played_, sizeof(Played) * kPlayersMax);
  }

  absl::Status Run(bool jobs) {
    GT_RETURN_IF_ERROR(Prepare());
    GT_RETURN_IF_ERROR(Cold());
    GT_RETURN_IF_ERROR(OneHertz());
    if (jobs) {
      GT_RETURN_IF_ERROR(Barrier());
      GT_RETURN_IF_ERROR(Reform());
      GT_RETURN_IF_ERROR(SilentAgent());
    }
    GT_RETURN_IF_ERROR(KillHead());
    return AllVanish();
  }
  const std::vector<Outcome>& outcomes() const { return outcomes_; }

 private:
  static constexpr size_t kPlayersMax = 64;

  absl::Status Prepare() {
    GT_RETURN_IF_ERROR(cluster_.Make(count_));
    // Who goes through whom is settled already, as it is in a cluster that starts again.
    head_.emplace(options_.folder + "/gtrain", cluster_.files().dir,
                  std::vector<std::string>{"--relays-from", "0", "--connections-per-address", "100000"});
    return head_->Start();
  }

  FleetPlan PlanOf(int first, int count) const {
    FleetPlan plan;
    plan.endpoint = head_->endpoint();
    plan.head_public_key = cluster_.files().head.public_key;
    plan.cluster = cluster_.files().cluster;
    plan.keys.assign(cluster_.keys().begin() + first, cluster_.keys().begin() + first + count);
    plan.first = first;
    plan.children = children_;
    return plan;
  }

  // Directly they need more descriptors than one process may have.
  absl::Status StartPlayers() {
    void* shared = mmap(nullptr, sizeof(Played) * kPlayersMax, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return ErrnoStatus(errno, "mmap");
    played_ = new (shared) Played[kPlayersMax];
    for (int first = 0; first < count_; first += kDirectEach) {
      const FleetPlan plan = PlanOf(first, std::min(kDirectEach, count_ - first));
      const pid_t pid = fork();
      if (pid < 0) return ErrnoStatus(errno, "fork");
      if (pid == 0) Play(plan, &played_[players_.size()]);
      players_.push_back(pid);
    }
    return absl::OkStatus();
  }

  int Welcomed() {
    if (fleet_) return fleet_->counters().welcomed;
    int welcomed = 0;
    for (size_t i = 0; i < players_.size(); ++i) welcomed += played_[i].welcomed;
    return welcomed;
  }
  double FleetCpu() const {
    double cpu = fleet_ ? OwnCpuSeconds() : 0;
    for (size_t i = 0; i < players_.size(); ++i) cpu += 1e-6 * static_cast<double>(played_[i].cpu_us);
    return cpu;
  }
  int64_t FleetBytes() const {
    int64_t bytes = fleet_ ? fleet_->counters().sent + fleet_->counters().received : 0;
    for (size_t i = 0; i < players_.size(); ++i) bytes += played_[i].bytes;
    return bytes;
  }

  absl::Status Cold() {
    const double cpu = head_->CpuSeconds(), own = children_ == 0 ? 0 : OwnCpuSeconds();
    const Instant start = BenchClock().Now();
    if (children_ == 0) {
      GT_RETURN_IF_ERROR(StartPlayers());
    } else {
      fleet_.emplace(PlanOf(0, count_));
      GT_RETURN_IF_ERROR(fleet_->Connect());
    }
    GT_RETURN_IF_ERROR(Until("all agents to be welcomed", [&] { return Welcomed() == count_; }));
    Add("cold to all welcomed", "s", absl::ToDoubleSeconds(BenchClock().Now() - start));
    AddCpu("CPU of that", "s", head_->CpuSeconds() - cpu, FleetCpu() - own);
    return absl::OkStatus();
  }

  absl::Status OneHertz() {
    GT_RETURN_IF_ERROR(For(absl::Seconds(2)));  // what follows a hello is done
    const double cpu = head_->CpuSeconds(), own = FleetCpu();
    const int64_t bytes = FleetBytes();
    const Instant start = BenchClock().Now();
    GT_RETURN_IF_ERROR(For(absl::Seconds(options_.quick ? 6 : 20)));
    const double seconds = absl::ToDoubleSeconds(BenchClock().Now() - start);
    const double share = (head_->CpuSeconds() - cpu) / seconds;
    AddCpu("CPU at 1 Hz, of one core", "%", 100 * share, 100 * (FleetCpu() - own) / seconds);
    Add("CPU at 1 Hz, an agent", "us/s", 1e6 * share / count_);
    Add("bytes at 1 Hz, an agent", "B/s", static_cast<double>(FleetBytes() - bytes) / seconds / count_);
    Add("head memory, an agent", "KiB", 1024 * head_->MemoryMiB("VmRSS:") / count_);
    if (Welcomed() == count_) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat(count_ - Welcomed(), " agents were lost meanwhile"));
  }

  // ---- jobs, where all agents are played by this process

  absl::Status Ask(core::ClientRequestBody body, std::function<void(const core::ClientReply&)> then) {
    net::ClientOptions options;
    options.endpoint = head_->endpoint();
    options.server_public_key = cluster_.files().head.public_key;
    GT_ASSIGN_OR_RETURN(options.keys, net::LoadKeyPair(cluster_.files().admin_key_path()));
    GT_ASSIGN_OR_RETURN(const auto client, net::ZmqClient::Connect(options));
    GT_RETURN_IF_ERROR(Until("the client to connect", [&] { return client->Connected(); }));
    core::ClientRequest request{net::RandomHex(16), absl::Seconds(60), std::move(body)};
    GT_RETURN_IF_ERROR(client->Send(wire::Encode(request)));
    absl::Status status = absl::UnavailableError("no answer");
    GT_RETURN_IF_ERROR(Until("an answer of the head", [&] {
      (void)client->Connected();
      const std::optional<std::string> bytes = client->Receive();
      if (!bytes) return false;
      const auto message = wire::Decode(*bytes, wire::Sender::kHead);
      const auto* reply = message.ok() ? std::get_if<core::ClientReply>(&*message) : nullptr;
      if (reply == nullptr || reply->id != request.id) return false;
      status = reply->ok ? absl::OkStatus() : absl::FailedPreconditionError(reply->error);
      if (reply->ok) then(*reply);
      return true;
    }));
    return status;
  }

  absl::Status Submit(int nodes) {
    spec::JobSpec job;
    job.name = absl::StrCat("over-", nodes);
    job.run = {"train"};
    job.nodes = spec::Range{nodes, nodes};
    job.ranks_per_node = 1;
    job.resources.cpus = 1;
    core::ClientSubmit submit;
    submit.spec_text = spec::PrintJob(job);
    submit.run_dir = cluster_.home() + "/runs/{job}";
    return Ask(std::move(submit), [this](const core::ClientReply& reply) {
      const size_t at = reply.json.find("\"job\":\"") + 7;
      fleet_->Watch(reply.json.substr(at, reply.json.find('"', at) - at));
    });
  }

  absl::Status Barrier() {
    const FleetCounters& counters = fleet_->counters();
    const int64_t started = counters.started, tables = counters.tables, bytes = FleetBytes();
    const double cpu = head_->CpuSeconds(), own = FleetCpu();
    const Instant start = BenchClock().Now();
    GT_RETURN_IF_ERROR(Submit(count_));
    GT_RETURN_IF_ERROR(Until("all ranks to start", [&] { return counters.started - started == count_; }));
    Add("submit to all ranks started", "s", absl::ToDoubleSeconds(BenchClock().Now() - start));
    GT_RETURN_IF_ERROR(Until("the entry barrier", [&] { return counters.tables - tables == count_; }));
    const Instant now = BenchClock().Now();
    Add("submit to the end of the entry barrier", "s", absl::ToDoubleSeconds(now - start));
    Add("last part to the table everywhere", "s", absl::ToDoubleSeconds(now - counters.last_part));
    AddCpu("CPU of that start", "s", head_->CpuSeconds() - cpu, FleetCpu() - own);
    Add("bytes of that start, a rank", "KiB", static_cast<double>(FleetBytes() - bytes) / 1024 / count_);
    return absl::OkStatus();
  }

  // The keeper of one rank dies, and its rank with it: until all ranks of the next generation have started.
  // Each time another job, since a job that loses one after another waits between them.
  absl::Status Reform() {
    if (count_ < kReformed) return absl::OkStatus();
    Series times;
    for (int i = 0; i < (options_.quick ? 5 : 20); ++i) {
      GT_RETURN_IF_ERROR(Submit(kReformed));
      GT_RETURN_IF_ERROR(Until("256 ranks", [&] { return fleet_->StartsOf(1) == kReformed; }));
      GT_RETURN_IF_ERROR(For(absl::Milliseconds(200)));
      const std::vector<int> nodes = fleet_->AgentsOfWatched();
      const Instant start = BenchClock().Now();
      GT_RETURN_IF_ERROR(fleet_->LoseRankOf(nodes[nodes.size() / 2]));
      GT_RETURN_IF_ERROR(Until("the next generation", [&] { return fleet_->StartsOf(2) == kReformed; }));
      times.samples.push_back(absl::ToDoubleMilliseconds(BenchClock().Now() - start));
      GT_RETURN_IF_ERROR(Ask(core::ClientStop{fleet_->watched(), true}, [](const core::ClientReply&) {}));
    }
    outcomes_.push_back(
        {absl::StrCat(name_, ": re-forming after the loss of 1 of 256"), "ms", "", times, {}});
    std::fprintf(stderr, "%-70s %10.4g ms\n", outcomes_.back().name.c_str(), times.Median());
    return absl::OkStatus();
  }

  // Until the head's log says that it is suspect.
  absl::Status SilentAgent() {
    const int silent = count_ - 1;
    const std::string line = absl::StrCat("node-", silent, " is suspect");
    std::ifstream log(head_->log());
    log.seekg(0, std::ios::end);
    fleet_->Silence(silent);
    const Instant start = BenchClock().Now();
    std::string text;
    GT_RETURN_IF_ERROR(Until("the head to miss an agent", [&] {
      log.clear();
      text.append(std::istreambuf_iterator<char>(log), {});
      return text.find(line) != std::string::npos;
    }));
    Add("a silent agent is suspect after at most", "s",
        absl::ToDoubleSeconds(BenchClock().Now() - start) + 1);  // its last beat was up to a second before
    silent_ = 1;
    return absl::OkStatus();
  }

  absl::Status KillHead() {
    const double own = FleetCpu();
    const Instant start = BenchClock().Now();
    head_->Kill(SIGKILL);
    GT_RETURN_IF_ERROR(head_->Start());
    Add("head serves again after kill -9", "s", absl::ToDoubleSeconds(BenchClock().Now() - start));
    const int all = count_ - silent_;
    GT_RETURN_IF_ERROR(Until("agents to notice", [&] { return Welcomed() < all; }));
    GT_RETURN_IF_ERROR(Until("all agents to be back", [&] { return Welcomed() == all; }));
    Add("all back after kill -9", "s", absl::ToDoubleSeconds(BenchClock().Now() - start));
    AddCpu("CPU of that", "s", head_->CpuSeconds(), FleetCpu() - own);
    return absl::OkStatus();
  }

  // All agents vanish in one moment, with jobs: how long the head lets others wait meanwhile.
  absl::Status AllVanish() {
    if (fleet_) fleet_.reset();
    for (const pid_t pid : players_) kill(pid, SIGKILL);
    Series waits;
    const double cpu = head_->CpuSeconds();
    const Instant start = BenchClock().Now(), end = start + absl::Seconds(20);
    while (BenchClock().Now() < end) {
      const Instant asked = BenchClock().Now();
      GT_RETURN_IF_ERROR(Ask(core::ClientTokens{}, [](const core::ClientReply&) {}));
      waits.samples.push_back(absl::ToDoubleMilliseconds(BenchClock().Now() - asked));
      usleep(20'000);
    }
    outcomes_.push_back({absl::StrCat(name_, ": all vanish: an answer of the head, worst of 20 s"),
                         "ms",
                         "",
                         Series{{waits.Quantile(1)}},
                         {}});
    Add("all vanish: CPU, of one core", "%",
        100 * (head_->CpuSeconds() - cpu) / absl::ToDoubleSeconds(BenchClock().Now() - start));
    return absl::OkStatus();
  }

  void Turn() { fleet_ ? fleet_->Turn(absl::Milliseconds(2)) : (void)usleep(2'000); }

  absl::Status For(absl::Duration time) {
    for (const Instant end = BenchClock().Now() + time; BenchClock().Now() < end;) Turn();
    return absl::OkStatus();
  }

  absl::Status Until(const char* what, const std::function<bool()>& done) {
    const Instant deadline = BenchClock().Now() + kPhaseDeadline;
    while (!done()) {
      for (size_t i = 0; i < players_.size(); ++i) {
        if (played_[i].failed) return absl::ResourceExhaustedError("an agent process did not start");
      }
      if (BenchClock().Now() > deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat("waited a minute for ", what, ": ", Welcomed(), " of ", count_, " are welcomed"));
      }
      Turn();
    }
    return absl::OkStatus();
  }

  void Add(const std::string& what, const std::string& unit, double value) {
    outcomes_.push_back({absl::StrCat(name_, ": ", what), unit, "", Series{{value}}, {}});
    std::fprintf(stderr, "%-70s %10.4g %s\n", outcomes_.back().name.c_str(), value, unit.c_str());
  }
  void AddCpu(const std::string& what, const std::string& unit, double head, double fleet) {
    outcomes_.push_back(
        {absl::StrCat(name_, ": ", what), unit, "the agents played here", Series{{head}}, Series{{fleet}}});
    std::fprintf(stderr, "%-70s %10.4g %s (the agents played here: %.4g)\n", outcomes_.back().name.c_str(),
                 head, unit.c_str(), fleet);
  }

  const Options options_;
  const int count_, children_;
  const std::string name_;
  BenchCluster cluster_;
  std::optional<HeadProcess> head_;
  std::optional<Fleet> fleet_;
  std::vector<pid_t> players_;
  Played* played_ = nullptr;
  int silent_ = 0;  // agents that say nothing, which are missed after the head has started anew
  std::vector<Outcome> outcomes_;
};

// What a head pays once for a message to many, and for each of a child.
std::vector<Outcome> Costs() {
  const auto microseconds = [](int times, const std::function<void()>& once) {
    const Instant start = BenchClock().Now();
    for (int i = 0; i < times; ++i) once();
    return absl::ToDoubleMicroseconds(BenchClock().Now() - start) / times;
  };
  std::vector<Outcome> all;
  const auto add = [&](const std::string& name, const std::string& unit, double value) {
    all.push_back({name, unit, "", Series{{value}}, {}});
  };
  constexpr int kRanks = 10'000;
  core::GenerationGrant grant{.job = JobId("over-10000-1"), .generation = {1}, .world_size = kRanks};
  for (int rank = 0; rank < kRanks; ++rank) {
    const NodeId node(net::RandomHex(8));
    grant.nodes.push_back({.node = node, .address = "10.0.0.1", .hostname = absl::StrCat("node-", rank)});
    grant.ranks.push_back({.rank = rank, .node = node, .cpus = {0}});
  }
  const std::string bytes = wire::Encode(core::StartGeneration{{1}, grant, {}}), packed = wire::Pack(bytes);
  add("grant of 10,000 ranks: bytes a rank", "B", static_cast<double>(bytes.size()) / kRanks);
  add("grant of 10,000 ranks: packed, a rank", "B", static_cast<double>(packed.size()) / kRanks);
  add("grant of 10,000 ranks: to pack it", "ms", microseconds(10, [&] { (void)wire::Pack(bytes); }) / 1e3);
  add("grant of 10,000 ranks: to unpack it", "ms",
      microseconds(10, [&] { (void)wire::Unpack(packed); }) / 1e3);
  const net::KeyPair node = net::MakeKeyPair(), head = net::MakeKeyPair();
  add("secret of a child's key, once", "us",
      microseconds(200, [&] { (void)net::PairSecret(head, node.public_key); }));
  const std::string secret = net::PairSecret(head, node.public_key).value();
  const std::string half(net::kSessionHalfBytes, 'h'), message(200, 'm');
  net::SealedSession there(net::SealedSession::End::kNode, secret, half, half);
  net::SealedSession here(net::SealedSession::End::kHead, secret, half, half);
  add("200 bytes sealed and opened", "us",
      microseconds(20'000, [&] { (void)here.Open(there.Seal(message)); }));
  return all;
}

struct Part {
  const char* only;
  int agents, children;
  bool jobs, quick;
};
constexpr Part kParts[] = {{"direct", 2'000, 0, false, true},       {"direct", 4'900, 0, false, false},
                           {"relays", 256, kRadix, true, true},     {"relays", 2'048, kRadix, true, true},
                           {"relays", 10'000, kRadix, true, false}, {"many", 100'000, 250, false, false}};

int Main(const Options& options) {
  std::vector<Outcome> all;
  if (options.only.empty() || options.only == "costs") all = Costs();
  bool failed = false;
  for (const Part& part : kParts) {
    if (!options.only.empty() ? options.only != part.only : options.quick && !part.quick) continue;
    Scale scale(options, part.agents, part.children);
    const absl::Status status = scale.Run(part.jobs);
    if (!status.ok()) std::fprintf(stderr, "bench_scale: %s\n", status.ToString().c_str());
    failed = failed || !status.ok();
    all.insert(all.end(), scale.outcomes().begin(), scale.outcomes().end());
  }
  return Report(options, "scale", all) | (failed ? 1 : 0);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) {
  return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv, {"costs", "direct", "relays", "many"}));
}
