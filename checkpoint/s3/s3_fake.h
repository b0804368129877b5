// An S3 server of the tests: real HTTP on loopback, objects in memory, every request's signature checked, and
// each fault of the S rows on demand. Path style. Not for use outside tests.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "checkpoint/s3/sigv4.h"

struct MHD_Daemon;

namespace gtrain::ckpt {

struct S3FakeRequest {
  int number = 0;  // from 0
  std::string method;
  std::string path;  // "/bucket/key", decoded
  std::map<std::string, std::string> query;
  std::map<std::string, std::string> headers;  // lower-case names
  std::string body;

  // "PutObject", "GetObject", "HeadObject", "DeleteObject", "DeleteMany", "List", "Uploads", "Create",
  // "Part", "Complete", "Abort".
  std::string Operation() const;
};

struct S3FakeReply {
  int status = 200;
  std::map<std::string, std::string> headers;
  std::string body;
  bool lost = false;  // the connection is closed instead
  bool slow = false;  // the body never ends: one byte now and then
};

class S3Fake {
 public:
  struct Settings {
    std::string bucket = "bucket";
    S3Credentials credentials = {"AKIDEXAMPLE", "secret"};
    bool ignore_conditions = false;  // S5
    bool ignore_checksums = false;   // neither compared nor asked for
    absl::Duration age;              // how old everything looks in listings
    size_t page_keys = 3;            // keys a page of a listing: small, so that paging is exercised
    absl::Duration clock_ahead;      // S14: refuses requests dated more than 15 minutes off
    // Asked before a request is carried out. Returning true: the reply is sent and nothing happens.
    std::function<bool(const S3FakeRequest&, S3FakeReply*)> before;
    // Asked after it was carried out; may change the reply.
    std::function<void(const S3FakeRequest&, S3FakeReply*)> after;
  };

  explicit S3Fake(Settings settings);
  ~S3Fake();

  std::string endpoint() const;                 // "http://127.0.0.1:PORT"
  std::vector<std::string> Operations() const;  // of each request so far
  size_t OpenUploads() const;

  // For the server's own thread.
  S3FakeReply Handle(S3FakeRequest request);

 private:
  struct Upload {
    std::string key, mark;
    bool checksums = false;  // each part must have one
    std::map<int, std::string> sums;
    std::map<int, std::string> parts;
  };
  S3FakeReply Perform(const S3FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  S3FakeReply Put(const S3FakeRequest& request, const std::string& key, const std::string& body,
                  const std::string& mark) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  S3FakeReply DeleteMany(const S3FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  S3FakeReply Fetch(const S3FakeRequest& request, const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  S3FakeReply ListObjects(const S3FakeRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  S3FakeReply Multipart(const S3FakeRequest& request, const std::string& key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Refuses(const S3FakeRequest& request, S3FakeReply* reply) const;

  const Settings settings_;
  MHD_Daemon* daemon_ = nullptr;
  int port_ = 0;
  mutable Mutex mu_;
  std::map<std::string, std::string> bodies_, marks_;
  std::map<std::string, Upload> uploads_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> operations_ ABSL_GUARDED_BY(mu_);
  int upload_count_ ABSL_GUARDED_BY(mu_) = 0;
};

// An error as S3 says it.
S3FakeReply S3Error(int status, const std::string& code, const std::string& message = "scripted");

}  // namespace gtrain::ckpt
