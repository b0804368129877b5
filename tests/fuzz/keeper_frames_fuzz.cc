// Frames between agent and keeper, both ways: refused, or read back equal; a broken frame ends the stream.
#include "base/check.h"
#include "runtime/keeper/agent_protocol.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

template <typename Variant>
void ReadStream(const std::string& buffer) {
  size_t used = 0;
  Variant message;
  while (keeper::TakeFrame(buffer, &used, &message) == keeper::Take::kMessage) {
    GT_CHECK(used <= buffer.size());
    std::string written;
    keeper::AppendFrame(message, &written);
    size_t again = 0;
    Variant back;
    GT_CHECK(keeper::TakeFrame(written, &again, &back) == keeper::Take::kMessage);
    GT_CHECK(again == written.size() && back == message);
  }
}

template <typename Variant>
std::string Stream(const std::vector<Variant>& messages) {
  std::string stream;
  for (const Variant& message : messages) keeper::AppendFrame(message, &stream);
  return stream;
}

}  // namespace

GT_FUZZ_RUN(keeper_frames) {
  const std::string buffer(bytes);
  ReadStream<keeper::Command>(buffer);
  ReadStream<keeper::Report>(buffer);
}

GT_FUZZ_SEEDS(keeper_frames) {
  using namespace keeper;
  const std::vector<Command> commands = {
      Attach{1, 120000},
      BeginGeneration{3, 2, 1 << 20, "note"},
      StartRank{3, 0, std::string(32, 'a'), {"true", "-x"}, {{"A", "b"}}, "/", "o", "e", "r", "n", {0, 1}, 9},
      EndGeneration{3, End::kStop, 3000, "stopped"},
      Relay{3, 1, "{}"},
      AckRelay{3, 1, 7},
      AckExit{3, 1},
      Notice{3, 119, 10},
      SignalRank{3, 0, 9},
      Exec{5, 3, 0, {"ls"}, 1000},
      Console{6, 3, 0, "s", true, {"cat"}, true, "xterm", 24, 80, 1, "in", true, 2, 3, true},
      Ask{7, 3, 0, "{}", 1000},
      Forget{3},
      Quit{"over"}};
  const std::vector<Report> reports = {
      State{1,
            "job-1",
            77,
            2,
            {{3, "note", {{0, 12, 99, true, true}}, {{3, 1, 13, Cause::kOom, 0, 9, "m", "t"}}}}},
      Started{3, 0, 12, 99},
      Exited{3, 0, 12, Cause::kSignal, 0, 11, "segfault", "tail"},
      Gone{3, true, ""},
      RelayUp{3, 0, 1, R"({"type":"joined"})"},
      Output{3, 0, true, 10, 0, "text"},
      ReportBytes{3, 0, "{\"step\":1}\n"},
      ExecDone{5, true, 0, "out"},
      ConsoleTurn{6, true, "out", 2, "err", 3, true, 4}};
  std::vector<std::string> seeds = {Stream(commands), Stream(reports)};
  for (const Command& command : commands) seeds.push_back(Stream<Command>({command}));
  for (const Report& report : reports) seeds.push_back(Stream<Report>({report}));
  return seeds;
}

}  // namespace gtrain::fuzz
