#include "checkpoint/s3/credentials.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "checkpoint/s3/run_process.h"
#include "checkpoint/s3/xml.h"

namespace gtrain::ckpt {
namespace {

constexpr absl::Duration kRenewBefore = absl::Minutes(5);
constexpr absl::Duration kLookAgain = absl::Minutes(1);  // after a look that brought nothing new
constexpr absl::Duration kProcessTimeout = absl::Minutes(1);
constexpr size_t kFileBytesMax = 1 << 20;
constexpr size_t kTokenBytesMax = 64 << 10;
constexpr size_t kReplyBytesMax = 64 << 10;
constexpr char kImds[] = "http://169.254.169.254";
constexpr char kEcs[] = "http://169.254.170.2";

bool Same(const S3Credentials& a, const S3Credentials& b) {
  return a.access_key == b.access_key && a.secret_key == b.secret_key && a.session_token == b.session_token;
}

// The host of "http://host:port/path"; empty: there is none, or a user's name before it.
absl::string_view HostOf(absl::string_view url) {
  const size_t begin = url.find("://");
  if (begin == absl::string_view::npos) return "";
  absl::string_view host = url.substr(begin + 3);
  host = host.substr(0, host.find_first_of("/?#"));
  if (absl::StrContains(host, "@")) return "";
  if (absl::StartsWith(host, "[")) return host.substr(0, host.find(']') + 1);
  return host.substr(0, host.find(':'));
}

bool IsLoopback(absl::string_view host) {
  if (host == "localhost" || host == "[::1]") return true;
  const std::vector<absl::string_view> parts = absl::StrSplit(host, '.');
  return parts.size() == 4 && parts[0] == "127" && absl::c_all_of(parts, [](absl::string_view part) {
           unsigned number = 0;
           return part.size() <= 3 && absl::SimpleAtoi(part, &number) && number < 256 && part[0] != '+';
         });
}

// Text that becomes a header's value.
bool IsHeaderValue(absl::string_view text) {
  return absl::c_all_of(text, [](char c) { return c >= ' ' && c <= '~'; });
}

// Times are "2030-01-01T00:00:00Z", with or without fractions.
bool ParseExpiry(const std::string& text, absl::Time* expires) {
  std::string error;
  return absl::ParseTime(absl::RFC3339_full, text, expires, &error);
}

class JsonFields {
 public:
  static absl::StatusOr<JsonFields> Parse(absl::string_view text, absl::string_view what) {
    JsonFields fields;
    fields.json_ = nlohmann::json::parse(text.begin(), text.end(), nullptr, false);
    if (!fields.json_.is_object()) return absl::DataLossError(absl::StrCat(what, " is not a JSON object"));
    return fields;
  }
  // A string; empty: absent or something else.
  std::string operator[](const char* name) const {
    const auto it = json_.find(name);
    return it != json_.end() && it->is_string() ? it->get<std::string>() : "";
  }
  bool Has(const char* name) const { return json_.contains(name); }
  bool IsOne(const char* name) const {
    const auto it = json_.find(name);
    return it != json_.end() && it->is_number_integer() && *it == 1;
  }

 private:
  nlohmann::json json_;
};

// Keys that expire, complete, whose values can be sent.
absl::StatusOr<S3Credentials> Whole(S3Credentials found, const std::string& expires, absl::string_view what) {
  const bool dated = ParseExpiry(expires, &found.expires);
  const bool printable = IsHeaderValue(found.access_key) && IsHeaderValue(found.session_token);
  if (dated && printable && !found.access_key.empty() && !found.secret_key.empty()) return found;
  return absl::DataLossError(absl::StrCat(what, " has no keys"));
}

// `section`: between the brackets.
bool IsSectionOf(absl::string_view section, absl::string_view profile, bool config) {
  absl::string_view name = absl::StripAsciiWhitespace(section);
  const bool prefixed = config && absl::ConsumePrefix(&name, "profile ");
  name = absl::StripAsciiWhitespace(name);
  return name == profile && (!config || prefixed || name == "default");
}

// A line "name = value" of a profile.
void ReadSetting(absl::string_view line, S3Profile* profile) {
  const std::pair<absl::string_view, absl::string_view> pair = absl::StrSplit(line, absl::MaxSplits('=', 1));
  const absl::string_view name = absl::StripAsciiWhitespace(pair.first);
  const std::string value(absl::StripAsciiWhitespace(pair.second));
  if (name == "aws_access_key_id") profile->keys.access_key = value;
  if (name == "aws_secret_access_key") profile->keys.secret_key = value;
  if (name == "aws_session_token") profile->keys.session_token = value;
  if (name == "credential_process") profile->process = value;
  if (name == "role_arn" || name == "sso_session" || name == "sso_start_url")
    profile->unsupported = std::string(name);
}

class Provider final : public CredentialsProvider {
 public:
  Provider(S3Environment environment, std::shared_ptr<http::Client> http, const Clock* clock)
      : environment_(std::move(environment)),
        http_(std::move(http)),
        clock_(clock == nullptr ? &real_clock_ : clock) {}

