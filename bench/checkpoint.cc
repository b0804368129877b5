// bench_checkpoint: what a checkpoint costs a training process of 1 and 4 GiB of float32 state: the stall of
// Save beside one memcpy, the cost of a save beside steps that compute, writing beside dd and torch.save,
// restoring beside a plain read and from near memory, all of these beside torch.distributed.checkpoint, and
// uploads to a local HTTP sink beside curl and boto3.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/http_sink.h"
#include "bench/local_cluster.h"
#include "bench/peer_process.h"
#include "checkpoint/engine/checkpointer.h"
#include "checkpoint/engine/session_fake.h"
#include "checkpoint/port/writer_host.h"
#include "checkpoint/store/open_store.h"

extern char** environ;

namespace gtrain::bench {
namespace {

constexpr uint64_t kGiB = 1 << 30;
constexpr uint64_t kTensorBytes = 64 << 20;
constexpr int64_t kColumns = 1024;
constexpr absl::Duration kLong = absl::Minutes(3);
constexpr const char* kTorchPython = "/usr/bin/python3";  // Debian's, which has Debian's torch

double Milliseconds(absl::Duration took) { return absl::ToDoubleMilliseconds(took); }

// Memory that is there: every page was written.
class Memory {
 public:
  explicit Memory(uint64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) std::abort();
    at_ = static_cast<char*>(at);
    madvise(at_, bytes, MADV_HUGEPAGE);
    float* const values = floats();
    for (size_t i = 0; i < bytes / sizeof(float); ++i) values[i] = 1e-3f * static_cast<float>(i % 9973);
  }
  ~Memory() {
    if (bytes_ > 0) munmap(at_, bytes_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* at() const { return at_; }
  float* floats() const { return reinterpret_cast<float*>(at_); }
  uint64_t bytes() const { return bytes_; }

 private:
  const uint64_t bytes_;
  char* at_ = nullptr;
};

// A job in this process. As under gtrain its saves are written by gtrain-writer, when `writer` names it.
class BenchSession final : public ckpt::FakeSession, public port::WriterHost {
 public:
  BenchSession(const ckpt::FakeJob& job, int rank, std::string writer)
      : FakeSession(job, rank), writer_(std::move(writer)) {}

  port::WriterHost* writer_host() override { return this; }

  absl::StatusOr<port::WriterLink> StartWriter(uint64_t arena_bytes, absl::Duration,
                                               absl::FunctionRef<bool()>) override {
    if (writer_.empty()) return absl::FailedPreconditionError("this measurement writes by itself");
    port::WriterLink link;
    link.arena.reset(memfd_create("bench-saves", MFD_CLOEXEC));
    int ends[2];
    if (!link.arena.valid() || ftruncate(link.arena.get(), static_cast<off_t>(arena_bytes)) != 0 ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
      return ErrnoStatus(errno, "a writer's memory");
    }
    link.channel.reset(ends[0]);
    const UniqueFd theirs(ends[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    // Through high numbers: 3 and 4 may be the very descriptors that are handed over.
    const UniqueFd arena(fcntl(link.arena.get(), F_DUPFD_CLOEXEC, 10)),
        channel(fcntl(theirs.get(), F_DUPFD_CLOEXEC, 10));
    posix_spawn_file_actions_adddup2(&actions, arena.get(), 3);
    posix_spawn_file_actions_adddup2(&actions, channel.get(), 4);
    char* const words[] = {writer_.data(), nullptr};
    pid_t pid = 0;
    const int error = posix_spawn(&pid, writer_.c_str(), &actions, nullptr, words, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) return ErrnoStatus(error, absl::StrCat("start ", writer_));
    pids_.push_back(pid);
    return link;
  }
  // Its writers end once the checkpointer is gone.
  ~BenchSession() override {
    for (const pid_t pid : pids_) (void)WaitFor(pid, writer_, kLong);
  }

 private:
  std::string writer_;
  std::vector<pid_t> pids_;
};

// A training process of one rank and its state.
class Trainer {
 public:
  // `near`: $GTRAIN_CHECKPOINT_NEAR.
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(const std::string& uri, const std::string& writer,
                                                       uint64_t bytes, bool lazy = false,
                                                       const std::string& near = "",
                                                       const ckpt::FakeJob& job = {}, int rank = 0) {
    std::unique_ptr<Trainer> t(new Trainer(uri, writer, bytes, job, rank));
    const auto environment = [&near](const char* name) -> std::optional<std::string> {
      if (near.empty() || absl::string_view(name) != "GTRAIN_CHECKPOINT_NEAR") return std::nullopt;
      return near;
    };
    GT_ASSIGN_OR_RETURN(t->checkpointer_,
                        ckpt::OpenCheckpointer(&t->session_, {.uri = uri, .keep = 100, .lazy = lazy},
                                               environment, &ckpt::OpenStore));
    for (uint64_t begin = 0; begin < bytes; begin += kTensorBytes) {
      GT_RETURN_IF_ERROR(t->checkpointer_->AddReplicated(
          absl::StrCat("w", begin / kTensorBytes), gtrain::Memory{t->state_.at() + begin, kTensorBytes},
          {static_cast<int64_t>(kTensorBytes / sizeof(float)) / kColumns, kColumns}, DType::kFloat32));
    }
    return t;
  }
  // How long Save took; the save is over afterwards.
  absl::StatusOr<double> Stall() {
    GT_RETURN_IF_ERROR(Save());
    GT_RETURN_IF_ERROR(Wait());
    return Milliseconds(stall_);
  }
  // Waits until the save is committed, then deletes older ones, which is not measured: unlinking 1 GiB takes
  // a fifth of the time of writing it, and dd leaves it out.
  absl::Status Wait() {
    GT_RETURN_IF_ERROR(checkpointer_->Wait(kLong));
    waited_ = clock_.Now();
    if (session_.rank() != 0) return absl::OkStatus();
    GT_ASSIGN_OR_RETURN(const auto store, ckpt::OpenStore(uri_));
    for (const std::string prefix : {"manifests/", "step-"}) {
      GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->List(prefix));
      for (const std::string& key : keys) {
        if (!absl::StrContains(key, absl::StrFormat("step-%012d", step_)))
          GT_RETURN_IF_ERROR(store->Delete(key));
      }
    }
    return absl::OkStatus();
  }
  // The time from the call of Save, in which the state is copied and hashed, to its commit.
  absl::StatusOr<double> Persist() {
    GT_RETURN_IF_ERROR(Save());
    GT_RETURN_IF_ERROR(Wait());
    return absl::ToDoubleSeconds(waited_ - begun_);
  }
  absl::StatusOr<double> Restore(bool near = false) {
    const Instant begin = clock_.Now();
    GT_ASSIGN_OR_RETURN(const auto restored, checkpointer_->Restore());
    if (!restored || restored->bytes != state_.bytes()) return absl::InternalError("not restored whole");
    if (restored->bytes_near != (near ? restored->bytes_read : 0))
      return absl::InternalError("not restored from where it should be");
    return absl::ToDoubleSeconds(clock_.Now() - begin);
  }
  absl::Status Save() {
    begun_ = clock_.Now();
    GT_ASSIGN_OR_RETURN(const bool saved, checkpointer_->Save(++step_));
    stall_ = clock_.Now() - begun_;
    return saved ? absl::OkStatus() : absl::InternalError("skipped");
  }
  void Fence() {
    const Instant begin = clock_.Now();
    checkpointer_->Fence();
    stall_ += clock_.Now() - begin;
  }
  // Milliseconds of the newest Save and its fence.
  double stall() const { return Milliseconds(stall_); }
  // When the newest save that was waited for began, and when it was known to be committed.
  Instant begun() const { return begun_; }
  Instant waited() const { return waited_; }
  const Memory& state() const { return state_; }

 private:
  Trainer(const std::string& uri, const std::string& writer, uint64_t bytes, const ckpt::FakeJob& job,
          int rank)
      : uri_(uri), session_(job, rank, writer), state_(bytes) {}

  const RealClock clock_;
  const std::string uri_;
  BenchSession session_;
  Memory state_;
  std::unique_ptr<Checkpointer> checkpointer_;
  absl::Duration stall_;
  Instant begun_, waited_;
  int64_t step_ = 0;
};

struct World {
  Options options;
  std::string folder;  // of the files, on the disk that is measured
  std::string writer;  // the program
  bool torch = false;
  std::string boto_python;  // "" = none has boto3
  std::string dcp_python;   // of PyPI's torch; "" = there is none
  std::vector<Outcome> outcomes;
  int turns() const { return options.quick || absl::EndsWith(options.only, "-4") ? 3 : 7; }

  absl::Status Add(const Comparison& comparison) {
    GT_ASSIGN_OR_RETURN(std::vector<Outcome> measured, Measure(comparison, turns()));
    // The whole takes a quarter of an hour, so its progress is shown.
    for (const Outcome& outcome : measured) {
      std::fprintf(stderr, "%s: %.4g %s, spread %.1f %%; %s %.4g, spread %.1f %%\n", outcome.name.c_str(),
                   outcome.ours.Median(), outcome.unit.c_str(), 100 * outcome.ours.Spread(),
                   outcome.peer.c_str(), outcome.theirs.Median(), 100 * outcome.theirs.Spread());
    }
    outcomes.insert(outcomes.end(), measured.begin(), measured.end());
    return absl::OkStatus();
  }
  std::string File(absl::string_view name) const { return absl::StrCat(folder, "/", name); }
  // Whether `part` is to be measured, of states of so many GiB; 0: it has one size.
  bool Wants(absl::string_view part, uint64_t gib = 0) const {
    return options.only.empty() || options.only == part || options.only == absl::StrCat(part, "-", gib);
  }
};

// ------------------------------------------------------------------ the stall

double MemcpyMilliseconds(const Memory& from, const Memory& to) {
  const RealClock clock;
  const Instant begin = clock.Now();
  std::memcpy(to.at(), from.at(), from.bytes());
  return Milliseconds(clock.Now() - begin);
}

absl::Status MeasureStall(World* world, const std::string& size, const std::string& writer, uint64_t bytes) {
  const std::string uri = world->File("stall");
  GT_ASSIGN_OR_RETURN(const auto trainer, Trainer::Make(uri, writer, bytes));
  Memory warm(bytes);
  GT_RETURN_IF_ERROR(world->Add(
      {absl::StrCat("stall of Save, ", size, writer.empty() ? ", own arena" : ", writer's arena"),
       "ms",
       [&] { return trainer->Stall(); },
       {{"one memcpy into warm memory", [&] { return MemcpyMilliseconds(trainer->state(), warm); }}}}));
  return absl::OkStatus();
}

// ------------------------------------------------------------------ the cost beside training

// Steps of a program that computes: first with what lies in its caches, then its optimiser changes the state.
class Steps {
 public:
  Steps(Trainer* trainer, int threads)
      : trainer_(trainer), threads_(threads), rounds_(RoundsFor(trainer->state().bytes())) {}

  // How long training stood still for one lazy save, in ms.
  absl::StatusOr<double> LazyStall() {
    GT_RETURN_IF_ERROR(trainer_->Save());
    InParallel([this](int) { Compute(); });
    trainer_->Fence();
    const double stall = trainer_->stall();
    GT_RETURN_IF_ERROR(trainer_->Wait());
    return stall;
  }
  // How long `steps` of them take, in ms, with one save after the first when asked to. The save is over
  // afterwards.
  absl::StatusOr<double> Run(int steps, bool save) {
    const Instant begin = clock_.Now();
    for (int step = 0; step < steps; ++step) {
      if (save && step == 1) GT_RETURN_IF_ERROR(trainer_->Save());
      InParallel([this](int) { Compute(); });
      trainer_->Fence();
      InParallel([this](int thread) { Optimise(thread); });
    }
    const double took = Milliseconds(clock_.Now() - begin);
    GT_RETURN_IF_ERROR(trainer_->Wait());
    return took;
  }
  absl::StatusOr<double> CostOfASave(int steps) {
    GT_ASSIGN_OR_RETURN(const double without, Run(steps, false));
    GT_ASSIGN_OR_RETURN(const double with, Run(steps, true));
    return with - without;
  }

 private:
  template <typename Body>
  void InParallel(Body body) {
    std::vector<std::thread> threads;
    for (int i = 1; i < threads_; ++i) threads.emplace_back([&body, i] { body(i); });
    body(0);
    for (std::thread& t : threads) t.join();
  }
  // Cache-resident work.
  static void Rounds(int64_t rounds) {
    float values[4096];
    for (size_t i = 0; i < std::size(values); ++i) values[i] = static_cast<float>(i);
    for (int64_t round = 0; round < rounds; ++round) {
      for (float& value : values) value = value * 0.999f + 1.0f;
      asm volatile("" : : "r"(values) : "memory");
    }
  }
  // The number of rounds that take a thread of its own 200 ms for each GiB of state, and 200 ms at least.
  static int64_t RoundsFor(uint64_t bytes) {
    constexpr int64_t kTrial = 4000;
    const RealClock clock;
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
      const Instant begin = clock.Now();
      Rounds(kTrial);
      best = std::min(best, Milliseconds(clock.Now() - begin));
    }
    return static_cast<int64_t>(200 * std::max(1.0, static_cast<double>(bytes) / kGiB) * kTrial / best);
  }
  void Compute() const { Rounds(rounds_); }
  void Optimise(int thread) {
    const size_t count = trainer_->state().bytes() / sizeof(float);
    float* const values = trainer_->state().floats();
    const size_t end = count * static_cast<size_t>(thread + 1) / static_cast<size_t>(threads_);
    for (size_t i = count * static_cast<size_t>(thread) / static_cast<size_t>(threads_); i < end; ++i)
      values[i] = values[i] * 0.999f + 1e-3f;
  }

  const RealClock clock_;
  Trainer* const trainer_;
  const int threads_;
  const int64_t rounds_;
};

absl::Status MeasureCost(World* world, const std::string& size, uint64_t bytes, bool lazy) {
  const std::string uri = world->File(lazy ? "lazy" : "cost");
  GT_ASSIGN_OR_RETURN(const auto trainer, Trainer::Make(uri, world->writer, bytes, lazy));
  Memory warm(lazy ? bytes : 0);
  for (const int threads : {1, 2}) {
    Steps steps(trainer.get(), threads);
    const std::string what = absl::StrCat(lazy ? "lazy save, " : "save, ", size, ", ", threads,
                                          threads == 1 ? " thread" : " threads");
    if (lazy) {
      GT_RETURN_IF_ERROR(world->Add(
          {absl::StrCat("stall of a ", what),
           "ms",
           [&] { return steps.LazyStall(); },
           {{"one memcpy into warm memory", [&] { return MemcpyMilliseconds(trainer->state(), warm); }}}}));
    }
    const int count = 4 + static_cast<int>(2 * bytes / kGiB);
    GT_RETURN_IF_ERROR(
        world->Add({absl::StrCat("cost of a ", what), "ms", [&] { return steps.CostOfASave(count); }, {}}));
  }
  return absl::OkStatus();
}

// ------------------------------------------------------------------ to disk and back

absl::StatusOr<double> Timed(const std::vector<std::string>& words) {
  const RealClock clock;
  const Instant begin = clock.Now();
  GT_RETURN_IF_ERROR(Run(words, kLong));
  return absl::ToDoubleSeconds(clock.Now() - begin);
}

absl::StatusOr<double> Dd(const World& world, uint64_t bytes, bool sync) {
  const std::string file = world.File("dd");
  unlink(file.c_str());  // a file that is there already would need no new blocks
  std::vector<std::string> words = {"/bin/dd",    "if=/dev/zero", absl::StrCat("of=", file),
                                    "bs=8388608", "oflag=direct", absl::StrCat("count=", bytes >> 23)};
  if (sync) words.push_back("conv=fsync");
  return Timed(words);
}

absl::StatusOr<double> Python(const World& world, const std::string& python, const std::string& kernel,
                              const std::string& where, uint64_t bytes) {
  const std::string file = world.File("seconds");
  GT_RETURN_IF_ERROR(Run({python, absl::StrCat(world.options.folder, "/../bench/checkpoint_peers.py"), file,
                          kernel, where, absl::StrCat(bytes), "1"},
                         kLong));
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(file, 100));
  double seconds = 0;
  if (!absl::SimpleAtod(text, &seconds))
    return absl::InternalError(absl::StrCat("\"", text, "\" is no time"));
  return seconds;
}

// Files below `folder` leave the page cache, so that a read comes from the disk.
absl::Status Forget(const std::string& folder) {
  sync();
  GT_ASSIGN_OR_RETURN(const auto store, ckpt::OpenStore(folder));
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->List("step-"));
  for (const std::string& key : keys) {
    const UniqueFd fd(open(absl::StrCat(folder, "/", key).c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.valid() || posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED) != 0)
      return ErrnoStatus(errno, absl::StrCat("forget ", key));
  }
  return absl::OkStatus();
}

// The shards of the newest checkpoint in `folder`, read into `memory`, one after the other or from `threads`
// places.
absl::StatusOr<double> PlainRead(const std::string& folder, const Memory& memory, int flags) {
  constexpr uint64_t kAtOnce = 8 << 20;
  GT_ASSIGN_OR_RETURN(const auto store, ckpt::OpenStore(folder));
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->List("step-"));
  const RealClock clock;
  const Instant begin = clock.Now();
  uint64_t at = 0;
  for (const std::string& key : keys) {
    if (!absl::EndsWith(key, ".safetensors")) continue;
    const UniqueFd fd(open(absl::StrCat(folder, "/", key).c_str(), O_RDONLY | O_CLOEXEC | flags));
    if (!fd.valid()) return ErrnoStatus(errno, key);
    ssize_t n;
    // A little less than the file where the header does not fit: the same for all that is compared.
    while (at + kAtOnce <= memory.bytes() && (n = read(fd.get(), memory.at() + at, kAtOnce)) > 0)
      at += static_cast<uint64_t>(n);
  }
  if (at + kAtOnce < memory.bytes()) return absl::InternalError("read less than there is");
  return absl::ToDoubleSeconds(clock.Now() - begin);
}

