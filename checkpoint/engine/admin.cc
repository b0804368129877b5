#include "checkpoint/engine/admin.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <variant>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/leftovers.h"
#include "checkpoint/engine/parts.h"
#include "checkpoint/engine/retain.h"
#include "checkpoint/engine/shard_io.h"
#include "checkpoint/format/elements.h"
#include "checkpoint/format/safetensors.h"

namespace gtrain::ckpt {
namespace {

constexpr uint64_t kTogetherBytes = 64 << 20;  // read together; a larger tensor alone

std::string ShapeText(const GlobalTensor& tensor) {
  return absl::StrCat(DTypeName(tensor.dtype), "[", absl::StrJoin(tensor.shape, ","), "]");
}

// A registration of every tensor of `manifest` as one rank without any others would hold it: whole.
std::vector<Registered> WholeTensors(const Manifest& manifest) {
  std::vector<Registered> out;
  for (const GlobalTensor& t : manifest.tensors) {
    if (t.layout == Layout::kPerRank) continue;
    out.push_back({{.name = t.name, .dtype = t.dtype, .shape = t.shape},
                   *ElementCount(t.shape, t.dtype) * DTypeSize(t.dtype)});
  }
  return out;
}

// Whole tensors of one checkpoint out of verified chunks.
class TensorReader {
 public:
  TensorReader(port::BlobStore* store, const Manifest& manifest)
      : store_(store),
        manifest_(manifest),
        tensors_(WholeTensors(manifest)),
        planner_(&manifest_, tensors_, 1) {}

  const std::vector<Registered>& tensors() const { return tensors_; }

  // The bytes of tensors [first, last), one after the other.
  absl::StatusOr<std::string> Read(size_t first, size_t last) {
    std::vector<uint64_t> offsets;
    uint64_t bytes = 0;
    for (size_t i = first; i < last; ++i) {
      offsets.push_back(bytes);
      bytes += tensors_[i].bytes;
    }
    std::string out(bytes, '\0');
    GT_RETURN_IF_ERROR(LoadParts(store_, planner_.FilesFor(0, first, last), &manifest_));
    GT_ASSIGN_OR_RETURN(const LoadPlan plan, planner_.Plan(0, first, last));
    GT_RETURN_IF_ERROR(CheckFiles(plan));
    GT_RETURN_IF_ERROR(LoadShards(
                           store_, nullptr, nullptr, manifest_, plan, [] { return absl::OkStatus(); },
                           [&](size_t i) { return out.data() + offsets[i - first]; })
                           .status());
    return out;
  }

  absl::StatusOr<std::string> Read(absl::string_view name) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].tensor.name == name) return Read(i, i + 1);
    }
    return absl::NotFoundError(absl::StrCat("the checkpoint has no tensor \"", name, "\""));
  }

 private:
  // The lengths of the files that `plan` reads, of each once: they never change.
  absl::Status CheckFiles(const LoadPlan& plan) {
    const int files = static_cast<int>(manifest_.files.size());
    for (const FileRead& read : plan.reads) {
      if (!checked_.insert(read.file).second) continue;
      GT_RETURN_IF_ERROR(CheckLengths(store_, nullptr, manifest_, read.file, files));
    }
    return absl::OkStatus();
  }

  port::BlobStore* const store_;
  Manifest manifest_;  // parts are added when something is read
  const std::vector<Registered> tensors_;
  LoadPlanner planner_;
  std::set<int> checked_;
};

std::string ElementsDiffer(absl::string_view a, absl::string_view b, DType dtype) {
  const size_t width = DTypeSize(dtype), count = a.size() / width;
  size_t differ = 0;
  double most = 0;
  uint64_t most_of_integers = 0;
  bool integers = false;
  for (size_t i = 0; i < count; ++i) {
    if (std::memcmp(a.data() + i * width, b.data() + i * width, width) == 0) continue;
    ++differ;
    if (const auto exact = IntegersDiffer(a, b, dtype, i)) {
      integers = true;
      most_of_integers = std::max(most_of_integers, *exact);
      continue;
    }
    const double by = std::abs(ElementAt(a, dtype, i) - ElementAt(b, dtype, i));
    if (std::isnan(by) || by > most) most = by;  // nothing is more than NaN: it stays
  }
  return absl::StrCat("differs in ", differ, " of ", count, " elements, at most by ",
                      integers ? absl::StrCat(most_of_integers) : absl::StrCat(most));
}

