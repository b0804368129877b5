// A real head process on loopback, a scripted agent and a client. Every wait is for a condition with a
// deadline.
#include "runtime/head/head.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/daemon.h"
#include "base/file.h"
#include "base/power_cut_fake.h"
#include "base/test_folder.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "job/spec/parse.h"
#include "net/zmq/key_registry.h"
#include "runtime/control/cluster_dir.h"
#include "runtime/control/control_client.h"
#include "runtime/head/rescue.h"
#include "runtime/store/rocks_store.h"
#include "runtime/wire/codec.h"
#include "runtime/wire/record_codec.h"

namespace gtrain::head {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(60);

constexpr char kDirVariable[] = "GTRAIN_TEST_HEAD_DIR";
constexpr char kListenVariable[] = "GTRAIN_TEST_HEAD_LISTEN";
constexpr char kFaultVariable[] = "GTRAIN_TEST_HEAD_FAULT";  // a file: once it is there, a sync fails

// HeadProcess runs this program again, with only this test.
TEST(HeadChild, Serve) {
  const char* dir = std::getenv(kDirVariable);
  if (dir == nullptr) GTEST_SKIP() << "only for HeadProcess";
  std::optional<PowerCut> disk;
  std::thread fault;
  if (const char* file = std::getenv(kFaultVariable)) {
    disk.emplace(dir);
    fault = std::thread([&disk, file] {
      while (access(file, F_OK) != 0) poll(nullptr, 0, 10);
      disk->FailNextSync(EIO);
      unlink(file);
    });
  }
  HeadOptions options{.cluster_dir = dir, .listen = {std::getenv(kListenVariable)}, .local = true};
  options.parse_job = spec::ParseCanonical;
  const absl::Status status = RunHead(options);
  if (!status.ok()) fprintf(stderr, "head: %s\n", status.ToString().c_str());
  _exit(status.ok() ? 0 : 1);
}

// The head as a process of its own, so that kill -9 is what it is in life.
class HeadProcess {
 public:
  explicit HeadProcess(std::string dir, const std::string& listen = "127.0.0.1:0",
                       const std::string& fault = "")
      : dir_(std::move(dir)) {
    unlink((dir_ + "/endpoint.json").c_str());
    std::vector<std::string> words = {absl::StrCat(kDirVariable, "=", dir_),
                                      absl::StrCat(kListenVariable, "=", listen)};
    if (!fault.empty()) words.push_back(absl::StrCat(kFaultVariable, "=", fault));
    std::vector<char*> environment;
    for (std::string& word : words) environment.push_back(word.data());
    for (char** e = environ; *e != nullptr; ++e) environment.push_back(*e);
    environment.push_back(nullptr);
    char name[] = "head_test", filter[] = "--gtest_filter=HeadChild.Serve";
    char* arguments[] = {name, filter, nullptr};
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // the test's main thread forks, so this is about the process
    if (getppid() == parent) execve("/proc/self/exe", arguments, environment.data());
    _exit(9);
  }
  ~HeadProcess() { End(SIGKILL); }

  // Its exit status as waitpid gives it; -1 when it does not end in time.
  int End(int signal) {
    if (pid_ <= 0) return status_;
    if (signal != 0) kill(pid_, signal);
    RealClock clock;
    const Instant deadline = clock.Now() + kPatience;
    while (waitpid(pid_, &status_, WNOHANG) == 0) {
      if (clock.Now() > deadline) return -1;
      poll(nullptr, 0, 10);
    }
    pid_ = -1;
    return status_;
  }
  std::optional<net::Endpoint> WaitServing() {
    RealClock clock;
    for (const Instant deadline = clock.Now() + kPatience; clock.Now() < deadline; poll(nullptr, 0, 20)) {
      absl::StatusOr<net::Endpoint> endpoint = net::ReadEndpoint(dir_ + "/endpoint.json");
      if (endpoint.ok()) return *endpoint;
      if (pid_ > 0 && waitpid(pid_, &status_, WNOHANG) == pid_) {
        pid_ = -1;
        return std::nullopt;
      }
    }
    return std::nullopt;
  }
  pid_t pid() const { return pid_; }

 private:
  const std::string dir_;
  pid_t pid_ = -1;
  int status_ = 0;
};

// An agent that says what it is told to say.
class FakeAgent {
 public:
  FakeAgent(const net::Endpoint& head, const net::KeyPair& keys)
      : transport_(*net::ZmqClient::Connect(
            {.endpoint = head.endpoint, .server_public_key = head.head_public_key, .keys = keys})) {}

