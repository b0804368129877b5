#include "runtime/head/access.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/head/service.h"

namespace gtrain::head {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class AccessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    files_ = *net::InitCluster(TestFolder());
    Restart();
  }
  void Restart() {
    registry_ = std::make_shared<net::KeyRegistry>();
    access_ = std::make_unique<Access>(files_, registry_, std::make_shared<RealClock>());
    ASSERT_TRUE(access_->Load().ok());
  }
  absl::StatusOr<json> Ask(const core::ClientRequestBody& body) {
    const auto text = access_->Answer(body, "127.0.0.1:7070", "root");
    if (!text.ok()) return text.status();
    return json::parse(*text);
  }
  std::optional<core::Role> RoleOf(const std::string& key) {
    return registry_->RoleOfKey(key, RealClock().Now());
  }
  absl::StatusOr<NodeId> Join(const std::string& token, const core::AgentJoin& join) {
    return access_->Join({{{token, join}}})[0];
  }
  std::string NewToken(int uses = 1) { return Ask(core::ClientJoinToken{uses})->at("id"); }

  net::ClusterFiles files_;
  std::shared_ptr<net::KeyRegistry> registry_;
  std::unique_ptr<Access> access_;
  const std::string node_ = net::MakeKeyPair().public_key, other_ = net::MakeKeyPair().public_key;
};

// X4: the token outlives the head, its use does too.
TEST_F(AccessTest, TokensSurviveARestartAndServeOnce) {
  const std::string id = NewToken();
  Restart();
  EXPECT_EQ(registry_->RoleOfKeyId(id, RealClock().Now()), core::Role::kJoin);
  EXPECT_TRUE(Join(id, {node_, "host-a"}).ok());
  EXPECT_EQ(RoleOf(node_), core::Role::kNode);
  Restart();
  EXPECT_EQ(RoleOf(node_), core::Role::kNode);
  EXPECT_TRUE(Join(id, {node_, "host-a"}).ok()) << "its answer was lost";
  EXPECT_TRUE(absl::IsPermissionDenied(Join(id, {other_, "host-b"}).status()));
  EXPECT_EQ(RoleOf(other_), std::nullopt);
}

TEST_F(AccessTest, AUsedTokenIsNobodysKeyAtOnce) {
  const std::string id = NewToken(2);
  ASSERT_TRUE(Join(id, {node_, "host-a"}).ok());
  EXPECT_EQ(registry_->RoleOfKeyId(id, RealClock().Now()), core::Role::kJoin) << "one use is left";
  ASSERT_TRUE(Join(id, {other_, "host-b"}).ok());
  EXPECT_EQ(registry_->RoleOfKeyId(id, RealClock().Now()), std::nullopt);
  Restart();
  EXPECT_EQ(registry_->RoleOfKeyId(id, RealClock().Now()), std::nullopt);
}

TEST_F(AccessTest, AUseIsGivenBackIfTheHeadDiedBeforeTheNodeWasLetIn) {
  const std::string id = NewToken();
  const std::string before = *ReadFile(files_.authorized_path(), 1 << 20);
  ASSERT_TRUE(Join(id, {node_, "host-a"}).ok());
  ASSERT_TRUE(WriteFileDurable(files_.authorized_path(), before, 0600).ok());
  Restart();
  EXPECT_EQ(registry_->RoleOfKeyId(id, RealClock().Now()), core::Role::kJoin);
  EXPECT_TRUE(Join(id, {node_, "host-a"}).ok());
}

TEST_F(AccessTest, AUseIsGivenBackIfTheNodeCannotBeWrittenDown) {
  const std::string id = NewToken();
  const std::string in_the_way = absl::StrCat(files_.authorized_path(), ".tmp.", getpid());
  ASSERT_EQ(mkdir(in_the_way.c_str(), 0700), 0);
  EXPECT_FALSE(Join(id, {node_, "host-a"}).ok());
  EXPECT_EQ(RoleOf(node_), std::nullopt);
  EXPECT_EQ(registry_->RoleOfKeyId(id, RealClock().Now()), core::Role::kJoin) << "it may ask again";
  ASSERT_EQ(rmdir(in_the_way.c_str()), 0);
  EXPECT_TRUE(Join(id, {node_, "host-a"}).ok());
  EXPECT_EQ(RoleOf(node_), core::Role::kNode);
}

TEST_F(AccessTest, ABatchIsAnsweredOneByOne) {
  const std::string two = NewToken(2), one = NewToken();
  const std::string third = net::MakeKeyPair().public_key;
  const auto answers = access_->Join({{{two, {node_, "a"}},
                                       {one, {other_, "b"}},
                                       {one, {third, "c"}},
                                       {two, {"no key", "d"}},
                                       {two, {node_, "a"}},
                                       {two, {third, "c"}}}});
  std::vector<bool> ok;
  for (const auto& answer : answers) ok.push_back(answer.ok());
  EXPECT_THAT(ok, ::testing::ElementsAre(true, true, false, false, true, true));
  EXPECT_THAT(std::string(answers[2].status().message()), HasSubstr("used up"));
  for (const std::string& key : {node_, other_, third}) EXPECT_EQ(RoleOf(key), core::Role::kNode);
  const std::string text = *ReadFile(files_.authorized_path(), 1 << 20);
  EXPECT_EQ(text.find(node_), text.rfind(node_)) << "one line a key";
}