// Where the tensors of a checkpoint are in what a TensorReader reads.
struct TensorPlace {
  const GlobalTensor* tensor = nullptr;
  size_t index = 0;  // meaningless for state of single ranks
};

std::map<absl::string_view, TensorPlace> PlacesOf(const Manifest& manifest) {
  std::map<absl::string_view, TensorPlace> places;
  size_t index = 0;
  for (const GlobalTensor& tensor : manifest.tensors) {
    places[tensor.name] = {&tensor, index};
    if (tensor.layout != Layout::kPerRank) ++index;
  }
  return places;
}

// The difference between `in_a` and `in_b` that shows without reading them.
std::optional<std::string> KindsDiffer(const GlobalTensor& in_a, const GlobalTensor& in_b) {
  const bool of_ranks_a = in_a.layout == Layout::kPerRank, of_ranks_b = in_b.layout == Layout::kPerRank;
  if (of_ranks_a == of_ranks_b && in_a.dtype == in_b.dtype && in_a.shape == in_b.shape) return std::nullopt;
  return absl::StrCat(ShapeText(in_a), " and ", ShapeText(in_b));
}

// Tensors that both have and that lie one after the other in both, read together: small ones share chunks.
struct Batch {
  size_t first_a = 0, first_b = 0, count = 0;
  uint64_t bytes = 0;
};

absl::Status CompareBatch(const Batch& batch, TensorReader* read_a, TensorReader* read_b,
                          std::vector<TensorDifference>* differences) {
  GT_ASSIGN_OR_RETURN(const std::string all_a, read_a->Read(batch.first_a, batch.first_a + batch.count));
  GT_ASSIGN_OR_RETURN(const std::string all_b, read_b->Read(batch.first_b, batch.first_b + batch.count));
  uint64_t begin = 0;
  for (size_t i = batch.first_a; i < batch.first_a + batch.count; ++i) {
    const Registered& r = read_a->tensors()[i];
    const auto a = absl::string_view(all_a).substr(begin, r.bytes);
    const auto b = absl::string_view(all_b).substr(begin, r.bytes);
    begin += r.bytes;
    if (a != b) differences->push_back({r.tensor.name, ElementsDiffer(a, b, r.tensor.dtype)});
  }
  return absl::OkStatus();
}

// A shard that an interrupted copy left is not put again: VerifyShard compares every byte of it.
absl::Status CopyShard(port::BlobStore* from, const Manifest& manifest, const ShardFile& file,
                       port::BlobStore* to, const Progress& progress) {
  const std::string key = AttemptKey(manifest.id, file.name);
  const absl::Status there = to->Size(key).status();
  if (!absl::IsNotFound(there)) return there;
  std::vector<char> buffer;
  absl::string_view chunk;
  std::optional<uint64_t> held;
  const auto source = [&](uint64_t offset) -> absl::StatusOr<absl::string_view> {
    const uint64_t index = offset / kChunkBytes;
    if (held != index) {
      GT_RETURN_IF_ERROR(progress(offset, file.bytes));
      held.reset();
      GT_ASSIGN_OR_RETURN(chunk, ReadChunk(from, manifest.id, file, index, &buffer));
      held = index;
    }
    return chunk.substr(offset - index * kChunkBytes);
  };
  const absl::Status put = to->PutStream(key, file.bytes, source);
  return absl::IsAlreadyExists(put) ? absl::OkStatus() : put;
}

absl::Status AddIfOld(port::BlobStore* store, const std::string& key, absl::Duration age,
                      std::vector<std::string>* keys) {
  const absl::StatusOr<absl::Duration> unchanged = store->Unchanged(key);
  if (absl::IsNotFound(unchanged.status())) return absl::OkStatus();  // gone meanwhile
  GT_RETURN_IF_ERROR(unchanged.status());
  if (*unchanged >= age) keys->push_back(key);
  return absl::OkStatus();
}

std::vector<SaveId> PinnedWithoutManifest(const StoredCheckpoints& stored) {
  std::set<SaveId> decided(stored.aborted.begin(), stored.aborted.end());
  decided.insert(stored.damaged.begin(), stored.damaged.end());
  for (const Retained& c : stored.committed) decided.insert(c.id);
  std::vector<SaveId> found;
  for (const SaveId& id : stored.pinned) {
    if (!decided.contains(id)) found.push_back(id);
  }
  return found;
}

