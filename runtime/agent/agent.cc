// The agent's shell: one thread that polls the head's connection and the keepers, steps AgentCore and
// performs its effects in order. All decisions are in the core. Work that touches the directories and files
// of a job, or asks for the address of a name, may take for ever and is done beside the loop (job_files.h).
#include "runtime/agent/agent.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/logging.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "checkpoint/near/near_folder.h"
#include "checkpoint/near/near_server.h"
#include "job/spec/parse.h"
#include "job/spec/print.h"
#include "net/zmq/client.h"
#include "net/zmq/keys.h"
#include "runtime/agent/job_files.h"
#include "runtime/agent/keeper_set.h"
#include "runtime/agent/membership.h"
#include "runtime/agent/node.h"
#include "runtime/agent/notice_watch.h"
#include "runtime/agent/relay_way.h"
#include "runtime/control/control_client.h"
#include "runtime/core/agent/agent_core.h"
#include "runtime/core/agent/keeper_order.h"
#include "runtime/detect/inventory.h"
#include "runtime/detect/network.h"
#include "runtime/keeper/cgroup.h"
#include "runtime/keeper/posix.h"
#include "runtime/keeper/stacks.h"
#include "runtime/wire/build_version.h"
#include "runtime/wire/codec.h"

extern char** environ;

namespace gtrain::agent {

namespace {

constexpr absl::Duration kJoinPatience = absl::Seconds(30);
constexpr absl::Duration kLetInPatience = absl::Seconds(3);
constexpr absl::Duration kAdoptPatience = absl::Seconds(5);
constexpr absl::Duration kRefusedPatience = absl::Seconds(20);
constexpr absl::Duration kLeavePatience = absl::Seconds(20);
constexpr absl::Duration kFarewellPatience = absl::Seconds(2);
constexpr absl::Duration kWritersPatience =
    absl::Seconds(20);  // of a job that is over, a keeper's 15 s and a bit
constexpr absl::Duration kPortsEvery = absl::Seconds(20);
constexpr absl::Duration kLookEvery = absl::Seconds(1);
constexpr absl::Duration kReconnectEvery = absl::Seconds(1);
constexpr absl::Duration kComplainEvery = absl::Seconds(15);
constexpr absl::Duration kTryNextAfter = absl::Seconds(6);  // a connection takes up to five
constexpr size_t kRefusedMax = 1000;
constexpr int kPortsOffered = 16;
constexpr int kMessagesATurn = 1000;

std::map<std::string, std::string> OwnEnvironment() {
  std::map<std::string, std::string> env;
  for (char** item = environ; *item != nullptr; ++item) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(*item, absl::MaxSplits('=', 1));
    if (pair.first != "GTRAIN_JOIN_TOKEN") env.insert(pair);  // nobody else's business
  }
  return env;
}

class Agent {
 public:
  explicit Agent(const AgentOptions& options) : options_(options), rng_(Rng::FromSystem()) {}
  absl::Status Prepare();
  absl::Status Serve();

 private:
  std::string LockPath() const { return options_.state_dir + "/lock"; }
  absl::Status Lock();
  absl::Status Join();
  absl::Status JoinWith(const net::JoinToken& token);
  absl::Status CheckMembership() const;
  absl::Status Connect();
  void ConnectAnew();
  NodeId Self() const { return options_.node.empty() ? node_ : options_.node; }
  core::AgentConfig Config(int living_keepers, const std::string& keeper_program);
  Incarnation ChooseIncarnation(const std::string& boot_id, int living_keepers);
  absl::Status WaitForKeepers();
  void AwaitFiles();
  void TellKeepers();

  void Turn();
  void Wait();
  void WatchConnection();
  void GiveUpIfRefused();
  // Whether cluster.json says where the head is.
  bool HasMembership() const { return options_.connect == nullptr && options_.head_endpoint.empty(); }
  void LookElsewhere();
  void WarnOfBadAddresses(const Membership& membership);
  void RememberWhereItIs();
  void LookAfterStateDir();
  void ReadHead();
  std::string ListenHost() const;
  void OpenDoor();
  void TurnRelay();
  void LookAtWay();
  void GoDirectly();
  void Prepare(core::StartGeneration start);
  void SayHeadUp();
  void Step(const core::AgentEvent& event);
  void Do(core::ToHead& effect);
  void Do(core::ToKeeper& effect);
  void Do(core::WriteFile& effect);
  void Do(core::ReadLog& effect);
  static core::AgentAnswer AnswerFrom(const core::ReadLog& effect, const ClusterId& cluster);
  void Do(core::ReadStacks& effect);
  void Do(core::LookAtRanks& effect);
  void StartNearServer();
  void Do(core::ShareCopies& effect);
  void Do(core::DropCopies& effect);
  void Do(core::Reconnect&) { reconnect_ = true; }
  void Do(core::Beat&) {
    if (relayed_ != nullptr) relayed_->Beat();
  }
  void Do(core::LetThrough& effect);
  void Do(core::GoThrough& effect);
  void Do(core::Leave& effect);
  void DropCopies(Instant until);

