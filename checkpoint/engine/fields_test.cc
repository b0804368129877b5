// Damage and hostility, field by field (C4, C9, C10). For each field of each file of a checkpoint a row says
// what a changed value means; every other change of it (of another type, absent, twice, out of range, changed
// without its checksum) is damage. The fields are those of a real file: one without a row fails the test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/catalog.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/lease_mark.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/store/faulty_store.h"
#include "checkpoint/store/memory_store.h"

namespace gtrain::ckpt {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kManyRanks = kPartRanks + 1;  // their files stand in parts

// The reaction of a program that resumes, or of rank 0 that gathers, to a changed field.
enum class Means {
  kDamage,      // refused; the one before is resumed, loudly and by name
  kNewer,       // written by a newer gtrain: refused by name, and nothing older is resumed
  kOtherState,  // whole, but not what this program registered: refused by name, nothing older is resumed
  kNothing,     // restored as if nothing were
};

struct Row {
  Means means;
  Json value;  // another value of the right type
};
using Table = std::map<std::string, Row>;

// A field that stands in the file: "files[].bytes".
struct Field {
  std::string name;
  Json::json_pointer place;  // the first one of that name
  bool operator<(const Field& other) const { return name < other.name; }
};

// Arrays of plain values and of pairs are values of their field.
void CollectFields(const Json& at, const std::string& name, const Json::json_pointer& place,
                   std::set<Field>* fields) {
  if (at.is_object()) {
    for (const auto& [key, value] : at.items()) {
      const std::string inside = name.empty() ? key : absl::StrCat(name, ".", key);
      fields->insert({inside, place / key});
      CollectFields(value, inside, place / key, fields);
    }
  } else if (at.is_array()) {
    for (size_t i = 0; i < at.size(); ++i) {
      if (at[i].is_object()) CollectFields(at[i], absl::StrCat(name, "[]"), place / i, fields);
    }
  }
}

// The names that stand for any key of a map: tensors in the header of a shard.
std::string Generic(std::string name, const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    if (name == key) return "<tensor>";
    if (absl::StartsWith(name, key + ".")) return "<tensor>" + name.substr(key.size());
  }
  return name;
}

constexpr char kSecond[] = "~second";  // becomes a second key of the same name in the text

std::string Sealed(const Json& object) {
  std::string text = object.dump(1);
  text = absl::StrReplaceAll(text, {{kSecond, ""}});
  text.resize(text.size() - 2);
  return absl::StrCat(text, ",\n \"checksum\": \"", Xxh3Hex(text), "\"\n}\n");
}

Json Unsealed(const std::string& text) {
  Json object = Json::parse(text);
  object.erase("checksum");
  return object;
}

struct Edit {
  std::string what;
  Means means;
  Json object;
  bool sealed = true;
};

Json OfAnotherType(const Json& value) {
  if (value.is_string()) return 7;
  if (value.is_boolean()) return 1;
  if (value.is_number()) return "7";
  return value.is_array() ? Json::object() : Json::array();
}

