#include "base/available_memory.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"

namespace gtrain {
namespace {

constexpr size_t kFileBytesMax = 64 << 10;

std::vector<std::string> Lines(const std::string& path) {
  const auto text = ReadFile(path, kFileBytesMax);
  if (!text.ok()) return {};
  return absl::StrSplit(*text, '\n', absl::SkipEmpty());
}

// The number behind `name` in lines of "name number" or "name: number kB".
std::optional<uint64_t> Field(const std::string& path, absl::string_view name) {
  for (const std::string& line : Lines(path)) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" :"), absl::SkipEmpty());
    uint64_t value = 0;
    if (words.size() >= 2 && words[0] == name && absl::SimpleAtoi(words[1], &value))
      return words.size() == 3 && words[2] == "kB" ? value << 10 : value;
  }
  return std::nullopt;
}

std::optional<uint64_t> Number(const std::string& path) {
  const std::vector<std::string> lines = Lines(path);
  uint64_t value = 0;
  if (lines.empty() || !absl::SimpleAtoi(lines[0], &value)) return std::nullopt;  // "max"
  return value;
}

// The folders of this process's group in the hierarchy whose line of /proc/self/cgroup has `mark`, and of
// those above it up to `mount`, which in a container is the container's own.
std::vector<std::string> Groups(const std::string& root, absl::string_view mark, absl::string_view mount) {
  std::vector<std::string> folders;
  for (const std::string& line : Lines(root + "/proc/self/cgroup")) {
    const size_t at = line.find(std::string(mark));
    if (at == std::string::npos || (mark[0] == '0' && at != 0)) continue;
    std::string group = line.substr(at + mark.size());
    for (; !group.empty() && group != "/"; group.resize(group.rfind('/')))
      folders.push_back(absl::StrCat(root, mount, group));
    folders.push_back(absl::StrCat(root, mount));
  }
  return folders;
}

}  // namespace

uint64_t AvailableMemory(const std::string& root) {
  uint64_t available = Field(root + "/proc/meminfo", "MemAvailable").value_or(UINT64_MAX);
  for (const std::string& folder : Groups(root, "0::", "/sys/fs/cgroup")) {
    const std::optional<uint64_t> max = Number(folder + "/memory.max"),
                                  used = Number(folder + "/memory.current");
    if (!max || !used) continue;
    const std::string stat = folder + "/memory.stat";
    const uint64_t of_files =
        Field(stat, "inactive_file").value_or(0) + Field(stat, "active_file").value_or(0);
    const uint64_t taken = *used - std::min(*used, of_files);
    available = std::min(available, *max - std::min(*max, taken));
  }
  return available;
}

uint64_t MemoryLimit(const std::string& root) {
  uint64_t limit = UINT64_MAX;
  const auto take = [&](const std::string& file) {
    limit = std::min(limit, Number(file).value_or(UINT64_MAX));
  };
  for (const std::string& folder : Groups(root, "0::", "/sys/fs/cgroup")) take(folder + "/memory.max");
  for (const std::string& folder : Groups(root, ":memory:", "/sys/fs/cgroup/memory"))
    take(folder + "/memory.limit_in_bytes");
  return limit;
}

double ProcessorLimit(const std::string& root) {
  double limit = std::numeric_limits<double>::infinity();
  const auto take = [&](double quota, double period) {
    if (quota > 0 && period > 0) limit = std::min(limit, quota / period);
  };
  for (const std::string& folder : Groups(root, "0::", "/sys/fs/cgroup")) {
    const std::vector<std::string> lines = Lines(folder + "/cpu.max");
    const std::vector<std::string> words =
        lines.empty() ? std::vector<std::string>() : absl::StrSplit(lines[0], ' ', absl::SkipEmpty());
    double quota = 0, period = 0;  // microseconds; "max": none
    if (words.size() == 2 && absl::SimpleAtod(words[0], &quota) && absl::SimpleAtod(words[1], &period))
      take(quota, period);
  }
  for (const char* controllers : {":cpu,cpuacct:", ":cpu:"}) {
    const std::string mount = absl::StrCat("/sys/fs/cgroup/", absl::StripSuffix(controllers + 1, ":"));
    for (const std::string& folder : Groups(root, controllers, mount)) {
      const auto quota = Number(folder + "/cpu.cfs_quota_us"), period = Number(folder + "/cpu.cfs_period_us");
      if (quota && period) take(static_cast<double>(*quota), static_cast<double>(*period));  // -1: none
    }
  }
  return limit;
}

}  // namespace gtrain
