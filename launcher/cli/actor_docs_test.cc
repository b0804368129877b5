// Tests what is read of actors, and shown.
#include "launcher/cli/actor_docs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"

namespace gtrain::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

// As a process of a user's program says it (actors/exec/listing.cc), in the head's document.
std::string HeadAnswer(const json& listing, const std::string& hostname = "gpu-7") {
  return json{{"generation", 1}, {"rank", 0}, {"hostname", hostname}, {"text", listing.dump()}}.dump();
}
json Row(uint64_t number, uint64_t waiting, const std::string& state = "idle") {
  return {{"number", number}, {"class", "Shard"}, {"state", state}, {"waiting", waiting},
          {"answered", 5},    {"p50_us", 40},     {"p99_us", 2500}};
}
json Listing(uint64_t count, std::vector<json> rows) {
  return {{"count", count},
          {"classes", {{{"class", "Shard"}, {"actors", count}, {"waiting", 3}, {"answered", 9}}}},
          {"actors", std::move(rows)},
          {"left_out", 0}};
}

TEST(ActorDocs, AreReadAndTheBusiestComeFirst) {
  json running = Row(7, 2, "running");
  running.update({{"method", "Push"},
                  {"for_us", 12'000'000},
                  {"thread", 4711},
                  {"name", "ps/0"},
                  {"kept", true},
                  {"owner", 3},
                  {"restarts", 1},
                  {"per_second", 2.5},
                  {"waiting_bytes", 2048}});
  const std::vector<RankActors> ranks = {ParseRankActors(0, HeadAnswer(Listing(2, {Row(1, 1), Row(2, 0)}))),
                                         ParseRankActors(1, HeadAnswer(Listing(1, {running})))};
  const std::vector<ActorDoc> busiest = BusiestOf(ranks, 2);
  ASSERT_EQ(busiest.size(), 2u);
  EXPECT_EQ(busiest[0].rank, 1);
  EXPECT_EQ(busiest[0].thread, 4711);
  EXPECT_EQ(busiest[1].number, 1u);
  EXPECT_EQ(ActorLine(busiest[0]), "1/7 (Shard ps/0) on gpu-7: running Push for 12.0s");
  const std::string text = ActorsText("llm-7", ranks, 2);
  EXPECT_THAT(text, HasSubstr("Shard                           3        0        0        6"));
  EXPECT_THAT(text, HasSubstr("40us   2.5ms"));
  EXPECT_THAT(
      text, HasSubstr("rank 0 on gpu-7: 2 actors (Shard 2), 0 run, 0 await, 3 calls wait; 1 are not listed"));
  EXPECT_THAT(text, Not(HasSubstr("rank 1 on"))) << "all of it is shown";
  const json document = json::parse(JsonOf("llm-7", ranks, 2));
  EXPECT_EQ(document["left_out"], 1);
  EXPECT_EQ(document["actors"][0]["name"], "ps/0");
  EXPECT_EQ(document["actors"][0]["for_seconds"], 12.0);
  EXPECT_EQ(document["actors"][0]["owner"], 3);
  EXPECT_EQ(document["actors"][1]["owner"], nullptr);
  EXPECT_EQ(document["classes"][0]["actors"], 3);
}

TEST(ActorDocs, WhoSaysNothingIsNamedBesideTheOthers) {
  std::vector<RankActors> ranks = {ParseRankActors(0, HeadAnswer(Listing(1, {Row(1, 0)})))};
  ranks.push_back(ParseRankActors(3, absl::UnavailableError("rank 3 does not answer within 5 s")));
  ranks.push_back(ParseRankActors(4, absl::UnavailableError("the agent on n did not answer in 10s")));
  const std::string text = ActorsText("llm-7", ranks, 50);
  EXPECT_THAT(text, HasSubstr("0/1"));
  EXPECT_THAT(text, HasSubstr("\nrank 3 does not answer within 5 s\n"));
  EXPECT_THAT(text, HasSubstr("\nrank 4: the agent on n did not answer in 10s\n"));
  EXPECT_EQ(json::parse(JsonOf("llm-7", ranks, 50))["ranks"][1]["error"],
            "rank 3 does not answer within 5 s");
}

TEST(ActorDocs, AJobWithoutActorsIsASentence) {
  const RankActors none = ParseRankActors(0, R"({"hostname":"h","text":""})");
  EXPECT_FALSE(none.has_actors);
  EXPECT_THAT(ActorsText("llm-7", {none}, 50), HasSubstr("job llm-7 has no actors: none of its ranks"));
  EXPECT_THAT(ActorsText("llm-7", {ParseRankActors(0, HeadAnswer(Listing(0, {})))}, 50),
              Not(HasSubstr("has no actors")));
}

