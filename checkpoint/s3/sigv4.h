// AWS Signature Version 4 for S3. Source: AWS General Reference, "Create a signed AWS API request"; S3 signs
// the path encoded once. By hand because the one in libcurl 7.88 signs queries wrongly.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace gtrain::ckpt {

struct S3Credentials {
  std::string access_key;
  std::string secret_key;
  std::string session_token;                    // empty: long-lived keys
  absl::Time expires = absl::InfiniteFuture();  // to be renewed 5 minutes before
};

struct SignedRequest {
  std::string method;  // "PUT"
  std::string host;    // "bucket.s3.eu-central-1.amazonaws.com", with the port if it is not the default
  std::string path;    // "/bucket/key", not encoded
  std::vector<std::pair<std::string, std::string>> query;  // not encoded
  std::map<std::string, std::string> headers;              // lower-case names, beyond those that Sign adds
};

// Lower-case hex of the SHA-256 of the concatenation of `parts`.
std::string Sha256Hex(absl::Span<const absl::string_view> parts);

// For Content-MD5, which some requests must have. Empty where the machine's policy forbids MD5.
std::string Md5Base64(absl::string_view text);

// Percent-encoding of RFC 3986; "/" stays if `keep_slash`.
std::string UriEncode(absl::string_view text, bool keep_slash);
// "uploads=&prefix=a%2Fb", sorted as the signature wants it.
std::string QueryString(const std::vector<std::pair<std::string, std::string>>& query);

// The request's headers with x-amz-date, x-amz-content-sha256, x-amz-security-token and authorization.
std::map<std::string, std::string> Sign(const SignedRequest& request, const S3Credentials& credentials,
                                        absl::string_view region, absl::string_view payload_sha256,
                                        absl::Time now);

}  // namespace gtrain::ckpt
