// Random lives of a job on a real directory (C1, C4, C9, S7): generations of random sizes resume, save and
// die, the storage answers with errors, and between them files are damaged. Whatever happens, a restore
// returns the bits of a step that was saved, of the newest one that a rank reported unless that is damaged,
// and at most GTRAIN_CHECKPOINT_MAX_ROLLBACK older; or it is an error. It never begins anew where something
// was committed. Retention takes nothing that it promises to keep (plan/retention.h).
//
// GTRAIN_RANDOM_SEED=N runs the one case N, GTRAIN_RANDOM_CASES=N so many, GTRAIN_RANDOM_FOLDER the place (by
// default /dev/shm: memory has no fsyncs to wait for).
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/crash_test_world.h"
#include "checkpoint/format/manifest.h"

namespace gtrain::ckpt {
namespace {

constexpr uint64_t kCases = 1000;
constexpr int kWorldMax = 4;
constexpr int64_t kRows = 13;  // no world size divides it
constexpr int kMaxRollback = 1;
constexpr uint64_t kVanishes = 8;     // of so many cases one may lose its newest manifest
constexpr uint64_t kAtOnce = 24;      // cases: mostly they wait
constexpr uint64_t kSavesMany = 100;  // of so many cases one saves often enough to list everything twice
constexpr int kManySaves = 25;

uint64_t NumberFrom(const char* variable, uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  uint64_t number = 0;
  return text != nullptr && absl::SimpleAtoi(text, &number) ? number : otherwise;
}

// Replicated, sharded by rows over all ranks, and of one rank; a function of the case, the attempt that saved
// it and the step.
struct Model {
  Model(int rank, int world_size) : rank(rank), world_size(world_size) {
    const int64_t extra = kRows % world_size;
    first_row = rank * (kRows / world_size) + std::min<int64_t>(rank, extra);
    rows.resize(static_cast<size_t>(kRows / world_size + (rank < extra ? 1 : 0)) * 8);
  }
  void Fill(uint64_t salt, int64_t step) {
    const auto at = [&](uint64_t i) {
      return static_cast<int64_t>((salt * 1'000'003 + static_cast<uint64_t>(step)) * 8191 + i);
    };
    for (size_t i = 0; i < replicated.size(); ++i) replicated[i] = at(i);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = at(static_cast<uint64_t>(first_row) * 8 + i) * 3;
    mine = at(0) * 31 + rank;
  }
  absl::Status Register(Checkpointer* c) {
    GT_RETURN_IF_ERROR(c->AddReplicated("replicated", MemoryOf(&replicated),
                                        {static_cast<int64_t>(replicated.size())}, DType::kInt64));
    GT_RETURN_IF_ERROR(c->AddSharded("rows", MemoryOf(&rows), {kRows, 8},
                                     {.mesh = {{"dp", world_size}}, .splits = {{0, "dp"}}}, DType::kInt64));
    return c->AddPerRank("mine", {&mine, sizeof(mine)});
  }
  // `writers`: ranks that saved it. A rank that did not exist keeps what it had.
  bool Is(uint64_t salt, int64_t step, int writers) const {
    Model expected(rank, world_size);
    expected.Fill(salt, step);
    return replicated == expected.replicated && rows == expected.rows &&
           (rank >= writers || mine == expected.mine);
  }

  const int rank, world_size;
  int64_t first_row = 0;
  std::vector<int64_t> replicated = std::vector<int64_t>(700), rows;
  int64_t mine = -1;
};

// Records the `verified` in the indices of the ranks of one generation, and which rank cannot read its shards
// back. Thread-safe.
class ReadBacks {
 public:
  // From now on `rank` cannot read any shard.
  void Blind(int rank) { blind_ = rank; }
  bool IsBlind(int rank) const { return blind_ == rank; }
  void Said(const ShardIndex& index) {
    MutexLock lock(&mu_);
    verified_[index.id][index.rank] = ParseAttemptName(index.verified);
  }
  // The newest save that all ranks had read back when they wrote their index of `id`.
  std::optional<SaveId> OfAll(const SaveId& id, int world) const {
    MutexLock lock(&mu_);
    const auto said = verified_.find(id);
    if (said == verified_.end() || said->second.size() != static_cast<size_t>(world)) return std::nullopt;
    std::optional<SaveId> oldest = said->second.begin()->second;
    for (const auto& [rank, of_rank] : said->second) oldest = std::min(oldest, of_rank);  // nullopt is least
    return oldest;
  }