TEST(ActorDocs, RanksAreNotAThousandLines_B1) {
  std::vector<RankActors> ranks;
  for (int rank = 0; rank < 1000; ++rank)
    ranks.push_back(ParseRankActors(rank, HeadAnswer(Listing(100, {Row(1, 0)}))));
  const std::string text = ActorsText("llm-7", ranks, 10);
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 100);
  EXPECT_THAT(text, HasSubstr("(and 936 more such ranks"));
}

// Fault P9; and whatever a process says, no other byte of it matters.
TEST(ActorDocs, NothingOfAProcessIsBelieved_P9) {
  json row = Row(1, 0, "\x1b[2J");
  row.update({{"class", "\x1b]0;x"},
              {"name", 7},
              {"waiting", -1},
              {"per_second", 1e308},
              {"p50_us", UINT64_MAX},
              {"for_us", UINT64_MAX},
              {"thread", UINT64_MAX},
              {"owner", "me"}});
  const std::string text =
      ActorsText("j", {ParseRankActors(0, HeadAnswer(Listing(UINT64_MAX, {row, 7}), "\x1b[31m"))}, 5);
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
  for (const char* bad :
       {"", "{", "[]", R"({"text":"["})", R"({"text":"[]"})", R"({"text":7})",
        R"({"text":"{\"classes\":7,\"actors\":{\"a\":1}}"})", R"({"text":"{\"error\":7}"})"}) {
    const RankActors said = ParseRankActors(0, std::string(bad));
    EXPECT_TRUE(said.actors.empty()) << bad;
    EXPECT_FALSE(JsonOf("j", {said}, 1).empty());
  }
}

TEST(ActorWord, IsAnAddressOrAName) {
  EXPECT_EQ(*ParseActorWord("3/17")->rank, 3);
  EXPECT_EQ(ParseActorWord("3/17")->number, 17u);
  for (const char* name : {"ps/0", "3", "3/17/1", "3/", "99999999999999/1"}) {
    const auto word = ParseActorWord(name);
    ASSERT_TRUE(word.ok());
    EXPECT_FALSE(word->rank);
    EXPECT_EQ(word->name, name);
  }
  EXPECT_FALSE(ParseActorWord("").ok());
  EXPECT_FALSE(ParseActorWord(std::string(256, 'x')).ok());
  EXPECT_EQ(json::parse(QuestionFor(*ParseActorWord("3/17"))), json::parse(R"({"limit":1,"number":17})"));
  EXPECT_EQ(json::parse(QuestionFor(*ParseActorWord("ps/0"))), json::parse(R"({"limit":1,"name":"ps/0"})"));
  EXPECT_EQ(json::parse(QuestionFor("Shard", 9)), json::parse(R"({"limit":9,"class":"Shard"})"));
}

TEST(StackOfThread, IsTakenFromTheKernelsAndEitherDebuggersPart) {
  const std::string gdb = R"(process 12: ./program
  thread 12 (program) state S, waits in futex_wait_queue, system call 202 (futex)
  thread 123 (program) state S, waits in hrtimer_nanosleep, system call 230 (clock_nanosleep)
      hrtimer_nanosleep
  thread 1234 (program) state R
  native frames, by /usr/bin/gdb:
    Thread 3 (Thread 0x7f12 (LWP 1234) "program"):
    #0  other () at a.cc:1
    Thread 2 (Thread 0x7f12 (LWP 123) "program"):
    #0  clock_nanosleep () from libc.so
    #1  Shard::Push (this=...) at b.cc:7
        at a continued line
    Thread 1 (LWP 12):
    #0  main ()
)";
  EXPECT_EQ(StackOfThread(gdb, 123),
            R"(  thread 123 (program) state S, waits in hrtimer_nanosleep, system call 230 (clock_nanosleep)
      hrtimer_nanosleep
    Thread 2 (Thread 0x7f12 (LWP 123) "program"):
    #0  clock_nanosleep () from libc.so
    #1  Shard::Push (this=...) at b.cc:7
        at a continued line
)");
  EXPECT_THAT(StackOfThread(gdb, 12), HasSubstr("main ()"));
  EXPECT_EQ(StackOfThread(gdb, 1), "");
  const std::string eu = "  native frames, by eu-stack:\n    TID 5:\n    #0 a\n    TID 55:\n    #0 b\n";
  EXPECT_EQ(StackOfThread(eu, 5), "    TID 5:\n    #0 a\n");
}

}  // namespace
}  // namespace gtrain::cli
