#include "checkpoint/engine/replicas.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/shares.h"

namespace gtrain::ckpt {
namespace {

constexpr size_t kThreadsMax = 4;
constexpr uint64_t kPartBytes = 16 << 20;  // of a tensor, hashed by one thread
constexpr size_t kTogetherMax = 1 << 20;   // numbers of all ranks in one message
constexpr size_t kTensorsNamed = 4, kRanksNamed = 8;

int64_t Number(const HashBytes& hash) {
  uint64_t number = 0;
  for (size_t i = 0; i < sizeof(number); ++i) number = number << 8 | hash[i];
  return static_cast<int64_t>(number);
}

// Hashes the memory of each tensor on this rank; a large one is hashed in parts.
std::vector<HashBytes> HashAll(const std::vector<Registered>& registered, const std::vector<void*>& data) {
  struct Part {
    size_t tensor;
    uint64_t begin, bytes;
    HashBytes hash{};
  };
  std::vector<Part> parts;
  for (size_t t = 0; t < registered.size(); ++t) {
    if (registered[t].tensor.layout == Layout::kPerRank) continue;
    for (uint64_t at = 0; at < registered[t].bytes; at += kPartBytes)
      parts.push_back({t, at, std::min(kPartBytes, registered[t].bytes - at)});
  }
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < parts.size(); i = next++)
      parts[i].hash =
          Xxh3Bytes({static_cast<const char*>(data[parts[i].tensor]) + parts[i].begin, parts[i].bytes});
  };
  const size_t threads = std::min<size_t>({kThreadsMax, std::thread::hardware_concurrency(), parts.size()});
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  std::vector<HashBytes> out(registered.size());
  for (const Part& part : parts) {
    const absl::string_view both[] = {
        {reinterpret_cast<const char*>(out[part.tensor].data()), sizeof(HashBytes)},
        {reinterpret_cast<const char*>(part.hash.data()), sizeof(HashBytes)}};
    Xxh3 hash;
    for (absl::string_view text : both) hash.Add(text);
    out[part.tensor] = hash.Bytes();
  }
  return out;
}

// Ranks whose number differs from that of the first replica of their box; `value(rank)`.
template <typename Value>
std::vector<int> Different(const sharding::Partition& partition, int world, Value value) {
  std::map<int64_t, int> first;  // of each cell
  std::vector<int> out;
  for (int rank = 0; rank < world; ++rank) {
    if (!partition.Holds(rank)) continue;
    const auto [it, added] = first.emplace(partition.CellOf(rank), rank);
    if (!added && value(rank) != value(it->second)) out.push_back(rank);
  }
  return out;
}

// Tensors that lie on the ranks in the same way, by how they lie.
using Groups = std::map<std::string, std::vector<size_t>>;

// The members of the groups in which replicas differ. Collective.
absl::StatusOr<std::vector<size_t>> FindSuspects(Agreement* agree, const Shares& shares, const Groups& alike,
                                                 const std::vector<HashBytes>& hashes) {
  std::vector<int64_t> mine;
  for (const auto& [key, members] : alike) {
    Xxh3 hash;
    for (size_t t : members) hash.Add({reinterpret_cast<const char*>(hashes[t].data()), sizeof(HashBytes)});
    mine.push_back(Number(hash.Bytes()));
  }
  GT_ASSIGN_OR_RETURN(const std::vector<int64_t> all, agree->GatherAll(mine));
  std::vector<size_t> suspects;
  size_t kind = 0;
  for (const auto& [key, members] : alike) {
    const auto value = [&](int rank) { return all[static_cast<size_t>(rank) * mine.size() + kind]; };
    if (!Different(shares.partition(members[0]), agree->size(), value).empty())
      suspects.insert(suspects.end(), members.begin(), members.end());
    ++kind;
  }
  return suspects;
}

// Finds which of the suspects differ, and names them and their ranks for people. Collective.
absl::StatusOr<std::string> NameDifferent(Agreement* agree, const Shares& shares,
                                          const std::vector<GlobalTensor>& tensors,
                                          const std::vector<size_t>& suspects,
                                          const std::vector<HashBytes>& hashes) {
  std::vector<std::string> named;
  size_t different = 0;
  const size_t together = std::max<size_t>(1, kTogetherMax / static_cast<size_t>(agree->size()));
  for (size_t from = 0; from < suspects.size(); from += together) {
    const size_t count = std::min(together, suspects.size() - from);
    std::vector<int64_t> some;
    for (size_t i = 0; i < count; ++i) some.push_back(Number(hashes[suspects[from + i]]));
    GT_ASSIGN_OR_RETURN(const std::vector<int64_t> theirs, agree->GatherAll(some));
    for (size_t i = 0; i < count; ++i) {
      const size_t t = suspects[from + i];
      const auto value = [&](int rank) { return theirs[static_cast<size_t>(rank) * count + i]; };
      std::vector<int> ranks = Different(shares.partition(t), agree->size(), value);
      if (ranks.empty() || ++different > kTensorsNamed) continue;
      const size_t more = ranks.size() - std::min(ranks.size(), kRanksNamed);
      ranks.resize(std::min(ranks.size(), kRanksNamed));
      named.push_back(absl::StrCat("\"", tensors[t].name, "\" on rank ", absl::StrJoin(ranks, ", "),
                                   more > 0 ? absl::StrCat(" and ", more, " more") : ""));
    }
  }
  return absl::StrCat(
      absl::StrJoin(named, "; "),
      different > named.size() ? absl::StrCat("; and ", different - named.size(), " more tensors") : "");
}

}  // namespace

absl::Status CompareReplicas(Agreement* agree, const std::vector<Registered>& registered,
                             const std::vector<void*>& data, int64_t step) {
  const RealClock clock;
  const Instant begin = clock.Now();
  std::vector<GlobalTensor> tensors;
  for (const Registered& r : registered) tensors.push_back(r.tensor);
  GT_ASSIGN_OR_RETURN(const Shares shares, Shares::Make(tensors, agree->size()));
  Groups alike;
  uint64_t bytes = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].layout == Layout::kPerRank) continue;
    alike[shares.partition(t).Key()].push_back(t);
    bytes += registered[t].bytes;
  }
  const std::vector<HashBytes> hashes = HashAll(registered, data);
  GT_ASSIGN_OR_RETURN(const std::vector<size_t> suspects, FindSuspects(agree, shares, alike, hashes));
  if (suspects.empty()) {
    if (agree->rank() == 0) {
      LogInfo("checkpoint: step ", step, ": replicas are equal: ", PrintBytes(bytes),
              " of this rank compared in ", absl::ToInt64Milliseconds(clock.Now() - begin),
              " ms (checkpoint.verify_replicas)");
    }
    return absl::OkStatus();
  }
  GT_ASSIGN_OR_RETURN(const std::string named, NameDifferent(agree, shares, tensors, suspects, hashes));
  return absl::FailedPreconditionError(absl::StrCat(
      "step ", step,
      " is not saved: ranks hold different values of state that is registered as equal: ", named,
      ". Give all ranks the same values (broadcast them after they are made), register what differs as "
      "per-rank "
      "state, or set checkpoint.verify_replicas: off"));
}

}  // namespace gtrain::ckpt
