#include "tests/sim/spot.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/units.h"
#include "job/spec/spot_trace.h"
#include "tests/sim/world.h"

namespace gtrain::sim {
namespace {

constexpr int64_t kStartMin = 60 * kSec, kStartMax = 300 * kSec;  // from an order to an agent that runs
constexpr int64_t kEnoughNotice = 20 * kSec;  // 13 s before the end the head ends generations in place
constexpr int64_t kForGood = 100'000 * kMin;

// A model of a few hundred million parameters on machines with 10 Gbit/s.
Training TrainingOf(const SpotOptions& options) {
  Training training;
  training.samples = {.samples = 1'000'000, .epochs = 1'000, .global_batch = 1'024};
  training.sample_time = kSec / 32;
  training.save_every = options.save_every;
  training.state_bytes = int64_t{4} << 30;
  training.link_rate = training.store_rate = 1'000'000'000;
  return training;
}

std::string JobText(const SpotOptions& options) {
  return absl::StrCat("name: spot\nrun: train\nresources: {cpus: 1}\nranks: {min: ", options.ranks_min,
                      ", max: ", options.ranks_max,
                      "}\nelastic: {mode: ", options.in_place ? "in-place" : "restart", "}\n");
}

class SpotRun {
 public:
  SpotRun(const SpotTrace& trace, const SpotOptions& options)
      : trace_(trace), options_(options), rng_(options.seed ^ 0x73706f74), world_(options.seed, Quiet()) {
    Program program;
    program.sdk = true;
    program.stays = options.in_place;
    program.letting_go = 50 * kMs;
    program.lets_go_late = program.ignores_term = 0;
    program.startup = 10 * kSec;
    program.training = TrainingOf(options);
    world_.SetProgram(JobText(options), program);
    world_.ranks.on_batch = [this](const Gang& gang, const sharding::SampleRange& batch) {
      ++result_.steps;
      Write("{\"at\":%.3f,\"generation\":%d,\"ranks\":%d,\"step\":%d,\"epoch\":%d,\"first\":%d,\"count\":%d}",
            Now(), gang.generation, gang.world, gang.step, batch.epoch, batch.begin, batch.size());
    };
    world_.ranks.on_begin = [this](const Gang& gang) { Begin(gang); };
    if (options.trace) world_.kernel.Trace(1, true);
  }

  absl::StatusOr<SpotResult> Run() {
    if (!options_.events.empty()) {
      out_ = std::fopen(options_.events.c_str(), "w");
      if (out_ == nullptr) return absl::InvalidArgumentError("cannot write " + options_.events);
    }
    WriteHeader();
    world_.head->Start();
    world_.RunFor(kSec);
    world_.clients[0]->Ask(core::ClientSubmit{JobText(options_), {}, "/runs/{job}"}, kMin, nullptr);
    world_.RunFor(kSec);
    zero_ = world_.kernel.now();
    for (size_t tick = 0; tick < trace_.nodes.size() && !world_.kernel.failed(); ++tick) {
      const int64_t left = options_.length - (world_.kernel.now() - zero_);
      if (left <= 0) break;
      Reach(trace_.nodes[tick]);
      AnnounceFor(tick + 1);
      world_.RunFor(std::min(left, trace_.gap));
    }
    Write("{\"at\":%.3f,\"end\":true}", Now());
    if (out_ != nullptr && std::fclose(out_) != 0)
      return absl::UnavailableError(absl::StrCat("cannot write all of ", options_.events));
    result_.seconds = (world_.kernel.now() - zero_) / kSec;
    result_.events = world_.kernel.events();
    result_.generations = world_.checker.granted();
    result_.violations = world_.kernel.violations();
    return std::move(result_);
  }

 private:
  static Profile Quiet() {
    Profile profile;
    profile.nodes = 0;
    profile.clients = 1;
    profile.usual_times = true;
    return profile;
  }

  double Now() const { return static_cast<double>(world_.kernel.now() - zero_) / 1e9; }

  template <typename... Args>
  void Write(const absl::FormatSpec<Args...>& format, const Args&... args) {
    if (out_ == nullptr) return;
    absl::FPrintF(out_, format, args...);
    std::fputc('\n', out_);
  }

  void WriteHeader() {
    const Training training = TrainingOf(options_);
    Write(
        "{\"spot_run\":1,\"mode\":\"%s\",\"batch\":%d,\"samples\":%d,\"sample_seconds\":%.6f,\"gap\":%d,"
        "\"ranks_min\":%d,\"ranks_max\":%d,\"start_min\":%d,\"start_max\":%d}",
        options_.in_place ? "in-place" : "restart", training.samples.global_batch, training.samples.samples,
        static_cast<double>(training.sample_time) / 1e9, trace_.gap / kSec, options_.ranks_min,
        options_.ranks_max, kStartMin / kSec, kStartMax / kSec);
  }

