#include "checkpoint/engine/near.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/logging.h"
#include "base/module.h"
#include "base/status_macros.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/near/near_folder.h"
#include "checkpoint/port/near_module.h"

namespace gtrain::ckpt {

namespace {

constexpr size_t kAskersMax = 8;

absl::StatusOr<const port::NearModule*> Load() {
  return LoadModuleTable<port::NearModule>("libgtrain_near.so", "GTRAIN_NEAR_MODULE",
                                           "copies of checkpoints on other machines need",
                                           port::kNearModuleEntry, port::kNearModuleAbi);
}

}  // namespace

NearTiers OpenNear(const NearPlace& place, const std::string& job) {
  NearTiers tiers;
  auto folder = NearFolder::Open(place.folder, place.bytes_max);
  if (!folder.ok()) {
    LogWarning("checkpoint: no copies are kept on this machine: ", folder.status().message());
    return tiers;
  }
  tiers.own = MakeNearTier(*std::move(folder), job);
  if (place.peers.empty()) return tiers;
  static const auto* loaded = new absl::StatusOr<const port::NearModule*>(Load());
  if (!loaded->ok()) {
    LogWarning("checkpoint: copies on other machines are not used: ", loaded->status().message());
    return tiers;
  }
  for (const port::NearPeer& peer : place.peers) {
    absl::StatusOr<std::unique_ptr<port::NearTier>> tier = (**loaded)->open(peer, place.secret);
    if (!tier.ok()) {
      LogWarning("checkpoint: copies on ", peer.name, " are not used: ", tier.status().message());
      return tiers;
    }
    tiers.peers.push_back(*std::move(tier));
  }
  tiers.holders = place.holders;
  return tiers;
}

// ------------------------------------------------------------------ restore

NearShards::NearShards(const NearTiers& tiers, const Manifest& manifest)
    : manifest_(manifest), places_(1 + tiers.peers.size()) {
  places_[0].tier = tiers.own.get();
  for (size_t i = 0; i < tiers.peers.size(); ++i) places_[1 + i].tier = tiers.peers[i].get();
  std::atomic<size_t> next{0};
  const auto ask = [&] {
    for (size_t i = next++; i < places_.size(); i = next++) Ask(&places_[i]);
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min(kAskersMax, places_.size()); ++i) helpers.emplace_back(ask);
  ask();
  for (std::thread& helper : helpers) helper.join();
}

void NearShards::Ask(Place* place) {
  const auto listed = place->tier->List(AttemptName(manifest_.id));
  if (!listed.ok()) {
    LogWarning("checkpoint: ", place->tier->Describe(), " is not asked for copies of step ",
               manifest_.id.step, ": ", listed.status().message());
    return;
  }
  std::map<std::string, uint64_t> there;
  for (const port::NearTier::Shard& shard : *listed) there[shard.file] = shard.bytes;
  for (const ShardFile& file : manifest_.files) {
    const auto it = there.find(file.name);
    if (it == there.end()) continue;
    if (it->second == file.bytes) {
      place->shards.insert(file.name);
    } else {
      Refuse(place, file, absl::StrCat("it has ", it->second, " bytes, not ", file.bytes));
    }
  }
}

uint64_t NearShards::peer_bytes() const {
  uint64_t sum = 0;
  for (size_t i = 1; i < places_.size(); ++i) sum += places_[i].bytes;
  return sum;
}

bool NearShards::HoldsIn(const Place& place, size_t file) const {
  return place.shards.contains(manifest_.files[file].name) && place.bad < kBadMax;
}

bool NearShards::Holds(size_t file) const {
  return std::any_of(places_.begin(), places_.end(),
                     [&](const Place& place) { return HoldsIn(place, file); });
}

void NearShards::Refuse(Place* place, const ShardFile& file, absl::string_view why) {
  LogWarning("checkpoint: the copy of ", AttemptKey(manifest_.id, file.name), " in ", place->tier->Describe(),
             " is NOT USED: ", why, "; the next place is asked");
}

bool NearShards::Read(size_t file, absl::FunctionRef<absl::Status(const ReadFrom&)> read) {
  const ShardFile& wanted = manifest_.files[file];
  const std::string attempt = AttemptName(manifest_.id);
  for (Place& place : places_) {
    if (!HoldsIn(place, file)) continue;
    uint64_t bytes = 0;
    const auto from = [&](uint64_t at, absl::Span<char> out) {
      bytes += out.size();
      return place.tier->Read(attempt, wanted.name, at, out);
    };
    const absl::Status status = read({place.tier->ReadSize(), from});
    if (status.ok()) {
      place.bytes += bytes;
      return true;
    }
    // One that does not answer would cost its deadline for each chunk.
    place.bad += absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ? kBadMax : 1;
    Refuse(&place, wanted, status.message());
  }
  return false;
}

// ------------------------------------------------------------------ save

NearPushes::NearPushes(NearTiers tiers) : tiers_(std::move(tiers)), thread_([this] { Run(); }) {}

NearPushes::~NearPushes() {
  {
    MutexLock lock(&mu_);
    mu_.AwaitFor(kEndWithin, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !busy_ && next_.empty(); });
    ending_ = true;
    next_.clear();
  }
  give_up_ = true;
  thread_.join();
}

