// Bytes of shards and manifests: golden bytes, round trips, and hostile input (C4, C10).
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/rng.h"
#include "checkpoint/format/elements.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/names.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/save_order.h"
#include "checkpoint/format/shares.h"

namespace gtrain::ckpt {
namespace {

const SaveId kId{.epoch = 2, .timeline = 1, .step = 120, .generation = 5, .attempt = 1};

TEST(Names, DeriveAndParse) {
  EXPECT_EQ(AttemptName(kId), "step-000000000120.e0002.t0001.g0005.a01");
  EXPECT_EQ(ManifestKey(kId), "manifests/step-000000000120.e0002.t0001.g0005.a01.json");
  EXPECT_EQ(AttemptKey(kId, ShardName(3, 8)),
            "step-000000000120.e0002.t0001.g0005.a01/rank-00003-of-00008.safetensors");
  EXPECT_EQ(ParseManifestKey(ManifestKey(kId)), kId);
  EXPECT_EQ(ParseOwnerKey("owners/epoch-00000007.json"), 7);
  EXPECT_EQ(ProbeKey(1763720000, 0xabc), "probe-1763720000-0000000000000abc");
  EXPECT_EQ(ParseProbeKey("probe-1763720000-0000000000000abc"), 1763720000);
  SaveId large{
      .epoch = kCounterMax, .timeline = 12345, .step = kStepMax, .generation = 99999, .attempt = 123};
  EXPECT_EQ(ParseManifestKey(ManifestKey(large)), large);
}

TEST(Names, HostileNamesAreNotNames_C10) {
  for (const char* key : {"", "manifests/", "../step-000000000120.e0002.t0001.g0005.a01.json",
                          "manifests/../step-000000000120.e0002.t0001.g0005.a01.json",
                          "manifests/step-120.e0002.t0001.g0005.a01.json",
                          "manifests/step-000000000120.e2.t0001.g0005.a01.json",
                          "manifests/step--00000000120.e0002.t0001.g0005.a01.json",
                          "manifests/step-+00000000120.e0002.t0001.g0005.a01.json",
                          "manifests/step-000000000120.e0002.t0001.g0005.a01.json/x",
                          "manifests/step-000000000120.e0000.t0001.g0005.a01.json",
                          "manifests/step-9999999999999.e0002.t0001.g0005.a01.json",
                          "manifests/step-000000000120.e99999999999999999999.t0001.g0005.a01.json",
                          "manifests//etc/passwd.json"}) {
    EXPECT_EQ(ParseManifestKey(key), std::nullopt) << key;
  }
  EXPECT_EQ(
      ParseManifestKey(absl::string_view("manifests/step-000000000120.e0002\0.t0001.g0005.a01.json", 55)),
      std::nullopt);
  EXPECT_EQ(ParseOwnerKey("owners/epoch-7.json"), std::nullopt);
  EXPECT_EQ(ParseProbeKey("probe-1763720000-0000000000000ABC"), std::nullopt);
  EXPECT_EQ(ParseProbeKey("probe-1-0000000000000abc"), std::nullopt);
  EXPECT_EQ(ParseProbeKey("probe-/../0-0000000000000abc"), std::nullopt);
}

// The names, sizes and values of all types, as the Python packages safetensors and ml_dtypes have them.
TEST(DTypes, NamesSizesAndElements) {
  struct Case {
    DType dtype;
    const char* name;
    size_t bytes;
    std::string data;
    std::complex<double> value;
  };
  const auto of = [](auto value) { return std::string(reinterpret_cast<const char*>(&value), sizeof value); };
  const Case cases[] = {
      {DType::kFloat32, "F32", 4, of(-1.5f), -1.5},
      {DType::kFloat64, "F64", 8, of(0.1), 0.1},
      {DType::kFloat16, "F16", 2, of(uint16_t{0xc100}), -2.5},
      {DType::kFloat16, "F16", 2, of(uint16_t{0x0001}), std::ldexp(1, -24)},
      {DType::kBFloat16, "BF16", 2, of(uint16_t{0x3fc0}), 1.5},
      {DType::kBFloat16, "BF16", 2, of(uint16_t{0xff80}), -std::numeric_limits<double>::infinity()},
      {DType::kInt32, "I32", 4, of(int32_t{-7}), -7},
      {DType::kInt64, "I64", 8, of(int64_t{-7}), -7},
      {DType::kUint8, "U8", 1, of(uint8_t{200}), 200},
      {DType::kBool, "BOOL", 1, of(uint8_t{1}), 1},
      {DType::kInt8, "I8", 1, of(int8_t{-3}), -3},
      {DType::kInt16, "I16", 2, of(int16_t{-300}), -300},
      {DType::kUint16, "U16", 2, of(uint16_t{65535}), 65535},
      {DType::kUint32, "U32", 4, of(uint32_t{4294967295}), 4294967295.0},
      {DType::kUint64, "U64", 8, of(uint64_t{1} << 63), std::ldexp(1, 63)},
      {DType::kFloat8E4M3, "F8_E4M3", 1, "\x7e", 448},
      {DType::kFloat8E4M3, "F8_E4M3", 1, "\xb8", -1},
      {DType::kFloat8E4M3, "F8_E4M3", 1, "\x01", std::ldexp(1, -9)},
      {DType::kFloat8E5M2, "F8_E5M2", 1, "\x7b", 57344},
      {DType::kFloat8E5M2, "F8_E5M2", 1, "\x01", std::ldexp(1, -16)},
      {DType::kComplex64, "C64", 8, of(std::complex<float>(1, -2)), {1, -2}}};
  std::set<DType> seen;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    seen.insert(c.dtype);
    EXPECT_EQ(DTypeName(c.dtype), c.name);
    EXPECT_EQ(ParseDType(c.name), c.dtype);
    EXPECT_EQ(DTypeSize(c.dtype), c.bytes);
    EXPECT_EQ(ElementAt(c.data, c.dtype, 0), c.value);
  }
  EXPECT_EQ(seen.size(), 16u);
  EXPECT_EQ(DTypeSize(static_cast<DType>(16)), 0u);
  EXPECT_TRUE(std::isnan(ElementAt("\xff", DType::kFloat8E4M3, 0).real()));
  EXPECT_TRUE(std::isnan(ElementAt("\x7d", DType::kFloat8E5M2, 0).real()));
  EXPECT_EQ(ParseDType("F4"), std::nullopt);
}

TEST(Names, OrderIsOwnerThenTimelineThenStep_C3) {
  const SaveId zombie{.epoch = 1, .timeline = 1, .step = 900};
  const SaveId resumed{.epoch = 1, .timeline = 2, .step = 110};
  const SaveId next_owner{.epoch = 2, .timeline = 1, .step = 5};
  EXPECT_LT(zombie, resumed);
  EXPECT_LT(resumed, next_owner);
}

TEST(Hash, IsXxh3WithTheReferenceValueOfNothing) {
  EXPECT_EQ(Xxh3Hex(absl::string_view()), "99aa06d3014798d86001c324468d497f");
  const absl::string_view parts[] = {"gtr", "ain"};
  EXPECT_EQ(Xxh3Hex(parts), Xxh3Hex("gtrain"));
  EXPECT_NE(Xxh3Hex("gtrain"), Xxh3Hex("gtraim"));
}

std::vector<TensorEntry> Tensors() {
  return {{.name = "w", .dtype = DType::kFloat32, .shape = {2, 3}, .begin = 0, .end = 24},
          {.name = "rng", .dtype = DType::kUint8, .shape = {5}, .begin = 24, .end = 29}};
}

TEST(Safetensors, GoldenHeader) {
  const std::string header = PrintShardHeader(Tensors());
  const std::string json =
      R"({"__metadata__":{"format":"gtrain"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("rng":{"dtype":"U8","shape":[5],"data_offsets":[24,29]}})";
  ASSERT_EQ(json.size(), 148u);
  EXPECT_EQ(header, absl::StrCat(absl::string_view("\x98\0\0\0\0\0\0\0", 8), json, "    "));
}

TEST(Safetensors, RoundTripAndAlignment) {
  const std::string header = PrintShardHeader(Tensors());
  const auto parsed = ParseShardHeader(header, header.size() + 29);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->tensors, Tensors());
  EXPECT_EQ(parsed->data_begin % 8, 0u);
  EXPECT_EQ(parsed->data_begin, header.size());
  const std::string empty = PrintShardHeader({});
  EXPECT_TRUE(ParseShardHeader(empty, empty.size()).ok());
}

