// Three layers, top down: the blob store's calls; requests that are signed, repeated and judged (Exchange);
// multipart uploads.
//
// An answer that never came leaves the outcome of a conditional put unknown, and its repetition (ours, or one
// that libcurl makes silently when a kept connection was dead) may find the key made by the first try. So
// every put carries a random mark in its metadata: a put that finds the key taken looks whose mark it has
// (S3).
#include "checkpoint/s3/s3_store.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/logging.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "checkpoint/s3/crc32c.h"
#include "checkpoint/s3/xml.h"
#include "net/http/curl_client.h"

namespace gtrain::ckpt {
namespace {

constexpr size_t kPartBytesMin = 5 << 20;
constexpr uint64_t kStreamBytesMax = 256 << 20;  // parts of a stream that are in memory together
constexpr size_t kErrorBytesMax = 64 << 10;
constexpr size_t kListBytesMax = 16 << 20;
constexpr size_t kKeysMax = 1'000'000;
constexpr size_t kDeletesMax = 1000;  // in one request
constexpr size_t kListMax = 1000;     // keys of one answer
constexpr size_t kListSpare = 8;      // more than there were last time
constexpr char kChecksum[] = "x-amz-checksum-crc32c";
constexpr char kMark[] = "x-amz-meta-gtrain-put";
constexpr absl::Duration kBackoffMax = absl::Seconds(5);

// Repetitions of the whole process: while a store refuses everything, callers together may not add to its
// load without bound. The bucket refills with success (S1).
class RetryBudget {
 public:
  bool Take() {
    MutexLock lock(&mu_);
    if (tokens_ < kCost) return false;
    tokens_ -= kCost;
    return true;
  }
  void Succeeded() {
    MutexLock lock(&mu_);
    tokens_ = std::min(tokens_ + 1, kMost);
  }

 private:
  static constexpr int kMost = 1000, kCost = 5;
  Mutex mu_;
  int tokens_ ABSL_GUARDED_BY(mu_) = kMost;
};

RetryBudget& ProcessRetryBudget() {
  static auto* budget = new RetryBudget;
  return *budget;
}

struct Call {
  std::string method;
  std::string key;  // with the prefix; empty: the bucket
  std::vector<std::pair<std::string, std::string>> query;
  std::map<std::string, std::string> headers;
  std::vector<absl::string_view> body;
  size_t reply_bytes_max = 1 << 20;
  absl::Span<char> into;
};

struct Answer {
  http::Reply reply;
  std::string code, message;  // of an error's XML
};

// The words of an error for people.
std::string Words(const Answer& answer) {
  return absl::StrCat("HTTP ", answer.reply.status, answer.code.empty() ? "" : " ", answer.code,
                      answer.message.empty() ? "" : ": ", answer.message);
}

// Whether the store may know the keys no more: they expired, or were replaced. The answer to a HEAD has no
// words, so any refusal of one may mean that.
bool RefusesKeys(const Call& call, const Answer& answer) {
  static const std::set<std::string, std::less<>> kCodes = {"ExpiredToken", "InvalidToken",
                                                            "InvalidAccessKeyId"};
  const int status = answer.reply.status;
  return kCodes.contains(answer.code) || (call.method == "HEAD" && (status == 400 || status == 403));
}

class S3Store final : public port::BlobStore {
 public:
  S3Store(S3Options options, std::shared_ptr<http::Client> http,
          std::shared_ptr<CredentialsProvider> credentials)
      : options_(std::move(options)),
        http_(std::move(http)),
        credentials_(std::move(credentials)),
        rng_(Rng::FromSystem()) {
    absl::string_view host = options_.endpoint;
    const bool secure = absl::ConsumePrefix(&host, "https://") || !absl::ConsumePrefix(&host, "http://");
    std::string name =
        host.empty() ? absl::StrCat("s3.", options_.region, ".amazonaws.com") : std::string(host);
    host_ = options_.path_style ? name : absl::StrCat(options_.bucket, ".", name);
    base_ = absl::StrCat(secure ? "https://" : "http://", host_);
    checksums_ = options_.checksums;
    compares_ = secure;                   // TLS does
    proven_ = options_.endpoint.empty();  // Amazon's own store documents that it compares checksums
  }
  using port::BlobStore::PutIfAbsent;

  absl::Status PutIfAbsent(absl::string_view key, absl::Span<const absl::string_view> parts) override {
    GT_RETURN_IF_ERROR(CheckKey(key));
    uint64_t bytes = 0;
    for (const absl::string_view part : parts) bytes += part.size();
    GT_RETURN_IF_ERROR(CheckLength(key, bytes));
    if (bytes <= options_.part_bytes) return PutWhole(key, parts);
    return PutInParts(key, bytes, options_.uploads,
                      [&](uint64_t begin, uint64_t end, std::string*) { return Cut(parts, begin, end); });
  }

