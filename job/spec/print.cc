#include "job/spec/print.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/units.h"
#include "job/spec/hosts.h"
#include "job/spec/yaml_tree.h"

namespace gtrain::spec {
namespace {

// A double-quoted YAML string on one line.
std::string Quote(absl::string_view text) {
  std::string out = "\"";
  for (size_t pos = 0; pos < text.size();) {
    const size_t start = pos;
    const std::optional<char32_t> c = DecodeUtf8(text, pos);
    if (!c) {  // no JobSpec of the parser holds this; the replacement character keeps the text readable
      out += "\\ufffd";
      ++pos;
    } else if (*c == U'"' || *c == U'\\') {
      absl::StrAppend(&out, "\\", text.substr(start, 1));
    } else if (*c == U'\n') {
      out += "\\n";
    } else if (!CharacterProblem(*c).empty()) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned>(*c));
    } else {
      out.append(text.data() + start, pos - start);
    }
  }
  return out + "\"";
}

// Quotes values of keys in which ${NAME} means something.
std::string QuoteExpandable(absl::string_view text) {
  return Quote(absl::StrReplaceAll(text, {{"$", "$$"}}));
}

// Exact bytes in the largest unit that divides them.
std::string ExactBytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (unit < 4 && bytes != 0 && bytes % 1024 == 0) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrCat(bytes, kUnits[unit]);
}

std::string List(const std::vector<std::string>& words) {
  return absl::StrCat(
      "[", absl::StrJoin(words, ", ", [](std::string* out, const std::string& w) { *out += Quote(w); }), "]");
}

std::string PrintRange(const Range& range) {
  if (range.min == range.max) return absl::StrCat(range.min);
  return absl::StrCat("{min: ", range.min, ", max: ", range.max, "}");
}

// Collects "key: value" lines of one mapping and prints them under its name if there are any.
class Section {
 public:
  explicit Section(absl::string_view name) : name_(name) {}
  void Add(absl::string_view key, absl::string_view value) {
    absl::StrAppend(&lines_, "  ", key, ": ", value, "\n");
  }
  void Flush(std::string& out) const {
    if (!lines_.empty()) absl::StrAppend(&out, name_, ":\n", lines_);
  }

 private:
  std::string name_;
  std::string lines_;
};

void PrintCommand(const JobSpec& spec, std::string& out) {
  if (!spec.run.empty()) absl::StrAppend(&out, "run: ", List(spec.run), "\n");
  if (!spec.script.empty()) absl::StrAppend(&out, "script: ", Quote(spec.script), "\n");
  if (spec.per == Per::kNode) out += "per: node\n";
}

void PrintMesh(const JobSpec& spec, std::string& out) {
  Section mesh("mesh");
  for (const MeshAxis& axis : spec.mesh) mesh.Add(axis.name, axis.size ? absl::StrCat(*axis.size) : "\"*\"");
  mesh.Flush(out);
}

void PrintTraffic(const JobSpec& spec, std::string& out) {
  Section traffic("traffic");
  for (const auto& [axis, bytes] : spec.traffic) traffic.Add(axis, ExactBytes(bytes));
  traffic.Flush(out);
}

void PrintEnv(const JobSpec& spec, std::string& out) {
  Section env("env");
  for (const auto& [key, value] : spec.env) env.Add(Quote(key), QuoteExpandable(value));
  env.Flush(out);
}

void PrintResources(const Resources& r, std::string& out) {
  const Resources defaults;
  Section section("resources");
  if (r.cpus) section.Add("cpus", absl::StrCat(*r.cpus));
  if (r.memory) section.Add("memory", ExactBytes(*r.memory));
  if (r.gpus) section.Add("gpus", absl::StrCat(*r.gpus));
  if (r.gpu_share > 0) section.Add("gpus", PrintGpuShare(r.gpu_share));
  if (!r.gpu_type.empty()) section.Add("gpu_type", List(r.gpu_type));
  if (r.shm != defaults.shm) section.Add("shm", ExactBytes(r.shm));
  if (r.processes) section.Add("processes", absl::StrCat(*r.processes));
  if (!r.visible_node) section.Add("visible", "rank");
  if (r.oversubscribe) section.Add("oversubscribe", *r.oversubscribe ? "true" : "false");
  section.Flush(out);
}

void PrintLabels(absl::string_view name, absl::string_view indent,
                 const std::map<std::string, std::string>& labels, std::string& out) {
  if (labels.empty()) return;
  absl::StrAppend(&out, indent, name, ":\n");
  for (const auto& [key, value] : labels)
    absl::StrAppend(&out, indent, "  ", Quote(key), ": ", Quote(value), "\n");
}

