// `gtrain agent`: offers this machine to a cluster.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iostream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/daemon.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "job/plan/by_topology.h"
#include "job/spec/values.h"
#include "launcher/cli/terminal.h"
#include "launcher/cli/verbs.h"
#include "launcher/exec/local_services.h"
#include "runtime/agent/agent.h"
#include "runtime/control/cluster_dir.h"
#include "topology/import.h"

namespace gtrain::cli {
namespace {

absl::Status ReadLabels(const Args& args, agent::AgentOptions& options) {
  for (const std::string& label : args.All("label")) {
    const size_t equals = label.find('=');
    if (equals == std::string::npos || equals == 0) {
      return absl::InvalidArgumentError(absl::StrCat("--label ", spec::Shown(label), " must be KEY=VALUE"));
    }
    const std::string key = label.substr(0, equals), value = label.substr(equals + 1);
    if (key == plan::kFabricLabel &&
        !topology::ImportPaths(absl::StrCat("here ", value), key, topology::ShapeOfOneSlot()).ok())
      return absl::InvalidArgumentError(absl::StrCat(
          "--label ", spec::Shown(label), ": a fabric is a path such as /zone/rack, the widest first, ",
          "1 to 8 places without spaces"));
    options.labels[key] = value;
  }
  return absl::OkStatus();
}

// Never from the command line, which every user of the machine can read.
absl::StatusOr<std::string> JoinToken(const Args& args) {
  constexpr size_t kTokenBytesMax = 4 << 10;
  const std::string from = args.Get("join");
  if (net::ParseJoinToken(from).ok()) {
    return absl::InvalidArgumentError(
        "a token on the command line can be read by every user of this machine, so this one should be "
        "revoked "
        "(gtrain token revoke ID). Write it to a file that only you can read, --join FILE; or pipe it: "
        "--join -; "
        "or set GTRAIN_JOIN_TOKEN");
  }
  std::string token;
  if (from.empty()) {
    const char* set = std::getenv("GTRAIN_JOIN_TOKEN");
    token = set == nullptr ? "" : set;
  } else if (from == "-") {
    token.resize(kTokenBytesMax);
    std::cin.getline(token.data(), static_cast<std::streamsize>(token.size()));
    token.resize(std::strlen(token.data()));
  } else {
    GT_ASSIGN_OR_RETURN(token, ReadFile(from, kTokenBytesMax));
  }
  absl::StripAsciiWhitespace(&token);
  if (!(from.empty() && token.empty()) && !net::ParseJoinToken(token).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(from.empty()  ? "GTRAIN_JOIN_TOKEN"
                                                   : from == "-" ? "standard input"
                                                                 : from,
                                                   " holds no join token; `gtrain token create` prints one"));
  }
  return token;
}

// "4", or "7:H100 MIG 1g.10gb".
absl::Status ReadFakeGpus(const Args& args, agent::AgentOptions& options) {
  if (!args.Has("fake-gpus")) return absl::OkStatus();
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(args.Get("fake-gpus"), absl::MaxSplits(':', 1));
  if (!absl::SimpleAtoi(parts.first, &options.fake_gpus) || options.fake_gpus < 0 || options.fake_gpus > 1024)
    return absl::InvalidArgumentError(
        "--fake-gpus must be a whole number from 0 to 1024, or that and :MODEL");
  if (!parts.second.empty()) options.fake_gpu_model = parts.second;
  return absl::OkStatus();
}

absl::StatusOr<agent::AgentOptions> OptionsOf(const Args& args) {
  agent::AgentOptions options;
  options.state_dir = args.Get("dir");
  if (options.state_dir.empty()) {
    GT_ASSIGN_OR_RETURN(options.state_dir, net::DefaultClusterDir("agent"));
  }
  GT_ASSIGN_OR_RETURN(options.join_token, JoinToken(args));
  options.heads = args.All("head");
  options.address = args.Get("address");
  options.hostname = args.Get("hostname");
  GT_RETURN_IF_ERROR(ReadLabels(args, options));
  GT_RETURN_IF_ERROR(ReadFakeGpus(args, options));
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> cpus, args.Int("cpus", 1, 8192));
  options.cpus = static_cast<int>(cpus.value_or(0));
  if (args.Has("near-max")) {
    GT_ASSIGN_OR_RETURN(options.near_bytes_max, ParseBytes(args.Get("near-max")));
  }
  options.notices.source = args.Has("notices") ? args.Get("notices") : args.Has("local") ? "off" : "auto";
  options.notices.url = args.Get("notices-url");
  GT_ASSIGN_OR_RETURN(const std::optional<int64_t> lead, args.Int("gcp-notice", 0, 3600));
  options.notices.gcp_lead = absl::Seconds(lead.value_or(0));
  return options;
}