 private:
  std::atomic<int> blind_{-1};
  mutable Mutex mu_;
  std::map<SaveId, std::map<int, std::optional<SaveId>>> verified_ ABSL_GUARDED_BY(mu_);
};

class WatchedStore final : public FaultyStore {
 public:
  WatchedStore(std::unique_ptr<port::BlobStore> base, int rank, ReadBacks* read_backs)
      : FaultyStore(std::move(base), {}), rank_(rank), read_backs_(read_backs) {}
  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    if (const auto index = ParseShardIndex(key, absl::StrJoin(parts, "")); index.ok())
      read_backs_->Said(*index);
    return FaultyStore::PutIfAbsent(key, parts);
  }
  absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override {
    if (read_backs_->IsBlind(rank_)) return absl::UnavailableError("this rank reads nothing back");
    return FaultyStore::Read(key, offset, out);
  }

 private:
  const int rank_;
  ReadBacks* const read_backs_;
};

enum class Damage { kBitFlipped, kCut, kDeleted, kSwapped };
constexpr const char* kDamageNames[] = {"a bit flipped in ", "cut: ", "deleted: ", "swapped: "};

class Case {
 public:
  Case(uint64_t seed, const std::string& folder) : seed_(seed), rng_(seed), storage_(folder) {}

  void Run() {
    const int generations = 2 + static_cast<int>(rng_.Below(4));
    for (int i = 0; i < generations && wrong_.empty(); ++i) {
      Generation();
      if (rng_.Below(2) == 0) DamageSomething();
    }
    if (wrong_.empty()) Generation();
  }
  std::string story() const { return absl::StrJoin(story_, "\n  "); }
  const std::map<std::string, int>& counts() const { return counts_; }
  // The violations that were found; empty: none.
  std::string wrong() const { return absl::StrJoin(wrong_, "\n  "); }

 private:
  struct Resumed {
    absl::Status status;
    std::optional<SaveId> id;  // nullopt: nothing
    bool right = false;
  };

  std::string NewestKey() const {
    return reported_ ? absl::StrCat(storage_.folder(), "/", ManifestKey(*reported_)) : "";
  }

  // A fate for each rank: most live, one may die or meet errors.
  std::vector<std::shared_ptr<Life>> Lives(int world, std::string* fate) {
    const int rank = static_cast<int>(rng_.Below(static_cast<uint64_t>(world)));
    const uint64_t at = rng_.Below(40);
    const bool happens = rng_.Below(2) == 0;
    switch (rng_.Below(4)) {
      case 0:
        *fate = absl::StrCat("rank ", rank, " dies at its call ", at);
        return LivesOf(world, rank, std::make_shared<Life>(at, happens));
      case 1: {
        const std::vector<StorageAnswer> answers = StorageAnswers();
        const StorageAnswer& answer = answers[rng_.Below(answers.size())];
        const uint64_t errors = rng_.Below(3) == 0 ? kNever : 1 + rng_.Below(6);
        *fate = absl::StrCat("rank ", rank, " meets ", answer.name, " at its call ", at, ", ",
                             errors == kNever ? "for ever" : absl::StrCat(errors, " times"),
                             happens ? ", the calls happen" : "");
        return LivesOf(world, rank, std::make_shared<Life>(at, errors, answer.status, happens));
      }
      default:
        *fate = "all is well";
        return LivesOf(world, rank, std::make_shared<Life>());
    }
  }