absl::Status MeasurePersist(World* world, const std::string& size, uint64_t bytes) {
  GT_ASSIGN_OR_RETURN(const auto trainer, Trainer::Make(world->File("persist"), world->writer, bytes));
  Comparison persist{absl::StrCat("hash, write, sync, commit, ", size),
                     "s",
                     [&] { return trainer->Persist(); },
                     {{"dd oflag=direct", [&] { return Dd(*world, bytes, false); }},
                      {"dd oflag=direct conv=fsync", [&] { return Dd(*world, bytes, true); }}}};
  if (world->torch) {
    persist.peers.push_back({"torch.save and fsync", [&]() -> absl::StatusOr<double> {
                               unlink(world->File("torch").c_str());
                               return Python(*world, kTorchPython, "torch-save", world->File("torch"), bytes);
                             }});
  }
  GT_RETURN_IF_ERROR(world->Add(persist));
  unlink(world->File("torch").c_str());
  unlink(world->File("dd").c_str());
  return absl::OkStatus();
}

absl::Status MeasureRestore(World* world, const std::string& size, uint64_t bytes) {
  const std::string uri = world->File("restore");
  GT_ASSIGN_OR_RETURN(const auto trainer, Trainer::Make(uri, world->writer, bytes));
  GT_RETURN_IF_ERROR(trainer->Persist().status());
  Memory warm(bytes);
  const auto cold = [&](auto read) {
    return [&, read]() -> absl::StatusOr<double> {
      GT_RETURN_IF_ERROR(Forget(uri));
      return read();
    };
  };
  Comparison restore{absl::StrCat("restore from disk, ", size),
                     "s",
                     cold([&] { return trainer->Restore(); }),
                     {{"read()", cold([&] { return PlainRead(uri, warm, 0); })},
                      {"read(), O_DIRECT", cold([&] { return PlainRead(uri, warm, O_DIRECT); })}}};
  if (world->torch) {
    GT_RETURN_IF_ERROR(Python(*world, kTorchPython, "torch-save", world->File("torch"), bytes).status());
    restore.peers.push_back({"torch.load", [&] {
                               return Python(*world, kTorchPython, "torch-load", world->File("torch"), bytes);
                             }});
  }
  GT_RETURN_IF_ERROR(world->Add(restore));
  unlink(world->File("torch").c_str());
  GT_RETURN_IF_ERROR(PlainRead(uri, warm, 0).status());  // into the page cache
  GT_RETURN_IF_ERROR(world->Add({absl::StrCat("restore from page cache, ", size),
                                 "s",
                                 [&] { return trainer->Restore(); },
                                 {{"read()", [&] { return PlainRead(uri, warm, 0); }}}}));
  return absl::OkStatus();
}

