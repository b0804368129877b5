#include "launcher/cli/job_changes.h"

#include <algorithm>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "job/spec/values.h"

namespace gtrain::cli {
namespace {

using Words = std::vector<std::string>;

constexpr size_t kWordsCompared = 500;  // of each command; the work grows with their product
constexpr size_t kWordBytesShown = 60;

std::string ShowWords(const Words& words) {
  return absl::StrJoin(words, " ", [](std::string* out, const std::string& word) {
    absl::StrAppend(out, word.substr(0, kWordBytesShown), word.size() > kWordBytesShown ? "..." : "");
  });
}

std::string Change(const Words& before, const Words& now) {
  if (before.empty()) return absl::StrCat(ShowWords(now), " is new");
  if (now.empty()) return absl::StrCat(ShowWords(before), " is gone");
  return absl::StrCat(ShowWords(before), " is now ", ShowWords(now));
}

// length[i][j]: of the longest common subsequence of before[i..] and now[j..].
std::vector<std::vector<size_t>> CommonLengths(const Words& before, const Words& now) {
  std::vector<std::vector<size_t>> length(before.size() + 1, std::vector<size_t>(now.size() + 1, 0));
  for (size_t i = before.size(); i-- > 0;) {
    for (size_t j = now.size(); j-- > 0;) {
      length[i][j] =
          before[i] == now[j] ? length[i + 1][j + 1] + 1 : std::max(length[i + 1][j], length[i][j + 1]);
    }
  }
  return length;
}

// The difference that begins at before[i] and now[j]; moves both on to its end.
std::string NextChange(const Words& before, const Words& now, const std::vector<std::vector<size_t>>& length,
                       size_t& i, size_t& j) {
  Words gone, come;
  // A value is shown with the flag before it.
  if (i > 0 && absl::StartsWith(before[i - 1], "-") && i < before.size() && j < now.size() &&
      !absl::StartsWith(now[j], "-")) {
    gone.push_back(before[i - 1]);
    come.push_back(before[i - 1]);
  }
  while (i < before.size() || j < now.size()) {
    if (i < before.size() && j < now.size() && before[i] == now[j]) break;
    if (j == now.size() || (i < before.size() && length[i + 1][j] >= length[i][j + 1])) {
      gone.push_back(before[i++]);
    } else {
      come.push_back(now[j++]);
    }
  }
  return Change(gone, come);
}

void CompareWords(const Words& before, const Words& now, std::vector<std::string>& changes) {
  if (std::max(before.size(), now.size()) > kWordsCompared) {
    if (before != now) changes.push_back("the command is another one");
    return;
  }
  const auto length = CommonLengths(before, now);
  for (size_t i = 0, j = 0; i < before.size() || j < now.size();) {
    if (i < before.size() && j < now.size() && before[i] == now[j]) {
      ++i;
      ++j;
    } else {
      changes.push_back(NextChange(before, now, length, i, j));
    }
  }
}

}  // namespace

std::vector<std::string> JobChanges(const spec::JobSpec& before, const spec::JobSpec& now) {
  std::vector<std::string> changes;
  if (before.run.empty() != now.run.empty()) {
    changes.push_back(now.run.empty() ? "run is now a script" : "script is now run");
  } else {
    CompareWords(before.run, now.run, changes);
  }
  if (before.script != now.script && before.run.empty() && now.run.empty())
    changes.push_back("script is another one");
  if (before.per != now.per) changes.push_back("per is another one");
  if (before.setup != now.setup) changes.push_back("setup is another one");
  if (before.mesh != now.mesh) changes.push_back("mesh is another one");
  for (const auto& [name, value] : before.env) {
    const auto it = now.env.find(name);
    if (it == now.env.end()) {
      changes.push_back(absl::StrCat("env ", name, " is gone"));
    } else if (it->second != value) {
      changes.push_back(
          absl::StrCat("env ", name, " ", ShowWords({value}), " is now ", ShowWords({it->second})));
    }
  }
  for (const auto& [name, value] : now.env) {
    if (!before.env.contains(name))
      changes.push_back(absl::StrCat("env ", name, " is new: ", ShowWords({value})));
  }
  return changes;
}

}  // namespace gtrain::cli
