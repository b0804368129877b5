// One rank of bench_launch: registers with its keeper, exchanges its address with all ranks, passes the entry
// barrier of the generation, ends.
#include <cstdio>

#include "runtime/port/session.h"

int main() {
  const auto session = gtrain::Session::Join();
  if (session.ok()) return 0;
  std::fprintf(stderr, "launch_rank: %s\n", session.status().ToString().c_str());
  return 1;
}
