// Ends programs while they make checkpoints and checks the programs and files. A program, or one rank of it
// while the others go on, ends at every storage call it makes, one after the other: calls of the BlobStore on
// a directory, HTTP requests on S3, so that the middle of a multipart upload is a place to die too (C1, C2,
// S3, S8). A call is either not made or made without its answer being heard; from then on that rank makes no
// call at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "base/logging.h"
#include "base/rng.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/crash_test_world.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/s3/s3_fake.h"
#include "checkpoint/s3/s3_store.h"
#include "net/http/curl_client.h"

namespace gtrain::ckpt {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kCallsMax = 400;  // more than any of these programs makes

class MortalClient final : public http::Client {
 public:
  MortalClient(std::shared_ptr<http::Client> base, std::shared_ptr<Life> life)
      : base_(std::move(base)), life_(std::move(life)) {}
  absl::StatusOr<http::Reply> Do(const http::Request& request) override {
    const Fault fault = life_->Next();
    if (fault == Fault::kBefore && !life_->ended()) return Refusal();
    if (fault == Fault::kBefore) return absl::CancelledError("the program has ended");
    absl::StatusOr<http::Reply> reply = base_->Do(request);
    if (fault == Fault::kAfter) return absl::CancelledError("the program has ended");
    return reply;
  }

 private:
  // Returns the life's error as S3 would say it.
  http::Reply Refusal() const {
    const bool denied = absl::IsPermissionDenied(life_->error());
    return {.status = denied ? 403 : 503,
            .body = absl::StrCat("<Error><Code>", denied ? "AccessDenied" : "SlowDown",
                                 "</Code><Message>injected</Message></Error>")};
  }

  const std::shared_ptr<http::Client> base_;
  const std::shared_ptr<Life> life_;
};

class FixedKeys final : public CredentialsProvider {
 public:
  absl::StatusOr<S3Credentials> Get() override { return S3Credentials{"AKIDEXAMPLE", "secret"}; }
  void Refused(const S3Credentials&) override {}
};

class Bucket final : public Storage {
 public:
  std::unique_ptr<port::BlobStore> OpenIn(std::shared_ptr<Life> life) override {
    S3Options options;
    options.bucket = "bucket";
    options.prefix = "run/ckpt";
    options.endpoint = server_.endpoint();
    options.path_style = true;
    options.first_backoff = absl::Milliseconds(1);
    options.part_bytes = 5 << 20;
    return *OpenS3Store(options, std::make_shared<MortalClient>(*http::MakeCurlClient(""), std::move(life)),
                        std::make_shared<FixedKeys>());
  }

 private:
  S3Fake server_{{}};
};

struct Kind {
  const char* name;
  std::unique_ptr<Storage> (*make)();
};

// Whatever has a manifest is whole. Returns the keys that belong to these.
std::set<std::string> ExpectCommittedMeansWhole(Storage* storage, bool aborts_allowed) {
  const auto store = storage->Open();
  std::set<std::string> keys;
  const std::vector<SaveId> ids = *ListManifests(store.get());
  for (const SaveId& id : ids) {
    const auto read = ReadManifest(store.get(), id);
    EXPECT_TRUE(read.ok()) << read.status();
    if (!read.ok()) continue;
    const Manifest* const manifest = std::get_if<Manifest>(&*read);
    EXPECT_TRUE(manifest != nullptr || aborts_allowed) << "an abort marker stays";
    if (manifest == nullptr) continue;
    const absl::Status whole =
        VerifyAll(store.get(), *manifest, [](uint64_t, uint64_t) { return absl::OkStatus(); });
    EXPECT_TRUE(whole.ok()) << whole;
    keys.insert(ManifestKey(id));
    keys.insert(PinKey(id));
    for (const ShardFile& file : manifest->files) keys.insert(AttemptKey(id, file.name));
    for (int rank = 0; rank < manifest->world_size; ++rank)
      keys.insert(AttemptKey(id, IndexName(rank, manifest->world_size)));
  }
  return keys;
}

class CrashTest : public testing::TestWithParam<Kind> {
 protected:
  CrashTest() {
    SetLogSink([](LogLevel, absl::string_view) {});
  }
  ~CrashTest() override { SetLogSink(nullptr); }