  absl::Status PutStream(absl::string_view key, uint64_t bytes, Source source) override {
    GT_RETURN_IF_ERROR(CheckKey(key));
    GT_RETURN_IF_ERROR(CheckLength(key, bytes));
    const auto take = [&](uint64_t begin, uint64_t end,
                          std::string* memory) -> absl::StatusOr<std::vector<absl::string_view>> {
      memory->clear();
      memory->reserve(end - begin);
      GT_RETURN_IF_ERROR(port::TakeFrom(source, begin, end, [&](absl::string_view piece) {
        memory->append(piece.data(), piece.size());
        return absl::OkStatus();
      }));
      return std::vector<absl::string_view>{*memory};
    };
    if (bytes <= options_.part_bytes) {
      std::string memory;
      GT_ASSIGN_OR_RETURN(const std::vector<absl::string_view> whole, take(0, bytes, &memory));
      return PutWhole(key, whole);
    }
    const uint64_t together = kStreamBytesMax / S3PartBytes(bytes, options_.part_bytes, options_.parts_max);
    const int uploads = std::clamp<int>(static_cast<int>(together), 1, options_.uploads);
    return PutInParts(key, bytes, uploads, take);
  }

  uint64_t BytesMax() const override { return kS3BytesMax; }

  // Signed uploads carry the SHA-256 of the data, and the store compares it. A checksum is compared by
  // Amazon's store, and by a store that has refused a wrong checksum.
  bool ChecksEveryPut() const override { return !checksums_ || proven_; }

  absl::StatusOr<std::string> Get(absl::string_view key, size_t bytes_max) override {
    GT_RETURN_IF_ERROR(CheckKey(key));
    Call call = {"GET", Full(key)};
    call.reply_bytes_max = std::max(bytes_max, kErrorBytesMax);
    absl::StatusOr<Answer> answer = Exchange(call);
    if (absl::IsResourceExhausted(answer.status()) ||
        (answer.ok() && answer->reply.status == 200 && answer->reply.body.size() > bytes_max)) {
      return absl::OutOfRangeError(
          absl::StrCat(Name(key), " has more than the ", bytes_max, " bytes that it should have at most"));
    }
    if (!answer.ok()) return answer.status();
    if (answer->reply.status != 200) return Error(call, *answer);
    return std::move(answer->reply.body);
  }

  absl::Status Read(absl::string_view key, uint64_t offset, absl::Span<char> out) override {
    GT_RETURN_IF_ERROR(CheckKey(key));
    if (out.empty() || offset + out.size() < offset) {
      GT_ASSIGN_OR_RETURN(const uint64_t size, Size(key));
      return offset <= size && out.empty() ? absl::OkStatus() : Beyond(key, offset, out.size());
    }
    Call call = {"GET", Full(key)};
    call.headers["range"] = absl::StrCat("bytes=", offset, "-", offset + out.size() - 1);
    call.into = out;
    GT_ASSIGN_OR_RETURN(const Answer answer, Exchange(call));
    const int status = answer.reply.status;
    if (status == 416) return Beyond(key, offset, out.size());
    if (status != 206 && !(status == 200 && offset == 0)) return Error(call, answer);
    if (answer.reply.received != out.size()) return Beyond(key, offset, out.size());
    return absl::OkStatus();
  }

  uint64_t ReadSize() const override { return 4 << 20; }  // each is a request

  absl::StatusOr<uint64_t> Size(absl::string_view key) override {
    GT_RETURN_IF_ERROR(CheckKey(key));
    const Call call = {"HEAD", Full(key)};
    GT_ASSIGN_OR_RETURN(const Answer answer, Exchange(call));
    if (answer.reply.status != 200) return Error(call, answer);
    const auto length = answer.reply.headers.find("content-length");
    uint64_t size = 0;
    if (length == answer.reply.headers.end() || !absl::SimpleAtoi(length->second, &size)) {
      return absl::DataLossError(absl::StrCat(Name(key), ": the store does not say its length"));
    }
    return size;
  }

  absl::StatusOr<std::vector<std::string>> List(absl::string_view prefix) override {
    return Listed(prefix, "", "Contents", "Key");
  }
  // Lists with one request everything that lies between the prefixes: other keys are passed over, or not
  // asked for.
  absl::StatusOr<std::vector<std::string>> ListAll(absl::Span<const absl::string_view> prefixes) override {
    std::vector<std::string> found;
    if (prefixes.empty()) return found;
    std::string before = Full(prefixes.front());  // which may be a key itself
    if (!prefixes.front().empty()) --before.back();
    size_t page_keys = std::clamp<size_t>(listed_ + kListSpare, kListSpare, kListMax);
    std::string token;
    for (bool more = true; more && found.size() < kKeysMax; page_keys = kListMax) {
      Call call = {"GET", "", {{"list-type", "2"}, {"prefix", Full("")}}};
      call.query.push_back({"start-after", before});
      call.query.push_back({"max-keys", absl::StrCat(page_keys)});
      if (!token.empty()) call.query.push_back({"continuation-token", token});
      GT_ASSIGN_OR_RETURN(const XmlElement page, GetXml(call));
      bool past = false;
      for (const XmlElement& entry : page.children) {
        std::string key = entry.Text("Key");
        if (entry.name != "Contents" || !Relative(&key)) continue;
        const auto starts = [&](absl::string_view prefix) { return absl::StartsWith(key, prefix); };
        past = key > prefixes.back() && !starts(prefixes.back());
        if (std::any_of(prefixes.begin(), prefixes.end(), starts)) found.push_back(std::move(key));
      }
      const std::string next = page.Text("NextContinuationToken");
      more = !past && page.Text("IsTruncated") == "true" && !next.empty() && next != token;
      token = next;
    }
    listed_ = found.size();
    std::sort(found.begin(), found.end());
    return found;
  }
  absl::StatusOr<std::vector<std::string>> ListFolders() override {
    GT_ASSIGN_OR_RETURN(std::vector<std::string> folders, Listed("", "/", "CommonPrefixes", "Prefix"));
    for (std::string& folder : folders) {
      if (absl::EndsWith(folder, "/")) folder.pop_back();
    }
    return folders;
  }

