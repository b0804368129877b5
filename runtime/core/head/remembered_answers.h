// RememberedAnswers keeps the answers to requests that changed something, so that a client that lost one and
// asks again gets the same (fault H15). PURE. Private to runtime/core/head.
//
// HeadState owns it; only the loop's thread uses it, and it never blocks. The answers are stored, and their
// number is bounded in all and for each client.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "runtime/core/head/head_context.h"
#include "runtime/core/head/head_model.h"

namespace gtrain::core {

class RememberedAnswers {
 public:
  RememberedAnswers(HeadContext& context, HeadModel& model);

  void Load(RequestRecord record);
  void Remember(const Peer& peer, const ClientReply& reply);
  // The answer to this client's request; nullptr: it is not remembered.
  const ClientReply* Find(const std::string& client_key, const std::string& id) const;

 private:
  void ForgetRequest(uint64_t number);

  HeadContext& context_;
  HeadModel& model_;
  const HeadConfig& config_;

  std::map<std::string, RequestRecord> requests_;  // by KeyOf
  std::map<uint64_t, std::string> request_order_;
  std::map<std::string, std::set<uint64_t>> requests_of_key_;  // numbers of each client's
};

}  // namespace gtrain::core
