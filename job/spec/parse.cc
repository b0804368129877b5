// The file becomes a tree, flags are laid over the tree, and the schema reads the whole.
// So a value from --set meets exactly the rules of one in the file.
#include "job/spec/parse.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "job/spec/job_reader.h"
#include "job/spec/print.h"
#include "job/spec/values.h"
#include "job/spec/words.h"
#include "job/spec/yaml_tree.h"

namespace gtrain::spec {
namespace {

// "where.labels.a.b" -> {where, labels, a.b}: label names may hold dots, other keys do not.
std::vector<std::string> SplitKey(absl::string_view key) {
  for (absl::string_view prefix : {"where.labels.", "labels.", "env."}) {
    if (!absl::StartsWith(key, prefix)) continue;
    std::vector<std::string> parts = absl::StrSplit(prefix.substr(0, prefix.size() - 1), '.');
    parts.emplace_back(key.substr(prefix.size()));
    return parts;
  }
  return absl::StrSplit(key, '.');
}

void SetSource(Node& node, int source) {
  node.place = {source, 0, 0};
  for (Node& item : node.items) SetSource(item, source);
  for (auto& [key, value] : node.entries) {
    SetSource(key, source);
    SetSource(value, source);
  }
}

std::optional<Node> OverlayValue(const Overlay& overlay, int source, Report& report) {
  Node node;
  node.kind = Node::Kind::kScalar;
  node.place = {source, 0, 0};
  node.quoted = true;
  switch (overlay.kind) {
    case Overlay::Kind::kText:
      node.scalar = overlay.text;
      return node;
    case Overlay::Kind::kWords:
      node.kind = Node::Kind::kSequence;
      for (const std::string& word : overlay.words) {
        Node item;
        item.kind = Node::Kind::kScalar;
        item.place = node.place;
        item.quoted = true;
        item.scalar = word;
        node.items.push_back(std::move(item));
      }
      return node;
    case Overlay::Kind::kYaml:
    case Overlay::Kind::kRanks: {
      Report inner;
      inner.AddSource(overlay.label);
      if (absl::StripAsciiWhitespace(overlay.text).empty()) {
        report.Error(node.place, "the value is missing");
        return std::nullopt;
      }
      std::optional<Node> value = ReadYaml(overlay.text, 0, inner);
      for (const SpecError& error : inner.Take()) report.Error(node.place, error.message);
      if (value) SetSource(*value, source);
      return value;
    }
  }
  return std::nullopt;
}

// -n must lie inside a {min, max} that the file gives (fault J8).
bool InsideRange(const Node& range, const Node& wanted, Report& report) {
  const auto bound = [&](const char* key, int64_t otherwise) {
    int64_t value = otherwise;
    const Node* node = range.Find(key);
    if (node != nullptr && !absl::SimpleAtoi(node->scalar, &value)) return otherwise;
    return value;
  };
  int64_t n = 0;
  if (range.kind != Node::Kind::kMapping || !absl::SimpleAtoi(wanted.scalar, &n)) return true;
  const int64_t min = bound("min", 1);
  const int64_t max = bound("max", kRanksMax);
  if (n >= min && n <= max) return true;
  report.Error(wanted.place,
               absl::StrCat(n, " ranks are outside the file's `ranks: {min: ", min, ", max: ", max, "}`"));
  return false;
}

void Apply(const Overlay& overlay, Node& root, Report& report) {
  const int source = report.AddSource(overlay.label);
  std::optional<Node> value = OverlayValue(overlay, source, report);
  if (!value) return;
  Node* node = &root;
  const std::vector<std::string> parts = SplitKey(overlay.key);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (node->kind != Node::Kind::kMapping) {
      report.Error(
          {source, 0, 0},
          absl::StrCat("`", absl::StrJoin(parts.begin(), parts.begin() + static_cast<ptrdiff_t>(i), "."),
                       "` is a single value in the file, not a mapping; set it as a whole"));
      return;
    }
    Node* child = node->Find(parts[i]);
    if (child == nullptr) {
      Node key;
      key.kind = Node::Kind::kScalar;
      key.place = {source, 0, 0};
      key.scalar = parts[i];
      Node empty;
      empty.kind = Node::Kind::kMapping;
      empty.place = {source, 0, 0};
      node->entries.push_back({std::move(key), std::move(empty)});
      child = &node->entries.back().value;
    } else if (i + 1 == parts.size() && overlay.kind == Overlay::Kind::kRanks &&
               !InsideRange(*child, *value, report)) {
      return;
    }
    node = child;
  }
  *node = *std::move(value);
}

}  // namespace

ParseResult ParseJob(absl::string_view text, absl::string_view filename, const ParseOptions& options) {
  Report report;
  ParseResult result;
  const int file = report.AddSource(filename);
  std::optional<Node> root;
  if (text.empty() && !options.overlays.empty()) {
    root.emplace();
    root->kind = Node::Kind::kMapping;
    root->place = {file, 0, 0};
  } else {
    root = ReadYaml(text, file, report);
  }
  if (root) {
    if (root->kind == Node::Kind::kMapping) {
      for (const Overlay& overlay : options.overlays) Apply(overlay, *root, report);
    }
    result.spec = JobReader(options, report).Read(*root);
    if (report.empty() && PrintJob(result.spec).size() > kTextBytesMax) {
      report.Error({file, 1, 1}, "the job is larger than 1 MiB when written out; move the script to a file");
    }
  }
  result.errors = report.Take();
  return result;
}

absl::StatusOr<JobSpec> ParseCanonical(absl::string_view text) {
  ParseResult result = ParseJob(text, "job", {});
  if (result.ok()) return std::move(result.spec);
  return absl::InvalidArgumentError(absl::StrJoin(
      result.errors, "\n", [](std::string* out, const SpecError& e) { *out += FormatError(e); }));
}

absl::StatusOr<Overlay> ApplySet(absl::string_view key_equals_value) {
  const size_t equals = key_equals_value.find('=');
  const absl::string_view key = absl::StripAsciiWhitespace(key_equals_value.substr(0, equals));
  if (equals == absl::string_view::npos || key.empty() || key.front() == '.' || key.back() == '.' ||
      absl::StrContains(key, "..")) {
    return absl::InvalidArgumentError(absl::StrCat("--set ", Shown(key_equals_value.substr(0, equals)),
                                                   " must be KEY=VALUE, like --set checkpoint.every=60s"));
  }
  Overlay overlay;
  overlay.label = absl::StrCat("--set ", key);
  overlay.key = std::string(key);
  overlay.text = std::string(key_equals_value.substr(equals + 1));
  return overlay;
}

std::string NameFrom(absl::string_view text) {
  if (const size_t slash = text.rfind('/'); slash != absl::string_view::npos) text.remove_prefix(slash + 1);
  const size_t dot = text.rfind('.');
  if (dot != absl::string_view::npos && dot > 0) text = text.substr(0, dot);
  std::string name;
  for (const char c : absl::AsciiStrToLower(text)) {
    const bool good = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    if (good)
      name += c;
    else if (!name.empty() && name.back() != '-')
      name += '-';
  }
  name = name.substr(0, 40);
  while (!name.empty() && name.back() == '-') name.pop_back();
  return name.empty() ? "job" : name;
}

}  // namespace gtrain::spec
