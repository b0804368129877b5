#include "launcher/bench/probe.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"

namespace gtrain {
namespace {

using topology::GroupLevel;
using topology::Pair;
using topology::PairSpeed;

constexpr int kTurns = 2;  // of each pair, with others beside it; the mean counts
constexpr int kPings = 20;
constexpr double kSeconds = 0.1, kCalibratedSeconds = 0.004;
constexpr uint64_t kBytesMin = 16 << 10, kBytesMax = 4 << 20;
constexpr uint64_t kExchangesMin = 4, kExchangesMax = 64;  // so a pair moves 256 MiB at most
constexpr int kDataTag = 0, kWordTag = 1;
constexpr absl::Duration kGatherTimeout = absl::Minutes(2);

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Numbers compare as numbers: n9 comes before n10.
std::string NaturalKey(absl::string_view name) {
  std::string key;
  for (size_t i = 0; i < name.size();) {
    size_t end = i;
    while (end < name.size() && absl::ascii_isdigit(name[end])) ++end;
    if (end - i > 0 && end - i < 20) key.append(20 - (end - i), '0');
    end = std::max(end, i + 1);
    absl::StrAppend(&key, name.substr(i, end - i));
    i = end;
  }
  return key;
}

class Prober {
 public:
  Prober(Communicator& comm, std::vector<int> rank_of) : comm_(comm), rank_of_(std::move(rank_of)) {
    self_ = static_cast<int>(std::ranges::find(rank_of_, comm.rank()) - rank_of_.begin());
    memory_.resize(2 * kBytesMax);
  }

  int machines() const { return static_cast<int>(rank_of_.size()); }

  // The pairs of all rounds, on every rank. Beyond kAllPairsMax machines a pair may be there more than once.
  absl::StatusOr<std::vector<PairSpeed>> MeasurePairs() {
    std::map<std::pair<int, int>, std::vector<PairSpeed>> own;
    for (int turn = 0; turn < kTurns; ++turn) {
      for (const std::vector<Pair>& round : topology::ProbeRounds(machines(), turn)) {
        const Place place = PlaceIn(round);
        GT_RETURN_IF_ERROR(comm_.Barrier());
        double us = 0;
        if (place.partner >= 0) {
          GT_ASSIGN_OR_RETURN(us, Latency(place));
        }
        GT_ASSIGN_OR_RETURN(const Moved moved, Exchange(place));
        if (!place.begins) continue;
        own[{place.pair.a, place.pair.b}].push_back(
            {place.pair.a, place.pair.b, moved.bytes / moved.seconds * 1e-9, us});
      }
    }
    std::vector<PairSpeed> means;
    for (const auto& [ends, speeds] : own) means.push_back(MeanOf(speeds));
    return Gathered(means);
  }

  // GB/s in one direction over these pairs together, on every rank. While any of them moves data it fills
  // what they share, so all that was moved counts, and the time of the one that took longest.
  absl::StatusOr<double> MeasureTogether(const std::vector<Pair>& pairs) {
    const Place place = PlaceIn(pairs);
    double best = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      GT_ASSIGN_OR_RETURN(Moved moved, Exchange(place));
      if (!place.begins) moved = {};
      GT_RETURN_IF_ERROR(comm_.AllReduce(&moved.bytes, 1, DType::kFloat64, ReduceOp::kSum));
      GT_RETURN_IF_ERROR(comm_.AllReduce(&moved.seconds, 1, DType::kFloat64, ReduceOp::kMax));
      if (moved.seconds > 0) best = std::max(best, moved.bytes / moved.seconds * 1e-9);
    }
    return best;
  }

 private:
  // What this machine does in a round.
  struct Place {
    Pair pair;
    int partner = -1;  // rank; -1: none
    bool begins = false;
  };
  struct Moved {
    double bytes = 0, seconds = 0;  // in one direction
  };
  // What the two of a pair exchange next.
  struct Next {
    uint64_t bytes = kBytesMin, count = 1, is_last = 0;
  };

  // The geometric mean of the speeds, and the lowest latency.
  static PairSpeed MeanOf(const std::vector<PairSpeed>& speeds) {
    PairSpeed mean = speeds.front();
    double log = 0;
    for (const PairSpeed& speed : speeds) {
      log += std::log(speed.gb_s);
      mean.us = std::min(mean.us, speed.us);
    }
    mean.gb_s = std::exp(log / static_cast<double>(speeds.size()));
    return mean;
  }

  Place PlaceIn(const std::vector<Pair>& round) const {
    for (const Pair& pair : round) {
      if (pair.a == self_) return {pair, rank_of_[pair.b], true};
      if (pair.b == self_) return {pair, rank_of_[pair.a], false};
    }
    return {};
  }

  // Microseconds one way, of the fastest of kPings on the side that begins.
  absl::StatusOr<double> Latency(const Place& place) {
    uint64_t word = 0;
    double best = 1e9;
    for (int i = 0; i < kPings; ++i) {
      const double start = Now();
      if (place.begins)
        GT_RETURN_IF_ERROR(comm_.Send(&word, sizeof(word), DType::kUint8, place.partner, kWordTag));
      GT_RETURN_IF_ERROR(comm_.Receive(&word, sizeof(word), DType::kUint8, place.partner, kWordTag));
      best = std::min(best, (Now() - start) * 1e6 / 2);
      if (!place.begins)
        GT_RETURN_IF_ERROR(comm_.Send(&word, sizeof(word), DType::kUint8, place.partner, kWordTag));
    }
    return best;
  }