  const AgentOptions options_;
  Rng rng_;
  RealClock clock_;
  UniqueFd lock_, signals_;
  net::KeyPair keys_;
  NodeId node_;
  Membership membership_;
  std::unique_ptr<port::ClientTransport> transport_;
  net::ZmqClient* zmq_ = nullptr;        // of transport_, to ask why there is no connection
  RelayedClient* relayed_ = nullptr;     // of transport_: it leads through another agent
  std::unique_ptr<RelayedClient> next_;  // comes in its place when it works
  core::ConnectVia via_;                 // of next_, else of relayed_
  std::unique_ptr<RelayDoor> door_;      // null: nobody goes through this agent
  std::string why_no_door_;
  absl::Status why_not_;  // of the last Connect
  std::string warned_;    // of addresses in cluster.json
  std::unique_ptr<KeeperSet> keepers_;
  std::optional<core::AgentCore> core_;
  std::unique_ptr<ckpt::NearServer> near_server_;  // null: copies of checkpoints are not shared
  uint64_t near_bytes_max_ = 0;
  std::unique_ptr<NoticeWatch> notices_;  // null: nobody is asked
  JobFiles files_;
  core::KeeperOrder order_;
  // The results of Prepare for the grant that is stepped.
  std::set<JobId> refused_;  // jobs whose run directory was not theirs when they were to start last
  bool connected_ = false;
  bool more_from_head_ = false;  // than one turn takes
  Instant next_ports_, next_complaint_, next_look_, next_reconnect_;
  Instant needed_at_;                                        // when it last had a head or a keeper
  std::vector<core::AgentEvent> later_;                      // made by effects
  std::vector<std::pair<Instant, core::DropCopies>> drops_;  // once more then: a writer may have gone on
  std::optional<absl::Status> leave_;
  bool leave_after_keepers_ = false;
  std::optional<Instant> elsewhere_at_;   // the next address is tried
  std::optional<Instant> refused_since_;  // the head answers, but not to our key
  bool terminated_ = false;
  // Either side has lost a message on the connection that lives; or there is none, not even one that tries.
  bool reconnect_ = false;
};

absl::Status Agent::Lock() {
  GT_RETURN_IF_ERROR(MakeDirs(options_.state_dir));
  absl::StatusOr<UniqueFd> lock = LockFile(LockPath());
  if (absl::IsUnavailable(lock.status())) {
    return absl::FailedPreconditionError(absl::StrCat("another agent is running with the state directory ",
                                                      options_.state_dir,
                                                      ": stop it, or give this one another --dir"));
  }
  GT_RETURN_IF_ERROR(lock.status());
  lock_ = *std::move(lock);
  return absl::OkStatus();
}

// Finds this node's identity and the head: from the command line, else from the file of an earlier join.
absl::Status Agent::Join() {
  GT_ASSIGN_OR_RETURN(keys_, net::LoadOrMakeKeyPair(options_.state_dir + "/node.key"));
  node_ = NodeId(net::KeyId(keys_.public_key));
  for (const std::string& head : options_.heads) GT_RETURN_IF_ERROR(CheckHeadAddress("--head", head));
  membership_ = LoadMembership(options_.state_dir);
  if (options_.connect != nullptr) return absl::OkStatus();
  if (HasMembership()) WarnOfBadAddresses(membership_);
  if (!options_.join_token.empty()) {
    GT_ASSIGN_OR_RETURN(const net::JoinToken token, net::ParseJoinToken(options_.join_token));
    if (token.head_public_key != membership_.head_public_key) GT_RETURN_IF_ERROR(JoinWith(token));
    membership_.Prefer(token.endpoint);
  }
  for (auto at = options_.heads.rbegin(); at != options_.heads.rend(); ++at) membership_.Prefer(*at);
  if ((!options_.join_token.empty() || !options_.heads.empty()) && !membership_.head_public_key.empty())
    GT_RETURN_IF_ERROR(SaveMembership(options_.state_dir, membership_));
  if (!options_.head_endpoint.empty()) membership_.endpoint = options_.head_endpoint;
  if (!options_.head_public_key.empty()) membership_.head_public_key = options_.head_public_key;
  if (!options_.cluster.empty()) membership_.cluster = options_.cluster;
  return CheckMembership();
}

absl::Status Agent::JoinWith(const net::JoinToken& token) {
  const std::string hostname = options_.hostname.empty() ? Hostname() : options_.hostname;
  absl::StatusOr<core::AgentJoined> joined =
      net::JoinCluster(token, keys_.public_key, hostname, kJoinPatience);
  // It may have been done and the answer lost. The head's welcome says which cluster this is, then.
  if (absl::IsPermissionDenied(joined.status()) && net::IsLetIn(token, keys_, kLetInPatience))
    joined = core::AgentJoined{ClusterId(), node_};
  GT_RETURN_IF_ERROR(joined.status());
  membership_ = {token.endpoint, token.head_public_key, joined->cluster, {}, {}};
  GT_RETURN_IF_ERROR(SaveMembership(options_.state_dir, membership_));
  LogInfo("joined cluster ", joined->cluster.value, " as node ", node_.value);
  return absl::OkStatus();
}

absl::Status Agent::CheckMembership() const {
  if (membership_.endpoint.empty() && !membership_.bad.empty() && !membership_.head_public_key.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("no address in ", MembershipPath(options_.state_dir),
                                                      " could be one of a head; say where it is with --head "
                                                      "HOST:PORT"));
  }
  if (membership_.endpoint.empty() || membership_.head_public_key.empty()) {
    return absl::FailedPreconditionError(
        "this node belongs to no cluster yet: start it once with --join FILE, the token in it (gtrain token "
        "create)");
  }
  return absl::OkStatus();
}

