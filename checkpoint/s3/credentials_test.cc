// Where S3 keys come from: each place of the AWS SDKs, their order, renewal and rotation (S9), and hostile
// answers (B11, B12).
#include "checkpoint/s3/credentials.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "checkpoint/s3/run_process.h"
#include "net/http/curl_client.h"

namespace gtrain::ckpt {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// A client whose server is a function of the test.
class FakeHttp final : public http::Client {
 public:
  struct Seen {
    std::string method, url, body;
    std::map<std::string, std::string> headers;
    bool proxy = false;
  };
  absl::StatusOr<http::Reply> Do(const http::Request& request) override {
    Seen now = {request.method, request.url, "", request.headers, request.proxy};
    for (const absl::string_view part : request.body) now.body.append(part.data(), part.size());
    seen.push_back(now);
    return answer(seen.back());
  }
  std::function<absl::StatusOr<http::Reply>(const Seen&)> answer = [](const Seen&) {
    return absl::UnavailableError("nobody there");
  };
  std::vector<Seen> seen;
};

http::Reply Reply(int status, std::string body) {
  http::Reply reply;
  reply.status = status;
  reply.body = std::move(body);
  return reply;
}

// A machine with an environment, a home, a network and clocks of its own.
struct Machine {
  Machine() { clock.Advance(absl::Hours(24 * 365 * 60)); }  // some time in 2029

  std::unique_ptr<CredentialsProvider> Provider() {
    return DefaultCredentials(
        [this](const char* name) -> std::optional<std::string> {
          const auto it = environment.find(name);
          return it == environment.end() ? std::nullopt : std::optional<std::string>(it->second);
        },
        http, &clock);
  }
  absl::StatusOr<S3Credentials> Get() { return Provider()->Get(); }
  void Write(const std::string& name, absl::string_view text) {
    const std::string path = absl::StrCat(home, "/", name);
    ASSERT_EQ(MakeDirs(path.substr(0, path.rfind('/'))), absl::OkStatus());
    ASSERT_EQ(WriteFileDurable(path, text), absl::OkStatus());
  }
  // A program that says `text`, and leaves a line in `calls` each time.
  std::string Program(const std::string& name, absl::string_view body) {
    Write(name, absl::StrCat("#!/bin/sh\necho \"$@\" >> ", home, "/calls\n", body, "\n"));
    const std::string path = absl::StrCat(home, "/", name);
    EXPECT_EQ(chmod(path.c_str(), 0700), 0);
    return path;
  }
  std::string Calls() { return ReadFile(home + "/calls", 1 << 20).value_or(""); }
  std::string In(absl::Duration time) {
    return absl::FormatTime("%E4Y-%m-%dT%H:%M:%SZ", clock.WallNow() + time, absl::UTCTimeZone());
  }