  void Generation() {
    ++generation_;
    const int world = 1 + static_cast<int>(rng_.Below(kWorldMax));
    const bool many = seed_ % kSavesMany == 0 && generation_ == 2;
    const int saves = many ? kManySaves : static_cast<int>(rng_.Below(4));
    const int keep = 1 + static_cast<int>(rng_.Below(3));
    std::string fate;
    const std::vector<std::shared_ptr<Life>> lives = Lives(world, &fate);
    // A rank that could not put its index has failed alone: the others wait for it in vain.
    const bool errors = absl::StrContains(fate, "meets");
    // Errors happen from the beginning, or from the first save on.
    const bool from_begin = rng_.Below(2) == 0;
    const int blind = rng_.Below(3) == 0 ? static_cast<int>(rng_.Below(static_cast<uint64_t>(world))) : -1;
    ReadBacks read_backs;
    story_.push_back(absl::StrCat("generation ", generation_, ": ", world, " ranks, keep ", keep, ", ", saves,
                                  " saves, ", fate, from_begin ? "" : " of its saves",
                                  blind < 0 ? "" : absl::StrCat(", rank ", blind, " reads nothing back")));
    FakeJob job{.world_size = world, .generation = generation_, .timeline = generation_};
    std::vector<Resumed> resumed(static_cast<size_t>(world));
    std::vector<SaveId> known;  // readable manifests, and what was reported and is gone by now
    const std::vector<SaveId> before = Committed(&known);
    if (from_begin) Arm(lives);
    const auto environment = [&,
                              of_job = EnvironmentOf(job)](const char* name) -> std::optional<std::string> {
      if (absl::string_view(name) == "GTRAIN_CHECKPOINT_NEWEST" && reported_) return NewestKey();
      if (absl::string_view(name) == "GTRAIN_CHECKPOINT_MAX_ROLLBACK") return absl::StrCat(kMaxRollback);
      return of_job(name);
    };
    const MortalRanks ranks =
        RunMortalRanks(job, lives, [&](FakeSession* session, Life* life) -> absl::Status {
          const size_t rank = static_cast<size_t>(session->rank());
          Resumed& mine = resumed[rank];
          mine.status = absl::CancelledError("it did not come to that");
          Model model(session->rank(), world);
          GT_ASSIGN_OR_RETURN(
              auto checkpointer,
              OpenCheckpointer(session,
                               {.uri = storage_.folder(),
                                .keep = keep,
                                .commit_timeout = errors ? absl::Milliseconds(100) : kLong},
                               environment,
                               [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
                                 return std::make_unique<WatchedStore>(storage_.OpenIn(lives[rank]),
                                                                       session->rank(), &read_backs);
                               }));
          GT_RETURN_IF_ERROR(model.Register(checkpointer.get()));
          const auto restored = checkpointer->Restore();
          mine.status = restored.status();
          GT_RETURN_IF_ERROR(mine.status);
          if (*restored) Look(**restored, model, &mine);
          if (!from_begin) life->Arm();
          if (session->rank() == blind) read_backs.Blind(blind);
          int64_t step = mine.id ? mine.id->step : 0;
          for (int i = 0; i < saves; ++i) {
            model.Fill(Salt(generation_), ++step);
            GT_ASSIGN_OR_RETURN(const bool saved, checkpointer->Save(step));
            if (!saved) continue;
            WaitInLife(checkpointer.get(), *life).IgnoreError();  // a save may fail, the program goes on
            if (life->ended()) return absl::CancelledError("dead");
          }
          return absl::OkStatus();
        });
    bool met = false;
    for (const auto& life : lives) met = met || life->met();
    Judge(resumed, before, met, ranks);
    for (const auto& session : ranks.sessions) {
      for (const auto& [step, manifest] : session->reported()) {
        const auto id = ParseManifestKey(absl::string_view(manifest).substr(storage_.folder().size() + 1));
        if (!id) return Wrong(absl::StrCat("a strange report: ", manifest));
        if (!reported_ || *reported_ < *id) reported_ = *id;
        known.push_back(*id);
      }
    }
    const std::vector<SaveId> there = Committed(&known);
    JudgeRetention(before, there, std::move(known), resumed[0].id, keep, world, read_backs);
    for (const SaveId& id : there) worlds_[id] = WorldOf(id).value_or(worlds_[id]);
    if (reported_) story_.push_back(absl::StrCat("  reported by now: ", AttemptName(*reported_)));
  }

  static void Arm(const std::vector<std::shared_ptr<Life>>& lives) {
    for (const auto& life : lives) life->Arm();
  }
  uint64_t Salt(uint64_t generation) const { return seed_ * 101 + generation; }

