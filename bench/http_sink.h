// An HTTP server on loopback that throws away what is put: where uploads end that are measured. It answers as
// much of S3 as a multipart upload needs, says that it compares checksums, compares nothing and keeps
// nothing.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/rng.h"
#include "base/unique_fd.h"

namespace gtrain::bench {

// Thread-safe. A thread a connection.
class HttpSink {
 public:
  struct Settings {
    uint64_t bytes_per_second = 0;  // of all connections together; 0 = as fast as it goes
    double refuse = 0;              // this share of the requests is answered with 503
  };
  explicit HttpSink(const Settings& settings);
  ~HttpSink();
  HttpSink(const HttpSink&) = delete;
  HttpSink& operator=(const HttpSink&) = delete;

  int port() const { return port_; }
  std::string endpoint() const;  // "http://127.0.0.1:PORT"

 private:
  void Accept();
  void Serve(int fd);
  // Reads `bytes` and forgets them; false when the connection ended before.
  bool Discard(int fd, uint64_t bytes);
  void Pace(uint64_t bytes);

  const Settings settings_;
  UniqueFd listener_;
  int port_ = 0;
  Mutex mu_;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  std::vector<int> open_ ABSL_GUARDED_BY(mu_);
  bool end_ ABSL_GUARDED_BY(mu_) = false;
  int64_t next_ns_ ABSL_GUARDED_BY(mu_) = 0;  // when the next bytes may be taken
  Rng rng_ ABSL_GUARDED_BY(mu_) = Rng(1);
  std::thread acceptor_;  // last
};

}  // namespace gtrain::bench