  // `body` gets storage as it was made by `prepare` and a life that ends at call 0, 1, 2, ... until it makes
  // no further call; `check` looks at what is left each time. Returns how many calls there were.
  using Prepare = std::function<void(Storage*)>;
  using Body = std::function<absl::Status(Storage*, std::shared_ptr<Life>)>;
  using Check = std::function<void(Storage*, const absl::Status& ended)>;
  void EndAtEveryCall(const Prepare& prepare, const Body& body, const Check& check) {
    for (bool last_happens : {false, true}) {
      for (uint64_t at = 0;; ++at) {
        ASSERT_LT(at, kCallsMax);
        SCOPED_TRACE(absl::StrCat("the program ends ", last_happens ? "after" : "before", " its call ", at));
        const std::unique_ptr<Storage> storage = GetParam().make();
        ASSERT_NO_FATAL_FAILURE(prepare(storage.get()));
        const auto life = std::make_shared<Life>(at, last_happens);
        const absl::Status ended = body(storage.get(), life);
        ExpectCommittedMeansWhole(storage.get(), true);
        ASSERT_NO_FATAL_FAILURE(check(storage.get(), ended));
        ASSERT_FALSE(HasFailure());
        if (!life->ended()) {
          ASSERT_TRUE(ended.ok()) << ended;
          ASSERT_GT(at, 0u);
          std::cout << "  " << at << " calls\n";
          break;
        }
      }
    }
  }
};

constexpr int64_t kSmall = 3;
constexpr int64_t kTwoParts = 1500;  // rows: more than one part of a multipart upload, if one rank writes all
// After `gtrain ckpt gc` nothing is there but claims and what is committed.
void ExpectNoOrphanAfterGc(Storage* storage) {
  const auto store = storage->Open();
  const auto garbage = FindGarbage(store.get(), absl::ZeroDuration());
  ASSERT_TRUE(garbage.ok()) << garbage.status();
  ASSERT_TRUE(DropGarbage(store.get(), *garbage).ok());
  const std::set<std::string> wanted = ExpectCommittedMeansWhole(storage, false);
  const std::vector<std::string> keys = *store->List("");
  std::vector<std::string> orphans;
  for (const std::string& key : keys) {
    if (!absl::StartsWith(key, kOwnerPrefix) && !wanted.contains(key)) orphans.push_back(key);
  }
  EXPECT_THAT(orphans, IsEmpty());
  EXPECT_THAT(*store->ListUnfinished(), IsEmpty());
}

// All ranks of a program share one life, or one of them has a life of its own.
constexpr int kAllRanks = -1;
std::vector<std::shared_ptr<Life>> LivesIn(const FakeJob& job, int mortal,
                                           const std::shared_ptr<Life>& life) {
  return mortal == kAllRanks ? Shared(job, life) : LivesOf(job.world_size, mortal, life);
}

class SaveCrashTest : public CrashTest {
 protected:
  void SaveCommitAndRetention(int world, int mortal, int64_t rows, std::set<int64_t>* resumed) {
    FakeJob job{.world_size = world};
    int64_t reported = -1;
    EndAtEveryCall(
        [&](Storage* storage) {
          job.generation = job.timeline = 1;
          ASSERT_TRUE(SaveStep(job, storage, 1, {.rows = rows}).ok());
        },
        [&](Storage* storage, std::shared_ptr<Life> life) {
          job.generation = job.timeline = 2;
          life->Arm();
          const MortalRanks ranks =
              SaveInLives(job, storage, {2}, LivesIn(job, mortal, life), {.rows = rows});
          reported = ranks.newest_reported();
          return ranks.first_error();
        },
        [&](Storage* storage, const absl::Status&) {
          job.generation = job.timeline = 3;
          const absl::StatusOr<int64_t> step = ResumeStep(job, storage, {.rows = rows});
          ASSERT_TRUE(step.ok()) << step.status();
          ASSERT_TRUE(*step == 1 || *step == 2) << *step;
          ASSERT_GE(*step, reported) << "it was reported as committed";
          resumed->insert(*step);
          ASSERT_TRUE(SaveStep(job, storage, 3, {.rows = rows}).ok());
          ASSERT_NO_FATAL_FAILURE(ExpectNoOrphanAfterGc(storage));
          const absl::StatusOr<int64_t> last = ResumeStep(job, storage, {.rows = rows});
          ASSERT_TRUE(last.ok()) << last.status();
          ASSERT_EQ(*last, 3);
        });
  }