absl::Status Agent::Connect() {
  relayed_ = nullptr;
  if (options_.connect != nullptr) {
    GT_ASSIGN_OR_RETURN(transport_, options_.connect());
    return absl::OkStatus();
  }
  net::ClientOptions client;
  client.endpoint = membership_.endpoint;
  client.server_public_key = membership_.head_public_key;
  client.keys = keys_;
  GT_ASSIGN_OR_RETURN(auto connection, net::ZmqClient::Connect(client));
  zmq_ = connection.get();
  transport_ = std::move(connection);
  return absl::OkStatus();
}

// The same boot with living keepers is the same incarnation; anything else is a new one.
Incarnation Agent::ChooseIncarnation(const std::string& boot_id, int living_keepers) {
  const std::string path = options_.state_dir + "/incarnation";
  const std::string before(absl::StripAsciiWhitespace(keeper::ReadSmallFile(path)));
  if (living_keepers > 0 && before.rfind(boot_id + "-", 0) == 0) return Incarnation(before);
  const Incarnation fresh(absl::StrCat(boot_id, "-", net::RandomHex(8)));
  keeper::WriteFileAtomic(path, fresh.value + "\n");
  return fresh;
}

core::AgentConfig Agent::Config(int living_keepers, const std::string& keeper_program) {
  core::AgentConfig config;
  config.cluster = membership_.cluster;
  config.node = Self();
  config.boot_id = BootId();
  config.incarnation = ChooseIncarnation(config.boot_id, living_keepers);
  config.hostname = options_.hostname.empty() ? Hostname() : options_.hostname;
  config.version = wire::kThisBuild.text;
  config.protocol = wire::kThisBuild.protocol;
  config.keeper_protocol = wire::kThisBuild.keeper_protocol;
  config.keeper_program = keeper_program;
  config.inventory = detect::DetectInventory(
      {.cpus = options_.cpus, .fake_gpus = options_.fake_gpus, .fake_model = options_.fake_gpu_model});
  if (!absl::SimpleAtoi(keeper::ReadSmallFile("/proc/sys/kernel/pid_max"), &config.pid_max))
    config.pid_max = 0;
  config.limits_memory = keeper::Cgroup::LimitsMemory();
  config.near_memory = NearMemory(config.node);
  config.near_bytes_max = near_bytes_max_ =
      options_.near_bytes_max.value_or(config.inventory.memory_bytes / 4);
  if (near_bytes_max_ > 0 && options_.share_copies) StartNearServer();
  if (near_server_ != nullptr) {
    config.near_port = near_server_->port();
    config.near_key = keys_.public_key;
  }
  if (options_.connect == nullptr) {
    config.public_key = keys_.public_key;
    if (RelayDoor::WasOpen(options_.state_dir)) OpenDoor();
    if (door_ != nullptr) config.relay_port = door_->port();
  }
  if (!config.near_memory.empty()) {
    for (const std::string& job : ckpt::JobsWithCopies(config.near_memory)) {
      if (wire::ValidId(job)) config.near_left.emplace_back(job);
    }
  }
  config.labels = options_.labels;
  config.own_env = OwnEnvironment();
  config.parse_spec = [](absl::string_view text) { return spec::ParseCanonical(text); };
  config.job_hash = [](const spec::JobSpec& spec) { return spec::JobHash(spec); };
  config.find_program = FindProgram;
  config.make_token = [] { return net::RandomHex(16); };
  config.too_many_ranks = TooManyRanks;
  config.pack_grant = [](const core::GenerationGrant& grant) {
    return wire::Encode(core::StartGeneration{HeadEpoch{}, grant, {}});
  };
  config.unpack_grant = [](const std::string& bytes) -> absl::StatusOr<core::GenerationGrant> {
    GT_ASSIGN_OR_RETURN(core::Message message, wire::Decode(bytes, wire::Sender::kHead));
    if (auto* start = std::get_if<core::StartGeneration>(&message)) return std::move(start->grant);
    return absl::InvalidArgumentError("not a grant");
  };
  config.epoch_path = options_.state_dir + "/head-epoch";
  const std::vector<std::string> words = absl::StrSplit(keeper::ReadSmallFile(config.epoch_path), '\n');
  if (words.size() >= 3 && words[2] == config.cluster.value &&
      absl::SimpleAtoi(words[0], &config.epoch.value)) {
    config.epoch_proof = words[1];
  }
  return config;
}

std::string Agent::ListenHost() const {
  const std::string& address = options_.address;
  return address.empty() ? "*" : absl::StrContains(address, ':') ? absl::StrCat("[", address, "]") : address;
}

// Listens on the port of the agent before, if it is free: ranks that run know that one.
void Agent::StartNearServer() {
  const std::string path = options_.state_dir + "/near-port";
  const std::string host = ListenHost();
  int before = 0;
  if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(keeper::ReadSmallFile(path)), &before)) before = 0;
  auto server = ckpt::NearServer::Start(absl::StrCat(host, ":", before), keys_);
  if (!server.ok() && before != 0) server = ckpt::NearServer::Start(absl::StrCat(host, ":0"), keys_);
  if (!server.ok()) {
    LogWarning("copies of checkpoints are not shared with other machines: ", server.status().message());
    return;
  }
  near_server_ = *std::move(server);
  keeper::WriteFileAtomic(path, absl::StrCat(near_server_->port(), "\n"));
}

