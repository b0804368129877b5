#include "tests/sim/saves.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/leftovers.h"
#include "checkpoint/engine/retain.h"
#include "checkpoint/engine/settings.h"
#include "checkpoint/format/hash.h"
#include "tests/sim/ranks.h"

namespace gtrain::sim {

namespace save = ckpt::save;

namespace {

constexpr int kSaversMax = 4;

// All header and no tensor.
std::string ShardText(const ckpt::SaveId& id, int rank) {
  std::string text = absl::StrCat("shard ", rank, " of ", ckpt::AttemptName(id));
  text.resize((text.size() + 7) / 8 * 8);
  return text;
}

bool Runs(const RankProcess& rank) { return rank.alive && !rank.stuck; }

std::string Show(const ckpt::SaveId& id) { return ckpt::AttemptName(id); }

}  // namespace

// While the storage fails a third of the calls do; what changes something may have done so all the same.
class Saves::FlakyStore final : public port::BlobStore {
 public:
  using port::BlobStore::PutIfAbsent;
  FlakyStore(Kernel& kernel, const int64_t& fails_until, const int64_t& gone_until, int64_t* trouble)
      : kernel_(kernel), fails_until_(fails_until), gone_until_(gone_until), trouble_(trouble) {}

  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    const bool fails = Fails();
    if (fails && kernel_.rng.Chance(0.5)) return Error();
    const absl::Status put = base.PutIfAbsent(key, parts);
    return fails ? Error() : put;
  }
  absl::StatusOr<std::string> Get(absl::string_view key, size_t bytes_max) override {
    if (Fails()) return Error();
    return base.Get(key, bytes_max);
  }
  absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override {
    return Fails() ? Error() : base.Read(key, offset, out);
  }
  absl::StatusOr<uint64_t> Size(absl::string_view key) override {
    if (Fails()) return Error();
    return base.Size(key);
  }
  absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override {
    if (Fails()) return Error();
    return base.List(prefix);
  }
  absl::StatusOr<std::vector<std::string>> ListFolders() override {
    if (Fails()) return Error();
    return base.ListFolders();
  }
  absl::Status Delete(absl::string_view key) override {
    const bool fails = Fails();
    if (fails && kernel_.rng.Chance(0.5)) return Error();
    const absl::Status deleted = base.Delete(key);
    return fails ? Error() : deleted;
  }
  absl::Status DropEmptyFolder(absl::string_view folder) override { return base.DropEmptyFolder(folder); }
  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override { return base.ListUnfinished(); }
  absl::Status DropUnfinished(const Unfinished& unfinished) override {
    return base.DropUnfinished(unfinished);
  }
  std::string Describe() const override { return base.Describe(); }

  mutable ckpt::MemoryStore base;

 private:
  bool Fails() {
    const bool fails =
        kernel_.now() < gone_until_ || (kernel_.now() < fails_until_ && kernel_.rng.Chance(0.3));
    if (fails) ++kernel_.counts["storage call failed"], ++*trouble_;
    return fails;
  }
  static absl::Status Error() { return absl::UnavailableError("the storage does not answer"); }

  Kernel& kernel_;
  const int64_t& fails_until_;
  const int64_t& gone_until_;
  int64_t* trouble_;
};

struct Saves::Directory {
  Directory(Kernel& kernel, const int64_t& fails_until, const int64_t& gone_until, int64_t* trouble)
      : store(kernel, fails_until, gone_until, trouble) {}
  FlakyStore store;
  std::string name;
  std::optional<ckpt::SaveId> newest;  // of those reported as committed
};

struct Saves::Team {
  Directory* directory = nullptr;
  ckpt::Identity identity;
  ckpt::SaveId next;
  int64_t highest_step = -1;
  int keep = 3;
  absl::Duration commit_timeout;
  int64_t write_time = 0;          // of a shard, beside what any call takes
  int64_t began = 0, trouble = 0;  // of the newest save: when, and what there had been of trouble then
  std::map<ckpt::SaveId, bool> finite_of;
  std::vector<SaverPtr> savers;
};

