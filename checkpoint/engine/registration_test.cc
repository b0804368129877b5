// Tests everything that a program can register through whole checkpoints: boxes of any cut, bytes of any
// length, state of ranks that no longer exist, tensors that may be missing; and what is refused, by name.
#include "checkpoint/engine/registration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "base/test_folder.h"
#include "checkpoint/engine/admin.h"
#include "checkpoint/engine/boxes.h"
#include "checkpoint/engine/engine_test_world.h"
#include "checkpoint/engine/hosted_fake.h"
#include "sharding/local_box.h"
#include "sharding/overlap.h"
#include "sharding/random_boxes.h"

namespace gtrain::ckpt {
namespace {

using sharding::Box;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<std::unique_ptr<Checkpointer>> Open(const FakeJob& job, FakeSession* session,
                                                   const std::string& folder) {
  return OpenCheckpointer(session, {.uri = folder, .commit_timeout = kLong}, EnvironmentOf(job),
                          &OpenDirectoryStore);
}

FakeJob JobOf(int world, uint64_t generation) {
  return {.world_size = world, .generation = generation, .timeline = generation};
}

// ------------------------------------------------------------------ boxes

struct BoxedTensor {
  std::vector<int64_t> shape;
  DType dtype;
};

const std::vector<BoxedTensor>& Model() {
  static const std::vector<BoxedTensor> model = {{{10}, DType::kBool},          {{9, 5}, DType::kFloat8E4M3},
                                                 {{1031, 517}, DType::kUint32}, {{}, DType::kComplex64},
                                                 {{7, 3, 4}, DType::kInt16},    {{9, 5}, DType::kUint64}};
  return model;
}

// Byte b of element i of tensor t.
char ByteOf(size_t t, uint64_t element, uint64_t b) {
  return static_cast<char>((element * 2654435761u >> (b * 4)) + t * 37 + b);
}

std::string Whole(size_t t) {
  const uint64_t width = DTypeSize(Model()[t].dtype);
  std::string bytes(*ElementCount(Model()[t].shape, Model()[t].dtype) * width, '\0');
  for (uint64_t i = 0; i < bytes.size(); ++i) bytes[i] = ByteOf(t, i / width, i % width);
  return bytes;
}

std::string PartOf(size_t t, const Box& box) {
  const uint64_t width = DTypeSize(Model()[t].dtype);
  std::string part(sharding::Elements(box) * width, '\0');
  const std::string whole = Whole(t);
  const auto overlap = sharding::Overlap::Of(sharding::WholeBox(Model()[t].shape), box, width);
  overlap.ForEachRun(0, whole.size(), [&](uint64_t from, uint64_t to, uint64_t bytes) {
    part.replace(to, bytes, whole, from, bytes);
  });
  return part;
}

absl::Status AddBoxOf(Checkpointer* c, const std::string& name, std::string* part, const BoxedTensor& tensor,
                      const Box& box) {
  std::vector<int64_t> begin, local;
  for (const sharding::Interval& i : box) {
    begin.push_back(i.begin);
    local.push_back(i.size);
  }
  return c->AddBox(name, MemoryOf(part), tensor.shape, begin, local, tensor.dtype);
}

// Saved under the boxes of one world and restored under those of the next, again and again (C6).
TEST(Boxes, AnyCutIsRestoredUnderAnyOther_C6) {
  Rng rng(41);
  const std::string folder = TestFolder();
  int64_t step = 0;
  for (int world : {4, 8, 3, 1, 6, 5}) {
    ++step;
    std::vector<std::vector<Box>> boxes;  // of each tensor, by rank
    for (const BoxedTensor& t : Model()) boxes.push_back(sharding::RandomBoxes(&rng, t.shape, world));
    if (step > 1) boxes[5] = boxes[1];  // cut alike: one list
    const FakeJob job = JobOf(world, static_cast<uint64_t>(step));
    RunRanks(job, [&](FakeSession* session) {
      const auto rank = static_cast<size_t>(session->rank());
      auto c = Open(job, session, folder);
      ASSERT_TRUE(c.ok()) << c.status();
      std::vector<std::string> right, parts;
      for (size_t t = 0; t < Model().size(); ++t) {
        right.push_back(PartOf(t, boxes[t][rank]));
        parts.push_back(step == 1 ? right[t] : std::string(right[t].size(), '\0'));
      }
      for (size_t t = 0; t < Model().size(); ++t) {
        const absl::Status added =
            AddBoxOf(c->get(), absl::StrCat("t", t), &parts[t], Model()[t], boxes[t][rank]);
        ASSERT_TRUE(added.ok()) << added;
      }
      const auto restored = (*c)->Restore();
      ASSERT_TRUE(restored.ok()) << restored.status();
      EXPECT_EQ(restored->has_value(), step > 1);
      EXPECT_TRUE(parts == right) << "rank " << rank << " is not bit-identical";
      const auto saved = (*c)->Save(step);
      ASSERT_TRUE(saved.ok() && *saved) << saved.status();
      ASSERT_TRUE((*c)->Wait(kLong).ok());
    });
    auto store = *OpenDirectoryStore(folder);
    const Manifest m = *FindCheckpoint(store.get(), "latest");
    ASSERT_EQ(m.id.step, step);
    EXPECT_TRUE(VerifyAll(store.get(), m, [](uint64_t, uint64_t) { return absl::OkStatus(); }).ok());
    // Programs of people see whole tensors.
    for (size_t t = 0; t < Model().size(); ++t)
      EXPECT_EQ(*LoadTensor(store.get(), m, absl::StrCat("t", t)), Whole(t));
    uint64_t data = 0, all = 0;
    for (const ShardFile& file : m.files) data += file.bytes - file.data_begin;
    for (size_t t = 0; t < Model().size(); ++t) all += Whole(t).size();
    EXPECT_EQ(data, all) << "something is written twice";
  }
}

// 10 over 4 is 3, 3, 3, 1 (torch.chunk) and 9 over 8 leaves ranks without anything: the same as words and as
// boxes, and back.
TEST(Boxes, ChunksOfDTensorAreOneWord) {
  const std::string folder = TestFolder();
  for (const bool as_boxes : {false, true, false}) {
    static int64_t step = 0;
    ++step;
    const FakeJob job = JobOf(8, static_cast<uint64_t>(step));
    RunRanks(job, [&](FakeSession* session) {
      auto c = Open(job, session, folder);
      ASSERT_TRUE(c.ok()) << c.status();
      const Sharding chunks{.mesh = {{"dp", 2}, {"tp", 4}}, .splits = {{0, "tp", SplitRule::kChunk}}};
      const Sharding eighths{.mesh = {{"fsdp", 8}}, .splits = {{0, "fsdp", SplitRule::kChunk}}};
      const LocalBox ten = *LocalBoxOf({10}, chunks, session->rank());
      const LocalBox nine = *LocalBoxOf({9}, eighths, session->rank());
      EXPECT_EQ(ten.shape[0], session->rank() % 4 == 3 ? 1 : 3);
      EXPECT_EQ(nine.shape[0], session->rank() < 4 ? 2 : session->rank() == 4 ? 1 : 0);
      std::vector<int64_t> a(static_cast<size_t>(ten.shape[0])), b(static_cast<size_t>(nine.shape[0]));
      if (as_boxes) {
        ASSERT_TRUE((*c)->AddBox("a", MemoryOf(&a), {10}, ten.begin, ten.shape, DType::kInt64).ok());
        ASSERT_TRUE((*c)->AddBox("b", MemoryOf(&b), {9}, nine.begin, nine.shape, DType::kInt64).ok());
      } else {
        ASSERT_TRUE((*c)->AddSharded("a", MemoryOf(&a), {10}, chunks, DType::kInt64).ok());
        ASSERT_TRUE((*c)->AddSharded("b", MemoryOf(&b), {9}, eighths, DType::kInt64).ok());
      }
      const auto restored = (*c)->Restore();
      ASSERT_TRUE(restored.ok()) << restored.status();
      for (size_t i = 0; i < a.size(); ++i) {
        if (step > 1) {
          EXPECT_EQ(a[i], 100 + ten.begin[0] + static_cast<int64_t>(i));
        }
        a[i] = 100 + ten.begin[0] + static_cast<int64_t>(i);
      }
      for (size_t i = 0; i < b.size(); ++i) {
        if (step > 1) {
          EXPECT_EQ(b[i], 200 + nine.begin[0] + static_cast<int64_t>(i));
        }
        b[i] = 200 + nine.begin[0] + static_cast<int64_t>(i);
      }
      ASSERT_TRUE(*(*c)->Save(step));
      ASSERT_TRUE((*c)->Wait(kLong).ok());
    });
  }
}

// Every rank gets the same message, with the tensor and the ranks in it.
TEST(Boxes, ThatDoNotFitAreNamedOnEveryRank) {
  struct Case {
    std::vector<Box> by_rank;
    const char* says;
  };
  const std::vector<Case> cases = {
      {{{{0, 5}}, {{4, 6}}, {{0, 0}}}, "\"w\": rank 0 holds [0:5] and rank 1 [4:10]"},
      {{{{0, 5}}, {{5, 4}}, {{0, 5}}}, "\"w\": the boxes of ranks 0 to 2 hold 9 of its 10 elements"}};
  for (const Case& one : cases) {
    const FakeJob job = JobOf(3, 1);
    const std::string folder = TestFolder();
    RunRanks(job, [&](FakeSession* session) {
      auto c = Open(job, session, folder);
      ASSERT_TRUE(c.ok()) << c.status();
      const sharding::Interval mine = one.by_rank[static_cast<size_t>(session->rank())][0];
      std::vector<float> w(static_cast<size_t>(mine.size)), whole(4);
      ASSERT_TRUE((*c)->AddReplicated("other", MemoryOf(&whole), {4}, DType::kFloat32).ok());
      ASSERT_TRUE((*c)->AddBox("w", MemoryOf(&w), {10}, {mine.begin}, {mine.size}, DType::kFloat32).ok());
      const absl::Status status = (*c)->Restore().status();
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(one.says));
    });
  }
}

// The limit is that of the manifest, and is met before anything is saved.
TEST(Boxes, MoreWaysToCutThanAManifestHoldsAreRefused) {
  std::vector<Registered> registered(kBoxRanksMax + 1);
  std::vector<OwnBox> own;
  for (size_t i = 0; i < registered.size(); ++i) {
    const auto rows = static_cast<int64_t>(i + 1);
    registered[i].tensor = {.name = absl::StrCat("t", i), .layout = Layout::kBoxes, .shape = {rows}};
    own.push_back({i, {{0, rows}}});
  }
  Agreement alone(nullptr);
  const absl::Status refused = ShareBoxes(&alone, own, &registered);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("500001 ways"), HasSubstr("\"t500000\""), HasSubstr("use AddSharded")));
  // The same number of tensors, all cut alike, takes one list.
  for (size_t i = 0; i < registered.size(); ++i) {
    registered[i].tensor.shape = {4};
    own[i].box = {{0, 4}};
  }
  ASSERT_TRUE(ShareBoxes(&alone, own, &registered).ok());
  EXPECT_EQ(registered[0].tensor.boxes, registered[kBoxRanksMax].tensor.boxes);
}