std::string WithLength(absl::string_view json, uint64_t length) {
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(length >> (8 * i)));
  return absl::StrCat(out, json);
}

std::string Padded(std::string json) {
  json.append((8 - json.size() % 8) % 8, ' ');
  return WithLength(json, json.size());
}

// A header of foreign tensors costs n log n: 32,000 took 8 s, and 4 times as many 16 times as long (C10).
TEST(Safetensors, AHeaderOfManyTensorsIsReadAndAnyNameTwiceIsFound_C10) {
  constexpr size_t kTensors = 50'000;
  std::string json = "{";
  for (size_t i = kTensors; i-- > 0;) {  // names descend where data ascends
    const size_t begin = (kTensors - 1 - i) * 4;
    absl::StrAppend(&json, json.size() == 1 ? "" : ",", "\"t", i,
                    R"(":{"dtype":"F32","shape":[],"data_offsets":[)", begin, ",", begin + 4, "]}");
  }
  const std::string header = Padded(json + "}");
  const auto parsed = ParseShardHeader(header, header.size() + kTensors * 4);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->tensors.size(), kTensors);
  EXPECT_EQ(parsed->tensors[0].name, absl::StrCat("t", kTensors - 1));
  EXPECT_EQ(parsed->tensors.back().name, "t0");
  const std::string twice = Padded(json + R"(,"t77":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})");
  EXPECT_EQ(ParseShardHeader(twice, twice.size() + kTensors * 4).status().message(),
            "JSON key \"t77\" twice");
}

// Which of several tensors without data comes first does not depend on how a file was written.
TEST(Safetensors, TensorsWithoutDataAreInTheOrderOfTheirNames) {
  const auto entry = [](absl::string_view name) {
    return absl::StrCat("\"", name, R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})");
  };
  const std::string header = Padded(absl::StrCat("{", entry("b"), ",", entry("c"), ",", entry("a"), "}"));
  const auto parsed = ParseShardHeader(header, header.size());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  std::string names;
  for (const TensorEntry& t : parsed->tensors) names += t.name;
  EXPECT_EQ(names, "abc");
}

TEST(Safetensors, HostileHeadersAreErrors_C10) {
  const auto entry = [](absl::string_view shape, absl::string_view offsets, absl::string_view dtype = "F32") {
    return absl::StrCat(R"({"a":{"dtype":")", dtype, R"(","shape":)", shape, R"(,"data_offsets":)", offsets,
                        "}}");
  };
  ASSERT_TRUE(ParseShardHeader(Padded(entry("[2]", "[0,8]")), Padded(entry("[2]", "[0,8]")).size() + 8).ok());
  const std::vector<std::string> bad = {
      entry("[2]", "[8,16]"),
      entry("[2]", "[0,7]"),
      entry("[3]", "[0,8]"),
      entry("[-2]", "[0,8]"),
      entry("[2.0]", "[0,8]"),
      entry("[2]", "[8,0]"),
      entry("[2]", "[0]"),
      entry("[2]", "[0,8,8]"),
      entry("\"2\"", "[0,8]"),
      entry("[2]", "[0,18446744073709551616]"),
      entry("[2]", "[0,8]", "F31"),
      entry("[4294967296,4294967296,4294967296]", "[0,8]"),
      entry("[9223372036854775808]", "[0,8]"),
      "[]",
      "{",
      "null",
      "{}",
      R"({"a":1})",
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})",
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F32","shape":[2],"dtype":"F32","data_offsets":[0,8]}})",
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
      "{\"\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
      "{\"\xff\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
      absl::StrCat("{\"__metadata__\":{\"a\":", std::string(5000, '['), std::string(5000, ']'), "}}")};
  for (const std::string& json : bad) {
    const std::string header = Padded(json);
    EXPECT_EQ(ParseShardHeader(header, header.size() + 8).status().code(), absl::StatusCode::kDataLoss)
        << json.substr(0, 200);
  }
  for (uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 40, UINT64_MAX, UINT64_MAX - 7}) {
    EXPECT_EQ(ParseShardHeader(WithLength("{}", length), 10).status().code(), absl::StatusCode::kDataLoss)
        << length;
  }
  EXPECT_FALSE(ParseShardHeader("", 0).ok());
  EXPECT_FALSE(ParseShardHeader("1234567", 7).ok());
}

