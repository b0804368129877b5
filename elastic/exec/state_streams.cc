#include "elastic/exec/state_streams.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"

namespace gtrain::elastic {
namespace {

constexpr size_t kStreamPiece = 4 << 20;
constexpr size_t kWindow = 4;

struct Hashed {
  ckpt::Xxh3 hash;
  ckpt::HashBytes digest{}, of_peer{};
};

class Streams {
 public:
  Streams(Communicator& comm, absl::Span<const StateStream> streams)
      : comm_(comm), streams_(streams), hashed_(streams.size()) {}

  absl::Status Run() {
    size_t longest = 0;
    for (const StateStream& stream : streams_) longest = std::max(longest, stream.pieces.size());
    for (size_t i = 0; i < longest + kWindow; ++i) {
      if (i < longest) GT_RETURN_IF_ERROR(StartPieces(i));
      if (i >= kWindow - 1 && !started_.empty()) GT_RETURN_IF_ERROR(FinishPieces());
    }
    return CompareHashes();
  }

 private:
  static Message MessageOf(const StateStream& stream, void* data, size_t bytes) {
    return {stream.kind, data, bytes, DType::kUint8, stream.peer, stream.tag};
  }

  // Piece i of each stream. Both ends of a stream number its pieces alike, so no group waits for a later one.
  absl::Status StartPieces(size_t i) {
    std::vector<Message> messages;
    for (size_t s = 0; s < streams_.size(); ++s) {
      const StateStream& stream = streams_[s];
      if (i >= stream.pieces.size()) continue;
      const absl::Span<char> piece = stream.pieces[i];
      if (stream.kind == Message::Kind::kSend) hashed_[s].hash.Add({piece.data(), piece.size()});
      messages.push_back(MessageOf(stream, piece.data(), piece.size()));
    }
    GT_ASSIGN_OR_RETURN(std::shared_ptr<PendingMessages> pending, comm_.Start(messages));
    started_.push_back({i, std::move(pending)});
    return absl::OkStatus();
  }

  absl::Status FinishPieces() {
    const auto [i, pending] = std::move(started_.front());
    started_.pop_front();
    GT_RETURN_IF_ERROR(*pending->Wait(absl::InfiniteDuration()));
    for (size_t s = 0; s < streams_.size(); ++s) {
      const StateStream& stream = streams_[s];
      if (stream.kind == Message::Kind::kReceive && i < stream.pieces.size())
        hashed_[s].hash.Add({stream.pieces[i].data(), stream.pieces[i].size()});
    }
    return absl::OkStatus();
  }

  absl::Status CompareHashes() {
    std::vector<Message> messages;
    for (size_t s = 0; s < streams_.size(); ++s) {
      Hashed& hashed = hashed_[s];
      hashed.digest = hashed.hash.Bytes();
      ckpt::HashBytes& travels = streams_[s].kind == Message::Kind::kSend ? hashed.digest : hashed.of_peer;
      messages.push_back(MessageOf(streams_[s], travels.data(), travels.size()));
    }
    GT_ASSIGN_OR_RETURN(const std::shared_ptr<PendingMessages> pending, comm_.Start(messages));
    GT_RETURN_IF_ERROR(*pending->Wait(absl::InfiniteDuration()));
    for (size_t s = 0; s < streams_.size(); ++s) {
      if (streams_[s].kind == Message::Kind::kSend || hashed_[s].digest == hashed_[s].of_peer) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "the state that rank ", streams_[s].peer, " sent has come with another hash: ",
          "something but the update of a step has changed it meanwhile. Built with "
          "-DGTRAIN_PROTECT_STATE a program ends where it writes to it, and says which state it is"));
    }
    return absl::OkStatus();
  }

  Communicator& comm_;
  const absl::Span<const StateStream> streams_;
  std::vector<Hashed> hashed_;
  std::deque<std::pair<size_t, std::shared_ptr<PendingMessages>>> started_;
};

}  // namespace

std::vector<absl::Span<char>> PiecesOf(absl::Span<const absl::Span<char>> memory) {
  std::vector<absl::Span<char>> pieces;
  for (const absl::Span<char> block : memory) {
    for (size_t at = 0; at < block.size(); at += kStreamPiece)
      pieces.push_back(block.subspan(at, kStreamPiece));
  }
  return pieces;
}

absl::Status RunStreams(Communicator& comm, absl::Span<const StateStream> streams) {
  return streams.empty() ? absl::OkStatus() : Streams(comm, streams).Run();
}

StreamsBeside::StreamsBeside(std::shared_ptr<Communicator> comm)
    : comm_(std::move(comm)), calls_(comm_->timeout()) {}

StreamsBeside::~StreamsBeside() {
  for (const AsyncCall& call : running_) {
    if (call.Wait(absl::ZeroDuration())) continue;
    comm_->Abort(absl::CancelledError("the run has ended"));
    break;
  }
}

absl::Status StreamsBeside::Start(std::vector<StateStream> streams, std::function<void()> then) {
  if (streams.empty()) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(AsyncCall call, calls_.Start([comm = comm_.get(), streams = std::move(streams),
                                                    then = std::move(then)] {
    const absl::Status run = RunStreams(*comm, streams);
    if (run.ok() && then) then();
    return run;
  }));
  running_.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status StreamsBeside::Wait() {
  absl::Status first;
  for (const AsyncCall& call : running_) first.Update(*call.Wait(absl::InfiniteDuration()));
  running_.clear();
  return first;
}

}  // namespace gtrain::elastic