  absl::StatusOr<S3Credentials> Get() override {
    MutexLock lock(&mu_);
    const Instant now = clock_->Now();
    if (have_ && !refused_ && now < renew_at_) return credentials_;
    absl::StatusOr<S3Credentials> found = Find();
    if (found.ok()) {
      futile_until_ = refused_ && Same(*found, credentials_) ? now + kLookAgain : Instant();
      Take(*std::move(found), now);
      return credentials_;
    }
    // Keys that are about to expire are better than none.
    if (have_ && !refused_ && now < expires_at_) {
      renew_at_ = now + kLookAgain;
      return credentials_;
    }
    return found.status();
  }

  void Refused(const S3Credentials& credentials) override {
    MutexLock lock(&mu_);
    if (have_ && Same(credentials_, credentials) && clock_->Now() >= futile_until_) refused_ = true;
  }

 private:
  // From here on the monotonic clock counts: the time of day may be set meanwhile. Keys that a wrong time of
  // day makes look expired are not asked for with every request.
  void Take(S3Credentials found, Instant now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    constexpr absl::Duration kForEver = absl::Hours(24 * 365 * 10);
    const absl::Duration life = std::min(found.expires - clock_->WallNow(), kForEver);
    credentials_ = std::move(found);
    have_ = true;
    refused_ = false;
    expires_at_ = now + std::max(life, absl::ZeroDuration());
    renew_at_ = now + std::max(life - kRenewBefore, kLookAgain);
  }

  std::string Value(const char* name) const { return environment_(name).value_or(""); }

  absl::StatusOr<S3Credentials> Find() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const std::string key = Value("AWS_ACCESS_KEY_ID"), secret = Value("AWS_SECRET_ACCESS_KEY");
    if (!key.empty() && !secret.empty()) return S3Credentials{key, secret, Value("AWS_SESSION_TOKEN")};
    const std::string token_file = Value("AWS_WEB_IDENTITY_TOKEN_FILE"), role = Value("AWS_ROLE_ARN");
    if (!token_file.empty() && !role.empty()) {
      return Named("$AWS_WEB_IDENTITY_TOKEN_FILE", FromWebIdentity(token_file, role));
    }
    std::string looked = "$AWS_ACCESS_KEY_ID is not set";
    absl::StatusOr<S3Credentials> profile = FromProfile(&looked);
    if (!absl::IsNotFound(profile.status())) return profile;
    if (!Value("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").empty() ||
        !Value("AWS_CONTAINER_CREDENTIALS_FULL_URI").empty()) {
      return Named("$AWS_CONTAINER_CREDENTIALS_..._URI", FromContainer());
    }
    bool had = false;
    if (Value("AWS_EC2_METADATA_DISABLED") != "true") {
      absl::StatusOr<S3Credentials> found = FromImds();
      if (found.ok()) imds_answered_ = true;
      if (found.ok()) return found;
      had = imds_answered_;
      absl::StrAppend(&looked, "; metadata service: ", found.status().message());
    }
    const std::string none =
        absl::StrCat("no S3 credentials: ", looked, ". Ranks get them by `secrets:` in the job file");
    return had ? absl::UnavailableError(none) : absl::FailedPreconditionError(none);
  }

  // An error of a named source is reported as such. Unavailable may pass; the rest does not.
  static absl::StatusOr<S3Credentials> Named(absl::string_view name, absl::StatusOr<S3Credentials> found) {
    if (found.ok()) return found;
    const std::string why = absl::StrCat("no S3 credentials by ", name, ": ", found.status().message());
    const bool passes = absl::IsUnavailable(found.status()) || absl::IsDeadlineExceeded(found.status());
    return passes ? absl::UnavailableError(why) : absl::FailedPreconditionError(why);
  }