  // All attempts with a manifest that is not an abort marker; newest first. A damaged one counts. `readable`,
  // if given, gets those whose manifests are not damaged, whatever their files are.
  std::vector<SaveId> Committed(std::vector<SaveId>* readable = nullptr) {
    const auto store = *OpenDirectoryStore(storage_.folder());
    std::vector<SaveId> ids;
    const std::vector<SaveId> listed = *ListManifests(store.get());
    for (const SaveId& id : listed) {
      const auto read = ReadManifest(store.get(), id);
      if (!read.ok() || std::holds_alternative<Manifest>(*read)) ids.push_back(id);
      if (read.ok() && std::holds_alternative<Manifest>(*read) && readable != nullptr)
        readable->push_back(id);
    }
    return ids;
  }
  std::optional<int> WorldOf(const SaveId& id) {
    const auto store = *OpenDirectoryStore(storage_.folder());
    const auto read = ReadManifest(store.get(), id);
    if (!read.ok()) return std::nullopt;
    return std::get<Manifest>(*read).world_size;
  }

  void Look(const RestoredStep& restored, const Model& model, Resumed* mine) {
    mine->id = ParseManifestKey(absl::string_view(restored.manifest).substr(storage_.folder().size() + 1));
    if (!mine->id) return;
    const auto world = worlds_.find(*mine->id);
    mine->right =
        world != worlds_.end() && model.Is(Salt(mine->id->generation), mine->id->step, world->second);
  }

  void Wrong(std::string what) { wrong_.push_back(std::move(what)); }

  // `before`: what was committed when the generation began; `met`: whether one of its ranks met a fault.
  void Judge(const std::vector<Resumed>& resumed, const std::vector<SaveId>& before, bool met,
             const MortalRanks& ranks) {
    const bool newest_vanished = reported_ &&
                                 std::find(before.begin(), before.end(), *reported_) == before.end() &&
                                 (before.empty() || before.front() < *reported_);
    bool named = false;
    for (size_t rank = 0; rank < resumed.size(); ++rank) {
      const std::string who = absl::StrCat("rank ", rank, " of generation ", generation_);
      if (resumed[rank].status.ok()) {
        JudgeResumed(who, resumed[rank], before, newest_vanished);
        continue;
      }
      const absl::Status& why = ranks.results[rank];
      story_.push_back(absl::StrCat("  ", who, ": ", why.message()));
      ++counts_[met ? "restores that met a fault" : "restores refused for damage"];
      named = named || (newest_vanished && absl::StrContains(why.message(), ManifestKey(*reported_)));
      if (!met && !newest_vanished && !TooMuchIsDamaged(before)) Wrong(who + " had no reason to fail");
      if (damaged_.empty() && absl::IsDataLoss(why)) Wrong(who + " speaks of damage where there is none");
    }
    if (newest_vanished && !met && !named) Wrong("the newest vanished, and nobody says its name");
    // A case that ended with an error for damage is mended by a person.
    if (!met && !resumed[0].status.ok()) Mend();
  }

  void JudgeResumed(const std::string& who, const Resumed& resumed, const std::vector<SaveId>& before,
                    bool newest_vanished) {
    ++counts_["restores"];
    if (!resumed.id) {
      if (!before.empty() || reported_) Wrong(who + " began anew, although something was committed");
      return;
    }
    const std::string what = absl::StrCat(who, " resumed ", AttemptName(*resumed.id));
    if (!resumed.right) Wrong(what + ", but has other bits");
    if (newest_vanished)
      Wrong(absl::StrCat(what, ", although the newest, ", AttemptName(*reported_), ", is gone, silently"));
    int passed_over = 0;
    for (const SaveId& id : before) {
      if (id <= *resumed.id) continue;
      ++passed_over;
      if (!damaged_.contains(id)) Wrong(absl::StrCat(what, ", but ", AttemptName(id), " is intact"));
    }
    if (passed_over > 0) ++counts_["restores of an older one"];
    if (passed_over > kMaxRollback) Wrong(absl::StrCat(what, ", ", passed_over, " back"));
  }