struct Saves::Saver {
  Saver(RankPtr process, Team& its_team, int world)
      : rank(std::move(process)),
        team(its_team),
        core({.rank = rank->rank, .world_size = world, .commit_timeout = its_team.commit_timeout}),
        generation(rank->generation),
        number(rank->rank),
        world_size(world) {}
  // The answer of the Session::Alive of its generation: the process may be in another one.
  bool GenerationLives() const {
    return rank->relay != nullptr && !rank->over && rank->generation == generation;
  }
  RankPtr rank;
  Team& team;
  ckpt::SaveCore core;
  uint64_t generation;
  int number;  // of its rank there
  int world_size;
  ckpt::SaveId id;
  ckpt::ShardFile file;
  std::map<int, ckpt::ShardFile> files;  // rank 0: of all
  std::string manifest;
  std::deque<save::Effect> effects;
  bool told_stop = false;
};

struct Saves::Restoring {
  RankPtr rank;
  std::shared_ptr<Team> team;
  std::function<void(absl::StatusOr<int64_t>)> begun;
  std::optional<ckpt::SaveId> newest;  // when the candidates were listed
  std::vector<ckpt::Candidate> candidates;
  absl::Status status;
  int tried = 0;
  std::optional<ckpt::Manifest> manifest;
};

Saves::Saves(Kernel& kernel) : kernel_(kernel) {}
Saves::~Saves() = default;

Saves::Directory& Saves::DirectoryOf(const std::string& name) {
  std::unique_ptr<Directory>& directory = directories_[name];
  if (directory == nullptr) {
    directory = std::make_unique<Directory>(kernel_, fails_until_, gone_until_, &trouble_);
    directory->name = name;
  }
  return *directory;
}

// ---------------------------------------------------------------- the storage

// `act` is what the call does there; `answer` is when the caller hears of it. A call whose caller died before
// it was carried out is carried out or not.
void Saves::Call(const RankPtr& rank, std::function<void()> act, std::function<void()> answer) {
  const bool slow = kernel_.now() < slow_until_ && kernel_.rng.Chance(0.3);
  if (slow) ++kernel_.counts["storage call slow"], ++trouble_;
  const int64_t took = slow ? kernel_.Between(kSec, 90 * kSec) : kernel_.Between(kMs, 40 * kMs);
  const int64_t there = kernel_.Between(0, took);
  kernel_.After(there, [this, rank, act = std::move(act), answer = std::move(answer), took, there] {
    if (!rank->alive && kernel_.rng.Chance(0.5)) return;
    act();
    kernel_.After(took - there, [this, rank, answer] { Answer(rank, answer); });
  });
}

void Saves::Answer(const RankPtr& rank, std::function<void()> answer) {
  if (!Runs(*rank)) return;
  if (rank->frozen) return kernel_.After(kSec, [this, rank, answer] { Answer(rank, answer); });
  answer();
}

// ---------------------------------------------------------------- a program begins

void Saves::Restore(const Gang& gang, const Program& program,
                    std::function<void(absl::StatusOr<int64_t>)> begun) {
  auto team = std::make_shared<Team>();
  team->directory = &DirectoryOf(program.directory.empty() ? gang.job.value : program.directory);
  team->identity = {.cluster = "sim", .job = gang.job.value, .job_hash = "hash"};
  team->next = {.timeline = gang.timeline, .generation = gang.generation};
  team->keep = program.keep;
  team->commit_timeout = absl::Nanoseconds(program.commit_timeout);
  if (program.training) team->write_time = program.training->TimeOf(program.training->store_rate);
  const int world = std::min(gang.world, kSaversMax);
  for (int rank = 0; rank < world; ++rank) {
    team->savers.push_back(std::make_shared<Saver>(gang.ranks.at(rank), *team, world));
  }
  teams_[{gang.job.value, gang.generation}] = team;
  auto restoring = std::make_shared<Restoring>();
  restoring->rank = gang.ranks.at(0);
  restoring->team = team;
  restoring->begun = std::move(begun);
  FlakyStore* store = &team->directory->store;
  const auto take = [store, restoring] {
    Team& t = *restoring->team;
    ckpt::Settings settings;
    settings.identity = t.identity;
    settings.resume = ckpt::Resume::kLatest;
    std::string taken_from;
    const auto claim = ckpt::TakeDirectory(store, settings, true, {}, &taken_from);
    restoring->status = claim.status();
    if (!claim.ok()) return;
    t.next.epoch = claim->epoch;
    const auto attempt = ckpt::NextAttempt(store, t.next);
    restoring->status = attempt.status();
    if (attempt.ok()) t.next.attempt = *attempt;
  };
  const auto list = [store, restoring] {
    restoring->newest = restoring->team->directory->newest;
    const auto ids = ckpt::ListManifests(store);
    restoring->status = ids.status();
    if (!ids.ok()) return;
    ckpt::Settings settings;
    settings.resume = ckpt::Resume::kLatest;
    restoring->candidates = ckpt::Candidates(settings, restoring->team->next.epoch, *ids, {});
  };
  Call(restoring->rank, take, [this, restoring, list] {
    if (!restoring->status.ok()) return restoring->begun(restoring->status);
    Call(restoring->rank, list, [this, restoring] { TryNext(restoring); });
  });
}

