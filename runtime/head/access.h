// The keys of a cluster at work: join tokens, users, revoked nodes. Files first, then the registry that the
// transport asks; taking a right away is the other way round. Not thread-safe, blocks on files: the head's
// store thread owns it.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "net/zmq/join_tokens.h"
#include "net/zmq/key_registry.h"
#include "runtime/control/cluster_dir.h"
#include "runtime/core/values/messages.h"

namespace gtrain::head {

class Access {
 public:
  Access(const net::ClusterFiles& files, std::shared_ptr<net::KeyRegistry> registry,
         std::shared_ptr<const Clock> clock);
  // Reads both files; afterwards Refresh notices changes of `authorized` made by hand.
  absl::Status Load();
  absl::Status Refresh();

  // Returns the JSON of the answer. `endpoint` is the head's address in tokens, `by` the name of the client.
  absl::StatusOr<std::string> Answer(const core::ClientRequestBody& body, const std::string& endpoint,
                                     const std::string& by);
  struct Joiner {
    std::string token_id;
    core::AgentJoin join;
  };
  // Nodes' own keys, registered for good with join tokens: one answer each. Keys with another role keep it,
  // revoked ones stay out. A token that is used up is nobody's key from then on. Three writes of files,
  // however many they are.
  std::vector<absl::StatusOr<NodeId>> Join(absl::Span<const Joiner> joiners);

 private:
  absl::StatusOr<std::string> Do(const core::ClientJoinToken& request);
  absl::StatusOr<std::string> Do(const core::ClientTokens& request);
  absl::StatusOr<std::string> Do(const core::ClientRevokeToken& request);
  absl::StatusOr<std::string> Do(const core::ClientAddUser& request);
  absl::StatusOr<std::string> Do(const core::ClientUsers& request);
  absl::StatusOr<std::string> Do(const core::ClientRevokeUser& request);
  absl::StatusOr<std::string> Do(const core::ClientRevokeNode& request);
  template <typename Other>
  absl::StatusOr<std::string> Do(const Other&);
  absl::Status Revoke(const net::AllowedKey& key);
  absl::StatusOr<NodeId> MayJoin(const Joiner& joiner,
                                 const std::map<absl::string_view, const net::AllowedKey*>& known,
                                 const net::BootTime& now);
  void ShowTokens();  // to the registry

  const net::ClusterFiles files_;
  const std::shared_ptr<net::KeyRegistry> registry_;
  const std::shared_ptr<const Clock> clock_;
  net::JoinTokens tokens_;
  std::string endpoint_, by_;  // of the request being answered
};

}  // namespace gtrain::head