  // --- 2. web identity
  absl::StatusOr<S3Credentials> FromWebIdentity(const std::string& token_file, const std::string& role) {
    GT_ASSIGN_OR_RETURN(const std::string endpoint, StsEndpoint());
    GT_ASSIGN_OR_RETURN(const std::string text,
                        ReadFile(token_file, kTokenBytesMax));  // which changes each hour
    const std::string session = Value("AWS_ROLE_SESSION_NAME");
    // In the body: what is in a URL gets into logs.
    const std::string body =
        QueryString({{"Action", "AssumeRoleWithWebIdentity"},
                     {"RoleArn", role},
                     {"RoleSessionName", session.empty() ? "gtrain" : session},
                     {"Version", "2011-06-15"},
                     {"WebIdentityToken", std::string(absl::StripAsciiWhitespace(text))}});
    http::Request request;
    request.method = "POST";
    request.url = endpoint + "/";
    request.headers = {{"content-type", "application/x-www-form-urlencoded"}, {"accept", "text/xml"}};
    request.body = {body};
    request.timeout = absl::Seconds(10);
    request.reply_bytes_max = kReplyBytesMax;
    GT_ASSIGN_OR_RETURN(const http::Reply reply, http_->Do(request));
    if (reply.status == 200) return ParseStsCredentials(reply.body);
    std::string why = absl::StrCat(endpoint, " says HTTP ", reply.status);
    std::string code;
    if (const auto xml = ParseXml(reply.body); xml.ok()) {
      if (const XmlElement* error = xml->Child("Error"); error != nullptr) {
        code = error->Text("Code");
        absl::StrAppend(&why, " ", code, ": ", error->Text("Message"));
      }
    }
    const bool passes = reply.status >= 500 || reply.status == 429 || absl::StrContains(code, "Throttl") ||
                        code == "IDPCommunicationError";
    return passes ? absl::UnavailableError(why) : absl::PermissionDeniedError(why);
  }

