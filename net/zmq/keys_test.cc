#include "net/zmq/keys.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstdlib>

#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/file_lock.h"
#include "base/test_folder.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "net/zmq/join_tokens.h"
#include "net/zmq/key_registry.h"

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
  EXPECT_EQ((*keys)[1].role, Role::kNode);
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
  ASSERT_TRUE(AddAllowedKey(path, {Role::kAdmin, a.public_key, "a"}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), Role::kAdmin);
  EXPECT_EQ(registry.RoleOfKey(b.public_key, kNow), std::nullopt);

  ASSERT_TRUE(AddAllowedKey(path, {Role::kNode, b.public_key, "b\nadmin x"}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(b.public_key, kNow), Role::kNode);

  // H3: every verb of the local cluster asks for the same again, also on a full disk.
  struct stat before, after;
  ASSERT_EQ(stat(path.c_str(), &before), 0);
  ASSERT_TRUE(AddAllowedKey(path, {Role::kNode, b.public_key, "b\nadmin x"}).ok());
  ASSERT_EQ(stat(path.c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino) << "it was written anew";
  ASSERT_TRUE(AddAllowedKey(path, {Role::kUser, b.public_key, "b"}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(b.public_key, kNow), Role::kUser);

  ASSERT_TRUE(WriteFileDurable(path, "garbage\n", 0600).ok());
  EXPECT_FALSE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), Role::kAdmin);

  ASSERT_TRUE(WriteFileDurable(path, "node " + b.public_key + "\n", 0600).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), std::nullopt);

  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  EXPECT_EQ(ReadAllowedKeys(path).status().code(), absl::StatusCode::kPermissionDenied);
}

// X4: a list that was refused for its mode is taken when that was put right, as the error says: a key that
// was taken out of it kept every right before.
TEST(KeyRegistry, AModeThatWasPutRightIsNoticed_X4) {
  const std::string path = TestFolder() + "/authorized";
  const KeyPair a = MakeKeyPair();
  KeyRegistry registry;
  ASSERT_TRUE(AddAllowedKey(path, {Role::kUser, a.public_key, "ann"}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  ASSERT_TRUE(WriteFileDurable(path, "# nobody\n").ok());
  ASSERT_EQ(chmod(path.c_str(), 0664), 0);
  EXPECT_FALSE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), Role::kUser);
  EXPECT_TRUE(registry.Reload(path).ok()) << "it is said once";
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), std::nullopt);
}

// A list that could not be read just now is read later, whether it has changed or not.
TEST(KeyRegistry, AReadThatFailedIsTriedAgain) {
  const std::string path = TestFolder() + "/authorized";
  const KeyPair a = MakeKeyPair();
  KeyRegistry registry;
  ASSERT_TRUE(AddAllowedKey(path, {Role::kUser, a.public_key, "ann"}).ok());
  rlimit files = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const UniqueFd next(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const rlimit none = {static_cast<rlim_t>(next.get()), files.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status failed = registry.Reload(path);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_FALSE(failed.ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), Role::kUser);
}

TEST(KeyRegistry, JoinKeysExpire) {
  KeyRegistry registry;
  std::string id = KeyId(MakeKeyPair().public_key);
  Instant expires = kNow + absl::Minutes(15);
  registry.ReplaceJoinKeys({{id, expires}});
  EXPECT_EQ(registry.RoleOfKeyId(id, kNow), Role::kJoin);
  EXPECT_EQ(registry.RoleOfKeyId(id, expires), std::nullopt);
  registry.Drop(id);
  EXPECT_EQ(registry.RoleOfKeyId(id, kNow), std::nullopt);
}

TEST(KeyRegistry, RevokedLinesShutOutForGood) {
  KeyRegistry registry;
  const KeyPair a = MakeKeyPair(), b = MakeKeyPair();
  const std::string path = TestFolder() + "/authorized";
  ASSERT_TRUE(AddAllowedKey(path, {Role::kUser, a.public_key, "ann laptop"}).ok());
  ASSERT_TRUE(AddAllowedKey(path, {Role::kNode, b.public_key, "host-b"}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.PeerOf(KeyId(a.public_key), kNow), (Peer{Role::kUser, KeyId(a.public_key), "ann"}));
  ASSERT_TRUE(AddAllowedKey(path, {Role::kNode, b.public_key, "host-b", true}).ok());
  ASSERT_TRUE(registry.Reload(path).ok());
  EXPECT_EQ(registry.RoleOfKey(b.public_key, kNow), std::nullopt);
  EXPECT_EQ(registry.RoleOfKey(a.public_key, kNow), Role::kUser);
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

}  // namespace
}  // namespace gtrain::net