absl::Status Agent::Prepare() {
  sigset_t mask;
  sigemptyset(&mask);
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) sigaddset(&mask, signal);
  sigprocmask(SIG_BLOCK, &mask, nullptr);
  signal(SIGXFSZ, SIG_IGN);  // a write beyond `ulimit -f` is an error like that of a full disk
  signals_.reset(signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC));
  GT_RETURN_IF_ERROR(Lock());
  GT_RETURN_IF_ERROR(Join());
  std::string binary = options_.keeper_binary;
  if (binary.empty()) {
    std::error_code error;
    binary = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "gtrain-keeper";
  }
  keepers_ = std::make_unique<KeeperSet>(options_.state_dir + "/keepers", binary, options_.keeper_lease);
  GT_ASSIGN_OR_RETURN(const int living, keepers_->AdoptAll(clock_.Now()));
  core_.emplace(Config(living, binary));
  Step(core::FreePorts{ProbeFreePorts(kPortsOffered, &rng_)});
  next_ports_ = clock_.Now() + kPortsEvery;
  next_complaint_ = clock_.Now() + kComplainEvery;
  needed_at_ = clock_.Now();
  GT_ASSIGN_OR_RETURN(notices_, WatchNotices(options_.notices));
  // The generations of the keepers must be in the first hello, and the leftovers of a dead keeper must be
  // gone before it.
  const Instant deadline = clock_.Now() + kAdoptPatience;
  while (keepers_->busy() && clock_.Now() < deadline) Turn();
  for (int i = 0; living > 0 && i < 5; ++i) Turn();
  if (const auto via = LoadVia(options_.state_dir); via && options_.connect == nullptr) {
    core::GoThrough before{*via};
    Do(before);
    if (next_ != nullptr) return absl::OkStatus();  // and directly where that fails
  }
  why_not_ = Connect();
  if (why_not_.ok() || !HasMembership() || membership_.others.empty()) return why_not_;
  LogWarning("no connection to the head at ", membership_.endpoint, ": ", why_not_.message());
  reconnect_ = true;
  return absl::OkStatus();
}

absl::Status Agent::Serve() {
  while (!leave_ && !terminated_) Turn();
  if (terminated_) {
    TellKeepers();
    LogInfo("the agent ends; ranks keep running for the next one");
    return absl::OkStatus();
  }
  if (!leave_after_keepers_ && !leave_->ok()) return *leave_;
  const absl::Status gone = WaitForKeepers();
  DropCopies({INT64_MAX});
  AwaitFiles();  // a drop that comes later would make the folder anew
  if (const std::string near = NearMemory(node_); !near.empty()) ckpt::RemoveNearFolder(near);
  return leave_->ok() ? gone : *leave_;
}

// Makes sure that the keepers hear the head's orders, whatever ends this agent next: a stop in particular,
// which might not be repeated.
void Agent::TellKeepers() {
  const Instant deadline = clock_.Now() + kFarewellPatience;
  while (keepers_->unsent() && clock_.Now() < deadline) {
    (void)keepers_->Poll(clock_.Now());  // their reports are repeated to the next agent
    std::vector<pollfd> fds;
    keepers_->AddPollFds(&fds);
    if (keepers_->unsent()) poll(fds.data(), fds.size(), 10);
  }
}

absl::Status Agent::WaitForKeepers() {
  const Instant deadline = clock_.Now() + kLeavePatience;
  while (!keepers_->empty() && clock_.Now() < deadline) Turn();
  return keepers_->empty() ? absl::OkStatus() : absl::InternalError("some keepers did not leave in time");
}

void Agent::AwaitFiles() {
  const Instant deadline = clock_.Now() + kFarewellPatience;
  while (!files_.idle() && clock_.Now() < deadline) {
    pollfd done{files_.fd(), POLLIN, 0};
    poll(&done, 1, 10);
    (void)files_.Take();  // what would follow is over
  }
}

void Agent::Wait() {
  std::vector<pollfd> fds = {{signals_.get(), POLLIN, 0}};
  if (transport_ != nullptr && transport_->PollFd() >= 0) fds.push_back({transport_->PollFd(), POLLIN, 0});
  fds.push_back({files_.fd(), POLLIN, 0});
  keepers_->AddPollFds(&fds);
  if (notices_ != nullptr) fds.push_back({notices_->fd(), POLLIN, 0});
  if (door_ != nullptr) fds.push_back({door_->relay().fd(), POLLIN, 0});
  if (next_ != nullptr) fds.push_back({next_->PollFd(), POLLIN, 0});
  // A keeper is there within milliseconds, and its ranks wait for it. A connection that is not there is tried
  // again while it is looked at. Else what happens wakes the agent, and its core says what is due.
  const int idle_ms = connected_ && next_ == nullptr ? 1000 : 100;
  absl::Duration wait = absl::Milliseconds(keepers_->starting() ? 1 : keepers_->busy() ? 10 : idle_ms);
  if (const auto next = core_->NextDeadline()) {
    wait = std::clamp(absl::Ceil(*next - clock_.Now(), absl::Milliseconds(1)), absl::Milliseconds(1), wait);
  }
  if (door_ != nullptr) {
    if (const auto beat = door_->relay().NextDeadline())
      wait = std::clamp(absl::Ceil(*beat - clock_.Now(), absl::Milliseconds(1)), absl::Milliseconds(1), wait);
  }
  if (!later_.empty() || more_from_head_) wait = absl::ZeroDuration();
  poll(fds.data(), fds.size(), static_cast<int>(absl::ToInt64Milliseconds(wait)));
  signalfd_siginfo info;
  while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
    terminated_ = terminated_ || info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT;
  }
}