// Measures restores from the copy in this machine's memory, and from the disk when that is not there.
absl::Status MeasureNear(World* world, const std::string& size, uint64_t bytes) {
  std::string folder = "/dev/shm/bench_checkpoint.XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return ErrnoStatus(errno, folder);
  const auto remove = absl::MakeCleanup([&] {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  });
  const std::string uri = world->File("near");
  GT_ASSIGN_OR_RETURN(const auto trainer,
                      Trainer::Make(uri, "", bytes, false, absl::StrCat(2 * bytes, " ", folder)));
  GT_RETURN_IF_ERROR(trainer->Persist().status());
  const std::string copies = absl::StrCat(folder, "/", ckpt::FakeJob().job), aside = copies + ".aside";
  const auto from_disk = [&]() -> absl::StatusOr<double> {
    GT_RETURN_IF_ERROR(Forget(uri));
    if (rename(copies.c_str(), aside.c_str()) != 0) return ErrnoStatus(errno, copies);
    const absl::StatusOr<double> took = trainer->Restore();
    if (rename(aside.c_str(), copies.c_str()) != 0) return ErrnoStatus(errno, aside);
    return took;
  };
  Memory warm(bytes);
  const auto copy = [&] { return MemcpyMilliseconds(trainer->state(), warm) / 1000; };
  return world->Add({absl::StrCat("restore from near memory, ", size),
                     "s",
                     [&] { return trainer->Restore(/*near=*/true); },
                     {{"one memcpy into warm memory", copy}, {"restore from disk", from_disk}}});
}

