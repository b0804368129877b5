#include "bench/http_sink.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netinet/in.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/check.h"

namespace gtrain::bench {
namespace {

constexpr size_t kAtOnce = 512 << 10;  // the memory of a connection: that much of a body comes at once

HttpSink::Request RequestOf(MHD_Connection* connection, const char* url, const char* method) {
  HttpSink::Request request{method, url};
  constexpr absl::string_view kUploads = "uploads";
  request.uploads = MHD_lookup_connection_value_n(connection, MHD_GET_ARGUMENT_KIND, kUploads.data(),
                                                  kUploads.size(), nullptr, nullptr) == MHD_YES;
  const char* part = MHD_lookup_connection_value(connection, MHD_GET_ARGUMENT_KIND, "partNumber");
  if (part != nullptr && !absl::SimpleAtoi(part, &request.part)) request.part = 0;
  return request;
}

MHD_Result Send(MHD_Connection* connection, const HttpSink::Answer& answer) {
  MHD_Response* response = MHD_create_response_from_buffer(
      answer.body.size(), const_cast<char*>(answer.body.data()), MHD_RESPMEM_MUST_COPY);
  if (!answer.etag.empty()) MHD_add_response_header(response, MHD_HTTP_HEADER_ETAG, answer.etag.c_str());
  const MHD_Result queued = MHD_queue_response(connection, answer.status, response);
  MHD_destroy_response(response);
  return queued;
}

// Is called when the head of a request is there, with each piece of its body, and when that is whole.
MHD_Result Serve(void* sink, MHD_Connection* connection, const char* url, const char* method, const char*,
                 const char* data, size_t* bytes, void** state) {
  auto* request = static_cast<HttpSink::Request*>(*state);
  if (request == nullptr) {
    *state = std::make_unique<HttpSink::Request>(RequestOf(connection, url, method)).release();
    return MHD_YES;
  }
  if (*bytes == 0) return Send(connection, static_cast<HttpSink*>(sink)->Done(*request));
  static_cast<HttpSink*>(sink)->Take(*request, data, std::exchange(*bytes, 0));
  return MHD_YES;
}

void Over(void*, MHD_Connection*, void** state, MHD_RequestTerminationCode) {
  const std::unique_ptr<HttpSink::Request> request(
      static_cast<HttpSink::Request*>(std::exchange(*state, nullptr)));
}

// As S3 would. No object is ever there.
HttpSink::Answer AnswerTo(const HttpSink::Request& request) {
  // A store is asked whether it compares checksums: by a small object with a wrong one.
  if (request.method == "PUT" && absl::StrContains(request.path, "/probe-"))
    return {400, "<Error><Code>BadDigest</Code></Error>", ""};
  if (request.method == "PUT") return {200, "", "\"0123abc\""};
  if (request.method == "POST" && request.uploads) {
    return {200, "<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>",
            ""};
  }
  if (request.method == "POST")
    return {200, "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>", ""};
  return {request.method == "DELETE" ? 204u : 404u, "", ""};
}

}  // namespace

HttpSink::HttpSink(const Settings& settings) : settings_(settings) {
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  daemon_ = MHD_start_daemon(MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD, 0, nullptr,
                             nullptr, &Serve, this, MHD_OPTION_SOCK_ADDR, &at, MHD_OPTION_NOTIFY_COMPLETED,
                             &Over, nullptr, MHD_OPTION_CONNECTION_MEMORY_LIMIT, kAtOnce, MHD_OPTION_END);
  GT_CHECK(daemon_ != nullptr);
  port_ = MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_BIND_PORT)->port;
}

HttpSink::~HttpSink() { MHD_stop_daemon(daemon_); }

std::string HttpSink::endpoint() const { return absl::StrCat("http://127.0.0.1:", port_); }

void HttpSink::Take(Request& request, const char* data, size_t bytes) {
  if (settings_.keep) request.kept.append(data, bytes);
  request.bytes += bytes;
  Pace(bytes);
}

HttpSink::Answer HttpSink::Done(Request& request) {
  MutexLock lock(&mu_);
  if (rng_.Unit() < settings_.refuse) return {503, "<Error><Code>SlowDown</Code></Error>", ""};
  Answer answer = AnswerTo(request);
  if (request.method == "PUT" && answer.status == 200) {
    put_bytes_ += request.bytes;
    if (settings_.keep) kept_[request.part] = std::move(request.kept);
  }
  return answer;
}

std::string HttpSink::TakeKept() {
  MutexLock lock(&mu_);
  std::string all;
  for (const auto& [number, part] : kept_) all += part;
  kept_.clear();
  return all;
}

void HttpSink::Pace(uint64_t bytes) {
  if (settings_.bytes_per_second == 0 || bytes == 0) return;
  int64_t until;
  {
    MutexLock lock(&mu_);
    const int64_t now = absl::GetCurrentTimeNanos();
    next_ns_ = std::max(next_ns_, now - 10'000'000) +
               static_cast<int64_t>(1e9 * static_cast<double>(bytes) /
                                    static_cast<double>(settings_.bytes_per_second));
    until = next_ns_ - now;
  }
  if (until > 0) absl::SleepFor(absl::Nanoseconds(until));
}

}  // namespace gtrain::bench