absl::Status WriteAll(int fd, absl::string_view data, const std::string& path) {
  while (!data.empty()) {
    const ssize_t wrote = write(fd, data.data(), data.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return ErrnoStatus(errno, absl::StrCat("write ", path));
    data.remove_prefix(static_cast<size_t>(wrote));
  }
  return absl::OkStatus();
}

// The texts of the parts as they are: the copied root names them.
absl::Status CopyParts(port::BlobStore* from, const Manifest& manifest, port::BlobStore* to) {
  for (size_t i = 0; i < manifest.parts.size(); ++i) {
    const std::string key =
        AttemptKey(manifest.id, PartName(static_cast<int>(i), static_cast<int>(manifest.parts.size())));
    GT_ASSIGN_OR_RETURN(const std::string text, from->Get(key, kPartBytesMax));
    const absl::Status put = to->PutIfAbsent(key, text);
    if (!put.ok() && !absl::IsAlreadyExists(put)) return put;
    // Left by a copy that was cut off, or read from a storage that changed meanwhile.
    GT_ASSIGN_OR_RETURN(const std::string there, to->Get(key, kPartBytesMax));
    Manifest again = manifest;
    GT_RETURN_IF_ERROR(AddParts({{static_cast<int>(i), there}}, &again));
  }
  return absl::OkStatus();
}

absl::StatusOr<Manifest> FindListed(port::BlobStore* store, absl::string_view which) {
  int64_t step = 0;
  const bool latest = which == "latest", by_step = absl::SimpleAtoi(which, &step);
  const std::optional<SaveId> exact = ParseAttemptName(which);
  if (!latest && !by_step && !exact) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", which, "\" is neither \"latest\", a step nor the name of an attempt"));
  }
  GT_ASSIGN_OR_RETURN(const std::vector<SaveId> ids, ListManifests(store));
  std::vector<int64_t> steps;
  for (const SaveId& id : ids) {
    const bool wanted = latest || (by_step && id.step == step) || (exact && id == *exact);
    if (!wanted) {
      steps.push_back(id.step);
      continue;
    }
    auto read = ReadManifest(store, id);
    if (!latest && absl::IsNotFound(read.status())) continue;  // deleted since it was listed
    // A bad moment of the storage must not make an older one the latest.
    if (!read.ok() && !(latest && absl::IsDataLoss(read.status()))) return read.status();
    if (auto* manifest = read.ok() ? std::get_if<Manifest>(&*read) : nullptr) return std::move(*manifest);
  }
  return absl::NotFoundError(
      absl::StrCat(store->Describe(), " has no committed checkpoint ", latest ? "at all" : std::string(which),
                   steps.empty() ? "" : "; it has steps ", absl::StrJoin(steps, ", ")));
}

}  // namespace

uint64_t BytesOf(const Manifest& manifest) { return manifest.file_bytes(); }

absl::StatusOr<Manifest> FindCheckpoint(port::BlobStore* store, absl::string_view which) {
  absl::StatusOr<Manifest> found = FindListed(store, which);
  if (which == "latest" && absl::IsNotFound(found.status())) return FindListed(store, which);
  return found;
}

absl::StatusOr<bool> IsGone(port::BlobStore* store, const SaveId& id) {
  const absl::Status size = store->Size(ManifestKey(id)).status();
  if (absl::IsNotFound(size)) return true;
  GT_RETURN_IF_ERROR(size);
  return false;
}

absl::Status VerifyAll(port::BlobStore* store, const Manifest& root, const Progress& progress) {
  GT_ASSIGN_OR_RETURN(const Manifest manifest, WithParts(store, root));
  const uint64_t total = BytesOf(manifest);
  uint64_t done = 0;
  for (int rank = 0; rank < manifest.world_size; ++rank) {
    GT_RETURN_IF_ERROR(progress(done, total));
    GT_RETURN_IF_ERROR(VerifyShard(store, manifest, rank));
    done += manifest.files[rank].bytes;
  }
  return progress(total, total);
}

absl::StatusOr<std::string> LoadTensor(port::BlobStore* store, const Manifest& manifest,
                                       absl::string_view name) {
  return TensorReader(store, manifest).Read(name);
}