void Saves::TryNext(const std::shared_ptr<Restoring>& restoring) {
  if (!restoring->status.ok()) return restoring->begun(restoring->status);
  const uint64_t epoch = restoring->team->next.epoch;
  const Directory& directory = *restoring->team->directory;
  // A team that lost the directory has nothing to expect of it.
  const bool expects = restoring->newest && restoring->newest->epoch <= epoch;
  if (restoring->candidates.empty()) {
    if (restoring->tried > 0) {  // it says so and ends, rather than begin anew
      ++kernel_.counts["resume found nothing whole"];
      return restoring->begun(absl::DataLossError("nothing there is whole"));
    }
    if (expects) {
      kernel_.Fail("INV-4", absl::StrCat(restoring->team->identity.job, " begins anew although ",
                                         Show(*restoring->newest), " was committed in ", directory.name));
    }
    return restoring->begun(0);
  }
  const ckpt::SaveId id = restoring->candidates.front().id;
  restoring->candidates.erase(restoring->candidates.begin());
  FlakyStore* store = &restoring->team->directory->store;
  const auto read = [store, restoring, id] {
    restoring->manifest.reset();
    auto found = ckpt::ReadManifest(store, id);
    restoring->status = found.status();
    if (found.ok() && std::holds_alternative<ckpt::Manifest>(*found)) {
      restoring->manifest = std::get<ckpt::Manifest>(*std::move(found));
    }
  };
  const auto shards = [store, restoring, id] {
    for (const ckpt::ShardFile& file : restoring->manifest->files) {
      const auto text = store->Get(ckpt::AttemptKey(id, file.name), 1 << 20);
      restoring->status = text.status();
      if (text.ok() && ckpt::Xxh3Hex(*text) != file.chunks[0])
        restoring->status = absl::DataLossError(file.name);
      if (!restoring->status.ok()) return;
    }
  };
  const auto next = [this, restoring] {
    if (absl::IsNotFound(restoring->status) || absl::IsDataLoss(restoring->status)) {
      ++restoring->tried;
      ++kernel_.counts["resume fell back"];
      restoring->status = absl::OkStatus();
    }
    TryNext(restoring);
  };
  Call(restoring->rank, read, [this, restoring, id, shards, next, expects] {
    if (!restoring->manifest) return next();
    Call(restoring->rank, shards, [this, restoring, id, next, expects] {
      if (!restoring->status.ok()) return next();
      ++kernel_.counts["resumed"];
      kernel_.Note(0x5E5, restoring->team->identity.job, " g", restoring->team->next.generation,
                   " resumes from ", Show(id));
      if (expects && id < *restoring->newest) {
        kernel_.Fail("INV-4", absl::StrCat(restoring->team->identity.job, " resumes from ", Show(id),
                                           " although ", Show(*restoring->newest), " was committed"));
      }
      restoring->begun(id.step);
    });
  });
}

// ---------------------------------------------------------------- saving

bool Saves::Save(const Gang& gang) {
  const auto found = teams_.find({gang.job.value, gang.generation});
  if (found == teams_.end()) return false;
  Team& team = *found->second;
  for (const SaverPtr& saver : team.savers) {
    if (saver->core.idle()) continue;
    ++kernel_.counts["save skipped"];
    return false;
  }
  if (gang.step <= team.highest_step) ++team.next.attempt;
  team.highest_step = std::max(team.highest_step, gang.step);
  team.next.step = gang.step;
  team.began = kernel_.now();
  team.trouble = trouble_;
  for (const SaverPtr& saver : team.savers) {
    saver->id = team.next;
    saver->files.clear();
    saver->manifest.clear();
    saver->effects.clear();
    saver->told_stop = false;
    Apply(saver, save::SnapshotTaken{gang.step});
    Turn(saver);
  }
  return true;
}

void Saves::Apply(const SaverPtr& saver, const save::Event& event) {
  for (save::Effect& effect : saver->core.Step(event, kernel_.Now()).effects) {
    saver->effects.push_back(std::move(effect));
  }
}

