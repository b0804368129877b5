#include "net/http/curl_client.h"

#include <curl/curl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"

namespace gtrain::http {
namespace {

constexpr size_t kHandlesMax = 64;  // kept; more are made and thrown away
constexpr size_t kHeaderBytesMax = 64 << 10;

struct Handle {
  CURL* curl = nullptr;
  curl_socket_t socket = CURL_SOCKET_BAD;  // that libcurl made last
};

struct Exchange {
  const Request* request = nullptr;
  Reply reply;
  Handle* handle = nullptr;
  size_t part = 0, offset = 0;  // of the body that is sent
  size_t header_bytes = 0;
  bool too_large = false;
};

size_t SendBody(char* out, size_t size, size_t count, void* user) {
  auto* e = static_cast<Exchange*>(user);
  size_t room = size * count, sent = 0;
  while (room > 0 && e->part < e->request->body.size()) {
    const absl::string_view rest = e->request->body[e->part].substr(e->offset);
    const size_t n = std::min(room, rest.size());
    std::memcpy(out + sent, rest.data(), n);
    sent += n;
    room -= n;
    e->offset += n;
    if (n == rest.size()) {
      ++e->part;
      e->offset = 0;
    }
  }
  return sent;
}

// libcurl asks for this when a kept connection turns out to be dead.
int Rewind(void* user, curl_off_t offset, int origin) {
  auto* e = static_cast<Exchange*>(user);
  if (origin != SEEK_SET || offset != 0) return CURL_SEEKFUNC_CANTSEEK;
  e->part = e->offset = 0;
  return CURL_SEEKFUNC_OK;
}

size_t TakeBody(char* data, size_t size, size_t count, void* user) {
  auto* e = static_cast<Exchange*>(user);
  const size_t bytes = size * count;
  long status = 0;
  curl_easy_getinfo(e->handle->curl, CURLINFO_RESPONSE_CODE, &status);
  const bool direct = !e->request->into.empty() && (status == 200 || status == 206);
  const size_t room = direct ? e->request->into.size() : e->request->reply_bytes_max;
  if (e->reply.received + bytes > room) {
    e->too_large = true;
    return 0;
  }
  if (direct) {
    std::memcpy(e->request->into.data() + e->reply.received, data, bytes);
  } else {
    e->reply.body.append(data, bytes);
  }
  e->reply.received += bytes;
  return bytes;
}

int NoteSocket(void* user, curl_socket_t socket, curlsocktype) {
  static_cast<Handle*>(user)->socket = socket;
  return CURL_SOCKOPT_OK;
}

// A server that sends headers and body one after the other with Nagle's algorithm on, as Ceph's gateway does
// by default, holds the body back until the headers are acknowledged, which Linux delays by 40 ms.
void AcknowledgeAtOnce(curl_socket_t socket) {
  const int on = 1;
  (void)setsockopt(socket, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof(on));  // else the body comes later
}

size_t TakeHeader(char* data, size_t size, size_t count, void* user) {
  auto* e = static_cast<Exchange*>(user);
  const absl::string_view line(data, size * count);
  if (line == "\r\n") AcknowledgeAtOnce(e->handle->socket);
  e->header_bytes += line.size();
  if (e->header_bytes > kHeaderBytesMax) {
    e->too_large = true;
    return 0;
  }
  if (absl::StartsWith(line, "HTTP/")) e->reply.headers.clear();  // of a "100 Continue" before
  const size_t colon = line.find(':');
  if (colon != absl::string_view::npos) {
    e->reply.headers[absl::AsciiStrToLower(line.substr(0, colon))] =
        std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
  }
  return line.size();
}

class CurlClient final : public Client {
 public:
  explicit CurlClient(std::string ca_bundle) : ca_bundle_(std::move(ca_bundle)) {}
  ~CurlClient() override {
    for (const auto& handle : idle_) curl_easy_cleanup(handle->curl);
  }

