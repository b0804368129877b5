// Tests point to point messages: tags, sources, order, waiting, and how they end.
#include <atomic>
#include <chrono>
#include <future>
#include <numeric>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "comm/exec/check_collectives.h"
#include "comm/exec/point_to_point.h"
#include "comm/exec/rank_test_threads.h"
#include "comm/fake/fake_world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::comm {
namespace {

using testing::HasSubstr;

const std::vector<std::vector<std::string>> kThrees = {{"a", "a", "a"}, {"a", "b", "b"}, {"a", "b", "c"}};

Message SendOf(std::vector<int64_t>& data, int to, int tag = 0) {
  return {Message::Kind::kSend, data.data(), data.size(), DType::kInt64, to, tag};
}
Message ReceiveInto(std::vector<int64_t>& data, int from, int tag = 0) {
  return {Message::Kind::kReceive, data.data(), data.size(), DType::kInt64, from, tag};
}

std::vector<int64_t> Numbers(size_t count, int64_t first) {
  std::vector<int64_t> data(count);
  std::iota(data.begin(), data.end(), first);
  return data;
}

absl::Status Expect(bool good, const char* what, int64_t which = 0) {
  return good ? absl::OkStatus() : absl::DataLossError(absl::StrCat(what, " ", which));
}

// Every rank sends before it receives, whatever the size: nothing of it fits into the inbox at once.
TEST(Messages, ARingSendsBeforeItReceives) {
  for (const auto& nodes : kThrees) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{7000}, size_t{1'000'000}}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << count);
      FakeWorld world(nodes);
      ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
        const int next = (c.rank() + 1) % c.size(), previous = (c.rank() + c.size() - 1) % c.size();
        for (int turn = 0; turn < 3; ++turn) {
          const std::vector<int64_t> mine = Numbers(count, c.rank() + turn);
          std::vector<int64_t> theirs(count, -1);
          RETURN_IF_BAD(c.Send(mine.data(), count, DType::kInt64, next));
          RETURN_IF_BAD(c.Receive(theirs.data(), count, DType::kInt64, previous));
          RETURN_IF_BAD(Expect(theirs == Numbers(count, previous + turn), "not what was sent in turn", turn));
        }
        return c.Barrier();
      }));
    }
  }
}

TEST(Messages, ARingOf64) {
  for (const int of_each : {64, 8, 1}) {
    std::vector<std::string> nodes;
    for (int rank = 0; rank < 64; ++rank) nodes.push_back(absl::StrCat("m", rank / of_each));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      int64_t mine = c.rank(), theirs = -1;
      for (int turn = 0; turn < c.size(); ++turn) {
        RETURN_IF_BAD(c.Send(&mine, 1, DType::kInt64, (c.rank() + 1) % c.size()));
        RETURN_IF_BAD(c.Receive(&theirs, 1, DType::kInt64, (c.rank() + c.size() - 1) % c.size()));
        mine = theirs;
      }
      return Expect(mine == c.rank(), "came round as", mine);
    }));
  }
}

// Messages have MPI's order: with the same sender and tag that of sending, else any.
TEST(Messages, TagsChooseAndTheSameTagKeepsItsOrder) {
  for (const auto& nodes : kThrees) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      constexpr int kTags = 5, kEach = 20;
      std::vector<std::vector<int64_t>> data;
      for (int i = 0; i < kTags * kEach; ++i) data.push_back(Numbers(i % 3 == 0 ? 20'000 : 10, i));
      if (c.rank() == 1) {
        for (int i = 0; i < kTags * kEach; ++i) {
          const auto& d = data[static_cast<size_t>(i)];
          RETURN_IF_BAD(c.Send(d.data(), d.size(), DType::kInt64, 2, i % kTags));
        }
      }
      if (c.rank() == 2) {
        for (int tag = kTags - 1; tag >= 0; --tag) {
          for (int i = tag; i < kTags * kEach; i += kTags) {
            std::vector<int64_t> into(data[static_cast<size_t>(i)].size());
            RETURN_IF_BAD(c.Receive(into.data(), into.size(), DType::kInt64, 1, tag));
            RETURN_IF_BAD(Expect(into == data[static_cast<size_t>(i)], "another message than", i));
          }
        }
      }
      return c.Barrier();
    }));
  }
}

