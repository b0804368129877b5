// Runs every tests/golden/*.txt: commands, a line "----", the whole log they cause, an empty line; again.
// GTRAIN_UPDATE_GOLDEN=1 writes the logs anew; read the difference before you commit it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/golden/trace_world.h"

namespace gtrain::golden {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> Traces() {
  const char* source = std::getenv("GTRAIN_SOURCE_DIR");
  std::vector<fs::path> paths;
  for (const auto& entry :
       fs::directory_iterator(fs::path(source == nullptr ? "." : source) / "tests" / "golden")) {
    if (entry.path().extension() == ".txt" && entry.path().filename() != "CMakeLists.txt")
      paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string ReadAll(const fs::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// The file with each block's expectation replaced by what the commands really cause.
std::string Replay(const std::string& text) {
  TraceWorld world;
  std::string out, commands;
  bool in_log = false;
  const auto finish = [&] {
    for (const Command& command : ParseCommands(commands)) out += world.Run(command);
    commands.clear();
  };
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    if (in_log) {
      if (!line.empty()) continue;
      in_log = false;
      if (i + 1 < lines.size()) out += "\n";
    } else if (line == "----") {
      out += "----\n";
      finish();
      in_log = true;
    } else if (i + 1 < lines.size()) {
      out += line + "\n";
      if (line.empty() || line[0] != '#') commands += line + "\n";
    }
  }
  return out;
}

TEST(Golden, EveryTraceIsAsWritten) {
  const bool update = std::getenv("GTRAIN_UPDATE_GOLDEN") != nullptr;
  const std::vector<fs::path> traces = Traces();
  ASSERT_GE(traces.size(), 6u);
  for (const fs::path& path : traces) {
    SCOPED_TRACE(path.string());
    const std::string written = ReadAll(path);
    const std::string real = Replay(written);
    if (update && real != written) {
      std::ofstream(path) << real;
      continue;
    }
    EXPECT_EQ(real, written) << "if the new log is right: GTRAIN_UPDATE_GOLDEN=1 build/tests/golden_test";
  }
}

}  // namespace
}  // namespace gtrain::golden