void Agent::Turn() {
  Wait();
  for (const JobFiles::Done& done : files_.Take()) done();
  for (const core::AgentEvent& event : keepers_->Poll(clock_.Now())) Step(event);
  if (reconnect_ && clock_.Now() >= next_reconnect_) ConnectAnew();
  LookAtWay();
  if (transport_ != nullptr || reconnect_) WatchConnection();
  if (door_ != nullptr) TurnRelay();
  if (transport_ != nullptr) ReadHead();
  if (clock_.Now() >= next_ports_) {
    next_ports_ = clock_.Now() + kPortsEvery;
    Step(core::FreePorts{ProbeFreePorts(kPortsOffered, &rng_)});
  }
  LookAfterStateDir();
  DropCopies(clock_.Now());
  if (notices_ != nullptr) {
    if (std::optional<core::NodeNotice> said = notices_->Take()) Step(core::CloudSays{*std::move(said)});
  }
  std::vector<core::AgentEvent> events;
  events.swap(later_);
  for (const core::AgentEvent& event : events) Step(event);
  Step(core::AgentTick{});
}

// The old connection goes with all that waits in it; its core says the rest again behind the next welcome.
// Where none can be made, LookElsewhere goes on to the next address.
void Agent::ConnectAnew() {
  if (transport_ != nullptr && connected_)
    LogWarning("a message was lost between this agent and the head: connects anew");
  next_reconnect_ = clock_.Now() + kReconnectEvery;
  if (relayed_ != nullptr) {
    reconnect_ = false;
    return relayed_->Renew();
  }
  zmq_ = nullptr;
  transport_.reset();
  if (std::exchange(connected_, false)) Step(core::HeadDown{});
  why_not_ = Connect();
  reconnect_ = !why_not_.ok();
}

void Agent::WatchConnection() {
  const bool now = transport_ != nullptr && transport_->Connected();
  if (now || !keepers_->empty()) needed_at_ = clock_.Now();
  if (options_.leave_without_head && clock_.Now() - needed_at_ >= *options_.leave_without_head && !leave_) {
    LogInfo("no head, no job: the agent ends");
    leave_ = absl::OkStatus();
  }
  if (now != connected_) {
    connected_ = now;
    if (now) {
      if (relayed_ == nullptr) RememberWhereItIs();
      SayHeadUp();
    } else {
      LogWarning("lost the connection to the head; ranks keep running, trying again");
      Step(core::HeadDown{});
    }
  }
  GiveUpIfRefused();
  LookElsewhere();
  if (connected_ || clock_.Now() < next_complaint_) return;
  next_complaint_ = clock_.Now() + kComplainEvery;
  const absl::Status why = zmq_ == nullptr ? why_not_ : zmq_->status();
  LogWarning("no connection to the head at ", membership_.endpoint, why.ok() ? "" : ": ", why.message());
}

// The head may have moved to another of the addresses in the file, which a person may change meanwhile. A
// head that answers proves its key.
void Agent::LookElsewhere() {
  if (!HasMembership() || relayed_ != nullptr) return;
  const Instant now = clock_.Now();
  if (connected_) return elsewhere_at_.reset();
  // All agents lose a head at once; they do not all look at the next address at once.
  if (elsewhere_at_ && now < *elsewhere_at_) return;
  const bool first = !elsewhere_at_;
  elsewhere_at_ = now + kTryNextAfter + rng_.Unit() * kTryNextAfter / 3;
  if (first) return;
  Membership file = LoadMembership(options_.state_dir);
  if (file.head_public_key.empty()) file = membership_;  // damaged, or just being written
  if (file.head_public_key != membership_.head_public_key) return;
  WarnOfBadAddresses(file);
  const std::string before = membership_.endpoint;
  for (const std::string& next : file.After(before)) {
    membership_.endpoint = next;
    why_not_ = Connect();
    if (why_not_.ok()) {
      reconnect_ = false;
      LogInfo("no head at ", before, ": looking at ", next);
      membership_.others = file.Addresses();
      std::erase(membership_.others, next);
      return;
    }
    LogWarning(next, " in ", MembershipPath(options_.state_dir), ": ", why_not_.message());
  }
  membership_.endpoint = before;
}

// ---------------------------------------------------------------- through other agents

void Agent::OpenDoor() {
  auto door = RelayDoor::Open(options_.state_dir, ListenHost(), keys_);
  if (door.ok()) {
    door_ = *std::move(door);
  } else {
    why_no_door_ = std::string(door.status().message());
    LogWarning("other agents cannot reach the head through this one: ", why_no_door_,
               "; the head leads them elsewhere, and asks again when this agent has started anew");
  }
}

