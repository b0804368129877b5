// Job file -> JobSpec, with every error of the file at once. PURE.
//
//   ParseResult result = ParseJob(text, "job.yaml", {.variables = &environment, .file_dir = "/home/me/job"});
//   for (const SpecError& error : result.errors) Print(FormatError(error));
//
// docs/formats/job-file.md is the reference of the keys.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "job/spec/job_spec.h"
#include "job/spec/report.h"

namespace gtrain::spec {

inline constexpr int kRanksMax = 65'536;

// A flag laid over the file before it is read as a whole, so that it meets the same rules.
struct Overlay {
  enum class Kind {
    kYaml,   // `text` is a YAML value: --set KEY=VALUE
    kText,   // `text` is a string as it stands: --env, --name
    kWords,  // `words` is a list of strings as they stand: -- CMD ARGS
    kRanks,  // like kYaml, but must lie inside a {min, max} of the file: -n
  };
  std::string label;  // shown in errors, e.g. "--set ranks=0"; must not hold a secret
  std::string key;    // dotted: "checkpoint.every"
  Kind kind = Kind::kYaml;
  std::string text;
  std::vector<std::string> words;
};

struct ParseOptions {
  const std::map<std::string, std::string>* variables = nullptr;  // for ${NAME}; nullptr: none is defined
  std::string
      file_dir;  // absolute; relative workdir and secret files are taken from here; "" = left as they are
  std::string current_dir;   // absolute; the workdir when the file names none; "" = left empty
  std::string default_name;  // when the file names none
  std::vector<Overlay> overlays;
};

struct ParseResult {
  JobSpec spec;  // meaningful only when ok()
  std::vector<SpecError> errors;
  bool ok() const { return errors.empty(); }
};

ParseResult ParseJob(absl::string_view text, absl::string_view filename, const ParseOptions& options = {});

// Reads what PrintJob wrote (at the head and agents). InvalidArgument lists every error.
absl::StatusOr<JobSpec> ParseCanonical(absl::string_view text);

// "KEY=VALUE" of --set. InvalidArgument when there is no key.
absl::StatusOr<Overlay> ApplySet(absl::string_view key_equals_value);

// a name made of `text` ("train_v2.py" -> "train-v2"); "job" when nothing is left of it.
std::string NameFrom(absl::string_view text);

}  // namespace gtrain::spec