  // All ranks call it. The pairs find out how much takes long enough, and all of them begin at the same time.
  absl::StatusOr<Moved> Exchange(const Place& place) {
    GT_RETURN_IF_ERROR(comm_.Barrier());
    Next next;
    while (place.partner >= 0) {
      if (place.begins)
        GT_RETURN_IF_ERROR(comm_.Send(&next, sizeof(next), DType::kUint8, place.partner, kWordTag));
      else
        GT_RETURN_IF_ERROR(comm_.Receive(&next, sizeof(next), DType::kUint8, place.partner, kWordTag));
      if (next.is_last != 0) break;
      GT_ASSIGN_OR_RETURN(const double seconds, Swap(place.partner, next));
      if (seconds < kCalibratedSeconds && next.bytes < kBytesMax) {
        next.bytes *= 4;
      } else {
        next.count =
            std::clamp<uint64_t>(static_cast<uint64_t>(kSeconds / seconds), kExchangesMin, kExchangesMax);
        next.is_last = 1;
      }
    }
    GT_RETURN_IF_ERROR(comm_.Barrier());
    if (place.partner < 0) return Moved();
    GT_ASSIGN_OR_RETURN(const double seconds, Swap(place.partner, next));
    return Moved{static_cast<double>(next.bytes * next.count), seconds};
  }

  // Both directions at once; the seconds that it takes.
  absl::StatusOr<double> Swap(int partner, const Next& next) {
    const double start = Now();
    for (uint64_t i = 0; i < next.count; ++i) {
      const std::array<Message, 2> both = {
          Message{Message::Kind::kReceive, memory_.data() + kBytesMax, next.bytes, DType::kUint8, partner,
                  kDataTag},
          Message{Message::Kind::kSend, memory_.data(), next.bytes, DType::kUint8, partner, kDataTag}};
      GT_ASSIGN_OR_RETURN(const auto pending, comm_.Start(both));
      GT_RETURN_IF_ERROR(*pending->Wait(absl::InfiniteDuration()));
    }
    return Now() - start;
  }

  absl::StatusOr<std::vector<PairSpeed>> Gathered(const std::vector<PairSpeed>& own) {
    const uint64_t count = own.size();
    std::vector<uint64_t> counts(static_cast<size_t>(comm_.size()));
    GT_RETURN_IF_ERROR(comm_.AllGather(&count, counts.data(), sizeof(count), DType::kUint8));
    std::vector<PairSpeed> all(std::accumulate(counts.begin(), counts.end(), uint64_t{0}));
    std::vector<size_t> bytes;
    for (const uint64_t of : counts) bytes.push_back(of * sizeof(PairSpeed));
    GT_RETURN_IF_ERROR(comm_.AllGatherV(own.data(), all.data(), bytes, DType::kUint8));
    return all;
  }

  Communicator& comm_;
  const std::vector<int> rank_of_;  // [machine]
  int self_ = 0;                    // this machine
  std::vector<char> memory_;
};

// Ranks in the order of the names of their machines, which is that of racks where people name them so.
absl::StatusOr<std::vector<int>> RanksByName(Communicator& comm) {
  std::array<char, 256> own{};
  (void)gethostname(own.data(), own.size() - 1);
  std::vector<std::array<char, 256>> names(static_cast<size_t>(comm.size()));
  GT_RETURN_IF_ERROR(comm.AllGather(own.data(), names.data(), sizeof(own), DType::kUint8));
  std::vector<int> ranks(names.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::ranges::stable_sort(ranks, {}, [&](int rank) { return NaturalKey(names[rank].data()); });
  return ranks;
}

void Print(const topology::Measured& measured) {
  for (size_t m = 0; m < measured.machines.size(); ++m) {
    std::string line = absl::StrCat("machine ", m, " ", measured.machines[m]);
    for (const GroupLevel& level : measured.levels) absl::StrAppend(&line, " ", level.group_of[m]);
    std::printf("%s\n", line.c_str());
  }
  for (const PairSpeed& pair : measured.pairs)
    std::printf("pair %d %d %.6g %.6g\n", pair.a, pair.b, pair.gb_s, pair.us);
  for (size_t l = 0; l < measured.levels.size(); ++l) {
    for (size_t g = 0; g < measured.levels[l].gb_s.size(); ++g)
      std::printf("group %zu %zu %.6g\n", l, g, measured.levels[l].gb_s[g]);
  }
}

}  // namespace

absl::StatusOr<topology::Measured> Probe(Communicator& comm, std::vector<int> rank_of,
                                         std::vector<std::string> names) {
  topology::Measured out{.machines = std::move(names)};
  Prober prober(comm, std::move(rank_of));
  GT_ASSIGN_OR_RETURN(out.pairs, prober.MeasurePairs());
  out.levels = topology::FindGroups(prober.machines(), out.pairs);
  for (size_t level = 0; level < out.levels.size(); ++level) {
    for (int group = 0; group < out.levels[level].groups(); ++group) {
      GT_ASSIGN_OR_RETURN(const double gb_s,
                          prober.MeasureTogether(topology::PairsAcross(out.levels, level, group)));
      out.levels[level].gb_s.push_back(gb_s);
    }
  }
  return out;
}

absl::Status PrintProbe(Session& session) {
  GT_ASSIGN_OR_RETURN(const Session::Reach reach, session.reach());
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> nodes, session.AllGather(reach.node, kGatherTimeout));
  GT_ASSIGN_OR_RETURN(const auto comm, session.MakeCommunicator());
  GT_ASSIGN_OR_RETURN(const std::vector<int> rank_of, RanksByName(*comm));
  std::vector<std::string> names;
  for (const int rank : rank_of) names.push_back(nodes[rank]);
  GT_ASSIGN_OR_RETURN(const topology::Measured measured, Probe(*comm, rank_of, std::move(names)));
  if (comm->rank() == 0) Print(measured);
  return absl::OkStatus();
}

}  // namespace gtrain
