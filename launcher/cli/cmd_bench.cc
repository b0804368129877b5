// `gtrain bench` runs gtrain-bench as a job like any other, on the cluster that a training would run on, and
// reads the rows that its rank 0 prints. Peers are jobs of one rank that start the peer's own launcher.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "job/spec/values.h"
#include "launcher/cli/bench_job.h"
#include "launcher/cli/context.h"
#include "launcher/cli/plot.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using Words = std::vector<std::string>;
namespace fs = std::filesystem;

constexpr const char* kAllReduceSizes = "8,64,512,4KiB,32KiB,256KiB,2MiB,16MiB";
constexpr const char* kLinkSizes = "8,4KiB,64KiB,1MiB,8MiB";
constexpr const char* kCodecSize = "16000000";

struct Table {
  std::string name;
  Words columns;
  std::vector<Words> rows;
};

// Reads the output of the ranks: a line "# name name ..." and rows of that many words. Other lines are
// ignored.
Table ReadTable(const std::string& name, const Words& lines) {
  Table table{.name = name};
  for (const std::string& line : lines) {
    Words words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (!words.empty() && words[0] == "#") {
      table.columns.assign(words.begin() + 1, words.end());
    } else if (!words.empty() && words.size() == table.columns.size()) {
      table.rows.push_back(std::move(words));
    }
  }
  return table;
}

// A number where it is one.
nlohmann::json Value(const std::string& word) {
  double number = 0;
  return absl::SimpleAtod(word, &number) ? nlohmann::json(number) : nlohmann::json(word);
}

nlohmann::json AsJson(const Table& table) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Words& row : table.rows) {
    nlohmann::json one;
    for (size_t i = 0; i < row.size(); ++i) one[table.columns[i]] = Value(row[i]);
    rows.push_back(std::move(one));
  }
  return {{"name", table.name}, {"rows", std::move(rows)}};
}

// Microseconds over bytes; one curve a pair of ends.
std::vector<Curve> Curves(const std::vector<Table>& tables) {
  std::vector<Curve> curves;
  for (const Table& table : tables) {
    const auto column = [&](const char* name) {
      return static_cast<size_t>(std::find(table.columns.begin(), table.columns.end(), name) -
                                 table.columns.begin());
    };
    const size_t bytes = column("bytes"), us = column("us"), from = column("from"), to = column("to");
    for (const Words& row : table.rows) {
      double x = 0, y = 0;
      if (bytes >= row.size() || us >= row.size() || !absl::SimpleAtod(row[bytes], &x) ||
          !absl::SimpleAtod(row[us], &y) || x <= 0 || y <= 0) {
        continue;
      }
      const std::string name =
          from < row.size() && to < row.size() ? absl::StrCat(row[from], " - ", row[to]) : table.name;
      if (curves.empty() || curves.back().name != name) curves.push_back({name, {}});
      curves.back().points.emplace_back(x, y);
    }
  }
  return curves;
}

absl::StatusOr<Words> SizesInBytes(const Args& args, const char* otherwise) {
  Words sizes;
  for (absl::string_view text : absl::StrSplit(args.Get("sizes", otherwise), ',')) {
    GT_ASSIGN_OR_RETURN(const uint64_t bytes, ParseBytes(text));
    if (bytes == 0 || bytes > uint64_t{4} << 30) {
      return absl::InvalidArgumentError(absl::StrCat("--sizes: ", text, " is not between 1 byte and 4GiB"));
    }
    sizes.push_back(absl::StrCat(bytes));
  }
  return sizes;
}

absl::StatusOr<Table> RunTable(const Args& args, const BenchJob& job) {
  GT_ASSIGN_OR_RETURN(const Words lines, RunBenchJob(args, job));
  Table table = ReadTable(job.what, lines);
  if (table.rows.empty()) return absl::InternalError(absl::StrCat(job.what, ": the job printed no rows"));
  return table;
}

