// Tests consoles of the keeper: turns that come twice, late and never; clients that do not read; ranks that
// take input.
#include "runtime/host/keeper_test_world.h"

namespace gtrain::host {
namespace {

constexpr size_t kKept = 64 << 10;

class KeeperConsoleTest : public KeeperTest {
 protected:
  void StartRank(bool takes_input = false, bool tty = false,
                 std::vector<std::string> argv = {"sleep", "600"}) {
    Start();
    client_->Send(keeper::BeginGeneration{1, 1, 1 << 20, "note"});
    keeper::StartRank rank = Rank(0, std::move(argv));
    rank.takes_input = takes_input;
    rank.tty = tty;
    client_->Send(rank);
    ASSERT_NE(WaitStarted(0), nullptr);
  }
  keeper::Console Turn(const std::string& session = "s") {
    return {.generation = 1, .session = session, .start = true};
  }
  keeper::ConsoleTurn Ask(keeper::Console turn) {
    turn.id = ++asked_;
    client_->Send(turn);
    const auto* answer =
        Wait<keeper::ConsoleTurn>([this](const keeper::ConsoleTurn& t) { return t.id == asked_; });
    EXPECT_NE(answer, nullptr);
    return answer == nullptr ? keeper::ConsoleTurn() : *answer;
  }
  // Turns until all is heard, each as a client would say it.
  keeper::ConsoleTurn Talk(keeper::Console turn, std::string* out, std::string* err = nullptr) {
    const std::string input = std::move(turn.input);
    const uint64_t begin = turn.input_offset;
    const bool ends = turn.input_end;
    keeper::ConsoleTurn answer;
    do {
      turn.input = input.substr(turn.input_offset - begin, kKept);
      turn.input_end = ends && turn.input_offset - begin + turn.input.size() == input.size();
      answer = Ask(turn);
      if (!answer.ok) break;
      turn.input_offset = answer.taken;
      turn.out_seen += answer.out.size();
      turn.err_seen += answer.err.size();
      out->append(answer.out);
      if (err != nullptr) err->append(answer.err);
      turn.start = false;
    } while (!answer.over);
    return answer;
  }

