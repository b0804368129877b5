// Fuzzes the sources of S3 keys (faults B11, B12, X11): metadata services, containers, STS, the output of a
// credential_process, the files of the AWS tools. Whole keys that can be sent in a header, or an error.
#include "absl/strings/match.h"
#include "base/check.h"
#include "checkpoint/s3/credentials.h"
#include "checkpoint/s3/run_process.h"
#include "tests/fuzz/target.h"

namespace gtrain::fuzz {
namespace {

void CheckKeys(const absl::StatusOr<ckpt::S3Credentials>& keys) {
  if (!keys.ok()) return;
  GT_CHECK(!keys->access_key.empty() && !keys->secret_key.empty());
  for (const char c : keys->access_key + keys->session_token) GT_CHECK(c >= ' ' && c <= '~');
}

void CheckProfile(const absl::StatusOr<ckpt::S3Profile>& profile) {
  if (profile.ok()) GT_CHECK(profile->keys.access_key.empty() == profile->keys.secret_key.empty());
}

}  // namespace

GT_FUZZ_RUN(s3_credentials) {
  CheckKeys(ckpt::ParseImdsCredentials(bytes));
  CheckKeys(ckpt::ParseContainerCredentials(bytes));
  CheckKeys(ckpt::ParseProcessCredentials(bytes));
  CheckKeys(ckpt::ParseStsCredentials(bytes));
  for (const bool config : {false, true}) {
    for (const char* profile : {"default", "other", ""})
      CheckProfile(ckpt::ParseProfile(bytes, profile, config));
  }
  const auto words = ckpt::SplitCommand(bytes);
  if (words.ok()) GT_CHECK(!words->empty() && !words->front().empty());
  if (ckpt::IsContainerEndpoint(bytes)) {
    GT_CHECK(absl::StartsWith(bytes, "https://") || absl::StartsWith(bytes, "http://"));
  }
}

GT_FUZZ_SEEDS(s3_credentials) {
  return {
      R"({"Code":"Success","AccessKeyId":"a","SecretAccessKey":"b","Token":"c",)"
      R"("Expiration":"2030-01-01T00:00:00Z"})",
      R"({"Version":1,"AccessKeyId":"a","SecretAccessKey":"b","SessionToken":"c",)"
      R"("Expiration":"2030-01-01T00:00:00.5+01:00"})",
      R"({"Version":1,"AccessKeyId":"a","SecretAccessKey":"b"})",
      R"(<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">)"
      R"(<AssumeRoleWithWebIdentityResult><Credentials><SessionToken>c</SessionToken><SecretAccessKey>b)"
      R"(</SecretAccessKey><Expiration>2030-01-01T00:00:00Z</Expiration><AccessKeyId>a</AccessKeyId></Credentials>)"
      R"(</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>)",
      "# mine\n[default]\naws_access_key_id = a\naws_secret_access_key=b=\n[other]\naws_session_token=c\n",
      "[profile other]\ncredential_process = \"/opt/a b\" --user 'x' \\y\nsso_session = z\n",
      "\"/opt/a b\" --user 'x' \\y",
      "http://[fd00:ec2::23]/v1/credentials"};
}

}  // namespace gtrain::fuzz
