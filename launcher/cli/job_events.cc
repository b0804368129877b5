#include "launcher/cli/job_events.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/json_depth.h"
#include "base/json_text.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "launcher/cli/context.h"
#include "launcher/cli/follow.h"
#include "launcher/cli/left.h"
#include "launcher/cli/terminal.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;

uint64_t SequenceOf(const json& event) {
  const auto it = event.find("sequence");
  return it != event.end() && it->is_number_unsigned() ? it->get<uint64_t>() : 0;
}

// The newest lines of a file that somebody else may have made: nothing is followed or waited for.
std::string EndOfFile(const std::string& path, size_t bytes_max) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info = {};
  if (!file.valid() || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return "";
  const off_t begin = std::max<off_t>(0, info.st_size - static_cast<off_t>(bytes_max));
  std::string text(static_cast<size_t>(info.st_size - begin), '\0');
  const ssize_t got = pread(file.get(), text.data(), text.size(), begin);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return begin == 0 ? text : text.substr(std::min(text.find('\n'), text.size()));  // not a part of a line
}

// The events of a run directory, as they stand in the file.
std::vector<json> StoredEvents(const std::string& run_dir, size_t bytes_max) {
  std::vector<json> stored;
  const std::string text = EndOfFile(run_dir + "/events.jsonl", bytes_max);
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    json event = json::parse(ShallowJson(line), nullptr, /*allow_exceptions=*/false);
    if (event.is_object() && SequenceOf(event) > 0) stored.push_back(std::move(event));
  }
  return stored;
}

std::string EventText(const json& event) {
  constexpr int kShown = 400;  // a record of samples has less
  return absl::StrCat("\"", CutToWidth(SafeText(TextOf(event, "text")), kShown), "\"");
}

// What the head wrote in both places is the same to the last letter, and no event between two of them is
// missing. A head that lost its disk counts anew, so that a number may stand there twice.
std::vector<std::string> Compare(const json& events, const std::vector<json>& stored,
                                 const std::string& run_dir) {
  const std::string file = SafeText(run_dir) + "/events.jsonl";
  constexpr absl::string_view kSo =
      ": one of the two was changed after the head wrote it, so nothing is proven. Audit the files as the "
      "run "
      "left them";
  std::vector<std::string> differences;
  std::multimap<uint64_t, const json*> there;
  std::set<uint64_t> here;
  for (const json& event : stored) there.emplace(SequenceOf(event), &event);
  for (const json& event : events) {
    const uint64_t sequence = SequenceOf(event);
    here.insert(sequence);
    const auto [begin, end] = there.equal_range(sequence);
    if (begin == end || std::any_of(begin, end, [&](const auto& one) { return *one.second == event; }))
      continue;
    const std::string said = EventText(event), written = EventText(*std::prev(end)->second);
    differences.push_back(absl::StrCat("event ", sequence, " is ", said, ", and in ", file, " it is ",
                                       said == written ? "the same with other fields" : written, kSo));
  }
  if (here.empty()) return differences;
  for (auto it = there.lower_bound(SequenceOf(events.front())); it != there.end(); ++it) {
    if (it->first > SequenceOf(events.back()) || here.contains(it->first)) continue;
    differences.push_back(absl::StrCat("event ", it->first, " is missing, and in ", file, " it is ",
                                       EventText(*it->second), kSo));
  }
  return differences;
}

void AddEarlierEvents(const std::string& run_dir, size_t bytes_max, json& why,
                      std::vector<std::string>* differences) {
  const auto events = why.find("events");
  if (events == why.end() || !events->is_array() || run_dir.empty()) return;
  const uint64_t known = events->empty() ? UINT64_MAX : SequenceOf(events->front());
  if (known <= 1 && differences == nullptr) return;
  std::vector<json> stored = StoredEvents(run_dir, bytes_max);
  if (differences != nullptr) *differences = Compare(*events, stored, run_dir);
  json all = json::array();
  for (json& event : stored) {
    if (SequenceOf(event) < known) all.push_back(std::move(event));
  }
  for (json& event : *events) all.push_back(std::move(event));
  *events = std::move(all);
}

absl::StatusOr<std::string> AskWhy(const Args& args, const std::string& word, std::string* run_dir) {
  GT_ASSIGN_OR_RETURN(Cluster cluster, OpenCluster(args, Start::kNever));
  GT_ASSIGN_OR_RETURN(const JobDoc job, FindJob(cluster, word, Without::kNewest));
  *run_dir = job.run_dir;
  return Ask(cluster, core::ClientWhy{JobId(job.id)});
}

}  // namespace

absl::StatusOr<std::string> WhyWithEvents(const Args& args, const std::string& word, size_t bytes_max,
                                          std::vector<std::string>* differences) {
  std::string run_dir;
  absl::StatusOr<std::string> asked =
      IsRunDirectory(word) ? LeftJob(args, word) : AskWhy(args, word, &run_dir);
  if (!asked.ok() && !IsRunDirectory(word)) {
    GT_ASSIGN_OR_RETURN(LeftAnswer left, LeftInstead(asked.status(), args, word));
    Complain(SafeText(left.note));
    asked = std::move(left.json);
  }
  GT_ASSIGN_OR_RETURN(const std::string text, std::move(asked));
  json why = json::parse(ShallowJson(text), nullptr, false);
  if (!why.is_object()) return absl::InternalError("the head's answer is not a JSON object");
  AddEarlierEvents(run_dir.empty() ? TextOf(why, "run_dir") : run_dir, bytes_max, why, differences);
  return why.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace gtrain::cli