TEST(Registration, WrongSizesAreErrorsWithBothNumbers) {
  const Sharding rows{.mesh = {{"tp", 4}}, .splits = {{0, "tp", SplitRule::kChunk}}};
  Registration state(3, 4);  // rank 3 holds one of ten rows
  float data[40] = {};
  const auto message = [](const absl::Status& status) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(message(state.AddSharded("w", {data, 48}, {10, 4}, rows, DType::kFloat32)),
            "\"w\" wants 16 bytes for [1,4] of F32 on this rank, and 48 are given");
  EXPECT_EQ(message(state.AddReplicated("w", {data, 16}, {3}, DType::kFloat32)),
            "\"w\" wants 12 bytes for [3] of F32 on this rank, and 16 are given");
  EXPECT_EQ(message(state.AddBox("w", {data, 8}, {10}, {3}, {3}, DType::kBool)),
            "\"w\" wants 3 bytes for [3] of BOOL on this rank, and 8 are given");
  EXPECT_THAT(message(state.AddBox("w", {data, 3}, {10}, {8}, {3}, DType::kBool)),
              HasSubstr("the box [8:11] on this rank, outside of [0:10]"));
  EXPECT_THAT(message(state.AddBox("w", {data, 3}, {10}, {INT64_MAX}, {3}, DType::kBool)),
              HasSubstr("outside"));
  EXPECT_THAT(message(state.AddBox("w", {data, 3}, {10}, {8, 0}, {3}, DType::kBool)),
              HasSubstr("1 dimensions"));
  const Sharding elsewhere{.mesh = {{"pp", 4}}, .only = {{"pp", 0}}};
  EXPECT_THAT(message(state.AddSharded("w", {data, 40}, {10}, elsewhere, DType::kFloat32)),
              HasSubstr("is only on other ranks, and 40 bytes are given"));
  EXPECT_THAT(message(state.AddReplicated("w", {data, 4}, {1}, static_cast<DType>(77))), HasSubstr("w"));
  EXPECT_THAT(message(state.AddPerRank("w", {data, 4}, PerRankRule::kMerge)), HasSubstr("cannot be merged"));
  EXPECT_THAT(message(state.AddPerRank("w[@3]", {data, 4}, PerRankRule::kDrop)),
              HasSubstr("cannot be a name"));
  EXPECT_THAT(message(state.AddBytes("w", nullptr, nullptr, PerRankRule::kDrop)), HasSubstr("no function"));
  EXPECT_TRUE(state.AddSharded("w", {data, 16}, {10, 4}, rows, DType::kFloat32).ok());
  EXPECT_TRUE(state.AddSharded("on others", {}, {10}, elsewhere, DType::kFloat32).ok());
}

