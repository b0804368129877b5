// gtrain-ckpt-dump DIR: what a checkpoint directory holds, every byte verified.
#include <cstdio>
#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/units.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/store/directory_store.h"

namespace gtrain::ckpt {
namespace {

std::string Show(const Manifest& m) {
  uint64_t bytes = 0;
  for (const ShardFile& file : m.files) bytes += file.bytes;
  return absl::StrCat("step ", m.id.step, "  epoch ", m.id.epoch, "  timeline ", m.id.timeline,
                      "  generation ", m.id.generation, "  job ", m.owner.job.empty() ? "-" : m.owner.job,
                      "  ", m.world_size, " ranks  ", m.tensors.size(), " tensors  ", PrintBytes(bytes),
                      m.finite() ? "" : "  NOT FINITE");
}

// Whether it is intact or no checkpoint at all.
bool DumpOne(port::BlobStore* store, const SaveId& id, bool verbose) {
  const auto read = ReadManifest(store, id);
  if (!read.ok()) {
    std::printf("%s  DAMAGED: %s\n", AttemptName(id).c_str(), std::string(read.status().message()).c_str());
    return false;
  }
  if (const auto* marker = std::get_if<AbortMarker>(&*read)) {
    std::printf("%s  aborted: %s\n", AttemptName(id).c_str(), marker->reason.c_str());
    return true;
  }
  const Manifest& manifest = std::get<Manifest>(*read);
  absl::Status intact;
  for (int rank = 0; rank < manifest.world_size && intact.ok(); ++rank)
    intact = VerifyShard(store, manifest, rank);
  std::printf("%s  %s: %s\n", AttemptName(id).c_str(), intact.ok() ? "intact" : "DAMAGED",
              Show(manifest).c_str());
  if (!intact.ok()) std::printf("    %s\n", std::string(intact.message()).c_str());
  if (!verbose) return intact.ok();
  for (const GlobalTensor& t : manifest.tensors) {
    std::printf("    %s  %s\n", t.name.c_str(),
                t.layout == Layout::kPerRank
                    ? "per rank"
                    : absl::StrCat(DTypeName(t.dtype), "[", absl::StrJoin(t.shape, ","), "]").c_str());
  }
  return intact.ok();
}

int Dump(const std::string& folder, bool verbose) {
  auto store = OpenDirectoryStore(folder);
  const auto ids = store.ok() ? ListManifests(store->get()) : store.status();
  if (!ids.ok()) {
    std::fprintf(stderr, "gtrain-ckpt-dump: %s\n", std::string(ids.status().message()).c_str());
    return 1;
  }
  bool good = true;
  for (const SaveId& id : *ids) good = DumpOne(store->get(), id, verbose) && good;
  if (ids->empty()) std::printf("no checkpoints in %s\n", folder.c_str());
  return good ? 0 : 1;
}

}  // namespace
}  // namespace gtrain::ckpt

int main(int argc, char** argv) {
  const bool verbose = argc == 3 && std::string(argv[1]) == "-v";
  if (argc != (verbose ? 3 : 2) || argv[argc - 1][0] == '-') {
    std::fprintf(stderr,
                 "usage: gtrain-ckpt-dump [-v] DIR\n"
                 "Lists the checkpoints of a directory, newest first, and verifies every byte; -v names the\n"
                 "tensors. Exit status 1 if one is damaged.\n");
    return 2;
  }
  return gtrain::ckpt::Dump(argv[argc - 1], verbose);
}
