#include "checkpoint/s3/s3_fake.h"

#include <microhttpd.h>

#include <algorithm>
#include <cstdlib>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "checkpoint/s3/crc32c.h"
#include "checkpoint/s3/xml.h"

namespace gtrain::ckpt {
namespace {

std::string Value(const std::map<std::string, std::string>& map, const std::string& name) {
  const auto it = map.find(name);
  return it == map.end() ? "" : it->second;
}

// Prints a time as S3 does in listings.
std::string Made(absl::Duration ago) {
  return absl::FormatTime("%E4Y-%m-%dT%H:%M:%E3SZ", absl::Now() - ago, absl::UTCTimeZone());
}

MHD_Result Collect(void* out, MHD_ValueKind, const char* name, const char* value) {
  (*static_cast<std::map<std::string, std::string>*>(out))[name] = value == nullptr ? "" : value;
  return MHD_YES;
}
MHD_Result CollectHeader(void* out, MHD_ValueKind, const char* name, const char* value) {
  (*static_cast<std::map<std::string, std::string>*>(out))[absl::AsciiStrToLower(name)] =
      value == nullptr ? "" : value;
  return MHD_YES;
}

ssize_t Drip(void*, uint64_t, char* out, size_t) {
  absl::SleepFor(absl::Milliseconds(100));
  *out = ' ';
  return 1;
}

MHD_Result Send(MHD_Connection* connection, const S3FakeReply& reply) {
  if (reply.lost) return MHD_NO;
  MHD_Response* response =
      reply.slow ? MHD_create_response_from_callback(1 << 30, 1, &Drip, nullptr, nullptr)
                 : MHD_create_response_from_buffer(reply.body.size(), const_cast<char*>(reply.body.data()),
                                                   MHD_RESPMEM_MUST_COPY);
  for (const auto& [name, value] : reply.headers)
    MHD_add_response_header(response, name.c_str(), value.c_str());
  const MHD_Result queued = MHD_queue_response(connection, static_cast<unsigned>(reply.status), response);
  MHD_destroy_response(response);
  return queued;
}

MHD_Result Serve(void* user, MHD_Connection* connection, const char* url, const char* method, const char*,
                 const char* data, size_t* bytes, void** state) {
  if (*state == nullptr) {
    auto* request = new S3FakeRequest;
    request->method = method;
    request->path = url;
    MHD_get_connection_values(connection, MHD_GET_ARGUMENT_KIND, &Collect, &request->query);
    MHD_get_connection_values(connection, MHD_HEADER_KIND, &CollectHeader, &request->headers);
    *state = request;
    return MHD_YES;
  }
  auto* request = static_cast<S3FakeRequest*>(*state);
  if (*bytes > 0) {
    request->body.append(data, *bytes);
    *bytes = 0;
    return MHD_YES;
  }
  return Send(connection, static_cast<S3Fake*>(user)->Handle(std::move(*request)));
}

void Over(void*, MHD_Connection*, void** state, MHD_RequestTerminationCode) {
  delete static_cast<S3FakeRequest*>(*state);
  *state = nullptr;
}

}  // namespace

std::string S3FakeRequest::Operation() const {
  const bool bucket = absl::c_count(path, '/') < 2;
  if (query.contains("uploads")) return method == "POST" ? "Create" : "Uploads";
  if (query.contains("partNumber")) return "Part";
  if (query.contains("uploadId")) return method == "POST" ? "Complete" : "Abort";
  if (query.contains("delete")) return "DeleteMany";
  if (bucket) return "List";
  if (method == "PUT") return "PutObject";
  if (method == "HEAD") return "HeadObject";
  return method == "DELETE" ? "DeleteObject" : "GetObject";
}

S3FakeReply S3Error(int status, const std::string& code, const std::string& message) {
  return {status,
          {},
          absl::StrCat("<?xml version=\"1.0\"?><Error><Code>", code, "</Code><Message>", message,
                       "</Message></Error>")};
}

S3Fake::S3Fake(Settings settings) : settings_(std::move(settings)) {
  daemon_ =
      MHD_start_daemon(MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD, 0, nullptr, nullptr,
                       &Serve, this, MHD_OPTION_NOTIFY_COMPLETED, &Over, nullptr, MHD_OPTION_END);
  GT_CHECK(daemon_ != nullptr);
  port_ = MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_BIND_PORT)->port;
}
S3Fake::~S3Fake() { MHD_stop_daemon(daemon_); }

std::string S3Fake::endpoint() const { return absl::StrCat("http://127.0.0.1:", port_); }

std::vector<std::string> S3Fake::Operations() const {
  MutexLock lock(&mu_);
  return operations_;
}
size_t S3Fake::OpenUploads() const {
  MutexLock lock(&mu_);
  return uploads_.size();
}

