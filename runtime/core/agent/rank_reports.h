// Parses the reports of programs without trust: relayed JSON of SDK ranks, JSON lines of $GTRAIN_REPORT, and
// `progress:` patterns in output lines. PURE. Nothing here fails: a report that cannot be understood is left
// out.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "job/spec/job_spec.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {

inline constexpr size_t kLinkTextBytesMax = 300;
inline constexpr size_t kPolicyBytesMax = 200;
// A longer text of a rank is refused, and the refusal is an event of its job: it would not reach the head.
inline constexpr size_t kManifestBytesMax = 4096;
inline constexpr size_t kBlobBytesMax = 1 << 20;
inline constexpr char kRefusedNote[] = "refused";

struct RankSaid {
  enum class Kind {
    kNothing,
    kJoined,
    kExchange,
    kOverdue,
    kProgress,
    kCheckpoint,
    kLink,
    kNote,
    kPause
  } kind = Kind::kNothing;
  std::optional<int64_t> step;
  std::optional<double> loss;     // not finite: the training has diverged
  std::optional<double> samples;  // since the last one
  std::optional<uint64_t> collective;
  std::optional<uint64_t> timeline;
  std::optional<double> waited, joined;  // seconds, both or none
  std::optional<double> stalled;         // likewise, and none of an older library
  uint64_t sequence = 0;                 // kExchange, kOverdue
  std::string blob;                      // kExchange, decoded
  std::string manifest;                  // kCheckpoint
  bool checkpoint = false;               // a report line that names a checkpoint
  int peer = 0;                          // kLink: the rank that is not reached
  bool paused = false;                   // kPause: they stand still; else they may, when they are asked to
  std::string note;                      // kNote: which (rank_notes.h)
  std::string text;  // kLink, kCheckpoint (how often there is one), kNote: printable, bounded
};

RankSaid ReadRelay(const std::string& json);       // runtime/keeper/rank_protocol.h
RankSaid ReadReportLine(const std::string& line);  // docs/protocols/rank-environment.md

// "table N" and a line of base64 a rank: each rank reads all of it, so it is not JSON
// (runtime/keeper/rank_protocol.h).
std::string TableText(uint64_t sequence, const std::vector<std::string>& blobs);
// "missing N" and the ranks that have not spoken in exchange N, each after a blank.
std::string MissingText(uint64_t sequence, const std::vector<int>& ranks);
// "left" and the ranks that ended with exit code 0, each after a blank.
std::string LeftText(const std::vector<int>& ranks);
inline constexpr char kPauseText[] = "pause";

// Cuts a byte stream into lines at \n and \r; a line longer than `bytes_max` is cut there (fault P9).
class LineCutter {
 public:
  explicit LineCutter(size_t bytes_max) : bytes_max_(bytes_max) {}
  std::vector<std::string> Take(absl::string_view bytes);

 private:
  size_t bytes_max_;
  std::string partial_;
};

// The `progress:` patterns of a job. A pattern that does not compile matches nothing (the parser refused it
// before).
class ProgressPatterns {
 public:
  ProgressPatterns();
  explicit ProgressPatterns(const spec::Progress& progress);
  ~ProgressPatterns();
  ProgressPatterns(ProgressPatterns&&) noexcept;
  ProgressPatterns& operator=(ProgressPatterns&&) noexcept;

  bool empty() const;
  RankSaid Match(const std::string& line) const;  // kProgress or kNothing

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace gtrain::core
