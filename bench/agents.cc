// bench_agents: what a head holds. One process plays 2,000 agents: each has its own CURVE key, its own
// authenticated connection and the real AgentCore; only the keeper behind it is played, by saying that every
// rank started. They hold 200 jobs of 100 ranks (20,000 ranks stand in for 20,000 actors, which do not exist
// yet), send a heartbeat a second, while a client makes 200 durable operations a second (submits and stops of
// jobs that no node fits). Then the head is killed with SIGKILL and started again.
//
// Printed: latency of operations and of reads, CPU and memory of the head, how long until all agents are
// back, and how many ranks the head ended or started again (must be 0).
#include <signal.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "bench/harness.h"
#include "bench/head_process.h"
#include "job/spec/parse.h"
#include "job/spec/print.h"
#include "net/zmq/client.h"
#include "net/zmq/keys.h"
#include "runtime/core/agent/agent_core.h"
#include "runtime/wire/codec.h"

namespace gtrain::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kRanksEach = 10;
// Nodes of a job: 200 jobs on 2,000 nodes, 30 on the 300 of --quick. A head takes 500 live jobs of one user,
// those that come and go among them.
constexpr int kNodesEach = 10;
constexpr absl::Duration kOperationEvery = absl::Milliseconds(5);  // 200 a second
constexpr absl::Duration kReadEvery = absl::Milliseconds(50);
constexpr absl::Duration kPhaseDeadline = absl::Minutes(1);
constexpr absl::Duration kTooSilent = absl::Seconds(8);  // a head calls 10 s dead

// ---------------------------------------------------------------- one agent

struct Counters {
  int welcomed = 0;     // agents the present head has welcomed
  int64_t started = 0;  // ranks
  int64_t ended = 0;    // generations the head ended, or granted a second time: false deaths
  int64_t heartbeats = 0;
  absl::Duration longest_silence;  // between two messages of one welcomed agent, as this process sent them
};

class SimulatedAgent {
 public:
  SimulatedAgent(net::ClientOptions options, core::AgentConfig config, Counters* counters)
      : options_(std::move(options)), core_(std::move(config)), counters_(counters) {}

  absl::Status Connect() {
    GT_ASSIGN_OR_RETURN(client_, net::ZmqClient::Connect(options_));
    return absl::OkStatus();
  }
  int fd() const { return client_->PollFd(); }
  bool welcomed() const { return welcomed_; }

  void Turn(Instant now) {
    const bool up = client_->Connected();
    if (up != up_) {
      up_ = up;
      if (!up && welcomed_) --counters_->welcomed;
      if (!up) welcomed_ = false;
      sent_at_.reset();
      up ? Step(core::HeadUp{"127.0.0.1"}, now) : Step(core::HeadDown{}, now);
    }
    while (std::optional<std::string> bytes = client_->Receive()) {
      auto message = wire::Decode(*bytes, wire::Sender::kHead);
      if (!message.ok()) continue;
      Count(*message);
      Step(core::FromHead{*std::move(message)}, now);
    }
    Tick(now);
  }

  void Tick(Instant now) {
    if (const auto due = core_.NextDeadline(); due && *due <= now) Step(core::AgentTick{}, now);
  }

 private:
  void Count(const core::Message& message) {
    if (std::holds_alternative<core::AgentWelcome>(message)) {
      if (!welcomed_) ++counters_->welcomed;
      welcomed_ = true;
    }
    if (std::holds_alternative<core::Revoke>(message)) ++counters_->ended;
    if (const auto* start = std::get_if<core::StartGeneration>(&message)) {
      if (start->grant.generation.value > 1) ++counters_->ended;
    }
  }