std::string Reseal(std::string text) {
  text.resize(text.rfind(",\n \"checksum\""));
  return absl::StrCat(text, ",\n \"checksum\": \"", Xxh3Hex(text), "\"\n}\n");
}

ShardFile File(int rank, int world, uint64_t bytes) {
  ShardFile file{.name = ShardName(rank, world), .bytes = bytes};
  for (uint64_t at = 0; at < bytes; at += kChunkBytes)
    file.chunks.push_back(Xxh3Hex(absl::StrCat(rank, "-", at)));
  return file;
}

// A manifest as the first version wrote it.
Manifest OldSample() {
  Manifest m{.version = 1,
             .id = kId,
             .owner = {.cluster = "c0ffee", .job = "fashion-3", .job_hash = "abc"},
             .world_size = 2};
  m.tensors = {{.name = "w", .dtype = DType::kFloat32, .shape = {2, 3}},
               {.name = "rng", .layout = Layout::kPerRank}};
  m.files = {File(0, 2, 129), File(1, 2, kChunkBytes + 1)};
  for (int rank = 0; rank < 2; ++rank) m.files[rank].xxh3 = Xxh3Hex(absl::StrCat("file", rank));
  m.files[0].slices = {{"w", 0, 12, 112}, {"rng", 0, 5, 124}};
  m.files[1].slices = {{"w", 12, 12, 104}, {"rng", 0, 7, 116}};
  return m;
}

// "w" is small and goes to rank 0 whole; of "e" rank 0 holds two rows and rank 1 one.
Manifest Sample() {
  Manifest m = OldSample();
  m.version = kManifestVersion;
  m.tensors.insert(
      m.tensors.begin() + 1,
      {.name = "e",
       .layout = Layout::kSharded,
       .dtype = DType::kFloat32,
       .shape = {3, 4},
       .sharding = {.mesh = {{"pp", 1}, {"tp", 2}}, .splits = {{0, "tp"}}, .only = {{"pp", 0}}}});
  m.files = {File(0, 2, 104 + 24 + 32 + 5), File(1, 2, 104 + 16 + 7)};
  m.files[0].data_begin = m.files[1].data_begin = 104;
  m.files[0].per_rank = {5};
  m.files[1].per_rank = {7};
  return m;
}

Manifest SampleOfVersion2() {
  Manifest m = Sample();
  m.version = 2;
  for (int rank = 0; rank < 2; ++rank) m.files[rank].xxh3 = Xxh3Hex(absl::StrCat("file", rank));
  return m;
}

// 66 ranks, of which the first 64 stand in part 0; "w" is small and one rank writes it.
struct InParts {
  Manifest whole;  // as it is once both parts were added
  Manifest root;   // as it is parsed
  std::vector<std::string> texts;
};
InParts SampleInParts() {
  InParts out{.whole = Sample()};
  out.whole.world_size = 66;
  out.whole.tensors.erase(out.whole.tensors.begin() + 1);
  out.whole.files.clear();
  Shares shares = *Shares::Make(out.whole.tensors, 66);
  for (int rank = 0; rank < 66; ++rank) {
    ShardFile file = File(rank, 66, 104 + shares.DataBytes(rank) + 5);
    file.data_begin = 104;
    file.per_rank = {5};
    file.finite = rank != 65;
    out.whole.files.push_back(file);
  }
  for (int part = 0; part < 2; ++part) {
    ManifestPart p{.id = kId, .world_size = 66, .part = part, .verified = part == 0 ? AttemptName(kId) : ""};
    const auto begin = out.whole.files.begin() + part * kPartRanks;
    p.files.assign(begin, part == 0 ? begin + kPartRanks : out.whole.files.end());
    out.texts.push_back(Print(p));
    out.whole.parts.push_back(RefOf(p, out.texts.back()));
  }
  out.root = out.whole;
  out.root.files.assign(66, {});
  return out;
}

using Faults = std::vector<std::pair<const char*, std::function<void(Manifest*)>>>;

void ExpectRefused(const Manifest& good, const Faults& faults) {
  ASSERT_TRUE(Validate(good).ok()) << Validate(good);
  for (const auto& [name, fault] : faults) {
    Manifest m = good;
    fault(&m);
    EXPECT_EQ(Validate(m).code(), absl::StatusCode::kDataLoss) << name;
  }
}

// A manifest with the additions of version 3. Two tensors of 10 rows in boxes of 7 and 3, the second held by
// ranks 0 and 2; one of another type that is cut as chunks; and state of rank 5 of an earlier world.
Manifest Boxed() {
  Manifest m{
      .id = kId, .owner = {.cluster = "c0ffee", .job = "fashion-3", .job_hash = "abc"}, .world_size = 3};
  const auto boxes =
      *sharding::RankBoxes::Make({10}, std::vector<sharding::Box>{{{7, 3}}, {{0, 7}}, {{7, 3}}});
  m.tensors = {
      {.name = "a", .layout = Layout::kBoxes, .dtype = DType::kFloat8E4M3, .shape = {10}, .boxes = boxes},
      {.name = "b", .layout = Layout::kBoxes, .dtype = DType::kBool, .shape = {10}, .boxes = boxes},
      {.name = "c",
       .layout = Layout::kSharded,
       .dtype = DType::kUint64,
       .shape = {4},
       .sharding = {.mesh = {{"dp", 3}}, .splits = {{0, "dp", SplitRule::kChunk}}}},
      {.name = "rng", .layout = Layout::kPerRank}};
  auto shares = Shares::Make(m.tensors, 3);
  for (int rank = 0; rank < 3; ++rank) {
    m.files.push_back(File(rank, 3, 104 + shares->DataBytes(rank) + 5 + (rank == 2 ? 9 : 0)));
    m.files.back().data_begin = 104;
    m.files.back().per_rank = {5};
  }
  m.files[2].kept = {{0, 5, 9}};
  return m;
}

