// Rules between keys (fault J12) and the defaults that depend on several of them.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/path.h"
#include "base/units.h"
#include "job/spec/job_reader.h"

namespace gtrain::spec {
namespace {

constexpr absl::string_view kLaunchers[] = {"torchrun", "accelerate", "deepspeed",
                                            "mpirun",   "mpiexec",    "srun"};

// What does not go with a host for each rank; empty: nothing that the job says.
std::string WhyNoRanksOn(const JobSpec& spec) {
  if (spec.in_place)
    return "with `elastic.mode: in-place` processes that go on stay where they are, whatever rank they "
           "become";
  if (spec.per == Per::kNode || spec.nodes)
    return "it names the host of each rank, and `nodes` and `per: node` count machines: write `ranks: N`";
  if (!spec.where_rank0.empty()) return "it says where rank 0 goes, and so does `where.rank0`; keep one";
  if (spec.ranks && spec.ranks->min != spec.ranks->max)
    return "it names the host of each rank, and `ranks` is a range: write `ranks: N`";
  return "";
}

}  // namespace

Place JobReader::PlaceOf(const Node& root, absl::string_view key) const {
  const Node* node = &root;
  for (absl::string_view part : absl::StrSplit(key, '.')) {
    node = node->Find(part);
    if (node == nullptr) return root.place;
  }
  return node->place;
}

void JobReader::Complete(const Node& root) {
  if (spec_.name.empty() && root.Find("name") == nullptr) {
    if (options_.default_name.empty()) {
      report_.Error(root.place, "`name` is missing");
    }
    spec_.name = options_.default_name;
  }
  if (spec_.workdir.empty() && root.Find("workdir") == nullptr) spec_.workdir = options_.current_dir;
  std::string& uri = spec_.checkpoint.uri;
  const bool relative = !uri.empty() && uri[0] != '/' && !absl::StartsWith(uri, "s3://");
  if (relative && !spec_.workdir.empty()) uri = JoinPath(spec_.workdir, uri);
  CheckCommand(root);
  CheckSize(root);
  CheckMesh(root);
  CheckTraffic(root);
  CheckRank0(root);
  CheckRanksOn(root);
  CheckStepCopies(root);
  CheckTimes(root);
  CheckResources(root);
  CheckComm(root);
  CheckDeterminism(root);
}

// `auto` chooses among what the user wrote down, because every one of them costs some accuracy.
void JobReader::CheckComm(const Node& root) {
  const Node* const comm = root.Find("comm");
  const Node* const allow = comm == nullptr ? nullptr : comm->Find("allow");
  if (spec_.comm.automatic && allow == nullptr) {
    report_.Error(PlaceOf(root, "comm.compression"),
                  "`comm.compression`: auto needs `allow`, the codecs it may choose from beside none, like "
                  "`allow: [fp16, topk]`");
  }
  if (!spec_.comm.automatic && allow != nullptr) {
    report_.Error(allow->place, "`comm.allow` goes with `compression: auto` alone");
  }
  if (spec_.comm.automatic && spec_.comm.deterministic) {
    report_.Error(
        PlaceOf(root, "comm.deterministic"),
        "`comm.deterministic`: `compression: auto` chooses by what it measures, which differs from start "
        "to start; name a codec instead");
  }
  if (spec_.comm.automatic) spec_.comm.codecs = std::move(allowed_);
}

// The number of virtual ranks decides the bits, so it is part of the job and not of where it runs.
void JobReader::CheckDeterminism(const Node& root) {
  const Place there = PlaceOf(root, "elastic.virtual_ranks");
  if (!bitwise_) {
    if (spec_.virtual_ranks > 0)
      report_.Error(there, "`elastic.virtual_ranks` goes with `determinism: bitwise` alone");
    return;
  }
  if (!spec_.comm.codecs.empty() || spec_.comm.automatic) {
    report_.Error(
        PlaceOf(root, "comm.compression"),
        "`comm.compression` with `elastic.determinism: bitwise`: what compression sends, and what it "
        "holds back, depends on the number of ranks; keep one");
  }
  if (ShapeOf(spec_.mesh).model_ranks > 1) {
    report_.Error(
        PlaceOf(root, "mesh"),
        "`mesh` of more than dp with `elastic.determinism: bitwise`: gradients are added along one tree "
        "of data-parallel ranks; keep one");
  }
  int64_t ranks = spec_.ranks ? spec_.ranks->max : 0;
  const bool one_each = spec_.per == Per::kNode;
  if (spec_.nodes && (spec_.ranks_per_node || one_each))
    ranks = int64_t{spec_.nodes->max} * (one_each ? 1 : *spec_.ranks_per_node);
  if (spec_.virtual_ranks == 0) {
    spec_.virtual_ranks = static_cast<int>(std::min<int64_t>(ranks, kRanksMax));
    if (ranks == 0) {
      report_.Error(
          PlaceOf(root, "elastic.determinism"),
          "`elastic.determinism: bitwise` needs `virtual_ranks`, the number of parts that a step is "
          "cut into: with `nodes` and no `ranks_per_node` there is no largest number of ranks");
    }
  } else if (ranks > spec_.virtual_ranks) {
    report_.Error(there, absl::StrCat("`elastic.virtual_ranks`: ", spec_.virtual_ranks,
                                      " parts are less than the job's ", ranks,
                                      " ranks, some of which would have nothing to compute"));
  }
}

void JobReader::CheckCommand(const Node& root) {
  const Node* run = root.Find("run");
  const Node* script = root.Find("script");
  if (run != nullptr && script != nullptr) {
    report_.Error(script->place, "`run` and `script` are both given; keep one");
  }
  if (run == nullptr && script == nullptr) {
    report_.Error(root.place, "nothing to run: `run: COMMAND` or `script: |` is missing");
  }
  if (spec_.run.empty() || spec_.per == Per::kNode) return;
  const std::vector<absl::string_view> parts = absl::StrSplit(spec_.run[0], '/');
  const bool module = spec_.run.size() > 2 && absl::StartsWith(parts.back(), "python") &&
                      spec_.run[1] == "-m" &&
                      (spec_.run[2] == "torch.distributed.run" || spec_.run[2] == "torch.distributed.launch");
  if (module ||
      std::find(std::begin(kLaunchers), std::end(kLaunchers), parts.back()) != std::end(kLaunchers)) {
    report_.Error(
        run->place,
        absl::StrCat(
            "`run`: ", module ? spec_.run[2] : std::string(parts.back()),
            " is itself a launcher, and under `per: rank` each rank would start one. Run the program "
            "itself (gtrain sets RANK, WORLD_SIZE, MASTER_ADDR, ...), or write `per: node` (`--set "
            "per=node`)"));
  }
}

void JobReader::CheckSize(const Node& root) {
  const Node* ranks = root.Find("ranks");
  const Node* nodes = root.Find("nodes");
  const Node* per_node = root.Find("ranks_per_node");
  if (ranks != nullptr && nodes != nullptr) {
    report_.Error(
        std::max(ranks->place.line, nodes->place.line) == ranks->place.line ? ranks->place : nodes->place,
        "`ranks` and `nodes` are both given; keep one (`nodes` goes with `ranks_per_node`)");
  }
  if (spec_.per == Per::kNode) {
    if (ranks != nullptr) {
      report_.Error(ranks->place,
                    "`ranks` under `per: node`: one process runs on each node; give their number as `nodes`");
    }
    if (per_node != nullptr && spec_.ranks_per_node.value_or(1) != 1) {
      report_.Error(per_node->place,
                    "`ranks_per_node` under `per: node`: one process runs on each node; remove it");
    }
    if (ranks == nullptr && nodes == nullptr) spec_.nodes = Range{1, 1};
    return;
  }
  if (per_node != nullptr && nodes == nullptr) {
    report_.Error(
        per_node->place,
        "`ranks_per_node` needs `nodes`; with `ranks` the number a node follows from its resources");
  }
  if (spec_.nodes && spec_.ranks_per_node &&
      static_cast<int64_t>(spec_.nodes->max) * *spec_.ranks_per_node > kRanksMax) {
    report_.Error(nodes->place,
                  absl::StrCat("`nodes` x `ranks_per_node` is more than ", kRanksMax, " ranks"));
  }
  if (ranks == nullptr && nodes == nullptr) {
    size_t count = 0;
    for (const RanksOn& place : spec_.where_ranks) count += place.ranks.size();
    const int all = static_cast<int>(std::clamp<size_t>(count, 1, kRanksMax));
    spec_.ranks = Range{all, all};
  }
}

void JobReader::CheckStepCopies(const Node& root) {
  if (!spec_.step_copies || (spec_.in_place && ShapeOf(spec_.mesh).model_ranks > 1)) return;
  report_.Error(PlaceOf(root, "elastic.step_copies"),
                "`elastic.step_copies`: copies are of parts of a model that one rank alone may hold, for "
                "processes that go on: that needs `mode: in-place` and a `mesh` of more than dp");
}

void JobReader::CheckMesh(const Node& root) {
  if (spec_.mesh.empty()) return;
  const MeshShape shape = ShapeOf(spec_.mesh);
  if (shape.ranks > kRanksMax) {
    report_.Error(PlaceOf(root, "mesh"), absl::StrCat("`mesh` has more than ", kRanksMax, " ranks"));
    return;
  }
  const bool whole_nodes = spec_.ranks_per_node || spec_.per == Per::kNode;
  const int each = spec_.per == Per::kNode ? 1 : spec_.ranks_per_node.value_or(1);
  std::optional<Range> world = spec_.ranks;
  if (!world && spec_.nodes && whole_nodes) world = Range{spec_.nodes->min * each, spec_.nodes->max * each};
  if (world) CheckMeshSize(PlaceOf(root, "mesh"), shape, *world);
  if (shape.model_ranks > 1 && spec_.in_place && (!spec_.comm.codecs.empty() || spec_.comm.automatic)) {
    report_.Error(
        PlaceOf(root, "comm.compression"),
        "`comm.compression` with a `mesh` of more than dp and `elastic.mode: in-place`: state that all "
        "parts of the model have alike would not stay alike, since what compression rounds and holds back "
        "depends on the part; keep one");
  }
  if (!spec_.in_place || shape.model_ranks == 1) return;
  // A process keeps its part of the model as long as it lives, whatever the number of ranks is.
  if (spec_.mesh[0].name != kDataAxis && shape.data_ranks != 1) {
    report_.Error(
        PlaceOf(root, "mesh"),
        "`mesh`: with `elastic.mode: in-place` dp comes first, so that a rank keeps its part of the "
        "model when dp shrinks or grows");
  }
  if (spec_.nodes && (!whole_nodes || each % shape.model_ranks != 0)) {
    report_.Error(
        PlaceOf(root, "mesh"),
        absl::StrCat("`mesh`: with `elastic.mode: in-place` each node holds whole copies of the model: "
                     "`ranks_per_node` is a multiple of ",
                     shape.model_ranks, ", or the file says `ranks` instead of `nodes`"));
  }
}

void JobReader::CheckRank0(const Node& root) {
  if (spec_.where_rank0.empty() || !spec_.in_place) return;
  report_.Error(
      PlaceOf(root, "where.rank0"),
      "`where.rank0` with `elastic.mode: in-place`: processes that go on stay where they are, and any of "
      "them becomes rank 0; keep one");
}

void JobReader::CheckRanksOn(const Node& root) {
  if (spec_.where_ranks.empty()) return;
  const auto refuse = [&](absl::string_view why) {
    report_.Error(PlaceOf(root, "where.ranks"), absl::StrCat("`where.ranks`: ", why));
  };
  if (const std::string why = WhyNoRanksOn(spec_); !why.empty()) return refuse(why);
  std::set<int> ranks;
  std::map<std::pair<std::string, int>, int> taken;
  for (const RanksOn& place : spec_.where_ranks) {
    for (size_t i = 0; i < place.ranks.size(); ++i) {
      const int rank = place.ranks[i];
      if (!ranks.insert(rank).second) return refuse(absl::StrCat("rank ", rank, " is there twice"));
      if (place.slots.empty() || spec_.resources.gpu_share > 0) continue;
      const auto [it, is_new] = taken.emplace(std::pair(place.host, place.slots[i]), rank);
      if (!is_new)
        return refuse(absl::StrCat("ranks ", it->second, " and ", rank, " both have slot ", place.slots[i],
                                   " of ", place.host));
    }
  }
  const int all = spec_.ranks ? spec_.ranks->max : static_cast<int>(ranks.size());
  int first_missing = 0;
  while (ranks.contains(first_missing)) ++first_missing;
  if (first_missing < all)
    return refuse(absl::StrCat("the host of rank ", first_missing, " is missing, of ", all));
  if (static_cast<int>(ranks.size()) > all)
    refuse(absl::StrCat("it names the hosts of ", ranks.size(), " ranks, and the job has ", all));
}

void JobReader::CheckTraffic(const Node& root) {
  for (const auto& [name, bytes] : spec_.traffic) {
    if (HasAxis(spec_.mesh, name)) continue;
    report_.Error(PlaceOf(root, absl::StrCat("traffic.", name)),
                  spec_.mesh.empty() ? absl::StrCat("`traffic`: ", Shown(name),
                                                    " is no axis: without `mesh` there is dp alone")
                                     : absl::StrCat("`traffic`: `mesh` has no axis ", Shown(name)));
  }
}

void JobReader::CheckMeshSize(const Place& place, const MeshShape& shape, const Range& world) {
  const auto fits = [&](int ranks) {
    return shape.data_ranks ? ranks == shape.ranks : ranks % shape.model_ranks == 0;
  };
  if (fits(world.min) && fits(world.max)) return;
  const std::string ranks =
      world.min == world.max ? absl::StrCat(world.min) : absl::StrCat(world.min, " to ", world.max);
  report_.Error(place, shape.data_ranks
                           ? absl::StrCat("`mesh`: its ", shape.ranks, " ranks do not match the job's ",
                                          ranks, "; write `dp: \"*\"` for an axis that follows them")
                           : absl::StrCat("`mesh`: the job's ", ranks,
                                          " ranks are not whole copies of the model, each of ",
                                          shape.model_ranks, " ranks"));
}

void JobReader::CheckTimes(const Node& root) {
  const Node* preempt = root.Find("preempt");
  if (preempt != nullptr && preempt->Find("lead") != nullptr && spec_.stop_grace > spec_.preempt.lead) {
    report_.Error(
        PlaceOf(root, root.Find("stop_grace") != nullptr ? "stop_grace" : "preempt.lead"),
        absl::StrCat("`stop_grace` (", PrintDuration(spec_.stop_grace),
                     ") is longer than the notice `preempt.lead` (", PrintDuration(spec_.preempt.lead),
                     "); the machine would be gone before the job has saved"));
  }
  if (spec_.time_limit && spec_.checkpoint.every && *spec_.checkpoint.every > *spec_.time_limit) {
    report_.Error(PlaceOf(root, "checkpoint.every"),
                  absl::StrCat("`checkpoint.every` (", PrintDuration(*spec_.checkpoint.every),
                               ") is longer than `limits.time` (", PrintDuration(*spec_.time_limit),
                               "): the job would end before its first checkpoint"));
  }
  if (spec_.progress.on_stall == OnStall::kKill && spec_.progress.stall < absl::Seconds(10)) {
    report_.Error(PlaceOf(root, "progress.stall"),
                  "`progress.stall` under 10s with `on_stall: kill` would end healthy ranks");
  }
}

void JobReader::CheckResources(const Node& root) {
  const Resources& r = spec_.resources;
  if (r.gpus == 0 && !r.gpu_type.empty()) {
    report_.Error(PlaceOf(root, "resources.gpu_type"),
                  "`resources.gpu_type` with `gpus: 0` asks for a kind of GPU and for none");
  }
  if (r.gpus == 0 && !r.visible_node) {
    report_.Error(PlaceOf(root, "resources.visible"),
                  "`resources.visible: rank` with `gpus: 0` has no GPU to show");
  }
  const Node* const resources = root.Find("resources");
  const Node* const visible = resources == nullptr ? nullptr : resources->Find("visible");
  if (r.gpu_share > 0 && visible != nullptr && r.visible_node) {
    report_.Error(visible->place,
                  "`resources.visible: node` with a part of a GPU: a rank sees the GPU that it shares alone");
  }
  for (const auto& [name, ref] : spec_.secrets) {
    if (spec_.env.count(name) != 0) {
      report_.Error(PlaceOf(root, absl::StrCat("secrets.", name)),
                    absl::StrCat("`", name, "` is in `env` and in `secrets`; keep one"));
    }
  }
}

}  // namespace gtrain::spec