  const std::string home = TestFolder();
  std::map<std::string, std::string> environment = {{"HOME", home}, {"AWS_EC2_METADATA_DISABLED", "true"}};
  const std::shared_ptr<FakeHttp> http = std::make_shared<FakeHttp>();
  ManualClock clock;
};

std::string StsAnswer(const std::string& key, const std::string& expires) {
  return absl::StrCat(
      "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">"
      "<AssumeRoleWithWebIdentityResult><Audience>a</Audience><Credentials><SessionToken>session</"
      "SessionToken>"
      "<SecretAccessKey>secret</SecretAccessKey><Expiration>",
      expires, "</Expiration><AccessKeyId>", key,
      "</AccessKeyId></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>");
}
std::string JsonAnswer(const std::string& key, const std::string& expires,
                       const std::string& token = "Token") {
  return absl::StrCat("{\"Version\": 1, \"RoleArn\": \"r\", \"AccessKeyId\": \"", key,
                      "\", \"SecretAccessKey\": \"s\", \"", token, "\": \"t\", \"Expiration\": \"", expires,
                      "\"}");
}

TEST(Credentials, ComeFromEnvironmentFileAndMetadata_S9) {
  const std::string folder = TestFolder();
  std::map<std::string, std::string> environment = {{"HOME", folder}, {"AWS_EC2_METADATA_DISABLED", "true"}};
  std::shared_ptr<http::Client> http = *http::MakeCurlClient("");
  const auto get = [&] {
    return DefaultCredentials(
               [&](const char* name) -> std::optional<std::string> {
                 const auto it = environment.find(name);
                 return it == environment.end() ? std::nullopt : std::optional<std::string>(it->second);
               },
               http)
        ->Get();
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(get().status()));
  ASSERT_EQ(MakeDirs(folder + "/.aws"), absl::OkStatus());
  ASSERT_EQ(WriteFileDurable(folder + "/.aws/credentials",
                             "# keys\n[default]\naws_access_key_id = A\naws_secret_access_key = B=\n"
                             "[other]\naws_access_key_id=C\naws_secret_access_key=D\naws_session_token=E\n"),
            absl::OkStatus());
  EXPECT_EQ(get()->secret_key, "B=");
  environment["AWS_PROFILE"] = "other";
  EXPECT_EQ(get()->session_token, "E");
  environment["AWS_PROFILE"] = "absent";
  EXPECT_THAT(std::string(get().status().message()), HasSubstr("no profile \"absent\""));
  environment["AWS_ACCESS_KEY_ID"] = "F";
  environment["AWS_SECRET_ACCESS_KEY"] = "G";
  EXPECT_EQ(get()->access_key, "F");
}

TEST(Credentials, HostileMetadataIsRefused_B12) {
  const char* good = R"({"Code": "Success", "AccessKeyId": "a", "SecretAccessKey": "b", "Token": "c",
                         "Expiration": "2030-01-01T00:00:00Z"})";
  ASSERT_TRUE(ParseImdsCredentials(good).ok());
  EXPECT_EQ(ParseImdsCredentials(good)->session_token, "c");
  for (const char* bad :
       {"", "<html>", "[]", "{}", R"({"Code": "Failed"})",
        R"({"Code":"Success","AccessKeyId":1,"SecretAccessKey":"b","Expiration":"2030-01-01T00:00:00Z"})",
        R"({"Code":"Success","AccessKeyId":"a","SecretAccessKey":"b","Expiration":"soon"})"}) {
    EXPECT_FALSE(ParseImdsCredentials(bad).ok()) << bad;
  }
}

TEST(Credentials, WebIdentityIsAskedOfStsInTheRegion_S9) {
  Machine machine;
  machine.Write("token", "jwt+1/2\n");
  machine.environment["AWS_WEB_IDENTITY_TOKEN_FILE"] = machine.home + "/token";
  machine.environment["AWS_ROLE_ARN"] = "arn:aws:iam::123:role/train";
  machine.environment["AWS_REGION"] = "eu-west-1";
  machine.http->answer = [&](const FakeHttp::Seen&) {
    return Reply(200, StsAnswer("ASIA1", machine.In(absl::Hours(1))));
  };
  const auto found = machine.Get();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->access_key, "ASIA1");
  EXPECT_EQ(found->session_token, "session");
  ASSERT_EQ(machine.http->seen.size(), 1u);
  const FakeHttp::Seen& seen = machine.http->seen[0];
  EXPECT_EQ(seen.method, "POST");
  EXPECT_EQ(seen.url, "https://sts.eu-west-1.amazonaws.com/");  // the token is not in it
  EXPECT_EQ(seen.body,
            "Action=AssumeRoleWithWebIdentity&RoleArn=arn%3Aaws%3Aiam%3A%3A123%3Arole%2Ftrain&"
            "RoleSessionName=gtrain&Version=2011-06-15&WebIdentityToken=jwt%2B1%2F2");
  machine.environment["AWS_ROLE_SESSION_NAME"] = "job-7";
  machine.environment["AWS_REGION"] = "cn-north-1";
  ASSERT_TRUE(machine.Get().ok());
  EXPECT_EQ(machine.http->seen[1].url, "https://sts.cn-north-1.amazonaws.com.cn/");
  EXPECT_THAT(machine.http->seen[1].body, HasSubstr("RoleSessionName=job-7"));
  machine.environment["AWS_ENDPOINT_URL_STS"] = "http://127.0.0.1:8080/";
  ASSERT_TRUE(machine.Get().ok());
  EXPECT_EQ(machine.http->seen[2].url, "http://127.0.0.1:8080/");
  // The token goes nowhere in the clear.
  for (const char* endpoint : {"http://sts.example", "http://127.0.0.1.example", "http://127.0.0.1@example",
                               "ftp://127.0.0.1", "http://localhost.example"}) {
    machine.environment["AWS_ENDPOINT_URL_STS"] = endpoint;
    EXPECT_TRUE(absl::IsFailedPrecondition(machine.Get().status())) << endpoint;
  }
  EXPECT_EQ(machine.http->seen.size(), 3u);
}

