#include "runtime/control/cluster_dir.h"

#include <cstdlib>
#include <string>

#include "base/file.h"
#include "base/file_lock.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "net/zmq/key_registry.h"
#include "net/zmq/keys.h"

namespace gtrain::net {
namespace {

const Instant kNow{1'000'000'000};

TEST(ClusterDir, InitTwiceKeepsEverything) {
  std::string dir = TestFolder() + "/a/b";
  EXPECT_EQ(LoadCluster(dir).status().code(), absl::StatusCode::kNotFound);
  absl::StatusOr<ClusterFiles> first = InitCluster(dir);
  ASSERT_TRUE(first.ok()) << first.status();
  absl::StatusOr<ClusterFiles> second = InitCluster(dir);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(first->cluster, second->cluster);
  EXPECT_EQ(first->cluster.value.size(), 32u);
  EXPECT_EQ(first->head.secret_key, second->head.secret_key);
  absl::StatusOr<KeyPair> admin = LoadKeyPair(first->admin_key_path());
  ASSERT_TRUE(admin.ok());
  KeyRegistry registry;
  ASSERT_TRUE(registry.Reload(first->authorized_path()).ok());
  EXPECT_EQ(registry.RoleOfKey(admin->public_key, kNow), Role::kAdmin);
}

TEST(ClusterDir, WithoutAPlaceForItTheErrorSaysWhatIsTrue) {
  const auto with = [](const char* state, const char* home) {
    state == nullptr ? unsetenv("XDG_STATE_HOME") : setenv("XDG_STATE_HOME", state, 1);
    home == nullptr ? unsetenv("HOME") : setenv("HOME", home, 1);
    const absl::StatusOr<std::string> dir = DefaultClusterDir("local");
    return dir.ok() ? *dir : std::string(dir.status().message());
  };
  const char* const was_state = std::getenv("XDG_STATE_HOME");
  const char* const was_home = std::getenv("HOME");
  const std::string state = was_state == nullptr ? "" : was_state, home = was_home == nullptr ? "" : was_home;
  EXPECT_EQ(with("/s", "relative/home"), "/s/gtrain/local");
  EXPECT_EQ(with("s", "/h"), "/h/.local/state/gtrain/local");
  EXPECT_THAT(with(nullptr, nullptr),
              testing::HasSubstr("XDG_STATE_HOME is not set and HOME is not set. Set "));
  EXPECT_THAT(with(nullptr, ""), testing::HasSubstr("XDG_STATE_HOME is not set and HOME is empty. Set "));
  EXPECT_THAT(with("s", "relative/home"),
              testing::HasSubstr("XDG_STATE_HOME is \"s\", which is not an absolute path and HOME is "
                                 "\"relative/home\", which is not an absolute path. Set one of them"));
  with(was_state == nullptr ? nullptr : state.c_str(), was_home == nullptr ? nullptr : home.c_str());
}

TEST(ClusterDir, EndpointComesBack) {
  std::string path = TestFolder() + "/endpoint.json";
  Endpoint e{"127.0.0.1:5", {"127.0.0.1:5", "10.0.0.1:5"}, MakeKeyPair().public_key, ClusterId("c"), 77,
             ThisPlace()};
  const absl::StatusOr<UniqueFd> published = WriteEndpoint(path, e);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(IsLocked(path)) << "its head lives";
  absl::StatusOr<Endpoint> back = ReadEndpoint(path);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->endpoints, e.endpoints);
  EXPECT_EQ(back->pid, 77);
  EXPECT_EQ(back->cluster, e.cluster);
  EXPECT_TRUE(back->IsHere());
  EXPECT_TRUE(back->SeesItsProcesses());
  back->place.processes = "pid:[1]";
  EXPECT_TRUE(back->IsHere());
  EXPECT_FALSE(back->SeesItsProcesses()) << "a container with the network of its host";
  back->place.boot_id = "another";
  EXPECT_FALSE(back->IsHere()) << "another machine's loopback interface";
  ASSERT_TRUE(WriteFileDurable(path, "{\"endpoint\": 5}").ok());
  EXPECT_EQ(ReadEndpoint(path).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace gtrain::net