void PrintWhere(const JobSpec& spec, std::string& out) {
  std::string where;
  PrintLabels("labels", "  ", spec.where_labels, where);
  if (!spec.where_hosts.empty()) absl::StrAppend(&where, "  hosts: ", List(spec.where_hosts), "\n");
  if (!spec.where_exclude.empty()) absl::StrAppend(&where, "  exclude: ", List(spec.where_exclude), "\n");
  if (!spec.where_rank0.empty()) absl::StrAppend(&where, "  rank0: ", Quote(spec.where_rank0), "\n");
  if (!spec.where_ranks.empty()) absl::StrAppend(&where, "  ranks: ", PrintRanksOn(spec.where_ranks), "\n");
  if (!where.empty()) absl::StrAppend(&out, "where:\n", where);
}

void PrintInherit(const InheritEnv& inherit, std::string& out) {
  if (inherit.kind == InheritEnv::Kind::kAll) out += "inherit_env: all\n";
  if (inherit.kind == InheritEnv::Kind::kNone) out += "inherit_env: none\n";
  if (inherit.kind == InheritEnv::Kind::kList)
    absl::StrAppend(&out, "inherit_env: ", List(inherit.names), "\n");
}

void PrintSecrets(const JobSpec& spec, std::string& out) {
  Section section("secrets");
  for (const auto& [key, ref] : spec.secrets) {
    section.Add(Quote(key), ref.env.empty() ? absl::StrCat("{file: ", Quote(ref.file), "}")
                                            : absl::StrCat("{env: ", Quote(ref.env), "}"));
  }
  section.Flush(out);
}

void PrintCheckpoint(const CheckpointPolicy& c, std::string& out) {
  if (c.uri.empty()) return;
  const CheckpointPolicy defaults;
  Section section("checkpoint");
  section.Add("uri", QuoteExpandable(c.uri));
  if (c.every_steps) section.Add("every", absl::StrCat(*c.every_steps, " steps"));
  if (c.every) section.Add("every", PrintDuration(*c.every));
  if (!c.every && !c.every_steps) section.Add("every", "auto");
  if (c.keep != defaults.keep) section.Add("keep", absl::StrCat(c.keep));
  if (!c.near.empty()) section.Add("near", c.near == kNearMemory ? c.near : Quote(c.near));
  if (c.replicas != defaults.replicas) section.Add("replicas", absl::StrCat(c.replicas));
  if (c.on_error != defaults.on_error)
    section.Add("on_error", c.on_error == OnError::kRetry ? "retry" : "fail");
  if (c.max_rollback != defaults.max_rollback) section.Add("max_rollback", absl::StrCat(c.max_rollback));
  if (c.verify_replicas != defaults.verify_replicas)
    section.Add("verify_replicas", PrintVerifyReplicas(c.verify_replicas));
  if (c.memory_max != 0) section.Add("memory_max", absl::StrCat(c.memory_max));
  if (c.read_only) section.Add("read_only", "true");
  section.Flush(out);
}

void PrintRestart(const RestartBudget& r, std::string& out) {
  const RestartBudget defaults;
  Section section("restart");
  if (r.budget != defaults.budget) section.Add("budget", absl::StrCat(r.budget));
  if (r.window != defaults.window) section.Add("window", PrintDuration(r.window));
  if (r.before_first_step != defaults.before_first_step)
    section.Add("before_first_step", absl::StrCat(r.before_first_step));
  if (r.oom != defaults.oom) section.Add("oom", absl::StrCat(r.oom));
  section.Flush(out);
}

std::string PrintCodec(const CommCodec& codec) {
  std::string out = absl::StrCat("{codec: ", codec.codec);
  if (codec.density) absl::StrAppend(&out, ", density: ", PrintShare(*codec.density));
  if (codec.momentum) absl::StrAppend(&out, ", momentum: ", PrintShare(*codec.momentum));
  if (codec.rank) absl::StrAppend(&out, ", rank: ", *codec.rank);
  if (codec.warmup) absl::StrAppend(&out, ", warmup: ", *codec.warmup);
  if (!codec.residual.empty()) absl::StrAppend(&out, ", residual: ", codec.residual);
  return out + "}";
}

void PrintComm(const CommPolicy& comm, std::string& out) {
  Section section("comm");
  if (comm.deterministic) section.Add("deterministic", "true");
  if (comm.codecs.empty()) return section.Flush(out);
  if (comm.automatic) {
    section.Add("compression", "auto");
    section.Add("allow", absl::StrCat("[",
                                      absl::StrJoin(comm.codecs, ", ",
                                                    [](std::string* list, const CommCodec& codec) {
                                                      *list += PrintCodec(codec);
                                                    }),
                                      "]"));
  } else {
    section.Add("compression", PrintCodec(comm.codecs[0]));
  }
  section.Flush(out);
}

void PrintProgress(const Progress& p, std::string& out) {
  const Progress defaults;
  Section section("progress");
  if (!p.step.empty()) section.Add("step", Quote(p.step));
  if (!p.loss.empty()) section.Add("loss", Quote(p.loss));
  if (p.startup != defaults.startup) section.Add("startup", PrintDuration(p.startup));
  if (p.stall != defaults.stall) section.Add("stall", PrintDuration(p.stall));
  if (p.on_stall != defaults.on_stall) section.Add("on_stall", "kill");
  if (p.steps) section.Add("steps", absl::StrCat(*p.steps));
  section.Flush(out);
}