void Saves::Turn(const SaverPtr& saver) {
  if (!Runs(*saver->rank)) return;
  if (saver->effects.empty()) {
    if (saver->core.idle()) return;
    const std::optional<Instant> deadline = saver->core.NextDeadline();
    GT_CHECK(deadline.has_value());
    return kernel_.At(std::max(deadline->ns, kernel_.now() + kMs), [this, saver] { Wake(saver); });
  }
  const save::Effect effect = std::move(saver->effects.front());
  saver->effects.pop_front();
  Do(saver, effect);
}

void Saves::Wake(const SaverPtr& saver) {
  if (!Runs(*saver->rank)) return;
  if (saver->rank->frozen) return kernel_.After(kSec, [this, saver] { Wake(saver); });
  if (!saver->GenerationLives() && !std::exchange(saver->told_stop, true)) {
    Apply(saver, save::Revoked{"the generation is over"});
  } else {
    Apply(saver, save::Tick{});
  }
  Turn(saver);
}

void Saves::Ask(const SaverPtr& saver, std::function<Events()> act) {
  auto events = std::make_shared<Events>();
  Call(
      saver->rank, [events, act = std::move(act)] { *events = act(); },
      [this, saver, events] {
        for (const save::Event& event : *events) Apply(saver, event);
        Turn(saver);
      });
}

void Saves::Do(const SaverPtr& saver, const save::Effect& effect) {
  FlakyStore* store = &saver->team.directory->store;
  if (std::holds_alternative<save::WriteShard>(effect)) {
    const auto write = [saver, store, finite = !kernel_.rng.Chance(0.05)]() -> Events {
      const std::string text = ShardText(saver->id, saver->number);
      saver->file = {.name = ckpt::ShardName(saver->number, saver->world_size),
                     .bytes = text.size(),
                     .chunks = {ckpt::Xxh3Hex(text)},
                     .finite = finite,
                     .data_begin = text.size()};
      return {save::ShardWritten{store->PutIfAbsent(ckpt::AttemptKey(saver->id, saver->file.name), text)}};
    };
    if (saver->team.write_time == 0) return Ask(saver, write);
    return kernel_.After(saver->team.write_time, [this, saver, write] { Ask(saver, write); });
  }
  if (const auto* index = std::get_if<save::WriteIndex>(&effect)) {
    return Ask(saver, [saver, store, shard = index->shard]() -> Events {
      ckpt::ShardIndex out{
          .id = saver->id, .rank = saver->number, .world_size = saver->world_size, .file = saver->file};
      if (!shard.ok()) out.error = absl::StrCat("error: ", shard.message());
      const std::string name = ckpt::IndexName(saver->number, saver->world_size);
      return {save::IndexWritten{store->PutIfAbsent(ckpt::AttemptKey(saver->id, name), ckpt::Print(out))}};
    });
  }
  if (const auto* poll = std::get_if<save::PollIndices>(&effect)) {
    return Ask(saver, [this, saver, missing = poll->missing] { return PollIndices(*saver, missing); });
  }
  if (std::holds_alternative<save::PutPart>(effect)) {
    Apply(saver, save::PartPut{});  // of so few ranks the files stand in the manifest
    return Turn(saver);
  }
  if (std::holds_alternative<save::CheckAuthority>(effect)) {
    return Ask(saver, [this, saver] { return CheckAuthority(*saver); });
  }
  if (std::holds_alternative<save::PutManifest>(effect)) {
    return Ask(saver, [saver, store]() -> Events {
      return {save::ManifestPut{store->PutIfAbsent(ckpt::ManifestKey(saver->id), saver->manifest)}};
    });
  }
  if (std::holds_alternative<save::ReadManifest>(effect)) {
    return Ask(saver, [this, saver] { return LookAtKey(*saver); });
  }
  if (const auto* abort = std::get_if<save::PutAbort>(&effect)) {
    return Ask(saver, [saver, store, reason = abort->reason]() -> Events {
      (void)store->PutIfAbsent(ckpt::ManifestKey(saver->id),
                               ckpt::Print(ckpt::AbortMarker{.id = saver->id, .reason = reason}));
      return {save::AbortPut{}};
    });
  }
  if (std::holds_alternative<save::ApplyRetention>(effect)) return Retain(saver);
  if (std::holds_alternative<save::ReportCommitted>(effect)) ReportCommitted(*saver);
  if (const auto* finish = std::get_if<save::Finish>(&effect)) Finished(*saver, finish->status);
  Turn(saver);
}

