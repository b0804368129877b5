// Gather, scatter, and the collectives of uneven parts: their data goes as messages of a tag that no caller
// can name, or through the even collective where that carries at most twice as much.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/exec/exec_communicator.h"

namespace gtrain::comm {
namespace {

// Messages of one rank that go at the same time.
constexpr int kAtOnce = 64;

// FNV-1a (G. Fowler, L. C. Noll, P. Vo): equal lists have equal ones.
int32_t HashOf(absl::Span<const size_t> counts) {
  uint32_t hash = 2166136261u;
  for (const size_t count : counts) {
    for (int byte = 0; byte < 8; ++byte) hash = (hash ^ (uint64_t{count} >> 8 * byte & 0xff)) * 16777619u;
  }
  return static_cast<int32_t>(hash & 0x7fffffff);
}

std::vector<size_t> Offsets(absl::Span<const size_t> counts) {
  std::vector<size_t> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), size_t{0});
  return offsets;
}

bool Even(absl::Span<const size_t> counts) {
  return std::ranges::all_of(counts, [&](size_t count) { return count == counts[0]; });
}

// Parts of the largest size instead of their own cost at most twice as much.
bool NearlyEven(absl::Span<const size_t> counts, size_t most, size_t total) {
  return most <= 2 * total / counts.size();
}

void Copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

absl::Status CheckParts(absl::Span<const size_t> counts, int ranks, size_t* total) {
  if (counts.size() != static_cast<size_t>(ranks)) {
    return absl::InvalidArgumentError(
        absl::StrCat(counts.size(), " counts were given, one for each of ", ranks, " ranks is needed"));
  }
  *total = 0;
  for (const size_t count : counts) {
    if (count > (uint64_t{1} << 60) - *total)
      return absl::InvalidArgumentError("the parts of all ranks cannot be in memory");
    *total += count;
  }
  return absl::OkStatus();
}

}  // namespace

// Within a call, after all have entered it.
absl::Status ExecCommunicator::Move(absl::Span<const Message> messages) {
  if (messages.empty()) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(const auto going, messages_->Start(messages, timeout()));
  return *going->Wait(absl::InfiniteDuration());
}

absl::Status ExecCommunicator::Gather(const void* input, void* output, size_t count, DType dtype, int root) {
  const OpRecord record{.count = count, .kind = OpKind::kGather, .dtype = dtype, .root = root};
  const bool roots = rank() == root;
  const size_t bytes = count * DTypeSize(dtype);
  char* const to = static_cast<char*>(output);
  GT_RETURN_IF_ERROR(
      Call(record, roots && output == nullptr ? nullptr : input, [&](const OpRecord& r, const Watch& watch) {
        GT_RETURN_IF_ERROR(backend_->Enter(r, watch));
        if (count == 0) return absl::OkStatus();
        if (!roots) {
          return Move(
              {{{Message::Kind::kSend, const_cast<void*>(input), count, dtype, root, kCollectiveTag}}});
        }
        std::vector<Message> messages;
        for (int from = 0; from < size(); ++from) {
          if (from != root)
            messages.push_back({Message::Kind::kReceive, to + static_cast<size_t>(from) * bytes, count, dtype,
                                from, kCollectiveTag});
        }
        return Move(messages);
      }));
  if (roots) Copy(to + static_cast<size_t>(root) * bytes, input, bytes);
  return absl::OkStatus();
}

