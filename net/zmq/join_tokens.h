// Join tokens that can still be used, kept in a file of the cluster directory: a restart of the head forgets
// none and prolongs none (fault X4). Not thread-safe; blocks on the file.
//
// Elapsed time is that of the boot clock while the machine has not rebooted, else of the wall clock; one that
// went back ends the token.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace gtrain::net {

struct BootTime {
  std::string boot_id;
  absl::Duration since_boot;
  absl::Time wall;
};
BootTime BootTimeNow();

struct JoinTokenRecord {
  std::string id;  // KeyId of its public key
  int uses = 1;
  std::vector<std::string> spent_for;  // node ids
  std::string by;                      // who made it
  BootTime made;
  absl::Duration life;
  int uses_left() const { return uses - static_cast<int>(spent_for.size()); }
  absl::Duration Left(const BootTime& now) const;  // zero: expired
};

class JoinTokens {
 public:
  explicit JoinTokens(std::string path) : path_(std::move(path)) {}

  // DataLoss: the file is not one of ours.
  absl::Status Load();
  // ResourceExhausted at 1000 live tokens.
  absl::Status Add(absl::string_view public_key, int uses, absl::Duration life, const std::string& by,
                   const BootTime& now);
  // Spends a token in memory: Save makes it last. A node that spent it may do so again: its answer was lost.
  // PermissionDenied says what is wrong with the token.
  absl::Status Spend(const std::string& id, const std::string& node, const BootTime& now);
  absl::Status Save() const;  // durable when it returns
  // Gives back what was spent for nodes that never got in: the head died between the two.
  void Forget(const std::set<std::string>& nodes_let_in);
  absl::Status Revoke(const std::string& id);  // NotFound
  std::vector<JoinTokenRecord> Live(const BootTime& now) const;

 private:
  const std::string path_;
  std::vector<JoinTokenRecord> tokens_;
};

}  // namespace gtrain::net