  absl::StatusOr<Reply> Do(const Request& request) override {
    std::unique_ptr<Handle> handle = Take();
    CURL* const curl = handle->curl;
    if (curl == nullptr) return absl::ResourceExhaustedError("no memory for an HTTP connection");
    Exchange exchange;
    exchange.request = &request;
    exchange.handle = handle.get();
    curl_slist* headers = curl_slist_append(nullptr, "Expect:");
    for (const auto& [name, value] : request.headers) {
      headers = curl_slist_append(headers, absl::StrCat(name, value.empty() ? ";" : ": ", value).c_str());
    }
    char error[CURL_ERROR_SIZE] = "";
    SetUp(curl, request, headers, &exchange, error);
    const CURLcode code = curl_easy_perform(curl);
    long status = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    exchange.reply.status = static_cast<int>(status);
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, nullptr);
    curl_slist_free_all(headers);
    Put(std::move(handle));
    if (exchange.too_large) {
      return absl::ResourceExhaustedError(
          absl::StrCat(request.method, " ", request.url, ": the answer is too large"));
    }
    if (code != CURLE_OK) {
      return absl::UnavailableError(absl::StrCat(request.method, " ", request.url, ": ",
                                                 error[0] != '\0' ? error : curl_easy_strerror(code)));
    }
    return std::move(exchange.reply);
  }

 private:
  void SetUp(CURL* curl, const Request& request, curl_slist* headers, Exchange* exchange, char* error) {
    curl_off_t body_bytes = 0;
    for (const absl::string_view part : request.body) body_bytes += static_cast<curl_off_t>(part.size());
    curl_easy_reset(curl);
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, error);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_SOCKOPTFUNCTION, &NoteSocket);
    curl_easy_setopt(curl, CURLOPT_SOCKOPTDATA, exchange->handle);
    curl_easy_setopt(curl, CURLOPT_URL, request.url.c_str());
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, 0L);
    if (!request.proxy) curl_easy_setopt(curl, CURLOPT_PROXY, "");
    if (!ca_bundle_.empty()) curl_easy_setopt(curl, CURLOPT_CAINFO, ca_bundle_.c_str());
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request.method.c_str());
    if (request.method == "HEAD") {
      curl_easy_setopt(curl, CURLOPT_NOBODY, 1L);
    } else if (request.method == "PUT" || request.method == "POST") {
      curl_easy_setopt(curl, CURLOPT_UPLOAD, 1L);
      curl_easy_setopt(curl, CURLOPT_INFILESIZE_LARGE, body_bytes);
      curl_easy_setopt(curl, CURLOPT_READFUNCTION, &SendBody);
      curl_easy_setopt(curl, CURLOPT_READDATA, exchange);
      curl_easy_setopt(curl, CURLOPT_SEEKFUNCTION, &Rewind);
      curl_easy_setopt(curl, CURLOPT_SEEKDATA, exchange);
      curl_easy_setopt(curl, CURLOPT_UPLOAD_BUFFERSIZE, 1L << 20);
    }
    curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, 512L << 10);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, &TakeBody);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, exchange);
    curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, &TakeHeader);
    curl_easy_setopt(curl, CURLOPT_HEADERDATA, exchange);
    const absl::Duration connect = std::min(request.timeout, absl::Seconds(10));
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(absl::ToInt64Milliseconds(connect)));
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, static_cast<long>(absl::ToInt64Milliseconds(request.timeout)));
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 1024L);
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME,
                     std::max(1L, static_cast<long>(absl::ToInt64Seconds(request.stalled))));
  }

  std::unique_ptr<Handle> Take() {
    MutexLock lock(&mu_);
    if (idle_.empty()) return std::make_unique<Handle>(Handle{curl_easy_init()});
    std::unique_ptr<Handle> handle = std::move(idle_.back());
    idle_.pop_back();
    return handle;
  }
  void Put(std::unique_ptr<Handle> handle) {
    MutexLock lock(&mu_);
    if (idle_.size() < kHandlesMax) {
      idle_.push_back(std::move(handle));
    } else {
      curl_easy_cleanup(handle->curl);
    }
  }

  const std::string ca_bundle_;
  Mutex mu_;
  std::vector<std::unique_ptr<Handle>> idle_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> MakeCurlClient(const std::string& ca_bundle) {
  static const CURLcode started = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (started != CURLE_OK) {
    return absl::InternalError(
        absl::StrCat("libcurl does not start: ", curl_easy_strerror(started),
                     "; install libcurl4 again, with the TLS library it was built for"));
  }
  return std::make_unique<CurlClient>(ca_bundle);
}

}  // namespace gtrain::http
