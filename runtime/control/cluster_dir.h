// The directory of one cluster on the head's machine: its identity, keys and where the head listens.
// Free functions; they block on files.
//
//   cluster          ClusterId
//   head.key         key pair of the head (0600)
//   admin.key        key pair of the first administrator, used by the command line (0600)
//   authorized       who may connect: "<role> <public key> <comment>" a line; read again when it changes
//   tokens.json      join tokens that can still be used
//   audit.jsonl      who changed what
//   store/           RocksDB; store.* beside it: runtime/store/rocks_store.h
//   tails/           of ranks' output, what the running head has no room for: runtime/head/tail_spill.h
//   new              empty; goes once the first head has made the store, which must be there from then on
//   last-backup      the directory of the newest backup, for messages
//   endpoint.json    of the running head, see Endpoint
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/ids.h"
#include "base/unique_fd.h"
#include "net/zmq/keys.h"

namespace gtrain::net {

// `$XDG_STATE_HOME/gtrain/<name>`, or under ~/.local/state. FailedPrecondition without either variable.
absl::StatusOr<std::string> DefaultClusterDir(const std::string& name);

struct ClusterFiles {
  std::string dir;
  ClusterId cluster;
  KeyPair head;
  std::string authorized_path() const { return dir + "/authorized"; }
  std::string admin_key_path() const { return dir + "/admin.key"; }
  std::string tokens_path() const { return dir + "/tokens.json"; }
  std::string store_path() const { return dir + "/store"; }
  std::string last_backup_path() const { return dir + "/last-backup"; }
  std::string new_path() const { return dir + "/new"; }
  std::string endpoint_path() const { return dir + "/endpoint.json"; }
};

// Makes what is missing and keeps what is there, so repeating it is harmless. Directory mode 0700.
absl::StatusOr<ClusterFiles> InitCluster(const std::string& dir);
// NotFound says to run `gtrain head --init`.
absl::StatusOr<ClusterFiles> LoadCluster(const std::string& dir);

// Where a process is. A loopback address means the same in one network namespace of one boot only.
struct Place {
  std::string host;  // for people
  std::string boot_id;
  std::string network;    // the network namespace
  std::string processes;  // the pid namespace; empty: written by the version before
};
Place ThisPlace();

// Written once the head serves, and only by the one that holds the lock of the store. Removed when it ends in
// order. Locked (base/file_lock.h) while it lives: a file that is there and not locked is of a head that
// died.
struct Endpoint {
  std::string endpoint;                // first listen address, "127.0.0.1:43211"
  std::vector<std::string> endpoints;  // all
  std::string head_public_key;
  ClusterId cluster;
  int64_t pid = 0;  // for people: it means nothing in another pid namespace, and may be another process's now
  Place place;      // empty: written by the version before
  bool IsHere() const;
  // Here, and its keepers and ranks are processes that this one could see. A container may share the network.
  bool SeesItsProcesses() const;
};
// The head lives, as far as others see, until the descriptor is closed.
absl::StatusOr<UniqueFd> WriteEndpoint(const std::string& path, const Endpoint& endpoint);
absl::StatusOr<Endpoint> ReadEndpoint(const std::string& path);

}  // namespace gtrain::net