  void ALaterCommitAndItsRetention(int world, int mortal, std::set<int64_t>* resumed) {
    FakeJob job{.world_size = world};
    int64_t reported = -1;
    EndAtEveryCall([](Storage*) {},
                   [&](Storage* storage, std::shared_ptr<Life> life) {
                     job.generation = job.timeline = 1;
                     const MortalRanks ranks =
                         RunProgram(job, storage, LivesIn(job, mortal, life), {},
                                    [&](FakeSession* session, Checkpointer* checkpointer, Weights* state,
                                        const Life& mine) -> absl::Status {
                                      for (const int64_t step : {1, 2, 3, 4, 5}) {
                                        // Rank 0 ends its fourth retention before the others' first call of
                                        // the fifth save.
                                        if (step == 5 && session->rank() == 0) life->Arm();
                                        state->Fill(step, session->rank());
                                        GT_ASSIGN_OR_RETURN(const bool saved, checkpointer->Save(step));
                                        if (!saved) return absl::InternalError("skipped");
                                        GT_RETURN_IF_ERROR(WaitInLife(checkpointer, mine));
                                      }
                                      return absl::OkStatus();
                                    });
                     reported = ranks.newest_reported();
                     return ranks.first_error();
                   },
                   [&](Storage* storage, const absl::Status&) {
                     job.generation = job.timeline = 2;
                     const absl::StatusOr<int64_t> step = ResumeStep(job, storage);
                     ASSERT_TRUE(step.ok()) << step.status();
                     ASSERT_GE(*step, reported) << "it was reported as committed";
                     resumed->insert(*step);
                     ASSERT_TRUE(SaveStep(job, storage, 6).ok());
                     ASSERT_NO_FATAL_FAILURE(ExpectNoOrphanAfterGc(storage));
                   });
  }

  void Restore(int world, int mortal) {
    FakeJob job{.world_size = world};
    EndAtEveryCall(
        [&](Storage* storage) {
          job.generation = job.timeline = 1;
          ASSERT_TRUE(SaveStep(job, storage, 1).ok());
        },
        [&](Storage* storage, std::shared_ptr<Life> life) {
          job.generation = job.timeline = 2;
          life->Arm();
          return ResumeStepInLives(job, storage, LivesIn(job, mortal, life)).status();
        },
        [&](Storage* storage, const absl::Status&) {
          job.generation = job.timeline = 3;
          const absl::StatusOr<int64_t> step = ResumeStep(job, storage);
          ASSERT_TRUE(step.ok()) << step.status();
          ASSERT_EQ(*step, 1);
        });
  }
};

TEST_P(SaveCrashTest, SaveCommitAndRetention_C1_C2) {
  for (int world : {1, 2}) {
    std::set<int64_t> resumed;
    SaveCommitAndRetention(world, kAllRanks, world == 1 ? kTwoParts : kSmall, &resumed);
    if (HasFailure()) return;
    EXPECT_EQ(resumed, (std::set<int64_t>{1, 2}));
  }
}

// The others find out that a rank is gone from what does not come, and from the head.
TEST_P(SaveCrashTest, OneRankEndsInASaveWhileTheOthersGoOn_C1_C2_C4) {
  constexpr int kWorld = 3;
  std::set<int64_t> resumed;
  for (int rank = 0; rank < kWorld; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank, " dies"));
    SaveCommitAndRetention(kWorld, rank, kSmall, &resumed);
    if (HasFailure()) return;
  }
  EXPECT_EQ(resumed, (std::set<int64_t>{1, 2}));
}

