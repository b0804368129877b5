// Calls of actors under faults, each of them checked against what docs/actors.md says one can rely on.
//   e2e_actors_soak DIR kill   callers on all ranks, actors on rank 2 and above, until DIR/enough is there
//   e2e_actors_soak DIR slow SECONDS CALLERS   so many callers on all ranks of one actor that takes 1 ms a
//   call
//
// A stream is one caller's calls to one target, numbered from 1. A target keeps two numbers of each stream:
// the call that it ran last, and how many it has run. It answers with what they were, so the caller knows
// from each good answer which calls before it had run, and compares them with what it was told (Model).
//
// The test that starts and kills the ranks (actors_soak_test.py) reads these files of DIR:
//   process.PID   one a process; "driver" and "spared" name those that are not to be killed
//   progress      calls that were answered
//   reports       a line a report: calls ok unavailable late refused lost, then in seconds how long after its
//                 deadline the latest answer came, the longest time without a good answer, and when it began
//   moves         a line for each caller and target that has moved: the process where it was, when it last
//                 answered there, when it first answered elsewhere (seconds of CLOCK_MONOTONIC)
//   wrong         a line for each promise that was broken
#include <fcntl.h>
#include <gtrain/gtrain.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr size_t kWrongMax = 10;  // sentences in one report
constexpr size_t kSlotsMax = 4'096;
constexpr int kRestarts = 1'000'000;     // nothing ends because it was killed too often
constexpr int64_t kRunMs = 1'000;        // of a caller, until it reports
constexpr int64_t kPatienceMs = 30'000;  // of calls that outlast the loss of a host
constexpr int64_t kHasteMs = 100;        // of those that do not

std::vector<std::string> arguments;

// Of the clock that all processes of a machine share.
int64_t Nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
double Seconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

// Whose calls these are. A caller that is made anew is another one in its slot, and later.
struct StreamId {
  uint64_t slot = 0, incarnation = 0;
};

// What a target has run of a stream.
struct Applied {
  uint64_t birth = 0;  // of the object that answers: each one is born later than those before it
  int64_t process = 0;
  uint64_t number = 0;    // this call; 0: it was only asked
  uint64_t previous = 0;  // the call that it ran before
  uint64_t count = 0;     // calls that it has run, this one included
  uint64_t disorder = 0;  // calls of any stream that ran again, or after a later one
};

// The last call of each stream that ran, in a file that outlives processes: a call that runs in two of them
// is seen there.
class Effects {
 public:
  Effects() {
    const int file = open((arguments[0] + "/effects").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, kBytes) != 0) std::abort();
    void* const at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) std::abort();
    close(file);
    last_ = static_cast<Last*>(at);
  }
  ~Effects() { munmap(last_, kBytes); }
  Effects(const Effects&) = delete;
  Effects& operator=(const Effects&) = delete;

  // Whether it is the first time, and no later one has run.
  bool Add(const StreamId& id, uint64_t number) {
    Last& last = last_[id.slot];
    if (last.incarnation != id.incarnation) last = {id.incarnation, 0};
    return number > std::exchange(last.number, number);
  }

 private:
  struct Last {
    uint64_t incarnation, number;
  };
  static constexpr size_t kBytes = (kSlotsMax + 1) * sizeof(Last);
  Last* last_ = nullptr;
};

class Target {
 public:
  // What a kept one does outside of itself may happen twice.
  Target(int64_t busy_ms, bool kept) : busy_ms_(busy_ms) {
    if (!kept) effects_.emplace();
  }

  Applied Apply(const StreamId& id, uint64_t number, const std::string& /*ballast*/) {
    if (busy_ms_ > 0) poll(nullptr, 0, static_cast<int>(busy_ms_));  // stands for computing
    Stream& stream = streams_[id.slot];
    // What a dead caller has sent may come after the first call of the next one in its slot.
    if (id.incarnation < stream.incarnation) return {};
    if (id.incarnation > stream.incarnation) stream = {id.incarnation, 0, 0};
    if (number <= stream.last || (effects_ && !effects_->Add(id, number))) ++disorder_;
    const uint64_t previous = std::exchange(stream.last, number);
    return {birth_, getpid(), number, previous, ++stream.count, disorder_};
  }
  Applied Ask(const StreamId& id) const {
    const auto it = streams_.find(id.slot);
    const bool known = it != streams_.end() && it->second.incarnation == id.incarnation;
    return {birth_, getpid(), 0, known ? it->second.last : 0, known ? it->second.count : 0, disorder_};
  }
  void Persist(auto& archive) { archive(streams_, disorder_); }

