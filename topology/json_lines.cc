// A second pass over the text with the library's events. Its iterator counts line ends as it goes; an event
// comes right behind the token that it reports, except for a number, whose end is seen one character later: a
// number's line is that of its key, or of the element before it.
#include "topology/json_lines.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"

namespace gtrain::topology {
namespace {

using nlohmann::json;

constexpr size_t kDeepest = 16;

class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, int* line) : at_(at), line_(line) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    if (*at_ == '\n') ++*line_;
    ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }

 private:
  const char* at_;
  int* line_;
};

class Recorder : public nlohmann::json_sax<json> {
 public:
  explicit Recorder(const int* line) : line_(line) {}

  bool null() override { return Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(number_integer_t) override { return Value(); }
  bool number_unsigned(number_unsigned_t) override { return Value(); }
  bool number_float(number_float_t, const string_t&) override { return Value(); }
  bool string(string_t&) override { return Value(); }
  bool binary(binary_t&) override { return Value(); }
  bool start_object(std::size_t) override { return Open(false); }
  bool start_array(std::size_t) override { return Open(true); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    open_.back().key = name;
    lines.emplace(Path(), *line_);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

  std::map<std::string, int> lines;

 private:
  struct Level {
    bool is_array = false;
    int count = 0;
    std::string key;
  };

  std::string Path() const {
    std::string path;
    for (const Level& level : open_)
      absl::StrAppend(&path, "/", level.is_array ? absl::StrCat(level.count) : level.key);
    return path;
  }
  bool Value() {
    lines.emplace(Path(), *line_);
    if (!open_.empty()) ++open_.back().count;
    return true;
  }
  bool Open(bool is_array) {
    // Paths are as long as they are deep. What has a meaning is not.
    if (open_.size() >= kDeepest) return false;
    lines.emplace(Path(), *line_);
    open_.push_back({is_array, 0, ""});
    return true;
  }
  bool Close() {
    open_.pop_back();
    if (!open_.empty()) ++open_.back().count;
    return true;
  }

  const int* line_;
  std::vector<Level> open_;
};

}  // namespace

std::map<std::string, int> JsonLines(absl::string_view text) {
  int line = 1;
  Recorder recorder(&line);
  json::sax_parse(CountingIterator(text.data(), &line), CountingIterator(text.data() + text.size(), &line),
                  &recorder);
  return std::move(recorder.lines);
}

int LineOf(absl::string_view text, size_t offset) {
  const absl::string_view before = text.substr(0, offset);
  return 1 + static_cast<int>(std::count(before.begin(), before.end(), '\n'));
}

}  // namespace gtrain::topology
