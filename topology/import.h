// Fabrics as other programs know them, read into a Topology. PURE: the caller reads the file.
//
// None of them says how a machine is built, so each takes the shape that all machines get (ShapeOfOneSlot()
// where nobody knows better), and most say no speed, which stays 0. InvalidArgument has file:line where the
// source has lines.
#pragma once
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "topology/topology.h"

namespace gtrain::topology {

inline constexpr size_t kImportBytesMax = size_t{64} << 20;

// A machine that takes one rank and of which nothing is known.
Shape ShapeOfOneSlot();

// Slurm's topology.conf: SwitchName= lines of topology/tree, or BlockName= lines of topology/block, whose
// blocks become NVLink switches. LinkSpeed has no unit there and is not read.
absl::StatusOr<Topology> ImportSlurm(absl::string_view text, absl::string_view filename, const Shape& shape);

// What `ibnetdiscover` prints. A machine is the first word of an adapter's description, as Linux sets it
// ("node01 mlx5_0"); the second is its NIC. Cables between the same two switches are one link.
absl::StatusOr<Topology> ImportIbnetdiscover(absl::string_view text, absl::string_view filename,
                                             const Shape& shape);

// Lines "HOSTS /zone/rack", a hostlist and the widest place first: rack labels, or what a cloud says in
// another form. '#' begins a comment.
absl::StatusOr<Topology> ImportPaths(absl::string_view text, absl::string_view filename, const Shape& shape);

// A machine and what it hangs on, the widest first. Switches get the name of their whole path.
struct Located {
  std::string host;
  std::vector<std::string> path;
  int line = 0;  // of the source; 0: it has none
};
absl::StatusOr<Topology> TopologyOfPaths(const std::vector<Located>& machines, absl::string_view filename,
                                         const Shape& shape);

// JSON of `aws ec2 describe-instance-topology`: InstanceId and NetworkNodes, the widest first.
absl::StatusOr<Topology> ImportAws(absl::string_view text, absl::string_view filename, const Shape& shape);

// JSON of `gcloud compute instances list --format=json`: name and resourceStatus.physicalHost,
// "/cluster/rack/host".
absl::StatusOr<Topology> ImportGcp(absl::string_view text, absl::string_view filename, const Shape& shape);

}  // namespace gtrain::topology
