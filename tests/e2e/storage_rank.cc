// A rank whose storage is what the test says. Writes its environment of gtrain's checkpoints to
// DIR/env.GENERATION.RANK. While DIR/away exists, rank 0 says that the storage cannot be read and ends with
// exit code 1. Otherwise it reports DIR/manifest, if that exists, as a committed checkpoint, and all wait for
// DIR/go or the end of their generation (exit code 75).
//   e2e_storage_rank DIR
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "runtime/port/session.h"

extern char** environ;

namespace {

constexpr int kRunAgain = 75;

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

int Ended(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return absl::IsUnavailable(status) ? kRunAgain : 1;
}

// Whole or not there.
void WriteEnvironment(const std::string& path) {
  std::ofstream out(path + ".new");
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "GTRAIN_", 7) == 0) out << *entry << "\n";
  }
  out.close();
  std::rename((path + ".new").c_str(), path.c_str());
}

int Run(const std::string& dir) {
  auto joined = gtrain::Session::Join();
  if (!joined.ok()) return Ended(joined.status());
  gtrain::Session& session = **joined;
  WriteEnvironment(dir + "/env." + std::to_string(session.generation()) + "." +
                   std::to_string(session.rank()));
  if (session.rank() == 0 && Exists(dir + "/away")) {
    session.ReportNote(gtrain::kNoteStorage, dir + ": Input/output error");
    return 1;
  }
  if (session.rank() == 0) session.ReportNote(gtrain::kNoteStorage, "");  // as a Checkpointer does
  std::string manifest;
  if (session.rank() == 0 && std::getline(std::ifstream(dir + "/manifest"), manifest))
    session.ReportCheckpoint(static_cast<int64_t>(session.generation()), manifest, "");
  while (!Exists(dir + "/go")) {
    if (const absl::Status alive = session.Alive(); !alive.ok()) return Ended(alive);
    poll(nullptr, 0, 20);  // milliseconds, between two looks
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: e2e_storage_rank DIR\n");
    return 2;
  }
  return Run(argv[1]);
}