// ------------------------------------------------------------------ beside torch.distributed.checkpoint

// Training processes of one job, all with the same state, as threads of this one.
class Trainers {
 public:
  static absl::StatusOr<std::unique_ptr<Trainers>> Make(const World& world, const std::string& uri,
                                                        uint64_t bytes, int size) {
    std::unique_ptr<Trainers> all(new Trainers);
    ckpt::FakeJob job{.world_size = size};
    job.meeting = std::make_shared<ckpt::Meeting>(size);
    all->ranks_.resize(static_cast<size_t>(size));
    GT_RETURN_IF_ERROR(all->Each([&](size_t rank) -> absl::Status {
      GT_ASSIGN_OR_RETURN(all->ranks_[rank],
                          Trainer::Make(uri, world.writer, bytes, false, "", job, static_cast<int>(rank)));
      return absl::OkStatus();
    }));
    return all;
  }
  // The stall, in seconds, of the rank that stood still for longest.
  absl::StatusOr<double> Stall() {
    GT_RETURN_IF_ERROR(SaveAndWait());
    double slowest = 0;
    for (const auto& rank : ranks_) slowest = std::max(slowest, rank->stall() / 1000);
    return slowest;
  }
  // The seconds from the call of Save until every rank knows of the commit.
  absl::StatusOr<double> Durable() {
    GT_RETURN_IF_ERROR(SaveAndWait());
    Instant begin = ranks_[0]->begun(), end = ranks_[0]->waited();
    for (const auto& rank : ranks_) {
      begin = std::min(begin, rank->begun());
      end = std::max(end, rank->waited());
    }
    return absl::ToDoubleSeconds(end - begin);
  }
  absl::StatusOr<double> Restore() {
    std::vector<double> took(ranks_.size());
    GT_RETURN_IF_ERROR(Each([&](size_t rank) -> absl::Status {
      GT_ASSIGN_OR_RETURN(took[rank], ranks_[rank]->Restore());
      return absl::OkStatus();
    }));
    return *std::max_element(took.begin(), took.end());
  }

