// Turns chunks of many ranks' output into lines for people: whole lines only, "host:rank: " before each, the
// same line of several ranks once with all their numbers, nothing that could drive a terminal (fault P9). For
// a progress line that a carriage return begins anew only the last state is shown.
#pragma once
#include <cstdint>
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
// comes, and a copy; that of an only rank a copy alone.
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
  // With `live`: returns the unfinished lines as they stand.
  std::vector<std::string> Unfinished() const;

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};

  struct Writer {
    std::string host;
    int rank = 0;
    std::string prefix;  // of what it wrote alone
  };
  struct Stream {
    uint32_t writer = kNone;  // in writers_
    bool is_stderr = false;
    TextRows rows;
    std::string redrawn;    // shown last by AddRedrawn
    uint32_t last = kNone;  // in lines_: its newest; what it writes next stands behind
  };
  // One line that is shown, by all who wrote it.
  struct Line {
    absl::string_view text;  // in texts_
    bool is_stderr = false;
    uint32_t writer = kNone;                            // the first
    uint32_t others_begin = kNone, others_end = kNone;  // in others_: the first and the last of a list
    uint32_t next_equal = kNone;                        // in lines_: the next of the same text
  };
  struct Other {
    uint32_t writer = kNone;
    uint32_t next = kNone;
  };
  // The lines of one text. A rank's second equal line is a line of its own, and its lines stay in the order
  // in which it wrote them: only other ranks' lines collapse into one, and only behind what the rank wrote
  // before.
  struct Equal {
    uint32_t begin = kNone, end = kNone;  // in lines_: the first and the last
    uint32_t writer = kNone;              // most texts have this one only
    uint32_t written = kNone;             // in lines_: the last of its
  };
  uint32_t WriterOf(const std::string& host, int rank);
  void Complete(Stream& stream, absl::string_view text);
  // Takes the whole lines at the start that are shown as they are. Returns their bytes.
  size_t AddPlainLines(Stream& stream, absl::string_view bytes);
  uint32_t AddLine(Stream& stream, absl::string_view text);
  absl::string_view Keep(absl::string_view text);
  // Where the next line of this kind is put.
  std::string& End(bool is_stderr);
  const std::string& PrefixOf(const Line& line);

  const Options options_;
  Instant redrawn_at_;
  std::vector<Writer> writers_;
  std::map<std::pair<int, bool>, Stream> streams_;  // by rank and whether it is stderr
  std::vector<Piece> pieces_;                       // of an only rank
  // The lines of several ranks, since the last Take. A line costs no memory of its own.
  std::vector<std::string> texts_;  // blocks that never move
  std::vector<Line> lines_;
  std::vector<Other> others_;
  absl::flat_hash_map<std::pair<bool, absl::string_view>, Equal> index_;
  absl::flat_hash_map<std::pair<uint32_t, uint32_t>, uint32_t>
      written_;                  // as Equal::written, by its begin and writer
  std::vector<uint32_t> group_;  // the newest whose prefix was made
  std::string group_prefix_;
};

}  // namespace gtrain::cli
