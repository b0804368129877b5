// Turns chunks of many ranks' output into lines for people: whole lines only, "host:rank: " before each, the
// same line of several ranks once with all their numbers, nothing that could drive a terminal (fault P9). Of
// a progress line that a carriage return begins anew the last state is shown.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "launcher/cli/text_rows.h"

namespace gtrain::cli {

// Not thread-safe. A line costs a search among the different texts since the last Take, however often one
// comes; that of an only rank a copy.
class RankOutput {
 public:
  struct Options {
    bool bare = false;       // without who wrote it
    bool only_rank = false;  // one rank is shown: its lines are like nobody else's
    bool live = false;       // that rank may move the cursor, and Unfinished shows what it draws
    bool colour_out = false, colour_err = false;  // colours are kept
  };
  // Whole lines, one after the other, each with its end.
  struct Piece {
    bool is_stderr = false;
    std::string text;
    bool operator==(const Piece&) const = default;
  };

  explicit RankOutput(Options options) : options_(options) {}
  const Options& options() const { return options_; }

  void Add(int rank, const std::string& host, bool is_stderr, absl::string_view bytes);
  // A progress line that is only ever begun anew would be seen when it ends, perhaps an hour later: its last
  // state counts as a line every few seconds in which it changed. Nothing with `live`.
  void AddRedrawn(Instant now);
  // The ranks that wrote so far are over: what comes now under their numbers begins new lines.
  void EndLines();
  // The lines completed since the last call, in the order in which they first came. `flush` also gives
  // unfinished last lines.
  std::vector<Piece> Take(bool flush);
  // With `live`: the unfinished lines as they stand.
  std::vector<std::string> Unfinished() const;

 private:
  struct Stream {
    int rank = 0;
    bool is_stderr = false;
    std::string host, prefix;
    TextRows rows;
    std::string redrawn;  // shown last by AddRedrawn
  };
  struct Line {
    bool is_stderr = false;
    std::string text;
    std::map<std::string, std::vector<int>> ranks;  // by host
  };
  // The lines of one text. A rank's second equal line is a line of its own, so a rank that wrote it k times
  // is in the first k: only other ranks' lines collapse into one.
  struct Equal {
    std::vector<size_t> lines;                              // in lines_
    std::map<std::pair<std::string, int>, size_t> written;  // by host and rank
  };
  void Complete(const Stream& stream, absl::string_view text);
  // Of an only rank: takes the whole lines at the start that are shown as they are. Returns their bytes.
  size_t AddPlainLines(const Stream& stream, absl::string_view bytes);
  // Where the next line of this kind is put.
  std::string& End(bool is_stderr);

  const Options options_;
  Instant redrawn_at_;
  std::map<std::pair<int, bool>, Stream> streams_;  // by rank and whether it is stderr
  std::vector<Piece> pieces_;                       // of an only rank
  std::vector<Line> lines_;                         // of many
  absl::flat_hash_map<std::pair<bool, std::string>, Equal> index_;
};

}  // namespace gtrain::cli
