#include "runtime/agent/membership.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/json_depth.h"
#include "net/zmq/client.h"

namespace gtrain::agent {
namespace {

constexpr size_t kAddressesMax = 16;
constexpr size_t kFileBytesMax = 64 << 10;

bool Has(const std::vector<std::string>& list, const std::string& one) {
  return std::find(list.begin(), list.end(), one) != list.end();
}

}  // namespace

void Membership::Prefer(const std::string& first) {
  std::erase(others, first);
  if (!endpoint.empty() && endpoint != first) others.insert(others.begin(), endpoint);
  if (others.size() > kAddressesMax - 1) others.resize(kAddressesMax - 1);
  endpoint = first;
}

std::vector<std::string> Membership::Addresses() const {
  std::vector<std::string> all;
  if (!endpoint.empty()) all.push_back(endpoint);
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

std::vector<std::string> Membership::After(absl::string_view here) const {
  std::vector<std::string> all = Addresses();
  const auto at = std::find(all.begin(), all.end(), here);
  if (at == all.end()) return all;
  std::rotate(all.begin(), at + 1, all.end());
  all.pop_back();
  return all;
}

std::string Membership::Warning(absl::string_view path) const {
  if (bad.empty()) return "";
  return absl::StrCat(path, " names what is no address of a head, which is HOST:PORT, and is passed over: ",
                      absl::StrJoin(bad, ", ", [](std::string* out, const std::string& one) {
                        absl::StrAppend(out, "\"", absl::CHexEscape(one.substr(0, 100)), "\"");
                      }));
}

std::string MembershipPath(const std::string& state_dir) { return state_dir + "/cluster.json"; }

Membership LoadMembership(const std::string& state_dir) {
  Membership membership;
  const auto text = ReadFile(MembershipPath(state_dir), kFileBytesMax);
  if (!text.ok()) return membership;
  const auto json = nlohmann::json::parse(ShallowJson(*text), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return membership;
  const auto word = [&json](const char* key) {
    const auto it = json.find(key);
    return it != json.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  membership.head_public_key = word("head_public_key");
  membership.cluster = ClusterId(word("cluster"));
  std::vector<std::string> all;
  if (const std::string first = word("endpoint"); !first.empty()) all.push_back(first);
  if (const auto more = json.find("endpoints"); more != json.end() && more->is_array()) {
    for (const auto& one : *more) {
      if (one.is_string()) all.push_back(one.get<std::string>());
    }
  }
  for (const std::string& one : all) {
    if (!net::ValidServerAddress(one)) {
      if (!Has(membership.bad, one) && membership.bad.size() < kAddressesMax) membership.bad.push_back(one);
    } else if (membership.endpoint.empty()) {
      membership.endpoint = one;
    } else if (one != membership.endpoint && !Has(membership.others, one) &&
               membership.others.size() < kAddressesMax - 1) {
      membership.others.push_back(one);
    }
  }
  return membership;
}

absl::Status SaveMembership(const std::string& state_dir, const Membership& membership) {
  std::vector<std::string> all = membership.Addresses();
  all.insert(all.end(), membership.bad.begin(), membership.bad.end());
  const nlohmann::json json = {{"endpoint", membership.endpoint},
                               {"endpoints", all},
                               {"head_public_key", membership.head_public_key},
                               {"cluster", membership.cluster.value}};
  return WriteFileDurable(MembershipPath(state_dir),
                          json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

absl::Status CheckHeadAddress(absl::string_view flag, const std::string& address) {
  if (net::ValidServerAddress(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, " \"", absl::CHexEscape(address), "\" is not HOST:PORT, as in 10.0.0.2:7070 or [fd00::2]:7070"));
}

}  // namespace gtrain::agent