TEST(ManifestFormat, ListsOfBoxesAreWrittenOnce) {
  const std::string text = Print(Boxed());
  const absl::string_view list =
      " \"boxes\": [\n  {\n   \"shape\": [\n    10\n   ],\n   \"boxes\": [\n    [\n     0,\n     7\n    ],\n "
      "   [\n"
      "     7,\n     3\n    ]\n   ],\n   \"ranks\": [\n    1,\n    0,\n    1\n   ]\n  }\n ],\n";
  EXPECT_TRUE(absl::StrContains(text, list)) << text;
  const auto parsed = std::get<Manifest>(*ParseManifest(ManifestKey(kId), text));
  EXPECT_EQ(parsed.tensors[0].boxes, parsed.tensors[1].boxes) << "two lists in memory";
}

TEST(ManifestFormat, InconsistentBoxesAreRefused_C4_C10) {
  ExpectRefused(
      Boxed(),
      {{"no boxes", [](Manifest* m) { m->tensors[0].boxes = nullptr; }},
       {"boxes of another shape", [](Manifest* m) { m->tensors[0].shape = {11}; }},
       {"boxes of another world",
        [](Manifest* m) {
          m->tensors[0].boxes = *sharding::RankBoxes::Make({10}, std::vector<sharding::Box>{{{0, 10}}});
        }},
       {"kept for nobody", [](Manifest* m) { m->files[2].kept[0].blob = 1; }},
       {"kept where nobody looks", [](Manifest* m) { m->files[2].kept[0].rank = 6; }},
       {"kept of a rank that is there", [](Manifest* m) { m->files[2].kept[0].rank = 1; }},
       {"kept twice",
        [](Manifest* m) {
          m->files[0].kept = m->files[2].kept;
          m->files[0].bytes += 9;
        }},
       {"kept of another size", [](Manifest* m) { m->files[2].kept[0].bytes = 8; }}});
}

TEST(ManifestFormat, EditedBoxesAreRefused_C10) {
  const std::string good = Print(Boxed());
  ASSERT_EQ(Reseal(good), good);
  const std::vector<std::pair<absl::string_view, absl::string_view>> edits = {
      {"\"version\": 3", "\"version\": 2"},
      {"     7,\n     3\n", "     7,\n     2\n"},
      {"     7,\n     3\n", "     6,\n     4\n"},
      {"     7,\n     3\n", "     7,\n     3,\n     0,\n     1\n"},
      {"     7,\n     3\n", "     7,\n     3.0\n"},
      {"     7,\n     3\n", "     7,\n     18446744073709551615\n"},
      {"    1,\n    0,\n    1\n", "    0,\n    1,\n    0\n"},
      {"    1,\n    0,\n    1\n", "    0,\n    0,\n    0\n"},
      {"    1,\n    0,\n    1\n", "    1,\n    0,\n    2\n"},
      {"    1,\n    0,\n    1\n", "    1,\n    0,\n    -2\n"},
      {"    1,\n    0,\n    1\n", "    1,\n    0\n"},
      {"    1,\n    0,\n    1\n", "    1,\n    0,\n    1,\n    1\n"},
      {"   \"boxes\": 0", "   \"boxes\": 1"},
      {"   \"boxes\": 0", "   \"boxes\": -1"},
      {"\"chunk\"", "\"balanced\""},
      {"\"F8_E4M3\"", "\"F4\""},
      {"     5,\n     9\n", "     5,\n     8\n"},
      {"     5,\n     9\n", "     2,\n     9\n"},
      {"     5,\n     9\n", "     5\n"}};
  for (const auto& [from, to] : edits) {
    ASSERT_TRUE(absl::StrContains(good, from)) << from << good;
    const auto parsed = ParseManifest(ManifestKey(kId), Reseal(absl::StrReplaceAll(good, {{from, to}})));
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss) << from << " -> " << to;
  }
  for (const char* dtype : {"BOOL", "C64", "F8_E5M2", "U64"}) {
    const std::string text =
        absl::StrReplaceAll(Print(SampleOfVersion2()), {{"\"F32\"", absl::StrCat("\"", dtype, "\"")}});
    EXPECT_FALSE(ParseManifest(ManifestKey(kId), Reseal(text)).ok()) << dtype << " in version 2";
  }
}

