// An HTTP server on loopback that throws bodies away, for measured uploads. It answers as much of S3 as a
// multipart upload needs and says that it compares checksums. Bodies are counted and dropped as they come,
// whichever program uploads: the work of a server is not what is measured. A sink that keeps bodies shows,
// before the measurements, that they are whole. The server is libmicrohttpd's.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "base/mutex.h"
#include "base/rng.h"

struct MHD_Daemon;

namespace gtrain::bench {

// Thread-safe. A thread a connection.
class HttpSink {
 public:
  struct Settings {
    uint64_t bytes_per_second = 0;  // of all connections together; 0 = as fast as it goes
    double refuse = 0;              // this share of the requests is answered with 503
    bool keep = false;              // what is put
  };
  explicit HttpSink(const Settings& settings);
  ~HttpSink();
  HttpSink(const HttpSink&) = delete;
  HttpSink& operator=(const HttpSink&) = delete;

  int port() const { return port_; }
  std::string endpoint() const;  // "http://127.0.0.1:PORT"
  // Bytes of the bodies of all puts that were answered well so far.
  uint64_t put_bytes() const { return put_bytes_; }
  // Returns the object that was put under the only key, parts in the order of their numbers; empties it.
  std::string TakeKept();

  // For the server.
  struct Request {
    std::string method, path;
    bool uploads = false;  // "?uploads"
    int part = 0;          // "?partNumber=7"; 0 without
    uint64_t bytes = 0;    // of its body
    std::string kept;
  };
  struct Answer {
    unsigned status = 200;
    std::string body, etag;
  };
  void Take(Request& request, const char* data, size_t bytes);
  Answer Done(Request& request);

 private:
  void Pace(uint64_t bytes);

  const Settings settings_;
  MHD_Daemon* daemon_ = nullptr;
  int port_ = 0;
  std::atomic<uint64_t> put_bytes_{0};
  Mutex mu_;
  std::map<int, std::string> kept_ ABSL_GUARDED_BY(mu_);  // by number of the part, 0 of a whole
  int64_t next_ns_ ABSL_GUARDED_BY(mu_) = 0;              // when the next bytes may be taken
  Rng rng_ ABSL_GUARDED_BY(mu_) = Rng(1);
};

}  // namespace gtrain::bench