  void Hello(const ClusterId& cluster, std::vector<core::HeldGeneration> held = {}) {
    core::AgentHello hello{.cluster = cluster,
                           .incarnation = Incarnation("boot-1"),
                           .boot_id = "boot",
                           .hostname = "fake",
                           .address = "127.0.0.1",
                           .version = "test",
                           .inventory = {.cpus = 8, .cores = 8, .numa_nodes = 1, .memory_bytes = 1ull << 34},
                           .free_ports = {21001, 21002, 21003},
                           .held = std::move(held)};
    RealClock clock;
    const Instant deadline = clock.Now() + kPatience;
    while (!transport_->Connected() && clock.Now() < deadline) poll(nullptr, 0, 10);
    Send(hello);
  }
  void Send(const core::Message& message) { EXPECT_TRUE(transport_->Send(wire::Encode(message)).ok()); }

  // The next message of kind T; others are answered or skipped, heartbeats go on meanwhile.
  template <class T>
  std::optional<T> Expect() {
    RealClock clock;
    const Instant deadline = clock.Now() + kPatience;
    Instant beat = clock.Now();
    while (clock.Now() < deadline) {
      while (std::optional<std::string> payload = transport_->Receive()) {
        absl::StatusOr<core::Message> message = wire::Decode(*payload, wire::Sender::kHead);
        EXPECT_TRUE(message.ok()) << message.status();
        if (T* wanted = std::get_if<T>(&*message)) return *wanted;
      }
      if (clock.Now() >= beat) {
        (void)transport_->Send(wire::Encode(core::AgentHeartbeat{++sequence_, {}, {21001, 21002}}));
        beat = clock.Now() + absl::Milliseconds(500);
      }
      pollfd fd{transport_->PollFd(), POLLIN, 0};
      poll(&fd, 1, 100);
    }
    return std::nullopt;
  }

 private:
  std::unique_ptr<net::ZmqClient> transport_;
  uint64_t sequence_ = 0;
};

class HeadTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto files = net::InitCluster(dir_);
    ASSERT_TRUE(files.ok()) << files.status();
    files_ = *files;
    admin_ = *net::LoadKeyPair(files_.admin_key_path());
    ASSERT_TRUE(
        net::AddAllowedKey(files_.authorized_path(), {core::Role::kNode, node_.public_key, "fake"}).ok());
  }
  void Start(const std::string& fault = "") {
    head_ = std::make_unique<HeadProcess>(dir_, "127.0.0.1:0", fault);
    std::optional<net::Endpoint> endpoint = head_->WaitServing();
    ASSERT_TRUE(endpoint.has_value());
    endpoint_ = *endpoint;
    client_ = Client(admin_);
  }
  std::unique_ptr<net::ControlClient> Client(const net::KeyPair& keys) {
    return *net::ControlClient::Connect(
        {.endpoint = endpoint_.endpoint, .server_public_key = endpoint_.head_public_key, .keys = keys});
  }
  json Ask(core::ClientRequestBody body) {
    absl::StatusOr<core::ClientReply> reply = client_->Call(std::move(body), kPatience);
    EXPECT_TRUE(reply.ok()) << reply.status();
    if (!reply.ok()) return {};
    EXPECT_TRUE(reply->ok) << reply->error;
    return json::parse(reply->json, nullptr, false);
  }
  json Job(const JobId& job) { return Ask(core::ClientStatus{job}).at("jobs").at(0); }
  JobId Submit(std::string id = "") {
    core::ClientRequest request{.id = std::move(id)};
    request.body = core::ClientSubmit{.spec_text = kSpec, .run_dir = dir_ + "/run"};
    absl::StatusOr<core::ClientReply> reply = client_->Call(request, kPatience);
    EXPECT_TRUE(reply.ok() && reply->ok) << reply.status() << (reply.ok() ? reply->error : "");
    return JobId(json::parse(reply->json).at("job").get<std::string>());
  }
  bool Eventually(const std::function<bool()>& condition) {
    RealClock clock;
    for (const Instant deadline = clock.Now() + kPatience; clock.Now() < deadline; poll(nullptr, 0, 50)) {
      if (condition()) return true;
    }
    return false;
  }
  json Stats() {
    absl::StatusOr<std::string> text = ReadFile(dir_ + "/stats.json", 1 << 16);
    return text.ok() ? json::parse(*text, nullptr, false) : json();
  }

  static constexpr char kSpec[] = "name: tiny\nrun: [\"/bin/true\"]\nranks: 2\n";
  const std::string dir_ = TestFolder() + "/cluster";
  net::ClusterFiles files_;
  net::KeyPair admin_, node_ = net::MakeKeyPair();
  net::Endpoint endpoint_;
  std::unique_ptr<HeadProcess> head_;
  std::unique_ptr<net::ControlClient> client_;
};

