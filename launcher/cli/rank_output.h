// Turns chunks of many ranks' output into lines for people: whole lines only, "host:rank: " before each, the
// same line of several ranks once with all their numbers, nothing that could drive a terminal (fault P9).
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace gtrain::cli {

// Not thread-safe.
class RankOutput {
 public:
  static constexpr size_t kLineBytesMax = 16 << 10;  // longer lines are split

  // `bare`: without who wrote it.
  explicit RankOutput(bool bare = false) : bare_(bare) {}

  void Add(int rank, const std::string& host, bool is_stderr, absl::string_view bytes);
  // The lines completed since the last call, in the order in which they first came. `flush` also gives
  // unfinished last lines.
  std::vector<std::string> Take(bool flush);

 private:
  struct Line {
    std::string text;
    std::map<std::string, std::vector<int>> ranks;  // by host
  };
  void Complete(int rank, const std::string& host, std::string text);

  const bool bare_;
  std::map<std::pair<int, bool>, std::pair<std::string, std::string>>
      partial_;  // (rank, stderr) -> host, text
  std::vector<Line> lines_;
  std::multimap<std::string, size_t> index_;  // text -> positions in lines_
};

}  // namespace gtrain::cli
