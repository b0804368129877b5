#include "topology/hostlist.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "topology/topology.h"

namespace gtrain::topology {
namespace {

absl::Status Bad(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("hostlist \"", text.substr(0, 80), "\": ", why));
}

bool Digits(absl::string_view text) {
  return !text.empty() && text.size() <= 9 && std::ranges::all_of(text, absl::ascii_isdigit);
}

std::string Padded(int number, size_t width) {
  std::string digits = absl::StrCat(number);
  if (digits.size() < width) digits.insert(0, width - digits.size(), '0');
  return digits;
}

// The words of one bracket: "0-3,12" is 0 1 2 3 12.
absl::StatusOr<std::vector<std::string>> Expand(absl::string_view inside, absl::string_view text,
                                                size_t names_max) {
  std::vector<std::string> words;
  for (const absl::string_view part : absl::StrSplit(inside, ',')) {
    const std::pair<absl::string_view, absl::string_view> ends =
        absl::StrSplit(part, absl::MaxSplits('-', 1));
    const bool single = part.find('-') == absl::string_view::npos;
    int first = 0, last = 0;
    if (!Digits(ends.first) || !absl::SimpleAtoi(ends.first, &first) ||
        !(single || (Digits(ends.second) && absl::SimpleAtoi(ends.second, &last))))
      return Bad(text, absl::StrCat("\"", part, "\" is no number and no range such as 0-3"));
    if (single) last = first;
    if (last < first) return Bad(text, absl::StrCat("the range ", part, " runs backwards"));
    if (words.size() + static_cast<size_t>(last - first) >= names_max)
      return Bad(text, absl::StrCat("more than ", names_max, " names"));
    const size_t width = ends.first.size() > 1 && ends.first[0] == '0' ? ends.first.size() : 0;
    for (int i = first; i <= last; ++i) words.push_back(Padded(i, width));
  }
  return words;
}

// Every name of one item without a comma outside of brackets.
absl::StatusOr<std::vector<std::string>> ExpandItem(absl::string_view item, absl::string_view text,
                                                    size_t names_max) {
  std::vector<std::string> names = {""};
  while (!item.empty()) {
    const size_t open = item.find('[');
    if (item.substr(0, open).find(']') != absl::string_view::npos) return Bad(text, "a ] without a [");
    for (std::string& name : names) absl::StrAppend(&name, item.substr(0, open));
    if (open == absl::string_view::npos) break;
    const size_t close = item.find(']', open);
    if (close == absl::string_view::npos) return Bad(text, "a [ without a ]");
    GT_ASSIGN_OR_RETURN(const std::vector<std::string> words,
                        Expand(item.substr(open + 1, close - open - 1), text, names_max));
    if (names.size() * words.size() > names_max)
      return Bad(text, absl::StrCat("more than ", names_max, " names"));
    std::vector<std::string> longer;
    for (const std::string& name : names) {
      for (const std::string& word : words) longer.push_back(name + word);
    }
    names = std::move(longer);
    item.remove_prefix(close + 1);
  }
  return names;
}

// Name as a beginning, its last number, and what follows. `width` 0: the number has no leading zeros.
struct Cut {
  std::string head, tail;
  size_t width = 0;
  int number = -1;  // -1: there is none
};

Cut CutName(const std::string& name) {
  Cut cut;
  size_t end = name.find_last_of("0123456789");
  if (end == std::string::npos) return {name, "", 0, -1};
  size_t begin = end;
  while (begin > 0 && absl::ascii_isdigit(name[begin - 1])) --begin;
  const std::string digits = name.substr(begin, end + 1 - begin);
  if (digits.size() > 9 || !absl::SimpleAtoi(digits, &cut.number)) return {name, "", 0, -1};
  cut.head = name.substr(0, begin);
  cut.tail = name.substr(end + 1);
  cut.width = digits[0] == '0' && digits.size() > 1 ? digits.size() : 0;
  return cut;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseHostlist(absl::string_view text, size_t names_max) {
  std::vector<std::string> names;
  size_t begin = 0;
  int depth = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size()) {
      if (text[i] == '[') ++depth;
      if (text[i] == ']') --depth;
      if (depth > 1) return Bad(text, "a [ inside of a [");
      if (text[i] != ',' || depth != 0) continue;
    }
    const absl::string_view item = absl::StripAsciiWhitespace(text.substr(begin, i - begin));
    if (item.empty()) return Bad(text, "an empty name");
    GT_ASSIGN_OR_RETURN(std::vector<std::string> more, ExpandItem(item, text, names_max));
    if (names.size() + more.size() > names_max)
      return Bad(text, absl::StrCat("more than ", names_max, " names"));
    std::ranges::move(more, std::back_inserter(names));
    begin = i + 1;
  }
  return names;
}

std::string PrintHostlist(const std::vector<std::string>& names) {
  using Key = std::tuple<std::string, std::string, size_t>;
  std::map<Key, std::set<int>> numbers;
  std::vector<std::pair<Key, std::string>>
      order;  // of first appearance; the name itself where it has no number
  std::set<Key> padded;
  for (const std::string& name : names) {
    const Cut cut = CutName(name);
    if (cut.width > 0) padded.insert({cut.head, cut.tail, cut.width});
  }
  for (const std::string& name : names) {
    const Cut cut = CutName(name);
    // "n10" goes on where "n09" was.
    Key key = {cut.head, cut.tail, name.size() - cut.head.size() - cut.tail.size()};
    if (!padded.contains(key)) std::get<2>(key) = 0;
    if (cut.number < 0) {
      order.emplace_back(key, name);
      continue;
    }
    std::set<int>& of_key = numbers[key];
    if (of_key.empty()) order.emplace_back(key, "");
    of_key.insert(cut.number);
  }
  std::vector<std::string> parts;
  for (const auto& [key, name] : order) {
    const auto& [head, tail, width] = key;
    if (!name.empty()) {
      parts.push_back(name);
      continue;
    }
    const std::set<int>& all = numbers[key];
    std::vector<std::string> ranges;
    for (auto it = all.begin(); it != all.end();) {
      const int first = *it;
      int last = first;
      while (++it != all.end() && *it == last + 1) last = *it;
      ranges.push_back(first == last ? Padded(first, width)
                                     : absl::StrCat(Padded(first, width), "-", Padded(last, width)));
    }
    parts.push_back(all.size() == 1 ? absl::StrCat(head, ranges[0], tail)
                                    : absl::StrCat(head, "[", absl::StrJoin(ranges, ","), "]", tail));
  }
  return absl::StrJoin(parts, ",");
}

absl::string_view ShortName(absl::string_view name) {
  const bool is_address = name.find(':') != absl::string_view::npos || std::ranges::all_of(name, [](char c) {
                            return c == '.' || absl::ascii_isdigit(c);
                          });
  return is_address ? name : name.substr(0, name.find('.'));
}

absl::StatusOr<std::vector<int>> ParseNumbers(absl::string_view text) {
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> words, Expand(text, text, kDevicesMax));
  std::vector<int> numbers;
  for (const std::string& word : words) {
    int number = 0;
    if (!absl::SimpleAtoi(word, &number) || (!numbers.empty() && number <= numbers.back()))
      return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" must ascend, such as 0-3,7"));
    numbers.push_back(number);
  }
  return numbers;
}

std::string PrintNumbers(const std::vector<int>& numbers) { return PrintRanks(numbers); }

}  // namespace gtrain::topology
