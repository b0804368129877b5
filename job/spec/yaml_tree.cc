// Builds the tree from yaml-cpp's events with a stack of open containers. A mapping's
// children alternate key, value. The first structural violation stops the document by an
// exception of our own (yaml-cpp unwinds cleanly), because what follows an alias or a
// 33rd level cannot be trusted; duplicate keys are noted and reading goes on.
#include "job/spec/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <set>
#include <sstream>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace gtrain::spec {
namespace {

struct Stop {
  Place place;
  std::string message;
};

// Finds what the byte level refuses; each kind once, at its first place.
void CheckCharacters(absl::string_view text, int source, Report& report) {
  std::set<absl::string_view> seen;
  int line = 1;
  int column = 1;
  for (size_t pos = 0; pos < text.size();) {
    const size_t start = pos;
    const std::optional<char32_t> c = DecodeUtf8(text, pos);
    if (!c) {
      report.Error({source, line, column}, "not valid UTF-8 here; save the file as UTF-8");
      return;
    }
    absl::string_view problem = CharacterProblem(*c);
    if (*c == U'\uFEFF' && start == 0)
      problem = "the file starts with a byte order mark; save it as UTF-8 without one";
    if (!problem.empty() && seen.insert(problem).second) report.Error({source, line, column}, problem);
    if (*c == U'\n') {
      ++line;
      column = 1;
      if (pos < text.size() && text[pos] == '%') {
        report.Error({source, line, 1}, "YAML directives (%...) are not part of a job file; remove the line");
      }
    } else {
      column += static_cast<int>(pos - start);
    }
  }
  if (!text.empty() && text[0] == '%') {
    report.Error({source, 1, 1}, "YAML directives (%...) are not part of a job file; remove the line");
  }
}

class TreeBuilder : public YAML::EventHandler {
 public:
  TreeBuilder(absl::string_view text, int source, Report& report)
      : text_(text), source_(source), report_(report) {}

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1) throw Stop{At(mark), "a job file is one document; this starts a second one"};
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    CheckAnchor(mark, anchor);
    Node node;
    node.place = At(mark);
    Put(std::move(node));
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Stop{At(mark), "aliases (*name) are not allowed in a job file; write the value out"};
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    CheckAnchor(mark, anchor);
    const char first = At(mark, 0);
    const bool quoted = first == '"' || first == '\'' || first == '|' || first == '>';
    if (!(tag.empty() || tag == "?" || (tag == "!" && quoted)) || first == '!') {
      throw Stop{At(mark), "tags (!...) are not allowed in a job file; remove it"};
    }
    if (quoted && !IsClosed(first, static_cast<size_t>(mark.pos))) {
      throw Stop{At(mark), absl::StrCat("the quote (", std::string(1, first), ") is not closed")};
    }
    if (!IsCleanText(value)) throw Stop{At(mark), "the value holds a NUL character or invalid UTF-8"};
    Node node;
    node.kind = Node::Kind::kScalar;
    node.place = At(mark);
    node.quoted = quoted;
    node.scalar = value;
    Put(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(mark, tag, anchor, Node::Kind::kSequence);
  }
  void OnSequenceEnd() override { Close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(mark, tag, anchor, Node::Kind::kMapping);
  }
  void OnMapEnd() override { Close(); }

  std::optional<Node> Take() { return std::move(root_); }

 private:
  struct Frame {
    Node node;
    std::optional<Node> key;                      // a key that waits for its value
    absl::flat_hash_map<std::string, int> lines;  // key -> line, to name both places of a duplicate
  };

  Place At(const YAML::Mark& mark) const {
    if (mark.is_null()) return {source_, 1, 1};
    return {source_, mark.line + 1, mark.column + 1};
  }
  char At(const YAML::Mark& mark, int offset) const {
    const size_t pos = static_cast<size_t>(mark.pos) + static_cast<size_t>(offset);
    return mark.is_null() || pos >= text_.size() ? '\0' : text_[pos];
  }
  // yaml-cpp takes the end of the file for a closing quote.
  bool IsClosed(char quote, size_t open) const {
    if (quote != '"' && quote != '\'') return true;
    for (size_t i = open + 1; i < text_.size(); ++i) {
      if (text_[i] == '\\' && quote == '"') {
        ++i;
      } else if (text_[i] == quote) {
        if (quote == '"' || i + 1 == text_.size() || text_[i + 1] != quote) return true;
        ++i;
      }
    }
    return false;
  }
  void CheckAnchor(const YAML::Mark& mark, YAML::anchor_t anchor) const {
    if (anchor != 0)
      throw Stop{At(mark), "anchors (&name) are not allowed in a job file; write the value out"};
  }

