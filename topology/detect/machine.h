// How a machine is built, from hwloc and sysfs. Blocks for as long as these take, some tenths of a second.
#pragma once
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "topology/topology.h"

namespace gtrain::topology {

inline constexpr size_t kHwlocXmlBytesMax = size_t{16} << 20;

// This machine, with speeds of its network ports from sysfs. NVLink is not seen: hwloc knows it only with
// NVML's plugin.
absl::StatusOr<Shape> ShapeOfThisMachine();

// What `lstopo --of xml` wrote on some machine. Of a broken document InvalidArgument.
absl::StatusOr<Shape> ShapeOfHwlocXml(absl::string_view xml, absl::string_view filename);

}  // namespace gtrain::topology