  absl::StatusOr<absl::Duration> Unchanged(absl::string_view name) override {
    GT_RETURN_IF_ERROR(CheckKey(name));
    const std::string full = Full(name), inside = absl::StrCat(full, "/");
    absl::Duration youngest = absl::InfiniteDuration();
    std::string token;
    for (bool more = true; more;) {
      Call call = {"GET", "", {{"list-type", "2"}, {"prefix", full}}};
      if (!token.empty()) call.query.push_back({"continuation-token", token});
      absl::Time now;
      GT_ASSIGN_OR_RETURN(const XmlElement page, GetXml(call, &now));
      for (const XmlElement& entry : page.children) {
        const std::string key = entry.Text("Key");
        if (entry.name != "Contents" || (key != full && !absl::StartsWith(key, inside))) continue;
        youngest = std::min(youngest, Age(entry.Text("LastModified"), now));
      }
      const std::string next = page.Text("NextContinuationToken");
      more = page.Text("IsTruncated") == "true" && !next.empty() && next != token;
      token = next;
    }
    if (youngest == absl::InfiniteDuration())
      return absl::NotFoundError(absl::StrCat(Name(name), " does not exist"));
    return youngest;
  }

  absl::Status Delete(absl::string_view key) override {
    GT_RETURN_IF_ERROR(CheckKey(key));
    const Call call = {"DELETE", Full(key)};
    GT_ASSIGN_OR_RETURN(const Answer answer, Exchange(call));
    const int status = answer.reply.status;
    if (status == 204 || status == 200 || answer.code == "NoSuchKey") return absl::OkStatus();
    const absl::Status error = Error(call, answer);
    return absl::IsNotFound(error) ? absl::OkStatus() : error;
  }

  absl::Status DeleteAll(absl::Span<const std::string> keys) override {
    for (const std::string& key : keys) GT_RETURN_IF_ERROR(CheckKey(key));
    for (size_t at = 0; at < keys.size(); at += kDeletesMax) {
      const absl::Span<const std::string> some = keys.subspan(at, kDeletesMax);
      bool gone = false;
      if (some.size() > 1 && deletes_many_) {
        GT_ASSIGN_OR_RETURN(gone, DeleteMany(some));
      }
      if (!gone) GT_RETURN_IF_ERROR(BlobStore::DeleteAll(some));
    }
    return absl::OkStatus();
  }

  bool DeletesTogether() const override { return deletes_many_; }

  absl::Status DropEmptyFolder(absl::string_view) override { return absl::OkStatus(); }

  absl::StatusOr<std::vector<Unfinished>> ListUnfinished() override {
    std::vector<Unfinished> found;
    std::string key_marker, upload_marker;
    for (bool more = true; more && found.size() < kKeysMax;) {
      Call call = {"GET", "", {{"uploads", ""}, {"prefix", Full("")}}};
      if (!key_marker.empty()) {
        call.query.push_back({"key-marker", key_marker});
        call.query.push_back({"upload-id-marker", upload_marker});
      }
      absl::Time now;
      GT_ASSIGN_OR_RETURN(const XmlElement page, GetXml(call, &now));
      for (const XmlElement& upload : page.children) {
        if (upload.name != "Upload") continue;
        std::string key = upload.Text("Key");
        if (!Relative(&key) || upload.Text("UploadId").empty()) continue;
        found.push_back({key, upload.Text("UploadId"), Age(upload.Text("Initiated"), now)});
      }
      more = page.Text("IsTruncated") == "true" && page.Text("NextKeyMarker") > key_marker;
      key_marker = page.Text("NextKeyMarker");
      upload_marker = page.Text("NextUploadIdMarker");
    }
    return found;
  }
  absl::Status DropUnfinished(const Unfinished& unfinished) override {
    GT_RETURN_IF_ERROR(CheckKey(unfinished.key));
    return Abort(Full(unfinished.key), unfinished.handle);
  }

  std::string Describe() const override {
    return absl::StrCat("s3://", options_.bucket, options_.prefix.empty() ? "" : "/", options_.prefix);
  }

 private:
  // --- names
  std::string Full(absl::string_view key) const {
    return absl::StrCat(options_.prefix, options_.prefix.empty() ? "" : "/", key);
  }
  std::string Name(absl::string_view key) const { return absl::StrCat(Describe(), "/", key); }
  absl::Status CheckKey(absl::string_view key) const {
    if (port::IsBlobKey(key)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" is not a key"));
  }
  // Cuts the prefix off; false for what is not a blob of this store.
  bool Relative(std::string* key) const {
    absl::string_view rest = *key;
    if (!absl::ConsumePrefix(&rest, Full("")) || !port::IsBlobKey(rest)) return false;
    *key = std::string(rest);
    return true;
  }
  absl::Status Beyond(absl::string_view key, uint64_t offset, size_t bytes) const {
    return absl::OutOfRangeError(absl::StrCat(Name(key), " ends before ", offset, " + ", bytes, " bytes"));
  }

