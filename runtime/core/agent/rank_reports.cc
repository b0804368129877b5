#include "runtime/core/agent/rank_reports.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/json_depth.h"
#include "base/json_text.h"
#include "base/pattern.h"

namespace gtrain::core {

namespace {

using Json = nlohmann::json;

constexpr size_t kMatchBytesMax = 1024;
constexpr char kNotFinite[] = "nan";
constexpr uint64_t kRanksMax = 1 << 16;

// Steps and counts: neither negative nor more than a double holds exactly.
std::optional<uint64_t> Count(const Json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number()) return std::nullopt;
  const double value = it->get<double>();
  if (!(value >= 0 && value < 9e15)) return std::nullopt;
  return static_cast<uint64_t>(value);
}

// JSON has no NaN: the SDK says "nan" for every loss that is not finite.
std::optional<double> Loss(const Json& object) {
  const auto it = object.find("loss");
  if (it == object.end()) return std::nullopt;
  if (*it == kNotFinite) return std::numeric_limits<double>::quiet_NaN();
  return it->is_number() ? std::optional(it->get<double>()) : std::nullopt;
}

std::optional<double> Real(const Json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number()) return std::nullopt;
  const double value = it->get<double>();
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}

RankSaid Numbers(const Json& object) {
  RankSaid said;
  said.step = Count(object, "step");
  said.loss = Loss(object);
  said.samples = Real(object, "samples");
  said.collective = Count(object, "collective");
  said.timeline = Count(object, "timeline");
  said.waited = Real(object, "waited");
  said.joined = Real(object, "joined");
  said.stalled = Real(object, "stalled");
  if (!said.waited || !said.joined) said.waited = said.joined = std::nullopt;
  return said;
}

std::string Printable(std::string text) {
  for (char& c : text) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  }
  return text;
}

RankSaid Refused(const char* what, size_t bytes, size_t most) {
  RankSaid said;
  said.kind = RankSaid::Kind::kNote;
  said.note = kRefusedNote;
  said.text = absl::StrCat(what, " has ", bytes, " bytes and may have ", most, ": it is not taken");
  return said;
}

}  // namespace

