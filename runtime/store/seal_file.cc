// Two slots of one page each, written in turn: commit n goes into slot n % 2.
//
//   bytes 0-7    "GTSEAL1\n"
//   bytes 8-39   commit, records, digest: four little-endian words
//   bytes 40-55  XXH3-128, canonical, of bytes 0-39
#include "runtime/store/seal_file.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace gtrain::store {
namespace {

constexpr absl::string_view kMagic = "GTSEAL1\n";
constexpr size_t kSlotBytes = 4096;
constexpr size_t kSummaryBytes = 32;
constexpr size_t kCheckedBytes = 8 + kSummaryBytes;

std::string SlotChecksum(absl::string_view bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  return std::string(reinterpret_cast<const char*>(canonical.digest), sizeof(canonical.digest));
}

std::optional<Summary> ReadSlot(absl::string_view slot) {
  if (slot.size() < kCheckedBytes + 16 || slot.substr(0, 8) != kMagic) return std::nullopt;
  if (SlotChecksum(slot.substr(0, kCheckedBytes)) != slot.substr(kCheckedBytes, 16)) return std::nullopt;
  absl::StatusOr<Summary> summary = DecodeSummary(slot.substr(8, kSummaryBytes));
  return summary.ok() ? std::optional<Summary>(*summary) : std::nullopt;
}

}  // namespace

std::string EncodeSummary(const Summary& summary) {
  std::string bytes(kSummaryBytes, '\0');
  const uint64_t words[] = {summary.commit, summary.records, summary.digest[0], summary.digest[1]};
  for (size_t i = 0; i < 4; ++i) {
    for (size_t b = 0; b < 8; ++b) bytes[8 * i + b] = static_cast<char>(words[i] >> (8 * b));
  }
  return bytes;
}

absl::StatusOr<Summary> DecodeSummary(absl::string_view bytes) {
  if (bytes.size() != kSummaryBytes) return absl::DataLossError("a summary of the wrong size");
  uint64_t words[4] = {};
  for (size_t i = 0; i < 4; ++i) {
    for (size_t b = 0; b < 8; ++b) words[i] |= uint64_t{static_cast<uint8_t>(bytes[8 * i + b])} << (8 * b);
  }
  return Summary{words[0], words[1], {words[2], words[3]}};
}

absl::StatusOr<SealFile> SealFile::Open(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, 1 << 20);
  std::optional<Summary> found;
  if (absl::IsNotFound(text.status())) {
    GT_RETURN_IF_ERROR(WriteFileDurable(path, std::string(2 * kSlotBytes, '\0')));
  } else if (!text.ok()) {
    return text.status();
  } else if (text->find_first_not_of('\0') != std::string::npos || text->size() != 2 * kSlotBytes) {
    for (size_t slot = 0; slot * kSlotBytes < text->size(); ++slot) {
      const auto read = ReadSlot(absl::string_view(*text).substr(slot * kSlotBytes));
      if (read && (!found || read->commit > found->commit)) found = read;
    }
    if (!found) return absl::DataLossError(absl::StrCat(path, " is damaged: neither of its slots is whole"));
  } else {
    found = Summary{};
  }
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) return ErrnoStatus(errno, path);
  SealFile file(path, std::move(fd));
  file.found_ = found;
  return file;
}

absl::Status SealFile::Write(const Summary& summary) {
  std::string slot = absl::StrCat(kMagic, EncodeSummary(summary));
  slot += SlotChecksum(slot);
  const auto offset = static_cast<off_t>(summary.commit % 2 * kSlotBytes);
  ssize_t written;
  do {
    written = pwrite(fd_.get(), slot.data(), slot.size(), offset);
  } while (written < 0 && errno == EINTR);
  if (written < 0) return ErrnoStatus(errno, path_);
  if (written != static_cast<ssize_t>(slot.size())) {
    return absl::InternalError(absl::StrCat(path_, ": only part of it could be written"));
  }
  if (fdatasync(fd_.get()) != 0) return ErrnoStatus(errno, path_);
  return absl::OkStatus();
}

}  // namespace gtrain::store
