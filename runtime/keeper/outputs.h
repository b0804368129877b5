// Reads what ranks write: their output streams, drained into logs, and the files at $GTRAIN_REPORT. News of
// both goes to the agent, unless that is behind: it is all in files anyway.
//
// Owner thread only; nothing blocks, a thread of its own (LogWriter) writes the logs. A turn costs as much as
// was written; a tick looks at each rank, tens of nanoseconds each.
#pragma once
#include <poll.h>
#include <stdint.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "runtime/keeper/context.h"
#include "runtime/keeper/log_writer.h"
#include "runtime/keeper/poll_set.h"

namespace gtrain::keeper {

inline constexpr int64_t kReportsMs = 1000;

class Outputs {
 public:
  explicit Outputs(Context& context) : context_(context) {}
  bool Open();

  // The stream is drained from now on. False: errno says why not.
  bool OpenStream(LogStream& stream, const std::string& path, Terminal terminal);
  // The rank is about to start: a report of an earlier try to start this generation is removed.
  void OpenReport(GenerationRecord& record, const RankProcess& rank);
  // The process goes on as another rank, whose logs are other files. Its report stays the one that it knows.
  void GoOn(RankProcess& rank);
  void StopWatchingReports(const GenerationRecord& record);

  // Reads the streams that are ready.
  void PumpStreams();
  // Closes streams of dead ranks, which a grandchild may hold for ever (fault P7).
  void CloseDrained();
  // Tells the agent of new output, of all ranks or of one.
  void Send();
  void Send(uint64_t generation, RankProcess& rank);
  // Tells the agent of what was added to reports, of all ranks or of one.
  void TailReports();
  void TailReport(GenerationRecord& record, RankProcess& rank);
  // The next tick reads every report.
  void ReadReportsSoon() { reports_written_ = true; }

  const LogWriter& logs() const { return log_writer_; }
  void AddFds(std::vector<pollfd>* fds) const;
  // The time for which streams are not read; 0 or less: they are read at once.
  int64_t StreamsWaitMs() const;
  // Nothing says when reports are written: they are read every kReportsMs.
  bool LooksForReports() const;
  // A stream or a report waits for time to pass, or for room at the agent.
  bool MoreToDo() const;

 private:
  void WatchReports(GenerationRecord& record);

  Context& context_;
  UniqueFd report_events_;        // inotify(7)
  int64_t streams_from_ms_ = 0;   // they are not read before
  bool reports_written_ = false;  // since they were read
  int64_t reports_read_ms_ = 0;   // all of them
  PollSet<LogStream> stream_set_;
  LogWriter log_writer_;
};

}  // namespace gtrain::keeper
