#include "elastic/exec/machine.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "checkpoint/format/hash.h"
#include "elastic/plan/cpu.h"

namespace gtrain::elastic {
namespace {

constexpr char kCpuInfo[] = "/proc/cpuinfo";
constexpr size_t kCpuInfoMax = 64 << 20;  // some KiB for each of its processors
constexpr size_t kNamedMax = 10;

using Text = std::array<char, 1024>;

absl::StatusOr<std::string> TextOf(Communicator& comm, const std::string& machine, int rank) {
  Text text{};
  if (comm.rank() == rank)
    std::memcpy(text.data(), machine.data(), std::min(machine.size(), text.size() - 1));
  GT_RETURN_IF_ERROR(comm.Broadcast(text.data(), text.size(), DType::kUint8, rank));
  return std::string(text.data());
}

std::string Named(const std::vector<int>& ranks) {
  const absl::Span<const int> first = absl::MakeSpan(ranks).first(std::min(ranks.size(), kNamedMax));
  const size_t more = ranks.size() - first.size();
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(first, ", "),
                      more == 0 ? "" : absl::StrCat(" and ", more, " more"));
}

}  // namespace

absl::StatusOr<std::string> DescribeMachine(absl::string_view threads) {
  GT_ASSIGN_OR_RETURN(const std::string cpuinfo, ReadFile(kCpuInfo, kCpuInfoMax));
  const std::string cpu = DescribeCpu(cpuinfo);
  if (cpu.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("`elastic.determinism: bitwise` needs processors of one kind, and ", kCpuInfo,
                     " does not say which one this is"));
  }
  return absl::StrCat(cpu, "; ", threads);
}

absl::Status CheckMachines(Communicator& comm, const std::string& machine, int reference) {
  const ckpt::HashBytes mine = ckpt::Xxh3Bytes(machine);
  std::vector<uint8_t> all(mine.size() * static_cast<size_t>(comm.size()));
  GT_RETURN_IF_ERROR(comm.AllGather(mine.data(), all.data(), mine.size(), DType::kUint8));
  const auto of = [&](int rank) { return all.data() + static_cast<size_t>(rank) * mine.size(); };
  std::vector<int> others;
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (std::memcmp(of(rank), of(reference), mine.size()) != 0) others.push_back(rank);
  }
  if (others.empty()) return absl::OkStatus();
  GT_ASSIGN_OR_RETURN(const std::string wanted, TextOf(comm, machine, reference));
  GT_ASSIGN_OR_RETURN(const std::string another, TextOf(comm, machine, others[0]));
  const std::string why = absl::StrCat(
      "`elastic.determinism: bitwise` needs processors of one kind and the same numbers of threads: ",
      Named(others), others.size() == 1 ? " has " : " have ", another,
      others.size() == 1 ? "" : absl::StrCat(" (rank ", others[0], ")"), "; rank ", reference,
      ", with whose bits training goes on, has ", wanted,
      ". Choose machines of one kind: `where: {labels: {...}}`");
  const bool differs = std::ranges::count(others, comm.rank()) > 0;
  return differs ? absl::FailedPreconditionError(why) : absl::UnavailableError(why);
}

}  // namespace gtrain::elastic
