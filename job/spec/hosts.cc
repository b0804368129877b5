#include "job/spec/hosts.h"

#include "topology/hostlist.h"

namespace gtrain::spec {

absl::StatusOr<std::vector<std::string>> HostsOf(absl::string_view word) {
  if (word.find_first_of("[],") == absl::string_view::npos)
    return std::vector<std::string>{std::string(word)};
  return topology::ParseHostlist(word, kHostsMax);
}

HostNames NamesOf(const std::vector<std::string>& words) {
  HostNames names;
  for (const std::string& word : words) {
    if (const absl::StatusOr<std::vector<std::string>> hosts = HostsOf(word); hosts.ok())
      names.insert(hosts->begin(), hosts->end());
  }
  return names;
}

}  // namespace gtrain::spec
