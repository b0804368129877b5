#include "launcher/exec/local_secrets.h"

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/agent/node.h"

namespace gtrain::exec {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class LocalSecretsTest : public ::testing::Test {
 protected:
  void TearDown() override { unsetenv("GTRAIN_TEST_KEY"); }

  static spec::JobSpec Job() {
    spec::JobSpec job;
    job.secrets["KEY"] = {.env = "GTRAIN_TEST_KEY", .file = ""};
    return job;
  }
  // The number of entries left below secrets/.
  int Left() const {
    int count = 0;
    std::error_code none;
    for (const auto& entry : fs::recursive_directory_iterator(dir_ + "/secrets", none))
      count += entry.exists();
    return count;
  }

  const std::string dir_ = TestFolder();
};

TEST_F(LocalSecretsTest, TheValueArrivesByteByByte) {
  for (const std::string& value : {std::string("key"), std::string("two lines\n\n"), std::string(" \t"),
                                   std::string(), std::string(agent::kSecretBytesMax, 's')}) {
    setenv("GTRAIN_TEST_KEY", value.c_str(), 1);
    const auto kept = KeepSecrets(dir_, Job());
    ASSERT_TRUE(kept.ok()) << kept.status();
    const std::string file = kept->spec.secrets.at("KEY").file;
    const auto read = agent::ReadSecret(file);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, value);
    struct stat info {};
    ASSERT_EQ(stat(file.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    ASSERT_EQ(stat(kept->folder.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0700u);
  }
}

TEST_F(LocalSecretsTest, OneThatIsTooLongIsSaidBeforeTheLaunch) {
  setenv("GTRAIN_TEST_KEY", std::string(agent::kSecretBytesMax + 1, 's').c_str(), 1);
  EXPECT_THAT(CheckSecretsAreSet(Job()).message(), HasSubstr("GTRAIN_TEST_KEY has 65537 bytes"));
  EXPECT_FALSE(KeepSecrets(dir_, Job()).ok());
  EXPECT_EQ(Left(), 0);
  spec::JobSpec job;
  job.secrets["KEY"] = {.env = "", .file = dir_ + "/file"};
  EXPECT_TRUE(CheckSecretsAreSet(job).ok()) << "what is not there is the agent's to say";
  ASSERT_TRUE(WriteFileDurable(dir_ + "/file", std::string(agent::kSecretBytesMax + 2, 's')).ok());
  EXPECT_THAT(CheckSecretsAreSet(job).message(), HasSubstr("has 65538 bytes"));
}

TEST_F(LocalSecretsTest, ThoseOfALaunchOnItsWayOutliveAnEndingHead) {
  setenv("GTRAIN_TEST_KEY", "key", 1);
  {
    const auto kept = KeepSecrets(dir_, Job());
    ASSERT_TRUE(kept.ok()) << kept.status();
    DropSecrets(dir_);
    EXPECT_TRUE(fs::exists(kept->spec.secrets.at("KEY").file));
  }
  DropSecrets(dir_);
  EXPECT_EQ(Left(), 0) << "however young they are";
  ASSERT_TRUE(fs::create_directories(dir_ + "/secrets/of-an-older-version"));
  DropSecrets(dir_);
  EXPECT_EQ(Left(), 0);
}

TEST_F(LocalSecretsTest, ThoseOfARefusedLaunchAreRemoved) {
  setenv("GTRAIN_TEST_KEY", "key", 1);
  const auto kept = KeepSecrets(dir_, Job());
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_GT(Left(), 0);
  Remove(*kept);
  EXPECT_EQ(Left(), 0);
}

}  // namespace
}  // namespace gtrain::exec
