#include "comm/fake/fake_world.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "comm/port/watch.h"

namespace gtrain::comm {
namespace {

constexpr uint64_t kJunk = 1 << 20;

}  // namespace

struct FakeWorld::Shared {
  std::atomic<uint32_t> revoked;
  char reason[200];
  std::atomic<uint32_t> links_down[16];  // the line of a rank is whole
  char link[16][300];
  char compression[300];
  std::atomic<uint64_t> left;  // a bit a rank
};

class FakeBootstrap final : public Bootstrap {
 public:
  FakeBootstrap(FakeWorld* world, int rank) : world_(world), rank_(rank) {
    if (world->wakes) waker_ = std::jthread([this](const std::stop_token& stop) { Wake(stop); });
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_->size(); }
  Generation generation() const override { return Generation{7}; }
  const std::vector<Member>& members() const override { return world_->members_; }

  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view blob,
                                                     absl::Duration timeout) override {
    const Watch watch(this, timeout);
    const int sequence = sequence_++;
    GT_RETURN_IF_ERROR(WriteBlob(sequence, blob));
    std::vector<std::string> blobs;
    while (blobs.size() < world_->members_.size()) {
      absl::StatusOr<std::string> next = ReadFile(Blob(sequence, static_cast<int>(blobs.size())), 16 << 20);
      if (next.ok()) {
        blobs.push_back(*std::move(next));
        continue;
      }
      GT_RETURN_IF_ERROR(watch.Check());
      absl::SleepFor(absl::Milliseconds(1));
    }
    return blobs;
  }

  absl::StatusOr<UniqueFd> Arena(uint64_t id, uint64_t bytes, uint64_t zeros, absl::Duration) override {
    const std::string path = Path(id);
    if (world_->before_arena) GT_RETURN_IF_ERROR(world_->before_arena(rank_));
    const UniqueFd mark(open(UserMark(id, rank_).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!mark.valid()) return ErrnoStatus(errno, path);
    UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!fd.valid()) return ErrnoStatus(errno, path);
    // What is not said to be zeros is none: a keeper gives memory that others have used.
    struct stat file;
    const bool is_new = fstat(fd.get(), &file) == 0 && file.st_size == 0;
    if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return ErrnoStatus(errno, path);
    const std::string junk(is_new ? std::min<uint64_t>(bytes - zeros, kJunk) : 0, '\xa5');
    if (!junk.empty() && pwrite(fd.get(), junk.data(), junk.size(), static_cast<off_t>(zeros)) < 0)
      return ErrnoStatus(errno, path);
    return fd;
  }

  void FreeArena(uint64_t id) override {
    unlink(UserMark(id, rank_).c_str());
    for (const Member& member : world_->members_) {
      if (access(UserMark(id, member.rank).c_str(), F_OK) == 0) return;
    }
    unlink(Path(id).c_str());
  }

  absl::Status Alive() const override {
    if (world_->shared_->revoked.load(std::memory_order_acquire) == 0) return absl::OkStatus();
    return absl::UnavailableError(world_->shared_->reason);
  }

  std::vector<int> Left() const override {
    std::vector<int> ranks;
    const uint64_t left = world_->shared_->left.load(std::memory_order_acquire);
    for (int rank = 0; rank < 64; ++rank)
      if ((left >> rank & 1) != 0) ranks.push_back(rank);
    return ranks;
  }

  // The first report of each rank is kept: it is written once and read by other processes.
  void ReportLink(int rank, const std::string& text) override {
    auto& shared = *world_->shared_;
    if (rank_ >= static_cast<int>(std::size(shared.link)) || shared.links_down[rank_] != 0) return;
    const std::string line = absl::StrCat(rank_, " cannot reach ", rank, ": ", text);
    std::strncpy(shared.link[rank_], line.c_str(), sizeof(shared.link[rank_]) - 1);
    shared.links_down[rank_].store(1, std::memory_order_release);
  }
  void ReportCompression(const std::string& text) override {
    auto& to = world_->shared_->compression;
    std::strncpy(to, text.c_str(), sizeof(to) - 1);
  }

 private:
  std::string Blob(int sequence, int rank) const {
    return absl::StrCat(world_->directory_, "/blob-", sequence, "-", rank);
  }