 private:
  struct Stream {
    uint64_t incarnation = 0, last = 0, count = 0;
  };
  const int64_t busy_ms_;
  const uint64_t birth_ = static_cast<uint64_t>(Nanoseconds());
  std::optional<Effects> effects_;
  std::map<uint64_t, Stream> streams_;
  uint64_t disorder_ = 0;
};
[[maybe_unused]] constexpr auto kTarget =
    gtrain::Actor<Target, gtrain::Ctor<int64_t, bool>, gtrain::Methods<&Target::Apply, &Target::Ask>>;

struct Move {
  int64_t process = 0;  // where the target was
  int64_t last = 0, first = 0;
};

struct Report {
  uint64_t ok = 0, unavailable = 0, late = 0, refused = 0;
  uint64_t lost = 0;     // calls that were good where they ran, and are not in the life that answers now
  int64_t lateness = 0;  // the most by which an answer came after its deadline
  int64_t gap = 0, gap_begin = 0;  // the longest time without a good answer
  std::vector<Move> moves;
  std::vector<std::string> wrong;

  void Wrong(std::string what) {
    if (wrong.size() < kWrongMax) wrong.push_back(std::move(what));
  }
};

// What may have become of the calls of one stream. Answers are given to it in the order of their calls.
class Model {
 public:
  explicit Model(bool kept) : kept_(kept) {}

  void Answered(uint64_t number, const gtrain::Result<Applied>& answer, Report& report) {
    if (answer.ok()) {
      ++report.ok;
      if (answer->number != number) report.Wrong(Name(number) + " has the answer of " + Name(answer->number));
      Ran(number, *answer, report);
      last_ok_ = number;
      count_ = answer->count;
      birth_ = answer->birth;
      maybe_.erase(maybe_.begin(), maybe_.upper_bound(number));
    } else {
      Failed(number, answer.status(), report);
    }
  }
  // Nothing is under way; `answer` is that of Ask.
  void Asked(uint64_t next, Applied answer, Report& report) {
    ++answer.count;
    Ran(next, answer, report);
  }
  uint64_t birth() const { return birth_; }

 private:
  static std::string Name(uint64_t number) { return "call " + std::to_string(number); }

  void Failed(uint64_t number, const gtrain::Status& status, Report& report) {
    const auto says = [&](const char* what) { return status.message().find(what) != std::string::npos; };
    const bool may_have_run = says("may have run") || says("has begun");
    switch (status.code()) {
      case gtrain::StatusCode::kUnavailable:
        ++report.unavailable;
        if (kept_) report.Wrong(Name(number) + " of a kept actor: " + status.ToString());
        maybe_.insert(number);
        return;
      case gtrain::StatusCode::kDeadlineExceeded:
        ++report.late;
        if (may_have_run) maybe_.insert(number);
        if (!may_have_run && !says("does not run") && !says("and will not"))
          report.Wrong(Name(number) + " does not say whether it may have run: " + status.ToString());
        return;
      case gtrain::StatusCode::kResourceExhausted:
        ++report.refused;
        return;
      default:
        report.Wrong(Name(number) + ": " + status.ToString());
    }
  }

  // Which calls since the last good answer have run: those of unknown fate may have, and no others.
  void Ran(uint64_t number, const Applied& answer, Report& report) const {
    const bool same = kept_ || answer.birth == birth_;
    if (!kept_ && answer.birth < birth_)
      report.Wrong(Name(number) + " ran in an object that was lost before");
    if (answer.disorder > 0) report.Wrong("calls ran again, or out of their order");
    const uint64_t from = same ? last_ok_ : 0;
    const uint64_t between = answer.count - (same ? count_ : 0) - 1;
    if (!same) report.lost += count_;
    const bool none = answer.previous == from;
    const bool right = none ? between == 0
                            : maybe_.contains(answer.previous) && answer.previous < number && between >= 1 &&
                                  between <= maybe_.size();
    if (right) return;
    report.Wrong(Name(number) + ": the target ran " + Name(answer.previous) + " before it and " +
                 std::to_string(answer.count) + " in all; the last good answer was " + Name(from) + " with " +
                 std::to_string(same ? count_ : 0) + ", and " + std::to_string(maybe_.size()) +
                 " between may have run");
  }

  const bool kept_;
  uint64_t last_ok_ = 0, count_ = 0, birth_ = 0;
  std::set<uint64_t> maybe_;  // after the last good answer
};

// How a caller calls.
struct Plan {
  uint64_t slot = 0;
  bool kept = false;
  int64_t timeout_ms = kPatienceMs;
  uint64_t window = 0;   // calls under way
  uint64_t ballast = 0;  // bytes of arguments that nobody reads
  int64_t run_ms = kRunMs;
};