void Agent::Do(core::LetThrough& effect) {
  core::RelayReady ready{0, "it reaches the head through another agent itself"};
  if (relayed_ == nullptr) {
    if (door_ == nullptr) OpenDoor();
    ready = {door_ == nullptr ? 0 : door_->port(), why_no_door_};
  }
  if (ready.port != 0) {
    next_.reset();
    door_->Admit(effect.children, clock_.Now());
  }
  core::ToHead reply{ready};
  Do(reply);
}

void Agent::Do(core::GoThrough& effect) {
  if (relayed_ != nullptr && via_.endpoint == effect.via.endpoint) return;
  auto next = ConnectThrough(effect.via, Self(), keys_, membership_.head_public_key, rng_.Unit());
  if (!next.ok())
    return LogWarning("the head is not reached through ", effect.via.endpoint, ": ", next.status().message(),
                      "; this agent stays as it is connected");
  next_ = *std::move(next);
  via_ = effect.via;
}

// What children say goes on to the head at once. Where that is lost, they are told.
void Agent::TurnRelay() {
  Relay& relay = door_->relay();
  relay.SetHead(connected_ && relayed_ == nullptr);
  for (const core::RelayedUp& up : relay.Turn(clock_.Now())) {
    const absl::Status sent =
        transport_ == nullptr ? absl::UnavailableError("no connection") : transport_->Send(wire::Encode(up));
    if (sent.ok()) continue;
    LogWarning("messages of other agents to the head were lost: ", sent.message(),
               "; they are told, and say them again");
    relay.SetHead(false);
    reconnect_ = reconnect_ || absl::IsResourceExhausted(sent);
    return;
  }
}

// The way through another agent replaces the direct one once the head has answered over it, and the direct
// one comes back when it fails.
void Agent::LookAtWay() {
  if (next_ != nullptr) {
    next_->Turn();
    (void)next_->Receive();  // the answer to its opening; the head says nothing else before a hello
    if (next_->Connected()) {
      LogInfo("reaches the head through ", via_.relay.value, " at ", via_.endpoint);
      if (std::exchange(connected_, false)) Step(core::HeadDown{});
      zmq_ = nullptr;
      relayed_ = next_.get();
      transport_ = std::move(next_);
      reconnect_ = false;
      SaveVia(options_.state_dir, via_);
    } else if (next_->Failed()) {
      LogWarning("the head is not reached through ", via_.relay.value, " at ", via_.endpoint,
                 ": connects directly; can this machine reach that port?");
      next_.reset();
      SaveVia(options_.state_dir, std::nullopt);
      if (transport_ == nullptr) reconnect_ = true;
    }
  }
  if (relayed_ != nullptr && relayed_->Failed()) GoDirectly();
}

void Agent::GoDirectly() {
  LogWarning("the head is not reached through ", via_.relay.value, " at ", via_.endpoint,
             " any more: connects directly; ranks keep running");
  SaveVia(options_.state_dir, std::nullopt);
  transport_.reset();
  if (std::exchange(connected_, false)) Step(core::HeadDown{});
  why_not_ = Connect();
  reconnect_ = !why_not_.ok();
}

// Once for the same ones.
void Agent::WarnOfBadAddresses(const Membership& membership) {
  const std::string warning = membership.Warning(MembershipPath(options_.state_dir));
  if (!warning.empty() && warning != warned_) LogWarning(warning);
  warned_ = warning;
}

// Looked at first after the next start. Whatever else stands in the file by now stays.
void Agent::RememberWhereItIs() {
  if (!HasMembership()) return;
  Membership file = LoadMembership(options_.state_dir);
  const bool known = file.endpoint == membership_.endpoint && !file.head_public_key.empty();
  if (file.head_public_key.empty()) file = membership_;
  if (file.head_public_key != membership_.head_public_key) return;  // somebody means it for another cluster
  file.Prefer(membership_.endpoint);
  membership_.others = file.others;
  if (known) return;
  LogInfo("the head is at ", membership_.endpoint, " now");
  const absl::Status saved = SaveMembership(options_.state_dir, file);
  if (!saved.ok()) LogWarning("where the head is could not be kept: ", saved.message());
}

// A key that was revoked while the agent was away gets no other answer than this. It may also be about to be
// put on the list, and a machine in between could feign the answer: hence the patience, and ranks are left to
// their keepers.
void Agent::GiveUpIfRefused() {
  if (zmq_ == nullptr || connected_ || !zmq_->KeyRefused()) return refused_since_.reset();
  if (!refused_since_) refused_since_ = clock_.Now();
  if (leave_ || clock_.Now() - *refused_since_ < kRefusedPatience) return;
  leave_ = absl::PermissionDeniedError(
      absl::StrCat("the head at ", membership_.endpoint, " has refused the key of this node (", node_.value,
                   ") for ", absl::FormatDuration(kRefusedPatience),
                   ": it was revoked, or never joined. Remove node.key and cluster.json in ",
                   options_.state_dir, " and join as a new node with a token of `gtrain token create`"));
}

// Without its directory this agent cannot be followed by another, and without its lock it could be doubled.
// Keepers that still have their directories wait for the next agent; the others end their ranks when they are
// alone.
void Agent::LookAfterStateDir() {
  if (clock_.Now() < next_look_ || leave_) return;
  next_look_ = clock_.Now() + kLookEvery;
  if (LeadsTo(LockPath(), lock_.get())) return;
  leave_ = absl::FailedPreconditionError(absl::StrCat(
      "the state directory ", options_.state_dir,
      " of this agent, or the lock in it, was removed or replaced while it ran, so the agent ends. "
      "If node.key is gone too, so are the ranks here: join again with a token of `gtrain token "
      "create`, and have the old node (",
      node_.value, ") forgotten with `gtrain node revoke`"));
}

