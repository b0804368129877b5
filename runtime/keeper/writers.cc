#include "runtime/keeper/writers.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/keeper/posix.h"

namespace gtrain::keeper {

namespace {

constexpr int kWriterKillsMax = 4;
constexpr int64_t kRestartMs = 100;   // before the second start, doubled each time
constexpr int kWritersOfRankMax = 4;  // checkpointers of one process at a time

bool Released(const UniqueFd& memfd) {
  uint32_t word = 0;
  return pread(memfd.get(), &word, sizeof(word), kSaveArenaReleasedAt) == sizeof(word) && word != 0;
}

// A file nobody can make shorter: a mapping of it never faults.
UniqueFd MakeSaveArena(uint64_t bytes) {
  UniqueFd memfd(memfd_create("gtrain-saves", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd.valid() || ftruncate(memfd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return UniqueFd();
  }
  return memfd;
}

// It lies beside our own program. Asked once: a keeper lives on when its program is replaced.
std::string FindWriterProgram() {
  char self_path[4096];
  const ssize_t length = readlink("/proc/self/exe", self_path, sizeof(self_path));
  const std::string self(self_path, static_cast<size_t>(length > 0 ? length : 0));
  return self.substr(0, self.rfind('/') + 1) + "gtrain-writer";
}

}  // namespace

Writers::Writers(Context& context, Connections& connections)
    : context_(context), connections_(connections), program_(FindWriterProgram()) {}

void Writers::Ask(RankConnection& connection, const RankArenaRequest& request) {
  const auto count = std::count_if(writers_.begin(), writers_.end(), [&](const Process& writer) {
    return writer.generation == connection.generation && writer.rank == connection.rank;
  });
  const auto waits = std::count_if(wanted_.begin(), wanted_.end(), [&](const Wanted& wanted) {
    return wanted.generation == connection.generation && wanted.rank == connection.rank;
  });
  if (count + waits >= kWritersOfRankMax)
    return connection.Send(kKeeperNoWriter,
                           "this rank has " + std::to_string(count + waits) + " writers already");
  wanted_.push_back({connection.generation, connection.rank, request});
}

// Two snapshots of one rank never lie in memory (fault C12), and a rank that got its writer knows that
// nothing of an earlier generation is still to be written here.
bool Writers::MemoryHeldBefore(uint64_t generation) const {
  return std::any_of(writers_.begin(), writers_.end(), [&](const Process& writer) {
    return writer.generation < generation && !Released(writer.memfd);
  });
}

void Writers::StartWanted() {
  for (Process& writer : writers_) {
    if (writer.pid > 0 || context_.now_ms < writer.restart_at_ms) continue;
    writer.pid = Spawn(writer);
    if (writer.pid <= 0) writer.restart_at_ms = context_.now_ms + 1000;
  }
  for (size_t i = 0; i < wanted_.size();) {
    const Wanted wanted = wanted_[i];
    RankConnection* connection = connections_.Of(wanted.generation, wanted.rank);
    RankProcess* rank = context_.generations.FindRank(wanted.generation, wanted.rank);
    const bool asks = connection != nullptr && rank != nullptr && !rank->exit;
    if (asks && MemoryHeldBefore(wanted.generation)) {
      ++i;
      continue;
    }
    wanted_.erase(wanted_.begin() + static_cast<ptrdiff_t>(i));
    if (asks) Start(*connection, *rank, wanted.request);
  }
}

void Writers::Start(RankConnection& connection, const RankProcess& rank, const RankArenaRequest& request) {
  auto refuse = [&](const std::string& why) { connection.Send(kKeeperNoWriter, why); };
  Process writer;
  writer.generation = connection.generation;
  writer.rank = connection.rank;
  writer.env = rank.spec.env;
  writer.cwd = rank.spec.cwd;
  writer.memfd = MakeSaveArena(request.bytes);
  int ends[2];
  if (!writer.memfd.valid() || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return refuse(std::to_string(request.bytes) + " bytes of shared memory for saves: " + strerror(errno));
  writer.channel.reset(ends[0]);
  UniqueFd theirs(ends[1]);  // in our hands only until it is sent: the writer must see its rank's end
  writer.pid = Spawn(writer);
  if (writer.pid <= 0) return refuse(std::string("cannot start a writer: ") + strerror(errno));
  // The writer may be gone, and its descriptors with it, before the rank reads.
  UniqueFd memfd(fcntl(writer.memfd.get(), F_DUPFD_CLOEXEC, 0));
  const int memfd_number = memfd.get(), theirs_number = theirs.get();
  const std::string body(reinterpret_cast<const char*>(&request), sizeof(request));
  connection.Send(kKeeperWriter, body, memfd_number, std::move(memfd));
  connection.Send(kKeeperChannel, body, theirs_number, std::move(theirs));
  writers_.push_back(std::move(writer));
}

bool Writers::OnDied(const siginfo_t& info) {
  const auto it = std::find_if(writers_.begin(), writers_.end(),
                               [&](const Process& writer) { return writer.pid == info.si_pid; });
  if (it == writers_.end()) return false;
  const bool killed = info.si_code != CLD_EXITED;
  if (killed) {
    ++it->kills;
    fprintf(stderr,
            "gtrain-keeper: the writer of checkpoints of rank %d of generation %llu was killed by %s%s\n",
            it->rank, static_cast<unsigned long long>(it->generation), SignalName(info.si_status).c_str(),
            it->kills < kWriterKillsMax ? ": another one goes on" : ", too often: its rank writes itself");
  }
  if (killed && it->kills < kWriterKillsMax) {
    it->pid = -1;
    it->restart_at_ms = context_.now_ms + (kRestartMs << (it->kills - 1));
  } else {
    writers_.erase(it);  // the rank, if it lives, sees the end of the channel
  }
  return true;
}

void Writers::End() {
  for (const Process& writer : writers_) {
    if (writer.pid <= 0) continue;
    fprintf(stderr, "gtrain-keeper: a save of rank %d of generation %llu was not committed in time: ended\n",
            writer.rank, static_cast<unsigned long long>(writer.generation));
    kill(writer.pid, SIGKILL);
  }
  writers_.clear();
}

pid_t Writers::Spawn(const Process& writer) const {
  return SpawnWriter(program_, writer.env, writer.cwd, writer.memfd, writer.channel);
}

std::optional<uint64_t> Writers::GenerationOf(pid_t child) {
  for (const Process& writer : writers_) {
    if (writer.pid == child) return kNoGeneration;
  }
  return std::nullopt;
}

bool Writers::MoreToDo() const {
  return std::any_of(writers_.begin(), writers_.end(), [](const Process& writer) { return writer.pid <= 0; });
}

}  // namespace gtrain::keeper