// In an earlier version it was taken, and the first save ended the process (10 exbibytes of a tensor: the
// first Restore).
TEST(Registration, MoreBytesThanThereCanBeAreErrorsWithTheNumbers) {
  Registration state(0, 1);
  char data[8] = {};
  const absl::Status all = state.AddPerRank("rng", {data, SIZE_MAX}, PerRankRule::kDrop);
  EXPECT_TRUE(absl::IsResourceExhausted(all)) << all;
  EXPECT_EQ(
      all.message(),
      "\"rng\" has 18446744073709551615 bytes, beside 0 that are registered: the state of one rank may have "
      "1125899906842624");
  ASSERT_TRUE(state.AddPerRank("half", {data, kFileBytesMax / 2 + 1}, PerRankRule::kDrop).ok());
  EXPECT_TRUE(
      absl::IsResourceExhausted(state.AddPerRank("rng", {data, kFileBytesMax / 2}, PerRankRule::kDrop)));
  EXPECT_TRUE(state.AddPerRank("rng", {data, 8}, PerRankRule::kDrop).ok());

  const Sharding elsewhere{.mesh = {{"pp", 2}}, .only = {{"pp", 1}}};
  Registration large(0, 2);
  const int64_t half = int64_t{1} << 61;
  ASSERT_TRUE(large.AddSharded("a", {}, {half}, elsewhere, DType::kUint8).ok());
  ASSERT_TRUE(large.AddSharded("b", {}, {half}, elsewhere, DType::kUint8).ok());
  const absl::Status over = large.AddSharded("c", {}, {half}, elsewhere, DType::kUint8);
  EXPECT_TRUE(absl::IsResourceExhausted(over)) << over;
  EXPECT_THAT(std::string(over.message()), HasSubstr("all tensors together may have 4611686018427387904"));
}