// The head may be known by a name, and the name server may not answer.
void Agent::SayHeadUp() {
  order_.Connected();
  const bool relayed = relayed_ != nullptr;
  if (!options_.address.empty()) return Step(core::HeadUp{options_.address, relayed});
  const bool posted =
      files_.Post(JobId(), [this, endpoint = membership_.endpoint, relay = relayed ? via_.endpoint : "",
                            relayed, number = order_.connection()] {
        std::string address = LocalAddressTowards(endpoint);
        // The head sees no socket of a child; towards the relay there is one at least.
        if (address.empty() && relayed) address = LocalAddressTowards(relay);
        return [this, number, relayed, address = std::move(address)] {
          if (connected_ && number == order_.connection()) Step(core::HeadUp{address, relayed});
        };
      });
  if (!posted) Step(core::HeadUp{"", relayed});
}

// The core starts ranks from what was read and made here before.
void Agent::Prepare(core::StartGeneration start) {
  const JobId job = start.grant.job;
  const bool fresh = start.grant.generation.value == 1 || refused_.contains(job);
  const bool posted = files_.Post(
      job,
      [this, number = order_.connection(), cluster = membership_.cluster, self = Self(), fresh,
       start = std::move(start)]() mutable -> JobFiles::Done {
        core::StartFacts facts;
        const core::GenerationGrant& grant = start.grant;
        const absl::StatusOr<spec::JobSpec> spec = spec::ParseCanonical(grant.spec_text);
        for (const auto& [name, reference] :
             spec.ok() ? spec->secrets : std::map<std::string, spec::SecretRef>()) {
          if (!reference.file.empty()) facts.secrets.emplace(reference.file, ReadSecret(reference.file));
        }
        facts.run_dir = MakeRunDir(grant, cluster, self, fresh);
        const bool first_is_here = !grant.ranks.empty() && grant.ranks[0].node == self;
        facts.network = detect::DetectNetwork();
        facts.port_is_free = !first_is_here || grant.master_port <= 0 || PortIsFree(grant.master_port);
        return [this, number, start = std::move(start), facts = std::move(facts)]() mutable {
          if (!order_.GrantHolds(number)) return;
          refused_.erase(start.grant.job);
          if (absl::IsFailedPrecondition(facts.run_dir) && refused_.size() < kRefusedMax)
            refused_.insert(start.grant.job);
          Step(core::FromHead{std::move(start), std::move(facts)});
        };
      });
  if (!posted) LogWarning("no room to start ", job.value, ": too many file systems of jobs do not answer");
}

void Agent::ReadHead() {
  for (int i = 0; i < kMessagesATurn; ++i) {
    const auto payload = transport_->Receive();
    more_from_head_ = payload.has_value();
    if (!payload) return;
    auto message = wire::Decode(*payload, wire::Sender::kHead);
    if (!message.ok()) {
      LogWarning("dropped a message of the head: ", message.status().message());
      continue;
    }
    if (const auto* down = std::get_if<core::RelayedDown>(&*message)) {
      if (door_ != nullptr) door_->relay().OnDown(*down);
      continue;
    }
    const auto* welcome = std::get_if<core::AgentWelcome>(&*message);
    if (welcome != nullptr && membership_.cluster.empty()) membership_.cluster = welcome->cluster;
    if (auto* start = std::get_if<core::StartGeneration>(&*message)) {
      Prepare(std::move(*start));
    } else {
      Step(core::FromHead{*std::move(message)});
    }
  }
}

void Agent::Step(const core::AgentEvent& event) {
  if (const auto* lost = std::get_if<core::KeeperLost>(&event)) order_.KeeperLost(lost->job);
  core::AgentStep step = core_->Step(event, clock_.Now());
  if (!step.why.empty()) LogInfo(step.why);
  for (core::AgentEffect& effect : step.effects) {
    std::visit([this](auto& value) { Do(value); }, effect);
  }
}

void Agent::Do(core::ToHead& effect) {
  if (transport_ == nullptr) return;
  const auto* beat = std::get_if<core::AgentHeartbeat>(&effect.message);
  const bool waits = relayed_ != nullptr && beat != nullptr && beat->changed.empty();
  const std::string bytes = wire::Encode(effect.message);
  const absl::Status sent = waits ? relayed_->SendLater(bytes) : transport_->Send(bytes);
  if (sent.ok()) return;
  LogWarning("not sent: ", wire::KindName(effect.message), ": ", sent.message());
  // One that is too long would be so again, and behind a connection that is lost all is told anew anyway.
  if (absl::IsResourceExhausted(sent)) reconnect_ = true;
}

void Agent::Do(core::ToKeeper& effect) {
  const core::KeeperOrder::Way way = order_.Send(effect, files_.Waits(effect.job), keepers_->Has(effect.job));
  if (way.now) keepers_->Send(effect.job, effect.command, clock_.Now());
  if (!way.ticket) return;
  const JobId job = effect.job;
  const bool posted =
      files_.Post(job, [this, ticket = *way.ticket, effect = std::move(effect)]() mutable -> JobFiles::Done {
        return [this, ticket, effect = std::move(effect)] {
          if (order_.Passes(effect, ticket)) keepers_->Send(effect.job, effect.command, clock_.Now());
        };
      });
  if (!posted) LogWarning("ranks of ", job.value, " are not started: too much waits for its file system");
}

