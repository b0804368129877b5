// Where S3 keys come from: the environment, the shared credentials file, then the machine's metadata service
// (IMDSv2).
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/s3/sigv4.h"
#include "runtime/http/client.h"

namespace gtrain::ckpt {

// Value of an environment variable, nullopt when unset.
using S3Environment = std::function<std::optional<std::string>(const char* name)>;

// Thread-safe. Get() answers from memory until 5 minutes before the keys expire; then, or when it was told
// that they are refused, it looks again (fault S9), which may block for a few seconds.
class CredentialsProvider {
 public:
  virtual ~CredentialsProvider() = default;
  // FailedPrecondition: none found; the message says where was looked.
  virtual absl::StatusOr<S3Credentials> Get() = 0;
  // The server refused these as expired.
  virtual void Refused(const S3Credentials& credentials) = 0;
};

// $AWS_ACCESS_KEY_ID, $AWS_SECRET_ACCESS_KEY, $AWS_SESSION_TOKEN; else profile $AWS_PROFILE of
// $AWS_SHARED_CREDENTIALS_FILE (~/.aws/credentials); else IMDSv2 at $AWS_EC2_METADATA_SERVICE_ENDPOINT unless
// $AWS_EC2_METADATA_DISABLED is "true".
std::unique_ptr<CredentialsProvider> DefaultCredentials(S3Environment environment,
                                                        std::shared_ptr<http::Client> http);

// One profile of a credentials file. NotFound: no such profile; InvalidArgument names the line.
absl::StatusOr<S3Credentials> ParseCredentialsFile(absl::string_view text, absl::string_view profile);
// The answer of .../iam/security-credentials/ROLE. DataLoss: not such an answer (fault B12).
absl::StatusOr<S3Credentials> ParseImdsCredentials(absl::string_view text);

}  // namespace gtrain::ckpt
