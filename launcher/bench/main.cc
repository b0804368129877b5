// gtrain-bench: one rank of `gtrain bench`, which starts it as a job and reads rank 0's lines.
//   gtrain-bench allreduce DTYPE allocate|private BYTES...
//   gtrain-bench link BYTES...
//   gtrain-bench codec FLOATS
//   gtrain-bench probe                  for `gtrain topology measure` (probe.h)
// As the OSU benchmarks do: a barrier, one timed call, many times; a call's time is that of its slowest rank.
// Every table begins with a line "# name name ...", and every row has that many words.
#include <gtrain/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/codec/compressor.h"
#include "comm/port/communicator.h"
#include "launcher/bench/probe.h"
#include "runtime/port/session.h"

namespace gtrain {
namespace {

using Words = std::vector<std::string>;

constexpr double kSecondsEach = 0.4;  // of one size
constexpr int kCallsMin = 7, kCallsMax = 2000;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Quantile(std::vector<double> samples, double q) {
  std::sort(samples.begin(), samples.end());
  return samples[static_cast<size_t>(q * static_cast<double>(samples.size() - 1))];
}

// Seconds of each call, the same on all ranks of `comm`. As many calls as fit into kSecondsEach.
absl::StatusOr<std::vector<double>> TimeCalls(Communicator& comm, const std::function<absl::Status()>& call) {
  std::vector<double> samples(3);
  const auto run = [&]() -> absl::Status {
    for (double& sample : samples) {
      GT_RETURN_IF_ERROR(comm.Barrier());
      const double start = Now();
      GT_RETURN_IF_ERROR(call());
      sample = Now() - start;
    }
    return comm.AllReduce(samples.data(), samples.size(), DType::kFloat64, ReduceOp::kMax);
  };
  GT_RETURN_IF_ERROR(run());
  const double one = *std::min_element(samples.begin(), samples.end());
  samples.assign(static_cast<size_t>(std::clamp(kSecondsEach / one, 1.0 * kCallsMin, 1.0 * kCallsMax)), 0);
  GT_RETURN_IF_ERROR(run());
  return samples;
}

absl::StatusOr<DType> ParseDType(const std::string& name) {
  constexpr std::pair<const char*, DType> kNames[] = {
      {"float32", DType::kFloat32},   {"float64", DType::kFloat64}, {"float16", DType::kFloat16},
      {"bfloat16", DType::kBFloat16}, {"int32", DType::kInt32},     {"int64", DType::kInt64},
      {"uint8", DType::kUint8}};
  for (const auto& [known, dtype] : kNames) {
    if (name == known) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is no dtype; float32, float64, float16, bfloat16, int32, int64, uint8 are"));
}

absl::StatusOr<std::vector<size_t>> Sizes(const Words& words, size_t first) {
  std::vector<size_t> sizes;
  for (size_t i = first; i < words.size(); ++i) {
    size_t bytes = 0;
    if (!absl::SimpleAtoi(words[i], &bytes) || bytes == 0) {
      return absl::InvalidArgumentError(absl::StrCat(words[i], " is no size in bytes"));
    }
    sizes.push_back(bytes);
  }
  return sizes;
}

absl::Status AllReduceRows(Session& session, const Words& words) {
  if (words.size() < 3) return absl::InvalidArgumentError("allreduce DTYPE allocate|private BYTES...");
  GT_ASSIGN_OR_RETURN(const DType dtype, ParseDType(words[0]));
  GT_ASSIGN_OR_RETURN(const std::vector<size_t> sizes, Sizes(words, 2));
  GT_ASSIGN_OR_RETURN(const auto comm, session.MakeCommunicator());
  const size_t width = DTypeSize(dtype);
  const size_t largest = *std::max_element(sizes.begin(), sizes.end()) + width;
  void* data = nullptr;
  std::vector<uint64_t> own;
  if (words[1] == "private") {
    own.resize(largest / sizeof(uint64_t) + 1);
    data = own.data();
  } else {
    GT_ASSIGN_OR_RETURN(data, comm->Allocate(largest));
  }
  const double ranks = comm->size();
  if (comm->rank() == 0) std::printf("# bytes us p95_us algbw_GB/s busbw_GB/s\n");
  for (const size_t bytes : sizes) {
    const size_t count = std::max<size_t>(1, bytes / width);
    std::memset(data, 0, count * width);
    GT_ASSIGN_OR_RETURN(const std::vector<double> samples, TimeCalls(*comm, [&] {
                          return comm->AllReduce(data, count, dtype, ReduceOp::kSum);
                        }));
    if (comm->rank() != 0) continue;
    const double seconds = Quantile(samples, 0.5);
    const double speed = static_cast<double>(count * width) / seconds * 1e-9;
    std::printf("%12zu %12.2f %12.2f %10.3f %10.3f\n", count * width, seconds * 1e6,
                Quantile(samples, 0.95) * 1e6, speed, speed * 2 * (ranks - 1) / ranks);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

struct Place {
  int32_t machine = 0;
  std::array<char, 60> host{};
};

absl::StatusOr<std::vector<Place>> Places(Communicator& comm) {
  Place own{.machine = comm.machine()};
  (void)gethostname(own.host.data(), own.host.size() - 1);
  std::vector<Place> all(static_cast<size_t>(comm.size()));
  GT_RETURN_IF_ERROR(comm.AllGather(&own, all.data(), sizeof(Place), DType::kUint8));
  return all;
}

// Half of a way there and back, seconds, on both.
absl::StatusOr<std::vector<double>> PingPong(Communicator& two, std::vector<uint8_t>& data, size_t bytes) {
  const int other = 1 - two.rank();
  GT_ASSIGN_OR_RETURN(std::vector<double> samples, TimeCalls(two, [&]() -> absl::Status {
                        if (two.rank() == 0)
                          GT_RETURN_IF_ERROR(two.Send(data.data(), bytes, DType::kUint8, other));
                        GT_RETURN_IF_ERROR(two.Receive(data.data(), bytes, DType::kUint8, other));
                        if (two.rank() == 0) return absl::OkStatus();
                        return two.Send(data.data(), bytes, DType::kUint8, other);
                      }));
  for (double& sample : samples) sample /= 2;
  return samples;
}

// Each pair of machines, one after another; of ranks where there is one machine.
absl::Status LinkRows(Session& session, const Words& words) {
  GT_ASSIGN_OR_RETURN(const std::vector<size_t> sizes, Sizes(words, 0));
  GT_ASSIGN_OR_RETURN(const auto comm, session.MakeCommunicator());
  GT_ASSIGN_OR_RETURN(const std::vector<Place> places, Places(*comm));
  std::vector<int> ends;
  for (int rank = 0; rank < comm->size(); ++rank) {
    const bool first = std::none_of(ends.begin(), ends.end(), [&](int end) {
      return places[static_cast<size_t>(end)].machine == places[static_cast<size_t>(rank)].machine;
    });
    if (first) ends.push_back(rank);
  }
  if (ends.size() == 1) {
    for (int rank = 1; rank < comm->size(); ++rank) ends.push_back(rank);
  }
  if (ends.size() < 2) return absl::InvalidArgumentError("a link has two ends: give -n 2 or more");
  std::vector<uint8_t> data(*std::max_element(sizes.begin(), sizes.end()));
  if (comm->rank() == 0) std::printf("# from to bytes us p95_us GB/s\n");
  for (size_t a = 0; a < ends.size(); ++a) {
    for (size_t b = a + 1; b < ends.size(); ++b) {
      const bool in = comm->rank() == ends[a] || comm->rank() == ends[b];
      GT_ASSIGN_OR_RETURN(const auto two, comm->Split(in ? 0 : -1, comm->rank()));
      for (const size_t bytes : sizes) {
        std::array<double, 2> row{};
        if (two != nullptr) {
          GT_ASSIGN_OR_RETURN(const std::vector<double> samples, PingPong(*two, data, bytes));
          row = {Quantile(samples, 0.5), Quantile(samples, 0.95)};
        }
        GT_RETURN_IF_ERROR(comm->Broadcast(row.data(), row.size(), DType::kFloat64, ends[a]));
        if (comm->rank() != 0) continue;
        const auto name = [&](int rank) {
          return absl::StrCat(places[static_cast<size_t>(rank)].host.data(), ":", rank);
        };
        std::printf("%s %s %10zu %10.2f %10.2f %8.3f\n", name(ends[a]).c_str(), name(ends[b]).c_str(), bytes,
                    row[0] * 1e6, row[1] * 1e6, static_cast<double>(bytes) / row[0] * 1e-9);
        std::fflush(stdout);
      }
    }
  }
  return absl::OkStatus();
}

double MedianOf(const std::function<void()>& call) {
  std::vector<double> samples;
  for (int i = -1; i < kCallsMin; ++i) {
    const double start = Now();
    call();
    if (i >= 0) samples.push_back(Now() - start);
  }
  return Quantile(samples, 0.5);
}

// One thread, with error feedback and both ends of a transaction, on values as gradients have them: most
// small.
absl::Status CodecRows(const Words& words) {
  GT_ASSIGN_OR_RETURN(const std::vector<size_t> sizes, Sizes(words, 0));
  const size_t count = sizes[0];
  std::vector<float> gradient(count), output(count);
  uint64_t state = 1;
  for (float& value : gradient) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const double u = static_cast<double>(state >> 11) * 0x1p-53 - 0.5;
    value = static_cast<float>(u * u * u);
  }
  const double copy = MedianOf([&] { std::memcpy(output.data(), gradient.data(), count * sizeof(float)); });
  const double gigabytes = static_cast<double>(count * sizeof(float)) * 1e-9;
  std::printf("# codec ratio encode_ms decode_ms encode_GB/s of_memcpy\n");
  for (const Codec codec : PacketCodecs()) {
    if (codec == Codec::kNone) continue;
    CompressionOptions options{.codec = codec};
    GT_ASSIGN_OR_RETURN(const auto compressor, Compressor::Create(options, count));
    std::vector<uint8_t> packet(compressor->MaxBytes());
    absl::Status failed;
    size_t bytes = 0;
    const double encode = MedianOf([&] {
      const auto used = compressor->Encode(gradient, absl::MakeSpan(packet));
      if (used.ok()) bytes = *used;
      failed.Update(used.status());
      failed.Update(compressor->Apply());
    });
    GT_RETURN_IF_ERROR(failed);
    const auto body = absl::MakeConstSpan(packet).subspan(0, bytes);
    const double decode =
        MedianOf([&] { failed.Update(Decode(body, absl::MakeSpan(output), DecodeMode::kSet)); });
    GT_RETURN_IF_ERROR(failed);
    std::printf("%-8s %8.1f %10.2f %10.2f %8.2f %8.2f\n", std::string(CodecName(codec)).c_str(),
                static_cast<double>(count * sizeof(float)) / static_cast<double>(bytes), encode * 1e3,
                decode * 1e3, gigabytes / encode, copy / encode);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status Run(const std::string& what, const Words& words) {
  GT_ASSIGN_OR_RETURN(const auto session, Session::Join());
  if (what == "allreduce") return AllReduceRows(*session, words);
  if (what == "link") return LinkRows(*session, words);
  if (what == "codec") return CodecRows(words);
  if (what == "probe") return PrintProbe(*session);
  return absl::InvalidArgumentError(absl::StrCat("no bench ", what));
}

}  // namespace
}  // namespace gtrain

int main(int argc, char** argv) {
  if (argc < 2 || (argc == 2 && std::strcmp(argv[1], "probe") != 0)) {
    std::fprintf(stderr, "gtrain-bench is started by `gtrain bench` and `gtrain topology measure`\n");
    return 2;
  }
  const absl::Status status = gtrain::Run(argv[1], gtrain::Words(argv + 2, argv + argc));
  if (status.ok()) return 0;
  std::fprintf(stderr, "gtrain-bench: %s\n", std::string(status.message()).c_str());
  return 93;  // not to be started again: a measurement of another generation would be another one
}
