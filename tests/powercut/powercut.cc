// Power cuts under load (fault H2): a real `gtrain head` with its store on an ext4 file system of its own,
// clients that submit and stop jobs, and at a random moment the file system is shut down without flushing
// (ioctl EXT4_IOC_SHUTDOWN, NOLOGFLUSH): writes that were not synced are gone, as when the plug is pulled.
// Then the head is killed, the file system mounted again (its journal is replayed), a new head started, and
// everything that was ever acknowledged looked for.
//
//   lost         an acknowledged job that is not there, or an acknowledged stop that did not happen
//   resurrected  a job that was over and is not any more, or one that nobody asked for
//   duplicated   two jobs of one request: every request whose answer the cut took is repeated under its id
//                (H15)
//
//   powercut --gtrain build/bin/gtrain [--cuts N] [--workers N] [--seed N]
//
// Exit status: 0 nothing wrong, 1 something was, 77 it cannot run here.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "runtime/control/cluster_dir.h"
#include "runtime/control/control_client.h"

namespace gtrain {
namespace {

using nlohmann::json;

constexpr unsigned long kShutdownIoctl = _IOR('X', 125, uint32_t);
constexpr uint32_t kNoLogFlush = 2;
constexpr absl::Duration kPatience = absl::Seconds(120);
constexpr int kClients = 3;
constexpr int kCutsPerDisk = 10;  // then a new file system: status documents stay small
constexpr int kSkipped = 77;

struct Options {
  std::string gtrain;
  int cuts = 300;
  int workers = 2;
  uint64_t seed = 1;
};

int Command(const std::string& line) { return std::system((line + " >/dev/null 2>&1").c_str()); }

// One image with ext4 on it, mounted.
class Disk {
 public:
  explicit Disk(std::string dir) : dir_(std::move(dir)), image_(dir_ + "/image"), mount_(dir_ + "/mount") {}
  ~Disk() {
    Unmount();
    std::error_code error;
    std::filesystem::remove_all(dir_, error);
  }
  const std::string& mount() const { return mount_; }