absl::Status ExecCommunicator::Scatter(const void* input, void* output, size_t count, DType dtype, int root) {
  const OpRecord record{.count = count, .kind = OpKind::kScatter, .dtype = dtype, .root = root};
  const bool roots = rank() == root;
  const size_t bytes = count * DTypeSize(dtype);
  const char* const from = static_cast<const char*>(input);
  GT_RETURN_IF_ERROR(
      Call(record, roots && input == nullptr ? nullptr : output, [&](const OpRecord& r, const Watch& watch) {
        GT_RETURN_IF_ERROR(backend_->Enter(r, watch));
        if (count == 0) return absl::OkStatus();
        if (!roots) return Move({{{Message::Kind::kReceive, output, count, dtype, root, kCollectiveTag}}});
        std::vector<Message> messages;
        for (int to = 0; to < size(); ++to) {
          if (to != root)
            messages.push_back({Message::Kind::kSend,
                                const_cast<char*>(from) + static_cast<size_t>(to) * bytes, count, dtype, to,
                                kCollectiveTag});
        }
        return Move(messages);
      }));
  if (roots) Copy(output, from + static_cast<size_t>(root) * bytes, bytes);
  return absl::OkStatus();
}

absl::Status ExecCommunicator::AllGatherV(const void* input, void* output, absl::Span<const size_t> counts,
                                          DType dtype) {
  size_t total = 0;
  GT_RETURN_IF_ERROR(Refused(CheckParts(counts, size(), &total)));
  if (Even(counts)) return AllGather(input, output, counts[0], dtype);
  const size_t element = DTypeSize(dtype), self = static_cast<size_t>(rank()),
               most = *std::ranges::max_element(counts);
  const std::vector<size_t> offsets = Offsets(counts);
  char* const to = static_cast<char*>(output);
  const auto part = [&](size_t of) { return to + offsets[of] * element; };
  const OpRecord record{.count = total, .kind = OpKind::kAllGatherV, .dtype = dtype, .root = HashOf(counts)};
  const bool padded = NearlyEven(counts, most, total);
  const bool missing = output == nullptr || (input == nullptr && counts[self] > 0);
  GT_RETURN_IF_ERROR(Call(record, missing ? nullptr : output, [&](const OpRecord& r, const Watch& watch) {
    GT_RETURN_IF_ERROR(backend_->Enter(r, watch));
    Copy(part(self), input, counts[self] * element);
    if (padded) return absl::OkStatus();
    // A ring: every step hands on what came in the one before, so each rank speaks with two others.
    const size_t ranks = counts.size();
    const int next = (rank() + 1) % size(), previous = (rank() + size() - 1) % size();
    for (size_t step = 0; step + 1 < ranks; ++step) {
      const size_t out = (self + ranks - step) % ranks, in = (out + ranks - 1) % ranks;
      std::vector<Message> messages;
      if (counts[out] > 0)
        messages.push_back({Message::Kind::kSend, part(out), counts[out], dtype, next, kCollectiveTag});
      if (counts[in] > 0)
        messages.push_back({Message::Kind::kReceive, part(in), counts[in], dtype, previous, kCollectiveTag});
      GT_RETURN_IF_ERROR(Move(messages));
    }
    return absl::OkStatus();
  }));
  if (!padded) return absl::OkStatus();
  std::vector<char> all(most * counts.size() * element);
  Copy(all.data() + self * most * element, part(self), counts[self] * element);
  GT_RETURN_IF_ERROR(AllGather(all.data() + self * most * element, all.data(), most, dtype));
  for (size_t of = 0; of < counts.size(); ++of)
    Copy(part(of), all.data() + of * most * element, counts[of] * element);
  return absl::OkStatus();
}

