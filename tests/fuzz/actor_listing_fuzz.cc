// What a process is asked about its actors, and what the command line reads of its answer.
#include <nlohmann/json.hpp>
#include <string>

#include "actors/exec/listing.h"
#include "base/check.h"
#include "launcher/cli/actor_docs.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {

GT_FUZZ_RUN(actor_listing) {
  if (const auto question = actors::ParseListQuestion(bytes); question.ok())
    GT_CHECK(question->limit <= actors::kRowsMax);
  (void)actors::MethodOf(bytes, 2, 1);
  const std::string document = nlohmann::json{{"hostname", bytes}, {"text", bytes}}.dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace);
  for (const std::string& answer : {std::string(bytes), document}) {
    const std::vector<cli::RankActors> ranks = {cli::ParseRankActors(1, answer)};
    const std::string text = cli::ActorsText("job", ranks, 10);
    GT_CHECK(text.find('\x1b') == std::string::npos);
    GT_CHECK(nlohmann::json::accept(cli::JsonOf("job", ranks, 10)));
    for (const cli::ActorDoc& actor : ranks[0].actors) GT_CHECK(!cli::ActorLine(actor).empty());
  }
  (void)cli::ParseActorWord(bytes).ok();
  (void)cli::StackOfThread(bytes, 12);
}

GT_FUZZ_SEEDS(actor_listing) {
  actors::Listing listing;
  listing.classes["Shard"].actors = 2;
  listing.classes["Shard"].times.Count({0}, {40'000});
  actors::ActorFacts actor;
  actor.number = 7;
  actor.type = "Shard";
  actor.name = "ps/0";
  actor.doing = actors::Doing::kRunning;
  actor.method = "Push";
  actor.thread = 12;
  actor.owner = 1;
  listing.actors = {actor, {}};
  listing.left_out = 3;
  return {actors::PrintListing(listing),
          actors::PrintListError("no"),
          R"({"limit":2,"class":"Shard","name":"ps/0","number":7})",
          "(int64); Pull() const -> int64; Push(int64) -> void",
          "3/17",
          "  thread 12 (a) state S\n      futex\n    Thread 1 (Thread 0x1 (LWP 12) \"a\"):\n    #0  f ()\n"};
}

}  // namespace gtrain::fuzz