TEST_F(AccessTest, TokensAreListedAndRevoked) {
  const std::string id = NewToken(3);
  ASSERT_TRUE(Join(id, {node_, "host-a"}).ok());
  const json token = Ask(core::ClientTokens{})->at("tokens").at(0);
  EXPECT_EQ(token.at("uses_left"), 2);
  EXPECT_EQ(token.at("by"), "root");
  ASSERT_TRUE(Ask(core::ClientRevokeToken{id}).ok());
  EXPECT_EQ(registry_->RoleOfKeyId(id, RealClock().Now()), std::nullopt);
  EXPECT_FALSE(Join(id, {other_, "host-b"}).ok());
  EXPECT_EQ(RoleOf(node_), core::Role::kNode) << "who came in with it stays";
  EXPECT_FALSE(Ask(core::ClientJoinToken{1, absl::Hours(1000)}).ok());
}

TEST_F(AccessTest, RevokedNodeStaysOut) {
  const std::string id = NewToken(3);
  ASSERT_TRUE(Join(id, {node_, "host-a"}).ok());
  ASSERT_TRUE(Join(id, {other_, "host-a"}).ok());
  EXPECT_THAT(std::string(Ask(core::ClientRevokeNode{"host-a"}).status().message()), HasSubstr("2 nodes"));
  ASSERT_TRUE(Ask(core::ClientRevokeNode{net::KeyId(node_)}).ok());
  ASSERT_TRUE(Ask(core::ClientRevokeNode{net::KeyId(node_)}).ok()) << "again is harmless";
  EXPECT_EQ(RoleOf(node_), std::nullopt);
  Restart();
  EXPECT_EQ(RoleOf(node_), std::nullopt);
  EXPECT_EQ(RoleOf(other_), core::Role::kNode);
  EXPECT_THAT(std::string(Join(id, {node_, "host-a"}).status().message()), HasSubstr("was revoked"));
  EXPECT_EQ(Ask(core::ClientRevokeNode{"nobody"}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AccessTest, UsersComeAndGo) {
  const std::string key = net::MakeKeyPair().public_key;
  const auto added = Ask(core::ClientAddUser{"ann", "user", key});
  ASSERT_TRUE(added.ok()) << added.status();
  EXPECT_EQ(added->at("head_public_key"), files_.head.public_key);
  EXPECT_EQ(RoleOf(key), core::Role::kUser);
  EXPECT_EQ(Ask(core::ClientAddUser{"ann", "user", other_}).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_FALSE(Ask(core::ClientAddUser{"bob", "node", other_}).ok()) << "nodes come with a token";
  EXPECT_FALSE(Ask(core::ClientAddUser{"bob", "join", other_}).ok());
  EXPECT_FALSE(Ask(core::ClientAddUser{"bob admin", "user", other_}).ok());
  EXPECT_FALSE(Ask(core::ClientAddUser{"bob", "user", "short"}).ok());
  EXPECT_THAT(Ask(core::ClientUsers{})->at("users"), SizeIs(2));
  ASSERT_TRUE(Ask(core::ClientRevokeUser{"ann"}).ok());
  EXPECT_EQ(RoleOf(key), std::nullopt);
  EXPECT_FALSE(Ask(core::ClientAddUser{"ann", "user", key}).ok()) << "a revoked key does not come back";
  EXPECT_TRUE(Ask(core::ClientAddUser{"ann", "user", other_}).ok()) << "its owner may, with another";
}

TEST_F(AccessTest, TheLastAdminStays) {
  const std::string admin = Ask(core::ClientUsers{})->at("users").at(0).at("name");
  EXPECT_EQ(Ask(core::ClientRevokeUser{admin}).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Ask(core::ClientAddUser{"ann", "admin", other_}).ok());
  EXPECT_TRUE(Ask(core::ClientRevokeUser{admin}).ok());
  EXPECT_TRUE(absl::IsInternal(Ask(core::ClientStatus{}).status())) << "not about keys";
}

TEST(RootMayServe, OnlyLocallyInAContainerOrWhenTold) {  // X7
  for (int bits = 0; bits < 16; ++bits) {
    const bool root = bits & 1, loopback = bits & 2, container = bits & 4, allowed = bits & 8;
    EXPECT_EQ(RootMayServe(root, loopback, container, allowed).ok(),
              !root || loopback || container || allowed);
  }
}

}  // namespace
}  // namespace gtrain::head