  // Judges retention after a generation. `before` and `there` are the committed saves when it began, and now;
  // `known` are the readable ones of `before`, and those that the ranks reported.
  void JudgeRetention(const std::vector<SaveId>& before, const std::vector<SaveId>& there,
                      std::vector<SaveId> known, const std::optional<SaveId>& resumed, int keep, int world,
                      const ReadBacks& read_backs) {
    const auto must_be_there = [&](const SaveId& id, absl::string_view why) {
      if (std::find(there.begin(), there.end(), id) == there.end())
        Wrong(absl::StrCat("generation ", generation_, " deleted ", AttemptName(id), ", ", why));
    };
    std::sort(known.rbegin(), known.rend());
    known.erase(std::unique(known.begin(), known.end()), known.end());
    for (size_t i = 0; i < known.size() && i < static_cast<size_t>(keep); ++i)
      must_be_there(known[i], absl::StrCat("one of the newest ", keep));
    // Newest first; a restore reads every byte. A save that ranks have read back may be gone by the time that
    // all of them say so, where they read slower than `keep` saves: it counts if the commit before had to
    // keep it.
    std::optional<SaveId> verified = resumed;
    std::set<SaveId> read_by_all;
    if (resumed) read_by_all.insert(*resumed);
    std::vector<SaveId> newest;  // `keep` of them, as of the commit before
    for (auto id = known.rbegin(); id != known.rend(); ++id) {
      if (id->generation == generation_) {
        const std::optional<SaveId> read = read_backs.OfAll(*id, world);
        if (read) read_by_all.insert(*read);
        if (read && std::count(newest.begin(), newest.end(), *read) > 0) verified = std::max(verified, read);
        ++counts_["commits"];
      }
      newest.insert(newest.begin(), *id);
      if (newest.size() > static_cast<size_t>(keep)) newest.pop_back();
    }
    const bool one_is_there = std::any_of(there.begin(), there.end(), [&](const SaveId& id) {
      return verified && id >= *verified && read_by_all.contains(id);
    });
    if (verified && !one_is_there) must_be_there(*verified, "the newest one that every rank has read");
    if (verified && verified == resumed && known.front().generation == generation_)
      ++counts_["generations that read nothing back"];
    for (const SaveId& id : before) {
      if (!resumed || id > *resumed) must_be_there(id, "which was passed over");
    }
  }

  // More than may be passed over, or all.
  bool TooMuchIsDamaged(const std::vector<SaveId>& ids) const {
    int newest_damaged = 0;
    for (const SaveId& id : ids) {
      if (!damaged_.contains(id)) break;
      ++newest_damaged;
    }
    return newest_damaged > kMaxRollback ||
           (newest_damaged > 0 && static_cast<size_t>(newest_damaged) == ids.size());
  }

  void DamageSomething() {
    const auto store = *OpenDirectoryStore(storage_.folder());
    std::vector<std::pair<std::string, SaveId>> files;  // of what is committed
    const std::vector<SaveId> ids = Committed();
    for (const SaveId& id : ids) {
      files.emplace_back(ManifestKey(id), id);
      const std::vector<std::string> keys = *store->List(AttemptName(id) + "/");
      for (const std::string& key : keys) {
        if (absl::EndsWith(key, ".safetensors")) files.emplace_back(key, id);
      }
    }
    if (files.empty()) return;
    const auto& [key, id] = files[rng_.Below(files.size())];
    const auto& [other, other_id] = files[rng_.Below(files.size())];
    auto damage = static_cast<Damage>(rng_.Below(std::size(kDamageNames)));
    if (damage == Damage::kSwapped && key == other) damage = Damage::kCut;
    // A program waits 10 s for the newest that it was told of: not in every case.
    if (damage == Damage::kDeleted && reported_ && key == ManifestKey(*reported_) && seed_ % kVanishes != 0)
      damage = Damage::kBitFlipped;
    const std::string data = Read(key);
    story_.push_back(absl::StrCat(kDamageNames[static_cast<int>(damage)], key,
                                  damage == Damage::kSwapped ? absl::StrCat(" and ", other) : ""));
    ++counts_[kDamageNames[static_cast<int>(damage)]];
    Keep(key, id);
    switch (damage) {
      case Damage::kBitFlipped: {
        std::string bad = data;
        const uint64_t bit = rng_.Below(bad.size() * 8);
        bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
        return Write(key, bad);
      }
      case Damage::kCut:
        return Write(key, data.substr(0, rng_.Below(data.size())));
      case Damage::kDeleted:
        (void)unlink(absl::StrCat(storage_.folder(), "/", key).c_str());
        return;
      case Damage::kSwapped:
        Keep(other, other_id);
        const std::string others = Read(other);
        Write(key, others);
        return Write(other, data);
    }
  }