TEST(Credentials, WhatStsSaysIsSaidAndMayPass_S9) {
  Machine machine;
  machine.Write("token", "jwt");
  machine.environment["AWS_WEB_IDENTITY_TOKEN_FILE"] = machine.home + "/token";
  machine.environment["AWS_ROLE_ARN"] = "arn:aws:iam::123:role/train";
  machine.Write(".aws/credentials", "[default]\naws_access_key_id = A\naws_secret_access_key = B\n");
  const auto error = [&](int status, const std::string& code) {
    machine.http->answer = [=](const FakeHttp::Seen&) {
      return Reply(status, absl::StrCat("<ErrorResponse><Error><Type>Sender</Type><Code>", code,
                                        "</Code><Message>the words</Message></Error></ErrorResponse>"));
    };
    return machine.Get().status();
  };
  const absl::Status denied = error(403, "AccessDenied");
  EXPECT_TRUE(absl::IsFailedPrecondition(denied)) << denied;  // and not the keys of the file
  EXPECT_THAT(std::string(denied.message()), HasSubstr("AccessDenied: the words"));
  EXPECT_THAT(std::string(denied.message()), Not(HasSubstr("jwt")));
  EXPECT_TRUE(absl::IsFailedPrecondition(error(400, "ExpiredTokenException")));
  EXPECT_TRUE(absl::IsUnavailable(error(503, "")));
  EXPECT_TRUE(absl::IsUnavailable(error(400, "Throttling")));
  EXPECT_TRUE(absl::IsUnavailable(error(400, "IDPCommunicationError")));
  machine.http->answer = [](const FakeHttp::Seen&) { return absl::UnavailableError("reset"); };
  EXPECT_TRUE(absl::IsUnavailable(machine.Get().status()));
  machine.environment["AWS_WEB_IDENTITY_TOKEN_FILE"] = machine.home + "/absent";
  EXPECT_TRUE(absl::IsFailedPrecondition(machine.Get().status()));
}

TEST(Credentials, AProcessIsRunWithoutAShell_S9) {
  Machine machine;
  const std::string program = machine.Program(
      "my program", absl::StrCat("echo secret-words >&2; echo '",
                                 JsonAnswer("P", "2031-01-01T00:00:00Z", "SessionToken"), "'"));
  machine.Write(".aws/config", absl::StrCat("[default]\nregion = x\ns3 =\n  aws_access_key_id = nested\n"
                                            "[profile dev]\ncredential_process = \"",
                                            program, "\" --user \"helen k\" '$HOME;x'\n"));
  machine.environment["AWS_PROFILE"] = "dev";
  const auto found = machine.Get();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->access_key, "P");
  EXPECT_EQ(found->session_token, "t");
  EXPECT_EQ(machine.Calls(), "--user helen k $HOME;x\n");
  // Keys of the credentials file come before it, keys of the config file after.
  machine.Write(".aws/credentials", "[dev]\naws_access_key_id = A\naws_secret_access_key = B\n");
  EXPECT_EQ(machine.Get()->access_key, "A");
  machine.Write(".aws/credentials", "[default]\n");
  machine.environment["AWS_CONFIG_FILE"] = machine.home + "/other";
  machine.Write("other", "[profile dev]\naws_access_key_id = C\naws_secret_access_key = D\n");
  EXPECT_EQ(machine.Get()->access_key, "C");
  machine.Write("other", "[profile dev]\nsso_session = x\n");
  const auto sso = machine.Get();
  EXPECT_TRUE(absl::IsFailedPrecondition(sso.status()));
  EXPECT_THAT(std::string(sso.status().message()), HasSubstr("sso_session"));
}