 private:
  absl::Status SaveAndWait() {
    return Each([&](size_t rank) -> absl::Status {
      GT_RETURN_IF_ERROR(ranks_[rank]->Save());
      return ranks_[rank]->Wait();
    });
  }
  absl::Status Each(absl::FunctionRef<absl::Status(size_t)> body) {
    std::vector<absl::Status> results(ranks_.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      threads.emplace_back([&, rank] { results[rank] = body(rank); });
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& result : results) GT_RETURN_IF_ERROR(result);
    return absl::OkStatus();
  }

  std::vector<std::unique_ptr<Trainer>> ranks_;
};

// Saves the same state in the same folder with PyTorch's DCP, by as many processes (bench/checkpoint_dcp.py
// says how).
absl::Status MeasureDcp(World* world, const std::string& size, uint64_t bytes, int ranks) {
  const std::string uri = world->File("beside-dcp");
  GT_ASSIGN_OR_RETURN(const auto trainers, Trainers::Make(*world, uri, bytes, ranks));
  std::vector<std::pair<std::string, std::unique_ptr<PeerProcess>>> dcp;
  for (const std::string mode : {"thread", "process"}) {
    const std::string folder = world->File(absl::StrCat("dcp-", mode));
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    GT_ASSIGN_OR_RETURN(
        auto peer, PeerProcess::Start(
                       {world->dcp_python, absl::StrCat(world->options.folder, "/../bench/checkpoint_dcp.py"),
                        folder, absl::StrCat(bytes), absl::StrCat(ranks), mode},
                       folder + ".log"));
    // The first save of a process makes its memory; starting it takes seconds as well.
    GT_RETURN_IF_ERROR(peer->Ask("save", kLong).status());
    dcp.emplace_back(absl::StrCat("DCP async_save, a ", mode), std::move(peer));
  }
  const auto compare = [&](absl::string_view what, const char* unit, double scale, Sample ours,
                           const char* ask, size_t answer) {
    Comparison comparison{absl::StrCat(what, ", ", size, ", ", ranks, ranks == 1 ? " rank" : " ranks"),
                          unit,
                          std::move(ours),
                          {}};
    for (auto& [name, process] : dcp) {
      comparison.peers.push_back(
          {name, [process = process.get(), ask, answer, scale]() -> absl::StatusOr<double> {
             GT_ASSIGN_OR_RETURN(const auto seconds, process->Ask(ask, kLong));
             if (answer >= seconds.size()) return absl::InternalError("no such number");
             return scale * seconds[answer];
           }});
    }
    return world->Add(comparison);
  };
  GT_RETURN_IF_ERROR(compare(
      "stall of a save", "ms", 1000,
      [&]() -> absl::StatusOr<double> {
        GT_ASSIGN_OR_RETURN(const double seconds, trainers->Stall());
        return 1000 * seconds;
      },
      "save", 0));
  GT_RETURN_IF_ERROR(compare(
      "a save until it is durable", "s", 1, [&] { return trainers->Durable(); }, "save", 1));
  GT_RETURN_IF_ERROR(compare(
      "restore from disk", "s", 1,
      [&]() -> absl::StatusOr<double> {
        GT_RETURN_IF_ERROR(Forget(uri));
        return trainers->Restore();
      },
      "load", 0));
  return compare(
      "restore from page cache", "s", 1, [&] { return trainers->Restore(); }, "cached", 0);
}

