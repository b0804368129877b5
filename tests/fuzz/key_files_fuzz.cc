// Fuzzes the texts that let a peer into a cluster (faults X2, X3): join tokens, the list of allowed keys,
// endpoints.
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "net/zmq/ingress.h"
#include "net/zmq/key_registry.h"
#include "net/zmq/keys.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {

GT_FUZZ_RUN(key_files) {
  if (const auto token = net::ParseJoinToken(bytes); token.ok()) {
    const auto back = net::ParseJoinToken(net::PrintJoinToken(*token));
    GT_CHECK(back.ok() && back->endpoint == token->endpoint && back->secret_key == token->secret_key &&
             back->head_public_key == token->head_public_key);
  }
  if (net::ValidKey(bytes)) GT_CHECK(net::KeyId(bytes).size() == 16);
  (void)net::KeyPairOfSecret(bytes);
  const auto keys = net::ParseAllowedKeys(bytes);
  if (!keys.ok()) return;
  net::KeyRegistry registry;
  registry.Replace(*keys);
  for (const net::AllowedKey& key : *keys) {
    GT_CHECK(registry.RoleOfKey(key.public_key, Instant{0}).has_value());
    GT_CHECK(key.role != net::Role::kJoin);  // join keys never come from the file
  }
  net::Drop drop;
  GT_CHECK(!net::Admit({{"r", "p"}, 2, "role/0123", ""}, registry, Instant{0}, &drop));
}

GT_FUZZ_SEEDS(key_files) {
  const std::string key(40, 'a');
  return {net::PrintJoinToken({"10.0.0.1:43211", key, key}),
          net::PrintJoinToken({"[fe80::1]:43211", key, key}),
          absl::StrCat("# who may connect\nadmin ", key, " me\nnode ", key, "\nuser ", key,
                       " a b c\nreadonly ", key, "\n"),
          key};
}

}  // namespace gtrain::fuzz
