// gtrain-keeper --dir <state directory> --job <id> [--idle-exit-ms N] [--longest-wait-ms N]
//               [--log-max BYTES] [--log-burst BYTES] [--log-rate BYTES]
//   is started by the agent; people never run it. See docs/protocols/keeper.md.
// gtrain-keeper --stacks PID
//   prints what `gtrain stack` shows of a rank.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "runtime/keeper/keeper.h"
#include "runtime/keeper/posix.h"
#include "runtime/keeper/stacks.h"

int main(int argc, char** argv) {
  if (argc == 3 && strcmp(argv[1], "--stacks") == 0) return gtrain::keeper::StacksMain(atoi(argv[2]));
  gtrain::keeper::KeeperOptions options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const char* value = argv[i + 1];
    if (strcmp(argv[i], "--dir") == 0) options.dir = value;
    if (strcmp(argv[i], "--job") == 0) options.job = value;
    if (strcmp(argv[i], "--idle-exit-ms") == 0) options.idle_exit_ms = atoll(value);
    if (strcmp(argv[i], "--longest-wait-ms") == 0) options.longest_wait_ms = atoll(value);
    if (strcmp(argv[i], "--log-max") == 0) options.log_limits.file_bytes_max = strtoull(value, nullptr, 10);
    if (strcmp(argv[i], "--log-burst") == 0) options.log_limits.burst_bytes = strtoull(value, nullptr, 10);
    if (strcmp(argv[i], "--log-rate") == 0)
      options.log_limits.bytes_per_second = strtoull(value, nullptr, 10);
  }
  if (options.dir.empty() || options.job.empty() || argc % 2 == 0) {
    fprintf(stderr, "gtrain-keeper is started by `gtrain agent`: --dir <state directory> --job <id>\n");
    return 2;
  }
  prctl(PR_SET_DUMPABLE, 0);  // ranks run as the same user: fault X6
  prctl(PR_SET_NAME, gtrain::keeper::kKeeperName);
  gtrain::keeper::RaiseFileLimit();
  gtrain::keeper::Keeper keeper(std::move(options));
  if (!keeper.Start()) return 1;
  return keeper.Run();
}