TEST(Credentials, AProcessThatFailsIsSaidWithoutItsOutput_X12) {
  Machine machine;
  const auto with = [&](absl::string_view body) {
    const std::string program = machine.Program("program", body);
    machine.Write(".aws/credentials", absl::StrCat("[default]\ncredential_process = ", program, "\n"));
    return std::string(machine.Get().status().message());
  };
  for (const char* body : {"echo topsecret; echo topsecret >&2; exit 3", "echo topsecret",
                           "echo '{\"Version\": 2}'", "kill -9 $$", "yes topsecret", "exec sleep 0"}) {
    const std::string why = with(body);
    EXPECT_THAT(why, HasSubstr("credential_process of profile \"default\"")) << body;
    EXPECT_THAT(why, Not(HasSubstr("topsecret"))) << body;
  }
  EXPECT_THAT(with("exit 3"), HasSubstr("exited with 3"));
  machine.Write(".aws/credentials", "[default]\ncredential_process = /no/such/program\n");
  EXPECT_THAT(std::string(machine.Get().status().message()), HasSubstr("cannot start /no/such/program"));
  machine.Write(".aws/credentials", "[default]\ncredential_process = \"open\n");
  EXPECT_THAT(std::string(machine.Get().status().message()), HasSubstr("quote"));
}

