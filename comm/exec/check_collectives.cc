#include "comm/exec/check_collectives.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "comm/codec/reduce.h"

namespace gtrain::comm {
namespace {

constexpr size_t kCounts[] = {0, 1, 3, 1001, 300'001};
constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64,    DType::kFloat16,    DType::kBFloat16,
                            DType::kInt32,   DType::kInt64,      DType::kUint8,      DType::kBool,
                            DType::kInt8,    DType::kInt16,      DType::kUint16,     DType::kUint32,
                            DType::kUint64,  DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kComplex64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum,     ReduceOp::kMean,   ReduceOp::kMin,   ReduceOp::kMax,
                             ReduceOp::kProduct, ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor};

// Types and operations that have loops of their own, but whose data go the same ways as those of the others:
// a few sizes are enough for them.
bool Rare(DType dtype, ReduceOp op) { return dtype > DType::kUint8 || op > ReduceOp::kMax; }

double At(const std::vector<char>& data, size_t i, DType dtype) {
  const char* p = data.data() + i * DTypeSize(dtype);
  auto as = [&](auto value) {
    std::memcpy(&value, p, sizeof(value));
    return value;
  };
  switch (dtype) {
    case DType::kFloat32:
      return as(float{});
    case DType::kFloat64:
      return as(double{});
    case DType::kFloat16:
      return FromFloat16(as(uint16_t{}));
    case DType::kBFloat16:
      return FromBFloat16(as(uint16_t{}));
    case DType::kInt32:
      return as(int32_t{});
    case DType::kInt64:
      return static_cast<double>(as(int64_t{}));
    case DType::kUint8:
    case DType::kBool:
      return as(uint8_t{});
    case DType::kInt8:
      return as(int8_t{});
    case DType::kInt16:
      return as(int16_t{});
    case DType::kUint16:
      return as(uint16_t{});
    case DType::kUint32:
      return as(uint32_t{});
    case DType::kUint64:
      return static_cast<double>(as(uint64_t{}));
    case DType::kFloat8E4M3:
      return FromFloat8E4M3(as(uint8_t{}));
    case DType::kFloat8E5M2:
      return FromFloat8E5M2(as(uint8_t{}));
    case DType::kComplex64: {
      const auto value = as(std::complex<float>{});
      return value.imag() == 0 ? value.real() : std::numeric_limits<double>::quiet_NaN();
    }
  }
  return 0;
}

void Set(char* data, size_t i, DType dtype, int value) {
  char* p = data + i * DTypeSize(dtype);
  auto put = [&](auto v) { std::memcpy(p, &v, sizeof(v)); };
  switch (dtype) {
    case DType::kFloat32:
      return put(static_cast<float>(value));
    case DType::kFloat64:
      return put(static_cast<double>(value));
    case DType::kFloat16:
      return put(ToFloat16(static_cast<float>(value)));
    case DType::kBFloat16:
      return put(ToBFloat16(static_cast<float>(value)));
    case DType::kInt32:
      return put(static_cast<int32_t>(value));
    case DType::kInt64:
      return put(static_cast<int64_t>(value));
    case DType::kUint8:
    case DType::kBool:
    case DType::kInt8:
      return put(static_cast<uint8_t>(value));
    case DType::kInt16:
    case DType::kUint16:
      return put(static_cast<uint16_t>(value));
    case DType::kUint32:
      return put(static_cast<uint32_t>(value));
    case DType::kUint64:
      return put(static_cast<uint64_t>(value));
    case DType::kFloat8E4M3:
      return put(ToFloat8E4M3(static_cast<float>(value)));
    case DType::kFloat8E5M2:
      return put(ToFloat8E5M2(static_cast<float>(value)));
    case DType::kComplex64:
      return put(std::complex<float>(static_cast<float>(value)));
  }
}

int Input(int rank, size_t i) { return static_cast<int>((i * 3 + static_cast<size_t>(rank) * 5) % 11); }

// Small integers, so that all but means are exact in every type and in every order: factors are mostly 1, and
// float8_e5m2 has three significant bits. For bool some elements are the same on all ranks, and not all bytes
// are 0 or 1.
int Operand(int rank, size_t i, ReduceOp op, DType dtype) {
  const int input = Input(rank, i);
  if (dtype == DType::kBool) return i % 3 == 0 ? 0 : i % 3 == 1 ? input : input + 1;
  if (op == ReduceOp::kProduct) return input % 4 == 0 ? 2 : 1;
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2 ? input % 2 : input;
}

double Expected(int ranks, size_t i, ReduceOp op, DType dtype) {
  if (ranks == 1) return Operand(0, i, op, dtype);  // whatever byte is true
  int sum = 0, least = 100, most = 0, product = 1, common = -1, any = 0, odd = 0;
  for (int r = 0; r < ranks; ++r) {
    const int operand = Operand(r, i, op, dtype), value = dtype == DType::kBool ? operand != 0 : operand;
    sum += value, least = std::min(least, value), most = std::max(most, value);
    product *= value, common &= value, any |= value, odd ^= value;
  }
  switch (op) {
    case ReduceOp::kSum:
      return dtype == DType::kBool ? any : sum;
    case ReduceOp::kMean: {
      const int whole = sum / ranks;
      return IsInteger(dtype) ? whole : static_cast<double>(sum) / ranks;
    }
    case ReduceOp::kMin:
      return least;
    case ReduceOp::kMax:
      return most;
    case ReduceOp::kProduct:
      return product;
    case ReduceOp::kBitAnd:
      return common;
    case ReduceOp::kBitOr:
      return any;
    case ReduceOp::kBitXor:
      return odd;
  }
  return 0;
}

// For float8, whose means are at most 1 here, this is half of the last digit.
double Tolerance(DType dtype) {
  if (dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2) return 0.07;
  return dtype == DType::kBFloat16 ? 0.1 : dtype == DType::kFloat16 ? 0.02 : 1e-5;
}

// NaN is off too.
bool Off(double got, double wanted, DType dtype) { return !(std::abs(got - wanted) <= Tolerance(dtype)); }

absl::Status Wrong(absl::string_view what, size_t i, double got, double wanted) {
  return absl::DataLossError(absl::StrCat(what, " [", i, "] is ", got, " instead of ", wanted));
}

}  // namespace

absl::Status CheckAllReduce(Communicator& c, size_t count, DType dtype, ReduceOp op, char* in_place) {
  std::vector<char> own(count * DTypeSize(dtype) + 1);
  char* data = in_place != nullptr ? in_place : own.data();
  for (size_t i = 0; i < count; ++i) Set(data, i, dtype, Operand(c.rank(), i, op, dtype));
  if (absl::Status s = c.AllReduce(data, count, dtype, op); !s.ok()) return s;
  std::memcpy(own.data(), data, count * DTypeSize(dtype));
  for (size_t i = 0; i < count; ++i) {
    const double got = At(own, i, dtype), wanted = Expected(c.size(), i, op, dtype);
    if (Off(got, wanted, dtype)) return Wrong("all-reduce", i, got, wanted);
  }
  return absl::OkStatus();
}

absl::Status CheckBroadcast(Communicator& c, size_t count, int root) {
  std::vector<int32_t> data(count + 1);
  for (size_t i = 0; i < count; ++i) data[i] = Input(c.rank(), i) + 1000 * c.rank();
  if (absl::Status s = c.Broadcast(data.data(), count, DType::kInt32, root); !s.ok()) return s;
  for (size_t i = 0; i < count; ++i) {
    if (data[i] != Input(root, i) + 1000 * root)
      return Wrong("broadcast", i, data[i], Input(root, i) + 1000 * root);
  }
  return absl::OkStatus();
}

absl::Status CheckAllGather(Communicator& c, size_t count, bool in_place) {
  std::vector<int32_t> output(count * static_cast<size_t>(c.size()) + 1, -1), separate(count + 1);
  int32_t* input = in_place ? output.data() + count * static_cast<size_t>(c.rank()) : separate.data();
  for (size_t i = 0; i < count; ++i) input[i] = Input(c.rank(), i) + 1000 * c.rank();
  if (absl::Status s = c.AllGather(input, output.data(), count, DType::kInt32); !s.ok()) return s;
  for (int r = 0; r < c.size(); ++r) {
    for (size_t i = 0; i < count; ++i) {
      const int32_t got = output[static_cast<size_t>(r) * count + i], wanted = Input(r, i) + 1000 * r;
      if (got != wanted) return Wrong("all-gather", static_cast<size_t>(r) * count + i, got, wanted);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckReduceScatter(Communicator& c, size_t count, DType dtype, ReduceOp op, bool in_place,
                                char* input) {
  const size_t element = DTypeSize(dtype), all = count * static_cast<size_t>(c.size());
  std::vector<char> own(all * element + 1), output(count * element + 1);
  if (input == nullptr) input = own.data();
  for (size_t i = 0; i < all; ++i) Set(input, i, dtype, Operand(c.rank(), i, op, dtype));
  const size_t first = static_cast<size_t>(c.rank()) * count;
  char* target = in_place ? input + first * element : output.data();
  if (absl::Status s = c.ReduceScatter(input, target, count, dtype, op); !s.ok()) return s;
  std::memcpy(output.data(), target, count * element);
  for (size_t i = 0; i < count; ++i) {
    const double got = At(output, i, dtype), wanted = Expected(c.size(), first + i, op, dtype);
    if (Off(got, wanted, dtype)) return Wrong("reduce-scatter", i, got, wanted);
  }
  // The elements that are not output must be unchanged.
  own.assign(input, input + all * element);
  for (size_t i = 0; i < all; ++i) {
    if (in_place && i >= first && i < first + count) continue;
    if (At(own, i, dtype) != Operand(c.rank(), i, op, dtype))
      return Wrong("reduce-scatter input", i, At(own, i, dtype), -1);
  }
  return absl::OkStatus();
}

absl::Status CheckReduce(Communicator& c, size_t count, DType dtype, ReduceOp op, int root, char* data) {
  std::vector<char> own(count * DTypeSize(dtype) + 1);
  if (data == nullptr) data = own.data();
  for (size_t i = 0; i < count; ++i) Set(data, i, dtype, Operand(c.rank(), i, op, dtype));
  if (absl::Status s = c.Reduce(data, count, dtype, op, root); !s.ok()) return s;
  own.assign(data, data + count * DTypeSize(dtype));
  for (size_t i = 0; i < count; ++i) {
    const double wanted =
        c.rank() == root ? Expected(c.size(), i, op, dtype) : Operand(c.rank(), i, op, dtype);
    const double got = At(own, i, dtype);
    if (Off(got, wanted, dtype)) return Wrong("reduce", i, got, wanted);
  }
  return absl::OkStatus();
}

absl::Status CheckAllToAll(Communicator& c, size_t count, char* input) {
  const size_t all = count * static_cast<size_t>(c.size());
  std::vector<int32_t> own(all + 1), output(all + 1, -1);
  if (input == nullptr) input = reinterpret_cast<char*>(own.data());
  for (size_t i = 0; i < all; ++i) Set(input, i, DType::kInt32, static_cast<int>(i) + 100'000 * c.rank());
  if (absl::Status s = c.AllToAll(input, output.data(), count, DType::kInt32); !s.ok()) return s;
  for (size_t i = 0; i < all; ++i) {
    const size_t from = i / count, place = static_cast<size_t>(c.rank()) * count + i % count;
    const int32_t wanted = static_cast<int32_t>(place + 100'000 * from);
    if (output[i] != wanted) return Wrong("all-to-all", i, output[i], wanted);
  }
  return absl::OkStatus();
}

absl::Status Everything(Communicator& c) {
  for (size_t count : kCounts) {
    for (DType dtype : kTypes) {
      for (ReduceOp op : kOps) {
        if (!IsReducible(dtype, op) || (Rare(dtype, op) && (count < 3 || count > 1001))) continue;
        if (count > 1001 && dtype != DType::kFloat32 && op != ReduceOp::kMean) continue;
        RETURN_IF_BAD(CheckAllReduce(c, count, dtype, op));
        if (count > 1001 && (dtype != DType::kFloat32 || op != ReduceOp::kMean)) continue;
        RETURN_IF_BAD(CheckReduceScatter(c, count, dtype, op, /*in_place=*/op == ReduceOp::kMean));
        RETURN_IF_BAD(CheckReduce(c, count, dtype, op, static_cast<int>(dtype) % c.size()));
      }
    }
    for (int root = 0; root < c.size(); ++root) RETURN_IF_BAD(CheckBroadcast(c, count, root));
    for (int root = 0; root < c.size() && count <= 1001; ++root) {
      RETURN_IF_BAD(CheckReduce(c, count, DType::kInt64, ReduceOp::kSum, root));
    }
    RETURN_IF_BAD(CheckAllToAll(c, count));
    RETURN_IF_BAD(CheckAllGather(c, count, false));
    RETURN_IF_BAD(c.Barrier());
    RETURN_IF_BAD(CheckAllGather(c, count, true));
  }
  return absl::OkStatus();
}

namespace {

absl::Status CheckInts(const std::vector<int32_t>& got, const std::vector<int32_t>& wanted,
                       const char* what) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (got[i] != wanted[i]) return Wrong(what, i, got[i], wanted[i]);
  }
  return absl::OkStatus();
}

// The element that `rank` has for `to`: a function of both, so that every rank can compute what all have.
int32_t PartElement(int rank, int to, size_t i) { return 10'007 * rank + 101 * to + static_cast<int32_t>(i); }

absl::Status CheckGatherAndScatter(Communicator& c, size_t count, int root) {
  const size_t n = static_cast<size_t>(c.size());
  std::vector<int32_t> mine(count), all(c.rank() == root ? n * count : 0), wanted;
  for (size_t i = 0; i < count; ++i) mine[i] = PartElement(c.rank(), 0, i);
  RETURN_IF_BAD(c.Gather(mine.data(), all.data(), count, DType::kInt32, root));
  for (int r = 0; r < c.size(); ++r) {
    for (size_t i = 0; i < count; ++i) wanted.push_back(PartElement(r, 0, i));
  }
  if (c.rank() == root) RETURN_IF_BAD(CheckInts(all, wanted, "gather"));
  std::vector<int32_t> back(count, -1);
  RETURN_IF_BAD(c.Scatter(all.data(), back.data(), count, DType::kInt32, root));
  return CheckInts(back, mine, "scatter");
}

absl::Status CheckUneven(Communicator& c, const std::vector<size_t>& counts) {
  const size_t self = static_cast<size_t>(c.rank());
  std::vector<int32_t> mine(counts[self]), wanted, sums, whole;
  for (size_t i = 0; i < mine.size(); ++i) mine[i] = PartElement(c.rank(), 0, i);
  for (int r = 0; r < c.size(); ++r) {
    for (size_t i = 0; i < counts[static_cast<size_t>(r)]; ++i) {
      wanted.push_back(PartElement(r, 0, i));
      whole.push_back(PartElement(c.rank(), r, i));
      int32_t sum = 0;
      for (int of = 0; of < c.size(); ++of) sum += PartElement(of, r, i);
      if (r == c.rank()) sums.push_back(sum);
    }
  }
  std::vector<int32_t> all(wanted.size(), -1);
  RETURN_IF_BAD(c.AllGatherV(mine.data(), all.data(), counts, DType::kInt32));
  RETURN_IF_BAD(CheckInts(all, wanted, "uneven all-gather"));
  std::vector<int32_t> part(sums.size() + 1, -1);
  RETURN_IF_BAD(c.ReduceScatterV(whole.data(), part.data(), counts, DType::kInt32, ReduceOp::kSum));
  if (part.back() != -1) return absl::DataLossError("uneven reduce-scatter wrote behind its part");
  return CheckInts(part, sums, "uneven reduce-scatter");
}

// Rank a sends b as many elements as `counts` says of (a + 2 b).
absl::Status CheckAllToAllV(Communicator& c, const std::vector<size_t>& counts) {
  const size_t n = counts.size();
  std::vector<size_t> sends(n), receives(n);
  std::vector<int32_t> out, wanted;
  for (int other = 0; other < c.size(); ++other) {
    const size_t o = static_cast<size_t>(other), self = static_cast<size_t>(c.rank());
    sends[o] = counts[(self + 2 * o) % n];
    receives[o] = counts[(o + 2 * self) % n];
    for (size_t i = 0; i < sends[o]; ++i) out.push_back(PartElement(c.rank(), other, i));
    for (size_t i = 0; i < receives[o]; ++i) wanted.push_back(PartElement(other, c.rank(), i));
  }
  std::vector<int32_t> in(wanted.size() + 1, -1);
  RETURN_IF_BAD(c.AllToAllV(out.data(), sends, in.data(), receives, DType::kInt32));
  if (in.back() != -1) return absl::DataLossError("uneven all-to-all wrote behind its parts");
  return CheckInts(in, wanted, "uneven all-to-all");
}

}  // namespace

absl::Status Uneven(Communicator& c) {
  const size_t n = static_cast<size_t>(c.size());
  for (const size_t count : {size_t{0}, size_t{1}, size_t{777}, size_t{40'000}}) {
    for (const int root : {0, c.size() - 1}) RETURN_IF_BAD(CheckGatherAndScatter(c, count, root));
    std::vector<size_t> nearly(n, count), one(n, 0), rising(n, 0);
    nearly[n - 1] /= 2;
    one[n / 2] = count;
    for (size_t i = 0; i < n; ++i) rising[i] = i * i * count / n / n;
    for (const std::vector<size_t>& counts : {nearly, one, rising}) {
      RETURN_IF_BAD(CheckUneven(c, counts));
      RETURN_IF_BAD(CheckAllToAllV(c, counts));
    }
  }
  return c.Barrier();
}

absl::Status Messages(Communicator& c) {
  const int next = (c.rank() + 1) % c.size(), previous = (c.rank() + c.size() - 1) % c.size();
  for (const size_t count : {size_t{0}, size_t{3}, size_t{15'000}, size_t{300'000}}) {
    std::vector<int32_t> mine(count), theirs(count, -1), wanted(count);
    for (size_t i = 0; i < count; ++i) {
      mine[i] = PartElement(c.rank(), 1, i);
      wanted[i] = PartElement(previous, 1, i);
    }
    RETURN_IF_BAD(c.Send(mine.data(), count, DType::kInt32, next, 7));
    RETURN_IF_BAD(c.Send(mine.data(), 0, DType::kInt32, next, 8));
    RETURN_IF_BAD(c.Receive(theirs.data(), 0, DType::kInt32, previous, 8));
    RETURN_IF_BAD(c.Receive(theirs.data(), count, DType::kInt32, previous, 7));
    RETURN_IF_BAD(CheckInts(theirs, wanted, "ring"));
  }
  if (c.rank() != 0) {
    int32_t rank = c.rank();
    RETURN_IF_BAD(c.Send(&rank, 1, DType::kInt32, 0, c.rank()));
  }
  for (int i = 1; c.rank() == 0 && i < c.size(); ++i) {
    int32_t rank = -1;
    MessageInfo info;
    RETURN_IF_BAD(c.Receive(&rank, 1, DType::kInt32, kAnySource, kAnyTag, &info));
    if (rank != info.from || rank != info.tag)
      return absl::DataLossError("another source than its message says");
  }
  RETURN_IF_BAD(c.Barrier());  // nothing else may come for that receive
  std::vector<int32_t> out(256), in(256, -1), wanted;
  std::vector<Message> group;
  for (int i = 0; i < 256; ++i) {
    out[static_cast<size_t>(i)] = PartElement(c.rank(), i, 0);
    wanted.push_back(PartElement((c.rank() + 256 * c.size() - i) % c.size(), i, 0));
    group.push_back(
        {Message::Kind::kSend, &out[static_cast<size_t>(i)], 1, DType::kInt32, (c.rank() + i) % c.size(), i});
    group.push_back({Message::Kind::kReceive, &in[static_cast<size_t>(i)], 1, DType::kInt32,
                     (c.rank() + 256 * c.size() - i) % c.size(), i});
  }
  auto going = c.Start(group);
  RETURN_IF_BAD(going.status());
  RETURN_IF_BAD(*(*going)->Wait(absl::InfiniteDuration()));
  RETURN_IF_BAD(CheckInts(in, wanted, "group"));
  return c.Barrier();
}

absl::Status SendAndReceive(Communicator& c) {
  int turn = 0;
  for (size_t count : kCounts) {
    for (int low = 0; low < c.size(); ++low) {
      for (int high = low + 1; high < c.size(); ++high) {
        ++turn;
        const bool low_first = turn % 3 != 0;
        const int from = low_first ? low : high, to = low_first ? high : low;
        std::vector<int32_t> data(count + 1);
        const auto fill = [&](int rank) {
          for (size_t i = 0; i < count; ++i) data[i] = Input(rank, i) + 1000 * turn;
        };
        const auto check = [&](int rank) {
          for (size_t i = 0; i < count; ++i) {
            if (data[i] != Input(rank, i) + 1000 * turn) {
              return Wrong("send", i, data[i], Input(rank, i) + 1000 * turn);
            }
          }
          return absl::OkStatus();
        };
        if (c.rank() == from) {
          fill(from);
          RETURN_IF_BAD(c.Send(data.data(), count, DType::kInt32, to));
          RETURN_IF_BAD(check(from));
          RETURN_IF_BAD(c.Receive(data.data(), count, DType::kInt32, to));
          RETURN_IF_BAD(check(to));
        } else if (c.rank() == to) {
          RETURN_IF_BAD(c.Receive(data.data(), count, DType::kInt32, from));
          RETURN_IF_BAD(check(from));
          fill(to);
          RETURN_IF_BAD(c.Send(data.data(), count, DType::kInt32, from));
        }
        if (turn % 4 == 0) RETURN_IF_BAD(CheckAllReduce(c, 100, DType::kFloat32, ReduceOp::kSum));
      }
    }
  }
  return c.Barrier();
}

// Every type and operation on every way that an all-reduce inside a machine takes: in the posts, staged in
// chunks, straight in memory of Allocate(), and with ranks that disagree about that. Odd counts, around the
// borders between the ways, at odd places.
absl::Status EveryWay(Communicator& c) {
  constexpr size_t kMost = 140'001;
  auto memory = c.Allocate(kMost * 8 + 64);
  if (!memory.ok()) return memory.status();
  char* direct = static_cast<char*>(*memory);
  std::vector<char> private_memory(kMost * 8 + 64);
  size_t turn = 0;
  for (size_t bytes : {1, 129, 8191, 8192, 8193, 16'385, 70'000, 1'120'008}) {
    for (DType dtype : kTypes) {
      for (ReduceOp op : kOps) {
        if (!IsReducible(dtype, op) || (Rare(dtype, op) && bytes > 20'000)) continue;
        const size_t element = DTypeSize(dtype), count = std::max<size_t>(1, bytes / element);
        const size_t offset = turn++ % 7 * element;
        if (bytes > 60'000 && turn % 4 != 0) continue;
        RETURN_IF_BAD(CheckAllReduce(c, count, dtype, op, direct + offset));
        RETURN_IF_BAD(CheckAllReduce(c, count, dtype, op, private_memory.data() + offset + turn % 2));
        char* either = (static_cast<size_t>(c.rank()) + turn) % 2 == 0 ? direct : private_memory.data();
        RETURN_IF_BAD(CheckAllReduce(c, count, dtype, op, either + offset));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status DirectMemory(Communicator& c) {
  const size_t count = 70'001;
  auto first = c.Allocate(count * 4 + 64);
  auto second = c.Allocate(100);
  if (!first.ok() || !second.ok()) return first.ok() ? second.status() : first.status();
  char* data = static_cast<char*>(*first);
  for (size_t i = 0; i < 100; ++i) {
    if (data[i] != 0) return absl::DataLossError("not zeroed");
  }
  RETURN_IF_BAD(CheckAllReduce(c, count, DType::kFloat32, ReduceOp::kMean, data));
  RETURN_IF_BAD(CheckAllReduce(c, count - 10, DType::kFloat16, ReduceOp::kSum, data + 64));
  RETURN_IF_BAD(CheckAllReduce(c, 5, DType::kInt32, ReduceOp::kMax, static_cast<char*>(*second)));
  RETURN_IF_BAD(CheckAllReduce(c, 0, DType::kInt32, ReduceOp::kMax, static_cast<char*>(*second)));
  // Only some ranks use such memory here.
  RETURN_IF_BAD(
      CheckAllReduce(c, count, DType::kFloat32, ReduceOp::kSum, c.rank() % 2 == 0 ? data : nullptr));
  auto* numbers = reinterpret_cast<int32_t*>(data);
  for (size_t i = 0; i < count; ++i) numbers[i] = c.rank();
  RETURN_IF_BAD(c.Broadcast(numbers, count, DType::kInt32, c.size() - 1));
  for (size_t i = 0; i < count; ++i) {
    if (numbers[i] != c.size() - 1) return Wrong("direct broadcast", i, numbers[i], c.size() - 1);
  }
  auto large = c.Allocate(count * 4 * static_cast<size_t>(c.size()));
  if (!large.ok()) return large.status();
  char* blocks = static_cast<char*>(*large);
  for (bool in_place : {false, true}) {
    RETURN_IF_BAD(CheckReduceScatter(c, count, DType::kFloat32, ReduceOp::kMean, in_place, blocks));
    RETURN_IF_BAD(CheckReduceScatter(c, count, DType::kBFloat16, ReduceOp::kSum, in_place,
                                     c.rank() == 0 ? blocks : nullptr));
  }
  RETURN_IF_BAD(CheckReduce(c, count, DType::kInt32, ReduceOp::kSum, c.size() - 1, data));
  RETURN_IF_BAD(CheckReduce(c, count, DType::kInt32, ReduceOp::kSum, 0, c.rank() == 0 ? nullptr : data));
  RETURN_IF_BAD(CheckAllToAll(c, count, blocks));
  RETURN_IF_BAD(CheckAllToAll(c, count, c.rank() == 0 ? nullptr : blocks));
  // Reduces from one buffer into another.
  const std::vector<int64_t> input(1000, c.rank() + 1);
  std::vector<int64_t> output(input.size());
  RETURN_IF_BAD(c.AllReduce(input.data(), output.data(), input.size(), DType::kInt64, ReduceOp::kSum));
  const int64_t sum = int64_t{c.size()} * (c.size() + 1) / 2;
  if (input != std::vector<int64_t>(1000, c.rank() + 1)) return Wrong("input", 0, -1, c.rank() + 1);
  if (output != std::vector<int64_t>(1000, sum)) return Wrong("output", 0, double(output[0]), double(sum));
  return CheckAllReduce(c, count, DType::kFloat32, ReduceOp::kMean);
}

absl::Status RowsAndColumns(Communicator& c) {
  constexpr int kColumns = 2;
  const int row = c.rank() / kColumns, column = c.rank() % kColumns;
  auto across = c.Split(row, column);
  RETURN_IF_BAD(across.status());
  auto down = c.Split(column, -row);  // the other way round
  RETURN_IF_BAD(down.status());
  auto some = c.Split(c.rank() == 1 ? 7 : -1, 0);
  RETURN_IF_BAD(some.status());
  if ((*some != nullptr) != (c.rank() == 1)) return absl::InternalError("split for nobody");
  if ((*across)->size() != kColumns || (*across)->rank() != column) return absl::InternalError("row");
  const int rows = c.size() / kColumns;
  if ((*down)->size() != rows || (*down)->rank() != rows - 1 - row) return absl::InternalError("column");
  for (Communicator* group : {across->get(), down->get()}) {
    RETURN_IF_BAD(CheckAllReduce(*group, 1000, DType::kFloat32, ReduceOp::kSum));
    RETURN_IF_BAD(CheckAllReduce(*group, 100'000, DType::kFloat32, ReduceOp::kSum));
    RETURN_IF_BAD(CheckBroadcast(*group, 10, 0));
  }
  int32_t sum[2] = {c.rank(), 1};
  RETURN_IF_BAD((*across)->AllReduce(sum, 2, DType::kInt32, ReduceOp::kSum));
  if (sum[0] != 2 * row * kColumns + 1 || sum[1] != kColumns) return absl::DataLossError("other ranks' row");
  across->reset();
  return c.Barrier();
}

}  // namespace gtrain::comm