void Agent::Do(core::WriteFile& effect) {
  const JobId job = effect.job;
  auto write = [effect = std::move(effect)]() -> JobFiles::Done {
    if (!keeper::WriteFileAtomic(effect.path, effect.data))
      LogWarning("cannot write ", effect.path, ": ", strerror(errno));
    return [] {};
  };
  if (job.empty()) {
    write();
  } else if (!files_.Post(job, std::move(write))) {
    LogWarning("not written, the file system of ", job.value, " does not answer");
  }
}

void Agent::Do(core::ReadLog& effect) {
  const uint64_t query = effect.query;
  const JobId job = effect.job;
  const bool posted =
      files_.Post(job, [this, cluster = membership_.cluster, effect = std::move(effect)]() -> JobFiles::Done {
        return [this, answer = AnswerFrom(effect, cluster)] {
          core::ToHead reply{answer};
          Do(reply);
        };
      });
  if (posted) return;
  core::ToHead reply{
      core::AgentAnswer{query, false, "the file system of the job's run directory does not answer", 0, true}};
  Do(reply);
}

core::AgentAnswer Agent::AnswerFrom(const core::ReadLog& effect, const ClusterId& cluster) {
  const absl::Status ours = CheckRunDirOfLog(effect.path, cluster, effect.job);
  const absl::StatusOr<LogPiece> piece =
      ours.ok() ? ReadLogPiece(effect.path, effect.offset, effect.bytes_max) : ours;
  std::error_code ignored;
  core::AgentAnswer answer;
  answer.query = effect.query;
  if (piece.ok()) {
    answer.text = piece->text;
    answer.next_offset = piece->next_offset;
    answer.end = effect.ended && piece->at_end;
  } else if (absl::IsNotFound(piece.status()) &&
             (!effect.ended ||
              std::filesystem::exists(std::filesystem::path(effect.path).parent_path(), ignored))) {
    answer.next_offset = effect.offset;  // nothing was written: the first byte makes the file
    answer.end = effect.ended;
  } else {
    answer.ok = false;
    answer.text = std::string(piece.status().message());
    answer.end = true;
  }
  return answer;
}

void Agent::Do(core::ReadStacks& effect) {
  core::ToHead reply{core::AgentAnswer{effect.query, true, keeper::KernelStacks(effect.pid), 0, true}};
  Do(reply);
}

void Agent::Do(core::LookAtRanks& effect) {
  later_.push_back(core::RanksSeen{effect.job, effect.generation, LookAtProcesses(effect.ranks)});
}

void Agent::Do(core::ShareCopies& effect) {
  if (near_server_ == nullptr) return;
  const absl::StatusOr<net::KeyPair> keys = net::KeyPairOfHex(effect.secret);
  if (!keys.ok()) {
    LogWarning("copies of checkpoints of ", effect.job.value, " are not shared: ", keys.status().message());
    return;
  }
  near_server_->Allow(effect.job.value, keys->public_key, effect.folder, near_bytes_max_);
}

void Agent::Do(core::DropCopies& effect) {
  if (near_server_ != nullptr) near_server_->Forbid(effect.job.value);
  drops_.push_back({clock_.Now(), effect});
  drops_.push_back({clock_.Now() + kWritersPatience, std::move(effect)});
  DropCopies(clock_.Now());
}

void Agent::DropCopies(Instant until) {
  for (size_t i = 0; i < drops_.size();) {
    if (drops_[i].first > until) {
      ++i;
      continue;
    }
    core::DropCopies drop = std::move(drops_[i].second);
    drops_.erase(drops_.begin() + static_cast<ptrdiff_t>(i));
    const JobId job = drop.job;
    const bool posted = files_.Post(job, [drop = std::move(drop)]() -> JobFiles::Done {
      const absl::Status dropped = ckpt::DropNearCopies(drop.folder, drop.job.value);
      if (!dropped.ok())
        LogWarning("copies of checkpoints of ", drop.job.value, " stay: ", dropped.message());
      return [] {};
    });
    if (!posted) LogWarning("copies of checkpoints of ", job.value, " stay: their folder does not answer");
  }
}

void Agent::Do(core::Leave& effect) {
  if (leave_) return;
  leave_ = effect.status;
  leave_after_keepers_ = effect.after_keepers;
}

}  // namespace

absl::Status RootMayRunRanks(bool root, bool local, bool container, bool allow_root) {
  if (!root || local || container || allow_root) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "an agent of root runs what users submit as root. Start it as a user of its own (docs/security.md), or "
      "in a container, or say --allow-root");
}

absl::StatusOr<std::string> NodePublicKey(const std::string& state_dir) {
  GT_RETURN_IF_ERROR(MakeDirs(state_dir));
  GT_ASSIGN_OR_RETURN(const net::KeyPair keys, net::LoadOrMakeKeyPair(state_dir + "/node.key"));
  return keys.public_key;
}

absl::Status RunAgent(const AgentOptions& options) {
  Agent agent(options);
  GT_RETURN_IF_ERROR(agent.Prepare());
  return agent.Serve();
}

}  // namespace gtrain::agent