  void Open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, Node::Kind kind) {
    CheckAnchor(mark, anchor);
    if (!(tag.empty() || tag == "?"))
      throw Stop{At(mark), "tags (!...) are not allowed in a job file; remove it"};
    if (stack_.size() >= static_cast<size_t>(kDepthMax)) {
      throw Stop{At(mark), absl::StrCat("nested deeper than ", kDepthMax, " levels")};
    }
    Frame frame;
    frame.node.kind = kind;
    frame.node.place = At(mark);
    stack_.push_back(std::move(frame));
  }

  void Close() {
    Node node = std::move(stack_.back().node);
    stack_.pop_back();
    Put(std::move(node));
  }

  void Put(Node node) {
    if (++nodes_ > kNodesMax) throw Stop{node.place, absl::StrCat("more than ", kNodesMax, " values")};
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Frame& top = stack_.back();
    if (top.node.kind == Node::Kind::kSequence) {
      top.node.items.push_back(std::move(node));
    } else if (!top.key) {
      if (node.kind != Node::Kind::kScalar)
        throw Stop{node.place, "a key must be a word; quote it if it is null or ~"};
      top.key = std::move(node);
    } else {
      PutEntry(top, std::move(node));
    }
  }

  void PutEntry(Frame& top, Node value) {
    Node key = *std::move(top.key);
    top.key.reset();
    const auto [it, fresh] = top.lines.emplace(key.scalar, key.place.line);
    if (!fresh) {
      report_.Error(key.place, absl::StrCat("key `", absl::CHexEscape(key.scalar), "` is already on line ",
                                            it->second, "; keep one of the two"));
      return;
    }
    top.node.entries.push_back({std::move(key), std::move(value)});
  }

  const absl::string_view text_;
  const int source_;
  Report& report_;
  std::vector<Frame> stack_;
  std::optional<Node> root_;
  int documents_ = 0;
  int nodes_ = 0;
};

}  // namespace

Node* Node::Find(absl::string_view key) {
  for (auto& [name, value] : entries) {
    if (name.scalar == key) return &value;
  }
  return nullptr;
}

bool IsCleanText(absl::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const std::optional<char32_t> c = DecodeUtf8(text, pos);
    if (!c || *c == 0) return false;
  }
  return true;
}

absl::string_view CharacterProblem(char32_t c) {
  if (c == U'\t') return "a tab; indent with spaces, and write \"\\t\" in a quoted string";
  if (c == U'\r')
    return "a carriage return (Windows line ends?); convert the file with: sed -i 's/\\r$//' FILE";
  if (c == 0) return "a NUL character";
  if ((c < 0x20 && c != U'\n') || (c >= 0x7F && c < 0xA0))
    return "a control character; write it as \"\\xNN\" in quotes";
  if (c == U'\uFEFF') return "a byte order mark inside the file; remove it";
  if (c == 0x2028 || c == 0x2029) return "a Unicode line separator; use an ordinary line end";
  if ((c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069))
    return "an invisible text-direction character; remove it";
  return "";
}

std::optional<Node> ReadYaml(absl::string_view text, int source, Report& report) {
  if (text.size() > kTextBytesMax) {
    report.Error({source, 1, 1},
                 absl::StrCat("larger than 1 MiB (", text.size(), " bytes); a job file is small"));
    return std::nullopt;
  }
  CheckCharacters(text, source, report);
  if (!report.empty()) return std::nullopt;
  TreeBuilder builder(text, source, report);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const Stop& stop) {
    report.Error(stop.place, stop.message);
    return std::nullopt;
  } catch (const YAML::Exception& e) {
    Place place{source, 1, 1};
    if (!e.mark.is_null()) place = {source, e.mark.line + 1, e.mark.column + 1};
    report.Error(place, absl::StrCat("not valid YAML: ", e.msg));
    return std::nullopt;
  }
  std::optional<Node> root = builder.Take();
  if (!root) report.Error({source, 1, 1}, "the file is empty; the smallest job is `run: COMMAND`");
  return root;
}

}  // namespace gtrain::spec