  void Step(const core::AgentEvent& event, Instant now) {
    std::deque<core::AgentEvent> events = {event};
    while (!events.empty()) {
      core::AgentStep step = core_.Step(events.front(), now);
      events.pop_front();
      for (core::AgentEffect& effect : step.effects) {
        if (const auto* send = std::get_if<core::ToHead>(&effect)) {
          if (std::holds_alternative<core::AgentHeartbeat>(send->message)) ++counters_->heartbeats;
          if (client_->Send(wire::Encode(send->message)).ok()) Sent();
        } else if (const auto* command = std::get_if<core::ToKeeper>(&effect)) {
          PlayKeeper(*command, &events);
        }
      }
    }
  }

  void Sent() {
    const Instant now = BenchClock().Now();
    if (welcomed_ && sent_at_)
      counters_->longest_silence = std::max(counters_->longest_silence, now - *sent_at_);
    sent_at_ = now;
  }

  void PlayKeeper(const core::ToKeeper& effect, std::deque<core::AgentEvent>* events) {
    const auto* start = std::get_if<keeper::StartRank>(&effect.command);
    if (start == nullptr) return;
    ++counters_->started;
    events->push_back(core::FromKeeper{
        effect.job, keeper::Started{start->generation, start->rank, 100'000 + start->rank, 1}});
  }

  const net::ClientOptions options_;
  core::AgentCore core_;
  Counters* const counters_;
  std::unique_ptr<net::ZmqClient> client_;
  bool up_ = false, welcomed_ = false;
  std::optional<Instant> sent_at_;  // over this connection
};

core::AgentConfig AgentConfigOf(int number, const net::KeyPair& keys, const ClusterId& cluster) {
  core::AgentConfig config;
  config.cluster = cluster;
  config.node = NodeId(net::KeyId(keys.public_key));
  config.boot_id = absl::StrCat("boot-", number);
  config.incarnation = Incarnation(absl::StrCat("boot-", number, "-1"));
  config.hostname = absl::StrCat("node-", number);
  config.version = "bench";
  config.inventory.cpus = config.inventory.cores = kRanksEach;
  config.inventory.numa_nodes = 1;
  config.inventory.memory_bytes = uint64_t{16} << 30;
  config.parse_spec = spec::ParseCanonical;
  config.job_hash = [](const spec::JobSpec&) { return std::string("0"); };
  config.make_token = [] { return std::string(32, '0'); };
  return config;
}

// ---------------------------------------------------------------- the client

// Sends without waiting and remembers when.
class LoadClient {
 public:
  explicit LoadClient(net::ClientOptions options) : options_(std::move(options)) {}
  absl::Status Connect() {
    GT_ASSIGN_OR_RETURN(client_, net::ZmqClient::Connect(options_));
    return absl::OkStatus();
  }
  int fd() const { return client_->PollFd(); }
  bool Connected() const { return client_->Connected(); }

  bool Send(core::ClientRequestBody body, std::vector<double>* latencies,
            std::function<void(const core::ClientReply&)> then = nullptr) {
    core::ClientRequest request{net::RandomHex(16), absl::Seconds(60), std::move(body)};
    const std::string bytes = wire::Encode(request);
    if (!client_->Send(bytes).ok()) return false;
    open_[request.id] = {BenchClock().Now(), latencies, std::move(then)};
    return true;
  }

  void Receive() {
    (void)client_->Connected();  // its descriptor is ready until somebody has asked
    while (std::optional<std::string> bytes = client_->Receive()) {
      auto message = wire::Decode(*bytes, wire::Sender::kHead);
      const auto* reply = message.ok() ? std::get_if<core::ClientReply>(&*message) : nullptr;
      const auto it = reply == nullptr ? open_.end() : open_.find(reply->id);
      if (it == open_.end()) continue;
      if (it->second.latencies != nullptr) {
        it->second.latencies->push_back(absl::ToDoubleMilliseconds(BenchClock().Now() - it->second.sent));
      }
      if (!reply->ok && errors_++ == 0) std::fprintf(stderr, "bench_agents: %s\n", reply->error.c_str());
      const auto then = std::move(it->second.then);
      open_.erase(it);
      if (then && reply->ok) then(*reply);
    }
  }
  size_t open() const { return open_.size(); }
  int64_t errors() const { return errors_; }
  void DropOpen() { open_.clear(); }

 private:
  struct Open {
    Instant sent;
    std::vector<double>* latencies;
    std::function<void(const core::ClientReply&)> then;
  };
  const net::ClientOptions options_;
  std::unique_ptr<net::ZmqClient> client_;
  std::map<std::string, Open> open_;
  int64_t errors_ = 0;
};

std::string JobText(const std::string& name, int ranks, const std::string& label) {
  spec::JobSpec job;
  job.name = name;
  job.run = {"train"};
  job.ranks = spec::Range{ranks, ranks};
  job.resources.cpus = 1;
  if (!label.empty()) job.where_labels["pool"] = label;
  return spec::PrintJob(job);
}

// ---------------------------------------------------------------- the run

class AgentsBench {
 public:
  AgentsBench(const Options& options, int agents)
      : options_(options), count_(agents), gtrain_(fs::absolute(options.folder + "/gtrain").string()) {}

  ~AgentsBench() {
    if (head_) head_->Kill(SIGTERM);
  }

  absl::Status Run() {
    GT_RETURN_IF_ERROR(Prepare());
    GT_RETURN_IF_ERROR(Connect());
    GT_RETURN_IF_ERROR(Fill());
    GT_RETURN_IF_ERROR(Load());
    return KillHead();
  }

  const std::vector<Outcome>& outcomes() const { return outcomes_; }

 private:
  absl::Status Prepare() {
    GT_RETURN_IF_ERROR(AllowFilesOf(static_cast<size_t>(count_), "agents"));
    GT_RETURN_IF_ERROR(cluster_.Make(count_));
    head_.emplace(gtrain_, cluster_.files().dir);
    return head_->Start();
  }

  absl::Status Connect() {
    const Instant start = BenchClock().Now();
    context_ = net::MakeClientContext(count_ + 1);
    epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
    net::ClientOptions options;
    options.endpoint = head_->endpoint();
    options.server_public_key = cluster_.files().head.public_key;
    options.context = context_;
    GT_ASSIGN_OR_RETURN(options.keys, net::LoadKeyPair(cluster_.files().admin_key_path()));
    client_ = std::make_unique<LoadClient>(options);
    GT_RETURN_IF_ERROR(client_->Connect());
    Watch(client_->fd(), count_);
    for (int i = 0; i < count_; ++i) {
      options.keys = cluster_.keys()[static_cast<size_t>(i)];
      agents_.push_back(std::make_unique<SimulatedAgent>(
          options, AgentConfigOf(i, options.keys, cluster_.files().cluster), &counters_));
      GT_RETURN_IF_ERROR(agents_.back()->Connect());
      Watch(agents_.back()->fd(), i);
      Turn(absl::ZeroDuration());
    }
    GT_RETURN_IF_ERROR(Until("the agents to be welcomed", [&] { return counters_.welcomed == count_; }));
    Add("all agents welcomed, first start", "s", {absl::ToDoubleSeconds(BenchClock().Now() - start)});
    return absl::OkStatus();
  }

  // Jobs that fill all nodes, a hundred submits in flight.
  absl::Status Fill() {
    if (count_ % kNodesEach != 0)
      return absl::InternalError(absl::StrCat(count_, " nodes are not whole jobs of ", kNodesEach));
    const Instant start = BenchClock().Now();
    int submitted = 0;
    GT_RETURN_IF_ERROR(Until("20,000 ranks to start", [&] {
      while (submitted < count_ && client_->open() < 100) {
        if (!Submit(JobText("holds", kRanksEach * kNodesEach, ""), nullptr, nullptr)) break;
        submitted += kNodesEach;
      }
      return counters_.started >= int64_t{kRanksEach} * count_ && client_->open() == 0;
    }));
    Add("all ranks started", "s", {absl::ToDoubleSeconds(BenchClock().Now() - start)});
    return absl::OkStatus();
  }

  bool Submit(std::string text, std::vector<double>* latencies,
              std::function<void(const core::ClientReply&)> then) {
    core::ClientSubmit submit;
    submit.spec_text = std::move(text);
    submit.run_dir = cluster_.home() + "/runs/{job}";
    return client_->Send(std::move(submit), latencies, std::move(then));
  }

  // Every second operation stops the job that an earlier one submitted.
  void Operate() {
    if (!to_stop_.empty() && (operations_ % 2 == 1)) {
      if (client_->Send(core::ClientStop{JobId(to_stop_.front()), true}, &writes_)) {
        to_stop_.pop_front();
        ++operations_;
      }
      return;
    }
    const bool sent =
        Submit(JobText("waits", 1, "nowhere"), &writes_, [this](const core::ClientReply& reply) {
          const size_t at = reply.json.find("\"job\":\"");
          if (at != std::string::npos)
            to_stop_.push_back(reply.json.substr(at + 7, reply.json.find('"', at + 7) - at - 7));
        });
    if (sent) ++operations_;
  }

  absl::Status Load() {
    const absl::Duration length = absl::Seconds(options_.quick ? 8 : 30);
    const Instant start = BenchClock().Now();
    Instant next_operation = start, next_read = start;
    const double cpu = head_->CpuSeconds(), own_cpu = OwnCpuSeconds();
    const int64_t heartbeats = counters_.heartbeats;
    operations_ = 0;
    while (BenchClock().Now() < start + length) {
      for (; next_operation <= BenchClock().Now(); next_operation = next_operation + kOperationEvery)
        Operate();
      for (; next_read <= BenchClock().Now(); next_read = next_read + kReadEvery) {
        (void)client_->Send(core::ClientStatus{JobId("holds-1")}, &reads_);
      }
      Turn(absl::Milliseconds(2));
    }
    const double seconds = absl::ToDoubleSeconds(BenchClock().Now() - start);
    Add("durable operations", "1/s", {static_cast<double>(writes_.size()) / seconds});
    Add("heartbeats", "1/s", {static_cast<double>(counters_.heartbeats - heartbeats) / seconds});
    Add("durable operation p50", "ms", {Series{writes_}.Median()});
    Add("durable operation p99", "ms", {Series{writes_}.Quantile(0.99)});
    Add("read p50", "ms", {Series{reads_}.Median()});
    Add("read p99", "ms", {Series{reads_}.Quantile(0.99)});
    // The CPU time of the other ends of the same messages, on the same machine, makes runs on different
    // machines comparable.
    Add("head CPU, of one core", "%", {100 * (head_->CpuSeconds() - cpu) / seconds},
        "the agents of this bench", {100 * (OwnCpuSeconds() - own_cpu) / seconds});
    Add("head memory", "MiB", {head_->MemoryMiB("VmRSS:")});
    GT_RETURN_IF_ERROR(Until("open operations to be answered", [&] { return client_->open() == 0; }));
    if (client_->errors() == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(client_->errors(), " requests were refused, so this run has measured refusals"));
  }

  absl::Status KillHead() {
    const double before = head_->MemoryMiB("VmHWM:");  // each head counts its own
    const Instant start = BenchClock().Now();
    head_->Kill(SIGKILL);
    GT_RETURN_IF_ERROR(head_->Start());
    Add("head serves again after SIGKILL", "s", {absl::ToDoubleSeconds(BenchClock().Now() - start)});
    // A death is seen as a loss of its connection first, so who is welcomed now was welcomed by the new head.
    GT_RETURN_IF_ERROR(Until("the agents to notice", [&] { return counters_.welcomed < count_; }));
    GT_RETURN_IF_ERROR(
        Until("half of the agents to be back", [&] { return 2 * counters_.welcomed >= count_; }));
    Add("half of the agents back after SIGKILL", "s", {absl::ToDoubleSeconds(BenchClock().Now() - start)});
    GT_RETURN_IF_ERROR(Until("the agents to be back", [&] { return counters_.welcomed == count_; }));
    Add("all agents back after SIGKILL", "s", {absl::ToDoubleSeconds(BenchClock().Now() - start)});
    // Whatever the new head got wrong would show within the time it takes to call a silent node dead: 20 s
    // for a head that has just been started.
    const Instant settled = start + absl::Seconds(options_.quick ? 25 : 35);
    GT_RETURN_IF_ERROR(Until("the head to settle", [&] { return BenchClock().Now() >= settled; }));
    // This counts from the first agent on: no rank that was started once is ever ended or started again here.
    const int64_t wrong = counters_.ended + counters_.started - int64_t{kRanksEach} * count_;
    Add("ranks ended or started again", "", {static_cast<double>(wrong)});
    Add("head memory, highest of both heads", "MiB", {std::max(before, head_->MemoryMiB("VmHWM:"))});
    Add("longest silence of an agent", "s", {absl::ToDoubleSeconds(counters_.longest_silence)});
    if (counters_.longest_silence < kTooSilent && wrong != 0)
      return absl::InternalError(absl::StrCat(wrong, " ranks were ended or started again, and none may be"));
    if (counters_.longest_silence < kTooSilent) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat("this run proves nothing: the machine was so busy that an agent here said nothing for ",
                     absl::FormatDuration(counters_.longest_silence),
                     ", and a head rightly calls that dead; run it again with the CPUs free"));
  }

  void Watch(int fd, int number) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = static_cast<uint32_t>(number);
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  void Turn(absl::Duration wait) {
    epoll_event events[512];
    const int ready =
        epoll_wait(epoll_.get(), events, 512, static_cast<int>(absl::ToInt64Milliseconds(wait)));
    const Instant now = BenchClock().Now();
    for (int i = 0; i < ready; ++i) {
      const size_t number = events[i].data.u32;
      number < agents_.size() ? agents_[number]->Turn(now) : client_->Receive();
    }
    if (now < next_ticks_) return;
    next_ticks_ = now + absl::Milliseconds(20);
    // Like the real agent's loop, look at each connection now and then whatever the descriptor says.
    const bool all = ++sweeps_ % 10 == 0;
    for (auto& agent : agents_) all || !agent->welcomed() ? agent->Turn(now) : agent->Tick(now);
  }

  absl::Status Until(const char* what, const std::function<bool()>& done) {
    const Instant deadline = BenchClock().Now() + kPhaseDeadline;
    while (!done()) {
      if (BenchClock().Now() > deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat("waited a minute for ", what, ": ", counters_.welcomed, " welcomed, ",
                         counters_.started, " ranks started, ", client_->open(), " operations open"));
      }
      Turn(absl::Milliseconds(5));
    }
    return absl::OkStatus();
  }

  void Add(const std::string& name, const std::string& unit, std::vector<double> samples,
           const std::string& peer = "", std::vector<double> theirs = {}) {
    outcomes_.push_back({name, unit, peer, Series{std::move(samples)}, Series{std::move(theirs)}});
    std::fprintf(stderr, "%-34s %10.4g %s\n", name.c_str(), outcomes_.back().ours.Median(), unit.c_str());
  }

  const Options options_;
  const int count_;
  const std::string gtrain_;
  BenchCluster cluster_;
  std::optional<HeadProcess> head_;
  std::shared_ptr<void> context_;
  UniqueFd epoll_;
  Counters counters_;
  std::vector<std::unique_ptr<SimulatedAgent>> agents_;
  std::unique_ptr<LoadClient> client_;
  std::deque<std::string> to_stop_;
  int64_t operations_ = 0;
  std::vector<double> writes_, reads_;
  Instant next_ticks_;
  int64_t sweeps_ = 0;
  std::vector<Outcome> outcomes_;
};

int Main(const Options& options) {
  AgentsBench bench(options, options.quick ? 300 : 2000);
  const absl::Status status = bench.Run();
  if (!status.ok()) std::fprintf(stderr, "bench_agents: %s\n", status.ToString().c_str());
  return Report(options, "agents", bench.outcomes()) | (status.ok() ? 0 : 1);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