// A later save of a program deletes earlier ones without listing what is there: the fifth the fourth, in an
// object store the first four together.
TEST_P(SaveCrashTest, ALaterCommitAndItsRetention_C1_C2) {
  for (int world : {1, 2}) {
    std::set<int64_t> resumed;
    ALaterCommitAndItsRetention(world, kAllRanks, &resumed);
    if (HasFailure()) return;
    EXPECT_EQ(resumed, (std::set<int64_t>{4, 5}));
  }
}

TEST_P(SaveCrashTest, OneRankEndsInALaterSaveWhileTheOthersGoOn_C1_C2) {
  constexpr int kWorld = 2;
  std::set<int64_t> resumed;
  for (int rank = 0; rank < kWorld; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank, " dies"));
    ALaterCommitAndItsRetention(kWorld, rank, &resumed);
    if (HasFailure()) return;
  }
  EXPECT_EQ(resumed, (std::set<int64_t>{4, 5}));
}

TEST_P(SaveCrashTest, Restore_C1) { Restore(2, kAllRanks); }

TEST_P(SaveCrashTest, OneRankEndsInARestoreWhileTheOthersGoOn_C1) {
  constexpr int kWorld = 3;
  for (int rank = 0; rank < kWorld; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank, " dies"));
    Restore(kWorld, rank);
    if (HasFailure()) return;
  }
}

// After all its retries a request is refused: for ever, as of a gateway that is overloaded or a role that
// lost its rights, or the first few times, which the retries outlast.
TEST(S3ErrorTest, ARestoreTakesARefusalForNoDamage_S7_C9) {
  SetLogSink([](LogLevel, absl::string_view) {});
  for (const absl::Status& answer : {absl::UnavailableError("503"), absl::PermissionDeniedError("403")}) {
    Bucket bucket;
    FakeJob job{.world_size = 1};
    ASSERT_TRUE(SaveInLives(job, &bucket, {1, 2}, Immortal(job), {.keep = 2}).first_error().ok());
    for (const uint64_t errors : {uint64_t{2}, kNever}) {
      for (uint64_t at = 0;; ++at) {
        ASSERT_LT(at, kCallsMax);
        SCOPED_TRACE(absl::StrCat(answer.message(), errors == kNever ? " for ever" : " twice",
                                  " from HTTP request ", at));
        ++job.generation;
        ++job.timeline;
        const auto life = std::make_shared<Life>(at, errors, answer);
        life->Arm();
        std::atomic<int64_t> step{-2};
        const MortalRanks ranks = ResumeInLives(job, &bucket, {life}, {.keep = 2}, &step);
        const absl::Status status = ranks.first_error();
        ASSERT_FALSE(absl::IsDataLoss(status) || absl::IsNotFound(status)) << status;
        ASSERT_TRUE(step == 2 || (step == -2 && !status.ok())) << "step " << step;
        if (absl::IsUnavailable(answer) && errors == 2) {
          ASSERT_TRUE(status.ok()) << "retries did not help: " << status;
        }
        if (!life->met()) {
          ASSERT_GT(at, 0u);
          break;
        }
      }
    }
    ++job.generation;
    ++job.timeline;
    const absl::StatusOr<int64_t> later = ResumeStep(job, &bucket, {.keep = 2});
    ASSERT_TRUE(later.ok()) << later.status();
    ASSERT_EQ(*later, 2);
  }
  SetLogSink(nullptr);
}

// A verb of `gtrain ckpt`: each is begun, cut off anywhere, and done again.
struct Chore {
  const char* name;
  std::function<absl::Status(port::BlobStore* store)> run;
};

