#include "runtime/core/agent/exchanges.h"

#include <utility>

#include "base/probe.h"

namespace gtrain::core {
namespace {

constexpr size_t kTablesKept = 4;

}  // namespace

void Exchanges::Exchange(const JobId& job, AgentGeneration& generation, int number, const RankSaid& said,
                         uint64_t relay) {
  AgentRank& rank = generation.ranks[number];
  rank.sdk = true;
  rank.exchange_relays[said.sequence] = relay;
  const auto done = generation.tables.find(said.sequence);
  if (done != generation.tables.end()) {  // repeated: its table got lost with a connection
    GT_PROBE("agent.table_given_again");
    context_.Command(
        job, keeper::Relay{generation.generation.value, number, TableText(said.sequence, done->second)});
    context_.Command(job, keeper::AckRelay{generation.generation.value, number, relay});
    rank.exchange_relays.erase(said.sequence);
    return;
  }
  AgentExchange& exchange = generation.exchanges[said.sequence];
  exchange.blobs[number] = said.blob;
  if (exchange.blobs.size() < generation.Members()) return;
  if (static_cast<int>(exchange.blobs.size()) < generation.world_size) {
    return SendExchangePart(job, generation, said.sequence);
  }
  std::vector<std::string> blobs;  // every rank of the job is here: no need to ask the head
  for (auto& [member, blob] : exchange.blobs) blobs.push_back(std::move(blob));
  CompleteExchange(job, generation, said.sequence, blobs);
}

void Exchanges::SendExchangePart(const JobId& job, const AgentGeneration& generation, uint64_t sequence) {
  const auto it = generation.exchanges.find(sequence);
  if (it == generation.exchanges.end() || it->second.blobs.size() < generation.Members()) return;
  ExchangePart part{job, generation.generation, sequence, {}};
  part.blobs.assign(it->second.blobs.begin(), it->second.blobs.end());
  context_.Tell(std::move(part));
}

void Exchanges::SayWhoIsMissing(const JobId& job, const AgentGeneration& generation, int number,
                                uint64_t sequence) {
  const auto exchange = generation.exchanges.find(sequence);
  if (exchange == generation.exchanges.end()) return;  // the table is on its way
  std::vector<int> missing;
  for (const auto& [rank, info] : generation.ranks) {
    if (generation.IsMember(rank) && !exchange->second.blobs.contains(rank)) missing.push_back(rank);
  }
  GT_PROBE("agent.exchange_overdue");
  if (missing.empty()) return SendExchangePart(job, generation, sequence);
  context_.Command(job, keeper::Relay{generation.generation.value, number, MissingText(sequence, missing)});
}

// Tables first, acknowledgements after: a crash in between repeats a table rather than losing one.
void Exchanges::CompleteExchange(const JobId& job, AgentGeneration& generation, uint64_t sequence,
                                 const std::vector<std::string>& blobs) {
  const std::string table = TableText(sequence, blobs);
  const uint64_t number = generation.generation.value;
  for (const auto& [rank, info] : generation.ranks) context_.Command(job, keeper::Relay{number, rank, table});
  for (auto& [rank, info] : generation.ranks) {
    const auto relay = info.exchange_relays.find(sequence);
    if (relay == info.exchange_relays.end()) continue;
    context_.Command(job, keeper::AckRelay{number, rank, relay->second});
    info.exchange_relays.erase(relay);
  }
  generation.exchanges.erase(sequence);
  generation.tables[sequence] = blobs;
  while (generation.tables.size() > kTablesKept) generation.tables.erase(generation.tables.begin());
}

void Exchanges::OnTable(const ExchangeTable& table) {
  AgentGeneration* generation = model_.Find(table.job, table.generation);
  if (generation == nullptr || generation->gone || generation->exchanges.count(table.sequence) == 0) return;
  CompleteExchange(table.job, *generation, table.sequence, table.blobs);
}

void Exchanges::OnMissing(const ExchangeMissing& missing) {
  const AgentGeneration* generation = model_.Find(missing.job, missing.generation);
  if (generation == nullptr || generation->gone || generation->exchanges.count(missing.sequence) == 0) return;
  const std::string text = MissingText(missing.sequence, missing.ranks);
  for (const auto& [rank, info] : generation->ranks) {
    context_.Command(missing.job, keeper::Relay{missing.generation.value, rank, text});
  }
}

}  // namespace gtrain::core
