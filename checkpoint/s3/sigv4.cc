#include "checkpoint/s3/sigv4.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <array>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"

namespace gtrain::ckpt {
namespace {

std::string Hmac(absl::string_view key, absl::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> out;
  unsigned length = 0;
  GT_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                reinterpret_cast<const unsigned char*>(text.data()), text.size(), out.data(),
                &length) != nullptr);
  return std::string(reinterpret_cast<const char*>(out.data()), length);
}

std::string Hex(absl::string_view bytes) { return absl::BytesToHexString(bytes); }

}  // namespace

std::string Sha256Hex(absl::Span<const absl::string_view> parts) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  std::array<unsigned char, EVP_MAX_MD_SIZE> out;
  unsigned length = 0;
  GT_CHECK(context != nullptr && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1);
  for (const absl::string_view part : parts) {
    GT_CHECK(EVP_DigestUpdate(context.get(), part.data(), part.size()) == 1);
  }
  GT_CHECK(EVP_DigestFinal_ex(context.get(), out.data(), &length) == 1);
  return Hex(absl::string_view(reinterpret_cast<const char*>(out.data()), length));
}

std::string Md5Base64(absl::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> out;
  unsigned length = 0;
  if (EVP_Digest(text.data(), text.size(), out.data(), &length, EVP_md5(), nullptr) != 1) return "";
  return absl::Base64Escape(absl::string_view(reinterpret_cast<const char*>(out.data()), length));
}

std::string UriEncode(absl::string_view text, bool keep_slash) {
  std::string out;
  for (const char c : text) {
    const bool plain = absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' ||
                       c == '.' || c == '~' || (keep_slash && c == '/');
    if (plain) {
      out.push_back(c);
    } else {
      absl::StrAppend(&out, "%", absl::AsciiStrToUpper(Hex(absl::string_view(&c, 1))));
    }
  }
  return out;
}

std::string QueryString(const std::vector<std::pair<std::string, std::string>>& query) {
  std::vector<std::string> pairs;
  for (const auto& [name, value] : query) {
    pairs.push_back(absl::StrCat(UriEncode(name, false), "=", UriEncode(value, false)));
  }
  std::sort(pairs.begin(), pairs.end());
  return absl::StrJoin(pairs, "&");
}

std::map<std::string, std::string> Sign(const SignedRequest& request, const S3Credentials& credentials,
                                        absl::string_view region, absl::string_view payload_sha256,
                                        absl::Time now) {
  const std::string stamp = absl::FormatTime("%Y%m%dT%H%M%SZ", now, absl::UTCTimeZone());
  const std::string day = stamp.substr(0, 8);
  const std::string scope = absl::StrCat(day, "/", region, "/s3/aws4_request");

  std::map<std::string, std::string> headers = request.headers;
  headers["host"] = request.host;
  headers["x-amz-date"] = stamp;
  headers["x-amz-content-sha256"] = std::string(payload_sha256);
  if (!credentials.session_token.empty()) headers["x-amz-security-token"] = credentials.session_token;

  std::string canonical = absl::StrCat(request.method, "\n", UriEncode(request.path, true), "\n",
                                       QueryString(request.query), "\n");
  std::vector<std::string> names;
  for (const auto& [name, value] : headers) {
    absl::StrAppend(&canonical, name, ":", absl::StripAsciiWhitespace(value), "\n");
    names.push_back(name);
  }
  const std::string signed_headers = absl::StrJoin(names, ";");
  absl::StrAppend(&canonical, "\n", signed_headers, "\n", payload_sha256);

  const absl::string_view canonical_view = canonical;
  const std::string to_sign = absl::StrCat("AWS4-HMAC-SHA256\n", stamp, "\n", scope, "\n",
                                           Sha256Hex(absl::MakeConstSpan(&canonical_view, 1)));
  std::string key = Hmac(absl::StrCat("AWS4", credentials.secret_key), day);
  for (const absl::string_view step : {region, absl::string_view("s3"), absl::string_view("aws4_request")}) {
    key = Hmac(key, step);
  }
  headers["authorization"] =
      absl::StrCat("AWS4-HMAC-SHA256 Credential=", credentials.access_key, "/", scope,
                   ",SignedHeaders=", signed_headers, ",Signature=", Hex(Hmac(key, to_sign)));
  return headers;
}

}  // namespace gtrain::ckpt
