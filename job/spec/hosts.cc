#include "job/spec/hosts.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "topology/hostlist.h"

namespace gtrain::spec {

absl::StatusOr<std::vector<std::string>> HostsOf(absl::string_view word) {
  if (word.find_first_of("[],") == absl::string_view::npos)
    return std::vector<std::string>{std::string(word)};
  return topology::ParseHostlist(word, kHostsMax);
}

absl::StatusOr<std::vector<int>> ParseRankList(absl::string_view text, int max) {
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text.substr(0, 60), "\" ", why));
  };
  if (text.empty() || text.find_first_not_of("0123456789,-") != absl::string_view::npos)
    return wrong("is no list of numbers such as 0-3,7");
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> words,
                      topology::ParseHostlist(absl::StrCat("[", text, "]"), static_cast<size_t>(max)));
  std::vector<int> numbers;
  for (const std::string& word : words) {
    int number = 0;
    if (!absl::SimpleAtoi(word, &number) || number >= max)
      return wrong(absl::StrCat("has a number above ", max - 1));
    numbers.push_back(number);
  }
  return numbers;
}

std::string PrintRankList(const std::vector<int>& numbers) {
  std::string out;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    absl::StrAppend(&out, out.empty() ? "" : ",", numbers[i]);
    if (last > i) absl::StrAppend(&out, "-", numbers[last]);
    i = last + 1;
  }
  return out;
}

HostNames NamesOf(const std::vector<std::string>& words) {
  HostNames names;
  for (const std::string& word : words) {
    if (const absl::StatusOr<std::vector<std::string>> hosts = HostsOf(word); hosts.ok())
      names.insert(hosts->begin(), hosts->end());
  }
  return names;
}

}  // namespace gtrain::spec