  uint64_t asked_ = 0;
};

TEST_F(KeeperConsoleTest, InputGoesInAndOutputComesApart) {
  StartRank();
  keeper::Console turn = Turn();
  turn.argv = {"bash", "-c", "cat; echo g=$GTRAIN_GENERATION >&2; exit 5"};
  turn.input = std::string(300'000, 'x');
  turn.input_end = true;
  std::string out, err;
  const keeper::ConsoleTurn last = Talk(turn, &out, &err);
  EXPECT_TRUE(out == std::string(300'000, 'x')) << out.size();
  EXPECT_EQ(err, "g=1\n");
  EXPECT_EQ(last.status, 5);
  EXPECT_EQ(last.taken, 300'000u);
}

TEST_F(KeeperConsoleTest, TurnsThatComeTwiceChangeNothing) {
  StartRank();
  keeper::Console turn = Turn();
  turn.argv = {"bash", "-c", "echo started >> starts; while read w; do echo \"<$w>\"; done"};
  turn.input = "one\n";
  keeper::ConsoleTurn answer = Ask(turn);
  std::string out = answer.out;
  EXPECT_EQ(answer.taken, 4u);
  while (out.empty()) out = Ask(turn).out;  // its answer was lost
  EXPECT_EQ(Ask(turn).out, "<one>\n") << "it was not said that it was seen";
  turn.input = "one\ntwo\n";
  turn.out_seen = 6;
  turn.start = false;
  do {
    answer = Ask(turn);
  } while (answer.out.empty());
  EXPECT_EQ(answer.out, "<two>\n");
  EXPECT_EQ(answer.out_at, 6u);
  EXPECT_EQ(answer.taken, 8u);
  turn.input_offset = 8;
  turn.input = "";
  turn.input_end = true;
  turn.out_seen = 12;
  EXPECT_EQ(Talk(turn, &out).status, 0);
  EXPECT_EQ(Slurp(Path("starts")), "started\n");
  turn.hang_up = true;
  EXPECT_TRUE(Ask(turn).over);
  turn.hang_up = false;
  turn.start = true;
  EXPECT_THAT(Ask(turn).out, HasSubstr("the session is over")) << "a late turn begins it anew";
  EXPECT_EQ(Slurp(Path("starts")), "started\n");
}

TEST_F(KeeperConsoleTest, WhoDoesNotReadMakesTheOtherSideWait) {
  StartRank();
  keeper::Console turn = Turn();
  turn.argv = {"bash", "-c", "head -c 1000000 /dev/zero; echo > wrote; cat > /dev/null"};
  EXPECT_LE(Ask(turn).out.size(), kKept);
  ASSERT_TRUE(Until([&] { return Ask(turn).out.size() == kKept; }));
  EXPECT_FALSE(fs::exists(Path("wrote")));
  // It reads no input meanwhile: what a pipe and the keeper hold is taken, not more.
  std::string input(kKept, 'i');
  turn.input = input;
  for (int i = 0; i < 6; ++i) turn.input_offset = Ask(turn).taken;
  EXPECT_LE(turn.input_offset, 3 * kKept);
  turn.input.clear();
  turn.input_end = true;
  std::string out;
  EXPECT_EQ(Talk(turn, &out).status, 0);
}

TEST_F(KeeperConsoleTest, WhoHangsUpEndsAProgramThatDoesNotListen) {
  StartRank();
  keeper::Console turn = Turn();
  turn.argv = {"bash", "-c", "trap '' HUP; echo $$ > pid; while true; do sleep 1; done"};
  (void)Ask(turn);
  const int64_t pid = PidIn("pid");
  ASSERT_GT(pid, 0);
  turn.hang_up = true;
  EXPECT_TRUE(Ask(turn).ok);
  EXPECT_TRUE(Until([&] {
    Pump();
    return !Alive(pid);
  }));
}

TEST_F(KeeperConsoleTest, ATerminalHasASizeAndCtrlC) {
  StartRank();
  keeper::Console turn = Turn();
  turn.argv = {"bash", "-c", "trap 'stty size; exit 3' INT; tty; echo $TERM; while true; do sleep 0.1; done"};
  turn.terminal = true;
  turn.term = "vt220";
  turn.rows = 40;
  turn.columns = 120;
  std::string out;
  while (out.find("vt220\r\n") == std::string::npos) {
    const keeper::ConsoleTurn answer = Ask(turn);
    ASSERT_TRUE(answer.ok && !answer.over) << answer.out;
    turn.out_seen += answer.out.size();
    out += answer.out;
  }
  EXPECT_THAT(out, HasSubstr("/dev/pts/"));
  turn.input = "\x03";
  EXPECT_EQ(Talk(turn, &out).status, 3);
  EXPECT_THAT(out, HasSubstr("40 120\r\n"));
}

TEST_F(KeeperConsoleTest, ARankThatTakesInputHasOneClient) {
  StartRank(/*takes_input=*/true, /*tty=*/false, {"bash", "-c", "cat; exit 6"});
  keeper::Console turn = Turn();
  turn.input = "words\n";
  EXPECT_EQ(Ask(turn).taken, 6u);
  EXPECT_THAT(Ask(Turn("other")).out, HasSubstr("another client gives rank 0 its input"));
  turn.input_offset = 6;
  turn.input = "";
  turn.input_end = true;
  std::string out;
  EXPECT_EQ(Talk(turn, &out).status, 6);
  EXPECT_EQ(out, "") << "it is in the log";
  const auto* exit = WaitExit(0);
  ASSERT_NE(exit, nullptr);
  EXPECT_EQ(exit->tail, "words\n");
}

TEST_F(KeeperConsoleTest, ARankWithoutInputSaysSo) {
  StartRank();
  EXPECT_THAT(Ask(Turn()).out, HasSubstr("rank 0 takes no input: it was launched without -i"));
  keeper::Console late = Turn("late");
  late.start = false;
  EXPECT_THAT(Ask(late).out, HasSubstr("is not known here"));
}

TEST_F(KeeperConsoleTest, ARankInATerminalIsSeenAndLogged) {
  StartRank(
      /*takes_input=*/true, /*tty=*/true,
      {"bash", "-c", "read -p 'name? ' name; echo \"hello $name\" >&2; test -t 0 -a -t 1 -a -t 2; exit $?"});
  keeper::Console turn = Turn();
  std::string out;
  while (out.find("name? ") == std::string::npos) {
    const keeper::ConsoleTurn answer = Ask(turn);
    ASSERT_TRUE(answer.ok && !answer.over) << answer.out;
    out += answer.out;
    turn.out_seen = answer.out_at + answer.out.size();
  }
  turn.input = "ann\n";
  EXPECT_EQ(Talk(turn, &out).status, 0);
  EXPECT_THAT(out, HasSubstr("hello ann\r\n"));
  ASSERT_NE(WaitGone(), nullptr);
  EXPECT_THAT(Slurp(OutPath(0)), HasSubstr("hello ann\r\n"));
}

}  // namespace
}  // namespace gtrain::host