TEST(Messages, AnySourceAndAnyTagSayWhose) {
  for (const auto& nodes : kThrees) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      constexpr int kEach = 50;
      if (c.rank() > 0) {
        for (int i = 0; i < kEach; ++i) {
          const std::vector<int64_t> mine = Numbers(static_cast<size_t>(i), c.rank());
          RETURN_IF_BAD(c.Send(mine.data(), mine.size(), DType::kInt64, 0, 100 * c.rank() + i));
        }
        return c.Barrier();
      }
      std::vector<int> seen(3);
      for (int i = 0; i < 2 * kEach; ++i) {
        std::vector<int64_t> into(kEach);
        MessageInfo info;
        RETURN_IF_BAD(c.Receive(into.data(), into.size(), DType::kInt64, kAnySource, kAnyTag, &info));
        const int number = seen[static_cast<size_t>(info.from)]++;
        RETURN_IF_BAD(Expect(info.tag == 100 * info.from + number, "tag", info.tag));
        RETURN_IF_BAD(Expect(info.count == static_cast<size_t>(number), "elements", number));
        into.resize(info.count);
        RETURN_IF_BAD(Expect(into == Numbers(info.count, info.from), "data of", info.from));
      }
      return c.Barrier();
    }));
  }
}

// batch_isend_irecv of many: everybody with everybody, and itself, in any order.
TEST(Messages, GroupsOf256) {
  for (const auto& nodes : kThrees) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      constexpr int kMessages = 256;
      std::vector<std::vector<int64_t>> out, in;
      std::vector<Message> group;
      for (int i = 0; i < kMessages; ++i) {
        const size_t count = i % 16 == 0 ? 30'000 : static_cast<size_t>(i);
        out.push_back(Numbers(count, 1000 * c.rank() + i));
        in.emplace_back(count, -1);
      }
      for (int i = 0; i < kMessages; ++i) {
        group.push_back(SendOf(out[static_cast<size_t>(i)], (c.rank() + i) % c.size(), i));
        group.push_back(
            ReceiveInto(in[static_cast<size_t>(i)], (c.rank() + 3 * kMessages - i) % c.size(), i));
      }
      auto going = c.Start(group);
      RETURN_IF_BAD(going.status());
      RETURN_IF_BAD(*(*going)->Wait(absl::InfiniteDuration()));
      for (int i = 0; i < kMessages; ++i) {
        const int from = (c.rank() + 3 * kMessages - i) % c.size();
        const auto& got = in[static_cast<size_t>(i)];
        RETURN_IF_BAD(Expect(got == Numbers(got.size(), 1000 * from + i), "message", i));
      }
      return c.Barrier();
    }));
  }
}

// The sender is idle in its program, or in a collective, while its long message is taken, and the receiver
// while it comes.
TEST(Messages, WhatWasStartedMovesWhileItsProgramDoesSomethingElse) {
  for (const auto& nodes : {kThrees[0], kThrees[1]}) {
    for (const bool sender_idles : {true, false}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << sender_idles);
      FakeWorld world(nodes);
      std::atomic<bool> there = false;
      ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
        std::vector<int64_t> data = c.rank() == 1 ? Numbers(500'000, 7) : std::vector<int64_t>(500'000);
        const Message message = c.rank() == 1 ? SendOf(data, 2) : ReceiveInto(data, 1);
        if (c.rank() != 0) {
          auto going = c.Start({&message, 1});
          RETURN_IF_BAD(going.status());
          const bool idles = (c.rank() == 1) == sender_idles;
          if (idles) {
            const absl::Time give_up = absl::Now() + absl::Seconds(60);
            while (!there && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(1));
            RETURN_IF_BAD(Expect(there, "the other waited for this rank's call"));
          }
          RETURN_IF_BAD(*(*going)->Wait(absl::InfiniteDuration()));
          there = true;
        }
        RETURN_IF_BAD(Expect(c.rank() == 0 || data == Numbers(500'000, 7), "data"));
        return c.Barrier();
      }));
    }
  }
}

