// One HTTP exchange: bounded in time and bytes, no proxy surprises, no redirects (S12, S13).
//
// A program that uses HTTP all the time links the client (curl_client.h); a program that seldom does, like an
// agent, loads it when it is needed (LoadClient), so that every other start goes without libcurl and its
// libraries.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace gtrain::http {

struct Request {
  std::string method = "GET";
  std::string url;
  std::map<std::string, std::string> headers;
  std::vector<absl::string_view> body;        // sent one after the other; the caller's memory
  absl::Duration timeout = absl::Minutes(2);  // of the whole exchange
  // Below 1 KiB/s for this long ends it.
  absl::Duration stalled = absl::Seconds(20);
  size_t reply_bytes_max = 1 << 20;
  absl::Span<char> into;  // where a 200 or 206 reply goes if not empty; longer ones are an error
  bool proxy = true;      // $HTTPS_PROXY and friends; never for metadata services
};

struct Reply {
  int status = 0;
  std::map<std::string, std::string> headers;  // lower-case names
  std::string body;                            // empty if it went `into`
  size_t received = 0;                         // bytes of the body
};

// Connections are kept between calls. Thread-safe; blocks up to the request's timeout.
class Client {
 public:
  virtual ~Client() = default;

  // Unavailable: no (whole) answer came, and the request may have been carried out. ResourceExhausted: the
  // answer is larger than allowed. Any status code is an answer.
  virtual absl::StatusOr<Reply> Do(const Request& request) = 0;
};

// Loads the client of libgtrain_http.so (or $GTRAIN_HTTP_MODULE). NotFound: this gtrain was built or
// installed without it.
absl::StatusOr<std::unique_ptr<Client>> LoadClient();

// The entry of libgtrain_http.so. Built together with its loader; the number catches a stray library.
inline constexpr uint32_t kModuleAbi = 1;
inline constexpr char kModuleEntry[] = "gtrain_http_module";
struct Module {
  uint32_t abi = kModuleAbi;
  absl::StatusOr<std::unique_ptr<Client>> (*make)() = nullptr;
};

}  // namespace gtrain::http
