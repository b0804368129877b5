#include "bench/orders.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

namespace gtrain::bench {
namespace {

using testing::ElementsAre;

std::vector<std::vector<double>> Answers(const std::string& orders,
                                         const std::function<void(const Order&, Figures&)>& carry_out) {
  std::istringstream in(orders);
  std::ostringstream out;
  AnswerOrders(in, out, carry_out);
  std::vector<std::vector<double>> answers;
  std::istringstream lines(out.str());
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    answers.emplace_back();
    for (double number = 0; words >> number;) answers.back().push_back(number);
  }
  return answers;
}

TEST(OrdersTest, EachKindSaysHowManyCallsAreUnderWay) {
  std::vector<int64_t> under_way;
  const auto answers = Answers("sync 1\nwindowed 1\nwide 1\nlarge 1\n",
                               [&](const Order& order, Figures&) { under_way.push_back(order.UnderWay()); });
  EXPECT_THAT(under_way, ElementsAre(1, 64, 512, 4));
  ASSERT_EQ(answers.size(), 4u);
  for (const auto& answer : answers) EXPECT_EQ(answer.size(), 1u);
}

TEST(OrdersTest, ATailIsTheQuantilesOfItsCallsByNearestRank) {
  const auto answers = Answers("tail 1000\n", [](const Order& order, Figures& figures) {
    // As if the calls had begun 1, 2, ... 1,000 hours ago.
    const auto now = figures.Begin();
    for (int64_t i = order.count; i >= 1; --i) figures.End(now - std::chrono::hours(i));
  });
  ASSERT_EQ(answers.size(), 1u);
  ASSERT_EQ(answers[0].size(), 2u);
  EXPECT_NEAR(answers[0][0] / 3600, 990, 0.5);
  EXPECT_NEAR(answers[0][1] / 3600, 999, 0.5);
}

TEST(OrdersTest, MemoryIsWhatCameWhileTheOrderWasCarriedOut) {
  const std::vector<char> before(256 << 20, 1);
  std::vector<char> actors;
  const auto answers = Answers("memory 1000\n", [&](const Order& order, Figures& figures) {
    actors.assign(static_cast<size_t>(order.count) << 14, 1);
    figures.TakeMemory(order.count);
  });
  ASSERT_EQ(answers.size(), 1u);
  ASSERT_EQ(answers[0].size(), 1u);
  EXPECT_GT(answers[0][0], 15'000);
  EXPECT_LT(answers[0][0], 200'000);  // sanitizers have shadows of it
  EXPECT_EQ(before.back(), 1);
}

TEST(OrdersTest, AServerAnnouncesWhereItIs) {
  const std::string address = StartServer([](const Announce& announce) {
    announce("unix-abstract:here");
    for (;;) pause();
  });
  EXPECT_EQ(address, "unix-abstract:here");
}

}  // namespace
}  // namespace gtrain::bench