// More than the window and the inbox hold, which nobody takes for now.
TEST(Messages, ManyThatNobodyWantsYetWaitWithTheirSender) {
  for (const auto& nodes : kThrees) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      constexpr int kMessages = 5000;
      const std::vector<int64_t> mine = Numbers(100, 1);
      if (c.rank() == 1) {
        for (int i = 0; i < kMessages; ++i) RETURN_IF_BAD(c.Send(mine.data(), 100, DType::kInt64, 2, i % 2));
      }
      RETURN_IF_BAD(c.Barrier());
      std::vector<int64_t> into(100);
      for (int i = 0; c.rank() == 2 && i < kMessages; ++i) {
        RETURN_IF_BAD(c.Receive(into.data(), 100, DType::kInt64, 1, i % 2));
        RETURN_IF_BAD(Expect(into == mine, "data", i));
      }
      return c.Barrier();
    }));
  }
}

// A receiver reports what it has taken only once in half of the window: the unreported part and the longest
// message that leaves without asking are together more than the window.
TEST(Messages, WhatWasTakenAndNotToldStopsNobody) {
  for (const auto& nodes : kThrees) {
    for (const std::vector<size_t>& bytes :
         std::vector<std::vector<size_t>>{{131'000, kUnaskedBytes}, std::vector<size_t>(2016, 1)}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << bytes.size());
      FakeWorld world(nodes);
      ExpectAllOk(RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            std::vector<size_t> all = bytes;
            all.push_back(kUnaskedBytes);
            std::vector<uint8_t> data(kUnaskedBytes, 7), into(kUnaskedBytes);
            for (const size_t count : all) {
              if (c.rank() == 1) RETURN_IF_BAD(c.Send(data.data(), count, DType::kUint8, 2));
              if (c.rank() != 2) continue;
              RETURN_IF_BAD(c.Receive(into.data(), count, DType::kUint8, 1));
              RETURN_IF_BAD(Expect(into[count - 1] == 7, "data"));
            }
            return c.Barrier();
          },
          absl::Seconds(60)));
    }
  }
}

// Messages that nobody receives yet, however many, hold up neither messages with another tag nor collectives.
TEST(Messages, WhatWaitsStandsInNobodysWay) {
  for (const auto& nodes : kThrees) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    ExpectAllOk(RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          constexpr int kMessages = 200;
          const size_t counts[] = {1250, 0, 5, 12'000};
          if (c.rank() == 1) {
            for (int i = 0; i < kMessages; ++i) {
              const std::vector<int64_t> mine = Numbers(counts[i % 4], i);
              RETURN_IF_BAD(c.Send(mine.data(), mine.size(), DType::kInt64, 2, 1));
            }
            RETURN_IF_BAD(c.Send(Numbers(1, 77).data(), 1, DType::kInt64, 2, 2));
          }
          int64_t part = c.rank();
          std::vector<int64_t> parts(3);
          RETURN_IF_BAD(c.Gather(&part, parts.data(), 1, DType::kInt64, 2));
          if (c.rank() != 2) return c.Barrier();
          RETURN_IF_BAD(Expect(parts == Numbers(3, 0), "parts"));
          RETURN_IF_BAD(c.Receive(&part, 1, DType::kInt64, 1, 2));
          RETURN_IF_BAD(Expect(part == 77, "what came behind them", part));
          for (int i = 0; i < kMessages; ++i) {
            std::vector<int64_t> into(counts[i % 4], -1);
            RETURN_IF_BAD(c.Receive(into.data(), into.size(), DType::kInt64, 1, 1));
            RETURN_IF_BAD(Expect(into == Numbers(into.size(), i), "in their order", i));
          }
          return c.Barrier();
        },
        absl::Seconds(60)));
  }
}

TEST(Messages, MoreThanMayGoOnAreWaitedFor) {
  FakeWorld world({"a", "a"});
  constexpr int kMessages = static_cast<int>(kOpenMessagesMax) + 5000;
  std::promise<void> full;
  ExpectAllOk(RunThreads(
      world,
      [&](Communicator& c) -> absl::Status {
        int32_t number = 0, back = 0;
        if (c.rank() == 0) {
          for (; number < kMessages; ++number) {
            if (number == static_cast<int>(kOpenMessagesMax)) full.set_value();
            RETURN_IF_BAD(c.Send(&number, 1, DType::kInt32, 1));
          }
          return c.Receive(&back, 1, DType::kInt32, 1);
        }
        RETURN_IF_BAD(
            Expect(full.get_future().wait_for(std::chrono::seconds(60)) == std::future_status::ready,
                   "copies, as many as may be"));
        for (int i = 0; i < kMessages; ++i) {
          RETURN_IF_BAD(c.Receive(&number, 1, DType::kInt32, 0));
          RETURN_IF_BAD(Expect(number == i, "in their order", i));
        }
        return c.Send(&back, 1, DType::kInt32, 0);
      },
      absl::Seconds(120)));
}

