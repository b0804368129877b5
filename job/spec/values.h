// Scalars of the job file read as what the schema says they are. PURE.
//
// A plain `010`, `1e3`, `0x10`, `1_000`, `.nan`, `yes` or `2026-01-01` never becomes a value by its
// looks: numbers are decimal, booleans are true and false, strings that look like something
// else need quotes. The message says what to write instead (fault J5).
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "job/spec/report.h"
#include "job/spec/yaml_tree.h"

namespace gtrain::spec {

struct StringRules {
  bool may_be_empty = false;
  bool secret_free = false;  // refuse what looks like a key or password (fault J11)
  bool one_line = true;      // no control characters
  size_t bytes_max = 4096;
  const std::map<std::string, std::string>* variables = nullptr;  // for ${NAME}
  bool expand = false;                                            // ${NAME} and $$ mean something here
};

// Each reader reports and returns nullopt when the node is not what is asked for. `key`
// is the dotted path shown to people.
class Values {
 public:
  explicit Values(Report& report) : report_(report) {}

  std::optional<int64_t> Int(const Node& node, absl::string_view key, int64_t min, int64_t max);
  std::optional<bool> Bool(const Node& node, absl::string_view key);
  std::optional<std::string> String(const Node& node, absl::string_view key, const StringRules& rules = {});
  std::optional<std::vector<std::string>> Strings(const Node& node, absl::string_view key,
                                                  const StringRules& rules = {});
  std::optional<absl::Duration> Duration(const Node& node, absl::string_view key, absl::Duration min,
                                         absl::Duration max);
  std::optional<uint64_t> Bytes(const Node& node, absl::string_view key, uint64_t min, uint64_t max);
  // A share, written 0.01 or 1%, in parts of a million.
  std::optional<int> Share(const Node& node, absl::string_view key, int min, int max);
  // One of `words`; its index.
  std::optional<size_t> Choice(const Node& node, absl::string_view key,
                               const std::vector<std::string>& words);
  bool Mapping(const Node& node, absl::string_view key);
  // True for the plain or quoted scalar `word`.
  static bool Is(const Node& node, absl::string_view word);

  void Error(const Node& node, absl::string_view key, absl::string_view message);

 private:
  bool Scalar(const Node& node, absl::string_view key, absl::string_view wanted);

  Report& report_;
};

// The type that other YAML readers would take a plain scalar for ("a number", "a boolean", "a date"); "" = a
// string.
absl::string_view LooksLike(absl::string_view plain);

// A value for an error message: control characters escaped, at most 60 bytes.
std::string Shown(absl::string_view value);

}  // namespace gtrain::spec