  // The token is as good as keys: it goes nowhere in the clear but to this machine (tests).
  absl::StatusOr<std::string> StsEndpoint() const {
    const std::string own = Value("AWS_ENDPOINT_URL_STS");
    if (!own.empty()) {
      const bool https = absl::StartsWith(own, "https://") && !HostOf(own).empty();
      if (https || (absl::StartsWith(own, "http://") && IsLoopback(HostOf(own))))
        return std::string(absl::StripSuffix(own, "/"));
      return absl::InvalidArgumentError(absl::StrCat("$AWS_ENDPOINT_URL_STS: \"", own, "\" is not https://"));
    }
    std::string region = Value("AWS_REGION");
    if (region.empty()) region = Value("AWS_DEFAULT_REGION");
    if (region.empty()) region = "us-east-1";
    const bool plain = absl::c_all_of(
        region, [](char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-'; });
    if (!plain) return absl::InvalidArgumentError(absl::StrCat("$AWS_REGION: \"", region, "\" is no region"));
    return absl::StrCat("https://sts.", region, ".amazonaws.com",
                        absl::StartsWith(region, "cn-") ? ".cn" : "");
  }

  // --- 3. profile
  static bool SaysNothing(const S3Profile& profile) {
    return profile.keys.access_key.empty() && profile.process.empty() && profile.unsupported.empty();
  }

  // Reads one of the two files. The profile is empty where the file cannot be read or does not have it;
  // `looked` gets the reason.
  absl::StatusOr<S3Profile> ReadProfile(bool config, const std::string& profile, std::string* looked) const {
    std::string path = Value(config ? "AWS_CONFIG_FILE" : "AWS_SHARED_CREDENTIALS_FILE");
    if (path.empty() && !Value("HOME").empty())
      path = absl::StrCat(Value("HOME"), config ? "/.aws/config" : "/.aws/credentials");
    if (path.empty()) return S3Profile();
    const absl::StatusOr<std::string> text = ReadFile(path, kFileBytesMax);
    absl::StatusOr<S3Profile> parsed =
        text.ok() ? ParseProfile(*text, profile, config) : absl::StatusOr<S3Profile>(text.status());
    if (absl::IsInvalidArgument(parsed.status())) {
      return absl::FailedPreconditionError(absl::StrCat(path, ": ", parsed.status().message()));
    }
    if (!parsed.ok()) {
      absl::StrAppend(looked, "; ", path, ": ", parsed.status().message());
      return S3Profile();
    }
    if (SaysNothing(*parsed))
      absl::StrAppend(looked, "; ", path, ": profile \"", profile, "\" has no key pair");
    return parsed;
  }

  // NotFound: neither file has it; `looked` gets why.
  absl::StatusOr<S3Credentials> FromProfile(std::string* looked) {
    const std::string asked = Value("AWS_PROFILE");
    const std::string profile = asked.empty() ? "default" : asked;
    GT_ASSIGN_OR_RETURN(const S3Profile shared, ReadProfile(false, profile, looked));
    GT_ASSIGN_OR_RETURN(const S3Profile config, ReadProfile(true, profile, looked));
    if (SaysNothing(shared) && SaysNothing(config)) return absl::NotFoundError("no profile");
    if (!shared.keys.access_key.empty()) return shared.keys;
    const std::string& process = shared.process.empty() ? config.process : shared.process;
    const std::string& unsupported = shared.unsupported.empty() ? config.unsupported : shared.unsupported;
    if (process.empty() && !unsupported.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("no S3 credentials: profile \"", profile, "\" has ", unsupported,
                       ", which gtrain does not know. Give ",
                       "it a credential_process, for example \"aws configure export-credentials --format "
                       "process --profile ",
                       "...\" of another profile"));
    }
    if (process.empty()) return config.keys;
    return Named(absl::StrCat("credential_process of profile \"", profile, "\""), FromProcess(process));
  }

  static absl::StatusOr<S3Credentials> FromProcess(const std::string& command) {
    GT_ASSIGN_OR_RETURN(const std::vector<std::string> words, SplitCommand(command));
    GT_ASSIGN_OR_RETURN(const std::string text, RunProcess(words, kProcessTimeout, kReplyBytesMax));
    return ParseProcessCredentials(text);
  }

  // --- 4. container
  absl::StatusOr<S3Credentials> FromContainer() {
    const std::string relative = Value("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    http::Request request;
    request.url =
        relative.empty() ? Value("AWS_CONTAINER_CREDENTIALS_FULL_URI") : absl::StrCat(kEcs, relative);
    if (!relative.empty() && relative[0] != '/') {
      return absl::InvalidArgumentError(absl::StrCat("\"", relative, "\" does not begin with a \"/\""));
    }
    if (!IsContainerEndpoint(request.url)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", request.url, "\" is neither https nor an address of this machine, of ECS or EKS"));
    }
    std::string token = Value("AWS_CONTAINER_AUTHORIZATION_TOKEN");
    if (const std::string path = Value("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); !path.empty()) {
      GT_ASSIGN_OR_RETURN(token, ReadFile(path, kTokenBytesMax));
      token = std::string(absl::StripAsciiWhitespace(token));
    }
    if (!IsHeaderValue(token))
      return absl::InvalidArgumentError("the authorization token is not one line of text");
    if (!token.empty()) request.headers["authorization"] = token;
    request.headers["accept"] = "application/json";
    request.timeout = absl::Seconds(5);
    request.reply_bytes_max = kReplyBytesMax;
    request.proxy = false;
    GT_ASSIGN_OR_RETURN(const http::Reply reply, http_->Do(request));
    if (reply.status == 200) return ParseContainerCredentials(reply.body);
    const std::string why = absl::StrCat(request.url, " says HTTP ", reply.status);
    return reply.status >= 500 || reply.status == 429 ? absl::UnavailableError(why)
                                                      : absl::PermissionDeniedError(why);
  }

  // --- 5. the machine
  absl::StatusOr<std::string> Imds(absl::string_view method, absl::string_view path, absl::string_view header,
                                   absl::string_view value) {
    http::Request request;
    request.method = std::string(method);
    request.url = absl::StrCat(environment_("AWS_EC2_METADATA_SERVICE_ENDPOINT").value_or(kImds), path);
    request.headers[std::string(header)] = std::string(value);
    request.timeout = absl::Seconds(1);
    request.reply_bytes_max = kReplyBytesMax;
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

  const RealClock real_clock_;
  const S3Environment environment_;
  const std::shared_ptr<http::Client> http_;
  const Clock* const clock_;
  Mutex mu_;
  bool have_ ABSL_GUARDED_BY(mu_) = false;
  bool refused_ ABSL_GUARDED_BY(mu_) = false;  // of what is there
  bool imds_answered_ ABSL_GUARDED_BY(mu_) = false;
  Instant renew_at_ ABSL_GUARDED_BY(mu_), expires_at_ ABSL_GUARDED_BY(mu_);
  Instant futile_until_ ABSL_GUARDED_BY(mu_);  // before it refusals change nothing
  S3Credentials credentials_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::unique_ptr<CredentialsProvider> DefaultCredentials(S3Environment environment,
                                                        std::shared_ptr<http::Client> http,
                                                        const Clock* clock) {
  return std::make_unique<Provider>(std::move(environment), std::move(http), clock);
}

absl::StatusOr<S3Profile> ParseProfile(absl::string_view text, absl::string_view profile, bool config) {
  S3Profile found;
  bool inside = false, seen = false;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    const bool nested = !line.empty() && absl::ascii_isspace(static_cast<unsigned char>(line[0]));
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#' || line[0] == ';') continue;
    if (line[0] == '[') {
      if (line.back() != ']')
        return absl::InvalidArgumentError(absl::StrCat("line ", number, ": \"]\" is missing"));
      inside = IsSectionOf(line.substr(1, line.size() - 2), profile, config);
      seen = seen || inside;
      continue;
    }
    if (inside && !(nested && config)) ReadSetting(line, &found);  // "s3 =" has lines of its own below it
  }
  if (!seen) return absl::NotFoundError(absl::StrCat("no profile \"", profile, "\""));
  if (found.keys.access_key.empty() != found.keys.secret_key.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("profile \"", profile, "\" has half a key pair"));
  }
  return found;
}

absl::StatusOr<S3Credentials> ParseImdsCredentials(absl::string_view text) {
  constexpr char kWhat[] = "the role's answer";
  GT_ASSIGN_OR_RETURN(const JsonFields json, JsonFields::Parse(text, kWhat));
  if (json["Code"] != "Success") return absl::DataLossError(absl::StrCat(kWhat, " has no keys"));
  return Whole({json["AccessKeyId"], json["SecretAccessKey"], json["Token"]}, json["Expiration"], kWhat);
}

absl::StatusOr<S3Credentials> ParseContainerCredentials(absl::string_view text) {
  constexpr char kWhat[] = "the container's answer";
  GT_ASSIGN_OR_RETURN(const JsonFields json, JsonFields::Parse(text, kWhat));
  return Whole({json["AccessKeyId"], json["SecretAccessKey"], json["Token"]}, json["Expiration"], kWhat);
}

absl::StatusOr<S3Credentials> ParseProcessCredentials(absl::string_view text) {
  constexpr char kWhat[] = "what it wrote";
  GT_ASSIGN_OR_RETURN(const JsonFields json, JsonFields::Parse(text, kWhat));
  if (!json.IsOne("Version")) return absl::DataLossError(absl::StrCat(kWhat, " is not of Version 1"));
  const bool expires = json.Has("Expiration");
  GT_ASSIGN_OR_RETURN(S3Credentials found,
                      Whole({json["AccessKeyId"], json["SecretAccessKey"], json["SessionToken"]},
                            expires ? json["Expiration"] : "2000-01-01T00:00:00Z", kWhat));
  if (!expires) found.expires = absl::InfiniteFuture();
  return found;
}

absl::StatusOr<S3Credentials> ParseStsCredentials(absl::string_view xml) {
  constexpr char kWhat[] = "the answer of STS";
  GT_ASSIGN_OR_RETURN(const XmlElement answer, ParseXml(xml));
  const XmlElement* const result = answer.Child("AssumeRoleWithWebIdentityResult");
  const XmlElement* const keys = result == nullptr ? nullptr : result->Child("Credentials");
  if (answer.name != "AssumeRoleWithWebIdentityResponse" || keys == nullptr)
    return absl::DataLossError(absl::StrCat(kWhat, " has no keys"));
  return Whole({keys->Text("AccessKeyId"), keys->Text("SecretAccessKey"), keys->Text("SessionToken")},
               keys->Text("Expiration"), kWhat);
}

bool IsContainerEndpoint(absl::string_view url) {
  const absl::string_view host = HostOf(url);
  if (host.empty()) return false;
  if (absl::StartsWith(url, "https://")) return true;
  return absl::StartsWith(url, "http://") && (IsLoopback(host) || host == "169.254.170.2" ||
                                              host == "169.254.170.23" || host == "[fd00:ec2::23]");
}

}  // namespace gtrain::ckpt