TEST(RunProcess, EndsWithItsDeadlineAndItsBound) {
  // A child of the program holds the pipe, too: the whole group goes.
  const std::string child = TestFolder() + "/child";
  const auto slow = RunProcess({"sh", "-c", absl::StrCat("sleep 1000 & echo $! > ", child, "; sleep 1000")},
                               absl::Seconds(1), 100);
  const std::string stat = absl::StrCat("/proc/", absl::StripAsciiWhitespace(*ReadFile(child, 100)), "/stat");
  const auto lives = [&] {
    std::ifstream file(stat);
    std::string text((std::istreambuf_iterator<char>(file)), {});
    return !text.empty() && !absl::StrContains(text, ") Z ");
  };
  const absl::Time give_up = absl::Now() + absl::Seconds(30);
  while (lives() && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE(lives());
  EXPECT_TRUE(absl::IsDeadlineExceeded(slow.status())) << slow.status();
  const auto closed = RunProcess({"sh", "-c", "exec 1>&-; exec sleep 1000"}, absl::Milliseconds(200), 100);
  EXPECT_TRUE(absl::IsDeadlineExceeded(closed.status())) << closed.status();
  const auto much = RunProcess({"sh", "-c", "yes"}, absl::Seconds(60), 1000);
  EXPECT_TRUE(absl::IsResourceExhausted(much.status())) << much.status();
  EXPECT_EQ(*RunProcess({"printf", "%s", "a b"}, absl::Seconds(60), 100), "a b");
  // It inherits nothing: no descriptor of ours, no input. The fourth is the one with which it looks; a pipe
  // of its own would be there or not.
  EXPECT_EQ(*RunProcess({"sh", "-c", "cat; set -- /proc/$$/fd/*; echo $#"}, absl::Seconds(60), 100), "4\n");
}

TEST(SplitCommand, AsTheDocumentationSays) {
  const auto split = [](absl::string_view command) { return *SplitCommand(command); };
  EXPECT_THAT(split("/opt/bin/awscreds-custom --username helen"),
              ElementsAre("/opt/bin/awscreds-custom", "--username", "helen"));
  EXPECT_THAT(split(" \"/Users/Dave/path to/credentials.sh\"\tone \"with spaces\" "),
              ElementsAre("/Users/Dave/path to/credentials.sh", "one", "with spaces"));
  EXPECT_THAT(split("a '' \"\" b\\ c 'd\\e' \"f\\\"g\\h\""),
              ElementsAre("a", "", "", "b c", "d\\e", "f\"g\\h"));
  EXPECT_THAT(split("a --b=\"c d\""), ElementsAre("a", "--b=c d"));
  for (const char* bad : {"", "  ", "\"a", "'a", "a \"b", "\"\" a"})
    EXPECT_TRUE(absl::IsInvalidArgument(SplitCommand(bad).status())) << bad;
}

TEST(Credentials, AContainerIsAskedWithItsToken_S9) {
  Machine machine;
  machine.http->answer = [&](const FakeHttp::Seen&) {
    return Reply(200, JsonAnswer("E", machine.In(absl::Hours(6))));
  };
  machine.environment["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] = "/v2/credentials/1";
  EXPECT_EQ(machine.Get()->access_key, "E");
  EXPECT_EQ(machine.http->seen[0].url, "http://169.254.170.2/v2/credentials/1");
  EXPECT_FALSE(machine.http->seen[0].proxy);
  EXPECT_FALSE(machine.http->seen[0].headers.contains("authorization"));
  machine.environment.erase("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");

  machine.environment["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = "http://169.254.170.23/v1/credentials";
  machine.environment["AWS_CONTAINER_AUTHORIZATION_TOKEN"] = "word";
  EXPECT_EQ(machine.Get()->session_token, "t");
  EXPECT_EQ(machine.http->seen[1].headers.at("authorization"), "word");
  machine.Write("pod-token", "from the file\n");
  machine.environment["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = machine.home + "/pod-token";
  const auto provider = machine.Provider();
  ASSERT_TRUE(provider->Get().ok());
  EXPECT_EQ(machine.http->seen[2].headers.at("authorization"), "from the file");
  machine.Write("pod-token", "rotated");
  machine.clock.Advance(absl::Hours(6));
  ASSERT_TRUE(provider->Get().ok());
  EXPECT_EQ(machine.http->seen[3].headers.at("authorization"), "rotated");
  // A token of two lines would be a header of our caller's choice.
  machine.Write("pod-token", "a\r\nx-evil: b");
  EXPECT_TRUE(absl::IsFailedPrecondition(machine.Get().status()));
  EXPECT_EQ(machine.http->seen.size(), 4u);
  // A container that is named and refuses is not passed over for the machine's role.
  machine.Write("pod-token", "word");
  machine.environment.erase("AWS_EC2_METADATA_DISABLED");
  machine.http->answer = [](const FakeHttp::Seen&) { return Reply(404, ""); };
  EXPECT_TRUE(absl::IsFailedPrecondition(machine.Get().status()));
  machine.http->answer = [](const FakeHttp::Seen&) { return Reply(503, ""); };
  EXPECT_TRUE(absl::IsUnavailable(machine.Get().status()));
  for (const auto& seen : machine.http->seen) EXPECT_THAT(seen.url, Not(HasSubstr("169.254.169.254")));
}

TEST(Credentials, OnlyContainersAreSentAContainersToken_X11) {
  for (const char* url : {"http://169.254.170.2/x", "http://169.254.170.23/v1/credentials",
                          "http://[fd00:ec2::23]/v1", "http://localhost:8080/x", "http://127.0.0.1:9/",
                          "http://127.1.2.3", "http://[::1]:80/x", "https://vault.example/creds"}) {
    EXPECT_TRUE(IsContainerEndpoint(url)) << url;
  }
  for (const char* url :
       {"", "http://", "http://example", "http://169.254.169.254/latest", "http://169.254.170.22/x",
        "http://[fd00:ec2::254]/x", "http://localhost.example/x", "http://127.0.0.1.example",
        "http://127.0.0.1@example/x", "http://user@127.0.0.1/x", "https://", "ftp://127.0.0.1/x",
        "http://127.0.0/x", "http://127.0.0.256/", "http://169.254.170.2.example/x", "/x"}) {
    EXPECT_FALSE(IsContainerEndpoint(url)) << url;
  }
}

// Five minutes before they expire, not with every request; by the monotonic clock.
TEST(Credentials, AreRenewedBeforeTheyExpire_S9) {
  Machine machine;
  machine.environment["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] = "/x";
  int count = 0;
  machine.http->answer = [&](const FakeHttp::Seen&) {
    return Reply(200, JsonAnswer(absl::StrCat("K", ++count), machine.In(absl::Hours(1))));
  };
  const auto provider = machine.Provider();
  EXPECT_EQ(provider->Get()->access_key, "K1");
  machine.clock.Advance(absl::Minutes(54));
  EXPECT_EQ(provider->Get()->access_key, "K1");
  machine.clock.Advance(absl::Minutes(2));
  EXPECT_EQ(provider->Get()->access_key, "K2");
  // A look that fails is repeated after a minute, and the old keys serve until they expire.
  machine.clock.Advance(absl::Minutes(56));
  machine.http->answer = [&](const FakeHttp::Seen&) { return Reply(500, ""); };
  size_t asked = machine.http->seen.size();
  EXPECT_EQ(provider->Get()->access_key, "K2");
  EXPECT_EQ(provider->Get()->access_key, "K2");
  EXPECT_EQ(machine.http->seen.size(), asked + 1);
  machine.clock.Advance(absl::Minutes(1));
  EXPECT_EQ(provider->Get()->access_key, "K2");
  EXPECT_EQ(machine.http->seen.size(), asked + 2);
  machine.clock.Advance(absl::Minutes(4));
  EXPECT_TRUE(absl::IsUnavailable(provider->Get().status()));
  // A machine whose time of day is ahead by more than the keys live asks once a minute, not always.
  machine.http->answer = [&](const FakeHttp::Seen&) {
    return Reply(200, JsonAnswer("late", machine.In(-absl::Hours(1))));
  };
  asked = machine.http->seen.size();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(provider->Get()->access_key, "late");
  EXPECT_EQ(machine.http->seen.size(), asked + 1);
}

// Rotation: the file has other keys when the store knows the old ones no more.
TEST(Credentials, RefusedKeysAreReadAgain_S9) {
  Machine machine;
  const auto write = [&](const std::string& key) {
    machine.Write(".aws/credentials",
                  absl::StrCat("[default]\naws_access_key_id = ", key, "\naws_secret_access_key = B\n"));
  };
  write("old");
  const auto provider = machine.Provider();
  const S3Credentials old = *provider->Get();
  write("new");
  EXPECT_EQ(provider->Get()->access_key, "old");  // nobody complained
  provider->Refused(old);
  EXPECT_EQ(provider->Get()->access_key, "new");
  write("newer");
  provider->Refused(old);  // of a request that was on its way meanwhile
  EXPECT_EQ(provider->Get()->access_key, "new");
  // Keys that are refused and stay the same are not looked for with every request.
  write("new");
  provider->Refused(*provider->Get());
  EXPECT_EQ(provider->Get()->access_key, "new");
  write("newest");
  provider->Refused(*provider->Get());
  EXPECT_EQ(provider->Get()->access_key, "new");
  machine.clock.Advance(absl::Minutes(1));
  provider->Refused(*provider->Get());
  EXPECT_EQ(provider->Get()->access_key, "newest");
}

TEST(Credentials, TheOrderIsThatOfTheSdks) {
  Machine machine;
  machine.http->answer = [&](const FakeHttp::Seen& seen) {
    if (absl::StrContains(seen.url, "sts")) return Reply(200, StsAnswer("web", machine.In(absl::Hours(1))));
    if (absl::StrContains(seen.url, "170.2"))
      return Reply(200, JsonAnswer("container", machine.In(absl::Hours(1))));
    if (absl::EndsWith(seen.url, "/token")) return Reply(200, "t");
    if (absl::EndsWith(seen.url, "-credentials/")) return Reply(200, "role\n");
    return Reply(200, absl::StrCat("{\"Code\": \"Success\",",
                                   JsonAnswer("imds", machine.In(absl::Hours(1))).substr(1)));
  };
  machine.environment.erase("AWS_EC2_METADATA_DISABLED");
  EXPECT_EQ(machine.Get()->access_key, "imds");
  machine.environment["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] = "/x";
  EXPECT_EQ(machine.Get()->access_key, "container");
  machine.Write(".aws/credentials", "[default]\naws_access_key_id = file\naws_secret_access_key = B\n");
  EXPECT_EQ(machine.Get()->access_key, "file");
  machine.Write("token", "jwt");
  machine.environment["AWS_WEB_IDENTITY_TOKEN_FILE"] = machine.home + "/token";
  machine.environment["AWS_ROLE_ARN"] = "arn";
  EXPECT_EQ(machine.Get()->access_key, "web");
  machine.environment["AWS_ACCESS_KEY_ID"] = "environment";
  machine.environment["AWS_SECRET_ACCESS_KEY"] = "B";
  EXPECT_EQ(machine.Get()->access_key, "environment");
}

TEST(Credentials, HostileAnswersAreRefused_B11_B12) {
  EXPECT_TRUE(ParseContainerCredentials(JsonAnswer("a", "2030-01-01T00:00:00Z")).ok());
  EXPECT_TRUE(ParseProcessCredentials(JsonAnswer("a", "2030-01-01T00:00:00.5+01:00", "SessionToken")).ok());
  const auto lasting = ParseProcessCredentials(R"({"Version":1,"AccessKeyId":"a","SecretAccessKey":"b"})");
  ASSERT_TRUE(lasting.ok());
  EXPECT_EQ(lasting->expires, absl::InfiniteFuture());
  for (
      const char* bad :
      {"", "<html>", "[]", "{}", "{", R"({"AccessKeyId":"a","SecretAccessKey":"b"})",
       R"({"AccessKeyId":"a","SecretAccessKey":"b","Expiration":"soon"})",
       R"({"Version":2,"AccessKeyId":"a","SecretAccessKey":"b","Expiration":7})",
       R"({"Version":1,"AccessKeyId":"a","SecretAccessKey":"b","Expiration":7})",
       R"({"Version":"1","AccessKeyId":"a","SecretAccessKey":"b"})",
       R"({"Version":1,"AccessKeyId":"a\r\nx: y","SecretAccessKey":"b","Expiration":"2030-01-01T00:00:00Z"})",
       R"({"Version":1,"AccessKeyId":"a","SecretAccessKey":["b"],"Expiration":"2030-01-01T00:00:00Z"})"}) {
    EXPECT_TRUE(absl::IsDataLoss(ParseContainerCredentials(bad).status())) << bad;
    EXPECT_TRUE(absl::IsDataLoss(ParseProcessCredentials(bad).status())) << bad;
  }
  const std::string good = StsAnswer("a", "2030-01-01T00:00:00Z");
  ASSERT_TRUE(ParseStsCredentials(good).ok());
  for (const std::string& bad : {std::string(), std::string("<html/>"), good.substr(0, good.size() - 1),
                                 StsAnswer("", "2030-01-01T00:00:00Z"), StsAnswer("a", "soon"),
                                 absl::StrCat("<!DOCTYPE a [<!ENTITY e \"x\">]>", good),
                                 std::string("<AssumeRoleWithWebIdentityResponse/>")}) {
    EXPECT_TRUE(absl::IsDataLoss(ParseStsCredentials(bad).status())) << bad;
  }
}

}  // namespace
}  // namespace gtrain::ckpt