TEST(SaveTail, RoundTripsAndFitsItsOrder) {
  const SaveOrder order{.location = "/data",
                        .owner = Boxed().owner,
                        .epoch = 1,
                        .rank = 2,
                        .world_size = 3,
                        .tensors = Boxed().tensors,
                        .bytes = {0, 0, 0, 0},
                        .has_tail = true};
  ASSERT_EQ(*ParseSaveOrder(Print(order)), order);
  const SaveTail tail{.per_rank = {17}, .kept = {{0, 5, 3}, {0, 8, 9}}};
  const auto parsed = ParseSaveTail(Print(tail), order);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, tail);
  for (const SaveTail& bad : std::vector<SaveTail>{{.per_rank = {}},
                                                   {.per_rank = {1, 2}},
                                                   {{1}, {{1, 5, 9}}},
                                                   {{1}, {{0, 2, 9}}},
                                                   {{1}, {{0, 4, 9}}},
                                                   {{1}, {{0, 8, 9}, {0, 5, 9}}}}) {
    EXPECT_EQ(ParseSaveTail(Print(bad), order).status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST(ManifestFormat, GoldenBytes) {
  EXPECT_EQ(Print(OwnerClaim{.epoch = 2, .owner = Sample().owner}),
            "{\n \"format\": \"gtrain-checkpoint-owner\",\n \"version\": 1,\n \"epoch\": 2,\n"
            " \"cluster\": \"c0ffee\",\n \"job\": \"fashion-3\",\n \"job_hash\": \"abc\",\n"
            " \"checksum\": \"5d85046c618972efe234c1bafe402156\"\n}\n");
  EXPECT_EQ(Xxh3Hex(Print(OldSample())), "615355c0a3e8ae5d4206f4d699531527");
  EXPECT_EQ(Xxh3Hex(Print(SampleOfVersion2())), "e0fad931017a8727e438d696f7af563d");
  EXPECT_EQ(Xxh3Hex(Print(Sample())), "626183b56213b2a460c40119ae8915a9");
  EXPECT_EQ(Xxh3Hex(Print(SampleInParts().root)), "787ceada8ca93eecff7e134fc3d2bbf0");
  EXPECT_EQ(Xxh3Hex(SampleInParts().texts[1]), "f341341dc12f4b97639f5f71a4048df9");
  EXPECT_TRUE(
      absl::StartsWith(Print(Sample()),
                       "{\n \"format\": \"gtrain-checkpoint\",\n \"version\": 3,\n"
                       " \"cluster\": \"c0ffee\",\n \"job\": \"fashion-3\",\n \"job_hash\": \"abc\",\n"
                       " \"epoch\": 2,\n \"timeline\": 1,\n \"generation\": 5,\n \"step\": 120,\n"
                       " \"attempt\": 1,\n \"world_size\": 2,\n \"finite\": true,\n \"tensors\": [\n"));
}

TEST(ManifestFormat, RoundTrips) {
  for (const Manifest& sample : {Sample(), SampleOfVersion2(), OldSample(), Boxed(), SampleInParts().root}) {
    const auto manifest = ParseManifest(ManifestKey(kId), Print(sample));
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    EXPECT_EQ(std::get<Manifest>(*manifest), sample);
  }

  const AbortMarker marker{.id = kId, .reason = "rank 3 did not write"};
  const auto parsed_marker = ParseManifest(ManifestKey(kId), Print(marker));
  ASSERT_TRUE(parsed_marker.ok()) << parsed_marker.status();
  EXPECT_EQ(std::get<AbortMarker>(*parsed_marker), marker);

  const ShardIndex index{
      .id = kId, .rank = 1, .world_size = 2, .file = Sample().files[1], .verified = AttemptName(kId)};
  const auto parsed_index = ParseShardIndex(AttemptKey(kId, IndexName(1, 2)), Print(index));
  ASSERT_TRUE(parsed_index.ok()) << parsed_index.status();
  EXPECT_EQ(*parsed_index, index);

  const ShardIndex failed{.id = kId, .rank = 1, .world_size = 2, .error = "disk full"};
  const auto parsed_failed = ParseShardIndex(AttemptKey(kId, IndexName(1, 2)), Print(failed));
  ASSERT_TRUE(parsed_failed.ok()) << parsed_failed.status();
  EXPECT_EQ(parsed_failed->error, "disk full");

  const OwnerClaim claim{.epoch = 2, .owner = Sample().owner};
  const auto parsed_claim = ParseOwnerClaim(OwnerKey(2), Print(claim));
  ASSERT_TRUE(parsed_claim.ok()) << parsed_claim.status();
  EXPECT_EQ(*parsed_claim, claim);
}

TEST(SaveOrder, RoundTripsAndIsRefusedWhenItCannotBeCarriedOut) {
  const SaveOrder good{.location = "/data/ckpt",
                       .owner = Sample().owner,
                       .epoch = 3,
                       .rank = 1,
                       .world_size = 2,
                       .keep = 4,
                       .shard_tries = 4,
                       .commit_timeout_ms = 600'000,
                       .tensors = Sample().tensors,
                       .bytes = std::vector<uint64_t>(Sample().tensors.size(), 12)};
  const auto parsed = ParseSaveOrder(Print(good));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, good);
  const std::vector<std::pair<const char*, std::function<void(SaveOrder*)>>> faults = {
      {"rank outside", [](SaveOrder* o) { o->rank = 2; }},
      {"bytes missing", [](SaveOrder* o) { o->bytes.pop_back(); }},
      {"impossible bytes", [](SaveOrder* o) { o->bytes[0] = UINT64_MAX; }},
      {"a tensor twice", [](SaveOrder* o) { o->tensors.push_back(o->tensors[0]), o->bytes.push_back(1); }},
      {"another mesh than the world",
       [](SaveOrder* o) {
         o->tensors[0].layout = Layout::kSharded;
         o->tensors[0].sharding = {.mesh = {{"dp", 3}}, .splits = {{0, "dp"}}};
       }},
  };
  for (const auto& [name, fault] : faults) {
    SaveOrder order = good;
    fault(&order);
    EXPECT_TRUE(absl::IsDataLoss(ParseSaveOrder(Print(order)).status())) << name;
  }
  EXPECT_FALSE(ParseSaveOrder(Print(OwnerClaim{.epoch = 2, .owner = Sample().owner})).ok());
}

TEST(ManifestFormat, AManifestUnderAnotherKeyIsRefused_C10) {
  SaveId other = kId;
  other.step = 121;
  EXPECT_FALSE(ParseManifest(ManifestKey(other), Print(Sample())).ok());
  EXPECT_FALSE(ParseManifest("manifests/latest.json", Print(Sample())).ok());
  EXPECT_FALSE(
      ParseShardIndex(AttemptKey(kId, IndexName(0, 2)),
                      Print(ShardIndex{.id = kId, .rank = 1, .world_size = 2, .file = Sample().files[1]}))
          .ok());
}

TEST(ManifestFormat, InconsistentManifestsAreRefused_C4_C10) {
  const Faults faults = {
      {"missing file", [](Manifest* m) { m->files.pop_back(); }},
      {"1 PB file", [](Manifest* m) { m->files[0].bytes = kFileBytesMax + 1; }},
      {"chunk missing", [](Manifest* m) { m->files[1].chunks.pop_back(); }},
      {"path as name", [](Manifest* m) { m->files[0].name = "../../etc/passwd"; }},
      {"absolute name", [](Manifest* m) { m->files[0].name = "/etc/passwd"; }},
      {"tensor twice", [](Manifest* m) { m->tensors.push_back(m->tensors[0]); }},
      {"hash", [](Manifest* m) { m->files[0].xxh3 = "zz"; }},
      {"negative shape", [](Manifest* m) { m->tensors[0].shape[0] = -2; }},
      {"huge shape",
       [](Manifest* m) {
         m->tensors[0].shape = {INT64_MAX, INT64_MAX};
       }},
      {"world size 0", [](Manifest* m) { m->world_size = 0, m->files.clear(); }},
      {"missing tensor", [](Manifest* m) { m->tensors.push_back({.name = "adam", .shape = {4}}); }},
      {"version 0", [](Manifest* m) { m->version = 0; }},
      {"version 4", [](Manifest* m) { m->version = 4; }},
      {"epoch 0", [](Manifest* m) { m->id.epoch = 0; }}};
  ExpectRefused(Sample(), faults);
  ExpectRefused(SampleOfVersion2(), faults);
  ExpectRefused(OldSample(), faults);
}

TEST(ManifestFormat, InconsistentPartsAreRefused_C4_C10) {
  const InParts sample = SampleInParts();
  ExpectRefused(sample.root,
                {{"a part too few", [](Manifest* m) { m->parts.pop_back(); }},
                 {"no parts of so many ranks", [](Manifest* m) { m->parts.clear(); }},
                 {"a part of nothing", [](Manifest* m) { m->parts[0].bytes = 0; }},
                 {"a part of 65 MiB", [](Manifest* m) { m->parts[0].bytes = kPartBytesMax + 1; }},
                 {"hash", [](Manifest* m) { m->parts[1].xxh3 = "zz"; }},
                 {"bytes of its files", [](Manifest* m) { m->parts[1].file_bytes = 3 * kFileBytesMax; }},
                 {"chunks of nothing", [](Manifest* m) { m->parts[1].chunks = 3; }},
                 {"parts before version 3", [](Manifest* m) { m->version = 2; }}});
  ExpectRefused(sample.whole, {{"a file of another length", [](Manifest* m) { m->files[65].bytes += 8; }},
                               {"a file under another name", [](Manifest* m) { m->files[65].name += "x"; }}});
}

TEST(ManifestFormat, PartsAreAddedAndOthersThanTheRootNamesAreRefused_C4_C10) {
  const InParts sample = SampleInParts();
  Manifest m = sample.root;
  EXPECT_FALSE(m.finite());
  EXPECT_EQ(m.file_bytes(), sample.whole.file_bytes());
  EXPECT_FALSE(m.Has(65));
  ASSERT_TRUE(AddParts({{1, sample.texts[1]}}, &m).ok());
  EXPECT_TRUE(m.Has(65));
  EXPECT_FALSE(m.Has(63));
  EXPECT_EQ(m.ChunksBefore(65), 65u);
  ASSERT_TRUE(AddParts({{0, sample.texts[0]}}, &m).ok());
  EXPECT_EQ(m, sample.whole);

  const std::string key = AttemptKey(kId, PartName(1, 2));
  const ManifestPart good = *ParseManifestPart(key, sample.texts[1]);
  // A sealed text under the right key that the root does not name: of another try, of another save.
  const auto refused = [&](const std::function<void(ManifestPart*)>& fault) {
    ManifestPart part = good;
    fault(&part);
    Manifest root = sample.root;
    EXPECT_TRUE(absl::IsDataLoss(AddParts({{1, Print(part)}}, &root)));
    root.parts[1] = RefOf(part, Print(part));  // even if it did
    return AddParts({{1, Print(part)}}, &root);
  };
  EXPECT_TRUE(refused([](ManifestPart* p) { p->verified = AttemptName(kId); }).ok());
  EXPECT_TRUE(absl::IsDataLoss(refused([](ManifestPart* p) { p->id.step = 121; })));
  EXPECT_TRUE(absl::IsDataLoss(refused([](ManifestPart* p) { p->id.attempt = 2; })));
  EXPECT_TRUE(absl::IsDataLoss(refused([](ManifestPart* p) { p->error = "disk full"; })));
  EXPECT_TRUE(absl::IsDataLoss(refused([](ManifestPart* p) { p->files[0].data_begin -= 8; })));
  EXPECT_TRUE(absl::IsDataLoss(refused([](ManifestPart* p) { p->files[1].per_rank.clear(); })));
  // Another part's text.
  Manifest root = sample.root;
  EXPECT_TRUE(absl::IsDataLoss(AddParts({{0, sample.texts[1]}}, &root)));
  EXPECT_FALSE(root.Has(0));
  EXPECT_FALSE(ParseManifestPart(AttemptKey(kId, PartName(0, 2)), sample.texts[1]).ok());
  // A root that says something else of it than it says itself.
  root.parts[1].finite = true;
  EXPECT_TRUE(absl::IsDataLoss(AddParts({{1, sample.texts[1]}}, &root)));
}

// The root says of each part how much state of ranks that are no more it has, so that nobody reads a part for
// nothing.
TEST(ManifestFormat, PartsSayHowMuchTheyKeep_C6) {
  const InParts sample = SampleInParts();
  ManifestPart part = *ParseManifestPart(AttemptKey(kId, PartName(1, 2)), sample.texts[1]);
  part.files[1].kept = {{0, 131, 9}};
  part.files[1].bytes += 9;
  Manifest root = sample.root;
  root.parts[1] = RefOf(part, Print(part));
  EXPECT_EQ(root.parts[1].kept, 1u);
  Manifest read = std::get<Manifest>(*ParseManifest(ManifestKey(kId), Print(root)));
  EXPECT_EQ(read, root);
  ASSERT_TRUE(AddParts({{1, Print(part)}}, &read).ok());
  EXPECT_EQ(read.files[65].kept, part.files[1].kept);
  root.parts[1].kept = 2;
  EXPECT_TRUE(absl::IsDataLoss(AddParts({{1, Print(part)}}, &root)));
  part.files[1].kept[0].rank = 130;  // kept by rank 64
  root.parts[1] = RefOf(part, Print(part));
  EXPECT_TRUE(absl::IsDataLoss(AddParts({{1, Print(part)}}, &root)));
  const std::string none = absl::StrReplaceAll(Print(root), {{"\"kept\": 1", "\"kept\": 0"}});
  EXPECT_EQ(ParseManifest(ManifestKey(kId), Reseal(none)).status().code(), absl::StatusCode::kDataLoss);
}

TEST(ManifestFormat, ImpossiblePartsAreRefused) {
  const std::string good = SampleInParts().texts[1], key = AttemptKey(kId, PartName(1, 2));
  ASSERT_TRUE(ParseManifestPart(key, good).ok());
  const auto with = [&](absl::string_view from, absl::string_view to) {
    EXPECT_TRUE(absl::StrContains(good, from)) << from;
    return ParseManifestPart(key, Reseal(absl::StrReplaceAll(good, {{from, to}}))).status();
  };
  EXPECT_TRUE(absl::IsDataLoss(with("\"world_size\": 66", "\"world_size\": 64")));
  EXPECT_TRUE(absl::IsDataLoss(with("\"world_size\": 66", "\"world_size\": 67")));
  EXPECT_TRUE(absl::IsDataLoss(with("\"part\": 1", "\"part\": 2")));
  EXPECT_TRUE(absl::IsDataLoss(with("\"verified\": \"\"", "\"verified\": \"../../x\"")));
  EXPECT_TRUE(absl::IsDataLoss(with("\"verified\": \"\"", "\"error\": \"x\"")));
  EXPECT_TRUE(absl::IsDataLoss(with("rank-00065-of-00066", "rank-00064-of-00066")));
  EXPECT_TRUE(absl::IsDataLoss(with("\"version\": 3", "\"version\": 2")));
}

// An older gtrain must neither fall back from what a newer one wrote nor delete it as damaged.
TEST(ManifestFormat, WhatANewerGtrainWroteIsRefusedByNameAndNotDamage) {
  const auto newer = [](const std::string& text) {
    std::string out = absl::StrReplaceAll(text, {{absl::StrCat("\"version\": ", kManifestVersion, ","),
                                                  "\"version\": 4,\n \"of_tomorrow\": [],"}});
    EXPECT_NE(out, text);
    return Reseal(out);
  };
  const std::string says = "written by a newer gtrain (version 4); this one reads 1 to 3";
  const absl::Status manifest = ParseManifest(ManifestKey(kId), newer(Print(Sample()))).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(manifest)) << manifest;
  EXPECT_TRUE(absl::StrContains(manifest.message(), says)) << manifest;
  const InParts sample = SampleInParts();
  EXPECT_TRUE(absl::IsFailedPrecondition(
      ParseManifestPart(AttemptKey(kId, PartName(1, 2)), newer(sample.texts[1])).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      ParseShardIndex(
          AttemptKey(kId, IndexName(1, 2)),
          newer(Print(ShardIndex{.id = kId, .rank = 1, .world_size = 2, .file = Sample().files[1]})))
          .status()));
  const std::string marker =
      Reseal(absl::StrReplaceAll(Print(AbortMarker{.id = kId}), {{"\"version\": 1,", "\"version\": 2,"}}));
  EXPECT_TRUE(absl::IsFailedPrecondition(ParseManifest(ManifestKey(kId), marker).status()));
  const std::string claim =
      Reseal(absl::StrReplaceAll(Print(OwnerClaim{.epoch = 2}), {{"\"version\": 1,", "\"version\": 2,"}}));
  EXPECT_TRUE(absl::IsFailedPrecondition(ParseOwnerClaim(OwnerKey(2), claim).status()));
}