TEST_P(CrashTest, GcRmPinAndCp_C1) {
  const FakeJob job{.world_size = 1};
  FolderStorage from;
  ASSERT_TRUE(SaveStep(job, &from, 7, {.rows = kTwoParts}).ok());
  const auto source = from.Open();
  const auto quiet = [](uint64_t, uint64_t) { return absl::OkStatus(); };
  const std::vector<Chore> chores = {
      {"gc",
       [](port::BlobStore* store) -> absl::Status {
         GT_ASSIGN_OR_RETURN(const Garbage garbage, FindGarbage(store));
         return DropGarbage(store, garbage);
       }},
      {"rm",
       [](port::BlobStore* store) -> absl::Status {
         const auto found = FindCheckpoint(store, "1");
         if (absl::IsNotFound(found.status())) return absl::OkStatus();  // gone already
         GT_RETURN_IF_ERROR(found.status());
         return RemoveCheckpoint(store, found->id);
       }},
      {"cp",
       [&](port::BlobStore* store) -> absl::Status {
         GT_ASSIGN_OR_RETURN(const Manifest seven, FindCheckpoint(source.get(), "latest"));
         const absl::Status copied = CopyCheckpoint(source.get(), seven, store, quiet);
         return absl::IsAlreadyExists(copied) ? absl::OkStatus() : copied;
       }},
  };
  for (const Chore& chore : chores) {
    SCOPED_TRACE(chore.name);
    EndAtEveryCall(
        [&](Storage* storage) {
          FakeJob writer = job;
          writer.timeline = writer.generation = 2;
          ASSERT_TRUE(SaveStep(writer, storage, 1).ok());
          // An attempt that died, older than the newest commit, and that commit; step 1 is pinned against it.
          const auto store = storage->Open();
          ASSERT_TRUE(Pin(store.get(), ListManifests(store.get())->front()).ok());
          ASSERT_TRUE(
              store->PutIfAbsent(AttemptKey({.step = 1, .attempt = 9}, ShardName(0, 1)), "half").ok());
          writer.timeline = writer.generation = 3;
          ASSERT_TRUE(SaveStep(writer, storage, 9).ok());
          ASSERT_TRUE(
              store->PutIfAbsent(AttemptKey({.step = 1, .attempt = 9}, ShardName(0, 1)), "half").ok());
        },
        [&](Storage* storage, std::shared_ptr<Life> life) {
          const auto store = storage->OpenIn(life);
          life->Arm();
          return chore.run(store.get());
        },
        [&](Storage* storage, const absl::Status&) {
          FakeJob reader = job;
          reader.timeline = reader.generation = 4;
          const absl::StatusOr<int64_t> step = ResumeStep(reader, storage);
          ASSERT_TRUE(step.ok()) << step.status();
          ASSERT_EQ(*step, 9);
          const absl::Status again = chore.run(storage->Open().get());
          ASSERT_TRUE(again.ok()) << again;
          ASSERT_NO_FATAL_FAILURE(ExpectNoOrphanAfterGc(storage));
        });
    if (HasFailure()) return;
  }
}

// Fault C4: one file of the newest checkpoint at a time is not what was written.
class DamageTest : public CrashTest {
 protected:
  DamageTest() {
    SetLogSink([this](LogLevel level, absl::string_view line) {
      MutexLock lock(&mu_);
      if (level == LogLevel::kError) absl::StrAppend(&said_, line, "\n");
    });
  }
  std::string TakeSaid() {
    MutexLock lock(&mu_);
    return std::exchange(said_, "");
  }

  Mutex mu_;
  std::string said_;
};

enum class Damage { kBitFlipped, kCut, kOfAnotherStep, kSwapped, kDeleted };
constexpr const char* kDamageNames[] = {"a bit flipped", "cut", "the file of another step",
                                        "two files swapped", "deleted"};

