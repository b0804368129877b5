#include "actors/plan/frames.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/rng.h"

namespace gtrain::actors {
namespace {

std::vector<Frame> All() {
  return {HelloFrame{{1, 2}, {3, UINT64_MAX}},
          WelcomeFrame{{5, 6}},
          CallFrame{7, 8, 6, 2, 1000, false, "arguments"},
          CallFrame{0, 1, 0, 0, UINT32_MAX, true, ""},
          AnswerFrame{7, 8, absl::StatusCode::kOk, "result"},
          AnswerFrame{7, 9, absl::StatusCode::kNotFound, "why"},
          AgainFrame{7, 10, true},
          AgainFrame{8, 1, false},
          AcknowledgeFrame{8, 9}};
}

TEST(Frames, ManyTravelInOneMessage) {
  std::string message;
  for (const Frame& frame : All()) AppendFrame(frame, &message);
  absl::string_view rest = message;
  for (const Frame& frame : All()) {
    const auto taken = TakeFrame(&rest);
    ASSERT_TRUE(taken.ok()) << taken.status();
    EXPECT_TRUE(*taken == frame);
  }
  EXPECT_TRUE(rest.empty());
}

TEST(Frames, WhatEndsTooEarlyIsRefused) {
  for (const Frame& frame : All()) {
    std::string message;
    AppendFrame(frame, &message);
    for (size_t size = 0; size < message.size(); ++size) {
      absl::string_view rest(message.data(), size);
      EXPECT_FALSE(TakeFrame(&rest).ok()) << frame.index() << " " << size;
      EXPECT_EQ(rest.size(), size);  // nothing is taken
    }
  }
}

TEST(Frames, NobodyReadsWhatNobodyWrites) {
  const auto refused = [](std::string message) {
    absl::string_view rest = message;
    return !TakeFrame(&rest).ok();
  };
  const auto written = [](const Frame& frame) {
    std::string message;
    AppendFrame(frame, &message);
    return message;
  };
  EXPECT_TRUE(refused(std::string(64, '\0')));
  EXPECT_TRUE(refused(std::string(64, '\7')));
  std::string version = written(HelloFrame{});
  version[1] = 2;
  EXPECT_TRUE(refused(version));
  std::string flags = written(CallFrame{1, 1, 0, 0, 1, false, ""});
  flags[1] = 2;
  EXPECT_TRUE(refused(flags));
  std::string code = written(AnswerFrame{1, 1, absl::StatusCode::kOk, ""});
  code[1] = 17;
  EXPECT_TRUE(refused(code));
  EXPECT_TRUE(refused(written(CallFrame{1, 0, 0, 0, 1, false, ""})));
  EXPECT_TRUE(refused(written(CallFrame{1, 3, 3, 0, 1, false, ""})));
  EXPECT_TRUE(refused(written(AnswerFrame{1, 0, absl::StatusCode::kOk, ""})));
  EXPECT_TRUE(refused(written(AgainFrame{1, 0, false})));
  const std::string sentence(kErrorBytesMax + 1, 'x');
  EXPECT_TRUE(refused(written(AnswerFrame{1, 1, absl::StatusCode::kUnknown, sentence})));
}

TEST(Frames, WhateverComesIsReadOrRefused) {
  Rng rng(1);
  for (int round = 0; round < 20'000; ++round) {
    std::string message;
    const auto frames = All();
    AppendFrame(frames[rng.Below(frames.size())], &message);
    for (int i = 0; i < 3; ++i) message[rng.Below(message.size())] = static_cast<char>(rng.Next());
    absl::string_view rest = message;
    const auto taken = TakeFrame(&rest);
    if (!taken.ok()) continue;
    std::string again;
    AppendFrame(*taken, &again);
    EXPECT_EQ(again, message.substr(0, message.size() - rest.size()));
  }
}

}  // namespace
}  // namespace gtrain::actors