// One side says nothing, the other three: found, and no part of what comes next.
TEST(Messages, L6BlocksOfWhichOneSideKnowsNothingAreNamed) {
  for (const auto& nodes : kThrees) {
    for (const size_t sends : {size_t{0}, size_t{3}}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << sends);
      FakeWorld world(nodes);
      const auto results = RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            std::vector<int64_t> from(3, 111), to(3);
            std::vector<size_t> out(3), in(3);
            if (c.rank() == 0) out[2] = sends;
            if (c.rank() == 2) in[0] = 3 - sends;
            const absl::Status status = c.AllToAllV(from.data(), out, to.data(), in, DType::kInt64);
            if (!status.ok() || c.rank() == 2) return status;
            return c.Barrier();
          },
          absl::Seconds(30));
      EXPECT_TRUE(absl::IsFailedPrecondition(results[2])) << results[2];
      EXPECT_THAT(std::string(results[2].message()), HasSubstr("rank 0"));
    }
  }
}

TEST(Messages, WhatWasSentIsTakenAfterItsSenderHasLeft) {
  for (const auto& nodes : kThrees) {
    for (const auto& [count, waits] :
         std::vector<std::pair<size_t, bool>>{{10, true}, {400'000, true}, {400'000, false}}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << count << waits);
      std::vector<int64_t> kept = Numbers(count, 5);
      FakeWorld world(nodes);
      std::atomic<bool> sent = false;
      ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
        if (c.rank() == 0) return absl::OkStatus();
        if (c.rank() == 1) {
          const Message message = SendOf(kept, 2);
          RETURN_IF_BAD(waits ? c.SendMessage(message) : c.Start({&message, 1}).status());  // given up
          sent = true;
          return absl::OkStatus();
        }
        while (!sent) absl::SleepFor(absl::Milliseconds(1));
        absl::SleepFor(absl::Milliseconds(30));  // it is closing
        std::vector<int64_t> into(count);
        RETURN_IF_BAD(c.Receive(into.data(), count, DType::kInt64, 1));
        return Expect(into == Numbers(count, 5), "data");
      }));
    }
  }
}

TEST(Messages, L6WhatDoesNotFitIsNamedAndEndsTheCommunicator) {
  struct Case {
    size_t sent, wanted;
    DType dtype;
    bool at_most, good;
  };
  for (const Case& how :
       {Case{10, 11, DType::kInt64, false, false}, Case{11, 10, DType::kInt64, true, false},
        Case{9'000, 9'001, DType::kInt64, false, false}, Case{10, 20, DType::kInt32, false, false},
        Case{10, 11, DType::kInt64, true, true}, Case{9'000, 20'000, DType::kInt64, true, true}}) {
    for (const auto& nodes : kThrees) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << how.sent << " " << how.wanted);
      FakeWorld world(nodes);
      const auto results = RunThreads(world, [&](Communicator& c) -> absl::Status {
        std::vector<int64_t> data(30'000, 3);
        if (c.rank() == 1) RETURN_IF_BAD(c.Send(data.data(), how.sent, DType::kInt64, 2, 4));
        MessageInfo info;
        if (c.rank() == 2) {
          RETURN_IF_BAD(c.Receive(data.data(), how.wanted, how.dtype, 1, 4, how.at_most ? &info : nullptr));
          EXPECT_EQ(info.count, how.sent);
        }
        return c.Barrier();
      });
      if (how.good) {
        ExpectAllOk(results);
        continue;
      }
      EXPECT_EQ(results[2].code(), absl::StatusCode::kFailedPrecondition) << results[2];
      EXPECT_THAT(
          std::string(results[2].message()),
          testing::AllOf(HasSubstr(absl::StrCat(how.wanted, " int")),
                         HasSubstr(absl::StrCat("from rank 1, tag 4: rank 1 sent ", how.sent, " int64"))));
      for (const int other : {0, 1}) {
        EXPECT_TRUE(absl::IsUnavailable(results[static_cast<size_t>(other)]))
            << results[static_cast<size_t>(other)];
        EXPECT_THAT(std::string(results[static_cast<size_t>(other)].message()),
                    HasSubstr("rank 2 gave up: receive of"));
      }
    }
  }
}

