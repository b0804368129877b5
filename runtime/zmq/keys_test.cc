#include "runtime/zmq/keys.h"

#include <sys/stat.h>

#include <cstdlib>

#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/zmq/cluster_dir.h"
#include "runtime/zmq/join_tokens.h"
#include "runtime/zmq/key_registry.h"

namespace gtrain::net {
namespace {

using ::testing::HasSubstr;

const Instant kNow{1'000'000'000};

TEST(Keys, IdIsSixteenHexDigitsOfTheKey) {
  KeyPair a = MakeKeyPair(), b = MakeKeyPair();
  EXPECT_EQ(KeyId(a.public_key).size(), 16u);
  EXPECT_EQ(KeyId(a.public_key), KeyId(a.public_key));
  EXPECT_NE(KeyId(a.public_key), KeyId(b.public_key));
  EXPECT_EQ(KeyPairOfSecret(a.secret_key)->public_key, a.public_key);
  EXPECT_FALSE(ValidKey(""));
  EXPECT_FALSE(ValidKey(std::string(40, ' ')));
  EXPECT_FALSE(ValidKey(a.public_key + "x"));
}

TEST(Keys, FilesAreCheckedAsSshdDoes) {
  std::string path = TestFolder() + "/key";
  KeyPair keys = MakeKeyPair();
  ASSERT_TRUE(SaveKeyPair(path, keys).ok());
  ASSERT_TRUE(LoadKeyPair(path).ok());
  EXPECT_EQ(LoadKeyPair(path)->secret_key, keys.secret_key);
  for (int mode : {0640, 0604, 0660, 0644}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    absl::Status status = LoadKeyPair(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
    EXPECT_THAT(std::string(status.message()), HasSubstr("chmod 0600"));
    EXPECT_THAT(std::string(status.message()), testing::Not(HasSubstr(keys.secret_key)));
  }
}

TEST(Keys, MixedHalvesAreRefused) {
  std::string path = TestFolder() + "/key";
  ASSERT_TRUE(SaveKeyPair(path, {MakeKeyPair().public_key, MakeKeyPair().secret_key}).ok());
  EXPECT_EQ(LoadKeyPair(path).status().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(WriteFileDurable(path, "hello", 0600).ok());
  EXPECT_EQ(LoadKeyPair(path).status().code(), absl::StatusCode::kDataLoss);
}

TEST(Keys, JoinTokenComesBackAndNeedsNoQuoting) {
  JoinToken token{"node-1:7070", MakeKeyPair().public_key, MakeKeyPair().secret_key};
  std::string text = PrintJoinToken(token);
  EXPECT_EQ(text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-.:,"), std::string::npos) << text;
  absl::StatusOr<JoinToken> back = ParseJoinToken(text);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->endpoint, token.endpoint);
  EXPECT_EQ(back->head_public_key, token.head_public_key);
  EXPECT_EQ(back->secret_key, token.secret_key);
  for (const char* bad : {"", "host:1", "host:1,abc,def", "host,,"})
    EXPECT_FALSE(ParseJoinToken(bad).ok()) << bad;
}

TEST(AllowedKeys, FileFormat) {
  std::string key = MakeKeyPair().public_key;
  auto keys = ParseAllowedKeys("# who\n\nadmin " + key + " me at home\nnode " + key + "\n");
  ASSERT_TRUE(keys.ok()) << keys.status();
  ASSERT_EQ(keys->size(), 2u);
  EXPECT_EQ((*keys)[0].comment, "me at home");
  EXPECT_EQ((*keys)[1].role, core::Role::kNode);
  EXPECT_THAT(std::string(ParseAllowedKeys("\nroot " + key).status().message()), HasSubstr("line 2"));
  EXPECT_THAT(std::string(ParseAllowedKeys("user abc").status().message()), HasSubstr("line 1"));
  EXPECT_FALSE(ParseAllowedKeys("join " + key).ok()) << "join keys are never written down";
}

TEST(KeyRegistry, DefaultIsDeny) {
  KeyRegistry registry;
  EXPECT_EQ(registry.RoleOfKey(MakeKeyPair().public_key, kNow), std::nullopt);
  EXPECT_EQ(registry.RoleOfKey("rubbish", kNow), std::nullopt);
  EXPECT_EQ(registry.RoleOfKeyId("", kNow), std::nullopt);
}

TEST(KeyRegistry, ReloadFollowsTheFileAndKeepsTheOldKeysOnErrors) {
  std::string path = TestFolder() + "/authorized";
  KeyPair a = MakeKeyPair(), b = MakeKeyPair();
  KeyRegistry registry;
  ASSERT_TRUE(AddAllowedKey(path, {core::Role::kAdmin, a.public_key, "a"}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), core::Role::kAdmin);
  EXPECT_EQ(registry.RoleOfKey(b.public_key, kNow), std::nullopt);

  ASSERT_TRUE(AddAllowedKey(path, {core::Role::kNode, b.public_key, "b\nadmin x"}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(b.public_key, kNow), core::Role::kNode);

  // H3: every verb of the local cluster asks for the same again, also on a full disk.
  struct stat before, after;
  ASSERT_EQ(stat(path.c_str(), &before), 0);
  ASSERT_TRUE(AddAllowedKey(path, {core::Role::kNode, b.public_key, "b\nadmin x"}).ok());
  ASSERT_EQ(stat(path.c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino) << "it was written anew";
  ASSERT_TRUE(AddAllowedKey(path, {core::Role::kUser, b.public_key, "b"}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(b.public_key, kNow), core::Role::kUser);

  ASSERT_TRUE(WriteFileDurable(path, "garbage\n", 0600).ok());
  EXPECT_FALSE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), core::Role::kAdmin);

  ASSERT_TRUE(WriteFileDurable(path, "node " + b.public_key + "\n", 0600).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), std::nullopt);

  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  EXPECT_EQ(ReadAllowedKeys(path).status().code(), absl::StatusCode::kPermissionDenied);
}

TEST(KeyRegistry, JoinKeysExpire) {
  KeyRegistry registry;
  std::string id = KeyId(MakeKeyPair().public_key);
  Instant expires = kNow + absl::Minutes(15);
  registry.ReplaceJoinKeys({{id, expires}});
  EXPECT_EQ(registry.RoleOfKeyId(id, kNow), core::Role::kJoin);
  EXPECT_EQ(registry.RoleOfKeyId(id, expires), std::nullopt);
  registry.Drop(id);
  EXPECT_EQ(registry.RoleOfKeyId(id, kNow), std::nullopt);
}

TEST(KeyRegistry, RevokedLinesShutOutForGood) {
  KeyRegistry registry;
  const KeyPair a = MakeKeyPair(), b = MakeKeyPair();
  const std::string path = TestFolder() + "/authorized";
  ASSERT_TRUE(AddAllowedKey(path, {core::Role::kUser, a.public_key, "ann laptop"}).ok());
  ASSERT_TRUE(AddAllowedKey(path, {core::Role::kNode, b.public_key, "host-b"}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.PeerOf(KeyId(a.public_key), kNow),
            (core::Peer{core::Role::kUser, KeyId(a.public_key), "ann"}));
  ASSERT_TRUE(AddAllowedKey(path, {core::Role::kNode, b.public_key, "host-b", true}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(b.public_key, kNow), std::nullopt);
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), core::Role::kUser);
  ASSERT_EQ(ReadAllowedKeys(path)->size(), 2u);
  EXPECT_TRUE(ReadAllowedKeys(path)->back().revoked);
}

// X4, H15: one use for one node, which may ask again; time counts on, whatever happens to the head or the
// clocks.
class JoinTokensTest : public testing::Test {
 protected:
  BootTime At(absl::Duration since_boot) const { return {"boot-1", since_boot, wall_ + since_boot}; }
  absl::Time wall_ = absl::FromUnixSeconds(1'800'000'000);
  std::string path_ = TestFolder() + "/tokens.json";
  JoinTokens tokens_{path_};
  std::string key_ = MakeKeyPair().public_key, id_ = KeyId(key_);
};

TEST_F(JoinTokensTest, OneUseSurvivesARestart) {
  ASSERT_TRUE(tokens_.Add(key_, 1, absl::Minutes(15), "ann", At(absl::ZeroDuration())).ok());
  JoinTokens after(path_);
  ASSERT_TRUE(after.Load().ok());
  EXPECT_TRUE(after.Spend(id_, "node-a", At(absl::Minutes(14))).ok());
  JoinTokens again(path_);
  ASSERT_TRUE(again.Load().ok());
  EXPECT_TRUE(again.Spend(id_, "node-a", At(absl::Minutes(14))).ok()) << "its reply was lost";
  EXPECT_TRUE(absl::IsPermissionDenied(again.Spend(id_, "node-b", At(absl::Minutes(14)))));
  EXPECT_TRUE(absl::IsPermissionDenied(again.Spend(id_, "node-a", At(absl::Minutes(15)))));
}

TEST_F(JoinTokensTest, SeveralUses) {
  ASSERT_TRUE(tokens_.Add(key_, 2, absl::Minutes(15), "ann", At(absl::ZeroDuration())).ok());
  EXPECT_TRUE(tokens_.Spend(id_, "node-a", At(absl::Minutes(1))).ok());
  EXPECT_EQ(tokens_.Live(At(absl::Minutes(1))).at(0).uses_left(), 1);
  EXPECT_TRUE(tokens_.Spend(id_, "node-b", At(absl::Minutes(1))).ok());
  EXPECT_FALSE(tokens_.Spend(id_, "node-c", At(absl::Minutes(1))).ok());
}

TEST_F(JoinTokensTest, ClocksThatJumpGiveNoLife) {
  ASSERT_TRUE(tokens_.Add(key_, 1, absl::Minutes(15), "ann", At(absl::Minutes(5))).ok());
  BootTime now = At(absl::Minutes(10));
  now.wall = wall_ - absl::Hours(100);
  EXPECT_EQ(tokens_.Live(now).at(0).Left(now), absl::Minutes(10))
      << "same boot: the wall clock does not matter";
  now = {"boot-2", absl::Seconds(5), wall_ + absl::Minutes(9)};
  EXPECT_EQ(tokens_.Live(now).at(0).Left(now), absl::Minutes(11))
      << "another boot: the wall clock is what is left";
  now.wall = wall_;
  EXPECT_TRUE(tokens_.Live(now).empty()) << "which went back, so it cannot be trusted";
}

TEST_F(JoinTokensTest, RevokedAndExpiredAreGone) {
  ASSERT_TRUE(tokens_.Add(key_, 1, absl::Minutes(15), "ann", At(absl::ZeroDuration())).ok());
  ASSERT_TRUE(tokens_.Revoke(id_).ok());
  EXPECT_TRUE(absl::IsNotFound(tokens_.Revoke(id_)));
  EXPECT_FALSE(tokens_.Spend(id_, "node-a", At(absl::Minutes(1))).ok());
  ASSERT_TRUE(WriteFileDurable(path_, "{\"tokens\": 5}").ok());
  EXPECT_TRUE(absl::IsDataLoss(JoinTokens(path_).Load()));
}

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
  EXPECT_EQ(registry.RoleOfKey(admin->public_key, kNow), core::Role::kAdmin);
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