absl::StatusOr<std::vector<TensorDifference>> Compare(port::BlobStore* store_a, const Manifest& a,
                                                      port::BlobStore* store_b, const Manifest& b,
                                                      const Progress& progress) {
  const std::map<absl::string_view, TensorPlace> in_a = PlacesOf(a), in_b = PlacesOf(b);
  std::vector<TensorDifference> differences;
  for (const GlobalTensor& tensor : b.tensors) {
    if (!in_a.contains(tensor.name)) differences.push_back({tensor.name, "only in the second"});
  }
  TensorReader read_a(store_a, a), read_b(store_b, b);
  std::vector<Batch> batches;
  for (const GlobalTensor& tensor : a.tensors) {
    const auto there = in_b.find(tensor.name);
    if (there == in_b.end()) {
      differences.push_back({tensor.name, "only in the first"});
    } else if (auto kinds = KindsDiffer(tensor, *there->second.tensor)) {
      differences.push_back({tensor.name, *std::move(kinds)});
    } else if (tensor.layout != Layout::kPerRank) {
      const size_t at_a = in_a.at(tensor.name).index, at_b = there->second.index;
      const uint64_t bytes = read_a.tensors()[at_a].bytes;
      Batch* last = batches.empty() ? nullptr : &batches.back();
      const bool goes_on = last != nullptr && last->first_a + last->count == at_a &&
                           last->first_b + last->count == at_b && last->bytes + bytes <= kTogetherBytes;
      if (!goes_on) last = &batches.emplace_back(Batch{.first_a = at_a, .first_b = at_b});
      ++last->count;
      last->bytes += bytes;
    }
  }
  uint64_t done = 0;
  for (const Batch& batch : batches) {
    GT_RETURN_IF_ERROR(progress(done++, batches.size()));
    GT_RETURN_IF_ERROR(CompareBatch(batch, &read_a, &read_b, &differences));
  }
  GT_RETURN_IF_ERROR(progress(done, batches.size()));
  absl::c_sort(differences, [](const auto& x, const auto& y) { return x.name < y.name; });
  return differences;
}

absl::Status CopyCheckpoint(port::BlobStore* from, const Manifest& root, port::BlobStore* to,
                            const Progress& progress) {
  GT_ASSIGN_OR_RETURN(const Manifest manifest, WithParts(from, root));
  if (to->Size(ManifestKey(manifest.id)).ok()) {
    return absl::AlreadyExistsError(
        absl::StrCat(to->Describe(), " has ", AttemptName(manifest.id), " already"));
  }
  // First of all: a job that runs in the target takes whatever is older than what it keeps, and a copy mostly
  // is.
  GT_RETURN_IF_ERROR(Pin(to, manifest.id));
  const uint64_t total = BytesOf(manifest);
  uint64_t done = 0;
  for (const ShardFile& file : manifest.files) {
    GT_RETURN_IF_ERROR(CopyShard(from, manifest, file, to, [&](uint64_t of_file, uint64_t) {
      return progress(done + of_file, total);
    }));
    done += file.bytes;
    GT_RETURN_IF_ERROR(progress(done, total));
  }
  for (int rank = 0; rank < manifest.world_size; ++rank) GT_RETURN_IF_ERROR(VerifyShard(to, manifest, rank));
  GT_RETURN_IF_ERROR(CopyParts(from, manifest, to));
  // A pin that a copy left long ago may have been collected between.
  GT_RETURN_IF_ERROR(Pin(to, manifest.id));
  return to->PutIfAbsent(ManifestKey(manifest.id), Print(manifest));
}