  absl::Status CheckLength(absl::string_view key, uint64_t bytes) const {
    if (bytes <= BytesMax()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(Name(key), ": ", bytes, " bytes are more than the 5 TiB that an object can have"));
  }
  // `when` is a time of the store ("2030-01-01T00:00:00.000Z"); zero for anything else.
  static absl::Duration Age(const std::string& when, absl::Time now) {
    absl::Time then;
    std::string error;
    if (now == absl::InfinitePast() || !absl::ParseTime(absl::RFC3339_full, when, &then, &error)) {
      return absl::ZeroDuration();
    }
    return std::max(now - then, absl::ZeroDuration());
  }

  // --- requests
  // An answer that is neither lost nor one of those that mean "try again"; Unavailable after the last try.
  absl::StatusOr<Answer> Exchange(const Call& call) {
    const std::string hash = call.headers.contains(kChecksum) ? "UNSIGNED-PAYLOAD" : Sha256Hex(call.body);
    const Instant give_up = clock_->Now() + options_.patience;
    bool renewed = false, shifted = false;
    std::string last;
    for (int attempt = 0;; ++attempt) {
      absl::StatusOr<Answer> answer = Once(call, hash, give_up - clock_->Now());
      if (answer.ok()) {
        if (RefusesKeys(call, *answer) && !renewed) {
          renewed = true;
          continue;  // Once() has told the provider
        }
        if (answer->code == "RequestTimeTooSkewed" && !shifted && LearnClock(answer->reply)) {
          shifted = true;
          continue;
        }
        if (!TryAgain(*answer)) {
          if (answer->reply.status < 500) ProcessRetryBudget().Succeeded();
          return answer;
        }
        last = Words(*answer);
      } else {
        if (!absl::IsUnavailable(answer.status())) return answer.status();
        last = std::string(answer.status().message());
      }
      const absl::Duration pause = Backoff(attempt);
      if (attempt + 1 >= options_.attempts || clock_->Now() + pause >= give_up ||
          !ProcessRetryBudget().Take()) {
        return absl::UnavailableError(absl::StrCat(Describe(), ": ", call.method, " ", call.key, " failed ",
                                                   attempt + 1, " times; the last answer: ", last));
      }
      absl::SleepFor(pause);
    }
  }

  absl::StatusOr<Answer> Once(const Call& call, const std::string& hash, absl::Duration left) {
    GT_ASSIGN_OR_RETURN(const S3Credentials credentials, credentials_->Get());
    SignedRequest to_sign;
    to_sign.method = call.method;
    to_sign.host = host_;
    to_sign.path = absl::StrCat("/", options_.path_style ? options_.bucket : "",
                                options_.path_style && !call.key.empty() ? "/" : "", call.key);
    to_sign.query = call.query;
    to_sign.headers = call.headers;
    http::Request request;
    request.method = call.method;
    request.headers = Sign(to_sign, credentials, options_.region, hash,
                           absl::Now() + absl::Nanoseconds(clock_offset_ns_.load()));
    request.url = absl::StrCat(base_, UriEncode(to_sign.path, true), call.query.empty() ? "" : "?",
                               QueryString(call.query));
    request.body = call.body;
    request.reply_bytes_max = call.reply_bytes_max;
    request.into = call.into;
    request.timeout = std::clamp(left, absl::Seconds(1), options_.patience);
    Answer answer;
    GT_ASSIGN_OR_RETURN(answer.reply, http_->Do(request));
    ReadError(&answer);
    if (RefusesKeys(call, answer)) credentials_->Refused(credentials);
    return answer;
  }

  // A 200 may carry an error, too: CompleteMultipartUpload may fail after its status line left (S2).
  static void ReadError(Answer* answer) {
    if (answer->reply.status == 200 && !absl::StrContains(answer->reply.body, "<Error>")) return;
    const absl::StatusOr<XmlElement> xml = ParseXml(answer->reply.body);
    if (!xml.ok() || xml->name != "Error") return;
    answer->code = xml->Text("Code");
    answer->message = xml->Text("Message");
  }

  static bool TryAgain(const Answer& answer) {
    static const std::set<int> kStatuses = {408, 429, 500, 502, 503, 504};
    static const std::set<std::string, std::less<>> kCodes = {
        "RequestTimeout",           "SlowDown",  "InternalError",
        "OperationAborted",         "BadDigest", "ConditionalRequestConflict",
        "XAmzContentSHA256Mismatch"};  // the last two: changed on the way
    return kStatuses.contains(answer.reply.status) || kCodes.contains(answer.code);
  }

  // The store's clock; InfinitePast where it does not say.
  static absl::Time DateOf(const http::Reply& reply) {
    const auto date = reply.headers.find("date");
    absl::Time server;
    std::string error;
    const bool said = date != reply.headers.end() &&
                      absl::ParseTime("%a, %d %b %Y %H:%M:%S GMT", date->second, &server, &error);
    return said ? server : absl::InfinitePast();
  }