// Signature, date and payload hash, as a real server checks them.
bool S3Fake::Refuses(const S3FakeRequest& request, S3FakeReply* reply) const {
  SignedRequest rebuilt;
  rebuilt.method = request.method;
  rebuilt.host = Value(request.headers, "host");
  rebuilt.path = request.path;
  rebuilt.query.assign(request.query.begin(), request.query.end());
  const std::string given = Value(request.headers, "authorization");
  const size_t names_at = given.find("SignedHeaders="), region_at = given.find('/');
  const std::string payload = Value(request.headers, "x-amz-content-sha256");
  absl::Time dated;
  std::string error;
  if (names_at == std::string::npos || region_at == std::string::npos ||
      !absl::ParseTime("%E4Y%m%dT%H%M%SZ", Value(request.headers, "x-amz-date"), &dated, &error)) {
    *reply = S3Error(403, "AccessDenied", "not signed");
    return true;
  }
  const std::string names = given.substr(names_at + 14, given.find(',', names_at) - names_at - 14);
  for (const absl::string_view name : absl::StrSplit(names, ';')) {
    rebuilt.headers[std::string(name)] = Value(request.headers, std::string(name));
  }
  const std::vector<std::string> scope = absl::StrSplit(given, '/');
  S3Credentials credentials = settings_.credentials;
  if (Sign(rebuilt, credentials, scope[2], payload, dated)["authorization"] != given) {
    *reply = S3Error(403, "SignatureDoesNotMatch");
    return true;
  }
  const absl::string_view body = request.body;
  if (payload != "UNSIGNED-PAYLOAD" && Sha256Hex(absl::MakeConstSpan(&body, 1)) != payload) {
    *reply = S3Error(400, "XAmzContentSHA256Mismatch");
    return true;
  }
  const std::string sum = Value(request.headers, "x-amz-checksum-crc32c");
  if (!sum.empty() && !settings_.ignore_checksums && Crc32cBase64(absl::MakeConstSpan(&body, 1)) != sum) {
    *reply = S3Error(400, "BadDigest");
    return true;
  }
  const absl::Time now = absl::Now() + settings_.clock_ahead;
  if (now - dated > absl::Minutes(15) || dated - now > absl::Minutes(15)) {
    *reply = S3Error(403, "RequestTimeTooSkewed");
    reply->headers["Date"] = absl::FormatTime("%a, %d %b %Y %H:%M:%S GMT", now, absl::UTCTimeZone());
    return true;
  }
  return false;
}

S3FakeReply S3Fake::Handle(S3FakeRequest request) {
  {
    MutexLock lock(&mu_);
    request.number = static_cast<int>(operations_.size());
    operations_.push_back(request.Operation());
  }
  S3FakeReply reply;
  if (Refuses(request, &reply)) return reply;
  if (settings_.before && settings_.before(request, &reply)) return reply;
  {
    MutexLock lock(&mu_);
    reply = Perform(request);
  }
  if (settings_.after) settings_.after(request, &reply);
  return reply;
}

S3FakeReply S3Fake::Perform(const S3FakeRequest& request) {
  const std::string root = "/" + settings_.bucket;
  if (request.path != root && request.path != root + "/" && !absl::StartsWith(request.path, root + "/")) {
    return S3Error(404, "NoSuchBucket", "there is no such bucket");
  }
  const std::string key = request.path.size() > root.size() + 1 ? request.path.substr(root.size() + 1) : "";
  const std::string operation = request.Operation();
  if (operation == "List") return ListObjects(request);
  if (operation == "PutObject") {
    return Put(request, key, request.body, Value(request.headers, "x-amz-meta-gtrain-put"));
  }
  if (operation == "GetObject" || operation == "HeadObject") return Fetch(request, key);
  if (operation == "DeleteObject") {
    bodies_.erase(key);
    marks_.erase(key);
    return {204};
  }
  if (operation == "DeleteMany") return DeleteMany(request);
  return Multipart(request, key);
}

S3FakeReply S3Fake::DeleteMany(const S3FakeRequest& request) {
  if (Value(request.headers, "content-md5") != Md5Base64(request.body)) return S3Error(400, "BadDigest");
  const absl::StatusOr<XmlElement> list = ParseXml(request.body);
  if (!list.ok() || list->name != "Delete" || list->Text("Quiet") != "true")
    return S3Error(400, "MalformedXML");
  for (const XmlElement& object : list->children) {
    bodies_.erase(object.Text("Key"));
    marks_.erase(object.Text("Key"));
  }
  return {200, {}, "<?xml version=\"1.0\"?><DeleteResult></DeleteResult>"};
}

S3FakeReply S3Fake::Put(const S3FakeRequest& request, const std::string& key, const std::string& body,
                        const std::string& mark) {
  if (Value(request.headers, "if-none-match") == "*" && bodies_.contains(key) &&
      !settings_.ignore_conditions) {
    return S3Error(412, "PreconditionFailed");
  }
  bodies_[key] = body;
  marks_[key] = mark;
  return {200, {{"ETag", "\"0123abc\""}}};
}

