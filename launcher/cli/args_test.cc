#include "launcher/cli/args.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "base/path.h"
#include "base/test_folder.h"
#include "launcher/cli/job_input.h"
#include "launcher/cli/target.h"
#include "launcher/cli/verbs.h"

namespace gtrain::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<Flag> Flags() {
  return {{"ranks", 'n', "N", "how many"},
          {"set", '\0', "K=V", "set", true},
          {"detach", 'd', "", "go"},
          {"json", '\0', "", "j"}};
}

TEST(ParseArgs, ReadsEveryForm) {
  const auto args = ParseArgs(
      {"-n", "4", "--set", "a=b", "--set=c=d", "job.yaml", "-d", "--", "cmd", "--json", "-n"}, Flags());
  ASSERT_TRUE(args.ok()) << args.status();
  EXPECT_EQ(args->Get("ranks"), "4");
  EXPECT_THAT(args->All("set"), ElementsAre("a=b", "c=d"));
  EXPECT_TRUE(args->Has("detach"));
  EXPECT_FALSE(args->Has("json"));
  EXPECT_THAT(args->words, ElementsAre("job.yaml"));
  EXPECT_THAT(*args->rest, ElementsAre("cmd", "--json", "-n"));
  EXPECT_EQ(ParseArgs({"-n8"}, Flags())->Get("ranks"), "8");
  EXPECT_EQ(ParseArgs({"-n", "-1"}, Flags())->Get("ranks"), "-1");
}

TEST(ParseArgs, NamesWhatIsWrong) {
  const auto error = [](const std::vector<std::string>& argv) {
    return std::string(ParseArgs(argv, Flags()).status().message());
  };
  EXPECT_THAT(error({"--rank", "4"}), HasSubstr("did you mean --ranks?"));
  EXPECT_THAT(error({"-np", "4"}), HasSubstr("did you mean -n?"));
  EXPECT_THAT(error({"-x"}), HasSubstr("unknown flag '-x'"));
  EXPECT_THAT(error({"-n"}), HasSubstr("needs a value"));
  EXPECT_THAT(error({"-n", "--", "x"}), HasSubstr("needs a value"));
  EXPECT_THAT(error({"-n", "1", "-n", "2"}), HasSubstr("given twice"));
  EXPECT_THAT(error({"--json=x"}), HasSubstr("takes no value"));
  EXPECT_THAT(error(std::vector<std::string>(20'000, "a")), HasSubstr("more than 10000"));
}

TEST(Args, IntChecksTheRange) {
  const auto read = [](const char* text) { return ParseArgs({"-n", text}, Flags())->Int("ranks", 1, 100); };
  EXPECT_EQ(**read("7"), 7);
  for (const char* bad : {"0", "101", "-1", "1e3", "x", "", "99999999999999999999", "-"})
    EXPECT_FALSE(read(bad).ok()) << bad;
  EXPECT_EQ(*ParseArgs({}, Flags())->Int("ranks", 1, 100), std::nullopt);
}

// `gtrain bench link --nodes 4 -n 4` of its own help was an unknown flag of the job.
TEST(RanksFlags, SpreadsThemOverNodes) {
  const auto job = [](int64_t ranks, std::optional<int64_t> nodes) {
    std::vector<std::string> words = *RanksFlags(ranks, nodes);
    words.insert(words.end(), {"--", "true"});
    return *ReadJob(*ParseArgs(words, JobFlags()));
  };
  EXPECT_EQ(job(4, std::nullopt).spec.ranks->min, 4);
  const spec::JobSpec spread = job(8, 4).spec;
  EXPECT_FALSE(spread.ranks);
  EXPECT_EQ(spread.nodes->min, 4);
  EXPECT_EQ(spread.nodes->max, 4);
  EXPECT_EQ(spread.ranks_per_node, 2);
  for (const int64_t ranks : {2, 6})
    EXPECT_TRUE(absl::IsInvalidArgument(RanksFlags(ranks, 4).status())) << ranks;
}

TEST(RanksFlags, OverARangeOfTheJobFileSayThatTheyEndIt) {
  const auto note = [](const std::string& ranks, std::vector<std::string> flags) {
    const std::string path = JoinPath(TestFolder(), "job.yaml");
    std::ofstream(path) << "run: sleep 1\nranks: " << ranks << "\n";
    flags.push_back(path);
    return ReadJob(*ParseArgs(flags, JobFlags()))->note;
  };
  EXPECT_EQ(note("{min: 1, max: 8}", {"-n", "3"}),
            "-n 3 takes the place of `ranks: {min: 1, max: 8}` of the job file: this job never has another "
            "number. To keep the range launch it without -n, then: gtrain scale -n 3 JOB");
  EXPECT_EQ(note("{min: 1, max: 8}", {}), "");
  EXPECT_EQ(note("{min: 1, max: 8}", {"--set", "ranks=3"}), "") << "which names the key";
  EXPECT_EQ(note("3", {"-n", "3"}), "");
  EXPECT_EQ(ReadJob(*ParseArgs({"-n", "3", "--", "true"}, JobFlags()))->note, "");
}

// A head dropped a message with such a word in it, and its client waited 20 s for nothing.
TEST(CheckJobWord, RefusesWhatIsNoIdForEveryVerbThatTakesAJob) {
  std::set<std::string> checked;
  for (const Verb& verb : AllVerbs()) {
    const auto check = [&](const std::string& word) {
      const auto args = ParseArgs({"--", "x"}, verb.flags);
      Args with = *args;
      with.words = verb.actions;
      if (!with.words.empty()) with.words.resize(1);
      with.words.push_back(word);
      return CheckJobWord(verb, with);
    };
    if (check("a b").ok()) continue;
    checked.insert(verb.name);
    for (const std::string& bad : {std::string("."), std::string(".."), std::string("%s"), std::string("-x"),
                                   std::string("\xff"), std::string(300, 'x')}) {
      EXPECT_TRUE(absl::IsInvalidArgument(check(bad))) << verb.name << " " << bad;
    }
    EXPECT_THAT(std::string(check("a b").message()),
                AllOf(HasSubstr("'a b' is not a job id"), HasSubstr("`gtrain status --all` lists them")));
    for (const char* good : {"", "train", "train-3", "./x", "gtrain-runs/train-3-5c3e90ab"})
      EXPECT_TRUE(check(good).ok()) << verb.name << " " << good;
  }
  EXPECT_THAT(checked, ElementsAre("actors", "attach", "chaos", "data", "exec", "logs", "report", "scale",
                                   "stack", "status", "stop", "why"));
  EXPECT_THAT(std::string(CheckId("a b", "token", "gtrain token ls").message()),
              AllOf(HasSubstr("'a b' is not a token id"), HasSubstr("`gtrain token ls` lists them")));
}

}  // namespace
}  // namespace gtrain::cli
