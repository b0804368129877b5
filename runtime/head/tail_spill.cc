#include "runtime/head/tail_spill.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/folder.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "runtime/head/run_files.h"

namespace gtrain::head {
namespace {

constexpr char kFolder[] = "tails";
constexpr size_t kFileCost = 16 << 10;

}  // namespace

TailSpill::TailSpill(std::string cluster_dir, TailSpillLimits limits)
    : cluster_dir_(std::move(cluster_dir)), limits_(limits) {}

void TailSpill::Clear() {
  files_ = Files();
  folder_.reset();
  std::error_code error;  // what stays costs room only
  std::filesystem::remove_all(cluster_dir_ + "/" + kFolder, error);
}

absl::Status TailSpill::Open() {
  if (folder_.valid()) return absl::OkStatus();
  std::string why;
  const UniqueFd cluster = OpenFolder(cluster_dir_, {.why = &why});
  if (!cluster.valid()) return absl::UnavailableError(why);
  if (mkdirat(cluster.get(), kFolder, 0700) != 0 && errno != EEXIST)
    return ErrnoStatus(errno, cluster_dir_ + "/" + kFolder);
  folder_ = OpenFolderInside(cluster, kFolder, {.why = &why});
  return folder_.valid() ? absl::OkStatus() : absl::UnavailableError(why);
}

void TailSpill::SetRoom(bool room) { room_ = room; }

void TailSpill::Write(const core::SpillTail& spill) {
  if (!room_) {  // what waited when the disk became low
    ++lost_;
    return;
  }
  Files::Entry& entry = files_.Renew(spill.tail);
  const absl::Status written = Append(entry.value, spill);
  if (written.ok()) {
    files_.Count(entry, std::max(entry.value.size, kFileCost));
  } else {
    Unlink(entry.value);  // half of it may be there
    files_.Erase(spill.tail);
    ++lost_;
  }
  if (!written.ok() && !failing_)
    LogWarning("the older output of ranks whose nodes are lost will not be there: ", written.message());
  failing_ = !written.ok();
  while (files_.bytes() > limits_.total) {
    const Files::Entry& oldest = *files_.Oldest();
    Unlink(oldest.value);
    files_.Erase(oldest.key);
  }
}

absl::Status TailSpill::Append(File& file, const core::SpillTail& spill) {
  GT_RETURN_IF_ERROR(Open());
  if (file.number == 0) file.number = ++last_number_;
  const bool follows = spill.before > 0 && spill.before == file.bytes;
  std::string text = spill.text;
  bool anew = !follows;
  if (follows && file.size > 2 * limits_.told) {
    GT_ASSIGN_OR_RETURN(const std::string end, ReadEnd(file));
    text = end + text;
    anew = true;
  }
  const int flags = O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | (anew ? O_TRUNC : O_APPEND);
  const UniqueFd fd(openat(folder_.get(), absl::StrCat(file.number).c_str(), flags, 0600));
  const std::string what = absl::StrCat(cluster_dir_, "/", kFolder, "/", file.number);
  if (!fd.valid()) return ErrnoStatus(errno, what);
  GT_RETURN_IF_ERROR(WriteWhole(fd.get(), text, what));
  file.size = (anew ? 0 : file.size) + text.size();
  file.bytes = spill.before + spill.text.size();
  file.end_offset = spill.end_offset;
  return absl::OkStatus();
}

absl::StatusOr<std::string> TailSpill::ReadEnd(const File& file) const {
  const UniqueFd fd(
      openat(folder_.get(), absl::StrCat(file.number).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  std::string text(std::min(file.size, limits_.told), '\0');
  const off_t begin = static_cast<off_t>(file.size - text.size());
  if (!fd.valid() || pread(fd.get(), text.data(), text.size(), begin) != static_cast<ssize_t>(text.size()))
    return absl::UnavailableError(
        absl::StrCat(cluster_dir_, "/", kFolder, "/", file.number, " is not whole"));
  return text;
}

std::optional<core::SpilledTail> TailSpill::Read(const core::TailKey& tail) {
  const Files::Entry* entry = files_.Find(tail);
  if (entry == nullptr) return std::nullopt;
  const absl::StatusOr<std::string> text = ReadEnd(entry->value);
  if (!text.ok()) return std::nullopt;
  return core::SpilledTail{*text, entry->value.bytes, entry->value.end_offset};
}

void TailSpill::Drop(const JobId& job) {
  files_.EraseJob(job, [this](const Files::Entry& entry) { Unlink(entry.value); });
}

void TailSpill::Unlink(const File& file) const {
  if (folder_.valid() && file.number != 0) unlinkat(folder_.get(), absl::StrCat(file.number).c_str(), 0);
}

// One task for all that is owed, behind the parts that were taken before.
bool TailQueue::PayDebts() {
  if (to_drop_->empty() && !to_clear_) return true;
  // Shared, because a queue that is full takes none of it and would be offered a copy at each call.
  const bool posted = thread_.Post([spill = spill_, jobs = to_drop_, clear = to_clear_] {
    if (clear) spill->Clear();
    for (const JobId& job : *jobs) spill->Drop(job);
  });
  if (!posted) return false;
  to_drop_ = std::make_shared<std::set<JobId>>();
  to_clear_ = false;
  return true;
}

bool TailQueue::Write(const core::SpillTail& part) {
  return PayDebts() && thread_.Post([part, spill = spill_] { spill->Write(part); });
}

bool TailQueue::Read(const core::TailKey& tail, std::function<void(std::optional<core::SpilledTail>)> done) {
  return PayDebts() &&
         thread_.Post([tail, spill = spill_, done = std::move(done)] { done(spill->Read(tail)); });
}

void TailQueue::Drop(const JobId& job) {
  to_drop_->insert(job);
  (void)PayDebts();
}

void TailQueue::Clear() {
  to_clear_ = true;
  (void)PayDebts();
}

}  // namespace gtrain::head
