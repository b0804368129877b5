// Large messages are cut into pieces, so that reducing one piece overlaps with receiving the next.
// Both sides cut by size alone and so agree without a word.
#include "comm/backends/schedule_runner.h"

#include <algorithm>
#include <cstddef>

#include "base/status_macros.h"
#include "comm/codec/reduce.h"

namespace gtrain::comm {
namespace {

constexpr size_t kBufferBytes = 256 << 10;

struct Piece {
  char* target = nullptr;  // reduced into; nullptr: nothing to do on completion
  char* incoming = nullptr;
  size_t count = 0;
  bool incoming_first = false;
};

size_t ScratchBytes(const Round& round, size_t element) {
  size_t bytes = 0;
  for (const Action& a : round) bytes += a.kind == ActionKind::kReceiveReduce ? a.count * element : 0;
  return bytes;
}

}  // namespace

absl::Status ScheduleRunner::Run(const Schedule& schedule, void* data, DType dtype, ReduceOp op,
                                 DataTransport* transport, const Watch& watch) {
  return Run(schedule, data, data, dtype, op, transport, watch);
}

absl::Status ScheduleRunner::Run(const Schedule& schedule, const void* source, void* data, DType dtype,
                                 ReduceOp op, DataTransport* transport, const Watch& watch) {
  const size_t element = DTypeSize(dtype), piece_count = kBufferBytes / element;
  std::vector<Transfer> transfers;
  std::vector<Piece> pieces;
  for (const Round& round : schedule) {
    transfers.clear();
    pieces.clear();
    if (const size_t need = ScratchBytes(round, element); scratch_.size() < need) scratch_.resize(need);
    size_t scratch_used = 0;
    for (const Action& a : round) {
      for (size_t at = 0; at < a.count; at += piece_count) {
        const size_t count = std::min<size_t>(piece_count, a.count - at), bytes = count * element;
        // A transport only reads what it sends.
        void* base = a.kind == ActionKind::kSend ? const_cast<void*>(source) : data;
        char* place = static_cast<char*>(base) + (a.offset + at) * element;
        Piece piece;
        if (a.kind == ActionKind::kReceiveReduce) {
          piece = {place, scratch_.data() + scratch_used, count, a.incoming_first};
          scratch_used += bytes;
        }
        transfers.push_back({a.peer, a.kind == ActionKind::kSend,
                             a.kind == ActionKind::kReceiveReduce ? piece.incoming : place, bytes});
        pieces.push_back(piece);
      }
    }
    auto done = [&](size_t i) {
      const Piece& p = pieces[i];
      if (p.target == nullptr) return;
      const void* sources[2] = {p.target, p.incoming};
      if (p.incoming_first) std::swap(sources[0], sources[1]);
      Reduce(p.target, sources, 2, p.count, dtype, op);
    };
    GT_RETURN_IF_ERROR(transport->Exchange(transfers, done, watch));
  }
  return absl::OkStatus();
}

}  // namespace gtrain::comm