// A writer that an upgrade has not replaced yet.
TEST(ManifestFormat, AnIndexOfVersion2IsTakenUp) {
  const std::string text =
      Print(ShardIndex{.id = kId, .rank = 1, .world_size = 2, .file = Sample().files[1]});
  const std::string old = Reseal(absl::StrReplaceAll(
      text, {{"\"version\": 3,", "\"version\": 2,"},
             {"\"chunk_bytes\"", "\"xxh3_128\": \"00000000000000000000000000000000\",\n  \"chunk_bytes\""},
             {",\n \"verified\": \"\"", ""}}));
  const auto index = ParseShardIndex(AttemptKey(kId, IndexName(1, 2)), old);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->file, Sample().files[1]);
}

TEST(ManifestFormat, InconsistentSlicesOfVersion1AreRefused_C4_C10) {
  ExpectRefused(OldSample(),
                {{"hole", [](Manifest* m) { m->files[0].slices[0].bytes = 8; }},
                 {"in two shards", [](Manifest* m) { m->files[1].slices[0].begin = 8; }},
                 {"end missing", [](Manifest* m) { m->files[1].slices[0].bytes = 8; }},
                 {"past the end of file", [](Manifest* m) { m->files[0].slices[1].bytes = 6; }},
                 {"overflowing slice", [](Manifest* m) { m->files[0].slices[1].file_begin = UINT64_MAX; }},
                 {"unknown tensor", [](Manifest* m) { m->files[0].slices[0].tensor = "v"; }},
                 {"per-rank in pieces", [](Manifest* m) { m->files[0].slices[1].begin = 1; }},
                 {"sharded", [](Manifest* m) { m->tensors[0].layout = Layout::kSharded; }}});
}