  absl::Status Make() {
    Unmount();
    GT_RETURN_IF_ERROR(MakeDirs(mount_));
    if (Command(absl::StrCat("rm -f ", image_, " && truncate -s 512M ", image_, " && mkfs.ext4 -q -F ",
                             image_)) != 0) {
      return absl::UnavailableError("mkfs.ext4 does not work here");
    }
    return Mount();
  }
  absl::Status Mount() {
    if (Command(absl::StrCat("mount -o loop ", image_, " ", mount_)) != 0) {
      return absl::UnavailableError("loop devices cannot be mounted here");
    }
    mounted_ = true;
    return absl::OkStatus();
  }
  absl::Status Cut() {
    const UniqueFd fd(open(mount_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    uint32_t flags = kNoLogFlush;
    if (!fd.valid() || ioctl(fd.get(), kShutdownIoctl, &flags) != 0)
      return ErrnoStatus(errno, "EXT4_IOC_SHUTDOWN");
    return absl::OkStatus();
  }
  bool Unmount() {
    for (int i = 0; mounted_ && i < 500; ++i) {
      if (umount(mount_.c_str()) == 0)
        mounted_ = false;
      else
        poll(nullptr, 0, 20);
    }
    return !mounted_;
  }

 private:
  const std::string dir_, image_, mount_;
  bool mounted_ = false;
};

class HeadProcess {
 public:
  HeadProcess(std::string gtrain, std::string dir) : gtrain_(std::move(gtrain)), dir_(std::move(dir)) {}
  ~HeadProcess() { Kill(); }

  absl::StatusOr<net::Endpoint> Start() {
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int log = open((dir_ + "/../../head.log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      dup2(log, 1);
      dup2(log, 2);
      execl(gtrain_.c_str(), "gtrain", "head", "--dir", dir_.c_str(), nullptr);
      _exit(9);
    }
    const RealClock clock;
    for (const Instant deadline = clock.Now() + kPatience; clock.Now() < deadline; poll(nullptr, 0, 10)) {
      absl::StatusOr<net::Endpoint> endpoint = net::ReadEndpoint(dir_ + "/endpoint.json");
      if (endpoint.ok() && endpoint->pid == pid_) return endpoint;
      if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
        pid_ = -1;
        return absl::DataLossError("the head does not start after the cut");
      }
    }
    return absl::DeadlineExceededError("the head does not serve");
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  const std::string gtrain_, dir_;
  pid_t pid_ = -1;
};

struct Totals {
  std::atomic<int> cuts{0};
  std::atomic<int64_t> acknowledged{0}, unanswered{0}, lost{0}, resurrected{0}, duplicated{0};
};

// The requests of one worker's clients, by the name of their job.
struct Known {
  core::ClientRequest submit;
  std::string job;         // answered: the job's id
  bool submitted = false;  // acknowledged
  std::optional<core::ClientRequest> stop;
  bool stopped = false;  // acknowledged
};

class Worker {
 public:
  Worker(const Options& options, int index, Totals& totals, std::string dir)
      : options_(options),
        index_(index),
        totals_(totals),
        dir_(std::move(dir)),
        rng_(options.seed * 1'000 + index),
        disk_(dir_) {}

  absl::Status Run() {
    for (int cut = 0; totals_.cuts.fetch_add(1) < options_.cuts; ++cut) {
      const absl::Status status = OneCut(cut % kCutsPerDisk == 0);
      if (!status.ok()) {
        --totals_.cuts;
        return status;
      }
    }
    --totals_.cuts;
    return absl::OkStatus();
  }

 private:
  absl::Status OneCut(bool new_disk);
  absl::Status NewDisk();
  absl::Status Check(const net::Endpoint& endpoint);
  void Load(const net::Endpoint& endpoint, int client);
  std::unique_ptr<net::ControlClient> Client(const net::Endpoint& endpoint) {
    auto client = net::ControlClient::Connect({.endpoint = endpoint.endpoint,
                                               .server_public_key = endpoint.head_public_key,
                                               .keys = *net::LoadKeyPair(Cluster() + "/admin.key")});
    return client.ok() ? *std::move(client) : nullptr;
  }
  std::string Cluster() const { return disk_.mount() + "/cluster"; }
  void Say(const std::string& text) {
    fprintf(stderr, "powercut: worker %d, seed %llu: %s\n", index_,
            static_cast<unsigned long long>(options_.seed), text.c_str());
  }

  const Options& options_;
  const int index_;
  Totals& totals_;
  const std::string dir_;
  Rng rng_;
  Disk disk_;
  std::atomic<bool> cut_{false};
  Mutex mutex_;
  std::map<std::string, Known> known_ ABSL_GUARDED_BY(mutex_);
  int next_ ABSL_GUARDED_BY(mutex_) = 0;
};

absl::Status Worker::NewDisk() {
  GT_RETURN_IF_ERROR(disk_.Make());
  GT_RETURN_IF_ERROR(net::InitCluster(Cluster()).status());
  MutexLock lock(&mutex_);
  known_.clear();
  return absl::OkStatus();
}

// One client: submits and stops until the power goes. A request is noted before it leaves.
void Worker::Load(const net::Endpoint& endpoint, int number) {
  Rng rng(options_.seed * 7'919 + static_cast<uint64_t>(index_ * 101 + number) + totals_.cuts);
  auto client = Client(endpoint);
  if (client == nullptr) return;
  while (!cut_) {
    core::ClientRequest request{.id = net::NewRequestId()};
    std::string name;
    bool stop = false;
    {
      MutexLock lock(&mutex_);
      // A little more than half are stops, so that a head's most live jobs are never reached.
      if (!known_.empty() && rng.Below(100) < 52) {
        const auto may_stop = [](const auto& entry) { return entry.second.submitted && !entry.second.stop; };
        auto it = known_.begin();
        std::advance(it, static_cast<int64_t>(rng.Below(known_.size())));
        it = std::find_if(it, known_.end(), may_stop);
        if (it == known_.end()) it = std::find_if(known_.begin(), known_.end(), may_stop);
        if (it != known_.end()) {
          name = it->first;
          stop = true;
          request.body = core::ClientStop{JobId(it->second.job), false, "powercut"};
          it->second.stop = request;
        }
      }
      if (!stop) {
        name = absl::StrCat("p", index_, "-", next_++);
        request.body = core::ClientSubmit{
            .spec_text = absl::StrCat("name: ", name, "\nrun: [\"/bin/true\"]\nranks: 2\n"),
            .run_dir = "/nowhere"};
        known_[name].submit = request;
      }
    }
    absl::StatusOr<core::ClientReply> reply = absl::UnknownError("");
    while (!cut_ && !reply.ok()) reply = client->Call(request, absl::Milliseconds(200));
    if (!reply.ok()) return;
    if (!reply->ok) {
      Say("refused: " + reply->error);
      continue;
    }
    ++totals_.acknowledged;
    MutexLock lock(&mutex_);
    Known& known = known_[name];
    if (stop) {
      known.stopped = true;
    } else {
      known.submitted = true;
      known.job = json::parse(reply->json).value("job", "");
    }
  }
}

// Repeats what the cut left open, then compares the head's list with what is known.
absl::Status Worker::Check(const net::Endpoint& endpoint) {
  auto client = Client(endpoint);
  if (client == nullptr) return absl::UnavailableError("no client");
  const auto list = [&]() -> absl::StatusOr<std::map<std::string, std::map<std::string, std::string>>> {
    GT_ASSIGN_OR_RETURN(const core::ClientReply reply, client->Call(core::ClientStatus{}, kPatience));
    std::map<std::string, std::map<std::string, std::string>> jobs;  // name -> id -> state
    const json document = json::parse(reply.json);
    for (const json& job : document.at("jobs")) {
      const std::string id = job.at("id").get<std::string>();
      jobs[id.substr(0, id.rfind('-'))][id] = job.at("state").get<std::string>();
    }
    return jobs;
  };
  MutexLock lock(&mutex_);
  GT_ASSIGN_OR_RETURN(auto jobs, list());
  for (const auto& [name, ids] : jobs) {
    if (!known_.contains(name)) {
      ++totals_.resurrected;
      Say(name + " is there and nobody asked for it");
    }
  }
  for (auto& [name, known] : known_) {
    auto it = jobs.find(name);
    if (known.submitted && it == jobs.end()) {  // the list leaves out old jobs that are over
      GT_ASSIGN_OR_RETURN(const core::ClientReply reply,
                          client->Call(core::ClientStatus{JobId(known.job)}, kPatience));
      const json document = reply.ok ? json::parse(reply.json) : json();
      if (reply.ok) it = jobs.try_emplace(name).first;
      if (reply.ok) it->second[known.job] = document.at("jobs").at(0).at("state").get<std::string>();
    }
    const bool there = it != jobs.end();
    if (known.submitted && (!there || !it->second.contains(known.job))) {
      ++totals_.lost;
      Say(absl::StrCat(known.job, " was acknowledged and is gone"));
      continue;
    }
    if (known.stopped && it->second.at(known.job) != "CANCELLED") {
      ++totals_.resurrected;
      Say(absl::StrCat("the stop of ", known.job, " was acknowledged; it is ", it->second.at(known.job)));
    }
  }
  for (auto& [name, known] : known_) {
    if (!known.submitted) {
      ++totals_.unanswered;
      GT_ASSIGN_OR_RETURN(const core::ClientReply reply, client->Call(known.submit, kPatience));
      known.submitted = reply.ok;
      if (reply.ok) known.job = json::parse(reply.json).value("job", "");
    } else if (known.stop && !known.stopped) {
      ++totals_.unanswered;
      GT_ASSIGN_OR_RETURN(const core::ClientReply reply, client->Call(*known.stop, kPatience));
      known.stopped = reply.ok;
    }
  }
  GT_ASSIGN_OR_RETURN(jobs, list());
  for (const auto& [name, ids] : jobs) {
    if (ids.size() < 2) continue;
    ++totals_.duplicated;
    Say(name + " is there twice");
  }
  return absl::OkStatus();
}

absl::Status Worker::OneCut(bool new_disk) {
  if (new_disk) GT_RETURN_IF_ERROR(NewDisk());
  HeadProcess head(options_.gtrain, Cluster());
  GT_ASSIGN_OR_RETURN(net::Endpoint endpoint, head.Start());
  cut_ = false;
  std::vector<std::thread> clients;
  for (int i = 0; i < kClients; ++i) clients.emplace_back([this, &endpoint, i] { Load(endpoint, i); });
  poll(nullptr, 0, 20 + static_cast<int>(rng_.Below(600)));
  const absl::Status cut = disk_.Cut();
  cut_ = true;
  for (std::thread& client : clients) client.join();
  head.Kill();
  GT_RETURN_IF_ERROR(cut);
  if (!disk_.Unmount()) return absl::InternalError("the file system cannot be unmounted");
  GT_RETURN_IF_ERROR(disk_.Mount());
  absl::StatusOr<net::Endpoint> again = head.Start();
  if (!again.ok()) {
    ++totals_.lost;
    return again.status();
  }
  GT_RETURN_IF_ERROR(Check(*again));
  head.Kill();
  return absl::OkStatus();
}

int Main(const Options& options) {
  if (geteuid() != 0) {
    fprintf(stderr, "powercut: skipped: mounting needs root\n");
    return kSkipped;
  }
  std::string base = std::filesystem::temp_directory_path() / "gtrain-powercut-XXXXXX";
  if (mkdtemp(base.data()) == nullptr) return 1;
  if (Disk probe(base + "/probe"); !probe.Make().ok() || !probe.Cut().ok()) {
    fprintf(stderr, "powercut: skipped: no loop-mounted ext4 with EXT4_IOC_SHUTDOWN here\n");
    return kSkipped;
  }
  Totals totals;
  std::atomic<bool> failed{false};
  const RealClock clock;
  const Instant began = clock.Now();
  {
    std::vector<std::thread> threads;
    for (int i = 0; i < options.workers; ++i) {
      threads.emplace_back([&, i] {
        const std::string dir = absl::StrCat(base, "/", i);
        if (!MakeDirs(dir).ok()) return;
        Worker worker(options, i, totals, dir);
        const absl::Status status = worker.Run();
        if (status.ok()) return;
        failed = true;
        fprintf(stderr, "powercut: worker %d: %s\n", i, status.ToString().c_str());
        const absl::StatusOr<std::string> log = ReadFile(dir + "/head.log", 64 << 20);
        if (log.ok())
          fprintf(stderr, "%s\n", log->substr(log->size() - std::min<size_t>(log->size(), 3'000)).c_str());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  std::error_code error;
  std::filesystem::remove_all(base, error);
  printf(
      "powercut: %d cuts in %.0f s, %lld operations acknowledged, %lld cut off and repeated; lost %lld, "
      "resurrected %lld, "
      "duplicated %lld\n",
      totals.cuts.load(), absl::ToDoubleSeconds(clock.Now() - began),
      static_cast<long long>(totals.acknowledged), static_cast<long long>(totals.unanswered),
      static_cast<long long>(totals.lost), static_cast<long long>(totals.resurrected),
      static_cast<long long>(totals.duplicated));
  const bool wrong = totals.lost > 0 || totals.resurrected > 0 || totals.duplicated > 0 || failed ||
                     totals.cuts < options.cuts || totals.acknowledged == 0;
  return wrong ? 1 : 0;
}

}  // namespace
}  // namespace gtrain

int main(int argc, char** argv) {
  gtrain::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const absl::string_view flag = argv[i];
    bool ok = flag == "--gtrain";
    if (ok) options.gtrain = argv[i + 1];
    if (flag == "--cuts") ok = absl::SimpleAtoi(argv[i + 1], &options.cuts);
    if (flag == "--workers") ok = absl::SimpleAtoi(argv[i + 1], &options.workers);
    if (flag == "--seed") ok = absl::SimpleAtoi(argv[i + 1], &options.seed);
    if (!ok) return 2;
  }
  if (options.gtrain.empty() || argc % 2 == 0) {
    fprintf(stderr, "usage: powercut --gtrain PATH [--cuts N] [--workers N] [--seed N]\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  return gtrain::Main(options);
}
