// Where a node's head is, across restarts of either: <state_dir>/cluster.json, which a person may change at
// any time. Free functions; they block on the file.
#pragma once
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/ids.h"

namespace gtrain::agent {

struct Membership {
  std::string endpoint, head_public_key;
  ClusterId cluster;
  std::vector<std::string> others;  // where the head may be, too, if it is not at `endpoint`
  // Entries among the addresses of the file that are no addresses. They stay there, for a person to correct.
  std::vector<std::string> bad;

  // Makes `first` the first address to try from now on.
  void Prefer(const std::string& first);
  // The addresses to try, in their order, `endpoint` first.
  std::vector<std::string> Addresses() const;
  // The addresses to try after `here`, in the order of the file, once around, without `here`.
  std::vector<std::string> After(absl::string_view here) const;
  // A warning about `bad`; empty: there is none.
  std::string Warning(absl::string_view path) const;
};

std::string MembershipPath(const std::string& state_dir);
// Loads the file. Empty where it is not there or cannot be understood; its addresses are sorted into those
// that could be a head's and those that could not.
Membership LoadMembership(const std::string& state_dir);
absl::Status SaveMembership(const std::string& state_dir, const Membership& membership);

// InvalidArgument with words about `flag`: this is no address of a head.
absl::Status CheckHeadAddress(absl::string_view flag, const std::string& address);

}  // namespace gtrain::agent
