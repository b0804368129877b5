#include "actors/plan/objects.h"

#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

constexpr ObjectRef kRef{{1, 2}, 3, 100, 4, 5};

TEST(Objects, NamesComeBackAsTheyWere) {
  const std::string bytes = PrintObject(kRef);
  ASSERT_EQ(bytes.size(), kObjectRefBytes);
  EXPECT_EQ(*ParseObject(bytes), kRef);
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(ParseObject(bytes.substr(0, size)).ok());
  EXPECT_FALSE(ParseObject(bytes + "x").ok());
}

TEST(Objects, OnlyWhatIsThereIsAskedFor) {
  EXPECT_EQ(*ParsePart(PrintPart({kRef, 90, 10})), (PartRequest{kRef, 90, 10}));
  EXPECT_EQ(*ParsePart(PrintPart({kRef, 100, 0})), (PartRequest{kRef, 100, 0}));
  for (const PartRequest& wrong : {PartRequest{kRef, 90, 11}, PartRequest{kRef, 101, 0},
                                   PartRequest{kRef, UINT64_MAX, 2}, PartRequest{kRef, 2, UINT64_MAX}})
    EXPECT_FALSE(ParsePart(PrintPart(wrong)).ok());
  ObjectRef large = kRef;
  large.bytes = UINT64_MAX;
  EXPECT_TRUE(ParsePart(PrintPart({large, 5, kObjectPartBytes})).ok());
  EXPECT_FALSE(ParsePart(PrintPart({large, 5, kObjectPartBytes + 1})).ok());
}

}  // namespace
}  // namespace gtrain::actors