TEST(ManifestFormat, InconsistentLayoutsAreRefused_C4_C10) {
  const auto sharding = [](Manifest* m) { return &m->tensors[1].sharding; };
  ExpectRefused(
      Sample(),
      {{"file too short for its share", [](Manifest* m) { m->files[0].data_begin += 8; }},
       {"data begins past the end", [](Manifest* m) { m->files[0].data_begin = UINT64_MAX - 60; }},
       {"data not aligned", [](Manifest* m) { m->files[0].data_begin = 103, m->files[0].bytes -= 1; }},
       {"blob of another size", [](Manifest* m) { m->files[1].per_rank[0] = 8; }},
       {"blob missing", [](Manifest* m) { m->files[1].per_rank.clear(); }},
       {"blob of the size of everything", [](Manifest* m) { m->files[1].per_rank[0] = UINT64_MAX; }},
       {"blob of nobody",
        [](Manifest* m) {
          m->files[1].per_rank = {7, 0};
        }},
       {"slices",
        [](Manifest* m) {
          m->files[1].slices = {{"w", 0, 24, 104}};
        }},
       {"another shape",
        [](Manifest* m) {
          m->tensors[1].shape = {4, 4};
        }},
       {"no such axis", [&](Manifest* m) { sharding(m)->splits[0].axis = "dp"; }},
       {"no such dimension", [&](Manifest* m) { sharding(m)->splits[0].dim = 2; }},
       {"dimension below 0", [&](Manifest* m) { sharding(m)->splits[0].dim = -1; }},
       {"axis used twice",
        [&](Manifest* m) {
          sharding(m)->splits.push_back({1, "tp"});
        }},
       {"axis twice", [&](Manifest* m) { sharding(m)->mesh[0].name = "tp"; }},
       {"axis of size 0", [&](Manifest* m) { sharding(m)->mesh[0].size = 0; }},
       {"mesh of another world", [&](Manifest* m) { sharding(m)->mesh[1].size = 4; }},
       {"mesh whose product overflows",
        [&](Manifest* m) {
          sharding(m)->mesh = {{"a", INT64_MAX}, {"b", INT64_MAX}, {"tp", 2}};
        }},
       {"coordinate outside", [&](Manifest* m) { sharding(m)->only[0].index = 1; }},
       {"coordinate below 0", [&](Manifest* m) { sharding(m)->only[0].index = -1; }},
       {"axis name for a terminal", [&](Manifest* m) { sharding(m)->mesh[0].name = "\x1b[2J"; }},
       {"not sharded at all", [&](Manifest* m) { sharding(m)->splits.clear(); }},
       {"more than 2^62 bytes", [](Manifest* m) {
          m->tensors[0].shape = m->tensors[1].shape = {int64_t{1} << 59, 1};
        }}});
}