// None of them may be taken; the file must stay one that can be parsed.
std::vector<Json> OutOfRange(const Json& value) {
  if (value.is_number()) return {-1, 1.5, UINT64_MAX};
  if (value.is_string()) return {std::string(70'000, 'x'), "\x1b[2J"};
  if (value.is_array()) return {Json::array({nullptr}), Json::array({Json::array()}), Json::array({-1})};
  return {};
}

Json& Parent(Json* object, const Json::json_pointer& place) { return object->at(place.parent_pointer()); }

// All changes of one field.
std::vector<Edit> EditsOf(const Json& good, const Field& field, const Row& row, bool any_text) {
  std::vector<Edit> edits;
  const Json& value = good.at(field.place);
  const auto change = [&](const std::string& what, Means means, const std::function<void(Json*)>& how,
                          bool sealed = true) {
    Json object = good;
    how(&object);
    edits.push_back({absl::StrCat(field.name, ": ", what), means, std::move(object), sealed});
  };
  const auto set = [&](const Json& to) { return [&, to](Json* object) { object->at(field.place) = to; }; };
  change("another value", row.means, set(row.value));
  change("another value, its checksum is that of the old one", Means::kDamage, set(row.value), false);
  change("another type", Means::kDamage, set(OfAnotherType(value)));
  change("null", Means::kDamage, set(nullptr));
  const std::vector<Json> outside = OutOfRange(value);
  for (size_t i = 0; i < outside.size(); ++i) {
    // Text for people may hold anything; it is made harmless where it is shown (B7).
    const bool harmless = any_text && value.is_string() && i == 1;
    change(absl::StrCat("out of range, ", i), harmless ? row.means : Means::kDamage, set(outside[i]));
  }
  change("absent", Means::kDamage,
         [&](Json* object) { Parent(object, field.place).erase(field.place.back()); });
  change("twice", Means::kDamage, [&](Json* object) {
    Json& parent = Parent(object, field.place);
    parent[field.place.back() + kSecond] = parent[field.place.back()];
  });
  return edits;
}

void ExpectARowForEachField(const std::set<std::string>& fields, const Table& table) {
  for (const std::string& field : fields)
    EXPECT_TRUE(table.contains(field)) << "the format has a field \"" << field << "\" without a row here";
  for (const auto& [field, row] : table)
    EXPECT_TRUE(fields.contains(field)) << "a row of \"" << field << "\", which is not in the file";
}

// A model with a tensor of every kind that the format knows.
struct Model {
  static constexpr int64_t kRows = 8, kColumns = 10;

  Model(int rank, int world_size) : rank(rank), world_size(world_size) {
    const int64_t extra = kRows % world_size, rows = kRows / world_size + (rank < extra ? 1 : 0);
    first_row = rank * (kRows / world_size) + std::min<int64_t>(rank, extra);
    half.resize(static_cast<size_t>(rows * kColumns));
  }
  void Fill(int64_t step) {
    for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(step * 100) + static_cast<float>(i);
    for (size_t i = 0; i < half.size(); ++i)
      half[i] = static_cast<uint16_t>(step * 1000 + first_row * kColumns + static_cast<int64_t>(i));
    mine = step * 10 + rank;
  }
  bool Is(int64_t step) const {
    Model expected(rank, world_size);
    expected.Fill(step);
    return w == expected.w && half == expected.half && mine == expected.mine;
  }
  absl::Status Register(Checkpointer* c) {
    GT_RETURN_IF_ERROR(c->AddReplicated("w", MemoryOf(&w), {6, 50}, DType::kFloat32));
    const Sharding rows{.mesh = {{"pp", 1}, {"tp", world_size}}, .splits = {{0, "tp"}}, .only = {{"pp", 0}}};
    GT_RETURN_IF_ERROR(c->AddSharded("half", MemoryOf(&half), {kRows, kColumns}, rows, DType::kBFloat16));
    return c->AddPerRank("mine", {&mine, sizeof(mine)});
  }

  const int rank, world_size;
  int64_t first_row = 0;
  std::vector<float> w = std::vector<float>(6 * 50);  // replicated
  std::vector<uint16_t> half;                         // this rank's rows
  int64_t mine = 0;
};

// A directory with steps 1 and 2, and what becomes of programs that go on from it.
class FieldsTest : public testing::Test {
 protected:
  FieldsTest() {
    SetLogSink([this](LogLevel level, absl::string_view line) {
      MutexLock lock(&mu_);
      if (level != LogLevel::kInfo) absl::StrAppend(&said_, line, "\n");
    });
  }
  ~FieldsTest() override { SetLogSink(nullptr); }
  std::string TakeSaid() {
    MutexLock lock(&mu_);
    return std::exchange(said_, "");
  }

  // `put` may change what is written.
  using Put = std::function<void(absl::string_view key, std::string* text)>;
  class Editing final : public FaultyStore {
   public:
    Editing(port::BlobStore* base, Put put) : FaultyStore(base, {}), base_(base), put_(std::move(put)) {}
    using port::BlobStore::PutIfAbsent;
    absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
      if (!put_) return FaultyStore::PutIfAbsent(key, parts);
      std::string text;
      for (const absl::string_view part : parts) absl::StrAppend(&text, part);
      put_(key, &text);
      return base_->PutIfAbsent(key, text);
    }

   private:
    port::BlobStore* const base_;
    const Put put_;
  };

  // The work of each rank, with the checkpointer opened and its state registered.
  using Body = std::function<absl::Status(FakeSession*, Checkpointer*, Model*)>;
  std::vector<absl::Status> Run(const Body& body, const Put& put = nullptr) {
    std::vector<absl::Status> results(static_cast<size_t>(job_.world_size));
    ++job_.generation;
    ++job_.timeline;
    RunRanks(job_, [&](FakeSession* session) {
      results[static_cast<size_t>(session->rank())] = [&]() -> absl::Status {
        Model model(session->rank(), job_.world_size);
        GT_ASSIGN_OR_RETURN(
            auto checkpointer,
            OpenCheckpointer(session, {.uri = "x", .keep = 2, .commit_timeout = kLong}, EnvironmentOf(job_),
                             [&](const std::string&) -> absl::StatusOr<std::unique_ptr<port::BlobStore>> {
                               return std::make_unique<Editing>(&store_, put);
                             }));
        GT_RETURN_IF_ERROR(model.Register(checkpointer.get()));
        return body(session, checkpointer.get(), &model);
      }();
    });
    return results;
  }
  static absl::Status SaveOn(Checkpointer* checkpointer, Model* model, int64_t step) {
    model->Fill(step);
    GT_RETURN_IF_ERROR(checkpointer->Save(step).status());
    return checkpointer->Wait(kLong);
  }
  void SaveTwo() {
    const auto saved = Run([&](FakeSession*, Checkpointer* checkpointer, Model* model) -> absl::Status {
      for (const int64_t step : {1, 2}) GT_RETURN_IF_ERROR(SaveOn(checkpointer, model, step));
      return absl::OkStatus();
    });
    for (const absl::Status& status : saved) ASSERT_TRUE(status.ok()) << status;
    newest_ = ListManifests(&store_)->front();
  }
  std::string Get(const std::string& key) { return *store_.Get(key, 64 << 20); }
  void Replace(const std::string& key, const std::string& text) {
    ASSERT_TRUE(store_.Delete(key).ok());
    ASSERT_TRUE(store_.PutIfAbsent(key, text).ok());
  }

  // Resumes and looks at what came of it. `key`: the changed file.
  void ExpectResume(Means means, const std::string& key) {
    TakeSaid();
    const size_t world = static_cast<size_t>(job_.world_size);
    std::vector<int64_t> steps(world, -2);
    std::vector<char> right(world, 1);
    const auto results =
        Run([&](FakeSession* session, Checkpointer* checkpointer, Model* model) -> absl::Status {
          const size_t rank = static_cast<size_t>(session->rank());
          GT_ASSIGN_OR_RETURN(const auto restored, checkpointer->Restore());
          steps[rank] = restored ? restored->step : -1;
          if (!restored) return absl::OkStatus();
          right[rank] = model->Is(restored->step);
          return absl::OkStatus();
        });
    const std::string said = TakeSaid();
    for (size_t rank = 0; rank < world; ++rank) {
      EXPECT_TRUE(right[rank]) << "rank " << rank << " has not what was saved";
      const bool refused = means == Means::kNewer || means == Means::kOtherState;
      if (!refused) {
        EXPECT_TRUE(results[rank].ok()) << results[rank];
        EXPECT_EQ(steps[rank], means == Means::kDamage ? 1 : 2);
        continue;
      }
      EXPECT_FALSE(results[rank].ok()) << "step " << steps[rank] << " is resumed";
      EXPECT_FALSE(absl::IsDataLoss(results[rank])) << results[rank];
    }
    if (means == Means::kDamage) {
      EXPECT_THAT(said, AllOf(HasSubstr("falling back to the one before"), HasSubstr(key)));
    } else if (means == Means::kNewer) {
      EXPECT_THAT(std::string(results[0].message()), HasSubstr("version 99"));
    } else if (means == Means::kOtherState) {
      EXPECT_THAT(said + std::string(results[0].message()), HasSubstr("w"));
    }
  }

  FakeJob job_{.world_size = 2, .generation = 0, .timeline = 0};
  MemoryStore store_;
  SaveId newest_;
  Mutex mu_;
  std::string said_;
};

const char* const kOtherHash = "0123456789abcdef0123456789abcdef";

const Table& ManifestTable() {
  static const auto* const table = new Table{
      {"format", {Means::kDamage, "gtrain-shard-index"}},
      {"version", {Means::kNewer, 99}},
      {"cluster", {Means::kNothing, "another"}},
      {"job", {Means::kNothing, "another"}},
      {"job_hash", {Means::kNothing, "another"}},  // of this run's own epoch
      {"epoch", {Means::kDamage, 2}},
      {"timeline", {Means::kDamage, 9}},
      {"generation", {Means::kDamage, 9}},
      {"step", {Means::kDamage, 3}},
      {"attempt", {Means::kDamage, 9}},
      {"world_size", {Means::kDamage, 3}},
      {"finite", {Means::kDamage, false}},
      {"tensors", {Means::kDamage, Json::array()}},
      {"tensors[].name", {Means::kOtherState, "w2"}},
      {"tensors[].layout", {Means::kDamage, "per-rank"}},
      {"tensors[].dtype", {Means::kOtherState, "I32"}},
      {"tensors[].shape", {Means::kOtherState, Json::array({50, 6})}},
      {"tensors[].mesh", {Means::kDamage, Json::array({Json::array({"tp", 2}), Json::array({"dp", 2})})}},
      {"tensors[].splits", {Means::kDamage, Json::array({Json::array({0, "dp"})})}},
      {"tensors[].only", {Means::kDamage, Json::array({Json::array({"pp", 1})})}},
      {"files", {Means::kDamage, Json::array()}},
      {"files[].name", {Means::kDamage, "../../etc/passwd"}},
      {"files[].bytes", {Means::kDamage, 1 << 20}},
      {"files[].chunk_bytes", {Means::kDamage, 1 << 20}},
      {"files[].chunks", {Means::kDamage, Json::array({kOtherHash})}},
      {"files[].finite", {Means::kDamage, false}},
      {"files[].data_begin", {Means::kDamage, 8}},
      {"files[].per_rank", {Means::kDamage, Json::array({16})}},
  };
  return *table;
}

bool IsTextForPeople(const std::string& field) {
  return field == "cluster" || field == "job" || field == "job_hash";
}

TEST_F(FieldsTest, EachFieldOfAManifest_C4_C9_C10) {
  ASSERT_NO_FATAL_FAILURE(SaveTwo());
  const std::string key = ManifestKey(newest_), good = Get(key);
  const Json object = Unsealed(good);
  ASSERT_EQ(Sealed(object), good);
  std::set<Field> fields;
  CollectFields(object, "", Json::json_pointer(), &fields);
  std::set<std::string> names;
  for (const Field& field : fields) names.insert(field.name);
  ExpectARowForEachField(names, ManifestTable());
  const std::string seal = good.substr(good.rfind(",\n \"checksum\""));
  for (const Field& field : fields) {
    const auto row = ManifestTable().find(field.name);
    if (row == ManifestTable().end()) continue;
    for (const Edit& edit : EditsOf(object, field, row->second, IsTextForPeople(field.name))) {
      SCOPED_TRACE(edit.what);
      std::string text = Sealed(edit.object);
      if (!edit.sealed) text = text.substr(0, text.rfind(",\n \"checksum\"")) + seal;
      ASSERT_NO_FATAL_FAILURE(Replace(key, text));
      ExpectResume(edit.means, key);
    }
  }
  for (const std::string& bad : {absl::StrReplaceAll(good, {{"\"checksum\"", "\"checksun\""}}),
                                 good.substr(0, good.rfind(",\n \"checksum\"")) + "\n}\n"}) {
    SCOPED_TRACE("checksum");
    ASSERT_NO_FATAL_FAILURE(Replace(key, bad));
    ExpectResume(Means::kDamage, key);
  }
  ASSERT_NO_FATAL_FAILURE(Replace(key, good));
  ExpectResume(Means::kNothing, key);
}

const Table& PartRefTable() {
  static const auto* const table = new Table{
      {"parts", {Means::kDamage, Json::array()}},         {"parts[].bytes", {Means::kDamage, 1 << 20}},
      {"parts[].xxh3_128", {Means::kDamage, kOtherHash}}, {"parts[].finite", {Means::kDamage, false}},
      {"parts[].file_bytes", {Means::kDamage, 8}},        {"parts[].chunks", {Means::kDamage, 1}},
  };
  return *table;
}

const Table& PartTable() {
  static const auto* const table = new Table{
      {"format", {Means::kDamage, "gtrain-shard-index"}},
      {"version", {Means::kNewer, 99}},
      {"epoch", {Means::kDamage, 2}},
      {"timeline", {Means::kDamage, 9}},
      {"generation", {Means::kDamage, 9}},
      {"step", {Means::kDamage, 3}},
      {"attempt", {Means::kDamage, 9}},
      {"world_size", {Means::kDamage, kManyRanks + 1}},
      {"part", {Means::kDamage, 1}},
      {"verified", {Means::kNothing, "step-000000000007.e0001.t0001.g0001.a01"}},
      {"files", {Means::kDamage, Json::array()}},
      {"files[].name", {Means::kDamage, "../../etc/passwd"}},
      {"files[].bytes", {Means::kDamage, 1 << 20}},
      {"files[].chunk_bytes", {Means::kDamage, 1 << 20}},
      {"files[].chunks", {Means::kDamage, Json::array({kOtherHash})}},
      {"files[].finite", {Means::kDamage, false}},
      {"files[].data_begin", {Means::kDamage, 8}},
      {"files[].per_rank", {Means::kDamage, Json::array({16})}},
  };
  return *table;
}

// With many ranks the files stand in parts, of which the manifest has the hashes. A part that is changed
// alone is not the part that the manifest names; with that hash computed again each of its fields is judged.
TEST_F(FieldsTest, EachFieldOfAPartAndOfWhatTheManifestSaysOfIt_C4_C9_C10) {
  job_.world_size = kManyRanks;
  ASSERT_NO_FATAL_FAILURE(SaveTwo());
  job_.world_size = 2;  // they read all parts as well, and faster
  const std::string root_key = ManifestKey(newest_), good_root = Get(root_key);
  const Json root = Unsealed(good_root);
  std::set<Field> fields;
  CollectFields(root, "", Json::json_pointer(), &fields);
  std::set<std::string> names;
  for (const Field& field : fields) {
    if (absl::StartsWith(field.name, "parts")) names.insert(field.name);
  }
  ExpectARowForEachField(names, PartRefTable());
  for (const Field& field : fields) {
    const auto row = PartRefTable().find(field.name);
    if (row == PartRefTable().end()) continue;
    for (const Edit& edit : EditsOf(root, field, row->second, false)) {
      if (!edit.sealed) continue;  // as in the test above
      SCOPED_TRACE(edit.what);
      ASSERT_NO_FATAL_FAILURE(Replace(root_key, Sealed(edit.object)));
      // The loud line names the manifest or the part.
      ExpectResume(edit.means, AttemptName(newest_));
    }
  }
  ASSERT_NO_FATAL_FAILURE(Replace(root_key, good_root));

  const std::string key = AttemptKey(newest_, PartName(0, PartCount(kManyRanks))), good = Get(key);
  const Json part = Unsealed(good);
  ASSERT_EQ(Sealed(part), good);
  fields.clear();
  names.clear();
  CollectFields(part, "", Json::json_pointer(), &fields);
  for (const Field& field : fields) names.insert(field.name);
  ExpectARowForEachField(names, PartTable());
  for (const Field& field : fields) {
    const auto row = PartTable().find(field.name);
    if (row == PartTable().end()) continue;
    bool alone = true;  // once, without the hash made anew
    for (const Edit& edit : EditsOf(part, field, row->second, false)) {
      if (!edit.sealed) continue;
      SCOPED_TRACE(edit.what);
      const std::string text = Sealed(edit.object);
      ASSERT_NO_FATAL_FAILURE(Replace(key, text));
      if (std::exchange(alone, false)) ExpectResume(Means::kDamage, key);
      Json named = root;
      named["parts"][0]["bytes"] = text.size();
      named["parts"][0]["xxh3_128"] = Xxh3Hex(text);
      ASSERT_NO_FATAL_FAILURE(Replace(root_key, Sealed(named)));
      ExpectResume(edit.means, AttemptName(newest_));
      ASSERT_NO_FATAL_FAILURE(Replace(root_key, good_root));
    }
  }
  ASSERT_TRUE(store_.Delete(key).ok());
  ExpectResume(Means::kDamage, key);
  ASSERT_TRUE(store_.PutIfAbsent(key, good).ok());
  ExpectResume(Means::kNothing, key);
}

const Table& OwnerTable() {
  // The owner of a directory may commit there. Whatever a claim says, or does not say any more, loses no
  // checkpoint of the job.
  static const auto* const table = new Table{{"format", {Means::kNothing, "gtrain-shard-index"}},
                                             {"version", {Means::kNothing, 99}},
                                             {"epoch", {Means::kNothing, 2}},
                                             {"cluster", {Means::kNothing, "another"}},
                                             {"job", {Means::kNothing, "another"}},
                                             {"job_hash", {Means::kNothing, "another"}}};
  return *table;
}

TEST_F(FieldsTest, EachFieldOfAnOwnersClaimLosesNoCheckpoint_C4_C10) {
  ASSERT_NO_FATAL_FAILURE(SaveTwo());
  const std::string key = OwnerKey(newest_.epoch), good = Get(key);
  const Json object = Unsealed(good);
  ASSERT_EQ(Sealed(object), good);
  std::set<Field> fields;
  CollectFields(object, "", Json::json_pointer(), &fields);
  std::set<std::string> names;
  for (const Field& field : fields) names.insert(field.name);
  ExpectARowForEachField(names, OwnerTable());
  for (const Field& field : fields) {
    const auto row = OwnerTable().find(field.name);
    if (row == OwnerTable().end()) continue;
    for (const Edit& edit : EditsOf(object, field, row->second, true)) {
      SCOPED_TRACE(edit.what);
      std::string text = Sealed(edit.object);
      if (!edit.sealed) text = absl::StrReplaceAll(good, {{"\"epoch\": 1", "\"epoch\": 3"}});
      ASSERT_NO_FATAL_FAILURE(Replace(key, text));
      ExpectResume(Means::kNothing, key);
      // Claims that were made meanwhile go: the next case begins with the one of the job.
      const std::vector<std::string> claims = *store_.List(kOwnerPrefix);
      for (const std::string& claim : claims) ASSERT_TRUE(store_.Delete(claim).ok());
      ASSERT_TRUE(store_.PutIfAbsent(key, good).ok());
    }
  }
}

const Table& IndexTable() {
  static const auto* const table = new Table{
      {"format", {Means::kDamage, "gtrain-checkpoint"}},
      {"version", {Means::kDamage, 99}},  // ranks of one job are of one gtrain
      {"epoch", {Means::kDamage, 2}},
      {"timeline", {Means::kDamage, 9999}},
      {"generation", {Means::kDamage, 9999}},
      {"step", {Means::kDamage, 9999}},
      {"attempt", {Means::kDamage, 9}},
      {"rank", {Means::kDamage, 0}},
      {"world_size", {Means::kDamage, 3}},
      {"file", {Means::kDamage, Json::object()}},
      {"file.name", {Means::kDamage, "rank-00000-of-00002.safetensors"}},
      {"file.bytes", {Means::kDamage, 1 << 20}},
      {"file.chunk_bytes", {Means::kDamage, 1 << 20}},
      {"file.chunks", {Means::kNothing, Json::array({kOtherHash})}},  // only reading the shard can tell
      {"file.finite", {Means::kNothing, false}},
      {"file.data_begin", {Means::kDamage, 8}},
      {"file.per_rank", {Means::kDamage, Json::array({16})}},
      // Retention may use this field; an attempt that never existed keeps more than is needed.
      {"verified", {Means::kNothing, "step-000000000007.e0001.t0001.g0001.a01"}},
  };
  return *table;
}

// An index is read once, by rank 0 that gathers. An error in it ends the save, by name.
TEST_F(FieldsTest, EachFieldOfAnIndexEndsTheSave_C4_C10) {
  ASSERT_NO_FATAL_FAILURE(SaveTwo());
  int64_t step = 10;
  // Saves a step in which rank 1's index is changed.
  const auto save = [&](const std::function<std::string(const std::string&)>& change) {
    ++step;
    bool changed = false;
    const auto results = Run([&](FakeSession*, Checkpointer* checkpointer,
                                 Model* model) { return SaveOn(checkpointer, model, step); },
                             [&](absl::string_view key, std::string* text) {
                               if (!absl::EndsWith(key, IndexName(1, 2))) return;
                               *text = change(*text);
                               changed = true;
                             });
    EXPECT_TRUE(changed) << "no index was put";
    return results[0];
  };
  std::string good;
  ASSERT_TRUE(save([&](const std::string& text) { return good = text; }).ok());
  std::set<Field> fields;
  CollectFields(Unsealed(good), "", Json::json_pointer(), &fields);
  std::set<std::string> names;
  for (const Field& field : fields) names.insert(field.name);
  ExpectARowForEachField(names, IndexTable());
  for (const Field& field : fields) {
    const auto row = IndexTable().find(field.name);
    if (row == IndexTable().end()) continue;
    const size_t edits = EditsOf(Unsealed(good), field, row->second, false).size();
    for (size_t i = 0; i < edits; ++i) {
      Edit edit;
      const absl::Status saved = save([&](const std::string& text) {
        // Changes this save's own index: its numbers differ from those of the first.
        edit = EditsOf(Unsealed(text), field, row->second, false)[i];
        const std::string sealed = Sealed(edit.object);
        if (edit.sealed) return sealed;
        return sealed.substr(0, sealed.rfind(",\n \"checksum\"")) +
               text.substr(text.rfind(",\n \"checksum\""));
      });
      SCOPED_TRACE(edit.what);
      if (edit.means == Means::kNothing) {
        EXPECT_TRUE(saved.ok()) << saved;
      } else {
        EXPECT_FALSE(saved.ok()) << "committed";
        EXPECT_THAT(std::string(saved.message()), AnyOf(HasSubstr("rank 1"), HasSubstr("rank-00001")));
      }
    }
  }
}

// The header of a shard and its data. Changed alone they have not the hashes of the manifest. With hashes
// made anew for it, a header is judged by `gtrain ckpt verify`; a restore goes by the manifest and is right.
TEST_F(FieldsTest, EachFieldOfAShardsHeaderAndItsData_C4_C9_C10) {
  ASSERT_NO_FATAL_FAILURE(SaveTwo());
  const std::string manifest_key = ManifestKey(newest_), good_manifest = Get(manifest_key);
  const Manifest manifest = std::get<Manifest>(*ParseManifest(manifest_key, good_manifest));
  const std::string key = AttemptKey(newest_, ShardName(0, 2)), good = Get(key);
  const size_t begin = manifest.files[0].data_begin;
  const Json header = Json::parse(good.substr(8, begin - 8));
  std::vector<std::string> tensors;
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") tensors.push_back(name);
  }
  ASSERT_GE(tensors.size(), 2u);
  std::set<Field> fields;
  CollectFields(header, "", Json::json_pointer(), &fields);
  const Table table = {
      {"__metadata__", {Means::kNothing, Json::object()}},  // what other programs may write there
      {"__metadata__.format", {Means::kNothing, "pt"}},
      {"<tensor>", {Means::kDamage, Json::object()}},
      {"<tensor>.dtype", {Means::kDamage, "U8"}},
      {"<tensor>.shape", {Means::kDamage, Json::array({1})}},
      {"<tensor>.data_offsets", {Means::kDamage, Json::array({0, 8})}},
  };
  std::set<std::string> names;
  for (const Field& field : fields) names.insert(Generic(field.name, tensors));
  ExpectARowForEachField(names, table);

  // The file with another header of the same length, if it fits.
  const auto with_header = [&](const Json& changed) {
    std::string json = absl::StrReplaceAll(changed.dump(), {{kSecond, ""}});
    if (json.size() > begin - 8) return std::string();
    json.resize(begin - 8, ' ');
    return absl::StrCat(good.substr(0, 8), json, good.substr(begin));
  };
  const auto verify = [&] {
    const auto read = ReadManifest(&store_, newest_);
    if (!read.ok()) return read.status();
    return VerifyAll(&store_, std::get<Manifest>(*read), [](uint64_t, uint64_t) { return absl::OkStatus(); });
  };
  // The manifest with the hashes of `text`.
  const auto with_hashes_of = [&](const std::string& text) {
    Json object = Unsealed(good_manifest);
    Json& file = object["files"][0];
    if (file.contains("xxh3_128")) file["xxh3_128"] = Xxh3Hex(text);
    file["chunks"] = Json::array({Xxh3Hex(text)});
    return Sealed(object);
  };
  int judged = 0;
  for (const Field& field : fields) {
    const auto row = table.find(Generic(field.name, tensors));
    if (row == table.end()) continue;
    for (const Edit& edit : EditsOf(header, field, row->second, true)) {
      SCOPED_TRACE(edit.what);
      const std::string text = with_header(edit.object);
      if (text.empty() || text == good) continue;  // longer than the header may be
      ASSERT_NO_FATAL_FAILURE(Replace(key, text));
      ExpectResume(Means::kDamage, key);
      EXPECT_TRUE(absl::IsDataLoss(verify())) << verify();
      ASSERT_NO_FATAL_FAILURE(Replace(manifest_key, with_hashes_of(text)));
      ExpectResume(Means::kNothing, key);
      const absl::Status sound = verify();
      const bool metadata = absl::StartsWith(field.name, "__metadata__");
      if (!metadata) {
        EXPECT_TRUE(absl::IsDataLoss(sound)) << sound;
        EXPECT_THAT(std::string(sound.message()), HasSubstr(key));
      } else if (absl::StrContains(edit.what, ": another value") && edit.sealed) {
        EXPECT_TRUE(sound.ok()) << sound;
      }
      ++judged;
      ASSERT_NO_FATAL_FAILURE(Replace(manifest_key, good_manifest));
    }
  }
  EXPECT_GT(judged, 15);
  // The length of the header, and each tensor's data.
  std::vector<std::pair<std::string, size_t>> places = {{"header length", 0}, {"header length, high", 7}};
  for (const std::string& name : tensors) {
    const size_t from = header[name]["data_offsets"][0], to = header[name]["data_offsets"][1];
    places.emplace_back(name + ", its first byte", begin + from);
    places.emplace_back(name + ", its last byte", begin + to - 1);
  }
  for (const auto& [what, at] : places) {
    SCOPED_TRACE(what);
    std::string text = good;
    text[at] = static_cast<char>(text[at] ^ 1);
    ASSERT_NO_FATAL_FAILURE(Replace(key, text));
    ExpectResume(Means::kDamage, key);
    EXPECT_TRUE(absl::IsDataLoss(verify())) << verify();
  }
  for (const std::string& text : {good + "x", good.substr(0, good.size() - 1), std::string()}) {
    SCOPED_TRACE(absl::StrCat("a length of ", text.size()));
    ASSERT_NO_FATAL_FAILURE(Replace(key, text));
    ExpectResume(Means::kDamage, key);
  }
  ASSERT_NO_FATAL_FAILURE(Replace(key, good));
  ExpectResume(Means::kNothing, key);
}

