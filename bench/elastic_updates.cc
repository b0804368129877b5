#include "bench/elastic_updates.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"

namespace gtrain::bench {
namespace {

namespace fs = std::filesystem;

constexpr std::streamoff kTail = 512;  // some lines

std::vector<Applied> ReadFrom(std::ifstream& lines) {
  std::vector<Applied> all;
  for (std::string line; std::getline(lines, line) && !lines.eof();) {
    Applied applied;
    if (sscanf(line.c_str(), "%d %ld %ld %ld", &applied.generation, &applied.step, &applied.at_ns,
               &applied.fourth) >= 3)
      all.push_back(applied);
  }
  return all;
}

template <typename Visit>
void ForEachFile(const fs::path& folder, Visit visit) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (absl::StartsWith(name, "trained.")) visit(atoi(name.c_str() + 8), entry.path());
  }
}

}  // namespace

std::map<pid_t, std::vector<Applied>> ReadUpdates(const fs::path& folder) {
  std::map<pid_t, std::vector<Applied>> updates;
  ForEachFile(folder, [&](pid_t pid, const fs::path& path) {
    std::ifstream lines(path);
    if (std::vector<Applied> all = ReadFrom(lines); !all.empty()) updates[pid] = std::move(all);
  });
  return updates;
}

std::map<pid_t, Applied> LastUpdates(const fs::path& folder) {
  std::map<pid_t, Applied> last;
  ForEachFile(folder, [&](pid_t pid, const fs::path& path) {
    if (!Lives(pid)) return;
    std::ifstream lines(path, std::ios::ate);
    const std::streamoff size = lines.tellg();
    lines.seekg(std::max<std::streamoff>(0, size - kTail));
    std::string cut;
    if (size > kTail) std::getline(lines, cut);
    if (const std::vector<Applied> all = ReadFrom(lines); !all.empty()) last[pid] = all.back();
  });
  return last;
}

int64_t NowNs() { return RealClock().Now().ns; }

bool Lives(pid_t pid) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(stat, text);
  const size_t end = text.rfind(')');
  return end != std::string::npos && end + 2 < text.size() && text[end + 2] != 'Z';
}

}  // namespace gtrain::bench
