#include "runtime/agent/relay_way.h"

#include <unistd.h>

#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "net/zmq/client.h"
#include "net/zmq/server.h"
#include "runtime/keeper/posix.h"
#include "runtime/wire/codec.h"

namespace gtrain::agent {
namespace {

constexpr absl::Duration kStillThere = absl::Minutes(1);

std::string PortPath(const std::string& state_dir) { return state_dir + "/relay-port"; }
std::string ViaPath(const std::string& state_dir) { return state_dir + "/via"; }

absl::StatusOr<std::unique_ptr<net::ZmqServer>> Listen(const std::string& host, int port,
                                                       const net::KeyPair& keys,
                                                       std::shared_ptr<net::KeyRegistry> registry) {
  return net::ZmqServer::Start({.listen = {absl::StrCat(host, ":", port)},
                                .keys = keys,
                                .registry = std::move(registry),
                                .clock = std::make_shared<RealClock>()});
}

}  // namespace

bool RelayDoor::WasOpen(const std::string& state_dir) {
  return access(PortPath(state_dir).c_str(), F_OK) == 0;
}

absl::StatusOr<std::unique_ptr<RelayDoor>> RelayDoor::Open(const std::string& state_dir,
                                                           const std::string& host,
                                                           const net::KeyPair& keys) {
  int before = 0;
  if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(keeper::ReadSmallFile(PortPath(state_dir))), &before))
    before = 0;
  auto registry = std::make_shared<net::KeyRegistry>();
  auto server = Listen(host, before, keys, registry);
  if (!server.ok() && before != 0) server = Listen(host, 0, keys, registry);
  GT_RETURN_IF_ERROR(server.status());
  const std::string& endpoint = (*server)->endpoints()[0];
  int port = 0;
  if (!absl::SimpleAtoi(endpoint.substr(endpoint.rfind(':') + 1), &port))
    return absl::InternalError(absl::StrCat("listens at ", endpoint));
  keeper::WriteFileAtomic(PortPath(state_dir), absl::StrCat(port, "\n"));
  return std::unique_ptr<RelayDoor>(
      new RelayDoor(std::move(registry), std::make_unique<Relay>(*std::move(server)), port));
}

// The head that says who may come may have started anew and know few of those that are here.
void RelayDoor::Admit(const std::vector<core::RelayChild>& children, Instant now) {
  std::map<NodeId, std::string> admitted;
  for (const core::RelayChild& child : children) {
    if (net::ValidKey(child.public_key) && net::KeyId(child.public_key) == child.node.value)
      admitted[child.node] = child.public_key;
  }
  for (const NodeId& node : relay_->Children(now - kStillThere)) {
    if (const auto it = admitted_.find(node); it != admitted_.end()) admitted.insert(*it);
  }
  admitted_ = std::move(admitted);
  std::set<NodeId> keep;
  for (const auto& [node, key] : admitted_) keep.insert(node);
  relay_->Forget(now - kStillThere, keep);
  std::vector<net::AllowedKey> keys;
  for (const auto& [node, key] : admitted_) keys.push_back({net::Role::kNode, key, node.value});
  keys_->Replace(keys);
}

std::optional<core::ConnectVia> LoadVia(const std::string& state_dir) {
  const std::vector<std::string> words = absl::StrSplit(keeper::ReadSmallFile(ViaPath(state_dir)), '\n');
  if (words.size() < 3 || !wire::ValidId(words[0])) return std::nullopt;
  return core::ConnectVia{{}, NodeId(words[0]), words[1], words[2]};
}

void SaveVia(const std::string& state_dir, const std::optional<core::ConnectVia>& via) {
  if (!via) return (void)unlink(ViaPath(state_dir).c_str());
  keeper::WriteFileAtomic(ViaPath(state_dir),
                          absl::StrCat(via->relay.value, "\n", via->endpoint, "\n", via->public_key, "\n"));
}

absl::StatusOr<std::unique_ptr<RelayedClient>> ConnectThrough(const core::ConnectVia& via, const NodeId& self,
                                                              const net::KeyPair& keys,
                                                              const std::string& head_public_key,
                                                              double jitter) {
  GT_ASSIGN_OR_RETURN(std::string secret, net::PairSecret(keys, head_public_key));
  net::ClientOptions options;
  options.endpoint = via.endpoint;
  options.server_public_key = via.public_key;
  options.keys = keys;
  GT_ASSIGN_OR_RETURN(auto link, net::ZmqClient::Connect(options));
  return std::make_unique<RelayedClient>(std::move(link), self, std::move(secret),
                                         std::make_shared<RealClock>(), jitter);
}

}  // namespace gtrain::agent
