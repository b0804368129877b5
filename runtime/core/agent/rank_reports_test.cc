#include "runtime/core/agent/rank_reports.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "net/port/transport.h"
#include "runtime/core/values/rank_notes.h"

namespace gtrain::core {
namespace {

RankSaid Checkpoint(size_t manifest_bytes) {
  return ReadRelay(absl::StrCat(R"({"type":"checkpoint","step":40,"timeline":9,"policy":"","manifest":")",
                                std::string(manifest_bytes, 'm'), R"("})"));
}

// A report that the head does not take closed the connection of the whole node, again after each hello, for
// the jobs of all its users.
TEST(RankReports, WhatWouldNotReachTheHeadIsRefusedAndSaid) {
  EXPECT_EQ(Checkpoint(kManifestBytesMax).kind, RankSaid::Kind::kCheckpoint);
  const RankSaid checkpoint = Checkpoint(kManifestBytesMax + 1);
  EXPECT_EQ(checkpoint.kind, RankSaid::Kind::kNote);
  EXPECT_EQ(checkpoint.note, kRefusedNote);
  EXPECT_EQ(checkpoint.text,
            "the manifest of a checkpoint has 4097 bytes and may have 4096: it is not taken");
  EXPECT_EQ(checkpoint.manifest, "");

  const auto exchange = [](size_t bytes) {
    return ReadRelay(absl::StrCat(R"({"type":"exchange","sequence":3,"blob":")",
                                  absl::Base64Escape(std::string(bytes, 'b')), R"("})"));
  };
  EXPECT_EQ(exchange(kBlobBytesMax).kind, RankSaid::Kind::kExchange);
  EXPECT_EQ(exchange(kBlobBytesMax + 1).kind, RankSaid::Kind::kNote);
  static_assert(2 * kBlobBytesMax < port::kToServerBytesMax &&
                2 * kManifestBytesMax < port::kToServerBytesMax);
}

// An older library does not say it.
TEST(RankReports, WhatNobodyMeasuredIsAbsent) {
  RankSaid said = ReadRelay(R"({"type":"progress","waited":1.5,"joined":6,"stalled":0.5})");
  EXPECT_EQ(said.stalled, 0.5);
  said = ReadRelay(R"({"type":"progress","waited":1.5,"joined":6})");
  EXPECT_EQ(said.waited, 1.5);
  EXPECT_FALSE(said.stalled);
}

TEST(RankReports, TextsAreCutAndPrintable) {
  const RankSaid note =
      ReadRelay(absl::StrCat(R"({"type":"saves","text":"a\n)", std::string(9000, 'x'), R"("})"));
  EXPECT_EQ(note.kind, RankSaid::Kind::kNote);
  EXPECT_EQ(note.text.size(), kRankNoteBytesMax);
  EXPECT_EQ(note.text.substr(0, 3), "a?x");
  EXPECT_EQ(ReadRelay("not JSON").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"checkpoint"})").kind, RankSaid::Kind::kNothing) << "of no step";
}

TEST(RankReports, HostileInputIsHarmless) {  // P9
  EXPECT_EQ(ReadRelay("").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay("[1]").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":7,"step":"x"})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"exchange","sequence":-1,"blob":"YQ=="})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"exchange","sequence":1,"blob":"***"})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"link","peer":-1,"text":"x"})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"link","peer":1e18,"text":"x"})").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(ReadRelay(R"({"type":"link","peer":1,"text":")" + std::string(1 << 16, 'x') + "\"}").text.size(),
            kLinkTextBytesMax);
  EXPECT_FALSE(ReadReportLine(R"({"step":1e300,"loss":1e999})").step.has_value());
  EXPECT_FALSE(ReadReportLine(R"({"step":-2})").step.has_value());
  EXPECT_FALSE(ReadRelay(R"({"type":"progress","step":18446744073709551615})").step.has_value());
  LineCutter cutter(8);
  EXPECT_EQ(cutter.Take(std::string(20, 'x')).size(), 2u);
  spec::Progress progress;
  progress.step = "(a*)*b(\\d+)";
  const ProgressPatterns patterns(progress);
  EXPECT_EQ(patterns.Match("step 5").kind, RankSaid::Kind::kNothing);
  EXPECT_EQ(patterns.Match(std::string(1 << 20, 'a')).kind, RankSaid::Kind::kNothing);  // in no time
}

}  // namespace
}  // namespace gtrain::core
