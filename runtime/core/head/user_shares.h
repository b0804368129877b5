// UserShares: how many things of one kind each user has open, so that what one user takes leaves room for the
// others. PURE.
#pragma once
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace gtrain::core {

// Owner thread only. Costs an entry for each user that has something open.
class UserShares {
 public:
  int all() const { return all_; }

  // Takes one for `user` (OwnerName). ResourceExhausted: the user, or all users together, have as many open
  // as they may; the message says which, with `what` in it ("log reads are open"), and what to do.
  absl::Status Take(const std::string& user, int user_max, int all_max, absl::string_view what) {
    if (all_ >= all_max) {
      return absl::ResourceExhaustedError(absl::StrCat("too many ", what, " in this cluster: try again"));
    }
    const auto it = of_user_.find(user);
    if (it != of_user_.end() && it->second >= user_max) {
      return absl::ResourceExhaustedError(absl::StrCat(it->second, " ", what, " for ", user,
                                                       ", the most this head takes of one user: end some"));
    }
    ++of_user_[user];
    ++all_;
    return absl::OkStatus();
  }

  // Gives back one that was taken.
  void Return(const std::string& user) {
    const auto it = of_user_.find(user);
    if (it == of_user_.end()) return;
    --all_;
    if (--it->second == 0) of_user_.erase(it);
  }

 private:
  std::map<std::string, int> of_user_;
  int all_ = 0;
};

}  // namespace gtrain::core