void NearPushes::Push(std::vector<port::NearTier::Copy> copies) {
  MutexLock lock(&mu_);
  if (!next_.empty()) {
    ++left_out_;
    note_ = absl::StrCat("other machines take their copies too slowly (", left_out_, " left out so far)");
  }
  next_ = std::move(copies);
}

std::string NearPushes::TakeNote() {
  MutexLock lock(&mu_);
  return std::exchange(note_, "");
}

void NearPushes::Run() {
  while (true) {
    std::vector<port::NearTier::Copy> copies;
    {
      MutexLock lock(&mu_);
      busy_ = false;
      mu_.Await([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !next_.empty() || ending_; });
      if (next_.empty()) return;
      copies = std::exchange(next_, {});
      busy_ = true;
    }
    for (size_t i = 0; i < tiers_.holders; ++i) {
      absl::Status pushed;
      for (const port::NearTier::Copy& copy : copies) {
        if (pushed.ok()) pushed = PushTo(tiers_.peers[i].get(), copy);
      }
      if (pushed.ok()) continue;
      MutexLock lock(&mu_);
      ++left_out_;
      note_ = absl::StrCat("no copy of ", copies[0].attempt, " in ", tiers_.peers[i]->Describe(), ": ",
                           pushed.message(), " (", left_out_, " left out so far)");
    }
  }
}

absl::Status NearPushes::PushTo(port::NearTier* peer, const port::NearTier::Copy& copy) {
  return peer->Put(copy, [&](uint64_t at) -> absl::StatusOr<absl::string_view> {
    if (give_up_) return absl::DeadlineExceededError("its writer ends");
    buffer_.resize(std::min(kChunkBytes, copy.bytes - at));
    GT_RETURN_IF_ERROR(tiers_.own->Read(copy.attempt, copy.file, at, absl::MakeSpan(buffer_)));
    return absl::string_view(buffer_.data(), buffer_.size());
  });
}

NearSaves::NearSaves(NearTiers tiers, port::BlobStore* store) : tiers_(std::move(tiers)), store_(store) {
  if (tiers_.own != nullptr && tiers_.holders > 0) pushes_ = std::make_unique<NearPushes>(tiers_);
}

absl::Status NearSaves::Put(const port::NearTier::Copy& copy, absl::string_view first,
                            absl::string_view rest) {
  return tiers_.own->Put(copy, [&](uint64_t at) -> absl::StatusOr<absl::string_view> {
    if (give_up_)
      return absl::DeadlineExceededError(
          "it took longer than the save and than 256 MB/s: see the machine's free memory");
    if (at < first.size()) return first.substr(at);
    return rest.substr(at - first.size(), kChunkBytes);
  });
}

void NearSaves::PutAll(const SaveId& id, const std::string& file, absl::string_view header,
                       absl::string_view data) {
  if (!committed_) {
    const auto newest = NewestManifest(store_);
    if (newest.ok() && *newest && (*newest)->id < id) committed_ = (*newest)->id;
  }
  const auto copy_of = [&](const std::string& name, uint64_t bytes) {
    return port::NearTier::Copy{.attempt = AttemptName(id),
                                .file = name,
                                .bytes = bytes,
                                .committed = committed_ ? AttemptName(*committed_) : ""};
  };
  std::vector<port::NearTier::Copy> copies = {copy_of(file, bytes_)};
  absl::Status status = Put(copies[0], header, data);
  std::vector<std::pair<std::string, std::string>> texts;
  if (status.ok()) {
    MutexLock lock(&mu_);
    mu_.Await([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return texts_.has_value(); });
    texts = *texts_;
  }
  for (const auto& [name, text] : texts) {
    if (!status.ok()) break;
    copies.push_back(copy_of(name, text.size()));
    status = Put(copies.back(), text, "");
  }
  if (status.ok() && pushes_ != nullptr) pushes_->Push(std::move(copies));
  MutexLock lock(&mu_);
  result_ = std::move(status);
}

void NearSaves::Describe(std::vector<std::pair<std::string, std::string>> texts) {
  MutexLock lock(&mu_);
  if (!texts_) texts_ = std::move(texts);
}

void NearSaves::Begin(const SaveId& id, const std::string& file, absl::string_view header,
                      absl::string_view data) {
  if (tiers_.own == nullptr || thread_.joinable()) return;
  give_up_ = false;
  begun_ = clock_.Now();
  bytes_ = header.size() + data.size();
  {
    MutexLock lock(&mu_);
    result_.reset();
    texts_.reset();
  }
  thread_ = std::thread([this, id, file, header, data] { PutAll(id, file, header, data); });
}

void NearSaves::End(const std::optional<SaveId>& committed) {
  Finish(std::max(kEndWithin + absl::Seconds(static_cast<double>(bytes_) / kSlowest), clock_.Now() - begun_));
  if (committed) committed_ = committed;
}

void NearSaves::Finish(absl::Duration patience) {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mu_);
    if (!texts_) texts_.emplace();  // nobody describes it any more
    mu_.AwaitFor(patience, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return result_.has_value(); });
  }
  give_up_ = true;
  thread_.join();
  note_ = pushes_ == nullptr ? "" : pushes_->TakeNote();
  MutexLock lock(&mu_);
  if (result_->ok()) return;
  ++left_out_;
  note_ = absl::StrCat("no copy of it in ", tiers_.own->Describe(), ": ", result_->message(), " (", left_out_,
                       " left out so far)");
}

}  // namespace gtrain::ckpt