S3FakeReply S3Fake::Fetch(const S3FakeRequest& request, const std::string& key) {
  const auto found = bodies_.find(key);
  if (found == bodies_.end()) return S3Error(404, "NoSuchKey");
  S3FakeReply reply = {200, {{"x-amz-meta-gtrain-put", marks_[key]}}, found->second};
  const std::string range = Value(request.headers, "range");
  if (!range.empty()) {
    const std::vector<std::string> ends = absl::StrSplit(range.substr(6), '-');
    uint64_t first = 0, last = 0;
    GT_CHECK(absl::SimpleAtoi(ends[0], &first) && absl::SimpleAtoi(ends[1], &last));
    if (first >= found->second.size()) return S3Error(416, "InvalidRange");
    reply.status = 206;
    reply.body = found->second.substr(first, last - first + 1);
  }
  return reply;
}

S3FakeReply S3Fake::ListObjects(const S3FakeRequest& request) {
  const std::string prefix = Value(request.query, "prefix"), delimiter = Value(request.query, "delimiter");
  const std::string after =
      std::max(Value(request.query, "continuation-token"), Value(request.query, "start-after"));
  size_t page_keys = settings_.page_keys;
  if (size_t most; absl::SimpleAtoi(Value(request.query, "max-keys"), &most))
    page_keys = std::min(page_keys, most);
  std::string body =
      "<?xml version=\"1.0\"?><ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
  size_t entries = 0;
  std::string last;
  bool more = false;
  for (const auto& [key, unused] : bodies_) {
    if (!absl::StartsWith(key, prefix)) continue;
    const size_t cut = delimiter.empty() ? std::string::npos : key.find(delimiter, prefix.size());
    const std::string entry = cut == std::string::npos ? key : key.substr(0, cut + 1);
    if (entry <= after || entry == last) continue;
    if (entries == page_keys) {
      more = true;
      break;
    }
    ++entries;
    last = entry;
    if (cut == std::string::npos) {
      absl::StrAppend(&body, "<Contents><Key>", entry, "</Key><LastModified>", Made(settings_.age),
                      "</LastModified></Contents>");
    } else {
      absl::StrAppend(&body, "<CommonPrefixes><Prefix>", entry, "</Prefix></CommonPrefixes>");
    }
  }
  absl::StrAppend(&body, "<IsTruncated>", more ? "true" : "false", "</IsTruncated>");
  if (more) absl::StrAppend(&body, "<NextContinuationToken>", last, "</NextContinuationToken>");
  return {200, {}, body + "</ListBucketResult>"};
}

S3FakeReply S3Fake::Multipart(const S3FakeRequest& request, const std::string& key) {
  const std::string operation = request.Operation();
  if (operation == "Uploads") {
    std::string body = "<ListMultipartUploadsResult>";
    for (const auto& [id, upload] : uploads_) {
      if (!absl::StartsWith(upload.key, Value(request.query, "prefix"))) continue;
      absl::StrAppend(&body, "<Upload><Key>", upload.key, "</Key><UploadId>", id, "</UploadId><Initiated>",
                      Made(settings_.age), "</Initiated></Upload>");
    }
    return {200, {}, body + "<IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"};
  }
  if (operation == "Create") {
    const std::string id = absl::StrCat("upload-", ++upload_count_);
    uploads_[id] = {key,
                    Value(request.headers, "x-amz-meta-gtrain-put"),
                    Value(request.headers, "x-amz-checksum-algorithm") == "CRC32C",
                    {},
                    {}};
    return {200,
            {},
            absl::StrCat("<InitiateMultipartUploadResult><UploadId>", id,
                         "</UploadId></InitiateMultipartUploadResult>")};
  }
  const auto found = uploads_.find(Value(request.query, "uploadId"));
  if (found == uploads_.end()) return S3Error(404, "NoSuchUpload");
  Upload& upload = found->second;
  if (operation == "Part") {
    const int number = std::atoi(Value(request.query, "partNumber").c_str());
    upload.sums[number] = Value(request.headers, "x-amz-checksum-crc32c");
    if (upload.sums[number].empty() == upload.checksums && !settings_.ignore_checksums) {
      return S3Error(400, "InvalidRequest", "checksum type mismatch");
    }
    upload.parts[number] = request.body;
    return {200, {{"ETag", absl::StrCat("\"part", number, "\"")}}};
  }
  if (operation == "Abort") {
    uploads_.erase(found);
    return {204};
  }
  const absl::StatusOr<XmlElement> list = ParseXml(request.body);
  if (!list.ok() || list->children.size() != upload.parts.size()) return S3Error(400, "InvalidPart");
  std::string whole;
  for (const XmlElement& part : list->children) {
    const int number = std::atoi(part.Text("PartNumber").c_str());
    if (part.Text("ETag") != absl::StrCat("\"part", number, "\"")) return S3Error(400, "InvalidPart");
    if (part.Text("ChecksumCRC32C") != upload.sums[number]) return S3Error(400, "InvalidPart");
    whole += upload.parts[number];
  }
  S3FakeReply reply = Put(request, key, whole, upload.mark);
  if (reply.status != 200) return reply;
  uploads_.erase(found);
  return {200, {}, "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"};
}

}  // namespace gtrain::ckpt