// Everything an agent says about a generation whose ranks all end well.
void PlayToTheEnd(FakeAgent& agent, const core::GenerationGrant& grant) {
  std::vector<core::RankStatus> started;
  for (const core::RankPlace& place : grant.ranks) {
    started.push_back({.job = grant.job,
                       .generation = grant.generation,
                       .rank = place.rank,
                       .pid = 100 + place.rank,
                       .state = core::RankState::kRunning});
  }
  agent.Send(core::RanksStarted{grant.job, grant.generation, started});
  for (const core::RankPlace& place : grant.ranks) {
    agent.Send(core::RankExited{{.job = grant.job,
                                 .generation = grant.generation,
                                 .rank = place.rank,
                                 .pid = 100 + place.rank,
                                 .message = "exited with code 0"}});
    ASSERT_TRUE(agent.Expect<core::AckExit>().has_value());
  }
  agent.Send(core::GenerationGone{grant.job, grant.generation, true, ""});
}

TEST_F(HeadTest, SubmitRunSucceed) {
  Start();
  FakeAgent agent(endpoint_, node_);
  agent.Hello(files_.cluster);
  std::optional<core::AgentWelcome> welcome = agent.Expect<core::AgentWelcome>();
  ASSERT_TRUE(welcome.has_value());
  EXPECT_EQ(welcome->node.value, net::KeyId(node_.public_key));
  const JobId job = Submit();
  std::optional<core::StartGeneration> start = agent.Expect<core::StartGeneration>();
  ASSERT_TRUE(start.has_value());
  EXPECT_EQ(start->grant.job, job);
  EXPECT_EQ(start->grant.ranks.size(), 2u);
  PlayToTheEnd(agent, start->grant);
  EXPECT_TRUE(Eventually([&] { return Job(job).at("state") == "SUCCEEDED"; })) << Job(job).dump();
  ASSERT_TRUE(Eventually([&] {
    absl::StatusOr<std::string> events = ReadFile(dir_ + "/run/events.jsonl", 1 << 20);
    return events.ok() && events->find("SUCCEEDED") != std::string::npos;
  }));
  const std::string events = *ReadFile(dir_ + "/run/events.jsonl", 1 << 20);
  for (absl::string_view line : absl::StrSplit(events, '\n', absl::SkipEmpty())) {
    const json event = json::parse(std::string(line), nullptr, false);
    ASSERT_TRUE(event.is_object()) << line;
    for (const char* key : {"time", "sequence", "kind", "generation", "text"})
      EXPECT_TRUE(event.contains(key)) << key;
  }
  // A long poll with something to tell answers at once.
  EXPECT_FALSE(Ask(core::ClientEvents{job, 0, absl::Seconds(20)}).empty());
}

// H1: what was acknowledged is there after kill -9, under a higher epoch, and H15: the repeated request of a
// client that never saw its answer is not a second job.
TEST_F(HeadTest, AcknowledgedJobsSurviveKillNine) {
  Start();
  const JobId job = Submit("0123456789abcdef0123456789abcdef");
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(WIFSIGNALED(head_->End(SIGKILL)));
    Start();
    EXPECT_EQ(Ask(core::ClientStatus{}).at("jobs").size(), 1u);
    EXPECT_EQ(Submit("0123456789abcdef0123456789abcdef"), job);
    EXPECT_EQ(Ask(core::ClientStatus{}).at("jobs").size(), 1u);
  }
  FakeAgent agent(endpoint_, node_);
  agent.Hello(files_.cluster);
  std::optional<core::AgentWelcome> welcome = agent.Expect<core::AgentWelcome>();
  ASSERT_TRUE(welcome.has_value());
  EXPECT_EQ(welcome->epoch.value, 3u);
  std::optional<core::StartGeneration> start = agent.Expect<core::StartGeneration>();
  ASSERT_TRUE(start.has_value());
  PlayToTheEnd(agent, start->grant);
  EXPECT_TRUE(Eventually([&] { return Job(job).at("state") == "SUCCEEDED"; })) << Job(job).dump();
}