Saves::Events Saves::PollIndices(Saver& saver, const std::vector<int>& missing) {
  saver.files[saver.number] = saver.file;
  const auto given_up = ckpt::ReadManifest(&saver.team.directory->store, saver.id);
  if (given_up.ok() && std::holds_alternative<ckpt::AbortMarker>(*given_up))
    return {save::ManifestRead{save::KeyHolds::kAbortMarker, ""}};
  Events events;
  for (const int rank : missing) {
    const std::string key = ckpt::AttemptKey(saver.id, ckpt::IndexName(rank, saver.world_size));
    const auto text = saver.team.directory->store.Get(key, ckpt::kManifestBytesMax);
    if (!text.ok()) continue;
    const auto index = ckpt::ParseShardIndex(key, *text);
    absl::Status status = index.status();
    if (index.ok() && !index->error.empty()) status = absl::AbortedError(index->error);
    if (status.ok()) saver.files[rank] = index->file;
    events.push_back(save::IndexSeen{rank, std::move(status)});
  }
  return events;
}

Saves::Events Saves::CheckAuthority(Saver& saver) {
  saver.files[saver.number] = saver.file;
  ckpt::Manifest manifest{.id = saver.id, .owner = saver.team.identity, .world_size = saver.world_size};
  for (const auto& [rank, file] : saver.files) manifest.files.push_back(file);
  if (absl::Status valid = ckpt::Validate(manifest); !valid.ok()) return {save::AuthorityChecked{valid}};
  saver.manifest = ckpt::Print(manifest);
  const auto next =
      saver.team.directory->store.Get(ckpt::OwnerKey(saver.id.epoch + 1), ckpt::kSmallFileBytesMax);
  if (next.ok()) return {save::AuthorityChecked{absl::FailedPreconditionError("it was taken over")}};
  if (!absl::IsNotFound(next.status())) return {save::AuthorityChecked{next.status()}};
  return {save::AuthorityChecked{saver.GenerationLives() ? absl::OkStatus()
                                                         : absl::UnavailableError("the generation is over")}};
}

Saves::Events Saves::LookAtKey(Saver& saver) {
  std::string text;
  const auto read = ckpt::ReadManifest(&saver.team.directory->store, saver.id, &text);
  if (absl::IsNotFound(read.status())) {
    return {saver.number == 0 ? ckpt::WhyNothingIsThere(&saver.team.directory->store, saver.id)
                              : save::ManifestRead{save::KeyHolds::kNothing, ""}};
  }
  if (saver.number == 0 && !saver.manifest.empty() && text == saver.manifest) {
    saver.team.finite_of[saver.id] = std::get<ckpt::Manifest>(*read).finite();
    return {save::ManifestRead{save::KeyHolds::kThisManifest, ""}};
  }
  const std::string detail(read.status().message());
  if (absl::IsDataLoss(read.status())) return {save::ManifestRead{save::KeyHolds::kOther, detail}};
  if (!read.ok()) return {save::ManifestRead{save::KeyHolds::kUnreadable, detail}};
  if (std::holds_alternative<ckpt::AbortMarker>(*read))
    return {save::ManifestRead{save::KeyHolds::kAbortMarker, ""}};
  const auto& manifest = std::get<ckpt::Manifest>(*read);
  const bool same = saver.number != 0 && manifest.world_size == saver.world_size &&
                    manifest.files[static_cast<size_t>(saver.number)] == saver.file;
  return {save::ManifestRead{same ? save::KeyHolds::kThisManifest : save::KeyHolds::kOther, ""}};
}

// Other ranks may see the manifest before rank 0 has read it back.
void Saves::ReportCommitted(Saver& saver) {
  Directory& directory = *saver.team.directory;
  kernel_.Note(0x5A7E, saver.team.identity.job, " rank ", saver.number, ": committed is ", Show(saver.id));
  committed_.insert({saver.team.identity.job, saver.id.timeline, saver.id.step});
  if (!saver.GenerationLives()) ++kernel_.counts["committed by a generation that is over"];
  directory.newest = std::max(directory.newest.value_or(saver.id), saver.id);
  Check(directory);
  if (!saver.rank->relay || saver.rank->generation != saver.generation) return;
  saver.rank->relay(absl::StrCat(R"({"type":"checkpoint","step":)", saver.id.step, R"(,"timeline":)",
                                 saver.id.timeline, R"(,"manifest":"m"})"));
}

