#include "runtime/keeper/outputs.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/folder.h"

namespace gtrain::keeper {

namespace {

// A rank that writes fast wakes us once in this time, not for each of its blocks; none of it waits longer.
constexpr int64_t kStreamsMs = 1;
constexpr size_t kStreamsLoud = 256u << 10;  // so much at once: it may be faster than that
constexpr size_t kOutputFrameMax = 64u << 10;
constexpr uint64_t kReportBacklogMax = 16u << 20;
constexpr uint64_t kReportPunchStep = 1u << 20;

bool IsTold(const RankProcess& rank) {
  return rank.out.total() == rank.out_sent && rank.err.total() == rank.err_sent &&
         rank.out.refused() == rank.out_refused && rank.err.refused() == rank.err_refused;
}

// An instance of inotify, unless the user's other programs would find none left: there are 128 of them a user
// as systems come, and a job of hundreds on a machine has a keeper each. Without one reports are looked for
// every second.
UniqueFd InotifyThatOthersSpare() {
  constexpr int kOthersNeed = 16;
  UniqueFd ours(inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  std::vector<UniqueFd> others;
  while (ours.valid() && others.size() < kOthersNeed) {
    others.emplace_back(inotify_init1(IN_CLOEXEC));
    if (!others.back().valid()) ours.reset();
  }
  return ours;
}

// Not valid: the program has made none yet.
UniqueFd OpenReportOf(const GenerationRecord& record, const RankProcess& rank) {
  constexpr int kHow = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  const std::string& path = rank.spec.report_path;
  if (path.empty()) return UniqueFd();
  if (rank.born.born == record.begin.generation)
    return UniqueFd(openat(record.reports.get(), path.substr(path.rfind('/') + 1).c_str(), kHow));
  const FilePlace place = OpenFolderOf(path);  // the one of the generation that it was started in
  return UniqueFd(openat(place.folder.get(), place.name.c_str(), kHow));
}

}  // namespace

bool Outputs::Open() {
  report_events_ = InotifyThatOthersSpare();
  return stream_set_.Open();
}

bool Outputs::OpenStream(LogStream& stream, const std::string& path, Terminal terminal) {
  return stream.Open(path, context_.options.log_limits, terminal, context_.now_ms, &log_writer_) &&
         stream.Watch(&stream_set_);
}

void Outputs::GoOn(RankProcess& rank) {
  rank.out.GoOnIn(rank.spec.out_path, context_.now_ms);  // else it is written where it was before
  rank.err.GoOnIn(rank.spec.err_path, context_.now_ms);
  rank.out_sent = rank.out.total();
  rank.err_sent = rank.err.total();
  rank.out_refused = rank.err_refused = 0;
}

void Outputs::OpenReport(GenerationRecord& record, const RankProcess& rank) {
  if (rank.spec.report_path.empty()) return;
  const auto [folder, name] = OpenFolderOf(rank.spec.report_path);
  if (folder.valid()) unlinkat(folder.get(), name.c_str(), 0);
  if (record.reports.valid()) return;
  record.reports.reset(fcntl(folder.get(), F_DUPFD_CLOEXEC, 0));
  WatchReports(record);
}

// One watch for the reports of all ranks, which lie in one folder. Writes through a mapping of the file, or
// from another machine, wake nobody (inotify(7)): they are read when another event wakes the keeper, the
// lease every ten seconds at the latest.
void Outputs::WatchReports(GenerationRecord& record) {
  reports_written_ = true;  // by a rank that was quicker than this
  if (!report_events_.valid()) return;
  record.reports_watch = inotify_add_watch(report_events_.get(),
                                           ("/proc/self/fd/" + std::to_string(record.reports.get())).c_str(),
                                           IN_CREATE | IN_MODIFY | IN_MOVED_TO);
}

void Outputs::StopWatchingReports(const GenerationRecord& record) {
  if (record.reports_watch >= 0) inotify_rm_watch(report_events_.get(), record.reports_watch);
}

void Outputs::PumpStreams() {
  const int64_t now = context_.now_ms;
  if (now < streams_from_ms_) return;
  size_t read = 0;
  bool roomy = true;
  stream_set_.ForReady([&](LogStream& stream) {
    read += stream.Pump(now);
    roomy = roomy && stream.roomy();
  });
  if (read > 0 && read < kStreamsLoud && roomy) streams_from_ms_ = now + kStreamsMs;
}

void Outputs::CloseDrained() {
  const int64_t now = context_.now_ms;
  for (auto& [generation, record] : context_.generations) {
    for (auto& [number, rank] : record.ranks) {
      if (!rank->exit || now < rank->drain_until_ms || ItsGroupStillSaves(record, *rank)) continue;
      rank->out.Close(now);
      rank->err.Close(now);
    }
  }
}

void Outputs::Send() {
  for (auto& [generation, record] : context_.generations) {
    for (auto& [number, rank] : record.ranks) Send(generation, *rank);
  }
}

void Outputs::Send(uint64_t generation, RankProcess& rank) {
  AgentLink& agent = context_.agent;
  if (!agent.attached()) return;
  for (bool is_stderr : {false, true}) {
    LogStream& stream = is_stderr ? rank.err : rank.out;
    uint64_t& sent = is_stderr ? rank.err_sent : rank.out_sent;
    int& refused = is_stderr ? rank.err_refused : rank.out_refused;
    stream.LookAfter(context_.now_ms);
    if ((stream.total() == sent && stream.refused() == refused) || agent.IsBehind()) continue;
    const size_t fresh = static_cast<size_t>(std::min<uint64_t>(stream.total() - sent, kOutputFrameMax));
    sent = stream.total();
    refused = stream.refused();
    agent.Tell(Output{generation, rank.spec.rank, is_stderr, stream.file_offset(), stream.dropped(),
                      stream.LastBytes(fresh), refused});
  }
}

void Outputs::TailReports() {
  char events[16 << 10];
  while (report_events_.valid() && read(report_events_.get(), events, sizeof(events)) > 0)
    reports_written_ = true;
  const bool all = std::exchange(reports_written_, false) || context_.now_ms - reports_read_ms_ >= kReportsMs;
  if (all) reports_read_ms_ = context_.now_ms;
  for (auto& [generation, record] : context_.generations) {
    if (!all && record.reports_watch >= 0) continue;
    for (auto& [number, rank] : record.ranks) {
      if (!rank->exit || rank->report.valid()) TailReport(record, *rank);
    }
  }
}

// $GTRAIN_REPORT is an ordinary file that the program makes, so it never waits for its reader. The part that
// was forwarded becomes a hole.
void Outputs::TailReport(GenerationRecord& record, RankProcess& rank) {
  if (!rank.report.valid()) rank.report = OpenReportOf(record, rank);
  struct stat info;
  if (!rank.report.valid() || fstat(rank.report.get(), &info) != 0 || !S_ISREG(info.st_mode)) return;
  const uint64_t size = static_cast<uint64_t>(info.st_size);
  if (size < rank.report_offset) rank.report_offset = 0;  // the program truncated it
  if (size - rank.report_offset > kReportBacklogMax) rank.report_offset = size - kReportBacklogMax;
  char buffer[64 << 10];
  while (context_.agent.attached() && rank.report_offset < size) {
    if (context_.agent.IsBehind()) {
      reports_written_ = true;  // and not all was read
      break;
    }
    const ssize_t n =
        pread(rank.report.get(), buffer, sizeof(buffer), static_cast<off_t>(rank.report_offset));
    if (n <= 0) break;
    rank.report_offset += static_cast<uint64_t>(n);
    context_.agent.Tell(
        ReportBytes{record.begin.generation, rank.spec.rank, std::string(buffer, static_cast<size_t>(n))});
  }
  if (rank.report_offset - std::min(rank.report_offset, rank.report_punched) < kReportPunchStep) return;
  rank.report_punched = rank.report_offset & ~uint64_t{4095};
  fallocate(rank.report.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
            static_cast<off_t>(rank.report_punched));
}

void Outputs::AddFds(std::vector<pollfd>* fds) const {
  if (NowMs() >= streams_from_ms_) AddFd(fds, stream_set_.fd());
  // A program may write its report often: the next tick reads it all.
  if (!context_.tick_wanted) AddFd(fds, report_events_.get());
  if (context_.generations.AnyIn(Phase::kWriting)) AddFd(fds, log_writer_.idle_fd());
}

int64_t Outputs::StreamsWaitMs() const { return streams_from_ms_ - NowMs(); }

bool Outputs::LooksForReports() const {
  for (const auto& [generation, record] : context_.generations) {
    const bool unwatched = (record.reports.valid() && record.reports_watch < 0) || record.others_reports;
    if (record.phase == Phase::kLive && unwatched) return true;
  }
  return false;
}

bool Outputs::MoreToDo() const {
  if (reports_written_) return true;
  const bool attached = context_.agent.attached();
  const auto waits = [attached](const RankProcess& rank) {
    const bool drains = rank.exit && (rank.out.alive() || rank.err.alive());
    return drains || !rank.out.settled() || !rank.err.settled() || (attached && !IsTold(rank));
  };
  for (const auto& [generation, record] : context_.generations) {
    for (const auto& [number, rank] : record.ranks) {
      if (waits(*rank)) return true;
    }
  }
  return false;
}

}  // namespace gtrain::keeper
