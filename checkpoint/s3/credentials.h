// Where S3 keys come from, in the order of the AWS SDKs: the first place that is named decides, and an error
// there is an error, not a reason to go on as somebody else.
//
//   1. $AWS_ACCESS_KEY_ID, $AWS_SECRET_ACCESS_KEY, $AWS_SESSION_TOKEN
//   2. web identity: $AWS_WEB_IDENTITY_TOKEN_FILE and $AWS_ROLE_ARN, $AWS_ROLE_SESSION_NAME; asked of STS in
//      $AWS_REGION, or at $AWS_ENDPOINT_URL_STS
//   3. profile $AWS_PROFILE ("default") of $AWS_SHARED_CREDENTIALS_FILE (~/.aws/credentials) and of
//      $AWS_CONFIG_FILE (~/.aws/config): keys of the first, then credential_process, then keys of the second
//   4. container: $AWS_CONTAINER_CREDENTIALS_RELATIVE_URI (ECS) or $AWS_CONTAINER_CREDENTIALS_FULL_URI (EKS
//   pod
//      identity) with $AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE or $AWS_CONTAINER_AUTHORIZATION_TOKEN
//   5. the machine's role by IMDSv2 at $AWS_EC2_METADATA_SERVICE_ENDPOINT, unless $AWS_EC2_METADATA_DISABLED
//   is
//      "true"
//
// Sources: AWS SDKs and Tools Reference Guide, "Standardized credential providers"; AWS STS API Reference,
// AssumeRoleWithWebIdentity.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "checkpoint/s3/sigv4.h"
#include "net/http/client.h"

namespace gtrain::ckpt {

// Value of an environment variable, nullopt when unset.
using S3Environment = std::function<std::optional<std::string>(const char* name)>;

// Thread-safe. Get() answers from memory until 5 minutes before the keys expire; then, or when it was told
// that they are refused, it looks again (fault S9). That may block for a few seconds, with credential_process
// for a minute, and other callers with it. A look that fails is repeated after a minute as long as the keys
// that are there have not expired.
class CredentialsProvider {
 public:
  virtual ~CredentialsProvider() = default;
  // FailedPrecondition: none were found, or a named source cannot be used; the message says where it looked.
  // Unavailable: a named source does not answer now; ask again.
  virtual absl::StatusOr<S3Credentials> Get() = 0;
  // The server refused these: they expired or were replaced. When looking again finds the same ones, further
  // refusals are not looked into for a minute.
  virtual void Refused(const S3Credentials& credentials) = 0;
};

// `clock` outlives the provider; null: the real one.
std::unique_ptr<CredentialsProvider> DefaultCredentials(S3Environment environment,
                                                        std::shared_ptr<http::Client> http,
                                                        const Clock* clock = nullptr);

// --- what others say, each text from outside (faults B11, B12); DataLoss: not such an answer
struct S3Profile {
  S3Credentials keys;       // empty: it has none
  std::string process;      // credential_process; empty: none
  std::string unsupported;  // a setting that says where keys come from and that gtrain does not know
};
// One profile of a credentials file, or of a config file, which has "[profile NAME]" for all but "default".
// NotFound: no such profile; InvalidArgument names the line.
absl::StatusOr<S3Profile> ParseProfile(absl::string_view text, absl::string_view profile, bool config);
// The answer of IMDS .../iam/security-credentials/ROLE.
absl::StatusOr<S3Credentials> ParseImdsCredentials(absl::string_view text);
// The answer of a container's endpoint.
absl::StatusOr<S3Credentials> ParseContainerCredentials(absl::string_view text);
// The output of a credential_process, Version 1.
absl::StatusOr<S3Credentials> ParseProcessCredentials(absl::string_view text);
// The answer of AssumeRoleWithWebIdentity.
absl::StatusOr<S3Credentials> ParseStsCredentials(absl::string_view xml);

// Whether a container's endpoint may be asked, and be sent its token: https anywhere; http only this machine
// and the addresses that ECS and EKS have for it.
bool IsContainerEndpoint(absl::string_view url);

}  // namespace gtrain::ckpt