int RunAgent(const Args& args) {
  SetLogTag("agent");
  HideFromOtherProcesses();
  absl::StatusOr<agent::AgentOptions> options = OptionsOf(args);
  if (!options.ok()) return Report(options.status());
  const absl::Status root =
      agent::RootMayRunRanks(geteuid() == 0, args.Has("local"), InContainer(), args.Has("allow-root"));
  if (!root.ok()) return Report(root);
  if (const absl::Status files = EnsureFileLimit(kDaemonFilesMin); !files.ok()) return Report(files);
  if (const absl::Status left = EnsureProcessesLeft(kDaemonProcessesMin); !left.ok()) return Report(left);
  const absl::Status status =
      args.Has("local") ? exec::ServeLocalAgent(*std::move(options)) : agent::RunAgent(*options);
  return status.ok() ? kDone : Report(status);
}

}  // namespace

Verb AgentVerb() {
  Verb verb;
  verb.name = "agent";
  verb.summary = "Offer this machine to a cluster";
  verb.usage = "[--join FILE] [flags]";
  verb.details =
      "  gtrain agent --join token.txt                    the token of `gtrain token create`; once\n"
      "  ... | gtrain agent --join -                      the same, from standard input\n"
      "  GTRAIN_JOIN_TOKEN=... gtrain agent               the same, from the environment\n"
      "  gtrain agent                                     later starts\n"
      "  gtrain agent --head 10.0.0.2:7070                the head has moved there, or may\n"
      "  gtrain agent --label pool=spot --cpus 8\n\n"
      "SIGTERM ends the agent, not its ranks: the next agent started in the same directory takes them over.\n"
      "It has to be there within 10 s; then the head counts the machine as dead, and its jobs go on\n"
      "elsewhere. While ranks of the same job on other machines make steps, or where no other machine could\n"
      "be used, it has 60 s: until then the machine is suspect and gets no new ranks.";
  verb.flags = {
      {"join", '\0', "FILE", "join a cluster with the token in FILE; -: standard input"},
      {"head", '\0', "HOST:PORT", "where the head is now, or may be, too; it is remembered; repeatable",
       true},
      {"dir", '\0', "DIR", "keys and state; default $XDG_STATE_HOME/gtrain/agent"},
      {"address", '\0', "ADDRESS", "data-plane address; default: the one that reaches the head"},
      {"hostname", '\0', "NAME", "name shown to people; default: the machine's"},
      {"label", '\0', "KEY=VALUE",
       "for `where: {labels: ...}`; repeatable. fabric=/zone/rack says what the machine hangs on, for "
       "placement",
       true},
      {"cpus", '\0', "N", "offer that many hardware threads; default: those this process may use"},
      {"near-max", '\0', "SIZE",
       "what copies of checkpoints (`near:` of jobs) may take here; default: a quarter of the memory; 0: "
       "none"},
      {"notices", '\0', "SOURCE",
       "who says that this machine will be taken away: auto (default), off, aws, gcp, azure, file:PATH"},
      {"notices-url", '\0', "URL", "of the metadata service, instead of the cloud's own"},
      {"gcp-notice", '\0', "SECONDS", "--preemption-notice-duration this machine was made with; default 0"},
      {"allow-root", '\0', "", "let root run ranks as root, outside a container too"},
      {"fake-gpus", '\0', "N[:MODEL]", "tests: pretend to have N GPUs"},
      {"local", '\0', "", "the agent of the user's own local cluster (used by launch)"}};
  verb.run = RunAgent;
  return verb;
}

}  // namespace gtrain::cli