TEST(Messages, BadArgumentsAreNamed) {
  struct Case {
    Message message;
    const char* words;
  };
  float x = 0;
  const auto kSend = Message::Kind::kSend, kReceive = Message::Kind::kReceive;
  for (const Case& bad : {Case{{kSend, &x, 1, DType::kFloat32, 2}, "send to rank 2: the ranks are 0..1"},
                          Case{{kSend, &x, 1, DType::kFloat32, kAnySource}, "send to rank -1"},
                          Case{{kReceive, &x, 1, DType::kFloat32, -2}, "receive from rank -2"},
                          Case{{kSend, &x, 1, DType::kFloat32, 1, kAnyTag}, "a tag is 0 or more"},
                          Case{{kReceive, &x, 1, DType::kFloat32, 1, -2}, "a tag is 0 or more"},
                          Case{{kReceive, &x, 1, DType::kFloat32, 1, -3}, "a tag is 0 or more"},
                          Case{{kReceive, nullptr, 1, DType::kFloat32, 1}, "no data"},
                          Case{{kSend, &x, SIZE_MAX / 2, DType::kFloat32, 1}, "cannot be in memory"}}) {
    FakeWorld world(FakeWorld::OneNode(2));
    const auto results = RunThreads(world, [&](Communicator& c) -> absl::Status {
      if (c.rank() == 1) return c.Barrier();
      const absl::Status status = c.Start({&bad.message, 1}).status();
      EXPECT_EQ(c.Barrier(), status) << "dead after an error";
      return status;
    });
    EXPECT_EQ(results[0].code(), absl::StatusCode::kInvalidArgument) << results[0];
    EXPECT_THAT(std::string(results[0].message()), HasSubstr(bad.words));
    EXPECT_THAT(std::string(results[1].message()), HasSubstr(bad.words));
  }
}

TEST(Messages, OfARankToItself) {
  for (const int ranks : {1, 2}) {
    FakeWorld world(FakeWorld::OneNode(ranks));
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      const std::vector<int64_t> mine = Numbers(100'000, 3);
      std::vector<int64_t> into(mine.size());
      for (int turn = 0; turn < 200; ++turn) {
        RETURN_IF_BAD(c.Send(mine.data(), mine.size(), DType::kInt64, c.rank(), turn));
        RETURN_IF_BAD(c.Receive(into.data(), into.size(), DType::kInt64, c.rank(), turn));
        RETURN_IF_BAD(Expect(into == mine, "data"));
      }
      absl::Status last;
      for (int turn = 0; turn < 100 && last.ok(); ++turn)
        last = c.Send(mine.data(), mine.size(), DType::kInt64, c.rank());
      RETURN_IF_BAD(Expect(absl::IsResourceExhausted(last), "copies have no bound"));
      return c.Barrier();
    }));
  }
}

// Send copies only a bounded amount: further messages wait for their receiver, and the rank that they wait
// for is named.
TEST(Messages, BeyondTheCopiesASendWaits) {
  for (const auto& nodes : {kThrees[0], kThrees[1]}) {
    FakeWorld world(nodes);
    std::atomic<int> sent = 0;
    const auto results = RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          const std::vector<int64_t> mine(2 << 20, 1);  // 16 MiB
          if (c.rank() != 1) {
            while (sent < 5) absl::SleepFor(absl::Milliseconds(5));
            return absl::OkStatus();
          }
          absl::Status status;
          while (sent < 10 && status.ok()) {
            status = c.Send(mine.data(), mine.size(), DType::kInt64, 2);
            ++sent;
          }
          return status;
        },
        absl::Seconds(2));
    EXPECT_EQ(sent, 5) << "four of 16 MiB are copied";
    EXPECT_TRUE(absl::IsDeadlineExceeded(results[1])) << results[1];
    EXPECT_THAT(std::string(results[1].message()), HasSubstr("send of 2097152 int64 to rank 2, tag 0"));
  }
}