// Each name was compared with all before it.
TEST(Registration, ManyNamesAreTakenAndEachOnlyOnce) {
  Registration state(0, 1);
  char data[1] = {};
  for (int i = 0; i < 100'000; ++i)
    ASSERT_TRUE(state.AddReplicated(absl::StrCat("t", i), {data, 1}, {1}, DType::kUint8).ok());
  for (int i : {0, 77, 99'999})
    EXPECT_TRUE(absl::IsAlreadyExists(state.AddPerRank(absl::StrCat("t", i), {data, 1}, PerRankRule::kDrop)));
  EXPECT_EQ(state.all().size(), 100'000u);
}

TEST(Registration, MemoryOfDevicesIsRefusedByName) {
  Registration state(0, 1);
  float data[4] = {};
  const absl::Status cuda = state.AddReplicated("w", {data, 16, MemoryKind::kCuda}, {4}, DType::kFloat32);
  EXPECT_TRUE(absl::IsUnimplemented(cuda)) << cuda;
  EXPECT_THAT(std::string(cuda.message()), HasSubstr("\"w\" lies in cuda memory"));
  EXPECT_TRUE(absl::IsUnimplemented(state.AddPerRank("w", {data, 16, MemoryKind::kHip}, PerRankRule::kDrop)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      state.AddReplicated("w", {data, 16, MemoryKind::kHost, data}, {4}, DType::kFloat32)));
}

// ------------------------------------------------------------------ bytes of any length

// A loader whose state is longer or shorter at each step.
struct Loader {
  std::string bytes;
  static std::string At(int64_t step, int rank) {
    const size_t count = step % 3 == 0 ? 0 : static_cast<size_t>((step * 7919 + rank * 104729) % 300'000);
    std::string out(count, '\0');
    for (size_t i = 0; i < count; ++i) out[i] = static_cast<char>(i * 31 + static_cast<size_t>(step + rank));
    return out;
  }
  absl::Status Register(Checkpointer* c, PerRankRule rule = PerRankRule::kDrop) {
    return c->AddBytes(
        "loader", [this] { return bytes; },
        [this](absl::string_view found) {
          bytes = std::string(found);
          return absl::OkStatus();
        },
        rule);
  }
};

template <typename Run, typename SessionType>
void LengthsChange(const Run& run) {
  const std::string folder = TestFolder();
  FakeJob job = JobOf(3, 1);
  run(job, [&](SessionType* session) {
    auto c = Open(job, session, folder);
    ASSERT_TRUE(c.ok()) << c.status();
    State state;
    Loader loader;
    ASSERT_TRUE(Register(c->get(), &state).ok());
    ASSERT_TRUE(loader.Register(c->get()).ok());
    ASSERT_TRUE((*c)->Restore().ok());
    for (int64_t step : {1, 2, 3, 4, 5}) {
      Fill(&state, State::At(step, session->rank()));
      loader.bytes = Loader::At(step, session->rank());
      const auto saved = (*c)->Save(step);
      ASSERT_TRUE(saved.ok() && *saved) << saved.status();
      // Changes from here on belong to the next step.
      loader.bytes = "garbage";
      const absl::Status waited = (*c)->Wait(kLong);
      ASSERT_TRUE(waited.ok()) << waited;
    }
  });
  auto store = *OpenDirectoryStore(folder);
  for (int64_t step : {3, 4, 5}) {
    const Manifest m = *FindCheckpoint(store.get(), absl::StrCat(step));
    EXPECT_TRUE(VerifyAll(store.get(), m, [](uint64_t, uint64_t) { return absl::OkStatus(); }).ok());
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(m.files[rank].per_rank[1], Loader::At(step, rank).size());
  }
  for (int64_t step : {4, 5}) {
    job = JobOf(3, 2);
    job.resume = absl::StrCat(step);
    run(job, [&](SessionType* session) {
      auto c = Open(job, session, folder);
      ASSERT_TRUE(c.ok()) << c.status();
      State state;
      Loader loader{"before"};
      ASSERT_TRUE(Register(c->get(), &state).ok());
      ASSERT_TRUE(loader.Register(c->get()).ok());
      const auto restored = (*c)->Restore();
      ASSERT_TRUE(restored.ok() && *restored) << restored.status();
      const int64_t found = (*restored)->step;
      EXPECT_TRUE(state == State::At(found, session->rank()));
      EXPECT_EQ(loader.bytes, Loader::At(found, session->rank()));
    });
  }
}

TEST_F(EngineTest, BytesOfAnyLengthAreSavedByThisProcess) {
  LengthsChange<decltype(&RunRanks), FakeSession>(&RunRanks);
}

TEST_F(EngineTest, BytesOfAnyLengthAreSavedByTheWriterOutside) {
  HostedSession::Writers writers;
  const auto run = [&](const FakeJob& job, const std::function<void(HostedSession*)>& body) {
    RunHosted(job, &writers, body);
  };
  LengthsChange<decltype(run), HostedSession>(run);
  EXPECT_EQ(loud(), "");
}

TEST_F(EngineTest, BytesThatCannotBeSavedOrLoadedAreErrorsOnEveryRank) {
  const std::string folder = TestFolder();
  const FakeJob job = JobOf(2, 1);
  RunRanks(job, [&](FakeSession* session) {
    auto c = Open(job, session, folder);
    ASSERT_TRUE(c.ok()) << c.status();
    absl::StatusOr<std::string> gives = std::string("x");
    absl::Status takes;
    ASSERT_TRUE((*c)->AddBytes(
                        "loader", [&] { return gives; }, [&](absl::string_view) { return takes; })
                    .ok());
    ASSERT_TRUE((*c)->Restore().ok());
    if (session->rank() == 1) gives = std::string(kByteEntriesMax + 1, 'x');
    const absl::Status large = (*c)->Save(1).status();
    EXPECT_TRUE(absl::IsResourceExhausted(large)) << large;
    EXPECT_THAT(std::string(large.message()),
                AllOf(HasSubstr("rank 1"), HasSubstr("\"loader\" has"), HasSubstr("64")));
    if (session->rank() == 1) gives = absl::UnavailableError("the loader is gone");
    const absl::Status failed = (*c)->Save(1).status();
    EXPECT_TRUE(absl::IsUnavailable(failed)) << failed;
    EXPECT_THAT(std::string(failed.message()), HasSubstr("rank 1: \"loader\": the loader is gone"));
    gives = std::string(kByteEntriesMax, 'y');  // as much as there can be
    ASSERT_TRUE(*(*c)->Save(2));
    ASSERT_TRUE((*c)->Wait(kLong).ok());
    if (session->rank() == 0) takes = absl::DataLossError("not a pickle");
    const absl::Status bad = (*c)->Restore().status();
    EXPECT_THAT(std::string(bad.message()), HasSubstr("rank 0: \"loader\" of rank 0: not a pickle"));
  });
}

// ------------------------------------------------------------------ ranks that are no more

struct Cursors {
  std::string dropped, kept;   // of ten bytes
  std::map<char, int> merged;  // what came, and how often
  std::string bytes;           // to be saved
  explicit Cursors(char c) : dropped(10, c), kept(10, c), bytes(static_cast<size_t>(c - 'a') + 1, c) {}
  absl::Status Register(Checkpointer* c) {
    GT_RETURN_IF_ERROR(c->AddPerRank("dropped", MemoryOf(&dropped)));
    GT_RETURN_IF_ERROR(c->AddPerRank("kept", MemoryOf(&kept), PerRankRule::kKeep));
    return c->AddBytes(
        "merged", [this] { return bytes; },
        [this](absl::string_view found) {
          for (char x : found) ++merged[x];
          return absl::OkStatus();
        },
        PerRankRule::kMerge);
  }
};

// Four ranks, then two, then four again: what is kept comes back, what is merged is seen once (C6).
TEST_F(EngineTest, StateOfRanksThatAreNoMoreFollowsItsRule_C6) {
  const std::string folder = TestFolder();
  HostedSession::Writers writers;
  uint64_t generation = 0;
  const auto run = [&](int world, const std::function<void(Checkpointer*, Cursors*, int)>& body) {
    const FakeJob job = JobOf(world, ++generation);
    RunHosted(job, &writers, [&](HostedSession* session) {
      auto c = Open(job, session, folder);
      ASSERT_TRUE(c.ok()) << c.status();
      Cursors cursors(static_cast<char>('a' + session->rank()));
      ASSERT_TRUE(cursors.Register(c->get()).ok());
      const auto restored = (*c)->Restore();
      ASSERT_TRUE(restored.ok()) << restored.status();
      body(c->get(), &cursors, session->rank());
      const auto saved = (*c)->Save(static_cast<int64_t>(generation));
      ASSERT_TRUE(saved.ok() && *saved) << saved.status();
      ASSERT_TRUE((*c)->Wait(kLong).ok());
    });
  };
  run(4, [](Checkpointer*, Cursors*, int) {});
  run(2, [](Checkpointer*, Cursors* mine, int rank) {
    // The state comes from ranks 0 and 2, or 1 and 3.
    const std::map<char, int> expected = {{static_cast<char>('a' + rank), rank + 1},
                                          {static_cast<char>('c' + rank), rank + 3}};
    EXPECT_EQ(mine->merged, expected);
    EXPECT_EQ(mine->kept, std::string(10, static_cast<char>('a' + rank)));
    mine->kept = mine->dropped = std::string(10, static_cast<char>('A' + rank));
  });
  EXPECT_THAT(info(), AllOf(HasSubstr("\"dropped\" of ranks 2,3, not in this world, is dropped"),
                            HasSubstr("\"kept\" of ranks 2,3, not in this world, is kept"),
                            HasSubstr("\"merged\" of ranks 2,3, not in this world, is merged")));
  run(1, [](Checkpointer*, Cursors* mine, int) { EXPECT_EQ(mine->kept, "AAAAAAAAAA"); });
  auto store = *OpenDirectoryStore(folder);
  const Manifest m = *FindCheckpoint(store.get(), "3");
  EXPECT_THAT(m.files[0].kept, ElementsAre(KeptBlob{1, 1, 10}, KeptBlob{1, 2, 10}, KeptBlob{1, 3, 10}));
  EXPECT_TRUE(VerifyAll(store.get(), m, [](uint64_t, uint64_t) { return absl::OkStatus(); }).ok());
  run(4, [](Checkpointer*, Cursors* mine, int rank) {
    EXPECT_EQ(mine->kept, rank < 2 ? std::string(10, static_cast<char>('A' + rank))
                                   : std::string(10, static_cast<char>('a' + rank)));
    EXPECT_EQ(mine->dropped, rank == 0 ? "AAAAAAAAAA" : std::string(10, static_cast<char>('a' + rank)))
        << "only rank 0 had one in the checkpoint of one rank";
  });
  EXPECT_TRUE(FindCheckpoint(store.get(), "4")->files[0].kept.empty());
}

TEST_F(EngineTest, WhatCannotBeCarriedAlongIsAnError_C6) {
  const std::string folder = TestFolder();
  for (int world : {2, 1}) {
    const FakeJob job = JobOf(world, static_cast<uint64_t>(3 - world));
    RunRanks(job, [&](FakeSession* session) {
      auto c = Open(job, session, folder);
      ASSERT_TRUE(c.ok()) << c.status();
      std::string residual(kByteEntriesMax + 1, 'r');
      ASSERT_TRUE((*c)->AddPerRank("residual", MemoryOf(&residual), PerRankRule::kKeep).ok());
      const auto restored = (*c)->Restore();
      if (world == 1) {
        EXPECT_TRUE(absl::IsResourceExhausted(restored.status())) << restored.status();
        EXPECT_THAT(std::string(restored.status().message()), HasSubstr("ranks that are no more"));
        return;
      }
      ASSERT_TRUE(restored.ok()) << restored.status();
      ASSERT_TRUE(*(*c)->Save(1));
      ASSERT_TRUE((*c)->Wait(kLong).ok());
    });
  }
}

// ------------------------------------------------------------------ partial loads

TEST_F(EngineTest, TensorsThatMayBeMissingKeepTheirValues_C4) {
  const std::string folder = TestFolder();
  const FakeJob first = JobOf(2, 1), second = JobOf(2, 2);
  const auto open = [&](const FakeJob& job, FakeSession* session, std::vector<float>* w,
                        std::vector<float>* lora) {
    auto c = *Open(job, session, folder);
    EXPECT_TRUE(c->AddReplicated("w", MemoryOf(w), {3}, DType::kFloat32).ok());
    if (lora != nullptr) {
      EXPECT_TRUE(c->AddReplicated("lora_a", MemoryOf(lora), {2}, DType::kFloat32).ok());
    }
    return c;
  };
  RunRanks(first, [&](FakeSession* session) {
    std::vector<float> w = {1, 2, 3};
    auto c = open(first, session, &w, nullptr);
    ASSERT_TRUE(*c->Save(1));
    ASSERT_TRUE(c->Wait(kLong).ok());
  });
  RunRanks(second, [&](FakeSession* session) {
    std::vector<float> w(3), lora = {8, 9};
    auto c = open(second, session, &w, &lora);
    EXPECT_TRUE(absl::IsFailedPrecondition(c->Restore().status()));
    EXPECT_TRUE(absl::IsFailedPrecondition(c->Restore({.may_be_missing = {"bias_*"}}).status()));
    const auto restored = c->Restore({.may_be_missing = {"lora_*"}});
    ASSERT_TRUE(restored.ok() && *restored) << restored.status();
    EXPECT_THAT(w, ElementsAre(1, 2, 3));
    EXPECT_THAT(lora, ElementsAre(8, 9));
  });
  EXPECT_THAT(loud(), HasSubstr("lacks 1 registered tensors that may be missing (\"lora_a\")"));
}

// A newer checkpoint that is damaged was read in part, and the one before has not what it had.
TEST_F(EngineTest, WhatADamagedCheckpointHadDoesNotStayBehind_C9) {
  const std::string folder = TestFolder();
  constexpr size_t kMany = 3 << 20;  // more than one chunk, so that some are read before the bad one is
  const auto run = [&](const FakeJob& job, bool with_extra, const std::function<void(Checkpointer*)>& body,
                       std::vector<float>* extra) {
    RunRanks(job, [&](FakeSession* session) {
      std::vector<float> w = {1, 2, 3};
      auto c = *Open(job, session, folder);
      ASSERT_TRUE(c->AddReplicated("w", MemoryOf(&w), {3}, DType::kFloat32).ok());
      if (with_extra) {
        ASSERT_TRUE(c->AddReplicated("extra", MemoryOf(extra), {kMany}, DType::kFloat32).ok());
      }
      body(c.get());
    });
  };
  std::vector<float> extra(kMany, 5);
  const auto save = [](int64_t step) {
    return [step](Checkpointer* c) {
      ASSERT_TRUE(*c->Save(step));
      ASSERT_TRUE(c->Wait(kLong).ok());
    };
  };
  run(JobOf(1, 1), false, save(5), nullptr);
  run(JobOf(1, 2), true, save(6), &extra);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.path().filename() != ShardName(0, 1) || entry.file_size() < kMany) continue;
    std::fstream shard(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    shard.seekp(-5, std::ios::end);
    shard.put('!');
  }
  extra.assign(kMany, 7);
  run(
      JobOf(1, 3), true,
      [](Checkpointer* c) {
        const auto restored = c->Restore({.may_be_missing = {"extra"}});
        ASSERT_TRUE(restored.ok() && *restored) << restored.status();
        EXPECT_EQ((*restored)->step, 5);
      },
      &extra);
  EXPECT_EQ(std::count(extra.begin(), extra.end(), 7), static_cast<int64_t>(kMany));
}

}  // namespace
}  // namespace gtrain::ckpt