  // The difference between the store's clock and ours, from its answer (S14).
  bool LearnClock(const http::Reply& reply) {
    const absl::Time server = DateOf(reply);
    if (server == absl::InfinitePast()) return false;
    const absl::Duration offset = server - absl::Now();
    LogWarning(Describe(), ": this machine's clock is ",
               absl::FormatDuration(absl::Trunc(-offset, absl::Seconds(1))),
               " ahead of the store's; requests are dated with the store's");
    clock_offset_ns_ = absl::ToInt64Nanoseconds(offset);
    return true;
  }

  absl::Duration Backoff(int attempt) {
    const absl::Duration most = std::min(options_.first_backoff * (1 << std::min(attempt, 10)), kBackoffMax);
    MutexLock lock(&mu_);
    return most * (0.5 + rng_.Unit() / 2);
  }
  std::string NewMark() {
    MutexLock lock(&mu_);
    return absl::StrFormat("%016x%016x", rng_.Next(), rng_.Next());
  }

  absl::Status Error(const Call& call, const Answer& answer) const {
    const std::string what = absl::StrCat(Describe(), ": ", call.method, call.key.empty() ? "" : " ",
                                          call.key, ": ", Words(answer));
    const int status = answer.reply.status;
    if (status == 412) return absl::AlreadyExistsError(what);
    // These are no answers about keys: a job that knows its storage waits for them to be mended.
    if (answer.code == "NoSuchBucket") return absl::PermissionDeniedError(what);
    if (answer.code == "RequestTimeTooSkewed") {
      return absl::PermissionDeniedError(absl::StrCat(what, "; set this machine's clock"));
    }
    if (status == 404) return absl::NotFoundError(what);
    if (status == 401 || status == 403) return absl::PermissionDeniedError(what);
    if (status >= 300 && status < 400) {
      const auto region = answer.reply.headers.find("x-amz-bucket-region");
      return absl::PermissionDeniedError(absl::StrCat(
          what, "; redirects are not followed, the bucket is elsewhere",
          region == answer.reply.headers.end() ? "" : absl::StrCat(": set AWS_REGION=", region->second)));
    }
    if (status == 507) return absl::ResourceExhaustedError(what);
    return absl::UnavailableError(what);
  }

  // `now`, if given, gets the store's clock.
  absl::StatusOr<XmlElement> GetXml(Call call, absl::Time* now = nullptr) {
    call.reply_bytes_max = kListBytesMax;
    GT_ASSIGN_OR_RETURN(const Answer answer, Exchange(call));
    if (answer.reply.status != 200 || !answer.code.empty()) return Error(call, answer);
    if (now != nullptr) *now = DateOf(answer.reply);
    return ParseXml(answer.reply.body);
  }

