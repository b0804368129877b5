#include "runtime/agent/node.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/daemon.h"
#include "base/file.h"
#include "base/folder.h"
#include "base/run_folder.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "runtime/core/agent/agent_core.h"
#include "runtime/keeper/agent_protocol.h"
#include "runtime/keeper/posix.h"
#include "runtime/keeper/stacks.h"

namespace gtrain::agent {

namespace {
constexpr size_t kPieceBytes = 256 << 10;

// Length of an unfinished UTF-8 character at the end of `text`.
size_t UnfinishedBytes(const std::string& text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const unsigned char c = static_cast<unsigned char>(text[text.size() - back]);
    if ((c & 0xC0) == 0x80) continue;
    const size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC0 ? 2 : 1;
    return length > back ? back : 0;
  }
  return 0;
}

// A directory of which nobody says whose it is may be one of a person, or made by an agent of another version
// for its own ranks of this job. Logs of the ranks that are to start here are neither.
absl::Status NothingWritten(const core::GenerationGrant& grant, const NodeId& self) {
  for (size_t rank = 0; rank < grant.ranks.size(); ++rank) {
    if (grant.ranks[rank].node != self) continue;
    for (const bool is_stderr : {false, true}) {
      const std::string path =
          core::RankLogPath(grant.run_dir, Generation{1}, static_cast<int>(rank), is_stderr);
      if (access(path.c_str(), F_OK) != 0) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(path, " was there before this job, whose output would be appended to it: remove ",
                       grant.run_dir, ", or launch with another --run-dir"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string BootId() {
  return std::string(absl::StripAsciiWhitespace(keeper::ReadSmallFile("/proc/sys/kernel/random/boot_id")));
}

std::string Hostname() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string NearMemory(const NodeId& node) {
  constexpr char kShm[] = "/dev/shm";
  struct statfs info;
  if (statfs(kShm, &info) != 0 || static_cast<uint64_t>(info.f_type) != TMPFS_MAGIC) return "";
  return absl::StrCat(kShm, "/gtrain-", node.value);
}

std::string LocalAddressTowards(const std::string& endpoint) {
  const std::string kLoopback = "127.0.0.1";
  const size_t colon = endpoint.rfind(':');
  if (colon == std::string::npos) return kLoopback;
  absl::string_view host = absl::string_view(endpoint).substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(std::string(host).c_str(), endpoint.c_str() + colon + 1, &hints, &found) != 0)
    return kLoopback;
  std::string address = kLoopback;
  UniqueFd fd(socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local = {};
  socklen_t size = sizeof(local);
  if (fd.valid() && connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0 &&
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&local), &size) == 0) {
    char text[NI_MAXHOST] = {};
    if (getnameinfo(reinterpret_cast<sockaddr*>(&local), size, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      address = text;
    }
  }
  freeaddrinfo(found);
  return address;
}

bool PortIsFree(int port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return true;  // no descriptor is left to ask with, which says nothing of the port
  const int yes = 1;             // a connection of the last generation in TIME_WAIT does not hinder the next
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  return bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
         listen(fd.get(), 1) == 0;
}

std::vector<int> ProbeFreePorts(int count, Rng* rng) {
  int low = 32768, high = 60999;
  const std::string range = keeper::ReadSmallFile("/proc/sys/net/ipv4/ip_local_port_range");
  const std::vector<absl::string_view> words =
      absl::StrSplit(range, absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
  if (words.size() == 2) (void)(absl::SimpleAtoi(words[0], &low) && absl::SimpleAtoi(words[1], &high));
  std::vector<int> ports;
  for (int attempt = 0; attempt < 20 * count && static_cast<int>(ports.size()) < count; ++attempt) {
    const int port = 10000 + static_cast<int>(rng->Below(55000));
    if (port >= low && port <= high) continue;
    if (std::find(ports.begin(), ports.end(), port) == ports.end() && PortIsFree(port)) ports.push_back(port);
  }
  return ports;
}

RankRoom RoomForRanks() {
  // The files of the keeper for a rank: two pipes and their log files, a connection, a report.
  constexpr int64_t kFilesOfRank = 6, kFilesOfKeeper = 64;
  constexpr int64_t kBytesOfRank = int64_t{4} << 20;  // process, pipes, what is kept of its output
  RankRoom room{keeper::kRanksMax, absl::StrCat("a keeper serves at most ", keeper::kRanksMax)};
  const auto bound = [&room](int64_t ranks, const std::string& why) {
    if (ranks < room.ranks) room = {std::max<int64_t>(ranks, 0), why};
  };
  int64_t pid_max = 0;
  // Half: the same share at which a fork bomb of one job stops (P12).
  if (absl::SimpleAtoi(keeper::ReadSmallFile("/proc/sys/kernel/pid_max"), &pid_max))
    bound(pid_max / 2, absl::StrCat("/proc/sys/kernel/pid_max is ", pid_max));
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_max != RLIM_INFINITY) {
    bound((static_cast<int64_t>(files.rlim_max) - kFilesOfKeeper) / kFilesOfRank,
          absl::StrCat("a keeper may have ", files.rlim_max, " open files (`ulimit -Hn`) and needs ",
                       kFilesOfRank, " a rank"));
  }
  struct sysinfo memory = {};
  if (sysinfo(&memory) == 0) {
    const auto bytes = static_cast<int64_t>(memory.totalram) * memory.mem_unit;
    bound(bytes / kBytesOfRank,
          absl::StrCat("it has ", PrintBytes(static_cast<uint64_t>(bytes)),
                       " of memory, and a rank needs at least ", PrintBytes(uint64_t{kBytesOfRank})));
  }
  if (const std::optional<int64_t> left = ProcessesLeft())
    bound(*left, absl::StrCat("this user may start ", *left, " more processes (`ulimit -u`)"));
  return room;
}

std::string FindProgram(const std::string& name, const std::string& path) {
  if (name.empty() || absl::StrContains(name, '/')) return "";
  for (const absl::string_view folder : absl::StrSplit(path, ':')) {
    if (!absl::StartsWith(folder, "/")) continue;
    const std::string file = absl::StrCat(folder, "/", name);
    struct stat info {};
    if (stat(file.c_str(), &info) != 0 || !S_ISREG(info.st_mode) || access(file.c_str(), X_OK) != 0) continue;
    std::error_code error;
    const std::filesystem::path real = std::filesystem::canonical(std::string(folder), error);
    return error ? file : (real / name).string();
  }
  return "";
}

std::string TooManyRanks(size_t ranks) {
  constexpr size_t kAlwaysHeld = 16;  // no reason to look at every process of the machine
  if (ranks <= kAlwaysHeld) return "";
  const RankRoom room = RoomForRanks();
  if (static_cast<int64_t>(ranks) <= room.ranks) return "";
  return absl::StrCat(ranks, " ranks are more than ", Hostname(), " can hold, which is ", room.ranks, ": ",
                      room.why, ". Start fewer, or use more machines");
}

// Nothing but a later launch that wants to name what has changed depends on it. The environment in it may be
// nobody else's business.
void LeaveJobFile(const UniqueFd& folder, const std::string& spec_text) {
  constexpr char kName[] = "job.yaml";
  const UniqueFd fd(openat(folder.get(), kName, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return;
  if (write(fd.get(), spec_text.data(), spec_text.size()) != static_cast<ssize_t>(spec_text.size()))
    unlinkat(folder.get(), kName, 0);
}

absl::Status MakeRunDir(const core::GenerationGrant& grant, const ClusterId& cluster, const NodeId& self,
                        bool fresh) {
  std::string why;
  const FolderOptions options{.make = true, .why = &why};
  const UniqueFd folder = OpenFolder(grant.run_dir, options);
  const auto failed = [&] {
    return absl::Status(ErrnoStatus(errno, "").code(), absl::StrCat(grant.run_dir, ": ", why));
  };
  if (!folder.valid()) return failed();
  const RunFolderOwner owner{cluster, grant.job, grant.request_id};
  GT_ASSIGN_OR_RETURN(const bool ours, OwnsRunFolder(folder, grant.run_dir, owner));
  if (!ours && fresh) GT_RETURN_IF_ERROR(NothingWritten(grant, self));
  GT_RETURN_IF_ERROR(ClaimRunFolder(folder, grant.run_dir, owner));
  LeaveJobFile(folder, grant.spec_text);
  for (const char* part : {"logs", "ranks"}) {
    const std::string inside = absl::StrCat(part, "/generation-", grant.generation.value);
    if (!OpenFolderInside(folder, inside, options).valid()) return failed();
  }
  return absl::OkStatus();
}

absl::Status CheckRunDirOfLog(const std::string& log_path, const ClusterId& cluster, const JobId& job) {
  const std::string run_dir = std::filesystem::path(log_path).parent_path().parent_path().parent_path();
  const UniqueFd folder = OpenFolder(run_dir, {.to_read = true});
  if (!folder.valid()) return absl::OkStatus();
  return OwnsRunFolder(folder, run_dir, {cluster, job, ""}).status();
}

absl::StatusOr<std::string> ReadSecret(const std::string& path) {
  GT_ASSIGN_OR_RETURN(std::string text, ReadFile(path, kSecretBytesMax + 1));
  if (!text.empty() && text.back() == '\n') text.pop_back();
  if (text.size() <= kSecretBytesMax) return text;
  return absl::ResourceExhaustedError(
      absl::StrCat(path, " is larger than the limit of ", kSecretBytesMax, " bytes"));
}

absl::StatusOr<UniqueFd> OpenLog(const std::string& path) {
  std::string why;
  const auto [folder, name] = OpenFolderOf(path, {.to_read = true, .why = &why});
  if (!folder.valid()) return ErrnoStatus(errno, absl::StrCat("cannot read ", path, " (", why, ")"));
  UniqueFd fd(openat(folder.get(), name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("cannot read ", path));
  return fd;
}

absl::Status ReadLogPiece(const UniqueFd& log, const std::string& path, uint64_t offset, uint64_t bytes_max,
                          LogPiece* piece) {
  struct stat info;
  if (fstat(log.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  const uint64_t size = static_cast<uint64_t>(info.st_size);
  piece->next_offset = std::min(offset, size);
  std::string dropped;
  const off_t data = lseek(log.get(), static_cast<off_t>(piece->next_offset), SEEK_DATA);
  if (data > static_cast<off_t>(piece->next_offset)) {
    dropped = absl::StrCat("[gtrain: ", static_cast<uint64_t>(data) - piece->next_offset,
                           " older bytes were dropped to keep the log within its limit]\n");
    piece->next_offset = static_cast<uint64_t>(data);
  }
  // At least one whole character, or a reader would never get on.
  const uint64_t most = bytes_max == 0 ? kPieceBytes : std::clamp<uint64_t>(bytes_max, 4, kPieceBytes);
  std::string& bytes = piece->text;
  bytes.resize(std::min(most, size - piece->next_offset));
  const ssize_t n = pread(log.get(), bytes.data(), bytes.size(), static_cast<off_t>(piece->next_offset));
  if (n < 0) return ErrnoStatus(errno, absl::StrCat("cannot read ", path));
  bytes.resize(static_cast<size_t>(n));
  if (piece->next_offset + bytes.size() < size) bytes.resize(bytes.size() - UnfinishedBytes(bytes));
  piece->next_offset += bytes.size();
  piece->at_end = piece->next_offset >= size;
  if (!dropped.empty()) bytes.insert(0, dropped);
  return absl::OkStatus();
}

absl::StatusOr<LogPiece> ReadLogPiece(const std::string& path, uint64_t offset, uint64_t bytes_max) {
  GT_ASSIGN_OR_RETURN(const UniqueFd log, OpenLog(path));
  LogPiece piece;
  GT_RETURN_IF_ERROR(ReadLogPiece(log, path, offset, bytes_max, &piece));
  return piece;
}

std::vector<core::RankSeen> LookAtProcesses(const std::vector<std::pair<int, int64_t>>& rank_and_pid) {
  constexpr int kDepthMax = 64;  // a pass is not atomic: it must not run in a circle
  const long ticks_per_second = sysconf(_SC_CLK_TCK);
  std::map<pid_t, keeper::ProcessEntry> all;
  std::multimap<pid_t, pid_t> children;
  for (keeper::ProcessEntry& process : keeper::ListProcesses()) {
    children.emplace(process.parent, process.pid);
    all.emplace(process.pid, std::move(process));
  }
  std::vector<core::RankSeen> seen;
  for (const auto& [rank, pid] : rank_and_pid) {
    uint64_t ticks = 0;
    std::vector<pid_t> tree = {static_cast<pid_t>(pid)};
    for (size_t i = 0; i < tree.size() && tree.size() < all.size(); ++i) {
      const auto [first, last] = children.equal_range(tree[i]);
      for (auto child = first; child != last; ++child) tree.push_back(child->second);
    }
    for (const pid_t member : tree) {
      if (const auto it = all.find(member); it != all.end()) ticks += it->second.cpu_ticks;
    }
    pid_t inner = static_cast<pid_t>(pid);
    std::string blocked_in = keeper::BlockedIn(inner);
    for (int depth = 0; depth < kDepthMax && absl::StrContains(blocked_in, "do_wait"); ++depth) {
      const auto child = children.find(inner);
      if (child == children.end()) break;
      inner = child->second;
      blocked_in = keeper::BlockedIn(inner);
    }
    seen.push_back({rank, ticks * 1000 / static_cast<uint64_t>(std::max(1L, ticks_per_second)), blocked_in});
  }
  return seen;
}

}  // namespace gtrain::agent