RankSaid ReadRelay(const std::string& json) {
  const Json object = Json::parse(ShallowJson(json), nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return {};
  RankSaid said = Numbers(object);
  const std::string type = TextOf(object, "type");
  if (type == "joined") said.kind = RankSaid::Kind::kJoined;
  if (type == "progress") said.kind = RankSaid::Kind::kProgress;
  if (type == "checkpoint" && said.step) {
    said.kind = RankSaid::Kind::kCheckpoint;
    said.manifest = TextOf(object, "manifest");
    if (said.manifest.size() > kManifestBytesMax)
      return Refused("the manifest of a checkpoint", said.manifest.size(), kManifestBytesMax);
    said.text = Printable(TextOf(object, "policy").substr(0, kPolicyBytesMax));
  }
  const auto sequence = Count(object, "sequence");
  if (type == "exchange" && sequence && absl::Base64Unescape(TextOf(object, "blob"), &said.blob)) {
    said.kind = RankSaid::Kind::kExchange;
    said.sequence = *sequence;
    if (said.blob.size() > kBlobBytesMax)
      return Refused("its part of an exchange", said.blob.size(), kBlobBytesMax);
  }
  if (const auto peer = Count(object, "peer"); type == "link" && peer && *peer < kRanksMax) {
    said.kind = RankSaid::Kind::kLink;
    said.peer = static_cast<int>(*peer);
    said.text = Printable(TextOf(object, "text").substr(0, kLinkTextBytesMax));
  }
  if (type == "pause") {
    said.kind = RankSaid::Kind::kPause;
    said.paused = object.value("paused", Json()) == Json(true);
  }
  if (IsRankNote(type)) {
    said.kind = RankSaid::Kind::kNote;
    said.note = type;
    said.text = Printable(TextOf(object, "text").substr(0, kRankNoteBytesMax));
  }
  if (type == "overdue" && sequence) {
    said.kind = RankSaid::Kind::kOverdue;
    said.sequence = *sequence;
  }
  return said;
}

RankSaid ReadReportLine(const std::string& line) {
  Json object = Json::parse(ShallowJson(line), nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) {  // Python's json.dumps writes these words, which are no JSON
    const std::string word = absl::StrCat("\"", kNotFinite, "\"");
    const std::string repaired =
        absl::StrReplaceAll(line, {{"-Infinity", word}, {"Infinity", word}, {"NaN", word}});
    object = Json::parse(ShallowJson(repaired), nullptr, /*allow_exceptions=*/false);
  }
  if (!object.is_object()) return {};
  RankSaid said = Numbers(object);
  said.kind = RankSaid::Kind::kProgress;
  const auto checkpoint = object.find("checkpoint");
  said.checkpoint = checkpoint != object.end() && !checkpoint->is_null() && *checkpoint != false;
  return said;
}

std::string TableText(uint64_t sequence, const std::vector<std::string>& blobs) {
  std::string text = absl::StrCat("table ", sequence);
  for (const std::string& blob : blobs) absl::StrAppend(&text, "\n", absl::Base64Escape(blob));
  return text;
}

std::string MissingText(uint64_t sequence, const std::vector<int>& ranks) {
  return absl::StrCat("missing ", sequence, ranks.empty() ? "" : " ", absl::StrJoin(ranks, " "));
}

std::string LeftText(const std::vector<int>& ranks) {
  return absl::StrCat("left ", absl::StrJoin(ranks, " "));
}

std::vector<std::string> LineCutter::Take(absl::string_view bytes) {
  std::vector<std::string> lines;
  for (char c : bytes) {
    if (c != '\n' && c != '\r') {
      partial_.push_back(c);
      if (partial_.size() < bytes_max_) continue;
    }
    if (!partial_.empty()) lines.push_back(std::move(partial_));
    partial_.clear();
  }
  return lines;
}

struct ProgressPatterns::Compiled {
  std::optional<Pattern> step, loss;
};

namespace {

std::optional<Pattern> Compile(const std::string& text) {
  if (text.empty()) return std::nullopt;
  auto pattern = Pattern::Compile(text);
  return pattern.ok() ? std::optional(*std::move(pattern)) : std::nullopt;
}

std::string FirstGroup(const std::optional<Pattern>& pattern, absl::string_view line) {
  return pattern ? pattern->FirstGroup(line).value_or("") : "";
}

}  // namespace

ProgressPatterns::ProgressPatterns() = default;
ProgressPatterns::~ProgressPatterns() = default;
ProgressPatterns::ProgressPatterns(ProgressPatterns&&) noexcept = default;
ProgressPatterns& ProgressPatterns::operator=(ProgressPatterns&&) noexcept = default;

ProgressPatterns::ProgressPatterns(const spec::Progress& progress) : compiled_(std::make_unique<Compiled>()) {
  compiled_->step = Compile(progress.step);
  compiled_->loss = Compile(progress.loss);
}

bool ProgressPatterns::empty() const {
  return compiled_ == nullptr || (!compiled_->step && !compiled_->loss);
}

RankSaid ProgressPatterns::Match(const std::string& line) const {
  RankSaid said;
  if (empty()) return said;
  const absl::string_view head = absl::string_view(line).substr(0, kMatchBytesMax);
  int64_t step = 0;
  double loss = 0;
  if (absl::SimpleAtoi(FirstGroup(compiled_->step, head), &step)) said.step = step;
  if (absl::SimpleAtod(FirstGroup(compiled_->loss, head), &loss)) said.loss = loss;
  if (said.step || said.loss) said.kind = RankSaid::Kind::kProgress;
  return said;
}

}  // namespace gtrain::core