TEST(Messages, AWaitMayBeShortAndHandlesOutliveTheirCommunicator) {
  for (const auto& nodes : kThrees) {
    FakeWorld world(nodes);
    std::shared_ptr<PendingMessages> left_over;
    ExpectAllOk(RunThreads(world, [&](Communicator& c) -> absl::Status {
      std::vector<int64_t> into(10);
      if (c.rank() == 2) {
        const Message message = ReceiveInto(into, 1);
        auto going = c.Start({&message, 1});
        RETURN_IF_BAD(going.status());
        RETURN_IF_BAD(Expect(!(*going)->Wait(absl::ZeroDuration()).has_value(), "over at once"));
        RETURN_IF_BAD(Expect(!(*going)->Wait(absl::Milliseconds(30)).has_value(), "over soon"));
        RETURN_IF_BAD(c.Barrier());
        RETURN_IF_BAD(*(*going)->Wait(absl::InfiniteDuration()));
        RETURN_IF_BAD(Expect((*going)->info(0).from == 1, "from"));
        auto never = c.Start({&message, 1});
        RETURN_IF_BAD(never.status());
        left_over = *never;
      } else {
        RETURN_IF_BAD(c.Barrier());
        if (c.rank() == 1) RETURN_IF_BAD(c.Send(into.data(), 10, DType::kInt64, 2));
      }
      return c.Barrier();
    }));
    EXPECT_TRUE(absl::IsCancelled(*left_over->Wait(absl::InfiniteDuration())));
  }
}

// Nothing is called here afterwards.
TEST(Communicator, AnAbortBetweenTwoCallsIsToldAtOnce) {
  for (const auto& nodes : kThrees) {
    SCOPED_TRACE(testing::PrintToString(nodes));
    FakeWorld world(nodes);
    std::atomic<int> heard = 0;
    const auto results = RunThreads(
        world,
        [&](Communicator& c) -> absl::Status {
          RETURN_IF_BAD(c.Barrier());
          if (c.rank() == 1) {
            c.Abort(absl::InternalError("no more"));
            const absl::Time give_up = absl::Now() + absl::Seconds(60);
            while (heard < 2 && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(1));
            return Expect(heard == 2, "heard by", heard);
          }
          const absl::Status status = c.Barrier();
          ++heard;
          return status;
        },
        absl::Minutes(5));
    EXPECT_TRUE(results[1].ok()) << results[1];
    EXPECT_THAT(std::string(results[0].message()), HasSubstr("rank 1 gave up: no more"));
  }
}

// An abort ends a running call, whichever thread runs it, and later calls.
TEST(Communicator, AbortFromAnotherThreadEndsTheRunningCallOfAll) {
  for (const auto& nodes : kThrees) {
    for (const bool collective : {true, false}) {
      SCOPED_TRACE(testing::Message() << testing::PrintToString(nodes) << collective);
      FakeWorld world(nodes);
      std::atomic<int> ended = 0;
      const auto results = RunThreads(
          world,
          [&](Communicator& c) -> absl::Status {
            RETURN_IF_BAD(c.Barrier());
            int64_t x = 0;
            if (c.rank() == 0) {  // a later call
              while (ended < 2) absl::SleepFor(absl::Milliseconds(1));
              const absl::Status first = c.AllReduce(&x, 1, DType::kInt64, ReduceOp::kSum);
              return first.ok() ? c.Barrier() : first;  // on one machine all had come to the first one
            }
            std::thread other;
            if (c.rank() == 1) {
              other = std::thread([&] {
                absl::SleepFor(absl::Milliseconds(20));
                c.Abort(absl::InternalError("no more"));
              });
            }
            const absl::Status status = collective ? c.AllReduce(&x, 1, DType::kInt64, ReduceOp::kSum)
                                                   : c.Receive(&x, 1, DType::kInt64, 0);
            if (other.joinable()) other.join();
            ++ended;
            EXPECT_FALSE(c.Barrier().ok());
            return status;
          },
          absl::Minutes(5));
      EXPECT_EQ(results[1].code(), absl::StatusCode::kInternal) << results[1];
      for (const absl::Status& status : results)
        EXPECT_THAT(std::string(status.message()), HasSubstr("no more"));
    }
  }
}

}  // namespace
}  // namespace gtrain::comm