// One stream. Its model goes on from run to run, and a caller that is made anew begins another stream.
class Caller {
 public:
  // `pace` is another actor, that lives as long as the driver.
  gtrain::Task<Report> Run(gtrain::Ref<Target> target, gtrain::Ref<Target> pace, Plan plan) {
    if (!model_) model_.emplace(plan.kept);
    const gtrain::Ref<Target> timed = target.With(std::chrono::milliseconds(plan.timeout_ms));
    const StreamId id{plan.slot, incarnation_};
    const std::string ballast(plan.ballast, 'b');
    const int64_t end = Nanoseconds() + plan.run_ms * 1'000'000;
    Report report;
    std::deque<Made> window;
    bool refused = false;
    while (Nanoseconds() < end || !window.empty()) {
      // Who is refused awaits its other calls before it makes more, as docs/actors.md asks for.
      if (refused && window.empty()) (void)co_await gtrain::Try(pace.Call<&Target::Ask>(id));
      refused = refused && !window.empty();
      while (!refused && window.size() < plan.window && Nanoseconds() < end) {
        const int64_t deadline = Nanoseconds() + plan.timeout_ms * 1'000'000;
        window.push_back({++made_, deadline, timed.Call<&Target::Apply>(id, made_, ballast)});
        if (window.back().future.there()) break;  // it may have been refused
      }
      if (window.empty()) continue;
      Made first = std::move(window.front());
      window.pop_front();
      const gtrain::Result<Applied> answer = co_await gtrain::Try(std::move(first.future));
      // All have the same time, so none before this one has held up that it is heard of.
      report.lateness = std::max(report.lateness, Nanoseconds() - first.deadline);
      if (answer.ok()) Succeeded(*answer, report);
      refused |= answer.status().code() == gtrain::StatusCode::kResourceExhausted;
      model_->Answered(first.number, answer, report);
    }
    const gtrain::Result<Applied> state = co_await gtrain::Try(timed.Call<&Target::Ask>(id));
    if (state.ok()) model_->Asked(made_ + 1, *state, report);
    co_return report;
  }
  int64_t Process() const { return getpid(); }

 private:
  struct Made {
    uint64_t number;
    int64_t deadline;
    gtrain::Future<Applied> future;
  };

  void Succeeded(const Applied& answer, Report& report) {
    const int64_t now = Nanoseconds();
    if (last_success_ > 0 && now - last_success_ > report.gap) {
      report.gap = now - last_success_;
      report.gap_begin = last_success_;
    }
    if (last_success_ > 0 && model_->birth() != answer.birth)
      report.moves.push_back({process_, last_success_, now});
    last_success_ = now;
    process_ = answer.process;
  }

  const uint64_t incarnation_ = static_cast<uint64_t>(Nanoseconds());
  std::optional<Model> model_;
  uint64_t made_ = 0;
  int64_t last_success_ = 0, process_ = 0;
};
[[maybe_unused]] constexpr auto kCaller =
    gtrain::Actor<Caller, gtrain::Ctor<>, gtrain::Methods<&Caller::Run, &Caller::Process>>;

struct Stream {
  gtrain::Owner<Caller> caller;
  gtrain::Ref<Target> target;
  Plan plan;
};

class Files {
 public:
  // What a report of a caller came to. False: there is none, and that is no fault of this test's.
  void Take(const Stream& stream, const gtrain::Result<Report>& report) {
    if (report.ok()) {
      Print(stream, *report);
    } else if (report.status().code() != gtrain::StatusCode::kUnavailable) {
      wrong_ << "a caller has not come back: " << report.status().ToString() << std::endl;
    }  // else it was killed, and the next one begins another stream
  }
  static bool Enough() { return std::filesystem::exists(arguments[0] + "/enough"); }

 private:
  void Print(const Stream& stream, const Report& report) {
    const uint64_t calls = report.ok + report.unavailable + report.late + report.refused;
    reports_ << calls << " " << report.ok << " " << report.unavailable << " " << report.late << " "
             << report.refused << " " << report.lost << " " << Seconds(report.lateness) << " "
             << Seconds(report.gap) << " " << Seconds(report.gap_begin) << std::endl;
    for (const Move& move : report.moves)
      moves_ << move.process << " " << Seconds(move.last) << " " << Seconds(move.first) << std::endl;
    for (const std::string& what : report.wrong)
      wrong_ << "slot " << stream.plan.slot << ": " << what << std::endl;
    calls_ += calls;
    std::ofstream(arguments[0] + "/progress.new") << calls_ << "\n";
    std::filesystem::rename(arguments[0] + "/progress.new", arguments[0] + "/progress");
  }

  uint64_t calls_ = 0;
  std::ofstream reports_{arguments[0] + "/reports"}, moves_{arguments[0] + "/moves"},
      wrong_{arguments[0] + "/wrong"};
};