  void Begin(const Gang& gang) {
    std::string nodes;
    for (const auto& [number, rank] : gang.ranks)
      absl::StrAppend(&nodes, nodes.empty() ? "" : ",", rank->machine);
    Write("{\"at\":%.3f,\"generation\":%d,\"begins_behind\":%d,\"nodes\":[%s]}", Now(), gang.generation,
          gang.step, nodes);
  }

  // Each machine that comes is a new one: it has a key and a name that no other had.
  void Order() {
    world_.AddMachine(1);
    const int machine = world_.machines.back()->index();
    given_.push_back(machine);
    Write("{\"at\":%.3f,\"node\":%d,\"is\":\"given\"}", Now(), machine);
    world_.kernel.After(kStartMin + static_cast<int64_t>(rng_.Unit() * (kStartMax - kStartMin)),
                        [this, machine] {
                          if (std::ranges::count(given_, machine) == 0) return;
                          Write("{\"at\":%.3f,\"node\":%d,\"is\":\"up\"}", Now(), machine);
                          MachineOf(machine).StartAgent();
                        });
  }

  void Reach(int wanted) {
    while (std::ssize(given_) > wanted) {
      const int machine = leaving_.empty() ? AnyGiven() : leaving_.front();
      if (!leaving_.empty()) leaving_.pop_front();
      std::erase(given_, machine);
      Write("{\"at\":%.3f,\"node\":%d,\"is\":\"gone\"}", Now(), machine);
      CheckHandedOver(machine);
      MachineOf(machine).PowerOff(kForGood);
    }
    leaving_.clear();
    while (std::ssize(given_) < wanted) Order();
  }

  // INV-15. Processes that wait for room where the machine stays are in no generation.
  void CheckHandedOver(int machine) {
    if (told_.erase(machine) == 0) return;
    ++result_.told;
    for (const auto& [key, gang] : world_.ranks.gangs()) {
      if (OnlySaves(key.first, key.second)) continue;
      for (const auto& [number, rank] : gang.ranks) {
        if (rank->machine != machine || rank->generation != key.second || !rank->exited || rank->kept)
          continue;
        world_.kernel.Fail("INV-15", absl::StrCat("m", machine, " goes with rank ", number, " of generation ",
                                                  key.second, ", and was told in time"));
      }
    }
  }

  // All machines leave, and who is left tries to save what came behind the last checkpoint until the end.
  bool OnlySaves(const JobId& job, uint64_t generation) const {
    const core::HeadCore* const core = world_.head->core();
    const core::JobRecord* const record = core == nullptr ? nullptr : core->RecordOf(job);
    return record != nullptr && record->saves && record->generation.value == generation;
  }

  // Those that the next tick takes hear of it in time, if they run by then.
  void AnnounceFor(size_t tick) {
    if (!options_.notice || tick >= trace_.nodes.size()) return;
    std::vector<int> left = given_;
    for (int lost = static_cast<int>(given_.size()) - trace_.nodes[tick]; lost > 0; --lost) {
      const auto which = left.begin() + static_cast<ptrdiff_t>(rng_.Below(left.size()));
      leaving_.push_back(*which);
      world_.kernel.After(trace_.gap - *options_.notice, [this, machine = *which] {
        if (!MachineOf(machine).agent_alive()) return;
        Write("{\"at\":%.3f,\"node\":%d,\"is\":\"told\"}", Now(), machine);
        MachineOf(machine).CloudSays(*options_.notice);
        if (*options_.notice >= kEnoughNotice) told_.insert(machine);
      });
      left.erase(which);
    }
  }

  int AnyGiven() { return given_[rng_.Below(given_.size())]; }
  Machine& MachineOf(int index) { return *world_.machines[static_cast<size_t>(index)]; }

  const SpotTrace& trace_;
  const SpotOptions& options_;
  Rng rng_;  // of the market alone: each mode of a job gets the same machines at the same times
  World world_;
  SpotResult result_;
  FILE* out_ = nullptr;
  int64_t zero_ = 0;
  std::vector<int> given_;   // machines, also those that are starting up
  std::deque<int> leaving_;  // with the next tick
  std::set<int> told_;       // in time, of those
};

}  // namespace

absl::StatusOr<SpotTrace> ReadSpotTrace(const std::string& path) {
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(absl::StrCat("cannot read the trace ", path));
  std::stringstream text;
  text << in.rdbuf();
  absl::StatusOr<spec::SpotTrace> trace = spec::ParseSpotTrace(text.str());
  if (!trace.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", trace.status().message()));
  return SpotTrace{absl::ToInt64Nanoseconds(trace->gap), std::move(trace->nodes)};
}

absl::StatusOr<SpotResult> RunSpot(const SpotTrace& trace, const SpotOptions& options) {
  return SpotRun(trace, options).Run();
}

}  // namespace gtrain::sim