TEST(ManifestFormat, EditedAndResealedTextIsRefused_C10) {
  const std::string good = Print(Sample());
  ASSERT_EQ(Reseal(good), good);
  const std::vector<std::pair<absl::string_view, absl::string_view>> edits = {
      {"\"step\": 120", "\"step\": 1200"},
      {"\"step\": 120", "\"step\": -120"},
      {"\"step\": 120", "\"step\": 120, \"step\": 120"},
      {"\"step\": 120", "\"step\": \"120\""},
      {"\"step\": 120", "\"step\": 120.0"},
      {"\"step\": 120", "\"step\": 120, \"latest\": true"},
      {"\"version\": 3", "\"version\": 0"},
      {"\"version\": 3", "\"version\": 1"},
      {"\"version\": 3", "\"version\": 2"},
      {"\"gtrain-checkpoint\"", "\"pickle\""},
      {"\"world_size\": 2", "\"world_size\": 1000000000"},
      {"\"world_size\": 2", "\"world_size\": 3"},
      {"\"finite\": true,\n \"tensors\"", "\"finite\": false,\n \"tensors\""},
      {"\"chunk_bytes\": 4194304", "\"chunk_bytes\": 1"},
      {"\"bytes\": 165", "\"bytes\": 1099511627776"},
      {"\"data_begin\": 104", "\"data_begin\": -104"},
      {"\"data_begin\": 104", "\"slices\": []"},
      {"\"pp\",\n     1", "\"pp\",\n     1.0"},
      {"\"pp\",\n     1", "\"pp\",\n     4294967297"},
      {"\"only\": [", "\"only\": [ [\"pp\", 0, 0],"},
      {"\"only\": [", "\"only\": [ 1,"},
      {"\"splits\": [", "\"shape2\": ["},
      {"\"splits\": [", "\"splits\": [ [\"tp\", 0],"},
      {"rank-00000-of-00002.safetensors", "../../../../../etc/passwd"},
      {"\"sharded\"", "\"replicated\""},
      {"\"replicated\"", "\"sharded\""}};
  for (const auto& [from, to] : edits) {
    ASSERT_TRUE(absl::StrContains(good, from)) << from;
    const auto parsed = ParseManifest(ManifestKey(kId), Reseal(absl::StrReplaceAll(good, {{from, to}})));
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss) << from << " -> " << to;
  }
  EXPECT_FALSE(ParseManifest(ManifestKey(kId), std::string(kManifestBytesMax + 1, ' ')).ok());
}

// Every bit counts: any change of a sealed file is found (C9), and random damage never crashes a reader
// (C10).
TEST(ManifestFormat, AnyFlippedByteOrCutIsFound_C9) {
  const std::string good = Print(Sample());
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ (1 << (i % 8)));
    EXPECT_FALSE(ParseManifest(ManifestKey(kId), bad).ok()) << i;
    EXPECT_FALSE(ParseManifest(ManifestKey(kId), good.substr(0, i)).ok()) << i;
  }
}

std::string Mutate(std::string text, Rng* rng) {
  const int edits = 1 + static_cast<int>(rng->Below(4));
  for (int e = 0; e < edits && !text.empty(); ++e) {
    const size_t at = rng->Below(text.size());
    switch (rng->Below(4)) {
      case 0:
        text[at] = static_cast<char>(rng->Next());
        break;
      case 1:
        text.erase(at, rng->Below(20));
        break;
      case 2:
        text.insert(at, text.substr(rng->Below(text.size()), rng->Below(40)));
        break;
      case 3:
        text.insert(at, 1, "{}[]\",:0-9eE.\\\0"[rng->Below(15)]);
        break;
    }
  }
  return text;
}

TEST(Fuzz, MutatedInputIsAnErrorOrAValidValue_C10) {
  Rng rng(20240607);
  const std::string header = PrintShardHeader(Tensors());
  const InParts in_parts = SampleInParts();
  const std::string manifests[] = {Print(Sample()), Print(OldSample()), Print(in_parts.root)};
  const std::string index =
      Print(ShardIndex{.id = kId, .rank = 1, .world_size = 2, .file = Sample().files[1]});
  for (int i = 0; i < 3000; ++i) {
    const std::string bytes = Mutate(header, &rng);
    if (const auto parsed = ParseShardHeader(bytes, header.size() + 29); parsed.ok()) {
      EXPECT_LE(parsed->data_begin, header.size() + 29);
      for (const TensorEntry& t : parsed->tensors) EXPECT_LE(parsed->data_begin + t.end, parsed->file_bytes);
    }
    std::string text = Mutate(manifests[i % 3], &rng);
    if (absl::StrContains(text, ",\n \"checksum\"")) text = Reseal(text);
    if (const auto parsed = ParseManifest(ManifestKey(kId), text); parsed.ok()) {
      if (const Manifest* m = std::get_if<Manifest>(&*parsed)) {
        EXPECT_TRUE(Validate(*m).ok());
      }
    }
    text = Mutate(in_parts.texts[1], &rng);
    if (absl::StrContains(text, ",\n \"checksum\"")) text = Reseal(text);
    if (const auto part = ParseManifestPart(AttemptKey(kId, PartName(1, 2)), text); part.ok()) {
      EXPECT_EQ(part->part, 1);
    }
    text = Mutate(index, &rng);
    if (absl::StrContains(text, ",\n \"checksum\"")) text = Reseal(text);
    if (const auto parsed = ParseShardIndex(AttemptKey(kId, IndexName(1, 2)), text); parsed.ok()) {
      EXPECT_EQ(parsed->rank, 1);
    }
  }
}

}  // namespace
}  // namespace gtrain::ckpt