// The peer's launcher must not take gtrain's rank for one of its own.
Words Peer(const std::string& program, Words words) {
  Words all = {"/bin/sh", "-c",
               "unset $(env | sed -n "
               "'s/^\\(\\(OMPI_\\|PMI\\|GTRAIN_\\|RANK\\|WORLD_SIZE\\|MASTER_\\)[A-Za-z_]*\\)=.*/\\1/p'); "
               "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PMIX_MCA_psec=native; "
               "echo '# bytes us'; exec timeout 600 \"$@\"",
               "sh", program};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

// All-reduce of Open MPI, MPICH and Gloo on this machine, as far as they are there.
std::vector<BenchJob> Peers(const fs::path& folder, const Words& sizes, int ranks) {
  const fs::path programs = folder.parent_path() / "bench";
  Words with_calls;
  for (const std::string& size : sizes) {
    uint64_t bytes = 0;
    (void)absl::SimpleAtoi(size, &bytes);
    with_calls.push_back(
        absl::StrCat(size, ":", std::clamp<uint64_t>((64 << 20) / std::max<uint64_t>(bytes, 1), 7, 1000)));
  }
  const bool crowded = ranks > sysconf(_SC_NPROCESSORS_ONLN);
  std::vector<BenchJob> peers;
  const auto add = [&](const char* name, const std::string& launcher, const fs::path& program, Words words) {
    if (access(launcher.c_str(), X_OK) != 0 || access(program.c_str(), R_OK) != 0) {
      return Complain(absl::StrCat(
          "without ", name, ": ", access(launcher.c_str(), X_OK) != 0 ? launcher : program.string(),
          " is not there; in a checkout `tools/install.sh --bench` and `make build` bring it"));
    }
    words.insert(words.end(), with_calls.begin(), with_calls.end());
    peers.push_back({name, Peer(launcher, std::move(words)), 1});
  };
  const std::string n = absl::StrCat(ranks);
  Words open_mpi = {"-n", n};
  const Words place = crowded
                          ? Words{"--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"}
                          : Words{"--bind-to", "core"};
  open_mpi.insert(open_mpi.end(), place.begin(), place.end());
  const std::string out = "/dev/stdout";
  open_mpi.insert(open_mpi.end(), {programs / "allreduce_openmpi", out, "once"});
  add("Open MPI", "/usr/bin/mpirun.openmpi", programs / "allreduce_openmpi", open_mpi);
  add("MPICH", "/usr/bin/mpirun.mpich", programs / "allreduce_mpich",
      {"-n", n, programs / "allreduce_mpich", out, "once"});
  add("Gloo", "/usr/bin/python3", programs / "allreduce_gloo.py", {programs / "allreduce_gloo.py", out, n});
  return peers;
}

absl::Status WriteReports(const Args& args, const std::string& what, int ranks,
                          const std::vector<Table>& tables) {
  if (args.Has("json")) {
    nlohmann::json out = {{"bench", what}, {"ranks", ranks}, {"tables", nlohmann::json::array()}};
    for (const Table& table : tables) out["tables"].push_back(AsJson(table));
    GT_RETURN_IF_ERROR(WriteFileDurable(args.Get("json"), out.dump(2) + "\n", 0644));
  }
  if (args.Has("svg")) {
    GT_RETURN_IF_ERROR(WriteFileDurable(
        args.Get("svg"), PlotSvg(absl::StrCat(what, ", ", ranks, " ranks"), "microseconds", Curves(tables)),
        0644));
  }
  return absl::OkStatus();
}

// Where both have a row of the same size.
void PrintRatios(const std::vector<Table>& tables) {
  for (size_t peer = 1; peer < tables.size(); ++peer) {
    std::string out = absl::StrCat(tables[peer].name, " / gtrain:");
    for (const Words& row : tables[0].rows) {
      for (const Words& other : tables[peer].rows) {
        double ours = 0, theirs = 0, bytes = 0;
        if (row[0] != other[0] || !absl::SimpleAtod(row[1], &ours) || !absl::SimpleAtod(other[1], &theirs) ||
            !absl::SimpleAtod(row[0], &bytes) || ours <= 0) {
          continue;
        }
        absl::StrAppendFormat(&out, "  %s %.2f", PrintBytes(static_cast<uint64_t>(bytes)), theirs / ours);
      }
    }
    (void)Print(out + "\n");
  }
}

absl::Status Measure(const Args& args) {
  const std::string& what = args.words[0];
  GT_ASSIGN_OR_RETURN(const fs::path folder, OwnFolder());
  const std::string program = folder / "gtrain-bench";
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> given, args.Int("ranks", 1, 100'000));
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> nodes, args.Int("nodes", 1, 100'000));
  const int64_t ranks = given.value_or(nodes.value_or(what == "codec" ? 1 : 2));
  BenchJob ours{.what = "gtrain", .command = {}, .ranks = static_cast<int>(ranks), .nodes = nodes};
  Words sizes;
  if (what == "allreduce") {
    GT_ASSIGN_OR_RETURN(sizes, SizesInBytes(args, kAllReduceSizes));
    ours.command = {program, what, args.Get("dtype", "float32"), args.Get("memory", "allocate")};
  } else if (what == "link") {
    GT_ASSIGN_OR_RETURN(sizes, SizesInBytes(args, kLinkSizes));
    ours.command = {program, what};
  } else if (what == "codec") {
    GT_ASSIGN_OR_RETURN(sizes, SizesInBytes(args, kCodecSize));
    ours.command = {program, what};
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("bench: no bench ", spec::Shown(what), "; allreduce, link and codec are"));
  }
  const std::string memory = args.Get("memory", "allocate");
  if (memory != "allocate" && memory != "private") {
    return absl::InvalidArgumentError(
        absl::StrCat("--memory ", spec::Shown(memory), ": allocate or private"));
  }
  if (args.Has("peers") && what != "allreduce") {
    return absl::InvalidArgumentError("--peers: only allreduce has peers");
  }
  ours.command.insert(ours.command.end(), sizes.begin(), sizes.end());
  std::vector<BenchJob> all = {std::move(ours)};
  if (args.Has("peers")) {
    GT_ASSIGN_OR_RETURN(const auto backend, ChosenBackend(args));
    if (!backend->on_this_machine())
      return absl::InvalidArgumentError("--peers: they run on this machine; leave --context out");
    if (nodes) return absl::InvalidArgumentError("--peers: they run on this machine; leave --nodes out");
    for (BenchJob& peer : Peers(folder, sizes, all[0].ranks)) all.push_back(std::move(peer));
  }
  std::vector<Table> tables;
  for (const BenchJob& job : all) {
    GT_ASSIGN_OR_RETURN(Table table, RunTable(args, job));
    tables.push_back(std::move(table));
  }
  PrintRatios(tables);
  return WriteReports(args, what, all[0].ranks, tables);
}

int RunBench(const Args& args) {
  const absl::Status status = Measure(args);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb BenchVerb() {
  Verb verb;
  verb.name = "bench";
  verb.summary = "Measure collectives, links and codecs on your cluster";
  verb.usage = "[flags] allreduce|link|codec";
  verb.details =
      "Runs as a job where a training would run. A call's time is that of its slowest rank; us is the median "
      "of\n"
      "many calls. algbw is bytes over time; busbw is what a link must carry for it, 2(n-1)/n as much. link\n"
      "measures half of a way there and back between each two machines, or ranks where there is one machine; "
      "codec\n"
      "compresses that many floats on one thread, with error feedback.\n\n"
      "  gtrain bench allreduce -n 8\n"
      "  gtrain bench allreduce -n 4 --sizes 8,1MiB,64MiB --svg plot.svg --json report.json\n"
      "  gtrain bench allreduce -n 2 --peers              Open MPI, MPICH and Gloo beside it, on this "
      "machine\n"
      "  gtrain bench link --nodes 4 -n 4 --context prod";
  verb.flags = {{"ranks", 'n', "N", "ranks; default 2, of codec 1, with --nodes one on each"},
                {"nodes", '\0', "N", "spread them over N nodes, equally many on each"},
                {"sizes", '\0', "LIST", "bytes, as 8,4KiB,16MiB; of codec: floats"},
                {"dtype", '\0', "NAME", "of allreduce; default float32"},
                {"memory", '\0', "KIND", "of allreduce: allocate (the communicator's, default) or private"},
                {"env", '\0', "NAME=VALUE", "for the ranks, as GTRAIN_COMM_ALGO=ring", true},
                {"peers", '\0', "", "of allreduce: what else is installed here, too"},
                {"json", '\0', "FILE", "write the rows"},
                {"svg", '\0', "FILE", "write a plot"},
                {"run-dir", '\0', "DIR", "logs go to DIR/<job id>-<cluster>; default ./gtrain-runs"}};
  verb.flags.push_back(ContextFlag());
  verb.actions = {"allreduce", "link", "codec"};
  verb.words_min = 1;
  verb.words_max = 1;
  verb.run = RunBench;
  return verb;
}

}  // namespace gtrain::cli
