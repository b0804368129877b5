// The command line as values: one table of flags a verb, one small parser for all. Wrong
// input is InvalidArgument with the nearest right word.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace gtrain::cli {

struct Flag {
  std::string name;        // without dashes
  char letter = '\0';      // -n; '\0' = none
  std::string value_name;  // "N"; empty = a switch
  std::string help;
  bool repeated = false;
};

class Args {
 public:
  bool Has(absl::string_view flag) const { return values_.find(flag) != values_.end(); }
  // The last value given; `otherwise` when the flag is absent.
  std::string Get(absl::string_view flag, absl::string_view otherwise = "") const;
  std::vector<std::string> All(absl::string_view flag) const;
  // A whole number in [min, max]; nullopt when the flag is absent.
  absl::StatusOr<std::optional<int64_t>> Int(absl::string_view flag, int64_t min, int64_t max) const;

  std::vector<std::string> words;                // positional arguments before "--"
  std::optional<std::vector<std::string>> rest;  // what follows "--"

 private:
  friend absl::StatusOr<Args> ParseArgs(const std::vector<std::string>&, const std::vector<Flag>&);
  std::map<std::string, std::vector<std::string>, std::less<>> values_;
};

// The words that a shell offers for the positional arguments of a verb; the names come from the cluster.
enum class Completes { kFiles, kJobs, kLiveJobs, kNodes, kContexts };

// One verb of the program. `run` returns the exit code.
struct Verb {
  std::string name;
  std::string summary;  // one line
  std::string usage;    // after "gtrain NAME"
  std::string details;  // paragraphs and examples for --help
  std::vector<Flag> flags;
  size_t words_min = 0;
  size_t words_max = 0;
  std::vector<std::string> actions = {};  // of which the first argument may be one
  Completes completes = Completes::kFiles;
  bool takes_rest = false;  // accepts "-- CMD ARGS"
  bool hidden = false;
  int (*run)(const Args& args) = nullptr;
};

absl::StatusOr<Args> ParseArgs(const std::vector<std::string>& argv, const std::vector<Flag>& flags);

// The text of `gtrain VERB --help`.
std::string HelpOf(const Verb& verb);

}  // namespace gtrain::cli
