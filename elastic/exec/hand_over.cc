#include "elastic/exec/hand_over.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"

namespace gtrain::elastic {
namespace {

constexpr int kHandOverTag = 3;  // those of step copies are below

size_t IndexOf(const std::vector<int>& ranks, int rank) {
  return static_cast<size_t>(std::ranges::find(ranks, rank) - ranks.begin());
}

// Both ends leave out a stream of no pieces.
void AddStream(const PartHandOver& hand_over, size_t source, size_t taker,
               absl::Span<const absl::Span<char>> pieces, StateStream stream,
               std::vector<StateStream>* streams) {
  for (const size_t piece : PiecesBetween(hand_over, source, taker, pieces.size()))
    stream.pieces.push_back(pieces[piece]);
  if (!stream.pieces.empty()) streams->push_back(std::move(stream));
}

}  // namespace

std::vector<StateStream> GiveStreams(const PartHandOver& hand_over, int rank,
                                     absl::Span<const absl::Span<char>> pieces) {
  std::vector<StateStream> streams;
  const size_t me = IndexOf(hand_over.sources, rank);
  for (size_t taker = 0; taker < hand_over.takers.size(); ++taker) {
    AddStream(hand_over, me, taker, pieces, {Message::Kind::kSend, hand_over.takers[taker], kHandOverTag, {}},
              &streams);
  }
  return streams;
}

absl::Status TakePieces(const PartHandOver& hand_over, int rank, absl::Span<const absl::Span<char>> pieces,
                        Communicator& comm, Communicator* among) {
  std::vector<StateStream> streams;
  const size_t me = IndexOf(hand_over.takers, rank), takers = hand_over.takers.size();
  for (size_t source = 0; source < hand_over.sources.size(); ++source) {
    AddStream(hand_over, source, me, pieces,
              {Message::Kind::kReceive, hand_over.sources[source], kHandOverTag, {}}, &streams);
  }
  GT_RETURN_IF_ERROR(RunStreams(comm, streams));
  if (takers == 1) return absl::OkStatus();
  for (size_t piece = 0; piece < pieces.size(); ++piece) {
    GT_RETURN_IF_ERROR(among->Broadcast(pieces[piece].data(), pieces[piece].size(), DType::kUint8,
                                        static_cast<int>(piece % takers)));
  }
  return absl::OkStatus();
}

}  // namespace gtrain::elastic