  // Whole when it is there. No disk is waited for.
  absl::Status WriteBlob(int sequence, absl::string_view blob) const {
    const std::string path = Blob(sequence, rank_), half = absl::StrCat(path, ".tmp");
    std::ofstream(half, std::ios::binary) << blob;
    if (rename(half.c_str(), path.c_str()) != 0) return ErrnoStatus(errno, path);
    return absl::OkStatus();
  }

  // The path of an arena on this machine.
  std::string Path(uint64_t id) const {
    const Member& me = world_->members_[static_cast<size_t>(rank_)];
    return absl::StrCat(world_->directory_, "/arena-", me.node.value, "-", id);
  }
  // The path of a file that is there as long as the rank has the arena.
  std::string UserMark(uint64_t id, int rank) const { return absl::StrCat(Path(id), "-of-", rank); }

  void Wake(const std::stop_token& stop) {
    std::atomic<uint32_t>& revoked = world_->shared_->revoked;
    constexpr timespec kLook{0, 100'000'000};  // whether the rank is over
    while (revoked.load() == 0 && !stop.stop_requested())
      syscall(SYS_futex, &revoked, FUTEX_WAIT, 0, &kLook, nullptr, 0);
    if (revoked.load() != 0) wakers().WakeAll();
  }

  FakeWorld* const world_;
  const int rank_;
  int sequence_ = 0;
  std::jthread waker_;
};

FakeWorld::FakeWorld(const std::vector<std::string>& node_of_rank, const std::vector<std::string>& addresses)
    : owner_(getpid()) {
  for (size_t rank = 0; rank < node_of_rank.size(); ++rank) {
    Member member;
    member.rank = static_cast<int>(rank);
    member.node = NodeId(node_of_rank[rank]);
    member.address = addresses.empty() ? "127.0.0.1" : addresses[rank];
    for (const Member& other : members_) member.local_rank += other.node == member.node ? 1 : 0;
    members_.push_back(member);
  }
  std::string path = (std::filesystem::temp_directory_path() / "gtrain-world-XXXXXX").string();
  GT_CHECK(mkdtemp(path.data()) != nullptr);
  directory_ = path;
  void* page = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  GT_CHECK(page != MAP_FAILED);
  shared_ = static_cast<Shared*>(page);
}

void FakeWorld::SetFabricOrder(const std::vector<int>& of_rank) {
  for (size_t rank = 0; rank < members_.size(); ++rank) members_[rank].fabric_order = of_rank[rank];
}

void FakeWorld::Leave(int rank) { shared_->left.fetch_or(uint64_t{1} << rank, std::memory_order_release); }

FakeWorld::~FakeWorld() {
  munmap(shared_, sizeof(Shared));
  std::error_code ignored;
  if (getpid() == owner_) std::filesystem::remove_all(directory_, ignored);
}

std::vector<std::string> FakeWorld::OneNode(int ranks) {
  return std::vector<std::string>(static_cast<size_t>(ranks), "node");
}

std::unique_ptr<Bootstrap> FakeWorld::Rank(int rank) { return std::make_unique<FakeBootstrap>(this, rank); }

void FakeWorld::Revoke(const std::string& reason) {
  std::strncpy(shared_->reason, reason.c_str(), sizeof(shared_->reason) - 1);
  shared_->revoked.store(1, std::memory_order_release);
  syscall(SYS_futex, &shared_->revoked, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::vector<std::string> FakeWorld::LinkReports() const {
  std::vector<std::string> lines;
  for (size_t rank = 0; rank < std::size(shared_->link); ++rank) {
    if (shared_->links_down[rank].load(std::memory_order_acquire) != 0) lines.push_back(shared_->link[rank]);
  }
  return lines;
}

uint64_t FakeWorld::ArenaBytes() const {
  uint64_t bytes = 0;
  std::error_code gone;  // meanwhile
  for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
    if (!entry.path().filename().string().starts_with("arena-")) continue;
    const uintmax_t size = entry.file_size(gone);
    if (!gone) bytes += size;
  }
  return bytes;
}

std::string FakeWorld::Compression() const { return shared_->compression; }

}  // namespace gtrain::comm