absl::Status ExecCommunicator::ReduceScatterV(const void* input, void* output,
                                              absl::Span<const size_t> counts, DType dtype, ReduceOp op) {
  size_t total = 0;
  GT_RETURN_IF_ERROR(Refused(CheckParts(counts, size(), &total)));
  if (Even(counts)) return ReduceScatter(input, output, counts[0], dtype, op);
  const size_t element = DTypeSize(dtype), self = static_cast<size_t>(rank()),
               most = *std::ranges::max_element(counts);
  const std::vector<size_t> offsets = Offsets(counts);
  const char* const from = static_cast<const char*>(input);
  const OpRecord record{
      .count = total, .kind = OpKind::kReduceScatterV, .dtype = dtype, .op = op, .root = HashOf(counts)};
  const bool missing = input == nullptr || (output == nullptr && counts[self] > 0);
  GT_RETURN_IF_ERROR(Call(record, missing ? nullptr : input,
                          [&](const OpRecord& r, const Watch& watch) { return backend_->Enter(r, watch); }));
  if (!NearlyEven(counts, most, total)) {
    std::vector<char> all(from, from + total * element);
    GT_RETURN_IF_ERROR(AllReduce(all.data(), total, dtype, op));
    Copy(output, all.data() + offsets[self] * element, counts[self] * element);
    return absl::OkStatus();
  }
  std::vector<char> all(most * counts.size() * element), own(most * element);
  for (size_t of = 0; of < counts.size(); ++of)
    Copy(all.data() + of * most * element, from + offsets[of] * element, counts[of] * element);
  GT_RETURN_IF_ERROR(ReduceScatter(all.data(), own.data(), most, dtype, op));
  Copy(output, own.data(), counts[self] * element);
  return absl::OkStatus();
}

absl::Status ExecCommunicator::AllToAllV(const void* input, absl::Span<const size_t> send_counts,
                                         void* output, absl::Span<const size_t> receive_counts, DType dtype) {
  size_t sends = 0, receives = 0;
  GT_RETURN_IF_ERROR(Refused(CheckParts(send_counts, size(), &sends)));
  GT_RETURN_IF_ERROR(Refused(CheckParts(receive_counts, size(), &receives)));
  OpRecord record{.count = 0, .kind = OpKind::kAllToAllV, .dtype = dtype};
  const bool missing = (input == nullptr && sends > 0) || (output == nullptr && receives > 0);
  if (missing) record.count = 1;  // which is compared, and refused
  const int self = rank();
  GT_RETURN_IF_ERROR(Call(record, missing ? nullptr : &record, [&](const OpRecord& r, const Watch& watch) {
    GT_RETURN_IF_ERROR(backend_->Enter(r, watch));
    return MoveBlocks(static_cast<const char*>(input), send_counts, static_cast<char*>(output),
                      receive_counts, dtype);
  }));
  const size_t element = DTypeSize(dtype), own = static_cast<size_t>(self);
  if (send_counts[own] != receive_counts[own]) {
    return Refused(absl::InvalidArgumentError(absl::StrCat("this rank sends itself ", send_counts[own],
                                                           " elements and receives ", receive_counts[own])));
  }
  Copy(static_cast<char*>(output) + Offsets(receive_counts)[own] * element,
       static_cast<const char*>(input) + Offsets(send_counts)[own] * element, send_counts[own] * element);
  return absl::OkStatus();
}

// Sends the blocks of everybody to everybody else, some at once: step s of one rank is step s of the other.
// An empty block is sent, too: if only its sender knew that it is empty, its message would be taken for a
// part of the next collective.
absl::Status ExecCommunicator::MoveBlocks(const char* input, absl::Span<const size_t> send_counts,
                                          char* output, absl::Span<const size_t> receive_counts,
                                          DType dtype) {
  const size_t element = DTypeSize(dtype);
  const std::vector<size_t> from_at = Offsets(send_counts), to_at = Offsets(receive_counts);
  for (int begin = 1; begin < size(); begin += kAtOnce) {
    std::vector<Message> messages;
    for (int step = begin; step < std::min(size(), begin + kAtOnce); ++step) {
      const int to = (rank() + step) % size(), from = (rank() + size() - step) % size();
      const auto t = static_cast<size_t>(to), f = static_cast<size_t>(from);
      messages.push_back({Message::Kind::kSend, const_cast<char*>(input) + from_at[t] * element,
                          send_counts[t], dtype, to, kCollectiveTag});
      messages.push_back({Message::Kind::kReceive, output + to_at[f] * element, receive_counts[f], dtype,
                          from, kCollectiveTag});
    }
    GT_RETURN_IF_ERROR(Move(messages));
  }
  return absl::OkStatus();
}

}  // namespace gtrain::comm