void PrintPreempt(const Preempt& p, std::string& out) {
  const Preempt defaults;
  Section section("preempt");
  if (p.signal != defaults.signal) section.Add("signal", p.signal);
  if (p.lead != defaults.lead) section.Add("lead", PrintDuration(p.lead));
  section.Flush(out);
}

}  // namespace

std::string PrintJob(const JobSpec& spec) {
  const JobSpec defaults;
  std::string out = absl::StrCat("name: ", Quote(spec.name), "\n");
  PrintCommand(spec, out);
  if (spec.ranks) absl::StrAppend(&out, "ranks: ", PrintRange(*spec.ranks), "\n");
  if (spec.nodes) absl::StrAppend(&out, "nodes: ", PrintRange(*spec.nodes), "\n");
  if (spec.ranks_per_node) absl::StrAppend(&out, "ranks_per_node: ", *spec.ranks_per_node, "\n");
  PrintMesh(spec, out);
  PrintTraffic(spec, out);
  PrintResources(spec.resources, out);
  PrintWhere(spec, out);
  if (!spec.workdir.empty()) absl::StrAppend(&out, "workdir: ", QuoteExpandable(spec.workdir), "\n");
  if (!spec.setup.empty()) absl::StrAppend(&out, "setup: ", Quote(spec.setup), "\n");
  if (spec.tty) absl::StrAppend(&out, "tty: true\n");
  if (spec.takes_input) absl::StrAppend(&out, "stdin: true\n");
  PrintEnv(spec, out);
  PrintInherit(spec.inherit_env, out);
  PrintSecrets(spec, out);
  PrintCheckpoint(spec.checkpoint, out);
  PrintRestart(spec.restart, out);
  PrintComm(spec.comm, out);
  PrintProgress(spec.progress, out);
  PrintPreempt(spec.preempt, out);
  if (spec.stop_grace != defaults.stop_grace)
    absl::StrAppend(&out, "stop_grace: ", PrintDuration(spec.stop_grace), "\n");
  std::vector<std::string> elastic;
  if (spec.in_place) elastic.push_back("mode: in-place");
  if (spec.spares > 0) elastic.push_back(absl::StrCat("spares: ", spec.spares));
  if (spec.global_batch > 0) elastic.push_back(absl::StrCat("global_batch: ", spec.global_batch));
  if (spec.virtual_ranks > 0)
    elastic.push_back(absl::StrCat("determinism: bitwise, virtual_ranks: ", spec.virtual_ranks));
  if (spec.step_copies) elastic.push_back("step_copies: true");
  if (!elastic.empty()) absl::StrAppend(&out, "elastic: {", absl::StrJoin(elastic, ", "), "}\n");
  if (spec.overlap == Overlap::kAllow) absl::StrAppend(&out, "overlap: allow\n");
  if (spec.time_limit) absl::StrAppend(&out, "limits:\n  time: ", PrintDuration(*spec.time_limit), "\n");
  PrintLabels("labels", "", spec.labels, out);
  if (spec.priority != 0) absl::StrAppend(&out, "priority: ", spec.priority, "\n");
  return out;
}

std::string PrintRanksOn(const std::vector<RanksOn>& places) {
  std::vector<std::string> entries;
  for (const RanksOn& place : places) {
    const std::string slots = place.slots.empty() ? "" : absl::StrCat(" slot=", PrintRankList(place.slots));
    entries.push_back(
        absl::StrCat(Quote(PrintRankList(place.ranks)), ": ", Quote(absl::StrCat(place.host, slots))));
  }
  return absl::StrCat("{", absl::StrJoin(entries, ", "), "}");
}

std::string PrintGpuShare(int share) {
  std::string text = absl::StrFormat("0.%03d", share);
  while (text.back() == '0') text.pop_back();
  return text;
}

std::string JobHash(const JobSpec& spec) {
  std::string identity;
  PrintCommand(spec, identity);
  if (!spec.setup.empty()) absl::StrAppend(&identity, "setup: ", Quote(spec.setup), "\n");
  PrintMesh(spec, identity);
  PrintEnv(spec, identity);
  unsigned __int128 hash = (static_cast<unsigned __int128>(0x6c62272e07bb0142) << 64) | 0x62b821756295c58d;
  const unsigned __int128 prime = (static_cast<unsigned __int128>(1) << 88) | 0x13b;
  for (const char c : identity) {
    hash ^= static_cast<unsigned char>(c);
    hash *= prime;
  }
  return absl::StrFormat("%016x%016x", static_cast<uint64_t>(hash >> 64), static_cast<uint64_t>(hash));
}

}  // namespace gtrain::spec
