// Turns chunks of many ranks' output into lines for people: whole lines only, "host:rank: " before each, the
// same line of several ranks once with all their numbers, nothing that could drive a terminal (fault P9).
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace gtrain::cli {

// Not thread-safe. A line costs a search among the different texts since the last Take, however often one
// comes.
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
  // The lines of one text. A rank's second equal line is a line of its own, so a rank that wrote it k times
  // is in the first k: only other ranks' lines collapse into one.
  struct Equal {
    std::vector<size_t> lines;                              // in lines_
    std::map<std::pair<std::string, int>, size_t> written;  // by host and rank
  };
  void Complete(int rank, const std::string& host, std::string text);

  const bool bare_;
  std::map<std::pair<int, bool>, std::pair<std::string, std::string>>
      partial_;  // (rank, stderr) -> host, text
  std::vector<Line> lines_;
  std::map<std::string, Equal> index_;  // by text
};

}  // namespace gtrain::cli
