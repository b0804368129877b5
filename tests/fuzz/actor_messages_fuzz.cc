// Fuzzes what processes say to each other about calls (I1, B1): whatever comes from a caller or from who is
// called, nothing runs twice or out of order, and what is read is what a writer here would have said.
#include <map>
#include <string>
#include <vector>

#include "actors/exec/incoming.h"
#include "actors/exec/outgoing.h"
#include "actors/plan/frames.h"
#include "actors/plan/members.h"
#include "base/check.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

using actors::CallerId;

constexpr CallerId kCaller{1, 2}, kOwn{3, 4};

// Of each actor the calls that ran must be 1, 2, 3 and so on.
void AsCaller(absl::string_view bytes) {
  std::map<std::pair<CallerId, uint64_t>, uint64_t> ran;
  actors::IncomingCalls::Functions functions;
  std::pair<CallerId, std::pair<uint64_t, uint64_t>> next;
  const auto run = [&] {
    uint64_t& last = ran[{next.first, next.second.first}];
    GT_CHECK(next.second.second == last + 1);
    last = next.second.second;
  };
  functions.lives = [](uint64_t actor) { return actor <= 8; };
  functions.call = [&](uint64_t actor, int /*method*/, std::string& /*arguments*/, absl::Duration timeout,
                       actors::Reply& reply) {
    GT_CHECK(timeout >= absl::ZeroDuration());
    if (actor > 8) reply(absl::NotFoundError("there is none"), "");
    if (actor == 7) return false;  // its mailbox is full
    if (actor <= 8) run();
    return true;
  };
  functions.control = [&](const CallerId& /*caller*/, uint32_t method, const std::string& arguments,
                          absl::Duration /*timeout*/, const actors::Reply& /*reply*/) {
    run();
    if (method == static_cast<uint32_t>(actors::Control::kSpawn)) (void)actors::ParseSpawn(arguments);
    if (method == static_cast<uint32_t>(actors::Control::kEnd)) (void)actors::ParseEnd(arguments);
  };
  functions.reply = [&](const CallerId& caller, uint64_t actor, uint64_t number,
                        bool /*changes*/) -> actors::Reply {
    next = {caller, {actor, number}};
    return [&](const absl::Status& status, absl::string_view /*result*/) {
      if (absl::IsCancelled(status)) run();  // given up: it has had its turn
    };
  };
  actors::IncomingCalls incoming(kOwn, 4, functions);
  std::string hello;
  actors::AppendFrame(actors::HelloFrame{kCaller, kOwn}, &hello);
  GT_CHECK(incoming.OnMessage({"route"}, hello).ok());
  (void)incoming.OnMessage({"route"}, bytes);
  (void)incoming.OnMessage({"route"}, bytes);  // again, as on a new connection
  const auto nowhere = [](const port::Route& /*route*/, absl::string_view message) {
    while (!message.empty()) GT_CHECK(actors::TakeFrame(&message).ok());
    return absl::OkStatus();
  };
  GT_CHECK(!incoming.Flush(nowhere));
}

void AsCalled(absl::string_view bytes) {
  actors::OutgoingCalls outgoing(kCaller, kOwn, "the other");
  actors::HeardReplies heard;
  std::map<int, int> told;
  for (int i = 0; i < 6; ++i) {
    actors::OutgoingCalls::Call call;
    call.actor = static_cast<uint64_t>(i % 2);
    call.deadline = Instant{1'000'000'000};
    call.reply = [&told, i](const absl::Status&, absl::string_view) { ++told[i]; };
    outgoing.Add(std::move(call), heard);
  }
  outgoing.Connected();
  GT_CHECK(!outgoing.NextMessage(Instant{}).empty());
  std::string welcome;
  actors::AppendFrame(actors::WelcomeFrame{kOwn}, &welcome);
  GT_CHECK(outgoing.OnMessage(welcome, Instant{}, heard).ok());
  (void)outgoing.NextMessage(Instant{});
  (void)outgoing.OnMessage(bytes, Instant{}, heard);
  (void)outgoing.OnMessage(bytes, Instant{1'000'000}, heard);
  outgoing.OnTime(Instant{2'000'000'000}, heard);
  for (actors::HeardReply& one : heard) {
    if (one.reply) one.reply(one.status, one.result);
  }
  for (int i = 0; i < 6; ++i) GT_CHECK(told[i] == 1);
}

}  // namespace

GT_FUZZ_RUN(actor_messages) {
  absl::string_view left = bytes;
  while (!left.empty()) {
    const size_t before = left.size();
    const auto frame = actors::TakeFrame(&left);
    if (!frame.ok()) break;
    std::string again;
    actors::AppendFrame(*frame, &again);
    GT_CHECK(again == bytes.substr(bytes.size() - before, before - left.size()));
  }
  AsCaller(bytes);
  AsCalled(bytes);
  if (const auto one = actors::ParseIntroduction(bytes); one.ok())
    GT_CHECK(*actors::ParseIntroduction(actors::PrintIntroduction(*one)) == *one);
  if (const auto one = actors::ParseName(bytes); one.ok()) GT_CHECK(actors::PrintName(*one) == bytes);
  if (const auto one = actors::ParseFind(bytes); one.ok()) GT_CHECK(actors::PrintFind(*one) == bytes);
}

GT_FUZZ_SEEDS(actor_messages) {
  std::string calls, answers;
  for (uint64_t number = 1; number <= 3; ++number) {
    actors::AppendFrame(actors::CallFrame{1, number, number - 1, 0, 1000, false, "arguments"}, &calls);
    actors::AppendFrame(actors::CallFrame{7, number, 0, 0, 1000, number == 2, ""}, &calls);
    actors::AppendFrame(actors::AnswerFrame{1, number, absl::StatusCode::kOk, "result"}, &answers);
    actors::AppendFrame(actors::AnswerFrame{0, number, absl::StatusCode::kNotFound, "why"}, &answers);
    actors::AppendFrame(actors::AgainFrame{1, number, true}, &answers);
  }
  std::string control;
  actors::AppendFrame(
      actors::CallFrame{
          0, 1, 0, 0, 1000, false,
          actors::PrintSpawn(
              {.type = "Class", .signature = "()", .name = "name", .id = 1, .arguments = "arguments"})},
      &control);
  actors::AppendFrame(actors::CallFrame{0, 2, 1, 1, 1000, false, actors::PrintEnd({"why", {1, 2}})},
                      &control);
  return {calls,
          answers,
          control,
          actors::PrintIntroduction({kCaller, "10.0.0.1:4711", "node", true}),
          actors::PrintName({0, "ps/1", "Shard", "(i64)", std::string(56, 'r'), 7}),
          actors::PrintFind({"ps/1", "Shard", "(i64)"})};
}

}  // namespace gtrain::fuzz