absl::Status ExportSafetensors(port::BlobStore* store, const Manifest& manifest, const std::string& path,
                               const Progress& progress, std::vector<std::string>* left_out) {
  TensorReader reader(store, manifest);
  std::vector<TensorEntry> entries;
  uint64_t total = 0;
  for (const Registered& r : reader.tensors()) {
    entries.push_back({r.tensor.name, r.tensor.dtype, r.tensor.shape, total, total + r.bytes});
    total += r.bytes;
  }
  for (const GlobalTensor& tensor : manifest.tensors) {
    if (tensor.layout == Layout::kPerRank) left_out->push_back(tensor.name);
  }
  if (access(path.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(path, " exists; name another file or remove it"));
  }
  const std::string unfinished = path + ".unfinished";
  UniqueFd fd(open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat("create ", unfinished));
  const auto remove = absl::MakeCleanup([&] { unlink(unfinished.c_str()); });
  GT_RETURN_IF_ERROR(WriteAll(fd.get(), PrintShardHeader(entries), unfinished));
  for (size_t first = 0, last = 0; first < entries.size(); first = last) {
    // Small tensors share chunks: many at a time.
    for (++last; last < entries.size() && entries[last].end - entries[first].begin <= kTogetherBytes;) ++last;
    GT_ASSIGN_OR_RETURN(const std::string bytes, reader.Read(first, last));
    GT_RETURN_IF_ERROR(WriteAll(fd.get(), bytes, unfinished));
    GT_RETURN_IF_ERROR(progress(entries[last - 1].end, total));
  }
  if (fsync(fd.get()) != 0) return ErrnoStatus(errno, absl::StrCat("fsync ", unfinished));
  if (link(unfinished.c_str(), path.c_str()) != 0) return ErrnoStatus(errno, path);
  return absl::OkStatus();
}

absl::StatusOr<Garbage> FindGarbage(port::BlobStore* store, absl::Duration age) {
  Garbage garbage;
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> probes, store->List(kProbePrefix));
  for (const std::string& key : probes) {
    if (ParseProbeKey(key)) GT_RETURN_IF_ERROR(AddIfOld(store, key, age, &garbage.small));
  }
  GT_ASSIGN_OR_RETURN(const DirectoryNames names, ListNames(store));
  GT_ASSIGN_OR_RETURN(const std::vector<std::string> leases,
                      ListAbandonedLeases(store, age, names.newest_owner));
  garbage.small.insert(garbage.small.end(), leases.begin(), leases.end());
  GT_ASSIGN_OR_RETURN(const std::optional<Manifest> newest, NewestManifest(store));
  StoredCheckpoints stored;
  if (newest) {  // without a commit every attempt may belong to a save that is running
    std::map<SaveId, bool> finite_of;
    GT_ASSIGN_OR_RETURN(stored, ListStored(store, newest->id, &finite_of));
    for (const SaveId& id : PinnedWithoutManifest(stored)) {
      const bool there = std::find(stored.folders.begin(), stored.folders.end(), id) != stored.folders.end();
      if (there) garbage.pinned.push_back(id);
      if (!there) GT_RETURN_IF_ERROR(AddIfOld(store, PinKey(id), age, &garbage.small));
    }
    GT_ASSIGN_OR_RETURN(garbage.in_flight, SpareInFlight(store, age, &stored));
    garbage.plan = PlanRetention(stored, std::numeric_limits<int>::max());
  }
  GT_ASSIGN_OR_RETURN(garbage.unfinished, ListAbandonedPuts(store, age, stored));
  for (const SaveId& id : garbage.plan.folders) {
    GT_ASSIGN_OR_RETURN(const std::vector<std::string> keys, store->List(AttemptName(id) + "/"));
    for (const std::string& key : keys) garbage.bytes += store->Size(key).value_or(0);
  }
  return garbage;
}

absl::Status DropGarbage(port::BlobStore* store, const Garbage& garbage) {
  GT_RETURN_IF_ERROR(DeletePlanned(store, garbage.plan));
  for (const auto& unfinished : garbage.unfinished) GT_RETURN_IF_ERROR(store->DropUnfinished(unfinished));
  for (const std::string& key : garbage.small) GT_RETURN_IF_ERROR(store->Delete(key));
  return absl::OkStatus();
}

absl::Status RemoveCheckpoint(port::BlobStore* store, const SaveId& id) {
  GT_RETURN_IF_ERROR(Unpin(store, id));  // first: cut off here, rm can be asked again
  return DeletePlanned(store, {.manifests = {id}, .folders = {id}});
}

absl::Status Pin(port::BlobStore* store, const SaveId& id) {
  const absl::Status put = store->PutIfAbsent(PinKey(id), "");
  return absl::IsAlreadyExists(put) ? absl::OkStatus() : put;
}

absl::Status Unpin(port::BlobStore* store, const SaveId& id) { return store->Delete(PinKey(id)); }

absl::StatusOr<bool> IsPinned(port::BlobStore* store, const SaveId& id) {
  const absl::Status size = store->Size(PinKey(id)).status();
  if (absl::IsNotFound(size)) return false;
  GT_RETURN_IF_ERROR(size);
  return true;
}

}  // namespace gtrain::ckpt