gtrain::Future<Report> Begin(const Stream& stream, const gtrain::Ref<Target>& pace) {
  const auto time = std::chrono::milliseconds(stream.plan.run_ms + stream.plan.timeout_ms + kPatienceMs);
  return stream.caller.With(time).Call<&Caller::Run>(stream.target, pace, stream.plan);
}

// All streams at once, each again and again until there is enough.
gtrain::Task<> RunAll(const std::vector<Stream>& streams, const gtrain::Ref<Target>& pace, bool again) {
  Files files;
  std::vector<gtrain::Future<Report>> running;
  for (const Stream& stream : streams) running.push_back(Begin(stream, pace));
  for (size_t left = streams.size(); left > 0;) {
    const size_t i = co_await gtrain::WhenAny(running);
    const gtrain::Result<Report> report = co_await gtrain::Try(std::move(running[i]));
    files.Take(streams[i], report);
    if (again && !Files::Enough()) {
      running[i] = Begin(streams[i], pace);
    } else {
      --left;
    }
  }
}

gtrain::Task<> Add(gtrain::Cluster& cluster, int rank, gtrain::Ref<Target> target, Plan plan,
                   std::vector<Stream>& streams) {
  auto caller = co_await cluster.Spawn<Caller>(gtrain::Spawn().OnRank(rank).Restarts(kRestarts));
  plan.slot = streams.size() + 1;
  streams.push_back({std::move(caller), std::move(target), plan});
}

// Ranks from 2 on may be killed. Rank 1 calls actors that it does not own, and lives to tell of it. Those
// that are lost are made anew on ranks 2 and 3, which are other processes then, so none of them settles on a
// rank that is spared.
gtrain::Task<> Kill(gtrain::Cluster& cluster) {
  constexpr int kTargets = 6, kCallingRanks = 4;
  auto pace = co_await cluster.Spawn<Target>(gtrain::Spawn().On(gtrain::Spread::kHere), 0, false);
  std::vector<gtrain::Owner<Target>> targets;
  std::vector<Stream> streams;
  for (int of = 0; of < kTargets; ++of) {
    const bool kept = of % 2 == 0;
    const auto keep = kept ? gtrain::Durable::kPeer : gtrain::Durable::kNo;
    const gtrain::Spawn place = gtrain::Spawn().OnRank(2 + of / 2 % 2).Restarts(kRestarts).Keep(keep);
    targets.push_back(co_await cluster.Spawn<Target>(place, 0, kept));
    const gtrain::Ref<Target> target = targets.back();
    Plan patient, hasty;
    patient.kept = hasty.kept = kept;
    patient.window = 128;
    hasty.window = 16;
    hasty.timeout_ms = kHasteMs;
    for (int rank = 0; rank < kCallingRanks; ++rank) co_await Add(cluster, rank, target, patient, streams);
    for (int rank = 0; rank < 2; ++rank) co_await Add(cluster, rank, target, hasty, streams);
  }
  const auto spared = co_await cluster.Spawn<Caller>(gtrain::Spawn().OnRank(1));
  const int64_t process = co_await spared.Call<&Caller::Process>();
  std::ofstream(arguments[0] + "/spared") << process;
  std::ofstream(arguments[0] + "/driver") << getpid();
  co_await RunAll(streams, pace, true);
}

gtrain::Task<> Slow(gtrain::Cluster& cluster, int64_t seconds, int callers) {
  auto pace = co_await cluster.Spawn<Target>(gtrain::Spawn().On(gtrain::Spread::kHere), 0, false);
  auto target = co_await cluster.Spawn<Target>(gtrain::Spawn().OnRank(1), 1, false);
  std::vector<Stream> streams;
  Plan plan;
  plan.run_ms = seconds * 1'000;
  plan.ballast = 16 << 10;
  for (int i = 0; i < callers; ++i) {
    // There is room for all calls of half of the ranks, which wait; the others are refused most.
    const int rank = i % cluster.processes();
    plan.window = rank % 2 == 0 ? 2 : 100;
    co_await Add(cluster, rank, target, plan, streams);
  }
  std::ofstream(arguments[0] + "/driver") << getpid();
  co_await RunAll(streams, pace, false);
}

gtrain::Task<> Drive(gtrain::Cluster& cluster) {
  if (arguments[1] == "kill") co_await Kill(cluster);
  if (arguments[1] == "slow")
    co_await Slow(cluster, std::atoi(arguments.at(2).c_str()), std::atoi(arguments.at(3).c_str()));
}

}  // namespace

int main(int argc, char** argv) {
  arguments.assign(argv + 1, argv + argc);
  std::ofstream(arguments.at(0) + "/process." + std::to_string(getpid())) << "\n";
  return gtrain::Main(argc, argv, Drive);
}