  absl::StatusOr<std::vector<std::string>> Listed(absl::string_view prefix, absl::string_view delimiter,
                                                  absl::string_view element, absl::string_view field) {
    std::vector<std::string> found;
    std::string token;
    for (bool more = true; more && found.size() < kKeysMax;) {
      Call call = {"GET", "", {{"list-type", "2"}, {"prefix", Full(prefix)}}};
      if (!delimiter.empty()) call.query.push_back({"delimiter", std::string(delimiter)});
      if (!token.empty()) call.query.push_back({"continuation-token", token});
      GT_ASSIGN_OR_RETURN(const XmlElement page, GetXml(call));
      for (const XmlElement& entry : page.children) {
        if (entry.name != element) continue;
        std::string key = entry.Text(field);
        std::string bare = std::string(absl::StripSuffix(key, "/"));
        if (Relative(&bare)) found.push_back(bare);
      }
      const std::string next = page.Text("NextContinuationToken");
      more = page.Text("IsTruncated") == "true" && !next.empty() && next != token;
      token = next;
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  // Deletes all keys with one request. False: not all are gone, and deleting them one by one tells why. Not
  // every store can do this.
  absl::StatusOr<bool> DeleteMany(absl::Span<const std::string> keys) {
    std::string list = "<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Quiet>true</Quiet>";
    for (const std::string& key : keys) absl::StrAppend(&list, "<Object><Key>", Full(key), "</Key></Object>");
    absl::StrAppend(&list, "</Delete>");
    Call call = {"POST", "", {{"delete", ""}}, {{"content-md5", Md5Base64(list)}}, {list}};
    call.reply_bytes_max = kListBytesMax;
    GT_ASSIGN_OR_RETURN(const Answer answer, Exchange(call));
    const absl::StatusOr<XmlElement> result = ParseXml(answer.reply.body);
    const bool understood = answer.reply.status == 200 && result.ok() && result->name == "DeleteResult";
    if (!understood) deletes_many_ = false;
    return understood && result->Child("Error") == nullptr;
  }

  // --- puts
  // Sends what is to be stored, protected on its way; call->headers says how.
  absl::StatusOr<Answer> Send(Call* call) {
    if (!Checksums()) return Exchange(*call);
    return WithChecksum(call, kChecksum, Crc32cBase64(call->body));
  }
  // Not every store knows what checksums are.
  absl::StatusOr<Answer> WithChecksum(Call* call, const char* header, std::string value) {
    call->headers[header] = std::move(value);
    GT_ASSIGN_OR_RETURN(Answer answer, Exchange(*call));
    if (answer.reply.status != 501 && (answer.reply.status != 400 || RefusesKeys(*call, answer)))
      return answer;
    checksums_ = false;
    LogInfo(Describe(), ": the store takes no checksums (", Words(answer), "): uploads are signed instead");
    call->headers.erase(header);
    return Exchange(*call);
  }

  // Where nothing else protects what is put on its way, the store has to prove that it compares.
  bool Checksums() {
    if (!checksums_ || compares_) return checksums_;
    Call call = {"PUT",
                 Full(absl::StrCat("probe-", absl::ToUnixSeconds(absl::Now()), "-", NewMark().substr(16)))};
    const absl::string_view wrong = "wrong";
    call.headers = {{kChecksum, Crc32cBase64(absl::MakeConstSpan(&wrong, 1))}};
    call.body = {"right"};
    const absl::StatusOr<Answer> answer = Once(call, "UNSIGNED-PAYLOAD", options_.patience);
    if (answer.ok() && answer->reply.status == 400 && !RefusesKeys(call, *answer)) {
      compares_ = proven_ = true;
      return true;
    }
    if (answer.ok() && !RefusesKeys(call, *answer) &&
        (answer->reply.status < 500 || answer->reply.status == 501)) {
      checksums_ = false;
      LogWarning(Describe(),
                 ": the store does not compare checksums, and over plain HTTP nothing else protects ",
                 "uploads: they are signed");
      call.method = "DELETE";
      call.body.clear();
      call.headers.clear();
      (void)Exchange(call);  // what stays is `gtrain ckpt gc`'s
    }
    return false;  // and asked again after an answer that says nothing
  }

  // Whether the key exists because of a try of this very put.
  absl::StatusOr<bool> IsOurs(absl::string_view key, const std::string& mark) {
    const Call call = {"HEAD", Full(key)};
    GT_ASSIGN_OR_RETURN(const Answer answer, Exchange(call));
    if (answer.reply.status == 404) return false;
    if (answer.reply.status != 200) return Error(call, answer);
    const auto found = answer.reply.headers.find(kMark);
    return found != answer.reply.headers.end() && found->second == mark;
  }

  absl::Status PutWhole(absl::string_view key, absl::Span<const absl::string_view> parts) {
    Call call = {"PUT", Full(key)};
    const std::string mark = NewMark();
    call.headers = {{"if-none-match", "*"}, {kMark, mark}};
    call.body.assign(parts.begin(), parts.end());
    GT_ASSIGN_OR_RETURN(const Answer answer, Send(&call));
    if (answer.reply.status == 200 && answer.code.empty()) return absl::OkStatus();
    if (answer.reply.status == 412) {
      GT_ASSIGN_OR_RETURN(const bool ours, IsOurs(key, mark));
      if (ours) return absl::OkStatus();
    }
    return Error(call, answer);
  }

  // The bytes [begin, end) of what is put. `memory` is the caller's until the part is sent. Called in
  // ascending order, one at a time.
  using TakePart = absl::FunctionRef<absl::StatusOr<std::vector<absl::string_view>>(
      uint64_t begin, uint64_t end, std::string* memory)>;

  absl::Status PutInParts(absl::string_view key, uint64_t bytes, int uploads, TakePart take) {
    const std::string mark = NewMark(), full = Full(key);
    Call create = {"POST", full, {{"uploads", ""}}};
    create.headers = {{kMark, mark}};
    GT_ASSIGN_OR_RETURN(
        const Answer created,
        Checksums() ? WithChecksum(&create, "x-amz-checksum-algorithm", "CRC32C") : Exchange(create));
    if (created.reply.status != 200 || !created.code.empty()) return Error(create, created);
    GT_ASSIGN_OR_RETURN(const XmlElement xml, ParseXml(created.reply.body));
    const std::string upload = xml.Text("UploadId");
    if (upload.empty()) return absl::DataLossError(absl::StrCat(Name(key), ": the store gave no upload id"));
    absl::Status done = UploadAndComplete(key, full, upload, mark, bytes, uploads, take);
    if (!done.ok()) {
      // Parts cost money until they are aborted (S8); what is left over is found by ListUnfinished.
      if (const absl::Status aborted = Abort(full, upload); !aborted.ok()) {
        LogWarning(Name(key),
                   ": parts of a failed upload remain until the next clean-up: ", aborted.message());
      }
    }
    return done;
  }

  absl::Status UploadAndComplete(absl::string_view key, const std::string& full, const std::string& upload,
                                 const std::string& mark, uint64_t bytes, int uploads, TakePart take) {
    GT_ASSIGN_OR_RETURN(const std::vector<std::string> sent, UploadParts(full, upload, bytes, uploads, take));
    // Not every store honours the condition when an upload is completed; this narrows the gap on those.
    if (Size(key).ok()) return absl::AlreadyExistsError(absl::StrCat(Name(key), " exists"));
    std::string list = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
    for (size_t i = 0; i < sent.size(); ++i)
      absl::StrAppend(&list, "<Part><PartNumber>", i + 1, "</PartNumber>", sent[i], "</Part>");
    absl::StrAppend(&list, "</CompleteMultipartUpload>");
    Call call = {"POST", full, {{"uploadId", upload}}, {{"if-none-match", "*"}}, {list}};
    GT_ASSIGN_OR_RETURN(const Answer answer, Exchange(call));
    if (answer.reply.status == 200 && answer.code.empty()) return absl::OkStatus();
    if (answer.reply.status == 412 || answer.code == "NoSuchUpload") {
      GT_ASSIGN_OR_RETURN(const bool ours, IsOurs(key, mark));
      if (ours) return absl::OkStatus();
    }
    return Error(call, answer);
  }

  // The bytes [begin, end) of the concatenation of `parts`.
  static std::vector<absl::string_view> Cut(absl::Span<const absl::string_view> parts, uint64_t begin,
                                            uint64_t end) {
    std::vector<absl::string_view> out;
    uint64_t at = 0;
    for (const absl::string_view part : parts) {
      const uint64_t from = std::max(begin, at), to = std::min<uint64_t>(end, at + part.size());
      if (from < to) out.push_back(part.substr(from - at, to - from));
      at += part.size();
    }
    return out;
  }

  absl::StatusOr<std::vector<std::string>> UploadParts(const std::string& full, const std::string& upload,
                                                       uint64_t bytes, int uploads, TakePart take) {
    const uint64_t part_bytes = S3PartBytes(bytes, options_.part_bytes, options_.parts_max);
    const uint64_t count = (bytes + part_bytes - 1) / part_bytes;
    std::vector<std::string> sent(count);
    Mutex mu;
    uint64_t next = 0;  // these are the mutex's, and so is `take`
    absl::Status failed;
    const auto work = [&] {
      std::string memory;
      while (true) {
        uint64_t i = 0;
        Call call = {"PUT", full};
        {
          MutexLock lock(&mu);
          if (!failed.ok() || next == count) return;
          i = next++;
          auto body = take(i * part_bytes, std::min(bytes, (i + 1) * part_bytes), &memory);
          failed.Update(body.status());
          if (!body.ok()) return;
          call.body = *std::move(body);
        }
        call.query = {{"partNumber", absl::StrCat(i + 1)}, {"uploadId", upload}};
        absl::StatusOr<std::string> part = UploadPart(std::move(call));
        MutexLock lock(&mu);
        if (part.ok()) sent[i] = *std::move(part);
        failed.Update(part.status());
      }
    };
    std::vector<std::thread> threads;
    for (uint64_t i = 1; i < std::min<uint64_t>(uploads, count); ++i) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
    GT_RETURN_IF_ERROR(failed);
    return sent;
  }

  // Uploads a part and returns its entry for the list of parts.
  absl::StatusOr<std::string> UploadPart(Call call) {
    GT_ASSIGN_OR_RETURN(const Answer answer, Send(&call));
    const auto tag = answer.reply.headers.find("etag");
    if (answer.reply.status != 200 || tag == answer.reply.headers.end()) return Error(call, answer);
    // It goes into XML: only what an ETag consists of.
    for (const char c : tag->second) {
      if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '"' && c != '-') {
        return absl::DataLossError(absl::StrCat(Describe(), ": strange ETag of a part"));
      }
    }
    std::string said = absl::StrCat("<ETag>", tag->second, "</ETag>");
    if (const auto sum = call.headers.find(kChecksum); sum != call.headers.end())
      absl::StrAppend(&said, "<ChecksumCRC32C>", sum->second, "</ChecksumCRC32C>");
    return said;
  }

  absl::Status Abort(const std::string& full, const std::string& upload) {
    const Call call = {"DELETE", full, {{"uploadId", upload}}};
    GT_ASSIGN_OR_RETURN(const Answer answer, Exchange(call));
    if (answer.reply.status == 204 || answer.reply.status == 200 || answer.reply.status == 404)
      return absl::OkStatus();
    return Error(call, answer);
  }

  const RealClock real_clock_;
  const S3Options options_;
  const Clock* const clock_ = options_.clock == nullptr ? &real_clock_ : options_.clock;
  const std::shared_ptr<http::Client> http_;
  const std::shared_ptr<CredentialsProvider> credentials_;
  std::string host_, base_;
  std::atomic<int64_t> clock_offset_ns_{0};
  std::atomic<bool> checksums_{false};
  std::atomic<bool> compares_{false};     // what changes on the way is noticed, by TLS or by the store
  std::atomic<bool> proven_{false};       // the store compares checksums
  std::atomic<bool> deletes_many_{true};  // until it turns out that the store cannot
  std::atomic<size_t> listed_{0};         // by the last ListAll
  Mutex mu_;
  Rng rng_ ABSL_GUARDED_BY(mu_);
};

bool IsBucketName(absl::string_view name) {
  if (name.size() < 3 || name.size() > 63) return false;
  for (const char c : name) {
    if (!absl::ascii_islower(static_cast<unsigned char>(c)) &&
        !absl::ascii_isdigit(static_cast<unsigned char>(c)) && c != '-' && c != '.') {
      return false;
    }
  }
  return name.front() != '.' && name.front() != '-' && name.back() != '.' && name.back() != '-' &&
         !absl::StrContains(name, "..");
}

absl::Status CheckEndpoint(const char* variable, const std::string& endpoint) {
  absl::string_view host = endpoint;
  if (!absl::ConsumePrefix(&host, "https://") && !absl::ConsumePrefix(&host, "http://")) {
    return absl::InvalidArgumentError(
        absl::StrCat("$", variable, ": \"", endpoint, "\" is not http:// or https://"));
  }
  absl::ConsumeSuffix(&host, "/");
  // A metadata service answers with credentials: never a place to send anything (fault X11).
  if (host.empty() || absl::StrContains(host, "/") || absl::StrContains(host, "@") ||
      absl::StartsWith(host, "169.254.") || absl::StartsWithIgnoreCase(host, "[fe80:") ||
      absl::StartsWithIgnoreCase(host, "[fd00:ec2:")) {
    return absl::InvalidArgumentError(
        absl::StrCat("$", variable, ": \"", endpoint, "\" is not an object store"));
  }
  return absl::OkStatus();
}

// Needs the endpoint: where nothing encrypts, the payload itself is signed.
absl::Status ReadPayload(const std::string& payload, S3Options* options) {
  if (!payload.empty() && payload != "signed" && payload != "checksum") {
    return absl::InvalidArgumentError(
        absl::StrCat("$GTRAIN_S3_PAYLOAD: \"", payload, "\" is neither signed nor checksum"));
  }
  if (payload == "checksum" && !HaveCrc32c()) {
    return absl::InvalidArgumentError(
        "$GTRAIN_S3_PAYLOAD: this gtrain was built without ISA-L (libisal-dev) and cannot compute checksums");
  }
  options->checksums = payload.empty() ? HaveCrc32c() && !absl::StartsWith(options->endpoint, "http://")
                                       : payload == "checksum";
  return absl::OkStatus();
}

}  // namespace

uint64_t S3PartBytes(uint64_t bytes, uint64_t part_bytes, uint64_t parts_max) {
  constexpr uint64_t kMiB = 1 << 20;
  const uint64_t least = bytes / parts_max + (bytes % parts_max != 0 ? 1 : 0);
  return std::max(part_bytes, (least + kMiB - 1) / kMiB * kMiB);
}

absl::StatusOr<S3Options> ParseS3Uri(absl::string_view uri, const S3Environment& environment) {
  S3Options options;
  absl::string_view rest = uri;
  if (!absl::ConsumePrefix(&rest, "s3://")) {
    return absl::InvalidArgumentError(absl::StrCat("\"", uri, "\" does not start with s3://"));
  }
  const size_t slash = rest.find('/');
  options.bucket = std::string(rest.substr(0, slash));
  absl::string_view prefix = slash == absl::string_view::npos ? "" : rest.substr(slash + 1);
  while (absl::ConsumeSuffix(&prefix, "/")) {
  }
  options.prefix = std::string(prefix);
  if (!IsBucketName(options.bucket)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", uri, "\": \"", options.bucket,
                     "\" is not a bucket name (3 to 63 lower-case letters, digits, \"-\" and \".\")"));
  }
  if (!prefix.empty() && !port::IsBlobKey(prefix)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", uri, "\": a prefix has parts of letters, digits, \".\", \"_\" and \"-\""));
  }
  for (const char* name : {"AWS_DEFAULT_REGION", "AWS_REGION"}) {
    if (const std::string region = environment(name).value_or(""); !region.empty()) options.region = region;
  }
  for (const char* name : {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}) {
    const std::string endpoint = environment(name).value_or("");
    if (endpoint.empty()) continue;
    GT_RETURN_IF_ERROR(CheckEndpoint(name, endpoint));
    options.endpoint = std::string(absl::StripSuffix(endpoint, "/"));
  }
  options.path_style = !options.endpoint.empty() || absl::StrContains(options.bucket, ".");
  const std::string addressing = environment("GTRAIN_S3_ADDRESSING").value_or("");
  if (!addressing.empty() && addressing != "path" && addressing != "virtual") {
    return absl::InvalidArgumentError(
        absl::StrCat("$GTRAIN_S3_ADDRESSING: \"", addressing, "\" is neither path nor virtual"));
  }
  if (!addressing.empty()) options.path_style = addressing == "path";
  GT_RETURN_IF_ERROR(ReadPayload(environment("GTRAIN_S3_PAYLOAD").value_or(""), &options));
  return options;
}

absl::StatusOr<std::unique_ptr<port::BlobStore>> OpenS3Store(
    const S3Options& options, std::shared_ptr<http::Client> http,
    std::shared_ptr<CredentialsProvider> credentials) {
  if (options.part_bytes < kPartBytesMin || options.uploads < 1 || options.attempts < 1 ||
      options.parts_max < 1 || options.parts_max > 10'000 || options.patience < absl::Seconds(1)) {
    return absl::InvalidArgumentError(
        "S3: parts are at least 5 MiB and 10,000 at most, uploads and attempts at least 1, the patience at "
        "least 1 s");
  }
  return std::make_unique<S3Store>(options, std::move(http), std::move(credentials));
}

absl::StatusOr<std::unique_ptr<port::BlobStore>> OpenS3Store(absl::string_view uri,
                                                             const S3Environment& environment) {
  GT_ASSIGN_OR_RETURN(const S3Options options, ParseS3Uri(uri, environment));
  GT_ASSIGN_OR_RETURN(std::shared_ptr<http::Client> http,
                      http::MakeCurlClient(environment("AWS_CA_BUNDLE").value_or("")));
  return OpenS3Store(options, http, DefaultCredentials(environment, http));
}

}  // namespace gtrain::ckpt