// Saved by one rank, loaded by two: each has half of the rows. No byte may be read twice.
absl::Status MeasureReshard(World* world, const std::string& size, uint64_t bytes) {
  const std::string uri = world->File("reshard");
  {
    GT_ASSIGN_OR_RETURN(const auto trainer, Trainer::Make(uri, "", bytes));
    GT_RETURN_IF_ERROR(trainer->Persist().status());
  }
  Memory halves(bytes);
  uint64_t read = 0;
  const Sharding rows{.mesh = {{"dp", 2}}, .splits = {{0, "dp"}}};
  const auto load = [&]() -> absl::StatusOr<double> {
    absl::Status statuses[2];
    uint64_t counted[2] = {};
    absl::Duration took[2];
    ckpt::RunRanks({.world_size = 2}, [&](ckpt::FakeSession* session) {
      const int rank = session->rank();
      statuses[rank] = [&]() -> absl::Status {
        GT_ASSIGN_OR_RETURN(
            const auto checkpointer,
            ckpt::OpenCheckpointer(
                session, {.uri = uri}, [](const char*) { return std::nullopt; }, &ckpt::OpenStore));
        char* at = halves.at() + static_cast<uint64_t>(rank) * bytes / 2;
        for (uint64_t begin = 0; begin < bytes; begin += kTensorBytes, at += kTensorBytes / 2) {
          GT_RETURN_IF_ERROR(checkpointer->AddSharded(
              absl::StrCat("w", begin / kTensorBytes), gtrain::Memory{at, kTensorBytes / 2},
              {static_cast<int64_t>(kTensorBytes / sizeof(float)) / kColumns, kColumns}, rows,
              DType::kFloat32));
        }
        const RealClock clock;
        const Instant start = clock.Now();
        GT_ASSIGN_OR_RETURN(const auto restored, checkpointer->Restore());
        took[rank] = clock.Now() - start;
        if (!restored || restored->bytes != bytes / 2) return absl::InternalError("not restored whole");
        counted[rank] = restored->bytes_read;
        return absl::OkStatus();
      }();
    });
    for (const absl::Status& status : statuses) GT_RETURN_IF_ERROR(status);
    read = counted[0] + counted[1];
    // A rank reads whole chunks of 4 MiB: one lies on the border of two tensors' halves, for each of them.
    if (read > bytes + 2 * (bytes / kTensorBytes + 1) * (4 << 20))
      return absl::InternalError(absl::StrCat("read ", read, " bytes where ", bytes, " are needed"));
    return absl::ToDoubleSeconds(std::max(took[0], took[1]));
  };
  const auto plain = [&] { return PlainRead(uri, halves, 0); };
  GT_RETURN_IF_ERROR(PlainRead(uri, halves, 0).status());
  GT_RETURN_IF_ERROR(world->Add(
      {absl::StrCat("1 rank to 2, page cache, ", size), "s", load, {{"read() by one thread", plain}}}));
  std::printf("1 rank to 2: %.3f bytes read for one that is needed, each needed byte once\n",
              static_cast<double>(read) / static_cast<double>(bytes));
  return absl::OkStatus();
}

