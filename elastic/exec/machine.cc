#include "elastic/exec/machine.h"

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "elastic/plan/cpu.h"

namespace gtrain::elastic {
namespace {

constexpr char kCpuInfo[] = "/proc/cpuinfo";
constexpr size_t kCpuInfoMax = 64 << 20;  // some KiB for each of its processors
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

}  // namespace gtrain::elastic
