// Writers of checkpoints. A rank asks for one with the bytes it needs; it gets a memfd and a socket, and a
// process of our own program gtrain-writer gets the other ends. We understand nothing of what they do. We
// keep the memfd and the writer's end of the socket: a writer that is killed is replaced by another that
// finds everything as it was, whether or not the rank still lives. A writer ends by itself when its rank is
// gone and its work done.
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

#include "runtime/keeper/keeper.h"
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

}  // namespace

void Keeper::WriterIn(RankConnection& connection, const RankArenaRequest& request) {
  const auto count = std::count_if(writers_.begin(), writers_.end(), [&](const WriterProcess& writer) {
    return writer.generation == connection.generation && writer.rank == connection.rank;
  });
  const auto waits =
      std::count_if(writers_wanted_.begin(), writers_wanted_.end(), [&](const WriterWanted& wanted) {
        return wanted.generation == connection.generation && wanted.rank == connection.rank;
      });
  if (count + waits >= kWritersOfRankMax)
    return ToRank(connection, kKeeperNoWriter,
                  "this rank has " + std::to_string(count + waits) + " writers already");
  writers_wanted_.push_back({connection.generation, connection.rank, request});
}

// Two snapshots of one rank never lie in memory (fault C12), and a rank that got its writer knows that
// nothing of an earlier generation is still to be written here.
bool Keeper::MemoryHeldBefore(uint64_t generation) const {
  return std::any_of(writers_.begin(), writers_.end(), [&](const WriterProcess& writer) {
    return writer.generation < generation && !Released(writer.memfd);
  });
}

void Keeper::StartWriters() {
  for (WriterProcess& writer : writers_) {
    if (writer.pid > 0 || now_ < writer.restart_at_ms) continue;
    writer.pid = SpawnWriter(writer_program_, writer.env, writer.cwd, writer.memfd, writer.channel);
    if (writer.pid <= 0) writer.restart_at_ms = now_ + 1000;
  }
  for (size_t i = 0; i < writers_wanted_.size();) {
    const WriterWanted wanted = writers_wanted_[i];
    RankConnection* connection = ConnectionOf(wanted.generation, wanted.rank);
    RankProcess* rank = FindRank(wanted.generation, wanted.rank);
    const bool asks = connection != nullptr && rank != nullptr && !rank->exit;
    if (asks && MemoryHeldBefore(wanted.generation)) {
      ++i;
      continue;
    }
    writers_wanted_.erase(writers_wanted_.begin() + static_cast<ptrdiff_t>(i));
    if (asks) StartWriter(*connection, *rank, wanted.request);
  }
}

void Keeper::StartWriter(RankConnection& connection, RankProcess& rank, const RankArenaRequest& request) {
  auto refuse = [&](const std::string& why) { ToRank(connection, kKeeperNoWriter, why); };
  WriterProcess writer;
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
  writer.pid = SpawnWriter(writer_program_, writer.env, writer.cwd, writer.memfd, writer.channel);
  if (writer.pid <= 0) return refuse(std::string("cannot start a writer: ") + strerror(errno));
  // The writer may be gone, and its descriptors with it, before the rank reads.
  UniqueFd memfd(fcntl(writer.memfd.get(), F_DUPFD_CLOEXEC, 0));
  const int memfd_number = memfd.get(), theirs_number = theirs.get();
  const std::string body(reinterpret_cast<const char*>(&request), sizeof(request));
  ToRank(connection, kKeeperWriter, body, memfd_number, std::move(memfd));
  ToRank(connection, kKeeperChannel, body, theirs_number, std::move(theirs));
  writers_.push_back(std::move(writer));
}

bool Keeper::WriterDied(const siginfo_t& info) {
  const auto it = std::find_if(writers_.begin(), writers_.end(),
                               [&](const WriterProcess& writer) { return writer.pid == info.si_pid; });
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
    it->restart_at_ms = now_ + (kRestartMs << (it->kills - 1));
  } else {
    writers_.erase(it);  // the rank, if it lives, sees the end of the channel
  }
  return true;
}

void Keeper::KillWriters() {
  for (const WriterProcess& writer : writers_) {
    if (writer.pid <= 0) continue;
    fprintf(stderr, "gtrain-keeper: a save of rank %d of generation %llu was not committed in time: ended\n",
            writer.rank, static_cast<unsigned long long>(writer.generation));
    kill(writer.pid, SIGKILL);
  }
  writers_.clear();
}

}  // namespace gtrain::keeper
