#include "net/zmq/job_net.h"

#include <utility>

#include "base/status_macros.h"
#include "net/zmq/client.h"
#include "net/zmq/keys.h"
#include "net/zmq/server.h"

namespace gtrain::net {
namespace {

constexpr int kConnectionsMax = 16'384;

absl::StatusOr<std::unique_ptr<port::ServerTransport>> Serve(const std::string& listen,
                                                             const port::NetOptions& options,
                                                             std::string* endpoint) {
  GT_ASSIGN_OR_RETURN(const KeyPair keys, KeyPairOfHex(options.secret));
  auto registry = std::make_shared<KeyRegistry>();
  registry->Replace({{.role = Role::kUser, .public_key = keys.public_key, .comment = "job"}});
  GT_ASSIGN_OR_RETURN(auto server, ZmqServer::Start({.listen = {listen},
                                                     .keys = keys,
                                                     .registry = std::move(registry),
                                                     .clock = std::make_shared<RealClock>(),
                                                     .message_bytes_max = options.message_bytes_max,
                                                     .send_bytes_max = options.message_bytes_max,
                                                     .queue_messages_max = options.queue_messages_max,
                                                     .connections_per_address_max = kConnectionsMax}));
  *endpoint = server->endpoints()[0];
  return server;
}

absl::StatusOr<std::unique_ptr<port::ClientTransport>> Connect(const std::string& endpoint,
                                                               const port::NetOptions& options) {
  static const std::shared_ptr<void> context = MakeClientContext(kConnectionsMax);
  GT_ASSIGN_OR_RETURN(const KeyPair keys, KeyPairOfHex(options.secret));
  GT_ASSIGN_OR_RETURN(auto client, ZmqClient::Connect({.endpoint = endpoint,
                                                       .server_public_key = keys.public_key,
                                                       .keys = keys,
                                                       .message_bytes_max = options.message_bytes_max,
                                                       .send_bytes_max = options.message_bytes_max,
                                                       .queue_messages_max = options.queue_messages_max,
                                                       .context = context}));
  return client;
}

}  // namespace

const port::NetModule& JobNet() {
  static const port::NetModule module = {port::kNetModuleAbi, &Serve, &Connect};
  return module;
}

}  // namespace gtrain::net