  void Keep(const std::string& key, const SaveId& id) {
    damaged_.insert(id);
    whole_.emplace(key, Read(key));
  }
  // Attempts that were deleted meanwhile, for newer ones, stay deleted.
  void Mend() {
    story_.push_back("all damage is mended");
    const auto store = *OpenDirectoryStore(storage_.folder());
    for (const SaveId& id : std::set<SaveId>(std::exchange(damaged_, {}))) {
      if (access(absl::StrCat(storage_.folder(), "/", AttemptName(id)).c_str(), F_OK) != 0) continue;
      for (const auto& [key, data] : whole_) {
        if (absl::StrContains(key, AttemptName(id))) Write(key, data);
      }
      const auto read = ReadManifest(store.get(), id);
      const Manifest* const manifest = read.ok() ? std::get_if<Manifest>(&*read) : nullptr;
      const auto quiet = [](uint64_t, uint64_t) { return absl::OkStatus(); };
      if (manifest == nullptr || !VerifyAll(store.get(), *manifest, quiet).ok()) damaged_.insert(id);
    }
    whole_.clear();
  }
  std::string Read(const std::string& key) {
    return ReadFile(absl::StrCat(storage_.folder(), "/", key), 64 << 20).value_or("");
  }
  // Overwrites a file in place: neither atomic nor synced, which only a store has to be.
  void Write(const std::string& key, const std::string& data) {
    const std::string path = absl::StrCat(storage_.folder(), "/", key);
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
    FILE* const file = fopen(path.c_str(), "w");
    if (file == nullptr || fwrite(data.data(), 1, data.size(), file) != data.size() || fclose(file) != 0)
      Wrong(absl::StrCat("cannot write ", path));
  }

  const uint64_t seed_;
  Rng rng_;
  FolderStorage storage_;
  std::map<std::string, int> counts_;
  std::vector<std::string> wrong_;
  uint64_t generation_ = 0;
  std::optional<SaveId> reported_;  // the newest that any rank reported as committed
  std::map<SaveId, int> worlds_;    // of all that was ever committed
  std::set<SaveId> damaged_;
  std::map<std::string, std::string> whole_;  // what damaged files held
  std::vector<std::string> story_;
};

TEST(RandomLives, NeverAWrongBitNeverTooOldNeverAnew_C1_C4_C9_S7) {
  SetLogSink([](LogLevel, absl::string_view) {});
  const auto loud = absl::MakeCleanup([] { SetLogSink(nullptr); });
  // The folder is in memory unless told otherwise: a thousand lives are many fsyncs.
  const char* const place = std::getenv("GTRAIN_RANDOM_FOLDER");
  const std::string own = TestFolder();
  const std::string beside = place != nullptr ? place : access("/dev/shm", W_OK) == 0 ? "/dev/shm" : own;
  const std::string folder = absl::StrCat(beside, "/gtrain-random-", own.substr(own.rfind('-') + 1));
  std::filesystem::create_directory(folder);
  const auto remove = absl::MakeCleanup([&] {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  });
  const bool one = std::getenv("GTRAIN_RANDOM_SEED") != nullptr;
  const uint64_t first = NumberFrom("GTRAIN_RANDOM_SEED", 1);
  const uint64_t cases = one ? 1 : NumberFrom("GTRAIN_RANDOM_CASES", kCases);
  std::atomic<uint64_t> next = first;
  std::atomic<bool> failed = false;
  Mutex mu;
  std::map<std::string, int> counts;
  const auto work = [&] {
    for (uint64_t seed; (seed = next++) < first + cases && !failed;) {
      SCOPED_TRACE(absl::StrCat("again: GTRAIN_RANDOM_SEED=", seed));
      const std::string mine = absl::StrCat(folder, "/", seed);
      ASSERT_EQ(mkdir(mine.c_str(), 0700), 0);
      Case random(seed, mine);
      random.Run();
      if (!random.wrong().empty()) {
        failed = true;
        ADD_FAILURE() << random.wrong() << "\n  " << random.story();
      }
      std::error_code ignored;
      std::filesystem::remove_all(mine, ignored);
      MutexLock lock(&mu);
      if (one) std::cout << "  " << random.story() << "\n";
      for (const auto& [what, count] : random.counts()) counts[what] += count;
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < std::min(kAtOnce, cases); ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  std::cout << "  " << cases << " cases from seed " << first << " in " << beside << "\n";
  for (const auto& [what, count] : counts) std::cout << "  " << what << ": " << count << "\n";
}

}  // namespace
}  // namespace gtrain::ckpt