// A path of 4 KB of "{job}" passed the check before they were replaced, and made a record that no head could
// read: none of the cluster's jobs came back. A refused launch uses up no job number either.
TEST_F(HeadTest, WhatCouldNotBeReadBackIsRefused) {
  Start();
  std::string long_path = "/";
  while (long_path.size() < 3'000) long_path += "{job}/";
  std::string many;
  while (many.size() < 5'000) many += "/resume";
  const std::vector<core::ClientSubmit> refused = {
      {.spec_text = kSpec, .run_dir = long_path},
      {.spec_text = kSpec, .run_dir = dir_ + "/run", .resume = many},
      {.spec_text = kSpec, .env = {{"", "x"}}, .run_dir = dir_ + "/run"}};
  for (const core::ClientSubmit& submit : refused) {
    core::ClientRequest request{.id = "0123456789abcdef0123456789abcdef"};
    request.body = submit;
    const absl::StatusOr<core::ClientReply> reply = client_->Call(request, absl::Seconds(5));
    EXPECT_TRUE(!reply.ok() || !reply->ok);  // the message itself may be one that is dropped
  }
  EXPECT_EQ(Submit().value, "tiny-1");
  ASSERT_TRUE(WIFSIGNALED(head_->End(SIGKILL)));
  Start();
  EXPECT_EQ(Ask(core::ClientStatus{}).at("jobs").size(), 1u);
}

// An older version may have written such a record.
TEST_F(HeadTest, ARecordThatCannotBeReadIsSetAsideByName) {
  Start();
  const JobId job = Submit();
  head_->End(SIGTERM);
  core::JobRecord bad;
  bad.id = JobId("bad-7");
  bad.run_dir = std::string(5'000, 'x');
  const core::JobSubmission half{.id = JobId("half-8")};  // and somebody deleted the others by hand
  {
    auto store = store::OpenRocksStore(files_.store_path(), {.space = {.ballast = 0}});
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE((*store)
                    ->Commit({{core::KeyOf(bad), wire::EncodeRecord(bad)},
                              {core::KeyOf(half), wire::EncodeRecord(half)}})
                    .ok());
    const absl::StatusOr<core::StoredRecords> loaded = LoadRecords(**store);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_THAT(loaded->set_aside, testing::ElementsAre("job/bad-7"));
  }
  for (int round = 0; round < 2; ++round) {  // it stays there and is in nobody's way
    Start();
    const json jobs = Ask(core::ClientStatus{}).at("jobs");
    ASSERT_EQ(jobs.size(), 1u);
    EXPECT_EQ(jobs.at(0).at("id"), job.value);
    head_->End(SIGTERM);
  }
}

// H4: after a failed fsync nobody knows what is on disk, so nothing more is acknowledged and a new head
// looks.
TEST_F(HeadTest, AFailedSyncEndsTheHead_H4) {
  const std::string fault = dir_ + "/fault";
  Start(fault);
  Submit("0123456789abcdef0123456789abcdef");
  ASSERT_TRUE(WriteFileDurable(fault, "").ok());
  ASSERT_TRUE(Eventually([&] { return access(fault.c_str(), F_OK) != 0; }));
  core::ClientRequest request{.id = "1123456789abcdef0123456789abcdef"};
  request.body = core::ClientSubmit{.spec_text = kSpec, .run_dir = dir_ + "/run2"};
  EXPECT_FALSE(client_->Call(request, absl::Seconds(5)).ok());
  const int status = head_->End(0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  Start();
  Submit(request.id);  // it may be there or not; asked again it is there once
  EXPECT_EQ(Ask(core::ClientStatus{}).at("jobs").size(), 2u);
}

// The head is killed while ranks run: they are taken up again, not restarted.
TEST_F(HeadTest, RunningRanksAreReadoptedByTheNextHead) {
  Start();
  core::GenerationGrant grant;
  {
    FakeAgent agent(endpoint_, node_);
    agent.Hello(files_.cluster);
    Submit();
    std::optional<core::StartGeneration> start = agent.Expect<core::StartGeneration>();
    ASSERT_TRUE(start.has_value());
    grant = start->grant;
    std::vector<core::RankStatus> started;
    for (int rank : {0, 1}) {
      started.push_back({.job = grant.job,
                         .generation = grant.generation,
                         .rank = rank,
                         .pid = 100 + rank,
                         .state = core::RankState::kRunning});
    }
    agent.Send(core::RanksStarted{grant.job, grant.generation, started});
    ASSERT_TRUE(Eventually([&] { return Job(grant.job).at("state") == "RUNNING"; }));
  }
  ASSERT_TRUE(WIFSIGNALED(head_->End(SIGKILL)));
  Start();
  FakeAgent agent(endpoint_, node_);
  core::HeldGeneration held{.job = grant.job, .generation = grant.generation};
  for (int rank : {0, 1}) {
    held.live.push_back({.job = grant.job,
                         .generation = grant.generation,
                         .rank = rank,
                         .pid = 100 + rank,
                         .state = core::RankState::kRunning});
  }
  agent.Hello(files_.cluster, {held});
  ASSERT_TRUE(agent.Expect<core::AgentWelcome>().has_value());
  EXPECT_EQ(Job(grant.job).at("state"), "RUNNING");
  PlayToTheEnd(agent, grant);
  EXPECT_TRUE(Eventually([&] { return Job(grant.job).at("state") == "SUCCEEDED"; })) << Job(grant.job).dump();
  EXPECT_EQ(Job(grant.job).at("generation"), grant.generation.value);
}

class HeadReadersTest : public HeadTest {
 protected:
  // A job of so many ranks that run, all of them said to be there by `agent_`.
  void Run(int ranks) {
    Start();
    agent_ = std::make_unique<FakeAgent>(endpoint_, node_);
    agent_->Hello(files_.cluster);
    const json job = Ask(core::ClientSubmit{
        .spec_text = absl::StrCat("name: wide\nrun: [\"/bin/true\"]\nranks: ", ranks, "\n"),
        .run_dir = dir_ + "/run"});
    const std::optional<core::StartGeneration> start = agent_->Expect<core::StartGeneration>();
    ASSERT_TRUE(start.has_value());
    job_ = JobId(job.at("job").get<std::string>());
    core::RanksStarted started{job_, start->grant.generation, {}};
    for (int rank = 0; rank < ranks; ++rank) {
      started.ranks.push_back({.job = job_,
                               .generation = start->grant.generation,
                               .rank = rank,
                               .pid = 100 + rank,
                               .state = core::RankState::kRunning});
    }
    agent_->Send(started);
    ASSERT_TRUE(Eventually([&] { return Job(job_).at("state") == "RUNNING"; }));
  }

  std::unique_ptr<FakeAgent> agent_;
  JobId job_;
};

TEST_F(HeadReadersTest, WhoReadsWithoutEndIsToldToWait) {
  ASSERT_NO_FATAL_FAILURE(Run(2'000));
  constexpr int kReads = 250;  // fewer than the queue takes of all readers together
  auto reader = *net::ZmqClient::Connect(
      {.endpoint = endpoint_.endpoint, .server_public_key = endpoint_.head_public_key, .keys = admin_});
  ASSERT_TRUE(Eventually([&] { return reader->Connected(); }));
  for (int i = 0; i < kReads; ++i) {
    core::ClientRequest request{.id = absl::StrCat("read-", i), .deadline = kPatience};
    request.body = core::ClientStatus{job_};
    ASSERT_TRUE(reader->Send(wire::Encode(request)).ok());
  }
  int built = 0, refused = 0;
  EXPECT_TRUE(Eventually([&] {
    while (const std::optional<std::string> payload = reader->Receive()) {
      const absl::StatusOr<core::Message> message = wire::Decode(*payload, wire::Sender::kHead);
      const auto* reply = message.ok() ? std::get_if<core::ClientReply>(&*message) : nullptr;
      if (reply == nullptr) continue;
      ++(reply->ok ? built : refused);
      EXPECT_TRUE(reply->ok || reply->code == static_cast<int>(absl::StatusCode::kResourceExhausted))
          << reply->error;
    }
    return built + refused == kReads;
  }));
  EXPECT_GE(built, 100);
  EXPECT_GT(refused, 0);
  EXPECT_EQ(Job(job_).at("state"), "RUNNING");  // whose turn is over may read again
}

// The command line and other clients ask again when they are told to wait, and all get their answers.
TEST_F(HeadReadersTest, WhoIsToldToWaitAsksAgain) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int kRanks = 200;  // ten times slower
#else
  constexpr int kRanks = 2'000;
#endif
  ASSERT_NO_FATAL_FAILURE(Run(kRanks));
  std::vector<core::ClientRequest> requests(250);
  for (core::ClientRequest& request : requests) request.body = core::ClientStatus{job_};
  for (const absl::StatusOr<core::ClientReply>& reply : client_->CallAll(requests, kPatience)) {
    ASSERT_TRUE(reply.ok()) << reply.status();
    ASSERT_TRUE(reply->ok) << reply->error;
    EXPECT_EQ(json::parse(reply->json).at("jobs").at(0).at("ranks").size(), static_cast<size_t>(kRanks));
  }
}

TEST_F(HeadReadersTest, LastWordsThatDidNotFitAreThereWhenTheNodeIsLost) {
  constexpr int kRanks = 300;  // of 64 KiB each, more than the head has room for in memory
  ASSERT_NO_FATAL_FAILURE(Run(kRanks));
  const auto text = [](int rank) {
    return absl::StrCat(std::string(65'000, 'a' + rank % 26), " of rank ", rank);
  };
  for (int rank = 0; rank < kRanks; ++rank)
    agent_->Send(core::LogTail{job_, {1}, rank, false, 1'000'000, text(rank)});
  ASSERT_TRUE(Eventually([&] { return access((dir_ + "/tails/1").c_str(), F_OK) == 0; }));
  // This piece of output comes after the older part of its tail was spilled.
  agent_->Send(core::LogTail{job_, {1}, 0, false, 1'000'006, " more\n", 1});
  ASSERT_TRUE(agent_->Expect<core::HeartbeatAck>().has_value());
  agent_.reset();
  std::vector<core::ClientRequest> requests;
  // All ranks are asked for at once, as `gtrain launch` does.
  for (int rank = 0; rank < kRanks; ++rank)
    requests.push_back({.body = core::ClientLogs{.job = job_, .rank = rank}});
  const auto replies = client_->CallAll(requests, kPatience);
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSERT_TRUE(replies[i].ok() && replies[i]->ok) << replies[i].status();
    const int rank = std::get<core::ClientLogs>(requests[i].body).rank;
    const json logs = json::parse(replies[i]->json);
    EXPECT_TRUE(logs.at("mirrored"));
    EXPECT_EQ(logs.at("text"), rank == 0 ? text(0) + " more\n" : text(rank));
  }
  EXPECT_EQ(Stats().value("tails_lost", -1), 0);
}

TEST_F(HeadTest, TermIsACleanExit) {
  Start();
  EXPECT_EQ(access(files_.endpoint_path().c_str(), F_OK), 0);
  const int status = head_->End(SIGTERM);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_NE(access(files_.endpoint_path().c_str(), F_OK), 0);
}

// H9: the second head on one cluster ends with an error, the first is not disturbed.
TEST_F(HeadTest, SecondHeadOnTheSameClusterIsRefused) {
  Start();
  const pid_t first = head_->pid();
  HeadProcess second(dir_);
  const int status = second.End(0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
  EXPECT_EQ(kill(first, 0), 0);
  ASSERT_TRUE(net::WriteEndpoint(files_.endpoint_path(), endpoint_).ok());  // HeadProcess removed it
  EXPECT_TRUE(Ask(core::ClientStatus{}).at("jobs").empty());
}

// H10: the store of another cluster.
TEST_F(HeadTest, StoreOfAnotherClusterIsRefused) {
  Start();
  (void)head_->End(SIGTERM);
  ASSERT_TRUE(WriteFileDurable(dir_ + "/cluster", std::string(32, 'f') + "\n").ok());
  HeadProcess other(dir_);
  const int status = other.End(0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

TEST_F(HeadTest, RootServesOnlyLoopback) {
  if (InContainer()) GTEST_SKIP() << "in a container root may; RootMayServe is the table";
  if (geteuid() != 0) GTEST_SKIP() << "not root";
  HeadProcess head(dir_, "0.0.0.0:0");
  const int status = head.End(0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

// A join token lets one new node in, once, and nothing else.
TEST_F(HeadTest, JoinTokenRegistersOneNode) {
  Start();
  const std::string text = Ask(core::ClientJoinToken{}).at("token").get<std::string>();
  absl::StatusOr<net::JoinToken> token = net::ParseJoinToken(text);
  ASSERT_TRUE(token.ok()) << token.status();

  // The token's key is no client.
  auto thief = Client(*net::KeyPairOfSecret(token->secret_key));
  EXPECT_FALSE(thief->Call(core::ClientStatus{}, absl::Seconds(2)).ok());

  const net::KeyPair fresh = net::MakeKeyPair(), other = net::MakeKeyPair();
  absl::StatusOr<core::AgentJoined> joined =
      net::JoinCluster(*token, fresh.public_key, "new-node", kPatience);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->cluster, files_.cluster);
  EXPECT_EQ(joined->node.value, net::KeyId(fresh.public_key));
  EXPECT_TRUE(absl::IsPermissionDenied(net::JoinCluster(*token, other.public_key, "x", kPatience).status()));

  FakeAgent agent(endpoint_, fresh);
  agent.Hello(files_.cluster);
  EXPECT_TRUE(agent.Expect<core::AgentWelcome>().has_value());
}

// All are let in, none is dropped, and what people ask meanwhile is answered.
TEST_F(HeadTest, TwoThousandJoinsAtOnce) {
  constexpr size_t kNodes = 2000;
  Start();
  const net::JoinToken token =
      *net::ParseJoinToken(Ask(core::ClientJoinToken{.uses = kNodes}).at("token").get<std::string>());
  auto joiner = *net::ZmqClient::Connect({.endpoint = endpoint_.endpoint,
                                          .server_public_key = endpoint_.head_public_key,
                                          .keys = *net::KeyPairOfSecret(token.secret_key)});
  ASSERT_TRUE(Eventually([&] { return joiner->Connected(); }));
  std::vector<std::string> keys;
  for (size_t i = 0; i < kNodes; ++i) keys.push_back(net::MakeKeyPair().public_key);
  for (const std::string& key : keys)
    ASSERT_TRUE(joiner->Send(wire::Encode(core::AgentJoin{key, "node"})).ok());
  std::set<std::string> in;
  std::vector<absl::Duration> waits;
  const RealClock clock;
  for (const Instant deadline = clock.Now() + kPatience; in.size() < kNodes && clock.Now() < deadline;) {
    const Instant asked = clock.Now();
    Submit();
    waits.push_back(clock.Now() - asked);
    while (std::optional<std::string> payload = joiner->Receive()) {
      const auto message = wire::Decode(*payload, wire::Sender::kHead);
      ASSERT_TRUE(message.ok());
      const auto* joined = std::get_if<core::AgentJoined>(&*message);
      ASSERT_NE(joined, nullptr) << std::get<core::AgentRefused>(*message).reason;
      in.insert(joined->node.value);
    }
  }
  EXPECT_EQ(in.size(), kNodes);
  std::sort(waits.begin(), waits.end());
  RecordProperty("submits", static_cast<int>(waits.size()));
  const absl::Duration p99 = waits[waits.size() * 99 / 100];
  std::printf("%zu submits meanwhile, p50 %s, p99 %s, longest %s\n", waits.size(),
              absl::FormatDuration(waits[waits.size() / 2]).c_str(), absl::FormatDuration(p99).c_str(),
              absl::FormatDuration(waits.back()).c_str());
  // Issue 16, item 2, of a machine that does nothing else.
  if (std::getenv("GTRAIN_SOAK") != nullptr) {
    EXPECT_LT(p99, absl::Milliseconds(100));
  }
  // The token is used up: the connection that it opened is worth nothing any more.
  ASSERT_TRUE(joiner->Send(wire::Encode(core::AgentJoin{net::MakeKeyPair().public_key, "late"})).ok());
  EXPECT_TRUE(Eventually([&] { return Stats().value("messages_of_removed_keys", 0) > 0; }));
  EXPECT_EQ(Stats().value("joins_dropped", -1), 0);
}

// The answer to a join may be lost when the token is used up by it.
TEST_F(HeadTest, ANodeThatWasLetInAndDoesNotKnowItIsWelcome) {
  Start();
  const net::JoinToken token =
      *net::ParseJoinToken(Ask(core::ClientJoinToken{}).at("token").get<std::string>());
  const net::KeyPair fresh = net::MakeKeyPair();
  EXPECT_FALSE(net::IsLetIn(token, fresh, absl::Seconds(1)));
  ASSERT_TRUE(net::JoinCluster(token, fresh.public_key, "new-node", kPatience).ok());
  EXPECT_TRUE(absl::IsPermissionDenied(net::JoinCluster(token, fresh.public_key, "x", kPatience).status()));
  EXPECT_TRUE(net::IsLetIn(token, fresh, kPatience));
  FakeAgent agent(endpoint_, fresh);
  agent.Hello(ClusterId());
  const auto welcome = agent.Expect<core::AgentWelcome>();
  ASSERT_TRUE(welcome.has_value());
  EXPECT_EQ(welcome->cluster, files_.cluster);
}

// A token cannot turn the key of an administrator into that of a node.
TEST_F(HeadTest, JoinTokenKeepsOtherRoles) {
  Start();
  absl::StatusOr<net::JoinToken> token =
      net::ParseJoinToken(Ask(core::ClientJoinToken{}).at("token").get<std::string>());
  ASSERT_TRUE(token.ok());
  EXPECT_FALSE(net::JoinCluster(*token, admin_.public_key, "x", kPatience).ok());
  EXPECT_TRUE(Ask(core::ClientStatus{}).contains("jobs"));
}

// Issue 2, point 6: nothing happens but a counter, and good clients go on.
TEST_F(HeadTest, StrangersChangeOnlyACounter) {
  Start();
  ASSERT_TRUE(Eventually([&] { return Stats().contains("keys_denied"); }));
  const json before = Stats();

  auto unregistered = Client(net::MakeKeyPair());
  EXPECT_TRUE(
      absl::IsPermissionDenied(unregistered->Call(core::ClientShutdown{false}, absl::Seconds(20)).status()));
  auto wrong = *net::ControlClient::Connect(
      {.endpoint = endpoint_.endpoint, .server_public_key = net::MakeKeyPair().public_key, .keys = admin_});
  EXPECT_FALSE(wrong->Call(core::ClientShutdown{false}, absl::Seconds(3)).ok());
  const int port = std::stoi(endpoint_.endpoint.substr(endpoint_.endpoint.rfind(':') + 1));
  for (const std::string& bytes :
       {std::string("GET /status HTTP/1.1\r\nHost: head\r\n\r\n"), std::string(1000, '\x80')}) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    ASSERT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_GT(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
    char reply[256];
    std::string heard;
    for (ssize_t n; (n = recv(fd.get(), reply, sizeof(reply), 0)) > 0;) heard.append(reply, n);
    EXPECT_EQ(heard.find("HTTP"), std::string::npos);
  }
  EXPECT_TRUE(Eventually([&] {
    const json now = Stats();
    return now.value("keys_denied", 0) > before.value("keys_denied", 0) &&
           now.value("handshakes_failed", 0) >= before.value("handshakes_failed", 0) + 3;
  })) << Stats().dump();
  EXPECT_EQ(Ask(core::ClientStatus{}).at("jobs").size(), 0u);
  EXPECT_EQ(kill(head_->pid(), 0), 0);
}

// Such a request was dropped, and its client waited for nothing and took the head for dead.
TEST_F(HeadTest, ARequestThatCannotBeReadIsAnswered) {
  Start();
  const auto reply = client_->Call(core::ClientStatus{JobId("a b")}, kPatience);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_FALSE(reply->ok);
  EXPECT_EQ(reply->code, static_cast<int>(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(reply->error, testing::HasSubstr("job: not an id"));
  EXPECT_EQ(Ask(core::ClientStatus{}).at("jobs").size(), 0u);
}

// A node may not act as a client, nor a client as a node.
TEST_F(HeadTest, RolesComeFromKeys) {
  Start();
  auto node = Client(node_);
  EXPECT_FALSE(node->Call(core::ClientShutdown{false}, absl::Seconds(2)).ok());
  FakeAgent agent(endpoint_, admin_);
  agent.Hello(files_.cluster);
  EXPECT_TRUE(Eventually([&] { return Stats().value("messages_undecodable", 0) >= 2; })) << Stats().dump();
  EXPECT_EQ(Ask(core::ClientStatus{}).at("jobs").size(), 0u);
}

// H13: far more history than is kept; it is dropped at the start, and the start waits for nothing else.
TEST_F(HeadTest, StartsWithALongHistory_H13) {
  constexpr int kJobs = 100'000, kBatch = 5'000;
  {
    auto store = store::OpenRocksStore(files_.store_path());
    ASSERT_TRUE(store.ok()) << store.status();
    for (int first = 1; first <= kJobs; first += kBatch) {
      std::vector<port::Write> writes;
      for (int number = first; number < first + kBatch; ++number) {
        core::JobRecord job;
        job.id = JobId(absl::StrCat("tiny-", number));
        job.number = static_cast<uint64_t>(number);
        job.name = "tiny";
        job.spec_text = kSpec;
        job.run_dir = "/nowhere";
        job.state = core::JobState::kSucceeded;
        job.reason = "every rank exited 0";
        job.env = {{"SOME", std::string(300, 'x')}};
        writes.push_back({core::KeyOf(job), wire::EncodeRecord(job)});
      }
      ASSERT_TRUE((*store)->Commit(writes).ok());
    }
  }
  const RealClock clock;
  const Instant began = clock.Now();
  Start();
  const double seconds = absl::ToDoubleSeconds(clock.Now() - began);
  EXPECT_EQ(Ask(core::ClientStatus{JobId("tiny-100000")}).at("jobs").size(), 1u);
  const std::string memory = *ReadFile(absl::StrCat("/proc/", head_->pid(), "/statm"), 1 << 10);
  const auto resident = std::stoull(memory.substr(memory.find(' ') + 1)) * 4096 >> 20;
  printf("100,000 jobs: serving after %.1f s, %llu MiB resident\n", seconds, resident);
// Sanitizers have shadows, red zones and a quarantine of their own for all memory.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  EXPECT_LT(resident, 1'500u);
#endif
}

}  // namespace
}  // namespace gtrain::head
