// Folders for tests, the only way in which a test makes one: so nothing is left on the machine, and two runs
// never share a name.
#ifndef GTRAIN_BASE_TEST_FOLDER_H_
#define GTRAIN_BASE_TEST_FOLDER_H_

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "base/check.h"

namespace gtrain {
namespace test_folder_internal {

class Remover : public testing::EmptyTestEventListener {
 public:
  void Add(const std::string& folder) {
    const bool in_test = testing::UnitTest::GetInstance()->current_test_info() != nullptr;
    (in_test ? of_test_ : of_program_).push_back(folder);
  }
  void OnTestEnd(const testing::TestInfo& /*info*/) override { Remove(&of_test_); }
  void OnTestProgramEnd(const testing::UnitTest& /*program*/) override { Remove(&of_program_); }

 private:
  void Remove(std::vector<std::string>* folders) const {
    if (getpid() != owner_) return;
    std::error_code ignored;
    for (const std::string& folder : *folders) std::filesystem::remove_all(folder, ignored);
    folders->clear();
  }

  const pid_t owner_ = getpid();
  std::vector<std::string> of_test_, of_program_;
};

}  // namespace test_folder_internal

// The path, without links, of a fresh and empty folder of mode 0700. It is removed with all that is in it
// when the running test has ended (behind its TearDown), or with the program where no test runs. Call it from
// the thread that runs the tests.
inline std::string TestFolder() {
  static auto* const remover = [] {
    auto* made = new test_folder_internal::Remover;
    testing::UnitTest::GetInstance()->listeners().Append(made);  // which owns it
    return made;
  }();
  std::string path =
      std::filesystem::canonical(std::filesystem::temp_directory_path()) / "gtrain-test-XXXXXX";
  GT_CHECK(mkdtemp(path.data()) != nullptr);
  remover->Add(path);
  return path;
}

}  // namespace gtrain

#endif  // GTRAIN_BASE_TEST_FOLDER_H_
