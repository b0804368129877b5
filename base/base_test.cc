#include <sys/stat.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/ids.h"
#include "base/rng.h"
#include "base/units.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain {
namespace {

TEST(Units, BytesRoundTrip) {
  EXPECT_EQ(*ParseBytes("512"), 512u);
  EXPECT_EQ(*ParseBytes("1GiB"), 1u << 30);
  EXPECT_EQ(*ParseBytes("64Ki"), 65536u);
  EXPECT_EQ(*ParseBytes("2MB"), 2'000'000u);
  EXPECT_EQ(PrintBytes(1 << 30), "1GiB");
  EXPECT_EQ(PrintBytes(0), "0B");
  for (const char* bad :
       {"", "GiB", "010", "-1", "1e3", "0x10", "1 GiB", "1Gib", "99999999999999999999", "9999999999TiB"}) {
    EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
  }
}

TEST(Units, DurationRoundTrip) {
  for (const char* text : {"500ms", "30s", "15m", "24h", "2d"}) {
    if (std::string(text) == "24h") {
      EXPECT_EQ(PrintDuration(*ParseDuration(text)), "1d");
    } else {
      EXPECT_EQ(PrintDuration(*ParseDuration(text)), text);
    }
  }
  for (const char* bad : {"", "30", "s", "1.5h", "-1s", "1y", "007s"})
    EXPECT_FALSE(ParseDuration(bad).ok()) << bad;
}

TEST(RngTest, EqualSeedsGiveEqualSequences) {
  Rng a(7), b(7), c(8);
  EXPECT_EQ(a.Next(), b.Next());
  EXPECT_NE(a.Next(), c.Next());
  for (int i = 0; i < 1000; ++i) EXPECT_LT(a.Below(3), 3u);
}

TEST(File, ReadRefusesWhatIsNotARegularFile) {
  EXPECT_EQ(ReadFile("/", 10).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadFile("/dev/zero", 10).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadFile("/nowhere/at/all", 10).status().code(), absl::StatusCode::kNotFound);
}

TEST(File, DurableWriteReplacesWhole) {
  const std::string path = testing::TempDir() + "/gtrain_base_file";
  ASSERT_TRUE(WriteFileDurable(path, "one").ok());
  ASSERT_TRUE(WriteFileDurable(path, "two").ok());
  EXPECT_EQ(*ReadFile(path, 10), "two");
  EXPECT_EQ(ReadFile(path, 2).status().code(), absl::StatusCode::kResourceExhausted);
  struct stat st;
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
}

TEST(ClockTest, ManualClockMovesOnlyWhenTold) {
  ManualClock clock;
  const Instant start = clock.Now();
  clock.Advance(absl::Seconds(2));
  EXPECT_EQ(clock.Now() - start, absl::Seconds(2));
  RealClock real;
  const Instant before = real.Now();
  EXPECT_LE(before, real.Now());
}

}  // namespace
}  // namespace gtrain
