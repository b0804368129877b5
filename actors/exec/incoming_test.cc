#include "actors/exec/incoming.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace gtrain::actors {
namespace {

using ::testing::ElementsAre;

constexpr CallerId kOwn{1, 1}, kCaller{2, 2};
constexpr uint64_t kActor = 7;

class IncomingTest : public ::testing::Test {
 protected:
  IncomingTest() : calls_(kOwn, 16, Functions()) { Send(HelloFrame{kCaller, kOwn}); }

  IncomingCalls::Functions Functions() {
    IncomingCalls::Functions functions;
    functions.lives = [](uint64_t) { return true; };
    functions.constant = [](uint64_t, int) { return false; };
    functions.call = [](uint64_t, int, std::string&, absl::Duration, Reply& reply) {
      reply(absl::OkStatus(), "done");
      return true;
    };
    functions.reply = [this](const CallerId& caller, uint64_t actor, uint64_t number, bool changes) {
      return [this, caller, actor, number, changes](const absl::Status& status, absl::string_view result) {
        calls_.Done(caller, actor, number, changes, status, result);
      };
    };
    return functions;
  }
  void Send(const Frame& frame) {
    std::string message;
    AppendFrame(frame, &message);
    EXPECT_TRUE(calls_.OnMessage({"route"}, message).ok());
  }
  // The numbers of the calls that are answered now.
  std::vector<uint64_t> Answered() {
    std::vector<uint64_t> numbers;
    calls_.Flush([&](const port::Route&, absl::string_view message) {
      while (!message.empty()) {
        const Frame frame = *TakeFrame(&message);
        if (const auto* answer = std::get_if<AnswerFrame>(&frame)) numbers.push_back(answer->number);
      }
      return absl::OkStatus();
    });
    return numbers;
  }

  IncomingCalls calls_;
};

// No save follows it, as it changes nothing; and whoever has one call under way at a time waits for its
// answer.
TEST_F(IncomingTest, ACallThatWasGivenUpIsAnsweredWithoutASave) {
  calls_.Keep(kActor, kCaller, 1, {}, /*detached=*/false);
  CallFrame call;
  call.actor = kActor;
  call.number = 1;
  call.given_up = true;
  Send(call);
  EXPECT_THAT(Answered(), ElementsAre(1));
  call.number = 2;
  call.given_up = false;
  Send(call);
  EXPECT_THAT(Answered(), ElementsAre()) << "its change is not kept yet";
}

}  // namespace
}  // namespace gtrain::actors
