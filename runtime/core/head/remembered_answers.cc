#include "runtime/core/head/remembered_answers.h"

#include <algorithm>
#include <utility>

namespace gtrain::core {

RememberedAnswers::RememberedAnswers(HeadContext& context, HeadModel& model)
    : context_(context), model_(model), config_(context.config()) {}

void RememberedAnswers::Load(RequestRecord record) {
  const std::string key = KeyOf(record);
  request_order_[record.number] = key;
  requests_of_key_[record.client_key].insert(record.number);
  requests_[key] = std::move(record);
}

const ClientReply* RememberedAnswers::Find(const std::string& client_key, const std::string& id) const {
  const auto it = requests_.find(KeyOf(RequestRecord{client_key, id}));
  return it == requests_.end() ? nullptr : &it->second.reply;
}

void RememberedAnswers::Remember(const Peer& peer, const ClientReply& reply) {
  RequestRecord record{peer.key_id, reply.id, model_.cluster.next_request++, reply};
  const std::string key = KeyOf(record);
  if (requests_.contains(key)) ForgetRequest(requests_.at(key).number);  // of a job that is taken up again
  request_order_[record.number] = key;
  std::set<uint64_t>& own = requests_of_key_[peer.key_id];
  own.insert(record.number);
  context_.Write(record);
  context_.Write(model_.cluster);
  requests_[key] = std::move(record);
  if (static_cast<int>(own.size()) > config_.requests_per_key_max) ForgetRequest(*own.begin());
  if (static_cast<int>(requests_.size()) <= config_.requests_max) return;
  // The oldest answer of the client with most of them goes: requests of one client never take the answers of
  // others.
  const auto most = std::max_element(
      requests_of_key_.begin(), requests_of_key_.end(),
      [](const auto& one, const auto& other) { return one.second.size() < other.second.size(); });
  ForgetRequest(*most->second.begin());
}

void RememberedAnswers::ForgetRequest(uint64_t number) {
  const std::string key = request_order_.at(number);
  context_.Delete(key);
  const std::string client = requests_.at(key).client_key;
  requests_.erase(key);
  request_order_.erase(number);
  requests_of_key_[client].erase(number);
  if (requests_of_key_[client].empty()) requests_of_key_.erase(client);
}

}  // namespace gtrain::core