// A lease says whether an owner is at work. Any that is not one of ours is no lease.
TEST(LeaseFields, EachFieldOfALease_C4_C10) {
  const LeaseMark mark{.name = {.epoch = 2, .renewal = 3},
                       .since = 1'763'720'000,
                       .generation = 5,
                       .holder = {.host = "node1", .machine = 77, .pid = 4242, .started = 99, .nonce = 7}};
  const Table table = {
      {"format", {Means::kDamage, "gtrain-checkpoint-owner"}},
      {"version", {Means::kDamage, 99}},
      {"epoch", {Means::kDamage, 4}},
      {"renewal", {Means::kDamage, 4}},
      {"since", {Means::kNothing, 8}},
      {"generation", {Means::kNothing, 8}},
      {"host", {Means::kNothing, "node2"}},
      {"machine", {Means::kNothing, 8}},
      {"pid", {Means::kNothing, 8}},
      {"started", {Means::kNothing, 8}},
      {"nonce", {Means::kNothing, 8}},
  };
  const std::set<std::string> any_number = {"machine", "started", "nonce"};
  const std::string good = Print(mark);
  const Json object = Unsealed(good);
  ASSERT_EQ(Sealed(object), good);
  std::set<Field> fields;
  CollectFields(object, "", Json::json_pointer(), &fields);
  std::set<std::string> names;
  for (const Field& field : fields) names.insert(field.name);
  ExpectARowForEachField(names, table);
  for (const Field& field : fields) {
    const auto row = table.find(field.name);
    if (row == table.end()) continue;
    for (const Edit& edit : EditsOf(object, field, row->second, field.name == "host")) {
      SCOPED_TRACE(edit.what);
      if (any_number.contains(field.name) && absl::EndsWith(edit.what, "out of range, 2")) continue;
      std::string text = Sealed(edit.object);
      if (!edit.sealed)
        text = text.substr(0, text.rfind(",\n \"checksum\"")) + good.substr(good.rfind(",\n \"checksum\""));
      const absl::Status parsed = ParseLeaseMark(LeaseKey(mark.name), text).status();
      if (edit.means == Means::kNothing) {
        EXPECT_TRUE(parsed.ok()) << parsed;
      } else {
        EXPECT_TRUE(absl::IsDataLoss(parsed)) << parsed;
      }
    }
  }
}

}  // namespace
}  // namespace gtrain::ckpt
