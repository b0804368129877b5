// A test program runs its tests again as an ordinary user.
#pragma once
#include <stdio.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/test_folder.h"

namespace gtrain {

struct RunAsNobody {
  int status = 0;  // as waitpid gives it
  std::string output;
};

// Runs this program as `nobody` with the tests that `filter` names. The build may lie in a folder that nobody
// cannot read, so `programs` are copied with it, into the folder bin of another build folder. For root alone.
inline RunAsNobody RunTestsAsNobody(const std::vector<std::string>& programs, const std::string& filter) {
  namespace fs = std::filesystem;
  constexpr uid_t kNobody = 65534;
  const std::string area = TestFolder();
  fs::create_directories(area + "/bin");
  fs::create_directories(area + "/tmp");
  fs::copy_file(fs::read_symlink("/proc/self/exe"), area + "/test");
  for (const std::string& program : programs)
    fs::copy_file(program, area + "/bin/" + fs::path(program).filename().string());
  for (const auto& entry : fs::recursive_directory_iterator(area))
    GT_CHECK(chown(entry.path().c_str(), kNobody, kNobody) == 0);
  GT_CHECK(chown(area.c_str(), kNobody, kNobody) == 0);
  const std::string command = absl::StrCat("cd ", area, " && GTRAIN_BUILD_DIR=", area, " TMPDIR=", area,
                                           "/tmp setpriv --reuid ", kNobody, " --regid ", kNobody,
                                           " --clear-groups ./test --gtest_filter='", filter, "' 2>&1");
  FILE* pipe = popen(command.c_str(), "r");
  GT_CHECK(pipe != nullptr);
  RunAsNobody run;
  char buffer[4096];
  while (const size_t n = fread(buffer, 1, sizeof(buffer), pipe)) run.output.append(buffer, n);
  run.status = pclose(pipe);
  return run;
}

}  // namespace gtrain