// ------------------------------------------------------------------ to an object store

// One PUT of all bytes: as fast as HTTP goes.
absl::StatusOr<double> PutOnce(const HttpSink& sink, const Memory& data) {
  const RealClock clock;
  const Instant begin = clock.Now();
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(sink.port()));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0)
    return ErrnoStatus(errno, "connect");
  const std::string head =
      absl::StrCat("PUT /bucket/key HTTP/1.1\r\nHost: sink\r\nContent-Length: ", data.bytes(), "\r\n\r\n");
  for (absl::string_view part : {absl::string_view(head), absl::string_view(data.at(), data.bytes())}) {
    while (!part.empty()) {
      const ssize_t n = send(fd.get(), part.data(), part.size(), MSG_NOSIGNAL);
      if (n <= 0) return ErrnoStatus(errno, "send");
      part.remove_prefix(static_cast<size_t>(n));
    }
  }
  char answer[256];
  const ssize_t n = recv(fd.get(), answer, sizeof(answer), 0);
  if (n <= 0 || !absl::StrContains(absl::string_view(answer, static_cast<size_t>(n)), " 200 "))
    return absl::InternalError("the sink refused a plain put");
  return absl::ToDoubleSeconds(clock.Now() - begin);
}

// Returns the time of `put`, if the sink counted every byte; some put more than once.
absl::StatusOr<double> Arrives(const HttpSink& sink, const Memory& data,
                               absl::FunctionRef<absl::StatusOr<double>()> put) {
  const uint64_t before = sink.put_bytes();
  GT_ASSIGN_OR_RETURN(const double took, put());
  const uint64_t arrived = sink.put_bytes() - before;
  if (arrived >= data.bytes()) return took;
  return absl::DataLossError(absl::StrCat(arrived, " of ", data.bytes(), " bytes arrived"));
}

absl::StatusOr<double> PlainPut(const HttpSink& sink, const Memory& data) {
  return Arrives(sink, data, [&] { return PutOnce(sink, data); });
}

// `payload`: signed or checksum.
absl::StatusOr<double> StorePut(const HttpSink& sink, const Memory& data, const char* payload = "signed") {
  setenv("GTRAIN_S3_PAYLOAD", payload, 1);
  setenv("AWS_ENDPOINT_URL_S3", sink.endpoint().c_str(), 1);
  setenv("AWS_ACCESS_KEY_ID", "a", 1);
  setenv("AWS_SECRET_ACCESS_KEY", "b", 1);
  GT_ASSIGN_OR_RETURN(const auto store, ckpt::OpenStore("s3://bucket/run"));
  const RealClock clock;
  const Instant begin = clock.Now();
  return Arrives(sink, data, [&]() -> absl::StatusOr<double> {
    GT_RETURN_IF_ERROR(store->PutIfAbsent("step-1/shard", absl::string_view(data.at(), data.bytes())));
    return absl::ToDoubleSeconds(clock.Now() - begin);
  });
}

// Checks that the measured uploads arrive byte for byte.
absl::Status CheckUploads() {
  const Memory data((64 << 20) + 4097);
  for (size_t i = 0; i < data.bytes(); ++i) data.at()[i] = static_cast<char>(i * 31 + (i >> 12));
  HttpSink sink({.keep = true});
  const absl::string_view bytes(data.at(), data.bytes());
  for (const char* payload : {"signed", "checksum"}) {
    GT_RETURN_IF_ERROR(StorePut(sink, data, payload).status());
    if (sink.TakeKept() != bytes)
      return absl::DataLossError(absl::StrCat("uploads, ", payload, ": not what was put"));
  }
  GT_RETURN_IF_ERROR(PlainPut(sink, data).status());
  if (sink.TakeKept() != bytes) return absl::DataLossError("plain puts: not what was put");
  return absl::OkStatus();
}

absl::Status MeasureUpload(World* world) {
  GT_RETURN_IF_ERROR(CheckUploads());
  const Memory data(world->options.quick ? kGiB / 8 : kGiB / 2);
  HttpSink fast({}), link({.bytes_per_second = 125'000'000}), moody({.refuse = 0.05});
  Comparison upload{absl::StrCat("upload ", data.bytes() >> 20, " MiB"),
                    "s",
                    [&] { return StorePut(fast, data); },
                    {{"one plain HTTP put", [&] { return PlainPut(fast, data); }}}};
  if (!world->boto_python.empty()) {
    upload.peers.push_back({"boto3", [&] {
                              return Arrives(fast, data, [&] {
                                return Python(*world, world->boto_python, "boto3", fast.endpoint(),
                                              data.bytes());
                              });
                            }});
  }
  GT_RETURN_IF_ERROR(world->Add(upload));
  upload.name = "the same, a CRC32C instead of a signed SHA-256";
  upload.ours = [&] { return StorePut(fast, data, "checksum"); };
  GT_RETURN_IF_ERROR(world->Add(upload));
  GT_RETURN_IF_ERROR(world->Add({"the same, 5 % of the answers 503",
                                 "s",
                                 [&] { return StorePut(moody, data); },
                                 {{"without 503", [&] { return StorePut(fast, data); }}}}));
  return world->Add({absl::StrCat("upload ", data.bytes() >> 20, " MiB at 1 Gbit/s"),
                     "s",
                     [&] { return StorePut(link, data); },
                     {{"one plain HTTP put", [&] { return PlainPut(link, data); }}}});
}

