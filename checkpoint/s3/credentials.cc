#include "checkpoint/s3/credentials.h"

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_macros.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kRenewBefore = absl::Minutes(5);
constexpr size_t kFileBytesMax = 1 << 20;
constexpr size_t kImdsBytesMax = 64 << 10;
constexpr char kImds[] = "http://169.254.169.254";

class Provider final : public CredentialsProvider {
 public:
  Provider(S3Environment environment, std::shared_ptr<http::Client> http)
      : environment_(std::move(environment)), http_(std::move(http)) {}

  absl::StatusOr<S3Credentials> Get() override {
    MutexLock lock(&mu_);
    if (have_ && absl::Now() < credentials_.expires - kRenewBefore) return credentials_;
    absl::StatusOr<S3Credentials> found = Find();
    if (found.ok()) {
      credentials_ = *found;
      have_ = true;
      return credentials_;
    }
    // Keys that are about to expire are better than none.
    if (have_ && absl::Now() < credentials_.expires) return credentials_;
    return found.status();
  }

  void Refused(const S3Credentials& credentials) override {
    MutexLock lock(&mu_);
    if (have_ && credentials_.access_key == credentials.access_key &&
        credentials_.session_token == credentials.session_token) {
      have_ = false;
    }
  }

 private:
  absl::StatusOr<S3Credentials> Find() {
    const auto key = environment_("AWS_ACCESS_KEY_ID"), secret = environment_("AWS_SECRET_ACCESS_KEY");
    if (key.has_value() && secret.has_value() && !key->empty() && !secret->empty()) {
      return S3Credentials{*key, *secret, environment_("AWS_SESSION_TOKEN").value_or("")};
    }
    const std::string profile = environment_("AWS_PROFILE").value_or("default");
    const std::string home = environment_("HOME").value_or("");
    const std::string path =
        environment_("AWS_SHARED_CREDENTIALS_FILE").value_or(home.empty() ? "" : home + "/.aws/credentials");
    std::string looked = "$AWS_ACCESS_KEY_ID is not set";
    if (!path.empty()) {
      absl::StatusOr<std::string> text = ReadFile(path, kFileBytesMax);
      absl::StatusOr<S3Credentials> found =
          text.ok() ? ParseCredentialsFile(*text, profile) : absl::StatusOr<S3Credentials>(text.status());
      if (found.ok()) return found;
      if (absl::IsInvalidArgument(found.status())) {
        return absl::FailedPreconditionError(absl::StrCat(path, ": ", found.status().message()));
      }
      absl::StrAppend(&looked, "; ", path, ": ", found.status().message());
    }
    if (environment_("AWS_EC2_METADATA_DISABLED").value_or("") != "true") {
      absl::StatusOr<S3Credentials> found = FromImds();
      if (found.ok()) return found;
      absl::StrAppend(&looked, "; metadata service: ", found.status().message());
    }
    return absl::FailedPreconditionError(
        absl::StrCat("no S3 credentials: ", looked, ". Ranks get them by `secrets:` in the job file"));
  }

  absl::StatusOr<std::string> Imds(absl::string_view method, absl::string_view path, absl::string_view header,
                                   absl::string_view value) {
    http::Request request;
    request.method = std::string(method);
    request.url = absl::StrCat(environment_("AWS_EC2_METADATA_SERVICE_ENDPOINT").value_or(kImds), path);
    request.headers[std::string(header)] = std::string(value);
    request.timeout = absl::Seconds(1);
    request.reply_bytes_max = kImdsBytesMax;
    request.proxy = false;
    GT_ASSIGN_OR_RETURN(http::Reply reply, http_->Do(request));
    if (reply.status != 200) {
      return absl::UnavailableError(absl::StrCat(method, " ", path, ": HTTP status ", reply.status));
    }
    return std::move(reply.body);
  }

  absl::StatusOr<S3Credentials> FromImds() {
    constexpr char kRoles[] = "/latest/meta-data/iam/security-credentials/";
    GT_ASSIGN_OR_RETURN(const std::string token,
                        Imds("PUT", "/latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds", "21600"));
    GT_ASSIGN_OR_RETURN(const std::string roles, Imds("GET", kRoles, "X-aws-ec2-metadata-token", token));
    const std::vector<absl::string_view> lines = absl::StrSplit(roles, '\n');
    const std::string role(absl::StripAsciiWhitespace(lines[0]));
    if (role.empty()) return absl::NotFoundError("this machine has no role");
    GT_ASSIGN_OR_RETURN(const std::string text, Imds("GET", absl::StrCat(kRoles, UriEncode(role, false)),
                                                     "X-aws-ec2-metadata-token", token));
    return ParseImdsCredentials(text);
  }

  const S3Environment environment_;
  const std::shared_ptr<http::Client> http_;
  Mutex mu_;
  bool have_ ABSL_GUARDED_BY(mu_) = false;
  S3Credentials credentials_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::unique_ptr<CredentialsProvider> DefaultCredentials(S3Environment environment,
                                                        std::shared_ptr<http::Client> http) {
  return std::make_unique<Provider>(std::move(environment), std::move(http));
}

absl::StatusOr<S3Credentials> ParseCredentialsFile(absl::string_view text, absl::string_view profile) {
  S3Credentials found;
  bool inside = false, seen = false;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#' || line[0] == ';') continue;
    if (line[0] == '[') {
      if (line.back() != ']')
        return absl::InvalidArgumentError(absl::StrCat("line ", number, ": \"]\" is missing"));
      inside = absl::StripAsciiWhitespace(line.substr(1, line.size() - 2)) == profile;
      seen = seen || inside;
      continue;
    }
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(line, absl::MaxSplits('=', 1));
    const absl::string_view name = absl::StripAsciiWhitespace(pair.first);
    const std::string value(absl::StripAsciiWhitespace(pair.second));
    if (!inside) continue;
    if (name == "aws_access_key_id") found.access_key = value;
    if (name == "aws_secret_access_key") found.secret_key = value;
    if (name == "aws_session_token") found.session_token = value;
  }
  if (!seen) return absl::NotFoundError(absl::StrCat("no profile \"", profile, "\""));
  if (found.access_key.empty() || found.secret_key.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("profile \"", profile, "\" has no key pair"));
  }
  return found;
}

absl::StatusOr<S3Credentials> ParseImdsCredentials(absl::string_view text) {
  const auto json = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
  if (!json.is_object()) return absl::DataLossError("the role's answer is not a JSON object");
  const auto field = [&](const char* name) {
    const auto it = json.find(name);
    return it != json.end() && it->is_string() ? it->get<std::string>() : "";
  };
  S3Credentials found = {field("AccessKeyId"), field("SecretAccessKey"), field("Token"),
                         absl::InfiniteFuture()};
  std::string error;
  const bool dated = absl::ParseTime(absl::RFC3339_full, field("Expiration"), &found.expires, &error);
  if (field("Code") != "Success" || found.access_key.empty() || found.secret_key.empty() || !dated) {
    return absl::DataLossError("the role's answer has no keys");
  }
  return found;
}

}  // namespace gtrain::ckpt