// A save is given up for a reason only.
void Saves::Finished(const Saver& saver, const absl::Status& status) {
  if (saver.number == 0) ++kernel_.counts[status.ok() ? "save committed" : "save given up"];
  const Team& team = saver.team;
  constexpr int64_t kSoon = 10 * kSec;  // less than any commit_timeout
  if (status.ok() || trouble_ > team.trouble || kernel_.now() - team.began > kSoon) return;
  for (const SaverPtr& other : team.savers) {
    if (!Runs(*other->rank) || !other->GenerationLives() || other->rank->frozen) return;
  }
  if (team.directory->store.base.Size(ckpt::OwnerKey(saver.id.epoch + 1)).ok()) return;
  // A save of an older timeline may be deleted by the retention of the newer one before it is read back.
  const auto& newest = team.directory->newest;
  if (absl::IsAborted(status) && newest && newest->timeline > saver.id.timeline) return;
  kernel_.Fail("INV-4", absl::StrCat(team.identity.job, " rank ", saver.number, " gives up ", Show(saver.id),
                                     " for no reason: ", status.message()));
}

// ---------------------------------------------------------------- retention

// Listing and each deletion are calls of their own: others save and resume in between.
void Saves::Retain(const SaverPtr& saver) {
  auto plan = std::make_shared<ckpt::RetentionPlan>();
  auto status = std::make_shared<absl::Status>();
  Call(
      saver->rank,
      [saver, plan, status] {
        Team& team = saver->team;
        auto stored = ckpt::ListStored(&team.directory->store, saver->id, &team.finite_of);
        *status = stored.status();
        if (!stored.ok()) return;
        *status = ckpt::SpareInFlight(&team.directory->store, ckpt::kAbandonedAge, &*stored).status();
        if (!status->ok()) return;
        *plan = ckpt::PlanRetention(*stored, team.keep);
        for (const ckpt::SaveId& old : plan->manifests) team.finite_of.erase(old);
      },
      [this, saver, plan, status] {
        if (status->ok()) return DeleteNext(saver, plan);
        Apply(saver, save::RetentionApplied{*status});
        Turn(saver);
      });
}

void Saves::DeleteNext(const SaverPtr& saver, std::shared_ptr<ckpt::RetentionPlan> plan) {
  auto one = std::make_shared<ckpt::RetentionPlan>();
  std::vector<ckpt::SaveId>& list = plan->manifests.empty() ? plan->folders : plan->manifests;
  if (list.empty()) {
    Apply(saver, save::RetentionApplied{absl::OkStatus()});
    return Turn(saver);
  }
  (plan->manifests.empty() ? one->folders : one->manifests).push_back(list.front());
  list.erase(list.begin());
  auto status = std::make_shared<absl::Status>();
  Call(
      saver->rank,
      [this, saver, one, status] {
        *status = ckpt::DeletePlanned(&saver->team.directory->store, *one);
        Check(*saver->team.directory);
      },
      [this, saver, plan, status] {
        if (status->ok()) return DeleteNext(saver, plan);
        Apply(saver, save::RetentionApplied{*status});
        Turn(saver);
      });
}

// ---------------------------------------------------------------- INV-4

bool Saves::Whole(const Directory& directory, const ckpt::SaveId& id) const {
  ckpt::MemoryStore& store = directory.store.base;
  const auto read = ckpt::ReadManifest(&store, id);
  if (!read.ok() || !std::holds_alternative<ckpt::Manifest>(*read)) return false;
  const auto& files = std::get<ckpt::Manifest>(*read).files;
  return std::all_of(files.begin(), files.end(), [&](const ckpt::ShardFile& file) {
    const auto text = store.Get(ckpt::AttemptKey(id, file.name), 1 << 20);
    return text.ok() && ckpt::Xxh3Hex(*text) == file.chunks[0];
  });
}

// A checkpoint that was reported as committed is there and whole, or a newer one is.
void Saves::Check(const Directory& directory) {
  if (!directory.newest || Whole(directory, *directory.newest)) return;
  const auto ids = ckpt::ListManifests(&directory.store.base);
  for (const ckpt::SaveId& id : *ids) {
    if (id > *directory.newest && Whole(directory, id)) return;
  }
  kernel_.Fail("INV-4", absl::StrCat(Show(*directory.newest), " was committed in the directory of ",
                                     directory.name, " and can be restored no more"));
}

void Saves::CheckAll() {
  for (const auto& [name, directory] : directories_) Check(*directory);
}

}  // namespace gtrain::sim
