// bench_topology: whether a topology that is measured, and a rank order that follows it, are worth anything:
// eight machines, network namespaces, on two leaf switches with an eighth of a machine's link between them.
//
// The machines are probed as `gtrain topology measure` does. Then all-reduces along the mesh {dp: 8}, and of
// pairs and then of fours along {dp: 4, tp: 2}, with the ranks in the order of the plan, interleaved (every
// second one on the other leaf) and in random orders: the ring, whose order is that of the ranks, and what
// the planner of collectives chooses (auto); Gloo beside them. The topology's prediction for the ring stands
// beside each. A sample is the median of some calls, each between two barriers and as slow as its slowest
// rank. Needs root, ip(8) and tc(8).
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "bench/harness.h"
#include "bench/local_cluster.h"
#include "bench/network.h"
#include "comm/exec/communicator.h"
#include "comm/fake/fake_world.h"
#include "job/plan/by_topology.h"
#include "launcher/bench/probe.h"
#include "topology/import.h"
#include "topology/json.h"
#include "topology/place/plan.h"

namespace gtrain::bench {
namespace {

using topology::Fabric;
using topology::Mesh;
using Order = std::vector<int>;  // [rank]: its machine

constexpr int kMachines = 8, kLeaves = 2, kTurns = 3, kTurnsQuick = 1, kDraws = 10, kDrawsQuick = 2;
constexpr size_t kBytes = 1 << 20, kOuterBytes = 256 << 10;  // of dp: 8, and tp; of dp beside tp
constexpr int kCalls = 3;
constexpr char kRate[] = "400mbit", kUplink[] = "50mbit", kBurst[] = "64kb", kUplinkBurst[] = "16kb";
constexpr absl::Duration kDeadline = absl::Minutes(2);
constexpr const char* kPython = "/usr/bin/python3";  // Debian's, which has Debian's torch

double Now() { return static_cast<double>(RealClock().Now().ns) * 1e-9; }

// What one rank finds out, for the parent.
double* SharedDouble() {
  void* page = mmap(nullptr, sizeof(double), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return page == MAP_FAILED ? nullptr : static_cast<double*>(page);
}

using Body = std::function<absl::Status(comm::FakeWorld& world, int rank)>;

// `fabric_order`: of each rank, what the grant of a head says (comm/port/bootstrap.h).
absl::Status OnMachines(const Network& network, const Order& order, const std::vector<int>& fabric_order,
                        const Body& body) {
  std::vector<std::string> nodes, addresses;
  for (const int machine : order) {
    nodes.push_back(network.NameOf(machine));
    addresses.push_back(Network::AddressOf(machine));
  }
  comm::FakeWorld world(nodes, addresses);
  world.SetFabricOrder(fabric_order);
  std::vector<pid_t> children;
  for (int rank = 0; rank < static_cast<int>(order.size()); ++rank)
    children.push_back(network.Start(order[rank], [&, rank] { return body(world, rank); }));
  return WaitForAll(children, "a rank", kDeadline);
}

absl::StatusOr<topology::Topology> MeasureTopology(const Network& network, const Home& home) {
  const std::string path = home.path() + "/measured.json";
  Order order(kMachines);
  std::iota(order.begin(), order.end(), 0);
  const std::vector<int> as_ranks(order.size(), 0);
  GT_RETURN_IF_ERROR(
      OnMachines(network, order, as_ranks, [&](comm::FakeWorld& world, int rank) -> absl::Status {
        const auto bootstrap = world.Rank(rank);
        GT_ASSIGN_OR_RETURN(const auto communicator, comm::MakeCommunicator(bootstrap.get(), {}));
        std::vector<std::string> names;
        for (int m = 0; m < kMachines; ++m) names.push_back(absl::StrCat("m", m));
        GT_ASSIGN_OR_RETURN(const topology::Measured measured, Probe(*communicator, order, names));
        if (rank != 0) return absl::OkStatus();
        GT_ASSIGN_OR_RETURN(const topology::Topology topology,
                            topology::TopologyOf(measured, topology::ShapeOfOneSlot()));
        return WriteFileDurable(path, topology::PrintTopology(topology));
      }));
  GT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, topology::kTopologyBytesMax));
  return topology::ParseTopology(text, path);
}

struct Step {
  Mesh mesh;  // the traffic of its axes is that of the calls
  absl::Status Call(Communicator& whole, Communicator* inner, Communicator* outer, float* data) const {
    if (inner == nullptr)
      return whole.AllReduce(data, kBytes / sizeof(float), DType::kFloat32, ReduceOp::kSum);
    GT_RETURN_IF_ERROR(inner->AllReduce(data, kBytes / sizeof(float), DType::kFloat32, ReduceOp::kSum));
    return outer->AllReduce(data, kOuterBytes / sizeof(float), DType::kFloat32, ReduceOp::kSum);
  }
  int inner() const { return mesh.axes.size() == 2 ? mesh.axes[1].size : 0; }
};

topology::Axis AxisOf(const char* name, int size, size_t bytes) {
  const double gb = 2.0 * (size - 1) / size * static_cast<double>(bytes) * 1e-9;  // of a ring, to the next
  return {name, size, topology::Pattern::kRing, gb};
}

const Step kFlat{{{AxisOf("dp", kMachines, kBytes)}}};
const Step kMesh{{{AxisOf("dp", kMachines / 2, kOuterBytes), AxisOf("tp", 2, kBytes)}}};

absl::StatusOr<double> TimeOurs(const Network& network, const Order& order,
                                const std::vector<int>& fabric_order, const Step& step,
                                const std::string& algorithm) {
  double* result = SharedDouble();
  if (result == nullptr) return absl::ResourceExhaustedError("no memory for a sample");
  GT_RETURN_IF_ERROR(
      OnMachines(network, order, fabric_order, [&](comm::FakeWorld& world, int rank) -> absl::Status {
        const auto bootstrap = world.Rank(rank);
        comm::ExecOptions options;
        options.algorithm = algorithm;
        GT_ASSIGN_OR_RETURN(const auto whole, comm::MakeCommunicator(bootstrap.get(), options));
        std::unique_ptr<Communicator> inner, outer;
        if (const int size = step.inner(); size > 0) {
          GT_ASSIGN_OR_RETURN(inner, whole->Split(rank / size, rank));
          GT_ASSIGN_OR_RETURN(outer, whole->Split(rank % size, rank));
        }
        std::vector<float> data(kBytes / sizeof(float), 1.0f);
        std::vector<double> samples;
        for (int call = -1; call < kCalls; ++call) {
          GT_RETURN_IF_ERROR(whole->Barrier());
          const double start = Now();
          GT_RETURN_IF_ERROR(step.Call(*whole, inner.get(), outer.get(), data.data()));
          if (call >= 0) samples.push_back(Now() - start);
        }
        GT_RETURN_IF_ERROR(whole->AllReduce(samples.data(), samples.size(), DType::kFloat64, ReduceOp::kMax));
        std::ranges::sort(samples);
        if (rank == 0) *result = samples[samples.size() / 2] * 1e3;
        return absl::OkStatus();
      }));
  const double sample = *result;
  munmap(result, sizeof(double));
  return sample;
}

absl::StatusOr<double> TimeGloo(const Network& network, const Order& order, const Home& home,
                                const std::string& folder) {
  const std::string store = home.path() + "/store", file = home.path() + "/samples";
  std::filesystem::remove(store);
  std::filesystem::remove(file);
  std::vector<pid_t> children;
  for (int rank = 0; rank < kMachines; ++rank) {
    std::vector<std::string> line = network.Inside(order[rank]);
    line.insert(line.end(), {kPython, folder + "/../bench/allreduce_gloo.py", file, absl::StrCat(kMachines),
                             absl::StrCat("rank=", rank, ":", store), absl::StrCat(kBytes, ":", kCalls)});
    GT_ASSIGN_OR_RETURN(const pid_t pid, Spawn(line));
    children.push_back(pid);
  }
  GT_RETURN_IF_ERROR(WaitForAll(children, "a rank of Gloo", kDeadline));
  GT_ASSIGN_OR_RETURN(const BySize samples, ReadBySize(file, "Gloo"));
  return samples.at(kBytes) * 1e-3;
}

// One way to have ranks in some order, and its times in milliseconds.
struct Row {
  std::string name;
  const Step* step = nullptr;
  Order order;
  std::string algorithm;          // "": Gloo
  std::vector<int> fabric_order;  // of each rank
  Series times = {};
};

Order Planned(const Fabric& fabric, const Mesh& mesh) {
  std::vector<int32_t> usable(static_cast<size_t>(fabric.size()));
  std::iota(usable.begin(), usable.end(), 0);
  Order order;
  for (const int32_t slot : topology::PlanOn(fabric, mesh, usable, 0).slot_of_rank)
    order.push_back(fabric.slots[slot].machine);
  return order;
}

double PredictedMs(const Fabric& fabric, const Row& row) {
  std::vector<int32_t> slots;
  for (const int machine : row.order) slots.push_back(fabric.slots_of_machine[machine].first);
  return Evaluate(fabric, row.step->mesh, slots).seconds * 1e3;
}

std::vector<Row> MakeRows(const topology::Topology& topology, const Fabric& fabric, bool quick,
                          bool with_gloo) {
  Order interleaved;
  for (int i = 0; i < kMachines; ++i) interleaved.push_back(i / 2 + i % 2 * kMachines / 2);
  std::vector<Row> rows;
  const plan::KnownTopology known(topology);
  // A ring of a fixed order is what ranks alone say; `auto` has what the grant says, too.
  const auto add = [&](const Step* step, const std::string& name, const Order& order,
                       const std::string& algorithm) {
    std::vector<plan::NodeView> nodes(order.size());
    for (size_t rank = 0; rank < order.size(); ++rank)
      nodes[rank].hostname = topology.machines[static_cast<size_t>(order[rank])].name;
    std::vector<int> by_fabric;
    if (algorithm == "auto") by_fabric = CollectiveOrder(known, nodes);
    by_fabric.resize(order.size(), 0);
    rows.push_back(
        {absl::StrCat(topology::PrintMesh(step->mesh), ", ", name), step, order, algorithm, by_fabric});
  };
  for (const Step* step : {&kFlat, &kMesh}) {
    const Order planned = Planned(fabric, step->mesh);
    for (const char* algorithm : {"ring", "auto"}) {
      add(step, absl::StrCat(algorithm, ", planned"), planned, algorithm);
      add(step, absl::StrCat(algorithm, ", interleaved"), interleaved, algorithm);
    }
    if (step == &kFlat && with_gloo) {
      add(step, "Gloo, planned", planned, "");
      add(step, "Gloo, interleaved", interleaved, "");
    }
    Rng random(1);
    for (int draw = 0; draw < (quick ? kDrawsQuick : kDraws); ++draw) {
      Order order = interleaved;
      std::ranges::shuffle(order, random);
      add(step, absl::StrCat("ring, random ", draw), order, "ring");
    }
  }
  return rows;
}

absl::Status MeasureAll(const Options& options, const Network& network, const Home& home) {
  GT_RETURN_IF_ERROR(network.Limit(kRate, kBurst));
  GT_RETURN_IF_ERROR(network.LimitUplinks(kUplink, kUplinkBurst));
  const double begin = Now();
  GT_ASSIGN_OR_RETURN(const topology::Topology topology, MeasureTopology(network, home));
  std::printf("measured in %.1f s:\n%s\n", Now() - begin, topology::Describe(topology).c_str());
  GT_ASSIGN_OR_RETURN(const Fabric fabric, topology::Compile(topology));
  std::printf("%s\n", topology::PrintDomains(fabric).c_str());
  const bool with_gloo = Executable(kPython) && Run({kPython, "-c", "import torch.distributed"}).ok();
  if (!with_gloo) std::fprintf(stderr, "bench_topology: without a peer: %s has no torch\n", kPython);
  setenv("GLOO_SOCKET_IFNAME", "eth0", 1);
  std::vector<Row> rows = MakeRows(topology, fabric, options.quick, with_gloo && !options.quick);
  for (int turn = 0; turn < (options.quick ? kTurnsQuick : kTurns); ++turn) {
    for (Row& row : rows) {
      const auto time = row.algorithm.empty()
                            ? TimeGloo(network, row.order, home, options.folder)
                            : TimeOurs(network, row.order, row.fabric_order, *row.step, row.algorithm);
      if (!time.ok()) return time.status();
      row.times.samples.push_back(*time);
    }
  }
  std::vector<Outcome> outcomes;
  std::printf("%-34s %-18s %9s %7s %10s %9s\n", "", "machines", "ms", "spread", "predicted", "measured/");
  for (const Row& row : rows) {
    const double predicted = PredictedMs(fabric, row);
    std::printf("%-34s %-18s %9.1f %6.1f%% %10.1f %9.2f\n", row.name.c_str(),
                absl::StrJoin(row.order, " ").c_str(), row.times.Median(), 100 * row.times.Spread(),
                predicted, row.times.Median() / predicted);
    if (absl::StrContains(row.name, "planned")) continue;
    const auto ours = std::ranges::find_if(rows, [&](const Row& other) {
      return other.step == row.step && other.algorithm == row.algorithm &&
             absl::StrContains(other.name, "planned");
    });
    outcomes.push_back({ours->name, "ms", row.name, ours->times, row.times});
  }
  return Report(options, "topology", outcomes) == 0 ? absl::OkStatus()
                                                    : absl::InternalError("the report was not written");
}

int Main(Options options) {
  options.folder = std::filesystem::absolute(options.folder).string();
  Network network(kMachines, kLeaves);
  if (const absl::Status made = network.Make(); !made.ok()) {
    std::fprintf(stderr, "bench_topology: nothing measured: %s\n", made.ToString().c_str());
    return absl::IsFailedPrecondition(made) ? 0 : 1;
  }
  Home home;
  absl::Status status = home.Make();
  if (status.ok()) status = MeasureAll(options, network, home);
  home.Remove();
  if (status.ok()) return 0;
  std::fprintf(stderr, "bench_topology: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace gtrain::bench

int main(int argc, char** argv) { return gtrain::bench::Main(gtrain::bench::ParseOptions(argc, argv)); }
