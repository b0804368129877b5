#include "elastic/plan/greeting.h"

#include <optional>

#include "gtest/gtest.h"

namespace gtrain::elastic {
namespace {

TEST(Greeting, IsReadAsItWasWritten) {
  Greeting g;
  g.state = {.applied = 7, .held = 8, .as_made = false, .undo = 6, .copies = {{1, 7}, {2, 6}}, .line = 3};
  g.computed = {2, 4};
  g.save = Greeting::Save{5, 1234};
  g.machine = 9;
  g.likeness = {uint64_t{1} << 63, 11, 12};
  g.stop = true;
  EXPECT_EQ(ReadGreeting(WriteGreeting(g)), g);
  g.stop = false;
  g.carries_over = true;
  EXPECT_EQ(ReadGreeting(WriteGreeting(g)), g);
}

TEST(Greeting, OfAProcessThatHasNothing) {
  Greeting g;
  const Greeting read = ReadGreeting(WriteGreeting(g));
  EXPECT_EQ(read.save, std::nullopt);
  g.state.copies.resize(2);  // to have none and two that are none is the same
  EXPECT_EQ(read, g);
}

}  // namespace
}  // namespace gtrain::elastic