TEST_P(DamageTest, AThousandDamagesFallBackLoudly_C4_C9) {
  constexpr int kCases = 1000;
  const auto storage = GetParam().make();
  FakeJob job{.world_size = 2};
  ASSERT_TRUE(SaveStep(job, storage.get(), 1).ok());
  const auto store = storage->Open();
  const SaveId before = ListManifests(store.get())->front();
  ASSERT_TRUE(Pin(store.get(), before).ok());
  job.generation = job.timeline = 2;
  ASSERT_TRUE(SaveStep(job, storage.get(), 2).ok());
  const SaveId newest = ListManifests(store.get())->front();

  const auto contents = [&](const SaveId& id) {
    std::vector<std::pair<std::string, std::string>> files;
    for (const std::string& key :
         {ManifestKey(id), AttemptKey(id, ShardName(0, 2)), AttemptKey(id, ShardName(1, 2))}) {
      files.emplace_back(key, *store->Get(key, 1 << 20));
    }
    return files;
  };
  const auto good = contents(newest), older = contents(before);
  const auto write = [&](size_t file, const std::string& data) {
    ASSERT_TRUE(store->Delete(good[file].first).ok());
    ASSERT_TRUE(store->PutIfAbsent(good[file].first, data).ok());
  };
  job.generation = job.timeline = 3;
  Rng rng(20261121);
  std::map<Damage, int> cases;
  for (int i = 0; i < kCases; ++i) {
    const size_t file = rng.Below(good.size());
    const size_t other = (file + 1 + rng.Below(good.size() - 1)) % good.size();
    const auto damage = static_cast<Damage>(rng.Below(std::size(kDamageNames)));
    ++cases[damage];
    SCOPED_TRACE(
        absl::StrCat("case ", i, ": ", good[file].first, ": ", kDamageNames[static_cast<int>(damage)]));
    std::string data = good[file].second;
    if (damage == Damage::kBitFlipped) {
      const size_t bit = rng.Below(data.size() * 8);
      data[bit / 8] = static_cast<char>(data[bit / 8] ^ (1 << bit % 8));
    } else if (damage == Damage::kCut) {
      data.resize(rng.Below(data.size()));
    } else if (damage == Damage::kOfAnotherStep) {
      data = older[file].second;
    } else if (damage == Damage::kSwapped) {
      data = good[other].second;
      ASSERT_NO_FATAL_FAILURE(write(other, good[file].second));
    }
    if (damage == Damage::kDeleted) {
      ASSERT_TRUE(store->Delete(good[file].first).ok());
    } else {
      ASSERT_NO_FATAL_FAILURE(write(file, data));
    }
    TakeSaid();
    const absl::StatusOr<int64_t> step = ResumeStep(job, storage.get());
    ASSERT_TRUE(step.ok()) << step.status();
    ASSERT_EQ(*step, 1);
    // Without its manifest a checkpoint does not exist: nothing to be loud about.
    if (damage != Damage::kDeleted || file != 0) {
      ASSERT_THAT(TakeSaid(), HasSubstr("falling back to the one before"));
    }
    ASSERT_NO_FATAL_FAILURE(write(file, good[file].second));
    ASSERT_NO_FATAL_FAILURE(write(other, good[other].second));
  }
  const absl::StatusOr<int64_t> last = ResumeStep(job, storage.get());
  ASSERT_TRUE(last.ok()) << last.status();
  ASSERT_EQ(*last, 2);
  for (const auto& [damage, count] : cases)
    std::cout << "  " << kDamageNames[static_cast<int>(damage)] << ": " << count << "\n";
}

template <typename T>
Kind KindOf(const char* name) {
  return {name, []() -> std::unique_ptr<Storage> { return std::make_unique<T>(); }};
}
std::string NameOf(const testing::TestParamInfo<Kind>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Stores, CrashTest,
                         testing::Values(KindOf<FolderStorage>("Directory"), KindOf<Bucket>("S3")), &NameOf);
INSTANTIATE_TEST_SUITE_P(Stores, SaveCrashTest,
                         testing::Values(KindOf<FolderStorage>("Directory"), KindOf<Bucket>("S3")), &NameOf);
INSTANTIATE_TEST_SUITE_P(Stores, DamageTest, testing::Values(KindOf<Memory>("Memory"), KindOf<Bucket>("S3")),
                         &NameOf);

}  // namespace
}  // namespace gtrain::ckpt