// The Python that people have, if it has boto3; "" otherwise. To be asked before HOME is another.
std::string PythonWithBoto(const std::string& file) {
  const std::string ask = absl::StrCat("import sys, boto3; open('", file, "', 'w').write(sys.executable)");
  if (!Run({"/usr/bin/env", "python3", "-c", ask}).ok()) return "";
  const absl::StatusOr<std::string> python = ReadFile(file, 4096);
  unlink(file.c_str());
  return python.ok() ? *python : "";
}

// The Python of PyPI's torch (tools/bench_torch.sh); "" after saying why there is none. To be asked before
// HOME is another.
std::string PythonWithDcp(const Options& options) {
  const std::string file = absl::StrCat("/tmp/bench_checkpoint.python.", getpid());
  const std::string script = absl::StrCat(options.folder, "/../bench/bench_torch.sh");
  const absl::Status asked = Run({"/usr/bin/env", "bash", "-c", "\"$0\" --python > \"$1\"", script, file});
  const absl::StatusOr<std::string> python = ReadFile(file, 4096);
  unlink(file.c_str());
  return asked.ok() && python.ok() ? std::string(absl::StripAsciiWhitespace(*python)) : "";
}

int Main(int argc, char** argv) {
  World world;
  std::vector<std::string> parts = {"reshard", "upload", "dcp"};
  for (const std::string part : {"stall", "cost", "persist", "restore", "near"}) {
    for (const std::string gib : {"", "-1", "-4"}) parts.push_back(part + gib);
  }
  world.options = ParseOptions(argc, argv, parts);
  world.writer = absl::StrCat(world.options.folder, "/gtrain-writer");
  SetLogSink([](LogLevel level, absl::string_view line) {
    // Half of the measurements want no writer.
    if (level != LogLevel::kInfo && !absl::StrContains(line, "this measurement writes by itself"))
      std::fprintf(stderr, "%s\n", std::string(line).c_str());
  });
  world.boto_python = PythonWithBoto(absl::StrCat("/tmp/bench_checkpoint.", getpid()));
  if (world.boto_python.empty()) std::fprintf(stderr, "bench_checkpoint: without boto3\n");
  // --quick leaves it out, unless it is what is asked for: it takes minutes.
  if (world.Wants("dcp") && (!world.options.quick || world.options.only == "dcp")) {
    world.dcp_python = PythonWithDcp(world.options);
    if (world.dcp_python.empty())
      std::fprintf(stderr, "bench_checkpoint: without torch.distributed.checkpoint\n");
  }
  Home home;
  absl::Status status = home.Make();
  world.folder = home.path();
  world.torch =
      !world.options.quick && Executable(kTorchPython) && Run({kTorchPython, "-c", "import torch"}).ok();
  if (!world.torch) std::fprintf(stderr, "bench_checkpoint: without torch\n");
  std::vector<std::pair<std::string, uint64_t>> sizes = {{"256 MiB", kGiB / 4}};
  if (!world.options.quick) sizes = {{"1 GiB", kGiB}, {"4 GiB", 4 * kGiB}};
  const auto measure = [&](bool wanted, auto part) {
    if (wanted && status.ok()) status = part();
  };
  measure(world.Wants("reshard"), [&] { return MeasureReshard(&world, sizes[0].first, sizes[0].second); });
  measure(world.Wants("upload"), [&] { return MeasureUpload(&world); });
  for (const int ranks : {1, 2}) {
    measure(!world.dcp_python.empty(),
            [&] { return MeasureDcp(&world, sizes[0].first, sizes[0].second, ranks); });
  }
  for (const auto& [name, size_bytes] : sizes) {
    const std::string& size = name;
    const uint64_t bytes = size_bytes, gib = bytes / kGiB;
    for (const std::string& writer : {std::string(), world.writer})
      measure(world.Wants("stall", gib), [&] { return MeasureStall(&world, size, writer, bytes); });
    for (const bool lazy : {false, true})
      measure(world.Wants("cost", gib), [&] { return MeasureCost(&world, size, bytes, lazy); });
    measure(world.Wants("persist", gib), [&] { return MeasurePersist(&world, size, bytes); });
    measure(world.Wants("restore", gib), [&] { return MeasureRestore(&world, size, bytes); });
    measure(world.Wants("near", gib), [&] { return MeasureNear(&world, size, bytes); });
  }
  home.Remove();
  if (!status.ok()) {
    std::fprintf(stderr, "bench_checkpoint: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return Report(world.options, "checkpoint", world.outcomes);
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(argc, argv); }
